#!/bin/bash
# PaddlePaddle's distributed checkpoints turn Float8 into Int8. The bits stay, so 1.0 becomes 56.
#
# paddle.distributed.save_state_dict writes such tensors as Int8, beside metadata that says
# float8_e4m3fn. Reading does not compare the two: load_state_dict makes an Int8 tensor of a Float8
# target, load_merged_state_dict returns Int8, and merge_sharded_state_dict writes I8 into the
# safetensors of the merged model. There is no error and no warning. paddle.save of one tensor
# loses the type, too. BFloat16 is right, and so is save_file of safetensors.paddle.
#
# Seen with paddlepaddle 3.3.1 on a processor:
#   saved:                  paddle.float8_e4m3fn [1.0, -2.0, 448.0]
#   metadata:               float8_e4m3fn
#   load_state_dict:        paddle.int8 [56.0, -64.0, 126.0]
#   load_merged_state_dict: paddle.int8 [56.0, -64.0, 126.0]
#   merged file:            {'bf16': 'BF16', 'fp8': 'I8'}
#   safetensors.paddle:     F8_E4M3
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check \
    paddlepaddle==3.3.1 safetensors==0.8.0 numpy==2.4.6

cat >float8.py <<'PYTHON'
import json
import warnings
from pathlib import Path

import paddle
import paddle.distributed as dist
from paddle.distributed.flex_checkpoint.dcp.load_state_dict import merge_sharded_state_dict
from safetensors.paddle import save_file


def shown(tensor):
    return f"{tensor.dtype} {tensor.astype('float32').tolist()}"


def types(path):
    content = Path(path).read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return {name: entry["dtype"] for name, entry in header.items()}


state = {
    "fp8": paddle.to_tensor([1.0, -2.0, 448.0]).astype("float8_e4m3fn"),
    "bf16": paddle.to_tensor([1.5]).astype("bfloat16"),
}
target = {name: paddle.zeros(of.shape).astype(of.dtype) for name, of in state.items()}
with warnings.catch_warnings():
    warnings.simplefilter("error", UserWarning)
    dist.save_state_dict(state, "saved")
    dist.load_state_dict(target, "saved")
    merged = dist.load_merged_state_dict("saved")
    merge_sharded_state_dict("saved", "merged")
metadata = paddle.load("saved/0.metadata").state_dict_metadata["fp8"][0].dtype
merged_types = types("merged/model-00001-of-00001.safetensors")
save_file(state, "alone.safetensors")
alone = types("alone.safetensors")["fp8"]

print("saved:                 ", shown(state["fp8"]))
print("metadata:              ", metadata)
print("load_state_dict:       ", shown(target["fp8"]))
print("load_merged_state_dict:", shown(merged["fp8"]))
print("merged file:           ", merged_types)
print("safetensors.paddle:    ", alone)
assert (metadata, alone) == ("float8_e4m3fn", "F8_E4M3")
assert shown(target["bf16"]) == shown(merged["bf16"]) == "paddle.bfloat16 [1.5]"
for tensor in (target["fp8"], merged["fp8"]):
    assert shown(tensor) == "paddle.int8 [56.0, -64.0, 126.0]"
assert merged_types == {"fp8": "I8", "bf16": "BF16"}
PYTHON
echo "expected: float8_e4m3fn [1.0, -2.0, 448.0] everywhere, or an error"
venv/bin/python float8.py 2>noise || { cat noise; exit 1; }
