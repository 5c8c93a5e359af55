"""Options that commands share: one object for each group, and the headings of ``--help``.

A help text has two lines at most; ``docs/reference/options.md`` says the rest.

The key of encrypted files comes from a file or standard input only.  Other users could read an
argument or a variable of the environment, and shells keep them in histories.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from functools import partial, wraps
from itertools import chain
from pathlib import Path, PurePath
from shlex import join, split
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource, augment_usage_errors
from msgspec import Struct
from msgspec.structs import replace

from ckpttool import keywords
from ckpttool.cli.groups import (
    FROM_ENVIRONMENT,
    VARIABLES,
    WORDS,
    HelpContext,
    with_dashes,
    words_of,
)
from ckpttool.cli.params import (
    JOBS,
    KINDS,
    WRONG,
    Choice,
    Existing,
    OutputPath,
    StrategyFile,
    UsageProblem,
    excluding,
    refuse_repeated,
    whole_number,
)
from ckpttool.formats import FORMATS
from ckpttool.wording import any_of, count, shorten

if TYPE_CHECKING:
    from ckpttool.checkpoint.checkpoint import ResolveOptions
    from ckpttool.concurrency import OpenCount
    from ckpttool.discovery.scan import SourceOptions
    from ckpttool.execution.executors import RunOptions
    from ckpttool.operations.audit import AuditOptions
    from ckpttool.operations.load import Source
    from ckpttool.transaction.resume import OutputOptions


# Keys of click's ``Context.meta``.
SIGNALS = "ckpttool.guard"  # the `ckpttool.cli.signals.SignalGuard`

DEFAULT_STRATEGY = "ckpttool.default_strategy"  # files for SRC where nothing else names any

KEY_FILE = "--dec-key-file"


def command_line(words: Sequence[str]) -> str:
    """Return what was typed; a key in the place of the file that should hold it is left out.

    Examples
    --------
    >>> command_line(["verify", "a b/", "--dec-key-file", "0123456789abcdef"])
    "ckpttool verify 'a b/' --dec-key-file ..."
    >>> command_line(["verify", "c/", "--dec_key_file=0123456789abcdef", "--dec-key-file"])
    'ckpttool verify c/ --dec_key_file=... --dec-key-file'
    """
    shown = ["ckpttool", *words]
    for at, word in enumerate(shown):
        option, is_joined, value = word.partition("=")
        if is_joined and with_dashes(option) == KEY_FILE and not os.path.lexists(value):
            shown[at] = f"{option}=..."
        elif with_dashes(shown[at - 1]) == KEY_FILE and not os.path.lexists(word):
            shown[at] = "..."
    return join(shown)


Decorator = Callable[[Callable[..., object]], Callable[..., object]]
Parameter = Callable[[str, str], Decorator]  # adds a parameter, by its name and heading

# Headings of --help, in its order.  EVERYDAY has the options that most people need, at most ten of
# each command.
SOURCE, OUTPUT, STRATEGY = "Source options", "Output options", "Strategy options"
TENSORS = "Tensor options"
SPEED, SAFETY, DISPLAY = "Speed options", "Safety options", "Display options"
HEADINGS = ("Everyday options", SOURCE, TENSORS, OUTPUT, STRATEGY, SPEED, SAFETY, DISPLAY)
EVERYDAY = (
    *("-s", "-d", "-o", "--format", "--step", "--replicated", "--deep"),
    *("--overwrite", "--resume", "-j", "--json", "-h"),
)

EXISTING = Existing("a file or folder")


class GroupedOption(click.Option):
    """An option that ``--help`` lists under a heading, without its aliases."""

    def __init__(
        self, names: Sequence[str], *, heading: str, aliases: Sequence[str] = (), **settings: Any
    ) -> None:
        settings.setdefault("envvar", next(filter(None, map(VARIABLES.get, names)), None))
        super().__init__((*names, *aliases), **settings)
        self.heading = heading
        self.aliases = aliases
        if aliases:
            self.help = f"{self.help}  Also {', '.join(aliases)}."

    @property
    def _takes_one_value(self) -> bool:
        return not (self.is_flag or self.multiple)

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        """Have the parser collect all values, so that `consume_value` can count them."""
        if self._takes_one_value:
            parser.add_option(obj=self, opts=self.opts, dest=self.name, action="append", nargs=1)
        else:
            super().add_to_parser(parser, ctx)

    def consume_value(
        self, ctx: click.Context, opts: Mapping[str, Any]
    ) -> tuple[Any, ParameterSource]:
        """Return the value; refuse a second one, which would silently replace the first.

        Refuse an option as the value, as in ``-o $UNSET --overwrite``.
        """
        name, given = str(self.name), opts.get(str(self.name))
        if given and not (self.is_flag or ctx.resilient_parsing):
            names = {option for param in ctx.command.get_params(ctx) for option in param.opts}
            for value in given:
                if value[:1] == "-" and not names.isdisjoint((value[:2], value.partition("=")[0])):
                    facts = "The value is missing, or a variable of the shell is unset."
                    raise UsageProblem(f"{value!r} is an option, not a value", facts=facts)
        if self._takes_one_value and given:
            if not ctx.resilient_parsing:
                refuse_repeated(self, given)
            opts = {**opts, name: given[-1]}
        value, source = super().consume_value(ctx, opts)
        if source is ParameterSource.ENVIRONMENT:
            if name == "jobs" and opts.get("engine"):
                return None, ParameterSource.DEFAULT  # what is typed has the last word
            variable = str(self.envvar)
            text = ctx.meta.setdefault(FROM_ENVIRONMENT, {})[variable] = os.environ[variable]
            ctx.set_parameter_source(name, source)  # messages name the variable
            if self.is_flag and text not in ("0", "1"):
                raise UsageProblem(f"{text!r} is not 0 or 1", f"{variable}=1")
            if variable == VARIABLES["--src-strategy"] and not self.required:
                ctx.meta[DEFAULT_STRATEGY] = self.type_cast_value(ctx, value)
                return None, ParameterSource.DEFAULT  # a manifest has the last word
        return value, source

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Return the names and the text of the option."""
        shown = copy(self)
        shown.opts = [name for name in self.opts if name not in self.aliases]
        return click.Option.get_help_record(shown, ctx)


