"""Options that commands share: one object and one heading of ``--help`` for each group.

The key of encrypted files comes from a file or standard input only.  Other users could read an
argument or a variable of the environment, and shells keep them in histories.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ckpttool.cli.params import (
    Existing,
    OutputFolder,
    PartOf,
    RankList,
    Size,
    StrategyName,
    WholeNumber,
)
from ckpttool.errors import PlanError
from ckpttool.formats.local import why_not_a_path
from ckpttool.secret import Secret, forbid_core_dumps

if TYPE_CHECKING:
    from ckpttool.discovery.scan import SourceOptions
    from ckpttool.execution.executors import RunOptions
    from ckpttool.planning.plans import OutputOptions
    from ckpttool.planning.resolve import ResolveOptions

KEY_SIZES = (16, 24, 32)  # bytes of the keys that MindSpore accepts
HEX_PREFIX = b"hex:"  # a key in this form never has one of these sizes
MAX_KEY_FILE_BYTES = 1024  # a larger file does not hold a key


def parse_key_file(data: bytes) -> Secret | None:
    r"""Return the key that the contents of a file hold, or None.

    They are the bytes of the key, or ``hex:`` and its digits.  One line end after them is ignored.

    Examples
    --------
    >>> parse_key_file(b"0123456789abcdef\n").reveal()
    b'0123456789abcdef'
    >>> len(parse_key_file(b"hex:" + b"5A" * 32))
    32
    >>> parse_key_file(b"too short")
    """
    for end in (b"", b"\n", b"\r\n"):
        key = data.removesuffix(end)
        if not data.endswith(end):
            continue
        if len(key) not in KEY_SIZES and key.startswith(HEX_PREFIX):
            try:
                key = bytes.fromhex(key.removeprefix(HEX_PREFIX).decode("ascii"))
            except ValueError:
                continue
        if len(key) in KEY_SIZES:
            return Secret(key)
    return None


def read_key(ctx: click.Context, param: click.Parameter, value: str | None) -> Secret | None:
    """Read the key from a file; no message repeats the argument, which may be the key itself."""
    if value is None:
        return None
    if why_not_a_path(value) is not None:
        raise click.BadParameter("a URL, not a path: copy the file to this host", ctx, param)
    forbid_core_dumps()
    try:
        with click.open_file(value, "rb") as file:
            data = file.read(MAX_KEY_FILE_BYTES + 1)
            if data is None:  # the read would block
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    except OSError as error:
        reason = f"it cannot be read ({error.strerror}); it names a file that holds the key"
        raise click.BadParameter(reason, ctx, param) from None
    is_small = len(data) <= MAX_KEY_FILE_BYTES
    key = parse_key_file(data) if is_small else None
    if key is None:
        size = f"{len(data)} bytes" if is_small else "too many bytes"
        reason = f"the file holds {size}; keys have 16, 24 or 32, or are spelled hex:00ff..."
        raise click.BadParameter(reason, ctx, param)
    return key


# Keys of click's ``Context.meta``.
DEBUG = "ckpttool.debug"  # whether to print a traceback
ANSWERS = "ckpttool.answers"  # whether exit code 1 is an answer
SIGNALS = "ckpttool.guard"  # the `ckpttool.cli.signals.SignalGuard`

Decorator = Callable[[Callable[..., object]], Callable[..., object]]
Parameter = Callable[[str, str], Decorator]  # adds a parameter, by its name and heading

SOURCE, RESOLVE, CHECKS = "Source options", "Resolve options", "Check options"
OUTPUT, RUN, REPORT = "Output options", "Run options", "Report options"

FORMAT_CHOICE = click.Choice(["hdf5", "ckpt", "safetensors"])  # `formats.FORMAT_NAMES`
EXISTING = Existing()


class GroupedOption(click.Option):
    """An option that ``--help`` lists under a heading."""

    def __init__(self, names: Sequence[str], *, heading: str, **settings: Any) -> None:
        super().__init__(names, **settings)
        self.heading = heading


class GroupedCommand(click.Command):
    """A command whose ``--help`` lists the options of each group under a heading."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options of each group, in columns of one width."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None and isinstance(param, click.Option):
                heading = param.heading if isinstance(param, GroupedOption) else REPORT
                groups.setdefault(heading, []).append(record)
        names = (name for records in groups.values() for name, _ in records)
        width = min(max(map(len, names)), 30)  # click's widest column
        for heading, records in groups.items():
            with formatter.section(heading):
                formatter.write_dl([(name.ljust(width), text) for name, text in records])


def option(*flags: str, **settings: Any) -> Parameter:
    """Return an option for a group, which gives it its name and heading."""
    return lambda name, heading: click.option(
        *flags, name, cls=GroupedOption, heading=heading, **settings
    )


