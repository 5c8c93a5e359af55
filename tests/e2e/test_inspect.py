"""The screen of inspect: what it answers first, the folded table, and strategies."""

from __future__ import annotations

import json
import re
import shutil
from typing import Any

import pytest

import ckpttool
from ckpttool.cli import overview, tables
from ckpttool.formats import get_format
from ckpttool.model.tensors import TensorMeta
from ckpttool.operations import inspect
from ckpttool.operations.summary import Placement
from tests.support.checkpoints import Entry, create_file, noise, write_ranks
from tests.support.commands import mentions, message, run, run_well
from tests.support.corpus import GOLDEN, SAMPLES
from tests.support.readers import rank_file, read, zeros

CASE = GOLDEN / "tutorial_8_to_8_retrain"
SOURCE = [CASE / "src", "-s", CASE / "src_strategy.ckpt"]
MODEL = GOLDEN / "reshard_8_to_4"
LLAMA = GOLDEN / "pipeline_tied_llama"
PP2 = SAMPLES / "pp2" / "strategy"


def screen(*words) -> str:
    """What inspect prints on stdout, with single spaces."""
    return re.sub(r"[ ]+", " ", run_well("inspect", *words).stdout)


def document(*words) -> dict[str, Any]:
    """The document of inspect, whatever the exit code."""
    return json.loads(run("inspect", *words, "--json").stdout)


# -------------------------------------------------------------------------------------- the answers


def test_the_first_lines_say_what_it_is_how_it_is_sharded_and_whether_it_is_complete():
    text = screen(*SOURCE)
    assert "8 ranks, step 2_10, ckpt, 220.0 KiB, 3.5 K parameters (Float32)\n" in text
    assert "weights 13.5 KiB, optimizer state 27.1 KiB\n" in text
    assert "2-way tensor parallel x 4 replicas, 1 stage, no optimizer shard\n" in text
    assert "complete yes: every slice is there, 4 to 8 replicas each (headers; verify" in text


def test_equal_layers_states_and_unsharded_tensors_are_folded():
    lines = screen(*SOURCE).splitlines()
    assert "21 tensors: 6 parameters, each with accum., stat.; 3 not in the strategy" in lines
    assert " layer1.weight 64 x 32 columns / 2 0,1,4,5 | 2,3,6,7" in lines
    assert " layer3.weight 32 x 10 rows / 2 0,1,4,5 | 2,3,6,7" in lines
    assert " 4 more no 0-7" in lines
    values = "global_step, learning_rate, momentum"
    assert f" not in the strategy, equal on all ranks: {values}" in lines
    assert lines[-1] == "--all lists every tensor, --ranks every file, --json everything"


def test_layers_of_all_stages_are_one_row():
    text = screen(LLAMA / "src", "-s", LLAMA / "src_strategy.ckpt")
    ranks = "stage 0: 0,2 | 1,3; stage 1: 4,6 | 5,7"
    assert f" model.layers.{{0,1}}.attention.wq.weight 16 x 16 rows / 2 {ranks}\n" in text
    assert "2-way tensor parallel x 2 replicas, 2 stages of 4 ranks, no optimizer shard" in text
    assert "ranks 0-3: 32 tensors, 20.3 KiB each; 4-7: 32 tensors" in text


def test_all_lists_every_tensor_and_ranks_every_file():
    text = screen(*SOURCE, "--all", "--ranks")
    names = read(rank_file(CASE / "src", 0))
    assert not mentions(text, *(rf"^ {re.escape(name)} Float32|Int32" for name in names))
    assert " 7 rank_7/checkpoint-2_10.ckpt ckpt 21 27.5 KiB" in text
    assert "--all" not in text.splitlines()[-1]


def test_the_document_has_the_facts_of_the_first_lines():
    summary = json.loads(run_well("inspect", *SOURCE, "--json").stdout)["summary"]
    assert summary["weights"] == {
        "tensors": 6,
        "parameters": 3466,
        "nbytes": 13864,
        "dtypes": {"Float32": 3466},
    }
    assert summary["optimizer_state"]["nbytes"] == 2 * 13864
    assert summary["parallelism"]["tensor_parallel"] == 2
    assert summary["parallelism"]["stages"][0]["device_matrices"] == [[8], [2, 2, 2]]
    assert (summary["complete"], summary["replicas"]) == (True, [4, 8])
    (first, *_) = summary["equal_ranks"]
    same = {"one_value": False, "sampled": False}
    assert first == {"name": "global_step", "ranks": [[*range(8)]], **same}


