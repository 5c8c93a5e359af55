"""What the program says of inputs that are broken, odd, or only look so.

The variants are MindSpore's own files, damaged in one place each; ``case.json`` tells what was
done and how MindSpore 2.10 reacted. It takes a third of them in silence and writes wrong data.
"""

from __future__ import annotations

import json
import shutil

import pytest

from tests.support import corpus
from tests.support.commands import files_below, mentions, message, run, run_well
from tests.support.corpus import BROKEN
from tests.support.readers import read

FACTS = json.loads((BROKEN / "case.json").read_text(encoding="utf-8"))["variants"]

# Exit code, and what the message has to contain: where, what was expected, what was found.
REFUSED = {
    "missing_rank": (5, ["rank 2", "weight"]),
    "truncated": (3, ["rank_1/checkpoint-2_10.ckpt"]),
    "truncated_at_value": (5, ["rank 1", "moments.weight"]),
    "garbage": (3, ["rank_3/checkpoint-2_10.ckpt"]),
    "empty_file": (3, ["rank_0/checkpoint-2_10.ckpt", "weight", r"empty \(0 bytes\)"]),
    "shape_mismatch": (5, ["weight", "rank 2", r"\(1, 8\)", r"\(2, 8\)"]),
    "dtype_mismatch": (5, ["weight", "rank 1", "Float16", "Float32"]),
    "missing_param": (5, ["rank 3", r"moments\.weight"]),
    "short_content": (3, ["rank_0/checkpoint-2_10.ckpt", r"\b64\b", r"\b60\b"]),
    "unknown_type": (3, ["rank_0/checkpoint-2_10.ckpt", "Float7", "weight"]),
    "duplicate_tag": (3, ["rank_0/checkpoint-2_10.ckpt", "weight", "twice"]),
    "map_tensor": (5, ["table", "map parameter", "only on rank 0", "--unlisted"]),
    "strategy_empty": (4, [r"src_strategy\.ckpt", "empty|0 bytes"]),
    "strategy_garbage": (4, [r"src_strategy\.ckpt"]),
    "strategy_other_net": (5, ["no parameter in common|share no parameter|in common"]),
    "strategy_rank_mismatch": (5, ["weight", r"\b3\b|three", r"\b2\b|two|\(2, 8\)"]),
    "missing_stage": (4, ["stage 1"]),
    "mixed_formats": (5, [r"rank_0|rank 0", r"checkpoint-2_10\.ckpt", r"extra\.safetensors"]),
    "not_divisible": (5, ["weight", r"\b8\b", r"\b3\b", r"\b2\b", r"\b4\b"]),
    "odd_folder": (5, ["rank 9 is not in the strategy", "is for ranks 0-3"]),
}

# Legal after all, or not checked by anyone yet: the result is the one MindSpore gives.
ACCEPTED = ["unknown_fields", "strategy_without_opt_fields", "crc_damaged"]


def convert(variant, out, source=None):
    """Merge a variant, or reshard it where the destination is what is wrong with it."""
    folder = BROKEN / variant
    words = [source or folder / "src", "-o", out, "-s", folder / "src_strategy.ckpt"]
    if (folder / "dst_strategy.ckpt").exists():
        return run("reshard", *words, "-d", folder / "dst_strategy.ckpt")
    return run("merge", *words)


def by_mindspore(variant):
    """What MindSpore's merge of a variant holds."""
    return {
        0: {
            name: (entry["dtype"], tuple(entry["shape"]), entry["sha256"])
            for name, entry in FACTS[variant]["mindspore_output"]["0"].items()
        }
    }


def test_every_variant_is_tried():
    assert REFUSED.keys() | set(ACCEPTED) == FACTS.keys()
    assert {path.name for path in BROKEN.iterdir() if path.is_dir()} == FACTS.keys()


@pytest.mark.parametrize("variant", REFUSED)
def test_a_broken_input_is_refused_with_the_place_and_the_reason(variant, tmp_path):
    exit_code, facts = REFUSED[variant]
    result = convert(variant, tmp_path / "out.h5")
    assert result.exit_code == exit_code, result.output
    assert not mentions(message(result), *facts), result.output
    assert not files_below(tmp_path)


@pytest.mark.parametrize("variant", REFUSED)
def test_a_refusal_leaves_an_older_result_alone(variant, tmp_path):
    out = tmp_path / "out.h5"
    if (BROKEN / variant / "dst_strategy.ckpt").exists():
        out.mkdir()
        older = out / "rank_0" / "checkpoint_0.h5"
        older.parent.mkdir()
    else:
        older = out
    older.write_bytes(b"older")
    convert(variant, out)
    assert files_below(tmp_path) == [str(older.relative_to(tmp_path))]
    assert older.read_bytes() == b"older"


@pytest.mark.parametrize("variant", ACCEPTED)
def test_an_odd_but_legal_input_merges_as_with_mindspore(variant, tmp_path):
    out = tmp_path / "out.h5"
    result = convert(variant, out)
    assert result.exit_code == 0, result.output
    assert not corpus.differences(by_mindspore(variant), corpus.digests({0: read(out)}))


def test_a_folder_merges_once_the_rank_of_no_stage_is_gone(tmp_path):
    source = tmp_path / "src"
    shutil.copytree(BROKEN / "odd_folder" / "src", source)
    shutil.rmtree(source / "rank_9")
    out = tmp_path / "out.h5"
    result = convert("odd_folder", out, source)
    assert result.exit_code == 0, result.output
    assert not corpus.differences(by_mindspore("odd_folder"), corpus.digests({0: read(out)}))


def test_mixed_formats_merge_once_the_stray_file_is_gone(tmp_path):
    source = tmp_path / "src"
    shutil.copytree(BROKEN / "mixed_formats" / "src", source)
    (source / "rank_0" / "extra.safetensors").unlink()
    strategy = BROKEN / "mixed_formats" / "src_strategy.ckpt"
    run_well("merge", source, "-o", tmp_path / "out.h5", "-s", strategy)
    assert read(tmp_path / "out.h5")["weight"].shape == (8, 8)


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
