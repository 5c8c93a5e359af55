"""Groups of options: one heading of ``--help`` and one object for each."""

import os
import re

import click
import pytest
from msgspec import Struct

import ckpttool
from ckpttool import keywords
from ckpttool.cli import options
from ckpttool.model.choices import TensorOptions
from ckpttool.operations.audit import AuditOptions
from tests.support.commands import commands, message, run, run_well
from tests.support.corpus import GOLDEN
from tests.support.pages import ROOT
from tests.support.snapshots import UPDATE
from tests.support.terminals import on_terminal

COMMANDS = commands()
CASE = GOLDEN / "tutorial_8_to_8_retrain"
SRC = (CASE / "src", "-s", CASE / "src_strategy.ckpt")
GROUPS = {
    ckpttool.SourceOptions: options.source_options,
    ckpttool.ResolveOptions: options.resolve_options,
    TensorOptions: options.resolve_options,
    ckpttool.OutputOptions: options.output_options,
    ckpttool.RunOptions: options.run_options,
    AuditOptions: options.audit_options,
}


@pytest.mark.parametrize("made", GROUPS)
def test_every_field_of_an_object_is_an_option_of_its_group(made):
    unset = made()
    names = {n for n in made.__struct_fields__ if not isinstance(getattr(unset, n), Struct)}
    names -= {"command", "shown_by", "is_shared", "called", "fixed"}  # said by the command
    assert names <= GROUPS[made].parameters.keys()


@pytest.mark.parametrize("made", GROUPS)
def test_a_default_that_help_shows_is_that_of_the_field(made):
    unset, shown = made(), keywords.declared(keywords.AllKeywords)
    for name in made.__struct_fields__:
        if name in shown and (default := shown[name][0].default) is not None:
            assert default == (getattr(unset, name) or "hdf5"), name


PAGE = ROOT / "docs" / "reference" / "options.md"
READERS = ("merge", "split", "reshard", "convert", "average", "diff", "verify", "inspect")


@pytest.mark.source
def test_the_page_lists_which_command_takes_which_option_for_tensors():
    taken = {
        name: {one for param in COMMANDS[name].params for one in param.opts} for name in READERS
    }
    options_of = [f"--{name.replace('_', '-')}" for name in options.OF_TENSORS]
    marks = [["yes" if one in taken[name] else "" for name in READERS] for one in options_of]
    rows = [
        f"| `{one}` | {' | '.join(cells)} |".replace("|  |", "| |").replace("|  |", "| |")
        for one, cells in zip(options_of, marks, strict=True)
    ]
    head = f"| option | {' | '.join(READERS)} |\n|{'---|' * (len(READERS) + 1)}\n"
    before, found, rest = PAGE.read_text(encoding="utf-8").partition(head)
    table, _, after = rest.partition("\n\n") if rest[:1] == "|" else ("", "", rest.lstrip("\n"))
    assert found
    if os.environ.get(UPDATE):
        joined = "\n".join(rows)
        PAGE.write_text(f"{before}{head}{joined}\n\n{after}", encoding="utf-8")
    else:
        assert table.splitlines() == rows
    assert [*map(all, marks)].count(True) == len(options.OF_EXPORT)


def sections_of(name):
    text = run_well(*name.split(), "--help").stdout
    return dict(
        section.split(":\n", 1) for section in text.split("\n\n") if " options:\n" in section
    )


