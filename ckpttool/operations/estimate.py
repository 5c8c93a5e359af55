"""Say what a merge, split or reshard would do: its decisions, its tasks and what they take.

Everything up to the first write is that of the run, see `ckpttool.operations.run.convert`.  Then
the tasks of the run are counted, not filled.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from typing import TYPE_CHECKING

from ckpttool.concurrency import OpenProgress
from ckpttool.execution import task_costs
from ckpttool.execution.copy import CopyOptions
from ckpttool.execution.executors import RunOptions, is_cluster
from ckpttool.execution.memory import estimate_peak
from ckpttool.execution.task_costs import survey
from ckpttool.model.tensors import Reads
from ckpttool.operations.conversion import (
    Conversion,
    DryRun,
    Memory,
    Need,
    ReadsOfRun,
    Supply,
    WritesOfRun,
    describe_run,
)
from ckpttool.planning.preflight import find_space
from ckpttool.storage.counting import CountingExecutor
from ckpttool.system import peak_bytes
from ckpttool.transaction.sealed_files import Written

if TYPE_CHECKING:
    from ckpttool.model.catalog import Catalog
    from ckpttool.model.plan import Plan
    from ckpttool.transaction.resume import Assignment


def count_work(
    plan: Plan,
    assignment: Assignment,
    run: RunOptions,
    limits: CopyOptions,
    executor: Executor,
    open_progress: OpenProgress,
    started: float,
) -> Conversion:
    """Count what a run would do, without writing.

    No cluster is needed: the memory is that of a worker.

    Parameters
    ----------
    limits
        How much is done at a time, from `fit_memory`.
    executor
        A `CountingExecutor` that has read contents for the plan.
    started
        When the plan was begun, by `time.perf_counter`.
    """
    assert isinstance(executor, CountingExecutor), "it counts what is read"
    mine, before = plan.limited_to(assignment.ranks), peak_bytes()
    ranks = [rank for rank in assignment.ranks if rank not in assignment.kept_ranks]
    ranks = [] if plan.target.is_virtual else ranks  # nothing is copied
    by_file = is_cluster(run.engine)  # which writes half-written files from the start
    left = {} if by_file or not assignment.options.resume else assignment.half_written
    half = {
        assignment.outputs[name]: frozenset(
            unit[:2] for it in groups for unit in it.read_units().hashes
        )
        for name, groups in left.items()
    }
    with open_progress(0, "counting"):
        work = survey(plan, ranks, limits, by_file=by_file, half_written=half)
    sizes = work.sizes
    if plan.target.is_virtual:
        from ckpttool.execution.virtual import count_virtual

        sizes = {0: count_virtual(plan)}
    outputs = _outputs(mine, assignment, sizes)
    written = {plan.target.paths[rank]: nbytes for rank, nbytes in sizes.items()}
    of_headers = sum(map(_header_reads, plan.inputs), Reads())
    has_documents = assignment.part is None and not assignment.is_finished
    documents = plan.documents if has_documents else ()
    peak = estimate_peak(run, mine, before, work)
    takes = DryRun(
        ReadsOfRun(of_headers, executor.reads, work.reads, work.over_read),
        WritesOfRun(
            sum(sizes.values()) - work.written,
            work.written,
            sum(len(document.data) for document in documents),
        ),
        work.tasks,
        tuple(_supply(supply, len(plan.inputs) > 1) for supply in work.supplies),
        Memory(peak.nbytes, peak.engine),
        tuple(find_space(written)),
    )
    seconds = time.perf_counter() - started
    return describe_run(plan, assignment, outputs, seconds, dry_run=takes)


def _supply(supply: task_costs.Supply, has_inputs: bool) -> Supply:
    return Supply(
        supply.ranks,
        tuple(
            Need(ranks=need.ranks, input=need.input if has_inputs else None, nbytes=need.nbytes)
            for need in supply.needs
        ),
    )


def _header_reads(catalog: Catalog) -> Reads:
    return sum((file.reads for file in catalog.files.values()), catalog.reads)


def _outputs(plan: Plan, assignment: Assignment, sizes: Mapping[int, int]) -> Sequence[Written]:
    format = plan.target.format
    tensors = {rank: len(metas) for ranks, metas in plan.headers.items() for rank in ranks}
    kept = {assignment.outputs[name]: stamp.nbytes for name, stamp in assignment.kept.items()}
    nbytes = {**kept, **sizes}
    return [
        Written(rank, path, format, nbytes[rank], tensors[rank], rank in kept)
        for rank, path in sorted(plan.target.paths.items())
    ]
