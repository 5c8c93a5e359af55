"""The files of all ranks in a folder, of every step.

A rank folder is called ``rank_3``, ``rank_03``, ``rank3``, ``node3``, ``ckpt_3``, ``rank_3_ckpt``
or ``device3``; its files may be in one folder of the same rank in it, as in ``device3/ckpt_3``.
Without rank folders, files with ``rank_3`` in their names count, as MindFormers writes them.

A pattern such as ``node{rank}/CKP_1-4_32.ckpt`` overrides both.  ``{rank}`` stands for the number
of the rank, the same wherever it occurs; ``*`` for anything.

Source
------
MindSpore 2.10 ``parallel/checkpoint_transform.py``.
"""

from __future__ import annotations

import glob
import os
import re
import shlex
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

from ckpttool.discovery.file_names import HYPER_METADATA, RANK_IN_NAME, STEP_IN_NAME, RankFile
from ckpttool.discovery.leftovers import (
    EMERGENCY,
    drop_backups,
    find_emergency_saves,
    find_unfinished_save,
    note_emergencies,
    note_leftovers,
    note_skipped,
)
from ckpttool.discovery.steps import choose_step
from ckpttool.errors import (
    FormatError,
    PlanError,
    StepError,
    UnfinishedError,
    raise_all,
)
from ckpttool.formats import format_of_suffix
from ckpttool.formats.foreign import FOREIGN_KINDS, identify_foreign
from ckpttool.formats.local import (
    exists,
    find_paths,
    is_file,
    is_folder,
    list_folder,
    unreadable,
)
from ckpttool.formats.weight_index import is_index_name
from ckpttool.model.catalog import Catalog, MergedCatalog
from ckpttool.model.diagnostics import Diagnostic, Diagnostics
from ckpttool.model.manifest import MANIFEST
from ckpttool.model.wording import count, format_ranks, shorten
from ckpttool.transaction.states import find_unfinished_run

RANK_FOLDER = re.compile(r"(rank|node|ckpt|device)[_-]?(\d+)(?:_ckpt)?")
_PYTORCH_NAME = re.compile(r"pytorch_model(-\d+-of-\d+)?\.bin(\.index\.json)?")
_PYTORCH_SUFFIXES = (".bin", ".pt", ".pth")
_UNPACK = {".gz": "gunzip", ".bz2": "bunzip2", ".xz": "unxz", ".zst": "unzstd"}
_DIGITS = re.compile(r"(\d+)")
_MAX_DEPTH = 5  # of the folders that are searched to suggest a pattern
_MAX_FILES = 10_000  # that are considered to suggest a pattern

# Rank of a folder without a file to read -> the error if the folder is unreadable.
EmptyRanks = dict[int, FormatError | None]


