"""Which source ranks a target rank needs: against MindSpore, the oracle and what is read."""

import math
import re
import warnings
from collections import defaultdict
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

import ckpttool
from ckpttool.checkpoint.hidden_shards import ranks_that_show_shards
from ckpttool.model.layout import Layout
from ckpttool.planning.needs import find_needs
from ckpttool.problems import PlanError
from ckpttool.wording import parse_numbers
from tests.oracle import take
from tests.strategies import MATRICES, examples, layouts, moves, table_moves
from tests.support.checkpoints import cut, oracle, strategy_of, write_ranks
from tests.support.corpus import conversion

RANK_LISTS = Path(__file__).with_name("rank_lists.txt").read_text(encoding="utf-8")


def rank_lists():
    for line in RANK_LISTS.splitlines():
        if not line.startswith("#"):
            words, sources = line.split(": ")
            case, kind, targets = words.split()
            yield case, kind, parse_numbers(targets), {*parse_numbers(sources)}


def strategies(case, kind):
    one = conversion(case, kind)
    return [
        None if name is None else ckpttool.read_strategy([str(one.folder / name)])
        for name in (one.src_strategy, one.dst_strategy)
    ]


def taken_by_oracle(src, dst, shapes):
    """Return for each target rank and name the source ranks that hold each slice it takes."""
    found = defaultdict(dict)
    for name in src.layouts.keys() & dst.layouts.keys():
        numbers = np.arange(math.prod(shapes[name])).reshape(shapes[name])
        held = [
            {rank: frozenset(take(numbers, oracle(one), rank).flat) for rank in one.ranks}
            for one in src.layouts[name]
        ]
        for layout in dst.layouts[name]:
            for rank in layout.ranks:
                wanted = frozenset(take(numbers, oracle(layout), rank).flat)
                stages = []
                for of_stage in held:
                    owners = defaultdict(set)
                    for source, elements in of_stage.items():
                        if elements & wanted:
                            owners[elements].add(source)
                    stages.append([*owners.values()])
                found[rank][name] = stages
    return found


def are_hit(groups, ranks):
    return all(not group.isdisjoint(ranks) for group in map(set, groups))


def smallest(groups):
    groups = {*map(frozenset, groups)}
    return {group for group in groups if not any(other < group for other in groups)}


@pytest.mark.parametrize("case", sorted({case for case, *_ in rank_lists()}))
def test_mindspore_reads_the_ranks_that_are_fetched_and_one_of_each_group(case):
    for of_case, kind, targets, sources in rank_lists():
        if of_case == case:
            src, dst = strategies(case, kind)
            needs = find_needs(src, dst, None if dst is None else targets)
            assert len(needs.ranks) == len(targets)
            for need in needs.ranks:
                assert {*need.fetch} <= sources, need
                assert are_hit(need.groups, sources), need


@examples(200)
@given(moves())
def test_needs_are_those_of_the_oracle(move):
    shapes = {name: entry.shape for name, entry in move.entries.items()}
    taken = taken_by_oracle(move.src, move.dst, shapes)
    names = move.src.layouts.keys()
    are_all_listed = names <= move.dst.layouts.keys() and all(map(math.prod, shapes.values()))
    for one in find_needs(move.src, move.dst).ranks:
        for stages in taken[one.rank].values():
            assert any(are_hit(groups, one.fetch) for groups in stages)
        plain = [stages[0] for stages in taken[one.rank].values() if len(stages) == 1]
        if are_all_listed and len(plain) == len(taken[one.rank]):
            assert smallest(one.groups) == smallest(chain(*plain))


@examples(100)
@given(table_moves())
def test_needs_of_tables_are_those_of_the_oracle(move):
    shapes = {name: entry.shape for name, entry in move.entries.items()}
    taken = taken_by_oracle(move.src, move.dst, shapes)
    try:
        needs = find_needs(move.src, move.dst)
    except PlanError:
        # Rows that the target cannot shard, whatever the other axes are.
        rows = sum(move.src.layouts["table"][0].rows)
        (layout,) = move.dst.layouts["table"]
        assert rows % layout.slice_counts[0] or rows != sum(layout.rows)
        return
    for need in needs.ranks:
        for (groups,) in taken[need.rank].values():
            assert are_hit(groups, need.fetch)


