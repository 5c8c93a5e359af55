"""``ckpttool strategy``: the group, and what its commands print."""

from __future__ import annotations

import shutil

import pytest

from tests.support.commands import message, run, run_well
from tests.support.corpus import GOLDEN

CASE = GOLDEN / "pipeline_2x4_to_8"
MERGED = CASE / "src_strategy.ckpt"


@pytest.mark.parametrize("words", [(), ("--help",), ("-h",)])
def test_the_group_alone_prints_its_help(words):
    printed = run_well("strategy", *words).stdout
    assert printed.startswith("Usage: ckpttool strategy [OPTIONS] COMMAND [ARGS]...\n")
    assert "\n  show " in printed


def test_show_prints_what_inspect_prints_of_a_strategy():
    for words in ((), ("--all",), ("--json",), ("-q",)):
        shown = run_well("strategy", "show", MERGED, *words)
        assert shown.stdout == run_well("inspect", MERGED, *words).stdout


def test_a_strategy_in_the_place_of_the_checkpoint_is_refused():
    result = run("strategy", "check", MERGED, CASE / "dst_strategy.ckpt")
    assert result.exit_code == 3
    assert "a strategy file, not a MindSpore checkpoint" in message(result)


def test_a_broken_checkpoint_with_a_strategy_in_it_is_called_so(tmp_path):
    folder = tmp_path / "run"
    (folder / "rank_0").mkdir(parents=True)
    (folder / "rank_0" / "net.ckpt").write_bytes(b"\xff" * 64)
    shutil.copy(MERGED, folder)
    result = run("strategy", "check", folder, MERGED)
    assert result.exit_code != 0
    assert "is a strategy" not in message(result)


@pytest.mark.parametrize("command", ["convert", "merge"])
def test_an_output_is_no_input_and_no_folder(tmp_path, command):
    paths = []
    for one in sorted((CASE / "src_stage_strategies").iterdir()):
        paths.append(tmp_path / one.name)
        paths[-1].write_bytes(one.read_bytes())
    link = tmp_path / "link.ckpt"
    link.symlink_to(paths[0])
    before = paths[0].read_bytes()
    inputs = "is an input of this run"
    for output, said in {paths[0]: inputs, link: inputs, tmp_path: "is a folder"}.items():
        result = run("strategy", command, *paths, "-o", output, "--overwrite")
        assert result.exit_code == 5
        assert said in message(result)
        assert paths[0].read_bytes() == before
