"""Optimizer shards that the strategy hides, inferred from replicas that differ.

A run with ``optimizer_weight_shard_aggregated_save`` splits slices by the optimizer shard, but its
strategy says 0.  With shard ``s`` only positions ``p`` and ``p + s`` of a replica group hold equal
slices.  A tensor whose elements are all equal fits every shard.  Its parameter or its states may
decide, since they have the same number of rows.  Gradients (``accu_grads``) with more rows than
their parameter prove a shard.

Diverged or stale replicas look like slices of a hidden shard.  The user has to decide if there is
evidence of divergence:

- Only two ranks differ.
- A tensor is not sharded, although its rows divide and it is as large as a sharded one.  MindSpore
  does not shard small tensors (``parallel_optimizer_threshold``), tensors that stages share,
  indivisible tensors, and parameters with ``parallel_optimizer=False``.
- Most numbers of two slices are nearly equal.

Nor does a strategy without optimizer state hide a shard.  Every strategy that is compiled for
training lists optimizer state, also with ``only_trainable_params``.  A strategy that lists only
weights is of a network without an optimizer, such as inference.  It may shard these weights in
other ways.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from ckpttool.checkpoint.evidence import Asking, ask
from ckpttool.checkpoint.optimizer_state import contradiction
from ckpttool.model.layout import Layout, divisors
from ckpttool.model.names import GRADIENTS, drop_unlike_shapes, match_states, parse_name
from ckpttool.model.slicing import FullTensor, LayoutSlicing
from ckpttool.model.strategy import Strategy
from ckpttool.model.tensors import StoredTensor
from ckpttool.problems import Diagnostic
from ckpttool.wording import count, format_ranks, shorten

if TYPE_CHECKING:
    from ckpttool.checkpoint.checkpoint import Checkpoint, Contents
    from ckpttool.storage.sampling import Sample

    SampleOfRank = Mapping[int, Sample]
    Samples = Mapping[str, SampleOfRank]  # by the names of tensors


_SHARD = ("--optimizer-shard",)
_EXPLAINED = "`ckpttool help undecided_shard` explains"
_OTHER_SHARD = f"another --optimizer-shard N; {_EXPLAINED}"


def _ambiguity_reason(
    tensors: Sequence[FullTensor], contents: Samples, shards: Mapping[str, int]
) -> Asking[str | None]:
    """Return the evidence of diverged replicas, or None if slices of a shard are proven."""
    sharded = [tensor for tensor in tensors if shards.get(tensor.name, 1) > 1]
    if not sharded or shards_by_gradients(tensors):  # shapes prove the shard
        return None
    if all(shards[tensor.name] == tensor.layout.replicas == 2 for tensor in sharded):
        return "two replicas only"
    smallest = min(sharded, key=lambda tensor: tensor.meta.nbytes * shards[tensor.name])
    shard = shards[smallest.name]
    is_all = shard == smallest.layout.replicas
    unsharded = []
    for tensor in tensors:
        replicas, samples = tensor.layout.replicas, contents[tensor.name].values()
        if (
            shards.get(tensor.name) == 1
            and not all(sample.is_constant for sample in samples)
            and not parse_name(tensor.name).is_gradient
            and tensor.meta.nbytes >= smallest.meta.nbytes * shard
            and tensor.meta.shape[0] % (replicas if is_all else shard) == 0
            and (is_all or replicas % shard == 0)
        ):
            unsharded.append(tensor.name)
    if unsharded:
        return f"{shorten(unsharded, 3)}, as large as {smallest.name}, equal on these ranks"
    return (yield from _nearness_reason(sharded, contents))


def _nearness_reason(sharded: Sequence[FullTensor], contents: Samples) -> Asking[str | None]:
    """Return a reason if most numbers of two slices are nearly equal, for parameters if any."""
    from ckpttool.storage.sampling import nearness

    pairs: dict[str, tuple[StoredTensor, StoredTensor]] = {}  # the first two that differ
    for tensor in sharded:
        samples = contents[tensor.name]
        for replicas in tensor.slicing.replicas():
            ranks = [rank for rank in replicas if not samples[rank].is_constant]
            for rank in ranks:
                if tensor.name not in pairs and samples[rank] != samples[ranks[0]]:
                    pairs[tensor.name] = replicas[ranks[0]], replicas[rank]
    states = {name for name in pairs if parse_name(name).same_shape_parameter is not None}
    weights = {name: pair for name, pair in pairs.items() if name not in states} or pairs
    shares = yield from ask(nearness, weights.values())
    near = total = 0.0
    for tensor in sharded:
        share = shares[weights[tensor.name]] if tensor.name in weights else None
        if share is not None:
            total += tensor.meta.nbytes
            near += share * tensor.meta.nbytes
    return "most numbers nearly equal" if near * 2 > total else None


def infer_shard(layout: Layout, contents: SampleOfRank) -> int | None:
    """Return the optimizer shard that the contents of ranks show.

    The result is None if all elements are equal, which fits every shard.  It is 0 if no shard
    explains the contents: slices are equal that should differ.
    """
    for shard in divisors(layout.replicas):
        is_consistent, are_distinct = _explains(layout, contents, shard)
        if is_consistent:
            break
    if shard == 1 and all(sample.is_constant for sample in contents.values()):
        return None
    return shard if are_distinct else 0


def possible_shards(tensor: FullTensor, contents: SampleOfRank) -> list[int]:
    """Return the optimizer shards that explain the contents, if missing ranks leave several.

    The result is empty if all ranks have the tensor, since their contents decide.
    """
    layout = tensor.layout
    shards = divisors(layout.replicas) if missing_ranks(tensor) else []
    ways = [n for n in shards if all(_explains(layout, contents, n))]
    return ways if len(ways) > 1 else []


def missing_ranks(tensor: FullTensor) -> list[int]:
    """Return the ranks of a layout without a file, or with one that lacks the tensor."""
    slices = tensor.slicing.holdings()
    return sorted(chain(*({*it.owners}.difference(it.holders) for it in slices)))


def _explains(layout: Layout, contents: SampleOfRank, shard: int) -> tuple[bool, bool]:
    """Return whether equal slices of a shard are equal, and whether distinct ones differ."""
    cut = replace(layout, optimizer_shard=shard)
    slices: dict[tuple[int, ...], list[Sample]] = {}  # by the slice before the shard
    is_consistent = True
    for index in cut.slice_indices():
        equal = {contents[rank] for rank in cut.owners(index) if rank in contents}
        is_consistent = is_consistent and len(equal) <= 1
        slices.setdefault((index[0] // shard, *index[1:]), []).extend(equal)
    telling = [
        [sample for sample in samples if not sample.is_constant] for samples in slices.values()
    ]
    return is_consistent, all(len(set(samples)) == len(samples) for samples in telling)


def shards_by_gradients(tensors: Sequence[FullTensor]) -> dict[str, int]:
    """Return name to optimizer shard above 1, where the shapes of gradients prove it.

    Accumulated gradients have as many elements as their parameter.  The same shard splits them, or
    none does.
    """
    shapes = {tensor.name: tensor.meta.shape for tensor in tensors}
    if not any(parse_name(name).is_gradient for name in shapes):
        return {}
    parameters = match_parameters(tensors)
    shards: dict[str, int] = {}
    for tensor in tensors:
        name, (own, *rest) = tensor.name, tensor.meta.shape
        whole, *rest_of_whole = shapes.get(GRADIENTS + parameters[name], (own, *rest))
        if rest_of_whole == rest and whole > own and whole % own == 0:
            shard = whole // own
            shards |= {name: shard} if tensor.layout.replicas % shard == 0 else {}
    return shards


def limit_shard(layout: Layout, requested: int) -> int:
    """Return the shard that MindSpore uses for a layout if ``requested`` is configured.

    A tensor with fewer replicas is split by all of them.  A tensor whose number of replicas is not
    divisible by the shard stays unsplit.  (MindSpore 2.10, compiled for 1, 2, 4 and 8 replicas.)
    """
    shard = min(requested, layout.replicas)
    return 1 if layout.replicas % shard else shard


def complete_shards(
    tensors: Sequence[FullTensor], shards: Mapping[str, int], requested: int | None
) -> tuple[dict[str, int], list[FullTensor], list[str]]:
    """Add the shards that a parameter, a state or the user decides.

    Tensors without a shard are returned, too, and the names that only ``requested`` decides.
    """
    rows, parameters = _rows(tensors, shards), match_parameters(tensors)
    rows_of_parameter = {parameters[name]: n for name, n in rows.items()} | rows
    completed = dict(shards)
    undecided: list[FullTensor] = []
    by_request: list[str] = []
    for tensor in tensors:
        name = tensor.name
        if name in shards:
            continue
        full_rows = rows_of_parameter.get(parameters[name])
        shard = requested and limit_shard(tensor.layout, requested)
        if full_rows is not None:
            shard = full_rows // tensor.meta.shape[0]
        if not shard or tensor.layout.replicas % shard:
            undecided.append(tensor)
            continue
        completed[name] = shard
        by_request += [name] if full_rows is None else []
    return completed, undecided, by_request


def inconsistent_states(tensors: Sequence[FullTensor], shards: Mapping[str, int]) -> list[str]:
    """Return the names of states whose full rows differ from those of their parameter."""
    rows, parameters = _rows(tensors, shards), match_parameters(tensors)
    return [name for name, n in rows.items() if rows.get(parameters[name]) not in (n, None)]


def _rows(tensors: Sequence[FullTensor], shards: Mapping[str, int]) -> dict[str, int]:
    return {
        tensor.name: tensor.meta.shape[0] * shards[tensor.name]
        for tensor in tensors
        if tensor.name in shards
    }


def match_parameters(tensors: Sequence[FullTensor]) -> dict[str, str]:
    """Return name to parameter; a name that is not a state maps to itself."""
    metas = {tensor.name: tensor.meta for tensor in tensors}
    owners = drop_unlike_shapes(match_states(metas, metas), metas)
    return {
        name: owners.get(name) or parse_name(name).same_shape_parameter or name for name in metas
    }


def _ambiguity_problem(tensor: FullTensor, possible: Sequence[int] | None) -> Diagnostic:
    """Return the problem of equal elements, or of several shards that are ``possible``."""
    lost = () if possible is None else tuple(missing_ranks(tensor))
    shards = divisors(tensor.layout.replicas) if possible is None else possible
    reason = f"{format_ranks(lost)} not there" if lost else "all elements are equal"
    return Diagnostic(
        "undecided_shard",
        f"it may have an optimizer shard: {reason}",
        hint=f"{'restore the files, or ' if lost else ''}--optimizer-shard N; {_EXPLAINED}",
        options=_SHARD,
        facts=_shapes(tensor, shards),
        tensor=tensor.name,
        ranks=lost,
    )


def _shapes(tensor: FullTensor, shards: Sequence[int]) -> str:
    rows, *rest = tensor.meta.shape
    return "it may become " + " or ".join(str((rows * shard, *rest)) for shard in shards)


class InferredStrategy(Struct, frozen=True):
    """A strategy corrected by contents, with the parameters that contents do not decide."""

    strategy: Strategy
    notes: tuple[Diagnostic, ...] = ()
    problems: tuple[Diagnostic, ...] = ()
    undecided: frozenset[str] = frozenset()  # the names that the problems are about


def infer_strategy(
    strategy: Strategy,
    tensors: Iterable[FullTensor],
    requested: int | None,
    by_samples: bool = False,
) -> Asking[InferredStrategy | None]:
    """Return the strategy with the optimizer shards that replicas show; None if no shard does.

    Hand-written layouts are not corrected.  All replicas without an optimizer shard are sampled,
    and read in full if that may prove a shard.  The shard that is ``requested``, 1 for none,
    decides tensors that fit several shards (`limit_shard`).  Contents that contradict it are a
    problem.  If none is requested, a shard that a strategy without optimizer state hides is one.
    """
    tensors = list(tensors)
    candidates = _candidates(strategy, tensors)
    if not candidates and requested in _shards_by_full_shapes(strategy, tensors).values():
        return None  # their layouts have it
    inferred = yield from _infer_from(strategy, candidates, requested, by_samples)
    if requested is not None or strategy.lists_states:
        return inferred
    return _refuse_untrained(strategy, tensors, inferred)


def _infer_from(
    strategy: Strategy, candidates: Sequence[FullTensor], requested: int | None, by_samples: bool
) -> Asking[InferredStrategy | None]:
    """Infer the strategy from the contents of the tensors that may be sharded."""
    if requested is not None:
        refused = _refuse_indivisible(strategy, candidates, requested)
        if refused is not None or requested == 1:
            return refused
    if requested is None or by_samples:
        contents = yield from sample_slices(candidates, by_samples=True)
        inferred = yield from _infer(strategy, candidates, contents, requested)
        if by_samples or (yield from _is_final(inferred, candidates, contents)):
            return inferred
    contents = yield from sample_slices(candidates, by_samples=False)
    return (yield from _infer(strategy, candidates, contents, requested))


def has_proven_shard(strategy: Strategy, tensors: Sequence[FullTensor]) -> bool:
    """Return whether shapes alone prove an optimizer shard that the strategy hides."""
    by_gradients = shards_by_gradients(_candidates(strategy, tensors))
    return bool(by_gradients or _shards_by_full_shapes(strategy, tensors))


def _shards_by_full_shapes(strategy: Strategy, tensors: Iterable[FullTensor]) -> dict[str, int]:
    return {
        tensor.name: tensor.layout.optimizer_shard
        for tensor in tensors
        if tensor.is_listed
        and isinstance(tensor.slicing, LayoutSlicing)
        and tensor.layout.optimizer_shard > 1
        and all(layout.optimizer_shard == 1 for layout in strategy.layouts[tensor.name])
    }


def _refuse_untrained(
    strategy: Strategy, tensors: Sequence[FullTensor], inferred: InferredStrategy | None
) -> InferredStrategy | None:
    """Return the problems of shards that a strategy without optimizer state cannot hide.

    They are proven, or a question.  Return None if no shard explains replicas that differ: these
    diverged.
    """
    shards = _shards_by_full_shapes(strategy, tensors)
    if inferred is not None:
        for name, layouts in inferred.strategy.layouts.items():
            if layouts != strategy.layouts[name]:
                shards[name] = layouts[0].optimizer_shard
    undecided = frozenset() if inferred is None else inferred.undecided
    metas = {tensor.name: tensor.meta for tensor in tensors}
    names = [name for name in metas if name in shards]
    problems: tuple[Diagnostic, ...] = () if inferred is None else inferred.problems
    if shards:
        numbers = ", ".join(map(str, sorted({*shards.values()})))
        message = f"slices of an optimizer shard ({numbers})"
        hint = "--optimizer-shard N if this is it; `ckpttool help contradicted` explains"
        problems = (
            Diagnostic("contradicted", message, hint=hint, options=_SHARD, facts=shorten(names, 3)),
        )
    elif not problems:
        return None
    states = match_states(strategy.layouts, metas)
    facts = "the strategy is of a network without an optimizer (inference?)"
    facts += f"; the files hold optimizer state: {shorten(states, 3)}" if states else ""
    refused = tuple(
        replace(
            contradiction(
                strategy, f"{problem.message}, {_NO_STATES}", f"{problem.facts}; {facts}"
            ),
            hint=f"-s with the strategy of the training run, or {problem.hint}",
            options=problem.options,
            tensor=problem.tensor,
            ranks=problem.ranks,
        )
        for problem in problems
    )
    about = {*names, *undecided}
    following = {tensor.name for tensor in tensors if tensor.parameter in about}
    return InferredStrategy(strategy, problems=refused, undecided=frozenset(about | following))


_NO_STATES = "and the strategy lists no optimizer state"


def _candidates(strategy: Strategy, tensors: Iterable[FullTensor]) -> list[FullTensor]:
    return [
        tensor
        for tensor in tensors
        if may_be_sharded(tensor) and tensor.name not in strategy.handwritten
    ]


def undecided_strategy(
    strategy: Strategy,
    names: Iterable[str],
    message: str,
    hint: str = _OTHER_SHARD,
    *,
    facts: str = "",
    options: tuple[str, ...] = _SHARD,
    ranks: tuple[int, ...] = (),
) -> InferredStrategy:
    """Return the problem that the shard of some parameters is not decided."""
    problem = Diagnostic(
        "undecided_shard", message, hint=hint, options=options, facts=facts, ranks=ranks
    )
    return InferredStrategy(strategy, problems=(problem,), undecided=frozenset(names))


def _is_final(
    inferred: InferredStrategy | None, candidates: Sequence[FullTensor], contents: Samples
) -> Asking[bool]:
    """Return whether reading everything cannot change what samples show.

    A problem is final if every tensor shows a shard; a corrected strategy never is.  No shard is
    final if the smallest unexplained tensor stays unexplained when it is read in full.
    """
    shards = shown_shards(candidates, contents)
    if inferred is not None:
        return bool(inferred.problems) and None not in shards.values()
    unexplained = [tensor for tensor in candidates if shards[tensor.name] == 0]
    smallest = sorted(unexplained, key=lambda tensor: tensor.meta.nbytes)[:1]
    in_full = yield from sample_slices(smallest, by_samples=False)
    return 0 in shown_shards(smallest, in_full).values()


def shown_shards(tensors: Sequence[FullTensor], contents: Samples) -> dict[str, int | None]:
    """Return the shard that the contents of each tensor show, else that of its gradients."""
    by_shape, shown = shards_by_gradients(tensors), dict[str, int | None]()
    for tensor in tensors:
        name, samples = tensor.name, contents[tensor.name]
        shard = None if possible_shards(tensor, samples) else infer_shard(tensor.layout, samples)
        shown[name] = by_shape.get(name) if shard is None else shard
    return shown


def _infer(
    strategy: Strategy, candidates: Sequence[FullTensor], contents: Samples, requested: int | None
) -> Asking[InferredStrategy | None]:
    """Infer the strategy from samples or from full contents; see `infer_strategy`."""
    by_contents = shown_shards(candidates, contents)
    shown = {name: shard for name, shard in by_contents.items() if shard is not None}
    possible = {
        tensor.name: ways
        for tensor in candidates
        if tensor.name not in shown and (ways := possible_shards(tensor, contents[tensor.name]))
    }
    if requested is not None and (refused := _contradict(strategy, candidates, shown, requested)):
        return refused
    if requested is None:
        may_be_unsharded = {*shown.values()} <= {1} and all(1 in n for n in possible.values())
        is_explained = 0 not in shown.values() and not may_be_unsharded
        if not is_explained or not _is_one_shard(strategy, candidates, shown):
            return None
    shards, undecided, by_request = complete_shards(candidates, shown, requested)
    states = inconsistent_states(candidates, shards)
    if states and requested is not None:
        message = f"optimizer shard {requested} gives optimizer state other rows than "
        return undecided_strategy(
            strategy, states, f"{message}its parameters", facts=shorten(states, 3)
        )
    if states:
        return None
    if requested is None:
        reason = yield from _ambiguity_reason(candidates, contents, shards)
        if reason is not None:
            return _ambiguous(strategy, candidates, shards, reason)
    return InferredStrategy(
        set_shards(strategy, {name: shard for name, shard in shards.items() if shard > 1}),
        (*_notes(candidates, shards, by_request, requested),),
        tuple(_ambiguity_problem(tensor, possible.get(tensor.name)) for tensor in undecided),
        frozenset(tensor.name for tensor in undecided),
    )


def _is_one_shard(
    strategy: Strategy, tensors: Sequence[FullTensor], shards: Mapping[str, int]
) -> bool:
    """Return whether one optimizer shard of the run explains the shards of all tensors.

    A run has one shard, limited by the replicas of each tensor (`limit_shard`).  Its strategy hides
    it for all tensors or for none.
    """
    sharded = {
        (tensor.layout, shard)
        for tensor in tensors
        if (shard := shards.get(tensor.name, 1)) > 1 and not parse_name(tensor.name).is_gradient
    }
    if sharded and _lists_shard(strategy):
        return False
    return any(
        all(shard == limit_shard(layout, of_run) for layout, shard in sharded)
        for of_run in divisors(max((layout.replicas for layout, _ in sharded), default=1))
    )


def set_shards(strategy: Strategy, shards: Mapping[str, int]) -> Strategy:
    """Return the strategy with the optimizer shards of some parameters."""
    layouts = {
        name: tuple(replace(layout, optimizer_shard=shards[name]) for layout in of_stages)
        if name in shards
        else of_stages
        for name, of_stages in strategy.layouts.items()
    }
    return replace(strategy, layouts=layouts)


def _refuse_indivisible(
    strategy: Strategy, tensors: Sequence[FullTensor], requested: int
) -> InferredStrategy | None:
    """Return a problem if the requested shard divides no number of replicas; else None.

    A shard larger than the replicas means all of them (see `limit_shard`).  MindSpore compiles no
    shard larger than the number of ranks.
    """
    replicas = {tensor.name: tensor.layout.replicas for tensor in tensors}
    is_possible = requested <= len(strategy.ranks)
    if is_possible and any(n % min(requested, n) == 0 for n in replicas.values()):
        return None
    if not tensors:
        message = f"optimizer shard {requested}: no parameter has replicas that it could shard"
        hint = "the same command without --optimizer-shard"
        return undecided_strategy(strategy, (), message, hint, options=())
    most = max(replicas.values())
    named = shorten((name for name, n in replicas.items() if n == most), 3)
    message = f"optimizer shard {requested} does not divide the {most} replicas"
    hint = f"--optimizer-shard with one of {', '.join(map(str, divisors(most)))}"
    return undecided_strategy(strategy, replicas, message, hint, facts=named)


def _contradict(
    strategy: Strategy, tensors: Sequence[FullTensor], shown: Mapping[str, int], requested: int
) -> InferredStrategy | None:
    """Return the problem of tensors that show another shard than ``requested``, if any do."""
    unlike = {
        tensor.name: shown[tensor.name]
        for tensor in tensors
        if shown.get(tensor.name, 1) not in (1, limit_shard(tensor.layout, requested))
    }
    if not unlike:
        return None
    named = shorten((f"{name} ({shard or 'none'})" for name, shard in unlike.items()), 3)
    message = f"optimizer shard {requested}, but files hold slices of another optimizer shard"
    return undecided_strategy(strategy, unlike, message, facts=named)


def _ambiguous(
    strategy: Strategy, tensors: Sequence[FullTensor], shards: Mapping[str, int], reason: str
) -> InferredStrategy:
    """Return the problem of replicas that differ and may be slices of a hidden shard."""
    sharded = {tensor.name: tensor for tensor in tensors if shards.get(tensor.name, 1) > 1}
    name, first = next(iter(sharded.items()))
    ranks = first.layout.owners(next(iter(first.layout.slice_indices())))
    most = max(shards[name] for name in sharded)
    return undecided_strategy(
        strategy,
        sharded,
        f"{count(len(sharded), 'parameter')}: diverged replicas, or slices of an optimizer shard",
        f"--trust-strategy if replicas, --optimizer-shard {most} if slices; {_EXPLAINED}",
        options=("--trust-strategy", "--optimizer-shard"),
        facts=f"{shorten(sharded, 3)}: {format_ranks(ranks)} differ ({reason}); "
        f"{name}: {_shapes(first, [1, shards[name]])}",
        ranks=ranks,
    )


def shown_by_unread_states(checkpoint: Checkpoint, contents: Contents) -> Iterator[FullTensor]:
    """Yield the tensors of equal elements that only states show which the system cannot read.

    Equal elements fit every shard, so states of a tensor decide, unless others of them are there.
    """
    states = checkpoint.states
    unread = {states.get(name, "") for name in contents.no_evidence}
    shown = {
        states.get(s.tensor.name, s.tensor.name) for s in contents.sampled if not s.is_constant
    }
    for tensor in checkpoint.tensors:
        if tensor.name in unread and tensor.name not in shown:
            yield tensor


def ask_for_shard(
    checkpoint: Checkpoint, contents: Contents, doubtful: Iterable[FullTensor]
) -> InferredStrategy | None:
    """Return the problem of states that the system cannot read, if ``doubtful`` may be sharded."""
    strategy, unread = checkpoint.strategy, contents.no_evidence
    names = [tensor.name for tensor in hiding_tensors(strategy, doubtful)]
    wanted = [name for name in names if name in checkpoint.wanted]
    if not wanted:
        return None
    error = next(iter(unread.values()))
    states = count(len(unread), "optimizer state")
    return undecided_strategy(
        strategy,
        wanted,
        f"{count(len(wanted), 'parameter')}: perhaps slices of an optimizer shard",
        f"restore the files, or --optimizer-shard N, 1 for none; {_EXPLAINED}",
        facts=f"{shorten(wanted, 3)}; {states} that would show it cannot be read: "
        f"{shorten(unread, 2)}; {error}",
    )


def may_be_sharded(tensor: FullTensor) -> bool:
    """Return whether a hidden optimizer shard may split a tensor."""
    if not isinstance(tensor.slicing, LayoutSlicing):
        return False  # the checkpoint describes its boxes
    if parse_name(tensor.name).reduced_axis is not None:
        return False  # the layout of its parameter decides
    layout, shape = tensor.layout, tensor.meta.shape
    is_decided = layout.optimizer_shard > 1 or layout.full_shape is not None
    is_splittable = layout.is_even and layout.replicas > 1 and bool(shape) and 0 not in shape
    return tensor.is_listed and not is_decided and is_splittable


def hiding_tensors(strategy: Strategy, tensors: Iterable[FullTensor]) -> Iterator[FullTensor]:
    """Yield the tensors whose shard a strategy may hide, which hides all or none; no gradients."""
    if not _lists_shard(strategy):
        for tensor in _candidates(strategy, tensors):
            if not parse_name(tensor.name).is_gradient:
                yield tensor


def _lists_shard(strategy: Strategy) -> bool:
    return any(
        layout.optimizer_shard > 1
        for name, layouts in strategy.layouts.items()
        if not parse_name(name).is_gradient
        for layout in layouts
    )


def ranks_that_show_shards(layouts: Iterable[Layout], ranks: Collection[int]) -> tuple[int, ...]:
    """Return few more ranks, ascending, whose slices would show a hidden shard of each layout.

    Examples
    --------
    >>> ranks_that_show_shards([Layout((4,), ((),)), Layout((2, 2), ((0,),))], [0])
    (1, 2)
    """
    telling: list[set[int]] = []  # for each layout, ranks; any one of them is enough
    for layout in dict.fromkeys(layouts):
        unseen = layout.unseen_shard(ranks)
        if unseen == 1:
            continue
        position_of: dict[tuple[int, ...], int] = {}
        for rank in ranks:
            if rank in layout.ranks:
                index = layout.slice_index(rank)
                position_of.setdefault(index, layout.owners(index).index(rank))
        telling.append(
            {
                rank
                for index, first in position_of.items()
                for position, rank in enumerate(layout.owners(index))
                if math.gcd(unseen, position - first) == 1
            }
        )
    return cover(telling)


def cover(groups: Iterable[Collection[int]]) -> tuple[int, ...]:
    """Return few numbers, ascending, so that each group contains at least one.

    Numbers without a choice are taken first, then the lowest of those that most groups have.
    """
    sets = [set(group) for group in groups]
    taken = [*{number for group in sets if len(group) == 1 for number in group}]
    left = [group for group in sets if group.isdisjoint(taken)]
    while left:
        counts = Counter(chain.from_iterable(left))
        best = min(counts, key=lambda number: (-counts[number], number))
        taken.append(best)
        left = [group for group in left if best not in group]
    return tuple(sorted(taken))


def sample_slices(tensors: Sequence[FullTensor], by_samples: bool) -> Asking[Samples]:
    """Return the sample or the digest of each rank's slice, for each tensor."""
    from ckpttool.storage.sampling import digest, sample

    stored = {
        tensor.name: {rank: it for ranks in tensor.slicing.replicas() for rank, it in ranks.items()}
        for tensor in tensors
    }
    slices = chain.from_iterable(by_rank.values() for by_rank in stored.values())
    contents = yield from ask(sample if by_samples else digest, slices)
    return {
        name: {rank: contents[it] for rank, it in by_rank.items()}
        for name, by_rank in stored.items()
    }


