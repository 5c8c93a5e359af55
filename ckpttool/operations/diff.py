"""Compare two checkpoints tensor by tensor, independently of their layouts and formats.

Full tensors are compared.  A parameter that a strategy does not list and that differs between ranks
has no full tensor.  It is compared rank by rank; a full tensor of the other side is compared with
every rank.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from itertools import chain
from shlex import quote
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from ckpttool.checkpoint.checkpoint import Checkpoint, ResolveOptions
from ckpttool.checkpoint.presence import take_remains
from ckpttool.checks.manifest import check_source
from ckpttool.checks.presence import find_nothing, find_shared_problems
from ckpttool.concurrency import InlineExecutor, OpenProgress, no_progress
from ckpttool.model.catalog import Catalog
from ckpttool.model.plan import OutputTensor
from ckpttool.model.strategy import Strategy
from ckpttool.model.tensors import TensorMeta
from ckpttool.operations.source import resolve
from ckpttool.problems import (
    CkptToolError,
    Diagnostic,
    Diagnostics,
    PlanError,
    StrategyError,
    join_clauses,
    raise_all,
)
from ckpttool.storage.checksums import check_files
from ckpttool.storage.compare import (
    CompareOptions,
    TensorDelta,
    TensorStats,
    Tolerance,
    compare_tensors,
)
from ckpttool.transaction.sources import require_unmodified_sources
from ckpttool.wording import Brief, count, format_bytes

Kind = Literal["only in A", "only in B", "dtype", "shape", "text", "values"]

BORROWED = Diagnostic(
    "borrowed_strategy",
    "the strategy of A is used, which may not be that of B",
    hint="--b-strategy STRATEGY, or --replicated if every rank of B holds the whole model",
)


class TensorDifference(Struct, frozen=True):
    """A difference between the tensors of one name in A and B.

    Attributes
    ----------
    name
        The parameter.
    kind
        The kind of difference; values are compared only if nothing else differs.
    a, b
        The tensor on each side; None if a side lacks it.
    rank
        The rank, for a parameter that differs between ranks; else None.
    values
        Statistics of differing values.
    """

    name: str
    kind: Kind
    a: TensorMeta | None
    b: TensorMeta | None
    rank: int | None = None
    values: TensorDelta | None = None


class TensorChange(Struct, frozen=True):
    """How much a tensor changed from A to B, by all of its elements.

    Attributes
    ----------
    name, rank, meta
        The tensor, as in `TensorDifference`.
    norm
        The norm of the finite elements of A; None for types that are no numbers, as all below.
    distance
        The norm of B - A.  NaN if an element is NaN on one side only, else Inf if one is infinite
        on one side only.
    max_abs
        Largest ``|a - b|`` that is not NaN; 0 if all bytes are equal, None if all are NaN.
    nans
        Number of elements that are NaN on one side only.
    """

    name: str
    rank: int | None
    meta: TensorMeta
    norm: float | None
    distance: float | None
    max_abs: float | None
    nans: int

    @property
    def relative(self) -> float | None:
        """The distance as a part of the norm; Inf if only the norm is 0."""
        if self.norm is None or not self.distance:
            return self.distance
        return self.distance / self.norm if self.norm else self.distance * math.inf

    @property
    def order(self) -> tuple[int, float, str, int]:
        """Sorts the largest change first, NaN before it, and what is not known last."""
        relative, rank = self.relative, -1 if self.rank is None else self.rank
        if relative is None or math.isnan(relative):
            return 2 if relative is None else 0, 0.0, self.name, rank
        return 1, -relative, self.name, rank


class Applied(Struct, frozen=True):
    """What the options for tensors did to a side.

    Attributes
    ----------
    left_out
        The tensors that were not compared, by name.
    renamed
        The number of tensors with new names.
    cast
        The number of tensors that were compared in another type, by their old and new types.
    """

    left_out: Mapping[str, int]
    renamed: int
    cast: Mapping[tuple[str, str], int]

    @classmethod
    def to(cls, checkpoint: Checkpoint) -> Applied:
        """Return what the options did to a checkpoint."""
        metas = {one.name: one.meta for one in checkpoint.tensors}
        types = Counter((one.dtype, checkpoint.wanted_dtype(one)) for one in metas.values())
        cast = {pair: number for pair, number in sorted(types.items()) if pair[0] != pair[1]}
        return cls(checkpoint.left_out, len(checkpoint.renamed.keys() & metas.keys()), cast)


class Difference(Brief, Struct, frozen=True):
    """The result of `diff`.

    Attributes
    ----------
    a, b
        ``root`` of the catalogs.
    tensors
        Number of tensors; one that both sides have counts once.
    nbytes
        Bytes of the tensors whose values were compared.
    differences
        The tensors that differ, in the order of A; then those that only B has.
    notes
        Notes of both sides; a note of a single side names it.
    findings
        Replicas of a side that differ.  Only those of the lowest ranks were compared, so others may
        differ even if these are equal.  Or neither side has a tensor.
    tolerance
        The tolerance for equal values; None if bytes were compared.
    changes
        How much each tensor changed whose values were compared, the largest change first; None
        unless requested.
    applied
        What the options for tensors did, by side: ``"A"`` and ``"B"``.
    """

    a: str
    b: str
    tensors: int
    nbytes: int
    differences: tuple[TensorDifference, ...]
    notes: tuple[Diagnostic, ...]
    findings: tuple[Diagnostic, ...] = ()
    tolerance: Tolerance | None = None
    changes: tuple[TensorChange, ...] | None = None
    applied: Mapping[str, Applied] = {}

    def _texts(self) -> Iterator[str]:
        kinds = ", ".join(f"{number} {kind}" for kind, number in self.count_kinds().items())
        verdict = "equal" if self.is_equal else "different"
        yield f"A {self.a} and B {self.b}: {verdict}{kinds and f', {kinds}'}"
        yield count(self.tensors, "tensor")
        yield f"{format_bytes(self.nbytes)} compared"

    def _rows(self) -> Iterator[Sequence[str]]:
        yield ("tensor", "what differs", "elements", "max abs")
        for one in self.differences:
            values = one.values
            name = one.name if one.rank is None else f"{one.name} (rank {one.rank})"
            most = "" if values is None or values.max_abs is None else f"{values.max_abs:.4g}"
            yield (name, one.kind, "" if values is None else str(values.count), most)

    @property
    def is_equal(self) -> bool:
        """Whether something was compared, and nothing differs: sides, and replicas of a side."""
        return bool(self.tensors) and not self.differences and not self.findings

    def count_kinds(self) -> dict[str, int]:
        """Return how many differences there are of each kind."""
        return dict(Counter(tensor.kind for tensor in self.differences))


def diff(
    a: Catalog,
    b: Catalog,
    a_strategy: Strategy | None = None,
    b_strategy: Strategy | None = None,
    options: ResolveOptions = ResolveOptions(),
    *,
    compare: CompareOptions | None = None,
    executor: Executor | None = None,
    open_progress: OpenProgress = no_progress,
) -> Difference:
    """Find the differences between two checkpoints.

    Parameters
    ----------
    a, b
        The checkpoints, from `scan`.
    a_strategy, b_strategy
        Their layouts; None for a file that holds full tensors, and for replicated ranks.  One
        object for both is that of A, which B borrows.
    options
        How both sides are resolved to full tensors.  With ``replicated`` every rank of a folder
        without a strategy holds full tensors.  ``unlisted`` applies to parameters that are not in
        the strategy and differ between ranks.  They are compared rank by rank (the default,
        ``"rank"``), only for the lowest rank (``"first"``), or not at all (``"drop"``).
    compare
        The tolerance for equal values; by default bytes must be equal.  With ``wants_statistics``
        the answer has ``changes``.
    executor
        Reads contents; by default the caller's own thread.
    open_progress
        See `ckpttool.verify`.

    Raises
    ------
    FormatError, PlanError
        All problems that prevent reading a side, in one error that names the sides, or a file that
        changed during the run.  Replicas that differ are not an error.
    """
    compare, executor = compare or CompareOptions(), executor or InlineExecutor()
    options = replace(options, unlisted=options.unlisted or "rank")
    a, b = (take_remains(one, options.tensors) for one in (a, b))
    with require_unmodified_sources(a, b):
        errors_of: dict[str, list[CkptToolError]] = {"A": [], "B": []}
        sides: list[Sequence[OutputTensor]] = []
        applied: dict[str, Applied] = {}
        checkpoints: dict[str, Checkpoint] = {}
        notes: dict[Diagnostic, str] = {}  # note to its sides
        contradictions: list[Diagnostic] = []
        for side, catalog, given in (("A", a, a_strategy), ("B", b, b_strategy)):
            option = "-s" if side == "A" else "--b-strategy"
            found = Diagnostics("diff", strict=options.strict, strategy_option=option)
            if options.manifest != "ignore":
                check_source(catalog, executor, found)
            own = replace(options, replicated=options.replicated and catalog.needs_strategy)
            if side == "B":  # it has the new names, and patterns are about the old ones
                changed = checkpoints["A"].new_names if "A" in checkpoints else {}
                called = {new: old for old, new in changed.items()}
                own = replace(own, tensors=replace(own.tensors, rename=(), called=called))
            if catalog.is_merged and given is None and own.unlisted != "drop":
                own = replace(own, unlisted="first")  # a single file has no ranks
            try:
                checkpoint = resolve(
                    *(catalog, given, own, executor, found), open_progress=open_progress
                )
            except (PlanError, StrategyError) as error:
                failed = (*catalog.damaged.values(), error)
                errors_of[side] += [one.on_side(side) for one in failed]
                continue
            found.add(*(one for one in find_nothing(catalog) if one.code != "nothing"))
            checksum_errors, of_checksums = check_files(catalog, executor, crc=False)
            wrong = list(found.errors)
            is_borrowed = side == "B" and given is not None and given is a_strategy
            borrowed = [BORROWED] if is_borrowed and found.findings else []
            contradictions += [one.on_side(side) for one in wrong if one.code == "replica"]
            others = [one for one in wrong if one.code != "replica"]
            if borrowed:
                others = [_explain_by_borrowing(one, catalog) for one in others]
            problems = [*catalog.errors(), *others]
            errors_of[side] += [one.on_side(side) for one in (*found.failures, *checksum_errors)]
            errors_of[side] += [PlanError(problems).on_side(side)] if problems else []
            for note in dict.fromkeys((*found.of("note", "warning"), *of_checksums, *borrowed)):
                notes[note] = notes.get(note, "") + side
            checkpoints[side] = checkpoint
            sides.append([*_outputs(checkpoint)])
            applied[side] = Applied.to(checkpoint)
        for side, other, catalog in (("A", "B", a), ("B", "A", b)):
            read = None if errors_of[other] else checkpoints[other].whole
            if errors_of[side] and read is not None and _looks_merged(catalog, read.metas):
                errors_of[side] = [_merged_error(catalog, other).on_side(side)]
        errors = [*chain(*errors_of.values())]
        if not errors and (wrong := [*find_shared_problems([*checkpoints.values()])]):
            errors.append(PlanError(wrong))
        raise_all([*errors, PlanError(contradictions)] if errors and contradictions else errors)
        pairs = list(_pairs(*sides))
        nbytes = sum(pair.nbytes for pair in pairs)
        with open_progress(2 * nbytes) as on_progress:
            differences, changes = _compare(pairs, executor, compare, on_progress)
        sided = tuple(note if of == "AB" else note.on_side(of) for note, of in notes.items())
        if not pairs:
            contradictions += [
                one.on_side(side) for side, of in (("A", a), ("B", b)) for one in find_nothing(of)
            ]
        return Difference(
            *(a.root, b.root, len(pairs), nbytes),
            *(differences, sided, tuple(contradictions)),
            compare.tolerance,
            changes,
            applied,
        )


def _looks_merged(catalog: Catalog, full: Mapping[str, TensorMeta]) -> bool:
    """Return whether the only file of ranks has full tensors, by the shapes of another checkpoint.

    So MindSpore merges: into ``OUT/rank_0/``.
    """
    if not catalog.needs_strategy or len(catalog.paths) != 1:
        return False
    common = [(one, full[name]) for name, one in catalog.metas.items() if name in full]
    return bool(common) and all(one.shape == other.shape for one, other in common)


def _merged_error(catalog: Catalog, other: str) -> PlanError:
    """Return the error of a merged checkpoint that was given as a folder of ranks."""
    (path,) = catalog.paths
    text = f"looks merged: its tensors have the full shapes of {other}"
    hint = f"{quote(path)} in place of {quote(catalog.root)}"
    facts = "it is a folder with the file of one rank"
    return PlanError([Diagnostic("source", text, hint=hint, facts=facts, where=catalog.root)])


def _outputs(checkpoint: Checkpoint) -> Iterator[OutputTensor]:
    """Yield the tensors with the names and in the types that they would get."""
    for one in checkpoint.tensors:
        if terms := checkpoint.terms_of(one):
            output = OutputTensor.full(one, checkpoint.wanted_dtype(one.meta))
            name = checkpoint.renamed.get(one.name, one.name)
            yield replace(output, meta=replace(output.meta, name=name), terms=terms)


def _explain_by_borrowing(problem: Diagnostic, b: Catalog) -> Diagnostic:
    """Return a problem of B that the strategy of A may explain, unless it is one of its files."""
    is_of_files = problem.path is not None or problem.code in ("dtype", "manifest")
    is_of_files |= not set(problem.ranks) <= b.files.keys()
    hint = problem.hint if is_of_files or not problem.hint else BORROWED.hint
    facts = join_clauses(problem.facts, "read with the strategy of A")
    return replace(problem, hint=hint, facts=facts)


class _Pair(Struct, frozen=True):
    """A tensor on both sides, or on one."""

    name: str
    rank: int | None
    a: OutputTensor | None
    b: OutputTensor | None

    @property
    def kind(self) -> Kind | None:
        """The kind of difference between the headers, or None."""
        if self.b is None:
            return "only in A"
        if self.a is None:
            return "only in B"
        a, b = self.a.meta, self.b.meta
        if a.dtype != b.dtype:
            return "dtype"
        if a.header_shape != b.header_shape:
            return "shape"
        return "text" if a.text != b.text else None

    @property
    def nbytes(self) -> int:
        """The bytes of one side, if values are compared; else 0."""
        return self.a.meta.nbytes if self.a is not None and self.has_values else 0

    @property
    def has_values(self) -> bool:
        """Whether both sides have elements of one type and shape, to be compared."""
        return self.a is not None and self.a.meta.text is None and self.kind is None

    @property
    def sides(self) -> tuple[OutputTensor, ...]:
        """What is read of both sides to compare their values."""
        return tuple(one for one in (self.a, self.b) if one is not None)


def _pairs(a: Sequence[OutputTensor], b: Sequence[OutputTensor]) -> Iterator[_Pair]:
    """Yield the tensors of both sides, those of A first."""
    sides = [_by_name(sources) for sources in (a, b)]
    for name in dict.fromkeys((*sides[0], *sides[1])):
        of_a, of_b = (side.get(name, {}) for side in sides)
        numbers = sorted({rank for rank in (*of_a, *of_b) if rank is not None})
        ranks: list[int | None] = [*numbers] if numbers else [None]
        for rank in ranks:
            in_a, in_b = (held.get(rank, held.get(None)) for held in (of_a, of_b))
            yield _Pair(name, rank, in_a, in_b)


def _by_name(tensors: Sequence[OutputTensor]) -> dict[str, dict[int | None, OutputTensor]]:
    """Return name to rank to tensor; the rank of a full tensor is None."""
    by_name: dict[str, dict[int | None, OutputTensor]] = {}
    for tensor in tensors:
        only_for = tensor.source.only_for
        by_name.setdefault(tensor.meta.name, {})[only_for and only_for[0]] = tensor
    return by_name


def _compare(
    pairs: Sequence[_Pair],
    executor: Executor,
    options: CompareOptions,
    on_progress: Callable[[int], None],
) -> tuple[tuple[TensorDifference, ...], tuple[TensorChange, ...] | None]:
    """Return the differences, in the order of the pairs, and the changes if they are wanted."""
    compared = ((i, pair.sides) for i, pair in enumerate(pairs) if pair.has_values)
    found = dict(compare_tensors(compared, executor, options, on_progress))
    differences = []
    for i, pair in enumerate(pairs):
        delta = found[i].differences[0] if i in found and found[i].differences[0].count else None
        kind = pair.kind or ("values" if delta is not None else None)
        if kind is not None:
            a, b = (None if one is None else one.meta for one in (pair.a, pair.b))
            differences.append(TensorDifference(pair.name, kind, a, b, pair.rank, delta))
    if not options.wants_statistics:
        return tuple(differences), None
    changes = (_change(pairs[i], stats) for i, stats in found.items())
    return tuple(differences), tuple(sorted(changes, key=lambda one: one.order))


def _change(pair: _Pair, stats: TensorStats) -> TensorChange:
    assert pair.a is not None, "its values were compared"
    (delta,) = stats.differences
    norm = distance = max_abs = None
    if stats.numbers is not None:
        norm, distance = stats.numbers.norm, 0.0
        max_abs = delta.max_abs if delta.differs else 0.0
        if (found := delta.distances) is not None:
            distance = math.nan if found.nans else math.inf if found.infinities else found.norm
    return TensorChange(pair.name, pair.rank, pair.a.meta, norm, distance, max_abs, delta.nans)
