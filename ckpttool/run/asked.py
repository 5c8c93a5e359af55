"""For which ranks and by which strategy a folder was written, as its manifest tells."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

from ckpttool.errors import FormatError
from ckpttool.formats.reading import read_file
from ckpttool.model.catalog import Catalog, RankCatalog, format_ranks
from ckpttool.model.manifest import MANIFEST
from ckpttool.model.notes import Note
from ckpttool.model.strategy import Strategy
from ckpttool.transaction.manifest import ManifestFile


def as_asked(catalog: Catalog, strategy: Strategy | None) -> tuple[Catalog, list[Note]]:
    """The same, with the ranks that a set was written for, if not for all (--rank), and a note.

    For those who look at what there is, and do not want all of it.
    """
    asked, told = _asked_ranks(catalog, strategy)
    if asked is None:
        return catalog, []
    others = format_ranks(sorted(_expected(catalog, strategy) - asked))
    text = f"{others}: not looked for, since {told}"
    assert isinstance(catalog, RankCatalog)
    return replace(catalog, expected_ranks=asked), [Note("part", text)]


def note_asked(catalog: Catalog, strategy: Strategy | None) -> Catalog:
    """The same with a note of the ranks that a set was written for, if not for all (--rank).

    For those who want all of it, and name what is missing.
    """
    asked, told = _asked_ranks(catalog, strategy)
    if asked is None:
        return catalog
    return replace(catalog, notes=(*catalog.notes, Note("part", told)))


def _expected(catalog: Catalog, strategy: Strategy | None) -> set[int]:
    """Ranks that should have a file."""
    has_layouts = strategy is not None and strategy.layouts
    missing = catalog.missing_ranks if isinstance(catalog, RankCatalog) else ()
    return {*(strategy.ranks if strategy is not None and has_layouts else ()), *missing}


def _asked_ranks(catalog: Catalog, strategy: Strategy | None) -> tuple[frozenset[int] | None, str]:
    """The ranks that a set was written for, and how that is known; None if for all.

    Its manifest, which comes when the set is complete, lists these alone.  Of one that cannot be
    used `check_manifest` says so.
    """
    path = Path(catalog.root) / MANIFEST
    there = catalog.files.keys() | catalog.damaged.keys()
    expected = _expected(catalog, strategy)
    if not isinstance(catalog, RankCatalog) or expected <= there or not path.is_file():
        return None, ""
    try:
        outputs = ManifestFile.read(path).manifest().outputs
    except FormatError:
        return None, ""
    asked = frozenset({*there, *(output.rank for output in outputs)})
    if expected <= asked or any(Path(o.path).parent != Path(f"rank_{o.rank}") for o in outputs):
        return None, ""
    written = format_ranks([output.rank for output in outputs])
    return asked, f"{path} says that this was written for {written} alone (--rank)"


def strategy_notes(catalog: Catalog, strategy: Strategy) -> Iterator[Note]:
    """That the strategy is another than that by which a set was written, as its manifest tells.

    A manifest names the strategies of the target last.  Of one that cannot be used that is said.
    """
    path = Path(catalog.root) / MANIFEST
    if not strategy.files or not path.is_file():
        return
    given = {sha256(read_file(name)).hexdigest() for name in strategy.files}
    try:
        provenance = ManifestFile.read(path).head.provenance()
        recorded = provenance.strategies[-len(strategy.files) :]
        same = [recorded, provenance.dst_strategies]
        if recorded and given not in [{one.sha256 for one in files} for files in same]:
            text = f"{path} says that this was written by {recorded[-1].path}, and "
            text += f"{strategy.origin} is another file; if it does not say the same, what is read "
            text += "is wrong"
            yield Note("strategy", text, is_warning=True)
    except FormatError as error:
        text = f"{error}; so it does not tell whether {strategy.origin} is what this was written by"
        yield Note("strategy", text, is_warning=True)
