"""Files that are missing or damaged: replaced by replicas where that is sure, and never else."""

import json
import os
import shutil

import pytest

import ckpttool
from ckpttool.model.catalog import Catalog
from ckpttool.model.layout import Layout
from ckpttool.model.strategy import Strategy
from ckpttool.problems import (
    ForeignError,
    FormatError,
    UnreadableError,
    UnsupportedError,
    join_alike,
)
from tests.support.checkpoints import ONE_STAGE, ROWS, SHARDED, catalog_of, strategy_of, the_one
from tests.support.commands import files_below, mentions, message, run, run_well
from tests.support.corpus import GOLDEN
from tests.support.damage import cut_short
from tests.support.in_memory import check_in_memory, checkpoint_in_memory, find
from tests.support.readers import rank_file, read

CASE = GOLDEN / "tutorial_8_to_8_retrain"  # every slice is on two or four ranks


def damaged(catalog, *ranks, kind=FormatError):
    """The catalog with the files of some ranks damaged."""
    files = {rank: file for rank, file in catalog.files.items() if rank not in ranks}
    errors = {rank: kind(f"run/rank_{rank}/net.ckpt", 7, "cut short") for rank in ranks}
    return Catalog("run", files, damaged=errors)


def outcome(catalog, strategy=ONE_STAGE, unlisted=None, content_groups=None):
    """Damage that is left, problems, and notes of replicas."""
    found = check_in_memory(checkpoint_in_memory(catalog, strategy, content_groups, unlisted))
    warnings = [one.text for one in found.of("warning")]
    return found.failures, [problem.text for problem in join_alike(found.errors)], warnings


FULL = catalog_of({rank: {"w": (4, 3), "step": ()} for rank in range(4)})
SAME = {"step": ((0, 1, 2, 3),)}


def test_a_damaged_file_is_replaced_by_a_replica_and_a_note_names_file_reason_and_replica():
    damage, problems, notes = outcome(damaged(FULL, 2), content_groups=SAME)
    assert not damage
    assert not problems
    facts = "byte 7; all slices are read from replicas: rank 3"
    hint = "Try: copy the file again from where it was saved"
    assert notes == [f"run/rank_2/net.ckpt: cut short\n  {facts}\n  {hint}"]


def test_a_damaged_file_whose_replicas_are_damaged_too_is_an_error():
    damage, problems, notes = outcome(damaged(FULL, 2, 3), content_groups=SAME)
    assert len(damage) == 2
    assert problems == ["w: some slices are on no rank\n  ranks 2, 3: not read"]
    assert not notes


def test_missing_and_damaged_ranks_are_replaced_together():
    catalog = damaged(catalog_of({r: {"w": (4, 3)} for r in (0, 1, 2)}), 0)
    damage, problems, notes = outcome(catalog)
    assert not damage
    assert not problems
    assert [note.split("\n ")[1] for note in notes] == [
        " byte 7; all slices are read from replicas: rank 1",
        " all slices are read from replicas: rank 2",
    ]


def test_slices_of_an_optimizer_shard_have_no_replicas():
    strategy = strategy_of({"w": SHARDED})
    catalog = damaged(catalog_of({rank: {"w": (2, 3)} for rank in range(4)}), 1)
    damage, problems, _ = outcome(catalog, strategy)
    assert len(damage) == 1
    assert problems == ["w: some slices are on no rank\n  rank 1: not read"]


def test_states_that_the_strategy_forgot_are_replaced_like_their_parameter():
    catalog = catalog_of({rank: {"w": (4, 3), "adam_m.w": (4, 3)} for rank in range(4)})
    damage, problems, notes = outcome(damaged(catalog, 0))
    assert not damage
    assert not problems
    assert "replicas: rank 1" in notes[0]


def test_what_a_file_held_besides_is_not_known_if_the_others_do_not_hold_the_same():
    """As in a checkpoint that was saved without redundancy."""
    ranks = {0: {"w": (4, 3)}, 1: {"w": (4, 3)}, 2: {}, 3: {"w": (4, 3), "step": ()}}
    damage, problems, notes = outcome(damaged(catalog_of(ranks), 0))
    assert len(damage) == 1
    the_one(problems, "rank 0: replicas do not replace what is damaged", "different parameters")
    assert not notes


def test_ranks_that_lose_the_same_are_named_together():
    strategy = strategy_of({"w": SHARDED, "v": SHARDED, "u": ROWS})
    ranks = {0: {"w": (2, 3), "v": (2, 3), "u": (4, 3)}}
    _, problems, _ = outcome(catalog_of(ranks), strategy)
    lost = "w and 1 more: ranks 1-3: no checkpoint file found in run; u: ranks 2, 3: no checkpoint"
    the_one(problems, "w, v, u: some slices are on no rank\n", lost)


