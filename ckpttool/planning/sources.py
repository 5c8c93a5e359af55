"""Full shape, layout and owners of every parameter: catalog + source strategy -> sources.

A source is a full tensor, the layout of its slices and the files that hold them.  A parameter in
the strategy has the layout that it lists.  Optimizer state that it omits has the layout of its
parameter.  Any other parameter is one full tensor if all ranks hold the same bytes.  If they
differ, the user has to choose.

A merged checkpoint holds full tensors, in one file or several.  One of several files may hold the
tensors that go to every rank unchanged.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from ckpttool.model.catalog import Catalog
from ckpttool.model.layout import Layout, ambiguity, fold_layout
from ckpttool.model.names import ParameterOfState, map_component_names, parse_name
from ckpttool.model.slicing import (
    FollowsParameter,
    LayoutSlicing,
    Listed,
    NotInStrategy,
    Origin,
    Source,
    described_state_shapes,
    follow,
    why_not_sliced,
)
from ckpttool.model.strategy import Merged, SelfDescribed, Sharding, Strategy
from ckpttool.model.tensors import TensorMeta
from ckpttool.planning.missing import (
    MissingSlices,
    find_missing_slices,
    hold_same_parameters,
    is_deduplicated,
    lacking_problems,
    missing_rank_problems,
    redundancy_note,
)
from ckpttool.planning.optimizer_state import (
    correct_layouts,
    followed_parameter,
    odd_state_shapes,
    state_layouts,
)
from ckpttool.planning.unlisted import (
    RANK_SPECIFIC_NAMES,
    DifferingNames,
    PartlyHeld,
    RankGroups,
    UnlistedChoice,
    decision_notes,
    find_partly_held,
    guessed_state_notes,
    handwritten_shape_problems,
    layout_notes,
    misplaced_notes,
    odd_state_problems,
    split_names,
    unlisted_problems,
)
from ckpttool.problems import Diagnostic, FormatError
from ckpttool.wording import count, format_ranks, shorten

_T = TypeVar("_T", bound=Hashable)


def infer_full_tensor(
    catalog: Catalog, layout: Layout, metas: Mapping[int, TensorMeta]
) -> tuple[Layout, TensorMeta] | Diagnostic:
    """Infer the full tensor from the slices of a stage, and fold its layout if it is expanded.

    Parameters
    ----------
    catalog
        The files, for messages.
    layout
        The layout in the strategy.
    metas
        Rank to slice, for the ranks of the stage that hold one: at least one, ascending.

    Returns
    -------
    tuple or Diagnostic
        The layout, folded if it was expanded, and the full tensor.  A problem if the slices do not
        fit the layout.
    """
    ranks = list(metas)
    shapes = group_by_meta(metas, lambda meta: meta.shape)
    name = metas[ranks[0]].name
    if len(shapes) > 1 and layout.has_equal_slices:
        return disagreement("shape", catalog, name, "slice shape", shapes)
    slice_shape = metas[ranks[0]].shape
    ways = fold_layout(layout, len(slice_shape), lambda way: way.fills(slice_shape))
    if len(ways) > 1:
        text = "the JSON strategy fits several full shapes"
        hint = "add its protobuf form or a hand-written one (-s MORE.yaml)"
        facts = ambiguity(layout, ways)
        return Diagnostic("shape", text, hint=hint, facts=facts, tensor=name, ranks=tuple(ranks))
    layout = ways[0] if ways else layout
    # A slice of a manual split may have a wrong number of axes.  The full shape follows from
    # another slice, so that the message below names the wrong one.
    ndim = len(layout.tensor_map)
    meta = next((metas[rank] for rank in ranks if len(metas[rank].shape) == ndim), metas[ranks[0]])
    full_meta = meta
    if len(meta.shape) == ndim:
        full_meta = meta.of_shape(layout.implied_shape(meta.shape))
    reason = layout.why_not(full_meta.shape) or why_not_sliced(meta, layout)
    if reason is not None:
        facts = f"{format_ranks(ranks)} hold slices of {meta.shape}; {reason}"
        return _unfit_slices(name, facts, ranks)
    wrong = {
        rank: f"rank {rank} ({catalog.files[rank].path}) has {metas[rank].shape}, expected {shape}"
        for rank in (() if layout.has_equal_slices else ranks)
        if metas[rank].shape != (shape := layout.slice_shape(rank, full_meta.shape))
    }
    if wrong:
        facts = f"manual split of {list(layout.rows)} rows; {shorten(wrong.values(), 3)}"
        return _unfit_slices(name, facts, list(wrong))
    return layout, full_meta


def _unfit_slices(name: str, facts: str, ranks: Sequence[int]) -> Diagnostic:
    """Return the problem of slices whose shapes are not those of a layout."""
    text = "the slices do not fit the strategy"
    hint = "the strategy of this run; `ckpttool help shape` explains"
    return Diagnostic("shape", text, hint=hint, facts=facts, tensor=name, ranks=tuple(ranks))


def disagreement(
    code: str, catalog: Catalog, name: str, what: str, groups: Mapping[_T, tuple[int, ...]]
) -> Diagnostic:
    """Return the problem of ranks that disagree on ``what`` a tensor is, the largest group last."""
    ordered = sorted(groups.items(), key=lambda item: (len(item[1]), -item[1][0]))
    parts = [
        f"{format_ranks(ranks)} ({catalog.files[ranks[0]].path}) {_has(ranks)} {value}"
        for value, ranks in ordered[:-1]
    ]
    value, most = ordered[-1]
    return Diagnostic(
        code,
        f"the {what} differs between ranks",
        hint=f"put back the files of one run and step; `ckpttool help {code}` explains",
        facts=f"{shorten(parts, 2)}; {format_ranks(most)} {_has(most)} {value}",
        tensor=name,
        ranks=tuple(sorted(rank for ranks in groups.values() for rank in ranks)),
    )


def _has(ranks: Sequence[int]) -> str:
    return "has" if len(ranks) == 1 else "have"


def group_by_meta(
    metas: Mapping[int, TensorMeta], key: Callable[[TensorMeta], _T]
) -> dict[_T, tuple[int, ...]]:
    """Group ranks by the ``key`` of their tensors, as `group_ranks` does.

    Ranks with equal headers share one object.  The key is computed for the few different objects,
    not for each of many ranks.
    """
    distinct = dict(zip(map(id, metas.values()), metas.values(), strict=True))
    keys = {identity: key(meta) for identity, meta in distinct.items()}
    if len(set(keys.values())) == 1:
        return {next(iter(keys.values())): tuple(metas)}
    return group_ranks(tuple(metas), lambda rank: keys[id(metas[rank])])


def group_ranks(ranks: Sequence[int], key: Callable[[int], _T]) -> dict[_T, tuple[int, ...]]:
    """Group ranks by ``key``, in the order of the first rank of each group."""
    groups: dict[_T, list[int]] = {}
    for rank in ranks:
        groups.setdefault(key(rank), []).append(rank)
    return {value: tuple(members) for value, members in groups.items()}


ContentGroups = Mapping[str, RankGroups]  # parameter to the groups of ranks with equal content


@dataclass(slots=True)
class Sources:
    """The sources of a checkpoint, as `find_sources` returns them.

    Attributes
    ----------
    found
        The sources, in the order of the files.
    problems, notes
        What is wrong, and what else the user should know.
    is_deduplicated
        Whether only one of the ranks with equal slices holds each slice.
    damage
        Errors of the damaged files that replicas do not replace.
    """

    found: list[Source] = field(default_factory=list)
    problems: list[Diagnostic] = field(default_factory=list)
    notes: list[Diagnostic] = field(default_factory=list)
    is_deduplicated: bool = False
    damage: list[FormatError] = field(default_factory=list)

    def add_missing(self, missing: MissingSlices) -> None:
        """Add the problems, notes and errors of missing slices."""
        self.problems += missing.problems
        self.notes += missing.notes
        self.damage += missing.damage


def content_decided_names(catalog: Catalog, sharding: Sharding) -> dict[str, str | None]:
    """Find the unlisted parameters whose headers are equal on several ranks, so contents decide.

    States of MindSpore's optimizers are left out, since their names identify them.

    Returns
    -------
    dict
        Name to the parameter whose state it is by name and shape, unless contents contradict it;
        None for any other tensor.
    """
    found: dict[str, str | None] = {}
    if isinstance(sharding, Merged):
        return found
    parameter_of_state = catalog.match_states(listed_names(catalog, sharding))
    for name, ranks in catalog.holders.items():
        if name in sharding.layouts:
            continue
        parameter = followed_parameter(catalog, sharding, name, ranks, parameter_of_state)
        described = _described_source(catalog, name, ranks, parameter_of_state)
        if described is not None:
            if described.parameter is None:
                continue
            parameter = described.parameter
        if parameter is not None and parse_name(name).parameter is not None:
            continue
        metas = {header[name].meta for header in catalog.headers.values() if name in header}
        if len(ranks) > 1 and len(metas) == 1 and next(iter(metas)).text is None:
            found[name] = parameter
    return found


def listed_names(catalog: Catalog, sharding: Sharding) -> Collection[str]:
    """Return the names whose slices the strategy or the checkpoint itself describes."""
    if catalog.description is not None:
        return catalog.description.tensors.keys()
    return sharding.layouts.keys()


def find_sources(
    catalog: Catalog,
    sharding: Sharding,
    content_groups: ContentGroups,
    unlisted: UnlistedChoice | None,
    running_statistics: Collection[str] = (),
) -> Sources:
    """Find the sources of all parameters of a checkpoint.

    Parameters
    ----------
    catalog
        What is on disk.
    sharding
        How the tensors are spread over the files.  The rules of a strategy are resolved already.
    content_groups
        For each of `content_decided_names`, the ranks grouped by equal content.
    unlisted
        What to do with an unlisted parameter that differs between ranks.  ``"rank"``: target rank
        ``r`` takes it from source rank ``r`` modulo the number of source ranks.  ``"first"``: all
        take it from the lowest rank.  ``"drop"``: none takes it.  None makes it a problem.
    running_statistics
        Names of running statistics, which differ by design.
    """
    if isinstance(sharding, Merged):
        return _full_sources(catalog, unlisted)
    presence = check_presence(catalog, sharding)
    sources = Sources(
        problems=presence.problems,
        notes=presence.notes,
        is_deduplicated=presence.is_deduplicated,
    )
    is_complete = not sources.problems
    parameter_of_state = catalog.match_states(listed_names(catalog, sharding))
    partly_held = find_partly_held(catalog, sharding, sources.is_deduplicated)
    on_one_rank = {name: one for one in partly_held if one.is_on_one_rank for name in one.names}
    search = _Search(
        catalog,
        sharding,
        content_groups,
        unlisted,
        running_statistics,
        sources,
        presence.missing,
        parameter_of_state,
        on_one_rank,
    )
    for name, ranks in catalog.holders.items():
        search.add_source(name, ranks)
    search.resolve_differing(is_complete)
    differing = {name for names in search.differing.values() for name in names}
    for one in partly_held:
        if not differing.issuperset(one.names):
            facts = f"; taken from rank {one.ranks[0]}"
            sources.notes += one.diagnostics(code="partly_held", more_facts=facts)
    sources.problems += handwritten_shape_problems(sharding, sources.found)
    per_rank = [name for group in search.differing.values() for name in group if unlisted == "rank"]
    missing = presence.missing
    sources.add_missing(
        find_missing_slices(catalog, sharding, missing, per_rank, sources.is_deduplicated)
    )
    sources.notes += layout_notes(sources.found, search.corrected, search.listing)
    listed = listed_names(catalog, sharding)
    sources.notes += guessed_state_notes(sources.found, listed, parameter_of_state)
    sources.notes += misplaced_notes(sharding, catalog.holders)
    if not isinstance(sharding, SelfDescribed):
        note = redundancy_note(catalog, sources.is_deduplicated)
        sources.notes += [] if note is None else [note]
    return sources


@dataclass(slots=True)
class _Search:
    """A search for the sources of a checkpoint: its arguments, and what it found so far.

    Attributes
    ----------
    sources
        Receives sources, problems and notes.
    missing
        Receives parameters with missing slices, by the owners of these slices.
    parameter_of_state
        See `ckpttool.model.names.match_states`.
    on_one_rank
        Names without a layout that only one rank of a stage holds.
    corrected
        Names whose layouts in the strategy were wrong.
    differing
        Names without a layout that differ between ranks, by the groups of equal ranks.
    odd_states
        Names of states without a layout that are neither slices nor full tensors, with the shapes.
    """

    catalog: Catalog
    sharding: Sharding
    content_groups: ContentGroups
    unlisted: UnlistedChoice | None
    running_statistics: Collection[str]
    sources: Sources
    missing: dict[tuple[int, ...], list[str]]
    parameter_of_state: ParameterOfState
    on_one_rank: Mapping[str, PartlyHeld]
    corrected: list[str] = field(default_factory=list)
    differing: dict[RankGroups, list[str]] = field(default_factory=dict)
    odd_states: dict[str, str] = field(default_factory=dict)

    @property
    def listing(self) -> str:
        """What lists the layouts, for messages."""
        is_described = isinstance(self.sharding, SelfDescribed)
        return "the description" if is_described else "the strategy"

    def add_source(self, name: str, ranks: Sequence[int]) -> None:
        """Add the source of one parameter, which ``ranks`` hold."""
        catalog, sharding = self.catalog, self.sharding
        described = _described_source(catalog, name, ranks, self.parameter_of_state)
        if described is not None and described.parameter is not None:
            is_contradicted = self._is_contradicted(name, described.slicing.owners())
            described = None if is_contradicted else described
        if described is not None:
            self.sources.found.append(described)
        if described is not None or _is_broken(catalog, name):
            return
        parameter = followed_parameter(catalog, sharding, name, ranks, self.parameter_of_state)
        layouts = state_layouts(sharding, name, self.parameter_of_state)
        if parameter is not None and self._is_contradicted(name, _slice_owners(layouts)):
            parameter = None
        if name not in sharding.layouts and parameter is None:
            self._add_unlisted(name, ranks)
            return
        if parameter is None:
            layouts = correct_layouts(catalog, sharding, name, self.parameter_of_state)
            self.corrected += [name] if layouts != sharding.layouts[name] else []
        origin = Listed() if parameter is None else FollowsParameter(parameter)
        self._add_sharded(name, ranks, layouts, origin)

    def _add_sharded(
        self, name: str, ranks: Sequence[int], layouts: Sequence[Layout], origin: Origin
    ) -> None:
        """Add the source of a parameter that has layouts, or its problems or missing slices.

        A parameter shared by stages is taken from the lowest stage that holds all of it.
        """
        catalog, sources = self.catalog, self.sources
        metas, tensors = catalog.metas_of(name), catalog.tensors_of(name)
        dtypes = group_by_meta(metas, lambda meta: meta.dtype)
        if len(dtypes) > 1:
            sources.problems.append(disagreement("dtype", catalog, name, "element type", dtypes))
            return
        chosen: Source | None = None
        ranks_of_shape: dict[tuple[int, ...], list[int]] = {}  # of stages that hold all of it
        first_gaps: tuple[tuple[int, ...], ...] = ()
        for listed in layouts:
            stage_ranks = listed.ranks
            held = {rank: meta for rank, meta in metas.items() if rank in stage_ranks}
            present = tuple(held)
            if not present:
                continue
            joined = infer_full_tensor(catalog, listed, held)
            if isinstance(joined, Diagnostic):
                sources.problems.append(joined)
                return
            layout, meta = joined
            gaps = layout.gaps(present)
            if not gaps:
                ranks_of_shape.setdefault(meta.shape, []).extend(layout.ranks)
            if not gaps and chosen is None:
                chosen = Source(meta, LayoutSlicing(layout, meta.shape, tensors), origin)
            first_gaps = first_gaps or gaps
        if len(ranks_of_shape) > 1:
            sources.problems.append(_stage_shapes_problem(name, ranks_of_shape))
        if chosen is not None:
            sources.found.append(chosen)
            return
        for owners in first_gaps or [tuple(layouts[0].ranks)]:
            self.missing[owners].append(name)

    def _is_contradicted(self, name: str, slice_owners: Iterable[Sequence[int]]) -> bool:
        """Return whether contents show that a tensor is not an optimizer state.

        ``slice_owners`` are the ranks that hold each slice of the state.  Owners of one slice hold
        equal contents.  If all owners of several slices do, the tensor is a parameter that every
        rank holds in full.  A prefix of MindSpore's optimizers needs no such proof.
        """
        if parse_name(name).parameter is not None:
            return False
        groups = self.content_groups.get(name, ())
        group_of_rank = {rank: number for number, group in enumerate(groups) for rank in group}
        groups_by_slice = [
            groups_held
            for ranks in slice_owners
            if (groups_held := {group_of_rank[r] for r in ranks if r in group_of_rank})
        ]
        if any(len(groups_held) > 1 for groups_held in groups_by_slice):
            return True
        return len(groups) == 1 and len(groups_by_slice) > 1

    def _add_unlisted(self, name: str, ranks: Sequence[int]) -> None:
        catalog = self.catalog
        groups = _group_by_content(catalog, self.content_groups, name, ranks)
        meta = catalog.files[ranks[0]].header[name].meta
        shapes = _state_shapes(catalog, self.sharding, meta, self.parameter_of_state)
        is_chosen = shapes is not None and self.unlisted is not None
        if _differs_between_ranks(catalog, name, groups) or name in self.on_one_rank or is_chosen:
            self.differing.setdefault(groups, []).append(name)
        elif shapes is not None:
            self.odd_states[name] = shapes
        else:
            self.sources.found.append(full_source(catalog, name, ranks[0]))

    def resolve_differing(self, is_complete: bool) -> None:
        """Apply the user's choice to parameters without a layout, or add the problems.

        Missing ranks and the strategy of a different run make parameters differ.  So nothing is
        added unless the checkpoint ``is_complete``.
        """
        if self.odd_states:
            self.sources.problems += odd_state_problems(self.odd_states, self.listing)
        if self.unlisted is not None:
            self._apply_choice(self.differing, self.unlisted)
        elif is_complete:
            rank_specific, others = split_names(self.differing, RANK_SPECIFIC_NAMES)
            self._apply_choice(rank_specific, "drop")
            self.sources.problems += unlisted_problems(
                self.catalog, self.sharding, others, self.on_one_rank, self.running_statistics
            )

    def _apply_choice(self, differing: DifferingNames, unlisted: UnlistedChoice) -> None:
        catalog, sources = self.catalog, self.sources
        cycle = max(len(self.sharding.ranks), max(catalog.files, default=0) + 1)
        for groups, names in differing.items():
            ranks = sorted(rank for group in groups for rank in group)
            if unlisted == "first":
                sources.found += [full_source(catalog, name, ranks[0]) for name in names]
            elif unlisted == "rank":
                sources.found += [
                    full_source(catalog, name, rank, (rank % cycle, cycle))
                    for name in names
                    for rank in ranks
                ]
            sources.notes += decision_notes(names, groups, unlisted, cycle, self.listing)


def _slice_owners(layouts: Iterable[Layout]) -> Iterator[Sequence[int]]:
    """Yield the ranks that hold each slice of each layout."""
    for layout in layouts:
        yield from layout.slice_owners()


def _described_source(
    catalog: Catalog, name: str, ranks: Sequence[int], parameter_of_state: ParameterOfState
) -> Source | None:
    """Return the source of a described tensor, or of its state; None if nothing describes it."""
    if catalog.description is None:
        return None
    tensors = catalog.description.tensors
    parameter = tensors.get(_parameter_of_same_shape(name, parameter_of_state))
    if name in tensors or parameter is None:
        return tensors.get(name)
    return follow(parameter, name, {rank: catalog.files[rank].tensors[name] for rank in ranks})


def _is_broken(catalog: Catalog, name: str) -> bool:
    return catalog.description is not None and name in catalog.description.broken


def _parameter_of_same_shape(name: str, parameter_of_state: ParameterOfState) -> str:
    """Return the parameter of a state; "" for a statistic, which has a different shape."""
    return parameter_of_state.get(name, "") if parse_name(name).reduced_axis is None else ""


def _state_shapes(
    catalog: Catalog, sharding: Sharding, meta: TensorMeta, parameter_of_state: ParameterOfState
) -> str | None:
    """Return the shapes that show that a state is not a full tensor; None if it may be one."""
    if catalog.description is None:
        return odd_state_shapes(catalog, sharding, meta, parameter_of_state)
    if parse_name(meta.name).parameter is None:
        return None
    parameter = catalog.description.tensors.get(
        _parameter_of_same_shape(meta.name, parameter_of_state)
    )
    return None if parameter is None else described_state_shapes(parameter, meta)


def _differs_between_ranks(catalog: Catalog, name: str, groups: RankGroups) -> bool:
    """Return whether contents differ between ranks, or only some ranks hold a map parameter."""
    holders = sum(len(group) for group in groups)
    return len(groups) > 1 or (parse_name(name).map is not None and holders < len(catalog.files))


def _group_by_content(
    catalog: Catalog, content_groups: ContentGroups, name: str, ranks: Sequence[int]
) -> RankGroups:
    """Group ranks by equal headers and known equal contents, of a whole map parameter."""
    tag = parse_name(name).map
    names = (name,) if tag is None else map_component_names(tag)

    def content(rank: int) -> tuple[object, ...]:
        tensors = [catalog.files[rank].header.get(component) for component in names]
        groups = [content_groups.get(component, ()) for component in names]
        own_groups = [
            next((group for group in of_component if rank in group), None)
            for of_component in groups
        ]
        return (*(tensor and tensor.meta for tensor in tensors), *own_groups)

    return tuple(group_ranks(ranks, content).values())


def full_source(
    catalog: Catalog, name: str, rank: int, rank_cycle: tuple[int, int] | None = None
) -> Source:
    """Return the source of a full tensor that the file of ``rank`` holds."""
    meta = catalog.files[rank].header[name].meta
    layout = Layout.unsharded(len(meta.shape), 1, rank)
    slicing = LayoutSlicing(layout, meta.shape, catalog.tensors_of(name))
    return Source(meta, slicing, NotInStrategy(rank_cycle))


def _stage_shapes_problem(name: str, ranks_of_shape: Mapping[_T, Sequence[int]]) -> Diagnostic:
    """Return the problem of a tensor whose full shapes in several stages differ."""
    parts = [f"{shape} in {format_ranks(ranks)}" for shape, ranks in ranks_of_shape.items()]
    return Diagnostic(
        "shape",
        "the full shape differs between stages",
        hint="the strategy of this run; `ckpttool help shape` explains",
        facts="; ".join(parts),
        tensor=name,
        ranks=tuple(sorted(rank for ranks in ranks_of_shape.values() for rank in ranks)),
    )


def _full_sources(catalog: Catalog, unlisted: UnlistedChoice | None) -> Sources:
    """Return the sources of a checkpoint whose files hold full tensors.

    ``unlisted`` decides about the tensors that may be slices of one rank.
    """
    sources = Sources(damage=list(catalog.damaged.values()))
    sources.notes += one_of_several_notes(catalog)
    slices = suspected_rank_slices(catalog)
    if slices:
        is_decided = unlisted in ("drop", "first")
        diagnostics = sources.notes if is_decided else sources.problems
        diagnostics.append(_rank_slices_diagnostic(catalog, slices, unlisted))
    for rank, file in catalog.files.items():
        kept = (name for name in file.tensors if unlisted != "drop" or name not in slices)
        sources.found += [full_source(catalog, name, rank) for name in kept]
    return sources


def one_of_several_notes(catalog: Catalog) -> Iterator[Diagnostic]:
    """Yield a warning if a source is the file of one rank of several."""
    if catalog.is_merged and catalog.one_of_several:
        yield Diagnostic(
            "one_of_several",
            "the file of one rank of several, so its tensors may be slices",
            hint="the folder of all ranks as SRC",
            facts=catalog.one_of_several,
            where=catalog.root,
        )


def not_full_problems(catalog: Catalog) -> Iterator[Diagnostic]:
    """Yield the problem of a source that is not a full checkpoint, and what to do."""
    if catalog.one_of_several:
        yield Diagnostic(
            "strategy",
            "the file of one rank of several, so its tensors may be slices",
            hint="the folder of all ranks as SRC (merge, reshard), or --replicated if this file "
            "holds the full model",
            facts=catalog.one_of_several,
            where=catalog.root,
        )


def suspected_rank_slices(catalog: Catalog) -> Mapping[str, str]:
    """Find the common tensors of a merged checkpoint that may be slices of rank 0.

    MindSpore stores as common tensors what it did not merge: tensors that the strategy does not
    list, ``accu_grads.*`` and parameters that were not chosen.  Tensors that an index names are
    full, and so are tensors with one element or no axes.  A state is full if it has the shape of
    its parameter, and suspected otherwise, even with one element.

    Returns
    -------
    Mapping
        Name to a description of the tensor, for a message.
    """
    metas = catalog.metas
    parameter_of_state = catalog.match_states()
    found = {}
    for name, is_named in catalog.common_tensors.items():
        meta, parameter = metas[name], metas.get(_find_parameter(metas, parameter_of_state, name))
        if is_named or not meta.shape:
            continue
        if parameter is not None and parameter.name not in catalog.common_tensors:
            if meta.shape != parameter.shape:
                found[name] = f"{name} {meta.shape}, of {parameter.name} {parameter.shape}"
        elif math.prod(meta.shape) != 1:
            found[name] = f"{name} {meta.shape}"
    return found


def _find_parameter(
    metas: Mapping[str, TensorMeta], parameter_of_state: ParameterOfState, name: str
) -> str:
    """Return the parameter of a state, found by its shape or prefix; ``name`` if not a state."""
    parameter = parameter_of_state.get(name, name)
    has_same_shape = metas[parameter].shape == metas[name].shape
    return parameter if has_same_shape else parse_name(name).same_shape_parameter or name


def _rank_slices_diagnostic(
    catalog: Catalog, slices: Mapping[str, str], unlisted: UnlistedChoice | None
) -> Diagnostic:
    """Return the problem of `suspected_rank_slices`, or the note on the user's choice."""
    code, result = {
        "drop": ("dropped", "are dropped"),
        "first": ("decided", "are taken in full"),
    }.get(unlisted or "", ("unlisted", "may be slices of rank 0"))
    return Diagnostic(
        code,
        f"{count(len(slices), 'tensor')} without an entry in the index {result}",
        hint=""
        if code != "unlisted"
        else "--unlisted first takes them in full, --unlisted drop "
        "leaves them out; `ckpttool help unlisted` explains",
        options=("--unlisted",) if code == "unlisted" else (),
        facts=shorten(slices.values(), 3),
        where=catalog.root,
    )


