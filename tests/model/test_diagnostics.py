"""The table of severities, and the accumulator that goes by it."""

from __future__ import annotations

import os
import pickle
import re
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from ckpttool.errors import PlanError
from ckpttool.model.diagnostics import (
    CODES,
    COMMANDS,
    OPTIONS,
    Command,
    Diagnostic,
    Diagnostics,
    Severity,
    join_alike,
    severities,
)
from tests.support.errors import texts_of
from tests.support.snapshots import UPDATE

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "messages.md"
NAMES = {"convert": "merge, split, reshard"}


def summary_of(name: str) -> str:
    """The first sentences of a code's entry: its meaning, and its severity for every command."""
    code = CODES[name]
    by_severity: dict[str, list[str]] = {}
    for command, severity in code.exceptions.items():
        by_severity.setdefault(severity or "not reported", []).append(NAMES.get(command, command))
    others = "".join(f"; {', '.join(of)}: {one}" for one, of in by_severity.items())
    meaning = code.meaning[0].upper() + code.meaning[1:]
    return f"**{meaning}.** Severity: {code.default}{others}."


@pytest.mark.source
def test_the_documentation_has_an_entry_for_every_code() -> None:
    page = PAGE.read_text(encoding="utf-8")
    before, *entries = re.split(r"^(?=### )", page, flags=re.MULTILINE)
    assert [entry.split("\n")[0] for entry in entries] == [f"### `{name}`" for name in CODES]
    new = [before]
    for name, entry in zip(CODES, entries, strict=True):
        heading, summary, *body = entry.rstrip("\n").split("\n\n")
        marks = [one.split(" ", 1)[0] for one in body if one.startswith("**")]
        assert body[0].startswith("**Why.** "), name
        assert marks == ["**Why.**", "**What"], name
        assert any(one.startswith("**What to do.** ") for one in body), name
        assert all(one.startswith("## ") or not one.startswith("#") for one in body), name
        text = textwrap.fill(summary_of(name), 100, break_long_words=False, break_on_hyphens=False)
        if not os.environ.get(UPDATE):
            assert summary == text
        new.append("\n\n".join([heading, text, *body]))
    if os.environ.get(UPDATE):
        PAGE.write_text(before + "\n\n".join(new[1:]) + "\n", encoding="utf-8")


def test_every_code_has_a_meaning_and_a_severity_for_every_command() -> None:
    known = {*get_args(Severity), None}
    for name, code in CODES.items():
        assert name == name.lower().replace(" ", "_")
        assert code.meaning
        assert {code.default, *code.exceptions.values()} <= known
        assert set(code.exceptions) < set(COMMANDS)
    assert set(get_args(Command)) == set(COMMANDS)


def test_no_exception_repeats_the_default() -> None:
    assert not [name for name, code in CODES.items() if code.default in code.exceptions.values()]


def test_an_error_of_every_command_is_an_error_whatever_is_ignored() -> None:
    for command in COMMANDS:
        usual = severities(command)
        edited = severities(command, ignore=CODES)
        assert [c for c in CODES if usual[c] == "error"] == [
            c for c in CODES if edited[c] == "error"
        ]
        assert "warning" not in edited.values()


def test_strict_makes_errors_of_warnings_and_of_nothing_else() -> None:
    usual, strict = severities("convert"), severities("convert", strict=True)
    for name in CODES:
        assert strict[name] == ("error" if usual[name] == "warning" else usual[name])


def test_a_code_that_is_not_in_the_table_is_refused() -> None:
    with pytest.raises(ValueError, match="'looked'"):
        Diagnostic("looked", "text")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_hint_stands_only_where_the_command_has_its_option(command: Command) -> None:
    for option, commands in OPTIONS.items():
        one = Diagnostic("contradicted", "they differ", f"{option} 2", (option,))
        tried = f"{option} 2" if command in commands else "`ckpttool help contradicted`"
        assert one.for_command(command).lines == ("they differ", f"Try: {tried}")


def test_the_text_is_a_line_for_what_is_wrong_the_facts_and_the_hint() -> None:
    one = Diagnostic("leftover", "a stopped save", "rm a", facts="a.tmp, 3 KiB", where="run")
    assert one.lines == ("run: a stopped save", "a.tmp, 3 KiB", "Try: rm a")
    assert one.text == "run: a stopped save\n  a.tmp, 3 KiB\n  Try: rm a"
    assert Diagnostic("leftover", "a stopped save").text == "a stopped save"


def test_the_place_of_a_fact_comes_before_its_message() -> None:
    one = Diagnostic("leftover", "a stopped save", where="run")
    assert (one.message, one.text) == ("a stopped save", "run: a stopped save")
    assert one.on_side("A").message == "a stopped save"
    assert one.on_side("A").text == "A (run): a stopped save"
    found = Diagnostics()
    found.add(one, one, one.on_side("A"))
    assert [diagnostic.side for diagnostic in found] == ["", "A"]


def test_each_fact_is_there_once() -> None:
    found = Diagnostics()
    found.add(Diagnostic("missing", "a", ranks=(1,)), Diagnostic("missing", "a", ranks=(2,)))
    found.add(Diagnostic("missing", "a", "put it back", ranks=(1,)))
    assert [one.ranks for one in found] == [(1,), (2,)]


def test_what_a_command_does_not_report_is_not_added() -> None:
    for command in COMMANDS:
        found = Diagnostics(command)
        found.add(Diagnostic("decided", "dropped"))
        assert len(found) == (command in ("convert", "diff"))


