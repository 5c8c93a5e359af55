"""Split information of mindone is a strategy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ckpttool.model.layout import Layout
from ckpttool.problems import StrategyError
from ckpttool.strategy_files.reader import read_strategy
from ckpttool.strategy_files.writer import write_strategy
from tests.support.checkpoints import cut, noise, strategy_of, write_ranks
from tests.support.commands import mentions, message, run_well
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
    assert "3 tensors, 2 sharded parameters" in run_well("inspect", tmp_path / named).stdout


def test_a_parameter_that_is_in_no_file_is_named(tmp_path):
    info = write_info(tmp_path / "info", 2, {"w": True, "gone": True})
    strategy = strategy_of({"w": Layout((2,), ((0,), ()))})
    full = {"w": noise("w", "Float32", (8, 3))}
    src = write_ranks(tmp_path / "src", cut(full, strategy), "ckpt")
    printed = message(run_well("merge", src, "-s", info, "-o", tmp_path / "full.h5"))
    assert not mentions(printed, "1 parameter is in the strategy and in no file gone")


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
        ({"split": 1}, r"blocks\.0\.weight: split: expected bool, got int"),
        ({"rank_id": 2}, "rank_id 2 in a group of 2, expected 0 to 1"),
        ({"group_size": 0}, "rank_id 0 in a group of 0"),
    ],
)
def test_impossible_split_information_is_an_error(changed, words, tmp_path):
    path = write_info(tmp_path / "info", 2, **changed) / "params_split_info_0.json"
    with pytest.raises(StrategyError, match=words):
        read_strategy(str(path))


@pytest.mark.parametrize(("group", "ranks"), [(4, 8), (2, 6), (3, 3)])
@pytest.mark.parametrize("zero", [1, 3])
def test_the_checkpoint_has_any_number_of_groups_and_zero_1_splits_states_only(
    group, ranks, zero, tmp_path
):
    matrix = (ranks // group, group)
    whole, rows = Layout(matrix, ((), ())), Layout(matrix, ((0,), ()))
    layouts = {"w": rows if zero == 3 else whole, "adam_m.w": rows, "n": Layout(matrix, ((),))}
    full = {name: noise(name, "Int32", (12, 5)) for name in ("w", "adam_m.w", "adam_v.w")}
    full["n"] = noise("n", "Int32", (7,))
    strategy = strategy_of({**layouts, "adam_v.w": rows})
    src = write_ranks(tmp_path / "src", cut(full, strategy), "ckpt")
    info = write_info(tmp_path / "info", group, {"w": True, "n": False})
    printed = message(run_well("merge", src, "-s", info, "-o", tmp_path / "full.ckpt"))
    assert read(tmp_path / "full.ckpt") == full
    assert "warning" not in printed
    assert run_well("verify", src, "-s", info, "--deep").exit_code == 0


@pytest.mark.parametrize("stored", ["rows", "whole"])
def test_a_hand_written_strategy_adds_what_split_information_omits(stored, tmp_path):
    rows = Layout((2, 2), ((0,), ()))
    ways = {"rows": rows, "whole": Layout((2, 2), ((), ()))}
    strategy = strategy_of({"w": rows, "more": ways[stored]})
    full = {name: noise(name, "Int32", (8, 3)) for name in ("w", "more")}
    src = write_ranks(tmp_path / "src", cut(full, strategy), "ckpt")
    info = write_info(tmp_path / "info", 2, {"w": True})
    cut_of = {"rows": "{device_matrix: [2, 2], tensor_map: [0, -1]}", "whole": "replicated"}[stored]
    hand = tmp_path / "hand.yaml"
    hand.write_text(f"ckpttool_strategy: 1\nranks: 4\nparameters: {{more: {cut_of}}}\n")
    run_well("merge", src, "-s", info, "-s", hand, "-o", tmp_path / "full.ckpt")
    assert read(tmp_path / "full.ckpt") == full


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("stages: 1", "the key ranks is missing"),
        ("ranks: 5", r"5 ranks in 1 stage, but .* are for 6 in 1"),
    ],
)
def test_a_hand_written_strategy_beside_split_information_has_the_ranks(line, said, tmp_path):
    hand = tmp_path / "hand.yaml"
    hand.write_text(f"ckpttool_strategy: 1\n{line}\nparameters: {{more: replicated}}\n")
    with pytest.raises(StrategyError, match=said):
        read_strategy([str(write_info(tmp_path / "info", 2)), str(hand)])


def test_split_information_is_not_beside_a_strategy_of_mindspore(tmp_path):
    layouts = strategy_of({"x": Layout((2,), ((0,), ()))})
    write_strategy(layouts, str(tmp_path / "s.ckpt"))
    info = write_info(tmp_path / "info", 2)
    with pytest.raises(StrategyError, match=r"mindone, and .*s\.ckpt is a strategy of MindSpore"):
        read_strategy([str(info), str(tmp_path / "s.ckpt")])
    with pytest.raises(StrategyError, match="lists the sharded axes only"):
        write_strategy(read_strategy(str(info)), str(tmp_path / "new.ckpt"))


def test_a_file_is_of_one_rank(tmp_path):
    path = write_info(tmp_path / "info", 2) / "params_split_info_1.json"
    entries = json.loads(path.read_text())
    entries["norm.weight"]["rank_id"] = 0
    path.write_text(json.dumps(entries))
    with pytest.raises(StrategyError, match="rank 0 of 2 and rank 1 of 2, expected one rank"):
        read_strategy(str(path))
