"""What the manifest of a folder of outputs says of its checkpoint: ranks, strategy, old names.

A manifest names the ranks that it was written for, if not for all (--rank).  It names the strategy
of the outputs, and the names that tensors had before they were renamed.  A manifest counts for the
files that it lists.  `ckpttool.checks.manifest` reports one that cannot be read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from ckpttool.formats.local import is_file
from ckpttool.model.catalog import Catalog
from ckpttool.model.manifest import MANIFEST
from ckpttool.model.strategy import Strategy
from ckpttool.problems import Diagnostic, FormatError
from ckpttool.records import replace
from ckpttool.transaction.manifest import ManifestFile
from ckpttool.transaction.strategies import RecordedStrategy
from ckpttool.wording import count, format_ranks, shorten

if TYPE_CHECKING:
    from ckpttool.model.layout_difference import Kind


def limit_to_written_ranks(catalog: Catalog, strategy: Strategy | None) -> Catalog:
    """Limit a catalog to the ranks that its manifest lists (--rank), with a note on the others.

    For inspect and verify, which expect no files of other ranks.
    """
    written = _written_ranks(catalog, strategy)
    if written is None:
        return catalog
    ranks, note = written
    others = sorted(_expected_ranks(catalog, strategy) - ranks)
    note = replace(note, facts=f"{format_ranks(others)}: not expected")
    return replace(catalog, expected_ranks=ranks, diagnostics=(*catalog.diagnostics, note))


def note_written_ranks(catalog: Catalog, strategy: Strategy) -> Catalog:
    """Add a note on the ranks that the manifest lists (--rank), if these are not all.

    For conversions, which need all ranks and report those that are missing.
    """
    written = _written_ranks(catalog, strategy)
    if written is None:
        return catalog
    return replace(catalog, diagnostics=(*catalog.diagnostics, written[1]))


def miss_listed_ranks(catalog: Catalog) -> Catalog:
    """Return the catalog that misses the ranks of its manifest without a file, and no others.

    For who writes each file again: without a strategy, nothing else tells which were the last.
    `ckpttool.checks.manifest.check_source` reports a manifest that cannot be read.
    """
    path = Path(catalog.root) / MANIFEST
    if not catalog.needs_strategy or not is_file(path):
        return catalog
    catalog = limit_to_written_ranks(catalog, None)
    try:
        outputs = ManifestFile.read(path).manifest().outputs
    except FormatError:
        return catalog
    listed = {os.path.normpath(path.parent / output.path) for output in outputs}
    known = {*catalog.files, *catalog.damaged, *catalog.missing_ranks}
    lost = tuple(sorted({output.rank for output in outputs} - known))
    if not lost or not listed.issuperset(map(os.path.normpath, catalog.paths)):
        return catalog  # of another set than the files
    one = Diagnostic("missing_rank", f"listed in {path}", ranks=lost)
    return replace(catalog, diagnostics=(*catalog.diagnostics, one))


def is_recorded(catalog: Catalog, strategy: Strategy) -> bool:
    """Return whether a manifest lists all these files, and names this strategy or its equal.

    `ckpttool.checks.manifest.check_set` reports a manifest that cannot be read.
    """
    path = Path(catalog.root) / MANIFEST
    if not strategy.files or not is_file(path):
        return False
    try:
        manifest = ManifestFile.read(path)
        recorded = RecordedStrategy.of(manifest)
        if recorded is None or not _lists_all(manifest, catalog):
            return False
        is_it = recorded.is_of(strategy.files)
        return is_it or _is_equal(_compare_with_named(catalog, strategy, manifest, recorded))
    except FormatError:
        return False


def other_strategy(manifest: ManifestFile, strategy: Strategy) -> RecordedStrategy | None:
    """Return the strategy that a manifest names, if it is another than the given one."""
    recorded = RecordedStrategy.of(manifest)
    if recorded is None or not strategy.files or recorded.is_of(strategy.files):
        return None
    return recorded


def as_recorded(catalog: Catalog, strategy: Strategy, option: str) -> Strategy:
    """Return the strategy with the names that the manifest says its tensors got, and notes.

    There is a note, too, if the manifest names another strategy, or cannot be read.
    """
    path = Path(catalog.root) / MANIFEST
    if not strategy.files or not is_file(path):
        return strategy
    notes: list[Diagnostic] = []
    try:
        manifest = ManifestFile.read(path)
        if (other := other_strategy(manifest, strategy)) is not None:
            notes += _note_other(catalog, strategy, (manifest, other), option)
        called = _old_names(strategy, manifest.provenance().renamed)
        if read := [f"{old} as {new}" for new, old in called.items() if old in strategy.layouts]:
            text = "the strategy has the old names, read as the new ones"
            facts = f"{shorten(read, 2)}, as {path} says"
            notes.append(Diagnostic("corrected", text, facts=facts, where=strategy.origin))
            strategy = strategy.with_names(called)
    except FormatError as error:
        (one,) = error.diagnostics
        facts = f"the manifest cannot show whether {strategy.origin} is its strategy"
        notes.append(replace(one, code="other_strategy", facts=facts))
    return replace(strategy, notes=(*strategy.notes, *notes))


def without_manifest(strategy: Strategy) -> Strategy:
    """Return a strategy without the note that the manifest names another one."""
    other = noted_other_strategy(strategy)
    return replace(strategy, notes=tuple(one for one in strategy.notes if one is not other))


def recorded_files(catalog: Catalog) -> tuple[str, ...]:
    """Return the files of the strategy that the manifest names for all files of a checkpoint.

    The result is empty if they are not there, or if tensors were renamed: the strategy has the old
    names.
    """
    path = Path(catalog.root) / MANIFEST
    if not catalog.needs_strategy or not is_file(path):
        return ()
    try:
        manifest = ManifestFile.read(path)
        named = RecordedStrategy.of(manifest)
        if named is None or manifest.provenance().renamed or not _lists_all(manifest, catalog):
            return ()
    except FormatError:
        return ()  # `ckpttool.checks.manifest.check_source` reports it
    return named.find()


def _note_other(
    catalog: Catalog, strategy: Strategy, named: tuple[ManifestFile, RecordedStrategy], option: str
) -> Iterator[Diagnostic]:
    """Yield that a manifest names another strategy; nothing if that describes the same slices.

    It is an error if the named strategy is there and shards a tensor otherwise.
    """
    _, other = named
    kinds = _compare_with_named(catalog, strategy, *named)
    if _is_equal(kinds):
        return
    found = other.find()
    options = " ".join(f"{option} {quote(name)}" for name in found) or f"{option} STRATEGY"
    note = Diagnostic(
        "other_strategy",
        f"{strategy.origin_is} not the strategy of {catalog.root}, which was written for {other}",
        hint=f"{options}; `ckpttool help other_strategy` explains",
        facts="" if found else other.why_not_found,
        path=strategy.files[0],
    )
    unlike = [name for name, kind in (kinds or {}).items() if kind in _DECISIVE]
    if unlike:
        facts = f"it shards {count(len(unlike), 'tensor')} otherwise: {shorten(unlike, 3)}"
        note = replace(note, code="strategy", facts=facts)
    yield note


# What makes other tensors of the same slices.  A shard may be hidden, or follow from a parameter.
_DECISIVE = ("stages", "slices", "shape")


def _compare_with_named(
    catalog: Catalog, strategy: Strategy, manifest: ManifestFile, named: RecordedStrategy
) -> dict[str, Kind | None] | None:
    """Return what differs from the strategy that a manifest names, for each tensor.

    None if the files are not those of the manifest, or that strategy is not there.
    """
    # Imported late, as most checkpoints have no manifest.
    from ckpttool.model.layout_difference import kind_of_difference, layouts_of_name
    from ckpttool.strategy_files.reader import read_strategy

    if not (found := named.find()) or not _lists_all(manifest, catalog):
        return None
    renamed = manifest.provenance().renamed
    both = [one.with_names(_old_names(one, renamed)) for one in (strategy, read_strategy(found))]
    return {
        name: kind_of_difference(*layouts_of_name(name, *both))
        for name in catalog.metas
        if any(one.has_entry(name) for one in both)
    }


def _is_equal(kinds: Mapping[str, Kind | None] | None) -> bool:
    """Return whether two strategies were compared and no tensor differs."""
    return kinds is not None and not any(kinds.values())


def _lists_all(manifest: ManifestFile, catalog: Catalog) -> bool:
    """Return whether a manifest lists all files of a checkpoint."""
    folder = manifest.path.parent
    listed = {os.path.normpath(folder / one.path) for one in manifest.outputs()}
    return listed.issuperset(map(os.path.normpath, catalog.paths))


def _old_names(strategy: Strategy, renamed: Mapping[str, str]) -> Mapping[str, str]:
    """Return the new names that the strategy has by the old ones only, with these.

    ``renamed`` has new and old names of what was written; a state that was not follows.
    """
    new_of = {old: new for new, old in renamed.items()}
    for state, parameter in strategy.listed_states.items():
        if parameter in new_of:
            new_of.setdefault(state, state.removesuffix(parameter) + new_of[parameter])
    has_new = strategy.new_names_in(new_of)
    return {new: old for old, new in new_of.items() if old not in has_new}


def noted_other_strategy(strategy: Strategy) -> Diagnostic | None:
    """Return what is noted of the strategy that the manifest names, if it is another.

    The code is ``strategy`` if it is known to shard otherwise.  A note on a manifest that cannot be
    read has the place of that manifest.
    """
    noted = (one for one in strategy.notes if one.code in ("other_strategy", "strategy"))
    return next((one for one in noted if one.path in strategy.files), None)


def _expected_ranks(catalog: Catalog, strategy: Strategy | None) -> set[int]:
    """Return the ranks of the strategy, and those that the scan found missing."""
    return {*(strategy.ranks if strategy is not None else ()), *catalog.missing_ranks}


def _written_ranks(
    catalog: Catalog, strategy: Strategy | None
) -> tuple[frozenset[int], Diagnostic] | None:
    """Return the ranks that a manifest lists and a note on them; None for all ranks.

    `ckpttool.checks.manifest.check_set` reports a manifest that cannot be read.
    """
    path = Path(catalog.root) / MANIFEST
    found = catalog.files.keys() | catalog.damaged.keys()
    expected = _expected_ranks(catalog, strategy)
    if catalog.expected_ranks is not None or expected <= found or not is_file(path):
        return None
    try:
        manifest = ManifestFile.read(path)
        if strategy is not None and other_strategy(manifest, strategy):
            return None  # its ranks are others than those of this one
        outputs = manifest.manifest().outputs
    except FormatError:
        return None
    ranks = frozenset({*found, *(output.rank for output in outputs)})
    if expected <= ranks or any(Path(o.path).parent != Path(f"rank_{o.rank}") for o in outputs):
        return None
    text = f"written only for {format_ranks([output.rank for output in outputs])}"
    return ranks, Diagnostic("part", text, where=str(path))
