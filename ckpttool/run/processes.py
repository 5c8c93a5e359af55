"""What makes a process a good worker: it leaves signals to the run, and ends with it.

Workers come from a server that was started with nothing in it (`forkserver`): a process that has
threads must not be forked.
"""

from __future__ import annotations

import os
import signal
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import (
    connection,
    forkserver,
    get_context,
    parent_process,
    resource_tracker,
)
from threading import Thread

CONTEXT = get_context("forkserver")

# What a terminal, or `timeout`, sends to all processes of a group.  The run that started the
# workers decides what becomes of them.
LEFT_TO_THE_RUN = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)


class ProcessPool(ProcessPoolExecutor):
    """Processes of this host that leave signals to the run, and end with it."""

    def __init__(self, jobs: int) -> None:
        _start_server()
        super().__init__(jobs, CONTEXT, initializer=_enter_worker)

    def stop(self) -> None:
        """End the workers at once, in the middle of what they do; all open calls fail."""
        for process in list((self._processes or {}).values()):  # kill_workers() in Python 3.14
            process.kill()


def _start_server() -> None:
    """Start the process that workers are forked from, with signals blocked.

    Workers inherit that, so there is no moment at which Ctrl-C could find one unprepared.  The
    process that tracks resources is started before, for to start it unblocks signals.
    """
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, LEFT_TO_THE_RUN)
    try:
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
