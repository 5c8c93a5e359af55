"""Strategy files that are written: MindSpore's form, spelled by hand, and read again."""

from __future__ import annotations

import json
import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

import ckpttool
from ckpttool.formats.wire import WireReader
from ckpttool.model.layout import Layout
from ckpttool.model.tensors import StoredFile
from ckpttool.problems import CombinedError, PlanError, StrategyError
from ckpttool.strategy_files import writer
from ckpttool.strategy_files.reader import read_strategy
from ckpttool.strategy_files.writer import encode_strategy
from tests.strategies import examples, layout_features, moves, table_moves
from tests.support.checkpoints import ROWS, strategy_of
from tests.support.commands import files_below
from tests.support.corpus import GOLDEN, SAMPLES
from tests.support.file_bytes import layout, message, number

NEVER = (GOLDEN / "dash_in_name", GOLDEN / "broken_inputs")


def stored(pattern="*"):
    found = [*GOLDEN.glob(f"*/*_strategy{pattern}"), *SAMPLES.glob(f"*/strategy/*{pattern}")]
    found = [path for path in found if path.parent not in NEVER]
    return [
        pytest.param(path, id=str(path.relative_to(GOLDEN)))
        for path in sorted(found)
        if path.parts[-3][:3] != "pp2" or path.stem == "merged"
    ]


def operator(stage):
    name = message(1, f"ckpttool_stage_{stage}".encode())
    return message(2, name, message(2, number(1, stage)))


def written_layout(one, name="w"):
    return encode_strategy(strategy_of({name: one}), "s.ckpt")[len(number(1, 1) + operator(0)) :]


@pytest.fixture
def again(tmp_path):
    def written(strategy):
        path = str(tmp_path / "again.ckpt")
        ckpttool.write_strategy(strategy, path, overwrite=True)
        return read_strategy(path)

    return written


def says_the_same(one, other):
    return all(
        (
            one.layouts == other.layouts,
            (one.stages, one.stage_ranks) == (other.stages, other.stage_ranks),
        )
    )


# ------------------------------------------------------------------------------------- bytes


