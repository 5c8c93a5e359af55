"""Boxes that fill a tensor, and what is said of those that do not."""

from __future__ import annotations

import math

import pytest
from msgspec.structs import replace

from ckpttool.model.layout import Layout
from ckpttool.model.region import Region
from ckpttool.model.slicing import (
    MAX_CELLS,
    Box,
    BrokenTensor,
    Follows,
    FullTensor,
    Holding,
    LayoutSlicing,
    Listed,
    Own,
    Unlisted,
    Whole,
    fill_with_boxes,
    find_pieces,
    follow,
    holdings,
)
from ckpttool.model.tensors import TensorMeta
from tests.support.checkpoints import ROWS, slice_catalog, stored, strategy_of


def box(start, stop, rank=0, name="w", dtype="Float32"):
    region = Region(start, stop)
    return Box(region, rank, stored(TensorMeta(name, dtype, region.shape), f"rank_{rank}.ckpt"))


def full(*shape):
    return TensorMeta("w", "Float32", shape)


def test_replicas_are_one_slice_and_the_lowest_rank_is_read():
    boxes = [box((4, 0), (8, 2), 5), box((0, 0), (4, 2), 7), box((0, 0), (4, 2), 3)]
    described = fill_with_boxes(full(8, 2), boxes)
    assert [[box.rank for box in boxes] for boxes in described.slices] == [[3, 7], [5]]
    assert (described.slice_counts, described.is_grid) == ((2, 1), True)
    (piece,) = find_pieces(described, Region((0, 0), (2, 2)), (1, 0))
    assert (piece.rank, piece.tensor.file.path) == (3, "rank_3.ckpt")
    assert (piece.src, piece.dst) == (Region((1, 0), (3, 2)), Region((0, 0), (2, 2)))


def test_boxes_that_are_no_grid_are_found_where_they_lie():
    boxes = [box((0, 0), (1, 3), 0), box((1, 0), (2, 1), 1), box((1, 1), (2, 3), 2)]
    described = fill_with_boxes(full(2, 3), boxes)
    assert (described.slice_counts, described.is_grid) == ((2, 2), False)
    pieces = find_pieces(described, Region((0, 1), (2, 3)), (0, 0))
    assert [(rank, src, dst) for rank, _, src, dst in pieces] == [
        (0, Region((0, 1), (1, 3)), Region((0, 1), (1, 3))),
        (2, Region((0, 0), (1, 2)), Region((1, 1), (2, 3))),
    ]


def test_an_excerpt_has_the_boxes_that_are_touched_and_finds_the_same_in_them():
    boxes = [box((0, 0), (1, 3), 0), box((1, 0), (2, 1), 1), box((1, 1), (2, 3), 2)]
    described = fill_with_boxes(full(2, 3), [*boxes, box((1, 1), (2, 3), 3)])
    wanted = Region((0, 1), (2, 3))
    few = described.excerpt(wanted)
    assert list(find_pieces(few, wanted, (0, 0))) == list(find_pieces(described, wanted, (0, 0)))
    assert few.count_overlaps(wanted) == 2
    assert sorted(box.rank for boxes in few.slices for box in boxes) == [0, 2]


def test_a_scalar_and_a_tensor_without_elements_are_described():
    scalar = fill_with_boxes(full(), [box((), ())])
    assert [one.src for one in find_pieces(scalar, Region((), ()), ())] == [Region((), ())]
    for boxes in ([box((0, 0), (0, 4))], [box((0, 0), (0, 2)), box((0, 2), (0, 4), 1)]):
        empty = fill_with_boxes(full(0, 4), boxes)
        assert len(empty.slices) == len(boxes)
        assert list(find_pieces(empty, Region((0, 0), (0, 4)), (0, 0))) == []


def test_boxes_without_elements_among_others_take_no_part():
    described = fill_with_boxes(full(4, 2), [box((0, 0), (4, 2)), box((3, 0), (3, 2), 1)])
    assert (len(described.slices), described.cuts) == (1, ((0, 4), (0, 2)))


@pytest.mark.parametrize(
    ("layout", "shape", "regions"),
    [
        (Layout((2,), ()), (), ["[]"]),
        (
            Layout((2, 2), ((0,), (1,))),
            (4, 6),
            ["[0:2, 0:3]", "[0:2, 3:6]", "[2:4, 0:3]", "[2:4, 3:6]"],
        ),
        (Layout((2, 2), ((0,),), 2), (8,), ["[0:2]", "[2:4]", "[4:6]", "[6:8]"]),
        (Layout((2,), ((0,), ()), rows=(3, 1)), (4, 2), ["[0:3, 0:2]", "[3:4, 0:2]"]),
        (Layout((2,), ((0,),), fields=2), (8,), ["[0:2] [4:6]", "[2:4] [6:8]"]),
        (Layout((2,), ((0,), ()), fields=2), (0, 3), ["[0:0, 0:3] [0:0, 0:3]"] * 2),
    ],
)
def test_the_regions_of_a_layout_stand_in_the_order_of_their_owners(layout, shape, regions):
    slicing = LayoutSlicing(layout, shape, "w", {})
    slices = [*slicing.holdings()]
    assert [" ".join(map(str, part.regions)) for part in slices] == regions
    assert [part.owners for part in slices] == [*slicing.owners()]
    assert sum(part.size for part in slices) == math.prod(shape)


