"""Errors: what they say, their exit codes, and that they survive crossing a process border."""

import copy
import pickle

import pytest

from ckpttool import errors
from ckpttool.errors import (
    AuthenticityError,
    CkptToolError,
    CombinedError,
    EngineError,
    ExecutionError,
    FormatError,
    PlanError,
    StepError,
    StrategyError,
    UnfinishedError,
    UnreadableError,
    UnsupportedError,
    VerifyError,
    raise_all,
)

FORMAT = FormatError("rank_3/a.ckpt", 118, "dims [4, 2] need 32 bytes, tensor_content has 24")
STRATEGY = StrategyError("s.ckpt", "no parameter layouts in it")
PLAN = PlanError(["w: lost", "b: lost"])

# Every error with its attributes, message and exit code.
EXAMPLES = [
    (CkptToolError("plain"), {}, "plain", 1),
    (
        FORMAT,
        {"path": "rank_3/a.ckpt", "offset": 118, "reason": FORMAT.reason},
        "rank_3/a.ckpt: byte 118: dims [4, 2] need 32 bytes, tensor_content has 24",
        3,
    ),
    (
        FormatError("a.h5", None, "no HDF5"),
        {"path": "a.h5", "offset": None, "reason": "no HDF5"},
        "a.h5: no HDF5",
        3,
    ),
    (
        AuthenticityError("a.ckpt", 0, "the wrong key"),
        {"path": "a.ckpt", "offset": 0, "reason": "the wrong key"},
        "a.ckpt: byte 0: the wrong key",
        3,
    ),
    (
        UnsupportedError("a.ckpt", 0, "encrypted"),
        {"path": "a.ckpt", "offset": 0, "reason": "encrypted"},
        "a.ckpt: byte 0: encrypted",
        3,
    ),
    (
        STRATEGY,
        {"where": "s.ckpt", "reason": "no parameter layouts in it"},
        "s.ckpt: no parameter layouts in it",
        4,
    ),
    (
        UnreadableError("rank_3/a.ckpt", None, "Permission denied"),
        {"path": "rank_3/a.ckpt", "offset": None, "reason": "Permission denied"},
        "rank_3/a.ckpt: Permission denied",
        1,
    ),
    (PLAN, {"problems": ("w: lost", "b: lost")}, "w: lost\nb: lost", 5),
    (
        EngineError("dask:node7:8786", "no worker is left"),
        {"engine": "dask:node7:8786", "reason": "no worker is left"},
        "engine dask:node7:8786: no worker is left",
        1,
    ),
    (
        StepError(["run: a-9_1 is not in rank 1"]),
        {"problems": ("run: a-9_1 is not in rank 1",)},
        "run: a-9_1 is not in rank 1",
        5,
    ),
    (
        UnfinishedError(["out: a run has not ended here"]),
        {"problems": ("out: a run has not ended here",)},
        "out: a run has not ended here",
        5,
    ),
    (
        ExecutionError("out/rank_1/a.h5", "the disk is full", ["out/rank_0/a.h5"]),
        {
            "output": "out/rank_1/a.h5",
            "cause": "the disk is full",
            "committed": ("out/rank_0/a.h5",),
        },
        (
            "out/rank_1/a.h5: not written: the disk is full; complete before that: "
            "out/rank_0/a.h5; the same command with --resume goes on from there"
        ),
        6,
    ),
    (
        ExecutionError("a.h5", "no space"),
        {"output": "a.h5", "cause": "no space", "committed": ()},
        "a.h5: not written: no space",
        6,
    ),
    (
        VerifyError("a.h5", ["w differs", "b is missing"]),
        {"path": "a.h5", "problems": ("a.h5: w differs", "a.h5: b is missing")},
        "a.h5: w differs\na.h5: b is missing",
        7,
    ),
]
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
    assert "\n".join(got.problems) == message


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
    assert again.problems == error.problems
    assert str(again) == "\n".join(str(part) for part in parts)


def test_combined_error_lists_every_problem_of_every_part():
    assert CombinedError([FORMAT, PLAN]).problems == (str(FORMAT), "w: lost", "b: lost")


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
    assert "complete before that: a, b, c and 1 more; the same" in str(error)
    assert error.committed == ("a", "b", "c", "d")
