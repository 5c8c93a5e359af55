"""Check samples of the data against the strategy.

A strategy file holds no shapes, and MindSpore's is not always true.  A run with
``optimizer_weight_shard_aggregated_save`` writes smaller slices than its strategy says.  Headers
cannot show this, but ranks that should hold equal slices hold different ones.

The largest tensors of each layout are sampled: some pages of every rank's slice.  Every other
tensor with replicas is spot-checked: three pages each of the first and the last owner of one slice.
These two differ with every hidden optimizer shard.

Slices that should differ may be equal by chance, or repeat by design.  So tensors are weighed by
how many different values their slices could have had.  If all slices of all sharded tensors are
equal, every rank holds full tensors, as MindSpore saves by default (``integrated_save=True``).
Other ranks are missing only by the ranks of the same stage: each stage is saved for itself.

The same evidence refuses a strategy file and a line of a hand-written one.  Its message has the
lines that fit the ranks with equal slices.

The manifest of an output folder also names the strategy that it was written for.
"""

from __future__ import annotations

import math
import shlex
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import chain
from pathlib import Path

from ckpttool.checkpoint.evidence import Asking, ask
from ckpttool.formats.local import is_file, read_file
from ckpttool.model.catalog import Catalog
from ckpttool.model.manifest import MANIFEST
from ckpttool.model.names import match_states, parse_name
from ckpttool.model.slicing import LayoutSlicing, Slicing, Source
from ckpttool.model.strategy import Replicated, SelfDescribed, Sharding, Strategy
from ckpttool.model.tensors import StoredTensor
from ckpttool.planning.fitting_lines import RankGroups, fitting_lines
from ckpttool.planning.missing import is_deduplicated
from ckpttool.planning.optimizer_state import contradiction
from ckpttool.planning.replicas import odd_ranks, own_values_note, stage_pairs
from ckpttool.planning.sources import group_ranks
from ckpttool.problems import Diagnostic, FormatError
from ckpttool.storage.sampling import Sample, sample, sample_box
from ckpttool.transaction.manifest import ManifestFile
from ckpttool.wording import count, format_difference, format_groups, format_ranks

TENSORS_PER_LAYOUT = 3

Replicas = Sequence[Mapping[int, StoredTensor]]  # rank to stored slice, for each slice


@dataclass(frozen=True, slots=True)
class SampledTensor:
    """A source with samples of its slices.

    Attributes
    ----------
    source
        The full tensor.
    replicas
        The slices; only one of them in a spot check.
    samples
        Rank to sample, for each slice of ``replicas``; a spot check samples only some ranks.
    is_spot_check
        Whether only one slice was sampled.
    """

    source: Source
    replicas: Replicas
    samples: Sequence[Mapping[int, Sample]]
    is_spot_check: bool

    @property
    def ranks(self) -> tuple[int, ...]:
        """The sampled ranks, ascending."""
        return tuple(sorted({rank for by_rank in self.samples for rank in by_rank}))

    @property
    def differing_groups(self) -> RankGroups:
        """Ranks that should hold equal slices and do not, by equal samples; () if there are none.

        They are those of the first slice whose replicas differ.
        """
        samples = next((found for found in self.samples if len({*found.values()}) > 1), {})
        return tuple(group_ranks(tuple(samples), samples.__getitem__).values())

    @property
    def groups(self) -> RankGroups:
        """All sampled ranks, grouped by equal samples."""
        by_rank = {rank: sample for samples in self.samples for rank, sample in samples.items()}
        return tuple(group_ranks(sorted(by_rank), by_rank.__getitem__).values())

    @property
    def is_constant(self) -> bool:
        """Whether every sample has equal elements, so that equal slices show nothing."""
        return all(sample.is_constant for by_rank in self.samples for sample in by_rank.values())

    @property
    def nbytes(self) -> float:
        """Bytes of the full tensor, by how many different values its elements could have had."""
        samples = chain.from_iterable(by_rank.values() for by_rank in self.samples)
        bits = max((sample.element_bits for sample in samples), default=0)
        return math.prod(self.source.meta.shape) * bits / 8

    @property
    def may_be_equal_by_chance(self) -> bool:
        """Whether its slices could have had so few values that equal ones show nothing."""
        return self.nbytes * 8 < CHANCE_BITS * len(self.replicas)


