"""Strategies that a person writes: what the file says, and what it makes of a checkpoint."""

import json
import re
from dataclasses import replace

import pytest
from hypothesis import given

from ckpttool.model.layout import Layout
from ckpttool.model.tensors import TensorMeta
from ckpttool.problems import CombinedError, StrategyError
from ckpttool.strategy_files.reader import read_strategy
from tests.strategies import examples, moves
from tests.support import corpus
from tests.support.checkpoints import cut
from tests.support.commands import run_well
from tests.support.corpus import GOLDEN
from tests.support.errors import texts_of
from tests.support.file_bytes import layout, operator, strategy
from tests.support.in_memory import carry_out, catalog_of_entries, make
from tests.support.readers import read_ranks

WHOLE = Layout((4,), ((), ()))
ROWS = Layout((4,), ((0,), ()))


@pytest.fixture
def write(tmp_path):
    """A function that writes a document and returns its path."""

    def written(text, name="hand.yaml"):
        path = tmp_path / name
        path.write_text(text if name.endswith(".json") else text.replace("\t", " "), "utf-8")
        return str(path)

    return written


def document(parameters, ranks=4, **top):
    """A document in JSON, which is YAML, too."""
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
    """The same, but all stages that have a parameter cut it like the first of them."""
    return replace(
        strategy,
        layouts={
            name: tuple(replace(layouts[0], first_rank=one.first_rank) for one in layouts)
            for name, layouts in strategy.layouts.items()
        },
    )


def metas(**shapes):
    """Tensors by name; a string for a shape is a string entry."""
    return {
        name: TensorMeta(name, "str", (), shape)
        if isinstance(shape, str)
        else TensorMeta(name, "Float32", shape)
        for name, shape in shapes.items()
    }


def resolved(paths, shapes):
    """What strategy files say of these tensors, without problems."""
    found, problems = read_strategy(paths).resolve(shapes)
    assert not problems
    return found


# ------------------------------------------------------------------------ what is written


@pytest.mark.parametrize("name", ["hand.yaml", "hand.yml", "hand.json"])
@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("replicated", WHOLE),
        ([4, 1], ROWS),
        ([1, 4], Layout((4,), ((), (0,)))),
        ([2, 1], Layout((2, 2), ((1,), ()))),  # neighbours are replicas, as with shard()
        ([2, 2], Layout((2, 2), ((1,), (0,)))),
        ([1, 1], WHOLE),
        ({"parts": [2, 1], "optimizer_shard": 2}, Layout((2, 2), ((1,), ()), 2)),
        ({"axis": 0}, ROWS),
        ({"axis": 1, "parts": 2}, Layout((2, 2), ((), (1,)))),
        ({"axis": 0, "parts": 1, "optimizer_shard": 4}, Layout((4,), ((), ()), 4)),
        ({"axis": 0, "rows": [3, 1, 0, 2]}, Layout((4,), ((0,), ()), rows=(3, 1, 0, 2))),
        ({"axis": 0, "rows": [3, 1]}, Layout((2, 2), ((1,), ()), rows=(3, 1))),
        ({"device_matrix": [2, 2], "tensor_map": [0, -1]}, Layout((2, 2), ((0,), ()))),
        ({"device_matrix": [2, 2], "tensor_map": [[0, 1], []]}, Layout((2, 2), ((0, 1), ()))),
        ({"device_matrix": [2, 2], "tensor_map": [[-1], 1]}, Layout((2, 2), ((), (1,)))),
        ({"device_matrix": [2, 2], "tensor_map": [[-1, 0, -1], [1]]}, Layout((2, 2), ((0,), (1,)))),
    ],
)
def test_every_form_of_a_cut_is_read(write, name, written, expected):
    path = write(document({"w": written}), name)
    found = resolved([path], metas(w=(12, 12)))
    assert found.layouts == {"w": (expected,)}
    assert (found.stages, found.stage_ranks, found.files) == (1, 4, (path,))
    assert found.handwritten["w"].startswith(path)
    assert not found.notes


def test_a_cut_by_axis_is_for_tensors_of_any_number_of_axes(write):
    said = write(document({"*": {"axis": 0}}))
    found = resolved(said, metas(a=(4,), b=(4, 2, 3))).layouts
    assert {name: one[0].tensor_map for name, one in found.items()} == {
        "a": ((0,),),
        "b": ((0,), (), ()),
    }


