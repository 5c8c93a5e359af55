#!/bin/bash
# MLX 0.32.4 reads a GGUF file up to the first tensor whose type it does not know, and no further.
#
# mlx.core.load returns the tensors before it, and leaves out that tensor and all behind it, though
# their own types are known. There is no error and no warning. Types like these are MXFP4, in which
# the experts of every GGUF of gpt-oss are stored, and TQ1_0 and TQ2_0. For types whose names it
# has, such as Q5_0, it stops with an error.
#
# Seen with gguf 0.19.0, on Linux on a processor:
#   MXFP4: 1 of 4 tensors: blk.0.attn_norm.weight
#   TQ2_0: 1 of 4 tensors: blk.0.attn_norm.weight
#   Q8_0: 4 of 4 tensors: ...
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check \
    "mlx[cpu]==0.32.4" gguf==0.19.0 numpy==2.4.6

cat >tensors.py <<'PYTHON'
import warnings

import gguf
import mlx.core
import numpy as np
from gguf import GGMLQuantizationType as Type

warnings.simplefilter("error")
norm = np.linspace(0.5, 1.5, 256, dtype="f4")
weight = np.sign(np.linspace(-3, 3, 512, dtype="f4")).reshape(2, 256)


def read(of):
    writer = gguf.GGUFWriter("model.gguf", "gpt-oss")
    writer.add_tensor("blk.0.attn_norm.weight", norm)
    writer.add_tensor("blk.0.ffn_down.weight", gguf.quantize(weight, of), raw_dtype=of)
    writer.add_tensor("blk.1.attn_norm.weight", norm)
    writer.add_tensor("output.weight", weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    whole = {tensor.name for tensor in gguf.GGUFReader("model.gguf").tensors}
    seen = mlx.core.load("model.gguf").keys() & whole
    print(f"{of.name}: {len(seen)} of {len(whole)} tensors: {', '.join(sorted(seen))}")
    return seen


print("expected: all tensors, or an error")
assert read(Type.MXFP4) == {"blk.0.attn_norm.weight"}
assert read(Type.TQ2_0) == {"blk.0.attn_norm.weight"}
assert len(read(Type.Q8_0)) == 4
PYTHON
venv/bin/python tensors.py
