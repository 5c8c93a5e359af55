"""Strategy files: of one stage or merged over pipeline stages, one or many, and hand-written.

`ckpttool.formats.strategy_forms` reads the bytes, protobuf and JSON, and
`ckpttool.formats.strategy_by_hand` hand-written files.

In a file merged over stages every parameter is called ``"<stage>-<name>"``.  A file is taken for
merged if all its names begin with one to three digits and a ``-``, and the stages of its operators
occur among these numbers; so a parameter whose own name has a ``-`` in it does no harm.

If a merged file lies among those of the ranks when they are merged once more, MindSpore takes it
for the file of a stage, and its names become ``"0-0-<name>"``, ``"0-1-<name>"``.  This is undone: a
stage whose names are those of a complete merged file, and which contradicts no other stage, is one.

Not read: JSON files of operator strategies, which hold no parameter layouts.

Source
------
MindSpore 2.10 ``utils/node_strategy.proto``, ``parallel/_parallel_serialization.py``, and the
writer ``ccsrc/frontend/parallel/strategy_checkpoint``.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from sys import intern

from ckpttool.errors import CkptToolError, FormatError, StrategyError, raise_all
from ckpttool.formats import format_of_content
from ckpttool.formats.others import recognise
from ckpttool.formats.reading import open_file, why_not_a_path
from ckpttool.formats.strategy_by_hand import KEY, is_by_hand, read_by_hand
from ckpttool.formats.strategy_forms import Entry, read_json, read_protobuf
from ckpttool.model.layout import Layout
from ckpttool.model.notes import Note
from ckpttool.model.strategy import Strategy, join_stages, shorten

_OF_THE_RUN = "give the file that the training run wrote (strategy_ckpt_config), or one by hand"
MAX_STAGES = 1000  # no model has so many layers; a damaged number must not lead to a long list
MAX_RANKS = 1 << 20  # ten times the largest clusters; layouts are tables over all ranks
MAX_AXES = 64  # of a tensor or a device matrix; as NumPy 2
MAX_BYTES = 100_000_000  # thousands of parameters take one; what is larger is something else
MERGED_NAME = re.compile(r"([0-9]{1,3})-(.+)", re.DOTALL)
FOLDER_SUFFIXES = (".ckpt", ".json")  # what counts as a strategy file when a folder is named
STRATEGY_OF_RANK = re.compile(r".*_rank_(\d+)\.[a-z]+")


@dataclass(frozen=True, slots=True)
class _File:
    """One strategy file, its layouts by stage.

    ``from_json`` tells which form it had, ``is_remerged`` whether it was merged more than once.
    """

    path: str
    stages: Mapping[int, Mapping[str, Layout]]
    from_json: bool
    is_remerged: bool


def read_strategy(paths: str | Sequence[str]) -> Strategy:
    """Return the strategy in one or several files.

    Parameters
    ----------
    paths
        A file or several: of single stages, merged, or folders of them.  Several files of one
        stage must say the same.  A merged file stands in for the stages that no rank's file
        lists, with a note.  One file may be hand-written, and adds to the others.

    Raises
    ------
    StrategyError
        A file is empty, malformed or impossible, a stage is missing, two files disagree, or several
        are written by hand.
    OSError
        A file cannot be read.
    """
    errors: list[CkptToolError] = []
    files: list[_File] = []
    known: dict[tuple[bool, bytes], _File] = {}
    by_hand: list[str] = []
    for path in _list_files([paths] if isinstance(paths, str) else paths):
        try:
            _check_size(path)
            if is_by_hand(path):
                by_hand.append(path)
            else:
                files.append(_read_file(path, known))
        except CkptToolError as error:
            errors.append(error)
    if len(set(by_hand)) > 1:
        errors.append(StrategyError(by_hand[1], f"by hand, as {by_hand[0]} is; put them together"))
    raise_all(errors)
    if not by_hand:
        return _join_files(files)
    return read_by_hand(by_hand[0], _join_files(files) if files else None)


def _check_size(path: str) -> None:
    """Raise if a file cannot be a strategy, before any of it is read."""
    size = Path(path).stat().st_size
    if not Path(path).is_file():
        raise StrategyError(path, "no file; a strategy is read twice, which a pipe does not allow")
    if not size:
        raise StrategyError(path, "the strategy file is empty (0 bytes)")
    if size > MAX_BYTES:
        format = format_of_content(path)
        what = f"a checkpoint ({format})" if format else f"{size} bytes; {MAX_BYTES} are the most"
        raise StrategyError(path, f"not a strategy file but {what}; {_OF_THE_RUN}")


def _join_files(files: Sequence[_File]) -> Strategy:
    """Return the strategy that several files of MindSpore's make together."""
    stages: dict[int, dict[str, Layout]] = {}
    origins: dict[int, _File] = {}
    listed = [file.path for file in files]
    of_ranks = [Path(path) for path in listed if STRATEGY_OF_RANK.fullmatch(Path(path).name)]
    folders = {path.parent for path in of_ranks if not is_merged_name(path.name)}
    spare = {p for p in listed if is_merged_name(Path(p).name) and Path(p).parent in folders}
    # Protobuf before JSON: it says more.
    for file in sorted(files, key=lambda file: (file.path in spare, file.from_json)):
        for stage, layouts in file.stages.items():
            if stage not in stages:
                stages[stage], origins[stage] = dict(layouts), file
            elif file.path not in spare and layouts is not origins[stage].stages[stage]:
                _check_agreement(origins[stage], file, stage, stages[stage], layouts)
    again = [file.path for file in files if file.is_remerged and file.path not in spare]
    text = "a merged strategy file was merged once more (names like 0-0-NAME), which is undone: "
    notes = [Note("corrected", text + shorten(again))] if again else []
    used = {origin.path: origin for origin in origins.values() if origin.path in spare}
    notes += [_stand_in(file, stages, origins) for file in used.values()]
    return replace(join_stages(stages, tuple(file.path for file in files)), notes=tuple(notes))