class GroupedCommand(click.Command):
    """A command whose ``--help`` lists its options under headings, the everyday ones first."""

    context_class = HelpContext

    @property
    def example(self) -> str:
        """The command line with which the help begins, on one line."""
        first = (self.help or "").removeprefix("\b\n").partition("\n\n")[0]
        return " ".join(first.replace("\\\n", " ").split())

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the parameters; options of the whole program, but --version, stand anywhere."""
        root = ctx.find_root()
        of_root = root.command.params if root is not ctx else []
        return [*super().get_params(ctx), *(option for option in of_root if not option.is_eager)]

    def options_by_heading(self, ctx: click.Context) -> Mapping[str, Sequence[click.Option]]:
        """Return the options under each heading, in the order of ``--help``."""
        by_heading: dict[str, list[click.Option]] = {heading: [] for heading in HEADINGS}
        for param in self.get_params(ctx):
            if isinstance(param, click.Option):
                is_everyday = not {*EVERYDAY}.isdisjoint(param.opts)
                heading = HEADINGS[0] if is_everyday else getattr(param, "heading", DISPLAY)
                by_heading[heading] += [param]
        first = by_heading[HEADINGS[0]]
        first.sort(key=lambda option: min(map(EVERYDAY.index, {*EVERYDAY} & {*option.opts})))
        return {heading: options for heading, options in by_heading.items() if options}

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options of each group, in columns of one width."""
        records = {
            heading: [record for option in options if (record := option.get_help_record(ctx))]
            for heading, options in self.options_by_heading(ctx).items()
        }
        width = max(len(name) for rows in records.values() for name, _ in rows)
        for heading, rows in records.items():
            with formatter.section(heading):
                formatter.write_dl([(name.ljust(width), help) for name, help in rows])

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; say first which options the environment has set."""
        if (read := ctx.meta.get(FROM_ENVIRONMENT)) and not ctx.params.get("quiet"):
            from ckpttool.cli.tables import print_text

            variables = ", ".join(f"{name}={value}" for name, value in read.items())
            print_text(f"from the environment: {variables}", "note", err=True)
        return super().invoke(ctx)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments; raise all problems at once, and too many paths as one."""
        ctx.allow_extra_args = True
        wrong: list[click.UsageError] = []
        ctx.meta[WRONG], extra = wrong, list[str]()
        try:
            with augment_usage_errors(ctx):  # click forgets it where a value is missing
                extra = super().parse_args(ctx, args)
        except click.UsageError as error:
            if not wrong:
                raise
            wrong.append(error)
        if extra and not ctx.resilient_parsing:
            wanted = [param for param in self.params if isinstance(param, click.Argument)]
            names = [argument.human_readable_name for argument in wanted]
            few = f"one {names[0]}" if len(names) == 1 else "no path"
            paths = [*(str(ctx.params[str(argument.name)]) for argument in wanted), *extra]
            wrong += [too_many_paths(" and ".join(names) if names[1:] else few, paths, len(wanted))]
        if wrong and not ctx.resilient_parsing:
            assert isinstance(wrong[0], UsageProblem), "another error is behind one of these"
            wrong[0].others += wrong[1:]
            raise wrong[0]
        return extra


