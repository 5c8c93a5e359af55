"""Running statistics of normalisation layers: each device keeps its own in data parallel.

A BatchNorm layer in training mode updates a mean and a variance for each channel from the samples
that its device sees.  Gradients are averaged over the devices, these are not, so that they differ
between ranks that otherwise hold the same.

Source
------
MindSpore 2.10 ``nn/layer/normalization.py`` (``_BatchNorm``, ``_InstanceNorm``; ``SyncBatchNorm``
averages them over the devices), ``mint/nn/layer/normalization.py`` (``_NormBase``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from ckpttool.model.catalog import TensorMeta
from ckpttool.model.strategy import Strategy

PAIRS = {
    "moving_mean": "moving_variance",  # nn.BatchNorm
    "running_mean": "running_var",  # mint.nn.BatchNorm
    "mean": "variance",  # nn.InstanceNorm
}
WEIGHTS = ("gamma", "weight")  # of the same layers
FLOATS = ("Float16", "BFloat16", "Float32", "Float64")


def find_statistics(metas: Mapping[str, TensorMeta], strategy: Strategy) -> dict[str, float]:
    """Return the parameters that are running statistics by their names and shapes.

    A mean and a variance of one layer come in a pair, one number for each channel.  What the
    strategy lists is none, nor that of a layer whose weight it shards: then they may be slices.

    Returns
    -------
    dict
        Name to the least value that it may have.
    """
    found: dict[str, float] = {}
    for name, meta in metas.items():
        layer, _, last = name.rpartition(".")
        pair = metas.get(_in(layer, PAIRS.get(last, "")))
        if pair is None or (meta.dtype, meta.shape) != (pair.dtype, pair.shape):
            continue
        names = {name, pair.name}
        is_told = names & strategy.layouts.keys() or any(
            math.prod(layout.parts) > 1
            for weight in WEIGHTS
            for layout in strategy.layouts.get(_in(layer, weight), ())
        )
        if meta.dtype in FLOATS and len(meta.shape) == 1 and not is_told:
            found |= {name: -math.inf, pair.name: 0.0}
    return found


def _in(layer: str, name: str) -> str:
    return f"{layer}.{name}" if layer else name
