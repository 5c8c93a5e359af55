"""Every situation in which a checkpoint or a strategy is not as it should be, and what is said.

``situations.txt`` names, for each that a tool for MindSpore's checkpoints must detect, the tests
that hold it: of this module, or of others, where it was tested before.  "silent" are those that
MindSpore 2.10 takes without a word, with a wrong or unchecked result; "accepted" those that it
refuses and that are no trouble here.
"""

from __future__ import annotations

import importlib
import shutil
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.checkpoints import noise, write_file, write_ranks
from tests.support.commands import files_below, mentions, message, run, run_well
from tests.support.corpus import SAMPLES, assert_merged
from tests.support.file_bytes import layout, operator, record, strategy
from tests.support.readers import Entry, read

LINES = Path(__file__).with_name("situations.txt").read_text(encoding="utf-8").splitlines()
SITUATIONS = [line for line in LINES if line[0] != " "]
TESTS = [line.strip() for line in LINES if line[0] == " "]


def exists(name: str) -> bool:
    """Whether there is a test of this name, and if it is for one parameter set, that as well."""
    place, _, wanted = name.partition("[")
    module, _, function = place.rpartition("::")
    test = getattr(importlib.import_module(f"tests.{module}"), function)
    marks = [mark for mark in getattr(test, "pytestmark", []) if mark.name == "parametrize"]
    identifiers = [""]
    for mark in marks:  # the one next to the function comes first
        values, given = list(mark.args[1]), mark.kwargs.get("ids")
        if given is not None:
            own = list(map(given, values)) if callable(given) else list(given)
        else:
            own = [str(getattr(value, "id", None) or value) for value in values]
        identifiers = [f"{a}-{b}" if a else b for b in own for a in identifiers]
    return not wanted or wanted.removesuffix("]") in identifiers


@pytest.mark.parametrize("name", TESTS)
def test_every_situation_has_a_test(name):
    assert exists(name)


def test_a_test_or_a_situation_that_is_not_there_would_be_noticed():
    broken = "e2e.test_broken_inputs::test_a_broken_input_is_answered_as_was_agreed"
    assert not exists(f"{broken}[no_such_variant]")
    with pytest.raises(AttributeError):
        exists("e2e.test_broken_inputs::test_no_such_thing")
    assert not [one for one, more in pairwise(LINES) if one in SITUATIONS and more in SITUATIONS]
    assert LINES[-1] not in SITUATIONS


# ------------------------------------------------------------------------ a job that would succeed

FULL = {"w": noise("w", "Float32", (8, 4)), "v": noise("v", "Float32", (8, 4))}
FULL["rate"] = noise("rate", "Float32", (1,))
W, V = layout("w", (2, 2), (1, -1)), layout("v", (2, 2), (-1, -1))


