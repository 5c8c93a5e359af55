"""Check samples of the data against the strategy.

A strategy file holds no shapes, and MindSpore's is not always true.  A run with
``optimizer_weight_shard_aggregated_save`` writes smaller slices than its strategy says.  Headers
cannot show this, but ranks that should hold equal slices hold different ones.

The largest tensors of each layout are sampled: some pages of every rank's slice.  Every other
tensor with replicas is spot-checked: three pages each of the first and the last owner of one slice.
These two differ with every hidden optimizer shard.

Slices that should differ may be equal by chance.  If all slices of all sharded tensors are equal,
every rank holds full tensors, as MindSpore saves by default (``integrated_save=True``).

The manifest of an output folder also names the strategy that it was written for.
"""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

from ckpttool.concurrency import wait_result
from ckpttool.errors import FormatError
from ckpttool.formats.local import is_file, read_file
from ckpttool.model.catalog import Catalog
from ckpttool.model.diagnostics import Diagnostic, diagnose
from ckpttool.model.manifest import MANIFEST
from ckpttool.model.optimizer_names import GRADIENTS, parameter_of
from ckpttool.model.slicing import LayoutSlicing, Slicing, Source
from ckpttool.model.strategy import Replicated, SelfDescribed, Sharding, Strategy
from ckpttool.model.tensors import StoredTensor
from ckpttool.model.wording import count, format_difference, format_groups, format_ranks
from ckpttool.planning.missing import is_deduplicated
from ckpttool.planning.optimizer_state import contradiction
from ckpttool.planning.replicas import odd_ranks, own_values_note, stage_pairs
from ckpttool.planning.sources import group_ranks
from ckpttool.storage.sampling import Sample, sample_box, take_samples
from ckpttool.transaction.manifest import ManifestFile

TENSORS_PER_LAYOUT = 3

Replicas = Sequence[Mapping[int, StoredTensor]]  # rank to stored slice, for each slice
RankGroups = tuple[tuple[int, ...], ...]  # ranks with equal slices, group by group


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
    def is_constant(self) -> bool:
        """Whether every sample has equal elements, so that equal slices show nothing."""
        return all(sample.is_constant for by_rank in self.samples for sample in by_rank.values())


def sample_tensors(
    sources: Iterable[Source], handwritten: Mapping[str, str], executor: Executor
) -> list[SampledTensor]:
    """Sample the largest tensors of each layout, and spot-check the others."""
    chosen, others = _choose_sources(sources, handwritten)
    all_slices = [(source, list(source.slicing.replicas())) for source in chosen]
    to_sample = [(source, slices, slices) for source, slices in all_slices]
    for source in others:
        largest = max(source.slicing.replicas(), key=len)
        to_sample.append((source, [largest], [_first_and_last(source, largest)]))
    tensors = (one for *_, slices in to_sample for ranks in slices for one in ranks.values())
    samples = _sample(tensors, executor)
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
            if not source.meta.name.startswith(GRADIENTS) and _has_replicas(source)
        ]
    return chosen, others


def _sampling_order(source: Source) -> tuple[bool, int]:
    """Order parameters before states, which may be sums of one rank, and large before small."""
    return parameter_of(source.meta.name) is not None, -source.meta.nbytes


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


def _sample(tensors: Iterable[StoredTensor], executor: Executor) -> Mapping[StoredTensor, Sample]:
    """Sample tensors, one task for each file so that it is opened once."""
    by_path: dict[str, list[StoredTensor]] = defaultdict(list)
    for tensor in dict.fromkeys(tensors):
        by_path[tensor.file.path].append(tensor)
    futures = [(group, executor.submit(take_samples, group)) for group in by_path.values()]
    samples: dict[StoredTensor, Sample] = {}
    for group, future in futures:
        taken = wait_result(future)
        samples.update(zip(group, taken, strict=True))
    return samples


MIN_EQUAL_BYTES = 4096  # smaller slices may be equal by design, such as a table of signs


