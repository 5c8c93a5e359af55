"""Optimizer state that the strategy forgot, or says something false about."""

import json

import pytest

from ckpttool.model.names import match_states
from ckpttool.model.plan import Target
from ckpttool.model.tensors import TensorMeta
from ckpttool.strategy_files.writer import write_strategy
from tests.support.checkpoints import (
    ONE_STAGE,
    ROWS,
    cut,
    noise,
    strategy_of,
    write_ranks,
)
from tests.support.commands import run_well
from tests.support.in_memory import plan_in_memory
from tests.support.readers import Entry, read


def plan(catalog, strategy, target=None, **more):
    """The plan for all ranks of a target strategy, or for one file."""
    ranks = 1 if target is None else len(target.ranks)
    paths = {rank: f"out/rank_{rank}" for rank in range(ranks)}
    return plan_in_memory(catalog, strategy, Target("ckpt", paths, ranks, target), {}, **more)


# ----------------------------------------------------------------- which names are of states


def owners_in(listed, held):
    """What names tell, of tensors of the shapes ``held``."""
    return match_states(
        listed, {name: TensorMeta(name, "Float32", shape) for name, shape in held.items()}
    )


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
