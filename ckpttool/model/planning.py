"""Catalog + strategies + target -> plan; what does not fit together is one error."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ckpttool.errors import CkptToolError, raise_all
from ckpttool.model.catalog import Catalog, format_ranks
from ckpttool.model.findings import Finding, plan_error
from ckpttool.model.folding import fold_layout
from ckpttool.model.gradients import Gradients
from ckpttool.model.layout import Layout
from ckpttool.model.losses import notes_of_scan
from ckpttool.model.notes import Note
from ckpttool.model.plan import Plan, Target, Transfer
from ckpttool.model.source import Source
from ckpttool.model.sources import (
    Agreement,
    Sources,
    find_sources,
)
from ckpttool.model.states import Owners, owners_of_full, target_layouts
from ckpttool.model.strategy import Strategy, count, shorten
from ckpttool.model.undivided import undivided_sources
from ckpttool.model.unlisted import Unlisted


def make_plan(
    catalog: Catalog,
    strategy: Strategy | None,
    target: Target,
    agreement: Agreement,
    unlisted: Unlisted | None = None,
) -> Plan:
    """The plan that brings a checkpoint into the target's layout.

    Parameters
    ----------
    catalog
        What is on disk.
    strategy
        Layouts of the source; None if it holds everything undivided.
    target
        What is to be written.
    agreement
        For each of `names_to_compare`, the ranks grouped by equal content.
    unlisted
        See `find_sources`.

    Raises
    ------
    FormatError, PlanError
        See `plan_from`.
    """
    if strategy is None:
        sources = undivided_sources(catalog, unlisted)
    else:
        sources = find_sources(catalog, strategy, agreement, unlisted)
    return plan_from(catalog, strategy, target, sources)


def plan_from(
    catalog: Catalog, strategy: Strategy | None, target: Target, sources: Sources
) -> Plan:
    """The plan that brings sources into the target's layout.

    Parameters
    ----------
    catalog, strategy
        What is on disk, and the layouts that the sources were found with.
    target
        What is to be written.
    sources
        What does not fit the target is added to their problems, what is to be told to their notes.

    Raises
    ------
    FormatError
        Files of the source are damaged, and replicas do not replace them.
    PlanError
        Ranks or slices are missing, shapes or element types disagree, a parameter does not fit the
        target's layout: all that was found, in one error.
    """
    transfers = _find_transfers(sources, target, strategy)
    outside = [rank for rank in target.paths if not 0 <= rank < target.ranks]
    if outside:
        text = f"{format_ranks(outside)}: not in the target, which has "
        text += f"{target.ranks} ranks (0-{target.ranks - 1})"
        sources.problems.append(Finding("target", text, ranks=tuple(outside)))
    if not transfers and not sources.problems and not sources.damage:
        text = f"{catalog.root}: nothing in it that could be written"
        sources.problems.append(Finding("missing", text))
    errors: list[CkptToolError] = [*sources.damage]
    if sources.problems:
        errors.append(plan_error(sources.problems))
    raise_all(errors)
    of_strategies = [
        note for one in (strategy, target.strategy) if one is not None for note in one.notes
    ]
    notes = (*notes_of_scan(catalog, strategy), *of_strategies, *sources.notes)
    return Plan(catalog, target, tuple(transfers), notes)


def _find_transfers(sources: Sources, target: Target, strategy: Strategy | None) -> list[Transfer]:
    """A transfer for every source; what does not fit is added to the problems of ``sources``."""
    transfers: list[Transfer] = []
    undivided: list[str] = []
    recut: list[str] = []
    gradients = Gradients()
    owners = _owners(sources, target.strategy)
    for source in sources.found:
        name, shape = source.meta.name, source.meta.shape
        layouts = _listed_layouts(source, target.strategy, owners, recut)
        layouts = gradients.uncut(source, strategy, layouts)
        if not layouts:
            layouts = _everywhere(source, target.ranks)
            was_cut = source.is_listed or source.follows is not None
            if target.strategy is not None and (
                was_cut or (strategy is None and math.prod(shape) > 1)
            ):
                undivided.append(name)
        else:
            layouts = tuple(_folded(layout, shape) for layout in layouts)
            reasons = {_why_not_target(layout, shape) for layout in layouts} - {None}
            where = target.strategy.origin if target.strategy else ""
            sources.problems += [
                Finding("target", f"{name}: target {where}: {reason}", tensor=name)
                for reason in sorted(map(str, reasons))
            ]
            if reasons:
                continue
        if layouts:
            transfers.append(Transfer(source, layouts))
    if target.strategy is not None:
        _compare_names(sources, target.strategy, undivided, recut)
        sources.notes += gradients.notes()
    turned = {source.meta.name for source in sources.found if source.turn is not None}
    nowhere = sorted(turned - {transfer.source.meta.name for transfer in transfers})
    if nowhere:
        text = "dropped, being only on source ranks whose turn does not come"
        names = f"{count(len(nowhere), 'parameter')}: {shorten(nowhere)}"
        sources.notes.append(Note("dropped", f"{text}: {names}"))
    return transfers


def _owners(sources: Sources, strategy: Strategy | None) -> Owners:
    """The parameter of each state that goes to the target: names and full shapes tell."""
    if strategy is None:
        return {}
    metas = {source.meta.name: source.meta for source in sources.found}
    return owners_of_full(strategy.layouts, metas)


def _listed_layouts(
    source: Source, strategy: Strategy | None, owners: Owners, recut: list[str]
) -> tuple[Layout, ...]:
    """What the target's strategy tells of a source, if anything.

    The name is added to ``recut`` if that is not what its own entry says.
    """
    if strategy is None or source.turn is not None or source.meta.text is not None:
        return ()
    name = source.meta.name
    layouts = target_layouts(strategy, name, source.follows is not None, owners)
    own = strategy.layouts.get(name, layouts)
    if [layout.parts for layout in own] != [layout.parts for layout in layouts]:
        recut.append(name)
    return layouts


def _folded(layout: Layout, shape: tuple[int, ...]) -> Layout:
    """The layout for a full tensor of ``shape``, which tells how to fold an expanded one."""
    ways = fold_layout(layout, len(shape), lambda way: way.full_shape == shape)
    return ways[0] if len(ways) == 1 else layout


def _why_not_target(layout: Layout, shape: tuple[int, ...]) -> str | None:
    """Why a full tensor of ``shape`` cannot be cut for a target, or None if it can."""
    if layout.fields > 1:
        return f"field-sliced ({layout.fields} fields), which can be merged but not be cut"
    return layout.why_not(shape)


def _everywhere(source: Source, ranks: int) -> tuple[Layout, ...]:
    """Layouts that give the whole tensor to every target rank, or to those whose turn it is."""
    ndim = len(source.meta.shape)
    if source.turn is None:
        return (Layout.undivided(ndim, ranks),)
    first, step = source.turn
    return tuple(Layout.undivided(ndim, 1, rank) for rank in range(first, ranks, step))


def _compare_names(
    sources: Sources, strategy: Strategy, undivided: Sequence[str], recut: Sequence[str]
) -> None:
    names = {source.meta.name for source in sources.found}
    has_other = bool(strategy.layouts) and not names & set(strategy.layouts)
    if names and has_other and not sources.problems:
        text = (
            f"{strategy.origin}: no parameter in common with the source: the strategy lists "
            f"{shorten(strategy.layouts, 3)}, the source holds {shorten(sorted(names), 3)}; "
            "is it the strategy of this model?"
        )
        sources.problems.append(Finding("target", text))
    if recut:
        text = "cut for the target like their parameters, whose optimizer shard their own entries "
        text += f"lack: {count(len(recut), 'optimizer state')}: {shorten(recut)}"
        sources.notes.append(Note("corrected", text))
    if undivided:
        sources.notes.append(
            Note(
                "undivided",
                "not in the target strategy, written undivided to every rank: "
                f"{count(len(undivided), 'parameter')}: {shorten(undivided)}",
            )
        )
    absent = [name for name in strategy.layouts if name not in names]
    if absent:
        text = f"in the target strategy only: {count(len(absent), 'parameter')}"
        sources.notes.append(Note("absent", f"{text}: {shorten(absent)}"))
