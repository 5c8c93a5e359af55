#!/bin/bash
# PyTorch's consolidation of safetensors writes every tensor without axes as zero.
#
# HuggingFaceStorageWriter(save_distributed=True, enable_consolidation=True) saves the slices of
# each rank and joins them in the files that users load. The slices hold the right value; the
# joined file has name, shape and type of a scalar, and zeros for its bytes. There is no error and
# no warning. Such tensors are logit_scale of CLIP and the scales of quantized weights. A tensor of
# the shape (1,) is right. consolidate_safetensors_files, for slices that were saved before, does
# the same.
#
# Seen with torch 2.14.1 and safetensors 0.8.0 on a processor; torch 2.13.0 and 2.15.0 do the same:
#   slices: {'logit_scale': 2.6592, 'scale': 0.5, 'one': [4.0]}
#   joined: {'logit_scale': 0.0, 'weight': [[0.0, 1.0], [2.0, 3.0]], 'scale': 0.0, 'one': [4.0]}
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check \
    torch==2.14.1 safetensors==0.8.0 numpy==2.4.6

cat >scalars.py <<'PYTHON'
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing
from safetensors.torch import load_file
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor


def run(rank, world):
    store = f"file://{Path('store').resolve()}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        writer = dcp.HuggingFaceStorageWriter(
            "model", save_distributed=True, enable_consolidation=True
        )
        state = {
            "logit_scale": torch.nn.Parameter(torch.tensor(2.6592)),
            "scale": distribute_tensor(torch.tensor(0.5).bfloat16(), mesh, [Replicate()]),
            "one": torch.tensor([4.0]),
            "weight": distribute_tensor(torch.arange(4.0).reshape(2, 2), mesh, [Shard(1)]),
        }
        dcp.save(state, storage_writer=writer)
    dist.destroy_process_group()


def read(folder):
    return {
        name: round(tensor.item(), 4) if tensor.ndim == 0 else tensor.tolist()
        for path in sorted(Path(folder).glob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


if __name__ == "__main__":
    torch.multiprocessing.spawn(run, args=(2,), nprocs=2)
    slices, joined = read("model/sharded"), read("model")
    Path("again").mkdir()
    consolidate_safetensors_files("model/sharded", "again", dict.fromkeys(joined, 1))
    print("torch", torch.__version__.split("+")[0])
    print("slices:", {name: slices[name] for name in ("logit_scale", "scale", "one")})
    print("joined:", joined)
    assert (slices["logit_scale"], slices["scale"]) == (2.6592, 0.5)
    assert joined["weight"] == [[0.0, 1.0], [2.0, 3.0]] and joined["one"] == [4.0]
    assert read("again") == joined
    assert (joined["logit_scale"], joined["scale"]) == (0, 0)
PYTHON
echo "expected: the scalars of the slices in the joined file"
venv/bin/python scalars.py 2>noise || { cat noise; exit 1; }
