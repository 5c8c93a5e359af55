"""Random layouts and checkpoints for hypothesis.

What they are wide enough to find, and what made them so:

* device matrices of up to 4 axes with sizes from 1 to 4, 3 included: MindSpore refuses device
  counts that do not divide one another, and so would arithmetic on common device axes;
* tensor axes cut by several device axes in any order: the first one listed is the outermost;
* optimizer shards that are no product of device axes: six replicas of a 2 x 3 grid cut in two;
* embeddings cut by hand, with parts of no rows and an optimizer shard on top, of which the stored
  strategy tells nothing in the entry of the optimizer state; field-sliced ones as sources;
* parameters shared by stages, each stage with a layout of its own;
* optimizer state that neither strategy lists, and that is cut like its parameter nevertheless;
* shapes of 0 to 4 axes, some of them empty, of element types of every size: scalars and empty
  tensors have no bytes to copy, and must still be there.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from itertools import pairwise, product
from typing import NamedTuple

from hypothesis import settings
from hypothesis import strategies as st
from msgspec.structs import replace

from ckpttool.model.layout import Layout
from ckpttool.model.region import Region
from ckpttool.model.strategy import Strategy, join_stages
from tests.support.checkpoints import noise
from tests.support.readers import Entry

# The same examples in every run, so that a failure is a failure for everybody.  To look for new
# ones: HYPOTHESIS_PROFILE=search pytest tests/e2e/test_properties.py
settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
# Fewer of them, where another Python runs what one has run in full: HYPOTHESIS_PROFILE=brief.
settings.register_profile("brief", settings.get_profile("repeatable"), max_examples=20)
settings.register_profile("search", deadline=None, print_blob=True)
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "repeatable")
settings.load_profile(PROFILE)

DTYPES = ["Bool", "Int8", "BFloat16", "Float32", "Int64", "Complex64", "Complex128"]
NAMES = ["w", "layer.0.weight", "a/b", "größe"]


def examples(count: int) -> settings:
    factor = {"search": 30, "brief": 0.2}.get(PROFILE, 1)
    return settings(max_examples=max(5, int(count * factor)))


def device_matrices(count: int, most_axes: int = 4) -> list[tuple[int, ...]]:
    return [
        sizes
        for naxes in range(1, most_axes + 1)
        for sizes in product(range(1, 5), repeat=naxes)
        if math.prod(sizes) == count
    ]


MATRICES = {count: device_matrices(count) for count in (1, 2, 3, 4, 6, 8, 9, 12)}


@st.composite
def layouts(draw: st.DrawFn, ndim: int, count: int) -> Layout:
    """Draw a layout of a tensor of ``ndim`` axes on ``count`` ranks."""
    matrix = draw(st.sampled_from(MATRICES[count]))
    tensor_map: list[tuple[int, ...]] = [()] * ndim
    for device_axis in draw(st.permutations(range(len(matrix)))):
        place = draw(st.integers(-1, ndim - 1))
        if place >= 0:
            tensor_map[place] += (device_axis,)
    replicas = Layout(matrix, tuple(tensor_map)).replicas
    divisors = [n for n in range(1, replicas + 1) if replicas % n == 0]
    shard = draw(st.sampled_from(divisors)) if ndim else 1
    return Layout(matrix, tuple(tensor_map), shard)


class Move(NamedTuple):
    """A checkpoint, how it is cut, and how it shall be cut."""

    entries: dict[str, Entry]  # full tensors
    src: Strategy
    dst: Strategy


@st.composite
def grids(draw: st.DrawFn, most_stages: int) -> tuple[int, int]:
    stages = draw(st.integers(1, most_stages))
    return draw(st.sampled_from([n for n in MATRICES if n * stages <= 12])), stages


@st.composite
def moves(draw: st.DrawFn, most_stages: int = 3, has_state: bool = False) -> Move:
    """Draw a checkpoint of few parameters, with layouts for two numbers of ranks.

    With ``has_state`` it may have optimizer state that neither strategy lists.
    """
    grid = [draw(grids(most_stages)), draw(grids(most_stages))]
    stages: list[list[dict[str, Layout]]] = [[{} for _ in range(count)] for _, count in grid]
    entries: dict[str, Entry] = {}
    for name in NAMES[: draw(st.integers(1, len(NAMES)))]:
        ndim = draw(st.integers(0, 4))
        parts = [1] * ndim
        for (count, nstages), side in zip(grid, stages, strict=True):
            members = draw(st.sets(st.integers(0, nstages - 1), min_size=1, max_size=2))
            for stage in sorted(members):
                layout = draw(layouts(ndim, count))
                side[stage][name] = layout
                parts = [math.lcm(a, b) for a, b in zip(parts, layout.slice_counts, strict=True)]
        shape = tuple(n * draw(st.sampled_from([1, 1, 1, 2, 3, 0])) for n in parts)
        if math.prod(shape) > 5000:
            shape = tuple(parts)
        entries[name] = noise(name, draw(st.sampled_from(DTYPES)), shape)
    if has_state and draw(st.booleans()):
        entries["adam_m.w"] = noise("adam_m.w", "Float32", entries["w"].shape)
    for i in range(draw(st.integers(0, 2))):
        entries[f"unlisted{i}"] = noise(f"unlisted{i}", "Float32", draw(shapes(2, 3)))
    src, dst = (join_stages(dict(enumerate(side))) for side in stages)
    return Move(entries, src, dst)


@st.composite
def table_moves(draw: st.DrawFn) -> Move:
    """Draw an embedding table and its state; one side or both cut axis 0 by hand.

    The source may be field-sliced as well, with a state that its strategy does not list.  Layouts
    are the true ones; `as_stored` makes of them what a strategy file says.
    """
    ndim, parts = draw(st.integers(1, 3)), [1] * 3
    sides = []
    for kinds in (["rows", "rows", "even", "fields"], ["rows", "rows", "even"]):
        layout = draw(layouts(ndim, draw(st.sampled_from(sorted(MATRICES)))))
        kind, units = draw(st.sampled_from(kinds)), list(layout.slice_counts)
        if kind == "fields":
            layout = replace(layout, optimizer_shard=1, fields=draw(st.integers(2, 4)))
            units[0] = layout.slice_counts[0] * layout.fields
        elif kind == "rows":
            units[0] = layout.optimizer_shard
        parts = [math.lcm(a, b) for a, b in zip(parts, units, strict=False)]
        sides.append((layout, kind))
    shape = tuple(n * draw(st.sampled_from([1, 2, 3, 5] if i == 0 else [1, 1, 2, 0]))
                  for i, n in enumerate(parts))  # fmt: skip
    strategies = []
    for layout, kind in sides:
        if kind == "rows":
            layout = replace(layout, rows=draw(rows_of(layout, shape[0])))
        last = {"moment1.table": layout, "table": layout}
        stages = draw(st.integers(0, 1)) * [{}] if len(layout.ranks) < 9 else []
        strategies.append(join_stages(dict(enumerate([*stages, last]))))
    names = ["table", "moment1.table", "accu_grads.table"]
    dtype = draw(st.sampled_from(DTYPES))
    return Move({name: noise(name, dtype, shape) for name in names}, *strategies)


@st.composite
def rows_of(draw: st.DrawFn, layout: Layout, total: int) -> tuple[int, ...]:
    shard = layout.optimizer_shard
    count = layout.slice_counts[0] // shard
    ends = sorted(draw(st.lists(st.integers(0, total // shard), min_size=count, max_size=count)))
    ends = [0, *ends[:-1], total // shard]
    return tuple((b - a) * shard for a, b in pairwise(ends))


def as_stored(strategy: Strategy) -> Strategy:
    stripped = {
        name: tuple(replace(layout, rows=()) if "." in name else layout for layout in held)
        for name, held in strategy.layouts.items()
    }
    return replace(strategy, layouts=stripped)


@st.composite
def shapes(draw: st.DrawFn, most_axes: int = 4, most: int = 5) -> tuple[int, ...]:
    return tuple(draw(st.lists(st.integers(0, most), max_size=most_axes)))


@st.composite
def regions(draw: st.DrawFn, shape: tuple[int, ...]) -> Region:
    ends = [sorted(draw(st.tuples(*[st.integers(0, n)] * 2))) for n in shape]
    return Region(tuple(a for a, _ in ends), tuple(b for _, b in ends))


def features(move: Move) -> Iterator[str]:
    """Return words for what is in an example."""
    yield from move.entries
    for entry in move.entries.values():
        yield from (entry.dtype, f"{len(entry.shape)} axes")
        if 0 in entry.shape:
            yield "empty"
    for strategy in (move.src, move.dst):
        yield f"{strategy.stages} stages"
        for held in strategy.layouts.values():
            if len(held) > 1:
                yield "shared"
            for layout in held:
                yield from layout_features(layout)


def layout_features(layout: Layout) -> Iterator[str]:
    """Return words for what is in a layout."""
    used = {axis for axes in layout.tensor_map for axis in axes}
    free = [size for i, size in enumerate(layout.device_matrix[::-1]) if i not in used]
    if layout.optimizer_shard > 1:
        yield "shard"
    if layout.optimizer_shard not in [math.prod(free[:i]) for i in range(len(free) + 1)]:
        yield "shard that does not align"
    for axes in layout.tensor_map:
        if len(axes) > 1:
            yield "one axis cut by several"
        if axes and axes[0] != max(axes):
            yield "outermost axis not the first"
