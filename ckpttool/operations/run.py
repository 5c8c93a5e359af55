"""The stages of a run, from what a person names to complete files.

`convert` runs merge, split, reshard, convert and average: load, look, plan, preflight, report all
problems, execute.  These differ only in the `Job` that `load_job` makes of an `Order`.  A dry run
and the functions that only plan end earlier in the same sequence, so they report what the run would
report.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeAlias

from msgspec import Struct

from ckpttool.checkpoint.checkpoint import ResolveOptions
from ckpttool.concurrency import InlineExecutor, OpenCount, OpenProgress, no_count, no_progress
from ckpttool.execution.execute import execute
from ckpttool.execution.executors import RunOptions, is_cluster, open_engine
from ckpttool.execution.memory import fit_memory
from ckpttool.operations.conversion import Conversion, describe_run
from ckpttool.operations.jobs import Order, load_job, slices_of_ranks
from ckpttool.operations.load import AverageInput, Mean, Source
from ckpttool.operations.look import look
from ckpttool.operations.plans import files_to_read, plan_outputs, raise_problems
from ckpttool.planning.preflight import preflight
from ckpttool.problems import Diagnostics
from ckpttool.transaction.resume import Assignment, OutputOptions
from ckpttool.transaction.waiting import wait_while_busy

if TYPE_CHECKING:
    from ckpttool.discovery.scan import CheckpointFiles
    from ckpttool.model.plan import Plan
    from ckpttool.operations.load import StrategySource
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


def _planned(
    order: Order, executor: Executor | None, open_progress: OpenProgress
) -> tuple[Plan, Assignment]:
    watch = Watch(open_progress=open_progress)
    done = convert(order, RunOptions("inline"), watch, "planned", executor)
    return done.planned, done.assignment


def plan_merge(
    catalog: CheckpointFiles,
    strategy: StrategySource | None,
    path: str | os.PathLike[str],
    resolve_options: ResolveOptions = ResolveOptions(),
    output_options: OutputOptions = OutputOptions(),
    *,
    executor: Executor | None = None,
    open_progress: OpenProgress = no_progress,
) -> tuple[Plan, Assignment]:
    """Plan a merge into one file, or into numbered files with an index; for `execute`.

    Parameters
    ----------
    catalog
        The source: a path, or what `scan` returns.
    strategy
        Its strategy files, or what `read_strategy` returns.  None for a source that holds full
        tensors, for a checkpoint that describes itself, and for replicated ranks.
    path
        The output file; a folder with ``max_shard_bytes``.
    resolve_options
        How the source is resolved to full tensors.
    output_options
        Options of the outputs.
    executor
        Reads contents where they decide; by default the caller's own thread.
    open_progress
        Called with the number of bytes to read if outputs of an earlier run are verified.  It
        returns a context manager, which returns a function to call with the bytes read since the
        last call.

    Returns
    -------
    plan, assignment
        The outputs, and which of them this run writes, keeps and may replace.

    Raises
    ------
    FormatError, PlanError
        All problems, in one error.
    ValueError
        An option applies to outputs for ranks only.
    """
    order = Order(
        "merge",
        [Source.of(catalog, strategy)],
        os.fspath(path),
        (),
        resolve_options,
        output_options,
    )
    return _planned(order, executor, open_progress)


def plan_split(
    catalog: CheckpointFiles,
    strategy: StrategySource,
    folder: str | os.PathLike[str],
    resolve_options: ResolveOptions = ResolveOptions(),
    output_options: OutputOptions = OutputOptions(),
    *,
    executor: Executor | None = None,
    open_progress: OpenProgress = no_progress,
) -> tuple[Plan, Assignment]:
    """Plan to shard a full checkpoint for the ranks of ``strategy``; for `execute`.

    Parameters
    ----------
    catalog
        The source, a path or what `scan` returns: one file, several with an index, a folder with
        the file of one rank, replicated ranks, or a checkpoint that describes itself.
    strategy
        Layouts of the target, or their files.
    folder
        The output folder, which will hold the rank folders.
    resolve_options
        How the source is resolved; ``unlisted`` also applies to tensors that may be slices of one
        rank.
    output_options
        Options of the outputs.
    executor, open_progress
        As for `plan_merge`.

    Raises
    ------
    FormatError, StrategyError, PlanError
        All problems, in one error.
    ValueError
        An option applies to merged checkpoints only.
    """
    order = Order(
        "split", [Source.of(catalog)], os.fspath(folder), strategy, resolve_options, output_options
    )
    return _planned(order, executor, open_progress)


def plan_reshard(
    catalog: CheckpointFiles,
    src_strategy: StrategySource | None,
    dst_strategy: StrategySource,
    folder: str | os.PathLike[str],
    resolve_options: ResolveOptions = ResolveOptions(),
    output_options: OutputOptions = OutputOptions(),
    *,
    executor: Executor | None = None,
    open_progress: OpenProgress = no_progress,
) -> tuple[Plan, Assignment]:
    """Plan to shard a checkpoint for the ranks of ``dst_strategy``; for `execute`.

    Parameters
    ----------
    catalog, src_strategy
        The source and its layouts, or their paths; None for a checkpoint that describes itself.
    dst_strategy
        Layouts of the target, or their files.
    folder, output_options
        As for `plan_split`.
    resolve_options, executor, open_progress
        As for `plan_merge`.

    Raises
    ------
    FormatError, StrategyError, PlanError
        All problems, in one error.
    ValueError
        An option applies to merged checkpoints only.
    """
    source, path = Source.of(catalog, src_strategy), os.fspath(folder)
    options = resolve_options, output_options
    order = Order("reshard", [source], path, dst_strategy, *options)
    return _planned(order, executor, open_progress)


def plan_average(
    inputs: Sequence[AverageInput | tuple[CheckpointFiles, StrategySource | None, float]],
    path: str | os.PathLike[str],
    dst_strategy: StrategySource | None = None,
    resolve_options: ResolveOptions = ResolveOptions(),
    output_options: OutputOptions = OutputOptions(),
    *,
    executor: Executor | None = None,
    open_progress: OpenProgress = no_progress,
) -> tuple[Plan, Assignment]:
    """Plan the weighted mean of several checkpoints; for `execute`.

    Weights of the model in floating point are averaged.  All else is that of the last input.

    Parameters
    ----------
    inputs
        The checkpoints, at least two, each with its strategy and its weight; the sum of the weights
        is 1.
    path
        The output file, as for `plan_merge`; the folder of rank files with ``dst_strategy``.
    dst_strategy
        Layouts of the target; None for full tensors.
    resolve_options, output_options, executor, open_progress
        As for `plan_merge`; for a target as for `plan_reshard`.

    Raises
    ------
    FormatError, StrategyError, PlanError
        All problems, in one error.
    ValueError
        An option applies to other outputs only.
    """
    sources = [Source.of(catalog, strategy) for catalog, strategy, _ in inputs]
    path, mean = os.fspath(path), Mean([weight for *_, weight in inputs])
    order = Order(
        "average", sources, path, dst_strategy, resolve_options, output_options, mean=mean
    )
    return _planned(order, executor, open_progress)


def plan_convert(
    catalog: CheckpointFiles,
    path: str | os.PathLike[str],
    resolve_options: ResolveOptions = ResolveOptions(),
    output_options: OutputOptions = OutputOptions(),
    *,
    executor: Executor | None = None,
    open_progress: OpenProgress = no_progress,
) -> tuple[Plan, Assignment]:
    """Plan to write each file of a checkpoint again, in another format; for `execute`.

    Parameters
    ----------
    catalog
        The source: a path, or what `scan` returns.
    path
        The output file, or the folder for the files of ranks, or for numbered files.  Files of
        ranks keep their names, but for the suffix.
    resolve_options
        ``strict``, ``manifest`` and ``tensors``; no tensor is joined, so nothing else applies.
    output_options
        Options of the outputs.  The default format of a folder is that of the source.
    executor, open_progress
        As for `plan_merge`.

    Raises
    ------
    FormatError, PlanError
        All problems, in one error.
    ValueError
        An option applies only where tensors are joined, or to outputs of a strategy.
    """
    order = Order(
        "convert", [Source.of(catalog)], os.fspath(path), (), resolve_options, output_options
    )
    return _planned(order, executor, open_progress)
