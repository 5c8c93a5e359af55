"""Tiny models of transformers.

``python -m tests.e2e.transformers.models`` writes tests/golden/models: the configuration of each,
and the type and shape of each tensor that it saves.  Other tests fill these with random bytes.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch
import transformers as tf
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.support.corpus import GOLDEN

LAYERS = {"vocab_size": 64, "hidden_size": 24, "num_hidden_layers": 3, "intermediate_size": 9}
DENSE = {**LAYERS, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8}
EXPERTS = {"moe_intermediate_size": 8, "num_experts_per_tok": 2}
ROUTED = {**EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1}
SHARED = {**ROUTED, "first_k_dense_replace": 1}
GROUPS = {"n_group": 1, "topk_group": 1}
MLA = {"kv_lora_rank": 6, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 3}
DEEPSEEK = {**LAYERS, **SHARED, **GROUPS, **MLA, "num_attention_heads": 6, "num_key_value_heads": 6}
GROUPED = {"head_dim": 8, "qk_rope_head_dim": 4, "q_lora_rank": 10, "o_groups": 3, "o_lora_rank": 5}
INDEXER = {"index_n_heads": 3, "index_head_dim": 4, "index_topk": 2, "hc_mult": 2}
KINDS = {"compress_ratios": [0, 4, 128, 0], "num_hash_layers": 2}  # of layers
DEEPSEEK_V4 = {**LAYERS, **ROUTED, **GROUPED, **INDEXER, "num_attention_heads": 6}
MODELS = {
    "llama": tf.LlamaConfig(**DENSE),
    "llama-bias": tf.LlamaConfig(**DENSE, attention_bias=True),
    "qwen2": tf.Qwen2Config(**DENSE),
    "qwen2-tied": tf.Qwen2Config(**DENSE, tie_word_embeddings=True),
    "qwen3": tf.Qwen3Config(**DENSE),
    "qwen3-moe": tf.Qwen3MoeConfig(**DENSE, **EXPERTS, num_experts=4, mlp_only_layers=[1]),
    "glm": tf.GlmConfig(**DENSE, pad_token_id=0, attention_bias=True),
    "glm4": tf.Glm4Config(**DENSE, pad_token_id=0),
    "glm4-bias": tf.Glm4Config(**DENSE, pad_token_id=0, attention_bias=True),
    "glm4-moe": tf.Glm4MoeConfig(**DENSE, **SHARED, **GROUPS, use_qk_norm=True),
    "deepseek-v3": tf.DeepseekV3Config(**DEEPSEEK, q_lora_rank=10),
    "deepseek-v3-no-q": tf.DeepseekV3Config(**DEEPSEEK, q_lora_rank=None),
    "deepseek-v4": tf.DeepseekV4Config(**{**DEEPSEEK_V4, **KINDS, "intermediate_size": 8}),
}
TYPES = {"BF16": "BFloat16", "F32": "Float32", "I64": "Int64"}


def make(config: tf.PretrainedConfig) -> torch.nn.Module:
    """Return a model with random weights in bfloat16."""
    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn(weight.shape) * 0.3)
        for name, buffer in model.named_buffers():
            if "e_score" in name:
                buffer.copy_(torch.randn(buffer.shape))
            if name.endswith("tid2eid"):
                buffer.copy_(torch.randint(model.config.n_routed_experts, buffer.shape))
    return model.eval()


def save(model: torch.nn.Module, folder: str | Path) -> None:
    """Write a model's folder, with the names that its publisher has.

    transformers 5.24 reads those of DeepSeek-V4, and writes others: ``model.layers.0.attn.wkv``.
    """
    model.save_pretrained(folder)
    if model.config.model_type == "deepseek_v4":
        file = Path(folder, "model.safetensors")
        tensors = {published(name): tensor for name, tensor in load_file(file).items()}
        save_file(tensors, file, {"format": "pt"})


def published(name: str) -> str:
    """Return DeepSeek's name of a tensor of DeepSeek-V4 that transformers saved."""
    words = {"model.": "", "embed_tokens": "embed", "hc_head.hc_": "hc_head_"}
    words[".attn.norm."] = ".attn.kv_norm."
    for word, other in words.items():
        name = name.replace(word, other)
    return name


def describe(config: tf.PretrainedConfig) -> dict:
    """Return what a file of tests/golden/models has: the configuration, and types and shapes."""
    with tempfile.TemporaryDirectory() as folder:
        save(make(config), folder)
        tensors = {}
        with safe_open(f"{folder}/model.safetensors", "np") as file:
            for key in file.keys():  # noqa: SIM118, it is no mapping
                part = file.get_slice(key)
                tensors[key] = [TYPES[part.get_dtype()], part.get_shape()]
        return {
            "config": json.loads(Path(folder, "config.json").read_text()),
            "tensors": tensors,
        }


def main() -> None:
    """Write all files."""
    for name, config in MODELS.items():
        kept = json.dumps(describe(config), indent=0, sort_keys=True)
        path = GOLDEN / "models" / f"{name}.json"
        path.write_text(kept.replace("[\n", "[").replace("\n]", "]") + "\n")


if __name__ == "__main__":
    main()
