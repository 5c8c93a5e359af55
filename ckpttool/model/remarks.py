"""What a person should know of the sources of a checkpoint: layouts that were found otherwise."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ckpttool.model.notes import Note
from ckpttool.model.source import Source
from ckpttool.model.states import odd_full_shape
from ckpttool.model.strategy import Strategy, count, shorten


def layout_notes(found: Sequence[Source], corrected: Sequence[str], where: str) -> Iterator[Note]:
    """Notes on layouts that are not those that ``where`` says, ``"the strategy"`` say.

    ``corrected`` has the names of listed parameters that are cut otherwise.
    """
    following = [source for source in found if source.follows is not None]
    if following:
        names = shorten(f"{source.meta.name} (as {source.follows})" for source in following)
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


def stray_notes(strategy: Strategy, holders: Mapping[str, Sequence[int]]) -> Iterator[Note]:
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
