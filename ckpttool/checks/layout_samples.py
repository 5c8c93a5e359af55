"""Check samples of the data against the strategy.

A strategy file holds no shapes, and MindSpore's is not always true.  A run with
``optimizer_weight_shard_aggregated_save`` writes smaller slices than its strategy says.  Headers
cannot show this, but ranks that should hold equal slices hold different ones.

Slices that should differ may be equal by chance, or repeat by design.  So tensors are weighed by
how many different values their slices could have had.  If all slices of all sharded tensors are
equal, every rank holds full tensors, as MindSpore saves by default (``integrated_save=True``).
Other ranks are missing only by the ranks of the same stage: each stage is saved for itself.

The same evidence refuses a strategy file and a line of a hand-written one.  What would fit the
ranks with equal slices is for `ckpttool strategy draft`, which the message names.
"""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ckpttool.checkpoint.checkpoint import Checkpoint, Contents
from ckpttool.checkpoint.optimizer_state import OF_THE_RUN, contradiction
from ckpttool.checkpoint.samples import SampledTensor, has_own_values
from ckpttool.model.names import match_states, parse_name
from ckpttool.model.slicing import FullTensor, LayoutSlicing, RankGroups
from ckpttool.model.strategy import Strategy
from ckpttool.problems import Diagnostic
from ckpttool.wording import count, format_difference, format_groups, format_ranks

if TYPE_CHECKING:
    from ckpttool.storage.sampling import Sample

MIN_EQUAL_BYTES = 4096  # smaller slices may be equal by design, such as a table of signs


def check_replicas(checkpoint: Checkpoint, contents: Contents) -> Iterator[Diagnostic]:
    """Yield the tensors whose replicas differ, on ranks of a stage or between stages.

    One of the replicas would be written, perhaps the wrong one.  If every byte was read,
    `ckpttool.checks.full_reads.check_contents` says the same with more detail.
    """
    if "contents" in contents.read:
        return
    problems = []
    for sampled in chain(contents.sampled, contents.sampled_copies):
        if groups := sampled.differing_groups:
            facts, ranks = format_difference(groups), odd_ranks(groups)
            if (by_design := own_values_note(sampled.tensor, facts, ranks)) is not None:
                yield by_design
            else:
                problems.append(sampled)
    is_other_run = bool(checkpoint.strategy.files) and any(
        min(map(len, sampled.differing_groups)) > 1 for sampled in problems
    )
    for sampled in problems:
        yield _replica_problem(checkpoint, sampled, is_other_run)
    for tensor, other in contents.differing_stages:
        stages = tensor.layout.ranks, other.layout.ranks
        yield Diagnostic(
            "replica",
            "different between stages that share it",
            hint=f"files of one step, or --trust-strategy; {_REPLICA_EXPLAINED}",
            options=_TRUST,
            facts=format_difference(stages),
            tensor=tensor.name,
            ranks=(*stages[0], *stages[1]),
            where=checkpoint.catalog.root,
        )


def check_scrambled(_: Checkpoint, contents: Contents) -> Iterator[Diagnostic]:
    """Yield the tensors whose slices were written from the wrong place of memory."""
    for scrambled in contents.scrambled:
        yield Diagnostic(
            "scrambled_slices",
            "slices are scrambled, as MindSpore 2.10 writes them with safetensors 0.8",
            hint="write them again with safetensors 0.7 or as .ckpt, or ckpttool split SRC "
            "-d STRATEGY; `ckpttool help scrambled_slices` explains",
            facts=f"{format_ranks(scrambled.ranks)} hold the same elements, one row further",
            tensor=scrambled.tensor.name,
            ranks=scrambled.ranks,
        )


def own_values_note(tensor: FullTensor, facts: str, ranks: tuple[int, ...]) -> Diagnostic | None:
    """Return the diagnostic of replicas that differ by design; None if they must not differ."""
    if not has_own_values(tensor):
        return None
    message = "every rank has values of its own, and those of the lowest rank are read"
    return Diagnostic("own_values", message, facts=facts, tensor=tensor.name, ranks=ranks)


