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
    from ckpttool.operations.audit import AuditOptions
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
    *options.OF_EXPORT,
    manifest=options.variant(
        "manifest",
        help="Compare all contents with the manifest; needs no strategy.",
        flag="--check-manifest",
        value="all",
    ),
)
@options.flag("Read all data, not only headers; compare replicas.")("deep", options.SAFETY)
@options.crc
@options.audit_options()
@options.option(
    "Report warnings of this code as notes; repeat it for several codes.",
    multiple=True,
    type=Choice([code for code, severity in severities("verify").items() if severity == "warning"]),
    metavar="CODE",
)("ignore", options.SAFETY)
@options.run_options("jobs", "engine")
@options.report_options(
    limit=options.LIMIT,
    as_tsv=options.TSV,
    format=options.option(
        "Print findings as text, or as annotations of a workflow of GitHub: text or github.",
        type=Choice(["text", "github"]),
        default="text",
        metavar="HOW",
    ),
)
def verify(
    source: Side,
    resolve: ResolveOptions,
    deep: bool,
    crc: bool,
    audit: AuditOptions,
    ignore: tuple[str, ...],
    run: RunOptions,
    report: ReportOptions,
) -> None:
    """Find what is wrong with a checkpoint."""
    from ckpttool.operations import verification as operation
    from ckpttool.operations.answer import DiagnosticAnswer
    from ckpttool.operations.audit import AuditOptions, load_audited
    from ckpttool.operations.look import Subject

    if report.format == "github" and (report.as_json or report.as_tsv):
        raise UsageProblem("--format github goes with neither --json nor --tsv", "one of them")
    if resolve.tensors.recipe is None and audit == AuditOptions():
        options.require_flag("--recipe, --like, --config or --card", ["dtype"])
    catalog, strategy, audited = load_audited(
        source.for_engine(run).source,
        audit,
        find_strategy=not resolve.replicated,
        open_count=report.open_count,
    )
    with ckpttool.open_engine(run.engine) as executor:
        answer = operation.verify(
            Subject(catalog, strategy, resolve),
            deep=deep,
            crc=crc,
            ignore=ignore,
            audit=audited,
            executor=executor,
            open_progress=open_progress("reading", report.shown_progress),
        )
    if report.as_json:
        limited = replace(
            answer,
            findings=answer.findings[: report.limit],
            differences=answer.differences and answer.differences[: report.limit],
        )
        tables.print_json(limited.to_dict())
    elif report.as_tsv:
        columns = DiagnosticAnswer.__struct_fields__
        tables.print_tsv(columns, answer.findings[: report.limit].to_builtins())
        tables.print_notes(answer.notes, answer.findings.severity_of, report.quiet)
    else:
        _print(answer, report)
    if answer.findings:
        click.get_current_context().exit(1)


def _print(answer: Verification, report: ReportOptions) -> None:
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
    if report.format == "github":
        found = [*answer.findings[: report.limit], *answer.notes]
        tables.print_annotations(join_alike(found), answer.findings.severity_of)
        return
    tables.print_findings(answer.findings, answer.notes, answer.findings.severity_of, report)
    if answer.card is not None and not report.quiet:
        tables.print_text(f"Wrote {answer.card} and a page beside it: {answer.digest}")
