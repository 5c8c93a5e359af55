"""Expanded layouts of JSON strategies, folded back: against an expander that is no folder."""

import json
from itertools import combinations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from ckpttool.model.layout import Layout, ambiguity, fold_layout
from ckpttool.strategy_files.reader import read_strategy
from tests.oracle import take
from tests.strategies import MATRICES, examples, layouts
from tests.support.checkpoints import cut, noise, oracle, strategy_of, the_one, with_names
from tests.support.file_bytes import layout as stored_layout
from tests.support.file_bytes import operator, strategy
from tests.support.in_memory import carry_out, catalog_of_entries, find, make


def expand(layout, shape):
    """What MindSpore writes in JSON for a tensor: every device axis has a tensor axis of its own.

    An axis of ``d`` elements becomes ``n1, ..., n(k-1), d / (n1 * ... * n(k-1))``.
    """
    axes, sizes = [], []
    for cutting, size in zip(layout.tensor_map, shape, strict=True):
        for device_axis in cutting[:-1]:
            count = layout.device_matrix[::-1][device_axis]
            axes.append((device_axis,))
            sizes.append(count)
            size //= count
        axes.append(cutting[-1:])
        sizes.append(size)
    return replace(layout, tensor_map=tuple(axes), full_shape=tuple(sizes))


def spelled(layout):
    return layout.tensor_map, layout.full_shape


def all_ways(expanded, ndim):
    """Every tensor of ``ndim`` axes that MindSpore would write like this, found by writing them."""
    found = []
    for ends in combinations(range(1, len(expanded.full_shape)), ndim - 1):
        parts = [
            slice(a, b) for a, b in zip((0, *ends), (*ends, len(expanded.full_shape)), strict=True)
        ]
        shape = tuple(int(np.prod(expanded.full_shape[part])) for part in parts)
        tensor_map = tuple(sum(expanded.tensor_map[part], ()) for part in parts)
        way = replace(expanded, tensor_map=tensor_map, full_shape=shape)
        if spelled(expand(way, shape)) == spelled(expanded):
            found.append(way)
    return found


def slices_of(layout, shape):
    numbers = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    parts = [take(numbers, oracle(layout), rank) for rank in layout.ranks]
    return shape, tuple((part.shape, part.tobytes()) for part in parts)


@st.composite
def expanded_layouts(draw):
    ndim = draw(st.integers(1, 4))
    layout = draw(layouts(ndim, draw(st.sampled_from(sorted(MATRICES)))))
    assume(any(len(axes) > 1 for axes in layout.tensor_map))
    shape = tuple(n * draw(st.sampled_from([1, 1, 2, 3, 4])) for n in layout.slice_counts)
    assume(np.prod(shape) < 5000)
    return replace(layout, full_shape=shape), shape, expand(layout, shape)


@examples(300)
@given(expanded_layouts())
def test_folding_finds_every_layout_that_may_be_meant_and_no_other(example):
    layout, shape, expanded = example
    wanted = {slices_of(way, way.full_shape) for way in all_ways(expanded, len(shape))}
    found = [slices_of(way, way.full_shape) for way in fold_layout(expanded, len(shape))]
    assert slices_of(layout, shape) in found
    assert len(found) == len(set(found)), "the same way twice"
    assert set(found) == wanted


@examples(300)
@given(expanded_layouts())
def test_a_source_is_folded_if_there_is_one_way_and_a_question_with_all_ways_if_not(example):
    layout, shape, expanded = example
    entries = {"w": noise("w", "Float32", shape)}
    slices = cut(entries, strategy_of({"w": layout}))
    catalog, told = catalog_of_entries(slices), strategy_of({"w": expanded})
    shapes = {entry["w"].shape for entry in slices.values()}
    ways = [
        way
        for way in all_ways(expanded, len(shape))
        if all(size % n == 0 for size, n in zip(way.full_shape, way.slice_counts, strict=True))
        and {take(np.zeros(way.full_shape), oracle(way), 0).shape} == shapes
    ]
    if len({slices_of(way, way.full_shape) for way in ways}) == 1:
        assert carry_out(make(catalog, told, None), slices) == {0: entries}
        return
    found, problems, _ = find(catalog, told)
    assert not found
    shown = {f"{way.full_shape} with" for way in ways}
    text = f"several full shapes\n  expanded shape {expanded.full_shape} may stand for "
    the_one(problems, text, "protobuf form")
    assert " more\n" in problems[0] or all(words in problems[0] for words in shown), problems


