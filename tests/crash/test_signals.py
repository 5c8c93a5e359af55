"""Signals: one message and the exit code that shells give to one, whenever it comes."""

from __future__ import annotations

import errno
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from ckpttool.cli.signals import MAY_BE_LEFT, WORKERS, SignalGuard, Terminated
from ckpttool.concurrency import InlineExecutor
from ckpttool.execution import execute
from ckpttool.storage import files
from tests.support.commands import files_below, message, run, run_well
from tests.support.executors import (
    COMMAND,
    environment,
    finish,
    ordered_words,
    reshard_words,
    start,
)

SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]

# Python 3.11 makes a RuntimeError of what is raised in __set_name__, and exit code 1 of that.
TRAP = """
import os, signal, sys
class Trap:
    def __set_name__(self, owner, name):
        os.kill(os.getpid(), {number})
        for _ in range(1000):
            pass
class Owner:
    trap = Trap()
"""


def ended_by(number, code, errors, facts=""):
    assert errors == f"error[stopped]: ended by {signal.Signals(number).name}\n{facts}"
    assert code == 128 + number


UNTOUCHED = "  nothing was left half-written\n"


@pytest.fixture
def trap(tmp_path):
    def made(name, number):
        (tmp_path / "trap").mkdir()
        (tmp_path / "trap" / f"{name}.py").write_text(TRAP.format(number=int(number)))
        return tmp_path / "trap"

    return made


@pytest.mark.crash
@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("module", ["click", "yaml"])
def test_a_signal_in_the_middle_of_an_import_is_no_error(tmp_path, trap, module, number):
    (tmp_path / "s.yaml").write_text("ckpttool_strategy: 1")
    path = [str(trap(module, number)), environment()["PYTHONPATH"]]
    words = reshard_words(tmp_path / "out", "ckpt")
    words[words.index("-s") + 1] = str(tmp_path / "s.yaml")
    env = environment(PYTHONPATH=os.pathsep.join(path))
    ended_by(number, *finish(start(*COMMAND, *words, env=env)))


@pytest.fixture
def handled():
    seen = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    yield seen
    signal.signal(signal.SIGTERM, before)


def test_a_signal_during_an_import_goes_to_the_handler_before(trap, monkeypatch, handled):
    monkeypatch.delitem(sys.modules, WORKERS, raising=False)
    monkeypatch.syspath_prepend(trap("trapped", signal.SIGTERM))
    with SignalGuard().installed():
        __import__("trapped")
    del sys.modules["trapped"]
    assert handled == [signal.SIGTERM]
    with pytest.raises(Terminated), SignalGuard().installed():
        signal.raise_signal(signal.SIGTERM)
    assert len(handled) == 1


def test_if_there_are_workers_it_waits_for_the_end_of_the_import(trap, monkeypatch, handled):
    monkeypatch.setitem(sys.modules, WORKERS, sys)
    monkeypatch.syspath_prepend(trap("trapped", signal.SIGTERM))

    def run():
        with SignalGuard().installed():
            __import__("trapped")
            signal.sigtimedwait([], 10)  # which the alarm ends

    with pytest.raises(Terminated):
        run()
    assert sys.modules.pop("trapped").Owner
    assert not handled


def test_a_second_signal_does_not_wait_for_the_import(trap, monkeypatch, handled):
    monkeypatch.setitem(sys.modules, WORKERS, sys)
    folder = trap("trapped", signal.SIGTERM)
    twice = "".join(f"class Owner{n}:\n    trap = Trap()\n" for n in range(2))
    (folder / "trapped.py").write_text(TRAP.format(number=int(signal.SIGTERM)) + twice)
    monkeypatch.syspath_prepend(folder)
    with pytest.raises(Terminated), SignalGuard().installed():
        __import__("trapped")
    assert handled == [signal.SIGTERM] * 2
    del sys.modules["trapped"]


def test_a_signal_during_an_import_waits_while_files_are_written(trap, monkeypatch, handled):
    monkeypatch.syspath_prepend(trap("trapped", signal.SIGTERM))
    guard = SignalGuard()

    def run():
        with guard.installed(), guard.deferring():
            signal.raise_signal(signal.SIGTERM)
            __import__("trapped")  # where the second comes

    with pytest.raises(Terminated):
        run()
    assert sys.modules.pop("trapped").Owner
    assert not handled


@pytest.mark.crash
@pytest.mark.parametrize("number", SIGNALS)
def test_what_somebody_makes_of_a_signal_is_the_signal(tmp_path, number):
    code = (
        "import os, sys\n"
        "from ckpttool.discovery import scan\n"
        "def interrupted(*args, **more):\n"
        f"    try: os.kill(os.getpid(), {int(number)})\n"
        "    except BaseException: raise RuntimeError('my own')\n"
        "scan._scan = scan._list_files = scan.scan_indexed = interrupted\n"
        "from ckpttool.__main__ import run\n"
        "run()"
    )
    words = reshard_words(tmp_path / "out", "ckpt")
    ended_by(number, *finish(start(sys.executable, "-c", code, *words)), UNTOUCHED)


