"""The files of all ranks in a folder, of every step.

A rank folder is called ``rank_3``, ``rank_03``, ``rank3``, ``node3``, ``ckpt_3``, ``rank_3_ckpt``
or ``device3``; its files may be in one folder in it, as in ``device3/ckpt_3`` and ``rank_3/ckpt``.
Without rank folders, files with ``rank_3`` in their names count, as MindFormers writes them.

Rank folders and such files may also be in folders of hosts or processes, ``10.0.0.2/rank_8`` and
``train_parallel8/ckpt_8``: folders with different ranks, none twice, are one checkpoint.  At last,
folders and files count whose names differ in one number, from 0 without a gap, ``card0`` and
``card1``, also in folders of hosts, ``host0/card0`` and ``host1/card1``.

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

import glob
import os
import re
import shlex
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from ckpttool.discovery.file_names import (
    HYPER_METADATA,
    ITERATION,
    RANK_FOLDER,
    RANK_IN_NAME,
    RankFile,
    Step,
    base_of,
    find_numbered,
    form_around,
    ranks_in_names,
    run_of,
    step_of,
)
from ckpttool.discovery.leftovers import (
    EMERGENCY,
    describe_ignored,
    find_emergency_saves,
    find_unfinished_save,
    note_emergencies,
    note_leftovers,
    note_skipped,
)
from ckpttool.formats import format_of_suffix
from ckpttool.formats.foreign import FOREIGN_KINDS, identify_foreign, list_rank_tables
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
from ckpttool.problems import (
    Diagnostic,
    Diagnostics,
    FormatError,
    PlanError,
    UnfinishedError,
    raise_all,
)
from ckpttool.strategy_files.folders import is_strategy, select_strategies
from ckpttool.transaction.states import find_unfinished_run
from ckpttool.wording import count, format_ranks, shorten

_PYTORCH_NAME = re.compile(r"pytorch_model(-\d+-of-\d+)?\.bin(\.index\.json)?")
_PYTORCH_SUFFIXES = (".bin", ".pt", ".pth")
_DIGITS = re.compile(r"(\d+)")
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
    found, named = _find_ranks(root)
    folders = {one.rank: one.path for one in found}
    if not found:
        note_leftovers(root, (), diagnostics)
        return _list_flat_files(root, named, diagnostics)
    listed: list[RankFile] = []
    homes: dict[int, Path] = {}
    empty: dict[int, FormatError | None] = {}
    for rank, folder in sorted(folders.items()):
        try:
            homes[rank], files = _find_files(folder, rank)
        except OSError as error:
            empty[rank] = unreadable(str(folder), error)
            continue
        listed += [RankFile(rank, path, path.name) for path in files]
        if not files:
            empty[rank] = None
    kept, notes, misplaced = _by_names(
        root, _without_strategies(listed) or listed, {**folders, **homes}
    )
    note_leftovers(root, homes.values(), diagnostics)
    if not listed:
        _refuse_unfinished(root)
        raise_all(filter(None, empty.values()))
    diagnostics.add(*notes)
    problems = [*_folder_problems(root, found, homes, listed), *misplaced]
    if problems:
        raise PlanError((*problems, *explain_missing_files(diagnostics)))
    holders = {path.relative_to(root).parts[0] for path in folders.values()}
    if by_table := [one for one in found if _number_of(one.path, one.rank) != one.rank]:
        holders.update(path.name for path in list_rank_tables(root))
        name, rank = by_table[0].path.relative_to(root), by_table[0].rank
        diagnostics.add(Diagnostic("doubt", f"ranks by the rank table: {name} is rank {rank}"))
    others = [path.name for path in list_folder(root) if path.name not in holders and exists(path)]
    note_skipped(root, others, diagnostics)
    return FoundFiles(kept, empty)


def _folder_problems(
    root: Path, found: Sequence[_RankFolder], homes: Mapping[int, Path], listed: Sequence[RankFile]
) -> Iterator[Diagnostic]:
    """Yield why the files of ranks cannot be told from others.

    Parameters
    ----------
    root, found
        The folder of all ranks, and those of the ranks.
    homes
        The folder of each rank that has its files, or is without any.
    listed
        All of these files.
    """

    def problem(text: str, hint: str, facts: str, ranks: tuple[int, ...] = ()) -> Diagnostic:
        return Diagnostic("source", text, hint=hint, facts=facts, ranks=ranks, where=str(root))

    folders: dict[int, list[Path]] = defaultdict(list)
    kinds: dict[str, Path] = {}
    for word, rank, path in found:
        folders[rank].append(path)
        kinds.setdefault(word, path)
    twice = {rank: paths for rank, paths in sorted(folders.items()) if len(paths) > 1}
    if len(kinds) > 1:
        hint = "--pattern with the form of one of them"
        yield problem("rank folders of several kinds", hint, _names(root, kinds.values()))
    elif twice:
        text = f"two folders for {format_ranks(tuple(twice))}"
        pairs = (" and ".join(str(p.relative_to(root)) for p in two[:2]) for two in twice.values())
        yield problem(text, "move one of the two folders away", shorten(pairs, 3), tuple(twice))
    times = Counter(one.rank for one in listed)
    indexed = [
        home
        for rank, home in homes.items()
        if times[rank] > 1 and any(is_index_name(path.name) for path in list_folder(home))
    ]
    if indexed:
        hint = f"ckpttool merge {shlex.quote(str(indexed[0]))} --replicated -o "
        hint += shlex.quote(f"ONE/{indexed[0].name}/net.safetensors")
        text = "a rank has several files and an index; expected one file for each rank"
        yield problem(text, f"{hint}, for each", shorten(map(str, indexed), 3))
    places: dict[str, Path] = {}
    of_others: list[Path] = []
    for rank, home in homes.items():
        folder, inside = folders[rank][-1], [home]
        if not times[rank]:
            of_others += _files_of_other_ranks(home, rank)
            inside = [other for other, _ in _other_homes(list_folder(home), rank)]
        for path in inside:
            if path != folder:
                inside_it, own = path.relative_to(folder), _number_of(folder, rank)
                places.setdefault(_place(inside_it, rank, own), path)
    if len(places) > 1:
        hint = "--pattern with the folder that is meant"
        text = "the files of ranks lie in folders of different names, perhaps of different steps"
        yield problem(text, hint, _names(root, places.values()))
    if not listed:
        last = {rank: paths[-1] for rank, paths in folders.items()}
        facts, hint = _find_nested_files(root, last.values())
        facts = facts or _names(root, (last[rank] for rank in homes))
        hint = hint or "copy the files into these folders; `ckpttool help source` explains"
        if below := _find_checkpoints_below(root):
            hint = f"{shlex.quote(str(below[0]))} as SRC, or {hint}"
        text = f"no checkpoint file in the folders of {format_ranks(tuple(homes))}"
        yield problem(text, hint, facts, tuple(homes))
    elif of_others:
        hint = "--pattern with {rank} for the right one; `ckpttool help source` explains"
        text = "paths name two ranks, and nothing shows which one is right"
        yield problem(text, hint, _names(root, of_others))


def _without_strategies(found: Sequence[RankFile]) -> list[RankFile]:
    strategies = {*select_strategies([one.path for one in found])}
    return [one for one in found if one.path not in strategies]


def explain_missing_files(diagnostics: Diagnostics) -> Iterator[Diagnostic]:
    """Yield the notes that may explain missing files, for the error about these."""
    yield from (one for one in diagnostics if one.code in ("leftover", "absent"))


def checkpoint_files(folder: Path) -> Iterator[Path]:
    """Yield the files in a folder that have a checkpoint's suffix, sorted."""
    yield from filter(is_checkpoint_file, list_folder(folder))


