"""Gradients in the making (``accu_grads.*``), for a target whose strategy claims too much of them.

MindSpore copies the entry of the parameter with its optimizer shard, and cuts these by it only
under ``gradient_accumulation_shard``.  Where a source's own strategy claims a shard that its slices
do not have, the same setting holds for the target; else nothing tells, and the target's strategy is
believed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from ckpttool.model.layout import Layout
from ckpttool.model.notes import Note
from ckpttool.model.source import Source
from ckpttool.model.strategy import GRADIENTS, Strategy, count, shorten


@dataclass(slots=True)
class Gradients:
    """What was decided: names of those that a shard is claimed for, left uncut or believed."""

    left: list[str] = field(default_factory=list)
    believed: list[str] = field(default_factory=list)

    def uncut(
        self, source: Source, strategy: Strategy | None, layouts: tuple[Layout, ...]
    ) -> tuple[Layout, ...]:
        """The target's layouts of a source, without a shard that its slices do not have.

        Parameters
        ----------
        source
            As it was found.
        strategy
            What the source's own strategy says; None if there is none.
        layouts
            What the target's says.
        """
        name = source.meta.name
        is_claimed = any(layout.optimizer_shard > 1 for layout in layouts)
        if not name.startswith(GRADIENTS) or not is_claimed:
            return layouts
        claimed = () if strategy is None else strategy.layouts.get(name, ())
        if not any(layout.optimizer_shard > 1 for layout in claimed):
            self.believed.append(name)
            return layouts
        if source.layout.optimizer_shard > 1:
            return layouts
        self.left.append(name)
        return tuple(replace(layout, optimizer_shard=1) for layout in layouts)

    def notes(self) -> Iterator[Note]:
        """What is to be said of the decisions."""
        if self.left:
            text = "not cut by the optimizer shard that the target strategy claims, as those of "
            text += "the source are not by theirs"
            yield Note("corrected", f"{text}: {_named(self.left)}")
        if self.believed:
            text = "cut by an optimizer shard, as the target strategy claims, though MindSpore "
            text += "does so only under gradient_accumulation_shard"
            yield Note("doubt", f"{text}: {_named(self.believed)}")


def _named(names: list[str]) -> str:
    return f"{count(len(names), 'gradient')}: {shorten(names)}"
