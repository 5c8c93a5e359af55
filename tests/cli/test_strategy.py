"""``ckpttool strategy``: the group, and what its commands print."""

from __future__ import annotations

import json
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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["sho"], "ckpttool strategy has no command 'sho' Try: ckpttool strategy show"),
        (["show"], "strategy show needs STRATEGY STRATEGY is a strategy file."),
        (["show", MERGED, "--al"], "strategy show has no --al Did you mean --all"),
        (["show", MERGED, "--step", "1"], "Try: ckpttool strategy show --help"),
        (["show", f"{MERGED}x"], "does not exist"),
    ],
)
def test_a_wrong_command_line_is_explained(words, said):
    result = run("strategy", *words)
    assert result.exit_code == 2
    assert said in message(result)


def test_show_prints_what_inspect_prints_of_a_strategy():
    for words in ((), ("--all",), ("--json",), ("-q",)):
        shown = run_well("strategy", "show", MERGED, *words)
        assert shown.stdout == run_well("inspect", MERGED, *words).stdout


def test_show_takes_the_files_of_all_stages_together():
    folder = CASE / "src_stage_strategies"
    named = run_well("strategy", "show", *sorted(folder.iterdir()), "--json").stdout
    assert json.loads(named)["stages"] == 2
    assert run_well("strategy", "show", folder, "--json").stdout == named


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("convert S.ckpt S.yaml", "'S.yaml' does not exist"),
        ("convert S.ckpt s3://b/s.yaml", "'s3://b/s.yaml' is a URL"),
        ("show S.ckpt b.yaml", "'b.yaml' does not exist"),
    ],
)
def test_a_path_without_an_option_is_a_strategy(tmp_path, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    shutil.copy(MERGED, "S.ckpt")
    result = run("strategy", *words.split())
    assert result.exit_code == 2
    assert said in message(result)


def test_a_strategy_in_the_place_of_the_checkpoint_is_refused():
    result = run("strategy", "check", MERGED, CASE / "dst_strategy.ckpt")
    assert result.exit_code == 3
    assert "a strategy file, not a MindSpore checkpoint" in message(result)


def test_a_broken_checkpoint_with_a_strategy_in_it_is_called_so(tmp_path):
    """It is not a strategy, whatever stands behind it."""
    folder = tmp_path / "run"
    (folder / "rank_0").mkdir(parents=True)
    (folder / "rank_0" / "net.ckpt").write_bytes(b"\xff" * 64)
    shutil.copy(MERGED, folder)
    result = run("strategy", "check", folder, MERGED)
    assert result.exit_code != 0
    assert "is a strategy" not in message(result)


HAND = "ckpttool_strategy: 1\nranks: 4\nparameters:\n  w: [4, 1]\n"


def test_otherwise_is_refused_where_a_form_lists_each_name(tmp_path):
    path = tmp_path / "hand.yaml"
    path.write_text(f"{HAND}otherwise: replicated\n")
    for form in ("ckpt", "json"):
        result = run("strategy", "convert", path, "-o", tmp_path / f"out.{form}")
        assert result.exit_code == 4
        assert "hand.yaml: otherwise: 1 line for all other parameters" in message(result)
        assert not (tmp_path / f"out.{form}").exists()
    run_well("strategy", "convert", path, "-o", tmp_path / "out.yaml")
    assert "otherwise: replicated" in (tmp_path / "out.yaml").read_text()


@pytest.mark.parametrize("form", ["ckpt", "yaml"])
def test_axes_that_json_expands_are_refused_without_their_full_shapes(tmp_path, form):
    path = GOLDEN / "json_multi_axis" / "src_strategy.json"
    result = run("strategy", "convert", path, "-o", tmp_path / f"out.{form}")
    assert result.exit_code == 4
    assert "6 parameters may have more axes in JSON than in files" in message(result)
    assert not [*tmp_path.iterdir()]
    run_well("strategy", "convert", path, "-o", tmp_path / "out.json")
    assert run("strategy", "diff", path, tmp_path / "out.json").exit_code == 0


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
