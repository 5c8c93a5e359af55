"""Finds the files of a checkpoint, one for each rank and all of one step, and reads their headers.

A rank folder is called ``rank_3``, ``rank_03``, ``rank3``, ``node3``, ``ckpt_3``, ``rank_3_ckpt``
or ``device3``.  Without rank folders, files whose own names say ``rank_3`` count, as MindFormers
writes them.  A pattern overrides both.  The end of a file's name says its step:
``{prefix}-{epoch}_{step}``, and ``_breakpoint`` behind it if training stopped there.

Source
------
MindSpore 2.10 ``train/callback/_checkpoint.py`` (names), ``parallel/checkpoint_transform.py``
(folders); MindFormers ``tools/utils.py`` (names with a rank).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from ckpttool.errors import FormatError, PlanError
from ckpttool.formats import format_of_suffix, read_index, read_indexes
from ckpttool.model.catalog import Catalog, FileIndex, format_ranks
from ckpttool.model.ciphertext import Secret
from ckpttool.model.notes import Note
from ckpttool.model.strategy import shorten
from ckpttool.storage.described import scan_described

RANK_FOLDER = re.compile(r"(rank|node|ckpt|device)[_-]?(\d+)(?:_ckpt)?")
RANK_IN_NAME = re.compile(r"(?<![A-Za-z])rank_?(\d+)(?!\d)")
STEP_IN_NAME = re.compile(r"-(\d+)_(\d+)(_breakpoint)?$")

Step = tuple[int, int, bool]  # epoch, step in it, saved on a breakdown


@dataclass(frozen=True, slots=True)
class _Found:
    """A file that may belong to the checkpoint.

    Attributes
    ----------
    rank, path
        Whose it is, and where.
    name
        Its name, with ``{rank}`` in the place of the number if a pattern says where that is.
    """

    rank: int
    path: Path
    name: str

    @property
    def key(self) -> str:
        """Its name, the same for the files of all ranks that were saved together."""
        if "{rank}" in self.name:
            return self.name
        name = RANK_IN_NAME.sub(
            lambda match: "rank_{rank}" if int(match[1]) == self.rank else match[0], self.name
        )
        stem, suffix = Path(name).stem, self.path.suffix
        step = STEP_IN_NAME.search(stem)
        head, tail = (stem, "") if step is None else (stem[: step.start()], step[0])
        number = re.search(r"\d+$", head)
        if number is not None and int(number[0]) == self.rank and "{rank}" not in name:
            head = head[: number.start()] + "{rank}"
        return head + tail + suffix


def scan(
    src: str,
    pattern: str | None = None,
    step: str | None = None,
    *,
    key: bytes | Secret | None = None,
) -> Catalog:
    """What is on disk: the header of every rank's file.

    Parameters
    ----------
    src
        A folder of rank folders, or one file, which is rank 0.
    pattern
        Path of a rank's file below ``src``, with ``{rank}`` for its number and ``*`` for anything;
        a file name with a ``*`` in it only means files with a checkpoint's ending.
    step
        The step to take, as in the names (``10_1``), or a whole file name without its ending.  By
        default the newest that every rank has; steps are compared as numbers.
    key
        That of encrypted files, as MindSpore took it (``enc_key``).

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
    key = Secret(key) if isinstance(key, bytes) else key
    if not root.is_dir():
        if root.exists() and not root.is_file():
            raise PlanError([f"{src}: neither a file nor a folder"])
        _note_siblings(root, notes)
        files = {0: read_index(src, key)}
        notes += _note_encryption(files, key)
        return Catalog(src, files, notes=tuple(notes), is_undivided=True)
    if pattern is None and (described := scan_described(src, step)) is not None:
        return described
    if pattern is not None:
        if "{rank}" not in pattern:
            raise PlanError([f"the pattern {pattern} does not say where {{rank}} is in the path"])
        found = list(_match(root, Path(pattern).parts, None))
        if not found:
            raise PlanError([f"{src}: no file matches the pattern {pattern}"])
    else:
        found = _list_rank_files(root, notes)
    chosen, label = _choose_step(src, found, step, notes)
    files = {}
    damaged: dict[int, FormatError] = {}
    ranks = sorted(chosen)
    indexes = read_indexes((str(chosen[rank]) for rank in ranks), key)
    for rank, index in zip(ranks, indexes, strict=True):
        if isinstance(index, FormatError):
            damaged[rank] = index
        else:
            files[rank] = index
    gaps = [  # of a wild number in a name some will do
        rank
        for low, high in pairwise((-1, *sorted(chosen)))
        for rank in range(low + 1, min(high, low + 1000))
    ]
    if gaps:
        notes.append(Note("absent", f"{format_ranks(gaps)}: no checkpoint file found in {src}"))
    notes += _note_encryption(files, key)
    return Catalog(src, files, label, damaged, tuple(notes))


