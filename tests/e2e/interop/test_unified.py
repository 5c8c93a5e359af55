"""Checkpoints in several files, or without redundancy: what MindSpore writes, and loads."""

from __future__ import annotations

import pytest

from tests.e2e.interop.cases import CUTS, on
from tests.e2e.interop.saved import GRADIENTS, STATISTICS
from tests.oracle import OracleLayout, take
from tests.support.commands import message, run, run_well
from tests.support.corpus import differences, digests
from tests.support.readers import read, read_ranks, split_safetensors

SIZE = ["--max-shard-size", "300B"]
UNIFIED = [("adamw", "tensor_2x4"), ("adamw", "data_4"), ("adamw", "shard_2_4x2")]
UNIFIED += [("adamw", "shard_all_4x2"), ("adamw", "stages_2_of_2"), ("types", "axes_2x4")]


@pytest.fixture
def unify(mindspore, tmp_path):
    def unified(cut, source=None, **how):
        source = source or cut.folder / "safetensors"
        out = tmp_path / "unified"
        mindspore.ask("unify", source=source, strategy=cut.strategy, out=out, **how)
        return out

    return unified


@on("cut", UNIFIED)
def test_merge_of_mindspores_unified_folder_is_merge_of_the_ranks(cut, unify, tmp_path):
    folder, one, all_ = unify(cut), tmp_path / "one.safetensors", tmp_path / "all.safetensors"
    run_well("merge", cut.folder / "safetensors", "-s", cut.strategy, "-o", all_)
    result = run("merge", folder, "-o", one)
    gradients = {name for name in cut.full if name.startswith(GRADIENTS)}
    if not gradients:  # slices of rank 0, which MindSpore keeps as they are
        assert result.exit_code == 0
        assert split_safetensors(one)[1:] == split_safetensors(all_)[1:]
        return
    assert result.exit_code == 5
    assert f"{GRADIENTS}layers.0" in message(result)
    run_well("merge", folder, "-o", one, "--unlisted", "drop")
    found, want = read(one), read(all_)
    assert {*want} - gradients <= {*found}
    assert found == {name: want[name] for name in found}


@on("cut", CUTS)
def test_load_distributed_checkpoint_cuts_numbered_files_as_split_does(cut, mindspore, tmp_path):
    folder = tmp_path / "parts"
    run_well("merge", cut.folder / "safetensors", "-s", cut.strategy, "-o", folder, *SIZE)
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    words = ["-d", cut.strategy, "-o", tmp_path / "split", "--format", "safetensors"]
    run_well("split", folder, *words)
    mindspore.ask_all(
        [
            {"do": "load_unified", "folder": folder, "strategy": cut.strategy}
            | {"out": tmp_path / "loaded", "rank": rank, "form": "safetensors"}
            for rank in sorted(cut.ranks)
        ]
    )
    want, found = read_ranks(tmp_path / "split"), read_ranks(tmp_path / "loaded")
    for name, item in mindspore.ask("layouts", strategy_file=cut.strategy).items():
        if name.startswith(STATISTICS) and cut.recipe["optimizer_shard"]:
            # We cut them by the optimizer shard of their parameter, as MindSpore does when it
            # trains; the strategy omits it, and this loader knows nothing else.
            layout = OracleLayout(item["device_matrix"], item["tensor_map"], item["opt_size"])
            for rank, tensors in want.items():
                part = take(cut.full[name].array(), layout, rank)
                tensors[name] = tensors[name]._replace(shape=part.shape, data=part.tobytes())
    assert not differences(digests(want), digests(found))[:3]


@on("cut", [("adamw", "tensor_2x4"), ("types", "numbers_4")])
def test_numbered_files_are_opened_as_hugging_face_does(cut, mindspore, tmp_path):
    folder = tmp_path / "parts"
    run_well("merge", cut.folder / "safetensors", "-s", cut.strategy, "-o", folder, *SIZE)
    found = mindspore.ask("open_as_hugging_face", folder=folder)
    want = {name: list(entry.digest[1:]) for name, entry in cut.full.items()}
    assert {name: [tuple(shape), sha] for name, (shape, sha) in found.items()} == {
        name: [tuple(shape), sha] for name, (shape, sha) in want.items()
    }


@pytest.fixture
def alone(mindspore, tmp_path):
    def saved(cut):
        ranks = range(cut.recipe["ranks"])
        requests = [
            {"do": "save_without_redundancy", "recipe": cut.recipe, "rank": rank}
            | {"folder": tmp_path / "alone"}
            for rank in ranks
        ]
        counts = mindspore.ask_all(requests)
        assert sum(kept for _, kept in counts) < sum(held for held, _ in counts)
        return tmp_path / "alone"

    return saved


@pytest.mark.parametrize("form", ["ckpt", "safetensors"])
@on("cut", [("adamw", "data_4"), ("adamw", "tensor_2x4"), ("adamw", "shard_2_4x2")])
def test_what_is_saved_without_redundancy_is_merged(cut, alone, form, tmp_path):
    source = alone(cut) / form
    result = run_well("merge", source, "-s", cut.strategy, "-o", tmp_path / "merged.h5")
    found = differences(digests({0: cut.full}), digests({0: read(tmp_path / "merged.h5")}))
    assert not found[:3]
    assert "saved without redundancy" in message(result)


@on("cut", [("adamw", "tensor_2x4")])
def test_mindspores_unified_folder_of_it_is_read(cut, alone, unify, tmp_path):
    folder = unify(cut, alone(cut) / "safetensors", with_redundancy=False)
    run_well("merge", folder, "-o", tmp_path / "merged.h5")
    found = differences(digests({0: cut.full}), digests({0: read(tmp_path / "merged.h5")}))
    assert not found[:3]
