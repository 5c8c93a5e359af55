"""What verify and diff print: a summary first, then what was found."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ckpttool.cli import report
from ckpttool.cli.tables import print_table
from ckpttool.cli.text import echo, format_shape, printable
from ckpttool.model.strategy import count

if TYPE_CHECKING:
    from ckpttool.model.catalog import TensorMeta
    from ckpttool.model.findings import Finding, Report
    from ckpttool.run.diff import Comparison, TensorDifference
    from ckpttool.run.facts import Tolerance

MOST_ROWS = 50  # of a table; more is for programs, or asked for


def print_report(
    found: Report, deep: bool, crc: bool, limit: int | None, as_json: bool, quiet: bool
) -> None:
    """Print the answer of ``verify``."""
    if as_json:
        document = describe_report(found, deep)
        findings = document["findings"]
        assert isinstance(findings, list)
        report.print_json({**document, "findings": findings[:limit]})
        return
    shallow = "headers and checksums looked at" if crc else "headers read"
    depth = "all data read" if deep else f"{shallow}, not the data (--deep)"
    of_step = f", step {found.step}" if found.step else ""
    read = f"{count(len(found.ranks), 'rank')}{of_step}, {count(found.tensors, 'tensor')}, "
    read += f"{report.format_bytes(found.nbytes)}; {depth}"
    number = Counter(finding.severity for finding in found.findings)
    verdict = ", ".join(
        count(number[severity], severity) for severity in ("error", "warning") if number[severity]
    )
    clean = "nothing is wrong" if found.is_whole else "nothing is wrong with each rank by itself"
    echo(printable(f"{found.path}: {verdict or clean} ({read})"))
    _print_findings(found.findings, limit)
    report.print_notes(found.notes, quiet)


def describe_report(found: Report, deep: bool) -> dict[str, object]:
    """Return the JSON document of ``verify``."""
    number = Counter(finding.severity for finding in found.findings)
    return {
        "path": found.path,
        "step": found.step,
        "ranks": list(found.ranks),
        "tensors": found.tensors,
        "nbytes": found.nbytes,
        "deep": deep,
        "clean": not found.findings,
        "errors": number["error"],
        "warnings": number["warning"],
        "findings": [_describe_finding(finding) for finding in found.findings],
        "notes": report.describe_notes(found.notes),
    }


def _describe_finding(finding: Finding) -> dict[str, object]:
    return {
        "severity": finding.severity,
        "kind": finding.kind,
        "text": finding.text,
        "tensor": finding.tensor,
        "ranks": list(finding.ranks),
        "count": finding.count,
        "first": None if finding.first is None else list(finding.first),
    }


def _print_findings(findings: Sequence[Finding], limit: int | None) -> None:
    rows = [(finding.severity, finding.kind, finding.text) for finding in findings]
    if rows:
        _print_rows("findings", ("severity", "kind", "what"), rows, limit)


def print_comparison(
    a: str,
    b: str,
    found: Comparison,
    tolerance: Tolerance | None,
    limit: int | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Print the answer of ``diff``."""
    if as_json:
        document = {
            "a": a,
            "b": b,
            "equal": found.is_equal,
            "tensors": found.tensors,
            "nbytes": found.nbytes,
            "tolerance": tolerance and {"atol": tolerance.atol, "rtol": tolerance.rtol},
            "counts": _kinds(found),
            "differences": [_describe(one) for one in found.differences[:limit]],
            "findings": [_describe_finding(one) for one in found.findings],
            "notes": report.describe_notes(found.notes),
        }
        report.print_json(document)
        return
    how = "bytes" if tolerance is None else f"atol {tolerance.atol:g}, rtol {tolerance.rtol:g}"
    size = f"{count(found.tensors, 'tensor')}, {report.format_bytes(found.nbytes)} compared, {how}"
    verdict = "equal"
    if found.differences:
        parts = (f"{number} {_WORDS[kind]}" for kind, number in _kinds(found).items())
        verdict = f"different: {', '.join(parts)}"
    if found.findings:
        inside = "replicas differ (the lowest rank's are compared)"
        verdict = f"{verdict}; {inside}" if found.differences else f"{inside}, nothing else does"
    echo(printable(f"A {a} and B {b}: {verdict} ({size})"))
    if found.differences:
        columns = ("tensor", "what", "A", "B", "differ>", "max abs>", "max rel>", "first")
        _print_rows("differences", columns, [_row(one) for one in found.differences], limit)
    _print_findings(found.findings, limit)
    report.print_notes(found.notes, quiet)


_WORDS = {
    "only in A": "only in A",
    "only in B": "only in B",
    "dtype": "of another type",
    "shape": "of another shape",
    "text": "with another text",
    "values": "with other values",
}


def _kinds(found: Comparison) -> dict[str, int]:
    number = Counter(one.kind for one in found.differences)
    return {kind: number[kind] for kind in number}


def _describe(one: TensorDifference) -> dict[str, object]:
    values = one.values
    document: dict[str, object] = {
        "name": one.name,
        "rank": one.rank,
        "kind": one.kind,
        "a": _describe_meta(one.a),
        "b": _describe_meta(one.b),
    }
    if values is not None and one.a is not None:
        document["values"] = {
            "elements": math.prod(one.a.shape),
            "differing": values.count,
            "same_number": values.same_number,
            "nan_on_one_side": values.nans,
            "max_abs": _as_json(values.max_abs),
            "max_rel": _as_json(values.max_rel),
            "first": None if values.first is None else list(values.first),
        }
    return document


def _as_json(number: float | None) -> float | str | None:
    """Return a number as JSON can hold it: Infinity becomes a string."""
    return "Infinity" if number == math.inf else number


def _describe_meta(meta: TensorMeta | None) -> dict[str, object] | None:
    if meta is None:
        return None
    text = {} if meta.text is None else {"text": meta.text}
    return {"dtype": meta.dtype, "shape": list(meta.shape), **text}


def _row(one: TensorDifference) -> Sequence[str]:
    name = one.name if one.rank is None else f"{one.name} (rank {one.rank})"
    a, b = ("" if meta is None else _show(meta) for meta in (one.a, one.b))
    if one.values is None or one.a is None:
        return (name, one.kind, a, b, "", "", "", "")
    values = one.values
    differ = f"{values.count} of {math.prod(one.a.shape)}"
    of_these = {"the same number": values.same_number, "NaN on one side": values.nans}
    if any(of_these.values()):
        differ += f" ({', '.join(f'{n} {what}' for what, n in of_these.items() if n)})"
    largest = ("" if x is None else f"{x:.6g}" for x in (values.max_abs, values.max_rel))
    first = "" if values.first is None else format_shape(values.first)
    return (name, one.kind, a, b, differ, *largest, first)


def _show(meta: TensorMeta) -> str:
    if meta.text is not None:
        return repr(meta.text if len(meta.text) <= 40 else meta.text[:37] + "...")
    return f"{meta.dtype} {format_shape(meta.shape)}"


def _print_rows(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], limit: int | None
) -> None:
    """Print a table of the first rows, and how many more there are."""
    most = MOST_ROWS if limit is None else limit
    if most:
        print_table(title, columns, rows[:most])
    if len(rows) > most:
        echo(f"and {len(rows) - most} more (--limit N shows N, --json all)")
