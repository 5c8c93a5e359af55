"""MindSpore's strategy files, of one stage or merged over pipeline stages.

It decides which form a file has, reads its layouts, and joins the files of all stages to one
`Strategy`.  `ckpttool.checkpoint` decides whether a checkpoint fits these layouts, because a
strategy alone cannot show it.

Bytes
-----
A file whose name ends in ``.json`` is JSON.  Any other file is the protobuf message
``mindspore.straspb.ParallelStrategyMap``; all repeated numbers come packed or not::

    1 current_stage               how often this process has saved; says nothing about stages
    2 parallel_strategy_item      one for each operator
        1 node_name
        2 parallel_strategys      1 stage: the pipeline stage of the rank that wrote the file
    3 parallel_layout_item        one for each parameter
        1 param_name
        2 parallel_layouts
            1 dev_matrix          1 dim: device matrix, outermost first
            2 tensor_map          1 dim: device axes counted from the right, -1 for none
            3 param_split_shape   1 dim: rows of a manual split, or a shape; normally empty
            4 indices_offset      1 dim: the first rows of a manual split; normally empty
            5 field               > 0 for a field-sliced embedding
            6 opt_weight_shard_step     a hint that is sometimes wrong; not used
            7 opt_weight_shard_size     0 none, -1 the whole replica group, else the shards

A single ``tensor_map`` message holds an entry for each tensor axis.  If there are several messages,
each is for one tensor axis and holds the device axes that shard it, outermost first.  An extra
empty message at the end marks a tensor of one axis.  -1 may stand beside device axes, in any place:
``Layout(...)(("a", "None"), "b")`` writes it, and it shards nothing.  (MindSpore's own transform
fails if it stands first.)  Absent fields are 0 (MindSpore 1.0 did not write 6 and 7).

The compiler writes ``param_split_shape`` and ``indices_offset`` together, for a manual split.  A
function that many models of the dynamic graph copy writes ``param_split_shape`` alone: the shape of
the parameter.  Without offsets of the same length, the slices decide what it is, see `Layout`.

The JSON form has the keys ``parallel_strategy_item`` and ``parallel_layout_item`` with the same
names inside, and ``tensor_shape``, the full shape.  MindSpore writes a multi-axis tensor map there
as the map of an expanded tensor, which does not determine the true one.

Stages
------
In a file merged over stages every parameter is called ``"<stage>-<name>"``.  A file counts as
merged if all its names begin with one to three digits and a ``-``.  These numbers must include the
stages of its operators.  So a parameter may have a ``-`` in its own name.

MindSpore may merge a merged file again, with the files of the ranks.  It then takes the merged file
for that of a stage, and names become ``"0-0-<name>"``, ``"0-1-<name>"``.  The reader undoes this.
A stage counts as a merged file if it has the names of a complete one, and no other stage
contradicts it.

JSON files of operator strategies are not read, because they lack parameter layouts.
`ckpttool.strategy_files.handwritten` reads hand-written files,
`ckpttool.strategy_files.split_info` those of mindone, and `ckpttool.strategy_files.layout_dicts`
the dicts that MindSpore has in Python, also as JSON.

Source
------
MindSpore 2.10 ``utils/node_strategy.proto``, ``parallel/_parallel_serialization.py``, and the
writer ``ccsrc/frontend/parallel/strategy_checkpoint``.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain, islice
from pathlib import Path
from shlex import quote
from sys import intern
from typing import NamedTuple, TypeAlias, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from ckpttool.formats import format_of_content
from ckpttool.formats.foreign import identify_foreign, is_layout_dict
from ckpttool.formats.local import (
    is_file,
    is_folder,
    open_file,
    read_file,
    stat_file,
    url_problem,
)
from ckpttool.formats.strict_json import convert_as, parse_json
from ckpttool.formats.wire import LENGTH, VARINT, Field, Memory, WireReader
from ckpttool.lazy import compile_late
from ckpttool.model.layout import MAX_LAYOUT_AXES, MAX_RANKS, Layout
from ckpttool.model.strategy import Strategy, join_stages
from ckpttool.model.tensors import StoredFile
from ckpttool.problems import (
    CkptToolError,
    Diagnostic,
    FormatError,
    StrategyError,
    raise_all,
)
from ckpttool.strategy_files.folders import (
    KEY,
    YAML_SUFFIXES,
    checkpoint_format,
    files_that_may_be_strategies,
    find_strategy_files,
    is_merged_name,
)
from ckpttool.strategy_files.layout_dicts import LayoutItem, layout_of
from ckpttool.wording import count, format_ranks, shorten

MAX_BYTES = 100_000_000  # thousands of parameters take 1 MB; a larger file is something else
MAX_STAGES = 1000  # more than the layers of any model; stops damaged numbers
# The beginning of a layout item; its stage, in a merged file.
_LAYOUT_ITEM = compile_late(
    rb"\x1a[\x80-\xff]{0,3}[\x00-\x7f]\n[\x80-\xff]?[\x01-\x7f](?:([0-9]{1,3})-)?"
)
_JSON_ITEM = compile_late(rb'"(?:([0-9]{1,3})-)?[^"\\]*"\s*:\s*\{\s*"dev_matrix"\s*:')
_JSON_ENTRY = compile_late(rb'"[^"\\]*"\s*:\s*\{\s*"dev_matrix"[^{}]*\}')
_MOST_NAMES = 100  # of a glance
_MERGED_NAME = compile_late(r"([0-9]{1,3})-(.+)", re.DOTALL)
T = TypeVar("T")
_RUN_FILE = "the strategy file of the training run; `ckpttool help invalid_strategy` explains"


Paths: TypeAlias = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
# What each function takes for a strategy: a strategy, its files, or what MindSpore has in Python.
Layouts: TypeAlias = Strategy | Paths | Mapping[str, Sequence[object]]


def read_strategy(paths: Layouts) -> Strategy:
    """Return the strategy in one or several files, or folders of such files.

    A strategy is returned as it is.  So each function that needs one takes what this one takes.  A
    dict of layouts, as ``net.parameter_layout_dict`` of MindSpore has it, is read like its JSON.

    They are files of single stages, or merged ones; see `ckpttool.strategy_files.folders`.  Several
    files of one stage must agree.  A merged file among others of its folder provides the stages
    that these do not list, with a note.  It is ignored, with a note, if it contradicts them or
    cannot be read.  One file may be hand-written; it adds to the others.  Split information of
    mindone is not beside files of MindSpore.

    Raises
    ------
    StrategyError
        A file is empty, malformed or impossible, a stage is missing, two files disagree, or several
        files are hand-written.
    OSError
        A file cannot be read.
    """
    if isinstance(paths, Strategy):
        return paths
    if isinstance(paths, Mapping):
        return join_stages(_make_file("the dict", *_entries_of("the dict", paths), True).stages)
    errors: dict[str, CkptToolError] = {}
    files: list[_StrategyFile] = []
    cache: dict[tuple[bool, bytes], _StrategyFile] = {}
    handwritten: list[str] = []
    split_infos: list[str] = []
    given = [paths] if isinstance(paths, str | os.PathLike) else paths
    listed_files, skipped = _list_files([os.fspath(path) for path in given])
    for path in listed_files:
        try:
            _check_size(path)
            of_kind = _same_kind(path, handwritten, split_infos)
            if of_kind is None:
                files.append(_read_file(path, cache))
            else:
                of_kind.append(path)
        except CkptToolError as error:
            errors[path] = error
    folders = _folders_of_single_stages(files)
    spare = {
        path: error
        for path, error in errors.items()
        if is_merged_name(Path(path).name) and Path(path).parent in folders
    }
    if len(set(handwritten)) > 1:
        message = f"a second hand-written strategy, beside {handwritten[0]}"
        other = StrategyError(handwritten[1], message, "one file with the patterns of both")
        errors[handwritten[1]] = other
    if errors.keys() - spare.keys():
        raise_all(errors.values())
    if split_infos and files:
        message = f"split information of mindone, and {files[0].path} is a strategy of MindSpore"
        raise StrategyError(split_infos[0], message, "one of the two")
    mindspore = _join_files(files, spare) if files else None
    if split_infos:
        from ckpttool.strategy_files.split_info import read_split_info

        mindspore = read_split_info(split_infos)
    if handwritten:
        from ckpttool.strategy_files.handwritten import read_handwritten

        strategy = read_handwritten(handwritten[0], mindspore)
    else:
        strategy = mindspore or join_stages({})
    if not skipped:
        return strategy
    note = Diagnostic("strategy_file", "not a strategy, so skipped", where=shorten(skipped, 3))
    return replace(strategy, notes=(*strategy.notes, note))


def _same_kind(path: str, handwritten: list[str], split_infos: list[str]) -> list[str] | None:
    """Return the list of files of the kind of ``path``; None for those of MindSpore's."""
    if not path.endswith((*YAML_SUFFIXES, ".json")):
        return None
    from ckpttool.strategy_files.handwritten import is_handwritten  # late, as most are protobuf
    from ckpttool.strategy_files.split_info import holds_split_info

    return handwritten if is_handwritten(path) else split_infos if holds_split_info(path) else None


