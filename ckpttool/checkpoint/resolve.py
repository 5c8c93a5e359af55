"""Resolve a checkpoint to full tensors: what lies on disk, a strategy and contents.

Headers have names and shapes, and the strategy has layouts.  Contents decide where these do not:
for parameters that are not in the strategy, and for optimizer shards that the strategy hides.
Contents also show whether the strategy belongs to these files.
"""

from __future__ import annotations

from collections.abc import Callable
from shlex import quote
from typing import Literal, TypeAlias

from msgspec.structs import replace

from ckpttool.checkpoint.checkpoint import Checkpoint, NeededSlices, ResolveOptions
from ckpttool.checkpoint.contents import (
    EqualContents,
    compare_contents,
    compare_copies,
    find_counting,
    read_indexes_beside,
    read_weight_block,
    sample_states,
)
from ckpttool.checkpoint.evidence import Asking, UnreadEvidenceError
from ckpttool.checkpoint.interpret import Files, decided_by_contents, records_of_files
from ckpttool.checkpoint.presence import know_lost, quarantine_all_empty, quarantine_empty
from ckpttool.checkpoint.recorded import (
    as_recorded,
    miss_listed_ranks,
    note_written_ranks,
)
from ckpttool.model.catalog import Catalog
from ckpttool.model.dtypes import FLOAT8
from ckpttool.model.strategy import Strategy
from ckpttool.problems import (
    CkptToolError,
    CombinedError,
    Diagnostic,
    NoStrategyError,
    PlanError,
    join_clauses,
)
from ckpttool.wording import count, shorten

Contents = Literal["samples", "slices", "all"]
FindNeeded: TypeAlias = Callable[[Checkpoint], NeededSlices]


def resolving(
    catalog: Catalog,
    strategy: Strategy | None,
    options: ResolveOptions,
    *,
    contents: Contents,
    is_refused: Callable[[Checkpoint], bool],
    files: Files = "joined",
    option: str = "-s",
    find_needed: FindNeeded | None = None,
) -> Asking[Checkpoint]:
    """Resolve a checkpoint; `answer` answers its questions, with what was read of the files before.

    Parameters
    ----------
    catalog
        The files on disk, from `scan`.
    strategy
        The layouts; None for a checkpoint that holds full tensors or describes itself, and for
        replicated ranks.
    options
        Choices where the strategy does not decide.
    contents
        How much of the contents to read.  ``"samples"``: some pages of all tensors.
        ``"slices"``: also every byte of slices that may hide an optimizer shard.  ``"all"``: also
        every byte of the parameters that are not in the strategy, as a conversion needs.
    is_refused
        Returns whether the headers refuse the checkpoint, so that its layouts are not checked
        against contents.
    files
        ``"full"``: read each file by itself, as one of full tensors.  ``"kept"``: read each by
        itself, whatever its tensors are slices of, since they stay in files of their own.
    option
        The option of the command line that takes the strategy, for messages.
    find_needed
        Returns the slices that are needed; None if all are.

    Raises
    ------
    FormatError, PlanError
        The checkpoint needs a strategy and has none, or needs none and has one.
    """
    # The caller keeps its catalog; what is computed of this one ends with the checkpoint.
    several = "" if options.replicated else catalog.one_of_several
    catalog = replace(catalog, one_of_several=several)
    if files == "joined" and strategy is None and catalog.is_merged:
        files = "full"
    if files != "joined":
        by_samples = contents == "samples"
        found = yield from _resolve_files(catalog, options, files, by_samples, is_refused)
        return found.chosen
    from ckpttool.checkpoint.fit import fit_to_slices  # late, since full tensors need none

    strategy = choose_strategy(catalog, strategy, options, option)
    strategy, misfits = fit_to_slices(catalog, strategy, options.tensors)
    if misfits:  # other problems would follow from these
        return Checkpoint(
            catalog=catalog, strategy=strategy, options=options, misfits=tuple(misfits)
        )
    found = yield from _resolve_ranks(catalog, strategy, options, contents, is_refused, find_needed)
    return found.chosen