def list_rank_files(
    root: Path, diagnostics: Diagnostics, empty_ranks: EmptyRanks
) -> list[RankFile]:
    """Return the checkpoint files in the rank folders of ``root``, or in ``root`` itself.

    ``empty_ranks`` gets the ranks whose folder has none, or cannot be read.
    """
    folders, others, problems = _find_folders(root)
    if not folders:
        note_leftovers(root, (), diagnostics)
        return _list_flat_files(root, diagnostics)
    found = []
    indexed = []
    strategies: list[str] = []
    ambiguous_files: list[str] = []
    for rank, folder in sorted(folders.items()):
        try:
            folders[rank], inside = _find_files(folder, rank)
            if len(inside) > 1 and any(is_index_name(p.name) for p in list_folder(folders[rank])):
                indexed.append(folders[rank])
        except OSError as error:
            empty_ranks[rank] = unreadable(str(folder), error)
            continue
        if folders[rank] != folder:
            strategies += [str(path.relative_to(root)) for path in checkpoint_files(folder)]
        if not inside:
            empty_ranks[rank] = None
            ambiguous_files += _files_of_other_ranks(folder, rank)
        found += [RankFile(rank, path, path.name) for path in inside]
    errors = {rank: error for rank, error in empty_ranks.items() if error is not None}
    readable = (folder for rank, folder in folders.items() if rank not in errors)
    note_leftovers(root, readable, diagnostics)
    if indexed:
        hint = f"ckpttool merge {indexed[0]} --replicated -o ONE/{indexed[0].name}/net.safetensors"
        text = "a rank has several files and an index; expected one file for each rank"
        facts = shorten(map(str, indexed), 3)
        problems.append(
            Diagnostic("source", text, f"{hint}, for each", facts=facts, where=str(root))
        )
    if not found:
        _refuse_unfinished(root)
        raise_all(errors.values())
        ranks = tuple(empty_ranks)
        text = f"no checkpoint file in the folders of {format_ranks(ranks)}"
        facts, hint = _suggest(root) or _suggest_links(root, folders.values())
        facts = facts or shorten((str(folders[rank].relative_to(root)) for rank in ranks), 3)
        hint = hint or "copy the files into these folders; `ckpttool help source` explains"
        problems.append(Diagnostic("source", text, hint, (), facts, ranks=ranks, where=str(root)))
    elif ambiguous_files:
        text = "paths name two ranks, and nothing shows which one is right"
        facts = shorten(ambiguous_files, 3).replace(f"{root}/", "")
        _, hint = _suggest(root) or _suggest_links(root, folders.values())
        problems.append(Diagnostic("source", text, hint, facts=facts, where=str(root)))
    if problems:
        raise PlanError((*problems, *explain_missing_files(diagnostics)))
    note_skipped(root, others, diagnostics)
    if strategies:
        text = f"{count(len(strategies), 'strategy file')} among the ranks: ignored"
        facts = shorten(strategies, 3)
        diagnostics.add(Diagnostic("skipped", text, "-s FILE", facts=facts, where=str(root)))
    return found


def explain_missing_files(diagnostics: Diagnostics) -> Iterator[Diagnostic]:
    """Yield the notes that may explain missing files, for the error about these."""
    yield from (one for one in diagnostics if one.code in ("leftover", "absent"))


def checkpoint_files(folder: Path) -> Iterator[Path]:
    """Yield the files in a folder that have a checkpoint's suffix, sorted."""
    yield from _with_checkpoint_suffix(list_folder(folder))


def _with_checkpoint_suffix(paths: Iterable[Path]) -> Iterator[Path]:
    """Yield the files with a checkpoint's suffix; ``.tmp`` and ``-graph.meta`` are none."""
    for path in paths:
        if format_of_suffix(path.name) is not None and is_file(path):
            yield path


# ------------------------------------------------------------------------------------- rank folders


def has_rank_files(folder: Path) -> bool:
    """Return whether a folder has rank folders, or files with their rank in the name."""
    return any(RANK_FOLDER.fullmatch(p.name) and is_folder(p) for p in list_folder(folder)) or any(
        RANK_IN_NAME.search(p.name) for p in checkpoint_files(folder)
    )


def is_in_rank_folder(root: str, folder: str) -> bool:
    """Return whether files in a folder belong to a rank of the checkpoint ``root``."""
    inside = Path(folder)
    if not inside.is_relative_to(root) or inside == Path(root):
        return False
    matches = [RANK_FOLDER.fullmatch(part) for part in inside.relative_to(root).parts]
    return None not in matches and len({int(match[2]) for match in matches if match}) == 1


def note_rank_folders(root: Path, diagnostics: Diagnostics) -> None:
    """Note rank folders in a self-described checkpoint: they are of another checkpoint."""
    names = sorted(
        p.name for p in list_folder(root) if RANK_FOLDER.fullmatch(p.name) and is_folder(p)
    )
    if names:
        pattern = re.sub(r"\d+", "{rank}", names[0]) + "/*"
        text = f"{count(len(names), 'folder')} of ranks, of another checkpoint: ignored"
        hint = f"--pattern '{pattern}'"
        facts = shorten(names, 3)
        diagnostics.add(Diagnostic("skipped", text, hint, facts=facts, where=str(root)))