def test_the_examples_have_one_way_and_several():
    counts = set()

    @settings(max_examples=300)  # as many as the tests that they stand for take in full
    @given(expanded_layouts())
    def look(example):
        _, shape, expanded = example
        counts.add(len(fold_layout(expanded, len(shape))))

    look()
    assert counts >= {1, 2, 3}


# ------------------------------------------------------------------ the specification's examples

UNIQUE = Layout((2, 2, 4), ((2,), (1,), (0,), ()), full_shape=(2, 2, 8, 8))
AMBIGUOUS = Layout((2, 2, 4), ((0,), (1,), (2,)), full_shape=(4, 2, 16))


def test_an_expanded_layout_that_may_be_two_names_both():
    _, problems, _ = find(with_names({"w": (1, 8)}, range(16)), strategy_of({"w": AMBIGUOUS}))
    the_one(
        problems,
        "w: the JSON strategy fits several full shapes\n  expanded shape (4, 2, 16) may stand for",
        "(4, 32) with tensor map [[0], [1, 2]]",
        " or ",
        "(8, 16) with tensor map [[0, 1], [2]]",
        "\n  Try: add its protobuf form or a hand-written one (-s MORE.yaml)",
    )


@pytest.mark.parametrize(
    ("listed", "axes", "shape", "full"),
    [
        ([0, 1, 2], [[0], [1, 2]], (1, 8), (4, 32)),
        ([0, 1, 2], [[0, 1], [2]], (1, 8), (8, 16)),
        ([0, 1, 2], [[1, 0], [2]], (1, 8), None),
        ([0, 1, 2], [[0], [1, 2]], (2, 8), None),  # a way, but not for these slices
        ([0, 1, -1], [[0], [1, -1]], (1, 16), (4, 32)),
    ],
)
def test_a_person_may_say_which_of_two_ways_is_meant(tmp_path, listed, axes, shape, full):
    stated = {"dev_matrix": [2, 2, 4], "tensor_map": listed, "tensor_shape": [4, 2, 16]}
    paths = [tmp_path / "s.json", tmp_path / "hand.yaml"]
    paths[0].write_text(json.dumps({"parallel_layout_item": {"w": stated}}))
    cut = {"device_matrix": [2, 2, 4], "tensor_map": axes}
    paths[1].write_text(json.dumps({"ckpttool_strategy": 1, "parameters": {"w": cut}}))
    catalog = with_names({"w": shape}, range(16))
    strategy, wrong = read_strategy(list(map(str, paths))).resolve(catalog.metas)
    found, problems, _ = find(catalog, strategy)
    assert (not wrong and not problems) == (full is not None), (wrong, problems)
    if full is not None:
        tensor_map = tuple(tuple(axis for axis in cut if axis >= 0) for cut in axes)
        assert spelled(found["w"][0].layout) == (tensor_map, full)


@pytest.mark.parametrize(
    ("tensor_map", "expanded", "piece", "way"),
    [
        (((0,), (), (1,)), (4, 4, 8), (4, 4), ((0,), (1,))),  # ("c", "None"), "b"
        (((), (0,), (1,)), (1, 16, 8), (4, 4), ((0,), (1,))),  # ("None", "c"), "b"
        (((2,), (), (1,), (0,)), (2, 1, 8, 8), (4, 2), ((2, 1), (0,))),
        (((0,), (1,), ()), (4, 2, 16), (1, 16), ((0, 1), ())),  # and not "c", ("b", "None")
    ],
)
def test_none_beside_device_axes_counts_where_there_is_no_other_way(
    tensor_map, expanded, piece, way
):
    layout = Layout((2, 2, 4), tensor_map, full_shape=expanded)
    found, problems, _ = find(with_names({"w": piece}, range(16)), strategy_of({"w": layout}))
    assert not problems
    assert found["w"][0].layout.tensor_map == way


def test_an_optimizer_shard_is_told_by_the_slices_of_an_expanded_layout():
    layout = Layout((2, 2, 4), ((2,), (1,), ()), 4, full_shape=(2, 8, 3))
    found, problems, _ = find(with_names({"w": (1, 3)}, range(16)), strategy_of({"w": layout}))
    assert not problems
    assert (found["w"][0].layout.tensor_map, found["w"][0].meta.shape) == (((2, 1), ()), (16, 3))
    _, problems, _ = find(with_names({"w": (4, 3)}, range(16)), strategy_of({"w": layout}))
    the_one(
        problems, "w: the slices do not fit", "ranks 0-15 hold slices of (4, 3)", "is for 3 axes"
    )


