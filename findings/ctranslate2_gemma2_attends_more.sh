#!/bin/bash
# CTranslate2 4.8.5 converts Gemma 2 without what is special in its attention.
#
# Three entries of its config.json are left out: query_pre_attn_scalar, which is 144 beside heads of
# 128 in Gemma 2 27B; the softcapping of the scores and of the logits; and sliding_window, so the
# layers with a window of 4096 tokens attend to all. Gemma 3 loses its scalar, too: 168 beside heads
# of 128 in Gemma 3 27B. The queries are divided by the root of the size of a head. There is no
# error and no warning.
#
# Seen with transformers 5.24.0 and torch 2.14.1 on a processor, models of random weights with heads
# of 128; differences are the largest of the logits, which go up to 4 and 6:
#   Gemma 2, scalar 144:    0.199, with 128 and without softcapping: 0.000
#   Gemma 2, a window of 8: 4.003, with a window of 4096:            0.000
#   Gemma 3, scalar 168:    0.407, with 128:                         0.000
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check \
    torch==2.14.1 transformers==5.24.0 ctranslate2==4.8.5 numpy==2.4.6

cat >gemma.py <<'PYTHON'
import warnings

import ctranslate2
import numpy as np
import torch
from ctranslate2.converters import TransformersConverter
from tokenizers import Tokenizer, models
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

warnings.simplefilter("error", UserWarning)
words = [f"t{number}" for number in range(61)] + ["<bos>", "<eos>", "<unk>"]
known = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, "<unk>"))
ids = [(7 * at + 3) % 61 for at in range(32)]


def apart(title, kind, given, other):
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        kind, vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=128, bos_token_id=61,
        eos_token_id=62, pad_token_id=None, **given,
    )
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    model.save_pretrained("model")
    PreTrainedTokenizerFast(
        tokenizer_object=known, bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained("model")
    TransformersConverter("model").convert("converted", force=True)
    engine = ctranslate2.Generator("converted", compute_type="float32", intra_threads=1)
    answer = np.array(engine.forward_batch([[words[at] for at in ids]]))[0]
    seen = []
    for changed in ({}, other):
        config = AutoConfig.from_pretrained("model")
        for name, value in changed.items():
            setattr(config, name, value)
        loaded = AutoModelForCausalLM.from_pretrained(
            "model", config=config, attn_implementation="eager"
        ).eval()
        with torch.no_grad():
            logits = loaded(torch.tensor([ids])).logits[0].numpy()
        seen.append(float(np.abs(logits - answer).max()))
    print(f"{title}: {seen[0]:.3f}, with {other}: {seen[1]:.3f}")
    assert seen[0] > 0.1
    assert seen[1] < 1e-4


uncapped = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
alike = {"query_pre_attn_scalar": 128}
apart("Gemma 2, scalar 144", "gemma2", {"query_pre_attn_scalar": 144}, {**alike, **uncapped})
narrow = {"sliding_window": 8, **alike, **uncapped}
apart("Gemma 2, a window of 8", "gemma2", narrow, {"sliding_window": 4096})
apart("Gemma 3, scalar 168", "gemma3_text", {"query_pre_attn_scalar": 168}, alike)
PYTHON
echo "expected: the logits of transformers, or an error"
HF_HUB_OFFLINE=1 venv/bin/python gemma.py 2>messages || { cat messages; exit 1; }