def _resolve_files(
    catalog: Catalog,
    options: ResolveOptions,
    files: Files,
    by_samples: bool,
    is_refused: Callable[[Checkpoint], bool],
) -> Asking[Checkpoint]:
    """Resolve a checkpoint whose files are not joined."""
    catalog = quarantine_all_empty(catalog)
    strategy = Strategy.without_layouts(max((*catalog.files, *catalog.damaged), default=0) + 1)
    catalog = know_lost(catalog, strategy)
    if files == "kept" and options.manifest != "ignore":
        catalog = miss_listed_ranks(catalog)
    found = Checkpoint(
        catalog=catalog,
        strategy=strategy,
        options=options,
        records=records_of_files(catalog, files),
        files=files,
    )
    try:
        found = yield from _know_numbers(found)
        found = found.knowing(copies=(yield from compare_copies(catalog, by_samples)))
        return found.knowing(is_refused=is_refused(found.chosen))
    except CkptToolError as error:
        return found.knowing(unread=error)


def _resolve_ranks(
    catalog: Catalog,
    strategy: Strategy,
    options: ResolveOptions,
    contents: Contents,
    is_refused: Callable[[Checkpoint], bool],
    find_needed: FindNeeded | None,
) -> Asking[Checkpoint]:
    """Resolve the files of ranks; `answer` reads what is asked."""
    from ckpttool.checkpoint.joined_shards import without_listed_shards

    listed = strategy
    if options.optimizer_shard == 1:
        strategy = without_listed_shards(strategy)
    catalog = note_written_ranks(quarantine_empty(catalog, strategy), strategy)
    catalog = know_lost(catalog, strategy)
    found = Checkpoint(
        catalog=catalog,
        strategy=strategy,
        options=options,
        is_recorded=strategy.is_recorded,
    )
    found = found.with_strategy(strategy, EqualContents()).limited(find_needed)
    found = yield from _know_numbers(found)
    names = {
        name: parameter
        for name, parameter in decided_by_contents(catalog, found.records).items()
        if parameter is not None or name in found.wanted
    }
    while True:
        evident = {name: one for name, one in names.items() if name not in found.no_evidence}
        try:
            if contents == "all":
                equal = yield from compare_contents(catalog, strategy, evident)
            else:
                equal = yield from sample_states(catalog, evident)
            found = found.with_strategy(strategy, equal).limited(find_needed)
            found = found.knowing(is_refused=is_refused(found.chosen))
            if found.is_refused or options.trust_strategy:
                return found
            return (yield from _check_layouts(found, listed, contents == "samples", find_needed))
        except UnreadEvidenceError as error:
            new = error.tensors
            if (
                "" in new
                or not found.wanted.isdisjoint(new)
                or new.keys() <= found.no_evidence.keys()
            ):
                return found.knowing(unread=error)
            found = found.knowing(no_evidence={**found.no_evidence, **new})
        except CkptToolError as error:
            return found.knowing(unread=error)


def _know_numbers(found: Checkpoint) -> Asking[Checkpoint]:
    catalog = found.catalog
    found = found.knowing(counting=(yield from find_counting(catalog, *found.old_names)))
    if not any(meta.dtype in FLOAT8 for meta in found.metas.values()):
        return found
    block = yield from read_weight_block(catalog.root, found.belongings)
    return found.knowing(weight_block=block)


