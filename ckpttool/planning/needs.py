"""Which slices of a source the ranks of a target take, and so which source ranks they need.

Layouts alone say it.  A parameter without a file has a shape that all layouts of both strategies
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
from ckpttool.checkpoint.fit import align_names
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
from ckpttool.strategy_files.reader import Paths, as_strategy
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
        What each target rank needs; what the merge needs if there is no target.
    together
        What all of these ranks need.
    notes
        Notes of the strategies, such as patterns that match no parameter.
    """

    ranks: tuple[RankNeeds, ...]
    together: RankNeeds
    notes: tuple[Diagnostic, ...] = ()


def find_needs(
    strategy: Strategy | Paths,
    target: Strategy | Paths | None,
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
        The target has no such rank, or cannot shard a shape that the strategies give.
    """
    target = None if target is None else as_strategy(target)
    strategy, target = _with_names(as_strategy(strategy), target)
    strategy, tensors, undecided = _imply(strategy, target, {})
    if target is None:
        outputs = Target("hdf5", {0: ""})
    else:
        wanted = (
            target.ranks
            if ranks is None
            else sorted({require_rank("ranks", rank) for rank in ranks})
        )
        outputs = Target("hdf5", dict.fromkeys(wanted, ""), len(target.ranks), target)
    diagnostics = Diagnostics()
    transfers = _transfers(Catalog("", {}), strategy, tensors, undecided, outputs, diagnostics)
    diagnostics.raise_if_errors()
    parts = _Parts(strategy, transfers)
    taken = {rank: parts.taken([rank]) for rank in outputs.paths}
    near = {
        rank: parts.near(rank if target is None else rank % target.stage_ranks, one)
        for rank, one in taken.items()
    }
    of_ranks = tuple(
        parts.needs(None if target is None else rank, one, near[rank])
        for rank, one in taken.items()
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
    known = {one.name: one.meta for one in checkpoint.tensors}
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
    """Return the transfers to a target; ``undecided`` tensors go to all ranks in full."""
    checkpoint = Checkpoint(catalog=catalog, strategy=strategy, records=tuple(tensors))
    _, transfers, _ = find_transfers(checkpoint, target, options, diagnostics)
    for one in undecided:
        everywhere = Layout.unsharded(len(one.meta.shape), target.ranks)
        transfers.append(Transfer.copy_of(one, (everywhere,)))
    return transfers


# --------------------------------------------------------------------- what the target ranks take

Taken = Mapping[int, tuple[frozenset[Owners], ...]]  # number of a transfer to slices, by stage


class _Parts(Struct, frozen=True):
    """Transfers, one of those with equal layouts and shapes, and what target ranks take of them."""

    strategy: Strategy
    transfers: Sequence[Transfer]
    distinct: list[Transfer] = []
    hiding: set[str] = field(default_factory=set)  # names of which it may hide an optimizer shard
    _touched: dict[object, frozenset[Owners]] = {}

    def __post_init__(self) -> None:
        sources = (one.source for one in self.transfers)
        self.hiding.update(one.name for one in hiding_tensors(self.strategy, sources))
        keys = set()
        for one in self.transfers:
            stages = tuple(slicing.key for slicing in _slicings_of(one))
            key = stages, one.meta.shape, one.layouts, one.name in self.hiding
            if key not in keys:
                keys.add(key)
                self.distinct.append(one)

    def taken(self, ranks: Collection[int]) -> Taken:
        """Return the slices that target ranks take together."""
        taken = {i: self.taken_of(one, ranks) for i, one in enumerate(self.distinct)}
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
            self._touched[key] = frozenset(one.owners for one in slicing.holdings(region))
        return self._touched[key]

    def near(self, place: int, taken: Taken) -> set[int]:
        """Return for each slice its owner in the replica of the rank at a place of its stage.

        MindSpore's ``rank_list_for_transform`` names these for the target rank at that place.
        """
        found = set()
        for i, of_stages in taken.items():
            for slicing, groups in zip(_slicings_of(self.distinct[i]), of_stages, strict=True):
                layout = slicing.layout
                own = layout.ranks[place % len(layout.ranks)]
                replica = layout.owners(layout.slice_index(own)).index(own)
                found |= {owners[replica] for owners in groups}
        return found

    def needs(self, rank: int | None, taken: Taken, near: set[int]) -> RankNeeds:
        """Return the ranks that hold one replica of each slice, those to fetch of `near`.

        A tensor that stages share is taken from a stage that is needed anyway, if there is one.
        """
        needed: set[Owners] = set()
        layouts: list[Layout] = []
        for i, of_stages in sorted(taken.items(), key=lambda item: len(item[1])):
            number = 0
            if len(of_stages) > 1:
                implied = (n for n, one in enumerate(of_stages) if _are_implied(one, needed))
                number = next(implied, 0)
            needed |= of_stages[number]
            if self.distinct[i].name in self.hiding:
                layouts.append(_slicings_of(self.distinct[i])[number].layout)
        groups = _smallest(needed)
        fetch = cover(near.intersection(owners) for owners in groups)
        return RankNeeds(rank, groups, fetch, ranks_that_show_shards(layouts, fetch))


def _slicings_of(transfer: Transfer) -> tuple[LayoutSlicing, ...]:
    """Return the slicing of a source in each stage that has it; none if it has boxes."""
    slicings = (transfer.source.slicing, *transfer.source.copies)
    return tuple(one for one in slicings if isinstance(one, LayoutSlicing))


def _are_implied(groups: Iterable[Owners], needed: Collection[Owners]) -> bool:
    sets = [*map(set, needed)]
    return all(any(one.issubset(owners) for one in sets) for owners in groups)


def _smallest(groups: Iterable[Owners]) -> tuple[Owners, ...]:
    """Return the groups that contain no other, in the order of their ranks."""
    kept: dict[int, list[set[int]]] = defaultdict(list)
    smallest = []
    for owners in sorted({*groups}, key=lambda one: (len(one), one)):
        ranks = set(owners)
        if not any(one <= ranks for rank in owners for one in kept[rank]):
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
        both = [one.rules for one in (strategy, target) if one is not None and one.rules]
        for pattern in (rule.pattern for rules in both for rule in rules.rules):
            found = [rules.find(pattern) for rules in both]
            if all(found):
                ndims[pattern] = max(len(one.layout.tensor_map) for one in found if one)
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
    others, by_hand = ({}, {}) if target is None else (target.layouts, target.handwritten)
    unit = _unit([*strategy.layouts.values(), *others.values()])
    states = match_states(strategy.layouts, known)
    tensors: dict[str, FullTensor] = {}
    undecided: list[FullTensor] = []
    settled: dict[str, tuple[Layout, ...]] = {}
    alike: dict[object, tuple[Layout, ...] | None] = {}
    for name in sorted(strategy.layouts, key=states.__contains__):  # parameters first
        if name in known:
            continue
        layouts, of_target = strategy.layouts[name], others.get(name, ())
        key = tuple((one, one.full_shape) for one in (*layouts, *of_target)), len(layouts)
        if key not in alike:
            alike[key] = _fold_alike(layouts, of_target)
        folded = alike[key]
        if folded is None and name in by_hand:  # the plan says if it is for other axes
            folded, of_target = _fold_alike(layouts, ()), ()
        usable = layouts if folded is None else folded
        shape = _shape(usable, of_target if folded else (), unit)
        parameter = known.get(states.get(name, "")) or tensors.get(states.get(name, ""))
        if parameter is not None and all(one.full_shape is None for one in usable):
            meta = parameter.meta if isinstance(parameter, FullTensor) else parameter
            axis = parse_name(name).reduced_axis
            of_state = [*meta.shape]
            if axis is not None and len(of_state) > 1:
                del of_state[axis]
            shape = tuple(of_state) if len(of_state) == len(shape) else shape
        usable = tuple(one.decided_by_full_shape(shape) or one for one in usable)
        settled[name] = usable
        slicing, *copies = (LayoutSlicing(one, shape, name, {}) for one in usable)
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
    distinct = {(one.slice_counts, one.fields) for of_name in layouts for one in of_name}
    return math.lcm(2, *(n * fields for counts, fields in distinct for n in counts))


def _shape(layouts: Sequence[Layout], of_target: Sequence[Layout], unit: int) -> tuple[int, ...]:
    ndim = len(layouts[0].tensor_map)
    both = (*layouts, *of_target)
    for one in both:
        if one.full_shape is not None and len(one.full_shape) == ndim:
            return one.full_shape
    rows = (one.rows or (one.split_shape if one.may_be_rows else ()) for one in both)
    rest = (unit,) * ndim
    return (next((sum(one) for one in rows if one), unit), *rest[1:]) if rest else ()


def _fold_alike(
    layouts: Sequence[Layout], of_target: Sequence[Layout]
) -> tuple[Layout, ...] | None:
    """Return the layouts, expanded ones folded to axes that they have in common with the target.

    The result is None if there are no such axes, or several.
    """
    both = (*layouts, *of_target)
    if len({(len(one.tensor_map), one.full_shape) for one in both}) == 1:
        return tuple(layouts)
    for ndim in range(min(len(one.tensor_map) for one in both), 0, -1):
        ways = [(one,) if len(one.tensor_map) == ndim else fold_layout(one, ndim) for one in both]
        shapes = [{way.full_shape for way in of_one if way.full_shape} for of_one in ways]
        given = [one for one in shapes if one]
        common = set.intersection(*given) if given else {None}
        fitting = [
            [[way for way in of_one if way.full_shape in (None, shape)] for of_one in ways]
            for shape in common
        ]
        fitting = [one for one in fitting if all(len(of_one) == 1 for of_one in one)]
        if len(fitting) == 1:
            return tuple(way for (way,) in fitting[0][: len(layouts)])
    return None
