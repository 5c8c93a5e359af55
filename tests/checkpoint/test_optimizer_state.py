"""Optimizer state that the strategy forgot, or says something false about."""

import json
from dataclasses import replace

import pytest

from ckpttool.checkpoint.optimizer_state import (
    copy_manual_split,
    followed_parameter,
)
from ckpttool.model.layout import Layout
from ckpttool.model.names import match_states
from ckpttool.model.plan import Target
from ckpttool.model.tensors import TensorMeta
from ckpttool.strategy_files.writer import write_strategy
from tests.support.checkpoints import (
    ONE_STAGE,
    ROWS,
    SHARDED,
    WHOLE,
    catalog_of,
    cut,
    noise,
    slice_catalog,
    strategy_of,
    the_one,
    with_names,
    write_ranks,
)
from tests.support.commands import run_well
from tests.support.in_memory import find, plan_in_memory
from tests.support.readers import Entry, read

TARGET = strategy_of({"w": Layout((2,), ((0,), ()))})


def plan(catalog, strategy, target=None, **more):
    """The plan for all ranks of a target strategy, or for one file."""
    ranks = 1 if target is None else len(target.ranks)
    paths = {rank: f"out/rank_{rank}" for rank in range(ranks)}
    return plan_in_memory(catalog, strategy, Target("ckpt", paths, ranks, target), {}, **more)


def output_shapes(plan):
    """Shapes by name, a list over the ranks."""
    shapes = {}
    for output in plan:
        for meta in output.metas:
            shapes.setdefault(meta.name, []).append(meta.shape)
    return shapes


def test_unlisted_state_follows_its_parameter_in_source_and_target_with_a_note():
    catalog = with_names({"w": (4, 3), "adam_m.w": (4, 3)})
    found, problems, notes = find(catalog)
    (source,) = found["adam_m.w"]
    assert not problems
    assert (source.parameter, source.is_listed, source.meta.shape) == ("w", False, (8, 3))
    text = "1 optimizer state is sharded like the parameter\n  not in the strategy: adam_m.w (as w)"
    assert notes == {"follows": [text]}
    made = plan(catalog, ONE_STAGE, TARGET)
    assert output_shapes(made) == {"w": [(4, 3)] * 2, "adam_m.w": [(4, 3)] * 2}


def test_state_that_the_target_lists_has_the_layout_of_the_target():
    catalog = with_names({"w": (4, 6), "adam_m.w": (4, 6)})
    columns = Layout((2,), ((), (0,)))
    target = strategy_of({"w": Layout((2,), ((0,), ())), "adam_m.w": columns})
    assert output_shapes(plan(catalog, ONE_STAGE, target))["adam_m.w"] == [(8, 3)] * 2


@pytest.mark.parametrize("shape", [(8, 3), (4, 3, 1), (4,), ()])
def test_state_of_another_slice_shape_does_not_follow(shape):
    catalog = with_names({"w": (4, 3), "adam_m.w": shape})
    content_groups = {"adam_m.w": ((0, 1, 2, 3),)}
    found, problems, notes = find(catalog, content_groups=content_groups)
    assert not problems
    assert "follows" not in notes
    assert (found["adam_m.w"][0].parameter, found["adam_m.w"][0].meta.shape) == (None, shape)


def test_state_that_is_neither_a_slice_nor_whole_is_a_question():
    """Zeros are equal on all ranks, be they slices or not."""
    catalog = with_names({"w": (4, 3), "accu_grads.w": (2, 3)})
    content_groups = {"accu_grads.w": ((0, 1, 2, 3),)}
    _, problems, _ = find(catalog, content_groups=content_groups)
    the_one(problems, "accu_grads.w: not in", "accu_grads.w (2, 3), w (8, 3) in slices (4, 3)")
    found, problems, notes = find(catalog, content_groups=content_groups, unlisted="first")
    assert not problems
    assert found["accu_grads.w"][0].meta.shape == (2, 3)
    assert "decided" in notes
    assert "accu_grads.w" not in find(catalog, content_groups=content_groups, unlisted="drop")[0]


