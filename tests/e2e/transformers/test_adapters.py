"""Adapters that PEFT makes are added as its ``merge_and_unload`` adds them."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

import ckpttool
from tests.e2e.transformers.models import MODELS, make, save
from tests.support.checkpoints import cut, write_ranks
from tests.support.families import VARIANTS, option, to_mindformers, write_strategy
from tests.support.readers import read, read_ranks

pytestmark = pytest.mark.filterwarnings(  # of peft and transformers themselves
    "ignore:.*is_gradient_checkpointing:FutureWarning",
    "ignore:The following (rank|alpha)_pattern keys:RuntimeWarning",
)
ATTENTION = r".*\.self_attn\.\w*_proj\w*"
# The parameters of DeepSeek-V4 have other names in transformers than in its files.
NAMED_ALIKE = [name for name in MODELS if name != "deepseek-v4"]
CONFIGS = {
    "plain": {"r": 4, "lora_alpha": 6},
    "rslora": {"r": 3, "lora_alpha": 5, "use_rslora": True},
    "patterns": {
        "r": 4,
        "lora_alpha": 6,
        "rank_pattern": {"o_proj": 2, r"layers\.[01]\.mlp\.down_proj": 5},
        "alpha_pattern": {"^model.layers.2.self_attn.o_proj": 3, "down_proj": 9},
    },
}


def adapt(folder, model, modules="all-linear", **config):
    """Save an adapter with random numbers, and return the merged model."""
    torch.manual_seed(1)
    config = LoraConfig(target_modules=modules, task_type="CAUSAL_LM", **config)
    adapted = get_peft_model(model, config)
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_" in name:
                weight.copy_(torch.randn(weight.shape) * 0.2)
    adapted.save_pretrained(folder)
    return adapted.merge_and_unload()


def bfloat16(entry):
    return (entry.array().astype("<u4") << 16).view("<f4")


@pytest.mark.parametrize("how", CONFIGS)
@pytest.mark.parametrize("name", NAMED_ALIKE)
def test_the_sum_is_that_of_peft(tmp_path, name, how):
    model = make(MODELS[name])
    model.save_pretrained(tmp_path / "base")
    # Of experts PEFT rounds the product to BFloat16 before it adds it; another test has Float32.
    has_experts = any("experts" in name for name, _ in model.named_parameters())
    modules = ATTENTION if has_experts else "all-linear"
    peft = adapt(tmp_path / "adapter", model, modules, **CONFIGS[how])
    peft.save_pretrained(tmp_path / "peft")
    out = tmp_path / "out"
    ckpttool.merge(tmp_path / "base", None, out, lora=tmp_path / "adapter")
    base, peft, ours = (
        read(tmp_path / folder / "model.safetensors") for folder in ("base", "peft", "out")
    )
    assert ours.keys() == peft.keys()
    changed = 0
    for key, entry in ours.items():
        if entry == peft[key]:
            changed += entry != base[key]
            continue
        a, b = bfloat16(entry), bfloat16(peft[key])
        ulp = np.spacing(np.abs(b)) * 2**16  # of Float32, whose upper half a BFloat16 is
        assert (np.abs(a - b) <= ulp).all()
        changed += 1
    assert changed > 6


@pytest.mark.parametrize(
    ("name", "recipe", "choices"),
    [pytest.param(*it, id=" ".join([*it[:2], *it[2].values()])) for it in VARIANTS
     if it[0] in ("qwen3", "deepseek-v3")],
)  # fmt: skip
def test_an_adapter_of_peft_goes_into_rank_files_and_back(tmp_path, name, recipe, choices):
    model = make(MODELS[name])
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    model.save_pretrained(base)
    adapt(adapter, model, **CONFIGS["plain"])
    ckpttool.merge(base, None, tmp_path / "merged", lora=adapter)
    merged = read(tmp_path / "merged" / "model.safetensors")
    config = json.loads((base / "config.json").read_text())
    words = option(recipe, choices)
    expected, before = (
        to_mindformers(config, it, recipe, choices)
        for it in (merged, read(base / "model.safetensors"))
    )
    path = write_strategy(tmp_path / "s.json", expected, 4)
    shards = ckpttool.read_strategy(path)
    ckpttool.split(base, path, tmp_path / "ms", recipe=words, lora=adapter, format="safetensors")
    assert read_ranks(tmp_path / "ms") == cut(expected, shards)
    write_ranks(tmp_path / "before", cut(before, shards), "ckpt")
    back = tmp_path / "back"
    ckpttool.merge(tmp_path / "before", path, back, recipe=words, hf_config=base, lora=adapter)
    assert read(back / "model.safetensors") == merged
    loaded, said = AutoModelForCausalLM.from_pretrained(
        back, dtype=torch.bfloat16, output_loading_info=True
    )
    assert {key: value for key, value in said.items() if value} == {}
    assert len(list(loaded.parameters())) > 10


def test_an_adapter_with_names_that_no_file_has_is_refused(tmp_path):
    model = make(MODELS["deepseek-v4"])
    save(model, tmp_path / "base")
    adapt(tmp_path / "adapter", model, "all-linear", **CONFIGS["plain"])
    with pytest.raises(ckpttool.PlanError, match="tensors of the adapter would not be used"):
        ckpttool.merge(tmp_path / "base", None, tmp_path / "out", lora=tmp_path / "adapter")
    assert not (tmp_path / "out").exists()


GATE_UP, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"


@pytest.mark.parametrize(
    "targets", [{}, {"target_parameters": [DOWN]}, {"target_parameters": [DOWN, GATE_UP]}]
)
@pytest.mark.parametrize("how", CONFIGS)
@pytest.mark.parametrize("name", [it for it in NAMED_ALIKE if "moe" in it or "deepseek" in it])
def test_an_adapter_of_fused_experts_goes_to_each_of_their_weights(tmp_path, name, how, targets):
    model = make(MODELS[name]).float()
    model.save_pretrained(tmp_path / "base")
    modules = ["o_proj"] if targets else "all-linear"
    peft = adapt(tmp_path / "adapter", model, modules, **targets, **CONFIGS[how])
    peft.save_pretrained(tmp_path / "peft")
    ckpttool.merge(tmp_path / "base", None, tmp_path / "out", lora=tmp_path / "adapter")
    base, peft, ours = (
        read(tmp_path / folder / "model.safetensors") for folder in ("base", "peft", "out")
    )
    assert ours.keys() == peft.keys()
    for key, entry in ours.items():
        np.testing.assert_allclose(entry.array(), peft[key].array(), rtol=1e-5, atol=1e-6)
        assert (entry != base[key]) == (peft[key] != base[key])
    changed = {key.split(".")[-2] for key in ours if ".experts." in key and ours[key] != base[key]}
    only_down = targets.get("target_parameters") == [DOWN]
    assert changed == ({"down_proj"} if only_down else {"gate_proj", "up_proj", "down_proj"})
