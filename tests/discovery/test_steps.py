"""Which step is read where ranks have files of several steps."""

import re

import pytest

from ckpttool.discovery.scan import SourceOptions, scan
from ckpttool.model.layout import Layout
from ckpttool.model.strategy import Strategy
from tests.support.corpus import GOLDEN
from tests.support.scans import fails, found, notes_of


def test_the_steps_of_flat_files_are_told_apart(make_run):
    names = [f"llama_rank_{rank}-{step}_2.ckpt" for rank in range(2) for step in (9, 10)]
    assert found(make_run(*names)) == {rank: f"llama_rank_{rank}-10_2.ckpt" for rank in range(2)}


def steps(make_run, *labels, ranks=2, suffix=".ckpt"):
    return make_run(*(f"rank_{r}/CKP-{step}{suffix}" for r in range(ranks) for step in labels))


def test_steps_are_compared_as_numbers(make_run):
    src = steps(make_run, "9_5", "10_2", "10_10", "2_99")
    assert found(src)[1] == "rank_1/CKP-10_10.ckpt"
    assert scan(src).step == "10_10"
    assert notes_of(src) == ["step 10_10 is read, the newest of 4"]


def test_a_single_step_needs_no_note(make_run):
    src = steps(make_run, "9_5")
    assert (scan(src).step, notes_of(src)) == ("9_5", [])


def test_names_without_a_step_have_none(make_run):
    assert scan(make_run("rank_0/net.ckpt")).step is None


def test_the_newest_step_that_every_rank_has_is_taken_with_a_warning(make_run):
    src = steps(make_run, "9_5", "10_2")
    make_run("rank_0/CKP-11_1.ckpt", "rank_0/CKP-12_1.ckpt")
    assert scan(src).step == "10_2"
    (text,) = notes_of(src)
    assert text.splitlines() == [
        f"{src}: step 10_2 is read, because step 12_1 is incomplete",
        "  step 12_1 is not on rank 1",
        "  Try: copy the missing files, or --step 10_2 if this step is meant",
    ]


def test_a_save_on_a_breakdown_is_newer_than_the_same_step(make_run):
    assert scan(steps(make_run, "10_2", "10_2_breakpoint")).step == "10_2_breakpoint"


@pytest.mark.parametrize("suffix", [".ckpt", ".safetensors"])
@pytest.mark.parametrize(
    ("wanted", "taken"),
    [
        ("9_5", "9_5"),
        ("CKP-9_5", "9_5"),
        ("10_2", "10_2"),
        ("2", "10_2"),  # a number of one step alone will do
        ("9", "9_5"),
        ("10_5_breakpoint", "10_5_breakpoint"),
    ],
)
def test_a_step_is_chosen_in_several_spellings(make_run, wanted, taken, suffix):
    src = steps(make_run, "9_5", "10_2", "10_5", suffix=suffix)
    make_run(*(f"rank_{r}/CKP-10_5_breakpoint{suffix}" for r in range(2)))
    catalog = scan(src, SourceOptions(step=wanted))
    assert catalog.step == taken
    assert scan(src, SourceOptions(step=f"CKP-{taken}{suffix}")).step == taken


def test_a_number_that_several_steps_have_is_an_error(make_run):
    fails(
        steps(make_run, "1_1", "10_1", "1_10"),
        "--step 1 is ambiguous\n  found 1_1, 1_10, 10_1\n  Try: --step 10_1",
        step="1",
    )


def test_steps_of_different_training_runs_are_not_compared(make_run):
    names = ("actor-9_1", "critic-12_1")
    src = make_run(*(f"rank_{rank}/{name}.ckpt" for rank in range(2) for name in names))
    fails(
        src, "several checkpoints in the folders", "critic-12_1.ckpt, actor-9_1.ckpt\n  Try: --step"
    )
    assert scan(src, SourceOptions(step="9_1")).step == "9_1"


def test_a_step_that_each_rank_has_in_files_of_other_names_is_not_called_absent(make_run):
    src = make_run("rank_0/net_0-1_1.ckpt", *(f"rank_1/net_{number}-1_1.ckpt" for number in (1, 2)))
    fails(src, "the files of all ranks are not of one run: net_0-1_1.ckpt, net_2-1_1.ckpt\n")


def test_a_file_of_flat_names_is_chosen_by_any_ranks_name(make_run):
    names = [f"net_rank_{rank}-{step}_2.ckpt" for rank in range(2) for step in (9, 10)]
    src = make_run(*names)
    for wanted in ("9_2", "net_rank_0-9_2.ckpt", "net_rank_1-9_2"):
        assert found(src, step=wanted) == {r: f"net_rank_{r}-9_2.ckpt" for r in range(2)}


