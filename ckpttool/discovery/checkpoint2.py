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
* ``layout`` is null or absent for a tensor that is not sharded.  Its ``tensor_map`` has a device
  axis (0 is the innermost), a list of them (outermost split first) or -1 for every tensor axis.
  An optimizer shard is a further device axis in it.  ``rank_list`` has the global ranks of the
  stage, or of a part of it, in the order of the device matrix.
* ``rank_group`` has all ranks with the slice, as MindFormers numbers it; absent before 1.9.
* ``replica_id`` repeats the layout, and is not read.

Wrong slice numbers
-------------------
MindFormers takes rank ``r`` for place ``r % n`` of a ``rank_list`` of ``n`` ranks.  This is the
rank's place in a block of consecutive ranks that starts at a multiple of ``n``, such as a stage.
It is then also right for a rank of another stage, which may store a copy of a shared parameter.
For any other list the numbers are wrong: in PyNative a parameter on the fsdp mesh alone has
``[0, 2]`` on ranks 0 and 2 and ``[1, 3]`` on ranks 1 and 3, and metadata has one of these lists.
Then only ranks of the list count, with the slice that the layout gives them.  Where redundancy
was removed, two stored slices may be the same one and another may be lost.  A tensor of one slice
has no number that could be wrong.

One commit of MindFormers wrote the number of the parameter in place of the rank's, in the names of
files as well.  So all slices of a parameter seem to be in one file.  Such metadata is refused.

Up to 2.0 metadata could name ``opt`` files for the parameters of other pipeline stages, which are
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
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from reprlib import repr as short
from typing import NamedTuple

from ckpttool.discovery.leftovers import note_leftovers
from ckpttool.discovery.numbered_saves import NumberedSaves
from ckpttool.discovery.rank_folders import checkpoint_files
from ckpttool.formats import read_indexes
from ckpttool.formats.local import identify_file, is_file, list_folder
from ckpttool.formats.strict_json import read_json_object
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
_ITERATIONS = NumberedSaves("iteration", re.compile(r"iter(?:ation)?_(\d{1,18})"), _TRACKER)
MINDFORMERS_FILE = re.compile(
    r"(?:(?P<prefix>.*)-)?(?P<kind>model|opt)-(?P<number>\d{7,18})-(?P<total>\d{7,18})\.safetensors"
)
BARE_NAME = re.compile(r"(?!\.\.?$)[^/\0]+")  # in the same folder
_STORAGE_KEY = re.compile(r"""\((?P<name>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"), \((\d{1,12}),\)\)""")
_ESCAPE = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8})|(.))", re.DOTALL)
_ESCAPED = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", "'": "'", '"': '"'}
_MAX_BYTES = 1_000_000_000  # every slice of every rank takes some hundred bytes of it

FilesByName = dict[str, FileIndex | None]  # by name; None for a damaged one


def scan_checkpoint2(src: str, step: str | None) -> Catalog | None:
    """Return the catalog of a MindFormers checkpoint; None if ``src`` is something else.

    Parameters
    ----------
    src
        The folder of one iteration, or the one above.
    step
        The iteration to read; by default the last complete one.

    Raises
    ------
    PlanError, FormatError, CombinedError
        The iteration cannot be chosen, or ``metadata.json`` is damaged.
    OSError
        A folder or a file cannot be read.
    """
    folder, diagnostics = Path(src), Diagnostics()
    if is_file(folder / _TRACKER) or _ITERATIONS.find_folders(folder):
        folder = _find_iteration(folder, step, diagnostics)
        if not _is_iteration(folder):
            text = f"no {_METADATA} and no model-*.safetensors of MindFormers in it"
            hint = "--step with another iteration"
            raise PlanError([Diagnostic("source", text, hint=hint, where=str(folder))])
    elif not _is_iteration(folder):
        return None
    else:
        _ITERATIONS.require_wanted(folder, step)
    note_leftovers(folder, (), diagnostics)
    values = _read_common(folder, diagnostics)
    errors: list[FormatError] = []
    metadata = folder / _METADATA
    documents = (identify_file(str(metadata)),) if is_file(metadata) else ()
    read = _read_described if documents else _read_whole
    files, description = read(folder, errors, diagnostics)
    number = _ITERATIONS.number(folder)
    return Catalog(
        src,
        files,
        step=None if number is None else str(number),
        damaged=dict(enumerate(errors)),  # one rank may have two damaged files; keys are not ranks
        diagnostics=tuple(diagnostics),
        documents=documents,
        description=replace(description, values=values),
    )


def _is_iteration(folder: Path) -> bool:
    """Return whether a folder holds one iteration."""
    if any(MINDFORMERS_FILE.fullmatch(path.name) for path in list_folder(folder)):
        return True
    metadata = folder / _METADATA
    return is_file(metadata) and _is_metadata(str(metadata))


def _read_common(folder: Path, diagnostics: Diagnostics) -> Mapping[str, str]:
    """Return the values of ``common.json`` as text; empty if it is absent or damaged."""
    path = folder / _COMMON
    if not is_file(path):
        return {}
    try:
        document = read_json_object(str(path), _MAX_BYTES)
    except FormatError as error:
        text = f"{_COMMON} cannot be read: ignored"
        diagnostics.add(Diagnostic("skipped", text, facts=error.reason, where=str(path)))
        return {}
    values = {key: str(value) for key, value in document.items()}
    shown = shorten((f"{key} {value}" for key, value in values.items()), 8)
    diagnostics.add(Diagnostic("skipped", f"{_COMMON} is not written to any output", facts=shown))
    return values


