"""``ckpttool inspect``."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import click
from msgspec import Struct
from msgspec.structs import replace

import ckpttool
from ckpttool.cli import options, tables
from ckpttool.cli.params import ROWS, PagePath, UsageProblem, excluding
from ckpttool.cli.progress import open_progress
from ckpttool.formats.local import listing_once
from ckpttool.problems import Diagnostics, ExecutionError
from ckpttool.wording import format_bytes

if TYPE_CHECKING:
    from ckpttool.checkpoint.checkpoint import ResolveOptions
    from ckpttool.checkpoint.resolve import Depth
    from ckpttool.cli.options import ReportOptions, Side
    from ckpttool.operations.inspected import Answered


class Look(Struct, frozen=True):
    """The options that choose what inspect shows, in place of an overview or beside it."""

    show_all: bool
    show_ranks: bool
    values: tuple[str, ...]
    rows: slice | None
    show_steps: bool


look = options.OptionGroup(
    options.DISPLAY,
    "look",
    Look,
    {
        "show_all": options.flag("List every tensor; sample those without a strategy.", "--all"),
        "show_ranks": options.flag("List every file.", "--ranks"),
        "values": options.variant(
            "include",
            flag="--values",
            help="Print the tensors whose names match PATTERN, and their statistics.",
        ),
        "rows": options.option(
            "Of --values only these rows, as a slice of NumPy: 0:4, -4:, ::100.", type=ROWS
        ),
        "show_steps": options.flag("List the steps of SRC, and which are complete.", "--steps"),
    },
)
OF_SOURCE = tuple(options.source_options.parameters)
OF_STEPS = ("show_steps", "show_all")
OF_VALUES = ("replicated", "unlisted", "trust_strategy", "optimizer_shard")


# Of --tsv; a cell is empty where a tensor does not have the key in the document of --json.
COLUMNS = (
    *("name", "dtype", "shape", "nbytes", "file", "ranks", "stages"),
    *("slice_shape", "device_matrix", "tensor_map", "optimizer_shard", "made_of"),
)


class Page(Struct, frozen=True):
    """The page to write, if one is wanted."""

    path: str | None
    overwrite: bool


def _build_page(path: str | None, overwrite: bool) -> Page:
    if overwrite and path is None:
        raise UsageProblem("--overwrite without --plot", "--plot layout.html --overwrite")
    return Page(path, overwrite)


page_options = options.OptionGroup(
    options.OUTPUT,
    "page",
    _build_page,
    {
        "path": options.option(
            "Write FILE, a page that shows in a browser which rank holds which slice.",
            "--plot",
            type=PagePath("layout.html"),
            metavar="FILE",
        ),
        "overwrite": options.variant("overwrite", help="Replace the page of --plot if it exists."),
    },
)


@click.command(
    cls=options.GroupedCommand,
    help="""\b
    ckpttool inspect checkpoint/ -s strategy.ckpt

    Say what a checkpoint is: its size, how it is sharded, and whether it is complete.  Then list
    its tensors, equal layers folded.  Headers and some pages of the tensors are read.  SRC is a
    file, an index or its folder, a folder of rank folders, or the output folder of a MindFormers
    run.  Strategy files (those of several stages together), group information, rank tables and
    graphs are shown as what they are.
    """,
)
@options.source_options()
@click.argument("more", nargs=-1, type=options.EXISTING, metavar="[STRATEGY]...")
@options.crc
@look()
@page_options()
@options.resolve_options("manifest", *OF_VALUES, *options.OF_EXPORT)
@options.report_options(as_tsv=options.TSV)
def inspect(
    source: Side,
    more: tuple[str, ...],
    crc: bool,
    look: Look,
    page: Page,
    resolve: ResolveOptions,
    report: ReportOptions,
) -> None:
    """Say what a checkpoint or a strategy is, and list its tensors."""
    from ckpttool.cli.overview import print_inspected
    from ckpttool.operations.answer import notes_and_problems
    from ckpttool.operations.inspected import InspectedCheckpoint, InspectedSaves

    if more and (look.values or look.show_steps):
        raise options.too_many_paths("one checkpoint", (source.path, *more))
    if look.show_steps:
        options.refuse_beside("--steps", {"src", "strategy_files", "pattern", "key", *OF_STEPS})
        _show_steps(source, look, report)
        return
    if look.values:
        used = {*OF_SOURCE, "manifest", "values", "rows", *OF_VALUES, *options.OF_EXPORT}
        options.refuse_beside("--values", used - {"include"})
        _show_values(source, look, resolve, report)
        return
    options.require_flag("--values PATTERN", {"rows", *OF_VALUES})
    if resolve.tensors.recipe is None:
        options.require_flag("--recipe", ["dtype"])
    elif page.path is not None:
        raise excluding("--recipe", "--plot", "A page shows the slices in the files.")
    diagnostics = Diagnostics("inspect")
    inspected = _inspect(
        *(source, more, diagnostics, report, crc, look.show_all, resolve),
        contents="samples" if page.path is None else "all",
    )
    drawn = "" if page.path is None else _draw(inspected, page.path, page.overwrite, diagnostics)
    if report.as_json:
        if page.path is not None and isinstance(inspected, InspectedCheckpoint | InspectedSaves):
            inspected = replace(inspected, **notes_and_problems(diagnostics))  # with those of it
        tables.print_json(inspected.to_dict())
    else:
        if report.as_tsv:
            tables.print_tsv(COLUMNS, inspected.to_dict().get("tensors", ()))
        elif not report.quiet:
            print_inspected(inspected, show_all=look.show_all, show_ranks=look.show_ranks)
        # The line "complete" says that replicas hold the slices, and an error names a damaged file.
        said = {"damaged_replica"} if report.quiet else {"damaged_replica", "missing_replica"}
        notes = (it for it in diagnostics.of("note", "warning") if it.code not in said)
        tables.print_notes(notes, diagnostics.severity_of, report.quiet)
        if drawn and not report.quiet:
            tables.print_text(drawn)
    diagnostics.raise_if_errors()


def _show_steps(source: Side, look: Look, report: ReportOptions) -> None:
    """Print the steps of a folder."""
    from ckpttool.cli.step_table import print_steps
    from ckpttool.operations.inspected import document_of_steps
    from ckpttool.operations.load import load_steps

    diagnostics = Diagnostics("inspect")
    steps = load_steps(source.source, diagnostics, open_count=report.open_count)
    document = document_of_steps(steps, diagnostics)
    show = partial(print_steps, steps, show_all=look.show_all)
    tables.print_answer(document, show, document.notes, report)
    diagnostics.raise_if_errors()


def _show_values(source: Side, look: Look, resolve: ResolveOptions, report: ReportOptions) -> None:
    """Print the values of tensors."""
    from ckpttool.cli.value_screen import print_values
    from ckpttool.execution.executors import default_jobs
    from ckpttool.operations.load import load
    from ckpttool.operations.values import read_values

    is_found = not resolve.replicated
    catalog, strategy, _ = load(source.source, find_strategy=is_found, open_count=report.open_count)
    show = open_progress("reading", report.shown_progress)
    with ckpttool.open_engine(f"threads:{default_jobs()}") as executor:
        values = read_values(
            *(catalog, strategy, look.values, look.rows, resolve),
            executor=executor,
            open_progress=show,
        )
    tables.print_answer(values, partial(print_values, values), values.notes, report)


def _draw(answer: Answered, path: str, overwrite: bool, diagnostics: Diagnostics) -> str:
    """Write the page of a checkpoint and return a line that says so; "" if it is refused."""
    from ckpttool.cli.overview import facts_of
    from ckpttool.operations import plot
    from ckpttool.operations.inspected import InspectedCheckpoint

    refusals = [*plot.refusals(answer, path, overwrite)]
    diagnostics.add(*refusals)
    if refusals or not isinstance(answer, InspectedCheckpoint):
        return ""
    try:
        nbytes = plot.write(answer.parts, facts_of(answer.parts), path)
    except ExecutionError as error:
        diagnostics.failures.append(error)
        return ""
    return f"Wrote {path} ({format_bytes(nbytes)}), which a browser opens without a network"


@listing_once()
def _inspect(
    source: Side,
    more: tuple[str, ...],
    diagnostics: Diagnostics,
    report: ReportOptions,
    crc: bool,
    every_tensor: bool,
    resolve: ResolveOptions,
    contents: Depth,
) -> Answered:
    """Return what SRC is: strategies, another file of MindSpore, or a checkpoint."""
    from ckpttool.operations.inspected import describe_strategy
    from ckpttool.operations.inspection import are_strategies, inspect_catalog, inspect_foreign
    from ckpttool.operations.load import load

    strategies = (source.path, *more, *source.strategy_files)
    if are_strategies(strategies):
        options.refuse_options("a strategy", {"strategy_files", "show_all"})
        return describe_strategy(ckpttool.read_strategy(strategies), diagnostics)
    if more:
        raise options.too_many_paths("one checkpoint, or strategy files", (source.path, *more))
    if foreign := inspect_foreign(source.path):
        options.refuse_options("not a checkpoint", ())
        return foreign
    catalog, strategy, _ = load(
        source.source, command="inspect", diagnostics=diagnostics, open_count=report.open_count
    )
    return inspect_catalog(
        *(catalog, strategy, diagnostics),
        crc=crc,
        every_tensor=every_tensor,
        options=resolve,
        contents=contents,
    )