@examples(200)
@given(st.data())
def test_more_ranks_show_every_shard(data):
    layout = replace(data.draw(layouts(2, data.draw(st.sampled_from([*MATRICES])))), first_rank=24)
    layout = replace(layout, optimizer_shard=1)
    there = data.draw(st.sets(st.sampled_from(layout.ranks), min_size=1))
    more = ranks_that_show_shards([layout], there)
    assert len(more) <= 1
    for shard in range(2, layout.replicas + 1):
        if layout.replicas % shard == 0:
            cut = replace(layout, optimizer_shard=shard)
            for ranks, is_shown in ((there, not more), (there | {*more}, True)):
                groups = [[r for r in ranks if r in owners] for owners in layout.slice_owners()]
                differ = any(len({*map(cut.slice_index, group)}) > 1 for group in groups)
                assert differ or not is_shown


ROWS = Layout((2, 4), ((0,), ()))
HALVES = Layout((2,), ((0,), ()))


def test_one_of_several_replicas_is_enough():
    needs = find_needs(strategy_of({"w": ROWS}), strategy_of({"w": HALVES}), [1])
    (one,) = needs.ranks
    assert (one.rank, one.groups, one.fetch, one.also) == (1, ((2, 6), (3, 7)), (2, 3), (6,))
    assert (needs.together.rank, needs.together.fetch) == (None, (2, 3))


def test_a_merge_needs_one_replica_of_each_slice():
    (one,) = find_needs(strategy_of({"w": ROWS}), None).ranks
    assert (one.rank, one.groups) == (None, ((0, 4), (1, 5), (2, 6), (3, 7)))


def test_a_rank_that_holds_several_slices_is_fetched_once():
    columns = Layout((2, 2), ((), (0,)))
    src = strategy_of({"a": Layout((2, 2), ((1,), ())), "b": columns})
    dst = strategy_of({"a": HALVES, "b": replace(HALVES, tensor_map=((), (0,)))})
    (_, one) = find_needs(src, dst).ranks
    assert (one.groups, one.fetch) == (((1, 3), (2, 3)), (3,))


def test_a_strategy_that_lists_a_shard_hides_none():
    listed = {"w": ROWS, "v": replace(ROWS, optimizer_shard=2)}
    assert find_needs(strategy_of(listed), strategy_of({"w": HALVES}), [0]).together.also == ()


def test_the_full_shapes_of_json_hide_no_shard():
    src = strategy_of({"w": replace(ROWS, full_shape=(8, 3))})
    assert find_needs(src, strategy_of({"w": HALVES}), [0]).together.also == ()


def test_a_shape_that_the_target_cannot_shard_is_an_error():
    src = strategy_of({"w": replace(ROWS, full_shape=(8, 3))})
    with pytest.raises(PlanError, match=r"axis 0 of .8, 3. is divisible by 2 or 4, not by 3"):
        find_needs(src, strategy_of({"w": Layout((3,), ((0,), ()))}))


def test_a_target_rank_that_does_not_exist_is_an_error():
    with pytest.raises(PlanError, match=r"ranks 2, 5 are not in the target, which has 2 ranks"):
        find_needs(strategy_of({"w": ROWS}), strategy_of({"w": HALVES}), [0, 2, 5])


def test_a_shared_tensor_is_taken_from_a_stage_that_is_needed_anyway():
    shared = {"e": ROWS}
    src = strategy_of({**shared, "a": ROWS}, {**shared, "b": ROWS})
    dst = strategy_of({"a": HALVES}, {"e": HALVES, "b": HALVES})
    of_last = find_needs(src, dst, [3]).together
    assert of_last.groups == ((10, 14), (11, 15))


def write(path, text):
    path.write_text(f"ckpttool_strategy: 1\n{text}", encoding="utf-8")
    return ckpttool.read_strategy([str(path)])


def test_patterns_take_the_names_of_the_other_strategy(tmp_path):
    by_hand = write(tmp_path / "t.yaml", "ranks: 2\nparameters:\n  '*.w': {axis: 0}\n")
    listed = strategy_of({"a.w": ROWS})
    assert find_needs(listed, by_hand, [1]).together.fetch == (2, 3)
    (one,) = find_needs(by_hand, listed, [3]).ranks
    assert (one.groups, one.also) == (((1,),), ())


