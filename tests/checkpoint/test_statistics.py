"""AdaFactor's statistics: their layouts follow from the parameter's, not from their own entries."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.model.layout import Layout, shard_as_axes, without_axis
from ckpttool.model.plan import Target
from tests.strategies import examples, layouts
from tests.support.checkpoints import (
    catalog_of,
    cut,
    noise,
    strategy_of,
    the_one,
    with_names,
    write_file,
    write_ranks,
)
from tests.support.commands import message, run_well
from tests.support.file_bytes import layout, operator, strategy
from tests.support.in_memory import find, plan_in_memory
from tests.support.readers import Entry, read, read_ranks

# A matrix that MindSpore 2.10 compiled for eight ranks: columns cut by two, an optimizer shard over
# the four replicas.  Its statistic of rows is listed as whole, and cut like the rows.
WEIGHT = Layout((4, 2), ((), (0,)), optimizer_shard=4)
ROW, COLUMN = Layout((4, 2), ((),)), Layout((4, 2), ((0,),))
BIAS = Layout((4, 2), ((),), optimizer_shard=8)
LISTED = {
    "w": WEIGHT,
    "exp_avg.w": WEIGHT,
    "exp_avg_sq_row_w": ROW,
    "exp_avg_sq_col_w": COLUMN,
    "b": BIAS,
    "exp_avg_sq_b": Layout((4, 2), ((),)),
}
SHAPES = {
    "w": (24, 16),
    "exp_avg.w": (24, 16),
    "exp_avg_sq_row_w": (24,),
    "exp_avg_sq_col_w": (16,),
    "exp_avg_sq_w": (1,),
    "b": (32,),
    "exp_avg_sq_row_b": (1,),
    "exp_avg_sq_b": (32,),
}
TRUE = {
    **LISTED,
    "exp_avg_sq_row_w": Layout((4, 2), ((1,),)),
    "exp_avg_sq_b": BIAS,
}


def slices_of(constant=()):
    """Full tensors, and what the eight ranks hold of them."""
    full = {name: noise(name, "Float32", shape) for name, shape in SHAPES.items()}
    full |= {name: Entry("Float32", SHAPES[name], bytes(len(full[name].data))) for name in constant}
    return full, cut(full, strategy_of(TRUE))


@examples(300)
@given(st.data())
def test_a_shard_as_axes_gives_every_rank_the_same_slice(data):
    layout = data.draw(
        layouts(data.draw(st.integers(1, 3)), data.draw(st.sampled_from([6, 8, 12])))
    )
    plain = shard_as_axes(layout)
    if plain is not None:
        assert plain.optimizer_shard == 1
        assert plain.has_same_slices(layout)


def test_a_shard_that_no_axes_make_up_is_none():
    """Position 3 a + b of the replica group, modulo 2, is neither a nor b."""
    assert shard_as_axes(Layout((2, 3), ((),), 2)) is None
    assert without_axis(Layout((2, 3), ((), ()), 2), -1) is None
    assert shard_as_axes(Layout((2, 3), ((),), 3)) == Layout((2, 3), ((0,),))
    assert shard_as_axes(Layout((2, 2), ((), ()), 2, rows=(4,))) is None


@examples(200)
@given(st.data())
def test_a_statistic_has_its_parameters_places_along_the_axes_that_are_left(data):
    ndim = data.draw(st.integers(2, 4))
    layout = data.draw(layouts(ndim, data.draw(st.sampled_from([4, 8, 12]))))
    axis = data.draw(st.sampled_from([-1, -2]))
    reduced = without_axis(layout, axis)
    if reduced is not None:
        shape = tuple(n * size for n, size in zip(layout.slice_counts, (2, 3, 1, 2), strict=False))
        less = tuple(size for i, size in enumerate(shape) if i != ndim + axis)
        for rank in layout.ranks:
            box = layout.region(rank, shape)
            left = [
                (a, b)
                for i, (a, b) in enumerate(zip(box.start, box.stop, strict=True))
                if i != ndim + axis
            ]
            got = reduced.region(rank, less)
            assert list(zip(got.start, got.stop, strict=True)) == left


def test_vectors_and_field_sliced_tables_have_no_statistics():
    assert without_axis(Layout((2,), ((0,),)), -1) is None
    assert without_axis(Layout((2,), ((0,), ()), fields=2), -1) is None
    uneven = Layout((2,), ((0,), ()), rows=(3, 5))
    assert without_axis(uneven, -1) == Layout((2,), ((0,),), rows=(3, 5))
    assert without_axis(uneven, -2) == Layout((2,), ((),))


@pytest.fixture
def listed(tmp_path):
    """The strategy file of MindSpore, which does not know how the statistics are cut."""
    items = [
        layout(
            name,
            one.device_matrix,
            tuple(axes[0] if axes else -1 for axes in one.tensor_map),
            size=one.optimizer_shard,
        )
        for name, one in LISTED.items()
    ]
    path = tmp_path / "strategy.ckpt"
    path.write_bytes(strategy(operator(0), *items))
    return path


ZEROS = ("exp_avg_sq_row_w", "exp_avg_sq_col_w", "exp_avg_sq_b")


@pytest.mark.parametrize("constant", [(), ZEROS], ids=["trained", "zeros"])
def test_statistics_are_merged_as_they_were_cut(constant, listed, tmp_path):
    full, ranks = slices_of(constant)
    folder = write_ranks(tmp_path / "run", ranks, "ckpt")
    result = run_well("merge", folder, "-s", listed, "-o", tmp_path / "full.h5")
    assert read(tmp_path / "full.h5") == full
    said = "2 parameters are sharded as shapes show, not as in the strategy exp_avg_sq_row_w, exp_"
    assert said in message(result)


def test_statistics_are_cut_for_a_target_like_their_parameters(listed, tmp_path):
    full, ranks = slices_of()
    write_file(tmp_path / "full.ckpt", full, "ckpt")
    words = ["-d", listed, "-o", tmp_path / "out"]
    result = run_well("split", tmp_path / "full.ckpt", *words)
    assert read_ranks(tmp_path / "out") == ranks
    said = "sharded like the parameters: 2 optimizer states (exp_avg_sq_row_w, exp_avg_sq_b)"
    assert said in message(result)


def test_unlisted_statistics_follow_if_their_slices_say_so(listed, tmp_path):
    _, ranks = slices_of()
    only = strategy_of({name: LISTED[name] for name in ("w", "b")})
    catalog = catalog_of({r: {n: e.shape for n, e in held.items()} for r, held in ranks.items()})
    same = {name: (tuple(range(8)),) for name in ("exp_avg_sq_w", "exp_avg_sq_row_b")}
    found, problems, _ = find(catalog, only, same)
    assert not problems
    assert {name: one[0].meta.shape for name, one in found.items()} == SHAPES
    assert found["exp_avg_sq_row_w"][0].parameter == "w"
    assert found["exp_avg_sq_w"][0].parameter is None
    target = strategy_of({"w": Layout((2,), ((0,), ()))})
    made = plan_in_memory(catalog, only, Target("ckpt", {0: "out"}, 2, target), same)
    (output,) = made
    shapes = {meta.name: meta.shape for meta in output.metas}
    assert (shapes["exp_avg_sq_row_w"], shapes["exp_avg_sq_col_w"]) == ((12,), (16,))


def test_a_statistic_that_fits_nothing_is_pointed_out():
    odd = {"w": (6, 8), "exp_avg_sq_row_w": (5,)}
    saved = {name: layout for name, layout in TRUE.items() if name != "b"}
    _, problems, notes = find(with_names(odd, range(8)), strategy_of(saved))
    assert not problems
    the_one(notes["doubt"], "exp_avg_sq_row_w (20,), expected (24,)")
    _, problems, _ = find(
        with_names(odd, range(8)),
        strategy_of({"w": WEIGHT}),
        {"exp_avg_sq_row_w": (tuple(range(8)),)},
    )
    the_one(problems, "exp_avg_sq_row_w", "w (5,), w (24,) in slices (6,)")


def test_a_stage_that_has_no_use_for_a_statistic_is_not_asked_for_it():
    """MindSpore saves it there whole, and as it was at the start."""
    half = {name: Layout((2,), ((0,),)) for name in ("v", "exp_avg_sq_row_w")}
    strategy = strategy_of({"w": Layout((2,), ((0,), ())), **half}, {"x": Layout((2,), ((),))})
    ranks = {rank: {"w": (4, 3), "v": (2,), "exp_avg_sq_row_w": (4,)} for rank in (0, 1)}
    ranks |= {rank: {"x": (1,), "exp_avg_sq_row_w": (8,)} for rank in (2, 3)}
    found, problems, notes = find(catalog_of(ranks), strategy)
    assert not problems
    assert found["exp_avg_sq_row_w"][0].meta.shape == (8,)
    assert found["exp_avg_sq_row_w"][0].slicing.find_slice((1,))[0] == 1
    the_one(notes["skipped"], "1 parameter is also on ranks", "\n  exp_avg_sq_row_w")
