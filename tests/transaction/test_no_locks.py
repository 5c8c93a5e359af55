"""File systems without locks, or without hard links, as some mounts of NFS and Lustre."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import subprocess
import sys
import time

import pytest

from tests.support.commands import message, run, run_well
from tests.support.manifests import reseal
from tests.support.small_sets import SmallSet, filled_outputs, while_filling

ERRORS = [errno.ENOLCK, errno.EOPNOTSUPP, errno.EIO, 524]  # ENOTSUPP of the kernel
RESUMED = ("--resume", "--no-locks")
WARNING = "this file system has no locks"

pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture
def small(tmp_path):
    return SmallSet(tmp_path)


def failing_with(number):
    def call(*arguments, **options):
        raise OSError(number, os.strerror(number))

    return call


@pytest.fixture
def no_locks(monkeypatch):
    monkeypatch.setattr(fcntl, "flock", failing_with(errno.ENOLCK))


def files_of(small):
    return {path: path.read_bytes() for path in small.out.rglob("*") if path.is_file()}


def stop_as(small, host, process):
    """Leave what a run leaves that was killed on a host, as this process number."""
    small.stop()
    plan = small.record / "plan.json"
    head = json.loads(plan.read_text().splitlines()[0] + "]}")
    reseal(
        plan,
        (f'"process": {head["process"]}, ', f'"process": {process}, '),
        (f'"host": "{head["host"]}"', f'"host": "{host}"'),
    )
    return head["time"]


def dead_process():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


LIVING = {
    "another host": lambda: ("node7", 12),
    "here": lambda: (socket.gethostname(), os.getppid()),
    "here, in another container": lambda: (socket.gethostname(), dead_process()),
    "here, with this number": lambda: (socket.gethostname(), os.getpid()),
}


@pytest.fixture(params=LIVING)
def living(request):
    return LIVING[request.param]()


@pytest.mark.parametrize("number", ERRORS)
@pytest.mark.parametrize("more", [(), ("--resume",), ("--overwrite",)])
def test_a_whole_run_warns_once_and_writes_a_right_set(small, monkeypatch, more, number):
    monkeypatch.setattr(fcntl, "flock", failing_with(number))
    result = small.run_well(*more)
    assert message(result).count(WARNING) == 1
    assert f"warning[no_locks]: {small.record}: {WARNING}" in message(result)
    assert small.read() == small.wanted()
    for words in (["verify", small.out, "-s", small.strategy, "--deep"], ["inspect", small.out]):
        assert WARNING not in message(run_well(*words))
    assert "4 kept, 0 written" in message(small.run_well("--resume"))


def test_the_warning_has_its_code_in_the_document(small, no_locks):
    document = json.loads(small.run_well("--json").stdout)
    codes = [note["code"] for note in document["notes"]]
    assert codes.count("no_locks") == 1


@pytest.mark.parametrize("more", [(), ("--resume",)])
def test_a_run_is_refused_beside_a_process_that_may_live(small, no_locks, living, more):
    host, process = living
    begun = stop_as(small, host, process)
    before = files_of(small)
    result = small.run(*more)
    assert result.exit_code == 9, message(result)
    assert f"process {process} on {host} since {begun}" in message(result)
    assert "this file system has no locks, so it may have ended" in message(result)
    assert "Try: --wait 10m; if it has ended, --no-locks" in message(result)
    assert files_of(small) == before
    for words in (["verify", small.out, "-s", small.strategy], ["finalize", small.out]):
        result = run(*words)
        assert "a run of ckpttool did not end here" in message(result)
        assert result.exit_code == (1 if words[0] == "verify" else 5)


CHOICES = [
    (("--overwrite",), 4),
    (("--no-locks",), 4),
    (("--resume", "--overwrite"), 2),
    (RESUMED, 2),
]


@pytest.mark.parametrize(("more", "count"), CHOICES)
def test_a_choice_goes_on_beside_a_process_that_may_live(small, no_locks, living, more, count):
    stop_as(small, *living)
    with filled_outputs() as filled:
        assert WARNING in message(small.run_well(*more))
    assert len(filled) == count
    assert small.read() == small.wanted()


def test_a_run_that_fails_names_the_option_that_goes_on(small, no_locks):
    def fail():
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with while_filling(small.outputs[2], fail):
        result = small.run()
    assert result.exit_code == 6
    assert "Try: the same command with --resume --no-locks" in message(result)
    seen = message(run("inspect", small.out))
    assert "when it has ended, the command that writes it, with --resume --no-locks" in seen
    assert "2 kept, 2 written" in message(small.run_well(*RESUMED))


@pytest.mark.parametrize("more", [("--resume",), ()])
def test_a_plan_that_is_left_in_a_finished_set_needs_a_choice_too(small, no_locks, more):
    small.run_well()
    finished = SmallSet(small.folder / "finished")
    finished.source.write_bytes(small.source.read_bytes())
    stop_as(finished, "node7", 12)
    (finished.record / "plan.json").rename(small.record / "plan.json")
    result = small.run(*more)
    assert result.exit_code == 9
    assert "process 12 on node7" in message(result)
    assert "4 kept, 0 written" in message(small.run_well(*RESUMED))
    assert not (small.record / "plan.json").exists()


@pytest.mark.parametrize("more", [(), ("--resume",)])
def test_where_there_are_locks_the_option_changes_nothing(small, more):
    with while_filling(small.outputs[2], lambda: small.run("--no-locks", *more)) as seen:
        small.run_well()
    assert seen[0].exit_code == 9
    assert "another run is writing it" in message(seen[0])


def test_a_second_run_is_refused_while_the_first_writes(small, no_locks, monkeypatch):
    me, begun = os.getpid(), time.strftime("%Y-%m-%d")

    def run_as_another():
        small.wait_for(0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "getpid", lambda: 1)
            return small.run()

    with while_filling(small.outputs[2], run_as_another) as seen:
        small.run_well()
    assert seen[0].exit_code == 9, message(seen[0])
    assert f"process {me} on {socket.gethostname()} since {begun}" in message(seen[0])
    assert small.read() == small.wanted()


@pytest.mark.parametrize("more", [(), ("--resume",), ("--overwrite",)])
def test_a_part_is_refused_and_leaves_nothing(small, no_locks, more):
    result = small.run("--part", "1/2", *more)
    assert result.exit_code == 5, message(result)
    assert f"{WARNING} runs of parts need them" in message(result)
    assert "Try: one run without --part" in message(result)
    assert not small.out.exists() or list(small.out.iterdir()) == []


@pytest.mark.parametrize("more", [(), ("--resume",), ("--overwrite",)])
def test_a_part_beside_a_stopped_run_is_refused_and_changes_nothing(small, no_locks, more):
    stop_as(small, socket.gethostname(), dead_process())
    before = files_of(small)
    result = small.run("--part", "1/2", *more)
    assert result.exit_code == (5 if "--overwrite" in more else 9), message(result)
    assert WARNING in message(result)
    assert files_of(small) == before


def test_parts_that_were_written_with_locks_are_finalized_without(small, monkeypatch):
    for part in ("1/2", "2/2"):
        small.run_well("--part", part)
    monkeypatch.setattr(fcntl, "flock", failing_with(errno.ENOLCK))
    run_well("finalize", small.out)
    assert small.read() == small.wanted()


@pytest.mark.parametrize("number", ERRORS)
@pytest.mark.parametrize("parts", [(), ("1/2", "2/2")])
def test_hard_links_are_not_needed(small, monkeypatch, number, parts):
    monkeypatch.setattr(os, "link", failing_with(number))
    texts = [message(small.run_well("--part", part)) for part in parts]
    texts.append(message(run_well("finalize", small.out) if parts else small.run_well()))
    assert not [printed for printed in texts if "warning:" in printed or " links" in printed]
    assert small.read() == small.wanted()