def is_checkpoint_file(path: Path) -> bool:
    """Return whether a file has a checkpoint's suffix; not so ``.tmp`` and ``-graph.meta``."""
    return format_of_suffix(path.name) is not None and is_file(path)


# ------------------------------------------------------------------------------------- rank folders


def has_rank_files(folder: Path) -> bool:
    """Return whether a folder has rank folders, or files with their rank in the name."""
    return bool(named_folders(list_folder(folder)) or _named_files(checkpoint_files(folder)))


def note_rank_folders(root: Path, diagnostics: Diagnostics) -> None:
    """Note rank folders in a self-described checkpoint: they are of another checkpoint."""
    if names := [one.path.name for one in named_folders(list_folder(root))]:
        pattern = re.sub(r"\d+", "{rank}", names[0]) + "/*"
        hint, what = f"--pattern {shlex.quote(pattern)}", "of ranks, of another checkpoint"
        diagnostics.add(*describe_ignored(root, names, what, noun="folder", hint=hint))


def sibling_rank_folders(file: Path) -> tuple[str, list[str]]:
    """Return the name of the rank folder that contains a file, and those of its siblings.

    Siblings are of the same kind: ``node1`` is not a sibling of ``ckpt_1``.  Siblings of a folder
    further up, and rank folders in those of other hosts (``10.0.0.1/rank_0``, ``10.0.0.2/rank_1``),
    count only if they hold a file with the same path, but for numbers.
    """
    for depth in (1, 2):  # of the rank folders below the folder above: 2 in those of hosts
        for word, own, folder in named_folders(file.parents[:3]):
            if depth > len(folder.parents):
                continue  # it lies at the top of the file system
            above, place = folder.parents[depth - 1], _any_save(file.relative_to(folder))
            hosts = f"{_any_number(folder.parent.name)}/" if depth == 2 else ""
            beside = sorted(find_paths(above, f"{hosts}{word}*"))
            others = [
                str(path.relative_to(above))
                for other, rank, path in named_folders(beside)
                if other == word and path != folder and (depth == 1 or rank != own)
                if (depth == 1 and folder == file.parent) or any(find_paths(path, place))
            ]
            if others:
                return str(folder.relative_to(above)), others
    return "", []


