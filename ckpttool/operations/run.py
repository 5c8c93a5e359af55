"""Run merge, split and reshard: plan, execute, answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from ckpttool.concurrency import OpenProgress, no_progress
from ckpttool.execution.execute import execute
from ckpttool.execution.executors import RunOptions, is_cluster, open_engine
from ckpttool.execution.memory import fit_memory
from ckpttool.operations.conversion import Conversion, describe_run
from ckpttool.transaction.waiting import wait_while_busy

if TYPE_CHECKING:
    from ckpttool.model.plan import Plan
    from ckpttool.problems import Diagnostic
    from ckpttool.transaction.resume import Assignment
    from ckpttool.transaction.sealed_files import Written


def convert(
    make_plan: Callable[..., tuple[Plan, Assignment]],
    run: RunOptions,
    *,
    open_progress: OpenProgress = no_progress,
    on_notes: Callable[[Sequence[Diagnostic]], None] = lambda notes: None,
    executing: Callable[[Assignment], AbstractContextManager[object]] = nullcontext,
    check: Callable[[], None] = lambda: None,
    wait_seconds: float | None = None,
) -> Conversion:
    """Make a plan and execute it.

    Parameters
    ----------
    make_plan
        A function like `ckpttool.plan_merge`, which lacks ``executor`` and ``open_progress`` only.
        The executor is on this host, and compares contents.
    run
        The engine and its limit of memory.
    open_progress
        Shows the phases.
    on_notes
        Called with the notes of the plan before anything is written, and with what only shows when
        the run begins.
    executing
        Returns a context in which the plan is executed.
    check
        See `ckpttool.execute`.
    wait_seconds
        How long to wait for a run that is writing there; see `OutputOptions`.
    """
    late: list[Diagnostic] = []

    def note_late(note: Diagnostic) -> None:
        late.append(note)
        on_notes([note])

    def attempt() -> tuple[Plan, Assignment, Sequence[Written], float]:
        started = time.perf_counter()
        is_here = not is_cluster(run.engine)
        with nullcontext(executor) if is_here else open_engine("threads") as local:
            plan, assignment = make_plan(executor=local, open_progress=open_progress)
        mine = plan.limited_to(assignment.ranks)
        sizes = fit_memory(run, executor, mine)
        on_notes((*plan.notes, *assignment.notes))
        total = sum(mine.sizes.values())
        with open_progress(total, "writing") as on_progress, executing(assignment):
            written = execute(
                plan,
                assignment,
                executor,
                options=sizes,
                on_progress=on_progress,
                on_note=note_late,
                check=check,
            )
        return plan, assignment, written, time.perf_counter() - started

    with open_engine(run.engine) as executor:
        done = wait_while_busy(
            attempt, wait_seconds, open_progress=open_progress, on_note=note_late
        )
    return describe_run(*done, late)
