"""What speaks for it that ranks hold replicas that drifted apart, and no slices.

Replicas that drifted apart, or of which some are stale, look like slices of an optimizer shard that
the strategy hides.  Which they are is no guess to be made, so it is a question where one of these
speaks for them:

- two ranks that differ, and nothing else;
- a tensor that is whole although it is as large as one that would be cut, and its rows divide.
  MindSpore leaves whole what is small (``parallel_optimizer_threshold``), what stages share, what
  does not divide, and by ``parallel_optimizer=False`` what the user names;
- slices that are nearly the same numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Executor

from ckpttool.formats.stopping import result_of
from ckpttool.model.catalog import StoredTensor
from ckpttool.model.source import Source
from ckpttool.model.strategy import GRADIENTS, parameter_of, shorten
from ckpttool.run.verdicts import Contents, shards_by_gradients
from ckpttool.storage.digest import nearness


def why_unproven(
    listed: Sequence[Source],
    contents: Sequence[Contents],
    shards: Mapping[str, int],
    executor: Executor,
) -> str | None:
    """What speaks for replicas that drifted apart, or None if slices are proven."""
    cut = [source for source in listed if shards.get(source.meta.name, 1) > 1]
    if not cut or shards_by_gradients(listed):  # which nothing contradicts
        return None
    telling = [source.layout.replicas for source in cut if shards[source.meta.name] == 2]
    if len(telling) == len(cut) and set(telling) == {2}:
        return "only two ranks differ"
    smallest = min(cut, key=lambda one: one.meta.nbytes * shards[one.meta.name])
    nbytes = smallest.meta.nbytes * shards[smallest.meta.name]
    is_all = shards[smallest.meta.name] == smallest.layout.replicas
    whole = [
        source.meta.name
        for source, held in zip(listed, contents, strict=True)
        if shards.get(source.meta.name) == 1
        and not all(sample.is_constant for sample in held.values())
        and not source.meta.name.startswith(GRADIENTS)
        and source.meta.nbytes >= nbytes
        and _divides(source, source.layout.replicas if is_all else shards[smallest.meta.name])
    ]
    if whole:
        text = f"{shorten(whole, 3)}, as large as {smallest.meta.name}, would be cut, too, and "
        return f"{text}{'is' if len(whole) == 1 else 'are'} the same on these ranks"
    return _why_near(
        cut, [held for one, held in zip(listed, contents, strict=True) if one in cut], executor
    )


def _divides(source: Source, shard: int) -> bool:
    return source.meta.shape[0] % shard == 0 and source.layout.replicas % shard == 0


def _why_near(
    cut: Sequence[Source], contents: Sequence[Contents], executor: Executor
) -> str | None:
    """Says so if most numbers of two slices of the parameters are nearly the same."""
    pairs = [
        (source, pair)
        for source, held in zip(cut, contents, strict=True)
        if (pair := _two_that_differ(source, held)) is not None
    ]
    weights = [pair for pair in pairs if parameter_of(pair[0].meta.name) is None] or pairs
    futures = [(source, executor.submit(nearness, *pair)) for source, pair in weights]
    near = total = 0.0
    for source, future in futures:
        share = result_of(future)
        if share is not None:
            total += source.meta.nbytes
            near += share * source.meta.nbytes
    return "most of the numbers are nearly the same" if near * 2 > total else None


def _two_that_differ(source: Source, held: Contents) -> tuple[StoredTensor, StoredTensor] | None:
    """What two owners of a slice hold, if neither is constant and they differ."""
    for ranks in source.slicing.replicas():
        seen = [rank for rank in ranks if not held[rank].is_constant]
        other = next((rank for rank in seen if held[rank] != held[seen[0]]), None)
        if other is not None:
            return ranks[seen[0]], ranks[other]
    return None
