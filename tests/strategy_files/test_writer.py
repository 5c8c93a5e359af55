"""Strategy files that are written: MindSpore's form, spelled by hand, and read again."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ckpttool
from ckpttool.formats.wire import WireReader
from ckpttool.model.layout import Layout
from ckpttool.model.tensors import StoredFile
from ckpttool.problems import CombinedError, PlanError, StrategyError
from ckpttool.strategy_files.reader import read_strategy
from ckpttool.strategy_files.writer import encode_strategy
from tests.strategies import examples, layout_features, moves, table_moves
from tests.support.checkpoints import ROWS, strategy_of
from tests.support.commands import files_below
from tests.support.corpus import GOLDEN, SAMPLES
from tests.support.file_bytes import layout, message, number

NEVER = (GOLDEN / "dash_in_name", GOLDEN / "broken_inputs")


def stored(pattern="*"):
    """Every strategy file of MindSpore's in the corpus that tells all stages."""
    found = [*GOLDEN.glob(f"*/*_strategy{pattern}"), *SAMPLES.glob(f"*/strategy/*{pattern}")]
    found = [path for path in found if path.parent not in NEVER]
    return [
        pytest.param(path, id=str(path.relative_to(GOLDEN)))
        for path in sorted(found)
        if path.parts[-3][:3] != "pp2" or path.stem == "merged"
    ]


def operator(stage):
    """The item that stands for the operators of a stage."""
    name = message(1, f"ckpttool_stage_{stage}".encode())
    return message(2, name, message(2, number(1, stage)))


def written_layout(one, name="w"):
    """The item of a layout as it is written."""
    return encode_strategy(strategy_of({name: one}))[len(number(1, 1) + operator(0)) :]


@pytest.fixture
def again(tmp_path):
    """A function that writes a strategy and reads it."""

    def written(strategy):
        path = str(tmp_path / "again.ckpt")
        ckpttool.write_strategy(strategy, path, overwrite=True)
        return read_strategy(path)

    return written


def says_the_same(one, other):
    """Whether two strategies do not differ but in where they come from, and in full shapes."""
    return all(
        (
            one.layouts == other.layouts,
            (one.stages, one.stage_ranks) == (other.stages, other.stage_ranks),
        )
    )


# ------------------------------------------------------------------------------------- bytes


def test_the_bytes_of_a_small_file_are_these():
    data = encode_strategy(strategy_of({"w": Layout((2, 2, 2), ((1,), (0,)))}))
    assert data == bytes.fromhex(
        "0801"  # current_stage
        "1216 0a10 636b7074746f6f6c5f73746167655f30 1202 0800"  # ckpttool_stage_0, of stage 0
        "1a1d 0a0177 1218"  # w
        "0a06 080208020802"  # dev_matrix
        "1204 08010800"  # tensor_map
        "1a00 2200 2800 3000 3800"  # cut evenly, no fields, no optimizer shard
    )


def test_every_field_is_spelled_as_by_hand():
    table = Layout((2, 4), ((1,), ()), rows=(6, 4), optimizer_shard=2)
    fields = Layout((8,), ((0,), ()), fields=3)
    assert encode_strategy(strategy_of({"t": table, "f": fields})) == b"".join(
        (
            *(number(1, 1), operator(0)),
            layout("f", (8,), (0, -1), field=3),
            layout("t", (2, 4), (1, -1), size=2, step=1, split=(6, 4), starts=(0, 6)),
        )
    )


def test_stages_are_in_the_names_and_each_has_its_operators():
    late = replace(ROWS, first_rank=4)
    strategy = strategy_of({"w": ROWS, "a": ROWS}, {"w": late, "b": late})
    items = [layout(name, (2, 2), (1, -1)) for name in ("0-a", "0-w", "1-b", "1-w")]
    assert encode_strategy(strategy) == b"".join([number(1, 1), operator(0), operator(1), *items])


@pytest.mark.parametrize(
    ("tensor_map", "maps"),
    [
        ((), [()]),
        (((),), [(-1,)]),
        (((0,), ()), [(0, -1)]),
        (((2, 0),), [(2, 0), ()]),
        (((1, 0), ()), [(1, 0), (-1,)]),
        (((), (0, 1)), [(-1,), (0, 1)]),
        (((1,), (2, 0), ()), [(1,), (2, 0), (-1,)]),
    ],
)
def test_axes_that_are_cut_by_several_have_a_map_each_and_no_map_is_empty(tensor_map, maps):
    assert written_layout(Layout((2, 2, 2), tensor_map)) == layout("w", (2, 2, 2), *maps)


