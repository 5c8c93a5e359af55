"""Which step is read where ranks have files of several steps."""

import pytest

from ckpttool.model.layout import Layout
from ckpttool.model.strategy import Strategy
from tests.support.scans import fails, found, notes_of


def steps(make_run, *labels, ranks=2, suffix=".ckpt"):
    return make_run(*(f"rank_{r}/CKP-{step}{suffix}" for r in range(ranks) for step in labels))


@pytest.mark.parametrize("step", ["9" * 5000, f"1_{'9' * 5000}"])
def test_a_step_of_more_digits_than_python_reads_is_not_there(make_run, step):
    src = steps(make_run, "9_5", "10_2")
    fails(src, f"no file of step {step}\n  found 9_5, 10_2", step=step)


def test_a_chosen_step_that_a_rank_lacks_is_read_if_others_may_hold_its_slices(make_run):
    src = steps(make_run, "9_5")
    make_run("rank_0/CKP-10_2.ckpt")
    message = "step 10_2 is not on rank 1\n  Try: --step 9_5"
    replicated = Strategy({"w": (Layout((2,), ((),)),)}, 1, 2)
    sharded = Strategy({"w": (Layout((2,), ((0,),)),)}, 1, 2)
    fails(src, message, step="10_2")
    fails(src, message, strategy=sharded, step="10_2")
    assert found(src, strategy=replicated, step="10_2") == {0: "rank_0/CKP-10_2.ckpt"}
    (note,) = notes_of(src, "older_step", strategy=replicated)
    assert note.splitlines()[1:] == [
        "  step 10_2 is not on rank 1, and other ranks hold all slices",
        "  Try: --step 10_2, to read it from replicas",
    ]
    (note,) = notes_of(src, "older_step", strategy=sharded)
    assert "other ranks" not in note