def test_state_does_not_follow_if_one_rank_has_another_shape():
    ranks = {rank: {"w": (4, 3), "adam_m.w": (4, 3)} for rank in range(4)}
    ranks[3]["adam_m.w"] = (8, 3)
    _, problems, _ = find(catalog_of(ranks))
    the_one(problems, "adam_m.w: not in the strategy", "rank 3 differs from ranks 0-2")


def test_state_follows_where_its_parameter_is_kept_by_other_ranks():
    """Without redundancy the slices of a parameter and of its state are on different ranks."""
    catalog = catalog_of(
        {0: {"w": (4, 3)}, 1: {"accum.w": (4, 3)}, 2: {"accum.w": (4, 3)}, 3: {"w": (4, 3)}}
    )
    found, problems, _ = find(catalog)
    assert not problems
    assert found["accum.w"][0].parameter == "w"
    assert found["accum.w"][0].slicing.find_slice((0, 0))[1].file.path == "run/rank_1/net.ckpt"


def test_state_in_another_stage_than_its_parameter_does_not_follow():
    strategy = strategy_of({"w": ROWS}, {"b": ROWS})
    ranks = {rank: {"w": (4, 3)} for rank in range(4)}
    ranks |= {rank: {"b": (4, 3), "adam_m.w": (4, 3)} for rank in range(4, 8)}
    catalog = catalog_of(ranks)
    owners = match_states(strategy.layouts, catalog.metas)
    assert followed_parameter(catalog, strategy, "adam_m.w", range(4, 8), owners) is None


def test_a_name_that_is_only_a_prefix_follows_nothing():
    strategy = strategy_of({"": ROWS, "w": ROWS})
    found, problems, _ = find(
        with_names({"": (4, 3), "w": (4, 3), "adam_m.": (4, 3)}),
        strategy,
        {"adam_m.": ((0, 1, 2, 3),)},
    )
    assert not problems
    assert found["adam_m."][0].parameter is None


def test_state_that_the_source_lists_and_the_target_does_not_follows_with_a_note():
    strategy = strategy_of({"w": ROWS, "adam_m.w": ROWS})
    made = plan(slice_catalog(strategy, {"w": (8, 3), "adam_m.w": (8, 3)}), strategy, TARGET)
    assert output_shapes(made)["adam_m.w"] == [(4, 3)] * 2
    assert [(note.code, "adam_m.w" in note.text) for note in made.notes] == [("follows", True)]


def test_state_that_follows_in_the_source_and_has_nothing_to_follow_in_the_target_is_told():
    strategy = strategy_of({"w": ROWS, "b": WHOLE})
    shapes = {"w": (4, 3), "b": (8, 3), "adam_m.w": (4, 3)}
    made = plan(with_names(shapes), strategy, strategy_of({"b": Layout((2,), ((), ()))}))
    assert output_shapes(made)["adam_m.w"] == [(8, 3)] * 2
    (note,) = [note for note in made.notes if note.code == "undivided"]
    assert "2 parameters" in note.text
    assert "adam_m.w" in note.text


# ----------------------------------------------------------------- which names are of states

FRESH = ("mine", "linear", "mean_grad", "exp_inf", "ax_")  # one that no list can have, and four
SHARED = ((0, 1), (2, 3))  # as ``ROWS`` cuts


def owners_in(listed, held):
    """What names tell, of tensors of the shapes ``held``."""
    return match_states(
        listed, {name: TensorMeta(name, "Float32", shape) for name, shape in held.items()}
    )


@pytest.mark.parametrize("prefix", FRESH)
def test_state_of_any_optimizer_follows_in_source_and_target(prefix):
    state = f"{prefix}.w"
    catalog = with_names({"w": (4, 3), state: (4, 3)})
    found, problems, notes = find(catalog, content_groups={state: SHARED})
    assert not problems
    assert (found[state][0].parameter, found[state][0].layout) == ("w", ROWS)
    assert list(notes) == ["follows"]
    assert output_shapes(plan(catalog, ONE_STAGE, TARGET))[state] == [(4, 3)] * 2


