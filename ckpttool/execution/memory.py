"""Choose sizes of bands and tasks that fit a given amount of memory."""

from __future__ import annotations

import resource
from concurrent.futures import Executor
from pathlib import Path

from ckpttool.errors import PlanError
from ckpttool.execution.cluster import Cluster
from ckpttool.execution.execute import CopyOptions
from ckpttool.execution.executors import RunOptions, default_jobs, is_cluster, read_word
from ckpttool.model.diagnostics import Diagnostic
from ckpttool.model.plan import Plan

MIB = 1 << 20
SMALLEST_BAND = 64 << 10  # below it system calls take longer than what they copy
RESERVE_BYTES = 10 * MIB  # for headers that are read back, hashes, and open files
PIECE_BYTES = 512  # of a piece in a task, about
FEWEST_PIECES = 512  # of a task
HEADER_BYTES = 2 << 10  # of a tensor in the header of an output that is made, about
HDF5_BYTES = 6 << 10  # more, in the HDF5 library, whose cache grows with them
HDF5_CACHE_BYTES = 40 * MIB  # up to this
TENSOR_BYTES = 1 << 10  # of a tensor of an output that is being written, less
TOLERANCE = 2 * MIB  # what a process has had before the plan is not the same each time
IN_FLIGHT = 4  # tasks for each worker: what it does, and what comes next
PROCESS_BYTES = 48 * MIB  # of a worker that is a process of its own, before its first task
DASK_BYTES = 64 * MIB  # of one that has Dask in memory, too


def fit_memory(
    options: RunOptions, executor: Executor | None = None, plan: Plan | None = None
) -> CopyOptions:
    """Return what keeps a run within its memory, once its plan is made.

    Parameters
    ----------
    options
        The engine, and its memory: resident memory as the kernel counts it, of all processes on
        this host; of each worker of a cluster.  The page cache is not part of it.
    executor
        From `ckpttool.open_engine`: the workers of a cluster may have several threads.
    plan
        From `ckpttool.plan_merge` and the like: headers of many tensors take memory, too.

    Returns
    -------
    CopyOptions
        For `ckpttool.execute`; the default if the memory is not limited.

    Raises
    ------
    PlanError
        It is too little; says the least that works.
    """
    max_bytes, engine = options.max_memory_bytes, options.engine
    if max_bytes is None:
        return CopyOptions()
    kind, rest = read_word(engine)
    if is_cluster(engine):
        workers = executor.threads if isinstance(executor, Cluster) else 1
        held, fewer = PROCESS_BYTES if kind == "mpi" else DASK_BYTES, "fewer threads in each worker"
    else:
        workers = 1 if kind == "inline" else int(rest or default_jobs())
        held, fewer = peak_bytes(), "fewer workers"
        held += workers * PROCESS_BYTES if kind == "processes" else 0
    tensors = 0 if plan is None else max(map(len, plan.headers.values()), default=0)
    needed = RESERVE_BYTES + tensors * HEADER_BYTES + held
    if plan is not None and plan.target.format == "hdf5":
        needed += min(tensors * HDF5_BYTES, HDF5_CACHE_BYTES)
    needed += workers * IN_FLIGHT * FEWEST_PIECES * PIECE_BYTES
    least = needed + workers * 2 * SMALLEST_BAND
    if max_bytes < least:
        advice = f"; {fewer} take less" if workers > 1 else ""
        given = f"{max_bytes / MIB:.4g} MiB" if max_bytes >= MIB else f"{max_bytes} bytes"
        reason = f"{given} of memory are too little: "
        reason += f"{-(-(least + TOLERANCE) // MIB)} MiB are the least"
        raise PlanError(
            [Diagnostic("memory", f"{reason} that works for this, with {engine}{advice}")]
        )
    usual = CopyOptions()
    spare = (max_bytes - needed) // workers
    band_bytes = min(usual.band_bytes, spare // 2 // 4096 * 4096)
    over = (spare - 2 * band_bytes) // 2  # for tasks, and for outputs side by side
    pieces = FEWEST_PIECES + over // (IN_FLIGHT * PIECE_BYTES)
    side_by_side = tensors + workers * over // TENSOR_BYTES
    return CopyOptions(
        band_bytes,
        max_in_flight=IN_FLIGHT * workers,
        task_pieces=min(usual.task_pieces, pieces),
        group_tensors=min(usual.group_tensors, side_by_side),
    )


def peak_bytes() -> int:
    """Return the peak memory of this process so far, in bytes."""
    # Not ru_maxrss where it can be helped: it counts what the parent had when it forked.
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    peaks = [int(line.split()[1]) for line in lines if line.startswith("VmHWM:")]
    return 1024 * (peaks or [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss])[0]