class Glance(NamedTuple):
    """The facts in the first layouts of a strategy file: its ranks, of all stages, and names."""

    ranks: int
    names: tuple[str, ...]


def glance(path: str) -> Glance | None:
    """Return what the first layouts of a strategy file show; None of another file.

    The names show the stages of a merged file.  Nothing else of it is read, so that a list of many
    files is made at once.
    """
    with open_file(path) as file:
        data = file.read(1)
        if data not in (b"\x08", b"\x12", b"\x1a", b"{") or stat_file(path).nbytes > MAX_BYTES:
            return None
        is_json, data = data == b"{", data + file.read()
    if is_json and b'"parallel_layout_item"' not in data:
        return None
    pattern, read = (_JSON_ITEM, _glance_json) if is_json else (_LAYOUT_ITEM, _glance_protobuf)
    for match in pattern.finditer(data):
        if entries := read(data, match.start()):
            ranks = math.prod(next(iter(entries.values())).dev_matrix)
            if not match[1]:
                return Glance(ranks, tuple(entries))
            stages = 1 + max(map(int, filter(None, {*pattern.findall(data)})))
            return Glance(ranks * stages, tuple(name.partition("-")[2] for name in entries))
    return None


def _glance_protobuf(data: bytes, start: int) -> dict[str, _LayoutEntry]:
    """Return the layouts from a byte on; none if it is not the beginning of an item."""
    with WireReader(StoredFile(""), Memory(data)) as reader:
        try:
            items = islice(reader.fields(start, reader.size), _MOST_NAMES)
            entries = dict(_read_layout_item(reader, item, {}) for item in items)
        except FormatError:
            return {}  # other bytes that look like a tag
    return entries if all(entry.dev_matrix for entry in entries.values()) else {}


