"""JSON without ambiguity: names are unique in their object, and strings are valid text.

All documents are parsed here, into values or records, so that what one reader refuses all refuse.
Limits on size are those of the caller, and so is what the values mean.
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import TypeVar

import msgspec

from ckpttool.formats.local import open_file
from ckpttool.lazy import compile_late
from ckpttool.problems import FormatError

_LONG_NUMBER = compile_late(rb"\d{4301}")  # Python since 3.10.7 refuses a number of so many digits
T = TypeVar("T")

_SURROGATE = compile_late(rb"\\u[dD][89a-fA-F]")  # half a character; two of them are one character


def parse_json(data: bytes, halves: str = "strict") -> object:
    """Return the value of a JSON document in UTF-8.

    ``halves`` is the treatment of half characters in strings: ``strict`` refuses them,
    ``surrogateescape`` takes them for the bytes of a file name that is not UTF-8.

    Raises
    ------
    ValueError
        The document is not JSON, or nested too deep; a name comes twice in one object; a number
        has thousands of digits; a string holds half of a character, which cannot be written.

    Examples
    --------
    >>> parse_json(b'{"a": [1, 2]}')
    {'a': [1, 2]}
    >>> parse_json(b'{"a": 1, "a": 2}')
    Traceback (most recent call last):
    ...
    ValueError: a: stored twice; nothing shows which one is valid
    """
    if (value := _decode(object, data)) is not None:
        return value
    try:
        document: object = json.loads(data.decode(), object_pairs_hook=_object)
        if _SURROGATE.search(data):
            json.dumps(document, ensure_ascii=False).encode(errors=halves)
    except RecursionError as error:
        raise ValueError("not valid JSON: nested too deep") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"not valid JSON: byte {error.start} is not UTF-8") from error
    except UnicodeEncodeError as error:
        raise ValueError("not valid JSON: half of a character (surrogate)") from error
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise ValueError(f"not valid JSON from {place} on") from error
    except ValueError as error:
        if _LONG_NUMBER.search(data):  # Python's message describes how to lift its limit
            raise ValueError("a number of more than 4300 digits") from error
        raise
    return document


def parse_as(kind: type[T], data: bytes, halves: str = "strict") -> T:
    """Return the value of a JSON document in UTF-8 as a record.

    Names that the record does not have are left out.

    Raises
    ------
    ValueError
        See `parse_json`; or an entry is of another type, with its place in the document.

    Examples
    --------
    >>> from ckpttool.model.manifest import StrategyFile
    >>> parse_as(StrategyFile, b'{"path": "s.ckpt", "nbytes": "7", "sha256": "12"}')
    Traceback (most recent call last):
    ...
    ValueError: nbytes: expected int, got str
    """
    if (value := _decode(kind, data)) is not None:
        return value
    return convert_as(kind, parse_json(data, halves))


def _decode(kind: type[T], data: bytes) -> T | None:
    """Return the value of a document that says nothing else; None if it may, or is not valid.

    It says nothing else if the value makes the text again: then no name came twice.  This takes a
    fifth of the time of Python's parser; a manifest may list millions of tensors.
    """
    # `parse_json` explains them; before 0.22 msgspec raised UnicodeDecodeError.
    with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError):
        value = msgspec.json.decode(data, type=kind)
        if msgspec.json.encode(value) == msgspec.json.format(data, indent=-1):
            return value
    return None


def convert_as(kind: type[T], value: object) -> T:
    """Return a value of a document, or an object with attributes, as a record.

    Names that the record does not have are left out.

    Raises
    ------
    ValueError
        An entry is of another type, or the record refuses it; the error has its place.

    Examples
    --------
    >>> convert_as(tuple[int, ...], [1, None])
    Traceback (most recent call last):
    ...
    ValueError: [1]: expected int, got null
    """
    try:
        return msgspec.convert(value, kind, from_attributes=True)
    except msgspec.ValidationError as error:
        what, _, place = str(error).replace("`", "").partition(" - at $")
        what = what[0].lower() + what[1:]
        raise ValueError(f"{place.lstrip('.')}: {what}" if place else what) from error


def to_json(value: object) -> bytes:
    """Return the ASCII text of integers, strings, sequences and records, as `json.dumps` makes it.

    It takes a third of the time; a manifest may list millions of tensors.

    >>> from ckpttool.model.tensors import Extent
    >>> to_json([Extent(0, 8), ""])
    b'[{"offset": 0, "nbytes": 8}, ""]'
    """
    document = msgspec.json.format(msgspec.json.encode(value), indent=0)
    if document.isascii() and b"\x7f" not in document:  # which msgspec does not escape
        return document
    return json.dumps(msgspec.to_builtins(value)).encode("ascii")


def read_json_object(path: str, max_bytes: int) -> dict[str, object]:
    """Return the object in a JSON file of at most ``max_bytes`` bytes.

    Raises
    ------
    FormatError
        The file is larger, or not a JSON object; see `parse_json`.
    OSError
        The file cannot be opened or read.
    """
    with open_file(path) as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise FormatError(path, None, f"too large: at most {max_bytes} bytes are read")
    try:
        document = parse_json(data)
    except ValueError as error:
        raise FormatError(path, None, str(error)) from error
    if not isinstance(document, dict):
        raise FormatError(path, None, "not a JSON object")
    return document


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"{name}: stored twice; nothing shows which one is valid")
            seen.add(name)
    return entries
