"""Tensors whose rows are reordered, added or removed.

Ranks that each fused their own parts hold ``[gate_0; up_0]``, ``[gate_1; up_1]``.  For another
number of slices the rows are regrouped (`regroup`).  `resize` pads a vocabulary that does not
divide over the ranks of a target, or cuts its padding off.  New rows are zeros or means.  Both
functions make runs of rows of the stored tensor, in another place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from shlex import quote

from ckpttool.checkpoint.checkpoint import Checkpoint
from ckpttool.model.belonging import weight_of
from ckpttool.model.choices import VOCABULARY, Fusion, fused_axes
from ckpttool.model.dtypes import CASTABLE
from ckpttool.model.joining import format_names
from ckpttool.model.layout import Layout
from ckpttool.model.patterns import unmatched_problem
from ckpttool.model.region import Arrangement, Region
from ckpttool.model.slicing import BoxSlicing, FullTensor, Part, RearrangedSlicing
from ckpttool.problems import Diagnostic
from ckpttool.typed import PadWith
from ckpttool.wording import count, shorten


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
        of_slice = f"{sum(parts)}, for slices of {':'.join(map(str, parts))}"
        raise ValueError(f"{size} rows are not divisible by {slices} x {of_slice}")
    begins = [*accumulate(parts, initial=0)]
    place = 0
    for index in range(slices):
        for part, begin in zip(parts, begins, strict=False):
            yield place, (begin * slices + index * part) * unit, part * unit
            place += part * unit


def resize(tensor: FullTensor, rows: int, padding: PadWith = "zero") -> FullTensor:
    """Return a tensor with so many rows; new ones are zero, or the mean of the others."""
    kept = min(rows, tensor.meta.shape[0])
    return _moved(tensor, 0, rows, [(0, 0, kept)], padding)


def _moved(
    tensor: FullTensor,
    axis: int,
    size: int,
    runs: Sequence[tuple[int, int, int]],
    padding: PadWith = "zero",
) -> FullTensor:
    """Return a tensor of ``size`` rows along an axis, from runs: place, stored place, number."""
    shape = (*tensor.meta.shape[:axis], size, *tensor.meta.shape[axis + 1 :])
    whole = Arrangement.whole(shape)
    parts = []
    for place, at, rows in runs:
        start, stop = [0] * len(shape), [*shape]
        start[axis], stop[axis] = place, place + rows
        box = Region(tuple(start), tuple(stop))
        begin = tuple(at if number == axis else 0 for number in range(len(shape)))
        parts.append(Part(tensor.name, tensor.slicing, Arrangement(whole.axes, box), begin))
    is_padded = sum(rows for _, _, rows in runs) < size
    return tensor.rearranged(RearrangedSlicing(whole, tuple(parts), padding if is_padded else ""))


class RowChanges:
    """The changes of rows that the user wants, made tensor by tensor; it collects problems."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        options = checkpoint.options.tensors
        self._checkpoint = checkpoint
        self._fusions = options.fusions
        self._of_recipe = () if options.recipe is None else options.recipe.fusions
        self._wanted = options.vocabulary_rows
        self._patterns = options.vocabulary
        self._where = checkpoint.catalog.root
        self._resized: dict[str, int] = {}  # rows that there were, by name
        self._averaged: dict[str, None] = {}  # names of those whose new rows are means
        self._others: dict[str, int] = {}  # those of other matrices
        self._unlike: dict[str, tuple[str, str]] = {}  # name to why it cannot, and a remedy
        done = checkpoint.rearranged
        self._called = {} if done is None else done.called
        self.regrouped_by: set[str] = set() if done is None else {*done.regrouped_by}
        self._effective = {*self.regrouped_by}

    def resized(self, tensor: FullTensor) -> FullTensor:
        """Return a tensor with the rows that the user wants of a vocabulary; others as they are."""
        if self._wanted is None or not tensor.meta.shape:
            return tensor
        before = tensor.meta.shape[0]
        if not self._is_of_vocabulary(tensor.name):
            if tensor.meta.shape[1:]:
                self._others[tensor.name] = before
            return tensor
        self._resized[tensor.name] = before
        after = self._checkpoint.options.tensors.rows_for(before)
        if after is None or after == before or not self._may_move(tensor):
            return tensor
        return resize(tensor, after, "mean" if before and self._is_averaged(tensor) else "zero")

    def _is_averaged(self, tensor: FullTensor) -> bool:
        """Return whether new rows are means: of weights and their copies, as states begin at 0."""
        name = tensor.name
        weight = weight_of(name, self._checkpoint.belongings)
        if weight is None or self._checkpoint.options.tensors.pad_with == "zero":
            return False
        if tensor.meta.dtype not in CASTABLE:
            self._unlike[name] = (f"rows in {tensor.meta.dtype} have no mean", "--pad-with zero")
        self._averaged[name] = None
        return True

    def regrouped(self, tensor: FullTensor, layouts: Sequence[Layout]) -> FullTensor:
        """Return a tensor with its rows as the slices of a target fuse them."""
        names = (tensor.name, self._called.get(tensor.name, tensor.name))
        fusions = self._matching(self._fusions, names) or self._matching(self._of_recipe, names)
        if not fusions or not tensor.meta.shape:
            return tensor
        self.regrouped_by.update(fusion.name for fusion in fusions)
        if len(fusions) > 1:
            self._unlike[tensor.name] = "several --fused are about it", "one --fused for it"
        has_own_slices = isinstance(tensor.slicing, BoxSlicing) or tensor.own_ranks
        if len(fusions) > 1 or (has_own_slices and not self._may_move(tensor)):
            return tensor
        ndim = len(tensor.meta.shape)
        axes = fused_axes(tensor.name, ndim) or (tuple(range(1, ndim)) if ndim > 2 else (0,))
        is_made = isinstance(tensor.slicing, RearrangedSlicing)  # with whole parts
        before = (1,) * len(axes) if is_made else tensor.layout.count_cuts(axes)
        after = layouts[0].count_cuts(axes)
        changed = [it for it in zip(axes, before, after, strict=True) if it[1] != it[2]]
        if changed:
            self._effective.update(fusion.name for fusion in fusions)
        if is_made and tensor.name in self._resized:
            reason, hint = "it is one of the vocabulary, too", "--vocab with other names"
            self._unlike[tensor.name] = reason, hint
        elif len(changed) > 1 or any(layout.count_cuts(axes) != after for layout in layouts):
            reason, hint = "its slices change along several axes", "a target that shards one"
            self._unlike[tensor.name] = reason, hint
        elif changed and self._may_move(tensor):
            try:
                return regroup(tensor, fusions[0].parts, *changed[0])
            except ValueError as error:
                self._unlike[tensor.name] = str(error), "--fused with the parts of this weight"
        return tensor

    def _may_move(self, tensor: FullTensor) -> bool:
        """Return whether rows of a tensor can move; say it if not."""
        name, belongs = tensor.name, self._checkpoint.belonging(tensor.name)
        is_scaled = belongs.scale is not None or name in self._checkpoint.scales[0]
        if is_scaled or belongs.role == "scale":
            reason, hint = "its scales are those of blocks of rows", "a run with --dtype before"
            self._unlike[name] = reason, hint
        elif tensor.own_ranks:
            self._unlike[name] = "each file is read by itself", "merge or reshard, with -s"
        elif isinstance(tensor.slicing, BoxSlicing):
            self._unlike[name] = "the checkpoint describes its slices", "merge in a run before"
        return name not in self._unlike

    def _matching(self, fusions: Sequence[Fusion], names: Sequence[str]) -> list[Fusion]:
        return [it for it in fusions if any(map(it.pattern.matches, names))]

    def _is_of_vocabulary(self, name: str) -> bool:
        if not self._patterns:
            return self._checkpoint.is_of_vocabulary(name)
        names = (name, self._checkpoint.owner_of(name))
        return any(any(map(pattern.matches, names)) for pattern in self._patterns)

    def refuses(self, name: str) -> bool:
        """Return whether a tensor of the vocabulary cannot get the rows that are wanted."""
        rows_for = self._checkpoint.options.tensors.rows_for
        return name in self._resized and rows_for(self._resized[name]) is None

    def found(self) -> Iterator[Diagnostic]:
        """Yield what is wrong, and what was done."""
        yield from self.refused()
        if lacking := [it.name for it in self._fusions if it.name not in self.regrouped_by]:
            what = shorten(map(repr, lacking))
            yield unmatched_problem(what, self._checkpoint.metas, self._where)
        idle = self.regrouped_by - self._effective
        if (names := [it.name for it in self._fusions if it.name in idle]) and not self._unlike:
            message = f"--fused changes nothing of {shorten(names)}"
            facts = "source and target have as many slices along the axis that is fused"
            yield Diagnostic("doubt", message, facts=facts, where=self._where)
        if self._wanted is not None:
            yield from self._found_of_vocabulary(*self._wanted)

    def refused(self) -> Iterator[Diagnostic]:
        """Yield a problem for each tensor whose rows cannot move."""
        for name, (reason, hint) in self._unlike.items():
            yield self._problem("rows cannot be moved", reason, hint, name)

    def _found_of_vocabulary(self, kind: str, number: int) -> Iterator[Diagnostic]:
        names = self._resized
        for pattern in self._patterns:
            if not any(map(pattern.matches, names)):
                yield unmatched_problem(repr(pattern.text), self._checkpoint.metas, self._where)
        if not names and not self._patterns:
            facts = f"looked for {shorten(VOCABULARY)}"
            message = "no tensor is known as one of the vocabulary"
            yield self._problem(message, facts, "--vocab NAME")
        sizes = {*names.values()}
        if len(sizes) > 1:
            facts = shorten((f"{name}: {rows}" for name, rows in names.items()), 3)
            hint = "--vocab with the names of those of one size"
            yield self._problem("tensors of the vocabulary have several sizes", facts, hint)
            return
        for before in sizes:
            after, tensors = self._checkpoint.options.tensors.rows_for(before), format_names(names)
            if after is None:
                message = f"the vocabulary has {before} rows, and {number} are wanted"
                more = f"--pad-vocab multiple:{number}, or --cut-vocab {number}"
                hint = f"--pad-vocab {number}" if kind == "cut" else more
                yield self._problem(message, tensors, hint)
            elif after != before:
                message = f"{count(len(names), 'tensor')} with {after} rows, not {before}"
                if self._averaged:
                    tensors += f"; new rows are means in {format_names(self._averaged)}"
                yield Diagnostic("resized", message, facts=tensors, where=self._where)
            if alike := [name for name, rows in self._others.items() if rows == before]:
                message = f"{count(len(alike), 'other tensor', 'have')} {before} rows, too"
                hint = f"--vocab {quote(alike[0])} beside the others, if it is of the vocabulary"
                facts = format_names(alike)
                yield Diagnostic("not_resized", message, facts=facts, hint=hint, where=self._where)

    def _problem(
        self, message: str, facts: str, hint: str, tensor: str | None = None
    ) -> Diagnostic:
        where = self._where
        return Diagnostic("options", message, facts=facts, hint=hint, tensor=tensor, where=where)