def _glance_json(data: bytes, start: int) -> dict[str, _LayoutEntry]:
    """Return the layouts from a byte on."""
    items = islice(_JSON_ENTRY.finditer(data, start), _MOST_NAMES)
    document = parse_json(b"{%b}" % b",".join(match[0] for match in items))
    return convert_as(dict[str, _LayoutEntry], document)


def parse_strategy(data: bytes, path: str) -> Strategy:
    """Return the strategy that a file of these bytes will hold; nothing is read.

    The suffix of ``path`` gives the form.  Errors are those of `read_strategy`.
    """
    if path.endswith(YAML_SUFFIXES):
        from ckpttool.strategy_files.handwritten import parse_handwritten

        return parse_handwritten(data, path, None)
    return join_stages(_parse_file(path, data).stages, (path,))


def find_stage(path: str) -> int | None:
    """Return the pipeline stage of a file of MindSpore's; None if it is merged.

    Raises
    ------
    StrategyError
        The file is not one of MindSpore's, or lacks items of operators, which alone have the stage.
    """
    if _same_kind(path, [], []) is not None:
        raise StrategyError(path, "not a strategy file of MindSpore's, which has a stage")
    file = _parse_file(path, None)
    if file.is_merged:
        return None
    if not file.has_operators:
        hint = "`ckpttool strategy convert`, which writes them"
        raise StrategyError(path, "no items of operators, which alone have the stage", hint)
    (stage,) = file.stages
    return stage


