"""Weights that the strategy of a source lists and that no file has: refused, with the way out."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

import ckpttool
from ckpttool.model.layout import Layout
from ckpttool.problems import PlanError
from tests.support.checkpoints import cut, noise, strategy_of, write_ranks
from tests.support.commands import message, run, run_well
from tests.support.readers import read, read_ranks

TWO = Layout((2,), ((0,), ()))
LAYERS = [f"model.layers.{i}.{name}.weight" for i in range(12) for name in ("wq", "wo", "w1")]
LORA = [f"{name}_lora_{letter}" for name in LAYERS[:6] for letter in "ab"]
MOMENTS = [f"adam_{letter}.{name}" for letter in "mv" for name in LAYERS]


def save(held, listed, more=()):
    """Write a checkpoint of two ranks and its strategy, and return its full tensors.

    ``more`` are single numbers that the strategy does not list.
    """
    strategy = strategy_of(dict.fromkeys(listed, TWO))
    ckpttool.write_strategy(strategy, "s.ckpt")
    tensors = {name: noise(name, "Float32", (4, 3)) for name in held}
    tensors |= {name: noise(name, "Int32", ()) for name in more}
    write_ranks(Path("run"), cut(tensors, strategy), "ckpt")
    return tensors


def exclude(*patterns):
    return [word for one in patterns for word in ("--exclude", one)]


def proposed(result):
    return shlex.split(message(result).partition("Try: ")[2].rpartition(", or ")[2])


@pytest.mark.parametrize(
    ("held", "listed", "words"),
    [
        (LAYERS[:9], LAYERS, exclude(*(f"model.layers.{i}.*" for i in range(3, 12)))),
        (LAYERS[::3], LAYERS, exclude("model.layers.*.wo.*", "model.layers.*.w1.*")),
        (LAYERS, [*LAYERS, "lm_head.weight"], exclude("lm_head.weight")),
        ([*LAYERS, "net.w"], [*LAYERS, "model.w", "b[0].w"], None),
        (LORA, LAYERS[:6] + LORA, ["--include", "*lora*"]),
    ],
)
def test_a_weight_in_no_file_is_an_error_until_it_is_left_out(held, listed, words):
    tensors, is_renamed = save(held, listed), words is None
    words = exclude("model.w", "b[0].w") if words is None else words
    for out, command in {"m.ckpt": ["merge"], "new": ["reshard", "-d", "s.ckpt"]}.items():
        line = [*command, "run", "-s", "s.ckpt", "-o", out, "--format", "ckpt", "--overwrite"]
        result = run(*line)
        assert result.exit_code == 5
        assert not Path(out).exists()
        if is_renamed:  # another weight is in no strategy: leaving out half of it is no way
            assert "error[renamed]: 2 weights are" in message(result)
            assert "--exclude" not in message(result)
        else:
            assert sorted(proposed(result)) == sorted(words)
        run_well(*line, *words)
    assert read(Path("m.ckpt")) == tensors
    with pytest.raises(PlanError, match="in the strategy and in no file"):
        ckpttool.open("run", "s.ckpt")
    option, pattern = words[0][2:], words[1::2]
    with ckpttool.open("run", "s.ckpt", **{option: pattern}) as opened:
        assert {*opened} == {*held}


def test_an_adapter_with_another_tensor_leaves_out_the_rest_by_name():
    tensors = save(LORA, LAYERS[:6] + LORA, ["global_step"])
    told = proposed(run("merge", "run", "-s", "s.ckpt", "-o", "m.ckpt"))
    assert sorted(told) == sorted(exclude(*(name.replace("0", "*") for name in LAYERS[:3])))
    run_well("merge", "run", "-s", "s.ckpt", "-o", "m.ckpt", *told)
    assert read(Path("m.ckpt")) == tensors


@pytest.mark.parametrize(
    ("held", "listed"),
    [
        (LAYERS, LAYERS + MOMENTS),
        (LAYERS + MOMENTS[:36], LAYERS + MOMENTS),
        (LAYERS, [*LAYERS, *(f"accu_grads.{name}" for name in LAYERS), "global_step"]),
        (LAYERS, [*LAYERS, "beta1_power", *(f"mine.{name}" for name in LAYERS)]),
    ],
)
def test_states_gradients_and_counters_may_be_missing(held, listed):
    tensors = save(held, listed)
    result = run_well("merge", "run", "-s", "s.ckpt", "-o", "m.ckpt", "--strict")
    assert f"note: {len(listed) - len(held)} parameters are in the strategy" in result.stderr
    assert read(Path("m.ckpt")) == tensors


@pytest.mark.parametrize("more", [["lm_head.weight"], MOMENTS])
def test_a_target_may_list_more_and_what_is_written_for_it_is_whole(more):
    tensors = save(LAYERS, LAYERS)
    ckpttool.write_strategy(strategy_of(dict.fromkeys([*LAYERS, *more], TWO)), "d.ckpt")
    run_well("reshard", "run", "-s", "s.ckpt", "-d", "d.ckpt", "-o", "new", "--format", "ckpt")
    assert all({*held} == {*LAYERS} for held in read_ranks(Path("new")).values())
    for words in ([], ["-s", "d.ckpt"]):
        run_well("merge", "new", *words, "-o", "m.ckpt", "--overwrite", "--strict")
        assert read(Path("m.ckpt")) == tensors
    if more != MOMENTS:
        Path("new", "ckpttool.json").unlink()
        assert run("merge", "new", "-s", "d.ckpt", "-o", "n.ckpt").exit_code == 5


@pytest.mark.parametrize("held", [LAYERS[:9], MOMENTS])
def test_verify_reports_it_unless_it_is_ignored_and_inspect_calls_it_incomplete(held):
    save(held, [*LAYERS, *(name for name in held if name not in LAYERS)])
    result = run("verify", "run", "-s", "s.ckpt", "--deep")
    assert result.exit_code == 1
    assert "warning[unsaved]" in result.stdout
    run_well("verify", "run", "-s", "s.ckpt", "--ignore", "unsaved")
    shown = run_well("inspect", "run", "-s", "s.ckpt").stdout
    assert re.search(r"complete +no", shown)


def test_weights_that_a_save_without_redundancy_left_out_have_the_same_way_out():
    whole = Layout((2,), ((), ()))
    ckpttool.write_strategy(strategy_of(dict.fromkeys(["a", "b", "frozen"], whole)), "s.ckpt")
    tensors = {name: noise(name, "Float32", (4, 3)) for name in "ab"}
    ranks = {rank: {name: tensors[name]} for rank, name in enumerate("ab")}
    write_ranks(Path("run"), ranks, "ckpt")
    told = proposed(run("merge", "run", "-s", "s.ckpt", "-o", "m.ckpt"))
    assert told == exclude("frozen")
    run_well("merge", "run", "-s", "s.ckpt", "-o", "m.ckpt", *told)
    assert read(Path("m.ckpt")) == tensors
