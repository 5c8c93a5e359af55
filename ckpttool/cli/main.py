"""The command group, which turns errors and signals into messages and exit codes.

A signal becomes an exception at moments when that leaves no half-written file.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from types import FrameType
from typing import Any, NoReturn

import click

import ckpttool
from ckpttool.errors import describe_os_error, notes_of

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
Handler = Callable[[int, FrameType | None], Any] | int | None
IMPORTLIB = "<frozen importlib._bootstrap>"
WORKERS = "concurrent.futures.process"  # imported when a run may have worker processes
WAIT_SECONDS = 0.01  # between two checks whether an import is complete


class Terminated(BaseException):
    """A signal to end the program; not an `Exception`, which a library might catch."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.exit_code = 128 + number  # as in shells: 130 for Ctrl-C
        self.remedy = ""

    def __str__(self) -> str:
        name = signal.Signals(self.exit_code - 128).name
        left = "; ".join(notes_of(self)) or "nothing was left half-written"
        return f"ended by {name}; {left}{self.remedy}"


class SignalGuard:
    """Raise `Terminated` at a signal; while deferring, in `check` or at the second signal.

    While files are written, a signal waits for `check`: an exception between the creation of a file
    and its record would leave the file behind.

    An exception during an import may be lost or replaced (Python 3.11 does so in ``__set_name__``).
    The previous handler then ends the program.  If there may be worker processes, the signal waits
    for the end of the import, or for a second signal.  A program that does not end its workers gets
    warnings of the resource tracker.

    Attributes
    ----------
    number
        The signal for which `Terminated` was or will be raised; 0 for none.  It is then the cause
        of any other exception.
    """

    def __init__(self) -> None:
        self.number = 0
        self._is_deferring = False
        self._deferred = 0  # the signal that waits for `check`
        self._previous: dict[int, Handler] = {}

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Handle the signals in this context, except ignored ones (nohup ignores SIGHUP)."""
        previous = self._previous
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    previous[number] = signal.signal(number, self._handle)
            previous[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._retry)
        try:
            yield
            if self.number:
                raise Terminated(self.number)
        finally:
            if previous:
                signal.setitimer(signal.ITIMER_REAL, 0)
            for handled, handler in previous.items():
                signal.signal(handled, handler)

    @contextmanager
    def deferring(self) -> Iterator[None]:
        """Keep the first signal for `check`; call it at the end, too."""
        self._is_deferring = True
        try:
            yield
        finally:
            self._is_deferring = False
        self.check()

    def check(self) -> None:
        """Raise `Terminated` if a signal was deferred."""
        if self._deferred:
            self._raise(self._deferred)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._is_deferring and (not self._deferred or _is_importing(frame)):
            self._deferred = number
        elif not _is_importing(frame):
            self._raise(number)
        elif WORKERS in sys.modules and not self.number:
            self.number = number
            signal.setitimer(signal.ITIMER_REAL, WAIT_SECONDS)
        elif callable(before := self._previous.get(number)):
            before(number, frame)
        else:
            self._raise(number)

    def _retry(self, alarm: int, frame: FrameType | None) -> None:
        """Raise `Terminated` for the signal that came during an import, if that is complete."""
        if self._is_deferring:
            self._deferred = self.number
        elif _is_importing(frame):
            signal.setitimer(signal.ITIMER_REAL, WAIT_SECONDS)
        else:
            self._raise(self.number)

    def _raise(self, number: int) -> NoReturn:
        self.number = number
        raise Terminated(number)


def _is_importing(frame: FrameType | None) -> bool:
    """Return whether a module is being imported."""
    while frame is not None and frame.f_code.co_filename != IMPORTLIB:
        frame = frame.f_back
    return frame is not None


PIPE_CLOSED = 128 + signal.SIGPIPE  # as in shells; 1 would be an answer of verify and diff

# The help of each command.  The module of that name is imported only when the command is used, so
# that --version and --help stay fast.
COMMANDS = {
    "inspect": "Show what a checkpoint holds, from headers alone.",
    "merge": "Merge the files of all ranks into one.",
    "split": "Cut an undivided checkpoint for the ranks of a strategy.",
    "reshard": "Cut a checkpoint anew for another strategy.",
    "verify": "Find what is wrong with a checkpoint.",
    "diff": "Compare two checkpoints, tensor by tensor.",
    "finalize": "Mark the outputs of several runs with --part complete.",
}
ALIASES = {"commit": "finalize"}


class CommandGroup(click.Group):
    """A group that turns every exception into a message on stderr and an exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command of that name, or None."""
        cmd_name = ALIASES.get(cmd_name, cmd_name)
        if cmd_name not in COMMANDS:
            return None
        command = getattr(import_module(f"ckpttool.cli.{cmd_name}"), cmd_name)
        assert isinstance(command, click.Command), f"{cmd_name} is not a command"
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the requested command; if the name is unknown, fail with a suggestion."""
        known = {*COMMANDS, *ALIASES}
        if args[0] not in known and not args[0].startswith("-"):
            from difflib import get_close_matches

            near = get_close_matches(args[0], COMMANDS, 1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(COMMANDS)}."
            ctx.fail(f"No such command {args[0]!r}; {hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands that --help shows."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: object,
    ) -> click.Context:
        """Parse the command line; --help and --version print here."""
        with _output_errors():
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: click.Context) -> object:
        """Run a command; see `ckpttool.errors` for the exit codes."""
        with _output_errors():
            return self._invoke(ctx)

    def _invoke(self, ctx: click.Context) -> object:
        from ckpttool.cli.options import ANSWERS, DEBUG, SIGNALS
        from ckpttool.model.wording import printable

        # No command uses linear algebra, and numpy would take 0.1 s to start threads for it.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")  # names may not fit the locale
        try:
            guard = ctx.meta[SIGNALS] = SignalGuard()
            with guard.installed():
                return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except Terminated as stopped:
            click.echo(f"ckpttool: {stopped}", err=True)
            ctx.exit(stopped.exit_code)
        except BrokenPipeError:
            raise
        except Exception as error:
            if guard.number:  # a library turned `Terminated` into an error of its own
                click.echo(f"ckpttool: {Terminated(guard.number)}", err=True)
                ctx.exit(128 + guard.number)
            if ctx.meta.get(DEBUG):
                import traceback

                traceback.print_exc()
            (*problems, last), code = _describe_error(error)
            problems.append("; ".join((last, *notes_of(error))))
            if code == 1 and ctx.meta.get(ANSWERS):
                code = 3
            if len(problems) > 1:
                click.echo(f"ckpttool: {len(problems)} problems:", err=True)
            for problem in problems:
                prefix = "  - " if len(problems) > 1 else "ckpttool: "
                click.echo(prefix + printable(problem), err=True)
            ctx.exit(code)


