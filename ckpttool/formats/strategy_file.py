r"""MindSpore strategy files: protobuf and JSON, of one stage or merged over pipeline stages.

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
two by an extra empty message at the end.  Absent fields are 0 (MindSpore 1.0 wrote no 6 and 7).

The JSON form has the keys ``parallel_strategy_item`` and ``parallel_layout_item`` with the same
names inside, and ``tensor_shape``, the full shape.  MindSpore writes a multi-axis tensor map there
as the map of an expanded tensor, from which the true one cannot be told.

In a file merged over stages every parameter is called ``"<stage>-<name>"``.  A file is taken for
merged if all its names match ``^\d+-.+`` and the stages of its operators occur among the prefixes;
so a parameter whose own name has a ``-`` in it does no harm.

Not read: ``param_split_shape`` and ``field`` (an uneven or field-sliced embedding) and JSON files
of operator strategies, which hold no parameter layouts.

Source
------
MindSpore 2.10 ``utils/node_strategy.proto``, ``parallel/_parallel_serialization.py``, and the
writer ``ccsrc/frontend/parallel/strategy_checkpoint``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ckpttool.errors import CkptToolError, FormatError, StrategyError, raise_all
from ckpttool.formats.wire import Field, WireReader
from ckpttool.model.layout import Layout
from ckpttool.model.strategy import Strategy, join_stages

MAX_NAME_BYTES = 1 << 20  # a name is read into memory; none in the field comes near
MERGED_NAME = re.compile(r"(\d+)-(.+)", re.DOTALL)
FOLDER_SUFFIXES = (".ckpt", ".json")  # what counts as a strategy file when a folder is named


@dataclass(slots=True)
class _Entry:
    """The layout of one parameter as a file spells it."""

    device_matrix: list[int] = field(default_factory=list)
    tensor_maps: list[list[int]] = field(default_factory=list)
    split_shape: list[int] = field(default_factory=list)
    field_count: int = 0
    shard_size: int = 0
    full_shape: list[int] | None = None


@dataclass(frozen=True, slots=True)
class _File:
    """One strategy file, its layouts by stage; ``from_json`` tells which form it had."""

    path: str
    stages: Mapping[int, Mapping[str, Layout]]
    from_json: bool


def read_strategy(paths: Sequence[str]) -> Strategy:
    """The strategy in one or several files.

    Parameters
    ----------
    paths
        Files of single stages, merged files, or folders of them.  Several files of one stage must
        say the same.

    Raises
    ------
    StrategyError
        A file is empty, malformed or impossible, a stage is missing, or two files disagree.
    OSError
        A file cannot be read.
    """
    errors: list[CkptToolError] = []
    files: list[_File] = []
    for path in _list_files(paths):
        try:
            files.append(_read_file(path))
        except CkptToolError as error:
            errors.append(error)
    raise_all(errors)
    stages: dict[int, dict[str, Layout]] = {}
    origins: dict[int, _File] = {}
    for file in sorted(files, key=lambda file: file.from_json):  # protobuf first: it says more
        for stage, layouts in file.stages.items():
            if stage in stages:
                _check_agreement(origins[stage], file, stage, stages[stage], layouts)
            else:
                stages[stage], origins[stage] = dict(layouts), file
    return join_stages(stages, tuple(file.path for file in files))


def _list_files(paths: Sequence[str]) -> Iterator[str]:
    for path in paths:
        if not Path(path).is_dir():
            yield path
            continue
        inside = sorted(p for p in Path(path).iterdir() if p.suffix in FOLDER_SUFFIXES)
        if not inside:
            raise StrategyError(path, f"no strategy file ({' or '.join(FOLDER_SUFFIXES)}) in it")
        yield from (str(p) for p in inside if p.is_file())


def _read_file(path: str) -> _File:
    if Path(path).stat().st_size == 0:
        raise StrategyError(path, "the strategy file is empty (0 bytes)")
    from_json = path.endswith(".json")
    try:
        entries, operator_stages = (_read_json if from_json else _read_protobuf)(path)
    except FormatError as error:
        raise StrategyError(
            path, f"no strategy file: byte {error.offset}: {error.reason}"
        ) from error
    if not entries:
        raise StrategyError(path, "no parameter layouts in it")
    matches = {name: MERGED_NAME.fullmatch(name) for name in entries}
    prefixes = {int(match[1]) for match in matches.values() if match}
    if all(matches.values()) and operator_stages <= prefixes:
        spelled = [(int(m[1]), m[2], entries[name]) for name, m in matches.items() if m]
    elif len(operator_stages) > 1:
        raise StrategyError(
            path, f"operators of stages {sorted(operator_stages)} in a file that is not merged"
        )
    else:
        stage = next(iter(operator_stages), 0)
        spelled = [(stage, name, entry) for name, entry in entries.items()]
    stages: dict[int, dict[str, Layout]] = {}
    errors: list[CkptToolError] = []
    for stage, name, entry in spelled:
        try:
            stages.setdefault(stage, {})[name] = _to_layout(entry)
        except ValueError as error:
            errors.append(StrategyError(path, f"{name}: {error}"))
    raise_all(errors)
    return _File(path, stages, from_json)


def _to_layout(entry: _Entry) -> Layout:
    if any(entry.split_shape):
        raise ValueError(
            f"an uneven split (param_split_shape {entry.split_shape}), which is not read yet"
        )
    if entry.field_count:
        raise ValueError(
            f"a field-sliced embedding (field {entry.field_count}), which is not read yet"
        )
    maps = entry.tensor_maps
    if len(maps) == 1:
        tensor_map = tuple(_device_axes([axis]) for axis in maps[0])
    else:
        while maps and not maps[-1]:
            maps = maps[:-1]
        tensor_map = tuple(_device_axes(axes) for axes in maps)
    full_shape = None if entry.full_shape is None else tuple(entry.full_shape)
    whole = Layout(tuple(entry.device_matrix), tensor_map)
    parts = whole.replicas if entry.shard_size == -1 else max(1, entry.shard_size)
    if entry.shard_size < -1:
        raise ValueError(f"opt_weight_shard_size {entry.shard_size}, expected -1 or more")
    if not tensor_map:
        parts = 1 if entry.shard_size == -1 else parts  # a scalar has no axis to cut
    return Layout(whole.device_matrix, tensor_map, parts, 0, full_shape)


def _device_axes(axes: list[int]) -> tuple[int, ...]:
    return () if axes == [-1] else tuple(axes)


def _check_agreement(
    first: _File,
    other: _File,
    stage: int,
    known: dict[str, Layout],
    layouts: Mapping[str, Layout],
) -> None:
    """Complain if two files give one stage different layouts; take over full shapes from JSON."""
    only = sorted(set(known) ^ set(layouts))
    if only:
        raise StrategyError(
            other.path,
            f"stage {stage} has other parameters in {first.path}, for example {only[0]}",
        )
    for name, layout in layouts.items():
        twin = known[name]
        if layout == twin:
            known[name] = layout if twin.full_shape is None else twin
        elif first.from_json == other.from_json or all(len(axes) < 2 for axes in twin.tensor_map):
            raise StrategyError(
                other.path, f"stage {stage} has another layout for {name} in {first.path}"
            )


def _read_protobuf(path: str) -> tuple[dict[str, _Entry], set[int]]:
    entries: dict[str, _Entry] = {}
    stages: set[int] = set()
    with WireReader(path) as reader:
        for item in reader.fields(0, reader.size):
            if item.number == 2:
                for part in _fields(reader, item):
                    if part.number == 2:
                        stages |= {f.value for f in _fields(reader, part) if f.number == 1}
            elif item.number == 3:
                name, entry = _read_layout_item(reader, item)
                if name in entries:
                    raise FormatError(path, item.start, f"{name}: listed twice")
                entries[name] = entry
            elif item.number == 1 and item.wire_type != 0:
                raise FormatError(
                    path, 0, "expected current_stage, a number; a checkpoint file begins like this"
                )
    return entries, stages


def _fields(reader: WireReader, message: Field) -> Iterator[Field]:
    if message.wire_type != 2:
        raise FormatError(reader.path, message.start, f"field {message.number} is no message")
    return reader.fields(message.start, message.stop)


def _read_layout_item(reader: WireReader, item: Field) -> tuple[str, _Entry]:
    name: str | None = None
    entry = _Entry()

    def dims(message: Field) -> list[int]:
        return [n for f in _fields(reader, message) if f.number == 1 for n in reader.numbers(f)]

    for part in _fields(reader, item):
        if part.number == 1:
            name = reader.text(part, MAX_NAME_BYTES)
        elif part.number == 2:
            for f in _fields(reader, part):
                if f.number == 1:
                    entry.device_matrix = dims(f)
                elif f.number == 2:
                    entry.tensor_maps.append(dims(f))
                elif f.number == 3:
                    entry.split_shape = dims(f)
                elif f.number == 5:
                    (entry.field_count,) = reader.numbers(f)
                elif f.number == 7:
                    (entry.shard_size,) = reader.numbers(f)
    if name is None:
        raise FormatError(reader.path, item.start, "a layout without a parameter name")
    return name, entry


def _read_json(path: str) -> tuple[dict[str, _Entry], set[int]]:
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise StrategyError(path, f"no strategy file: no JSON: {error}") from error
    if not isinstance(document, dict):
        raise StrategyError(path, "no strategy file: no JSON object")
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


def _json_entry(path: str, name: str, item: object) -> _Entry:
    entry = _object(path, name, item)

    def numbers(key: str) -> list[int]:
        value = _numbers(entry.get(key, []))
        if value is None:
            raise StrategyError(path, f"{name}: {key} {entry[key]!r} is no list of numbers")
        return value

    return _Entry(
        numbers("dev_matrix"),
        _json_tensor_maps(path, name, entry.get("tensor_map")),
        numbers("param_split_shape"),
        _number(path, name, entry, "field"),
        _number(path, name, entry, "opt_weight_shard_size"),
        numbers("tensor_shape") if "tensor_shape" in entry else None,
    )


def _json_tensor_maps(path: str, name: str, tensor_map: object) -> list[list[int]]:
    """The tensor map as protobuf has it; a list with lists in it is more than MindSpore reads."""
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
