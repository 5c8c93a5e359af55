"""What contents of ranks say of optimizer shards: each tensor by itself, and with its states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ckpttool.model.catalog import format_ranks
from ckpttool.model.layout import Layout
from ckpttool.model.source import Source
from ckpttool.model.states import owners_of_full
from ckpttool.model.strategy import GRADIENTS, parameter_of, shorten
from ckpttool.storage.digest import Sample

Contents = Mapping[int, Sample]  # of one source, by rank


def smallest_shard(layout: Layout, contents: Contents) -> int | None:
    """The optimizer shard that these contents of ranks show.

    None if any may be, all elements being the same; 0 if there is none that explains them: some
    slices are equal that would have to differ.
    """
    for shard in divisors(layout.replicas):
        is_consistent, are_distinct = _explains(layout, contents, shard)
        if is_consistent:
            break
    if shard == 1 and all(sample.is_constant for sample in contents.values()):
        return None
    return shard if are_distinct else 0


def possible_shards(source: Source, contents: Contents) -> list[int]:
    """The optimizer shards that explain what ranks hold, if several do, as some hold nothing.

    Where all ranks have the tensor, what they hold tells.
    """
    layout = source.layout
    shards = divisors(layout.replicas) if missing_ranks(source) else []
    ways = [n for n in shards if all(_explains(layout, contents, n))]
    return ways if len(ways) > 1 else []


def missing_ranks(source: Source) -> list[int]:
    """Return the ranks of a layout without a file, or with one that lacks the tensor."""
    slicing = source.slicing
    pairs = zip(slicing.owners(), slicing.replicas(), strict=True)
    return sorted(rank for owners, held in pairs for rank in owners if rank not in held)


def _explains(layout: Layout, contents: Contents, shard: int) -> tuple[bool, bool]:
    """Whether ranks hold the same that should by this shard, and different things that should."""
    cut = replace(layout, optimizer_shard=shard)
    slices: dict[tuple[int, ...], list[Sample]] = {}  # by the slice that the shard cuts
    is_consistent = True
    for index in cut.slice_indices():
        held = {contents[rank] for rank in cut.owners(index) if rank in contents}
        is_consistent = is_consistent and len(held) <= 1
        slices.setdefault((index[0] // shard, *index[1:]), []).extend(held)
    telling = [[one for one in samples if not one.is_constant] for samples in slices.values()]
    return is_consistent, all(len(set(samples)) == len(samples) for samples in telling)


def shards_by_gradients(listed: Sequence[Source]) -> dict[str, int]:
    """Optimizer shards above 1 that gradients prove by their shapes, whatever the contents are.

    A parameter and its states have as many elements as the gradients that are summed up for it, and
    no shard cuts these, or the same one.
    """
    shapes = {source.meta.name: source.meta.shape for source in listed}
    if not any(name.startswith(GRADIENTS) for name in shapes):
        return {}
    parameters = _parameters(listed)
    found: dict[str, int] = {}
    for source in listed:
        name, (own, *rest) = source.meta.name, source.meta.shape
        whole, *others = shapes.get(GRADIENTS + parameters[name], (own, *rest))
        if others == rest and whole > own and whole % own == 0:
            shard = whole // own
            found |= {name: shard} if source.layout.replicas % shard == 0 else {}
    return found


def shard_of(layout: Layout, wanted: int) -> int:
    """The shard of a tensor where ``wanted`` is asked for, as MindSpore has it.

    A tensor with fewer replicas is cut by all of them; one whose replicas it does not divide is
    left whole.  (MindSpore 2.10, compiled for replicas of 1, 2, 4 and 8.)
    """
    shard = min(wanted, layout.replicas)
    return 1 if layout.replicas % shard else shard


def settle_constants(
    listed: Sequence[Source], shards: dict[str, int], wanted: int | None
) -> tuple[list[Source], list[str]]:
    """Add the shards of tensors that tell nothing themselves.

    Returns
    -------
    sources
        Those that stay unclear.
    names
        Those of which no parameter and no other state tells either, so that ``wanted`` decides.
    """
    rows, parameters = _rows(listed, shards), _parameters(listed)
    of_relatives = {parameters[name]: n for name, n in rows.items()} | rows
    unclear: list[Source] = []
    decided: list[str] = []
    for source in listed:
        name = source.meta.name
        if name in shards:
            continue
        known = of_relatives.get(parameters[name])
        shard = wanted and shard_of(source.layout, wanted)
        if known is not None:
            shard = known // source.meta.shape[0]
        if not shard or source.layout.replicas % shard:
            unclear.append(source)
            continue
        shards[name] = shard
        decided += [name] if known is None else []
    return unclear, decided


def contradictions(listed: Sequence[Source], shards: Mapping[str, int]) -> list[str]:
    """States that would have other rows than their parameter."""
    rows, parameters = _rows(listed, shards), _parameters(listed)
    return [name for name, n in rows.items() if rows.get(parameters[name]) not in (n, None)]


def _rows(listed: Sequence[Source], shards: Mapping[str, int]) -> dict[str, int]:
    return {
        source.meta.name: source.meta.shape[0] * shards[source.meta.name]
        for source in listed
        if source.meta.name in shards
    }


def _parameters(listed: Sequence[Source]) -> dict[str, str]:
    """The parameter that each name is state of, itself if it is no state."""
    metas = {source.meta.name: source.meta for source in listed}
    owners = owners_of_full(metas, metas)
    return {name: owners.get(name) or parameter_of(name) or name for name in metas}


def questions(unclear: Sequence[Source], ways: Mapping[str, Sequence[int]]) -> tuple[str, ...]:
    """What is asked of tensors of which nothing tells how they are cut."""
    equal = [source for source in unclear if source.meta.name not in ways]
    rest = [source for source in unclear if source.meta.name in ways]
    problems = []
    if equal:
        problems.append(
            f"{shorten(one.meta.name for one in equal)}: the other parameters are cut by an "
            "optimizer shard that the strategy does not list, and all elements of these are equal, "
            f"which fits several ways ({_shapes(equal[0], divisors(equal[0].layout.replicas))}); "
            "decide with --optimizer-shard N, or say by hand of those that are whole that they "
            "are `replicated` (-s MORE.yaml)"
        )
    if rest:
        problems.append(
            f"{shorten(one.meta.name for one in rest)}: cut by an optimizer shard, perhaps, that "
            f"the strategy does not list; without {format_ranks(missing_ranks(rest[0]))} what is "
            f"left fits several ways ({_shapes(rest[0], ways[rest[0].meta.name])}); put the files "
            "back, or decide with --optimizer-shard N (are they replicas that drifted apart, "
            "--trust-strategy takes the lowest rank's)"
        )
    return tuple(problems)


def _shapes(source: Source, shards: Sequence[int]) -> str:
    rows, *others = source.meta.shape
    return f"{source.meta.name}: full shape " + " or ".join(
        str((rows * shard, *others)) for shard in shards
    )


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    return [n for n in range(1, number + 1) if number % n == 0]
