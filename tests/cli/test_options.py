"""Groups of options: one heading of ``--help`` and one object for each."""

import re
from dataclasses import fields

import click
import pytest

import ckpttool
from ckpttool.cli import options
from ckpttool.cli.main import COMMANDS, main
from ckpttool.formats import FORMAT_NAMES
from tests.support.commands import message, run, run_well
from tests.support.corpus import GOLDEN

CASE = GOLDEN / "tutorial_8_to_8_retrain"
SRC = (CASE / "src", "-s", CASE / "src_strategy.ckpt")
GROUPS = {
    ckpttool.SourceOptions: options.source_options,
    ckpttool.ResolveOptions: options.resolve_options,
    ckpttool.OutputOptions: options.output_options,
    ckpttool.RunOptions: options.run_options,
}


def command_of(name):
    command = main.get_command(click.Context(main), name)
    assert command is not None
    return command


@pytest.mark.parametrize("made", GROUPS)
def test_every_field_of_an_object_is_an_option_of_its_group(made):
    names = {field.name for field in fields(made)}
    assert names <= GROUPS[made].parameters.keys()


def test_every_format_can_be_chosen():
    """The choice repeats the names, since an import of the formats would delay --help."""
    assert tuple(options.FORMAT_CHOICE.choices) == FORMAT_NAMES


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_of_a_command_is_in_one_group_of_its_help(name):
    command = command_of(name)
    params = [one for one in command.params if isinstance(one, click.Option)]
    assert all(isinstance(one, options.GroupedOption) for one in params)
    text = run_well(name, "--help").stdout
    sections = dict(
        section.split(":\n", 1) for section in text.split("\n\n") if " options:\n" in section
    )
    assert list(sections)[-1] == options.REPORT
    for one in params:
        row = re.compile(rf"^  (-\w, )?{one.opts[-1]}\b", re.MULTILINE)
        listed = [heading for heading, rows in sections.items() if row.search(rows)]
        assert listed == [one.heading], one.name


@pytest.mark.parametrize("name", COMMANDS)
def test_the_columns_of_all_groups_are_of_one_width(name):
    lines = run_well(name, "--help").stdout.splitlines()
    rows = [re.match(r"(  -\S.{,30}?  +)\S", line) for line in lines]
    assert len({len(row[1]) for row in rows if row is not None}) == 1


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("-j", "2", "--engine", "processes:2"), "-j 2 is short for --engine threads:2"),
        (("-j", "2", "--engine", "x"), "no engine 'x'"),
        (("-j", "1234567"), "'threads:1234567' is not threads:N"),
    ],
)
def test_jobs_and_an_engine_that_contradict_each_other_are_a_usage_error(tmp_path, words, reason):
    result = run("merge", *SRC, "-o", tmp_path / "m.h5", *words)
    assert result.exit_code == 2
    assert reason in message(result)


@pytest.mark.parametrize("words", [("-j", "2"), ("-j", "2", "--engine", "threads")])
def test_jobs_are_threads(tmp_path, words):
    run_well("merge", *SRC, "-o", tmp_path / "m.h5", *words)


def test_no_engine_of_a_wrong_name_is_made():
    with pytest.raises(ValueError, match="no engine 'thread'"):
        ckpttool.RunOptions("thread")


def test_an_output_refuses_options_that_it_has_no_use_for():
    catalog = ckpttool.scan(str(CASE / "src"))
    src, dst = (ckpttool.read_strategy([str(CASE / f"{side}_strategy.ckpt")]) for side in SIDES)
    for unused in ({"prefix": "x"}, {"ranks": (0,)}, {"strategy_path": "s.ckpt"}):
        with pytest.raises(ValueError, match=f"{next(iter(unused))}: not an option"):
            ckpttool.plan_merge(
                catalog, src, "m.h5", output_options=ckpttool.OutputOptions(**unused)
            )
    with pytest.raises(ValueError, match="max_shard_bytes: not an option"):
        ckpttool.plan_reshard(
            catalog, src, dst, "new", output_options=ckpttool.OutputOptions(max_shard_bytes=9)
        )


SIDES = ("src", "dst")


def test_a_key_is_not_shown_with_the_options_of_a_source():
    assert "0123456789abcdef" not in repr(ckpttool.SourceOptions(key=b"0123456789abcdef"))
