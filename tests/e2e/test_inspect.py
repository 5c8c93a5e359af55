"""The screen of inspect: what it answers first, the folded table, and strategies."""

from __future__ import annotations

import json
import re
import shutil
from typing import Any

import pytest

import ckpttool
from ckpttool.cli import overview, tables
from ckpttool.formats import get_format
from ckpttool.model.tensors import TensorMeta
from ckpttool.operations import inspect
from ckpttool.operations.summary import Placement
from tests.support.checkpoints import Entry, create_file, noise, write_ranks
from tests.support.commands import message, run, run_well
from tests.support.corpus import GOLDEN
from tests.support.readers import zeros

CASE = GOLDEN / "tutorial_8_to_8_retrain"
SOURCE = [CASE / "src", "-s", CASE / "src_strategy.ckpt"]
MODEL = GOLDEN / "reshard_8_to_4"
LLAMA = GOLDEN / "pipeline_tied_llama"


def screen(*words) -> str:
    """What inspect prints on stdout, with single spaces."""
    return re.sub(r"[ ]+", " ", run_well("inspect", *words).stdout)


def document(*words) -> dict[str, Any]:
    """The document of inspect, whatever the exit code."""
    return json.loads(run("inspect", *words, "--json").stdout)


# -------------------------------------------------------------------------------------- the answers


@pytest.fixture
def lost(tmp_path):
    """A function: the checkpoint without some ranks."""

    def without(*ranks):
        folder = tmp_path / "src"
        shutil.copytree(CASE / "src", folder)
        for rank in ranks:
            shutil.rmtree(folder / f"rank_{rank}")
        return folder

    return without


def test_all_ranks_are_those_of_the_strategy(lost):
    folder = lost(3)
    path = next((folder / "rank_5").iterdir())
    path.write_bytes(path.read_bytes()[:2000])
    text = " ".join(run("inspect", folder, *SOURCE[1:]).stdout.split())
    assert "contents 6 of 8 ranks, step 2_10" in text
    assert "equal on ranks 0-2, 4, 6, 7: global_step" in text


def test_all_names_the_tensors_that_are_incomplete(lost):
    text = run("inspect", lost(2, 3, 6, 7), *SOURCE[1:], "--all").stdout
    (line,) = (line for line in text.splitlines() if line.startswith("  incomplete: "))
    names = ("layer1.weight", "layer3.weight")
    of_states = [f"{prefix}{name}" for prefix in ("accum.", "stat.") for name in names]
    assert line.partition(": ")[2].split(", ") == [*names, *of_states]


def test_the_shapes_of_one_rank_are_not_called_full():
    path = next((CASE / "src" / "rank_0").iterdir())
    assert " tensors shape size with states" in screen(path)


# ------------------------------------------------------------------------------- without a strategy


def layers(rank: int, differing: tuple[str, ...] = ()) -> dict[str, Entry]:
    """Six layers with a state, equal on all ranks but for those in ``differing``."""
    names = [f"{prefix}layers.{i}.weight" for prefix in ("", "adam_m.") for i in range(6)]
    return {n: noise(f"{n}{rank if n in differing else ''}", "Float32", (8, 8)) for n in names}


def test_layers_that_differ_between_ranks_unfold(tmp_path):
    differing = ("layers.2.weight", "adam_m.layers.2.weight", "adam_m.layers.3.weight")
    write_ranks(tmp_path / "src", {rank: layers(rank, differing) for rank in range(4)}, "ckpt")
    lines = screen(tmp_path / "src").splitlines()
    assert " layers.{0,1,4,5}.weight + adam_m. 8 x 8 0-3" in lines
    assert " layers.2.weight + adam_m. 8 x 8 0-3, one each" in lines
    assert " layers.3.weight 8 x 8 0-3" in lines
    assert " adam_m.layers.3.weight 8 x 8 0-3, one each" in lines


