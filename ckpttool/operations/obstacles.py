"""Why a target cannot be: the axes of tensors that its slices do not divide, and what would."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from ckpttool.model.layout import divisors

if TYPE_CHECKING:
    from ckpttool.model.layout import Layout, UnevenAxis
    from ckpttool.model.slicing import FullTensor

Matrix = tuple[int, ...]  # a device matrix

MAX_MATRICES = 10_000  # device matrices that are tried, to find the nearest that divide
MAX_GROWTH = 4  # times as many ranks are tried at most


class Obstacle(Struct, frozen=True):
    """A tensor axis that the slices of a target do not divide.

    Attributes
    ----------
    tensors
        The tensors with this axis and this layout, of all stages.
    shape, layout
        Their full shape, and their layout in the target, of the first stage.
    axis
        The axis, and the nearest numbers of slices that divide it.
    ways
        What the layout can become, so that all tensors divide: with a near number of ranks that is
        not larger, and one that is.
    """

    tensors: tuple[str, ...]
    shape: tuple[int, ...]
    layout: Layout
    axis: UnevenAxis
    ways: tuple[Layout, ...]


def find_obstacles(
    placed: Sequence[tuple[FullTensor, tuple[Layout, ...]]],
) -> Iterator[Obstacle]:
    """Yield the axes that do not divide: once for each layout, shape and axis."""
    names: dict[tuple[Layout, tuple[int, ...]], dict[str, None]] = {}
    for tensor, layouts in placed:
        for layout in layouts:
            alike = replace(layout, first_rank=0), tensor.meta.shape
            names.setdefault(alike, {})[tensor.name] = None
    near: dict[Matrix, tuple[Matrix, ...]] = {}
    for (layout, shape), having in names.items():
        if len(shape) != len(layout.tensor_map) or not layout.has_boxes:
            continue
        for axis in layout.uneven_axes(shape):
            near = near or _nearest_matrices(math.prod(layout.device_matrix), names)
            moved = (_move(layout, one, shape) for one in near.get(layout.device_matrix, ()))
            ways = tuple(one for one in moved if one is not None)
            yield Obstacle(tuple(having), shape, layout, axis, ways)


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
    return all(_move(layout, matrix, shape) is not None for layout, shape in placed)


def _move(layout: Layout, matrix: Matrix, shape: tuple[int, ...]) -> Layout | None:
    """Return a layout with another device matrix; None if it does not divide the tensor.

    Where only the optimizer shard is in the way, it becomes the largest that divides: at most as
    large as it is, or if all replicas are in it, as many as these become.
    """
    replicas = math.prod(matrix) // math.prod(
        matrix[-1 - axis] for axes in layout.tensor_map for axis in axes
    )
    cuts, shard = layout.slice_counts[0] // layout.optimizer_shard if shape else 1, 0
    if shape and shape[0] % cuts == 0 and shape[0] % (cuts * layout.optimizer_shard):
        cuts = math.prod(matrix[-1 - axis] for axis in layout.tensor_map[0])
        most = replicas if layout.optimizer_shard == layout.replicas else layout.optimizer_shard
        shard = max(one for one in divisors(math.gcd(shape[0] // cuts, replicas)) if one <= most)
        if shape[0] % cuts or shard == 1:
            return None
    elif replicas % layout.optimizer_shard:  # quicker, and nearly always the reason
        return None
    moved = replace(layout, device_matrix=matrix, optimizer_shard=shard or layout.optimizer_shard)
    return moved if moved.why_not(shape) is None else None
