"""MindSpore goes on with what we wrote, by the strategy that we wrote."""

from __future__ import annotations

import math
import random

import pytest
from msgspec.structs import replace

import ckpttool
from ckpttool.checkpoint.optimizer_state import (
    has_expected_full_shape,
)
from ckpttool.model.layout import Layout
from ckpttool.model.names import drop_unlike_shapes, match_states, parse_name
from ckpttool.model.tensors import TensorMeta
from ckpttool.strategy_files.writer import _encoded_tensor_maps
from tests.e2e.interop.cases import SEED, every_cut, every_cut_and_the_next, on
from tests.support.checkpoints import noise, strategy_of, write_file
from tests.support.commands import run_well
from tests.support.corpus import differences, digests
from tests.support.plans import plan_split
from tests.support.readers import read, read_ranks

SIZE = ["--max-shard-size", "300B"]


@every_cut_and_the_next
def test_mindspore_merges_our_ranks_by_our_strategy(src, dst, mindspore, tmp_path):
    told = tmp_path / "told.ckpt"
    words = ["-s", src.strategy, "-d", dst.strategy, "-o", tmp_path / "ours", "--format", "ckpt"]
    run_well("reshard", src.folder / "ckpt", *words, "--write-strategy", told)
    merge(mindspore, tmp_path / "ours", told, tmp_path / "theirs")
    run_well("merge", tmp_path / "ours", "-s", told, "-o", tmp_path / "merged.ckpt")
    want, found = read(tmp_path / "merged.ckpt"), read_ranks(tmp_path / "theirs")
    assert not differences(digests({0: want}), digests(found))[:3]
    assert not differences(digests({0: src.full}), digests(found))[:3]


@every_cut_and_the_next
def test_mindspore_cuts_by_our_strategy_as_we_do(src, dst, mindspore, tmp_path):
    told = tmp_path / "told.ckpt"
    words = ["-d", dst.strategy, "-o", tmp_path / "ours", "--format", "ckpt"]
    full = tmp_path / "full" / "rank_0" / "full.ckpt"
    run_well("merge", src.folder / "ckpt", "-s", src.strategy, "-o", full)
    run_well("split", full, *words, "--write-strategy", told)
    split(mindspore, tmp_path / "full", told, tmp_path / "theirs")
    ours, theirs = (digests(read_ranks(tmp_path / name)) for name in ("ours", "theirs"))
    assert not differences(ours, theirs)[:3]


def merge(mindspore, source, strategy, out):
    words = {"source": source, "out": out, "src_strategy": strategy, "dst_strategy": None}
    mindspore.ask("transform", form="ckpt", **words)


def split(mindspore, source, strategy, out):
    words = {"source": source, "out": out, "src_strategy": None, "dst_strategy": strategy}
    mindspore.ask("transform", form="ckpt", **words)


@pytest.mark.parametrize("suffix", [".ckpt", ".json"])
@every_cut
def test_mindspore_reads_the_layouts_that_it_wrote(cut, mindspore, tmp_path, suffix):
    told, strategy = tmp_path / f"told{suffix}", ckpttool.read_strategy(str(cut.strategy))
    held = [layout for of in strategy.layouts.values() for layout in of]
    has_lists = any(len(_encoded_tensor_maps(layout)) > 1 for layout in held)
    if suffix == ".json" and has_lists:
        with pytest.raises(ckpttool.StrategyError, match="a list for each axis in tensor_map"):
            ckpttool.write_strategy(strategy, str(told))
        return
    ckpttool.write_strategy(strategy, str(told))
    ours, theirs = (mindspore.ask("layouts", strategy_file=path) for path in (told, cut.strategy))
    for item in theirs.values():
        if item["opt_size"] == -1:
            sizes = item["device_matrix"][::-1]
            used = {axis for axes in item["tensor_map"] for axis in axes}
            item["opt_size"] = math.prod(n for i, n in enumerate(sizes) if i not in used)
    assert ours == theirs


@on("cut", [("adamw", "shard_2_4x2"), ("axes", "axes_2x2x2"), ("types", "numbers_4")])
def test_mindspore_merges_stages_of_which_we_wrote_the_only_one(cut, mindspore, tmp_path):
    strategy = ckpttool.read_strategy(str(cut.strategy))
    ckpttool.write_strategy(strategy, str(tmp_path / "stages" / "stage_0.ckpt"))
    merged = tmp_path / "merged.ckpt"
    mindspore.ask("merge_stages", folder=tmp_path / "stages", out=merged)
    assert ckpttool.read_strategy(str(merged)).layouts == strategy.layouts