@pytest.fixture
def lost(tmp_path):
    """A function: the checkpoint without some ranks."""

    def without(*ranks):
        folder = tmp_path / "src"
        shutil.copytree(CASE / "src", folder)
        for rank in ranks:
            shutil.rmtree(folder / f"rank_{rank}")
        return folder

    return without


def test_a_rank_that_replicas_replace_is_named(lost):
    result = run_well("inspect", lost(3), *SOURCE[1:])
    text = re.sub("[ ]+", " ", result.stdout)
    assert "yes: every slice is there, 3 to 7 replicas each" in text
    assert "contents 7 of 8 ranks, step 2_10" in text
    assert "rank 3 has no file: replicas hold the slices" in text
    assert result.stderr == "", "once is enough"
    assert " layer1.weight 64 x 32 columns / 2 0,1,4,5 | 2,6,7" in text


def test_what_is_missing_is_named(lost):
    result = run("inspect", lost(2, 3, 6, 7), *SOURCE[1:])
    assert result.exit_code == 5
    text = " ".join(result.stdout.split())
    assert (
        "complete no: ranks 2, 3, 6, 7 have no file; 6 tensors cannot be joined from slices: lay"
        in text
    )
    assert "2-way tensor parallel x 4 replicas" in text, "as the strategy says"
    assert "without 6 incomplete tensors" in text


def test_all_ranks_are_those_of_the_strategy(lost):
    folder = lost(3)
    path = next((folder / "rank_5").iterdir())
    path.write_bytes(path.read_bytes()[:2000])
    text = " ".join(run("inspect", folder, *SOURCE[1:]).stdout.split())
    assert "contents 6 of 8 ranks, step 2_10" in text
    assert "equal on ranks 0-2, 4, 6, 7: global_step" in text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("missing_rank", "3 of 4 ranks, step 2_10, ckpt, 855 B, parameters not known"),
        ("empty_file", "3 of 4 ranks, step 2_10, ckpt, 855 B, parameters not known"),
        ("garbage", "equal on ranks 0-2: global_step"),
        ("odd_folder", "not known: the strategy does not fit the checkpoint 5 tensors"),
    ],
)
def test_nothing_is_said_of_ranks_that_were_not_read(name, text):
    case = GOLDEN / "broken_inputs" / name
    result = run("inspect", case / "src", "-s", case / "src_strategy.ckpt")
    assert text in " ".join(result.stdout.split())


def test_with_an_optimizer_shard_no_replicas_are_promised():
    case = GOLDEN / "bfloat16_model"
    text = screen(case / "src", "-s", case / "src_strategy.ckpt")
    assert "2-way tensor parallel x 4-way data parallel, 1 stage, optimizer shard of 4 or 8" in text


def test_a_strategy_that_does_not_fit_says_nothing_of_the_checkpoint():
    other = GOLDEN / "safetensors_pipeline" / "src_strategy.ckpt"
    result = run("inspect", CASE / "src", "-s", other)
    assert result.exit_code == 5
    assert result.stdout.count("not known: the strategy does not fit the checkpoint") == 2
    assert "layer1.weight" in result.stdout


# ------------------------------------------------------------------------------- without a strategy


def test_samples_tell_which_ranks_hold_the_same():
    text = screen(CASE / "src")
    assert "parallelism not known without a strategy (-s STRATEGY)" in text
    assert "sampled pages of 21 tensors: 15 equal on their ranks, 6 different between" in text
    assert " layer1.weight 64 x 16 0,1,4,5 | 2,3,6,7" in text
    assert "single values, equal on all ranks: global_step, learning_rate, momentum" in text


def layers(rank: int, differing: tuple[str, ...] = ()) -> dict[str, Entry]:
    """Six layers with a state, equal on all ranks but for those in ``differing``."""
    names = [f"{prefix}layers.{i}.weight" for prefix in ("", "adam_m.") for i in range(6)]
    return {n: noise(f"{n}{rank if n in differing else ''}", "Float32", (8, 8)) for n in names}


