"""Makes what the tests know of layers, with MindSpore and PyTorch themselves.

    python scripts/make_layers.py batchnorm OUT    four devices train a small net with BatchNorm
    python scripts/make_layers.py names OUT.json   the names of each layer in both frameworks

Needs ``mindspore==2.10.0`` (CPU), and for names ``torch==2.13.0`` (CPU) beside it.

``batchnorm`` makes tests/golden/batchnorm.  The devices are pretended: four nets with equal weights
take a step each on samples of their own, and the gradients are averaged, as AllReduce does.

``names`` makes tests/golden/layers.json.  It builds every cell of ``mindspore.nn`` and
``mindspore.mint.nn`` that has parameters, and the module of ``torch.nn`` of the same meaning, each
as the child ``x`` of a network, and lists parameters and buffers with their shapes.  A cell that
has other names without a network has these, too.  It fails if a cell with parameters is missing in
its table.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import nn

RANKS, STEPS = 4, 3
MODULES = {  # cell to module
    "nn.Dense(4, 3)": "nn.Linear(4, 3)",
    "nn.Dense(4, 3, has_bias=False)": "nn.Linear(4, 3, bias=False)",
    "nn.DenseThor(4, 3)": "nn.Linear(4, 3)",
    "nn.DenseBnAct(4, 3, has_bn=True)": 'nn.ModuleDict({"dense": nn.Linear(4, 3), '
    '"batchnorm": nn.BatchNorm1d(3)})',
    "nn.Linear(4, 3)": "nn.Linear(4, 3)",
    "nn.BiDense(4, 5, 3)": "nn.Bilinear(4, 5, 3)",
    "nn.Conv1d(4, 6, 5, has_bias=True)": "nn.Conv1d(4, 6, 5)",
    "nn.Conv1dTranspose(4, 6, 5, has_bias=True)": "nn.ConvTranspose1d(4, 6, 5)",
    "nn.Conv2d(4, 6, 3, has_bias=True)": "nn.Conv2d(4, 6, 3)",
    "nn.Conv2d(4, 6, 1)": "nn.Conv2d(4, 6, 1, bias=False)",
    "nn.Conv2dThor(4, 6, 3, has_bias=True)": "nn.Conv2d(4, 6, 3)",
    "nn.Conv2dTranspose(4, 6, 3, has_bias=True)": "nn.ConvTranspose2d(4, 6, 3)",
    "nn.Conv2dBnAct(4, 6, 3, has_bn=True, has_bias=True, activation=nn.PReLU(6))": "nn.ModuleDict("
    '{"conv": nn.Conv2d(4, 6, 3), "batchnorm": nn.BatchNorm2d(6), "activation": nn.PReLU(6)})',
    "nn.Conv3d(4, 6, 3, has_bias=True)": "nn.Conv3d(4, 6, 3)",
    "nn.Conv3dTranspose(4, 6, 3, has_bias=True)": "nn.ConvTranspose3d(4, 6, 3)",
    "nn.Embedding(7, 4)": "nn.Embedding(7, 4)",
    "nn.EmbeddingExt(7, 4)": "nn.Embedding(7, 4)",
    "nn.EmbeddingThor(7, 4)": "nn.Embedding(7, 4)",
    "nn.EmbeddingLookup(7, 4)": "nn.Embedding(7, 4)",
    "nn.EmbeddingLookupThor(7, 4)": "nn.Embedding(7, 4)",
    "nn.MultiFieldEmbeddingLookup(7, 4, 2)": "nn.Embedding(7, 4)",
    "nn.BatchNorm1d(4)": "nn.BatchNorm1d(4)",
    "nn.BatchNorm2d(1)": "nn.BatchNorm2d(1)",
    "nn.BatchNorm3d(4)": "nn.BatchNorm3d(4)",
    "nn.SyncBatchNorm(4)": "nn.SyncBatchNorm(4)",
    **{
        f"nn.InstanceNorm{n}d(4)": f"nn.InstanceNorm{n}d(4, affine=True, track_running_stats=True)"
        for n in (1, 2, 3)
    },
    "nn.LayerNorm((4,))": "nn.LayerNorm(4)",
    "nn.LayerNorm((4, 5), 1, 1)": "nn.LayerNorm((4, 5))",
    "nn.LayerNormExt(4)": "nn.LayerNorm(4)",
    "nn.GroupNorm(2, 4)": "nn.GroupNorm(2, 4)",
    "nn.PReLU()": "nn.PReLU()",
    "nn.PReLU(4)": "nn.PReLU(4)",
    "nn.PReLUExt(4)": "nn.PReLU(4)",
    **{
        f"nn.{one}(3, 4, 2, bidirectional=True)": f"nn.{one}(3, 4, 2, bidirectional=True)"
        for one in ("RNN", "GRU", "LSTM")
    },
    **{f"nn.{one}(3, 4)": f"nn.{one}(3, 4)" for one in ("RNNCell", "GRUCell", "LSTMCell")},
    "nn.MultiheadAttention(4, 2)": "nn.MultiheadAttention(4, 2)",
    "nn.MultiheadAttention(4, 2, add_bias_kv=True, kdim=3, vdim=5)": "nn.MultiheadAttention("
    "4, 2, add_bias_kv=True, kdim=3, vdim=5)",
    "nn.TransformerEncoderLayer(4, 2, 8)": "nn.TransformerEncoderLayer(4, 2, 8)",
    "nn.TransformerDecoderLayer(4, 2, 8)": "nn.TransformerDecoderLayer(4, 2, 8)",
    **{
        f"nn.Transformer{one}(nn.Transformer{one}Layer(4, 2, 8), 1, nn.LayerNorm((4,)))": ""
        f"nn.Transformer{one}(nn.Transformer{one}Layer(4, 2, 8), 1, nn.LayerNorm(4))"
        for one in ("Encoder", "Decoder")
    },
    "nn.Transformer(4, 2, 1, 1, 8)": "nn.Transformer(4, 2, 1, 1, 8)",
    **{
        f"mint.nn.{one}": f"nn.{one}"
        for one in (
            *("Linear(4, 3)", "Embedding(7, 4)", "PReLU(4)", "LayerNorm(4)", "GroupNorm(2, 4)"),
            *("Conv1d(4, 6, 5)", "Conv2d(4, 6, 3)", "Conv3d(4, 6, 3)", "ConvTranspose2d(4, 6, 3)"),
            *("BatchNorm1d(4)", "BatchNorm2d(4)", "BatchNorm3d(4)", "SyncBatchNorm(4)"),
        )
    },
}


def make_net() -> tuple[nn.Cell, nn.Optimizer]:
    """Return a net and its optimizer."""
    ms.set_seed(7)
    layers = nn.Conv2d(1, 3, 3, pad_mode="valid"), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten()
    net = nn.SequentialCell(*layers, nn.Dense(12, 2))
    return net, nn.Momentum(net.trainable_params(), 0.1, 0.9)


def make_batchnorm(out: Path) -> None:
    """Train, and save what each device holds."""
    pairs = [make_net() for _ in range(RANKS)]
    first = pairs[0][0].parameters_dict()
    for net, _ in pairs[1:]:
        copies = {name: ms.Tensor(one.asnumpy().copy()) for name, one in first.items()}
        ms.load_param_into_net(net, {k: ms.Parameter(v, name=k) for k, v in copies.items()})
    rng, loss = np.random.default_rng(0), nn.MSELoss()
    for _ in range(STEPS):
        gradients = []
        for rank, (net, optimizer) in enumerate(pairs):
            net.set_train()
            x = ms.Tensor(rng.standard_normal((4, 1, 4, 4)).astype("f4") + rank)
            y = ms.Tensor(rng.standard_normal((4, 2)).astype("f4"))
            step = ms.value_and_grad(
                lambda a, b, net=net: loss(net(a), b), None, optimizer.parameters
            )
            gradients.append([one.asnumpy() for one in step(x, y)[1]])
        mean = tuple(ms.Tensor(sum(of_ranks) / RANKS) for of_ranks in zip(*gradients, strict=True))
        for _, optimizer in pairs:
            optimizer(mean)
    for rank, (net, optimizer) in enumerate(pairs):
        folder = out / f"rank_{rank}"
        folder.mkdir(parents=True)
        held = {one.name: one for one in (*net.get_parameters(), *optimizer.get_parameters())}
        saved = [{"name": name, "data": one} for name, one in held.items()]
        ms.save_checkpoint(saved, str(folder / f"resnet-1_{STEPS}.ckpt"))


class Net(nn.Cell):
    """A network with one layer."""

    def __init__(self, x: nn.Cell) -> None:
        super().__init__()
        self.x = x


def missing_cells() -> list[str]:
    """Return the cells that have parameters, by their source, and are not in `MODULES`."""
    known = {f"mindspore.{cell.partition('(')[0]}" for cell in MODULES}
    makes = re.compile(r"\bParameter\(|= (nn\.)?(Dense|\w*Conv[123]d|BatchNorm[12]d|LayerNorm)\(")
    rooms = "mindspore.nn.layer", "mindspore.nn.loss", "mindspore.mint"
    return [
        f"{room.__name__}.{name}"
        for room in (nn, ms.mint.nn)
        for name, cell in vars(room).items()
        if inspect.isclass(cell) and issubclass(cell, nn.Cell) and cell is not nn.SequentialCell
        if any(
            one.__module__.startswith(rooms) and makes.search(inspect.getsource(one))
            for one in cell.__mro__
        )
        if f"{room.__name__}.{name}" not in known
    ]


def make_names(out: Path) -> None:
    """Build all layers, and write their names."""
    import torch

    if missing := missing_cells():
        sys.exit(f"not in the table: {missing}")
    rows = []
    for cell, module in MODULES.items():
        names = {"nn": nn, "mint": ms.mint}
        listed = [
            {name: list(one.shape) for name, one in each.items()}
            for each in (
                eval(cell, names).parameters_dict(),
                Net(eval(cell, names)).parameters_dict(),
                torch.nn.ModuleDict({"x": eval(module, {"nn": torch.nn})}).state_dict(),
            )
        ]
        rows.append({"cell": cell, "module": module})
        rows[-1] |= dict(zip(("alone", "mindspore", "torch"), listed, strict=True))
        if {f"x.{name}": shape for name, shape in listed[0].items()} == listed[1]:
            del rows[-1]["alone"]
    lines = ",\n".join(json.dumps(row) for row in rows)
    out.write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    {"batchnorm": make_batchnorm, "names": make_names}[sys.argv[1]](Path(sys.argv[2]))
