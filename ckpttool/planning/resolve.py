"""Resolve a catalog and its strategy to full tensors.

Headers have names and shapes, and the strategy has layouts.  Contents decide where these do not:
for parameters that are not in the strategy, and for optimizer shards that the strategy hides.
Contents also show whether the strategy belongs to these files.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from shlex import quote
from typing import Literal, get_args

from ckpttool.checkpoint.evidence import Asking, Evidence, answer, ask
from ckpttool.concurrency import InlineExecutor, OpenProgress, no_progress
from ckpttool.discovery.sharded_files import scan_indexed
from ckpttool.formats.local import is_file
from ckpttool.formats.weight_index import MAP_NAME
from ckpttool.model.catalog import Catalog
from ckpttool.model.names import parse_name
from ckpttool.model.slicing import Source
from ckpttool.model.strategy import Merged, Replicated, SelfDescribed, Sharding, Strategy
from ckpttool.model.tensors import StoredTensor, TensorMeta
from ckpttool.planning.fit import fit_to_slices
from ckpttool.planning.hidden_shards import (
    has_proven_shard,
    infer_strategy,
)
from ckpttool.planning.joined_shards import find_joined_shards, without_listed_shards
from ckpttool.planning.missing import (
    note_written_ranks,
    propose_stages,
    quarantine_damaged,
    scan_notes,
)
from ckpttool.planning.optimizer_state import contradiction
from ckpttool.planning.replicas import REPLICA_CODES, compare_copies, replica_problems
from ckpttool.planning.sources import (
    ContentGroups,
    Sources,
    content_decided_names,
    find_sources,
)
from ckpttool.planning.strategy_check import (
    check_strategy,
    strategy_notes,
)
from ckpttool.planning.unlisted import (
    RankGroups,
    UnlistedChoice,
    find_contradictions,
    find_statistic_candidates,
)
from ckpttool.problems import (
    CkptToolError,
    CombinedError,
    Command,
    Diagnostic,
    Diagnostics,
    FormatError,
    NoStrategyError,
    PlanError,
    join_clauses,
)
from ckpttool.storage.sampling import Sample, digest, find_least, sample
from ckpttool.wording import count, shorten

Contents = Literal["samples", "slices", "all"]


@dataclass(frozen=True, slots=True)
class ResolveOptions:
    """Options that decide how a checkpoint is resolved to full tensors.

    Attributes
    ----------
    replicated
        Every rank holds full tensors.  A single file is a full checkpoint, whatever its name.
    unlisted
        How to take parameters that are not in the strategy and differ between ranks.  ``"rank"``
        gives target rank ``r`` the value of source rank ``r`` modulo the number of source ranks.
        ``"first"`` gives all ranks the value of the lowest rank.  ``"drop"`` leaves them out.  None
        makes them a problem.
    trust_strategy
        Skip the samples that show whether the strategy belongs to these files.
    optimizer_shard
        The hidden optimizer shard of tensors whose contents do not decide it.  It is a problem if
        contents show another.  1 is for none, also where the strategy lists one.
    check_replicas
        Compare all replicas byte for byte; any difference is a problem.
    strict
        Make every warning a problem.
    manifest
        How to compare the files with the manifest of their set.  ``"samples"``: sizes, headers and
        some hashes.  ``"all"``: all hashes (verify).  ``"ignore"``: not at all.

    Examples
    --------
    >>> ResolveOptions(unlisted="first").strict
    False
    """

    replicated: bool = False
    unlisted: UnlistedChoice | None = None
    trust_strategy: bool = False
    optimizer_shard: int | None = None
    check_replicas: bool = False
    strict: bool = False
    manifest: Literal["samples", "all", "ignore"] = "samples"

    def __post_init__(self) -> None:
        if self.unlisted not in (None, *get_args(UnlistedChoice)):
            raise ValueError(
                f"unlisted={self.unlisted!r}, expected one of {get_args(UnlistedChoice)}"
            )
        if self.optimizer_shard is not None and self.optimizer_shard < 1:
            raise ValueError(f"optimizer_shard={self.optimizer_shard}, expected 1 or more")


@dataclass(frozen=True, slots=True)
class ResolvedSources:
    """The full tensors of a checkpoint, with their layouts and owners.

    Attributes
    ----------
    catalog
        The files on disk; empty files that should hold tensors are among the damaged ones.
    sharding
        How tensors are spread over the files, as contents correct it.
    sources
        The full tensors, in the order of the files.
    is_deduplicated
        Whether only one rank of each replica group has its slice on disk.
    content_diagnostics
        Diagnostics of the contents.  They are separate because merge and verify may replace those
        of replicas with the result of a full comparison.
    evidence
        What was read of the contents.
    """

    catalog: Catalog
    sharding: Sharding
    sources: tuple[Source, ...] = ()
    is_deduplicated: bool = False
    content_diagnostics: tuple[Diagnostic, ...] = ()
    evidence: Evidence = field(default_factory=Evidence, repr=False, compare=False)


def resolve(
    catalog: Catalog,
    strategy: Strategy | Merged | None = None,
    options: ResolveOptions = ResolveOptions(),
    executor: Executor | None = None,
    diagnostics: Diagnostics | None = None,
    *,
    contents: Contents = "all",
    keep_going: bool = False,
    open_progress: OpenProgress = no_progress,
) -> ResolvedSources:
    """Resolve a checkpoint to full tensors: shapes, layouts and owners of every parameter.

    merge, split, reshard, diff, verify and inspect all use it.

    Parameters
    ----------
    catalog
        The files on disk, from `scan`.
    strategy
        The layouts; None for a checkpoint that holds full tensors or describes itself, and for
        replicated ranks.  `Merged` reads each file separately, whatever the kind of the catalog.
    options
        Choices where the strategy does not decide.
    executor
        Reads contents; by default the caller's own thread.
    diagnostics
        Collects problems and notes; without it all problems are raised as one error.
    contents
        How much of the contents to read.  ``"samples"``: some pages of all tensors.
        ``"slices"``: also every byte of slices that may hide an optimizer shard.  ``"all"``: also
        every byte of the parameters that are not in the strategy, as a conversion needs.
    keep_going
        Read contents even if headers show problems.
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
    sharding = source_sharding(catalog, strategy, options.replicated, found.strategy_option)
    if options.replicated:
        catalog = replace(catalog, one_of_several="")
    executor = executor or InlineExecutor()
    resolved = _resolve(
        catalog, sharding, options, contents, keep_going, executor, found, open_progress
    )
    if diagnostics is None:
        found.add(*resolved.content_diagnostics)
        found.raise_if_errors()
    return resolved


