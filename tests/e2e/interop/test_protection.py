"""Encrypted files and checksums: MindSpore's read here, and ours verified by MindSpore."""

from __future__ import annotations

import pytest

from tests.e2e.interop.client import MindSporeError
from tests.e2e.interop.saved import as_digests
from tests.e2e.interop.test_files import APPENDED, LOADED, tensors
from tests.support.commands import run, run_well
from tests.support.encryption import KEYS
from tests.support.readers import read

SECRET = bytes(range(100, 132))


@pytest.fixture
def key_file(tmp_path):
    def written(key):
        path = tmp_path / "key"
        path.write_bytes(key)
        return path

    return written


# ------------------------------------------------------------------------ encrypted


@pytest.mark.parametrize(("mode", "size"), KEYS)
def test_a_file_that_mindspore_encrypts_holds_what_it_saves_in_clear(
    mode, size, mindspore, tmp_path, key_file
):
    key = SECRET[:size]
    names = {form: tmp_path / f"{form}.ckpt" for form in ("clear", "encrypted", "again")}
    saved = {"do": "save_values", "tensors": tensors(LOADED), "append": APPENDED}
    hidden = {"key": key.hex(), "mode": mode}
    mindspore.ask_all(
        [saved | {"out": names["clear"]}, saved | {"out": names["encrypted"]} | hidden]
    )
    words = ["--dec-key-file", key_file(key)]
    run_well("merge", names["encrypted"], "-o", names["again"], *words)
    assert names["again"].read_bytes() == names["clear"].read_bytes()
    loaded = [
        mindspore.ask("load", path=names["again"]),
        mindspore.ask("load", path=names["encrypted"], **hidden),
    ]
    assert loaded[0] == loaded[1]
    wrong = run("inspect", names["encrypted"], "--dec-key-file", key_file(key[::-1]))
    assert wrong.exit_code == 3
    assert f"the wrong key ({mode}), or the file is damaged" in wrong.stderr


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["AES-GCM", "AES-CBC"])
def test_a_file_of_several_blocks_is_read(mode, mindspore, tmp_path, key_file):
    path, again = tmp_path / f"{mode}.ckpt", tmp_path / "again.ckpt"
    nbytes = (2 << 26) + 1000  # blocks have 64 MiB
    mindspore.ask("save_noise", nbytes=nbytes, out=path, key=SECRET.hex(), mode=mode)
    run_well("merge", path, "-o", again, "--dec-key-file", key_file(SECRET))
    assert again.read_bytes() == (tmp_path / "plain.ckpt").read_bytes()
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.seek((1 << 26) + 1000)
        file.write(b"damage")
    result = run("merge", path, "-o", tmp_path / "m.ckpt", "--dec-key-file", key_file(SECRET))
    assert result.exit_code == (3 if mode == "AES-GCM" else 0)  # CBC cannot tell
    assert mode != "AES-GCM" or "encrypted block 2 of 3 does not match" in result.stderr


def test_what_mindspore_encrypts_with_a_checksum_only_ckpttool_reads(mindspore, tmp_path, key_file):
    path, again = tmp_path / "both.ckpt", tmp_path / "again.ckpt"
    words = {"key": SECRET.hex(), "mode": "AES-GCM"}
    mindspore.ask("save_values", tensors=tensors(LOADED), out=path, crc_check=True, **words)
    with pytest.raises(MindSporeError, match="Failed to read the checkpoint file"):
        mindspore.ask("load", path=path, **words)
    result = run_well("merge", path, "-o", again, "--dec-key-file", key_file(SECRET))
    assert "encrypted with a checksum of 0, which is ignored" in result.stderr
    mindspore.ask("save_values", tensors=tensors(LOADED), out=tmp_path / "clear.ckpt")
    assert again.read_bytes() == (tmp_path / "clear.ckpt").read_bytes()


MAP = {
    "name": "table",
    "blocks": [[["int32", [5, 6]], ["float32", [[1.5], [2]]], ["int32", [0, 1]]]],
}


def test_map_parameters_beside_encrypted_ones_are_in_clear(mindspore, tmp_path, key_file):
    clear, path = tmp_path / "clear.ckpt", tmp_path / "encrypted.ckpt"
    mindspore.ask("save_map", out=clear, with_tensor=True, **MAP)
    mindspore.ask("save_map", out=path, with_tensor=True, key=SECRET.hex(), **MAP)
    words = ["--dec-key-file", key_file(SECRET)]
    for source in (clear, path):
        run_well("merge", source, "-o", source.with_suffix(".h5"), *words)
    assert read(path.with_suffix(".h5")) == read(clear.with_suffix(".h5"))
    with pytest.raises(MindSporeError, match="Failed to read the checkpoint file"):
        mindspore.ask("load", path=path, key=SECRET.hex())


