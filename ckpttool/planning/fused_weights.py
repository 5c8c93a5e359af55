"""A note on weights that each rank may have fused for itself.

A fused weight holds several weights, one after another along an axis: gate and up, or q, k and v.
Inference and Megatron fuse the slices of each rank: ``[gate_0; up_0]`` on rank 0, and
``[gate_1; up_1]`` on rank 1.  Joined in the order of ranks these are
``[gate_0; up_0; gate_1; up_1]``, which is right for two ranks and for no other number.  Semi-auto
training fuses full tensors and shards these, so they are right for any number.

Source
------
MindFormers' inference (``w_qkv``, ``w_gate_hidden``), Megatron-LM (``linear_fc1`` with swiglu,
issue 2769), Megatron-DeepSpeed (``dense_h_to_4h``, issue 338), vLLM (``qkv_proj``,
``gate_up_proj``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ckpttool.model.diagnostics import Diagnostic
from ckpttool.model.layout import Layout
from ckpttool.model.plan import Transfer
from ckpttool.model.slicing import LayoutSlicing
from ckpttool.model.strategy import Merged, Sharding, Strategy
from ckpttool.model.wording import count, shorten
from ckpttool.planning.optimizer_state import lists_states

# Names before ".weight" or ".bias"; these are fused along axis 0.
_FUSED = frozenset(
    (
        *("w_qkv", "w_gate_hidden"),
        *("linear_qkv", "linear_fc1", "query_key_value", "dense_h_to_4h"),
        *("qkv_proj", "gate_up_proj"),
    )
)
_FUSED_EXPERTS = "experts.weight1"  # stored transposed, so fused along the last axis


def fused_axis(name: str) -> int | None:
    """Return the axis along which a weight is fused, by its name; None if it is not.

    Examples
    --------
    >>> fused_axis("layers.0.attention.w_qkv.weight"), fused_axis("mlp.experts.weight1")
    (0, -1)
    """
    if name.endswith(_FUSED_EXPERTS):
        return -1
    _, _, ending = name.rpartition(".")
    component = name.removesuffix(f".{ending}").rpartition(".")[2]
    return 0 if ending in ("weight", "bias") and component in _FUSED else None


def fused_notes(
    transfers: Iterable[Transfer], src: Sharding, dst: Strategy | Merged
) -> Iterator[Diagnostic]:
    """Yield a note if fused weights change their number of slices along the fused axis.

    A side that a strategy of training shards has slices of a full tensor.
    """
    changed = []
    for transfer in transfers:
        name, slicing = transfer.source.meta.name, transfer.source.slicing
        axis = fused_axis(name)
        if axis is None or not transfer.meta.shape or not isinstance(slicing, LayoutSlicing):
            continue
        before = _count_cuts(slicing.layout, axis)
        after = {_count_cuts(layout, axis) for layout in transfer.layouts}
        may_be_fused_by_rank = (before > 1 and not _is_of_training(src, name)) or (
            max(after) > 1 and not _is_of_training(dst, name)
        )
        if after != {before} and may_be_fused_by_rank:
            changed.append(name)
    if changed:
        text = f"{count(len(changed), 'fused weight', 'change')} the number of slices"
        facts = f"{shorten(changed, 3)}; wrong if each rank fused its own parts"
        yield Diagnostic("doubt", text, "`ckpttool help fused-weights`", facts=facts)


def _count_cuts(layout: Layout, axis: int) -> int:
    """Return the slices along an axis; an optimizer shard cuts and joins the same slice."""
    along_rows = axis in (0, -len(layout.tensor_map))
    return layout.slice_counts[axis] // (layout.optimizer_shard if along_rows else 1)


def _is_of_training(sharding: Sharding, name: str) -> bool:
    """Return whether the strategy of a compiled training lists a tensor."""
    is_listed = name in sharding.layouts and name not in sharding.handwritten
    return is_listed and isinstance(sharding, Strategy) and lists_states(sharding)