def check_strategy(
    catalog: Catalog, sharding: Sharding, sources: Iterable[Source], executor: Executor
) -> list[Diagnostic]:
    """Return the problems and notes of layouts that samples contradict.

    Replicas that differ are a problem, since one of them would be written, perhaps the wrong one.
    Parameters that differ between stages are a problem for the same reason.  Equal slices of an
    optimizer shard are a problem, since the full tensor would be too large.  Other equal slices
    that should differ are a warning, since they may be equal by chance.  They are a problem if most
    of the sampled sharded tensors have them.
    """
    handwritten = sharding.handwritten
    sources = list(sources)
    sampled = sample_tensors(sources, handwritten, executor)
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
    notes: list[Diagnostic] = []
    in_full: list[SampledTensor] = []
    for one in sampled:
        name = one.source.meta.name
        by_rank = {rank: sample for samples in one.samples for rank, sample in samples.items()}
        if one.differing_groups:
            place = handwritten.get(name) or handwritten.get(one.source.parameter or "")
            found.append(_replica_problem(catalog, sharding, place, one, of_other_run))
        elif one.is_spot_check or isinstance(sharding, SelfDescribed):
            continue
        elif _has_equal_shards(one.source.slicing, by_rank):
            text = "sharded further in the strategy than in the files"
            found.append(_too_large_problem(sharding, one, text))
        elif groups := _equal_slices(one):
            are_all = groups == (one.ranks,)
            notes.append(_equal_slices_note(name, handwritten.get(name), groups, are_all))
            in_full += [one] * are_all
    found += _stage_problems(catalog, sharding, sources, executor)
    if in_full and _are_all_equal(sampled, handwritten):
        text = "sharded in the strategy, and in full on all ranks"
        hint = "merge or split with --replicated, without -s; `ckpttool help contradicted` explains"
        too_large = (_too_large_problem(sharding, one, text) for one in in_full)
        return [*found, *(replace(problem, hint=hint) for problem in too_large)]
    if problems := _equal_slices_problems(sharding, sampled, notes):
        return [*found, *problems]
    missing = [rank for rank in sharding.ranks if rank not in catalog.files]
    if missing and notes and not is_deduplicated(catalog, sharding):
        # Either may be by chance; both together show a strategy of other files.
        absent = f"{format_ranks(missing)} without a file; "
        notes = [
            _contradict(sharding, replace(note, facts=absent + note.facts, ranks=tuple(missing)))
            for note in notes
        ]
    return [*found, *notes]


def _contradict(sharding: Sharding, one: Diagnostic) -> Diagnostic:
    """Return the problem that the strategy contradicts what is true of a tensor."""
    return replace(contradiction(sharding, one.message, one.facts, one.ranks), tensor=one.tensor)


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
        for sample in dict.fromkeys(samples.values()):
            slices[sample] += 1
            ranks[sample] += samples
    return tuple(
        tuple(sorted(ranks[sample]))
        for sample, number in slices.items()
        if number > 1 and not sample.is_constant
    )


def _are_all_equal(sampled: Iterable[SampledTensor], handwritten: Mapping[str, str]) -> bool:
    """Return whether all slices of every sharded tensor are equal, so that ranks hold full tensors.

    Constant tensors do not count.  A hand-written layout is evidence against it.
    """
    nbytes = 0
    for one in sampled:
        if one.is_spot_check or len(one.replicas) == 1 or one.is_constant:
            continue
        different = {sample for samples in one.samples for sample in samples.values()}
        if len(different) > 1 or one.source.meta.name in handwritten:
            return False
        nbytes += one.source.meta.nbytes // len(one.replicas)
    return nbytes >= MIN_EQUAL_BYTES


def _equal_slices_problems(
    sharding: Sharding, sampled: Iterable[SampledTensor], notes: Iterable[Diagnostic]
) -> list[Diagnostic]:
    """Return the problems of a strategy that most of the sampled tensors contradict, if they do.

    A tensor contradicts it if two slices that should differ are equal, as ``notes`` say.  Constant
    tensors and hand-written layouts do not count.
    """
    nbytes_of = {
        one.source.meta.name: one.source.meta.nbytes
        for one in sampled
        if not one.is_spot_check
        and len(one.replicas) > 1
        and one.source.meta.name not in sharding.handwritten
        and not one.is_constant
    }
    equal = {note.tensor: note for note in notes if note.tensor in nbytes_of}
    nbytes = sum(nbytes for name, nbytes in nbytes_of.items() if name in equal)
    if 2 * len(equal) <= len(nbytes_of) or nbytes < MIN_EQUAL_BYTES:
        return []
    text = f"{_EQUAL}, in {len(equal)} of {count(len(nbytes_of), 'sampled tensor')}"
    return [_contradict(sharding, replace(note, message=text)) for note in equal.values()]


def _replica_problem(
    catalog: Catalog, sharding: Sharding, place: str | None, one: SampledTensor, of_other_run: bool
) -> Diagnostic:
    """Return the problem of a tensor whose replicas differ.

    ``place`` is that of its hand-written layout.  Whole groups of ranks differ in this or another
    tensor if the strategy may be ``of_other_run``.
    """
    groups = one.differing_groups
    facts = format_difference(groups)
    hint = f"`{_verify_command(catalog, sharding)}`, which shows the elements"
    if of_other_run:
        if min(map(len, groups)) > 1:
            facts += f"; whole groups differ: {sharding.origin} may be of another run"
        hint = "-s with the strategy of the run that saved the checkpoint"
    options: tuple[str, ...] = ()
    if place is not None:
        hint, options = f"correct {place}, or --trust-strategy", ("--trust-strategy",)
    return Diagnostic(
        "replica",
        "different between ranks that should hold the same",
        f"{hint}; {_REPLICA_EXPLAINED}",
        options,
        facts,
        tensor=one.source.meta.name,
        ranks=odd_ranks(groups),
        where=catalog.root,
    )