def find_twins(file: Path) -> Iterator[tuple[str, list[str], Path]]:
    """Yield the files of other ranks, as far as names show, that are like a file.

    Its name, or that of a folder around it, differs from others in one number that may be a rank's.
    Where the rest of the path has this number too, it has that of the other rank there.

    Yields
    ------
    name, others, twin
        The name with the number, the names beside it, and the file of a rank whose distance is a
        power of two: along each axis of a device matrix, some of them hold another slice.
    """
    for depth, path in enumerate((file, *file.parents[:3])):
        if not _DIGITS.search(path.name):
            continue
        names_beside = [p.name for p in list_readable(path.parent)]
        for names in find_numbered([*names_beside, path.name], are_files=not depth):
            own = next((number for number, name in names.items() if name == path.name), None)
            if own is None:
                continue
            others = [name for _, name in sorted(names.items()) if name != path.name]
            steps = [1 << i for i in range(len(names).bit_length())]
            for other in (own + sign * step for step in steps for sign in (-1, 1)):
                if other in names:
                    folder, inside = path.with_name(names[other]), file.relative_to(path)
                    twins = _find_like(folder, inside, own, other) if depth else [folder]
                    yield from ((path.name, others, twin) for twin in twins)


def _find_like(folder: Path, inside: Path, own: int, other: int) -> Iterator[Path]:
    """Yield the files at the same place in a folder; ``own`` may be replaced by ``other`` in it.

    A file of the same step may have another counter.
    """
    run, base = run_of(inside.name), base_of(inside.name)
    counter = r"(?:_[1-9]\d*)?" if step_of(inside.name) is not None else ""
    above = str(inside).removesuffix(inside.name)
    heads = (_with_either(above + head, own, other) for head in sorted({run, base}))
    tail = re.escape(inside.name[len(run) :])
    expression = re.compile(f"(?:{'|'.join(heads)}){counter}{tail}")
    for path in sorted(find_paths(folder, _any_save(inside))):
        if expression.fullmatch(str(path.relative_to(folder))):
            yield path


def _with_either(text: str, own: int, other: int) -> str:
    return "".join(
        f"0*(?:{own}|{other})" if part.isdecimal() and int(part) == own else re.escape(part)
        for part in _DIGITS.split(text)
    )


def _any_number(path: Path | str) -> str:
    return re.sub(r"\d+", "*", glob.escape(str(path)))


def _any_save(file: Path) -> str:
    name = _any_number(file.name[len(run_of(file.name)) :])
    head = base_of(file.name) if step_of(file.name) is None else f"{base_of(file.name)}0"
    return f"{_any_number(file.parent)}/{_any_number(head)}{name}"


def find_nested_checkpoints(root: Path) -> list[Path]:
    """Return the folders in a folder that are checkpoints, except for emergency saves."""
    found = {path.parent for path in find_paths(root, "*/*") if _marks_checkpoint(path)}
    return sorted(path for path in found if EMERGENCY.fullmatch(path.name) is None)


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


class Shape(NamedTuple):
    """A way in which folders or files have the numbers of ranks in their names.

    Attributes
    ----------
    depth
        How far below the checkpoint they lie: 2 in the folders of hosts or processes.
    of_file
        Whether files have the number in their names; else it is that of their folder.
    has_word
        Whether a word stands before the number, as in ``rank_3``.  Else the names differ in it.
    """

    depth: int
    of_file: bool
    has_word: bool

    @property
    def is_weak(self) -> bool:
        """Whether folders that are checkpoints count before it."""
        return self.of_file and not (self.depth == 1 and self.has_word)


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
    """Return the folders of ranks, or else the files that name them, of the first shape."""
    levels = [list_folder(root)]
    for shape in SHAPES:
        while len(levels) < shape.depth:
            levels.append(_below(levels[-1]))
        if shape.is_weak and find_nested_checkpoints(root):
            break
        paths = levels[shape.depth - 1]
        if shape.of_file and (files := _files_of(shape, paths)):
            return [], files
        if not shape.of_file and (folders := _folders_of(shape, paths)):
            return folders, []
    return [], []


def _below(paths: Iterable[Path]) -> list[Path]:
    folders = (path for path in paths if not EMERGENCY.fullmatch(path.name) and is_folder(path))
    # other folders beside those of hosts need not be readable
    return [path for folder in folders for path in list_readable(folder)]


