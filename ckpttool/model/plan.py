"""Catalog + strategies + target -> plan: for every output tensor the pieces that fill it.

A plan is data.  It is checked when it is made; iterating it yields the output files one at a time
and computes pieces only when they are asked for, so its size does not grow with their number.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ckpttool.errors import CkptToolError, raise_all
from ckpttool.model.catalog import Catalog, Stamp, StoredTensor, TensorMeta, format_ranks
from ckpttool.model.described import Described
from ckpttool.model.findings import Finding, plan_error
from ckpttool.model.folding import fold_layout
from ckpttool.model.gradients import Gradients
from ckpttool.model.layout import Layout
from ckpttool.model.losses import notes_of_scan
from ckpttool.model.notes import Note
from ckpttool.model.region import Region
from ckpttool.model.source import Excerpt, Source
from ckpttool.model.sources import (
    Agreement,
    Sources,
    find_sources,
)
from ckpttool.model.states import target_layouts
from ckpttool.model.strategy import Strategy, count, shorten
from ckpttool.model.undivided import undivided_sources
from ckpttool.model.unlisted import Unlisted


@dataclass(frozen=True, slots=True)
class Piece:
    """The overlap of a source slice with an output slice.

    Attributes
    ----------
    tensor
        The source slice, stored.
    src
        Elements, counted in the source slice.
    dst
        Elements, counted in the output slice; of the same shape as ``src``.
    """

    tensor: StoredTensor
    src: Region
    dst: Region


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """One tensor of an output file.

    Attributes
    ----------
    meta
        Name, element type and shape of the output slice.
    region
        The elements of the full tensor that it holds.
    source
        Where they come from; of one that was sent to another process only what it wants.
    """

    meta: TensorMeta
    region: Region
    source: Source | Excerpt | Described

    def pieces(self, within: Region) -> Iterator[Piece]:
        """The pieces that fill ``within``, a region of the output slice, in C order of slices.

        They are disjoint and fill it exactly.
        """
        wanted = within.moved_by(self.region.start)
        for tensor, in_slice, in_full in self.source.overlaps(wanted):
            yield Piece(tensor, in_slice, in_full.relative_to(self.region.start))

    def count_pieces(self, within: Region) -> int:
        """How many `pieces` there are."""
        return self.source.count_overlaps(within.moved_by(self.region.start))

    def excerpt(self, within: Region) -> OutputTensor:
        """The same without the slices that no piece of ``within`` needs, and without a catalog."""
        return replace(self, source=self.source.excerpt(within.moved_by(self.region.start)))


@dataclass(frozen=True, slots=True)
class OutputFile:
    """One file to be written, all its tensors in order."""

    rank: int
    path: str
    format: str
    tensors: tuple[OutputTensor, ...]
    attrs: Mapping[str, str] = field(default_factory=dict)

    @property
    def metas(self) -> tuple[TensorMeta, ...]:
        """What the file's header says."""
        return tuple(tensor.meta for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class Target:
    """What is to be written.

    Attributes
    ----------
    format
        ``"hdf5"``, ``"ckpt"`` or ``"safetensors"``.
    paths
        Rank to output file, ascending; only the ranks that are wanted.
    ranks
        Number of ranks of the whole target.
    strategy
        The layouts; None if everything is written undivided.
    attrs
        What else the headers say, as formats take it; ``"crc_num"`` for a checksum.
    is_numbered
        Whether it is a folder of numbered files, and not a single one.
    """

    format: str
    paths: Mapping[int, str]
    ranks: int = 1
    strategy: Strategy | None = None
    attrs: Mapping[str, str] = field(default_factory=dict)
    is_numbered: bool = False


@dataclass(frozen=True, slots=True)
class Document:
    """A small text file that is written when all outputs are complete.

    It says which they are, so an old one is removed before the first of them is replaced.
    """

    path: str
    text: str


@dataclass(frozen=True, slots=True)
class PlanPart:
    """Which outputs of a plan one of several runs makes.

    Attributes
    ----------
    number, count
        Which run, from 1 on, of how many.
    files
        Outputs of all the runs.
    digest
        Equal for the parts of one plan.
    manifest
        Where that of the whole plan will be; the runs leave their records beside it.
    documents
        Of the whole plan; written when the outputs of all runs are there.
    """

    number: int
    count: int
    files: int
    digest: str
    manifest: str
    documents: tuple[Document, ...]


@dataclass(frozen=True, slots=True)
class Transfer:
    """One parameter's way: its source, and its layouts in the target, one for each stage."""

    source: Source
    layouts: tuple[Layout, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """All that is to be done; iterate it for the output files, afresh each time.

    Attributes
    ----------
    strategies
        The files that they were read from.
    is_resumed
        Whether outputs that a run of the same plan left complete are kept.
    proven
        Of outputs that are there those whose contents, which were read, are what they should be.
    """

    catalog: Catalog
    target: Target
    transfers: tuple[Transfer, ...]
    notes: tuple[Note, ...] = field(default=())
    documents: tuple[Document, ...] = field(default=())
    part: PlanPart | None = None
    strategies: tuple[str, ...] = ()
    is_resumed: bool = False
    proven: Mapping[str, Stamp] = field(default_factory=dict)

    def __iter__(self) -> Iterator[OutputFile]:
        # Of a thousand tensors most are cut alike, and their slices have one shape on all ranks.
        ways: dict[tuple[Layout, tuple[int, ...]], int] = {}
        placed: list[tuple[Source, int, dict[tuple[int, ...], TensorMeta]]] = []
        for transfer in self.transfers:
            for layout in transfer.layouts:
                way = ways.setdefault((layout, transfer.source.meta.shape), len(ways))
                placed.append((transfer.source, way, {}))
        for rank, path in self.target.paths.items():
            regions = [
                layout.region(rank, shape) if rank in layout.ranks else None
                for layout, shape in ways
            ]
            tensors = [
                _output(source, region, metas)
                for source, way, metas in placed
                if (region := regions[way]) is not None
            ]
            format, attrs = self.target.format, self.target.attrs
            yield OutputFile(rank, path, format, tuple(tensors), attrs)


def _output(
    source: Source, region: Region, metas: dict[tuple[int, ...], TensorMeta]
) -> OutputTensor:
    """The region of a source; ``metas`` are those that were made of it, by shape."""
    shape = region.shape
    meta = metas.get(shape)
    if meta is None:
        meta = metas[shape] = replace(source.meta, shape=shape)
    return OutputTensor(meta, region, source)


def make_plan(
    catalog: Catalog,
    strategy: Strategy | None,
    target: Target,
    agreement: Agreement,
    unlisted: Unlisted | None = None,
) -> Plan:
    """The plan that brings a checkpoint into the target's layout.

    Parameters
    ----------
    catalog
        What is on disk.
    strategy
        Layouts of the source; None if it holds everything undivided.
    target
        What is to be written.
    agreement
        For each of `names_to_compare`, the ranks grouped by equal content.
    unlisted
        See `find_sources`.

    Raises
    ------
    FormatError
        Files of the source are damaged, and replicas do not replace them.
    PlanError
        Ranks or slices are missing, shapes or element types disagree, a parameter does not fit the
        target's layout: all that was found, in one error.
    """
    if strategy is None:
        sources = undivided_sources(catalog, unlisted)
    else:
        sources = find_sources(catalog, strategy, agreement, unlisted)
    transfers = _find_transfers(sources, target, strategy)
    outside = [rank for rank in target.paths if not 0 <= rank < target.ranks]
    if outside:
        text = f"{format_ranks(outside)}: not in the target, which has "
        text += f"{target.ranks} ranks (0-{target.ranks - 1})"
        sources.problems.append(Finding("target", text, ranks=tuple(outside)))
    if not transfers and not sources.problems and not sources.damage:
        text = f"{catalog.root}: nothing in it that could be written"
        sources.problems.append(Finding("missing", text))
    errors: list[CkptToolError] = [*sources.damage]
    if sources.problems:
        errors.append(plan_error(sources.problems))
    raise_all(errors)
    of_strategies = [
        note for one in (strategy, target.strategy) if one is not None for note in one.notes
    ]
    notes = (*notes_of_scan(catalog, strategy), *of_strategies, *sources.notes)
    return Plan(catalog, target, tuple(transfers), notes)


def _find_transfers(sources: Sources, target: Target, strategy: Strategy | None) -> list[Transfer]:
    """A transfer for every source; what does not fit is added to the problems of ``sources``."""
    transfers: list[Transfer] = []
    undivided: list[str] = []
    recut: list[str] = []
    gradients = Gradients()
    for source in sources.found:
        name, shape = source.meta.name, source.meta.shape
        layouts = _listed_layouts(source, target.strategy, recut)
        layouts = gradients.uncut(source, strategy, layouts)
        if not layouts:
            layouts = _everywhere(source, target.ranks)
            was_cut = source.is_listed or source.follows is not None
            if target.strategy is not None and (
                was_cut or (strategy is None and math.prod(shape) > 1)
            ):
                undivided.append(name)
        else:
            layouts = tuple(_folded(layout, shape) for layout in layouts)
            reasons = {_why_not_target(layout, shape) for layout in layouts} - {None}
            where = target.strategy.origin if target.strategy else ""
            sources.problems += [
                Finding("target", f"{name}: target {where}: {reason}", tensor=name)
                for reason in sorted(map(str, reasons))
            ]
            if reasons:
                continue
        if layouts:
            transfers.append(Transfer(source, layouts))
    if target.strategy is not None:
        _compare_names(sources, target.strategy, undivided, recut)
        sources.notes += gradients.notes()
    turned = {source.meta.name for source in sources.found if source.turn is not None}
    nowhere = sorted(turned - {transfer.source.meta.name for transfer in transfers})
    if nowhere:
        text = "dropped, being only on source ranks whose turn does not come"
        names = f"{count(len(nowhere), 'parameter')}: {shorten(nowhere)}"
        sources.notes.append(Note("dropped", f"{text}: {names}"))
    return transfers


def _listed_layouts(
    source: Source, strategy: Strategy | None, recut: list[str]
) -> tuple[Layout, ...]:
    """What the target's strategy tells of a source, if anything.

    The name is added to ``recut`` if that is not what its own entry says.
    """
    if strategy is None or source.turn is not None or source.meta.text is not None:
        return ()
    name = source.meta.name
    layouts = target_layouts(strategy, name, source.follows is not None)
    own = strategy.layouts.get(name, layouts)
    if [layout.parts for layout in own] != [layout.parts for layout in layouts]:
        recut.append(name)
    return layouts


def _folded(layout: Layout, shape: tuple[int, ...]) -> Layout:
    """The layout for a full tensor of ``shape``, which tells how to fold an expanded one."""
    ways = fold_layout(layout, len(shape), lambda way: way.full_shape == shape)
    return ways[0] if len(ways) == 1 else layout


def _why_not_target(layout: Layout, shape: tuple[int, ...]) -> str | None:
    """Why a full tensor of ``shape`` cannot be cut for a target, or None if it can."""
    if layout.fields > 1:
        return f"field-sliced ({layout.fields} fields), which can be merged but not be cut"
    return layout.why_not(shape)


def _everywhere(source: Source, ranks: int) -> tuple[Layout, ...]:
    """Layouts that give the whole tensor to every target rank, or to those whose turn it is."""
    ndim = len(source.meta.shape)
    if source.turn is None:
        return (Layout.undivided(ndim, ranks),)
    first, step = source.turn
    return tuple(Layout.undivided(ndim, 1, rank) for rank in range(first, ranks, step))


def _compare_names(
    sources: Sources, strategy: Strategy, undivided: Sequence[str], recut: Sequence[str]
) -> None:
    names = {source.meta.name for source in sources.found}
    has_other = bool(strategy.layouts) and not names & set(strategy.layouts)
    if names and has_other and not sources.problems:
        text = (
            f"{strategy.origin}: no parameter in common with the source: the strategy lists "
            f"{shorten(strategy.layouts, 3)}, the source holds {shorten(sorted(names), 3)}; "
            "is it the strategy of this model?"
        )
        sources.problems.append(Finding("target", text))
    if recut:
        text = "cut for the target like their parameters, whose optimizer shard their own entries "
        text += f"lack: {count(len(recut), 'optimizer state')}: {shorten(recut)}"
        sources.notes.append(Note("corrected", text))
    if undivided:
        sources.notes.append(
            Note(
                "undivided",
                "not in the target strategy, written undivided to every rank: "
                f"{count(len(undivided), 'parameter')}: {shorten(undivided)}",
            )
        )
    absent = [name for name in strategy.layouts if name not in names]
    if absent:
        text = f"in the target strategy only: {count(len(absent), 'parameter')}"
        sources.notes.append(Note("absent", f"{text}: {shorten(absent)}"))