def test_layers_that_differ_between_ranks_unfold(tmp_path):
    differing = ("layers.2.weight", "adam_m.layers.2.weight", "adam_m.layers.3.weight")
    write_ranks(tmp_path / "src", {rank: layers(rank, differing) for rank in range(4)}, "ckpt")
    lines = screen(tmp_path / "src").splitlines()
    assert " layers.{0,1,4,5}.weight + adam_m. 8 x 8 0-3" in lines
    assert " layers.2.weight + adam_m. 8 x 8 0-3, one each" in lines
    assert " layers.3.weight 8 x 8 0-3" in lines
    assert " adam_m.layers.3.weight 8 x 8 0-3, one each" in lines


def test_of_many_tensors_only_the_first_of_each_row_is_called_equal(tmp_path, monkeypatch):
    monkeypatch.setattr(inspect, "MAX_SAMPLES", 30)
    ranks = {r: layers(r) | {f"step{n}": noise("s", "Float32", (1,)) for n in "12"} for r in (0, 1)}
    write_ranks(tmp_path / "src", ranks, "ckpt")
    assert " tensors shape equal ranks\n" in screen(tmp_path / "src")
    monkeypatch.setattr(inspect, "MAX_SAMPLES", 27)
    text = screen(tmp_path / "src")
    assert "pages of 2 tensors, the first of each row (--all samples every one): 2 equal" in text
    assert " tensors shape equal ranks, first\n" in text
    assert "\n single values: step{1,2}\n" in text
    assert "sampled pages of 14 tensors: 14 equal" in screen(tmp_path / "src", "--all")


def test_texts_are_compared_by_their_value(tmp_path):
    for rank, text in enumerate(("one", "two", "two")):
        folder = tmp_path / f"rank_{rank}"
        folder.mkdir()
        metas = [TensorMeta("note", "str", (), text), TensorMeta("mixed", "str", (), "x")]
        create_file(get_format("ckpt"), folder / "net.ckpt", metas, {})
    write_ranks(tmp_path, {3: {"mixed": noise("m", "Float32", (4,))}}, "ckpt")
    groups = {one["name"]: one["ranks"] for one in document(tmp_path)["summary"]["equal_ranks"]}
    assert groups == {"note": [[0], [1, 2]], "mixed": [[0, 1, 2], [3]]}


def test_shapes_and_types_that_differ_between_ranks_are_rows_of_their_own(tmp_path):
    """The bytes of ``b`` are equal, but it is not the same tensor."""
    b = noise("b", "Float32", (2, 2))
    ranks = {
        0: {"w": noise("w", "Float32", (16, 8)), "v": noise("v", "Float32", (4,)), "b": b},
        1: {"w": noise("w", "Float32", (8, 8)), "v": noise("v", "Float16", (4,)), "b": b},
        2: {"w": noise("w", "Float32", (8, 8)), "b": b._replace(shape=(4,))},
    }
    write_ranks(tmp_path / "src", ranks, "ckpt")
    text = screen(tmp_path / "src")
    assert "1.2 KiB, 3 tensors\n" in text
    rows = ["w 16 x 8 Float32 0", "w 8 x 8 Float32 1,2", "v 4 Float32 0", "v 4 Float16 1"]
    assert "\n ".join([*rows, "b 2 x 2 Float32 0,1", "b 4 Float32 2"]) in text
    assert "sampled pages of 3 tensors: 3 different between ranks" in text
    found = [
        (one["name"], one["shape"], one["ranks"]) for one in document(tmp_path / "src")["tensors"]
    ]
    assert found[:2] == [("w", [16, 8], [0]), ("w", [8, 8], [1, 2])]


def test_equal_ranks_are_perhaps_replicas_and_merge_tells(tmp_path):
    write_ranks(tmp_path / "src", dict.fromkeys(range(8), layers(0)), "ckpt")
    text = screen(tmp_path / "src")
    assert "parallelism perhaps 8 full replicas\n sampled pages of 12 tensors: 12 equal on " in text
    merge = f"complete not known: `ckpttool merge {tmp_path}/src --replicated -o FILE` compares"
    assert merge in text
    run_well("merge", tmp_path / "src", "--replicated", "-o", tmp_path / "m.ckpt")


def test_the_document_lists_the_stored_tensors_without_a_strategy_that_fits():
    first, *others = document(CASE / "src")["tensors"]
    facts = {"dtype": "Float32", "shape": [64, 16], "nbytes": 64 * 16 * 4}
    assert first == {"name": "layer1.weight", **facts, "ranks": [*range(8)]}
    assert len(others) == 20
    four = GOLDEN / "reshard_4_to_8" / "src_strategy.ckpt"
    wrong = document(GOLDEN / "reshard_8_to_4" / "src", "-s", four)
    assert wrong["tensors"] == document(GOLDEN / "reshard_8_to_4" / "src")["tensors"]
    assert [one["code"] for one in wrong["problems"]] == ["strategy"]