def sample_tensors(
    sources: Iterable[Source], handwritten: Mapping[str, str]
) -> Asking[list[SampledTensor]]:
    """Sample the largest tensors of each layout, and spot-check the others."""
    chosen, others = _choose_sources(sources, handwritten)
    all_slices = [(source, list(source.slicing.replicas())) for source in chosen]
    to_sample = [(source, slices, slices) for source, slices in all_slices]
    for source in others:
        largest = max(source.slicing.replicas(), key=len)
        to_sample.append((source, [largest], [_first_and_last(source, largest)]))
    tensors = (one for *_, slices in to_sample for ranks in slices for one in ranks.values())
    samples = yield from ask(sample, tensors)
    return [
        SampledTensor(
            source,
            slices,
            [{rank: samples[one] for rank, one in ranks.items()} for ranks in sampled],
            is_spot_check=sampled is not slices,
        )
        for source, slices, sampled in to_sample
    ]


def _choose_sources(
    sources: Iterable[Source], handwritten: Mapping[str, str]
) -> tuple[list[Source], list[Source]]:
    """Return the sources to sample in all slices, and those with replicas to spot-check.

    The largest tensors of a layout are sampled, since small ones are often sharded differently.
    All hand-written layouts are sampled, since a pattern may match too many names.
    """
    by_layout: dict[Hashable, list[Source]] = defaultdict(list)
    chosen = []
    for source in sources:
        if not source.meta.nbytes:
            continue
        if source.meta.name in handwritten:
            chosen.append(source)
        elif source.has_layout:
            by_layout[source.slicing.distribution_key].append(source)
    others: list[Source] = []
    for group in by_layout.values():
        group.sort(key=_sampling_order)
        chosen += group[:TENSORS_PER_LAYOUT]
        others += [
            source
            for source in group[TENSORS_PER_LAYOUT:]
            if not parse_name(source.meta.name).is_gradient and _has_replicas(source)
        ]
    return chosen, others


def _sampling_order(source: Source) -> tuple[bool, int]:
    """Order parameters before states, which may be sums of one rank, and large before small."""
    return parse_name(source.meta.name).same_shape_parameter is not None, -source.meta.nbytes


def _has_replicas(source: Source) -> bool:
    return any(len(ranks) > 1 for ranks in source.slicing.owners())


def _first_and_last(source: Source, ranks: Mapping[int, StoredTensor]) -> dict[int, StoredTensor]:
    """Return the first and the last owner of a slice, or all owners if some are missing.

    The first and the last of ``n`` replicas hold different slices of any optimizer shard, since a
    divisor of ``n`` does not divide ``n - 1``.  Owners that are left may hold equal slices.
    """
    if len(ranks) < max(map(len, source.slicing.owners())):
        return dict(ranks)
    return {rank: ranks[rank] for rank in (min(ranks), max(ranks))}


MIN_EQUAL_BYTES = 4096  # smaller slices may be equal by design, such as a table of signs
CHANCE_BITS = 64  # of a slice, as few as those of a mask; one in 2**64 is no chance