def test_stages_need_not_hold_the_same_as_each_other():
    strategy = strategy_of({"a": ROWS}, {"b": ROWS})
    ranks = {rank: {"a" if rank < 4 else "b": (4, 3)} for rank in range(8)}
    damage, problems, notes = outcome(damaged(catalog_of(ranks), 1, 6), strategy)
    assert not damage
    assert not problems
    facts = "  byte 7; all slices are read from replicas: ranks 0, 7"
    assert [note.splitlines()[1] for note in notes] == [facts] * 2


def test_a_stage_that_is_all_damaged_is_an_error():
    strategy = strategy_of({"a": ROWS}, {"b": ROWS})
    ranks = {rank: {"a" if rank < 4 else "b": (4, 3)} for rank in range(8)}
    damage, problems, _ = outcome(damaged(catalog_of(ranks), 4, 5, 6, 7), strategy)
    assert len(damage) == 4
    assert problems == ["b: some slices are on no rank\n  ranks 4-7: not read"]


def test_a_file_of_a_kind_that_is_not_read_is_not_replaced():
    damage, _, notes = outcome(damaged(FULL, 2, kind=UnsupportedError), content_groups=SAME)
    assert len(damage) == 1
    assert not notes


@pytest.mark.parametrize("kind", [UnreadableError, ForeignError])
def test_a_file_that_cannot_be_read_is_replaced(kind):
    damage, problems, notes = outcome(damaged(FULL, 2, kind=kind), content_groups=SAME)
    assert not damage
    assert not problems
    assert len(notes) == 1


def test_a_damaged_file_of_a_rank_that_is_not_in_the_strategy_is_an_error():
    catalog = damaged(catalog_of({rank: {"w": (4, 3)} for rank in (*range(4), 9)}), 9)
    damage, problems, _ = outcome(catalog)
    assert len(damage) == 1
    the_one(problems, "rank 9 is not in the strategy", "src.ckpt is for ranks 0-3")


def test_each_ranks_own_is_lost_with_a_damaged_file():
    catalog = damaged(catalog_of({r: {"w": (4, 3), "rng": (2,)} for r in range(4)}), 3)
    differ = {"rng": ((0,), (1,), (2,))}
    _, problems, _ = outcome(catalog, unlisted="rank", content_groups=differ)
    the_one(problems, "rank 3: own values of 1 parameter are lost", "rng:", "--unlisted first")
    for choice in ("first", "drop"):
        damage, problems, notes = outcome(catalog, unlisted=choice, content_groups=differ)
        assert not damage
        assert not problems
        assert len(notes) == 1


def test_each_ranks_own_of_a_missing_rank_is_told_to_be_lost():
    catalog = catalog_of({r: {"w": (4, 3), "rng": (2,)} for r in range(3)})
    differ = {"rng": ((0,), (1,), (2,))}
    _, problems, notes = outcome(catalog, unlisted="rank", content_groups=differ)
    assert not problems
    assert notes[0].startswith("rank 3: own values of 1 parameter are lost\n  rng: not in the ")


def test_where_every_rank_holds_everything_any_other_replaces_a_damaged_one():
    catalog = damaged(catalog_of({rank: {"w": (4, 3)} for rank in range(3)}), 0)
    strategy = Strategy.without_layouts(3)
    damage, problems, notes = outcome(catalog, strategy, content_groups={"w": ((1, 2),)})
    assert not damage
    assert not problems
    assert "replicas: rank 1" in notes[0]
    damage, *_ = outcome(damaged(catalog_of({0: {"w": (4,)}}), 0), Strategy.without_layouts(1))
    assert len(damage) == 1


def test_a_listed_parameter_that_no_rank_saved_is_not_lost_with_one_of_several_replicas():
    strategy = strategy_of({"w": ROWS, "frozen": ROWS})
    catalog = catalog_of({rank: {"w": (4, 3)} for rank in range(4)})
    _, problems, notes = find(damaged(catalog, 2), strategy)
    assert not problems
    the_one(notes["unsaved"], "1 parameter is in the strategy and in no file\n  frozen")
    damage, problems, _ = outcome(damaged(catalog, 2, 3), strategy)
    assert len(damage) == 2
    assert problems[1:] == ["w: some slices are on no rank\n  ranks 2, 3: not read"]
    the_one(problems[:1], "frozen: some slices", "ranks 2, 3: not read; ranks 0, 1: not in run/")


def test_a_parameter_of_a_layout_without_replicas_is_lost_with_its_rank():
    catalog = catalog_of({rank: {"w": (4,)} for rank in range(2)})
    damage, problems, _ = outcome(damaged(catalog, 1), strategy_of({"w": Layout((2,), ((0,),))}))
    assert len(damage) == 1
    assert problems == ["w: some slices are on no rank\n  rank 1: not read"]


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
