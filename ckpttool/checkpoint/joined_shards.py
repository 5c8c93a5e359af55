"""Optimizer shards that the strategy lists and files no longer have (``--optimizer-shard 1``).

Files whose optimizer shards were joined hold larger slices than the strategy says, and ranks of a
shard hold equal ones.  Contents decide for each tensor, since weights may be joined and states not:

- Ranks of a shard hold equal slices: it was joined.
- They hold different ones, as the strategy says: it keeps its shard.
- A state is smaller than its parameter by the shard: it keeps its shard, and the parameter was
  joined.  A state of the same size is what its parameter is.

Where the other ranks of each shard are missing, or all elements are equal, nothing decides.  Then
the tensor is read as joined because the user says so, with a warning that names both shapes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ckpttool.checkpoint.evidence import Asking
from ckpttool.checkpoint.hidden_shards import (
    InferredStrategy,
    inconsistent_states,
    match_parameters,
    may_be_sharded,
    sample_slices,
    set_shards,
    shown_shards,
    undecided_strategy,
)
from ckpttool.model.slicing import FullTensor
from ckpttool.model.strategy import Strategy
from ckpttool.problems import Diagnostic
from ckpttool.wording import count, shorten

_NONE = "optimizer shard 1"


def without_listed_shards(strategy: Strategy) -> Strategy:
    """Return the strategy without the optimizer shards that it lists; hand-written ones stay."""
    return set_shards(strategy, dict.fromkeys(_names(strategy), 1))


def _names(strategy: Strategy) -> list[str]:
    return [
        name
        for name, layouts in strategy.layouts.items()
        if name not in strategy.handwritten
        and any(layout.optimizer_shard > 1 for layout in layouts)
    ]


def find_joined_shards(
    strategy: Strategy, tensors: Sequence[FullTensor], by_samples: bool
) -> Asking[InferredStrategy | None]:
    """Return the strategy without the optimizer shards that were joined; None if it lists none.

    ``strategy`` is as it was read, and ``tensors`` are those of `without_listed_shards`.
    """
    names = frozenset(_names(strategy))
    if not names:
        return None
    present = [tensor for tensor in tensors if tensor.name in names and tensor.is_listed]
    shards = {
        tensor.name: layout.optimizer_shard
        for tensor in present
        for layout in strategy.layouts[tensor.name]
        if layout.ranks == tensor.layout.ranks
    }
    shown = yield from _shown(present, shards, by_samples)
    kept = {name: shards[name] for name, shard in shown.items() if shard == shards[name] > 1}
    joined = [name for name, shard in shown.items() if shard == 1]
    for name in inconsistent_states(present, {**dict.fromkeys(joined, 1), **kept}):
        kept.pop(name, None)  # replicas that diverged
        kept.pop(match_parameters(present)[name], None)
    bare = without_listed_shards(strategy)
    if kept and not joined:
        message = f"{_NONE}, but files hold slices of the optimizer shard in the strategy"
        hint = "the same command without --optimizer-shard"
        return undecided_strategy(bare, names, message, hint, facts=shorten(kept, 3))
    assumed = [tensor for tensor in present if tensor.name not in shown]
    notes = tuple(_notes(joined, kept, assumed, shards))
    return InferredStrategy(set_shards(bare, kept), notes)


def _shown(
    present: Sequence[FullTensor], shards: Mapping[str, int], by_samples: bool
) -> Asking[dict[str, int]]:
    """Return name to the optimizer shard that contents or shapes show, where they do.

    It is 0 if nothing explains the contents.
    """
    compared = [tensor for tensor in present if may_be_sharded(tensor)]
    contents = yield from sample_slices(compared, by_samples)
    shards_of = shown_shards(compared, contents)
    shown = {name: shard for name, shard in shards_of.items() if shard is not None}
    by_name = {tensor.name: tensor for tensor in present}
    for tensor in present:
        if tensor.name not in shards_of:  # the strategy lists its full shape
            shown[tensor.name] = tensor.layout.optimizer_shard
    for name, parameter in match_parameters(present).items():
        if parameter == name or parameter not in by_name:
            continue
        rows, whole = (by_name[n].meta.shape[:1] for n in (name, parameter))
        for few, state, many, other in (
            (rows, name, whole, parameter),
            (whole, parameter, rows, name),
        ):
            if few and shards[state] > 1 and (few[0] * shards[state],) == many:
                shown.setdefault(state, shards[state])
                shown.setdefault(other, 1)
            if few == many and state in shown:
                shown.setdefault(other, shown[state])
    return shown


def _notes(
    joined: Sequence[str],
    kept: Mapping[str, int],
    assumed: Sequence[FullTensor],
    shards: Mapping[str, int],
) -> Iterator[Diagnostic]:
    """Yield what became of the optimizer shards in the strategy, and what shows it."""
    if joined:
        message = f"{_NONE}: {count(len(joined), 'parameter', 'are')} read without the "
        message += "optimizer shard in the strategy"
        yield Diagnostic("corrected", message, facts=shorten(joined, 3))
    if kept:
        message = f"{_NONE}: {count(len(kept), 'parameter', 'keep')} the optimizer shard in the "
        facts = f"{shorten(kept, 3)}: slices show that it was not joined"
        yield Diagnostic("corrected", f"{message}strategy", facts=facts)
    if assumed:
        message = f"{_NONE} alone decides that {count(len(assumed), 'parameter', 'were')} joined"
        named = []
        for tensor in assumed:
            rows, *rest = tensor.meta.shape
            sharded = rows * shards[tensor.name], *rest
            named.append(f"{tensor.name} {tensor.meta.shape} or {sharded}")
        facts = f"full shapes if joined, or if not: {shorten(named, 3)}; "
        facts += "no other rank shows it, or all elements are equal"
        hint = "restore the files of missing ranks; `ckpttool help inferred` explains"
        yield Diagnostic("inferred", message, hint=hint, facts=facts)
