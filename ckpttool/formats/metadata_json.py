"""``metadata.json`` and ``common.json`` of a MindFormers "Checkpoint 2.0" folder.

metadata.json
-------------
One JSON object in UTF-8; more keys than these may be there and mean nothing here::

    {"state_dict_metadata": {NAME: {
         "properties": {"dtype": "BFloat16", ...},       MindSpore's name, in any case
         "global_shape": [64, 32],                       of the full tensor
         "axis_fragmentations": [2, 1],                  slices along each axis; null: all 1
         "layout": {"device_matrix": [2, 2], "tensor_map": [1, -1], "rank_list": [0, 1, 2, 3], ...},
         "chunk": [{"global_offset": [0], "local_shape": [32, 32]},
                   {"global_offset": [1], "local_shape": [32, 32]}]}},
     "storage_data": {"('NAME', (0,))": [
         {"file_name": "model-0000000-0000004.safetensors", "storage_rank": 0, ...}]}}

* ``global_offset`` is no offset: its one element is the number of the slice, in C order over
  ``axis_fragmentations``.
* A key of ``storage_data`` is what Python's ``repr`` makes of ``(name, (number,))``.  Its entries
  are replicas; there is one where redundancy was removed on saving.
* ``layout`` is null or absent for a tensor that is not cut.  Its ``tensor_map`` has a device axis
  (0 is the innermost), a list of them (outermost split first) or -1 for every tensor axis, and an
  optimizer shard is a further device axis in it.  ``rank_list`` has the global ranks of the stage
  in the order of the device matrix.
* ``replica_id`` and ``rank_group`` repeat what the layout says, and are not read.

common.json
-----------
An object of numbers that belong to no tensor, such as ``epoch_num`` and ``global_step``.

Limits: a file of at most 1,000,000,000 bytes; file names without a folder.

Source
------
MindFormers 1.7 to 2.1 ``mindformers/checkpoint/metadata.py``, ``sharded_tensor.py``,
``checkpoint.py`` (read, and its writing functions run: see tests/golden/PROVENANCE.md).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from reprlib import repr as short

from ckpttool.errors import FormatError, raise_all
from ckpttool.formats.strict_json import read_json_object
from ckpttool.model.catalog import TensorMeta
from ckpttool.model.dtypes import find_word
from ckpttool.model.layout import Layout

MAX_RANKS = 1 << 20  # as of strategy files
MAX_BYTES = 1_000_000_000  # every slice of every rank takes some hundred bytes of it
STORAGE_KEY = re.compile(r"""\((?P<name>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"), \((\d{1,12}),\)\)""")
FILE_NAME = re.compile(r"(?!\.\.?$)[^/\0]+")  # in the same folder
ESCAPE = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8})|(.))", re.DOTALL)
ESCAPED = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", "'": "'", '"': '"'}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a slice is stored: a file's name, and the rank that wrote it."""

    file: str
    rank: int


@dataclass(frozen=True, slots=True)
class Parameter:
    """What ``metadata.json`` says of one tensor; it does not contradict itself.

    Attributes
    ----------
    meta
        Name, element type and full shape.
    parts
        Slices along each axis; slices are numbered in C order.
    number_of
        For each rank of the stage the number of its slice, as the layout has it; None without a
        layout.
    stored
        Number of a slice to the places that hold it; numbers without a place are not in it.
    """

    meta: TensorMeta
    parts: tuple[int, ...]
    number_of: Mapping[int, int] | None
    stored: Mapping[int, tuple[Place, ...]]


def read_metadata(path: str) -> dict[str, Parameter]:
    """Return what a ``metadata.json`` says, by the name of the tensor.

    Raises
    ------
    FormatError, CombinedError
        It is not a ``metadata.json``, or it contradicts itself: all problems, each with the name
        of the tensor.
    OSError
        It cannot be opened or read.
    """
    document = read_json_object(path, MAX_BYTES)
    tensors, storage = (document.get(key) for key in ("state_dict_metadata", "storage_data"))
    if not isinstance(tensors, dict) or not isinstance(storage, dict):
        raise FormatError(path, None, "no objects state_dict_metadata and storage_data in it")
    errors: list[FormatError] = []
    stored: dict[str, dict[int, tuple[Place, ...]]] = {name: {} for name in tensors}
    for key, entries in storage.items():
        try:
            name, number = parse_key(key)
            if name not in stored:
                raise ValueError("is not in state_dict_metadata")
            stored[name][number] = _places(entries)
        except ValueError as error:
            errors.append(FormatError(path, None, f"storage_data: {key}: {error}"))
    parameters = {}
    for name, entry in tensors.items():
        try:
            parameters[name] = _parameter(name, entry, stored[name])
        except ValueError as error:
            errors.append(FormatError(path, None, f"{name}: {error}"))
    raise_all(errors)
    return parameters


def read_common(path: str) -> dict[str, str]:
    """Return the values of a ``common.json``, as text; see `read_metadata` for the errors."""
    return {key: str(value) for key, value in read_json_object(path, MAX_BYTES).items()}


def is_metadata(path: str) -> bool:
    """Return whether a JSON file is MindFormers' ``metadata.json``."""
    document = read_json_object(path, MAX_BYTES)
    return "state_dict_metadata" in document and "storage_data" in document


def parse_key(key: str) -> tuple[str, int]:
    r"""Return name and slice number of a key of ``storage_data``.

    Raises
    ------
    ValueError
        It is not what Python writes for a name and a tuple of one number.

    Examples
    --------
    >>> parse_key("('w', (3,))")
    ('w', 3)
    >>> parse_key(repr(('it\'s "\n"', (0,))))
    ('it\'s "\n"', 0)
    """
    match = STORAGE_KEY.fullmatch(key)
    if match is None:
        raise ValueError("is no name and slice number, such as \"('w', (0,))\"")
    return ESCAPE.sub(_unescape, match["name"][1:-1]), int(match[2])


