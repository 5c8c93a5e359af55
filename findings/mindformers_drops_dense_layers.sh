#!/bin/bash
# The converter of MindFormers 2.1.0 makes Hugging Face's tensors of a Qwen3-MoE.  Some layers may be
# dense (`mlp_only_layers`, or `first_k_dense_replace` of MindFormers).  It has no rule for their MLP
# and leaves it out, without an exception or a line in the log; the other direction warns.
# Only the converter is imported, which computes with NumPy; the modules around it are empty.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check numpy==1.26.4
venv/bin/pip install --quiet --disable-pip-version-check --no-deps --target package mindformers==2.1.0

cat >layers.py <<'PYTHON'
import sys
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock

import numpy as np

for name in ("", ".checkpoint", ".models", ".models.qwen3_moe"):
    module = sys.modules[f"mindformers{name}"] = ModuleType(f"mindformers{name}")
    module.__path__ = [f"package/mindformers{name.replace('.', '/')}"]
log = MagicMock()
sys.modules["mindspore"] = MagicMock(get_auto_parallel_context=lambda key: 1)
sys.modules["mindspore.common"] = MagicMock()
sys.modules["mindformers.tools"] = ModuleType("mindformers.tools")
sys.modules["mindformers.tools.logger"] = SimpleNamespace(logger=log)
sys.modules["mindformers.checkpoint.sharded_tensor"] = MagicMock()
for name in ("", ".transformer_config", ".transformer_config_utils", ".utils"):
    sys.modules[f"mindformers.parallel_core{name}"] = MagicMock()
mixin = SimpleNamespace(ModelMixin=type("ModelMixin", (), {}))
sys.modules["mindformers.parallel_core.utils.model_mixin"] = mixin
base = SimpleNamespace(PreTrainedModel=type("PreTrainedModel", (), {}))
sys.modules["mindformers.models.modeling_utils"] = base
sys.modules["mindformers.models.qwen3_moe.configuration_qwen3_moe"] = MagicMock()

from mindformers.checkpoint.converter.template import WeightTemplate
from mindformers.models.qwen3_moe.utils import Qwen3MoePreTrainedModel

converter = WeightTemplate(Qwen3MoePreTrainedModel.weight_converters)
converter.set_model_config(
    SimpleNamespace(
        num_moe_experts=2,
        hidden_size=4,
        moe_ffn_hidden_size=3,
        num_attention_heads=2,
        num_query_groups=1,
        kv_channels=2,
        use_interleaved_weight_layout_mlp=True,
        expert_model_parallel_size=1,
        tensor_model_parallel_size=1,
    )
)
dense = "decoder.layers.0.mlp.linear_fc1.weight", "decoder.layers.0.mlp.linear_fc2.weight"
stored = {
    dense[0]: np.ones((10, 4), np.float32),
    dense[1]: np.ones((4, 5), np.float32),
    "decoder.layers.0.pre_mlp_layernorm.weight": np.ones(4, np.float32),
    "decoder.layers.1.mlp.router.weight": np.ones((2, 4), np.float32),
    "decoder.layers.1.pre_mlp_layernorm.weight": np.ones(4, np.float32),
}
made = converter.get_hf_state_dict(stored)
published = [f"model.layers.0.mlp.{part}_proj.weight" for part in ("gate", "up", "down")]
said = log.warning.call_count + log.error.call_count + log.info.call_count
print("MindFormers 2.1.0, a Qwen3-MoE whose layer 0 is dense")
print("expected:", len(published) + 3, "tensors, and", *published)
print("seen:    ", len(made), "tensors:", *sorted(made))
print("lines in the log:", said)
raise SystemExit(bool(said or len(made) != 3 or {*made} & {*published}))
PYTHON
venv/bin/python layers.py
