"""What a checkpoint or a strategy is, at a glance: sizes, parallelism, completeness, folded rows.

A row stands for the tensors that are alike: layers whose names differ only in their numbers, and
the optimizer states of a parameter that are distributed like it.  All of it follows from headers
and layouts; nothing here reads a file.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, product
from typing import Literal

from ckpttool.model.catalog import Catalog, MergedCatalog
from ckpttool.model.diagnostics import Diagnostics
from ckpttool.model.layout import Layout
from ckpttool.model.slicing import BoxSlicing, LayoutSlicing, Source
from ckpttool.model.strategy import Merged, Sharding, Strategy
from ckpttool.model.tensors import FileIndex
from ckpttool.planning.missing import ranks_without_file
from ckpttool.planning.optimizer_state import parameter_by_prefix

# How the placement of a tensor is known.
Known = Literal["layout", "described", "unlisted", "full", "stored"]

Ranks = tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """How a tensor is distributed over ranks; tensors with an equal one share the object.

    Attributes
    ----------
    known
        ``"layout"``: a strategy gives its layout, or that of its parameter.  ``"described"``: the
        checkpoint describes its slices.  ``"unlisted"``: a strategy or a description omits it.
        ``"full"``: a file of a merged checkpoint holds it.  ``"stored"``: nothing says how the
        slices on the ranks fit together.
    slice_counts
        Slices along each axis, optimizer shard included; None if the slices are no grid, or not
        known.
    optimizer_shard
        Slices into which an optimizer shard splits axis 0; 1 for none.
    owners
        The ranks that hold each slice, slices in C order.
    replicas
        Ranks that should hold each slice, before an optimizer shard.
    others
        Further ranks that hold the tensor, in other stages.
    pattern
        A number that is equal for placements that differ only in their stage.
    """

    known: Known
    slice_counts: tuple[int, ...] | None
    optimizer_shard: int
    owners: tuple[Ranks, ...]
    replicas: int = 1
    others: Ranks = ()
    pattern: int = 0

    @property
    def is_sharded(self) -> bool:
        """Whether there are several slices."""
        return len(self.owners) > 1

    @property
    def is_listed(self) -> bool:
        """Whether a layout or a description gives the slices."""
        return self.known in ("layout", "described")

    @property
    def cut_axes(self) -> tuple[int, ...]:
        """The tensor axes that are cut by more than the optimizer shard."""
        counts = self.slice_counts or ()
        own = [n // self.optimizer_shard if axis == 0 else n for axis, n in enumerate(counts)]
        return tuple(axis for axis, n in enumerate(own) if n > 1)


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor, and how it is distributed.

    Attributes
    ----------
    name, dtype
        Its name and element type; "" for the dtype in a strategy.
    shape
        The full shape, or that of the stored slice; None if it is not known.
    placement
        Its distribution.
    nbytes
        Bytes of the full tensor, or of all stored slices.
    elements
        Elements of the same.
    """

    name: str
    dtype: str
    shape: tuple[int, ...] | None
    placement: Placement
    nbytes: int = 0
    elements: int = 0


@dataclass(frozen=True, slots=True)
class Row:
    """Tensors that are alike.

    Attributes
    ----------
    pattern
        The name of the parameter, with the numbers of equal layers: ``layers.{0-3}.weight``.
    prefixes
        What stands before this name in the names of the tensors: ``("", "adam_m.")`` for the
        parameter and a state of it.
    count
        Number of parameters.
    first
        The first tensor.
    placements
        The distinct placements; several are of one pattern, in different stages.
    names
        The names of all tensors.
    nbytes
        Bytes of all tensors.
    """

    pattern: str
    prefixes: tuple[str, ...]
    count: int
    first: Entry
    placements: tuple[Placement, ...]
    names: tuple[str, ...]
    nbytes: int

    @property
    def is_in_line(self) -> bool:
        """Whether the names may stand in a line below the table, which says who holds the same."""
        return self.is_single_value or self.first.placement.known == "unlisted"

    @property
    def is_single_value(self) -> bool:
        """Whether each tensor is a single value without states."""
        shape = self.first.shape
        return shape is not None and math.prod(shape) == 1 and self.prefixes == ("",)


