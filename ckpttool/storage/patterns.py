"""Patterns of the paths of rank files, such as ``node{rank}/CKP_1-4_32.ckpt``.

``{rank}`` stands for the number of the rank, the same wherever it occurs; ``*`` for anything.
"""

from __future__ import annotations

import re
import shlex
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from ckpttool.errors import FormatError, PlanError, StepError, UnreadableError, raise_all, reason_of
from ckpttool.formats import format_of_suffix
from ckpttool.storage.leftovers import EMERGENCY, set_backups_aside
from ckpttool.storage.names import STEP_IN_NAME, Found
from ckpttool.storage.steps import choose_step

# Ranks whose folder has no file to read, and the error if the folder is unreadable.
Without = dict[int, FormatError | None]

NUMBER = re.compile(r"(\d+)")
MAX_DEPTH = 5  # folders below the root that are searched for files, to suggest a pattern
MAX_FILES = 10_000  # that are considered for it


def list_by_pattern(root: Path, pattern: str, without: Without) -> list[Found]:
    """Return the files below ``root`` that match a pattern such as ``node{rank}/*``.

    Ranks whose folder cannot be read are added to ``without``.
    """
    if "{rank}" not in pattern:
        raise PlanError([f"the pattern {pattern} does not say where {{rank}} is in the path"])
    found = list(_match(root, Path(pattern).parts, None, without))
    if not found:
        raise_all(filter(None, without.values()))
        text = f"{root}: no file matches the pattern {pattern}"
        raise PlanError([text + hint_at_pattern(root)])
    return found


def _match(
    folder: Path, parts: tuple[str, ...], rank: int | None, without: Without
) -> Iterator[Found]:
    """Yield the files below ``folder`` that match the rest of a pattern with one rank."""
    if not parts:
        return
    spelled = re.escape(parts[0]).replace(r"\{rank\}", r"(\d+)").replace(r"\*", ".*")
    for path in sorted(folder.iterdir()):
        match = re.fullmatch(spelled, path.name)
        ranks = {int(text) for text in match.groups()} if match else set()
        ranks |= set() if rank is None else {rank}
        if match is None or len(ranks) > 1:
            continue
        here = next(iter(ranks), None)
        is_meant = "*" not in parts[0] or format_of_suffix(path.name) is not None
        if len(parts) > 1 and path.is_dir():
            try:
                yield from tuple(_match(path, parts[1:], here, without))
            except OSError as error:
                if here is None:
                    raise
                without[here] = unreadable(path, error)
        elif len(parts) == 1 and path.is_file() and here is not None and is_meant:
            name = path.name
            for i in range(match.re.groups, 0, -1):
                name = name[: match.start(i)] + "{rank}" + name[match.end(i) :]
            yield Found(here, path, name)


def unreadable(folder: Path, error: OSError) -> FormatError:
    """Return the error of a rank whose folder cannot be read."""
    found = UnreadableError(str(folder), None, reason_of(error))
    found.__cause__ = error
    return found


def hint_at_pattern(root: Path) -> str:
    """Return the end of a message that names a file and a pattern, or "" if none fits."""
    for pattern, first in suggest_patterns(root):
        return f"; found {first}: --pattern {shlex.quote(pattern)}, if that is its rank"
    return ""


def suggest_patterns(root: Path) -> Iterator[tuple[str, str]]:
    """Yield patterns made from the names of the checkpoint files below a folder.

    Each takes one file of every rank that it finds, or one of every step.

    Yields
    ------
    pattern, first
        The pattern of most files first, and the path of the first of them below ``root``.
    """
    groups: dict[tuple[str, str], list[Path]] = defaultdict(list)
    for path in islice(_files_below(root, MAX_DEPTH), MAX_FILES):
        inside = path.relative_to(root)
        groups[NUMBER.sub("#", str(inside.parent)), path.suffix].append(inside)
    for files in sorted(groups.values(), key=len, reverse=True):
        pattern = next((one for one in _patterns(files) if _works(root, one)), None)
        if pattern is not None:
            yield pattern, str(files[0])


def _files_below(folder: Path, depth: int) -> Iterator[Path]:
    try:
        inside = sorted(folder.iterdir())
    except OSError:
        return  # a suggestion needs no folder that cannot be read
    for path in inside:
        if path.is_dir():
            if depth and not EMERGENCY.fullmatch(path.name):
                yield from _files_below(path, depth - 1)
        elif format_of_suffix(path.name) is not None and path.is_file():
            yield path


def _patterns(files: Sequence[Path]) -> Iterator[str]:
    """Yield possible patterns of files whose folders differ in numbers alone."""
    suffix = files[0].suffix
    folders = [str(path.parent) for path in files]
    for folder in _spell(folders):
        yield f"{folder}/*{suffix}"
    heads: dict[str, list[str]] = defaultdict(list)
    for path in files:
        head = STEP_IN_NAME.sub("-*", str(path.with_suffix("")))
        heads[NUMBER.sub("#", head)].append(head)
    for head in _spell(max(heads.values(), key=len)):
        yield head + suffix


def _spell(names: Sequence[str]) -> Iterator[str]:
    """Yield names that differ in numbers alone as one, with ``{rank}`` in place of some.

    Numbers that are equal in every name are replaced together; others that vary become ``*``.
    """
    split = [NUMBER.split(name) for name in names]
    columns = {i: tuple(int(parts[i]) for parts in split) for i in range(1, len(split[0]), 2)}
    varying = {i: numbers for i, numbers in columns.items() if len(set(numbers)) > 1}
    if columns and not varying:
        varying = {max(columns): columns[max(columns)]}
    for ranks in sorted(dict.fromkeys(varying.values()), key=lambda one: -len(set(one))):
        yield "".join(
            "{rank}" if columns.get(i) == ranks else "*" if i in varying else part
            for i, part in enumerate(split[0])
        )


def _works(root: Path, pattern: str) -> bool:
    """Return whether a pattern finds the files of ranks, one for each rank and step."""
    try:
        found = list(_match(root, Path(pattern).parts, None, {}))
        choose_step(str(root), set_backups_aside(found, []), None, [])
    except StepError:
        return True  # the pattern is right; no step is on every rank
    except (PlanError, OSError):
        return False
    return bool(found)
