"""Fixtures of several test modules; builders are in ``tests/support``."""

import errno
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import pytest

from ckpttool import formats
from ckpttool.discovery import hyper_parallel
from ckpttool.execution import execute as execute_module
from ckpttool.execution.copy import fill
from ckpttool.formats.sandbox import Sandbox
from ckpttool.problems import Diagnostic
from tests.support.advice import unknown
from tests.support.encryption import KEY
from tests.support.executors import Threads, wait_until
from tests.support.file_bytes import record


@pytest.fixture(scope="session", autouse=True)
def no_sync():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def typed_hints():
    """Hold the advice of each diagnostic of each test against the table of advice.

    Advice that the package gives has a row in `tests.support.advice.ROWS`; tests make up others.
    """
    check_code = Diagnostic.__post_init__

    def check(one):
        check_code(one)
        assert not unknown(one.hint) or not _is_of_package(), f"no row of advice: {one.hint}"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Diagnostic, "__post_init__", check)
        yield


def _is_of_package() -> bool:
    frame, passed_on = sys._getframe(2), ("dataclasses", "ckpttool.problems", __name__)
    while frame is not None and frame.f_globals["__name__"] in passed_on:
        frame = frame.f_back
    return frame is not None and frame.f_globals["__name__"].startswith("ckpttool.")


class WarmSandbox(Sandbox):
    """A limited process that later runs of the tests use again: to start it takes most of a run."""

    _idle: ClassVar = {}  # by process, since a fork must not share a pipe

    def _start(self):
        idle = self._idle.setdefault(os.getpid(), [])
        if self._child is None and idle and not self._stopped.is_set():
            child = self._child = idle.pop()
            child.connection.send((os.chdir, Path.cwd(), 0))
            assert child.connection.recv() is None
        return super()._start()

    def _end(self, library=""):
        if self._child is None or library or self._stopped.is_set():
            return super()._end(library)
        self._idle.setdefault(os.getpid(), []).append(self._child)
        self._child = None
        return ""


@pytest.fixture(autouse=True)
def warm_sandbox():
    with pytest.MonkeyPatch.context() as patch:
        for module in (formats, hyper_parallel):
            patch.setattr(module, "Sandbox", WarmSandbox)
        yield


@pytest.fixture(scope="session", autouse=True)
def heeded_signals():
    """Heed signals that a shell ignores for what it runs in the background; children inherit it."""
    numbers = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)
    ignored = [one for one in numbers if signal.getsignal(one) is signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, signal.SIG_DFL)
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


@pytest.fixture
def threads():
    with ThreadPoolExecutor(2) as pool:
        yield Threads(pool)


@pytest.fixture
def failing(monkeypatch):
    def fail_on(name, number=errno.EIO, after=None):
        filled = []

        def fake(task):
            path = task.units[0].tensor.file.path
            if name is not None and name in path:
                wait_until(lambda: after is None or after.exists(), f"{after}")
                raise OSError(number, os.strerror(number))
            filled.append(path.rpartition("/")[2].removesuffix(".partial"))
            return fill(task)

        monkeypatch.setattr(execute_module, "fill", fake)
        return filled

    return fail_on


@pytest.fixture(scope="module")
def new_folder(tmp_path_factory):
    # Folders that differ in a number alone might be those of ranks.
    return lambda: tmp_path_factory.mktemp("example-run")


@pytest.fixture
def key_file(tmp_path):
    path = tmp_path / "key"
    path.write_bytes(KEY)
    return path


@pytest.fixture
def make_run(tmp_path):
    def make(*names):
        for name in names:
            path = tmp_path / "run" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(record(name))
        return str(tmp_path / "run")

    return make
