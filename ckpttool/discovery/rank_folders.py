"""The files of all ranks in a folder, of every step.

A rank folder is called ``rank_3``, ``rank_03``, ``rank3``, ``node3``, ``ckpt_3``, ``rank_3_ckpt``
or ``device3``; its files may be in one folder in it, as in ``device3/ckpt_3`` and ``rank_3/ckpt``.
Without rank folders, files with ``rank_3`` in their names count, as MindFormers writes them.

Rank folders and such files may also be in folders of hosts or processes, ``10.0.0.2/rank_8`` and
``train_parallel8/ckpt_8``: folders with different ranks, none twice, are one checkpoint.  Failing
all these, folders or files count if their names differ in one number, from 0 without a gap:
``card0`` and ``card1``.  They may be in folders of hosts, too: ``host0/card0`` and ``host1/card1``.

Where each host has ``device0``, a rank table says which ranks these are.  Without any rank, files
whose names differ in the step are the steps of one card: all of rank 0, which has the whole model.

A pattern such as ``node{rank}/CKP_1-4_32.ckpt`` overrides both.  ``{rank}`` stands for the number
of the rank, the same wherever it occurs; ``*`` for anything.

Source
------
MindSpore 2.10 ``parallel/checkpoint_transform.py``; ``run_distribute_train.sh`` of MindSpore's
models.
"""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice, pairwise
from pathlib import Path
from shlex import quote
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from ckpttool.discovery.file_names import (
    HYPER_METADATA,
    ITERATION,
    RANK_FOLDER,
    RANK_IN_NAME,
    RankFile,
    Step,
    as_save,
    base_of,
    find_numbered,
    form_around,
    numbers_in,
    ranks_in_names,
    run_of,
    step_of,
)
from ckpttool.discovery.ignored import (
    describe_ignored,
    find_emergency_saves,
    find_unfinished_save,
    is_emergency,
    note_beside_ranks,
    note_foreign,
    refuse_pytorch,
    refuse_unfinished_run,
)
from ckpttool.formats import format_of_suffix
from ckpttool.formats.foreign import identify_foreign, list_rank_tables
from ckpttool.formats.local import (
    exists,
    find_paths,
    is_file,
    is_folder,
    list_folder,
    list_readable,
    read_file,
    unreadable,
)
from ckpttool.formats.weight_index import SINGLE_FILE, is_index_name
from ckpttool.model.catalog import Catalog
from ckpttool.model.manifest import MANIFEST
from ckpttool.problems import Diagnostic, Diagnostics, FormatError, PlanError, raise_all
from ckpttool.strategy_files.folders import is_strategy, select_strategies
from ckpttool.wording import count, format_ranks, shorten

_SNAPSHOTS = "snapshots"  # the folder of revisions in a cache of Hugging Face
_MAX_DEPTH = 5  # of the folders whose files a message lists
_MAX_FILES = 10_000  # that a message considers


class FoundFiles(NamedTuple):
    """The files of ranks, of every step, and the ranks whose folder has none.

    ``empty`` has the error of a folder that is unreadable, None for one without a file.
    ``are_whole`` says that names have steps and no ranks: each file holds the whole model.
    """

    files: list[RankFile]
    empty: Mapping[int, FormatError | None]
    are_whole: bool = False


def list_rank_files(root: Path, diagnostics: Diagnostics) -> FoundFiles:
    """Return the checkpoint files in the rank folders of ``root``, or in ``root`` itself."""
    of_ranks, named = _find_ranks(root)
    if not of_ranks:
        note_foreign(root, (), diagnostics)
        return _list_flat_files(root, named, diagnostics)
    folders = {folder.rank: folder.path for folder in of_ranks}
    files: list[RankFile] = []
    homes: dict[int, Path] = {}
    empty: dict[int, FormatError | None] = {}
    for rank, path in sorted(folders.items()):
        try:
            homes[rank], of_rank = _find_files(path, rank)
        except OSError as error:
            empty[rank] = unreadable(str(path), error)
            continue
        files += [RankFile(rank, file, file.name) for file in of_rank]
        if not of_rank:
            empty[rank] = None
    own, notes, misplaced = _by_names(
        root, _without_strategies(files) or files, {**folders, **homes}
    )
    note_foreign(root, homes.values(), diagnostics)
    if not files:
        refuse_unfinished_run(root)
        raise_all(filter(None, empty.values()))
    diagnostics.add(*notes)
    problems = [*_folder_problems(root, of_ranks, homes, files), *misplaced]
    if problems:
        raise PlanError((*problems, *explain_missing_files(diagnostics)))
    known = {path.relative_to(root).parts[0] for path in folders.values()}
    if by_table := [f for f in of_ranks if _number_of(f.path, f.rank) != f.rank]:
        known.update(path.name for path in list_rank_tables(root))
        name, rank = by_table[0].path.relative_to(root), by_table[0].rank
        diagnostics.add(Diagnostic("doubt", f"ranks by the rank table: {name} is rank {rank}"))
    beside = (path.name for path in list_folder(root) if path.name not in known and exists(path))
    note_beside_ranks(root, beside, diagnostics)
    return FoundFiles(own, empty)


