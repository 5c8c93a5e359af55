"""The blocks of a Float8 weight that share one scale, as shapes tell.

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

BLOCK = (128, 128)  # rows and columns, where no config.json says otherwise

# Names beside a weight for the scales of what it is multiplied with.
ACTIVATION_SCALES = ("input_scale", "input_scale_ub", "act_scale", "activation_scale")


def find_block(
    shape: tuple[int, ...], scales: tuple[int, ...], block: tuple[int, int] = BLOCK
) -> tuple[int, ...] | None:
    """Return how many elements of a weight share a scale along each axis; None if nothing fits.

    Parameters
    ----------
    shape, scales
        The full shapes of the weight and of its scales.
    block
        Rows and columns of a block.

    Returns
    -------
    tuple or None
        One number for each axis of the scales, which may have fewer axes than the weight.

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