def _notes(
    tensors: Sequence[FullTensor],
    shards: Mapping[str, int],
    by_request: Sequence[str],
    requested: int | None,
) -> Iterator[Diagnostic]:
    """Yield what decides the shards: replicas or the user, who may request too much."""
    most = max((tensor.layout.replicas for tensor in tensors), default=1)
    if requested is not None and requested > most:
        message = f"optimizer shard {requested}: no parameter has more than {most} replicas"
        facts = "each is sharded by all of its own, as in MindSpore"
        yield Diagnostic("corrected", message, facts=facts)
    proven = {name: n for name, n in shards.items() if n > 1 and name not in by_request}
    if proven:
        numbers = ", ".join(map(str, sorted({*proven.values()})))
        message = f"{count(len(proven), 'parameter', 'have')} an optimizer shard ({numbers}) "
        message += "that the strategy does not list"
        facts = f"{shorten(proven, 3)}; or the strategy is of another run, and they are wrong"
        hint = "--optimizer-shard 1 if replicas diverged; `ckpttool help inferred` explains"
        yield Diagnostic("inferred", message, hint=hint, options=_SHARD, facts=facts)
    sharded = [name for name in by_request if shards[name] > 1]
    unsharded = [name for name in by_request if shards[name] == 1]
    groups = {"sharded": sharded, "in full": unsharded}
    named = "; ".join(f"{how}: {shorten(names, 3)}" for how, names in groups.items() if names)
    if named:
        message = f"{count(len(by_request), 'parameter')} decided by the requested shard alone"
        hint = "`replicated` in a hand-written strategy (-s MORE.yaml) for those in full"
        yield Diagnostic("inferred", message, hint=hint, facts=named)
