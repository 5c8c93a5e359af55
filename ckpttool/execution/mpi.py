"""The processes of an MPI job as workers: ``mpiexec -n N python -m mpi4py.futures -m ckpttool``.

The process of rank 0 is the run, the others are its workers.  If one process dies, MPI ends all of
them, so no task is repeated on another worker.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import BrokenExecutor, Executor
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from ckpttool.execution.cluster import ANSWER_SECONDS, RESTART, Cluster
from ckpttool.problems import EngineError

if TYPE_CHECKING:
    from mpi4py.futures import MPIPoolExecutor


A = TypeVar("A")
T = TypeVar("T")

START = "mpiexec -n N python -m mpi4py.futures -m ckpttool ..."


@contextmanager
def open_mpi(name: str) -> Iterator[Executor]:
    """Open the workers of this MPI job.

    Raises
    ------
    EngineError
        mpi4py or MPI is not installed, or this process was not started with `START`.
    """
    try:
        from mpi4py.futures import MPIPoolExecutor
    except ModuleNotFoundError as error:
        hint = "pip install 'ckpttool[mpi]'"
        raise EngineError(name, "mpi4py is not installed", hint) from error
    except (ImportError, RuntimeError) as error:  # mpi4py is installed, but finds no libmpi
        details = str(error).rpartition("\n")[2]  # the last of the names that were tried
        hint = "apt install openmpi-bin, or install another Open MPI or MPICH"
        raise EngineError(name, "no MPI library", hint, details) from error
    if "mpi4py.futures" not in sys.orig_argv:
        raise EngineError(name, "not started as an MPI job", START)
    with MPIPoolExecutor() as pool:
        try:
            yield MpiCluster(name, pool)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


class MpiCluster(Cluster):
    """The pool of workers of ``mpi4py.futures``; if a process dies, MPI ends all of them."""

    _pool: MPIPoolExecutor

    @property
    def width(self) -> int:
        """Number of processes that are workers."""
        return int(self._pool.num_workers)

    def run_on_each(
        self, function: Callable[[A], T], argument: A
    ) -> Mapping[str, T | BaseException]:
        """Run one call on each worker; return each result or exception, by host and MPI rank."""
        calls = [self._pool.submit(_run_once, function, argument) for _ in range(self.width)]
        return dict(call.result() for call in calls)

    def _explain(self, error: BaseException) -> BaseException:
        if isinstance(error, BrokenExecutor):
            return EngineError(self.name, "its workers are lost", RESTART, str(error))
        return error


def _run_once(function: Callable[[A], T], argument: A) -> tuple[str, T | BaseException]:
    """Run a call and return its result or exception; a barrier keeps workers from a second one."""
    from mpi4py.futures import get_comm_workers

    workers = get_comm_workers()
    barrier = workers.Ibarrier()
    deadline = time.monotonic() + ANSWER_SECONDS
    while not barrier.Test():
        if time.monotonic() > deadline:
            reason = f"not all workers answered within {ANSWER_SECONDS} s"
            raise EngineError("mpi", reason, RESTART)
        time.sleep(0.001)
    host = f"worker on {socket.gethostname()} (MPI rank {workers.Get_rank() + 1})"
    try:
        return host, function(argument)
    except Exception as error:
        return host, error