def _read_described(
    folder: Path, errors: list[FormatError], diagnostics: Diagnostics
) -> tuple[dict[int, FileIndex], Description]:
    """Return the files by rank and the description of a folder with ``metadata.json``."""
    metadata = str(folder / _METADATA)
    parameters = read_metadata(metadata, diagnostics)
    files = read_existing_files(
        folder, _select_files(folder, set(_writers(parameters)), diagnostics), errors
    )
    placement = _place_slices(parameters, str(folder), files)
    if placement.problems and _has_parameter_numbers(parameters):
        reason = "numbers of parameters stand in place of ranks"
        facts = "a commit of MindFormers between 1.7 and 1.8 wrote this"
        hint = f"{folder} as SRC, with -s STRATEGY --pattern '*model-{{rank}}-*.safetensors'"
        raise UnsupportedError(metadata, None, reason, hint, facts)
    diagnostics.add(*placement.faults.notes(), *_placement_notes(placement, metadata))
    renumbered = [name for name, one in parameters.items() if one.is_renumbered]
    if renumbered:
        text = f"storage_data numbers slices of {count(len(renumbered), 'parameter')} wrongly"
        facts = f"{shorten(renumbered, 3)}: only ranks of the layouts count"
        diagnostics.add(Diagnostic("corrected", text, facts=facts, where=metadata))
    if placement.unsaved_states:
        diagnostics.add(_no_optimizer(folder, parameters, placement.unsaved_states))
    by_rank, problems = _by_rank(files, _writers(parameters), parameters)
    problems = [*placement.problems, *problems]
    unsaved = {*placement.unsaved_states, *placement.unsaved_gradients}
    broken = frozenset(parameters) - placement.tensors.keys() - unsaved
    description = Description((metadata,), placement.tensors, broken, tuple(problems))
    return by_rank, description


def _placement_notes(placement: _Placement, metadata: str) -> Iterator[Diagnostic]:
    """Yield notes on parameters that are not where ``metadata.json`` lists them."""
    if names := placement.in_other_file:
        text = f"{count(len(names), 'parameter')} listed in the wrong one of a rank's two files"
        yield Diagnostic("corrected", text, facts=shorten(names, 3), where=metadata)
    if names := [*placement.unlocated, *placement.unsaved_gradients]:
        text = f"{count(len(names), 'parameter')} described, but in no file"
        yield Diagnostic("absent", text, facts=shorten(names, 3), where=metadata)
    if copies := placement.copies:
        ranks = sorted(set().union(*copies.values()))
        text = f"{count(len(copies), 'parameter', 'are')} listed for a stage that saved no copy"
        facts = f"{shorten(copies, 3)}; not on {format_ranks(ranks)}: another stage has all slices"
        yield Diagnostic("absent", text, facts=facts, ranks=tuple(ranks), where=metadata)


def _no_optimizer(
    folder: Path, parameters: Mapping[str, _Parameter], states: Sequence[str]
) -> Diagnostic:
    """Return the diagnostic of optimizer state that was not saved, or not copied."""
    files = sorted({location.file for name in states for location in parameters[name].locations})
    text = f"no file of optimizer state is there: {count(len(states), 'tensor', 'are')} left out"
    facts = f"{shorten(states, 3)}; {_METADATA} lists {shorten(files, 1)}"
    hint = "copy the opt files again, if the run saved them"
    return Diagnostic("no_optimizer", text, hint=hint, facts=facts, where=str(folder))


def _read_whole(
    folder: Path, errors: list[FormatError], diagnostics: Diagnostics
) -> tuple[dict[int, FileIndex], Description]:
    """Return the files by number and the description of a folder of full tensors."""
    matches = _list_files(folder)
    _note_unnamed(folder, (), diagnostics)
    files = read_existing_files(folder, matches, errors)
    problems = list(_incomplete_sets(folder, matches.values()))
    tensors: dict[str, FullTensor] = {}
    twice: dict[str, list[str]] = {}
    for file, match in matches.items():
        index = files.get(file)
        for name, tensor in {} if index is None else index.tensors.items():
            if name in tensors:
                owners = next(tensors[name].slicing.replicas())
                first = Path(next(iter(owners.values())).file.path).name
                twice.setdefault(name, [first]).append(file)
                continue
            box = Box(Region.whole(tensor.meta.shape), int(match["number"]), tensor)
            whole = fill_with_boxes(tensor.meta, [box])
            assert isinstance(whole, BoxSlicing), "one box is all of it"
            tensors[name] = FullTensor(tensor.meta, whole, Listed())
    problems += [_slices_problem(folder, twice, matches)] if twice else []
    if len(files) > 1 and max(int(match["total"]) for match in matches.values()) > 1:
        text = f"no {_METADATA}: every file is read as one of full tensors"
        diagnostics.add(Diagnostic("undivided", text, where=str(folder)))
    broken = frozenset(twice)
    tensors = {name: whole for name, whole in tensors.items() if name not in broken}
    by_rank, _ = _by_rank(files, {}, {*tensors, *broken})
    origin = tuple(str(folder / name) for name in matches)
    return by_rank, Description(origin, tensors, broken, tuple(problems))


