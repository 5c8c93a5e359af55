"""Resolve a checkpoint to full tensors, from its catalog, a strategy and contents.

Headers have names and shapes, and the strategy has layouts.  Contents decide where these do not:
for parameters that are not in the strategy, and for optimizer shards that the strategy hides.
Contents also show whether the strategy belongs to these files.
"""

from __future__ import annotations

from collections.abc import Callable
from shlex import quote
from typing import TYPE_CHECKING, Literal, TypeAlias

from msgspec.structs import replace

from ckpttool.checkpoint.checkpoint import Checkpoint, Contents, NeededSlices, ResolveOptions
from ckpttool.checkpoint.contents import (
    EqualContents,
    compare_contents,
    compare_copies,
    find_counting,
    find_differing_ends,
    find_running_statistics,
    read_indexes_beside,
    read_weight_block,
    sample_states,
)
from ckpttool.checkpoint.evidence import Asking, UnreadEvidenceError
from ckpttool.checkpoint.from_manifest import (
    as_manifest_says,
    note_written_ranks,
    with_missing_ranks,
)
from ckpttool.checkpoint.interpret import Files, decided_by_contents, records_of_files
from ckpttool.checkpoint.presence import count_stages, quarantine_empty, with_lost_tensors
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

if TYPE_CHECKING:
    from ckpttool.checkpoint.scrambled_slices import ScrambledTensor

Depth = Literal["samples", "slices", "all"]  # how much of the contents is read
FindNeeded: TypeAlias = Callable[[Checkpoint], NeededSlices]
Resolved: TypeAlias = tuple[Checkpoint, Contents]


