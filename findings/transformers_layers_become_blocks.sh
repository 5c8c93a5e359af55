#!/bin/bash
# transformers 5.24.0 reads Kimi-K2.5 and Qianfan-OCR by the names that are published.  On saving it
# takes its renames backwards, and one that is about the layers for images meets those of the
# language model, too: `language_model.model.layers` becomes `language_model.model.blocks` (Kimi) or
# `language_model.model.encoder.layers` (Qianfan).  transformers reads these again; a loader that
# knows the published names finds no layer.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check torch==2.14.1 transformers==5.24.0

cat >names.py <<'PYTHON'
import sys

import torch
import transformers as tf
from safetensors.torch import load_file, save_file

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "image_size": 28,
}


def shrink(config):
    for key, value in vars(config).items():
        if isinstance(value, tf.PretrainedConfig):
            shrink(value)
        elif key in SMALL and isinstance(value, int) and value > SMALL[key]:
            setattr(config, key, SMALL[key])
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:2]
    return config


def rename(name, old, new):
    return name.replace(f"language_model.model.{old}.", f"language_model.model.{new}.")


kind, written = sys.argv[1:]
torch.manual_seed(0)
config = shrink(tf.CONFIG_MAPPING[kind]())
config.tie_word_embeddings = False
config.save_pretrained("published")
tf.AutoModelForImageTextToText.from_config(config).save_pretrained("made")
tensors = load_file("made/model.safetensors")
published = {rename(name, written, "layers"): tensor for name, tensor in tensors.items()}
save_file(published, "published/model.safetensors", {"format": "pt"})
model, said = tf.AutoModelForImageTextToText.from_pretrained("published", output_loading_info=True)
model.save_pretrained("saved")
saved = load_file("saved/model.safetensors")
changed = sorted(published.keys() - saved.keys())
print("transformers", tf.__version__, kind, "of", len(published), "tensors")
print("missing or unexpected when read:", [name for value in said.values() for name in value])
print("names that are others when saved:", len(changed))
print("all of them layers of the language model:", all(".model.layers." in it for it in changed))
print("the first:", changed[0], "->", min(saved.keys() - published.keys()))
PYTHON

run() {
    rm -rf published made saved
    HF_HUB_OFFLINE=1 venv/bin/python names.py "$@" 2>errors.txt | tee seen.txt || {
        cat errors.txt >&2
        exit 1
    }
    grep -qxF "missing or unexpected when read: []" seen.txt
    grep -qxF "all of them layers of the language model: True" seen.txt
}

first=language_model.model.layers.0.input_layernorm.weight
run kimi_k25 blocks
grep -qxF "names that are others when saved: 24" seen.txt
grep -qxF "the first: $first -> language_model.model.blocks.0.input_layernorm.weight" seen.txt
run qianfan_ocr encoder.layers
grep -qxF "names that are others when saved: 22" seen.txt
grep -qxF "the first: $first -> language_model.model.encoder.layers.0.input_layernorm.weight" seen.txt
