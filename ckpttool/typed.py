"""Values that a person types: ranks, sizes, parts and keys, on the command line and in Python."""

from __future__ import annotations

import errno
import math
import operator
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from string import Formatter
from typing import IO, Literal, NamedTuple, SupportsIndex

from ckpttool.problems import join_clauses
from ckpttool.secret import Secret
from ckpttool.system import forbid_core_dumps
from ckpttool.wording import parse_numbers

ManifestChoice = Literal["samples", "all", "ignore"]
NotInTarget = Literal["follow", "full", "drop"]
OnOverflow = Literal["error", "inf"]
PadWith = Literal["zero", "mean"]
UnlistedChoice = Literal["rank", "first", "drop"]

PREFIX = "checkpoint_"  # of the files of ranks

KEY_SIZES = (16, 24, 32)  # bytes of the keys that MindSpore accepts
HEX_PREFIX = b"hex:"  # a key in this form never has one of these sizes
MAX_KEY_FILE_BYTES = 1024  # a larger file does not hold a key


class TypedError(ValueError):
    """A text that is not a value of its kind.

    Parameters
    ----------
    message
        What is wrong.
    facts
        What was expected.
    example
        A right value.
    """

    def __init__(self, message: str, facts: str = "", example: str = "") -> None:
        super().__init__(message, facts, example)
        self.message = message
        self.facts = facts
        self.example = example

    def __str__(self) -> str:
        return join_clauses(self.message, self.facts, self.example and f"example: {self.example}")


def require_choice(name: str, given: object, choices: Collection[object]) -> None:
    """Raise `ValueError` for a value of a keyword that is not one of its choices."""
    if given not in choices:
        raise ValueError(f"{name}={given!r}, expected one of {tuple(choices)}")


def require_number(name: str, given: object) -> None:
    """Raise `TypeError` or `ValueError` unless a value is None or a whole number from 1 on."""
    if given is None:
        return
    if not isinstance(given, int) or isinstance(given, bool):
        raise TypeError(f"{name}={given!r}, expected a whole number")
    if given < 1:
        raise ValueError(f"{name}={given}, expected 1 or more")


def require_seconds(name: str, given: object) -> None:
    """Raise `TypeError` or `ValueError` unless a value is None or a number from 0 on."""
    if given is None:
        return
    if not isinstance(given, int | float) or isinstance(given, bool):
        raise TypeError(f"{name}={given!r}, expected seconds, or a text such as '10m'")
    if not 0 <= given < math.inf:
        raise ValueError(f"{name}={given}, expected 0 or more seconds")


def require_rank(name: str, given: SupportsIndex) -> int:
    """Return the number of a rank, of NumPy's types too; raise `TypeError` for anything else.

    Examples
    --------
    >>> import numpy as np
    >>> require_rank("rank", np.int64(3))
    3
    """
    if isinstance(given, bool) or not hasattr(given, "__index__"):
        raise TypeError(f"{name}={given!r}, expected the number of a rank, such as 3")
    return operator.index(given)


def parse_ranks(value: str) -> tuple[int, ...]:
    """Return ranks such as ``0,3-7``, ascending and unique."""
    try:
        return parse_numbers(value)
    except ValueError as error:
        raise TypedError(f"{error} is not a rank or a range of ranks", example="0,3-7") from error


def parse_rank_files(value: str) -> str:
    """Return the path of each rank's file, perhaps a URL; refuse one without ``{rank}``."""
    if "{rank}" not in value:
        example = "ckpt/rank_{rank}/net-1_10.ckpt"
        raise TypedError(f"{value!r} does not have {{rank}} in it", example=example)
    return value


def parse_size(value: str) -> int:
    """Return the bytes of ``2GiB`` or ``2G`` (of 2^30), or of ``5GB`` (of 10^9).

    A letter alone is binary, as in the words of ``head -c`` and of containers.

    Examples
    --------
    >>> parse_size("1.5G") == parse_size("1536MiB"), parse_size("500MB")
    (True, 500000000)
    """
    pattern = r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*(?:([kKMGT])(|B|iB?)|B)\s*"
    match = re.fullmatch(pattern, value, re.ASCII)
    number, prefix, end = ("0", None, "") if match is None else match.groups()
    unit: int = (1000 if end == "B" else 1024) ** " KMGT".index((prefix or " ").upper())
    whole, _, decimals = number.partition(".")
    scale: int = 10 ** len(decimals)
    if nbytes := int(whole + decimals) * unit // scale:
        return nbytes
    facts = "A size ends with its unit: 2GiB or 2G (of 1024), or 500MB (of 1000)."
    raise TypedError(f"{value!r} is not a size", facts, "2GiB")


