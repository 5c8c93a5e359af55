"""Networks to compile, built from a recipe; nothing is ever computed with them.

A recipe is what ``tests/e2e/interop/recipes.py`` makes: ``{"kind": "stack" | "grid", ...}``.
"""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.common.initializer import initializer
from mindspore.nn.wrap.cell_wrapper import (
    PipelineCell,
    _TrainGradAccuStepCell,
    _VirtualDatasetCell,
)
from mindspore.parallel import Layout

MICRO_BATCHES = 4  # of a pipeline
BATCH = 32


def parameter(name, shape, dtype):
    return Parameter(initializer("zeros", shape, getattr(ms, dtype)), name=name)


def zeros(shape, dtype="float32"):
    return Tensor(np.zeros(shape, "f4"), getattr(ms, dtype))


def nested(value):
    return tuple(map(nested, value)) if isinstance(value, list) else value


class Dense(nn.Cell):
    """``x w + b``, cut over (data, model) devices: columns of ``w``, or its rows."""

    def __init__(self, item, data, model):
        super().__init__()
        dtype, transposed = item["dtype"], item["transposed"]
        shape = [item["n_in"], item["n_out"]]
        self.weight = parameter("weight", shape[::-1] if transposed else shape, dtype)
        self.bias = parameter("bias", shape[1:], dtype)
        rows, columns = (model, 1) if item["cut"] == "rows" else (1, model)
        weight_cut = (columns, rows) if transposed else (rows, columns)
        self.cast = ops.Cast()
        self.matmul = ops.MatMul(transpose_b=transposed).shard(((data, rows), weight_cut))
        self.add = ops.Add().shard(((data, columns), (columns,)))
        self.dtype = getattr(ms, dtype)

    def construct(self, x):
        return self.add(self.matmul(self.cast(x, self.dtype), self.weight), self.bias)


class Stack(nn.Cell):
    """Layers one after the other, and the mean square of what comes out."""

    def __init__(self, recipe):
        super().__init__()
        data, model = recipe["data"], recipe["model"]
        self.layers = nn.CellList([Dense(item, data, model) for item in recipe["layers"]])
        if recipe["stages"] > 1:
            for layer, stage in zip(self.layers, recipe["stage_of"], strict=True):
                layer.pipeline_stage = stage
        self.loss = nn.MSELoss()

    def construct(self, x, y):
        for layer in self.layers:
            x = layer(x)
        return self.loss(ops.cast(x, ms.float32), y)


class Grid(nn.Cell):
    """``x_i * w_i`` for parameters of any layout, and of any type if they are not trained."""

    def __init__(self, recipe):
        super().__init__()
        items = recipe["items"]
        self.weights = ms.ParameterTuple(
            [parameter(item["name"], item["shape"], item["dtype"]) for item in items]
        )
        self.products = [self.product(item, recipe["mesh"]) for item in items]
        self.count = len(items)
        self.trained = bool(recipe["optimizer"])

    @staticmethod
    def product(item, mesh):
        op = ops.LogicalAnd() if item["dtype"] == "bool_" else ops.Mul()
        cut = nested(item["cut"])
        if mesh:
            layout = Layout(nested(mesh["matrix"]), nested(mesh["axes"]))
            return op.shard((layout(*cut), layout(*cut)))
        return op.shard((cut, cut))

    def construct(self, *inputs):
        outputs = ()
        for i in range(self.count):
            outputs = (*outputs, self.products[i](inputs[i], self.weights[i]))
        if not self.trained:
            return outputs
        total = 0.0
        for output in outputs:
            total = total + ops.square(ops.cast(output, ms.float32)).mean()
        return total


OPTIMIZERS = {
    "adafactor": lambda parameters: nn.AdaFactor(
        parameters, 0.01, scale_parameter=False, relative_step=False
    ),
    "sgd": lambda parameters: nn.SGD(parameters, 0.01),
    "momentum": lambda parameters: nn.Momentum(parameters, 0.01, 0.9),
    "adam": lambda parameters: nn.Adam(parameters, 0.001),
    "adamw": lambda parameters: nn.AdamWeightDecay(parameters, 0.001),
    "lamb": lambda parameters: nn.Lamb(parameters, 0.001),
}


def build(recipe):
    """The network of a recipe, with its optimizer, and inputs for it."""
    if recipe["kind"] == "grid":
        network = Grid(recipe)
        inputs = [zeros(item["shape"], item["dtype"]) for item in recipe["items"]]
    else:
        network = Stack(recipe)
        layers = recipe["layers"]
        inputs = [zeros([BATCH, layers[0]["n_in"]]), zeros([BATCH, layers[-1]["n_out"]])]
    network.update_parameters_name("")
    if not recipe["optimizer"]:
        return network, inputs
    optimizer = OPTIMIZERS[recipe["optimizer"]](network.trainable_params())
    if recipe["stages"] > 1:
        pipeline = _VirtualDatasetCell(PipelineCell(network, MICRO_BATCHES))
        return _TrainGradAccuStepCell(pipeline, optimizer), inputs
    return nn.TrainOneStepCell(network, optimizer), inputs
