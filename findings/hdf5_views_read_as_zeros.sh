#!/bin/bash
# Readers of HDF5 without libhdf5 do not follow external storage and virtual datasets. They see a
# dataset of the right name, shape and type that has no bytes in its own file, and most of them
# take it for one that nobody has written: pyfive, kerchunk and VirtualiZarr give the fill value.
# There is no error and no warning. A virtual dataset is None in pyfive. hidefix does not list
# either.
#
# Seen, of 1 to 8, where h5py reads them:
#   pyfive 1.3.0          external: zeros    virtual: None
#   kerchunk 0.2.10       external: NaN      virtual: NaN      (xarray makes NaN of the fill value)
#   VirtualiZarr 2.5.1    external: zeros    virtual: zeros
#   hidefix 0.12.0        external: absent   virtual: absent
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check h5py==3.16.0 numpy==2.4.6 pyfive==1.3.0 \
    kerchunk==0.2.10 virtualizarr==2.5.1 hidefix==0.12.0 xarray==2026.9.0 zarr==3.1.6

cat >look.py <<'PYTHON'
import warnings
from pathlib import Path

import h5py
import hidefix
import numpy as np
import pyfive
import xarray
from kerchunk.hdf import SingleHdf5ToZarr
from obspec_utils.registry import ObjectStoreRegistry
from obstore.store import LocalStore
from virtualizarr.parsers import HDFParser

warnings.simplefilter("error", UserWarning)
values = np.arange(1, 9, dtype="f4").reshape(2, 4)
values.tofile("values.bin")
with h5py.File("external.h5", "w") as file:
    file.create_dataset("w", (2, 4), "f4", external=[(str(Path("values.bin").resolve()), 0, 32)])
with h5py.File("columns.h5", "w") as file:
    file["left"], file["right"] = values[:, :2], values[:, 2:]
layout = h5py.VirtualLayout((2, 4), "f4")
layout[:, :2] = h5py.VirtualSource("columns.h5", "left", (2, 2))
layout[:, 2:] = h5py.VirtualSource("columns.h5", "right", (2, 2))
with h5py.File("virtual.h5", "w") as file:
    file.create_virtual_dataset("w", layout)


def with_h5py(path):
    with h5py.File(path) as file:
        return file["w"][()]


def with_pyfive(path):
    with pyfive.File(path) as file:
        assert file["w"].shape == (2, 4)
        return file["w"][()]


def with_kerchunk(path):
    references = SingleHdf5ToZarr(path).translate()
    options = {"fo": references, "remote_protocol": "file"}
    backend = {"consolidated": False, "storage_options": options}
    return xarray.open_dataset("reference://", engine="zarr", backend_kwargs=backend)["w"].values


def with_virtualizarr(path):
    registry = ObjectStoreRegistry({"file://": LocalStore()})
    store = HDFParser()(url=f"file://{Path(path).resolve()}", registry=registry)
    return xarray.open_zarr(store, consolidated=False, zarr_format=3)["w"].values


def with_hidefix(path):
    listed = hidefix.Index(path).datasets()
    assert listed == []
    return "absent"


def word(read):
    if read is None or isinstance(read, str):
        return str(read)
    assert read.shape == (2, 4)
    kinds = {"zeros": not read.any(), "NaN": np.isnan(read).all(), "right": (read == values).all()}
    return next(name for name, holds in kinds.items() if holds)


seen = {}
for reader in (with_h5py, with_pyfive, with_kerchunk, with_virtualizarr, with_hidefix):
    name = reader.__name__.removeprefix("with_")
    seen[name] = tuple(word(reader(f"{kind}.h5")) for kind in ("external", "virtual"))
    print("{:13} external: {:8} virtual: {}".format(name, *seen[name]))
assert seen == {
    "h5py": ("right", "right"),
    "pyfive": ("zeros", "None"),
    "kerchunk": ("NaN", "NaN"),
    "virtualizarr": ("zeros", "zeros"),
    "hidefix": ("absent", "absent"),
}
PYTHON
echo "expected: the values, or an error"
venv/bin/python look.py
