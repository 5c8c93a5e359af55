"""Reads a MindFormers "Checkpoint 2.0" folder: its files, and what they say of themselves.

An iteration's folder has ``{prefix-}model-0000003-0000008.safetensors``, number 3 of 8 files, with
parameters, and ``{prefix-}opt-...`` with optimizer state.  ``metadata.json`` names the file of
every slice.  The number in a file's name is the rank's only if every rank wrote a file.  Without
``metadata.json`` (MindFormers writes none for a single device) every file holds whole tensors.

Source
------
MindFormers 1.7 to 2.1 ``mindformers/checkpoint/``.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from ckpttool.errors import FormatError, PlanError
from ckpttool.formats.metadata_json import is_metadata, read_common, read_metadata
from ckpttool.model.catalog import FileIndex, SelfDescribedCatalog, format_ranks
from ckpttool.model.described import Box, BoxSlicing, Description, fill_with_boxes
from ckpttool.model.notes import Note
from ckpttool.model.region import Region
from ckpttool.model.source import Listed, Source
from ckpttool.model.strategy import count, shorten
from ckpttool.storage.folders import checkpoint_files
from ckpttool.storage.iterations import find_iteration, has_iterations, is_wanted, number_of
from ckpttool.storage.leftovers import note_leftovers
from ckpttool.storage.named import Files, read_named
from ckpttool.storage.placement import (
    FILE,
    has_parameter_numbers,
    place_by_file_numbers,
    place_slices,
    writers,
)

METADATA, COMMON = "metadata.json", "common.json"


def scan_mindformers(src: str, step: str | None) -> SelfDescribedCatalog | None:
    """The catalog of a checkpoint in MindFormers' folders; None if ``src`` is no such folder.

    Parameters
    ----------
    src
        The folder of one iteration, or the one above.
    step
        The iteration to take; by default the last complete one.

    Raises
    ------
    PlanError, FormatError, CombinedError
        The iteration cannot be chosen, or ``metadata.json`` is damaged.
    OSError
        A folder or a file cannot be read.
    """
    folder, notes = Path(src), list[Note]()
    if has_iterations(folder):
        folder = find_iteration(folder, step, notes)
        if not _is_iteration(folder):
            raise PlanError([f"{folder}: no {METADATA} and no model-*.safetensors of MindFormers"])
    elif not _is_iteration(folder):
        return None
    elif step is not None and not is_wanted(folder, step):
        raise PlanError([f"{src}: this is not iteration {step}; name the folder above"])
    note_leftovers(folder, (), notes)
    values = _read_common(folder, notes)
    errors: list[FormatError] = []
    read = _read_described if (folder / METADATA).is_file() else _read_whole
    files, description = read(folder, errors, notes)
    number = number_of(folder)
    return SelfDescribedCatalog(
        src,
        files,
        step=None if number is None else str(number),
        damaged=dict(enumerate(errors)),  # one rank may have two damaged files; not rank numbers
        notes=tuple(notes),
        description=replace(description, values=values),
    )


def _is_iteration(folder: Path) -> bool:
    if any(FILE.fullmatch(path.name) for path in folder.iterdir()):
        return True
    metadata = folder / METADATA
    return metadata.is_file() and is_metadata(str(metadata))


def _read_common(folder: Path, notes: list[Note]) -> Mapping[str, str]:
    path = folder / COMMON
    if not path.is_file():
        return {}
    try:
        values = read_common(str(path))
    except FormatError as error:
        notes.append(Note("passed over", f"passed over {error}"))
        return {}
    shown = shorten((f"{key} {value}" for key, value in values.items()), 8)
    notes.append(Note("passed over", f"{COMMON} goes into no output: {shown}"))
    return values


def _read_described(
    folder: Path, errors: list[FormatError], notes: list[Note]
) -> tuple[dict[int, FileIndex], Description]:
    """Files by rank and description of a folder with ``metadata.json``."""
    metadata = str(folder / METADATA)
    parameters = read_metadata(metadata)
    files = read_named(folder, _select(folder, set(writers(parameters)), notes), errors)
    placement = place_slices(parameters, str(folder), files)
    if placement.problems and has_parameter_numbers(parameters):
        corrected = place_by_file_numbers(parameters, files)
        if corrected is not None:
            parameters = corrected
            placement = place_slices(parameters, str(folder), files)
            text = f"{metadata}: has numbers of parameters for those of ranks, as an early "
            text += "MindFormers wrote them; ranks are taken from layouts and names of files"
            notes.append(Note("corrected", text))
    notes += placement.faults.notes()
    if placement.elsewhere:
        text = f"{metadata}: names the wrong one of a rank's two files for "
        text += f"{count(len(placement.elsewhere), 'parameter')}: {shorten(placement.elsewhere)}"
        notes.append(Note("corrected", text))
    if placement.absent:
        text = f"described and in no file: {count(len(placement.absent), 'parameter')}"
        notes.append(Note("absent", f"{text}: {shorten(placement.absent)}"))
    by_rank, problems = _by_rank(files, writers(parameters), parameters)
    problems = [*placement.problems, *problems]
    broken = frozenset(parameters) - placement.tensors.keys()
    description = Description((metadata,), placement.tensors, broken, tuple(problems))
    return by_rank, description


def _read_whole(
    folder: Path, errors: list[FormatError], notes: list[Note]
) -> tuple[dict[int, FileIndex], Description]:
    """Files by number and description of a folder whose files hold whole tensors."""
    matches = _list_files(folder)
    _note_strays(folder, (), notes)
    files = read_named(folder, matches, errors)
    problems = list(_incomplete_sets(folder, matches.values()))
    tensors: dict[str, Source] = {}
    twice: dict[str, list[str]] = {}
    for file, match in matches.items():
        index = files.get(file)
        for name, tensor in {} if index is None else index.tensors.items():
            if name in tensors:
                first = Path(
                    next(iter(next(tensors[name].slicing.replicas()).values())).file.path
                ).name
                twice.setdefault(name, [first]).append(file)
                continue
            box = Box(Region.whole(tensor.meta.shape), int(match["number"]), tensor)
            whole = fill_with_boxes(tensor.meta, [box])
            assert isinstance(whole, BoxSlicing), "one box is all of it"
            tensors[name] = Source(tensor.meta, whole, Listed())
    problems += [_on_slices(folder, twice, matches)] if twice else []
    if len(files) > 1 and max(int(match["total"]) for match in matches.values()) > 1:
        text = f"{folder}: no {METADATA}, so every file is taken to hold whole tensors"
        notes.append(Note("undivided", text))
    broken = frozenset(twice)
    tensors = {name: whole for name, whole in tensors.items() if name not in broken}
    by_rank, _ = _by_rank(files, {}, {*tensors, *broken})
    origin = tuple(str(folder / name) for name in matches)
    return by_rank, Description(origin, tensors, broken, tuple(problems))


def _on_slices(
    folder: Path, twice: Mapping[str, list[str]], matches: Mapping[str, re.Match[str]]
) -> str:
    """The problem of parameters that several files have, so that they are slices; what to do."""
    held = shorten(
        (f"{name} (in {len(files)} files: {shorten(files, 2)})" for name, files in twice.items()), 3
    )
    start, stop = next(iter(matches.values())).span("number")
    first = next(iter(matches))
    return (
        f"{folder}: no {METADATA}, without which every file holds whole tensors that no other file "
        f"has, and {count(len(twice), 'parameter')} in several files: {held}; put {METADATA} back, "
        "or, if every rank wrote its own file, name this folder, the strategy of the run (-s) and "
        f"--pattern '{first[:start]}{{rank}}{first[stop:]}'"
    )


def _list_files(folder: Path) -> dict[str, re.Match[str]]:
    """The names of checkpoint files in a folder, and what they say."""
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    return {name: match for name in names if (match := FILE.fullmatch(name)) is not None}


def _select(folder: Path, named: set[str], notes: list[Note]) -> list[str]:
    """The files to be read: those that are named, and those that were saved with them."""
    sets = {match.group("prefix", "total") for name in named if (match := FILE.fullmatch(name))}
    matches = _list_files(folder)
    others = [
        name
        for name, match in matches.items()
        if name not in named and match.group("prefix", "total") not in sets
    ]
    if others:
        text = f"{folder}: passed over, being of another save: {shorten(others)}"
        notes.append(Note("passed over", text))
    _note_strays(folder, named, notes)
    return sorted({*named, *matches}.difference(others))


def _note_strays(folder: Path, named: Collection[str], notes: list[Note]) -> None:
    """A note on checkpoint files that nothing names and that are not called as MindFormers' are."""
    names = (path.name for path in checkpoint_files(folder) if path.name not in named)
    strays = [name for name in names if FILE.fullmatch(name) is None]
    if strays:
        text = f"{folder}: passed over {shorten(strays)}, not called as MindFormers calls its files"
        notes.append(Note("passed over", text))