def name_with_value(option: click.Parameter) -> str:
    """Return an option and the word for its value, as ``--help`` shows them."""
    return f"{option.opts[0]} {option.metavar or option.type.name.upper()}"


def too_many_paths(wanted: str, paths: Sequence[str], most: int = 1) -> UsageProblem:
    """Return the problem of paths that are too many: ``most`` are taken."""
    ctx = click.get_current_context()
    facts = f"{count(len(paths), 'path', 'were')} given: {shorten(paths, 3)}"
    hint = _with_option_of(ctx, len(paths) - most) or getattr(
        ctx.command, "example", f"{ctx.command_path} --help"
    )
    return UsageProblem(f"{words_of(ctx)} takes {wanted}", hint, facts, ctx=ctx)


def _with_option_of(ctx: click.Context, number: int) -> str:
    """Return the command line with an option for all files that a shell makes of ``-s dir/*.ckpt``.

    So many words behind its value are like it; "" if they are not.
    """
    from ckpttool.strategy_files.near import option_of

    words: Sequence[str] = ctx.meta.get(WORDS, ())
    params = (param for param in ctx.command.params if isinstance(param.type, StrategyFile))
    flags = {flag for param in params for flag in param.opts}
    for at, flag in enumerate(words, 1):
        files = words[at : at + number + 1]
        kinds = {(PurePath(file).parent, PurePath(file).suffix) for file in files}
        if flag in flags and len(files) == number + 1 and len(kinds) == 1:
            named, rest = split(option_of(files, flag)), words[at + number + 1 :]
            return command_line([*words[: at - 1], *named, *rest])
    return ""


def refuse_options(what: str, used: Collection[str]) -> None:
    """Refuse options that were typed and do nothing, since SRC is ``what``, not a checkpoint.

    ``used`` has the names of parameters that do something, beside those of `report_options`.
    """
    ctx = click.get_current_context()
    if flags := ", ".join(_find_typed(ctx, {*used, *report_options.parameters})):
        facts, hint = f"{ctx.params['src']} is {what}.", f"the same command without {flags}"
        raise UsageProblem(f"options for checkpoints only: {flags}", hint, facts, ctx=ctx)


def refuse_beside(flag: str, used: Collection[str]) -> None:
    """Refuse options that were typed and do nothing beside ``flag``.

    ``used`` has the names of parameters that do something, beside those of `report_options`.
    """
    ctx = click.get_current_context()
    if flags := ", ".join(_find_typed(ctx, {*used, *report_options.parameters})):
        raise excluding(flag, flags, ctx=ctx)


def require_flag(flag: str, names: Collection[str]) -> None:
    """Refuse options that were typed and do nothing without ``flag``, by their parameters."""
    ctx = click.get_current_context()
    unmarked = {str(param.name) for param in ctx.command.params} - {*names}
    if flags := ", ".join(_find_typed(ctx, unmarked)):
        hint = f"the same command with {flag}, or without {flags}"
        raise UsageProblem(f"only with {flag}: {flags}", hint, ctx=ctx)


def _find_typed(ctx: click.Context, unmarked: Collection[str]) -> list[str]:
    return [
        param.opts[0]
        for param in ctx.command.params
        if isinstance(param, GroupedOption)
        and param.name not in unmarked
        and ctx.get_parameter_source(str(param.name)) is ParameterSource.COMMANDLINE
    ]


def option(help: str, *flags: str, **settings: Any) -> Parameter:
    """Return a function that takes the name and the heading of an option, and adds it.

    Its flag is its name, without ``flags``.  The help shows a default that is set.  The setting
    ``heading`` replaces the heading.
    """

    def add(name: str, heading: str) -> Decorator:
        names = flags or (f"--{name.replace('_', '-')}",)
        own = {"heading": heading, "show_default": "default" in settings, **settings}
        return click.option(*names, name, cls=GroupedOption, help=help, **own)

    return add


