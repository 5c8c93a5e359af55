#!/bin/bash
# transformers 5.24.0 reads DeepSeek-V4 by the names that DeepSeek publishes, with nothing missing.
# What it saves has names that are neither these nor those of its own modules: `model.` is before
# most, `kv_norm` is `norm`.  A loader that takes DeepSeek's names then finds `head.weight` alone.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check torch==2.14.1 transformers==5.24.0

cat >names.py <<'PYTHON'
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DeepseekV4Config

torch.manual_seed(0)
config = DeepseekV4Config(
    vocab_size=32,
    hidden_size=24,
    intermediate_size=8,
    num_hidden_layers=1,
    num_attention_heads=6,
    head_dim=8,
    qk_rope_head_dim=4,
    q_lora_rank=10,
    o_groups=3,
    o_lora_rank=5,
    moe_intermediate_size=8,
    n_routed_experts=4,
    n_shared_experts=1,
    num_experts_per_tok=2,
    hc_mult=2,
    compress_ratios=[0],
    num_hash_layers=0,
)
config.save_pretrained("published")
made = AutoModelForCausalLM.from_config(config)
made.save_pretrained("made")
tensors = load_file("made/model.safetensors")
published = {
    name.removeprefix("model.")
    .replace("embed_tokens", "embed")
    .replace("hc_head.hc_", "hc_head_")
    .replace(".attn.norm.", ".attn.kv_norm."): tensor
    for name, tensor in tensors.items()
}
save_file(published, "published/model.safetensors", {"format": "pt"})
model, said = AutoModelForCausalLM.from_pretrained("published", output_loading_info=True)
model.save_pretrained("saved")
saved = load_file("saved/model.safetensors")
own = model.state_dict().keys()
print("transformers", transformers.__version__, "of", len(published), "tensors")
print("expected: the names that were read,", *sorted(published)[:3], "...")
print("seen:    ", *sorted(saved)[:3], "...")
print("missing or unexpected when read:", [name for value in said.values() for name in value])
print("names as published:", len(saved.keys() & published.keys()))
print("names of its own modules:", len(saved.keys() & own))
equal = all(torch.equal(a, b) for a, b in zip(made.parameters(), model.parameters(), strict=True))
is_seen = equal and not any(said.values()) and len(saved) == len(published)
raise SystemExit(not (is_seen and saved.keys() & published.keys() == {"head.weight"}))
PYTHON
HF_HUB_OFFLINE=1 venv/bin/python names.py 2>/dev/null