@pytest.fixture
def narrow(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_of_a_command_is_under_one_heading_of_its_help(name):
    params = [one for one in COMMANDS[name].params if isinstance(one, click.Option)]
    assert all(isinstance(one, options.GroupedOption) for one in params)
    sections = sections_of(name)
    for one in params:
        shown = [flag for flag in one.opts if flag not in one.aliases]
        row = re.compile(rf"^  (-\w, )?{shown[-1]}\b", re.MULTILINE)
        assert len([rows for rows in sections.values() if row.search(rows)]) == 1, one.name


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("name", COMMANDS)
def test_the_headings_have_one_order_and_at_most_ten_options_come_first(name):
    sections = sections_of(name)
    assert list(sections) == [heading for heading in options.HEADINGS if heading in sections]
    first = re.findall(r"^  -", sections[options.HEADINGS[0]], re.MULTILINE)
    assert 1 <= len(first) <= 10


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("name", COMMANDS)
def test_an_option_takes_at_most_two_lines_at_80_columns(name):
    for rows in sections_of(name).values():
        for row in re.split(r"\n(?=  -)", rows.rstrip("\n")):
            assert row.count("\n") < 2, row


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("name", COMMANDS)
def test_the_columns_of_all_headings_are_of_one_width(name):
    lines = "".join(sections_of(name).values()).splitlines()
    rows = [re.match(r"(  -\S.{,30}?  +)\S", line) for line in lines]
    assert len({len(row[1]) for row in rows if row is not None}) == 1


@pytest.mark.parametrize("name", ["", "strategy", *COMMANDS])
def test_no_line_of_help_is_wider_than_a_terminal(name):
    shown, _ = on_terminal(*name.split(), "--help", columns=60, TERM="dumb")
    assert max(map(len, shown.splitlines())) <= 60


def test_an_option_of_every_day_is_one_of_some_command():
    flags = {flag for name in COMMANDS for one in COMMANDS[name].params for flag in one.opts}
    assert {*options.EVERYDAY} - flags == {"-h"}


def test_strategies_have_one_long_name_in_every_command_and_an_alias():
    for name in COMMANDS:
        found = [one.opts for one in COMMANDS[name].params if "-s" in one.opts]
        assert found in ([], [["-s", "--src-strategy", "--strategy"]]), name


def test_no_engine_of_a_wrong_name_is_made():
    with pytest.raises(ValueError, match="'thread' is not an engine: threads"):
        ckpttool.RunOptions("thread")


def test_a_key_is_not_shown_with_the_options_of_a_source():
    assert "0123456789abcdef" not in repr(ckpttool.SourceOptions(key=b"0123456789abcdef"))


VALUES = {  # of options whose types refuse other texts
    "-j": "2",
    "--max-memory": "1GB",
    "--max-shard-size": "1GB",
    "--optimizer-shard": "2",
    "--part": "1/2",
    "--rank": "0",
    "--limit": "1",
    "--ranks": "0",
    "--atol": "1",
    "--rtol": "1",
}


def single_options():
    for name in COMMANDS:
        for one in COMMANDS[name].params:
            if isinstance(one, click.Option) and not (one.is_flag or one.multiple or one.count):
                yield pytest.param(name, one, id=f"{name} {one.opts[-1]}")


@pytest.mark.parametrize(("name", "option"), [*single_options()])
def test_an_option_of_one_value_is_not_given_twice(name, option):
    """Else the first value is silently replaced: ``-o a.h5 -o b.h5`` wrote b.h5 alone."""
    paths = [SRC[0]] * sum(isinstance(one, click.Argument) for one in COMMANDS[name].params)
    value = VALUES.get(option.opts[0], "x{rank}")
    value = option.type.choices[0] if isinstance(option.type, click.Choice) else value
    value = "threads" if option.opts[0] == "--engine" else value
    first, last = option.opts[0], option.opts[-1]
    again = f"{last}={value}" if last[:2] == "--" else last + value
    result = run(*name.split(), *paths, first, value, again)
    assert result.exit_code == 2
    said = f": given 2 times, expected once Try: the same command with one {first}"
    assert said in message(result)


def test_an_option_of_several_values_and_a_flag_are_given_as_often_as_one_likes():
    words = ("-s", SRC[2], "-s", SRC[2], "-q", "-q")
    assert run("inspect", SRC[0], *words).exit_code in (0, 4)  # one file is named twice
    result = run("--color", "never", "inspect", SRC[0], "--color=always")
    assert result.exit_code == 2
    assert "--color: given 2 times" in message(result)
