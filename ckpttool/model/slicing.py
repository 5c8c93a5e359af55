"""Full tensors, and the stored slices that hold their elements.

Slices follow from a layout (`LayoutSlicing`), or the checkpoint describes its boxes of elements
(`BoxSlicing`).  Equal boxes are replicas.  The boundaries of all boxes of a tensor form a grid, and
every box is a block of grid cells.  The boxes must fill the tensor exactly, and only equal boxes
may overlap.  Arithmetic on the boundaries finds them, as for a layout.

`holdings` says of each slice who should hold it and who does.  All answers about missing slices,
replicas and placements are folds of it, so they agree.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, chain, islice, pairwise, product
from operator import add, mul, sub
from typing import Literal, NamedTuple, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from ckpttool.model.layout import Layout
from ckpttool.model.region import (
    Arrangement,
    Region,
    Steps,
    View,
    common,
    count_overlaps,
    flat_index,
    grid_overlaps,
    strides_of,
)
from ckpttool.model.tensors import StoredTensor, TensorMeta
from ckpttool.problems import Diagnostic
from ckpttool.wording import shorten

MAX_CELLS = 1_000_000  # of one tensor; even the boxes of all ranks of a cluster make fewer


class Piece(NamedTuple):
    """The overlap of a stored slice with a region of the full tensor.

    ``dst`` are the elements of ``src``, counted from the origin of the region; their shapes are
    equal.  Both are in steps if the axes of the full tensor are not those of the slice.
    """

    rank: int  # the rank whose slice is read; of a merged checkpoint, the number of the file
    tensor: StoredTensor  # the stored slice
    src: Region | View  # the elements of the slice to read
    dst: Region | Steps


class Holding(Struct, frozen=True, gc=False):
    """A slice of a tensor: its elements, who should hold it, and who does.

    ``region`` has the elements of a slice without a layout; None if nothing says which they are.
    """

    owners: tuple[int, ...]  # the ranks that should hold it, ascending
    holders: tuple[int, ...] = ()  # those of them that have it on disk; none in a target
    layout: Layout | None = None  # the layout of the stage of these ranks; None if there is none
    shape: tuple[int, ...] = ()  # the full shape, from which the layout cuts the slice
    region: Region | None = None

    @property
    def regions(self) -> tuple[Region, ...]:
        """Its elements: one region, several of a field-sliced embedding, () if it is not known.

        A stage has thousands of slices, and most questions are not about elements.
        """
        if self.layout is None:
            return () if self.region is None else (self.region,)
        index = self.layout.slice_index(self.owners[0])
        return tuple(self.layout.boxes(index, self.shape))

    @property
    def size(self) -> int:
        """Number of elements."""
        return sum(region.size for region in self.regions)


Slicing: TypeAlias = "LayoutSlicing | BoxSlicing | RearrangedSlicing"


def find_pieces(slicing: Slicing, within: Region, origin: tuple[int, ...]) -> Iterator[Piece]:
    """Yield the pieces of elements of the full tensor, which are counted from ``origin``."""
    for place, src, dst in slicing.stretches(within, origin):
        yield Piece(*slicing.find(place), src, dst)


class LayoutSlicing(Struct, frozen=True, gc=False):
    """Slices that follow from a layout; they fill the full tensor, and replicas are equal.

    ``files`` are the tensors of each rank's file, with at least one owner of each slice that is
    read.  All have the tensor; ranks outside the stage are ignored.
    """

    layout: Layout  # how the tensor is sharded over the ranks of one stage
    shape: tuple[int, ...]  # the full shape
    name: str  # the name of the tensor in the files
    files: Mapping[int, Mapping[str, StoredTensor]]

    def __hash__(self) -> int:
        return hash((self.layout, self.shape, self.name))

    @property
    def key(self) -> Hashable:
        """A value that is equal for tensors of equal shape whose equal ranks hold equal slices."""
        return self.layout, self.shape

    @property
    def distribution_key(self) -> Hashable:
        """The key without the shape: equal for tensors with the same distribution over ranks."""
        return self.layout

    def stretches(
        self, within: Region, origin: tuple[int, ...]
    ) -> Iterator[tuple[tuple[int, ...], Region, Region]]:
        """Yield owners, source and destination of each stretch, in C order of the slices.

        ``within`` are elements of the full tensor, counted from ``origin``.  All is equal for
        slicings with equal keys; `find` returns the stored tensor.
        """
        for index, src, dst in self.layout.overlaps(within, origin, self.shape):
            yield self.layout.owners(index), src, dst

    def find(self, place: Hashable) -> tuple[int, StoredTensor]:
        """Return the lowest rank that has the slice of a stretch, and the slice.

        All outputs thus get the same bytes, even if replicas differ.
        """
        assert isinstance(place, tuple)
        for rank in place:
            if rank in self.files:
                return rank, self.files[rank][self.name]
        raise LookupError(f"no owner of the slice of ranks {place}")

    def count_overlaps(self, region: Region) -> int:
        """Return how many stretches a region of the full tensor has."""
        return self.layout.count_overlaps(region, self.shape)

    def excerpt(self, region: Region) -> LayoutSlicing:
        """Return a slicing with the same stretches of ``region`` and no other slices.

        It omits replicas and the catalog, so its pickle is small.
        """
        indices = self.layout.touched(region, self.shape)
        slices = map(self.find_slice, indices)
        return replace(self, files={rank: {self.name: tensor} for rank, tensor in slices})

    def replicas(self) -> Iterator[dict[int, StoredTensor]]:
        """Yield rank to stored tensor for each slice, slices in C order, ranks ascending."""
        for ranks in self.owners():
            yield {rank: self.files[rank][self.name] for rank in ranks if rank in self.files}

    def owners(self) -> Iterator[tuple[int, ...]]:
        """Yield the ranks that should hold each slice, in the order of `replicas`."""
        return self.layout.slice_owners()

    def holdings(self, within: Region | None = None) -> Iterator[Holding]:
        """Yield for each slice who should hold it and who does, in the order of `replicas`.

        With a region only those that overlap it.
        """
        layout, shape, is_held = self.layout, self.shape, self.files.__contains__
        touched = layout.slice_indices() if within is None else layout.touched(within, shape)
        for owners in map(layout.owners, touched):
            yield Holding(owners, tuple(filter(is_held, owners)), layout, shape)

    def bounds(self, rank: int) -> Region:
        """Return a region of the full tensor that contains the slices of ``rank``."""
        if rank in self.layout.ranks and self.layout.has_boxes:
            return self.layout.region(rank, self.shape)
        return Region.whole(self.shape)

    def find_slice(self, index: tuple[int, ...]) -> tuple[int, StoredTensor]:
        """Return the lowest owner that has the slice at ``index`` of the layout, and the slice."""
        return self.find(self.layout.owners(index))


RankGroups = tuple[tuple[int, ...], ...]  # each group of ranks holds equal tensors


class Listed(Struct, frozen=True):
    """The strategy lists the tensor, or the checkpoint describes it."""


class Follows(Struct, frozen=True):
    """Optimizer state that the strategy does not list; it is sharded like its ``parameter``."""

    parameter: str


class Whole(Struct, frozen=True):
    """Files hold the tensor in full: those of a merged checkpoint, or of replicated ranks.

    ``groups`` are the ranks that hold it, grouped by what headers and contents show to be equal.
    """

    groups: RankGroups


class Unlisted(Struct, frozen=True):
    """Nothing says how the tensor is sharded, so ranks that hold it should hold the same.

    ``odd_shapes`` says that it is named like optimizer state, and is neither a slice nor full.
    """

    groups: RankGroups
    odd_shapes: str = ""


class Own(Struct, frozen=True):
    """Each file of these ``ranks``, ascending, has a tensor of its own; they are not joined."""

    ranks: tuple[int, ...]


KnownBy = Listed | Follows | Whole | Unlisted | Own


class FullTensor(Struct, frozen=True, gc=False):
    """A tensor of a checkpoint, distributed over files: everything that is known of it.

    Attributes
    ----------
    copies
        The slicings of the other stages that hold all of it, if stages share it.
    incomplete
        The slices of each stage that has gaps, by its layout; nobody there holds some of them.
    only_for
        ``(r, n)`` for a tensor that goes only to the target ranks ``t`` with ``t % n == r``; None
        for one that is the same for all ranks.
    """

    meta: TensorMeta  # name, element type and full shape
    slicing: Slicing  # the stored slices and their elements
    known_by: KnownBy  # how the slicing is known
    copies: tuple[LayoutSlicing, ...] = ()
    incomplete: tuple[LayoutSlicing, ...] = ()
    is_corrected: bool = False  # whether the strategy lists another layout than the slices have
    only_for: tuple[int, int] | None = None

    @property
    def name(self) -> str:
        """The name of the tensor."""
        return self.meta.name

    @property
    def stages(self) -> tuple[Slicing, ...]:
        """The slicing of each stage that holds slices; the one to read comes first."""
        return (self.slicing, *self.copies, *self.incomplete)

    @property
    def layout(self) -> Layout:
        """The layout of a tensor that a strategy shards, or that one file holds in full."""
        assert isinstance(self.slicing, LayoutSlicing), f"{self.meta.name}: described, no layout"
        return self.slicing.layout

    @property
    def stored_names(self) -> tuple[str, ...]:
        """The names of the tensors in the files that hold its elements."""
        if isinstance(self.slicing, RearrangedSlicing):
            return self.slicing.stored_names
        return (self.name,)

    @property
    def is_turned(self) -> bool:
        """See `RearrangedSlicing`; no other tensor is."""
        return isinstance(self.slicing, RearrangedSlicing) and self.slicing.is_turned

    @property
    def own_ranks(self) -> tuple[int, ...]:
        """The ranks that have a tensor of their own; () if it is one tensor for all."""
        return self.known_by.ranks if isinstance(self.known_by, Own) else ()

    def of_rank(self, rank: int) -> FullTensor:
        """Return the tensor that an output of ``rank`` takes: its own, or the one for all."""
        if not self.own_ranks:
            return self
        assert isinstance(self.slicing, LayoutSlicing), "a file holds it in full"
        layout = Layout.unsharded(len(self.meta.shape), 1, rank)
        slicing = replace(self.slicing, layout=layout)
        return FullTensor(self.meta, slicing, self.known_by)  # `replace` takes three times as long

    def rearranged(self, slicing: RearrangedSlicing, name: str | None = None) -> FullTensor:
        """Return a tensor that is made of this one or is like it, perhaps with another name."""
        name = self.name if name is None else name
        meta = replace(self.meta, name=name, shape=slicing.shape)
        return replace(self, meta=meta, slicing=slicing, copies=(), incomplete=())

    @property
    def slice_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The distinct shapes of the slices, that of the first slice first."""
        if isinstance(self.slicing, BoxSlicing):
            return tuple(dict.fromkeys(boxes[0].region.shape for boxes in self.slicing.slices))
        if isinstance(self.slicing, RearrangedSlicing):
            return (self.meta.shape,)
        return tuple(dict.fromkeys(self.layout.slice_shapes(self.meta.shape)))

    @property
    def is_sharded(self) -> bool:
        """Whether there are several slices."""
        return len([*islice(self.slicing.owners(), 2)]) > 1

    @property
    def is_sharded_by_layout(self) -> bool:
        """Whether there are several slices, and a layout says which elements they have."""
        return isinstance(self.slicing, LayoutSlicing) and self.is_sharded

    @property
    def is_listed(self) -> bool:
        """Whether the strategy lists the tensor, or the checkpoint describes it."""
        return isinstance(self.known_by, Listed)

    @property
    def has_layout(self) -> bool:
        """Whether the strategy or the checkpoint gives its slicing, or that of its parameter."""
        return isinstance(self.known_by, Listed | Follows)

    @property
    def parameter(self) -> str | None:
        """The parameter that unlisted optimizer state follows; None for any other tensor."""
        return self.known_by.parameter if isinstance(self.known_by, Follows) else None


