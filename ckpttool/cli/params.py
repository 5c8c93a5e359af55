"""Parameter types of the command line: paths, numbers, ranks, sizes, parts."""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ckpttool.problems import join_clauses
from ckpttool.system import forbid_core_dumps
from ckpttool.typed import (
    PARSERS,
    AveragedText,
    TypedError,
    parse_averaged,
    parse_file_name,
    parse_rank_files,
    parse_rows,
    parse_scaled,
    parse_steps,
    read_key,
)

if TYPE_CHECKING:
    from ckpttool.secret import Secret

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
    example
        A right value of the parameter; the hint is then the parameter with this value.
    ctx
        The context of the command; types and callbacks leave it to click.
    """

    def __init__(
        self,
        message: str,
        hint: str = "",
        facts: str = "",
        example: str = "",
        ctx: click.Context | None = None,
    ) -> None:
        super().__init__(message, ctx)
        self.others: list[click.UsageError] = []  # of the same command line
        self.source: click.core.ParameterSource | None = None  # of the value, when it was read
        self.facts = facts
        self.example = example
        self._hint = hint

    @property
    def hint(self) -> str:
        """The text to type: an option with its value, or the value of an argument."""
        if not self.example or self.param is None:
            return self._hint
        value = shlex.quote(self.example)
        return f"{self.param.opts[0]} {value}" if isinstance(self.param, click.Option) else value


WRONG = "ckpttool.wrong"  # key of the list, in click's context, of problems with values


def collect(
    problem: UsageProblem, param: click.Parameter | None, ctx: click.Context | None
) -> None:
    """Keep the problem of a value until all values were read; raise it if nobody collects."""
    wrong: list[UsageProblem] | None = None if ctx is None else ctx.meta.get(WRONG)
    if wrong is None:
        raise problem
    problem.param, problem.ctx = param, ctx
    if ctx is not None and param is not None:
        problem.source = ctx.get_parameter_source(str(param.name))
    wrong.append(problem)


def excluding(
    flag: str, other: str, facts: str = "", ctx: click.Context | None = None
) -> UsageProblem:
    """Return the problem of options that exclude each other."""
    hint = f"the same command without {other}, or without {flag}"
    return UsageProblem(f"{flag} does not go with {other}", hint, facts, ctx=ctx)


def refuse_repeated(option: click.Option, values: Sequence[object]) -> None:
    """Raise `UsageProblem` if an option of one value has several; none is named, for a key's sake.

    The last one would silently replace the others.
    """
    if len(values) > 1:
        hint = f"the same command with one {option.opts[0]}"
        raise UsageProblem(f"given {len(values)} times, expected once", hint)


# Typical mistakes: the command or option and its argument, to what was meant.
MEANT: Mapping[tuple[str, str], str] = {
    ("--format", "h5"): "--format hdf5",
    ("split", "-s"): "-d, the strategy of the outputs; a merged checkpoint needs none",
    ("merge", "-d"): "`ckpttool reshard`, which writes the files of a target",
}


class Choice(ChoiceType):
    """One of a few words on the command line."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the word."""
        if value not in self.choices:
            names, number = ", ".join(self.choices), len(self.choices)
            some, facts = (f"{number} words", names) if number > 8 else (names, "")
            hint = MEANT.get((param.opts[0], value), "") if param is not None else ""
            problem = UsageProblem(f"{value!r} is not one of {some}", hint, facts)
            collect(problem, param, ctx)
        return str(value)


