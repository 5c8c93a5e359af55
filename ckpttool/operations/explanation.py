"""The holdings of each rank of a checkpoint or of a target: slices, place, ranks with the same.

The answer is made of the distributions of tensors.  If a target is impossible, the errors are those
of a conversion.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from ckpttool.checkpoint.checkpoint import Checkpoint, ResolveOptions
from ckpttool.checkpoint.presence import ranks_without_file
from ckpttool.concurrency import InlineExecutor
from ckpttool.model.belonging import WEIGHT, Belongings, Role, count_roles
from ckpttool.model.layout import Layout
from ckpttool.model.slicing import Holding
from ckpttool.operations.answer import (
    Answer,
    Box,
    Count,
    DescribedLayout,
    Document,
    Each,
    Reported,
    Some,
    layout_keys,
    notes_and_problems,
)
from ckpttool.operations.describe import refuses_layouts
from ckpttool.operations.distribution import (
    Distribution,
    Known,
    Taken,
    distribute,
    distribute_target,
    full_meta,
)
from ckpttool.operations.plans import PlannedSource, plan_reading
from ckpttool.operations.summary import (
    Entry,
    Placement,
    Row,
    Stage,
    Summary,
    find_stages,
    fold_rows,
)
from ckpttool.planning.targets import layouts_in_target
from ckpttool.problems import Diagnostic, Diagnostics, PlanError
from ckpttool.transaction.resume import OutputOptions
from ckpttool.wording import count, format_numbers, format_ranks, format_shape

if TYPE_CHECKING:
    from ckpttool.model.catalog import Catalog
    from ckpttool.model.plan import Transfer
    from ckpttool.model.strategy import Strategy
    from ckpttool.model.tensors import TensorMeta


Matrix = tuple[int, ...]  # a device matrix

MAX_SLICES = 4  # of a tensor whose ranks are in a table of a notebook


class RankGroup(Answer, frozen=True):
    """Ranks that hold, or should hold, the same slices of all tensors.

    Attributes
    ----------
    ranks
        The ranks, ascending, in one stage.
    stage
        The number of their stage; null without stages.
    coordinate
        Their position along each axis of the first device matrix of the stage; null where they
        differ.
    tensors
        Number of tensors that each of them holds; if none has a file, that each should hold.
    nbytes
        Bytes of these.
    sources
        In a target, the source ranks that each of them reads.
    lost
        Those of them that have no file that can be read.
    """

    ranks: tuple[Count, ...]
    stage: Count | None
    coordinate: tuple[Count | None, ...]
    tensors: Count
    nbytes: Count
    sources: tuple[Count, ...]
    lost: tuple[Count, ...]


class Place(Answer, frozen=True):
    """The place of a rank in a device matrix.

    Attributes
    ----------
    device_matrix
        The device matrix, outermost axis first.
    coordinate
        Position along each of its axes.
    """

    device_matrix: tuple[Some, ...]
    coordinate: tuple[Count, ...]


class ExplainedRank(Answer, frozen=True):
    """The explained rank.

    Attributes
    ----------
    rank
        Its number.
    files
        Its files; none if none can be read, and in a target.
    coordinates
        Where it lies in each device matrix.
    """

    rank: Count
    files: tuple[str, ...]
    coordinates: tuple[Place, ...]


class ExplainedTensor(Answer, frozen=True):
    """A tensor.

    Attributes
    ----------
    name
        Its name.
    dtype
        Its element type.
    nbytes
        Bytes of the full tensor.
    shape
        The full shape.
    distribution
        How it is distributed: an index in distributions.
    role
        What it is: a weight, or the state, scale, copy or counter of something.
    of
        The parameter that it belongs to, if any.
    """

    name: str
    dtype: str
    nbytes: Count
    shape: tuple[Count, ...]
    distribution: Count
    role: Role
    of: str | None = None


class TakenBox(Answer, frozen=True):
    """Elements of a target slice, and the source rank that has them.

    Attributes
    ----------
    rank
        The source rank; of a merged checkpoint, the number of the file.
    start
        The first index in the full tensor.
    shape
        Elements along each axis.
    src_start
        The first index in the slice of the source rank.
    """

    rank: Count
    start: tuple[Count, ...]
    shape: tuple[Count, ...]
    src_start: tuple[Count, ...]


class ExplainedSlice(Answer, frozen=True):
    """A slice, and who holds it.

    Attributes
    ----------
    regions
        Its elements; several boxes only in a field-sliced embedding.
    ranks
        The ranks that should hold it, ascending.
    layout
        The layout of their stage: an index in layouts; null without one.
    stored
        In a source, the ranks that have it on disk.
    taken
        In a target, what is read from whom.
    """

    regions: tuple[Box, ...]
    ranks: tuple[Count, ...]
    layout: Count | None
    stored: tuple[Count, ...] | None = None
    taken: tuple[TakenBox, ...] | None = None


class ExplainedDistribution(Answer, frozen=True, kw_only=True):
    """How full tensors are distributed over ranks; those of equal distribution share it.

    Attributes
    ----------
    known_by
        listed: a strategy lists it, or the checkpoint describes it; follows: sharded like its
        parameter; whole: files hold it in full; unlisted: nothing says how.
    listed_optimizer_shard
        The optimizer shard that the strategy lists, if the slices have another.
    slices
        The slices, stage by stage in C order; of a rank, only those that it holds.
    """

    known_by: Known
    listed_optimizer_shard: Some | None = None
    slices: tuple[ExplainedSlice, ...]


class Explanation(Document, frozen=True, kw_only=True, dict=True):
    """The JSON document of explain; each distribution and each layout stands there once.

    Attributes
    ----------
    path
        The source.
    step
        The step that is read; null if the names of the files have none.
    target
        The files of the target strategy; null if the source is explained.
    ranks
        All ranks of the source, or of the target.
    stages
        The pipeline stages; none without layouts. The device matrix of most sharded tensors is
        first.
    rank
        The rank that --rank names; null for all.
    groups
        The ranks that hold the same; with --rank only its group.
    tensors
        The tensors; with --rank those that it holds, with --tensor those with such a name.
    distributions
        The distributions of these tensors.
    layouts
        The layouts of these distributions.
    absent
        Tensors that the strategy lists for these ranks, and that no file holds.
    notes
        Notes and warnings.
    problems
        What is wrong.
    parts
        What all of this is made of.
    """

    schema = 2
    aside = frozenset({"parts"})

    path: str
    step: str | None
    target: tuple[str, ...] | None
    ranks: Sequence[Count]
    stages: tuple[Stage, ...]
    rank: ExplainedRank | None
    groups: tuple[RankGroup, ...]
    tensors: Sequence[ExplainedTensor]
    distributions: Sequence[ExplainedDistribution]
    layouts: tuple[DescribedLayout, ...]
    absent: tuple[str, ...]
    notes: Reported
    problems: Reported
    parts: Explained

    def _texts(self) -> Iterator[str]:
        yield self.parts.origin
        yield format_ranks(self.ranks if self.rank is None else [self.rank.rank])
        yield count(len(self.tensors), "tensor")

    def _rows(self) -> Iterator[Sequence[str]]:
        yield ("tensors", "full shape", "slices", "ranks of each slice")
        for row in self.parts.rows:
            slices = self.parts.tensors[row.first.name].slices
            ranks = [format_numbers(part.owners) for part in slices]
            more = f" and {len(ranks) - MAX_SLICES} more" if len(ranks) > MAX_SLICES else ""
            states = f" + {', '.join(filter(None, row.prefixes))}" if row.prefixes[1:] else ""
            yield (
                f"{row.pattern}{states}",
                format_shape(row.first.shape or ()),
                str(len(slices)),
                " | ".join(ranks[:MAX_SLICES]) + more,
            )


class Explained(Struct, frozen=True, dict=True):
    """The parts of an explanation.

    Attributes
    ----------
    catalog
        The files of the source.
    target
        The strategy of the target; None for the source itself.
    found
        What is wrong or noted.
    ranks
        All ranks.
    stages
        The stages; none without layouts.
    patterns
        Of the names of tensors; none for all tensors.
    tensors
        Name to distribution.
    metas
        Name to full tensor; of one without a full shape, a slice.
    belongings
        To what they belong.
    absent
        Tensors that the strategy lists for these ranks and no file holds, and their layouts.
    is_deduplicated
        Whether each slice is on one of its ranks, as the checkpoint was saved.
    rank, whole
        The explained rank, and what the explanation of all ranks is made of; None for that itself.
    """

    catalog: Catalog
    target: Strategy | None
    found: Diagnostics
    ranks: Sequence[int]
    stages: tuple[Stage, ...]
    patterns: Collection[str]
    tensors: Mapping[str, Distribution] = {}
    metas: Mapping[str, TensorMeta] = {}
    belongings: Belongings = {}
    absent: Mapping[str, Sequence[Layout]] = {}
    is_deduplicated: bool = False
    rank: int | None = None
    whole: Explained | None = None

    @property
    def origin(self) -> str:
        """The source or the target that is explained."""
        return self.catalog.root if self.target is None else self.target.origin

    def describe(self) -> Explanation:
        """Return the answer."""
        distributions = {
            how: number for number, how in enumerate(dict.fromkeys(self.tensors.values()))
        }
        layouts = dict.fromkeys(layout for how in distributions for layout in how.layouts)
        numbers = {layout: number for number, layout in enumerate(layouts)}

        def describe_tensor(name: str) -> ExplainedTensor:
            meta, belonging = self.metas[name], self.belongings.get(name, WEIGHT)
            distribution = distributions[self.tensors[name]]
            return ExplainedTensor(
                *(name, meta.dtype, meta.nbytes, meta.header_shape),
                *(distribution, belonging.role, belonging.of),
            )

        def describe_slice(how: Distribution, part: Holding) -> ExplainedSlice:
            return ExplainedSlice(
                tuple(Box(region.start, region.shape) for region in part.regions),
                part.owners,
                None if part.layout is None else numbers[part.layout],
                part.holders if self.target is None else None,
                None if self.target is None else tuple(map(_describe_taken, how.taken[part])),
            )

        def describe_distribution(how: Distribution) -> ExplainedDistribution:
            slices = tuple(describe_slice(how, part) for part in how.slices)
            return ExplainedDistribution(
                known_by=how.known_by, listed_optimizer_shard=how.listed_shard, slices=slices
            )

        rank = None
        if self.rank is not None:
            file = self.catalog.files.get(self.rank) if self.target is None else None
            files = () if file is None else tuple(stored.path for stored in file.files)
            rank = ExplainedRank(
                self.rank, files, tuple(Place(*at) for at in self.matrices.items())
            )
        return Explanation(
            path=self.catalog.root,
            step=self.catalog.step,
            target=None if self.target is None else self.target.files,
            ranks=self.ranks,
            stages=self.stages,
            rank=rank,
            groups=self.groups,
            tensors=Each(describe_tensor, tuple(self.tensors)),
            distributions=Each(describe_distribution, tuple(distributions)),
            layouts=tuple(DescribedLayout(it.stage, **layout_keys(it)) for it in layouts),
            absent=tuple(self.absent),
            **notes_and_problems(self.found),
            parts=self,
        )

    def of_rank(self, rank: int) -> Explained:
        """Return the parts that a rank holds.

        Raises
        ------
        PlanError
            The source or the target lacks this rank.
        """
        where = self.origin
        if self.is_of_files:
            message, hint = "a merged checkpoint has no ranks", "-d STRATEGY, for those of a target"
            raise PlanError([Diagnostic("options", message, hint=hint, where=where)])
        if rank not in self.ranks:
            what = "the ranks are" if len(self.ranks) > 1 else "the only one is"
            numbers = format_ranks(self.ranks, most=6).partition(" ")[2]
            message, hint = f"there is no rank {rank}", f"one of {numbers}"
            facts = f"{what} {numbers}"
            raise PlanError([Diagnostic("options", message, hint, facts=facts, where=where)])
        parts = {how: how.of_rank(rank) for how in {*self.tensors.values()}}
        return replace(
            self,
            tensors={name: parts[how] for name, how in self.tensors.items() if parts[how].slices},
            absent={
                name: layouts
                for name, layouts in self.absent.items()
                if any(rank in layout.ranks for layout in layouts)
            },
            rank=rank,
            whole=self,
        )

    @property
    def is_of_files(self) -> bool:
        """Whether the ranks are the files of a merged checkpoint, by number."""
        return self.target is None and self.catalog.is_merged

    @cached_property
    def lost(self) -> frozenset[int]:
        """The ranks that have no file that can be read; none of a target."""
        has_files = self.target is None and not self.catalog.is_merged
        return frozenset(self.ranks if has_files else ()).difference(self.catalog.files)

    @property
    def nbytes(self) -> int:
        """Size of the tensors; with a rank, of its slices."""
        if self.rank is None:
            return sum(self.metas[name].nbytes for name in self.tensors)
        sizes = {how: [part.size for part in how.slices] for how in {*self.tensors.values()}}
        return sum(
            _nbytes(size, how, self.metas[name])
            for name, how in self.tensors.items()
            for size in sizes[how]
        )

    @property
    def roles(self) -> Mapping[Role, int]:
        """How many of the tensors are weights, states and so on."""
        return count_roles(self.tensors, self.belongings)

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """The tensors, folded."""
        is_overview = self.rank is None and not self.patterns
        return _fold(
            *(self.tensors, self.metas, self.belongings),
            over_stages=is_overview,
            by_stored=not self.is_deduplicated,
            over_files=self.is_of_files and is_overview,
        )

    @cached_property
    def groups(self) -> tuple[RankGroup, ...]:
        """The ranks that hold the same; only that of the explained rank."""
        if self.whole is not None:
            return tuple(group for group in self.whole.groups if self.rank in group.ranks)
        made = _group(self.tensors, self.metas, self.ranks, self.stages, self.lost)
        return tuple(made)

    @cached_property
    def names_of(self) -> Mapping[tuple[int, Matrix], tuple[str, ...]]:
        """Number of a stage and device matrix to the tensors that have it, also absent ones."""
        names: dict[tuple[int, Matrix], dict[str, None]] = {}
        for name, layout in self._layouts():
            names.setdefault((layout.stage, layout.device_matrix), {})[name] = None
        return {key: tuple(having) for key, having in names.items()}

    @cached_property
    def matrices(self) -> Mapping[Matrix, tuple[int, ...]]:
        """The coordinate of the explained rank in each device matrix; none for all ranks."""
        rank = self.rank
        of_rank = () if rank is None else dict.fromkeys(layout for _, layout in self._layouts())
        return {
            layout.device_matrix: layout.coordinate(rank) for layout in of_rank if rank is not None
        }

    def _layouts(self) -> Iterator[tuple[str, Layout]]:
        layouts_of = ((name, how.layouts) for name, how in self.tensors.items())
        for name, layouts in chain(layouts_of, self.absent.items()):
            yield from ((name, layout) for layout in layouts if self.rank in (None, *layout.ranks))


def explain(
    catalog: Catalog,
    strategy: Strategy | None = None,
    target: Strategy | None = None,
    *,
    rank: int | None = None,
    options: ResolveOptions = ResolveOptions(),
    executor: Executor | None = None,
) -> Explanation:
    """Explain what the ranks of a checkpoint hold, or what those of a target would.

    Parameters
    ----------
    catalog, strategy
        The source, from `scan`, and its layouts; None for a checkpoint that holds full tensors or
        describes itself.
    target
        Layouts of a target, whose ranks are explained in place of those of the source.
    rank
        Explain only this rank.
    options
        How the source is resolved, and which tensors are explained.
    executor
        Reads contents where they decide; by default the caller's own thread.

    Raises
    ------
    FormatError, StrategyError, PlanError
        The source cannot be explained, the rank does not exist, or a pattern matches no name.
    """
    read = plan_reading(catalog, strategy, target, None, options, executor or InlineExecutor())
    diagnostics, checkpoint = read.sight.found, read.sight.checkpoint
    is_mistaken = any(it.code == "options" for it in diagnostics)
    unread = checkpoint is None or read.sight.contents.unread
    if unread or is_mistaken or refuses_layouts(diagnostics):
        diagnostics.raise_if_errors()
    assert checkpoint is not None, "else there is an error"
    if target is None:
        whole = _explain_source(read.sight.catalog, strategy, checkpoint, diagnostics)
    else:
        whole = _explain_target(catalog, target, options.tensors.include, read, checkpoint)
    return (whole if rank is None else whole.of_rank(rank)).describe()


def _explain_source(
    catalog: Catalog, strategy: Strategy | None, checkpoint: Checkpoint, diagnostics: Diagnostics
) -> Explained:
    """Explain what the ranks of a checkpoint hold; ``strategy`` is as it was read."""
    layouts = checkpoint.strategy.layouts
    tensors = distribute(checkpoint, strategy)
    owners = (part.owners for each in {*tensors.values()} for part in each.slices)
    ranks = {*catalog.files, *catalog.damaged, *chain(*owners)}
    ranks.update(ranks_without_file(checkpoint.catalog, checkpoint.strategy))
    absent = {name: layouts[name] for name in layouts if name in checkpoint.wanted - tensors.keys()}
    of_tensors = chain(*(how.layouts for how in tensors.values()), *absent.values())
    return Explained(
        *(catalog, None, diagnostics, sorted(ranks)),
        _find_stages(checkpoint.strategy, of_tensors),
        checkpoint.options.tensors.include,
        tensors,
        {tensor.name: full_meta(tensor) for tensor in checkpoint.records},
        checkpoint.belongings,
        absent,
        checkpoint.is_deduplicated,
    )


def _describe_taken(piece: Taken) -> TakenBox:
    return TakenBox(piece.rank, piece.region.start, piece.region.shape, piece.src.start)


# ------------------------------------------------------------------------------ ranks, stages, rows


def _find_stages(strategy: Strategy, layouts: Iterable[Layout]) -> tuple[Stage, ...]:
    stages = tuple(find_stages(strategy, layouts))
    return stages if any(stage.device_matrices for stage in stages) else ()


def _nbytes(size: int, how: Distribution, meta: TensorMeta) -> int:
    elements = math.prod(how.shape)
    return meta.nbytes * size // elements if elements else meta.nbytes


def _group(
    tensors: Mapping[str, Distribution],
    metas: Mapping[str, TensorMeta],
    ranks: Sequence[int],
    stages: Sequence[Stage],
    lost: Collection[int],
) -> Iterator[RankGroup]:
    """Yield the ranks that should hold the same slices of all tensors that are known to be slices.

    Tensors that each rank has for itself, such as a random state, do not distinguish groups.  Those
    of a ``lost`` rank are not known: it is in the first group with the same slices.
    """
    names: dict[Distribution, list[str]] = {}
    for name, how in tensors.items():
        names.setdefault(how, []).append(name)
    slices_of: dict[int, list[tuple[int, int]]] = {rank: [] for rank in ranks}
    amounts = dict.fromkeys(ranks, (0, 0))
    sources: dict[int, set[int]] = {rank: set() for rank in ranks}
    for number, (how, having) in enumerate(names.items()):
        counted: set[int] = set()  # a rank may hold several slices of a tensor
        for at, part in enumerate(how.slices):
            size, taken = part.size, how.taken.get(part, ())
            nbytes = sum(_nbytes(size, how, metas[name]) for name in having)
            for rank in part.owners:
                tensors_of, nbytes_of = amounts[rank]
                new = 0 if rank in counted else len(having)
                amounts[rank] = tensors_of + new, nbytes_of + nbytes
                sources[rank].update(piece.rank for piece in taken)
                if how.known_by != "unlisted":
                    slices_of[rank].append((number, at))
            counted.update(part.owners)
    stage_of = {rank: stage for stage in stages for rank in stage.ranks}
    groups: dict[Hashable, list[int]] = {}
    first: dict[Hashable, list[int]] = {}
    for rank in sorted(ranks, key=lost.__contains__):  # those without a file come last
        stage = stage_of.get(rank)
        slices = tuple(slices_of[rank]), stage and stage.ranks, frozenset(sources[rank])
        if rank in lost and slices in first:
            first[slices].append(rank)
            continue
        members = groups.setdefault((slices, amounts[rank]), [])
        members.append(rank)
        first.setdefault(slices, members)
    for members in sorted(groups.values(), key=min):
        amount = amounts[members[0]]  # of a rank with a file, if one has
        members.sort()
        stage, coordinate = stage_of.get(members[0]), tuple[int | None, ...]()
        if stage is not None and stage.device_matrices:
            layout = Layout(stage.device_matrices[0], (), first_rank=stage.ranks[0])
            axes = zip(*map(layout.coordinate, members), strict=True)
            coordinate = tuple(at[0] if len({*at}) == 1 else None for at in axes)
        yield RankGroup(
            tuple(members),
            None if stage is None else stage.ranks[0] // len(stage.ranks),
            coordinate,
            *amount,
            tuple(sorted(sources[members[0]])),
            tuple(filter(lost.__contains__, members)),
        )


def _fold(
    tensors: Mapping[str, Distribution],
    metas: Mapping[str, TensorMeta],
    belongings: Belongings,
    over_stages: bool,
    by_stored: bool,
    over_files: bool,
) -> tuple[Row, ...]:
    """Fold the tensors that are distributed alike: over ranks of several stages, or of one.

    With ``by_stored`` also the ranks that have a slice on disk are the same.  With ``over_files``
    it does not count which files of a merged checkpoint hold them.
    """
    numbers: dict[Hashable, int] = {}  # of the kinds, which have a slice for each rank
    kinds: dict[Distribution, int] = {}
    placements: dict[Distribution, Placement] = {}
    for how in dict.fromkeys(tensors.values()):
        first = how.layouts[0].first_rank if how.layouts else 0
        where: tuple[object, ...] = tuple(replace(each, first_rank=0) for each in how.layouts)
        if not over_stages:
            where = how.layouts, tuple(part.holders for part in how.slices if by_stored)
        regions = tuple((part.regions, how.taken.get(part)) for part in how.slices)
        kind = how.known_by == "unlisted", where, regions, how.listed_shard
        kinds[how] = numbers.setdefault(kind, len(numbers))
        owners = () if over_files else tuple(part.owners for part in how.slices)
        placements[how] = Placement("layout", None, owners, first_rank=first)
    entries = tuple(
        Entry(name, metas[name].dtype, metas[name].header_shape, placements[how])
        for name, how in tensors.items()
    )
    return fold_rows(Summary(entries, belongings), lambda entry: kinds[tensors[entry.name]])


# ----------------------------------------------------------------------------------------- a target


def _explain_target(
    catalog: Catalog,
    target: Strategy,
    patterns: Collection[str],
    read: PlannedSource,
    checkpoint: Checkpoint,
) -> Explained:
    """Explain what the ranks of a target would hold, and read."""
    plan = read.plan
    if plan is None:
        read.sight.found.raise_if_errors()
    assert plan is not None, "else there is an error"
    layouts = layouts_in_target(checkpoint, read.target, OutputOptions())
    stages = _find_stages(target, chain(*(of_tensor for _, of_tensor in layouts)))
    by_name: dict[str, list[Transfer]] = {}
    for transfer in plan.transfers:
        by_name.setdefault(transfer.name, []).append(transfer)
    metas = {name: of_name[0].meta for name, of_name in by_name.items()}
    belongings = checkpoint.belongings
    placed = distribute_target(plan, by_name)
    return Explained(
        *(catalog, target, read.sight.found, target.ranks, stages, patterns),
        *(placed, metas, belongings),
    )
