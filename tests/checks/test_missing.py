"""Files that are missing or damaged: replaced by replicas where that is sure, and never else."""

import json
import os
import shutil

import pytest

import ckpttool
from ckpttool.problems import (
    UnreadableError,
)
from tests.support.commands import files_below, mentions, message, run, run_well
from tests.support.corpus import GOLDEN
from tests.support.damage import cut_short
from tests.support.readers import rank_file, read

CASE = GOLDEN / "tutorial_8_to_8_retrain"  # every slice is on two or four ranks


# ---------------------------------------------------------------------------- the whole program


@pytest.fixture
def source(tmp_path):
    """A checkpoint of which every slice is on several ranks."""
    return shutil.copytree(CASE / "src", tmp_path / "src")


def merge(source, out, *words):
    return run("merge", source, "-s", CASE / "src_strategy.ckpt", "-o", out, *words)


def cut_between_records(source, rank):
    """As a copy that was broken off; nothing in a .ckpt tells how many records there are."""
    path = rank_file(source, rank)
    tensors = list(ckpttool.scan(str(path)).files[0].tensors.values())
    end = tensors[9].extents[-1]
    path.write_bytes(path.read_bytes()[: end.offset + end.nbytes])
    return path, [tensor.meta.name for tensor in tensors[10:]]


def test_a_file_cut_between_two_records_is_replaced_with_a_warning(source, tmp_path):
    whole = tmp_path / "whole.ckpt"
    assert merge(source, whole).exit_code == 0
    path, names = cut_between_records(source, 5)
    result = merge(source, tmp_path / "m.ckpt")
    assert result.exit_code == 0
    assert (tmp_path / "m.ckpt").read_bytes() == whole.read_bytes()
    said = f"{len(names) - 3} more: not on rank 5, but on others {path}; on rank 0; those are read"
    assert f"{said}; --json lists each Try: copy the file again if it was cut short" in message(
        result
    )
    for rank in (0, 1, 4):
        rank_file(source, rank).unlink()
    result = merge(source, tmp_path / "n.ckpt")
    assert result.exit_code == 5
    assert not mentions(message(result), f"rank 5: not in {path}", "some slices are on no rank")


@pytest.mark.parametrize("harm", ["damaged", "missing", "empty folder", "unreadable", "web page"])
def test_a_merge_without_one_rank_gives_the_same_and_warns(source, tmp_path, harm, monkeypatch):
    whole = tmp_path / "whole.ckpt"
    assert merge(source, whole).exit_code == 0
    path = cut_short(rank_file(source, 2)) if harm == "damaged" else rank_file(source, 2)
    if harm == "missing":
        shutil.rmtree(path.parent)
    elif harm == "empty folder":
        path.unlink()
    elif harm == "unreadable":
        make_unreadable(monkeypatch, path)
    elif harm == "web page":
        path.write_text("<html>504</html>")
    result = merge(source, tmp_path / "m.ckpt", "-q")
    assert result.exit_code == 0
    assert (tmp_path / "m.ckpt").read_bytes() == whole.read_bytes()
    line, facts, *hint = result.stderr.splitlines()  # -q silences notes, not warnings
    code = "missing_replica" if harm in ("missing", "empty folder") else "damaged_replica"
    assert line.startswith(f"warning[{code}]: ")
    assert "rank_2" in line or line.startswith(f"warning[{code}]: rank 2: ")
    found = "byte 28091: expected 73 bytes from there, found 68; "
    found = found if harm == "damaged" else ""
    assert facts == f"  {found}all slices are read from replicas: ranks 0, 3"
    hints = {
        "damaged": ["  Try: copy the file again from where it was saved"],
        "web page": ["  Try: download the file again; the server sent this page instead"],
    }
    assert hint == hints.get(harm, [])
    assert ("no checkpoint file found" in line) == (harm in ("missing", "empty folder"))
    assert ("Input/output error" in line) == (harm == "unreadable")


def make_unreadable(monkeypatch, broken):
    """Reading one file's header fails as on a broken disk."""
    import ckpttool.formats as module

    find = module.format_of_content

    def fail(path):
        if path == str(broken):
            raise OSError(5, os.strerror(5), path)
        return find(path)

    monkeypatch.setattr(module, "format_of_content", fail)


