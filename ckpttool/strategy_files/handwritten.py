"""Hand-written strategy files: how parameters are sharded where MindSpore keeps no record of it.

It turns text into the rules of a `Strategy`, with the place of each mistake, and back.
`ckpttool.model.strategy` decides what a pattern means for the tensors of a checkpoint.

In manual hybrid-parallel training (``layerwise_parallel``) each rank saves its own tensors and
nothing else.  A file of this kind describes how these slices form full tensors.  Beside MindSpore's
own strategy file it describes the parameters that are not in that file.

Text
----
YAML in a file whose name ends in ``.yaml`` or ``.yml``, or the same in JSON, in a file whose name
ends in ``.json``; one document in UTF-8 of at most 1 MiB.  Outside quotes and comments, full-width
signs and typographic quotes are errors::

    ckpttool_strategy: 1          MUST be there: the version of this form
    ranks: 8                      of all stages together; MAY be absent beside a file of MindSpore's
    stages: 2                     pipeline stages, of equally many ranks each; 1 if absent
    parameters:                   pattern: cut; the first pattern that matches a name decides
      embedding: {axis: 0, stages: [0]}
      "*.weight": [4, 1]
      "*.bias": replicated
    otherwise: replicated         all other parameters are equal on all ranks, which is checked

Without ``otherwise``, names that no pattern matches are an error.  Beside a file of MindSpore's,
such names may be in that file.  Names in neither file are treated as if this file did not exist.

In a pattern ``*`` stands for any characters (dots, too), ``?`` for one, ``[ab]`` for one of these.
A cut is one of

- ``replicated``: every rank holds the full tensor.
- ``[4, 1]``: slices along each tensor axis, as in MindSpore's ``shard``.  If a stage has more ranks
  than slices, neighbours hold equal slices: with two slices on four ranks, ranks 0 and 1 hold the
  first.  The number of slices must divide the number of ranks.
- ``{axis: 0, parts: 4}``: the same for a tensor of any number of axes.  Without ``parts`` each rank
  of a stage has its own slice.
- ``{parts: [4, 1]}``: as ``[4, 1]``, with further keys.
- ``{device_matrix: [2, 4], tensor_map: [1, -1]}``: as in a strategy file.  Device axes are counted
  from the right.  ``[[1, 0], []]`` shards one tensor axis by several; -1 anywhere is none.

All but ``replicated`` may have the further keys

- ``optimizer_shard: 2``: parts into which the replicas split axis 0 of their slice.
- ``rows: [6, 4]``: the rows of each slice of axis 0, if they are not equal.
- ``stages: [0]``: the stages that hold the parameter; all of them if absent.

Any other key is an error.

YAML is read only as far as JSON goes: mappings with text for keys, sequences, text, whole numbers
and nothing (``null``, ``~`` or no value).  Only plain decimal digits are a number; ``010``,
``1_000``, ``1:30``, ``yes``, ``1.5`` and dates are text.  Refused are a key that comes twice in its
mapping, tags (``!!python/object``), anchors (``&a``) and aliases (``*a``).  So the document
constructs no other objects, and it cannot grow in memory beyond the file.

Source
------
YAML 1.1, as PyYAML composes it; none of its constructors is used.
"""

from __future__ import annotations

import math
import os
import re
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, TypeVar, cast
from unicodedata import normalize

from msgspec import Struct
from msgspec.structs import replace

from ckpttool.formats.local import is_file, read_file, stat_file
from ckpttool.formats.strict_json import parse_json
from ckpttool.lazy import compile_late
from ckpttool.model.layout import MAX_LAYOUT_AXES, MAX_RANKS, Layout
from ckpttool.model.strategy import Rule, Rules, Strategy, escape_pattern
from ckpttool.problems import CombinedError, RulesError, StrategyError, raise_all
from ckpttool.strategy_files.folders import KEY, YAML_SUFFIXES
from ckpttool.wording import count, nearest

if TYPE_CHECKING:
    import yaml

