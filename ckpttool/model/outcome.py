"""What the rank files of a plan hold, told as a strategy."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from ckpttool.model.layout import Layout
from ckpttool.model.plan import Plan, Transfer
from ckpttool.model.strategy import Strategy


def outcome(plan: Plan, target: Strategy) -> Strategy:
    """The layouts of all parameters in the outputs of ``plan``, whose target is ``target``.

    They are those by which it cuts: patterns of names resolved, expanded maps folded, states that
    follow their parameter in their own names, corrections made.  What every rank gets undivided,
    since ``target`` does not list it, is listed as undivided in each stage: of a parameter that one
    strategy does not list and another cuts MindSpore's transform takes one rank's slice for all.

    Not listed are strings, what each rank has of its own, single values beside the network, and
    what is undivided and has a ``-`` in its name: MindSpore cannot read such names there, so it has
    no other layout for them either.  Files that MindSpore compiles list single parameters of the
    network and states of them; ``global_step``, ``learning_rate`` and the like they leave out.
    """
    layouts: dict[str, tuple[Layout, ...]] = {}
    for transfer in plan.transfers:
        name = transfer.source.meta.name
        if _is_told(transfer, name in target.layouts or name in plan.not_listed.followed):
            placed = (*layouts.get(name, ()), *_by_stage(transfer, target))
            layouts[name] = tuple(sorted(placed, key=lambda layout: layout.first_rank))
    return replace(target, layouts=layouts, rules=None)


def _is_told(transfer: Transfer, is_listed: bool) -> bool:
    meta = transfer.source.meta
    if transfer.source.rank_cycle is not None or meta.text is not None:
        return False
    if "-" in meta.name:
        return any(math.prod(layout.parts) > 1 for layout in transfer.layouts)
    return is_listed or math.prod(meta.shape) != 1


def _by_stage(transfer: Transfer, target: Strategy) -> Iterator[Layout]:
    """The layouts of a transfer; one that is for all stages at once as one for each."""
    for layout in transfer.layouts:
        if len(layout.ranks) == target.stage_ranks:
            yield layout
            continue
        for first in range(layout.ranks.start, layout.ranks.stop, target.stage_ranks):
            yield Layout.undivided(len(layout.tensor_map), target.stage_ranks, first)