def test_slices_of_one_value_are_not_taken_for_equal_tensors(tmp_path):
    write_ranks(tmp_path / "src", {rank: {"b": zeros((4,))} for rank in (0, 1)}, "ckpt")
    text = screen(tmp_path / "src")
    assert "sampled pages of 1 tensor: 1 of one value" in text
    assert " b 4 0,1 (one value)" in text


def test_of_a_large_tensor_only_samples_are_said_to_be_equal(tmp_path):
    entries = {"w": noise("w", "Float32", (4,)), "table": noise("t", "Float32", (2000,))}
    write_ranks(tmp_path / "src", dict.fromkeys((0, 1), entries), "ckpt")
    (tmp_path / "s.json").write_text(
        '{"parallel_layout_item": {"w": {"dev_matrix": [2], "tensor_map": [-1]}}}'
    )
    text = screen(tmp_path / "src", "-s", tmp_path / "s.json")
    assert " not in the strategy, equal samples on all ranks: table" in text


def test_single_values_are_each_compared_though_their_names_fold(tmp_path):
    """Else the second is called equal, and merge refuses it."""
    names = ["beta1_power", "beta2_power"]
    ranks = {
        rank: {
            "w": noise("w", "Float32", (4,)),
            names[0]: noise("1", "Float32", (1,)),
            names[1]: noise(f"2 of {rank}", "Float32", (1,)),
        }
        for rank in (0, 1)
    }
    source = write_ranks(tmp_path / "src", ranks, "ckpt")
    strategy = tmp_path / "s.json"
    strategy.write_text('{"parallel_layout_item": {"w": {"dev_matrix": [2], "tensor_map": [-1]}}}')
    text = screen(source, "-s", strategy)
    assert " not in the strategy, equal on all ranks: beta1_power\n" in text
    assert " not in the strategy, different between ranks (0 | 1): beta2_power\n" in text
    assert "differ between ranks; merge needs --unlisted\n" in text
    summary = document(source, "-s", strategy)["summary"]
    assert [one["name"] for one in summary["equal_ranks"]] == names
    assert (summary["complete"], summary["complete_codes"]) == (None, ["unlisted"])


def test_what_a_strategy_omits_is_compared_on_any_number_of_ranks(tmp_path):
    ranks = {rank: {"w": zeros((4,)), "s": noise(f"{rank}", "Float32", (1,))} for rank in range(66)}
    source = write_ranks(tmp_path / "src", ranks, "ckpt")
    strategy = tmp_path / "s.json"
    strategy.write_text('{"parallel_layout_item": {"w": {"dev_matrix": [66], "tensor_map": [-1]}}}')
    assert document(source, "-s", strategy)["summary"]["complete_codes"] == ["unlisted"]


def test_parameters_in_no_file_are_missing_tensors(tmp_path):
    source = tmp_path / "src"
    shutil.copytree(LLAMA / "src", source)
    for rank in range(4, 8):
        shutil.rmtree(source / f"rank_{rank}")
    found = document(source, "-s", LLAMA / "src_strategy.ckpt")
    missing = found["summary"]["missing_tensors"]
    assert "model.norm_out.weight" in missing
    assert len(missing) == len(found["problems"])
    text = re.sub("[ ]+", " ", run("inspect", source, "-s", LLAMA / "src_strategy.ckpt").stdout)
    assert re.search(r" at least [0-9.]+ K parameters \(Float32\)\n", text)
    assert f"without {len(missing)} incomplete tensors\n" in text


def test_one_equal_number_or_one_tensor_of_many_is_no_sign_of_replicas(tmp_path, monkeypatch):
    single = {"w": zeros((4, 4)), "step": noise("s", "Float32", (1,))}
    write_ranks(tmp_path / "single", dict.fromkeys(range(2), single), "ckpt")
    assert "full replica" not in screen(tmp_path / "single")
    own = {rank: {"w": noise("w", "Float32", (4,)), f"rng_{rank}": zeros((4,))} for rank in (0, 1)}
    write_ranks(tmp_path / "own", own, "ckpt")
    text = screen(tmp_path / "own")
    assert "full replica" not in text
    assert "sampled pages of 1 tensor: 1 equal on their ranks\n" in text
    monkeypatch.setattr(inspect, "MAX_SAMPLES", 4)
    write_ranks(tmp_path / "many", dict.fromkeys(range(2), layers(0)), "ckpt")
    assert "full replica" not in screen(tmp_path / "many")