def _folder_problems(
    root: Path,
    of_ranks: Sequence[_RankFolder],
    homes: Mapping[int, Path],
    files: Sequence[RankFile],
) -> Iterator[Diagnostic]:
    """Yield why the files of ranks cannot be distinguished from others.

    ``homes`` has the folder of each rank, with its files or without any.
    """
    folders: dict[int, list[Path]] = defaultdict(list)
    kinds: dict[str, Path] = {}
    for word, rank, path in of_ranks:
        folders[rank].append(path)
        kinds.setdefault(word, path)
    twice = {rank: paths for rank, paths in sorted(folders.items()) if len(paths) > 1}
    if len(kinds) > 1:
        hint = "--pattern with the form of one of them"
        yield _problem(root, "rank folders of several kinds", hint, kinds.values())
    elif twice:
        ranks, hint = tuple(twice), "move one of the two folders away"
        pairs = (" and ".join(str(p.relative_to(root)) for p in two[:2]) for two in twice.values())
        message = f"two folders for {format_ranks(ranks)}"
        yield _problem(root, message, hint, shorten(pairs, 3), ranks)
    times = Counter(file.rank for file in files)
    indexed = [
        home
        for rank, home in homes.items()
        if times[rank] > 1 and any(is_index_name(path.name) for path in list_folder(home))
    ]
    if indexed:
        output = quote(f"ONE/{indexed[0].name}/net.safetensors")
        hint = f"ckpttool merge {quote(str(indexed[0]))} --replicated -o {output}"
        message = "a rank has several files and an index; expected one file for each rank"
        yield _problem(root, message, f"{hint}, for each", shorten(map(str, indexed), 3))
    places: dict[str, Path] = {}
    of_other_ranks: list[Path] = []
    for rank, home in homes.items():
        folder, inside = folders[rank][-1], [home]
        if not times[rank]:
            within = list_folder(home)
            inside = [path for path, _ in _other_homes(within, rank)]
            # A script that changes into device1 and does not know its rank leaves device1/ckpt_0.
            of_others = [path for _, number, path in named_folders(within) if number != rank]
            of_other_ranks += [file for path in of_others for file in checkpoint_files(path)]
        for path in inside:
            if path != folder:
                place = _place(str(path.relative_to(folder)), rank, _number_of(folder, rank))
                places.setdefault(place, path)
    if len(places) > 1:
        hint = "--pattern with the folder that is meant"
        message = "the files of ranks lie in folders of different names, perhaps of different steps"
        yield _problem(root, message, hint, places.values())
    if not files:
        last = [paths[-1] for paths in folders.values()]
        facts = _names(root, (folders[rank][-1] for rank in homes))
        hint = "copy the files into these folders; `ckpttool help source` explains"
        if nested := _find_nested_files(last):
            facts = f"found {_names(root, nested)}"
            hint = "a folder with a link rank_N to each of these folders (ln -s)"
        if below := _find_checkpoints_below(root):
            hint = f"{_as_src(below[0])}, or {hint}"
        message = f"no checkpoint file in the folders of {format_ranks(tuple(homes))}"
        yield _problem(root, message, hint, facts, tuple(homes))
    elif of_other_ranks:
        hint = "--pattern with {rank} for the right one; `ckpttool help source` explains"
        message = "paths name two ranks, and nothing shows which one is right"
        yield _problem(root, message, hint, of_other_ranks)


def _without_strategies(files: Sequence[RankFile]) -> list[RankFile]:
    strategies = {*select_strategies([file.path for file in files])}
    return [file for file in files if file.path not in strategies]


def explain_missing_files(diagnostics: Diagnostics) -> Iterator[Diagnostic]:
    """Yield the notes that may explain missing files, for the error about these."""
    yield from (note for note in diagnostics if note.code in ("leftover", "absent"))


def checkpoint_files(folder: Path) -> Iterator[Path]:
    """Yield the files in a folder that have a checkpoint's suffix, sorted."""
    yield from filter(is_checkpoint_file, list_folder(folder))


def is_checkpoint_file(path: Path) -> bool:
    """Return whether a file has a checkpoint's suffix; not so ``.tmp`` and ``-graph.meta``.

    MindSpore adds no suffix to a name that ends in ``ckpt``, such as ``best_ckpt``.
    """
    if format_of_suffix(path.name) is not None:
        return is_file(path)
    lacks_dot = path.suffix == "" and path.name.endswith("ckpt") and is_file(path)
    return lacks_dot and identify_foreign(str(path)) is None