def sibling_rank_folders(file: Path) -> tuple[str, list[str]]:
    """Return the name of the rank folder that contains a file, and those of its siblings.

    Siblings are of the same kind: ``node1`` is not a sibling of ``ckpt_1``.  Siblings of a folder
    further up count only if they hold a file with the same path, but for numbers.
    """
    for depth, folder in enumerate(file.parents[:3]):
        own = RANK_FOLDER.fullmatch(folder.name)
        if own is None:
            continue
        try:
            folders = [path for path in list_folder(folder.parent) if is_folder(path)]
        except OSError:
            continue  # a folder further up need not be readable
        place = re.sub(r"\d+", "*", glob.escape(str(file.relative_to(folder))))
        others = [
            path.name
            for path in folders
            if (match := RANK_FOLDER.fullmatch(path.name)) and match[1] == own[1]
            if path != folder and (not depth or any(find_paths(path, place)))
        ]
        if others:
            return folder.name, others
    return "", []


def find_nested_checkpoints(root: Path) -> list[Path]:
    """Return the folders in a folder that are checkpoints, except for emergency saves."""
    found = {path.parent for path in find_paths(root, "*/*") if _marks_checkpoint(path)}
    return sorted(path for path in found if EMERGENCY.fullmatch(path.name) is None)


def _marks_checkpoint(path: Path) -> bool:
    """Return whether a path shows that its folder is a checkpoint; logs have rank folders too."""
    if is_index_name(path.name) or path.name == ".metadata" or HYPER_METADATA.fullmatch(path.name):
        return True
    match = RANK_FOLDER.fullmatch(path.name)
    return match is not None and is_folder(path) and bool(_find_files(path, int(match[2]))[1])


def _find_folders(root: Path) -> tuple[dict[int, Path], list[str], list[Diagnostic]]:
    """Return the rank folders by rank, the names of all else in ``root``, and the problems."""
    folders: dict[int, Path] = {}
    words: dict[str, str] = {}
    problems: list[Diagnostic] = []
    twice: dict[int, str] = {}
    others: list[str] = []
    for path in list_folder(root):
        match = RANK_FOLDER.fullmatch(path.name) if is_folder(path) else None
        if match is None:
            others += [path.name] if exists(path) else []
            continue
        words.setdefault(match[1], path.name)
        rank = int(match[2])
        if rank in folders and len(words) == 1:
            twice.setdefault(rank, f"{folders[rank].name} and {path.name}")
        folders[rank] = path
    if twice:
        ranks, facts = tuple(twice), shorten(twice.values(), 3)
        text = f"two folders for {format_ranks(ranks)}"
        hint = "move one of the two folders away"
        problems = [Diagnostic("source", text, hint, (), facts, ranks=ranks, where=str(root))]
    if len(words) > 1:
        patterns = [f"--pattern {shlex.quote(pattern)}" for pattern, _ in _suggest_patterns(root)]
        hint = ", or ".join(patterns[:2]) or "--pattern with the form of one of them"
        text = "rank folders of several kinds"
        facts = shorten(words.values(), 3)
        problems = [Diagnostic("source", text, hint, facts=facts, where=str(root))]
    return folders, others, problems


def _find_files(folder: Path, rank: int) -> tuple[Path, list[Path]]:
    """Return the checkpoint files of a rank, and their folder.

    The folder is the rank folder, or the only rank folder in it that has files.  The inner one must
    be of the same rank, and the outer one may have only strategy files.  A script that changes into
    ``device0`` to train leaves ``device0/ckpt_0``, and perhaps its strategy file in ``device0``.
    With both ``node0/device0`` and ``node0/device1`` the numbers of the folders are not ranks.
    """
    names = list_folder(folder)
    files = list(_with_checkpoint_suffix(names))
    nested = [
        (int(match[2]), _find_files(path, int(match[2])))
        for path in names
        if (match := RANK_FOLDER.fullmatch(path.name)) and is_folder(path)
    ]
    nested = [(number, found) for number, found in nested if found[1]]
    if [number for number, _ in nested] == [rank] and all(map(_is_strategy, files)):
        return nested[0][1]
    return folder, files


