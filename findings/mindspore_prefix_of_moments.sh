#!/bin/bash
# Where no name fits the network, MindSpore's load_param_into_net drops a prefix. It takes the first
# name in the dictionary that then fits: a moment of Adam, `adam_m.model.fc.weight`, as well as the
# weight, `model.fc.weight`. So the order of the dictionary decides, and nothing is reported missing.
# With net=, load_segmented_checkpoints loads each part by itself, so a moment of a later part
# replaces a weight whose name fits exactly and was loaded before.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check mindspore==2.10.0 numpy==1.26.4

cat >prefix.py <<'PYTHON'
import os

import mindspore as ms
import numpy as np
from mindspore import nn

print("MindSpore", ms.__version__)


def parameter(name, value):
    return ms.Parameter(ms.Tensor(np.full((2, 2), value, np.float32)), name=name)


def network(name):
    found = nn.Cell()
    found.insert_param_to_cell("weight", parameter(name, 0))
    return found


def first_value(net):
    return float(next(net.get_parameters()).asnumpy()[0, 0])


seen = []
both = ["model.fc.weight", "adam_m.model.fc.weight"]
for names in (both, both[::-1]):
    values = {name: 1 if name.startswith("model") else 100 for name in names}
    net = network("fc.weight")
    missing, _ = ms.load_param_into_net(net, {n: parameter(n, v) for n, v in values.items()})
    seen.append((first_value(net), len(missing)))
    print("order", *names, "-> loaded", seen[-1][0], "missing", missing)
print("expected: 1.0 in both orders")

os.mkdir("parts")
for number, (name, value) in enumerate([("fc.weight", 1), ("moment1.fc.weight", 100)]):
    ms.save_checkpoint([{"name": name, "data": parameter(name, value)}], f"parts/{number}.ckpt")
net = network("fc.weight")
ms.load_segmented_checkpoints("parts", net=net)
seen.append(first_value(net))
print("parts, with net=: expected 1.0, loaded", seen[-1])
net = network("fc.weight")
ms.load_param_into_net(net, ms.load_segmented_checkpoints("parts"))
seen.append(first_value(net))
print("parts, read first: loaded", seen[-1])
raise SystemExit(seen != [(1.0, 0), (100.0, 0), 100.0, 1.0])
PYTHON
venv/bin/python prefix.py 2>/dev/null
