"""Files and unfinished saves that lie in the folders of a checkpoint but are not part of it.

This module alone decides what is foreign in a folder, and words why it is ignored or refused.  Each
kind of folder says what it reads itself, and hands the rest to this module.

* ``{prefix}-{epoch}_{step}.tmp``: a save that did not finish.  MindSpore renames a file when all of
  it is written.  ``ckpttool`` itself uses ``.partial``.
* ``ckpttool.json``: its manifest; ``.ckpttool`` beside it is the record of the run.
* ``ttp_saved_checkpoints-step_{N}/rank_{r}/``: the emergency save of fault-tolerant training; with
  ``_tmp`` behind the name not all ranks finished it.
* ``backup.ckpt``: ``BackupAndRestore`` keeps it for a restart; its name lacks a step.
* ``transform_failed_rank_{r}.txt``: MindFormers could not convert the files in the folder; the
  text says why.  ``merge_succeed.txt`` and ``transform_succeed_rank_{r}.txt`` are ignored.
* ``net-1_1.ckpt.gz``, ``rank_3.tar.gz``: a checkpoint or a rank that somebody compressed.
* ``pytorch_model.bin``: weights of PyTorch, in a folder without any of MindSpore.
* Graphs, exported models, group information, rank tables: see `ckpttool.formats.foreign`.

Source
------
MindSpore 2.10 ``train/serialization.py`` (``_exec_save``),
``train/callback/_train_fault_tolerance.py``, ``_backup_and_restore.py``; MindFormers
``tools/ckpt_transform/transform_checkpoint.py``.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from msgspec.structs import replace

from ckpttool.discovery.file_names import RANK_FOLDER, RANK_IN_NAME, RankFile, step_of
from ckpttool.formats import format_of_suffix
from ckpttool.formats.foreign import FOREIGN_KINDS, identify_foreign
from ckpttool.formats.local import (
    exists,
    find_paths,
    is_file,
    is_folder,
    is_link,
    list_folder,
    open_file,
)
from ckpttool.lazy import compile_late
from ckpttool.model.manifest import MANIFEST, RECORD
from ckpttool.problems import (
    Diagnostic,
    Diagnostics,
    FormatError,
    UnfinishedError,
    UnsupportedError,
)
from ckpttool.storage.files import PARTIAL
from ckpttool.transaction.locks import is_held
from ckpttool.transaction.sealed_files import written_strategies
from ckpttool.transaction.states import describe_record, find_unfinished_run
from ckpttool.wording import count, format_ranks, shorten

_UNFINISHED_SUFFIXES = (".tmp", PARTIAL)
_EMERGENCY = compile_late(r"ttp_saved_checkpoints-step_\d+(_tmp)?")
_FAILED_CONVERSION = compile_late(r"transform_failed_rank_\d+\.txt")
_EXPLAINED = compile_late(  # names that are noted by themselves, or that say nothing
    rf"{_EMERGENCY.pattern}|{_FAILED_CONVERSION.pattern}"
    r"|(merge_succeed|transform_succeed_rank_\d+)\.txt"
)
_PYTORCH_NAME = compile_late(r"pytorch_model(-\d+-of-\d+)?\.bin(\.index\.json)?")
_DEEPSPEED = "*mp_rank_*_model_states.pt"
_PYTORCH_SUFFIXES = (".bin", ".pt", ".pth")
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


# -------------------------------------------------------------------------------- emergency saves


def is_emergency(path: Path) -> bool:
    """Return whether a path has the name of an emergency save, finished or not."""
    return _EMERGENCY.fullmatch(path.name) is not None


def find_emergency_saves(folder: Path) -> list[Path]:
    """Return the emergency saves in a folder, finished or not."""
    return [*filter(is_emergency, list_folder(folder))]


def find_unfinished_save(path: Path) -> Path | None:
    """Return the unfinished emergency save that a path is, or is in; None if there is none.

    The path may be the save itself, a rank's folder in it, or a file there.
    """
    real_path = path.absolute()
    saves = filter(is_emergency, (real_path, *real_path.parents[:2]))
    return next((save for save in saves if save.name.endswith("_tmp")), None)


def _describe_unfinished_save(code: str, save: Path) -> Diagnostic:
    message = "an emergency save that did not finish: files may be missing or old"
    hint = f"mv {save} {str(save).removesuffix('_tmp')}, if all files are there"
    return Diagnostic(code, message, hint=hint, path=str(save), where=str(save))


# ------------------------------------------------------------------------------- what is refused


def refusals(path: Path) -> Iterator[FormatError]:
    """Yield why a file is not read because of its name."""
    if path.suffix == PARTIAL:
        reason = "a temporary file of a run of ckpttool that did not end"
        facts, hint = "zeros stand where nothing was written", "the same command with --resume"
        yield UnsupportedError(str(path), None, reason, hint, facts)
    elif path.suffix in _UNFINISHED_SUFFIXES:
        reason, hint = "a file of a save that did not finish", "rename it to .ckpt, if the file is "
        yield UnsupportedError(str(path), None, reason, f"{hint}complete", "")


def refuse_unfinished_run(root: Path) -> None:
    """Raise UnfinishedError if a run that did not end was to write this folder."""
    if unfinished := find_unfinished_run(root):
        raise UnfinishedError([replace(unfinished, code="nothing_complete")])


def refuse_pytorch(root: Path) -> None:
    """Raise ForeignError if a folder without a checkpoint has weights of PyTorch, or of DeepSpeed.

    DeepSpeed writes ``latest``, ``zero_to_fp32.py`` and ``TAG/mp_rank_00_model_states.pt``.
    """
    for pattern, top in ((_DEEPSPEED, root / ".."), (f"*/{_DEEPSPEED}", root)):
        if states := [path.name for path in sorted(find_paths(root, pattern))]:
            folder = os.path.normpath(top)
            raise FOREIGN_KINDS["deepspeed"].error(folder, shorten(states, 3), is_src=True)
    names = [path.name for path in list_folder(root) if is_file(path) and _is_pytorch_file(path)]
    if names:
        raise FOREIGN_KINDS["pytorch"].error(str(root), shorten(names, 3))


def _is_pytorch_file(path: Path) -> bool:
    if _PYTORCH_NAME.fullmatch(path.name):
        return True
    kind = identify_foreign(str(path)) if path.suffix in _PYTORCH_SUFFIXES else None
    return kind is not None and kind.kind == "pytorch"


def describe_unfinished(whole: Path, files: Iterable[Path] = ()) -> Iterator[Diagnostic]:
    """Yield the unfinished saves and runs that a checkpoint, or one of its files, is of."""
    saves = map(find_unfinished_save, (whole, *files))
    for save in dict.fromkeys(filter(None, saves)):
        yield _describe_unfinished_save("unfinished", save)
    if unfinished := find_unfinished_run(whole):
        yield unfinished
    yield from describe_record(whole)


# ------------------------------------------------------------------------------- what is ignored


def describe_ignored(
    folder: Path, names: Sequence[str], what: str, *, noun: str = "file", hint: str = ""
) -> Iterator[Diagnostic]:
    """Yield a note on what is not read in a folder, if there is any; ``what`` says what it is."""
    if names:
        message = f"{count(len(names), noun)} {what}: ignored"
        yield Diagnostic("skipped", message, hint=hint, facts=shorten(names, 3), where=str(folder))


def note_special_save(name: str, diagnostics: Diagnostics) -> None:
    """Note a file whose name shows a save at a breakdown or for a restart."""
    step = step_of(name)
    if step is not None and step.is_breakpoint:
        diagnostics.add(Diagnostic("step", f"step {step.label} was saved when training broke off"))
    if name == _BACKUP:
        diagnostics.add(Diagnostic("step", f"{name} is a backup for a restart, of unknown step"))


def drop_backups(files: list[RankFile], diagnostics: Diagnostics) -> list[RankFile]:
    """Return the files without backups for a restart, unless there are only backups."""
    backups = [file for file in files if file.path.name == _BACKUP]
    if not backups or len(backups) == len(files):
        return files
    ranks = tuple(sorted({file.rank for file in backups}))
    message = f"{format_ranks(ranks)}: {_BACKUP}, a backup for a restart, is ignored"
    diagnostics.add(Diagnostic("skipped", message, hint="--step backup", ranks=ranks))
    return [file for file in files if file.path.name != _BACKUP]


def note_foreign(root: Path, folders: Iterable[Path], diagnostics: Diagnostics) -> None:
    """Note what a checkpoint's folder and those of its ranks hold and no kind of folder reads.

    These are unfinished and failed saves, packed files, broken links, special files and, in
    ``root``, emergency saves.
    """
    paths_of: dict[tuple[str, str], list[Path]] = defaultdict(list)
    failed = []
    for folder in dict.fromkeys((root, *folders)):
        for path in list_folder(folder):
            if _FAILED_CONVERSION.fullmatch(path.name) and is_file(path):
                failed.append(path)
            elif kind := _kind_of(path):
                paths_of[kind].append(path)
    for (code, message), paths in sorted(paths_of.items()):
        names = (str(path.relative_to(root)) for path in paths)
        diagnostics.add(Diagnostic(code, f"{message}: {shorten(names, 3)}", where=str(root)))
    if failed:
        message = "MindFormers could not convert files here"
        facts = f"{shorten((path.name for path in failed), 3)}: {_read_reason(failed[0])}"
        diagnostics.add(Diagnostic("leftover", message, facts=facts, where=str(root)))
    if _EMERGENCY.fullmatch(root.absolute().name):
        save = find_unfinished_save(root)
        message = f"{root}: an emergency save of fault-tolerant training"
        finished = Diagnostic("step", message)
        diagnostics.add(_describe_unfinished_save("leftover", save) if save else finished)
    for save in find_emergency_saves(root):
        code, message, hint = "skipped", "an emergency save: ignored", f"{save} as SRC"
        if find_unfinished_save(save):
            code, message, hint = "leftover", "an emergency save that did not finish: ignored", ""
        diagnostics.add(Diagnostic(code, message, hint=hint, path=str(save), where=str(save)))


def _kind_of(path: Path) -> tuple[str, str] | None:
    """Return the code and the name of what a foreign file is; None for others."""
    packing, name = _PACKINGS.get(path.suffix), path.stem.removesuffix(".tar")
    if path.suffix in _UNFINISHED_SUFFIXES and is_file(path) and not is_held(path):
        return "leftover", "files of a save that did not finish"
    is_of_checkpoint = packing and (
        format_of_suffix(name) or RANK_FOLDER.fullmatch(name) or RANK_IN_NAME.search(name)
    )
    if is_of_checkpoint and is_file(path):
        return "absent", f"files packed with {packing}, unpack them first"
    if is_link(path) and not exists(path):
        return "absent", "broken links"
    if format_of_suffix(path.name) and not (is_file(path) or is_folder(path)):
        return "absent", "pipes or devices, which are not read"
    return None


def note_beside_ranks(root: Path, names: Iterable[str], diagnostics: Diagnostics) -> None:
    """Note the files and folders among the rank folders that nothing else explains."""
    strategies = written_strategies(root / MANIFEST)
    unknown = [
        name
        for name in names
        if not _EXPLAINED.fullmatch(name)
        and name not in strategies
        and not name.endswith((*_UNFINISHED_SUFFIXES, MANIFEST, RECORD))
    ]
    if unknown:
        message = "other files or folders among the ranks: ignored"
        facts = shorten([*(_with_kind(root / name) for name in unknown[:3]), *unknown[3:]], 3)
        diagnostics.add(Diagnostic("skipped", message, facts=facts, where=str(root)))


def _with_kind(path: Path) -> str:
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
            reason = file.read(_REASON_BYTES).decode(errors="replace")
    except OSError as error:
        return str(error)  # the note is a courtesy; the file is not needed
    return " ".join(reason.split()) or "no reason is given"