def check_strategy(
    catalog: Catalog, sharding: Sharding, sources: Iterable[Source]
) -> Asking[list[Diagnostic]]:
    """Return the problems and notes of layouts that samples contradict.

    Replicas that differ are a problem, since one of them would be written, perhaps the wrong one.
    Parameters that differ between stages are a problem for the same reason.  Equal slices of an
    optimizer shard are a problem, since the full tensor would be too large.  Other equal slices
    that should differ are a warning, since they may be equal by chance.  They are a problem if most
    of the sampled sharded tensors of the strategy files, or of a hand-written line, have them.
    """
    handwritten = sharding.handwritten
    sources = list(sources)
    sampled = yield from sample_tensors(sources, handwritten)
    by_design = {
        one.source.meta.name: note
        for one in sampled
        if (groups := one.differing_groups)
        and (note := own_values_note(one.source, format_difference(groups), odd_ranks(groups)))
    }
    sampled = [one for one in sampled if one.source.meta.name not in by_design]
    differing = [groups for one in sampled if (groups := one.differing_groups)]
    of_other_run = bool(sharding.files) and any(min(map(len, groups)) > 1 for groups in differing)
    found: list[Diagnostic] = [*by_design.values()]
    unlike = _unlike_states(sharding, sources)
    equal: list[tuple[SampledTensor, RankGroups]] = []
    for one in sampled:
        by_rank = {rank: sample for samples in one.samples for rank, sample in samples.items()}
        if one.differing_groups:
            found.append(_replica_problem(catalog, sharding, one, of_other_run))
        elif one.is_spot_check or isinstance(sharding, SelfDescribed):
            continue
        elif not one.may_be_equal_by_chance and _has_equal_shards(one.source.slicing, by_rank):
            text = "sharded further in the strategy than in the files"
            hints = [_OF_THE_RUN, "--optimizer-shard 1 if the optimizer shards were joined before"]
            options: tuple[str, ...] = ("--optimizer-shard",)
            if place := _place_by_hand(sharding, one.source):
                hints, options = [_correct(place)], ()
            if one.source.meta.name not in unlike:
                hints, options = [*hints, _REPEATING], (*options, *_TRUST)
            hint = f"{', '.join(hints[:-1])}, or {hints[-1]}" if hints[1:] else hints[0]
            hint += f"; {_CONTRADICTED_EXPLAINED}"
            found.append(_too_large_problem(sharding, one, text, hint, options))
        elif groups := _equal_slices(one):
            equal.append((one, groups))
    found += yield from _stage_problems(catalog, sharding, sources)
    in_full = [one for one, groups in equal if groups == (one.ranks,)]
    if in_full and _are_all_equal(sampled):
        text = "sharded in the strategy, and in full on all ranks"
        hint = f"merge or split with --replicated, without -s, or {_BY_DESIGN}"
        too_large = (_too_large_problem(sharding, one, text, hint, _TRUST) for one in in_full)
        return [*found, *too_large]
    problems = _equal_slices_problems(sharding, sampled, equal)
    found += problems
    refused = {problem.tensor for problem in problems}
    deduplicated = bool(equal) and is_deduplicated(catalog, sharding)
    for one, groups in equal:
        if one.source.meta.name in refused:
            continue
        note = _equal_slices_note(sharding, one, groups)
        missing = tuple(sorted({*chain(*one.source.slicing.owners())} - catalog.files.keys()))
        if missing and not deduplicated and not one.may_be_equal_by_chance:
            # Either may be by chance; both together show a strategy of other files.
            facts = f"{format_ranks(missing)} without a file; {note.facts}"
            note = replace(note, facts=facts, ranks=missing)
            note = _contradict(sharding, note, _place_by_hand(sharding, one.source))
        found.append(note)
    return found


def _contradict(sharding: Sharding, one: Diagnostic, place: str) -> Diagnostic:
    """Return the problem that the slices of a tensor contradict the strategy.

    ``place`` is that of its hand-written layout; "" if it has none.
    """
    problem = contradiction(sharding, one.message, one.facts, one.ranks)
    hint = _OF_THE_RUN
    if place:
        hint, problem = _correct(place), replace(problem, where=place)
    return replace(problem, tensor=one.tensor, hint=f"{hint}, or {_BY_DESIGN}", options=_TRUST)


_OF_THE_RUN = "the strategy of the run that saved the checkpoint"
_REPEATING = "--trust-strategy if slices repeat by design"
_CONTRADICTED_EXPLAINED = "`ckpttool help contradicted` explains"
_BY_DESIGN = f"{_REPEATING}; {_CONTRADICTED_EXPLAINED}"
_TRUST = ("--trust-strategy",)


def _unlike_states(sharding: Sharding, sources: Sequence[Source]) -> set[str]:
    """Return the parameters and states that have other full shapes than each other.

    No slices that repeat by design explain that.
    """
    metas = {source.meta.name: source.meta for source in sources}
    pairs = match_states(sharding.layouts, metas).items()
    return {
        name
        for pair in pairs
        if metas.keys() >= {*pair} and parse_name(pair[0]).reduced_axis is None
        for name in pair
        if metas[pair[0]].shape != metas[pair[1]].shape
    }


def _has_equal_shards(slicing: Slicing, by_rank: Mapping[int, Sample]) -> bool:
    """Return whether all slices of an optimizer shard are equal.

    Slices with equal elements, or with missing ranks, show nothing.
    """
    if not isinstance(slicing, LayoutSlicing):
        return False  # boxes have no optimizer shard
    layout = slicing.layout
    if layout.optimizer_shard == 1 or len(by_rank) < len(layout.ranks):
        return False
    bare = replace(layout, optimizer_shard=1)
    groups = [{by_rank[rank] for rank in bare.owners(index)} for index in bare.slice_indices()]
    return all(len(samples) == 1 for samples in groups) and not any(
        sample.is_constant for samples in groups for sample in samples
    )


def _equal_slices(one: SampledTensor) -> RankGroups:
    """Return the groups of ranks that should hold different slices and hold equal ones.

    Slices of one value show nothing.
    """
    ranks: dict[Sample, list[int]] = defaultdict(list)
    slices: dict[Sample, int] = defaultdict(int)
    for samples in one.samples:
        for content in dict.fromkeys(samples.values()):
            slices[content] += 1
            ranks[content] += samples
    return tuple(
        tuple(sorted(ranks[sample]))
        for sample, number in slices.items()
        if number > 1 and not sample.is_constant
    )