VERSION = 1
_TOP_KEYS = (KEY, "ranks", "stages", "parameters", "otherwise")
_CUT_KEYS = ("axis", "parts", "device_matrix", "tensor_map", "optimizer_shard", "rows", "stages")
MAX_BYTES = 1 << 20  # ten thousand lines; the parser takes seconds for 1 MiB
_NUMBER = compile_late(r"-?(0|[1-9][0-9]{0,17})")
_NOTHING = ("", "~", "null")
_QUOTED_OR_COMMENT = compile_late(
    r""""(?:\\.|[^"\\])*"|(?<![\w.])'(?:''|[^'])*'|(?:^|(?<=\s))#.*"""
)
_LOOKALIKES = {  # NFKC has the full-width forms
    **dict.fromkeys("\u201c\u201d\u201e\u201f\u300c\u300d", '"'),
    **dict.fromkeys("\u2018\u2019\u201a\u201b", "'"),
    **dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2212", "-"),
    "\u3001": ",",
    "\u3010": "[",
    "\u3011": "]",
}
_YAML_WORDS = {  # words and names of tokens in PyYAML's messages
    "found character '\\t' that cannot start any token": "a tab; indent with spaces",
    "'<block mapping start>'": "keys that are indented further",
    "'<block sequence start>'": "items that are indented further",
    "<block end>": "the end of the block",
    "'<stream end>'": "the end of the file",
    "'<scalar>'": "a value",
}
_QUOTE_HINT = 'quotes around a name or pattern that begins with *: "*.weight"'
_EXAMPLE_HINT = "`ckpttool help -d` shows a hand-written strategy"

T = TypeVar("T")


def is_handwritten(path: str) -> bool:
    """Return whether a strategy file is hand-written, from its suffix, and in JSON from its key."""
    if path.endswith(YAML_SUFFIXES):
        return True
    return path.endswith(".json") and KEY.encode() in read_file(path)


def read_handwritten(path: str, beside: Strategy | None) -> Strategy:
    """Return a hand-written strategy; its rules are resolved when names are known.

    ``beside`` is the strategy of MindSpore's own files, if any; the result includes it.

    Raises
    ------
    StrategyError
        The file is malformed, its ranks differ from those of ``beside``, or a cut is impossible.
        Several mistakes are a `CombinedError`.
    OSError
        The file cannot be read.
    """
    size = stat_file(path).nbytes
    if size > MAX_BYTES:
        raise _too_large(path, size)
    return parse_handwritten(read_file(path), path, beside)


def parse_handwritten(data: bytes, path: str, beside: Strategy | None) -> Strategy:
    """Return the strategy in the bytes of a hand-written file; see `read_handwritten`."""
    top = _parse_top(data, path)
    sizes, mistakes = _attempt(_parse_sizes, path, top, beside)
    mistakes = [*_unknown_keys(top, _TOP_KEYS), *mistakes]
    otherwise = top.get("otherwise")
    if otherwise is not None and otherwise.value != "replicated":
        mistakes.append(_unexpected(otherwise, "otherwise", "the word replicated"))
    cuts, errors = _attempt(_parse_mapping, top.get("parameters", Node({}, path)), "parameters")
    mistakes += errors
    rules: list[Rule] = []
    for pattern, node in (cuts or {}).items():
        rule, errors = _attempt(_parse_rule, pattern, node, sizes)
        mistakes += (StrategyError(f"{e.where}: {pattern}", *e.args[1:]) for e in errors)
        rules += [rule] if rule else []
    raise_all(mistakes)
    sizes = sizes or (1, 1)
    strategy = (beside or Strategy({}, *sizes)).for_ranks(range(math.prod(sizes)))
    checked = Rules(path, tuple(rules), otherwise is not None)
    return replace(strategy, files=(*strategy.files, path), rules=checked)


def _attempt(
    parse: Callable[..., T], *arguments: object
) -> tuple[T | None, Sequence[StrategyError]]:
    try:
        return parse(*arguments), ()
    except CombinedError as error:
        return None, cast("Sequence[StrategyError]", error.errors)
    except StrategyError as error:
        return None, (error,)


def _too_large(path: str, size: int) -> StrategyError:
    message = f"{size} bytes are too many for a hand-written strategy"
    return StrategyError(path, message, facts=f"at most {MAX_BYTES}")


