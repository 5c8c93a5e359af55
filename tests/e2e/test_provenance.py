"""What outputs say of how they were made: on the command line, in every format with room for it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

import ckpttool
from ckpttool.formats.base import PROVENANCE
from tests.support.commands import run_well
from tests.support.corpus import GOLDEN
from tests.support.file_bytes import record
from tests.support.manifests import RECORD
from tests.support.readers import read

CASE = GOLDEN / "reshard_8_to_4"
SUFFIXES = [".h5", ".safetensors"]
WITH_ROOM = [("hdf5", ".h5"), ("safetensors", ".safetensors")]


@pytest.fixture
def case(tmp_path):
    return Path(shutil.copytree(CASE, tmp_path / "first" / "case"))


def attrs(path):
    return ckpttool.read_index(str(path)).attrs


def provenance(path):
    entries = attrs(path).items()
    return {
        key.removeprefix(PROVENANCE): value for key, value in entries if key.startswith(PROVENANCE)
    }


def merge(case, out, *words):
    run_well("merge", case / "src", "-s", case / "src_strategy.ckpt", "-o", out, *words)
    return out


def reshard(case, out, format):
    strategies = ["-s", case / "src_strategy.ckpt", "-d", case / "dst_strategy.ckpt"]
    run_well("reshard", case / "src", *strategies, "-o", out, "--format", format)
    return out


def test_ckpt_has_no_room_for_it(case, tmp_path):
    assert attrs(merge(case, tmp_path / "merged.ckpt")) == {}


def contents(folder, suffix):
    return {
        path.relative_to(folder): path.read_bytes() for path in sorted(folder.rglob(f"*{suffix}"))
    }


@pytest.mark.parametrize(("format", "suffix"), WITH_ROOM)
def test_the_same_input_gives_the_same_bytes_wherever_it_lies(
    case, tmp_path, monkeypatch, format, suffix
):
    moved = Path(shutil.copytree(case, tmp_path / "second" / "deeper" / "case"))
    for place in (case, moved):
        merge(place, place.parent / "out" / f"merged{suffix}", "--engine", "threads:2")
        reshard(place, place.parent / "out" / "new", format)
    want = contents(case.parent / "out", suffix)
    assert len(want) == 5
    assert contents(moved.parent / "out", suffix) == want
    monkeypatch.chdir(case / "src")  # a relative name of the folder itself
    run_well("merge", ".", "-s", "../src_strategy.ckpt", "-o", tmp_path / f"here{suffix}")
    assert (tmp_path / f"here{suffix}").read_bytes() == want[Path(f"merged{suffix}")]


def test_no_output_names_a_folder_of_this_machine(case, tmp_path):
    out = tmp_path / "out"
    for suffix in (*SUFFIXES, ".ckpt"):
        merge(case, out / f"merged{suffix}")
    merge(case, out / "model", "--max-shard-size", "5KB")
    for format in ("hdf5", "ckpt", "safetensors"):
        reshard(case, out / format, format)
    files = [path for path in out.rglob("*") if path.suffix in (*SUFFIXES, ".ckpt", ".json")]
    files = [path for path in files if RECORD not in path.parent.name]  # it has the command line
    assert len(files) > 20
    for file in files:
        for folder in (tmp_path, GOLDEN, Path.home()):
            assert os.fsencode(folder) + b"/" not in file.read_bytes(), file


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_folder_whose_name_is_not_utf8_does_no_harm(tmp_path, suffix):
    folder = tmp_path / os.fsdecode(b"\x1b[31mm\xfcller")
    (folder / "rank_0").mkdir(parents=True)
    (folder / "rank_0" / "net.ckpt").write_bytes(record("w"))
    run_well("merge", folder, "--replicated", "-o", tmp_path / f"merged{suffix}")
    assert (
        provenance(tmp_path / f"merged{suffix}")["source"]
        == "\x1b[31mm\N{REPLACEMENT CHARACTER}ller"
    )
    shown = run_well("inspect", tmp_path / f"merged{suffix}").stdout
    assert "\x1b" not in shown
    assert "[31mm\N{REPLACEMENT CHARACTER}ller" in shown


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_tensors_may_have_names_of_provenance(tmp_path, suffix):
    names = ["ckpttool.source", "ckpttool.version", "format", "w"]
    (tmp_path / "net.ckpt").write_bytes(b"".join(map(record, names)))
    out = tmp_path / f"merged{suffix}"
    run_well("merge", tmp_path / "net.ckpt", "-o", out)
    assert read(out) == read(tmp_path / "net.ckpt")
    if suffix == ".safetensors":  # MindSpore takes an entry with the name of a tensor for its type
        assert attrs(out) == {}
