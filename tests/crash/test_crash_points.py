"""A process that ends just before any of its calls that change the disk leaves a known state.

Every run here is carried out again and again in a process of its own.  That ends just before the
first call that changes the disk, then just before the second, and so on, until a run ends by
itself.  A call of ``write`` has two such moments: before it, and after half of its bytes.

After each crash `read_destination` has to return the right state, and the next run has to finish
the set.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import json
import os
import random
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import pytest

import ckpttool
from ckpttool.execution import execute as execute_module
from ckpttool.execution.copy import CopyOptions
from ckpttool.model import manifest as model_manifest
from ckpttool.transaction.states import Record, State, find_unfinished_run, read_destination
from tests.support.checkpoints import noise, write_file
from tests.support.manifests import MANIFEST, PLAN, RECORD, STAMPS
from tests.support.plans import plan_merge

pytestmark = pytest.mark.crash

CALLS = ("fdatasync", "fsync", "ftruncate", "link", "mkdir", "posix_fallocate", "pwrite", "rename")
CALLS += ("pwritev", "replace", "rmdir", "truncate", "unlink")
ENDED, CRASHED, FAILED = 0, 77, 1
MINE, OTHER = "mine", "other"


def crash_at(number):
    """End this process just before a call that changes the disk, the first of which is 1."""
    left = number

    def count():
        nonlocal left
        left -= 1
        if not left:
            os._exit(CRASHED)

    def counting(real, changes=lambda *given: True):
        def call(*given, **named):
            if changes(*given):
                count()
            return real(*given, **named)

        return call

    real_write = os.write

    def write(fd, data):
        count()
        half = real_write(fd, data[: len(data) // 2])
        count()
        return half + real_write(fd, data[half:])

    for name in CALLS:
        setattr(os, name, counting(getattr(os, name)))
    os.write = write
    os.open = counting(os.open, lambda path, flags, *given: flags & os.O_CREAT)
    io.open = counting(io.open, lambda path, mode="r", *given: {*mode} & {*"wxa+"})


def crash_before_second_rename():
    """End this process when its first output is in place, and the second is about to be."""
    real, placed = os.replace, []

    def replace(path, target):
        if str(target).endswith("-of-00003.ckpt"):
            placed.append(target)
        if len(placed) == 2:
            os._exit(CRASHED)
        real(path, target)

    os.replace = replace


def has_crashed(act, prepare):
    """Do something in a process of its own; return whether it has crashed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of fork beside a thread of pytest
        child = os.fork()
    if not child:
        code = FAILED
        try:
            prepare()
            act()
            code = ENDED
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (ENDED, CRASHED)
    return code == CRASHED


class StopError(Exception):
    """Ends a run early."""