def listed_under(heading: str, name: str, *flags: str, **settings: Any) -> Decorator:
    """Return a decorator that adds a single option, whose value is an argument of the command."""
    return option(*flags, **settings)(name, heading)


def argument() -> Parameter:
    """Return a positional argument for a group: a path that exists."""
    return lambda name, heading: click.argument(name, type=EXISTING)


@dataclass(frozen=True)
class OptionGroup:
    """The options under one heading; a command receives the objects that ``build`` returns.

    Attributes
    ----------
    heading
        Heading in ``--help``.
    build
        Takes the values by name, and returns the arguments of the command by name.
    parameters
        The options, by the names of their values.
    """

    heading: str
    build: Callable[..., Mapping[str, object]]
    parameters: Mapping[str, Parameter]

    def __call__(self, *names: str, **own: Parameter) -> Decorator:
        """Return a decorator that adds the named options, or all, in the order of the group.

        ``own`` has options that are specific to the command; they replace those of the group.
        """
        wanted = {*(names or self.parameters), *own}
        available = {**self.parameters, **own}
        added = {name: available[name] for name in available if name in wanted}

        def decorate(command: Callable[..., object]) -> Callable[..., object]:
            @wraps(command)
            def call(**values: object) -> object:
                of_group = {name: values.pop(name) for name in added}
                return command(**values, **self.build(**of_group))

            decorated: Callable[..., object] = call
            for name, parameter in reversed(added.items()):
                decorated = parameter(name, self.heading)(decorated)
            return decorated

        return decorate


@dataclass(frozen=True, slots=True)
class Side:
    """A checkpoint on the command line: its path, its strategy files, and options of its scan."""

    path: str
    strategy_files: tuple[str, ...]
    options: SourceOptions

    def for_engine(self, run: RunOptions) -> Side:
        """Return the side with a path that is valid for the workers of an engine."""
        return replace(self, path=absolute_for_cluster(self.path, run))


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """How a command reports.

    Attributes
    ----------
    as_json
        Whether to print one JSON document.
    quiet
        Whether to print nothing but warnings and errors.
    debug
        Whether to print a traceback with an error.
    verbose
        Whether to list the outputs.
    limit
        Largest number of listed findings; None for the default of the command.
    """

    as_json: bool
    quiet: bool
    debug: bool
    verbose: bool = False
    limit: int | None = None

    @property
    def hides_progress(self) -> bool:
        """Whether to show no progress."""
        return self.quiet or self.as_json


def make_side(
    path: str,
    pattern: str | None,
    step: str | None,
    key: Secret | None,
    strategy_files: tuple[str, ...] = (),
) -> Side:
    """Return a side; refuse a pattern without ``{rank}``."""
    from ckpttool.discovery.scan import SourceOptions

    if pattern is not None and (reason := why_not_a_path(pattern)) is not None:
        raise click.UsageError(f"--pattern {pattern!r} is {reason}.")
    if pattern is not None and "{rank}" not in pattern:
        raise click.UsageError(
            "--pattern does not say where {rank} is in the path, such as 'node{rank}/*.ckpt'."
        )
    return Side(path, strategy_files, SourceOptions(pattern, step, key))


def _build_source(src: str, **values: Any) -> Mapping[str, object]:
    return {"source": make_side(src, **values)}


def _build_resolve(**values: Any) -> Mapping[str, object]:
    from ckpttool.planning.resolve import ResolveOptions

    return {"resolve": ResolveOptions(**values)}


def _build_output(**values: Any) -> Mapping[str, object]:
    from ckpttool.planning.plans import OutputOptions

    return {"output": OutputOptions(**values)}


def _build_run(
    engine: str | None, jobs: int | None, max_memory_bytes: int | None = None
) -> Mapping[str, object]:
    """Return the engine from -j or --engine, and its limit of memory."""
    from ckpttool.execution.executors import RunOptions

    try:
        chosen = RunOptions(engine or "threads", max_memory_bytes)
        if jobs is not None:
            chosen = RunOptions(f"threads:{jobs}", max_memory_bytes)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="'--engine'") from error
    if jobs is not None and engine not in (None, "threads", chosen.engine):
        raise click.UsageError(f"-j {jobs} is short for --engine threads:{jobs}, not {engine}.")
    return {"run": chosen}


def _build_report(color: None, **values: Any) -> Mapping[str, object]:
    return {"report": ReportOptions(**values)}


def _set_debug(ctx: click.Context, param: click.Parameter, value: bool) -> bool:
    ctx.meta[DEBUG] = value
    return value


