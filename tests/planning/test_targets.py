"""Plans: what is written where, from which pieces, and every reason not to."""

import pickle

import pytest

from ckpttool.model.catalog import Catalog
from ckpttool.model.layout import Layout
from ckpttool.model.plan import Target
from ckpttool.model.region import Region
from ckpttool.problems import FormatError, PlanError
from tests.support.checkpoints import (
    ONE_STAGE,
    catalog_of,
    slice_catalog,
    strategy_of,
    the_one,
    with_names,
)
from tests.support.errors import texts_of
from tests.support.in_memory import plan_in_memory

TWO_ROWS = Layout((2,), ((0,), ()))


def target_of(strategy=None, ranks=None):
    count = 1 if strategy is None else len(strategy.ranks)
    wanted = range(count) if ranks is None else ranks
    return Target("ckpt", {rank: f"out/rank_{rank}" for rank in wanted}, count, strategy)


def plan(catalog, strategy, target=None, content_groups=None, unlisted=None, ranks=None):
    return plan_in_memory(
        catalog, strategy, target_of(target, ranks), content_groups or {}, unlisted
    )


def problems_of(*arguments, **more):
    with pytest.raises(PlanError) as caught:
        plan(*arguments, **more)
    return texts_of(caught.value)


def pieces_of(plan, rank, within=None):
    (output,) = [output for output in plan if output.rank == rank]
    (tensor,) = output.tensors
    return list(tensor.pieces(within or Region.whole(tensor.meta.shape)))


# ------------------------------------------------------------------------------------ pieces


def test_iterating_a_plan_again_gives_the_same_files():
    made = plan(slice_catalog(ONE_STAGE, {"w": (8, 3)}), ONE_STAGE, strategy_of({"w": TWO_ROWS}))
    assert list(made) == list(made)
    assert [output.path for output in made] == ["out/rank_0", "out/rank_1"]


def test_a_plan_survives_pickling():
    made = plan(slice_catalog(ONE_STAGE, {"w": (8, 3)}), ONE_STAGE, strategy_of({"w": TWO_ROWS}))
    again = pickle.loads(pickle.dumps(made))
    assert [output.metas for output in again] == [output.metas for output in made]
    assert pieces_of(again, 1) == pieces_of(made, 1)


@pytest.mark.parametrize(
    ("names", "written", "message"),
    [
        (["net.w", "adam_m.net.w", "step", "net.b"], None, "adam_m."),
        (["adam_m.net.w", "ema.net.w", "net.w"], [2, 0, 1], "adam_m., ema."),
        (["net.w", "swap.net.w"], None, None),  # sorted, they are in this order, too
        (["adam_m.w", "w"], None, None),  # no network has a shorter name
        (["adam_m.net.w", "net.b"], None, None),
    ],
)
def test_no_state_is_before_its_parameter_where_mindspore_keeps_the_order(names, written, message):
    source = catalog_of({0: dict.fromkeys(names, (2, 2))})
    (output,) = plan(source, None)
    places = range(len(names)) if written is None else written
    assert [tensor.meta.name for tensor in output.tensors] == [names[place] for place in places]
    for format in ("hdf5", "safetensors"):
        made = plan_in_memory(source, None, Target(format, {0: "out"}))
        text = f"MindSpore may load {message} as weights where no name fits the network"
        assert [note.message for note in made.notes] == [text] * (message is not None)


# ---------------------------------------------------------------------------------- problems


def test_a_table_that_the_target_slices_by_fields_is_refused_but_can_be_merged():
    fields = strategy_of({"w": Layout((2,), ((0,), ()), fields=3)})
    problems = problems_of(catalog_of({0: {"w": (6, 2)}}), None, fields)
    the_one(
        problems, "src.ckpt: w: ", "field-sliced (3 fields), which can be merged but not sharded"
    )
    source = slice_catalog(fields, {"w": (6, 2)})
    assert [
        (p.tensor.file.path, p.src.start, p.dst.start) for p in pieces_of(plan(source, fields), 0)
    ] == [
        (f"run/rank_{rank}/net.ckpt", (row, 0), (2 * row + rank, 0))
        for row in range(3)
        for rank in range(2)
    ]
    the_one(problems_of(source, fields, fields), "src.ckpt: w: ", "field-sliced")


def test_an_expanded_layout_of_the_target_is_folded_to_the_shape_there_is():
    layout = Layout((2, 2, 4), ((0,), (1,), (2,)), full_shape=(4, 2, 16))
    for shape, folded in [((4, 32), ((0,), (1, 2))), ((8, 16), ((0, 1), (2,)))]:
        made = plan(catalog_of({0: {"w": shape}}), None, strategy_of({"w": layout}))
        assert made.transfers[0].layouts[0].tensor_map == folded
    problems = problems_of(catalog_of({0: {"w": (16, 8)}}), None, strategy_of({"w": layout}))
    the_one(problems, "src.ckpt: w: ", "tensor map", "is for 3 axes", "(16, 8)")


@pytest.mark.parametrize("strategy", [None, ONE_STAGE])
def test_a_source_without_parameters_is_a_problem(strategy):
    the_one(problems_of(with_names({}), strategy), "run: no tensor was found", "4 files, 0 bytes")


def test_a_single_damaged_file_is_that_error_and_no_other():
    damage = {0: FormatError("run/rank_0/net.ckpt", 7, "cut short")}
    with pytest.raises(FormatError, match="cut short"):
        plan(Catalog("run", {}, damaged=damage), None, strategy_of({"w": TWO_ROWS}))