def _files_of(shape: Shape, paths: Iterable[Path]) -> list[RankFile]:
    """Return the files of ranks that are no strategies; in hosts no rank may have two folders."""
    files = [*filter(is_checkpoint_file, paths)]
    if shape.has_word:
        found = _named_files(files)
    else:
        found = _numbered_files([f for f in files if RANK_IN_NAME.search(f.name) is None])
    found = _without_strategies(found)
    homes = {(file.rank, file.path.parent) for file in found}
    return found if shape.depth == 1 or len(homes) == len({rank for rank, _ in homes}) else []


def _folders_of(shape: Shape, paths: Sequence[Path]) -> list[_RankFolder]:
    """Return the folders of ranks, in those of hosts if they are of one checkpoint.

    There are several hosts, and no rank has two folders, as in ``train_parallel1/ckpt_1`` and
    ``10.0.0.2/rank_8``.  If every host has a rank 0, each is a checkpoint, unless a rank table says
    which ranks their devices are.
    """
    found = named_folders(paths) if shape.has_word else _find_numbered_folders(paths)
    if shape.depth == 1:
        return [] if _are_nodes(found) else found
    hosts: dict[Path, list[_RankFolder]] = defaultdict(list)
    for folder in found:
        hosts[folder.path.parent].append(folder)
    of_hosts = [of for of in hosts.values() if not shape.has_word or any(map(_has_files, of))]
    if len(of_hosts) < 2:
        return []
    found = [folder for of in of_hosts for folder in of]
    is_each_one = all(any(folder.rank == 0 for folder in of) for of in of_hosts)
    is_twice = len({folder.rank for folder in found}) < len(found)
    return _by_tables(found) if is_each_one and is_twice else found


def _has_files(folder: _RankFolder) -> bool:
    return bool(_find_files(folder.path, folder.rank)[1])


def _are_nodes(found: Sequence[_RankFolder]) -> bool:
    """Return whether folders of nodes hold the folders of ranks; else they are those of ranks."""
    if {folder.word for folder in found} != {"node"}:
        return False
    inside = [named_folders(list_readable(folder.path)) for folder in found]
    inner = [folder for folders in inside for folder in folders]
    is_one = len({folder.rank for folder in inner}) == len(inner) or any(_by_tables(inner))
    is_any_file = any(any(checkpoint_files(folder.path)) for folder in found)
    are_several = max(map(len, inside)) > 1 and len({folder.word for folder in inner}) == 1
    return are_several and is_one and not is_any_file


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
    for folder in folders:
        hosts[folder.path.parent].append(folder.rank)
    are_devices = {folder.word for folder in folders} == {"device"} and len(hosts) > 1
    ranks = ranks_of_devices(hosts) if are_devices else {}
    return [one._replace(rank=ranks[one.path.parent][one.rank]) for one in folders if ranks]


def _find_numbered_folders(inside: Iterable[Path]) -> list[_RankFolder]:
    """Return the only folders with files whose names differ in a number that may be the rank's.

    Where the names of the files have the word, they must have the same number.
    """
    paths = [p for p in inside if is_folder(p) and not EMERGENCY.fullmatch(p.name)]
    folders, times = {p.name: p for p in paths}, Counter(p.name for p in paths)
    found = []
    for names in find_numbered(times, are_files=False):
        if any(times[name] > 1 for name in names.values()):
            continue  # a number is there twice: of two runs, or counted on every host
        group = [_RankFolder("", rank, folders[name]) for rank, name in sorted(names.items())]
        files = [(rank, path) for _, rank, top in group for path in _find_files(top, rank)[1]]
        is_agreed = all(
            int(match[1]) == rank
            for rank, path in files
            if (match := RANK_IN_NAME.search(path.name)) is not None
        )
        if is_agreed and not _are_hosts(files) and not all(is_strategy(p) for _, p in files):
            found.append(group)
    return found[0] if len(found) == 1 else []


def _are_hosts(files: Sequence[tuple[int, Path]]) -> bool:
    """Return whether files of numbered folders show that these are hosts, not ranks.

    A folder has files of one step that differ in the number of the rank.  Without a step, the
    number may count something else if other folders have the same names.
    """
    names = Counter(path.name for _, path in files)
    said = ranks_in_names(names)
    saves: dict[tuple[int, Step | None], set[int]] = defaultdict(set)
    for number, path in files:
        step = step_of(path.name)
        if path.name in said and (step is not None or names[path.name] == 1):
            saves[number, step].add(said[path.name])
    return any(len(ranks) > 1 for ranks in saves.values())


