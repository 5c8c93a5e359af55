"""What the program says of inputs that are broken, odd, or only look so.

The variants are MindSpore's own files, damaged in one place each; ``case.json`` tells what was
done and how MindSpore 2.10 reacted. It takes a third of them in silence and writes wrong data.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.support import corpus
from tests.support.commands import run
from tests.support.corpus import BROKEN
from tests.support.readers import read
from tests.support.snapshots import check_snapshot

FACTS = json.loads((BROKEN / "case.json").read_text(encoding="utf-8"))["variants"]

# The exit code of a conversion; what is said besides is in ``snapshots/broken/VARIANT.txt``.
REFUSED = {
    "missing_rank": 5,
    "truncated": 3,
    "truncated_at_value": 5,
    "garbage": 3,
    "empty_file": 3,
    "shape_mismatch": 5,
    "dtype_mismatch": 5,
    "missing_param": 5,
    "short_content": 3,
    "unknown_type": 3,
    "duplicate_tag": 3,
    "map_tensor": 5,
    "strategy_empty": 4,
    "strategy_garbage": 4,
    "strategy_other_net": 5,
    "strategy_rank_mismatch": 5,
    "missing_stage": 4,
    "mixed_formats": 5,
    "not_divisible": 5,
    "odd_folder": 5,
}

# Legal after all, or not checked by anyone yet: the result is the one MindSpore gives.
ACCEPTED = ("unknown_fields", "strategy_without_opt_fields", "crc_damaged")

# Of these is every document in the snapshot, of the others that of merge.
IN_JSON = ("missing_rank", "mixed_formats", "strategy_other_net", "unknown_type")


def by_mindspore(variant):
    return {
        0: {
            name: (entry["dtype"], tuple(entry["shape"]), entry["sha256"])
            for name, entry in FACTS[variant]["mindspore_output"]["0"].items()
        }
    }


def assert_merged(variant):
    assert not corpus.differences(by_mindspore(variant), corpus.digests({0: read(Path("m.ckpt"))}))


def test_every_variant_is_tried():
    assert REFUSED.keys() | {*ACCEPTED} == FACTS.keys()
    assert {path.name for path in BROKEN.iterdir() if path.is_dir()} == FACTS.keys()


@pytest.mark.parametrize("variant", FACTS)
def test_a_broken_input_is_answered_as_was_agreed(variant, shell):
    folder = f"golden/broken_inputs/{variant}"
    src, strategy = f"{folder}/src", f"{folder}/src_strategy.ckpt"
    is_of_target = (BROKEN / variant / "dst_strategy.ckpt").exists()
    target = f"{folder}/dst_strategy.ckpt" if is_of_target else strategy
    file = min((BROKEN / variant / "src").glob("rank_*/*"))
    merge = f"merge {src} -s {strategy} -o m.ckpt"
    reshard = f"reshard {src} -s {strategy} -d {target} -o out --format ckpt"
    for line in (
        f"inspect {src} -s {strategy}",
        f"verify {src} -s {strategy} --deep",
        merge,
        reshard,
        f"diff {src} {src} -s {strategy}",
        f"split {src}/{file.parent.name}/{file.name} -d {target} -o out",
    ):
        for option in ("", " --json") if line == merge or variant in IN_JSON else ("",):
            shell.run(line + option)
            if variant in ACCEPTED and line == merge:
                assert_merged(variant)
            shell.clear("m.ckpt", "out")
    refused, older = (
        (reshard, "out/rank_0/checkpoint_0.ckpt") if is_of_target else (merge, "m.ckpt")
    )
    if variant in REFUSED:
        Path(older).parent.mkdir(parents=True, exist_ok=True)
        Path(older).write_bytes(b"older")
        result = run(*refused.split(), "--overwrite")
        assert result.exit_code == REFUSED[variant]
        assert Path(older).read_bytes() == b"older"
        assert sorted(map(str, Path().rglob("*.ckpt"))) == [older]
    check_snapshot(f"broken/{variant}", shell.text())


@pytest.mark.parametrize(
    ("variant", "stray"), [("odd_folder", "rank_9"), ("mixed_formats", "rank_0/extra.safetensors")]
)
def test_a_folder_merges_once_the_stray_file_is_gone(variant, stray, shell):
    shutil.copytree(BROKEN / variant / "src", "src")
    shutil.rmtree(f"src/{stray}") if variant == "odd_folder" else Path("src", stray).unlink()
    shell.quietly(f"merge src -s golden/broken_inputs/{variant}/src_strategy.ckpt -o m.ckpt")
    assert_merged("odd_folder")  # which is the same otherwise


def test_problems_of_different_kinds_exit_with_the_code_of_the_first_kind(tmp_path):
    source = tmp_path / "src"
    shutil.copytree(BROKEN / "garbage" / "src", source)
    shutil.rmtree(source / "rank_2")
    strategy = BROKEN / "garbage" / "src_strategy.ckpt"
    result = run("merge", source, "-o", tmp_path / "out.h5", "-s", strategy)
    assert result.exit_code == 3, result.output
    bad_strategy = BROKEN / "strategy_garbage" / "src_strategy.ckpt"
    shutil.rmtree(source / "rank_3")
    result = run("merge", source, "-o", tmp_path / "out.h5", "-s", bad_strategy)
    assert result.exit_code == 4, result.output
