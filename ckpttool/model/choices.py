"""The choice of the tensors of a checkpoint, with their new names and element types.

It parses the options once and refuses malformed ones; commands apply it to each tensor.
`ckpttool.model.belonging` decides what belongs to an excluded parameter, and
`ckpttool.model.renames` decides new names, so commands need no rules of their own.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Literal, get_args

from msgspec import Struct
from msgspec.structs import force_setattr

from ckpttool.model.belonging import WEIGHT, Belonging, Belongings, owners_of
from ckpttool.model.dtypes import CAST_WORDS, CASTABLE, find_word
from ckpttool.model.patterns import Pattern, unmatched_problems
from ckpttool.model.renames import Rename, parse_renames
from ckpttool.model.tensors import TensorMeta
from ckpttool.problems import Diagnostic
from ckpttool.typed import OnOverflow, PadWith, require_choice
from ckpttool.wording import any_of, count, shorten

if TYPE_CHECKING:
    from ckpttool.model.adapters import Adapter
    from ckpttool.model.recipes import UsedRecipe


class Cast(Struct, frozen=True, dict=True):
    """A request for an element type: of the tensors that match a pattern, or of all weights.

    Raises
    ------
    ValueError
        The text does not begin with a type, or its regular expression is malformed.

    Examples
    --------
    >>> Cast("bf16:adam_*").dtype, Cast("float16").pattern
    ('BFloat16', None)
    """

    text: str

    def __post_init__(self) -> None:
        if self.dtype not in CAST_WORDS.values():
            word, colon, _ = self.text.partition(":")
            types = any_of(CAST_WORDS) + (colon and " before the colon")
            raise ValueError(f"{word!r} is not a type to cast to; expected {types}")
        _ = self.pattern  # a malformed one is refused here

    @cached_property
    def dtype(self) -> str:
        """The element type."""
        word, _, _ = self.text.partition(":")
        known = find_word(word)
        return CAST_WORDS.get(word.lower(), "" if known is None else known.name)

    @cached_property
    def pattern(self) -> Pattern | None:
        """The pattern of the tensors to cast; None for all weights."""
        _, colon, pattern = self.text.partition(":")
        return Pattern(pattern) if colon else None


# A component of the names of embeddings, heads and tables of experts: the last, or that before it.
VOCABULARY = (
    *("embed_tokens", "word_embeddings", "tok_embeddings", "lm_head", "output_layer"),
    "tid2eid",  # of DeepSeek-V4
)


def is_of_vocabulary(name: str) -> bool:
    """Return whether a name is usual for a tensor with a row for each word.

    >>> is_of_vocabulary("model.embed_tokens.weight"), is_of_vocabulary("model.norm.weight")
    (True, False)
    """
    return not {*VOCABULARY}.isdisjoint(name.split(".")[-2:])


# Words in a component of a name, by what is fused.  A plain fc1 lacks a gate.
_QKV = ("qkv", "wqkv", "w_pack", "c_attn", "query_key_value", "in_proj")
_GATE_UP = ("gate_up", "gate_hidden", "linear_fc1", "fc1_weight", "fc1_bias", "w13", "h_to_4h")
_GROUPED = "experts.weight1"  # Megatron-LM, grouped GEMM: stored transposed


def fused_axes(name: str, ndim: int) -> tuple[int, ...]:
    """Return the axes along which a weight may be fused, by its name; none if it is not fused.

    It is axis 0, as PyTorch and MindSpore store linear layers.  Some programs store the weights of
    experts and ``c_attn`` transposed; of three axes the first counts experts.

    Source: MindFormers' inference (``w_qkv``, ``w_gate_hidden``), Megatron-LM (``linear_fc1`` with
    swiglu, issue 2769), Megatron-DeepSpeed (``dense_h_to_4h``, issue 338), vLLM (``qkv_proj``,
    ``gate_up_proj``, ``w13_weight``), Transformers (Baichuan ``W_pack``, GPT-2 ``c_attn``, Llama 4
    ``experts.gate_up_proj``), InternLM ``wqkv``, PyTorch ``in_proj_weight``.

    Examples
    --------
    >>> fused_axes("layers.0.w_qkv.weight", 2), fused_axes("mlp.experts.w13_weight", 3)
    ((0,), (1, 2))
    >>> fused_axes("mlp.fc1.weight", 2)
    ()
    """
    if name.endswith(_GROUPED):
        return (ndim - 1,)
    components = name.lower().split(".")
    if not any(map(_is_fused, components)):
        return ()
    if ndim > 2:
        return tuple(range(1, ndim))
    may_be_transposed = "c_attn" in components or components[-2:-1] == ["experts"]
    return tuple(range(ndim)) if may_be_transposed else (0,)


@lru_cache(maxsize=1024)  # the names of a model have few components
def _is_fused(component: str) -> bool:
    words = f"_{component.lower()}_"
    return any(f"_{word}_" in words for word in _QKV + _GATE_UP)


class Fusion(Struct, frozen=True):
    """Names of weights that each rank fused for itself, and the sizes of their parts."""

    name: str
    pattern: Pattern
    parts: tuple[int, ...]

    @classmethod
    def parse(cls, text: str) -> Fusion:
        """Return a fusion from ``NAME=2`` or ``NAME=q:8,k:2,v:2``.

        A name without wildcards is a component of names.

        Raises
        ------
        ValueError
            The text is none of these.

        Examples
        --------
        >>> Fusion.parse("w_qkv=q:8,k:2,v:2").parts, Fusion.parse("linear_fc1=2").parts
        ((8, 2, 2), (1, 1))
        """
        name, _, of = text.rpartition("=")
        sizes = [part.rpartition(":") for part in of.split(",")]
        numbers = [
            int(size) if re.fullmatch(r"\d{1,6}", size, re.ASCII) else 0 for *_, size in sizes
        ]
        is_count = len(sizes) == 1 and not sizes[0][1]
        parts = (1,) * min(numbers[0], 1 << 10) if is_count else tuple(numbers)
        if not name or len(parts) < 2 or 0 in parts:
            raise ValueError(f"{text!r} is not NAME=2 or NAME=q:8,k:2,v:2")
        is_component = name.isidentifier()
        return cls(name, Pattern(f"re:(^|[.]){name}([.]|$)" if is_component else name), parts)


class TensorOptions(Struct, frozen=True, dict=True):
    """Options that choose tensors, and give them names and element types.

    Attributes
    ----------
    include, exclude
        Patterns of names.  A tensor is wanted if it matches any of ``include`` (or these are empty)
        and none of ``exclude``, in any order.  What belongs to an excluded parameter goes with it,
        unless ``include`` names it.
    weights_only
        Leave out optimizer state, gradients, copies such as averages, and counters.
    rename
        Rules for new names; the first that matches counts.  They are a mapping of patterns to
        names, pairs of both, or texts such as ``"OLD=NEW"``; see `ckpttool.model.renames`.
    shown_by
        The option that takes ``include``, for a command that only shows these tensors; "" for a
        command that leaves out the others.
    is_shared
        Whether the patterns are for several checkpoints.  Each then needs only one with a match.
    called
        The old name of each tensor that has a new name already: patterns are about old names.
    fixed
        The names of tensors that no cast is about, since a recipe gives them their type.
    dtype
        Element types, each as ``"bf16"`` or ``"bf16:PATTERN"``.  Without a pattern it is for the
        weights in Float64, Float32, Float16 or BFloat16 that match no other pattern.
    on_overflow
        What becomes of a number that is too large for its new type: an error, or Inf.
    recipe
        The names and axes of another framework, which all wanted tensors get.
    fused
        Weights that each rank fused for itself, such as ``"linear_fc1=2"``; see `Fusion`.
    pad_vocab, cut_vocab
        Rows of embedding and head: so many, or ``"multiple:64"``.
    pad_with
        What the new rows are: zero, or the mean of the others; those of states are zero.
    vocab
        Patterns of the names of these, in place of the usual names.
    lora
        Adapters, whose products are added to the weights.

    Raises
    ------
    ValueError
        A pattern or a rule is malformed, or a type is unknown.

    Examples
    --------
    >>> TensorOptions(exclude=["adam_*"]).excluded
    (Pattern(text='adam_*'),)
    """

    include: Collection[str] = ()
    exclude: Collection[str] = ()
    weights_only: bool = False
    rename: Mapping[str, str] | Collection[str | Rename] = ()
    shown_by: str = ""
    is_shared: bool = False
    called: Mapping[str, str] = {}
    fixed: Collection[str] = ()
    dtype: Collection[str] = ()
    on_overflow: OnOverflow = "error"
    recipe: UsedRecipe | None = None
    fused: Collection[str] = ()
    pad_vocab: str | int | None = None
    cut_vocab: str | int | None = None
    pad_with: PadWith = "zero"
    vocab: Collection[str] = ()
    lora: tuple[Adapter, ...] = ()

    def __post_init__(self) -> None:
        examples = {"include": "lm_head.*", "exclude": "adam_*", "dtype": "bf16"}
        examples |= {"fused": "linear_fc1=2", "vocab": "*.wte.weight"}
        for name, example in examples.items():
            given: object = getattr(self, name)
            texts: tuple[object, ...] = (given,)
            if isinstance(given, Iterable) and not isinstance(given, str):
                texts = tuple(given)
            if not all(isinstance(word, str) for word in texts):
                raise ValueError(f"{name}={given!r}, expected texts such as {example!r}")
            force_setattr(self, name, texts)
        _ = self.included, self.excluded, self.renames, self.casts  # what is malformed is refused
        _ = self.fusions, self.vocabulary, self.vocabulary_rows
        if self.recipe is not None and self.renames:
            raise ValueError("a recipe gives all names, so there are no rules for names beside it")
        require_choice("on_overflow", self.on_overflow, get_args(OnOverflow))
        require_choice("pad_with", self.pad_with, get_args(PadWith))
        if self.pad_with != "zero" and self.pad_vocab is None:
            raise ValueError("pad_with is for the rows of pad_vocab")

    @cached_property
    def included(self) -> tuple[Pattern, ...]:
        """The patterns of ``include``."""
        return tuple(map(Pattern, self.include))

    @cached_property
    def excluded(self) -> tuple[Pattern, ...]:
        """The patterns of ``exclude``, and those of the recipe for what it does not use."""
        unused = () if self.recipe is None else self.recipe.recipe.unused
        return tuple(map(Pattern, (*self.exclude, *unused)))

    @cached_property
    def renames(self) -> tuple[Rename, ...]:
        """The rules of ``rename``."""
        return tuple(parse_renames(self.rename))

    @cached_property
    def casts(self) -> tuple[Cast, ...]:
        """The requests of ``dtype``."""
        return tuple(map(Cast, self.dtype))

    @cached_property
    def fusions(self) -> tuple[Fusion, ...]:
        """The weights that each rank fused for itself."""
        return tuple(map(Fusion.parse, self.fused))

    @cached_property
    def vocabulary(self) -> tuple[Pattern, ...]:
        """The patterns of ``vocab``."""
        return tuple(map(Pattern, self.vocab))

    @cached_property
    def vocabulary_rows(self) -> tuple[Literal["pad", "cut", "multiple"], int] | None:
        """The change of the rows of a vocabulary, and the number; None if they stay."""
        if self.pad_vocab is None and self.cut_vocab is None:
            if self.vocab:
                raise ValueError("vocab names the tensors of pad_vocab or cut_vocab")
            return None
        if self.pad_vocab is not None and self.cut_vocab is not None:
            raise ValueError("pad_vocab does not go with cut_vocab")
        is_pad = self.pad_vocab is not None
        text = str(self.pad_vocab if is_pad else self.cut_vocab)
        number = text.removeprefix("multiple:") if is_pad else text
        if not number.isdigit() or not int(number):
            raise ValueError(f"{text!r} is not a number of rows, such as 64 or multiple:64")
        kind: Literal["pad", "cut", "multiple"] = "pad" if is_pad else "cut"
        return ("multiple" if text != number else kind), int(number)

    def rows_for(self, before: int) -> int | None:
        """Return the rows that take the place of so many of a vocabulary; None if they cannot."""
        if self.vocabulary_rows is None:
            return before
        kind, number = self.vocabulary_rows
        after = -(-before // number) * number if kind == "multiple" else number
        return None if (after > before if kind == "cut" else after < before) else after

    @property
    def words(self) -> tuple[str, ...]:
        """The options of a command line that shows or verifies these tensors."""
        given = (("--include", self.include), ("--exclude", self.exclude), ("--dtype", self.dtype))
        words = [word for option, values in given for it in values for word in (option, it)]
        words += self.recipe.words if self.recipe else ()
        return (*words, "--weights-only") if self.weights_only else (*words,)

    @property
    def are_changed(self) -> bool:
        """Whether tensors get the names and axes of a recipe, or other types.

        Float8 weights are then multiplied by their scales.
        """
        return bool(self.recipe or self.casts)

    @property
    def are_rearranged(self) -> bool:
        """Whether elements of an output lie elsewhere than in the same place of the source."""
        return bool(self.recipe or self.fusions or self.vocabulary_rows)

    @property
    def are_all_wanted(self) -> bool:
        """Whether no tensor is left out."""
        return not (self.include or self.excluded or self.weights_only)

    @property
    def are_named(self) -> bool:
        """Whether the user named each tensor that is wanted, without a pattern."""
        return bool(self.included) and not any(pattern.is_pattern for pattern in self.included)

    def choose(self, names: Iterable[str], belongings: Belongings) -> frozenset[str]:
        """Return the wanted names; ``belongings`` say what goes with an excluded parameter."""

        def is_wanted(name: str) -> bool:
            if any(self._names(pattern, name) for pattern in self.excluded):
                return False
            if self.weights_only and not belongings.get(name, WEIGHT).is_model:
                return False
            if self.included:
                return any(self._names(pattern, name) for pattern in self.included)
            return not any(
                self._names(pattern, owner)
                for owner in owners_of(name, belongings)
                for pattern in self.excluded
            )

        return frozenset(filter(is_wanted, names))

    def _names(self, pattern: Pattern, name: str) -> bool:
        return pattern.matches(self.called.get(name, name))

    def unmatched(
        self, names: Collection[str], where: str, absent: Collection[str] = ()
    ) -> Iterator[Diagnostic]:
        """Yield the problems of patterns that match nothing; see `unmatched_problems`."""
        names, absent = ([self.called.get(name, name) for name in each] for each in (names, absent))
        patterns = (*self.included, *self.excluded[: len(self.exclude)])
        yield from unmatched_problems(patterns, names, where, absent)

    def _casts_of(self, meta: TensorMeta, what: Belonging) -> list[Cast]:
        is_number = meta.dtype in CASTABLE or what.scale is not None
        if not is_number or meta.name in self.fixed or what.role in ("counter", "scale"):
            return []
        matching = [
            cast for cast in self.casts if cast.pattern and self._names(cast.pattern, meta.name)
        ]
        return matching or [cast for cast in self.casts if cast.pattern is None and what.is_trained]

    def dtype_of(self, meta: TensorMeta, what: Belonging) -> str:
        """Return the element type in which a tensor is wanted."""
        return next((cast.dtype for cast in self._casts_of(meta, what)), meta.dtype)

    def cast_problems(
        self, metas: Mapping[str, TensorMeta], belongings: Belongings, where: str
    ) -> Iterator[Diagnostic]:
        """Yield the problems of casts that name no tensor, none of numbers, or one in two types.

        ``where`` is the path of the checkpoint that has the tensors.
        """
        if not metas:
            return
        contradicted: dict[tuple[Cast, ...], list[str]] = {}

        def of(meta: TensorMeta) -> Belonging:
            return belongings.get(meta.name, WEIGHT)

        for name, meta in metas.items():
            casts = self._casts_of(meta, of(meta))
            if len({cast.dtype for cast in casts}) > 1:
                contradicted.setdefault(tuple(casts), []).append(name)
        for several, names in contradicted.items():
            texts = " and ".join(repr(cast.text) for cast in several)
            message = f"two types for the same {count(len(names), 'tensor')}: {texts}"
            hint = "--dtype with patterns that do not overlap"
            yield Diagnostic("options", message, hint=hint, facts=shorten(names, 3), where=where)
        for cast in self.casts:
            if cast.pattern is None:
                continue
            named = [meta for meta in metas.values() if self._names(cast.pattern, meta.name)]
            if not named:
                yield from unmatched_problems([cast.pattern], metas, where)
            elif not any(self._casts_of(meta, of(meta)) for meta in named):
                message = f"no tensor that {cast.text!r} names can be cast"
                names = [meta.name for meta in named]
                facts = shorten((f"{meta.name} is {meta.dtype}" for meta in named), 3)
                facts += f", and not {any_of(sorted(CASTABLE))}"
                if kept := [of(meta).role for meta in named if meta.dtype in CASTABLE]:
                    facts = f"a {kept[0]} is not cast by itself: {shorten(names, 3)}"
                hint = "--dtype with another pattern"
                yield Diagnostic("options", message, hint=hint, facts=facts, where=where)
