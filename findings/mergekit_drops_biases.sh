#!/bin/sh
# mergekit 0.1.5 writes a Llama without its biases, with exit code 0.
#
# LlamaConfig has attention_bias and mlp_bias, and transformers saves a bias for each projection.
# mergekit-yaml copies only the tensors of its own description of Llama.  The config.json that it
# writes still asks for the biases, and its index lists what is there.
#
# Seen, with torch 2.13.0 on a processor and transformers 5.24.0:
#   exit code 0; 35 tensors before, 21 after; attention_bias True, mlp_bias True
#   reported missing by from_pretrained: 14
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.24.0 mergekit==0.1.5
cat >"$folder/try.py" <<'PYTHON'
import json
import subprocess
import sys
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import LlamaConfig, LlamaForCausalLM

folder = Path(sys.argv[1])
config = LlamaConfig(
    vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, attention_bias=True, mlp_bias=True,
)
models = [{"model": str(folder / name), "parameters": {"weight": 0.5}} for name in ("a", "b")]
for model in models:
    LlamaForCausalLM(config).save_pretrained(model["model"])
recipe = {"merge_method": "linear", "dtype": "float32", "models": models}
(folder / "linear.yaml").write_text(json.dumps(recipe))
program = Path(sys.executable).with_name("mergekit-yaml")
words = [program, folder / "linear.yaml", folder / "out", "--no-copy-tokenizer", "--quiet"]
done = subprocess.run(words, capture_output=True)


def names(of):
    found = set()
    for path in of.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found.update(file.keys())
    return found


before, after = names(folder / "a"), names(folder / "out")
written = json.loads((folder / "out" / "config.json").read_text())
_, info = LlamaForCausalLM.from_pretrained(folder / "out", output_loading_info=True)
print(f"exit code {done.returncode}; {len(before)} tensors before, {len(after)} after")
print({key: written[key] for key in ("attention_bias", "mlp_bias")})
print("reported missing by from_pretrained:", len(info["missing_keys"]))
assert done.returncode == 0 and written["attention_bias"] and written["mlp_bias"]
assert len(before) == 35 and len(after) == 21 and len(info["missing_keys"]) == 14
assert all(name.endswith(".bias") for name in before - after)
PYTHON
"$folder/venv/bin/python" "$folder/try.py" "$folder" 2>"$folder/noise" || { cat "$folder/noise"; exit 1; }
