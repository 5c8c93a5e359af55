"""Paths that are not what was meant: what is said of them, and what to type in place of them."""

from __future__ import annotations

import re
import shutil

import pytest

import ckpttool
from tests.support.commands import message, run, run_well
from tests.support.corpus import GOLDEN
from tests.support.terminals import on_terminal


def hint_of(result) -> str:
    return message(result).rpartition("Try: ")[2]


@pytest.fixture(params=["tutorial_8_to_4_infer", "reshard_8_to_6"])
def case(request, tmp_path):
    place = GOLDEN / request.param
    shutil.copytree(place / "src", "run")
    shutil.copyfile(place / "src_strategy.ckpt", "of_the_run.ckpt")
    shutil.copyfile(place / "dst_strategy.ckpt", "wanted.ckpt")
    shutil.copyfile(GOLDEN / "moe_ep4_mp2" / "src_strategy.ckpt", "strategies.ckpt")
    return tmp_path


def test_the_root_of_a_cache_of_hugging_face_becomes_a_snapshot(case):
    snapshot = "cache/hub/models--a--b/snapshots/0f1e2d"
    words = ["merge", "run", "-s", "of_the_run.ckpt", "-o", snapshot]
    run_well(*words, "--max-shard-size", "8KB")
    for root in ("cache", "cache/hub", "cache/hub/models--a--b"):
        result = run("inspect", root)
        assert hint_of(result) == f"{snapshot} as SRC"
    run_well("inspect", snapshot)


@pytest.mark.parametrize("lost", [[], [3, 7], range(1, 8)])
def test_what_is_not_complete_has_a_color(case, lost):
    words = ["inspect", "run", "-s", "of_the_run.ckpt"]
    unknown, _ = on_terminal(*words[:2], raw=True)
    assert re.search("complete[^y]*\x1b\\[33m *not known", unknown)
    for rank in lost:
        shutil.rmtree(f"run/rank_{rank}")
    shown, _ = on_terminal(*words, raw=True)
    is_complete = "complete\x1b[0m      yes" in shown
    assert is_complete != bool(re.search("\x1b\\[31m *no:", shown))


@pytest.mark.parametrize(
    ("name", "is_listed"), [("json_strategy", True), ("reshard_8_to_4", False)]
)
def test_json_confirms_shapes_and_states_that_are_sharded_alike_do_not(name, is_listed):
    (strategy,) = (GOLDEN / name).glob("src_strategy.*")
    found = ckpttool.resolve(ckpttool.scan(GOLDEN / name / "src"), ckpttool.read_strategy(strategy))
    assert found.states
    sharded = {one.name for one in found.tensors if one.is_sharded}
    assert sharded & found.confirmed_by([]) == (sharded if is_listed else set())
