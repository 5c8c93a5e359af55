"""Executors of one host, and the names that ``--engine`` accepts."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, Executor, Future
from contextlib import AbstractContextManager, contextmanager
from threading import Event, Thread
from typing import ParamSpec, Protocol, TypeVar, runtime_checkable

from msgspec import Struct

from ckpttool.concurrency import NO_ROOM, InlineExecutor, Threads, bind_cancel_event
from ckpttool.lazy import compile_late
from ckpttool.problems import EngineError
from ckpttool.system import count_processors
from ckpttool.typed import require_number

P = ParamSpec("P")
T = TypeVar("T")

# A terminal or ``timeout`` sends the first three to a whole process group; the last is the alarm
# of `ckpttool.cli.signals`.  Only the process of the run handles them.
RUN_SIGNALS = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGALRM)

WORKER_DIED = "a worker died"
WHY_DEAD = "it was killed, or memory ran out"
FEWER = "fewer workers (-j 2), or less memory (--max-memory 1GiB)"

ENGINE = compile_late(r"inline|mpi|dask:.+|(threads|processes)(:(?=\d*[1-9])\d{1,6})?")
# The forms of each engine that users choose, and an example.
ENGINES = {
    "threads": ("threads[:N]", "threads:4"),
    "processes": ("processes[:N]", "processes:4"),
    "dask": ("dask:ADDRESS, dask:SCHEDULER_FILE", "dask:tcp://HOST:8786"),
    "mpi": ("mpi", "mpi"),
}


@runtime_checkable
class Abortable(Protocol):
    """An executor that can abandon all calls without waiting for its workers."""

    def stop(self) -> None:
        """Abandon all calls: open calls fail, and new calls are refused."""


class ThreadPool(Threads):
    """Threads whose running calls can be cancelled; see `check_cancelled`."""

    def __init__(self, jobs: int) -> None:
        self._cancelled = Event()
        super().__init__(jobs, "ckpttool", bind_cancel_event, (self._cancelled,))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the threads; ``cancel_futures`` also ends their running calls."""
        if cancel_futures:
            self._cancelled.set()
        super().shutdown(wait, cancel_futures=cancel_futures)


class ProcessPool(Executor):
    """Processes of this host, which ignore `RUN_SIGNALS` and end with the run.

    They come from a `forkserver`, because a process with threads must not be forked.
    """

    def __init__(self, jobs: int) -> None:
        from concurrent.futures import ProcessPoolExecutor
        from multiprocessing import forkserver, get_context, resource_tracker

        with _starting_workers():  # workers inherit the blocked signals from the server
            resource_tracker.ensure_running()
            signal.pthread_sigmask(signal.SIG_BLOCK, RUN_SIGNALS)  # ensure_running unblocked two
            forkserver.ensure_running()
            context = get_context("forkserver")
            self._pool = ProcessPoolExecutor(jobs, context, initializer=_prepare_worker)

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Submit a call; this may start a worker."""
        with _starting_workers():  # a signal in between would hide a worker from `stop`
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
    before = signal.pthread_sigmask(signal.SIG_BLOCK, RUN_SIGNALS)
    try:
        yield
    except (OSError, EOFError) as error:  # EOFError: the fork server ended
        raise EngineError("processes", "no worker starts", NO_ROOM, str(error)) from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _prepare_worker() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, RUN_SIGNALS)
    Thread(target=_exit_with_run, daemon=True).start()


def _exit_with_run() -> None:
    from multiprocessing import connection, parent_process

    run = parent_process()
    assert run is not None, "workers are children"
    connection.wait([run.sentinel])
    os.kill(os.getpid(), signal.SIGKILL)


def default_jobs() -> int:
    """Return the default number of workers: one for each processor at hand, at most 8."""
    return math.ceil(min(8, count_processors()))


def split_engine_name(name: str) -> tuple[str, str]:
    """Split the name of an engine into its kind and the text after the colon.

    Raises
    ------
    ValueError
        The name is not that of an engine.

    Examples
    --------
    >>> split_engine_name("threads:4"), split_engine_name("dask:tcp://node7:8786")
    (('threads', '4'), ('dask', 'tcp://node7:8786'))
    """
    if not ENGINE.fullmatch(name):
        raise ValueError(f"{name!r} is not an engine: {describe_engines()}")
    kind, _, rest = name.partition(":")
    return kind, rest


def describe_engines() -> str:
    """Return the forms of the names of engines, for messages."""
    return f"{', '.join(form for form, _ in ENGINES.values())}, with N from 1 to 999999"


class RunOptions(Struct, frozen=True):
    """The engine of a run, and its limit of memory.

    Attributes
    ----------
    engine
        Name of the engine; see `open_engine`.
    max_memory_bytes
        Limit for all processes on this host together, or for each worker of a cluster.  None for
        about 50 MB and 8 MiB for each worker.  `fit_memory` turns it into `CopyOptions`.

    Raises
    ------
    ValueError
        The name is not that of an engine.

    Examples
    --------
    >>> RunOptions("threads:4").max_memory_bytes is None
    True
    """

    engine: str = "threads"
    max_memory_bytes: int | None = None

    def __post_init__(self) -> None:
        split_engine_name(self.engine)
        require_number("max_memory_bytes", self.max_memory_bytes)


def is_cluster(name: str) -> bool:
    """Return whether the workers of an engine may be on other hosts."""
    return split_engine_name(name)[0] in ("dask", "mpi")


def open_engine(name: str) -> AbstractContextManager[Executor]:
    """Return a context manager that yields the executor of an engine and shuts it down.

    Parameters
    ----------
    name
        ``"inline"``, ``"threads:N"``, ``"processes:N"``, ``"dask:ADDRESS"``,
        ``"dask:SCHEDULER_FILE"`` or ``"mpi"``.  ``N`` is `default_jobs` by default.  A script that
        uses processes or MPI needs the guard ``if __name__ == "__main__"``.

    Raises
    ------
    ValueError
        The name is not that of an engine.
    EngineError
        The engine is not installed or cannot be reached; or, during use, its workers are lost.
    """
    kind, rest = split_engine_name(name)
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
            executor.stop()  # before `shutdown`, which waits for running calls
        if isinstance(error, BrokenExecutor):
            raise EngineError(name, WORKER_DIED, FEWER, WHY_DEAD) from error
        raise
    finally:
        executor.shutdown(wait=True, cancel_futures=True)