def _slices_problem(
    folder: Path, twice: Mapping[str, list[str]], matches: Mapping[str, re.Match[str]]
) -> Diagnostic:
    """Return the problem of parameters in several files, which must be slices."""
    start, stop = next(iter(matches.values())).span("number")
    first = next(iter(matches))
    text = f"{count(len(twice), 'parameter')} in several files, and no {_METADATA} for slices"
    examples = (f"{name} ({shorten(files, 2)})" for name, files in twice.items())
    hint = f"copy {_METADATA} again, or "
    hint += f"-s STRATEGY --pattern '{first[:start]}{{rank}}{first[stop:]}'"
    return Diagnostic("missing", text, hint=hint, facts=shorten(examples, 3), where=str(folder))


# --------------------------------------------------------------------------------------- iterations


def _find_iteration(root: Path, wanted: str | None, diagnostics: Diagnostics) -> Path:
    """Return the folder of one iteration below ``root``.

    Parameters
    ----------
    root
        A folder with folders of iterations, or the file that names the last complete one.
    wanted
        The iteration to read, as a number or a folder's name; by default the last complete one.
    diagnostics
        Gets a note on the choice, and on iterations that were not finished.

    Raises
    ------
    PlanError
        The requested iteration does not exist, or no file names the last complete one.
    FormatError
        The file that names it is damaged.
    """
    folders, last = _ITERATIONS.find_folders(root), _ITERATIONS.read_tracker(root)
    if wanted is None:
        if last is None:
            text = f"no {_TRACKER}, which names the last complete iteration"
            raise _ITERATIONS.problem(root, folders, text)
        if last not in folders.values():
            facts, hint = _list_alternatives(folders, last)
            text = f"no folder of iteration {last}, which {_TRACKER} names"
            raise PlanError([Diagnostic("source", text, hint=hint, facts=facts, where=str(root))])
    chosen = _ITERATIONS.choose(root, folders, str(last) if wanted is None else wanted)
    _note_choice(folders, folders[chosen], last, diagnostics)
    return chosen


def _list_alternatives(folders: Mapping[Path, int], last: int) -> tuple[str, str]:
    """Return the iterations to read in place of the last complete one, and a hint."""
    saved = sorted(
        {
            n
            for path, n in folders.items()
            if any(MINDFORMERS_FILE.fullmatch(p.name) for p in list_folder(path))
        }
    )
    complete = [str(n) for n in saved if n <= last]
    newer = [str(n) for n in saved if n > last]
    facts = [f"complete: {shorten(reversed(complete), 3) or 'none'}"]
    facts += [f"perhaps not finished: {shorten(newer, 3)}"] if newer else []
    return "; ".join(facts), f"--step {complete[-1]}" if complete else ""


def _note_choice(
    folders: Mapping[Path, int], taken: int, last: int | None, diagnostics: Diagnostics
) -> None:
    """Note which of several iterations is read, and which were not finished."""
    if last is not None and taken > last:
        facts = f"{_TRACKER} names {last}"
        text = f"iteration {taken} was perhaps not finished"
        diagnostics.add(Diagnostic("step", text, facts=facts))
        return
    newer = [path for path, number in folders.items() if last is not None and number > last]
    _ITERATIONS.note_choice(folders, taken, newer, diagnostics)


# ------------------------------------------------------------------------ the files of an iteration


def _select_files(folder: Path, named: set[str], diagnostics: Diagnostics) -> list[str]:
    """Return the files that metadata names, and those of the same save."""
    sets = {
        match.group("prefix", "total")
        for name in named
        if (match := MINDFORMERS_FILE.fullmatch(name))
    }
    matches = _list_files(folder)
    others = [
        name
        for name, match in matches.items()
        if name not in named and match.group("prefix", "total") not in sets
    ]
    if others:
        text = f"{count(len(others), 'file')} of another save: ignored"
        diagnostics.add(Diagnostic("skipped", text, facts=shorten(others, 3), where=str(folder)))
    _note_unnamed(folder, named, diagnostics)
    return sorted({*named, *matches}.difference(others))


def _list_files(folder: Path) -> dict[str, re.Match[str]]:
    """Return the names of MindFormers' files in a folder, and their matches."""
    names = [path.name for path in list_folder(folder) if is_file(path)]
    return {
        name: match for name in names if (match := MINDFORMERS_FILE.fullmatch(name)) is not None
    }


def _note_unnamed(folder: Path, named: Collection[str], diagnostics: Diagnostics) -> None:
    """Note checkpoint files that metadata does not name and that have other names."""
    names = (path.name for path in checkpoint_files(folder) if path.name not in named)
    unnamed = [name for name in names if MINDFORMERS_FILE.fullmatch(name) is None]
    if unnamed:
        text = f"{count(len(unnamed), 'file')} with other names than MindFormers gives: ignored"
        diagnostics.add(Diagnostic("skipped", text, facts=shorten(unnamed, 3), where=str(folder)))


def _incomplete_sets(folder: Path, matches: Iterable[re.Match[str]]) -> Iterator[Diagnostic]:
    """Yield a problem for each set of files that lacks some of its numbers."""
    sets: dict[tuple[str, str, str], set[int]] = defaultdict(set)
    for match in matches:
        sets[match["prefix"] or "", match["kind"], match["total"]].add(int(match["number"]))
    for (_, kind, total), numbers in sets.items():
        if len(numbers) < int(total):
            missing = (n for n in range(len(numbers) + 1) if n not in numbers)
            text = f"{len(numbers)} of {int(total)} {kind} files found"
            facts = f"number {next(missing)} is missing"
            yield Diagnostic("missing", text, hint=COPY_AGAIN, facts=facts, where=str(folder))