def _parse_top(data: bytes, path: str) -> Mapping[str, Node]:
    root = (nodes_of_json if path.endswith(".json") else parse_yaml)(data, path)
    if not isinstance(root.value, dict) or KEY not in root.value:
        raise StrategyError(path, f"the key {KEY} is missing", f"a first line {KEY}: {VERSION}")
    if root.value[KEY].value != VERSION:
        raise _unexpected(root.value[KEY], KEY, str(VERSION))
    return root.value


def _parse_sizes(path: str, top: Mapping[str, Node], beside: Strategy | None) -> tuple[int, int]:
    """Return the number of stages, and the number of ranks in each."""
    if (beside is None or beside.is_of_group) and "ranks" not in top:
        raise StrategyError(path, "the key ranks is missing", "a line such as ranks: 8")
    default = Node(beside.stages if beside else 1), Node(len(beside.ranks) if beside else None)
    stages = _parse_number(top.get("stages", default[0]), "stages")
    ranks = _parse_number(top.get("ranks", default[1]), "ranks")
    place = next((top[key].place for key in ("ranks", "stages") if key in top), path)
    if beside is not None and 0 < ranks <= MAX_RANKS:
        beside = beside.for_ranks(range(ranks))
    if beside is not None and (stages, ranks) != (beside.stages, len(beside.ranks)):
        message = f"{ranks} ranks in {count(stages, 'stage')}, but {beside.origin_is} for "
        raise StrategyError(place, f"{message}{len(beside.ranks)} in {beside.stages}")
    if not 0 < stages <= ranks <= MAX_RANKS or ranks % stages:
        facts = f"expected a multiple of the stages, {MAX_RANKS} at most"
        raise StrategyError(place, f"{ranks} ranks in {count(stages, 'stage')}", facts=facts)
    return stages, ranks // stages


# ----------------------------------------------------------------------------------- rules and cuts


def _parse_rule(pattern: str, node: Node, sizes: tuple[int, int] | None) -> Rule:
    """Return the rule for a pattern.

    ``sizes`` are the numbers of stages and of ranks in each; None if they are wrong.
    """
    stages, ranks = sizes or (1, 0)
    place = node.place.rpartition(", column ")[0] or node.place
    everywhere = tuple(range(stages))
    if node.value == "replicated":
        return Rule(pattern, Layout((max(ranks, 1),), ()), True, everywhere, place)
    if isinstance(node.value, tuple):
        node = Node({"parts": node}, node.place)
    if node.value is None:
        hint = "a value behind the colon; a draft has those that fit in the comments below it"
        raise StrategyError(node.place, "it has no value yet", hint)
    if not isinstance(node.value, dict):
        expected = "replicated, a list of parts such as [4, 1], or a mapping"
        raise _unexpected(node, "the cut", expected)
    cut = _parse_cut(node.value, stages if sizes else None)
    try:
        matrix, tensor_map = _make_grid(cut, ranks)
        shard = 1 if cut.optimizer_shard is None else cut.optimizer_shard
        layout = Layout(matrix, tensor_map, shard, rows=cut.rows or ())
    except ValueError as error:
        raise StrategyError(node.place, str(error), _EXAMPLE_HINT) from error
    return Rule(pattern, layout, cut.axis is not None, cut.stages or everywhere, place)


class _Cut(Struct, frozen=True):
    """The values of a cut; None for absent keys.

    ``ways`` has the keys that say where it cuts.  ``axis_parts`` is ``parts`` beside ``axis``.
    """

    ways: tuple[str, ...]
    axis: int | None
    axis_parts: int | None
    parts: tuple[int, ...] | None
    device_matrix: tuple[int, ...] | None
    tensor_map: tuple[tuple[int, ...], ...] | None
    optimizer_shard: int | None
    rows: tuple[int, ...] | None
    stages: tuple[int, ...] | None