def _set_color(ctx: click.Context, param: click.Parameter, value: str) -> None:
    """Replace what the environment says about colours; the root prints errors."""
    if value != "auto":
        ctx.color = ctx.find_root().color = value == "always"


def _check_prefix(ctx: click.Context, param: click.Parameter, value: str) -> str:
    if "/" in value or "\0" in value:
        raise click.BadParameter("it begins a file name, so no / can be in it")
    return value


def _strategy(letter: str, side: str, of: str, required: bool) -> Parameter:
    return option(
        f"-{letter}",
        f"--{side}-strategy",
        type=EXISTING,
        multiple=True,
        required=required,
        metavar="FILE",
        help=f"Strategy file of the {of}, or a hand-written one (.yaml).  For several pipeline "
        "stages, repeat the option, or name a folder.",
    )


source_options = OptionGroup(
    SOURCE,
    _build_source,
    {
        "src": argument(),
        "strategy_files": _strategy("s", "src", "source", required=False),
        "step": option(
            "--step",
            metavar="STEP",
            help="Step to take, as in the file names: 10_1.  [default: the newest that every rank "
            "has]",
        ),
        "pattern": option(
            "--pattern",
            metavar="PATTERN",
            help="Where the rank files are below SRC, such as 'node{rank}/CKP_1-4_32.ckpt'.",
        ),
        "key": option(
            "--dec-key-file",
            metavar="FILE",
            callback=read_key,
            help="File with the key of encrypted files, - for standard input: its 16, 24 or 32 "
            "bytes, or hex: and its digits.",
        ),
    },
)

resolve_options = OptionGroup(
    RESOLVE,
    _build_resolve,
    {
        "replicated": option(
            "--replicated",
            is_flag=True,
            help="Every rank holds all tensors in full (data parallel, integrated_save=True); "
            "contents are compared.  If SRC is one rank's file, that file holds them.  Not with "
            "-s.",
        ),
        "unlisted": option(
            "--unlisted",
            type=click.Choice(["rank", "first", "drop"]),
            help="What to do with a parameter that is not in the source strategy and differs "
            "between ranks.  rank: target rank r takes that of source rank r modulo source ranks; "
            "first: all take the lowest rank's; drop: leave it out.  It decides also on a tensor "
            "in hyper_param that may be one rank's slice.  [default: an error]",
        ),
        "trust_strategy": option(
            "--trust-strategy",
            is_flag=True,
            help="Skip the samples of contents that show whether the strategy belongs to these "
            "files.",
        ),
        "optimizer_shard": option(
            "--optimizer-shard",
            type=WholeNumber(min=1),
            metavar="N",
            help="An optimizer shard that the strategy hides: decides where contents do not tell "
            "or fit several ways; 1 for none.  It is an error if they show another.  [default: an "
            "error]",
        ),
        "strict": option(
            "--strict",
            is_flag=True,
            help="Refuse on every warning: replicas that replace a missing or damaged rank, "
            "layouts that are corrected, a strategy in doubt.",
        ),
        "check_replicas": option(
            "--check-replicas",
            is_flag=True,
            help="Before anything is written, compare all replicas of all slices byte for byte.",
        ),
    },
)

crc = listed_under(
    CHECKS,
    "crc",
    "--crc",
    is_flag=True,
    help="Verify the checksum of every file that has one, and the tags of encrypted ones; reads "
    "them whole.",
)

output_options = OptionGroup(
    OUTPUT,
    _build_output,
    {
        "format": option(
            "--format",
            type=FORMAT_CHOICE,
            default="hdf5",
            show_default=True,
            help="Format of the output.",
        ),
        "prefix": option(
            "--prefix",
            default="checkpoint_",
            show_default=True,
            callback=_check_prefix,
            help="Output files are PREFIX<rank>.",
        ),
        "ranks": option(
            "--rank", type=RankList(), metavar="RANKS", help="Only these target ranks: 0,3-7."
        ),
        "not_in_target": option(
            "--not-in-target",
            type=click.Choice(["follow", "full", "drop"]),
            default="follow",
            show_default=True,
            help="What to do with a parameter that is not in the target strategy.  follow: cut "
            "optimizer state like its parameter, write the rest in full to every rank; full: "
            "write all in full; drop: leave out all but single values.",
        ),
        "strategy_path": option(
            "--write-strategy",
            type=StrategyName(),
            metavar="FILE",
            help="Write the strategy of the output, too, for MindSpore's own tools: how it is "
            "cut, all stages in one protobuf file.",
        ),
        "max_shard_bytes": option(
            "--max-shard-size",
            type=Size(),
            metavar="SIZE",
            help="Write a folder OUT of numbered files with at most SIZE of tensors each (5GB, "
            "500MB, 2GiB), and the indexes by which MindSpore and Hugging Face load it.",
        ),
        "crc": option(
            "--crc",
            is_flag=True,
            help="Verify the checksum of every source file that has one, before anything is "
            "written, and store one in every output.",
        ),
        "part": option(
            "--part",
            type=PartOf(),
            metavar="K/N",
            help="Write only the K-th of N parts of the output files, about equal in size, as in "
            "a job array; ckpttool finalize looks whether all are there.",
        ),
        "overwrite": option(
            "--overwrite",
            is_flag=True,
            help="Replace outputs that exist; files of other names stay.",
        ),
        "resume": option(
            "--resume",
            is_flag=True,
            help="Go on where the same command was interrupted: outputs that it left complete are "
            "kept. What has changed since (source, strategy, options) is an error.",
        ),
    },
)


