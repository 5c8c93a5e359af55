"""Every exception that ckpttool raises on purpose, with the exit code the command line gives it.

Messages name the place, what was expected, what was found and, if known, the remedy.  Arguments
are positional and all of them go to ``super().__init__``: an exception that crosses a process
border is rebuilt by calling its class with ``args``.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Sequence

WORKER_DIED = "a worker died (was it killed, or out of memory? --max-memory or fewer workers help)"

# What the system's words for a failure mean, or ask for.
MEANINGS = {
    errno.EACCES: " (this user may not; its owner can allow it)",
    errno.EPERM: " (this user may not; its owner can)",
    errno.ENAMETOOLONG: " (give it a shorter one)",
    errno.ENOSPC: " (the disk is full)",
    errno.EDQUOT: " (what this user may store there is used up)",
    errno.EROFS: " (nothing can be written there)",
    errno.EIO: " (the disk, or the way to it, has failed)",
}


class CkptToolError(Exception):
    """Base of all deliberate errors; exit code 1."""

    exit_code = 1

    @property
    def problems(self) -> tuple[str, ...]:
        """Messages of the single problems in it, one line each."""
        return (str(self),)


class FormatError(CkptToolError):
    """A file is not what its format says; exit code 3.

    Parameters
    ----------
    path
        The file.
    offset
        Byte in the file at which the trouble was noticed, or None if no byte can be named.
    reason
        What was expected and what was found.
    """

    exit_code = 3

    def __init__(self, path: str, offset: int | None, reason: str) -> None:
        super().__init__(path, offset, reason)
        self.path = path
        self.offset = offset
        self.reason = reason

    def __str__(self) -> str:
        where = "" if self.offset is None else f" byte {self.offset}:"
        return f"{self.path}:{where} {self.reason}"


class UnsupportedError(FormatError):
    """A legal file that is not read: the message says which feature, and the way round it."""


class AuthenticityError(FormatError):
    """An encrypted file that the key does not fit, or that somebody may have changed."""


class UnreadableError(FormatError):
    """The system cannot open or read one of several files, and says why; exit code 1."""

    exit_code = 1


class StrategyError(CkptToolError):
    """A malformed or impossible layout; exit code 4.

    Parameters
    ----------
    where
        Strategy file or parameter.
    reason
        What was expected and what was found.
    """

    exit_code = 4

    def __init__(self, where: str, reason: str) -> None:
        super().__init__(where, reason)
        self.where = where
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}"


class PlanError(CkptToolError):
    """The work cannot be done as asked, found before the first byte is written; exit code 5.

    Parameters
    ----------
    problems
        One message for each problem; all that were found, not only the first.
    """

    exit_code = 5

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__(tuple(problems))
        self._problems = tuple(problems)

    @property
    def problems(self) -> tuple[str, ...]:
        """Messages of the single problems, one line each."""
        return self._problems

    def __str__(self) -> str:
        return "\n".join(self._problems)


class EngineError(CkptToolError):
    """An engine cannot be used, or its workers are lost; exit code 1.

    Parameters
    ----------
    engine
        The word that names it, such as ``"dask:node7:8786"``.
    reason
        What is wrong, and the remedy.
    """

    def __init__(self, engine: str, reason: str) -> None:
        super().__init__(engine, reason)
        self.engine = engine
        self.reason = reason

    def __str__(self) -> str:
        return f"engine {self.engine}: {self.reason}"


class StepError(PlanError):
    """The ranks have no step in common."""


class UnfinishedError(PlanError):
    """A run of ckpttool that has not ended has completed nothing yet."""


class ExecutionError(CkptToolError):
    """A copy failed after it had begun; exit code 6.

    Parameters
    ----------
    output
        Final name of the output that failed.  Nothing is left under that name.
    cause
        What happened.
    committed
        Outputs that were complete before; they stay.
    """

    exit_code = 6

    def __init__(self, output: str, cause: str, committed: Sequence[str] = ()) -> None:
        super().__init__(output, cause, tuple(committed))
        self.output = output
        self.cause = cause
        self.committed = tuple(committed)

    def __str__(self) -> str:
        text = f"{self.output}: not written: {self.cause}"
        if not self.committed:
            return text
        shown, more = self.committed[:3], len(self.committed) - 3
        done = ", ".join(shown) + (f" and {more} more" if more > 0 else "")
        remedy = "the same command with --resume goes on from there"
        return f"{text}; complete before that: {done}; {remedy}"


class VerifyError(CkptToolError):
    """What was written is not what should have been; exit code 7.

    Parameters
    ----------
    path
        The file that was checked.
    problems
        One message for each difference.
    """

    exit_code = 7

    def __init__(self, path: str, problems: Sequence[str]) -> None:
        super().__init__(path, tuple(problems))
        self.path = path
        self._problems = tuple(problems)

    @property
    def problems(self) -> tuple[str, ...]:
        """Messages of the single differences, one line each."""
        return tuple(f"{self.path}: {problem}" for problem in self._problems)

    def __str__(self) -> str:
        return "\n".join(self.problems)


class CombinedError(CkptToolError):
    """Several errors of one run in one report.

    The exit code is that of the most basic kind in it: an unreadable file (3) before a bad
    strategy (4) before a plan that does not work out (5), since the later follow from the earlier.
    """

    def __init__(self, errors: Sequence[CkptToolError]) -> None:
        super().__init__(tuple(errors))
        self.errors = tuple(errors)
        self.exit_code = min(error.exit_code for error in self.errors)

    @property
    def problems(self) -> tuple[str, ...]:
        """Messages of the single problems, in order."""
        return tuple(problem for error in self.errors for problem in error.problems)

    def __str__(self) -> str:
        return "\n".join(self.problems)


def add_remark(error: BaseException, text: str) -> None:
    """Add to any exception what happened after it, as ``add_note`` of Python 3.11 does."""
    error.__dict__["__notes__"] = [*remarks_on(error), text]


def remarks_on(error: BaseException) -> tuple[str, ...]:
    """What was added to an exception; its own message does not have it.

    Examples
    --------
    >>> add_remark(error := CkptToolError("a"), "b")
    >>> remarks_on(error)
    ('b',)
    """
    return tuple(error.__dict__.get("__notes__", ()))


def of_side(error: CkptToolError, side: str) -> CkptToolError:
    """The same error, that says of which side of a comparison it is; a file's own name says that.

    Examples
    --------
    >>> str(of_side(PlanError(["no strategy"]), "B"))
    'B: no strategy'
    """
    if isinstance(error, PlanError):
        return type(error)([f"{side}: {problem}" for problem in error.problems])
    if isinstance(error, StrategyError):
        return StrategyError(f"{side}: {error.where}", error.reason)
    if isinstance(error, CombinedError):
        return CombinedError([of_side(one, side) for one in error.errors])
    return error


def reason_of(error: OSError) -> str:
    """What the system says of a failure, and what that means or asks for where that helps.

    Examples
    --------
    >>> reason_of(PermissionError(errno.EACCES, "Permission denied", "net.ckpt"))
    'Permission denied (this user may not; its owner can allow it)'
    """
    return (error.strerror or str(error)) + MEANINGS.get(error.errno or 0, "")


def raise_all(errors: Iterable[CkptToolError]) -> None:
    """Raise the one error, or all of several as one `CombinedError`; return if there is none."""
    found = tuple(errors)
    if len(found) == 1:
        raise found[0]
    if found:
        raise CombinedError(found)