def test_a_strategy_that_contents_contradict_is_named_beside_the_parallelism(tmp_path):
    ranks = {r: {"w": noise("x" if r == 1 else f"{r // 4}", "Float32", (4, 4))} for r in range(8)}
    source = write_ranks(tmp_path / "src", ranks, "ckpt")
    strategy = tmp_path / "s.json"
    strategy.write_text(
        '{"parallel_layout_item": {"w": {"dev_matrix": [2, 4], "tensor_map": [1, -1]}}}'
    )
    text = screen(source, "-s", strategy)
    assert f"parallelism by {strategy}, with which some contents disagree:\n" in text


def test_a_name_with_many_numbers_folds_only_by_the_first(tmp_path):
    rest = ".".join(map(str, range(1500)))
    ranks = {0: {f"l.{n}.{rest}": zeros((4,)) for n in (0, 1)}}
    assert " l.{0,1}.0.1.2.3.4.5.6.7.8." in screen(write_ranks(tmp_path / "src", ranks, "ckpt"))


def test_many_ranks_are_sampled_only_on_request(tmp_path):
    ranks = {rank: {"w": noise(f"w{rank % 2}", "Float32", (4,))} for rank in range(65)}
    write_ranks(tmp_path / "src", ranks, "ckpt")
    text = screen(tmp_path / "src")
    assert "--all samples every tensor and shows which ranks hold the same" in text
    assert " w 4 0-64" in text
    text = screen(tmp_path / "src", "--all")
    assert "sampled pages of 1 tensor: 1 different between ranks" in text
    even, odd = (",".join(map(str, range(first, 65, 2))) for first in (0, 1))
    assert f" w 4 Float32 {even} | {odd}\n" in text


# ---------------------------------------------------------------------------------- kinds of source


def test_a_single_file_has_the_same_table_with_sizes(tmp_path):
    run_well("merge", *SOURCE, "-o", tmp_path / "m.safetensors")
    text = screen(tmp_path / "m.safetensors")
    assert "1 file, safetensors, " in text
    assert "parallelism none: full tensors" in text
    assert "complete yes: every tensor is there" in text
    assert " layer{1,2}.bias 32 768 B" in text
    assert "single values: learning_rate, momentum, global_step" in text
    assert text.endswith("--all lists every tensor, --json everything\n")


def test_parameters_and_states_in_several_files_are_one_row(tmp_path):
    run_well("merge", *SOURCE, "-o", tmp_path / "model", "--max-shard-size", "10KB")
    text = screen(tmp_path / "model")
    title = "21 tensors: 6 parameters, each with accum., stat.; 3 single values"
    assert f"{title}\n\n tensors full shape size with states\n" in text
    assert " layer1.weight 64 x 32 24.0 KiB" in text


def test_an_empty_file_is_not_called_complete(tmp_path):
    (tmp_path / "net.ckpt").write_bytes(b"")
    text = screen(tmp_path / "net.ckpt")
    assert "complete not known: there is no tensor to examine or to write" in text


def test_ranks_that_differ_in_type_are_not_called_complete():
    case = GOLDEN / "broken_inputs" / "dtype_mismatch"
    result = run("inspect", case / "src", "-s", case / "src_strategy.ckpt")
    text = " ".join(result.stdout.split())
    said = "no: 1 tensor cannot be joined from slices: weight; ranks hold a parameter in several"
    assert said in text


def test_files_that_cannot_be_read_are_counted():
    result = run("inspect", GOLDEN / "encrypted_gcm" / "src")
    text = " ".join(result.stdout.split())
    assert "contents 2 ranks, step 2_10, encrypted with AES-GCM, and there is no key p" in text
    assert "ranks 0, 1 cannot be read" in text


def test_without_redundancy_the_ranks_are_those_of_the_layout_and_slices_are_there_once():
    case = GOLDEN / "safetensors_remove_redundancy"
    text = screen(case / "src", "-s", case / "src_strategy.ckpt")
    assert "complete yes: every slice is there, once" in text
    assert "38 tensors: 12 parameters, each with adam_m., adam_v.; 2 not in the" in text
    assert " lm_head.weight 32 x 16 rows / 2 0,2,4,6 | 1,3,5,7" in text
    assert " 3 more 16 no 0-7" in text
    assert "more stage" not in text