def _find_files(folder: Path, rank: int, depth: int = 2) -> tuple[Path, list[Path]]:
    """Return the checkpoint files of a rank, and their folder.

    The folder is the rank folder, or the only folder in it that has files: the only rank folder, or
    else the only one of any name, as in ``rank_0/ckpt``.  A rank folder must be of the same rank,
    and the outer one may have only strategy files.  A script that changes into ``device0`` to train
    leaves ``device0/ckpt_0``, and perhaps its strategy file in ``device0``.  With both
    ``node0/device0`` and ``node0/device1`` the numbers of the folders are not ranks.
    """
    names = list_folder(folder)
    files = [*filter(is_checkpoint_file, names)]
    inside = (
        [p for p in names if format_of_suffix(p.name) is None and is_folder(p)] if depth else []
    )
    if not inside or not all(map(is_strategy, files)):
        return folder, files
    named = [
        (number, _find_files(path, number, depth - 1)) for _, number, path in named_folders(inside)
    ]
    nested = [one for one in named if one[1][1]]
    if not nested:
        nested = [(rank, one) for one in _other_homes(inside, rank, depth - 1)]
    is_of_rank = [number for number, _ in nested] in ([rank], [_number_of(folder, rank)])
    return nested[0][1] if is_of_rank else (folder, files)


def _files_of_other_ranks(folder: Path, rank: int) -> list[Path]:
    """Return the checkpoint files in a folder of another rank inside a rank folder.

    A script that changes into ``device1`` and does not know its rank leaves ``device1/ckpt_0``.
    """
    return [
        file
        for _, number, path in named_folders(list_folder(folder))
        if number != rank
        for file in checkpoint_files(path)
    ]


def _other_homes(
    inside: Iterable[Path], rank: int, depth: int = 1
) -> Iterator[tuple[Path, list[Path]]]:
    for path in inside:
        if RANK_FOLDER.fullmatch(path.name) or EMERGENCY.fullmatch(path.name):
            continue
        home, files = _find_files(path, rank, depth) if is_folder(path) else (path, [])
        if not all(map(is_strategy, files)):
            yield home, files


def _number_of(folder: Path, rank: int) -> int:
    match = RANK_FOLDER.fullmatch(folder.name)
    return rank if match is None else int(match[2])  # perhaps that of a device


def _place(inside: Path, *numbers: int) -> str:
    return "".join(
        "{rank}" if part.isdecimal() and int(part) in numbers else part
        for part in _DIGITS.split(str(inside))
    )


def _by_names(
    root: Path, found: Sequence[RankFile], folders: Mapping[int, Path]
) -> tuple[list[RankFile], list[Diagnostic], list[Diagnostic]]:
    """Return the files without copies of other ranks' files, the notes on these, the problems.

    Names say the rank if most of them say that of their folder.  They do so too if a folder has
    files of one save of several ranks, or if those of one save say the ranks in another order.
    Else numbers that repeat may be those of devices.  A file of another rank than its folder's is a
    copy if the folder has the file of its own rank, and the other rank's folder has this one.
    """
    named = [(one, m) for one in found if (m := RANK_IN_NAME.search(one.path.name))]
    named = named or _exchanged_numbers(found)
    saves: dict[tuple[str, str], set[tuple[int, int]]] = defaultdict(set)
    for one, match in named:
        saves[form_around(one.path.name, match)].add((one.rank, int(match[1])))
    misplaced = [(one, match) for one, match in named if int(match[1]) != one.rank]
    is_exchanged = any(_are_exchanged(pairs, folders) for pairs in saves.values())
    is_shared = any(len({rank for rank, _ in pairs}) < len(pairs) for pairs in saves.values())
    if not (is_exchanged or is_shared or len(misplaced) < len(named) - len(misplaced)):
        return list(found), [], []
    names = {(one.rank, one.path.name) for one in found}
    copies = {
        one.path: None
        for one, match in misplaced
        if (one.rank, one.rank) in saves[form_around(one.path.name, match)]
        and (int(match[1]), one.path.name) in names
    }
    notes, problems = [], []
    if copies:
        text = f"{count(len(copies), 'file')} of other ranks than their folders: ignored"
        notes.append(Diagnostic("skipped", text, facts=_names(root, copies), where=str(root)))
    rest = [(one, match) for one, match in misplaced if one.path not in copies]
    if rest:
        one, match = rest[0]
        rank = int(match[1])
        hint = f"move {'them' if rest[1:] else 'it'} away; `ckpttool help source` explains"
        if is_exchanged:
            by_name, by_folder = _patterns_of_both(root, one, match)
            hint = f"--pattern {by_name} if the names are right, or --pattern {by_folder}"
        elif len(folders) == 1:
            hint = f"{shlex.quote(str(one.path.parent))} as SRC"
        elif rank in folders and not exists(folders[rank] / one.path.name) and not rest[1:]:
            hint = f"mv {shlex.quote(str(one.path))} {shlex.quote(str(folders[rank]))}/"
        text = f"{count(len(rest), 'file')} in the folder of another rank than the name says"
        facts = _names(root, (other.path for other, _ in rest))
        problems.append(Diagnostic("source", text, hint=hint, facts=facts, where=str(root)))
    return [one for one in found if one.path not in copies], notes, problems


