"""Files and slices that are not there, and what is read in their place."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from itertools import chain
from shlex import quote

from msgspec.structs import replace

from ckpttool.checkpoint.checkpoint import Checkpoint, Contents
from ckpttool.checkpoint.optimizer_state import FIND_FITTING, OF_THE_RUN
from ckpttool.checkpoint.presence import (
    REDUNDANCY_KEY,
    PartlyHeld,
    count_stages,
    has_redundancy_mark,
    hold_other_names,
)
from ckpttool.model.belonging import LEAST_COUNT, WEIGHT, Belonging, owners_of
from ckpttool.model.catalog import Catalog
from ckpttool.model.dtypes import CASTABLE, DTYPES, FLOAT8, WORDS_OF_CASTS
from ckpttool.model.joining import format_names
from ckpttool.model.names import parse_name
from ckpttool.model.patterns import Pattern, covering_patterns
from ckpttool.model.renames import rename_notes, rename_problems
from ckpttool.model.slicing import BrokenTensor, find_pieces, holdings
from ckpttool.model.strategy import Strategy
from ckpttool.model.tensors import TensorMeta
from ckpttool.problems import Diagnostic, FormatError, join_clauses, join_first
from ckpttool.wording import count, format_bytes, format_numbers, format_ranks, shorten

_NO_FILE = "no checkpoint file found in"
_ADAPTER = "*lora*"  # in the names of MindSpore's mindpet, of MindNLP and of PEFT
_MOST_PATTERNS = 16  # in a hint


def check_scan(checkpoint: Checkpoint) -> Iterator[Diagnostic]:
    """Yield what the scan of the files noted."""
    catalog = checkpoint.catalog
    errors = catalog.errors()
    for note in catalog.diagnostics:
        if note.code != "missing_rank" and note not in errors:
            yield note


def check_missing_files(checkpoint: Checkpoint) -> Iterator[Diagnostic]:
    """Yield ranks without a file that should have one; a strategy would say what they held."""
    catalog = checkpoint.catalog
    for note in catalog.diagnostics:
        ranks = tuple(filter(catalog.is_expected, note.ranks))
        if note.code == "missing_rank" and ranks:
            message = f"{format_ranks(ranks)}: {_NO_FILE} {catalog.root}"
            yield replace(note, message=message, ranks=ranks)


def check_kept_files(checkpoint: Checkpoint) -> Iterator[Diagnostic]:
    """Yield the problem of ranks without a file, if every file is written again by itself."""
    there = format_numbers(checkpoint.catalog.files, separator=",")
    for problem in check_missing_files(checkpoint):
        hint = f"the folder with all ranks as SRC, or --rank {there} for those that are there"
        yield replace(problem, code="missing", hint=hint)


def check_ranks(checkpoint: Checkpoint, contents: Contents) -> Iterator[Diagnostic]:
    """Yield the problems of files that are not those of the strategy, or not all of them."""
    catalog, strategy = checkpoint.catalog, checkpoint.strategy
    if catalog.description is not None:
        yield from catalog.description.problems
    elif strategy.layouts:
        yield from _check_names(checkpoint)
    elif checkpoint.is_deduplicated:
        yield from _missing_rank_problems(checkpoint)
    else:
        yield from _incomplete_replica_problems(checkpoint, contents)


def _check_names(checkpoint: Checkpoint) -> Iterator[Diagnostic]:
    """Yield the problems of a strategy that belongs to another checkpoint."""
    catalog, strategy = checkpoint.catalog, checkpoint.strategy
    ranks = sorted({*catalog.files, *catalog.damaged})
    if extra := tuple(rank for rank in ranks if rank not in strategy.ranks):
        yield _extra_ranks_problem(checkpoint, ranks, extra)
    holders = checkpoint.whole.catalog.holders
    if holders and not any(name in strategy.layouts for name in holders):
        message = f"no parameter in common with {catalog.root}"
        hint = OF_THE_RUN
        facts = f"the strategy lists {format_names(strategy.layouts, 2)}; "
        facts += f"the files hold {format_names(holders, 2)}"
        yield Diagnostic("strategy", message, hint=hint, facts=facts, where=strategy.origin)


def _extra_ranks_problem(
    checkpoint: Checkpoint, ranks: Sequence[int], extra: tuple[int, ...]
) -> Diagnostic:
    """Return the problem of ranks outside of the strategy."""
    catalog, strategy = checkpoint.catalog, checkpoint.strategy
    message = f"{format_ranks(extra)} {'is' if len(extra) == 1 else 'are'} not in the strategy"
    facts = [f"found {format_ranks(ranks)}"]
    facts += [f"{strategy.origin_is} for {format_ranks(strategy.ranks)}"]
    where = catalog.root
    if extra[1:] and ranks[-1] == len(ranks) - 1:
        message, facts, where = _miscount(strategy, catalog), [], strategy.origin
    facts += [note.fact for note in strategy.notes if note.code == "strategy_file"]
    everyone = f"all {ranks[-1] + 1} ranks ({FIND_FITTING})"
    hint = f"the strategy of all {ranks[-1] + 1} ranks or all stages ({FIND_FITTING})"
    if len(extra) == 1 < len(strategy.ranks):  # a stage would have as many ranks as the strategy
        hint = f"move the folder of {format_ranks(extra)} away, if it is of another run"
        if extra[0] == strategy.ranks[-1] + 1:
            hint = f"the strategy of {everyone} or {hint}"
    stages = count_stages(catalog)
    if strategy.stages < stages == len(ranks) // strategy.stage_ranks:
        first, last = ({*catalog.files[rank].tensors} for rank in (0, ranks[-1]))
        if (last - first).isdisjoint(strategy.layouts):
            lacking = format_ranks(range(strategy.stages, stages), "stage")
            facts.append(f"the files are of {stages} stages, and it lacks {lacking}")
            hint = "the strategy files of all stages, or the folder that has them"
    if list(ranks) == [rank + 1 for rank in strategy.ranks]:
        message = "the ranks are numbered from 1, and those of the strategy from 0"
        hint = "rename the folders: rank_1 to rank_0, rank_2 to rank_1, and so on"
    text = join_clauses(*facts)
    return Diagnostic("strategy", message, hint=hint, facts=text, ranks=extra, where=where)


def find_miscount(checkpoint: Checkpoint, wrong: Collection[str]) -> Diagnostic | None:
    """Return the problem of files of other numbers of ranks or stages than the strategy has.

    All other problems follow from it, whose codes are ``wrong``.  A few files may be lost, but
    hardly all of the upper half, if others do not replace them.
    """
    catalog, strategy = checkpoint.catalog, checkpoint.strategy
    if not (checkpoint.are_joined and catalog.needs_strategy):
        return None
    ranks, stages = sorted({*catalog.files, *catalog.damaged}), count_stages(catalog)
    number, hint = len(ranks), "the strategy files of all stages, or the folder that has them"
    if strategy.layouts or strategy.files:
        if extra := tuple(rank for rank in ranks if rank not in strategy.ranks):
            return _extra_ranks_problem(checkpoint, ranks, extra)
        is_half = ranks[-1] == number - 1 and 2 * number <= len(strategy.ranks)
        is_known = checkpoint.needed is not None or catalog.expected_ranks is not None
        is_known |= any(note.code == "leftover" for note in catalog.diagnostics)
        if is_half and not is_known and wrong != {"lacking"}:
            hint = f"the strategy of {count(number, 'rank')} ({FIND_FITTING}), or all files"
            message = _miscount(strategy, catalog)
            return Diagnostic("strategy", message, hint=hint, where=strategy.origin)
    if stages in (1, strategy.stages) or checkpoint.is_deduplicated:
        return None
    of_stage = number // stages
    first, second = (format_numbers(range(at, at + of_stage)) for at in (0, of_stage))
    known = "one stage" if strategy.stages == 1 else count(strategy.stages, "stage")
    message = f"{strategy.origin} has {known} of {count(strategy.stage_ranks, 'rank')}, the files "
    message += f"have {stages}: ranks {first} and {second} hold other parameters"
    return Diagnostic("strategy", message, hint=hint, where=catalog.root)


def _miscount(strategy: Strategy, catalog: Catalog) -> str:
    ranks = len(catalog.files) + len(catalog.damaged)
    return f"the strategy is for {len(strategy.ranks)} ranks, and {catalog.root} has {ranks}"


def _incomplete_replica_problems(
    checkpoint: Checkpoint, contents: Contents
) -> Iterator[Diagnostic]:
    """Yield what ranks lack of the tensors of their stage, and the stages without a file."""
    catalog, strategy = checkpoint.catalog, checkpoint.strategy
    if strategy.stages == 1 and (stages := _unequal_stages_problem(catalog)) is not None:
        yield propose_step(contents, stages)
        return
    held: dict[int, dict[str, None]] = defaultdict(dict)
    alike: dict[tuple[int, tuple[str, ...]], list[int]] = defaultdict(list)
    for rank, file in catalog.files.items():
        held[rank // strategy.stage_ranks].update(dict.fromkeys(file.tensors))
    for rank, file in catalog.files.items():
        stage = rank // strategy.stage_ranks
        alike[stage, tuple(name for name in held[stage] if name not in file.tensors)].append(rank)
    for (stage, missing), ranks in alike.items():
        complete = alike.get((stage, ()), [])
        holding = format_ranks(complete) if complete else "other ranks"
        problems = _lacking_problems(catalog, "missing", ranks, missing, f"on {holding}")
        yield from (propose_step(contents, problem) for problem in problems)
    for stage in range(strategy.stages) if held else ():
        if stage not in held and not catalog.damaged:
            yield propose_step(contents, _missing_problem(checkpoint, strategy.ranks_of(stage)))


def _unequal_stages_problem(catalog: Catalog) -> Diagnostic | None:
    """Return the problem of pipeline stages that lack a rank, or a tensor of a rank."""
    ranks_of: dict[frozenset[str], list[int]] = defaultdict(list)
    for rank, file in catalog.files.items():
        ranks_of[frozenset(file.tensors)].append(rank)
    larger = {names: [it for it in ranks_of if names < it] for names in ranks_of}
    stages = [names for names in ranks_of if not larger[names]]
    if not (stages[1:] and hold_other_names(stages)):
        return None
    ranks = range(max((*catalog.files, *catalog.damaged)) + 1)
    lost = [rank for rank in ranks if rank not in catalog.files]
    facts = [f"{format_ranks(lost)}: no file that can be read" if lost else ""]
    for names, others in larger.items():
        if others:
            lost += ranks_of[names]
            lacking = format_names(name for name in catalog.metas if name in others[0] - names)
            facts.append(f"{format_ranks(ranks_of[names])}: without {lacking}")
    groups = " and ".join(format_numbers(ranks_of[names]) for names in stages)
    message = f"not every rank holds the full model: ranks {groups} hold other parameters"
    hint = f"copy the file of {format_ranks(sorted(lost))} again"
    if not lost:  # the last ranks
        facts = [f"stages of {shorten((str(len(ranks_of[names])) for names in stages), 8)} ranks"]
        hint = "the files of all ranks of the stages, or -s STRATEGY"
    text, where = join_first(facts), catalog.root
    return Diagnostic("missing", message, hint=hint, facts=text, ranks=tuple(lost), where=where)


def _missing_rank_problems(checkpoint: Checkpoint) -> Iterator[Diagnostic]:
    """Yield the problem of missing ranks in a deduplicated checkpoint without layouts."""
    catalog = checkpoint.catalog
    known = {*catalog.files, *catalog.damaged}
    missing = tuple(rank for rank in range(max(known)) if rank not in known)
    if missing:
        yield Diagnostic(
            "missing",
            f"{format_ranks(missing)}: {_NO_FILE} {catalog.root}",
            hint="restore the files, or --step for another step",
            facts=f"saved without redundancy ({REDUNDANCY_KEY}): no other rank has what they had",
            ranks=missing,
        )


def _lacking_problems(
    catalog: Catalog, code: str, ranks: Sequence[int], names: Iterable[str], holding: str
) -> Iterator[Diagnostic]:
    """Yield the problem of each parameter that files lack; ``holding`` says who has it."""
    files = [catalog.files[rank] for rank in ranks]
    state = "" if any(file.nbytes for file in files) else " (0 bytes)"
    for name in names:
        yield Diagnostic(
            code,
            f"not on {format_ranks(ranks)}, but on others",
            hint=f"copy the file again if it was cut short; `ckpttool help {code}` explains",
            facts=f"{shorten((file.path for file in files), 1)}{state}; {holding}",
            tensor=name,
            ranks=tuple(ranks),
            path=files[0].path if len(files) == 1 else None,
        )


def check_missing(checkpoint: Checkpoint, contents: Contents) -> Iterator[Diagnostic]:
    """Yield the problem of each tensor with slices that no rank has."""
    owners_of: dict[str, set[int]] = defaultdict(set)
    for owners, names in checkpoint.presence.missing.items():
        for name in names:
            owners_of[name].update(owners)
    groups: dict[frozenset[int], list[str]] = defaultdict(list)
    for name, ranks in owners_of.items():
        groups[frozenset(ranks)].append(name)
    for lost, names in groups.items():
        problem = propose_step(contents, _missing_problem(checkpoint, sorted(lost)))
        yield from (replace(problem, tensor=name) for name in names)
    unknown = tuple(rank for rank, known in checkpoint.presence.replaced.items() if known is False)
    if unknown and checkpoint.catalog.description is None:
        message = f"{format_ranks(unknown)}: replicas do not replace what is damaged"
        facts = "the other ranks hold different parameters (saved without redundancy?)"
        hint = "copy the file again; `ckpttool help missing` explains"
        problem = Diagnostic("missing", message, hint=hint, facts=facts, ranks=unknown)
        yield propose_step(contents, problem)


def propose_step(contents: Contents, problem: Diagnostic) -> Diagnostic:
    """Return a problem of missing slices that proposes another step, if one is complete."""
    if not (step := contents.complete_step):
        return problem
    return replace(problem, hint=f"--step {step}, which is complete by its headers")


def _missing_problem(checkpoint: Checkpoint, owners: Sequence[int]) -> Diagnostic:
    """Return the problem of any parameter whose slices on all of ``owners`` are lost."""
    catalog = checkpoint.catalog
    damaged = [rank for rank in owners if rank in catalog.damaged]
    with_file = [rank for rank in owners if rank in catalog.whole_files]
    without_file = [rank for rank in owners if rank not in catalog.files and rank not in damaged]
    files = [catalog.files[rank] for rank in with_file]
    empty = [file.path for file in files if not file.nbytes]
    lack = "not in the files"
    if not checkpoint.is_deduplicated:
        state = " (0 bytes)" if len(empty) == len(files) else ""
        lack = f"not in {shorten((file.path for file in files), 1)}{state}"
    states = (
        (without_file, f"{_NO_FILE} {catalog.root}"),
        (damaged, "not read"),
        (with_file, lack),
    )
    remarks = [f"{format_ranks(ranks)}: {state}" for ranks, state in states if ranks]
    codes = {"leftover", "absent", "part"} if without_file else set()
    if catalog.expected_ranks is not None:
        codes.discard("part")  # all that were written are meant to be there
    notes = [note for note in catalog.diagnostics if note.code in codes]
    remarks += [note.message if note.where == catalog.root else note.fact for note in notes]
    if checkpoint.is_deduplicated:
        remarks += [f"{shorten(empty, 1)}: 0 bytes"] if empty and not without_file else []
        remarks.append(f"saved without redundancy ({REDUNDANCY_KEY})")
    message = "some slices are on no rank"
    hint = "copy the files again; `ckpttool help missing` explains"
    if any(note.code == "part" for note in notes):
        hint = "write all ranks, without --rank, or restore the files"
    elif without_file and checkpoint.needed is not None:
        hint = "restore the files of enough ranks, which `ckpttool strategy ranks` lists"
    elif without_file:
        expected = sum(map(catalog.is_expected, checkpoint.strategy.ranks))
        message = f"there are files of {len(catalog.whole_files)} of {expected} ranks, "
        message += "and some slices are in none"
        hint = f"copy the files of {format_ranks(without_file)} from where they were saved"
    elif damaged:
        hint = "restore the files, or --step for another step"
    if len(damaged) == len(owners) or catalog.errors():
        hint = ""  # other errors name the cause
    return Diagnostic("missing", message, hint=hint, facts="; ".join(remarks), ranks=tuple(owners))


def check_own_values(checkpoint: Checkpoint) -> Iterator[Diagnostic]:
    """Yield the loss of values that each rank has for itself (``--unlisted rank``)."""
    names = [name for names in checkpoint.differing.values() for name in names]
    damaged = tuple(
        rank
        for rank in checkpoint.catalog.damaged
        if rank not in {*chain(*checkpoint.presence.missing)}
    )
    lost = damaged or checkpoint.presence.without_file
    if names and lost and checkpoint.options.unlisted == "rank":
        message = f"{format_ranks(lost)}: own values of {count(len(names), 'parameter')} are lost"
        yield Diagnostic(
            "missing" if damaged else "missing_own",
            message,
            hint="--unlisted first, or --unlisted drop",
            options=("--unlisted",),
            facts=f"{shorten(names, 3)}: not in the strategy, a value for each rank",
            ranks=lost,
        )


def check_replaced(checkpoint: Checkpoint, contents: Contents) -> Iterator[Diagnostic]:
    """Yield the ranks whose slices are read from replicas: the reason, and the other ranks."""
    catalog, presence = checkpoint.catalog, checkpoint.presence
    damaged = tuple(rank for rank, is_known in presence.replaced.items() if is_known)
    if catalog.description is not None:
        for rank in damaged:  # its keys are numbers of files
            facts = "other files hold all of its slices"
            yield _replaced_note(catalog.damaged[rank], facts, code="faulty_replica")
        return
    if damaged:
        facts = _replacement_text(checkpoint, contents, damaged)
        for rank in damaged:
            yield _replaced_note(catalog.damaged[rank], facts, (rank,), code="damaged_replica")
    if presence.without_file and catalog.files:
        message = f"{format_ranks(presence.without_file)}: {_NO_FILE} {catalog.root}"
        ranks, strategy = presence.without_file, checkpoint.strategy
        if checkpoint.needed is None:
            facts = _replacement_text(checkpoint, contents, ranks)
            yield Diagnostic("missing_replica", message, facts=facts, ranks=ranks)
            return
        at_hand = {rank // strategy.stage_ranks for rank in catalog.files}
        absent = [stage for stage in range(strategy.stages) if stage not in at_hand]
        facts = f"{format_ranks(absent, 'stage')}: parameters that the strategy does not list and "
        facts = f"{facts}that only these ranks hold are left out" if absent else ""
        yield Diagnostic("part", f"{message}, and not needed", facts=facts, ranks=ranks)


def _replaced_note(
    error: FormatError, facts: str, ranks: tuple[int, ...] = (), *, code: str
) -> Diagnostic:
    (problem,) = error.diagnostics
    return replace(problem, code=code, facts=join_clauses(problem.facts, facts), ranks=ranks)


def _replacement_text(checkpoint: Checkpoint, contents: Contents, ranks: Sequence[int]) -> str:
    """Say from which ranks the slices of ``ranks`` are read, perhaps those of another stage."""
    used, done, holders = set[int](), set[Hashable](), checkpoint.catalog.holders
    for tensor in checkpoint.records:
        key = tuple(stage.key for stage in tensor.stages), id(holders[tensor.name])
        for holding in () if key in done else holdings(tensor):
            if {*holding.owners}.difference(holding.holders).isdisjoint(ranks):
                continue
            if isinstance(tensor, BrokenTensor) or holding.layout == tensor.layout:
                used.update(holding.holders[:1])
                continue
            for box in holding.regions:
                pieces = find_pieces(tensor.slicing, box, (0,) * len(holding.shape))
                used.update(piece.rank for piece in pieces)
        done.add(key)
    # Without layouts every rank holds everything.
    replicas = sorted(used or {min(checkpoint.catalog.files)})
    message = f"all slices are read from replicas: {format_ranks(replicas)}"
    notes = () if contents.correction is None else contents.correction.notes
    if checkpoint.options.optimizer_shard == 1 and any(note.code == "inferred" for note in notes):
        message += ", if optimizer shards were joined"  # only the user says so
    return message


def check_unsaved(checkpoint: Checkpoint) -> Iterator[Diagnostic]:
    """Yield the problem of listed weights that are in no file, and a note on other parameters."""
    weights = find_unsaved_weights(checkpoint)
    if weights:
        yield _unsaved_problem(checkpoint, weights)
    if unsaved := [name for name in checkpoint.presence.unsaved if name not in weights]:
        message = f"{count(len(unsaved), 'parameter', 'are')} in the strategy and in no file"
        yield Diagnostic("absent", message, facts=format_names(unsaved))


def _unsaved_problem(checkpoint: Checkpoint, weights: Collection[str]) -> Diagnostic:
    """Return the problem of weights in no file; its hint leaves them out, or chooses an adapter."""
    catalog, layouts, states = checkpoint.catalog, checkpoint.strategy.layouts, checkpoint.states
    names = {*checkpoint.whole.metas, *checkpoint.whole.lost}
    patterns = covering_patterns(weights, names, _MOST_PATTERNS)
    hint = " ".join(f"--exclude {quote(pattern)}" for pattern in patterns)
    hint = hint or "--exclude with patterns of these names; `ckpttool help unsaved` explains"
    is_adapter = Pattern(_ADAPTER).matches
    if all(map(is_adapter, names)) and not any(map(is_adapter, weights)):
        hint = f"--include {quote(_ADAPTER)}"
    message = f"{count(len(weights), 'weight', 'are')} in the strategy and in no file"
    unlisted = [
        name
        for name, meta in catalog.metas.items()
        if name not in layouts and meta.nbytes > meta.itemsize
        if states.get(name) not in catalog.metas
    ]
    if not unlisted:
        return Diagnostic("unsaved", message, hint=hint, facts=format_names(weights))
    facts = f"only in the strategy: {format_names(weights, 2)}; only in files: "
    facts += format_names(unlisted, 2)
    hint = "the strategy of this run; `ckpttool help renamed` explains"
    return Diagnostic("renamed", message, hint=hint, facts=facts)


def check_partly_held(checkpoint: Checkpoint) -> Iterator[Diagnostic]:
    """Yield a note on tensors without a layout that some ranks lack: they are read from others."""
    differing = {name for names in checkpoint.differing.values() for name in names}
    for partial in checkpoint.partly_held:
        if not differing.issuperset(partial.names):
            more = f"; taken from rank {partial.ranks[0]}"
            yield from partly_held_problems(checkpoint.catalog, partial, more, code="partly_held")


def check_lacking_names(checkpoint: Checkpoint) -> Iterator[Diagnostic]:
    """Yield tensors without a layout that only some ranks of their stage have."""
    for partial in checkpoint.partly_held:
        code = "unlisted" if partial.is_on_one_rank else "lacking"
        yield from partly_held_problems(checkpoint.catalog, partial, code=code)


def partly_held_problems(
    catalog: Catalog, partial: PartlyHeld, more: str = "", *, code: str
) -> Iterator[Diagnostic]:
    """Yield for each tensor that only one rank holds it, or that some ranks do not."""
    ranks, where = partial.missing, "not on"
    facts = f"{shorten((catalog.files[rank].path for rank in ranks), 1)}: other ranks of the "
    facts += "stage hold it"
    if partial.is_on_one_rank:
        ranks, where, facts = partial.ranks, "only on", catalog.files[partial.ranks[0]].path
        if partial.instead:
            facts += f": {shorten(partial.instead, 3)}, on all other ranks, is missing"
    message = f"not in the strategy, and {where} {format_ranks(ranks)}"
    hint = f"copy the file again if it was cut short; `ckpttool help {code}` explains"
    problem = Diagnostic(code, message, hint=hint, facts=facts + more, ranks=ranks)
    return (replace(problem, tensor=name) for name in partial.names)


def check_redundancy(checkpoint: Checkpoint) -> Iterator[Diagnostic]:
    """Yield a note on a checkpoint without redundancy, or on ranks that hold nothing."""
    if checkpoint.catalog.description is None:
        yield from _redundancy_notes(checkpoint.whole.catalog, checkpoint.is_deduplicated)


def check_empty(checkpoint: Checkpoint) -> Iterator[Diagnostic]:
    """Yield a note on files of ranks that hold nothing, if nothing says what they should hold."""
    if not checkpoint.catalog.is_merged:
        yield from _redundancy_notes(checkpoint.whole.catalog, None)


def _redundancy_notes(catalog: Catalog, is_deduplicated: bool | None) -> Iterator[Diagnostic]:
    """Yield how it was saved, if a strategy or a mark shows it, or the ranks that hold nothing."""
    empty = [rank for rank, file in catalog.whole_files.items() if not file.tensors]
    nothing = f"{format_ranks(empty)} hold{'s' if len(empty) == 1 else ''} nothing"
    if is_deduplicated or (is_deduplicated is None and has_redundancy_mark(catalog)):
        message = f"saved without redundancy ({REDUNDANCY_KEY})"
        facts = "each slice is in one file only" + (f"; {nothing}" if empty else "")
        yield Diagnostic("deduplicated", message, facts=facts, where=catalog.root)
        return
    if not empty:
        return
    ranks, file = tuple(empty), catalog.files[empty[0]]
    code, why = "emptied", "the checkpoint was not saved without redundancy"
    hint = "copy the file again; `ckpttool help emptied` explains"
    if is_deduplicated is None:
        code, why = "empty", "cut short, or saved without redundancy"
        hint = "-s STRATEGY, which shows which it is"
    facts = f"{file.path}: {file.nbytes} bytes; {why}"
    yield Diagnostic(code, nothing, hint=hint, facts=facts, ranks=ranks)


def check_choice(checkpoint: Checkpoint) -> Iterator[Diagnostic]:
    """Yield the problems of patterns of names that match nothing, and of a choice of no tensor."""
    whole = checkpoint.unfiltered
    if whole is None:
        return
    options, metas, where = checkpoint.options.tensors, whole.metas, whole.catalog.root
    absent = [name for name in whole.names if name not in metas]
    unmatched = [] if options.is_shared else [*options.unmatched(metas, where, absent)]
    yield from unmatched
    if not checkpoint.catalog.metas and not unmatched:
        yield from _nothing_chosen(metas, where)


def _nothing_chosen(metas: Collection[str], where: str) -> Iterator[Diagnostic]:
    if metas:
        facts = f"{count(len(metas), 'tensor')} left out: {shorten(metas, 3)}"
        hint = f"other patterns; `ckpttool inspect --all {quote(where)}` lists the names"
        yield Diagnostic("options", "no tensor is chosen", hint=hint, facts=facts, where=where)


def find_unsaved_weights(checkpoint: Checkpoint) -> dict[str, None]:
    """Return the listed weights that no file has; none of a set whose manifest names the strategy.

    Neither states nor counters are weights.
    """
    unsaved = checkpoint.presence.unsaved
    if not unsaved or checkpoint.is_recorded:
        return {}
    weights = (name for name in unsaved if checkpoint.belonging(name) == WEIGHT)
    return dict.fromkeys(name for name in weights if parse_name(name).parameter is None)


def check_casts(checkpoint: Checkpoint) -> Iterator[Diagnostic]:
    """Yield the problems of casts that name no tensor, none of numbers, or one in two types."""
    options, whole = checkpoint.options.tensors, checkpoint.whole
    if options.on_overflow != "error" and not (options.casts or options.lora):
        message = "no cast was requested, so no number overflows"
        hint = "--dtype, or no --on-overflow"
        yield Diagnostic("options", message, hint=hint, where=whole.catalog.root)
    if options.casts and not options.is_shared:
        metas = {
            n: meta for n, meta in whole.metas.items() if n in checkpoint.wanted
        } or whole.metas
        yield from options.cast_problems(metas, whole.belongings, whole.catalog.root)


def find_shared_problems(checkpoints: Sequence[Checkpoint]) -> Iterator[Diagnostic]:
    """Yield the same problems of patterns that are for several checkpoints together."""
    options, metas = checkpoints[0].options.tensors, dict[str, TensorMeta]()
    belongings: dict[str, Belonging] = {}
    for checkpoint in checkpoints:
        metas |= checkpoint.whole.metas
        belongings |= checkpoint.belongings if options.casts else {}
    roots = [*dict.fromkeys(checkpoint.catalog.root for checkpoint in checkpoints)]
    absent = {name for checkpoint in checkpoints for name in checkpoint.whole.names} - metas.keys()
    wrong = [*options.unmatched(metas, roots[0], absent)]
    if not wrong and not any(checkpoint.catalog.metas for checkpoint in checkpoints):
        wrong += _nothing_chosen(metas, roots[0])
    for problem in chain(wrong, options.cast_problems(metas, belongings, roots[0])):
        yield replace(problem, where=" and ".join(roots))  # its hint names the first alone


def check_left_out(checkpoint: Checkpoint) -> Iterator[Diagnostic]:
    """Yield a note on the tensors that are not wanted, and on what belongs to parameters."""
    left_out, options = checkpoint.left_out, checkpoint.options.tensors
    if not left_out or not checkpoint.catalog.metas or options.shown_by:
        return
    is_chosen = bool(options.include)  # states of a chosen parameter are left out, too
    owners = checkpoint.wanted if is_chosen else left_out.keys()
    belonging = [
        name for name in left_out if not owners.isdisjoint(owners_of(name, checkpoint.belongings))
    ]
    unrelated = [name for name in left_out if name not in {*belonging}]
    texts = [shorten(unrelated, 3)] if unrelated else []
    if belonging:
        texts.append(f"{'of the chosen' if is_chosen else 'with them'} {shorten(belonging, 3)}")
    size = format_bytes(sum(left_out.values()))
    message = f"left out, as requested: {count(len(left_out), 'tensor')}, {size}"
    yield Diagnostic("dropped", f"{message} ({'; '.join(texts)})")


def check_counters(checkpoint: Checkpoint) -> Iterator[Diagnostic]:
    """Yield a note on numbers that are not cast, since their values look like counts."""
    if not checkpoint.options.tensors.casts:
        return
    if kept := sorted(checkpoint.counting & checkpoint.wanted):
        message = f"whole numbers above {LEAST_COUNT}, not cast: {shorten(kept, 3)}"
        yield Diagnostic("counter", message)


def check_scales(checkpoint: Checkpoint) -> Iterator[Diagnostic]:
    """Yield why Float8 weights cannot be cast, and a note on the scales that are multiplied."""
    casts = checkpoint.options.tensors.casts
    if not checkpoint.options.tensors.are_changed:
        return
    terms, problems = checkpoint.scales
    yield from problems
    stored = [tensor.name for tensor in checkpoint.tensors if tensor.meta.dtype in FLOAT8]
    if not terms and not problems and stored and any(cast.pattern is None for cast in casts):
        message = f"Float8 without scales, copied as stored: {shorten(stored, 3)}"
        yield Diagnostic("unscaled", message)
    if terms:
        message = f"multiplied into their weights: {count(len(terms), 'scale')}"
        facts = shorten((term.source.name for term in terms.values()), 3)
        yield Diagnostic("dropped", f"{message} ({facts})")


def check_narrowed(checkpoint: Checkpoint) -> Iterator[Diagnostic]:
    """Yield a note on weights that a cast without a pattern narrows, of a type that few have.

    Somebody may have kept them wider than the others on purpose.
    """
    casts = checkpoint.options.tensors.casts
    nbytes, narrowed = Counter[str](), dict[str, str]()
    for tensor in checkpoint.tensors if any(cast.pattern is None for cast in casts) else ():
        meta, dtype = tensor.meta, checkpoint.wanted_dtype(tensor.meta)
        if meta.dtype in CASTABLE and checkpoint.belonging(tensor.name).is_trained:
            nbytes[meta.dtype] += meta.nbytes
            if DTYPES[dtype].itemsize < meta.itemsize:
                narrowed[tensor.name] = meta.dtype
    usual = max(nbytes, key=nbytes.__getitem__, default="")
    if few := [name for name, dtype in narrowed.items() if dtype != usual]:
        whose = shorten(dict.fromkeys(narrowed[name] for name in few), 3)
        message = f"cast from {whose}, while most weights are {usual}: {shorten(few, 3)}"
        word = WORDS_OF_CASTS.get(narrowed[few[0]])  # Float64 has none
        unaffected = checkpoint.metas.keys() - few
        patterns = covering_patterns(few, unaffected, _MOST_PATTERNS) if word else ()
        hint = " ".join(f"--dtype {quote(f'{word}:{pattern}')}" for pattern in patterns)
        yield Diagnostic("narrowed", message, hint=hint and f"{hint}, to keep them")


def check_lost_evidence(checkpoint: Checkpoint) -> Iterator[Diagnostic]:
    """Yield a note on weights of ranks that are written without the state that shows a shard."""
    whole, left_out = checkpoint.whole, checkpoint.left_out
    parameters = (whole.belonging(name).of for name in left_out)
    if len(checkpoint.catalog.files) > 1 and not checkpoint.wanted.isdisjoint(parameters):
        message = "optimizer state shows shards that a strategy hides, and the outputs have none"
        hint = "`ckpttool reshard SRC -d STRATEGY`, or --optimizer-shard with the outputs"
        yield Diagnostic("doubt", message, hint=hint)


def check_renamed(checkpoint: Checkpoint) -> Iterator[Diagnostic]:
    """Yield a note on the tensors with new names, and the problems of the rules for names."""
    names, renamed = checkpoint.catalog.metas, checkpoint.renamed
    changed = {name: new for name, new in renamed.items() if name in names}
    options, whole, where = checkpoint.options.tensors, checkpoint.whole, checkpoint.catalog.root
    rules = options.renames
    # Where nothing is chosen, rules are judged all the same.
    of_rules = names or ({} if options.is_shared else whole.metas)
    if rules and of_rules:
        yield from rename_problems(rules, of_rules, changed, where, whole.names, whole.belongings)
    if changed:
        examples = shorten((f"{name} to {new}" for name, new in changed.items()), 2)
        yield Diagnostic("new_names", f"{count(len(changed), 'tensor')} renamed: {examples}")
    yield from rename_notes(rules, names, whole.names, whole.belongings)


def check_nothing(checkpoint: Checkpoint) -> Iterator[Diagnostic]:
    """Yield the problem of a checkpoint in which there is nothing to examine."""
    if checkpoint.catalog.metas or not checkpoint.left_out:
        yield from find_nothing(checkpoint.catalog)


def find_nothing(catalog: Catalog) -> Iterator[Diagnostic]:
    """Yield the problem of a checkpoint in which there is nothing to examine.

    Zero tensors do not pass.  Other diagnostics say why damaged or contradictory files were not
    read.
    """
    if not catalog.metas and not catalog.damaged and not catalog.errors():
        files = catalog.files.values()
        message = f"{count(len(files), 'file')}, {sum(file.nbytes for file in files)} bytes"
        ignored = (note for note in catalog.diagnostics if note.code == "skipped")
        facts = join_clauses(message, *(join_clauses(note.fact, note.facts) for note in ignored))
        hint = "copy the files again; `ckpttool help nothing` explains"
        message = "no tensor was found"
        yield Diagnostic("nothing", message, hint=hint, facts=facts, where=catalog.root)
    shapes = (
        tensor.meta.shape for header in catalog.headers.values() for tensor in header.values()
    )
    if catalog.metas and not any(map(math.prod, shapes)):
        message = f"{count(len(catalog.metas), 'tensor')} without an element, and no other"
        hint = "save it again; `ckpttool help no_elements` explains"
        facts = shorten((f"{meta.name} {meta.shape}" for meta in catalog.metas.values()), 3)
        yield Diagnostic("no_elements", message, hint=hint, facts=facts, where=catalog.root)


def check_lacking(checkpoint: Checkpoint) -> Iterator[Diagnostic]:
    """Yield each file that lacks slices, and the ranks that hold them."""
    if checkpoint.is_deduplicated:
        return
    catalog, holders = checkpoint.catalog, checkpoint.catalog.holders
    missing: dict[int, list[str]] = defaultdict(list)
    replicas: dict[int, set[int]] = defaultdict(set)
    lacking: dict[Hashable, dict[int, tuple[int, ...]]] = {}  # rank to the one that is read
    for tensor in checkpoint.tensors:
        if not tensor.has_layout or tensor.meta.text is not None:
            continue
        key = tensor.slicing.distribution_key, id(holders[tensor.name])
        if key not in lacking:
            lacking[key] = {
                rank: holding.holders[:1]
                for holding in tensor.slicing.holdings()
                for rank in catalog.whole_files.keys()
                & {*holding.owners}.difference(holding.holders)
            }
        for rank, replica in lacking[key].items():
            missing[rank].append(tensor.name)
            replicas[rank].update(replica)
    alike: dict[tuple[tuple[str, ...], tuple[int, ...]], list[int]] = defaultdict(list)
    for rank, names in sorted(missing.items()):
        alike[tuple(names), tuple(sorted(replicas[rank]))].append(rank)
    for (lost, replica_ranks), ranks in alike.items():
        read = f"read from {format_ranks(replica_ranks)}"
        yield from _lacking_problems(catalog, "lacking", ranks, lost, read)
