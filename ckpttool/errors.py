"""Every exception that ckpttool raises on purpose, with the exit code of the command line.

A message names the place, what was expected, what was found and, if possible, the remedy.
Arguments are positional and all go to ``super().__init__``: pickle rebuilds an exception in another
process by calling its class with ``args``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

INTERNAL = 70  # EX_SOFTWARE of sysexits.h: exit code of a mistake in ckpttool itself

TYPE_CHECKING = False  # an import of typing would delay the signal handlers of `ckpttool.__main__`
if TYPE_CHECKING:
    from typing import Protocol

    class Problem(Protocol):
        """The part of a `Diagnostic` that `PlanError` uses; this module does not import it."""

        @property
        def code(self) -> str:
            """The kind of the problem, for programs."""

        @property
        def text(self) -> str:
            """The problem, its facts and what to do, a line each."""

        def on_side(self, side: str) -> Problem:
            """Return the problem with its side of a comparison in the text."""


class CkptToolError(Exception):
    """The base of all deliberate errors.

    Attributes
    ----------
    code
        Code of the diagnostic that `ckpttool.model.diagnostics.diagnose` makes of the error.
    exit_code
        Exit code of the command line; see docs/reference/exit-codes.md.
    side
        The side of a comparison, which `with_side` sets; "" without one.
    """

    code = "internal"  # workers of a cluster raise it, and the run makes an `ExecutionError` of it
    exit_code = INTERNAL
    side = ""


class FormatError(CkptToolError):
    """A file is not what its format says; exit code 3.

    Parameters
    ----------
    path
        The file.
    offset
        Byte in the file where the problem was noticed; None if there is no such byte.
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
    """

    code = "damaged"
    exit_code = 3
    rank: int | None = None

    def __init__(
        self, path: str, offset: int | None, reason: str, hint: str = "", facts: str = ""
    ) -> None:
        super().__init__(path, offset, reason, hint, facts)
        self.path = path
        self.offset = offset
        self.reason = reason
        self.hint = hint
        self.facts = facts

    def __str__(self) -> str:
        at = "" if self.offset is None else f" byte {self.offset}:"
        text = f"{place_on_side(self.side, self.path)}:{at} {self.reason}"
        return join_clauses(text, self.facts, self.hint)

    def with_hint(self, hint: str, facts: str = "") -> FormatError:
        """Return the error with another hint and with more facts."""
        copied = with_side(self, self.side)
        assert isinstance(copied, FormatError), "a copy is of the same class"
        copied.hint, copied.facts = hint, join_clauses(self.facts, facts)
        copied.args = (*self.args[:3], hint, copied.facts)
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


class AuthenticityError(FormatError):
    """An encrypted file that the key does not decrypt, or that was changed."""

    code = "checksum"


class UnreadableError(FormatError):
    """A file that the system cannot open or read."""

    code = "unreadable"


class StrategyError(CkptToolError):
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

    def __init__(self, where: str, reason: str, hint: str = "", facts: str = "") -> None:
        super().__init__(where, reason, hint, facts)
        self.where = where
        self.reason = reason
        self.hint = hint
        self.facts = facts

    def __str__(self) -> str:
        text = f"{place_on_side(self.side, self.where)}: {self.reason}"
        return join_clauses(text, self.facts, self.hint)


class PlanError(CkptToolError):
    """The work cannot be done as requested, and nothing was written; exit code 5.

    Parameters
    ----------
    diagnostics
        All problems that were found, not only the first; `ckpttool.model.diagnostics.Diagnostic`.
    """

    exit_code = 5

    def __init__(self, diagnostics: Sequence[Problem]) -> None:
        super().__init__(tuple(diagnostics))
        self.diagnostics = tuple(diagnostics)

    def __str__(self) -> str:
        return "\n".join(one.text for one in self.diagnostics)


class EngineError(CkptToolError):
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
        super().__init__(engine, reason, hint, facts)
        self.engine = engine
        self.reason = reason
        self.hint = hint
        self.facts = facts

    def __str__(self) -> str:
        return join_clauses(f"engine {self.engine}: {self.reason}", self.facts, self.hint)


class NoStrategyError(PlanError):
    """A source of several ranks without a strategy; exit code 2, as for a missing option."""

    exit_code = 2


class StepError(PlanError):
    """The ranks do not have a step in common."""


class UnfinishedError(PlanError):
    """A folder in which nothing is complete: a run of ckpttool, or all saves, did not finish."""


class ExecutionError(CkptToolError):
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
        super().__init__(output, cause, tuple(committed), hint, details)
        self.output = output
        self.cause = cause
        self.committed = tuple(committed)
        self.hint = hint or ("the same command with --resume" if committed else "")
        self.details = details

    @property
    def reason(self) -> str:
        """What happened."""
        return f"not written: {self.cause}"

    @property
    def facts(self) -> str:
        """Which outputs are complete, and the details."""
        shown, more = self.committed[:3], len(self.committed) - 3
        done = ", ".join(shown) + (f" and {more} more" if more > 0 else "")
        return join_clauses(self.details, f"complete: {done}" if done else "")

    def __str__(self) -> str:
        return join_clauses(f"{self.output}: {self.reason}", self.facts, self.hint)


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

    def __str__(self) -> str:
        return "\n".join(join_clauses(f"{self.path}: {one}", self.hint) for one in self.problems)


class SourceHashError(VerifyError):
    """A tensor of a source whose hash is not the one that its manifest lists; exit code 7."""

    code = "manifest"


class CombinedError(CkptToolError):
    """Several errors of one run in one report.

    The exit code is the lowest of all.  An unreadable file (3) may cause an invalid strategy (4),
    and both may cause an impossible plan (5).
    """

    def __init__(self, errors: Sequence[CkptToolError]) -> None:
        super().__init__(tuple(errors))
        self.errors = tuple(errors)
        self.exit_code = min(error.exit_code for error in self.errors)

    def __str__(self) -> str:
        return "\n".join(map(str, self.errors))


def add_note(error: BaseException, text: str) -> None:
    """Add a note to an exception, as ``BaseException.add_note`` of Python 3.11 does."""
    error.__dict__["__notes__"] = [*notes_of(error), text]


def notes_of(error: BaseException) -> tuple[str, ...]:
    """Return the notes that were added to an exception; its message does not contain them.

    Examples
    --------
    >>> add_note(error := CkptToolError("a"), "b")
    >>> notes_of(error)
    ('b',)
    """
    return tuple(error.__dict__.get("__notes__", ()))


def with_side(error: CkptToolError, side: str) -> CkptToolError:
    """Return the error with its side of a comparison.

    Examples
    --------
    >>> str(with_side(StrategyError("s.ckpt", "empty"), "B"))
    'B (s.ckpt): empty'
    """
    if isinstance(error, PlanError):
        return type(error)([problem.on_side(side) for problem in error.diagnostics])
    if isinstance(error, CombinedError):
        return CombinedError([with_side(one, side) for one in error.errors])
    copied = type(error)(*error.args)
    copied.__dict__.update(error.__dict__)
    copied.side = side
    return copied


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


def raise_all(errors: Iterable[CkptToolError]) -> None:
    """Raise the only error, or several errors as one `CombinedError`; return if there is none."""
    found = tuple(errors)
    if len(found) == 1:
        raise found[0]
    if found:
        raise CombinedError(found)
