"""The command group, which turns errors and signals into messages and exit codes."""

from __future__ import annotations

import io
import os
import re
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import click
from click.core import ParameterSource, augment_usage_errors
from msgspec.structs import replace

import ckpttool
from ckpttool.cli.groups import ANSWERED, VARIABLES, WORDS, LazyGroup, with_dashes, words_of
from ckpttool.cli.signals import SignalGuard, Terminated
from ckpttool.problems import (
    INTERNAL,
    CkptToolError,
    Diagnostic,
    ExecutionError,
    is_busy,
    join_clauses,
    notes_of,
)

PIPE_CLOSED = 128 + signal.SIGPIPE  # as in shells; 1 would be an answer of verify and diff

# The question that each command answers.
COMMANDS = {
    "inspect": "What is this checkpoint, and how is it sharded?",
    "explain": "What does each rank hold, and what does a target take from whom?",
    "merge": "How do I get one file with the full tensors?",
    "split": "How do I shard a merged checkpoint for the ranks of a strategy?",
    "reshard": "How do I go on with other ranks, or another parallelism?",
    "convert": "How do I get the same checkpoint in another file format?",
    "average": "What is the mean of several steps, or of several runs?",
    "verify": "Is anything damaged, missing or different between replicas?",
    "diff": "Are two checkpoints equal, under any layouts and formats?",
    "strategy": "What does a strategy say, and which one fits?",
    "recipe": "What are my tensors called in Hugging Face, and are all there?",
    "finalize": "Are all parts of a set written (--part)?  If so, complete it.",
    "help": "What does this message, option or topic mean?  Needs no network.",
    "completion": "How does my shell complete commands and options?",
}
WHEN = ["auto", "always", "never"]
COLOR = click.Option(  # for help and completion; `CommandGroup.make_context` reads it
    ["--color"],
    envvar=VARIABLES["--color"],
    metavar="WHEN",
    type=click.Choice(WHEN),
    default="auto",
    show_default=True,
    expose_value=False,
    help="Use colours: auto, always or never.",
)


class CommandGroup(LazyGroup):
    """The group that turns every exception into a message on stderr and an exit code."""

    questions = COMMANDS
    package = "ckpttool.cli"

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: object,
    ) -> click.Context:
        """Parse the command line; --help and --version print here.

        A mistake ends the parser of click, so ``--color`` is taken from the arguments before.
        """
        option, line = "\0--color[=\0]([^\0]*)", "".join(f"\0{word}" for word in args)
        typed = re.findall(option, line)
        when = typed or [os.environ.get(VARIABLES["--color"]) or "auto"]
        words = re.sub(option, "", line).split("\0")[1:]
        with _output_errors(), _usage_errors(args):
            is_wrong = when[1:] or when[0] not in WHEN
            if is_wrong and not extra.get("resilient_parsing"):
                from ckpttool.cli.params import Choice, refuse_repeated

                context = click.Context(self, info_name=info_name)
                source = ParameterSource.COMMANDLINE if typed else ParameterSource.ENVIRONMENT
                context.set_parameter_source("color", source)
                with augment_usage_errors(context, COLOR):
                    refuse_repeated(COLOR, when)
                    Choice(WHEN).convert(when[0], None, None)
            color = _has_color(when[0])
            ctx = super().make_context(info_name, words, parent, color=color, **extra)
        ctx.meta[WORDS] = tuple(args)
        return ctx

    def invoke(self, ctx: click.Context) -> object:
        """Run a command; docs/reference/exit-codes.md lists the exit codes."""
        with _output_errors(), _usage_errors(ctx.meta[WORDS]):
            return self._invoke(ctx)

    def _invoke(self, ctx: click.Context) -> object:
        from ckpttool.cli.options import SIGNALS

        # No command uses linear algebra, and numpy would take 0.1 s to start threads for it.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")  # names may not fit the locale
        guard = ctx.meta[SIGNALS] = SignalGuard()
        try:
            with guard.installed():
                return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
            raise
        except (Exception, Terminated) as error:
            cause = guard.ended or error  # a library may turn a signal into an error of its own
            if "--debug" in ctx.meta[WORDS] and cause is not guard.ended:
                import traceback

                traceback.print_exc()
            is_answered = ctx.meta.get(ANSWERED, False)
            ctx.exit(_report(cause, () if is_answered else ctx.meta[WORDS]))


