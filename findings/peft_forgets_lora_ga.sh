#!/bin/bash
# PEFT 0.21.2 loads an adapter of LoRA-GA on weights that it was not trained on.
#
# init_lora_weights="lora_ga" makes A and B of the gradients, and takes their product out of the
# weights of the base, which is then trained with the adapter. save_pretrained writes A and B alone.
# PiSSA does the same, and loading takes its product out again, which only needs the base. For
# LoRA-GA loading would need the gradients. It leaves the base as it is, so the first product is
# added. There is no error and no warning.
#
# Seen with torch 2.14.1 on a processor; the largest difference of the outputs:
#   gaussian, trained by 20 steps: off by 0.0000 after loading
#   pissa, trained by 20 steps: off by 0.0000 after loading
#   lora_ga, before any step: off by 0.1313 after loading
#   lora_ga, trained by 20 steps: off by 0.1143 after loading
#   lora_ga, saved with path_initial_model_for_weight_conversion: off by 0.0000 after loading
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check \
    torch==2.14.1 transformers==5.24.0 peft==0.21.2 numpy==2.4.6

cat >adapters.py <<'PYTHON'
import warnings

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraGAConfig, preprocess_loraga

warnings.simplefilter("error", UserWarning)
torch.manual_seed(1)
given, wanted = torch.randn(32, 12, requires_grad=True), torch.randn(32, 8)


def base():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(12, 16), torch.nn.Tanh(), torch.nn.Linear(16, 8))


def loss(model):
    return (model(given) - wanted).square().mean()


def off(model, folder):
    with torch.no_grad():
        loaded = PeftModel.from_pretrained(base(), folder)(given)
        return float((model(given) - loaded).abs().max())


def initialized(start):
    config = LoraConfig(r=2, lora_alpha=4, target_modules=["0", "2"], init_lora_weights=start)
    model = base()
    if start == "lora_ga":
        config.lora_ga_config = LoraGAConfig()
        preprocess_loraga(model, config, lambda: loss(model).backward())
    model = get_peft_model(model, config)
    # The conversion loads the adapter of the start, which must not be initialized again.
    model.peft_config["default"].init_lora_weights = True
    model.save_pretrained(f"{start}-first")
    model.peft_config["default"].init_lora_weights = start
    return model


def train(model):
    parameters = [it for it in model.parameters() if it.requires_grad]
    optimizer = torch.optim.AdamW(parameters, 0.05)
    for _ in range(20):
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()


seen = {}
for start in ("gaussian", "pissa", "lora_ga"):
    model = initialized(start)
    model.save_pretrained(f"{start}-untrained")
    seen[f"{start}, before any step"] = off(model, f"{start}-untrained")
    train(model)
    model.save_pretrained(start)
    seen[f"{start}, trained by 20 steps"] = off(model, start)
model.save_pretrained("converted", path_initial_model_for_weight_conversion="lora_ga-first")
seen["lora_ga, saved with path_initial_model_for_weight_conversion"] = off(model, "converted")
for title, difference in seen.items():
    print(f"{title}: off by {difference:.4f} after loading")
wrong = {title for title, difference in seen.items() if difference > 1e-4}
assert wrong == {"lora_ga, before any step", "lora_ga, trained by 20 steps"}
PYTHON
echo "expected: the outputs of the model that was saved, or an error"
venv/bin/python adapters.py
