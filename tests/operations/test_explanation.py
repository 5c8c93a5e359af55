"""What each rank holds: the elements that it is said to hold are those of its file."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

import ckpttool
from ckpttool.checkpoint.checkpoint import ResolveOptions
from ckpttool.model.choices import TensorOptions
from ckpttool.model.layout import Layout
from ckpttool.operations.explanation import Explained, explain
from ckpttool.problems import PlanError
from tests.strategies import examples, moves, table_moves
from tests.support.checkpoint2 import Save
from tests.support.checkpoints import cut, noise, oracle, strategy_of, write_ranks
from tests.support.corpus import GOLDEN, expected, merged_by_oracle, source_ranks, split_by_oracle

CASES = [
    *("tutorial_8_to_8_retrain", "bfloat16_model", "json_multi_axis", "layout_multi_axis_optshard"),
    *("moe_ep4_mp2", "optshard_size2_adam_8_to_4", "pipeline_8_to_2x4", "tp_conv_4d"),
    *("pipeline_shared_embedding_both", "uneven_manual_split", "tp_mesh_2x2x2_permuted"),
]


def explained(case, *, has_target=False, **options) -> Explained:
    folder = GOLDEN / case
    names = ("src", "dst")[: 1 + has_target]
    found = ((folder / f"{one}_strategy.{end}" for end in ("ckpt", "json")) for one in names)
    paths = [next(path for path in ways if path.exists()) for ways in found]
    strategies = [ckpttool.read_strategy(str(path)) for path in paths]
    return explain(ckpttool.scan(str(folder / "src")), *strategies, **options).parts


def excerpt(entry, regions):
    parts = [entry.array()[(*map(slice, region.start, region.stop), ...)] for region in regions]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def check_source(found, full, ranks):
    """Compare what ranks are said to hold with what is in their files."""
    held = {(rank, name) for rank, entries in ranks.items() for name in entries}
    for name, one in found.tensors.items():
        for part in one.slices:
            for rank in part.holders:
                held.remove((rank, name))
                stored = ranks[rank][name]
                if stored.data:
                    assert excerpt(full[name], part.regions).tobytes() == stored.data, (rank, name)
    assert held == set()


def check_target(found, full, ranks, wanted):
    """Compare what target ranks are said to take with the slices that they should get."""
    for name, one in found.tensors.items():
        for part in one.slices:
            (region,) = part.regions
            made = np.zeros_like(excerpt(full[name], [region]))
            for taken in one.taken[part]:
                dst = taken.region.relative_to(region.start)
                source = excerpt(ranks[taken.rank][name], [taken.src])
                made[(*map(slice, dst.start, dst.stop), ...)] = source
            for rank in part.owners:
                assert made.tobytes() == wanted[rank].pop(name).data
    assert {rank: names for rank, names in wanted.items() if names} == {}


@pytest.mark.parametrize("case", CASES)
def test_ranks_hold_and_take_what_is_said(case):
    full, ranks = merged_by_oracle(case), source_ranks(case)
    found = explained(case)
    assert found.ranks == sorted(ranks)
    parts = [part for one in found.tensors.values() for part in one.slices]
    assert [part.holders for part in parts] == [part.owners for part in parts]
    check_source(found, full, ranks)
    if "dst" in expected(case)["strategies"]:
        check_target(explained(case, has_target=True), full, ranks, split_by_oracle(case, full))


@examples(60)
@given(st.one_of(moves(has_state=True), table_moves()))
def test_whatever_the_layouts_are_the_files_hold_what_is_said(new_folder, move):
    ranks = cut(move.entries, move.src)
    folder = write_ranks(new_folder() / "src", ranks, "ckpt")
    source = ckpttool.scan(str(folder)), replace(move.src, files=())
    target, options = replace(move.dst, files=()), ResolveOptions(trust_strategy=True)
    check_source(explain(*source, options=options).parts, move.entries, ranks)
    found = explain(*source, target, options=options).parts
    check_target(found, move.entries, ranks, cut(move.entries, target))


@pytest.mark.parametrize("remove_redundancy", [False, True])
def test_checkpoint_2_is_explained_by_what_it_describes(tmp_path, remove_redundancy):
    layout = Layout((2, 2, 2), ((1,), (0,)))
    full = {"w": noise("w", "Float32", (4, 6)), "adam_m.w": noise("adam_m.w", "Float32", (4, 6))}
    layouts = dict.fromkeys(full, (oracle(layout),))
    Save(full, layouts, 8, remove_redundancy=remove_redundancy).write(tmp_path / "src")
    found = explain(ckpttool.scan(str(tmp_path / "src"))).parts
    assert found.tensors.keys() == full.keys()
    for name, one in found.tensors.items():
        assert {rank for part in one.slices for rank in part.holders} <= {*range(8)}
        for part in one.slices:
            (region,) = part.regions
            for rank in part.holders:
                assert layout.region(rank, (4, 6)) == region, name
    (row,) = found.rows
    assert row.prefixes == ("", "adam_m.")


@pytest.mark.parametrize("shape", [(8, 6), (0, 6)])
@pytest.mark.parametrize("rank", [0, 3])
def test_who_holds_the_same_in_a_target_is_the_same_for_one_rank_and_for_all(
    checkpoint, rank, shape
):
    catalog, strategy = checkpoint(WIDE, shape)
    target = target_of(Layout((4, 2), ((0,), ())))
    whole = explain(catalog, strategy, target).parts
    alone = explain(catalog, strategy, target, rank=rank).parts
    ranks = {8: (rank % 2, rank % 2 + 2, rank % 2 + 4, rank % 2 + 6), 0: (*range(8),)}[shape[0]]
    (group,) = alone.groups
    assert group.ranks == ranks
    assert group in whole.groups
    (part,) = alone.tensors["w"].slices
    assert part in whole.tensors["w"].slices


@pytest.mark.parametrize("has_target", [False, True])
@pytest.mark.parametrize("rank", [0, 3])
def test_a_rank_alone_has_its_part_of_the_answer_for_all(rank, has_target):
    whole = explained("pipeline_8_to_2x4", has_target=has_target)
    alone = explained("pipeline_8_to_2x4", has_target=has_target, rank=rank)
    for name, one in whole.tensors.items():
        mine = [part for part in one.slices if rank in part.owners]
        assert mine == [*(alone.tensors[name].slices if name in alone.tensors else ())]
    assert {name for row in alone.rows for name in (one.name for one in row.entries)} == {
        *alone.tensors
    }
    (group,) = alone.groups
    assert group in whole.groups
    assert rank in group.ranks


def target_of(layout):
    return replace(strategy_of({"w": layout}), files=())


WIDE = Layout((2, 4), ((0,), ()))  # four slices of rows, two replicas


@pytest.fixture
def checkpoint(tmp_path):
    """A function: a catalog of ranks that hold slices, and the strategy."""

    def make(layout=WIDE, shape=(8, 6), lost=()):
        strategy = target_of(layout)
        ranks = cut({"w": noise("w", "Float32", shape)}, strategy)
        kept = {rank: one for rank, one in ranks.items() if rank not in lost}
        write_ranks(tmp_path / "src", kept, "ckpt")
        return ckpttool.scan(str(tmp_path / "src")), strategy

    return make


def test_a_missing_rank_is_explained_by_its_layout(checkpoint):
    found = explain(*checkpoint(lost=[2]), rank=2).parts
    (part,) = found.tensors["w"].slices
    assert (str(part.regions[0]), part.owners, part.holders) == ("[4:6, 0:6]", (2, 6), (6,))
    assert found.matrices == {(2, 4): (0, 2)}


@pytest.mark.parametrize(("lost", "tensors"), [([6], 2), ([2], 2), ([2, 6], 1)])
def test_a_lost_rank_is_with_those_that_should_hold_the_same(tmp_path, lost, tensors):
    strategy = target_of(WIDE)
    ranks = cut({"w": noise("w", "Float32", (8, 6))}, strategy)
    state = noise("rng", "Float32", (4,))  # nothing lists it: what a lost rank had is not known
    held = {rank: {**one, "rng": state} for rank, one in ranks.items() if rank not in lost}
    write_ranks(tmp_path / "src", held, "ckpt")
    catalog = ckpttool.scan(str(tmp_path / "src"))
    found = explain(catalog, strategy).parts
    assert [one.ranks for one in found.groups] == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert [one.lost for one in found.groups] == [(), (), tuple(lost), ()]
    assert [one.tensors for one in found.groups] == [2, 2, tensors, 2]
    alone = explain(catalog, strategy, rank=lost[0]).parts
    assert alone.groups == (found.groups[2],)
    assert (alone.tensors.keys(), alone.nbytes) == ({"w"}, 2 * 6 * 4)


def test_of_a_tensor_that_lacks_slices_the_others_are_explained(checkpoint):
    found = explain(*checkpoint(lost=[2, 6])).parts
    assert found.metas["w"].shape == (8, 6)
    stored = {str(part.regions[0]): part.holders for part in found.tensors["w"].slices}
    assert stored == {
        "[0:2, 0:6]": (0, 4),
        "[2:4, 0:6]": (1, 5),
        "[4:6, 0:6]": (),
        "[6:8, 0:6]": (3, 7),
    }
    assert [one.code for one in found.found.errors] == ["missing"]


def test_a_hidden_optimizer_shard_is_explained_with_what_the_strategy_lists(checkpoint):
    catalog, _ = checkpoint(Layout((8,), ((), ()), 4))
    hiding = target_of(Layout((8,), ((), ())))
    found = explain(catalog, hiding, rank=5, options=ResolveOptions(optimizer_shard=4)).parts
    one = found.tensors["w"]
    assert (one.listed_shard, one.layouts[0].optimizer_shard) == (1, 4)
    assert [(str(part.regions[0]), part.owners) for part in one.slices] == [("[2:4, 0:6]", (1, 5))]


@pytest.mark.parametrize("rank", [None, 5])
def test_each_device_matrix_has_the_names_of_its_tensors(rank):
    found = explained("tutorial_8_to_8_retrain", rank=rank)
    wanted: dict[tuple[int, tuple[int, ...]], list[str]] = {}
    for name, one in found.tensors.items():
        for layout in one.layouts:
            wanted.setdefault((0, layout.device_matrix), []).append(name)
    assert {key: [*names] for key, names in found.names_of.items()} == wanted
    assert {matrix for _, matrix in wanted} == {(2, 2, 2), (8,)}
    assert {*found.matrices} == ({(2, 2, 2), (8,)} if rank else set())


@pytest.mark.parametrize("rank", [2, 6])
def test_a_stage_names_only_its_own_tensors(rank):
    found = explained("pipeline_2x4_to_8", rank=rank)
    assert {stage for stage, _ in found.names_of} == {rank // 4}
    whole = explained("pipeline_2x4_to_8")
    for key, names in found.names_of.items():
        assert {*names} == {*whole.names_of[key]}


@pytest.mark.parametrize(
    ("patterns", "tensors"), [([], ["v", "w"]), (["w"], ["w"]), (["[vx]"], ["v"]), (["x"], [])]
)
def test_the_error_of_a_target_that_cannot_be_names_the_chosen_tensors(tmp_path, patterns, tensors):
    full = {name: noise(name, "Float32", (8, 6)) for name in "vwx"}
    strategy = replace(strategy_of(dict.fromkeys(full, WIDE)), files=())
    write_ranks(tmp_path / "src", cut(full, strategy), "ckpt")
    three = Layout((3,), ((0,), ()))
    target = strategy_of({"v": three, "w": three, "x": Layout((3,), ((), ()))})
    catalog = ckpttool.scan(str(tmp_path / "src"))
    options = ResolveOptions(tensors=TensorOptions(patterns))
    refused: dict[str | None, str] = {}
    try:
        explain(catalog, strategy, replace(target, files=()), options=options)
    except PlanError as error:
        refused = {one.tensor: one.facts for one in error.diagnostics}
    facts = "axis 0 of (8, 6) is divisible by 2 or 4, not by 3"
    assert refused == dict.fromkeys(tensors, facts)


@pytest.mark.parametrize("target", [None, target_of(Layout((4,), ((0,), ())))])
@pytest.mark.parametrize(
    ("words", "fact"),
    [
        ({"rank": 8}, "there is no rank 8"),
        ({"include": ["v"]}, "no tensor matches 'v'"),
        ({"include": ["w", "re:^x"]}, "no tensor matches 're:^x'"),
    ],
)
def test_an_unknown_rank_or_name_is_an_error(checkpoint, target, words, fact):
    tensors = TensorOptions(words.get("include", ()), shown_by="--tensor")
    with pytest.raises(PlanError) as refused:
        explain(
            *checkpoint(), target, rank=words.get("rank"), options=ResolveOptions(tensors=tensors)
        )
    (problem,) = refused.value.diagnostics
    assert problem.message == fact


def test_ranks_without_a_strategy_are_an_error(checkpoint):
    catalog, _ = checkpoint()
    with pytest.raises(PlanError) as refused:
        explain(catalog)
    assert [one.code for one in refused.value.diagnostics] == ["no_strategy"]
