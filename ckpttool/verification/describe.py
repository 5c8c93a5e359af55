"""Describe a checkpoint as one JSON document: files, tensors, full shapes and layouts.

Modules that read contents are imported late, so that describing a single file needs no numpy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import replace

from ckpttool._version import SCHEMA
from ckpttool.concurrency import InlineExecutor
from ckpttool.discovery.mindformers_output import find_devices
from ckpttool.errors import CkptToolError, FormatError
from ckpttool.formats import format_of_content
from ckpttool.formats.foreign import Device, identify_foreign, read_group_info, read_rank_table
from ckpttool.formats.local import is_file, stat_file
from ckpttool.model.catalog import Catalog, MergedCatalog, SelfDescribedCatalog
from ckpttool.model.diagnostics import (
    Diagnostic,
    Diagnostics,
    describe_diagnostics,
    describe_errors,
    diagnose,
)
from ckpttool.model.slicing import BoxSlicing, LayoutSlicing, Source
from ckpttool.model.strategy import Merged, Sharding, Strategy
from ckpttool.model.tensors import FileIndex, map_of
from ckpttool.planning.missing import (
    limit_to_written_ranks,
    quarantine_damaged,
    redundancy_note,
    scan_notes,
)
from ckpttool.planning.sources import one_of_several_notes, suspected_rank_slices

Json = dict[str, object]


def describe(
    catalog: Catalog,
    strategy: Strategy | None = None,
    *,
    crc: bool = False,
    executor: Executor | None = None,
    diagnostics: Diagnostics | None = None,
) -> Json:
    """Describe a checkpoint, as ``ckpttool inspect --json`` prints it.

    Parameters
    ----------
    catalog
        The files on disk, from `scan`.
    strategy
        The layouts.  With them, or if the checkpoint describes itself, the document has full
        shapes, and samples of the tensors are checked against them.
    crc
        Verify checksums.
    executor
        Reads contents; by default the caller's own thread.
    diagnostics
        Collects problems, and the notes of the document.

    Raises
    ------
    PlanError
        The checkpoint takes no strategy.

    Examples
    --------
    See "Python" in the guides (docs/guides/from-python.md).
    """
    executor = executor or InlineExecutor()
    found = Diagnostics("inspect") if diagnostics is None else diagnostics
    found.failures[:0] = catalog.damaged.values()
    if crc:
        from ckpttool.storage.checksums import check_files

        errors, of_checksums = check_files(catalog, executor, crc=True)
        found.failures += errors
        catalog = replace(catalog, diagnostics=(*catalog.diagnostics, *of_checksums))
    if isinstance(catalog, MergedCatalog) and strategy is None:
        document = _describe_merged(catalog, found)
    else:
        document = _describe_ranks(catalog, strategy, executor, found)
    found.failures = _join_replaced(found)
    return {"schema": SCHEMA, **document}


def _join_replaced(found: Diagnostics) -> list[CkptToolError]:
    """Return the errors, with the hint of ``damaged_replica`` for files that replicas replace."""
    replaced = {one.path: one.hint for one in found if one.code == "damaged_replica"}
    return [
        type(error)(error.path, error.offset, f"{error.reason}; {replaced[error.path]}")
        if isinstance(error, FormatError) and error.path in replaced
        else error
        for error in found.failures
    ]


def _describe_merged(catalog: MergedCatalog, found: Diagnostics) -> Json:
    """Describe a single file, or several files with an index."""
    found.add(*one_of_several_notes(catalog), *catalog.diagnostics)
    if not (catalog.indexes or catalog.errors("inspect")):
        (file,) = catalog.files.values()
        text = (
            f"{file.path}: nothing in it ({file.nbytes} bytes): cut short, or of a rank that was "
        )
        if not file.tensors:
            found.add(Diagnostic("empty", text + "saved without redundancy"))
        tensors = list(_describe_stored(file))
        return {**_describe_file(file), "tensors": tensors, "notes": _describe_notes(found)}
    files = catalog.files.values()
    slices = suspected_rank_slices(catalog).values()
    text = f"not in the index, so perhaps slices of rank 0: {', '.join(slices)}"
    if slices:
        found.add(Diagnostic("doubt", text))
    return {
        "path": catalog.root,
        "format": ", ".join(sorted({file.format for file in files})),
        "nbytes": sum(file.nbytes for file in files),
        "indexes": list(catalog.indexes),
        "files": [{**_describe_file(file), "tensors": len(file.tensors)} for file in files],
        "tensors": [
            {**tensor, "file": file.path} for file in files for tensor in _describe_stored(file)
        ],
        "notes": _describe_notes(found),
        "problems": _describe_problems(found),
    }


def _describe_file(file: FileIndex) -> Json:
    return {
        "path": file.path,
        "format": file.format,
        "nbytes": file.nbytes,
        "attrs": dict(file.attrs),
    }


def _describe_stored(file: FileIndex) -> Iterator[Json]:
    """Describe the stored tensors of a file."""
    for meta in (tensor.meta for tensor in file.tensors.values()):
        yield {
            "name": meta.name,
            "dtype": meta.dtype,
            "shape": list(meta.shape),
            "nbytes": meta.nbytes,
            **({} if meta.text is None else {"text": meta.text}),
            **({} if (tag := map_of(meta.name)) is None else {"map": tag}),
        }


def _describe_ranks(
    catalog: Catalog, strategy: Strategy | None, executor: Executor, found: Diagnostics
) -> Json:
    """Describe the files of ranks, and with layouts the full tensors."""
    catalog, of_part = limit_to_written_ranks(catalog, strategy)
    table = Diagnostics("inspect")
    devices = {} if isinstance(catalog, MergedCatalog) else find_devices(catalog.root, table)
    catalog = replace(catalog, diagnostics=(*catalog.diagnostics, *table))
    found.add(*of_part, *catalog.errors())
    document: Json = {
        "path": catalog.root,
        "step": catalog.step,
        "ranks": [
            {**_describe_rank(rank, file), **_describe_place(rank, devices)}
            for rank, file in catalog.files.items()
        ],
    }
    if isinstance(catalog, SelfDescribedCatalog):
        document["values"] = dict(catalog.description.values)
    if strategy is not None or isinstance(catalog, SelfDescribedCatalog):
        document["tensors"] = _describe_tensors(catalog, strategy, executor, found)
    else:
        checked = quarantine_damaged(catalog, Merged())
        quarantined = [rank for rank in catalog.files if rank not in checked.files]
        found.failures += [checked.damaged[rank] for rank in quarantined]
        found.add(*scan_notes(catalog, Merged()))
        found.add(*filter(None, [redundancy_note(checked, is_deduplicated=None)]))
    document["notes"] = _describe_notes(found)
    document["problems"] = _describe_problems(found)
    return document


def _describe_notes(found: Diagnostics) -> list[Json]:
    return describe_diagnostics(found.of("note", "warning"), found.severity_of)


def _describe_problems(found: Diagnostics) -> list[Json]:
    """Describe what is wrong, files first."""
    of_files = (one for error in found.failures for one in diagnose(error))
    return describe_errors((*of_files, *found.errors))


def _describe_rank(rank: int, file: FileIndex) -> Json:
    return {
        "rank": rank,
        "path": file.path,
        "format": file.format,
        "nbytes": file.nbytes,
        "tensors": len(file.tensors),
        **({"beside": list(file.paths[1:])} if len(file.files) > 1 else {}),
    }


def _describe_place(rank: int, devices: Mapping[int, Device]) -> Json:
    """Describe the server and the device of a rank, if there is a rank table."""
    if not devices:
        return {}
    device = devices.get(rank)
    return {"server": device and device.server, "device": device and device.device}


def _describe_tensors(
    catalog: Catalog, strategy: Strategy | None, executor: Executor, found: Diagnostics
) -> list[Json]:
    """Describe the full tensors."""
    from ckpttool.planning.resolve import ResolveOptions, resolve

    if strategy is not None:
        strategy, reasons = strategy.resolve(catalog.metas)
        found.add(*Diagnostic.each("strategy", reasons))
    of_headers = Diagnostics("inspect")
    options = ResolveOptions(unlisted="first")
    resolved = resolve(catalog, strategy, options, executor, of_headers, contents="samples")
    damaged = resolved.catalog.damaged.values()
    found.failures[:0] = [error for error in damaged if error not in catalog.damaged.values()]
    found.failures += (error for error in of_headers.failures if error not in damaged)
    found.add(*of_headers, *resolved.content_diagnostics)
    return [_describe_source(source, resolved.sharding) for source in resolved.sources]


def describe_foreign(path: str) -> Json | None:
    """Describe a graph, an exported model, group information or a rank table; else return None.

    Raises
    ------
    FormatError
        The group information or the rank table is damaged.
    """
    try:
        if not is_file(path) or format_of_content(path) is not None:
            return None
        foreign = identify_foreign(path)
    except OSError:
        return None  # the scan of the source reports the error
    if foreign is None or foreign.kind not in ("graph", "mindir", "group_info", "rank_table"):
        return None
    more: Json = {}
    if foreign.kind == "group_info":
        info = read_group_info(path)
        more["groups"] = [{"name": name, "ranks": list(ranks)} for name, ranks in info.groups]
        more["ckpt_restore_rank_list"] = list(info.restore_ranks)
    if foreign.kind == "rank_table":
        table = read_rank_table(path)
        more["version"] = table.version
        more["ranks"] = [
            {"rank": one.rank, "server": one.server, "device": one.device, "device_ip": one.ip}
            for one in table.devices
        ]
    nbytes = stat_file(path).nbytes
    return {"schema": SCHEMA, "path": path, "kind": foreign.kind, "nbytes": nbytes, **more}


def describe_layout(source: Source) -> Json:
    """Describe a full tensor, its slices and its layout."""
    shape, layout = source.meta.shape, source.layout
    return {
        "name": source.meta.name,
        "dtype": source.meta.dtype,
        "shape": list(shape),
        **_describe_shapes(layout.slice_shapes(shape)),
        "device_matrix": list(layout.device_matrix),
        "tensor_map": [list(axes) for axes in layout.tensor_map],
        "optimizer_shard": layout.optimizer_shard,
        **({"rows": list(layout.rows)} if layout.rows else {}),
        **({"fields": layout.fields} if layout.fields > 1 else {}),
    }


def _describe_shapes(shapes: Iterable[tuple[int, ...]]) -> Json:
    """Describe the shape of the first slice, and all shapes if slices have several."""
    distinct = list(map(list, dict.fromkeys(shapes)))
    more = {"slice_shapes": distinct} if len(distinct) > 1 else {}
    return {"slice_shape": distinct[0], **more}


def _describe_source(source: Source, sharding: Sharding) -> Json:
    slicing = source.slicing
    if isinstance(slicing, BoxSlicing):
        return _describe_boxes(source, slicing)
    assert isinstance(slicing, LayoutSlicing)
    name = source.meta.name
    base = name if source.is_listed else source.parameter
    return {
        **describe_layout(source),
        **({} if base else dict.fromkeys(("device_matrix", "tensor_map", "optimizer_shard"))),
        **({"by_hand": sharding.handwritten[name]} if name in sharding.handwritten else {}),
        "stages": list(sharding.stages_of(base)) if base and isinstance(sharding, Strategy) else [],
        "ranks": list(slicing.tensors),
    }


def _describe_boxes(source: Source, slicing: BoxSlicing) -> Json:
    """Describe a tensor of a checkpoint that describes itself, with the keys of a layout."""
    slices = [(boxes[0].region, [box.rank for box in boxes]) for boxes in slicing.slices]
    return {
        "name": source.meta.name,
        "dtype": source.meta.dtype,
        "shape": list(source.meta.shape),
        **_describe_shapes(region.shape for region, _ in slices),
        **dict.fromkeys(("device_matrix", "tensor_map", "optimizer_shard")),
        "stages": [],
        "ranks": sorted({rank for _, ranks in slices for rank in ranks}),
        "parts": list(slicing.slice_counts) if slicing.is_grid else None,
        "slices": [
            {"start": list(region.start), "shape": list(region.shape), "ranks": ranks}
            for region, ranks in slices
        ],
    }
