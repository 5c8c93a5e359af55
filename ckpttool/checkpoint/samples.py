"""Samples of the slices that replicas and layouts are checked against.

The largest tensors of each layout are sampled: some pages of every rank's slice.  Every other
tensor with replicas is spot-checked: three pages each of the first and the last owner of one slice.
These two differ with every hidden optimizer shard.  Tensors that stages share are compared too.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from ckpttool.checkpoint.evidence import Asking, ask
from ckpttool.checkpoint.interpret import group_ranks
from ckpttool.model.names import parse_name
from ckpttool.model.slicing import BoxSlicing, FullTensor, LayoutSlicing, RankGroups, Slicing
from ckpttool.model.tensors import StoredTensor

if TYPE_CHECKING:
    from ckpttool.storage.sampling import Sample

TENSORS_PER_LAYOUT = 3
CHANCE_BITS = 64  # of a slice, as few as those of a mask; one in 2**64 does not happen

Replicas = Sequence[Mapping[int, StoredTensor]]  # rank to stored slice, for each slice


class SampledTensor(Struct, frozen=True, gc=False):
    """A full tensor with samples of its slices."""

    tensor: FullTensor
    sampled: RankGroups  # the ranks of each slice that were sampled; few in a spot check
    all_samples: tuple[Sample, ...]  # of these ranks, in their order
    is_spot_check: bool  # only one slice was sampled

    @property
    def samples(self) -> tuple[Mapping[int, Sample], ...]:
        """Rank to sample, for each slice."""
        samples = iter(self.all_samples)
        return tuple(dict(zip(ranks, samples, strict=False)) for ranks in self.sampled)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The sampled ranks, ascending."""
        return tuple(sorted({*chain(*self.sampled)}))

    @property
    def slice_shape(self) -> tuple[int, ...]:
        """The shape of the first sampled slice."""
        first = next(chain(*self.sampled))
        slices = (ranks[first] for ranks in self.tensor.slicing.replicas() if first in ranks)
        return next(slices).meta.shape

    @property
    def differing_groups(self) -> RankGroups:
        """Ranks that should hold equal slices and do not, by equal samples; () if there are none.

        They are those of the first slice whose replicas differ.
        """
        for samples in self.samples:
            if len({*samples.values()}) > 1:
                return tuple(group_ranks(tuple(samples), samples.__getitem__).values())
        return ()

    @property
    def groups(self) -> RankGroups:
        """All sampled ranks, grouped by equal samples."""
        by_rank = {rank: sample for samples in self.samples for rank, sample in samples.items()}
        return tuple(group_ranks(sorted(by_rank), by_rank.__getitem__).values())

    @property
    def is_constant(self) -> bool:
        """Whether every sample has equal elements, so that equal slices show nothing."""
        return all(sample.is_constant for sample in self.all_samples)

    @property
    def nbytes(self) -> float:
        """Bytes of the full tensor, by how many different values its elements could have had."""
        bits = max((sample.element_bits for sample in self.all_samples), default=0)
        return math.prod(self.tensor.meta.shape) * bits / 8

    @property
    def may_be_equal_by_chance(self) -> bool:
        """Whether its slices could have had so few values that equal ones show nothing."""
        return self.nbytes * 8 < CHANCE_BITS * len(self.sampled)


def sample_tensors(
    tensors: Iterable[FullTensor], handwritten: Mapping[str, str]
) -> Asking[list[SampledTensor]]:
    """Sample the largest tensors of each layout, and spot-check the others."""
    from ckpttool.storage.sampling import sample

    chosen, rest = _choose_tensors(tensors, handwritten)
    known: dict[Hashable, Collection[int]] = {}

    def to_sample() -> Iterator[tuple[FullTensor, Replicas, bool]]:
        """Yield the tensors with their slices, made each time: those of all take much memory."""
        for tensor in chosen:
            yield tensor, [*tensor.slicing.replicas()], False
        for tensor in rest:
            yield tensor, [_first_and_last(tensor, known)], True

    stored = (
        tensor for _, slices, _ in to_sample() for ranks in slices for tensor in ranks.values()
    )
    samples = yield from ask(sample, stored)
    shared: dict[RankGroups, RankGroups] = {}  # one object for all tensors of a layout
    sampled = []
    for tensor, slices, is_spot_check in to_sample():
        ranks = tuple(map(tuple, slices))
        of_tensor = tuple(samples[stored] for ranks_of in slices for stored in ranks_of.values())
        sampled.append(
            SampledTensor(tensor, shared.setdefault(ranks, ranks), of_tensor, is_spot_check)
        )
    return sampled