def _files_of_other_ranks(folder: Path, rank: int) -> list[str]:
    """Return the checkpoint files in a folder of another rank inside a rank folder.

    A script that changes into ``device1`` and does not know its rank leaves ``device1/ckpt_0``.
    """
    return [
        str(file)
        for path in list_folder(folder)
        if (match := RANK_FOLDER.fullmatch(path.name)) is not None
        if int(match[2]) != rank and is_folder(path)
        for file in checkpoint_files(path)
    ]


def _is_strategy(path: Path) -> bool:
    """Return whether a file is a strategy, by its content."""
    kind = identify_foreign(str(path))
    return kind is not None and kind.kind == "strategy"


# --------------------------------------------------------------------- folders without rank folders


def _list_flat_files(root: Path, diagnostics: Diagnostics) -> list[RankFile]:
    """Return the checkpoint files in a folder with the ranks that their names have."""
    files = list(checkpoint_files(root))
    saves = find_emergency_saves(root)
    note_emergencies(saves, diagnostics)
    found = [
        RankFile(int(match[1]), path, path.name)
        for path in files
        if (match := RANK_IN_NAME.search(path.name)) is not None
    ]
    if not found:
        _refuse_unfinished(root)
        _refuse_pytorch(root)
        problem = _describe_contents(root, files, saves)
        raise PlanError((problem, *explain_missing_files(diagnostics)))
    return found


def _describe_contents(root: Path, files: Sequence[Path], saves: Iterable[Path]) -> Diagnostic:
    """Return the problem of a folder without files of ranks: what is in it, and what to name."""

    def problem(text: str, hint: str, facts: str = "") -> Diagnostic:
        return Diagnostic("source", text, hint, facts=facts, where=str(root), path=str(root))

    finished = [str(save) for save in saves if find_unfinished_save(save) is None]
    if finished:
        text = "no ranks in it, but an emergency save of fault-tolerant training"
        return problem(text, f"{finished[0]} as SRC", shorten(finished, 3))
    if nested := find_nested_checkpoints(root):
        text = f"not a checkpoint, but a folder of {count(len(nested), 'checkpoint')}"
        return problem(text, f"{nested[0]} as SRC", shorten((path.name for path in nested), 3))
    if RANK_FOLDER.fullmatch(root.absolute().name) is not None:
        hint = f"{os.path.normpath(root / '..')} as SRC"
        return problem("the folder of one rank, not of all ranks", hint)
    if files and all(map(_is_strategy, files)):
        hint = f"the checkpoint as SRC, and -s {shlex.quote(str(root))}"
        facts = shorten((path.name for path in files), 3)
        return problem("strategy files, not a checkpoint", hint, facts)
    if len(files) == 1:
        return problem("no ranks in it, but one file", f"{files[0]} as SRC")
    text = "no rank folders (rank_0, rank_1, ...) and no files named rank_N"
    if suggested := _suggest(root):
        return problem(text, suggested[1], suggested[0])
    inside = [path.name + "/" * is_folder(path) for path in list_folder(root)]
    hint = "the folder of the rank folders as SRC; `ckpttool help source` explains"
    return problem(text, hint, f"it holds {shorten(inside, 3)}" if inside else "it is empty")


def _refuse_unfinished(root: Path) -> None:
    """Raise `UnfinishedError` if a run of ckpttool stopped before it wrote any file."""
    unfinished = find_unfinished_run(root)
    if unfinished is not None:
        raise UnfinishedError([replace(unfinished, code="nothing_complete")])


def _refuse_pytorch(root: Path) -> None:
    """Raise the error of a folder with files of PyTorch."""
    names = [path.name for path in list_folder(root) if is_file(path) and _is_pytorch_file(path)]
    if names:
        raise FOREIGN_KINDS["pytorch"].error(str(root), shorten(names, 3))


def _is_pytorch_file(path: Path) -> bool:
    """Return whether a file is PyTorch's, by its name or content."""
    if _PYTORCH_NAME.fullmatch(path.name):
        return True
    kind = identify_foreign(str(path)) if path.suffix in _PYTORCH_SUFFIXES else None
    return kind is not None and kind.kind == "pytorch"


# ----------------------------------------------------------------------------------------- patterns