def test_patterns_stand_for_names_if_both_strategies_are_written_by_hand(tmp_path):
    src = write(tmp_path / "s.yaml", "ranks: 4\nparameters:\n  'a.*.w': {axis: 0}\n")
    dst = write(tmp_path / "t.yaml", "ranks: 2\nparameters:\n  '*.w': {axis: 0}\n")
    assert find_needs(src, dst, [1]).together.groups == ((2,), (3,))
    assert len(find_needs(src, None).together.groups) == 4


@pytest.mark.parametrize("cut", ["{axis: 0}", "{device_matrix: [4], tensor_map: [0, -1]}"])
def test_patterns_of_the_target_may_cut_more_than_the_source(tmp_path, cut):
    dst = write(tmp_path / "t.yaml", f"ranks: 4\nparameters:\n  '*w': {cut}\n")
    halves = Layout((2,), ((0,), ()))
    src = strategy_of({"w": halves, "adam_m.w": halves})
    assert [one.fetch for one in find_needs(src, dst).ranks] == [(0,), (0,), (1,), (1,)]
    by_hand = write(tmp_path / "s.yaml", "ranks: 2\nparameters:\n  '*w': {axis: 0}\n")
    assert [one.fetch for one in find_needs(by_hand, dst).ranks] == [(0,), (0,), (1,), (1,)]


def test_rows_of_the_target_are_the_shape(tmp_path):
    dst = write(tmp_path / "t.yaml", "ranks: 2\nparameters:\n  w: {axis: 0, rows: [9, 3]}\n")
    assert [one.groups for one in find_needs(strategy_of({"w": HALVES}), dst).ranks] == [
        ((0,), (1,)),
        ((1,),),
    ]


def test_patterns_fold_the_expanded_layouts_of_the_source(tmp_path):
    src = strategy_of({"w": Layout((2, 2), ((1,), (0,), ()), full_shape=(2, 4, 8))})
    dst = write(
        tmp_path / "t.yaml",
        "ranks: 4\nparameters:\n  w: {device_matrix: [4], tensor_map: [0, -1]}\n",
    )
    assert [one.groups for one in find_needs(src, dst).ranks] == [
        ((0,),),
        ((1,),),
        ((2,),),
        ((3,),),
    ]


def test_patterns_for_other_axes_are_an_error(tmp_path):
    cut = "{device_matrix: [2], tensor_map: [0]}"
    dst = write(tmp_path / "t.yaml", f"ranks: 2\nparameters:\n  w: {cut}\n")
    with pytest.raises(PlanError, match="is for 1 axis, not shape"):
        find_needs(strategy_of({"w": ROWS}), dst)


def compare(folder, some, src, dst, rank):
    """Compare what is read from a folder with some ranks with what is read from all of them."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        full = ckpttool.open(folder, src, target=dst, rank=rank)
        partly = ckpttool.open(some, src, target=dst, rank=rank)
    assert not re.findall("no checkpoint file|may hide", "".join(str(one.message) for one in said))
    assert partly.keys() == full.keys()
    for name, tensor in partly.items():
        assert (tensor.shape, tensor.stored_dtype) == (full[name].shape, full[name].stored_dtype)
        assert tensor[...].tobytes() == full[name][...].tobytes()


@examples(40)
@given(moves(has_state=True))
def test_random_slices_are_read_from_a_folder_of_the_fetched_ranks_alone(tmp_path_factory, move):
    ranks, folder = cut(move.entries, move.src), tmp_path_factory.mktemp("run")
    write_ranks(folder / "all", ranks, "ckpt")
    for needs in find_needs(move.src, move.dst).ranks[-2:]:
        there = {*needs.fetch, *needs.also}
        if not any(entry.data for rank in needs.fetch for entry in ranks[rank].values()):
            continue  # there is nothing to read
        some = write_ranks(folder / f"of_{needs.rank}", {r: ranks[r] for r in there}, "ckpt")
        compare(folder / "all", some, move.src, move.dst, needs.rank)
