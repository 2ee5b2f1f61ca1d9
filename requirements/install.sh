#!/bin/sh
# Install what the lock files list for a part, and PyTorch, by version and SHA-256: a file with another sum is refused,
# and nothing is built or resolved on the way.
#
#   sh requirements/install.sh dev|silo|server
#
# PYTHON: whose environment (default: python). WHEELS: a folder of wheels that come before the index. TORCH_INDEX: an
# index with CPU builds of PyTorch, asked for PyTorch alone, and only where no wheel of it lies in WHEELS. Where pip sees
# a CPU build anyway (PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS, WHEELS) it is taken; else that of the index, with CUDA.
set -eu
here=$(dirname "$0")
python=${PYTHON:-python}
quiet=--quiet; [ ! -t 1 ] || quiet= # on a terminal pip shows its bars
pip() { "$python" -m pip install $quiet --no-deps --only-binary :all: ${WHEELS:+--find-links "$WHEELS"} "$@"; }
install() { # ... --requirement FILE, with a sign of life: a part takes minutes
    for file; do :; done
    echo "installing $(grep -c == "$file") packages of ${file##*/}" >&2
    pip --require-hashes "$@"
}

cpu=$(sed -n 's/^\(torch==[^ ]*\).*/\1/p' "$here/torch-cpu.txt")
if [ -n "${TORCH_INDEX:-}" ] && ! ls "${WHEELS:-/nowhere}"/torch-*.whl >/dev/null 2>&1; then
    install --index-url "$TORCH_INDEX" --requirement "$here/torch-cpu.txt"
elif pip --quiet --dry-run "$cpu" >/dev/null 2>&1; then
    install --requirement "$here/torch-cpu.txt"
else
    install --requirement "$here/torch-cuda.txt"
fi
install --requirement "$here/silo.txt"
[ "$1" = silo ] || install --requirement "$here/server.txt"
[ "$1" != dev ] || install --requirement "$here/dev.txt"
"$python" -m pip check # nothing is missing
# A CPU build of PyTorch from one index, and torchvision from another, whose operators want CUDA's
[ "$1" = silo ] || "$python" -W ignore -c 'import torchvision' 2>/dev/null || echo \
    "note: the index has no torchvision for $cpu; transforms.v2 and Lightning do not run (docs/own-trainer.md)" >&2
