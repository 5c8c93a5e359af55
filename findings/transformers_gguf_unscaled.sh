#!/bin/bash
# transformers 5.24.0 reads a GGUF file of Llama 3.1 without the scaling of its rotary positions.
#
# llama.cpp writes this scaling as the tensor rope_freqs.weight, which has a factor for each
# frequency, and "yarn" and "linear" as the entries rope.scaling.*. from_pretrained(gguf_file=...)
# takes neither, except for gpt-oss: the model has rope_type "default", and save_pretrained makes a
# folder of it that says so. The tensor is not reported as unexpected. There is no error and no
# warning. All weights are right, and so are the first logits.
#
# Seen with torch 2.14.1 on a processor and gguf 0.19.0, a Llama of random weights with the positions
# of Llama 3.1 8B, 1024 tokens; differences are the largest of the logits, which go up to 6:
#   default: read as default, off by 0.000, from plain by 0.000
#   llama3: read as default, off by 3.509, from plain by 0.000
#   yarn: read as default, off by 4.240, from plain by 0.000
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check \
    torch==2.14.1 transformers==5.24.0 gguf==0.19.0 accelerate==1.15.0 numpy==2.4.6

cat >positions.py <<'PYTHON'
import warnings

import gguf
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

warnings.simplefilter("error", UserWarning)
plain = {"rope_type": "default", "rope_theta": 500000.0}
llama3 = {
    **plain, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}
yarn = {
    **plain, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768,
}
ids = torch.randint(0, 64, (1, 1024), generator=torch.Generator().manual_seed(0))


def llama(rope):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=128, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=131072,
        rope_parameters=rope,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(std=0.12)
    return model.eval()


def write(model, path, rope):
    """Write a GGUF file as llama.cpp has them: q and k by pairs, llama3 as a tensor of factors."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_rope_dimension_count(64)
    writer.add_rope_freq_base(rope["rope_theta"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = tensor.reshape(-1, 2, 32, tensor.shape[1])
            tensor = heads.transpose(1, 2).reshape(tensor.shape)
        stem = name.removesuffix(".weight")
        writer.add_tensor(names.get_name(stem) + ".weight", tensor.contiguous().numpy())
    if rope["rope_type"] == "llama3":
        turns = llama(plain).model.rotary_emb.inv_freq / model.model.rotary_emb.inv_freq
        writer.add_tensor("rope_freqs.weight", turns.numpy())
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def logits(model):
    with torch.no_grad():
        return model(ids).logits


for rope in (plain, llama3, yarn):
    model = llama(rope)
    write(model, "model.gguf", rope)
    read = AutoModelForCausalLM.from_pretrained(".", gguf_file="model.gguf", dtype=torch.float32)
    wrong = (logits(read) - logits(model)).abs().max()
    same = (logits(read) - logits(llama(plain))).abs().max()
    kind = read.config.rope_parameters["rope_type"]
    print(f"{rope['rope_type']}: read as {kind}, off by {wrong:.3f}, from plain by {same:.3f}")
    assert kind == "default"
    assert same < 1e-4
    assert (wrong > 1) == (rope is not plain)
PYTHON
echo "expected: the logits of the model that was written, or an error"
HF_HUB_OFFLINE=1 venv/bin/python positions.py 2>messages || { cat messages; exit 1; }
