"""The one way from files to sources: a catalog and its strategy become full tensors.

Headers tell names and shapes, the strategy tells layouts.  Contents decide where these do not: for
parameters that are not in the strategy, and for optimizer shards that the strategy hides.  They
also show whether the strategy belongs to these files.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from ckpttool.concurrency import InlineExecutor, wait_result
from ckpttool.discovery.sharded_files import scan_indexed
from ckpttool.errors import CkptToolError, CombinedError, PlanError
from ckpttool.formats.weight_index import MAP_NAME
from ckpttool.model.catalog import Catalog, MergedCatalog, SelfDescribedCatalog
from ckpttool.model.diagnostics import Diagnostic, Diagnostics
from ckpttool.model.slicing import Source
from ckpttool.model.strategy import Merged, Replicated, SelfDescribed, Sharding, Strategy
from ckpttool.model.tensors import StoredTensor, TensorMeta, map_of
from ckpttool.model.wording import count, shorten
from ckpttool.planning.hidden_shards import find_shards, show_shard
from ckpttool.planning.missing import notes_of_scan, quarantine_damaged
from ckpttool.planning.sources import (
    Agreement,
    Sources,
    content_decided_names,
    find_sources,
)
from ckpttool.planning.strategy_check import (
    SKIPS_CHECK,
    check_strategy,
    note_written_ranks,
    strategy_notes,
)
from ckpttool.planning.unlisted import Unlisted, find_contradictions, find_statistics
from ckpttool.storage.sampling import Sample, digest, find_least, sample

Contents = Literal["headers", "samples", "slices", "all"]


@dataclass(frozen=True, slots=True)
class ResolveOptions:
    """How a checkpoint is resolved to full tensors.

    Attributes
    ----------
    replicated
        Every rank holds everything.  A file that looks like one rank's of several is a full
        checkpoint.
    unlisted
        What to do with parameters that are not in the strategy and differ between ranks: target
        rank ``r`` takes that of source rank ``r`` modulo the number of source ranks (``"rank"``),
        all take the lowest rank's (``"first"``), or none does (``"drop"``).  None makes them a
        problem.
    trust_strategy
        Skip the samples that show whether the strategy belongs to these files.
    optimizer_shard
        The optimizer shard of tensors whose contents do not tell it, where the strategy hides it;
        1 for none.  It is a problem if contents show another.
    check_replicas
        Compare all replicas byte for byte; any difference is a problem.
    strict
        Make every warning a problem.
    contents
        How far the contents of the files are read where they decide.  ``"headers"``: some pages of
        optimizer states; the strategy is checked against headers.  ``"samples"``: some pages of
        all tensors.  ``"slices"``: some pages, and all of slices that may hide an optimizer shard.
        ``"all"``: also all of the parameters that are not in the strategy.
    keep_going
        Read contents even if headers show problems.

    Examples
    --------
    >>> ResolveOptions(unlisted="first").strict
    False
    """

    replicated: bool = False
    unlisted: Unlisted | None = None
    trust_strategy: bool = False
    optimizer_shard: int | None = None
    check_replicas: bool = False
    strict: bool = False
    contents: Contents = "all"
    keep_going: bool = False


@dataclass(frozen=True, slots=True)
class ResolvedSources:
    """The full tensors of a checkpoint, with their layouts and owners.

    Attributes
    ----------
    catalog
        What is on disk; empty files that should hold something are among the damaged ones.
    sharding
        How its tensors are spread over the files; layouts as contents correct them.
    sources
        The full tensors, in the order of the files.
    is_deduplicated
        Whether of ranks with equal slices only one has each slice.
    doubts
        What contents show that headers do not.  The command decides how grave a contradiction
        between contents and strategy is.
    """

    catalog: Catalog
    sharding: Sharding
    sources: tuple[Source, ...] = ()
    is_deduplicated: bool = False
    doubts: Diagnostics = field(default_factory=Diagnostics)


def resolve(
    catalog: Catalog,
    strategy: Strategy | Merged | None = None,
    options: ResolveOptions = ResolveOptions(),
    executor: Executor | None = None,
    diagnostics: Diagnostics | None = None,
) -> ResolvedSources:
    """Resolve a checkpoint to full tensors: shapes, layouts and owners of every parameter.

    It is the only way from files to sources, for merge, split, reshard, diff, verify and inspect.

    Parameters
    ----------
    catalog
        What is on disk, from `scan`.
    strategy
        Its layouts; None for a checkpoint that holds full tensors or describes itself, and for
        replicated ranks.  `Merged` takes each file by itself, whatever the catalog looks like.
    options
        What decides where the strategy does not, and how far contents are read.
    executor
        Reads contents; by default the caller's own thread.
    diagnostics
        Gets what is wrong and what people should know; without it everything that is wrong is
        raised.

    Raises
    ------
    FormatError, PlanError
        There is no strategy, or there must be none.

    Examples
    --------
    See "From Python" in the README.
    """
    found = Diagnostics() if diagnostics is None else diagnostics
    sharding = source_sharding(catalog, strategy, options.replicated)
    if options.replicated:
        catalog = replace(catalog, one_of_several="")
    resolved = _resolve(catalog, sharding, options, executor or InlineExecutor(), found)
    if diagnostics is None:
        found.extend(resolved.doubts)
        found.raise_if_errors()
    return resolved


def _resolve(
    catalog: Catalog,
    sharding: Sharding,
    options: ResolveOptions,
    executor: Executor,
    diagnostics: Diagnostics,
) -> ResolvedSources:
    """Resolve a checkpoint whose kind of sharding is known."""
    if isinstance(sharding, Strategy):
        sharding, reasons = sharding.resolve(catalog.metas)
        if reasons:  # what else is wrong would follow from them
            diagnostics.failures += catalog.damaged.values()
            diagnostics.add(*Diagnostic.each("strategy", reasons))
            return ResolvedSources(catalog, sharding)
        if not sharding.layouts:  # a person wrote that nothing is sharded
            sharding = Replicated(sharding.ranks, sharding.files, sharding.notes)
    catalog = note_written_ranks(quarantine_damaged(catalog, sharding), sharding)
    diagnostics.add(*notes_of_scan(catalog, sharding), *sharding.notes)
    doubts = Diagnostics(diagnostics.command)
    agreement: Agreement = {}
    running: frozenset[str] = frozenset()

    def find(sharding: Sharding) -> Sources:
        return find_sources(catalog, sharding, agreement, options.unlisted, running)

    sources: Sources | None = None
    try:
        if options.contents == "all":
            agreement = compare_contents(catalog, sharding, executor, doubts)
            differing = [name for name, groups in agreement.items() if len(groups) > 1]
            running = find_running(catalog, sharding, differing, executor)
        else:
            agreement = sample_states(catalog, sharding, executor)
        sources = find(sharding)
        problem = shard_problem(sharding, options)
        if problem is not None:
            doubts.add(Diagnostic("options", problem))
        elif options.contents == "headers":
            doubts.add(*find_contradictions(catalog, sharding))
        elif options.keep_going or not sources.problems:  # contents could follow from problems
            sharding, sources = correct_strategy(
                find, sources, catalog, sharding, executor, options, doubts
            )
    except CkptToolError as error:
        diagnostics.failures.append(error)
        sources = sources or find(sharding)
    diagnostics.failures += sources.damage
    diagnostics.add(*sources.problems, *sources.notes)
    found = tuple(sources.found)
    return ResolvedSources(catalog, sharding, found, sources.is_deduplicated, doubts)


def source_sharding(
    catalog: Catalog, strategy: Strategy | Merged | None, replicated: bool
) -> Sharding:
    """Return how a source is sharded: as its strategy says, or in one of three other ways.

    If ``replicated`` every rank holds everything, and a single file is a full checkpoint, whatever
    its name and place say.

    Raises
    ------
    PlanError
        There is no strategy, or a source that needs none has one.
    """
    if isinstance(strategy, Merged):
        return strategy
    if isinstance(catalog, SelfDescribedCatalog):
        files = catalog.description.files
        if strategy is not None or replicated:
            given = "--replicated" if strategy is None else f"-s {strategy.origin}"
            reason = f"describes itself ({shorten(files, 2)}); leave {given} away"
            raise PlanError([Diagnostic("strategy", f"{catalog.root}: {reason}")])
        return SelfDescribed(range(max(catalog.files, default=0) + 1), files)
    is_merged = isinstance(catalog, MergedCatalog)
    if strategy is None and is_merged:
        return Merged()
    if strategy is None and replicated:
        return Replicated(range(len(catalog.files) + len(catalog.damaged)))
    if strategy is None:
        other = "or say --replicated if every rank holds everything (data parallel, or "
        raise no_strategy(catalog, f"{other}integrated_save=True)")
    if (refusal := _on_index(catalog)) is not None:
        raise refusal
    if is_merged and len(strategy.ranks) > 1:
        reason = f"one undivided file, and {strategy.origin} is for {len(strategy.ranks)} ranks; "
        reason += "leave -s away (split cuts such a file), or name the folder with the files of all"
        raise PlanError([Diagnostic("strategy", f"{catalog.root}: {reason} ranks")])
    return replace(strategy, notes=(*strategy.notes, *strategy_notes(catalog, strategy)))


def no_strategy(catalog: Catalog, other: str) -> CkptToolError:
    """Return the error that a source has no strategy; ``other`` is what else can be done."""
    if (refusal := _on_index(catalog)) is not None:
        return refusal
    ranks = count(len(catalog.files) + len(catalog.damaged), "rank")
    text = f"{catalog.root}: {ranks} and no strategy: nothing says how their tensors fit "
    text += "together; give the strategy file of the training run (-s STRATEGY)"
    seen = [note.text for note in catalog.diagnostics if note.code == "strategy_file"]
    text = "; ".join([f"{text}, {other}" if other else text, *seen])
    missing = PlanError([Diagnostic("strategy", text)])
    damaged = catalog.damaged.values()  # tells perhaps that these are no checkpoints at all
    return CombinedError((*damaged, missing)) if damaged else missing


def _on_index(catalog: Catalog) -> PlanError | None:
    """Return the error of a merged checkpoint with an index where a strategy is expected."""
    if not isinstance(catalog, MergedCatalog) or not catalog.indexes:
        return None
    reason = f"holds everything undivided, as {catalog.indexes[0]} says, so it is merged "
    reason += "without a source strategy (-s, --replicated), and cut with split"
    return PlanError([Diagnostic("strategy", f"{catalog.root}: {reason}")])


def compare_contents(
    catalog: Catalog, sharding: Sharding, executor: Executor, doubts: Diagnostics
) -> Agreement:
    """Group the ranks by equal content, for every parameter of which the contents decide.

    A note is added on parameters whose contents tell nothing: one rank's slice may look like all.
    """
    compared = content_decided_names(catalog, sharding)
    groups = _group_ranks(catalog, compared, digest, executor)
    metas = catalog.metas
    mute = [
        name
        for name, found in groups.items()
        if _is_mute(metas[name], found) and map_of(name) is None  # its statuses often are
    ]
    for name in mute:
        if compared[name] is not None:  # as states are when training begins: the shape decides
            del groups[name]
    mute = [name for name in mute if name in groups]
    if mute and isinstance(sharding, Strategy):
        text = "not in the strategy, and all elements of all ranks are the same; taken for whole, "
        text += f"if they are slices say so in a strategy by hand (-s MORE.yaml): {shorten(mute)}"
        doubts.add(Diagnostic("doubt", text))
    return {
        name: tuple(tuple(ranks) for ranks in by_content.values())
        for name, by_content in groups.items()
    }


def sample_states(catalog: Catalog, sharding: Sharding, executor: Executor) -> Agreement:
    """Group the ranks by equal samples, for what may be optimizer state by name and shape.

    Samples tell state from parameters that are replicated; see `find_sources`.
    """
    compared = content_decided_names(catalog, sharding)
    names = [name for name, follows in compared.items() if follows is not None]
    metas = catalog.metas
    return {
        name: tuple(map(tuple, found.values()))
        for name, found in _group_ranks(catalog, names, sample, executor).items()
        if not _is_mute(metas[name], found)
    }


def _group_ranks(
    catalog: Catalog,
    names: Iterable[str],
    read: Callable[[StoredTensor], Sample],
    executor: Executor,
) -> dict[str, dict[Sample, list[int]]]:
    """Return for each name the ranks with equal samples, by sample."""
    futures = {
        (name, rank): executor.submit(read, file.tensors[name])
        for name in names
        for rank, file in catalog.files.items()
        if name in file.header
    }
    groups: dict[str, dict[Sample, list[int]]] = defaultdict(dict)
    for (name, rank), future in futures.items():
        groups[name].setdefault(wait_result(future), []).append(rank)
    return groups


def find_running(
    catalog: Catalog, sharding: Sharding, names: Collection[str], executor: Executor
) -> frozenset[str]:
    """Return those of ``names`` that are running statistics by name, shape and values.

    On every rank all numbers are finite, and no variance is negative.
    """
    least = find_statistics(catalog.metas, sharding) if names else {}
    futures = {
        name: [
            executor.submit(find_least, file.tensors[name])
            for file in catalog.files.values()
            if name in file.header
        ]
        for name in names
        if name in least
    }
    return frozenset(
        name
        for name, of_ranks in futures.items()
        if all(wait_result(one) >= least[name] for one in of_ranks)
    )


def _is_mute(meta: TensorMeta, contents: Collection[Sample]) -> bool:
    is_constant = len(contents) == 1 and next(iter(contents)).is_constant
    return is_constant and meta.nbytes > meta.itemsize


def correct_strategy(
    find: Callable[[Sharding], Sources],
    sources: Sources,
    catalog: Catalog,
    sharding: Sharding,
    executor: Executor,
    options: ResolveOptions,
    doubts: Diagnostics,
) -> tuple[Sharding, Sources]:
    """Correct a strategy where contents prove that it is wrong, and find the sources with it.

    Parameters
    ----------
    find
        Finds the sources with a strategy.
    sources
        Those with the strategy as it was read; contents of them are read.
    catalog, sharding
        What is on disk, and the layouts as they were read.
    executor
        Does the reading.
    options
        How far the strategy is trusted, and whether some pages are enough.
    doubts
        Gets the contradictions between strategy and contents.
    """
    if isinstance(sharding, Merged):
        return sharding, sources
    if options.trust_strategy:
        text = "--trust-strategy: contents were not looked at; where replicas differ, the lowest "
        doubts.add(Diagnostic("doubt", f"{text}rank's are taken"))
        return sharding, sources
    doubts.add(*find_contradictions(catalog, sharding), *_compare_index_beside(catalog, sources))
    found = check_strategy(catalog, sharding, sources.found, executor)
    shards = None
    if isinstance(sharding, Strategy):
        is_suspect = any(doubt.code == "replica" for doubt in found)
        is_suspect = is_suspect or show_shard(sharding, sources.found)
        if is_suspect or options.optimizer_shard is not None:
            by_samples = options.contents == "samples"
            shards = find_shards(
                *(sharding, sources.found, executor, options.optimizer_shard), by_samples
            )
    if shards is not None:
        sharding = shards.strategy
        doubts.add(*shards.problems, *shards.notes)
        sources = find(sharding)
        others = [one for one in sources.found if one.meta.name not in shards.names]
        found = check_strategy(catalog, sharding, others, executor)
    doubts.add(*found)
    return sharding, sources


def _compare_index_beside(catalog: Catalog, sources: Sources) -> Iterator[Diagnostic]:
    """Yield what contradicts the full tensors of an index in the source's folder or its parent.

    MindSpore's ``unified_safetensors`` leaves such an index with the full tensors it names.
    """
    root = Path(catalog.root).absolute()
    for path in (folder / MAP_NAME for folder in (root, root.parent)):
        if not path.is_file():
            continue
        try:
            known = scan_indexed(str(path))
        except (CkptToolError, OSError) as error:
            text = f"full shapes were not compared with the index beside the source: {error}"
            yield Diagnostic("not_compared", text)
            continue
        full = {} if known is None else known.metas
        odd = [
            f"{meta.name} {meta.shape}, there {full[meta.name].shape}"
            for meta in (source.meta for source in sources.found)
            if meta.name in full and meta.shape != full[meta.name].shape
        ]
        if odd:
            yield Diagnostic(
                "contradicted",
                f"the strategy makes other full shapes than {path} lists: {shorten(odd, 3)}; is it "
                "the strategy of this run?",
                *SKIPS_CHECK,
            )


def shard_problem(sharding: Sharding, options: ResolveOptions) -> str | None:
    """Return why an optimizer shard cannot be given; None if it can be."""
    shard = options.optimizer_shard
    if shard is None or (shard == 1 and isinstance(sharding, Strategy)):
        return None
    if not isinstance(sharding, Strategy):
        text = "it decides what a strategy leaves open, and none is read here; leave it away"
        return f"--optimizer-shard {shard}: {text}"
    if options.trust_strategy:
        text = "it corrects the strategy, which --trust-strategy believes; leave one of them away"
        return f"--optimizer-shard {shard}: {text}"
    return None
