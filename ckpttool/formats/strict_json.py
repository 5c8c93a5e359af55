"""JSON without second meanings: every name once in its object, and strings that are text."""

from __future__ import annotations

import json
import re

SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # half a character; two of them are one character


def parse_json(data: bytes) -> object:
    """The value of a JSON document in UTF-8.

    Raises
    ------
    ValueError
        It is no JSON, too deep, a name comes twice in one object, or a string holds half of a
        character, which no file could be written with.

    Examples
    --------
    >>> parse_json(b'{"a": [1, 2]}')
    {'a': [1, 2]}
    >>> parse_json(b'{"a": 1, "a": 2}')
    Traceback (most recent call last):
    ...
    ValueError: a: stored twice; which one counts cannot be known
    """
    try:
        document: object = json.loads(data.decode(), object_pairs_hook=_object)
        if SURROGATE.search(data):
            json.dumps(document, ensure_ascii=False).encode()
    except RecursionError as error:
        raise ValueError("no JSON: nested too deep") from error
    except (UnicodeError, json.JSONDecodeError) as error:
        raise ValueError(f"no JSON: {error}") from error
    return document


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"{name}: stored twice; which one counts cannot be known")
            seen.add(name)
    return entries
