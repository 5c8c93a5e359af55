"""A run that waits for another one (``--wait``), and how both can be told apart by programs."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import ckpttool
from ckpttool.transaction import resume, waiting
from tests.support.commands import message, run, run_well
from tests.support.executors import COMMAND, PATIENCE_SECONDS, environment
from tests.support.small_sets import Other, SmallSet

# A run that waits for ever when it has written some outputs; its first words are for it alone.
HELD = """
import sys, time
from pathlib import Path
from ckpttool.execution import execute
from ckpttool.execution.copy import fill
from ckpttool.cli.main import main

output, mark = sys.argv[1:3]

def hold(task):
    if task.units[0].tensor.file.path == f"{output}.partial":
        Path(mark).touch()
        time.sleep(1000)
    return fill(task)

execute.fill = hold
sys.argv[1:] = sys.argv[3:]
main()
"""


@pytest.fixture
def held(tmp_path):
    """A function that starts a run of a set, and returns when it is about to fill an output."""
    started = []

    def start(small: SmallSet, output: Path, *more: str) -> subprocess.Popen[bytes]:
        mark = tmp_path / f"held_{len(started)}"
        words = [sys.executable, "-c", HELD, str(output), str(mark), *small.words(*more)]
        process = subprocess.Popen([*map(str, words)], env=environment(), stderr=subprocess.PIPE)
        started.append(process)
        for _ in range(PATIENCE_SECONDS * 10):
            if mark.exists() or process.poll() is not None:
                break
            signal.sigtimedwait([], 0.1)
        assert process.poll() is None, process.communicate()
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def at_the_first_pause(monkeypatch, act) -> None:
    """Call a function when a run that waits pauses for the first time; it then does not sleep."""
    paused = []

    def sleep(seconds):
        assert 0 < seconds <= waiting.POLL_SECONDS
        if not paused:
            paused.append(seconds)
            act()

    monkeypatch.setattr(waiting.time, "sleep", sleep)


def test_a_run_waits_for_another_host_and_accepts_what_that_has_written(tmp_path, monkeypatch):
    small = SmallSet(tmp_path)
    other = Other(small)
    other.patch(monkeypatch)
    other.start()
    at_the_first_pause(monkeypatch, other.end)
    result = small.run("--wait", "1h")
    assert result.exit_code == 0, message(result)
    by = f"process {os.getpid()} on node7"
    said = f"{small.out}: waiting until another run ends {by}; 1:00:00 at most"
    assert said in message(result)
    assert "4 kept, 0 written" in message(result) or "Kept" in message(result)
    assert other.error is None


@pytest.mark.parametrize("command", ["split", "reshard", "numbered", "file"])
def test_a_run_that_dies_meanwhile_is_resumed(tmp_path, monkeypatch, held, command):
    small = SmallSet(tmp_path, command=command)
    words = small.words()  # makes the source
    process = held(small, small.outputs[-1])

    def kill():
        process.kill()
        process.wait()

    at_the_first_pause(monkeypatch, kill)
    result = run(*words, "--wait", "10m", "--json")
    assert result.exit_code == 0, message(result)
    document = json.loads(result.stdout)
    kept = [output["kept"] for output in document["outputs"]]
    assert kept == [True] * (len(kept) - 1) + [False]
    (note,) = [note for note in document["notes"] if note["code"] == "waited"]
    assert note["facts"] == f"process {process.pid} on {socket.gethostname()}; 0:10:00 at most"
    assert small.read() == small.wanted()


@pytest.mark.parametrize("time", ["0s", "0.01m"])
def test_a_time_that_is_over_ends_with_the_code_of_a_run_that_is_busy(tmp_path, held, time):
    small = SmallSet(tmp_path)
    process = held(small, small.outputs[1])
    result = small.run("--wait", time, "--json")
    assert result.exit_code == 9
    error = json.loads(result.stdout)["error"]
    assert (error["exit_code"], error["retry"]) == (9, True)
    (diagnostic,) = error["diagnostics"]
    assert (diagnostic["code"], diagnostic["path"]) == ("busy", str(small.record / "whole.log"))
    by = f"process {process.pid} on {socket.gethostname()}"
    assert diagnostic["facts"] == f"{by}; waited for 0:00:00"


def test_finalize_waits_for_the_parts(tmp_path, monkeypatch, held):
    small = SmallSet(tmp_path)
    small.run_well("--part", "1/2")
    process = held(small, small.outputs[1], "--part", "2/2")
    assert run("finalize", small.out).exit_code == 9

    def end():
        process.kill()
        process.wait()
        small.run_well("--part", "2/2", "--resume")

    at_the_first_pause(monkeypatch, end)
    result = run_well("finalize", small.out, "--wait", "90s")
    assert f"process {process.pid} on {socket.gethostname()}; 0:01:30 at most" in message(result)
    assert "complete: 4 files" in message(result)


def test_another_command_that_was_waited_for_is_not_overwritten(tmp_path, monkeypatch):
    small, other = SmallSet(tmp_path), Other(SmallSet(tmp_path, "other"))
    other.patch(monkeypatch)
    other.start()
    at_the_first_pause(monkeypatch, other.end)
    result = small.run("--wait", "10m", "--json")
    assert result.exit_code == 5
    error = json.loads(result.stdout)["error"]
    assert (error["retry"], error["diagnostics"][0]["code"]) == (False, "resume")
    assert small.read() == other.small.wanted()


def overtaken(small, monkeypatch, *more):
    """Run a command that another run overtakes behind its look at the destination.

    It has looked for older outputs before.
    """
    look, looks = resume.read_destination, []

    def look_twice(record):
        destination = look(record)
        looks.append(destination)
        if len(looks) == 2:
            monkeypatch.setattr(resume, "read_destination", look)
            small.run_well()
        return destination

    monkeypatch.setattr(resume, "read_destination", look_twice)
    return small.run(*more)


def test_a_run_that_another_one_overtakes_is_to_be_tried_again(tmp_path, monkeypatch):
    small = SmallSet(tmp_path)
    small.out.mkdir()
    result = overtaken(small, monkeypatch, "--resume")
    assert result.exit_code == 9
    advice = "another run has written it since this one began Try: the same command"
    assert advice in message(result)
    small.out = tmp_path / "again"
    small.out.mkdir()
    result = overtaken(small, monkeypatch, "--wait", "1m")
    assert (result.exit_code, "Kept" in message(result)) == (0, True)


def test_what_else_is_wrong_is_not_worth_a_retry(tmp_path, monkeypatch):
    small = SmallSet(tmp_path)
    other = Other(small)
    other.patch(monkeypatch)
    other.start()
    limited = small.run("--json")
    small.source.write_bytes(small.source.read_bytes()[:-1])
    damaged = small.run("--json", "--wait", "10m")
    other.end()
    assert (limited.exit_code, json.loads(limited.stdout)["error"]["retry"]) == (9, True)
    assert (damaged.exit_code, json.loads(damaged.stdout)["error"]["retry"]) == (3, False)


@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM"])
def test_a_signal_ends_a_run_that_waits(tmp_path, held, number):
    small = SmallSet(tmp_path)
    held(small, small.outputs[1])
    words = [*COMMAND, *map(str, small.words("--wait", "1h"))]
    waits = subprocess.Popen(words, env=environment(), stderr=subprocess.PIPE, text=True)
    for line in waits.stderr:
        if "at most" in line:
            break
    waits.send_signal(getattr(signal, number))
    assert "nothing was left half-written" in waits.communicate(timeout=PATIENCE_SECONDS)[1]
    assert waits.returncode == 128 + getattr(signal, number)


@pytest.mark.parametrize("typed", ["10", "10min", "2 hours", "soon", "-1s"])
def test_a_time_without_its_unit_is_refused(tmp_path, typed):
    small = SmallSet(tmp_path)
    result = small.run("--wait", typed)
    assert result.exit_code == 2
    assert "Try: --wait 10m" in message(result)


def test_python_waits_as_the_command_does(tmp_path, monkeypatch):
    small = SmallSet(tmp_path)
    other = Other(small)
    other.patch(monkeypatch)
    other.start()
    with pytest.raises(ckpttool.BusyError, match="--wait 10m, or -o"):
        ckpttool.split(small.source, small.strategy, small.out, format="ckpt")
    at_the_first_pause(monkeypatch, other.end)
    done = ckpttool.split(
        small.source, small.strategy, small.out, format="ckpt", wait_seconds="10m"
    )
    assert all(output.kept for output in done.outputs)
    assert [note.code for note in done.notes] == ["waited"]
    for wrong in (-1, True, "soon"):
        with pytest.raises((TypeError, ValueError), match="wait_seconds"):
            ckpttool.split(small.source, small.strategy, small.out, wait_seconds=wrong)


def test_the_documents_of_two_jobs_can_be_told_apart(tmp_path):
    results = []
    for name in ("ckpt", "hdf5"):
        small = SmallSet(tmp_path, output_format=name)
        small.out = tmp_path / f"out {name}"
        results.append(json.loads(small.run_well("--json").stdout))
        assert results[-1]["plan"] == json.loads(small.manifest.read_text())["plan"]
        assert results[-1]["ckpttool"] == ckpttool.__version__
        assert f"-o '{small.out}'" in results[-1]["command"]
    assert results[0]["plan"] != results[1]["plan"]
    result = run("inspect", small.source, "--dec-key-file", "0123456789abcdef", "--json")
    document = json.loads(result.stdout)
    assert document["command"] == f"ckpttool inspect {small.source} --dec-key-file ... --json"
    assert "0123456789abcdef" not in result.stdout + result.stderr
