"""Compares what recipes make with what MindFormers' own converter makes of it, byte for byte.

    pip download --no-deps mindformers==2.1.0
    python scripts/check_converter.py WHEEL

``ckpttool merge --recipe`` makes MindFormers' weights of a random model of Hugging Face, and
``WeightTemplate.get_hf_state_dict`` of the wheel makes that model of these again.  MindFormers
itself needs devices and much more, so only ``mindformers/checkpoint/converter`` and the rules in
``models/*/utils.py`` are imported, which compute with NumPy; what they import of the rest is
answered here.  Names without a rule of MindFormers, which it drops, are printed.  Ends with 1 if a
tensor differs.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
import types
import zipfile
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import ckpttool  # noqa: E402
from tests.support.families import ASKED, option, write_model  # noqa: E402
from tests.support.readers import read  # noqa: E402

FAMILIES = {  # the model that is taken, the module of its rules, and the class that has them
    "qwen3": ("qwen3", "qwen3", "Qwen3PreTrainedModel"),
    "qwen3-moe": ("qwen3-moe", "qwen3_moe", "Qwen3MoePreTrainedModel"),
    "deepseek-v4": ("deepseek-v4-mtp", "deepseek4", "DeepseekV4PreTrainedModel"),
}
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def pretend(package: Path) -> types.ModuleType:
    """Import the converter, with answers for what it imports."""

    def stub(name: str, path: str = "", **answers: object) -> None:
        module = types.ModuleType(name)
        module.__dict__.update(answers)
        module.__path__ = [str(package / path)] if path else []
        sys.modules[name] = module

    stub("mindspore", get_auto_parallel_context=lambda key: -1, Parameter=None, Tensor=None)
    stub("mindspore.common", dtype=mock.MagicMock())
    models = [f".models.{module}" for _, module, _ in FAMILIES.values()]
    for name in ("", ".checkpoint", ".models", *models):
        stub(f"mindformers{name}", f"mindformers{name}".replace(".", "/"))
    stub("mindformers.checkpoint.sharded_tensor", ShardedTensor=None)
    stub("mindformers.tools")
    stub("mindformers.tools.logger", logger=mock.MagicMock())
    stub("mindformers.parallel_core")
    stub("mindformers.parallel_core.transformer_config", TransformerConfig=None)
    stub("mindformers.parallel_core.transformer_config_utils", convert_to_transformer_config=None)
    stub("mindformers.parallel_core.utils")
    stub("mindformers.parallel_core.utils.model_mixin", ModelMixin=type("ModelMixin", (), {}))
    stub("mindformers.models.modeling_utils", PreTrainedModel=type("PreTrainedModel", (), {}))
    stub("mindformers.models.qwen3.configuration_qwen3", Qwen3Config=None)
    stub("mindformers.models.qwen3_moe.configuration_qwen3_moe", Qwen3MoeConfig=None)
    stub("mindformers.models.deepseek4.configuration_deepseek_v4", DeepseekV4Config=None)
    stub("mindformers.models.deepseek3")
    stub("mindformers.models.deepseek3.utils", DeepseekV3PreTrainedModel=object)
    return importlib.import_module("mindformers.checkpoint.converter.template")


def compare(template: types.ModuleType, family: str, fc1: str, work: Path) -> list[str]:
    """Return the names of tensors that the converter does not make again, or makes otherwise."""
    model, name, rules = FAMILIES[family]
    config, tensors = write_model(work / "hf", model)
    choices = {"fc1": fc1, "attention": "grouped", "mode": "graph"}
    names = ASKED.get(family, ("fc1", "attention"))
    recipe = option(family, {name: choices[name] for name in names})
    ckpttool.merge(work / "hf", None, work / "ms.ckpt", recipe=recipe)
    stored = {name: entry.array() for name, entry in read(work / "ms.ckpt").items()}
    module = importlib.import_module(f"mindformers.models.{name}.utils")
    converter = template.WeightTemplate(getattr(module, rules).weight_converters)
    known = types.SimpleNamespace(
        num_moe_experts=next(filter(None, map(config.get, EXPERTS)), None),
        hidden_size=config["hidden_size"],
        moe_ffn_hidden_size=config.get("moe_intermediate_size"),
        num_attention_heads=config["num_attention_heads"],
        num_query_groups=config["num_key_value_heads"],
        kv_channels=config["head_dim"],
        use_interleaved_weight_layout_mlp=fc1 == "interleaved",
        expert_model_parallel_size=1,
        tensor_model_parallel_size=1,
    )
    converter.set_model_config(known)
    for operation in converter.weight_converters:
        operation.optimizer_parallel_size = 1  # not the -1 of a context without devices
    dropped = [name for name in stored if not converter.get_hf_names_for_mf(name)]
    made = converter.get_hf_state_dict(stored)
    without = f", without a rule: {', '.join(sorted(dropped))}" if dropped else ""
    print(f"{family}, {fc1}: {len(made)} tensors made of {len(stored)}{without}")
    wanted = {name for name, entry in tensors.items() if name in made or not dropped}
    return sorted(
        name
        for name in wanted | made.keys()
        if name not in made or made[name].tobytes() != tensors[name].data
    )


def main() -> None:
    """Compare each family in each layout."""
    (wheel,) = sys.argv[1:]
    with tempfile.TemporaryDirectory() as package:
        zipfile.ZipFile(wheel).extractall(package)
        template, wrong = pretend(Path(package)), 0
        for family in FAMILIES:
            for fc1 in ("interleaved", "contiguous"):
                with tempfile.TemporaryDirectory() as work:
                    names = compare(template, family, fc1, Path(work))
                print(f"  {'WRONG: ' + ', '.join(names) if names else 'right'}")
                wrong += len(names)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
