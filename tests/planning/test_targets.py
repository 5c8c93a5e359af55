"""Plans: what is written where, from which pieces, and every reason not to."""

import pickle

import pytest

from ckpttool.model.catalog import Catalog
from ckpttool.model.layout import Layout
from ckpttool.model.plan import Target
from ckpttool.model.region import Region
from ckpttool.model.strategy import Strategy
from ckpttool.problems import CombinedError, FormatError, PlanError
from tests.support.checkpoints import (
    ONE_STAGE,
    ROWS,
    SHARDED,
    catalog_of,
    slice_catalog,
    strategy_of,
    the_one,
    with_names,
)
from tests.support.errors import texts_of
from tests.support.in_memory import plan_in_memory

TWO_ROWS = Layout((2,), ((0,), ()))
THREE_ROWS = Layout((3,), ((0,), ()))


def target_of(strategy=None, ranks=None):
    """All ranks of a strategy, or one file with everything."""
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


def names_by_rank(plan):
    return {output.rank: [meta.name for meta in output.metas] for output in plan}


def pieces_of(plan, rank, within=None):
    (output,) = [output for output in plan if output.rank == rank]
    (tensor,) = output.tensors
    return list(tensor.pieces(within or Region.whole(tensor.meta.shape)))


# ------------------------------------------------------------------------------------ pieces


def test_pieces_come_from_the_slices_that_overlap_and_no_others():
    source = strategy_of({"w": TWO_ROWS})
    made = plan(slice_catalog(source, {"w": (12, 5)}), source, strategy_of({"w": THREE_ROWS}))
    assert [(p.tensor.file.path, p.src, p.dst) for p in pieces_of(made, 1)] == [
        ("run/rank_0/net.ckpt", Region((4, 0), (6, 5)), Region((0, 0), (2, 5))),
        ("run/rank_1/net.ckpt", Region((0, 0), (2, 5)), Region((2, 0), (4, 5))),
    ]
    assert [(p.tensor.file.path, p.src, p.dst) for p in pieces_of(made, 2)] == [
        ("run/rank_1/net.ckpt", Region((2, 0), (6, 5)), Region((0, 0), (4, 5)))
    ]


def test_pieces_of_a_part_fill_that_part_in_coordinates_of_the_output():
    source = strategy_of({"w": TWO_ROWS})
    made = plan(slice_catalog(source, {"w": (12, 5)}), source, strategy_of({"w": THREE_ROWS}))
    (piece,) = pieces_of(made, 1, Region((3, 1), (4, 3)))
    assert (piece.src, piece.dst) == (Region((1, 1), (2, 3)), Region((3, 1), (4, 3)))
    assert not pieces_of(made, 1, Region((3, 1), (3, 3)))


def test_iterating_a_plan_again_gives_the_same_files():
    made = plan(slice_catalog(ONE_STAGE, {"w": (8, 3)}), ONE_STAGE, strategy_of({"w": TWO_ROWS}))
    assert list(made) == list(made)
    assert [output.path for output in made] == ["out/rank_0", "out/rank_1"]


def test_a_plan_survives_pickling():
    made = plan(slice_catalog(ONE_STAGE, {"w": (8, 3)}), ONE_STAGE, strategy_of({"w": TWO_ROWS}))
    again = pickle.loads(pickle.dumps(made))
    assert [output.metas for output in again] == [output.metas for output in made]
    assert pieces_of(again, 1) == pieces_of(made, 1)


# ----------------------------------------------------------------------------- who gets what


def test_merging_gives_one_file_with_every_parameter_whole():
    strategy = strategy_of({"a": ROWS}, {"b": ROWS})
    made = plan(slice_catalog(strategy, {"a": (8, 3), "b": (4, 2)}), strategy)
    (output,) = made
    assert [(meta.name, meta.shape) for meta in output.metas] == [("a", (8, 3)), ("b", (4, 2))]


def test_a_rank_gets_the_parameters_of_its_stage_and_those_of_none():
    target = strategy_of({"a": TWO_ROWS, "e": TWO_ROWS}, {"b": TWO_ROWS, "e": TWO_ROWS})
    made = plan(catalog_of({0: {"e": (4, 1), "b": (4, 1), "a": (2, 1), "step": ()}}), None, target)
    first, second = ["e", "a", "step"], ["e", "b", "step"]
    assert names_by_rank(made) == {0: first, 1: first, 2: second, 3: second}
    assert not made.notes