@dataclass(frozen=True, slots=True)
class Amount:
    """A number of tensors, their elements and bytes, and the elements of each element type."""

    tensors: int = 0
    elements: int = 0
    nbytes: int = 0
    dtypes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Split:
    """Number of parameters with the same slices and replicas, before an optimizer shard.

    Attributes
    ----------
    slices, replicas
        Slices of a parameter, and ranks that hold each.
    tensors
        Number of such parameters.
    cuts
        Number of axes of these parameters, and the axes that are cut.
    """

    slices: int
    replicas: int
    tensors: int
    cuts: frozenset[tuple[int, tuple[int, ...]]] = frozenset()


@dataclass(frozen=True, slots=True)
class Stage:
    """The ranks of a pipeline stage, and its device matrices, the most frequent first."""

    ranks: range
    device_matrices: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Parallelism:
    """How the tensors are distributed.

    Attributes
    ----------
    splits
        The distinct splits of parameters, the most frequent first.
    stages
        The pipeline stages; empty for a checkpoint that describes itself.
    optimizer_shards
        Optimizer shard to the number of tensors that have it, states included.
    tensors
        Number of tensors that have a layout, states included.
    """

    splits: tuple[Split, ...]
    stages: tuple[Stage, ...] = ()
    optimizer_shards: Mapping[int, int] = field(default_factory=dict)
    tensors: int = 0

    @property
    def tensor_parallel(self) -> Split | None:
        """The split of all sharded parameters, if layouts say that it is tensor parallelism.

        They say so if all have as many slices, and some matrices are cut along rows and others
        along columns.  Other cuts may be of another kind: of experts, or of an embedding table.
        """
        sharded = [split for split in self.splits if split.slices > 1]
        if len(sharded) != 1 or max(ndim for ndim, _ in sharded[0].cuts) > 2:
            return None
        cuts = {axes for ndim, axes in sharded[0].cuts if ndim == 2}
        return sharded[0] if cuts == {(0,), (1,)} else None


@dataclass(frozen=True, slots=True)
class Completeness:
    """Whether every slice is there.

    Attributes
    ----------
    is_complete
        None if it is not known.
    codes
        Codes of the diagnostics that say what is wrong or in doubt.
    missing_ranks
        Ranks without a file.
    unreadable_ranks
        Ranks whose file cannot be read.
    missing_tensors
        Tensors whose slices are not all there, or do not fit together.
    replicas
        The fewest and the most ranks that hold a slice; None if no slices are known.
    """

    is_complete: bool | None
    codes: tuple[str, ...] = ()
    missing_ranks: Ranks = ()
    unreadable_ranks: Ranks = ()
    missing_tensors: tuple[str, ...] = ()
    replicas: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class EqualRanks:
    """The ranks with equal samples of a tensor.

    Attributes
    ----------
    groups
        The ranks, grouped.
    is_constant
        Whether all samples are one value, which slices of different elements may be.
    is_part
        Whether the samples are a part of the tensor.
    """

    groups: tuple[Ranks, ...]
    is_constant: bool
    is_part: bool


@dataclass(frozen=True, slots=True)
class Summary:
    """A checkpoint or a strategy at a glance.

    Attributes
    ----------
    weights, optimizer_state, other
        What the full tensors hold, or without layouts what all ranks store.  Single values that
        are not in the strategy, and texts, are in ``other``.
    rows
        The folded tensors.
    parallelism
        None if nothing says how the tensors are distributed.
    completeness
        None for a strategy.
    equal_ranks
        Name to the ranks with equal samples, for the sampled tensors.
    """

    weights: Amount
    optimizer_state: Amount
    other: Amount
    rows: tuple[Row, ...]
    parallelism: Parallelism | None = None
    completeness: Completeness | None = None
    equal_ranks: Mapping[str, EqualRanks] = field(default_factory=dict)


# ------------------------------------------------------------------------------------------ entries


