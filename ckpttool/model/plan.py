"""A plan: for every output tensor its terms, and for each term the pieces that fill it.

A plan is data.  `ckpttool.planning.targets` makes and checks it, `ckpttool.execution` carries it
out, and neither knows the other.  Iterating it yields the output files one at a time and computes
pieces only when they are needed.  Its size does not grow with their number, so it can be printed,
pickled and sent to another machine.
"""

from __future__ import annotations

import posixpath
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import Literal

from msgspec import Struct, field
from msgspec.structs import replace

from ckpttool.model.belonging import Role
from ckpttool.model.catalog import Catalog
from ckpttool.model.choices import TensorOptions
from ckpttool.model.layout import Layout
from ckpttool.model.manifest import MANIFEST, ListedOutput
from ckpttool.model.region import Region, common
from ckpttool.model.slicing import Box, FullTensor, LayoutSlicing, Piece, Whole, find_pieces
from ckpttool.model.strategy import Strategy
from ckpttool.model.tensors import StoredTensor, TensorMeta
from ckpttool.problems import Diagnostic
from ckpttool.wording import Brief, count, format_bytes


class Term(Struct, frozen=True, gc=False):
    """A source, and the weight of its elements in the sum that makes an output tensor.

    The elements of a scale are not added: what was added before them is multiplied by them.  The
    rows of a product, ``(..., m, r)``, and its columns, ``(..., r, n)``, follow each other; their
    product ``(..., m, n)`` times the weight of the second is added.
    """

    source: FullTensor  # a full tensor, with the stored name and element type
    weight: float = 1.0  # the factor of every element
    input: int = 0  # the number of its checkpoint in ``Plan.inputs``
    role: Literal["", "scale", "rows", "columns"] = ""
    within: Region | None = None  # elements of the full output that a product has, and others

    def of_rank(self, rank: int) -> Term:
        """Return the term of an output of ``rank``; see `FullTensor.of_rank`."""
        return Term(self.source.of_rank(rank), self.weight, self.input, self.role, self.within)

    def excerpt(self, region: Region) -> Term:
        """Return the term with only the slices that overlap ``region`` of the full tensor.

        It omits the slicings of other stages, which refer to the catalog, so its pickle is small.
        """
        slicing = self.source.slicing.excerpt(self.elements(region))
        source = replace(self.source, slicing=slicing, copies=(), incomplete=())
        return replace(self, source=source)

    def pieces(self, within: Region, origin: tuple[int, ...]) -> Iterator[Piece]:
        """Yield the pieces that fill ``within``, a region of an output slice at ``origin``.

        They are disjoint, fill ``within`` exactly and come in C order of the slices.
        """
        return find_pieces(self.source.slicing, *self.locate(within, origin))

    @property
    def is_factor(self) -> bool:
        """Whether it has the rows or the columns of a product."""
        return self.role in ("rows", "columns")

    def elements(self, region: Region) -> Region:
        """Return the elements of the source that ``region`` of the full output tensor needs."""
        if not self.is_factor:
            return region
        axis = -1 if self.role == "rows" else -2
        start, stop = [*region.start], [*region.stop]
        start[axis], stop[axis] = 0, self.source.meta.shape[axis]
        return Region(tuple(start), tuple(stop))

    def locate(self, within: Region, origin: tuple[int, ...]) -> tuple[Region, tuple[int, ...]]:
        """Return the elements of the source for ``within``, as a region and its origin there."""
        if not self.is_factor:
            return within, origin
        wanted = self.elements(within.moved_by(origin))
        return wanted.relative_to(wanted.start), wanted.start


def is_copy(terms: Sequence[Term]) -> bool:
    """Return whether elements are those of one source, and not a sum."""
    return len(terms) == 1 and terms[0].weight == 1


def last_source(terms: Sequence[Term]) -> FullTensor:
    """Return the last source whose elements are added; others have equal types and shapes."""
    return terms[0 if terms[-1].role else -1].source


