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


@pytest.mark.parametrize("columns", [24, 18, 3])
def test_on_a_terminal_long_cells_are_folded(capsys, monkeypatch, columns):
    monkeypatch.setattr(shutil, "get_terminal_size", lambda: os.terminal_size((columns, 24)))
    monkeypatch.setattr(tables.sys.stdout, "isatty", lambda: True)
    print_table("t", COLUMNS, ROWS)
    title, _, *lines = capsys.readouterr().out.splitlines()
    assert title == "t"
    assert max(map(len, lines)) <= max(columns, 2 + tables.NARROWEST * 2 + 3 + 1)
    names = [line[2:].split("   ")[0].strip() for line in lines]
    joined = "".join(name for name in names if "─" not in name)
    assert joined == "name" + "".join(name for name, _ in ROWS).replace("\x1b", "\\x1b")


def test_long_cells_are_folded_between_words(capsys, monkeypatch):
    monkeypatch.setattr(shutil, "get_terminal_size", lambda: os.terminal_size((32, 24)))
    monkeypatch.setattr(tables.sys.stdout, "isatty", lambda: True)
    print_table("t", ["name", "device matrix"], [("accum.layer1.weight", "ranks 0-3, 5-7 have 0")])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[4:-1]] == [
        ["accum.layer1.", "ranks", "0-3,"],
        ["weight", "5-7", "have", "0"],
    ]
