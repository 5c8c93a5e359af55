"""Facts from the manifest of a folder of outputs: ranks, layouts, source names.

A manifest names the ranks that it was written for, if not for all (--rank).  It has the layouts of
the outputs under the names that they have.  Where these were not known, it has the names that the
strategy of the source uses: a strategy is read through them, never through rules.  A manifest
counts for the files that it lists.  `ckpttool.checks.manifest_hashes` reports a damaged one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ckpttool.formats.local import is_file
from ckpttool.model.catalog import Catalog
from ckpttool.model.manifest import MANIFEST
from ckpttool.model.plan import Kept
from ckpttool.model.strategy import Strategy
from ckpttool.problems import Diagnostic, FormatError, PlanError
from ckpttool.transaction.sealed_files import ManifestFile
from ckpttool.transaction.set_strategy import RecordedSet
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
    missing = sorted(_expected_ranks(catalog, strategy) - ranks)
    note = replace(note, facts=f"{format_ranks(missing)}: not expected")
    return replace(catalog, expected_ranks=ranks, diagnostics=(*catalog.diagnostics, note))


def note_written_ranks(catalog: Catalog, strategy: Strategy) -> Catalog:
    """Add a note on the ranks that the manifest lists (--rank), if these are not all.

    For conversions, which need all ranks and report those that are missing.
    """
    written = _written_ranks(catalog, strategy)
    if written is None:
        return catalog
    return replace(catalog, diagnostics=(*catalog.diagnostics, written[1]))


def with_missing_ranks(catalog: Catalog) -> Catalog:
    """Return the catalog whose missing ranks are those of its manifest without a file.

    For commands that write each file again: without a strategy, only the manifest lists the ranks
    after the last file.  `ckpttool.checks.manifest_hashes.check_source` reports a manifest that
    cannot be read.
    """
    path = Path(catalog.root) / MANIFEST
    if not catalog.needs_strategy or not is_file(path):
        return catalog
    catalog = limit_to_written_ranks(catalog, None)
    try:
        outputs = [*ManifestFile.read(path).planned()]
    except FormatError:
        return catalog
    paths = {os.path.normpath(path.parent / output.path) for output in outputs}
    known = {*catalog.files, *catalog.damaged, *catalog.missing_ranks}
    lost = tuple(sorted({output.rank for output in outputs} - known))
    if not lost or not paths.issuperset(map(os.path.normpath, catalog.paths)):
        return catalog  # of another set than the files
    note = Diagnostic("missing_rank", f"listed in {path}", ranks=lost)
    return replace(catalog, diagnostics=(*catalog.diagnostics, note))


def read_kept(catalog: Catalog, is_ignored: bool) -> tuple[Kept, PlanError | None]:
    """Return what the manifest of a source says for files that are written again.

    There is an error if it does not say which names strategies have, and is not ``is_ignored``.
    """
    try:
        recorded = RecordedSet.read(catalog.root)
    except FormatError:
        return Kept(), None  # `ckpttool.checks.manifest_hashes.check_source` reports it
    if recorded is None:
        return Kept(names={}), None
    if recorded.provenance.has_unknown_names:
        hint = "write the set again from its source, or --ignore-manifest"
        problem = recorded.unknown_names(recorded.provenance.renamed, hint)
        return Kept(), None if is_ignored else PlanError([problem])
    names = recorded.provenance.source_names or {}
    if not recorded.lists(catalog.paths):
        return Kept(names=names), None
    return Kept(recorded.written, names, recorded.find_files()), None


def as_manifest_says(
    catalog: Catalog, strategy: Strategy, option: str, is_ignored: bool = False
) -> Strategy:
    """Return the strategy as the manifest of the files says how to read it, with notes.

    If the manifest has the layouts of the tensors, these count, and the strategy is compared with
    them.  If it has names, the strategy is read through them.  There is a note if the manifest
    names another strategy, or cannot be read.  With ``is_ignored`` only the names count.
    """
    if not strategy.files:
        return strategy
    try:
        recorded = RecordedSet.read(catalog.root)
        is_set = recorded is not None and recorded.lists(catalog.paths)
    except FormatError as error:
        (problem,) = error.diagnostics
        facts = f"the manifest cannot show whether {strategy.origin} is its strategy"
        note = replace(problem, code="other_strategy", facts=facts)
        return strategy if is_ignored else replace(strategy, notes=(*strategy.notes, note))
    if recorded is None:
        return strategy
    if strategy.is_as_written:
        return replace(strategy, is_recorded=is_set, is_as_written=is_set)
    strategy = _with_source_names(catalog, strategy, recorded)
    return strategy if is_ignored else _compared(catalog, strategy, recorded, is_set, option)


def _compared(
    catalog: Catalog, given: Strategy, recorded: RecordedSet, is_set: bool, option: str
) -> Strategy:
    """Return how to read a set beside which a strategy is given, with a note if it is another.

    It is an error if that shards a tensor otherwise, or has names that may be mistaken.
    """
    renamed, other = recorded.provenance.renamed, recorded.other_than(given)
    is_named = recorded.named is not None and other is None
    if recorded.provenance.has_unknown_names:
        old_of = {new: old for new, old in renamed.items() if given.has_entry(old)}
        problem = recorded.unknown_names(old_of, f"{option} with the new names only")
        notes = [replace(problem, path=given.files[0])] if old_of else []
        return replace(given, is_recorded=is_set and is_named, notes=(*given.notes, *notes))
    files = () if other is None else other.find()
    hint = " ".join(f"{option} {quote(name)}" for name in files) or f"{option} STRATEGY"
    read, against = given, recorded.written if is_set else None
    if against is not None:
        read = replace(against, files=given.files, notes=given.notes)
        hint = f"the same command without {option}"
    elif other is None:
        return replace(given, is_recorded=is_set and is_named)
    elif is_set and files:
        from ckpttool.strategy_files.reader import read_strategy  # late, as few sets need it

        against = _with_source_names(catalog, read_strategy(files), recorded)
    is_compared = renamed or not is_named
    kinds = _compare(catalog, given, against) if against and is_compared else {}
    if not any(kinds.values()) and (is_named or kinds):
        return replace(read, is_recorded=True)
    message = f"{given.origin_is} not the strategy of {catalog.root}"
    message += "" if other is None else f", which was written for {other}"
    hint += "; `ckpttool help other_strategy` explains"
    facts = other.why_not_found if other and not (files or against) else ""
    note = Diagnostic("other_strategy", message, hint=hint, facts=facts, path=given.files[0])
    if unlike := [name for name, kind in kinds.items() if kind in _DECISIVE]:
        facts = f"it shards {count(len(unlike), 'tensor')} otherwise: {shorten(unlike, 3)}"
        note, read = replace(note, code="strategy", facts=facts), given
    return replace(read, notes=(*given.notes, note))


def with_names_of_files(catalog: Catalog, target: Strategy) -> Strategy:
    """Return the strategy of a target with the names of the files, as their manifest has both.

    `ckpttool.checks.manifest_hashes.check_source` reports a manifest that cannot be read.
    """
    try:
        recorded = RecordedSet.read(catalog.root)
    except FormatError:
        return target
    return target if recorded is None else _with_source_names(catalog, target, recorded)


def _with_source_names(catalog: Catalog, strategy: Strategy, recorded: RecordedSet) -> Strategy:
    """Return the strategy with the names of the files, unless it has these; as a manifest says."""
    names = recorded.provenance.source_names or {}
    lists_old = any(map(strategy.has_entry, names.values()))
    if not lists_old and any(map(strategy.has_entry, names)):
        return strategy
    called, new_of = dict(names), {old: new for new, old in names.items()}
    for state, parameter in strategy.listed_states.items():  # those that no file has
        if parameter in new_of and state not in new_of and state not in catalog.holders:
            called.setdefault(state.removesuffix(parameter) + new_of[parameter], state)
    read = [f"{old} as {new}" for new, old in called.items() if strategy.has_entry(old)]
    if not read:
        return strategy
    message = "the strategy has the old names, read as the new ones"
    facts = f"{shorten(read, 2)}, as {recorded.manifest.path} says"
    note = Diagnostic("corrected", message, facts=facts, where=strategy.origin)
    return replace(strategy.with_names(called), notes=(*strategy.notes, note))


# What makes other tensors of the same slices.  A shard may be hidden, or follow from a parameter.
_DECISIVE = ("stages", "slices", "shape")


def _compare(catalog: Catalog, *both: Strategy) -> Mapping[str, Kind | None]:
    """Return what differs between two strategies, for each tensor that both shard."""
    # Imported late, as most checkpoints have no manifest.
    from ckpttool.checkpoint.fit_strategy import fit_to_slices
    from ckpttool.checkpoint.optimizer_state import correct_layouts
    from ckpttool.model.layout_difference import kind_of_difference, layouts_of_rest

    fitted = [fit_to_slices(catalog, strategy)[0] for strategy in both]
    sides = [(fit, catalog.match_states(fit.layouts)) for fit in fitted]
    kinds = {}
    for name, meta in catalog.metas.items():
        a, b = (
            correct_layouts(catalog, fit, name, states)
            if name in fit.layouts
            else layouts_of_rest(fit, len(meta.shape))
            for fit, states in sides
        )
        if a and b:
            kinds[name] = kind_of_difference(a, b)
    return kinds


def noted_other_strategy(strategy: Strategy) -> Diagnostic | None:
    """Return what is noted of the strategy that the manifest names, if it is another.

    The code is ``strategy`` if it is known to shard otherwise.  A note on a manifest that cannot be
    read has the place of that manifest.
    """
    noted = (note for note in strategy.notes if note.code in ("other_strategy", "strategy"))
    return next((note for note in noted if note.path in strategy.files), None)


def _expected_ranks(catalog: Catalog, strategy: Strategy | None) -> set[int]:
    return {*(strategy.ranks if strategy is not None else ()), *catalog.missing_ranks}


def _written_ranks(
    catalog: Catalog, strategy: Strategy | None
) -> tuple[frozenset[int], Diagnostic] | None:
    """Return the ranks that a manifest lists and a note on them; None for all ranks.

    `ckpttool.checks.manifest_hashes.check_set` reports a manifest that cannot be read.
    """
    path = Path(catalog.root) / MANIFEST
    there = catalog.files.keys() | catalog.damaged.keys()
    expected = _expected_ranks(catalog, strategy)
    if catalog.expected_ranks is not None or expected <= there:
        return None
    try:
        recorded = RecordedSet.read(catalog.root)
        if recorded is None or (strategy is not None and recorded.other_than(strategy)):
            return None  # its ranks are others than those of this one
        outputs = [*recorded.manifest.planned()]
    except FormatError:
        return None
    ranks = frozenset({*there, *(output.rank for output in outputs)})
    if expected <= ranks or any(Path(o.path).parent != Path(f"rank_{o.rank}") for o in outputs):
        return None
    message = f"written only for {format_ranks([output.rank for output in outputs])}"
    return ranks, Diagnostic("part", message, where=str(path))
