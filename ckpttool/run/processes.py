"""What makes a process a good worker: it leaves signals to the run, and ends with it.

Workers come from a server that was started with nothing in it (`forkserver`): a process that has
threads must not be forked.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import (
    connection,
    forkserver,
    get_context,
    parent_process,
    resource_tracker,
)
from threading import Thread
from typing import ParamSpec, TypeVar

from ckpttool.errors import EngineError
from ckpttool.formats.stopping import NO_ROOM

P = ParamSpec("P")
T = TypeVar("T")

CONTEXT = get_context("forkserver")

# What a terminal, or `timeout`, sends to all processes of a group.  The run that started the
# workers decides what becomes of them.
LEFT_TO_THE_RUN = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)
BLOCKED = (*LEFT_TO_THE_RUN, signal.SIGALRM)  # by which the run comes back to one of these


class ProcessPool(ProcessPoolExecutor):
    """Processes of this host that leave signals to the run, and end with it."""

    def __init__(self, jobs: int) -> None:
        with _starting():
            _start_server()
            super().__init__(jobs, CONTEXT, initializer=_enter_worker)

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Hand a call to a worker, which may be started for it.

        A signal waits until the worker is known, so that `stop` finds all of them.
        """
        before = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED)
        try:
            with _starting():
                return super().submit(fn, *args, **kwargs)
        except EngineError:
            thread: object = self._executor_manager_thread
            if isinstance(thread, Thread) and thread.ident is None:  # which nobody can wait for
                self._executor_manager_thread = None  # type: ignore[assignment]
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def stop(self) -> None:
        """End the workers at once, in the middle of what they do; all open calls fail."""
        for process in list((self._processes or {}).values()):  # kill_workers() in Python 3.14
            process.kill()


@contextmanager
def _starting() -> Iterator[None]:
    """Say what is wrong if the system has no room for a process, or for a thread beside it."""
    try:
        yield
    except BrokenExecutor:
        raise
    except (OSError, EOFError, RuntimeError) as error:  # EOFError if the server ends at that
        raise EngineError("processes", f"no worker starts ({error}); {NO_ROOM}") from error


def _start_server() -> None:
    """Start the process that workers are forked from, with signals blocked.

    Workers inherit that, so there is no moment at which Ctrl-C could find one unprepared.  So does
    the process that tracks resources, which itself ignores only SIGINT and SIGTERM.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED)
    try:
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED)  # that has unblocked two of them
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _enter_worker() -> None:
    """Prepare a process for work; it runs first in every worker."""
    for number in LEFT_TO_THE_RUN:  # which also forgets those that have come and were blocked
        signal.signal(number, signal.SIG_IGN)
    os.setpgid(0, 0)  # what comes from now on is meant for this process alone
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # by which a pool that is broken ends the rest
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    # A worker that waits for its next task does not notice when the run is killed: both ends of
    # the queue are its own.  It does nothing but wait, so a thread is no burden.
    Thread(target=_end_with_the_run, daemon=True).start()


def _end_with_the_run() -> None:
    run = parent_process()
    assert run is not None, "_enter_worker() is called in a child"
    connection.wait([run.sentinel])
    os.kill(os.getpid(), signal.SIGKILL)