@contextmanager
def _output_errors() -> Iterator[None]:
    """End the program with one line if standard output cannot be written.

    If its reader has closed the pipe (``| head``), end without a line, as SIGPIPE would.
    """
    try:
        yield
    except BrokenPipeError as error:
        raise SystemExit(PIPE_CLOSED) from error
    except OSError as error:
        click.echo(f"ckpttool: standard output: {describe_os_error(error)}", err=True)
        raise SystemExit(1) from error
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:  # otherwise Python flushes the stream again at exit
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _describe_error(error: Exception) -> tuple[tuple[str, ...], int]:
    """Return the messages and the exit code of an exception."""
    if isinstance(error, ckpttool.CkptToolError):
        return error.problems, error.exit_code
    if isinstance(error, OSError):
        reason = describe_os_error(error)
        return (f"{error.filename}: {reason}" if error.filename else reason,), 1
    return (
        (
            f"internal error: {type(error).__name__}: {error}; this is a mistake in ckpttool: "
            "please report it, with what --debug prints"
        ),
    ), 1


@click.group(
    cls=CommandGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    help="""\b
    ckpttool merge checkpoint/ -s strategy.ckpt -o merged.h5

    Inspect, merge, split, reshard, verify and compare MindSpore distributed checkpoints, on any
    machine, in a fixed amount of memory.  Reads .ckpt, .safetensors and HDF5.

    Exit codes: 0 done, 1 an input that cannot be opened (verify, diff: something was found), 2 bad
    command line, 3 a damaged or unreadable file, 4 an impossible strategy, 5 it cannot be done as
    asked (nothing was written), 6 writing failed, 7 what was written is not what should be, 130
    Ctrl-C.
    """,
)
@click.version_option(ckpttool.__version__, prog_name="ckpttool")
def main() -> None:
    """Run the command line."""
