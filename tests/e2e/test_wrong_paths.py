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
def case(request, tmp_path, monkeypatch):
    """A checkpoint, its strategy and a target's, with a strategy of another model beside them."""
    monkeypatch.chdir(tmp_path)
    place = GOLDEN / request.param
    shutil.copytree(place / "src", "run")
    shutil.copyfile(place / "src_strategy.ckpt", "of_the_run.ckpt")
    shutil.copyfile(place / "dst_strategy.ckpt", "wanted.ckpt")
    shutil.copyfile(GOLDEN / "moe_ep4_mp2" / "src_strategy.ckpt", "strategies.ckpt")
    return tmp_path


def test_a_folder_of_one_rank_that_looks_merged_says_what_to_type(case):
    run_well("merge", "run", "-s", "of_the_run.ckpt", "-o", "out/rank_0/merged0.ckpt")
    said = "looks merged: its tensors have the full shapes of"
    result = run("diff", "run", "out", "-s", "of_the_run.ckpt")
    assert (result.exit_code, message(result).count("error[")) == (5, 1)
    assert f"B (out): {said} A" in message(result)
    assert hint_of(result) == "out/rank_0/merged0.ckpt in place of out"
    run_well("diff", "run", "out/rank_0/merged0.ckpt", "-s", "of_the_run.ckpt")
    result = run("diff", "out", "run", "--b-strategy", "of_the_run.ckpt")
    assert f"A (out): {said} B" in message(result)
    shutil.copytree("run/rank_0", "alone/rank_0")  # a rank of several is not merged
    assert "looks merged" not in message(run("diff", "run", "alone", "-s", "of_the_run.ckpt"))


@pytest.mark.parametrize("place", ["new.ckpt", "deep/er/new.ckpt"])
def test_no_command_writes_into_what_it_reads(case, place):
    words = ["run", "-s", "of_the_run.ckpt", "-o"]
    folder = place.removesuffix(".ckpt")
    (case / "link").symlink_to(case / "run")
    commands = [
        ["merge", *words, f"run/{place}"],
        ["merge", *words, f"link/{place}"],
        ["merge", *words, f"run/{folder}", "--max-shard-size", "1MB"],
        ["reshard", "run", "-s", "of_the_run.ckpt", "-d", "wanted.ckpt", "-o", f"run/{folder}"],
        ["convert", "run", "-o", f"run/{folder}"],
        ["average", "run", "run", *words[1:], f"run/{place}"],
    ]
    before = sorted(case.joinpath("run").rglob("*"))
    for command in commands:
        result = run(*command)
        assert result.exit_code == 5
        assert "inside the source folder run" in message(result)
        outside = hint_of(result).split()[-1]
        run_well(*(outside if word == command[command.index("-o") + 1] else word
                   for word in command), "--overwrite")  # fmt: skip
    assert sorted(case.joinpath("run").rglob("*")) == before
    run_well("merge", *words, "full", "--max-shard-size", "1MB")
    result = run("split", "full", "-d", "wanted.ckpt", "-o", f"full/{folder}")
    assert "inside the source folder full" in message(result)
    plot = run("inspect", "run", "-s", "of_the_run.ckpt", "--plot", "run/page.html")
    assert "inside the source folder run" in message(plot)


def test_checkpoints_far_below_are_counted_and_three_of_them_named(case):
    for number in range(5):
        shutil.copytree("run", f"jobs/2024/net/try_{number}")
    for folder in ("jobs", "jobs/2024"):
        result = run("merge", folder, "-s", "of_the_run.ckpt", "-o", "x.h5")
        assert "a folder of 5 checkpoints" in message(result)
        assert "net/try_0" in message(result)
        assert "net/try_2 and 2 more" in message(result)
        assert hint_of(result) == "jobs/2024/net/try_0 as SRC"


@pytest.mark.parametrize("saved", ["1.9.0_stages", "2.0.0_own_names"])
def test_saves_of_checkpoint_2_far_below_are_named(tmp_path, monkeypatch, saved):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(GOLDEN / "mindformers" / saved, "jobs/output/checkpoint/saved")
    for folder in ("jobs", "jobs/output", "jobs/output/checkpoint"):
        result = run("merge", folder, "-o", "x.h5")
        assert result.exit_code != 0
        assert hint_of(result) == "jobs/output/checkpoint/saved as SRC"
    run_well("inspect", "jobs/output/checkpoint/saved")


@pytest.mark.parametrize("name", ["m.h5", "all.safetensors"])
def test_one_merged_file_far_below_is_named(case, name):
    run_well("merge", "run", "-s", "of_the_run.ckpt", "-o", f"out/2024/best/{name}")
    for folder in ("out", "out/2024"):
        assert hint_of(run("inspect", folder)) == f"out/2024/best/{name} as SRC"


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


def test_shapes_are_to_be_checked_only_where_nothing_else_shows_them(case):
    asked = "Check the full shapes, which only the strategy shows: "

    def is_asked(*words):
        return asked in " ".join(run_well("merge", *words).stdout.split())

    of_run = ["run", "-s", "of_the_run.ckpt"]
    assert is_asked(*of_run, "-o", "a.h5")
    run_well("merge", *of_run, "--weights-only", "-o", "w.ckpt")
    run_well("split", "w.ckpt", "-d", "wanted.ckpt", "-o", "set")
    assert not is_asked("set", "-o", "c.h5")
    (case / "set" / "ckpttool.json").unlink()
    assert is_asked("set", "-s", "wanted.ckpt", "-o", "d.h5")


@pytest.mark.parametrize(
    ("name", "is_listed"), [("json_strategy", True), ("reshard_8_to_4", False)]
)
def test_json_confirms_shapes_and_states_that_are_sharded_alike_do_not(name, is_listed):
    """Both would be wrong in the same way."""
    (strategy,) = (GOLDEN / name).glob("src_strategy.*")
    found = ckpttool.resolve(ckpttool.scan(GOLDEN / name / "src"), ckpttool.read_strategy(strategy))
    assert found.states
    sharded = {one.name for one in found.tensors if one.is_sharded}
    assert sharded & found.confirmed_by([]) == (sharded if is_listed else set())
