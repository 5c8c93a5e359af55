"""A plan: for every output tensor its terms, and for each term the pieces that fill it.

A plan is data.  `ckpttool.planning.targets` makes and checks it.  Iterating it yields the output
files one at a time and computes pieces only when they are needed, so its size does not grow with
their number.

Numbered files have a limit of bytes each.  Parameters are put into them in the order of the plan;
where the next one does not fit, the next file begins.  A tensor that is larger than the limit has a
file of its own.  Tensors without a layout go to a separate file, which loaders give to every rank.
"""

from __future__ import annotations

import math
import posixpath
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapreplace
from typing import Literal, NamedTuple

from ckpttool.model.catalog import Catalog, MergedCatalog
from ckpttool.model.diagnostics import Diagnostic
from ckpttool.model.layout import Layout
from ckpttool.model.manifest import MANIFEST
from ckpttool.model.region import Region
from ckpttool.model.slicing import LayoutSlicing, NotInStrategy, Source
from ckpttool.model.strategy import Merged, Strategy
from ckpttool.model.tensors import StoredTensor, TensorMeta, map_of

NotInTarget = Literal["follow", "full", "drop"]


class Piece(NamedTuple):
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
class Term:
    """A source, and the weight of its elements in the sum that makes an output tensor.

    Attributes
    ----------
    source
        A full tensor, with the name and the element type that the files have.
    weight
        The factor of every element.
    """

    source: Source
    weight: float = 1.0

    def excerpt(self, region: Region) -> Term:
        """Return the term with only the slices that hold ``region`` of the full tensor."""
        slicing = self.source.slicing.excerpt(region)
        return replace(self, source=replace(self.source, slicing=slicing))