def test_all_errors_are_raised_at_once() -> None:
    found = Diagnostics()
    found.raise_if_errors()
    found.add(Diagnostic("missing", "a", "b"), Diagnostic("older_step", "c"))
    found.add(Diagnostic("shape", "d"))
    with pytest.raises(PlanError) as caught:
        found.raise_if_errors()
    assert texts_of(caught.value) == ("a\n  Try: b", "d")
    assert texts_of(pickle.loads(pickle.dumps(caught.value))) == ("a\n  Try: b", "d")


def test_an_error_that_strict_made_says_so() -> None:
    found = Diagnostics(strict=True)
    found.add(Diagnostic("lacking", "rank 1 lacks w"), Diagnostic("shape", "d"))
    with pytest.raises(PlanError) as caught:
        found.raise_if_errors()
    assert texts_of(caught.value) == (
        "rank 1 lacks w (--strict)\n  Try: the same command without --strict",
        "d",
    )


def lines(*found: Diagnostic) -> list[tuple[str, ...]]:
    return [one.lines for one in join_alike(found)]


def of_tensor(tensor: str, facts: str = "", *ranks: int) -> Diagnostic:
    return Diagnostic("shape", "of another shape", "look", (), facts, tensor, ranks)


def of_file(path: str, rank: int, facts: str = "", side: str = "") -> Diagnostic:
    one = Diagnostic("damaged", "cut short", ranks=(rank,), path=path, where=path, side=side)
    return replace(one, facts=facts)


def test_the_same_problem_of_many_tensors_is_one_text_with_three_names() -> None:
    found = [of_tensor(f"w{i}", f"({i},)", 0, 1) for i in range(20)]
    facts = "w0: (0,); w1: (1,); w2: (2,); 17 more; --json lists each"
    assert lines(*found) == [("w0, w1, w2 and 17 more: of another shape", facts, "Try: look")]
    assert lines(of_tensor("w", "a"), of_tensor("b", "a")) == [
        ("w, b: of another shape", "a", "Try: look")
    ]


def test_a_tensor_that_comes_several_times_is_named_once_with_all_its_facts() -> None:
    found = [of_tensor("w", "4 in rank 0", 0), of_tensor("w", "6 in rank 1", 1)]
    text = "4 in rank 0; 6 in rank 1"
    assert lines(*found) == [("w: of another shape", text, "Try: look")]
    (_, facts, _), *_ = lines(*(of_tensor("w", f"{i}") for i in range(9)))
    assert facts == "0; 1; 2; 6 more; --json lists each"


def test_facts_that_differ_stand_by_their_tensors_without_united_ranks() -> None:
    found = [
        of_tensor("w", "rank 5 differs", 0, 1, 4, 5),
        of_tensor("stat.w", "rank 5 differs", 0, 1, 4, 5),
        of_tensor("b", "rank 2 differs", 2, 3, 6, 7),
    ]
    facts = "w and 1 more: rank 5 differs; b: rank 2 differs"
    assert lines(*found) == [("w, stat.w, b: of another shape", facts, "Try: look")]
    (joined,) = join_alike(found)
    assert joined.ranks == tuple(range(8))


def test_names_that_are_left_out_are_in_the_json_document() -> None:
    found = [of_tensor(f"w{i}", "a", 0) for i in range(4)]
    facts = "a; --json lists each"
    assert lines(*found) == [("w0, w1, w2 and 1 more: of another shape", facts, "Try: look")]
    assert lines(*found[:3]) == [("w0, w1, w2: of another shape", "a", "Try: look")]


def test_facts_that_differ_stand_by_their_files_and_none_is_empty() -> None:
    found = [of_file("a", 0), of_file("b", 1, "byte 7"), of_file("c", 2, "byte 9")]
    assert lines(*found) == [("a and 2 more: cut short", "ranks 0-2; b: byte 7; c: byte 9")]
    assert lines(*found[:1]) == [("a: cut short",)]
    assert lines(of_file("a", 0), of_file("b", 1)) == [("a and 1 more: cut short", "ranks 0, 1")]


def test_files_without_ranks_are_named() -> None:
    found = [replace(of_file(name, 0), ranks=()) for name in "abcdef"]
    assert lines(*found) == [
        ("a and 5 more: cut short", "also b, c, d and 2 more; --json lists each")
    ]


def test_files_that_no_rank_of_their_own_identifies_are_named() -> None:
    found = [of_file("a", 0), replace(of_file("index", 0), ranks=()), of_file("b", 1)]
    assert lines(*found[:2]) == [("a and 1 more: cut short", "also index")]
    assert lines(*found) == [("a and 2 more: cut short", "ranks 0, 1; also index, b")]
    found = [of_file("a", 0), of_file("c", 0), of_file("b", 1)]
    assert lines(*found) == [("a and 2 more: cut short", "ranks 0, 1; also c, b")]


def test_files_of_both_sides_are_never_one() -> None:
    assert lines(of_file("a", 0, side="A"), of_file("b", 0, side="B")) == [
        ("A (a): cut short",),
        ("B (b): cut short",),
    ]


def test_a_problem_without_a_tensor_or_a_place_is_there_once() -> None:
    found = [Diagnostic("missing", "some", facts=facts) for facts in ("f", "f", "g")]
    assert lines(*found) == [("some", "f; g")]


def test_an_accumulator_keeps_each_file_by_itself_also_of_another_stage() -> None:
    first, second = Diagnostics("verify"), Diagnostics("verify")
    first.add(of_file("a", 0), of_file("b", 1))
    second.extend(first)
    second.add(of_file("c", 2))
    assert [one.path for one in second] == ["a", "b", "c"]
    assert len(second) == 3
    assert lines(*second) == [("a and 2 more: cut short", "ranks 0-2")]