def test_of_many_tensors_only_the_first_of_each_row_is_called_equal(tmp_path, monkeypatch):
    monkeypatch.setattr(inspect, "MAX_SAMPLES", 30)
    ranks = {r: layers(r) | {f"step{n}": noise("s", "Float32", (1,)) for n in "12"} for r in (0, 1)}
    write_ranks(tmp_path / "src", ranks, "ckpt")
    assert " tensors shape equal ranks\n" in screen(tmp_path / "src")
    monkeypatch.setattr(inspect, "MAX_SAMPLES", 27)
    text = screen(tmp_path / "src")
    assert "pages of 2 tensors, the first of each row (--all samples every one): 2 equal" in text
    assert " tensors shape equal ranks, first\n" in text
    assert "\n single values: step{1,2}\n" in text
    assert "sampled pages of 14 tensors: 14 equal" in screen(tmp_path / "src", "--all")


def test_texts_are_compared_by_their_value(tmp_path):
    for rank, text in enumerate(("one", "two", "two")):
        folder = tmp_path / f"rank_{rank}"
        folder.mkdir()
        metas = [TensorMeta("note", "str", (), text), TensorMeta("mixed", "str", (), "x")]
        create_file(get_format("ckpt"), folder / "net.ckpt", metas, {})
    write_ranks(tmp_path, {3: {"mixed": noise("m", "Float32", (4,))}}, "ckpt")
    groups = {one["name"]: one["ranks"] for one in document(tmp_path)["summary"]["equal_ranks"]}
    assert groups == {"note": [[0], [1, 2]], "mixed": [[0, 1, 2], [3]]}


def test_shapes_and_types_that_differ_between_ranks_are_rows_of_their_own(tmp_path):
    """The bytes of ``b`` are equal, but it is not the same tensor."""
    b = noise("b", "Float32", (2, 2))
    ranks = {
        0: {"w": noise("w", "Float32", (16, 8)), "v": noise("v", "Float32", (4,)), "b": b},
        1: {"w": noise("w", "Float32", (8, 8)), "v": noise("v", "Float16", (4,)), "b": b},
        2: {"w": noise("w", "Float32", (8, 8)), "b": b._replace(shape=(4,))},
    }
    write_ranks(tmp_path / "src", ranks, "ckpt")
    text = screen(tmp_path / "src")
    assert "1.2 KiB, 3 tensors\n" in text
    rows = ["w 16 x 8 Float32 0", "w 8 x 8 Float32 1,2", "v 4 Float32 0", "v 4 Float16 1"]
    assert "\n ".join([*rows, "b 2 x 2 Float32 0,1", "b 4 Float32 2"]) in text
    assert "sampled pages of 3 tensors: 3 different between ranks" in text
    found = [
        (one["name"], one["shape"], one["ranks"]) for one in document(tmp_path / "src")["tensors"]
    ]
    assert found[:2] == [("w", [16, 8], [0]), ("w", [8, 8], [1, 2])]


def test_equal_ranks_are_perhaps_replicas_and_merge_tells(tmp_path):
    write_ranks(tmp_path / "src", dict.fromkeys(range(8), layers(0)), "ckpt")
    text = screen(tmp_path / "src")
    assert "parallelism perhaps 8 full replicas\n sampled pages of 12 tensors: 12 equal on " in text
    merge = f"complete not known: `ckpttool merge {tmp_path}/src --replicated -o FILE` compares"
    assert merge in text
    run_well("merge", tmp_path / "src", "--replicated", "-o", tmp_path / "m.ckpt")


def test_slices_of_one_value_are_not_taken_for_equal_tensors(tmp_path):
    write_ranks(tmp_path / "src", {rank: {"b": zeros((4,))} for rank in (0, 1)}, "ckpt")
    text = screen(tmp_path / "src")
    assert "sampled pages of 1 tensor: 1 of one value" in text
    assert " b 4 0,1 (one value)" in text


def test_of_a_large_tensor_only_samples_are_said_to_be_equal(tmp_path):
    entries = {"w": noise("w", "Float32", (4,)), "table": noise("t", "Float32", (2000,))}
    write_ranks(tmp_path / "src", dict.fromkeys((0, 1), entries), "ckpt")
    (tmp_path / "s.json").write_text(
        '{"parallel_layout_item": {"w": {"dev_matrix": [2], "tensor_map": [-1]}}}'
    )
    text = screen(tmp_path / "src", "-s", tmp_path / "s.json")
    assert " not in the strategy, equal samples on all ranks: table" in text


