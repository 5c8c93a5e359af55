"""Strategy files in folders: where they are found, with -s and beside a checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ckpttool.strategy_files.reader import read_strategy
from tests.support.commands import mentions, message, run, run_well
from tests.support.corpus import SAMPLES, assert_merged
from tests.support.mindformers_output import RANKS


@pytest.fixture
def src(tmp_path, monkeypatch):
    """Rank folders of a run in two stages, with nothing beside them; the folder above is here."""
    monkeypatch.chdir(tmp_path)
    for rank in RANKS:
        path = Path(SAMPLES, "pp2_opt", "ckpt", f"rank_{rank}", "net-1_1.ckpt")
        Path("src", f"rank_{rank}").mkdir(parents=True)
        shutil.copyfile(path, Path("src", f"rank_{rank}", "net-1_1.ckpt"))
    return Path("src")


def keep(pattern: str, sample: str = "pp2_opt") -> None:
    """Copy the strategy files of ranks to paths with their numbers."""
    for rank in RANKS:
        path = Path(pattern.format(rank=rank))
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(SAMPLES / sample / "strategy" / f"strategy_{rank}.ckpt", path)


def merge(*words: str) -> str:
    """Merge the source; check all tensors, and return what was printed."""
    printed = message(run_well("merge", "src", *words, "-o", "full.h5", "--overwrite"))
    assert_merged(Path("full.h5"), "pp2_opt")
    return printed


BELOW = [
    "{}/rank_{{rank}}/strategy.ckpt",
    "{}/rank_{{rank}}/strategy_{{rank}}.ckpt",
    "{}/node-{{rank}}/ckpt_strategy.ckpt",
    "{}/strategy/strategy_{{rank}}.ckpt",
    "{}/strategy/rank_{{rank}}/strategy.ckpt",
]


@pytest.mark.parametrize("pattern", [*BELOW, "{}/train_policy_strategy/strategy_{{rank}}.ckpt"])
def test_a_folder_given_with_s_is_searched(pattern, src):
    keep(pattern.format("given"))
    merge("-s", "given")


@pytest.mark.parametrize("pattern", [*BELOW[:2], *BELOW[3:], "{}/strategy/s{{rank}}.ckpt"])
def test_what_is_found_beside_ranks_is_what_s_finds_there(pattern, src):
    keep(pattern.format("src"))
    assert not mentions(merge(), "strategy from .* and 7 more")
    merge("-s", "src")


def test_a_damaged_strategy_of_a_rank_is_not_overlooked(src):
    keep("given/rank_{rank}/strategy.ckpt")
    Path("given/rank_5/strategy.ckpt").write_bytes(b"\xff")
    Path("given/rank_6/strategy.ckpt").write_bytes(b"")
    result = run("merge", "src", "-s", "given", "-o", "full.h5")
    assert result.exit_code == 4
    assert not mentions(message(result), "rank_5/strategy.ckpt", "rank_6/strategy.ckpt")


def test_checkpoints_beside_strategies_of_ranks_are_not_read_as_such(src):
    keep("src/rank_{rank}/strategy.ckpt")
    found = read_strategy("src")
    assert len(found.ranks) == 8
    assert {Path(path).name for path in found.files} == {"strategy.ckpt"}


ROLES = ("train_policy_strategy", "infer_ref_strategy")


@pytest.mark.parametrize("is_given", [True, False])
def test_folders_of_several_roles_are_a_question_that_names_them(is_given, src):
    keep("src/strategy/train_policy_strategy/strategy_{rank}.ckpt")
    keep("src/strategy/infer_ref_strategy/strategy_{rank}.ckpt", "mp2_dp4")
    words = ["-s", "src/strategy"] if is_given else []
    result = run("merge", "src", *words, "-o", "full.h5")
    assert result.exit_code == (4 if is_given else 2)
    said = "infer_ref_strategy, train_policy_strategy Try: -s src/strategy/infer_ref_strategy"
    assert not mentions(message(result), r"strategies in 2 folders", said)
    merge("-s", "src/strategy/train_policy_strategy")


@pytest.mark.parametrize("name", ["strategy/my.ckpt", "strategy.ckpt"])
def test_a_strategy_that_does_not_say_whose_it_is_is_named_and_not_read(name, src):
    path = src / name
    path.parent.mkdir(exist_ok=True)
    shutil.copyfile(SAMPLES / "pp2_opt" / "strategy" / "merged.ckpt", path)
    result = run("merge", "src", "-o", "full.h5")
    assert result.exit_code == 2
    said = rf"{path}: perhaps of another checkpoint, so ignored Try: -s {path},"
    assert not mentions(message(result), "no strategy for 8 ranks", said)
    merge("-s", str(path))


def test_inspect_shows_strategies_in_folders_of_ranks(src):
    keep("given/rank_{rank}/strategy.ckpt")
    alone = run_well("inspect", SAMPLES / "pp2_opt" / "strategy" / "merged.ckpt").stdout
    assert run_well("inspect", "given").stdout.splitlines()[1:] == alone.splitlines()[1:]
    keep("src/rank_{rank}/strategy.ckpt")
    assert not mentions(message(run_well("inspect", "src")), "8 ranks", "step 1_1")