def test_only_the_wanted_ranks_are_written():
    target = strategy_of({"w": TWO_ROWS}, {"b": TWO_ROWS})
    made = plan(catalog_of({0: {"w": (4, 1), "b": (4, 1)}}), None, target, ranks=[3, 0])
    assert names_by_rank(made) == {3: ["b"], 0: ["w"]}


def test_a_string_goes_to_every_rank_even_if_it_is_listed():
    target = strategy_of({"w": TWO_ROWS, "s": Layout((2,), ((0,),))})
    made = plan(catalog_of({0: {"w": (4, 1), "s": "text"}}), None, target)
    assert [[meta.text for meta in output.metas] for output in made] == [[None, "text"]] * 2


def test_what_ranks_hold_in_other_types_under_one_name_stays_what_it_is_on_each():
    source = strategy_of({"w": TWO_ROWS})
    held = {0: {"w": (4, 1), "s": "one"}, 1: {"w": (4, 1), "s": "two"}}
    target = strategy_of({"w": Layout((4,), ((0,), ()))})
    made = plan(catalog_of(held), source, target, unlisted="rank")
    texts = [meta.text for output in made for meta in output.metas if meta.name == "s"]
    assert texts == ["one", "two", "one", "two"]
    headers = {rank: metas for ranks, metas in made.headers.items() for rank in ranks}
    assert headers == {output.rank: output.metas for output in made}
    sizes = {output.rank: sum(meta.nbytes for meta in output.metas) for output in made}
    assert made.sizes == sizes == dict.fromkeys(range(4), 11)


DIFFERENT = with_names({"w": (4, 3), "rng": (2,)})
EACH = {"rng": ((0,), (1,), (2,), (3,))}


def rng_paths(made):
    """From which file each target rank takes ``rng``."""
    return {
        output.rank: piece.tensor.file.path.split("/")[1]
        for output in made
        for tensor in output.tensors
        if tensor.meta.name == "rng"
        for piece in tensor.pieces(Region.whole((2,)))
    }


@pytest.mark.parametrize("ranks", [2, 3, 6, 9])
def test_unlisted_rank_gives_target_rank_r_that_of_source_rank_r_modulo_source_ranks(ranks):
    target = strategy_of({"w": Layout((ranks,), ((), ()))})
    made = plan(DIFFERENT, ONE_STAGE, target, EACH, "rank")
    assert rng_paths(made) == {rank: f"rank_{rank % 4}" for rank in range(ranks)}
    assert [len(names) for names in names_by_rank(made).values()] == [2] * ranks


def test_unlisted_first_gives_everybody_that_of_the_lowest_rank():
    target = strategy_of({"w": Layout((6,), ((), ()))})
    made = plan(DIFFERENT, ONE_STAGE, target, EACH, "first")
    assert rng_paths(made) == dict.fromkeys(range(6), "rank_0")


def test_unlisted_drop_writes_it_nowhere():
    target = strategy_of({"w": Layout((6,), ((), ()))})
    assert not rng_paths(plan(DIFFERENT, ONE_STAGE, target, EACH, "drop"))


def test_what_only_ranks_without_a_turn_hold_is_dropped_with_a_note():
    ranks = {0: {"w": (4, 3)}, 2: {"w": (4, 3), "rng": (2,)}, 3: {"w": (4, 3), "rng": (2,)}}
    made = plan(catalog_of(ranks), ONE_STAGE, None, {"rng": ((2,), (3,))}, "rank")
    assert names_by_rank(made) == {0: ["w"]}
    assert ["rng" in note.text for note in made.notes if note.code == "dropped"] == [True]


def test_replicated_ranks_with_a_gap_write_a_name_once():
    replicated = Strategy.without_layouts(2)
    catalog = with_names({"w": (4, 3), "rng": (2,)}, [0, 2])
    content_groups = {"w": ((0, 2),), "rng": ((0,), (2,))}
    made = plan(catalog, replicated, None, content_groups, "rank")
    assert names_by_rank(made) == {0: ["w", "rng"]}


# ----------------------------------------------------------------- notes of target and source


def kinds(plan):
    return {note.code: note.text for note in plan.notes}


def test_a_name_that_only_the_target_lists_is_a_note():
    target = strategy_of({"w": TWO_ROWS, "new": TWO_ROWS})
    made = plan(slice_catalog(ONE_STAGE, {"w": (8, 3)}), ONE_STAGE, target)
    assert kinds(made) == {"absent": "in the target strategy only: 1 parameter (new)"}
    assert names_by_rank(made) == {0: ["w"], 1: ["w"]}


