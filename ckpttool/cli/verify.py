"""``ckpttool verify``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
from msgspec.structs import replace

import ckpttool
from ckpttool.cli import options, tables
from ckpttool.cli.params import Choice, UsageProblem
from ckpttool.cli.progress import open_progress
from ckpttool.model.joining import join_alike
from ckpttool.problems import severities
from ckpttool.wording import count, format_bytes

if TYPE_CHECKING:
    from ckpttool.checkpoint.checkpoint import ResolveOptions
    from ckpttool.cli.options import ReportOptions, Side
    from ckpttool.execution.executors import RunOptions
    from ckpttool.operations.verification import Verification


@click.command(
    cls=options.GroupedCommand,
    help="""\b
    ckpttool verify checkpoint/ -s strategy.ckpt --deep

    Find what is wrong with a checkpoint: damaged files, missing slices, ranks that disagree; with
    --deep also replicas that differ, NaN and Inf.  Exit code 0: nothing is wrong; 1: something is.
    """,
)
@options.source_options()
@options.resolve_options(
    "replicated",
    *options.OF_CHOICE,
    manifest=options.variant(
        "manifest",
        help="Compare all contents with the manifest; needs no strategy.",
        flag="--check-manifest",
        value="all",
    ),
)
@options.flag("Read all data, not only headers; compare replicas.")("deep", options.SAFETY)
@options.crc
@options.option(
    "Report warnings of this code as notes; repeat it for several codes.",
    multiple=True,
    type=Choice([code for code, severity in severities("verify").items() if severity == "warning"]),
    metavar="CODE",
)("ignore", options.SAFETY)
@options.run_options("jobs", "engine")
@options.option(
    "Print findings as text, or as annotations of a workflow of GitHub: text or github.",
    type=Choice(["text", "github"]),
    default="text",
    metavar="HOW",
)("format", options.DISPLAY)
@options.report_options(limit=options.LIMIT, as_tsv=options.TSV)
def verify(
    source: Side,
    resolve: ResolveOptions,
    deep: bool,
    crc: bool,
    ignore: tuple[str, ...],
    format: str,
    run: RunOptions,
    report: ReportOptions,
) -> None:
    """Find what is wrong with a checkpoint."""
    from ckpttool.operations import verification as operation
    from ckpttool.operations.answer import DiagnosticAnswer
    from ckpttool.operations.load import load

    options.refuse_two_strategies(source, resolve)
    if format == "github" and (report.as_json or report.as_tsv):
        raise UsageProblem("--format github goes with neither --json nor --tsv", "one of them")
    catalog, strategy, _ = load(
        source.for_engine(run).source,
        find_strategy=not resolve.replicated,
        command="verify",
        open_count=report.open_count,
    )
    with ckpttool.open_engine(run.engine) as executor:
        answer = operation.verify(
            catalog,
            strategy,
            resolve,
            deep=deep,
            crc=crc,
            ignore=ignore,
            executor=executor,
            open_progress=open_progress("reading", report.shown_progress),
        )
    if report.as_json:
        limited = replace(answer, findings=answer.findings[: report.limit])
        tables.print_json(limited.to_dict())
    elif report.as_tsv:
        columns = DiagnosticAnswer.__struct_fields__
        tables.print_tsv(columns, answer.findings[: report.limit].to_builtins())
        tables.print_notes(answer.notes, answer.findings.severity_of, report.quiet)
    else:
        _print(answer, report, format)
    if answer.findings:
        click.get_current_context().exit(1)


def _print(answer: Verification, report: ReportOptions, format: str) -> None:
    """Print a verdict, the findings and the notes."""
    label = "error" if answer.errors else "warning" if answer.warnings else "OK"
    read = [
        count(answer.files, "file" if answer.is_merged else "rank"),
        *([f"step {answer.step}"] if answer.step else []),
        count(answer.tensors, "tensor"),
        format_bytes(answer.nbytes),
    ]
    if answer.errors or answer.warnings or not report.quiet:
        text = f"{answer.path}: {answer.verdict} ({', '.join(read)}; {answer.depth})"
        tables.print_text(text, label)
    if format == "github":
        found = [*answer.findings[: report.limit], *answer.notes]
        tables.print_annotations(join_alike(found), answer.findings.severity_of)
        return
    tables.print_findings(answer.findings, answer.notes, answer.findings.severity_of, report)
