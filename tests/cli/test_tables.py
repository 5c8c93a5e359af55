"""Tables and messages: aligned, coloured, and folded where a terminal is too narrow."""

from __future__ import annotations

import io
import re
import sys

import pytest

from ckpttool.cli import tables
from ckpttool.cli.tables import print_facts, print_table, print_text
from tests.support.commands import run
from tests.support.corpus import GOLDEN
from tests.support.terminals import on_terminal

CASE = GOLDEN / "reshard_8_to_4"
SRC = (CASE / "src", "-s", CASE / "src_strategy.ckpt")


@pytest.fixture(autouse=True)
def _utf8(monkeypatch):
    monkeypatch.setenv("LC_ALL", "C.UTF-8")


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


def test_a_column_without_contents_is_left_out(capsys):
    print_table("t", ("name", "shard>", "first"), [("w", "", ""), ("b", "", "(1)")])
    assert capsys.readouterr().out.splitlines()[2] == "  name   first"


def test_in_a_pipe_rows_and_the_rule_are_as_long_as_they_need_to_be(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    print_table("t", ("code", "what"), [("damaged", 80 * "words ")])
    rule, row, _ = capsys.readouterr().out.splitlines()[3:]
    assert set(rule.strip()) == {"─"}
    assert len(rule) == len(row) + 2  # the last word ends in a space
    assert len(row) > 400


@pytest.mark.parametrize("locale", ["C", "POSIX"])
def test_without_utf8_the_rule_is_of_ascii(capsys, monkeypatch, locale):
    monkeypatch.setenv("LC_ALL", locale)
    print_table("t", ("name",), [("w",)])
    assert capsys.readouterr().out.splitlines()[3] == " ------"


def test_where_standard_output_is_ascii_the_rule_is_too(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    print_table("t", ("name",), [("w",)])
    assert b" ------\n" in sys.stdout.buffer.getvalue()


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
    def lines(width, columns, rows):
        monkeypatch.setattr(tables, "terminal_columns", lambda stream: width)
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


def test_another_cell_that_leaves_no_room_stands_above_its_row_too(terminal):
    assert terminal(40, FILES, PATHS[:1]) == [
        "  path",
        "    rank      size",
        " " + "─" * 33,
        "  rank_0/llama_7b_rank_0-2_3.ckpt",
        "       0   1.5 GiB",
    ]


def test_long_cells_are_folded_between_words(terminal):
    rows = [("accum.layer1.weight", "ranks 0-3, 5-7 have 0")]
    assert [line.split() for line in terminal(36, ["name", "device matrix"], rows)[-2:]] == [
        ["accum.layer1.weight", "ranks", "0-3,"],
        ["5-7", "have", "0"],
    ]


@pytest.mark.parametrize(
    ("columns", "lines"),
    [
        (40, ["net.layers.{0,1}.w1.bias   4", "net.layers.{0,1}.w2        8", "norm.weight   16"]),
        (28, ["net.layers.{0,1}.", "  w1.bias 4", "  w2   8", "norm.weight   16"]),
        (16, ["net.layers.{0,1}.w1.bias", "  4", "net.layers.{0,1}.w2", "  8", "norm.weight"]),
    ],
)
def test_layers_are_named_once_where_there_is_little_room(capsys, monkeypatch, columns, lines):
    monkeypatch.setattr(tables, "terminal_columns", lambda stream: columns)
    rows = [("net.layers.{0,1}.w1.bias", "4"), ("net.layers.{0,1}.w2", "8"), ("norm.weight", "16")]
    print_table("t", ("name", "size>"), rows, has_names=True)
    shown = capsys.readouterr().out.splitlines()
    first = next(at for at, line in enumerate(shown) if "──" in line) + 1
    assert [" ".join(it.split()) for it in shown[first : first + len(lines)]] == [
        " ".join(line.split()) for line in lines
    ]


# ------------------------------------------------------------------------------------ paragraphs

LONG = "rank 2: checkpoint/rank_2/net-2_10.ckpt: byte 28091: cut short; give the right file"


def test_in_a_pipe_a_message_is_one_line(capsys):
    print_text(LONG, "error", "damaged", err=True)
    assert capsys.readouterr() == ("", f"error[damaged]: {LONG}\n")


@pytest.mark.parametrize("columns", [20, 60, 80])
def test_on_a_terminal_a_message_is_folded_between_words_and_indented(capsys, monkeypatch, columns):
    monkeypatch.setattr(tables, "terminal_columns", lambda stream: columns)
    print_text(LONG, "warning")
    first, *rest = capsys.readouterr().out.splitlines()
    assert rest
    assert all(line.startswith("  ") and line[2] != " " for line in rest)
    assert " ".join([first, *(line.strip() for line in rest)]) == f"warning: {LONG}"
    assert all(len(line) <= columns or len(line.split()) == 1 for line in (first, *rest))


@pytest.mark.parametrize("columns", range(8, 60))
def test_a_number_stays_with_its_unit(capsys, monkeypatch, columns):
    monkeypatch.setattr(tables, "terminal_columns", lambda stream: columns)
    print_text("from 8 ranks at step 2_10, 189.8 KiB of (4, 2), rows / 2 of 64 x 32, x 4 of 3 1-2")
    lines = capsys.readouterr().out
    for word in ("8 ranks", "step 2_10", "189.8 KiB", "(4, 2)", "rows / 2", "64 x 32", "x 4"):
        assert word in lines


def test_a_bullet_does_not_stand_alone(capsys, monkeypatch):
    monkeypatch.setattr(tables, "terminal_columns", lambda stream: 12)
    print_text("  - rank_0/net-2_10.ckpt: cut short", indent=4)
    assert capsys.readouterr().out == "  - rank_0/net-2_10.ckpt:\n    cut\n    short\n"


def test_a_message_in_wide_letters_is_no_wider_than_the_terminal(capsys, monkeypatch):
    monkeypatch.setattr(tables, "terminal_columns", lambda stream: 20)
    print_text(" ".join(["重み"] * 9))
    assert capsys.readouterr().out.splitlines()[0] == "重み 重み 重み 重み"


def test_escape_sequences_of_a_name_are_spelled_out(capsys):
    print_text("a\x1b[2J", "note")
    assert capsys.readouterr().out == "note: a\\x1b[2J\n"


# ----------------------------------------------------------------------------------------- facts

FACTS = {"contents": ["8 ranks of a checkpoint", "weights"], "made by": [], "complete": ["yes"]}


def test_labels_of_facts_are_a_column_below_the_title(capsys):
    print_facts("src", FACTS)
    lines = ["contents   8 ranks of a checkpoint", "           weights", "complete   yes", "", ""]
    assert capsys.readouterr().out.split("\n") == ["src", *lines]


def test_the_title_of_facts_is_bold(capsys, monkeypatch):
    monkeypatch.setattr(tables.click, "echo", lambda text, nl: sys.stdout.write(text))
    print_facts("path/of/a/checkpoint/\x1b", FACTS)
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first == "\x1b[1mpath/of/a/checkpoint/\\x1b\x1b[0m"
    assert second == "\x1b[1mcontents\x1b[0m   8 ranks of a checkpoint"


@pytest.mark.parametrize(
    ("columns", "lines"),
    [
        (24, ["src", "contents   8 ranks of a", "           checkpoint", "           weights"]),
        (20, ["src", "contents   8 ranks", "   of a checkpoint", "   weights"]),
    ],
)
def test_facts_are_folded_beside_their_labels_or_below(capsys, monkeypatch, columns, lines):
    monkeypatch.setattr(tables, "terminal_columns", lambda stream: columns)
    print_facts("src", FACTS)
    assert capsys.readouterr().out.splitlines()[:4] == lines


# ---------------------------------------------------------------------------- on a real terminal

GREEN, RED = (f"\x1b[{color}m\x1b[1m" for color in (32, 31))


def test_ok_is_green_an_error_is_red_heads_are_bold_and_rules_are_dim(tmp_path):
    assert f"{GREEN}OK\x1b[0m:" in on_terminal("verify", *SRC, raw=True)[0]
    assert f"{RED}error\x1b[0m[source]:" in on_terminal("inspect", tmp_path, raw=True)[0]
    shown, _ = on_terminal("merge", *SRC, "-v", "-o", tmp_path / "m.ckpt", raw=True)
    assert "\x1b[1moutputs\x1b[0m" in shown
    assert "\x1b[2m ──" in shown


@pytest.mark.parametrize(
    ("words", "variables"),
    [
        ([], {"NO_COLOR": "1"}),
        ([], {"NO_COLOR": "1", "FORCE_COLOR": "1"}),
        ([], {"TERM": "dumb"}),
        (["--color", "never"], {"FORCE_COLOR": "1"}),
    ],
)
def test_a_terminal_without_colours_gets_none(tmp_path, words, variables):
    of_errors, _ = on_terminal("inspect", tmp_path, *words, raw=True, **variables)
    of_usage, _ = on_terminal("inspect", *words, tmp_path / "x", raw=True, **variables)
    shown, _ = on_terminal("verify", *SRC, *words, raw=True, **variables)
    assert "error[source]:" in of_errors
    assert "error[usage]:" in of_usage
    assert "OK:" in shown
    assert not re.search(r"\x1b\[[0-9;]*m", of_errors + of_usage + shown)


@pytest.mark.parametrize("words", [["--no-such"], ["inspekt"], ["merge", "no/such/folder"]])
def test_a_mistake_on_the_command_line_is_red_and_folded(words):
    shown, code = on_terminal(*words, columns=60, raw=True)
    assert code == 2
    assert f"{RED}error\x1b[0m[usage]:" in shown
    assert max(map(len, on_terminal(*words, columns=60)[0].splitlines())) <= 60


def test_a_pipe_gets_colours_only_on_request(monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert "\x1b" not in run("verify", *SRC).stdout
    assert run("verify", *SRC, "--color", "always").stdout.startswith(GREEN)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert run("verify", *SRC).stdout.startswith(GREEN)
    assert "\x1b" not in run("verify", *SRC, "--color", "never").stdout
    assert "\x1b" not in run("verify", *SRC, "--json").stdout


@pytest.mark.parametrize("place", [0, 1, 3])
@pytest.mark.parametrize("words", [["merge", "a", "--nope"], ["help", "damagd"], ["verify", "x"]])
def test_colours_are_chosen_anywhere_and_for_mistakes_as_well(monkeypatch, words, place):
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in run(*words).stderr
    for chosen in (["--color", "always"], ["--color=always"]):
        result = run(*words[:place], *chosen, *words[place:])
        assert result.exit_code == 2
        assert result.stderr == f"{RED}error\x1b[0m" + run(*words).stderr.removeprefix("error")


@pytest.mark.parametrize("columns", [60, 80, 140])
def test_no_line_is_longer_than_the_terminal_except_for_a_long_word(tmp_path, columns):
    for words in (["verify"], ["merge", "-v", "-o", tmp_path / "m.ckpt"]):
        shown, code = on_terminal(words[0], *SRC, *words[1:], columns=columns)
        assert code == 0
        lines = shown.rpartition("\r")[2].splitlines()
        assert all(len(line) <= columns or len(line.split()) == 1 for line in lines)
