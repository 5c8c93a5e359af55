"""The common part of merge, split and reshard: execute a plan and report what was written."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import click

import ckpttool
from ckpttool.cli import report
from ckpttool.cli.inspected_tables import print_largest
from ckpttool.cli.options import DEBUG, STOPPER
from ckpttool.cli.progress import show_progress
from ckpttool.cli.signals import Stopped
from ckpttool.cli.tables import print_table
from ckpttool.cli.text import echo
from ckpttool.model.strategy import count

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from ckpttool.cli.signals import Stopper
    from ckpttool.formats.stopping import OpenProgress
    from ckpttool.model.plan import Plan
    from ckpttool.transaction.manifest import Written
    from ckpttool.transaction.resume import Destination


def convert(
    make_plan: Callable[[Executor, OpenProgress], tuple[Plan, Destination]],
    engine: str,
    max_memory: int | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Make a plan, carry it out, and report.

    Parameters
    ----------
    make_plan
        Receives an executor on this host, which compares contents, and a progress function.
    engine
        Name of the engine; see `ckpttool.open_engine`.
    max_memory
        Limit of memory in bytes; None for no limit.
    as_json, quiet
        How to report.
    """
    from ckpttool.run.engines import is_cluster
    from ckpttool.run.memory import fit_memory

    def open_progress(nbytes: int) -> AbstractContextManager[Callable[[int], None]]:
        return show_progress("reading what is kept", nbytes, quiet or as_json)

    started = time.perf_counter()
    if not click.get_current_context().meta.get(DEBUG):
        logging.disable()  # libraries that reach a cluster repeat what our errors say
    with ckpttool.open_engine(engine) as executor:
        if is_cluster(engine):
            with ckpttool.open_engine("threads") as here:
                plan, destination = make_plan(here, open_progress)
        else:
            plan, destination = make_plan(executor, open_progress)
        mine = plan.limited_to(destination.ranks)
        sizes = None if max_memory is None else fit_memory(max_memory, engine, executor, mine)
        report.print_notes((*plan.notes, *destination.notes), quiet)
        total = sum(mine.sizes.values())
        stopper: Stopper = click.get_current_context().meta[STOPPER]
        with show_progress("writing", total, quiet or as_json) as on_progress, stopper.deferring():
            try:
                written = ckpttool.execute(
                    plan,
                    destination,
                    executor,
                    options=sizes,
                    on_progress=on_progress,
                    check=stopper.check,
                )
            except Stopped as stopped:
                stopped.remedy = _remedy(destination.count_kept(plan), len(destination.ranks))
                raise
    seconds = time.perf_counter() - started
    document = report.describe_run(plan, destination, written, seconds)
    if as_json:
        report.print_json(document)
    else:
        _print_written(plan, destination, written, seconds)


def _print_written(
    plan: Plan, destination: Destination, written: Sequence[Written], seconds: float
) -> None:
    """Print the outputs, and how many of them an earlier run had written."""
    rows = [
        (out.path, out.format, str(out.tensors), report.format_bytes(out.nbytes)) for out in written
    ]
    rows += [
        (document.path, document.kind, "", report.format_bytes(len(document.data)))
        for document in report.documents_of(plan, destination)
    ]
    kept = sum(out.is_kept for out in written)
    if rows:  # a part may have none, as a note says
        title = "outputs" if kept else "wrote"
        print_table(title, ("path", "format", "tensors>", "size>"), rows)
        print_largest(report.describe_largest(plan))
    nbytes = sum(out.nbytes for out in written)
    of_step = f", step {plan.catalog.step}" if plan.catalog.step else ""
    part = destination.part
    of_part = f", part {part.number}/{part.count}" if part else ""
    of_kept = f" ({kept} kept, {len(written) - kept} written)" if kept else ""
    echo(
        f"{count(len(written), 'file')}, {report.format_bytes(nbytes)}"
        f"{of_kept} in {seconds:.2f} s{of_step}{of_part}"
    )
    words = {"followed": "cut like their parameters", "full": "in full", "dropped": "left out"}
    found = [
        f"{tensors} {words[kind]} ({report.format_bytes(nbytes)})"
        for kind, (tensors, nbytes) in plan.not_listed.sizes.items()
        if tensors
    ]
    if found:
        echo(f"not in the target strategy: {', '.join(found)}")


def _remedy(kept: int, outputs: int) -> str:
    """Return the advice for a stopped run of whose outputs ``kept`` are complete."""
    if not kept:
        return "; nothing is complete yet: run it again"
    done = f"{kept} of {outputs} outputs {'is' if kept == 1 else 'are'} complete"
    return f"; {done}: the same command with --resume goes on from there"
