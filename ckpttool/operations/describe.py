"""What inspect answers: the facts of a checkpoint as a summary, and as one JSON document.

Nothing here reads a checkpoint; `ckpttool.operations.inspect` does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING

from ckpttool._version import SCHEMA
from ckpttool.formats import format_of_content
from ckpttool.formats.foreign import Device, identify_foreign, read_group_info, read_rank_table
from ckpttool.formats.local import is_file, is_folder, list_folder, stat_file
from ckpttool.model.catalog import Catalog
from ckpttool.model.layout import Layout
from ckpttool.model.names import drop_unlike_shapes, match_states, parse_name
from ckpttool.model.slicing import BoxSlicing, LayoutSlicing, Source
from ckpttool.model.strategy import Merged, Sharding, Strategy
from ckpttool.model.tensors import FileIndex
from ckpttool.operations.summary import (
    Entry,
    EqualRanks,
    Summary,
    assess,
    entries_of_files,
    entries_of_layouts,
    entries_of_sources,
    find_parallelism,
    layouts_of_rules,
    slice_shapes,
    summarize,
)
from ckpttool.planning.sources import listed_names
from ckpttool.planning.unlisted import RANK_SPECIFIC_NAMES
from ckpttool.problems import (
    Diagnostics,
    describe_diagnostics,
    describe_errors,
    severities,
)

if TYPE_CHECKING:
    from ckpttool.planning.resolve import ResolvedSources

Json = dict[str, object]


@dataclass(frozen=True, slots=True)
class Facts:
    """What inspect found of a checkpoint: all that its description is made of.

    Attributes
    ----------
    catalog
        The files, as the scan found them.
    readable
        The same without the files that turned out to be damaged.
    found
        Everything that is wrong or noted.
    sharding
        How the tensors are spread over the files; None if nothing says it.
    resolved
        The full tensors; None if the tensors are those of the files.
    devices
        Rank to device, from a rank table.
    """

    catalog: Catalog
    readable: Catalog
    found: Diagnostics
    sharding: Sharding | None
    resolved: ResolvedSources | None = None
    devices: Mapping[int, Device] = field(default_factory=dict)


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
        return self.catalog.is_merged and self.sources is None

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


def summarize_facts(facts: Facts) -> Summary:
    """Summarize a checkpoint as its headers tell it; `names_to_sample` of it are not yet read."""
    catalog, sharding, resolved = facts.readable, facts.sharding, facts.resolved
    if sharding is None or resolved is None:
        entries = entries_of_files(catalog)
        states = drop_unlike_shapes(catalog.match_states(), catalog.metas)
        return summarize(entries, states, None, assess(catalog, sharding, entries, facts.found))
    entries = entries_of_sources(resolved)
    metas = {source.meta.name: source.meta for source in resolved.sources}
    expected = catalog.holders or sharding.layouts  # of files that cannot be read
    incomplete = {
        name: layouts
        for name, layouts in sharding.layouts.items()
        if name in expected and name not in metas
    }
    states = drop_unlike_shapes(match_states(listed_names(catalog, sharding), metas), metas)
    listed = (*entries, *entries_of_layouts(incomplete))
    return summarize(
        entries,
        states,
        find_parallelism(listed, states, sharding),
        assess(catalog, sharding, entries, facts.found),
    )


def describe_facts(
    facts: Facts, summary: Summary, equal_ranks: Mapping[str, EqualRanks] | None = None
) -> Inspection:
    """Return the answer of inspect.

    Parameters
    ----------
    facts
        What was found.
    summary
        From `summarize_facts`.
    equal_ranks
        Name to the ranks that hold equal samples, for the tensors that were sampled.
    """
    summary = replace(summary, equal_ranks=equal_ranks or {})
    different = [name for name, one in summary.equal_ranks.items() if one.kind == "different"]
    if facts.resolved is not None and not RANK_SPECIFIC_NAMES.issuperset(different):
        done = summary.completeness
        assert done is not None
        complete = None if done.complete else done.complete
        done = replace(done, complete=complete, complete_codes=(*done.complete_codes, "unlisted"))
        summary = replace(summary, completeness=done)
    sources = None if facts.resolved is None else facts.resolved.sources
    sharding = facts.sharding or Merged()
    return Inspection(facts.catalog, summary, facts.found, sharding, sources, facts.devices)


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
        if catalog.description is not None:
            document["values"] = dict(catalog.description.values)
        if inspected.sources is None:
            document["tensors"] = [_describe_entry(one, catalog) for one in summary.entries]
        else:
            sharding = inspected.sharding
            document["tensors"] = [_describe_source(one, sharding) for one in inspected.sources]
    elif catalog.is_merged and (catalog.indexes or catalog.errors("inspect")):
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


def describe_saves(catalog: Catalog, found: Diagnostics) -> Json:
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
            **({} if (tag := parse_name(meta.name).map) is None else {"map": tag}),
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
        **({"other_paths": list(file.paths[1:])} if len(file.files) > 1 else {}),
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
        **({"handwritten": sharding.handwritten[name]} if name in sharding.handwritten else {}),
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
    states = strategy.listed_states
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