def _stand_in(
    file: _File, stages: Mapping[int, dict[str, Layout]], origins: Mapping[int, _File]
) -> Note:
    """Return the note on a merged file that is used for the stages that no rank's file lists.

    Raise if it contradicts the files of the other stages: then it is of another run.  A merged file
    that is not needed may be of any run.
    """
    mine = [stage for stage in sorted(file.stages) if origins[stage] is file]
    for stage in file.stages.keys() - set(mine):
        common = {n: one for n, one in file.stages[stage].items() if n in stages[stage]}
        _check_layouts(origins[stage], file, stage, stages[stage], common)
    named = f"stage{'s' * (len(mine) > 1)} {', '.join(map(str, mine))}"
    text = f"{file.path} tells how {named} is cut, of which no file of a rank does"
    return Note("strategy", text)


def is_merged_name(name: str) -> bool:
    """Return whether a name is one that MindFormers gives a strategy merged over stages."""
    return name.startswith("merged")


def _list_files(paths: Sequence[str]) -> Iterator[str]:
    for path in paths:
        url = why_not_a_path(path)
        if url is not None:
            raise StrategyError(path, url)
        if not Path(path).is_dir():
            yield path
            continue
        inside = sorted(p for p in Path(path).iterdir() if p.suffix in FOLDER_SUFFIXES)
        if not inside:
            raise StrategyError(path, f"no strategy file ({' or '.join(FOLDER_SUFFIXES)}) in it")
        yield from (str(p) for p in inside if p.is_file())


def _read_file(path: str, known: dict[tuple[bool, bytes], _File]) -> _File:
    """Return what a file says; ``known`` holds those before, for the ranks' files are equal."""
    with open_file(path) as file:
        digest = hashlib.sha256()
        while data := file.read(1 << 20):
            digest.update(data)
    key = path.endswith(".json"), digest.digest()
    if key not in known:
        known[key] = _parse_file(path)
    return replace(known[key], path=path)


def _parse_file(path: str) -> _File:
    from_json = path.endswith(".json")
    try:
        entries, operator_stages = (read_json if from_json else read_protobuf)(path)
    except FormatError as error:
        raise StrategyError(path, f"not a strategy file{_what_instead(path, error)}") from error
    if not entries:
        raise StrategyError(path, _what_without_layouts(path))
    impossible = sorted(stage for stage in operator_stages if not 0 <= stage < MAX_STAGES)
    if impossible:
        raise StrategyError(
            path, f"operators of stage {impossible[0]}; stages are 0 to {MAX_STAGES - 1}"
        )
    spelled = once = _split_names(entries)
    while spelled and (inner := _find_merged_stage(spelled)):
        spelled = inner
    if not spelled or not operator_stages <= spelled.keys():
        if len(operator_stages) > 1:
            raise StrategyError(
                path, f"operators of stages {sorted(operator_stages)} in a file that is not merged"
            )
        spelled = once = {next(iter(operator_stages), 0): entries}
    stages: dict[int, dict[str, Layout]] = {}
    errors: list[CkptToolError] = []
    for stage, of_stage in spelled.items():
        for name, entry in of_stage.items():
            try:
                stages.setdefault(stage, {})[name] = _to_layout(entry)
            except ValueError as error:
                errors.append(StrategyError(path, f"{name}: {error}"))
    raise_all(errors)
    return _File(path, stages, from_json, is_remerged=spelled is not once)


def _split_names(entries: Mapping[str, Entry]) -> dict[int, dict[str, Entry]] | None:
    """Return the entries of a merged file, by stage; None if not all names are those of one."""
    stages: dict[int, dict[str, Entry]] = {}
    for name, entry in entries.items():
        match = MERGED_NAME.fullmatch(name)
        if match is None:
            return None
        stages.setdefault(int(match[1]), {})[intern(match[2])] = entry
    return stages


