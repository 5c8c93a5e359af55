"""Names and layouts over pipeline stages."""

import pytest

from ckpttool.model.layout import Layout
from ckpttool.model.strategy import Strategy, join_stages
from ckpttool.problems import StrategyError
from ckpttool.wording import shorten

ROWS = Layout((2, 2), ((0,), ()))


def test_stages_take_consecutive_ranks():
    strategy = join_stages({1: {"b": ROWS, "shared": ROWS}, 0: {"a": ROWS, "shared": ROWS}})
    assert strategy.stages == 2
    assert strategy.stage_ranks == 4
    assert strategy.ranks == range(8)
    assert [layout.first_rank for layout in strategy.layouts["shared"]] == [0, 4]
    assert strategy.stages_of("shared") == (0, 1)
    assert strategy.stages_of("b") == (1,)
    assert strategy.layouts["b"][0].ranks == range(4, 8)


def test_a_stage_without_parameters_still_has_ranks():
    strategy = join_stages({0: {"a": ROWS}, 1: {}})
    assert strategy.ranks == range(8)


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        ({}, ["s.ckpt", "no parameter layouts"]),
        ({0: {}}, ["no parameter layouts"]),
        ({1: {"a": ROWS}}, ["layouts of stage 1 but not of stage 0", "all pipeline stages"]),
        (
            {0: {"a": ROWS}, 3: {"b": ROWS}},
            ["layouts of stages 0, 3 but not of stages 1, 2", "merged one"],
        ),
        ({0: {"a": ROWS, "c": ROWS, "b": Layout((2,), ((0,),))}}, ["2 ranks: b", "4 ranks: a, c"]),
        (
            {0: {"a": ROWS}, 1: {"b": Layout((8,), ((0,),))}},
            ["4 ranks: stage 0 a", "8 ranks: stage 1 b"],
        ),
    ],
)
def test_stages_that_do_not_make_a_whole_are_refused(stages, words):
    with pytest.raises(StrategyError) as caught:
        join_stages(stages, ("s.ckpt",))
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_strategy_names_where_it_comes_from():
    assert Strategy({}, 1, 1).origin == "the strategy"
    assert Strategy({}, 1, 1, ("a", "b")).origin == "a, b"
    assert Strategy({}, 1, 1, ("a", "b", "c", "d")).origin == "a, b and 2 more"


def test_long_lists_are_shortened():
    assert shorten([]) == ""
    assert shorten("abcde") == "a, b, c, d, e"
    assert shorten("abc", 2) == "a, b and 1 more"
    assert shorten(iter("abc"), 1) == "a and 2 more"
