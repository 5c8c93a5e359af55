"""Catalog + strategies + target -> plan; what does not fit together is one error."""

from __future__ import annotations

from collections.abc import Iterator

from ckpttool.errors import CkptToolError, raise_all
from ckpttool.model.catalog import Catalog, format_ranks
from ckpttool.model.findings import Finding, plan_error
from ckpttool.model.gradients import Gradients
from ckpttool.model.layout import Layout, fold_layout
from ckpttool.model.losses import notes_of_scan
from ckpttool.model.maps import map_of
from ckpttool.model.notes import Note
from ckpttool.model.plan import NotListed, Plan, Target, Transfer
from ckpttool.model.source import Source
from ckpttool.model.sources import (
    Agreement,
    Sources,
    find_sources,
)
from ckpttool.model.states import (
    Owners,
    follows_in_full,
    owners_of_full,
    state_layouts,
    target_layouts,
)
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
    transfers, not_listed = _find_transfers(sources, target, strategy)
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
    return Plan(catalog, target, tuple(transfers), notes, not_listed)


def _find_transfers(
    sources: Sources, target: Target, strategy: Strategy | None
) -> tuple[list[Transfer], NotListed]:
    """A transfer for every source that is written, and what the target does not list.

    What does not fit is added to the problems of ``sources``.
    """
    transfers: list[Transfer] = []
    fitting = _Fitting(sources, target, strategy)
    for source in sources.found:
        name, shape = source.meta.name, source.meta.shape
        layouts = fitting.layouts(source)
        if layouts:
            layouts = tuple(_folded(layout, shape) for layout in layouts)
            reasons = {_why_not_target(layout, shape) for layout in layouts} - {None}
            where = target.strategy.origin if target.strategy else ""
            sources.problems += [
                Finding("target", f"{name}: target {where}: {reason}", tensor=name)
                for reason in sorted(map(str, reasons))
            ]
            if reasons:
                continue
        elif layouts is not None:
            layouts = _everywhere(source, target.ranks)
        if layouts:
            transfers.append(Transfer(source, layouts))
    if target.strategy is not None:
        _compare_names(sources, target.strategy)
        sources.notes += [*fitting.notes(), *fitting.gradients.notes()]
    turned = {source.meta.name for source in sources.found if source.rank_cycle is not None}
    turned -= fitting.not_listed.dropped.keys()
    nowhere = sorted(turned - {transfer.source.meta.name for transfer in transfers})
    if nowhere:
        text = "dropped, being only on source ranks whose turn does not come"
        names = f"{count(len(nowhere), 'parameter')}: {shorten(nowhere)}"
        sources.notes.append(Note("dropped", f"{text}: {names}"))
    return transfers, fitting.not_listed


class _Fitting:
    """What a target makes of sources.

    What its strategy does not list is decided by names and full shapes alone, so that it does not
    matter whether the source is merged or spread over ranks.
    """

    def __init__(self, sources: Sources, target: Target, src_strategy: Strategy | None) -> None:
        self.target = target
        self.src_strategy = src_strategy
        self.metas = {source.meta.name: source.meta for source in sources.found}
        self.owners: Owners = {}
        if target.strategy is not None:
            self.owners = owners_of_full(target.strategy.layouts, self.metas)
        self.recut: list[str] = []
        self.gradients = Gradients()
        self.not_listed = NotListed()

    def layouts(self, source: Source) -> tuple[Layout, ...] | None:
        """The layouts of a source in the target, none if it is whole; None if it is left out."""
        target, strategy, name = self.target, self.target.strategy, source.meta.name
        if strategy is None or source.meta.text is not None:
            return ()
        if name in strategy.layouts:
            return () if source.rank_cycle is not None else self._listed(source, strategy)
        if strategy.replicates_rest:
            return ()
        is_state = source.rank_cycle is None and follows_in_full(name, self.owners, self.metas)
        layouts = state_layouts(strategy, name, self.owners) if is_state else ()
        if layouts and target.not_in_target == "follow":
            self.not_listed.followed[name] = source.meta
            return layouts
        if source.meta.is_single and map_of(name) is None:
            return ()
        if target.not_in_target == "drop":
            self.not_listed.dropped[name] = source.meta
            return None
        self.not_listed.full[name] = source.meta
        return ()

    def _listed(self, source: Source, strategy: Strategy) -> tuple[Layout, ...]:
        """The layouts of a source that the strategy lists, corrected."""
        name = source.meta.name
        layouts = target_layouts(strategy, name, self.owners)
        if [layout.parts for layout in strategy.layouts[name]] != [one.parts for one in layouts]:
            self.recut.append(name)
        return self.gradients.uncut(source, self.src_strategy, layouts)

    def notes(self) -> Iterator[Note]:
        """What is to be told of it."""
        if self.recut:
            text = "cut for the target like their parameters, whose optimizer shard their own "
            text += f"entries lack: {count(len(self.recut), 'optimizer state')}"
            yield Note("corrected", f"{text}: {shorten(self.recut)}")
        names = [f"{name} (as {self.owners[name]})" for name in self.not_listed.followed]
        if names:
            text = "not in the target strategy, cut like the parameter: "
            text += f"{count(len(names), 'optimizer state')}: {shorten(names)}"
            yield Note("follows", text)
        for kind, text, found in (
            ("undivided", "written undivided to every rank", self.not_listed.full),
            ("dropped", "left out", self.not_listed.dropped),
        ):
            if found:
                text = f"not in the target strategy, {text}: {count(len(found), 'parameter')}"
                yield Note(kind, f"{text}: {shorten(found)}")


def _folded(layout: Layout, shape: tuple[int, ...]) -> Layout:
    """The layout for a full tensor of ``shape``, which tells how to fold an expanded one."""
    ways = fold_layout(layout, len(shape), lambda way: way.full_shape == shape)
    return ways[0] if len(ways) == 1 else layout


def _why_not_target(layout: Layout, shape: tuple[int, ...]) -> str | None:
    """Why a full tensor of ``shape`` cannot be cut for a target, or None if it can."""
    if not layout.has_boxes:
        return f"field-sliced ({layout.fields} fields), which can be merged but not be cut"
    return layout.why_not(shape)


def _everywhere(source: Source, ranks: int) -> tuple[Layout, ...]:
    """Layouts that give the whole tensor to every target rank, or to those whose turn it is."""
    ndim = len(source.meta.shape)
    if source.rank_cycle is None:
        return (Layout.undivided(ndim, ranks),)
    first, step = source.rank_cycle
    return tuple(Layout.undivided(ndim, 1, rank) for rank in range(first, ranks, step))


def _compare_names(sources: Sources, strategy: Strategy) -> None:
    """Tell what the target alone lists; that nothing is in common is a problem."""
    names = {source.meta.name for source in sources.found}
    has_other = bool(strategy.layouts) and not names & set(strategy.layouts)
    if names and has_other and not sources.problems:
        text = (
            f"{strategy.origin}: no parameter in common with the source: the strategy lists "
            f"{shorten(strategy.layouts, 3)}, the source holds {shorten(sorted(names), 3)}; "
            "is it the strategy of this model?"
        )
        sources.problems.append(Finding("target", text))
    absent = [name for name in strategy.layouts if name not in names]
    if absent:
        text = f"in the target strategy only: {count(len(absent), 'parameter')}"
        sources.notes.append(Note("absent", f"{text}: {shorten(absent)}"))