def _exchanged_numbers(found: Iterable[RankFile]) -> list[tuple[RankFile, re.Match[str]]]:
    """Return the files of one save whose names have a number that is another rank's, or []."""
    ranks = {one.rank for one in found}
    forms: dict[tuple[str, str], list[tuple[RankFile, re.Match[str]]]] = defaultdict(list)
    for one in found:
        for match in _DIGITS.finditer(one.path.name, 0, len(run_of(one.path.name))):
            forms[form_around(one.path.name, match)].append((one, match))
    for named in forms.values():
        pairs = {(one.rank, int(match[1])) for one, match in named}
        if len(named) == len(ranks) and _are_exchanged(pairs, ranks):
            return named
    return []


def _are_exchanged(pairs: Collection[tuple[int, int]], ranks: Collection[int]) -> bool:
    said = [number for _, number in pairs]
    is_each_once = len({rank for rank, _ in pairs}) == len(set(said)) == len(pairs) > 1
    return is_each_once and set(said) <= set(ranks) and any(one != said for one, said in pairs)


def _patterns_of_both(root: Path, file: RankFile, said: re.Match[str]) -> tuple[str, str]:
    folders = file.path.relative_to(root).parts[:-1]
    places = [_place(Path(folder), file.rank) for folder in folders]
    own = max(i for i, place in enumerate(places) if place != folders[i])
    by_name = ["*" for _ in folders] + [f"{said.string[: said.start(1)]}{{rank}}*"]
    by_folder = [place if i == own else "*" for i, place in enumerate(places)] + ["*"]
    suffix = file.path.suffix
    return shlex.quote("/".join(by_name) + suffix), shlex.quote("/".join(by_folder) + suffix)


# --------------------------------------------------------------------- folders without rank folders


def _list_flat_files(root: Path, found: list[RankFile], diagnostics: Diagnostics) -> FoundFiles:
    """Return the files that name their ranks, or else those of the steps of one card."""
    saves = find_emergency_saves(root)
    note_emergencies(saves, diagnostics)
    if found:
        return FoundFiles(found, {})
    files = list(checkpoint_files(root))
    if steps := _steps_of_one_rank(root, files):
        return FoundFiles(steps, {}, are_whole=True)
    _refuse_unfinished(root)
    _refuse_pytorch(root)
    problem = _describe_contents(root, files, saves)
    raise PlanError((problem, *explain_missing_files(diagnostics)))


def _steps_of_one_rank(root: Path, files: Sequence[Path]) -> list[RankFile]:
    """Return the files that ``ModelCheckpoint`` writes on one card: names differ in the step.

    Names of a later run in the folder have a counter, too.
    """
    found = _without_strategies([RankFile(0, path, path.name) for path in files])
    runs = {run_of(one.name) for one in found}
    are_steps = all(step_of(one.name) is not None for one in found)
    are_of_one_name = len({base_of(one.name) for one in found} | runs) <= len(runs)
    is_of_rank = RANK_FOLDER.fullmatch(root.absolute().name) is not None
    is_whole = are_steps and are_of_one_name and not is_of_rank
    return found if is_whole and not find_nested_checkpoints(root) else []


def _named_files(files: Iterable[Path]) -> list[RankFile]:
    return [
        RankFile(int(match[1]), path, path.name)
        for path in files
        if (match := RANK_IN_NAME.search(path.name)) is not None
    ]


def _repeated_in_hosts(root: Path) -> list[Path]:
    """Return the files of a name in several folders, if a folder has files of several ranks."""
    ranks: dict[Path, set[int]] = defaultdict(set)
    by_name: dict[str, list[Path]] = defaultdict(list)
    files = [*filter(is_checkpoint_file, _below(list_folder(root)))]
    for item in _without_strategies(_named_files(files)) or _numbered_files(files):
        if RANK_IN_NAME.search(item.name) or step_of(item.name) is not None:
            ranks[item.path.parent].add(item.rank)
            by_name[item.name].append(item.path)
    is_of_hosts = any(len(numbers) > 1 for numbers in ranks.values())
    return next((p for p in by_name.values() if len(p) > 1), []) if is_of_hosts else []


def _numbered_files(files: Sequence[Path]) -> list[RankFile]:
    ranks = ranks_in_names(path.name for path in files)
    return [RankFile(ranks[p.name], p, p.name) for p in files if p.name in ranks]


