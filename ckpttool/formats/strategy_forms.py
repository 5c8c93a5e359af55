"""How a MindSpore strategy file spells its layouts: protobuf and JSON.

Bytes
-----
A file whose name ends in ``.json`` is JSON, any other is the protobuf message
``mindspore.straspb.ParallelStrategyMap``; all repeated numbers come packed or not::

    1 current_stage               how often this process has saved; says nothing about stages
    2 parallel_strategy_item      one for each operator
        1 node_name
        2 parallel_strategys      1 stage: the pipeline stage of the rank that wrote the file
    3 parallel_layout_item        one for each parameter
        1 param_name
        2 parallel_layouts
            1 dev_matrix          1 dim: device matrix, outermost first
            2 tensor_map          1 dim: device axes counted from the right, -1 for undivided
            3 param_split_shape   1 dim: rows of a manual split; normally empty
            4 indices_offset      1 dim: its first rows; normally empty
            5 field               > 0 for a field-sliced embedding
            6 opt_weight_shard_step     a hint that is sometimes wrong; not used
            7 opt_weight_shard_size     0 none, -1 the whole replica group, else the parts

One ``tensor_map`` message holds an entry for each tensor axis.  Several are one for each tensor
axis, with the device axes that cut it, outermost first; a tensor of one axis is told from one of
two by an extra empty message at the end.  -1 may stand beside device axes, in any place:
``Layout(...)(("a", "None"), "b")`` writes it, and it shards nothing.  (MindSpore's own transform
fails if it stands first.)  Absent fields are 0 (MindSpore 1.0 wrote no 6 and 7).

The JSON form has the keys ``parallel_strategy_item`` and ``parallel_layout_item`` with the same
names inside, and ``tensor_shape``, the full shape.  MindSpore writes a multi-axis tensor map there
as the map of an expanded tensor, from which the true one cannot be told.

Source
------
MindSpore 2.10 ``utils/node_strategy.proto``, ``parallel/_parallel_serialization.py``, and the
writer ``ccsrc/frontend/parallel/strategy_checkpoint``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ckpttool.errors import FormatError, StrategyError
from ckpttool.formats.reading import read_file
from ckpttool.formats.strict_json import parse_json
from ckpttool.formats.wire import LENGTH, VARINT, Field, WireReader

MAX_NAME_BYTES = 1 << 20  # a name is read into memory; none in the field comes near
MAX_USUAL_BYTES = 512  # of a layout that is remembered


@dataclass(slots=True)
class Entry:
    """The layout of one parameter as a file spells it."""

    device_matrix: list[int] = field(default_factory=list)
    tensor_maps: list[list[int]] = field(default_factory=list)
    split_shape: list[int] = field(default_factory=list)
    split_starts: list[int] = field(default_factory=list)
    field_count: int = 0
    shard_size: int = 0
    full_shape: list[int] | None = None


def read_protobuf(path: str) -> tuple[dict[str, Entry], set[int]]:
    """Return layouts by parameter name, and the stages of the operators.

    Raises
    ------
    FormatError
        The file is no protobuf message of this kind.
    """
    entries: dict[str, Entry] = {}
    stages: set[int] = set()
    known: dict[bytes, Entry] = {}
    with WireReader(path) as reader:
        for item in reader.fields(0, reader.size):
            if item.number == 2:
                for part in _fields(reader, item):
                    if part.number == 2:
                        stages |= {reader.number(f) for f in _fields(reader, part) if f.number == 1}
            elif item.number == 3:
                name, entry = _read_layout_item(reader, item, known)
                if name in entries:
                    raise FormatError(path, item.start, f"{name}: listed twice")
                entries[name] = entry
            elif item.number == 1 and item.wire_type != VARINT:
                raise FormatError(
                    path, 0, "expected current_stage, a number; a checkpoint file begins like this"
                )
    return entries, stages


def _fields(reader: WireReader, message: Field) -> Iterator[Field]:
    if message.wire_type != LENGTH:
        raise FormatError(reader.path, message.start, f"field {message.number} is no message")
    return reader.fields(message.start, message.stop)


def _read_layout_item(
    reader: WireReader, item: Field, known: dict[bytes, Entry]
) -> tuple[str, Entry]:
    """Return a name and its layout; ``known`` holds those read before, of which a model has few."""
    name: str | None = None
    messages: list[Field] = []
    for part in _fields(reader, item):
        if part.number == 1:
            name = reader.text(part, MAX_NAME_BYTES)
        elif part.number == 2:
            messages.append(part)
    if name is None:
        raise FormatError(reader.path, item.start, "a layout without a parameter name")
    is_usual = len(messages) == 1 and messages[0].stop - messages[0].start <= MAX_USUAL_BYTES
    if not is_usual or messages[0].wire_type != LENGTH:
        return name, _read_layout(reader, messages)
    spelled = reader.read(messages[0].start, messages[0].stop)
    if spelled not in known:
        known[spelled] = _read_layout(reader, messages)
    return name, known[spelled]


def _read_layout(reader: WireReader, messages: Sequence[Field]) -> Entry:
    """Return a layout; if it is spelled in several messages, they add up."""

    def dims(message: Field) -> list[int]:
        return [n for f in _fields(reader, message) if f.number == 1 for n in reader.numbers(f)]

    entry = Entry()
    for f in (f for message in messages for f in _fields(reader, message)):
        if f.number == 1:
            entry.device_matrix = dims(f)
        elif f.number == 2:
            entry.tensor_maps.append(dims(f))
        elif f.number == 3:
            entry.split_shape = dims(f)
        elif f.number == 4:
            entry.split_starts = dims(f)
        elif f.number == 5:
            entry.field_count = reader.number(f)
        elif f.number == 7:
            entry.shard_size = reader.number(f)
    return entry


def read_json(path: str) -> tuple[dict[str, Entry], set[int]]:
    """Return layouts by parameter name, and the stages of the operators.

    Raises
    ------
    StrategyError
        The file is no JSON document of this kind.
    """
    try:
        document = parse_json(read_file(path))
    except ValueError as error:
        raise StrategyError(path, f"not a strategy file: {error}") from error
    if not isinstance(document, dict):
        raise StrategyError(path, "not a strategy file: no JSON object")
    if "parallel_layout_item" not in document and any("out_strategy" in key for key in document):
        raise StrategyError(
            path,
            "an operator strategy (of set_op_strategy_config), which holds no parameter layouts; "
            "give the file of strategy_ckpt_config instead",
        )
    items = _object(path, "parallel_layout_item", document.get("parallel_layout_item", {}))
    operators = _object(path, "parallel_strategy_item", document.get("parallel_strategy_item", {}))
    stages = {
        _number(path, name, _object(path, name, item), "stage") for name, item in operators.items()
    }
    return {name: _json_entry(path, name, item) for name, item in items.items()}, stages


def _json_entry(path: str, name: str, item: object) -> Entry:
    entry = _object(path, name, item)

    def numbers(key: str) -> list[int]:
        value = _numbers(entry.get(key, []))
        if value is None:
            raise StrategyError(path, f"{name}: {key} {entry[key]!r} is no list of numbers")
        return value

    return Entry(
        numbers("dev_matrix"),
        _json_tensor_maps(path, name, entry.get("tensor_map")),
        numbers("param_split_shape"),
        numbers("indices_offset"),
        _number(path, name, entry, "field"),
        _number(path, name, entry, "opt_weight_shard_size"),
        numbers("tensor_shape") if "tensor_shape" in entry else None,
    )


def _json_tensor_maps(path: str, name: str, tensor_map: object) -> list[list[int]]:
    """Return the tensor map as protobuf has it; MindSpore itself reads no list of lists."""
    plain = _numbers(tensor_map)
    if plain is not None:
        return [plain]
    nested = (
        [_numbers(axes if isinstance(axes, list) else [axes]) for axes in tensor_map]
        if isinstance(tensor_map, list)
        else [None]
    )
    if None in nested:
        raise StrategyError(path, f"{name}: tensor_map {tensor_map!r} is no list of device axes")
    return [axes for axes in nested if axes is not None] + [[]]


def _object(path: str, name: str, value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        raise StrategyError(path, f"{name}: {value!r} is no JSON object")
    return value


def _number(path: str, name: str, entry: Mapping[str, object], key: str) -> int:
    value = entry.get(key, 0)
    if type(value) is not int:
        raise StrategyError(path, f"{name}: {key} {value!r} is no number")
    return value


def _numbers(value: object) -> list[int] | None:
    if not isinstance(value, list) or any(type(n) is not int for n in value):
        return None
    return value