def test_one_rank_of_several_is_not_called_complete_nor_full():
    text = screen(CASE / "src" / "rank_0" / "checkpoint-2_10.ckpt")
    assert "parallelism not known: one rank's file of several\n" in text
    assert "complete not known: one rank's file of several\n" in text


def test_files_that_cannot_be_read_are_not_complete_and_the_strategy_is_shown():
    case = GOLDEN / "encrypted_gcm"
    result = run("inspect", case / "src", "-s", case / "src_strategy.ckpt")
    text = " ".join(result.stdout.split())
    assert "parallelism parameters in 2 slices x 1 replica, 1 stage" in text
    assert "complete no: ranks 0, 1 cannot be read" in text


def test_all_has_a_line_for_each_tensor():
    lines = screen(*SOURCE, "--all").splitlines()
    layout = "columns / 2 (2, 2, 2) - (1) 0,1,4,5 | 2,3,6,7"
    assert f" accum.layer1.weight 64 x 32 Float32 {layout}" in lines
    assert " global_step 1 Int32 not listed 0-7" in lines
    layouts = screen(CASE / "src_strategy.ckpt", "--all").splitlines()
    assert f" layer1.weight {layout}" in layouts


def test_all_names_the_file_of_each_tensor_of_several_files(tmp_path):
    run_well("merge", *SOURCE, "-o", tmp_path / "model", "--max-shard-size", "10KB")
    line = " layer1.weight 64 x 32 Float32 8.0 KiB model-00001-of-00006.safetensors"
    assert line in screen(tmp_path / "model", "--all").splitlines()


def test_a_row_of_several_types_names_none():
    text = screen(GOLDEN / "hyper_parallel" / "ms_mixed" / "ckpt")
    assert "\n 3 more no 0-3\n" in text


def test_a_rank_that_holds_several_boxes_is_named_for_each():
    text = screen(GOLDEN / "hyper_parallel" / "newtorch_ragged" / "ckpt")
    assert " ragged.w 6 x 4 x 8 8 boxes 0 | 0 | 1 | 1 | 2 | 2 | 3 | 3\n" in text


def test_a_checkpoint_that_describes_itself_has_the_same_table():
    text = screen(GOLDEN / "hyper_parallel" / "ms_mixed" / "ckpt")
    assert "parameters in 2 slices x 2 replicas or 4 slices x 1 replica\n" in text
    assert " net.w 8 x 12 Float32 rows / 2, columns / 2 0-3, one each" in text


# --------------------------------------------------------------------------------------- strategies


def test_a_strategy_is_shown_with_its_stages_and_shards():
    case = GOLDEN / "optshard_full_adamw"
    text = screen(case / "src_strategy.ckpt")
    assert "a strategy for 8 ranks; 36 tensors, 12 sharded parameters" in text
    assert "1 stage, optimizer shard of 4 or 8 on all 36 tensors" in text
    assert "device matrix (4, 2)" in text
    assert " lm_head.weight rows / 2, opt / 4 0 | 2 | 4 | 6 | 1 | 3 | 5 | 7" in text
    text = screen(case / "src_strategy.ckpt", "--all")
    assert " lm_head.weight rows / 2, opt / 4 (4, 2) (0) - 0 | 2 | 4" in text


@pytest.mark.parametrize(
    "paths", [["strategy_0.ckpt", "strategy_4.ckpt"], ["."], ["merged.json"]], ids=str
)
def test_the_strategies_of_all_stages_are_shown_together(paths):
    text = screen(*(PP2 / path for path in paths))
    assert "a strategy for 8 ranks; 8 tensors, 2 sharded parameters" in text
    assert "2 stages of 4 ranks" in text
    document = json.loads(run_well("inspect", *(PP2 / path for path in paths), "--json").stdout)
    assert (document["kind"], document["ranks"], document["stages"]) == ("strategy", 8, 2)
    layouts = {one["name"]: one["layouts"] for one in document["tensors"]}
    assert [layout["stage"] for layout in layouts["blocks.1.w"]] == [1]


def test_a_strategy_of_one_stage_of_several_is_an_error():
    result = run("inspect", PP2 / "strategy_4.ckpt")
    assert result.exit_code == 4
    said = "strategy_4.ckpt: layouts of stage 1 but not of stage 0 Try: the strategy files of all "
    assert f"{said}pipeline stages, or the merged one" in message(result)