def odd_ranks(groups: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the ranks outside the largest group, or all ranks if several groups are largest."""
    by_size = sorted(groups, key=len)
    odd = by_size[:-1] if len(by_size[-2]) < len(by_size[-1]) else by_size
    return tuple(sorted(rank for group in odd for rank in group))


def check_shards(checkpoint: Checkpoint, contents: Contents) -> Iterator[Diagnostic]:
    """Yield the tensors whose full shape would be too large: slices of a shard are equal."""
    too_far = [sampled for sampled in _sampled_in_full(contents) if _is_sharded_too_far(sampled)]
    unlike = _unlike_states(checkpoint) if too_far else set()
    for sampled in too_far:
        message = "sharded further than in the files"
        hints = ["the strategy of the run", "--optimizer-shard 1 if shards were joined"]
        options: tuple[str, ...] = ("--optimizer-shard",)
        if place := _place_by_hand(checkpoint.strategy, sampled.tensor):
            hints, options = [_correct(checkpoint, place)], ()
        if sampled.tensor.name not in unlike:
            hints, options = [*hints, _REPEATING], (*options, *_TRUST)
        hint = f"{', '.join(hints[:-1])}, or {hints[-1]}" if hints[1:] else hints[0]
        hint += f"; {_CONTRADICTED_EXPLAINED}"
        yield _too_large_problem(checkpoint.strategy, sampled, message, hint, options)


def check_slices(checkpoint: Checkpoint, contents: Contents) -> Iterator[Diagnostic]:
    """Yield the tensors with equal slices that should differ.

    Single tensors are a warning, since their slices may be equal by chance.  It is a problem if
    most sampled sharded tensors of the strategy files, or of a hand-written line, have equal
    slices.
    """
    catalog, strategy = checkpoint.catalog, checkpoint.strategy
    equal = [
        (sampled, groups)
        for sampled in _sampled_in_full(contents)
        if not _is_sharded_too_far(sampled) and (groups := _equal_slices(sampled))
    ]
    in_full = [sampled for sampled, groups in equal if groups == (sampled.ranks,)]
    by_rule = [s for s in contents.sampled if not (s.differing_groups and has_own_values(s.tensor))]
    if in_full and _are_all_equal(by_rule):
        message = "sharded in the strategy, and in full on all ranks"
        hint = f"merge or split with --replicated, without -s, or {_BY_DESIGN}"
        for sampled in in_full:
            yield _too_large_problem(strategy, sampled, message, hint, _TRUST)
        return
    problems = _equal_slices_problems(checkpoint, by_rule, equal)
    yield from problems
    refused = {problem.tensor for problem in problems}
    for sampled, groups in equal:
        if sampled.tensor.name in refused:
            continue
        note = _equal_slices_note(checkpoint, sampled, groups)
        missing = tuple(sorted({*chain(*sampled.tensor.slicing.owners())} - catalog.files.keys()))
        if missing and not checkpoint.is_deduplicated and not sampled.may_be_equal_by_chance:
            # Either may be by chance; both together show a strategy of other files.
            facts = f"{format_ranks(missing)} without a file; {note.facts}"
            note = replace(note, facts=facts, ranks=missing)
            note = _contradict(checkpoint, note, _place_by_hand(strategy, sampled.tensor))
        yield note


def _sampled_in_full(contents: Contents) -> Iterator[SampledTensor]:
    # Boxes that a checkpoint describes need no proof.
    for sampled in contents.sampled:
        is_laid_out = isinstance(sampled.tensor.slicing, LayoutSlicing)
        if is_laid_out and not sampled.is_spot_check and not sampled.differing_groups:
            yield sampled


def _contradict(checkpoint: Checkpoint, note: Diagnostic, place: str) -> Diagnostic:
    problem = contradiction(checkpoint.strategy, note.message, note.facts, note.ranks)
    hint = OF_THE_RUN
    if place:
        hint, problem = _correct(checkpoint, place), replace(problem, where=place)
    return replace(problem, tensor=note.tensor, hint=f"{hint}, or {_BY_DESIGN}", options=_TRUST)


_REPEATING = "--trust-strategy if slices repeat by design"
_CONTRADICTED_EXPLAINED = "`ckpttool help contradicted` explains"
_BY_DESIGN = f"{_REPEATING}; {_CONTRADICTED_EXPLAINED}"
_TRUST = ("--trust-strategy",)


def _unlike_states(checkpoint: Checkpoint) -> set[str]:
    """Return states and parameters with unlike full shapes, which no design explains."""
    metas = {tensor.name: tensor.meta for tensor in checkpoint.tensors}
    pairs = match_states(checkpoint.strategy.layouts, metas).items()
    return {
        name
        for pair in pairs
        if metas.keys() >= {*pair} and parse_name(pair[0]).reduced_axis is None
        for name in pair
        if metas[pair[0]].shape != metas[pair[1]].shape
    }


def _is_sharded_too_far(sampled: SampledTensor) -> bool:
    by_rank = {rank: sample for samples in sampled.samples for rank, sample in samples.items()}
    layout = sampled.tensor.layout
    # Slices with equal elements, or with missing ranks, show nothing.
    is_sharded = layout.optimizer_shard > 1 and len(by_rank) == len(layout.ranks)
    if not is_sharded or sampled.may_be_equal_by_chance:
        return False
    bare = replace(layout, optimizer_shard=1)
    groups = [{by_rank[rank] for rank in bare.owners(index)} for index in bare.slice_indices()]
    return all(len(group) == 1 and not group.pop().is_constant for group in groups)


def _equal_slices(sampled: SampledTensor) -> RankGroups:
    """Return the groups of ranks that should hold different slices and hold equal ones."""
    ranks: dict[Sample, list[int]] = defaultdict(list)
    slices: dict[Sample, int] = defaultdict(int)
    for samples in sampled.samples:
        for content in dict.fromkeys(samples.values()):
            slices[content] += 1
            ranks[content] += samples
    return tuple(
        tuple(sorted(ranks[sample]))
        for sample, number in slices.items()
        if number > 1 and not sample.is_constant  # slices of one value show nothing
    )


def _are_all_equal(judged: Iterable[SampledTensor]) -> bool:
    nbytes = 0.0
    for sampled in judged:
        if sampled.is_spot_check or len(sampled.sampled) == 1 or sampled.is_constant:
            continue
        if len(sampled.groups) > 1:
            return False
        nbytes += sampled.nbytes / len(sampled.sampled)
    return nbytes >= MIN_EQUAL_BYTES


def _equal_slices_problems(
    checkpoint: Checkpoint,
    judged: Iterable[SampledTensor],
    equal: Sequence[tuple[SampledTensor, RankGroups]],
) -> list[Diagnostic]:
    """Return the problems of a strategy that most of the sampled tensors contradict, if they do.

    A tensor contradicts it if two slices that should differ are ``equal``.  Constant tensors do not
    count, nor those whose slices may be equal by chance.  A hand-written line is judged by the
    tensors that it matches, also by small ones: a person wrote it for them.  All other tensors are
    judged together.
    """
    tensors: dict[str, list[SampledTensor]] = defaultdict(list)  # by hand-written line, "" for none
    for sampled in judged:
        is_sharded = not sampled.is_spot_check and len(sampled.sampled) > 1
        if is_sharded and not sampled.is_constant and not sampled.may_be_equal_by_chance:
            tensors[_place_by_hand(checkpoint.strategy, sampled.tensor)].append(sampled)
    groups_of = {sampled.tensor.name: groups for sampled, groups in equal}
    problems = []
    for place, of_place in tensors.items():
        wrong = [sampled for sampled in of_place if sampled.tensor.name in groups_of]
        nbytes = sum(sampled.nbytes for sampled in wrong)
        if 2 * len(wrong) <= len(of_place) or (nbytes < MIN_EQUAL_BYTES and not place):
            continue
        message = f"{_EQUAL}, in {len(wrong)} of {count(len(of_place), 'sampled tensor')}"
        for sampled in wrong:
            note = _equal_slices_note(checkpoint, sampled, groups_of[sampled.tensor.name])
            problems.append(_contradict(checkpoint, replace(note, message=message), place))
    return problems


def _replica_problem(
    checkpoint: Checkpoint, sampled: SampledTensor, of_other_run: bool
) -> Diagnostic:
    """Return the problem of a tensor whose replicas differ, if ``of_other_run`` in whole groups."""
    strategy, groups = checkpoint.strategy, sampled.differing_groups
    facts = format_difference(groups)
    hint = f"`{_verify_command(checkpoint)}`, which shows the elements"
    options: tuple[str, ...] = ()
    if place := _place_by_hand(strategy, sampled.tensor):
        hint = _correct(checkpoint, place)
        if 2 * max(map(len, sampled.groups)) > len(sampled.tensor.layout.ranks):
            hint, options = f"{hint}, or --trust-strategy", _TRUST  # no layout fits a majority
    elif of_other_run:
        if min(map(len, groups)) > 1:
            facts += "; whole groups differ: a strategy of another run?"
        hint = f"-s with {OF_THE_RUN}"
    return Diagnostic(
        "replica",
        "different between ranks that should hold the same",
        hint=f"{hint}; {_REPLICA_EXPLAINED}",
        options=options,
        facts=facts,
        tensor=sampled.tensor.name,
        ranks=odd_ranks(groups),
        where=checkpoint.catalog.root,
    )


def _place_by_hand(strategy: Strategy, tensor: FullTensor) -> str:
    handwritten = strategy.handwritten
    return handwritten.get(tensor.name) or handwritten.get(tensor.parameter or "", "")


def _correct(checkpoint: Checkpoint, place: str) -> str:
    by_hand = place.rpartition(", line ")[0] or place
    files = [path for path in checkpoint.strategy.files if path != by_hand]
    command = _command(checkpoint, files, "strategy", "draft")
    return f"`{command} -o draft.yaml`, whose device_matrix fits, to correct {place}"


_REPLICA_EXPLAINED = "`ckpttool help replica` explains"


def _command(checkpoint: Checkpoint, files: Sequence[str], *words: str) -> str:
    catalog = checkpoint.catalog
    given = files if len(files) < 3 else sorted({str(Path(path).parent) for path in files})
    options = [word for name in given for word in ("-s", name)]
    options += ["--step", catalog.step] if catalog.step else []
    return shlex.join(["ckpttool", *words, catalog.root, *options])


def _verify_command(checkpoint: Checkpoint) -> str:
    files = checkpoint.strategy.files or ["STRATEGY"]
    if checkpoint.catalog.description is not None:
        files = ()
    return f"{_command(checkpoint, files, 'verify')} --deep"


def _too_large_problem(
    strategy: Strategy, sampled: SampledTensor, message: str, hint: str, options: tuple[str, ...]
) -> Diagnostic:
    facts = f"{sampled.slice_shape} would become {sampled.tensor.meta.shape}"
    problem = contradiction(strategy, message, facts, sampled.ranks)
    return replace(problem, tensor=sampled.tensor.name, hint=hint, options=options)


_EQUAL = "slices that should differ are equal"


def _equal_slices_note(
    checkpoint: Checkpoint, sampled: SampledTensor, groups: RankGroups
) -> Diagnostic:
    """Return the note on a tensor with equal slices."""
    are_all = groups == (sampled.ranks,)
    facts = f"{'all ranks' if are_all else format_groups(groups)} hold the same"
    hint = "the strategy of this run"
    if place := _place_by_hand(checkpoint.strategy, sampled.tensor):
        hint = _correct(checkpoint, place)
    elif are_all:
        hint = "merge or split with --replicated if every rank holds the full model"
    hint += "; `ckpttool help equal_slices` explains"
    ranks, name = tuple(sorted(chain(*groups))), sampled.tensor.name
    return Diagnostic("equal_slices", _EQUAL, hint=hint, facts=facts, tensor=name, ranks=ranks)
