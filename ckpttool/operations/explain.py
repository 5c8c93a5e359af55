"""What each rank of a checkpoint, or of a target, holds: its slices, its place, who has the same.

The answer is made of the distributions of tensors; for a target that cannot be, of what is in the
way.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING

from ckpttool.checkpoint.checkpoint import ResolveOptions
from ckpttool.checkpoint.presence import ranks_without_file
from ckpttool.concurrency import InlineExecutor
from ckpttool.model.layout import Layout
from ckpttool.model.names import drop_unlike_shapes, match_states
from ckpttool.operations.describe import refuses_layouts
from ckpttool.operations.distribution import (
    Distribution,
    Ranks,
    Slice,
    distribute,
    distribute_target,
    full_meta,
)
from ckpttool.operations.obstacles import Matrix, Obstacle, find_obstacles
from ckpttool.operations.plans import Reading, try_reading
from ckpttool.operations.summary import (
    Entry,
    Placement,
    Row,
    Stage,
    Summary,
    find_stages,
    fold_rows,
)
from ckpttool.problems import Diagnostic, Diagnostics, PlanError
from ckpttool.wording import Brief, count, format_numbers, format_ranks

if TYPE_CHECKING:
    from ckpttool.model.catalog import Catalog
    from ckpttool.model.plan import Transfer
    from ckpttool.model.strategy import Strategy
    from ckpttool.model.tensors import TensorMeta


@dataclass(frozen=True, slots=True)
class RankGroup:
    """Ranks that hold, or should hold, the same slices of all tensors.

    Attributes
    ----------
    ranks
        The ranks, ascending, in one stage.
    lost
        Those of them that have no file that can be read.
    stage
        The number of their stage; None without stages.
    coordinate
        Position along each device axis, outermost first; None where the ranks differ.
    tensors, nbytes
        What each of them with a file holds; if none has, what each should hold.
    sources
        In a target: the source ranks that each of them reads.
    """

    ranks: Ranks
    stage: int | None
    coordinate: tuple[int | None, ...]
    tensors: int
    nbytes: int
    sources: Ranks = ()
    lost: Ranks = ()


@dataclass(frozen=True, slots=True, repr=False)
class Explanation(Brief):
    """What the ranks of a checkpoint, or of a target, hold.

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
        The stages, with the device matrix of most sharded tensors first, if these tensors have one;
        none without layouts.
    tensors
        Name to distribution.  With a rank: only its slices, of the tensors that it holds.
    metas
        Name to full tensor; of one without a full shape, a slice.
    rows
        The same tensors, folded.
    patterns
        What the names of these tensors match; none for all tensors.
    rank, matrices
        The explained rank, and its coordinate in each device matrix; None and none for all ranks.
    names_of
        Number of a stage and device matrix to the tensors that have it, also those that are absent.
    groups
        The ranks that hold the same; only that of the explained rank.
    absent
        Tensors that the strategy lists for these ranks, and that no file holds.
    has_plan
        Whether the target can be.
    obstacles
        Why it cannot be: the axes that do not divide.
    is_deduplicated
        Whether each slice is on one of its ranks, as the checkpoint was saved.
    """

    catalog: Catalog
    target: Strategy | None
    found: Diagnostics
    ranks: Sequence[int]
    stages: tuple[Stage, ...]
    tensors: Mapping[str, Distribution]
    metas: Mapping[str, TensorMeta]
    rows: tuple[Row, ...]
    patterns: Collection[str]
    rank: int | None
    matrices: Mapping[tuple[int, ...], tuple[int, ...]]
    names_of: Mapping[tuple[int, Matrix], tuple[str, ...]]
    groups: tuple[RankGroup, ...]
    absent: tuple[str, ...] = ()
    has_plan: bool = True
    obstacles: tuple[Obstacle, ...] = ()
    is_deduplicated: bool = False

    def _texts(self) -> Iterator[str]:
        yield self.catalog.root if self.target is None else self.target.origin
        yield format_ranks(self.ranks if self.rank is None else [self.rank])
        yield count(len(self.tensors), "tensor")
        yield "" if self.has_plan else "the target cannot be"

    def _rows(self) -> Iterator[Sequence[str]]:
        yield ("tensor", "slice", "ranks")
        for name, one in self.tensors.items():
            for part in one.slices:
                yield (name, " and ".join(map(str, part.regions)), format_numbers(part.ranks, ", "))

    @property
    def is_of_files(self) -> bool:
        """Whether the ranks are the files of a merged checkpoint, by number."""
        return self.target is None and self.catalog.is_merged

    @property
    def lost(self) -> list[int]:
        """The ranks that have no file that can be read."""
        return _without_file(self.catalog, self.target, self.ranks)

    @property
    def nbytes(self) -> int:
        """Size of the tensors; with a rank, of its slices."""
        if self.rank is None:
            return sum(self.metas[name].nbytes for name in self.tensors)
        return sum(
            _nbytes(part, one, self.metas[name])
            for name, one in self.tensors.items()
            for part in one.slices
        )


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
        The source cannot be explained, there is no such rank, or a pattern matches no name.
    """
    read = try_reading(catalog, strategy, target, None, options, executor or InlineExecutor())
    found, checkpoint = read.found, read.checkpoint
    is_mistaken = any(one.code == "options" for one in found)
    if checkpoint is None or checkpoint.unread or is_mistaken or refuses_layouts(found):
        found.raise_if_errors()
    assert checkpoint is not None, "else there is an error"
    if target is not None:
        return _explain_target(catalog, target, rank, options.tensors.include, read)
    layouts = checkpoint.strategy.layouts
    tensors = distribute(checkpoint, strategy)
    holders = (one.ranks for each in {*tensors.values()} for one in each.slices)
    ranks = {*catalog.files, *catalog.damaged, *chain(*holders)}
    ranks.update(ranks_without_file(checkpoint.catalog, checkpoint.strategy))
    absent = {name: layouts[name] for name in layouts if name in checkpoint.wanted - tensors.keys()}
    of_tensors = chain(*(one.layouts for one in tensors.values()), *absent.values())
    side = _Side(
        catalog,
        None,
        found,
        sorted(ranks),
        _find_stages(checkpoint.strategy, of_tensors),
        tensors,
        {one.name: full_meta(one) for one in checkpoint.records},
        absent,
        checkpoint.is_deduplicated,
    )
    return side.explain(rank, options.tensors.include)


