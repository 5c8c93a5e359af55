"""The JSON documents of the commands: a function for each, which takes the answer of the command.

Every key stands here.  Most are names of fields or properties of the answer (`_take`).  Every
document has ``"schema"``: `ckpttool._version.SCHEMA`, or more if a key has left it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import TYPE_CHECKING

from ckpttool._version import SCHEMA
from ckpttool.formats.foreign import ForeignFile
from ckpttool.model.manifest import LeftOut
from ckpttool.model.names import map_of_component
from ckpttool.model.slicing import BoxSlicing, LayoutSlicing, holdings
from ckpttool.operations.answer import Json, Reported, plain
from ckpttool.operations.describe import Inspection, SavesInspection, StrategyInspection
from ckpttool.operations.summary import layouts_of_rules, slice_shapes

if TYPE_CHECKING:
    from ckpttool.discovery.scan import Steps
    from ckpttool.formats.foreign import Device, RankTable
    from ckpttool.model.layout import Layout
    from ckpttool.model.slicing import FullTensor
    from ckpttool.model.strategy import Strategy
    from ckpttool.model.tensors import FileIndex
    from ckpttool.operations.describe import Inspected
    from ckpttool.operations.open import Array
    from ckpttool.operations.summary import Parallelism
    from ckpttool.operations.values import TensorValues, Values
    from ckpttool.problems import Diagnostics

_FILE = "path format nbytes"
_AMOUNT = "tensors parameters nbytes dtypes"
_OUTPUT = "rank path format nbytes tensors"
_NO_LAYOUT: Json = {"device_matrix": None, "tensor_map": None, "optimizer_shard": None}


def inspect(found: Inspected) -> Json:
    """Return the document of inspect."""
    match found:
        case Inspection():
            contents = _of_files(found) if found.is_merged else _of_ranks(found)
            return _document(contents, _diagnostics(found.found), summary=_summary(found))
        case SavesInspection(saves=saves):
            listed = [{"ranks": ranks, "files": names} for ranks, names in saves.items()]
            return _document({"path": found.path, "saves": listed}, _diagnostics(found.found))
        case StrategyInspection():
            return _document(_of_strategy(found))
        case ForeignFile():
            return _document(_take(found, "path kind nbytes"), _of_table(found.contents), schema=2)


def steps(found: Steps, diagnostics: Diagnostics) -> Json:
    """Return the document of inspect --steps."""
    keys = "name step complete reason ranks missing_ranks damaged_ranks files nbytes"
    listed = [{**_take(one, keys), "default": one.is_chosen} for one in found.steps]
    return _document({"path": found.path, "steps": listed}, _diagnostics(diagnostics))


def values(found: Values) -> Json:
    """Return the document of inspect --values."""
    return _document(
        **_take(found, "path step"),
        values=[*map(_tensor_values, found.tensors)],
        **_diagnostics(found.found),
    )


# ------------------------------------------------------------------------------------------ inspect


def _of_files(found: Inspection) -> Json:
    """Describe a merged checkpoint: one file, or several with an index."""
    catalog, files = found.catalog, found.catalog.files.values()
    if not (catalog.indexes or catalog.errors("inspect")):
        (file,) = files
        return {**_take(file, f"{_FILE} attrs"), "tensors": _stored(file)}
    return {
        "path": catalog.root,
        "format": ", ".join(sorted({file.format for file in files})),
        "nbytes": sum(file.nbytes for file in files),
        "indexes": catalog.indexes,
        "files": [{**_take(one, f"{_FILE} attrs"), "tensors": len(one.tensors)} for one in files],
        "tensors": [{**tensor, "file": one.path} for one in files for tensor in _stored(one)],
    }


def _stored(file: FileIndex) -> list[Json]:
    """Describe the stored tensors of a file."""
    return [
        {
            **_take(one.meta, "name dtype"),
            "shape": one.meta.header_shape,
            "nbytes": one.meta.nbytes,
            **_given(text=one.meta.text, map=map_of_component(one.meta.name)),
        }
        for one in file.tensors.values()
    ]


def _of_ranks(found: Inspection) -> Json:
    """Describe the files of ranks, and the full tensors, or those that ranks store."""
    catalog, description = found.catalog, found.catalog.description
    return {
        "path": catalog.root,
        "step": catalog.step,
        "ranks": [_rank(rank, file, found.devices) for rank, file in catalog.files.items()],
        **_given(values=None if description is None else description.values),
        "tensors": [
            {**_take(one, "name dtype shape nbytes"), "ranks": one.placement.owners[0]}
            if one.source is None
            else _full_tensor(one.source, found.checkpoint.strategy)
            for one in found.summary.entries
        ],
    }


def _rank(rank: int, file: FileIndex, devices: Mapping[int, Device]) -> Json:
    device = devices.get(rank)
    place = {"server": device and device.server, "device": device and device.device}
    return {
        "rank": rank,
        **_take(file, _FILE),
        "tensors": len(file.tensors),
        **_given(other_paths=file.paths[1:] or None),
        **(place if devices else {}),
    }


def _full_tensor(source: FullTensor, sharding: Strategy) -> Json:
    """Describe a full tensor, and the ranks that hold its slices."""
    meta, slicing = source.meta, source.slicing
    if isinstance(slicing, BoxSlicing):
        slices = [*holdings(source)]
        return {
            **_slices(source),
            "nbytes": meta.nbytes,
            **_NO_LAYOUT,
            "stages": [],
            "ranks": sorted({*chain(*(one.holders for one in slices))}),
            "parts": slicing.slice_counts if slicing.is_grid else None,
            "slices": [
                {**_take(one.region, "start shape"), "ranks": one.holders} for one in slices
            ],
        }
    assert isinstance(slicing, LayoutSlicing)
    base = meta.name if source.is_listed else source.parameter
    layouts = sharding.layouts.get(base, ()) if base else ()
    return {
        **_slices(source),
        **(_layout(source.layout) if base else _NO_LAYOUT),
        "nbytes": meta.nbytes,
        **_given(handwritten=sharding.handwritten.get(meta.name)),
        "stages": [layout.stage for layout in layouts],
        "ranks": [*slicing.files],
    }


def _slices(source: FullTensor) -> Json:
    """Describe a full tensor: the shape of its first slice, and all shapes if there are several."""
    shapes = slice_shapes(source)
    several = shapes if len(shapes) > 1 else None
    return {
        **_take(source.meta, "name dtype shape"),
        "slice_shape": shapes[0],
        **_given(slice_shapes=several),
    }


def _layout(layout: Layout) -> Json:
    fields = layout.fields if layout.fields > 1 else None
    return {
        **_take(layout, "device_matrix tensor_map optimizer_shard"),
        **_given(rows=layout.rows or None, fields=fields),
    }


def _tensor_values(one: TensorValues) -> Json:
    """Describe the values of a tensor; the elements only if NumPy prints all of them."""
    rows, found = one.rows, one.statistics
    elements = None if one.is_summarized else _elements(one.shown)
    return {
        **_take(one, "name dtype shape nbytes"),
        "rows": None if rows is None else [rows.start, rows.stop, rows.step],
        "statistics": found
        and {
            **_take(found, "elements nans infinities zeros finite minimum maximum"),
            **{key: _number(getattr(found, key)) for key in ("mean", "norm")},
        },
        "elements": elements,
    }


def _elements(array: Array) -> object:
    """Return an array as lists of numbers; bytes that are no numbers as integers."""
    plain = array.view("u1") if array.dtype.kind == "V" else array
    return _each_number(plain.tolist())


def _each_number(value: object) -> object:
    return [*map(_each_number, value)] if isinstance(value, list) else _number(value)


def _number(value: object) -> object:
    if isinstance(value, complex):
        return [_number(value.real), _number(value.imag)]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _summary(found: Inspection) -> Json:
    summary, amounts, done = found.summary, found.summary.amounts, found.completeness
    return {
        "weights": _take(amounts.weights, _AMOUNT),
        "optimizer_state": _take(amounts.optimizer_state, _AMOUNT),
        "other": _take(amounts.other, _AMOUNT),
        **_given(copies=_take(amounts.copies, _AMOUNT) if amounts.copies.tensors else None),
        **_given(left_out=(of := LeftOut.of(found.left_out)) and _take(of, "tensors nbytes")),
        "parallelism": _parallelism(summary.parallelism),
        **_take(done, "complete complete_codes missing_ranks unreadable_ranks"),
        **_take(done, "missing_tensors replicas"),
        "equal_ranks": _each(summary.equal_ranks.values(), "name ranks one_value sampled"),
    }


def _parallelism(one: Parallelism | None) -> object:
    return one and {
        **_take(one, "tensor_parallel tensors"),
        "splits": _each(one.splits, "slices replicas tensors"),
        "stages": _each(one.stages, "ranks device_matrices"),
        "optimizer_shards": _each(one.optimizer_shards, "slices tensors"),
    }


def _diagnostics(found: Diagnostics) -> Json:
    """Describe what was found: notes and warnings, and what is wrong."""
    of_files = [one for error in found.failures for one in error.diagnostics]
    return {
        "notes": Reported(found.of("note", "warning"), found.severity_of),
        "problems": Reported((*of_files, *found.errors)),
    }


def _of_strategy(found: StrategyInspection) -> Json:
    strategy, of_rules = found.strategy, layouts_of_rules(found.strategy)
    rules = strategy.rules.rules if strategy.rules else ()
    return {
        "kind": "strategy",
        "files": strategy.files,
        "ranks": len(strategy.ranks),
        "stages": strategy.stages,
        "tensors": [
            {"name": name, "layouts": _stages(layouts)}
            for name, layouts in strategy.layouts.items()
        ],
        "rules": [
            {**_take(rule, "pattern place"), "layouts": _stages(of_rules[rule.pattern])}
            for rule in rules
        ],
        "replicates_rest": strategy.rules is not None and strategy.rules.replicates_rest,
        "notes": _diagnostics(found.found)["notes"],
        "summary": {"parallelism": _parallelism(found.summary.parallelism)},
    }


def _stages(layouts: Iterable[Layout]) -> list[Json]:
    return [{"stage": one.stage, "shape": one.full_shape, **_layout(one)} for one in layouts]


def _of_table(table: RankTable | None) -> Json:
    if table is None:
        return {}
    devices = [{**_take(one, "rank server device"), "device_ip": one.ip} for one in table.devices]
    return {"version": table.version, "ranks": devices}


# ---------------------------------------------------------------------------------- other documents


# --------------------------------------------------------------------------------------------- keys


def _document(*parts: Json, **keys: object) -> Json:
    document: Json = {"schema": SCHEMA}
    for part in (*parts, keys):
        document |= {key: plain(value) for key, value in part.items()}
    return document


def _take(answer: object, names: str) -> Json:
    return {name: getattr(answer, name) for name in names.split()}


def _each(answers: Iterable[object], names: str) -> list[Json]:
    return [_take(one, names) for one in answers]


def _given(**keys: object) -> Json:
    return {key: value for key, value in keys.items() if value is not None}