# ------------------------------------------------------------------------------------- rank folders


def has_rank_files(folder: Path) -> bool:
    """Return whether a folder has rank folders, or files with their rank in the name."""
    return bool(
        named_folders(list_folder(folder)) or _by_rank([*checkpoint_files(folder)], has_word=True)
    )


def note_rank_folders(root: Path, diagnostics: Diagnostics) -> None:
    """Note rank folders in a self-described checkpoint: they are of another checkpoint."""
    if names := [folder.path.name for folder in named_folders(list_folder(root))]:
        pattern = re.sub(r"\d+", "{rank}", names[0]) + "/*"
        hint, what = f"--pattern {quote(pattern)}", "of ranks, of another checkpoint"
        diagnostics.add(*describe_ignored(root, names, what, noun="folder", hint=hint))


def find_nested_checkpoints(root: Path) -> list[Path]:
    """Return the folders in a folder that are checkpoints, except for emergency saves."""
    folders = {path.parent for path in find_paths(root, "*/*") if _marks_checkpoint(path)}
    return sorted(path for path in folders if not is_emergency(path))


def _marks_checkpoint(path: Path) -> bool:
    if is_index_name(path.name) or path.name == ".metadata" or HYPER_METADATA.fullmatch(path.name):
        return True
    if ITERATION.fullmatch(path.name) and is_folder(path):
        return any(checkpoint_files(path))
    # logs have rank folders, too
    return any(_find_files(path, rank)[1] for _, rank, _ in named_folders([path]))


class _RankFolder(NamedTuple):
    """A folder of one rank; ``word`` is that of its name, "" if it has another one."""

    word: str
    rank: int
    path: Path


class Shape(Struct, frozen=True):
    """A way in which folders or files have the numbers of ranks in their names.

    They lie ``depth`` folders below the checkpoint: 2 in the folders of hosts or processes.  The
    number is in the names of files (``of_file``) or in that of their folder.  A word stands before
    it (``has_word``), as in ``rank_3``, or else the names differ in it.
    """

    depth: int
    of_file: bool
    has_word: bool


SHAPES = (  # in the order in which they are tried
    Shape(1, of_file=False, has_word=True),  # rank_3/net.ckpt
    Shape(1, of_file=True, has_word=True),  # net_rank_3.ckpt
    Shape(2, of_file=False, has_word=True),  # 10.0.0.2/rank_8/net.ckpt
    Shape(3, of_file=False, has_word=True),  # host0/output/rank_3/net.ckpt
    Shape(4, of_file=False, has_word=True),  # host0/output/checkpoint/rank_3/net.ckpt
    Shape(1, of_file=False, has_word=False),  # card3/net.ckpt
    Shape(2, of_file=False, has_word=False),  # host0/card3/net.ckpt
    Shape(3, of_file=False, has_word=False),  # host0/output/card3/net.ckpt
    Shape(2, of_file=True, has_word=True),  # host0/net_rank_3.ckpt
    Shape(2, of_file=True, has_word=False),  # host0/net_3.ckpt
    Shape(1, of_file=True, has_word=False),  # net_3.ckpt
)


def _find_ranks(root: Path) -> tuple[list[_RankFolder], list[RankFile]]:
    levels = [list_folder(root)]
    for shape in SHAPES:
        while len(levels) < shape.depth:
            levels.append(_below(levels[-1]))
        is_weak = shape.of_file and not (shape.depth == 1 and shape.has_word)
        if is_weak and find_nested_checkpoints(root):
            break  # folders that are checkpoints count before it
        paths = levels[shape.depth - 1]
        if shape.of_file and (files := _files_of(shape, paths)):
            return [], files
        if not shape.of_file and (folders := _folders_of(shape, paths)):
            return folders, []
    return [], []


def _below(paths: Iterable[Path]) -> list[Path]:
    folders = (path for path in paths if not is_emergency(path) and is_folder(path))
    # other folders beside those of hosts need not be readable
    return [path for folder in folders for path in list_readable(folder)]


def _files_of(shape: Shape, paths: Iterable[Path]) -> list[RankFile]:
    files = [*filter(is_checkpoint_file, paths)]
    of_ranks = _without_strategies(_by_rank(files, has_word=shape.has_word))
    homes = {(file.rank, file.path.parent) for file in of_ranks}
    return of_ranks if shape.depth == 1 or len(homes) == len({rank for rank, _ in homes}) else []


