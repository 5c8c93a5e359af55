"""What each rank of a checkpoint, or of a target, holds: its slices, its place, who has the same.

The answer is made of the slicings of the full tensors, and for a target of the pieces of a plan.
Equal distributions are one object: thousands of tensors have few.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from itertools import chain, product
from typing import TYPE_CHECKING, Literal

from ckpttool.checkpoint.checkpoint import Checkpoint, ResolveOptions
from ckpttool.checkpoint.presence import ranks_without_file
from ckpttool.concurrency import InlineExecutor
from ckpttool.model.layout import Layout, UnevenAxis, divisors
from ckpttool.model.names import drop_unlike_shapes, match_states
from ckpttool.model.region import Region
from ckpttool.model.slicing import (
    BrokenTensor,
    Follows,
    FullTensor,
    LayoutSlicing,
    Listed,
    Own,
    RankGroups,
    Slicing,
    Unlisted,
    Whole,
)
from ckpttool.operations.describe import refuses_layouts
from ckpttool.operations.plans import Reading, try_reading
from ckpttool.operations.summary import Entry, Placement, Row, Stage, Summary, fold_rows
from ckpttool.problems import Diagnostic, Diagnostics, PlanError
from ckpttool.wording import Brief, count, format_numbers, format_ranks

if TYPE_CHECKING:
    from ckpttool.checkpoint.interpret import Tensor
    from ckpttool.model.catalog import Catalog
    from ckpttool.model.plan import Plan, Transfer
    from ckpttool.model.strategy import Strategy
    from ckpttool.model.tensors import TensorMeta

Ranks = tuple[int, ...]
Matrix = tuple[int, ...]  # a device matrix
Known = Literal["listed", "follows", "whole", "unlisted"]

MAX_MATRICES = 10_000  # device matrices that are tried, to find the nearest that divide
MAX_GROWTH = 4  # times as many ranks are tried at most


@dataclass(frozen=True, slots=True)
class Taken:
    """Elements of a target slice, and the source rank that they are read from.

    Attributes
    ----------
    rank
        The source rank; of a merged checkpoint, the number of the file.
    region
        The elements, counted in the full tensor.
    src
        The same elements, counted in the slice of the source rank.
    """

    rank: int
    region: Region
    src: Region


@dataclass(frozen=True, slots=True)
class Slice:
    """A slice of a full tensor, and the ranks that hold it.

    Attributes
    ----------
    regions
        Its elements; several boxes only in a field-sliced embedding.
    ranks
        The ranks that should hold it, ascending.
    stored
        Those of them that have it on disk; empty in a target.
    layout
        The layout of the stage of these ranks; None if there is none.
    taken
        In a target: what is read from whom.
    """

    regions: tuple[Region, ...]
    ranks: Ranks
    stored: Ranks = ()
    layout: Layout | None = None
    taken: tuple[Taken, ...] = ()

    @property
    def size(self) -> int:
        """Number of elements."""
        return sum(region.size for region in self.regions)


@dataclass(frozen=True, slots=True, eq=False)
class Distribution:
    """How a full tensor is distributed over ranks.  Tensors that have it share one object.

    Attributes
    ----------
    shape
        The full shape; of tensors that are only copied whole, the shape of a vector.
    known_by
        How it is known: a strategy lists it, or the checkpoint describes it; it ``"follows"`` a
        parameter; files hold it ``"whole"``; or nothing says how.
    slices
        The slices of all stages, in C order stage by stage.  Of a tensor that nothing lists: its
        different contents, each with the ranks that hold them.
    listed_shard
        The optimizer shard that the strategy lists, if contents show another.
    """

    shape: tuple[int, ...]
    known_by: Known
    slices: tuple[Slice, ...]
    listed_shard: int | None = None

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """The layout of each stage."""
        layouts = (one.layout for one in self.slices if one.layout is not None)
        return tuple(dict.fromkeys(layouts))

    def of_rank(self, rank: int) -> Distribution:
        """Return the distribution with only the slices of a rank."""
        return replace(self, slices=tuple(one for one in self.slices if rank in one.ranks))


@dataclass(frozen=True, slots=True)
class RankGroup:
    """Ranks that hold, or should hold, the same slices of all tensors.

    Attributes
    ----------
    ranks
        The ranks, ascending, in one stage.
    lost
        Those of them that have no file that can be read.
    stage
        The number of their stage; None without stages.
    coordinate
        Position along each device axis, outermost first; None where the ranks differ.
    tensors, nbytes
        What each of them with a file holds; if none has, what each should hold.
    sources
        In a target: the source ranks that each of them reads.
    """

    ranks: Ranks
    stage: int | None
    coordinate: tuple[int | None, ...]
    tensors: int
    nbytes: int
    sources: Ranks = ()
    lost: Ranks = ()


@dataclass(frozen=True, slots=True)
class Obstacle:
    """A tensor axis that the slices of a target do not divide.

    Attributes
    ----------
    tensors
        The tensors with this axis and this layout.
    shape, layout
        Their full shape, and their layout in the target.
    axis
        The axis, and the nearest numbers of slices that divide it.
    matrices
        What the device matrix of this layout can become, so that all tensors divide: with a near
        number of ranks that is not larger, and one that is.
    """

    tensors: tuple[str, ...]
    shape: tuple[int, ...]
    layout: Layout
    axis: UnevenAxis
    matrices: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, repr=False)
class Explanation(Brief):
    """What the ranks of a checkpoint, or of a target, hold.

    Attributes
    ----------
    catalog
        The files of the source.
    target
        The strategy of the target; None for the source itself.
    found
        What is wrong or noted.
    ranks
        All ranks.
    stages
        The stages, with the device matrix of most sharded tensors first; none without layouts.
    tensors
        Name to distribution.  With a rank: only its slices, of the tensors that it holds.
    metas
        Name to full tensor; of one without a full shape, a slice.
    rows
        The same tensors, folded.
    patterns
        What the names of these tensors match; none for all tensors.
    rank, matrices
        The explained rank, and its coordinate in each device matrix; None and none for all ranks.
    names_of
        Number of a stage and device matrix to the tensors that have it, also those that are absent.
    groups
        The ranks that hold the same; only that of the explained rank.
    absent
        Tensors that the strategy lists for these ranks, and that no file holds.
    has_plan
        Whether the target can be.
    obstacles
        Why it cannot be: the axes that do not divide.
    is_deduplicated
        Whether each slice is on one of its ranks, as the checkpoint was saved.
    """

    catalog: Catalog
    target: Strategy | None
    found: Diagnostics
    ranks: Sequence[int]
    stages: tuple[Stage, ...]
    tensors: Mapping[str, Distribution]
    metas: Mapping[str, TensorMeta]
    rows: tuple[Row, ...]
    patterns: Collection[str]
    rank: int | None
    matrices: Mapping[tuple[int, ...], tuple[int, ...]]
    names_of: Mapping[tuple[int, Matrix], tuple[str, ...]]
    groups: tuple[RankGroup, ...]
    absent: tuple[str, ...] = ()
    has_plan: bool = True
    obstacles: tuple[Obstacle, ...] = ()
    is_deduplicated: bool = False

    def _texts(self) -> Iterator[str]:
        yield self.catalog.root if self.target is None else self.target.origin
        yield format_ranks(self.ranks if self.rank is None else [self.rank])
        yield count(len(self.tensors), "tensor")
        yield "" if self.has_plan else "the target cannot be"

    def _rows(self) -> Iterator[Sequence[str]]:
        yield ("tensor", "slice", "ranks")
        for name, one in self.tensors.items():
            for part in one.slices:
                yield (name, " and ".join(map(str, part.regions)), format_numbers(part.ranks, ", "))

    @property
    def lost(self) -> list[int]:
        """The ranks that have no file that can be read."""
        return _without_file(self.catalog, self.target, self.ranks)

    @property
    def nbytes(self) -> int:
        """Size of the tensors; with a rank, of its slices."""
        if self.rank is None:
            return sum(self.metas[name].nbytes for name in self.tensors)
        return sum(
            _nbytes(part, one, self.metas[name])
            for name, one in self.tensors.items()
            for part in one.slices
        )


def explain(
    catalog: Catalog,
    strategy: Strategy | None = None,
    target: Strategy | None = None,
    *,
    rank: int | None = None,
    options: ResolveOptions = ResolveOptions(),
    executor: Executor | None = None,
) -> Explanation:
    """Explain what the ranks of a checkpoint hold, or what those of a target would.

    Parameters
    ----------
    catalog, strategy
        The source, from `scan`, and its layouts; None for a checkpoint that holds full tensors or
        describes itself.
    target
        Layouts of a target, whose ranks are explained in place of those of the source.
    rank
        Explain only this rank.
    options
        How the source is resolved, and which tensors are explained.
    executor
        Reads contents where they decide; by default the caller's own thread.

    Raises
    ------
    FormatError, StrategyError, PlanError
        The source cannot be explained, there is no such rank, or a pattern matches no name.
    """
    read = try_reading(catalog, strategy, target, None, options, executor or InlineExecutor())
    found, checkpoint = read.found, read.checkpoint
    is_mistaken = any(one.code == "options" for one in found)
    if checkpoint is None or checkpoint.unread or is_mistaken or refuses_layouts(found):
        found.raise_if_errors()
    assert checkpoint is not None, "else there is an error"
    if target is not None:
        return _explain_target(catalog, target, rank, options.tensors.include, read)
    layouts = checkpoint.strategy.layouts
    tensors = distribute(checkpoint, strategy)
    holders = (one.ranks for each in {*tensors.values()} for one in each.slices)
    ranks = {*catalog.files, *catalog.damaged, *chain(*holders)}
    ranks.update(ranks_without_file(checkpoint.catalog, checkpoint.strategy))
    side = _Side(
        catalog,
        None,
        found,
        sorted(ranks),
        tuple(_find_stages(chain(*layouts.values()))),
        tensors,
        {one.name: _full_meta(one) for one in checkpoint.records},
        {name: layouts[name] for name in layouts if name in checkpoint.wanted - tensors.keys()},
        checkpoint.is_deduplicated,
    )
    return side.explain(rank, options.tensors.include)


def _full_meta(one: Tensor) -> TensorMeta:
    """Return a full tensor, also of one that lacks slices; else a slice."""
    if isinstance(one, BrokenTensor) and one.partial:
        return one.meta.of_shape(one.partial[0].shape)
    return one.meta


@dataclass(frozen=True, slots=True)
class _Side:
    """All that there is to explain of a source or a target; see `Explanation`.

    ``absent`` has the layouts of tensors that are in no file.  In a deduplicated checkpoint each
    slice is on one of its ranks.
    """

    catalog: Catalog
    target: Strategy | None
    found: Diagnostics
    ranks: Sequence[int]
    stages: tuple[Stage, ...]
    tensors: Mapping[str, Distribution]
    metas: Mapping[str, TensorMeta]
    absent: Mapping[str, Sequence[Layout]] = field(default_factory=dict)
    is_deduplicated: bool = False

    def explain(self, rank: int | None, patterns: Collection[str]) -> Explanation:
        """Return the explanation, only of a rank if one is given."""
        tensors, absent = self.tensors, self.absent
        _check_rank(rank, self.ranks, self.catalog.root if self.target is None else "the target")
        lost = frozenset(_without_file(self.catalog, self.target, self.ranks))
        groups = tuple(_group(tensors, self.metas, self.ranks, self.stages, lost))
        matrices: dict[tuple[int, ...], tuple[int, ...]] = {}
        if rank is not None:
            groups = tuple(one for one in groups if rank in one.ranks)
            parts = {one: one.of_rank(rank) for one in {*tensors.values()}}
            tensors = {name: parts[one] for name, one in tensors.items() if parts[one].slices}
            layouts = chain(*absent.values(), *(one.layouts for one in tensors.values()))
            of_rank = dict.fromkeys(one for one in layouts if rank in one.ranks)
            matrices = {one.device_matrix: one.coordinate(rank) for one in of_rank}
            absent = {
                name: one for name, one in absent.items() if not of_rank.keys().isdisjoint(one)
            }
        names_of: dict[tuple[int, Matrix], dict[str, None]] = {}
        layouts_of = ((name, one.layouts) for name, one in tensors.items())
        for name, having in chain(layouts_of, absent.items()):
            for layout in (one for one in having if rank is None or rank in one.ranks):
                names_of.setdefault((layout.stage, layout.device_matrix), {})[name] = None
        return Explanation(
            self.catalog,
            self.target,
            self.found,
            self.ranks,
            self.stages,
            tensors,
            self.metas,
            _fold(
                *(tensors, self.metas),
                over_stages=rank is None and not patterns,
                by_stored=not self.is_deduplicated,
            ),
            patterns,
            rank,
            matrices,
            {key: tuple(having) for key, having in names_of.items()},
            groups,
            tuple(absent),
            is_deduplicated=self.is_deduplicated,
        )


def _check_rank(rank: int | None, ranks: Sequence[int], where: str) -> None:
    """Raise an error for a rank that does not exist; it has the ranks that do."""
    if rank is not None and rank not in ranks:
        what = "the ranks are" if len(ranks) > 1 else "the only one is"
        numbers = format_ranks(ranks, most=6).partition(" ")[2]
        text, hint = f"there is no rank {rank}", f"--rank with one of {numbers}"
        facts = f"{what} {numbers}"
        raise PlanError([Diagnostic("options", text, hint=hint, facts=facts, where=where)])


# ------------------------------------------------------------------------------------ distributions


def distribute(
    checkpoint: Checkpoint,
    listed: Strategy | None = None,
    equal_ranks: Mapping[str, RankGroups] | None = None,
) -> dict[str, Distribution]:
    """Return how the tensors of a checkpoint are distributed, also those that are incomplete.

    Equal distributions are one object.  A tensor whose slices do not fit together has no slices.

    Parameters
    ----------
    checkpoint
        The checkpoint.
    listed
        The strategy as it was read, before contents corrected it.
    equal_ranks
        Name to the groups of ranks with equal contents, of tensors without a layout.
    """
    catalog, known = checkpoint.catalog, dict[Hashable, Distribution]()
    found: dict[str, Distribution] = {}
    for one in checkpoint.records:
        held = catalog.holders.get(one.name, ())
        slicings, shard = tuple(_slicings(one)), _listed_shard(one, listed)
        groups = one.known_by.groups if isinstance(one.known_by, Whole | Unlisted) else ()
        if groups and equal_ranks is not None:
            groups = equal_ranks.get(one.name, groups)
        key = (_full_meta(one).shape, groups, *(each.key for each in slicings), _known(one), shard)
        if (key, id(held)) not in known:
            shape, slices = _full_meta(one).shape, tuple(_slices_of(slicings, held))
            if groups:
                slices = tuple(Slice((Region.whole(shape),), ranks, ranks) for ranks in groups)
            known[key, id(held)] = Distribution(shape, _known(one), slices, shard)
        found.setdefault(one.name, known[key, id(held)])
    return found


def _slicings(one: Tensor) -> Iterator[Slicing]:
    """Yield the slicings of all stages that hold slices of a tensor; none without a layout."""
    if isinstance(one.known_by, Whole | Unlisted):
        return
    if isinstance(one, BrokenTensor):
        yield from one.partial
    else:
        yield from (one.slicing, *one.copies, *one.incomplete)


def _slices_of(slicings: Iterable[Slicing], held: Ranks) -> Iterator[Slice]:
    having = frozenset(held)
    for slicing in slicings:
        layout = slicing.layout if isinstance(slicing, LayoutSlicing) else None
        for ranks, regions in zip(slicing.owners(), slicing.regions(), strict=True):
            stored = (
                ranks if having.issuperset(ranks) else tuple(filter(having.__contains__, ranks))
            )
            yield Slice(regions, ranks, stored, layout)


def _known(one: Tensor) -> Known:
    match one.known_by:
        case Listed():
            return "listed"
        case Follows():
            return "follows"
        case Whole() | Own():
            return "whole"
        case Unlisted():
            return "unlisted"


def _listed_shard(one: Tensor, listed: Strategy | None) -> int | None:
    """Return the optimizer shard that the strategy lists, if that of the slices is another."""
    base = one.known_by.parameter if isinstance(one.known_by, Follows) else one.name
    layouts = () if listed is None else listed.layouts.get(base, ())
    slicings = [each.layout for each in _slicings(one) if isinstance(each, LayoutSlicing)]
    if not layouts or not slicings or layouts[0].optimizer_shard == slicings[0].optimizer_shard:
        return None
    return layouts[0].optimizer_shard


# ------------------------------------------------------------------------------ ranks, stages, rows


def _find_stages(layouts: Iterable[Layout]) -> Iterator[Stage]:
    """Yield the stages, with their device matrices: those of most sharded tensors first."""
    found: dict[range, dict[tuple[int, ...], list[int]]] = {}
    for one in layouts:
        number = found.setdefault(one.ranks, {}).setdefault(one.device_matrix, [0, 0, 0])
        slices = max(one.slice_counts, default=1)
        number[0] += slices > one.optimizer_shard
        number[1] += slices > 1
        number[2] += 1
    for ranks, matrices in sorted(found.items(), key=lambda item: item[0][0]):
        yield Stage(ranks, tuple(sorted(matrices, key=matrices.__getitem__, reverse=True)))


def _without_file(catalog: Catalog, target: Strategy | None, ranks: Iterable[int]) -> list[int]:
    """Return the ranks of a source that have no file that can be read; none of a target."""
    if target is not None or catalog.is_merged:
        return []
    return [rank for rank in ranks if rank not in catalog.files]


def _nbytes(part: Slice, one: Distribution, meta: TensorMeta) -> int:
    """Return the size of a slice; what cannot be divided is whole."""
    elements = math.prod(one.shape)
    return meta.nbytes * part.size // elements if elements else meta.nbytes


def _group(
    tensors: Mapping[str, Distribution],
    metas: Mapping[str, TensorMeta],
    ranks: Sequence[int],
    stages: Sequence[Stage],
    lost: Collection[int],
) -> Iterator[RankGroup]:
    """Yield the ranks that should hold the same slices of all tensors that are known to be slices.

    What a rank has for itself, such as a random state, distinguishes no groups.  Of a ``lost`` rank
    it is not known: it is in the first group with the same slices.
    """
    names: dict[Distribution, list[str]] = {}
    for name, one in tensors.items():
        names.setdefault(one, []).append(name)
    held: dict[int, list[tuple[int, int]]] = {rank: [] for rank in ranks}
    amounts = dict.fromkeys(ranks, (0, 0))
    sources: dict[int, set[int]] = {rank: set() for rank in ranks}
    for number, (one, having) in enumerate(names.items()):
        for at, part in enumerate(one.slices):
            nbytes = sum(_nbytes(part, one, metas[name]) for name in having)
            for rank in part.ranks:
                before = amounts[rank]
                amounts[rank] = before[0] + len(having), before[1] + nbytes
                sources[rank].update(taken.rank for taken in part.taken)
                if one.known_by != "unlisted":
                    held[rank].append((number, at))
    stage_of = {rank: stage for stage in stages for rank in stage.ranks}
    groups: dict[Hashable, list[int]] = {}
    first: dict[Hashable, list[int]] = {}
    for rank in sorted(ranks, key=lost.__contains__):  # those without a file come last
        stage = stage_of.get(rank)
        slices = tuple(held[rank]), stage and stage.ranks, frozenset(sources[rank])
        if rank in lost and slices in first:
            first[slices].append(rank)
            continue
        members = groups.setdefault((slices, amounts[rank]), [])
        members.append(rank)
        first.setdefault(slices, members)
    for members in sorted(groups.values(), key=min):
        amount = amounts[members[0]]  # of a rank with a file, if one has
        members.sort()
        stage, coordinate = stage_of.get(members[0]), tuple[int | None, ...]()
        if stage is not None:
            layout = Layout(stage.device_matrices[0], (), first_rank=stage.ranks[0])
            axes = zip(*map(layout.coordinate, members), strict=True)
            coordinate = tuple(at[0] if len({*at}) == 1 else None for at in axes)
        yield RankGroup(
            tuple(members),
            None if stage is None else stage.ranks[0] // len(stage.ranks),
            coordinate,
            *amount,
            tuple(sorted(sources[members[0]])),
            tuple(filter(lost.__contains__, members)),
        )


def _fold(
    tensors: Mapping[str, Distribution],
    metas: Mapping[str, TensorMeta],
    over_stages: bool,
    by_stored: bool,
) -> tuple[Row, ...]:
    """Fold the tensors that are distributed alike: over ranks of several stages, or of one.

    With ``by_stored`` also the ranks that have a slice on disk are the same.
    """
    numbers: dict[Hashable, int] = {}  # of the kinds, which have a slice for each rank
    kinds: dict[Distribution, int] = {}
    placements: dict[Distribution, Placement] = {}
    for one in dict.fromkeys(tensors.values()):
        first = one.layouts[0].first_rank if one.layouts else 0
        where: tuple[object, ...] = tuple(replace(each, first_rank=0) for each in one.layouts)
        if not over_stages:
            where = one.layouts, tuple(part.stored for part in one.slices if by_stored)
        regions = tuple((part.regions, part.taken) for part in one.slices)
        kind = one.known_by == "unlisted", where, regions, one.listed_shard
        kinds[one] = numbers.setdefault(kind, len(numbers))
        ranks = tuple(tuple(rank - first for rank in part.ranks) for part in one.slices)
        placements[one] = Placement("layout", None, ranks, first_rank=first)
    entries = tuple(
        Entry(name, metas[name].dtype, metas[name].header_shape, placements[one])
        for name, one in tensors.items()
    )
    full = {name: metas[name] for name in tensors}
    listed = [name for name, one in tensors.items() if one.known_by == "listed"]
    states = drop_unlike_shapes(match_states(listed, full), full)
    return fold_rows(Summary(entries, states), lambda entry: kinds[tensors[entry.name]])


# ----------------------------------------------------------------------------------------- a target


def _explain_target(
    catalog: Catalog, target: Strategy, rank: int | None, patterns: Collection[str], read: Reading
) -> Explanation:
    """Explain what the ranks of a target would hold, and read; or why it cannot be."""
    _check_rank(rank, target.ranks, target.origin)
    plan, found, layouts = read.plan, read.found, [*read.placed]
    placed_layouts = chain(*(of_tensor for _, of_tensor in layouts))
    in_stages = (one for one in placed_layouts if len(one.ranks) == target.stage_ranks)
    stages = tuple(_find_stages(in_stages))
    if plan is None:
        obstacles = tuple(_find_obstacles(layouts))
        if not obstacles:
            found.raise_if_errors()
        nothing = _Side(catalog, target, found, target.ranks, stages, {}, {})
        return replace(
            nothing.explain(None, patterns),
            rank=rank,
            groups=(),
            has_plan=False,
            obstacles=obstacles,
        )
    by_name: dict[str, list[Transfer]] = {}
    for transfer in plan.transfers:
        by_name.setdefault(transfer.name, []).append(transfer)
    metas = {name: of_name[0].meta for name, of_name in by_name.items()}
    tensors = _distribute_target(plan, by_name)
    return _Side(catalog, target, found, target.ranks, stages, tensors, metas).explain(
        rank, patterns
    )


def _distribute_target(
    plan: Plan, transfers: Mapping[str, Sequence[Transfer]]
) -> dict[str, Distribution]:
    """Return what the ranks of a target would hold, and read; equal distributions are one object.

    Of the tensors that are distributed alike in the source and in the target, the outputs of the
    first are computed.  If the plan has outputs of one rank only, there are only its slices, each
    with all ranks that hold it.
    """
    (catalog,) = plan.inputs
    alike: dict[Hashable, list[str]] = {}
    for name, of_name in transfers.items():
        key = tuple(
            (one.layouts, one.source.slicing.key, id(catalog.holders[one.source.name]))
            for one in of_name
        )
        alike.setdefault(key, []).append(name)
    found: dict[str, Distribution] = {}
    firsts = tuple(chain(*(transfers[names[0]] for names in alike.values())))
    slices: dict[str, dict[tuple[Layout, Region], tuple[Taken, ...]]] = {}
    layouts_of = {id(one.terms): one.layouts for one in firsts}
    for output in replace(plan, transfers=firsts):
        for tensor in output.tensors:
            region = tensor.region
            layout = next(one for one in layouts_of[id(tensor.terms)] if output.rank in one.ranks)
            equal = slices.setdefault(tensor.meta.name, {})
            if (layout, region) not in equal:
                pieces = tensor.pieces(Region.whole(region.shape))
                taken = (Taken(one.rank, one.dst.moved_by(region.start), one.src) for one in pieces)
                equal[layout, region] = tuple(taken)
    holders: dict[tuple[Layout, tuple[int, ...]], dict[Region, Ranks]] = {}
    for names in alike.values():
        shape, parts = transfers[names[0]][0].meta.shape, list[Slice]()
        for (layout, region), taken_of in slices.get(names[0], {}).items():
            if (layout, shape) not in holders:
                holders[layout, shape] = _ranks_of_regions(layout, shape)
            ranks = holders[layout, shape][region]
            parts.append(Slice((region,), ranks, (), layout, taken_of))
        one = Distribution(shape, "listed", tuple(parts))
        found.update(dict.fromkeys(names, one))
    return {name: found[name] for name in transfers}


def _ranks_of_regions(layout: Layout, shape: tuple[int, ...]) -> dict[Region, Ranks]:
    """Return for each region the ranks that hold it, ascending; empty slices are equal."""
    found: dict[Region, list[int]] = {}
    for rank in layout.ranks:
        found.setdefault(layout.region(rank, shape), []).append(rank)
    return {region: tuple(ranks) for region, ranks in found.items()}


def _find_obstacles(
    placed: Sequence[tuple[FullTensor, tuple[Layout, ...]]],
) -> Iterator[Obstacle]:
    """Yield the axes that do not divide: once for each layout, shape and axis."""
    names: dict[tuple[Layout, tuple[int, ...]], list[str]] = {}
    for tensor, layouts in placed:
        for layout in layouts:
            names.setdefault((layout, tensor.meta.shape), []).append(tensor.name)
    near: dict[Matrix, tuple[Matrix, ...]] = {}
    for (layout, shape), having in names.items():
        if len(shape) != len(layout.tensor_map) or not layout.has_boxes:
            continue
        for axis in layout.uneven_axes(shape):
            near = near or _nearest_matrices(math.prod(layout.device_matrix), names)
            yield Obstacle(tuple(having), shape, layout, axis, near[layout.device_matrix])


def _nearest_matrices(
    ranks: int, placed: Iterable[tuple[Layout, tuple[int, ...]]]
) -> dict[Matrix, tuple[Matrix, ...]]:
    """Return for each device matrix those that divide all tensors, with other numbers of ranks.

    The numbers are one that is at most as large as ``ranks``, and one that is larger, for which
    every device matrix has such a one.  Sizes of axes change as little as possible; then the
    nearest numbers count.
    """
    pairs: dict[Matrix, list[tuple[Layout, tuple[int, ...]]]] = {}
    for layout, shape in placed:
        if len(layout.ranks) == ranks and len(layout.tensor_map) == len(shape):
            pairs.setdefault(layout.device_matrix, []).append((layout, shape))
    ways = {matrix: _vary(matrix, of_matrix) for matrix, of_matrix in pairs.items()}
    if not all(ways.values()):
        return dict.fromkeys(pairs, ())
    least = sum(_unlike(of_matrix[0], matrix) for matrix, of_matrix in ways.items())

    def fit(matrix: Matrix, number: int) -> tuple[int, Matrix] | None:
        """Return the device matrix of so many ranks that changes least, and how much it does."""
        for way in ways[matrix]:
            filled = _fill(way, matrix, number)
            if filled is not None and _divides(filled, pairs[matrix]):
                return _unlike(way, matrix), filled
        return None

    def choose(numbers: Iterable[int]) -> list[Matrix]:
        """Return the device matrices for one of these numbers, in the order of ``pairs``."""
        best, change = list[Matrix](), 0
        for number in numbers:
            fits = [one for matrix in pairs if (one := fit(matrix, number)) is not None]
            cost = sum(one for one, _ in fits)
            if len(fits) == len(pairs) and (not best or cost < change):
                best, change = [matrix for _, matrix in fits], cost
                if cost == least:
                    break
        return best

    chosen = map(choose, (range(ranks, 0, -1), range(ranks + 1, MAX_GROWTH * ranks + 1)))
    found = [one for one in chosen if one]
    return {matrix: tuple(one[at] for one in found) for at, matrix in enumerate(pairs)}


def _unlike(way: Matrix, matrix: Matrix) -> int:
    """Return how much the sizes of axes change."""
    return sum(abs(a - b) for a, b in zip(way, matrix, strict=True) if a)


def _fill(way: Matrix, matrix: Matrix, number: int) -> Matrix | None:
    """Return a device matrix of so many ranks, with sizes in place of 0; None if there is none.

    Examples
    --------
    >>> _fill((0, 0, 32), (32, 3, 48), 4608), _fill((0, 2), (4, 3), 7), _fill((2,), (3,), 4)
    ((48, 3, 32), None, None)
    """
    rest, is_left = divmod(number, math.prod(filter(None, way)))
    free = [at for at, size in enumerate(way) if not size]
    if is_left or (rest > 1 and not free):
        return None
    kept = math.prod(matrix[at] for at in free[1:])
    filled = {at: 1 if rest % kept else matrix[at] for at in free}
    if free:
        filled[free[0]] = rest if rest % kept else rest // kept
    return tuple(filled.get(at, size) for at, size in enumerate(way))


def _vary(matrix: Matrix, placed: Sequence[tuple[Layout, tuple[int, ...]]]) -> list[Matrix]:
    """Return device matrices with other sizes of the axes that are in the way, the nearest first.

    Such a size divides each tensor axis that the device axis shards.  Axes that shard nothing have
    size 0: they take what is left.
    """
    uneven: set[int] = set()
    sharded: dict[int, list[int]] = {}
    for layout, shape in placed:
        uneven |= {at for one in layout.uneven_axes(shape) for at in layout.tensor_map[one.axis]}
        for axes, size in zip(layout.tensor_map, shape, strict=True):
            for at in axes:
                sharded.setdefault(at, []).append(size)
    choices: list[list[int]] = []
    for place, size in enumerate(matrix):
        axis = len(matrix) - 1 - place
        limit = math.gcd(*sharded.get(axis, [0]))
        if axis in uneven:
            choices.append(divisors(limit)[1:] or [1])
        else:
            choices.append([size if axis in sharded else 0])
    if math.prod(map(len, choices)) > MAX_MATRICES:
        return []
    return sorted(product(*choices), key=lambda way: _unlike(way, matrix))


def _divides(matrix: Matrix, placed: Sequence[tuple[Layout, tuple[int, ...]]]) -> bool:
    """Return whether a device matrix can take the place of that of all these layouts."""
    for layout, _ in placed:  # quicker, and nearly always the reason
        used = math.prod(matrix[-1 - axis] for axes in layout.tensor_map for axis in axes)
        if math.prod(matrix) // used % layout.optimizer_shard:
            return False
    moved = (
        (replace(layout, device_matrix=matrix, first_rank=0), shape) for layout, shape in placed
    )
    return all(layout.why_not(shape) is None for layout, shape in moved)