def _unescape(match: re.Match[str]) -> str:
    digits = match[1] or match[2] or match[3]
    if digits is None and match[4] not in ESCAPED:
        raise ValueError(f"has an unknown escape {match[0]}")
    return ESCAPED[match[4]] if digits is None else chr(int(digits, 16))


def _parameter(name: str, entry: object, stored: Mapping[int, tuple[Place, ...]]) -> Parameter:
    """Return one tensor; raise ValueError for what is wrong with it."""
    shape = _sizes(entry, "global_shape")
    parts = _sizes(entry, "axis_fragmentations", default=(1,) * len(shape))
    if len(parts) != len(shape) or any(
        n < 1 or size % n for size, n in zip(shape, parts, strict=True)
    ):
        raise ValueError(f"axis_fragmentations {parts} do not divide global_shape {shape}")
    word = _field(_field(entry, "properties"), "dtype")
    dtype = find_word(word) if isinstance(word, str) else None
    if dtype is None:
        raise ValueError(f"dtype {short(word)} is none of MindSpore's")
    slice_shape = tuple(size // n for size, n in zip(shape, parts, strict=True))
    numbers = _slice_numbers(entry, slice_shape)
    total = math.prod(parts)
    wrong = sorted(numbers ^ set(range(total)))[:3] if total <= 2 * len(numbers) + 2 else "many"
    if wrong:
        raise ValueError(f"chunk does not have the slices 0 to {total - 1} of {parts}: {wrong}")
    beyond = [number for number in stored if number >= total]
    if beyond:
        raise ValueError(f"storage_data has slice {beyond[0]}, its slices are 0 to {total - 1}")
    layout = entry.get("layout") if isinstance(entry, dict) else None
    number_of = None if layout is None else _numbers_by_rank(layout, parts)
    return Parameter(TensorMeta(name, dtype.name, shape), parts, number_of, stored)


def _slice_numbers(entry: object, slice_shape: tuple[int, ...]) -> set[int]:
    chunks = _field(entry, "chunk")
    if not isinstance(chunks, list):
        raise ValueError(f"chunk {short(chunks)} is no list")
    numbers = set()
    for chunk in chunks:
        number = _sizes(chunk, "global_offset")
        if len(number) != 1:
            raise ValueError(f"global_offset {number} is not one slice number")
        if (local := _sizes(chunk, "local_shape")) != slice_shape:
            raise ValueError(
                f"slice {number[0]} has local_shape {local}, global_shape and axis_fragmentations "
                f"make {slice_shape}"
            )
        numbers.add(number[0])
    return numbers


def _numbers_by_rank(spelled: object, parts: tuple[int, ...]) -> dict[int, int]:
    """Return the slice number of every rank of a layout, which must make ``parts``."""
    matrix, ranks = _sizes(spelled, "device_matrix"), _sizes(spelled, "rank_list")
    if math.prod(matrix) != len(ranks) or len(set(ranks)) != len(ranks):
        raise ValueError(
            f"layout: rank_list of {len(ranks)} ranks for the device matrix {list(matrix)}"
        )
    if max(ranks, default=0) >= MAX_RANKS:
        raise ValueError(f"layout: rank_list has {short(max(ranks))}, no rank below {MAX_RANKS}")
    tensor_map = _field(spelled, "tensor_map")
    if not isinstance(tensor_map, list):
        raise ValueError(f"layout: tensor_map {short(tensor_map)} is no list")
    layout = Layout(matrix, tuple(_device_axes(axes) for axes in tensor_map))
    if layout.parts != parts:
        raise ValueError(f"the layout cuts into {layout.parts}, axis_fragmentations are {parts}")
    numbers = {}
    for local, rank in enumerate(ranks):
        number = 0
        for i, n in zip(layout.slice_index(local), parts, strict=True):
            number = number * n + i
        numbers[rank] = number
    return numbers


def _device_axes(spelled: object) -> tuple[int, ...]:
    spellings = spelled if isinstance(spelled, list) else [spelled]
    axes = [axis for axis in spellings if type(axis) is int]
    if len(axes) < len(spellings):
        raise ValueError(f"layout: tensor_map entry {short(spelled)} names no device axis")
    return tuple(axis for axis in axes if axis != -1)


def _places(entries: object) -> tuple[Place, ...]:
    if not isinstance(entries, list):
        raise ValueError("is no list")
    places = []
    for entry in entries:
        file, rank = _field(entry, "file_name"), _field(entry, "storage_rank")
        if not isinstance(file, str) or FILE_NAME.fullmatch(file) is None:
            raise ValueError(f"file_name {short(file)} is no file's name")
        if type(rank) is not int or not 0 <= rank < MAX_RANKS:
            raise ValueError(f"storage_rank {short(rank)} is no rank below {MAX_RANKS}")
        places.append(Place(file, rank))
    return tuple(places)


def _field(entry: object, key: str) -> object:
    if not isinstance(entry, dict) or key not in entry:
        raise ValueError(f"no {key}")
    return entry[key]


def _sizes(entry: object, key: str, default: tuple[int, ...] | None = None) -> tuple[int, ...]:
    value = _field(entry, key)
    if value is None and default is not None:
        return default
    if not isinstance(value, list) or any(type(n) is not int or n < 0 for n in value):
        raise ValueError(f"{key} {short(value)} is no list of sizes")
    return tuple(value)
