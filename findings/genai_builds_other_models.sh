#!/bin/bash
# The builder of ONNX Runtime GenAI 0.18.0 writes other models than OLMo and scaled Llamas.
#
# OLMo has layer norms, which take the mean out, with an epsilon of 1e-5. The builder knows
# OlmoForCausalLM, and writes RMS norms with 1e-6. Of a Llama it takes the rotary scaling of the type
# "llama3" alone. With "linear", as DeepSeek-Coder has it, or "yarn" it writes the positions of a
# Llama without scaling, though it scales these types for other families. The exit code is 0, and
# there is no warning.
#
# Seen with onnxruntime 1.32.0, transformers 5.24.0 and torch 2.14.1 on a processor, models of
# random weights, 256 tokens; differences are the largest of the logits, which go up to 5:
#   Llama, default: off by 0.000, from default by 0.000
#   Llama, linear: off by 7.044, from default by 0.000
#   Llama, yarn: off by 3.003, from default by 0.000
#   OLMo: off by 3.838, from RMSNorm by 0.000
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check \
    torch==2.14.1 transformers==5.24.0 onnxruntime-genai==0.18.0 onnxruntime==1.32.0 \
    onnx-ir==1.1.0 numpy==2.4.6

cat >build.py <<'PYTHON'
import subprocess
import sys

import numpy as np
import onnxruntime
import torch
from tokenizers import Tokenizer, models
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.models.olmo import modeling_olmo

plain = {"rope_type": "default", "rope_theta": 100000.0}
words = [f"t{number}" for number in range(97)] + ["<s>", "</s>", "<unk>"]
known = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, "<unk>"))
ids = np.array([[(7 * at + 3) % 97 for at in range(256)]])


def load(folder, **changed):
    config = AutoConfig.from_pretrained(folder)
    for name, value in changed.items():
        setattr(config, name, value)
    model = AutoModelForCausalLM.from_pretrained(folder, config=config).eval()
    with torch.no_grad():
        return model(torch.tensor(ids)).logits[0].numpy()


def build(folder, kind, **given):
    """Save a model of random weights, build it for ONNX Runtime, and return its logits there."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        kind, vocab_size=100, hidden_size=64, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=16384,
        bos_token_id=97, eos_token_id=98, pad_token_id=99, **given,
    )
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(std=0.15)
    model.save_pretrained(folder)
    PreTrainedTokenizerFast(
        tokenizer_object=known, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)
    options = ["-i", folder, "-o", f"{folder}-onnx", "-p", "fp32", "-e", "cpu", "-c", "cache"]
    done = subprocess.run(
        [sys.executable, "-m", "onnxruntime_genai.models.builder", *options],
        capture_output=True, text=True, check=True,
    )
    assert "warn" not in (done.stdout + done.stderr).lower()
    session = onnxruntime.InferenceSession(f"{folder}-onnx/model.onnx")
    feed = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    for tensor in session.get_inputs():
        if tensor.name not in feed:
            feed[tensor.name] = np.zeros((1, 2, 0, 16), dtype="f4")
    (answer,) = session.run(["logits"], feed)
    return answer[0]


class RmsNorm(torch.nn.Module):
    def __init__(self, hidden_size):
        super().__init__()

    def forward(self, values):
        return torch.nn.functional.rms_norm(values, values.shape[-1:], eps=1e-6)


def check(title, like, answer, right, other, is_right=False):
    off, near = (float(np.abs(answer - it).max()) for it in (right, other))
    print(f"{title}: off by {off:.3f}, from {like} by {near:.3f}")
    assert near < 1e-3
    assert off < 1e-3 if is_right else off > 1


for kind in ("default", "linear", "yarn"):
    rope = {**plain, "rope_type": kind} | ({} if kind == "default" else {"factor": 4.0})
    answer = build(kind, "llama", rope_parameters=rope)
    unscaled = load(kind, rope_parameters=plain)
    check(f"Llama, {kind}", "default", answer, load(kind), unscaled, kind == "default")
answer = build("olmo", "olmo")
right = load("olmo")
modeling_olmo.OlmoLayerNorm = RmsNorm
check("OLMo", "RMSNorm", answer, right, load("olmo"))
PYTHON
echo "expected: the logits of transformers, or an error"
HF_HUB_OFFLINE=1 venv/bin/python build.py 2>messages || { cat messages; exit 1; }
