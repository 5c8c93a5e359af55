"""Parameters that are cut and that the strategy does not list, as frozen ones are by default.

``only_trainable_params`` leaves them out of the file.  Only the user can say how they are cut.
"""

from __future__ import annotations

import json

import pytest

from tests.support.checkpoints import noise, write_ranks
from tests.support.commands import files_below, mentions, message, run, run_well
from tests.support.file_bytes import layout, operator, strategy
from tests.support.readers import Entry, read, read_ranks

FULL = {
    "w": noise("w", "Float32", (8, 8)),
    "emb": noise("emb", "Float16", (8, 4)),
    "zeros": Entry("Float32", (8,), bytes(32)),
    "rate": Entry("Float32", (2,), b"12345678"),
}
HAND = {"emb": {"axis": 0}, "zeros": [4]}


def held(ranks, undivided=("rate",)):
    """What each of so many ranks holds."""
    return {
        rank: {
            name: entry
            if name in undivided
            else entry.excerpt(slice(*(entry.shape[0] * one // ranks for one in (rank, rank + 1))))
            for name, entry in FULL.items()
        }
        for rank in range(ranks)
    }


@pytest.fixture
def run_of_four(tmp_path):
    """A folder of four ranks; the words that name it and the strategies, which list w alone."""
    for ranks in (2, 4):
        path = tmp_path / f"s{ranks}.ckpt"
        path.write_bytes(strategy(operator(0), layout("w", (ranks,), (0, -1))))
        hand = {"ckpttool_strategy": 1, "parameters": {**HAND, "zeros": [ranks]}}
        (tmp_path / f"more{ranks}.json").write_text(json.dumps(hand))
    write_ranks(tmp_path / "run", held(4), "ckpt")
    return [tmp_path / "run", "-s", tmp_path / "s4.ckpt"]


def test_slices_that_the_strategy_omits_are_a_question_that_names_the_way_out(
    run_of_four, tmp_path
):
    result = run("merge", *run_of_four, "-o", tmp_path / "out" / "full.h5")
    assert result.exit_code == 5
    facts = [
        "emb: not in the strategy, and different between ranks",
        r"-s MORE\.yaml if they are slices",
    ]
    assert not mentions(message(result), *facts)
    assert not files_below(tmp_path / "out")


def test_slices_of_which_contents_tell_nothing_are_pointed_out(run_of_four, tmp_path):
    """Zeros are the same on all ranks, and one rank's slice looks like all of them."""
    words = ["-o", tmp_path / "full.h5", "--unlisted", "drop"]
    result = run_well("merge", *run_of_four, *words)
    assert not mentions(
        message(result), r"with equal elements on all ranks: read in full zeros Try: "
    )
    assert read(tmp_path / "full.h5")["zeros"].shape == (2,)


def test_a_strategy_by_hand_beside_mindspores_says_how_they_are_cut(run_of_four, tmp_path):
    source = [*run_of_four, "-s", tmp_path / "more4.json"]
    result = run_well("merge", *source, "-o", tmp_path / "full.h5")
    assert read(tmp_path / "full.h5") == FULL
    assert "are slices" not in message(result)
    target = ["-d", tmp_path / "s2.ckpt", "-d", tmp_path / "more2.json"]
    for command, words in (("reshard", source), ("split", [tmp_path / "full.h5"])):
        run_well(command, *words, *target, "-o", tmp_path / command)
        assert read_ranks(tmp_path / command) == held(2)


def test_what_only_the_source_knows_to_cut_is_undivided_in_the_target(run_of_four, tmp_path):
    words = ["-s", tmp_path / "more4.json", "-d", tmp_path / "s2.ckpt", "-o", tmp_path / "out"]
    result = run_well("reshard", *run_of_four, *words)
    assert read_ranks(tmp_path / "out") == held(2, undivided=("rate", "emb", "zeros"))
    assert not mentions(
        message(result), r"not in the target strategy, written in full .*emb, zeros"
    )
