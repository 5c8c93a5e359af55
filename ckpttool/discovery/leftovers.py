"""Other files in the folders of a checkpoint: unfinished, failed, left over.

* ``{prefix}-{epoch}_{step}.tmp``: a save that did not finish.  MindSpore renames a file when all of
  it is written.  ``ckpttool`` itself uses ``.partial``.
* ``ckpttool.json``: its manifest; ``.ckpttool`` beside it is the record of the run.
* ``ttp_saved_checkpoints-step_{N}/rank_{r}/``: the emergency save of fault-tolerant training; with
  ``_tmp`` behind the name not all ranks finished it.
* ``backup.ckpt``: ``BackupAndRestore`` keeps it for a restart; its name has no step.
* ``transform_failed_rank_{r}.txt``: MindFormers could not convert the files in the folder; the
  text says why.  ``merge_succeed.txt`` and ``transform_succeed_rank_{r}.txt`` are ignored.
* ``net-1_1.ckpt.gz``, ``rank_3.tar.gz``: a checkpoint or a rank that somebody compressed.
* Graphs, exported models, group information, rank tables: see `ckpttool.formats.foreign`.

Source
------
MindSpore 2.10 ``train/serialization.py`` (``_exec_save``),
``train/callback/_train_fault_tolerance.py``, ``_backup_and_restore.py``; MindFormers
``tools/ckpt_transform/transform_checkpoint.py``.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from ckpttool.discovery.file_names import RANK_FOLDER, RANK_IN_NAME, RankFile, step_of
from ckpttool.formats import format_of_suffix
from ckpttool.formats.foreign import identify_foreign
from ckpttool.formats.local import exists, is_file, is_folder, is_link, list_folder, open_file
from ckpttool.model.manifest import MANIFEST, RECORD
from ckpttool.problems import Diagnostic, Diagnostics
from ckpttool.storage.files import PARTIAL
from ckpttool.transaction.locks import is_held
from ckpttool.transaction.sealed_files import written_strategies
from ckpttool.wording import count, format_ranks, shorten

_UNFINISHED_SUFFIXES = (".tmp", PARTIAL)
EMERGENCY = re.compile(r"ttp_saved_checkpoints-step_\d+(_tmp)?")
_FAILED_CONVERSION = re.compile(r"transform_failed_rank_\d+\.txt")
_EXPLAINED = re.compile(  # names that are noted by themselves, or that say nothing
    rf"{EMERGENCY.pattern}|{_FAILED_CONVERSION.pattern}"
    r"|(merge_succeed|transform_succeed_rank_\d+)\.txt"
)
_FOREIGN_SUFFIXES = (".pb", ".json", ".meta", ".mindir")
_PACKINGS = {
    ".gz": "gzip",
    ".tgz": "gzip",
    ".bz2": "bzip2",
    ".xz": "xz",
    ".zst": "zstd",
    ".zip": "zip",
    ".tar": "tar",
}
_BACKUP = "backup.ckpt"
_REASON_BYTES = 200  # of a text that says why a conversion failed


def find_unfinished_save(path: Path) -> Path | None:
    """Return the unfinished emergency save that a path is, or is in; None if there is none.

    The path may be the save itself, a rank's folder in it, or a file there.
    """
    here = path.absolute()
    found = (one for one in (here, *here.parents[:2]) if EMERGENCY.fullmatch(one.name))
    return next((one for one in found if one.name.endswith("_tmp")), None)


def describe_unfinished_save(code: str, save: Path) -> Diagnostic:
    """Return the diagnostic of an emergency save that not all ranks finished."""
    text = "an emergency save that did not finish: files may be missing or old"
    hint = f"mv {save} {str(save).removesuffix('_tmp')}, if all files are there"
    return Diagnostic(code, text, hint=hint, path=str(save), where=str(save))


def is_unfinished_name(path: Path) -> bool:
    """Return whether the name of a file marks it as unfinished."""
    return path.suffix in _UNFINISHED_SUFFIXES


def note_special_save(name: str, diagnostics: Diagnostics) -> None:
    """Note a file whose name shows a save at a breakdown or for a restart."""
    step = step_of(name)
    if step is not None and step.is_breakpoint:
        diagnostics.add(Diagnostic("step", f"step {step.label} was saved when training broke off"))
    if name == _BACKUP:
        diagnostics.add(Diagnostic("step", f"{name} is a backup for a restart, of unknown step"))


def drop_backups(found: list[RankFile], diagnostics: Diagnostics) -> list[RankFile]:
    """Return the files without backups for a restart, unless there are only backups."""
    backups = [item for item in found if item.path.name == _BACKUP]
    others = [item for item in found if item.path.name != _BACKUP]
    if not backups or not others:
        return found
    ranks = tuple(sorted({item.rank for item in backups}))
    text = f"{format_ranks(ranks)}: {_BACKUP}, a backup for a restart, is ignored"
    diagnostics.add(Diagnostic("skipped", text, hint="--step backup", ranks=ranks))
    return others


def note_leftovers(root: Path, folders: Iterable[Path], diagnostics: Diagnostics) -> None:
    """Note unfinished and failed saves, broken links and special files in some folders."""
    found: dict[tuple[str, str], list[Path]] = defaultdict(list)
    failed = []
    for folder in (root, *(folder for folder in folders if folder != root)):
        for path in list_folder(folder):
            if is_unfinished_name(path) and is_file(path) and not is_held(path):
                found["leftover", "files of a save that did not finish"].append(path)
            elif packing := _packing_of(path):
                found["absent", f"files packed with {packing}, unpack them first"].append(path)
            elif _FAILED_CONVERSION.fullmatch(path.name) and is_file(path):
                failed.append(path)
            elif is_link(path) and not exists(path):
                found["absent", "broken links"].append(path)
            elif format_of_suffix(path.name) and not (is_file(path) or is_folder(path)):
                found["absent", "pipes or devices, which are not read"].append(path)
    for (code, text), paths in sorted(found.items()):
        names = (str(path.relative_to(root)) for path in paths)
        diagnostics.add(Diagnostic(code, f"{text}: {shorten(names, 3)}", where=str(root)))
    if failed:
        text = "MindFormers could not convert files here"
        facts = f"{shorten((path.name for path in failed), 3)}: {_read_reason(failed[0])}"
        diagnostics.add(Diagnostic("leftover", text, facts=facts, where=str(root)))
    if EMERGENCY.fullmatch(root.absolute().name):
        save = find_unfinished_save(root)
        if save is not None:
            diagnostics.add(describe_unfinished_save("leftover", save))
        else:
            text = f"{root}: an emergency save of fault-tolerant training"
            diagnostics.add(Diagnostic("step", text))


def _packing_of(path: Path) -> str | None:
    packing, name = _PACKINGS.get(path.suffix), path.stem.removesuffix(".tar")
    if packing is None or not is_file(path):
        return None
    is_of_rank = RANK_FOLDER.fullmatch(name) or RANK_IN_NAME.search(name)
    return packing if is_of_rank or format_of_suffix(name) is not None else None


def find_emergency_saves(folder: Path) -> list[Path]:
    """Return the emergency saves in a folder, finished or not."""
    return [path for path in list_folder(folder) if EMERGENCY.fullmatch(path.name)]


def note_emergencies(saves: Iterable[Path], diagnostics: Diagnostics) -> None:
    """Note skipped emergency saves, and which of them are complete."""
    for save in saves:
        if find_unfinished_save(save):
            code, text, hint = "leftover", "an emergency save that did not finish: ignored", ""
        else:
            code, text, hint = "skipped", "an emergency save: ignored", f"{save} as SRC"
        diagnostics.add(Diagnostic(code, text, hint=hint, path=str(save), where=str(save)))


def describe_ignored(
    folder: Path, names: Sequence[str], what: str, *, noun: str = "file", hint: str = ""
) -> Iterator[Diagnostic]:
    """Yield a note on what is not read in a folder, if there is any; ``what`` says what it is."""
    if names:
        text = f"{count(len(names), noun)} {what}: ignored"
        yield Diagnostic("skipped", text, hint=hint, facts=shorten(names, 3), where=str(folder))


def note_skipped(root: Path, others: Sequence[str], diagnostics: Diagnostics) -> None:
    """Note the skipped files and folders among the rank folders, with their kinds."""
    note_emergencies((root / name for name in others if EMERGENCY.fullmatch(name)), diagnostics)
    strategies = written_strategies(root / MANIFEST)
    unknown = [
        name
        for name in others
        if not _EXPLAINED.fullmatch(name)
        and name not in strategies
        and not name.endswith((*_UNFINISHED_SUFFIXES, MANIFEST, RECORD))
    ]
    if unknown:
        text = "other files or folders among the ranks: ignored"
        shown = (_describe(root / name) for name in unknown[:3])
        facts = shorten([*shown, *unknown[3:]], 3)
        diagnostics.add(Diagnostic("skipped", text, facts=facts, where=str(root)))


def _describe(path: Path) -> str:
    if path.suffix not in _FOREIGN_SUFFIXES or not is_file(path):
        return path.name
    try:
        kind = identify_foreign(str(path))
    except OSError:
        return path.name  # the note is a courtesy; the file is not needed
    return path.name if kind is None else f"{path.name} ({kind.noun})"


def _read_reason(path: Path) -> str:
    try:
        with open_file(path) as file:
            text = file.read(_REASON_BYTES).decode(errors="replace")
    except OSError as error:
        return str(error)  # the note is a courtesy; the file is not needed
    return " ".join(text.split()) or "no reason is given"
