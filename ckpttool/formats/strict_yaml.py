"""YAML and JSON without second meanings, and the line and the column of what YAML says.

Only what JSON has is read: mappings with text for keys, sequences, text, whole numbers and nothing
(``null``, ``~`` or no value).  A number is a plain decimal one; ``010``, ``1_000``, ``1:30``,
``yes`` and ``1.5`` are text, as are dates.  One document in UTF-8 of at most 1 MiB.

Refused: a key that comes twice in its mapping, tags (``!!python/object``), and aliases (``*a``).
Nothing else is constructed, and nothing is larger than the file.

Source
------
YAML 1.1, as PyYAML composes it; none of its constructors is used.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpttool.formats.strict_json import parse_json

if TYPE_CHECKING:
    import yaml

MAX_BYTES = 1 << 20  # ten thousand lines by hand; the parser takes seconds for each MiB
NUMBER = re.compile(r"-?(0|[1-9][0-9]{0,17})")
NOTHING = ("", "~", "null")
QUOTE = 'a name or a pattern that begins with * stands in quotes: "*.weight"'


@dataclass(frozen=True, slots=True)
class Node:
    """A value of a document, and where it stands.

    Attributes
    ----------
    value
        Text, a number, None, a sequence or a mapping.
    place
        ``"line 3, column 5: "``, of a mapping's value where its key stands; empty in JSON.
    """

    value: str | int | tuple[Node, ...] | dict[str, Node] | None
    place: str = ""


def parse_yaml(data: bytes) -> Node:
    """Return the value of a YAML document.

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

    class Loader(yaml.SafeLoader):
        """A loader that refuses what is not in the text itself."""

        def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
            event: Any = self.peek_event()  # type: ignore[no-untyped-call]
            is_alias = isinstance(event, yaml.AliasEvent)
            if is_alias or event.tag is not None:
                problem = f"{'an alias' if is_alias else 'a tag'}, which is not read"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
            return super().compose_node(parent, index)

    if len(data) > MAX_BYTES:
        raise ValueError(f"{len(data)} bytes; {MAX_BYTES} are the most")
    try:
        text = data.decode("utf-8-sig")
        root = yaml.compose(text, Loader=Loader)
    except UnicodeError as error:
        raise ValueError(f"not UTF-8: {error}") from error
    except RecursionError as error:
        raise ValueError("no YAML: nested too deep") from error
    except yaml.MarkedYAMLError as error:
        marks = [mark.index for mark in (error.context_mark, error.problem_mark) if mark]
        hint = f"; {QUOTE}" if any(text[at : at + 1] == "*" for at in marks) else ""
        raise ValueError(f"{_place(error.problem_mark)}no YAML: {error.problem}{hint}") from error
    except yaml.YAMLError as error:
        raise ValueError(f"no YAML: {str(error).splitlines()[0]}") from error
    return Node(None) if root is None else _from_yaml(root, _place(root.start_mark))


def nodes_of_json(data: bytes) -> Node:
    """Return the value of a JSON document, as `parse_yaml` does, but without places.

    Raises
    ------
    ValueError
        See `parse_json`.
    """
    try:
        return _from_json(parse_json(data))
    except RecursionError as error:
        raise ValueError("no JSON: nested too deep") from error


def _place(mark: Any) -> str:
    return "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "


def _from_yaml(node: yaml.Node, place: str) -> Node:
    """Return the value of a node of PyYAML, which may stand elsewhere than its key."""
    import yaml

    if isinstance(node, yaml.SequenceNode):
        return Node(tuple(_from_yaml(item, _place(item.start_mark)) for item in node.value), place)
    if isinstance(node, yaml.MappingNode):
        entries: dict[str, Node] = {}
        for key, value in node.value:
            at = _place(key.start_mark)
            if not isinstance(key, yaml.ScalarNode):
                raise ValueError(f"{at}a key that is no text")
            if key.value in entries:
                raise ValueError(f"{at}{key.value}: comes twice; which one counts is unknown")
            entries[key.value] = _from_yaml(value, at)
        return Node(entries, place)
    is_plain = isinstance(node, yaml.ScalarNode) and node.style is None
    if is_plain and node.value in NOTHING:
        return Node(None, place)
    is_number = is_plain and NUMBER.fullmatch(node.value)
    return Node(int(node.value) if is_number else node.value, place)


def _from_json(value: object) -> Node:
    if isinstance(value, dict):
        return Node({str(key): _from_json(item) for key, item in value.items()})
    if isinstance(value, list):
        return Node(tuple(_from_json(item) for item in value))
    return Node(value if isinstance(value, str | None) or type(value) is int else str(value))
