"""Random layouts and checkpoints for hypothesis.

What they are wide enough to find, and what made them so:

* device matrices of up to 4 axes with sizes from 1 to 4, 3 included: MindSpore refuses device
  counts that do not divide one another, and so would arithmetic on common device axes;
* tensor axes cut by several device axes in any order: the first one listed is the outermost;
* optimizer shards that are no product of device axes: six replicas of a 2 x 3 grid cut in two;
* parameters shared by stages, each stage with a layout of its own;
* optimizer state that neither strategy lists, and that is cut like its parameter nevertheless;
* shapes of 0 to 4 axes, some of them empty, of element types of every size: scalars and empty
  tensors have no bytes to copy, and must still be there.
"""

from __future__ import annotations

import math
import os
from itertools import product
from typing import NamedTuple

from hypothesis import settings
from hypothesis import strategies as st

from ckpttool.model.layout import Layout
from ckpttool.model.region import Region
from ckpttool.model.strategy import Strategy, join_stages
from tests.checkpoints import noise
from tests.readers import Entry

# The same examples in every run, so that a failure is a failure for everybody.  To look for new
# ones: HYPOTHESIS_PROFILE=search pytest tests/test_properties.py
settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
settings.register_profile("search", deadline=None, print_blob=True)
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "repeatable")
settings.load_profile(PROFILE)

DTYPES = ["Bool", "Int8", "BFloat16", "Float32", "Int64", "Complex64", "Complex128"]
NAMES = ["w", "layer.0.weight", "a/b", "größe"]


def examples(count: int) -> settings:
    """How many examples a test takes; a search takes many more."""
    return settings(max_examples=count * (30 if PROFILE == "search" else 1))


def device_matrices(count: int, most_axes: int = 4) -> list[tuple[int, ...]]:
    """Every device matrix of ``count`` ranks with axes from 1 to 4."""
    return [
        sizes
        for naxes in range(1, most_axes + 1)
        for sizes in product(range(1, 5), repeat=naxes)
        if math.prod(sizes) == count
    ]


MATRICES = {count: device_matrices(count) for count in (1, 2, 3, 4, 6, 8, 9, 12)}


@st.composite
def layouts(draw: st.DrawFn, ndim: int, count: int) -> Layout:
    """A layout of a tensor of ``ndim`` axes on ``count`` ranks."""
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
    """Ranks of a stage, and stages."""
    stages = draw(st.integers(1, most_stages))
    return draw(st.sampled_from([n for n in MATRICES if n * stages <= 12])), stages


@st.composite
def moves(draw: st.DrawFn, most_stages: int = 3, has_state: bool = False) -> Move:
    """A checkpoint of few parameters, with layouts for two numbers of ranks.

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
                parts = [math.lcm(a, b) for a, b in zip(parts, layout.parts, strict=True)]
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
def shapes(draw: st.DrawFn, most_axes: int = 4, most: int = 5) -> tuple[int, ...]:
    """Shapes, some of them with an empty axis."""
    return tuple(draw(st.lists(st.integers(0, most), max_size=most_axes)))


@st.composite
def regions(draw: st.DrawFn, shape: tuple[int, ...]) -> Region:
    """A region of a tensor of that shape; it may be empty."""
    ends = [sorted(draw(st.tuples(*[st.integers(0, n)] * 2))) for n in shape]
    return Region(tuple(a for a, _ in ends), tuple(b for _, b in ends))