def _resolve(
    catalog: Catalog,
    sharding: Sharding,
    options: ResolveOptions,
    contents: Contents,
    keep_going: bool,
    executor: Executor,
    diagnostics: Diagnostics,
    open_progress: OpenProgress,
) -> ResolvedSources:
    """Resolve a checkpoint; ``sharding`` may still have rules."""
    if isinstance(sharding, Strategy):
        sharding, reasons = fit_to_slices(catalog, sharding)
        if reasons:  # other problems would follow from these
            diagnostics.failures += catalog.damaged.values()
            diagnostics.add(*reasons)
            return ResolvedSources(catalog, sharding)
        if not sharding.layouts:  # a hand-written strategy without sharded parameters
            sharding = Replicated(sharding.ranks, sharding.files, sharding.notes)
    listed = sharding
    if options.optimizer_shard == 1 and isinstance(sharding, Strategy):
        sharding = without_listed_shards(sharding)
    catalog = note_written_ranks(quarantine_damaged(catalog, sharding), sharding)
    diagnostics.add(*scan_notes(catalog, sharding), *sharding.notes)
    of_contents = Diagnostics(diagnostics.command)
    evidence = Evidence()
    content_groups: ContentGroups = {}
    running: frozenset[str] = frozenset()

    def find(sharding: Sharding) -> Sources:
        return find_sources(catalog, sharding, content_groups, options.unlisted, running)

    sources: Sources | None = None
    replicas: list[Diagnostic] = []
    compares_replicas = False
    try:
        with open_progress(0, "sampling"):
            if contents == "all":
                groups = compare_contents(catalog, sharding, of_contents)
                content_groups = answer(groups, executor, evidence)
                differing = [name for name, groups in content_groups.items() if len(groups) > 1]
                statistics = find_running_statistics(catalog, sharding, differing)
                running = answer(statistics, executor, evidence)
            else:
                content_groups = answer(sample_states(catalog, sharding), executor, evidence)
            sources = find(sharding)
            by_samples = contents == "samples"
            diagnostics.add(*compare_copies(catalog, executor, diagnostics.command, by_samples))
            problem = _optimizer_shard_problem(sharding, options)
            if problem is not None:
                of_contents.add(problem)
            elif not _would_repeat(sources, keep_going):
                correction = correct_strategy(
                    find, sources, catalog, listed, options, by_samples, of_contents
                )
                sharding, sources = answer(correction, executor, evidence)
                compares_replicas = options.check_replicas and not isinstance(sharding, Merged)
        if compares_replicas:
            nbytes = sum(file.nbytes for file in catalog.files.values())
            with open_progress(nbytes, "comparing replicas") as on_progress:
                replicas = replica_problems(catalog, sharding, sources.found, executor, on_progress)
    except CkptToolError as error:
        diagnostics.failures.append(error)
        sources = sources or find(sharding)
    damage, problems = _propose_step(catalog, sources, diagnostics.command)
    diagnostics.failures += damage
    diagnostics.add(*propose_stages(catalog, sharding, problems), *sources.notes)
    # Samples and the comparison may find the same replicas.
    shown = [one for one in of_contents if not replicas or one.code not in REPLICA_CODES]
    if (steps := catalog.steps_of_other_runs) is not None:
        shown = [_propose_other_run(one, steps) for one in shown]
    found = [*shown, *replicas]
    return ResolvedSources(
        catalog,
        sharding,
        tuple(sources.found),
        sources.is_deduplicated,
        tuple(found),
        evidence,
    )


