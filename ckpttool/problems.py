"""Diagnostics (what is wrong or worth knowing), the table of their codes, and the exceptions.

A `Diagnostic` states a fact.  The severity of the fact depends on the command: a newer step that
some ranks lack is a note of merge and a warning of verify.  `CODES` is the only table of
severities.  The options ``--strict`` and ``--ignore`` edit one column of it (`severities`); nothing
else does.

The text of an exception, or of a diagnostic as a ``str``, is for Python: its hints name keywords
where the command line, which prints the fields, names options.  Messages and facts name neither.

An exception names the place, what was expected, what was found and, if possible, the remedy.  Its
class has the exit code of the command line.  Arguments are positional and all go to
``super().__init__``: pickle rebuilds an exception in another process by calling its class with
``args``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from typing import Literal, TypeAlias, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from ckpttool.wording import as_typed, nearest, shorten

INTERNAL = 70  # EX_SOFTWARE of sysexits.h: exit code of a mistake in ckpttool itself

Severity = Literal["note", "warning", "error"]
Command = Literal["convert", "inspect", "verify", "diff"]  # merge and others convert

SeverityOf: TypeAlias = Mapping[str, Severity | None]  # a column or a line of `CODES`

COMMANDS: tuple[Command, ...] = ("convert", "inspect", "verify", "diff")


class Code(Struct, frozen=True):
    """One line of the table of severities.

    Attributes
    ----------
    meaning
        What a diagnostic with this code says.
    default
        Severity for every command without an entry in ``exceptions``.
    exceptions
        Severity for single commands; None if a command does not report it.
    """

    meaning: str
    default: Severity
    exceptions: SeverityOf


def _note(meaning: str, **exceptions: Severity | None) -> Code:
    return Code(meaning, "note", exceptions)


def _warning(meaning: str, **exceptions: Severity | None) -> Code:
    return Code(meaning, "warning", exceptions)


def _error(meaning: str, **exceptions: Severity | None) -> Code:
    return Code(meaning, "error", exceptions)


_LESS_FOR_LOOKERS: SeverityOf = {"inspect": "warning", "verify": "warning", "diff": "warning"}
_NONE_FOR_LOOKERS: SeverityOf = dict.fromkeys(_LESS_FOR_LOOKERS)

CODES: Mapping[str, Code] = {
    # files
    "damaged": _error("a file is not what its format says, or its tensors have bytes in common"),
    "unreadable": _error("the system cannot read a file"),
    "unsupported": _error("a file is of a kind that ckpttool does not read"),
    "unsupported_type": _note(
        "element types of safetensors that MindSpore lacks", verify="warning"
    ),
    "no_library": _error("a package that a file needs is not installed"),
    "checksum": _error("a checksum or an authentication tag is wrong"),
    "verified": _note("checksums, tags or hashes were verified and are right"),
    "no_checksum": _note("files were saved without a checksum"),
    "unverified": _warning("there is a checksum, and it was not verified", verify="note"),
    "encryption": _note("what encryption means for this run"),
    "same_format": _note("convert writes the format of its source", **_NONE_FOR_LOOKERS),
    "mixed_encryption": _warning("only some files are encrypted", verify="note"),
    # ranks and slices
    "missing": _error("slices that no rank has"),
    "missing_rank": _note(
        "a rank has no file, and no strategy says whether others hold its slices", verify="warning"
    ),
    "missing_replica": _warning("a rank has no file, and others hold all its slices"),
    "damaged_replica": _warning(
        "a file cannot be read, and others hold all its slices", verify="error"
    ),
    "cut_short": _note("a file is cut short, and what is wanted of it is whole"),
    "missing_own": _warning(
        "every rank has a value of its own, and that of a missing rank is lost"
    ),
    "lacking": _warning(
        "a file lacks parameters that its replicas or the other ranks of its stage hold"
    ),
    "empty": _note("a file holds no tensor: cut short, or saved without redundancy"),
    "faulty_replica": _warning(
        "a described file is not as described, and others hold all its slices", verify="note"
    ),
    "emptied": _warning("a file holds no tensor and should hold some", verify="note"),
    "deduplicated": _note("the checkpoint was saved without redundancy"),
    "one_of_several": _warning("one rank's file of several", verify="note"),
    "absent": _note("listed or described, and in no file, or not in all that are listed"),
    "no_optimizer": _warning(
        "optimizer state is described, and no file of it is there: not saved, or not copied"
    ),
    "unsaved": _error("weights are in the strategy and in no file", **_LESS_FOR_LOOKERS),
    "nothing": _error("there is no tensor to examine or to write", inspect="warning"),
    "no_elements": _warning("there are tensors, and none of them has an element"),
    "renamed": _error(
        "weights of the strategy are in no file, and other weights are in no strategy",
        **_LESS_FOR_LOOKERS,
    ),
    "part": _note("only some ranks or outputs are meant"),
    # steps and saves
    "step": _note("which step is read"),
    "older_step": _warning("not all ranks have the newest step"),
    "older_ranks": _warning("ranks that the strategy lacks, with older steps"),
    "mixed_steps": _error(
        "ranks are not of one step, by names or by step counters", inspect="warning"
    ),
    "mixed_runs": _error("nothing shows which files are of one run", inspect="warning"),
    "mixed_times": _warning("an older step was written after a later one"),
    "unfinished": _error("the save or the run that wrote it did not finish", inspect="warning"),
    "nothing_complete": _error("a run that has not ended has completed no output yet"),
    "leftover": _note("traces of a save or a run that did not finish"),
    "resumed": _note("what an earlier run left, and what becomes of it"),
    "waited": _note("a run waits until another one has ended"),
    "skipped": _note("files that are not read or not written"),
    "overlay": _warning("files hold other copies of tensors than those that the index names"),
    "no_locks": _warning(
        "the file system has no locks, which keep two runs apart", **_NONE_FOR_LOOKERS
    ),
    "stale": _warning("a file that a loader may take for a part of this set", **_NONE_FOR_LOOKERS),
    # strategy and layouts
    "no_strategy": _error("several ranks and no strategy"),
    "invalid_strategy": _error("a strategy is malformed or impossible"),
    "invalid_rules": _error("a file of rules for names is malformed"),
    "strategy": _error("the strategy does not fit the checkpoint"),
    "contradicted": _error("contents or slices contradict the strategy", inspect="warning"),
    "undecided_shard": _error("contents do not decide an optimizer shard", inspect="warning"),
    "hidden_shard": _warning(
        "the strategy may hide an optimizer shard, which only a missing rank would show"
    ),
    "equal_slices": _warning("slices that should differ are equal"),
    "odd_shape": _warning("a full shape has sizes that no other tensor has"),
    "unlike_states": _warning("a parameter and its state are sharded differently"),
    "not_compared": _warning("a check that could not be made"),
    "borrowed_strategy": _warning(
        "the strategy of B is that of A", convert=None, inspect=None, verify=None
    ),
    "strategy_file": _note("which strategy files are read"),
    "other_strategy": _warning(
        "the manifest names another strategy, or cannot name it", verify="note"
    ),
    "corrected": _note("read otherwise than it is described"),
    "inferred": _warning("contents decided an optimizer shard"),
    "follows": _note("optimizer state takes the layout of its parameter"),
    "guessed": _warning(
        "only names and shapes show that a tensor is optimizer state", verify="note"
    ),
    "doubt": _note("what is not certain"),
    "replica": _error("ranks that should hold the same do not", inspect="warning"),
    "scrambled_slices": _error(
        "slices were written from the wrong place of memory", inspect="warning", verify="warning"
    ),
    "own_values": _warning("a described statistic that every rank has for itself", verify="note"),
    # parameters without a layout
    "unlisted": _error(
        "parameters that are not in the strategy and differ between ranks", verify="warning"
    ),
    "decided": _note("what becomes of unlisted parameters", inspect=None, verify=None),
    "partly_held": _warning(
        "parameters that are not in the strategy and that only some ranks hold",
        inspect=None,
        verify=None,
    ),
    "no_pattern": _note("no pattern of a hand-written strategy matches", verify=None),
    "undivided": _note("taken or written in full"),
    "dropped": _note("tensors that are left out"),
    "counter": _note("numbers that count something, which are not cast or averaged"),
    "scale": _error("a Float8 weight cannot be cast with its scale"),
    "unscaled": _note("Float8 without scales, which no cast changes", inspect=None, verify=None),
    "narrowed": _note("weights of an unusual type that a cast narrows", inspect=None, verify=None),
    "metadata": _note("metadata that is left out", **_NONE_FOR_LOOKERS),
    "recipe": _error("a recipe does not fit the tensors, or lacks a value"),
    "recipe_used": _note("how many tensors a recipe makes, and of which"),
    "lora": _error("an adapter does not fit the weights, or lacks a scale"),
    "lora_used": _note("how many weights an adapter changes", **_NONE_FOR_LOOKERS),
    "not_resized": _warning(
        "tensors with as many rows as the vocabulary keep them", inspect=None, verify=None
    ),
    "resized": _note("a vocabulary with more or fewer rows", inspect=None, verify=None),
    "new_names": _note("tensors with other names in the outputs", inspect=None, verify=None),
    # tensors and values
    "dtype": _error("ranks hold a parameter in several element types"),
    "shape": _error("shapes do not fit over ranks, or with the strategy"),
    "nan": _warning("values are NaN"),
    "infinite": _warning("values are infinite"),
    "not_finite": _error("a number that is to be averaged is NaN or infinite"),
    "unlike_inputs": _error("inputs of an average have other names, shapes or types"),
    "unlike": _error("tensors are not those of the reference"),
    "unlike_config": _error("tensors are not those that a configuration asks for"),
    "config": _note("the configuration beside a model asks for other tensors"),
    "missing_step": _error("a step that --steps names is not there, or not the only one"),
    "zero": _warning("a weight of two or more axes, or one rank's slice of it, is all zero"),
    "zero_state": _note("values are all zero, as when training begins"),
    # why a command cannot do what was requested
    "usage": _error("the command line is wrong"),
    "source": _error("the input is not a checkpoint that can be read as requested"),
    "options": _error("options contradict each other or the input"),
    "changed": _error("files changed while they were read, or since a file shows their bytes"),
    "destination": _error("outputs cannot be written there"),
    "resume": _error("an earlier run is not of this command"),
    "busy": _error("another run is writing there"),
    "parts": _error("the parts of a set do not fit together"),
    "engine": _error("workers cannot do this work"),
    "no_engine": _error("an engine, its library or its workers are missing"),
    "no_system": _error("the system is not Linux or macOS, but Windows for example"),
    "memory": _error("the work does not fit the limit of memory"),
    # outputs
    "target": _error("a parameter does not fit the target", **_NONE_FOR_LOOKERS),
    "target_unfit": _error("the target lists too few of the weights", **_NONE_FOR_LOOKERS),
    "not_in_source": _warning(
        "weights are in the target strategy and not in the source", **_NONE_FOR_LOOKERS
    ),
    "format": _note("what the format of files means for those who load them"),
    "manifest": _error("a file is missing or is not what its manifest lists"),
    "not_written": _error("an output could not be written"),
    "wrong_output": _error("what was written is not what it should be"),
    # why a command ended early
    "stopped": _error("a signal ended the run"),
    "internal": _error("a mistake in ckpttool"),
}

MOST = 3  # names, or facts, in one text
COPY_AGAIN = "copy the file again from where it was saved"

# Option that a hint can name -> the commands that have it.
OPTIONS: Mapping[str, Collection[Command]] = {
    "--trust-strategy": ("convert", "diff"),
    "--optimizer-shard": ("convert", "diff"),
    "--unlisted": ("convert", "diff"),
    "--ignore-manifest": ("convert", "diff", "inspect"),
}


def severities(
    command: Command, *, strict: bool = False, ignore: Collection[str] = ()
) -> SeverityOf:
    """Return the column of `CODES` for a command, edited by its options.

    Parameters
    ----------
    command
        The command.
    strict
        Whether warnings become errors.
    ignore
        Codes whose warnings become notes, or one of them.  Errors cannot be ignored.

    Raises
    ------
    ValueError
        A code in ``ignore`` is unknown.

    Examples
    --------
    >>> severities("convert")["missing_rank"], severities("verify")["missing_rank"]
    ('note', 'warning')
    >>> severities("verify", ignore=["missing_rank", "missing"])["missing_rank"]
    'note'
    """
    ignored = {ignore} if isinstance(ignore, str) else {*ignore}
    if unknown := sorted(ignored - CODES.keys()):
        near = nearest(unknown[0], CODES) or "one of `ckpttool.problems.CODES`"
        raise ValueError(f"ignore={unknown[0]!r} is no code of a message; expected {near}")
    return _column(command, strict, frozenset(ignored))


@lru_cache(maxsize=64)  # a run makes a dozen
def _column(command: Command, strict: bool, ignored: frozenset[str]) -> SeverityOf:
    column: dict[str, Severity | None] = {}
    for name, code in CODES.items():
        severity = code.exceptions.get(command, code.default)
        if severity == "warning" and name in ignored:
            severity = "note"
        if severity == "warning" and strict:
            severity = "error"
        column[name] = severity
    return column


class Diagnostic(Struct, frozen=True):
    """One fact for people and programs: what is wrong, what was found, what to do.

    Attributes
    ----------
    code
        The kind of the fact, one of `CODES`.
    message
        What is wrong, in at most 15 words; equal for all files and tensors with the same problem.
    hint
        One command or option that helps; "" if there is none.  It is read as a shell reads it,
        so names from outside in it are quoted (``shlex.quote``).
    options
        Options that the hint names; a command that lacks one names the page of the code instead.
    facts
        What was expected and found: ranks, three names at most, numbers; "" if ``message`` says it.
    tensor
        The parameter, if the fact is about one; the text names it before the message.
    ranks
        The ranks that the fact is about, ascending.
    path
        The file, if the fact is about one.
    offset
        Byte in the file, if the fact is about one.
    count
        Number of elements, if elements were counted.
    first
        Index of the first counted element in the full tensor.
    where
        A file or a folder; the text begins with it.
    side
        The side of a comparison; "" without one.
    """

    code: str
    message: str
    hint: str = ""
    options: tuple[str, ...] = ()
    facts: str = ""
    tensor: str | None = None
    ranks: tuple[int, ...] = ()
    path: str | None = None
    offset: int | None = None
    count: int | None = None
    first: tuple[int, ...] | None = None
    where: str = ""
    side: str = ""

    def __post_init__(self) -> None:
        if self.code not in CODES:
            raise ValueError(f"{self.code!r} is not a code of a diagnostic")

    @property
    def fact(self) -> str:
        """Place, parameter and message, the first line of the text."""
        place = place_on_side(self.side, self.where)
        return ": ".join(filter(None, (place, self.name, self.message)))

    @property
    def name(self) -> str:
        """The parameter as the text names it; "" if the fact is not about one."""
        return "" if self.tensor is None else self.tensor or "''"

    @property
    def lines(self) -> tuple[str, ...]:
        """`fact`, then the facts and the hint if there are any, a line each."""
        tried = f"Try: {as_typed(self.hint)}" if self.hint else ""
        return tuple(filter(None, (self.fact, self.facts, tried)))

    @property
    def text(self) -> str:
        """The lines as one text, for people."""
        return "\n  ".join(self.lines)

    def __str__(self) -> str:
        return self.text

    def for_command(self, command: Command) -> Diagnostic:
        """Return the diagnostic; its hint names its page if ``command`` lacks an option in it.

        Examples
        --------
        >>> a = ("--trust-strategy",)
        >>> found = Diagnostic("contradicted", "a", hint=a[0], options=a)
        >>> found.for_command("convert").lines, found.for_command("verify").lines
        (('a', 'Try: --trust-strategy'), ('a', 'Try: `ckpttool help contradicted`'))
        """
        has_all = all(command in OPTIONS[option] for option in self.options)
        return self if has_all else replace(self, hint=f"`ckpttool help {self.code}`", options=())

    def on_side(self, side: str) -> Diagnostic:
        """Return the diagnostic with its side of a comparison."""
        return replace(self, side=side)


def place_on_side(side: str, place: str) -> str:
    """Return a place with its side of a comparison, if it has one.

    Examples
    --------
    >>> place_on_side("B", "s.ckpt"), place_on_side("B", ""), place_on_side("", "s.ckpt")
    ('B (s.ckpt)', 'B', 's.ckpt')
    """
    return f"{side} ({place})" if side and place else side or place


def join_clauses(*clauses: str) -> str:
    """Return the clauses that are not empty as the facts of one message.

    Examples
    --------
    >>> join_clauses("the disk is full", "", "2 outputs are complete")
    'the disk is full; 2 outputs are complete'
    """
    return "; ".join(clause.removesuffix(".") for clause in clauses if clause)


_Error = TypeVar("_Error", bound="CkptToolError")


class CkptToolError(Exception):
    """The base of all deliberate errors.

    Attributes
    ----------
    code
        Code of its diagnostics.
    exit_code
        Exit code of the command line; see docs/reference/exit-codes.md.
    side
        The side of a comparison, which `on_side` sets; "" without one.
    """

    code = "internal"  # workers of a cluster raise it, and the run makes an `ExecutionError` of it
    exit_code = INTERNAL
    side = ""

    @property
    def diagnostics(self) -> tuple[Diagnostic, ...]:
        """All problems of the error, one for each file and tensor."""
        return tuple(it.on_side(self.side) if self.side else it for it in self._problems())

    def _problems(self) -> Iterator[Diagnostic]:
        yield Diagnostic(self.code, super().__str__())

    def __str__(self) -> str:
        problems = self.diagnostics
        return "\n".join(join_clauses(it.fact, it.facts, it.hint) for it in problems)

    def on_side(self, side: str) -> CkptToolError:
        """Return the error with its side of a comparison.

        Examples
        --------
        >>> str(StrategyError("s.ckpt", "empty").on_side("B"))
        'B (s.ckpt): empty'
        """
        copied = self._copy()
        copied.side = side
        return copied

    def _copy(self: _Error) -> _Error:
        # `copy.copy` shares the attributes where tblib (of Dask) has registered exceptions.
        copied = type(self)(*self.args)
        copied.__dict__.update(self.__dict__)
        return copied


class _PlaceError(CkptToolError):
    """An error with one problem, in one place.

    Parameters
    ----------
    where
        The place.
    reason
        What is wrong.
    hint
        What to do; "" if nothing is known.
    facts
        What was expected and what was found; "" if ``reason`` says it.
    """

    path: str | None = None

    def __init__(self, where: str, reason: str, hint: str = "", facts: str = "") -> None:
        super().__init__(where, reason, hint, facts)
        self.where = where
        self.reason = reason
        self.hint = hint
        self.facts = facts

    def _problems(self) -> Iterator[Diagnostic]:
        yield Diagnostic(
            self.code,
            self.reason,
            hint=self.hint,
            facts=self.facts,
            path=self.path or None,
            where=self.where,
        )


class FormatError(_PlaceError):
    """A file is not what its format says; exit code 3.

    Parameters
    ----------
    path
        The file.
    offset
        Byte in the file where the problem was noticed; None without one.
    reason
        What is wrong, in at most 15 words; equal for all files with the same problem.
    hint
        What to do; "" if nothing is known.
    facts
        What was expected and what was found in this file; "" if ``reason`` says it.

    Attributes
    ----------
    rank
        The rank of the file, which `ckpttool.model.catalog.Catalog` sets; None without one.

    Examples
    --------
    >>> FormatError("a.ckpt", 118, "the file ends here", "copy it").diagnostics[0].lines
    ('a.ckpt: the file ends here', 'byte 118', 'Try: copy it')
    """

    code = "damaged"
    exit_code = 3
    path: str
    rank: int | None = None

    def __init__(
        self, path: str, offset: int | None, reason: str, hint: str = "", facts: str = ""
    ) -> None:
        super().__init__(path, reason, hint, facts)
        self.args = path, offset, reason, hint, facts
        self.path = path
        self.offset = offset

    def _problems(self) -> Iterator[Diagnostic]:
        (problem,) = super()._problems()
        at = f"byte {self.offset}" if self.offset or (self.offset == 0 and self.facts) else ""
        yield replace(
            problem,
            hint=self.hint or (COPY_AGAIN if self.code == "damaged" else ""),
            facts=": ".join(filter(None, (at, self.facts))),
            ranks=() if self.rank is None else (self.rank,),
            offset=self.offset,
        )

    def __str__(self) -> str:
        at = "" if self.offset is None else f" byte {self.offset}:"
        message = f"{place_on_side(self.side, self.path)}:{at} {self.reason}"
        return join_clauses(message, self.facts, self.hint)

    def with_hint(self, hint: str, facts: str = "") -> FormatError:
        """Return the error with another hint and with more facts."""
        copied = self._copy()
        copied.hint, copied.facts = hint, join_clauses(self.facts, facts)
        copied.args = (*self.args[:3], hint, copied.facts, *self.args[5:])
        return copied


class UnsupportedError(FormatError):
    """A valid file that ckpttool cannot read; the message names the feature and a workaround."""

    code = "unsupported"


class ForeignError(FormatError):
    """A file of another kind, such as text or an archive; replicas replace that of a rank."""

    code = "unsupported"


class LibraryError(UnsupportedError):
    """A file that needs a package that is not installed; exit code 8."""

    code = "no_library"
    exit_code = 8


class ChecksumError(FormatError):
    """A file whose bytes are not those of its checksum."""

    code = "checksum"


class AuthenticityError(ChecksumError):
    """An encrypted file that the key does not decrypt, or that was changed."""


class UnreadableError(FormatError):
    """A file that the system cannot open or read."""

    code = "unreadable"


class StrategyError(_PlaceError):
    """A malformed or impossible layout; exit code 4.

    Parameters
    ----------
    where
        Strategy file, perhaps with line and column, or parameter.
    reason
        What is wrong.
    hint
        What to do; "" if nothing is known.
    facts
        What was expected and what was found; "" if ``reason`` says it.
    """

    code = "invalid_strategy"
    exit_code = 4


class RulesError(StrategyError):
    """A malformed file of rules for names; exit code 4.  The parameters are those of the base."""

    code = "invalid_rules"


class EngineError(_PlaceError):
    """An engine, a library or a worker that is missing; exit code 8.

    Parameters
    ----------
    engine
        The engine as on the command line, such as ``"dask:node7:8786"``.
    reason
        What is wrong.
    hint
        What to do; "" if nothing is known.
    facts
        What was expected and what was found; "" if ``reason`` says it.
    """

    code = "no_engine"
    exit_code = 8

    def __init__(self, engine: str, reason: str, hint: str = "", facts: str = "") -> None:
        super().__init__(f"engine {engine}", reason, hint, facts)
        self.args = engine, reason, hint, facts
        self.engine = engine


class SystemUnfitError(CkptToolError):
    """A Python without a module of Linux and macOS, as on Windows; exit code 8.

    Parameters
    ----------
    module
        The module.
    """

    code = "no_system"
    exit_code = 8

    def __init__(self, module: str) -> None:
        super().__init__(module)
        self.module = module

    def _problems(self) -> Iterator[Diagnostic]:
        message = f"this Python has no module {self.module}; on Windows run ckpttool in WSL"
        yield Diagnostic(self.code, message)


_EXIT_CODES = {
    kind.code: kind.exit_code
    for kind in (FormatError, UnsupportedError, ChecksumError, UnreadableError, StrategyError)
}


class PlanError(CkptToolError):
    """The work cannot be done as requested, and nothing was written; exit code 5.

    It is the one of `FormatError` or `StrategyError` if a problem has their code: the same problem
    has the same exit code in each check.

    Parameters
    ----------
    diagnostics
        All problems that were found, not only the first.
    """

    exit_code = 5

    def __init__(self, diagnostics: Iterable[Diagnostic]) -> None:
        super().__init__(tuple(diagnostics))
        own = self.exit_code
        self.exit_code = min((_EXIT_CODES.get(it.code, own) for it in self.args[0]), default=own)

    def _problems(self) -> Iterator[Diagnostic]:
        yield from self.args[0]

    def __str__(self) -> str:
        return "\n".join(map(str, self.diagnostics))


class BusyError(PlanError):
    """Another run is writing there; the same command may succeed when it has ended; exit code 9.

    The path of each diagnostic is a file that the other run has locked.
    """

    exit_code = 9


class NoStrategyError(PlanError):
    """A source of several ranks without a strategy; exit code 2, as for a missing option."""

    exit_code = 2


def refusal(diagnostics: Iterable[Diagnostic]) -> PlanError:
    """Return the error of problems that were found before anything was written."""
    problems = tuple(diagnostics)
    return (BusyError if is_busy(problems) else PlanError)(problems)


def is_busy(problems: Iterable[Diagnostic]) -> bool:
    """Return whether nothing but another run is in the way, so that waiting helps."""
    return {problem.code for problem in problems} == {"busy"}


class StepError(PlanError):
    """The ranks do not have a step in common."""


class UnfinishedError(PlanError):
    """A folder in which nothing is complete: a run of ckpttool, or all saves, did not finish."""


class ExecutionError(_PlaceError):
    """A run that failed after it had started to write; exit code 6.

    Parameters
    ----------
    output
        Final name of the output that failed.  No file has that name.
    cause
        What happened.
    committed
        Outputs that were complete before; they are kept.
    hint
        What to do; by default the same command with ``--resume``, if an output is complete.
    details
        What was expected and what was found.
    """

    code = "not_written"
    exit_code = 6

    def __init__(
        self,
        output: str,
        cause: str,
        committed: Sequence[str] = (),
        hint: str = "",
        details: str = "",
    ) -> None:
        done = f"complete: {shorten(committed, 3)}" if committed else ""
        hint = hint or ("the same command with --resume" if committed else "")
        super().__init__(output, f"not written: {cause}", hint, join_clauses(details, done))
        self.args = output, cause, tuple(committed), hint, details
        self.path = self.output = output
        self.cause = cause
        self.committed = tuple(committed)


class VerifyError(CkptToolError):
    """Written data that differs from the expected data; exit code 7.

    Parameters
    ----------
    path
        The file that was checked.
    problems
        One message for each difference.
    hint
        What to do.
    """

    code = "wrong_output"
    exit_code = 7

    def __init__(self, path: str, problems: Sequence[str], hint: str = "") -> None:
        super().__init__(path, tuple(problems), hint)
        self.path = path
        self.problems = tuple(problems)
        self.hint = hint

    def _problems(self) -> Iterator[Diagnostic]:
        path, hint = self.path, self.hint
        for problem in self.problems:
            yield Diagnostic(self.code, problem, hint=hint, path=path, where=path)


class SourceHashError(VerifyError):
    """A tensor of a source whose hash is not the one that its manifest lists; exit code 7."""

    code = "manifest"


class SourceValueError(VerifyError):
    """A number of a source that no mean has: NaN or infinite; exit code 7."""

    code = "not_finite"


class CkptToolWarning(UserWarning):
    """A warning of the command line, for Python."""


class CombinedError(CkptToolError):
    """Several errors of one run in one report.

    The exit code is the lowest of all.  An unreadable file (3) may cause an invalid strategy (4),
    and both may cause an impossible plan (5).
    """

    def __init__(self, errors: Sequence[CkptToolError]) -> None:
        super().__init__(tuple(errors))
        self.errors = tuple(errors)
        self.exit_code = min(error.exit_code for error in self.errors)

    def _problems(self) -> Iterator[Diagnostic]:
        return chain.from_iterable(error.diagnostics for error in self.errors)

    def __str__(self) -> str:
        return "\n".join(map(str, self.errors))

    def on_side(self, side: str) -> CombinedError:
        """Return the errors with their side of a comparison."""
        return CombinedError([error.on_side(side) for error in self.errors])


def add_note(error: BaseException, note: str) -> None:
    """Add a note to an exception, as ``BaseException.add_note`` of Python 3.11 does."""
    error.__dict__["__notes__"] = [*notes_of(error), note]


def notes_of(error: BaseException) -> tuple[str, ...]:
    """Return the notes that were added to an exception; its message does not contain them.

    Examples
    --------
    >>> add_note(error := CkptToolError("a"), "b")
    >>> notes_of(error)
    ('b',)
    """
    return tuple(error.__dict__.get("__notes__", ()))


def raise_all(errors: Iterable[CkptToolError]) -> None:
    """Raise the only error, or several errors as one `CombinedError`; return if there is none."""
    listed_errors = tuple(errors)
    if len(listed_errors) == 1:
        raise listed_errors[0]
    if listed_errors:
        raise CombinedError(listed_errors)


class Diagnostics:
    """The facts that the stages of a run find, in order and each once; the only accumulator.

    Parameters
    ----------
    command
        The command; it decides about severities and hints.
    strict, ignore
        See `severities`.
    strategy_option
        The option of the command line that takes the strategy, for hints.

    Attributes
    ----------
    failures
        Errors of files and strategies that could not be read.
    severity_of
        The column of `CODES` for the command, as the options edit it.

    Examples
    --------
    >>> found = Diagnostics("verify", ignore=["older_step"])
    >>> found.add(Diagnostic("older_step", "step 10"), Diagnostic("nan", "NaN", tensor="w"))
    >>> [one.fact for one in found.of("note")], [one.fact for one in found.of("warning")]
    (['step 10'], ['w: NaN'])
    """

    def __init__(
        self,
        command: Command = "convert",
        *,
        strict: bool = False,
        ignore: Collection[str] = (),
        strategy_option: str = "-s",
    ) -> None:
        if command not in COMMANDS:
            raise ValueError(f"command={command!r}, expected one of {COMMANDS}")
        self.command = command
        self.strategy_option = strategy_option
        self.failures: list[CkptToolError] = []
        self._usual = severities(command)
        self.severity_of = severities(command, strict=strict, ignore=ignore)
        self._found: dict[Diagnostic, Diagnostic] = {}

    def __iter__(self) -> Iterator[Diagnostic]:
        return iter(self._found.values())

    def __len__(self) -> int:
        return len(self._found)

    def add(self, *diagnostics: Diagnostic) -> None:
        """Add new facts; leave out those that the command does not report."""
        for diagnostic in diagnostics:
            if self.severity_of[diagnostic.code] is not None:
                key = replace(diagnostic, hint="", options=())
                self._found.setdefault(key, diagnostic.for_command(self.command))

    def extend(self, other: Diagnostics) -> None:
        """Add all facts and failures of another stage."""
        self.failures += other.failures
        self.add(*other)

    def of(self, *wanted: Severity) -> tuple[Diagnostic, ...]:
        """Return the facts of some severities, in the order of finding."""
        return tuple(it for it in self if self.severity_of[it.code] in wanted)

    @property
    def errors(self) -> tuple[Diagnostic, ...]:
        """Facts that stop a conversion, or mean lost data."""
        return self.of("error")

    @property
    def findings(self) -> tuple[Diagnostic, ...]:
        """Errors, then warnings."""
        return (*self.errors, *self.of("warning"))

    @property
    def has_errors(self) -> bool:
        """Whether a failure or an error prevents a plan.

        Warnings that ``--strict`` turns into errors do not: later stages may find more problems.
        """
        return bool(self.failures) or any(self._usual[it.code] == "error" for it in self)

    def raise_if_errors(self) -> None:
        """Raise all failures and errors as one error.

        Raises
        ------
        FormatError, StrategyError, PlanError, CombinedError
            The failures first, then a `PlanError` with all errors; see `refusal`.
        """
        wrong = [refusal(map(self._as_error, self.errors))] if self.errors else []
        raise_all([*self.failures, *wrong])

    def _as_error(self, diagnostic: Diagnostic) -> Diagnostic:
        """Return an error; its message names ``--strict`` if that made it of a warning."""
        if self._usual[diagnostic.code] == "error":
            return diagnostic
        hint = diagnostic.hint or "the same command without --strict"
        return replace(diagnostic, message=f"{diagnostic.message} (strict)", hint=hint, options=())


def join_first(clauses: Iterable[str]) -> str:
    """Join the first three clauses, and the number of the others, as the facts of one message."""
    shown = list(filter(None, clauses))
    more = f"{len(shown) - MOST} more" if len(shown) > MOST else ""
    return join_clauses(*shown[:MOST], more)