def _folders_of(shape: Shape, paths: Sequence[Path]) -> list[_RankFolder]:
    """Return the folders of ranks, in those of hosts if they are of one checkpoint.

    There are several hosts, and no rank has two folders, as in ``train_parallel1/ckpt_1`` and
    ``10.0.0.2/rank_8``.  If every host has a rank 0, each is a checkpoint, unless a rank table says
    which ranks their devices are.
    """
    folders = named_folders(paths) if shape.has_word else _find_numbered_folders(paths)
    if shape.depth == 1:
        return [] if _are_nodes(folders) else folders
    hosts: dict[Path, list[_RankFolder]] = defaultdict(list)
    for folder in folders:
        hosts[folder.path.parent].append(folder)
    of_hosts = [
        of
        for of in hosts.values()
        if not shape.has_word or any(_find_files(path, rank)[1] for _, rank, path in of)
    ]
    if len(of_hosts) < 2:
        return []
    folders = [folder for of in of_hosts for folder in of]
    is_each_whole = all(any(folder.rank == 0 for folder in of) for of in of_hosts)
    is_twice = len({folder.rank for folder in folders}) < len(folders)
    return _by_tables(folders) if is_each_whole and is_twice else folders


def _are_nodes(folders: Sequence[_RankFolder]) -> bool:
    """Return whether folders of nodes hold the folders of ranks; else they are those of ranks."""
    if {folder.word for folder in folders} != {"node"}:
        return False
    inside = [named_folders(list_readable(folder.path)) for folder in folders]
    inner = [folder for of_node in inside for folder in of_node]
    is_each_once = len({folder.rank for folder in inner}) == len(inner) or any(_by_tables(inner))
    is_any_file = any(any(checkpoint_files(folder.path)) for folder in folders)
    are_several = max(map(len, inside)) > 1 and len({folder.word for folder in inner}) == 1
    return are_several and is_each_once and not is_any_file


def named_folders(paths: Iterable[Path]) -> list[_RankFolder]:
    """Return the folders whose own name is that of a rank."""
    return [
        _RankFolder(match[1], int(match[2]), path)
        for path in paths
        if (match := RANK_FOLDER.fullmatch(path.name)) and is_folder(path)
    ]


def _by_tables(folders: Sequence[_RankFolder]) -> list[_RankFolder]:
    from ckpttool.discovery.rank_tables import ranks_of_devices  # few folders have such hosts

    hosts: dict[Path, list[int]] = defaultdict(list)
    for _, device, path in folders:
        hosts[path.parent].append(device)
    are_devices = {folder.word for folder in folders} == {"device"} and len(hosts) > 1
    ranks = ranks_of_devices(hosts) if are_devices else {}
    return [
        folder._replace(rank=ranks[folder.path.parent][folder.rank]) for folder in folders if ranks
    ]


def _find_numbered_folders(inside: Iterable[Path]) -> list[_RankFolder]:
    """Return the only folders with files whose names differ in a number that may be the rank's.

    Where the names of the files have the word, they must have the same number.
    """
    paths = [path for path in inside if is_folder(path) and not is_emergency(path)]
    by_name, times = {path.name: path for path in paths}, Counter(path.name for path in paths)
    groups = []
    for names in find_numbered(times, are_files=False):
        if any(times[name] > 1 for name in names.values()):
            continue  # a number is there twice: of two runs, or counted on every host
        group = [_RankFolder("", rank, by_name[name]) for rank, name in sorted(names.items())]
        files = [(rank, path) for _, rank, top in group for path in _find_files(top, rank)[1]]
        is_agreed = all(
            int(match[1]) == rank
            for rank, path in files
            if (match := RANK_IN_NAME.search(path.name)) is not None
        )
        if is_agreed and not _are_hosts(files) and not all(is_strategy(path) for _, path in files):
            groups.append(group)
    return groups[0] if len(groups) == 1 else []


def _are_hosts(files: Sequence[tuple[int, Path]]) -> bool:
    """Return whether files of numbered folders show that these are hosts, not ranks.

    A folder has files of one step that differ in the number of the rank.  Without a step, the
    number may count something else if other folders have the same names.
    """
    names = Counter(path.name for _, path in files)
    ranks = ranks_in_names(names)
    saves: dict[tuple[int, Step | None], set[int]] = defaultdict(set)
    for number, path in files:
        step = step_of(path.name)
        if path.name in ranks and (step is not None or names[path.name] == 1):
            saves[number, step].add(ranks[path.name])
    return any(len(of_save) > 1 for of_save in saves.values())


def _find_files(folder: Path, rank: int, depth: int = 2) -> tuple[Path, list[Path]]:
    """Return the checkpoint files of a rank, and their folder.

    The folder is the rank folder, or the only folder in it that has files: the only rank folder, or
    else the only one of any name, as in ``rank_0/ckpt``.  A rank folder must be of the same rank,
    and the outer one may have only strategy files.  A script that changes into ``device0`` to train
    leaves ``device0/ckpt_0``, and perhaps its strategy file in ``device0``.  With both
    ``node0/device0`` and ``node0/device1`` the numbers of the folders are not ranks.
    """
    paths = list_folder(folder)
    files = [*filter(is_checkpoint_file, paths)]
    inside = [p for p in paths if depth and format_of_suffix(p.name) is None and is_folder(p)]
    if not inside or not all(map(is_strategy, files)):
        return folder, files
    named = (
        (number, _find_files(path, number, depth - 1)) for _, number, path in named_folders(inside)
    )
    nested = [(number, home) for number, home in named if home[1]]
    if not nested:
        nested = [(rank, home) for home in _other_homes(inside, rank, depth - 1)]
    is_of_rank = [number for number, _ in nested] in ([rank], [_number_of(folder, rank)])
    return nested[0][1] if is_of_rank else (folder, files)


