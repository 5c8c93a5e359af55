"""The scales of Float8 weights that are cast, and the blocks that share one.

A weight of shape ``(rows, columns)`` has one scale; one for each row; or one for each block, whose
last ones may be partial: ``(ceil(rows / 128), ceil(columns / 128))``.  Axes before these two, such
as experts, have scales of their own, or none at all.  The number is the stored one times its scale.

Source
------
DeepSeek-V3 ``inference/kernel.py`` (``weight_dequant``) and the ``quantization_config`` of its
``config.json``; compressed-tensors (strategies ``tensor``, ``channel`` and ``block``); the OCP
microscaling specification for E8M0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ckpttool.model.dtypes import FLOAT8, FLOATS
from ckpttool.model.plan import Term
from ckpttool.model.region import Arrangement
from ckpttool.model.slicing import FullTensor, Part, RearrangedSlicing
from ckpttool.problems import Diagnostic
from ckpttool.wording import format_shape

if TYPE_CHECKING:
    from ckpttool.checkpoint.checkpoint import Checkpoint

BLOCK = (128, 128)  # rows and columns, where no config.json says otherwise

_SCALE_TYPES = FLOATS | {"F8_E8M0"}
# Names beside a weight for the scales of what it is multiplied with.
_ACTIVATION_SCALES = ("input_scale", "input_scale_ub", "act_scale", "activation_scale")


def find_scales(checkpoint: Checkpoint) -> tuple[Mapping[str, Term], Sequence[Diagnostic]]:
    """Return the term of the scale of each Float8 weight that is cast, and what does not fit.

    Without any scale in the checkpoint, and without a configuration of these, nothing says what the
    stored numbers mean: no Float8 weight is cast, and none is a problem.
    """
    options, tensors = checkpoint.options.tensors, {t.name: t for t in checkpoint.tensors}
    weights = {
        name: what
        for name, tensor in tensors.items()
        if options.are_changed and tensor.meta.dtype in FLOAT8
        if (what := checkpoint.belonging(name)).is_trained
        if options.recipe is not None  # no rule has scales
        or options.dtype_of(tensor.meta, replace(what, scale=what.scale or "")) != tensor.meta.dtype
    }
    beside = {}
    for name in weights:
        names = (f"{name.rpartition('.')[0]}.{part}" for part in _ACTIVATION_SCALES)
        beside[name] = [scale for scale in names if scale in tensors]
    scales: dict[str, Term] = {}
    problems: list[Diagnostic] = []
    config = options.recipe.config if options.recipe is not None else {}
    are_said = checkpoint.weight_block is not None or "quantization_config" in config
    are_there = any(checkpoint.belonging(name).scale for name in tensors) or any(beside.values())
    if not (are_said or are_there):
        return scales, problems

    def add(name: str, message: str, facts: str = "", hint: str = "") -> None:
        hint = hint or "--exclude, or --dtype with patterns of other tensors"
        problems.append(Diagnostic("scale", message, hint=hint, facts=facts, tensor=name))

    size = checkpoint.weight_block or BLOCK
    for name, what in weights.items():
        weight, scale = tensors[name], tensors.get(what.scale or "")
        shape = weight.meta.shape
        if activations := beside[name]:
            add(name, "the scale of an activation would lose its meaning", ", ".join(activations))
        if scale is None:
            facts = f"expected {name}_scale_inv or {name}_scale"
            if what.scale:
                facts = f"its scale {what.scale} is left out"
            add(name, "the Float8 weight has no scale", facts)
        elif weight.own_ranks:
            hint = "`ckpttool merge` or `reshard` with --dtype"
            add(name, "blocks count from the full tensor, and convert joins no slices", hint=hint)
        elif (block := find_block(shape, scale.meta.shape, size)) is None:
            facts = f"{scale.name} is {format_shape(scale.meta.shape)}"
            facts += f", expected {_expected(shape, size)}"
            hint = "a config.json beside the file with weight_block_size, or --exclude"
            add(name, "the scale does not fit the weight", facts, hint)
        elif scale.meta.dtype not in _SCALE_TYPES:
            facts = f"{scale.name} is {scale.meta.dtype}"
            add(name, "the scale is no floating-point number", facts)
        elif checkpoint.wanted_dtype(weight.meta) == weight.meta.dtype:
            facts = "a recipe writes no scales, and no configuration has a dtype"
            add(name, "nothing says the type of the Float8 weight", facts, "--dtype bf16")
        else:
            scales[name] = _spread(scale, shape, block)
    return scales, problems


def _spread(scale: FullTensor, shape: tuple[int, ...], block: tuple[int, ...]) -> Term:
    """Return the term of a scale: a tensor as large as the weight, with one element for a block."""
    whole = Arrangement.whole(shape)
    slicing = RearrangedSlicing(whole, (Part(scale.name, scale.slicing, whole, block=block),))
    return Term(scale.rearranged(slicing), role="scale")


def _expected(shape: tuple[int, ...], size: tuple[int, int]) -> str:
    of_blocks = (-(-n // of) for n, of in zip(shape[-2:], size[-len(shape) :], strict=False))
    shapes = (*shape[:-2], *of_blocks), (*shape[:-1], 1)
    blocks, rows = map(format_shape, shapes)
    return f"{blocks} (blocks of {format_shape(size)}), {rows} or one value"


def find_block(
    shape: tuple[int, ...], scales: tuple[int, ...], block: tuple[int, int] = BLOCK
) -> tuple[int, ...] | None:
    """Return how many elements of a weight share a scale along each axis; None if nothing fits.

    The scales may have fewer axes than the weight.  ``block`` has rows and columns.

    Examples
    --------
    >>> find_block((576, 7168), (5, 56))
    (128, 128)
    >>> find_block((576, 7168), (576, 1)), find_block((576, 7168), (1,)), find_block((9, 9), ())
    ((1, 7168), (576,), ())
    >>> find_block((576, 7168), (56, 5)) is None
    True
    """
    lead, last = shape[:-2], shape[-2:]
    of_blocks = tuple(-(-size // of) for size, of in zip(last, block[-len(last) :], strict=True))
    ones = (1,) * len(shape)
    fitting = {ones[:axes] for axes in range(len(shape) + 1)}
    fitting |= {shape[:-1], (*shape[:-1], 1), (*lead, *of_blocks)}
    fitting |= {lead, (*lead, *ones[: len(last)])}
    if len(shape) == 1:
        fitting.add(shape)
    if scales not in fitting:
        return None
    sizes = (*(1,) * len(lead), *block[-len(last) :])
    return tuple(
        1 if number == size and number > 1 else size if number == 1 else of
        for number, size, of in zip(scales, shape, sizes, strict=False)
    )