class BrokenTensor(Struct, frozen=True):
    """A tensor of a checkpoint whose slices make no full tensor.

    Slices are missing (``gaps``), and ``stages`` has the slicing of each stage that holds some; or
    ``problem`` is another reason why they do not fit together.
    """

    meta: TensorMeta  # its slice on the lowest rank that holds one
    known_by: KnownBy  # how its slicing would be known
    gaps: tuple[tuple[int, ...], ...] = ()  # the ranks that should hold each missing slice
    stages: tuple[LayoutSlicing, ...] = ()
    problem: Diagnostic | None = None
    is_corrected: bool = False

    @property
    def name(self) -> str:
        """The name of the tensor."""
        return self.meta.name


Tensor = FullTensor | BrokenTensor


def holdings(tensor: Tensor) -> Iterator[Holding]:
    """Yield for each slice of a tensor who should hold it and who does, stage by stage.

    It is the one answer to this question.  If nothing lists the tensor, each group of ranks with
    equal contents holds all elements.  Slices that contradict each other yield nothing.
    """
    known_by = tensor.known_by
    if isinstance(known_by, Listed | Follows):
        for slicing in tensor.stages:
            yield from slicing.holdings()
        return
    groups = [(rank,) for rank in known_by.ranks] if isinstance(known_by, Own) else known_by.groups
    for ranks in groups:
        yield Holding(ranks, ranks, region=Region.whole(tensor.meta.shape))