@dataclass(slots=True)
class Presence:
    """Result of `check_presence`.

    Attributes
    ----------
    is_deduplicated
        Whether only one of the ranks with equal slices holds each slice.
    problems, notes
        What is wrong, and what else the user should know.
    missing
        Parameters that no rank holds although they were saved, by the owners of their slices.
    """

    is_deduplicated: bool
    problems: list[Diagnostic] = field(default_factory=list)
    notes: list[Diagnostic] = field(default_factory=list)
    missing: dict[tuple[int, ...], list[str]] = field(default_factory=lambda: defaultdict(list))


def check_presence(catalog: Catalog, sharding: Sharding) -> Presence:
    """Compare the ranks and names on disk with those of the strategy or description."""
    presence = Presence(is_deduplicated(catalog, sharding))
    if catalog.description is not None:
        presence.problems += catalog.description.problems
    elif isinstance(sharding, Strategy):
        _compare_with_strategy(catalog, sharding, presence)
    elif presence.is_deduplicated:
        presence.problems += missing_rank_problems(catalog)
    else:
        presence.problems += _incomplete_replica_problems(catalog)
    return presence


def _compare_with_strategy(catalog: Catalog, strategy: Strategy, presence: Presence) -> None:
    """Check that a strategy belongs to this checkpoint, and find its parameters on no rank."""
    holders = catalog.holders
    found = sorted({*catalog.files, *catalog.damaged})
    extra = tuple(rank for rank in found if rank not in strategy.ranks)
    if extra:
        presence.problems.append(_extra_ranks_problem(catalog, strategy, found, extra))
    if holders and not any(name in strategy.layouts for name in holders):
        text = f"no parameter in common with {catalog.root}"
        hint = "the strategy of the run that saved this checkpoint"
        facts = f"the strategy lists {shorten(strategy.layouts, 2)}; "
        facts += f"the files hold {shorten(holders, 2)}"
        problem = Diagnostic("strategy", text, hint=hint, facts=facts, where=strategy.origin)
        presence.problems.append(problem)
    elif holders and (absent := [name for name in strategy.layouts if name not in holders]):
        _classify_absent(catalog, strategy, absent, holders, presence)


