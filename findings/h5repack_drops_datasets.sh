#!/bin/bash
# h5repack leaves out datasets whose filter it lacks (h5py's LZF here) and ends with exit code 0.
# It needs h5repack on the PATH (Debian: hdf5-tools) and makes a venv with h5py of its own.
set -euo pipefail

command -v h5repack >/dev/null || { echo "h5repack is not on the PATH (Debian: hdf5-tools)"; exit 2; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check h5py==3.16.0 numpy==2.4.6

venv/bin/python - <<'PYTHON'
import h5py

with h5py.File("old.h5", "w") as file:
    file.create_dataset("layer.weight", data=[[1.0, 2.0], [3.0, 4.0]], compression="lzf")
    file.create_dataset("layer.bias", data=[5.0, 6.0], compression="gzip")
PYTHON

code=0
h5repack -l CONTI old.h5 new.h5 2>warning || code=$?
names=$(venv/bin/python -c 'import h5py; print(*sorted(h5py.File("new.h5")))')

h5repack --version
echo "expected: both datasets, or an exit code that is not 0"
echo "seen:     exit code $code, datasets: $names"
echo "stderr:   $(head -n 1 warning)"
test "$code" = 0 && test "$names" = layer.bias