def test_boxes_are_held_by_their_ranks():
    boxes = [box((4, 0), (8, 2), 5), box((0, 0), (4, 2), 7), box((0, 0), (4, 2), 3)]
    described = fill_with_boxes(full(8, 2), boxes)
    first, last = Region((0, 0), (4, 2)), Region((4, 0), (8, 2))
    tensor = FullTensor(full(8, 2), described, Listed())
    assert [*holdings(tensor)] == [
        Holding((3, 7), (3, 7), region=first),
        Holding((5,), (5,), region=last),
    ]
    few = described.excerpt(Region((5, 0), (6, 2)))
    assert [holding.regions for holding in few.holdings()] == [(), (last,)]


def test_each_stage_has_the_ranks_that_should_hold_a_slice_and_those_that_do():
    catalog = slice_catalog(strategy_of(*[{"w": ROWS}] * 2), {"w": (4, 2)})
    files = {rank: file.tensors for rank, file in catalog.files.items() if rank not in (1, 4, 5)}
    stages = [LayoutSlicing(replace(ROWS, first_rank=at), (4, 2), "w", files) for at in (0, 4)]
    complete, gappy = ([*stage.holdings()] for stage in stages)
    assert [(one.owners, one.holders) for one in complete] == [((0, 1), (0,)), ((2, 3), (2, 3))]
    assert [(one.owners, one.holders) for one in gappy] == [((4, 5), ()), ((6, 7), (6, 7))]
    tensor = FullTensor(full(4, 2), stages[0], Follows("v"), incomplete=(stages[1],))
    assert [*holdings(tensor)] == [*complete, *gappy]
    assert {one.layout.first_rank for one in holdings(tensor)} == {0, 4}
    broken = BrokenTensor(full(4, 2), Listed(), stages=(stages[1],))
    assert [*holdings(broken)] == gappy
    assert [*holdings(replace(broken, stages=()))] == []


@pytest.mark.parametrize(
    ("known_by", "groups"),
    [
        (Whole(((0, 2), (1,))), [(0, 2), (1,)]),
        (Unlisted(((0, 1, 2),)), [(0, 1, 2)]),
        (Own((0, 2)), [(0,), (2,)]),
    ],
)
def test_ranks_with_equal_contents_hold_all_of_a_tensor_without_a_layout(known_by, groups):
    slicing = LayoutSlicing(Layout.unsharded(1), (3,), "w", {0: {}, 1: {}, 2: {}})
    whole = Region((0,), (3,))
    found = [*holdings(FullTensor(full(3), slicing, known_by))]
    assert found == [Holding(ranks, ranks, region=whole) for ranks in groups]
    assert not any(one.layout for one in found)


OTHER = "w: a slice has another type or shape\n  rank 0 (rank_0.ckpt) "
OUTSIDE = "w: a slice lies outside of the full shape\n  rank 0 (rank_0.ckpt) holds "


@pytest.mark.parametrize(
    ("boxes", "problem"),
    [
        ([], "w: slices are in no file\n  1 of (4, 4): [0:4, 0:4]"),
        ([box((0, 0), (4, 2))], "w: slices are in no file\n  1 of (4, 4): [0:4, 2:4]"),
        (
            [box((0, 0), (4, 3)), box((0, 2), (4, 4), 1)],
            "w: slices overlap and are not the same\n  [0:4, 0:3] and [0:4, 2:4]",
        ),
        ([box((0, 0), (5, 4))], f"{OUTSIDE}[0:5, 0:4] of (4, 4)"),
        ([box((0,), (4,))], f"{OUTSIDE}[0:4] of (4, 4)"),
        ([box((0, 0), (4, 4), dtype="Int32")], f"{OTHER}has Int32 (4, 4), expected Float32 (4, 4)"),
    ],
)
def test_what_is_wrong_with_boxes_is_said(boxes, problem):
    assert [one.text for one in fill_with_boxes(full(4, 4), boxes)] == [problem]


def test_two_slices_are_not_one_stored_tensor():
    one = box((0, 0), (2, 4))
    other = Box(Region((2, 0), (4, 4)), 0, one.tensor)
    (problem,) = fill_with_boxes(full(4, 4), [one, other])
    assert problem.fact == "w: two slices are one tensor of a file"
    assert problem.facts == "rank_0.ckpt: [0:2, 0:4] and [2:4, 0:4]"


def test_a_grid_that_grows_out_of_hand_is_refused():
    size = 1100
    boxes = [box((i, i), (i + 1, i + 1), i) for i in range(size)]
    (problem,) = fill_with_boxes(full(size, size), boxes)
    assert problem.fact == "w: the slices are too irregular"
    assert problem.facts.endswith(f"the grid is ({size}, {size}) large")
    assert size * size > MAX_CELLS


def test_state_follows_its_parameter_only_where_all_of_it_is_there():
    slicing = fill_with_boxes(full(4, 2), [box((0, 0), (2, 2), 0), box((2, 0), (4, 2), 1)])
    base = FullTensor(full(4, 2), slicing, Listed())
    state = {rank: stored(TensorMeta("m.w", "Int8", (2, 2)), f"{rank}") for rank in range(3)}
    followed = follow(base, "m.w", {rank: state[rank] for rank in (0, 1)})
    assert (followed.meta, followed.parameter) == (TensorMeta("m.w", "Int8", (4, 2)), "w")
    assert followed.slicing.key == slicing.key
    for ranks in ([0], [0, 1, 2], [2]):
        assert follow(base, "m.w", {rank: state[rank] for rank in ranks}) is None
    other = stored(TensorMeta("m.w", "Int16", (2, 2)))
    assert follow(base, "m.w", {0: state[0], 1: other}) is None
