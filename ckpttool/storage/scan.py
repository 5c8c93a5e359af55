"""Finds the files of a checkpoint, one for each rank, all of one step: their headers."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from ckpttool.errors import FormatError, PlanError
from ckpttool.formats import read_index
from ckpttool.model.catalog import Catalog, FileIndex, format_ranks
from ckpttool.model.notes import Note
from ckpttool.storage.folders import list_rank_files, match_pattern, note_siblings
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
    notes: list[Note] = []
    if not root.is_dir():
        if root.exists() and not root.is_file():
            raise PlanError([f"{src}: neither a file nor a folder"])
        note_siblings(root, notes)
        return Catalog(src, {0: read_index(src)}, notes=tuple(notes), is_undivided=True)
    if pattern is not None:
        if "{rank}" not in pattern:
            raise PlanError([f"the pattern {pattern} does not say where {{rank}} is in the path"])
        found = list(match_pattern(root, Path(pattern).parts, None))
        if not found:
            raise PlanError([f"{src}: no file matches the pattern {pattern}"])
    else:
        root = find_checkpoint(root, notes)
        src = str(root)
        found = list_rank_files(root, notes)
    chosen, label = choose_step(src, found, step, notes)
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
        notes.append(Note("absent", f"{format_ranks(gaps)}: no checkpoint file found in {src}"))
    strategies = find_strategies(root, chosen, notes)
    return Catalog(src, files, label, damaged, tuple(notes), strategy_files=strategies)