def _folders_of_single_stages(files: Iterable[_StrategyFile]) -> set[Path]:
    return {Path(file.path).parent for file in files if not file.is_merged}


def _list_files(paths: Sequence[str]) -> tuple[list[str], list[str]]:
    strategy_paths: list[str] = []
    skipped: list[str] = []
    for path in paths:
        if (problem := url_problem(path)) is not None:
            raise StrategyError(path, *problem)
        if not is_folder(path):
            strategy_paths.append(path)
            continue
        inside = find_strategy_files(Path(path))
        files = inside.files or files_that_may_be_strategies(Path(path))  # these say what is wrong
        if inside.choices:
            message = f"strategies in {len(inside.choices)} folders, of which one is needed"
            hint = f"-s {quote(str(inside.choices[0]))}, or another of them"
            facts = shorten((choice.name for choice in inside.choices), 3)
            raise StrategyError(path, message, hint, facts)
        if not files:
            raise StrategyError(path, "no strategy file (.ckpt or .json) in it", _RUN_FILE)
        strategy_paths += map(str, files)
        skipped += map(str, inside.skipped)
    return strategy_paths, skipped


def _check_size(path: str) -> None:
    size = stat_file(path).nbytes
    if not is_file(path):
        facts = "a strategy is read twice, which a pipe does not allow"
        raise StrategyError(path, "not a file", "the pipe saved as a file", facts)
    if not size:
        raise StrategyError(path, "the strategy file is empty (0 bytes)", _RUN_FILE)
    if size > MAX_BYTES:
        format = format_of_content(path)
        what = f"a checkpoint ({format})" if format else f"a file of more than {MAX_BYTES} bytes"
        raise StrategyError(path, f"{what}, not a strategy file", _RUN_FILE)


# ----------------------------------------------------------------------------------------- one file


class _StrategyFile(Struct, frozen=True):
    """One strategy file, its layouts by stage.

    ``from_json`` is False for protobuf.  ``is_merged`` says whether names had the stages, and
    ``has_operators`` whether there are items of operators.
    """

    path: str
    stages: Mapping[int, Mapping[str, Layout]]
    from_json: bool
    is_merged: bool
    has_operators: bool


def _read_file(path: str, cache: dict[tuple[bool, bytes], _StrategyFile]) -> _StrategyFile:
    """Return the content of a file, from ``cache`` if an equal file was read.

    The key of the cache is the form and the digest of a file; most ranks have equal files.
    """
    with open_file(path) as file:
        digest = hashlib.sha256()
        while data := file.read(1 << 20):
            digest.update(data)
    key = path.endswith(".json"), digest.digest()
    if key not in cache:
        cache[key] = _parse_file(path, None)
    return replace(cache[key], path=path)


def _parse_file(path: str, data: bytes | None) -> _StrategyFile:
    """Return the content of a file, its names split by stage; ``data`` are bytes not on disk."""
    from_json = path.endswith(".json")
    try:
        entries, operator_stages = (_read_json if from_json else _read_protobuf)(path, data)
    except FormatError as error:
        raise _foreign_error(path, error) from error
    if not entries:
        raise _foreign_error(path)
    return _make_file(path, entries, operator_stages, from_json)