NAME_FIELDS = ("model", "rank", "step")


def parse_file_name(value: str) -> str:
    """Return the name of the rank files, without suffix: ``{model}_rank_{rank}-{step}``.

    Examples
    --------
    >>> parse_file_name("llama_rank_{rank}-{step}")
    'llama_rank_{rank}-{step}'
    """
    example = "{model}_rank_{rank}-{step}"
    try:
        parts = [*Formatter().parse(value)]
    except ValueError as error:
        raise TypedError(f"{value!r} has a brace too many", str(error), example) from error
    fields = [(name, spec or conversion) for _, name, spec, conversion in parts if name is not None]
    known = ", ".join(f"{{{name}}}" for name in NAME_FIELDS)
    for field, rest in fields:
        if rest:
            raise TypedError(f"{value!r} formats {{{field}}}", "Fields stand as they are.", example)
        if field not in NAME_FIELDS:
            message = f"{value!r} has an unknown field {{{field}}}"
            raise TypedError(message, f"Fields: {known}.", example)
    if "rank" not in dict(fields):
        raise TypedError(f"{value!r} gives all ranks one name", "It needs {rank}.", example)
    if "/" in value or "\0" in value:
        facts = "The files lie in rank_0/, rank_1/, ..."
        raise TypedError(f"{value!r} has a / in it", facts, example)
    if value.startswith("."):
        facts = "Hidden files are not read again."
        raise TypedError(f"{value!r} begins with a dot", facts, example)
    return value


SECONDS = {"s": 1, "m": 60, "h": 3600}  # of the units of a duration