def flag(help: str, *flags: str, **settings: Any) -> Parameter:
    """Return an option without a value; see `option`."""
    return option(help, *flags, is_flag=True, **settings)


def _declared(group: type, **settings: Any) -> Mapping[str, Parameter]:
    declared = keywords.declared(group).items()
    return {name: _of_keyword(name, it, is_flag, settings) for name, (it, is_flag) in declared}


def variant(name: str, **changes: Any) -> Parameter:
    """Return the option of a keyword as one command has it: with another help, flag or default."""
    declared, is_flag = keywords.declared(keywords.AllKeywords)[name]
    return _of_keyword(name, replace(declared, **changes), is_flag, {})


def _of_keyword(
    name: str, declared: keywords.Option, is_flag: bool, settings: Mapping[str, Any]
) -> Parameter:
    given: dict[str, Any] = {**settings, "aliases": declared.aliases}
    if declared.is_safety:
        given["heading"] = SAFETY
    if declared.default is not None:
        given["default"] = declared.default
    if declared.value:
        given["flag_value"] = declared.value
    elif is_flag:
        given["is_flag"] = True
    else:
        kind = Choice(declared.choices) if declared.choices else KINDS.get(declared.kind)
        word = declared.metavar or ("" if declared.kind else name.upper())
        given |= {"type": kind, "metavar": word or None, "multiple": declared.is_repeatable}
    return option(declared.help, *filter(None, (declared.flag,)), **given)


def format_of_output(default: str) -> Parameter:
    """Return --format of a command with this default."""
    return variant("format", help=f"{any_of(FORMATS)}.  [default: {default}]")


def argument(what: str) -> Parameter:
    """Return a positional argument for a group: the path of ``what``, which exists."""
    return lambda name, heading: click.argument(name, type=Existing(what))


class OptionGroup(Struct, frozen=True):
    """The options under one heading; a command receives the object that ``build`` returns.

    Attributes
    ----------
    heading
        Heading in ``--help``.
    argument
        The name of the object among the arguments of the command.
    build
        Takes the values by name.
    parameters
        The options, by the names of their values.
    """

    heading: str
    argument: str
    build: Callable[..., object]
    parameters: Mapping[str, Parameter]

    def __call__(self, *names: str, **own: Parameter) -> Decorator:
        """Return a decorator that adds the named options, or all, in the order of the group.

        ``own`` has options that are specific to the command; they replace those of the group.
        """
        available = {**self.parameters, **own}
        wanted = {*names, *own} if names else available
        added = {name: available[name] for name in available if name in wanted}

        def decorate(command: Callable[..., object]) -> Callable[..., object]:
            @wraps(command)
            def call(**values: object) -> object:
                of_group = {name: values.pop(name) for name in added}
                return command(**values, **{self.argument: self.build(**of_group)})

            decorated: Callable[..., object] = call
            for name, parameter in reversed(added.items()):
                decorated = parameter(name, self.heading)(decorated)
            return decorated

        return decorate


class Side(Struct, frozen=True):
    """A checkpoint on the command line: its path, its strategy files, and options of its scan."""

    path: str
    strategy_files: tuple[str, ...]
    options: SourceOptions

    @property
    def source(self) -> Source:
        """The same for the functions that load it."""
        from ckpttool.operations.load import Source

        default = click.get_current_context().meta.get(DEFAULT_STRATEGY, ())
        return Source(self.path, self.strategy_files, self.options, default)

    def for_engine(self, run: RunOptions) -> Side:
        """Return the side with a path that is valid for the workers of an engine."""
        return replace(self, path=absolute_for_cluster(self.path, run))