def _are_all_equal(sampled: Iterable[SampledTensor]) -> bool:
    """Return whether all slices of every sharded tensor are equal, so that ranks hold full tensors.

    Constant tensors do not count.
    """
    nbytes = 0.0
    for one in sampled:
        if one.is_spot_check or len(one.replicas) == 1 or one.is_constant:
            continue
        if len(one.groups) > 1:
            return False
        nbytes += one.nbytes / len(one.replicas)
    return nbytes >= MIN_EQUAL_BYTES


def _equal_slices_problems(
    sharding: Sharding,
    sampled: Iterable[SampledTensor],
    equal: Sequence[tuple[SampledTensor, RankGroups]],
) -> list[Diagnostic]:
    """Return the problems of a strategy that most of the sampled tensors contradict, if they do.

    A tensor contradicts it if two slices that should differ are ``equal``.  Constant tensors do not
    count, nor those whose slices may be equal by chance.  A hand-written line is judged by the
    tensors that it matches, also by small ones: a person wrote it for them.  All other tensors are
    judged together.
    """
    tensors: dict[str, list[SampledTensor]] = defaultdict(list)  # by hand-written line, "" for none
    for one in sampled:
        is_sharded = not one.is_spot_check and len(one.replicas) > 1
        if is_sharded and not one.is_constant and not one.may_be_equal_by_chance:
            tensors[_place_by_hand(sharding, one.source)].append(one)
    groups_of = {one.source.meta.name: groups for one, groups in equal}
    problems = []
    for place, of_place in tensors.items():
        wrong = [one for one in of_place if one.source.meta.name in groups_of]
        nbytes = sum(one.nbytes for one in wrong)
        if 2 * len(wrong) <= len(of_place) or (nbytes < MIN_EQUAL_BYTES and not place):
            continue
        text = f"{_EQUAL}, in {len(wrong)} of {count(len(of_place), 'sampled tensor')}"
        for one in wrong:
            note = _equal_slices_note(sharding, one, groups_of[one.source.meta.name])
            problems.append(_contradict(sharding, replace(note, message=text), place))
    return problems


def _replica_problem(
    catalog: Catalog, sharding: Sharding, one: SampledTensor, of_other_run: bool
) -> Diagnostic:
    """Return the problem of a tensor whose replicas differ.

    Whole groups of ranks differ in this or another tensor if the strategy may be ``of_other_run``.
    """
    groups = one.differing_groups
    facts = format_difference(groups)
    hint = f"`{_verify_command(catalog, sharding)}`, which shows the elements"
    options: tuple[str, ...] = ()
    if place := _place_by_hand(sharding, one.source):
        hint = _correct(place)
        if fitting := _fitting_text(sharding, one):
            facts += fitting
        else:
            hint, options = f"{hint}, or --trust-strategy", _TRUST
    elif of_other_run:
        if min(map(len, groups)) > 1:
            facts += f"; whole groups differ: {sharding.origin} may be of another run"
        hint = "-s with the strategy of the run that saved the checkpoint"
    return Diagnostic(
        "replica",
        "different between ranks that should hold the same",
        hint=f"{hint}; {_REPLICA_EXPLAINED}",
        options=options,
        facts=facts,
        tensor=one.source.meta.name,
        ranks=odd_ranks(groups),
        where=catalog.root,
    )


def _place_by_hand(sharding: Sharding, source: Source) -> str:
    """Return file and line of the hand-written layout of a tensor or its parameter; "" if none."""
    handwritten = sharding.handwritten
    return handwritten.get(source.meta.name) or handwritten.get(source.parameter or "", "")


def _correct(place: str) -> str:
    """Return the hint to correct a hand-written line."""
    return f"correct {place}, or add a line above it for one tensor"


_MOST_LINES = 6  # of those that fit, in a message


def _fitting_text(sharding: Sharding, one: SampledTensor) -> str:
    """Return the hand-written layouts that fit the ranks with equal slices; "" if none does."""
    samples = chain.from_iterable(by_rank.values() for by_rank in one.samples)
    if one.is_spot_check or any(sample.is_constant for sample in samples):
        return ""
    assert isinstance(sharding, Strategy), "no other kind has hand-written layouts"
    stages = sharding.stages_of(one.source.parameter or one.source.meta.name)
    some = stages if len(stages) < sharding.stages else ()
    shape = next(tensor.meta.shape for ranks in one.replicas for tensor in ranks.values())
    lines = fitting_lines(one.source.layout, one.groups, shape, some)
    more = f" or {len(lines) - _MOST_LINES} more" if len(lines) > _MOST_LINES else ""
    choice = "; contents do not show axes and their order: take the shape of the model"
    choice = choice if lines[1:] else ""
    return f"; what fits: {' or '.join(lines[:_MOST_LINES])}{more}{choice}" if lines else ""


