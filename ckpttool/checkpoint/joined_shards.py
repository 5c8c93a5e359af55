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
    read_contents,
    set_shards,
    shown_shards,
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

    Parameters
    ----------
    listed
        The strategy as it was read.
    tensors
        The tensors of `without_listed_shards`.
    by_samples
        Whether to read samples only.
    """
    names = frozenset(_names(strategy))
    if not names:
        return None
    present = [tensor for tensor in tensors if tensor.name in names and tensor.is_listed]
    shards = {tensor.name: _shard_of(strategy, tensor) for tensor in present}
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
        problem = Diagnostic(
            "undecided_shard",
            message,
            hint=hint,
            options=("--optimizer-shard",),
            facts=shorten(kept, 3),
        )
        return InferredStrategy(bare, problems=(problem,), undecided=names)
    assumed = [tensor for tensor in present if tensor.name not in shown]
    notes = tuple(_notes(joined, kept, assumed, shards))
    return InferredStrategy(set_shards(bare, kept), notes)


def _shard_of(strategy: Strategy, tensor: FullTensor) -> int:
    layouts = strategy.layouts[tensor.name]
    return next(layout.optimizer_shard for layout in layouts if layout.ranks == tensor.layout.ranks)


def _shown(
    present: Sequence[FullTensor], shards: Mapping[str, int], by_samples: bool
) -> Asking[dict[str, int]]:
    """Return name to the optimizer shard that contents or shapes show, where they do.

    It is 0 if nothing explains the contents.
    """
    compared = [tensor for tensor in present if may_be_sharded(tensor)]
    contents = yield from read_contents(compared, by_samples)
    pairs = zip(compared, shown_shards(compared, contents), strict=True)
    shown = {tensor.name: shard for tensor, shard in pairs if shard is not None}
    by_name = {tensor.name: tensor for tensor in present}
    for tensor in present:
        if tensor not in compared:  # the strategy lists its full shape
            shown[tensor.name] = tensor.layout.optimizer_shard
    for name, parameter in match_parameters(present).items():
        if parameter == name or parameter not in by_name:
            continue
        rows, whole = (by_name[one].meta.shape[:1] for one in (name, parameter))
        for few, one, many, other in (rows, name, whole, parameter), (whole, parameter, rows, name):
            if few and shards[one] > 1 and (few[0] * shards[one],) == many:
                shown.setdefault(one, shards[one])
                shown.setdefault(other, 1)
            if few == many and one in shown:
                shown.setdefault(other, shown[one])
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
        shapes = (
            f"{_shape(tensor, 1)} or {_shape(tensor, shards[tensor.name])}" for tensor in assumed
        )
        named = (f"{tensor.name} {both}" for tensor, both in zip(assumed, shapes, strict=True))
        facts = f"full shapes if joined, or if not: {shorten(named, 3)}; "
        facts += "no other rank shows it, or all elements are equal"
        hint = "restore the files of missing ranks; `ckpttool help inferred` explains"
        yield Diagnostic("inferred", message, hint=hint, facts=facts)


def _shape(tensor: FullTensor, shard: int) -> tuple[int, ...]:
    rows, *rest = tensor.meta.shape
    return (rows * shard, *rest)
