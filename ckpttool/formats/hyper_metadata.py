"""``.metadata`` of a hyper-parallel checkpoint: a pickle that says where every tensor's boxes are.

Bytes
-----
A pickle (see `ckpttool.formats.plain_pickle`) of one object, with these classes of
``hyper_parallel.core.checkpoint`` or, later, ``hyper_parallel.core.distributed_checkpoint``::

    metadata.Metadata
        state_dict_metadata   {fqn: TensorStorageMetadata or BytesStorageMetadata}
        planner_data          not read
        storage_data          {MetadataIndex: StorageInfo}
        version               "1.0" or "2.0"; "1.0" if absent
    metadata.TensorStorageMetadata
        properties            TensorProperties: dtype, such as "Float32" or "torch.float32"
        size                  the full shape
        chunks                [ChunkStorageMetadata]: offsets and sizes, in elements
    metadata.BytesStorageMetadata    an object that is no tensor
    metadata.MetadataIndex    fqn and offset, as in chunks; its index is not read
    storage.StorageInfo       relative_path: a file in the same folder; offset 0 and length -1 for a
                              tensor; tensor_key: its name in the file, None or absent if it is fqn

Shapes are tuples, of PyTorch's ``torch.Size`` as well.  Equal chunks are replicas; storage_data may
have one of them or all.

Limits: of `plain_pickle`; 5,000,000 chunks; 32 axes.

Source
------
hyper-parallel ``core/checkpoint/metadata.py``, ``storage.py``, revision fdd0a80 of 2026-03 (run);
``core/distributed_checkpoint/`` ``metadata.py``, ``storage.py``, ``filesystem_storage.py`` of later
in 2026 (read, not run).
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from dataclasses import dataclass
from reprlib import repr as short

from ckpttool.errors import FormatError, UnsupportedError, raise_all
from ckpttool.formats.plain_pickle import Instance, Name, Pairs, Value, read_pickle
from ckpttool.model.catalog import TensorMeta
from ckpttool.model.dtypes import find_word
from ckpttool.model.region import Region

MAX_CHUNKS = 5_000_000  # of all tensors together
MAX_AXES = 32
FILE_NAME = re.compile(r"(?!\.\.?$)[^/\0]+")  # in the same folder
VERSIONS = ("1.0", "2.0")
CLASSES = frozenset(
    Name(f"hyper_parallel.core.{package}.{module}", name)
    for package in ("checkpoint", "distributed_checkpoint")
    for module, names in (
        (
            "metadata",
            (
                "Metadata",
                "TensorStorageMetadata",
                "BytesStorageMetadata",
                "TensorProperties",
                "ChunkStorageMetadata",
                "MetadataIndex",
            ),
        ),
        ("storage", ("StorageInfo",)),
    )
    for name in names
)
TUPLES = frozenset({Name("torch", "Size")})


@dataclass(frozen=True, slots=True)
class StoredBox:
    """Where a box of a tensor is stored: a file's name, and the tensor's name in it."""

    region: Region
    file: str
    key: str


@dataclass(frozen=True, slots=True)
class HyperTensor:
    """What a ``.metadata`` says of one tensor.

    Attributes
    ----------
    meta
        Name, element type and full shape.
    regions
        Its boxes, by their first elements; some may not be stored.
    stored
        Those that are.
    """

    meta: TensorMeta
    regions: Mapping[tuple[int, ...], Region]
    stored: tuple[StoredBox, ...] = ()


def read_hyper_metadata(path: str) -> tuple[dict[str, HyperTensor], tuple[str, ...]]:
    """What a ``.metadata`` says: tensors by name, and the names of objects that are none.

    Raises
    ------
    FormatError, CombinedError
        It is no such file, or it contradicts itself: all that was found.
    UnsupportedError
        It names other classes (that of another program does), or is of a later version.
    OSError
        It cannot be opened or read.
    """
    top = read_pickle(path, CLASSES, TUPLES)
    try:
        version = _get(top, "Metadata", "version", VERSIONS[0])
        described = _pairs(_get(top, "Metadata", "state_dict_metadata"), "state_dict_metadata")
        storage = _pairs(_get(top, "Metadata", "storage_data"), "storage_data")
    except ValueError as error:
        raise FormatError(path, None, str(error)) from error
    if version not in VERSIONS:
        known = " and ".join(VERSIONS)
        raise UnsupportedError(
            path, None, f"a version of .metadata that is not known ({known} are)"
        )
    errors: list[FormatError] = []
    tensors: dict[str, HyperTensor] = {}
    objects: dict[str, None] = {}
    budget = MAX_CHUNKS
    for key, entry in described:
        try:
            name = _text(key, "a name in state_dict_metadata")
            if _is(entry, "BytesStorageMetadata"):
                objects[name] = None
                continue
            tensors[name] = _tensor(name, entry, budget)
            budget -= len(tensors[name].regions)
        except ValueError as error:
            errors.append(FormatError(path, None, f"{short(key)}: {error}"))
    stored = _stored_boxes(path, storage, tensors, objects, errors)
    raise_all(errors)
    found = {
        name: HyperTensor(tensor.meta, tensor.regions, tuple(stored[name]))
        for name, tensor in tensors.items()
    }
    return found, tuple(objects)


def _stored_boxes(
    path: str,
    storage: Pairs,
    tensors: Mapping[str, HyperTensor],
    objects: Container[str],
    errors: list[FormatError],
) -> dict[str, dict[StoredBox, None]]:
    """Where the boxes of each tensor lie; what is wrong is added to ``errors``."""
    stored: dict[str, dict[StoredBox, None]] = {name: {} for name in tensors}
    for index, info in storage:
        name = "storage_data"
        try:
            name = _text(_get(index, "MetadataIndex", "fqn"), "the fqn of a MetadataIndex")
            if name in tensors:
                stored[name][_stored(tensors[name], index, info)] = None
            elif name not in objects and not errors:
                raise ValueError("in storage_data only")
        except ValueError as error:
            errors.append(FormatError(path, None, f"{short(name)}: {error}"))
    return stored


def _tensor(name: str, entry: Value, budget: int) -> HyperTensor:
    """One tensor, of which nothing is stored yet; what is wrong with it is a ValueError."""
    shape = _sizes(_get(entry, "TensorStorageMetadata", "size"), "size")
    properties = _get(entry, "TensorStorageMetadata", "properties")
    word = _text(_get(properties, "TensorProperties", "dtype"), "dtype")
    dtype = find_word(word)
    if dtype is None:
        raise ValueError(f"dtype {word[:40]!r} is not known")
    chunks = _get(entry, "TensorStorageMetadata", "chunks")
    if not isinstance(chunks, list) or len(chunks) > budget:
        raise ValueError(f"no list of at most {budget} chunks")
    regions: dict[tuple[int, ...], Region] = {}
    for chunk in chunks:
        start = _sizes(_get(chunk, "ChunkStorageMetadata", "offsets"), "offsets")
        sizes = _sizes(_get(chunk, "ChunkStorageMetadata", "sizes"), "sizes")
        if not len(start) == len(sizes) == len(shape):
            raise ValueError(f"a chunk of {len(sizes)} axes at {start}, the shape is {shape}")
        region = Region(start, tuple(a + n for a, n in zip(start, sizes, strict=True)))
        if regions.setdefault(start, region) != region:
            raise ValueError(f"chunks {regions[start]} and {region} begin at the same element")
    return HyperTensor(TensorMeta(name, dtype.name, shape), regions)


def _stored(tensor: HyperTensor, index: Value, info: Value) -> StoredBox:
    start = _sizes(_get(index, "MetadataIndex", "offset"), "offset")
    if start not in tensor.regions:
        raise ValueError(f"storage_data has a chunk at {start}, where the tensor has none")
    file = _text(_get(info, "StorageInfo", "relative_path"), "relative_path")
    if FILE_NAME.fullmatch(file) is None:
        raise ValueError(f"relative_path {file[:100]!r} is no file's name")
    span = _get(info, "StorageInfo", "offset"), _get(info, "StorageInfo", "length")
    if span != (0, -1):
        raise ValueError(f"a tensor at byte {short(span[0])} of {file}, expected all of an entry")
    key = _get(info, "StorageInfo", "tensor_key", None)
    return StoredBox(
        tensor.regions[start], file, tensor.meta.name if key is None else _text(key, "tensor_key")
    )


def _is(value: Value, cls: str) -> bool:
    return isinstance(value, Instance) and value.cls.name == cls


def _get(value: Value, cls: str, name: str, *default: Value) -> Value:
    """An attribute of an object of a class."""
    if not isinstance(value, Instance) or value.cls.name != cls:
        raise ValueError(f"{type(value).__name__} where a {cls} is expected")
    if name not in value.attributes and not default:
        raise ValueError(f"a {cls} without {name}")
    return value.attributes.get(name, *default)


def _pairs(value: Value, what: str) -> Pairs:
    if not isinstance(value, Pairs):
        raise ValueError(f"{what} is no dictionary")
    return value


def _text(value: Value, what: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{what} is no text")
    return value


def _sizes(value: Value, what: str) -> tuple[int, ...]:
    if not isinstance(value, tuple | list) or len(value) > MAX_AXES:
        raise ValueError(f"{what} is no tuple of at most {MAX_AXES} numbers")
    sizes = tuple(n for n in value if type(n) is int and 0 <= n < 1 << 62)
    if len(sizes) < len(value):
        raise ValueError(f"{what} has what is no size")
    return sizes