def _make_file(
    path: str, entries: _Entries, operator_stages: set[int], from_json: bool
) -> _StrategyFile:
    impossible = sorted(stage for stage in operator_stages if not 0 <= stage < MAX_STAGES)
    if impossible:
        message = f"operators of stage {impossible[0]}, expected 0 to {MAX_STAGES - 1}"
        raise StrategyError(path, message)
    by_stage = _split_names(entries)
    while by_stage and (nested := _find_merged_stage(by_stage)):
        by_stage = nested
    is_merged = True
    if not by_stage or not operator_stages <= by_stage.keys():
        if len(operator_stages) > 1:
            named = format_ranks([*operator_stages], "stage")
            message = f"operators of {named}, but the names of parameters have no stages"
            raise StrategyError(path, message)
        by_stage = {next(iter(operator_stages), 0): dict(entries)}
        is_merged = False
    stages: dict[int, dict[str, Layout]] = {}
    errors: list[CkptToolError] = []
    made: dict[_LayoutEntry | LayoutItem, Layout] = {}  # thousands of parameters have few layouts
    for stage, of_stage in by_stage.items():
        layouts = stages.setdefault(stage, {})
        for name, entry in of_stage.items():
            layout = made.get(entry)
            if layout is None:
                try:
                    layout = made[entry] = _make_layout(entry)
                except ValueError as error:
                    errors.append(StrategyError(f"{path}: {name}", str(error)))
                    continue
            layouts[name] = layout
    raise_all(errors)
    return _StrategyFile(path, stages, from_json, is_merged, bool(operator_stages))


def _split_names(entries: _Entries) -> dict[int, dict[str, _LayoutEntry | LayoutItem]] | None:
    """Return the entries of a merged file by stage; None if any name is without a stage."""
    stages: dict[int, dict[str, _LayoutEntry | LayoutItem]] = {}
    for name, entry in entries.items():
        match = _MERGED_NAME.fullmatch(name)
        if match is None:
            return None
        stages.setdefault(int(match[1]), {})[intern(match[2])] = entry
    return stages


def _find_merged_stage(
    stages: Mapping[int, _Entries],
) -> dict[int, dict[str, _LayoutEntry | LayoutItem]] | None:
    """Return the stages of a merged file that is a stage of this file; None if there is none."""
    for stage, entries in stages.items():
        nested = _split_names(entries)
        if nested and stage in nested and len(nested) == max(nested) + 1:
            rest = [(n, of_stage) for n, of_stage in stages.items() if n != stage]
            if all(nested.get(n) == of_stage for n, of_stage in rest):
                return nested
    return None


def _foreign_error(path: str, error: FormatError | None = None) -> StrategyError:
    """Return the error of a file without layouts, or of one that is not protobuf (``error``)."""
    other = identify_foreign(path)
    if other is not None and other.kind != "strategy":
        return StrategyError(path, f"{other.noun}, not a strategy file", _RUN_FILE)
    if error is None:
        contents = "only operators" if other else "nothing"
        return StrategyError(path, f"no parameter layouts in it, {contents}", _RUN_FILE)
    format = checkpoint_format(path)
    if format is not None:
        return StrategyError(path, f"a checkpoint ({format}), not a strategy file", _RUN_FILE)
    with open_file(path) as file:
        head = file.read(4096)
    if KEY.encode() in head:
        hint = "a copy whose name ends in .yaml, .yml or .json"
        return StrategyError(path, "a hand-written strategy with another suffix", hint)
    if head.lstrip().startswith(b"{"):
        return StrategyError(path, "JSON with another suffix", "a copy whose name ends in .json")
    facts = f"byte {error.offset}: {error.reason}"
    return StrategyError(path, "not a strategy file, or a damaged one", _RUN_FILE, facts)


# --------------------------------------------------------------------------------------- one layout


