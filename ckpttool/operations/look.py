"""The one way from files to a checkpoint and what is wrong with it, for every command.

`look` takes what is left of files that are cut short, compares the files with their manifest and
resolves the tensors.  Then it reads what the command needs, runs the table of checks and verifies
checksums.  It decides the order of these stages.  The modules below decide what a stage does.  The
command decides what follows from a finding: merge plans and writes, diff calls `look` twice,
inspect shows.

Problems of a source are not raised.  A stage that cannot go on leaves its error, and the others
still run, so that a person sees all problems at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from ckpttool.checkpoint.checkpoint import Checkpoint, Contents, Reading, ResolveOptions
from ckpttool.checkpoint.evidence import Asking, Evidence, answer
from ckpttool.checkpoint.from_manifest import limit_to_written_ranks
from ckpttool.checkpoint.interpret import Files
from ckpttool.checkpoint.resolve import FindNeeded, resolving
from ckpttool.checks import is_refused, run_checks
from ckpttool.concurrency import InlineExecutor, OpenProgress, no_progress
from ckpttool.discovery.rank_folders import find_manifests
from ckpttool.discovery.scan import CheckpointFiles
from ckpttool.formats import read_indexes
from ckpttool.model.catalog import Catalog
from ckpttool.model.strategy import Strategy
from ckpttool.model.tensors import FileIndex
from ckpttool.operations.load import Source, StrategySource, load
from ckpttool.problems import CkptToolError, Command, Diagnostic, Diagnostics, PlanError, severities

if TYPE_CHECKING:
    from ckpttool.checkpoint.resolve import Depth, Resolved
    from ckpttool.model.manifest import ListedOutput

# Reads more than headers and samples, and returns what that shows; see `Contents.read`.
ReadMore: TypeAlias = Callable[
    [Checkpoint, Contents, Executor, OpenProgress], Mapping[Reading, Sequence[Diagnostic]]
]


class Subject(Struct, frozen=True):
    """The files that a command reads, and how it takes them.

    Attributes
    ----------
    catalog, strategy, options
        The files, from `scan`, their layouts, and how they are resolved.
    refusal
        An error if the command does not accept the source, else None.
    files
        ``"full"``: read each file by itself, as one of full tensors.  ``"kept"``: read each by
        itself, whatever its tensors are slices of, since they stay in files of their own.
    sampled_bytes
        How much of a set is compared with its manifest; None for the default.
    replicas
        The option, or the command, that reads ranks which all hold the full model.
    evidence
        What was read of the files before, and is not read again.
    """

    catalog: Catalog
    strategy: Strategy | None = None
    options: ResolveOptions = ResolveOptions()
    refusal: CkptToolError | None = None
    files: Files = "joined"
    sampled_bytes: int | None = None
    replicas: str = "--replicated"
    evidence: Evidence | None = None


class Sight(Struct, frozen=True):
    """The result of `look`.

    Attributes
    ----------
    source
        The files, and how they were taken.
    catalog
        Its files, with what is left of those that are cut short.
    checkpoint
        The tensors; None if they cannot be resolved.
    contents
        Findings from the contents of the tensors.
    error
        What stopped a stage.
    found
        What is wrong or worth knowing, in order.
    of_files
        The same of whole files, by their checksums.
    listed
        Path to entry in a manifest, of the files that are as listed.
    misfits
        What of the strategy does not fit, if the other tensors are joined all the same.
    """

    source: Subject
    catalog: Catalog
    checkpoint: Checkpoint | None
    contents: Contents
    error: CkptToolError | None
    found: Diagnostics
    of_files: Diagnostics
    listed: Mapping[str, ListedOutput] = {}
    misfits: tuple[Diagnostic, ...] = ()

    @property
    def file_errors(self) -> list[CkptToolError]:
        """The errors of whole files, for callers that cannot go on with them."""
        errors = self.catalog.errors()
        return [*([PlanError(errors)] if errors else []), *self.of_files.failures]


def compare_replicas(
    checkpoint: Checkpoint, contents: Contents, executor: Executor, open_progress: OpenProgress
) -> Mapping[Reading, Sequence[Diagnostic]]:
    """Compare all replicas byte for byte, if the user wants that."""
    is_wanted = checkpoint.options.check_replicas and checkpoint.are_joined
    if not is_wanted or contents.is_refused:
        return {}
    from ckpttool.checks.replicas import replica_problems

    nbytes = sum(file.nbytes for file in checkpoint.catalog.files.values())
    with open_progress(nbytes, "comparing replicas") as on_progress:
        return {"contents": replica_problems(checkpoint.tensors, executor, on_progress)}


def look(
    source: Subject,
    found: Diagnostics,
    executor: Executor,
    *,
    contents: Depth = "all",
    crc: bool = False,
    find_needed: FindNeeded | None = None,
    read_more: ReadMore = compare_replicas,
    open_progress: OpenProgress = no_progress,
) -> Sight:
    """Look at a source for the command of ``found``, which gets all that is wrong with it.

    ``contents`` is how much of the contents is read, see `ckpttool.checkpoint.resolve`.
    ``find_needed`` returns the slices that are needed, if these are not all.  ``read_more`` reads
    what the command needs, once the tensors are resolved.
    """
    options, command = source.options, found.command
    is_whole = crc or options.tensors.are_all_wanted  # nothing of a cut file passes a checksum
    catalog = source.catalog if is_whole else source.catalog.with_remains()
    catalog = replace(catalog)  # what is computed of it ends with the sight
    listed: Mapping[str, ListedOutput] = {}
    # verify compares with the manifest and verifies checksums in ``read_more``, with all else.
    if options.manifest != "ignore" and command != "verify" and find_manifests(catalog):
        from ckpttool.checks.manifest_hashes import check_source

        listed = check_source(catalog, executor, found, source.sampled_bytes)
    if command in ("inspect", "verify"):
        catalog = limit_to_written_ranks(catalog, source.strategy)
    checkpoint, shown, error, misfits = None, Contents(), source.refusal, tuple[Diagnostic, ...]()
    try:
        if error is not None:
            raise error
        options = with_config(options, catalog.root)
        with open_progress(0, "sampling"):
            steps = partial(
                resolving,
                options=options,
                contents=contents,
                is_refused=partial(is_refused, command=command),
                files=_files_of(source, catalog, command),
                ways=(found.strategy_option, source.replicas),
                find_needed=find_needed,
            )
            asked = steps(catalog, source.strategy)
            checkpoint, shown = read_contents(asked, executor, source.evidence)
            if command == "inspect" and (misfits := checkpoint.misfits):  # the others are joined
                checkpoint, shown = read_contents(steps(catalog, checkpoint.strategy), executor)
        found.failures += _unread_files(checkpoint, shown, command)
        if not checkpoint.misfits and shown.unread is None:
            shown = replace(shown, read=read_more(checkpoint, shown, executor, open_progress))
    except CkptToolError as stopped:
        found.failures.append(stopped)
        error = stopped
    if checkpoint is not None:
        unsaid = _harmless() if command == "verify" and contents == "samples" else ()
        found.add(*run_checks(checkpoint, shown, command, unsaid, misfits))
    if checkpoint is not None and not (shown.is_incomplete or found.has_errors):
        try:
            checkpoint = _rearranged(checkpoint, found, executor)
        except CkptToolError as stopped:
            found.failures.append(stopped)
            checkpoint, error = None, stopped
    elif command in ("inspect", "verify") and options.tensors.are_changed:
        message = "what would be written is not examined"
        found.add(Diagnostic("doubt", message, facts="this checkpoint has errors"))
    of_files = Diagnostics(command)
    if command in ("convert", "diff") or (command == "inspect" and crc):
        _verify_checksums(catalog, of_files, executor, crc, open_progress)
    return Sight(source, catalog, checkpoint, shown, error, found, of_files, listed, misfits)


def with_config(
    options: ResolveOptions, *paths: str, config: Mapping[str, object] = {}
) -> ResolveOptions:
    """Return the options; a recipe without a configuration gets that beside a path, or this."""
    if (recipe := options.tensors.recipe) is None or recipe.config:
        return options
    from ckpttool.strategy_files.config_files import find_config, read_config

    if beside := next(filter(None, map(find_config, paths)), ""):
        config = read_config(beside)
    return replace(options, tensors=replace(options.tensors, recipe=replace(recipe, config=config)))


def _rearranged(checkpoint: Checkpoint, found: Diagnostics, executor: Executor) -> Checkpoint:
    """Return the checkpoint as a recipe makes it, if the user names one.

    Raises
    ------
    PlanError
        The recipe does not fit, or leaves out a copy that differs.
    """
    if (recipe := checkpoint.options.tensors.recipe) is None:
        return checkpoint
    from ckpttool.checkpoint.rearrange import rearrange
    from ckpttool.checks.replicas import find_differing_copies

    made, notes, copies = rearrange(checkpoint, recipe)
    if differing := [*find_differing_copies(copies, executor)]:
        raise PlanError(differing)
    found.add(*notes)
    return made


def _harmless() -> Collection[str]:
    """Return the codes that do not count for verify where only samples show them.

    Samples prove only what a conversion refuses, and what it reads otherwise than the strategy
    says.
    """
    harmless = {code for code, severity in severities("convert").items() if severity != "error"}
    return harmless - {"inferred", "hidden_shard"}


def _files_of(source: Subject, catalog: Catalog, command: Command) -> Files:
    """Return how files are taken: each by itself, if nothing says how they fit together.

    Only inspect and verify take them so.
    """
    is_examined = command in ("inspect", "verify")
    is_known = source.strategy is not None or source.options.replicated
    return "full" if is_examined and catalog.needs_strategy and not is_known else source.files


def read_contents(
    steps: Asking[Resolved], executor: Executor, evidence: Evidence | None = None
) -> Resolved:
    """Resolve a checkpoint, and find another step that is complete if something is missing.

    ``evidence`` has what was read before.
    """
    evidence = Evidence() if evidence is None else evidence
    checkpoint, contents = answer(steps, executor, evidence)
    step = _find_complete_step(checkpoint)
    return checkpoint, replace(contents, evidence=evidence, complete_step=step)


def _find_complete_step(checkpoint: Checkpoint) -> str:
    """Return another step that is complete, if something is missing here; "" for none."""
    catalog, strategy = checkpoint.catalog, checkpoint.strategy
    if not catalog.other_steps or checkpoint.misfits:
        return ""
    is_missing = bool(checkpoint.damage)
    if checkpoint.are_joined and catalog.missing_ranks:
        is_missing |= bool(checkpoint.presence.missing) or not strategy.layouts
    key = next((file.cipher.key for file in catalog.files.values() if file.cipher), None)
    for name, paths in catalog.other_steps.items() if is_missing else ():
        headers = read_indexes(paths.values(), key)
        are_right = all(isinstance(one, FileIndex) and one.nbytes for one in headers)
        if are_right and (not strategy.layouts or strategy.is_covered_by(paths)):
            return name
    return ""


def _unread_files(
    checkpoint: Checkpoint, contents: Contents, command: Command
) -> list[CkptToolError]:
    """Return the errors of files that cannot be read and that nothing replaces.

    verify has a check of these, since it goes on without them; inspect lists all that are damaged.
    """
    unread = [] if contents.unread is None else [contents.unread]
    if command in ("inspect", "verify"):
        return unread
    if checkpoint.misfits:
        return [*checkpoint.catalog.damaged.values()]
    step = contents.complete_step
    return [*unread, *(checkpoint.with_remedy(error, step) for error in checkpoint.damage)]


def _verify_checksums(
    catalog: Catalog,
    of_files: Diagnostics,
    executor: Executor,
    crc: bool,
    open_progress: OpenProgress,
) -> None:
    """Verify the tags of encrypted files, and checksums with ``crc``."""
    from ckpttool.storage.checksums import check_files

    files = catalog.files.values()
    is_read = crc or any(file.cipher is not None for file in files)
    nbytes = sum(file.nbytes for file in files)
    with (open_progress if is_read else no_progress)(nbytes, "verifying checksums") as on_progress:
        errors, notes = check_files(catalog, executor, crc, on_progress)
    of_files.failures += errors
    of_files.add(*notes)


def resolve(
    catalog: CheckpointFiles,
    strategy: StrategySource | None = None,
    options: ResolveOptions = ResolveOptions(),
    executor: Executor | None = None,
    diagnostics: Diagnostics | None = None,
    *,
    open_progress: OpenProgress = no_progress,
) -> Checkpoint:
    """Resolve a checkpoint to full tensors: shapes, layouts and owners of every parameter.

    Parameters
    ----------
    catalog
        The checkpoint: a path, or what `scan` returns.
    strategy
        Its strategy files, or what `read_strategy` returns; None for a checkpoint that holds full
        tensors or describes itself, and for replicated ranks.
    options
        Choices where the strategy does not decide.
    executor
        Reads contents; by default the caller's own thread.
    diagnostics
        Collects problems and notes; without it all problems are raised as one error.
    open_progress
        Shows the phases that read contents.

    Raises
    ------
    FormatError, PlanError
        The checkpoint needs a strategy and has none, or needs none and has one.

    Examples
    --------
    See "Python" in the guides (docs/guides/from-python.md).
    """
    found = Diagnostics(strict=options.strict) if diagnostics is None else diagnostics
    executor = executor or InlineExecutor()
    files, of_src, _ = load(Source.of(catalog, strategy))
    sight = look(Subject(files, of_src, options), found, executor, open_progress=open_progress)
    if sight.checkpoint is None and sight.error is not None:
        raise sight.error
    found.failures[:0] = sight.of_files.failures
    if diagnostics is None:
        found.raise_if_errors()
    assert sight.checkpoint is not None, "else there is an error"
    return sight.checkpoint