def test_single_values_are_each_compared_though_their_names_fold(tmp_path):
    """Else the second is called equal, and merge refuses it."""
    names = ["beta1_power", "beta2_power"]
    ranks = {
        rank: {
            "w": noise("w", "Float32", (4,)),
            names[0]: noise("1", "Float32", (1,)),
            names[1]: noise(f"2 of {rank}", "Float32", (1,)),
        }
        for rank in (0, 1)
    }
    source = write_ranks(tmp_path / "src", ranks, "ckpt")
    strategy = tmp_path / "s.json"
    strategy.write_text('{"parallel_layout_item": {"w": {"dev_matrix": [2], "tensor_map": [-1]}}}')
    text = screen(source, "-s", strategy)
    assert " not in the strategy, equal on all ranks: beta1_power\n" in text
    assert " not in the strategy, different between ranks (0 | 1): beta2_power\n" in text
    assert "differ between ranks; merge needs --unlisted\n" in text
    summary = document(source, "-s", strategy)["summary"]
    assert [one["name"] for one in summary["equal_ranks"]] == names
    assert (summary["complete"], summary["complete_codes"]) == (None, ["unlisted"])


def test_what_a_strategy_omits_is_compared_on_any_number_of_ranks(tmp_path):
    ranks = {rank: {"w": zeros((4,)), "s": noise(f"{rank}", "Float32", (1,))} for rank in range(66)}
    source = write_ranks(tmp_path / "src", ranks, "ckpt")
    strategy = tmp_path / "s.json"
    strategy.write_text('{"parallel_layout_item": {"w": {"dev_matrix": [66], "tensor_map": [-1]}}}')
    assert document(source, "-s", strategy)["summary"]["complete_codes"] == ["unlisted"]


def test_parameters_in_no_file_are_missing_tensors(tmp_path):
    source = tmp_path / "src"
    shutil.copytree(LLAMA / "src", source)
    for rank in range(4, 8):
        shutil.rmtree(source / f"rank_{rank}")
    found = document(source, "-s", LLAMA / "src_strategy.ckpt")
    missing = found["summary"]["missing_tensors"]
    assert "model.norm_out.weight" in missing
    assert len(missing) == len(found["problems"])
    text = re.sub("[ ]+", " ", run("inspect", source, "-s", LLAMA / "src_strategy.ckpt").stdout)
    assert re.search(r" at least [0-9.]+ K parameters \(Float32\)\n", text)
    assert f"without {len(missing)} incomplete tensors\n" in text


def test_one_equal_number_or_one_tensor_of_many_is_no_sign_of_replicas(tmp_path, monkeypatch):
    single = {"w": zeros((4, 4)), "step": noise("s", "Float32", (1,))}
    write_ranks(tmp_path / "single", dict.fromkeys(range(2), single), "ckpt")
    assert "full replica" not in screen(tmp_path / "single")
    own = {rank: {"w": noise("w", "Float32", (4,)), f"rng_{rank}": zeros((4,))} for rank in (0, 1)}
    write_ranks(tmp_path / "own", own, "ckpt")
    text = screen(tmp_path / "own")
    assert "full replica" not in text
    assert "sampled pages of 1 tensor: 1 equal on their ranks\n" in text
    monkeypatch.setattr(inspect, "MAX_SAMPLES", 4)
    write_ranks(tmp_path / "many", dict.fromkeys(range(2), layers(0)), "ckpt")
    assert "full replica" not in screen(tmp_path / "many")


def test_a_strategy_that_contents_contradict_is_named_beside_the_parallelism(tmp_path):
    ranks = {r: {"w": noise("x" if r == 1 else f"{r // 4}", "Float32", (4, 4))} for r in range(8)}
    source = write_ranks(tmp_path / "src", ranks, "ckpt")
    strategy = tmp_path / "s.json"
    strategy.write_text(
        '{"parallel_layout_item": {"w": {"dev_matrix": [2, 4], "tensor_map": [1, -1]}}}'
    )
    text = screen(source, "-s", strategy)
    assert f"parallelism by {strategy}, with which some contents disagree:\n" in text


def test_a_name_with_many_numbers_folds_only_by_the_first(tmp_path):
    rest = ".".join(map(str, range(1500)))
    ranks = {0: {f"l.{n}.{rest}": zeros((4,)) for n in (0, 1)}}
    assert " l.{0,1}.0.1.2.3.4.5.6.7.8." in screen(write_ranks(tmp_path / "src", ranks, "ckpt"))