def held(rank: int) -> dict[str, Entry]:
    """What one of the four ranks holds: half of the rows of w, and all of the others."""
    return {**FULL, "w": FULL["w"].excerpt(slice(rank // 2 * 4, rank // 2 * 4 + 4))}


class Job:
    """Four ranks that make up `FULL`, and their strategy; to be spoiled by the tests."""

    def __init__(self, folder):
        self.folder = folder
        self.run = folder / "run"
        self.strategy = folder / "s.ckpt"
        self.write("ckpt")
        self.say(W, V)

    def write(self, format):
        write_ranks(self.run, {rank: held(rank) for rank in range(4)}, format)

    def say(self, *items, name="s.ckpt"):
        path = self.folder / name
        path.write_bytes(strategy(operator(0), *items))
        return path

    def file(self, rank, suffix=".ckpt"):
        return self.run / f"rank_{rank}" / f"net{suffix}"

    def merge(self, *words):
        words = [*words] if "-s" in words else ["-s", self.strategy, *words]
        return run("merge", self.run, *words, "-o", self.folder / "out" / "full.h5")

    def refuses(self, result, exit_code, *facts):
        assert result.exit_code == exit_code, message(result)
        assert not mentions(message(result), *facts), message(result)
        assert not files_below(self.folder / "out")


@pytest.fixture
def job(tmp_path):
    return Job(tmp_path)


def test_the_job_succeeds_while_nothing_is_spoiled(job):
    assert job.merge().exit_code == 0
    assert read(job.folder / "out" / "full.h5") == FULL


# ------------------------------------------------------------------------ files


def test_rank_folders_may_be_spelled_in_two_ways(job):
    (job.run / "rank_1").rename(job.run / "rank1")
    assert job.merge().exit_code == 0
    assert read(job.folder / "out" / "full.h5") == FULL


def test_a_step_that_is_not_there_is_refused(job):
    job.refuses(
        job.merge("--step", "9_9"),
        5,
        "no file of step 9_9 found net.ckpt; these names have no step Try: omit --step",
    )


def test_a_rank_with_an_unfinished_file_only_is_refused(job):
    for rank in (2, 3):  # both that have these rows
        job.file(rank).rename(job.file(rank, ".tmp"))
    left = r"files of a save that did not finish: rank_2/net.tmp, rank_3/net.tmp"
    absent = rf"w: some slices .* ranks 2, 3: no checkpoint file found in .*run; {left}"
    job.refuses(job.merge(), 5, absent)


def test_a_rank_with_an_unfinished_file_only_is_replaced_by_its_replica(job):
    job.file(2).rename(job.file(2, ".tmp"))
    fact = r"rank 2: no checkpoint file found in .*run \(--strict\) all slices.*without --strict"
    job.refuses(job.merge("--strict"), 5, fact)
    result = job.merge()
    assert result.exit_code == 0
    assert read(job.folder / "out" / "full.h5") == FULL
    assert not mentions(message(result), "warning.*: rank 2: .* are read from replicas: ranks 0, 3")


DAMAGE = {
    "safetensors-cut-short": (
        "safetensors",
        lambda data: data[:-5],
        r"rank_0/net\.safetensors and 1 more: the file is shorter than its header says ranks 0, 1;",
    ),
    "safetensors-empty": (
        "safetensors",
        lambda data: b"",
        r"rank_0/net\.safetensors and 1 more: empty \(0 bytes\) ranks 0, 1",
    ),
    "negative-dim": (
        "ckpt",
        lambda data: record(dims=(-2,)),
        r"rank_0/net\.ckpt and 1 more: w: a size in dims \[-2\] is negative ranks 0, 1",
    ),
}


@pytest.mark.parametrize("damage", list(DAMAGE))
def test_a_damaged_file_is_refused(job, damage):
    format, spoil, fact = DAMAGE[damage]
    shutil.rmtree(job.run)
    job.write(format)
    for rank in (0, 1):  # both that have these rows
        path = job.file(rank, f".{format}")
        path.write_bytes(spoil(path.read_bytes()))
    job.refuses(job.merge(), 3, fact)


def test_an_empty_file_does_no_harm_where_replicas_are_left(job):
    job.file(1).write_bytes(b"")
    job.file(2).write_bytes(b"")
    assert job.merge().exit_code == 0
    assert read(job.folder / "out" / "full.h5") == FULL


def test_ranks_of_two_formats_are_refused(job):
    for rank in (1, 3):
        job.file(rank).unlink()
        write_file(job.file(rank, ".safetensors"), held(rank), "safetensors")
    said = r"net\.safetensors is not on ranks 0, 2, net\.ckpt is not on ranks 1, 3"
    job.refuses(job.merge(), 5, said)


# ------------------------------------------------------------------------ slices


def test_a_scalar_that_differs_is_a_question(job):
    write_file(job.file(3), {**held(3), "rate": noise("other", "Float32", (1,))}, "ckpt")
    facts = [
        r"rate: not in the strategy, and different .*rank 3 differs from ranks 0-2",
        "--unlisted",
    ]
    job.refuses(job.merge(), 5, *facts)


def test_rows_that_are_not_those_of_the_manual_split_are_refused(job):
    shutil.rmtree(job.run)
    slices = [noise("t0", "Float32", (5, 2)), noise("t1", "Float32", (4, 2))]
    write_ranks(job.run, {rank: {"t": one} for rank, one in enumerate(slices)}, "ckpt")
    job.say(layout("t", (2,), (0, -1), split=(6, 4)))
    job.refuses(job.merge(), 5, r"t: .*\[6, 4\] rows; rank 0 .* has \(5, 2\), expected \(6, 2\)")


def test_slices_without_the_optimizer_shard_of_the_strategy_are_refused(job):
    job.say(layout("w", (2, 2), (1, -1), size=2), V)
    fact = r"w: sharded further in the strategy than in .* \(4, 4\) would become \(16, 4\)"
    job.refuses(job.merge(), 5, r"/s\.ckpt: " + fact, "Try: the strategy of the run that saved")
    assert job.merge("--trust-strategy").exit_code == 0
    assert read(job.folder / "out" / "full.h5")["w"].shape == (16, 4)


def test_equal_elements_are_no_reason_to_doubt_an_optimizer_shard(job):
    zeros = Entry("Float32", (4, 4), bytes(64))
    write_ranks(job.run, {rank: {**held(rank), "w": zeros} for rank in range(4)}, "ckpt")
    job.say(layout("w", (2, 2), (1, -1), size=2), V)
    assert job.merge().exit_code == 0
    assert read(job.folder / "out" / "full.h5")["w"].shape == (16, 4)


# ------------------------------------------------------------------------ strategies


def test_a_strategy_that_is_not_there_is_a_usage_error(job):
    job.refuses(job.merge("-s", job.folder / "none.ckpt"), 2, r"none\.ckpt' does not exist")
    job.refuses(job.merge("-s", job.folder / "none" / "s.ckpt"), 2, "does not exist")


IMPOSSIBLE = {
    "no-layouts": ([], "no parameter layouts in it"),
    "two-numbers-of-ranks": (
        [W, layout("v", (2,), (-1, -1))],
        "different numbers of ranks 2 ranks: v; 4 ranks: w",
    ),
    "axis-outside-the-matrix": (
        [layout("w", (2, 2), (2, -1)), V],
        r"w: tensor map .* names device axis 2; the device matrix \[2, 2\] has axes 0 to 1",
    ),
    "axis-used-twice": ([layout("w", (2, 2), (0, 0)), V], "w: tensor map .* device axis 0 twice"),
    "shard-that-does-not-divide": (
        [layout("w", (2, 2), (1, -1), size=3), V],
        "w: optimizer shard of 3 does not divide the replica group of 2",
    ),
    "shard-larger-than-the-group": (
        [layout("w", (2, 2), (1, -1), size=8), V],
        "w: optimizer shard of 8 does not divide the replica group of 2",
    ),
}


@pytest.mark.parametrize("what", list(IMPOSSIBLE))
def test_a_strategy_that_cannot_be_is_refused(job, what):
    items, fact = IMPOSSIBLE[what]
    job.say(*items)
    job.refuses(job.merge(), 4, rf"s\.ckpt: .*{fact}")


@pytest.mark.parametrize("side", ["source", "target"])
def test_a_tensor_map_for_other_axes_is_refused(job, side):
    wrong = job.say(layout("w", (2, 2), (1,)), V, name="wrong.ckpt")
    if side == "source":
        result = job.merge("-s", wrong)
        fact = r"w: .* ranks 0-3 hold slices of \(4, 4\); tensor map \[\[1\]\] is for 1 axis, .*"
    else:
        words = ["-s", job.strategy, "-d", wrong, "-o", job.folder / "out"]
        result = run("reshard", job.run, *words)
        fact = r"wrong\.ckpt: w: .* tensor map \[\[1\]\] is for 1 axis, not shape \(8, 4\)"
    job.refuses(result, 5, fact)


def test_an_optimizer_shard_that_does_not_divide_the_slice_is_refused(job):
    target = job.say(layout("w", (16,), (-1, -1), size=16), layout("v", (16,), (-1, -1)), name="d")
    words = ["-s", job.strategy, "-d", target, "-o", job.folder / "out"]
    fact = r"w: .* axis 0 of \(8, 4\) is divisible by 8, not by 16"
    job.refuses(run("reshard", job.run, *words), 5, fact)


def strategy_folder(folder, *names):
    """A folder with some of the strategy files of a run of two stages of four ranks."""
    folder.mkdir()
    for name in names:
        shutil.copy(SAMPLES / "pp2" / "strategy" / name, folder)
    return folder


def test_a_folder_may_hold_both_forms_of_a_strategy(tmp_path):
    """MindSpore refuses to merge one."""
    folder = strategy_folder(tmp_path / "strategy", "strategy_0.ckpt", "strategy_4.json")
    out = tmp_path / "full.ckpt"
    run_well("merge", SAMPLES / "pp2" / "ckpt", "-s", folder, "-o", out)
    words = ["-s", SAMPLES / "pp2" / "strategy" / "merged.ckpt", "-o", tmp_path / "other.ckpt"]
    run_well("merge", SAMPLES / "pp2" / "ckpt", *words)
    assert out.read_bytes() == (tmp_path / "other.ckpt").read_bytes()


@pytest.mark.parametrize(
    ("present", "exit_code", "fact"),
    [
        (
            "strategy_4.ckpt",
            4,
            "layouts of stage 1 but not of stage 0 Try: the strategy files of all",
        ),
        (
            "strategy_0.ckpt",
            5,
            "ranks 4-7 are not in the strategy .* for ranks 0-3 Try: .* all 8 ranks, .* all stages",
        ),
    ],
    ids=["first", "last"],
)
def test_a_strategy_folder_that_lacks_a_stage_is_refused(tmp_path, present, exit_code, fact):
    folder = strategy_folder(tmp_path / "strategy", present)
    out = tmp_path / "out" / "full.h5"
    result = run("merge", SAMPLES / "pp2" / "ckpt", "-s", folder, "-o", out)
    assert result.exit_code == exit_code
    assert not mentions(message(result), fact), message(result)
    assert not files_below(tmp_path / "out")


def test_a_folder_with_strategies_of_two_runs_is_refused(tmp_path):
    folder = strategy_folder(tmp_path / "strategy", "strategy_0.ckpt", "strategy_4.ckpt")
    other = SAMPLES / "pp2_opt" / "strategy"
    shutil.copy(other / "merged.ckpt", folder / "merged_ckpt_strategy.ckpt")
    words = ["merge", SAMPLES / "pp2" / "ckpt", "-s", folder, "-o", tmp_path / "full.h5"]
    stale = r"merged_ckpt_strategy\.ckpt: ignored, .*: stage 0 has other layouts in .*strategy_0"
    assert not mentions(message(run_well(*words)), stale, "4 parameters: ")
    assert_merged(tmp_path / "full.h5", "pp2")
    shutil.copy(other / "strategy_1.ckpt", folder)
    result = run(*words, "--overwrite")
    assert result.exit_code == 4
    fact = r"strategy_1\.ckpt: stage 0 has other layouts in .*strategy_0\.ckpt"
    assert not mentions(
        message(result), fact, "4 parameters: .* Try: -s .*strategy_0.*, with all files of that run"
    )
