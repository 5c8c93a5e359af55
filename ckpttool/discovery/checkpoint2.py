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
  are replicas; there is one where redundancy was removed on saving.
* ``layout`` is null or absent for a tensor that is not sharded.  Its ``tensor_map`` has a device
  axis (0 is the innermost), a list of them (outermost split first) or -1 for every tensor axis.
  An optimizer shard is a further device axis in it.  ``rank_list`` has the global ranks of the
  stage in the order of the device matrix.
* ``replica_id`` and ``rank_group`` repeat the layout, and are not read.

One commit of MindFormers wrote the number of the parameter in place of the rank's, in the names of
files as well.  So all slices of a parameter seem to be in one file.  Such metadata is detected.
Ranks and files are then taken from the layouts and the numbers in the files' names.  This needs
every rank's file, with every tensor of its layout.

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
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from reprlib import repr as short
from typing import NamedTuple

from ckpttool.discovery.file_names import NUMBER
from ckpttool.discovery.leftovers import note_leftovers
from ckpttool.discovery.rank_folders import checkpoint_files
from ckpttool.errors import FormatError, PlanError, raise_all
from ckpttool.formats import read_indexes
from ckpttool.formats.local import identify_file, is_file, is_folder, list_folder, open_file
from ckpttool.formats.strict_json import read_json_object
from ckpttool.model.catalog import SelfDescribedCatalog
from ckpttool.model.diagnostics import COPY_AGAIN, Diagnostic, Diagnostics
from ckpttool.model.dtypes import find_word
from ckpttool.model.layout import MAX_RANKS, Layout
from ckpttool.model.region import Region
from ckpttool.model.slicing import (
    Box,
    BoxSlicing,
    Description,
    Listed,
    Source,
    box_problems,
    fill_with_boxes,
)
from ckpttool.model.tensors import FileIndex, StoredTensor, TensorMeta
from ckpttool.model.wording import count, format_ranks, shorten

_METADATA, _COMMON = "metadata.json", "common.json"
_TRACKER = "latest_checkpointed_iteration.txt"
_ITERATION_FOLDER = re.compile(r"iter(?:ation)?_(\d{1,18})")
MINDFORMERS_FILE = re.compile(
    r"(?:(?P<prefix>.*)-)?(?P<kind>model|opt)-(?P<number>\d{7,18})-(?P<total>\d{7,18})\.safetensors"
)
BARE_NAME = re.compile(r"(?!\.\.?$)[^/\0]+")  # in the same folder
_STORAGE_KEY = re.compile(r"""\((?P<name>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"), \((\d{1,12}),\)\)""")
_ESCAPE = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8})|(.))", re.DOTALL)
_ESCAPED = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", "'": "'", '"': '"'}
_MAX_BYTES = 1_000_000_000  # every slice of every rank takes some hundred bytes of it

FilesByName = dict[str, FileIndex | None]  # by name; None for a damaged one