def test_splitting_tells_of_tensors_that_the_target_does_not_list_but_not_of_scalars():
    made = plan(
        catalog_of({0: {"w": (4, 3), "x": (4,), "step": ()}}), None, strategy_of({"w": TWO_ROWS})
    )
    assert kinds(made).keys() == {"undivided"}
    assert kinds(made)["undivided"].endswith("every rank: 1 parameter, 16 B (x)")


def test_merging_has_nothing_to_tell():
    assert not plan(slice_catalog(ONE_STAGE, {"w": (8, 3)}), ONE_STAGE).notes


# ---------------------------------------------------------------------------------- problems


CLAIMED = strategy_of({"w": SHARDED, "accu_grads.w": SHARDED})
HALVES = Layout((2,), ((), ()), 2)


@pytest.mark.parametrize(
    ("source", "rows", "cut_rows", "kind"),
    [
        (CLAIMED, 4, 8, "corrected"),  # not cut in the source, so neither in the target
        (CLAIMED, 2, 4, None),  # cut in both
        (strategy_of({"w": SHARDED, "accu_grads.w": ROWS}), 4, 4, "doubt"),  # nothing tells
        (None, 8, 4, "doubt"),
    ],
)
def test_gradients_are_cut_by_a_claimed_shard_unless_the_source_shows_that_it_is_not_true(
    source, rows, cut_rows, kind
):
    ranks = range(1 if source is None else 4)
    shapes = {"w": (8 if source is None else 2, 3), "accu_grads.w": (rows, 3)}
    target = strategy_of({"w": HALVES, "accu_grads.w": HALVES})
    made = plan(with_names(shapes, ranks), source, target)
    assert [
        [meta.shape for meta in output.metas if meta.name == "accu_grads.w"] for output in made
    ] == [[(cut_rows, 3)]] * 2
    told = [note.code for note in made.notes if "shard of the target strategy" in note.text]
    assert told == ([] if kind is None else [kind])


def test_a_parameter_that_the_target_cannot_cut_is_named_with_divisors_it_has():
    problems = problems_of(catalog_of({0: {"w": (8, 3)}}), None, strategy_of({"w": THREE_ROWS}))
    assert problems[0].splitlines() == [
        "src.ckpt: w: the target cannot shard this shape",
        "  axis 0 of (8, 3) is divisible by 2 or 4, not by 3",
        "  Try: a target with slices that divide the axes; `ckpttool help target` explains",
    ]


def test_many_parameters_that_the_target_cannot_cut_are_one_problem():
    shapes = {f"w{i}": (8, i % 5) for i in range(10)} | {"v": (6, 2)}
    target = strategy_of(dict.fromkeys(shapes, THREE_ROWS))
    (problem,) = problems_of(catalog_of({0: shapes}), None, target)
    text, facts, _ = problem.splitlines()
    assert text == "src.ckpt: w0, w1, w2 and 7 more: the target cannot shard this shape"
    assert facts.startswith("  w0 and 1 more: axis 0 of (8, 0) is divisible by 2 or 4, not by 3; ")
    assert facts.endswith("; 2 more; --json lists each")


def test_a_manual_split_that_does_not_make_the_rows_there_are_is_a_problem():
    target = strategy_of({"w": Layout((2,), ((0,), ()), rows=(6, 4))})
    problems = problems_of(catalog_of({0: {"w": (8, 3)}}), None, target)
    the_one(problems, "src.ckpt: w: ", "the manual split [6, 4] has 10 rows", "(8, 3) has 8")


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
    """Of two ways to fold it, (4, 32) and (8, 16), the source tells the one."""
    layout = Layout((2, 2, 4), ((0,), (1,), (2,)), full_shape=(4, 2, 16))
    for shape, folded in [((4, 32), ((0,), (1, 2))), ((8, 16), ((0, 1), (2,)))]:
        made = plan(catalog_of({0: {"w": shape}}), None, strategy_of({"w": layout}))
        assert made.transfers[0].layouts[0].tensor_map == folded
    problems = problems_of(catalog_of({0: {"w": (16, 8)}}), None, strategy_of({"w": layout}))
    the_one(problems, "src.ckpt: w: ", "tensor map", "is for 3 axes", "(16, 8)")


