#!/bin/sh
# Install the requirements of a file into the active environment; wheels in /wheels come before the index.
set -eu
# An index with CPU builds of PyTorch is asked for PyTorch alone, and only where no wheel of it lies in /wheels.
torch=$(grep '^torch' "$1" || true)
if [ -n "${TORCH_INDEX:-}" ] && ! ls /wheels/torch-*.whl >/dev/null 2>&1; then
    python -m pip install --quiet --index-url "$TORCH_INDEX" $torch
fi
python -m pip install --quiet --find-links /wheels --requirement "$1"