class OutputTensor(Struct, frozen=True, gc=False):
    """One tensor of an output file.

    An `excerpt` for another process has only the sources' slices that it needs.  ``kind`` is equal
    for tensors of a plan whose equal regions are read from equal places of equal slices; None if
    nobody has compared them.
    """

    meta: TensorMeta  # name, element type and shape of the output slice
    region: Region  # the region of the full tensor that the output slice holds
    terms: tuple[Term, ...]
    kind: int | None = None

    @classmethod
    def full(cls, tensor: FullTensor, dtype: str = "") -> OutputTensor:
        """Return a copy of a full tensor, cast to ``dtype`` if that is given."""
        meta = replace(tensor.meta, dtype=dtype) if dtype else tensor.meta
        return cls(meta, Region.whole(meta.shape), (Term(tensor),))

    @property
    def source(self) -> FullTensor:
        """The last source; see `last_source`."""
        return last_source(self.terms)

    @classmethod
    def copy_of(cls, tensor: StoredTensor) -> OutputTensor:
        """Return a copy of one stored tensor."""
        name, shape = tensor.meta.name, tensor.meta.shape
        slicing = LayoutSlicing(Layout.unsharded(len(shape)), shape, name, {0: {name: tensor}})
        return cls.full(FullTensor(tensor.meta, slicing, Whole(((0,),))))

    @property
    def is_cast(self) -> bool:
        """Whether elements are rounded: cast, or averaged."""
        return not is_copy(self.terms) or self.terms[0].source.meta.dtype != self.meta.dtype

    @property
    def stored_itemsize(self) -> int:
        """The stored bytes per element, summed over the terms that are added."""
        return sum(term.source.meta.itemsize for term in self.terms if not term.role)

    @property
    def is_scaled(self) -> bool:
        """Whether elements are multiplied by a scale."""
        return self.terms[-1].role == "scale"

    def pieces(self, within: Region) -> Iterator[Piece]:
        """Return the `Term.pieces` that fill ``within``, a region of the slice; none of factors."""
        start, terms = self.region.start, (term for term in self.terms if not term.is_factor)
        return chain.from_iterable(term.pieces(within, start) for term in terms)

    def count_pieces(self, within: Region) -> int:
        """Return the number of `pieces` that fill ``within``."""
        region = within.moved_by(self.region.start)
        terms = (term for term in self.terms if not term.is_factor)
        return sum(term.source.slicing.count_overlaps(term.elements(region)) for term in terms)

    def excerpt(self, within: Region) -> OutputTensor:
        """Return the tensor with only the slices that the `pieces` of ``within`` need."""
        region = within.moved_by(self.region.start)
        needed = [it for it in self.terms if it.within is None or common(it.within, region)]
        if is_copy(needed):
            needed += self.terms[1:][-2:]  # one product, as a sum takes no NaN here nor elsewhere
        return replace(self, terms=tuple(term.excerpt(region) for term in needed))


class OutputFile(Struct, frozen=True):
    """One output file, with its tensors in order."""

    rank: int
    path: str
    format: str
    tensors: tuple[OutputTensor, ...]
    attrs: Mapping[str, str] = {}

    @property
    def metas(self) -> tuple[TensorMeta, ...]:
        """The tensors of the file's header."""
        return tuple(tensor.meta for tensor in self.tensors)


class Target(Struct, frozen=True):
    """The outputs of a run, and how they are sharded.

    ``attrs`` are those of every header, as formats take them: ``"crc_num"`` for a checksum, and the
    mark of safetensors files; `Plan.provenance` has more.  ``folder`` holds the rank folders, if
    the names of the outputs do not show it.
    """

    format: str
    paths: Mapping[int, str]  # rank to output file, ascending; only the ranks to write
    ranks: int = 1  # number of all ranks of the target
    strategy: Strategy | None = None  # the layouts of rank files; None if full tensors are written
    attrs: Mapping[str, str] = {}
    is_numbered: bool = False  # whether the output is a folder of numbered files
    folder: str | None = None
    model_files: tuple[Document, ...] = ()  # what a model has beside its weights
    is_virtual: bool = False  # whether the output shows bytes of the source, and has none

    @classmethod
    def unwritten(cls, strategy: Strategy | None, ranks: Iterable[int] | None = None) -> Target:
        """Return a target without a format and paths, for a plan that is not written."""
        if strategy is None:
            return cls("", {0: ""})
        every = strategy.ranks
        paths = dict.fromkeys(every if ranks is None else ranks, "")
        return cls("", paths, ranks=len(every), strategy=strategy)

    def limited_to(self, ranks: Iterable[int]) -> Target:
        """Return the target with only the outputs of ``ranks``, in the same order."""
        kept = set(ranks)
        return replace(self, paths={r: path for r, path in self.paths.items() if r in kept})

    @property
    def is_merged(self) -> bool:
        """Whether the outputs hold full tensors."""
        return self.strategy is None

    @property
    def output_folder(self) -> str:
        """The folder that holds the output files, or the rank folders."""
        if self.folder is not None:
            return self.folder
        folder = posixpath.dirname(next(iter(self.paths.values())))
        return (folder if self.is_merged else posixpath.dirname(folder)) or "."

    @property
    def manifest_path(self) -> str:
        """The path of the manifest: in the output folder, or next to a single file."""
        if self.is_merged and not self.is_numbered:
            return f"{next(iter(self.paths.values()))}.{MANIFEST}"
        folder = self.output_folder
        return MANIFEST if folder == "." else posixpath.join(folder, MANIFEST)


