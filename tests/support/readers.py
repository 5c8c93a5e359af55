"""Small independent readers: what a checkpoint file holds, as plain bytes.

They exist to judge the package and therefore share no code with it. Each reader walks its format
in the most direct way, reads whole files, and trusts them: a result that is not exactly what the
format says ends in an exception, which is what a test wants.

All formats read to the same thing, ``{name: Entry}``, and an entry compares equal whichever
format it was written in: the dtype is MindSpore's name, the bytes are little endian in C order, a
string is UTF-32-LE under the shape ``(0,)`` as a ``.ckpt`` keeps it.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import NamedTuple

import numpy as np

NUMPY_TYPES = {
    "Bool": "?",
    "Int8": "<i1",
    "Int16": "<i2",
    "Int32": "<i4",
    "Int64": "<i8",
    "UInt8": "<u1",
    "UInt16": "<u2",
    "UInt32": "<u4",
    "UInt64": "<u8",
    "Float16": "<f2",
    "Float32": "<f4",
    "Float64": "<f8",
    "Complex64": "<c8",
    "Complex128": "<c16",
    # NumPy has no such types; for cutting and joining only the width matters.
    "BFloat16": "<u2",
    "Float8E4M3FN": "<u1",
    "Float8E5M2": "<u1",
    "HiFloat8": "<u1",
    "Int4": "<u1",
    "random_op": "<u1",
    "str": "<u4",
}

SAFETENSORS_TYPES = {
    "BOOL": "Bool",
    "I8": "Int8",
    "I16": "Int16",
    "I32": "Int32",
    "I64": "Int64",
    "U8": "UInt8",
    "U16": "UInt16",
    "U32": "UInt32",
    "U64": "UInt64",
    "F16": "Float16",
    "F32": "Float32",
    "F64": "Float64",
    "BF16": "BFloat16",
    "F8_E4M3": "Float8E4M3FN",
    "F8_E5M2": "Float8E5M2",
    "C64": "Complex64",
}

# (bytes, exponent bits, mantissa bits) of an HDF5 floating-point type.
HDF5_FLOATS = {
    (1, 4, 3): "Float8E4M3FN",
    (1, 5, 2): "Float8E5M2",
    (2, 5, 10): "Float16",
    (2, 8, 7): "BFloat16",
    (4, 8, 23): "Float32",
    (8, 11, 52): "Float64",
}


class Entry(NamedTuple):
    """One tensor: MindSpore's dtype name, shape, little-endian bytes in C order."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @property
    def digest(self) -> tuple[str, tuple[int, ...], str]:
        """Return what ``expected.json`` records of a tensor."""
        return self.dtype, self.shape, hashlib.sha256(self.data).hexdigest()

    def array(self) -> np.ndarray:
        """Return a NumPy array of elements of the right width."""
        dtype = np.dtype(NUMPY_TYPES[self.dtype])
        shape = (len(self.data) // dtype.itemsize,) if self.dtype == "str" else self.shape
        return np.frombuffer(self.data, dtype).reshape(shape)

    def excerpt(self, where: slice | tuple[slice, ...]) -> Entry:
        """Return some of the elements, as NumPy takes them."""
        array = self.array()[where]
        return Entry(self.dtype, array.shape, array.tobytes())


def entry_of(array: np.ndarray, dtype: str | None = None) -> Entry:
    """Return an array as a tensor of its own element type, or of another."""
    if dtype is None:
        (dtype,) = (name for name in NUMPY_TYPES if name.lower() == array.dtype.name)
    return Entry(dtype, array.shape, array.astype(NUMPY_TYPES[dtype]).tobytes())


def zeros(shape: tuple[int, ...]) -> Entry:
    """Return a tensor whose contents tell nothing, as norms, biases and moments at step 1."""
    return entry_of(np.zeros(shape, "<f4"))


def read(path: Path) -> dict[str, Entry]:
    """Read all tensors of one file; the suffix says which format."""
    readers = {".ckpt": read_ckpt, ".safetensors": read_safetensors, ".h5": read_hdf5}
    return readers[path.suffix](path)


def read_ranks(folder: Path) -> dict[int, dict[str, Entry]]:
    """Return ``{rank: {name: Entry}}`` of a folder of ``rank_N`` folders with one file each."""
    ranks = {}
    for rank_folder in folder.glob("rank_*"):
        (path,) = (
            p for p in rank_folder.iterdir() if p.is_file() and p.suffix != ".json"
        )  # a manifest
        ranks[int(rank_folder.name.removeprefix("rank_"))] = read(path)
    return ranks


def rank_file(folder: Path, rank: int) -> Path:
    """Return the one file in the folder of a rank."""
    (path,) = (folder / f"rank_{rank}").iterdir()
    return path


def read_indexed(folder: Path, index: str = "model.safetensors.index.json") -> dict[str, Entry]:
    """Read all tensors that an index names, each from its file."""
    files: dict[str, dict[str, Entry]] = {}
    document = json.loads((folder / index).read_text(encoding="utf-8"))
    for file in set(document["weight_map"].values()):
        files[file] = read(folder / file)
    found = {name: files[file][name] for name, file in document["weight_map"].items()}
    assert found.keys() == {name for tensors in files.values() for name in tensors}
    assert document["metadata"]["total_size"] == sum(len(entry.data) for entry in found.values())
    return found


# ------------------------------------------------------------------------------------ .ckpt


def varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the variable-length integer at ``at``, and where the next byte is."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at


def fields(message: bytes) -> list[tuple[int, int | bytes]]:
    """Return the fields of a protobuf message, as (number, integer or bytes), in file order."""
    found: list[tuple[int, int | bytes]] = []
    at = 0
    while at < len(message):
        key, at = varint(message, at)
        if key & 7 == 0:
            value, at = varint(message, at)
            found.append((key >> 3, value))
        elif key & 7 == 2:
            nbytes, at = varint(message, at)
            body = message[at : at + nbytes]
            if len(body) != nbytes:
                raise ValueError("the message ends inside a field")
            found.append((key >> 3, body))
            at += nbytes
        else:
            raise ValueError(f"wire type {key & 7} does not occur in a checkpoint")
    return found


def ckpt_records(path: Path) -> list[bytes]:
    """Return the bodies of the records of a ``.ckpt`` file, without a CRC trailer."""
    data = path.read_bytes()
    if data[-17:-10] == b"crc_num":
        data = data[:-17]
    return [body for number, body in fields(data) if number == 1 and isinstance(body, bytes)]


def read_ckpt(path: Path) -> dict[str, Entry]:
    """Read a ``.ckpt`` file; join consecutive records of one name."""
    tensors: dict[str, Entry] = {}
    last = None
    for record in ckpt_records(path):
        parts = dict(fields(record))
        name = parts[1].decode()
        tensor = fields(parts[2])
        shape = tuple(value for number, value in tensor if number == 1)
        dtype = dict(tensor)[2].decode()
        data = dict(tensor)[3]
        if name == last:
            data = tensors[name].data + data
        elif name in tensors:
            raise ValueError(f"{name} is stored twice")
        tensors[name] = Entry(dtype, shape, data)
        last = name
    return tensors


def write_ckpt(path: Path, tensors: dict[str, Entry]) -> None:
    """Write a ``.ckpt`` file of these tensors, one record each."""

    def number(value: int) -> bytes:
        out = b""
        while value > 0x7F:
            out += bytes([value & 0x7F | 0x80])
            value >>= 7
        return out + bytes([value])

    def field(key: bytes, body: bytes) -> bytes:
        return key + number(len(body)) + body

    out = b""
    for name, entry in tensors.items():
        tensor = b"".join(b"\x08" + number(size) for size in entry.shape)
        tensor += field(b"\x12", entry.dtype.encode()) + field(b"\x1a", entry.data)
        out += field(b"\x0a", field(b"\x0a", name.encode()) + field(b"\x12", tensor))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(out)


# ------------------------------------------------------------------------------ .safetensors


def split_safetensors(path: Path) -> tuple[dict[str, str], list[tuple[str, dict]], bytes]:
    """Return the metadata of a ``.safetensors`` file, its other entries in order, and its contents.

    Of a file of ours and one of MindSpore with the same tensors only the metadata differs.
    """
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    return header.pop("__metadata__", {}), list(header.items()), data[start:]


def read_safetensors(path: Path) -> dict[str, Entry]:
    """Read a ``.safetensors`` file, with MindSpore's note of an Int4 tensor."""
    notes, entries, data = split_safetensors(path)
    tensors = {}
    for name, item in entries:
        begin, end = item["data_offsets"]
        dtype = "Int4" if notes.get(name) == "Int4" else SAFETENSORS_TYPES[item["dtype"]]
        tensors[name] = Entry(dtype, tuple(item["shape"]), data[begin:end])
    return tensors


# ---------------------------------------------------------------------------------------- .h5


def read_hdf5(path: Path) -> dict[str, Entry]:
    """Read an ``.h5`` file: types as HDF5 describes them, bytes straight from the file."""
    import h5py  # here, because the other readers also serve where h5py is not installed

    raw = path.read_bytes()
    tensors = {}

    def visit(name: str, item: object) -> None:
        if isinstance(item, h5py.Dataset):
            tensors[name] = _hdf5_entry(raw, item)

    with h5py.File(path, "r") as file:
        file.visititems(visit)
    return tensors


def _hdf5_entry(raw: bytes, dataset) -> Entry:
    stored = dataset.id
    nbytes = stored.get_type().get_size() * int(np.prod(dataset.shape, dtype=np.int64))
    offset = stored.get_offset()
    if nbytes == 0:
        data = b""
    elif offset is None and (dataset.external or dataset.is_virtual):
        from h5py import h5s

        bits = np.empty(dataset.shape, f"V{stored.get_type().get_size()}")
        stored.read(h5s.ALL, h5s.ALL, bits, stored.get_type())
        data = bits.tobytes()
    elif offset is None:
        raise ValueError(f"{dataset.name} is not contiguous")
    else:
        data = raw[offset : offset + nbytes]
    dtype = _hdf5_dtype(dataset)
    if dtype == "str":
        text = data.rstrip(b"\0").decode("utf-8")
        return Entry("str", (0,), text.encode("utf-32-le") or bytes(4))
    return Entry(dtype, dataset.shape, data)


def _hdf5_dtype(dataset) -> str:
    from h5py import h5t

    kind = dataset.id.get_type()
    if isinstance(kind, h5t.TypeStringID):
        if kind.is_variable_str() or kind.get_cset() != h5t.CSET_UTF8:
            raise ValueError(f"{dataset.name} is not a UTF-8 string of fixed length")
        return "str"
    if isinstance(kind, h5t.TypeCompoundID):
        names = [kind.get_member_name(i) for i in range(kind.get_nmembers())]
        if names != [b"r", b"i"]:
            raise ValueError(f"{dataset.name} has the members {names}, not r and i")
        return {8: "Complex64", 16: "Complex128"}[kind.get_size()]
    if isinstance(kind, h5t.TypeEnumID):
        members = {kind.get_member_name(i) for i in range(kind.get_nmembers())}
        if members != {b"FALSE", b"TRUE"} or kind.get_size() != 1:
            raise ValueError(f"{dataset.name} is an enumeration but no Bool")
        return "Bool"
    if kind.get_size() > 1 and kind.get_order() != h5t.ORDER_LE:
        raise ValueError(f"{dataset.name} is not little endian")
    if isinstance(kind, h5t.TypeFloatID):
        _, _, exponent_bits, _, mantissa_bits = kind.get_fields()
        size = kind.get_size()
        if kind.get_ebias() != 2 ** (exponent_bits - 1) - 1:
            raise ValueError(f"{dataset.name} has the exponent bias {kind.get_ebias()}")
        return HDF5_FLOATS[size, exponent_bits, mantissa_bits]
    if isinstance(kind, h5t.TypeIntegerID):
        sign = "U" if kind.get_sign() == h5t.SGN_NONE else ""
        dtype = f"{sign}Int{8 * kind.get_size()}"
        if dtype == "UInt8" and "dtype" in dataset.attrs:
            dtype = dataset.attrs["dtype"]
            return dtype.decode() if isinstance(dtype, bytes) else str(dtype)
        return dtype
    raise ValueError(f"{dataset.name} has a type that no MindSpore dtype is kept in")