def single_source(terms: Sequence[Term]) -> Source:
    """Return the source of a tensor that is a copy: one term, with weight 1.

    All tensors are copies so far.  This is the only place that asserts it.
    """
    assert len(terms) == 1, f"{len(terms)} terms; a tensor is copied from one source"
    assert terms[0].weight == 1, f"weight {terms[0].weight}; a tensor is copied as it is"
    return terms[0].source


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """One tensor of an output file.

    Attributes
    ----------
    meta
        Name, element type and shape of the output slice.
    region
        The elements of the full tensor that it holds.
    terms
        The sources of these elements.  An `excerpt`, which is sent to another process, has only
        the slices that it needs.
    """

    meta: TensorMeta
    region: Region
    terms: tuple[Term, ...]

    @classmethod
    def full(cls, source: Source) -> OutputTensor:
        """Return a copy of the full tensor of a source."""
        return cls(source.meta, Region.whole(source.meta.shape), (Term(source),))

    @classmethod
    def copy_of(cls, tensor: StoredTensor) -> OutputTensor:
        """Return a copy of one stored tensor."""
        shape = tensor.meta.shape
        slicing = LayoutSlicing(Layout.undivided(len(shape)), shape, {0: tensor})
        return cls.full(Source(tensor.meta, slicing, NotInStrategy()))

    @property
    def source(self) -> Source:
        """The only source; see `single_source`."""
        return single_source(self.terms)

    @property
    def stored_itemsize(self) -> int:
        """Bytes per element of the terms together, as the files have them."""
        return sum(term.source.meta.itemsize for term in self.terms)

    def pieces(self, within: Region) -> Iterator[Piece]:
        """Yield the pieces that fill ``within``, a region of the output slice.

        They are disjoint, fill it exactly and come in C order of the source slices.
        """
        for tensor, src, dst in self.source.slicing.overlaps(within, self.region.start):
            yield Piece(tensor, src, dst)

    def count_pieces(self, within: Region) -> int:
        """Return the number of `pieces`."""
        return self.source.slicing.count_overlaps(within.moved_by(self.region.start))

    def excerpt(self, within: Region) -> OutputTensor:
        """Return the tensor with the slices that `pieces` of ``within`` need, and no others."""
        region = within.moved_by(self.region.start)
        return replace(self, terms=tuple(term.excerpt(region) for term in self.terms))


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
    sharding
        The layouts of rank files; `Merged` if full tensors are written.
    attrs
        What else the headers say, as formats take it; ``"crc_num"`` for a checksum.
    is_numbered
        Whether it is a folder of numbered files, and not a single one.
    not_in_target
        What becomes of parameters that a strategy does not list: optimizer state is cut like its
        parameter and the rest is written in full to every rank (``"follow"``), all is written in
        full (``"full"``), or nothing is written (``"drop"``).  Single values go to every rank.
    """

    format: str
    paths: Mapping[int, str]
    ranks: int = 1
    sharding: Strategy | Merged = Merged()
    attrs: Mapping[str, str] = field(default_factory=dict)
    is_numbered: bool = False
    not_in_target: NotInTarget = "follow"

    def limited_to(self, ranks: Iterable[int]) -> Target:
        """Return the target with the outputs of some ranks, in the order of this one."""
        wanted = set(ranks)
        return replace(self, paths={r: path for r, path in self.paths.items() if r in wanted})

    @property
    def is_merged(self) -> bool:
        """Whether full tensors are written, not slices for ranks."""
        return isinstance(self.sharding, Merged)

    @property
    def output_folder(self) -> str:
        """The folder that holds all outputs: of rank files the one that holds the rank folders."""
        folder = posixpath.dirname(next(iter(self.paths.values())))
        return (folder if self.is_merged else posixpath.dirname(folder)) or "."

    @property
    def manifest_path(self) -> str:
        """Path of the manifest: in the output folder, or beside a single file."""
        if self.is_merged and not self.is_numbered:
            return f"{next(iter(self.paths.values()))}.{MANIFEST}"
        folder = self.output_folder
        return MANIFEST if folder == "." else posixpath.join(folder, MANIFEST)


@dataclass(slots=True)
class NotListed:
    """Full tensors that the target strategy does not list, by name.

    Attributes
    ----------
    followed
        Optimizer states that are cut like their parameters.
    full, dropped
        What is written in full to every rank, and what is not written; no single values.
    """

    followed: dict[str, TensorMeta] = field(default_factory=dict)
    full: dict[str, TensorMeta] = field(default_factory=dict)
    dropped: dict[str, TensorMeta] = field(default_factory=dict)

    @property
    def sizes(self) -> dict[str, tuple[int, int]]:
        """How many tensors there are of each kind, and their bytes."""
        kinds = {"followed": self.followed, "full": self.full, "dropped": self.dropped}
        return {
            kind: (len(found), sum(meta.nbytes for meta in found.values()))
            for kind, found in kinds.items()
        }


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
class Transfer:
    """One parameter of the target.

    Attributes
    ----------
    name, dtype
        Name and element type in the outputs.
    terms
        The sources, which have the stored names and element types.
    layouts
        The layouts in the target, one for each stage that has the parameter.
    """

    name: str
    dtype: str
    terms: tuple[Term, ...]
    layouts: tuple[Layout, ...]

    @classmethod
    def copy_of(cls, source: Source, layouts: tuple[Layout, ...]) -> Transfer:
        """Return the transfer of a parameter that keeps its name, type and elements."""
        return cls(source.meta.name, source.meta.dtype, (Term(source),), layouts)

    @property
    def source(self) -> Source:
        """The only source; see `single_source`."""
        return single_source(self.terms)

    @property
    def meta(self) -> TensorMeta:
        """Name and element type of the outputs, and the full shape."""
        stored = self.source.meta
        if (stored.name, stored.dtype) == (self.name, self.dtype):
            return stored
        return replace(stored, name=self.name, dtype=self.dtype)


@dataclass(frozen=True, slots=True)
class Plan:
    """What to write, and from what; iterate it for the output files, afresh each time.

    It says nothing of what lies at the destination, and not which outputs one run of several
    writes: see `ckpttool.transaction.resume.Destination`.

    Attributes
    ----------
    not_listed
        What the target strategy does not list.
    strategies
        The files that the strategies were read from.
    """

    catalog: Catalog
    target: Target
    transfers: tuple[Transfer, ...]
    notes: tuple[Diagnostic, ...] = field(default=())
    not_listed: NotListed = field(default_factory=NotListed)
    documents: tuple[Document, ...] = field(default=())
    strategies: tuple[str, ...] = ()

    def limited_to(self, ranks: Iterable[int]) -> Plan:
        """Return the plan of some of the outputs, in the order of this one."""
        return replace(self, target=self.target.limited_to(ranks))

    @property
    def headers(self) -> dict[tuple[int, ...], tuple[TensorMeta, ...]]:
        """The different headers of the outputs, by the ranks that have them."""
        ways, placed = self._ways()
        alike: dict[tuple[tuple[int, ...] | None, ...], list[int]] = {}
        for rank in self.target.paths:
            regions = _regions(ways, rank)
            shapes = tuple(None if region is None else region.shape for region in regions)
            alike.setdefault(shapes, []).append(rank)
        last = [transfer.meta for transfer, _ in placed]  # headers share equal metas
        headers = {}
        for shapes, ranks in alike.items():
            metas = []
            for number, (_, way) in enumerate(placed):
                shape = shapes[way]
                if shape is not None:
                    last[number] = last[number].of_shape(shape)
                    metas.append(last[number])
            headers[tuple(ranks)] = tuple(metas)
        return headers

    @property
    def sizes(self) -> dict[int, int]:
        """The bytes of the tensors of each output, by its rank."""
        found = {}
        for ranks, metas in self.headers.items():
            found.update(dict.fromkeys(ranks, sum(meta.nbytes for meta in metas)))
        return found

    def __iter__(self) -> Iterator[OutputFile]:
        return self.outputs(self.target.paths)

    def outputs(self, ranks: Iterable[int]) -> Iterator[OutputFile]:
        """The output files of some ranks, in their order."""
        ways, placed = self._ways()
        metas = {rank: header for ranks, header in self.headers.items() for rank in ranks}
        for rank in ranks:
            path = self.target.paths[rank]
            regions = _regions(ways, rank)
            found = [
                (region, transfer.terms)
                for transfer, way in placed
                if (region := regions[way]) is not None
            ]
            tensors = tuple(
                OutputTensor(meta, *one) for meta, one in zip(metas[rank], found, strict=True)
            )
            yield OutputFile(rank, path, self.target.format, tensors, self.target.attrs)

    def _ways(self) -> tuple[tuple[_Way, ...], tuple[tuple[Transfer, int], ...]]:
        """Return the different ways of sharding, and for each transfer the index of each way.

        Of a thousand tensors most are sharded alike.
        """
        ways: dict[_Way, int] = {}
        placed = [
            (transfer, ways.setdefault((layout, transfer.meta.shape), len(ways)))
            for transfer in self.transfers
            for layout in transfer.layouts
        ]
        return tuple(ways), tuple(placed)


_Way = tuple[Layout, tuple[int, ...]]  # and the full shape


def _regions(ways: Iterable[_Way], rank: int) -> list[Region | None]:
    """What a rank has of each; None if it has no part of it."""
    return [layout.region(rank, shape) if rank in layout.ranks else None for layout, shape in ways]


def cut_into_parts(plan: Plan, limit: int, path: Callable[[int | None, int], str]) -> Plan:
    """The plan of a merge, its one output spread over files.

    Parameters
    ----------
    plan
        Of one output that holds everything.
    limit
        Bytes of tensors in a numbered file, at most.
    path
        Gives the file of a number, from 0, of so many; the number is None for the file apart.
    """
    apart = _kept_apart(plan)
    numbers: list[int] = []
    number = filled = 0
    for transfer, is_apart in zip(plan.transfers, apart, strict=True):
        if not is_apart:
            nbytes = transfer.meta.nbytes
            if filled and filled + nbytes > limit:
                number, filled = number + 1, 0
            filled += nbytes
        numbers.append(number)
    count = 0 if all(apart) else number + 1
    transfers = tuple(
        replace(transfer, layouts=(_placed(transfer, count if is_apart else number),))
        for transfer, is_apart, number in zip(plan.transfers, apart, numbers, strict=True)
    )
    paths = {number: path(number, count) for number in range(count)}
    if any(apart):
        paths[count] = path(None, count)
    target = replace(plan.target, paths=paths, ranks=len(paths))
    return replace(plan, target=target, transfers=transfers)


def balance(sizes: Sequence[int], count: int) -> list[int]:
    """For every size one of ``count`` parts, from 0 on, so that the parts are about equal.

    The largest are dealt first, each to the part that has the least; always in the same way.

    Examples
    --------
    >>> balance([5, 1, 4, 2], 2)
    [0, 0, 1, 1]
    """
    parts = [0] * len(sizes)
    held = [(0, part) for part in range(count)]
    for item in sorted(range(len(sizes)), key=lambda item: (-sizes[item], item)):
        nbytes, parts[item] = held[0]
        heapreplace(held, (nbytes + sizes[item], parts[item]))
    return parts


def _placed(transfer: Transfer, number: int) -> Layout:
    """The layout of a tensor that is whole in one file."""
    return Layout.undivided(len(transfer.meta.shape), 1, number)


def _kept_apart(plan: Plan) -> Sequence[bool]:
    """Of every transfer whether it goes to the file apart.

    That is what the source keeps apart or its strategy does not list.  Without a strategy it is
    what cannot be cut: a single element, and map parameters, of which a file needs all parts.
    """
    sources = [transfer.source for transfer in plan.transfers]
    if any(source.is_listed for source in sources):
        return [not source.has_layout for source in sources]
    catalog = plan.catalog
    common = catalog.common_tensors if isinstance(catalog, MergedCatalog) else {}
    return [
        source.meta.name in common
        or math.prod(source.meta.shape) == 1
        or map_of(source.meta.name) is not None
        for source in sources
    ]
