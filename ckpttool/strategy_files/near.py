"""The strategies that lie near a checkpoint, for a person who named none.

They are listed by name and number of ranks, and nothing is decided by it: one of them may be of
another run.  A file is read for the ranks of its first layout, and not resolved.  Several files
are offered as one strategy only if they are read as one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from shlex import quote

from msgspec import Struct

from ckpttool.formats.local import is_file, is_folder, list_readable
from ckpttool.lazy import compile_late
from ckpttool.model.catalog import Catalog
from ckpttool.problems import CkptToolError, Diagnostic, join_clauses
from ckpttool.strategy_files.folders import SUFFIXES, find_strategy_files, without_numbers
from ckpttool.strategy_files.reader import glance, read_strategy
from ckpttool.wording import count, shorten

_FOLDER = compile_late(r"(\w+_)?(strategy|strategies|strategys)")


class NearStrategy(Struct, frozen=True):
    """A strategy file, or the folder of several that are read as one."""

    path: str
    files: int
    ranks: int
    names: tuple[str, ...]  # some of them
    steps: int  # to it: 0 in the folder of the checkpoint, 1 beside that, 2 one folder up
    why_alone: str = ""  # why the files of its folder are not read as one

    def may_be_of(self, catalog: Catalog) -> bool:
        """Return whether it has the number of ranks and some names of a checkpoint."""
        ranks = len(catalog.files) + len(catalog.damaged)
        return self.ranks == ranks and any(name in catalog.holders for name in self.names)


def note_near(catalog: Catalog) -> Iterator[Diagnostic]:
    """Yield a note on the strategies near a checkpoint; its hint names those that may be its own.

    They lie in its folder, beside it and one folder up, or there in folders of strategies.
    """
    near = find_near(catalog.root)
    fitting = [strategy for strategy in near if strategy.may_be_of(catalog)]
    nearest = [quote(it.path) for it in fitting if it.steps == fitting[0].steps]
    hint = f"-s {nearest[0]}" if nearest else ""
    if nearest[1:]:
        hint = f"ckpttool strategy check {quote(catalog.root)} {' '.join(nearest[:2])}"
    if near:
        message = f"{count(len(near), 'strategy file')} near, which may be of other runs"
        files = (f"{it.files} files of " if it.files > 1 else "" for it in near)
        names = (Path(it.path).name if quote(it.path) in hint else it.path for it in near)
        texts = (
            f"{name} ({of}{count(it.ranks, 'rank')})"
            for name, it, of in zip(names, near, files, strict=True)
        )
        whys = dict.fromkeys(it.why_alone for it in near)
        facts = join_clauses(shorten(texts, 2), *whys)
        yield Diagnostic("strategy_file", message, hint=hint, facts=facts, where=catalog.root)


def find_near(root: str) -> list[NearStrategy]:
    """Return the strategies in a folder, beside it and one folder up.

    Files whose names differ in numbers are those of stages or ranks if their folder can be read.
    """
    found: dict[str, NearStrategy] = {}
    for steps, place in enumerate((".", "..", "../..")):
        for folder in _list_places(Path(os.path.normpath(f"{root}/{place}"))):
            alike: dict[str, list[str]] = {}
            for path in list_readable(folder):
                if path.suffix in SUFFIXES and is_file(path):
                    alike.setdefault(without_numbers(path.name), []).append(str(path))
            near = (it for paths in alike.values() for it in _read_near(folder, paths, steps))
            for strategy in near:
                found.setdefault(strategy.path, strategy)
    return [*found.values()]


def _read_near(folder: Path, paths: Sequence[str], steps: int) -> Iterator[NearStrategy]:
    """Yield the folder of strategy files with alike names if it is one strategy, else each file."""
    if glance(paths[0]) is None:
        return
    why_alone = ""
    if paths[1:]:
        try:
            whole = read_strategy(folder)
        except CkptToolError as error:
            why_alone = error.diagnostics[0].message
        else:
            ranks, names = len(whole.ranks), tuple(whole.layouts)
            yield NearStrategy(str(folder), len(whole.files), ranks, names, steps)
            return
    for path in paths:
        if (shown := glance(path)) is not None:
            yield NearStrategy(path, 1, *shown, steps, why_alone)


def option_of(paths: Sequence[str], flag: str = "-s") -> str:
    """Return the option that names strategy files together: their folder if it holds only these."""
    folder = Path(paths[0]).parent
    is_all = sorted(find_strategy_files(folder).files) == sorted(map(Path, paths))
    return " ".join(f"{flag} {quote(path)}" for path in ([str(folder)] if is_all else paths))


def _list_places(folder: Path, depth: int = 2) -> Iterator[Path]:
    yield folder
    for path in list_readable(folder) if depth else ():
        if _FOLDER.fullmatch(path.name) and is_folder(path):
            yield from _list_places(path, depth - 1)