class _Placements:
    """Makes placements, one object for equal ones."""

    def __init__(self) -> None:
        self._by_value: dict[object, Placement] = {}
        self._patterns: dict[object, int] = {}

    def get(
        self,
        known: Known,
        slice_counts: tuple[int, ...] | None,
        owners: tuple[Ranks, ...],
        *,
        optimizer_shard: int = 1,
        replicas: int = 1,
        others: Ranks = (),
        first_rank: int = 0,
    ) -> Placement:
        """Return the placement with these fields; the pattern counts ranks from ``first_rank``."""
        common = (known, slice_counts, optimizer_shard, replicas)
        key = (common, owners, others)
        if key not in self._by_value:
            shifted = tuple(
                tuple(rank - first_rank for rank in ranks) for ranks in (*owners, others)
            )
            pattern = self._patterns.setdefault((common, shifted), len(self._patterns))
            self._by_value[key] = Placement(
                known, slice_counts, optimizer_shard, owners, replicas, others, pattern
            )
        return self._by_value[key]


def entries_of_sources(
    catalog: Catalog,
    sources: Iterable[Source],
    *,
    is_replicated: bool = False,
    is_deduplicated: bool = False,
) -> tuple[Entry, ...]:
    """Return the full tensors of a checkpoint, with the ranks that hold each slice on disk.

    ``is_replicated`` tells that every rank holds full tensors, as a hand-written strategy may say.
    ``is_deduplicated`` tells that only one of the ranks of each slice has it on disk; the ranks are
    then those of the layout.
    """
    placements = _Placements()
    known: dict[object, Placement] = {}  # thousands of tensors have few distributions
    holders = catalog.holders
    entries = []
    for source in sources:
        held = holders[source.meta.name]
        key = (source.slicing.distribution_key, source.has_layout, id(held))
        if key not in known:
            having = catalog.files if is_deduplicated else frozenset(held)
            known[key] = _place(source, held, having, is_replicated, placements)
        meta = source.meta
        elements = 0 if meta.text is not None else math.prod(meta.shape)
        entries.append(Entry(meta.name, meta.dtype, meta.shape, known[key], meta.nbytes, elements))
    return tuple(entries)


def _place(
    source: Source,
    held: Ranks,
    having: Collection[int],
    is_replicated: bool,
    placements: _Placements,
) -> Placement:
    """Return the placement of a tensor on the ranks in ``having``."""
    slicing = source.slicing
    if not source.has_layout:
        known: Known = "described" if is_replicated else "unlisted"
        counts = (1,) * len(source.meta.shape)
        return placements.get(known, counts, (held,), replicas=len(held))
    owners = tuple(tuple(filter(having.__contains__, ranks)) for ranks in slicing.owners())
    others = tuple(sorted(set(held).difference(*owners)))
    if isinstance(slicing, BoxSlicing):
        grid = slicing.slice_counts if slicing.is_grid else None
        replicas = min(map(len, owners), default=0)
        first = min(chain(*owners), default=0)
        return placements.get(
            "described", grid, owners, replicas=replicas, others=others, first_rank=first
        )
    assert isinstance(slicing, LayoutSlicing)
    return _place_layout(slicing.layout, owners, others, placements)


def _place_layout(
    layout: Layout, owners: tuple[Ranks, ...], others: Ranks, placements: _Placements
) -> Placement:
    return placements.get(
        "layout",
        layout.slice_counts,
        owners,
        optimizer_shard=layout.optimizer_shard,
        replicas=layout.replicas,
        others=others,
        first_rank=layout.first_rank,
    )


def entries_of_strategy(strategy: Strategy, names: Collection[str]) -> tuple[Entry, ...]:
    """Return the parameters of a strategy that are in ``names``, with the ranks of each slice."""
    placements = _Placements()
    known: dict[tuple[Layout, ...], Placement] = {}
    entries = []
    for name, layouts in strategy.layouts.items():
        if name not in names:
            continue
        if layouts not in known:
            known[layouts] = _place_layouts(layouts, placements)
        entries.append(Entry(name, "", layouts[0].full_shape, known[layouts]))
    return tuple(entries)


def rows_of_rules(strategy: Strategy) -> tuple[Row, ...]:
    """Return a row for each rule of a hand-written strategy."""
    placements = _Placements()
    rows = []
    for rule in strategy.rules.rules if strategy.rules else ():
        layouts = rule.layouts(len(rule.layout.tensor_map))
        entry = Entry(rule.pattern, "", None, _place_layouts(layouts, placements))
        rows.append(Row(rule.pattern, ("",), 1, entry, (entry.placement,), (rule.pattern,), 0))
    return tuple(rows)


