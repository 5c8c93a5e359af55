"""Lists the files of all ranks in a folder, of every step.

A rank folder is called ``rank_3``, ``rank_03``, ``rank3``, ``node3``, ``ckpt_3``, ``rank_3_ckpt``
or ``device3``.  Without rank folders, files whose own names say ``rank_3`` count, as MindFormers
writes them.  A pattern overrides both.

Source
------
MindSpore 2.10 ``parallel/checkpoint_transform.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from ckpttool.errors import (
    FormatError,
    PlanError,
    UnfinishedError,
    UnreadableError,
    UnsupportedError,
    raise_all,
    reason_of,
)
from ckpttool.formats import format_of_suffix
from ckpttool.formats.others import OTHERS, recognise
from ckpttool.formats.unified import is_index_name
from ckpttool.model.notes import Note
from ckpttool.model.strategy import shorten
from ckpttool.storage.leftovers import (
    EMERGENCY,
    emergency_saves,
    interruption,
    note_emergencies,
    note_leftovers,
    note_others,
    unfinished_save,
)
from ckpttool.storage.names import RANK_IN_NAME, Found

PYTORCH_NAME = re.compile(r"pytorch_model(-\d+-of-\d+)?\.bin(\.index\.json)?")
PYTORCH_SUFFIXES = (".bin", ".pt", ".pth")
RANK_FOLDER = re.compile(r"(rank|node|ckpt|device)[_-]?(\d+)(?:_ckpt)?")


def siblings(folder: Path) -> list[str]:
    """Names of the other rank folders beside a rank folder; none if it is no rank folder."""
    if RANK_FOLDER.fullmatch(folder.name) is None:
        return []
    try:
        beside = sorted(path.name for path in folder.parent.iterdir() if path.is_dir())
    except OSError:
        return []  # a folder further up need not be readable
    return [name for name in beside if RANK_FOLDER.fullmatch(name) and name != folder.name]


def note_rank_folders(root: Path, notes: list[Note]) -> None:
    """Say so if rank folders lie beside a checkpoint that describes itself: they are another's."""
    names = sorted(p.name for p in root.iterdir() if RANK_FOLDER.fullmatch(p.name) and p.is_dir())
    if names:
        pattern = re.sub(r"\d+", "{rank}", names[0]) + "/*"
        text = f"{root}: passed over {shorten(names, 3)}, which are of another checkpoint"
        notes.append(Note("passed over", f"{text} (--pattern '{pattern}' takes them)"))


# Ranks whose folder has no file that could be taken, and why, if it cannot be read.
Without = dict[int, FormatError | None]


def list_by_pattern(root: Path, pattern: str, without: Without) -> list[Found]:
    """Files below ``root`` that match a pattern such as ``node{rank}/*``.

    Ranks whose folder cannot be read are added to ``without``.
    """
    if "{rank}" not in pattern:
        raise PlanError([f"the pattern {pattern} does not say where {{rank}} is in the path"])
    found = list(_match(root, Path(pattern).parts, None, without))
    if not found:
        raise_all(filter(None, without.values()))
        text = f"{root}: no file matches the pattern {pattern}"
        raise PlanError([text + _suggest_pattern(root)])
    return found


def _match(
    folder: Path, parts: tuple[str, ...], rank: int | None, without: Without
) -> Iterator[Found]:
    """Files below ``folder`` that match the rest of a pattern; one rank has one number in it."""
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
                without[here] = _unreadable(path, error)
        elif len(parts) == 1 and path.is_file() and here is not None and is_meant:
            name = path.name
            for i in range(match.re.groups, 0, -1):
                name = name[: match.start(i)] + "{rank}" + name[match.end(i) :]
            yield Found(here, path, name)


def holds_ranks(folder: Path) -> bool:
    """Whether rank folders, or files with their rank in the name, lie in a folder."""
    return any(RANK_FOLDER.fullmatch(p.name) and p.is_dir() for p in folder.iterdir()) or any(
        RANK_IN_NAME.search(p.name) for p in checkpoint_files(folder)
    )


def _unreadable(folder: Path, error: OSError) -> FormatError:
    unreadable = UnreadableError(str(folder), None, reason_of(error))
    unreadable.__cause__ = error
    return unreadable


def list_rank_files(root: Path, notes: list[Note], without: Without) -> list[Found]:
    """Checkpoint files in the rank folders of ``root``, or in ``root`` itself.

    Ranks whose folder has none, or cannot be read, are added to ``without``.
    """
    folders, others, problems = _find_folders(root)
    if not folders:
        note_leftovers(root, (), notes)
        return _list_flat_files(root, notes)
    found = []
    in_parts = []
    for rank, folder in sorted(folders.items()):
        try:
            inside = [Found(rank, path, path.name) for path in checkpoint_files(folder)]
            if len(inside) > 1 and any(is_index_name(path.name) for path in folder.iterdir()):
                in_parts.append(folder)
        except OSError as error:
            without[rank] = _unreadable(folder, error)
            continue
        if not inside:
            without[rank] = None
        found += inside
    closed = {rank: error for rank, error in without.items() if error is not None}
    readable = (folder for rank, folder in folders.items() if rank not in closed)
    note_leftovers(root, readable, notes)
    if in_parts:
        problems.append(
            f"{shorten(map(str, in_parts), 3)}: what one rank holds lies in several files, as an "
            f"index says; make them one first: ckpttool merge {in_parts[0]} "
            f"--replicated -o ONE/{in_parts[0].name}/net.safetensors, and so on"
        )
    if not found:
        _refuse_unfinished(root)
        raise_all(closed.values())
        problems += [f"rank {rank}: no checkpoint file in {folders[rank]}" for rank in without]
    if problems:
        raise PlanError([*problems, *unfinished(notes)])
    note_others(root, others, notes)
    return found