def _extra_ranks_problem(
    catalog: Catalog, strategy: Strategy, found: Sequence[int], extra: tuple[int, ...]
) -> Diagnostic:
    """Return the problem of ranks outside of the strategy."""
    text = f"{format_ranks(extra)} {'is' if len(extra) == 1 else 'are'} not in the strategy"
    facts = f"found {format_ranks(found)}; {strategy.origin_is} for {format_ranks(strategy.ranks)}"
    facts = "; ".join(
        [facts, *(note.fact for note in strategy.notes if note.code == "strategy_file")]
    )
    everyone = f"all {found[-1] + 1} ranks"
    hint = f"the strategy of {everyone}, or the folder with the strategy files of all stages"
    if len(extra) == 1 < len(strategy.ranks):  # a stage would have as many ranks as the strategy
        hint = f"move the folder of {format_ranks(extra)} away, if it is of another run"
    if list(found) == [rank + 1 for rank in strategy.ranks]:
        text = "the ranks are numbered from 1, and those of the strategy from 0"
        hint = "rename the folders: rank_1 to rank_0, rank_2 to rank_1, and so on"
    return Diagnostic("strategy", text, hint=hint, facts=facts, ranks=extra, where=catalog.root)


def _incomplete_replica_problems(catalog: Catalog) -> Iterator[Diagnostic]:
    """Yield a problem for the ranks that lack the same parameters, where all should be equal."""
    holders = catalog.holders
    alike: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for rank, file in catalog.files.items():
        alike[tuple(name for name in holders if name not in file.tensors)].append(rank)
    complete = alike.pop((), [])
    for missing, ranks in alike.items():
        holding = format_ranks(complete) if complete else "other ranks"
        yield from lacking_problems(catalog, "missing", ranks, missing, holding)


