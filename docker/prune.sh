#!/bin/sh
# Take out of a folder of packages what no container runs: headers, static libraries, tests, and the installers.
set -eu
cd "$1"
rm -rf torch/include torch/share torch/test pip pip-* uv uv-*
[ ! -d torch/bin ] || find torch/bin -type f ! -name torch_shm_manager -delete
find . -path './torch/lib/*.a' -delete
for name in sympy networkx mpmath numpy scipy sklearn pandas matplotlib skimage; do
    [ ! -d "$name" ] || find "$name" -type d -name tests -prune -exec rm -rf {} +
done
