"""Executors of one host, and the words of ``--engine`` that choose one.

Processes come from a server that was started with nothing in it (``forkserver``): a process with
threads must not be forked.  They leave signals to the run, and end with it.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, Executor, Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from threading import Event, Thread
from typing import ParamSpec, Protocol, TypeVar, runtime_checkable

from ckpttool.concurrency import NO_ROOM, InlineExecutor, Threads, bind_cancel_event
from ckpttool.errors import WORKER_DIED, EngineError

P = ParamSpec("P")
T = TypeVar("T")

# What a terminal or `timeout` sends to a whole process group, and the alarm of `cli.signals`.
LEFT_TO_THE_RUN = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGALRM)

WORDS = "threads[:N], processes[:N], dask:ADDRESS, dask:SCHEDULER_FILE, mpi"


@runtime_checkable
class Abortable(Protocol):
    """An executor that can abandon all calls without waiting for its workers."""

    def stop(self) -> None:
        """Abandon all calls; open calls fail, and new ones are refused."""


class ThreadPool(Threads):
    """Threads that stop reading when they are cancelled."""

    def __init__(self, jobs: int) -> None:
        self._ended = Event()
        super().__init__(jobs, "ckpttool", bind_cancel_event, (self._ended,))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the threads; with ``cancel_futures`` in the middle of their calls."""
        if cancel_futures:
            self._ended.set()
        super().shutdown(wait, cancel_futures=cancel_futures)


class ProcessPool(Executor):
    """Processes of this host, which leave signals to the run and end with it.

    They come from a `forkserver`: a process that has threads must not be forked.
    """

    def __init__(self, jobs: int) -> None:
        from concurrent.futures import ProcessPoolExecutor
        from multiprocessing import forkserver, get_context, resource_tracker

        with _starting_workers():  # workers inherit the blocked signals from the server
            resource_tracker.ensure_running()
            signal.pthread_sigmask(signal.SIG_BLOCK, LEFT_TO_THE_RUN)  # that unblocked two of them
            forkserver.ensure_running()
            context = get_context("forkserver")
            self._pool = ProcessPoolExecutor(jobs, context, initializer=_prepare_worker)

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Submit a call; this may start a worker."""
        with _starting_workers():  # so that `stop` finds all of them
            return self._pool.submit(fn, *args, **kwargs)

    def stop(self) -> None:
        """Kill the workers; all open calls fail."""
        for process in list((self._pool._processes or {}).values()):  # kill_workers() in 3.14
            process.kill()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the workers."""
        self._pool.shutdown(wait, cancel_futures=cancel_futures)


@contextmanager
def _starting_workers() -> Iterator[None]:
    """Block signals while a worker starts; raise `EngineError` if the system has no room for it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, LEFT_TO_THE_RUN)
    try:
        yield
    except (OSError, EOFError) as error:  # EOFError if the server ends at that
        raise EngineError("processes", f"no worker starts ({error}); {NO_ROOM}") from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _prepare_worker() -> None:
    """Block signals, and end with the run: a worker that waits for a task does not notice it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, LEFT_TO_THE_RUN)
    Thread(target=_end_with_the_run, daemon=True).start()


def _end_with_the_run() -> None:
    from multiprocessing import connection, parent_process

    run = parent_process()
    assert run is not None, "workers are children"
    connection.wait([run.sentinel])
    os.kill(os.getpid(), signal.SIGKILL)


def default_jobs() -> int:
    """Return the default number of workers: that of the processors, at most 8."""
    return min(8, len(os.sched_getaffinity(0)))


def read_word(word: str) -> tuple[str, str]:
    """Split the name of an engine into its kind and what follows the colon.

    Raises
    ------
    ValueError
        There is no such engine.

    Examples
    --------
    >>> read_word("threads:4"), read_word("dask:tcp://node7:8786")
    (('threads', '4'), ('dask', 'tcp://node7:8786'))
    """
    kind, _, rest = word.partition(":")
    forms = {"inline": "", "threads": r"(:(?=\d*[1-9])\d{1,6})?", "dask": ":.+", "mpi": ""}
    forms["processes"] = forms["threads"]
    if kind not in forms or not re.fullmatch(kind + forms[kind], word):
        if kind in ("threads", "processes"):
            reason = f"{kind}:N with a number N of {kind} from 1 to 999999"
            raise ValueError(f"{word!r} is not {reason}")
        raise ValueError(f"no engine {word!r}; there are {WORDS}")
    return kind, rest


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Who does the work of a run, and within how much memory.

    Attributes
    ----------
    engine
        Name of the engine; see `open_engine`.
    max_memory_bytes
        Limit of memory, of all processes on this host or of each worker of a cluster; None for
        about 50 MB and 8 MiB for each worker.  `fit_memory` turns it into `CopyOptions`.

    Raises
    ------
    ValueError
        There is no such engine.

    Examples
    --------
    >>> RunOptions("threads:4").max_memory_bytes is None
    True
    """

    engine: str = "threads"
    max_memory_bytes: int | None = None

    def __post_init__(self) -> None:
        read_word(self.engine)


def is_cluster(word: str) -> bool:
    """Return whether the workers of an engine may be on other hosts."""
    return read_word(word)[0] in ("dask", "mpi")


def open_engine(name: str) -> AbstractContextManager[Executor]:
    """Return a context manager that gives the executor of an engine and shuts it down.

    Parameters
    ----------
    name
        ``"inline"``, ``"threads:N"``, ``"processes:N"``, ``"dask:ADDRESS"``,
        ``"dask:SCHEDULER_FILE"`` or ``"mpi"``.  Without ``N`` it is `default_jobs`.  With processes
        and with MPI the script has to guard what it does by ``if __name__ == "__main__"``.

    Raises
    ------
    ValueError
        There is no such engine.
    EngineError
        It is not installed or cannot be reached; or, when it is used, its workers are lost.
    """
    kind, rest = read_word(name)
    if kind == "dask":
        from ckpttool.execution.dask import open_dask

        return open_dask(name, rest)
    if kind == "mpi":
        from ckpttool.execution.mpi import open_mpi

        return open_mpi(name)
    return _open_pool(name, kind, int(rest) if rest else default_jobs())


@contextmanager
def _open_pool(name: str, kind: str, jobs: int) -> Iterator[Executor]:
    executor: Executor = InlineExecutor()
    if kind == "threads":
        executor = ThreadPool(jobs)
    elif kind == "processes":
        executor = ProcessPool(jobs)
    try:
        yield executor
    except BaseException as error:
        if isinstance(executor, Abortable):
            executor.stop()  # nobody waits for what its workers do
        if isinstance(error, BrokenExecutor):
            raise EngineError(name, f"{WORKER_DIED}; run it again") from error
        raise
    finally:
        executor.shutdown(wait=True, cancel_futures=True)
