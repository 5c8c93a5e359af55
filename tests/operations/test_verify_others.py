"""``verify`` and ``diff`` of encrypted files, checksums, and checkpoints that need no strategy."""

from __future__ import annotations

import shutil

import pytest

from tests.oracle import OracleLayout
from tests.support.checkpoint2 import Save
from tests.support.checkpoints import noise
from tests.support.commands import message, run, run_well, verify_document
from tests.support.corpus import GOLDEN, SAMPLES
from tests.support.mindformers_output import keep_strategies, record, save

ROWS = OracleLayout((2, 2), ((1,), ()))  # ranks 0 and 1 have the upper half, 2 and 3 the lower
W = noise("w", "Int32", (8, 6))


def findings(*words):
    found = verify_document(*words)["findings"]
    assert found
    return [(one["code"], one["text"]) for one in found]


# ------------------------------------------------------------- checkpoints that describe themselves


@pytest.fixture
def folder(tmp_path):
    Save({"w": W}, {"w": (ROWS,)}, 4).write_root(tmp_path / "a", 5)
    return tmp_path / "a"


def change(folder, byte, rank):
    (path,) = folder.rglob(f"*-{rank:07}-*.safetensors")
    data = bytearray(path.read_bytes())
    data[-W.data.__len__() // 2 + byte] ^= 1
    path.write_bytes(data)


def test_a_checkpoint_that_describes_itself_is_verified_and_compared(folder, tmp_path):
    run_well("verify", folder, "--deep")
    run_well("merge", folder, "-o", tmp_path / "m.h5")
    run_well("diff", folder, tmp_path / "m.h5")
    other = shutil.copytree(folder, tmp_path / "b")
    run_well("diff", folder, other)


def test_replicas_of_a_checkpoint_that_describes_itself_are_compared(folder, tmp_path):
    change(folder, 4 * (6 + 2), 3)
    ((kind, text),) = findings(folder, "--deep")
    assert kind == "replica"
    assert text == "w: replicas differ"
    result = run("merge", folder, "-o", tmp_path / "m.h5", "--check-replicas", "--trust-strategy")
    assert result.exit_code == 5
    where = "rank 2 differs from rank 3; first at (5, 2) of (8, 6)"
    assert f"{text} 1 of 24 elements of the slice; {where}" in message(result)


def test_a_file_that_is_missing_from_a_checkpoint_that_describes_itself_is_found(folder):
    for path in [
        *folder.rglob("*-0000002-*.safetensors"),
        *folder.rglob("*-0000003-*.safetensors"),
    ]:
        path.unlink()
    assert {kind for kind, _ in findings(folder)} == {"missing"}


def test_a_strategy_is_not_for_a_checkpoint_that_describes_itself(folder):
    strategy = GOLDEN / "crc_check" / "src_strategy.ckpt"
    result = run("verify", folder, "-s", strategy)
    assert result.exit_code == 5
    assert "describes itself" in message(result)
    assert run("diff", folder, GOLDEN / "crc_check" / "src", "-s", strategy).exit_code == 1


# ------------------------------------------------------------------------------- MindFormers trees


def test_the_output_folder_of_a_run_is_verified_with_its_own_strategies(tmp_path):
    save(tmp_path, "mp2_dp4", "1_1")
    record(tmp_path, "1_1")
    keep_strategies(tmp_path, "mp2_dp4")
    result = run_well("verify", tmp_path, "--deep")
    assert "step 1_1" in result.stdout
    assert "_rank_0.ckpt and 7 more" in message(result)
    sample = SAMPLES / "mp2_dp4"
    run_well("diff", tmp_path, sample / "safetensors", "--b-strategy", sample / "strategy")
