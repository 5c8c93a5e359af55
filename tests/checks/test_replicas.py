"""``--check-replicas``: every byte of every replica is compared before anything is written."""

import numpy as np
import pytest

from ckpttool.checks.replicas import replica_problems
from tests.support.checkpoints import noise, write_file, write_ranks
from tests.support.commands import everything, message, run, run_well
from tests.support.readers import entry_of


def test_a_file_that_shrinks_while_it_is_compared_is_an_error(tmp_path, monkeypatch):
    write_ranks(tmp_path / "src", {r: {"w": noise("w", "Int8", (64,))} for r in (0, 1)}, "ckpt")
    (tmp_path / "s.json").write_text(
        '{"parallel_layout_item": {"w": {"dev_matrix": [2], "tensor_map": [-1]}}}'
    )

    def shrink(*arguments):
        write_file(tmp_path / "src" / "rank_1" / "net.ckpt", {}, "ckpt")
        return replica_problems(*arguments)

    monkeypatch.setattr("ckpttool.checks.replicas.replica_problems", shrink)
    merge = ["merge", tmp_path / "src", "-s", tmp_path / "s.json", "-o", tmp_path / "m.h5"]
    result = run(*merge, "--check-replicas")
    assert result.exit_code == 5
    assert "rank_1/net.ckpt: changed since its header was read" in message(result)


SLICES = np.split(noise("e", "Float32", (4096, 4)).array(), 2)


def share(folder, damaged, element):
    """Write three stages that share a tensor of two slices; ranks 2k and 2k + 1 have replicas.

    An element of one rank differs.  Return the words of the source.
    """
    held = {rank: SLICES[rank % 4 // 2].copy() for rank in range(12)}
    held[damaged].flat[element] = 0.5
    ranks = {rank: {"e": entry_of(array)} for rank, array in held.items()}
    write_ranks(folder / "src", ranks, "ckpt")
    strategy = folder / "s.yaml"
    strategy.write_text("ckpttool_strategy: 1\nranks: 12\nstages: 3\nparameters:\n  e: [2, 1]\n")
    return folder / "src", "-s", strategy


@pytest.mark.parametrize(("damaged", "pair"), [(1, "0|1"), (5, "4|5"), (7, "6|7"), (10, "10|11")])
def test_replicas_of_every_stage_are_compared(tmp_path, damaged, pair):
    element = 3000  # that no sample shows
    source = share(tmp_path, damaged, element)
    result = run("merge", *source, "-o", tmp_path / "m.h5", "--check-replicas")
    assert result.exit_code == 5
    low, high = pair.split("|")
    text = " ".join(everything(result).split())
    assert f"1 of 8192 elements of the slice; rank {low} differs from rank {high}; " in text
    assert f"first at ({damaged % 4 // 2 * 2048 + element // 4}, 0) of (4096, 4)" in text
    run_well("merge", *source, "-o", tmp_path / "m.h5")


@pytest.mark.parametrize(("damaged", "pair"), [(5, "4|5"), (10, "10|11"), (11, "10|11")])
def test_diff_samples_the_replicas_of_every_stage(tmp_path, damaged, pair):
    source = share(tmp_path, damaged, 4096)  # in the middle
    low, high = pair.split("|")
    result = run("diff", source[0], *source)
    assert result.exit_code == 1
    text = " ".join(everything(result).split())
    assert "e: different between ranks that should hold the same" in text
    assert f"rank {low} differs from rank {high}" in text
    assert run("verify", *source).exit_code == 1
