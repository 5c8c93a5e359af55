#!/bin/bash
# CTranslate2 4.8.5 converts Llama 3.1 without the scaling of its rotary positions.
#
# Llama 3.1, 3.2 and 3.3 have rope_type "llama3": factor, low_freq_factor, high_freq_factor and
# original_max_position_embeddings. The converter writes the two frequencies, and rope_scaling
# types that it does not know are an error. But it writes the factor for the type "linear" alone,
# and the length never. The engine then divides by its default, which is 1: the positions are those
# of a Llama without rope_scaling. There is no error and no warning. The logits of the first few
# tokens are nearly right, so a short prompt does not show it.
#
# Seen with transformers 5.24.0 and torch 2.14.1 on a processor, a Llama of random weights and the
# positions of Llama 3.1 8B; differences are the largest of the logits, which go up to 5.8:
#   written: rotary_high_freq_factor, rotary_low_freq_factor, rotary_scaling_type
#   apart from transformers, 8 tokens:    0.004
#   apart from transformers, 1024 tokens: 2.548
#   the same without rope_scaling:        0.000
# CTranslate2 4.7.1 does the same.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check \
    torch==2.14.1 transformers==5.24.0 ctranslate2==4.8.5 numpy==2.4.6

cat >positions.py <<'PYTHON'
import warnings
from pathlib import Path

import ctranslate2
import numpy as np
import torch
from ctranslate2.converters import TransformersConverter
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

warnings.simplefilter("error", UserWarning)
scaled = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}
plain = {"rope_type": "default", "rope_theta": 500000.0}
words = [f"t{number}" for number in range(61)] + ["<s>", "</s>", "<unk>"]
known = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, "<unk>"))
PreTrainedTokenizerFast(
    tokenizer_object=known, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
).save_pretrained("llama")
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64, hidden_size=128, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=131072,
    bos_token_id=61, eos_token_id=62, rope_parameters=scaled,
)
model = LlamaForCausalLM(config)
with torch.no_grad():
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            parameter.normal_(std=0.12)
model.save_pretrained("llama")
TransformersConverter("llama").convert("converted")
engine = ctranslate2.Generator("converted", compute_type="float32", intra_threads=1)
ids = torch.randint(0, 61, (1024,)).tolist()
answer = np.array(engine.forward_batch([[words[at] for at in ids]]))[0]


def apart(rope, length):
    config = LlamaConfig.from_pretrained("llama")
    config.rope_parameters = rope
    loaded = LlamaForCausalLM.from_pretrained("llama", config=config).eval()
    with torch.no_grad():
        logits = loaded(torch.tensor([ids])).logits[0].numpy()
    return float(np.abs(logits - answer)[:length].max()), float(np.abs(logits).max())


content = Path("converted/model.bin").read_bytes()
names = [
    "original_max_position_embeddings", "rotary_high_freq_factor", "rotary_low_freq_factor",
    "rotary_scaling_factor", "rotary_scaling_type",
]
written = [name for name in names if f"self_attention/{name}\0".encode() in content]
short, _ = apart(scaled, 8)
long, largest = apart(scaled, 1024)
unscaled, _ = apart(plain, 1024)
print(f"logits up to {largest:.1f}; written: {', '.join(written)}")
print(f"apart from transformers, 8 tokens:    {short:.3f}")
print(f"apart from transformers, 1024 tokens: {long:.3f}")
print(f"the same without rope_scaling:        {unscaled:.3f}")
assert written == ["rotary_high_freq_factor", "rotary_low_freq_factor", "rotary_scaling_type"]
assert unscaled < 1e-3
assert short < 0.01
assert long > 1
PYTHON
echo "expected: the logits of transformers, or an error"
HF_HUB_OFFLINE=1 venv/bin/python positions.py 2>messages || { cat messages; exit 1; }
