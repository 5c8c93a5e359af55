"""Parameters that no strategy lists, and that only some ranks of their stage have."""

from __future__ import annotations

import json
import shutil

import pytest

from tests.support.checkpoints import (
    noise,
    write_ranks,
)
from tests.support.commands import message, run, run_well
from tests.support.corpus import GOLDEN
from tests.support.readers import read, read_ranks

CASE = GOLDEN / "tutorial_8_to_8_retrain"  # every slice is on two or four ranks
STAGED = GOLDEN / "pipeline_2x4_to_8"
# --------------------------------------------------------------------------- at the command line


def changed(case, tmp_path, rank, old, new):
    """The folder of a case with one name in a rank's file changed."""
    folder = shutil.copytree(case / "src", tmp_path / "src")
    (path,) = (folder / f"rank_{rank}").glob("*.ckpt")
    data = path.read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, new, 1))
    return folder, ("-s", case / "src_strategy.ckpt")


@pytest.mark.parametrize(
    ("case", "rank", "old", "new"),
    [
        (CASE, 3, b"global_step", b"globol_stef"),
        (CASE, 3, b"layer1.weight", b"layer9.weighv"),
        (STAGED, 6, b"global_step", b"globol_stef"),
    ],
)
def test_a_renamed_parameter_is_an_error_that_names_unlisted(case, rank, old, new, tmp_path):
    folder, strategy = changed(case, tmp_path, rank, old, new)
    words = ["merge", folder, *strategy, "-o", tmp_path / "out.ckpt"]
    result = run(*words)
    assert result.exit_code == 5
    said = f"{new.decode()}: not in the strategy, and only on rank {rank}"
    assert said in message(result)
    assert f": {old.decode()}, on all other ranks, is missing" in message(result)
    assert "--unlisted first, rank or drop" in message(result)
    assert not (tmp_path / "out.ckpt").exists()
    for more in ((), ("--deep",)):
        verified = run("verify", folder, *strategy, "--json", *more)
        assert verified.exit_code == 1
        kinds = {(f["code"], tuple(f["ranks"])) for f in json.loads(verified.stdout)["findings"]}
        assert kinds == {("unlisted", (rank,)), ("lacking", (rank,))}
    told = run_well(*words, "--unlisted", "drop")
    assert "warning" in told.stderr
    run_well("merge", case / "src", *strategy, "-o", tmp_path / "whole.ckpt")
    assert read(tmp_path / "out.ckpt") == read(tmp_path / "whole.ckpt")


def test_a_parameter_that_one_of_eight_ranks_lacks_is_a_warning(tmp_path):
    ranks = read_ranks(CASE / "src")
    del ranks[5]["global_step"]
    folder, strategy = write_ranks(tmp_path / "src", ranks, "ckpt"), CASE / "src_strategy.ckpt"
    result = run_well("merge", folder, "-s", strategy, "-o", tmp_path / "out.h5", "-q")
    said = f"global_step: not in the strategy, and not on rank 5 {folder}/rank_5/net.ckpt: "
    assert f"warning[partly_held]: {said}" in message(result)
    verified = run("verify", folder, "-s", strategy, "--deep")
    assert (verified.exit_code, said in message(verified)) == (1, True)


def test_what_each_rank_has_of_its_own_name_is_a_question(tmp_path):
    ranks = read_ranks(CASE / "src")
    for rank, entries in ranks.items():
        entries[f"rng_state.{rank}"] = noise(f"rng{rank}", "Int32", (5,))
    folder, strategy = write_ranks(tmp_path / "src", ranks, "ckpt"), CASE / "src_strategy.ckpt"
    words = ["merge", folder, "-s", strategy, "-o", tmp_path / "out.ckpt"]
    assert run(*words).exit_code == 5
    run_well(*words, "--unlisted", "first")
    assert read(tmp_path / "out.ckpt")["rng_state.7"] == ranks[7]["rng_state.7"]
