"""Finds the files of a checkpoint, one for each rank, all of one step: their headers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from ckpttool.errors import FormatError, PlanError, UnsupportedError
from ckpttool.formats import read_index
from ckpttool.model.catalog import Catalog, FileIndex, format_ranks
from ckpttool.model.notes import Note
from ckpttool.storage.folders import (
    list_by_pattern,
    list_rank_files,
    note_siblings,
    unfinished,
)
from ckpttool.storage.leftovers import (
    is_unfinished_file,
    is_unfinished_folder,
    note_occasion,
    set_backups_aside,
)
from ckpttool.storage.steps import choose_step
from ckpttool.storage.trees import find_checkpoint, find_strategies


def scan(src: str, pattern: str | None = None, step: str | None = None) -> Catalog:
    """What is on disk: the header of every rank's file.

    Parameters
    ----------
    src
        A folder of rank folders, or the output folder of a MindFormers run that they lie in, or
        one file, which is rank 0.
    pattern
        Path of a rank's file below ``src``, with ``{rank}`` for its number and ``*`` for anything;
        a file name with a ``*`` in it only means files with a checkpoint's ending.
    step
        The step to take, as in the names (``10_1``), or a whole file name without its ending.  By
        default the newest that every rank has; steps are compared as numbers.

    Raises
    ------
    PlanError
        No files, two files for a rank, no step that every rank has.
    FormatError
        ``src`` is one file and is damaged.  Of several files the damaged are in
        ``Catalog.damaged``.
    OSError
        A folder or a file cannot be read.
    """
    root = Path(src)
    if not root.is_dir():
        return _scan_file(root)
    notes: list[Note] = []
    if pattern is not None:
        found = list_by_pattern(root, pattern)
    else:
        root = find_checkpoint(root, notes)
        found = list_rank_files(root, notes)
    if step is None:
        found = set_backups_aside(found, notes)
    try:
        chosen, label = choose_step(str(root), found, step, notes)
    except PlanError as error:
        raise PlanError([*error.problems, *unfinished(notes)]) from error
    files: dict[int, FileIndex] = {}
    damaged: dict[int, FormatError] = {}
    for rank in sorted(chosen):
        try:
            files[rank] = read_index(str(chosen[rank]))
        except FormatError as error:
            damaged[rank] = error
    gaps = [  # of a wild number in a name some will do
        rank
        for low, high in pairwise((-1, *sorted(chosen)))
        for rank in range(low + 1, min(high, low + 1000))
    ]
    if gaps:
        notes.append(Note("absent", f"{format_ranks(gaps)}: no checkpoint file found in {root}"))
    strategies = find_strategies(root, chosen, notes)
    problems = tuple(_problems(root))
    return Catalog(str(root), files, label, damaged, tuple(notes), False, strategies, problems)


def _scan_file(path: Path) -> Catalog:
    if path.exists() and not path.is_file():
        raise PlanError([f"{path}: neither a file nor a folder"])
    if is_unfinished_file(path):
        reason = "a save that did not finish; if you know that it is all there, rename it"
        raise UnsupportedError(str(path), None, reason)
    notes: list[Note] = []
    note_siblings(path, notes)
    note_occasion(path.name, notes)
    files = {0: read_index(str(path))}
    problems = tuple(_problems(path.parent))
    return Catalog(str(path), files, notes=tuple(notes), is_undivided=True, problems=problems)


def _problems(folder: Path) -> Iterator[str]:
    if is_unfinished_folder(folder):
        yield (
            f"{folder}: an emergency save that did not finish, so files may be missing or old; if "
            "you know that they are all there, rename the folder (without _tmp)"
        )
