"""The JSON documents of the commands: a function for each, which takes the answer of the command.

Every document has ``"schema"``; see `ckpttool._version.SCHEMA`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING

from ckpttool._version import SCHEMA
from ckpttool.problems import Diagnostic, describe_diagnostics, describe_errors, severities

if TYPE_CHECKING:
    from ckpttool.model.tensors import TensorMeta
    from ckpttool.operations.convert import Conversion
    from ckpttool.operations.describe import Json
    from ckpttool.operations.diff import Difference, TensorDifference
    from ckpttool.operations.verify import Verification
    from ckpttool.storage.compare import TensorDelta
    from ckpttool.transaction.manifest import Manifest

_OUTPUT = "rank path format nbytes tensors"


def convert(done: Conversion) -> Json:
    """Return the document of merge, split and reshard."""
    from ckpttool.operations.describe import describe_layout

    target, part = done.plan.target, done.assignment.part
    indexes, strategies = (
        [one.path for one in done.documents if one.kind == kind] for kind in ("index", "strategy")
    )
    choice, sizes = done.assignment.options.not_in_target, done.plan.not_listed.sizes
    not_listed = {
        kind: {"tensors": tensors, "nbytes": nbytes} for kind, (tensors, nbytes) in sizes.items()
    }
    return {
        "schema": SCHEMA,
        "outputs": [{**_take(one, _OUTPUT), "kept": one.is_kept} for one in done.outputs],
        "step": done.source.step,
        **_take(done, "src_bytes dst_bytes"),
        "seconds": round(done.seconds, 6),
        **_given(
            largest_sharded=[describe_layout(one) for one in done.largest_sharded],
            not_in_target=not target.is_merged and {"choice": choice, **not_listed},
        ),
        "notes": describe_diagnostics(done.notes, severities("convert")),
        **_given(
            indexes=indexes,
            strategy=strategies and strategies[0],
            part=part and str(part),
            manifest=done.manifest,
        ),
    }


def finalize(folder: str, manifest: Manifest) -> Json:
    """Return the document of finalize."""
    return {
        "schema": SCHEMA,
        "path": folder,
        "outputs": [_take(one, _OUTPUT) for one in manifest.outputs],
        **_take(manifest, "step plan"),
        "notes": describe_diagnostics(manifest.notes, severities("convert")),
    }


def verify(found: Verification, limit: int | None) -> Json:
    """Return the document of verify, with the first ``limit`` findings."""
    counts = found.count_severities()
    return {
        "schema": SCHEMA,
        **_take(found, "path step files"),
        "ranks": list(found.ranks or ()),
        **_take(found, "tensors nbytes deep"),
        "clean": not found.findings,
        "errors": counts["error"],
        "warnings": counts["warning"],
        "findings": describe_diagnostics(found.findings[:limit], found.severity_of),
        "notes": describe_diagnostics(found.notes, found.severity_of),
    }


def diff(a: str, b: str, found: Difference, limit: int | None) -> Json:
    """Return the document of diff, with the first ``limit`` differences."""
    return {
        "schema": SCHEMA,
        "a": a,
        "b": b,
        "equal": found.is_equal,
        **_take(found, "tensors nbytes"),
        "tolerance": found.tolerance and asdict(found.tolerance),
        "counts": found.count_kinds(),
        "differences": [_tensor_difference(one) for one in found.differences[:limit]],
        "findings": describe_diagnostics(found.findings, severities("diff")),
        "notes": describe_diagnostics(found.notes, severities("diff")),
    }


def failure(exit_code: int, problems: Iterable[Diagnostic]) -> Json:
    """Return the document of a command that could not do what was requested."""
    error = {"exit_code": exit_code, "diagnostics": describe_errors(problems)}
    return {"schema": SCHEMA, "error": error}


def _tensor_difference(one: TensorDifference) -> Json:
    values = one.values and one.a and _values(one.values, math.prod(one.a.shape))
    return {
        **_take(one, "name rank kind"),
        "a": one.a and _meta(one.a),
        "b": one.b and _meta(one.b),
        **_given(values=values),
    }


def _values(values: TensorDelta, elements: int) -> Json:
    """Describe values that differ; JSON has no infinity, which is then a text."""
    largest = {"max_abs": values.max_abs, "max_rel": values.max_rel}
    return {
        "elements": elements,
        "differing": values.count,
        "same_number": values.same_number,
        "nan_on_one_side": values.nans,
        **{key: "Infinity" if one == math.inf else one for key, one in largest.items()},
        "first": None if values.first is None else list(values.first),
    }


def _meta(meta: TensorMeta) -> Json:
    return {"dtype": meta.dtype, "shape": list(meta.header_shape), **_given(text=meta.text)}


def _take(answer: object, keys: str) -> Json:
    """Return the fields or properties with these names."""
    return {key: getattr(answer, key) for key in keys.split()}


def _given(**keys: object) -> Json:
    """Return the keys that have something; a text may be empty."""
    return {key: value for key, value in keys.items() if value or value == ""}
