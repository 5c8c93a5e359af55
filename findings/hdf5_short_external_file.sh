#!/bin/bash
# An HDF5 dataset with external storage reads as zeros, without an error, where the external file
# has become shorter than the dataset says.  A file that is gone is an error.  libhdf5 1.14.4 and
# 2.0.0 do the same.  It makes venvs with h5py of its own.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
cat >look.py <<'PYTHON'
import os

import h5py
import numpy as np

values = np.arange(1, 9, dtype="f4")
values.tofile("values.bin")
with h5py.File("view.h5", "w") as file:
    file.create_dataset("w", (8,), "f4", external=[("values.bin", 0, 32)])


def read():
    try:
        with h5py.File("view.h5") as file:
            return file["w"][()].astype(int).tolist()
    except OSError:
        return "OSError"


seen = {"whole": read()}
os.truncate("values.bin", 16)
seen["half of it"] = read()
os.truncate("values.bin", 0)
seen["empty"] = read()
os.remove("values.bin")
seen["gone"] = read()
print(f"h5py {h5py.__version__}, libhdf5 {h5py.version.hdf5_version}")
for state, values in seen.items():
    print(f"  {state}: {values}")
assert seen["half of it"] == [1, 2, 3, 4, 0, 0, 0, 0]
assert seen["empty"] == [0] * 8
assert seen["gone"] == "OSError"
PYTHON

echo "expected: an error for a file that ends too early, as for one that is gone"
for version in 3.16.0 3.12.1; do
    python3 -m venv --clear venv
    venv/bin/pip install --quiet --disable-pip-version-check "h5py==$version" numpy==2.2.6
    venv/bin/python look.py
done
