"""``ckpttool strategy ranks``: what it prints, and the files that it names."""

import json
import shutil

import pytest
from msgspec.structs import replace

import ckpttool
from ckpttool.model.layout import Layout
from tests.support.checkpoints import cut, noise, strategy_of, write_ranks
from tests.support.commands import message, run, run_well
from tests.support.corpus import GOLDEN

CASE = GOLDEN / "reshard_8_to_4"
SRC = ["-s", CASE / "src_strategy.ckpt"]
BOTH = [*SRC, "-d", CASE / "dst_strategy.ckpt"]
FILES = "rank_{rank}/checkpoint-2_10.ckpt"


def ranks(*words):
    return run_well("strategy", "ranks", *words).stdout


@pytest.mark.parametrize(
    ("pattern", "folder"),
    [
        ("obs://b/net/rank_{rank}/c", "obs://b/net"),
        ("/ckpt/net/rank_{rank}/c", "/ckpt/net/"),
        ("net/rank_{rank}/c", "net"),
        ("./rank_{rank}/c", "."),
    ],
)
def test_files_are_relative_to_a_folder(pattern, folder):
    lines = ranks(*BOTH, "--rank", "0", "--files", pattern, "--relative-to", folder)
    assert lines.splitlines() == ["rank_0/c", "rank_1/c", "rank_2/c"]


def test_a_run_with_the_named_files_alone_warns_of_nothing(tmp_path):
    for file in ranks(*BOTH, "--rank", "2-3", "--files", FILES).splitlines():
        (tmp_path / "some" / file).parent.mkdir(parents=True)
        shutil.copy(CASE / "src" / file, tmp_path / "some" / file)
    words = [*BOTH, "--rank", "2-3", "--format", "ckpt", "-o"]
    run_well("reshard", CASE / "src", *words, tmp_path / "full")
    result = run_well("reshard", tmp_path / "some", *words, tmp_path / "part", "--strict")
    assert "warning" not in result.stderr
    for rank in (2, 3):
        name = f"rank_{rank}/checkpoint_{rank}.ckpt"
        assert (tmp_path / "part" / name).read_bytes() == (tmp_path / "full" / name).read_bytes()
    for rank in (0, 1):
        shutil.rmtree(tmp_path / "some" / f"rank_{rank}")
    result = run_well("reshard", tmp_path / "some", *words, tmp_path / "alone")
    assert "warning[hidden_shard]" in result.stderr
    assert "2 more ranks would show it: 0, 1" in result.stderr


@pytest.mark.parametrize("side", ["-s", "-d"])
def test_a_pattern_that_matches_nothing_has_a_note(tmp_path, side):
    text = 'ckpttool_strategy: 1\nranks: 8\nparameters:\n  "*.weight": {axis: 0}\n'
    text += '  "*.weigth": {axis: 1}\notherwise: replicated\n'
    (tmp_path / "hand.yaml").write_text(text, encoding="utf-8")
    given = {"-s": CASE / "src_strategy.ckpt", "-d": CASE / "dst_strategy.ckpt"}
    words = [word for both in {**given, side: tmp_path / "hand.yaml"}.items() for word in both]
    result = run_well("strategy", "ranks", *words)
    assert "note: " in result.stderr
    assert "*.weigth: no parameter matches" in message(result)
    (note,) = json.loads(ranks(*words, "--json"))["notes"]
    assert "*.weigth" in note["text"]


def test_any_rank_does_where_no_pattern_matches_and_the_rest_is_replicated(tmp_path):
    text = 'ckpttool_strategy: 1\nranks: 4\nparameters:\n  "nothing.*": {axis: 0}\n'
    (tmp_path / "hand.yaml").write_text(text + "otherwise: replicated\n", encoding="utf-8")
    words = ["-s", tmp_path / "hand.yaml", "-d", CASE / "dst_strategy.ckpt", "--rank", "1"]
    assert ranks(*words) == "rank 1: any rank\n"
    (tmp_path / "hand.yaml").write_text(text, encoding="utf-8")
    assert "no parameter in common" in message(run("strategy", "ranks", *words))