def _parse_cut(entries: Mapping[str, Node], stages: int | None) -> _Cut:
    """Return the values of a cut; raise an error with every mistake."""
    mistakes: dict[str, Sequence[StrategyError]] = {}

    def read(key: str, parse: Callable[..., T], *arguments: object) -> T | None:
        if key not in entries:
            return None
        value, mistakes[key] = _attempt(parse, entries[key], key, *arguments)
        return value

    ways = {*entries} & {"axis", "parts", "device_matrix", "tensor_map"}
    has_axis = "axis" in entries
    cut = _Cut(
        tuple(sorted(ways - {"parts"} if has_axis else ways)),
        read("axis", _parse_axis),
        read("parts", _parse_number) if has_axis else None,
        None if has_axis else read("parts", _parse_numbers),
        read("device_matrix", _parse_numbers),
        read("tensor_map", _parse_tensor_map),
        read("optimizer_shard", _parse_number),
        read("rows", _parse_numbers),
        read("stages", _parse_stages, stages),
    )
    wrong = (error for key in entries for error in mistakes.get(key, ()))
    raise_all([*_unknown_keys(entries, _CUT_KEYS), *wrong])
    return cut


def _parse_axis(node: Node, what: str) -> int:
    axis = _parse_number(node, what)
    if axis >= MAX_LAYOUT_AXES:
        raise _unexpected(node, what, f"less than {MAX_LAYOUT_AXES}")
    return axis


def _parse_stages(node: Node, what: str, stages: int | None) -> tuple[int, ...]:
    chosen = tuple(sorted(set(_parse_numbers(node, what))))
    if not chosen or (stages is not None and chosen[-1] >= stages):
        raise _unexpected(node, what, f"some of 0 to {(stages or MAX_RANKS) - 1}")
    return chosen


def _parse_tensor_map(node: Node, what: str) -> tuple[tuple[int, ...], ...]:
    if not isinstance(node.value, tuple):
        raise _unexpected(node, what, "a list of device axes, or of such lists")
    lists = [item.value if isinstance(item.value, tuple) else (item,) for item in node.value]
    return tuple(
        _parse_numbers(Node(tuple(axis for axis in axes if axis.value != -1)), what)
        for axes in lists
    )


