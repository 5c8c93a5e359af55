"""``verify`` and ``diff`` of encrypted files, checksums, and checkpoints that need no strategy."""

from __future__ import annotations

import shutil

import pytest

from tests.oracle import OracleLayout
from tests.support.checkpoint2 import Save
from tests.support.checkpoints import noise, write_file, write_ranks
from tests.support.commands import message, run, run_well, verify_document
from tests.support.corpus import BROKEN, GOLDEN, SAMPLES
from tests.support.damage import flip_byte
from tests.support.mindformers_output import keep_strategies, record, save
from tests.support.readers import rank_file

ENCRYPTED = GOLDEN / "encrypted_gcm"
ROWS = OracleLayout((2, 2), ((1,), ()))  # ranks 0 and 1 have the upper half, 2 and 3 the lower
W = noise("w", "Int32", (8, 6))


@pytest.fixture
def key(tmp_path):
    pytest.importorskip("cryptography")
    (tmp_path / "key").write_bytes(b"0123456789ABCDEF")
    return tmp_path / "key"


def findings(*words):
    """Kinds and texts, of a command that finds something."""
    found = verify_document(*words)["findings"]
    assert found
    return [(one["code"], one["text"]) for one in found]


# ---------------------------------------------------------------------------------- encrypted files


def test_encrypted_files_are_verified_and_compared_with_their_key(key, tmp_path):
    words = [ENCRYPTED / "src", "-s", ENCRYPTED / "src_strategy.ckpt", "--dec-key-file", key]
    result = run_well("verify", *words, "--deep")
    assert "the tags of all encrypted blocks are right" in message(result)
    run_well("merge", *words, "-o", tmp_path / "m.ckpt")
    run_well("diff", ENCRYPTED / "src", tmp_path / "m.ckpt", *words[1:])


def test_encrypted_files_without_a_key_are_unsupported_and_not_replaced(tmp_path):
    words = [ENCRYPTED / "src", "-s", ENCRYPTED / "src_strategy.ckpt"]
    assert {kind for kind, _ in findings(*words)} == {"unsupported"}
    assert run("diff", *words[:1], *words).exit_code == 3


def test_a_forged_block_is_found_and_stops_a_comparison(key, tmp_path):
    source = shutil.copytree(ENCRYPTED / "src", tmp_path / "src")
    flip_byte(rank_file(source, 1), -20)
    words = [source, "-s", ENCRYPTED / "src_strategy.ckpt", "--dec-key-file", key]
    kinds = {kind for kind, _ in findings(*words, "--deep")}
    assert kinds & {"checksum", "damaged"}
    assert run("diff", source, *words).exit_code == 3


# --------------------------------------------------------------------------------------- checksums


def test_a_checksum_that_is_wrong_is_found_if_the_data_is_read():
    words = [BROKEN / "crc_damaged" / "src", "-s", BROKEN / "crc_damaged" / "src_strategy.ckpt"]
    said = "rank 1: the checksum (crc_check) is not verified Try: ckpttool verify "
    assert f"{said}{words[0]} --crc" in message(run_well("verify", *words))
    for more in ("--crc", "--deep"):
        ((kind, text),) = findings(*words, more)
        assert kind == "checksum"
        said = "rank_1/checkpoint-2_10.ckpt: the checksum (crc_num) is 1058417891, that of the"
        assert f"{said} contents 10578149" in text


def test_that_there_is_no_checksum_is_said_if_asked_for():
    words = [GOLDEN / "empty_tensors" / "src", "-s", GOLDEN / "empty_tensors" / "src_strategy.ckpt"]
    assert "ranks 0-3: saved without a checksum" in message(run_well("verify", *words, "--crc"))
    assert "saved without a checksum" not in message(run_well("verify", *words, "--deep"))
    words = [GOLDEN / "crc_check" / "src", "-s", GOLDEN / "crc_check" / "src_strategy.ckpt"]
    assert "the checksum is right" in message(run_well("verify", *words, "--deep"))


# ------------------------------------------------------------- checkpoints that describe themselves


@pytest.fixture
def folder(tmp_path):
    """A "Checkpoint 2.0" of four ranks, every slice on two of them."""
    Save({"w": W}, {"w": (ROWS,)}, 4).write_root(tmp_path / "a", 5)
    return tmp_path / "a"


def change(folder, byte, rank):
    """Turn a bit of what a rank has."""
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


def test_an_emergency_save_that_did_not_finish_is_found(tmp_path):
    source = tmp_path / "ttp_saved_checkpoints-step_1_tmp"
    shutil.copytree(SAMPLES / "mp2_dp4" / "ckpt", source)
    words = ["-s", SAMPLES / "mp2_dp4" / "strategy"]
    kinds = [kind for kind, _ in findings(source, *words)]
    assert kinds == ["unfinished"]
    result = run("diff", source, SAMPLES / "mp2_dp4" / "ckpt", *words)
    assert result.exit_code == 5
    assert "did not finish" in message(result)


# ---------------------------------------------------------------------------- nothing to examine


def _write_nothing(folder, format, is_indexed):
    """Write files without a tensor: those of two ranks, or two that no index names."""
    if not is_indexed:
        write_ranks(folder, {0: {}, 1: {}}, format)
        return folder
    for number in (1, 2):
        write_file(folder / f"model-0000{number}-of-00002.safetensors", {"w": W}, format)
    (folder / "model.safetensors.index.json").write_text('{"metadata": {}, "weight_map": {}}')
    return folder


@pytest.mark.parametrize(
    ("format", "is_indexed"), [("hdf5", False), ("safetensors", False), ("safetensors", True)]
)
def test_a_checkpoint_without_a_tensor_is_never_right(tmp_path, format, is_indexed):
    source = _write_nothing(tmp_path / "src", format, is_indexed)
    words = [source] if is_indexed else [source, "--replicated"]
    for more in ([], ["--deep"]):
        assert [kind for kind, _ in findings(*words, *more)] == ["nothing"]
    result = run("diff", source, *words)
    assert result.exit_code == 1
    assert "nothing was compared (0 tensors, 0 B compared, bytes)" in message(result)
    assert "equal" not in message(result)
    assert "complete" in (shown := run_well("inspect", source).stdout)
    assert "yes" not in shown
    result = run("merge", *words, "-o", tmp_path / "m.h5")
    assert (result.exit_code, list(tmp_path.iterdir())) == (5, [source])
    assert "error[nothing]" in message(result)


@pytest.mark.parametrize("format", ["ckpt", "hdf5"])
def test_tensors_without_an_element_are_a_warning(tmp_path, format):
    source = tmp_path / "src"
    hollow = {name: noise(name, "Float16", (0, 4)) for name in ("a", "b")}
    write_ranks(source, {0: hollow, 1: hollow}, format)
    words = [source, "--replicated"]
    assert [kind for kind, _ in findings(*words, "--deep")] == ["no_elements"]
    run_well("verify", *words, "--ignore", "no_elements")
    run_well("merge", *words, "-o", tmp_path / "m.h5")
    assert run("merge", *words, "-o", tmp_path / "s.h5", "--strict").exit_code == 5
    write_ranks(tmp_path / "sound", {0: {**hollow, "w": W}, 1: {**hollow, "w": W}}, format)
    run_well("verify", tmp_path / "sound", "--replicated", "--deep")
