"""Errors: what they say, their exit codes, and that they survive crossing a process border."""

import copy
import pickle

import pytest

from ckpttool import errors
from ckpttool.errors import (
    CombinedError,
    ExecutionError,
    FormatError,
    LibraryError,
    PlanError,
    VerifyError,
    add_note,
    notes_of,
    raise_all,
    with_side,
)
from ckpttool.model.diagnostics import diagnose, join_alike
from tests.support.errors import EXAMPLES, FORMAT, PLAN, STRATEGY, texts_of

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
    assert texts_of(got) == texts_of(error)
    if not isinstance(error, FormatError | ExecutionError):  # theirs have facts and a hint
        assert "\n".join(texts_of(got)) == message


def test_every_error_of_the_tree_has_an_example():
    tree = {
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, Exception)
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
    (one,) = diagnose(error)
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
    found = diagnose(nested)
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


def test_a_copy_with_a_hint_or_a_side_keeps_all_else():
    error = LibraryError("a.ckpt", 118, "encrypted", "", "AES-GCM")
    error.rank = 3
    add_note(error, "of an earlier run")
    for copied in (error.with_hint("install it"), with_side(error, "B")):
        assert type(copied) is LibraryError
        (one,) = diagnose(pickle.loads(pickle.dumps(copied)))
        assert (one.path, one.offset, one.ranks) == ("a.ckpt", 118, (3,))
        assert one.facts == "byte 118: AES-GCM"
        assert notes_of(copied) == ("of an earlier run",)
    for send in WAYS:
        assert diagnose(send(error.with_hint("install it")))[0].hint == "install it"
    assert str(with_side(error, "B")) == "B (a.ckpt): byte 118: encrypted; AES-GCM"


@pytest.mark.parametrize(
    ("offset", "facts", "shown"),
    [(0, "4 left", "byte 0: 4 left"), (None, "4 left", "4 left"), (0, "", ""), (9, "", "byte 9")],
)
def test_the_facts_of_a_file_begin_with_the_byte(offset, facts, shown):
    (one,) = diagnose(FormatError("a.ckpt", offset, "cut short", "", facts))
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