class ReportOptions(Struct, frozen=True):
    """Options of the report of a command.

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
    dry_run
        Whether to report what a run would do, and to write nothing.
    as_tsv
        Whether to print a table of values between tabs.
    progress
        How to show progress: ``auto`` or ``json``.
    format
        ``"text"``, or ``"github"`` for annotations of a workflow.
    """

    as_json: bool = False
    quiet: bool = False
    debug: bool = False
    verbose: bool = False
    limit: int | None = None
    dry_run: bool = False
    as_tsv: bool = False
    progress: str = "auto"
    format: str = "text"

    def __post_init__(self) -> None:
        if self.as_json and self.as_tsv:
            raise excluding("--json", "--tsv")

    @property
    def shown_progress(self) -> str:
        """How to show progress: ``auto``, ``json`` or ``none``."""
        is_hidden = self.progress == "auto" and (self.quiet or self.as_json)
        return "none" if is_hidden else self.progress

    @property
    def open_count(self) -> OpenCount:
        """The display of phases that are counted."""
        from ckpttool.cli.progress import show_count

        return partial(show_count, how=self.shown_progress)


def make_side(src: str, strategy_files: tuple[str, ...] = (), **options: Any) -> Side:
    """Return a side; ``options`` are those of its scan."""
    from ckpttool.discovery.scan import SourceOptions

    return Side(src, strategy_files, SourceOptions(**options))


def _build_resolve(**values: Any) -> ResolveOptions:
    from ckpttool.checkpoint.checkpoint import ResolveOptions
    from ckpttool.model.choices import TensorOptions

    if "dtype" in values and not (values["dtype"] or values.get("lora")):
        require_flag("--dtype", ["on_overflow"])
    given = {name: value for name, value in values.items() if value is not None}
    of_tensors = {name: given.pop(name) for name in OF_TENSORS if name in given}
    reverse = of_tensors.pop("reverse", False)
    if files := of_tensors.pop("rename_file", ()):
        from ckpttool.strategy_files.rename_files import read_renames

        rules = chain.from_iterable(read_renames(path, reverse) for path in files)
        of_tensors["rename"] = (*of_tensors["rename"], *rules)
    elif reverse:
        require_flag("--rename-file", ["reverse"])
    folder = of_tensors.pop("hf_config", None)
    if recipe := of_tensors.pop("recipe", None):
        from ckpttool.strategy_files.recipe_files import read_recipe

        if of_tensors.get("rename"):
            raise excluding("--recipe", "--rename", "A recipe gives all names.")
        of_tensors["recipe"] = read_recipe(recipe, folder)
    elif folder:
        require_flag("--recipe", ["hf_config"])
    if adapters := of_tensors.pop("lora", ()):
        from ckpttool.discovery.adapter_files import read_adapter

        of_tensors["lora"] = tuple(map(read_adapter, adapters))
    if of_tensors.get("pad_vocab") and of_tensors.get("cut_vocab"):
        raise excluding("--pad-vocab", "--cut-vocab")
    if "pad_vocab" in values and not of_tensors.get("pad_vocab"):
        require_flag("--pad-vocab", ["pad_with"])
    if of_tensors.get("vocab") and not (of_tensors.get("pad_vocab") or of_tensors.get("cut_vocab")):
        require_flag("--pad-vocab or --cut-vocab", ["vocab"])
    return ResolveOptions(**given, tensors=TensorOptions(**of_tensors))


def typed_command() -> str:
    """Return the command line of this run."""
    return command_line(click.get_current_context().meta[WORDS])


def _build_output(**values: Any) -> OutputOptions:
    from ckpttool.transaction.resume import OutputOptions

    named = [flag for flag in ("name", "mindformers") if values.get(flag)]
    if named and values.get("prefix") not in (None, OutputOptions().prefix):
        raise excluding("--prefix", f"--{named[0]}")
    return OutputOptions(**values, command=typed_command())


def _build_run(
    engine: str | None, jobs: int | None, max_memory_bytes: int | None = None
) -> RunOptions:
    from ckpttool.execution.executors import RunOptions

    of_jobs = None if jobs is None else f"threads:{jobs}"
    if of_jobs is not None and engine not in (None, "threads", of_jobs):
        facts = f"-j {jobs} is short for --engine {of_jobs}; found --engine {engine}."
        raise excluding("-j", "--engine", facts)
    return RunOptions(of_jobs or engine or "threads", max_memory_bytes)


def strategy(of: str, short: str = "", **settings: Any) -> Parameter:
    """Return an option for the strategy files of a side: -s, -d, or one with its own name."""
    help = f"Strategy file of {of}; repeat it, or name a folder, for pipeline stages."
    flags = {"-s": ("-s", "--src-strategy"), "-d": ("-d", "--dst-strategy"), "": ()}[short]
    settings["aliases"] = ("--strategy",) if short == "-s" else ()
    return option(help, *flags, type=StrategyFile(), multiple=True, metavar="FILE", **settings)


