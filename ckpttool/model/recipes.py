"""Recipes: how the tensors of one family of models are called and laid out elsewhere.

A recipe is data.  Its rules have two sides, MindSpore's and Hugging Face's, and names with holes:
``decoder.layers.{i}.input_layernorm.weight``.  `Recipe.relations` fills the holes from the
configuration of a model.  So every name of both sides is known before any file is read.  Names are
not matched by patterns: if no rule gives a name, the caller reports it as a leftover.

`parse_axes` reads the notation of einops: ``(g p h) d`` are two axes, and the first has three
factors.  A tensor may have a part of a factor: ``(g p[:4] h) d``.  If that is a single index, the
factor makes no axis: ``e[7] f d``.

Expressions, of sizes and in holes, have the syntax of Python; `evaluate` knows a few operators and
no functions but ``range``.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, lru_cache, partial
from itertools import chain, product
from math import prod

from msgspec import Struct, field
from msgspec.structs import replace

from ckpttool.lazy import compile_late
from ckpttool.model.choices import Fusion
from ckpttool.model.dtypes import CASTABLE, DTYPES, find_word
from ckpttool.model.region import Arrangement, Region, common
from ckpttool.wording import shorten

Value = object  # of an expression: a number, a text, a truth value, a range, or None
SIDES = ("MindSpore", "Hugging Face")
_MAX_LOOP = 1 << 16  # values of a hole; models have some hundred layers or experts
_HOLE = compile_late(r"\{([^{}]*)\}")
_BLANK = compile_late(r"\s")
_OPERATORS: Mapping[type, Callable[..., Value]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


_SYNTAX = "names, numbers, lists, range, + - * // %, comparisons, in, and, or, not, if"


@lru_cache(maxsize=4096)  # a recipe has few expressions, each for many layers
def _parse(expression: str) -> ast.expr:
    try:
        return ast.parse(expression, mode="eval").body
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ValueError(f"{expression!r} is not an expression") from error


def evaluate(expression: str, values: Mapping[str, Value]) -> Value:
    """Return the value of an expression; a name that nothing gives is None.

    Raises
    ------
    ValueError
        The text is not an expression, or uses syntax that these do not have.
    LookupError
        The expression computes with a name that nothing gives.

    Examples
    --------
    >>> evaluate("head_dim or hidden_size // heads", {"hidden_size": 64, "heads": 4})
    16
    """
    return _value(_parse(expression), values.get)


def _value(node: ast.expr, find: Callable[[str], Value]) -> Value:
    """Return the value of a part of an expression; ``find`` returns those of names."""
    match node:
        case ast.Constant(value=constant):
            return constant
        case ast.Name(id=name):
            if isinstance(value := find(name), Unanswered):
                raise LookupError(name)
            return value
        case ast.Compare(left=left, ops=[ast.In() | ast.NotIn() as op], comparators=[right]):
            return (_value(left, find) in _sequence(right, find)) == isinstance(op, ast.In)
        case (
            ast.BinOp(left=left, op=op, right=right)
            | ast.Compare(left=left, ops=[op], comparators=[right])
        ) if type(op) in _OPERATORS:
            value_of = _value if isinstance(op, ast.Eq | ast.NotEq) else _number
            try:
                return _OPERATORS[type(op)](value_of(left, find), value_of(right, find))
            except ArithmeticError as error:
                raise ValueError(f"{ast.unparse(node)!r}: {error}") from error
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return not truth(_value(operand, find))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_number(operand, find)
        case ast.BoolOp(op=op, values=parts):
            for part in parts[:-1]:
                if truth(met := _value(part, find)) == isinstance(op, ast.Or):
                    return met
            return _value(parts[-1], find)
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            return [_value(part, find) for part in parts]
        case ast.Subscript(value=values, slice=place):
            of, at = _sequence(values, find), _number(place, find)
            if not 0 <= at < len(of):
                raise ValueError(f"{ast.unparse(values)} has {len(of)} values, and none at {at}")
            return of[at]
        case ast.IfExp(test=test, body=body, orelse=other):
            return _value(body if truth(_value(test, find)) else other, find)
        case ast.Call(func=ast.Name(id="range"), args=[*parts], keywords=[]) if len(parts) <= 3:
            return range(*(_number(part, find) for part in parts))
        case ast.ListComp(elt=elt, generators=[ast.comprehension(ast.Name(id=name)) as loop]):
            scopes = [partial(_find_in, {name: it}, find) for it in _sequence(loop.iter, find)]
            kept = (it for it in scopes if all(truth(_value(test, it)) for test in loop.ifs))
            return [_value(elt, it) for it in kept]
    raise ValueError(f"{ast.unparse(node)!r} is not of an expression: it has {_SYNTAX}")


def _find_in(scope: Mapping[str, Value], find: Callable[[str], Value], name: str) -> Value:
    return scope[name] if name in scope else find(name)


def _number(node: ast.expr, find: Callable[[str], Value]) -> int:
    value = _value(node, find)
    if value is None:
        raise LookupError(ast.unparse(node))
    if not isinstance(value, int):
        raise ValueError(f"{ast.unparse(node)} is {value!r}, and no number")
    return value


def truth(value: Value) -> bool:
    """Return whether a condition holds; refuse texts, since ``"false"`` would be true."""
    if isinstance(value, str):
        raise ValueError(f"{value!r} is a text, and neither true nor false")
    return bool(value)


def _sequence(node: ast.expr, find: Callable[[str], Value]) -> Sequence[Value]:
    """Return the values of a loop."""
    value = _value(node, find)
    if value is None:
        raise LookupError(ast.unparse(node), "a list")
    if not isinstance(value, range | list | tuple):
        raise ValueError(f"{ast.unparse(node)} is {value!r}, and no list or range")
    if len(value) > _MAX_LOOP:
        raise ValueError(f"{ast.unparse(node)} has {len(value)} values; at most {_MAX_LOOP}")
    return value


# No text matches in two ways, so none takes long.
_FACTOR = r"\s*([A-Za-z_]\w*)(?!\w)(?:\[([^]:]*)(:[^]]*)?\])?"
_FACTORS = compile_late(_FACTOR)
_AXIS = compile_late(rf"\s*\((?:{_FACTOR})*\s*\)|{_FACTOR}")  # some factors, or one


class Factor(Struct, frozen=True):
    """A factor of an axis, and the part of it that a tensor has: ``start`` to ``stop``.

    Both are expressions of sizes; "" is the whole.  ``is_index`` says that it is one index.
    """

    name: str
    start: str = ""
    stop: str = ""
    is_index: bool = False


Axes = tuple[tuple[Factor, ...], ...]  # the factors of each axis; those of no axis come last


@lru_cache(maxsize=4096)  # the layers of a model are alike
def parse_axes(notation: str) -> tuple[Axes, tuple[Factor, ...]]:
    """Return the factors of each axis, outermost first, and those that make no axis.

    Raises
    ------
    ValueError
        The text is not of this notation.

    Examples
    --------
    >>> axes, _ = parse_axes("(g p[:4] h) d")
    >>> [[factor.name for factor in axis] for axis in axes]
    [['g', 'p', 'h'], ['d']]
    """
    axes: list[tuple[Factor, ...]] = []
    rest: list[Factor] = []
    at = 0
    while left := notation[at:].strip():
        if (match := _AXIS.match(notation, at)) is None:
            raise ValueError(f"{notation!r} is not a list of axes: {_wrong_factor(left)}")
        at = match.end()
        axis = tuple(
            Factor(name, start.strip(), stop[1:].strip(), bool(start) and not stop)
            for name, start, stop in _FACTORS.findall(match[0])
        )
        if axis and axis[0].is_index and not left.startswith("("):
            rest += axis
        else:
            axes.append(axis)
    names = [factor.name for factor in (*chain(*axes), *rest)]
    if len(names) > len({*names}):
        raise ValueError(f"{notation!r} has a factor twice")
    return tuple(axes), tuple(rest)


def _wrong_factor(left: str) -> str:
    """Return what is wrong with the factors that begin a text."""
    rest = left.removeprefix("(").lstrip()
    while match := _FACTORS.match(rest):
        rest = rest[match.end() :].lstrip()
    if number := re.match(r"\d+", rest):
        return f"{number[0]} has no name; sizes: gives it one, {{p: {number[0]}}}"
    return f"{rest!r} is not a factor" if rest else "a bracket is not closed"


class Unanswered(Struct, frozen=True):
    """The value of a choice that nobody has made; no expression computes with it."""


class Choice(Struct, frozen=True, forbid_unknown_fields=True):
    """A fact that names do not show; the configuration or the user decides.

    Each of ``values`` is what the key ``config`` of the configuration is for it, the usual one
    first; ``why`` is where a person finds it.
    """

    values: Mapping[str, bool]
    config: str
    why: str


class Rule(Struct, frozen=True, forbid_unknown_fields=True):
    """Tensors of both sides that have the same elements.

    Attributes
    ----------
    loops
        The holes, and the values of each: there is a relation for each of them.
    condition
        Whether there are these tensors at all.
    names
        Names that are one tensor on each side, with the same ``axes`` (``""`` of a single value).
    mindspore, huggingface
        Names with their axes, as `parse_axes` reads them.  MindSpore's may have several shapes,
        parted by ``|``; which of them is written is the number that ``written`` gives.
    each
        More holes: of names in one relation.
    sizes
        Sizes of factors, beside those of the recipe.
    dtype
        The element type on both sides, if that is always the same.
    """

    loops: Mapping[str, str] = field(default_factory=dict, name="for")
    condition: str = field(default="True", name="if")
    axes: str | None = None
    names: Mapping[str, str] = {}
    mindspore: Mapping[str, str] = {}
    huggingface: Mapping[str, str] = {}
    each: Mapping[str, str] = {}
    sizes: Mapping[str, str] = {}
    written: str = "0"
    dtype: str = ""


class Prefix(Struct, frozen=True, forbid_unknown_fields=True):
    """Names that other rules give with another beginning, on either side."""

    old: str
    new: str
    loops: Mapping[str, str] = field(default_factory=dict, name="for")


class Copies(Struct, frozen=True, forbid_unknown_fields=True):
    """Names on the side of Hugging Face that hold what another tensor there has.

    They are not read.  They are written unless ``written`` is false.
    """

    names: Mapping[str, str]
    loops: Mapping[str, str] = field(default_factory=dict, name="for")
    condition: str = field(default="True", name="if")
    written: bool = True


class Relation(Struct, frozen=True, gc=False):
    """Tensors of both sides with the same elements: their names and their axes.

    ``values`` are those of the expressions in the axes.  ``is_same`` says that there is one tensor
    on each side, and both have the same axes.
    """

    sides: tuple[Mapping[str, str], Mapping[str, str]]
    values: Mapping[str, Value]
    written: str = "0"
    dtype: str = ""
    is_same: bool = False

    @property
    def open_factors(self) -> frozenset[str]:
        """The factors whose sizes follow from shapes alone."""
        factors = chain(*(_factors(notation) for side in self.sides for notation in side.values()))
        sizes = self.values
        return frozenset(it.name for it in factors if type(sizes.get(it.name)) is not int)


class Recipe(Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """The names and axes of a family of models, here and there.

    Attributes
    ----------
    recipe, version, source
        Its name and version, and what was read or run to make it.
    sizes
        Names and expressions, of keys of the configuration and of other sizes.
    choices
        The facts that the names do not show.
    rules, prefixes, copies
        The tensors.
    spellings
        Other ends of MindSpore's names, which are read as well.
    modes
        Those that are written if the choice ``mode`` is made so.
    unused
        Patterns of MindSpore's names that have no counterpart, with the reason.
    fused
        Names of weights that each rank fuses for itself, and their parts; see `Fusion`.
    """

    recipe: str
    version: int
    source: str
    extends: str = ""
    sizes: Mapping[str, str] = {}
    choices: Mapping[str, Choice] = {}
    rules: tuple[Rule, ...] = ()
    prefixes: tuple[Prefix, ...] = ()
    copies: tuple[Copies, ...] = ()
    spellings: Mapping[str, str] = {}
    modes: Mapping[str, Mapping[str, str]] = {}
    unused: Mapping[str, str] = {}
    fused: Mapping[str, str] = {}

    def over(self, base: Recipe) -> Recipe:
        """Return the recipe with the rules of another before its own, and its own sizes."""
        joined: dict[str, object] = {"extends": ""}
        for name in self.__struct_fields__:
            match getattr(base, name), getattr(self, name):
                case dict() as old, dict() as new:
                    joined[name] = {**old, **new}
                case tuple() as old, tuple() as new:
                    joined[name] = (*old, *new)
        return replace(self, **joined)

    def values(self, config: Mapping[str, Value]) -> dict[str, Value]:
        """Return the values of the names in expressions, from the configuration of a model."""
        values, sizes = dict(config), dict(self.sizes)
        for name, choice in self.choices.items():
            said = (it for it, of in choice.values.items() if config.get(choice.config) is of)
            values.setdefault(name, next(said, Unanswered()))

        def find(name: str) -> Value:
            if (expression := sizes.pop(name, None)) is not None and name not in config:
                values[name] = _value(_parse(expression), find)  # before others that need it
            return values.get(name)

        return {**values, **{name: find(name) for name in self.sizes}}

    def relations(self, values: Mapping[str, Value]) -> Iterator[Relation]:
        """Yield the relations of all tensors of a model; see `values`.

        Raises
        ------
        LookupError
            The configuration lacks what a rule needs.
        ValueError
            A rule is malformed.
        """
        moved = {
            _fill(prefix.old, of_loop): _fill(prefix.new, of_loop)
            for prefix in self.prefixes
            for of_loop in _loop(prefix.loops, "True", values)
        }

        def here(name: str) -> str:
            starts = (old for old in moved if name.startswith(old))
            return next((moved[old] + name.removeprefix(old) for old in starts), name)

        for rule in self.rules:
            for of_loop in _loop(rule.loops, rule.condition, values):
                sizes = dict(of_loop)
                for name, expression in rule.sizes.items():
                    sizes[name] = evaluate(expression, sizes)
                for old, new in rule.names.items():
                    ours, theirs = (
                        {here(_fill(it, of_loop)): rule.axes or ""} for it in (old, new)
                    )
                    yield Relation((ours, theirs), sizes, dtype=rule.dtype, is_same=True)
                if rule.mindspore:
                    every = [*_loop(rule.each, "True", of_loop)]
                    ours, theirs = (
                        {here(_fill(n, it)): _fill(axes, it) for it in every for n, axes in side}
                        for side in (rule.mindspore.items(), rule.huggingface.items())
                    )
                    yield Relation((ours, theirs), sizes, rule.written, rule.dtype)

    def check(self) -> None:
        """Raise `ValueError` if an expression or a list of axes is malformed."""
        for expression in self._expressions():
            with suppress(LookupError):  # it is malformed, or has a name that no model gives here
                evaluate(expression, {})
        for rule in self.rules:
            if not rule.names and not (rule.mindspore and rule.huggingface):
                raise ValueError("a rule has neither names: nor mindspore: and huggingface:")
            if rule.names and rule.axes is None:
                first = next(iter(rule.names))
                raise ValueError(f"the rule of {first} has names: without axes:")
            if rule.dtype and rule.dtype not in DTYPES:
                raise ValueError(f"no element type {rule.dtype}")

    @cached_property
    def keys(self) -> frozenset[str]:
        """Choices and their keys, and the names in expressions: other keys, factors and sizes."""
        nodes = chain(*(ast.walk(_parse(expression)) for expression in self._expressions()))
        names = (node.id for node in nodes if isinstance(node, ast.Name))
        configured = filter(None, (choice.config for choice in self.choices.values()))
        return frozenset((*self.choices, *configured, *self.sizes, *names))

    def _expressions(self) -> Iterator[str]:
        """Yield all expressions and factors; raise `ValueError` if holes or axes are malformed."""
        axes: list[str] = []
        names: list[str] = [*self.fused.values()]
        yield from self.sizes.values()
        for rule in self.rules:
            yield from (*rule.loops.values(), *rule.each.values(), *rule.sizes.values())
            yield from (rule.condition, rule.written)
            axes += (rule.axes or "", *rule.mindspore.values(), *rule.huggingface.values())
            names += (*rule.names, *rule.names.values(), *rule.mindspore, *rule.huggingface)
        for copies in self.copies:
            yield from (copies.condition, *copies.loops.values())
            names += (*copies.names, *copies.names.values())
        for prefix in self.prefixes:
            yield from prefix.loops.values()
            names += (prefix.old, prefix.new)
        for name in names:
            if "{" in _HOLE.sub("", name) or "}" in _HOLE.sub("", name):
                raise ValueError(f"{name!r} has a hole that is not closed")
            if _BLANK.search(_HOLE.sub("", name)):
                raise ValueError(f"{name!r} is not a name: it has a blank")
            yield from _HOLE.findall(name)
        for notation in chain.from_iterable(notation.split("|") for notation in axes):
            for factor in _factors(_HOLE.sub("0", notation)):
                yield from filter(None, (factor.name, factor.start, factor.stop))

    def copied(self, values: Mapping[str, Value]) -> Iterator[tuple[str, str, bool]]:
        """Yield the names of copies, those of what they hold, and whether they are written."""
        for copies in self.copies:
            for of_loop in _loop(copies.loops, copies.condition, values):
                for name, of in copies.names.items():
                    yield _fill(name, of_loop), _fill(of, of_loop), copies.written

    def spelled(self, name: str) -> str:
        """Return the usual spelling of a name on the side of MindSpore."""
        return _with_end(name, self.spellings)

    def written_as(self, name: str, values: Mapping[str, Value]) -> str:
        """Return the spelling of a name of MindSpore that is written."""
        return _with_end(name, self.modes.get(str(values.get("mode")), {}))


def _with_end(name: str, ends: Mapping[str, str]) -> str:
    found = (name.removesuffix(end) + other for end, other in ends.items() if name.endswith(end))
    return next(found, name)


def _loop(
    loops: Mapping[str, str], condition: str, values: Mapping[str, Value]
) -> Iterator[dict[str, Value]]:
    """Yield the values with those of the holes, where the condition holds."""
    for chosen in product(*(_sequence(_parse(it), values.get) for it in loops.values())):
        of_loop = {**values, **dict(zip(loops, chosen, strict=True))}
        if truth(evaluate(condition, of_loop)):
            yield of_loop


def _fill(name: str, values: Mapping[str, Value]) -> str:
    def of(match: re.Match[str]) -> str:
        try:
            value = evaluate(match[1], values)
            if value is None:
                raise LookupError(match[1])
        except LookupError as error:
            if (hole := error.args[0]) in values:
                raise
            raise ValueError(f"{name!r}: no for:, size or key gives {hole}") from error
        return str(value)

    return _HOLE.sub(of, name)


def arrange(
    relation: Relation, side: int, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, Arrangement], dict[str, Arrangement]]:
    """Return the arrangements of the tensors of both sides, the given one first.

    ``shapes`` are those of the tensors of that side, which are in files.

    Raises
    ------
    ValueError
        The shapes are not those of the rule, or its two sides have not the same elements.
    LookupError
        A size is not known.
    """
    given = {n: _choose(text, len(shapes[n])) for n, text in relation.sides[side].items()}
    wanted = {n: _written(n, text, relation) for n, text in relation.sides[1 - side].items()}
    factors = chain.from_iterable(map(_factors, (*given.values(), *wanted.values())))
    known: dict[str, int] = {}
    space = [*dict.fromkeys(factor.name for factor in factors)]
    for name in space:
        value = relation.values.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            known[name] = value
    for name, notation in given.items():
        _solve(name, parse_axes(notation)[0], shapes[name], known, relation.values)
    if lacking := [name for name in space if name not in known]:
        raise LookupError(lacking[0])
    sizes = {name: known[name] for name in space}
    arranged = tuple(
        {name: _arrangement(name, text, sizes, relation.values) for name, text in of_side.items()}
        for of_side in (given, wanted)
    )
    for of_side in arranged:
        _require_tiles(of_side, prod(sizes.values()))
    return arranged[0], arranged[1]


def _factors(notation: str) -> tuple[Factor, ...]:
    axes, rest = parse_axes(notation)
    return (*chain(*axes), *rest)


def _choose(notation: str, ndim: int) -> str:
    """Return the axes of a tensor with so many, of several that it may have."""
    texts = [part.strip() for part in notation.split("|")]
    return next((part for part in texts if len(parse_axes(part)[0]) == ndim), texts[0])


def _written(name: str, notation: str, relation: Relation) -> str:
    texts = notation.split("|")
    number = evaluate(relation.written, relation.values) if texts[1:] else 0
    if not isinstance(number, int) or not 0 <= number < len(texts):
        raise ValueError(
            f"{name}: written: {relation.written} is {number}, and there are {len(texts)} shapes"
        )
    return texts[number].strip()


def _at(expression: str, default: int, values: Mapping[str, Value]) -> int:
    return _number(_parse(expression), values.get) if expression else default


def _ends(name: str, factor: Factor, size: int, values: Mapping[str, Value]) -> tuple[int, int]:
    """Return the part of a factor that the tensor of this name has."""
    start = _at(factor.start, 0, values)
    stop = start + 1 if factor.is_index else _at(factor.stop, size, values)
    if not 0 <= start < stop <= size:
        raise ValueError(f"{name}: {factor.name}[{start}:{stop}], and {factor.name} is {size}")
    return start, stop


def _solve(
    name: str,
    axes: Sequence[Sequence[Factor]],
    shape: Sequence[int],
    sizes: dict[str, int],
    values: Mapping[str, Value],
) -> None:
    """Add the sizes of factors that follow from a shape: of one in each axis at most."""
    if len(axes) != len(shape):
        raise ValueError(f"{name}: number of axes is {len(shape)}, expected {len(axes)}")
    for axis, size in zip(axes, shape, strict=True):
        unknown = [factor for factor in axis if factor.name not in sizes]
        known = (_ends(name, it, sizes[it.name], values) for it in axis if it.name in sizes)
        inner = prod(stop - start for start, stop in known)
        if not unknown and inner == size:
            continue
        if len(unknown) > 1:
            raise LookupError(unknown[0].name)
        if not unknown or size % inner:
            factors = " ".join(f"{it.name}={sizes.get(it.name, '?')}" for it in axis)
            raise ValueError(f"{name}: an axis of {size}, expected {factors}")
        (factor,) = unknown
        if factor.stop or factor.is_index:
            raise LookupError(factor.name)
        sizes[factor.name] = size // inner + _at(factor.start, 0, values)


def _arrangement(
    name: str, notation: str, sizes: Mapping[str, int], values: Mapping[str, Value]
) -> Arrangement:
    ends = {name: (0, size) for name, size in sizes.items()}
    factors = {factor.name: factor for factor in _factors(notation)}
    ends |= {key: _ends(name, factor, sizes[key], values) for key, factor in factors.items()}
    if absent := [key for key in sizes if key not in factors and sizes[key] > 1]:
        raise ValueError(f"{name}: {notation!r} does not say which part of {absent[0]} it has")
    place = {key: number for number, key in enumerate(sizes)}
    axes = parse_axes(notation)[0]
    numbers = tuple(tuple(place[factor.name] for factor in axis) for axis in axes)
    start, stop = zip(*ends.values(), strict=True) if ends else ((), ())
    return Arrangement(numbers, Region(start, stop))


def _require_tiles(tensors: Mapping[str, Arrangement], size: int) -> None:
    """Raise `ValueError` unless the tensors have each of ``size`` elements of a space once."""
    names = [*tensors]
    if sum(it.box.size for it in tensors.values()) != size:
        raise ValueError(f"{shorten(names, 1)}: not all elements of the other side")
    if pair := _find_overlap(tuple(it.box for it in tensors.values())):
        raise ValueError(f"{names[pair[0]]} and {names[pair[1]]} have the same elements")


@lru_cache(maxsize=64)  # the layers of a model are alike
def _find_overlap(boxes: tuple[Region, ...]) -> tuple[int, int] | None:
    pairs = ((i, j) for j in range(len(boxes)) for i in range(j))
    return next((pair for pair in pairs if common(boxes[pair[0]], boxes[pair[1]])), None)


class UsedRecipe(Struct, frozen=True, dict=True):
    """A recipe, and the model that it is used for.

    Attributes
    ----------
    recipe, typed
        The recipe, and what the user named it by.
    given
        Values that the user gives; they replace those of the configuration.
    config
        The configuration of the model.
    folder
        The folder that has it, whose other files go beside the result; "" for none.
    """

    recipe: Recipe
    typed: str
    given: Mapping[str, Value] = {}
    config: Mapping[str, Value] = {}
    folder: str = ""

    @property
    def text(self) -> str:
        """The recipe and the given values, as they are typed."""
        pairs = ",".join(f"{name}={value}" for name, value in self.given.items())
        return ":".join(filter(None, (self.typed, pairs)))

    @property
    def words(self) -> tuple[str, ...]:
        """The options that name the recipe and the model, for a command line."""
        return ("--recipe", self.text, *(("--hf-config", self.folder) if self.folder else ()))

    @property
    def option(self) -> str:
        """The option that has the recipe and the given values, for a message."""
        return f"--recipe '{self.text}'"

    def with_given(self, values: Mapping[str, Value]) -> UsedRecipe:
        """Return the recipe with more values, beside those that the user gives."""
        return replace(self, given={**self.given, **values})

    @cached_property
    def values(self) -> Mapping[str, Value]:
        """The values of the names in expressions."""
        return self.recipe.values({**self.config, **self.given})

    @cached_property
    def relations(self) -> tuple[Relation, ...]:
        """The relations of all tensors; see `Recipe.relations`."""
        return tuple(self.recipe.relations(self.values))

    @cached_property
    def fusions(self) -> tuple[Fusion, ...]:
        """The weights that each rank fuses for itself; raises as `relations` does."""
        fused = self.recipe.fused.items()
        return tuple(Fusion.parse(f"{name}={_fill(of, self.values)}") for name, of in fused)

    @property
    def dtype(self) -> str:
        """The element type of the model by its configuration; "" if that does not say it."""
        word = self.config.get("dtype") or self.config.get("torch_dtype")
        known = find_word(word) if isinstance(word, str) else None
        return known.name if known is not None and known.name in CASTABLE else ""

    @cached_property
    def dtypes(self) -> Mapping[str, str]:
        """The element types that rules give to tensors, by their names on both sides."""
        rules = tuple(rule for rule in self.recipe.rules if rule.dtype)
        with suppress(LookupError, ValueError):  # who uses the rules says what is wrong
            relations = replace(self.recipe, rules=rules).relations(self.values)
            return {name: it.dtype for it in relations for side in it.sides for name in side}
        return {}

    def dtype_of(self, name: str) -> str:
        """Return the element type that a rule gives to a tensor; "" if none does."""
        return self.dtypes.get(self.recipe.spelled(name), "")

    @cached_property
    def names(self) -> tuple[frozenset[str], frozenset[str]]:
        """The names of both sides, in the order of `SIDES`."""
        ours, theirs = (
            frozenset(name for it in self.relations for name in it.sides[side]) for side in (0, 1)
        )
        return ours, theirs

    def keys_of(self, names: Collection[str]) -> Sequence[str]:
        """Return the choices and keys by which rules with other values would have such tensors."""
        keys: dict[str, None] = {}
        for rule in self.recipe.rules:
            always = replace(self.recipe, rules=(replace(rule, condition="True"),))
            with suppress(LookupError, ValueError):  # who uses the rules says what is wrong
                relations = always.relations(self.values)
                if any(name in names for it in relations for side in it.sides for name in side):
                    keys |= dict.fromkeys(self._keys_in(rule.condition))
        return [*keys]

    def _keys_in(self, expression: str) -> Iterator[str]:
        for node in ast.walk(_parse(expression)):
            if isinstance(node, ast.Name) and node.id in {*self.recipe.choices, *self.config}:
                yield node.id
            elif isinstance(node, ast.Name) and node.id in self.recipe.sizes:
                yield from self._keys_in(self.recipe.sizes[node.id])

    def side_of(self, names: Iterable[str]) -> int | None:
        """Return the side that has most of these names; None if neither has any."""
        ours, theirs = self.names
        stored = frozenset(names)
        hits = len(ours.intersection(map(self.recipe.spelled, stored))), len(theirs & stored)
        return None if not any(hits) else int(hits[0] < hits[1])
