"""The scales of Float8 weights that are cast, and why some cannot be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ckpttool.model.block_scales import ACTIVATION_SCALES, find_block
from ckpttool.model.dtypes import FLOAT8
from ckpttool.model.plan import Term
from ckpttool.problems import Diagnostic
from ckpttool.records import replace
from ckpttool.wording import format_shape

if TYPE_CHECKING:
    from ckpttool.checkpoint.checkpoint import Checkpoint


def find_scales(checkpoint: Checkpoint) -> tuple[Mapping[str, Term], Sequence[Diagnostic]]:
    """Return the term of the scale of each Float8 weight that is cast, and what does not fit.

    Without any scale in the checkpoint, nothing says what the stored numbers mean: no Float8 weight
    is cast, and none is a problem.
    """
    options, tensors = checkpoint.options.tensors, {one.name: one for one in checkpoint.tensors}
    weights = {
        name: what
        for name, one in tensors.items()
        if options.casts and one.meta.dtype in FLOAT8
        if (what := checkpoint.belonging(name)).is_trained
        and options.dtype_of(one.meta, replace(what, scale=what.scale or "")) != one.meta.dtype
    }
    beside = {name: _scales_of_activations(name, tensors) for name in weights}
    scales: dict[str, Term] = {}
    problems: list[Diagnostic] = []
    if not any(checkpoint.belonging(name).scale for name in tensors) and not any(beside.values()):
        return scales, problems

    def add(name: str, text: str, facts: str = "", hint: str = "") -> None:
        hint = hint or "--exclude, or --dtype with patterns of other tensors"
        problems.append(Diagnostic("scale", text, hint=hint, facts=facts, tensor=name))

    for name, what in weights.items():
        weight, scale = tensors[name], tensors.get(what.scale or "")
        shape = weight.meta.shape
        if others := beside[name]:
            add(name, "the scale of an activation would lose its meaning", ", ".join(others))
        if scale is None:
            add(
                name, "the Float8 weight has no scale", f"expected {name}_scale_inv or {name}_scale"
            )
        elif weight.own_ranks:
            hint = "`ckpttool merge` or `reshard` with --dtype"
            add(name, "blocks count from the full tensor, and convert joins no slices", hint=hint)
        elif (block := find_block(shape, scale.meta.shape, checkpoint.weight_block)) is None:
            facts = f"{scale.name} is {format_shape(scale.meta.shape)} for {format_shape(shape)}"
            facts += f" in blocks of {format_shape(checkpoint.weight_block)}"
            add(name, "the scale does not fit the weight", facts)
        else:
            scales[name] = Term(scale, block=block)
    return scales, problems


def _scales_of_activations(name: str, names: Mapping[str, object]) -> list[str]:
    layer = name.rpartition(".")[0]
    return [one for part in ACTIVATION_SCALES if (one := f"{layer}.{part}") in names]
