"""The command group, and the one border where an error becomes a message and an exit code."""

from __future__ import annotations

import errno
import io
import sys

import click

import ckpttool
from ckpttool.cli.commit import commit
from ckpttool.cli.diff import diff
from ckpttool.cli.inspect import inspect
from ckpttool.cli.merge import merge
from ckpttool.cli.options import ANSWERS, DEBUG, STOPPER, printable
from ckpttool.cli.reshard import reshard
from ckpttool.cli.signals import Stopped, Stopper
from ckpttool.cli.split import split
from ckpttool.cli.verify import verify


class Border(click.Group):
    """A group that turns every exception into a message on stderr and an exit code."""

    def invoke(self, ctx: click.Context) -> object:
        """Run a command; see `ckpttool.errors` for the exit codes."""
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
        except Exception as error:
            if isinstance(error, BrokenPipeError):
                raise  # click ends quietly: whoever read our output has seen enough
            if ctx.meta.get(DEBUG):
                import traceback

                traceback.print_exc()
            problems, code = _explain(error)
            if code == 1 and ctx.meta.get(ANSWERS):
                code = 3
            if len(problems) > 1:
                click.echo(f"ckpttool: {len(problems)} problems:", err=True)
            for problem in problems:
                lead = "  - " if len(problems) > 1 else "ckpttool: "
                click.echo(lead + printable(problem), err=True)
            ctx.exit(code)


def _explain(error: Exception) -> tuple[tuple[str, ...], int]:
    """Messages and exit code of an exception."""
    if isinstance(error, ckpttool.CkptToolError):
        return error.problems, error.exit_code
    if isinstance(error, OSError):
        reason = error.strerror or str(error)
        if error.errno == errno.ENOSPC:
            reason = "the disk is full"
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
    """The entry point of the console script."""


for _command in (inspect, merge, split, reshard, verify, diff, commit):
    main.add_command(_command)
