#!/bin/bash
# PyTorch's reader of MXFP4 weights fills the first columns of each tensor and leaves the rest.
#
# QuantizedHuggingFaceStorageReader reads files like those of gpt-oss: NAME_blocks of the shape
# (experts, rows, groups, 16), NAME_scales of (experts, rows, groups), two numbers in each byte. A
# target has to be of the shape (experts, rows, groups * 32). But the extent of what is stored stays
# that of the file, so the plan of the load ends at column `groups`: 3 of 96 columns are read here,
# and 90 of the 2880 of gpt-oss. The others keep what torch.empty or the initialization left there.
# There is no error and no warning, and the columns that were read are right. FP8 weights of two
# axes, with a weight_scale_inv, are read in full.
#
# Seen with torch 2.14.1 and safetensors 0.8.0 on a processor; torch 2.13.0 and 2.15.0 do the same:
#   (2, 4, 96): columns read: 0-2 of 96; still -7: 3-95
#   (2, 4, 3): Size mismatch
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check \
    torch==2.14.1 safetensors==0.8.0 numpy==2.4.6

cat >mxfp4.py <<'PYTHON'
import json

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

torch.manual_seed(0)
name = "model.layers.0.mlp.experts.down_proj"
blocks = torch.randint(0, 256, (2, 4, 3, 16), dtype=torch.uint8)
scales = torch.randint(124, 130, (2, 4, 3), dtype=torch.uint8)
weight = torch.randn(130, 140).to(torch.float8_e4m3fn)
inverse = torch.rand(2, 2) + 0.5
stored = {
    f"{name}_blocks": blocks,
    f"{name}_scales": scales,
    "fp8.weight": weight,
    "fp8.weight_scale_inv": inverse,
}
save_file(stored, "model.safetensors")
with open("model.safetensors.index.json", "w") as file:
    json.dump({"metadata": {}, "weight_map": dict.fromkeys(stored, "model.safetensors")}, file)

# E2M1: a sign, two bits of exponent, one of mantissa; the low half of a byte comes first.
halves = torch.stack([blocks & 15, blocks >> 4], dim=-1).reshape(2, 4, 3, 32).int()
exponent, mantissa = halves >> 1 & 3, (halves & 1).float()
size = torch.where(exponent > 0, (1 + mantissa / 2) * 2.0 ** (exponent - 1), mantissa / 2)
numbers = torch.where(halves & 8 > 0, -size, size) * torch.exp2(scales.float() - 127)[..., None]
expected = numbers.reshape(2, 4, 96)
tiles = inverse.repeat_interleave(128, 0)[:130].repeat_interleave(128, 1)[:, :140]

target = {f"{name}_blocks": torch.full((2, 4, 96), -7.0), "fp8.weight": torch.zeros(130, 140)}
dcp.load(target, storage_reader=dcp.QuantizedHuggingFaceStorageReader("."))
loaded = target[f"{name}_blocks"]
kept = (loaded == -7).all(dim=(0, 1)).nonzero().flatten().tolist()
print("torch", torch.__version__.split("+")[0])
print(f"(2, 4, 96): columns read: 0-{min(kept) - 1} of 96; still -7: {min(kept)}-{max(kept)}")
try:
    dcp.load(
        {f"{name}_blocks": torch.zeros(2, 4, 3)},
        storage_reader=dcp.QuantizedHuggingFaceStorageReader("."),
    )
    refused = False
except dcp.CheckpointException as error:
    refused = "Size mismatch" in str(error)
    print("(2, 4, 3): Size mismatch" if refused else error)
assert refused and (expected != -7).all()
assert torch.equal(target["fp8.weight"], weight.float() * tiles)
assert torch.equal(loaded[..., :3], expected[..., :3])
assert kept == list(range(3, 96))
PYTHON
echo "expected: columns 0-95 read"
venv/bin/python mxfp4.py 2>noise || { cat noise; exit 1; }
