"""The sources of a checkpoint as far as they are trusted: headers, held against contents."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

from ckpttool.concurrency import wait_result
from ckpttool.discovery.sharded_files import scan_indexed
from ckpttool.errors import CkptToolError, CombinedError, PlanError
from ckpttool.formats.weight_index import MAP_NAME
from ckpttool.model.catalog import Catalog, MergedCatalog, SelfDescribedCatalog
from ckpttool.model.diagnostics import Finding, Note
from ckpttool.model.strategy import Strategy
from ckpttool.model.tensors import StoredTensor, TensorMeta, map_of
from ckpttool.model.wording import count, shorten
from ckpttool.planning.hidden_shards import find_shards, show_shard
from ckpttool.planning.missing import set_aside
from ckpttool.planning.sources import (
    Agreement,
    Sources,
    find_sources,
    names_to_compare,
    undivided_sources,
)
from ckpttool.planning.strategy_check import find_doubts, note_asked, strategy_notes
from ckpttool.planning.unlisted import Unlisted, find_contradictions, find_statistics
from ckpttool.storage.sampling import Sample, digest, find_least, sample

BUFFER_BYTES = 4 << 20  # held by each worker while contents are compared


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


class Trust(NamedTuple):
    """How far the source strategy is believed where the contents contradict it.

    ``by_samples`` says that a look is all that is wanted: what is found is told, not relied on.
    """

    blindly: bool = False
    optimizer_shard: int | None = None
    by_samples: bool = False


def source_layouts(
    catalog: Catalog, strategy: Strategy | None, other: str = "", replicated: bool = False
) -> Strategy:
    """The layouts of the source: those that are given, none for one that describes itself.

    Parameters
    ----------
    catalog, strategy
        The source, and what was given for its layouts.
    other
        What else can be done where there are none, for the message.
    replicated
        Whether it was said that every rank holds everything.

    Raises
    ------
    PlanError
        There are none, or a source that needs none was given some.
    """
    if isinstance(catalog, SelfDescribedCatalog):
        files = catalog.description.files
        if strategy is not None or replicated:
            given = "--replicated" if strategy is None else f"-s {strategy.origin}"
            reason = f"describes itself ({shorten(files, 2)}); leave {given} away"
            raise PlanError([f"{catalog.root}: {reason}"])
        return Strategy({}, 1, max(catalog.files, default=0) + 1, files)
    is_merged = isinstance(catalog, MergedCatalog)
    if isinstance(catalog, MergedCatalog) and catalog.indexes:
        reason = f"holds everything undivided, as {catalog.indexes[0]} says, so it is merged "
        reason += "without a source strategy (-s, --replicated), and cut with split"
        raise PlanError([f"{catalog.root}: {reason}"])
    if strategy is not None and is_merged and len(strategy.ranks) > 1:
        reason = f"one undivided file, and {strategy.origin} is for {len(strategy.ranks)} ranks; "
        reason += "leave -s away (split cuts such a file), or name the folder with the files of all"
        raise PlanError([f"{catalog.root}: {reason} ranks"])
    if strategy is None:
        ranks = count(len(catalog.files) + len(catalog.damaged), "rank")
        text = f"{catalog.root}: {ranks} and no strategy: nothing says how their tensors fit "
        text += "together; give the strategy file of the training run (-s STRATEGY)"
        seen = [note.text for note in catalog.notes if note.kind == "strategy"]
        asked = PlanError(["; ".join([f"{text}, {other}" if other else text, *seen])])
        damaged = catalog.damaged.values()  # tells perhaps that these are no checkpoints at all
        raise CombinedError((*damaged, asked)) if damaged else asked
    return replace(strategy, notes=(*strategy.notes, *strategy_notes(catalog, strategy)))


def known_strategy(
    catalog: Catalog, strategy: Strategy | None, replicated: bool
) -> Strategy | None:
    """The layouts of a source as `source_layouts`; None for a file that holds all undivided.

    ``replicated`` says that every rank holds everything: a strategy without layouts, and one file
    is a full checkpoint, whatever its name and place say (`ckpttool.planning.sources`).
    """
    if isinstance(catalog, MergedCatalog) and strategy is None:
        return None
    if replicated and not isinstance(catalog, SelfDescribedCatalog):
        strategy = strategy or Strategy({}, 1, len(catalog.files) + len(catalog.damaged))
    other = "or say --replicated if every rank holds everything (data parallel, or "
    other += "integrated_save=True)"
    return source_layouts(catalog, strategy, other, replicated)


def gather_sources(
    catalog: Catalog,
    strategy: Strategy | None,
    executor: Executor,
    *,
    unlisted: Unlisted | None,
    trust: Trust,
) -> Sources:
    """The sources of a checkpoint, with everything that is wrong with them or in doubt.

    Parameters
    ----------
    catalog, strategy
        What is on disk, and its layouts; None if it is one file that holds everything undivided.
    executor
        Compares contents where they decide.
    unlisted
        See `find_sources`.
    trust
        How far the strategy is believed.

    Raises
    ------
    PlanError
        A strategy by hand does not fit the names of the checkpoint.
    """
    if strategy is None:
        catalog = set_aside(catalog, None)
        sources = undivided_sources(catalog, "drop" if unlisted == "drop" else "first")
        why = why_no_shard(None, trust)
        sources.problems += [] if why is None else [Finding("strategy", why)]
        return sources
    strategy, reasons = strategy.resolve(catalog.metas)
    if reasons:
        raise PlanError(reasons)
    catalog = note_asked(set_aside(catalog, strategy), strategy)
    notes = [*strategy.notes]
    agreement = compare_contents(catalog, strategy, executor, notes)
    differing = (name for name, groups in agreement.items() if len(groups) > 1)
    running = find_running(catalog, strategy, differing, executor)

    def find(strategy: Strategy) -> Sources:
        return find_sources(catalog, strategy, agreement, unlisted, running)

    settled = settle(find, find(strategy), catalog, strategy, executor, trust)
    sources = settled.sources
    sources.problems += settled.problems
    sources.notes[:0] = [*notes, *settled.notes]
    return sources


def compare_contents(
    catalog: Catalog, strategy: Strategy, executor: Executor, notes: list[Note]
) -> Agreement:
    """Ranks grouped by equal content, for every parameter of which the contents decide.

    A note is added on those of which contents tell nothing: one rank's slice may look like all.
    """
    compared = names_to_compare(catalog, strategy)
    read = partial(digest, buffer_bytes=BUFFER_BYTES)
    groups = _group_ranks(catalog, compared, read, executor)
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
    if mute and strategy.layouts:
        text = "not in the strategy, and all elements of all ranks are the same; taken for whole, "
        text += f"if they are slices say so in a strategy by hand (-s MORE.yaml): {shorten(mute)}"
        notes.append(Note("doubt", text))
    return {
        name: tuple(tuple(ranks) for ranks in by_content.values())
        for name, by_content in groups.items()
    }


def sample_states(catalog: Catalog, strategy: Strategy, executor: Executor) -> Agreement:
    """Ranks grouped by equal samples, for what names and shapes show to be state.

    It is what a command that only looks needs to know of contents, to tell state from parameters
    that are whole; see `find_sources`.
    """
    compared = names_to_compare(catalog, strategy)
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
    """For each name the ranks of which the same is read."""
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
    catalog: Catalog, strategy: Strategy, names: Iterable[str], executor: Executor
) -> frozenset[str]:
    """Return those of ``names`` that are running statistics by name, shape and values.

    On every rank all numbers are finite, and no variance is negative.
    """
    least = find_statistics(catalog.metas, strategy)
    futures = {
        name: [
            executor.submit(find_least, file.tensors[name], BUFFER_BYTES)
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


@dataclass(frozen=True, slots=True)
class Settled:
    """What `settle` made of a strategy, and what contents say against it.

    Attributes
    ----------
    strategy
        As contents correct it.
    sources
        With these layouts.
    problems
        Contradictions between strategy and contents that nothing settles.
    notes
        What else is to be known.
    """

    strategy: Strategy
    sources: Sources
    problems: list[Finding]
    notes: list[Note]


def settle(
    find: Callable[[Strategy], Sources],
    sources: Sources,
    catalog: Catalog,
    strategy: Strategy,
    executor: Executor,
    trust: Trust,
) -> Settled:
    """The sources that a strategy makes, corrected where contents prove that it is wrong.

    Parameters
    ----------
    find
        Finds the sources with a strategy.
    sources
        Those with the strategy as it was read; contents of them are read.
    catalog, strategy
        What is on disk, and the layouts as they were read.
    executor
        Does the reading.
    trust
        How far the strategy is believed.
    """
    contradiction = why_no_shard(strategy, trust)
    if contradiction is not None or trust.blindly:
        if contradiction is not None:
            return Settled(strategy, sources, [Finding("strategy", contradiction)], [])
        text = "--trust-strategy: contents were not looked at; where replicas differ, the lowest "
        return Settled(strategy, sources, [], [Note("doubt", f"{text}rank's are taken")])
    contradictions = [
        *find_contradictions(catalog, strategy),
        *_compare_index_beside(catalog, sources),
    ]
    listed = [one for one in contradictions if one.severity == "error"]
    warned = [
        Note("doubt", one.text, is_warning=True)
        for one in contradictions
        if one.severity == "warning"
    ]
    doubts, doubtful = find_doubts(catalog, strategy, sources.found, executor)
    shards = None
    is_suspect = any(doubt.kind == "replica" for doubt in doubts)
    is_suspect = is_suspect or show_shard(strategy, sources.found)
    if (is_suspect or trust.optimizer_shard is not None) and strategy.layouts:
        shards = find_shards(
            *(strategy, sources.found, executor, trust.optimizer_shard), trust.by_samples
        )
    if shards is None:
        return Settled(strategy, sources, [*listed, *doubts], [*warned, *doubtful])
    problems = [Finding("strategy", problem) for problem in shards.problems]
    sources = find(shards.strategy)  # look again, with the strategy corrected
    others = [one for one in sources.found if one.meta.name not in shards.names]
    doubts, doubtful = find_doubts(catalog, shards.strategy, others, executor)
    problems = [*listed, *problems, *doubts]
    return Settled(shards.strategy, sources, problems, [*warned, *shards.notes, *doubtful])


def _compare_index_beside(catalog: Catalog, sources: Sources) -> Iterator[Finding]:
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
            yield Finding("strategy", text, "warning")
            continue
        full = {} if known is None else known.metas
        odd = [
            f"{meta.name} {meta.shape}, there {full[meta.name].shape}"
            for meta in (source.meta for source in sources.found)
            if meta.name in full and meta.shape != full[meta.name].shape
        ]
        if odd:
            yield Finding(
                "strategy",
                f"the strategy makes other full shapes than {path} lists: {shorten(odd, 3)}; is it "
                "the strategy of this run? --trust-strategy skips this check",
            )


def told_by_a_look(settled: Settled) -> Settled:
    """The same for a command that only looks, and has not the options that messages advise."""
    return replace(
        settled,
        problems=[replace(one, text=_name_owners(one.text)) for one in settled.problems],
        notes=[replace(one, text=_name_owners(one.text)) for one in settled.notes],
    )


def _name_owners(text: str) -> str:
    named = [option for option in ("--trust-strategy", "--optimizer-shard") if option in text]
    if not named or "merge and reshard" in text:
        return text
    return f"{text} (merge and reshard have {' and '.join(named)})"


def why_no_shard(strategy: Strategy | None, trust: Trust) -> str | None:
    """Why an optimizer shard cannot be decided on the command line, or None if it can be."""
    shard = trust.optimizer_shard
    if shard is None or (shard == 1 and strategy is not None and strategy.layouts):
        return None
    if strategy is None or not strategy.layouts:
        text = "it decides what a strategy leaves open, and none is read here; leave it away"
        return f"--optimizer-shard {shard}: {text}"
    if trust.blindly:
        text = "it corrects the strategy, which --trust-strategy believes; leave one of them away"
        return f"--optimizer-shard {shard}: {text}"
    return None