def test_the_patterns_of_a_hand_written_strategy_are_shown(tmp_path):
    path = tmp_path / "hand.yaml"
    path.write_text(
        "ckpttool_strategy: 1\nranks: 8\nparameters:\n"
        '  "layers.*.weight": {axis: 0, parts: 4}\notherwise: replicated\n'
    )
    text = screen(path)
    assert "a strategy for 8 ranks; 1 pattern, all other parameters replicated" in text
    assert " layers.*.weight axis 0 / 4 0,1 | 2,3 | 4,5 | 6,7" in text
    document = json.loads(run_well("inspect", path, "--json").stdout)
    (rule,) = document["rules"]
    assert (rule["pattern"], document["replicates_rest"]) == ("layers.*.weight", True)


def test_a_name_without_a_pattern_leaves_the_rest_known(tmp_path):
    ranks = {
        rank: {f"l.{i}.w": noise(f"{i}{rank // 2}", "Float32", (4, 4)) for i in range(3)}
        | {"extra": noise("x", "Float32", (5,))}
        for rank in range(4)
    }
    source = write_ranks(tmp_path / "src", ranks, "ckpt")
    path = tmp_path / "hand.yaml"
    for pattern, parallelism in (
        ("*.w", "parameters in 2 slices x 2 replicas"),
        ("z", "not known"),
    ):
        path.write_text(
            f"ckpttool_strategy: 1\nranks: 4\nparameters:\n  '{pattern}': {{axis: 0, parts: 2}}\n"
        )
        result = run("inspect", source, "-s", path)
        text = " ".join(result.stdout.split())
        assert result.exit_code == 5
        assert f"parallelism {parallelism}" in text
        assert "complete not known: the strategy does not fit the checkpoint" in text
        assert ("l.{0-2}.w 8 x 4 rows / 2 0,1 | 2,3" in text) == (pattern == "*.w")
        assert ("not in the strategy, equal on all ranks: extra" in text) == (pattern == "*.w")
        assert "hand.yaml: no pattern matches" in message(result)


def test_several_checkpoints_are_not_shown_together():
    result = run("inspect", CASE / "src", LLAMA / "src")
    assert result.exit_code == 2
    said = "inspect takes one checkpoint, or strategy files, and 2 were given "
    assert f"{said}{CASE / 'src'}, {LLAMA / 'src'} Try: ckpttool inspect {GOLDEN} ..." in message(
        result
    )


def test_a_strategy_beside_a_checkpoint_belongs_behind_its_option():
    for words in ((SOURCE[0], SOURCE[2]), (SOURCE[2], SOURCE[0])):
        result = run("inspect", *words)
        assert result.exit_code == 2
        assert f"Try: ckpttool inspect {SOURCE[0]} -s {SOURCE[2]}" in message(result)


@pytest.mark.parametrize("kind", ["strategy", "table"])
def test_what_is_not_a_checkpoint_refuses_the_options_of_one(tmp_path, kind):
    path = SOURCE[2]
    if kind == "table":
        device = {"device_id": "0", "device_ip": "1.1.1.1", "rank_id": "0"}
        servers = [{"server_id": "10.0.0.1", "device": [device]}]
        path = tmp_path / "rank_table.json"
        path.write_text(json.dumps({"version": "1.0", "server_list": servers}), encoding="utf-8")
    run_well("inspect", path, "--color", "never", "--debug")
    result = run("inspect", path, "--ranks", "--crc", "--step", "9")
    assert result.exit_code == 2
    assert "error[usage]: options for checkpoints only: --step, --crc, --ranks" in message(result)


def test_quiet_prints_warnings_and_errors_only(tmp_path):
    for path in (SOURCE[0], SOURCE[2]):
        assert message(run_well("inspect", path, "-q")) == ""
    shutil.copytree(SOURCE[0], tmp_path / "src")
    shutil.rmtree(tmp_path / "src" / "rank_3")
    said = message(run_well("inspect", tmp_path / "src", *SOURCE[1:], "-q"))
    assert said.startswith("warning[missing_replica]:")


# ---------------------------------------------------------------------------------------- terminals


