#!/bin/sh
# Pin the images' base: write into docker/Dockerfile the digest of the image that its tag names now, for all processors.
#
#   sh docker/pin-base.sh [TAG]     TAG: another one, such as python:3.11.15-slim (default: the Dockerfile's)
#
# `git diff` shows what moved; `silofl compose`, `docker compose build` take it.
set -eu
file=$(dirname "$0")/Dockerfile
tag=${1:-$(sed -n 's/^ARG SILOFL_BASE=\([^@ ]*\).*/\1/p' "$file")}
digest=$(docker buildx imagetools inspect --format '{{.Manifest.Digest}}' "$tag")
if ! printf '%s\n' "$digest" | grep -Eqx 'sha256:[0-9a-f]{64}'; then
    echo "$tag: the registry gives no digest ($digest); docker/Dockerfile stays as it is" >&2
    exit 1
fi
sed -i.old "s|^ARG SILOFL_BASE=.*|ARG SILOFL_BASE=$tag@$digest|" "$file" && rm "$file.old"
echo "$tag@$digest"