def scan_checkpoint2(src: str, step: str | None) -> SelfDescribedCatalog | None:
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
    if _has_iterations(folder):
        folder = _find_iteration(folder, step, diagnostics)
        if not _is_iteration(folder):
            text = f"no {_METADATA} and no model-*.safetensors of MindFormers in it"
            hint = "--step with another iteration"
            raise PlanError([Diagnostic("source", text, hint, where=str(folder))])
    elif not _is_iteration(folder):
        return None
    elif step is not None and not _is_iteration_wanted(folder, step):
        hint = f"{folder.absolute().parent} as SRC, or omit --step"
        raise PlanError([Diagnostic("source", f"not iteration {step}", hint, where=src)])
    note_leftovers(folder, (), diagnostics)
    values = _read_common(folder, diagnostics)
    errors: list[FormatError] = []
    metadata = folder / _METADATA
    documents = (identify_file(str(metadata)),) if is_file(metadata) else ()
    read = _read_described if documents else _read_whole
    files, description = read(folder, errors, diagnostics)
    number = _iteration_number(folder)
    return SelfDescribedCatalog(
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
    parameters = read_metadata(metadata)
    files = read_existing_files(
        folder, _select_files(folder, set(_writers(parameters)), diagnostics), errors
    )
    placement = _place_slices(parameters, str(folder), files)
    if placement.problems and _has_parameter_numbers(parameters):
        corrected = _place_by_file_numbers(parameters, files)
        if corrected is not None:
            parameters = corrected
            placement = _place_slices(parameters, str(folder), files)
            text = "numbers of parameters stand in place of ranks, as an early MindFormers wrote"
            facts = "ranks are taken from layouts and file names"
            diagnostics.add(Diagnostic("corrected", text, facts=facts, where=metadata))
    diagnostics.add(*placement.faults.notes())
    misnamed = placement.in_other_file
    if misnamed:
        text = f"{count(len(misnamed), 'parameter')} listed in the wrong one of a rank's two files"
        facts = shorten(misnamed, 3)
        diagnostics.add(Diagnostic("corrected", text, facts=facts, where=metadata))
    if placement.unlocated:
        text = f"{count(len(placement.unlocated), 'parameter')} described, but in no file"
        facts = shorten(placement.unlocated, 3)
        diagnostics.add(Diagnostic("absent", text, facts=facts, where=metadata))
    by_rank, problems = _by_rank(files, _writers(parameters), parameters)
    problems = [*placement.problems, *problems]
    broken = frozenset(parameters) - placement.tensors.keys()
    description = Description((metadata,), placement.tensors, broken, tuple(problems))
    return by_rank, description


def _read_whole(
    folder: Path, errors: list[FormatError], diagnostics: Diagnostics
) -> tuple[dict[int, FileIndex], Description]:
    """Return the files by number and the description of a folder of full tensors."""
    matches = _list_files(folder)
    _note_unnamed(folder, (), diagnostics)
    files = read_existing_files(folder, matches, errors)
    problems = list(_incomplete_sets(folder, matches.values()))
    tensors: dict[str, Source] = {}
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
            tensors[name] = Source(tensor.meta, whole, Listed())
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
    return Diagnostic("missing", text, hint, facts=shorten(examples, 3), where=str(folder))


# --------------------------------------------------------------------------------------- iterations


def _has_iterations(root: Path) -> bool:
    """Return whether a folder holds folders of iterations."""
    return is_file(root / _TRACKER) or bool(_iterations(root))


def _find_iteration(root: Path, wanted: str | None, diagnostics: Diagnostics) -> Path:
    """Return the folder of one iteration below ``root``.

    Parameters
    ----------
    root
        A folder for which `_has_iterations` holds.
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
    folders = _iterations(root)
    numbers = [str(number) for number in sorted(set(folders.values()))]
    facts = f"found {shorten(reversed(numbers), 3) or 'none'}"
    hint = f"--step {numbers[-1]}" if numbers else ""

    def problem(text: str) -> PlanError:
        return PlanError([Diagnostic("source", text, hint, facts=facts, where=str(root))])

    last = _last_complete(root)
    if wanted is None and last is None:
        raise problem(f"no {_TRACKER}, which names the last complete iteration")
    chosen = [
        path
        for path, number in folders.items()
        if (number == last if wanted is None else _is_iteration_wanted(path, wanted))
    ]
    if not chosen:
        if wanted is not None or last is None:
            raise problem(f"no folder of iteration {wanted}")
        facts, hint = _list_alternatives(folders, last)
        raise problem(f"no folder of iteration {last}, which {_TRACKER} names")
    if len(chosen) > 1:
        facts, hint = shorten((path.name for path in chosen), 3), f"{chosen[0]} as SRC"
        raise problem(f"{len(chosen)} folders of iteration {folders[chosen[0]]}")
    _note_choice(folders, folders[chosen[0]], last, diagnostics)
    return chosen[0]


def _iterations(root: Path) -> Mapping[Path, int]:
    """Return the folders of iterations, and their numbers."""
    numbers = {path: _iteration_number(path) for path in list_folder(root)}
    return {path: n for path, n in numbers.items() if n is not None and is_folder(path)}


def _iteration_number(folder: Path) -> int | None:
    """Return the iteration in a folder's name, or None."""
    match = _ITERATION_FOLDER.fullmatch(folder.absolute().name)
    return None if match is None else int(match[1])


def _is_iteration_wanted(folder: Path, wanted: str) -> bool:
    """Return whether ``--step`` means this folder."""
    is_number = NUMBER.fullmatch(wanted) is not None and int(wanted) == _iteration_number(folder)
    return is_number or wanted == folder.absolute().name


def _last_complete(root: Path) -> int | None:
    """Return the number of the last complete iteration, or None if it is not recorded."""
    path = root / _TRACKER
    if not is_file(path):
        return None
    with open_file(path) as file:
        text = file.read(100).strip()
    if not text.isdigit():
        raise FormatError(str(path), None, f"expected the number of an iteration, found {text!r}")
    return int(text)


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
    newer = [path.name for path, number in folders.items() if last is not None and number > last]
    if len(folders) > 1:
        text = f"iteration {taken} is read, of {count(len(folders), 'iteration')}"
        facts = f"not finished: {shorten(newer, 3)}" if newer else ""
        diagnostics.add(Diagnostic("step", text, facts=facts))


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
            yield Diagnostic("missing", text, COPY_AGAIN, facts=facts, where=str(folder))


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
        For each rank of the stage the number of its slice by the layout; None without a layout.
    stored
        Number of a slice to its locations; slices without a location are left out.
    """

    meta: TensorMeta
    slice_counts: tuple[int, ...]
    number_of: Mapping[int, int] | None
    stored: Mapping[int, tuple[_StorageLocation, ...]]


def _is_metadata(path: str) -> bool:
    """Return whether a ``metadata.json`` is MindFormers'."""
    document = read_json_object(path, _MAX_BYTES)
    return "state_dict_metadata" in document and "storage_data" in document


def read_metadata(path: str) -> dict[str, _Parameter]:
    """Return the tensors of a ``metadata.json`` by name.

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
    stored: dict[str, dict[int, tuple[_StorageLocation, ...]]] = {name: {} for name in tensors}
    for key, entries in storage.items():
        try:
            name, number = parse_key(key)
            if name not in stored:
                raise ValueError("not in state_dict_metadata")
            stored[name][number] = _parse_locations(entries)
        except ValueError as error:
            errors.append(FormatError(path, None, f"storage_data: {key}: {error}"))
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


def _unescape(match: re.Match[str]) -> str:
    """Return the character that an escape sequence stands for."""
    digits = match[1] or match[2] or match[3]
    if digits is None and match[4] not in _ESCAPED:
        raise ValueError(f"unknown escape {match[0]}")
    return _ESCAPED[match[4]] if digits is None else chr(int(digits, 16))


def _parse_locations(entries: object) -> tuple[_StorageLocation, ...]:
    """Return the locations of one slice; raise ValueError."""
    if not isinstance(entries, list):
        raise ValueError("not a list")
    locations = []
    for entry in entries:
        file, rank = _require(entry, "file_name"), _require(entry, "storage_rank")
        if not isinstance(file, str) or BARE_NAME.fullmatch(file) is None:
            raise ValueError(f"file_name {short(file)} is not a file name")
        if type(rank) is not int or not 0 <= rank < MAX_RANKS:
            raise ValueError(f"storage_rank {short(rank)} is not a rank below {MAX_RANKS}")
        locations.append(_StorageLocation(file, rank))
    return tuple(locations)


def _parse_parameter(
    name: str, entry: object, stored: Mapping[int, tuple[_StorageLocation, ...]]
) -> _Parameter:
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
    beyond = [number for number in stored if number >= total]
    if beyond:
        raise ValueError(f"storage_data: slice {beyond[0]}, expected 0 to {total - 1}")
    layout = entry.get("layout") if isinstance(entry, dict) else None
    number_of = None if layout is None else _parse_layout(layout, counts)
    return _Parameter(TensorMeta(name, dtype.name, shape), counts, number_of, stored)


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
        yield Diagnostic(code, reason, hint, facts=facts, path=path, where=path)


# -------------------------------------------------------------------------- the slices in the files


@dataclass(slots=True)
class _Placement:
    """The parameters of ``metadata.json``, compared with the headers of the files.

    Attributes
    ----------
    tensors
        Parameters whose slices were all found.
    absent
        Names of parameters without a location.
    faults
        Problems of files.
    elsewhere
        Names of parameters in the other file of the same rank.
    problems
        All problems, one sentence each.
    """

    tensors: dict[str, Source] = field(default_factory=dict)
    unlocated: list[str] = field(default_factory=list)
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
    for name, parameter in parameters.items():
        if not parameter.stored:
            placement.unlocated.append(name)
            continue
        boxes: list[Box] = []
        missing: list[Fault] = []
        for number in range(math.prod(parameter.slice_counts)):
            here, faults = _find_boxes(parameter, number, written)
            boxes += here
            if here:
                placement.faults.add_harmless(faults)
            else:
                missing += faults
        if missing:
            placement.faults.add_missing(missing, name)
            placement.problems += box_problems(parameter.meta, boxes)
        else:
            _add_parameter(placement, parameter, boxes)
    placement.problems += placement.faults.problems()
    return placement


def _add_parameter(placement: _Placement, parameter: _Parameter, boxes: list[Box]) -> None:
    """Add a parameter that is stored completely, or its problems."""
    named = {location.file for locations in parameter.stored.values() for location in locations}
    if any(box.tensor.file.path.rpartition("/")[2] not in named for box in boxes):
        placement.in_other_file.append(parameter.meta.name)
    wrong = list(_layout_problems(parameter, boxes))
    filled = [] if wrong else fill_with_boxes(parameter.meta, boxes)
    if isinstance(filled, BoxSlicing):
        placement.tensors[parameter.meta.name] = Source(parameter.meta, filled, Listed())
    else:
        placement.problems += wrong or filled


def _layout_problems(parameter: _Parameter, boxes: list[Box]) -> Iterator[Diagnostic]:
    """Yield a problem for each box that a rank cannot have by its layout."""
    number_of = parameter.number_of or {}
    regions = {number: _region(parameter, number) for number in sorted({*number_of.values()})}
    for box in boxes:
        own = regions[number_of[box.rank]] if box.rank in number_of else box.region
        if own != box.region:
            name, path = parameter.meta.name, box.tensor.file.path
            text = f"{_METADATA} contradicts itself"
            facts = f"rank {box.rank} ({path}): elements {box.region} by storage_data, "
            facts += f"{own} by the layout"
            yield Diagnostic(
                "missing", text, COPY_AGAIN, facts=facts, tensor=name, ranks=(box.rank,)
            )


def _find_boxes(
    parameter: _Parameter, number: int, written: _WrittenFiles
) -> tuple[list[Box], list[Fault]]:
    """Return the stored boxes of a slice, and its faults."""
    region = _region(parameter, number)
    boxes: list[Box] = []
    faults: list[Fault] = []
    for location in parameter.stored.get(number, ()):
        path = f"{written.folder}/{location.file}"
        if location.file not in written.files:
            faults.append(Fault(path, "file not found"))
        elif written.files[location.file] is None:
            faults.append(Fault(path))
        elif (tensor := written.find(parameter.meta.name, location)) is not None:
            boxes.append(Box(region, location.rank, tensor))
        else:
            faults.append(Fault(path, f"lacks tensors that {_METADATA} lists"))
    if not boxes and not faults:
        faults.append(Fault(f"{written.folder}/{_METADATA}", "lists no file for some slices"))
    return boxes, faults


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

    def find(self, name: str, location: _StorageLocation) -> StoredTensor | None:
        """Return the tensor in the file of a location, or in the other file of the same rank."""
        file = self.files[location.file]
        match = MINDFORMERS_FILE.fullmatch(location.file)
        if file is not None and name not in file.tensors and match is not None:
            start, stop = match.span("kind")
            kind = "opt" if match["kind"] == "model" else "model"
            other = location.file[:start] + kind + location.file[stop:]
            if int(match["number"]) == location.rank and self.writers[other] <= {location.rank}:
                file = self.files.get(other)
        return None if file is None else file.tensors.get(name)


def _writers(parameters: Mapping[str, _Parameter]) -> dict[str, set[int]]:
    """Return the ranks that wrote each file, according to metadata."""
    found: dict[str, set[int]] = defaultdict(set)
    for parameter in parameters.values():
        for locations in parameter.stored.values():
            for location in locations:
                found[location.file].add(location.rank)
    return found


def _has_parameter_numbers(parameters: Mapping[str, _Parameter]) -> bool:
    """Return whether the ranks in metadata are numbers of parameters.

    Such metadata names the same file for every slice of a parameter, once for each rank that has
    it.  The number in the file's name is the recorded rank.
    """
    most = 0
    for parameter in parameters.values():
        locations = [one for replicas in parameter.stored.values() for one in replicas]
        match = MINDFORMERS_FILE.fullmatch(locations[0].file) if locations else None
        if len(set(locations)) > 1 or (
            match is not None and int(match["number"]) != locations[0].rank
        ):
            return False
        most = max(most, len(locations))
    return most > 1


def _place_by_file_numbers(
    parameters: Mapping[str, _Parameter], files: FilesByName
) -> dict[str, _Parameter] | None:
    """Return the parameters, located by layouts and the files' numbers; None if that fails.

    All ranks of one save must have a file, and each rank of a layout exactly one file with the
    tensor.
    """
    by_rank: dict[int, dict[str, FileIndex]] = defaultdict(dict)
    sets = set()
    for name, file in files.items():
        match = MINDFORMERS_FILE.fullmatch(name)
        if match is None or file is None:
            return None
        by_rank[int(match["number"])][name] = file
        sets.add(match.group("prefix", "total"))
    if len(sets) != 1 or int(next(iter(sets))[1]) != len(by_rank) or max(by_rank) >= len(by_rank):
        return None
    placed = {}
    for name, parameter in parameters.items():
        if parameter.number_of is None and math.prod(parameter.slice_counts) > 1:
            return None
        stored: dict[int, tuple[_StorageLocation, ...]] = {}
        for rank in sorted(by_rank if parameter.number_of is None else parameter.number_of):
            if rank not in by_rank:
                return None
            found = [file for file, index in by_rank[rank].items() if name in index.tensors]
            if len(found) > 1 or (not found and parameter.number_of is not None):
                return None
            number = 0 if parameter.number_of is None else parameter.number_of[rank]
            stored[number] = (
                *stored.get(number, ()),
                *(_StorageLocation(file, rank) for file in found),
            )
        placed[name] = replace(parameter, stored=stored)
    return placed