def _classify_absent(
    catalog: Catalog,
    strategy: Strategy,
    absent: Sequence[str],
    holders: Mapping[str, Sequence[int]],
    presence: Presence,
) -> None:
    """Decide which listed parameters on no rank were not saved, and which are missing.

    A parameter was not saved if its owners have files without it.  It is missing if these files are
    missing, or if the checkpoint has no redundancy.  Optimizer state was not saved either if no
    rank holds state with its prefix, since many checkpoints contain only weights.
    States without their weights are no checkpoint, so an unsaved weight is a warning.
    """
    parameter_of_state = catalog.match_states(strategy.layouts)
    saved_prefixes = {name.removesuffix(parameter_of_state.get(name, "")) for name in holders}
    unsaved = []
    for name in absent:
        parameter = parameter_of_state.get(name, "")
        is_weight = parameter not in strategy.layouts
        ranks = tuple(rank for layout in strategy.layouts[name] for rank in layout.ranks)
        is_conclusive = all(_is_conclusive(catalog, layout) for layout in strategy.layouts[name])
        if (is_conclusive and not presence.is_deduplicated) or not (
            is_weight or name.removesuffix(parameter) in saved_prefixes
        ):
            unsaved.append(name)
        else:
            presence.missing[ranks].append(name)
    if unsaved:
        text = f"{count(len(unsaved), 'parameter', 'are')} in the strategy and in no file"
        weights = {name for name in unsaved if parameter_of_state.get(name) not in strategy.layouts}
        others = _unlisted_weights(catalog, strategy, parameter_of_state) if weights else []
        code = "unsaved" if weights else "absent"
        hint = "`ckpttool help unsaved`" if weights else ""
        note = Diagnostic(code, text, hint=hint, facts=shorten(unsaved, 3))
        if others:
            facts = f"only in the strategy: {shorten(unsaved, 3)}; only in files: "
            facts += shorten(others, 3)
            hint = "the strategy of this run; `ckpttool help renamed` explains"
            note = Diagnostic("renamed", text, hint=hint, facts=facts)
        presence.notes.append(note)


def _unlisted_weights(
    catalog: Catalog, strategy: Strategy, parameter_of_state: ParameterOfState
) -> list[str]:
    """Return the unlisted tensors with several elements that are not optimizer states."""
    metas = catalog.metas
    return [
        name
        for name, meta in metas.items()
        if name not in strategy.layouts
        and meta.nbytes > meta.itemsize
        and parameter_of_state.get(name) not in metas
    ]


def _is_conclusive(catalog: Catalog, layout: Layout) -> bool:
    """Return whether the files at hand show for every slice whether it was saved."""
    if all(rank in catalog.files for rank in layout.ranks):
        return True
    return hold_same_parameters(catalog, layout.ranks) and all(
        any(rank in catalog.files for rank in owners) for owners in layout.slice_owners()
    )