@pytest.mark.parametrize("prefix", FRESH)
def test_state_of_any_optimizer_has_the_manual_split_of_its_parameter(prefix):
    state = f"{prefix}.t"
    for listed in ({"t": BY_HAND}, {"t": BY_HAND, state: EVEN}):
        found, problems, _ = find(table_catalog({state: SLICES}), strategy_of(listed))
        assert not problems
        assert (found[state][0].layout, found[state][0].meta.shape) == (BY_HAND, (10, 3))
    target = strategy_of({"t": BY_HAND, state: EVEN})
    full = catalog_of({0: {"t": (10, 3), state: (10, 3)}})
    shapes = output_shapes(plan(full, None, target))
    assert shapes[state] == shapes["t"] == [(6, 3), (6, 3), (4, 3), (4, 3)]


def test_every_name_of_a_prefix_is_of_a_parameter_or_the_prefix_is_that_of_a_module():
    shapes = {"w": (4, 3), "b": (4,)}
    mine = {"mine.w": (4, 3), "mine.b": (4,), "mine.step": (), "mine.count": (1,)}
    assert owners_in(shapes, shapes | mine) == {"mine.w": "w", "mine.b": "b"}
    module = {"decoder.w": (4, 3), "decoder.norm": (7,)}
    assert owners_in(shapes, shapes | module) == {}
    assert owners_in([*shapes, "decoder.norm"], shapes | {"decoder.w": (4, 3)}) == {}
    assert owners_in(shapes, shapes | {"0.w": (4, 3)}) == {}
    assert owners_in(shapes, shapes | {"a.mine.w": (4, 3)}) == {}


def test_a_prefix_of_mindspore_is_that_of_a_module_only_if_the_strategy_says_so():
    """Of a state whose parameter is gone: the others are states all the same."""
    shapes = {"w": (4, 3), "moments.w": (4, 3), "moments.old": (4, 3)}
    assert owners_in(["w"], shapes) == {"moments.w": "w"}
    assert owners_in(["w", "moments.old"], shapes) == {}


def test_a_module_may_be_called_like_the_prefix_of_its_states():
    """A net with a module ``linear``, trained with FTRL."""
    names = ["linear.weight", "linear.bias", "w"]
    states = [f"linear.{name}" for name in names]
    assert owners_in([*names, *states], {}) == dict(zip(states, names, strict=True))
    assert owners_in(names, dict.fromkeys([*names, *states], (4, 3))) == dict(
        zip(states, names, strict=True)
    )


def test_a_state_of_a_state_belongs_to_the_nearest_that_is_listed():
    names = {"w": (4, 3), "ema.w": (4, 3), "adam_m.ema.w": (4, 3)}
    assert owners_in(["w"], names) == {"ema.w": "w", "adam_m.ema.w": "w"}
    assert owners_in(["w", "ema.w"], names) == {"ema.w": "w", "adam_m.ema.w": "ema.w"}
    found, problems, _ = find(with_names(names), content_groups={"ema.w": SHARED})
    assert not problems
    assert [found[name][0].layout for name in names] == [ROWS] * 3


def test_a_name_with_a_listed_tail_and_other_slices_is_no_state():
    catalog = with_names({"w": (4, 3), "mine.w": (3, 4)})
    found, problems, _ = find(catalog, content_groups={"mine.w": ((0, 1, 2, 3),)})
    assert not problems
    assert (found["mine.w"][0].parameter, found["mine.w"][0].meta.shape) == (None, (3, 4))
    _, problems, _ = find(catalog, content_groups={"mine.w": SHARED})
    the_one(problems, "mine.w: not in the strategy, and different between ranks")


def test_what_is_the_same_on_all_ranks_is_no_state_of_a_parameter_that_is_cut():
    catalog = with_names({"w": (4, 3), "decoder.w": (4, 3)})
    found, problems, _ = find(catalog, content_groups={"decoder.w": ((0, 1, 2, 3),)})
    assert not problems
    assert (found["decoder.w"][0].parameter, found["decoder.w"][0].meta.shape) == (None, (4, 3))