@dataclass(frozen=True, slots=True)
class _Side:
    """All that there is to explain of a source or a target; see `Explanation`.

    ``absent`` has the layouts of tensors that are in no file.  In a deduplicated checkpoint each
    slice is on one of its ranks.
    """

    catalog: Catalog
    target: Strategy | None
    found: Diagnostics
    ranks: Sequence[int]
    stages: tuple[Stage, ...]
    tensors: Mapping[str, Distribution]
    metas: Mapping[str, TensorMeta]
    absent: Mapping[str, Sequence[Layout]] = field(default_factory=dict)
    is_deduplicated: bool = False

    def explain(self, rank: int | None, patterns: Collection[str]) -> Explanation:
        """Return the explanation, only of a rank if one is given."""
        tensors, absent = self.tensors, self.absent
        if rank is not None and self.target is None and self.catalog.is_merged:
            text, hint = (
                "a merged checkpoint has no ranks",
                "-d STRATEGY, to explain those of a target",
            )
            raise PlanError([Diagnostic("options", text, hint=hint, where=self.catalog.root)])
        _check_rank(rank, self.ranks, self.catalog.root if self.target is None else "the target")
        lost = frozenset(_without_file(self.catalog, self.target, self.ranks))
        groups = tuple(_group(tensors, self.metas, self.ranks, self.stages, lost))
        matrices: dict[tuple[int, ...], tuple[int, ...]] = {}
        if rank is not None:
            groups = tuple(one for one in groups if rank in one.ranks)
            parts = {one: one.of_rank(rank) for one in {*tensors.values()}}
            tensors = {name: parts[one] for name, one in tensors.items() if parts[one].slices}
            layouts = chain(*absent.values(), *(one.layouts for one in tensors.values()))
            of_rank = dict.fromkeys(one for one in layouts if rank in one.ranks)
            matrices = {one.device_matrix: one.coordinate(rank) for one in of_rank}
            absent = {
                name: one for name, one in absent.items() if not of_rank.keys().isdisjoint(one)
            }
        names_of: dict[tuple[int, Matrix], dict[str, None]] = {}
        layouts_of = ((name, one.layouts) for name, one in tensors.items())
        for name, having in chain(layouts_of, absent.items()):
            for layout in (one for one in having if rank is None or rank in one.ranks):
                names_of.setdefault((layout.stage, layout.device_matrix), {})[name] = None
        return Explanation(
            self.catalog,
            self.target,
            self.found,
            self.ranks,
            self.stages,
            tensors,
            self.metas,
            _fold(
                *(tensors, self.metas),
                over_stages=rank is None and not patterns,
                by_stored=not self.is_deduplicated,
                over_files=self.target is None and self.catalog.is_merged and not patterns,
            ),
            patterns,
            rank,
            matrices,
            {key: tuple(having) for key, having in names_of.items()},
            groups,
            tuple(absent),
            is_deduplicated=self.is_deduplicated,
        )


def _check_rank(rank: int | None, ranks: Sequence[int], where: str) -> None:
    """Raise an error for a rank that does not exist; it has the ranks that do."""
    if rank is not None and rank not in ranks:
        what = "the ranks are" if len(ranks) > 1 else "the only one is"
        numbers = format_ranks(ranks, most=6).partition(" ")[2]
        text, hint = f"there is no rank {rank}", f"one of {numbers}"
        facts = f"{what} {numbers}"
        raise PlanError([Diagnostic("options", text, hint=hint, facts=facts, where=where)])


# ------------------------------------------------------------------------------ ranks, stages, rows