def _by_rank(
    files: FilesByName, ranks_of: Mapping[str, set[int]], described: Collection[str]
) -> tuple[dict[int, FileIndex], list[Diagnostic]]:
    """Join the files of each rank; return them by rank, and the problems.

    A file without a recorded writer belongs to the rank with its number.
    """
    problems = []
    grouped: dict[int, list[FileIndex]] = defaultdict(list)
    for name, file in files.items():
        if file is not None:
            match = MINDFORMERS_FILE.fullmatch(name)
            ranks = sorted(ranks_of.get(name, ())) or [int(match["number"]) if match else 0]
            grouped[ranks[0]].append(file)
            if len(ranks) > 1:
                text = f"{_METADATA} lists {count(len(ranks), 'rank')} as writers of one file"
                facts = format_ranks(ranks)
                problems.append(Diagnostic("missing", text, facts=facts, where=file.path))
    joined = {}
    for rank, (first, *more) in sorted(grouped.items()):
        tensors = dict(first.tensors)
        for file in more:
            again = [name for name in file.tensors if name in tensors and name not in described]
            if again:
                facts = f"{shorten(again, 3)}; also in {file.path}"
                text = f"{count(len(again), 'tensor')} in two files of one rank"
                problems.append(Diagnostic("missing", text, facts=facts, where=first.path))
            tensors = {**file.tensors, **tensors}
        nbytes = sum(file.nbytes for file in (first, *more))
        stored = tuple(chain.from_iterable(file.files for file in (first, *more)))
        joined[rank] = replace(first, files=stored, nbytes=nbytes, tensors=tensors)
    return joined, problems


# ------------------------------------------------------------------------------------ metadata.json


@dataclass(frozen=True, slots=True)
class _StorageLocation:
    """Where a slice is stored: a file's name, and the rank that wrote it."""

    file: str
    rank: int


@dataclass(frozen=True, slots=True)
class _Parameter:
    """One tensor of ``metadata.json``, free of contradictions.

    Attributes
    ----------
    meta
        Name, element type and full shape.
    slice_counts
        Slices along each axis; slices are numbered in C order.
    number_of
        For each rank of ``rank_list`` the number of its slice by the layout; None without a layout.
    listed
        Number of a slice to its locations by ``storage_data``; slices without one are left out.
    stored
        The same, with the true numbers; locations whose slice nothing proves are left out.
    misgrouped
        Ranks of ``number_of`` that are not in the ``rank_group`` of their slice.
    """

    meta: TensorMeta
    slice_counts: tuple[int, ...]
    number_of: Mapping[int, int] | None
    listed: Mapping[int, tuple[_StorageLocation, ...]]
    stored: Mapping[int, tuple[_StorageLocation, ...]]
    misgrouped: tuple[int, ...] = ()

    @property
    def is_renumbered(self) -> bool:
        """Whether ``storage_data`` numbers slices wrongly, so that only the layout counts."""
        return self.stored != self.listed

    @property
    def locations(self) -> tuple[_StorageLocation, ...]:
        """All locations by ``storage_data``."""
        return tuple(chain.from_iterable(self.listed.values()))


def _is_metadata(path: str) -> bool:
    """Return whether a ``metadata.json`` is MindFormers'."""
    document = read_json_object(path, _MAX_BYTES)
    return "state_dict_metadata" in document and "storage_data" in document


def read_metadata(path: str, diagnostics: Diagnostics) -> dict[str, _Parameter]:
    """Return the tensors of a ``metadata.json`` by name; note names that are escaped twice.

    Raises
    ------
    FormatError, CombinedError
        The file is not a ``metadata.json``, or contradicts itself: every problem, each with the
        name of the tensor.
    OSError
        The file cannot be opened or read.
    """
    document = read_json_object(path, _MAX_BYTES)
    tensors, storage = (document.get(key) for key in ("state_dict_metadata", "storage_data"))
    if not isinstance(tensors, dict) or not isinstance(storage, dict):
        raise FormatError(path, None, "expected the objects state_dict_metadata and storage_data")
    errors: list[FormatError] = []
    stored: dict[str, dict[int, _StoredSlice]] = {name: {} for name in tensors}
    unknown: list[tuple[str, str, int, _StoredSlice]] = []
    for key, entries in storage.items():
        try:
            name, number = parse_key(key)
            here = _parse_stored_slice(entries)
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
        text = f"{count(len(escaped_twice), 'name')} escaped twice in storage_data"
        facts = shorten(escaped_twice, 3)
        diagnostics.add(Diagnostic("corrected", text, facts=facts, where=path))
    parameters = {}
    for name, entry in tensors.items():
        try:
            parameters[name] = _parse_parameter(name, entry, stored[name])
        except ValueError as error:
            errors.append(FormatError(path, None, f"{name}: {error}"))
    raise_all(errors)
    return parameters


