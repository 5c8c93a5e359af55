"""Parameter types of the command line: paths, numbers, ranks, sizes, parts."""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ckpttool.problems import CkptToolError, join_clauses
from ckpttool.typed import (
    AveragedText,
    TypedError,
    parse_averaged,
    parse_duration,
    parse_part,
    parse_rank_files,
    parse_ranks,
    parse_size,
    parse_steps,
)
from ckpttool.wording import nearest, shorten

if TYPE_CHECKING:
    ChoiceType = click.Choice[str]
    ParsedType = click.ParamType[object]
else:  # generic from click 8.4 on only
    ChoiceType, ParsedType = click.Choice, click.ParamType


class UsageProblem(click.BadParameter):
    """A wrong command line; about a parameter if its type or callback raises it.

    Parameters
    ----------
    message
        What is wrong.
    hint
        What to type.
    facts
        What was expected and found.
    instead
        A right value of the parameter; the hint is then the parameter with this value.
    ctx
        The context of the command; types and callbacks leave it to click.
    """

    def __init__(
        self,
        message: str,
        hint: str = "",
        facts: str = "",
        instead: str = "",
        ctx: click.Context | None = None,
    ) -> None:
        super().__init__(message, ctx)
        self.facts = facts
        self.instead = instead
        self._hint = hint

    @property
    def hint(self) -> str:
        """What to type: an option with its value, or the beginning of a command."""
        if not self.instead or self.param is None or self.ctx is None:
            return self._hint
        value = shlex.quote(self.instead)
        if isinstance(self.param, click.Option):
            return f"{self.param.opts[0]} {value}"
        arguments = [one for one in self.ctx.command.params if one.param_type_name == "argument"]
        before = [one.human_readable_name for one in arguments[: arguments.index(self.param)]]
        return " ".join((self.ctx.command_path, *before, value, "..."))


def refuse_repeated(option: click.Option, values: Sequence[object]) -> None:
    """Raise `UsageProblem` if an option of one value has several; none is named, for a key's sake.

    The last one would silently replace the others.
    """
    if len(values) > 1:
        hint = f"the same command with one {option.opts[0]}"
        raise UsageProblem(f"given {len(values)} times, expected once", hint)


class Choice(ChoiceType):
    """One of a few words on the command line."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the word."""
        if value not in self.choices:
            some, names = shorten(self.choices, 3), ", ".join(self.choices)
            facts = names if names != some else ""
            instead = nearest(value, self.choices)
            raise UsageProblem(f"{value!r} is not one of {some}", facts=facts, instead=instead)
        return str(value)


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
    ) -> str:
        """Return the path."""
        name = str(value)
        if not name:
            raise UsageProblem("the path is empty", facts="A variable of the shell may be unset.")
        refuse_url(name)
        if isinstance(param, click.Option) and name.startswith("-") and name != "-":
            facts = "A path is missing before it, or a variable of the shell is unset."
            raise UsageProblem(f"{name!r} looks like an option", facts=facts, instead=f"./{name}")
        self.check(name)
        return name

    def check(self, name: str) -> None:
        """Raise `UsageProblem` if this type refuses a path."""


def refuse_url(text: str) -> None:
    """Raise `UsageProblem` if a text is a URL."""
    from ckpttool.formats.local import url_problem

    if (problem := url_problem(text)) is not None:
        what, hint = problem
        raise UsageProblem(f"{text!r} is {what}", hint)


class OutputPath(PathName):
    """An output on the command line, which is not ``-``.

    Parameters
    ----------
    example
        Name of an output.
    """

    def __init__(self, example: str) -> None:
        super().__init__()
        self.example = example

    def check(self, name: str) -> None:
        """Refuse ``-``."""
        if name == "-":
            raise UsageProblem("outputs do not go to standard output", instead=self.example)


class PagePath(OutputPath):
    """A page to write, whose name says that it is one."""

    def check(self, name: str) -> None:
        """Refuse names of other files, such as pictures."""
        super().check(name)
        path = Path(name)
        if path.suffix.lower() not in ("", ".html", ".htm") and not name.endswith("/"):
            facts = "The page is HTML, which a browser opens."
            instead = str(path.with_suffix(".html"))
            raise UsageProblem(f"{name!r} does not end in .html", facts=facts, instead=instead)