@pytest.fixture
def terminal(capsys, monkeypatch):
    """A function: the lines of a checkpoint's screen on a terminal of so many columns."""

    def lines(width, case, **more):
        for module in (overview, tables):
            monkeypatch.setattr(module, "terminal_columns", lambda stream: width)
        catalog = ckpttool.scan(str(case / "src"))
        strategy = ckpttool.read_strategy(str(case / "src_strategy.ckpt"))
        examined = inspect.examine(catalog, strategy)
        overview.print_checkpoint(examined, **{"show_all": False, "show_ranks": False} | more)
        return capsys.readouterr().out.splitlines()

    return lines


@pytest.mark.parametrize("width", [60, 80, 140])
@pytest.mark.parametrize("case", [CASE, LLAMA], ids=lambda case: case.name)
def test_no_line_is_wider_than_the_terminal_unless_one_word_is(terminal, case, width):
    for line in terminal(width, case):
        assert len(line) <= max(width, 14 + max(map(len, line.split()), default=0))


@pytest.mark.parametrize(
    ("width", "heads", "group"),
    [
        (80, "tensors full shape sharded", "0,2,4,6 | 1,3,5,7"),
        (60, "tensors full shape", "rows / 2 0,2,4,6 | 1,3,5,7"),
    ],
)
@pytest.mark.parametrize("show_all", [False, True])
def test_a_tensor_is_one_line_below_the_ranks_of_its_slices(
    terminal, width, heads, group, show_all
):
    lines = [" ".join(line.split()) for line in terminal(width, MODEL, show_all=show_all)]
    names = [line.split()[0] for line in lines if re.search("weight .*32 x 16", line)]
    if not show_all:
        assert heads in lines
        assert lines.count(group) == 1
        assert names[-1] == "lm_head.weight"
    assert len(names) >= 3


def test_at_20_columns_heads_are_indented_like_their_cells(terminal):
    lines = terminal(20, MODEL)
    rule = next(i for i, line in enumerate(lines) if "──" in line)
    assert lines[rule - 5 : rule] == [
        *("  full shape", "  sharded", "  ranks of each", "  slice"),
        "    tensors",
    ]
    assert len(lines[rule]) == 20
    assert lines[rule + 1 : rule + 6] == [
        *("  32 x 16", "  rows / 2", "  0,2,4,6 | 1,3,5,7"),
        "    model.tok_embeddings.embedding_weight",
        "    model.layers.0.feed_forward.w{1,3}.weight",
    ]


@pytest.mark.parametrize(
    ("owners", "text"),
    [
        ([range(8)], "0-7"),
        ([[0, 4], [1, 5]], "0,4 | 1,5"),
        ([[rank] for rank in range(4096)], "0-4095, one each"),
        ([[rank] for rank in (0, 2, 1, 3)], "0 | 2 | 1 | 3"),
        ([range(0, 4096, 2), range(1, 4096, 2)], "2 slices x 2048 ranks"),
        ([range(0, 512, 2)], "256 ranks"),
        ([range(40), range(40, 79), [80, 82, 84, 86, 88, 90, 92]], "3 slices x 7-40 ranks"),
    ],
    ids=str,
)
def test_the_ranks_of_each_slice_stay_short(owners, text):
    assert overview.groups_text(owners, 30) == text


@pytest.mark.parametrize(
    ("counts", "shard", "owners", "text"),
    [
        ((2, 1), 1, 2, "rows / 2"),
        ((8, 2), 4, 16, "rows / 2, columns / 2, opt / 4"),
        ((4,), 4, 4, "opt / 4"),
        ((1, 3, 1), 1, 3, "axis 1 / 3"),
        (None, 1, 5, "5 boxes"),
        ((1, 1), 1, 1, "no"),
    ],
)
def test_how_a_tensor_is_sharded_is_said_in_words(counts, shard, owners, text):
    ranks = tuple((rank,) for rank in range(owners))
    placement = Placement("layout", counts, ranks, optimizer_shard=shard)
    assert overview.sharded_text(placement) == text


def test_uneven_slices_are_named_by_their_rows():
    case = GOLDEN / "uneven_manual_split"
    text = screen(case / "src", "-s", case / "src_strategy.ckpt")
    assert " embedding_table 16 x 8 rows / 6 + 10 0 | 1\n" in text


def test_a_name_with_an_escape_sequence_is_spelled_out(tmp_path):
    bad = "evil\x1b[31m.weight"
    write_ranks(tmp_path / "src", {r: {bad: noise("w", "Float32", (4,))} for r in (0, 1)}, "ckpt")
    text = screen(tmp_path / "src")
    assert "\x1b" not in text
    assert r"evil\x1b[31m.weight" in text