def _propose_step(
    catalog: Catalog, sources: Sources, command: Command
) -> tuple[list[FormatError], list[Diagnostic]]:
    """Return damage and problems; the hint of those that follow from lost files is another step.

    Inspect and verify report damaged files themselves.
    """
    damage, problems = list(sources.damage), list(sources.problems)
    is_missing = any(one.code == "missing" for one in problems)
    step = ""
    if damage or (is_missing and catalog.missing_ranks):
        step = catalog.find_complete_step()
    if step:
        hint = f"--step {step}, which is complete by its headers"
        if command not in ("inspect", "verify"):
            damage = [error.with_hint(hint) for error in damage]
        problems = [replace(one, hint=hint) if one.code == "missing" else one for one in problems]
    return damage, problems


def _propose_other_run(one: Diagnostic, steps: Sequence[str]) -> Diagnostic:
    """Return a diagnostic of contents that proposes the files of another run in the folder.

    Options that overrule contents would hide that files and strategy are of two runs.
    """
    if not {"--trust-strategy", "--optimizer-shard"}.intersection(one.options):
        return one
    hint = f"--step {steps[0]}, of another run" if steps else "`ckpttool help mixed_runs`"
    return replace(one, hint=hint, options=())


def _would_repeat(sources: Sources, keep_going: bool) -> bool:
    """Return whether contents would repeat the problems of the headers."""
    if keep_going:
        return any(one.code == "strategy" for one in sources.problems)
    return bool(sources.problems or sources.damage)


