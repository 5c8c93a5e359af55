"""The steps that commands share: load the inputs, execute the plan, report."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click
from msgspec.structs import replace

from ckpttool.cli import tables
from ckpttool.cli.options import SIGNALS, ReportOptions, absolute_for_cluster
from ckpttool.cli.progress import open_progress
from ckpttool.cli.signals import Terminated
from ckpttool.formats import get_format
from ckpttool.problems import severities
from ckpttool.wording import count, format_bytes

if TYPE_CHECKING:
    from ckpttool.cli.signals import SignalGuard
    from ckpttool.execution.executors import RunOptions
    from ckpttool.operations.conversion import Averaged, Conversion
    from ckpttool.operations.jobs import Order
    from ckpttool.transaction.resume import Assignment


def run_order(order: Order, run: RunOptions, report: ReportOptions) -> None:
    """Run a conversion, and report; in a dry run report what it would do.

    See `ckpttool.operations.run.convert`.
    """
    from ckpttool.operations import run as story

    if not report.debug:
        logging.disable()  # the libraries of a cluster also log the errors that we raise
    guard: SignalGuard = click.get_current_context().meta[SIGNALS]
    sources = [of._replace(src=absolute_for_cluster(str(of.src), run)) for of in order.sources]
    order = replace(order, sources=sources, path=absolute_for_cluster(order.path, run))
    watch = story.Watch(
        report.open_count,
        open_progress("reading what is kept", report.shown_progress),
        lambda notes: tables.print_notes(notes, severities("convert"), report.quiet),
        partial(_stoppable, guard),
        guard.check,
    )
    done = story.convert(order, run, watch, "counted" if report.dry_run else "written")
    if report.dry_run:
        from ckpttool.cli.dry_run import report_estimate

        outputs = _outputs_text(done, ("would write", "would keep"))
        averaged = "" if done.averaged is None else averaged_text(done.averaged)
        report_estimate(done, f"{outputs}, from {source_text(done)}", report, averaged)
    elif report.as_json:
        tables.print_json(done.to_dict())
    elif not report.quiet:
        is_sum = order.mean is not None and order.mean.normalize is None
        _print(done, report.verbose, "Added" if is_sum else "Averaged")


@contextmanager
def _stoppable(guard: SignalGuard, assignment: Assignment) -> Iterator[None]:
    """End a run by a signal where it is safe; say then what is complete."""
    with guard.deferring():
        try:
            yield
        except Terminated as stopped:
            left, outputs = assignment.seen_again(), len(assignment.ranks)
            complete = left.count_complete()
            stopped.complete = f"{complete} of {count(outputs, 'output')} complete"
            has_use = complete or left.half_written
            stopped.hint = left.resume_hint if has_use else "the same command"
            raise


def _print(done: Conversion, verbose: bool, averaged: str) -> None:
    """Print the largest sharded tensors and, last, what was written; with ``verbose`` each file."""
    documents = done.documents
    if verbose:
        outputs = [(it.path, it.format, str(it.tensors), it.nbytes) for it in done.outputs]
        sidecars = [(it.path, it.kind, "", len(it.data)) for it in documents]
        rows = ((*row, format_bytes(nbytes)) for *row, nbytes in (*outputs, *sidecars))
        tables.print_table("outputs", ("path", "format", "tensors>", "size>"), rows)
    if done.shapes_to_check:
        shapes = f"Check the full shapes, which only the strategy shows: {done.shapes_to_check}"
        tables.print_text(shapes)
    if done.cast is not None:
        tables.print_text(f"Cast {done.cast}")
    if done.averaged is not None:
        tables.print_text(f"{averaged} {averaged_text(done.averaged)}")
    summary = f"{_outputs_text(done)} in {done.seconds:.2f} s, from {source_text(done)}"
    if done.manifest and not done.is_one_file:
        named = [f"manifest {done.manifest}", *done.beside]
        summary += f"; {', '.join(named)}"
    tables.print_text(summary, color="green")


def source_text(done: Conversion) -> str:
    """Return what was read, for people."""
    if done.averaged is not None:
        return count(len(done.averaged.inputs), "checkpoint")
    (catalog,) = done.planned.checkpoints
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
