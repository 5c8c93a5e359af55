"""Tensors whose rows lie in another order, or of which there are more or fewer.

Ranks that each fused their own parts hold ``[gate_0; up_0]``, ``[gate_1; up_1]``.  For another
number of slices the rows are regrouped (`regroup`).  A vocabulary that does not divide over the
ranks of a target is padded with rows of zeros, or its padding is cut off (`resize`).  Both are runs
of rows of the stored tensor, in another place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from msgspec.structs import replace

from ckpttool.checkpoint.checkpoint import Checkpoint
from ckpttool.model.layout import Layout
from ckpttool.model.plan import Term
from ckpttool.model.region import Arrangement, Region
from ckpttool.model.slicing import BoxSlicing, FullTensor, Part, RearrangedSlicing
from ckpttool.planning.fused_weights import count_cuts, fused_axes
from ckpttool.problems import Diagnostic
from ckpttool.wording import count, shorten

# The last but one component of the names of embeddings and heads: Hugging Face's, MindFormers'.
VOCABULARY = ("embed_tokens", "word_embeddings", "tok_embeddings", "lm_head", "output_layer")


def regroup(
    tensor: FullTensor, parts: Sequence[int], axis: int, before: int, after: int
) -> FullTensor:
    """Return a tensor as ``after`` slices have it that fuse their own parts, not ``before``.

    Raises
    ------
    ValueError
        The slices do not have so many equal units.
    """
    size = tensor.meta.shape[axis]
    stored, wanted = ([*_runs(size, parts, slices)] for slices in (before, after))
    runs = []
    for place, first, rows in wanted:
        for at, start, number in stored:
            low, high = max(first, start), min(first + rows, start + number)
            if low < high:
                runs.append((place + low - first, at + low - start, high - low))
    return _moved(tensor, axis, size, runs)


def _runs(size: int, parts: Sequence[int], slices: int) -> Iterator[tuple[int, int, int]]:
    """Yield the runs of a fused tensor: place, first row where parts are whole, and number."""
    unit, rest = divmod(size, slices * sum(parts))
    if rest:
        raise ValueError(f"{size} rows in {slices} slices of {':'.join(map(str, parts))}")
    begins = [*accumulate(parts, initial=0)]
    place = 0
    for index in range(slices):
        for part, begin in zip(parts, begins, strict=False):
            yield place, (begin * slices + index * part) * unit, part * unit
            place += part * unit


def resize(tensor: FullTensor, rows: int) -> FullTensor:
    """Return a tensor with so many rows; those that it lacks are zero."""
    kept = min(rows, tensor.meta.shape[0])
    return _moved(tensor, 0, rows, [(0, 0, kept)])


def _moved(
    tensor: FullTensor, axis: int, size: int, runs: Sequence[tuple[int, int, int]]
) -> FullTensor:
    """Return a tensor of ``size`` rows along an axis, from runs: place, stored place, number."""
    assert not isinstance(tensor.slicing, RearrangedSlicing), "it is as files have it"
    shape = (*tensor.meta.shape[:axis], size, *tensor.meta.shape[axis + 1 :])
    axes = tuple((number,) for number in range(len(shape)))
    parts = []
    for place, at, rows in runs:
        start, stop = [0] * len(shape), [*shape]
        start[axis], stop[axis] = place, place + rows
        box = Region(tuple(start), tuple(stop))
        begin = tuple(at if number == axis else 0 for number in range(len(shape)))
        parts.append(Part(tensor.name, tensor.slicing, Arrangement(axes, box), begin))
    whole = Arrangement(axes, Region.whole(shape))
    has_zeros = sum(rows for _, _, rows in runs) < size
    slicing = RearrangedSlicing(whole, tuple(parts), has_zeros)
    return FullTensor(tensor.meta.of_shape(shape), slicing, tensor.known_by)


class RowChanges:
    """What the user wants of rows, done tensor by tensor; ``problems`` are of all tensors."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        options = checkpoint.options.tensors
        self._fusions = options.fusions
        self._wanted = options.vocabulary_rows
        self._patterns = options.vocabulary
        self._where = checkpoint.catalog.root
        self._regrouped = list[str]()
        self._resized: dict[str, tuple[int, int]] = {}
        self._unlike: dict[str, str] = {}
        self._met = set[str]()

    def resized(self, tensor: FullTensor) -> FullTensor:
        """Return a tensor with the rows that the user wants of a vocabulary; others as they are."""
        if self._wanted is None or not tensor.meta.shape or not self._is_of_vocabulary(tensor.name):
            return tensor
        kind, number = self._wanted
        before = tensor.meta.shape[0]
        after = -(-before // number) * number if kind == "multiple" else number
        self._resized[tensor.name] = before, after
        is_wrong = after < before if kind != "cut" else after > before
        return tensor if is_wrong or after == before else resize(tensor, after)

    def regrouped(self, terms: tuple[Term, ...], layouts: Sequence[Layout]) -> tuple[Term, ...]:
        """Return the terms of a tensor with its rows as the slices of a target fuse them."""
        tensor = terms[0].source
        fusions = [it for it in self._fusions if it.pattern.matches(tensor.name)]
        if not fusions or not tensor.meta.shape:
            return terms
        self._met.update(it.pattern.text for it in fusions)
        if isinstance(tensor.slicing, BoxSlicing | RearrangedSlicing):
            self._unlike[tensor.name] = "it is not sharded by a strategy"
            return terms
        ndim = len(tensor.meta.shape)
        axes = fused_axes(tensor.name, ndim) or (0,)
        before = count_cuts(tensor.slicing.layout, axes)
        after = count_cuts(layouts[0], axes)
        changed = [
            (axis, *it) for axis, *it in zip(axes, before, after, strict=True) if it[0] != it[1]
        ]
        if len(changed) > 1 or any(count_cuts(it, axes) != after for it in layouts):
            self._unlike[tensor.name] = "its slices change along several axes"
        elif changed:
            (axis, old, new), parts = changed[0], fusions[0].parts
            try:
                source = regroup(tensor, parts, axis, old, new)
            except ValueError as error:
                self._unlike[tensor.name] = str(error)
            else:
                self._regrouped.append(tensor.name)
                return (replace(terms[0], source=source), *terms[1:])
        return terms

    def _is_of_vocabulary(self, name: str) -> bool:
        if self._patterns:
            return any(pattern.matches(name) for pattern in self._patterns)
        return name.split(".")[-2:-1] in [[word] for word in VOCABULARY]

    @property
    def is_regrouped(self) -> frozenset[str]:
        """The tensors whose parts go where they belong."""
        return frozenset(self._regrouped)

    def found(self) -> Iterator[Diagnostic]:
        """Yield what is wrong, and what was done."""
        for name, reason in self._unlike.items():
            yield self._problem("a fused weight cannot be regrouped", reason, "--fused", name)
        lacking = [it.pattern.text for it in self._fusions if it.pattern.text not in self._met]
        if lacking:
            message = f"no fused weight is called so: {shorten(lacking)}"
            yield self._problem(message, "", "--fused NAME=PARTS with another name")
        if self._wanted is None:
            return
        rows = {*self._resized.values()}
        if not rows:
            message = "no tensor is known as one of the vocabulary"
            yield self._problem(message, f"looked for {shorten(VOCABULARY)}", "--vocab PATTERN")
        if len({before for before, _ in rows}) > 1:
            facts = shorten((f"{name}: {it[0]}" for name, it in self._resized.items()), 3)
            yield self._problem("tensors of the vocabulary have several sizes", facts, "--vocab")
        for before, after in rows:
            kind, _ = self._wanted
            if after < before if kind != "cut" else after > before:
                other = "--cut-vocab" if kind != "cut" else "--pad-vocab"
                message = f"the vocabulary has {before} rows, and {after} are wanted"
                yield self._problem(message, shorten(self._resized, 3), f"{other} {after}")
            elif after != before:
                message = f"{count(len(self._resized), 'tensor')} with {after} rows, not {before}"
                facts = shorten(self._resized, 3)
                yield Diagnostic("resized", message, facts=facts, where=self._where)

    def _problem(
        self, message: str, facts: str, hint: str, tensor: str | None = None
    ) -> Diagnostic:
        where = self._where
        return Diagnostic("options", message, facts=facts, hint=hint, tensor=tensor, where=where)