def _note_encryption(files: Mapping[int, FileIndex], key: Secret | None) -> Iterator[Note]:
    """What is odd about a key or the lack of one, and about checksums of encrypted files."""
    encrypted = {rank: file for rank, file in files.items() if file.cipher is not None}
    if key is not None and files and not encrypted:
        yield Note("encryption", "no file is encrypted, so the key was not needed")
    void = [rank for rank, file in encrypted.items() if file.attrs.get("crc_num") == "0"]
    if void:
        text = f"{format_ranks(void)}: encrypted and saved with crc_check, for which MindSpore "
        text += "stores the checksum 0 and cannot read the file; read here, without a checksum"
        yield Note("encryption", text)


def _note_siblings(path: Path, notes: list[Note]) -> None:
    """Say so if a single file looks like one rank's part of a checkpoint."""
    folder = path.absolute().parent
    if RANK_FOLDER.fullmatch(folder.name) is None:
        return
    try:
        names = sorted(p.name for p in folder.parent.iterdir())
    except OSError:
        return  # the note is a courtesy; a folder further up need not be readable
    beside = [name for name in names if RANK_FOLDER.fullmatch(name)]
    if len(beside) > 1:
        text = f"{path}: one file, taken for the whole, though beside {folder.name} lie"
        others = shorten((name for name in beside if name != folder.name), 3)
        notes.append(Note("passed over", f"{text} {others}"))


def _match(folder: Path, parts: tuple[str, ...], rank: int | None) -> Iterator[_Found]:
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
            yield from _match(path, parts[1:], here)
        elif len(parts) == 1 and path.is_file() and here is not None and is_meant:
            name = path.name
            for i in range(match.re.groups, 0, -1):
                name = name[: match.start(i)] + "{rank}" + name[match.end(i) :]
            yield _Found(here, path, name)


def _list_rank_files(root: Path, notes: list[Note]) -> list[_Found]:
    """Checkpoint files in the rank folders of ``root``, or in ``root`` itself."""
    folders: dict[int, Path] = {}
    words: dict[str, str] = {}
    problems: list[str] = []
    others: list[str] = []
    for path in sorted(root.iterdir()):
        match = RANK_FOLDER.fullmatch(path.name) if path.is_dir() else None
        if match is None:
            others.append(path.name)
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
    if not folders:
        return _list_flat_files(root)
    found = []
    for rank, folder in sorted(folders.items()):
        inside = [_Found(rank, path, path.name) for path in _checkpoint_files(folder)]
        if not inside:
            problems.append(f"rank {rank}: no checkpoint file in {folder}")
        found += inside
    if problems:
        raise PlanError(problems)
    if others:
        notes.append(Note("passed over", f"{root}: passed over {shorten(others)}"))
    return found


def _list_flat_files(root: Path) -> list[_Found]:
    files = list(_checkpoint_files(root))
    found = [
        _Found(int(match[1]), path, path.name)
        for path in files
        if (match := RANK_IN_NAME.search(path.name)) is not None
    ]
    if not found:
        hint = f"; to use one file, name it: {files[0]}" if len(files) == 1 else ""
        if RANK_FOLDER.fullmatch(root.absolute().name) is not None:
            hint = f"; this is the folder of one rank, name the one above: {root.parent}"
        raise PlanError(
            [
                (
                    f"{root}: no rank folders (rank_0, rank_1, ...) and no checkpoint files with "
                    f"rank_N in their names; say where they are with --pattern{hint}"
                )
            ]
        )
    return found


def _checkpoint_files(folder: Path) -> Iterator[Path]:
    """Files with a checkpoint's ending; ``.tmp``, ``-graph.meta`` and the like have others."""
    for path in sorted(folder.iterdir()):
        if format_of_suffix(path.name) is not None and path.is_file():
            yield path