def _has_color(when: str) -> bool | None:
    """Return whether `click.echo` keeps colours; None keeps them on a terminal."""
    if when != "auto":
        return when == "always"
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    forced = (os.environ.get(name, "0") for name in ("FORCE_COLOR", "CLICOLOR_FORCE"))
    return True if set(forced) - {"", "0"} else None


@contextmanager
def _usage_errors(words: Sequence[str]) -> Iterator[None]:
    try:
        yield
    except click.ClickException as error:
        with getattr(error, "ctx", None) or nullcontext():  # its colours
            raise SystemExit(_report(error, words)) from error


@contextmanager
def _output_errors() -> Iterator[None]:
    """End the program if standard output cannot be written.

    If its reader has closed the pipe (``| head``), end without a line, as SIGPIPE would.
    """
    try:
        yield
    except BrokenPipeError as error:
        raise SystemExit(PIPE_CLOSED) from error
    except OSError as error:
        from ckpttool.formats.local import describe_os_error

        failure = ExecutionError("standard output", describe_os_error(error))
        raise SystemExit(_report(failure, ())) from error
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:  # otherwise Python flushes the stream again at exit
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _diagnose(error: BaseException, words: Sequence[str]) -> tuple[Sequence[Diagnostic], int]:
    """Return the problems and the exit code of an exception, for the text and for the document."""
    from ckpttool.formats.local import unreadable

    match error:
        case click.ClickException():
            errors = (error, *getattr(error, "others", ()))
            return [_diagnose_usage(each, words) for each in errors], error.exit_code
        case Terminated():
            problem = Diagnostic("stopped", str(error), hint=error.hint, facts=error.facts)
            return (problem,), error.exit_code
        case CkptToolError():
            problems, exit_code = error.diagnostics, error.exit_code
        case OSError(filename=path):
            diagnostic = unreadable(str(path or ""), error)
            problems, exit_code = diagnostic.diagnostics, diagnostic.exit_code
        case _:
            message, facts = f"{type(error).__name__}: {error}", "This is a mistake in ckpttool."
            hint = "the same command with --debug, and report what it prints"
            problems = (Diagnostic("internal", message, hint=hint, facts=facts),)
            exit_code = INTERNAL
    if notes := notes_of(error):
        first, *rest = problems
        problems = (replace(first, facts=join_clauses(first.facts, *notes)), *rest)
    return problems, exit_code


def _diagnose_usage(error: click.ClickException, words: Sequence[str]) -> Diagnostic:
    """Return the problem of a wrong command line, with what to type."""
    from ckpttool.cli.help import name_here
    from ckpttool.cli.options import name_with_value
    from ckpttool.cli.params import MEANT, Existing, UsageProblem

    context = error.ctx if isinstance(error, click.UsageError) else None
    name, path = (words_of(context), context.command_path) if context else ("ckpttool",) * 2
    message, hint, facts, where = error.format_message(), f"{path} --help", "", ""
    match error:
        case UsageProblem():
            message, hint, facts = error.message, error.hint or hint, error.facts
            if error.param is not None:
                where, hint = _names_of(error.param), error.hint  # --help would add nothing
                here = context and context.get_parameter_source(str(error.param.name))
                if (error.source or here) is ParameterSource.ENVIRONMENT:
                    where = str(error.param.envvar)
        case click.MissingParameter(param=click.Option() as option):
            message = f"{name} needs {name_with_value(option)}"
            facts = option.help or ""
        case click.MissingParameter(param=click.Argument() as argument):
            word = _names_of(argument)
            message = f"{name} needs {word}"
            if isinstance(argument.type, Existing):
                facts = f"{word} is {argument.type.what}."
        case click.NoSuchOption(option_name=flag):
            message, meant = f"{name} has no {flag}", name_here(flag)
            hint = MEANT.get((name, meant or flag), meant or hint)
            if name in ("merge", "split") and {"-s", "-d"} <= {*words}:
                at = words.index(name)
                hint = f"ckpttool {shlex.join([*words[:at], 'reshard', *words[at + 1 :]])}"
            if error.possibilities and not meant:
                facts = f"Did you mean {', '.join(error.possibilities)}?"
    if isinstance(error, click.MissingParameter) and context is not None:
        hint = getattr(context.command, "example", hint)
    return Diagnostic("usage", message, hint=hint, facts=facts, where=where)


