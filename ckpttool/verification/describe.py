"""Describe a checkpoint as one JSON document: files, tensors, full shapes and layouts.

Modules that read contents are imported late, so that describing a single file needs no numpy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace

from ckpttool._version import SCHEMA
from ckpttool.concurrency import InlineExecutor
from ckpttool.discovery.mindformers_output import find_devices
from ckpttool.errors import CkptToolError, FormatError
from ckpttool.formats import format_of_content
from ckpttool.formats.foreign import Device, identify_foreign, read_group_info, read_rank_table
from ckpttool.formats.local import is_file, is_folder, list_folder, stat_file
from ckpttool.model.catalog import Catalog, MergedCatalog, SelfDescribedCatalog
from ckpttool.model.diagnostics import (
    Diagnostic,
    Diagnostics,
    describe_diagnostics,
    describe_errors,
    diagnose,
    severities,
)
from ckpttool.model.layout import Layout
from ckpttool.model.slicing import BoxSlicing, LayoutSlicing, Source
from ckpttool.model.strategy import Merged, Replicated, Sharding, Strategy
from ckpttool.model.tensors import FileIndex, map_of
from ckpttool.planning.missing import (
    limit_to_written_ranks,
    quarantine_damaged,
    redundancy_note,
    scan_notes,
)
from ckpttool.planning.optimizer_state import match_states_by_name, match_states_by_shape
from ckpttool.planning.sources import listed_names, one_of_several_notes, suspected_rank_slices
from ckpttool.verification.summary import (
    Amount,
    Entry,
    EqualRanks,
    Parallelism,
    Summary,
    assess,
    entries_of_files,
    entries_of_sources,
    entries_of_strategy,
    find_parallelism,
    rows_of_rules,
    summarize,
)

Json = dict[str, object]

MAX_SAMPLED_RANKS = 64
MAX_SAMPLES = 2048  # slices whose pages are read unasked: as quick as the headers of some files


@dataclass(frozen=True, slots=True)
class Inspection:
    """What a checkpoint or a strategy holds: a document for programs, and its summary."""

    document: Json
    summary: Summary


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
    return examine(catalog, strategy, crc=crc, executor=executor, diagnostics=diagnostics).document


def examine(
    catalog: Catalog,
    strategy: Strategy | None = None,
    *,
    crc: bool = False,
    sample_all: bool = False,
    executor: Executor | None = None,
    diagnostics: Diagnostics | None = None,
) -> Inspection:
    """Describe a checkpoint like `describe`, and summarize it.

    With ``sample_all``, pages of every tensor that has no layout tell which ranks hold the same of
    it; without, pages of one tensor of each row do, if these are few.
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
        entries = entries_of_files(catalog)
        summary = summarize(
            entries,
            match_states_by_shape((), catalog.metas),
            completeness=assess(catalog, Merged(), entries, found),
        )
    else:
        document, summary = _describe_ranks(catalog, strategy, executor, sample_all, found)
    found.failures = _join_replaced(found)
    return Inspection(
        {"schema": SCHEMA, **document, "summary": _describe_summary(summary)}, summary
    )


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
    catalog: Catalog,
    strategy: Strategy | None,
    executor: Executor,
    sample_all: bool,
    found: Diagnostics,
) -> tuple[Json, Summary]:
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
        document["tensors"], summary = _describe_tensors(catalog, strategy, executor, found)
    else:
        checked = quarantine_damaged(catalog, Merged())
        quarantined = [rank for rank in catalog.files if rank not in checked.files]
        found.failures += [checked.damaged[rank] for rank in quarantined]
        found.add(*scan_notes(catalog, Merged()))
        found.add(*filter(None, [redundancy_note(checked, is_deduplicated=None)]))
        summary = _summarize_files(checked, found)
    equal_ranks = _sample_equal_ranks(catalog, summary, sample_all, executor, found)
    document["notes"] = _describe_notes(found)
    document["problems"] = _describe_problems(found)
    return document, replace(summary, equal_ranks=equal_ranks)


def _summarize_files(catalog: Catalog, found: Diagnostics) -> Summary:
    """Summarize files without layouts."""
    entries = entries_of_files(catalog)
    parameter_of_state = match_states_by_shape((), catalog.metas)
    completeness = assess(catalog, None, entries, found)
    return summarize(entries, parameter_of_state, completeness=completeness)


def _sample_equal_ranks(
    catalog: Catalog,
    summary: Summary,
    sample_all: bool,
    executor: Executor,
    found: Diagnostics,
) -> Mapping[str, EqualRanks]:
    """Return which ranks hold the same of tensors without a layout, as some pages tell.

    It is empty if that takes longer than reading the headers, unless ``sample_all``.  Of equal
    layers only the first is sampled, unless ``sample_all``.
    """
    ranks = len(catalog.files)
    names = [
        name
        for row in summary.rows
        if row.first.placement.known in ("unlisted", "stored")
        for name in (row.names if sample_all or row.is_in_line else row.names[:1])
    ]
    is_quick = ranks <= MAX_SAMPLED_RANKS and ranks * len(names) <= MAX_SAMPLES
    if ranks < 2 or not names or not (is_quick or sample_all):
        return {}
    from ckpttool.planning.resolve import sample_ranks
    from ckpttool.storage.sampling import SAMPLE_BYTES

    try:
        return {
            name: EqualRanks(groups, is_constant, catalog.metas[name].nbytes > SAMPLE_BYTES)
            for name, groups, is_constant in sample_ranks(catalog, names, executor)
        }
    except CkptToolError as error:
        found.failures.append(error)
        return {}


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
) -> tuple[list[Json], Summary]:
    """Describe the full tensors, and summarize them."""
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
    tensors = [_describe_source(source, resolved.sharding) for source in resolved.sources]
    catalog, sharding = resolved.catalog, resolved.sharding
    if not resolved.sources or any(one.code == "strategy" for one in found):
        return tensors, _summarize_files(catalog, found)
    metas = {source.meta.name: source.meta for source in resolved.sources}
    is_replicated = isinstance(sharding, Replicated)
    entries = entries_of_sources(
        catalog,
        resolved.sources,
        is_replicated=is_replicated,
        is_deduplicated=resolved.is_deduplicated,
    )
    incomplete: tuple[Entry, ...] = ()
    if isinstance(sharding, Strategy):
        names = catalog.holders.keys() - metas.keys()
        incomplete = entries_of_strategy(sharding, names)
    parameter_of_state = match_states_by_shape(listed_names(catalog, sharding), metas)
    summary = summarize(
        entries,
        parameter_of_state,
        find_parallelism((*entries, *incomplete), parameter_of_state, sharding),
        assess(catalog, sharding, entries, found),
    )
    return tensors, summary