def test_many_ranks_are_sampled_only_on_request(tmp_path):
    ranks = {rank: {"w": noise(f"w{rank % 2}", "Float32", (4,))} for rank in range(65)}
    write_ranks(tmp_path / "src", ranks, "ckpt")
    text = screen(tmp_path / "src")
    assert "--all samples every tensor and shows which ranks hold the same" in text
    assert " w 4 0-64" in text
    text = screen(tmp_path / "src", "--all")
    assert "sampled pages of 1 tensor: 1 different between ranks" in text
    even, odd = (",".join(map(str, range(first, 65, 2))) for first in (0, 1))
    assert f" w 4 Float32 {even} | {odd}\n" in text


# --------------------------------------------------------------------------------------- strategies


def test_a_name_without_a_pattern_leaves_the_rest_known(tmp_path):
    ranks = {
        rank: {f"l.{i}.w": noise(f"{i}{rank // 2}", "Float32", (4, 4)) for i in range(3)}
        | {"extra": noise("x", "Float32", (5,))}
        for rank in range(4)
    }
    source = write_ranks(tmp_path / "src", ranks, "ckpt")
    path = tmp_path / "hand.yaml"
    for pattern, parallelism in (
        ("*.w", "parameters in 2 slices x 2 replicas"),
        ("z", "not known"),
    ):
        path.write_text(
            f"ckpttool_strategy: 1\nranks: 4\nparameters:\n  '{pattern}': {{axis: 0, parts: 2}}\n"
        )
        result = run("inspect", source, "-s", path)
        text = " ".join(result.stdout.split())
        assert result.exit_code == 5
        assert f"parallelism {parallelism}" in text
        assert "complete not known: the strategy does not fit the checkpoint" in text
        assert ("l.{0-2}.w 8 x 4 rows / 2 0,1 | 2,3" in text) == (pattern == "*.w")
        assert ("not in the strategy, equal on all ranks: extra" in text) == (pattern == "*.w")
        assert "hand.yaml: no pattern matches" in message(result)


def test_several_checkpoints_are_not_shown_together():
    result = run("inspect", CASE / "src", LLAMA / "src")
    assert result.exit_code == 2
    said = "inspect takes one checkpoint, or strategy files, and 2 were given "
    assert f"{said}{CASE / 'src'}, {LLAMA / 'src'} Try: ckpttool inspect {GOLDEN} ..." in message(
        result
    )


def test_a_strategy_beside_a_checkpoint_belongs_behind_its_option():
    for words in ((SOURCE[0], SOURCE[2]), (SOURCE[2], SOURCE[0])):
        result = run("inspect", *words)
        assert result.exit_code == 2
        assert f"Try: ckpttool inspect {SOURCE[0]} -s {SOURCE[2]}" in message(result)


@pytest.mark.parametrize("kind", ["strategy", "table"])
def test_what_is_not_a_checkpoint_refuses_the_options_of_one(tmp_path, kind):
    path = SOURCE[2]
    if kind == "table":
        device = {"device_id": "0", "device_ip": "1.1.1.1", "rank_id": "0"}
        servers = [{"server_id": "10.0.0.1", "device": [device]}]
        path = tmp_path / "rank_table.json"
        path.write_text(json.dumps({"version": "1.0", "server_list": servers}), encoding="utf-8")
    run_well("inspect", path, "--color", "never", "--debug")
    result = run("inspect", path, "--ranks", "--crc", "--step", "9")
    assert result.exit_code == 2
    assert "error[usage]: options for checkpoints only: --step, --crc, --ranks" in message(result)


def test_quiet_prints_warnings_and_errors_only(tmp_path):
    for path in (SOURCE[0], SOURCE[2]):
        assert message(run_well("inspect", path, "-q")) == ""
    shutil.copytree(SOURCE[0], tmp_path / "src")
    shutil.rmtree(tmp_path / "src" / "rank_3")
    said = message(run_well("inspect", tmp_path / "src", *SOURCE[1:], "-q"))
    assert said.startswith("warning[missing_replica]:")


# ---------------------------------------------------------------------------------------- terminals