def _on_its_side(problem: Diagnostic, words: Sequence[str]) -> Diagnostic:
    """Return a problem whose hint has the words for its side: ``--b-step``, or ``INPUT,step=``."""
    if problem.side.startswith("input"):
        of_input = f"{shlex.quote(problem.where)},step="
        return replace(problem, hint=re.sub(r"^--step ", lambda _: of_input, problem.hint))
    typed = {word.partition("=")[0] for word in words if problem.side == "B"}
    own = {option.replace("--b-", "--"): option for option in typed if option.startswith("--b-")}
    hint = re.sub(r"--[a-z]+\b(?!-)", lambda match: own.get(match[0], match[0]), problem.hint)
    return replace(problem, hint=hint)


def _names_of(param: click.Parameter) -> str:
    """Return the names of an option, or the word for an argument in ``Usage:``."""
    word = param.human_readable_name.strip("[].")
    shown = param.opts if isinstance(param, click.Option) else [word]
    return ", ".join(name for name in shown if name not in getattr(param, "aliases", ()))


def _report(error: BaseException, words: Sequence[str]) -> int:
    """Print on stderr what ended a command, and its document if the words of the command want it.

    Return the exit code.
    """
    from ckpttool.cli.tables import print_diagnostic
    from ckpttool.model.joining import join_alike

    problems, exit_code = _diagnose(error, words)
    problems = [_on_its_side(problem, words) for problem in problems]
    for problem in join_alike(problems):
        print_diagnostic(problem, "error", err=True)
    if "--json" in words:
        from ckpttool.cli.options import command_line
        from ckpttool.operations.answer import ErrorAnswer, Failure, Reported, to_text

        error_of = ErrorAnswer(exit_code, is_busy(problems), Reported(problems))
        failure = Failure(ckpttool.__version__, command_line(words), error_of)
        click.echo(to_text(failure.to_dict()))
    return exit_code


class Program(CommandGroup):
    """The commands; for the word of another program the guide has the name of one."""

    def hint_for(self, ctx: click.Context, word: str) -> str:
        """Return the commands in the row of a word, its page, or the nearest name."""
        from ckpttool.cli.help import name_here, names_of

        if (meaning := name_here(word)).startswith("`ckpttool"):
            return meaning
        has_page = meaning or not {word, f"--{word}"}.isdisjoint(names_of(ctx))
        return f"ckpttool help {word}" if has_page else super().hint_for(ctx, word)


@click.group(
    cls=Program,
    params=[COLOR],
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": 100,
        "token_normalize_func": with_dashes,
    },
    help="""\b
    ckpttool inspect checkpoint/ -s strategy.ckpt
    ckpttool merge checkpoint/ -s strategy.ckpt -o merged.h5
    ckpttool reshard checkpoint/ -s strategy.ckpt \\
        -d new_strategy.ckpt -o new/
    ckpttool verify new/ --deep

    Inspect, merge, split, reshard, convert, verify and compare MindSpore distributed checkpoints,
    on any machine, in a fixed amount of memory.  Reads and writes .ckpt, .safetensors and HDF5.

    `ckpttool help exit-codes` lists the exit codes.
    """,
    epilog="""\b
    ckpttool COMMAND --help   the options of a command
    ckpttool help             the topics of the guide
    ckpttool help TOPIC       a page of it, such as messages
    """,
)
@click.version_option(ckpttool.__version__, "-V", "--version", prog_name="ckpttool")
def main() -> None:
    """Run the command line."""