class Box(Struct, frozen=True):
    """The region of a full tensor that one rank stores as a tensor of its shape."""

    region: Region
    rank: int
    tensor: StoredTensor


class BoxSlicing(Struct, frozen=True):
    """Slices as the checkpoint describes them itself; made by `fill_with_boxes`.

    The methods are those of `LayoutSlicing`.

    Attributes
    ----------
    slices
        The equal boxes of each slice, lowest rank first; slices in the order of their first
        elements.  A slice that an `excerpt` left out has an empty tuple.
    cuts
        Boundaries of all boxes along each axis, ascending from 0 to its size.
    cells
        Number of the slice in each cell between the boundaries, cells in C order.
    """

    slices: tuple[tuple[Box, ...], ...]
    cuts: tuple[tuple[int, ...], ...]
    cells: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.cells) != math.prod(self.slice_counts):
            raise ValueError(f"{len(self.cells)} cells in a grid of {self.slice_counts}")

    @property
    def shape(self) -> tuple[int, ...]:
        """See `LayoutSlicing`."""
        return tuple(cut[-1] for cut in self.cuts)

    @property
    def slice_counts(self) -> tuple[int, ...]:
        """Number of cells along each axis."""
        return tuple(len(cut) - 1 for cut in self.cuts)

    @property
    def is_grid(self) -> bool:
        """Whether every slice is one cell, so that the slices are a grid themselves."""
        return len(self.slices) == len(self.cells)

    @property
    def key(self) -> Hashable:
        """See `LayoutSlicing`."""
        return self.cuts, self.cells, tuple(self.owners())

    @property
    def distribution_key(self) -> Hashable:
        """See `LayoutSlicing`: the number of cells, and the owners of slices."""
        return self.slice_counts, tuple(self.owners())

    def stretches(
        self, within: Region, origin: tuple[int, ...]
    ) -> Iterator[tuple[int, Region, Region]]:
        """See `LayoutSlicing`; the number of a slice is in place of its owners."""
        counts = self.slice_counts
        for index, _, in_full in grid_overlaps(self.cuts, counts, within.moved_by(origin)):
            number = self.cells[flat_index(index, counts)]
            start = self.slices[number][0].region.start
            yield number, in_full.relative_to(start), in_full.relative_to(origin)

    def find(self, place: Hashable) -> tuple[int, StoredTensor]:
        """See `LayoutSlicing`."""
        assert isinstance(place, int)
        box = self.slices[place][0]
        return box.rank, box.tensor

    def count_overlaps(self, region: Region) -> int:
        """See `LayoutSlicing`."""
        return count_overlaps(self.cuts, region)

    def excerpt(self, region: Region) -> BoxSlicing:
        """See `LayoutSlicing`."""
        counts = self.slice_counts
        overlaps = grid_overlaps(self.cuts, counts, region)
        touched = {self.cells[flat_index(index, counts)] for index, _, _ in overlaps}
        slices = (boxes[:1] if i in touched else () for i, boxes in enumerate(self.slices))
        return replace(self, slices=tuple(slices))

    def replicas(self) -> Iterator[dict[int, StoredTensor]]:
        """See `LayoutSlicing`."""
        for boxes in self.slices:
            yield {box.rank: box.tensor for box in boxes}

    def owners(self) -> Iterator[tuple[int, ...]]:
        """See `LayoutSlicing`: the ranks that are described as owners."""
        for boxes in self.slices:
            yield tuple(dict.fromkeys(box.rank for box in boxes))

    def holdings(self) -> Iterator[Holding]:
        """See `LayoutSlicing`; no region for a slice that an `excerpt` left out."""
        for boxes, owners in zip(self.slices, self.owners(), strict=True):
            yield Holding(owners, owners, region=boxes[0].region if boxes else None)

    def bounds(self, rank: int) -> Region:
        """See `LayoutSlicing`; the full tensor, because a rank may have several boxes."""
        return Region.whole(self.shape)