def _find_folders(root: Path) -> tuple[dict[int, Path], list[str], list[str]]:
    """Rank folders by rank, names of what else is there, and what is wrong with it."""
    folders: dict[int, Path] = {}
    words: dict[str, str] = {}
    problems: list[str] = []
    others: list[str] = []
    for path in sorted(root.iterdir()):
        match = RANK_FOLDER.fullmatch(path.name) if path.is_dir() else None
        if match is None:
            others += [path.name] if path.exists() else []
            continue
        words.setdefault(match[1], path.name)
        rank = int(match[2])
        if rank in folders and len(words) == 1:
            problems.append(f"rank {rank}: two folders, {folders[rank]} and {path}")
        folders[rank] = path
    if len(words) > 1:
        problems = [
            (
                f"{root}: rank folders of several kinds ({', '.join(words.values())}); "
                "say which with --pattern"
            )
        ]
    return folders, others, problems


def unfinished(notes: Sequence[Note]) -> Iterator[str]:
    """What may explain that files are missing, for the message that says so."""
    yield from (note.text for note in notes if note.kind in ("unfinished", "absent"))


def _list_flat_files(root: Path, notes: list[Note]) -> list[Found]:
    files = list(checkpoint_files(root))
    saves = emergency_saves(root)
    note_emergencies(saves, notes)
    found = [
        Found(int(match[1]), path, path.name)
        for path in files
        if (match := RANK_IN_NAME.search(path.name)) is not None
    ]
    if not found:
        _refuse_unfinished(root)
        _refuse_pytorch(root)
        hint = f"; to use one file, name it: {files[0]}" if len(files) == 1 else ""
        if RANK_FOLDER.fullmatch(root.absolute().name) is not None:
            one = f", or its file: {files[0]}" if files else ""
            hint = f"; this is the folder of one rank, name the one above: {root.parent}{one}"
        hint = hint or _suggest_pattern(root)
        below = checkpoints_in(root)
        if below:
            hint = f"; a checkpoint lies in {shorten(map(str, below), 3)}: name one as SRC"
        finished = [str(save) for save in saves if unfinished_save(save) is None]
        if finished:
            hint = f"; an emergency save may do, name it as SRC: {shorten(finished, 3)}"
        text = (
            f"{root}: no rank folders (rank_0, rank_1, ...) and no checkpoint files with "
            f"rank_N in their names; say where they are with --pattern{hint}"
        )
        raise PlanError([text, *unfinished(notes)])
    return found


def _refuse_unfinished(root: Path) -> None:
    """Raise what tells of a run of ckpttool that there are no files of, and what to do."""
    said = interruption(root)
    if said is not None:
        raise UnfinishedError([said])


def _refuse_pytorch(root: Path) -> None:
    """Raise `UnsupportedError` if what lies in a folder is PyTorch's, by its names or contents."""
    names = [path.name for path in sorted(root.iterdir()) if path.is_file() and _is_pytorchs(path)]
    if names:
        other = OTHERS["pytorch"]
        reason = f"{other.noun} ({shorten(names, 3)}), {other.remedy}"
        raise UnsupportedError(str(root), None, reason)


def _is_pytorchs(path: Path) -> bool:
    if PYTORCH_NAME.fullmatch(path.name):
        return True
    other = recognise(str(path)) if path.suffix in PYTORCH_SUFFIXES else None
    return other is not None and other.kind == "pytorch"


def _suggest_pattern(root: Path) -> str:
    """A hint if folders with numbers in their names hold checkpoint files, as of unknown ranks."""
    for path in sorted(root.glob("*[0-9]*/*")):
        folder = path.parent.name
        if format_of_suffix(path.name) and path.is_file() and not EMERGENCY.fullmatch(folder):
            spelled = re.sub(r"\d+(?=\D*$)", "{rank}", folder)
            pattern = f"--pattern '{spelled}/*{path.suffix}'"
            return f"; found {folder}/{path.name}: {pattern}, if that is its rank"
    return ""


def checkpoints_in(root: Path) -> list[Path]:
    """The folders in a folder that are checkpoints themselves, without emergency saves."""
    found = {path.parent for path in root.glob("*/*") if _is_telling(path)}
    return sorted(path for path in found if EMERGENCY.fullmatch(path.name) is None)


def _is_telling(path: Path) -> bool:
    """Whether this shows that the folder it lies in is a checkpoint; logs have rank folders too."""
    if is_index_name(path.name):
        return True
    is_rank = RANK_FOLDER.fullmatch(path.name) is not None and path.is_dir()
    return is_rank and any(checkpoint_files(path))


def checkpoint_files(folder: Path) -> Iterator[Path]:
    """Files with a checkpoint's ending; ``.tmp``, ``-graph.meta`` and the like have others."""
    for path in sorted(folder.iterdir()):
        if format_of_suffix(path.name) is not None and path.is_file():
            yield path
