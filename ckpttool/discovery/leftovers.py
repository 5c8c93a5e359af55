"""What lies in the folders of a checkpoint beside its files, and what is said of it.

* ``{prefix}-{epoch}_{step}.tmp``: MindSpore renames a file when all of it is written, so this is
  what is left of a save that did not finish.  ``ckpttool`` itself does so with ``.partial``.
* ``ckpttool.json``: its manifest; the journal and the records of parts are there before it.
* ``ttp_saved_checkpoints-step_{N}/rank_{r}/``: the emergency save of fault-tolerant training; with
  ``_tmp`` behind the name not all ranks finished it.
* ``backup.ckpt``: kept by ``BackupAndRestore`` for a restart; its name tells no step.
* ``transform_failed_rank_{r}.txt``: MindFormers could not convert the files beside it; the text
  says why.  ``merge_succeed.txt`` and ``transform_succeed_rank_{r}.txt`` mean nothing any more.
* Graphs, exported models, group information, rank tables: see `ckpttool.formats.foreign`.

Source
------
MindSpore 2.10 ``train/serialization.py`` (``_exec_save``),
``train/callback/_train_fault_tolerance.py``, ``_backup_and_restore.py``; MindFormers
``tools/ckpt_transform/transform_checkpoint.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from ckpttool.discovery.file_names import RankFile, step_of
from ckpttool.formats import format_of_suffix
from ckpttool.formats.foreign import identify_foreign
from ckpttool.formats.local import exists, is_file, is_folder, is_link, list_folder, open_file
from ckpttool.model.diagnostics import Note
from ckpttool.model.manifest import JOURNAL, MANIFEST
from ckpttool.model.wording import format_ranks, shorten
from ckpttool.storage.files import PARTIAL
from ckpttool.transaction.manifest import written_strategies

UNFINISHED = (".tmp", PARTIAL)
EMERGENCY = re.compile(r"ttp_saved_checkpoints-step_\d+(_tmp)?")
FAILED = re.compile(r"transform_failed_rank_\d+\.txt")
MARKER = re.compile(r"(merge_succeed|transform_succeed_rank_\d+)\.txt")
_FOREIGN_SUFFIXES = (".pb", ".json", ".meta", ".mindir")
BACKUP = "backup.ckpt"
REASON_BYTES = 200  # of a text that says why a conversion failed


def find_unfinished_save(path: Path) -> Path | None:
    """The emergency save that not all ranks finished: ``path``, or what it lies in; None if none.

    It may be the save itself, a rank's folder in it, or a file there.
    """
    here = path.absolute()
    found = (one for one in (here, *here.parents[:2]) if EMERGENCY.fullmatch(one.name))
    return next((one for one in found if one.name.endswith("_tmp")), None)


def describe_unfinished_save(save: Path) -> str:
    """What is said of an emergency save that not all ranks finished."""
    return (
        f"{save}: an emergency save that did not finish, so files may be missing or old; if you "
        "know that they are all there, rename the folder (without _tmp)"
    )


def is_unfinished_file(path: Path) -> bool:
    """Whether its name says that it is not all there."""
    return path.suffix in UNFINISHED


def note_occasion(name: str, notes: list[Note]) -> None:
    """A note if the name of a file says that it was saved on no ordinary occasion."""
    step = step_of(name)
    if step is not None and step.is_breakpoint:
        notes.append(Note("step", f"step {step.label}: saved when training broke off"))
    if name == BACKUP:
        notes.append(Note("step", f"{name}: kept for a restart, and its name tells no step"))


def drop_backups(found: list[RankFile], notes: list[Note]) -> list[RankFile]:
    """The files without those that are kept for a restart, if there are others."""
    backups = [item for item in found if item.path.name == BACKUP]
    others = [item for item in found if item.path.name != BACKUP]
    if not backups or not others:
        return found
    text = f"{format_ranks([item.rank for item in backups])}: {BACKUP}, kept for a restart, passed"
    notes.append(Note("skipped", f"{text} over (--step backup takes it)"))
    return others


def note_leftovers(root: Path, folders: Iterable[Path], notes: list[Note]) -> None:
    """Notes on what is unfinished, failed, lost or no file, in a folder and its ranks'."""
    unfinished = []
    failed = []
    lost = []
    strange = []
    for folder in (root, *(folder for folder in folders if folder != root)):
        for path in list_folder(folder):
            if is_unfinished_file(path) and is_file(path):
                unfinished.append(str(path.relative_to(root)))
            elif FAILED.fullmatch(path.name) and is_file(path):
                failed.append(f"{path}: {_read_reason(path)}")
            elif is_link(path) and not exists(path):
                lost.append(str(path.relative_to(root)))
            elif format_of_suffix(path.name) and not (is_file(path) or is_folder(path)):
                strange.append(str(path.relative_to(root)))
    if lost:
        notes.append(Note("absent", f"{root}: links that lead nowhere: {shorten(lost)}"))
    if strange:
        text = f"{root}: pipes or devices, which are not read: {shorten(strange)}"
        notes.append(Note("absent", text))
    if unfinished:
        text = f"{root}: left over from a save that did not finish: {shorten(unfinished)}"
        notes.append(Note("unfinished", text))
    notes += [Note("unfinished", f"a conversion failed: {text}") for text in failed]
    if EMERGENCY.fullmatch(root.absolute().name):
        save = find_unfinished_save(root)
        if save is not None:
            notes.append(Note("unfinished", describe_unfinished_save(save)))
        else:
            text = f"{root}: an emergency save of fault-tolerant training"
            notes.append(Note("step", text))


def find_emergency_saves(folder: Path) -> list[Path]:
    """The emergency saves in a folder, finished or not."""
    return [path for path in list_folder(folder) if EMERGENCY.fullmatch(path.name)]


def note_emergencies(saves: Iterable[Path], notes: list[Note]) -> None:
    """Notes on emergency saves that were passed over: which may be named, which did not finish."""
    for save in saves:
        text = f"{save}: an emergency save of fault-tolerant training, passed over"
        if find_unfinished_save(save):
            notes.append(Note("unfinished", f"{text}; it did not finish"))
        else:
            notes.append(Note("skipped", f"{text}; name it as SRC to use it"))


def note_skipped(root: Path, others: Sequence[str], notes: list[Note]) -> None:
    """A note on what was passed over among the rank folders, each called what it is."""
    emergencies = [name for name in others if EMERGENCY.fullmatch(name)]
    known = [name for name in others if MARKER.fullmatch(name) or FAILED.fullmatch(name)]
    strategies = written_strategies(root / MANIFEST)
    rest = [
        _describe(root / name)
        for name in others
        if name not in known and name not in emergencies and not name.endswith(UNFINISHED)
        if name not in strategies
        and not name.endswith((MANIFEST, JOURNAL))
        and not name.startswith(".ckpttool-part-")
    ]
    note_emergencies((root / name for name in emergencies), notes)
    if rest:
        notes.append(Note("skipped", f"{root}: passed over {shorten(rest)}"))


def _describe(path: Path) -> str:
    """The name of a file, and what it is if that is known."""
    if path.suffix not in _FOREIGN_SUFFIXES or not is_file(path):
        return path.name
    try:
        other = identify_foreign(str(path))
    except OSError:
        return path.name  # the note is a courtesy; the file is not needed
    return path.name if other is None else f"{path.name} ({other.noun})"


def _read_reason(path: Path) -> str:
    try:
        with open_file(path) as file:
            text = file.read(REASON_BYTES).decode(errors="replace")
    except OSError as error:
        return str(error)  # the note is a courtesy; the file is not needed
    return " ".join(text.split()) or "no reason told"