def _place_layouts(layouts: Sequence[Layout], placements: _Placements) -> Placement:
    """Return the placement of a parameter in its first stage, and the ranks of its others."""
    first = layouts[0]
    others = tuple(chain.from_iterable(layout.ranks for layout in layouts[1:]))
    return _place_layout(first, tuple(first.slice_owners()), others, placements)


def entries_of_files(catalog: Catalog) -> tuple[Entry, ...]:
    """Return the tensors of files without layouts, each with all that is stored of it.

    The shape is that of the lowest rank.
    """
    placements = _Placements()
    is_merged = isinstance(catalog, MergedCatalog)
    full = placements.get("full", None, (tuple(catalog.files),))
    nbytes: Counter[str] = Counter()
    elements: Counter[str] = Counter()
    for ranks, header in catalog.headers.items():
        for name, tensor in header.items():
            meta = tensor.meta
            nbytes[name] += meta.nbytes * len(ranks)
            if meta.text is None:
                elements[name] += math.prod(meta.shape) * len(ranks)
    return tuple(
        Entry(
            name,
            meta.dtype,
            meta.shape,
            full if is_merged else placements.get("stored", None, (catalog.holders[name],)),
            nbytes[name],
            elements[name],
        )
        for name, meta in catalog.metas.items()
    )


# --------------------------------------------------------------------------------------------- rows

# The number of a layer; what is longer, or has leading zeros, is a part of the name.
_NUMBER = re.compile(r"(?<![0-9])(?:0|[1-9][0-9]{0,8})(?![0-9])")


def fold_rows(entries: Sequence[Entry], parameter_of_state: Mapping[str, str]) -> tuple[Row, ...]:
    """Fold equal layers into one row, and optimizer states into the row of their parameter.

    Parameters
    ----------
    entries
        The tensors.
    parameter_of_state
        Name of a state to name of its parameter.

    Examples
    --------
    >>> whole = Placement("layout", (1,), 1, ((0, 1),))
    >>> names = ("layers.0.weight", "layers.1.weight", "adam_m.layers.0.weight")
    >>> rows = fold_rows([Entry(name, "Float32", (4,), whole) for name in names],
    ...                  {"adam_m.layers.0.weight": "layers.0.weight"})
    >>> [(row.pattern, row.prefixes) for row in rows]
    [('layers.0.weight', ('', 'adam_m.')), ('layers.1.weight', ('',))]
    """
    alike: dict[tuple[str, object, Placement], list[Entry]] = {}
    for entry in entries:
        parameter = parameter_of_state.get(entry.name, entry.name)
        base = parameter if entry.name.endswith(parameter) else entry.name
        alike.setdefault((base, entry.shape, entry.placement), []).append(entry)
    layers: dict[object, dict[tuple[int, ...], tuple[str, list[Entry]]]] = {}
    for (base, shape, placement), members in alike.items():
        members.sort(key=lambda entry: entry.name.removesuffix(base))  # the parameter first
        prefixes = tuple(entry.name.removesuffix(base) for entry in members)
        pattern = _NUMBER.sub("#", base)
        dtypes = tuple(entry.dtype for entry in members)
        key = (pattern, prefixes, dtypes, shape, placement.pattern)
        numbers = tuple(map(int, _NUMBER.findall(base)))
        layers.setdefault(key, {})[numbers] = (base, members)
    return tuple(row for found in layers.values() for row in _fold_layers(found))


def _fold_layers(
    layers: Mapping[tuple[int, ...], tuple[str, Sequence[Entry]]],
) -> Iterator[Row]:
    """Yield the rows of tensors whose names differ only in their numbers."""
    for ways in _factor(layers):
        members = [layers[numbers] for numbers in product(*ways)]
        base, first = members[0]
        entries = [entry for _, alike in members for entry in alike]
        texts = iter([_number(values) for values in ways])
        pattern = _NUMBER.sub(lambda _, texts=texts: next(texts), base)  # type: ignore[misc]
        prefixes = tuple(entry.name.removesuffix(base) for entry in first)
        names = tuple(entry.name for entry in entries)
        nbytes = sum(entry.nbytes for entry in entries)
        placements = tuple(dict.fromkeys(entry.placement for entry in entries))
        yield Row(pattern, prefixes, len(members), first[0], placements, names, nbytes)