# ------------------------------------------------------------------------ checksums


def test_map_parameters_do_not_count_when_mindspore_saves_and_count_when_it_loads(
    mindspore, tmp_path
):
    saved, again = tmp_path / "saved.ckpt", tmp_path / "again.ckpt"
    mindspore.ask("save_map", out=saved, with_tensor=True, crc_check=True, **MAP)
    with pytest.raises(MindSporeError, match="Failed to read the checkpoint file"):
        mindspore.ask("load_map", path=saved, name="table", crc_check=True)
    run_well("merge", saved, "-o", again, "--crc")
    loaded = mindspore.ask("load_map", path=again, name="table", crc_check=True)
    assert loaded == mindspore.ask("load_map", path=saved, name="table")
    assert "the checksum is right" in run_well("inspect", again, "--crc").stderr


# Of an integer without axes MindSpore counts as many zeros, and takes as much memory.
COUNTERS = {
    "epoch_num": ["int64", (), (12).to_bytes(8, "little").hex()],
    "step_num": ["int32", (), (123_456).to_bytes(4, "little").hex()],
    "small": ["int8", (), "7f"],
    "large": ["uint8", (), "ff"],
    "nothing": ["int16", (), "0000"],
    "four_bits": ["qint4x2", (), "05"],
    "flag": ["bool_", (), "01"],
    "scale": ["float32", (), "0000803f"],
    "one": ["int64", (1,), (3).to_bytes(8, "little").hex()],
}


def protected(form):
    if form == "ckpt":
        return tensors(LOADED)
    arrays = {name: item for name, item in tensors(LOADED).items() if item[1]}
    return {name: item for name, item in arrays.items() if item[0] != "bfloat16"} | COUNTERS


@pytest.mark.parametrize("form", ["ckpt", "safetensors"])
def test_checksums_of_mindspore_are_right(form, mindspore, tmp_path):
    path = tmp_path / f"saved.{form}"
    mindspore.ask("save_values", tensors=protected(form), out=path, crc_check=True)
    assert f"note: {path}: the checksum is right" in run_well("inspect", path, "--crc").stderr


@pytest.mark.parametrize("form", ["ckpt", "safetensors"])
@pytest.mark.parametrize("source", ["ckpt", "safetensors"])
def test_mindspore_verifies_checksums_of_ours(source, form, mindspore, tmp_path):
    saved, path = tmp_path / f"saved.{source}", tmp_path / f"out.{form}"
    every = protected("safetensors")
    mindspore.ask("save_values", tensors=every, out=saved, crc_check=True)
    run_well("merge", saved, "-o", path, "--crc")
    loaded = as_digests(mindspore.ask("load", path=path, crc_check=True))
    assert loaded == as_digests(mindspore.ask("load", path=saved, crc_check=True))
    if form == "ckpt":
        order = {name: every[name] for name in read(path)}
        mindspore.ask("save_values", tensors=order, out=tmp_path / "order.ckpt", crc_check=True)
        assert path.read_bytes() == (tmp_path / "order.ckpt").read_bytes()
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(data)
    with pytest.raises(MindSporeError, match=r"crc check has failed|Failed to read the checkpoint"):
        mindspore.ask("load", path=path, crc_check=True)
    assert run("inspect", path, "--crc").exit_code == 3


def test_mindspore_verifies_no_safetensors_with_bfloat16_as_a_note_says(mindspore, tmp_path):
    saved, path = tmp_path / "saved.ckpt", tmp_path / "out.safetensors"
    one = {"w": ["bfloat16", (2,), "803f803f"]}
    mindspore.ask("save_values", tensors=one, out=saved)
    result = run_well("merge", saved, "-o", path, "--crc")
    assert "MindSpore 2.10 does not verify" in result.stderr
    mindspore.ask("load", path=path)
    with pytest.raises(MindSporeError, match="cannot include dtype"):
        mindspore.ask("load", path=path, crc_check=True)
    with pytest.raises(MindSporeError, match="cannot include dtype"):
        mindspore.ask("save_values", tensors=one, out=path, crc_check=True)
