#!/bin/bash
# `make demo`: the steps of docs/consortium.md, typed by a script. Twelve silos and a server on this machine, three
# methods, one report; everything is stopped at the end, also after Ctrl-C or a failure.
#   .ci/demo.sh SILOFL     the run is in runs/demo, the silos' data, which are public, in runs/demo-silos/data
set -eu
silofl=$1 file=$(dirname "$0")/demo.yaml out=runs/demo data=runs/demo-silos/data
if [ -n "$(ls -A $out 2>/dev/null)" ] && [ ! -f $out/config.toml ]; then
    echo "demo: $out holds something else: move it away" >&2
    exit 2
fi
stop() { "$silofl" down --federation silofl-demo >/dev/null 2>&1 || true; }
stop # one that was killed
trap stop EXIT
trap 'exit 130' INT TERM
rm -rf $out $data
"$silofl" up "$file"
"$silofl" run --connection silofl-demo --strategy local,fedavg,fedala --rounds 15 --out $out
mkdir -p $data
cp "${XDG_STATE_HOME:-$HOME/.local/state}"/silofl/silofl-demo/data/* $data/
cp $data/manifest.json $out/
"$silofl" report $out
