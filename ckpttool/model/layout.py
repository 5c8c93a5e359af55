"""Layouts: all arithmetic of how a tensor is sharded over the ranks of a stage.

It decides which rank holds which elements, and why a shape cannot be cut.  Strategies and contents
decide which layout a tensor has; `ckpttool.model.slicing` knows the files of its slices.  Every
command uses this one arithmetic, so no two can disagree on a slice.

The ranks of a stage form a grid, the device matrix, in row-major order: the last device axis
varies fastest.  Device axes are counted from the right; axis 0 is the last entry of the matrix.
The tensor map gives the device axes that shard each tensor axis, outermost split first.  Device
axes ``(a1, ..., ak)`` of sizes ``d1, ..., dk`` split an axis into ``d1 * ... * dk`` equal slices.
A rank at coordinates ``c`` holds slice ``(...(c1 * d2 + c2) * d3 + ...) * dk + ck``.

The ranks that agree on all device axes in use hold equal slices: a replica group, ascending.  An
optimizer shard of ``s`` splits axis 0 of the slice once more into ``s`` equal slices.  The rank at
position ``p`` of its replica group holds slice ``p mod s``.  ``s`` need not be a product of device
axes: six replicas on a 2 x 3 grid can be split in two.  So it is a field of its own.

Two kinds of embedding table are split along axis 0 in other ways.  A manual split gives the number
of rows of each slice.  With ``F`` fields, every slice holds its share of each field: the rows form
``F * n`` equal stretches, and slice ``i`` holds the stretches ``i``, ``i + n``, ``i + 2n``, ...

Expanded layouts
----------------
Where several device axes shard one tensor axis, MindSpore's JSON form describes an expanded tensor.
Device axes of sizes ``n1, ..., nk`` turn an axis of ``d`` elements into ``k`` axes.  These have
``n1, ..., n(k-1)`` and ``d / (n1 * ... * n(k-1))`` elements, and one device axis shards each.
Folding joins neighbours; all but the last must have the size of the device axis that shards them.
There can be several ways to fold; then the slices alone do not decide between them.  Ways that
differ only in the place of a device axis of size 1 are equal.

``Layout(...)(("a", "None"), "b")`` has "None" beside a device axis.  It stands for an axis of the
expanded tensor that nothing shards.  The size of that axis is 1 unless it is the last of its tensor
axis.  Nearly every tensor with an unsharded axis could be read like this, but few are written like
this.  So these ways count only if others do not fit.

Source
------
MindSpore 2.10 ``parallel/_tensor.py`` (``_get_tensor_slice_index``, ``_load_tensor``),
``ccsrc/frontend/parallel/strategy_checkpoint`` (the JSON writer), and the slices and files that its
compiler makes; the tests check against them.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cached_property, lru_cache
from itertools import combinations, islice, pairwise, product

from msgspec import Struct
from msgspec.structs import replace

from ckpttool.model.region import Region, count_overlaps, flat_index, grid_overlaps

MAX_RANKS = 1 << 20  # ten times the largest clusters; layouts are tables over all ranks
MAX_LAYOUT_AXES = 64  # of a tensor or a device matrix in a file; as NumPy 2
_FEW_OVERLAPS = 16  # cached for a region; more are not
_DEVICE_AXES = {(1, 1)}  # numbers on two neighbouring axes of an expanded tensor that may be joined
_WITH_NONE = {(1, 1), (1, 0), (0, 1), (0, 0)}  # the same, if "None" may stand beside device axes
_MAX_WAYS = 10_000  # ways to fold; ten device axes have 252, a damaged file has 10**17


class Grid(Struct, frozen=True):
    """The slices of a layout.

    ``index`` has the position of each rank's slice along each axis, ranks of the stage ascending;
    ``owners`` the ranks that hold the slice at a position, ascending, slices in C order.
    """

    slice_counts: tuple[int, ...]  # number of slices along each tensor axis
    index: tuple[tuple[int, ...], ...]
    owners: dict[tuple[int, ...], tuple[int, ...]]


@lru_cache(maxsize=4096)  # a model has few distinct layouts, each of many parameters
def make_grid(
    device_matrix: tuple[int, ...],
    tensor_map: tuple[tuple[int, ...], ...],
    optimizer_shard: int,
    first_rank: int,
) -> Grid:
    """Return the slices of a layout; the arguments are fields of a valid `Layout`.

    >>> make_grid((2, 2), ((1,), ()), 2, 4).index
    ((0, 0), (1, 0), (2, 0), (3, 0))
    """
    count = len(device_matrix)
    axes = [[count - 1 - axis for axis in cut] for cut in tensor_map]
    free = [i for i in range(count) if all(i not in cut for cut in axes)]
    index: list[tuple[int, ...]] = []
    owners: dict[tuple[int, ...], list[int]] = {}
    for local, coords in enumerate(product(*(range(size) for size in device_matrix))):
        at = [flat_index(coords, device_matrix, cut) for cut in axes]
        if optimizer_shard > 1:
            position = flat_index(coords, device_matrix, free)  # in the replica group
            at[0] = at[0] * optimizer_shard + position % optimizer_shard
        index.append(tuple(at))
        owners.setdefault(tuple(at), []).append(first_rank + local)
    slice_counts = [math.prod(device_matrix[i] for i in cut) for cut in axes]
    if optimizer_shard > 1:
        slice_counts[0] *= optimizer_shard
    ordered = {at: tuple(ranks) for at, ranks in sorted(owners.items())}
    return Grid(tuple(slice_counts), tuple(index), ordered)


def divisors(number: int) -> list[int]:
    """Return all divisors of a number, ascending.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


