"""What merge, split and reshard have in common: carry out a plan and say what was written."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TYPE_CHECKING

import click

import ckpttool
from ckpttool.cli import report
from ckpttool.cli.options import STOPPER
from ckpttool.cli.progress import show_progress

if TYPE_CHECKING:
    from ckpttool.cli.signals import Stopper
    from ckpttool.model.plan import Plan


def convert(
    make_plan: Callable[[Executor], Plan], jobs: int | None, as_json: bool, quiet: bool
) -> None:
    """Make a plan, carry it out, and report.

    Parameters
    ----------
    make_plan
        Gets the executor, to compare contents with.
    jobs
        Threads; None for the default.
    as_json, quiet
        How to report.
    """
    from ckpttool.run.engines import default_jobs

    started = time.perf_counter()
    with ckpttool.open_engine(f"threads:{jobs or default_jobs()}") as executor:
        plan = make_plan(executor)
        report.print_notes(plan.notes, quiet)
        total = sum(meta.nbytes for output in plan for meta in output.metas)
        stopper: Stopper = click.get_current_context().meta[STOPPER]
        with show_progress("writing", total, quiet or as_json) as on_progress, stopper.deferring():
            written = ckpttool.execute(plan, executor, on_progress=on_progress, check=stopper.check)
    seconds = time.perf_counter() - started
    document = report.describe_run(plan, written, seconds)
    if as_json:
        report.print_json(document)
        return
    report.print_table(
        "wrote",
        ("path", "format", "tensors>", "size>"),
        (
            *(
                (out.path, out.format, str(out.tensors), report.format_bytes(out.nbytes))
                for out in written
            ),
            *(
                (index.path, "index", "", report.format_bytes(len(index.text.encode())))
                for index in plan.documents
            ),
        ),
    )
    nbytes = sum(out.nbytes for out in written)
    of_step = f", step {plan.catalog.step}" if plan.catalog.step else ""
    click.echo(
        f"{len(written)} file{'s' if len(written) != 1 else ''}, {report.format_bytes(nbytes)} "
        f"in {seconds:.2f} s{of_step}"
    )
