"""A plan: for every output tensor the pieces that fill it.

A plan is data.  It is checked when it is made (`ckpttool.model.planning`); iterating it yields the
output files one at a time and computes pieces only when they are asked for, so its size does not
grow with their number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from ckpttool.model.catalog import Catalog, Stamp, StoredTensor, TensorMeta
from ckpttool.model.described import Described
from ckpttool.model.layout import Layout
from ckpttool.model.notes import Note
from ckpttool.model.region import Region
from ckpttool.model.source import Excerpt, Source
from ckpttool.model.strategy import Strategy


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
    """A small file that is written when all outputs are complete.

    It speaks of them, so an old one is removed before the first of them is replaced.

    Attributes
    ----------
    path, data
        The file, and all that is in it.
    kind
        ``"index"`` of numbered files, or ``"strategy"`` of rank files.
    """

    path: str
    data: bytes
    kind: str = "index"


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
    seen
        What lay at the places of the outputs and their manifest when the plan was made, by path;
        None if whatever lies there may be replaced.
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
    seen: Mapping[str, Stamp] | None = None

    def written(self, kind: str) -> list[str]:
        """The documents of a kind, by their paths."""
        return [document.path for document in self.documents if document.kind == kind]

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
