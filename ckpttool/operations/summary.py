"""A checkpoint or a strategy at a glance: sizes, parallelism, completeness, folded rows.

A row stands for the tensors that are alike: layers whose names differ only in their numbers, and
the optimizer states of a parameter that are distributed like it.  All of it follows from headers
and layouts; nothing here reads a file.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Literal, TypeVar, get_args

from msgspec import Struct
from msgspec.structs import replace

from ckpttool.model.belonging import WEIGHT, Belongings, Role
from ckpttool.model.dtypes import TEXT
from ckpttool.model.layout import Layout
from ckpttool.model.slicing import BoxSlicing, FullTensor, LayoutSlicing, Whole
from ckpttool.model.strategy import Strategy
from ckpttool.operations.answer import Answer, Count, Some
from ckpttool.wording import MAX_NUMBERS, NUMBER, fold_members

if TYPE_CHECKING:
    from ckpttool.checkpoint.checkpoint import Checkpoint
    from ckpttool.model.catalog import Catalog

# How a distribution is known: a strategy lists the tensor or its parameter; the checkpoint
# describes its slices; a strategy or a description omits it; a merged checkpoint holds it; nothing
# says how the slices on the ranks fit together.
Known = Literal["layout", "described", "unlisted", "full", "stored"]

Ranks = tuple[int, ...]
K = TypeVar("K", bound=Hashable)


class Placement(Struct, frozen=True, dict=True):
    """The distribution of a tensor over ranks; equal if only the first rank of the stage differs.

    Slices are in C order.  ``slice_counts`` is None if they do not form a grid, or are not known.
    """

    known: Known
    slice_counts: tuple[int, ...] | None  # along each axis, optimizer shard included
    owners: tuple[Ranks, ...]  # of each slice, on disk
    others: Ranks = ()  # hold the tensor too, in other stages
    optimizer_shard: int = 1  # slices into which it splits axis 0
    replicas: int = 1  # ranks that should hold each slice, before an optimizer shard
    first_rank: int = 0
    layout: Layout | None = None  # that a strategy gives

    def _kind(self) -> tuple[object, ...]:
        return self.known, self.slice_counts, self.optimizer_shard, self.replicas

    @cached_property
    def local(self) -> tuple[tuple[Ranks, ...], Ranks]:
        """The owners and the others, counted from the first rank."""
        owners = tuple(_shift(ranks, -self.first_rank) for ranks in self.owners)
        return owners, _shift(self.others, -self.first_rank)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Placement):
            return NotImplemented
        return self._kind() == other._kind() and self.local == other.local

    def __hash__(self) -> int:
        return hash(self._kind())

    @property
    def is_sharded(self) -> bool:
        """Whether there are several slices."""
        return len(self.owners) > 1

    @property
    def slices(self) -> int:
        """Number of slices, without the optimizer shard."""
        return len(self.owners) // self.optimizer_shard

    @property
    def is_listed(self) -> bool:
        """Whether a layout or a description gives the slices."""
        return self.known in ("layout", "described")

    @property
    def cuts(self) -> Ranks:
        """Slices along each axis, without the optimizer shard."""
        first, *rest = self.slice_counts or (1,)
        return (first // self.optimizer_shard, *rest)


def _shift(ranks: Iterable[int], by: int) -> Ranks:
    return tuple(rank + by for rank in ranks)


class Entry(Struct, frozen=True):
    """A tensor of a checkpoint or of a strategy, and how it is distributed.

    Without layouts a tensor is an entry for each element type and shape in which ranks store it.
    ``total_nbytes`` and ``elements`` then count all that these ranks store, and else the full
    tensor.
    """

    name: str
    dtype: str  # "" in a strategy
    shape: tuple[int, ...] | None  # of the full tensor, or without layouts as it is stored
    placement: Placement
    nbytes: int = 0  # of the full tensor, or without layouts of one on the first rank
    total_nbytes: int = 0
    elements: int = 0
    source: FullTensor | None = None  # of a resolved checkpoint

    @property
    def is_single_value(self) -> bool:
        """Whether the tensor has one element."""
        return self.shape is not None and math.prod(self.shape) == 1


class Named(Struct, frozen=True):
    """Tensors with equal names, but for the numbers of layers and what stands before.

    ``prefixes`` stand before the name in the names of the tensors: ``("", "adam_m.")`` for the
    parameter and a state of it.
    """

    pattern: str  # the name, with the numbers of equal layers: layers.{0-3}.weight
    prefixes: tuple[str, ...]

    def name(self, common: tuple[str, ...] = ()) -> str:
        """Return the name for people, and the states unless they are ``common`` to all rows."""
        states = ", ".join(filter(None, self.prefixes))
        if len(self.prefixes) == 1:
            return f"{states}{self.pattern}"
        if "" not in self.prefixes:
            return f"{states} of {self.pattern}"
        return self.pattern if self.prefixes == common else f"{self.pattern} + {states}"


class Row(Named, frozen=True):
    """Tensors that are alike: parameters of equal layers, with their states.

    ``entries`` are in the order of ``prefixes`` for the first layer, and so on.
    """

    entries: tuple[Entry, ...]

    @property
    def first(self) -> Entry:
        """The first tensor."""
        return self.entries[0]

    @property
    def parameters(self) -> tuple[Entry, ...]:
        """The parameters without their states; if there are none, their first states."""
        return self.entries[:: len(self.prefixes)]

    @property
    def placements(self) -> tuple[Placement, ...]:
        """The placements on different ranks; several are in different stages."""
        distinct = dict.fromkeys(
            (entry.placement, entry.placement.first_rank) for entry in self.entries
        )
        if len(distinct) == 1:
            return (self.first.placement,)
        return tuple(
            {(*placement.owners, placement.others): placement for placement, _ in distinct}.values()
        )


class Amount(Answer, frozen=True):
    """Tensors of one kind: full tensors, or without layouts all that is stored.

    Attributes
    ----------
    tensors
        Number of tensors.
    parameters
        Number of their elements.
    nbytes
        Their size.
    dtypes
        Number of elements by dtype.
    """

    tensors: Count
    parameters: Count
    nbytes: Count
    dtypes: dict[str, Count]


class Amounts(Struct, frozen=True):
    """The numbers and bytes of full tensors, or without layouts of all that ranks store.

    Scales are weights, and counters and texts are ``other``.
    """

    weights: Amount
    optimizer_state: Amount
    other: Amount
    copies: Amount


class Split(Answer, frozen=True):
    """Parameters with equally many slices and replicas, before an optimizer shard.

    Attributes
    ----------
    slices
        Number of slices.
    replicas
        Ranks that hold each.
    tensors
        Number of parameters.
    """

    slices: Count
    replicas: Count
    tensors: Count


class Stage(Answer, frozen=True):
    """A pipeline stage.

    Attributes
    ----------
    ranks
        Its ranks, ascending.
    device_matrices
        Its device matrices, outermost axis first; that of most sharded tensors first.
    """

    ranks: range
    device_matrices: tuple[tuple[Some, ...], ...]


class OptimizerShard(Answer, frozen=True):
    """Tensors with an optimizer shard, states included.

    Attributes
    ----------
    slices
        Number of parts.
    tensors
        Number of tensors.
    """

    slices: Count
    tensors: Count


class Parallelism(Answer, frozen=True):
    """How the parameters are sharded.

    Attributes
    ----------
    tensor_parallel
        Ways of tensor parallelism; null if the layouts do not say that it is that.
    tensors
        Number of tensors that have a layout, states included.
    splits
        Parameters by their slices, the most frequent first.
    stages
        Pipeline stages; a checkpoint that describes itself has none.
    optimizer_shards
        Tensors with an optimizer shard, by the number of parts.
    """

    tensor_parallel: int | None
    tensors: Count
    splits: tuple[Split, ...]
    stages: tuple[Stage, ...]
    optimizer_shards: tuple[OptimizerShard, ...]


class EqualRanks(Answer, frozen=True):
    """A tensor without a layout, and the ranks with equal samples; equal for tensors in one row.

    Attributes
    ----------
    name
        Its name.
    ranks
        Groups of ranks that hold the same.
    one_value
        Whether all its elements are equal, so that slices of different elements may be.
    sampled
        Whether only a part of it was read.
    """

    name: str
    ranks: tuple[Ranks, ...]
    one_value: bool
    sampled: bool

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, EqualRanks):
            return NotImplemented
        return (self.ranks, self.one_value) == (other.ranks, other.one_value)

    def __hash__(self) -> int:
        return hash((self.ranks, self.one_value))

    def counted_from(self, first: int) -> EqualRanks:
        """Return the same with ranks that are counted from another one."""
        return replace(self, ranks=tuple(_shift(ranks, -first) for ranks in self.ranks))

    @property
    def kind(self) -> Literal["equal", "different", "one value"]:
        """Whether samples of the ranks are equal, different, or one value, which proves nothing."""
        if len(self.ranks) > 1:
            return "different"
        return "one value" if self.one_value else "equal"


class Summary(Struct, frozen=True, dict=True):
    """The tensors of a checkpoint or of a strategy at a glance."""

    entries: tuple[Entry, ...]
    belongings: Belongings
    parallelism: Parallelism | None = None  # None if nothing says it
    equal_ranks: Mapping[str, EqualRanks] = {}  # by name

    @cached_property
    def has_all_samples(self) -> bool:
        """Whether all tensors to sample have samples, not only the first of each row."""
        return self.equal_ranks.keys() == set(names_to_sample(self.entries))

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """All entries, folded."""
        return fold_rows(self)

    @cached_property
    def amounts(self) -> Amounts:
        """How much there is of each kind of tensor."""
        roles: dict[Role, list[Entry]] = {role: [] for role in get_args(Role)}
        for entry in self.entries:
            role = self.belongings.get(entry.name, WEIGHT).role
            roles["counter" if entry.dtype == TEXT else role].append(entry)
        weights = [*roles["weight"], *roles["scale"]]
        kinds = weights, roles["state"], roles["counter"], roles["copy"]
        return Amounts(*map(_add_up, kinds))


def _add_up(entries: Sequence[Entry]) -> Amount:
    dtypes: Counter[str] = Counter()
    for entry in entries:
        dtypes[entry.dtype] += entry.elements
    nbytes = sum(entry.total_nbytes for entry in entries)
    names = {entry.name for entry in entries}
    return Amount(len(names), dtypes.total(), nbytes, dict(dtypes.most_common()))


# ------------------------------------------------------------------------------------------ entries


def entries_of_tensors(checkpoint: Checkpoint) -> Iterator[Entry]:
    """Yield the full tensors of a checkpoint, with the ranks that hold each slice on disk.

    Without redundancy, one rank of each slice has it on disk; the ranks are then those of the
    layout, with or without a file.
    """
    placements: dict[object, Placement] = {}  # thousands of tensors have few distributions
    for source in checkpoint.tensors:
        meta, holders = source.meta, checkpoint.catalog.holders[source.meta.name]
        key = source.slicing.distribution_key, source.has_layout, id(holders)
        if key not in placements:
            placements[key] = _place(source, holders, checkpoint.is_deduplicated)
        what = meta.name, meta.dtype, meta.header_shape, placements[key]
        elements = 0 if meta.text is not None else math.prod(meta.header_shape)
        yield Entry(*what, meta.nbytes, meta.nbytes, elements, source)


def _place(source: FullTensor, holders: Ranks, is_deduplicated: bool) -> Placement:
    """Return the placement of a tensor that the ranks in ``holders`` have."""
    slicing = source.slicing
    if not source.has_layout:
        known: Known = "described" if isinstance(source.known_by, Whole) else "unlisted"
        return Placement(known, (1,) * len(source.meta.shape), (holders,), replicas=len(holders))
    slices = [part.owners if is_deduplicated else part.holders for part in slicing.holdings()]
    where = tuple(slices), tuple(sorted({*holders}.difference(*slices)))
    if isinstance(slicing, LayoutSlicing):
        return _place_layout(slicing.layout, *where)
    assert isinstance(slicing, BoxSlicing)
    return Placement(
        *("described", slicing.slice_counts if slicing.is_grid else None, *where),
        replicas=min(map(len, slices), default=0),
        first_rank=min(chain(*slices), default=0),
    )


def _place_layout(layout: Layout, owners: tuple[Ranks, ...], others: Ranks) -> Placement:
    numbers = layout.optimizer_shard, layout.replicas, layout.first_rank
    return Placement("layout", layout.slice_counts, owners, others, *numbers, layout)


def entries_of_layouts(layouts: Mapping[str, Sequence[Layout]]) -> Iterator[Entry]:
    """Yield the parameters of a strategy: on the ranks of their first stage and of the others.

    MindSpore writes them in no order, so they are sorted by name, numbers by value.
    """
    placements: dict[Sequence[Layout], Placement] = {}
    for name in sorted(layouts, key=lambda name: NUMBER.sub(lambda m: m[0].zfill(9), name)):
        of_stages = layouts[name]
        first, *rest = of_stages
        if of_stages not in placements:
            further = tuple(chain.from_iterable(layout.ranks for layout in rest))
            placements[of_stages] = _place_layout(first, tuple(first.slice_owners()), further)
        yield Entry(name, "", first.full_shape, placements[of_stages])


def layouts_of_rules(strategy: Strategy) -> dict[str, tuple[Layout, ...]]:
    """Return pattern to layouts for the rules of a hand-written strategy."""
    rules = strategy.rules.rules if strategy.rules else ()
    return {rule.pattern: rule.layouts(len(rule.layout.tensor_map)) for rule in rules}


def entries_of_files(catalog: Catalog) -> Iterator[Entry]:
    """Yield the tensors of files without layouts: one for each element type and shape."""
    is_merged = catalog.is_merged
    kinds: dict[str, dict[tuple[str, tuple[int, ...]], dict[Ranks, int]]] = {}
    for ranks, header in catalog.headers.items():
        for name, tensor in header.items():
            meta = tensor.meta
            stored = kinds.setdefault(name, {}).setdefault((meta.dtype, meta.header_shape), {})
            stored[ranks] = meta.nbytes
    placements: dict[tuple[Ranks, ...], Placement] = {}  # thousands of tensors have few
    for name, by_kind in kinds.items():
        for (dtype, shape), stored in by_kind.items():
            groups = (tuple(catalog.files),) if is_merged else tuple(stored)
            if groups not in placements:
                holders = tuple(sorted(chain(*groups)))
                known: Known = "full" if is_merged else "stored"
                placements[groups] = Placement(known, None, (holders,), first_rank=holders[0])
            first, placement = min(stored.items())[1], placements[groups]
            nbytes = sum(len(ranks) * size for ranks, size in stored.items())
            elements = 0 if dtype == TEXT else math.prod(shape) * sum(map(len, stored))
            yield Entry(name, dtype, shape, placement, first, nbytes, elements)


def names_to_sample(entries: Iterable[Entry]) -> tuple[str, ...]:
    """Return the names on several ranks without a layout: only contents show if they differ."""
    holders: Counter[str] = Counter()
    for entry in entries:
        is_whole = entry.source is not None and isinstance(entry.source.known_by, Whole)
        if is_whole or entry.placement.known in ("unlisted", "stored"):
            holders[entry.name] += len(entry.placement.owners[0])
    return tuple(name for name, number in holders.items() if number > 1)


_MAX_UNEVEN = 4  # slices of different numbers of rows that are listed


def sharded_text(placement: Placement) -> str:
    """Return along which axes a tensor is sharded, and into how many slices or how many rows."""
    if placement.known == "unlisted":
        return "not listed"
    if not placement.is_sharded:
        return "not sharded"
    if placement.slice_counts is None:
        return f"{len(placement.owners)} boxes"
    names = ("rows", "columns") if len(placement.cuts) == 2 else None
    parts = [
        f"{names[axis] if names else f'axis {axis}'} / {slices}"
        for axis, slices in enumerate(placement.cuts)
        if slices > 1
    ]
    rows = () if placement.layout is None else placement.layout.rows
    if 0 < len(rows) <= _MAX_UNEVEN:
        parts[0] = f"rows / {' + '.join(map(str, rows))}"
    shard = placement.optimizer_shard
    return ", ".join([*parts, f"opt / {shard}"] if shard > 1 else parts)


# --------------------------------------------------------------------------------------------- rows


def fold_rows(
    summary: Summary, alike: Callable[[Entry], Hashable] = lambda _: None
) -> tuple[Row, ...]:
    """Fold equal layers into one row, and optimizer states into the row of their parameter.

    The tensors of a row also have equal values of ``alike``.

    Examples
    --------
    >>> full = Placement("layout", (1,), ((0, 1),))
    >>> names = ("layers.0.weight", "layers.1.weight", "adam_m.layers.0.weight")
    >>> entries = tuple(Entry(name, "Float32", (4,), full) for name in names)
    >>> from ckpttool.model.belonging import find_belongings
    >>> summary = Summary(entries, find_belongings(names, {}))
    >>> [(row.pattern, row.prefixes) for row in fold_rows(summary)]
    [('layers.0.weight', ('', 'adam_m.')), ('layers.1.weight', ('',))]
    """
    alike_entries: dict[tuple[str, int, tuple[object, ...]], list[Entry]] = {}
    samples = summary.equal_ranks if summary.has_all_samples else {}
    for entry in summary.entries:
        parameter = summary.belongings.get(entry.name, WEIGHT).of or entry.name
        base = parameter if entry.name.endswith(parameter) else entry.name
        first = entry.placement.first_rank
        equal = samples[entry.name].counted_from(first) if entry.name in samples else None
        # Those of stages are alike; single values are listed by their ranks.
        place = first if entry.placement.known == "stored" and entry.is_single_value else None
        how: tuple[object, ...] = (entry.shape, entry.placement, place, equal, alike(entry))
        alike_entries.setdefault((base, entry.placement.first_rank, how), []).append(entry)
    layers: dict[object, dict[str, Row]] = {}
    for (base, _, how), members in alike_entries.items():
        members.sort(key=lambda entry: entry.name.removesuffix(base))  # the parameter first
        row = Row(base, tuple(entry.name.removesuffix(base) for entry in members), tuple(members))
        dtypes = tuple(entry.dtype for entry in members)
        kind = (NUMBER.sub("#", base, MAX_NUMBERS), row.prefixes, dtypes, how)
        layers.setdefault(kind, {})[base] = row
    return tuple(
        Row(pattern, rows[names[0]].prefixes, tuple(chain(*(rows[it].entries for it in names))))
        for rows in layers.values()
        for pattern, names in fold_members(dict.fromkeys(rows, ""))
    )


# -------------------------------------------------------------------------------------- parallelism


def find_parallelism(
    entries: Iterable[Entry], belongings: Belongings, sharding: Strategy
) -> Parallelism:
    """Return how tensors with layouts are distributed, in numbers.

    It is tensor parallelism if all sharded parameters are split over the same groups of ranks.
    Some matrices must be split along rows, and others along columns.  Other cuts may be of another
    kind: of experts, or of an embedding table.
    """
    with_layout = [entry for entry in entries if entry.placement.is_listed]
    parameters = [entry for entry in with_layout if belongings.get(entry.name, WEIGHT).of is None]
    splits = Counter((entry.placement.slices, entry.placement.replicas) for entry in parameters)
    sharded = [entry.placement for entry in parameters if entry.placement.slices > 1]
    cuts = {placement.cuts for placement in sharded}
    matrices = {(cut[0] > 1, cut[1] > 1) for cut in cuts if len(cut) == 2}
    # Groups of ranks with equal slices, before an optimizer shard.
    layouts = {placement.layout for placement in sharded}
    grids = {(layout.device_matrix, layout.tensor_map) for layout in layouts if layout is not None}
    groups = {frozenset(Layout(*grid).slice_owners()) for grid in grids}
    groups |= {frozenset(placement.local[0]) for placement in sharded if placement.layout is None}
    is_tensor_parallel = (
        len(groups) == 1 and matrices == {(True, False), (False, True)} and max(map(len, cuts)) == 2
    )
    shards = Counter(entry.placement.optimizer_shard for entry in with_layout)
    layouts_of = chain(*sharding.layouts.values(), *layouts_of_rules(sharding).values())
    return Parallelism(
        len(groups.pop()) if is_tensor_parallel else None,
        len(with_layout),
        tuple(Split(*key, number) for key, number in splits.most_common()),
        tuple(find_stages(sharding, layouts_of)) if sharding.layouts or sharding.rules else (),
        tuple(OptimizerShard(*item) for item in sorted(shards.items()) if item[0] > 1),
    )


def find_stages(strategy: Strategy, layouts: Iterable[Layout]) -> Iterator[Stage]:
    """Yield the stages, with their device matrices: those of most sharded tensors first.

    Layouts of other ranks than those of a stage do not count.
    """
    counts: dict[range, dict[tuple[int, ...], list[int]]] = {
        ranks: {} for ranks in map(strategy.ranks_of, range(strategy.stages))
    }
    for layout in layouts:
        if layout.ranks in counts:
            number = counts[layout.ranks].setdefault(layout.device_matrix, [0, 0, 0])
            slices = max(layout.slice_counts, default=1)
            number[0] += slices > layout.optimizer_shard
            number[1] += slices > 1
            number[2] += 1
    for ranks, matrices in counts.items():
        yield Stage(ranks, tuple(sorted(matrices, key=matrices.__getitem__, reverse=True)))