@pytest.mark.parametrize(
    ("matrix", "tensor_map", "shard", "step"),
    [
        ((8,), ((), ()), 8, 1),
        ((2, 4), ((1,), ()), 4, 1),
        ((2, 4), ((), (0,)), 2, 4),
        ((2, 2, 2), ((1,), ()), 4, 1),  # ranks 0, 1, 4 and 5
        ((2, 2, 2), ((1,), ()), 2, 1),
        ((2, 2, 2, 2), ((2,), (0,)), 4, 3),  # ranks 0, 2, 8 and 10
        ((2, 1, 2), ((0,), ()), 2, 2),
    ],
)
def test_the_step_is_the_mean_distance_in_the_replica_group_as_mindspore_reckons(
    matrix, tensor_map, shard, step
):
    maps = [axes[0] if axes else -1 for axes in tensor_map]
    spelled = layout("w", matrix, maps, size=shard, step=step)
    assert written_layout(Layout(matrix, tensor_map, shard)) == spelled


@pytest.mark.parametrize(
    ("one", "is_listed"),
    [
        (Layout((2, 2, 2), ((0,), (1,)), 2), True),
        (Layout((2, 2, 2), ((1,), (0,)), 2), False),
        (Layout((2, 2, 2), ((0,), (1,))), False),  # not sharded
        (Layout((2, 1, 3, 2), ((0,), (1,), (2,)), 2), True),
        (Layout((2, 1, 2), ((0,), (1,)), 2), False),  # an axis of one device cuts nothing
    ],
)
def test_a_shard_that_mindspore_would_misread_is_spelled_with_a_map_for_each_axis(one, is_listed):
    maps = one.tensor_map if is_listed else [[axis for (axis,) in one.tensor_map]]
    size, step = (2, math.prod(one.device_matrix[1:])) if one.optimizer_shard > 1 else (0, 0)
    assert written_layout(one) == layout("w", one.device_matrix, *maps, size=size, step=step)


# --------------------------------------------------------------------------------- and again


@pytest.mark.parametrize("path", stored())
def test_what_mindspore_wrote_is_the_same_when_it_is_written_and_read_again(path, again):
    strategy = read_strategy(str(path))
    assert says_the_same(strategy, again(strategy))


def numbers(path):
    """The numbers that a protobuf strategy file has of each name, as they are spelled."""
    found = {}
    with WireReader(StoredFile(str(path))) as reader:

        def fields(message):
            return reader.fields(message.start, message.stop)

        for item in reader.fields(0, reader.size):
            if item.number == 3:
                parts = {part.number: part for part in fields(item)}
                spelled = found[reader.text(parts[1])] = {n: [] for n in range(1, 8)}
                for one in fields(parts[2]):
                    dims = one.number < 5 and [n for f in fields(one) for n in reader.numbers(f)]
                    spelled[one.number].append(reader.number(one) if dims is False else dims)
    return found


@pytest.mark.parametrize("path", stored(".ckpt"))
def test_every_number_is_the_one_that_mindspore_wrote(path, again, tmp_path):
    """But for two: a shard of all replicas has its number, and some maps are a list of maps."""
    strategy = read_strategy(str(path))
    again(strategy)
    theirs, ours = numbers(path), numbers(tmp_path / "again.ckpt")
    if strategy.stages == 1 and ours.keys() != theirs.keys():  # merged, of one stage
        theirs = {name.removeprefix("0-"): item for name, item in theirs.items()}
    assert ours.keys() == theirs.keys()
    for name, item in theirs.items():
        if item[7] == [-1]:
            (matrix,) = item[1]
            used = {axis for axes in item[2] for axis in axes}
            item[7] = [math.prod(n for i, n in enumerate(matrix[::-1]) if i not in used)]
        if len(ours[name][2]) > len(item[2]):
            assert item[7] > [0]
            item[2] = [[axis] for axis in item[2][0]]
        for key in (6, 7):  # MindSpore 1.0 wrote none
            item[key] = item[key] or [0]
        assert ours[name] == item, name


@examples(200)
@given(st.one_of(moves(), table_moves()))
def test_random_layouts_are_the_same_again(tmp_path_factory, move):
    path = str(tmp_path_factory.getbasetemp() / "random.ckpt")
    for strategy in (move.src, move.dst):
        if why_not(strategy):
            with pytest.raises((StrategyError, CombinedError), match=why_not(strategy)):
                encode_strategy(strategy)
            continue
        ckpttool.write_strategy(strategy, path, overwrite=True)
        assert says_the_same(strategy, read_strategy(path))