def resolving(
    catalog: Catalog,
    strategy: Strategy | None,
    options: ResolveOptions,
    *,
    contents: Depth,
    is_refused: Callable[[Checkpoint], bool],
    files: Files = "joined",
    ways: tuple[str, str] = ("-s", "--replicated"),
    find_needed: FindNeeded | None = None,
) -> Asking[Resolved]:
    """Resolve a checkpoint; `answer` answers its questions, with what was read of the files before.

    Parameters
    ----------
    catalog, strategy
        The files on disk, from `scan`, and their layouts, if they need some.
    options
        Choices where the strategy does not decide.
    contents
        How much of the contents to read.  ``"samples"``: some pages of all tensors.
        ``"slices"``: also every byte of slices that may hide an optimizer shard.  ``"all"``: also
        every byte of the parameters that are not in the strategy, as a conversion needs.
    is_refused
        Returns whether headers refuse the checkpoint, so that contents would only repeat it.
    files
        ``"full"``: read each file by itself, as one of full tensors.  ``"kept"``: read each by
        itself, whatever its tensors are slices of, since they stay in files of their own.
    ways
        What a message names: the option that takes a strategy, and what reads ranks which all
        hold the full model.
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
    if files == "joined":
        from ckpttool.checkpoint.fit_strategy import (
            fit_to_slices,  # late, since full tensors need none
        )

        strategy = yield from choose_strategy(catalog, strategy, options, *ways)
        strategy, misfits = fit_to_slices(catalog, strategy, options.tensors)
        checkpoint = Checkpoint(
            catalog=catalog, strategy=strategy, options=options, misfits=tuple(misfits)
        )
        if misfits:  # other problems would follow from these
            return checkpoint, Contents(is_refused=True)
        resolved = _resolve_ranks(checkpoint, contents, is_refused, find_needed)
    else:
        resolved = _resolve_files(catalog, options, files, contents == "samples", is_refused)
    checkpoint, shown = yield from resolved
    chosen = checkpoint.chosen
    return chosen, shown if chosen is checkpoint else shown.of_wanted(chosen.wanted)


def _resolve_files(
    catalog: Catalog,
    options: ResolveOptions,
    files: Files,
    by_samples: bool,
    is_refused: Callable[[Checkpoint], bool],
) -> Asking[Resolved]:
    """Resolve a checkpoint whose files are not joined."""
    catalog = quarantine_empty(catalog, None)
    strategy = Strategy.without_layouts(max((*catalog.files, *catalog.damaged), default=0) + 1)
    catalog = with_lost_tensors(catalog, strategy)
    if files == "kept" and options.manifest != "ignore":
        catalog = with_missing_ranks(catalog)
    checkpoint = Checkpoint(
        catalog=catalog,
        strategy=strategy,
        options=options,
        records=records_of_files(catalog, files),
        files=files,
    )
    try:
        checkpoint = yield from _with_numbers(checkpoint)
        copies = yield from compare_copies(catalog, by_samples)
        return checkpoint, Contents(is_refused=is_refused(checkpoint.chosen), copies=copies)
    except CkptToolError as error:
        return checkpoint, Contents(unread=error)


def _resolve_ranks(
    fitted: Checkpoint,
    depth: Depth,
    is_refused: Callable[[Checkpoint], bool],
    find_needed: FindNeeded | None,
) -> Asking[Resolved]:
    """Resolve the files of ranks, whose strategy fits their names and shapes."""
    from ckpttool.checkpoint.removed_shards import without_listed_shards

    options, as_read = fitted.options, fitted.strategy
    strategy = without_listed_shards(as_read) if options.optimizer_shard == 1 else as_read
    catalog = note_written_ranks(quarantine_empty(fitted.catalog, strategy), strategy)
    catalog = with_lost_tensors(catalog, strategy)
    checkpoint = Checkpoint(
        catalog=catalog,
        strategy=strategy,
        options=options,
        is_recorded=strategy.is_recorded and options.manifest != "ignore",
    )
    checkpoint = checkpoint.with_strategy(strategy, EqualContents()).limited(find_needed)
    checkpoint = yield from _with_numbers(checkpoint)
    names = {
        name: parameter
        for name, parameter in decided_by_contents(catalog, checkpoint.records).items()
        if parameter is not None or name in checkpoint.wanted
    }
    shown = Contents()
    while True:
        readable = {name: of for name, of in names.items() if name not in shown.no_evidence}
        try:
            if depth == "all":
                equal = yield from compare_contents(catalog, strategy, readable)
            else:
                equal = yield from sample_states(catalog, readable)
            checkpoint = checkpoint.with_strategy(strategy, equal).limited(find_needed)
            if is_refused(checkpoint.chosen):
                return checkpoint, replace(shown, is_refused=True)
            if options.trust_strategy:
                return checkpoint, shown
            by_samples = depth == "samples"
            return (yield from _check_layouts(checkpoint, shown, as_read, by_samples, find_needed))
        except UnreadEvidenceError as error:
            new, known = error.tensors, shown.no_evidence
            is_wanted = "" in new or not checkpoint.wanted.isdisjoint(new)
            if is_wanted or new.keys() <= known.keys():
                return checkpoint, replace(shown, unread=error)
            shown = replace(shown, no_evidence={**known, **new})
        except CkptToolError as error:
            return checkpoint, replace(shown, unread=error)


def _with_numbers(checkpoint: Checkpoint) -> Asking[Checkpoint]:
    catalog = checkpoint.catalog
    counting = yield from find_counting(catalog, *checkpoint.old_names)
    checkpoint = replace(checkpoint, counting=counting)
    if not any(meta.dtype in FLOAT8 for meta in checkpoint.metas.values()):
        return checkpoint
    block = yield from read_weight_block(catalog.root, checkpoint.belongings)
    return replace(checkpoint, weight_block=block)


def _check_layouts(
    checkpoint: Checkpoint,
    shown: Contents,
    as_read: Strategy,
    by_samples: bool,
    find_needed: FindNeeded | None,
) -> Asking[Resolved]:
    """Sample the slices, and correct a strategy where contents prove that it is wrong."""
    from ckpttool.checkpoint.hidden_shards import (
        ask_for_shard,
        has_proven_shard,
        infer_strategy,
        shown_by_unread_states,
    )
    from ckpttool.checkpoint.removed_shards import find_removed_shards
    from ckpttool.checkpoint.samples import has_own_values

    requested, strategy = checkpoint.options.optimizer_shard, checkpoint.strategy
    readable = [tensor for tensor in checkpoint.tensors if tensor.name not in shown.no_evidence]
    correction = None
    if requested == 1:
        correction = yield from find_removed_shards(as_read, readable, by_samples)
    indexes = yield from read_indexes_beside(checkpoint.catalog.root)
    shown = replace(shown, indexes=indexes)
    if correction is None:
        shown = yield from _sample(checkpoint, shown)
        replicas = (sampled.tensor for sampled in shown.sampled if sampled.differing_groups)
        is_suspect = bool(shown.differing_stages) or not all(map(has_own_values, replicas))
        is_suspect |= has_proven_shard(strategy, checkpoint.tensors)
        if shown.no_evidence and requested is None:
            tensors = checkpoint.tensors
            doubtful = tensors if is_suspect else shown_by_unread_states(checkpoint, shown)
            correction = ask_for_shard(checkpoint, shown, doubtful)
        elif is_suspect or requested is not None:
            correction = yield from infer_strategy(strategy, readable, requested, by_samples)
    if correction is None:
        return checkpoint, shown
    corrected = checkpoint.with_strategy(correction.strategy, checkpoint.equal).limited(find_needed)
    return corrected, (yield from _sample(corrected, replace(shown, correction=correction)))


def _sample(checkpoint: Checkpoint, shown: Contents) -> Asking[Contents]:
    """Sample the slices of all tensors whose layouts are decided."""
    from ckpttool.checkpoint.samples import sample_stages, sample_tensors, stage_pairs

    catalog, handwritten = checkpoint.catalog, checkpoint.strategy.handwritten
    undecided = {*shown.no_evidence, *(shown.correction.undecided if shown.correction else ())}
    decided = [tensor for tensor in checkpoint.tensors if tensor.name not in undecided]
    sampled = yield from sample_tensors(decided, handwritten)
    differing = yield from sample_stages(decided)
    copies = (copy for _, copy in stage_pairs(decided))
    replicated = [copy for copy in copies if copy.layout.replicas > copy.layout.optimizer_shard]
    sampled_copies = yield from sample_tensors(replicated, handwritten)
    scrambled: tuple[ScrambledTensor, ...] = ()
    if not checkpoint.is_recorded and any(
        file.format == "safetensors" for file in catalog.files.values()
    ):
        from ckpttool.checkpoint.scrambled_slices import find_scrambled

        scrambled = yield from find_scrambled(catalog, decided)
    return replace(
        shown,
        sampled=tuple(sampled),
        sampled_copies=tuple(sampled_copies),
        differing_stages=differing,
        scrambled=scrambled,
    )


def choose_strategy(
    catalog: Catalog,
    strategy: Strategy | None,
    options: ResolveOptions,
    option: str,
    replicas: str,
) -> Asking[Strategy]:
    """Return the strategy of the files of ranks, or raise why there is none; see `resolving`."""
    replicated = options.replicated
    if catalog.description is not None:
        files = catalog.description.files
        if strategy is not None or replicated:
            given = "--replicated" if strategy is None else option
            message = "the checkpoint describes itself, so no strategy applies"
            if strategy is None:
                message = "the checkpoint describes itself, so its ranks are not replicas"
            facts, hint = f"see {shorten(files, 2)}", f"the same command without {given}"
            problem = Diagnostic("strategy", message, hint=hint, facts=facts, where=catalog.root)
            raise PlanError([problem])
        return Strategy.without_layouts(max(catalog.files, default=0) + 1, files)
    if strategy is not None and replicated:
        message = f"--replicated and {option} exclude each other"
        facts = "with --replicated every rank holds the whole model"
        hint = f"the same command without --replicated, or without {option}"
        raise PlanError([Diagnostic("options", message, hint=hint, facts=facts)])
    if replicated:
        ranks, stages = len(catalog.files) + len(catalog.damaged), count_stages(catalog)
        whole = Strategy.without_layouts(ranks, stages=stages)
        message = (
            f"{stages} stages of {count(whole.stage_ranks, 'rank')}, by the names in the files"
        )
        note = Diagnostic("doubt", message, facts="every rank holds all of its stage")
        return replace(whole, notes=(note,) if stages > 1 else ())
    if strategy is None and (errors := catalog.errors()):
        raise PlanError(errors)  # a strategy would not help
    if strategy is None:
        raise one_file_error(catalog) or (yield from _without_strategy(catalog, option, replicas))
    if catalog.is_merged and (len(strategy.ranks) > 1 or catalog.documents):
        message = f"but {strategy.origin_is} for {count(len(strategy.ranks), 'rank')}"
        problem = Diagnostic(
            "strategy",
            f"already merged, {message}",
            hint=f"the same command without {option}, or ckpttool split {quote(catalog.root)} ...",
            where=catalog.root,
        )
        if evidence := catalog.one_of_several:
            message, hint = f"the file of one rank, {message}", "the folder of all ranks as SRC"
            problem = replace(problem, message=message, hint=hint, facts=evidence)
        raise PlanError([problem])
    return as_manifest_says(catalog, strategy, option, options.manifest == "ignore")


def one_file_error(catalog: Catalog) -> PlanError | None:
    """Return why a strategy does not help, of one rank's file or of a merged checkpoint."""
    message, hint = "already merged, and reshard reads the files of ranks", ""
    if catalog.one_of_several:
        message, hint = "the file of one rank of several", "the folder of all ranks as SRC, with -s"
    elif catalog.is_merged:
        hint = f"ckpttool split {quote(catalog.root)} -d STRATEGY -o DIR"
    facts, where = catalog.one_of_several, catalog.root
    problem = Diagnostic("strategy", message, hint=hint, facts=facts, where=where)
    return PlanError([problem]) if hint else None


