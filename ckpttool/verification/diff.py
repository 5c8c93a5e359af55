"""Compares two checkpoints tensor by tensor, whatever their layouts and formats are.

What is compared are full tensors: each side's slices, in whichever files, are read as one.  A
parameter that a strategy does not list and that differs between ranks has no full tensor; it is
compared rank by rank, and if the other side has one for all, that one with each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Literal

from ckpttool.concurrency import InlineExecutor, OpenProgress, no_progress
from ckpttool.errors import CkptToolError, PlanError, StrategyError, raise_all, with_side
from ckpttool.model.catalog import Catalog, MergedCatalog, RankCatalog
from ckpttool.model.diagnostics import Diagnostic, Diagnostics
from ckpttool.model.plan import OutputTensor
from ckpttool.model.slicing import Source
from ckpttool.model.strategy import Strategy
from ckpttool.model.tensors import TensorMeta
from ckpttool.planning.resolve import ResolveOptions, resolve
from ckpttool.storage.checksums import check_files
from ckpttool.storage.compare import (
    CompareOptions,
    TensorDelta,
    Tolerance,
    compare_tensors,
)
from ckpttool.transaction.manifest import require_unmodified_sources

Kind = Literal["only in A", "only in B", "dtype", "shape", "text", "values"]

OF_ITS_OWN = (
    "the strategy of A is taken; if B has one of its own, give it with --b-strategy, "
    "and if every rank of it holds everything, say --replicated"
)
DOUBTS = (  # that a strategy may not be that of the files
    "equal_slices",
    "inferred",
    "not_compared",
    "one_of_several",
    "unlike_states",
)


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """How a tensor of A differs from that of the same name in B.

    Attributes
    ----------
    name
        The parameter.
    kind
        What differs; values are compared if nothing else differs.
    a, b
        What it is on each side; None where it is not.
    rank
        Whose it is, of a parameter that each rank has its own of; else None.
    values
        How the values differ, if they were compared.
    """

    name: str
    kind: Kind
    a: TensorMeta | None
    b: TensorMeta | None
    rank: int | None = None
    values: TensorDelta | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """What `diff` found.

    Attributes
    ----------
    tensors
        Number of tensors, of both sides together.
    nbytes
        Bytes of the tensors whose values were compared.
    differences
        In the order of A; then what only B has.
    notes
        Of both sides; one of a single side says so.
    findings
        Replicas of a side that are not the same.  The lowest rank's were compared, so what agrees
        may still differ in others.
    """

    tensors: int
    nbytes: int
    differences: tuple[TensorDifference, ...]
    notes: tuple[Diagnostic, ...]
    findings: tuple[Diagnostic, ...] = ()

    @property
    def is_equal(self) -> bool:
        """Whether nothing differs, between the sides and in them."""
        return not self.differences and not self.findings


def diff(
    a: Catalog,
    b: Catalog,
    a_strategy: Strategy | None = None,
    b_strategy: Strategy | None = None,
    options: ResolveOptions = ResolveOptions(),
    *,
    tolerance: Tolerance | None = None,
    executor: Executor | None = None,
    open_progress: OpenProgress = no_progress,
) -> Comparison:
    """Find what differs between two checkpoints.

    Parameters
    ----------
    a, b
        From `scan`.
    a_strategy, b_strategy
        Their layouts; None for a file that holds full tensors, and for replicated ranks.
    options
        How both sides are resolved to full tensors.  With ``replicated`` a folder without a
        strategy holds everything on every rank.  Parameters that are not in the strategy and
        differ between ranks are compared rank by rank (the default, ``"rank"``), or only the
        lowest rank's (``"first"``), or not at all (``"drop"``).
    tolerance
        What counts as equal; by default only equal bytes do.
    executor
        Does the reading; by default the caller's own thread.
    open_progress
        See `ckpttool.verify`.

    Raises
    ------
    FormatError, PlanError
        What stops a side from being read, in one error for both; it says which side it is of.
        Replicas that differ stop none.  A file that was written to meanwhile does.
    """
    executor = executor or InlineExecutor()
    options = replace(options, unlisted=options.unlisted or "rank", keep_going=True)
    with require_unmodified_sources(a, b):
        errors: list[CkptToolError] = []
        sides: list[Sequence[Source]] = []
        notes: dict[Diagnostic, str] = {}  # and the sides that have it
        contradictions: list[Diagnostic] = []
        for side, catalog, given in (("A", a, a_strategy), ("B", b, b_strategy)):
            found = Diagnostics("diff")
            own = replace(
                options, replicated=options.replicated and isinstance(catalog, RankCatalog)
            )
            if isinstance(catalog, MergedCatalog) and given is None and own.unlisted != "drop":
                own = replace(own, unlisted="first")  # a single file has no ranks
            try:
                resolved = resolve(catalog, given, own, executor, found)
            except (PlanError, StrategyError) as error:
                errors += [*catalog.damaged.values(), with_side(error, side)]
                continue
            found.extend(resolved.doubts)
            forged, more = check_files(catalog, executor, crc=False)
            wrong = list(found.errors)
            if side == "B" and _is_that_of(given, a_strategy):
                if wrong:
                    hints = filter(None, (wrong[-1].hint, OF_ITS_OWN))
                    wrong[-1] = replace(wrong[-1], hint="; ".join(hints))
                elif any(one.code in DOUBTS for one in found):
                    found.add(Diagnostic("borrowed_strategy", OF_ITS_OWN))
            contradictions += [one.on_side(side) for one in wrong if one.code == "replica"]
            problems = [*catalog.errors(), *(one for one in wrong if one.code != "replica")]
            errors += [*found.failures, *forged]
            errors += [with_side(PlanError(problems), side)] if problems else []
            for note in dict.fromkeys((*found.of("note", "warning"), *more)):
                notes[note] = notes.get(note, "") + side
            sides.append(resolved.sources)
        raise_all([*errors, PlanError(contradictions)] if errors and contradictions else errors)
        pairs = list(_pairs(*sides))
        nbytes = sum(pair.nbytes for pair in pairs)
        with open_progress(2 * nbytes) as on_progress:
            differences = tuple(_differences(pairs, executor, tolerance, on_progress))
        sided = tuple(note if of == "AB" else note.on_side(of) for note, of in notes.items())
        return Comparison(len(pairs), nbytes, differences, sided, tuple(contradictions))


def _is_that_of(b: Strategy | None, a: Strategy | None) -> bool:
    """Whether the strategy of B is that of A, which may not be meant."""
    return b is not None and a is not None and b.files == a.files


@dataclass(frozen=True, slots=True)
class _Pair:
    """A tensor on both sides, or on one."""

    name: str
    rank: int | None
    a: Source | None
    b: Source | None

    @property
    def nbytes(self) -> int:
        """Bytes that are to be compared, of one side."""
        if self.a is None or self.a.meta.text is not None or self.kind is not None:
            return 0
        return self.a.meta.nbytes

    @property
    def kind(self) -> Kind | None:
        """What differs by header, or None."""
        if self.b is None:
            return "only in A"
        if self.a is None:
            return "only in B"
        a, b = self.a.meta, self.b.meta
        if a.dtype != b.dtype:
            return "dtype"
        if a.shape != b.shape:
            return "shape"
        return "text" if a.text != b.text else None

    def difference(self, kind: Kind, values: TensorDelta | None = None) -> TensorDifference:
        """What is reported of it."""
        a, b = (None if side is None else side.meta for side in (self.a, self.b))
        return TensorDifference(self.name, kind, a, b, self.rank, values)


def _pairs(a: Sequence[Source], b: Sequence[Source]) -> Iterator[_Pair]:
    """Yield the tensors of both sides, those of A first."""
    sides = [_by_name(sources) for sources in (a, b)]
    for name in dict.fromkeys((*sides[0], *sides[1])):
        mine, other = (side.get(name, {}) for side in sides)
        own = sorted({rank for rank in (*mine, *other) if rank is not None})
        ranks: list[int | None] = [*own] if own else [None]
        for rank in ranks:
            yield _Pair(name, rank, *(held.get(rank, held.get(None)) for held in (mine, other)))


def _by_name(sources: Sequence[Source]) -> dict[str, dict[int | None, Source]]:
    """Return name to source, or to the source of each rank that has its own."""
    found: dict[str, dict[int | None, Source]] = {}
    for source in sources:
        rank = None if source.rank_cycle is None else source.rank_cycle[0]
        found.setdefault(source.meta.name, {})[rank] = source
    return found


def _differences(
    pairs: list[_Pair],
    executor: Executor,
    tolerance: Tolerance | None,
    on_progress: Callable[[int], None],
) -> Iterator[TensorDifference]:
    """What differs, in the order of the pairs."""

    def tensors() -> Iterator[tuple[int, tuple[OutputTensor, ...]]]:
        for i, pair in enumerate(pairs):
            if pair.nbytes and pair.a is not None and pair.b is not None:
                yield i, (OutputTensor.full(pair.a), OutputTensor.full(pair.b))

    values: dict[int, TensorDelta] = {}
    for i, facts in compare_tensors(tensors(), executor, CompareOptions(tolerance), on_progress):
        if facts.differences[0].count:
            values[i] = facts.differences[0]
    for i, pair in enumerate(pairs):
        if pair.kind is not None:
            yield pair.difference(pair.kind)
        elif i in values:
            yield pair.difference("values", values[i])
