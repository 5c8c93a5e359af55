"""The arithmetic of layouts, against what MindSpore's compiler was seen to do."""

import math
from itertools import product

import numpy as np
import pytest

from ckpttool.model.layout import Layout, UnevenAxis
from ckpttool.model.region import Region
from tests.oracle import take
from tests.support.checkpoints import oracle

ROWS = {  # layout, full rows -> first row of every rank; from the compiler's own slices
    "one axis": (Layout((2, 2, 2), ((1,), ())), 64, [0, 0, 32, 32, 0, 0, 32, 32]),
    "two axes": (Layout((2, 2, 2), ((1, 0), ())), 16, [0, 4, 8, 12, 0, 4, 8, 12]),
    "two axes reversed": (Layout((2, 2, 2), ((0, 1), ())), 16, [0, 8, 4, 12, 0, 8, 4, 12]),
    "undivided": (Layout((2, 4), ((),)), 32, [0] * 8),
    "whole shard": (Layout((2, 2, 2), ((1,), ()), 4), 64, [0, 8, 32, 40, 16, 24, 48, 56]),
    "shard of two": (Layout((2, 2, 2), ((1,), ()), 2), 64, [0, 16, 32, 48, 0, 16, 32, 48]),
    "shard of all": (Layout((2, 4), ((),), 8), 32, [0, 4, 8, 12, 16, 20, 24, 28]),
    "shard of four of sixteen": (
        Layout((2, 2, 4), ((1,), ()), 4),
        64,
        [0, 8, 16, 24, 32, 40, 48, 56] * 2,
    ),
    "by hand": (Layout((2,), ((0,), ()), rows=(6, 4)), 10, [0, 6]),
    "by hand, replicas": (Layout((2, 2), ((0,), ()), rows=(6, 4)), 10, [0, 6, 0, 6]),
    "by hand, shard": (Layout((2, 2), ((1,), ()), 2, rows=(6, 4)), 10, [0, 3, 6, 8]),
    "by hand, two axes": (Layout((2, 2), ((0, 1),), rows=(1, 2, 3, 4)), 10, [0, 3, 1, 6]),
    "shard across no axis": (Layout((2, 3), ((),), 2), 4, [0, 2, 0, 2, 0, 2]),
}
BY_HAND = Layout((2,), ((0,), ()), rows=(6, 4))


@pytest.mark.parametrize("case", ROWS.values(), ids=ROWS)
def test_first_rows_are_those_of_the_compiler(case):
    layout, rows, expected = case
    shape = (rows, 8)[: len(layout.tensor_map)]
    assert [layout.region(rank, shape).start[0] for rank in layout.ranks] == expected


def test_the_columns_of_an_optimizer_shard_are_not_cut_by_it():
    layout = Layout((2, 2, 2), ((), (1,)), 4)
    assert layout.slice_counts == (4, 2)
    assert layout.region(4, (32, 32)) == Region((16, 0), (24, 16))


def all_layouts(count):
    """Every layout of one or two tensor axes on ``count`` ranks in at most three device axes."""
    for matrix in product(range(1, count + 1), repeat=3):
        if math.prod(matrix) != count:
            continue
        for maps in product([(), (0,), (1,), (2,), (0, 1), (2, 1), (1, 0, 2)], repeat=2):
            used = maps[0] + maps[1]
            if len(set(used)) < len(used):
                continue
            replicas = Layout(matrix, maps).replicas
            for shard in range(1, replicas + 1):
                if replicas % shard == 0:
                    yield Layout(matrix, maps, shard, first_rank=count)


@pytest.mark.parametrize("count", [1, 4, 6])
def test_every_layout_of_few_ranks_cuts_as_the_oracle_does(count):
    checked = 0
    for layout in all_layouts(count):
        shape = tuple(2 * n for n in layout.slice_counts)
        full = np.arange(math.prod(shape)).reshape(shape)
        for rank in layout.ranks:
            region = layout.region(rank, shape)
            at = tuple(slice(a, b) for a, b in zip(region.start, region.stop, strict=True))
            np.testing.assert_array_equal(full[at], take(full, oracle(layout), rank))
            checked += 1
    assert checked >= count


