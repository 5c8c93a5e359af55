"""Models of many architectures, with the names that transformers saves, and their config.json.

A whole one has no error; each tensor that is gone from a layer is named.  No tensor has values:
they are on PyTorch's device ``meta``.
"""

from __future__ import annotations

import json
import random
import re

import pytest
import torch
import transformers as tf
from transformers import modeling_utils
from transformers.models.auto import modeling_auto as auto

from ckpttool.model.tensors import TensorMeta
from ckpttool.operations.model_config import compare_config, load_config

CLASSES = {**auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
CLASSES |= auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
CLASSES |= auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
CLASSES |= auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES
NAMES = (
    *("albert", "bamba", "bart", "bloom", "cohere2", "ernie4_5_moe", "falcon", "gemma2", "glm4v"),
    *("gpt2", "gpt_oss", "granitemoe", "internvl", "jamba", "lfm2", "llama4_text", "llava"),
    *("minimax", "mixtral", "olmo2", "opt", "phi", "qwen2_5_vl", "qwen3_moe", "qwen3_next"),
    *("rembert", "starcoder2", "t5", "whisper"),
)
LANGUAGE = re.compile(r"^(?!.*(?:vis|audio|encoder|image)).*\.\d+\.")
IMAGES = re.compile(r"vis.*\.\d+\.")


@pytest.fixture
def saved(tmp_path, monkeypatch):
    """Return what makes a model, and returns its configuration and the tensors that it saves."""

    def of(name):
        kept = {}
        monkeypatch.setattr(modeling_utils, "safe_save_file", lambda it, *_, **__: kept.update(it))
        cls = CLASSES.get(name, "AlbertForMaskedLM")
        with torch.device("meta"):
            model = getattr(tf, cls)(tf.CONFIG_MAPPING[name]())
        model.save_pretrained(tmp_path, max_shard_size="999TB")
        metas = {key: TensorMeta(key, "Float32", (*it.shape,)) for key, it in kept.items()}
        return load_config(str(tmp_path)), metas

    return of


def errors(config, metas):
    """The errors that a configuration shows of tensors."""
    found = compare_config(config, metas)
    return [it.message for it in found if it.code == "unlike_config"]


@pytest.mark.parametrize("name", NAMES)
def test_a_model_that_transformers_saves_is_whole_and_one_that_lost_a_tensor_is_not(saved, name):
    config, metas = saved(name)
    assert errors(config, metas) == []
    pick = random.Random(name).choice
    for pattern in (LANGUAGE, IMAGES):
        names = [key for key in metas if pattern.search(key)]
        if lost := names and pick(names):
            messages = errors(config, {key: it for key, it in metas.items() if key != lost})
            assert messages, f"{lost} is not there, and nobody says so"
            assert json.dumps(messages).count("missing") == 1