strategies = click.argument(
    "strategies", nargs=-1, required=True, type=StrategyFile(), metavar="STRATEGY..."
)


source_options = OptionGroup(
    SOURCE,
    "source",
    make_side,
    {
        "src": argument("a folder of rank folders, or a merged checkpoint"),
        "strategy_files": strategy("SRC", "-s"),
        **_declared(keywords.SourceKeywords),
    },
)
OF_EXPORT = keywords.names_of(keywords.ExportKeywords)
OF_TENSORS = keywords.names_of(keywords.TensorKeywords)
resolve_options = OptionGroup(
    STRATEGY,
    "resolve",
    _build_resolve,
    {
        **_declared(keywords.ResolveKeywords),
        **_declared(keywords.TensorKeywords, heading=TENSORS),
    },
)


def _build_audit(**values: Any) -> AuditOptions:
    from ckpttool.operations.audit import AuditOptions

    if values["overwrite"] and values["card"] is None:
        raise UsageProblem("--overwrite without --card", "--card card.json --overwrite")
    return AuditOptions(**values)


audit_options = OptionGroup(
    OUTPUT,
    "audit",
    _build_audit,
    {
        **_declared(keywords.AuditKeywords),
        "overwrite": variant("overwrite", help="Replace the card if it exists."),
    },
)

crc = flag("Verify the checksums of all files, which reads every byte.")("crc", SAFETY)

OF_RANKS = keywords.names_of(keywords.RankKeywords)
OF_FILES = keywords.names_of(keywords.ShardKeywords, keywords.WriteKeywords)
_WRITE = _declared(keywords.WriteKeywords)
output_options = OptionGroup(
    OUTPUT,
    "output",
    _build_output,
    {
        "format": format_of_output("hdf5; ckpt with --mindformers"),
        **_declared(keywords.RankKeywords),
        **_declared(keywords.ShardKeywords),
        **_declared(keywords.VirtualKeywords),
        **{name: parameter for name, parameter in _WRITE.items() if name != "format"},
    },
)


def rank_outputs(command: Callable[..., object]) -> Callable[..., object]:
    """Add -o, -d and the output options of commands that write rank files."""
    folder = output_path("folder", "Folder for rank_0/, rank_1/, ...", "new/", "DIR")
    dst_strategy = strategy("the target", "-d", required=True)
    added = output_options(*(output_options.parameters.keys() - {"max_shard_bytes", "virtual"}))
    return folder(dst_strategy("dst_strategy", OUTPUT)(added(command)))


def output_path(name: str, help: str, example: str, metavar: str) -> Decorator:
    """Return a decorator that adds -o; its value is the argument ``name`` of the command."""
    path = option(help, "-o", "--output", type=OutputPath(example), required=True, metavar=metavar)
    return path(name, OUTPUT)


run_options = OptionGroup(
    SPEED,
    "run",
    _build_run,
    {
        "jobs": option(
            "Number of threads: short for --engine threads:N.",
            "-j",
            "--jobs",
            type=JOBS,
        ),
        **_declared(keywords.RunKeywords),
    },
)

TSV = flag("Print a line for each tensor or finding, its values between tabs.", "--tsv")
LIMIT = option("List at most N findings.  [default: 50; with --json all]", type=whole_number(0))
DRY_RUN = flag(
    "Show what would be read and written, and what it takes; write nothing.",
    "-n",
    "--dry-run",
    heading=SAFETY,
)
VERBOSE = flag("List the files that were written.", "-v", "--verbose")
report_options = OptionGroup(
    DISPLAY,
    "report",
    ReportOptions,
    {
        "as_json": flag("Print one JSON document.", "--json"),
        "quiet": flag("Print nothing but warnings and errors.", "-q", "--quiet"),
        "debug": flag("Print a traceback with an error."),
        "progress": option(
            "Show progress on stderr: auto, or json, an object on a line for each second.",
            type=Choice(["auto", "json"]),
            default="auto",
            metavar="HOW",
        ),
    },
)


def absolute_for_cluster(path: str, run: RunOptions) -> str:
    """Return an absolute path if the engine is a cluster, else the same path."""
    from ckpttool.execution.executors import is_cluster

    prefix = f"{Path.cwd()}/" if is_cluster(run.engine) else ""
    return path if path.startswith("/") else prefix + path
