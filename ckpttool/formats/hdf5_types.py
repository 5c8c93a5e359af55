"""The types of HDF5 datasets: which stands for which element type of MindSpore.

Bytes
-----
All are little endian.  The type of a dataset is a datatype message of its header:

* Integers and IEEE floats are HDF5's own (H5T_STD_I8LE to H5T_STD_U64LE, H5T_IEEE_F16LE to F64LE).
* ``Bool`` is an enumeration of 1 byte, FALSE = 0, TRUE = 1; complex types are compounds of the
  members r and i.  h5py reads both as numpy's.
* ``BFloat16``, ``Float8E4M3FN`` and ``Float8E5M2`` are floats whose sign, exponent and mantissa
  fill 2, 1 and 1 bytes from the top: (8, 7), (4, 3) and (5, 2) bits, bias 127, 7 and 15.
* What HDF5 has no type for is unsigned bytes, with an attribute ``dtype``: its name, a scalar
  string of fixed length.

Source
------
The HDF5 file format specification (datatype message); h5py's "Special types".
"""

from __future__ import annotations

import numpy as np
from h5py import h5a, h5d, h5s, h5t

from ckpttool.model.dtypes import DTYPES

_NAMED = b"dtype"  # the attribute


def _hdf5_types() -> dict[str, h5t.TypeID]:
    """Return the HDF5 type for each name in the ``hdf5`` column of `DTYPES`."""
    types = {
        name: h5t.py_create(np.dtype(name).newbyteorder("<"), logical=True)
        for name in (
            *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
            *("float16", "float32", "float64", "complex64", "complex128"),
        )
    }
    types["bfloat16"] = _float_type(nbytes=2, exponent_bits=8, mantissa_bits=7, bias=127)
    types["float8_e4m3"] = _float_type(nbytes=1, exponent_bits=4, mantissa_bits=3, bias=7)
    types["float8_e5m2"] = _float_type(nbytes=1, exponent_bits=5, mantissa_bits=2, bias=15)
    types["bytes"] = types["uint8"]
    return types


def _float_type(nbytes: int, exponent_bits: int, mantissa_bits: int, bias: int) -> h5t.TypeID:
    """Return a little-endian IEEE-like type: sign, exponent and mantissa fill it from the top."""
    kind = h5t.IEEE_F32LE.copy()
    kind.set_fields(exponent_bits + mantissa_bits, mantissa_bits, exponent_bits, 0, mantissa_bits)
    kind.set_ebias(bias)
    kind.set_precision(8 * nbytes)
    kind.set_size(nbytes)
    return kind


TYPES = _hdf5_types()


def fixed_string(nbytes: int) -> h5t.TypeID:
    """Return the type of UTF-8 text of fixed length, padded with NUL."""
    kind = h5t.C_S1.copy()
    kind.set_size(nbytes)
    kind.set_strpad(h5t.STR_NULLPAD)
    kind.set_cset(h5t.CSET_UTF8)
    return kind


def name_dtype(dataset: h5d.DatasetID, dtype: str) -> None:
    """Write the element type of a dataset of bytes into an attribute."""
    kind = fixed_string(len(dtype))
    attribute = h5a.create(dataset, _NAMED, kind, h5s.create(h5s.SCALAR))
    attribute.write(np.array(dtype.encode()), kind)


def _dtypes_by_size() -> dict[int, list[tuple[h5t.TypeID, str]]]:
    by_size: dict[int, list[tuple[h5t.TypeID, str]]] = {}
    for dtype in DTYPES.values():
        if dtype.hdf5 != "bytes":
            by_size.setdefault(dtype.itemsize, []).append((TYPES[dtype.hdf5], dtype.name))
    return by_size


_DTYPES_BY_SIZE = _dtypes_by_size()  # a comparison of types takes a microsecond


def find_dtype(kind: h5t.TypeID, dataset: h5d.DatasetID) -> str | None:
    """Return MindSpore's name of a dataset's type, or None if it has none."""
    for known, name in _DTYPES_BY_SIZE.get(kind.get_size(), ()):
        if kind == known:
            return _named_dtype(dataset) or name if known is TYPES["bytes"] else name
    return None


def _named_dtype(dataset: h5d.DatasetID) -> str | None:
    """Return the element type that an attribute names for bytes; None if there is none.

    Read only a string of fixed length, as `create` writes it: libhdf5 can hang on the heap of
    strings of variable length in a damaged file.
    """
    if not h5a.exists(dataset, _NAMED):
        return None
    attribute = h5a.open(dataset, _NAMED)
    kind = attribute.get_type()
    if not isinstance(kind, h5t.TypeStringID) or kind.is_variable_str() or attribute.shape != ():
        return None
    data = np.empty((), f"S{kind.get_size()}")
    attribute.read(data, kind)
    named = data.item().decode(errors="replace")
    return named if named in DTYPES and DTYPES[named].hdf5 == "bytes" else None


def why_not(kind: h5t.TypeID) -> str:
    """Return why a type is not an element type of MindSpore, and what to do."""
    if isinstance(kind, h5t.TypeAtomicID) and kind.get_order() == h5t.ORDER_BE:
        return "stored big-endian; write the dataset again in little-endian order"
    word = {
        h5t.INTEGER: "integer",
        h5t.FLOAT: "float",
        h5t.COMPOUND: "compound",
        h5t.ENUM: "enumeration",
    }.get(kind.get_class(), "other type")
    return (
        f"HDF5 {word} of {kind.get_size()} bytes, which is no element type of MindSpore; "
        "write the dataset again with one that is, or leave it out"
    )
