"""The JSON documents of ``inspect``: the files, and with a strategy the full tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from ckpttool.cli.report import Json, describe_layout, describe_notes, describe_shapes
from ckpttool.errors import CkptToolError
from ckpttool.model.aside import set_aside
from ckpttool.model.catalog import MergedCatalog, SelfDescribedCatalog
from ckpttool.model.described import BoxSlicing
from ckpttool.model.maps import map_of
from ckpttool.model.notes import Note
from ckpttool.model.redundancy import note_redundancy
from ckpttool.model.source import LayoutSlicing

if TYPE_CHECKING:
    from ckpttool.formats.rank_table import Device
    from ckpttool.model.catalog import Catalog, FileIndex
    from ckpttool.model.source import Source
    from ckpttool.model.sources import Agreement, Sources
    from ckpttool.model.strategy import Strategy


def describe_undivided(catalog: MergedCatalog) -> tuple[Json, tuple[Note, ...]]:
    """Return document and notes of a file, or of several with an index."""
    from ckpttool.model.undivided import on_one_of_several, possible_slices

    if not (catalog.indexes or catalog.findings):
        (file,) = catalog.files.values()
        text = (
            f"{file.path}: nothing in it ({file.nbytes} bytes): cut short, or of a rank that was "
        )
        empty = [] if file.tensors else [Note("replica", text + "saved without redundancy")]
        notes = (*on_one_of_several(catalog), *catalog.notes, *empty)
        tensors = list(_describe_tensors(file))
        return {**_describe_file(file), "tensors": tensors, "notes": describe_notes(notes)}, notes
    files = catalog.files.values()
    slices = possible_slices(catalog).values()
    text = f"not in the index, so perhaps slices of rank 0: {', '.join(slices)}"
    notes = (*on_one_of_several(catalog), *catalog.notes)
    notes += (Note("doubt", text),) if slices else ()
    document = {
        "path": catalog.root,
        "format": ", ".join(sorted({file.format for file in files})),
        "nbytes": sum(file.nbytes for file in files),
        "indexes": list(catalog.indexes),
        "files": [{**_describe_file(file), "tensors": len(file.tensors)} for file in files],
        "tensors": [
            {**tensor, "file": file.path} for file in files for tensor in _describe_tensors(file)
        ],
        "notes": describe_notes(notes),
        "problems": [*map(str, catalog.damaged.values()), *(one.text for one in catalog.findings)],
    }
    return document, notes


def _describe_file(file: FileIndex) -> Json:
    return {
        "path": file.path,
        "format": file.format,
        "nbytes": file.nbytes,
        "attrs": dict(file.attrs),
    }


def _describe_tensors(file: FileIndex) -> Iterator[Json]:
    for meta in (tensor.meta for tensor in file.tensors.values()):
        yield {
            "name": meta.name,
            "dtype": meta.dtype,
            "shape": list(meta.shape),
            "nbytes": meta.nbytes,
            **({} if meta.text is None else {"text": meta.text}),
            **({} if (tag := map_of(meta.name)) is None else {"map": tag}),
        }


def describe_checkpoint(
    catalog: Catalog, strategy: Strategy | None, errors: list[CkptToolError]
) -> tuple[Json, tuple[Note, ...]]:
    """Return document and notes of rank folders; add problems to ``errors``."""
    from ckpttool.model.losses import notes_of_scan
    from ckpttool.run.asked import as_asked
    from ckpttool.storage.trees import find_devices

    catalog, of_part = as_asked(catalog, strategy)
    notes = [*notes_of_scan(catalog, strategy), *of_part]
    devices = {} if isinstance(catalog, MergedCatalog) else find_devices(catalog.root, notes)
    document: dict[str, object] = {
        "path": catalog.root,
        "step": catalog.step,
        "ranks": [
            {**_describe_rank(rank, file), **_describe_place(rank, devices)}
            for rank, file in catalog.files.items()
        ],
    }
    if isinstance(catalog, SelfDescribedCatalog):
        document["values"] = dict(catalog.description.values)
    elif strategy is None:
        whole = set_aside(catalog, None)
        errors += [whole.damaged[rank] for rank in catalog.files if rank not in whole.files]
        notes += filter(None, [note_redundancy(whole, is_deduplicated=None)])
    if strategy is not None or isinstance(catalog, SelfDescribedCatalog):
        document["tensors"], told = _describe_tensors_of(catalog, strategy, errors)
        notes += told
    document["notes"] = describe_notes(notes)
    document["problems"] = [problem for error in errors for problem in error.problems]
    return document, tuple(notes)


def _describe_rank(rank: int, file: FileIndex) -> Json:
    return {
        "rank": rank,
        "path": file.path,
        "format": file.format,
        "nbytes": file.nbytes,
        "tensors": len(file.tensors),
        **({"beside": list(file.other_paths)} if file.other_paths else {}),
    }


def _describe_tensors_of(
    catalog: Catalog, strategy: Strategy | None, errors: list[CkptToolError]
) -> tuple[list[Json], list[Note]]:
    """Return the full tensors and the notes on layouts; add problems to ``errors``."""
    from ckpttool.model.findings import Finding, plan_error
    from ckpttool.run.gather import source_layouts

    strategy = source_layouts(catalog, strategy)
    strategy, problems = strategy.resolve(catalog.metas)
    whole = set_aside(catalog, strategy)
    errors[:0] = [whole.damaged[rank] for rank in catalog.files if rank not in whole.files]
    strategy, sources = _look(whole, strategy, errors)
    sources.problems[:0] = [Finding("strategy", problem) for problem in problems]
    if sources.problems:
        errors.append(plan_error(sources.problems))
    told = [note for note in sources.notes if note.kind != "unlisted"]
    tensors = [_describe_source(source, strategy) for source in sources.found]
    return tensors, [*strategy.notes, *told]


def _look(
    catalog: Catalog, strategy: Strategy, errors: list[CkptToolError]
) -> tuple[Strategy, Sources]:
    """Return the strategy, corrected by samples of the contents, and the sources.

    A contradiction is a note here.  Parameters that the strategy does not list are not compared.
    """
    from ckpttool.model.sources import find_sources
    from ckpttool.run.engines import default_jobs, open_engine
    from ckpttool.run.gather import Trust, sample_states, settle, told_by_a_look

    agreement: Agreement = {}

    def find(strategy: Strategy) -> Sources:
        return find_sources(catalog, strategy, agreement, "first")

    try:
        with open_engine(f"threads:{default_jobs()}") as executor:
            agreement = sample_states(catalog, strategy, executor)
            sources = find(strategy)
            if sources.problems:
                return strategy, sources
            trust = Trust(by_samples=True)
            settled = settle(find, sources, catalog, strategy, executor, trust)
            settled = told_by_a_look(settled)
    except CkptToolError as error:
        errors.append(error)
        return strategy, find(strategy)
    doubts = [Note("doubt", problem.text, is_warning=True) for problem in settled.problems]
    settled.sources.notes += [*settled.notes, *doubts]
    return settled.strategy, settled.sources


def _describe_place(rank: int, devices: Mapping[int, Device]) -> Json:
    """Describe where a rank ran, if a rank table names it."""
    if not devices:
        return {}
    device = devices.get(rank)
    return {"server": device and device.server, "device": device and device.device}


def _describe_source(source: Source, strategy: Strategy) -> Json:
    slicing = source.slicing
    if isinstance(slicing, BoxSlicing):
        return _describe_boxes(source, slicing)
    assert isinstance(slicing, LayoutSlicing)
    name = source.meta.name
    base = name if source.is_listed else source.parameter
    return {
        **describe_layout(source),
        **({} if base else dict.fromkeys(("device_matrix", "tensor_map", "optimizer_shard"))),
        **({"by_hand": strategy.by_hand[name]} if name in strategy.by_hand else {}),
        "stages": list(strategy.stages_of(base)) if base else [],
        "ranks": list(slicing.tensors),
    }


def _describe_boxes(source: Source, slicing: BoxSlicing) -> Json:
    """Describe a tensor whose slices the checkpoint describes, as `_describe_source` does."""
    slices = [(boxes[0].region, [box.rank for box in boxes]) for boxes in slicing.slices]
    return {
        "name": source.meta.name,
        "dtype": source.meta.dtype,
        "shape": list(source.meta.shape),
        **describe_shapes(region.shape for region, _ in slices),
        **dict.fromkeys(("device_matrix", "tensor_map", "optimizer_shard")),
        "stages": [],
        "ranks": sorted({rank for _, ranks in slices for rank in ranks}),
        "parts": list(slicing.parts) if slicing.is_grid else None,
        "slices": [
            {"start": list(region.start), "shape": list(region.shape), "ranks": ranks}
            for region, ranks in slices
        ],
    }