def _number(values: Ranks) -> str:
    """Return a number of a name, or in braces the numbers of the layers that are alike."""
    return str(values[0]) if len(values) == 1 else f"{{{format_numbers(values)}}}"


def format_numbers(values: Iterable[int]) -> str:
    """Format numbers with ranges and without spaces.

    Examples
    --------
    >>> format_numbers([0, 1, 2, 5, 7, 8])
    '0-2,5,7,8'
    """
    ranges: list[list[int]] = []
    for value in sorted(values):
        if ranges and ranges[-1][-1] == value - 1:
            ranges[-1].append(value)
        else:
            ranges.append([value])
    return ",".join(
        f"{run[0]}-{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in ranges
    )


def _factor(tuples: Iterable[tuple[int, ...]]) -> list[tuple[Ranks, ...]]:
    """Write a set of tuples as products of sets, in the order of their first tuples.

    Examples
    --------
    >>> _factor([(0, 0), (0, 1), (1, 0), (1, 1), (2, 5)])
    [((0, 1), (0, 1)), ((2,), (5,))]
    """
    tuples = list(tuples)
    if not tuples[0]:
        return [()]
    rests: dict[int, list[tuple[int, ...]]] = {}
    for head, *rest in tuples:
        rests.setdefault(head, []).append(tuple(rest))
    heads: dict[frozenset[tuple[int, ...]], list[int]] = {}
    for head, found in rests.items():
        heads.setdefault(frozenset(found), []).append(head)
    return [
        (tuple(values), *ways) for values in heads.values() for ways in _factor(rests[values[0]])
    ]


# ------------------------------------------------------------------------------------------ summary


def summarize(
    entries: Sequence[Entry],
    parameter_of_state: Mapping[str, str],
    parallelism: Parallelism | None = None,
    completeness: Completeness | None = None,
) -> Summary:
    """Return the summary of tensors: their amounts and rows.

    A tensor with a prefix of MindSpore's optimizers is optimizer state even without its parameter,
    unless a strategy lists it.
    """
    kinds: dict[str, list[Entry]] = {"weights": [], "optimizer_state": [], "other": []}
    for entry in entries:
        is_listed = entry.placement.is_listed
        is_state = entry.name in parameter_of_state
        is_single = entry.shape is not None and math.prod(entry.shape) == 1
        if is_state or (not is_listed and parameter_by_prefix(entry.name) is not None):
            kinds["optimizer_state"].append(entry)
        else:
            kinds["other" if is_single and not is_listed else "weights"].append(entry)
    weights, optimizer_state, other = (_add_up(found) for found in kinds.values())
    rows = fold_rows(entries, parameter_of_state)
    return Summary(weights, optimizer_state, other, rows, parallelism, completeness)


def _add_up(entries: Sequence[Entry]) -> Amount:
    dtypes: Counter[str] = Counter()
    for entry in entries:
        dtypes[entry.dtype] += entry.elements
    return Amount(
        len(entries), dtypes.total(), sum(e.nbytes for e in entries), dict(dtypes.most_common())
    )


def find_parallelism(
    entries: Iterable[Entry], parameter_of_state: Mapping[str, str], sharding: Sharding
) -> Parallelism:
    """Return how tensors with layouts are distributed, in numbers."""
    numbers: Counter[Placement] = Counter()
    shards: Counter[int] = Counter()
    tensors = 0
    for entry in entries:
        if not entry.placement.is_listed:
            continue
        tensors += 1
        shards[entry.placement.optimizer_shard] += 1
        if entry.name not in parameter_of_state:
            numbers[entry.placement] += 1
    splits: dict[tuple[int, int], Split] = {}
    for placement, number in numbers.items():
        slices = len(placement.owners) // placement.optimizer_shard
        key = (slices, placement.replicas)
        known = splits.get(key, Split(*key, 0))
        cut = (len(placement.slice_counts or ()), placement.cut_axes)
        splits[key] = Split(*key, known.tensors + number, known.cuts | {cut})
    del shards[1]
    return Parallelism(
        tuple(sorted(splits.values(), key=lambda split: -split.tensors)),
        tuple(_find_stages(sharding)) if isinstance(sharding, Strategy) else (),
        dict(sorted(shards.items())),
        tensors,
    )


