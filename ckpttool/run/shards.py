"""Finds optimizer shards that the strategy hides, from replicas that are none.

Saved with ``optimizer_weight_shard_aggregated_save`` the slices are cut by the optimizer shard, and
the strategy says 0.  Of the ranks that should hold equal slices, those at positions ``p`` and
``p + s`` of the replica group do if the shard is ``s``, and all others differ.  A tensor whose
elements are all the same tells nothing, but it has as many rows as its parameter or its states,
which may tell.  Gradients (``accu_grads``) with more rows than their parameter prove a shard.

Replicas that drifted apart look the same, so it is a question where something speaks for them; see
`ckpttool.run.drift`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial

from ckpttool.formats.stopping import result_of
from ckpttool.model.catalog import format_ranks
from ckpttool.model.notes import Note
from ckpttool.model.reduced import reduced_from
from ckpttool.model.source import LayoutSlicing, Source
from ckpttool.model.strategy import GRADIENTS, Strategy, count, shorten
from ckpttool.run.drift import why_unproven
from ckpttool.run.verdicts import (
    Contents,
    contradictions,
    divisors,
    possible_shards,
    questions,
    settle_constants,
    shard_of,
    shards_by_gradients,
    smallest_shard,
)
from ckpttool.storage.digest import Sample, digest, sample

BUFFER_BYTES = 4 << 20  # held by each worker


@dataclass(frozen=True, slots=True)
class Shards:
    """What the contents say: the corrected strategy, a note, and what they do not tell.

    ``names`` are those that the problems are about.
    """

    strategy: Strategy
    notes: tuple[Note, ...] = ()
    problems: tuple[str, ...] = ()
    names: frozenset[str] = frozenset()


def find_shards(
    strategy: Strategy,
    sources: Iterable[Source],
    executor: Executor,
    wanted: int | None,
    by_samples: bool = False,
) -> Shards | None:
    """The strategy, with the optimizer shards that replicas show; None if that explains nothing.

    Parameters
    ----------
    strategy
        Of the source.
    sources
        As the strategy has them; of those without an optimizer shard every replica is read, some
        pages first, and all of it if a shard may be proven by that.  What a person wrote by hand is
        not corrected.
    executor
        Does the reading.
    wanted
        The shard that the user names, 1 for none.  It decides where contents tell nothing, or fit
        several ways; what contradicts it is a problem.  See `shard_of`.
    by_samples
        Pages are enough.
    """
    listed = _candidates(strategy, sources)
    if wanted is not None and (problem := _why_not(listed, wanted, len(strategy.ranks))):
        names = frozenset(source.meta.name for source in listed)
        return Shards(strategy, problems=(problem,), names=names)
    if wanted == 1:
        return None
    if wanted is None or by_samples:
        contents = _read(listed, executor, by_samples=True)
        told = _judge(strategy, listed, contents, executor, wanted)
        if by_samples or _is_final(told, listed, contents, executor):
            return told
    contents = _read(listed, executor, by_samples=False)
    return _judge(strategy, listed, contents, executor, wanted)


def show_shard(strategy: Strategy, sources: Iterable[Source]) -> bool:
    """Whether shapes alone prove that slices are cut by an optimizer shard that is not listed."""
    return bool(shards_by_gradients(_candidates(strategy, sources)))


def _candidates(strategy: Strategy, sources: Iterable[Source]) -> list[Source]:
    return [
        source
        for source in sources
        if _can_be_cut(source) and source.meta.name not in strategy.by_hand
    ]


def _is_final(
    told: Shards | None, listed: Sequence[Source], contents: Sequence[Contents], executor: Executor
) -> bool:
    """Whether samples tell what everything would, or ask; a proof needs everything.

    That no shard explains the replicas holds if it holds of all of one tensor.
    """
    found = _shards(listed, contents)
    if told is not None:
        return bool(told.problems) and None not in found
    odd = [source for source, shard in zip(listed, found, strict=True) if shard == 0]
    least = sorted(odd, key=lambda source: source.meta.nbytes)[:1]
    return 0 in _shards(least, _read(least, executor, by_samples=False))


def _shards(listed: Sequence[Source], contents: Sequence[Contents]) -> list[int | None]:
    """What each tensor by itself shows, or if it tells nothing the shape of its gradients."""
    by_shape = shards_by_gradients(listed)
    seen = [
        None if possible_shards(one, held) else smallest_shard(one.layout, held)
        for one, held in zip(listed, contents, strict=True)
    ]
    return [
        by_shape.get(source.meta.name) if shard is None else shard
        for source, shard in zip(listed, seen, strict=True)
    ]


def _judge(
    strategy: Strategy,
    listed: Sequence[Source],
    contents: Sequence[Contents],
    executor: Executor,
    wanted: int | None,
) -> Shards | None:
    """What `find_shards` finds, as far as these contents tell."""
    found = _shards(listed, contents)
    ways = {
        source.meta.name: possible
        for source, shard, held in zip(listed, found, contents, strict=True)
        if shard is None and (possible := possible_shards(source, held))
    }
    are_whole = all(shard in (None, 1) for shard in found)
    if wanted is None and (0 in found or (are_whole and all(1 in of for of in ways.values()))):
        return None
    if wanted is not None and (shards := _contradicting(strategy, listed, found, wanted)):
        return shards
    if wanted is None and not _is_one_shard(strategy, listed, found):
        return None
    shards_of = {
        source.meta.name: shard
        for source, shard in zip(listed, found, strict=True)
        if shard is not None
    }
    unclear, decided = settle_constants(listed, shards_of, wanted)
    odd = contradictions(listed, shards_of)
    if odd and wanted is not None:
        text = f"{shorten(odd)}: with --optimizer-shard {wanted}, and as contents show, they would "
        text += "have other rows than their parameters"
        return Shards(strategy, problems=(text,), names=frozenset(odd))
    if odd:
        return None
    if wanted is None and (why := why_unproven(listed, contents, shards_of, executor)):
        return _question(strategy, listed, shards_of, why)
    cut = {name: shard for name, shard in shards_of.items() if shard > 1}
    names = frozenset(source.meta.name for source in unclear)
    notes = (
        *_on_too_many(listed, wanted),
        *_on_proven(cut, decided),
        *_on_decided(shards_of, decided, wanted),
    )
    return Shards(_corrected(strategy, cut), notes, questions(unclear, ways), names)


def _is_one_shard(
    strategy: Strategy, listed: Sequence[Source], found: Sequence[int | None]
) -> bool:
    """Whether one optimizer shard of the run explains those of all tensors.

    The run has one shard, which fewer replicas limit (`shard_of`), and a strategy hides it from all
    tensors or from none.
    """
    cut = {
        (source.layout, shard)
        for source, shard in zip(listed, found, strict=True)
        if shard is not None and shard > 1 and not source.meta.name.startswith(GRADIENTS)
    }
    is_listed = any(
        layout.optimizer_shard > 1
        for name, layouts in strategy.layouts.items()
        if not name.startswith(GRADIENTS)
        for layout in layouts
    )
    if cut and is_listed:
        return False
    return any(
        all(shard == shard_of(layout, wanted) for layout, shard in cut)
        for wanted in divisors(max((layout.replicas for layout, _ in cut), default=1))
    )


def _corrected(strategy: Strategy, cut: Mapping[str, int]) -> Strategy:
    """The strategy with these optimizer shards."""
    layouts = {
        name: tuple(replace(layout, optimizer_shard=cut.get(name, 1)) for layout in of_stages)
        if name in cut
        else of_stages
        for name, of_stages in strategy.layouts.items()
    }
    return replace(strategy, layouts=layouts)


def _why_not(listed: Sequence[Source], wanted: int, ranks: int) -> str | None:
    """Why no optimizer shard of ``wanted`` can be: there are no replicas that it divides.

    More than there are replicas are all of them (see `shard_of`); of more than there are ranks
    MindSpore compiles nothing.
    """
    replicas = [source.layout.replicas for source in listed]
    if wanted <= ranks and any(n % min(wanted, n) == 0 for n in replicas):
        return None
    if not listed:
        return (
            f"--optimizer-shard {wanted}: no parameter has replicas that the strategy leaves uncut"
        )
    most = max(replicas)
    named = shorten(source.meta.name for source in listed if source.layout.replicas == most)
    return (
        f"{named}: --optimizer-shard {wanted} does not divide the {most} replicas; possible "
        f"are {', '.join(map(str, divisors(most)))}"
    )


def _contradicting(
    strategy: Strategy, listed: Sequence[Source], found: Sequence[int | None], wanted: int
) -> Shards | None:
    """The problem of tensors that show another shard than ``wanted``, if there are any."""
    odd = {
        source.meta.name: shard
        for source, shard in zip(listed, found, strict=True)
        if shard not in (None, 1, shard_of(source.layout, wanted))
    }
    if not odd:
        return None
    named = shorten(f"{name} ({shard or 'none at all'})" for name, shard in odd.items())
    text = f"--optimizer-shard {wanted}, but ranks hold slices of another optimizer shard: {named}"
    return Shards(strategy, problems=(text,), names=frozenset(odd))


def _question(
    strategy: Strategy, listed: Sequence[Source], shards: Mapping[str, int], why: str
) -> Shards:
    """The problem of replicas that differ and may be slices; it lists the ways."""
    cut = [source for source in listed if shards.get(source.meta.name, 1) > 1]
    names = [source.meta.name for source in cut]
    first, shard = cut[0], shards[names[0]]
    owners = next(iter(first.layout.slice_indices()))
    ranks = format_ranks(first.layout.owners(owners))
    text = (
        f"{shorten(names)}: the strategy says that {ranks} hold the same, and they differ, which "
        f"fits two ways ({why}): replicas that drifted apart or are not of one step "
        f"({first.meta.name}: full shape {first.meta.shape}; take the lowest rank's with "
        "--trust-strategy), or slices of an optimizer shard that the strategy does not list "
        f"({first.meta.name}: full shape {(first.meta.shape[0] * shard, *first.meta.shape[1:])}; "
        f"say so with --optimizer-shard {max(shards[name] for name in names)})"
    )
    return Shards(strategy, problems=(text,), names=frozenset(names))


def _can_be_cut(source: Source) -> bool:
    if not isinstance(source.slicing, LayoutSlicing):
        return False  # the checkpoint describes it
    layout, shape = source.layout, source.meta.shape
    is_cut = layout.optimizer_shard > 1 or not layout.is_even
    if reduced_from(source.meta.name) is not None:
        return False  # it is cut like its parameter
    is_cut = is_cut or layout.full_shape is not None  # which tells
    return (
        source.is_listed and not is_cut and layout.replicas > 1 and bool(shape) and 0 not in shape
    )


def _read(
    sources: Sequence[Source], executor: Executor, by_samples: bool
) -> list[dict[int, Sample]]:
    """Return the contents of each rank's slice, for each source."""
    look = sample if by_samples else partial(digest, buffer_bytes=BUFFER_BYTES)
    futures = [
        {
            rank: executor.submit(look, tensor)
            for ranks in source.slicing.replicas()
            for rank, tensor in ranks.items()
        }
        for source in sources
    ]
    return [{rank: result_of(future) for rank, future in of.items()} for of in futures]