@pytest.mark.crash
@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_while_a_worker_starts_is_told_in_one_message(tmp_path, number):
    code = (
        "import os\n"
        "from multiprocessing import popen_forkserver as popen\n"
        "real = popen.forkserver.connect_to_new_process\n"
        "def connect(fds):\n"
        "    made = real(fds)\n"
        f"    os.killpg(0, {int(number)})\n"
        "    return made\n"
        "popen.forkserver.connect_to_new_process = connect\n"
        "from ckpttool.__main__ import run\n"
        "run()"
    )
    words = [*reshard_words(tmp_path / "out", "ckpt"), "--engine", "processes:2"]
    process = start(sys.executable, "-c", code, *words, start_new_session=True)
    ended_by(number, *finish(process), UNTOUCHED)


def test_the_processes_beside_a_run_do_not_hear_its_signals():
    code = (
        "from pathlib import Path\n"
        "from multiprocessing import forkserver, resource_tracker\n"
        "from ckpttool.execution.executors import open_engine\n"
        "if __name__ == '__main__':\n"
        "    with open_engine('processes:1') as executor:\n"
        "        assert executor.submit(max, 1, 2).result() == 2\n"
        "        beside = (forkserver._forkserver._forkserver_pid,\n"
        "                  resource_tracker._resource_tracker._pid)\n"
        "        print(*(Path(f'/proc/{pid}/status').read_text() for pid in beside))\n"
    )
    status, errors = start(sys.executable, "-c", code).communicate(timeout=60)
    held = re.findall(r"^\s*Sig(?:Blk|Ign):\s*(\w+)", status, re.MULTILINE)
    assert len(held) == 4, errors
    for blocked, ignored in zip(held[::2], held[1::2], strict=True):
        deaf = int(blocked, 16) | int(ignored, 16)
        assert all(deaf >> number - 1 & 1 for number in SIGNALS), status


def hit(monkeypatch, place, signals):
    """Have so many signals come when the first temporary file of an output was made, or is removed.

    For its removal one more comes before: when it is filled.
    """
    claim, unlink, fill = files.claim, Path.unlink, execute.fill
    numbers = [signal.SIGINT] * (place == "unlink") + [signal.SIGTERM] * signals

    def send():
        while numbers:
            signal.raise_signal(numbers.pop(0))

    def claimed(path):
        fd = claim(path)
        if path.name.startswith("checkpoint_"):
            send()
        return fd

    def unlinked(self, **more):
        if self.name.endswith(files.PARTIAL):
            send()
        unlink(self, **more)

    def filled(task):
        if numbers[:1] == [signal.SIGINT]:
            signal.raise_signal(numbers.pop(0))
        return fill(task)

    if place == "claim":
        monkeypatch.setattr(files, "claim", claimed)
    else:
        monkeypatch.setattr(execute, "fill", filled)
        monkeypatch.setattr(Path, "unlink", unlinked)


@pytest.mark.parametrize("engine", ["inline", "threads:2"])
@pytest.mark.parametrize(("place", "signals", "code"), [("claim", 2, 143), ("unlink", 1, 130)])
def test_a_second_signal_leaves_nothing_half_written(
    tmp_path, monkeypatch, place, signals, code, engine
):
    hit(monkeypatch, place, signals)
    result = run(*ordered_words(tmp_path)[:-2], "--engine", engine)
    assert result.exit_code == code
    assert " nothing was left half-written; " in message(result)
    assert not list(tmp_path.rglob(f"*{files.PARTIAL}"))
    if left := files_below(tmp_path):  # a thread has completed one before the signal was noticed
        assert engine != "inline"
        assert any(name.endswith("whole.log") for name in left)
        monkeypatch.undo()
        assert run(*ordered_words(tmp_path)[:-2], "--resume").exit_code == 0


@pytest.mark.crash
@pytest.mark.parametrize("place", ["claim", "unlink"])
def test_a_third_signal_ends_a_run_that_hangs_and_its_message_says_what_may_be_left(
    tmp_path, place
):
    code = (
        "import pytest\n"
        "from ckpttool.__main__ import run\n"
        "from tests.crash.test_signals import hit\n"
        f"hit(pytest.MonkeyPatch(), {place!r}, 4)\n"
        "run()"
    )
    words = ordered_words(tmp_path)
    status, errors = finish(start(sys.executable, "-c", code, *words))
    assert status == (143 if place == "claim" else 130)
    assert errors.endswith(f"\n  {MAY_BE_LEFT}; 0 of 4 outputs complete\n  Try: the same command\n")
    assert errors.count("\n") == 3
    assert [name for name in files_below(tmp_path) if name.endswith(files.PARTIAL)]
    run_well(*words)
    assert len(files_below(tmp_path)) == 4


def test_what_is_noted_on_the_first_signal_is_said_at_a_later_one(tmp_path, monkeypatch):
    def shutdown(self, wait=True, *, cancel_futures=False):
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)

    def refuse(self, **more):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(self))

    def filled(task):
        signal.raise_signal(signal.SIGINT)
        return fill(task)

    fill = execute.fill
    monkeypatch.setattr(execute, "fill", filled)
    monkeypatch.setattr(InlineExecutor, "shutdown", shutdown)
    monkeypatch.setattr(Path, "unlink", refuse)
    result = run(*ordered_words(tmp_path)[:-2], "--engine", "inline")
    assert result.exit_code == 130
    assert files.STUCK in message(result)
    assert "nothing was left" not in message(result)
