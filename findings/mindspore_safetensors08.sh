#!/bin/bash
# MindSpore 2.10.0 beside safetensors 0.8.0, which pip installs today, writes wrong numbers into
# .safetensors files, without an error: every slice that is cut on another axis than the first.
# safetensors.numpy.save_file of 0.8.0 writes the bytes that follow the address of an array, whatever
# its strides are.  Up to 0.7.0 it wrote the elements.  MindSpore gives it views.
# Exits 1 if this is no longer so.  Needs pip and about 2 GB.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
pip() { venv/bin/python -m pip install --quiet --disable-pip-version-check "$@"; }
pip mindspore==2.10.0 numpy==1.26.4

cat >views.py <<'P'
"""Two arrays that are not contiguous, saved and loaded again."""
import numpy as np
import safetensors
from safetensors.numpy import load_file, save_file

full = np.arange(16, dtype=np.float32).reshape(4, 4)
for name, array in ("columns 2-3", full[:, 2:]), ("Fortran order", np.asfortranarray(full)):
    save_file({"w": array}, "view.safetensors")
    loaded = load_file("view.safetensors")["w"]
    verdict = "right" if np.array_equal(loaded, array) else "WRONG"
    print(f"safetensors {safetensors.__version__}: save_file of {name}: {verdict}")
P

cat >transform.py <<'P'
"""A 4 x 4 tensor, cut by MindSpore for two devices: columns 0-1 and 2-3."""
import os
import sys

os.environ["GLOG_v"] = "3"
import mindspore
import numpy as np
import safetensors
from mindspore.train.node_strategy_pb2 import ParallelStrategyMap
from safetensors.numpy import load_file, save_file

strategy = ParallelStrategyMap(current_stage=0)
strategy.parallel_strategy_item.add(node_name="w").parallel_strategys.stage = 0
item = strategy.parallel_layout_item.add(param_name="w")
layouts = item.parallel_layouts
layouts.field = layouts.opt_weight_shard_step = layouts.opt_weight_shard_size = 0
layouts.dev_matrix.add().dim.append(2)
layouts.tensor_map.add().dim.extend([-1, 0])
layouts.param_split_shape.add()
layouts.indices_offset.add()
with open("strategy.ckpt", "wb") as file:
    file.write(strategy.SerializeToString())

full = np.arange(16, dtype=np.float32).reshape(4, 4)
source, target = f"source_{sys.argv[1]}", f"target_{sys.argv[1]}"
os.makedirs(f"{source}/rank_0")
save_file({"w": full}, f"{source}/rank_0/net0.safetensors")
mindspore.transform_checkpoints(
    source, target, "net", None, "strategy.ckpt", output_format="safetensors"
)
versions = f"MindSpore {mindspore.__version__}, safetensors {safetensors.__version__}"
for rank, expected in enumerate(np.split(full, 2, axis=1)):
    slice_ = load_file(f"{target}/rank_{rank}/net{rank}.safetensors")["w"]
    verdict = "right" if np.array_equal(slice_, expected) else "WRONG"
    print(f"{versions}: transform_checkpoints, rank {rank}: {verdict}")
    print(f"  expected {expected.tolist()}\n  written  {slice_.tolist()}")
P

for version in 0.7.0 0.8.0; do
    pip safetensors==$version
    venv/bin/python views.py
    venv/bin/python transform.py $version 2>>log
done | tee seen
test "$(wc -l <seen)" = 16 || cat log
test "$(grep -c 'safetensors 0\.7\.0: .* right$' seen)" = 4 || exit 1
test "$(grep -c 'safetensors 0\.8\.0: .* WRONG$' seen)" = 4 || exit 1