def _other_homes(
    inside: Iterable[Path], rank: int, depth: int = 1
) -> Iterator[tuple[Path, list[Path]]]:
    for path in inside:
        if RANK_FOLDER.fullmatch(path.name) or is_emergency(path):
            continue
        home, files = _find_files(path, rank, depth) if is_folder(path) else (path, [])
        if not all(map(is_strategy, files)):
            yield home, files


def _number_of(folder: Path, rank: int) -> int:
    match = RANK_FOLDER.fullmatch(folder.name)
    return rank if match is None else int(match[2])  # perhaps that of a device


def rank_in_path(path: Path) -> int | None:
    """Return the rank that the name of a file says, or else that of a folder; None for none."""
    if match := RANK_IN_NAME.search(path.name):
        return int(match[1])
    folders = (RANK_FOLDER.fullmatch(name) for name in reversed(path.parts[:-1]))
    return next((int(match[2]) for match in folders if match and match[1] == "rank"), None)


def _place(inside: str, *numbers: int) -> str:
    return "".join(
        "{rank}" if part.isdecimal() and int(part) in numbers else part
        for part in re.split(r"(\d+)", inside)
    )


def _by_names(
    root: Path, files: Sequence[RankFile], folders: Mapping[int, Path]
) -> tuple[list[RankFile], list[Diagnostic], list[Diagnostic]]:
    """Return the files without copies of other ranks' files, the notes on these, the problems.

    Numbers in names are ranks if most of them are the rank of their folder.  They also are if a
    folder has files of several ranks of one save, or if those of a save are reordered ranks.
    Otherwise they may be numbers of devices.  A file with another rank in its name is a copy on two
    conditions: its folder has the file of its own rank, and the folder of the other rank has a file
    of this name.
    """
    named = [(f, int(m[1]), m) for f in files if (m := RANK_IN_NAME.search(f.path.name))]
    named = named or _exchanged_numbers(files)
    saves: dict[tuple[str, str], set[tuple[int, int]]] = defaultdict(set)
    for file, rank, match in named:
        saves[form_around(file.path.name, match)].add((file.rank, rank))
    misplaced = [(file, rank, match) for file, rank, match in named if rank != file.rank]
    is_exchanged = any(_are_exchanged(pairs, folders) for pairs in saves.values())
    is_shared = any(len({rank for rank, _ in pairs}) < len(pairs) for pairs in saves.values())
    if not (is_exchanged or is_shared or len(misplaced) < len(named) - len(misplaced)):
        return list(files), [], []
    names = {(file.rank, file.path.name) for file in files}
    copies = {
        file.path: None
        for file, rank, match in misplaced
        if (file.rank, file.rank) in saves[form_around(file.path.name, match)]
        and (rank, file.path.name) in names
    }
    notes, problems = [], []
    if copies:
        message = f"{count(len(copies), 'file')} of other ranks than their folders: ignored"
        notes.append(Diagnostic("skipped", message, facts=_names(root, copies), where=str(root)))
    rest = [item for item in misplaced if item[0].path not in copies]
    if rest:
        file, rank, match = rest[0]
        hint = f"move {'them' if rest[1:] else 'it'} away; `ckpttool help source` explains"
        if is_exchanged:
            by_name, by_folder = _patterns_of_both(root, file, match)
            hint = f"--pattern {by_name} if the names are right, or --pattern {by_folder}"
        elif len(folders) == 1:
            hint = _as_src(file.path.parent)
        elif rank in folders and not exists(folders[rank] / file.path.name) and not rest[1:]:
            hint = f"mv {quote(str(file.path))} {quote(str(folders[rank]))}/"
        message = f"{count(len(rest), 'file')} in the folder of another rank than the name says"
        problems.append(_problem(root, message, hint, (misfit.path for misfit, _, _ in rest)))
    return [file for file in files if file.path not in copies], notes, problems


def _exchanged_numbers(files: Iterable[RankFile]) -> list[tuple[RankFile, int, re.Match[str]]]:
    """Return the files of one save whose names have a number that is another rank's, or []."""
    ranks = {file.rank for file in files}
    forms: dict[tuple[str, str], list[tuple[RankFile, int, re.Match[str]]]] = defaultdict(list)
    for file in files:
        for form, match in numbers_in(file.path.name):
            forms[form].append((file, int(match[0]), match))
    for named in forms.values():
        pairs = {(file.rank, number) for file, number, _ in named}
        if len(named) == len(ranks) and _are_exchanged(pairs, ranks):
            return named
    return []