class Existing(PathName):
    """A path to a file or folder that exists, on the command line.

    Parameters
    ----------
    what
        What the file or folder is.
    """

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def check(self, name: str) -> None:
        """Refuse a path that does not exist; raise the system's error if it cannot be reached."""
        from ckpttool.formats.local import ABSENT, stat_file

        try:
            stat_file(name)
        except OSError as error:
            if error.errno not in ABSENT:
                raise
            raise self._explain_absence(Path(name)) from error

    def fits(self, path: Path) -> bool:
        """Return whether a path that exists may be the one that was meant."""
        return True

    def _nearest(self, path: Path, names: Sequence[str]) -> str:
        """Return the name beside a path that does not exist that was perhaps meant."""
        return nearest(path.name, names, lambda name: self.fits(path.parent / name))

    def _explain_absence(self, path: Path) -> UsageProblem:
        """Return why a path does not exist: a dangling link, a stopped run or a misspelt name."""
        from ckpttool.formats.local import is_folder, is_link, list_folder
        from ckpttool.transaction.states import find_unfinished_run

        message = f"{str(path)!r} does not exist"
        with suppress(OSError):  # a folder that cannot be read explains nothing
            if is_link(path):
                message = (
                    f"{str(path)!r} is a link to {str(path.readlink())!r}, which does not exist"
                )
                return UsageProblem(message, f"ls -l {shlex.quote(str(path))}")
            for output in (path, *path.absolute().parents[:2]):  # a file, or one of a set
                if run := find_unfinished_run(output):
                    return UsageProblem(message, run.hint, join_clauses(run.fact, run.facts))
            names = [one.name for one in list_folder(path.parent)]
            if near := self._nearest(path, names):
                return UsageProblem(message, instead=str(path.parent / near))
        folder = next(one for one in (*path.parents, Path("/")) if is_folder(one))
        return UsageProblem(message, f"ls {shlex.quote(str(folder))}" if folder.name else "")


class StrategyFile(Existing):
    """A strategy file, or a folder of them, on the command line."""

    def __init__(self) -> None:
        super().__init__("a strategy file")

    def check(self, name: str) -> None:
        """Refuse a path that does not exist; a number is perhaps a number of ranks."""
        try:
            super().check(name)
        except UsageProblem as problem:
            if not name.isdecimal():
                raise AbsentStrategy(name, problem) if _has_source() else problem from None
            message = f"{name!r} is a number, not a strategy file"
            hint = f"`ckpttool help -d` shows a strategy for {name} ranks"
            raise UsageProblem(message, hint) from problem

    def _nearest(self, path: Path, names: Sequence[str]) -> str:
        """Return no name where a checkpoint decides which strategy fits."""
        return "" if _has_source() else super()._nearest(path, names)

    def fits(self, path: Path) -> bool:
        """Return whether a path is a strategy file, or a folder of them."""
        from ckpttool.strategy_files.reader import read_strategy

        try:
            read_strategy(str(path))
        except (CkptToolError, OSError):
            return False
        return True


class AbsentStrategy(UsageProblem):
    """A strategy file that does not exist; the command proposes one that fits its checkpoint."""

    def __init__(self, path: str, problem: UsageProblem) -> None:
        super().__init__(problem.message, problem.hint, problem.facts)
        self.path = path


def _has_source() -> bool:
    """Return whether the command has a checkpoint as well."""
    ctx = click.get_current_context(silent=True)
    names = () if ctx is None else [one.name for one in ctx.command.params]
    return any(name in names for name in ("src", "a"))


class Parsed(ParsedType):
    """A value that a function makes of a text on the command line, or refuses.

    Parameters
    ----------
    name
        What the option takes, for ``--help``.
    parse
        Returns the value of a text; raises `UsageProblem`, or a `TypedError` of any face.
    """

    def __init__(self, name: str, parse: Callable[[str], object]) -> None:
        self.name = name
        self.parse = parse

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> object:
        """Return the value."""
        try:
            return self.parse(str(value))
        except TypedError as error:
            raise UsageProblem(error.message, "", error.facts, error.instead) from error


def parse_pattern(text: str) -> str:
    """Return a pattern for the paths of rank files; refuse one without ``{rank}``."""
    refuse_url(text)
    if "{rank}" not in text:
        raise UsageProblem(f"{text!r} does not have {{rank}} in it", instead="node{rank}/*.ckpt")
    return text


def parse_name_pattern(text: str) -> str:
    """Return a pattern of names of tensors; refuse a malformed regular expression."""
    from ckpttool.model.patterns import Pattern

    try:
        return Pattern(text).text
    except ValueError as error:
        raise UsageProblem(str(error), instead="re:layers[.][0-3][.]") from error


def parse_engine(text: str) -> str:
    """Return the name of an engine."""
    from ckpttool.execution.executors import ENGINES, describe_engines, split_engine_name

    try:
        split_engine_name(text)
    except ValueError as error:
        near = nearest(text.partition(":")[0], ENGINES)
        facts, instead = f"Engines: {describe_engines()}.", ENGINES[near][1] if near else ""
        raise UsageProblem(f"{text!r} is not an engine", facts=facts, instead=instead) from error
    return text