def _on_proven(cut: Mapping[str, int], decided: Sequence[str]) -> Iterator[Note]:
    told = {name: shard for name, shard in cut.items() if name not in decided}
    if told:
        ways = ", ".join(str(shard) for shard in sorted(set(told.values())))
        text = f"cut by an optimizer shard ({ways}) that the strategy does not list, as replicas "
        text += f"that differ or shapes tell: {count(len(told), 'parameter')}: {shorten(told)}"
        text += "; is it not the strategy of this run (inspect -s shows the full shapes), give the "
        text += "one that is; are they replicas that drifted apart, say --optimizer-shard 1"
        yield Note("corrected", text, is_warning=True)


def _on_too_many(listed: Sequence[Source], wanted: int | None) -> Iterator[Note]:
    """What becomes of a shard that is larger than any parameter has replicas."""
    most = max((source.layout.replicas for source in listed), default=1)
    if wanted is not None and wanted > most:
        text = (
            f"--optimizer-shard {wanted}: no parameter has more than {most} replicas, so each is "
        )
        yield Note("corrected", f"{text}cut by all of its own, as in MindSpore")


def _on_decided(
    shards: Mapping[str, int], decided: Sequence[str], wanted: int | None
) -> Iterator[Note]:
    """What was done to tensors of which nothing but the user's word tells."""
    cut = [name for name in decided if shards[name] > 1]
    whole = [name for name in decided if shards[name] == 1]
    does = {"cut": cut, "whole, for it does not divide their replicas": whole}
    said = "; ".join(f"{how}: {shorten(names)}" for how, names in does.items() if names)
    if said:
        text = f"nothing else tells, so --optimizer-shard {wanted} alone decides: {said}"
        text += "; say by hand of those that are whole that they are `replicated` (-s MORE.yaml)"
        yield Note("corrected", text, is_warning=True)