def list_by_pattern(root: Path, pattern: str, empty_ranks: EmptyRanks) -> list[RankFile]:
    """Return the files below ``root`` that match a pattern such as ``node{rank}/*``.

    ``empty_ranks`` gets the ranks whose folder cannot be read.
    """
    if "{rank}" not in pattern:
        raise PlanError(
            [
                Diagnostic(
                    "source", f"--pattern {pattern} lacks {{rank}}", "--pattern 'rank_{rank}/*'"
                )
            ]
        )
    found = list(_match_pattern(root, Path(pattern).parts, None, empty_ranks))
    if not found:
        raise_all(filter(None, empty_ranks.values()))
        text = f"no file matches --pattern {shlex.quote(pattern)}"
        facts, hint = _suggest(root) or ("", "")
        raise PlanError([Diagnostic("source", text, hint, facts=facts, where=str(root))])
    return found


def _match_pattern(
    folder: Path, parts: tuple[str, ...], rank: int | None, empty_ranks: EmptyRanks
) -> Iterator[RankFile]:
    """Yield the files below ``folder`` that match the rest of a pattern with one rank."""
    if not parts:
        return
    expression = re.escape(parts[0]).replace(r"\{rank\}", r"(\d+)").replace(r"\*", ".*")
    for path in list_folder(folder):
        match = re.fullmatch(expression, path.name)
        ranks = {int(text) for text in match.groups()} if match else set()
        ranks |= set() if rank is None else {rank}
        if match is None or len(ranks) > 1:
            continue
        found_rank = next(iter(ranks), None)
        is_matched = "*" not in parts[0] or format_of_suffix(path.name) is not None
        if len(parts) > 1 and is_folder(path):
            try:
                yield from tuple(_match_pattern(path, parts[1:], found_rank, empty_ranks))
            except OSError as error:
                if found_rank is None:
                    raise
                empty_ranks[found_rank] = unreadable(str(path), error)
        elif len(parts) == 1 and is_file(path) and found_rank is not None and is_matched:
            name = path.name
            for i in range(match.re.groups, 0, -1):
                name = name[: match.start(i)] + "{rank}" + name[match.end(i) :]
            yield RankFile(found_rank, path, name)


# -------------------------------------------------------------------------------- hints in messages


def _suggest_links(root: Path, folders: Iterable[Path]) -> tuple[str, str]:
    """Return files in nested rank folders, as of several hosts, and a hint; else ("", "")."""
    nested = (path for folder in folders for path in sorted(find_paths(folder, "*/*")))
    found = [
        str(path.relative_to(root))
        for path in nested
        if RANK_FOLDER.fullmatch(path.parent.name) and format_of_suffix(path.name) is not None
    ]
    if not found:
        return "", ""
    facts = f"found {shorten(found, 3)}; no pattern shows their ranks"
    return facts, "a folder with a link rank_N to each of these folders (ln -s)"


def _suggest(root: Path) -> tuple[str, str] | None:
    """Return a file below a folder and a hint, to find or to unpack it; None if there is none."""
    for pattern, first in _suggest_patterns(root):
        return f"found {first}", f"--pattern {shlex.quote(pattern)}"
    for end, tool in _UNPACK.items():
        for pattern in (f"*{end}", f"*/*{end}"):
            if packed := sorted(find_paths(root, pattern)):
                names = (str(path.relative_to(root)) for path in packed)
                return f"found {shorten(names, 3)}", f"{tool} {shlex.quote(str(root))}/{pattern}"
    return None


def _suggest_patterns(root: Path) -> Iterator[tuple[str, str]]:
    """Yield patterns made from the names of the checkpoint files below a folder.

    Each matches one file of every rank, or one of every rank and step.

    Yields
    ------
    pattern, first
        A pattern, that of most files first, and the path of its first file below ``root``.
    """
    groups: dict[tuple[str, str], list[Path]] = defaultdict(list)
    for path in islice(_files_below(root, _MAX_DEPTH), _MAX_FILES):
        inside = path.relative_to(root)
        groups[_DIGITS.sub("#", str(inside.parent)), path.suffix].append(inside)
    for files in sorted(groups.values(), key=len, reverse=True):
        pattern = next((one for one in _possible_patterns(files) if _finds_ranks(root, one)), None)
        if pattern is not None:
            yield pattern, str(files[0])