def source_sharding(
    catalog: Catalog, strategy: Strategy | Merged | None, replicated: bool, option: str
) -> Sharding:
    """Return the sharding of a source: its strategy, or one of the kinds that need none.

    With ``replicated`` every rank holds full tensors, and a single file is a full checkpoint.
    ``option`` takes the strategy.

    Raises
    ------
    PlanError
        The source needs a strategy and has none, or needs none and has one.
    """
    if isinstance(strategy, Merged):
        return strategy
    if catalog.description is not None:
        files = catalog.description.files
        if strategy is not None or replicated:
            given = "--replicated" if strategy is None else option
            text = f"the checkpoint describes itself, so {given} does not apply"
            facts, hint = f"see {shorten(files, 2)}", f"the same command without {given}"
            raise PlanError(
                [Diagnostic("strategy", text, hint=hint, facts=facts, where=catalog.root)]
            )
        return SelfDescribed(range(max(catalog.files, default=0) + 1), files)
    is_merged = catalog.is_merged
    if strategy is None and is_merged:
        return Merged()
    if strategy is None and replicated:
        return Replicated(range(len(catalog.files) + len(catalog.damaged)))
    if strategy is None and (errors := catalog.errors()):
        raise PlanError(errors)  # a strategy would not help
    if strategy is None:
        raise no_strategy_error(
            catalog, f"{option} STRATEGY, or --replicated if every rank holds the whole model"
        )
    if is_merged and (len(strategy.ranks) > 1 or catalog.documents):
        text = f"but {strategy.origin_is} for {count(len(strategy.ranks), 'rank')}"
        problem = Diagnostic(
            "strategy",
            f"already merged, {text}",
            hint=f"the same command without {option}, or ckpttool split {quote(catalog.root)} ...",
            where=catalog.root,
        )
        if evidence := catalog.one_of_several:
            message, hint = f"the file of one rank, {text}", "the folder of all ranks as SRC"
            problem = replace(problem, message=message, hint=hint, facts=evidence)
        raise PlanError([problem])
    return replace(strategy, notes=(*strategy.notes, *strategy_notes(catalog, strategy)))


def no_strategy_error(catalog: Catalog, hint: str) -> CkptToolError:
    """Return the error of a source without a strategy: of ranks, or merged and given to reshard."""
    ranks = count(len(catalog.files) + len(catalog.damaged), "rank")
    facts = "A strategy file says how the slices of the ranks fit together."
    for note in catalog.diagnostics:
        if note.code == "strategy_file" and note.path is not None:
            facts = join_clauses(note.message, note.facts)
            hint = hint.replace("STRATEGY", quote(note.path))
    text = f"no strategy for {ranks}"
    problem = Diagnostic("no_strategy", text, hint=hint, facts=facts, where=catalog.root)
    if catalog.one_of_several:
        text, hint = "the file of one rank of several", "the folder of all ranks as SRC, with -s"
        facts = catalog.one_of_several
        problem = Diagnostic("strategy", text, hint=hint, facts=facts, where=catalog.root)
    elif catalog.is_merged:
        text = "already merged, and reshard reads the files of ranks"
        hint = f"ckpttool split {quote(catalog.root)} -d STRATEGY -o DIR"
        problem = Diagnostic("strategy", text, hint=hint, where=catalog.root)
    missing = (NoStrategyError if problem.code == "no_strategy" else PlanError)([problem])
    damaged = catalog.damaged.values()  # the files may not be checkpoints at all
    return CombinedError((*damaged, missing)) if damaged else missing


def compare_contents(
    catalog: Catalog, sharding: Sharding, diagnostics: Diagnostics
) -> Asking[ContentGroups]:
    """Group the ranks by equal contents, for every parameter that contents decide.

    A note names parameters whose elements are all equal, since slices of these look like full
    tensors.
    """
    compared = content_decided_names(catalog, sharding)
    groups = yield from _group_ranks(catalog, compared, digest)
    metas = catalog.metas
    constant = [
        name
        for name, contents in groups.items()
        if _is_constant(metas[name], contents)
        and parse_name(name).map is None  # statuses often are
    ]
    for name in constant:
        if compared[name] is not None:  # a state at the start of training: its shape decides
            del groups[name]
    constant = [name for name in constant if name in groups]
    if constant and isinstance(sharding, Strategy):
        number = count(len(constant), "parameter")
        text = f"{number} not in the strategy, with equal elements on all ranks: read in full"
        hint = "a hand-written strategy if they are slices; `ckpttool help doubt` explains"
        diagnostics.add(Diagnostic("doubt", text, hint=hint, facts=shorten(constant, 3)))
    return {
        name: tuple(tuple(ranks) for ranks in by_content.values())
        for name, by_content in groups.items()
    }


def sample_states(catalog: Catalog, sharding: Sharding) -> Asking[ContentGroups]:
    """Group the ranks by equal samples, for tensors named and shaped like optimizer state.

    Samples distinguish state from replicated parameters; see `find_sources`.
    """
    compared = content_decided_names(catalog, sharding)
    names = [name for name, follows in compared.items() if follows is not None]
    metas = catalog.metas
    groups = yield from _group_ranks(catalog, names, sample)
    return {
        name: tuple(map(tuple, contents.values()))
        for name, contents in groups.items()
        if not _is_constant(metas[name], contents)
    }