def _find_merged_stage(
    stages: Mapping[int, Mapping[str, Entry]],
) -> dict[int, dict[str, Entry]] | None:
    """Return the stages of a merged file that is itself a stage; None if there is none."""
    for stage, entries in stages.items():
        inner = _split_names(entries)
        if inner and stage in inner and len(inner) == max(inner) + 1:
            others = [(n, of_stage) for n, of_stage in stages.items() if n != stage]
            if all(inner.get(n) == of_stage for n, of_stage in others):
                return inner
    return None


def _what_without_layouts(path: str) -> str:
    """Return the message about a file that could be read and lists no parameters."""
    other = recognise(path)
    if other is None:
        return "no parameter layouts in it"
    if other.kind != "strategy":
        return f"not a strategy file but {other.noun}; {_OF_THE_RUN}"
    text = "no parameter layouts in it, only operators"
    return f"{text}; give the file of strategy_ckpt_config of the run instead"


def _what_instead(path: str, error: FormatError) -> str:
    """Return the rest of the message about a file that is not a protobuf strategy."""
    other = recognise(path)
    if other is not None and other.kind != "strategy":
        return f" but {other.noun}; {_OF_THE_RUN}"
    format = format_of_content(path)
    if format is not None:
        return f" but a checkpoint ({format}); {_OF_THE_RUN}"
    with open_file(path) as file:
        head = file.read(4096)
    if KEY.encode() in head:
        return ", unless by hand: then its name ends in .yaml, .yml or .json"
    if head.lstrip().startswith(b"{"):
        return ": JSON, but its name does not end in .json"
    return f": byte {error.offset}: {error.reason}"


def _to_layout(entry: Entry) -> Layout:
    maps = entry.tensor_maps
    axes = max(len(entry.device_matrix), len(maps), *(len(axes) for axes in maps), 0)
    if axes > MAX_AXES or math.prod(entry.device_matrix) > MAX_RANKS:
        raise ValueError(
            f"a layout of {axes} axes or {math.prod(entry.device_matrix[:MAX_AXES])} ranks; "
            f"{MAX_AXES} and {MAX_RANKS} are the most"
        )
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
    rows = tuple(entry.split_shape) if any(entry.split_shape) else ()
    starts = [sum(rows[:i]) for i in range(len(rows))]
    if rows and entry.split_starts and entry.split_starts != starts:
        raise ValueError(
            f"a manual split of {list(rows)} rows with indices_offset {entry.split_starts}, "
            f"expected {starts}"
        )
    if entry.field_count < 0:
        raise ValueError(f"field {entry.field_count}, expected 0 or more")
    fields = max(1, entry.field_count)
    return Layout(whole.device_matrix, tensor_map, parts, 0, full_shape, rows, fields)


def _device_axes(axes: list[int]) -> tuple[int, ...]:
    """Return the device axes that shard a tensor axis; -1 ("None") may stand beside them."""
    return tuple(axis for axis in axes if axis != -1)


def _check_agreement(
    first: _File,
    other: _File,
    stage: int,
    known: dict[str, Layout],
    layouts: Mapping[str, Layout],
) -> None:
    """Raise if two files give one stage different layouts; take over full shapes from JSON."""
    only = sorted(set(known) ^ set(layouts))
    if only:
        raise StrategyError(
            other.path,
            f"stage {stage} has other parameters in {first.path}, for example {only[0]}; are both "
            "of one run?",
        )
    _check_layouts(first, other, stage, known, layouts)


def _check_layouts(
    first: _File,
    other: _File,
    stage: int,
    known: dict[str, Layout],
    layouts: Mapping[str, Layout],
) -> None:
    """Raise if two files give the parameters ``layouts``, which both have, different layouts."""
    for name, layout in layouts.items():
        twin = known[name]
        if layout == twin:
            known[name] = layout if twin.full_shape is None else twin
        elif not (_is_expanded(layout, twin) or _is_expanded(twin, layout)):
            raise StrategyError(
                other.path,
                f"stage {stage} has another layout for {name} in {first.path}; are both of one "
                "run?",
            )


def _is_expanded(layout: Layout, twin: Layout) -> bool:
    """Return whether ``layout``, as JSON files have it, may be ``twin`` with more tensor axes.

    JSON files write one tensor axis for each device axis, so the same device axes stand there in
    the same order.
    """
    joined = [tuple(axis for axes in one.tensor_map for axis in axes) for one in (layout, twin)]
    same = replace(layout, tensor_map=twin.tensor_map) == twin
    return len(layout.tensor_map) > len(twin.tensor_map) and joined[0] == joined[1] and same