def _find_stages(strategy: Strategy, layouts: Iterable[Layout]) -> tuple[Stage, ...]:
    """Return the stages; none if there are no layouts."""
    stages = tuple(find_stages(strategy, layouts))
    return stages if any(one.device_matrices for one in stages) else ()


def _without_file(catalog: Catalog, target: Strategy | None, ranks: Iterable[int]) -> list[int]:
    """Return the ranks of a source that have no file that can be read; none of a target."""
    if target is not None or catalog.is_merged:
        return []
    return [rank for rank in ranks if rank not in catalog.files]


def _nbytes(part: Slice, one: Distribution, meta: TensorMeta) -> int:
    """Return the size of a slice; what cannot be divided is whole."""
    elements = math.prod(one.shape)
    return meta.nbytes * part.size // elements if elements else meta.nbytes


def _group(
    tensors: Mapping[str, Distribution],
    metas: Mapping[str, TensorMeta],
    ranks: Sequence[int],
    stages: Sequence[Stage],
    lost: Collection[int],
) -> Iterator[RankGroup]:
    """Yield the ranks that should hold the same slices of all tensors that are known to be slices.

    What a rank has for itself, such as a random state, distinguishes no groups.  Of a ``lost`` rank
    it is not known: it is in the first group with the same slices.
    """
    names: dict[Distribution, list[str]] = {}
    for name, one in tensors.items():
        names.setdefault(one, []).append(name)
    held: dict[int, list[tuple[int, int]]] = {rank: [] for rank in ranks}
    amounts = dict.fromkeys(ranks, (0, 0))
    sources: dict[int, set[int]] = {rank: set() for rank in ranks}
    for number, (one, having) in enumerate(names.items()):
        counted: set[int] = set()  # a rank may hold several slices of a tensor
        for at, part in enumerate(one.slices):
            nbytes = sum(_nbytes(part, one, metas[name]) for name in having)
            for rank in part.ranks:
                tensors_of, nbytes_of = amounts[rank]
                new = 0 if rank in counted else len(having)
                amounts[rank] = tensors_of + new, nbytes_of + nbytes
                sources[rank].update(taken.rank for taken in part.taken)
                if one.known_by != "unlisted":
                    held[rank].append((number, at))
            counted.update(part.ranks)
    stage_of = {rank: stage for stage in stages for rank in stage.ranks}
    groups: dict[Hashable, list[int]] = {}
    first: dict[Hashable, list[int]] = {}
    for rank in sorted(ranks, key=lost.__contains__):  # those without a file come last
        stage = stage_of.get(rank)
        slices = tuple(held[rank]), stage and stage.ranks, frozenset(sources[rank])
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
    for one in dict.fromkeys(tensors.values()):
        first = one.layouts[0].first_rank if one.layouts else 0
        where: tuple[object, ...] = tuple(replace(each, first_rank=0) for each in one.layouts)
        if not over_stages:
            where = one.layouts, tuple(part.stored for part in one.slices if by_stored)
        regions = tuple((part.regions, part.taken) for part in one.slices)
        kind = one.known_by == "unlisted", where, regions, one.listed_shard
        kinds[one] = numbers.setdefault(kind, len(numbers))
        ranks = tuple(tuple(rank - first for rank in part.ranks) for part in one.slices)
        placements[one] = Placement("layout", None, () if over_files else ranks, first_rank=first)
    entries = tuple(
        Entry(name, metas[name].dtype, metas[name].header_shape, placements[one])
        for name, one in tensors.items()
    )
    full = {name: metas[name] for name in tensors}
    listed = [name for name, one in tensors.items() if one.known_by == "listed"]
    states = drop_unlike_shapes(match_states(listed, full), full)
    return fold_rows(Summary(entries, states), lambda entry: kinds[tensors[entry.name]])


# ----------------------------------------------------------------------------------------- a target


def _explain_target(
    catalog: Catalog, target: Strategy, rank: int | None, patterns: Collection[str], read: Reading
) -> Explanation:
    """Explain what the ranks of a target would hold, and read; or why it cannot be."""
    _check_rank(rank, target.ranks, target.origin)
    plan, found, layouts = read.plan, read.found, [*read.placed]
    stages = _find_stages(target, chain(*(of_tensor for _, of_tensor in layouts)))
    if plan is None:
        obstacles = tuple(find_obstacles(layouts))
        if not obstacles:
            found.raise_if_errors()
        nothing = _Side(catalog, target, found, target.ranks, stages, {}, {})
        return replace(
            nothing.explain(None, patterns),
            rank=rank,
            groups=(),
            has_plan=False,
            obstacles=obstacles,
        )
    by_name: dict[str, list[Transfer]] = {}
    for transfer in plan.transfers:
        by_name.setdefault(transfer.name, []).append(transfer)
    metas = {name: of_name[0].meta for name, of_name in by_name.items()}
    tensors = distribute_target(plan, by_name)
    return _Side(catalog, target, found, target.ranks, stages, tensors, metas).explain(
        rank, patterns
    )