def _describe_contents(root: Path, files: Sequence[Path], saves: Iterable[Path]) -> Diagnostic:
    """Return the problem of a folder without files of ranks: what is in it, and what to name."""

    def problem(text: str, hint: str, facts: str = "") -> Diagnostic:
        return Diagnostic("source", text, hint=hint, facts=facts, where=str(root), path=str(root))

    finished = [str(save) for save in saves if find_unfinished_save(save) is None]
    if finished:
        text = "no ranks in it, but an emergency save of fault-tolerant training"
        return problem(text, f"{finished[0]} as SRC", shorten(finished, 3))
    if nested := find_nested_checkpoints(root):
        text = f"not a checkpoint, but a folder of {count(len(nested), 'checkpoint')}"
        return problem(text, f"{shlex.quote(str(nested[0]))} as SRC", _names(root, nested))
    if RANK_FOLDER.fullmatch(root.absolute().name) is not None:
        hint = f"{shlex.quote(os.path.normpath(root / '..'))} as SRC"
        return problem("the folder of one rank, not of all ranks", hint)
    if files and all(map(is_strategy, files)):
        hint = f"the checkpoint as SRC, and -s {shlex.quote(str(root))}"
        return problem("strategy files, not a checkpoint", hint, _names(root, files))
    if models := _find_merged(root):
        text = "not a checkpoint, but a folder that holds one"
        if len(models) > 1:
            text = f"not a checkpoint, but a folder of {len(models)} merged checkpoints"
        return problem(text, f"{shlex.quote(str(models[0]))} as SRC", _names(root, models))
    if repeated := _repeated_in_hosts(root):
        text = "files of one rank by their names in several folders: copies, or numbers of devices"
        hint = "move copies away, or link each file to a name with its rank (net_rank_0.ckpt)"
        return problem(text, hint, _names(root, repeated))
    if below := _find_checkpoints_below(root):
        text = f"not a checkpoint, but a folder of {count(len(below), 'checkpoint')}"
        return problem(text, f"{shlex.quote(str(below[0]))} as SRC", _names(root, below))
    found = files or [*islice(_files_below(root, _MAX_DEPTH), 2)]
    if len(found) == 1 and not is_strategy(found[0]):
        return problem("no ranks in it, but one file", f"{shlex.quote(str(found[0]))} as SRC")
    text = "no rank folders (rank_0, rank_1, ...) and no files named rank_N"
    hint = "the folder of the rank folders as SRC; `ckpttool help source` explains"
    if listed := _list_files_below(root):
        return problem(text, f"--pattern, or {hint}", listed)
    inside = [path.name + "/" * is_folder(path) for path in list_folder(root)]
    return problem(text, hint, f"it holds {shorten(inside, 3)}" if inside else "it is empty")


def _find_checkpoints_below(root: Path) -> list[Path]:
    files = islice(_files_below(root, _MAX_DEPTH), _MAX_FILES)
    folders = {home for path in files for home in path.parents if home.is_relative_to(root)}
    found = {folder for folder in folders - {root} if _holds_ranks(folder)}
    return sorted(folder for folder in found if found.isdisjoint(folder.parents))


def _holds_ranks(folder: Path) -> bool:
    inside = list_folder(folder)
    return any(map(_marks_checkpoint, inside)) or bool(_find_numbered_folders(inside))


def _find_merged(root: Path) -> list[Path]:
    """Return the folders below a folder that hold a merged checkpoint.

    Such a folder has an index or a ``model.safetensors``, or is a revision in a cache of Hugging
    Face: ``snapshots/REVISION``, whose files are links to ``blobs``.  The revision that
    ``refs/main`` names is the first.  The result is empty if other folders have files, too.
    """
    files = list(islice(_files_below(root, _MAX_DEPTH, is_any=True), _MAX_FILES))
    found = {
        path.parent
        for path in files
        if path.parent != root
        and (
            path.name == SINGLE_FILE
            or is_index_name(path.name)
            or (path.parent.parent.name == _SNAPSHOTS and format_of_suffix(path.name) is not None)
        )
    }
    if any(path.parent not in found and format_of_suffix(path.name) is not None for path in files):
        return []
    return sorted(found, key=lambda folder: (not _is_main_revision(folder), folder))


def _is_main_revision(folder: Path) -> bool:
    main = folder.parent.parent / "refs" / "main"
    is_snapshot = folder.parent.name == _SNAPSHOTS and is_file(main)
    return is_snapshot and read_file(main).strip() == os.fsencode(folder.name)


def _refuse_unfinished(root: Path) -> None:
    unfinished = find_unfinished_run(root)
    if unfinished is not None:
        raise UnfinishedError([replace(unfinished, code="nothing_complete")])


