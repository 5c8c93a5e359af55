"""The strategies that lie near a checkpoint, for a person who named none.

They are listed by name and number of ranks, and nothing is decided by it: one of them may be of
another run.  A file is read for the ranks of its first layout, and not resolved.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from shlex import quote

from msgspec import Struct

from ckpttool.formats.local import is_file, is_folder, list_readable
from ckpttool.model.catalog import Catalog
from ckpttool.problems import Diagnostic
from ckpttool.strategy_files.folders import SUFFIXES, without_numbers
from ckpttool.strategy_files.reader import Glance, glance
from ckpttool.wording import count, shorten

_FOLDER = re.compile(r"(\w+_)?(strategy|strategies|strategys)")


class NearStrategy(Struct, frozen=True):
    """A strategy file, or the folder of several whose names differ in numbers: of stages."""

    path: str
    files: int
    first: Glance  # of one file
    steps: int  # to it: 0 in the folder of the checkpoint, 1 beside that, 2 one folder up

    def may_be_of(self, catalog: Catalog) -> bool:
        """Return whether it has the number of ranks and some names of a checkpoint."""
        ranks, of_file = len(catalog.files) + len(catalog.damaged), self.first.ranks
        fits = of_file == ranks or (self.files > 1 and ranks % of_file == 0)
        return fits and any(name in catalog.holders for name in self.first.names)


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
        texts = (
            f"{it.path} ({of}{count(it.first.ranks, 'rank')})"
            for it, of in zip(near, files, strict=True)
        )
        facts = shorten(texts, 2)
        yield Diagnostic("strategy_file", message, hint=hint, facts=facts, where=catalog.root)


def find_near(root: str) -> list[NearStrategy]:
    """Return the strategies in a folder, beside it and one folder up, by their first layouts.

    The first of several files whose names differ in numbers stands for all.
    """
    found: dict[Path, NearStrategy] = {}
    for steps, place in enumerate((".", "..", "../..")):
        for folder in _list_places(Path(os.path.normpath(f"{root}/{place}"))):
            alike: dict[str, list[Path]] = {}
            for path in list_readable(folder):
                if path.suffix in SUFFIXES and is_file(path):
                    alike.setdefault(without_numbers(path.name), []).append(path)
            for paths in alike.values():
                if (first := glance(str(paths[0]))) is not None:
                    named = paths[0] if len(paths) == 1 else folder
                    found.setdefault(named, NearStrategy(str(named), len(paths), first, steps))
    return [*found.values()]


def _list_places(folder: Path, depth: int = 2) -> Iterator[Path]:
    yield folder
    for path in list_readable(folder) if depth else ():
        if _FOLDER.fullmatch(path.name) and is_folder(path):
            yield from _list_places(path, depth - 1)