def _check_layouts(
    found: Checkpoint, listed: Strategy, by_samples: bool, find_needed: FindNeeded | None
) -> Asking[Checkpoint]:
    """Sample the slices, and correct a strategy where contents prove that it is wrong.

    ``listed`` is the strategy as it was read.
    """
    from ckpttool.checkpoint.hidden_shards import (
        ask_for_shard,
        has_proven_shard,
        infer_strategy,
        rest_on_states,
    )
    from ckpttool.checkpoint.joined_shards import find_joined_shards

    requested = found.options.optimizer_shard
    correction = None
    if requested == 1:
        correction = yield from find_joined_shards(listed, found.evident, by_samples)
    found = found.knowing(indexes=(yield from read_indexes_beside(found.catalog.root)))
    if correction is None:
        found = yield from _sample(found)
        is_suspect = found.has_differing_replicas or has_proven_shard(found.strategy, found.tensors)
        if found.no_evidence and requested is None:
            doubtful = found.tensors if is_suspect else rest_on_states(found)
            correction = ask_for_shard(found, doubtful)
        elif is_suspect or requested is not None:
            correction = yield from infer_strategy(
                *(found.strategy, found.evident, requested, by_samples)
            )
    if correction is None:
        return found
    found = found.with_strategy(correction.strategy, found.contents).limited(find_needed)
    return (yield from _sample(found.knowing(correction=correction)))


def _sample(found: Checkpoint) -> Asking[Checkpoint]:
    """Sample the slices of all tensors whose layouts are decided."""
    from ckpttool.checkpoint.samples import sample_stages, sample_tensors, stage_pairs

    undecided = () if found.correction is None else found.correction.undecided
    decided = [one for one in found.evident if one.name not in undecided]
    sampled = yield from sample_tensors(decided, found.strategy.handwritten)
    differing = yield from sample_stages(decided)
    others = (other for _, other in stage_pairs(decided))
    replicated = [one for one in others if one.layout.replicas > one.layout.optimizer_shard]
    copies = yield from sample_tensors(replicated, found.strategy.handwritten)
    found = found.knowing(
        sampled=tuple(sampled), sampled_copies=tuple(copies), differing_stages=differing
    )
    is_ours = found.is_recorded and found.options.manifest != "ignore"
    if is_ours or all(one.format != "safetensors" for one in found.catalog.files.values()):
        return found
    from ckpttool.checkpoint.scrambled_slices import find_scrambled

    return found.knowing(scrambled=(yield from find_scrambled(found.catalog, decided)))


def choose_strategy(
    catalog: Catalog, strategy: Strategy | None, options: ResolveOptions, option: str
) -> Strategy:
    """Return the strategy of the files of ranks, without layouts if they need none.

    ``option`` takes the strategy.

    Raises
    ------
    PlanError
        The source needs a strategy and has none, or needs none and has one.
    """
    replicated = options.replicated
    if catalog.description is not None:
        files = catalog.description.files
        if strategy is not None or replicated:
            given = "--replicated" if strategy is None else option
            text = "the checkpoint describes itself, so no strategy applies"
            if strategy is None:
                text = "the checkpoint describes itself, so its ranks are not replicas"
            facts, hint = f"see {shorten(files, 2)}", f"the same command without {given}"
            raise PlanError(
                [Diagnostic("strategy", text, hint=hint, facts=facts, where=catalog.root)]
            )
        return Strategy.without_layouts(max(catalog.files, default=0) + 1, files)
    if strategy is None and replicated:
        return Strategy.without_layouts(len(catalog.files) + len(catalog.damaged))
    if strategy is None and (errors := catalog.errors()):
        raise PlanError(errors)  # a strategy would not help
    if strategy is None:
        raise no_strategy_error(
            catalog, f"{option} STRATEGY, or --replicated if every rank holds the whole model"
        )
    if catalog.is_merged and (len(strategy.ranks) > 1 or catalog.documents):
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
    return as_recorded(catalog, strategy, option, options.manifest == "ignore")


def no_strategy_error(catalog: Catalog, hint: str) -> CkptToolError:
    """Return the error of a source without a strategy: of ranks, or merged and given to reshard."""
    ranks = count(len(catalog.files) + len(catalog.damaged), "rank")
    facts = "A strategy file says how the slices of the ranks fit together."
    for note in catalog.diagnostics:
        if note.code == "strategy_file" and note.path is not None:
            facts = join_clauses(note.message, note.facts)
            hint = hint.replace("STRATEGY", quote(note.path))
        elif note.code == "strategy_file":
            facts = join_clauses(note.message, note.facts)
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
