"""MindFormers "Checkpoint 2.0": the iteration, its files, and which file has which slice.

The root has a folder ``iteration_00000012`` for every save; development versions wrote
``iter_00000012``.  When a save is complete, ``latest_checkpointed_iteration.txt`` gets its number.
Iterations with a higher number were not finished.

An iteration's folder has ``{prefix-}model-0000003-0000008.safetensors``, number 3 of 8 files, with
parameters, and ``{prefix-}opt-...`` with optimizer state.  ``metadata.json`` names the file of
every slice.  The number in a file's name is the rank's only if every rank wrote a file.  Without
``metadata.json`` (MindFormers writes none for a single device) every file holds whole tensors.

metadata.json
-------------
One JSON object in UTF-8; further keys may be there and are not read::

    {"state_dict_metadata": {NAME: {
         "properties": {"dtype": "BFloat16", ...},       MindSpore's name, in any case
         "global_shape": [64, 32],                       of the full tensor
         "axis_fragmentations": [2, 1],                  slices along each axis; null: all 1
         "layout": {"device_matrix": [2, 2], "tensor_map": [1, -1], "rank_list": [0, 1, 2, 3], ...},
         "chunk": [{"global_offset": [0], "local_shape": [32, 32]},
                   {"global_offset": [1], "local_shape": [32, 32]}]}},
     "storage_data": {"('NAME', (0,))": [
         {"file_name": "model-0000000-0000004.safetensors", "storage_rank": 0, ...}]}}

* ``global_offset`` is not an offset: its one element is the number of the slice, in C order over
  ``axis_fragmentations``.
* A key of ``storage_data`` is what Python's ``repr`` makes of ``(name, (number,))``.  Its entries
  are replicas; there is one where redundancy was removed on saving.  MindFormers 2.1 then escapes
  a name with a quote or a backslash twice.
* ``layout`` is null or absent for a tensor that is not sharded.  Its ``tensor_map`` has an entry
  for every tensor axis: a device axis (0 is the innermost), a list of them (outermost split first)
  or -1.  An optimizer shard is a further device axis in it.  ``rank_list`` has the global ranks of
  the stage, or of a part of it, in the order of the device matrix.
* ``rank_group`` has all ranks with the slice, as MindFormers numbers it; absent before 1.9.
* ``replica_id`` repeats the layout, and is not read.

Wrong slice numbers
-------------------
MindFormers takes rank ``r`` for place ``r % n`` of a ``rank_list`` of ``n`` ranks.  This is the
rank's place in a block of consecutive ranks that starts at a multiple of ``n``, such as a stage.
It is then also right for a rank of another stage, which may store a copy of a shared parameter.
For any other list the numbers are wrong.  In PyNative a parameter on the fsdp mesh alone has
``[0, 2]`` on ranks 0 and 2, and ``[1, 3]`` on ranks 1 and 3; metadata has one of these lists.  Then
only ranks of the list count, with the slice that the layout gives them.  Where redundancy was
removed, two stored slices may be the same one and another may be lost.  The number of a tensor with
one slice cannot be wrong.

One commit of MindFormers wrote the number of the parameter in place of the rank's, in the names of
files as well.  So all slices of a parameter seem to be in one file.  Such metadata is refused.

Up to 2.0 metadata could name ``opt`` files for the parameters of other pipeline stages.  They are
in the ``model`` files of the same ranks.

common.json
-----------
An object of numbers that belong to no tensor, such as ``epoch_num`` and ``global_step``.

Limits: a JSON file of at most 1,000,000,000 bytes; file names without a folder.

Source
------
MindFormers 1.7 to 2.1 ``mindformers/checkpoint/`` (read, and its writing functions run: see
tests/golden/PROVENANCE.md): ``utils.py``, ``checkpoint.py``, ``sharded_tensor.py``,
``metadata.py``.  In the last file, commit e2661fcd has the wrong numbers, and 1.7 to 2.0 the wrong
kind of file (``get_total_params_file_mapping_info``).
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from reprlib import repr as short
from shlex import quote
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from ckpttool.discovery.file_names import ITERATION
from ckpttool.discovery.ignored import describe_ignored, note_foreign
from ckpttool.discovery.rank_folders import checkpoint_files
from ckpttool.discovery.saves import FoundStep
from ckpttool.discovery.self_described import (
    BARE_NAME,
    Fault,
    FilesByName,
    NumberedSaves,
    damages,
    describe_faults,
    errors_of,
    find_tensor,
    left_of,
    read_existing_files,
)
from ckpttool.formats.local import identify_file, is_file, list_folder, stat_file
from ckpttool.formats.strict_json import convert_as, read_json_object
from ckpttool.lazy import compile_late
from ckpttool.model.catalog import Catalog
from ckpttool.model.dtypes import find_word
from ckpttool.model.layout import MAX_RANKS, Layout
from ckpttool.model.names import parse_name
from ckpttool.model.region import Region
from ckpttool.model.slicing import (
    Box,
    BoxSlicing,
    Description,
    FullTensor,
    Listed,
    box_problems,
    fill_with_boxes,
)
from ckpttool.model.tensors import FileIndex, StoredTensor, TensorMeta
from ckpttool.problems import (
    COPY_AGAIN,
    CkptToolError,
    Diagnostic,
    Diagnostics,
    FormatError,
    PlanError,
    UnsupportedError,
    raise_all,
)
from ckpttool.wording import count, format_ranks, shorten

_METADATA, _COMMON = "metadata.json", "common.json"
_TRACKER = "latest_checkpointed_iteration.txt"
_ITERATIONS = NumberedSaves("iteration", ITERATION, _TRACKER)
MINDFORMERS_FILE = compile_late(
    r"(?:(?P<prefix>.*)-)?(?P<kind>model|opt)-(?P<number>\d{7,18})-(?P<total>\d{7,18})\.safetensors"
)
_ESCAPE = r"""\\(?:[nrt\\'"]|x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8})"""
_STORAGE_KEY = compile_late(
    rf"""\((?P<name>'(?:[^'\\]|{_ESCAPE})*'|"(?:[^"\\]|{_ESCAPE})*"), \((\d{{1,12}}),\)\)"""
)
_MAX_BYTES = 1_000_000_000  # every slice of every rank takes some hundred bytes of it


def scan_checkpoint2(src: str, step: str | None) -> Catalog | None:
    """Return the catalog of a MindFormers checkpoint; None if ``src`` is something else.

    ``src`` is the folder of one iteration or the one above; by default it is the last complete one.
    """
    folder, diagnostics = Path(src), Diagnostics()
    if is_file(folder / _TRACKER) or _ITERATIONS.find_folders(folder):
        folder = _find_iteration(folder, step, diagnostics)
        if not _is_iteration(folder):
            message = f"no {_METADATA} and no model-*.safetensors of MindFormers in it"
            hint = "--step with another iteration"
            raise PlanError([Diagnostic("source", message, hint=hint, where=str(folder))])
    elif not _is_iteration(folder):
        return None
    else:
        _ITERATIONS.require_wanted(folder, step)
    return _read_iteration(src, folder, diagnostics)


def _read_iteration(root: str, folder: Path, diagnostics: Diagnostics) -> Catalog:
    note_foreign(folder, (), diagnostics)
    values = _read_common(folder, diagnostics)
    metadata = folder / _METADATA
    documents = (identify_file(str(metadata)),) if is_file(metadata) else ()
    read = _read_with_metadata if documents else _read_without_metadata
    files, by_rank, description = read(folder, diagnostics)
    return Catalog(
        root,
        by_rank,
        step=_ITERATIONS.label(folder),
        damaged=errors_of(files),
        diagnostics=tuple(diagnostics),
        documents=documents,
        description=replace(description, values=values),
    )


def list_iterations(root: Path, diagnostics: Diagnostics) -> list[FoundStep] | None:
    """Return the iterations in a folder, the first one first; None for something else.

    ``diagnostics`` gets why none of them is read without ``--step``.
    """
    folders = _ITERATIONS.find_folders(root)
    if not (is_file(root / _TRACKER) or folders):
        if not _is_iteration(root):
            return None
        return [_describe_iteration(root, _ITERATIONS.label(root), True)]
    last, chosen = _ITERATIONS.read_tracker(root), None
    try:
        chosen = _find_iteration(root, None, Diagnostics())
    except PlanError as error:
        diagnostics.add(*(replace(problem, code="step") for problem in error.diagnostics))
    steps = _ITERATIONS.list_steps(root, chosen, _describe_iteration)
    if last is None:
        reason = f"no {_TRACKER} that names the last complete one"
        return [step.doubted(None, reason) for _, step in steps]
    reason = f"newer than {_TRACKER} says"
    return [step.doubted(False, reason) if number > last else step for number, step in steps]


def _describe_iteration(folder: Path, name: str | None, is_chosen: bool) -> FoundStep:
    matches, ranks = _list_files(folder), tuple[int, ...]()
    lost, replaced = [] if matches else ["no files of tensors"], ""
    try:
        catalog = _read_iteration(str(folder), folder, Diagnostics())
    except CkptToolError as error:
        lost += map(_name_problem, error.diagnostics)
    else:
        assert catalog.description is not None, "it is read, or made of full tensors"
        ranks = tuple(catalog.files)
        lost += map(_name_problem, catalog.description.problems)
        damaged = {Path(error.path).name: error for error in catalog.damaged.values()}
        if lost or catalog.description.broken or not catalog.documents:
            lost += damages(damaged)
        elif damaged:
            replaced = f"{'; '.join(damages(damaged))}; other files have the slices"
    reason = shorten(dict.fromkeys(lost), 3) if lost else replaced
    step, nbytes = _ITERATIONS.label(folder), sum(stat_file(folder / f).nbytes for f in matches)
    return FoundStep(name, step, not lost, reason, ranks, (), len(matches), nbytes, is_chosen)


def _name_problem(problem: Diagnostic) -> str:
    return f"{Path(problem.path).name}: {problem.message}" if problem.path else problem.message


def _is_iteration(folder: Path) -> bool:
    if any(MINDFORMERS_FILE.fullmatch(path.name) for path in list_folder(folder)):
        return True
    metadata = folder / _METADATA
    document = read_json_object(str(metadata), _MAX_BYTES) if is_file(metadata) else {}
    return "state_dict_metadata" in document and "storage_data" in document


def _read_common(folder: Path, diagnostics: Diagnostics) -> Mapping[str, str]:
    """Return the values of ``common.json`` as text; empty if it is absent or damaged."""
    path = folder / _COMMON
    if not is_file(path):
        return {}
    try:
        document = read_json_object(str(path), _MAX_BYTES)
    except FormatError as error:
        message = f"{_COMMON} cannot be read: ignored"
        diagnostics.add(Diagnostic("skipped", message, facts=error.reason, where=str(path)))
        return {}
    values = {key: str(value) for key, value in document.items()}
    shown = shorten((f"{key} {value}" for key, value in values.items()), 8)
    diagnostics.add(Diagnostic("skipped", f"{_COMMON} is not written to any output", facts=shown))
    return values


def _read_with_metadata(
    folder: Path, diagnostics: Diagnostics
) -> tuple[FilesByName, dict[int, FileIndex], Description]:
    """Return the files by name and by rank, and the description, from ``metadata.json``."""
    metadata = str(folder / _METADATA)
    parameters = read_metadata(metadata, diagnostics)
    writers: dict[str, set[int]] = defaultdict(set)
    for parameter in parameters.values():
        for location in parameter.locations:
            writers[location.file_name].add(location.storage_rank)
    files = read_existing_files(folder, _select_files(folder, {*writers}, diagnostics))
    iteration = _Iteration(folder, parameters, files, writers)
    placed = {name: _place(parameter, iteration) for name, parameter in parameters.items()}
    faults = [fault for of in placed.values() for fault in of.faults]
    problems = [problem for of in placed.values() for problem in of.problems]
    problems += describe_faults(faults, are_harmless=False)
    writes = [
        [(at.file_name, at.storage_rank) for at in of.locations] for of in parameters.values()
    ]
    if problems and any(len(of) > 1 for of in writes) and all(len({*of}) < 2 for of in writes):
        reason = "numbers of parameters stand in place of ranks"
        facts = "a commit of MindFormers between 1.7 and 1.8 wrote this"
        hint = f"{quote(str(folder))} as SRC, with "
        hint += "-s STRATEGY --pattern '*model-{rank}-*.safetensors'"
        raise UnsupportedError(metadata, None, reason, hint, facts)
    diagnostics.add(*describe_faults(faults, are_harmless=True))
    diagnostics.add(*_placement_notes(placed, parameters, metadata))
    by_rank, mixed = _by_rank(files, writers, parameters)
    tensors = {name: of.tensor for name, of in placed.items() if of.tensor is not None}
    broken = frozenset(
        name for name, of in placed.items() if not (of.tensor or of.absence in _UNSAVED)
    )
    return files, by_rank, Description((metadata,), tensors, broken, (*problems, *mixed))


def _placement_notes(
    placed: Mapping[str, _Placed], parameters: Mapping[str, _Parameter], metadata: str
) -> Iterator[Diagnostic]:
    """Yield notes on parameters that are not where ``metadata.json`` lists them."""
    absent: dict[str, list[str]] = defaultdict(list)
    for name, of in placed.items():
        absent[of.absence].append(name)
    if names := [name for name, of in placed.items() if of.is_in_other_file]:
        message = f"{count(len(names), 'parameter')} listed in the wrong one of a rank's two files"
        yield Diagnostic("corrected", message, facts=shorten(names, 3), where=metadata)
    if names := [*absent["unlocated"], *absent["gradient"]]:
        message = f"{count(len(names), 'parameter')} described, but in no file"
        yield Diagnostic("absent", message, facts=shorten(names, 3), where=metadata)
    if copies := {name: of.without_copy for name, of in placed.items() if of.without_copy}:
        ranks = tuple(sorted(set().union(*copies.values())))
        message = f"{count(len(copies), 'parameter', 'are')} listed for a stage that saved no copy"
        facts = f"{shorten(copies, 3)}; not on {format_ranks(ranks)}: another stage has all slices"
        yield Diagnostic("absent", message, facts=facts, ranks=ranks, where=metadata)
    if names := [name for name, parameter in parameters.items() if parameter.is_renumbered]:
        message = f"storage_data numbers slices of {count(len(names), 'parameter')} wrongly"
        facts = f"{shorten(names, 3)}: only ranks of the layouts count"
        yield Diagnostic("corrected", message, facts=facts, where=metadata)
    if names := absent["state"]:
        files = sorted({at.file_name for name in names for at in parameters[name].locations})
        are_left = count(len(names), "tensor", "are")
        message = f"no file of optimizer state is there: {are_left} left out"
        facts = f"{shorten(names, 3)}; {_METADATA} lists {shorten(files, 1)}"
        hint = "copy the opt files again, if the run saved them"
        where = str(Path(metadata).parent)
        yield Diagnostic("no_optimizer", message, hint=hint, facts=facts, where=where)


def _read_without_metadata(
    folder: Path, diagnostics: Diagnostics
) -> tuple[FilesByName, dict[int, FileIndex], Description]:
    """Return the files by name and by number, and the description, of full tensors."""
    matches = _list_files(folder)
    _note_unnamed(folder, (), diagnostics)
    files = read_existing_files(folder, matches)
    problems = list(_incomplete_sets(folder, matches.values()))
    stored: dict[str, dict[str, StoredTensor]] = defaultdict(dict)
    for file, index in files.items():
        left = left_of(index)
        for name, tensor in () if left is None else left.tensors.items():
            stored[name][file] = tensor
    tensors: dict[str, FullTensor] = {}
    for name, in_files in stored.items():
        (file, tensor), *copies = in_files.items()
        if not copies:
            box = Box(Region.whole(tensor.meta.shape), int(matches[file]["number"]), tensor)
            whole = fill_with_boxes(tensor.meta, [box])
            assert isinstance(whole, BoxSlicing), "one box is all of it"
            tensors[name] = FullTensor(tensor.meta, whole, Listed())
    broken = stored.keys() - tensors.keys()
    if broken:
        file, match = next(iter(matches.items()))
        start, stop = match.span("number")
        twice = {name: of for name, of in stored.items() if name in broken}
        parameters = count(len(twice), "parameter")
        message = f"{parameters} in several files, and no {_METADATA} for slices"
        facts = shorten((f"{name} ({shorten(of, 1)})" for name, of in twice.items()), 3)
        hint = f"copy {_METADATA} again, or "
        hint += f"-s STRATEGY --pattern {quote(f'{file[:start]}{{rank}}{file[stop:]}')}"
        problems.append(Diagnostic("missing", message, hint=hint, facts=facts, where=str(folder)))
    if len(files) > 1 and max(int(match["total"]) for match in matches.values()) > 1:
        message = f"no {_METADATA}: every file is read as one of full tensors"
        diagnostics.add(Diagnostic("undivided", message, where=str(folder)))
    by_rank, _ = _by_rank(files, {}, stored)
    origin = tuple(str(folder / name) for name in matches)
    return files, by_rank, Description(origin, tensors, frozenset(broken), tuple(problems))


# --------------------------------------------------------------------------------------- iterations


def _find_iteration(root: Path, wanted: str | None, diagnostics: Diagnostics) -> Path:
    folders, last = _ITERATIONS.find_folders(root), _ITERATIONS.read_tracker(root)
    if wanted is None:
        if last is None:
            message = f"no {_TRACKER}, which names the last complete iteration"
            raise _ITERATIONS.problem(root, message)
        if last not in folders.values():
            saved = sorted({number for path, number in folders.items() if _list_files(path)})
            complete = [str(number) for number in saved if number <= last]
            facts = f"complete: {shorten(reversed(complete), 3) or 'none'}"
            if newer := shorten((str(number) for number in saved if number > last), 3):
                facts += f"; perhaps not finished: {newer}"
            hint = f"--step {complete[-1]}" if complete else ""
            where, message = str(root), f"no folder of iteration {last}, which {_TRACKER} names"
            raise PlanError([Diagnostic("source", message, hint=hint, facts=facts, where=where)])
    chosen = _ITERATIONS.choose(root, str(last) if wanted is None else wanted)
    taken = folders[chosen]
    if last is not None and taken > last:
        message, facts = f"iteration {taken} was perhaps not finished", f"{_TRACKER} names {last}"
        diagnostics.add(Diagnostic("step", message, facts=facts))
    else:
        unfinished = [path for path, n in folders.items() if last is not None and n > last]
        _ITERATIONS.note_choice(folders, taken, unfinished, diagnostics)
    return chosen


# ------------------------------------------------------------------------ the files of an iteration


def _select_files(folder: Path, named: set[str], diagnostics: Diagnostics) -> list[str]:
    sets = {
        match.group("prefix", "total")
        for name in named
        if (match := MINDFORMERS_FILE.fullmatch(name))
    }
    matches = _list_files(folder)
    of_others = [
        name
        for name, match in matches.items()
        if name not in named and match.group("prefix", "total") not in sets
    ]
    diagnostics.add(*describe_ignored(folder, of_others, "of another save"))
    _note_unnamed(folder, named, diagnostics)
    return sorted({*named, *matches}.difference(of_others))


def _list_files(folder: Path) -> dict[str, re.Match[str]]:
    names = [path.name for path in list_folder(folder) if is_file(path)]
    return {
        name: match for name in names if (match := MINDFORMERS_FILE.fullmatch(name)) is not None
    }


def _note_unnamed(folder: Path, named: Collection[str], diagnostics: Diagnostics) -> None:
    names = (path.name for path in checkpoint_files(folder) if path.name not in named)
    unnamed = [name for name in names if MINDFORMERS_FILE.fullmatch(name) is None]
    what = "with other names than MindFormers gives"
    diagnostics.add(*describe_ignored(folder, unnamed, what))


def _incomplete_sets(folder: Path, matches: Iterable[re.Match[str]]) -> Iterator[Diagnostic]:
    sets: dict[tuple[str, str, str], set[int]] = defaultdict(set)
    for match in matches:
        sets[match["prefix"] or "", match["kind"], match["total"]].add(int(match["number"]))
    for (_, kind, total), numbers in sets.items():
        if len(numbers) < int(total):
            missing = (n for n in range(len(numbers) + 1) if n not in numbers)
            message = f"{len(numbers)} of {int(total)} {kind} files found"
            facts = f"number {next(missing)} is missing"
            yield Diagnostic("missing", message, hint=COPY_AGAIN, facts=facts, where=str(folder))


def _by_rank(
    files: FilesByName, ranks_of: Mapping[str, set[int]], known: Collection[str]
) -> tuple[dict[int, FileIndex], list[Diagnostic]]:
    """Join the files of each rank; return them by rank, and the problems.

    A file without a recorded writer belongs to the rank with its number.
    """
    problems = []
    joined: dict[int, FileIndex] = {}
    for name, read in files.items():
        if (file := left_of(read)) is None:
            continue
        match = MINDFORMERS_FILE.fullmatch(name)
        rank, *further = sorted(ranks_of.get(name, ())) or [int(match["number"]) if match else 0]
        if further:
            message = f"{_METADATA} lists {count(1 + len(further), 'rank')} as writers of one file"
            facts = format_ranks((rank, *further))
            problems.append(Diagnostic("missing", message, facts=facts, where=file.path))
        if (first := joined.get(rank)) is not None:
            again = [n for n in file.tensors if n in first.tensors and n not in known]
            if again:
                facts = f"{shorten(again, 3)}; also in {file.path}"
                message = f"{count(len(again), 'tensor')} in two files of one rank"
                problems.append(Diagnostic("missing", message, facts=facts, where=first.path))
            file = replace(
                first,
                files=(*first.files, *file.files),
                nbytes=first.nbytes + file.nbytes,
                tensors={**file.tensors, **first.tensors},
                reads=first.reads + file.reads,
            )
        joined[rank] = file
    return dict(sorted(joined.items())), problems


# ------------------------------------------------------------------------------------ metadata.json


class _Location(Struct, frozen=True):
    """The place of a slice, from ``storage_data``: a file's name, and the rank that wrote it."""

    file_name: str
    storage_rank: int
    rank_group: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if BARE_NAME.fullmatch(self.file_name) is None:
            raise ValueError(f"file_name {short(self.file_name)} is not a file name")
        if not 0 <= self.storage_rank < MAX_RANKS:
            message = f"storage_rank {short(self.storage_rank)} is not a rank below {MAX_RANKS}"
            raise ValueError(message)
        if min(self.rank_group or (0,)) < 0:
            raise ValueError(f"rank_group {short(self.rank_group)} has a rank below 0")


class _Parameter(Struct, frozen=True, dict=True):
    """One tensor of ``metadata.json``, free of contradictions.

    Each rank of ``grid`` is the number of a slice, in C order.  ``number_of`` has that of each rank
    of ``rank_list``, by the layout.  ``claimed`` has the locations of each slice by
    ``storage_data``, and ``stored`` those with the true numbers, without any whose slice nothing
    proves.  Ranks are ``misgrouped`` that are not in the ``rank_group`` of their slice.
    """

    meta: TensorMeta
    grid: Layout
    number_of: Mapping[int, int]
    claimed: Mapping[int, tuple[_Location, ...]]
    stored: Mapping[int, tuple[_Location, ...]]
    misgrouped: tuple[int, ...] = ()

    @property
    def is_renumbered(self) -> bool:
        """Whether ``storage_data`` numbers slices wrongly, so that only the layout counts."""
        return self.stored != self.claimed

    @property
    def locations(self) -> tuple[_Location, ...]:
        return tuple(chain.from_iterable(self.claimed.values()))

    @cached_property
    def regions(self) -> Sequence[Region]:
        return [self.grid.region(number, self.meta.shape) for number in self.grid.ranks]


def read_metadata(path: str, diagnostics: Diagnostics) -> dict[str, _Parameter]:
    """Return the tensors of a ``metadata.json`` by name; note names that are escaped twice.

    Every contradiction is raised, as a FormatError with the name of its tensor.
    """
    document = read_json_object(path, _MAX_BYTES)
    tensors, storage = (document.get(key) for key in ("state_dict_metadata", "storage_data"))
    if not isinstance(tensors, dict) or not isinstance(storage, dict):
        raise FormatError(path, None, "expected the objects state_dict_metadata and storage_data")
    errors: list[FormatError] = []
    stored: dict[str, dict[int, tuple[_Location, ...]]] = {name: {} for name in tensors}
    unknown: list[tuple[str, str, int, tuple[_Location, ...]]] = []
    for key, entries in storage.items():
        try:
            name, number = parse_key(key)
            here = convert_as(tuple[_Location, ...], entries)
        except ValueError as error:
            errors.append(FormatError(path, None, f"storage_data: {key}: {error}"))
            continue
        if name in stored:
            stored[name][number] = here
        else:
            unknown.append((key, name, number, here))
    escaped_twice: dict[str, None] = {}
    meant_by = _find_escaped_names(stored) if unknown else {}
    for key, name, number, here in unknown:
        meant = meant_by.get(name, ())
        if len(meant) == 1 and number not in stored[meant[0]]:
            stored[meant[0]][number] = here
            escaped_twice[meant[0]] = None
        else:
            reason = f"storage_data: {key}: not in state_dict_metadata"
            errors.append(FormatError(path, None, reason))
    if escaped_twice:
        message = f"{count(len(escaped_twice), 'name')} escaped twice in storage_data"
        facts = shorten(escaped_twice, 3)
        diagnostics.add(Diagnostic("corrected", message, facts=facts, where=path))
    parameters = {}
    for name, entry in tensors.items():
        try:
            parameters[name] = _make_parameter(name, convert_as(_Entry, entry), stored[name])
        except ValueError as error:
            errors.append(FormatError(path, None, f"{name}: {error}"))
    raise_all(errors)
    return parameters


def parse_key(key: str) -> tuple[str, int]:
    r"""Return the name and the slice number in a key of ``storage_data``; ValueError for others.

    Examples
    --------
    >>> parse_key("('w', (3,))")
    ('w', 3)
    >>> parse_key(repr(('it\'s "\n"', (0,))))
    ('it\'s "\n"', 0)
    """
    match = _STORAGE_KEY.fullmatch(key)
    if match is None:
        raise ValueError("not a name and a slice number, such as \"('w', (0,))\"")
    spelled = match["name"][1:-1].encode("latin-1", "backslashreplace")
    return spelled.decode("unicode_escape"), int(match[2])


def _find_escaped_names(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return the names by the text that MindFormers 2.1 may take for them.

    It takes a name from a key as it is spelled there, without quotes and blanks at its ends.
    """
    names_of: dict[str, tuple[str, ...]] = {}
    for name in names:
        spelled = repr(name)[1:-1]
        for spelling in dict.fromkeys((spelled, spelled.strip("'\" "))):
            names_of[spelling] = (*names_of.get(spelling, ()), name)
    return names_of


class _Properties(Struct, frozen=True):
    dtype: str


class _Chunk(Struct, frozen=True):
    global_offset: tuple[int, ...]
    local_shape: tuple[int, ...]


class _LayoutEntry(Struct, frozen=True):
    device_matrix: tuple[int, ...]
    tensor_map: tuple[int | tuple[int, ...], ...]
    rank_list: tuple[int, ...]


class _Entry(Struct, frozen=True):
    """A tensor in ``state_dict_metadata``; see the specification of the module."""

    properties: _Properties
    global_shape: tuple[int, ...]
    axis_fragmentations: tuple[int, ...] | None
    chunk: tuple[_Chunk, ...]
    layout: _LayoutEntry | None = None


def _make_parameter(
    name: str, entry: _Entry, stored: Mapping[int, tuple[_Location, ...]]
) -> _Parameter:
    """Return one tensor; raise ValueError if its entry contradicts itself or its locations."""
    shape, counts = entry.global_shape, entry.axis_fragmentations
    counts = (1,) * len(shape) if counts is None else counts
    if len(counts) != len(shape) or any(
        size < 0 or n < 1 or size % n for size, n in zip(shape, counts, strict=True)
    ):
        raise ValueError(f"axis_fragmentations {counts} do not divide global_shape {shape}")
    dtype = find_word(entry.properties.dtype)
    if dtype is None:
        raise ValueError(f"unknown dtype {short(entry.properties.dtype)}")
    meta = TensorMeta(name, dtype.name, shape)
    slice_shape = tuple(size // n for size, n in zip(shape, counts, strict=True))
    numbers = set()
    for chunk in entry.chunk:
        if len(chunk.global_offset) != 1:
            raise ValueError(f"global_offset {chunk.global_offset} is not one slice number")
        if chunk.local_shape != slice_shape:
            raise ValueError(
                f"slice {chunk.global_offset[0]}: local_shape {chunk.local_shape}, expected "
                f"{slice_shape} by global_shape and axis_fragmentations"
            )
        numbers.add(chunk.global_offset[0])
    total = math.prod(counts)
    wrong = sorted(numbers ^ set(range(total)))[:3] if total <= 2 * len(numbers) + 2 else "many"
    if wrong:
        raise ValueError(f"chunk: expected the slices 0 to {total - 1}; wrong or missing: {wrong}")
    beyond = [number for number in stored if number >= total]
    if beyond:
        raise ValueError(f"storage_data: slice {beyond[0]}, expected 0 to {total - 1}")
    grid = Layout(counts, tuple((axis,) for axis in reversed(range(len(counts)))))
    number_of = {} if entry.layout is None else _number_slices(entry.layout, grid)
    if not number_of or total == 1:
        return _Parameter(meta, grid, number_of, stored, stored)
    if not _is_block(tuple(number_of)):
        by_layout = _place_by_layout(chain(*stored.values()), number_of)
        return _Parameter(meta, grid, number_of, stored, by_layout)
    groups = {
        number: [at.rank_group for at in places if at.rank_group is not None]
        for number, places in stored.items()
    }
    misgrouped = tuple(
        rank
        for rank, number in number_of.items()
        if groups.get(number) and all(rank not in group for group in groups[number])
    )
    return _Parameter(meta, grid, number_of, stored, stored, misgrouped)


def _number_slices(entry: _LayoutEntry, grid: Layout) -> dict[int, int]:
    """Return the slice number of every rank of a layout, which has to match ``grid``."""
    matrix, ranks = entry.device_matrix, entry.rank_list
    if math.prod(matrix) != len(ranks) or len(set(ranks)) != len(ranks):
        raise ValueError(f"layout: {len(ranks)} ranks do not fit the device matrix {list(matrix)}")
    wrong = [rank for rank in ranks if not 0 <= rank < MAX_RANKS]
    if wrong:
        raise ValueError(f"layout: rank {short(max(wrong))}, expected less than {MAX_RANKS}")
    maps = ((axes,) if isinstance(axes, int) else axes for axes in entry.tensor_map)
    layout = Layout(matrix, tuple(tuple(axis for axis in axes if axis != -1) for axes in maps))
    if layout.slice_counts != grid.slice_counts:
        raise ValueError(
            f"the layout makes {layout.slice_counts} slices, axis_fragmentations "
            f"{grid.slice_counts}"
        )
    return {rank: grid.owners(layout.slice_index(n))[0] for n, rank in enumerate(ranks)}


def _is_block(ranks: Sequence[int]) -> bool:
    first = ranks[0] // len(ranks)
    return [divmod(rank, len(ranks)) for rank in ranks] == [(first, n) for n in range(len(ranks))]


def _place_by_layout(
    locations: Iterable[_Location], number_of: Mapping[int, int]
) -> dict[int, tuple[_Location, ...]]:
    stored: dict[int, tuple[_Location, ...]] = {}
    for location in locations:
        if (number := number_of.get(location.storage_rank)) is not None:
            stored[number] = (*stored.get(number, ()), location)
    return stored


# -------------------------------------------------------------------------- the slices in the files

_UNSAVED = ("gradient", "state")  # why the run saved no file with a parameter


class _Placed(NamedTuple):
    """A parameter of ``metadata.json``, compared with the headers of the files.

    ``tensor`` is None if slices are missing or do not fit.  ``absence`` says why no file has it:
    ``"unlocated"`` or one of `_UNSAVED`; "" if some file should.  ``without_copy`` has the ranks of
    stages that do not own the parameter and did not save it.  ``is_in_other_file`` says that a
    slice is in the other file of the same rank.
    """

    tensor: FullTensor | None = None
    absence: str = ""
    faults: Sequence[tuple[Fault, str]] = ()
    problems: Sequence[Diagnostic] = ()
    without_copy: Collection[int] = ()
    is_in_other_file: bool = False


def _place(parameter: _Parameter, iteration: _Iteration) -> _Placed:
    """Find the slices of a parameter at their locations."""
    name = parameter.meta.name
    if not parameter.claimed:
        return _Placed(absence="unlocated")
    slices = [
        [(at, iteration.find(name, at)) for at in parameter.stored.get(number, ())]
        for number in parameter.grid.ranks
    ]
    boxes = [
        Box(region, at.storage_rank, tensor)
        for region, tried in zip(parameter.regions, slices, strict=True)
        for at, tensor in tried
        if isinstance(tensor, StoredTensor)
    ]
    faults = [[(at, fault) for at, fault in of if isinstance(fault, Fault)] for of in slices]
    if not boxes and iteration.lacks_optimizer and iteration.is_unsaved_state(parameter):
        return _Placed(absence="state")
    if all(len(of) < len(tried) for of, tried in zip(faults, slices, strict=True)):
        return _fill(parameter, boxes, [*chain(*faults)], iteration)
    is_gradient = parse_name(name).is_gradient and iteration.lacks_gradients
    if is_gradient and all(any(iteration.has_read(at) for at, _ in of) for of in faults):
        return _Placed(absence="gradient")
    problems = []
    harm: list[tuple[Fault, str]] = []
    for number, (of, tried) in enumerate(zip(faults, slices, strict=True)):
        is_lost = len(of) == len(tried)
        harm += ((fault, name if is_lost else "") for _, fault in of)
        if not tried and parameter.is_renumbered:
            problems.append(_lost_slice(parameter, number))
        elif not tried:
            path = str(iteration.folder / _METADATA)
            harm.append((Fault(path, "lists no file for some slices"), name))
    problems += box_problems(parameter.meta, boxes)
    return _Placed(faults=harm, problems=problems)


def _fill(
    parameter: _Parameter,
    boxes: list[Box],
    faults: Sequence[tuple[_Location, Fault]],
    iteration: _Iteration,
) -> _Placed:
    """Return a parameter that is stored completely, or its problems.

    If stages share a parameter, MindSpore leaves it out of the files of stages that do not own it,
    though metadata lists it there.  So a whole stage may lack it.
    """
    holding = {box.rank // iteration.stage_ranks for box in boxes}
    without_copy = {
        at: at.storage_rank
        for at, _ in faults
        if iteration.has_read(at) and at.storage_rank // iteration.stage_ranks not in holding
    }
    named = {location.file_name for location in parameter.locations}
    placed = _Placed(
        faults=[(fault, "") for at, fault in faults if at not in without_copy],
        without_copy={*without_copy.values()},
        is_in_other_file=any(Path(box.tensor.file.path).name not in named for box in boxes),
    )
    problems = list(_layout_problems(parameter, boxes))
    filled = problems or fill_with_boxes(parameter.meta, boxes)
    if isinstance(filled, BoxSlicing):
        return placed._replace(tensor=FullTensor(parameter.meta, filled, Listed()))
    return placed._replace(problems=filled)


def _lost_slice(parameter: _Parameter, number: int) -> Diagnostic:
    owners = tuple(rank for rank, own in parameter.number_of.items() if own == number)
    storing = format_ranks(sorted({location.storage_rank for location in parameter.locations}))
    message = "ranks that hold a slice by the layout did not save it"
    facts = f"elements {parameter.regions[number]} belong to {format_ranks(owners)}; {storing} "
    facts += "saved the tensor, with wrong slice numbers"
    hint = "`ckpttool help missing` explains"
    tensor = parameter.meta.name
    return Diagnostic("missing", message, hint=hint, facts=facts, tensor=tensor, ranks=owners)


def _layout_problems(parameter: _Parameter, boxes: list[Box]) -> Iterator[Diagnostic]:
    """Yield a problem for each rank that has another slice by the layout than by the storage."""

    def problem(rank: int, facts: str) -> Diagnostic:
        what, name, ranks = f"{_METADATA} contradicts itself", parameter.meta.name, (rank,)
        return Diagnostic("missing", what, hint=COPY_AGAIN, facts=facts, tensor=name, ranks=ranks)

    own = {rank: parameter.regions[number] for rank, number in parameter.number_of.items()}
    for box in boxes:
        if own.get(box.rank, box.region) != box.region:
            place = f"rank {box.rank} ({box.tensor.file.path})"
            facts = f"{place}: elements {box.region} by storage_data, {own[box.rank]} by the layout"
            yield problem(box.rank, facts)
    for rank in parameter.misgrouped:
        facts = f"rank {rank}: elements {own[rank]} by the layout, "
        yield problem(rank, f"{facts}and not in the rank_group of that slice")


class _Iteration(Struct, frozen=True, dict=True):
    """The parameters of ``metadata.json``, its files, and who wrote each file by metadata."""

    folder: Path
    parameters: Mapping[str, _Parameter]
    files: FilesByName
    writers: Mapping[str, Collection[int]]

    def has_read(self, location: _Location) -> bool:
        return isinstance(self.files.get(location.file_name), FileIndex)

    def find(self, name: str, location: _Location) -> StoredTensor | Fault:
        """Return the tensor in the file of a location, or in the other file of the same rank."""
        file, rank = location.file_name, location.storage_rank
        tensor = find_tensor(self.folder, self.files, file, name, _METADATA)
        match = MINDFORMERS_FILE.fullmatch(file)
        is_damaged = isinstance(self.files.get(file), FormatError)
        if isinstance(tensor, Fault) and match is not None and not is_damaged:
            start, stop = match.span("kind")
            kind = "opt" if match["kind"] == "model" else "model"
            other = left_of(self.files.get(file[:start] + kind + file[stop:]))
            writers = self.writers.get(file[:start] + kind + file[stop:], ())
            is_own = int(match["number"]) == rank and {rank}.issuperset(writers)
            if is_own and other is not None:
                return other.tensors.get(name) or tensor
        return tensor

    @cached_property
    def stage_ranks(self) -> int:
        return max((len(of.number_of) for of in self.parameters.values()), default=0) or MAX_RANKS

    @cached_property
    def names(self) -> frozenset[str]:
        read = map(left_of, self.files.values())
        return frozenset(chain.from_iterable(file.header for file in read if file is not None))

    @cached_property
    def lacks_optimizer(self) -> bool:
        """Whether all model files are there and no file of optimizer state is."""
        matches = [match for file in self.files if (match := MINDFORMERS_FILE.fullmatch(file))]
        are_models = {match["kind"] for match in matches} == {"model"}
        return are_models and not any(_incomplete_sets(self.folder, matches))

    @cached_property
    def lacks_gradients(self) -> bool:
        return not any(parse_name(name).is_gradient for name in self.names)

    def is_unsaved_state(self, parameter: _Parameter) -> bool:
        """Return whether metadata lists a tensor as optimizer state only, and no file has it."""
        named = (MINDFORMERS_FILE.fullmatch(at.file_name) for at in parameter.locations)
        is_state = all(match is not None and match["kind"] == "opt" for match in named)
        return is_state and parameter.meta.name not in self.names