def _are_exchanged(pairs: Collection[tuple[int, int]], ranks: Collection[int]) -> bool:
    numbers = {number for _, number in pairs}
    is_each_once = len({rank for rank, _ in pairs}) == len(numbers) == len(pairs) > 1
    return is_each_once and numbers <= {*ranks} and any(rank != number for rank, number in pairs)


def _patterns_of_both(root: Path, file: RankFile, number: re.Match[str]) -> tuple[str, str]:
    folders = file.path.relative_to(root).parts[:-1]
    places = [_place(folder, file.rank) for folder in folders]
    own = max(i for i, place in enumerate(places) if place != folders[i])
    by_name = ["*" for _ in folders] + [
        f"{number.string[: number.start(number.re.groups)]}{{rank}}*"
    ]
    by_folder = [place if i == own else "*" for i, place in enumerate(places)] + ["*"]
    suffix = file.path.suffix
    return quote("/".join(by_name) + suffix), quote("/".join(by_folder) + suffix)


# --------------------------------------------------------------------- folders without rank folders


def _list_flat_files(root: Path, named: list[RankFile], diagnostics: Diagnostics) -> FoundFiles:
    """Return the files that name their ranks, or else those of the steps of one card."""
    if named:
        return FoundFiles(named, {})
    files = list(checkpoint_files(root))
    if steps := _steps_of_one_rank(root, files):
        return FoundFiles(steps, {}, are_whole=True)
    refuse_unfinished_run(root)
    refuse_pytorch(root)
    problem = replace(next(_what_lies_there(root, files)), path=str(root))
    raise PlanError((problem, *explain_missing_files(diagnostics)))


def _steps_of_one_rank(root: Path, paths: Sequence[Path]) -> list[RankFile]:
    """Return the files that ``ModelCheckpoint`` writes on one card: names differ in the step.

    Names of a later run in the folder have a counter, too.  Scripts that keep the best ones write
    ``PREFIX_EPOCH_STEP``.
    """
    files = _without_strategies([RankFile(0, path, as_save(path.name)) for path in paths])
    runs = {run_of(file.name) for file in files}
    are_steps = all(step_of(file.name) is not None for file in files)
    are_of_one_name = len({base_of(file.name) for file in files} | runs) <= len(runs)
    is_of_rank = RANK_FOLDER.fullmatch(root.absolute().name) is not None
    is_whole = are_steps and are_of_one_name and not is_of_rank and _may_be_best(files)
    return files if is_whole and not find_nested_checkpoints(root) else []


def _may_be_best(files: Sequence[RankFile]) -> bool:
    """Return whether names that lack MindSpore's sign before the step may have steps, not ranks.

    Their numbers rise together, and are not 1, 2, 3, ... and a constant, as of ranks.
    """
    steps = sorted(filter(None, (step_of(f.name) for f in files if f.name != f.path.name)))
    is_rising = all(a.epoch < b.epoch and a.step <= b.step for a, b in pairwise(steps))
    are_counted = {step[:2] for step in steps} == {
        (n + 1, steps[0].step) for n in range(len(steps))
    }
    return not steps or (is_rising and not are_counted)


def _by_rank(files: Sequence[Path], *, has_word: bool) -> list[RankFile]:
    """Return the files whose names have a rank, with the word before it or without any."""
    matches = {path.name: RANK_IN_NAME.search(path.name) for path in files}
    ranks: Mapping[str, int] = {name: int(match[1]) for name, match in matches.items() if match}
    if not has_word:
        ranks = ranks_in_names(path.name for path in files if path.name not in ranks)
    return [RankFile(ranks[p.name], p, p.name) for p in files if p.name in ranks]


def _repeated_in_hosts(root: Path) -> list[Path]:
    """Return the files of a name in several folders, if a folder has files of several ranks."""
    ranks: dict[Path, set[int]] = defaultdict(set)
    by_name: dict[str, list[Path]] = defaultdict(list)
    files = [*filter(is_checkpoint_file, _below(list_folder(root)))]
    of_ranks = _without_strategies(_by_rank(files, has_word=True))
    for file in of_ranks or _by_rank(files, has_word=False):
        if RANK_IN_NAME.search(file.name) or step_of(file.name) is not None:
            ranks[file.path.parent].add(file.rank)
            by_name[file.name].append(file.path)
    is_of_hosts = any(len(numbers) > 1 for numbers in ranks.values())
    return next((p for p in by_name.values() if len(p) > 1), []) if is_of_hosts else []


