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
from ckpttool.operations import inspection as inspect
from ckpttool.operations.summary import Placement, sharded_text
from tests.support.checkpoints import Entry, create_file, noise, write_ranks
from tests.support.commands import run, run_well
from tests.support.corpus import GOLDEN
from tests.support.readers import zeros
from tests.support.terminals import on_terminal

CASE = GOLDEN / "tutorial_8_to_8_retrain"
MODEL = GOLDEN / "reshard_8_to_4"
LLAMA = GOLDEN / "pipeline_tied_llama"


def screen(*words) -> str:
    return re.sub(r"[ ]+", " ", run_well("inspect", *words).stdout)


def document(*words) -> dict[str, Any]:
    return json.loads(run("inspect", *words, "--json").stdout)


# ------------------------------------------------------------------------------- without a strategy


def layers() -> dict[str, Entry]:
    names = [f"{prefix}layers.{i}.weight" for prefix in ("", "adam_m.") for i in range(6)]
    return {name: noise(name, "Float32", (8, 8)) for name in names}


def test_of_many_tensors_only_the_first_of_each_row_is_called_equal(tmp_path, monkeypatch):
    monkeypatch.setattr(inspect, "MAX_SAMPLES", 30)
    held = layers() | {f"step{n}": noise("s", "Float32", (1,)) for n in "12"}
    write_ranks(tmp_path / "src", dict.fromkeys((0, 1), held), "ckpt")
    assert " tensors shape equal ranks\n" in screen(tmp_path / "src")
    monkeypatch.setattr(inspect, "MAX_SAMPLES", 27)
    text = screen(tmp_path / "src")
    assert "pages of 2 tensors, the first of each row (--all samples every one): 2 equal" in text
    assert " tensors shape equal ranks, first\n" in text
    assert "full replica" not in text
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


def test_a_name_with_many_numbers_folds_only_by_the_first(tmp_path):
    rest = ".".join(map(str, range(1500)))
    ranks = {0: {f"l.{n}.{rest}": zeros((4,)) for n in (0, 1)}}
    assert " l.{0,1}.0.1.2.3.4.5.6.7.8." in screen(write_ranks(tmp_path / "src", ranks, "ckpt"))


# ---------------------------------------------------------------------------------------- terminals


@pytest.fixture
def terminal(capsys, monkeypatch):
    def lines(width, case, **more):
        monkeypatch.setattr(tables, "terminal_columns", lambda stream: width)
        catalog = ckpttool.scan(str(case / "src"))
        strategy = ckpttool.read_strategy(str(case / "src_strategy.ckpt"))
        examined = inspect.inspect_catalog(catalog, strategy).parts
        overview.print_checkpoint(examined, **{"show_all": False, "show_ranks": False} | more)
        return capsys.readouterr().out.splitlines()

    return lines


@pytest.mark.parametrize("width", [60, 80, 140])
@pytest.mark.parametrize("case", [CASE, LLAMA], ids=lambda case: case.name)
def test_no_line_is_wider_than_the_terminal_unless_one_word_is(terminal, case, width):
    for line in terminal(width, case):
        assert len(line) <= max(width, 14 + max(map(len, line.split()), default=0))


@pytest.mark.parametrize(
    ("width", "lines"),
    [
        (100, ["model.layers.0.attention.wo.weight 16 x 16 columns / 2"]),
        (70, ["model.layers.0.", "attention.wo.weight 16 x 16 columns / 2"]),
        (50, ["model.layers.0.attention.wo.weight", "16 x 16 columns / 2"]),
    ],
)
def test_names_are_the_groups_and_ranks_stand_once(terminal, width, lines):
    shown = [" ".join(line.split()) for line in terminal(width, MODEL)]
    assert {*lines} <= {*shown}
    assert sum("0-6/2 | 1-7/2" in line for line in shown) == 1


