"""Run tasks on the workers of a running Dask cluster.

If a worker dies, Dask repeats its task on another worker.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError, Executor, Future
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ckpttool.concurrency import Threads
from ckpttool.execution.cluster import RESTART, SAME_SOFTWARE, Cluster
from ckpttool.problems import EngineError

if TYPE_CHECKING:
    from distributed import Client


A = TypeVar("A")
T = TypeVar("T")

CONNECT_SECONDS = 10
POLL_SECONDS = 2.0  # between two requests for the list of workers
SILENT_SECONDS = 60.0  # without a worker, or without an answer of the scheduler, before the error


@contextmanager
def open_dask(name: str, where: str) -> Iterator[Executor]:
    """Open the workers of a Dask scheduler.

    Parameters
    ----------
    name
        The name of the engine, for errors.
    where
        The scheduler's address, or the path of its scheduler file.

    Raises
    ------
    EngineError
        Dask is not installed, or the scheduler cannot be reached or lacks workers.
    """
    try:
        import dask
        from distributed import Client
    except ImportError as error:
        hint = "pip install 'ckpttool[dask]'"
        facts = "" if error.name == "dask" else str(error)
        raise EngineError(name, "Dask is not installed", hint, facts) from error
    address = _address(name, where)
    _check_reachable(name, address)
    # An output that is assembled from many files has a large task, which is not a mistake.
    with (
        dask.config.set({"distributed.admin.large-graph-warning-threshold": "1GB"}),
        Client(address, timeout=CONNECT_SECONDS, set_as_default=False) as client,
    ):
        yield DaskCluster(name, client)


def _address(name: str, where: str) -> str:
    if "://" in where or not ("/" in where or where.endswith(".json")):
        return where
    try:
        return str(json.loads(Path(where).read_bytes())["address"])
    except (OSError, ValueError, TypeError, LookupError) as error:
        hint = f"dask scheduler --scheduler-file {where}"
        raise EngineError(name, "no scheduler file", hint, str(error)) from error


def _check_reachable(name: str, address: str) -> None:
    """Raise `EngineError` if no scheduler answers; a client would wait for ever at some hosts."""
    from distributed import Security
    from distributed.comm import connect

    async def open_connection() -> None:
        security = Security().get_connection_args("client")
        await (await connect(address, timeout=CONNECT_SECONDS, **security)).close()

    try:
        asyncio.run(asyncio.wait_for(open_connection(), CONNECT_SECONDS))
    except (OSError, ValueError, asyncio.TimeoutError) as error:
        reason = f"no scheduler answers at {address} within {CONNECT_SECONDS} s"
        hint = "dask scheduler, which prints its address, such as tcp://node7:8786"
        raise EngineError(name, reason, hint, str(error)) from error


class DaskCluster(Cluster):
    """A connection to a Dask scheduler."""

    def __init__(self, name: str, client: Client) -> None:
        super().__init__(name, client.get_executor(pure=False))
        self._client = client
        self._nthreads: Mapping[str, int] = client.nthreads()
        if not self._nthreads:
            raise EngineError(name, "the scheduler has no workers", "dask worker ADDRESS")
        self._poll_thread = Threads(1)  # so that a hanging scheduler does not block the run
        self._poll: Future[Mapping[str, int]] | None = None
        self._polled = self._answered = time.monotonic()

    @property
    def width(self) -> int:
        """Number of threads of all workers."""
        return sum(self._nthreads.values())

    @property
    def threads(self) -> int:
        """Number of threads of the worker that has the most."""
        return max(self._nthreads.values(), default=1)

    def stop(self) -> None:
        """Cancel all calls in one message; a running call continues to its next claim check."""
        self._pool.shutdown(wait=False)

    def run_on_each(
        self, function: Callable[[A], T], argument: A
    ) -> Mapping[str, T | BaseException]:
        """Run one call on each worker; return each result or exception, by host and address."""
        hosts = self._client.run(socket.gethostname, on_error="return")
        answers = self._client.run(function, argument, on_error="return")
        named = {f"worker on {hosts.get(at)} ({at})": answer for at, answer in answers.items()}
        try:  # the scheduler unpickles tasks, so it needs the package too
            self._client.run_on_scheduler(callable, function)
        except Exception as error:
            named["scheduler"] = error
        return named

    def watch(self) -> None:
        """Raise `EngineError` after `SILENT_SECONDS` without a worker or the scheduler."""
        now = time.monotonic()
        if self._poll is None and now > self._polled + POLL_SECONDS:
            self._poll, self._polled = self._poll_thread.submit(self._client.nthreads), now
        if self._poll is not None and self._poll.done():
            self._nthreads = {} if self._poll.exception() else self._poll.result()
            self._poll = None
            self._answered = now if self._nthreads else self._answered
        if now > self._answered + SILENT_SECONDS:
            reason = f"no worker has answered for {SILENT_SECONDS:.0f} s"
            raise EngineError(self.name, reason, RESTART)

    def _explain(self, error: BaseException) -> BaseException:
        from distributed import KilledWorker

        if isinstance(error, KilledWorker):
            return EngineError(self.name, "workers died one after the other", RESTART, str(error))
        if isinstance(error, RuntimeError | ImportError | AttributeError):  # from unpickling
            reason = "a worker cannot read a task"
            return EngineError(self.name, reason, SAME_SOFTWARE, str(error))
        if isinstance(error, CancelledError):
            return EngineError(self.name, "the connection to the scheduler was lost", RESTART)
        return error
