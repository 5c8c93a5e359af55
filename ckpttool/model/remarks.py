"""What a run is told of how parameters were found to be cut, and of those that were not read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

from ckpttool.model.catalog import Catalog, format_ranks
from ckpttool.model.findings import Finding
from ckpttool.model.notes import Note
from ckpttool.model.source import Source
from ckpttool.model.states import Owners, find_unlike_states, odd_full_shape, owner_of
from ckpttool.model.strategy import Strategy, count, shorten


def on_layouts(found: Sequence[Source], corrected: Sequence[str], where: str) -> Iterator[Note]:
    """Notes on sources whose layout is not as ``where``, the strategy, says.

    ``corrected`` are the names of those that are cut otherwise than it says.
    """
    following = [source for source in found if source.parameter is not None]
    if following:
        names = shorten(f"{source.meta.name} (as {source.parameter})" for source in following)
        states = count(len(following), "optimizer state")
        text = f"not in {where}, cut like the parameter: {states}"
        yield Note("follows", f"{text}: {names}")
    if corrected:
        cut = count(len(corrected), "parameter")
        text = f"not cut as the strategy says, but as slices and shapes tell: {cut}"
        yield Note("corrected", f"{text}: {shorten(corrected)}")
    shapes = {source.meta.name: source.meta.shape for source in found}
    odd = [words for source in found if (words := odd_full_shape(source.meta, shapes))]
    if odd:
        text = "states of other shapes than their parameters have; are they slices?"
        yield Note("doubt", f"{text}: {shorten(odd)}")


def on_guesses(found: Sequence[Source], listed: Collection[str], owners: Owners) -> Iterator[Note]:
    """A warning of states that may be parameters: names and shapes alone speak for them.

    An optimizer keeps states of most parameters.  A prefix that is none of MindSpore's, and that
    less than half of the listed parameters have, may be that of a module.
    """
    most = Counter(name.removesuffix(base) for name, base in owners.items())
    parameters = sum(name not in owners for name in listed)
    names = [
        f"{source.meta.name} (as {source.parameter})"
        for source in found
        if source.parameter is not None
        and owner_of(source.meta.name) is None
        and 2 * most[source.meta.name.removesuffix(owners[source.meta.name])] < parameters
    ]
    if names:
        text = f"taken for optimizer state by name and shape: {count(len(names), 'tensor')}"
        text += (
            f": {shorten(names)}; if it is none, say how it is cut in a strategy by hand, given "
        )
        text += "as well (-s MORE.yaml)"
        yield Note("follows", text, is_warning=True)


def on_contradictions(strategy: Strategy, found: Sequence[Source]) -> Iterator[Finding]:
    """Problems of states that a person cut otherwise than the parameter, so that shapes differ."""
    by_hand = strategy.by_hand
    shapes = {source.meta.name: source.meta.shape for source in found}
    for meta in (source.meta for source in found):
        base = owner_of(meta.name) or ""
        if meta.name in by_hand and base in by_hand and odd_full_shape(meta, shapes) is not None:
            text = (
                f"{meta.name}: {by_hand[meta.name]} makes it {meta.shape}, and {by_hand[base]} "
                f"makes {base} {shapes[base]}, of which it is state; correct one of them"
            )
            yield Finding("shape", text, tensor=meta.name)


def find_contradictions(catalog: Catalog, strategy: Strategy) -> Iterator[Finding]:
    """Yield what headers show to be wrong with the layouts that a strategy lists."""
    yield from find_unlike_states(catalog, strategy)
    yield from _find_other_stages(catalog, strategy)


def _find_other_stages(catalog: Catalog, strategy: Strategy) -> Iterator[Finding]:
    """Yield the stages whose ranks hold more slices of other stages than of their own.

    Stages share a few parameters at most.  A strategy of two stages for ranks that all hold every
    layer would leave half of the files unread.
    """
    holders = catalog.holders if strategy.stages > 1 else {}
    for stage in range(strategy.stages if strategy.stages > 1 else 0):
        first = stage * strategy.stage_ranks
        ranks = range(first, first + strategy.stage_ranks)
        header = next((catalog.files[rank].header for rank in ranks if rank in catalog.files), {})
        own = sum(stage in strategy.stages_of(name) for name in header)
        others = [
            name
            for name, tensor in header.items()
            if stage not in (stages := strategy.stages_of(name))
            and any(
                catalog.files[rank].header[name].meta.shape == tensor.meta.shape
                for rank in holders[name]
                if rank // strategy.stage_ranks in stages
            )
        ]
        if len(others) > own:
            yield Finding(
                "strategy",
                f"{format_ranks(ranks)} hold {count(len(others), 'parameter')} that the strategy "
                f"lists for other stages only, and {own} that it lists for theirs: "
                f"{shorten(others, 3)}; is it the strategy of this run? --trust-strategy skips "
                "this check",
                ranks=tuple(ranks),
            )


def on_strays(strategy: Strategy, holders: Mapping[str, Sequence[int]]) -> Iterator[Note]:
    """A note if ranks of a stage hold what the strategy lists for other stages only."""
    strays = [
        name
        for name, ranks in holders.items()
        if name in strategy.layouts and strategy.stages > 1
        if {rank // strategy.stage_ranks for rank in ranks if rank in strategy.ranks}
        - set(strategy.stages_of(name))
    ]
    if strays:
        text = "held by ranks of stages, too, that the strategy does not list them for, and not "
        text += f"read there: {count(len(strays), 'parameter')}: {shorten(strays)}"
        yield Note("passed over", text)
