"""Checkpoints saved without redundancy: each slice from the one rank that has it."""

from __future__ import annotations

import json
import shutil

import pytest
from msgspec.structs import replace

from ckpttool.checkpoint.presence import quarantine_empty
from ckpttool.model.strategy import Strategy
from ckpttool.model.tensors import FileIndex, StoredFile
from tests.support import corpus
from tests.support.checkpoints import (
    ONE_STAGE,
    noise,
    with_names,
    write_file,
)
from tests.support.commands import files_below, mentions, message, run, run_well
from tests.support.corpus import GOLDEN
from tests.support.readers import rank_file, read, read_ranks, write_ckpt

CASE = GOLDEN / "safetensors_remove_redundancy"
STRATEGY = ["-s", CASE / "src_strategy.ckpt"]
NOTHING = b"\x08\0\0\0\0\0\0\0{}      "  # what MindSpore leaves for a rank without parameters
TEXT = "saved without redundancy"


@pytest.fixture(params=["safetensors", "ckpt"])
def saved(request, tmp_path):
    """The case in both formats: marked in the one, bare in the other."""
    folder = tmp_path / "src"
    shutil.copytree(CASE / "src", folder)
    if request.param == "ckpt":
        for path in list(folder.rglob("*.safetensors")):
            write_ckpt(path.with_suffix(".ckpt"), read(path))
            path.unlink()
    return folder


def empty(path):
    path.write_bytes(NOTHING if path.suffix == ".safetensors" else b"")


def move(folder, src, dst):
    """Give what one rank holds to another, which has the same slices, and leave the first empty."""
    one, two = rank_file(folder, src), rank_file(folder, dst)
    format = one.suffix[1:]
    attrs = {"remove_redundancy": "True"} if format == "safetensors" else {}
    write_file(two, read(one) | read(two), format, attrs)
    empty(one)


def emptied(catalog, *ranks):
    """The same with empty files of these ranks."""
    empty = {
        rank: FileIndex((StoredFile(f"run/rank_{rank}/net.ckpt"),), "ckpt", 0, {}) for rank in ranks
    }
    return replace(catalog, files={**catalog.files, **empty})


# ------------------------------------------------------------------------------- merge, reshard


@pytest.mark.parametrize("idle", [[], [7], [4, 5, 6, 7]])
def test_merge_and_reshard_take_each_slice_from_whoever_has_it(saved, tmp_path, idle):
    for rank in idle:
        move(saved, rank, rank % 2)
    result = run_well("merge", saved, *STRATEGY, "-o", tmp_path / "full.ckpt")
    want = corpus.conversion(CASE.name, "merge").ranks
    assert not corpus.differences(want, corpus.digests({0: read(tmp_path / "full.ckpt")}))
    told = message(result)
    assert TEXT in told
    assert ("hold" in told.split(TEXT)[1]) == bool(idle)
    words = [*STRATEGY, "-d", CASE / "dst_strategy.ckpt", "--format", "safetensors"]
    run_well("reshard", saved, *words, "-o", tmp_path / "new")
    want = corpus.conversion(CASE.name, "reshard").ranks
    assert not corpus.differences(want, corpus.digests(read_ranks(tmp_path / "new")))


def test_the_mark_is_not_carried_over(saved, tmp_path):
    run_well("merge", saved, *STRATEGY, "-o", tmp_path / "full.safetensors")
    words = [*STRATEGY, "-d", CASE / "dst_strategy.ckpt", "--format", "safetensors"]
    run_well("reshard", saved, *words, "-o", tmp_path / "new")
    for name in ("full.safetensors", "new/rank_0/checkpoint_0.safetensors"):
        document = json.loads(run_well("inspect", tmp_path / name, "--json").stdout)
        assert document["attrs"]["ckpttool.source"] == saved.name
        assert "remove_redundancy" not in document["attrs"]


def test_inspect_shows_full_shapes_and_says_how_it_was_saved(saved):
    move(saved, 7, 1)
    document = json.loads(run_well("inspect", saved, *STRATEGY, "--json").stdout)
    assert document["problems"] == []
    shapes = {tensor["name"]: tuple(tensor["shape"]) for tensor in document["tensors"]}
    want = corpus.conversion(CASE.name, "merge").ranks[0]
    assert shapes == {name: shape for name, (_, shape, _) in want.items()}
    (facts,) = [note["facts"] for note in document["notes"] if note["code"] == "deduplicated"]
    assert facts == "each slice is in one file only; rank 7 holds nothing"


def test_inspect_without_a_strategy_says_so_if_the_files_do():
    document = json.loads(run_well("inspect", CASE / "src", "--json").stdout)
    assert [note["code"] for note in document["notes"]] == ["strategy_file", "deduplicated"]
    plain = GOLDEN / "safetensors_reshard" / "src"
    (note,) = json.loads(run_well("inspect", plain, "--json").stdout)["notes"]
    assert note["code"] == "strategy_file"


