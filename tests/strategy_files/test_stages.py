"""The strategy files of stages as one: copied item by item, as MindSpore merges them."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from ckpttool.problems import StrategyError
from ckpttool.strategy_files.reader import read_strategy
from ckpttool.strategy_files.stages import merge_stages
from tests.support.corpus import GOLDEN
from tests.support.file_bytes import layout, message, number, operator, strategy

MERGED = sorted(GOLDEN.glob("*/src_stage_strategies"))  # MindSpore merged each, beside the folder


def in_its_order(folder):
    files = [str(path) for path in sorted(folder.iterdir())]
    (whole,) = folder.parent.glob("src_strategy.*")
    data = whole.read_bytes()
    first = min(range(2), key=lambda stage: data.find(f"{stage}-".encode()))
    return (files if first == 0 else files[::-1]), whole.name, data


@pytest.mark.parametrize("folder", MERGED, ids=lambda path: path.parent.name)
def test_the_file_is_the_one_that_mindspore_makes_byte_for_byte(folder):
    files, name, theirs = in_its_order(folder)
    merged, ours = merge_stages(files, name)
    assert ours == theirs
    assert merged.layouts == read_strategy(str(folder)).layouts


def test_the_corpus_has_both_forms_and_a_stage_of_several_files():
    assert {path.suffix for folder in MERGED for path in folder.iterdir()} == {".ckpt", ".json"}
    assert max(len([*folder.iterdir()]) for folder in MERGED) == 8


@pytest.fixture
def write(tmp_path):
    def written(name, *items):
        path = tmp_path / name
        path.write_bytes(strategy(*items))
        return str(path)

    return written


def test_what_no_reader_knows_is_copied_and_only_names_change(write):
    later = message(9, b"later")
    items = [operator(0), message(3, message(1, b"w"), message(2, later), later, number(12, 7))]
    path = write("a.ckpt", *items, layout("v", (1,), (-1,)))
    _, data = merge_stages([path], "m.ckpt")
    renamed = message(3, message(1, b"0-w"), message(2, later), later, number(12, 7))
    assert data == number(1, 1) + items[0] + renamed + layout("0-v", (1,), (-1,))


def test_the_first_file_of_a_stage_counts_and_a_merged_copy_does_not(write, tmp_path):
    a = write("a.ckpt", operator(0), layout("w", (2,), (0,)))
    b = write("b.ckpt", operator(1), layout("w", (2,), (0,)))
    again = write("c.ckpt", operator(1), layout("w", (2,), (0,), step=3))
    _, data = merge_stages([a, b], "m.ckpt")
    (tmp_path / "merged.ckpt").write_bytes(data)
    assert merge_stages([a, b, again, str(tmp_path / "merged.ckpt")], "m.ckpt")[1] == data


@pytest.mark.parametrize("damage", ["other layouts", "cut short"])
@pytest.mark.parametrize("case", ["pipeline_2x4_to_8", "json_strategy_pipeline"])
def test_a_merged_file_that_is_named_is_never_ignored(case, damage, tmp_path):
    files, name, theirs = in_its_order(GOLDEN / case / "src_stage_strategies")
    copy = tmp_path / f"merged{Path(name).suffix}"
    for path in map(Path, files):
        shutil.copy(path, tmp_path / f"stage_{path.name}")
    wrong = theirs.replace(b"1-", b"0-")  # the layouts of the last stage in the first
    copy.write_bytes(theirs[:-40] if damage == "cut short" else wrong)
    whole, ours = merge_stages(str(tmp_path), name)  # the folder may have one of an earlier run
    assert ours == merge_stages(sorted(map(str, tmp_path.glob("stage_*"))), name)[1]
    assert whole.notes
    with pytest.raises(StrategyError, match="merged already, and it contradicts") as error:
        merge_stages(sorted(map(str, tmp_path.iterdir())), name)
    assert "ignored, as" not in str(error.value)


def test_what_is_not_a_file_of_a_stage_is_refused(write, tmp_path):
    a = write("a.ckpt", operator(0), layout("w", (2,), (0,)))
    late = write("b.ckpt", operator(1), layout("w", (2,), (0,)))
    other = write("c.ckpt", operator(0), layout("w", (2,), (-1,)))
    bare = write("d.ckpt", layout("w", (2,), (0,)))
    hand = tmp_path / "hand.yaml"
    hand.write_text("ckpttool_strategy: 1\nranks: 2\nparameters: {v: [2]}\n")
    text = tmp_path / "e.json"
    text.write_text(
        json.dumps({"parallel_layout_item": {"w": {"dev_matrix": [2], "tensor_map": [0]}}})
    )
    whole = tmp_path / "whole.ckpt"
    whole.write_bytes(merge_stages([a, late], "m.ckpt")[1])
    for paths, out, said in [
        ([late], "m.ckpt", "layouts of stage 1 but not of stage 0"),
        ([a, other], "m.ckpt", "stage 0 has other layouts"),
        ([bare], "m.ckpt", "no items of operators, which alone have the stage"),
        ([a, str(hand)], "m.ckpt", "hand.yaml: not a strategy file of MindSpore's"),
        ([a, str(text)], "m.ckpt", "e.json: JSON, and others are protobuf"),
        ([a, late], "m.json", "m.json: the files of the stages are protobuf"),
        ([str(text)], "m.ckpt", "m.ckpt: the files of the stages are JSON"),
        ([str(whole)], "m.ckpt", "whole.ckpt: merged already"),
    ]:
        with pytest.raises(StrategyError, match=re.escape(said)):
            merge_stages(paths, out)