_REPLICA_EXPLAINED = "`ckpttool help replica` explains"


def _verify_command(catalog: Catalog, sharding: Sharding) -> str:
    """Return the command that shows the elements that differ."""
    options = ["--replicated"] if isinstance(sharding, Replicated) else []
    if isinstance(sharding, Strategy):
        files = sharding.files if 0 < len(sharding.files) < 3 else ["STRATEGY"]
        options = [word for name in files for word in ("-s", name)]
    options += ["--step", catalog.step] if catalog.step else []
    return shlex.join(["ckpttool", "verify", catalog.root, *options, "--deep"])


def _too_large_problem(sharding: Sharding, one: SampledTensor, text: str) -> Diagnostic:
    """Return the problem of a full tensor that would be too large, with its shapes."""
    shape = next(tensor.meta.shape for tensors in one.replicas for tensor in tensors.values())
    facts = f"{shape} would become {one.source.meta.shape}"
    return replace(contradiction(sharding, text, facts, one.ranks), tensor=one.source.meta.name)


_EQUAL = "slices that should differ are equal"


def _equal_slices_note(
    name: str, place: str | None, groups: RankGroups, are_all: bool
) -> Diagnostic:
    """Return the note on a tensor with equal slices; ``place`` is its hand-written layout's."""
    facts = f"{'all ranks' if are_all else format_groups(groups)} hold the same"
    hint = "the strategy of this run"
    if place is not None:
        hint = f"`replicated` in {place}, or above it for one tensor, if all ranks hold it in full"
    elif are_all:
        hint = "merge or split with --replicated if every rank holds the full model"
    hint += "; `ckpttool help equal_slices` explains"
    ranks = tuple(sorted(rank for group in groups for rank in group))
    return Diagnostic("equal_slices", _EQUAL, hint, facts=facts, tensor=name, ranks=ranks)


def _stage_problems(
    catalog: Catalog, sharding: Sharding, sources: Sequence[Source], executor: Executor
) -> Iterator[Diagnostic]:
    """Yield the problem of each parameter that several stages hold and whose samples differ.

    Each stage has gradients of its own, so these are not compared.
    """
    pairs = [
        (source, other)
        for source, other in stage_pairs(catalog, sharding, sources)
        if source.meta == other.meta
        and source.meta.nbytes
        and not source.meta.name.startswith(GRADIENTS)
    ]
    futures = [tuple(executor.submit(sample_box, source) for source in pair) for pair in pairs]
    for (source, other), pair in zip(pairs, futures, strict=True):
        first, second = (wait_result(future) for future in pair)
        if first != second:
            ranks = source.layout.ranks, other.layout.ranks
            yield Diagnostic(
                "replica",
                "different between stages that share it",
                f"files of one step, or --trust-strategy; {_REPLICA_EXPLAINED}",
                ("--trust-strategy",),
                format_difference(ranks),
                tensor=source.meta.name,
                ranks=(*ranks[0], *ranks[1]),
                where=catalog.root,
            )


def strategy_notes(catalog: Catalog, strategy: Strategy) -> Iterator[Diagnostic]:
    """Yield a note if the manifest lists other strategy files, or cannot be read.

    A manifest lists the strategy files of the target last.
    """
    path = Path(catalog.root) / MANIFEST
    if not strategy.files or not is_file(path):
        return
    given = {sha256(read_file(name)).hexdigest() for name in strategy.files}
    try:
        provenance = ManifestFile.read(path).head.provenance()
        recorded = provenance.strategies[-len(strategy.files) :]
        either = [recorded, provenance.dst_strategies]
        if recorded and given not in [{one.sha256 for one in files} for files in either]:
            text = "not the strategy that the manifest names"
            facts = f"{path} names {recorded[-1].path}"
            hint = f"-s {recorded[-1].path}; `ckpttool help other_strategy` explains"
            yield Diagnostic("other_strategy", text, hint, facts=facts, where=strategy.origin)
    except FormatError as error:
        (one,) = diagnose(error)
        facts = f"the manifest cannot show whether {strategy.origin} is its strategy"
        yield replace(one, code="other_strategy", facts=facts)