def _without_strategy(catalog: Catalog, option: str, replicas: str) -> Asking[CkptToolError]:
    """Return the error of ranks without a strategy.

    It says what samples of the first and the last rank show, and which strategies lie near.
    """
    problem = yield from _compare_ends(catalog, option, replicas)
    for note in (note for note in catalog.diagnostics if note.code == "strategy_file"):
        facts = join_clauses(problem.facts, join_clauses(note.message, note.facts))
        hint = note.hint.replace("-s ", f"{option} ")
        problem = replace(problem, facts=facts)
        problem = replace(problem, hint=hint, options=()) if hint else problem
    damaged = catalog.damaged.values()  # the files may not be checkpoints at all
    missing = NoStrategyError([problem])
    return CombinedError((*damaged, missing)) if damaged else missing


def _compare_ends(catalog: Catalog, option: str, replicas: str) -> Asking[Diagnostic]:
    """Return the problem of ranks without a strategy, with what the first and the last one show.

    Slices of an even split differ between these two.  So do running statistics of replicas.
    """
    missing = f"no strategy for {count(len(catalog.files) + len(catalog.damaged), 'rank')}"
    problem = Diagnostic("no_strategy", missing, where=catalog.root)
    holders = {name: ranks for name, ranks in catalog.holders.items() if len(ranks) > 1}
    is_whole = len({*catalog.holders.values()}) == 1 or count_stages(catalog) > 1
    if catalog.damaged or not holders or not is_whole:
        facts = "A strategy file says how the slices of the ranks fit together."
        hint = f"{option} STRATEGY, or {replicas} if every rank holds the whole model"
        return replace(problem, facts=facts, hint=hint)
    differing = yield from find_differing_ends(catalog, holders)
    statistics = yield from find_running_statistics(catalog, Strategy.without_layouts(), differing)
    shown = [holders[name] for name in differing if name not in statistics]
    shown = shown or [holders[name] for name in differing or holders]
    ends = dict.fromkeys(f"{ranks[0]} and {ranks[-1]}" for ranks in shown)
    where = f"ranks {shorten(ends, 3)}, by samples"
    if number := len(differing) - len(statistics):
        facts = f"{count(number, 'tensor', 'differ')} between {where}"
        draft = f"`ckpttool strategy draft {quote(catalog.root)} -o draft.yaml`"
        hint = f"{draft} if you sharded by hand, or {option} STRATEGY"
        return replace(problem, facts=facts, hint=hint)
    if statistics:
        facts = f"only {count(len(statistics), 'running statistic', 'differ')} between {where}"
        hint = f"{replicas} --unlisted first, which compares all else"
        return replace(problem, facts=facts, hint=hint, options=("--unlisted",))
    facts = f"{count(len(holders), 'tensor', 'are')} equal on {where}"
    return replace(problem, facts=facts, hint=f"{replicas}, which compares all ranks")
