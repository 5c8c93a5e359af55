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
from ckpttool.storage.region_io import rounding_bytes
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
        From `ckpttool.plan_merge` and the like; its headers of many tensors take memory.

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
    workers, base_bytes = _workers(engine, executor, peak_bytes())
    if max_bytes is None:
        return CopyOptions(max_in_flight=IN_FLIGHT * workers)
    tensors, header_bytes = _headers(plan)
    transfers = () if plan is None else plan.transfers
    of_worker = IN_FLIGHT * MIN_PIECES * PIECE_BYTES + max(
        map(rounding_bytes, transfers), default=0
    )
    needed = RESERVE_BYTES + header_bytes + base_bytes + workers * of_worker
    least = needed + workers * 2 * MIN_BAND_BYTES
    if max_bytes < least:
        message = f"{format_bytes(max_bytes)} of memory is too little for {engine}"
        hint = f"--max-memory {-(-(least + TOLERANCE) // MIB)}MiB"
        kind, _ = split_engine_name(engine)
        if is_cluster(engine):
            hint += ", or fewer threads in each worker" if workers > 1 else ""
        else:
            own, option = (
                (PROCESS_BYTES, "--engine processes:") if kind == "processes" else (0, "-j ")
            )
            of_worker += own + 2 * MIN_BAND_BYTES
            fewer = workers - -(-(least + TOLERANCE - max_bytes) // of_worker)
            hint += f", or {option}{fewer}" if fewer > 0 else ""
        raise PlanError([Diagnostic("memory", message, hint=hint)])
    default = CopyOptions()
    worker_bytes = (max_bytes - needed) // workers
    band_bytes = min(default.band_bytes, worker_bytes // 2 // 4096 * 4096)
    half_of_rest = (worker_bytes - 2 * band_bytes) // 2  # one for tasks, one for grouped outputs
    task_pieces = MIN_PIECES + half_of_rest // (IN_FLIGHT * PIECE_BYTES)
    group_tensors = tensors + workers * half_of_rest // TENSOR_BYTES
    return CopyOptions(
        band_bytes,
        max_in_flight=IN_FLIGHT * workers,
        task_pieces=min(default.task_pieces, task_pieces),
        group_tensors=min(default.group_tensors, group_tensors),
    )


def _workers(engine: str, executor: Executor | None, own_bytes: int) -> tuple[int, int]:
    """Return how many tasks run at a time, and the memory beside them.

    On a cluster these are the tasks and the memory of one worker.  ``own_bytes`` is the memory of
    this process.
    """
    kind, rest = split_engine_name(engine)
    if is_cluster(engine):
        workers = executor.threads if isinstance(executor, Cluster) else 1
        return workers, PROCESS_BYTES if kind == "mpi" else DASK_BYTES
    workers = 1 if kind == "inline" else int(rest or default_jobs())
    return workers, own_bytes + (workers * PROCESS_BYTES if kind == "processes" else 0)


def _headers(plan: Plan | None) -> tuple[int, int]:
    if plan is None:
        return 0, 0
    tensors = max(map(len, plan.headers.values()), default=0)
    return tensors, tensors * HEADER_BYTES + get_format(plan.target.format).memory_bytes(tensors)


class Peak(Struct, frozen=True):
    """The most resident memory that a run takes, without the page cache.

    Attributes
    ----------
    nbytes
        Of all processes on this host, or of each worker of a cluster.
    engine
        The engine, with the number of its workers, if it has one.
    """

    nbytes: int
    engine: str


def estimate_peak(options: RunOptions, plan: Plan, own_bytes: int, work: Work) -> Peak:
    """Return the memory that a run will take.

    Parameters
    ----------
    options
        The engine.
    plan
        The outputs of the run.
    own_bytes
        The memory of this process when the plan was made.
    work
        What the tasks of the run do.
    """
    workers, base_bytes = _workers(options.engine, None, own_bytes)
    _, header_bytes = _headers(plan)
    buffers = min(workers, work.tasks) * work.buffer_bytes
    kind = split_engine_name(options.engine)[0]
    engine = f"{kind}:{workers}" if kind in ("threads", "processes") else options.engine
    nbytes = base_bytes + buffers + (header_bytes if work.tasks else 0)
    return Peak(nbytes, engine)
