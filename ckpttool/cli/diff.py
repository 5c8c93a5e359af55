"""``ckpttool diff``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
from msgspec.structs import replace

import ckpttool
from ckpttool.cli import options, tables
from ckpttool.cli.params import NUMBER, PATTERN
from ckpttool.cli.progress import open_progress
from ckpttool.keywords import OF_ROWS
from ckpttool.model.joining import join_alike
from ckpttool.wording import count, format_bytes, format_shape, format_sizes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpttool.checkpoint.checkpoint import ResolveOptions
    from ckpttool.cli.options import ReportOptions, Side
    from ckpttool.execution.executors import RunOptions
    from ckpttool.operations.tensor_diff import (
        ComparedTensor,
        Difference,
        TensorChange,
        TensorDifference,
    )


def _build_sides(**values: Any) -> tuple[Side, Side]:
    """Return A and B; B has the step and the pattern of A by default, but not its strategy."""
    of_a = {name: values[name] for name in ("step", "pattern", "key")}
    of_b = {name: values.get(f"b_{name}") or value for name, value in of_a.items()}
    return (
        options.make_side(values["a"], values["strategy"], **of_a),
        options.make_side(values["b"], values["b_strategy"], **of_b),
    )


sides = options.OptionGroup(
    options.SOURCE,
    "sides",
    _build_sides,
    {
        "a": options.argument("a folder of rank folders, or a merged checkpoint"),
        "b": options.argument("a folder of rank folders, or a merged checkpoint"),
        "strategy": options.strategy("A and B", "-s"),
        "b_strategy": options.strategy("B", heading=options.STRATEGY),
        "step": options.source_options.parameters["step"],
        "b_step": options.option("Step of B, if it is not that of A.", metavar="STEP"),
        "pattern": options.source_options.parameters["pattern"],
        "b_pattern": options.option("Pattern of B, if it is not that of A.", type=PATTERN),
        "key": options.source_options.parameters["key"],
    },
)


@click.command(
    cls=options.GroupedCommand,
    help="""\b
    ckpttool diff checkpoint/ merged.h5 -s strategy.ckpt

    Compare two checkpoints tensor by tensor, under any layouts and formats.  A and B are folders of
    rank folders, or merged.  Exit code 0: A and B are equal; 1: they or replicas differ.
    """,
)
@sides()
@options.resolve_options(
    *("trust_strategy", "optimizer_shard", "manifest"),
    *(name for name in options.OF_TENSORS if name not in ("on_overflow", *OF_ROWS)),
    replicated=options.variant(
        "replicated",
        help="Every rank of a side without a strategy of its own holds all tensors in full.",
    ),
    unlisted=options.variant(
        "unlisted",
        help="Unlisted parameters that differ between ranks: rank, first or drop.",
        default="rank",
    ),
)
@options.option(
    "Compare numbers: |a - b| <= ATOL + RTOL * |b| is equal.  [default: bytes]", type=NUMBER
)("atol", options.SAFETY)
@options.option("RTOL of this formula.  [default: 0]", type=NUMBER)("rtol", options.SAFETY)
@options.flag("Show how much each tensor changed, the largest change first.", "--stats")(
    "stats", options.DISPLAY
)
@options.run_options("jobs", "engine")
@options.report_options(limit=options.LIMIT, as_tsv=options.TSV)
def diff(
    sides: tuple[Side, Side],
    resolve: ResolveOptions,
    atol: float | None,
    rtol: float | None,
    stats: bool,
    run: RunOptions,
    report: ReportOptions,
) -> None:
    """Compare two checkpoints, tensor by tensor."""
    from ckpttool.operations import tensor_diff as operation
    from ckpttool.operations.load import load_sides
    from ckpttool.storage.compare import CompareOptions

    a, b = (side.for_engine(run) for side in sides)
    loaded = load_sides(
        *(a.source, b.source), replicated=resolve.replicated, open_count=report.open_count
    )
    tolerance = None
    if atol is not None or rtol is not None:
        tolerance = ckpttool.Tolerance(atol or 0.0, rtol or 0.0)
    with ckpttool.open_engine(run.engine) as executor:
        answer = operation.diff(
            *loaded,
            resolve,
            compare=CompareOptions(tolerance, wants_statistics=stats),
            executor=executor,
            open_progress=open_progress("comparing", report.shown_progress),
        )
    limited = replace(
        answer,
        a=a.path,
        b=b.path,
        differences=answer.differences[: report.limit],
        changes=answer.changes and answer.changes[: report.limit],
    )
    if report.as_json:
        tables.print_json(limited.to_dict())
    elif report.as_tsv:
        key, columns = ("changes", CHANGES) if stats else ("differences", DIFFERENCES)
        tables.print_tsv(columns, limited.to_dict()[key])
        for finding in join_alike(answer.findings):
            tables.print_diagnostic(finding, "error", err=True)
        tables.print_notes(answer.notes, answer.notes.severity_of, report.quiet)
    else:
        _print(f"A {a.path} and B {b.path}", answer, report)
    if not answer.equal:
        click.get_current_context().exit(1)


# Of --tsv: keys in the document of --json.
DIFFERENCES = (
    *("name", "rank", "kind", "a.dtype", "a.shape", "b.dtype", "b.shape"),
    *("values.elements", "values.differing", "values.max_abs", "values.first"),
)
CHANGES = ("name", "rank", "shape", "relative", "max_abs", "norm")
_WORDS = {  # by kind of difference
    "only in A": "only in A",
    "only in B": "only in B",
    "dtype": "of another type",
    "shape": "of another shape",
    "text": "with another text",
    "values": "with other values",
}


def _print(sides: str, answer: Difference, report: ReportOptions) -> None:
    """Print a verdict, the differences, the findings and the notes."""
    tolerance, label = answer.tolerance, "equal" if answer.equal else "different"
    how = "bytes" if tolerance is None else f"atol {tolerance.atol:g}, rtol {tolerance.rtol:g}"
    verdict = ", ".join(f"{number} {_WORDS[kind]}" for kind, number in answer.counts.items())
    if any(finding.code == "replica" for finding in answer.findings):
        replicas = "replicas differ (the lowest rank's are compared)"
        verdict = f"{verdict}; {replicas}" if verdict else f"{replicas}, nothing else does"
    if not answer.tensors:
        verdict, label = "nothing was compared", ""
    if verdict or not report.quiet:
        size = f"{count(answer.tensors, 'tensor')}, {format_bytes(answer.nbytes)} compared, {how}"
        tables.print_text(f"{sides}{verdict and f': {verdict}'} ({size})", label)
        for side, applied in (answer.applied or {}).items():
            if applied.cast:
                casts = ", ".join(map(str, applied.cast))
                tables.print_text(f"Cast {side.upper()}: {casts}")
    columns = ("tensor", "what", "A", "B", "shape", "differ>", "max abs>", "first")

    def show(shown: Sequence[TensorDifference]) -> None:
        tables.print_table("differences", columns, map(_cells, shown))

    def show_changes(shown: Sequence[TensorChange]) -> None:
        title = f"changes, |B - A| / |A|; {count(equal, 'tensor', 'are')} equal"
        heads = ("tensor", "shape", "relative>", "max abs>", "norm of A>")
        tables.print_table(title, heads, map(_cells_of_change, shown))

    changed = [change for change in answer.changes or () if change.relative]
    named = {(change.name, change.rank) for change in changed}
    differing = [it for it in answer.differences if (it.name, it.rank) not in named]
    unlike = named | {(other.name, other.rank) for other in differing}
    equal = sum((change.name, change.rank) not in unlike for change in answer.changes or ())
    tables.print_first(changed, report.limit, show_changes)
    tables.print_first(differing, report.limit, show)
    tables.print_findings(answer.findings, answer.notes, answer.notes.severity_of, report)


def _cells_of_change(change: TensorChange) -> Sequence[str]:
    numbers = (change.relative, change.max_abs, change.norm)
    relative, *rest = ("" if number is None else f"{number:.4g}" for number in numbers)
    if change.nan_on_one_side:
        relative += f" ({change.nan_on_one_side} NaN on one side)"
    return (_name(change), format_sizes(change.shape), relative, *rest)


def _name(tensor: TensorDifference | TensorChange) -> str:
    return tensor.name if tensor.rank is None else f"{tensor.name} (rank {tensor.rank})"


def _cells(tensor: TensorDifference) -> Sequence[str]:
    """Return the cells of a tensor; A and B say what else differs than values."""
    name = _name(tensor)
    if tensor.values is None or tensor.a is None:
        a, b = ("" if side is None else _show(side) for side in (tensor.a, tensor.b))
        return (name, tensor.kind, a, b, "", "", "", "")
    values = tensor.values
    differ = f"{values.differing} of {values.elements}"
    details = {"the same number": values.same_number, "NaN on one side": values.nan_on_one_side}
    if any(details.values()):
        differ += f" ({', '.join(f'{n} {what}' for what, n in details.items() if n)})"
    largest = "" if values.max_abs is None else f"{values.max_abs:.4g}"
    first = "" if values.first is None else format_shape(values.first)
    return (name, "", "", "", format_sizes(tensor.a.shape), differ, largest, first)


def _show(side: ComparedTensor) -> str:
    if side.text is not None:
        return repr(side.text if len(side.text) <= 40 else side.text[:37] + "...")
    return f"{side.dtype} {format_shape(side.shape)}"