def why_not(strategy):
    """What MindSpore's form cannot say of a random strategy, if anything."""
    held = [layout for of in strategy.layouts.values() for layout in of]
    if {layout.first_rank // strategy.stage_ranks for layout in held} != {*range(strategy.stages)}:
        return "no parameter of stage"
    no_rows = any(layout.rows and not any(layout.rows) for layout in held)
    return "without rows, which" if no_rows else None


@pytest.mark.slow
def test_random_layouts_are_of_every_kind():
    """Otherwise the test above would prove little."""
    seen = set()

    @settings(max_examples=200)
    @given(st.one_of(moves(), table_moves()))
    def collect(move):
        for strategy in (move.src, move.dst):
            held = [layout for of in strategy.layouts.values() for layout in of]
            if not why_not(strategy):
                seen.update([f"{strategy.stages} stages", *(w for x in held for w in words(x))])

    def words(one):
        yield from layout_features(one)
        yield from (["rows"] if one.rows else []) + (["fields"] if one.fields > 1 else [])

    collect()
    wanted = {"1 stages", "2 stages", "shard", "shard that does not align", "rows", "fields"}
    assert {*wanted, "one axis cut by several", "outermost axis not the first"} <= seen


# ----------------------------------------------------------------------- what cannot be said


@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        (strategy_of({"w": ROWS, "a-b": ROWS}), "'a-b': 1 parameter with a name that MindSpore"),
        (strategy_of({"": ROWS}), "'': 1 parameter with a name that MindSpore cannot read"),
        (
            strategy_of({"w": Layout((2, 2), ((1,), ()), rows=(0, 0))}),
            "'w': 1 parameter with a manual split without rows, which MindSpore ignores",
        ),
        (
            replace(strategy_of({"w": ROWS}), stages=2),
            "src.ckpt: no parameter of stage 1; MindSpore reads a strategy only if",
        ),
        (
            replace(strategy_of({"w": ROWS}), stage_ranks=8),
            "'w': 1 parameter with a layout of 4 ranks, and a stage has 8",
        ),
    ],
)
def test_what_mindspore_cannot_read_is_refused(tmp_path, strategy, said):
    with pytest.raises(StrategyError, match=re.escape(said)):
        ckpttool.write_strategy(strategy, str(tmp_path / "s.ckpt"))
    assert files_below(tmp_path) == []


def test_all_reasons_are_told_at_once():
    strategy = strategy_of({"a-b": ROWS, "w": replace(ROWS, rows=(0, 0)), "c-d": ROWS})
    with pytest.raises(CombinedError) as caught:
        encode_strategy(replace(strategy, stages=2))
    said = [error.where for error in caught.value.errors]
    assert said == ["src.ckpt", "'a-b', 'c-d'", "'w'"]


def test_patterns_of_names_are_not_layouts(tmp_path):
    (tmp_path / "hand.yaml").write_text("ckpttool_strategy: 1\nranks: 2\nparameters: {w: [2]}\n")
    strategy = read_strategy(str(tmp_path / "hand.yaml"))
    with pytest.raises(
        StrategyError, match=r"hand\.yaml: lists patterns of names, .*; split or reshard"
    ):
        ckpttool.write_strategy(strategy, str(tmp_path / "s.ckpt"))


def test_split_information_is_no_layout(tmp_path):
    path = tmp_path / "params_split_info_0.json"
    path.write_text('{"w": {"split": true, "group_size": 2, "rank_id": 0}}')
    with pytest.raises(StrategyError, match="lists the sharded axes only"):
        ckpttool.write_strategy(read_strategy(str(path)), str(tmp_path / "new.ckpt"))


@pytest.mark.parametrize("name", ["s.json", "s.yaml", "s.yml"])
def test_a_name_that_promises_another_form_is_refused(tmp_path, name):
    with pytest.raises(StrategyError, match=r": the suffix is for .* as protobuf; .*/s\.ckpt$"):
        ckpttool.write_strategy(strategy_of({"w": ROWS}), str(tmp_path / name))


def test_a_file_that_is_there_is_replaced_only_if_that_is_asked_for(tmp_path):
    path = tmp_path / "new" / "s.ckpt"
    ckpttool.write_strategy(strategy_of({"a": ROWS}), str(path))
    with pytest.raises(PlanError, match="exists already"):
        ckpttool.write_strategy(strategy_of({"b": ROWS}), str(path))
    assert [*read_strategy(str(path)).layouts] == ["a"]
    ckpttool.write_strategy(strategy_of({"b": ROWS}), str(path), overwrite=True)
    assert [*read_strategy(str(path)).layouts] == ["b"]
    assert files_below(tmp_path) == ["new/s.ckpt"]