@pytest.mark.parametrize(
    "case", sorted(path.parent.name for path in GOLDEN.glob("*/src_strategy.ckpt"))
)
def test_the_first_lines_of_a_checkpoint_fit_on_80_columns(case, capsys, monkeypatch):
    monkeypatch.setattr(tables, "terminal_columns", lambda stream: 80)
    catalog = ckpttool.scan(str(GOLDEN / case / "src"))
    strategy = ckpttool.read_strategy(str(GOLDEN / case / "src_strategy.ckpt"))
    examined = inspect.inspect_catalog(catalog, strategy).parts
    lines = sum(len([*texts]) for texts in overview.facts_of(examined).values())
    overview.print_checkpoint(examined, show_all=False, show_ranks=False)
    assert capsys.readouterr().out.splitlines().index("") == 1 + lines


PAIRS = [rank for rank in range(4096) if rank % 4 < 2]


@pytest.mark.parametrize(
    ("owners", "text"),
    [
        ([range(8)], "0-7"),
        ([[0, 4], [1, 5]], "0, 4 | 1, 5"),
        ([[rank] for rank in range(4096)], "0 | 1 | ... | 4095"),
        ([[rank] for rank in (0, 2, 1, 3)], "0 | 2 | 1 | 3"),
        ([range(0, 4096, 2), range(1, 4096, 2)], "0-4094/2 | 1-4095/2"),
        ([PAIRS], "0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21 and 2036 more"),
    ],
    ids=str,
)
def test_the_ranks_of_each_slice_stay_short(owners, text):
    assert overview.groups_text(owners) == text


@pytest.mark.parametrize(
    ("counts", "shard", "owners", "text"),
    [
        ((2, 1), 1, 2, "rows / 2"),
        ((8, 2), 4, 16, "rows / 2, columns / 2, opt / 4"),
        ((4,), 4, 4, "opt / 4"),
        ((1, 3, 1), 1, 3, "axis 1 / 3"),
        (None, 1, 5, "5 boxes"),
        ((1, 1), 1, 1, "not sharded"),
    ],
)
def test_how_a_tensor_is_sharded_is_said_in_words(counts, shard, owners, text):
    ranks = tuple((rank,) for rank in range(owners))
    placement = Placement("layout", counts, ranks, optimizer_shard=shard)
    assert sharded_text(placement) == text


@pytest.mark.parametrize("name", ["strategy.ckpt", "src_strategy.json"])
@pytest.mark.parametrize("case", ["reshard_4_to_8", "json_strategy", "safetensors_crc"])
def test_a_checkpoint_is_one_also_with_its_strategy_beside_the_ranks(tmp_path, case, name):
    run_folder, golden = tmp_path / "run", GOLDEN / case
    shutil.copytree(golden / "src", run_folder)
    strategy = run_folder / name
    (source,) = golden.glob("src_strategy.*")
    ckpttool.write_strategy(ckpttool.read_strategy(str(source)), strategy)
    for words in ([], ["-s", strategy], ["--ranks"]):
        assert " a strategy for " not in screen(run_folder, *words)
    assert " a strategy for " in screen(strategy)


@pytest.mark.parametrize("lost", [[], [3, 7], range(1, 8)])
def test_what_is_not_complete_has_a_color(lost):
    shutil.copytree(MODEL / "src", "run")
    unknown, _ = on_terminal("inspect", "run", raw=True)
    assert re.search("complete[^y]*\x1b\\[33m *not known", unknown)
    for rank in lost:
        shutil.rmtree(f"run/rank_{rank}")
    shown, _ = on_terminal("inspect", "run", "-s", MODEL / "src_strategy.ckpt", raw=True)
    assert ("complete\x1b[0m\x1b[32m      yes" in shown) != bool(
        re.search("\x1b\\[31m *no:", shown)
    )


@pytest.mark.parametrize(("case", "is_listed"), [("json_strategy", True), (MODEL.name, False)])
def test_json_confirms_shapes_and_states_that_are_sharded_alike_do_not(case, is_listed):
    (path,) = (GOLDEN / case).glob("src_strategy.*")
    checkpoint = ckpttool.resolve(
        ckpttool.scan(GOLDEN / case / "src"), ckpttool.read_strategy(path)
    )
    assert checkpoint.states
    sharded = {tensor.name for tensor in checkpoint.tensors if tensor.is_sharded}
    assert sharded & checkpoint.confirmed_by([]) == (sharded if is_listed else set())
