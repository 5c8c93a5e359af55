"""The processes of an MPI job as workers: ``mpiexec -n N python -m mpi4py.futures -m ckpttool``.

The process of rank 0 is the run, the others are its workers.  If one of them dies MPI ends them
all, so nothing is done again elsewhere.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import BrokenExecutor, Executor, Future
from contextlib import contextmanager
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from ckpttool.errors import EngineError
from ckpttool.execution.cluster import ANSWER_SECONDS, Cluster

if TYPE_CHECKING:
    from mpi4py.futures import MPIPoolExecutor


A = TypeVar("A")
P = ParamSpec("P")
T = TypeVar("T")

START = "mpiexec -n N python -m mpi4py.futures -m ckpttool ..."


@contextmanager
def open_mpi(name: str) -> Iterator[Executor]:
    """Open the workers of this MPI job.

    Raises
    ------
    EngineError
        mpi4py or MPI itself is not installed, or this process was not started as MPI's.
    """
    try:
        from mpi4py.futures import MPIPoolExecutor
    except ModuleNotFoundError as error:
        reason = f"it needs an MPI library and mpi4py: pip install 'ckpttool[mpi]' ({error})"
        raise EngineError(name, reason) from error
    except (ImportError, RuntimeError) as error:  # mpi4py is there and finds no libmpi
        said = "; ".join(str(error).splitlines())
        reason = "it needs an MPI library: install Open MPI or MPICH (Debian: openmpi-bin)"
        reason = f"{reason} ({said})"
        raise EngineError(name, reason) from error
    if "mpi4py.futures" not in sys.orig_argv:
        raise EngineError(name, f"start it with {START}")
    with MPIPoolExecutor() as pool:
        try:
            yield MpiCluster(name, pool)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


class MpiCluster(Cluster):
    """The pool of workers of `mpi4py.futures`."""

    def __init__(self, name: str, pool: MPIPoolExecutor) -> None:
        self.name = name
        self._pool = pool

    @property
    def width(self) -> int:
        """One for each process that is a worker."""
        return int(self._pool.num_workers)

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Submit a call to any worker."""
        return self._pass_on(self._pool.submit(fn, *args, **kwargs))

    def ask(self, function: Callable[[A], T], argument: A) -> Mapping[str, T | BaseException]:
        """Return the answer of each worker or its exception, by host and MPI rank."""
        calls = [self._pool.submit(_answer, function, argument) for _ in range(self.width)]
        return dict(call.result() for call in calls)

    def watch(self) -> None:
        """Nothing: if a process dies MPI ends all of them."""

    def _explain(self, error: BaseException) -> BaseException:
        if isinstance(error, BrokenExecutor):
            return EngineError(self.name, f"its workers are lost ({error})")
        return error


def _answer(function: Callable[[A], T], argument: A) -> tuple[str, T | BaseException]:
    """The worker's part of `ask`: nobody goes on before all are there, so each does it once."""
    from mpi4py.futures import get_comm_workers

    workers = get_comm_workers()
    arrival = workers.Ibarrier()
    until = time.monotonic() + ANSWER_SECONDS
    while not arrival.Test():
        if time.monotonic() > until:
            raise EngineError("mpi", f"not all workers answered within {ANSWER_SECONDS} s")
        time.sleep(0.001)
    host = f"worker on {socket.gethostname()} (MPI rank {workers.Get_rank() + 1})"
    try:
        return host, function(argument)
    except Exception as error:
        return host, error