class _LayoutEntry(Struct, frozen=True):
    """The layout of one parameter in the JSON form; nested lists are several messages."""

    tensor_map: tuple[int | tuple[int, ...], ...]
    dev_matrix: tuple[int, ...] = ()
    param_split_shape: tuple[int, ...] = ()
    indices_offset: tuple[int, ...] = ()
    tensor_shape: tuple[int, ...] | None = None
    opt_weight_shard_size: int = 0
    field: int = 0


_Entries: TypeAlias = Mapping[str, _LayoutEntry | LayoutItem]


def _make_layout(entry: _LayoutEntry | LayoutItem) -> Layout:
    """Return the layout that an entry encodes; raise ValueError if it is impossible."""
    if isinstance(entry, LayoutItem):
        return layout_of(entry)
    maps = [(axes,) if isinstance(axes, int) else axes for axes in entry.tensor_map]
    matrix, shard = entry.dev_matrix, entry.opt_weight_shard_size
    axes = max(len(matrix), len(maps), *(len(axes) for axes in maps), 0)
    if axes > MAX_LAYOUT_AXES or math.prod(matrix) > MAX_RANKS:
        raise ValueError(
            f"a layout of {axes} axes or {math.prod(matrix[:MAX_LAYOUT_AXES])} ranks, "
            f"expected at most {MAX_LAYOUT_AXES} and {MAX_RANKS}"
        )
    while maps and not maps[-1]:
        maps.pop()
    tensor_map = tuple(tuple(axis for axis in axes if axis != -1) for axes in maps)
    whole = Layout(matrix, tensor_map)
    if shard < -1:
        raise ValueError(f"opt_weight_shard_size {shard}, expected -1 or more")
    if shard == -1:
        shard = whole.replicas if tensor_map else 1  # a scalar cannot be sharded
    split = entry.param_split_shape if any(entry.param_split_shape) else ()
    rows = split if len(entry.indices_offset) == len(split) else ()
    starts = [*accumulate(rows, initial=0)][:-1]
    if rows and [*entry.indices_offset] != starts:
        raise ValueError(
            f"a manual split of {list(rows)} rows with indices_offset "
            f"{[*entry.indices_offset]}, expected {starts}"
        )
    if entry.field < 0:
        raise ValueError(f"field {entry.field}, expected 0 or more")
    shape = () if rows else split
    if min(shape, default=0) < 0:
        raise ValueError(f"param_split_shape {list(shape)}, expected 0 or more")
    return replace(
        whole,
        optimizer_shard=max(1, shard),
        full_shape=entry.tensor_shape,
        rows=rows,
        fields=max(1, entry.field),
        split_shape=shape,
    )


# ----------------------------------------------------------------------------------------- protobuf


def _read_protobuf(path: str, data: bytes | None) -> tuple[dict[str, _LayoutEntry], set[int]]:
    """Return layouts by parameter name, and the stages of the operators."""
    entries: dict[str, _LayoutEntry] = {}
    stages: set[int] = set()
    cache: dict[bytes, _LayoutEntry] = {}
    with WireReader(StoredFile(path), None if data is None else Memory(data)) as reader:
        for item in reader.fields(0, reader.size):
            if item.number == 2:
                for strategies in _inside(reader, item, 2):
                    stages |= {reader.number(field) for field in _inside(reader, strategies, 1)}
            elif item.number == 3:
                name, entry = _read_layout_item(reader, item, cache)
                if name in entries:
                    raise FormatError(path, item.start, f"{name}: listed twice")
                entries[name] = entry
            elif item.number == 1 and item.wire_type != VARINT:
                raise FormatError(path, 0, "expected current_stage, a number")
    return entries, stages