def test_the_bytes_of_a_small_file_are_these():
    data = encode_strategy(strategy_of({"w": Layout((2, 2, 2), ((1,), (0,)))}), "s.ckpt")
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
    assert encode_strategy(strategy_of({"t": table, "f": fields}), "s.ckpt") == b"".join(
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
    assert encode_strategy(strategy, "s.ckpt") == b"".join(
        [number(1, 1), operator(0), operator(1), *items]
    )


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


def why_not(strategy):
    held = [layout for of in strategy.layouts.values() for layout in of]
    if {layout.first_rank // strategy.stage_ranks for layout in held} != {*range(strategy.stages)}:
        return "no parameter of stage"
    no_rows = any(layout.rows and not any(layout.rows) for layout in held)
    return "without rows, which" if no_rows else None


@pytest.mark.slow
def test_random_layouts_are_of_every_kind():
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
        encode_strategy(replace(strategy, stages=2), "s.ckpt")
    said = [error.where for error in caught.value.errors]
    assert said == ["src.ckpt", "'a-b', 'c-d'", "'w'"]


def test_patterns_of_names_are_not_layouts(tmp_path):
    (tmp_path / "hand.yaml").write_text('ckpttool_strategy: 1\nranks: 2\nparameters: {"w*": [2]}\n')
    strategy = read_strategy(str(tmp_path / "hand.yaml"))
    with pytest.raises(
        StrategyError,
        match=r"hand\.yaml: 'w\*': 1 line for patterns of names, .*; split or reshard",
    ):
        ckpttool.write_strategy(strategy, str(tmp_path / "s.ckpt"))


def test_split_information_is_no_layout(tmp_path):
    path = tmp_path / "params_split_info_0.json"
    path.write_text('{"w": {"split": true, "group_size": 2, "rank_id": 0}}')
    with pytest.raises(StrategyError, match="lists the sharded axes only"):
        ckpttool.write_strategy(read_strategy(str(path)), str(tmp_path / "new.ckpt"))


def test_a_file_that_is_there_is_replaced_only_if_that_is_asked_for(tmp_path):
    path = tmp_path / "new" / "s.ckpt"
    ckpttool.write_strategy(strategy_of({"a": ROWS}), str(path))
    with pytest.raises(PlanError, match="exists already"):
        ckpttool.write_strategy(strategy_of({"b": ROWS}), str(path))
    assert [*read_strategy(str(path)).layouts] == ["a"]
    ckpttool.write_strategy(strategy_of({"b": ROWS}), str(path), overwrite=True)
    assert [*read_strategy(str(path)).layouts] == ["b"]
    assert files_below(tmp_path) == ["new/s.ckpt"]


# ------------------------------------------------------------------------- JSON and hand-written

ODD_NAMES = [
    "a",
    "w[0].*",
    "w?",
    "yes",
    "1",
    "π/权重",
    'a "b" \\',
    "a: b",
    " ",
    "\u2028\x85\t",
    "😀",
    "",
]
HAND = """\
ckpttool_strategy: 1
ranks: 8
stages: 2
parameters:
  embedding: {axis: 0, parts: 4, stages: [0]}
  "*.table": {axis: 0, parts: 2, rows: [6, 4]}
  "*.w": {axis: 1, parts: 2, optimizer_shard: 2}
  "*.bias": replicated
  head: [2, 1]
  tail: {device_matrix: [2, 2], tensor_map: [[1, 0], []], stages: [1]}
otherwise: replicated
"""


def why_not_in(suffix, strategy):
    """What a form cannot say of a strategy, if anything."""
    held = [layout for of in strategy.layouts.values() for layout in of]
    if suffix == ".ckpt":
        return why_not(strategy)
    if suffix == ".json":
        has_lists = any(len(writer._encoded_tensor_maps(one)) > 1 for one in held)
        return why_not(strategy) or ("a list for each axis" if has_lists else None)
    for of in strategy.layouts.values():
        if len({replace(one, first_rank=0) for one in of}) > 1:
            return "sharded differently in its stages"
    if any(one.fields > 1 for one in held):
        return "with field"
    return "with param_split_shape" if any(one.split_shape for one in held) else None


def written_and_read(strategy, path):
    ckpttool.write_strategy(strategy, path, overwrite=True)
    found, problems = read_strategy(path).expand_rules()
    assert not problems
    return found


@pytest.mark.parametrize("suffix", [".ckpt", ".json", ".yaml"])
@pytest.mark.parametrize("path", stored())
def test_what_mindspore_wrote_is_the_same_in_another_form(path, suffix, tmp_path):
    strategy, out = read_strategy(str(path)), str(tmp_path / f"again{suffix}")
    if reason := why_not_in(suffix, strategy):
        with pytest.raises((StrategyError, CombinedError), match=reason):
            ckpttool.write_strategy(strategy, out)
        assert files_below(tmp_path) == []
        return
    found = written_and_read(strategy, out)
    assert says_the_same(strategy, found)
    again = written_and_read(found, str(tmp_path / "back.ckpt"))
    assert says_the_same(strategy, again)
    if suffix == ".json":
        shapes = {n: one.full_shape for n, of in strategy.layouts.items() for one in of}
        assert shapes == {n: one.full_shape for n, of in found.layouts.items() for one in of}


@examples(200)
@given(st.one_of(moves(), table_moves()), st.sampled_from([".ckpt", ".json", ".yaml"]))
def test_random_layouts_are_the_same_in_every_form(tmp_path_factory, move, suffix):
    path = str(tmp_path_factory.mktemp("random") / f"random{suffix}")
    for strategy in (move.src, move.dst):
        if reason := why_not_in(suffix, strategy):
            with pytest.raises((StrategyError, CombinedError), match=reason):
                encode_strategy(strategy, path)
        else:
            assert says_the_same(strategy, written_and_read(strategy, path))


@pytest.mark.parametrize("path", stored(".json"))
def test_json_has_the_items_that_mindspore_wrote(path, tmp_path):
    strategy = read_strategy(str(path))
    if why_not_in(".json", strategy):
        return
    ckpttool.write_strategy(strategy, str(tmp_path / "s.json"))
    theirs, ours = (json.loads(one.read_bytes()) for one in (path, tmp_path / "s.json"))
    for name, item in theirs["parallel_layout_item"].items():
        mine = ours["parallel_layout_item"][name]
        if item["opt_weight_shard_size"] == -1:
            item["opt_weight_shard_size"] = mine["opt_weight_shard_size"]
            assert mine["opt_weight_shard_size"] > 1
        assert mine == item, name


def test_any_name_is_one_line_that_matches_it_alone(tmp_path):
    late = Layout((2, 2), ((), (0,)))
    strategy = strategy_of({name: ROWS if i % 2 else late for i, name in enumerate(ODD_NAMES)})
    found = written_and_read(strategy, str(tmp_path / "s.yaml"))
    assert found.rules is None
    assert found.layouts == strategy.layouts


def test_patterns_stay_patterns_in_a_hand_written_file(tmp_path):
    (tmp_path / "hand.yaml").write_text(HAND)
    strategy = read_strategy(str(tmp_path / "hand.yaml"))
    ckpttool.write_strategy(strategy, str(tmp_path / "again.yml"))
    again = read_strategy(str(tmp_path / "again.yml"))
    for rule, other in zip(strategy.rules.rules, again.rules.rules, strict=True):
        assert replace(rule, place="") == replace(other, place="")
    assert again.rules.replicates_rest
    lines = (tmp_path / "again.yml").read_text().splitlines()
    for line in HAND.splitlines():
        assert line in lines or line.startswith(("  head", "  tail"))


@pytest.mark.parametrize("suffix", [".ckpt", ".json"])
def test_what_lines_leave_open_is_refused_by_pattern_and_key(tmp_path, suffix):
    (tmp_path / "hand.yaml").write_text(HAND)
    strategy = read_strategy(str(tmp_path / "hand.yaml"))
    with pytest.raises(CombinedError) as caught:
        ckpttool.write_strategy(strategy, str(tmp_path / f"s{suffix}"))
    said = [str(error).removeprefix(f"{tmp_path}/") for error in caught.value.errors]
    names = "'*.table', '*.w', '*.bias': 3 lines for patterns of names"
    axes = "'embedding', '*.table', '*.w' and 1 more: 4 lines for any number of axes"
    rest = "otherwise: 1 line for all other parameters"
    for what, error in zip((names, axes, rest), said, strict=True):
        assert error.startswith(f"hand.yaml: {what}, and MindSpore's files list each")
        assert error.endswith("; split or reshard with --write-strategy")
    assert files_below(tmp_path) == ["hand.yaml"]


def test_what_a_line_cannot_say_is_refused_by_name(tmp_path):
    late = replace(ROWS, first_rank=4, tensor_map=((), (1,)))
    table = Layout((4,), ((0,), ()), fields=3)
    shaped = Layout((4,), ((0,), ()), split_shape=(8, 4))
    for strategy, said in [
        (strategy_of({"w": ROWS}, {"w": late}), "'w': 1 parameter sharded differently in its"),
        (strategy_of({"t": table}), "'t': 1 parameter with field 3, for which a line has no key"),
        (strategy_of({"s": shaped}), "'s': 1 parameter with param_split_shape [8, 4], for which"),
    ]:
        with pytest.raises(StrategyError, match=re.escape(said)):
            ckpttool.write_strategy(strategy, str(tmp_path / "s.yaml"))
    many = strategy_of({f"layer.{i}.weight": ROWS for i in range(20_000)})
    with pytest.raises(StrategyError, match=r"bytes are too many for a hand-written strategy"):
        ckpttool.write_strategy(many, str(tmp_path / "s.yaml"))
    assert files_below(tmp_path) == []


def test_nothing_is_written_that_would_be_read_otherwise(tmp_path, monkeypatch):
    def encode(strategy, path):
        data = writer._encode_json(strategy, path)
        return data.replace(b'"tensor_map":[1,-1]', b'"tensor_map":[-1,1]')

    wrong = replace(writer.FORMS[".json"], encode=encode)
    monkeypatch.setitem(writer.FORMS, ".json", wrong)
    with pytest.raises(AssertionError, match="would be read as another strategy"):
        ckpttool.write_strategy(strategy_of({"w": ROWS}), str(tmp_path / "s.json"))
    assert files_below(tmp_path) == []