@pytest.mark.parametrize("groups", [((0, 2), (1, 3)), ((0,), (1, 2, 3)), ((0, 1), (2,), (3,))])
def test_what_differs_where_a_state_would_not_is_no_state(groups):
    catalog = with_names({"w": (4, 3), "decoder.w": (4, 3)})
    _, problems, _ = find(catalog, content_groups={"decoder.w": groups})
    the_one(problems, "decoder.w: not in the strategy, and different between ranks")


@pytest.mark.parametrize("prefix", ["mine", "adam_m"])
@pytest.mark.parametrize("states", [1, 2])
def test_states_of_few_parameters_under_an_unknown_prefix_are_warned_about(prefix, states):
    """A frozen module that happens to have the names of listed parameters, say."""
    names = ["w", "x", "y"]
    strategy = strategy_of(dict.fromkeys(names, ROWS))
    held = [*names, *(f"{prefix}.{name}" for name in names[:states])]
    content_groups = {f"{prefix}.{name}": SHARED for name in names[:states]}
    _, problems, notes = find(with_names(dict.fromkeys(held, (4, 3))), strategy, content_groups)
    assert not problems
    warned = notes.get("guessed", [])
    if prefix == "adam_m" or states == 2:
        assert not warned
    else:
        the_one(warned, "1 tensor is taken for optimizer state by name and", "\n  mine.w (as w)\n")


@pytest.mark.parametrize("constant", [False, True])
def test_contents_tell_a_parameter_from_a_state(tmp_path, constant):
    """Slices of zeros, as training begins with, tell nothing, so the shape decides."""
    full = {"w": noise("w", "Float32", (8, 3)), "mine.w": noise("s", "Float32", (8, 3))}
    if constant:
        full["mine.w"] = Entry("Float32", (8, 3), bytes(96))
    ranks = cut(full, strategy_of({"w": ROWS, "mine.w": ROWS}))
    whole = noise("d", "Float32", (4, 3))
    for rank, held in ranks.items():
        ranks[rank] = held | {"twin.w": whole}
    folder = write_ranks(tmp_path / "run", ranks, "ckpt")
    write_strategy(ONE_STAGE, str(tmp_path / "src.ckpt"))
    out = tmp_path / "out.ckpt"
    run_well("merge", folder, "-s", tmp_path / "src.ckpt", "-o", out)
    merged = read(out)
    assert merged["mine.w"].data == full["mine.w"].data
    assert merged["mine.w"].shape == (8, 3)
    assert (merged["twin.w"].shape, merged["twin.w"].data) == ((4, 3), whole.data)
    words = [folder, "-s", tmp_path / "src.ckpt", "--json"]
    shown = json.loads(run_well("inspect", *words).stdout)["tensors"]
    shapes = {one["name"]: tuple(one["shape"]) for one in shown}
    assert shapes == {name: entry.shape for name, entry in merged.items()}
    assert json.loads(run_well("verify", *words, "--deep", "--ignore", "zero").stdout)["clean"]


# ------------------------------------------------------------------------------- accu_grads

CLAIMED = strategy_of({"w": SHARDED, "accu_grads.w": SHARDED})
NOT_CUT = {"w": (2, 3), "accu_grads.w": (4, 3)}


def test_an_optimizer_shard_that_the_slices_of_a_state_do_not_have_is_corrected_with_a_note():
    found, problems, notes = find(with_names(NOT_CUT), CLAIMED)
    assert not problems
    assert found["w"][0].layout == SHARDED
    assert (found["accu_grads.w"][0].layout, found["accu_grads.w"][0].meta.shape) == (ROWS, (8, 3))
    assert found["accu_grads.w"][0].is_listed
    (text,) = notes["corrected"]
    assert "accu_grads.w" in text


def test_a_shard_that_the_slices_do_have_is_left():
    found, problems, notes = find(with_names({"w": (2, 3), "accu_grads.w": (2, 3)}), CLAIMED)
    assert not problems
    assert not notes
    assert found["accu_grads.w"][0].layout == SHARDED


def test_a_corrected_layout_agrees_with_the_full_shape_of_the_strategy():
    told = Layout((2, 2), ((1,), ()), 2, full_shape=(8, 3))
    found, problems, _ = find(with_names(NOT_CUT), strategy_of({"w": told, "accu_grads.w": told}))
    assert not problems
    assert found["accu_grads.w"][0].meta.shape == (8, 3)