def sample_ranks(
    catalog: Catalog, names: Iterable[str]
) -> Asking[dict[str, tuple[RankGroups, bool]]]:
    """Return the ranks grouped by equal samples of each tensor, and whether it is one value.

    Slices of one value are equal even if they are of different elements.  Equal bytes of different
    shapes or element types are not equal tensors.
    """
    found = {}
    sampled = yield from _group_ranks(catalog, names, sample)
    for name, contents in sampled.items():
        metas = catalog.metas_of(name)
        groups: dict[object, list[int]] = defaultdict(list)
        for one, ranks in contents.items():
            for rank in ranks:
                groups[one, metas[rank]].append(rank)
        is_constant = len(groups) == 1 and _is_constant(catalog.metas[name], contents)
        found[name] = tuple(map(tuple, groups.values())), is_constant
    return found


def find_differing_ends(
    catalog: Catalog, names: Iterable[str]
) -> Asking[dict[str, tuple[int, int]]]:
    """Return the tensors whose samples differ between the first and the last rank that hold them.

    Slices of an even split differ between these two, whatever the layout is.
    """
    ends = {name: (min(held), max(held)) for name in names if (held := catalog.holders[name])}
    tensors = {
        name: tuple(catalog.files[rank].tensors[name] for rank in ranks)
        for name, ranks in ends.items()
    }
    samples = yield from ask(sample, chain.from_iterable(tensors.values()))
    return {name: ends[name] for name, (a, b) in tensors.items() if samples[a] != samples[b]}


def _group_ranks(
    catalog: Catalog, names: Iterable[str], read: Callable[[StoredTensor], Sample]
) -> Asking[dict[str, dict[Sample, list[int]]]]:
    """Return name to sample to the ranks that have it."""
    tensors = {name: dict(catalog.tensors_of(name)) for name in names}
    contents = yield from ask(read, chain.from_iterable(one.values() for one in tensors.values()))
    groups: dict[str, dict[Sample, list[int]]] = defaultdict(dict)
    for name, held in tensors.items():
        for rank, tensor in held.items():
            groups[name].setdefault(contents[tensor], []).append(rank)
    return groups


def find_running_statistics(
    catalog: Catalog, sharding: Sharding, names: Collection[str]
) -> Asking[frozenset[str]]:
    """Return the ``names`` that are running statistics by name, shape and values.

    Their numbers are finite on every rank, and variances are not negative.
    """
    least = find_statistic_candidates(catalog.metas, sharding) if names else {}
    tensors = {name: [*catalog.tensors_of(name).values()] for name in names if name in least}
    found = yield from ask(find_least, chain.from_iterable(tensors.values()))
    return frozenset(
        name for name, held in tensors.items() if all(found[one] >= least[name] for one in held)
    )


def _is_constant(meta: TensorMeta, contents: Collection[Sample]) -> bool:
    """Return whether several elements are all equal, on all ranks."""
    are_equal = len(contents) == 1 and next(iter(contents)).is_constant
    return are_equal and meta.nbytes > meta.itemsize


