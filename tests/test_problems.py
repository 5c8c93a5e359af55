"""Diagnostics and the table of their codes, and errors: texts, exit codes, pickling."""

from __future__ import annotations

import copy
import copyreg
import os
import pickle
import re
import textwrap
from pathlib import Path
from typing import get_args

import pytest
from msgspec.structs import replace

from ckpttool import problems
from ckpttool.model.joining import join_alike
from ckpttool.problems import (
    CODES,
    COMMANDS,
    OPTIONS,
    CombinedError,
    Command,
    Diagnostic,
    Diagnostics,
    ExecutionError,
    FormatError,
    LibraryError,
    PlanError,
    Severity,
    VerifyError,
    add_note,
    notes_of,
    raise_all,
    severities,
)
from tests.support.errors import EXAMPLES, FORMAT, PLAN, STRATEGY, texts_of
from tests.support.snapshots import UPDATE

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "messages.md"
NAMES = {"convert": "merge, split, reshard"}


def summary_of(name: str) -> str:
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
        one = Diagnostic("contradicted", "they differ", hint=option, options=(option,))
        tried = option if command in commands else "`ckpttool help contradicted`"
        assert one.for_command(command).lines == ("they differ", f"Try: {tried}")


def test_the_text_is_a_line_for_what_is_wrong_the_facts_and_the_hint() -> None:
    one = Diagnostic("leftover", "a stopped save", hint="rm a", facts="a.tmp, 3 KiB", where="run")
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
    found.add(Diagnostic("missing", "a", hint="put it back", ranks=(1,)))
    assert [one.ranks for one in found] == [(1,), (2,)]


def test_what_a_command_does_not_report_is_not_added() -> None:
    for command in COMMANDS:
        found = Diagnostics(command)
        found.add(Diagnostic("decided", "dropped"))
        assert len(found) == (command in ("convert", "diff"))


def test_all_errors_are_raised_at_once() -> None:
    found = Diagnostics()
    found.raise_if_errors()
    found.add(Diagnostic("missing", "a", hint="b"), Diagnostic("older_step", "c"))
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
        "rank 1 lacks w (strict)\n  Try: the same command without --strict",
        "d",
    )


def lines(*found: Diagnostic) -> list[tuple[str, ...]]:
    return [one.lines for one in join_alike(found)]


def of_tensor(tensor: str, facts: str = "", *ranks: int) -> Diagnostic:
    return Diagnostic(
        "shape",
        "of another shape",
        hint="look",
        facts=facts,
        tensor=tensor,
        ranks=ranks,
    )


def of_file(path: str, rank: int, facts: str = "", side: str = "") -> Diagnostic:
    one = Diagnostic("damaged", "cut short", ranks=(rank,), path=path, where=path, side=side)
    return replace(one, facts=facts)


def test_the_same_problem_of_many_tensors_is_one_text_with_folded_names() -> None:
    found = [of_tensor(f"w{i}", f"({i},)", 0, 1) for i in range(20)]
    facts = "w{0-19}; w0: (0,); --json lists each"
    assert lines(*found) == [("of another shape: 20 tensors", facts, "Try: look")]
    assert lines(of_tensor("w", "a"), of_tensor("b", "a")) == [
        ("of another shape: 2 tensors", "w, b; a", "Try: look")
    ]


def test_a_tensor_that_comes_several_times_is_named_once_with_all_its_facts() -> None:
    found = [of_tensor("w", "4 in rank 0", 0), of_tensor("w", "6 in rank 1", 1)]
    text = "4 in rank 0; 6 in rank 1"
    assert lines(*found) == [("w: of another shape", text, "Try: look")]
    (_, facts, _), *_ = lines(*(of_tensor("w", f"{i}") for i in range(9)))
    assert facts == "0; --json lists each"


def test_facts_that_differ_stand_by_their_tensors_without_united_ranks() -> None:
    found = [
        of_tensor("w", "rank 5 differs", 0, 1, 4, 5),
        of_tensor("stat.w", "rank 5 differs", 0, 1, 4, 5),
        of_tensor("b", "rank 2 differs", 2, 3, 6, 7),
    ]
    facts = "w, b, with their states; w and 1 more: rank 5 differs; --json lists each"
    assert lines(*found) == [("of another shape: 3 tensors", facts, "Try: look")]
    (joined,) = join_alike(found)
    assert joined.ranks == tuple(range(8))


def test_names_that_are_left_out_are_in_the_json_document() -> None:
    found = [of_tensor(f"w{i}", "a", 0) for i in range(4)]
    facts = "w{0-3}; a; --json lists each"
    assert lines(*found) == [("of another shape: 4 tensors", facts, "Try: look")]
    assert lines(*found[:3]) == [("of another shape: 3 tensors", "w{0-2}; a", "Try: look")]


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


# Also from its arguments alone, as some executors rebuild what a worker raised.
WAYS = [copy.copy, lambda e: pickle.loads(pickle.dumps(e)), lambda e: type(e)(*e.args)]
IDS = [f"{type(error).__name__}-{i}" for i, (error, *_) in enumerate(EXAMPLES)]


@pytest.mark.parametrize(("error", "attributes", "message", "code"), EXAMPLES, ids=IDS)
@pytest.mark.parametrize("send", WAYS)
def test_error_keeps_attributes_message_and_exit_code(send, error, attributes, message, code):
    got = send(error)
    assert type(got) is type(error)
    assert {name: getattr(got, name) for name in attributes} == attributes
    assert str(got) == message
    assert got.exit_code == code
    assert got.diagnostics == error.diagnostics
    if not isinstance(error, FormatError | ExecutionError):  # theirs have facts and a hint
        assert "\n".join(texts_of(got)) == message


