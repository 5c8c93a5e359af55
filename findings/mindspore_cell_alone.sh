#!/bin/bash
# MindSpore saves a BatchNorm or a PReLU by itself under other names than in a network: `mean` for
# `moving_mean`, `variance` for `moving_variance`, `a` for `w`.  Behind the prefix of a network these
# are not found, and load_param_into_net leaves running statistics and slopes as they were.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check mindspore==2.10.0 numpy==1.26.4

cat >alone.py <<'PYTHON'
import mindspore as ms
from mindspore import nn

print("MindSpore", ms.__version__)
layers = nn.BatchNorm2d(2), nn.PReLU(2)
for number, layer in enumerate(layers):
    ms.save_checkpoint(layer, f"{number}.ckpt")
found = [ms.load_checkpoint(f"{number}.ckpt") for number in range(2)]
network = nn.SequentialCell(nn.BatchNorm2d(2), nn.PReLU(2))
names = {f"{number}.{name}": one for number, each in enumerate(found) for name, one in each.items()}
missing, unknown = ms.load_param_into_net(network, names)
print("expected: the names of the network,", *network.parameters_dict())
print("seen:    ", *names)
print("not loaded:", *missing)
right = ["0.moving_mean", "0.moving_variance", "1.w"], ["0.mean", "0.variance", "1.a"]
raise SystemExit((sorted(missing), sorted(unknown)) != right)
PYTHON
venv/bin/python alone.py 2>/dev/null
