"""Strategies that a person writes: what the file says, and what it makes of a checkpoint."""

import json
import re
import subprocess

import pytest
from hypothesis import given
from msgspec.structs import replace

from ckpttool.model.layout import Layout
from ckpttool.model.tensors import TensorMeta
from ckpttool.problems import StrategyError
from ckpttool.strategy_files.reader import read_strategy
from tests.strategies import examples, moves
from tests.support.checkpoints import cut
from tests.support.file_bytes import layout, operator, strategy
from tests.support.in_memory import carry_out, catalog_of_entries, make


@pytest.fixture
def write(tmp_path):
    def written(text, name="hand.yaml"):
        path = tmp_path / name
        path.write_text(text if name.endswith(".json") else text.replace("\t", " "), "utf-8")
        return str(path)

    return written


def document(parameters, ranks=4, **top):
    return json.dumps({"ckpttool_strategy": 1, "ranks": ranks, "parameters": parameters, **top})


def spelled(strategy):
    """A strategy as a person would write it who knows everything."""
    parameters = {}
    for name, layouts in strategy.layouts.items():
        one = layouts[0]
        parameters[name] = {
            "device_matrix": one.device_matrix,
            "tensor_map": one.tensor_map,
            "optimizer_shard": one.optimizer_shard,
            "stages": strategy.stages_of(name),
            **({"rows": one.rows} if one.rows else {}),
        }
    return document(parameters, len(strategy.ranks), stages=strategy.stages, otherwise="replicated")


def uniform(strategy):
    return replace(
        strategy,
        layouts={
            name: tuple(replace(layouts[0], first_rank=layout.first_rank) for layout in layouts)
            for name, layouts in strategy.layouts.items()
        },
    )


def metas(**shapes):
    return {
        name: TensorMeta(name, "str", (), shape)
        if isinstance(shape, str)
        else TensorMeta(name, "Float32", shape)
        for name, shape in shapes.items()
    }


def resolved(paths, shapes):
    found, problems = read_strategy(paths).resolve(shapes)
    assert not problems
    return found


# ------------------------------------------------------------------------ what is written


def test_a_cut_by_axis_is_for_tensors_of_any_number_of_axes(write):
    said = write(document({"*": {"axis": 0}}))
    result = resolved(said, metas(a=(4,), b=(4, 2, 3))).layouts
    assert {name: one[0].tensor_map for name, one in result.items()} == {
        "a": ((0,),),
        "b": ((0,), (), ()),
    }


def test_the_first_pattern_that_matches_decides_and_idle_ones_are_told(write):
    text = """
ckpttool_strategy: 1
ranks: 4
parameters:
  layer.[0-1].weight: [4, 1]
  "*.weight": [1, 4]
  "layer.?.bias": replicated
  "*.1.weight": replicated
  layers.*: replicated
  "[*]": replicated
"""
    path = write(text)
    names = ["layer.0.weight", "layer.1.weight", "layer.2.weight", "layer.2.bias", "[*]"]
    shapes = {name: TensorMeta(name, "Float32", (4, 4)) for name in names}
    result = resolved(path, shapes)
    assert [result.layouts[name][0].slice_counts for name in names] == [
        (4, 1),
        (4, 1),
        (1, 4),
        (1, 1),
        (1, 1),  # a name that is the pattern, letter by letter
    ]
    (note,) = result.notes
    assert note.code == "absent"
    assert note.where == path
    assert note.message.startswith("*.1.weight, layers.*: no parameter matches, or only ones")


def test_a_name_without_a_pattern_is_an_error_that_lists_it(write):
    said = read_strategy(write(document({"w": "replicated"})))
    found, problems = said.resolve(metas(a=(3,), w=(4,), b=(2,)))
    (problem,) = problems
    assert problem.where.endswith("hand.yaml")
    assert (problem.message, problem.facts) == ("no pattern matches 2 parameters", "a, b")
    assert "`otherwise: replicated`" in problem.hint
    assert set(found.layouts) == {"w"}
    assert said.resolve(metas(a=(3,), w=(4,)), is_rest_decided=True)[1] == ()
    said = write(document({"w": "replicated"}, otherwise="replicated"))
    assert set(resolved(said, metas(a=(1,), w=(4,))).layouts) == {"w"}


def test_a_single_value_needs_no_pattern_but_a_word(write):
    said = read_strategy(write(document({"w": "replicated"})))
    found, problems = said.resolve(metas(w=(4,), step=(1,), rate=(), name="text"))
    assert not problems
    assert set(found.layouts) == {"w"}
    (note,) = found.notes
    assert note.text.endswith(
        "hand.yaml: no pattern matches 3 single values, which must be the same on all ranks: "
        "step, rate, name"
    )


