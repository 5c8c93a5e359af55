"""YAML without second meanings, with the line and the column of everything.

Only what JSON has, too: mappings with text for keys, sequences, text, whole numbers and nothing
(``null``, ``~`` or no value).  A number is a plain decimal one; ``010``, ``1_000``, ``1:30``,
``yes`` and ``1.5`` are text, as are dates.  One document in UTF-8 of at most 1 MiB.

Refused: a key that comes twice in its mapping, tags (``!!python/object``), and anchors and aliases
(``&a``, ``*a``).  So nothing is constructed but the above, and nothing is larger than the file.

Source
------
YAML 1.1, as PyYAML's parser has it; none of its constructors is used.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ckpttool.formats.strict_json import parse_json

if TYPE_CHECKING:
    from yaml.events import Event

MAX_BYTES = 1 << 20  # ten thousand lines by hand; the parser takes seconds for each MiB
MAX_DEPTH = 16  # of nesting; a document written by hand has four levels
NUMBER = re.compile(r"-?(0|[1-9][0-9]{0,17})")
NOTHING = ("", "~", "null")


@dataclass(frozen=True, slots=True)
class Node:
    """A value of a document, and where it stands.

    Attributes
    ----------
    value
        Text, a number, None, a sequence or a mapping.
    place
        ``"line 3, column 5: "``, of a mapping's value where its key stands; empty if the document
        does not tell.
    """

    value: str | int | tuple[Node, ...] | dict[str, Node] | None
    place: str = ""


def parse_yaml(data: bytes) -> Node:
    """The value of a YAML document.

    Raises
    ------
    ValueError
        It is no YAML, or of the kinds that are refused; the message begins with line and column.

    Examples
    --------
    >>> node = parse_yaml(b"a: [1, x]").value["a"]
    >>> node.place, [item.value for item in node.value]
    ('line 1, column 1: ', [1, 'x'])
    """
    import yaml

    if len(data) > MAX_BYTES:
        raise ValueError(f"{len(data)} bytes; {MAX_BYTES} are the most")
    try:
        events = yaml.parse(data.decode("utf-8-sig"), Loader=yaml.SafeLoader)
        return _document(events)
    except UnicodeError as error:
        raise ValueError(f"not UTF-8: {error}") from error
    except yaml.MarkedYAMLError as error:
        hint = _QUOTE if "alias" in f"{error.context} {error.problem}" else ""
        raise ValueError(f"{_place(error.problem_mark)}no YAML: {error.problem}{hint}") from error
    except yaml.YAMLError as error:
        raise ValueError(f"no YAML: {str(error).splitlines()[0]}") from error


def nodes_of_json(data: bytes) -> Node:
    """The value of a JSON document, as `parse_yaml` would have it.

    Raises
    ------
    ValueError
        See `parse_json`.
    """
    node = _from_json(parse_json(data))
    try:  # a tab stands for a blank, and in no text: there JSON has no raw one
        return _with_places(node, parse_yaml(data.replace(b"\t", b" ")))
    except ValueError:  # JSON that YAML does not know
        return node


def _with_places(node: Node, twin: Node) -> Node:
    """The node with the places of its twin, as far as they are built alike."""
    value, other = node.value, twin.value
    if isinstance(value, dict) and isinstance(other, dict) and value.keys() == other.keys():
        value = {key: _with_places(item, other[key]) for key, item in value.items()}
    elif isinstance(value, tuple) and isinstance(other, tuple) and len(value) == len(other):
        value = tuple(_with_places(*pair) for pair in zip(value, other, strict=True))
    return Node(value, twin.place)


_QUOTE = '; a name or a pattern that begins with * stands in quotes: "*.weight"'


class _Mark(Protocol):
    line: int
    column: int


def _place(mark: _Mark | None) -> str:
    return "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "


def _document(events: Iterator[Event]) -> Node:
    """The one document of a stream."""
    import yaml

    root: Node | None = None
    for event in events:
        if isinstance(event, yaml.DocumentStartEvent):
            if root is not None:
                raise ValueError(f"{_place(event.start_mark)}a second document; expected one")
            root = _node(next(events), events, 0)
    return root or Node(None)


def _node(event: Event, events: Iterator[Event], depth: int, place: str = "") -> Node:
    """The node that begins with ``event``; what follows it is taken from ``events``."""
    import yaml

    here = _place(event.start_mark)
    if isinstance(event, yaml.AliasEvent):
        raise ValueError(f"{here}an alias, *{event.anchor}, which is not read{_QUOTE}")
    if isinstance(event, yaml.NodeEvent) and event.anchor is not None:
        raise ValueError(f"{here}an anchor, &{event.anchor}, which is not read")
    tag = getattr(event, "tag", None)
    if tag is not None:
        raise ValueError(f"{here}a tag, {tag}, which is not read")
    if depth > MAX_DEPTH:
        raise ValueError(f"{here}nested deeper than {MAX_DEPTH} levels")
    if isinstance(event, yaml.MappingStartEvent):
        return Node(_mapping(events, depth), place or here)
    if isinstance(event, yaml.SequenceStartEvent):
        return Node(tuple(_items(events, depth)), place or here)
    assert isinstance(event, yaml.ScalarEvent), "the parser yields no other node"
    text: str = event.value
    if event.style is None and text in NOTHING:
        return Node(None, place or here)
    is_number = event.style is None and NUMBER.fullmatch(text)
    return Node(int(text) if is_number else text, place or here)


def _mapping(events: Iterator[Event], depth: int) -> dict[str, Node]:
    import yaml

    entries: dict[str, Node] = {}
    while not isinstance(event := next(events), yaml.MappingEndEvent):
        place = _place(event.start_mark)
        if isinstance(event, yaml.CollectionStartEvent):
            raise ValueError(f"{place}a key that is no text")
        _node(event, events, depth)  # which refuses what no value may be either
        assert isinstance(event, yaml.ScalarEvent), "the parser yields no other key"
        if event.value in entries:
            raise ValueError(f"{place}{event.value}: comes twice; which one counts is unknown")
        entries[event.value] = _node(next(events), events, depth + 1, place)
    return entries


def _items(events: Iterator[Event], depth: int) -> Iterator[Node]:
    import yaml

    while not isinstance(event := next(events), yaml.SequenceEndEvent):
        yield _node(event, events, depth + 1)


def _from_json(value: object, depth: int = 0) -> Node:
    if depth > MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, dict):
        return Node({str(key): _from_json(item, depth + 1) for key, item in value.items()})
    if isinstance(value, list):
        return Node(tuple(_from_json(item, depth + 1) for item in value))
    return Node(value if isinstance(value, str | None) or type(value) is int else str(value))