@on("cut", [("adamw", "shard_2_4x2"), ("axes", "axes_2x2x2"), ("adamw", "stages_2_of_2")])
def test_load_distributed_checkpoint_cuts_by_our_strategy_as_we_do(cut, mindspore, tmp_path):
    parts, told = tmp_path / "parts", tmp_path / "told.ckpt"
    run_well("merge", cut.folder / "safetensors", "-s", cut.strategy, "-o", parts, *SIZE)
    words = ["-d", cut.strategy, "-o", tmp_path / "split", "--format", "safetensors"]
    run_well("split", parts, *words, "--write-strategy", told)
    mindspore.ask_all(
        [
            {"do": "load_unified", "folder": parts, "strategy": told}
            | {"out": tmp_path / "loaded", "rank": rank, "form": "safetensors"}
            for rank in sorted(cut.ranks)
        ]
    )
    want, found = read_ranks(tmp_path / "split"), read_ranks(tmp_path / "loaded")
    assert not differences(digests(want), digests(found))[:3]


def test_states_of_every_optimizer_are_known_by_their_prefixes(mindspore):
    found = mindspore.ask("optimizer_states")
    assert len(found) > 25
    for optimizer, shapes in found.items():
        metas = {name: TensorMeta(name, "Float32", tuple(shape)) for name, shape in shapes.items()}
        states = {name for name in metas if name not in "wb" and not metas[name].is_single}
        owners = drop_unlike_shapes(match_states(["w", "b"], metas), metas)
        assert states <= owners.keys(), optimizer
        unnamed = {name.partition(".")[0] for name in states if parse_name(name).parameter is None}
        assert unnamed <= {"linear", "prev"}, optimizer
        assert all(has_expected_full_shape(name, owners, metas) for name in states), optimizer


# ------------------------------------------------------------------------- of our own making

MATRICES = {4: [(4,), (2, 2), (2, 1, 2)], 8: [(8,), (2, 4), (4, 2), (2, 2, 2), (2, 2, 1, 2)]}


def random_layout(rng, ranks, first):
    matrix = rng.choice(MATRICES[ranks])
    tensor_map = [()] * rng.randint(1, 3)
    for axis in rng.sample(range(len(matrix)), rng.randint(0, len(matrix))):
        at = rng.randrange(len(tensor_map))
        tensor_map[at] += (axis,)
    one = Layout(matrix, tuple(tensor_map), 1, first)
    shards = [n for n in (1, 2, 4, 8) if one.replicas % n == 0]
    return Layout(matrix, tuple(tensor_map), rng.choice(shards), first)


def own_strategy(seed, ranks, stages):
    rng = random.Random(seed)
    made = [{} for _ in range(stages)]
    for number in range(24):
        stage = number % stages
        made[stage][f"w{number}"] = random_layout(rng, ranks, stage * ranks)
    swapped = Layout((2, ranks // 2), ((0,), ()), 2)
    made[0]["swapped"] = swapped if ranks < 8 else Layout((2, 2, 2), ((0,), (1,)), 2)
    return strategy_of(*made)


@pytest.mark.parametrize(("ranks", "stages"), [(4, 1), (8, 1), (4, 2)])
@pytest.mark.parametrize("number", range(2))
def test_mindspore_takes_strategies_of_our_own_making(number, ranks, stages, mindspore, tmp_path):
    strategy = own_strategy(f"{SEED} {number}", ranks, stages)
    full = {
        name: noise(name, "Float32", tuple(2 * n for n in layouts[0].slice_counts))
        for name, layouts in strategy.layouts.items()
    }
    full |= {"frozen": noise("frozen", "Float32", (3, 2)), "step": noise("step", "Int32", (1,))}
    write_file(tmp_path / "full" / "rank_0" / "full.ckpt", full, "ckpt")
    catalog = ckpttool.scan(str(tmp_path / "full" / "rank_0" / "full.ckpt"))
    told, ours = str(tmp_path / "told.ckpt"), tmp_path / "ours"
    strategy = replace(strategy, files=())
    plan, destination = plan_split(
        catalog,
        strategy,
        str(ours),
        output_options=ckpttool.OutputOptions("ckpt", strategy_path=told),
    )
    ckpttool.execute(plan, destination)
    merge(mindspore, ours, told, tmp_path / "merged")
    found = digests(read_ranks(tmp_path / "merged"))
    assert not differences(digests({0: full}), found)[:3]
    split(mindspore, tmp_path / "full", told, tmp_path / "cut")
    found = digests(read_ranks(tmp_path / "cut"))
    assert not differences(digests(read_ranks(ours)), found)[:3]