def parse_key(key: str) -> tuple[str, int]:
    r"""Return the name and the slice number in a key of ``storage_data``.

    Raises
    ------
    ValueError
        The key is not what Python writes for a name and a tuple of one number.

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
    return _ESCAPE.sub(_unescape, match["name"][1:-1]), int(match[2])


def _find_escaped_names(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    r"""Return the names by the text that MindFormers 2.1 may take for them.

    It takes a name from a key as it is spelled there, without quotes and blanks at its ends.

    Examples
    --------
    >>> _find_escaped_names(["back\\slash"])
    {'back\\\\slash': ('back\\slash',)}
    """
    found: dict[str, tuple[str, ...]] = {}
    for name in names:
        spelled = repr(name)[1:-1]
        for text in dict.fromkeys((spelled, spelled.strip("'\" "))):
            found[text] = (*found.get(text, ()), name)
    return found


def _unescape(match: re.Match[str]) -> str:
    """Return the character that an escape sequence stands for."""
    digits = match[1] or match[2] or match[3]
    if digits is None and match[4] not in _ESCAPED:
        raise ValueError(f"unknown escape {match[0]}")
    return _ESCAPED[match[4]] if digits is None else chr(int(digits, 16))


class _StoredSlice(NamedTuple):
    """The locations of one slice, and the ranks that have it by ``rank_group``; None without it."""

    locations: tuple[_StorageLocation, ...]
    group: frozenset[int] | None


def _parse_stored_slice(entries: object) -> _StoredSlice:
    """Return what ``storage_data`` says of one slice; raise ValueError."""
    if not isinstance(entries, list):
        raise ValueError("not a list")
    locations = []
    group: frozenset[int] | None = None
    for entry in entries:
        file, rank = _require(entry, "file_name"), _require(entry, "storage_rank")
        if not isinstance(file, str) or BARE_NAME.fullmatch(file) is None:
            raise ValueError(f"file_name {short(file)} is not a file name")
        if type(rank) is not int or not 0 <= rank < MAX_RANKS:
            raise ValueError(f"storage_rank {short(rank)} is not a rank below {MAX_RANKS}")
        locations.append(_StorageLocation(file, rank))
        if entry.get("rank_group") is not None:
            group = (group or frozenset()).union(_parse_sizes(entry, "rank_group"))
    return _StoredSlice(tuple(locations), group)


def _parse_parameter(name: str, entry: object, slices: Mapping[int, _StoredSlice]) -> _Parameter:
    """Return one tensor; raise ValueError if its entry is wrong."""
    shape = _parse_sizes(entry, "global_shape")
    counts = _parse_sizes(entry, "axis_fragmentations", default=(1,) * len(shape))
    if len(counts) != len(shape) or any(
        n < 1 or size % n for size, n in zip(shape, counts, strict=True)
    ):
        raise ValueError(f"axis_fragmentations {counts} do not divide global_shape {shape}")
    word = _require(_require(entry, "properties"), "dtype")
    dtype = find_word(word) if isinstance(word, str) else None
    if dtype is None:
        raise ValueError(f"unknown dtype {short(word)}")
    slice_shape = tuple(size // n for size, n in zip(shape, counts, strict=True))
    numbers = _parse_slice_numbers(entry, slice_shape)
    total = math.prod(counts)
    wrong = sorted(numbers ^ set(range(total)))[:3] if total <= 2 * len(numbers) + 2 else "many"
    if wrong:
        raise ValueError(f"chunk: expected the slices 0 to {total - 1}; wrong or missing: {wrong}")
    beyond = [number for number in slices if number >= total]
    if beyond:
        raise ValueError(f"storage_data: slice {beyond[0]}, expected 0 to {total - 1}")
    layout = entry.get("layout") if isinstance(entry, dict) else None
    number_of = None if layout is None else _parse_layout(layout, counts)
    listed = {number: here.locations for number, here in slices.items()}
    stored: Mapping[int, tuple[_StorageLocation, ...]] = listed
    misgrouped: tuple[int, ...] = ()
    if number_of is not None and total > 1:
        if _is_block(tuple(number_of)):
            groups = {number: here.group for number, here in slices.items()}
            misgrouped = tuple(
                rank
                for rank, number in number_of.items()
                if (group := groups.get(number)) is not None and rank not in group
            )
        else:
            stored = _place_by_layout(listed, number_of)
    meta = TensorMeta(name, dtype.name, shape)
    return _Parameter(meta, counts, number_of, listed, stored, misgrouped)


def _is_block(ranks: Sequence[int]) -> bool:
    """Return whether ranks are consecutive and begin at a multiple of their number.

    Examples
    --------
    >>> _is_block([4, 5, 6, 7]), _is_block([2, 3, 4, 5]), _is_block([0, 3])
    (True, False, False)
    """
    first = ranks[0] // len(ranks)
    return [divmod(rank, len(ranks)) for rank in ranks] == [(first, n) for n in range(len(ranks))]


def _place_by_layout(
    listed: Mapping[int, Sequence[_StorageLocation]], number_of: Mapping[int, int]
) -> dict[int, tuple[_StorageLocation, ...]]:
    """Return the locations of the ranks of a layout, by the slice that it gives them."""
    stored: dict[int, tuple[_StorageLocation, ...]] = {}
    for location in chain.from_iterable(listed.values()):
        if (number := number_of.get(location.rank)) is not None:
            stored[number] = (*stored.get(number, ()), location)
    return stored


def _parse_slice_numbers(entry: object, slice_shape: tuple[int, ...]) -> set[int]:
    """Return the numbers of the slices of a tensor, which have to be of one shape."""
    chunks = _require(entry, "chunk")
    if not isinstance(chunks, list):
        raise ValueError(f"chunk {short(chunks)} is not a list")
    numbers = set()
    for chunk in chunks:
        number = _parse_sizes(chunk, "global_offset")
        if len(number) != 1:
            raise ValueError(f"global_offset {number} is not one slice number")
        if (local := _parse_sizes(chunk, "local_shape")) != slice_shape:
            raise ValueError(
                f"slice {number[0]}: local_shape {local}, expected {slice_shape} by global_shape "
                "and axis_fragmentations"
            )
        numbers.add(number[0])
    return numbers


def _parse_layout(spelled: object, counts: tuple[int, ...]) -> dict[int, int]:
    """Return the slice number of every rank of a layout, which has to match ``counts``."""
    matrix, ranks = _parse_sizes(spelled, "device_matrix"), _parse_sizes(spelled, "rank_list")
    if math.prod(matrix) != len(ranks) or len(set(ranks)) != len(ranks):
        raise ValueError(f"layout: {len(ranks)} ranks do not fit the device matrix {list(matrix)}")
    if max(ranks, default=0) >= MAX_RANKS:
        raise ValueError(f"layout: rank {short(max(ranks))}, expected less than {MAX_RANKS}")
    tensor_map = _require(spelled, "tensor_map")
    if not isinstance(tensor_map, list):
        raise ValueError(f"layout: tensor_map {short(tensor_map)} is not a list")
    layout = Layout(matrix, tuple(_parse_device_axes(axes) for axes in tensor_map))
    if layout.slice_counts != counts:
        raise ValueError(
            f"the layout makes {layout.slice_counts} slices, axis_fragmentations {counts}"
        )
    numbers = {}
    for local, rank in enumerate(ranks):
        number = 0
        for i, n in zip(layout.slice_index(local), counts, strict=True):
            number = number * n + i
        numbers[rank] = number
    return numbers


def _parse_device_axes(spelled: object) -> tuple[int, ...]:
    """Return the device axes that shard a tensor axis."""
    spellings = spelled if isinstance(spelled, list) else [spelled]
    axes = [axis for axis in spellings if type(axis) is int]
    if len(axes) < len(spellings):
        raise ValueError(f"layout: {short(spelled)} in tensor_map is not a device axis")
    return tuple(axis for axis in axes if axis != -1)


def _require(entry: object, key: str) -> object:
    """Return the value of a key; raise ValueError without one."""
    if not isinstance(entry, dict) or key not in entry:
        raise ValueError(f"no {key}")
    return entry[key]


def _parse_sizes(
    entry: object, key: str, default: tuple[int, ...] | None = None
) -> tuple[int, ...]:
    """Return a list of sizes, or ``default`` for null; raise ValueError for anything else."""
    value = _require(entry, key)
    if value is None and default is not None:
        return default
    if not isinstance(value, list) or any(type(n) is not int or n < 0 for n in value):
        raise ValueError(f"{key} {short(value)} is not a list of sizes")
    return tuple(value)


# ------------------------------------------------------------------------ files that metadata names


def read_existing_files(
    folder: Path, names: Iterable[str], errors: list[FormatError]
) -> FilesByName:
    """Return the headers of those files that exist; ``errors`` gets those of damaged files."""
    there = [name for name in names if is_file(folder / name)]
    files: FilesByName = {}
    for name, index in zip(there, read_indexes(str(folder / n) for n in there), strict=True):
        if isinstance(index, FormatError):
            errors.append(index)
        files[name] = None if isinstance(index, FormatError) else index
    return files


class Fault(NamedTuple):
    """What is wrong with a file; ``reason`` is "" if the file has an error of its own."""

    path: str
    reason: str = ""


@dataclass(slots=True)
class Faults:
    """Faults of files, and the tensors that lack slices because of them.

    A fault is harmless if other files have the same slices.
    """

    missing: dict[Fault, list[str]] = field(default_factory=lambda: defaultdict(list))
    harmless: dict[Fault, None] = field(default_factory=dict)

    def add_missing(self, faults: Iterable[Fault], name: str) -> None:
        """Record faults because of which a tensor lacks slices."""
        for fault in dict.fromkeys(faults):
            self.missing[fault].append(name)

    def add_harmless(self, faults: Iterable[Fault]) -> None:
        """Record faults of files whose slices other files have."""
        self.harmless |= dict.fromkeys(faults)

    def problems(self) -> Iterator[Diagnostic]:
        """Yield a problem for every fault because of which slices are missing."""
        for fault, names in self.missing.items():
            lost = f"{count(len(names), 'parameter')} ({shorten(names, 3)})"
            facts = f"no other file has these slices of {lost}"
            yield from _describe_fault("missing", fault, facts, COPY_AGAIN)

    def notes(self) -> Iterator[Diagnostic]:
        """Yield a note on each harmless fault."""
        for fault in self.harmless:
            if fault not in self.missing:
                yield from _describe_fault("faulty_replica", fault, "other files have the slices")


def _describe_fault(code: str, fault: Fault, facts: str, hint: str = "") -> Iterator[Diagnostic]:
    path, reason = fault
    if reason:
        yield Diagnostic(code, reason, hint=hint, facts=facts, path=path, where=path)


# -------------------------------------------------------------------------- the slices in the files


@dataclass(slots=True)
class _Placement:
    """The parameters of ``metadata.json``, compared with the headers of the files.

    Attributes
    ----------
    tensors
        Parameters whose slices were all found.
    unlocated
        Names of parameters without a location.
    unsaved_gradients, unsaved_states
        Names of accumulated gradients, and of optimizer state, that were not saved.
    copies
        Names of parameters to the ranks of stages that do not own and did not save them.
    faults
        Problems of files.
    in_other_file
        Names of parameters in the other file of the same rank.
    problems
        All problems, one sentence each.
    """

    tensors: dict[str, FullTensor] = field(default_factory=dict)
    unlocated: list[str] = field(default_factory=list)
    unsaved_gradients: list[str] = field(default_factory=list)
    unsaved_states: list[str] = field(default_factory=list)
    copies: dict[str, set[int]] = field(default_factory=dict)
    faults: Faults = field(default_factory=Faults)
    in_other_file: list[str] = field(default_factory=list)
    problems: list[Diagnostic] = field(default_factory=list)


def _place_slices(
    parameters: Mapping[str, _Parameter], folder: str, files: FilesByName
) -> _Placement:
    """Find the slices of all parameters at their locations.

    Parameters
    ----------
    parameters
        The tensors of ``metadata.json``.
    folder
        The files' folder, for messages.
    files
        Name to header of the files that exist; None for a damaged one, whose error is reported
        elsewhere.
    """
    placement = _Placement()
    written = _WrittenFiles(folder, files, _writers(parameters))
    lacks_optimizer = written.lacks_optimizer()
    lacks_gradients = (
        any(parse_name(n).is_gradient for n in parameters) and written.lacks_gradients()
    )
    stage_ranks = max((len(one.number_of or ()) for one in parameters.values()), default=0)
    for name, parameter in parameters.items():
        if not parameter.listed:
            placement.unlocated.append(name)
            continue
        slices = [
            _find_slice(parameter, number, written)
            for number in range(math.prod(parameter.slice_counts))
        ]
        boxes = [box for one in slices for box in one.boxes]
        if not boxes and lacks_optimizer and written.is_unsaved_state(parameter):
            placement.unsaved_states.append(name)
        elif all(one.boxes for one in slices):
            _add_parameter(placement, parameter, boxes)
            _note_faults(placement, parameter, slices, written, stage_ranks or MAX_RANKS)
        elif (
            lacks_gradients and parse_name(name).is_gradient and all(one.lacking for one in slices)
        ):
            placement.unsaved_gradients.append(name)
        else:
            _add_missing(placement, parameter, slices, written)
            placement.problems += box_problems(parameter.meta, boxes)
    placement.problems += placement.faults.problems()
    return placement


def _note_faults(
    placement: _Placement,
    parameter: _Parameter,
    slices: Iterable[_FoundSlice],
    written: _WrittenFiles,
    stage_ranks: int,
) -> None:
    """Record the locations of a complete parameter that do not hold it.

    MindSpore leaves a parameter that stages share out of the files of stages that do not own it,
    and metadata lists it there.  So a whole stage may lack it.
    """
    holding = {box.rank // stage_ranks for one in slices for box in one.boxes}
    for one in slices:
        placement.faults.add_harmless(one.faults)
        for location in one.lacking:
            if location.rank // stage_ranks in holding:
                placement.faults.add_harmless([written.lacks(location)])
            else:
                placement.copies.setdefault(parameter.meta.name, set()).add(location.rank)


def _add_missing(
    placement: _Placement,
    parameter: _Parameter,
    slices: Iterable[_FoundSlice],
    written: _WrittenFiles,
) -> None:
    """Record why slices of a parameter are missing."""
    name = parameter.meta.name
    for number, one in enumerate(slices):
        faults = [*one.faults, *map(written.lacks, one.lacking)]
        if one.boxes:
            placement.faults.add_harmless(faults)
        elif faults:
            placement.faults.add_missing(faults, name)
        elif parameter.is_renumbered:
            placement.problems.append(_lost_slice(parameter, number))
        else:
            fault = Fault(f"{written.folder}/{_METADATA}", "lists no file for some slices")
            placement.faults.add_missing([fault], name)


def _lost_slice(parameter: _Parameter, number: int) -> Diagnostic:
    """Return the problem of a slice that no rank of the layout stored."""
    numbers = (parameter.number_of or {}).items()
    owners = tuple(rank for rank, own in numbers if own == number)
    storing = format_ranks(sorted({location.rank for location in parameter.locations}))
    text = "ranks that hold a slice by the layout did not save it"
    facts = f"elements {_region(parameter, number)} belong to {format_ranks(owners)}; {storing} "
    facts += "saved the tensor, with wrong slice numbers"
    hint = "`ckpttool help missing` explains"
    tensor = parameter.meta.name
    return Diagnostic("missing", text, hint=hint, facts=facts, tensor=tensor, ranks=owners)


def _add_parameter(placement: _Placement, parameter: _Parameter, boxes: list[Box]) -> None:
    """Add a parameter that is stored completely, or its problems."""
    named = {location.file for location in parameter.locations}
    if any(box.tensor.file.path.rpartition("/")[2] not in named for box in boxes):
        placement.in_other_file.append(parameter.meta.name)
    wrong = list(_layout_problems(parameter, boxes))
    filled = [] if wrong else fill_with_boxes(parameter.meta, boxes)
    if isinstance(filled, BoxSlicing):
        placement.tensors[parameter.meta.name] = FullTensor(parameter.meta, filled, Listed())
    else:
        placement.problems += wrong or filled


def _layout_problems(parameter: _Parameter, boxes: list[Box]) -> Iterator[Diagnostic]:
    """Yield a problem for each rank that has another slice by the layout than by the storage."""
    name, text = parameter.meta.name, f"{_METADATA} contradicts itself"
    number_of = parameter.number_of or {}
    regions = {number: _region(parameter, number) for number in sorted({*number_of.values()})}
    for box in boxes:
        own = regions[number_of[box.rank]] if box.rank in number_of else box.region
        if own != box.region:
            facts = f"rank {box.rank} ({box.tensor.file.path}): elements {box.region} by "
            facts += f"storage_data, {own} by the layout"
            yield Diagnostic(
                "missing", text, hint=COPY_AGAIN, facts=facts, tensor=name, ranks=(box.rank,)
            )
    for rank in parameter.misgrouped:
        facts = f"rank {rank}: elements {regions[number_of[rank]]} by the layout, "
        facts += "and not in the rank_group of that slice"
        yield Diagnostic("missing", text, hint=COPY_AGAIN, facts=facts, tensor=name, ranks=(rank,))


class _FoundSlice(NamedTuple):
    """What was found of a slice: its boxes, files that lack it, and files that cannot be read."""

    boxes: list[Box]
    lacking: list[_StorageLocation]
    faults: list[Fault]


def _find_slice(parameter: _Parameter, number: int, written: _WrittenFiles) -> _FoundSlice:
    """Look for a slice at its locations."""
    region = _region(parameter, number)
    found = _FoundSlice([], [], [])
    for location in parameter.stored.get(number, ()):
        tensor = written.find(parameter.meta.name, location)
        if tensor is not None:
            found.boxes.append(Box(region, location.rank, tensor))
        elif location.file not in written.files:
            found.faults.append(Fault(written.path(location), "file not found"))
        elif written.files[location.file] is None:
            found.faults.append(Fault(written.path(location)))
        else:
            found.lacking.append(location)
    return found


def _region(parameter: _Parameter, number: int) -> Region:
    """Return the region of a slice from its number in C order."""
    index: list[int] = []
    for n in reversed(parameter.slice_counts):
        number, i = divmod(number, n)
        index.insert(0, i)
    sizes = [
        size // n for size, n in zip(parameter.meta.shape, parameter.slice_counts, strict=True)
    ]
    return Region(
        tuple(i * size for i, size in zip(index, sizes, strict=True)),
        tuple((i + 1) * size for i, size in zip(index, sizes, strict=True)),
    )


class _WrittenFiles(NamedTuple):
    """The files of a folder, and the ranks that wrote them according to metadata."""

    folder: str
    files: FilesByName
    writers: Mapping[str, set[int]]

    def path(self, location: _StorageLocation) -> str:
        """Return the path of the file of a location."""
        return f"{self.folder}/{location.file}"

    def lacks(self, location: _StorageLocation) -> Fault:
        """Return the fault of a file without a tensor that metadata lists in it."""
        return Fault(self.path(location), f"lacks tensors that {_METADATA} lists")

    def find(self, name: str, location: _StorageLocation) -> StoredTensor | None:
        """Return the tensor in the file of a location, or in the other file of the same rank."""
        file = self.files.get(location.file)
        match = MINDFORMERS_FILE.fullmatch(location.file)
        is_damaged = file is None and location.file in self.files
        if (file is None or name not in file.tensors) and match is not None and not is_damaged:
            start, stop = match.span("kind")
            kind = "opt" if match["kind"] == "model" else "model"
            other = location.file[:start] + kind + location.file[stop:]
            writers = self.writers.get(other, set())
            if int(match["number"]) == location.rank and writers <= {location.rank}:
                file = self.files.get(other)
        return None if file is None else file.tensors.get(name)

    def lacks_optimizer(self) -> bool:
        """Return whether all model files are there and no file of optimizer state is."""
        matches = [match for file in self.files if (match := MINDFORMERS_FILE.fullmatch(file))]
        are_models = {match["kind"] for match in matches} == {"model"}
        return are_models and not any(_incomplete_sets(Path(self.folder), matches))

    def is_unsaved_state(self, parameter: _Parameter) -> bool:
        """Return whether metadata lists a tensor as optimizer state only, and no file has it."""
        named = (MINDFORMERS_FILE.fullmatch(location.file) for location in parameter.locations)
        return all(match is not None and match["kind"] == "opt" for match in named) and not any(
            file is not None and parameter.meta.name in file.header for file in self.files.values()
        )

    def lacks_gradients(self) -> bool:
        """Return whether no file has an accumulated gradient."""
        headers = (file.header for file in self.files.values() if file is not None)
        return not any(parse_name(name).is_gradient for header in headers for name in header)


def _writers(parameters: Mapping[str, _Parameter]) -> dict[str, set[int]]:
    """Return the ranks that wrote each file, according to metadata."""
    found: dict[str, set[int]] = defaultdict(set)
    for parameter in parameters.values():
        for location in parameter.locations:
            found[location.file].add(location.rank)
    return found


def _has_parameter_numbers(parameters: Mapping[str, _Parameter]) -> bool:
    """Return whether metadata lists all slices of each parameter as one rank's, in one file."""
    locations = [one.locations for one in parameters.values()]
    return all(len({*of}) < 2 for of in locations) and any(len(of) > 1 for of in locations)
