"""The command group, which turns errors and signals into messages and exit codes."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module

import click

import ckpttool
from ckpttool.cli.signals import SignalGuard, Terminated
from ckpttool.errors import describe_os_error, notes_of

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
            return super().make_context(info_name, args, parent, color=_use_color(), **extra)

    def invoke(self, ctx: click.Context) -> object:
        """Run a command; see `ckpttool.errors` for the exit codes."""
        with _output_errors():
            return self._invoke(ctx)

    def _invoke(self, ctx: click.Context) -> object:
        from ckpttool.cli.options import ANSWERS, DEBUG, SIGNALS
        from ckpttool.cli.tables import print_text

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
            print_text(str(stopped), "ckpttool", err=True)
            ctx.exit(stopped.exit_code)
        except BrokenPipeError:
            raise
        except Exception as error:
            if guard.ended is not None:  # a library turned it into an error of its own
                print_text(str(guard.ended), "ckpttool", err=True)
                ctx.exit(guard.ended.exit_code)
            if ctx.meta.get(DEBUG):
                import traceback

                traceback.print_exc()
            (*problems, last), code = _describe_error(error)
            problems.append("; ".join((last, *notes_of(error))))
            if code == 1 and ctx.meta.get(ANSWERS):
                code = 3
            if len(problems) == 1:
                print_text(problems[0], "ckpttool", err=True)
            else:
                print_text(f"{len(problems)} problems:", "ckpttool", err=True)
                for problem in problems:
                    print_text(f"  - {problem}", indent=4, err=True)
            ctx.exit(code)


def _use_color() -> bool | None:
    """Return whether `click.echo` keeps colours; None keeps them on a terminal."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    forced = (os.environ.get(name, "0") for name in ("FORCE_COLOR", "CLICOLOR_FORCE"))
    return True if set(forced) - {"", "0"} else None


def _print_usage_error(error: click.ClickException) -> None:
    """Print what click says, folded on a terminal."""
    from ckpttool.cli.tables import print_text

    text = io.StringIO()
    error.show(text)
    with getattr(error, "ctx", None) or nullcontext():
        for line in text.getvalue().splitlines():
            label = "Error" if line.startswith("Error: ") else ""
            print_text(line.removeprefix("Error: "), label, err=True)


@contextmanager
def _output_errors() -> Iterator[None]:
    """End the program if the command line is wrong or standard output cannot be written.

    If its reader has closed the pipe (``| head``), end without a line, as SIGPIPE would.
    """
    try:
        yield
    except click.ClickException as error:
        _print_usage_error(error)
        raise SystemExit(error.exit_code) from error
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