def test_owners_and_slice_indices_are_two_sides_of_the_same():
    for layout in all_layouts(6):
        owners = {index: layout.owners(index) for index in layout.slice_indices()}
        assert list(owners) == list(np.ndindex(*layout.slice_counts))
        assert sorted(rank for ranks in owners.values() for rank in ranks) == list(layout.ranks)
        for index, ranks in owners.items():
            assert list(ranks) == sorted(ranks)
            assert {layout.slice_index(rank) for rank in ranks} == {index}


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (((2, 0), ((0,),)), r"device matrix \[2, 0\] has an axis below 1"),
        (((2, 2), ((2,),)), r"names device axis 2; the device matrix \[2, 2\] has axes 0 to 1"),
        (((2, 2), ((-1,),)), "names device axis -1"),
        (((2, 2), ((1,), (1,))), "uses device axis 1 twice"),
        (((2, 2), ((0, 0),)), "uses device axis 0 twice"),
        (((2, 2), ((0,),), 3), "optimizer shard of 3 does not divide the replica group of 2"),
        (((2, 2), ((0,),), 4), "optimizer shard of 4 does not divide the replica group of 2"),
        (((2, 2), ((0,),), 0), "optimizer shard of 0"),
        (((2, 2), (), 2), "optimizer shard of 2 on a 0-d tensor"),
        (((2,), ((0,),), 1, 0, None, (6, 4, 2)), r"split of \[6, 4, 2\] rows, expected 2 numbers"),
        (((2,), ((),), 1, 0, None, (6, 4)), r"split of \[6, 4\] rows, expected 1 numbers"),
        (((2, 2), ((0,),), 2, 0, None, (6, 4, 6, 4)), "expected 2 numbers"),
        (((2,), ((0,),), 1, 0, None, (6, -1)), r"split of \[6, -1\] rows"),
        (((2,), (), 1, 0, None, (6,)), "expected 0 numbers"),
        (((2,), ((0,),), 1, 0, None, (6, 4), 3), r"\(3 fields\) and sharded along axis 0"),
        (((2, 2), ((0,),), 2, 0, None, (), 3), "field-sliced .* and sharded along"),
        (((2,), (), 1, 0, None, (), 3), "field-sliced"),
    ],
)
def test_an_impossible_layout_is_refused_with_the_reason(arguments, match):
    with pytest.raises(ValueError, match=match):
        Layout(*arguments)


@pytest.mark.parametrize(
    ("layout", "shape", "words"),
    [
        (Layout((3,), ((0,),)), (8,), ["axis 0 of (8,)", "by 2 or 4, not by 3"]),
        (Layout((8,), ((), (0,))), (3, 4), ["axis 1 of (3, 4)", "divisible by 4, not by 8"]),
        (Layout((2, 3), ((1,),), 3), (8,), ["axis 0", "by 4 or 8, not by 6"]),
        (Layout((2, 2), ((0,), (1,))), (3, 5), ["axis 0", "axis 1", "; "]),
        (Layout((2,), ((0,),)), (4, 4), ["[[0]]", "1 axis", "(4, 4)"]),
        (Layout((2,), ((0,),)), (), ["1 axis", "()"]),
        (Layout((2,), ((0,),), full_shape=(8,)), (4,), ["lists full shape (8,)", "form (4,)"]),
        (BY_HAND, (12, 8), ["manual split [6, 4] has 10 rows", "(12, 8) has 12"]),
        (Layout((2, 2), ((1,),), 2, rows=(5, 4)), (9,), ["of [5] rows", "not divisible by 2"]),
        (Layout((2, 2), ((1,), (0,)), rows=(5, 4)), (9, 3), ["axis 1", "by 1 or 3, not by 2"]),
        (Layout((2,), ((0,), ()), fields=3), (8, 4), ["axis 0", "by 4 or 8, not by 6"]),
    ],
)
def test_a_shape_that_cannot_be_cut_is_told_why(layout, shape, words):
    reason = layout.why_not(shape)
    assert reason is not None
    assert all(word in reason for word in words), reason


@pytest.mark.parametrize(
    ("layout", "shape"),
    [
        (Layout((2, 3), ((1,), (0,))), (4, 9)),
        (Layout((2,), ((0,),)), (0,)),
        (Layout((2,), ()), ()),
        (Layout((2,), ((0,),), full_shape=(4,)), (4,)),
        (BY_HAND, (10, 8)),
        (Layout((2, 2), ((1,),), 2, rows=(6, 4)), (10,)),
        (Layout((2,), ((0,),), rows=(0, 4)), (4,)),
        (Layout((2,), ((0,), ()), fields=3), (12, 8)),
        (Layout((2,), ((0,), ()), fields=3), (0, 8)),
    ],
)
def test_a_shape_that_can_be_cut_has_no_reason_against_it(layout, shape):
    assert layout.why_not(shape) is None
    assert layout.implied_shape(layout.slice_shape(layout.first_rank, shape)) == shape


@pytest.mark.parametrize("size", range(1, 40))
def test_nearest_divisors_are_the_next_ones_on_both_sides(size):
    divisors = [n for n in range(1, size + 1) if size % n == 0]
    for parts in range(2, 45):
        if size % parts:
            below = [n for n in divisors if n < parts][-1:]
            above = [n for n in divisors if n > parts][:1]
            assert UnevenAxis(0, size, parts).nearest == (*below, *above)