def _find_stages(strategy: Strategy) -> Iterator[Stage]:
    matrices: dict[int, Counter[tuple[int, ...]]] = {}
    for layouts in strategy.layouts.values():
        for layout in layouts:
            found = matrices.setdefault(layout.first_rank, Counter())
            found[layout.device_matrix] += 1
    for rule in strategy.rules.rules if strategy.rules else ():
        for layout in rule.layouts(len(rule.layout.tensor_map)):
            found = matrices.setdefault(layout.first_rank, Counter())
            found[layout.device_matrix] += 1
    for stage in range(strategy.stages):
        first = stage * strategy.stage_ranks
        common = matrices.get(first, Counter()).most_common()
        ranks = range(first, first + strategy.stage_ranks)
        yield Stage(ranks, tuple(matrix for matrix, _ in common))


_DOUBTS = ("strategy", "contradicted", "replica", "undecided_shard", "one_of_several", "empty")
_UNFINISHED = ("unfinished", "nothing_complete", "mixed_steps")


def assess(
    catalog: Catalog, sharding: Sharding | None, entries: Iterable[Entry], found: Diagnostics
) -> Completeness:
    """Return whether all slices of a checkpoint are there, from what was found.

    Parameters
    ----------
    catalog
        The files; empty ones that should hold something are among the damaged.
    sharding
        How tensors are spread over them; None if nothing says it.
    entries
        The tensors whose slices are all there.
    found
        What a command found.
    """
    codes = dict.fromkeys(one.code for one in found)
    doubts = tuple(code for code in codes if code in _DOUBTS)
    replaced = {rank for one in found if one.code == "damaged_replica" for rank in one.ranks}
    lost = [rank for rank in catalog.damaged if rank not in replaced]
    failures = [one for one in found.failures if one not in catalog.damaged.values()]
    wrong = dict.fromkeys(one.code for one in found.errors if one.code not in _DOUBTS)
    wrong.update(dict.fromkeys(code for code in codes if code in _UNFINISHED))
    if lost or (failures and sharding is not None):
        wrong["damaged"] = None
    missing_ranks: Ranks = ()
    if not isinstance(catalog, MergedCatalog):
        missing_ranks = tuple(ranks_without_file(catalog, sharding or Merged()))
    unreadable = tuple(catalog.damaged)
    if "strategy" in codes or sharding is None:
        return Completeness(None, (*doubts, *wrong), missing_ranks, unreadable)
    named = {entry.name for entry in entries}
    missing = tuple(name for name in catalog.holders if name not in named)
    counts = {
        len(ranks)
        for placement in dict.fromkeys(e.placement for e in entries if e.placement.is_listed)
        for ranks in placement.owners
    }
    if "deduplicated" in codes and counts:
        counts = {1}
    return Completeness(
        False if wrong or missing else None if doubts else True,
        (*wrong, *doubts),
        missing_ranks,
        unreadable,
        missing,
        (min(counts), max(counts)) if counts else None,
    )


@dataclass(frozen=True, slots=True)
class RankGroup:
    """Ranks whose files hold tensors of the same names, in files of one format.

    ``nbytes`` has the smallest and the largest size of their files.
    """

    ranks: Ranks
    format: str
    tensors: int
    nbytes: tuple[int, int]


def group_ranks(files: Mapping[int, FileIndex]) -> tuple[RankGroup, ...]:
    """Group the ranks whose files are alike, the largest group first."""
    names: dict[int, tuple[str, ...]] = {}  # by header, which most ranks share
    groups: dict[object, list[int]] = {}
    for rank, file in files.items():
        key = id(file.header)
        if key not in names:
            names[key] = tuple(file.header)
        groups.setdefault((file.format, names[key]), []).append(rank)
    found = []
    for ranks in groups.values():
        first, sizes = files[ranks[0]], [files[rank].nbytes for rank in ranks]
        limits = (min(sizes), max(sizes))
        found.append(RankGroup(tuple(ranks), first.format, len(first.header), limits))
    return tuple(sorted(found, key=lambda group: (-len(group.ranks), group.ranks)))
