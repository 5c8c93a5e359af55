"""Makes tests/golden/batchnorm: four devices train a small net with BatchNorm in data parallel.

    python scripts/make_batchnorm.py OUT

Needs ``mindspore==2.10.0`` (CPU).  The devices are pretended: four nets with equal weights take a
step each on samples of their own, and the gradients are averaged, as AllReduce does.
"""

from __future__ import annotations

import sys
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import nn

RANKS, STEPS = 4, 3


def make_net() -> tuple[nn.Cell, nn.Optimizer]:
    """Return a net and its optimizer."""
    ms.set_seed(7)
    layers = nn.Conv2d(1, 3, 3, pad_mode="valid"), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten()
    net = nn.SequentialCell(*layers, nn.Dense(12, 2))
    return net, nn.Momentum(net.trainable_params(), 0.1, 0.9)


def main(out: Path) -> None:
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


if __name__ == "__main__":
    main(Path(sys.argv[1]))