def parse_duration(value: str) -> float:
    """Return the seconds of ``90s``, ``10m`` or ``1h``.

    Examples
    --------
    >>> parse_duration("90s"), parse_duration("1.5h")
    (90.0, 5400.0)
    """
    match = re.fullmatch(r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*([a-zA-Z]*)\s*", value, re.ASCII)
    if match is None or match[2] not in SECONDS:
        facts = "A duration is one number with its unit: s, m or h."
        raise TypedError(f"{value!r} is not a duration", facts, "10m")
    return float(match[1]) * SECONDS[match[2]]


def parse_rows(value: str) -> slice:
    """Return a slice in the words of NumPy: ``0:4``, ``::100``."""
    number = r"\s*([+-]?\d{1,18})?\s*"
    match = re.fullmatch(f"{number}:{number}(?::{number})?", value, re.ASCII)
    if match is None:
        facts = "START:STOP or START:STOP:STEP, as NumPy slices."
        raise TypedError(f"{value!r} is not a slice of rows", facts, "0:4")
    start, stop, step = (None if group is None else int(group) for group in match.groups())
    if step == 0:
        raise TypedError("the step of a slice is not 0", example="::2")
    return slice(start, stop, step)


def parse_part(value: str) -> tuple[int, int]:
    """Return the number of a part, from 1 on, and the number of parts: ``2/8``."""
    match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", value)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        facts, example = "", "2/8"
        if match is not None and int(match[1]) == 0 < int(match[2]):
            facts, example = "The first part is 1/N.", f"1/{match[2]}"
        raise TypedError(f"{value!r} is not a part K/N with K from 1 to N", facts, example)
    return int(match[1]), int(match[2])


class AveragedText(NamedTuple):
    """An input of an average, as a person types it; None for what is left to the tool."""

    path: str
    strategy: tuple[str, ...] = ()
    step: str | None = None
    weight: float | None = None


def parse_scaled(typed: str) -> tuple[str, float | None]:
    """Return a path and the number behind it; None for none.

    Examples
    --------
    >>> parse_scaled("adapter/:2"), parse_scaled("c:run")
    (('adapter/', 2.0), ('c:run', None))
    """
    head, colon, tail = typed.rpartition(":")
    with suppress(ValueError):  # then the colon is part of a path
        return (head, float(tail)) if colon else (typed, None)
    return typed, None


def parse_averaged(typed: str) -> AveragedText:
    """Return the parts of ``PATH[,strategy=FILE][,step=STEP][:WEIGHT]``.

    Examples
    --------
    >>> parse_averaged("run/a,strategy=s.ckpt:0.25")
    AveragedText(path='run/a', strategy=('s.ckpt',), step=None, weight=0.25)
    >>> parse_averaged("c:run")
    AveragedText(path='c:run', strategy=(), step=None, weight=None)
    """
    typed, weight = parse_scaled(typed)
    path, *parts = re.split(r",(?=strategy=|step=)", typed)
    given = [part.partition("=") for part in parts]
    steps = [value for key, _, value in given if key == "step"]
    values = [path, *(value for _, _, value in given)]
    if len(steps) > 1 or not all(values):
        facts = "An input has a path, perhaps strategies, one step and a weight."
        raise TypedError(f"{typed!r} is not an input", facts, "run/,strategy=s.ckpt,step=8000:0.25")
    strategy = tuple(value for key, _, value in given if key == "strategy")
    return AveragedText(path, strategy, next(iter(steps), None), weight)


def parse_steps(value: str) -> Sequence[int | str]:
    """Return the steps of a list, or of ``FIRST..LAST:STRIDE``; LAST is one of them.

    Those of a list are numbers, or all as in names.

    Examples
    --------
    >>> [*parse_steps("8000..9000:500")], parse_steps("1,3,4"), parse_steps("1_100,2_100")
    ([8000, 8500, 9000], [1, 3, 4], ['1_100', '2_100'])
    """
    if re.fullmatch(r"\d{1,12}(,\d{1,12})+", value, re.ASCII):
        return [*map(int, value.split(","))]
    if re.fullmatch(r"\d{1,12}_\d{1,12}(,\d{1,12}_\d{1,12})+", value, re.ASCII):
        return value.split(",")
    match = re.fullmatch(r"(\d{1,12})\.\.(\d{1,12}):(\d{1,12})", value, re.ASCII)
    first, last, stride = map(int, match.groups()) if match is not None else (0, 0, 0)
    if not stride or last < first or (last - first) % stride:
        facts = "FIRST..LAST:STRIDE counts from FIRST to LAST, and reaches it; or 1,3,4."
        raise TypedError(f"{value!r} does not name steps", facts, "8000..10000:500")
    return range(first, last + 1, stride)


def read_list(path: str) -> tuple[str, ...]:
    """Return the lines of a text file, without empty ones."""
    try:
        with open(path, encoding="utf-8") as file:  # noqa: PTH123, a path in every command
            lines = tuple(filter(None, map(str.strip, file)))
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        message = f"{path!r} cannot be read ({reason})"
        raise TypedError(message, "expected a text file", "files.txt") from None
    if not lines:
        raise TypedError(f"{path!r} has no lines", "expected a path in each", "files.txt")
    return lines


PARSERS: Mapping[str, Callable[[str], object]] = {  # of texts that a keyword takes, by their kind
    "ranks": parse_ranks,
    "size": parse_size,
    "time": parse_duration,
    "k/n": parse_part,
    "list": read_list,
}


def read_key(file: IO[bytes]) -> Secret:
    r"""Return the key that a file holds: its bytes, or ``hex:`` and its digits.

    One line end after them is ignored.

    Raises
    ------
    TypedError
        The file holds no key.
    BlockingIOError
        The read would block.

    Examples
    --------
    >>> import io
    >>> read_key(io.BytesIO(b"0123456789abcdef\n")).reveal()
    b'0123456789abcdef'
    >>> len(read_key(io.BytesIO(b"hex:" + b"5A" * 32)))
    32
    """
    forbid_core_dumps()
    data = file.read(MAX_KEY_FILE_BYTES + 1)
    if data is None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    is_small = len(data) <= MAX_KEY_FILE_BYTES
    for end in (b"", b"\n", b"\r\n") if is_small else ():
        key = data.removesuffix(end)
        if not data.endswith(end):
            continue
        if len(key) not in KEY_SIZES and key.startswith(HEX_PREFIX):
            try:
                key = bytes.fromhex(key.removeprefix(HEX_PREFIX).decode("ascii"))
            except ValueError:
                continue
        if len(key) in KEY_SIZES:
            return Secret(key)
    size = f"{len(data)} bytes" if is_small else "too many bytes"
    facts = "A key has 16, 24 or 32 bytes, or is written as hex:00ff..."
    raise TypedError(f"the file holds {size}, which is not a key", facts)