def test_a_string_is_never_cut(write):
    result = resolved(write(document({"*": {"axis": 0}})), metas(w=(4,), s="text"))
    assert set(result.layouts) == {"w"}


@pytest.mark.parametrize("name", ["hand.yaml", "手 写.yml"])
def test_the_command_that_is_offered_converts_a_file_in_gbk(name, tmp_path):
    path = tmp_path / name
    path.write_bytes("ckpttool_strategy: 1\n# 联通手写\nranks: 2\n".encode("gbk"))
    said = "line 2: not UTF-8; in GBK it reads # 联通手写; if that is right, iconv -f GB"
    with pytest.raises(StrategyError, match=said) as caught:
        read_strategy(str(path))
    _, _, command = caught.value.hint.partition(", ")
    command = command.replace("NEW", str(tmp_path / "new"))
    subprocess.run(command, shell=True, check=True)
    assert read_strategy(str(next(tmp_path.glob("new*")))).rules is not None


def test_a_file_that_is_too_large_is_refused(write):
    with pytest.raises(StrategyError, match=r"[0-9]+ bytes are too many .*; at most 1048576"):
        read_strategy(write("ckpttool_strategy: 1\n# " + "x" * 2**20))


# ------------------------------------------------------------------------ beside another file


@pytest.fixture
def listed(tmp_path):
    paths = []
    for stage, names in enumerate([("w",), ("v", "w")]):
        items = [layout(name, (2,), (0, -1)) for name in names]
        path = tmp_path / f"stage{stage}.ckpt"
        path.write_bytes(strategy(operator(stage), *items))
        paths.append(str(path))
    return paths


def beside(parameters, **top):
    return json.dumps({"ckpttool_strategy": 1, "parameters": parameters, **top})


def test_a_strategy_by_hand_adds_to_another_one(write, listed):
    hand = write(beside({"x*": [1, 2], "w": [2, 1]}))
    result = resolved([hand, *listed], metas(w=(4, 4), v=(4, 4), x=(4, 4), y=(1,)))
    assert result.stages_of("x") == (0, 1)
    assert result.layouts["x"][1] == Layout((2,), ((), (0,)), first_rank=2)
    assert result.layouts["w"] == read_strategy(listed).layouts["w"]
    assert set(result.layouts) == {"v", "w", "x"}  # y is what it was without the file: not listed
    assert set(result.handwritten) == {"w", "x"}  # what is said twice is not corrected by contents
    assert result.files == (*listed, hand)


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        (
            {"w": [1, 2]},
            r"hand\.yaml, line 1: pattern w shards 1 parameter not as .*stage0\.ckpt.*\n  w; a ha",
        ),
        ({"*": "replicated"}, r"pattern \* shards 2 parameters not as .*\n  w, v; "),
        ({"w": {"axis": 0, "stages": [1]}}, r"shards 1 parameter not as .*\n  w; "),
    ],
)
def test_a_strategy_by_hand_corrects_nothing(write, listed, parameters, reason):
    said = read_strategy([*listed, write(beside(parameters))])
    found, problems = said.resolve(metas(w=(4, 4), v=(4, 4)))
    assert [problem for problem in problems if re.search(reason, problem.text)], problems
    assert found.layouts == read_strategy(listed).layouts


def test_both_files_must_be_for_the_same_ranks(write, listed):
    assert read_strategy([*listed, write(beside({}, ranks=4, stages=2))]).stages == 2
    for top in ({"ranks": 8}, {"stages": 1}):
        with pytest.raises(StrategyError, match=r"ranks in . stages?, but .* (is|are) for 4 in 2"):
            read_strategy([*listed, write(beside({}, **top))])


def test_there_is_only_one_strategy_by_hand(write):
    one, two = (write(document({}), name) for name in ("a.yaml", "b.json"))
    with pytest.raises(
        StrategyError, match=r"b\.json: a second hand-written strategy, beside .*a\.yaml; one file"
    ):
        read_strategy([one, two])
    assert read_strategy([one, one]).files == (one,)


# ------------------------------------------------------------------------ what comes of it


@examples(100)
@given(moves())
def test_a_layout_by_hand_does_what_the_same_layout_of_mindspore_does(tmp_path_factory, move):
    folder = tmp_path_factory.mktemp("hand")
    strategies = []
    path = folder / "hand.yaml"
    src, dst = uniform(move.src), uniform(move.dst)
    slices = cut(move.entries, src)
    catalog = catalog_of_entries(slices)
    for known in (src, dst):
        path.write_text(spelled(known), encoding="utf-8")
        strategies.append(resolved(str(path), catalog.metas))
    assert carry_out(make(catalog, *strategies), slices) == cut(move.entries, dst)
