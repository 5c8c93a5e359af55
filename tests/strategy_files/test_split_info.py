"""Split information of mindone is a strategy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ckpttool.errors import StrategyError
from ckpttool.model.layout import Layout
from ckpttool.strategy_files.reader import read_strategy
from tests.support.checkpoints import cut, noise, strategy_of, write_ranks
from tests.support.commands import mentions, message, run, run_well
from tests.support.readers import Entry, read, read_ranks

SHAPES = {"blocks.0.weight": (12, 5), "blocks[1].bias": (6,), "norm.weight": (7,)}
SPLIT = {"blocks.0.weight": True, "blocks[1].bias": True, "norm.weight": False}


def write_info(folder: Path, ranks: int, splits=SPLIT, **changed: object) -> Path:
    """Write the files of a group of ranks."""
    folder.mkdir(exist_ok=True)
    for rank in range(ranks):
        entries = {
            name: {"split": is_split, "group_size": ranks, "rank_id": rank, **changed}
            for name, is_split in splits.items()
        }
        (folder / f"params_split_info_{rank}.json").write_text(json.dumps(entries, indent=2))
    return folder


def full_tensors() -> dict[str, Entry]:
    """Return parameters, the states of two of them, and a count that is not listed."""
    full = {name: noise(name, "Int32", shape) for name, shape in SHAPES.items()}
    full |= {f"adam_m.{name}": noise("m" + name, "Int32", SHAPES[name]) for name in SPLIT}
    return {**full, "global_step": noise("global_step", "Int32", (1,))}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("named", ["params_info", "params_info/params_split_info_1.json"])
def test_parameters_and_their_states_are_joined_in_the_order_of_ranks(ranks, named, tmp_path):
    layouts = {True: Layout((ranks,), ((0,), ())), False: Layout((ranks,), ((),))}
    layouts |= {None: Layout((ranks,), ((0,),))}
    keys = {"blocks.0.weight": True, "blocks[1].bias": None, "norm.weight": False}
    strategy = strategy_of({name: layouts[key] for name, key in keys.items()})
    write_info(tmp_path / "params_info", ranks)
    src = write_ranks(tmp_path / "src", cut(full_tensors(), strategy), "ckpt")
    given, out = ["-s", tmp_path / named], tmp_path / "full.safetensors"
    printed = message(run_well("merge", src, *given, "-o", out))
    assert read(out) == full_tensors()
    assert "warning" not in printed
    assert run_well("verify", src, *given, "--deep").exit_code == 0
    run_well("split", out, "-d", tmp_path / named, "-o", tmp_path / "new", "--format", "ckpt")
    assert read_ranks(tmp_path / "new") == read_ranks(src)
    assert "3 parameters" in run_well("inspect", tmp_path / named).stdout


def test_a_parameter_that_is_in_no_file_is_named(tmp_path):
    info = write_info(tmp_path / "info", 2, {"w": True, "gone": True})
    strategy = strategy_of({"w": Layout((2,), ((0,), ()))})
    full = {"w": noise("w", "Float32", (8, 3))}
    src = write_ranks(tmp_path / "src", cut(full, strategy), "ckpt")
    printed = message(run_well("merge", src, "-s", info, "-o", tmp_path / "full.h5"))
    assert not mentions(printed, "1 parameter is in it and in no file gone")


def test_files_of_two_runs_are_refused(tmp_path):
    write_info(tmp_path / "a", 2)
    write_info(tmp_path / "b", 2, {**SPLIT, "norm.weight": True})
    paths = [str(tmp_path / "a"), str(tmp_path / "b" / "params_split_info_1.json")]
    said = r"b/params_split_info_1\.json: not of the run of .*a/.*_0\.json: .*; norm\.weight;"
    with pytest.raises(StrategyError, match=said):
        read_strategy(paths)
    write_info(tmp_path / "c", 4)
    with pytest.raises(StrategyError, match=r"c/params_split_info_0\.json: not of the run"):
        read_strategy([str(tmp_path / "a"), str(tmp_path / "c" / "params_split_info_0.json")])


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"split": 1}, r"blocks\.0\.weight: split 1, group_size 2, .* expected true or false"),
        ({"rank_id": 2}, "rank_id 2 in a group of 2, expected 0 to 1"),
        ({"group_size": 0}, "rank_id 0 in a group of 0"),
    ],
)
def test_impossible_split_information_is_an_error(changed, words, tmp_path):
    path = write_info(tmp_path / "info", 2, **changed) / "params_split_info_0.json"
    with pytest.raises(StrategyError, match=words):
        read_strategy(str(path))


def test_split_information_stands_alone(tmp_path):
    hand = tmp_path / "hand.yaml"
    hand.write_text("ckpttool_strategy: 1\nranks: 2\nparameters: {x: replicated}\n")
    info = write_info(tmp_path / "info", 2)
    result = run("merge", tmp_path, "-s", info, "-s", hand, "-o", tmp_path / "full.h5")
    assert not mentions(message(result), "mindone, and .*hand.yaml is another strategy")


def test_a_file_is_of_one_rank(tmp_path):
    path = write_info(tmp_path / "info", 2) / "params_split_info_1.json"
    entries = json.loads(path.read_text())
    entries["norm.weight"]["rank_id"] = 0
    path.write_text(json.dumps(entries))
    with pytest.raises(StrategyError, match="rank 0 of 2 and rank 1 of 2, expected one rank"):
        read_strategy(str(path))