class Runs:
    """Runs that write one of two sets to a folder: three files, two indexes and a manifest."""

    def __init__(self, folder):
        self._sources, self.sets = {}, {}
        for kind in (MINE, OTHER):
            tensors = {name: noise(name + kind, "Int8", (4,)) for name in "abc"}
            write_file(folder / kind / f"{kind}.ckpt", tensors, "ckpt")
            self._sources[kind] = ckpttool.scan(str(folder / kind / f"{kind}.ckpt"))
            self.out = folder / kind / "out"
            self.run(kind)
            self.sets[kind] = self.files()
        assert len(self.sets[MINE]) == 6
        self._folder = folder
        self._number = 0

    def begin(self):
        self._number += 1
        self.out = self._folder / str(self._number)

    def run(self, kind=MINE, check=lambda: None, **options):
        options = {"max_shard_bytes": 4, **options}
        output_options = ckpttool.OutputOptions("ckpt", **options)
        planned = plan_merge(
            self._sources[kind], None, str(self.out), output_options=output_options
        )
        ckpttool.execute(*planned, check=check, options=CopyOptions(task_bytes=1))

    def fail(self, outputs, **options):
        def check():
            if len([*self.out.glob("*-of-*.ckpt")]) >= outputs:
                raise StopError

        with pytest.raises(StopError):
            self.run(check=check, **options)

    def stop(self, kind=MINE, **options):
        assert has_crashed(lambda: self.run(kind, **options), crash_before_second_rename)

    def finalize(self):
        ckpttool.finalize(str(self.out))

    def files(self):
        return {
            str(path.relative_to(self.out)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in self.out.rglob("*")
            if path.is_file() and path.parent.name != RECORD and path.suffix != ".partial"
        }

    def is_stopped(self):
        return read_destination(Record(self.out / MANIFEST)).state is State.STOPPED

    def is_planned(self, kind):
        path = self.out / PLAN
        (source,) = json.loads(path.read_text())["inputs"] if path.exists() else [{"path": ""}]
        return source["path"].endswith(f"{kind}.ckpt")


@dataclass(frozen=True)
class Scenario:
    """What is there, what crashes, and the options with which the set is finished."""

    prepare: Callable[[Runs], object]
    act: Callable[[Runs], object]
    overwrite: bool = False
    part: tuple[int, int] | None = None

    def recover(self, runs, *, resume):
        """Finish the set, with ``--resume`` if that is possible and wanted."""
        state = read_destination(Record(runs.out / MANIFEST)).state
        resume = resume and (state is not State.STOPPED or runs.is_planned(MINE))
        options = {"overwrite": self.overwrite, "part": self.part}
        try:
            runs.run(resume=resume, **options)
        except ckpttool.PlanError as error:
            if resume or "is already complete" not in str(error):
                raise
            runs.run(resume=True, **options)
        if self.part is not None:
            runs.run(resume=True, part=(1, 2))
            runs.finalize()


def both_parts(runs, **options):
    runs.run(part=(1, 2), **options)
    runs.run(part=(2, 2), **options)


def older_names(runs):
    runs.run(OTHER, max_shard_bytes=8)


def part_of_another_plan(runs):
    runs.stop(OTHER, part=(1, 2))


def run_without_locks(runs):
    def refuse(fd, kind):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    fcntl.flock = refuse
    runs.run(no_locks=True)


SCENARIOS = {
    "whole": Scenario(lambda runs: None, Runs.run),
    "part 2/2 after 1/2": Scenario(
        lambda runs: runs.run(part=(1, 2)), lambda runs: runs.run(part=(2, 2)), part=(2, 2)
    ),
    "finalize": Scenario(both_parts, Runs.finalize),
    "overwrite": Scenario(
        lambda runs: runs.run(OTHER), lambda runs: runs.run(overwrite=True), overwrite=True
    ),
    "overwrite other names": Scenario(
        older_names, lambda runs: runs.run(overwrite=True), overwrite=True
    ),
    "finalize over other names": Scenario(
        lambda runs: (older_names(runs), both_parts(runs, overwrite=True)),
        Runs.finalize,
        overwrite=True,
    ),
    "failing over other names": Scenario(
        older_names, lambda runs: runs.fail(0, overwrite=True), overwrite=True
    ),
    "overwrite itself": Scenario(Runs.run, lambda runs: runs.run(overwrite=True), overwrite=True),
    "resume": Scenario(Runs.stop, lambda runs: runs.run(resume=True)),
    "anew": Scenario(Runs.stop, Runs.run),
    "parts of a stopped run": Scenario(
        Runs.stop, lambda runs: runs.run(resume=True, part=(2, 2)), part=(2, 2)
    ),
    "another plan": Scenario(lambda runs: runs.stop(OTHER), Runs.run),
    "a part of another plan": Scenario(
        part_of_another_plan, lambda runs: runs.run(part=(2, 2)), part=(2, 2), overwrite=True
    ),
    "without locks": Scenario(lambda runs: None, run_without_locks),
    "resume without locks": Scenario(Runs.stop, run_without_locks),
    "another plan without locks": Scenario(lambda runs: runs.stop(OTHER), run_without_locks),
    "failing": Scenario(lambda runs: None, lambda runs: runs.fail(2)),
    "failing at once": Scenario(lambda runs: None, lambda runs: runs.fail(0)),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_manifest, "UNIT_BYTES", 2)
        patch.setattr(execute_module, "MIN_GROUP_BYTES", 1)
        yield Runs(tmp_path_factory.mktemp("runs"))


def check_state(runs, before, was_stopped):
    """Check that the state is true of the files that are there.

    What a stopped run has left stays marked until a run has finished the set.
    """
    destination, now = read_destination(Record(runs.out / MANIFEST)), runs.files()
    assert not (was_stopped and destination.state is State.NONE)
    assert not destination.damaged
    assert destination.state in (State.NONE, State.STOPPED, State.COMPLETE)
    older = {name: digest for name, digest in before.items() if "-of-00002" in name}
    if destination.state is not State.COMPLETE:
        assert older.items() <= now.items()  # until the new set is complete
    elif now != before:
        left = now.items() - runs.sets[MINE].items()
        assert now in runs.sets.values() or (left and left <= older.items())
    if destination.state is State.NONE:
        assert now == before
    is_unfinished = find_unfinished_run(runs.out) is not None
    assert is_unfinished == (destination.state is State.STOPPED)


def check_finished(runs):
    assert runs.files() == runs.sets[MINE]
    assert not [*runs.out.rglob("*.partial*")]
    assert {path.name for path in (runs.out / RECORD).iterdir()} <= {"lock", "stamps.json"}
    assert (runs.out / STAMPS).exists()
    assert read_destination(Record(runs.out / MANIFEST)).stamps is not None


@pytest.mark.parametrize("resume", [True, False], ids=["resumed", "anew"])
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_run_that_crashes_anywhere_is_known_and_finished_by_the_next(runs, name, resume):
    scenario = SCENARIOS[name]
    number, crashed = 0, True
    while crashed:
        number += 1
        runs.begin()
        scenario.prepare(runs)
        before, was_stopped = runs.files(), runs.is_stopped()
        crashed = has_crashed(lambda: scenario.act(runs), lambda at=number: crash_at(at))
        check_state(runs, before, was_stopped)
        if name == "finalize" and not resume:
            runs.finalize()
        else:
            scenario.recover(runs, resume=resume)
        check_finished(runs)
    assert number > 10


@pytest.mark.parametrize("name", ["whole", "resume", "another plan", "overwrite"])
def test_runs_that_crash_one_after_the_other_are_finished_by_the_last(runs, name):
    scenario, moments = SCENARIOS[name], random.Random(name)
    for _ in range(12):
        first, *others = (moments.randrange(1, 60) for _ in range(3))
        runs.begin()
        scenario.prepare(runs)
        before, was_stopped = runs.files(), runs.is_stopped()
        has_crashed(lambda: scenario.act(runs), lambda at=first: crash_at(at))
        for number in others:
            resume = moments.random() < 0.5
            has_crashed(
                lambda resume=resume: scenario.recover(runs, resume=resume),
                lambda at=number: crash_at(at),
            )
            check_state(runs, before, was_stopped)
        scenario.recover(runs, resume=True)
        check_finished(runs)