def _choose_step(
    src: str, found: list[_Found], wanted: str | None, notes: list[Note]
) -> tuple[dict[int, Path], str | None]:
    """One file for each rank, all of one step, and the step's label."""
    ranks = sorted({item.rank for item in found})
    groups = _group_by_name(found, len(ranks))
    keys = [key for key in groups if wanted is None or _is_wanted(key, groups[key], wanted)]
    if not keys:
        have = shorten(sorted({_label(_step_of(key)) or key for key in groups}), 8)
        raise PlanError([f"{src}: no file of step {wanted}; there are {have}"])
    steps = {key: _step_of(key) for key in keys}
    if wanted is not None and wanted.isdecimal() and len(keys) > 1:
        have = shorten(sorted({_label(steps[key]) or key for key in keys}), 8)
        raise PlanError([f"{src}: --step {wanted} may be any of {have}; give epoch and step"])
    complete = [key for key in keys if len(groups[key]) == len(ranks)]
    if not complete:
        absent = [
            f"{key} is not in {format_ranks([rank for rank in ranks if rank not in groups[key]])}"
            for key in keys
        ]
        everywhere = [key for key in groups if len(groups[key]) == len(ranks)]
        have = f"every rank has {shorten(everywhere)}" if everywhere else "no step is in every rank"
        raise PlanError([f"{src}: {shorten(absent)}; {have}"])
    best = max(complete, key=lambda key: steps[key] or (-1, -1, False))
    rivals = [
        key
        for key in keys
        if key != best
        and (steps[key] == steps[best] or None in steps.values() or _run(key) != _run(best))
    ]
    if rivals:
        named = [groups[key][min(groups[key])].name for key in (best, *rivals)]
        raise PlanError(
            [
                (
                    f"{src}: several files for {format_ranks(sorted(groups[rivals[0]]))}, and "
                    f"nothing says which is meant: {shorten(named)}; choose with --pattern or "
                    "--step"
                )
            ]
        )
    label = _label(steps[best])
    if len(keys) > 1:
        newest = max(keys, key=lambda key: steps[key] or ())
        text = f"step {label}, the newest of {len(keys)}"
        if newest != best:
            without = [rank for rank in ranks if rank not in groups[newest]]
            text += (
                f" that every rank has (step {_label(steps[newest])} is not in "
                f"{format_ranks(without)})"
            )
        notes.append(Note("step", text))
    return groups[best], label


def _group_by_name(found: list[_Found], count: int) -> Mapping[str, dict[int, Path]]:
    """Files of all ranks that were saved together, by their common name.

    A number at the end of a name, or before its step, may be the rank (``checkpoint_3.h5``) or
    just part of the name; if a name is the same on every rank, it is part of the name.
    """
    groups: dict[str, dict[int, Path]] = {}
    plain: dict[str, dict[int, Path]] = {}
    problems = []
    for item in found:
        plain.setdefault(item.path.name, {})[item.rank] = item.path
    for item in found:
        shared = len(plain[item.path.name]) == count
        group = groups.setdefault(item.path.name if shared else item.key, {})
        if item.rank in group:
            problems.append(f"rank {item.rank}: two files, {group[item.rank]} and {item.path}")
        group[item.rank] = item.path
    if problems:
        raise PlanError(problems)
    return groups


def _step_of(key: str) -> Step | None:
    match = STEP_IN_NAME.search(Path(key).stem)
    return (int(match[1]), int(match[2]), bool(match[3])) if match else None


def _run(key: str) -> str:
    """What comes before the step in a name; another one is that of another training run."""
    return STEP_IN_NAME.sub("", Path(key).stem)


def _label(step: Step | None) -> str | None:
    if step is None:
        return None
    return f"{step[0]}_{step[1]}" + ("_breakpoint" if step[2] else "")


def _is_wanted(key: str, files: Mapping[int, Path], wanted: str) -> bool:
    step = _step_of(key)
    asked = _step_of("-" + wanted)
    if asked is not None and STEP_IN_NAME.fullmatch("-" + wanted):
        return step == asked
    if wanted.isdecimal() and step is not None:
        return int(wanted) in step[:2]
    return any(wanted in (path.name, path.stem) for path in files.values())
