"""The device grid of explain: every rank is in it once, in order, and it fits."""

from __future__ import annotations

import math

import pytest

from ckpttool.cli.device_matrix import MAX_CELLS, _blocks, _cell
from ckpttool.wording import format_numbers
from tests.support.corpus import GOLDEN
from tests.support.terminals import on_terminal

CASE = GOLDEN / "tutorial_8_to_8_retrain"
WORDS = ["explain", CASE / "src", "-s", CASE / "src_strategy.ckpt"]
MATRICES = [(1,), (8,), (1024,), (7, 13), (2, 2, 2), (16, 8, 32), (4, 1024), (2, 3, 4, 5), (64, 64)]


@pytest.mark.parametrize("room", [60, 80, 200])
@pytest.mark.parametrize("first", [0, 4096])
@pytest.mark.parametrize("matrix", MATRICES)
def test_every_rank_is_in_one_cell_in_order_and_the_grid_is_not_too_wide(matrix, first, room):
    ranks = range(first, first + math.prod(matrix))
    drawn = []
    for _, corner, heads, rows in _blocks(matrix, ranks, room):
        columns = zip(heads, *(map(format_numbers, cells) for _, cells in rows), strict=True)
        assert len(corner) + 4 + sum(max(map(len, one)) + 3 for one in columns) <= room
        for _, cells in rows:
            assert len(cells) == len(heads)
            drawn += cells
    assert [rank for cell in drawn for rank in cell] == [*ranks]
    assert len(drawn) <= MAX_CELLS


@pytest.mark.parametrize("columns", [60, 80])
def test_the_grid_is_drawn_on_a_terminal_and_fits(columns, monkeypatch):
    monkeypatch.chdir(CASE)
    words = ["explain", "src", "-s", "src_strategy.ckpt", "--rank", "5"]
    shown, code = on_terminal(*words, columns=columns)
    assert code == 0
    assert "│ [5] │" in shown
    assert max(map(len, shown.splitlines())) <= columns


def test_ranks_that_hold_the_same_have_one_colour_on_a_terminal():
    shown, _ = on_terminal(*WORDS, raw=True)
    colours = {rank: shown.partition(f"m{rank}\x1b[0m │")[0][-4:] for rank in range(8)}
    assert len({*colours.values()}) == 2
    for ranks in ((0, 1, 4, 5), (2, 3, 6, 7)):
        assert len({colours[rank] for rank in ranks}) == 1


def test_a_terminal_without_utf8_gets_ascii():
    shown, _ = on_terminal(*WORDS, LC_ALL="C", PYTHONIOENCODING="ascii")
    assert shown.isascii()
    assert "| axis 1 \\ axis 0 | 0 | 1 |" in shown


@pytest.mark.parametrize(
    ("ranks", "shown"),
    [
        (range(3, 4), "3"),
        (range(5, 6), "[(5)]"),
        (range(6, 7), "(6)"),
        (range(4), "0-3"),
        (range(4, 8), "[(4-7)]"),
        (range(6, 10), "(6-9)"),
    ],
)
def test_a_cell_is_marked_for_the_explained_rank_and_for_ranks_without_a_file(ranks, shown):
    assert _cell(ranks, {5: "([", 6: "("}) == shown
