"""Choose sizes of bands and tasks that fit a given amount of memory."""

from __future__ import annotations

from concurrent.futures import Executor
from typing import TYPE_CHECKING

from msgspec import Struct

from ckpttool.execution.cluster import Cluster
from ckpttool.execution.copy import CopyOptions
from ckpttool.execution.executors import RunOptions, default_jobs, is_cluster, split_engine_name
from ckpttool.formats import get_format
from ckpttool.model.plan import Plan
from ckpttool.problems import Diagnostic, PlanError
from ckpttool.storage.region_io import rounding_bytes, turned_bands
from ckpttool.system import peak_bytes
from ckpttool.wording import format_bytes

if TYPE_CHECKING:
    from ckpttool.execution.task_costs import Work

MIB = 1 << 20
MIN_BAND_BYTES = 64 << 10  # smaller copies take less time than their system calls
RESERVE_BYTES = 10 * MIB  # for headers that are read back, hashes, and open files
PIECE_BYTES = 512  # of a piece in a task, about
MIN_PIECES = 512  # of a task
HEADER_BYTES = 2 << 10  # for each tensor in the header of a new output, about
TENSOR_BYTES = 1 << 10  # for each tensor of an output that is being written, at most
TOLERANCE = 2 * MIB  # the memory of a process before the plan varies from run to run
IN_FLIGHT = 4  # tasks for each worker: the running ones, and the next
PROCESS_BYTES = 48 * MIB  # of a worker process before its first task
DASK_BYTES = 64 * MIB  # of a worker process that has imported Dask


def fit_memory(
    options: RunOptions, executor: Executor | None = None, plan: Plan | None = None
) -> CopyOptions:
    """Return the sizes that keep a run within its memory.

    Parameters
    ----------
    options
        The engine and its memory: the resident memory of all processes on this host, or of each
        worker of a cluster.  It does not include the page cache.
    executor
        From `ckpttool.open_engine`; needed for a cluster whose workers have several threads.
    plan
        That of a dry run, as of `ckpttool.merge`; its headers of many tensors take memory.

    Returns
    -------
    CopyOptions
        For `ckpttool.execute`.

    Raises
    ------
    PlanError
        The memory is too small; the error names the least that works.
    """
    max_bytes, engine = options.max_memory_bytes, options.engine
    if max_bytes is None and is_cluster(engine):
        return CopyOptions()
    need = _Need.of(options, executor, peak_bytes(), plan)
    workers = need.workers
    if max_bytes is None:
        return CopyOptions(max_in_flight=IN_FLIGHT * workers)
    if max_bytes < need.least - TOLERANCE:
        message = f"{format_bytes(max_bytes)} of memory is too little for {engine}"
        hint = f"--max-memory {-(-need.least // MIB)}MiB"
        if is_cluster(engine):
            hint += ", or fewer threads in each worker" if workers > 1 else ""
        else:
            fewer = (max_bytes - need.fixed_bytes) // (need.of_worker + need.bands * MIN_BAND_BYTES)
            option = "--engine processes:" if engine.startswith("processes") else "-j "
            hint += f", or {option}{fewer}" if fewer > 0 else ""
        raise PlanError([Diagnostic("memory", message, hint=hint)])
    default = CopyOptions()
    worker_bytes = need.bands * MIN_BAND_BYTES + max(0, max_bytes - need.least) // workers
    band_bytes = min(default.band_bytes, worker_bytes // need.bands // 4096 * 4096)
    # One half is for tasks, one for grouped outputs.
    half_of_rest = (worker_bytes - need.bands * band_bytes) // 2
    task_pieces = MIN_PIECES + half_of_rest // (IN_FLIGHT * PIECE_BYTES)
    group_tensors = need.tensors + workers * half_of_rest // TENSOR_BYTES
    return CopyOptions(
        band_bytes,
        max_in_flight=IN_FLIGHT * workers,
        task_pieces=min(default.task_pieces, task_pieces),
        group_tensors=min(default.group_tensors, group_tensors),
    )


class _Need(Struct, frozen=True):
    """The resident memory that a run needs beside the bands of its workers."""

    workers: int
    fixed_bytes: int  # of the program, the headers and what is open
    of_worker: int
    bands: int  # that a worker holds: what it writes, and what it reads
    tensors: int  # of the largest output

    @classmethod
    def of(
        cls, options: RunOptions, executor: Executor | None, own_bytes: int, plan: Plan | None
    ) -> _Need:
        kind, rest = split_engine_name(options.engine)
        of_worker = IN_FLIGHT * MIN_PIECES * PIECE_BYTES
        fixed_bytes = RESERVE_BYTES + TOLERANCE
        if is_cluster(options.engine):
            workers = executor.threads if isinstance(executor, Cluster) else 1
            fixed_bytes += PROCESS_BYTES if kind == "mpi" else DASK_BYTES
        else:
            workers = 1 if kind == "inline" else int(rest or default_jobs())
            fixed_bytes += own_bytes
            of_worker += PROCESS_BYTES if kind == "processes" else 0
        tensors, bands = 0, 2
        if plan is not None:
            bands = 1 + max((turned_bands(it.source) for it in plan.transfers), default=1)
            tensors = max(map(len, plan.headers.values()), default=0)
            fixed_bytes += tensors * HEADER_BYTES
            fixed_bytes += get_format(plan.target.format).memory_bytes(tensors)
            of_worker += max(map(rounding_bytes, plan.transfers), default=0)
        return cls(workers, fixed_bytes, of_worker, bands, tensors)

    @property
    def least(self) -> int:
        """The bytes that the smallest bands need."""
        return self.with_buffers(self.workers, self.bands * MIN_BAND_BYTES)

    def with_buffers(self, busy: int, nbytes: int) -> int:
        """Return what buffers of some bytes need in each of the busy workers."""
        return self.fixed_bytes + self.workers * self.of_worker + busy * nbytes


class Peak(Struct, frozen=True):
    """The most resident memory that a run takes, without the page cache."""

    nbytes: int
    engine: str


def estimate_peak(options: RunOptions, plan: Plan, own_bytes: int, work: Work) -> Peak:
    """Return the memory that a run will take at most; `fit_memory` takes it as a limit."""
    need = _Need.of(options, None, own_bytes, plan)
    kind, _ = split_engine_name(options.engine)
    is_pool = kind in ("threads", "processes")
    engine = f"{kind}:{need.workers}" if is_pool else options.engine
    nbytes = need.with_buffers(min(need.workers, work.tasks), work.buffer_bytes)
    return Peak(max(nbytes, need.least), engine)