class UnevenAxis(Struct, frozen=True):
    """A tensor axis of ``size`` elements that ``slices`` equal slices do not divide."""

    axis: int
    size: int
    slices: int

    @property
    def nearest(self) -> tuple[int, ...]:
        """The nearest numbers of slices that divide it: one below and one above."""
        candidates = divisors(self.size)
        at = bisect_left(candidates, self.slices)
        return tuple(candidates[max(0, at - 1) : at + 1])


class Layout(Struct, frozen=True, dict=True):
    """Device matrix and tensor map of one tensor in one stage.

    Attributes
    ----------
    device_matrix
        Sizes of the device axes, outermost first.  Their product is the ranks of the stage.
    tensor_map
        Device axes that shard each tensor axis, outermost split first; ``()`` if none does.
    optimizer_shard
        Slices into which the replicas split axis 0 of their slice; 1 for none.
    full_shape
        Shape of the full tensor from the strategy file, to be checked against the slices.  Only
        JSON files have it.
    rows
        Rows of each slice along axis 0, before an optimizer shard, if they are not equal.
    split_shape
        Numbers in a strategy file that are the rows of a manual split, or a shape that says
        nothing; `decided_by_slices` and `decided_by_full_shape` decide.

    Raises
    ------
    ValueError
        The layout is impossible; the message says what was expected and what was found.
    """

    device_matrix: tuple[int, ...]
    tensor_map: tuple[tuple[int, ...], ...]
    optimizer_shard: int = 1
    first_rank: int = 0  # the stage's lowest rank
    full_shape: tuple[int, ...] | None = None
    rows: tuple[int, ...] = ()
    fields: int = 1  # fields of a field-sliced embedding; 1 for every other tensor
    split_shape: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if any(size < 1 for size in self.device_matrix):
            raise ValueError(f"device matrix {list(self.device_matrix)} has an axis below 1")
        used = [axis for axes in self.tensor_map for axis in axes]
        for axis in used:
            if not 0 <= axis < len(self.device_matrix):
                raise ValueError(
                    f"tensor map {_lists(self.tensor_map)} names device axis {axis}; the device "
                    f"matrix {list(self.device_matrix)} has axes 0 to {len(self.device_matrix) - 1}"
                )
            if used.count(axis) > 1:
                message = f"tensor map {_lists(self.tensor_map)} uses device axis {axis} twice"
                raise ValueError(message)
        if self.optimizer_shard < 1 or self.replicas % self.optimizer_shard:
            raise ValueError(
                f"optimizer shard of {self.optimizer_shard} does not divide the replica group of "
                f"{self.replicas} (device matrix {list(self.device_matrix)}, "
                f"tensor map {_lists(self.tensor_map)})"
            )
        if self.optimizer_shard > 1 and not self.tensor_map:
            raise ValueError(f"optimizer shard of {self.optimizer_shard} on a 0-d tensor")
        if not self.is_even:
            self._check_embedding()

    @cached_property
    def _key(self) -> tuple[object, ...]:
        numbers = self.optimizer_shard, self.first_rank, self.fields
        return self.device_matrix, self.tensor_map, numbers, self.rows, self.split_shape

    @cached_property
    def _hash(self) -> int:
        return hash(self._key)  # computed once: caches have layouts as keys

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self._key == other._key

    def __hash__(self) -> int:
        return self._hash

    def _check_embedding(self) -> None:
        slices = math.prod(map(self._size, self.tensor_map[0])) if self.tensor_map else 0
        if self.fields > 1 and (self.rows or self.optimizer_shard > 1 or not slices):
            message = f"field-sliced ({self.fields} fields) and sharded along axis 0 in another way"
            raise ValueError(message)
        if self.rows and (len(self.rows) != slices or min(self.rows) < 0):
            message = f"a manual split of {list(self.rows)} rows, expected {slices} numbers of rows"
            raise ValueError(message)

    @staticmethod
    def unsharded(ndim: int, ranks: int = 1, first_rank: int = 0) -> Layout:
        """Return the layout of a tensor that each of ``ranks`` ranks holds in full."""
        return _unsharded(ndim, ranks, first_rank)

    @property
    def is_even(self) -> bool:
        """Whether axis 0 is sharded into equal boxes, as every other axis is."""
        return not self.rows and self.fields == 1

    @property
    def has_boxes(self) -> bool:
        """Whether every slice is one box of elements; only field-sliced embeddings differ."""
        return self.fields == 1

    @property
    def has_equal_slices(self) -> bool:
        """Whether all slices have one shape; only a manual split may have several."""
        return not self.rows

    @cached_property
    def _grid(self) -> Grid:  # made when it is needed: that of thousands of ranks is large
        shard, first_rank = self.optimizer_shard, self.first_rank
        return make_grid(self.device_matrix, self.tensor_map, shard, first_rank)

    @property
    def ranks(self) -> range:
        """The ranks of the stage."""
        return range(self.first_rank, self.first_rank + math.prod(self.device_matrix))

    @property
    def stage(self) -> int:
        """The number of the stage."""
        return self.first_rank // len(self.ranks)

    @property
    def slice_counts(self) -> tuple[int, ...]:
        """Number of slices along each tensor axis, optimizer shard included."""
        return self._grid.slice_counts

    def count_cuts(self, axes: Iterable[int]) -> tuple[int, ...]:
        """Return the number of slices along tensor axes, without the optimizer shard."""
        counts = replace(self, optimizer_shard=1).slice_counts
        return tuple(counts[axis] for axis in axes)

    @property
    def replicas(self) -> int:
        """Ranks that hold equal slices before the optimizer shard cuts them."""
        used = math.prod(self._size(axis) for axes in self.tensor_map for axis in axes)
        return math.prod(self.device_matrix) // used

    def _size(self, axis: int) -> int:
        return self.device_matrix[len(self.device_matrix) - 1 - axis]

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """Return the position of ``rank`` along each axis of the device matrix, outermost first.

        >>> Layout((2, 2, 2), ()).coordinate(5), Layout((2, 4), (), first_rank=8).coordinate(15)
        ((1, 0, 1), (1, 3))
        """
        place, coords = rank - self.first_rank, []
        for size in reversed(self.device_matrix):
            place, at = divmod(place, size)
            coords.append(at)
        return tuple(reversed(coords))

    def slice_index(self, rank: int) -> tuple[int, ...]:
        """Return the position of the slice of ``rank`` along each tensor axis."""
        return self._grid.index[rank - self.first_rank]

    def gaps(self, ranks: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Return the owners of each slice that no rank in ``ranks`` holds, slices in C order."""
        return _gaps(self, ranks)

    def owners(self, index: tuple[int, ...]) -> tuple[int, ...]:
        """Return the ranks that hold the slice at ``index``, ascending."""
        return self._grid.owners[index]

    def slice_owners(self) -> Iterator[tuple[int, ...]]:
        """Yield the ranks that hold each slice, slices in C order, ranks ascending."""
        return iter(self._grid.owners.values())

    def has_same_slices(self, other: Layout) -> bool:
        """Return whether every rank has the same slice, whatever the device matrices.

        >>> Layout((2, 2), ((1,), ())).has_same_slices(Layout((2, 1, 2), ((2,), (1,))))
        True
        """
        mine, its = ((side.ranks, side.rows, side.fields, side._grid) for side in (self, other))
        return mine == its

    def unseen_shard(self, ranks: Collection[int]) -> int:
        """Return the largest optimizer shard that equal slices of ``ranks`` would not show.

        With a shard of ``s``, owners of a slice hold equal parts if their positions differ by a
        multiple of ``s``.  1 is for ranks that would show every shard.

        >>> layout = Layout((4,), ((),))
        >>> layout.unseen_shard([0]), layout.unseen_shard([0, 2]), layout.unseen_shard([0, 1])
        (4, 2, 1)
        """
        unseen = len(next(self.slice_owners()))
        first: dict[tuple[int, ...], int] = {}
        for rank in ranks:
            if rank in self.ranks:
                index = self.slice_index(rank)
                position = self.owners(index).index(rank)
                unseen = math.gcd(unseen, position - first.setdefault(index, position))
        return unseen

    def slice_indices(self) -> Iterator[tuple[int, ...]]:
        """Yield the positions of all slices, in C order."""
        return iter(self._grid.owners)

    def boundaries(self, axis: int, size: int) -> Sequence[int]:
        """Return the boundaries of slices along an axis of ``size`` elements, from 0 to ``size``.

        Slice ``i`` holds the elements from boundary ``i`` to boundary ``i + 1``.  In a field-sliced
        embedding of ``n`` slices it also holds those from ``i + n`` to ``i + n + 1``, and so on.
        All other methods take the boundaries from here, so slices need not be equal.
        """
        n = self.slice_counts[axis]
        if axis == 0:
            n *= self.fields
            if self.rows:
                return self._row_boundaries()
        if size % n:
            raise ValueError(f"axis {axis} of {size} elements is not divisible by {n}")
        return range(0, size + 1, size // n) if size else (0,) * (n + 1)

    def _row_boundaries(self) -> tuple[int, ...]:
        shard = self.optimizer_shard
        cut = [0]
        for rows in self.rows:
            if rows % shard:
                raise ValueError(f"a part of {rows} rows is not divisible by {shard}")
            cut += [cut[-1] + rows // shard * (i + 1) for i in range(shard)]
        return tuple(cut)

    def slice_shape(self, rank: int, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the slice of ``rank`` from the full shape."""
        if not self.has_boxes:
            return tuple(size // n for size, n in zip(shape, self.slice_counts, strict=True))
        return self.region(rank, shape).shape

    def slice_shapes(self, shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """Yield the shape of each rank's slice; only one if all slices have the same."""
        ranks = self.ranks[:1] if self.has_equal_slices else self.ranks
        return (self.slice_shape(rank, shape) for rank in ranks)

    def box(self, index: tuple[int, ...], shape: tuple[int, ...]) -> Region:
        """Return the elements of a full tensor of ``shape`` in the slice at ``index``.

        Raises
        ------
        ValueError
            The tensor is a field-sliced embedding, whose slices are not boxes.
        """
        if not self.has_boxes:
            raise ValueError(f"a slice of {self.fields} fields is no box")
        cuts = _cuts(self, shape)
        return Region(
            tuple(cut[i] for cut, i in zip(cuts, index, strict=True)),
            tuple(cut[i + 1] for cut, i in zip(cuts, index, strict=True)),
        )

    def boxes(self, index: tuple[int, ...], shape: tuple[int, ...]) -> Iterator[Region]:
        """Yield the boxes of elements in the slice at ``index``: one, or one for each field.

        >>> [*map(str, Layout((2,), ((0,), ()), fields=2).boxes((1, 0), (8, 3)))]
        ['[2:4, 0:3]', '[6:8, 0:3]']
        """
        axes = zip(_cuts(self, shape), index, self.slice_counts, strict=True)
        stretches = [[*islice(pairwise(cut), i, None, n)] for cut, i, n in axes]
        for spans in product(*stretches):
            yield Region(tuple(a for a, _ in spans), tuple(b for _, b in spans))

    def region(self, rank: int, shape: tuple[int, ...]) -> Region:
        """Return the elements of a full tensor of ``shape`` that ``rank`` holds.

        >>> Layout((2, 2, 2), ((1,), (2, 0))).region(5, (16, 8))
        Region(start=(0, 6), stop=(8, 8))
        """
        return self.box(self.slice_index(rank), shape)

    def overlaps(
        self, within: Region, origin: tuple[int, ...], shape: tuple[int, ...]
    ) -> Iterator[tuple[tuple[int, ...], Region, Region]]:
        """Yield the `grid_overlaps` of ``within``, whose elements count from ``origin``."""
        few = _few_overlaps(self, within, origin, shape)
        return _overlaps(self, within, origin, shape) if few is None else iter(few)

    def touched(self, wanted: Region, shape: tuple[int, ...]) -> set[tuple[int, ...]]:
        """Return the positions of the slices that overlap ``wanted``."""
        return {index for index, _, _ in self.overlaps(wanted, (0,) * len(shape), shape)}

    def count_overlaps(self, wanted: Region, shape: tuple[int, ...]) -> int:
        """Return the number of `overlaps`."""
        return count_overlaps(_cuts(self, shape), wanted)

    def implied_shape(self, slice_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the full shape of a tensor whose slices have ``slice_shape``."""
        full = tuple(size * n for size, n in zip(slice_shape, self.slice_counts, strict=True))
        return (sum(self.rows), *full[1:]) if self.rows else full

    def fills(self, slice_shape: tuple[int, ...]) -> bool:
        """Return whether slices of ``slice_shape`` form the full shape that the strategy gives."""
        return self.implied_shape(slice_shape) == self.full_shape

    def decided_by_slices(self, shapes: Collection[tuple[int, ...]]) -> Layout | None:
        """Return the layout with ``split_shape`` decided by the shapes of all stored slices.

        It is a manual split if the slices differ.  It adds nothing if all slices have these rows,
        or if it is a shape, with a number for each axis: of a slice, of the full tensor, or before
        the optimizer shard.  The result is None if it is none of these.

        >>> layout = Layout((2,), ((0,), ()), split_shape=(6, 4))
        >>> layout.decided_by_slices([(6, 4)]).rows, layout.decided_by_slices([(6, 3), (4, 3)]).rows
        ((), (6, 4))
        """
        split, even = self.split_shape, replace(self, split_shape=())
        if not split or not shapes:
            return even
        if len(shapes) > 1:
            return replace(even, rows=split) if self.may_be_rows else even
        (shape,) = shapes
        are_rows = self.may_be_rows and {*split} == {shape[0] * self.optimizer_shard}
        return even if are_rows or len(split) in (len(shape), len(self.tensor_map)) else None

    def decided_by_full_shape(self, shape: tuple[int, ...]) -> Layout | None:
        """Return the layout with ``split_shape`` decided by the shape of the full tensor.

        It adds nothing if it is that shape, or the shape of a slice.  Otherwise it is a manual
        split if its numbers add up to axis 0.  Otherwise it is another shape, and adds nothing, if
        it has a number for each axis.  The result is None if it is none of these.
        """
        split, even = self.split_shape, replace(self, split_shape=())
        unsplit = replace(even, optimizer_shard=1)
        possible = (way for way in (even, unsplit) if not way.why_not(shape))
        if split in {(), shape, *(way.slice_shape(self.first_rank, shape) for way in possible)}:
            return even
        if self.may_be_rows and sum(split) == shape[0]:
            return replace(even, rows=split)
        return even if len(split) == len(shape) else None

    @property
    def may_be_rows(self) -> bool:
        """Whether ``split_shape`` has a number for each slice of axis 0."""
        slices = self.slice_counts[0] // self.optimizer_shard if self.tensor_map else 0
        return len(self.split_shape) == slices and self.has_boxes

    def uneven_axes(self, shape: tuple[int, ...]) -> tuple[UnevenAxis, ...]:
        """Return the axes of a full tensor of ``shape`` that the slices do not divide.

        >>> Layout((3,), ((0,), ())).uneven_axes((8, 8))
        (UnevenAxis(axis=0, size=8, slices=3),)
        """
        counts = list(self.slice_counts)
        if self.rows:
            counts[0] = 1
        elif counts:
            counts[0] *= self.fields
        axes = enumerate(zip(shape, counts, strict=True))
        return tuple(UnevenAxis(axis, size, n) for axis, (size, n) in axes if size % n)

    def why_not(self, shape: tuple[int, ...]) -> str | None:
        """Return why a full tensor of ``shape`` cannot be sharded like this, or None.

        >>> print(Layout((3,), ((0,), ())).why_not((8, 8)))
        axis 0 of (8, 8) is divisible by 2 or 4, not by 3
        """
        ndim = len(self.tensor_map)
        if len(shape) != ndim:
            axes = "axis" if ndim == 1 else "axes"
            return f"tensor map {_lists(self.tensor_map)} is for {ndim} {axes}, not shape {shape}"
        if self.full_shape is not None and self.full_shape != shape:
            return f"the strategy lists full shape {self.full_shape}, the slices form {shape}"
        if self.rows and sum(self.rows) != shape[0]:
            return (
                f"the manual split {list(self.rows)} has {sum(self.rows)} rows, shape {shape} has "
                f"{shape[0]}"
            )
        uneven = [rows for rows in self.rows if rows % self.optimizer_shard]
        if uneven:
            return f"slices of {uneven} rows are not divisible by {self.optimizer_shard}"
        reasons = [
            f"axis {uneven.axis} of {shape} is divisible by "
            f"{' or '.join(map(str, uneven.nearest))}, not by {uneven.slices}"
            for uneven in self.uneven_axes(shape)
        ]
        return "; ".join(reasons) or None


@lru_cache(maxsize=64)  # replicated tensors share their layouts
def _unsharded(ndim: int, ranks: int, first_rank: int) -> Layout:
    return Layout((ranks,), ((),) * ndim, 1, first_rank)


@lru_cache(maxsize=64)  # a thousand parameters have one layout and lie on the same ranks
def _gaps(layout: Layout, ranks: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    indices = {layout.slice_index(rank) for rank in ranks}
    return tuple(layout.owners(index) for index in layout.slice_indices() if index not in indices)


@lru_cache(maxsize=65536)  # a model has few pairs of layout and shape; each rank needs them
def _cuts(layout: Layout, shape: tuple[int, ...]) -> tuple[Sequence[int], ...]:
    return tuple(layout.boundaries(axis, size) for axis, size in enumerate(shape))


def _overlaps(
    layout: Layout, within: Region, origin: tuple[int, ...], shape: tuple[int, ...]
) -> Iterator[tuple[tuple[int, ...], Region, Region]]:
    wanted = within.moved_by(origin)
    for index, in_slice, in_full in grid_overlaps(
        _cuts(layout, shape), layout.slice_counts, wanted
    ):
        yield index, in_slice, in_full.relative_to(origin)


# Most of a rank's thousand tensors have equal shapes and layouts.  More entries would come from the
# units of a large tensor, and each of those is needed once.  512 entries take 4 MiB at most.
@lru_cache(maxsize=512)
def _few_overlaps(
    layout: Layout, within: Region, origin: tuple[int, ...], shape: tuple[int, ...]
) -> tuple[tuple[tuple[int, ...], Region, Region], ...] | None:
    overlaps = tuple(islice(_overlaps(layout, within, origin, shape), _FEW_OVERLAPS + 1))
    return overlaps if len(overlaps) <= _FEW_OVERLAPS else None


def _lists(tensor_map: tuple[tuple[int, ...], ...]) -> list[list[int]]:
    return [list(axes) for axes in tensor_map]


def fold_layout(
    layout: Layout, ndim: int, fits: Callable[[Layout], bool] = lambda _: True
) -> tuple[Layout, ...]:
    """Return the layouts of ``ndim`` axes whose expanded form is ``layout``.

    ``fits`` says whether a folded layout, with its ``full_shape``, is possible.

    >>> expanded = Layout((2, 2, 4), ((2,), (1,), (0,), ()), full_shape=(2, 2, 8, 8))
    >>> [(way.tensor_map, way.full_shape) for way in fold_layout(expanded, 2)]
    [(((2, 1, 0), ()), (32, 8))]
    """
    shape = layout.full_shape
    if shape is None or len(shape) != len(layout.tensor_map) or not 0 < ndim < len(shape):
        return ()
    joins = len(shape) - ndim
    ways: dict[object, Layout] = {}
    for counts in (_DEVICE_AXES, _WITH_NONE):
        seams = _seams(layout, shape, counts)
        if ways or math.comb(len(seams), joins) > _MAX_WAYS:
            break
        for joined in combinations(seams, joins):
            way = _join_axes(layout, shape, joined)
            if fits(way):
                ways.setdefault((way.full_shape, _cutting(way)), way)
    return tuple(ways.values())


def may_be_expanded(layout: Layout) -> bool:
    """Return whether two sharded axes may be one of the stored tensor, which slices alone decide.

    >>> may_be_expanded(Layout((2, 2), ((1,), (0,), ()), full_shape=(2, 4, 8)))
    True
    >>> may_be_expanded(Layout((2, 2), ((1,), (0,)), full_shape=(8, 8)))
    False
    """
    shape = layout.full_shape
    is_known = shape is not None and len(shape) == len(layout.tensor_map)
    return is_known and bool(_seams(layout, shape or (), _DEVICE_AXES))


def ambiguity(layout: Layout, ways: tuple[Layout, ...]) -> str:
    """Return the ways to fold an expanded layout, for messages."""
    shown = " or ".join(
        f"{way.full_shape} with tensor map {_lists(way.tensor_map)}" for way in ways[:3]
    )
    shown += f" or {len(ways) - 3} more" if len(ways) > 3 else ""
    return f"expanded shape {layout.full_shape} may stand for {shown}"


def _seams(
    layout: Layout, shape: tuple[int, ...], counts: Collection[tuple[int, int]]
) -> list[int]:
    """Return the axes that folding may join to the axis before them.

    ``counts`` are the possible numbers of device axes on the axis before and on the axis itself.
    """
    sizes = tuple(reversed(layout.device_matrix))
    return [
        i
        for i, (before, axes) in enumerate(pairwise(layout.tensor_map), 1)
        if (len(before), len(axes)) in counts
        and shape[i - 1] == math.prod(sizes[axis] for axis in before)
        and (layout.is_even or i > 1)  # axis 0 of an embedding table is not folded
    ]


def _join_axes(layout: Layout, shape: tuple[int, ...], joined: tuple[int, ...]) -> Layout:
    cuts = [i for i in range(len(shape) + 1) if i not in joined]
    return replace(
        layout,
        tensor_map=tuple(
            tuple(axis for axes in layout.tensor_map[a:b] for axis in axes)
            for a, b in pairwise(cuts)
        ),
        full_shape=tuple(math.prod(shape[a:b]) for a, b in pairwise(cuts)),
    )


def without_axis(layout: Layout, axis: int) -> Layout | None:
    """Return the layout of a statistic over tensor axis ``axis``; None if it is impossible.

    It is impossible for a tensor of fewer than two axes and for a field-sliced one.  It is also
    impossible if no device axes form the optimizer shard.

    >>> without_axis(Layout((4, 2), ((), (0,)), optimizer_shard=4), -1).tensor_map
    ((1,),)
    """
    plain = shard_as_axes(layout)
    if plain is None or len(layout.tensor_map) < 2 or not layout.has_boxes:
        return None
    lost = range(len(layout.tensor_map))[axis]
    return replace(
        plain,
        tensor_map=tuple(axes for i, axes in enumerate(plain.tensor_map) if i != lost),
        full_shape=None,
        rows=() if lost == 0 else layout.rows,
    )


def shard_as_axes(layout: Layout) -> Layout | None:
    """Return a layout of the same slices by device axes alone; None if it is impossible.

    A shard of ``s`` cuts by the position in the replica group modulo ``s``.  This is the position
    along the innermost free device axes if the product of their sizes is ``s``.  One of them may
    have to be split for that.

    >>> plain = shard_as_axes(Layout((2, 4), ((),), optimizer_shard=2))
    >>> plain.device_matrix, plain.tensor_map, plain.optimizer_shard
    ((2, 2, 2), ((0,),), 1)
    """
    if layout.optimizer_shard == 1:
        return layout
    if not layout.has_equal_slices:
        return None  # the shard cuts each part of a manual split, not the whole axis
    matrix = list(layout.device_matrix)  # from here on, axes are counted from the left
    tensor_map = [[len(matrix) - 1 - axis for axis in axes] for axes in layout.tensor_map]
    used = {axis for axes in tensor_map for axis in axes}
    chosen: list[int] = []
    left = layout.optimizer_shard
    for axis in reversed(range(len(matrix))):
        if axis in used or left == 1:
            continue
        size = matrix[axis]
        if left % size == 0:
            left //= size
            chosen.insert(0, axis)
        elif size % left == 0:
            matrix[axis : axis + 1] = [size // left, left]
            tensor_map = [[a + (a > axis) for a in axes] for axes in tensor_map]
            chosen = [axis + 1, *(a + 1 for a in chosen)]
            left = 1
        else:
            return None
    tensor_map[0] += chosen
    return replace(
        layout,
        device_matrix=tuple(matrix),
        tensor_map=tuple(tuple(len(matrix) - 1 - a for a in axes) for axes in tensor_map),
        optimizer_shard=1,
    )


def _cutting(layout: Layout) -> tuple[tuple[int, ...], ...]:
    sizes = tuple(reversed(layout.device_matrix))
    return tuple(tuple(axis for axis in axes if sizes[axis] > 1) for axes in layout.tensor_map)
