"""The stages of a run, from what a person names to complete files.

`convert` runs merge, split, reshard, convert and average: load, look, plan, preflight, report all
problems, execute.  These differ only in the `Job` that `load_job` makes of an `Order`.  A dry run
ends earlier in the same sequence, so it reports what the run would report.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeAlias

from msgspec import Struct

from ckpttool.concurrency import InlineExecutor, OpenCount, OpenProgress, no_count, no_progress
from ckpttool.execution.execute import execute
from ckpttool.execution.executors import RunOptions, is_cluster, open_engine
from ckpttool.execution.memory import fit_memory
from ckpttool.operations.conversion import Conversion, describe_run
from ckpttool.operations.jobs import Order, load_job, slices_of_ranks
from ckpttool.operations.look import look
from ckpttool.operations.plans import files_to_read, plan_outputs, raise_problems
from ckpttool.planning.preflight import preflight
from ckpttool.problems import Diagnostics
from ckpttool.transaction.resume import Assignment
from ckpttool.transaction.waiting import wait_while_busy

if TYPE_CHECKING:
    from ckpttool.model.plan import Plan
    from ckpttool.problems import Diagnostic

Until: TypeAlias = Literal["planned", "counted", "written"]


class Watch(Struct, frozen=True):
    """A watcher of a run, which may end it.

    Attributes
    ----------
    open_count, open_progress
        Show the phases.
    on_notes
        Called with the notes of the plan before anything is written, and with what only shows when
        the run begins.
    executing
        Returns a context in which the plan is executed.
    check
        See `ckpttool.execute`.
    """

    open_count: OpenCount = no_count
    open_progress: OpenProgress = no_progress
    on_notes: Callable[[Sequence[Diagnostic]], None] = lambda notes: None
    executing: Callable[[Assignment], AbstractContextManager[object]] = nullcontext
    check: Callable[[], None] = lambda: None


def convert(
    order: Order,
    run: RunOptions,
    watch: Watch = Watch(),
    until: Until = "written",
    reader: Executor | None = None,
) -> Conversion:
    """Merge, split, reshard, convert or average, as ordered.

    All problems are raised as one error before the first byte is written.  ``until`` ends the story
    earlier: when the outputs are ``"planned"``, or when what the run would do is ``"counted"``.
    ``reader`` reads contents where they decide; by default an engine on this host does.
    """
    late: list[Diagnostic] = []
    show, output = watch.open_progress, order.output
    job = load_job(order, watch.open_count)

    def note_late(note: Diagnostic) -> None:
        late.append(note)
        watch.on_notes([note])

    def attempt() -> Conversion:
        started = time.perf_counter()
        needed = slices_of_ranks(job.target, output, order.resolve.tensors)
        see = partial(look, executor=local, crc=output.crc, find_needed=needed, open_progress=show)
        strict = order.resolve.strict
        sights = [see(source, Diagnostics(strict=strict)) for source in job.sources]
        plan, diagnostics = plan_outputs(job, sights, show)
        read = [*files_to_read(job, sights)]
        assignment, of_target = preflight(job.target, plan, job.catalogs, read, output, local, show)
        raise_problems(sights, diagnostics, of_target)
        assert plan is not None, "else there are problems"
        assert assignment is not None, "there is a plan"
        sights.clear()  # the copy needs the plan alone, and these take as much memory
        if until == "planned":
            return describe_run(plan, assignment, (), time.perf_counter() - started)
        mine = plan.limited_to(assignment.ranks)
        limits = fit_memory(run, executor, mine)
        watch.on_notes((*plan.notes, *assignment.notes))
        if until == "counted":
            from ckpttool.operations.estimate import count_work

            return count_work(plan, assignment, run, limits, local, show, started)
        total = sum(mine.sizes.values())
        with show(total, "writing") as on_progress, watch.executing(assignment):
            written = execute(
                *(plan, assignment, executor),
                options=limits,
                on_progress=on_progress,
                on_note=note_late,
                check=watch.check,
            )
        return describe_run(plan, assignment, written, time.perf_counter() - started, late)

    with _open_engines(run, until, reader) as (executor, local):
        seconds = output.wait_seconds if until == "written" else None
        return wait_while_busy(attempt, seconds, open_progress=show, on_note=note_late)


@contextmanager
def _open_engines(
    run: RunOptions, until: Until, reader: Executor | None
) -> Iterator[tuple[Executor, Executor]]:
    """Open the engine that copies, and that on this host which reads contents."""
    if until == "planned":
        local = reader or InlineExecutor()
        yield local, local
    elif until == "counted":
        from ckpttool.storage.counting import CountingExecutor

        with open_engine("threads" if is_cluster(run.engine) else run.engine) as executor:
            yield executor, CountingExecutor(executor)
    else:
        with open_engine(run.engine) as executor:
            is_here = not is_cluster(run.engine)
            with nullcontext(executor) if is_here else open_engine("threads") as local:
                yield executor, local


def make_plan(
    order: Order, executor: Executor | None = None, open_progress: OpenProgress = no_progress
) -> tuple[Plan, Assignment]:
    """Return the plan of an order, and what this run writes of it, without what that would take."""
    watch = Watch(open_progress=open_progress)
    done = convert(order, RunOptions("inline"), watch, "planned", executor)
    return done.planned, done.assignment