def test_stages_have_the_ranks_of_their_own(write):
    text = document({"a": {"axis": 0, "stages": [1]}, "b": [2]}, ranks=4, stages=2)
    found = resolved(write(text), metas(a=(4,), b=(4,)))
    assert found.stages_of("a") == (1,)
    assert [one.first_rank for one in found.layouts["b"]] == [0, 2]
    assert found.layouts["a"][0].ranks == range(2, 4)


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
    found = resolved(path, shapes)
    assert [found.layouts[name][0].slice_counts for name in names] == [
        (4, 1),
        (4, 1),
        (1, 4),
        (1, 1),
        (1, 1),  # a name that is the pattern, letter by letter
    ]
    (note,) = found.notes
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
    found = resolved(write(document({"*": {"axis": 0}})), metas(w=(4,), s="text"))
    assert set(found.layouts) == {"w"}


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        (
            "{axis: 0, part: 4}",
            "column 16: w: unknown key part; known keys: axis, parts, .*; parts in place of",
        ),
        ("{axis: 0, axis: 1}", "column 16: key axis comes twice$"),
        ("{}", "w: no cut, expected axis"),
        ("{stages: [0]}", "w: no cut, expected axis"),
        ("{axis: 0, device_matrix: [4]}", "w: axis and device_matrix, expected axis"),
        ("{device_matrix: [4]}", "w: device_matrix, expected axis"),
        ("{axis: x}", "column 7: w: axis is 'x', expected a whole number, 0 or more"),
        ("{axis: -1}", "w: axis is -1, expected a whole number"),
        ("{axis: 64}", "w: axis is 64, expected less than 64"),
        ("{axis: 0, parts: [4]}", r"w: parts is \[4\], expected a whole number"),
        (
            "{axis: 0, parts: 3}",
            r"w: \[3\] are 3 slices, expected a divisor of 4, the ranks of a stage; `",
        ),
        ("{axis: 0, parts: 0}", r"w: \[0\] are 0 slices"),
        ("{axis: 0, parts: 8}", "8 slices, expected a divisor of 4"),
        ("[3, 1]", r"column 3: w: \[3, 1\] are 3"),
        ("[x]", "w: parts is 'x', expected a whole number"),
        ("4", "w: the cut is 4, expected replicated, a list of parts such as"),
        ("copied", "w: the cut is 'copied', expected replicated"),
        ("", "w: the cut is nothing, expected replicated"),
        (
            "{device_matrix: [2, 4], tensor_map: [0]}",
            r"w: device_matrix is \[2, 4\], expected 4 ran",
        ),
        ("{device_matrix: [2, 2], tensor_map: [2]}", "w: tensor map .* names device axis 2; the"),
        ("{device_matrix: [2, 2], tensor_map: [-2]}", "w: tensor_map is -2, expected a whole"),
        ("{device_matrix: [2, 2], tensor_map: [0, 0]}", "w: tensor map .* uses device axis 0 tw"),
        ("{device_matrix: [2, 2], tensor_map: 0}", "w: tensor_map is 0, expected a list of device"),
        ("{device_matrix: {}, tensor_map: [0]}", "w: device_matrix is a mapping, expected a list"),
        ("{parts: [2], optimizer_shard: 3}", "w: optimizer shard of 3 does not divide the repl"),
        ("{parts: [2], optimizer_shard: 0}", "w: optimizer shard of 0"),
        ("{parts: [4], rows: [3, 1]}", r"w: a manual split of \[3, 1\] rows, expected 4 numbers"),
        ("{axis: 0, stages: [1]}", r"column 16: w: stages is \[1\], expected some of 0 to 0"),
        ("{axis: 0, stages: []}", r"w: stages is \[\], expected some of 0 to 0"),
    ],
)
def test_a_cut_that_makes_no_sense_is_an_error_with_its_place(write, written, reason):
    path = write(f"ckpttool_strategy: 1\nranks: 4\nparameters:\n  w: {written}\n")
    with pytest.raises(StrategyError, match=rf"hand\.yaml, line 4, .*{reason}") as caught:
        read_strategy(path)
    assert caught.value.exit_code == 4


def test_all_bad_cuts_of_a_file_are_named(write):
    with pytest.raises(CombinedError, match=r"(?s)line 4.* v: .*line 5.* w: the cut is "):
        read_strategy(write("ckpttool_strategy: 1\nranks: 4\nparameters:\n  v: [3]\n  w: 7\n"))