class NotListed(Struct):
    """Full tensors that the target strategy does not list, by name.

    ``followed`` are optimizer states that are sharded like their parameters.  ``full`` are written
    in full to every rank, ``dropped`` are not written; neither has single values.
    """

    followed: dict[str, TensorMeta] = {}
    full: dict[str, TensorMeta] = {}
    dropped: dict[str, TensorMeta] = {}

    @property
    def sizes(self) -> dict[str, tuple[int, int]]:
        """The number of tensors of each kind, and their bytes."""
        kinds = {"followed": self.followed, "full": self.full, "dropped": self.dropped}
        return {
            kind: (len(metas), sum(meta.nbytes for meta in metas.values()))
            for kind, metas in kinds.items()
        }


class Document(Struct, frozen=True):
    """A small file that describes the outputs and is written when all of them are complete.

    An old one is removed before the first output is replaced.  ``kind`` is ``"index"`` of numbered
    files, ``"strategy"`` or ``"meta.json"`` of rank files, ``"model file"`` of a model.
    """

    path: str
    data: bytes
    kind: str = "index"


class Transfer(Struct, frozen=True, gc=False):
    """One parameter, with its name and type in the outputs, and its sources.

    It has a layout in the target for each stage that has the parameter.
    """

    name: str
    dtype: str
    terms: tuple[Term, ...]  # the sources, with stored names and element types
    layouts: tuple[Layout, ...]

    @classmethod
    def copy_of(cls, tensor: FullTensor, layouts: tuple[Layout, ...]) -> Transfer:
        """Return the transfer of a tensor that keeps its name, type and elements."""
        return cls(tensor.name, tensor.meta.dtype, (Term(tensor),), layouts)

    @property
    def read_kind(self) -> Hashable:
        """A value that is equal for transfers whose elements are in equal places of slices."""
        places = ((t.source.slicing.key, t.source.meta.dtype, t.role) for t in self.terms)
        return self.dtype, tuple(places)

    def terms_of(self, rank: int) -> tuple[Term, ...]:
        """Return the sources of an output of ``rank``."""
        return tuple(term.of_rank(rank) for term in self.terms) if self.is_own else self.terms

    @property
    def is_own(self) -> bool:
        """Whether each output takes what the file of its own rank has."""
        return any(term.source.own_ranks for term in self.terms)

    @property
    def is_cast(self) -> bool:
        """Whether elements are rounded: cast, averaged, or those of a sum."""
        return not is_copy(self.terms) or self.source.meta.dtype != self.dtype

    @property
    def is_mean(self) -> bool:
        """Whether elements are a weighted mean of several sources."""
        return not is_copy(self.terms) and not self.terms[-1].role

    @property
    def source(self) -> FullTensor:
        """The last source; see `last_source`."""
        return last_source(self.terms)

    @property
    def meta(self) -> TensorMeta:
        """The full tensor, with the name and element type of the outputs."""
        stored = self.source.meta
        if (stored.name, stored.dtype) == (self.name, self.dtype):
            return stored
        return replace(stored, name=self.name, dtype=self.dtype)


