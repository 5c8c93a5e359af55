"""Sets of some ranks alone (--rank): complete in themselves, as their manifest says."""

from __future__ import annotations

import json
import shutil

import pytest

from tests.support.checkpoints import noise, write_file
from tests.support.commands import message, run, run_well, verify_document
from tests.support.executors import CASE, reshard_words

STRATEGY = ["-s", str(CASE / "dst_strategy.ckpt")]


def verified(folder, *more):
    return verify_document(folder, *more, "--ignore", "zero")


@pytest.mark.parametrize("more", [[], ["--deep"], STRATEGY, [*STRATEGY, "--deep"]])
@pytest.mark.parametrize(("ranks", "others"), [("0,2-3", "rank 1"), ("3", "ranks 0-2")])
def test_what_was_not_asked_for_is_not_missing(tmp_path, ranks, others, more):
    run_well(*reshard_words(tmp_path, "ckpt"), "--rank", ranks)
    document = verified(tmp_path, *more)
    assert document["findings"] == []
    (note,) = [one for one in document["notes"] if one["code"] == "part"]
    named = {"0,2-3": "ranks 0, 2, 3", "3": "rank 3"}[ranks]
    written = f"{tmp_path}/ckpttool.json: written only for {named} (--rank)"
    assert (note["text"], note["facts"]) == (written, f"{others}: not expected")
    merged = run("merge", tmp_path, *STRATEGY, "-o", tmp_path / "m.ckpt")
    assert merged.exit_code == 5  # which is another question
    assert f"{others}: no checkpoint file found in" in message(merged)
    hint = "Try: write all ranks, without --rank, or restore the files"
    assert f"{written}; --json lists each {hint}" in message(merged)


@pytest.mark.parametrize("more", [[], STRATEGY])
def test_inspect_shows_what_was_asked_for_and_calls_nothing_lost(tmp_path, more):
    run_well(*reshard_words(tmp_path, "ckpt"), "--rank", "0,2-3")
    result = run_well("inspect", tmp_path, *more)
    text = f"note: {tmp_path}/ckpttool.json: written only for ranks 0, 2, 3 (--rank) "
    assert f"{text}rank 1: not expected" in message(result)
    assert "no checkpoint file" not in message(result)
    shutil.rmtree(tmp_path / "rank_2")
    result = run("inspect", tmp_path, *more)
    assert result.exit_code == (5 if more else 0)
    assert "rank 2: no checkpoint file found in" in message(result)


@pytest.mark.parametrize("more", [[], STRATEGY])
def test_of_ranks_that_are_gone_those_that_were_asked_for_are_named(tmp_path, more):
    run_well(*reshard_words(tmp_path, "ckpt"), "--rank", "0-1,3")
    shutil.rmtree(tmp_path / "rank_1")
    code = "missing" if more else "missing_rank"
    found = [one for one in verified(tmp_path, *more)["findings"] if one["code"] == code]
    assert found
    for one in found:
        assert one["ranks"] == [1]
        assert "rank 1: no checkpoint file found" in f"{one['text']} {one['facts']}"


def test_a_set_whose_manifest_is_damaged_may_have_been_written_for_all(tmp_path):
    run_well(*reshard_words(tmp_path, "ckpt"), "--rank", "0,2-3")
    path = tmp_path / "ckpttool.json"
    path.write_bytes(path.read_bytes()[:-1])
    assert {one["code"] for one in verified(tmp_path, *STRATEGY)["findings"]} == {
        "manifest",
        "missing",
    }


def test_the_data_of_tensors_that_are_not_all_there_are_looked_at(tmp_path):
    layout = {"dev_matrix": [2], "tensor_map": [0, -1]}
    (tmp_path / "s.json").write_text(json.dumps({"parallel_layout_item": {"w": layout}}))
    entry = noise("w", "Float32", (2, 4))
    nan = b"\0\0\xc0\x7f"
    write_file(tmp_path / "m.ckpt", {"w": type(entry)("Float32", (2, 4), nan * 8)}, "ckpt")
    words = ["split", tmp_path / "m.ckpt", "-d", tmp_path / "s.json", "-o", tmp_path / "out"]
    run_well(*words, "--format", "ckpt", "--rank", "1")
    (found,) = verified(tmp_path / "out", "-s", tmp_path / "s.json", "--deep")["findings"]
    assert (found["code"], found["ranks"], found["count"]) == ("nan", [1], 4)
