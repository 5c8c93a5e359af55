"""The command group, and the one border where an error becomes a message and an exit code."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

import click

import ckpttool

PIPE_CLOSED = 128 + signal.SIGPIPE  # as shells count it; 1 would be an answer of verify and diff

# The help of each command, which is in the module of its name.  Modules are imported when they are
# needed, so that --version and --help take no longer than click itself.
COMMANDS = {
    "inspect": "Show what a checkpoint holds, from headers alone.",
    "merge": "Merge the files of all ranks into one.",
    "split": "Cut an undivided checkpoint for the ranks of a strategy.",
    "reshard": "Cut a checkpoint anew for another strategy.",
    "verify": "Find what is wrong with a checkpoint.",
    "diff": "Compare two checkpoints, tensor by tensor.",
    "commit": "Mark the outputs of several runs with --part complete.",
}


class Border(click.Group):
    """A group that turns every exception into a message on stderr and an exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command of that name, or None."""
        if cmd_name not in COMMANDS:
            return None
        command = getattr(import_module(f"ckpttool.cli.{cmd_name}"), cmd_name)
        assert isinstance(command, click.Command), f"{cmd_name} is no command"
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that is meant; an unknown name fails with the known ones."""
        if args[0] not in COMMANDS and not args[0].startswith("-"):
            from difflib import get_close_matches

            near = get_close_matches(args[0], COMMANDS, 1)
            meant = f"did you mean {near[0]}?" if near else f"there are {', '.join(COMMANDS)}."
            ctx.fail(f"No such command {args[0]!r}; {meant}")
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
        """Read the command line, and print what --help shows."""
        with _lost_output():
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: click.Context) -> object:
        """Run a command; see `ckpttool.errors` for the exit codes."""
        with _lost_output():
            return self._invoke(ctx)

    def _invoke(self, ctx: click.Context) -> object:
        from ckpttool.cli.options import ANSWERS, DEBUG, STOPPER
        from ckpttool.cli.signals import Stopped, Stopper
        from ckpttool.cli.text import printable
        from ckpttool.errors import remarks_on

        # Arrays are only moved here; the threads of numpy's linear algebra cost 0.1 s to start.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")  # names may not fit the locale
        try:
            stopper = ctx.meta[STOPPER] = Stopper()
            with stopper.installed():
                return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except Stopped as stopped:
            click.echo(f"ckpttool: {stopped}", err=True)
            ctx.exit(stopped.exit_code)
        except BrokenPipeError:
            raise
        except Exception as error:
            if stopper.number:  # a library made an error of its own from `Stopped`
                click.echo(f"ckpttool: {Stopped(stopper.number)}", err=True)
                ctx.exit(128 + stopper.number)
            if ctx.meta.get(DEBUG):
                import traceback

                traceback.print_exc()
            (*problems, last), code = _explain(error)
            problems.append("; ".join((last, *remarks_on(error))))
            if code == 1 and ctx.meta.get(ANSWERS):
                code = 3
            if len(problems) > 1:
                click.echo(f"ckpttool: {len(problems)} problems:", err=True)
            for problem in problems:
                lead = "  - " if len(problems) > 1 else "ckpttool: "
                click.echo(lead + printable(problem), err=True)
            ctx.exit(code)


@contextmanager
def _lost_output() -> Iterator[None]:
    """End the program with one line when the help cannot be written.

    When the reader of a standard stream has gone (``| head``) it ends as the signal does.
    """
    try:
        yield
    except BrokenPipeError as error:
        raise SystemExit(PIPE_CLOSED) from error
    except OSError as error:
        from ckpttool.errors import reason_of

        click.echo(f"ckpttool: standard output: {reason_of(error)}", err=True)
        raise SystemExit(1) from error
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:  # Python would try it again when it ends
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _explain(error: Exception) -> tuple[tuple[str, ...], int]:
    """Return the messages and the exit code of an exception."""
    from ckpttool.errors import reason_of

    if isinstance(error, ckpttool.CkptToolError):
        return error.problems, error.exit_code
    if isinstance(error, OSError):
        reason = reason_of(error)
        return (f"{error.filename}: {reason}" if error.filename else reason,), 1
    return (
        (
            f"internal error: {type(error).__name__}: {error}; this is a mistake in ckpttool: "
            "please report it, with what --debug prints"
        ),
    ), 1


@click.group(
    cls=Border,
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