@pytest.mark.parametrize("harm", ["damaged", "missing", "cut between records"])
def test_strict_refuses_what_replicas_would_replace(source, tmp_path, harm):
    if harm == "damaged":
        cut_short(rank_file(source, 2))
    elif harm == "cut between records":
        cut_between_records(source, 2)
    else:
        shutil.rmtree(source / "rank_2")
    result = merge(source, tmp_path / "out" / "m.h5", "--strict")
    assert result.exit_code == 5
    assert "--strict" in message(result)
    assert ("/rank_2/" if harm == "damaged" else "rank 2") in message(result)
    target = ["-d", CASE / "dst_strategy.ckpt", "-o", tmp_path / "out"]
    words = ["reshard", source, "-s", CASE / "src_strategy.ckpt", *target]
    assert run(*words, "--strict").exit_code == 5
    assert not files_below(tmp_path / "out")
    run_well(*words)


def test_strict_has_nothing_against_a_whole_checkpoint(source, tmp_path):
    assert merge(source, tmp_path / "m.h5", "--strict").exit_code == 0


def test_the_document_of_a_merge_names_the_rank_that_was_replaced(source, tmp_path):
    path = cut_short(rank_file(source, 5))
    document = json.loads(merge(source, tmp_path / "m.h5", "--json").stdout)
    (note,) = (note for note in document["notes"] if note["code"] == "damaged_replica")
    assert str(path) in note["text"]
    assert note["facts"].endswith("replicas: rank 0")


def test_replicas_that_are_all_damaged_are_an_error_with_all_ranks(source, tmp_path):
    paths = [cut_short(rank_file(source, rank)) for rank in (0, 1, 4, 5)]
    result = merge(source, tmp_path / "m.h5")
    assert result.exit_code == 3
    said = f"{paths[0]} and 3 more: the file is cut short or damaged ranks 0, 1, 4, 5; "
    assert said in message(result)
    lost = "3 more: some slices are on no rank ranks 0, 1, 4, 5: not read"
    assert f"error[missing]: layer1.weight, layer3.weight, accum.layer1.weight and {lost}" in (
        message(result)
    )
    assert not (tmp_path / "m.h5").exists()


def test_a_damaged_file_is_an_input_and_never_overwritten(source, tmp_path):
    path = cut_short(rank_file(source, 2))
    before = path.read_bytes()
    result = merge(source, path, "--overwrite")
    assert result.exit_code == 5
    assert "is an input of this run" in message(result)
    assert path.read_bytes() == before


def test_a_damaged_replica_of_a_replicated_checkpoint_is_replaced(tmp_path):
    source = shutil.copytree(GOLDEN / "replicated_only" / "src", tmp_path / "src")
    cut_short(rank_file(source, 0))
    whole, out = tmp_path / "whole.ckpt", tmp_path / "m.ckpt"
    run_well("merge", GOLDEN / "replicated_only" / "src", "--replicated", "-o", whole)
    result = run_well("merge", source, "--replicated", "-o", out)
    assert "found 68; all slices are read from replicas: rank 1\n" in result.stderr
    assert read(out) == read(whole)
    assert run("merge", source, "--replicated", "--strict", "-o", out).exit_code == 5
    shutil.rmtree(source / "rank_3")
    result = run("merge", source, "--replicated", "--strict", "-o", out)
    assert "rank 3: no checkpoint file found" in message(result)


def test_an_unreadable_file_that_nobody_replaces_has_the_exit_code_of_a_damaged_one(
    source, tmp_path, monkeypatch
):
    for rank in (0, 1, 4, 5):
        cut_short(rank_file(source, rank))
    make_unreadable(monkeypatch, rank_file(source, 0))
    result = merge(source, tmp_path / "m.h5")
    assert result.exit_code == 3
    assert "rank_0/checkpoint-2_10.ckpt: Input/output error" in message(result)
    with pytest.raises(UnreadableError):
        raise ckpttool.scan(str(source)).damaged[0]