def rank_outputs(command: Callable[..., object]) -> Callable[..., object]:
    """Add -o, -d and the output options of commands that write rank files."""
    folder = listed_under(
        OUTPUT,
        "folder",
        "-o",
        "--output",
        type=OutputFolder(),
        required=True,
        metavar="DIR",
        help="Folder for rank_0/, rank_1/, ...",
    )
    strategy = _strategy("d", "dst", "target", required=True)("dst_strategy", OUTPUT)
    added = output_options(*(output_options.parameters.keys() - {"max_shard_bytes"}))
    return folder(strategy(added(command)))


run_options = OptionGroup(
    RUN,
    _build_run,
    {
        "jobs": option(
            "-j",
            "--jobs",
            type=WholeNumber(min=1),
            metavar="N",
            help="Threads: short for --engine threads:N.",
        ),
        "engine": option(
            "--engine",
            metavar="ENGINE",
            help="Who does the work: threads[:N], processes[:N], a Dask cluster (dask:ADDRESS, "
            "dask:SCHEDULER_FILE), or mpi.  [default: threads, one for each processor, at most 8]",
        ),
        "max_memory_bytes": option(
            "--max-memory",
            type=Size(),
            metavar="SIZE",
            help="Most memory to take, 200MiB: of all processes on this host, or of each worker "
            "of a cluster.  [default: about 50 MB and 8 MiB for each worker]",
        ),
    },
)

LIMIT = option(
    "--limit",
    type=WholeNumber(min=0),
    metavar="N",
    help="List at most N of what was found.  [default: 50; with --json all]",
)
VERBOSE = option("-v", "--verbose", is_flag=True, help="List the files that were written.")
report_options = OptionGroup(
    REPORT,
    _build_report,
    {
        "as_json": option("--json", is_flag=True, help="Print one JSON document."),
        "quiet": option(
            "-q", "--quiet", is_flag=True, help="Print nothing but warnings and errors."
        ),
        "color": option(
            "--color",
            type=click.Choice(["auto", "always", "never"]),
            default="auto",
            show_default=True,
            is_eager=True,
            callback=_set_color,
            help="Whether to colour; auto: on a terminal without NO_COLOR.",
        ),
        "debug": option(
            "--debug",
            is_flag=True,
            is_eager=True,
            callback=_set_debug,
            help="Print a traceback with an error.",
        ),
    },
)


def refuse_two_strategies(source: Side, resolve: ResolveOptions) -> None:
    """Refuse --replicated together with a strategy."""
    if resolve.replicated and source.strategy_files:
        raise click.UsageError("--replicated and -s exclude each other.")


def exit_code_is_answer() -> None:
    """Reserve exit code 1 for the answer of verify and diff; errors with this code get 3."""
    click.get_current_context().meta[ANSWERS] = True


def absolute_for_cluster(path: str, run: RunOptions) -> str:
    """Return an absolute path if the engine is a cluster, else the same path."""
    from ckpttool.execution.executors import is_cluster

    prefix = f"{Path.cwd()}/" if is_cluster(run.engine) else ""
    return path if path.startswith("/") else prefix + path


def with_format(path: str, output: OutputOptions) -> OutputOptions:
    """Resolve the output format from --format or the suffix of the file."""
    from ckpttool.planning import plans

    if path == "-":
        raise click.UsageError("A checkpoint does not go to standard output; name a file.")
    is_folder = output.max_shard_bytes is not None
    try:
        return replace(output, format=plans.choose_format(path, output.format, is_folder))
    except PlanError as error:
        raise click.UsageError(f"{error}.") from error


def refuse_hdf5_checksum(output: OutputOptions) -> None:
    """Refuse --crc for HDF5, which cannot store a checksum."""
    if output.crc and output.format == "hdf5":
        raise click.UsageError(
            "HDF5 has no place for MindSpore's checksum: with --crc write --format ckpt or "
            "safetensors, or verify the source by itself with inspect --crc."
        )
