"""A note on weights that each rank may have fused for itself.

A fused weight holds several weights, one after another along an axis: gate and up, or q, k and v.
Inference and Megatron fuse the slices of each rank: ``[gate_0; up_0]`` on rank 0, and
``[gate_1; up_1]`` on rank 1.  Joined in the order of ranks these are
``[gate_0; up_0; gate_1; up_1]``, which is right for two ranks and for no other number.  Semi-auto
training fuses full tensors and shards these, so they are right for any number.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ckpttool.model.choices import fused_axes
from ckpttool.model.joining import format_names
from ckpttool.model.plan import Transfer
from ckpttool.model.slicing import LayoutSlicing
from ckpttool.model.strategy import Strategy
from ckpttool.problems import Diagnostic
from ckpttool.wording import count


def fused_notes(
    transfers: Iterable[Transfer], src: Strategy, dst: Strategy | None
) -> Iterator[Diagnostic]:
    """Yield a note if fused weights change their number of slices along an axis that may be fused.

    A side that a strategy of training shards has slices of a full tensor.
    """
    changed = []
    for transfer in transfers:
        name, slicing = transfer.source.meta.name, transfer.source.slicing
        axes = fused_axes(name, len(transfer.meta.shape)) if transfer.meta.shape else ()
        if not axes or not isinstance(slicing, LayoutSlicing):
            continue
        before = slicing.layout.count_cuts(axes)
        after = {layout.count_cuts(axes) for layout in transfer.layouts}
        may_be_fused_by_rank = (max(before) > 1 and not _is_of_training(src, name)) or (
            max(map(max, after)) > 1 and not _is_of_training(dst, name)
        )
        if after != {before} and may_be_fused_by_rank:
            changed.append(name)
    if changed:
        whose = "its" if len(changed) == 1 else "their"
        message = f"{count(len(changed), 'fused weight', 'change')} {whose} number of slices"
        facts = f"{format_names(changed)}; wrong if each rank fused its own parts"
        yield Diagnostic(
            "doubt",
            message,
            hint="--fused NAME=PARTS, or a recipe with fused:; see `ckpttool help fused-weights`",
            facts=facts,
        )


def _is_of_training(strategy: Strategy | None, name: str) -> bool:
    if strategy is None or name not in strategy.layouts or name in strategy.handwritten:
        return False
    return strategy.lists_states