def _make_grid(cut: _Cut, ranks: int) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Return device matrix and tensor map of a cut over the ranks of a stage; 0 if unknown.

    Raise ValueError if the cut is impossible.
    """
    if cut.device_matrix is not None and cut.tensor_map is not None and len(cut.ways) == 2:
        if ranks and math.prod(cut.device_matrix) != ranks:
            shown = list(cut.device_matrix)
            raise ValueError(f"device_matrix is {shown}, expected {ranks} ranks, as a stage has")
        return cut.device_matrix, cut.tensor_map
    if cut.parts is not None and len(cut.ways) == 1:
        parts = cut.parts
    elif cut.axis is not None and len(cut.ways) == 1:
        along = len(cut.rows or ()) or ranks or 1 if cut.axis_parts is None else cut.axis_parts
        parts = (*(1,) * cut.axis, along)
    else:
        raise ValueError(
            f"{' and '.join(cut.ways) or 'no cut'}, expected axis (and parts), or parts, or "
            "device_matrix and tensor_map"
        )
    slices = math.prod(parts)
    if 0 in parts or (ranks and ranks % slices):
        raise ValueError(
            f"{list(parts)} are {slices} slices, expected a divisor of {ranks}, the ranks of a "
            "stage"
        )
    # As in MindSpore, axes of size 1 are left out, and replicas are the innermost axis.
    sizes = [n for n in (*parts, ranks // slices) if n > 1] or [1]
    axes = iter(range(len(sizes) - 1, -1, -1))
    return tuple(sizes), tuple((next(axes),) if n > 1 else () for n in parts)


# ----------------------------------------------------------------------------------- checked values


def _parse_mapping(node: Node, what: str) -> dict[str, Node]:
    if not isinstance(node.value, dict):
        raise _unexpected(node, what, "a mapping")
    return node.value


def _parse_numbers(node: Node, what: str) -> tuple[int, ...]:
    if not isinstance(node.value, tuple):
        raise _unexpected(node, what, "a list of numbers")
    return tuple(_parse_number(item, what) for item in node.value)


def _parse_number(node: Node, what: str) -> int:
    if not isinstance(node.value, int) or node.value < 0:
        raise _unexpected(node, what, "a whole number, 0 or more")
    return node.value


def _unknown_keys(entries: Mapping[str, Node], keys: Sequence[str]) -> Iterator[StrategyError]:
    for key, node in entries.items():
        if key not in keys:
            near = nearest(key, keys)
            hint = f"{near} in place of {key}" if near else _EXAMPLE_HINT
            facts = f"known keys: {', '.join(keys)}"
            yield StrategyError(node.place, f"unknown key {key}", hint, facts)


def _unexpected(node: Node, what: str, expected: str) -> StrategyError:
    message = f"{what} is {_format_node(node)}, expected {expected}"
    return StrategyError(node.place, message, _EXAMPLE_HINT)


def _format_node(node: Node) -> str:
    if isinstance(node.value, dict):
        return "a mapping"
    if isinstance(node.value, tuple):
        return f"[{', '.join(_format_node(item) for item in node.value[:8])}]"
    return "nothing" if node.value is None else repr(node.value)[:80]


# ------------------------------------------------------------------------------------------ writing

_BARE = compile_late(r"[A-Za-z_][\w./]*", re.ASCII)  # names that need no quotes


def encode_handwritten(strategy: Strategy, path: str) -> bytes:
    """Return the bytes of a YAML file: a line for each rule, or for each parameter.

    `why_no_line` finds nothing in the layouts; ``path`` is for the message.

    Raises
    ------
    StrategyError
        The file would be larger than what is read.
    """
    rules = strategy.rules
    lines = [f"{KEY}: {VERSION}", f"ranks: {len(strategy.ranks)}"]
    lines += [f"stages: {strategy.stages}"] if strategy.stages > 1 else []
    cuts = rules.rules if rules else map(_rule_of, strategy.layouts.items())
    written = [f"  {quote_key(rule.pattern)}: {format_cut(rule, strategy.stages)}" for rule in cuts]
    lines += ["parameters:", *(written if rules else sorted(written))] if written else []
    lines += ["otherwise: replicated"] if strategy.covers_rest else []
    data = "\n".join((*lines, "")).encode()
    if len(data) > MAX_BYTES:
        raise _too_large(path, len(data))
    return data


def why_no_line(layouts: Sequence[Layout]) -> str | None:
    """Return what a line of a hand-written strategy cannot say of a parameter, else None."""
    first, *rest = layouts
    if any(replace(layout, first_rank=first.first_rank) != first for layout in rest):
        return "sharded differently in its stages, and a line has one layout for all"
    if first.fields > 1:
        return f"with field {first.fields}, for which a line has no key"
    if first.split_shape:
        return f"with param_split_shape {[*first.split_shape]}, for which a line has no key"
    return None


def _rule_of(item: tuple[str, Sequence[Layout]]) -> Rule:
    name, layouts = item
    stages = tuple(layout.stage for layout in layouts)
    return Rule(escape_pattern(name), replace(layouts[0], first_rank=0), False, stages, "")


def format_cut(rule: Rule, stages: int) -> str:
    """Return the cut of a rule as `_parse_rule` reads it."""
    layout, keys = rule.layout, dict[str, object]()
    if rule.allows_more_axes:
        if not layout.tensor_map:
            return "replicated"
        axis = len(layout.tensor_map) - 1
        keys["axis"] = axis
        keys["parts"] = replace(layout, optimizer_shard=1).slice_counts[axis]
    else:
        keys["device_matrix"] = [*layout.device_matrix]
        has_one_each = all(len(axes) < 2 for axes in layout.tensor_map)
        keys["tensor_map"] = [
            (axes[0] if axes else -1) if has_one_each else [*axes] for axes in layout.tensor_map
        ]
    if layout.optimizer_shard > 1:
        keys["optimizer_shard"] = layout.optimizer_shard
    if layout.rows:
        keys["rows"] = [*layout.rows]
    if len(rule.stages) < stages:
        keys["stages"] = [*rule.stages]
    return f"{{{', '.join(f'{key}: {value}' for key, value in keys.items())}}}"


def quote_key(pattern: str) -> str:
    r"""Return a key of YAML.

    >>> print(quote_key("layers.0.w"), quote_key("*.w"), quote_key("\u2028"))
    layers.0.w "*.w" "\U00002028"
    """
    if _BARE.fullmatch(pattern):
        return pattern
    escapes = {"\\": "\\\\", '"': '\\"'}
    signs = (escapes.get(c) or (c if c.isprintable() else f"\\U{ord(c):08x}") for c in pattern)
    return f'"{"".join(signs)}"'


# ---------------------------------------------------------------------------- documents with places


class Node(Struct, frozen=True):
    """A value of a document, and its place there: file, line and column; in JSON the file alone.

    A value in a mapping has the place of its key, such as ``"hand.yaml, line 3, column 5"``.
    """

    value: str | int | tuple[Node, ...] | dict[str, Node] | None
    place: str = ""


def parse_yaml(data: bytes, path: str) -> Node:
    """Return the value of a YAML document; ``path`` names it in places.

    Raises
    ------
    StrategyError
        The document is not YAML, or has a refused part.

    Examples
    --------
    >>> node = parse_yaml(b"a: [1, x]", "hand.yaml").value["a"]
    >>> node.place, [item.value for item in node.value]
    ('hand.yaml, line 1, column 1', [1, 'x'])
    """
    import yaml

    class Loader(yaml.SafeLoader):
        """A loader that refuses anchors, aliases and tags."""

        def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
            event: Any = self.peek_event()  # type: ignore[no-untyped-call]
            place = _place(path, event.start_mark)
            if isinstance(event, yaml.AliasEvent):
                raise StrategyError(place, f"alias *{event.anchor} is not read", _QUOTE_HINT)
            if event.anchor is not None:
                raise StrategyError(place, f"anchor &{event.anchor} is not read")
            if event.tag is not None:
                raise StrategyError(place, f"tag {event.tag} is not read")
            return super().compose_node(parent, index)

    if len(data) > MAX_BYTES:
        raise StrategyError(path, f"{len(data)} bytes are too many", facts=f"at most {MAX_BYTES}")
    document = _decode(data, path)
    try:
        root = yaml.compose(document, Loader=Loader)
    except RecursionError as error:
        raise StrategyError(path, "nested too deep") from error
    except yaml.composer.ComposerError as error:  # not one of anchors, refused above
        place = _place(path, error.problem_mark)
        raise StrategyError(place, "a second document, expected one") from error
    except yaml.MarkedYAMLError as error:
        marks = [mark.index for mark in (error.context_mark, error.problem_mark) if mark]
        is_star = any(document[at : at + 1] == "*" for at in marks)
        hint = _QUOTE_HINT if is_star else "other indents, quotes or brackets here or a line above"
        problem = error.problem or ""
        for token, words in _YAML_WORDS.items():
            problem = problem.replace(token, words)
        place = _place(path, error.problem_mark)
        raise StrategyError(place, f"not valid YAML: {problem}", hint) from error
    except yaml.YAMLError as error:
        raise StrategyError(path, f"not valid YAML: {str(error).splitlines()[0]}") from error
    return Node(None, path) if root is None else _from_yaml(root, path, root.start_mark)


def read_rules(
    path: str, shipped: Collection[str], folder: Path, what: str, hint: str = ""
) -> Node:
    """Return the document of a file of rules, or of one of ``folder`` that comes with the package.

    ``what`` is in it, and ``hint`` is for a document that is malformed.

    Raises
    ------
    RulesError
        It is not a file, too large, or malformed.
    OSError
        The file cannot be read.
    """
    is_shipped = path in shipped and not is_file(path)
    file = os.fspath(folder / f"{path}.yaml") if is_shipped else path
    if (size := stat_file(file).nbytes) > MAX_BYTES:
        reason = f"{size} bytes are too many for {what}"
        raise RulesError(path, reason, facts=f"at most {MAX_BYTES}")
    if not is_file(file):
        raise RulesError(path, "not a file", "the rules saved as a file")
    try:
        return parse_yaml(read_file(file), path)
    except StrategyError as error:
        where, reason, given, facts = error.args
        raise RulesError(where, reason, given or hint, facts) from error


def nodes_of_json(data: bytes, path: str) -> Node:
    """Return the value of a JSON document, as `parse_yaml` does; places are ``path``."""
    _decode(data, path)
    try:
        return _from_json(parse_json(data), path)
    except ValueError as error:
        raise StrategyError(path, str(error)) from error
    except RecursionError as error:
        raise StrategyError(path, "nested too deep") from error


def _decode(data: bytes, path: str) -> str:
    """Return the text of a document; refuse other encodings, and signs that only look like ASCII.

    Such signs, from an input method or a word processor, would become a part of a name.  Text in
    quotes and comments may have them.  The error has the first line that is wrong, and the sign.
    """
    try:
        document = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _encoding_error(data, path, error) from error
    for number, line in enumerate(document.splitlines(), 1):
        bare = _QUOTED_OR_COMMENT.sub(lambda match: " " * len(match[0]), line)
        wrong = next(((at, sign) for at, sign in enumerate(bare, 1) if _ascii_of(sign)), None)
        if wrong is not None:
            at, sign = wrong
            reason = f"{sign} where the ASCII sign {_ascii_of(sign)} belongs"
            hint = f"`{_ascii_of(sign)}` in place of `{sign}`, in all of the file"
            facts = f"the line is {line.strip()[:80]}"
            raise StrategyError(f"{path}, line {number}, column {at}", reason, hint, facts)
    return document


def _encoding_error(data: bytes, path: str, error: UnicodeDecodeError) -> StrategyError:
    """Return the error of a document that is not UTF-8, with the encodings that it may have.

    Almost all bytes have a meaning in GBK, so that only a reader of the line can tell.
    """
    encoding = "UTF-16" if data[:2] in (BOM_UTF16_LE, BOM_UTF16_BE) else "GB18030"
    try:
        document = data.decode(encoding)
    except UnicodeDecodeError:
        line = data.count(b"\n", 0, error.start) + 1
        facts = f"byte {error.start} is {data[error.start]:#04x}"
        return StrategyError(f"{path}, line {line}", "not UTF-8", facts=facts)
    hint = f"iconv -f {encoding} -t UTF-8 {quote(path)} > NEW{Path(path).suffix}"
    if encoding == "UTF-16":
        return StrategyError(path, "not UTF-8, but UTF-16", hint)
    numbered = enumerate(document.split("\n"), 1)
    number, decoded = next(pair for pair in numbered if not pair[1].isascii())
    facts = f"in GBK it reads {decoded.strip()[:80]}"
    return StrategyError(f"{path}, line {number}", "not UTF-8", f"if that is right, {hint}", facts)


def _ascii_of(sign: str) -> str:
    if sign.isascii():
        return ""
    ascii_sign = _LOOKALIKES.get(sign) or normalize("NFKC", sign)
    return ascii_sign if len(ascii_sign) == 1 and ascii_sign.isascii() else ""


def _from_yaml(node: yaml.Node, path: str, mark: Any) -> Node:
    """Return the value of a node of PyYAML, with the place of ``mark``."""
    import yaml

    place = _place(path, mark)
    if isinstance(node, yaml.SequenceNode):
        return Node(tuple(_from_yaml(item, path, item.start_mark) for item in node.value), place)
    if isinstance(node, yaml.MappingNode):
        entries: dict[str, Node] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise StrategyError(_place(path, key.start_mark), "a key is not text")
            if key.value in entries:
                raise StrategyError(_place(path, key.start_mark), f"key {key.value} comes twice")
            entries[key.value] = _from_yaml(value, path, key.start_mark)
        return Node(entries, place)
    is_plain = isinstance(node, yaml.ScalarNode) and node.style is None
    if is_plain and node.value in _NOTHING:
        return Node(None, place)
    is_number = is_plain and _NUMBER.fullmatch(node.value)
    return Node(int(node.value) if is_number else node.value, place)


def _from_json(value: object, path: str) -> Node:
    # Numbers that are not whole become text.
    if isinstance(value, dict):
        return Node({str(key): _from_json(item, path) for key, item in value.items()}, path)
    if isinstance(value, list):
        return Node(tuple(_from_json(item, path) for item in value), path)
    if not isinstance(value, str | None) and type(value) is not int:
        value = str(value)
    return Node(value, path)


def _place(path: str, mark: Any) -> str:
    return path if mark is None else f"{path}, line {mark.line + 1}, column {mark.column + 1}"
