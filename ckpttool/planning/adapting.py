"""Adapters, added to the weights of a plan (``--lora``).

Each weight that an adapter names gets two more terms for a pair of its tensors: one has rows, the
other columns, and their product is added.  If a recipe makes the output of several weights, rows
and columns are rearranged as it rearranges those of the weights: all are seen in the space of its
`Arrangement`, with one more axis, the rank of the product.  A copy of a weight gets what the weight
gets: training that resumes from a master copy would undo the sum.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import chain
from shlex import quote
from typing import NamedTuple

from msgspec.structs import replace

from ckpttool.checkpoint.checkpoint import Checkpoint
from ckpttool.checkpoint.interpret import records_of_files
from ckpttool.model.adapters import MAX_RANK, Adapter, AdapterTensor, LowRank
from ckpttool.model.belonging import weight_of
from ckpttool.model.dtypes import CASTABLE
from ckpttool.model.joining import format_names
from ckpttool.model.plan import Term, Transfer
from ckpttool.model.region import Arrangement, Region, common
from ckpttool.model.slicing import FullTensor, Part, RearrangedSlicing
from ckpttool.problems import Diagnostic
from ckpttool.wording import any_of, count, format_shape, shorten


def adapt(
    checkpoint: Checkpoint, transfers: Sequence[Transfer], listed: Collection[str] = ()
) -> tuple[list[Transfer], list[Diagnostic]]:
    """Return the transfers with the terms of all adapters; what is wrong, and what was done.

    ``listed`` are the names in the strategy of the target.
    """
    adapted, found = [*transfers], list[Diagnostic]()
    for number, adapter in enumerate(checkpoint.options.tensors.lora, 1):
        adapting = _Adapting(adapter, number, adapted, checkpoint, listed)
        adapted = [adapting.with_terms(transfer) for transfer in adapted]
        found += adapting.found()
    return adapted, found


class _Product(NamedTuple):
    """A pair of tensors and their weight; ``is_turned`` if its columns become rows."""

    pair: LowRank
    weight: Part
    seen: Region  # the elements that the output has of the weight, in the space of both
    is_turned: bool
    rank: int
    scale: float


_EXPERT = 1 << 40  # where an expert lies on the axis of its stack, which has others on both sides
_OTHER = "an adapter of this model"
_BY_MERGE = "`merge` with --recipe and --lora, then `split` of its folder with --recipe"
_BY_PEFT = "`merge_and_unload` of the PEFT that saved it"


class _Adapting:
    def __init__(
        self,
        adapter: Adapter,
        number: int,
        transfers: Sequence[Transfer],
        checkpoint: Checkpoint,
        listed: Collection[str],
    ) -> None:
        self._adapter, self._input, self._belongings = adapter, number, checkpoint.belongings
        self._tensors = {it.name: it for it in records_of_files(adapter.catalog, "full")}
        self._pairs, self._lonely, self._others = adapter.named
        self._has_recipe = checkpoint.options.tensors.recipe is not None
        stored = checkpoint.catalog.metas if self._has_recipe else checkpoint.whole.metas
        self._stored = [name for name in stored if name not in self._belongings]
        # A recipe would give the outputs names that the target does not list.
        self._keeps_names = not {*self._stored}.isdisjoint(listed)
        # A copy that a recipe makes has the slicing of what it copies, and none of its names.
        # A name that the source has is that of its tensor, whatever the output calls by it.
        self._called = {
            id(transfer.source.slicing): name
            for transfer in transfers
            if (name := self._weight(transfer.name)) and name not in stored
        }
        self._scales: dict[str, float] = {}  # by the weights that are used, and their copies
        self._refused: list[Diagnostic] = []
        self._met = set[str]()

    def with_terms(self, transfer: Transfer) -> Transfer:
        """Return a transfer with what the adapter adds to it."""
        terms = [*transfer.terms]
        for out, weights in self._named(transfer):
            for weight in weights:
                self._met.add(weight.name)
                product = self._product(transfer.source, out, weight)
                if isinstance(product, Diagnostic):
                    self._refused.append(product)
                else:
                    terms += self._terms(out, product)
        return replace(transfer, terms=tuple(terms)) if terms[len(transfer.terms) :] else transfer

    def _weight(self, name: str) -> str | None:
        """Return the weight whose numbers a tensor holds, if the adapter names it."""
        weight = weight_of(name, self._belongings)
        return weight if weight in self._pairs else None

    def _refusal(
        self, message: str, facts: str = "", hint: str = _OTHER, tensor: str | None = None
    ) -> Diagnostic:
        where = self._adapter.catalog.root
        return Diagnostic("lora", message, facts=facts, hint=hint, tensor=tensor, where=where)

    def _named(self, transfer: Transfer) -> Iterator[tuple[Arrangement, Sequence[Part]]]:
        """Yield the weights of an output that the adapter names: those of the source, or itself."""
        slicing = transfer.source.slicing
        out = whole = Arrangement.whole(transfer.source.meta.shape)
        parts: tuple[Part, ...] = (Part(transfer.source.name, slicing, whole),)
        if isinstance(slicing, RearrangedSlicing):
            out, parts = slicing.arrangement, slicing.parts
        weights = [
            replace(part, name=name)
            for part in parts
            if (
                name := self._weight(part.name)
                or self._called.get(id(part.slicing))
                or self._within(part)
            )
        ]
        yield out, weights
        copied = self._called.get(id(slicing))
        if copied is not None and copied not in (weight.name for weight in weights):
            yield whole, [Part(copied, slicing, whole)]

    def _within(self, part: Part) -> str | None:
        """Return a weight that the adapter names, if a part was made of it and has moved rows."""
        slicing = part.slicing
        stored = slicing.stored_names if isinstance(slicing, RearrangedSlicing) else ()
        return next(filter(None, map(self._weight, stored)), None)

    def _product(self, tensor: FullTensor, out: Arrangement, weight: Part) -> _Product | Diagnostic:
        """Return what is added to a weight, or why it does not fit."""
        pair, shape, name = self._pairs[weight.name], weight.slicing.shape, weight.name
        sides = [(side, self._tensors[side.name].meta) for side in (pair.rows, pair.columns)]
        fitting = (it for it in sides if len(it[0].axes) == len(it[1].shape))
        rank = min((side.rank_in(meta.shape) for side, meta in fitting), default=0)
        is_copy = weight_of(tensor.name, self._belongings) != tensor.name
        if tensor.meta.dtype not in CASTABLE:
            message, hint = f"nothing can be added to {tensor.meta.dtype}", any_of(sorted(CASTABLE))
            return self._refusal(message, "", f"a base in {hint}", name)
        if tensor.own_ranks:
            message = "an adapter takes full tensors, and each file is read by itself"
            return self._refusal(message, "", "merge or reshard, with -s", name)
        if isinstance(tensor.slicing, RearrangedSlicing) and tensor.slicing.padding == "mean":
            hint = "--lora in one run, and --pad-with in the next"
            return self._refusal("nothing is added to a mean of rows", "", hint, name)
        if self._within(weight) == name:
            message = "its rows move after a recipe, so nothing can be added"
            hint = "--lora in one run, and --pad-vocab or --fused in the next"
            return self._refusal(message, f"{tensor.name} is made of it", hint, name)
        for side, meta in sides:
            is_like = len(shape) == pair.ndim
            wanted = side.shape(shape, rank) if is_like else ()
            if meta.shape != wanted or not rank:
                expected = format_shape(wanted) if is_like else f"a weight of {pair.ndim} axes"
                facts = f"{meta.name} {format_shape(meta.shape)}, expected {expected}"
                hint = f"--exclude {quote(tensor.name)}" if is_copy else _OTHER
                return self._refusal("a shape is not that of the weight", facts, hint)
            if meta.dtype not in CASTABLE or rank > MAX_RANK:
                facts = f"{meta.name} {meta.dtype} {format_shape(meta.shape)}"
                return self._refusal("this type or rank cannot be added", facts)
        try:
            scale = self._adapter.scale_of(pair.module, rank)
        except LookupError:
            lacks = "no adapter_config.json beside it"
            facts = (
                lacks if self._adapter.config is None else "no lora_alpha in adapter_config.json"
            )
            hint = f"--lora {self._adapter.catalog.root}:SCALE, such as alpha / {rank}"
            return self._refusal("nothing says the scale", facts, hint)
        except ValueError as error:
            hint = "the adapter_config.json saved with this file, or --lora FILE:SCALE"
            message = "the rank is not that of the configuration"
            return self._refusal(message, str(error), hint, name)
        seen = common(out.box, weight.arrangement.box)
        assert seen is not None, "the output has elements of the weight"
        is_turned = _is_turned(out, weight.arrangement, seen.shape)
        if is_turned is None:
            message = "rows and columns become one axis, so nothing can be added"
            return self._refusal(message, "", "--lora in one run, and --recipe in the next", name)
        self._scales[tensor.name if is_copy else name] = scale
        return _Product(pair, weight, seen, is_turned, rank, scale)

    def _terms(self, out: Arrangement, product: _Product) -> Iterator[Term]:
        """Yield the terms of rows and of columns."""
        *lead, rows, columns = out.axes
        rank, within = (out.box.ndim,), out.bounds(product.seen)
        of_rows = self._side(out, (*lead, rows, rank), columns, 0, product)
        yield Term(of_rows, 1.0, self._input, "rows", within)
        of_columns = self._side(out, (*lead, rank, columns), rows, 1, product)
        yield Term(of_columns, product.scale, self._input, "columns", within)

    def _side(
        self,
        out: Arrangement,
        axes: tuple[tuple[int, ...], ...],
        lost: tuple[int, ...],
        number: int,
        product: _Product,
    ) -> FullTensor:
        """Return the rows (0) or the columns (1), which lack the factors of the other axis."""
        start, stop = [*out.box.start], [*out.box.stop]
        for factor in lost:
            start[factor], stop[factor] = product.seen.start[factor], product.seen.start[factor] + 1
        box = Region((*start, 0, _EXPERT), (*stop, product.rank, _EXPERT + 1))
        part = self._part(product, number, out.box.ndim)
        slicing = RearrangedSlicing(Arrangement(axes, box), (part,), "zero")
        return self._tensors[part.name].rearranged(slicing)

    def _part(self, product: _Product, number: int, rank_axis: int) -> Part:
        """Return a tensor of the adapter as a part of rows (0) or columns (1)."""
        weight, pair = product.weight, product.pair
        side: AdapterTensor = (pair.rows, pair.columns)[number ^ product.is_turned]
        stack, first = rank_axis + 1, _EXPERT - side.expert
        of_weight = (  # RANK is the last, RANK_STACK the first behind those of the weight
            *weight.arrangement.axes,
            *((rank_axis, stack), (stack, rank_axis), (rank_axis,)),
        )
        tensor, (row, *others) = self._tensors[side.name], weight.start or (0,) * pair.ndim
        row += side.weight * (tensor.meta.shape[0] // side.weights)
        starts = (row, *others, 0, 0, 0)
        box = weight.arrangement.box
        arrangement = Arrangement(
            tuple(of_weight[axis] for axis in side.axes),
            Region((*box.start, 0, first), (*box.stop, product.rank, first + side.experts)),
        )
        start = tuple(starts[axis] for axis in side.axes)
        return Part(side.name, tensor.slicing, arrangement, start)

    def found(self) -> Iterator[Diagnostic]:
        """Yield what is wrong with the adapter, or what it changes."""
        config, refused = self._adapter.config, self._refused
        if config is not None and config.refused:
            yield self._refusal("only PEFT can add this adapter", config.refused, _BY_PEFT)
            return
        for name, other in self._lonely.items():
            message = f"a tensor of the adapter is there without its {other}"
            refused.append(self._refusal(message, "", "the complete file", name))
        unmet = {
            name: (pair.rows.name, pair.columns.name)
            for name, pair in self._pairs.items()
            if name not in self._met and pair.rows.expert < pair.rows.experts
        }
        unused = "{} of the adapter would not be used"
        is_adapter = bool(self._pairs or self._lonely)
        if self._others and is_adapter:
            message = unused.format(count(len(self._others), "tensor"))
            refused.append(self._refusal(message, format_names(self._others), _BY_PEFT))
        if unmet:
            message = unused.format(count(len({*chain(*unmet.values())}), "tensor"))
            sides = format_names(self._stored, 1), format_names(unmet, 1)
            has_names = self._met or self._has_recipe
            by_recipe = _BY_MERGE if self._keeps_names else "--recipe of the family"
            hint = _OTHER if has_names else f"{by_recipe}, or {_OTHER}"
            facts = "the source has {}, the adapter {}".format(*sides)
            refused.append(self._refusal(message, facts, hint))
        if not is_adapter:
            message = "no tensor is called as those of an adapter"
            refused.append(self._refusal(message, format_names(self._others)))
        yield from refused
        if not refused:
            scales = shorten([f"{scale:g}" for scale in sorted({*self._scales.values()})], 3)
            copies = [name for name in self._scales if name not in self._pairs]
            weights = count(len(self._scales) - len(copies), "weight")
            more = f"and to copies: {format_names(copies)}" if copies else ""
            message = f"added to {weights}, times {scales}"
            where = self._adapter.catalog.root
            yield Diagnostic("lora_used", message, facts=more, where=where)


def _is_turned(out: Arrangement, of_weight: Arrangement, sizes: tuple[int, ...]) -> bool | None:
    """Return whether columns of a weight become rows; None if one axis would have both.

    ``sizes`` are those of the factors, of the elements that the output has of the weight.
    """
    if len(out.axes) < 2:
        return None
    *_, rows, columns = ({it for it in axis if sizes[it] > 1} for axis in out.axes)
    of_stack = {it for it in chain(*out.axes[:-2]) if sizes[it] > 1}
    *_, of_rows, of_columns = map(frozenset, of_weight.axes)
    if of_stack.isdisjoint(of_rows | of_columns):
        if rows <= of_rows and columns <= of_columns:
            return False
        if rows <= of_columns and columns <= of_rows:
            return True
    return None
