"""Full checkpoints in several files, where ``e2e/saves/indexed.txt`` cannot say it."""

from __future__ import annotations

import json

import pytest

import ckpttool
from tests.support.checkpoints import write_indexed
from tests.support.commands import mentions, message, run, run_well
from tests.support.corpus import GOLDEN
from tests.support.readers import read, read_indexed, read_ranks


def test_numbers_in_an_index_may_have_any_number_of_digits(tmp_path):
    names = [f"part{'1' * 5000}.safetensors", f"a/{'0' * 4999}2.h5", f"b/{'3' * 100}/x.h5"]
    index = {"weight_map": dict(zip("xyz", names, strict=True))}
    (tmp_path / "param_name_map.json").write_text(json.dumps(index))
    result = run("inspect", tmp_path)
    assert result.exit_code != 0
    assert "internal error" not in message(result)
    assert not mentions(message(result), "File name too long|the file is missing")


@pytest.mark.parametrize("case", sorted(GOLDEN.glob("*/golden/unified")), ids=lambda p: p.parts[-3])
def test_mindspores_own_is_written_in_parts_and_read_again(case, tmp_path):
    run_well("merge", case, "-o", tmp_path / "parts", "--max-shard-size", "4KB")
    run_well("merge", tmp_path / "parts", "-o", tmp_path / "full.safetensors")
    want = read(case / "part0.safetensors") | read(case / "hyper_param.safetensors")
    assert read_indexed(tmp_path / "parts") == read(tmp_path / "full.safetensors") == want
    assert not ckpttool.scan(str(tmp_path / "parts")).diagnostics


def test_split_of_a_folder_is_split_of_the_file(tmp_path):
    folder = GOLDEN / "safetensors_pipeline"
    unified = folder / "golden" / "unified"
    words = ["-d", folder / "dst_strategy.ckpt", "--format", "ckpt", "-o"]
    run_well("merge", unified, "-o", tmp_path / "full.ckpt")
    run_well("split", unified, *words, tmp_path / "one")
    run_well("split", tmp_path / "full.ckpt", *words, tmp_path / "two")
    assert read_ranks(tmp_path / "one") == read_ranks(tmp_path / "two")


# --------------------------------------------------------------------- an index for every rank


def test_ranks_in_several_files_each_are_refused_with_the_way_round(tmp_path):
    case = GOLDEN / "safetensors_reshard"
    whole = read_ranks(case / "src")
    for rank, entries in whole.items():
        files = {"part0.safetensors": dict(list(entries.items())[::2])}
        files["part1.safetensors"] = dict(list(entries.items())[1::2])
        write_indexed(tmp_path / "src" / f"rank_{rank}", files)
    output = message(run("inspect", tmp_path / "src"))
    assert "a rank has several files and an index; expected one file for each rank" in output
    for rank in whole:
        words = ["merge", tmp_path / "src" / f"rank_{rank}", "--replicated"]
        assert rank or " ".join(map(str, words)) in output
        run_well(*words, "-o", tmp_path / "ONE" / f"rank_{rank}" / "net.safetensors")
    assert read_ranks(tmp_path / "ONE") == whole
    run_well("verify", tmp_path / "ONE", "-s", case / "src_strategy.ckpt")
