#!/bin/sh
# PEFT 0.21.2 takes adapters of fused experts that PEFT 0.18.1 saved the wrong way round.
#
# LoraConfig(target_parameters=[...]) adapts parameters such as experts.gate_up_proj, of the shape
# (experts, rows, columns).  Up to PEFT 0.19.0 A is for the rows and B for the columns.  From 0.19.1
# on A is for the columns and B for the rows.  adapter_config.json has peft_version, and nothing
# compares it.  A parameter that is not square is an error of sizes.  A square one fits both ways:
# it loads without an error or a warning, and gives other numbers.  gate_up_proj of OLMoE-1B-7B is
# square, 2 x 1024 rows of 2048, and so is that of the small OLMoE here.
#
# Seen, with torch 2.14.1 on a processor and transformers 5.5.4, which all of these PEFT take;
# differences are the largest of the logits:
#   PEFT 0.18.1: gate_up_proj (4, 16, 16) saved, A (8, 16), B (16, 8); it adds 0.0257
#   PEFT 0.18.1: gate_up_proj loaded, off by 0.0000
#   PEFT 0.18.1: down_proj (4, 16, 8) saved, A (8, 16), B (8, 8); it adds 0.0041
#   PEFT 0.18.1: down_proj loaded, off by 0.0000
#   PEFT 0.19.0: gate_up_proj loaded, off by 0.0000
#   PEFT 0.19.0: down_proj loaded, off by 0.0000
#   PEFT 0.19.1: gate_up_proj loaded, off by 0.0467
#   PEFT 0.19.1: down_proj: size mismatch for ...lora_A.default.weight: ...
#   PEFT 0.21.2: gate_up_proj loaded, off by 0.0467
#   PEFT 0.21.2: down_proj: size mismatch for ...lora_A.default.weight: ...
# What merge_and_unload of 0.18.1 saves gives the right logits everywhere.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
pip() { "$folder/venv/bin/pip" install -q --disable-pip-version-check "$@"; }
pip torch==2.14.1 transformers==5.5.4
cat >"$folder/try.py" <<'PYTHON'
import json
import sys
import warnings
from pathlib import Path

import peft
import torch
from transformers import OlmoeConfig, OlmoeForCausalLM

folder, role = Path(sys.argv[1]), sys.argv[2]
config = OlmoeConfig(
    vocab_size=32, hidden_size=16, intermediate_size=8, num_hidden_layers=1,
    num_attention_heads=2, num_experts=4, num_experts_per_tok=2, bos_token_id=1, eos_token_id=2,
)
if role == "saves":
    torch.manual_seed(0)
    OlmoeForCausalLM(config).save_pretrained(folder / "base")


def base():
    return OlmoeForCausalLM.from_pretrained(folder / "base")


def logits(model):
    with torch.no_grad():
        return model.eval()(torch.arange(32)[None]).logits


def apart(before, after):
    return float((before - after).abs().max())


def save(name, adapter, merged):
    lora = peft.LoraConfig(
        r=2, lora_alpha=4, target_modules=[], target_parameters=[f"mlp.experts.{name}"],
        init_lora_weights=False,
    )
    model = peft.get_peft_model(base(), lora)
    model.save_pretrained(adapter)
    a, b = (tuple(it.shape) for it in peft.get_peft_model_state_dict(model).values())
    shape = tuple(base().get_parameter(f"model.layers.0.mlp.experts.{name}").shape)
    torch.save(logits(model), f"{adapter}.pt")
    changed = apart(logits(base()), logits(model))
    print(f"PEFT {peft.__version__}: {name} {shape} saved, A {a}, B {b}; it adds {changed:.4f}")
    assert changed > 1e-3 and (a[1], b[0]) == shape[1:]
    model.merge_and_unload().save_pretrained(merged)


def load(name, adapter):
    """Return the model, or None where sizes differ."""
    try:
        return peft.PeftModel.from_pretrained(base(), adapter)
    except RuntimeError as error:
        assert "size mismatch" in str(error)
        print(f"PEFT {peft.__version__}: {name}: {str(error).splitlines()[1].strip()}")
        return None


for name in ("gate_up_proj", "down_proj"):
    adapter, merged = folder / name, folder / f"{name}.merged"
    if role == "saves":
        save(name, adapter, merged)
        assert json.loads((adapter / "adapter_config.json").read_text())["peft_version"] == "0.18.1"
    expected = torch.load(f"{adapter}.pt")
    assert apart(logits(OlmoeForCausalLM.from_pretrained(merged)), expected) < 1e-6
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        model = load(name, adapter)
    assert (model is None) == (role == "turns" and name == "down_proj")
    if model is not None:
        off = apart(logits(model), expected)
        told = [str(it.message) for it in caught if it.category is UserWarning]
        print(f"PEFT {peft.__version__}: {name} loaded, off by {off:.4f}")
        assert (off > 1e-3 and not told) if role == "turns" else off < 1e-6
PYTHON
for each in 0.18.1:saves 0.19.0:takes 0.19.1:turns 0.21.2:turns; do
    pip "peft==${each%:*}"
    HF_HUB_OFFLINE=1 "$folder/venv/bin/python" "$folder/try.py" "$folder" "${each#*:}" \
        2>"$folder/noise" || { cat "$folder/noise"; exit 1; }
done