def parse_jobs(text: str) -> object:
    """Return a number of threads; an engine has its own option."""
    try:
        return whole_number(1, 999_999).parse(text)
    except UsageProblem as error:
        try:
            hint = f"--engine {parse_engine(text)}"
        except UsageProblem:
            raise error from None
        raise UsageProblem(error.message, hint) from error


def parse_number(text: str) -> float:
    """Return a number from 0 on; refuse infinity and NaN."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise UsageProblem(f"{text!r} is not a finite number of at least 0", instead="1e-3")
    return number


def whole_number(least: int, most: int | None = None) -> Parsed:
    """Return the type of a whole number from ``least`` to ``most``, if there is one."""

    def parse(text: str) -> int:
        match = re.fullmatch(r"\s*\+?(\d{1,18})\s*", text, re.ASCII)
        if match is None or not least <= int(match[1]) <= (most or math.inf):
            limits = f"from {least} on" if most is None else f"from {least} to {most}"
            raise UsageProblem(f"{text!r} is not a whole number {limits}", instead="4")
        return int(match[1])

    return Parsed("n", parse)


def parse_rows(text: str) -> tuple[int | None, int | None, int | None]:
    """Return start, stop and step of a slice in the words of NumPy."""
    number = r"\s*([+-]?\d{1,18})?\s*"
    match = re.fullmatch(f"{number}:{number}(?::{number})?", text, re.ASCII)
    if match is None:
        instead = f"{text}:{int(text) + 1}" if re.fullmatch(r"\d{1,18}", text, re.ASCII) else "0:4"
        facts = "START:STOP or START:STOP:STEP, as NumPy slices."
        raise UsageProblem(f"{text!r} is not a slice of rows", facts=facts, instead=instead)
    start, stop, step = (None if one is None else int(one) for one in match.groups())
    if step == 0:
        raise UsageProblem("the step of a slice is not 0", instead="::2")
    return start, stop, step


def parse_rename(text: str) -> object:
    """Return a rule for names."""
    from ckpttool.model.renames import parse_renames

    try:
        (rule,) = parse_renames([text])
    except ValueError as error:
        raise UsageProblem(str(error), instead="*.gamma=*.weight") from error
    return rule


def parse_rename_file(path: str) -> str:
    """Return the path of a file of rules for names, or the name of one that comes along."""
    from ckpttool.strategy_files.rename_files import SHIPPED

    if path not in SHIPPED:
        try:
            Existing("a YAML file").check(path)
        except UsageProblem as problem:
            if near := nearest(path, SHIPPED):
                raise UsageProblem(problem.message, instead=near) from problem
            raise
    return path


def parse_cast(text: str) -> str:
    """Return an element type, perhaps with a pattern of names behind it; refuse an unknown type."""
    from ckpttool.model.choices import Cast
    from ckpttool.model.dtypes import CAST_WORDS

    try:
        return Cast(text).text
    except ValueError as error:
        pattern, _, word = text.rpartition(":")
        is_exchanged = pattern and word.lower() in CAST_WORDS
        instead = f"{word}:{pattern}" if is_exchanged else "bf16"
        raise UsageProblem(str(error), instead=instead) from error


def parse_input(text: str) -> AveragedText:
    """Return an input of an average; refuse one whose checkpoint or strategy does not exist."""
    found = parse_averaged(text)
    refuse_url(found.path)
    Existing("a checkpoint: a folder of rank folders, or a merged one").check(found.path)
    for path in found.strategy:
        refuse_url(path)
        StrategyFile().check(path)
    return found


RANK_FILES = Parsed("pattern", parse_rank_files)
RENAME = Parsed("rename", parse_rename)
RENAME_FILE = Parsed("rename file", parse_rename_file)
PATTERN = Parsed("pattern", parse_pattern)
CAST = Parsed("type", parse_cast)
NAME_PATTERN = Parsed("names", parse_name_pattern)
ROWS = Parsed("slice", parse_rows)
ENGINE = Parsed("engine", parse_engine)
JOBS = Parsed("n", parse_jobs)
NUMBER = Parsed("x", parse_number)
RANKS = Parsed("ranks", parse_ranks)
SIZE = Parsed("size", parse_size)
DURATION = Parsed("time", parse_duration)
PART = Parsed("k/n", parse_part)
STEPS = Parsed("steps", parse_steps)
INPUT = Parsed("input", parse_input)
