"""The JSON documents of the commands; that of inspect is made by `ckpttool.describe`.

Every document has ``"schema"``; see `ckpttool._version.SCHEMA`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ckpttool._version import SCHEMA
from ckpttool.model.names import parse_name
from ckpttool.model.slicing import LayoutSlicing, Source
from ckpttool.problems import (
    Diagnostic,
    describe_diagnostics,
    describe_errors,
    severities,
)

if TYPE_CHECKING:
    from ckpttool.model.plan import Document, Plan
    from ckpttool.model.tensors import TensorMeta
    from ckpttool.operations.describe import Json
    from ckpttool.operations.diff import Comparison, TensorDifference
    from ckpttool.operations.verify import Report
    from ckpttool.storage.compare import Tolerance
    from ckpttool.transaction.manifest import Manifest, Written
    from ckpttool.transaction.resume import Assignment


MAX_SHARDED = 3  # tensors that `find_largest` returns


def describe_run(
    plan: Plan, assignment: Assignment, written: Sequence[Written], seconds: float
) -> Json:
    """Return the JSON document of merge, split and reshard."""
    from ckpttool.operations.describe import describe_layout

    documents = documents_of(plan, assignment)
    indexes = [document.path for document in documents if document.kind == "index"]
    strategies = [document.path for document in documents if document.kind == "strategy"]
    manifest, part = str(Path(plan.target.manifest_path)), assignment.part
    sharded = [describe_layout(source) for source in find_largest(plan)]
    return {
        "schema": SCHEMA,
        "outputs": [{**_describe_written(out), "kept": out.is_kept} for out in written],
        "step": plan.catalog.step,
        "src_bytes": sum(file.nbytes for file in plan.catalog.files.values()),
        "dst_bytes": sum(out.nbytes for out in written),
        "seconds": round(seconds, 6),
        **({"largest_sharded": sharded} if sharded else {}),
        **({} if plan.target.is_merged else _describe_not_listed(plan, assignment)),
        "notes": describe_diagnostics((*plan.notes, *assignment.notes), severities("convert")),
        **({"indexes": indexes} if indexes else {}),
        **({"strategy": strategies[0]} if strategies else {}),
        **({"part": f"{part.number}/{part.count}"} if part else {"manifest": manifest}),
    }


def documents_of(plan: Plan, assignment: Assignment) -> tuple[Document, ...]:
    """Return the documents that a run has written; for a set in parts, `finalize` writes them."""
    return plan.documents if assignment.part is None else ()


def find_largest(plan: Plan) -> Sequence[Source]:
    """Return the largest sharded tensors, with the layouts with which they were read.

    A strategy file contains no shapes, and a file from a different run may fit.  A person can see
    that in the shapes.  Parameters come before their states; equal shapes and layouts are shown
    once.
    """
    sharded = {
        source.slicing.key: source
        for source in sorted(
            (transfer.source for transfer in plan.transfers),
            key=lambda source: (
                parse_name(source.meta.name).same_shape_parameter is None,
                source.meta.nbytes,
            ),
        )
        if isinstance(source.slicing, LayoutSlicing) and math.prod(source.layout.slice_counts) > 1
    }
    return [*reversed(sharded.values())][:MAX_SHARDED]


def describe_manifest(folder: str, manifest: Manifest) -> Json:
    """Return the JSON document of finalize."""
    return {
        "schema": SCHEMA,
        "path": folder,
        "outputs": [_describe_written(out) for out in manifest.outputs],
        "step": manifest.step,
        "plan": manifest.plan,
        "notes": describe_diagnostics(manifest.notes, severities("convert")),
    }


def _describe_not_listed(plan: Plan, assignment: Assignment) -> Json:
    """Describe the parameters that the target strategy does not list."""
    kinds = {
        kind: {"tensors": tensors, "nbytes": nbytes}
        for kind, (tensors, nbytes) in plan.not_listed.sizes.items()
    }
    return {"not_in_target": {"choice": assignment.options.not_in_target, **kinds}}


def _describe_written(output: Written) -> Json:
    return {
        "rank": output.rank,
        "path": output.path,
        "format": output.format,
        "nbytes": output.nbytes,
        "tensors": output.tensors,
    }


def describe_report(found: Report, deep: bool, limit: int | None) -> Json:
    """Return the JSON document of verify, with the first ``limit`` findings."""
    counts = found.count_severities()
    return {
        "schema": SCHEMA,
        "path": found.path,
        "step": found.step,
        "files": found.files,
        "ranks": list(found.ranks or ()),
        "tensors": found.tensors,
        "nbytes": found.nbytes,
        "deep": deep,
        "clean": not found.findings,
        "errors": counts["error"],
        "warnings": counts["warning"],
        "findings": describe_diagnostics(found.findings[:limit], found.severity_of),
        "notes": describe_diagnostics(found.notes, found.severity_of),
    }


def describe_comparison(
    a: str, b: str, found: Comparison, tolerance: Tolerance | None, limit: int | None
) -> Json:
    """Return the JSON document of diff, with the first ``limit`` differences."""
    severity_of = severities("diff")
    return {
        "schema": SCHEMA,
        "a": a,
        "b": b,
        "equal": found.is_equal,
        "tensors": found.tensors,
        "nbytes": found.nbytes,
        "tolerance": tolerance and {"atol": tolerance.atol, "rtol": tolerance.rtol},
        "counts": found.count_kinds(),
        "differences": [_describe_difference(tensor) for tensor in found.differences[:limit]],
        "findings": describe_diagnostics(found.findings, severity_of),
        "notes": describe_diagnostics(found.notes, severity_of),
    }


def describe_failure(exit_code: int, problems: Sequence[Diagnostic]) -> Json:
    """Return the JSON document of a command that could not do what was requested."""
    error = {"exit_code": exit_code, "diagnostics": describe_errors(problems)}
    return {"schema": SCHEMA, "error": error}


def _describe_difference(tensor: TensorDifference) -> Json:
    values = tensor.values
    document: Json = {
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


def _describe_meta(meta: TensorMeta | None) -> Json | None:
    if meta is None:
        return None
    text = {} if meta.text is None else {"text": meta.text}
    return {"dtype": meta.dtype, "shape": list(meta.header_shape), **text}
