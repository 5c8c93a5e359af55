"""The strategy files of a folder: one that ``-s`` names, or one that lies beside a checkpoint.

It decides by names and contents which files are strategies; `ckpttool.strategy_files.reader` reads
them.  One module decides, because ``-s``, the scan of a source and ``strategy merge`` take the same
folders.

::

    FOLDER/*.ckpt, FOLDER/*.json      files of ranks, of stages, merged ones
    FOLDER/strategy/                  else those of the folder of this name, as MindFormers has it
    FOLDER/rank_{r}/strategy.ckpt     else those in folders whose names differ only in a number
    FOLDER/{role}/                    else those in one other folder

Folders of several roles (``train_policy_strategy``, ``infer_ref_strategy``) are a choice.  Hidden
folders are not searched.  Files beside strategies are skipped if their content shows that they are
something else.  One that shows nothing may be a damaged strategy, and counts beside others.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path

from msgspec import Struct

from ckpttool.formats import format_of_content, format_of_suffix, read_index
from ckpttool.formats.foreign import identify_foreign
from ckpttool.formats.local import is_file, is_folder, list_folder, list_readable, stat_file
from ckpttool.lazy import compile_late
from ckpttool.model.manifest import MANIFEST
from ckpttool.problems import FormatError

STRATEGY_FOLDER = "strategy"
SUFFIXES = (".ckpt", ".json")
# The suffixes of hand-written files, and their first key, which those with ``.json`` have, too.
YAML_SUFFIXES, KEY = (".yaml", ".yml"), "ckpttool_strategy"
_NUMBER = compile_late(r"\d+")
_NUMBERED = compile_late(r"(.*?)(\d+)(\.[a-z]+)", re.DOTALL)


class StrategyFiles(Struct, frozen=True):
    """The strategy files of a folder.

    Those ``of_ranks`` have the numbers of ranks in their names, or in those of their folders.
    ``skipped`` are files beside them that are something else, as a checkpoint or a ``config.json``.
    """

    files: tuple[Path, ...] = ()  # all of them, sorted; none if there is a choice
    of_ranks: frozenset[Path] = frozenset()
    choices: tuple[Path, ...] = ()  # folders; the user has to choose one
    skipped: tuple[Path, ...] = ()


def is_merged_name(name: str) -> bool:
    """Return whether MindFormers gives this name to a strategy merged over stages."""
    return name.startswith("merged")


def files_that_may_be_strategies(folder: str | Path) -> list[Path]:
    """Return the files in a folder with the suffix of a strategy, but not a manifest of ours."""
    return [path for path in list_folder(folder) if _may_be_strategy(path) and is_file(path)]


def _may_be_strategy(path: Path) -> bool:
    return path.suffix in SUFFIXES and not path.name.endswith(MANIFEST)


def find_strategy_files(folder: Path) -> StrategyFiles:
    """Return the strategy files of a folder, in the order of the module; raise OSError."""
    files = files_that_may_be_strategies(folder)
    if select_strategies(files):
        skipped = _select(files, _is_something_else)
        files = [path for path in files if path not in skipped]
        return StrategyFiles(tuple(files), frozenset(_numbered(files)), skipped=tuple(skipped))
    named = folder / STRATEGY_FOLDER
    if is_folder(named):
        inner = find_strategy_files(named)
        if inner.files or inner.choices:
            return inner
    groups: dict[str, list[Path]] = defaultdict(list)
    for path in list_folder(folder):
        if not path.name.startswith(".") and is_folder(path):  # not the record of a run
            groups[without_numbers(path.name)].append(path)
    holding = {}
    for folders in groups.values():
        # The folder of a lost rank cannot be read.
        inside = chain.from_iterable(map(list_readable, folders))
        if chosen := select_strategies([*filter(_may_be_strategy, inside)]):
            holding[folders[0]] = chosen
    if len(holding) != 1:
        return StrategyFiles(choices=tuple(holding))
    (files,) = holding.values()
    are_numbered = len({path.parent for path in files}) > 1
    return StrategyFiles(tuple(files), frozenset(files if are_numbered else _numbered(files)))


def select_strategies(files: Sequence[Path]) -> list[Path]:
    """Return the strategies among the files of ranks, by name and content."""
    return _select(files, is_strategy)


def _select(files: Sequence[Path], is_wanted: Callable[[Path], bool]) -> list[Path]:
    """Return the wanted files.

    The content of one file decides for all whose names differ only in numbers, so that a large
    checkpoint is not read.
    """
    first: dict[str, Path] = {}
    for path in files:
        name = without_numbers(path.name)
        if name not in first and is_file(path) and stat_file(path).nbytes:
            first[name] = path
    names = {name for name, path in first.items() if is_wanted(path)}
    return [path for path in files if without_numbers(path.name) in names and is_file(path)]


def is_strategy(path: Path) -> bool:
    """Return whether a file is a strategy, by its content; reading another reports its errors."""
    try:
        kind = identify_foreign(str(path))
    except OSError:
        return False
    return kind is not None and kind.kind == "strategy"


def are_strategies(paths: Iterable[str]) -> bool:
    """Return whether all paths are strategy files, or folders of nothing but these."""
    try:
        files = [_files_named(Path(path)) for path in paths]
        return all(files) and all(
            is_file(path) and format_of_content(str(path)) is None and is_strategy(path)
            for path in chain(*files)
        )
    except OSError:
        return False  # the scan of the source reports the error


def _files_named(path: Path) -> list[Path]:
    """Return a file, or those in a folder and in its folders; none if one of these has none."""
    if not is_folder(path):
        return [path]
    paths = list_folder(path)
    inside = [entry for entry in paths if entry.suffix in SUFFIXES]
    of_folders = [
        [*files_that_may_be_strategies(folder), *filter(_is_of_checkpoint, list_folder(folder))]
        for folder in filter(is_folder, paths)
    ]
    return [*inside, *chain(*of_folders)] if inside or all(of_folders) else []


def _is_of_checkpoint(path: Path) -> bool:
    return path.suffix not in SUFFIXES and format_of_suffix(path.name) is not None


def _is_something_else(path: Path) -> bool:
    kind = identify_foreign(str(path))
    if kind is None:
        return checkpoint_format(str(path)) is not None
    return kind.kind not in ("strategy", "text")  # the text may be damaged JSON


def checkpoint_format(path: str) -> str | None:
    """Return the format of a file if it is a checkpoint; else None."""
    try:
        return read_index(path).format
    except FormatError:
        return format_of_content(path)  # damaged, or encrypted


def without_numbers(name: str) -> str:
    """Return a name with a sign in place of each number, which files of ranks have in common."""
    return _NUMBER.sub("#", name)


def _numbered(files: Iterable[Path]) -> Iterator[Path]:
    """Yield the files whose names end in the numbers of ranks.

    These are ``rank_3`` and any names with numbers from 0 without a gap.
    """
    groups: dict[tuple[str, str], dict[int, Path]] = defaultdict(dict)
    for path in files:
        match = _NUMBERED.fullmatch(path.name)
        if match is not None and not is_merged_name(path.name):
            groups[match[1], match[3]][int(match[2])] = path
    for (start, _), by_number in groups.items():
        has_all = len(by_number) > 1 and max(by_number) == len(by_number) - 1
        if has_all or start.endswith("rank_"):
            yield from by_number.values()
