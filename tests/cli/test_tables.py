"""Tables: aligned, and folded where a terminal is too narrow."""

from __future__ import annotations

import os
import shutil

import pytest

from ckpttool.cli import tables
from ckpttool.cli.tables import print_table

COLUMNS = ("name", "size>")
ROWS = [("layers.0.weight", "4 B"), ("重み", "1.5 KiB"), ("e\u0301\x1b", "")]


def test_columns_are_as_wide_as_their_widest_cell(capsys):
    print_table("two\n", COLUMNS, ROWS)
    assert capsys.readouterr().out == (
        "two\\n\n"
        "\n"
        "  name                 size\n"
        " ───────────────────────────\n"
        "  layers.0.weight       4 B\n"
        "  重み              1.5 KiB\n"
        "  e\u0301\\x1b\n"
        "\n"
    )


def test_a_table_without_rows_is_a_header(capsys):
    print_table("none", COLUMNS, [])
    assert capsys.readouterr().out == "none\n\n  name   size\n ─────────────\n\n"


def test_in_a_pipe_the_rule_is_no_longer_than_a_line_though_rows_are(capsys, monkeypatch):
    for columns, length in (("100", 98), ("", 78)):
        monkeypatch.setenv("COLUMNS", columns)
        print_table("t", ("code", "what"), [("damaged", 80 * "word ")])
        lines = capsys.readouterr().out.splitlines()
        assert lines[3] == " " + length * "─"
        assert len(lines[4]) > 400


NAMES = (
    "adam_m.model.layers.31.feed_forward.w1.weight",
    "model.layers.31.attention.wq.weight",
    "w",
)
SHAPES = ("name", "dtype", "shape", "device matrix", "shard>")
TENSORS = [(name, "BFloat16", "(11008, 4096)", "(2, 8, 4)", "4") for name in NAMES]
FILES = ("rank>", "path", "size>")
PATHS = [(str(rank), f"rank_{rank}/llama_7b_rank_{rank}-2_3.ckpt", "1.5 GiB") for rank in range(3)]


@pytest.fixture
def terminal(capsys, monkeypatch):
    """A function: the lines of a table on a terminal of so many columns, without the title."""

    def lines(width, columns, rows):
        monkeypatch.setattr(shutil, "get_terminal_size", lambda **_: os.terminal_size((width, 24)))
        monkeypatch.setattr(tables.sys.stdout, "isatty", lambda: True)
        print_table("t", columns, rows)
        return capsys.readouterr().out.splitlines()[2:-1]

    return lines


@pytest.mark.parametrize("width", [200, 100, 80, 60, 40, 3])
@pytest.mark.parametrize(("columns", "rows"), [(SHAPES, TENSORS), (FILES, PATHS), (COLUMNS, ROWS)])
def test_no_word_is_broken_and_none_is_lost(terminal, width, columns, rows):
    words = [w for line in terminal(width, columns, rows) for w in line.split() if "─" not in w]
    header = " ".join(columns).replace(">", "")
    expected = " ".join(cell for row in rows for cell in row).replace("\x1b", "\\x1b")
    assert sorted(words) == sorted(f"{header} {expected}".split())


@pytest.mark.parametrize("width", [100, 80, 60])
@pytest.mark.parametrize(("columns", "rows"), [(SHAPES, TENSORS), (FILES, PATHS)])
def test_a_table_is_no_wider_than_the_terminal(terminal, width, columns, rows):
    assert max(map(len, terminal(width, columns, rows))) <= width


def test_a_name_that_leaves_no_room_stands_above_its_row(terminal):
    assert terminal(60, SHAPES, TENSORS[:1]) == [
        "  name",
        "    dtype      shape           device matrix   shard",
        " " + "─" * 52,
        "  adam_m.model.layers.31.feed_forward.w1.weight",
        "    BFloat16   (11008, 4096)   (2, 8, 4)           4",
    ]


def test_another_cell_that_leaves_no_room_stands_below_its_row(terminal):
    assert terminal(40, FILES, PATHS[:1]) == [
        "  rank      size",
        "    path",
        " " + "─" * 16,
        "     0   1.5 GiB",
        "    rank_0/llama_7b_rank_0-2_3.ckpt",
    ]


def test_long_cells_are_folded_between_words(terminal):
    rows = [("accum.layer1.weight", "ranks 0-3, 5-7 have 0")]
    assert [line.split() for line in terminal(36, ["name", "device matrix"], rows)[-2:]] == [
        ["accum.layer1.weight", "ranks", "0-3,"],
        ["5-7", "have", "0"],
    ]
