"""Compare two checkpoints tensor by tensor, independently of their layouts and formats.

Full tensors are compared.  If a strategy does not list a parameter that differs between ranks, it
is compared rank by rank.  A full tensor of the other side is then compared with every rank.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from itertools import chain
from shlex import quote
from typing import Literal, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from ckpttool.checkpoint.checkpoint import Checkpoint, ResolveOptions
from ckpttool.checks.missing import find_nothing, find_shared_problems
from ckpttool.concurrency import InlineExecutor, OpenProgress, no_progress
from ckpttool.model.catalog import Catalog
from ckpttool.model.dtypes import CASTABLE, DTYPES, WORDS_OF_CASTS
from ckpttool.model.joining import format_names
from ckpttool.model.manifest import LeftOut
from ckpttool.model.plan import OutputTensor
from ckpttool.model.strategy import Strategy
from ckpttool.model.tensors import TensorMeta
from ckpttool.operations.answer import (
    Answer,
    Cast,
    Count,
    Document,
    Indefinite,
    Reported,
    Some,
    Unbounded,
    count_casts,
)
from ckpttool.operations.look import Sight, Subject, look, with_config
from ckpttool.problems import (
    CkptToolError,
    CombinedError,
    Diagnostic,
    Diagnostics,
    PlanError,
    StrategyError,
    join_clauses,
    severities,
)
from ckpttool.storage.compare import (
    CompareOptions,
    TensorDelta,
    TensorStats,
    Tolerance,
    compare_tensors,
)
from ckpttool.transaction.sources import require_unmodified_sources
from ckpttool.wording import any_of, count, fold_names, fold_subtrees, format_bytes

Kind = Literal["only in A", "only in B", "dtype", "shape", "text", "values"]
Metas: TypeAlias = Mapping[str, TensorMeta | None]  # None if only the name is known

BORROWED = Diagnostic(
    "borrowed_strategy",
    "the strategy of A is used, which may not be that of B",
    hint="--b-strategy STRATEGY, or --replicated if every rank of B holds the whole model",
)


class ComparedTensor(Answer, frozen=True):
    """A tensor of a side.

    Attributes
    ----------
    dtype
        Element type, by MindSpore's name.
    shape
        Shape.
    text
        The text, if the tensor is a string.
    """

    dtype: str
    shape: tuple[Count, ...]
    text: str | None = None

    @classmethod
    def of(cls, meta: TensorMeta) -> ComparedTensor:
        """Return a tensor as documents have it."""
        return cls(meta.dtype, meta.header_shape, meta.text)


class ValueDifference(Answer, frozen=True):
    """How elements differ.

    Attributes
    ----------
    elements
        Number of elements.
    differing
        Number of those that differ.
    same_number
        Differing elements that are the same number, such as 0 and -0.
    nan_on_one_side
        Elements that are NaN on one side only.
    max_abs
        Largest |a - b|; null for types that are not numbers. Infinity if infinite values are
        compared, or no Float64 is as large.
    max_rel
        Largest |a - b| / |b| where b is not 0; null if there is none. Infinity if infinite values
        are compared, or no Float64 is as large.
    first
        Index of the first element that differs.
    """

    elements: Count
    differing: Count
    same_number: Count
    nan_on_one_side: Count
    max_abs: Unbounded | None
    max_rel: Unbounded | None
    first: tuple[Count, ...] | None


class TensorDifference(Answer, frozen=True):
    """A difference between the tensors of one name in A and B.

    Attributes
    ----------
    name
        Name of the tensor.
    rank
        Rank, if every rank has a tensor of its own.
    kind
        What differs; values are compared only if nothing else does.
    a, b
        The tensor of that side; null if the side lacks it, or only its name is known.
    values
        How elements differ.
    """

    name: str
    rank: int | None
    kind: Kind
    a: ComparedTensor | None
    b: ComparedTensor | None
    values: ValueDifference | None = None


class TensorChange(Answer, frozen=True):
    """How much a tensor changed from A to B, by all of its elements.

    Attributes
    ----------
    name
        Name of the tensor.
    rank
        Rank, if every rank has a tensor of its own.
    dtype
        Element type, by MindSpore's name.
    shape
        Shape.
    relative
        distance / norm; 0 for equal tensors, Infinity if only the norm is 0. null for types that
        are not numbers, as below.
    distance
        The norm of b - a. NaN if an element is NaN on one side only, else Infinity if one is
        infinite on one side only, or no Float64 is as large.
    norm
        The norm of the finite elements of a.
    max_abs
        Largest |a - b| that is not NaN; 0 for equal tensors, null if all are NaN.
    nan_on_one_side
        Number of elements that are NaN on one side only.
    """

    name: str
    rank: int | None
    dtype: str
    shape: tuple[Count, ...]
    relative: Indefinite | None
    distance: Indefinite | None
    norm: Unbounded | None
    max_abs: Unbounded | None
    nan_on_one_side: Count

    @property
    def order(self) -> tuple[int, float, str, int]:
        """Sorts the largest change first, NaN before it, and what is not known last."""
        relative, rank = self.relative, -1 if self.rank is None else self.rank
        if relative is None or math.isnan(relative):
            return 2 if relative is None else 0, 0.0, self.name, rank
        return 1, -relative, self.name, rank


class Applied(Answer, frozen=True):
    """The effect of the options for tensors on a side.

    Attributes
    ----------
    left_out
        Tensors that --include, --exclude or --weights-only leave out, if any.
    renamed
        Number of tensors with new names, if any.
    cast
        The tensors that were compared in another type, if any.
    """

    left_out: LeftOut | None = None
    renamed: Some | None = None
    cast: tuple[Cast, ...] = ()

    @classmethod
    def to(cls, checkpoint: Checkpoint) -> Applied:
        """Return what the options did to a checkpoint."""
        metas = {tensor.name: tensor.meta for tensor in checkpoint.tensors}
        return cls(
            LeftOut.of(checkpoint.left_out),
            len(checkpoint.renamed.keys() & metas.keys()) or None,
            count_casts((meta.dtype, checkpoint.wanted_dtype(meta)) for meta in metas.values()),
        )


class Difference(Document, frozen=True, kw_only=True):
    """The JSON document of diff.

    Attributes
    ----------
    a
        First checkpoint.
    b
        Second checkpoint.
    equal
        Whether nothing differs; the exit code is then 0, else 1.
    tensors
        Number of compared tensors.
    nbytes
        Compared bytes of one side.
    tolerance
        Tolerance of --atol and --rtol; null if bytes were compared.
    counts
        Number of differences of each kind.
    differences
        Tensors that differ, in the order of A; then those that only B has. At most --limit.
    changes
        With --stats: how much each tensor changed whose values were compared, the largest relative
        change first; at most --limit.
    applied
        What --include, --exclude, --weights-only, --rename and --dtype did to the sides, if
        anything.
    findings
        Replicas that differ within a side: only the lowest ranks were compared. Or neither side
        has a tensor.
    notes
        Facts that do not stop the command: notes and warnings.
    """

    a: str
    b: str
    equal: bool
    tensors: Count
    nbytes: Count
    tolerance: Tolerance | None
    counts: dict[Kind, Some]
    differences: tuple[TensorDifference, ...]
    changes: tuple[TensorChange, ...] | None = None
    applied: dict[Literal["a", "b"], Applied] | None = None
    findings: Reported
    notes: Reported

    def _texts(self) -> Iterator[str]:
        kinds = ", ".join(f"{number} {kind}" for kind, number in self.counts.items())
        verdict = "equal" if self.equal else "different"
        yield f"A {self.a} and B {self.b}: {verdict}{kinds and f', {kinds}'}"
        yield count(self.tensors, "tensor")
        yield f"{format_bytes(self.nbytes)} compared"

    def _rows(self) -> Iterator[Sequence[str]]:
        yield ("tensor", "what differs", "elements", "max abs")
        kinds = {}
        for tensor in self.differences:
            values = tensor.values
            name = tensor.name if tensor.rank is None else f"{tensor.name} (rank {tensor.rank})"
            most = "" if values is None or values.max_abs is None else f"{values.max_abs:.4g}"
            kinds[name] = tensor.kind, "" if values is None else str(values.differing), most
        yield from ((name, *kind) for name, kind in fold_names(kinds))


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
    with require_unmodified_sources(a.with_remains(), b.with_remains()):
        # Beside one strategy ``replicated`` is about the other side.
        strategies = a_strategy, b_strategy
        is_replicated = [
            options.replicated and (None not in strategies or it is None) for it in strategies
        ]
        options = with_config(replace(options, replicated=is_replicated[0]), a.root, b.root)
        of_a = _look("A", Subject(a, a_strategy, options), executor, open_progress)
        # B has the new names, and patterns are about the old ones; it has the types of rules, too.
        renamed = {} if of_a.checkpoint is None else of_a.checkpoint.new_names
        called = {new: old for old, new in renamed.items()}
        recipe = options.tensors.recipe
        fixed = () if recipe is None else [name for name in b.metas if recipe.dtype_of(name)]
        of_names = replace(options.tensors, rename=(), recipe=None, called=called, fixed=fixed)
        options = replace(options, replicated=is_replicated[1], tensors=of_names)
        is_borrowed = b_strategy is not None and b_strategy is a_strategy
        of_b = _look("B", Subject(b, b_strategy, options), executor, open_progress, is_borrowed)
        sides = (of_a, of_b)
        checkpoints = _checkpoints(*sides)
        pairs = list(_pairs(*([*checkpoint.outputs()] for checkpoint in checkpoints)))
        nbytes = sum(pair.nbytes for pair in pairs)
        a_names, b_names = ([it.name for it in checkpoint.tensors] for checkpoint in checkpoints)
        unlike = [*compare_names(a_names, b_names)]
        with open_progress(2 * nbytes) as on_progress:
            differences, changes = _compare(pairs, executor, compare, on_progress)
        weights = [it for it in differences if it.name not in checkpoints[0].belongings]
        unlike += _of_other_types(weights)
        findings = [*chain(*(side.findings(is_empty=not pairs) for side in sides))]
        applied: dict[Literal["a", "b"], Applied] = {
            "a": Applied.to(checkpoints[0]),
            "b": Applied.to(checkpoints[1]),
        }
        return Difference(
            a=a.root,
            b=b.root,
            equal=bool(pairs) and not differences and not findings,
            tensors=len(pairs),
            nbytes=nbytes,
            tolerance=compare.tolerance,
            counts=dict(Counter(tensor.kind for tensor in differences)),
            differences=differences,
            changes=changes,
            applied={side: what for side, what in applied.items() if what != Applied()} or None,
            findings=Reported(findings, severities("diff")),
            notes=Reported([*_notes(*sides), *unlike], severities("diff")),
        )


class _Side(Struct, frozen=True):
    """One of the checkpoints, and what is wrong with it.

    Attributes
    ----------
    name
        ``"A"`` or ``"B"``.
    sight
        What was seen.
    errors
        What prevents a comparison.
    replicas
        Replicas that differ, which does not prevent one.
    notes
        What else is worth knowing.
    """

    name: str
    sight: Sight
    errors: Sequence[CkptToolError]
    replicas: Sequence[Diagnostic] = ()
    notes: Sequence[Diagnostic] = ()

    @property
    def checkpoint(self) -> Checkpoint | None:
        return self.sight.checkpoint

    def findings(self, is_empty: bool) -> Iterator[Diagnostic]:
        """Yield what of this side is a difference of its own."""
        nothing = find_nothing(self.sight.catalog) if is_empty else ()
        yield from (diagnostic.on_side(self.name) for diagnostic in (*self.replicas, *nothing))


def _look(
    name: str,
    source: Subject,
    executor: Executor,
    open_progress: OpenProgress,
    is_borrowed: bool = False,
) -> _Side:
    """Look at a side; with ``is_borrowed`` its strategy is that of the other one."""
    catalog, options = source.catalog, source.options
    options = replace(options, replicated=options.replicated and catalog.needs_strategy)
    if catalog.is_merged and source.strategy is None and options.unlisted != "drop":
        options = replace(options, unlisted="first")  # a single file is not of ranks
    option = "-s" if name == "A" else "--b-strategy"
    diagnostics = Diagnostics("diff", strict=options.strict, strategy_option=option)
    source = replace(source, options=options)
    sight = look(source, diagnostics, executor, open_progress=open_progress)
    if sight.checkpoint is None:
        assert sight.error is not None, "else there is a checkpoint"
        if not isinstance(sight.error, PlanError | StrategyError):
            raise sight.error
        return _Side(name, sight, [*catalog.damaged.values(), sight.error])
    diagnostics.add(
        *(diagnostic for diagnostic in find_nothing(sight.catalog) if diagnostic.code != "nothing")
    )
    problems = [diagnostic for diagnostic in diagnostics.errors if diagnostic.code != "replica"]
    notes = [*diagnostics.of("note", "warning"), *sight.of_files]
    if is_borrowed and diagnostics.findings:
        problems = [_explain_by_borrowing(problem, sight.catalog) for problem in problems]
        notes.append(BORROWED)
    problems = [*catalog.errors(), *problems]
    errors = [*diagnostics.failures, *sight.of_files.failures]
    errors += [PlanError(problems)] if problems else []
    replicas = [diagnostic for diagnostic in diagnostics.errors if diagnostic.code == "replica"]
    return _Side(name, sight, errors, replicas, notes)


def _checkpoints(a: _Side, b: _Side) -> tuple[Checkpoint, Checkpoint]:
    """Return both checkpoints; raise all that prevents a comparison as one error."""
    errors = [error for side, other in ((a, b), (b, a)) for error in _errors_of(side, other)]
    if not errors and a.checkpoint is not None and b.checkpoint is not None:
        problems = [*find_shared_problems([a.checkpoint, b.checkpoint])]
        if not problems:
            return a.checkpoint, b.checkpoint
        errors.append(PlanError(problems))
    if replicas := [*chain(*(side.findings(is_empty=False) for side in (a, b)))]:
        errors.append(PlanError(replicas))
    raise errors[0] if len(errors) == 1 else CombinedError(errors)


def _errors_of(side: _Side, other: _Side) -> list[CkptToolError]:
    errors, catalog = side.errors, side.sight.catalog
    read = None if other.errors or other.checkpoint is None else other.checkpoint.whole
    if errors and read is not None and _looks_merged(catalog, read.metas):
        errors = [_merged_error(catalog, other.name)]
    return [error.on_side(side.name) for error in errors]


def _notes(a: _Side, b: _Side) -> Iterator[Diagnostic]:
    for note in dict.fromkeys((*a.notes, *b.notes)):
        names = [side.name for side in (a, b) if note in side.notes]
        yield note if len(names) > 1 else note.on_side(names[0])


def compare_names(a: Collection[str], b: Collection[str]) -> Iterator[Diagnostic]:
    """Yield a note if two checkpoints have tensors, and no name in common."""
    if a and b and {*a}.isdisjoint(b):
        facts = f"one has {format_names(a, 1)}; the other {format_names(b, 1)}"
        hint = "--recipe NAME, for names of Hugging Face"
        yield Diagnostic("doubt", "no name is in common", hint, facts=facts)


def _of_other_types(weights: Iterable[TensorDifference]) -> Iterator[Diagnostic]:
    """Yield a note if --dtype makes weights comparable: in the narrower type, or in that of B."""
    names, words = list[str](), set[str]()
    for weight in weights:
        a, b = weight.a, weight.b
        if weight.kind == "dtype" and a and b and a.shape == b.shape:
            both = [DTYPES[b.dtype], DTYPES[a.dtype]]
            dtype = min(both, key=lambda it: it.itemsize).name
            if dtype in WORDS_OF_CASTS and CASTABLE.issuperset((a.dtype, b.dtype)):
                names.append(weight.name)
                words.add(WORDS_OF_CASTS[dtype])
    if names:
        message = f"values of {count(len(names), 'weight')} of another type are not compared"
        hint = f"--dtype {any_of(sorted(words))}"
        yield Diagnostic("doubt", message, hint, facts=format_names(names))


def _looks_merged(catalog: Catalog, full: Mapping[str, TensorMeta]) -> bool:
    """Return whether the only file of ranks has full tensors, by the shapes of another checkpoint.

    So MindSpore merges: into ``OUT/rank_0/``.
    """
    if not catalog.needs_strategy or len(catalog.paths) != 1:
        return False
    common = [(meta, full[name]) for name, meta in catalog.metas.items() if name in full]
    return bool(common) and all(meta.shape == other.shape for meta, other in common)


def _merged_error(catalog: Catalog, other: str) -> PlanError:
    (path,) = catalog.paths
    message = f"looks merged: its tensors have the full shapes of {other}"
    hint = f"{quote(path)} in place of {quote(catalog.root)}"
    facts = "it is a folder with the file of one rank"
    return PlanError([Diagnostic("source", message, hint=hint, facts=facts, where=catalog.root)])


def fold_alike(named: Mapping[str, Diagnostic], names: Iterable[str]) -> Iterator[Diagnostic]:
    """Yield what is wrong with tensors, a pattern of names each.

    ``named`` has the problem of each, with a verb first.  Patterns match none of the other
    ``names``.
    """
    alike: dict[Diagnostic, list[str]] = {}
    for name, problem in named.items():
        alike.setdefault(problem, []).append(name)
    for problem, members in alike.items():
        verb, _, rest = problem.message.partition(" ")
        for folded, number in fold_subtrees(members, {*named, *names}):
            yield replace(problem, message=f"{folded}: {count(number, 'tensor', verb)} {rest}")


def _explain_by_borrowing(problem: Diagnostic, b: Catalog) -> Diagnostic:
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
        return _kind(self.a.meta, self.b.meta)

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
        """The tensors of both sides that are read to compare their values."""
        return tuple(side for side in (self.a, self.b) if side is not None)


def _kind(a: TensorMeta, b: TensorMeta) -> Kind | None:
    if a.dtype != b.dtype:
        return "dtype"
    if a.header_shape != b.header_shape:
        return "shape"
    return "text" if a.text != b.text else None


def compare_headers(a: Metas, b: Metas) -> Iterator[TensorDifference]:
    """Yield how the headers of two sides differ; of some tensors only the name may be known."""
    for name in dict.fromkeys((*a, *b)):
        of_a, of_b = a.get(name), b.get(name)
        if name not in b:
            kind: Kind | None = "only in A"
        elif name not in a:
            kind = "only in B"
        else:
            kind = None if of_a is None or of_b is None else _kind(of_a, of_b)
        if kind is not None:
            a_side, b_side = (
                None if meta is None else ComparedTensor.of(meta) for meta in (of_a, of_b)
            )
            yield TensorDifference(name, None, kind, a_side, b_side)


def differing_values(metas: Metas, deltas: Mapping[str, TensorDelta]) -> Iterator[TensorDifference]:
    """Yield the full tensors whose values differ; the headers of both sides are equal."""
    for name, delta in deltas.items():
        if delta.count and (meta := metas[name]) is not None:
            side = ComparedTensor.of(meta)
            yield TensorDifference(name, None, "values", side, side, _value_difference(meta, delta))


def _pairs(a: Sequence[OutputTensor], b: Sequence[OutputTensor]) -> Iterator[_Pair]:
    sides = [_by_name(sources) for sources in (a, b)]
    for name in dict.fromkeys((*sides[0], *sides[1])):
        of_a, of_b = (side.get(name, {}) for side in sides)
        numbers = sorted({rank for rank in (*of_a, *of_b) if rank is not None})
        ranks: list[int | None] = [*numbers] if numbers else [None]
        for rank in ranks:
            in_a, in_b = (by_rank.get(rank, by_rank.get(None)) for by_rank in (of_a, of_b))
            yield _Pair(name, rank, in_a, in_b)


def _by_name(tensors: Sequence[OutputTensor]) -> dict[str, dict[int | None, OutputTensor]]:
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
    stats_of = dict(compare_tensors(compared, executor, options, on_progress))
    differences = []
    for i, pair in enumerate(pairs):
        delta = stats_of[i].differences[0] if i in stats_of else None
        kind = pair.kind or ("values" if delta is not None and delta.count else None)
        if kind is not None:
            a, b = (
                None if side is None else ComparedTensor.of(side.meta) for side in (pair.a, pair.b)
            )
            values = None if delta is None else _value_difference(pair.sides[0].meta, delta)
            differences.append(TensorDifference(pair.name, pair.rank, kind, a, b, values))
    if not options.wants_statistics:
        return tuple(differences), None
    changes = (_change(pairs[i], stats) for i, stats in stats_of.items())
    return tuple(differences), tuple(sorted(changes, key=lambda change: change.order))


def _value_difference(meta: TensorMeta, delta: TensorDelta) -> ValueDifference:
    elements, numbers = math.prod(meta.shape), (delta.max_abs, delta.max_rel)
    return ValueDifference(
        *(elements, delta.count, delta.same_number, delta.nans, *numbers, delta.first)
    )


def _change(pair: _Pair, stats: TensorStats) -> TensorChange:
    assert pair.a is not None, "its values were compared"
    (delta,) = stats.differences
    norm = distance = max_abs = None
    if stats.numbers is not None:
        norm, distance = stats.numbers.norm, 0.0
        max_abs = delta.max_abs if delta.differs else 0.0
        if (changed := delta.distances) is not None:
            distance = changed.norm
            distance = math.nan if changed.nans else math.inf if changed.infinities else distance
    relative = distance
    if norm is not None and distance:
        relative = distance / norm if norm else distance * math.inf
    meta, numbers = pair.a.meta, (relative, distance, norm, max_abs)
    return TensorChange(pair.name, pair.rank, meta.dtype, meta.header_shape, *numbers, delta.nans)