def test_a_run_that_lacks_ranks_names_the_command_that_lists_enough(tmp_path):
    (tmp_path / "one" / "rank_0").mkdir(parents=True)
    shutil.copy(CASE / "src" / "rank_0" / "checkpoint-2_10.ckpt", tmp_path / "one" / "rank_0")
    words = ["reshard", tmp_path / "one", *BOTH, "--format", "ckpt", "-o", tmp_path / "out"]
    result = run(*words, "--rank", "2")
    assert "some slices are on no rank" in message(result)
    assert message(result).endswith("which `ckpttool strategy ranks` lists")
    assert "strategy ranks" not in message(run(*words))  # all ranks are needed


W = Layout((4,), ((), ()))
NAMES = ("w", "adam_m.w", "adam_v.w")
HALVES = strategy_of(dict.fromkeys(NAMES, Layout((2,), ((0,), ()))))


@pytest.fixture
def hidden(tmp_path):
    entries = {name: noise(name, "Float32", (16, 8)) for name in NAMES}
    sharded = strategy_of(dict.fromkeys(NAMES, replace(W, optimizer_shard=4)))
    write_ranks(tmp_path / "run", cut(entries, sharded), "ckpt")
    ckpttool.write_strategy(strategy_of(dict.fromkeys(NAMES, W)), tmp_path / "s.ckpt")
    ckpttool.write_strategy(HALVES, tmp_path / "d.ckpt")
    return tmp_path


def reshard(folder, there, *words):
    some = folder.with_name(f"only_{'_'.join(map(str, there))}")
    for rank in there:
        shutil.copytree(folder / f"rank_{rank}", some / f"rank_{rank}")
    strategies = ["-s", folder.with_name("s.ckpt"), "-d", folder.with_name("d.ckpt")]
    out = some.with_name(f"{some.name}_out")
    return run("reshard", some, *strategies, "--rank", "0", "-o", out, "--format", "ckpt", *words)


def test_a_hidden_optimizer_shard_is_never_silent(hidden):
    words = ["-s", hidden / "s.ckpt", "-d", hidden / "d.ckpt", "--rank", "0"]
    assert (
        ranks(*words)
        == "rank 0: 0 (one of 0-3); also: 1, which would show a hidden optimizer shard\n"
    )
    alone = reshard(hidden / "run", [0])
    assert alone.exit_code == 0
    assert "warning[hidden_shard]" in alone.stderr
    assert "one more rank would show it: 1" in alone.stderr
    assert reshard(hidden / "run", [3], "--strict").exit_code == 5
    both = reshard(hidden / "run", [0, 1])
    assert both.exit_code == 5
    assert "error[undecided_shard]" in both.stderr
    assert "error[missing]" in reshard(hidden / "run", [0, 2]).stderr  # it can only be a shard of 4


def test_a_set_that_ckpttool_wrote_with_this_strategy_hides_none(tmp_path):
    write_ranks(tmp_path / "whole", {0: {n: noise(n, "Float32", (16, 8)) for n in NAMES}}, "ckpt")
    ckpttool.write_strategy(strategy_of(dict.fromkeys(NAMES, W)), tmp_path / "s.ckpt")
    ckpttool.write_strategy(HALVES, tmp_path / "d.ckpt")
    words = ["-d", tmp_path / "s.ckpt", "-o", tmp_path / "run", "--format", "ckpt"]
    run_well("split", tmp_path / "whole", *words)
    assert "warning[hidden_shard]" in reshard(tmp_path / "run", [0]).stderr
    (tmp_path / "only_1").mkdir()
    shutil.copy(tmp_path / "run" / "ckpttool.json", tmp_path / "only_1")
    result = reshard(tmp_path / "run", [1])
    assert (result.exit_code, "warning" in result.stderr) == (0, False), result.stderr
