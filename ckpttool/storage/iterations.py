"""Finds the iteration of a MindFormers "Checkpoint 2.0" folder that is to be read.

The root has a folder ``iteration_00000012`` for every save (development versions wrote
``iter_00000012``) and ``latest_checkpointed_iteration.txt`` with the number of the last complete
one, which is written when everything else of it is.  What has a higher number was not finished.

Source
------
MindFormers 1.7 to 2.1 ``mindformers/checkpoint/utils.py``, ``checkpoint.py``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from ckpttool.errors import FormatError, PlanError
from ckpttool.formats.reading import open_file
from ckpttool.model.notes import Note
from ckpttool.model.strategy import count, shorten
from ckpttool.storage.names import NUMBER
from ckpttool.storage.placement import FILE

TRACKER = "latest_checkpointed_iteration.txt"
FOLDER = re.compile(r"iter(?:ation)?_(\d{1,18})")


def number_of(folder: Path) -> int | None:
    """The number of the iteration that a folder's name says."""
    match = FOLDER.fullmatch(folder.absolute().name)
    return None if match is None else int(match[1])


def has_iterations(root: Path) -> bool:
    """Whether a folder is one of several iterations."""
    return (root / TRACKER).is_file() or bool(_iterations(root))


def find_iteration(root: Path, wanted: str | None, notes: list[Note]) -> Path:
    """The folder of one save below ``root``.

    Parameters
    ----------
    root
        A folder that `has_iterations`.
    wanted
        The iteration to take, as a number or a folder's name; by default the last complete one.
    notes
        Says which was taken, and what was passed over.

    Raises
    ------
    PlanError
        The iteration that is wanted is not there, or nothing says which is complete.
    FormatError
        The file that should say so does not.
    """
    folders = _iterations(root)
    have = f"there is {shorten(map(str, sorted(set(folders.values()))), 8) or 'none'}"
    last = _last_complete(root)
    if wanted is None and last is None:
        reason = f"no {TRACKER}, which names the last complete iteration; choose with --step"
        raise PlanError([f"{root}: {reason} ({have})"])
    name = f"iteration {last}, which {TRACKER} names" if wanted is None else f"iteration {wanted}"
    chosen = [
        path
        for path, number in folders.items()
        if (number == last if wanted is None else is_wanted(path, wanted))
    ]
    if not chosen:
        have = _offer(folders, last) if wanted is None and last is not None else have
        raise PlanError([f"{root}: no folder of {name}; {have}"])
    if len(chosen) > 1:
        named = shorten(path.name for path in chosen)
        raise PlanError([f"{root}: several folders of {name}: {named}; name one as SRC"])
    _note_others(folders, folders[chosen[0]], last, notes)
    return chosen[0]


def _offer(folders: Mapping[Path, int], last: int) -> str:
    """What may be taken in place of the iteration that was complete last, whose folder is gone."""
    saved = sorted(
        {n for path, n in folders.items() if any(FILE.fullmatch(p.name) for p in path.iterdir())}
    )
    complete = [str(n) for n in saved if n <= last]
    newer = [str(n) for n in saved if n > last]
    offer = "no complete iteration is there"
    if complete:
        verb = "is" if len(complete) == 1 else "are"
        offer = f"complete {verb} {shorten(complete, 8)}; --step {complete[-1]} takes that"
    return offer + (f"; {shorten(newer, 8)}: perhaps not finished" if newer else "")


def is_wanted(folder: Path, wanted: str) -> bool:
    """Whether ``--step`` means this folder."""
    is_number = NUMBER.fullmatch(wanted) is not None and int(wanted) == number_of(folder)
    return is_number or wanted == folder.absolute().name


def _iterations(root: Path) -> Mapping[Path, int]:
    numbers = {path: number_of(path) for path in sorted(root.iterdir())}
    return {path: n for path, n in numbers.items() if n is not None and path.is_dir()}


def _last_complete(root: Path) -> int | None:
    path = root / TRACKER
    if not path.is_file():
        return None
    with open_file(path) as file:
        text = file.read(100).strip()
    if not text.isdigit():
        raise FormatError(str(path), 0, f"{text!r} is no number of an iteration")
    return int(text)


def _note_others(
    folders: Mapping[Path, int], taken: int, last: int | None, notes: list[Note]
) -> None:
    """Say which iteration was taken where there are several, and which were not finished."""
    if last is not None and taken > last:
        text = f"iteration {taken} was perhaps not finished: {TRACKER} names {last}"
        notes.append(Note("step", text))
        return
    newer = [path.name for path, number in folders.items() if last is not None and number > last]
    if len(folders) > 1:
        text = f"iteration {taken}, of {count(len(folders), 'iteration')}"
        text += f"; not finished: {shorten(newer)}" if newer else ""
        notes.append(Note("step", text))
