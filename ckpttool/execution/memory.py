"""Choose sizes of bands and tasks that fit a given amount of memory."""

from __future__ import annotations

import resource
from concurrent.futures import Executor
from pathlib import Path

from ckpttool.execution.cluster import Cluster
from ckpttool.execution.copy import CopyOptions
from ckpttool.execution.executors import RunOptions, default_jobs, is_cluster, split_engine_name
from ckpttool.formats import get_format
from ckpttool.model.plan import Plan
from ckpttool.problems import Diagnostic, PlanError
from ckpttool.wording import format_bytes

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
        For `ckpttool.execute`; the default if the memory is not limited.

    Raises
    ------
    PlanError
        The memory is too small; the error names the least that works.
    """
    max_bytes, engine = options.max_memory_bytes, options.engine
    if max_bytes is None:
        return CopyOptions()
    kind, rest = split_engine_name(engine)
    if is_cluster(engine):
        workers = executor.threads if isinstance(executor, Cluster) else 1
        base_bytes = PROCESS_BYTES if kind == "mpi" else DASK_BYTES
        fewer = "fewer threads in each worker"
    else:
        workers = 1 if kind == "inline" else int(rest or default_jobs())
        base_bytes = peak_bytes() + (workers * PROCESS_BYTES if kind == "processes" else 0)
        fewer = "fewer workers"
    tensors = 0 if plan is None else max(map(len, plan.headers.values()), default=0)
    needed = RESERVE_BYTES + tensors * HEADER_BYTES + base_bytes
    if plan is not None:
        needed += get_format(plan.target.format).memory_bytes(tensors)
    needed += workers * IN_FLIGHT * MIN_PIECES * PIECE_BYTES
    least = needed + workers * 2 * MIN_BAND_BYTES
    if max_bytes < least:
        message = f"--max-memory {format_bytes(max_bytes)} is too little for {engine}"
        hint = f"--max-memory {-(-(least + TOLERANCE) // MIB)}MiB"
        hint += f", or {fewer}" if workers > 1 else ""
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


def peak_bytes() -> int:
    """Return the peak memory of this process so far, in bytes."""
    # ru_maxrss is the last resort: it includes the memory of the parent when it forked.
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    peaks = [int(line.split()[1]) for line in lines if line.startswith("VmHWM:")]
    return 1024 * (peaks or [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss])[0]
