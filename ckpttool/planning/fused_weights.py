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
``gate_up_proj``, ``w13_weight``), Transformers (Baichuan ``W_pack``, GPT-2 ``c_attn``, Llama 4
``experts.gate_up_proj``), InternLM ``wqkv``, PyTorch ``in_proj_weight``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache

from ckpttool.model.plan import Transfer
from ckpttool.model.slicing import LayoutSlicing
from ckpttool.model.strategy import Strategy
from ckpttool.problems import Diagnostic
from ckpttool.wording import count, shorten

# Words in a component of a name, by what is fused.  A plain fc1 has no gate.
_QKV = ("qkv", "wqkv", "w_pack", "c_attn", "query_key_value", "in_proj")
_GATE_UP = ("gate_up", "gate_hidden", "linear_fc1", "fc1_weight", "fc1_bias", "w13", "h_to_4h")
_GROUPED = "experts.weight1"  # Megatron-LM, grouped GEMM: stored transposed


def fused_axes(name: str, ndim: int) -> tuple[int, ...]:
    """Return the axes along which a weight may be fused, by its name; none if it is not fused.

    It is axis 0, as PyTorch and MindSpore store linear layers.  Some programs store the weights of
    experts and ``c_attn`` transposed; of three axes the first counts experts.

    Examples
    --------
    >>> fused_axes("layers.0.w_qkv.weight", 2), fused_axes("mlp.experts.w13_weight", 3)
    ((0,), (1, 2))
    >>> fused_axes("mlp.fc1.weight", 2)
    ()
    """
    if name.endswith(_GROUPED):
        return (ndim - 1,)
    components = name.lower().split(".")
    if not any(map(_is_fused, components)):
        return ()
    if ndim > 2:
        return tuple(range(1, ndim))
    may_be_transposed = "c_attn" in components or components[-2:-1] == ["experts"]
    return tuple(range(ndim)) if may_be_transposed else (0,)


@lru_cache(maxsize=1024)  # the names of a model have few components
def _is_fused(component: str) -> bool:
    words = f"_{component.lower()}_"
    return any(f"_{word}_" in words for word in _QKV + _GATE_UP)


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
        facts = f"{shorten(changed, 3)}; wrong if each rank fused its own parts"
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
