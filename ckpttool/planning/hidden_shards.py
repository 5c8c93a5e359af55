"""Optimizer shards that the strategy hides, inferred from replicas that differ.

Saved with ``optimizer_weight_shard_aggregated_save`` the slices are split by the optimizer shard,
and the strategy says 0.  Of the ranks that should hold equal slices, those at positions ``p`` and
``p + s`` of the replica group do if the shard is ``s``, and all others differ.  A tensor whose
elements are all equal tells nothing, but it has as many rows as its parameter or its states, which
may tell.  Gradients (``accu_grads``) with more rows than their parameter prove a shard.

Replicas that diverged, or of which some are stale, look like slices of a hidden shard.  The user is
asked where one of these speaks for divergence:

- two ranks differ, and there are no others;
- a tensor is not sharded although it is as large as one that would be, and its rows divide.
  MindSpore leaves small tensors unsharded (``parallel_optimizer_threshold``), and what stages
  share, what does not divide, and by ``parallel_optimizer=False`` what the user names;
- slices are nearly the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace

from ckpttool.concurrency import wait_result
from ckpttool.model.diagnostics import Diagnostic
from ckpttool.model.layout import Layout
from ckpttool.model.optimizer_names import GRADIENTS, parameter_of, reduced_from
from ckpttool.model.slicing import LayoutSlicing, Source
from ckpttool.model.strategy import Strategy
from ckpttool.model.tensors import StoredTensor
from ckpttool.model.wording import count, format_ranks, shorten
from ckpttool.planning.optimizer_state import owners_of_full
from ckpttool.storage.sampling import Sample, digest, nearness, sample


def ambiguity_reason(
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
        share = wait_result(future)
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


Contents = Mapping[int, Sample]  # of one source, by rank


def infer_shard(layout: Layout, contents: Contents) -> int | None:
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


def inconsistent_states(listed: Sequence[Source], shards: Mapping[str, int]) -> list[str]:
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


def ambiguity_problems(
    unclear: Sequence[Source], ways: Mapping[str, Sequence[int]]
) -> tuple[Diagnostic, ...]:
    """What is asked of tensors of which nothing tells how they are cut."""
    equal = [source for source in unclear if source.meta.name not in ways]
    rest = [source for source in unclear if source.meta.name in ways]
    problems = []
    if equal:
        text = f"{shorten(one.meta.name for one in equal)}: the other parameters are cut by an "
        text += "optimizer shard that the strategy does not list, and all elements of these are "
        text += "equal, which fits several ways "
        text += f"({_shapes(equal[0], divisors(equal[0].layout.replicas))})"
        hint = "decide with --optimizer-shard N, or say by hand of those that are whole that they "
        hint += "are `replicated` (-s MORE.yaml)"
        problems.append(Diagnostic("undecided_shard", text, hint, ("--optimizer-shard",)))
    if rest:
        text = f"{shorten(one.meta.name for one in rest)}: cut by an optimizer shard, perhaps, "
        text += f"that the strategy does not list; without {format_ranks(missing_ranks(rest[0]))} "
        text += f"what is left fits several ways ({_shapes(rest[0], ways[rest[0].meta.name])})"
        hint = "put the files back, or decide with --optimizer-shard N (are they replicas that "
        hint += "drifted apart, --trust-strategy takes the lowest rank's)"
        options = ("--optimizer-shard", "--trust-strategy")
        problems.append(Diagnostic("undecided_shard", text, hint, options))
    return tuple(problems)


def _shapes(source: Source, shards: Sequence[int]) -> str:
    rows, *others = source.meta.shape
    return f"{source.meta.name}: full shape " + " or ".join(
        str((rows * shard, *others)) for shard in shards
    )


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    return [n for n in range(1, number + 1) if number % n == 0]


@dataclass(frozen=True, slots=True)
class Shards:
    """What the contents say: the corrected strategy, a note, and what they do not tell.

    ``names`` are those that the problems are about.
    """

    strategy: Strategy
    notes: tuple[Diagnostic, ...] = ()
    problems: tuple[Diagnostic, ...] = ()
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
        return Shards(strategy, problems=(Diagnostic("undecided_shard", problem),), names=names)
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
        if _can_be_cut(source) and source.meta.name not in strategy.handwritten
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
        None if possible_shards(one, held) else infer_shard(one.layout, held)
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
    odd = inconsistent_states(listed, shards_of)
    if odd and wanted is not None:
        text = f"{shorten(odd)}: with --optimizer-shard {wanted}, and as contents show, they would "
        text += "have other rows than their parameters"
        return Shards(
            strategy, problems=(Diagnostic("undecided_shard", text),), names=frozenset(odd)
        )
    if odd:
        return None
    if wanted is None and (why := ambiguity_reason(listed, contents, shards_of, executor)):
        return _question(strategy, listed, shards_of, why)
    cut = {name: shard for name, shard in shards_of.items() if shard > 1}
    names = frozenset(source.meta.name for source in unclear)
    notes = (
        *_on_too_many(listed, wanted),
        *_on_proven(cut, decided),
        *_on_decided(shards_of, decided, wanted),
    )
    return Shards(_corrected(strategy, cut), notes, ambiguity_problems(unclear, ways), names)


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
    return Shards(strategy, problems=(Diagnostic("undecided_shard", text),), names=frozenset(odd))


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
    return Shards(strategy, problems=(Diagnostic("undecided_shard", text),), names=frozenset(names))


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
    look = sample if by_samples else digest
    futures = [
        {
            rank: executor.submit(look, tensor)
            for ranks in source.slicing.replicas()
            for rank, tensor in ranks.items()
        }
        for source in sources
    ]
    return [{rank: wait_result(future) for rank, future in of.items()} for of in futures]


def _on_proven(cut: Mapping[str, int], decided: Sequence[str]) -> Iterator[Diagnostic]:
    told = {name: shard for name, shard in cut.items() if name not in decided}
    if told:
        ways = ", ".join(str(shard) for shard in sorted(set(told.values())))
        text = f"cut by an optimizer shard ({ways}) that the strategy does not list, as replicas "
        text += f"that differ or shapes tell: {count(len(told), 'parameter')}: {shorten(told)}"
        text += "; is it not the strategy of this run (inspect -s shows the full shapes), give the "
        text += "one that is"
        hint = "are they replicas that drifted apart, say --optimizer-shard 1"
        yield Diagnostic("inferred", text, hint, ("--optimizer-shard",))


def _on_too_many(listed: Sequence[Source], wanted: int | None) -> Iterator[Diagnostic]:
    """What becomes of a shard that is larger than any parameter has replicas."""
    most = max((source.layout.replicas for source in listed), default=1)
    if wanted is not None and wanted > most:
        text = (
            f"--optimizer-shard {wanted}: no parameter has more than {most} replicas, so each is "
        )
        yield Diagnostic("corrected", f"{text}cut by all of its own, as in MindSpore")


def _on_decided(
    shards: Mapping[str, int], decided: Sequence[str], wanted: int | None
) -> Iterator[Diagnostic]:
    """What was done to tensors of which nothing but the user's word tells."""
    cut = [name for name in decided if shards[name] > 1]
    whole = [name for name in decided if shards[name] == 1]
    does = {"cut": cut, "whole, for it does not divide their replicas": whole}
    said = "; ".join(f"{how}: {shorten(names)}" for how, names in does.items() if names)
    if said:
        text = f"nothing else tells, so --optimizer-shard {wanted} alone decides: {said}"
        text += "; say by hand of those that are whole that they are `replicated` (-s MORE.yaml)"
        yield Diagnostic("inferred", text)
