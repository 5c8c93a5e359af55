"""Say what a merge, split or reshard would do: its decisions, its tasks and what they take.

Everything up to the first write is that of the run: the source is read and checked, the target is
planned, the destination is inspected.  Then the tasks of the run are counted, not filled.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from ckpttool.concurrency import OpenProgress, no_progress
from ckpttool.execution import task_costs
from ckpttool.execution.executors import RunOptions, is_cluster, open_engine
from ckpttool.execution.memory import estimate_peak, fit_memory
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
    from ckpttool.problems import Diagnostic
    from ckpttool.transaction.resume import Assignment


def estimate(
    make_plan: Callable[..., tuple[Plan, Assignment]],
    run: RunOptions,
    *,
    open_progress: OpenProgress = no_progress,
    on_notes: Callable[[Sequence[Diagnostic]], None] = lambda notes: None,
) -> Conversion:
    """Make a plan as `ckpttool.operations.run.convert` does, and say what it takes.

    Nothing is created, locked or written.  No cluster is needed: contents are read on this host,
    and the memory is that of a worker.

    Parameters
    ----------
    make_plan, run, open_progress, on_notes
        As for a conversion.

    Raises
    ------
    FormatError, StrategyError, PlanError
        All problems that the run would report before it writes, in one error.
    """
    started = time.perf_counter()
    with open_engine("threads" if is_cluster(run.engine) else run.engine) as executor:
        counting = CountingExecutor(executor)
        plan, assignment = make_plan(executor=counting, open_progress=open_progress)
    mine = plan.limited_to(assignment.ranks)
    sizes = fit_memory(run, None, mine)
    on_notes((*plan.notes, *assignment.notes))
    before = peak_bytes()
    rest = [rank for rank in assignment.ranks if rank not in assignment.kept_ranks]
    with open_progress(0, "counting"):
        work = survey(plan, rest, sizes, by_file=is_cluster(run.engine))
    outputs = _outputs(mine, assignment, work.sizes)
    written = {plan.target.paths[rank]: nbytes for rank, nbytes in work.sizes.items()}
    of_headers = sum(map(_header_reads, plan.inputs), Reads())
    has_documents = assignment.part is None and not assignment.is_finished
    documents = plan.documents if has_documents else ()
    peak = estimate_peak(run, mine, before, work)
    takes = DryRun(
        ReadsOfRun(of_headers, counting.reads, work.reads, work.over_read),
        WritesOfRun(
            sum(work.sizes.values()) - work.written,
            work.written,
            sum(len(document.data) for document in documents),
        ),
        work.tasks,
        tuple(_supply(supply, bool(plan.weights)) for supply in work.supplies),
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
    """Return the outputs as the run would report them; ``sizes`` are those of the new ones."""
    format = plan.target.format
    tensors = {rank: len(metas) for ranks, metas in plan.headers.items() for rank in ranks}
    kept = {assignment.outputs[name]: stamp.nbytes for name, stamp in assignment.kept.items()}
    nbytes = {**kept, **sizes}
    return [
        Written(rank, path, format, nbytes[rank], tensors[rank], rank in kept)
        for rank, path in sorted(plan.target.paths.items())
    ]