@pytest.mark.parametrize("how", ["gone", "empty"])
def test_a_slice_that_nobody_holds_is_named(saved, tmp_path, how):
    path = rank_file(saved, 1)
    lost = sorted({*read(path)} - {"global_step", "learning_rate"})
    if how == "gone":
        shutil.rmtree(path.parent)
    else:
        empty(path)
    for words in (["merge", "-o", tmp_path / "x.h5"], ["inspect"]):
        result = run(words[0], saved, *words[1:], *STRATEGY)
        assert result.exit_code == 5
        told = message(result)
        assert not mentions(
            told, "some slices are ", "saved without redundancy .remove_redundancy."
        )
        assert any(name in told for name in lost)
        assert ("rank 1: no checkpoint file found" in told) == (how == "gone")
    assert not (tmp_path / "x.h5").exists()


def test_a_parameter_of_one_rank_that_is_lost_is_no_parameter_that_was_never_saved(saved):
    """All eight ranks have equal slices of it, so nothing but its name in the strategy is left."""
    name = "adam_m.model.layers.0.ffn_norm.weight"
    assert [r for r, held in read_ranks(saved).items() if name in held] == [1]
    empty(rank_file(saved, 1))
    result = run("inspect", saved, *STRATEGY)
    assert result.exit_code == 5
    told = message(result)
    assert f"{name}: ranks 0-7: not in the files" in told
    assert "saved without redundancy (remove_redundancy)" in told
    suspect = f"; {rank_file(saved, 1)}: 0 bytes; "
    assert (suspect in told) == (rank_file(saved, 1).stat().st_size == 0)


def test_a_stage_without_layouts_may_hold_nothing():
    catalog = emptied(with_names({"w": (4, 3)}, range(4)), *range(4, 8))
    two_stages = Strategy(ONE_STAGE.layouts, 2, 4)
    assert quarantine_empty(catalog, two_stages) == catalog
    catalog = emptied(catalog, 3)
    assert list(quarantine_empty(catalog, two_stages).damaged) == [3]


# ------------------------------------------------------------------------- without any layouts


def replicated(tmp_path, ranks, attrs=None):
    format = "safetensors" if attrs is not None else "ckpt"
    for rank, names in ranks.items():
        entries = {name: noise(name, "Float32", (4,)) for name in names}
        write_file(tmp_path / "src" / f"rank_{rank}" / f"n.{format}", entries, format, attrs)
    return ["merge", tmp_path / "src", "--replicated", "-o", tmp_path / "full.ckpt"]


@pytest.mark.parametrize("attrs", [None, {"remove_redundancy": "True"}])
def test_data_parallel_ranks_each_have_some(tmp_path, attrs):
    words = replicated(tmp_path, {0: "ab", 1: "c", 2: "d", 3: ""}, attrs)
    told = message(run_well(*words))
    assert read(tmp_path / "full.ckpt") == {name: noise(name, "Float32", (4,)) for name in "abcd"}
    assert TEXT in told
    assert "rank 3 holds nothing" in told


def test_a_missing_rank_of_theirs_is_a_problem_since_nothing_tells_what_it_had(tmp_path):
    result = run(*replicated(tmp_path, {0: "ab", 2: "d"}))
    assert result.exit_code == 5
    assert "rank 1: no checkpoint file found" in message(result)
    assert "no other rank has what they had" in message(result)


def test_ranks_that_hold_some_of_it_twice_were_cut_short(tmp_path):
    result = run(*replicated(tmp_path, {0: "ab", 1: "abc", 2: "bc"}))
    assert result.exit_code == 5
    assert "rank 0" in message(result)
    assert "c: not on rank 0, but on others" in message(result)
    assert [name for name in files_below(tmp_path) if not name.startswith("src")] == []


@pytest.mark.parametrize(
    ("ranks", "note"),
    [
        (["abz", "abz", "cdz", "cdz"], "2 stages of 2 ranks"),
        (["abz", "cdz"], "2 stages of 1 rank"),
        (["ab", "a", "cd", "cd"], ""),  # one file was cut short
        (["az", "az", "bz", "bz"], ""),  # as much in common as of each stage
        (["abz", "abz", "cdz"], ""),  # a rank is not there
        (["abz", "abz", "cdz", "cdz", "abz", "abz"], ""),
    ],
)
def test_names_show_the_stages_of_which_every_rank_holds_all(tmp_path, ranks, note):
    result = run(*replicated(tmp_path, dict(enumerate(ranks))))
    if note:
        assert note in message(result)
        written = read(tmp_path / "full.ckpt")
        assert written == {name: noise(name, "Float32", (4,)) for name in "".join(ranks)}
    else:
        assert result.exit_code == 5
        assert "error[missing]" in message(result)