def test_a_corrected_layout_needs_no_more_slices_than_there_are():
    """One replica of each slice is enough, whichever part of the shard it would have held."""
    ranks = {rank: dict(NOT_CUT) for rank in range(4)}
    del ranks[0]["accu_grads.w"], ranks[3]["accu_grads.w"]
    found, problems, _ = find(catalog_of(ranks), CLAIMED)
    assert not problems
    assert found["accu_grads.w"][0].slicing.find_slice((0, 0))[1].file.path == "run/rank_1/net.ckpt"


def test_a_state_that_fits_neither_with_nor_without_the_shard_is_left_as_it_is():
    found, problems, notes = find(with_names({"w": (2, 3), "accu_grads.w": (6, 3)}), CLAIMED)
    assert not problems
    the_one(notes.pop("doubt"), "accu_grads.w (24, 3), expected (8, 3)")
    assert not notes
    assert found["accu_grads.w"][0].meta.shape == (24, 3)


def test_a_state_without_its_parameter_cannot_be_corrected():
    found, _, notes = find(with_names({"accu_grads.w": (4, 3)}), CLAIMED)
    assert "corrected" not in notes
    assert found["accu_grads.w"][0].layout == SHARDED


def test_a_shard_is_corrected_in_every_stage_that_shares_the_parameter():
    strategy = strategy_of(*[{"w": SHARDED, "accu_grads.w": SHARDED}] * 2)
    found, problems, notes = find(with_names(NOT_CUT, range(8)), strategy)
    assert not problems
    assert found["accu_grads.w"][0].layout == ROWS
    assert len(notes["corrected"]) == 1


# ----------------------------------------------------------------------- manual splits of rows

BY_HAND = Layout((2, 2), ((1,), ()), rows=(6, 4))
EVEN = Layout((2, 2), ((1,), ()))
SLICES = {0: (6, 3), 1: (6, 3), 2: (4, 3), 3: (4, 3)}


def table_catalog(states, table=SLICES):
    """A table and state of it, rank to shape each."""
    return catalog_of(
        {
            rank: {"t": table[rank]} | {name: held[rank] for name, held in states.items()}
            for rank in table
        }
    )


def test_listed_state_without_rows_has_those_of_its_parameter_in_the_source_with_a_note():
    strategy = strategy_of({"t": BY_HAND, "adam_m.t": EVEN, "accum.t": EVEN})
    found, problems, notes = find(table_catalog({"adam_m.t": SLICES, "accum.t": SLICES}), strategy)
    assert not problems
    for name in ("t", "adam_m.t", "accum.t"):
        assert (found[name][0].layout, found[name][0].meta.shape) == (BY_HAND, (10, 3))
    the_one(notes["corrected"], "2 parameters are sharded as shapes show", "\n  adam_m.t, accum.t")


def test_unlisted_state_follows_a_parameter_that_is_split_by_hand():
    found, problems, notes = find(table_catalog({"adam_m.t": SLICES}), strategy_of({"t": BY_HAND}))
    assert not problems
    assert (found["adam_m.t"][0].parameter, found["adam_m.t"][0].meta.shape) == ("t", (10, 3))
    assert list(notes) == ["follows"]


def test_unlisted_state_with_equal_rows_does_not_follow_a_parameter_that_is_split_by_hand():
    catalog = table_catalog({"adam_m.t": dict.fromkeys(range(4), (6, 3))})
    found, problems, _ = find(catalog, strategy_of({"t": BY_HAND}), {"adam_m.t": ((0, 1, 2, 3),)})
    assert "adam_m.t" not in found
    the_one(problems, "adam_m.t", "adam_m.t (6, 3), t (10, 3) in slices (6, 3)")


def test_state_whose_slices_have_equal_rows_is_not_given_those_of_its_parameter():
    catalog = table_catalog({"adam_m.t": dict.fromkeys(range(4), (5, 3))})
    found, problems, notes = find(catalog, strategy_of({"t": BY_HAND, "adam_m.t": EVEN}))
    assert not problems
    assert not notes
    assert (found["adam_m.t"][0].layout, found["adam_m.t"][0].meta.shape) == (EVEN, (10, 3))


