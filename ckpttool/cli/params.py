"""Parameter types of the command line: paths, numbers, ranks, sizes, parts."""

from __future__ import annotations

import math
import os
import re
from contextlib import suppress
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    NumberType = click.ParamType[float]
    PartType = click.ParamType[tuple[int, int]]
    RanksType = click.ParamType[tuple[int, ...]]
    SizeType = click.ParamType[int]
    WholeType = click.ParamType[int]
else:  # generic from click 8.4 on only
    NumberType = PartType = RanksType = SizeType = WholeType = click.ParamType


class UsageProblem(click.BadParameter):
    """A wrong command line, with what to use instead; about an option if its type raises it."""

    def __init__(
        self,
        message: str,
        hint: str = "",
        param: click.Parameter | None = None,
        ctx: click.Context | None = None,
    ) -> None:
        super().__init__(message, ctx, param)
        self.hint = hint


class PathName(click.Path):
    """A path on the command line; URLs and empty paths are refused.

    An unset variable gives an empty path.  Without quotes (``-o $OUT --overwrite``) the next option
    becomes the path, so names that begin with ``-`` are refused, except ``-`` itself.
    """

    def convert(
        self,
        value: str | os.PathLike[str],
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> str | bytes | os.PathLike[str]:
        """Return the path."""
        from ckpttool.formats.local import why_not_a_path

        name = str(value)
        if not name:
            self.fail("the path is empty; is a variable unset?", param, ctx)
        if (reason := why_not_a_path(name)) is not None:
            self.fail(f"{name!r} is {reason}", param, ctx)
        if isinstance(param, click.Option) and name.startswith("-") and name != "-":
            text = (
                f"{name!r} looks like an option; is a variable unset?  Write a file of this name as"
            )
            self.fail(f"{text} './{name}'", param, ctx)
        path = super().convert(value, param, ctx)
        if (problem := self.find_problem(name)) is not None:
            self.fail(problem, param, ctx)
        return path

    def find_problem(self, name: str) -> str | None:
        """Return why this type refuses a path, or None."""
        return None


class OutputFolder(PathName):
    """An output folder on the command line."""

    def find_problem(self, name: str) -> str | None:
        """Refuse ``-``."""
        text = "outputs do not go to standard output; name a folder (one of this name is './-')"
        return text if name == "-" else None


class Existing(PathName):
    """A path to a file or folder that exists, on the command line."""

    def __init__(self) -> None:
        super().__init__(readable=False)

    def find_problem(self, name: str) -> str | None:
        """Refuse a path that does not exist; raise the system's error if it cannot be reached."""
        from ckpttool.formats.local import ABSENT, stat_file

        try:
            stat_file(name)
        except OSError as error:
            if error.errno not in ABSENT:
                raise
            return f"Path {name!r} {_explain_absence(Path(name))}"
        return None


class StrategyFile(Existing):
    """A strategy file, or a folder of them, on the command line."""

    def find_problem(self, name: str) -> str | None:
        """Refuse a path that does not exist; a number is perhaps a number of ranks."""
        problem = super().find_problem(name)
        if problem is not None and name.isdecimal():
            return f"{name!r} is not a strategy file; `ckpttool help -d` shows one for {name} ranks"
        return problem


def _explain_absence(path: Path) -> str:
    """Return why a path does not exist: a dangling link, an unfinished run or a misspelt name."""
    from difflib import get_close_matches

    from ckpttool.formats.local import is_link, list_folder
    from ckpttool.transaction.states import find_unfinished_run

    with suppress(OSError):  # a folder that cannot be read explains nothing
        if is_link(path):
            return f"is a link to {str(path.readlink())!r}, which leads nowhere."
        for output in (path, *path.absolute().parents[:2]):  # a file, or one of a set
            if unfinished := find_unfinished_run(output):
                return f"does not exist: {unfinished.fact}"
        names = [one.name for one in list_folder(path.parent)]
        if near := get_close_matches(path.name, names, 1):
            return f"does not exist; did you mean {str(path.parent / near[0])!r}?"
    return "does not exist."


class Number(NumberType):
    """A number from 0 on, on the command line."""

    name = "number"

    def convert(
        self, value: str, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return the number; refuse infinity and NaN."""
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not 0 <= number < math.inf:
            self.fail(f"{value!r} is not a finite number of at least 0; example: 1e-3", param, ctx)
        return number


class WholeNumber(WholeType):
    """A whole number on the command line, not less than ``min``."""

    name = "whole number"

    def __init__(self, min: int) -> None:
        self.min = min

    def convert(
        self, value: str | int, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        """Return the number."""
        match = re.fullmatch(r"\s*\+?(\d{1,18})\s*", str(value), re.ASCII)
        if match is None or int(match[1]) < self.min:
            self.fail(f"{str(value)!r} is not a whole number of at least {self.min}", param, ctx)
        return int(match[1])


class RankList(RanksType):
    """Ranks on the command line, such as ``0,3-7``."""

    name = "ranks"

    def convert(
        self, value: str, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        """Return the ranks, ascending and unique."""
        ranks: set[int] = set()
        for part in value.split(","):
            match = re.fullmatch(r"\s*(\d{1,7})(?:-(\d{1,7}))?\s*", part)  # no cluster has more
            if match is None or int(match[2] or match[1]) < int(match[1]):
                text = f"{part!r} is not a rank or a range of ranks; example: 0,3-7"
                self.fail(text, param, ctx)
            ranks.update(range(int(match[1]), int(match[2] or match[1]) + 1))
        return tuple(sorted(ranks))


class Size(SizeType):
    """A number of bytes on the command line, such as ``5GB`` or ``2GiB``."""

    name = "size"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the bytes; a GB has 10^9 and a GiB 2^30, as in Hugging Face's options."""
        match = re.fullmatch(r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*(|[kKMGT]i?)B\s*", value, re.ASCII)
        prefix = match[2].upper() if match is not None else ""
        unit = (1024 if prefix.endswith("I") else 1000) ** " KMGT".index(prefix[:1] or " ")
        nbytes = 0 if match is None else int(Decimal(match[1]) * unit)
        if not nbytes:
            text = f"{value!r} is not a size; examples: 500MB (of 1000), 2GiB (of 1024)"
            self.fail(text, param, ctx)
        return nbytes


class PartOf(PartType):
    """One part of several on the command line, such as ``2/8``."""

    name = "part"

    def convert(
        self, value: str, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, int]:
        """Return the number of the part, from 1 on, and the number of parts."""
        match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", value)
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            self.fail(f"{value!r} is not a part K/N with K from 1 to N; example: 2/8", param, ctx)
        return int(match[1]), int(match[2])


class StrategyName(PathName):
    """An output strategy file on the command line."""

    name = "file"

    def find_problem(self, name: str) -> str | None:
        """Refuse ``-``, and the suffix of another form of strategy file."""
        from ckpttool.strategy_files.writer import name_problem

        if name == "-":
            return "a strategy does not go to standard output; name a file"
        return name_problem(name)
