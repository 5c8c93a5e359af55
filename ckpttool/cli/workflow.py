"""The steps that commands share: load the inputs, execute the plan, report."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from shlex import join
from typing import TYPE_CHECKING, Any, TypeVar

import click

import ckpttool
from ckpttool.cli import tables
from ckpttool.cli.options import SIGNALS, ReportOptions, Side
from ckpttool.cli.progress import open_progress, show_count
from ckpttool.cli.signals import Terminated
from ckpttool.discovery.scan import RankFiles, find, read_ranks
from ckpttool.formats import get_format
from ckpttool.model.catalog import Catalog
from ckpttool.problems import (
    CkptToolError,
    Diagnostic,
    Diagnostics,
    PlanError,
    StepError,
    raise_all,
    severities,
)
from ckpttool.wording import count, format_bytes, format_sizes, shorten

if TYPE_CHECKING:
    from ckpttool.cli.signals import SignalGuard
    from ckpttool.execution.executors import RunOptions
    from ckpttool.model.plan import Plan
    from ckpttool.model.strategy import Strategy
    from ckpttool.operations.convert import Conversion
    from ckpttool.problems import Command
    from ckpttool.transaction.resume import Assignment


T = TypeVar("T")


class Attempts:
    """Calls whose errors are reported together: a bad strategy with a bad checkpoint.

    ``errors`` has the error of each call that failed, by what it was for.
    """

    def __init__(self) -> None:
        self.errors: dict[str, CkptToolError] = {}

    def __call__(self, what: str, call: Callable[[], T]) -> T | None:
        """Return the result of ``call``, or None if it fails."""
        try:
            return call()
        except CkptToolError as error:
            self.errors[what] = error
            return None


def load(
    source: Side,
    report: ReportOptions,
    dst_strategy: tuple[str, ...] = (),
    *,
    find_strategy: bool = True,
    command: Command = "convert",
    diagnostics: Diagnostics | None = None,
) -> tuple[Catalog, Strategy | None, Strategy | None]:
    """Read the catalog and the strategies, and raise all their problems at once.

    Parameters
    ----------
    source
        The checkpoint and its strategy files.
    report
        Whether to show progress.
    dst_strategy
        Strategy files of the target.
    find_strategy
        Whether to use the strategy that lies with the checkpoint, with a note, if the source names
        none.
    command
        What the catalog is for; see `ckpttool.scan`.
    diagnostics
        Gets the errors of strategies, which are then None; without it they are raised.
    """
    attempt, src_files, used = Attempts(), source.strategy_files, []
    found = attempt("SRC", partial(find, source.path, source.options, command=command))
    if find_strategy and not src_files and found is not None and found.strategy_files:
        src_files = found.strategy_files
        used = [Diagnostic("strategy_file", f"strategy from {shorten(src_files, 1)}")]
    files = {"-s": src_files, "-d": dst_strategy}
    src, dst = (
        attempt(option, partial(ckpttool.read_strategy, paths)) if paths else None
        for option, paths in files.items()
    )
    catalog: Catalog | None
    if isinstance(found, RankFiles):
        with show_count("reading headers", report.hides_progress) as on_progress:
            read = partial(read_ranks, found, src, command=command, on_progress=on_progress)
            catalog = attempt("SRC", read)
    else:
        catalog = found
    for option, paths in files.items():
        if option in attempt.errors and _are_exchanged(source.path, paths):
            raise PlanError([_exchange_problem(source.path, option, paths[0])])
    if isinstance(attempt.errors.get("SRC"), StepError) and "-s" in attempt.errors:
        del attempt.errors["SRC"]  # the choice of a step depends on the strategy
    errors = [attempt.errors[what] for what in ("SRC", *files) if what in attempt.errors]
    if catalog is None:
        raise_all(errors)
    elif diagnostics is not None:
        diagnostics.failures += errors
    elif errors:
        raise_all([*catalog.damaged.values(), *errors])
    assert catalog is not None, "its error was raised"
    return replace(catalog, diagnostics=(*catalog.diagnostics, *used)), src, dst


def _are_exchanged(src: str, strategy: Sequence[str]) -> bool:
    """Return whether SRC is a strategy, and the only strategy file is a checkpoint."""
    attempt = Attempts()
    return (
        len(strategy) == 1
        and attempt("SRC", partial(ckpttool.read_strategy, src)) is not None
        and attempt("-s", partial(ckpttool.scan, strategy[0])) is not None
    )


def _exchange_problem(src: str, option: str, strategy: str) -> Diagnostic:
    """Return the problem of a strategy given as SRC, and a checkpoint as the strategy.

    The hint keeps the paths that the command needs.
    """
    text = f"SRC and {option} look exchanged"
    facts = f"{src} is a strategy, {strategy} is a checkpoint"
    context = click.get_current_context()
    words: list[str] = []
    for one in context.command.params:
        value: Any = context.params.get(str(one.name))
        if option in one.opts:
            words += [option, src]
        elif one.required and isinstance(one, click.Argument):
            words += [strategy if value == src else str(value)]
        elif one.required:
            for path in [value] if isinstance(value, str) else value:
                words += [one.opts[0], path]
    return Diagnostic("source", text, hint=f"{context.command_path} {join(words)}", facts=facts)


def convert(
    make_plan: Callable[..., tuple[Plan, Assignment]], run: RunOptions, report: ReportOptions
) -> None:
    """Make a plan, execute it, and report.

    Parameters
    ----------
    make_plan
        A function like `ckpttool.plan_merge`, which lacks ``executor`` and ``open_progress`` only.
        The executor is on this host, and compares contents.
    run
        The engine and its limit of memory.
    report
        How to report.
    """
    from ckpttool.execution.executors import is_cluster
    from ckpttool.operations.convert import Conversion

    def print_note(note: Diagnostic) -> None:
        late_notes.append(note)
        tables.print_notes([note], severities("convert"), report.quiet)

    late_notes: list[Diagnostic] = []
    show = open_progress("reading what is kept", report.hides_progress)
    started = time.perf_counter()
    if not report.debug:
        logging.disable()  # the libraries of a cluster also log the errors that we raise
    with ckpttool.open_engine(run.engine) as executor:
        is_here = not is_cluster(run.engine)
        with nullcontext(executor) if is_here else ckpttool.open_engine("threads") as local:
            plan, assignment = make_plan(executor=local, open_progress=show)
        mine = plan.limited_to(assignment.ranks)
        sizes = ckpttool.fit_memory(run, executor, mine)
        notes = (*plan.notes, *assignment.notes)
        tables.print_notes(notes, severities("convert"), report.quiet)
        total = sum(mine.sizes.values())
        guard: SignalGuard = click.get_current_context().meta[SIGNALS]
        with show(total, "writing") as on_progress, guard.deferring():
            try:
                written = ckpttool.execute(
                    plan,
                    assignment,
                    executor,
                    options=sizes,
                    on_progress=on_progress,
                    on_note=print_note,
                    check=guard.check,
                )
            except Terminated as stopped:
                complete, outputs = assignment.count_complete(), len(assignment.ranks)
                stopped.complete = f"{complete} of {count(outputs, 'output')} complete"
                stopped.hint = assignment.resume_hint if complete else "the same command"
                raise
    assignment = replace(assignment, notes=(*assignment.notes, *late_notes))
    done = Conversion(plan, assignment, written, time.perf_counter() - started)
    if report.as_json:
        from ckpttool.operations.documents import convert as document

        tables.print_json(document(done))
    elif not report.quiet:
        _print(done, report.verbose)


def _print(done: Conversion, verbose: bool) -> None:
    """Print the largest sharded tensors and, last, what was written; with ``verbose`` each file."""
    catalog, documents = done.source, done.documents
    if verbose:
        outputs = [(one.path, one.format, str(one.tensors), one.nbytes) for one in done.outputs]
        others = [(one.path, one.kind, "", len(one.data)) for one in documents]
        rows = ((*row, format_bytes(nbytes)) for *row, nbytes in (*outputs, *others))
        tables.print_table("outputs", ("path", "format", "tensors>", "size>"), rows)
    metas = [source.meta for source in done.largest_sharded]
    if largest := [f"{meta.name} {format_sizes(meta.shape)}" for meta in metas]:
        tables.print_text(f"Check the full shapes: {', '.join(largest)}")
    files = count(len(catalog.files), "file" if catalog.is_merged else "rank")
    text = f"{_outputs_text(done)} in {done.seconds:.2f} s, from {files}"
    text += f" at step {catalog.step}" if catalog.step else ""
    if done.manifest and not done.is_one_file:
        named = [f"manifest {done.manifest}", *(f"{one.kind} {one.path}" for one in documents)]
        text += f"; {', '.join(named)}"
    tables.print_text(text)


def _outputs_text(done: Conversion) -> str:
    """Return which outputs there are, their format and size, and how many were kept."""
    part, outputs = done.assignment.part, done.outputs
    kept = sum(one.is_kept for one in outputs)
    verb = "Kept" if 0 < kept == len(outputs) else "Wrote"
    verb += "" if part is None else f" part {part}:"
    if not outputs:
        return f"{verb} nothing"
    facts = [get_format(done.plan.target.format).word, format_bytes(done.dst_bytes)]
    paths = [Path(one.path) for one in outputs]
    if done.is_one_file:
        facts.insert(1, count(outputs[0].tensors, "tensor"))
        return f"{verb} {paths[0]} ({', '.join(facts)})"
    if not done.plan.target.is_merged:
        paths = [path.parent for path in paths]
    shown = [str(paths[0]), *(path.name for path in paths[1:])]
    names = ", ".join(shown) if len(shown) <= 3 else f"{shown[0]} ... {shown[-1]}"
    of_kept = [f"{kept} kept, {len(outputs) - kept} written"] if kept else []
    return f"{verb} {names} ({', '.join([count(len(paths), 'file'), *of_kept, *facts])})"