class Part(Struct, frozen=True, gc=False):
    """A tensor of the source, and those of its elements that are in the space of an arrangement.

    A tensor that is rearranged itself is part only of one whose axes are those of its own.

    Attributes
    ----------
    start
        The index in the tensor of the first element in the space; () is the first of all.
    block
        The number of neighbours in the space that share a stored element, along each of the first
        axes of the part; all along the other axes.  The last ones of an axis may be fewer.  None if
        each is an element of its own.
    """

    name: str
    slicing: Slicing
    arrangement: Arrangement
    start: tuple[int, ...] = ()
    block: tuple[int, ...] | None = None

    def stored(self, region: Region) -> Region:
        """Return the elements of the stored tensor that a region of the part has."""
        if self.start:
            region = region.moved_by(self.start)
        if self.block is None:
            return region
        ends = [*zip(region.start, region.stop, self.block, strict=False)]
        start = tuple(first // size for first, _, size in ends)
        return Region(start, tuple(-(-last // size) for _, last, size in ends))

    def stretches(self, region: Region) -> Iterator[tuple[Hashable, Region, Region]]:
        """Yield place, source and elements of the part of each stretch in a region of the part.

        Without blocks the two regions are alike.  With them the source has one element; or several
        along one axis that is a factor of the space, and the part as many whole blocks.
        """
        origin, block = self.start or (0,) * region.ndim, self.block
        assert not isinstance(self.slicing, RearrangedSlicing), "its axes are others"
        if block is None:
            yield from self.slicing.stretches(region, origin)
            return
        wanted, region = self.stored(region), region.moved_by(origin)
        cells = [
            [(at, at + 1) for at in range(*of)]
            for of in zip(wanted.start, wanted.stop, strict=True)
        ]
        joined, of_axis = (0, 0), -1  # the longest run of whole blocks, which has one stretch
        for axis, size in enumerate(block):
            run = -(-region.start[axis] // size), region.stop[axis] // size
            if len(self.arrangement.axes[axis]) == 1 and run[1] - run[0] > joined[1] - joined[0]:
                joined, of_axis = run, axis
        if of_axis >= 0:
            before = wanted.start[of_axis]
            cells[of_axis][joined[0] - before : joined[1] - before] = [joined]
        for of_axes in product(*cells):
            start, stop = zip(*of_axes, strict=True) if of_axes else ((), ())
            for place, src, cell in self.slicing.stretches(Region(start, stop), (0,) * len(block)):
                first = (*map(mul, cell.start, block), *region.start[len(block) :])
                last = (*map(mul, cell.stop, block), *region.stop[len(block) :])
                covered = common(Region(first, last), region)
                assert covered is not None, "the block overlaps the region"
                yield place, src, covered.relative_to(origin)

    def walk(
        self, box: Region, src: Region, strides: Sequence[int]
    ) -> Iterator[tuple[int, int, int, int]]:
        """Yield the steps that read the elements of a box of the space.

        Each has its count, its stride in stored elements, an axis of the space, and its stride
        along that axis in elements of the box.
        """
        for factor, axis, step in self.arrangement.steps():
            size = box.stop[factor] - box.start[factor]
            if size > 1 and self.block is None:
                yield size, step * strides[axis], factor, 1
            elif size > 1:
                cells = src.shape[axis] if axis < src.ndim else 1
                if cells > 1:
                    yield cells, strides[axis], factor, size // cells
                yield size // cells, 0, factor, 1


class RearrangedSlicing(Struct, frozen=True, dict=True):
    """The places of the elements of a tensor that is made of others, with other axes.

    The methods are those of `LayoutSlicing`.  A stretch has elements in steps, in the order of the
    stored slice.  Its place is the number of a part and the place there.

    Attributes
    ----------
    arrangement
        The elements of the tensor.
    parts
        The tensors that have them; each element is in exactly one, or is padding.
    padding
        The values of elements that no part has: zero, or in each column the mean of the rows of the
        only part, which come first.  "" without such elements.
    """

    arrangement: Arrangement
    parts: tuple[Part, ...]
    padding: Literal["", "zero", "mean"] = ""

    @property
    def shape(self) -> tuple[int, ...]:
        """See `LayoutSlicing`."""
        return self.arrangement.shape

    @property
    def key(self) -> Hashable:
        """See `LayoutSlicing`."""
        parts = ((it.slicing.key, it.arrangement, it.start, it.block) for it in self.parts)
        return self.arrangement, self.padding, tuple(parts)

    @property
    def distribution_key(self) -> Hashable:
        """See `LayoutSlicing`."""
        return tuple(part.slicing.distribution_key for part in self.parts)

    @property
    def stored_names(self) -> tuple[str, ...]:
        """The names of the tensors in the files, each once."""
        inner = (
            part.slicing.stored_names
            if isinstance(part.slicing, RearrangedSlicing)
            else (part.name,)
            for part in self.parts
        )
        return tuple(dict.fromkeys(chain.from_iterable(inner)))

    @cached_property
    def is_turned(self) -> bool:
        """Whether rows of a part are columns here, so that a band has elements of each of them.

        Outer factors that both have in one order, as those of a stack, make no difference.
        """
        axis_of = {factor: axis for factor, axis, _ in self.arrangement.steps()}
        for part in self.parts:
            if (box := common(self.arrangement.box, part.arrangement.box)) is None:
                continue
            wide = {factor for factor, size in enumerate(box.shape) if size > 1}
            orders = ([it for it, *_ in of.steps()] for of in (self.arrangement, part.arrangement))
            here, there = ([it for it in order if it in wide] for order in orders)
            rows = next((both for both in zip(here, there, strict=True) if len({*both}) > 1), ())
            if len({axis_of[factor] for factor in rows}) > 1:
                return True
        return False

    def averaged(self, region: Region) -> Region | None:
        """Return the elements whose means are rows of a region; None if no row is a mean."""
        if self.padding != "mean":
            return None
        kept = self.parts[0].arrangement.box.stop[0]
        if region.stop[0] <= kept:
            return None
        return Region((0, *region.start[1:]), (kept, *region.stop[1:]))

    def stretches(
        self, within: Region, origin: tuple[int, ...]
    ) -> Iterator[tuple[Hashable, Region | View, Region | Steps]]:
        """See `LayoutSlicing`; regions, if the axes are those of the stored tensor."""
        steps = {factor: (axis, step) for factor, axis, step in self.arrangement.steps()}
        for number, wanted in self._wanted(within.moved_by(origin)):
            part, of_source = self.parts[number], self.parts[number].arrangement
            bounds = of_source.bounds(wanted)
            if self.arrangement.is_plain and of_source.is_plain and part.block is None:
                first = tuple(map(sub, of_source.box.start, self.arrangement.box.start))
                shift = tuple(map(sub, first, origin))
                begin = part.start or (0,) * bounds.ndim
                for place, src, dst in part.slicing.stretches(bounds, begin):
                    yield (number, place), src, dst.moved_by(shift)
                continue
            for place, in_slice, in_part in part.stretches(bounds):
                strides = strides_of(part.slicing.find(place)[1].meta.shape)
                for stretch in of_source.boxes(in_part):
                    if (box := common(stretch, wanted)) is None:
                        continue
                    at: Iterable[int] = in_slice.start
                    if part.block is None:
                        at = map(sub, map(add, of_source.index(box.start), at), in_part.start)
                    walk = [*part.walk(box, in_slice, strides)]
                    shape = tuple(size for size, *_ in walk)
                    by = tuple(stride for _, stride, *_ in walk)
                    index = tuple(map(sub, self.arrangement.index(box.start), origin))
                    axes = ((*steps[factor], times) for *_, factor, times in walk)
                    steps_there = tuple((axis, step * times) for axis, step, times in axes)
                    src = View(sum(map(mul, at, strides)), shape, by)
                    yield (number, place), src, Steps(index, shape, steps_there)

    def _wanted(self, region: Region) -> Iterator[tuple[int, Region]]:
        """Yield the boxes of a region that each part has, with its number."""
        axis, starts, stops, numbers = self._sorted_parts
        for box in self.arrangement.boxes(region):
            low, high = (*box.start, 0)[axis], (*box.stop, 1)[axis]
            first, last = bisect_right(stops, low), bisect_left(starts, high)
            for number in sorted(numbers[first:last]):
                if (shared := common(box, self.parts[number].arrangement.box)) is not None:
                    yield number, shared

    @cached_property
    def _sorted_parts(self) -> tuple[int, Sequence[int], Sequence[int], Sequence[int]]:
        """The numbers of parts by their starts along the axis of the space where most differ.

        Beside them the starts, and the most of all stops up to there.  There may be 512 experts.
        """
        ends = [((*it.start, 0), (*it.stop, 1)) for it in (p.arrangement.box for p in self.parts)]
        axes = range(max(self.arrangement.box.ndim, 1))
        axis = max(axes, key=lambda axis: len({start[axis] for start, _ in ends}))
        numbers = sorted(range(len(ends)), key=lambda number: ends[number][0][axis])
        starts = [ends[number][0][axis] for number in numbers]
        return axis, starts, [*accumulate((ends[it][1][axis] for it in numbers), max)], numbers

    def find(self, place: Hashable) -> tuple[int, StoredTensor]:
        """See `LayoutSlicing`."""
        assert isinstance(place, tuple)
        number, inner = place
        return self.parts[number].slicing.find(inner)

    def count_overlaps(self, region: Region) -> int:
        """See `LayoutSlicing`."""
        return sum(1 for _ in self.stretches(region, (0,) * region.ndim))

    def excerpt(self, region: Region) -> RearrangedSlicing:
        """See `LayoutSlicing`."""
        wanted: dict[int, list[Region]] = {}
        for number, box in self._wanted(self.averaged(region) or region):
            wanted.setdefault(number, []).append(self.parts[number].arrangement.bounds(box))
        parts = []
        for number, of_part in wanted.items():
            part, starts = self.parts[number], zip(*(it.start for it in of_part), strict=True)
            stops = zip(*(it.stop for it in of_part), strict=True)
            bounds = Region(tuple(map(min, starts)), tuple(map(max, stops)))
            parts.append(replace(part, slicing=part.slicing.excerpt(part.stored(bounds))))
        return replace(self, parts=tuple(parts))

    def replicas(self) -> Iterator[dict[int, StoredTensor]]:
        """See `LayoutSlicing`: those of all parts."""
        return chain.from_iterable(part.slicing.replicas() for part in self.parts)

    def owners(self) -> Iterator[tuple[int, ...]]:
        """See `LayoutSlicing`: those of the slices of all parts."""
        return chain.from_iterable(part.slicing.owners() for part in self.parts)

    def holdings(self) -> Iterator[Holding]:
        """See `LayoutSlicing`; slices of all parts, whose elements do not form a region."""
        for holding in chain.from_iterable(part.slicing.holdings() for part in self.parts):
            yield Holding(holding.owners, holding.holders)

    def bounds(self, rank: int) -> Region:
        """See `LayoutSlicing`; the full tensor."""
        return Region.whole(self.shape)


class Description(Struct, frozen=True):
    """The tensors that a checkpoint describes itself; all elements of ``tensors`` are stored."""

    files: tuple[str, ...]  # the files that hold the description
    tensors: Mapping[str, FullTensor]
    broken: frozenset[str] = frozenset()  # names of the tensors with missing or wrong slices
    problems: tuple[Diagnostic, ...] = ()  # what is wrong, for each missing or wrong slice
    values: Mapping[str, str] = {}  # further values for people, such as the number of the step


def fill_with_boxes(meta: TensorMeta, boxes: Sequence[Box]) -> BoxSlicing | list[Diagnostic]:
    """Return the slicing of a tensor from its boxes, or its problems.

    ``meta`` has the full shape.  The boxes must fill it, and only equal boxes may overlap.
    """
    problems = box_problems(meta, boxes)
    if problems:
        return problems
    if 0 not in meta.shape:
        boxes = [box for box in boxes if box.region.size]
    equal: dict[Region, dict[Box, None]] = {}
    for box in sorted(boxes, key=lambda box: (box.region.start, box.region.stop, box.rank)):
        equal.setdefault(box.region, {})[box] = None
    regions = list(equal)
    cuts = tuple(
        tuple(sorted({0, size}.union(*((r.start[axis], r.stop[axis]) for r in regions))))
        if size
        else (0, 0)
        for axis, size in enumerate(meta.shape)
    )
    counts = tuple(len(cut) - 1 for cut in cuts)
    if math.prod(counts) > MAX_CELLS:
        facts = f"{len(regions)} slices, so the grid is {counts} large"
        return [_problem(meta, "the slices are too irregular", facts)]
    cells: list[int | None] = [None] * math.prod(counts)
    for number, region in enumerate(regions):
        for index in product(*_cells(region, cuts)):
            place = flat_index(index, counts)
            other = cells[place]
            if other is not None:
                facts = f"{regions[other]} and {region}"
                return [_problem(meta, "slices overlap and are not the same", facts)]
            cells[place] = number
    filled = tuple(number for number in cells if number is not None)
    if len(filled) < len(cells):
        return [_gap(meta, cuts, cells)]
    return BoxSlicing(tuple(tuple(boxes) for boxes in equal.values()), cuts, filled)


def box_problems(meta: TensorMeta, boxes: Sequence[Box]) -> list[Diagnostic]:
    """Return the problem of each box that is wrong by itself; boxes may be missing."""
    problems = [problem for box in boxes if (problem := _box_problem(meta, box)) is not None]
    return [*problems, *_shared(meta, boxes)]


def follow(base: FullTensor, name: str, tensors: Mapping[int, StoredTensor]) -> FullTensor | None:
    """Return undescribed optimizer state as sharded like its parameter; None if it does not fit.

    The checkpoint describes the parameter, ``base``.  ``tensors`` are those of the state by rank.
    """
    assert isinstance(base.slicing, BoxSlicing)
    regions = {box.rank: box.region for boxes in base.slicing.slices for box in boxes}
    dtypes = {tensor.meta.dtype for tensor in tensors.values()}
    if len(dtypes) > 1 or not tensors.keys() <= regions.keys():
        return None
    meta = replace(base.meta, name=name, dtype=next(iter(dtypes)), text=None)
    boxes = [Box(regions[rank], rank, tensor) for rank, tensor in tensors.items()]
    slicing = fill_with_boxes(meta, boxes)
    if not isinstance(slicing, BoxSlicing):
        return None
    return FullTensor(meta, slicing, Follows(base.meta.name))


def unlike_state_shapes(base: FullTensor, meta: TensorMeta) -> str | None:
    """Return the shapes of undescribed state that `follow` refused; None if it may be taken."""
    full = base.meta.shape
    if len(full) != len(meta.shape) or full == meta.shape or math.prod(meta.shape) == 1:
        return None
    return f"{meta.name} {meta.shape}, {base.meta.name} {full}"


def _box_problem(meta: TensorMeta, box: Box) -> Diagnostic | None:
    stored, shape = box.tensor.meta, box.region.shape
    where = f"rank {box.rank} ({box.tensor.file.path})"
    if len(shape) != len(meta.shape) or any(
        stop > size for stop, size in zip(box.region.stop, meta.shape, strict=True)
    ):
        facts = f"{where} holds {box.region} of {meta.shape}"
        return _problem(meta, "a slice lies outside of the full shape", facts)
    if (stored.dtype, stored.shape) != (meta.dtype, shape):
        facts = f"{where} has {stored.dtype} {stored.shape}, expected {meta.dtype} {shape}"
        return _problem(meta, "a slice has another type or shape", facts)
    return None


def why_not_sliced(meta: TensorMeta, layout: Layout) -> str | None:
    """Return why a layout cannot shard a tensor that is only copied whole; None if it can."""
    if meta.whole_shape is None or math.prod(layout.slice_counts) == 1:
        return None
    return f"{meta.dtype} {meta.whole_shape} is only copied whole"


def _problem(meta: TensorMeta, message: str, facts: str) -> Diagnostic:
    return Diagnostic("missing", message, facts=facts, tensor=meta.name)


def _shared(meta: TensorMeta, boxes: Sequence[Box]) -> Iterator[Diagnostic]:
    """Yield the problem of each pair of different boxes that name one stored tensor.

    Tensors without bytes may have one name for several boxes.
    """
    regions: dict[StoredTensor, Region] = {}
    for box in boxes if meta.nbytes else ():
        other = regions.setdefault(box.tensor, box.region)
        if other != box.region:
            facts = f"{box.tensor.file.path}: {other} and {box.region}"
            yield _problem(meta, "two slices are one tensor of a file", facts)


def _cells(region: Region, cuts: Sequence[Sequence[int]]) -> Iterator[range]:
    # An empty axis has one cell.
    for start, stop, cut in zip(region.start, region.stop, cuts, strict=True):
        yield range(bisect_left(cut, start), bisect_left(cut, stop)) if cut[-1] else range(1)


def _gap(
    meta: TensorMeta, cuts: Sequence[Sequence[int]], cells: Sequence[int | None]
) -> Diagnostic:
    missing = [
        Region(tuple(a for a, _ in ends), tuple(b for _, b in ends))
        for ends, number in zip(product(*map(pairwise, cuts)), cells, strict=True)
        if number is None
    ]
    spans = shorten(map(str, missing), 3)
    return _problem(meta, "slices are in no file", f"{len(missing)} of {meta.shape}: {spans}")
