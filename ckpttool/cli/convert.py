"""What merge, split and reshard have in common: carry out a plan and say what was written."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

import ckpttool
from ckpttool.cli import report
from ckpttool.cli.options import DEBUG, STOPPER
from ckpttool.cli.progress import show_progress
from ckpttool.cli.signals import Stopped
from ckpttool.cli.tables import print_table

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from ckpttool.cli.signals import Stopper
    from ckpttool.model.plan import Plan


def convert(
    make_plan: Callable[[Executor], Plan],
    engine: str,
    max_memory: int | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Make a plan, carry it out, and report.

    Parameters
    ----------
    make_plan
        Gets an executor on this host, to compare contents with.
    engine
        Who does the work; see `ckpttool.open_engine`.
    max_memory
        Bytes that it may take; None for any number.
    as_json, quiet
        How to report.
    """
    from ckpttool.run.engines import is_cluster
    from ckpttool.run.memory import fit_memory
    from ckpttool.run.origin import manifest_of

    started = time.perf_counter()
    with _quiet_logs(), ckpttool.open_engine(engine) as executor:
        if is_cluster(engine):
            with ckpttool.open_engine("threads") as here:
                plan = make_plan(here)
        else:
            plan = make_plan(executor)
        sizes = None if max_memory is None else fit_memory(max_memory, engine)
        report.print_notes(plan.notes, quiet)
        total = sum(meta.nbytes for output in plan for meta in output.metas)
        stopper: Stopper = click.get_current_context().meta[STOPPER]
        with show_progress("writing", total, quiet or as_json) as on_progress, stopper.deferring():
            try:
                written = ckpttool.execute(
                    plan, executor, options=sizes, on_progress=on_progress, check=stopper.check
                )
            except Stopped as stopped:
                stopped.remedy = "; the same command with --resume goes on from there"
                raise
    seconds = time.perf_counter() - started
    document = report.describe_run(plan, written, seconds, str(manifest_of(plan)))
    if as_json:
        report.print_json(document)
        return
    print_table(
        "wrote",
        ("path", "format", "tensors>", "size>"),
        (
            *(
                (out.path, out.format, str(out.tensors), report.format_bytes(out.nbytes))
                for out in written
            ),
            *(
                (document.path, document.kind, "", report.format_bytes(len(document.data)))
                for document in plan.documents
            ),
        ),
    )
    nbytes = sum(out.nbytes for out in written)
    of_step = f", step {plan.catalog.step}" if plan.catalog.step else ""
    of_part = f", part {plan.part.number}/{plan.part.count}" if plan.part else ""
    click.echo(
        f"{len(written)} file{'s' if len(written) != 1 else ''}, {report.format_bytes(nbytes)} "
        f"in {seconds:.2f} s{of_step}{of_part}"
    )


@contextmanager
def _quiet_logs() -> Iterator[None]:
    """No messages of the libraries that reach a cluster, which tell the same, at length."""
    before = logging.root.manager.disable
    if not click.get_current_context().meta.get(DEBUG):
        logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