@pytest.mark.parametrize("name", ["code-13B7_{}", "net{}_part0", "pangu_2_{}"])
def test_a_second_run_is_chosen_by_step_where_names_have_the_ranks_number(make_run, name):
    """MindSpore adds ``_1`` to a prefix that has the number of the rank without the word."""
    runs = {1: [f"rank_{r}/{name.format(r)}-9_2.ckpt" for r in range(3)]}
    runs[2] = [f"rank_{r}/{name.format(r)}_1-2_2.ckpt" for r in range(3)]
    src = make_run(*runs[1], *runs[2])
    assert found(src, step="9_2") == dict(enumerate(runs[1]))
    for wanted in ("2_2", f"{name.format(1)}_1-2_2.ckpt"):
        assert found(src, step=wanted) == dict(enumerate(runs[2]))


@pytest.mark.parametrize("names", [("best.ckpt", "last.ckpt"), ("a-3_2.h5", "b_7-3_2.h5")])
def test_one_file_in_each_ranks_folder_leaves_nothing_to_choose(make_run, names):
    src = make_run(*(f"rank_{rank}/{name}" for rank, name in enumerate(names)))
    assert set(scan(src).damaged) | set(scan(src).files) == {0, 1}


def test_a_step_that_is_not_there_names_those_that_are(make_run):
    text = "no file of step 3_3\n  found 9_5, 10_2\n  Try: --step 10_2"
    fails(steps(make_run, "9_5", "10_2"), text, step="3_3")


@pytest.mark.parametrize("step", ["9" * 5000, f"1_{'9' * 5000}"])
def test_a_step_of_more_digits_than_python_reads_is_not_there(make_run, step):
    src = steps(make_run, "9_5", "10_2")
    fails(src, f"no file of step {step}\n  found 9_5, 10_2", step=step)


def test_no_step_that_every_rank_has_names_the_ranks(make_run):
    src = make_run("rank_0/CKP-1_1.ckpt", "rank_1/CKP-2_1.ckpt", "rank_2/CKP-2_1.ckpt")
    fails(
        src,
        "no step is on every rank\n  step 2_1 is not on rank 0, step 1_1 is not on ranks 1, 2",
        "help mixed_steps",
    )


def test_a_chosen_step_that_a_rank_lacks_is_read_if_others_may_hold_its_slices(make_run):
    src = steps(make_run, "9_5")
    make_run("rank_0/CKP-10_2.ckpt")
    text = "step 10_2 is not on rank 1\n  Try: --step 9_5"
    replicated = Strategy({"w": (Layout((2,), ((),)),)}, 1, 2)
    sharded = Strategy({"w": (Layout((2,), ((0,),)),)}, 1, 2)
    fails(src, text, step="10_2")
    fails(src, text, strategy=sharded, step="10_2")
    assert found(src, strategy=replicated, step="10_2") == {0: "rank_0/CKP-10_2.ckpt"}
    (note,) = notes_of(src, "older_step", strategy=replicated)
    assert note.splitlines()[1:] == [
        "  step 10_2 is not on rank 1, and other ranks hold all slices",
        "  Try: --step 10_2, to read it from replicas",
    ]
    (note,) = notes_of(src, "older_step", strategy=sharded)
    assert "other ranks" not in note


@pytest.mark.parametrize(
    "names",
    [
        ("CKP-2_1.ckpt", "CKP_1-1_1.ckpt"),
        ("CKP-1_1.ckpt", "net-1_1.ckpt"),
        ("CKP-1_1.ckpt", "best.ckpt"),
        ("a.ckpt", "b.ckpt"),
    ],
)
def test_several_files_of_a_rank_without_an_order_are_an_error(make_run, names):
    src = make_run(*(f"rank_{rank}/{name}" for rank in range(2) for name in names))
    (problem,) = fails(src, "several checkpoints in the folders of ranks 0, 1", *names)
    for advised in re.findall("--step ([^, ]+)", problem):
        (taken,) = {path.split("/")[1] for path in found(src, step=advised).values()}
        assert taken in names


def test_a_chosen_step_is_not_disturbed_by_files_without_one(make_run):
    src = steps(make_run, "9_5", "10_5")
    make_run("rank_0/best.ckpt", "rank_1/best.ckpt")
    assert scan(src, SourceOptions(step="10")).step == "10_5"
    assert found(src, step="best")[1] == "rank_1/best.ckpt"


def test_the_golden_case_of_several_files_is_read():
    folder = GOLDEN / "several_files_per_rank" / "src"
    catalog = scan(str(folder))
    steps = {path.stem for path in folder.rglob("*.ckpt")}
    assert len(steps) > 1
    assert f"checkpoint-{catalog.step}" in steps