def _refuse_pytorch(root: Path) -> None:
    names = [path.name for path in list_folder(root) if is_file(path) and _is_pytorch_file(path)]
    if names:
        raise FOREIGN_KINDS["pytorch"].error(str(root), shorten(names, 3))


def _is_pytorch_file(path: Path) -> bool:
    if _PYTORCH_NAME.fullmatch(path.name):
        return True
    kind = identify_foreign(str(path)) if path.suffix in _PYTORCH_SUFFIXES else None
    return kind is not None and kind.kind == "pytorch"


# ----------------------------------------------------------------------------------------- patterns


def list_by_pattern(root: Path, pattern: str) -> FoundFiles:
    """Return the files below ``root`` that match a pattern such as ``node{rank}/*``."""
    if "{rank}" not in pattern:
        text = f"the pattern {pattern} lacks {{rank}}"
        raise PlanError([Diagnostic("source", text, hint="--pattern 'rank_{rank}/*'")])
    matches = list(_match_pattern(root, Path(pattern).parts, None))
    found = [one for one in matches if isinstance(one, RankFile)]
    named = [one for one in found if "{rank}" in one.name and step_of(one.path.name) is not None]
    in_step = [one for one in named if one.name.startswith(run_of(one.path.name))]
    if in_step and not any(one.rank == 0 for one in found):
        text = f"the pattern {pattern} makes ranks of the steps in names"
        facts, hint = _names(root, (one.path for one in in_step)), "the same without --pattern"
        raise PlanError([Diagnostic("source", text, hint=hint, facts=facts, where=str(root))])
    unreadable_ranks = dict(one for one in matches if not isinstance(one, RankFile))
    if not found:
        raise_all(unreadable_ranks.values())
        text = f"no file matches the pattern {shlex.quote(pattern)}"
        facts = _list_files_below(root)
        raise PlanError([Diagnostic("source", text, facts=facts, where=str(root))])
    return FoundFiles(found, unreadable_ranks)


def _match_pattern(
    folder: Path, parts: tuple[str, ...], rank: int | None
) -> Iterator[RankFile | tuple[int, FormatError]]:
    """Yield the files below ``folder`` that match the rest of a pattern with one rank.

    For a folder of a rank that cannot be read, its error is yielded.
    """
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
                yield from tuple(_match_pattern(path, parts[1:], found_rank))
            except OSError as error:
                if found_rank is None:
                    raise
                yield found_rank, unreadable(str(path), error)
        elif len(parts) == 1 and is_file(path) and found_rank is not None and is_matched:
            name = path.name
            for i in range(match.re.groups, 0, -1):
                name = name[: match.start(i)] + "{rank}" + name[match.end(i) :]
            yield RankFile(found_rank, path, name)


# -------------------------------------------------------------------------------- files in messages


def _names(root: Path, paths: Iterable[Path]) -> str:
    return shorten((str(path.relative_to(root)) for path in paths), 3)


def _find_nested_files(root: Path, folders: Iterable[Path]) -> tuple[str, str]:
    """Return files in nested rank folders, as of several hosts, and a hint; else ("", "")."""
    nested = (path for folder in folders for path in sorted(find_paths(folder, "*/*")))
    found = [
        path
        for path in nested
        if RANK_FOLDER.fullmatch(path.parent.name) and format_of_suffix(path.name) is not None
    ]
    hint = "a folder with a link rank_N to each of these folders (ln -s)"
    return (f"found {_names(root, found)}", hint) if found else ("", "")


def _list_files_below(root: Path) -> str:
    found = _names(root, islice(_files_below(root, _MAX_DEPTH), _MAX_FILES))
    return f"found {found}" if found else ""


def _files_below(folder: Path, depth: int, is_any: bool = False) -> Iterator[Path]:
    for path in list_readable(folder):
        if is_folder(path):
            if depth and not EMERGENCY.fullmatch(path.name):
                yield from _files_below(path, depth - 1, is_any)
        elif is_file(path) if is_any else is_checkpoint_file(path):
            yield path


def find_manifests(catalog: Catalog) -> list[Path]:
    """Return the manifests of folders and of single files that may list the scanned files."""
    paths = [Path(path) for path in list_paths(catalog)]
    of_files = (path.with_name(f"{path.name}.{MANIFEST}") for path in paths)
    candidates = dict.fromkeys((*_folder_manifests(catalog), *of_files))
    return [path for path in candidates if is_file(path)]


def _folder_manifests(catalog: Catalog) -> Iterator[Path]:
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
    is_merged = catalog.is_merged and not catalog.indexes
    return is_merged and not is_folder(catalog.root)


def list_paths(catalog: Catalog) -> list[str]:
    """Return the paths of all scanned files, also of damaged ones."""
    paths = [path for file in catalog.files.values() for path in file.paths]
    return paths + [error.path for error in catalog.damaged.values()]
