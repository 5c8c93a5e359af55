"""Array jobs as schedulers run them: parts in any order, at once, and mixed up.

What is said of parts one after the other is in ``sets.txt``.
"""

from __future__ import annotations

import errno
import os
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import permutations
from pathlib import Path
from threading import Barrier

import pytest

import ckpttool
from tests.support.commands import files_below, message, run, run_well
from tests.support.plans import plan_split
from tests.support.small_sets import SmallSet, while_filling

pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture
def job(tmp_path):
    return SmallSet(tmp_path)


def run_parts(job, *parts, more=()):
    for part in parts:
        job.run_well("--part", part, *more)


def finalize(job):
    return message(run_well("finalize", job.out))


def refused(result, *words):
    printed = message(result)
    assert result.exit_code == 5, printed
    assert [word for word in words if word not in printed] == [], printed
    return printed


def is_whole(job):
    assert job.read() == job.wanted()
    left = files_below(job.out, manifests=True)
    names = [*(str(path.relative_to(job.out)) for path in job.outputs), job.manifest.name]
    assert left == sorted(names)
    assert sorted(path.name for path in job.record.iterdir()) == ["lock", "stamps.json"]
    run_well("verify", job.out, "-s", job.strategy, "--deep")


@pytest.mark.parametrize("order", list(permutations(["1/3", "2/3", "3/3"])))
def test_parts_end_in_any_order(job, order):
    for number, part in enumerate(order):
        run_parts(job, part)
        if number < 2:
            refused(run("finalize", job.out), " of 4 outputs missing ", "then ckpttool finalize ")
            assert not job.manifest.exists()
    finalize(job)
    is_whole(job)
    whole = SmallSet(job.folder)
    whole.out = job.folder / "whole"
    whole.run_well()
    assert job.manifest.read_bytes() == whole.manifest.read_bytes()


def test_many_parts_begin_at_once(job, monkeypatch):
    strategy = ckpttool.read_strategy([str(job.strategy)])
    source, start = ckpttool.scan(str(job.source)), Barrier(16)

    def sync(fd):
        if "plan.json" in str(Path(f"/proc/self/fd/{fd}").readlink()):
            time.sleep(0.5)

    def run_part(number):
        options = ckpttool.OutputOptions("ckpt", part=(number, 16))
        start.wait(60)
        ckpttool.execute(*plan_split(source, strategy, str(job.out), output_options=options))

    monkeypatch.setattr(os, "fsync", sync)
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(run_part, range(1, 17)))
    finalize(job)
    is_whole(job)


@pytest.mark.parametrize("options", [["-a"], ["-an"], ["-r"]])
def test_parts_of_two_checkpoints_that_are_copied_together_are_not_one_set(job, options):
    other = SmallSet(job.folder, "b")
    other.out = job.folder / "elsewhere"
    run_parts(job, "1/2")
    run_parts(other, "2/2")
    subprocess.run(["cp", *options, f"{other.out}/.", job.out], check=False)
    refused(run("finalize", job.out), "2 of 4 outputs missing ", "then ckpttool finalize ")
    assert not job.manifest.exists()
    printed = message(job.run("--resume"))
    assert "4 kept" not in printed
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


@pytest.mark.parametrize("parts", [1, 2])
def test_parts_of_single_files_in_one_folder_do_not_mix(tmp_path, parts):
    first, two = (
        SmallSet(tmp_path, name, "file", form) for name, form in (("a", "ckpt"), ("b", "hdf5"))
    )
    names = [f"{number}/{parts}" for number in range(1, parts + 1)]
    for part in names:
        first.run_well("--part", part)
    with while_filling(two.target, lambda: run("finalize", first.target)) as seen:
        for part in names:
            two.run_well("--part", part)
    assert seen[0].exit_code == 0, message(seen[0])
    assert first.manifest.exists()
    assert not two.manifest.exists()
    run_well("finalize", two.target)
    assert (first.read(), two.read()) == (first.wanted(), two.wanted())
