#!/bin/sh
# transformers 5.24.0 saves a DeepSeek-V3 whose configuration counts a layer that no file has.
#
# DeepseekV3Config has num_nextn_predict_layers = 1 by default.  The model has no such layer,
# save_pretrained writes the number into config.json, and from_pretrained reports nothing missing.
# Who counts layers by the configuration finds one layer too few in every such folder.
#
# Seen, with torch 2.14.1 on a processor:
#   num_nextn_predict_layers 1, layers in the file 0-2, of 3 hidden layers
#   reported by from_pretrained: nothing
#   model.layers.2.mlp.gate.weight F32 beside BF16 weights
# The last line: a model made in bfloat16 keeps the weights of its routers in float32, and their file
# has two types.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.14.1 transformers==5.24.0
cat >"$folder/try.py" <<'PYTHON'
import json
import re
import sys

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, DeepseekV3Config

folder = sys.argv[1]
config = DeepseekV3Config(
    vocab_size=64, hidden_size=16, num_hidden_layers=3, num_attention_heads=2,
    num_key_value_heads=2, intermediate_size=16, moe_intermediate_size=8, n_routed_experts=4,
    num_experts_per_tok=2, n_group=1, topk_group=1, first_k_dense_replace=1, q_lora_rank=8,
    kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4,
)
model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
model.save_pretrained(folder)
said = json.load(open(f"{folder}/config.json"))["num_nextn_predict_layers"]
with safe_open(f"{folder}/model.safetensors", "pt") as file:
    names = list(file.keys())
    types = {name: file.get_slice(name).get_dtype() for name in names}
layers = sorted({int(match[1]) for name in names if (match := re.search(r"layers\.(\d+)\.", name))})
_, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
reported = {key: value for key, value in report.items() if value}
print("num_nextn_predict_layers", said, "layers", layers, "reported", reported)
print({name: of for name, of in types.items() if name.endswith("2.mlp.gate.weight")})
assert said == 1
assert layers == [0, 1, 2]
assert not reported
assert types["model.layers.2.mlp.gate.weight"] == "F32"
assert types["model.layers.2.mlp.experts.0.up_proj.weight"] == "BF16"
PYTHON
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" "$folder/try.py" "$folder/model" 2>/dev/null