@pytest.fixture(params=["python", "tblib"])
def pickled_by(request):
    before = dict(copyreg.dispatch_table)
    if request.param == "tblib":
        pytest.importorskip("tblib.pickling_support").install()
    yield
    copyreg.dispatch_table.clear()
    copyreg.dispatch_table.update(before)


@pytest.mark.usefixtures("pickled_by")
def test_every_problem_of_an_error_has_its_side_also_in_another_process():
    errors = [error for error, *_ in EXAMPLES]
    for error in (*errors, CombinedError(errors)):
        got = pickle.loads(pickle.dumps(error.on_side("B")))
        assert [one.on_side("") for one in got.diagnostics] == [*error.diagnostics]
        assert {one.side for one in got.diagnostics} == {"B"}
        assert str(got).startswith("B")


def test_every_error_of_the_tree_has_an_example():
    tree = {
        value
        for value in vars(problems).values()
        if isinstance(value, type)
        and issubclass(value, problems.CkptToolError)
        and value.__name__[0] != "_"
    }
    assert {type(error) for error, *_ in EXAMPLES} | {CombinedError} == tree


@pytest.mark.parametrize(
    ("parts", "code"),
    [
        ([PLAN, STRATEGY, FORMAT], 3),
        ([PLAN, STRATEGY], 4),
        ([VerifyError("a", ["x"]), PLAN], 5),
        ([CombinedError([PLAN, FORMAT]), STRATEGY], 3),
    ],
)
def test_combined_error_takes_the_code_of_the_most_basic_kind_and_survives_pickling(parts, code):
    error = CombinedError(parts)
    again = pickle.loads(pickle.dumps(error))
    assert error.exit_code == again.exit_code == code
    assert [type(part) for part in again.errors] == [type(part) for part in parts]
    assert texts_of(again) == texts_of(error)
    assert str(again) == "\n".join(str(part) for part in parts)


def test_combined_error_lists_every_problem_of_every_part():
    assert texts_of(CombinedError([FORMAT, PLAN])) == (*texts_of(FORMAT), "w: lost", "b: gone")


def test_the_problem_of_a_file_has_its_place_facts_and_hint_on_three_lines():
    error = FormatError("a.ckpt", 118, "cut short", "copy it", "32 bytes expected, 24 left")
    assert str(error) == "a.ckpt: byte 118: cut short; 32 bytes expected, 24 left; copy it"
    (one,) = error.diagnostics
    assert (one.path, one.offset, one.ranks) == ("a.ckpt", 118, ())
    assert one.lines == (
        "a.ckpt: cut short",
        "byte 118: 32 bytes expected, 24 left",
        "Try: copy it",
    )


def test_the_same_problem_of_several_ranks_is_one_with_the_first_file_and_all_ranks():
    def error(rank: int, reason: str = "cut short") -> FormatError:
        found = FormatError(f"rank_{rank}/a.ckpt", 10 * rank, reason, "copy it", f"{rank} left")
        found.rank = rank
        return pickle.loads(pickle.dumps(found))

    nested = CombinedError([error(1), CombinedError([error(2), error(3, "encrypted")]), error(4)])
    found = nested.diagnostics
    assert [one.ranks for one in found] == [(1,), (2,), (3,), (4,)]
    assert [one.offset for one in found] == [10, 20, 30, 40]
    cut, encrypted = join_alike(found)
    assert cut.lines == (
        "rank_1/a.ckpt and 2 more: cut short",
        (
            "ranks 1, 2, 4; rank_1/a.ckpt: byte 10: 1 left; rank_2/a.ckpt: byte 20: 2 left; "
            "rank_4/a.ckpt: byte 40: 4 left"
        ),
        "Try: copy it",
    )
    assert encrypted.fact == "rank_3/a.ckpt: encrypted"


@pytest.mark.usefixtures("pickled_by")
def test_a_copy_with_a_hint_or_a_side_keeps_all_else():
    error = LibraryError("a.ckpt", 118, "encrypted", "", "AES-GCM")
    error.rank = 3
    add_note(error, "of an earlier run")
    for copied in (error.with_hint("install it"), error.on_side("B")):
        assert type(copied) is LibraryError
        (one,) = pickle.loads(pickle.dumps(copied)).diagnostics
        assert (one.path, one.offset, one.ranks) == ("a.ckpt", 118, (3,))
        assert one.facts == "byte 118: AES-GCM"
        assert notes_of(copied) == ("of an earlier run",)
    for send in WAYS:
        assert send(error.with_hint("install it")).diagnostics[0].hint == "install it"
    assert str(error.on_side("B")) == "B (a.ckpt): byte 118: encrypted; AES-GCM"


@pytest.mark.parametrize(
    ("offset", "facts", "shown"),
    [(0, "4 left", "byte 0: 4 left"), (None, "4 left", "4 left"), (0, "", ""), (9, "", "byte 9")],
)
def test_the_facts_of_a_file_begin_with_the_byte(offset, facts, shown):
    (one,) = FormatError("a.ckpt", offset, "cut short", "", facts).diagnostics
    assert (one.facts, one.offset) == (shown, offset)


def test_raise_all_is_silent_without_errors_and_raises_a_single_one_as_it_is():
    raise_all(iter([]))
    with pytest.raises(PlanError) as caught:
        raise_all(error for error in [PLAN])
    assert caught.value is PLAN
    with pytest.raises(CombinedError) as caught:
        raise_all([PLAN, FORMAT])
    assert caught.value.errors == (PLAN, FORMAT)


def test_of_many_outputs_that_were_complete_some_are_named():
    error = ExecutionError("e", "it broke", list("abcd"))
    assert (
        "not written: it broke; complete: a, b, c and 1 more; the same command with --resume"
        in str(error)
    )
    assert error.committed == ("a", "b", "c", "d")
