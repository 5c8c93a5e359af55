"""Tiny models of transformers become rank files as MindFormers has them, and models again.

Bytes are equal, so the logits are; what a loader says is missing or left over is asked of it, since
``from_pretrained`` makes up what is not there.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import ckpttool
from tests.e2e.transformers.models import MODELS, describe, make, save
from tests.support.checkpoints import cut
from tests.support.corpus import GOLDEN
from tests.support.families import VARIANTS, option, to_mindformers, write_strategy
from tests.support.readers import read, read_ranks

TOKENS = torch.arange(12)[None]
IDS = [" ".join([model, recipe, *choices.values()]) for model, recipe, choices in VARIANTS]


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """Return what saves a model once: its folder and its logits."""
    known: dict[str, tuple[Path, torch.Tensor]] = {}

    def of(name):
        if name not in known:
            folder, model = tmp_path_factory.mktemp(name), make(MODELS[name])
            save(model, folder)
            known[name] = folder, model(TOKENS).logits
        return known[name]

    return of


@pytest.mark.parametrize("name", MODELS)
def test_names_and_shapes_are_those_of_the_files_here(name):
    kept = json.loads((GOLDEN / "models" / f"{name}.json").read_text())
    assert describe(MODELS[name]) == kept


@pytest.mark.parametrize(
    ("name", "recipe", "choices"),
    [pytest.param(*variant, id=id) for variant, id in zip(VARIANTS, IDS, strict=True)
     if variant[0] in MODELS],
)  # fmt: skip
def test_a_model_loads_and_says_the_same(tmp_path, saved, name, recipe, choices):
    folder, logits = saved(name)
    config = json.loads((folder / "config.json").read_text())
    tensors = read(folder / "model.safetensors")
    expected = to_mindformers(config, tensors, recipe, choices)
    strategy = write_strategy(tmp_path / "s.json", expected, 4)
    words = option(recipe, choices)
    ckpttool.split(folder, strategy, tmp_path / "ms", recipe=words, format="safetensors")
    assert read_ranks(tmp_path / "ms") == cut(expected, ckpttool.read_strategy(strategy))
    back = tmp_path / "back"
    ckpttool.merge(tmp_path / "ms", strategy, back, recipe=words, hf_config=folder)
    assert read(back / "model.safetensors") == tensors
    model, said = AutoModelForCausalLM.from_pretrained(
        back, dtype=torch.bfloat16, output_loading_info=True
    )
    assert {key: value for key, value in said.items() if value} == {}
    assert torch.equal(model.eval()(TOKENS).logits, logits)