def _what_lies_there(root: Path, files: Sequence[Path]) -> Iterator[Diagnostic]:
    """Yield why a folder lacks files of ranks, the best reason first: what it has instead."""
    saves = [save for save in find_emergency_saves(root) if find_unfinished_save(save) is None]
    if saves:
        message = "no ranks in it, but an emergency save of fault-tolerant training"
        yield _problem(root, message, f"{saves[0]} as SRC", shorten(map(str, saves), 3))
    if nested := find_nested_checkpoints(root):
        message = f"not a checkpoint, but a folder of {count(len(nested), 'checkpoint')}"
        yield _problem(root, message, _as_src(nested[0]), nested)
    if RANK_FOLDER.fullmatch(root.absolute().name) is not None:
        hint = _as_src(os.path.normpath(root / ".."))
        yield _problem(root, "the folder of one rank, not of all ranks", hint)
    if files and all(map(is_strategy, files)):
        hint = f"the checkpoint as SRC, and -s {quote(str(root))}"
        yield _problem(root, "strategy files, not a checkpoint", hint, files)
    if models := _find_merged(root):
        content = f"of {len(models)} merged checkpoints" if models[1:] else "that holds one"
        message = f"not a checkpoint, but a folder {content}"
        yield _problem(root, message, _as_src(models[0]), models)
    if repeated := _repeated_in_hosts(root):
        what = "copies, or numbers of devices"
        message = f"files of one rank by their names in several folders: {what}"
        hint = "move copies away, or link each file to a name with its rank (net_rank_0.ckpt)"
        yield _problem(root, message, hint, repeated)
    if below := _find_checkpoints_below(root):
        message = f"not a checkpoint, but a folder of {count(len(below), 'checkpoint')}"
        yield _problem(root, message, _as_src(below[0]), below)
    candidates = files or [*islice(_files_below(root, _MAX_DEPTH), 2)]
    candidates = [path for path in candidates if not is_strategy(path)]
    if len(candidates) == 1:
        yield _problem(root, "a folder that holds one file", _as_src(candidates[0]))
    if files and len({path.name.partition(".")[0] for path in files}) == 1:
        message, plain = "variants of one model", min(files, key=lambda path: len(path.name))
        yield _problem(root, message, f"{_as_src(plain)}, or another of them", files)
    if candidates:
        message = "several files, and their names do not say how they belong together"
        newest = max(candidates, key=lambda path: step_of(as_save(path.name)) or ())
        hint = f"{_as_src(newest)}, or --pattern; `ckpttool help source` explains"
        yield _problem(root, message, hint, _list_files_below(root))
    inside = shorten((path.name + "/" * is_folder(path) for path in list_folder(root)), 3)
    hint = "the folder of the files as SRC; `ckpttool help source` explains"
    facts = f"it holds {inside}" if inside else "it is empty"
    yield _problem(root, "no checkpoint file in it", hint, facts)


def _find_checkpoints_below(root: Path) -> list[Path]:
    files = islice(_files_below(root, _MAX_DEPTH), _MAX_FILES)
    folders = {home for path in files for home in path.parents if home.is_relative_to(root)}
    checkpoints = set()
    for folder in folders - {root}:
        inside = list_folder(folder)
        if any(map(_marks_checkpoint, inside)) or _find_numbered_folders(inside):
            checkpoints.add(folder)
    return sorted(folder for folder in checkpoints if checkpoints.isdisjoint(folder.parents))


def _find_merged(root: Path) -> list[Path]:
    """Return the folders below a folder that hold a merged checkpoint.

    Such a folder has an index or a ``model.safetensors``, or is a revision in a cache of Hugging
    Face: ``snapshots/REVISION``.  The revision that ``refs/main`` names is the first.
    """
    files = list(islice(_files_below(root, _MAX_DEPTH, is_any=True), _MAX_FILES))
    weights = [path for path in files if format_of_suffix(path.name) is not None]
    indexed = [p for p in files if p.name == SINGLE_FILE or is_index_name(p.name)]
    revisions = [path for path in weights if path.parent.parent.name == _SNAPSHOTS]
    folders = {path.parent for path in (*indexed, *revisions)} - {root}
    if not folders.issuperset(path.parent for path in weights):
        return []
    return sorted(folders, key=lambda folder: (not _is_main_revision(folder), folder))


def _is_main_revision(folder: Path) -> bool:
    main = folder.parent.parent / "refs" / "main"
    is_snapshot = folder.parent.name == _SNAPSHOTS and is_file(main)
    return is_snapshot and read_file(main).strip() == os.fsencode(folder.name)


# ----------------------------------------------------------------------------------------- patterns


