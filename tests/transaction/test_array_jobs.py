"""Array jobs as schedulers run them: parts in any order, twice, killed, requeued and mixed up."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import permutations
from pathlib import Path
from threading import Barrier

import pytest

import ckpttool
from tests.support.commands import files_below, message, run, run_well
from tests.support.small_sets import SmallSet, filled_outputs, while_filling

OVERWRITE = ("--overwrite",)
RESUME = ("--resume",)
OTHER_PARTS = "Try: the same source, step and options for all parts, or --overwrite; "
OTHER_PARTS += "`ckpttool help parts` explains"

pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture
def job(tmp_path):
    """Return an array job that has not begun."""
    return SmallSet(tmp_path)


def run_parts(job, *parts, more=()):
    for part in parts:
        job.run_well("--part", part, *more)


def finalize(job):
    """Finalize; return what was said, on one line."""
    return message(run_well("finalize", job.out))


def refused(result, *words):
    """Check that a command was refused before it wrote anything, with these words."""
    text = message(result)
    assert result.exit_code == 5, text
    assert [word for word in words if word not in text] == [], text
    return text


def is_whole(job):
    """Check that all outputs are what one whole run writes, and nothing else is left there."""
    assert job.read() == job.wanted()
    left = files_below(job.out, manifests=True)
    names = [*(str(path.relative_to(job.out)) for path in job.outputs), job.manifest.name]
    assert left == sorted(names)
    assert sorted(path.name for path in job.record.iterdir()) == ["lock", "stamps.json"]
    run_well("verify", job.out, "-s", job.strategy, "--deep")


def record_of(job):
    """Return the files of the record, without the lock."""
    return {path.name: path.read_bytes() for path in job.record.iterdir() if path.name != "lock"}


@pytest.mark.parametrize("order", list(permutations(["1/3", "2/3", "3/3"])))
def test_parts_end_in_any_order(job, order):
    """Else a set depends on which node was free first."""
    for number, part in enumerate(order):
        run_parts(job, part)
        missing = [f"--part {other}" for other in order[number + 1 :]]
        if missing:
            refused(run("finalize", job.out), *missing)
            assert not job.manifest.exists()
    finalize(job)
    is_whole(job)
    whole = SmallSet(job.folder)
    whole.out = job.folder / "whole"
    whole.run_well()
    assert job.manifest.read_bytes() == whole.manifest.read_bytes()


def test_parts_of_one_plan_run_side_by_side(job):
    """Else an array job takes as long as one node."""
    with while_filling(job.outputs[2], lambda: job.run("--part", "2/2")) as seen:
        run_parts(job, "1/2")
    assert seen[0].exit_code == 0, message(seen[0])
    finalize(job)
    is_whole(job)


def test_many_parts_begin_at_once(job, monkeypatch):
    """Else of an array job that a scheduler starts as one, some parts fail by chance.

    It takes a while to sync the plan, as on a network disk: the others wait for that.
    """
    strategy = ckpttool.read_strategy([str(job.strategy)])
    source, start = ckpttool.scan(str(job.source)), Barrier(16)

    def sync(fd):
        if "plan.json" in str(Path(f"/proc/self/fd/{fd}").readlink()):
            time.sleep(0.5)

    def run_part(number):
        options = ckpttool.OutputOptions("ckpt", part=(number, 16))
        start.wait(60)
        ckpttool.execute(
            *ckpttool.plan_split(source, strategy, str(job.out), output_options=options)
        )

    monkeypatch.setattr(os, "fsync", sync)
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(run_part, range(1, 17)))
    finalize(job)
    is_whole(job)


@pytest.mark.parametrize("options", [["-a"], ["-an"], ["-r"]])
def test_parts_of_two_checkpoints_that_are_copied_together_are_not_one_set(job, options):
    """Else a mixture is called whole, of two steps that were written in two places, say."""
    other = SmallSet(job.folder, "b")
    other.out = job.folder / "elsewhere"
    run_parts(job, "1/2")
    run_parts(other, "2/2")
    subprocess.run(["cp", *options, f"{other.out}/.", job.out], check=False)
    refused(
        run("finalize", job.out),
        " of 2 missing Try: the same command with --part ",
        "then ckpttool finalize ",
    )
    assert not job.manifest.exists()
    text = message(job.run("--resume"))
    assert "4 kept" not in text
    job.run_well("--resume", "--overwrite")
    is_whole(job)


def test_a_part_on_a_full_disk_says_so(job, monkeypatch):
    write = os.write

    def fail(fd, data):
        if ".log" in str(Path(f"/proc/self/fd/{fd}").readlink()):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, data)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", fail)
        result = job.run("--part", "1/2")
    assert result.exit_code == 6
    assert "No space left on device" in message(result)
    assert not job.record.exists()


@pytest.mark.parametrize("command", ["numbered", "split"])
def test_a_part_of_a_finished_set_with_documents_is_kept(tmp_path, command):
    """Else a part that is requeued is told to take the set apart."""
    job = SmallSet(tmp_path, command=command)
    more = () if command == "numbered" else ("--write-strategy", job.out / "written.ckpt")
    for part in ("1/2", "2/2"):
        job.run_well("--part", part, *more)
    finalize(job)
    before = job.manifest.read_bytes()
    assert "2 kept, 0 written" in message(job.run_well("--part", "1/2", "--resume", *more))
    assert job.manifest.read_bytes() == before


def test_finalize_replaces_no_document_of_others(tmp_path):
    job = SmallSet(tmp_path, command="numbered")
    run_parts(job, "1/2", "2/2")
    theirs = job.out / "param_name_map.json"
    theirs.write_text("theirs")
    refused(run("finalize", job.out), f"{theirs}: a file that is not of this set Try: move it away")
    assert theirs.read_text() == "theirs"
    theirs.unlink()
    finalize(job)


@pytest.mark.parametrize("more", [(), RESUME])
@pytest.mark.parametrize("is_moved", [True, False])
def test_a_killed_part_is_requeued_on_another_host(job, monkeypatch, more, is_moved):
    """Else somebody has to look after a node that died at night."""
    run_parts(job, "2/2")
    job.stop("--part", "1/2")
    text = refused(run("finalize", job.out), "--part 1/2")
    assert "--part 2/2" not in text
    assert "part 1 had begun" in text
    if is_moved:
        monkeypatch.setattr(socket, "gethostname", lambda: "another-host")
    with filled_outputs() as filled:
        run_parts(job, "1/2", more=more)
    assert filled == ["checkpoint_0.ckpt", "checkpoint_2.ckpt"][bool(more) :]
    finalize(job)
    is_whole(job)


def test_a_part_that_is_requeued_after_its_end_keeps_what_it_wrote(job):
    """Else a scheduler that repeats a job by mistake makes it fail, or writes all again."""
    run_parts(job, "1/2", "2/2")
    for is_finalized in (False, True):
        finalize(job) if is_finalized else None
        before = record_of(job)
        with filled_outputs() as filled:
            run_parts(job, "1/2", more=RESUME)
        assert filled == []
        refused(job.run("--part", "1/2"), "is already complete", "--resume")
        assert (job.read(), job.manifest.exists()) == (job.wanted(), is_finalized)
        assert record_of(job).keys() == before.keys()
    is_whole(job)


def test_a_part_with_overwrite_says_that_it_takes_a_finished_set_apart(job):
    """Else a job that a scheduler repeats undoes the set, and no command makes it whole again."""
    run_parts(job, "1/2", "2/2")
    finalize(job)
    text = message(job.run_well("--part", "1/2", *OVERWRITE))
    assert (
        "complete, and this part takes the set apart Try: run the other parts again, with --resume"
        in text
    )
    refused(run("finalize", job.out), "--part 2/2")
    with filled_outputs() as filled:
        run_parts(job, "2/2", more=RESUME)
    assert filled == []
    finalize(job)
    is_whole(job)


def test_a_part_that_is_killed_after_others_is_not_finalized(job):
    """Else a set is called whole with an output of the run before."""
    run_parts(job, "1/2", "2/2")
    job.stop("--part", "1/2", "--overwrite")
    refused(run("finalize", job.out), "--part 1/2")
    assert not job.manifest.exists()
    run_parts(job, "1/2", more=RESUME)
    finalize(job)
    is_whole(job)


# ------------------------------------------------------------- another job, in the same folder


def test_a_job_that_may_overwrite_takes_the_folder_over(job):
    """Else nobody gets out of a wrong path; each part of the job has the option."""
    other = SmallSet(job.folder, "other")
    run_parts(job, "1/2", "2/2")
    refused(other.run("--part", "2/2"), OTHER_PARTS)
    text = message(other.run_well("--part", "2/2", *OVERWRITE))
    assert "parts 1/2, 2/2 were written by another run and are replaced" in text
    refused(run("finalize", job.out), "--part 1/2")
    refused(job.run("--part", "1/2"), "--overwrite")
    run_parts(other, "1/2", more=OVERWRITE)
    finalize(other)
    is_whole(other)


def test_a_job_takes_over_from_one_that_stopped_before_any_part_was_done(job):
    """Else a job that failed at once blocks its folder."""
    other = SmallSet(job.folder, "other")
    job.stop("--part", "1/2")
    text = refused(
        other.run("--part", "1/2", "--resume"),
        "another run did not end here",
        "m.ckpt",
    )
    assert "Try: the same command without --resume" in text
    run_parts(other, "2/2", "1/2")
    finalize(other)
    is_whole(other)


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (["--prefix", "x"], "--prefix"),
        (["--format", "safetensors"], "--format"),
        (["--crc"], "--crc"),
        (["--rank", "0-2"], "--rank 0-2"),
    ],
)
def test_a_part_with_another_option_is_refused(job, more, named):
    """Else one node with an old script spoils a set, which nobody notices before it is loaded."""
    run_parts(job, "1/2")
    before = job.read(), record_of(job)
    refused(job.run("--part", "2/2", *more), "was written by another run", named, "--overwrite")
    refused(job.run("--part", "2/2", *more, "--resume"), "was written by another run", named)
    assert (job.read(), record_of(job)) == before
    run_parts(job, "2/2")
    finalize(job)
    is_whole(job)


def test_a_part_with_another_strategy_is_refused(job):
    """Else ranks hold slices of two layouts."""
    run_parts(job, "1/2")
    text = job.strategy.read_text()
    before = job.read(), record_of(job)
    job.strategy.write_text(text + " ")
    refused(job.run("--part", "2/2"), "--overwrite")
    refused(job.run("--part", "2/2", "--resume"), "s.json")
    assert (job.read(), record_of(job)) == before
    job.strategy.write_text(text)
    run_parts(job, "2/2")
    finalize(job)
    is_whole(job)


def test_a_part_after_a_source_was_saved_again_is_refused(job):
    """Else the ranks of one set come from two steps of training."""
    run_parts(job, "1/2")
    saved = job.source.stat()
    job.source.write_bytes(job.source.read_bytes())
    os.utime(job.source, ns=(saved.st_atime_ns, saved.st_mtime_ns))
    refused(job.run("--part", "2/2", "--resume"), "files that differ: m.ckpt")
    refused(job.run("--part", "2/2"), "--overwrite")
    run_parts(job, "1/2", "2/2", more=OVERWRITE)
    finalize(job)
    is_whole(job)


# ------------------------------------------------------------------ another number of parts


def test_the_number_of_parts_may_change_and_what_is_written_is_kept(job):
    """Else a smaller queue the next day means to begin anew."""
    run_parts(job, "1/2")
    with filled_outputs() as filled:
        run_parts(job, "2/3", "3/3", "1/3", more=RESUME)
    assert filled == ["checkpoint_1.ckpt", "checkpoint_3.ckpt"]
    finalize(job)
    is_whole(job)


def test_parts_of_two_numbers_are_not_finalized_before_all_of_one_are_done(job):
    """Else a set is called whole because many parts are there."""
    run_parts(job, "1/2")
    run_parts(job, "2/3", "3/3", more=RESUME)
    refused(run("finalize", job.out), "part 2 of 2 missing Try: the same command with --part 2/2")
    assert not job.manifest.exists()
    run_parts(job, "2/2", more=RESUME)
    finalize(job)
    is_whole(job)


# ------------------------------------------------------------------- a whole run beside parts


@pytest.mark.parametrize("parts", [1, 2])
def test_parts_of_single_files_in_one_folder_do_not_mix(tmp_path, parts):
    """Else two jobs that write two files to one folder refuse or finalize each other."""
    one, two = (
        SmallSet(tmp_path, name, "file", form) for name, form in (("a", "ckpt"), ("b", "hdf5"))
    )
    names = [f"{number}/{parts}" for number in range(1, parts + 1)]
    for part in names:
        one.run_well("--part", part)
    with while_filling(two.target, lambda: run("finalize", one.target)) as seen:
        for part in names:
            two.run_well("--part", part)
    assert seen[0].exit_code == 0, message(seen[0])
    assert one.manifest.exists()
    assert not two.manifest.exists()
    run_well("finalize", two.target)
    assert (one.read(), two.read()) == (one.wanted(), two.wanted())