def test_boundaries_tell_where_an_axis_is_cut():
    layout = Layout((2, 2), ((1, 0), ()))
    assert list(layout.boundaries(0, 8)) == [0, 2, 4, 6, 8]
    assert list(layout.boundaries(1, 3)) == [0, 3]
    assert list(layout.boundaries(0, 0)) == [0] * 5
    with pytest.raises(ValueError, match="axis 0 of 6 elements is not divisible by 4"):
        layout.boundaries(0, 6)


def test_overlaps_are_those_that_a_search_over_all_slices_finds():
    shape = (12, 6)
    layout = Layout((2, 3), ((0, 1), ()))  # six slices of two rows
    for start, stop in product(np.ndindex(13, 4), np.ndindex(13, 7)):
        if any(a > b for a, b in zip(start, stop, strict=True)):
            continue
        wanted = Region(start, stop)
        found = list(layout.overlaps(wanted.relative_to(start), start, shape))
        assert layout.touched(wanted, shape) == {index for index, _, _ in found}
        searched = []
        for index in layout.slice_indices():
            box = layout.box(index, shape)
            first = tuple(map(max, box.start, wanted.start))
            last = tuple(map(min, box.stop, wanted.stop))
            if all(a < b for a, b in zip(first, last, strict=True)):
                shared = Region(first, last)
                from_start = shared.relative_to(start)
                searched.append((index, shared.relative_to(box.start), from_start))
        assert found == searched


def test_a_scalar_overlaps_in_its_one_element_and_an_empty_tensor_nowhere():
    one = Region((), ())
    assert list(Layout((4,), ()).overlaps(one, (), ())) == [((), one, one)]
    assert not list(Layout((4,), ((0,),)).overlaps(Region((0,), (0,)), (0,), (0,)))


def test_an_unsharded_tensor_is_whole_on_every_rank():
    layout = Layout.unsharded(2, 3, 5)
    assert list(layout.ranks) == [5, 6, 7]
    assert layout.owners((0, 0)) == (5, 6, 7)
    assert all(layout.region(rank, (4, 6)) == Region.whole((4, 6)) for rank in layout.ranks)


def test_the_full_shape_of_the_strategy_makes_no_other_layout():
    assert Layout((2,), ((0,),), full_shape=(4,)) == Layout((2,), ((0,),))


def test_boundaries_of_a_manual_split_are_where_its_rows_end():
    assert list(BY_HAND.boundaries(0, 10)) == [0, 6, 10]
    assert list(BY_HAND.boundaries(1, 8)) == [0, 8]
    assert list(Layout((4,), ((),), 2, rows=(10,)).boundaries(0, 10)) == [0, 5, 10]
    with pytest.raises(ValueError, match="a part of 5 rows is not divisible by 2"):
        Layout((4,), ((),), 2, rows=(5,)).boundaries(0, 5)
    assert [BY_HAND.slice_shape(rank, (10, 8)) for rank in BY_HAND.ranks] == [(6, 8), (4, 8)]


def test_a_part_without_rows_overlaps_nothing():
    layout = Layout((4,), ((0,),), rows=(0, 6, 0, 4))
    whole = list(layout.overlaps(Region((0,), (10,)), (0,), (10,)))
    assert [index for index, _, _ in whole] == [(1,), (3,)]
    assert list(layout.overlaps(Region((6,), (8,)), (0,), (10,))) == [
        ((3,), Region((0,), (2,)), Region((6,), (8,)))
    ]


def test_a_slice_of_several_fields_is_no_box_and_overlaps_once_in_each_field():
    layout, shape = Layout((3, 2), ((1,), (0,)), fields=2), (12, 4)
    with pytest.raises(ValueError, match="a slice of 2 fields is no box"):
        layout.region(0, shape)
    full = np.arange(48).reshape(shape)
    slices = {layout.slice_index(rank): take(full, oracle(layout), rank) for rank in range(6)}
    assert {part.shape for part in slices.values()} == {layout.slice_shape(0, shape)}
    for start, stop in product(np.ndindex(13, 5), repeat=2):
        if any(a >= b for a, b in zip(start, stop, strict=True)):
            continue
        got = np.full(shape, -1)
        for index, src, dst in layout.overlaps(Region(start, stop), (0, 0), shape):
            assert (got[spots(dst)] == -1).all()
            got[spots(dst)] = slices[index][spots(src)]
        wanted = np.full(shape, -1)
        wanted[spots(Region(start, stop))] = full[spots(Region(start, stop))]
        np.testing.assert_array_equal(got, wanted)


def spots(region):
    return tuple(slice(a, b) for a, b in zip(region.start, region.stop, strict=True))


def test_tables_that_are_cut_in_other_ways_have_other_layouts():
    assert len({BY_HAND, Layout((2,), ((0,), ())), Layout((2,), ((0,), ()), fields=2)}) == 3