def list_by_pattern(root: Path, pattern: str) -> FoundFiles:
    """Return the files below ``root`` that match a pattern such as ``node{rank}/*``."""
    if "{rank}" not in pattern:
        lack = f"the pattern {pattern} lacks {{rank}}"
        raise PlanError([Diagnostic("source", lack, hint="--pattern 'rank_{rank}/*'")])
    matches = list(_match_pattern(root, Path(pattern).parts, None))
    files = [match for match in matches if isinstance(match, RankFile)]
    named = [f for f in files if "{rank}" in f.name and step_of(f.path.name) is not None]
    in_step = [file for file in named if file.name.startswith(run_of(file.path.name))]
    if in_step and not any(file.rank == 0 for file in files):
        message = f"the pattern {pattern} makes ranks of the steps in names"
        paths = (file.path for file in in_step)
        raise PlanError([_problem(root, message, "the same without --pattern", paths)])
    unreadable_ranks = dict(match for match in matches if not isinstance(match, RankFile))
    if not files:
        raise_all(unreadable_ranks.values())
        message = f"no file matches the pattern {quote(pattern)}"
        raise PlanError([_problem(root, message, "", _list_files_below(root))])
    return FoundFiles(files, unreadable_ranks)


def _match_pattern(
    folder: Path, parts: tuple[str, ...], rank: int | None
) -> Iterator[RankFile | tuple[int, FormatError]]:
    """Yield the files that match the rest of a pattern, or the error of a rank's folder."""
    if not parts:
        return
    expression = re.escape(parts[0]).replace(r"\{rank\}", r"(\d+)").replace(r"\*", ".*")
    for path in list_folder(folder):
        match = re.fullmatch(expression, path.name)
        ranks = {*map(int, match.groups())} if match else set()
        ranks |= set() if rank is None else {rank}
        if match is None or len(ranks) > 1:
            continue
        rank_here = next(iter(ranks), None)
        is_matched = "*" not in parts[0] or format_of_suffix(path.name) is not None
        if len(parts) > 1 and is_folder(path):
            try:
                yield from tuple(_match_pattern(path, parts[1:], rank_here))
            except OSError as error:
                if rank_here is None:
                    raise
                yield rank_here, unreadable(str(path), error)
        elif len(parts) == 1 and is_file(path) and rank_here is not None and is_matched:
            name = path.name
            for i in range(match.re.groups, 0, -1):
                name = name[: match.start(i)] + "{rank}" + name[match.end(i) :]
            yield RankFile(rank_here, path, name)


# -------------------------------------------------------------------------------- files in messages


def _problem(
    root: Path,
    message: str,
    hint: str,
    facts: str | Iterable[Path] = "",
    ranks: tuple[int, ...] = (),
) -> Diagnostic:
    facts = facts if isinstance(facts, str) else _names(root, facts)
    return Diagnostic("source", message, hint=hint, facts=facts, ranks=ranks, where=str(root))


def _as_src(path: Path | str) -> str:
    return f"{quote(str(path))} as SRC"


def _names(root: Path, paths: Iterable[Path]) -> str:
    return shorten((str(path.relative_to(root)) for path in paths), 3)


def _find_nested_files(folders: Iterable[Path]) -> list[Path]:
    nested = (path for folder in folders for path in sorted(find_paths(folder, "*/*")))
    return [
        path
        for path in nested
        if RANK_FOLDER.fullmatch(path.parent.name) and format_of_suffix(path.name) is not None
    ]


def _list_files_below(root: Path) -> str:
    files = _names(root, islice(_files_below(root, _MAX_DEPTH), _MAX_FILES))
    return f"found {files}" if files else ""


def _files_below(folder: Path, depth: int, is_any: bool = False) -> Iterator[Path]:
    for path in list_readable(folder):
        if is_folder(path):
            if depth and not is_emergency(path):
                yield from _files_below(path, depth - 1, is_any)
        elif is_file(path) if is_any else is_checkpoint_file(path):
            yield path


def find_manifests(catalog: Catalog) -> list[Path]:
    """Return the manifests of folders and of single files that may list the scanned files."""
    paths = [Path(path) for path in list_paths(catalog)]
    candidates = [Path(catalog.root, MANIFEST)] if is_folder(catalog.root) else []
    for folder in dict.fromkeys(path.parent for path in paths):
        is_of_rank = RANK_FOLDER.fullmatch(folder.absolute().name)
        if is_single_file(catalog) or not is_of_rank:
            candidates.append(folder / MANIFEST)
        if is_of_rank:
            candidates.append((folder if folder.name else folder.absolute()).parent / MANIFEST)
    candidates += [path.with_name(f"{path.name}.{MANIFEST}") for path in paths]
    return [path for path in dict.fromkeys(candidates) if is_file(path)]


def is_single_file(catalog: Catalog) -> bool:
    """Return whether the catalog is that of one file, not of a folder or an index."""
    is_merged = catalog.is_merged and not catalog.indexes
    return is_merged and not is_folder(catalog.root)


def list_paths(catalog: Catalog) -> list[str]:
    """Return the paths of all scanned files, also of damaged ones."""
    paths = [path for file in catalog.files.values() for path in file.paths]
    return paths + [error.path for error in catalog.damaged.values()]