def test_an_expanded_layout_of_the_target_may_have_device_axes_that_cut_nothing():
    layout = Layout((4, 1), ((1,), (0,), ()), full_shape=(4, 1, 8))
    target = strategy_of({"w": layout})
    made = plan(catalog_of({0: {"w": (4, 8)}}), None, target)
    assert [output.metas[0].shape for output in made] == [(1, 8)] * 4
    layout = Layout((1, 4), ((0,), (1,), ()), full_shape=(4, 1, 8))
    made = plan(catalog_of({0: {"w": (4, 8)}}), None, strategy_of({"w": layout}))
    assert [output.metas[0].shape for output in made] == [(1, 8)] * 4


def test_every_stage_of_the_target_has_its_own_reason():
    target = strategy_of({"w": THREE_ROWS}, {"w": Layout((3,), ((), (0,)))})
    problems = problems_of(catalog_of({0: {"w": (8, 5)}}), None, target)
    the_one(problems, "w: the", "axis 0 of (8, 5) ", "; axis 1 of (8, 5) ")


def test_a_target_of_another_model_is_a_problem():
    target = strategy_of({"x": TWO_ROWS})
    the_one(
        problems_of(slice_catalog(ONE_STAGE, {"w": (8, 3)}), ONE_STAGE, target),
        "no parameter in common with the source",
        "lists x",
        "holds w",
    )


@pytest.mark.parametrize(("ranks", "words"), [([0, 2, 5], "ranks 2, 5"), ([-1, 0], "rank -1")])
def test_ranks_that_the_target_does_not_have_are_a_problem(ranks, words):
    problems = problems_of(
        catalog_of({0: {"w": (4, 3)}}), None, strategy_of({"w": TWO_ROWS}), ranks=ranks
    )
    the_one(problems, words, "not in the target, which has 2 ranks", "--rank with some of 0-1")


@pytest.mark.parametrize("strategy", [None, ONE_STAGE])
def test_a_source_without_parameters_is_a_problem(strategy):
    the_one(problems_of(with_names({}), strategy), "run: no tensor was found", "4 files, 0 bytes")


def test_all_problems_of_a_plan_are_in_one_error():
    strategy = strategy_of(dict.fromkeys(("dtype", "shape", "gone", "axes", "big"), ROWS))
    ranks = {
        rank: {"dtype": (4, 3), "shape": (4, 3), "axes": (4,), "big": (4, 3), "rng": (2,)}
        for rank in range(4)
    }
    for rank in (0, 1):
        ranks[rank]["gone"] = (4, 3)
    ranks[1]["dtype"] = ("Int32", (4, 3))
    ranks[3]["shape"] = (4, 4)
    target = strategy_of({"big": THREE_ROWS})
    problems = problems_of(
        catalog_of(ranks), strategy, target, {"rng": ((0, 1), (2, 3))}, ranks=[0, 7]
    )
    wanted = ["dtype: the element type", "shape: the slice shape",
              "axes: the slices", "rng: not in the strategy", "gone: some", "big: the target",
              "rank 7 is not in the target"]  # fmt: skip
    assert len(problems) == len(wanted), problems
    for words in wanted:
        assert any(words in problem for problem in problems), words


def test_damaged_files_are_reported_together_with_what_else_is_wrong():
    damage = {1: FormatError("run/rank_1/net.ckpt", 7, "cut short")}
    files = with_names({"w": (4, 3)}, [2, 3]).files
    with pytest.raises(CombinedError) as caught:
        plan(Catalog("run", files, damaged=damage), ONE_STAGE)
    assert caught.value.exit_code == 3
    assert [problem.split(":")[0] for problem in texts_of(caught.value)] == [
        "run/rank_1/net.ckpt",
        "w",
    ]
    with pytest.raises(CombinedError) as caught:
        plan(Catalog("run", files, damaged=damage), ONE_STAGE, strategy_of({"w": THREE_ROWS}))
    assert caught.value.exit_code == 3
    assert len(texts_of(caught.value)) == 2


def test_a_single_damaged_file_is_that_error_and_no_other():
    damage = {0: FormatError("run/rank_0/net.ckpt", 7, "cut short")}
    with pytest.raises(FormatError, match="cut short"):
        plan(Catalog("run", {}, damaged=damage), None, strategy_of({"w": TWO_ROWS}))


def test_differences_are_no_question_while_the_strategy_is_not_the_right_one():
    ranks = {rank: {"w": (4, 3), "rng": (2,)} for rank in range(6)}
    problems = problems_of(catalog_of(ranks), ONE_STAGE, None, {"rng": ((0, 1), (2, 3))})
    assert len(problems) == 1
    assert "ranks 4, 5 are not in the strategy" in problems[0]