def _files_below(folder: Path, depth: int) -> Iterator[Path]:
    """Yield the checkpoint files at most ``depth`` folders below a folder."""
    try:
        inside = list_folder(folder)
    except OSError:
        return  # a suggestion needs no folder that cannot be read
    for path in inside:
        if is_folder(path):
            if depth and not EMERGENCY.fullmatch(path.name):
                yield from _files_below(path, depth - 1)
        elif format_of_suffix(path.name) is not None and is_file(path):
            yield path


def _possible_patterns(files: Sequence[Path]) -> Iterator[str]:
    """Yield possible patterns of files whose folders differ only in numbers."""
    suffix = files[0].suffix
    folders = [str(path.parent) for path in files]
    for folder in _with_rank_placeholders(folders):
        yield f"{folder}/*{suffix}"
    heads: dict[str, list[str]] = defaultdict(list)
    for path in files:
        head = STEP_IN_NAME.sub("-*", str(path.with_suffix("")))
        heads[_DIGITS.sub("#", head)].append(head)
    for head in _with_rank_placeholders(max(heads.values(), key=len)):
        yield head + suffix


def _with_rank_placeholders(names: Sequence[str]) -> Iterator[str]:
    """Yield one pattern of names that differ only in numbers, for each choice of the rank.

    ``{rank}`` replaces all numbers that vary like the rank; other numbers that vary become ``*``.
    """
    parts_of_names = [_DIGITS.split(name) for name in names]
    columns = {
        i: tuple(int(parts[i]) for parts in parts_of_names)
        for i in range(1, len(parts_of_names[0]), 2)
    }
    varying = {i: numbers for i, numbers in columns.items() if len(set(numbers)) > 1}
    if columns and not varying:
        varying = {max(columns): columns[max(columns)]}
    for ranks in sorted(dict.fromkeys(varying.values()), key=lambda one: -len(set(one))):
        yield "".join(
            "{rank}" if columns.get(i) == ranks else "*" if i in varying else part
            for i, part in enumerate(parts_of_names[0])
        )


def _finds_ranks(root: Path, pattern: str) -> bool:
    """Return whether a pattern finds the files of ranks, one for each rank and step."""
    try:
        found = list(_match_pattern(root, Path(pattern).parts, None, {}))
        choose_step(str(root), drop_backups(found, Diagnostics()), None, Diagnostics())
    except StepError:
        return True  # the pattern is right; no step is on every rank
    except (PlanError, OSError):
        return False
    return bool(found)


def find_manifests(catalog: Catalog) -> list[Path]:
    """Return the manifests of folders and of single files that may list the scanned files."""
    paths = [Path(path) for path in list_paths(catalog)]
    of_files = (path.with_name(f"{path.name}.{MANIFEST}") for path in paths)
    candidates = dict.fromkeys((*_folder_manifests(catalog), *of_files))
    return [path for path in candidates if is_file(path)]


def _folder_manifests(catalog: Catalog) -> Iterator[Path]:
    """Yield the manifest paths of the scanned folder, and of the folders above the files."""
    if is_folder(catalog.root):
        yield Path(catalog.root, MANIFEST)
    for folder in dict.fromkeys(Path(path).parent for path in list_paths(catalog)):
        is_of_rank = RANK_FOLDER.fullmatch(folder.absolute().name)
        if is_single_file(catalog) or not is_of_rank:
            yield folder / MANIFEST
        if is_of_rank:
            yield (folder if folder.name else folder.absolute()).parent / MANIFEST


def is_single_file(catalog: Catalog) -> bool:
    """Return whether the catalog is that of one file, not of a folder or an index."""
    is_merged = isinstance(catalog, MergedCatalog) and not catalog.indexes
    return is_merged and not is_folder(catalog.root)


def list_paths(catalog: Catalog) -> list[str]:
    """Return the paths of all scanned files, also of damaged ones."""
    paths = [path for file in catalog.files.values() for path in file.paths]
    return paths + [error.path for error in catalog.damaged.values()]