@pytest.mark.parametrize(("rows", "shard"), [(4, 1), (2, 2), (1, 4)])
def test_a_shard_that_an_expanded_layout_hides_is_told_by_the_full_shape(rows, shard):
    layout = Layout((2, 2, 4), ((2,), (1,), ()), full_shape=(2, 8, 3))
    slices = with_names({"w": (rows, 3)}, range(16))
    found, problems, notes = find(slices, strategy_of({"w": layout}))
    assert not problems
    (source,) = found["w"]
    assert (source.layout.tensor_map, source.meta.shape) == (((2, 1), ()), (16, 3))
    assert source.layout.optimizer_shard == shard
    assert ("corrected" in notes) == (shard > 1)


@pytest.mark.parametrize("shape", [(32, 8, 1), (33, 8), (2, 2, 8, 8), (), (256,)])
def test_slices_that_fit_no_way_are_told(shape):
    strategy = strategy_of({"w": UNIQUE})
    the_one(
        find(with_names({"w": shape}, range(16)), strategy)[1],
        "w: the slices do not fit",
        f"of {shape}; ",
    )


def test_what_is_not_expanded_is_not_folded():
    plain = Layout((2, 2), ((1,), (0,)), full_shape=(2, 8))
    for ndim in (0, 2, 3):
        assert not fold_layout(plain, ndim)
    assert not fold_layout(replace(plain, full_shape=None), 1)
    assert not fold_layout(replace(plain, full_shape=(2, 2, 8)), 1)
    assert not fold_layout(Layout((2, 2, 2), ((2, 1), (0,)), full_shape=(4, 8)), 1)


@pytest.mark.parametrize("more", [{"rows": (2, 3)}, {"fields": 2}])
def test_axis_0_of_a_table_that_is_cut_in_another_way_is_no_part_of_an_expanded_one(more):
    layout = Layout((2, 2, 2), ((2,), (1,), (0,)), full_shape=(2, 2, 4), **more)
    assert [way.tensor_map for way in fold_layout(layout, 2)] == [((2,), (1, 0))]
    assert not fold_layout(layout, 1)


def test_device_axes_of_size_1_make_no_other_way():
    layout = Layout((2, 1, 4), ((2,), (1,), (0,)), full_shape=(2, 1, 8))
    (way,) = fold_layout(layout, 2, lambda way: way.full_shape == (2, 8))
    assert slices_of(way, (2, 8)) == slices_of(Layout((2, 1, 4), ((2,), (0,))), (2, 8))


def test_a_damaged_file_with_very_many_ways_is_not_tried_for_ages():
    layout = Layout((1,) * 40, tuple((axis,) for axis in range(40)), full_shape=(1,) * 40)
    assert not fold_layout(layout, 20)
    _, problems, _ = find(with_names({"w": (1,) * 20}, range(1)), strategy_of({"w": layout}))
    the_one(problems, "w: the slices do not fit", "is for 40 axes")


def test_of_many_ways_a_few_are_shown():
    layout = Layout((2,) * 6, tuple((axis,) for axis in range(6)), full_shape=(2,) * 6)
    ways = fold_layout(layout, 3)
    assert len(ways) == 10
    text = ambiguity(layout, ways)
    assert text.count("with tensor map") == 3
    assert text.endswith(" or 7 more")


# ---------------------------------------------------------------------- a protobuf twin beside it

DOCUMENT = {"dev_matrix": [2, 2, 4], "tensor_map": [0, 1, 2], "tensor_shape": [4, 2, 16]}


@pytest.mark.parametrize("json_first", [False, True])
@pytest.mark.parametrize(
    ("maps", "shape"), [(((0,), (1, 2)), (4, 32)), (((0, 1), (2,)), (8, 16))], ids=str
)
def test_a_protobuf_twin_beside_an_ambiguous_document_decides(tmp_path, maps, shape, json_first):
    document, twin = tmp_path / "s.json", tmp_path / "s.ckpt"
    document.write_text(json.dumps({"parallel_layout_item": {"w": DOCUMENT}}))
    twin.write_bytes(strategy(operator(0), stored_layout("w", (2, 2, 4), *maps)))
    entries = {"w": noise("w", "Float32", shape)}
    slices = cut(entries, strategy_of({"w": Layout((2, 2, 4), maps)}))
    catalog = catalog_of_entries(slices)
    paths = [str(document), str(twin)] if json_first else [str(twin), str(document)]
    assert carry_out(make(catalog, read_strategy(paths), None), slices) == {0: entries}
    the_one(find(catalog, read_strategy([str(document)]))[1], "may stand for")