def _read_layout_item(
    reader: WireReader, item: Field, cache: dict[bytes, _LayoutEntry]
) -> tuple[str, _LayoutEntry]:
    """Return a name and its layout, from ``cache`` if the encoded layout is known.

    A model has few different layouts.
    """
    name: str | None = None
    messages: list[Field] = []
    for subfield in _message_fields(reader, item):
        if subfield.number == 1:
            name = reader.text(subfield)
        elif subfield.number == 2:
            messages.append(subfield)
    if name is None:
        raise FormatError(reader.path, item.start, "a layout without a parameter name")
    if len(messages) != 1 or messages[0].wire_type != LENGTH:
        return name, _read_layout(reader, messages)
    encoded = reader.read(messages[0].start, messages[0].stop)
    if encoded not in cache:
        cache[encoded] = _read_layout(reader, messages)
    return name, cache[encoded]


def _read_layout(reader: WireReader, messages: Sequence[Field]) -> _LayoutEntry:
    """Return the layout in one message, or in several that complement each other."""

    def dims(message: Field) -> tuple[int, ...]:
        return tuple(n for field in _inside(reader, message, 1) for n in reader.numbers(field))

    maps: list[tuple[int, ...]] = []
    lists: dict[int, tuple[int, ...]] = {1: (), 3: (), 4: ()}
    numbers = {5: 0, 7: 0}
    for subfield in (field for message in messages for field in _message_fields(reader, message)):
        if subfield.number == 2:
            maps.append(dims(subfield))
        elif subfield.number in lists:
            lists[subfield.number] = dims(subfield)
        elif subfield.number in numbers:
            numbers[subfield.number] = reader.number(subfield)
    return _LayoutEntry(
        maps[0] if len(maps) == 1 else tuple(maps),
        dev_matrix=lists[1],
        param_split_shape=lists[3],
        indices_offset=lists[4],
        opt_weight_shard_size=numbers[7],
        field=numbers[5],
    )


def _inside(reader: WireReader, message: Field, number: int) -> Iterator[Field]:
    return (field for field in _message_fields(reader, message) if field.number == number)


def _message_fields(reader: WireReader, message: Field) -> Iterator[Field]:
    if message.wire_type != LENGTH:
        raise FormatError(reader.path, message.start, f"field {message.number} is not a message")
    return reader.fields(message.start, message.stop)


# --------------------------------------------------------------------------------------------- JSON


def _read_json(path: str, data: bytes | None) -> tuple[_Entries, set[int]]:
    """Return layouts by parameter name, and the stages of the operators."""
    try:
        document = parse_json(read_file(path) if data is None else data)
    except ValueError as error:
        other = identify_foreign(path)
        if other is None or other.kind in ("strategy", "text"):  # the text may be damaged JSON
            raise StrategyError(path, str(error), _RUN_FILE) from error
        raise _foreign_error(path) from error
    if not isinstance(document, dict):
        raise StrategyError(path, "not a strategy file: not a JSON object", _RUN_FILE)
    if "parallel_layout_item" not in document and any("out_strategy" in key for key in document):
        message = "strategies of operators (set_op_strategy_config), not layouts of parameters"
        raise StrategyError(path, message, _RUN_FILE)
    return _entries_of(path, document)


def _entries_of(path: str, document: Mapping[str, object]) -> tuple[_Entries, set[int]]:
    if is_layout_dict(document):
        listed = document.items()
        return {name: _convert(path, LayoutItem, it, f"{name}: ") for name, it in listed}, set()
    items = _convert(path, Items, document)
    entries = {
        name: _convert(path, _LayoutEntry, item, f"{name}: ")
        for name, item in items.parallel_layout_item.items()
    }
    operators = (
        _convert(path, _Operator, item, f"{name}: ")
        for name, item in items.parallel_strategy_item.items()
    )
    return entries, {operator.stage for operator in operators}


class Items(Struct, frozen=True):
    """The items of a JSON file."""

    parallel_layout_item: dict[str, object] = {}
    parallel_strategy_item: dict[str, object] = {}


class _Operator(Struct, frozen=True):
    stage: int = 0


def _convert(path: str, kind: type[T], value: object, place: str = "") -> T:
    try:
        return convert_as(kind, value)
    except ValueError as error:
        raise StrategyError(path, f"{place}{error}") from error