def test_state_with_neither_the_rows_nor_equal_slices_is_a_problem():
    odd = {**SLICES, 3: (5, 3)}
    strategy = strategy_of({"t": BY_HAND, "adam_m.t": EVEN})
    _, problems, _ = find(table_catalog({"adam_m.t": odd}), strategy)
    the_one(
        problems, "adam_m.t: the slice shape differs", "rank 3 (run/rank_3/net.ckpt) has (5, 3)"
    )


@pytest.mark.parametrize("rows", [(), (6, 4)])
def test_state_of_a_manual_split_without_its_parameters_shard_is_corrected(rows):
    shard = Layout((2, 2), ((1,), ()), 2, rows=(6, 4))
    table = {0: (3, 3), 1: (3, 3), 2: (2, 3), 3: (2, 3)}
    claimed = Layout((2, 2), ((1,), ()), 2, rows=rows)
    strategy = strategy_of({"t": shard, "accu_grads.t": claimed, "accum.t": claimed})
    catalog = table_catalog({"accu_grads.t": SLICES, "accum.t": table}, table)
    found, problems, notes = find(catalog, strategy)
    assert not problems
    assert found["t"][0].layout == found["accum.t"][0].layout == shard
    assert found["accu_grads.t"][0].layout == BY_HAND
    the_one(notes["corrected"], "accu_grads.t")


def test_a_shard_that_cannot_cut_the_rows_is_told_and_not_fallen_over():
    claimed = Layout((2, 2), ((1,), ()), 2)
    strategy = strategy_of({"t": replace(BY_HAND, rows=(7, 3)), "accum.t": claimed})
    table = {0: (7, 3), 1: (7, 3), 2: (3, 3), 3: (3, 3)}
    found, problems, _ = find(table_catalog({"accum.t": table}, table), strategy)
    assert not problems
    assert found["accum.t"][0].layout == replace(BY_HAND, rows=(7, 3))
    strategy = strategy_of({"t": replace(claimed, rows=(7, 3))})
    problems = find(table_catalog({"accum.t": table}, table), strategy)[1]
    assert [problem.split(":")[0] for problem in problems] == ["t", "accum.t"]
    assert "slices of [7, 3] rows are not divisible by 2" in problems[0]


def test_rows_are_borrowed_in_the_stage_and_for_the_cut_that_the_parameter_has():
    across = Layout((2, 2), ((0,), ()))
    strategy = strategy_of(
        {"t": BY_HAND, "accum.t": EVEN}, {"t": replace(BY_HAND, rows=(3, 7)), "accum.t": EVEN}
    )
    held, twins = strategy.layouts["accum.t"], strategy.layouts["t"]
    assert [layout.rows for layout in copy_manual_split(held, twins)] == [(6, 4), (3, 7)]
    assert copy_manual_split(held[:1], twins[1:]) == held[:1]
    assert copy_manual_split((across,), twins) == (across,)
    own = replace(EVEN, rows=(1, 9))
    assert copy_manual_split((own,), twins) == (own,)
    fields = replace(EVEN, fields=2)
    assert copy_manual_split((fields,), twins) == (fields,)


@pytest.mark.parametrize("names", [["t", "adam_m.t"], ["t"]], ids=["listed", "unlisted"])
def test_state_without_rows_has_those_of_its_parameter_in_the_target(names):
    source = strategy_of(dict.fromkeys(names, EVEN))
    catalog = with_names({"t": (5, 3), "adam_m.t": (5, 3)})
    target = strategy_of({"t": Layout((3,), ((0,), ()), rows=(5, 1, 4))})
    if "adam_m.t" in names:
        target = strategy_of({"t": target.layouts["t"][0], "adam_m.t": Layout((3,), ((0,), ()))})
    made = plan(catalog, source, target)
    assert {note.code for note in made.notes} <= {"follows"}
    shapes = output_shapes(made)
    assert shapes["t"] == shapes["adam_m.t"] == [(5, 3), (1, 3), (4, 3)]
