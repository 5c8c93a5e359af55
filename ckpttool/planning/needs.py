"""The slices of a source that the ranks of a target take, and so the source ranks that they need.

Layouts alone decide.  A parameter without a file has a shape that all layouts of both strategies
divide; the JSON form of a strategy has the true one.  Then it is planned as in a conversion.  Where
expanded layouts do not say which elements overlap, all slices are taken.

Names of hand-written patterns come from the other strategy.  If both strategies are patterns, the
text of a pattern stands for the names that it matches.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import SupportsIndex

from msgspec import Struct, field
from msgspec.structs import replace

from ckpttool.checkpoint.checkpoint import Checkpoint, NeededSlices
from ckpttool.checkpoint.fit_strategy import align_names
from ckpttool.checkpoint.hidden_shards import cover, hiding_tensors, ranks_that_show_shards
from ckpttool.model.catalog import Catalog
from ckpttool.model.layout import Layout, fold_layout
from ckpttool.model.names import match_states, parse_name
from ckpttool.model.plan import Target, Transfer
from ckpttool.model.region import Region
from ckpttool.model.slicing import FullTensor, LayoutSlicing, Listed
from ckpttool.model.strategy import Strategy
from ckpttool.model.tensors import TensorMeta
from ckpttool.planning.targets import find_transfers
from ckpttool.problems import Diagnostic, Diagnostics
from ckpttool.strategy_files.reader import Layouts, read_strategy
from ckpttool.transaction.resume import OutputOptions
from ckpttool.typed import require_rank

Owners = tuple[int, ...]  # the ranks that hold one slice


class RankNeeds(Struct, frozen=True):
    """The source ranks that a target rank needs, or several of them together.

    Attributes
    ----------
    rank
        The target rank; None for several, and for a merge.
    groups
        One rank of each group is needed.  No group contains another.
    fetch
        Few ranks that are enough: one of each group.
    also
        Few more ranks, whose slices would show an optimizer shard that the strategy hides.
    """

    rank: int | None
    groups: tuple[Owners, ...]
    fetch: tuple[int, ...]
    also: tuple[int, ...]


class Needs(Struct, frozen=True):
    """The source ranks that a merge or a reshard needs.

    Attributes
    ----------
    ranks
        What each target rank needs; without a target, what the merge needs.
    together
        What all of these ranks need.
    notes
        Notes of the strategies, such as patterns that match no parameter.
    """

    ranks: tuple[RankNeeds, ...]
    together: RankNeeds
    notes: tuple[Diagnostic, ...] = ()


def find_needs(
    strategy: Layouts,
    target: Layouts | None,
    ranks: Collection[SupportsIndex] | None = None,
) -> Needs:
    """Return the source ranks that ``ranks`` of a target need, from the strategies alone.

    Parameters
    ----------
    strategy
        The strategy of the source, or its files.
    target
        The strategy of the target, or its files; None for a merge.
    ranks
        Target ranks; None for all.

    Raises
    ------
    PlanError
        The target lacks a rank, or cannot shard a shape that the strategies give.
    """
    target = None if target is None else read_strategy(target)
    strategy, target = _with_names(read_strategy(strategy), target)
    strategy, tensors, undecided = _imply(strategy, target, {})
    if target is None:
        outputs = Target("hdf5", {0: ""})
    else:
        wanted: Sequence[int] = target.ranks
        if ranks is not None:
            wanted = sorted({require_rank("ranks", rank) for rank in ranks})
        outputs = Target("hdf5", dict.fromkeys(wanted, ""), len(target.ranks), target)
    diagnostics = Diagnostics()
    transfers = _transfers(Catalog("", {}), strategy, tensors, undecided, outputs, diagnostics)
    diagnostics.raise_if_errors()
    parts = _Parts(strategy, transfers)
    taken = {rank: parts.taken([rank]) for rank in outputs.paths}
    near = {
        rank: parts.near(rank if target is None else rank % target.stage_ranks, slices)
        for rank, slices in taken.items()
    }
    of_ranks = tuple(
        parts.needs(None if target is None else rank, slices, near[rank])
        for rank, slices in taken.items()
    )
    together = parts.needs(None, parts.taken(outputs.paths), set().union(*near.values()))
    of_target = () if target is None else _spell_out(target, strategy).notes
    return Needs(of_ranks, together, tuple(dict.fromkeys((*strategy.notes, *of_target))))


def needed_slices(checkpoint: Checkpoint, target: Target, options: OutputOptions) -> NeededSlices:
    """Return the owners of each slice that the outputs of a target take, by the parameter's name.

    Parameters
    ----------
    checkpoint
        The source; files of some ranks may be missing.
    target, options
        As for `ckpttool.planning.targets.plan`.
    """
    known = {tensor.name: tensor.meta for tensor in checkpoint.tensors}
    strategy = checkpoint.strategy
    _, tensors, undecided = _imply(strategy, target.strategy, {**checkpoint.catalog.metas, **known})
    tensors = [*checkpoint.tensors, *tensors]
    transfers = _transfers(
        *(checkpoint.catalog, strategy, tensors, undecided, target, Diagnostics(), options)
    )
    needed: dict[str, set[Owners]] = defaultdict(set)
    parts = _Parts(strategy, ())
    for transfer in transfers:
        for of_stage in parts.taken_of(transfer, target.paths):
            needed[transfer.source.name] |= of_stage
    return needed


def _transfers(
    catalog: Catalog,
    strategy: Strategy,
    tensors: Sequence[FullTensor],
    undecided: Sequence[FullTensor],
    target: Target,
    diagnostics: Diagnostics,
    options: OutputOptions = OutputOptions(),
) -> list[Transfer]:
    checkpoint = Checkpoint(catalog=catalog, strategy=strategy, records=tuple(tensors))
    _, transfers, _ = find_transfers(checkpoint, target, options, diagnostics)
    for tensor in undecided:
        everywhere = Layout.unsharded(len(tensor.meta.shape), target.ranks)
        transfers.append(Transfer.copy_of(tensor, (everywhere,)))
    return transfers


# --------------------------------------------------------------------- what the target ranks take

Taken = Mapping[int, tuple[frozenset[Owners], ...]]  # number of a transfer to slices, by stage


class _Parts(Struct, frozen=True):
    """Transfers, one of those with equal layouts and shapes, and what target ranks take of them."""

    strategy: Strategy
    transfers: Sequence[Transfer]
    distinct: list[Transfer] = []
    hiding: set[str] = field(default_factory=set)  # names whose optimizer shard it may hide
    _touched: dict[object, frozenset[Owners]] = {}

    def __post_init__(self) -> None:
        sources = (transfer.source for transfer in self.transfers)
        self.hiding.update(tensor.name for tensor in hiding_tensors(self.strategy, sources))
        keys = set()
        for transfer in self.transfers:
            stages = tuple(slicing.key for slicing in _slicings_of(transfer))
            key = stages, transfer.meta.shape, transfer.layouts, transfer.name in self.hiding
            if key not in keys:
                keys.add(key)
                self.distinct.append(transfer)

    def taken(self, ranks: Collection[int]) -> Taken:
        taken = {i: self.taken_of(transfer, ranks) for i, transfer in enumerate(self.distinct)}
        return {i: of_stages for i, of_stages in taken.items() if any(of_stages)}

    def taken_of(self, transfer: Transfer, ranks: Collection[int]) -> tuple[frozenset[Owners], ...]:
        """Return the owners of the slices that target ranks take, for each stage that has them."""
        shape = transfer.meta.shape
        regions = {
            layout.region(rank, shape)
            for layout in transfer.layouts
            for rank in ranks
            if rank in layout.ranks
        }
        return tuple(
            frozenset().union(*(self._owners(slicing, region) for region in regions))
            for slicing in _slicings_of(transfer)
        )

    def _owners(self, slicing: LayoutSlicing, region: Region) -> frozenset[Owners]:
        key = slicing.key, region
        if key not in self._touched:
            self._touched[key] = frozenset(holding.owners for holding in slicing.holdings(region))
        return self._touched[key]

    def near(self, place: int, taken: Taken) -> set[int]:
        near = set()
        for i, of_stages in taken.items():
            for slicing, groups in zip(_slicings_of(self.distinct[i]), of_stages, strict=True):
                layout = slicing.layout
                own = layout.ranks[place % len(layout.ranks)]
                replica = layout.owners(layout.slice_index(own)).index(own)
                near |= {owners[replica] for owners in groups}
        return near

    def needs(self, rank: int | None, taken: Taken, near: set[int]) -> RankNeeds:
        """Return the ranks that hold one replica of each slice, those to fetch of `near`.

        A tensor that stages share is taken from a stage that is needed anyway, if there is one.
        """
        needed: set[Owners] = set()
        layouts: list[Layout] = []
        for i, of_stages in sorted(taken.items(), key=lambda item: len(item[1])):
            number = 0
            if len(of_stages) > 1:
                implied = (n for n, sets in enumerate(of_stages) if _are_implied(sets, needed))
                number = next(implied, 0)
            needed |= of_stages[number]
            if self.distinct[i].name in self.hiding:
                layouts.append(_slicings_of(self.distinct[i])[number].layout)
        groups = _smallest(needed)
        fetch = cover(near.intersection(owners) for owners in groups)
        return RankNeeds(rank, groups, fetch, ranks_that_show_shards(layouts, fetch))


def _slicings_of(transfer: Transfer) -> tuple[LayoutSlicing, ...]:
    slicings = (transfer.source.slicing, *transfer.source.copies)
    return tuple(slicing for slicing in slicings if isinstance(slicing, LayoutSlicing))


def _are_implied(groups: Iterable[Owners], needed: Collection[Owners]) -> bool:
    sets = [*map(set, needed)]
    return all(any(ranks.issubset(owners) for ranks in sets) for owners in groups)


def _smallest(groups: Iterable[Owners]) -> tuple[Owners, ...]:
    """Return the groups that contain no other, in the order of their ranks."""
    kept: dict[int, list[set[int]]] = defaultdict(list)
    smallest = []
    for owners in sorted({*groups}, key=lambda ranks: (len(ranks), ranks)):
        ranks = set(owners)
        if not any(group <= ranks for rank in owners for group in kept[rank]):
            smallest.append(owners)
            for rank in owners:
                kept[rank].append(ranks)
    return tuple(sorted(smallest))


# ------------------------------------------------------------------ tensors from strategies alone


def _with_names(strategy: Strategy, target: Strategy | None) -> tuple[Strategy, Strategy | None]:
    """Return both strategies with the names of the source, and the patterns of the source as names.

    Patterns of the target are resolved with the target.
    """
    ndims = _ndims(strategy)
    if target is not None:
        target = align_names(target, _metas(ndims), strategy.origin)
        ndims = {**_ndims(target), **ndims}
    if strategy.rules is None:
        return strategy, target
    if not any(map(strategy.rules.find, ndims)) and not (ndims and strategy.rules.replicates_rest):
        both = [of.rules for of in (strategy, target) if of is not None and of.rules]
        for pattern in (rule.pattern for rules in both for rule in rules.rules):
            matches = [rules.find(pattern) for rules in both]
            if all(matches):
                ndims[pattern] = max(len(match.layout.tensor_map) for match in matches if match)
    resolved, _ = strategy.resolve(_metas(ndims), is_rest_decided=True)
    return resolved, target


def _spell_out(target: Strategy, strategy: Strategy) -> Strategy:
    return target.resolve(_metas(_ndims(strategy)), is_rest_decided=True)[0]


def _ndims(strategy: Strategy) -> dict[str, int]:
    return {name: len(layouts[0].tensor_map) for name, layouts in strategy.layouts.items()}


def _metas(ndims: Mapping[str, int]) -> dict[str, TensorMeta]:
    return {name: TensorMeta(name, "Float32", (2,) * ndim) for name, ndim in ndims.items()}


def _imply(
    strategy: Strategy, target: Strategy | None, known: Mapping[str, TensorMeta]
) -> tuple[Strategy, list[FullTensor], list[FullTensor]]:
    """Return the strategy with its splits decided, and a tensor for each parameter not ``known``.

    The third result are those whose expanded layouts do not say which elements overlap.
    """
    target = target and _spell_out(target, strategy)
    listed_in_target, by_hand = ({}, {}) if target is None else (target.layouts, target.handwritten)
    unit = _unit([*strategy.layouts.values(), *listed_in_target.values()])
    states = match_states(strategy.layouts, known)
    tensors: dict[str, FullTensor] = {}
    undecided: list[FullTensor] = []
    settled: dict[str, tuple[Layout, ...]] = {}
    alike: dict[object, tuple[Layout, ...] | None] = {}
    for name in sorted(strategy.layouts, key=states.__contains__):  # parameters first
        if name in known:
            continue
        layouts, of_target = strategy.layouts[name], listed_in_target.get(name, ())
        key = tuple((layout, layout.full_shape) for layout in (*layouts, *of_target)), len(layouts)
        if key not in alike:
            alike[key] = _fold_alike(layouts, of_target)
        folded = alike[key]
        if folded is None and name in by_hand:  # the plan says if it is for other axes
            folded, of_target = _fold_alike(layouts, ()), ()
        usable = layouts if folded is None else folded
        shape = _shape(usable, of_target if folded else (), unit)
        parameter = known.get(states.get(name, "")) or tensors.get(states.get(name, ""))
        if parameter is not None and all(layout.full_shape is None for layout in usable):
            meta = parameter.meta if isinstance(parameter, FullTensor) else parameter
            axis = parse_name(name).reduced_axis
            of_state = [*meta.shape]
            if axis is not None and len(of_state) > 1:
                del of_state[axis]
            shape = tuple(of_state) if len(of_state) == len(shape) else shape
        usable = tuple(layout.decided_by_full_shape(shape) or layout for layout in usable)
        settled[name] = usable
        slicing, *copies = (LayoutSlicing(layout, shape, name, {}) for layout in usable)
        meta = TensorMeta(name, "Float32", shape)
        tensor = FullTensor(meta, slicing, Listed(), tuple(copies))
        if folded is None:
            undecided.append(tensor)
        else:
            tensors[name] = tensor
    return (
        replace(strategy, layouts={**strategy.layouts, **settled}),
        [*tensors.values()],
        undecided,
    )


def _unit(layouts: Iterable[Iterable[Layout]]) -> int:
    distinct = {(layout.slice_counts, layout.fields) for of_name in layouts for layout in of_name}
    return math.lcm(2, *(n * fields for counts, fields in distinct for n in counts))


def _shape(layouts: Sequence[Layout], of_target: Sequence[Layout], unit: int) -> tuple[int, ...]:
    ndim = len(layouts[0].tensor_map)
    both = (*layouts, *of_target)
    for layout in both:
        if layout.full_shape is not None and len(layout.full_shape) == ndim:
            return layout.full_shape
    rows = (layout.rows or (layout.split_shape if layout.may_be_rows else ()) for layout in both)
    rest = (unit,) * ndim
    return (next((sum(counts) for counts in rows if counts), unit), *rest[1:]) if rest else ()


def _fold_alike(
    layouts: Sequence[Layout], of_target: Sequence[Layout]
) -> tuple[Layout, ...] | None:
    """Return the layouts, expanded ones folded to axes that they have in common with the target.

    The result is None if they lack such axes, or if several are possible.
    """
    both = (*layouts, *of_target)
    if len({(len(layout.tensor_map), layout.full_shape) for layout in both}) == 1:
        return tuple(layouts)
    for ndim in range(min(len(layout.tensor_map) for layout in both), 0, -1):
        ways = [(of,) if len(of.tensor_map) == ndim else fold_layout(of, ndim) for of in both]
        shapes = [{way.full_shape for way in of_one if way.full_shape} for of_one in ways]
        given = [shape for shape in shapes if shape]
        common = set.intersection(*given) if given else {None}
        fitting = [
            [[way for way in of_one if way.full_shape in (None, shape)] for of_one in ways]
            for shape in common
        ]
        fitting = [ways for ways in fitting if all(len(of_one) == 1 for of_one in ways)]
        if len(fitting) == 1:
            return tuple(way for (way,) in fitting[0][: len(layouts)])
    return None
