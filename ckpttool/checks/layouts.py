"""Layouts that names and shapes contradict, and what is known of those that a strategy omits."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import combinations

from msgspec.structs import replace

from ckpttool.checkpoint.checkpoint import Checkpoint, Contents
from ckpttool.checkpoint.optimizer_state import (
    contradiction,
    find_mismatched_states,
    shape_difference,
)
from ckpttool.checkpoint.presence import ranks_without_file, shows_deduplication
from ckpttool.model.belonging import owners_of
from ckpttool.model.joining import format_states
from ckpttool.model.layout import Layout
from ckpttool.model.names import parse_name
from ckpttool.model.slicing import BrokenTensor
from ckpttool.problems import Diagnostic
from ckpttool.wording import count, format_numbers, format_ranks, shorten


def check_strategy(checkpoint: Checkpoint) -> Iterator[Diagnostic]:
    """Yield the notes of reading the strategy and of fitting it to the names."""
    yield from checkpoint.strategy.notes


def check_fit(checkpoint: Checkpoint) -> Iterator[Diagnostic]:
    """Yield why the slices of a tensor make no full tensor."""
    for tensor in checkpoint.records:
        if isinstance(tensor, BrokenTensor) and tensor.problem is not None:
            yield tensor.problem


def check_handwritten(checkpoint: Checkpoint) -> Iterator[Diagnostic]:
    """Yield the hand-written layouts of states whose full shapes contradict their parameters."""
    handwritten = checkpoint.strategy.handwritten
    tensors = checkpoint.tensors if handwritten else ()
    shapes = {tensor.name: tensor.meta.shape for tensor in tensors}
    for tensor in tensors:
        name, parameter = tensor.name, parse_name(tensor.name).parameter or ""
        are_by_hand = name in handwritten and parameter in handwritten
        if are_by_hand and shape_difference(tensor.meta, shapes) is not None:
            message = "its hand-written layout gives another shape than its parameter's"
            facts = f"{handwritten[name]}: {tensor.meta.shape}; "
            facts += f"{handwritten[parameter]}: {parameter} {shapes[parameter]}"
            hint = "correct one of the two layouts"
            yield Diagnostic("shape", message, hint=hint, facts=facts, tensor=name)


def check_odd_shapes(checkpoint: Checkpoint, contents: Contents) -> Iterator[Diagnostic]:
    """Yield the full shapes of hand-written or trusted layouts that seem cut along a wrong axis.

    No tensor of another kind has any size of such a shape.  The same slices, joined along another
    axis, would make a shape whose sizes all occur.  Nothing else in a checkpoint shows the axis.
    """
    whole, by_hand = checkpoint.whole, checkpoint.strategy.handwritten
    are_trusted = checkpoint.options.trust_strategy
    if not (by_hand or are_trusted):
        return
    kinds = {it.name: _kind(it.name, whole) for it in whole.tensors}
    kinds_of: dict[int, set[str]] = defaultdict(set)
    for tensor in whole.tensors:
        for size in tensor.meta.shape:
            kinds_of[size].add(kinds[tensor.name])
    for tensor in whole.find_unconfirmed(contents.readable_indexes):
        name, shape, layout = tensor.name, tensor.meta.shape, tensor.layout
        place = by_hand.get(name) or by_hand.get(tensor.parameter or "", "")
        known = {size for size, having in kinds_of.items() if having - {kinds[name]}}
        if not (place or are_trusted) or known.intersection(shape) or not layout.is_even:
            continue
        for axis, other in combinations(range(len(shape)), 2):
            cuts = list(layout.tensor_map)
            cuts[axis], cuts[other] = cuts[other], cuts[axis]
            way = replace(layout, tensor_map=tuple(cuts))
            likely = way.implied_shape(layout.slice_shape(layout.first_rank, shape))
            if known.issuperset(likely):
                message = "its full shape has sizes that no other tensor has: a wrong axis?"
                facts = f"{shape}; cut along the other axis the same slices make {likely}"
                hint = f"correct {place}" if place else "-s with the strategy of this run"
                hint += "; `ckpttool help odd_shape` explains"
                where = place or checkpoint.strategy.origin
                yield Diagnostic(
                    "odd_shape", message, hint=hint, facts=facts, tensor=name, where=where
                )
                break


def _kind(name: str, checkpoint: Checkpoint) -> str:
    *_, base = name, *owners_of(name, checkpoint.belongings)
    return re.sub(r"(?<![^.])\d+(?![^.])", "", base)  # of layers: w1 and w2 are two kinds


def check_followed(checkpoint: Checkpoint) -> Iterator[Diagnostic]:
    """Yield notes on tensors whose layout the strategy omits or lists wrongly."""
    tensors, listing = checkpoint.tensors, checkpoint.listing
    following = {
        tensor.name: tensor.parameter for tensor in tensors if tensor.parameter is not None
    }
    if following:
        message = f"{count(len(following), 'optimizer state', 'are')} sharded like the parameter"
        facts = f"not in {listing}, {format_states(following)}"
        yield Diagnostic("follows", message, facts=facts)
    if corrected := [tensor.name for tensor in checkpoint.records if tensor.is_corrected]:
        message = f"{count(len(corrected), 'parameter', 'are')} sharded as shapes show, "
        message += f"not as in {listing}"
        yield Diagnostic("corrected", message, facts=shorten(corrected, 3))
    shapes = {tensor.name: tensor.meta.shape for tensor in tensors}
    if differences := [
        *filter(None, (shape_difference(tensor.meta, shapes) for tensor in tensors))
    ]:
        states = count(len(differences), "optimizer state", "have")
        message = f"{states} another shape than the parameter"
        yield Diagnostic("doubt", message, facts=f"{shorten(differences, 3)}; perhaps slices")


def check_guessed(checkpoint: Checkpoint) -> Iterator[Diagnostic]:
    """Yield a warning about states that only their names and shapes identify.

    An optimizer stores states of most parameters.  So a prefix may belong to a module if less than
    half of the listed parameters have it.  This does not apply to prefixes of MindSpore's
    optimizers.
    """
    states = checkpoint.states
    unknown = [
        tensor
        for tensor in checkpoint.tensors
        if tensor.parameter is not None and parse_name(tensor.name).parameter is None
    ]
    counts = Counter(name.removesuffix(parameter) for name, parameter in states.items() if unknown)
    parameters = sum(name not in states for name in checkpoint.listed) if unknown else 0
    names = [
        f"{tensor.name} (as {tensor.parameter})"
        for tensor in unknown
        if 2 * counts[tensor.name.removesuffix(states[tensor.name])] < parameters
    ]
    if names:
        message = (
            f"{count(len(names), 'tensor', 'are')} taken for optimizer state by name and shape"
        )
        hint = "-s MORE.yaml with the layout if it is not; `ckpttool help guessed` explains"
        yield Diagnostic("guessed", message, hint=hint, facts=shorten(names, 3))


def check_stages(checkpoint: Checkpoint) -> Iterator[Diagnostic]:
    """Yield a note on tensors in stages for which the strategy does not list them."""
    strategy = checkpoint.strategy
    misplaced = [
        name
        for name, ranks in checkpoint.catalog.holders.items()
        if strategy.stages > 1 and name in strategy.layouts
        if {rank // strategy.stage_ranks for rank in ranks if rank in strategy.ranks}
        - set(strategy.stages_of(name))
    ]
    if misplaced:
        parameters = count(len(misplaced), "parameter", "are")
        message = f"{parameters} also on ranks of other stages, and not read there"
        yield Diagnostic("skipped", message, facts=shorten(misplaced, 3))


def check_states(checkpoint: Checkpoint) -> Iterator[Diagnostic]:
    """Yield the differences between layouts of parameters and of their states in the strategy."""
    return find_mismatched_states(checkpoint.catalog, checkpoint.strategy)


def check_misplaced(checkpoint: Checkpoint) -> Iterator[Diagnostic]:
    """Yield a problem if ranks of stages hold more slices of other stages than of their own.

    Stages share only a few parameters.  With a strategy of two stages, half of the files would not
    be read if all ranks hold every layer.
    """
    catalog, strategy = checkpoint.catalog, checkpoint.strategy
    ranks_of: list[int] = []
    misplaced: dict[str, None] = {}
    holders = catalog.holders
    for stage in range(strategy.stages if strategy.stages > 1 else 0):
        ranks = strategy.ranks_of(stage)
        header = next((catalog.files[rank].header for rank in ranks if rank in catalog.files), {})
        own = sum(stage in strategy.stages_of(name) for name in header)
        foreign = [
            name
            for name, tensor in header.items()
            if stage not in (stages := strategy.stages_of(name))
            and any(
                catalog.files[rank].header[name].meta.shape == tensor.meta.shape
                for rank in holders[name]
                if rank // strategy.stage_ranks in stages
            )
        ]
        if len(foreign) > own:
            ranks_of += ranks
            misplaced |= dict.fromkeys(foreign)
    if misplaced:
        message = f"{format_ranks(ranks_of)} hold {count(len(misplaced), 'parameter')} that the "
        message += "strategy lists for other stages"
        yield contradiction(strategy, message, shorten(misplaced, 3), ranks_of)


def check_index(checkpoint: Checkpoint, contents: Contents) -> Iterator[Diagnostic]:
    """Yield the full shapes that differ from those of an index beside the files."""
    for path, full in contents.indexes.items():
        if isinstance(full, Exception):
            message = "full shapes were not compared with this index"
            yield Diagnostic("not_compared", message, facts=str(full), where=path)
            continue
        different = [
            f"{tensor.name} {tensor.meta.shape}, in the index {full[tensor.name].shape}"
            for tensor in checkpoint.tensors
            if tensor.name in full and tensor.meta.shape != full[tensor.name].shape
        ]
        if different:
            message = f"the strategy makes other full shapes than {path} lists"
            problem = contradiction(checkpoint.strategy, message, shorten(different, 3))
            yield replace(problem, path=path)


def check_trusted(checkpoint: Checkpoint, contents: Contents) -> Iterator[Diagnostic]:
    """Yield a note that contents were not compared because the user trusts the strategy."""
    if checkpoint.options.trust_strategy and not contents.is_incomplete:
        message = "the strategy is trusted, so replicas were not compared; the lowest rank is read"
        yield Diagnostic("doubt", message)


def check_no_evidence(_: Checkpoint, contents: Contents) -> Iterator[Diagnostic]:
    """Yield a note on tensors that are not wanted, and that the system cannot read."""
    if unread := contents.no_evidence:
        message = f"{count(len(unread), 'tensor')} that are left out cannot be read"
        reasons = dict.fromkeys(str(error) for error in unread.values())
        facts = f"{shorten(unread, 3)}, which may show the layout of others; {shorten(reasons, 2)}"
        yield Diagnostic("doubt", message, facts=facts)


def check_hidden_shard(checkpoint: Checkpoint, contents: Contents) -> Iterator[Diagnostic]:
    """Yield a warning on an optimizer shard that only a missing or a damaged rank would show.

    Two owners of a slice show it.  A manifest, the full shapes of an index, and a shard that the
    strategy lists prove the layouts without them.
    """
    from ckpttool.checkpoint.hidden_shards import hiding_tensors, ranks_that_show_shards

    catalog, strategy = checkpoint.catalog, checkpoint.strategy
    is_decided = checkpoint.is_recorded or checkpoint.options.optimizer_shard is not None
    if contents.is_refused or is_decided:
        return
    are_all_there = not (ranks_without_file(catalog, strategy) or catalog.damaged)
    if are_all_there or shows_deduplication(catalog, strategy):
        return  # other ranks of a deduplicated checkpoint have no replicas that would show it
    unseen: dict[Layout, int] = {}
    names: dict[Layout, list[str]] = defaultdict(list)
    metas = {tensor.name: tensor.meta for tensor in checkpoint.tensors}
    for tensor in hiding_tensors(strategy, checkpoint.tensors):
        if checkpoint.needed is None or checkpoint.needed.get(tensor.name):
            indexed = (index.get(tensor.name) for index in contents.readable_indexes)
            is_proven = tensor.meta in indexed
            shard = 1 if is_proven else tensor.layout.unseen_shard(catalog.holders[tensor.name])
            unseen[tensor.layout] = min(shard, unseen.get(tensor.layout, shard))
            names[tensor.layout].append(tensor.name)
    hiding = [layout for layout, shard in unseen.items() if shard > 1]
    if not hiding:
        return
    more = ranks_that_show_shards(hiding, [*catalog.files])
    would = "one more rank" if len(more) == 1 else f"{len(more)} more ranks"
    number, name = sum(len(names[layout]) for layout in hiding), names[hiding[0]][0]
    shape = metas[name].shape
    largest = shape[0] * unseen[hiding[0]], *shape[1:]
    yield Diagnostic(
        "hidden_shard",
        f"the strategy may hide an optimizer shard; {would} would show it: {format_numbers(more)}",
        hint=f"the file of {format_ranks(more)} beside them, or --optimizer-shard 1 if there is "
        "none; `ckpttool help hidden_shard` explains",
        options=("--optimizer-shard",),
        facts=f"{count(number, 'parameter')}; {name} is {shape}, or up to {largest} with it",
        ranks=more,
    )


def check_corrections(_: Checkpoint, contents: Contents) -> Iterator[Diagnostic]:
    """Yield what contents show of optimizer shards."""
    if contents.correction is not None:
        yield from contents.correction.problems
        yield from contents.correction.notes


def check_options(checkpoint: Checkpoint) -> Iterator[Diagnostic]:
    """Yield the problem of ``--optimizer-shard`` where it cannot apply."""
    shard = checkpoint.options.optimizer_shard
    where, hint = "optimizer shard", "the same command without --optimizer-shard"
    if shard is not None and not checkpoint.strategy.layouts:
        message = "it corrects a strategy, and none is read"
        yield Diagnostic("options", message, hint=hint, where=where)
    elif shard is not None and checkpoint.options.trust_strategy:
        message = "a trusted strategy is not corrected"
        hint = f"{hint}, or without --trust-strategy"
        yield Diagnostic("options", message, hint=hint, where=where)
