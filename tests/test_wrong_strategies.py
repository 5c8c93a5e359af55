"""A wrong strategy is refused or warned about; `scripts/sweep_strategies.py` tries all of them."""

import pytest

import ckpttool
from ckpttool.model.layout import Layout
from ckpttool.model.strategy import join_stages
from scripts.sweep_strategies import sweep
from tests.checkpoints import ROWS, SHARDED, WHOLE, cut, noise, write_ranks
from tests.commands import message, run
from tests.corpus import GOLDEN

COLUMNS = Layout((2, 2), ((), (1,)))
BOTH = Layout((2, 2), ((1,), (0,)))
EXCHANGED = Layout((2, 2), ((0,), (1,)))


def plan(folder, true, claimed, shape=(32, 32), **options):
    """Merge what ``true`` layouts cut, by those that are claimed."""
    entries = {name: noise(name, "Float32", shape) for name in true}
    ranks = cut(entries, join_stages({0: true}))
    catalog = ckpttool.scan(str(write_ranks(folder / "src", ranks, "ckpt")))
    strategy = join_stages({0: claimed})
    return ckpttool.plan_merge(catalog, strategy, str(folder / "m.ckpt"), **options)


@pytest.mark.parametrize("claimed", [COLUMNS, WHOLE, BOTH])
def test_a_parameter_and_its_state_of_other_full_shapes_are_refused(tmp_path, claimed):
    layouts = {"w": ROWS, "adam_m.w": ROWS, "adam_v.w": ROWS}
    said = r"the strategy shards a parameter and its optimizer state differently, so that their "
    said += r"full shapes differ: w \(.*\) and adam_m.w \(32, 32\), w .* adam_v.w .*--trust-strate"
    with pytest.raises(ckpttool.PlanError, match=said):
        plan(tmp_path, layouts, {**layouts, "w": claimed})
    plan(tmp_path, layouts, {**layouts, "w": claimed}, trust_strategy=True)


def test_a_parameter_and_its_state_of_one_full_shape_are_warned_about(tmp_path):
    layouts = {"w": BOTH, "adam_m.w": BOTH}
    made = plan(tmp_path, layouts, {**layouts, "adam_m.w": EXCHANGED})
    (warning,) = [note.text for note in made.notes if note.is_warning]
    assert warning.startswith(
        "the strategy shards a parameter and its optimizer state differently: w and adam_m.w;"
    )


def test_a_parameter_and_its_state_may_differ_in_their_optimizer_shard(tmp_path):
    layouts = {"w": SHARDED, "accu_grads.w": ROWS}
    made = plan(tmp_path, layouts, layouts)
    assert not [note for note in made.notes if note.is_warning]


def test_verify_finds_them_by_headers_alone(tmp_path):
    case = GOLDEN / "moe_ep4_mp2"
    strategy = ckpttool.read_strategy([str(case / "src_strategy.ckpt")])
    name = next(name for name in strategy.layouts if f"adam_m.{name}" in strategy.layouts)
    layouts = {n: of[0] for n, of in strategy.layouts.items()}
    layouts[name] = Layout(layouts[name].device_matrix, ((),) * len(layouts[name].tensor_map))
    ckpttool.write_strategy(join_stages({0: layouts}), str(tmp_path / "s.ckpt"))
    result = run("verify", case / "src", "-s", tmp_path / "s.ckpt")
    assert result.exit_code == 1
    assert f"so that their full shapes differ: {name} " in message(result)


def test_slices_that_are_equal_in_most_sharded_tensors_are_refused(tmp_path):
    true = {"a": COLUMNS, "b": COLUMNS, "c": ROWS}
    claimed = {"a": BOTH, "b": BOTH, "c": ROWS}
    said = r"the strategy shards 3 sampled tensors whose slices should differ, and 2 have equal "
    said += r"slices \(ranks 0, 1; ranks 2, 3\): a, b; is it the strategy of this run"
    with pytest.raises(ckpttool.PlanError, match=said):
        plan(tmp_path, true, claimed)
    plan(tmp_path, true, claimed, trust_strategy=True)


def test_slices_that_are_equal_in_few_tensors_are_warned_about(tmp_path):
    true = {"a": COLUMNS, "b": ROWS, "c": ROWS}
    made = plan(tmp_path, true, {**true, "a": BOTH})
    (warning,) = [note.text for note in made.notes if note.is_warning]
    assert warning.startswith("ranks 0, 1; ranks 2, 3 hold the same where the strategy cuts")


def test_hidden_optimizer_shards_of_two_sizes_explain_nothing(tmp_path):
    grid = (8,)
    whole = Layout(grid, ((), ()))
    true = {"a": Layout(grid, ((), ()), 4), "b": Layout(grid, ((), ()), 8)}
    with pytest.raises(
        ckpttool.PlanError, match=r"and they differ.*is it the strategy of this run"
    ):
        plan(tmp_path, true, dict.fromkeys(true, whole))


def test_a_strategy_hides_all_optimizer_shards_or_none(tmp_path):
    grid = (8,)
    true = {"a": Layout(grid, ((), ()), 8), "b": Layout(grid, ((), ()), 8)}
    plan(tmp_path, true, dict.fromkeys(true, Layout(grid, ((), ()))))
    with pytest.raises(ckpttool.PlanError, match=r"b: the strategy says .* and they differ"):
        plan(tmp_path / "listed", true, {**true, "b": Layout(grid, ((), ()))})


def test_ranks_that_hold_other_stages_layers_are_refused(tmp_path):
    true = dict.fromkeys("abc", Layout((4,), ((0,), ())))
    entries = {name: noise(name, "Float32", (8, 4)) for name in true}
    ranks = cut(entries, join_stages({0: true}))
    catalog = ckpttool.scan(str(write_ranks(tmp_path / "src", ranks, "ckpt")))
    half = Layout((2,), ((0,), ()))
    stages = join_stages({0: {"a": half, "b": half}, 1: {"c": half}})
    said = "ranks 2, 3 hold 2 parameters that the strategy lists for other stages only, and 1 that "
    with pytest.raises(ckpttool.PlanError, match=said):
        ckpttool.plan_merge(catalog, stages, str(tmp_path / "m.ckpt"))


SAMPLE = [
    "moe_ep4_mp2",  # both axes sharded, experts
    "moe_ep8_to_4_optshard",
    "layout_multi_axis",
    "tp_conv_4d",
    "pipeline_shared_embedding",
    "tp_strategy_16_to_8",  # no optimizer state: much is open
]


@pytest.mark.parametrize("case", SAMPLE)
def test_no_wrong_strategy_makes_other_tensors_without_a_warning(case, capsys):
    counts = sweep(GOLDEN, [case])
    assert not capsys.readouterr().out  # which names what went wrong
    assert counts["edit refused"]
    with_states = case != "tp_strategy_16_to_8"
    assert with_states or counts["edit open"]
    assert not with_states or not counts["edit open"]