def _describe_summary(summary: Summary) -> Json:
    """Describe the amounts, the parallelism and the completeness of a summary."""
    done, parallelism = summary.completeness, summary.parallelism
    document: Json = {
        "weights": _describe_amount(summary.weights),
        "optimizer_state": _describe_amount(summary.optimizer_state),
        "other": _describe_amount(summary.other),
        "parallelism": None if parallelism is None else _describe_parallelism(parallelism),
    }
    if done is not None:
        document |= {
            "complete": done.is_complete,
            "complete_codes": list(done.codes),
            "missing_ranks": list(done.missing_ranks),
            "unreadable_ranks": list(done.unreadable_ranks),
            "missing_tensors": list(done.missing_tensors),
            "replicas": None if done.replicas is None else list(done.replicas),
        }
        document["equal_ranks"] = [
            {
                "name": name,
                "ranks": list(map(list, equal.groups)),
                "one_value": equal.is_constant,
                "sampled": equal.is_part,
            }
            for name, equal in summary.equal_ranks.items()
        ]
    return document


def _describe_amount(amount: Amount) -> Json:
    return {
        "tensors": amount.tensors,
        "parameters": amount.elements,
        "nbytes": amount.nbytes,
        "dtypes": dict(amount.dtypes),
    }


def _describe_parallelism(parallelism: Parallelism) -> Json:
    one = parallelism.tensor_parallel
    return {
        "tensor_parallel": None if one is None else one.slices,
        "splits": [
            {"slices": split.slices, "replicas": split.replicas, "tensors": split.tensors}
            for split in parallelism.splits
        ],
        "stages": [
            {"ranks": list(stage.ranks), "device_matrices": list(map(list, stage.device_matrices))}
            for stage in parallelism.stages
        ],
        "optimizer_shards": [
            {"slices": shard, "tensors": tensors}
            for shard, tensors in parallelism.optimizer_shards.items()
        ],
    }


# ------------------------------------------------------------------------------------- other files


def are_strategies(paths: Sequence[str]) -> bool:
    """Return whether all paths are strategy files, or folders of nothing but these."""
    try:
        return all(map(_holds_strategies, paths))
    except OSError:
        return False  # the scan of the source reports the error


def _holds_strategies(path: str) -> bool:
    from ckpttool.strategy_files.reader import FOLDER_SUFFIXES

    if not is_folder(path):
        return _is_strategy(path)
    inside = [one for one in list_folder(path) if one.suffix in FOLDER_SUFFIXES]
    return bool(inside) and all(_is_strategy(str(one)) for one in inside)


def _is_strategy(path: str) -> bool:
    if not is_file(path) or format_of_content(path) is not None:
        return False
    foreign = identify_foreign(path)
    return foreign is not None and foreign.kind == "strategy"


def describe_strategy(strategy: Strategy) -> Inspection:
    """Describe the layouts and the rules of a strategy."""
    entries = entries_of_strategy(strategy, strategy.layouts)
    parameter_of_state = match_states_by_name(strategy.layouts, {})
    rules = rows_of_rules(strategy)
    of_rules = tuple(row.first for row in rules)
    parallelism = find_parallelism((*entries, *of_rules), parameter_of_state, strategy)
    summary = summarize(entries, parameter_of_state, parallelism)
    document = {
        "schema": SCHEMA,
        "kind": "strategy",
        "files": list(strategy.files),
        "ranks": len(strategy.ranks),
        "stages": strategy.stages,
        "tensors": [
            {"name": name, "layouts": [_describe_stage_layout(one, strategy) for one in layouts]}
            for name, layouts in strategy.layouts.items()
        ],
        "rules": [
            {
                "pattern": rule.pattern,
                "place": rule.place,
                "layouts": [
                    _describe_stage_layout(one, strategy)
                    for one in rule.layouts(len(rule.layout.tensor_map))
                ],
            }
            for rule in (strategy.rules.rules if strategy.rules else ())
        ],
        "replicates_rest": strategy.rules is not None and strategy.rules.replicates_rest,
        "notes": describe_diagnostics(strategy.notes, severities("inspect")),
        "summary": {"parallelism": _describe_parallelism(parallelism)},
    }
    return Inspection(document, replace(summary, rows=(*summary.rows, *rules)))


def _describe_stage_layout(layout: Layout, strategy: Strategy) -> Json:
    return {
        "stage": layout.first_rank // strategy.stage_ranks,
        "shape": None if layout.full_shape is None else list(layout.full_shape),
        **_describe_layout(layout),
    }


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
        **_describe_layout(layout),
    }


def _describe_layout(layout: Layout) -> Json:
    """Describe how a layout shards a tensor."""
    return {
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
