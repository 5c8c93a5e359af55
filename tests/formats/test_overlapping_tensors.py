"""Tensors that lie upon each other in a file: it is damaged, for every command and format."""

from __future__ import annotations

import json
import shutil
import struct

import h5py
import numpy as np
import pytest

from ckpttool.formats import read_index
from ckpttool.problems import FormatError
from tests.support.checkpoints import noise, write_file, write_ranks
from tests.support.commands import message, run, run_well
from tests.support.corpus import GOLDEN
from tests.support.readers import read, read_ranks

CASE = GOLDEN / "tutorial_8_to_8_retrain"
ENTRIES = {name: noise(name, "Float32", (4, 6)) for name in ("a", "b/c")}


def moved(path, name, offset):
    with h5py.File(path) as file:
        before, nbytes = file[name].id.get_offset(), file[name].id.get_storage_size()
    data, old, new = path.read_bytes(), *(struct.pack("<2Q", n, nbytes) for n in (before, offset))
    assert data.count(old) == 1
    path.write_bytes(data.replace(old, new))
    return path


def hdf5(tmp_path, shift):
    path = tmp_path / "net.h5"
    write_file(path, ENTRIES, "hdf5")
    with h5py.File(path) as file:
        at = file["a"].id.get_offset()
    return moved(path, "b/c", at + shift)


def safetensors(tmp_path, shift):
    path = tmp_path / "net.safetensors"
    write_file(path, ENTRIES, "safetensors")
    data = path.read_bytes()
    assert data.count(b"[96,192]") == 1
    path.write_bytes(data.replace(b"[96,192]", (b"[%d,%d]" % (shift, shift + 96)).ljust(8)))
    return path


@pytest.mark.parametrize("shift", [0, 8, 95])
@pytest.mark.parametrize("make", [hdf5, safetensors])
def test_no_command_reads_such_a_file(make, shift, tmp_path):
    path = make(tmp_path, shift)
    whole = tmp_path / "whole.ckpt"
    write_file(whole, ENTRIES, "ckpt")
    dst = ["-d", CASE / "dst_strategy.ckpt", "-o"]
    for words in (
        ["inspect", path],
        ["merge", path, "-o", tmp_path / "out.ckpt"],
        ["split", path, *dst, tmp_path / "split"],
        ["diff", path, whole],
        ["diff", whole, path],
    ):
        result = run(*words)
        assert result.exit_code == 3, message(result)
        assert str(path) in message(result)
        assert "two tensors overlap" in message(result) or "bytes overlap" in message(result)
    assert run("verify", path).exit_code == 1
    assert not [one for one in tmp_path.iterdir() if one not in (path, whole)]


def test_in_a_rank_folder_its_replicas_are_read(tmp_path):
    ranks = read_ranks(CASE / "src")
    folder = write_ranks(tmp_path / "src", ranks, "hdf5")
    (path,) = (folder / "rank_3").iterdir()
    with h5py.File(path) as file:
        at = file["layer1.weight"].id.get_offset()
    moved(path, "layer2.weight", at + 4)
    words = ["-s", CASE / "src_strategy.ckpt"]
    result = run_well("merge", folder, *words, "-o", tmp_path / "out.ckpt")
    said = f"net.h5: two tensors overlap byte {at + 4}: layer1.weight and layer2.weight; all slices"
    assert said in message(result)
    run_well("merge", CASE / "src", *words, "-o", tmp_path / "whole.ckpt")
    assert read(tmp_path / "out.ckpt") == read(tmp_path / "whole.ckpt")
    for rank in (2, 6, 7):
        shutil.rmtree(folder / f"rank_{rank}")
    dst = ["-d", CASE / "dst_strategy.ckpt", "-o", tmp_path / "new"]
    assert run("reshard", folder, *words, *dst).exit_code == 3
    findings = json.loads(run("verify", folder, *words, "--json").stdout)["findings"]
    assert ("damaged", [3]) in [(one["code"], one["ranks"]) for one in findings]


def test_a_dataset_upon_a_string_or_upon_headers_is_damage(tmp_path):
    for target in ("text", "head", "header"):
        path = tmp_path / f"{target}.h5"
        with h5py.File(path, "w") as file:
            file["a"] = np.arange(24, dtype="f4")
            file["text"] = np.bytes_(b"some text of some length")
            at = {
                "text": file["text"].id.get_offset() - 92,
                "head": 4,
                "header": h5py.h5o.get_info(file["text"].id).addr - 8,
            }[target]
        moved(path, "a", at)
        with pytest.raises(FormatError, match="two tensors overlap"):
            read_index(str(path))


def test_a_user_block_is_counted(tmp_path):
    path = tmp_path / "net.h5"
    with h5py.File(path, "w", userblock_size=4096) as file:
        file["a"], file["b"] = np.arange(9), np.arange(9)
    assert {*read_index(str(path)).tensors} == {"a", "b"}


def test_one_dataset_may_have_two_names(tmp_path):
    path = tmp_path / "net.h5"
    with h5py.File(path, "w") as file:
        file["a"] = np.arange(6, dtype="f4")
        file["b"], file["c"] = file["a"], np.arange(6, dtype="f4")
    run_well("verify", path, "--deep")
    run_well("merge", path, "-o", tmp_path / "out.ckpt")
    entries = read(tmp_path / "out.ckpt")
    assert entries["a"] == entries["b"] == entries["c"]