_REPLICA_EXPLAINED = "`ckpttool help replica` explains"


def _verify_command(catalog: Catalog, sharding: Sharding) -> str:
    """Return the command that shows the elements that differ."""
    options = ["--replicated"] if isinstance(sharding, Replicated) else []
    if isinstance(sharding, Strategy):
        files = sharding.files if 0 < len(sharding.files) < 3 else ["STRATEGY"]
        options = [word for name in files for word in ("-s", name)]
    options += ["--step", catalog.step] if catalog.step else []
    return shlex.join(["ckpttool", "verify", catalog.root, *options, "--deep"])


def _too_large_problem(
    sharding: Sharding, one: SampledTensor, text: str, hint: str, options: tuple[str, ...]
) -> Diagnostic:
    """Return the problem of a full tensor that would be too large, with its shapes."""
    shape = next(tensor.meta.shape for tensors in one.replicas for tensor in tensors.values())
    facts = f"{shape} would become {one.source.meta.shape}"
    problem = contradiction(sharding, text, facts, one.ranks)
    return replace(problem, tensor=one.source.meta.name, hint=hint, options=options)


_EQUAL = "slices that should differ are equal"


def _equal_slices_note(sharding: Sharding, one: SampledTensor, groups: RankGroups) -> Diagnostic:
    """Return the note on a tensor with equal slices."""
    are_all = groups == (one.ranks,)
    facts = f"{'all ranks' if are_all else format_groups(groups)} hold the same"
    hint = "the strategy of this run"
    place = _place_by_hand(sharding, one.source)
    if place:
        facts, hint = facts + _fitting_text(sharding, one), _correct(place)
    elif are_all:
        hint = "merge or split with --replicated if every rank holds the full model"
    hint += "; `ckpttool help equal_slices` explains"
    ranks, name = tuple(sorted(chain(*groups))), one.source.meta.name
    return Diagnostic("equal_slices", _EQUAL, hint=hint, facts=facts, tensor=name, ranks=ranks)


def _stage_problems(
    catalog: Catalog, sharding: Sharding, sources: Sequence[Source]
) -> Asking[list[Diagnostic]]:
    """Return the problem of each parameter that several stages hold and whose samples differ.

    Each stage has gradients of its own, so these are not compared.
    """
    pairs = [
        (source, other)
        for source, other in stage_pairs(catalog, sharding, sources)
        if source.meta == other.meta
        and source.meta.nbytes
        and not parse_name(source.meta.name).is_gradient
    ]
    boxes = yield from ask(sample_box, chain.from_iterable(pairs))
    return [
        Diagnostic(
            "replica",
            "different between stages that share it",
            hint=f"files of one step, or --trust-strategy; {_REPLICA_EXPLAINED}",
            options=("--trust-strategy",),
            facts=format_difference([source.layout.ranks, other.layout.ranks]),
            tensor=source.meta.name,
            ranks=(*source.layout.ranks, *other.layout.ranks),
            where=catalog.root,
        )
        for source, other in pairs
        if boxes[source] != boxes[other]
    ]


def strategy_notes(catalog: Catalog, strategy: Strategy) -> Iterator[Diagnostic]:
    """Yield a note if the manifest lists other strategy files, or cannot be read.

    A manifest lists the strategy files of the target last.
    """
    path = Path(catalog.root) / MANIFEST
    if not strategy.files or not is_file(path):
        return
    given = {sha256(read_file(name)).hexdigest() for name in strategy.files}
    try:
        provenance = ManifestFile.read(path).provenance()
        recorded = provenance.strategies[-len(strategy.files) :]
        either = [recorded, provenance.dst_strategies]
        if recorded and given not in [{one.sha256 for one in files} for files in either]:
            text = "not the strategy that the manifest names"
            facts = f"{path} names {recorded[-1].path}"
            hint = f"-s {recorded[-1].path}; `ckpttool help other_strategy` explains"
            yield Diagnostic("other_strategy", text, hint=hint, facts=facts, where=strategy.origin)
    except FormatError as error:
        (one,) = error.diagnostics
        facts = f"the manifest cannot show whether {strategy.origin} is its strategy"
        yield replace(one, code="other_strategy", facts=facts)