def _choose_tensors(
    tensors: Iterable[FullTensor], handwritten: Mapping[str, str]
) -> tuple[list[FullTensor], list[FullTensor]]:
    """Return the tensors to sample in all slices, and those with replicas to spot-check.

    The largest tensors of a layout are sampled, since small ones are often sharded differently.
    All hand-written layouts are sampled, since a pattern may match too many names.
    """
    by_layout: dict[Hashable, list[FullTensor]] = defaultdict(list)
    chosen = []
    for tensor in tensors:
        if not tensor.meta.nbytes:
            continue
        if tensor.meta.name in handwritten:
            chosen.append(tensor)
        elif tensor.has_layout:
            by_layout[tensor.slicing.distribution_key].append(tensor)
    spot_checked: list[FullTensor] = []
    for group in by_layout.values():
        group.sort(key=sampling_order)
        chosen += group[:TENSORS_PER_LAYOUT]
        rest = group[TENSORS_PER_LAYOUT:]
        if any(len(ranks) > 1 for ranks in group[0].slicing.owners()):
            spot_checked += [
                tensor for tensor in rest if not parse_name(tensor.meta.name).is_gradient
            ]
    return chosen, spot_checked


def sampling_order(tensor: FullTensor) -> tuple[bool, int]:
    """Order parameters before states, which may be sums of one rank, and large before small."""
    return parse_name(tensor.meta.name).same_shape_parameter is not None, -tensor.meta.nbytes


def _first_and_last(
    tensor: FullTensor, known: dict[Hashable, Collection[int]]
) -> dict[int, StoredTensor]:
    """Return the first and the last replica of the slice with most of them on disk.

    Return all replicas if some are missing.  The first and the last of ``n`` replicas hold
    different slices of any optimizer shard, since a divisor of ``n`` does not divide ``n - 1``.
    Owners that are left may hold equal slices.  ``known`` has the ranks of tensors with equal
    layouts on equal ranks.
    """
    slicing = tensor.slicing
    if not isinstance(slicing, LayoutSlicing):
        largest = max(slicing.replicas(), key=len)
        return {rank: largest[rank] for rank in _ends(largest, slicing)}
    files = slicing.files
    key = slicing.layout, tuple(files)
    if key not in known:
        known[key] = _ends(
            max((holding.holders for holding in slicing.holdings()), key=len), slicing
        )
    return {rank: files[rank][slicing.name] for rank in known[key]}


def _ends(ranks: Collection[int], slicing: Slicing) -> Collection[int]:
    are_all = len(ranks) == max(map(len, slicing.owners()))
    return (min(ranks), max(ranks)) if are_all else ranks


# Parameters of MindFormers' MoE and attention in PyNative that every rank changes for itself, by
# the last component of their names.  ``expert_bias`` and ``tid2eid`` are saved in the same way, and
# are equal on all ranks.
_OWN_STATISTICS = frozenset(
    {"tokens_per_expert", "global_tokens_per_expert", "ga_steps", "max_logits_val"}
)


def has_own_values(tensor: FullTensor) -> bool:
    """Return whether replicas of a tensor differ by design."""
    is_described = isinstance(tensor.slicing, BoxSlicing)
    return is_described and parse_name(tensor.name).last in _OWN_STATISTICS


def stage_pairs(tensors: Iterable[FullTensor]) -> Iterator[tuple[FullTensor, FullTensor]]:
    """Yield a listed tensor with that of each other stage, for tensors that several stages hold."""
    for tensor in tensors:
        for copy in tensor.copies if tensor.is_listed else ():
            yield tensor, replace(tensor, slicing=copy, copies=())


def sample_stages(
    tensors: Iterable[FullTensor],
) -> Asking[tuple[tuple[FullTensor, FullTensor], ...]]:
    """Return the pairs of stages whose samples differ.

    Each stage has gradients of its own, so these are not compared.
    """
    from ckpttool.storage.sampling import sample_box

    pairs = [
        pair
        for pair in stage_pairs(tensors)
        if pair[0].meta.nbytes and not parse_name(pair[0].name).is_gradient
    ]
    boxes = yield from ask(sample_box, chain.from_iterable(pairs))
    return tuple(pair for pair in pairs if boxes[pair[0]] != boxes[pair[1]])