def correct_strategy(
    find: Callable[[Sharding], Sources],
    sources: Sources,
    catalog: Catalog,
    sharding: Sharding,
    options: ResolveOptions,
    by_samples: bool,
    diagnostics: Diagnostics,
) -> Asking[tuple[Sharding, Sources]]:
    """Correct a strategy where contents prove that it is wrong, and find the sources with it.

    Parameters
    ----------
    find
        Returns the sources for a sharding.
    sources
        The sources for ``sharding``, without listed optimizer shards if the user says so; their
        contents are read.
    catalog, sharding
        The files on disk, and the layouts as they were read.
    options
        Whether to trust the strategy, and which optimizer shard the user requests.
    by_samples
        Whether samples are enough to infer an optimizer shard.
    diagnostics
        Collects the contradictions between strategy and contents.
    """
    if isinstance(sharding, Merged):
        return sharding, sources
    if options.trust_strategy:
        text = "replicas were not compared (--trust-strategy); those of the lowest rank are read"
        diagnostics.add(Diagnostic("doubt", text))
        return sharding, sources
    joined = None
    if options.optimizer_shard == 1 and isinstance(sharding, Strategy):
        joined = yield from find_joined_shards(sharding, sources.found, by_samples)
    if joined is not None:
        sharding, sources = joined.strategy, find(joined.strategy)
        sources = replace(sources, problems=[*map(_propose_files, sources.problems)])
        if any(note.code == "inferred" for note in joined.notes):
            sources = replace(sources, notes=[*map(_doubt_replicas, sources.notes)])
    of_index = yield from _check_index(catalog, sharding, sources)
    diagnostics.add(*find_contradictions(catalog, sharding), *of_index)
    found: list[Diagnostic] = []
    inferred = joined
    if inferred is None:
        found = yield from check_strategy(catalog, sharding, sources.found)
    if inferred is None and isinstance(sharding, Strategy):
        is_suspect = any(one.code == "replica" for one in found)
        is_suspect = is_suspect or has_proven_shard(sharding, sources.found)
        if is_suspect or options.optimizer_shard is not None:
            requested = options.optimizer_shard
            inferred = yield from infer_strategy(sharding, sources.found, requested, by_samples)
    if inferred is not None:
        sharding = inferred.strategy
        diagnostics.add(*inferred.problems, *inferred.notes)
        sources = sources if joined else find(sharding)
        others = [one for one in sources.found if one.meta.name not in inferred.undecided]
        found = yield from check_strategy(catalog, sharding, others)
    diagnostics.add(*found)
    return sharding, sources


def _propose_files(one: Diagnostic) -> Diagnostic:
    """Return a problem that does not propose joined optimizer shards, which the user did."""
    if "--optimizer-shard" not in one.options:
        return one
    return replace(one, hint="restore the files, or --step for another step", options=())


def _doubt_replicas(note: Diagnostic) -> Diagnostic:
    """Return a note that slices are read from replicas, which nothing but the user shows."""
    if note.code not in ("missing_replica", "damaged_replica"):
        return note
    return replace(note, facts=f"{note.facts}, if optimizer shards were joined")


def _check_index(
    catalog: Catalog, sharding: Sharding, sources: Sources
) -> Asking[list[Diagnostic]]:
    """Compare full shapes with the index in the source's folder or its parent, if there is one.

    MindSpore's ``unified_safetensors`` writes such an index with its full tensors.
    """
    root = Path(catalog.root).absolute()
    indexes = yield from ask(_read_index, (str(at / MAP_NAME) for at in (root, root.parent)))
    found = []
    for path, full in indexes.items():
        if isinstance(full, Exception):
            text = "full shapes were not compared with this index"
            found.append(Diagnostic("not_compared", text, facts=str(full), where=path))
            continue
        different = [
            f"{meta.name} {meta.shape}, in the index {full[meta.name].shape}"
            for meta in (source.meta for source in sources.found)
            if meta.name in full and meta.shape != full[meta.name].shape
        ]
        if different:
            text = f"the strategy makes other full shapes than {path} lists"
            problem = contradiction(sharding, text, shorten(different, 3))
            found.append(replace(problem, path=path))
    return found


def _read_index(path: str) -> Mapping[str, TensorMeta] | CkptToolError | OSError:
    """Return the tensors of an index, none if it is not there; runs on a worker."""
    if not is_file(path):
        return {}
    try:
        merged = scan_indexed(path)
    except (CkptToolError, OSError) as error:
        return error
    return {} if merged is None else merged.metas


def _optimizer_shard_problem(sharding: Sharding, options: ResolveOptions) -> Diagnostic | None:
    """Return a problem if ``options.optimizer_shard`` cannot apply to the source; else None."""
    shard = options.optimizer_shard
    if shard is None:
        return None
    where = f"--optimizer-shard {shard}"
    if not isinstance(sharding, Strategy):
        text, hint = "it corrects a strategy, and none is read", f"the same command without {where}"
    elif options.trust_strategy:
        text, hint = "--trust-strategy excludes it", "the same command with one of the two"
    else:
        return None
    return Diagnostic("options", text, hint=hint, where=where)
