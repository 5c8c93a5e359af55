"""Inspect a checkpoint: what it holds as a summary, and as one JSON document.

Modules that read contents are imported late, so that inspecting a single file needs no numpy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, fields, is_dataclass, replace
from itertools import chain

from ckpttool._version import SCHEMA
from ckpttool.concurrency import InlineExecutor
from ckpttool.discovery.mindformers_output import find_devices
from ckpttool.discovery.rank_folders import find_manifests
from ckpttool.formats import format_of_content
from ckpttool.formats.foreign import Device, identify_foreign, read_group_info, read_rank_table
from ckpttool.formats.local import is_file, is_folder, list_folder, stat_file
from ckpttool.model.catalog import Catalog, MergedCatalog, RankCatalog, SelfDescribedCatalog
from ckpttool.model.layout import Layout
from ckpttool.model.slicing import BoxSlicing, LayoutSlicing, Source
from ckpttool.model.strategy import Merged, Sharding, Strategy
from ckpttool.model.tensors import FileIndex, map_of
from ckpttool.planning.missing import (
    find_nothing,
    limit_to_written_ranks,
    quarantine_damaged,
    redundancy_note,
    scan_notes,
)
from ckpttool.planning.optimizer_state import match_states_by_name, match_states_by_shape
from ckpttool.planning.sources import listed_names, one_of_several_notes, suspected_rank_slices
from ckpttool.planning.unlisted import RANK_SPECIFIC_NAMES
from ckpttool.problems import (
    CkptToolError,
    Diagnostic,
    Diagnostics,
    describe_diagnostics,
    describe_errors,
    severities,
)
from ckpttool.verification.summary import (
    Entry,
    EqualRanks,
    Summary,
    assess,
    entries_of_files,
    entries_of_layouts,
    entries_of_sources,
    find_parallelism,
    layouts_of_rules,
    names_to_sample,
    slice_shapes,
    summarize,
)

Json = dict[str, object]

MAX_SAMPLED_RANKS = 64
MAX_SAMPLES = 2048  # slices whose pages are read unasked: as quick as the headers of some files
MAX_FILE_SAMPLES = 4  # of a file, if a strategy lists the other tensors: as quick as its header


@dataclass(frozen=True, slots=True)
class Inspection:
    """What a checkpoint holds, and what was found wrong or noted.

    ``sources`` is None if nothing says how the tensors are spread over the files, or if each file
    holds full tensors.
    """

    catalog: Catalog
    summary: Summary
    found: Diagnostics
    sharding: Sharding = field(default_factory=Merged)  # of ``sources``, as contents correct it
    sources: tuple[Source, ...] | None = None
    devices: Mapping[int, Device] = field(default_factory=dict)  # by rank, from a rank table

    @property
    def is_merged(self) -> bool:
        """Whether the files hold full tensors, and no strategy says otherwise."""
        return isinstance(self.catalog, MergedCatalog) and self.sources is None

    @property
    def looks_replicated(self) -> bool:
        """Whether all samples are equal on all ranks, and some are more than one value."""
        summary, everywhere = self.summary, (tuple(self.catalog.files),)
        tensors = {one.name for one in summary.entries if not one.is_single_value}
        return (
            summary.has_all_samples
            and {one.placement.owners for one in summary.entries} == {everywhere}
            and {one.ranks for one in summary.equal_ranks.values()} == {everywhere}
            and any(summary.equal_ranks[name].kind == "equal" for name in tensors)
        )


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
    examined = examine(catalog, strategy, crc=crc, executor=executor, diagnostics=diagnostics)
    return describe_inspection(examined)


def examine(
    catalog: Catalog,
    strategy: Strategy | None = None,
    *,
    crc: bool = False,
    every_tensor: bool = False,
    ignore_manifest: bool = False,
    executor: Executor | None = None,
    diagnostics: Diagnostics | None = None,
) -> Inspection:
    """Inspect a checkpoint like `describe`, without the document.

    Pages of the tensors without a layout tell which ranks hold the same: of all of them, or of the
    first of each row if there are many.  With ``every_tensor`` there is no limit.  It is not known
    whether a checkpoint is complete if tensors that a strategy omits differ between ranks.
    """
    executor = executor or InlineExecutor()
    found = Diagnostics("inspect") if diagnostics is None else diagnostics
    found.failures[:0] = catalog.damaged.values()
    if crc:
        from ckpttool.storage.checksums import check_files

        errors, of_checksums = check_files(catalog, executor, crc=True)
        found.failures += errors
        catalog = replace(catalog, diagnostics=(*catalog.diagnostics, *of_checksums))
    found.add(*find_nothing(catalog))
    if not ignore_manifest and find_manifests(catalog):
        from ckpttool.planning.manifest_check import check_source

        check_source(catalog, executor, found)
    if isinstance(catalog, MergedCatalog) and strategy is None:
        found.add(*_notes_of_files(catalog))
        if catalog.copies:
            from ckpttool.planning.replicas import compare_copies

            found.add(*compare_copies(catalog, executor, "inspect", by_samples=True))
        return Inspection(catalog, _summarize_files(catalog, Merged(), found), found)
    catalog, of_part = limit_to_written_ranks(catalog, strategy)
    table = Diagnostics("inspect")
    devices = {} if isinstance(catalog, MergedCatalog) else find_devices(catalog.root, table)
    catalog = replace(catalog, diagnostics=(*catalog.diagnostics, *table))
    found.add(*of_part, *catalog.errors())
    if strategy is not None or isinstance(catalog, SelfDescribedCatalog):
        inspected = _inspect_full_tensors(catalog, strategy, executor, found)
    else:
        inspected = _inspect_slices(catalog, found)
    equal_ranks = _sample_equal_ranks(catalog, inspected, every_tensor, executor)
    summary = replace(inspected.summary, equal_ranks=equal_ranks)
    different = [name for name, one in equal_ranks.items() if one.kind == "different"]
    if inspected.sources is not None and not RANK_SPECIFIC_NAMES.issuperset(different):
        done = summary.completeness
        assert done is not None
        complete = None if done.complete else done.complete
        done = replace(done, complete=complete, complete_codes=(*done.complete_codes, "unlisted"))
        summary = replace(summary, completeness=done)
    return replace(inspected, catalog=catalog, summary=summary, devices=devices)


def _notes_of_files(catalog: MergedCatalog) -> Iterator[Diagnostic]:
    """Yield the notes of a single file, or of several files with an index."""
    yield from one_of_several_notes(catalog)
    yield from catalog.diagnostics
    if slices := suspected_rank_slices(catalog).values():
        text = f"not in the index, so perhaps slices of rank 0: {', '.join(slices)}"
        yield Diagnostic("doubt", text)


def _summarize_files(catalog: Catalog, sharding: Sharding | None, found: Diagnostics) -> Summary:
    """Summarize files without layouts."""
    entries = entries_of_files(catalog)
    states = match_states_by_shape((), catalog.metas)
    return summarize(entries, states, None, assess(catalog, sharding, entries, found))


def _inspect_slices(catalog: Catalog, found: Diagnostics) -> Inspection:
    """Inspect the files of ranks without layouts."""
    checked = quarantine_damaged(catalog, Merged())
    found.failures += [checked.damaged[rank] for rank in catalog.files if rank not in checked.files]
    found.add(*scan_notes(catalog, Merged()))
    found.add(*filter(None, [redundancy_note(checked, is_deduplicated=None)]))
    return Inspection(checked, _summarize_files(checked, None, found), found)


def _inspect_full_tensors(
    catalog: Catalog, strategy: Strategy | None, executor: Executor, found: Diagnostics
) -> Inspection:
    """Resolve the files of ranks to full tensors, and inspect these."""
    from ckpttool.planning.fit import fit_to_slices
    from ckpttool.planning.resolve import ResolveOptions, resolve

    strategy, of_rules = (None, []) if strategy is None else fit_to_slices(catalog, strategy)
    of_headers = Diagnostics("inspect")
    options = ResolveOptions(unlisted="first")
    resolved = resolve(catalog, strategy, options, executor, of_headers, contents="samples")
    damaged = resolved.catalog.damaged.values()
    found.failures[:0] = [error for error in damaged if error not in catalog.damaged.values()]
    found.failures += (error for error in of_headers.failures if error not in damaged)
    found.add(*of_headers, *resolved.content_diagnostics)
    catalog, sharding, sources = resolved.catalog, resolved.sharding, resolved.sources
    is_wrong = any(one.code == "strategy" for one in found)
    found.add(*of_rules)
    if is_wrong or (of_rules and not sharding.layouts):
        return Inspection(catalog, _summarize_files(catalog, None, found), found)
    entries = entries_of_sources(resolved)
    metas = {source.meta.name: source.meta for source in sources}
    expected = catalog.holders or sharding.layouts  # of files that cannot be read
    incomplete = {
        name: layouts
        for name, layouts in sharding.layouts.items()
        if name in expected and name not in metas
    }
    states = match_states_by_shape(listed_names(catalog, sharding), metas)
    listed = (*entries, *entries_of_layouts(incomplete))
    summary = summarize(
        entries,
        states,
        find_parallelism(listed, states, sharding),
        assess(catalog, sharding, entries, found),
    )
    return Inspection(catalog, summary, found, sharding, sources)


def _sample_equal_ranks(
    catalog: Catalog, inspected: Inspection, every_tensor: bool, executor: Executor
) -> Mapping[str, EqualRanks]:
    """Return which ranks hold the same of tensors without a layout, as some pages tell.

    Of too many tensors only the first of each row is sampled, and without layouts none of too many
    ranks, unless every tensor is requested.  So it takes no longer than reading the headers.
    """
    ranks, summary = len(catalog.files), inspected.summary
    limit = MAX_SAMPLES if ranks <= MAX_SAMPLED_RANKS else 0
    if inspected.sources is not None:
        limit = max(MAX_SAMPLES, MAX_FILE_SAMPLES * ranks)
    names = names_to_sample(summary.entries)
    if ranks * len(names) > limit and not every_tensor:
        names = names_to_sample(row.first for row in summary.rows)
    if not names or (ranks * len(names) > limit and not every_tensor):
        return {}
    from ckpttool.planning.resolve import sample_ranks
    from ckpttool.storage.sampling import SAMPLE_BYTES

    try:
        return {
            name: EqualRanks(name, groups, is_constant, catalog.metas[name].nbytes > SAMPLE_BYTES)
            for name, groups, is_constant in sample_ranks(catalog, names, executor)
        }
    except CkptToolError as error:
        inspected.found.failures.append(error)
        return {}


# --------------------------------------------------------------------------------------- documents


def describe_inspection(inspected: Inspection) -> Json:
    """Return the JSON document of a checkpoint."""
    catalog, found, summary = inspected.catalog, inspected.found, inspected.summary
    files = catalog.files.values()
    document: Json = {"schema": SCHEMA}
    if not inspected.is_merged:
        document |= {
            "path": catalog.root,
            "step": catalog.step,
            "ranks": [_describe_rank(*item, inspected.devices) for item in catalog.files.items()],
        }
        if isinstance(catalog, SelfDescribedCatalog):
            document["values"] = dict(catalog.description.values)
        if inspected.sources is None:
            document["tensors"] = [_describe_entry(one, catalog) for one in summary.entries]
        else:
            sharding = inspected.sharding
            document["tensors"] = [_describe_source(one, sharding) for one in inspected.sources]
    elif isinstance(catalog, MergedCatalog) and (catalog.indexes or catalog.errors("inspect")):
        document |= {
            "path": catalog.root,
            "format": ", ".join(sorted({file.format for file in files})),
            "nbytes": sum(file.nbytes for file in files),
            "indexes": list(catalog.indexes),
            "files": [{**_describe_file(file), "tensors": len(file.tensors)} for file in files],
            "tensors": [
                {**tensor, "file": file.path} for file in files for tensor in _describe_stored(file)
            ],
        }
    else:
        (file,) = files
        document |= {**_describe_file(file), "tensors": list(_describe_stored(file))}
    return document | {**_describe_found(found), "summary": _describe_summary(summary)}


def describe_saves(catalog: RankCatalog, found: Diagnostics) -> Json:
    """Return the JSON document of ranks of which no step was chosen."""
    saves = [{"ranks": list(ranks), "files": list(of)} for ranks, of in catalog.names_of.items()]
    return {"schema": SCHEMA, "path": catalog.root, "saves": saves, **_describe_found(found)}


def _describe_found(found: Diagnostics) -> Json:
    """Describe what was found: notes and warnings, and what is wrong."""
    of_files = [one for error in found.failures for one in error.diagnostics]
    return {
        "notes": describe_diagnostics(found.of("note", "warning"), found.severity_of),
        "problems": describe_errors((*of_files, *found.errors)),
    }


def _describe_summary(summary: Summary) -> Json:
    """Describe everything but the tensors."""
    facts = ("weights", "optimizer_state", "other", "parallelism")
    document = {name: _to_json(getattr(summary, name)) for name in facts}
    assert summary.completeness is not None
    for name in summary.completeness.__slots__:
        document[name] = _to_json(getattr(summary.completeness, name))
    document["equal_ranks"] = _to_json(tuple(summary.equal_ranks.values()))
    return document


def _to_json(value: object) -> object:
    """Describe the fields of a dataclass by their names."""
    if is_dataclass(value):
        return {one.name: _to_json(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, tuple | range):
        return [_to_json(one) for one in value]
    return dict(value) if isinstance(value, Mapping) else value


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
            "shape": list(meta.header_shape),
            "nbytes": meta.nbytes,
            **({} if meta.text is None else {"text": meta.text}),
            **({} if (tag := map_of(meta.name)) is None else {"map": tag}),
        }


def _describe_entry(one: Entry, catalog: Catalog) -> Json:
    """Describe a tensor as ranks store it."""
    ranks = one.placement.owners[0]
    facts = {key: _to_json(getattr(one, key)) for key in ("name", "dtype", "shape")}
    nbytes = catalog.files[ranks[0]].header[one.name].meta.nbytes
    return {**facts, "nbytes": nbytes, "ranks": list(ranks)}


def _describe_rank(rank: int, file: FileIndex, devices: Mapping[int, Device]) -> Json:
    device = devices.get(rank)
    place = {"server": device and device.server, "device": device and device.device}
    return {
        "rank": rank,
        "path": file.path,
        "format": file.format,
        "nbytes": file.nbytes,
        "tensors": len(file.tensors),
        **({"beside": list(file.paths[1:])} if len(file.files) > 1 else {}),
        **(place if devices else {}),
    }


def describe_layout(source: Source) -> Json:
    """Describe a full tensor, its slices and its layout."""
    return {**_describe_full(source), **_describe_layout(source.layout)}


def _describe_full(source: Source) -> Json:
    """Describe a full tensor: the shape of its first slice, and all shapes if there are several."""
    shapes = [list(shape) for shape in slice_shapes(source)]
    return {
        "name": source.meta.name,
        "dtype": source.meta.dtype,
        "shape": list(source.meta.shape),
        "slice_shape": shapes[0],
        **({"slice_shapes": shapes} if len(shapes) > 1 else {}),
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


_NO_LAYOUT: Json = dict.fromkeys(("device_matrix", "tensor_map", "optimizer_shard"))


def _describe_source(source: Source, sharding: Sharding) -> Json:
    slicing, nbytes = source.slicing, {"nbytes": source.meta.nbytes}
    if isinstance(slicing, BoxSlicing):
        return {**_describe_full(source), **nbytes, **_NO_LAYOUT, **_describe_boxes(slicing)}
    assert isinstance(slicing, LayoutSlicing)
    name = source.meta.name
    base = name if source.is_listed else source.parameter
    return {
        **describe_layout(source),
        **nbytes,
        **({} if base else _NO_LAYOUT),
        **({"by_hand": sharding.handwritten[name]} if name in sharding.handwritten else {}),
        "stages": list(sharding.stages_of(base)) if base and isinstance(sharding, Strategy) else [],
        "ranks": list(iter(slicing.tensors)),  # list() alone would count them first
    }


def _describe_boxes(slicing: BoxSlicing) -> Json:
    """Describe the slices of a checkpoint that describes itself."""
    slices = [(boxes[0].region, [box.rank for box in boxes]) for boxes in slicing.slices]
    return {
        "stages": [],
        "ranks": sorted({rank for _, ranks in slices for rank in ranks}),
        "parts": list(slicing.slice_counts) if slicing.is_grid else None,
        "slices": [
            {"start": list(region.start), "shape": list(region.shape), "ranks": ranks}
            for region, ranks in slices
        ],
    }


# ------------------------------------------------------------------------------------- other files


def are_strategies(paths: Sequence[str]) -> bool:
    """Return whether all paths are strategy files, or folders of nothing but these."""
    from ckpttool.strategy_files.folders import SUFFIXES, files_that_may_be_strategies

    try:
        for path in paths:
            files = [path]
            if is_folder(path):
                inside = [one for one in list_folder(path) if one.suffix in SUFFIXES]
                folders = [] if inside else list(filter(is_folder, list_folder(path)))
                of_folders = [files_that_may_be_strategies(folder) for folder in folders]
                inside += chain(*of_folders) if all(of_folders) else ()
                files = list(map(str, inside))
            if not files or any(_foreign_kind(file) != "strategy" for file in files):
                return False
    except OSError:
        return False  # the scan of the source reports the error
    return True


def _foreign_kind(path: str) -> str | None:
    """Return what a file of MindSpore is that is not a checkpoint; None for any other file."""
    foreign = None
    if is_file(path) and format_of_content(path) is None:
        foreign = identify_foreign(path)
    return None if foreign is None else foreign.kind


def summarize_strategy(strategy: Strategy) -> Summary:
    """Summarize the layouts of a strategy."""
    rules = layouts_of_rules(strategy)
    entries = (*entries_of_layouts(strategy.layouts), *entries_of_layouts(rules))
    states = match_states_by_name(strategy.layouts, {})
    return summarize(entries, states, find_parallelism(entries, states, strategy))


def describe_strategy(strategy: Strategy, summary: Summary) -> Json:
    """Return the JSON document of a strategy."""
    rules = strategy.rules.rules if strategy.rules else ()
    of_rules = layouts_of_rules(strategy)
    return {
        "schema": SCHEMA,
        "kind": "strategy",
        "files": list(strategy.files),
        "ranks": len(strategy.ranks),
        "stages": strategy.stages,
        "tensors": [
            {"name": name, "layouts": _describe_stages(layouts, strategy)}
            for name, layouts in strategy.layouts.items()
        ],
        "rules": [
            {
                "pattern": rule.pattern,
                "place": rule.place,
                "layouts": _describe_stages(of_rules[rule.pattern], strategy),
            }
            for rule in rules
        ],
        "replicates_rest": strategy.rules is not None and strategy.rules.replicates_rest,
        "notes": describe_diagnostics(strategy.notes, severities("inspect")),
        "summary": {"parallelism": _to_json(summary.parallelism)},
    }


def _describe_stages(layouts: Iterable[Layout], strategy: Strategy) -> list[Json]:
    return [
        {
            "stage": layout.first_rank // strategy.stage_ranks,
            "shape": None if layout.full_shape is None else list(layout.full_shape),
            **_describe_layout(layout),
        }
        for layout in layouts
    ]


def describe_foreign(path: str) -> Json | None:
    """Describe a graph, an exported model, group information or a rank table; else return None.

    Raises
    ------
    FormatError
        The group information or the rank table is damaged.
    """
    try:
        kind = _foreign_kind(path)
    except OSError:
        return None  # the scan of the source reports the error
    more: Json = {}
    if kind == "group_info":
        info = read_group_info(path)
        more["groups"] = [{"name": name, "ranks": list(ranks)} for name, ranks in info.groups]
        more["ckpt_restore_rank_list"] = list(info.restore_ranks)
    elif kind == "rank_table":
        table = read_rank_table(path)
        more["version"] = table.version
        more["ranks"] = [
            {"rank": one.rank, "server": one.server, "device": one.device, "device_ip": one.ip}
            for one in table.devices
        ]
    elif kind not in ("graph", "mindir"):
        return None
    nbytes = stat_file(path).nbytes
    return {"schema": SCHEMA, "path": path, "kind": kind, "nbytes": nbytes, **more}
