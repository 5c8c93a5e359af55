"""The JSON documents of all commands, and the reports of verify and diff for people.

Every document has ``"schema"``; see `ckpttool._version.SCHEMA`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ckpttool._version import SCHEMA
from ckpttool.cli.tables import echo, print_table
from ckpttool.model.diagnostics import (
    Command,
    Diagnostic,
    Severity,
    describe_notes,
    severities,
)
from ckpttool.model.optimizer_names import parameter_of
from ckpttool.model.slicing import LayoutSlicing
from ckpttool.model.wording import count, format_bytes, format_shape, printable

if TYPE_CHECKING:
    from ckpttool.cli.options import ReportOptions
    from ckpttool.formats.foreign import GroupInfo, RankTable
    from ckpttool.model.diagnostics import Report
    from ckpttool.model.plan import Document, Plan
    from ckpttool.model.tensors import TensorMeta
    from ckpttool.storage.compare import Tolerance
    from ckpttool.transaction.manifest import Manifest, Written
    from ckpttool.transaction.resume import Destination
    from ckpttool.verification.describe import Json
    from ckpttool.verification.diff import Comparison, TensorDifference


MAX_SHARDED = 3  # tensors that `describe_largest` returns


def print_json(document: Json) -> None:
    """Print one JSON document."""
    import json

    echo(json.dumps({"schema": SCHEMA, **document}))  # ASCII, which every locale can print


def print_notes(
    notes: Iterable[Diagnostic],
    quiet: bool,
    severity_of: Mapping[str, Severity | None] | None = None,
) -> None:
    """Print diagnostics on stderr, one line each; if ``quiet``, only the warnings.

    ``severity_of`` has the severity of each code, by default for a conversion.
    """
    severity_of = severities("convert") if severity_of is None else severity_of
    for note in notes:
        if severity_of[note.code] == "warning":
            click.echo(f"warning: {printable(note.text)}", err=True)
        elif not quiet:
            click.echo(f"note: {printable(note.text)}", err=True)


def describe_run(
    plan: Plan, destination: Destination, written: Sequence[Written], seconds: float
) -> Json:
    """Return the JSON document of merge, split and reshard."""
    documents = documents_of(plan, destination)
    indexes = [document.path for document in documents if document.kind == "index"]
    strategies = [document.path for document in documents if document.kind == "strategy"]
    manifest, part = str(Path(plan.target.manifest_path)), destination.part
    return {
        "outputs": [{**_describe_written(out), "kept": out.is_kept} for out in written],
        "step": plan.catalog.step,
        "src_bytes": sum(file.nbytes for file in plan.catalog.files.values()),
        "dst_bytes": sum(out.nbytes for out in written),
        "seconds": round(seconds, 6),
        **({"largest_sharded": sharded} if (sharded := describe_largest(plan)) else {}),
        **({"not_in_target": _describe_not_listed(plan)} if not plan.target.is_merged else {}),
        "notes": describe_notes((*plan.notes, *destination.notes)),
        **({"indexes": indexes} if indexes else {}),
        **({"strategy": strategies[0]} if strategies else {}),
        **({"part": f"{part.number}/{part.count}"} if part else {"manifest": manifest}),
    }


def documents_of(plan: Plan, destination: Destination) -> tuple[Document, ...]:
    """Return the documents that a run has written; for a set in parts, `finalize` writes them."""
    return plan.documents if destination.part is None else ()


def describe_largest(plan: Plan) -> Sequence[Json]:
    """Describe the largest sharded tensors and the layouts with which they were read.

    A strategy file contains no shapes, and a file from a different run may fit.  A person can see
    that in the shapes.  Parameters come before their states; equal shapes and layouts are shown
    once.
    """
    from ckpttool.verification.describe import describe_layout

    sharded = {
        source.slicing.key: source
        for source in sorted(
            (transfer.source for transfer in plan.transfers),
            key=lambda source: (parameter_of(source.meta.name) is None, source.meta.nbytes),
        )
        if isinstance(source.slicing, LayoutSlicing) and math.prod(source.layout.parts) > 1
    }
    return [describe_layout(source) for source in [*reversed(sharded.values())][:MAX_SHARDED]]


def describe_manifest(folder: str, manifest: Manifest) -> Json:
    """Return the JSON document of finalize."""
    return {
        "path": folder,
        "outputs": [_describe_written(out) for out in manifest.outputs],
        "step": manifest.step,
        "plan": manifest.plan,
        "notes": describe_notes(manifest.notes),
    }


def _describe_not_listed(plan: Plan) -> Json:
    """Describe the parameters that the target strategy does not list."""
    return {
        "choice": plan.target.not_in_target,
        **{
            kind: {"tensors": tensors, "nbytes": nbytes}
            for kind, (tensors, nbytes) in plan.not_listed.sizes.items()
        },
    }


def _describe_written(output: Written) -> Json:
    return {
        "rank": output.rank,
        "path": output.path,
        "format": output.format,
        "nbytes": output.nbytes,
        "tensors": output.tensors,
    }


MAX_ROWS = 50  # of a table without --limit


def print_report(found: Report, deep: bool, crc: bool, options: ReportOptions) -> None:
    """Print the result of ``verify``."""
    if options.as_json:
        document = describe_report(found, deep)
        findings = document["findings"]
        assert isinstance(findings, list)
        print_json({**document, "findings": findings[: options.limit]})
        return
    shallow = "headers and checksums looked at" if crc else "headers read"
    depth = "all data read" if deep else f"{shallow}, not the data (--deep)"
    of_step = f", step {found.step}" if found.step else ""
    read = f"{count(len(found.ranks), 'rank')}{of_step}, {count(found.tensors, 'tensor')}, "
    read += f"{format_bytes(found.nbytes)}; {depth}"
    counts = found.count_severities()
    verdict = ", ".join(
        count(counts[severity], severity) for severity in ("error", "warning") if counts[severity]
    )
    clean = "nothing is wrong" if found.is_whole else "nothing is wrong with each rank by itself"
    echo(printable(f"{found.path}: {verdict or clean} ({read})"))
    _print_findings(found.findings, options.limit, "verify")
    # Ignored findings are among the notes and stay notes; other warnings of a conversion stand out.
    of_verify = severities("verify")
    severity_of = {
        code: "note" if of_verify[code] == "warning" else severity
        for code, severity in severities("convert").items()
    }
    print_notes(found.notes, options.quiet, severity_of)


def describe_report(found: Report, deep: bool) -> dict[str, object]:
    """Return the JSON document of ``verify``."""
    counts = found.count_severities()
    return {
        "path": found.path,
        "step": found.step,
        "ranks": list(found.ranks),
        "tensors": found.tensors,
        "nbytes": found.nbytes,
        "deep": deep,
        "clean": not found.findings,
        "errors": counts["error"],
        "warnings": counts["warning"],
        "findings": [_describe_finding(finding, "verify") for finding in found.findings],
        "notes": describe_notes(found.notes),
    }


def _describe_finding(finding: Diagnostic, command: Command) -> dict[str, object]:
    return {
        "severity": severities(command)[finding.code],
        "kind": finding.code,
        "text": finding.text,
        "tensor": finding.tensor,
        "ranks": list(finding.ranks),
        "count": finding.count,
        "first": None if finding.first is None else list(finding.first),
    }


def _print_findings(findings: Sequence[Diagnostic], limit: int | None, command: Command) -> None:
    severity_of = severities(command)
    rows = [(str(severity_of[found.code]), found.code, found.text) for found in findings]
    if rows:
        _print_rows("findings", ("severity", "kind", "what"), rows, limit)


def print_comparison(
    a: str,
    b: str,
    found: Comparison,
    tolerance: Tolerance | None,
    options: ReportOptions,
) -> None:
    """Print the result of ``diff``."""
    if options.as_json:
        document = {
            "a": a,
            "b": b,
            "equal": found.is_equal,
            "tensors": found.tensors,
            "nbytes": found.nbytes,
            "tolerance": tolerance and {"atol": tolerance.atol, "rtol": tolerance.rtol},
            "counts": _count_kinds(found),
            "differences": [_describe(tensor) for tensor in found.differences[: options.limit]],
            "findings": [_describe_finding(finding, "diff") for finding in found.findings],
            "notes": describe_notes(found.notes),
        }
        print_json(document)
        return
    how = "bytes" if tolerance is None else f"atol {tolerance.atol:g}, rtol {tolerance.rtol:g}"
    size = f"{count(found.tensors, 'tensor')}, {format_bytes(found.nbytes)} compared, {how}"
    verdict = "equal"
    if found.differences:
        parts = (f"{number} {_WORDS[kind]}" for kind, number in _count_kinds(found).items())
        verdict = f"different: {', '.join(parts)}"
    if found.findings:
        replicas = "replicas differ (the lowest rank's are compared)"
        verdict = (
            f"{verdict}; {replicas}" if found.differences else f"{replicas}, nothing else does"
        )
    echo(printable(f"A {a} and B {b}: {verdict} ({size})"))
    if found.differences:
        columns = ("tensor", "what", "A", "B", "differ>", "max abs>", "max rel>", "first")
        rows = [_row(tensor) for tensor in found.differences]
        _print_rows("differences", columns, rows, options.limit)
    _print_findings(found.findings, options.limit, "diff")
    print_notes(found.notes, options.quiet, severities("diff"))


_WORDS = {  # by kind of difference
    "only in A": "only in A",
    "only in B": "only in B",
    "dtype": "of another type",
    "shape": "of another shape",
    "text": "with another text",
    "values": "with other values",
}


def _count_kinds(found: Comparison) -> dict[str, int]:
    return dict(Counter(tensor.kind for tensor in found.differences))


def _describe(tensor: TensorDifference) -> dict[str, object]:
    values = tensor.values
    document: dict[str, object] = {
        "name": tensor.name,
        "rank": tensor.rank,
        "kind": tensor.kind,
        "a": _describe_meta(tensor.a),
        "b": _describe_meta(tensor.b),
    }
    if values is not None and tensor.a is not None:
        document["values"] = {
            "elements": math.prod(tensor.a.shape),
            "differing": values.count,
            "same_number": values.same_number,
            "nan_on_one_side": values.nans,
            "max_abs": _as_json(values.max_abs),
            "max_rel": _as_json(values.max_rel),
            "first": None if values.first is None else list(values.first),
        }
    return document


def _as_json(number: float | None) -> float | str | None:
    """Return a number that JSON can represent: Infinity becomes a string."""
    return "Infinity" if number == math.inf else number


def _describe_meta(meta: TensorMeta | None) -> dict[str, object] | None:
    if meta is None:
        return None
    text = {} if meta.text is None else {"text": meta.text}
    return {"dtype": meta.dtype, "shape": list(meta.shape), **text}


def _row(tensor: TensorDifference) -> Sequence[str]:
    name = tensor.name if tensor.rank is None else f"{tensor.name} (rank {tensor.rank})"
    a, b = ("" if meta is None else _show(meta) for meta in (tensor.a, tensor.b))
    if tensor.values is None or tensor.a is None:
        return (name, tensor.kind, a, b, "", "", "", "")
    values = tensor.values
    differ = f"{values.count} of {math.prod(tensor.a.shape)}"
    details = {"the same number": values.same_number, "NaN on one side": values.nans}
    if any(details.values()):
        differ += f" ({', '.join(f'{n} {what}' for what, n in details.items() if n)})"
    largest = ("" if x is None else f"{x:.6g}" for x in (values.max_abs, values.max_rel))
    first = "" if values.first is None else format_shape(values.first)
    return (name, tensor.kind, a, b, differ, *largest, first)


def _show(meta: TensorMeta) -> str:
    if meta.text is not None:
        return repr(meta.text if len(meta.text) <= 40 else meta.text[:37] + "...")
    return f"{meta.dtype} {format_shape(meta.shape)}"


def _print_rows(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], limit: int | None
) -> None:
    """Print a table of the first rows, and the number of the others."""
    max_rows = MAX_ROWS if limit is None else limit
    if max_rows:
        print_table(title, columns, rows[:max_rows])
    if len(rows) > max_rows:
        echo(f"and {len(rows) - max_rows} more (--limit N shows N, --json all)")


def print_foreign(path: str, as_json: bool) -> bool:
    """Print a graph, an exported model, group information or a rank table, and return True.

    Print nothing for any other file, and return False.
    """
    from ckpttool.formats import format_of_content
    from ckpttool.formats.foreign import identify_foreign, read_group_info, read_rank_table

    try:
        if not Path(path).is_file() or format_of_content(path) is not None:
            return False
        foreign = identify_foreign(path)
    except OSError:
        return False  # the scan of the source reports the error
    if foreign is None or foreign.kind not in ("graph", "mindir", "group_info", "rank_table"):
        return False
    info = read_group_info(path) if foreign.kind == "group_info" else None
    table = read_rank_table(path) if foreign.kind == "rank_table" else None
    nbytes = Path(path).stat().st_size
    if as_json:
        document: dict[str, object] = {"path": path, "kind": foreign.kind, "nbytes": nbytes}
        document |= _describe_groups(info) if info is not None else {}
        document |= _describe_table(table) if table is not None else {}
        print_json(document)
        return True
    echo(printable(f"{path}: {foreign.noun}, {format_bytes(nbytes)}"))
    if info is not None:
        _print_groups(info)
    if table is not None:
        _print_table(table)
    return True


def _describe_groups(info: GroupInfo) -> dict[str, object]:
    return {
        "groups": [{"name": name, "ranks": list(ranks)} for name, ranks in info.groups],
        "ckpt_restore_rank_list": list(info.restore_ranks),
    }


def _print_groups(info: GroupInfo) -> None:
    rows = [(name, ", ".join(map(str, ranks))) for name, ranks in info.groups]
    print_table(f"{len(rows)} groups", ("group", "ranks"), rows)
    ranks = ", ".join(map(str, info.restore_ranks))
    echo(f"checkpoints that can stand in for this rank's: of ranks {ranks}")


def _describe_table(table: RankTable) -> dict[str, object]:
    return {
        "version": table.version,
        "ranks": [
            {"rank": d.rank, "server": d.server, "device": d.device, "device_ip": d.ip}
            for d in table.devices
        ],
    }


def _print_table(table: RankTable) -> None:
    servers = len(table.servers)
    print_table(
        f"{len(table.devices)} ranks on {servers} server{'s' * (servers != 1)}",
        ("rank>", "server", "device>", "device ip"),
        ((str(d.rank), d.server, str(d.device), d.ip or "") for d in table.devices),
    )