# ------------------------------------------------------------------------------------ several files


def _join_files(
    files: Sequence[_StrategyFile], unreadable: Mapping[str, CkptToolError]
) -> Strategy:
    """Return the strategy in several files of MindSpore's.

    A merged file in the folder of others is a copy of them, perhaps one of an earlier run.  It
    provides stages only if it agrees with the others in all of their stages.  ``unreadable`` has
    the errors of copies by path.
    """
    stages: dict[int, dict[str, Layout]] = {}
    origins: dict[int, _StrategyFile] = {}
    folders = _folders_of_single_stages(files)
    copies = [file for file in files if file.is_merged and Path(file.path).parent in folders]
    # Protobuf before JSON, which lacks the true map of a multi-axis tensor.
    singles = [file for file in files if file not in copies]
    for file in sorted(singles, key=lambda file: file.from_json):
        for stage, layouts in file.stages.items():
            if stage not in stages:
                stages[stage], origins[stage] = dict(layouts), file
            elif layouts is not origins[stage].stages[stage]:
                _check_same_stage(origins[stage], file, stage, stages[stage])
    notes = []
    ignored = dict(unreadable)
    for file in sorted(copies, key=lambda file: file.from_json):
        try:
            for stage in file.stages.keys() & stages.keys():
                _check_same_stage(origins[stage], file, stage, dict(stages[stage]))
        except StrategyError as error:
            ignored[file.path] = error
            continue
        added = {stage: dict(of) for stage, of in file.stages.items() if stage not in stages}
        if added:
            message = f"read for {format_ranks(sorted(added), 'stage')}, which no other file lists"
            notes.append(Diagnostic("strategy_file", message, path=file.path, where=file.path))
        stages |= added
        origins |= dict.fromkeys(added, file)
    used = [file for file in files if file.path not in ignored]
    for problem in chain.from_iterable(error.diagnostics for error in ignored.values()):
        message = f"{IGNORED}: {problem.message}"
        notes.append(replace(problem, code="strategy_file", message=message, hint="", options=()))
    try:
        return replace(join_stages(stages, tuple(file.path for file in used)), notes=tuple(notes))
    except StrategyError as error:
        raise_all([error, *ignored.values()])
        raise


IGNORED = "ignored, as the files beside it are read"


def _check_same_stage(
    first: _StrategyFile, other: _StrategyFile, stage: int, known: dict[str, Layout]
) -> None:
    """Raise StrategyError if two files give one stage different layouts.

    ``known`` are the layouts of the first file.  They get the full shapes of the other file.
    """
    layouts = other.stages[stage]
    what, differing = "parameters", sorted(known.keys() ^ layouts.keys())
    facts = "in one file only"
    if not differing:
        for name, layout in layouts.items():
            before = known[name]
            if layout == before:
                known[name] = layout if before.full_shape is None else before
            elif not (_is_expanded(layout, before) or _is_expanded(before, layout)):
                differing.append(name)
        what, facts = "layouts", count(len(differing), "parameter")
    if differing:
        hint = "the strategy files of one run"
        if len(first.stages) == len(other.stages) == 1:
            hint = f"{quote(first.path)} or {quote(other.path)}, with all files of that run"
        message = f"stage {stage} has other {what} in {first.path}"
        raise StrategyError(other.path, message, hint, f"{facts}: {shorten(differing, 3)}")


def _is_expanded(layout: Layout, folded: Layout) -> bool:
    """Return whether ``layout``, from a JSON file, may be the expanded form of ``folded``.

    JSON files write one tensor axis for each device axis, so both forms have the same device axes
    in the same order.
    """
    joined = [tuple(axis for axes in side.tensor_map for axis in axes) for side in (layout, folded)]
    has_more_axes = len(layout.tensor_map) > len(folded.tensor_map)
    if not has_more_axes or joined[0] != joined[1]:
        return False
    return replace(layout, tensor_map=folded.tensor_map) == folded
