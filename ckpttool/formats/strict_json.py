"""JSON without second meanings: every name once in its object, and strings that are text."""

from __future__ import annotations

import json
import re

LONG = re.compile(rb"\d{4301}")  # digits of a number that Python does not read since 3.10.7
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # half a character; two of them are one character


def parse_json(data: bytes, halves: str = "strict") -> object:
    """The value of a JSON document in UTF-8.

    Parameters
    ----------
    data
        The document.
    halves
        How halves of characters in strings are taken: ``strict`` is not at all, and
        ``surrogateescape`` as the bytes of a file's name that is no UTF-8.

    Raises
    ------
    ValueError
        It is no JSON, too deep, a name comes twice in one object, a number has thousands of
        digits, or a string holds half of a character, which no file could be written with.

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
            json.dumps(document, ensure_ascii=False).encode(errors=halves)
    except RecursionError as error:
        raise ValueError("no JSON: nested too deep") from error
    except (UnicodeError, json.JSONDecodeError) as error:
        raise ValueError(f"no JSON: {error}") from error
    except ValueError as error:
        if LONG.search(data):  # Python's message tells how to have it read all the same
            raise ValueError("a number of more than 4300 digits") from error
        raise
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