class PathName(click.Path):
    """A path on the command line; refuse URLs, and empty paths, as of unset variables."""

    def convert(
        self,
        value: str | os.PathLike[str],
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> str:
        """Return the path."""
        name = str(value)
        try:
            if not name:
                facts = "A variable of the shell may be unset."
                raise UsageProblem("the path is empty", facts=facts)
            refuse_url(name)
            self.check(name)
        except UsageProblem as problem:
            collect(problem, param, ctx)
        return name

    def check(self, name: str) -> None:
        """Raise `UsageProblem` if this type refuses a path."""


def refuse_url(value: str) -> None:
    """Raise `UsageProblem` if a text is a URL."""
    from ckpttool.formats.local import url_problem

    if (problem := url_problem(value)) is not None:
        what, hint = problem
        raise UsageProblem(f"{value!r} is {what}", hint)


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
            raise UsageProblem("outputs do not go to standard output", example=self.example)


class PagePath(OutputPath):
    """A page to write, whose name says that it is one."""

    def check(self, name: str) -> None:
        """Refuse names of other files, such as pictures."""
        super().check(name)
        path = Path(name)
        if path.suffix.lower() not in ("", ".html", ".htm") and not name.endswith("/"):
            facts, page = "The page is HTML, which a browser opens.", path.with_suffix(".html")
            raise UsageProblem(f"{name!r} does not end in .html", facts=facts, example=str(page))


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

    def _explain_absence(self, path: Path) -> UsageProblem:
        """Return why a path does not exist: a dangling link or a stopped run."""
        from difflib import get_close_matches

        from ckpttool.formats.local import is_folder, is_link, list_folder
        from ckpttool.strategy_files.folders import without_numbers
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
            kind = without_numbers(path.name)  # a number is not mistyped for the next
            names = (it for it in list_folder(path.parent) if without_numbers(it.name) != kind)
            stems = {it.stem.lower(): it for it in names}  # suffixes are alike
            near = get_close_matches(path.stem.lower(), stems, 2, 0.82)
            if len(near) == 1:
                return UsageProblem(message, shlex.quote(str(stems[near[0]])))
        folder = next(parent for parent in (*path.parents, Path("/")) if is_folder(parent))
        return UsageProblem(message, f"ls {shlex.quote(str(folder))}" if folder.name else "")


class StrategyFile(Existing):
    """A strategy file, or a folder of them, on the command line."""

    def __init__(self) -> None:
        super().__init__("a strategy file")


class Parsed(ParsedType):
    """A value that a function makes of a text on the command line, or refuses.

    Parameters
    ----------
    name
        What the option takes, for ``--help``.
    parse
        Returns the value of a text; raises `UsageProblem`, or `ValueError` of any face.
    example
        A right value, for the hint.
    """

    def __init__(self, name: str, parse: Callable[[str], object], example: str = "") -> None:
        self.name = name
        self.parse = parse
        self.example = example

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> object:
        """Return the value."""
        try:
            return self.parse(str(value))
        except UsageProblem as error:
            problem = error
        except TypedError as error:
            problem = UsageProblem(error.message, "", error.facts, error.example)
        except ValueError as error:
            problem = UsageProblem(str(error), example=self.example)
        collect(problem, param, ctx)
        return value


def parse_pattern(value: str) -> str:
    """Return a pattern for the paths of rank files; refuse one without ``{rank}``."""
    refuse_url(value)
    if "{rank}" not in value:
        raise UsageProblem(f"{value!r} does not have {{rank}} in it", example="node{rank}/*.ckpt")
    return value


def parse_name_pattern(value: str) -> str:
    """Return a pattern of names of tensors; refuse a malformed regular expression."""
    from ckpttool.model.patterns import Pattern

    return Pattern(value).text


def parse_engine(value: str) -> str:
    """Return the name of an engine."""
    from ckpttool.execution.executors import describe_engines, split_engine_name

    try:
        split_engine_name(value)
    except ValueError as error:
        facts = f"Engines: {describe_engines()}."
        raise UsageProblem(f"{value!r} is not an engine", facts=facts) from error
    return value


def parse_prefix(value: str) -> str:
    """Return the beginning of the names of files; refuse one of a folder."""
    if "/" in value or "\0" in value:
        raise UsageProblem(f"{value!r} has a / in it", facts="It begins the name of a file.")
    return value


def open_key(value: str) -> Secret:
    """Read the key from a file; no message repeats the argument, which may be the key itself."""
    from ckpttool.formats.local import url_problem

    if (problem := url_problem(value)) is not None:
        raise UsageProblem(*problem)
    hint = "ckpttool help --dec-key-file"
    forbid_core_dumps()  # imports a module, and a signal is heeded better while nothing is imported
    try:
        with click.open_file(value, "rb") as file:
            return read_key(file)
    except OSError as error:
        facts = "The option names a file that holds the key."
        raise UsageProblem(f"cannot be read ({error.strerror})", hint, facts) from None
    except TypedError as error:
        raise UsageProblem(error.message, hint, error.facts) from None


def parse_number(value: str) -> float:
    """Return a number from 0 on; refuse infinity and NaN."""
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise UsageProblem(f"{value!r} is not a finite number of at least 0", example="1e-3")
    return number


def whole_number(least: int, most: int | None = None) -> Parsed:
    """Return the type of a whole number from ``least`` to ``most``, if there is one."""

    def parse(value: str) -> int:
        match = re.fullmatch(r"\s*\+?(\d{1,18})\s*", value, re.ASCII)
        if match is None or not least <= int(match[1]) <= (most or math.inf):
            limits = f"from {least} on" if most is None else f"from {least} to {most}"
            raise UsageProblem(f"{value!r} is not a whole number {limits}", example="4")
        return int(match[1])

    return Parsed("n", parse)


def parse_rename(value: str) -> object:
    """Return a rule for names."""
    from ckpttool.model.renames import parse_renames

    (rule,) = parse_renames([value])
    return rule


def parse_rename_file(path: str) -> str:
    """Return the path of a file of rules for names, or the name of one that comes along."""
    from ckpttool.strategy_files.rename_files import SHIPPED

    if path not in SHIPPED:
        Existing("a YAML file").check(path)
    return path


def parse_cast(value: str) -> str:
    """Return an element type, perhaps with a pattern of names behind it; refuse an unknown type."""
    from ckpttool.model.choices import Cast

    return Cast(value).text


def parse_fused(value: str) -> str:
    """Return the name and the parts of a fused weight."""
    from ckpttool.model.choices import Fusion

    Fusion.parse(value)
    return value


def parse_adapter(value: str) -> str:
    """Return the path of an adapter, perhaps with a scale; refuse one that does not exist."""
    head, _, tail = value.rpartition(":")
    existing = Existing("an adapter: a file, or the folder of PEFT")
    try:
        existing.check(parse_scaled(value)[0])
    except UsageProblem:
        if not head or os.sep in tail:
            raise
        existing.check(head)
        problem = f"the scale {tail!r} is not a number"
        raise UsageProblem(problem, example=f"{head}:2") from None
    return value


def parse_vocabulary(value: str) -> str:
    """Return the rows of a vocabulary, as a number or ``multiple:K``."""
    if not re.fullmatch(r"(multiple:)?[1-9]\d{0,8}", value):
        facts = "A number of rows, or multiple:K."
        raise UsageProblem(f"{value!r} is not a number of rows", facts=facts, example="multiple:64")
    return value


def parse_input(value: str) -> AveragedText:
    """Return an input of an average; refuse one whose checkpoint or strategy does not exist."""
    averaged = parse_averaged(value)
    refuse_url(averaged.path)
    Existing("a checkpoint: a folder of rank folders, or a merged one").check(averaged.path)
    for path in averaged.strategy:
        refuse_url(path)
        StrategyFile().check(path)
    return averaged


RANK_FILES = Parsed("pattern", parse_rank_files)
NAME_PATTERN = Parsed("pattern", parse_name_pattern, "re:layers[.][0-3][.]")
PATTERN = Parsed("pattern", parse_pattern)
ROWS = Parsed("slice", parse_rows)
JOBS = whole_number(1, 999_999)
NUMBER = Parsed("x", parse_number)
STEPS = Parsed("steps", parse_steps)
INPUT = Parsed("input", parse_input)
KINDS: Mapping[str, ParsedType] = {  # of the options that `ckpttool.keywords` declares
    **{name: Parsed(name, parse) for name, parse in PARSERS.items()},
    "pattern": PATTERN,
    "names": NAME_PATTERN,
    "key": Parsed("file", open_key),
    "rename": Parsed("old=new", parse_rename, "*.gamma=*.weight"),
    "rename file": Parsed("file", parse_rename_file),
    "type": Parsed("type", parse_cast, "bf16"),
    "model folder": Existing("the folder of a model, with its config.json"),
    "parts": Parsed("name=parts", parse_fused, "linear_fc1=2"),
    "adapter": Parsed("adapter", parse_adapter),
    "rows": Parsed("n", parse_vocabulary),
    "engine": Parsed("engine", parse_engine),
    "prefix": Parsed("prefix", parse_prefix),
    "name": Parsed("name", parse_file_name),
    "new strategy": OutputPath("new_strategy.ckpt"),
    "n": whole_number(1),
    "card": OutputPath("card.json"),
    "config": Existing("the config.json of a model, or its folder"),
    "reference": Existing("a checkpoint, or its index"),
}