class Kept(Struct, frozen=True):
    """Facts from the manifest of a source, for files that are written again.

    ``names`` are those in the strategy of the first source that differ; None if not known.
    """

    strategy: Strategy | None = None
    names: Mapping[str, str] | None = None
    files: tuple[str, ...] = ()  # the strategy that it names, if that is there


class Plan(Brief, Struct, frozen=True, dict=True):
    """The outputs and the sources of each; iterating it yields the output files.

    It does not depend on the files at the destination, or on the outputs that one run of several
    writes: see `ckpttool.transaction.resume.Destination`.

    Attributes
    ----------
    inputs
        The checkpoints that are read, and after them adapters; a `Term` says which has its source.
    weights
        The weights of the inputs in means; none if there is one input.
    left_out
        The tensors of the source that the user does not want, with their bytes.
    weight_block
        Rows and columns of Float8 weights that share a scale; None for the usual ones.
    confirmed
        The tensors of the source whose full shapes more shows than a strategy.
    """

    inputs: tuple[Catalog, ...]
    target: Target
    transfers: tuple[Transfer, ...]
    notes: tuple[Diagnostic, ...] = ()
    not_listed: NotListed = field(default_factory=NotListed)
    documents: tuple[Document, ...] = ()
    left_out: Mapping[str, int] = {}
    roles: Mapping[Role, int] = {}
    weight_block: tuple[int, int] | None = None
    strategies: tuple[str, ...] = ()  # the files that the strategies were read from
    confirmed: frozenset[str] = frozenset()
    provenance: Mapping[str, str] = {}  # the attributes that say how the outputs were made
    listed: Mapping[str, ListedOutput] = {}  # the source files that a manifest lists, by path
    tensors: TensorOptions = TensorOptions()
    weights: tuple[float, ...] = ()
    kept: Kept = Kept()  # what is known of the layouts of files that are written again

    def _texts(self) -> Iterator[str]:
        yield f"{count(len(self.transfers), 'tensor')} to {self.target.output_folder}"
        yield count(len(self.target.paths), f"{self.target.format} file")
        yield format_bytes(sum(self.sizes.values()))

    def _rows(self) -> Iterator[Sequence[str]]:
        yield ("output", "size")
        sizes = self.sizes
        for rank, path in self.target.paths.items():
            yield (path, format_bytes(sizes[rank]))

    @property
    def checkpoints(self) -> tuple[Catalog, ...]:
        """The inputs without adapters; what is not averaged is that of the last."""
        return self.inputs[: len(self.weights) or 1]

    @property
    def is_own(self) -> bool:
        """Whether outputs take what the files of their own ranks have."""
        return any(transfer.is_own for transfer in self.transfers)

    @property
    def renamed(self) -> Mapping[str, str]:
        """Name in the outputs to name in the source, where they differ."""
        pairs = ((transfer.name, transfer.source.name) for transfer in self.transfers)
        return {new: old for new, old in pairs if new != old}

    @property
    def written_names(self) -> Mapping[str, str] | None:
        """Name in the outputs to that in the strategy of the source, where they differ.

        None if that is not known, or if layouts are.
        """
        names = None if self.kept.strategy else self.kept.names
        if names is None:
            return None
        called = {t.name: names.get(t.source.name, t.source.name) for t in self.transfers}
        return {name: old for name, old in called.items() if name != old}

    @cached_property
    def shown(self) -> Mapping[str, tuple[Sequence[Box], str]]:
        """The boxes of each tensor of a virtual output, or why it cannot show them."""
        from ckpttool.model.shown_extents import find_boxes  # few outputs are virtual

        return {it.meta.name: find_boxes(it) for output in self for it in output.tensors}

    @cached_property
    def written_strategy(self) -> Strategy | None:
        """The layouts of the tensors in the outputs, by their names there; None if not known.

        Strings, values that differ between ranks, and single values that the target does not list
        have none.
        """
        if self.is_own:
            if (known := self.kept.strategy) is None:
                return None
            pairs = ((t.name, known.layouts.get(t.source.name)) for t in self.transfers)
            return replace(known, layouts={name: of for name, of in pairs if of})
        target = self.target.strategy
        strategy = target or Strategy({}, 1, 1)
        layouts: dict[str, tuple[Layout, ...]] = {}
        joined: dict[tuple[int, int], tuple[Layout, ...]] = {}  # most tensors share their layouts
        for transfer in self.transfers:
            name, source = transfer.name, transfer.source
            is_listed = source.name in strategy.layouts or source.name in self.not_listed.followed
            has_layout = source.meta.text is None and (is_listed or not source.meta.is_single)
            if source.only_for is None and has_layout:
                before, ndim = layouts.get(name, ()), len(source.meta.shape)
                key = id(before), id(transfer.layouts) if target else ndim
                if key not in joined:
                    full = Layout.unsharded(ndim)  # in whichever numbered file
                    of_stages = _by_stage(transfer, target.stage_ranks) if target else [full]
                    placed = sorted((*before, *of_stages), key=lambda layout: layout.first_rank)
                    joined[key] = tuple(placed)
                layouts[name] = joined[key]
        return replace(strategy, layouts=layouts, rules=None)

    @property
    def attrs(self) -> Mapping[str, str]:
        """The attributes of every header: those of the target, and the provenance."""
        return {**self.target.attrs, **self.provenance}

    def limited_to(self, ranks: Iterable[int]) -> Plan:
        """Return the plan of only the outputs of ``ranks``, in the same order."""
        kept = {*ranks}
        if kept >= self.target.paths.keys():
            return self  # with all that is computed of it
        return replace(self, target=self.target.limited_to(kept))

    @cached_property
    def headers(self) -> Mapping[tuple[int, ...], tuple[TensorMeta, ...]]:
        """The distinct headers of the outputs, by the ranks that share each."""
        layouts, transfers, numbers = self._distinct_layouts
        stages = dict.fromkeys(layout.ranks for layout, _ in layouts)
        uneven = [layout for layout in layouts if not layout[0].has_equal_slices]
        ranks_of: dict[Hashable, list[int]] = {}
        for rank in self.target.paths:
            places = [rank in ranks for ranks in stages]
            ranks_of.setdefault((*places, *_shapes(uneven, rank)), []).append(rank)
        last = [transfer.meta for transfer in transfers]  # headers share equal metas
        headers = {}
        for ranks in ranks_of.values():
            shapes = _shapes(layouts, ranks[0])
            metas = []
            for i, number in enumerate(numbers):
                shape = shapes[number]
                if shape is not None:
                    last[i] = last[i].of_shape(shape)
                    metas.append(last[i])
            headers[tuple(ranks)] = tuple(metas)
        return headers

    @cached_property
    def sizes(self) -> Mapping[int, int]:
        """Rank to the bytes of the tensors of its output."""
        nbytes = {}
        for ranks, metas in self.headers.items():
            nbytes.update(dict.fromkeys(ranks, sum(meta.nbytes for meta in metas)))
        return nbytes

    def holders(self) -> Mapping[int, frozenset[str]]:
        """Return, for each rank, the cast tensors whose slice no output of a lower rank holds.

        Together these slices are each full tensor once, or the own tensors of all ranks.
        """
        by_layouts: dict[tuple[Layout, ...], list[str]] = {}
        names_of: dict[int, set[str]] = {rank: set() for rank in self.target.paths}
        for transfer in self.transfers:
            if transfer.is_cast and transfer.is_own:
                for rank in chain(*(names_of.keys() & layout.ranks for layout in transfer.layouts)):
                    names_of[rank].add(transfer.name)
            elif transfer.is_cast:
                by_layouts.setdefault(transfer.layouts, []).append(transfer.name)
        for layouts, names in by_layouts.items():
            # Pipeline stages that share a tensor hold it several times: the first one counts.
            holding = ((layout, sorted(names_of.keys() & layout.ranks)) for layout in layouts)
            layout, ranks = next((pair for pair in holding if pair[1]), (layouts[0], []))
            seen = set[tuple[int, ...]]()
            for rank in ranks:
                index = layout.slice_index(rank)
                if index not in seen:
                    seen.add(index)
                    names_of[rank].update(names)
        return {rank: frozenset(names) for rank, names in names_of.items()}

    @cached_property
    def alike(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of the outputs, those with equal tensors together; data parallel ranks have."""
        layouts, *_ = self._distinct_layouts
        even = dict.fromkeys(
            layout for layout, shape in layouts if layout.is_even and 0 not in shape
        )
        uneven = [(layout, shape) for layout, shape in layouts if layout not in even]
        ranks_of: dict[Hashable, list[int]] = {}
        for rank in self.target.paths:
            places = [layout.slice_index(rank) if rank in layout.ranks else None for layout in even]
            ranks_of.setdefault((*places, *_regions(uneven, rank)), []).append(rank)
        return tuple(map(tuple, ranks_of.values()))

    @cached_property
    def kinds(self) -> Mapping[str, tuple[Transfer, ...]]:
        """The transfers of each kind, by the name of the first.

        Slices of the same region of such tensors take equal pieces of the same source ranks.
        """
        kinds_of = [catalog.find_kinds() for catalog in self.inputs]

        def kind_of(term: Term) -> Hashable:
            source, kinds = term.source, kinds_of[term.input]
            key = source.slicing.key
            kind = tuple(map(kinds.get, source.stored_names))
            return key, source.meta.dtype, term.weight, term.input, term.role, kind

        by_kind: dict[Hashable, list[Transfer]] = {}
        for transfer in self.transfers:
            key = transfer.layouts, transfer.dtype, tuple(map(kind_of, transfer.terms))
            by_kind.setdefault(key, []).append(transfer)
        return {transfers[0].name: tuple(transfers) for transfers in by_kind.values()}

    @property
    def of_kinds(self) -> Plan:
        """The plan with one transfer of each of the `kinds`."""
        return replace(self, transfers=tuple(transfer for transfer, *_ in self.kinds.values()))

    def __iter__(self) -> Iterator[OutputFile]:
        return self.outputs(self.target.paths)

    def outputs(self, ranks: Iterable[int]) -> Iterator[OutputFile]:
        """Yield the output files of ``ranks``, in their order."""
        layouts, transfers, numbers = self._distinct_layouts
        metas = {rank: header for ranks, header in self.headers.items() for rank in ranks}
        attrs = self.attrs
        kinds: dict[Hashable, int] = {}
        read_kinds = zip(numbers, (transfer.read_kind for transfer in transfers), strict=True)
        kind_of = [kinds.setdefault(key, len(kinds)) for key in read_kinds]
        is_own = self.is_own
        for rank in ranks:
            path = self.target.paths[rank]
            regions = _regions(layouts, rank)
            parts = (
                (region, transfer.terms_of(rank) if is_own else transfer.terms, kind)
                for transfer, number, kind in zip(transfers, numbers, kind_of, strict=True)
                if (region := regions[number]) is not None
            )
            tensors = tuple(
                OutputTensor(meta, *part) for meta, part in zip(metas[rank], parts, strict=True)
            )
            yield OutputFile(rank, path, self.target.format, tensors, attrs)

    @cached_property
    def _distinct_layouts(
        self,
    ) -> tuple[Sequence[_LayoutOfShape], Sequence[Transfer], Sequence[int]]:
        """Return the distinct layouts, each transfer for each of its layouts, and their numbers.

        Most of a model's tensors share few layouts, so regions are computed once for each.
        """
        known: dict[_LayoutOfShape, int] = {}
        transfers = [transfer for transfer in self.transfers for _ in transfer.layouts]
        layouts = ((layout, it.source.meta.shape) for it in self.transfers for layout in it.layouts)
        numbers = [known.setdefault(layout, len(known)) for layout in layouts]
        return tuple(known), transfers, numbers


def _by_stage(transfer: Transfer, stage_ranks: int) -> Iterator[Layout]:
    for layout in transfer.layouts:
        if len(layout.ranks) == stage_ranks:
            yield layout
            continue
        for first in range(layout.ranks.start, layout.ranks.stop, stage_ranks):
            yield Layout.unsharded(len(layout.tensor_map), stage_ranks, first)


_LayoutOfShape = tuple[Layout, tuple[int, ...]]  # a layout and a full shape


def _shapes(layouts: Iterable[_LayoutOfShape], rank: int) -> list[tuple[int, ...] | None]:
    return [
        layout.slice_shape(rank, shape) if rank in layout.ranks else None
        for layout, shape in layouts
    ]


def _regions(layouts: Iterable[_LayoutOfShape], rank: int) -> list[Region | None]:
    return [
        layout.region(rank, shape) if rank in layout.ranks else None for layout, shape in layouts
    ]
