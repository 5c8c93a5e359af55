"""What ckpttool wrote, loaded by every loader that MindSpore has."""

from __future__ import annotations

import pytest

from tests.e2e.interop.cases import FAMILIES, SEED, every_cut, every_cut_and_the_next, on
from tests.e2e.interop.saved import as_digests, resharded, wrong
from tests.support.commands import run_well
from tests.support.corpus import digests
from tests.support.readers import rank_file, read_ranks, split_safetensors

LOADED = ("ckpt", "safetensors")  # MindSpore reads no HDF5 by itself

# load_distributed_checkpoint fails on a parameter with two device axes on one tensor axis, and on
# one with an optimizer shard over ranks that are not evenly spaced; neither is among these.
SIMPLE = [("adamw", cut) for cut in FAMILIES["adamw"] if "stages" not in cut]
SIMPLE_PAIRS = list(zip(SIMPLE, SIMPLE[1:] + SIMPLE[:1], strict=True))


@every_cut
@pytest.mark.parametrize("form", LOADED)
def test_load_checkpoint_reads_what_split_writes(cut, form, mindspore, tmp_path):
    source = cut.folder / "full.ckpt"
    run_well("split", source, "-d", cut.strategy, "-o", tmp_path, "--format", form)
    paths = [tmp_path / f"rank_{r}" / f"checkpoint_{r}.{form}" for r in sorted(cut.ranks)]
    found = mindspore.ask_all([{"do": "load", "path": path} for path in paths])
    assert not wrong(cut, cut, {rank: as_digests(found[rank]) for rank in cut.ranks})


@every_cut
@pytest.mark.parametrize("form", LOADED)
def test_load_checkpoint_reads_what_convert_writes(cut, form, mindspore, tmp_path):
    (other,) = {*LOADED} - {form}
    run_well("convert", cut.folder / other, "-o", tmp_path / "out", "--format", form)
    paths = [rank_file(tmp_path / "out", rank) for rank in sorted(cut.ranks)]
    found = mindspore.ask_all([{"do": "load", "path": path} for path in paths])
    assert not wrong(cut, cut, {rank: as_digests(found[rank]) for rank in cut.ranks})


@every_cut
@pytest.mark.parametrize("form", LOADED)
def test_save_checkpoint_writes_a_file_of_ours_again_byte_for_byte(cut, form, mindspore, tmp_path):
    merged, again = tmp_path / f"merged.{form}", tmp_path / f"again.{form}"
    run_well("merge", cut.folder / form, "-s", cut.strategy, "-o", merged)
    mindspore.ask("save_again", path=merged, out=again)
    if form == "ckpt":
        assert merged.read_bytes() == again.read_bytes()
    else:
        assert split_safetensors(merged)[1:] == split_safetensors(again)[1:]


@every_cut_and_the_next
def test_load_param_into_net_takes_what_reshard_writes(src, dst, mindspore, tmp_path):
    rank = SEED % dst.recipe["ranks"]
    form = LOADED[dst.recipe["ranks"] // 2 % 2]  # both occur
    words = ["-s", src.strategy, "-d", dst.strategy, "-o", tmp_path, "--format", form]
    run_well("reshard", src.folder / form, *words, "--rank", rank)
    path = tmp_path / f"rank_{rank}" / f"checkpoint_{rank}.{form}"
    missed, holds = mindspore.ask("load_into_network", recipe=dst.recipe, rank=rank, path=path)
    own = dst.ranks[rank]
    given = resharded(src, dst)[rank].keys() & own.keys()
    found = as_digests(holds)
    assert {name: found[name] for name in given} == {name: own[name].digest for name in given}
    assert not given & set(missed)
    assert own.keys() - given == {name for name in own if name not in src.full}


@pytest.mark.parametrize("compiled", [True, False], ids=["into-a-rank", "into-one-device"])
@pytest.mark.parametrize(("dst", "src"), SIMPLE_PAIRS, indirect=True, ids=map("-".join, SIMPLE))
def test_load_distributed_checkpoint_takes_the_files_of_all_ranks(
    src, dst, compiled, mindspore, tmp_path
):
    run_well(
        "split", dst.folder / "full.ckpt", "-d", src.strategy, "-o", tmp_path, "--format", "ckpt"
    )
    rank = dst.recipe["ranks"] - 1
    holds = mindspore.ask(
        "load_distributed",
        recipe=dst.recipe,
        rank=rank,
        files=[tmp_path / f"rank_{r}" / f"checkpoint_{r}.ckpt" for r in sorted(src.ranks)],
        train_strategy=src.strategy,
        compiled=compiled,
    )
    want = dst.ranks[rank] if compiled else dst.full
    listed = mindspore.ask("layouts", strategy_file=src.strategy)  # it loads no others
    assert listed.keys() < want.keys()
    found = as_digests(holds)
    assert {name: found[name] for name in listed} == {name: want[name].digest for name in listed}


@pytest.mark.parametrize("form", LOADED)
@on("cut", [("adamw", "shard_2_4x2"), ("types", "axes_2x2x2"), ("other", "stages_2_of_2")])
def test_transform_checkpoints_cuts_a_merged_file_of_ours(cut, form, mindspore, tmp_path):
    merged = tmp_path / "merged" / "rank_0" / f"merged.{form}"
    run_well("merge", cut.folder / form, "-s", cut.strategy, "-o", merged)
    out = tmp_path / "out"
    words = {"src_strategy": None, "dst_strategy": cut.strategy, "form": form}
    mindspore.ask("transform", source=merged.parents[1], out=out, **words)
    assert not wrong(cut, cut, digests(read_ranks(out)))
