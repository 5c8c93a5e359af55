"""Dicts of layouts as MindSpore has them in Python, against the strategy files of the same nets."""

import json

import pytest

import ckpttool
from tests.support.corpus import GOLDEN
from tests.support.readers import read_ranks

DICTS = GOLDEN / "layout_dicts"
CASE = GOLDEN / "layout_multi_axis_optshard"
PAIRS = {  # the dict, and the strategy file that the compiler wrote of the same net
    "src": CASE / "src_strategy.ckpt",  # two axes on one, which are expanded; the largest shard
    "dst": CASE / "dst_strategy.ckpt",
    "shard_of_2": DICTS / "shard_of_2.ckpt",  # matrices (4, 2), either axis; a shard of 2
}


def dict_of(name):
    return json.loads((DICTS / f"{name}.json").read_text())


@pytest.mark.parametrize("name", PAIRS)
def test_a_dict_says_what_the_strategy_file_of_the_net_says(name):
    layouts = ckpttool.read_strategy(dict_of(name)).layouts
    of_file = ckpttool.read_strategy(PAIRS[name]).layouts
    assert {of: layouts[of] for of in of_file} == of_file
    assert {*layouts} - {*of_file} == {"inputs0", "inputs1"}  # arguments of the net
    assert ckpttool.read_strategy(DICTS / f"{name}.json").layouts == layouts
    shapes = {of: layouts[of][0].full_shape for of in ("inputs0", *of_file)}
    assert shapes == {of: tuple(dict_of(name)[of][6]) for of in shapes}


def test_dicts_are_taken_as_source_and_as_target(tmp_path):
    src, dst, of_net = dict_of("src"), dict_of("dst"), ["inputs*"]
    ckpttool.reshard(CASE / "src", src, dst, tmp_path / "a", format="ckpt", exclude=of_net)
    ckpttool.reshard(CASE / "src", PAIRS["src"], PAIRS["dst"], tmp_path / "b", format="ckpt")
    assert read_ranks(tmp_path / "a") == read_ranks(tmp_path / "b")


REFUSED = {  # what a layout is replaced by, and what the error says
    "another order of axes": ([[2, 4], [1, -1], [4, 8]], "slice shape (4, 8)"),
    "a group without a size": ([[2], [0, -1], [8, 8], 0, True, "mine"], "group 'mine'"),
    "two ways to join": (
        [[2, 2], [1, 0, -1], [8, 8], 0, True, "", [16, 16], [8, 4, 8]],
        "0 ways to join",
    ),
    "no number": ([["2"], [0, -1], [8, 8]], "expected int"),
}


@pytest.mark.parametrize(("layout", "said"), REFUSED.values(), ids=REFUSED)
def test_an_impossible_layout_is_refused(layout, said):
    rest = [0, True, "", [16, 8]][len(layout) - 3 :] if len(layout) < 6 else []
    with pytest.raises(ckpttool.StrategyError) as caught:
        ckpttool.read_strategy({"w": [*layout, *rest]})
    assert "w: " in str(caught.value)
    assert said in str(caught.value)


def test_a_manual_split_needs_the_strategy_file():
    with pytest.raises(ckpttool.StrategyError, match="embedding_table: a manual split"):
        ckpttool.read_strategy(dict_of("manual_split"))