@pytest.mark.parametrize("name", ["hand.yaml", "hand.json"])
def test_all_mistakes_of_a_file_are_named_with_their_lines(write, name):
    top = {"ckpttool_strategy": 1, "ranks": 5, "stages": 2, "more": 3, "otherwise": "cut"}
    cuts = {
        "a": {"axis": -1, "part": 3, "foo": 2, "stages": [7]},
        "b": {"device_matrix": [2, 2], "tensor_map": [5]},
        "c": {"axis": 0, "rows": ["x"], "optimizer_shard": -1},
        "d": "copied",
    }
    with pytest.raises(CombinedError) as caught:
        read_strategy(write(json.dumps(top | {"parameters": cuts}, indent="\t"), name))
    problems = [problem.partition(name)[2] for problem in texts_of(caught.value)]
    has_place = [bool(re.match(r", line \d+, column \d+: ", problem)) for problem in problems]
    assert has_place == [name == "hand.yaml"] * 10
    for problem, fact in zip(
        problems,
        [
            "line 5, column 2: unknown key more",
            "line 3, column 2: 5 ranks in 2 stages",
            "line 6, column 2: otherwise is 'cut'",
            "a: unknown key part",
            "a: unknown key foo",
            "a: axis is -1",
            "line 16, column 3: b: tensor map",
            "c: rows is 'x'",
            "c: optimizer_shard is -1",
            "d: the cut is 'copied'",
        ],
        strict=True,
    ):
        assert (fact if name == "hand.yaml" else re.sub("^line.*?: ", "", fact)) in problem


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("ranks: 4\n", "the key ckpttool_strategy is missing"),
        ("- a\n", "the key ckpttool_strategy is missing; a first line ckpttool_strategy: 1$"),
        ("", "the strategy file is empty"),
        ("# nothing\n", "the key ckpttool_strategy is missing"),
        (
            "ckpttool_strategy: 2\nranks: 4\n",
            "ckpttool_strategy is 2, expected 1; `ckpttool help -d`",
        ),
        ("ckpttool_strategy: '1'\nranks: 4\n", "ckpttool_strategy is '1', expected 1"),
        ("ckpttool_strategy: 1\n", "the key ranks is missing; a line such as ranks: 8$"),
        (
            "ckpttool_strategy: 1\nranks: 0\n",
            "0 ranks in 1 stage; expected a multiple of the stages",
        ),
        ("ckpttool_strategy: 1\nranks: 6\nstages: 4\n", "6 ranks in 4 stages; expected"),
        ("ckpttool_strategy: 1\nranks: 6\nstages: 0\n", "6 ranks in 0 stages; expected"),
        (
            "ckpttool_strategy: 1\nranks: 2000000\n",
            "2000000 ranks in 1 stage; .*, 1048576 at most$",
        ),
        (
            "ckpttool_strategy: 1\nranks: 4\nrank: 4\n",
            "unknown key rank; known keys: .*; ranks in place of rank$",
        ),
        (
            "ckpttool_strategy: 1\nranks: 4\nparameters: x\n",
            "parameters is 'x', expected",
        ),
        ("ckpttool_strategy: 1\nranks: 4\nparameters:\n", "parameters is nothing, expected a map"),
        (
            "ckpttool_strategy: 1\nranks: 4\notherwise: cut\n",
            "otherwise is 'cut', expected the word",
        ),
        ("ckpttool_strategy: 1\nranks: [4\n", "not valid YAML: expected"),
        ("a: \x01", "not valid YAML: unacceptable character"),
        (
            "ckpttool_strategy: 1\n# " + "x" * 2**20,
            "[0-9]+ bytes are too many .*; at most 1048576",
        ),
    ],
)
def test_a_document_of_another_kind_is_refused(write, text, reason):
    with pytest.raises(StrategyError, match=rf"hand\.yaml(, line [^:]*)?: (.*: )?{reason}"):
        read_strategy(write(text))


def test_json_by_hand_is_known_by_its_key_and_yaml_by_its_name(write):
    text = document({"w": {"axis": 0}})
    with pytest.raises(
        StrategyError, match=r"a hand-written strategy with another suffix; .* ends in \.yaml"
    ):
        read_strategy(write(text, "hand.ckpt"))
    with pytest.raises(StrategyError, match=r"w: unknown key axes"):
        read_strategy(write(document({"w": {"axes": 0}}), "hand.json"))
    with pytest.raises(StrategyError, match="not valid JSON"):
        read_strategy(write(text + "}", "hand.json"))


# ------------------------------------------------------------------------ beside another file


@pytest.fixture
def listed(tmp_path):
    """MindSpore's strategy of two stages of two ranks, which lists w in both, v in one."""
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
    found = resolved([hand, *listed], metas(w=(4, 4), v=(4, 4), x=(4, 4), y=(1,)))
    assert found.stages_of("x") == (0, 1)
    assert found.layouts["x"][1] == Layout((2,), ((), (0,)), first_rank=2)
    assert found.layouts["w"] == read_strategy(listed).layouts["w"]
    assert set(found.layouts) == {"v", "w", "x"}  # y is what it was without the file: not listed
    assert set(found.handwritten) == {"w", "x"}  # what is said twice is not corrected by contents
    assert found.files == (*listed, hand)


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


CASES = [
    "tutorial_8_to_4_infer",
    "layout_multi_axis_optshard",
    "pipeline_2x4_to_4x2",
    "uneven_manual_split_2_to_4",
    "reshard_56_optshard_to_8",
]


@pytest.mark.parametrize("case", CASES)
def test_golden_conversions_come_out_the_same_by_hand(case, tmp_path):
    conversion = corpus.conversion(case, "reshard")
    words = []
    for flag, name in (("-s", conversion.src_strategy), ("-d", conversion.dst_strategy)):
        path = tmp_path / f"{name}.yaml"
        path.write_text(spelled(read_strategy(str(GOLDEN / case / name))))
        words += [flag, path]
    source = GOLDEN / case / conversion.source
    run_well("reshard", source, *words, "-o", tmp_path / "out", "--format", "ckpt")
    got = corpus.digests(read_ranks(tmp_path / "out"))
    assert not corpus.differences(conversion.ranks, got, conversion.undefined)
