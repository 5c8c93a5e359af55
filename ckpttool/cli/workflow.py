"""The steps that commands share: load the inputs, execute the plan, report."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ckpttool.cli import tables
from ckpttool.cli.options import SIGNALS, ReportOptions, Side
from ckpttool.cli.progress import open_progress, show_count
from ckpttool.cli.signals import Terminated
from ckpttool.formats import get_format
from ckpttool.problems import Diagnostics, raise_all, severities
from ckpttool.wording import count, format_bytes

if TYPE_CHECKING:
    from ckpttool.cli.average import Inputs
    from ckpttool.cli.signals import SignalGuard
    from ckpttool.execution.executors import RunOptions
    from ckpttool.model.plan import Plan
    from ckpttool.model.strategy import Strategy
    from ckpttool.operations.conversion import Averaged, Conversion
    from ckpttool.operations.load import Loaded, LoadedSides
    from ckpttool.planning.averaging import AverageInput
    from ckpttool.problems import Command, Diagnostic
    from ckpttool.transaction.resume import Assignment


def load(
    source: Side,
    report: ReportOptions,
    dst_strategy: tuple[str, ...] = (),
    *,
    find_strategy: bool = True,
    command: Command = "convert",
    diagnostics: Diagnostics | None = None,
) -> Loaded:
    """Read the catalog and the strategies of a command; see `ckpttool.operations.load.load`."""
    from ckpttool.operations import load as loading

    return loading.load(
        loading.Source(source.path, source.strategy_files, source.options),
        dst_strategy,
        find_strategy=find_strategy,
        command=command,
        diagnostics=diagnostics,
        open_count=partial(show_count, quiet=report.hides_progress),
    )


def load_average(
    inputs: Inputs,
    dst_strategy: tuple[str, ...],
    report: ReportOptions,
    run: RunOptions,
    replicated: bool,
) -> tuple[list[AverageInput], Strategy | None]:
    """Read the inputs of average, and the target; see `ckpttool.operations.average_inputs`."""
    from ckpttool.operations import average_inputs as average
    from ckpttool.operations import load as loading
    from ckpttool.strategy_files.reader import read_strategy

    sides = [side.for_engine(run) for side in inputs.sides]
    attempt = loading.Attempts()
    target = attempt("-d", partial(read_strategy, dst_strategy)) if dst_strategy else None
    read = partial(
        average.load_average,
        [loading.Source(side.path, side.strategy_files, side.options) for side in sides],
        inputs.weights,
        inputs.shared,
        steps=inputs.steps,
        normalize=inputs.normalize,
        replicated=replicated,
        open_count=partial(show_count, quiet=report.hides_progress),
    )
    sources = attempt("inputs", read)
    raise_all(attempt.errors.values())
    assert sources is not None, "its error was raised"
    return sources, target


def load_sides(a: Side, b: Side, report: ReportOptions, replicated: bool) -> LoadedSides:
    """Read both sides of diff; see `ckpttool.operations.load.load_sides`."""
    from ckpttool.operations import load as loading

    return loading.load_sides(
        *(loading.Source(side.path, side.strategy_files, side.options) for side in (a, b)),
        replicated=replicated,
        open_count=partial(show_count, quiet=report.hides_progress),
    )


def convert(
    make_plan: Callable[..., tuple[Plan, Assignment]],
    run: RunOptions,
    report: ReportOptions,
    wait_seconds: float | None,
) -> None:
    """Make a plan, execute it, and report; in a dry run report what it would do.

    Parameters
    ----------
    make_plan
        A function like `ckpttool.plan_merge`, which lacks ``executor`` and ``open_progress`` only.
    run
        The engine and its limit of memory.
    report
        How to report.
    wait_seconds
        How long to wait for a run that is writing there; a dry run does not wait.
    """
    from ckpttool.operations import run as conversion

    if not report.debug:
        logging.disable()  # the libraries of a cluster also log the errors that we raise
    show = open_progress("reading what is kept", report.hides_progress)

    def print_notes(notes: Sequence[Diagnostic]) -> None:
        tables.print_notes(notes, severities("convert"), report.quiet)

    if report.dry_run:
        from ckpttool.cli.dry_run import report_estimate
        from ckpttool.operations.estimate import estimate

        planned = estimate(make_plan, run, open_progress=show, on_notes=print_notes)
        outputs = _outputs_text(planned, ("would write", "would keep"))
        averaged = "" if planned.averaged is None else averaged_text(planned.averaged)
        report_estimate(planned, f"{outputs}, from {source_text(planned)}", report, averaged)
        return
    guard: SignalGuard = click.get_current_context().meta[SIGNALS]
    done = conversion.convert(
        make_plan,
        run,
        open_progress=show,
        on_notes=print_notes,
        executing=partial(_stoppable, guard),
        check=guard.check,
        wait_seconds=wait_seconds,
    )
    if report.as_json:
        tables.print_json(done.to_dict())
    elif not report.quiet:
        _print(done, report.verbose)


@contextmanager
def _stoppable(guard: SignalGuard, assignment: Assignment) -> Iterator[None]:
    """End a run by a signal where it is safe; say then what is complete."""
    with guard.deferring():
        try:
            yield
        except Terminated as stopped:
            complete, outputs = assignment.count_complete(), len(assignment.ranks)
            stopped.complete = f"{complete} of {count(outputs, 'output')} complete"
            stopped.hint = assignment.resume_hint if complete else "the same command"
            raise


def _print(done: Conversion, verbose: bool) -> None:
    """Print the largest sharded tensors and, last, what was written; with ``verbose`` each file."""
    documents = done.documents
    if verbose:
        outputs = [(it.path, it.format, str(it.tensors), it.nbytes) for it in done.outputs]
        sidecars = [(it.path, it.kind, "", len(it.data)) for it in documents]
        rows = ((*row, format_bytes(nbytes)) for *row, nbytes in (*outputs, *sidecars))
        tables.print_table("outputs", ("path", "format", "tensors>", "size>"), rows)
    if done.shapes_to_check:
        tables.print_text(
            f"Check the full shapes, which only the strategy shows: {done.shapes_to_check}"
        )
    if done.cast is not None:
        tables.print_text(f"Cast {done.cast}")
    if done.averaged is not None:
        tables.print_text(f"Averaged {averaged_text(done.averaged)}")
    summary = f"{_outputs_text(done)} in {done.seconds:.2f} s, from {source_text(done)}"
    if done.manifest and not done.is_one_file:
        named = [f"manifest {done.manifest}", *done.beside]
        summary += f"; {', '.join(named)}"
    tables.print_text(summary)


def source_text(done: Conversion) -> str:
    """Return what was read, for people."""
    if done.averaged is not None:
        return count(len(done.averaged.inputs), "checkpoint")
    (catalog,) = done.planned.inputs
    files = count(len(catalog.files), "file" if catalog.is_merged else "rank")
    return f"{files} at step {catalog.step}" if catalog.step else files


def averaged_text(mean: Averaged) -> str:
    """Return the weights of the inputs of a mean, and what is that of the last, for people."""
    weights = [
        f"{source.weight:.4g} of {source.path}" + (f" at step {source.step}" if source.step else "")
        for source in mean.inputs
    ]
    means = count(mean.tensors, "tensor")
    return f"{means}: {', '.join(weights)}; {mean.of_last} as in the last"


def _outputs_text(done: Conversion, verbs: tuple[str, str] = ("Wrote", "Kept")) -> str:
    """Return which outputs there are, their format and size, and how many were kept."""
    part, outputs = done.assignment.part, done.outputs
    kept = sum(output.kept for output in outputs)
    verb = verbs[0 < kept == len(outputs)]
    verb += "" if part is None else f" part {part}:"
    if not outputs:
        return f"{verb} nothing"
    facts = [get_format(done.planned.target.format).word, format_bytes(done.dst_bytes)]
    paths = [Path(output.path) for output in outputs]
    if done.is_one_file:
        facts.insert(1, count(outputs[0].tensors, "tensor"))
        return f"{verb} {paths[0]} ({', '.join(facts)})"
    folders = [path.parent for path in paths]
    if not done.planned.target.is_merged and len({*folders}) == len(paths):
        paths = folders
    shown = [str(paths[0]), *(path.name for path in paths[1:])]
    names = ", ".join(shown) if len(shown) <= 3 else f"{shown[0]} ... {shown[-1]}"
    of_kept = [f"{kept} kept, {len(outputs) - kept} written"] if kept else []
    return f"{verb} {names} ({', '.join([count(len(paths), 'file'), *of_kept, *facts])})"