def _by_rank(
    files: Files, ranks_of: Mapping[str, set[int]], described: Collection[str]
) -> tuple[dict[int, FileIndex], list[str]]:
    """The files of each rank as one, and what is wrong with that.

    A file that nobody is said to have written is that of the rank with its number.
    """
    problems = []
    grouped: dict[int, list[FileIndex]] = defaultdict(list)
    for name, file in files.items():
        if file is not None:
            match = FILE.fullmatch(name)
            ranks = sorted(ranks_of.get(name, ())) or [int(match["number"]) if match else 0]
            grouped[ranks[0]].append(file)
            if len(ranks) > 1:
                problems.append(f"{file.path}: said to be written by {format_ranks(ranks)}")
    joined = {}
    for rank, (first, *more) in sorted(grouped.items()):
        tensors = dict(first.tensors)
        for file in more:
            again = [name for name in file.tensors if name in tensors and name not in described]
            if again:
                problems.append(f"{first.path} and {file.path}: both have {shorten(again)}")
            tensors = {**file.tensors, **tensors}
        nbytes = sum(file.nbytes for file in (first, *more))
        other_paths = tuple(file.path for file in more)
        stamps = {path: stamp for file in (first, *more) for path, stamp in file.stamps.items()}
        joined[rank] = replace(
            first, nbytes=nbytes, tensors=tensors, other_paths=other_paths, stamps=stamps
        )
    return joined, problems


def _incomplete_sets(folder: Path, matches: Iterable[re.Match[str]]) -> Iterator[str]:
    """Files whose numbers say that there should be more."""
    sets: dict[tuple[str, str, str], set[int]] = defaultdict(set)
    for match in matches:
        sets[match["prefix"] or "", match["kind"], match["total"]].add(int(match["number"]))
    for (_, kind, total), numbers in sets.items():
        if len(numbers) < int(total):
            lacking = (n for n in range(len(numbers) + 1) if n not in numbers)
            yield (
                f"{folder}: {len(numbers)} of {int(total)} {kind} files are there; number "
                f"{next(lacking)} is not"
            )