@pytest.fixture
def terminal(capsys, monkeypatch):
    """A function: the lines of a checkpoint's screen on a terminal of so many columns."""

    def lines(width, case, **more):
        for module in (overview, tables):
            monkeypatch.setattr(module, "terminal_columns", lambda stream: width)
        catalog = ckpttool.scan(str(case / "src"))
        strategy = ckpttool.read_strategy(str(case / "src_strategy.ckpt"))
        examined = inspect.examine(catalog, strategy)
        overview.print_checkpoint(examined, **{"show_all": False, "show_ranks": False} | more)
        return capsys.readouterr().out.splitlines()

    return lines


@pytest.mark.parametrize("width", [60, 80, 140])
@pytest.mark.parametrize("case", [CASE, LLAMA], ids=lambda case: case.name)
def test_no_line_is_wider_than_the_terminal_unless_one_word_is(terminal, case, width):
    for line in terminal(width, case):
        assert len(line) <= max(width, 14 + max(map(len, line.split()), default=0))


@pytest.mark.parametrize(
    ("width", "heads", "group"),
    [
        (80, "tensors full shape sharded", "0,2,4,6 | 1,3,5,7"),
        (60, "tensors full shape", "rows / 2 0,2,4,6 | 1,3,5,7"),
    ],
)
@pytest.mark.parametrize("show_all", [False, True])
def test_a_tensor_is_one_line_below_the_ranks_of_its_slices(
    terminal, width, heads, group, show_all
):
    lines = [" ".join(line.split()) for line in terminal(width, MODEL, show_all=show_all)]
    names = [line.split()[0] for line in lines if re.search("weight .*32 x 16", line)]
    if not show_all:
        assert heads in lines
        assert lines.count(group) == 1
        assert names[-1] == "lm_head.weight"
    assert len(names) >= 3


def test_at_20_columns_heads_are_indented_like_their_cells(terminal):
    lines = terminal(20, MODEL)
    rule = next(i for i, line in enumerate(lines) if "──" in line)
    assert lines[rule - 5 : rule] == [
        *("  full shape", "  sharded", "  ranks of each", "  slice"),
        "    tensors",
    ]
    assert len(lines[rule]) == 20
    assert lines[rule + 1 : rule + 6] == [
        *("  32 x 16", "  rows / 2", "  0,2,4,6 | 1,3,5,7"),
        "    model.tok_embeddings.embedding_weight",
        "    model.layers.0.feed_forward.w{1,3}.weight",
    ]


@pytest.mark.parametrize(
    ("owners", "text"),
    [
        ([range(8)], "0-7"),
        ([[0, 4], [1, 5]], "0,4 | 1,5"),
        ([[rank] for rank in range(4096)], "0-4095, one each"),
        ([[rank] for rank in (0, 2, 1, 3)], "0 | 2 | 1 | 3"),
        ([range(0, 4096, 2), range(1, 4096, 2)], "2 slices x 2048 ranks"),
        ([range(0, 512, 2)], "256 ranks"),
        ([range(40), range(40, 79), [80, 82, 84, 86, 88, 90, 92]], "3 slices x 7-40 ranks"),
    ],
    ids=str,
)
def test_the_ranks_of_each_slice_stay_short(owners, text):
    assert overview.groups_text(owners, 30) == text


@pytest.mark.parametrize(
    ("counts", "shard", "owners", "text"),
    [
        ((2, 1), 1, 2, "rows / 2"),
        ((8, 2), 4, 16, "rows / 2, columns / 2, opt / 4"),
        ((4,), 4, 4, "opt / 4"),
        ((1, 3, 1), 1, 3, "axis 1 / 3"),
        (None, 1, 5, "5 boxes"),
        ((1, 1), 1, 1, "no"),
    ],
)
def test_how_a_tensor_is_sharded_is_said_in_words(counts, shard, owners, text):
    ranks = tuple((rank,) for rank in range(owners))
    placement = Placement("layout", counts, ranks, optimizer_shard=shard)
    assert overview.sharded_text(placement) == text


def test_a_name_with_an_escape_sequence_is_spelled_out(tmp_path):
    bad = "evil\x1b[31m.weight"
    write_ranks(tmp_path / "src", {r: {bad: noise("w", "Float32", (4,))} for r in (0, 1)}, "ckpt")
    text = screen(tmp_path / "src")
    assert "\x1b" not in text
    assert r"evil\x1b[31m.weight" in text
