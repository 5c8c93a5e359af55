"""Models of Hugging Face as MindFormers stores them, by NumPy alone: what recipes are held against.

Names and shapes are those that transformers saved (tests/golden/models); names, axes and their
order of MindFormers were read in mindformers 1.3 to 2.1.0.
"""

from __future__ import annotations

import json
from itertools import count, product
from pathlib import Path

import numpy as np

from tests.support.checkpoints import noise, write_file
from tests.support.corpus import GOLDEN
from tests.support.readers import Entry, entry_of

RECIPES = {
    "llama": ("llama", "llama-concat", "mcore"),
    "llama-bias": ("llama", "mcore"),
    "qwen2": ("llama", "llama-concat", "qwen2"),
    "qwen2-tied": ("llama", "qwen2"),
    "qwen3": ("qwen3",),
    "qwen3-moe": ("qwen3-moe",),
    "glm": ("glm4-legacy",),
    "glm4": ("glm4",),
    "glm4-bias": ("glm4",),
    "glm4-moe": ("glm4-moe",),
    "deepseek-v3": ("deepseek-v3", "deepseek-v3-legacy"),
    "deepseek-v3-no-q": ("deepseek-v3",),
    "deepseek-v3-mtp": ("deepseek-v3", "deepseek-v3-legacy"),
    "deepseek-v4": ("deepseek-v4",),
    "deepseek-v4-mtp": ("deepseek-v4",),
}
CHOICES = {
    "fc1": ("interleaved", "contiguous"),
    "attention": ("grouped", "contiguous"),
    "mla": ("separate", "fused"),
    "mode": ("graph", "pynative"),
    "experts": ("grouped", "batched"),
    "concat": ("grouped", "contiguous"),
}
ASKED = {
    "llama": (),
    "glm4-legacy": (),
    "llama-concat": ("concat",),
    "deepseek-v3": ("fc1", "mla", "mode"),
    "deepseek-v3-legacy": ("experts",),
    "deepseek-v4": ("fc1",),
    "qwen3-moe": ("fc1", "attention", "mode"),
    "glm4-moe": ("fc1", "attention", "mode"),
}
# transformers saves no layers of the prediction of further tokens, which its configuration names.
NO_MORE = {"num_nextn_predict_layers": "0"}
GIVEN = dict.fromkeys(("deepseek-v3", "deepseek-v3-no-q", "deepseek-v4"), NO_MORE)
VARIANTS = [
    (model, recipe, dict(zip(names, values, strict=True)) | GIVEN.get(model, {}))
    for model, recipes in RECIPES.items()
    for recipe in recipes
    for names in [ASKED.get(recipe, ("fc1", "attention"))]
    for values in product(*(CHOICES[name] for name in names))
]
LLAMA = {
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_a_proj": "attention.q2l_proj",
    "self_attn.q_a_layernorm": "attention.lq_norm",
    "self_attn.kv_a_layernorm": "attention.lkv_norm",
    "mlp.shared_experts.gate_proj": "feed_forward.shared_experts.w1",
    "mlp.shared_experts.up_proj": "feed_forward.shared_experts.w3",
    "mlp.shared_experts.down_proj": "feed_forward.shared_experts.w2",
}
GLM = {
    "input_layernorm": "input_layernorm",
    "post_attention_layernorm": "post_attention_layernorm",
    "self_attn.o_proj": "self_attention.dense",
    "mlp.gate_up_proj": "mlp.dense_h_to_4h",
    "mlp.down_proj": "mlp.dense_4h_to_h",
}
LEGACY = ("llama", "llama-concat", "deepseek-v3-legacy")
MTP = {
    "enorm": "mtp_hidden_fusers.0.norm_emb",
    "hnorm": "mtp_hidden_fusers.0.norm",
    "eh_proj": "mtp_hidden_fusers.0.dense",
    "shared_head.norm": "mtp_norms.0",
}
PLAIN = {
    "input_layernorm": "input_layernorm",
    "post_attention_layernorm": "pre_mlp_layernorm",
    "post_self_attn_layernorm": "post_self_attn_layernorm",
    "post_mlp_layernorm": "post_mlp_layernorm",
    "self_attn.o_proj": "self_attention.linear_proj",
    "self_attn.q_norm": "self_attention.q_layernorm",
    "self_attn.k_norm": "self_attention.k_layernorm",
}
MLA = {
    "q_a_proj": "linear_q_down_proj",
    "q_a_layernorm": "q_layernorm",
    "q_b_proj": "linear_q_up_proj",
    "q_proj": "linear_q_proj",
    "kv_a_proj_with_mqa": "linear_kv_down_proj",
    "kv_a_layernorm": "kv_layernorm",
    "kv_b_proj": "linear_kv_up_proj",
}
FUSED_MLA = {
    "q_a_layernorm": "q_layernorm",
    "q_b_proj": "linear_qb",
    "kv_a_layernorm": "k_layernorm",
    "kv_b_proj": "linear_kvb",
}
WINDOWED = {  # DeepSeek-V4's names of a layer
    "attn_norm": "input_layernorm",
    "ffn_norm": "pre_mlp_layernorm",
    "attn.wq_a": "self_attention.linear_q_down_proj",
    "attn.q_norm": "self_attention.q_layernorm",
    "attn.wq_b": "self_attention.linear_q_up_proj",
    "attn.wkv": "self_attention.linear_kv_proj",
    "attn.kv_norm": "self_attention.kv_layernorm",
    "attn.wo_a.weight": "self_attention.linear_o_group_proj",
    "attn.wo_b": "self_attention.linear_proj",
    "attn.attn_sink": "self_attention.core_attention.attn_sink",
    "attn.indexer.wq_b": "self_attention.core_attention.indexer.linear_wq_b",
    "attn.indexer.weights_proj": "self_attention.core_attention.indexer.linear_weights_proj",
    "ffn.gate.weight": "mlp.router.weight",
    "ffn.gate.bias": "mlp.expert_bias",
    "ffn.gate.tid2eid": "mlp.router.tid2eid",
    "ffn.shared_experts.w2": "mlp.shared_experts.linear_fc2",
    "hc_attn_base": "attn_hc.bias",
    "hc_attn_fn": "attn_hc.mapping_proj.weight",
    "hc_ffn_base": "ffn_hc.bias",
    "hc_ffn_fn": "ffn_hc.mapping_proj.weight",
}
WINDOWED |= {
    f"attn.{part}compressor.{name}": f"self_attention.core_attention.{part}compressor.{other}"
    for part in ("", "indexer.")
    for name, other in {"wkv": "linear_wkv", "wgate": "linear_wgate"}.items()
    | {"norm": "norm", "ape": "ape"}.items()
}
HYPER = {"hc_head_base": "hc_base", "hc_head_fn": "hc_fn.weight", "hc_head_scale": "hc_scale"}


def load_model(name: str) -> tuple[dict, dict[str, Entry]]:
    """Return the configuration of a model, and its tensors with random bytes."""
    base = name.removesuffix("-mtp")
    kept = json.loads((GOLDEN / "models" / f"{base}.json").read_text())
    tensors = kept["tensors"].items()
    made = {key: noise(key, dtype, tuple(of)) for key, (dtype, of) in tensors}
    if name == base:
        return kept["config"], made
    if base == "deepseek-v4":
        return _published(kept["config"]), made | _predicting_streams(made)
    return kept["config"], made | _predicting(made)


def _predicting(tensors: dict[str, Entry]) -> dict[str, Entry]:
    """Return the tensors of a layer that predicts a further token, as DeepSeek published it."""
    norm = tensors["model.norm.weight"]
    size, layer = norm.shape[0], "model.layers.3."
    made = {
        f"{layer}{key.removeprefix('model.layers.2.')}": noise(f"mtp {key}", it.dtype, it.shape)
        for key, it in tensors.items()
        if key.startswith("model.layers.2.")
    }
    for key in ("enorm", "hnorm", "shared_head.norm"):
        made[f"{layer}{key}.weight"] = noise(key, norm.dtype, norm.shape)
    made[f"{layer}eh_proj.weight"] = noise("eh_proj", norm.dtype, (size, 2 * size))
    made[f"{layer}embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
    made[f"{layer}shared_head.head.weight"] = tensors["lm_head.weight"]
    return made


def _published(config: dict) -> dict:
    """Return a configuration of DeepSeek-V4 with the keys of DeepSeek in place of transformers'."""
    words = {"sliding_attention": 0, "compressed_sparse_attention": 4}
    kinds = [words.get(kind, 128) for kind in config["layer_types"]]
    hashed = config["mlp_layer_types"].count("hash_moe")
    config = {
        key: it for key, it in config.items() if key not in ("layer_types", "mlp_layer_types")
    }
    return {**config, "compress_ratios": [*kinds, 0], "num_hash_layers": hashed}


def _predicting_streams(tensors: dict[str, Entry]) -> dict[str, Entry]:
    """Return the tensors of DeepSeek-V4's layer that predicts a further token."""
    hidden, tensor_type = tensors["norm.weight"], tensors["embed.weight"].dtype
    (size,) = hidden.shape
    made = {
        f"mtp.0.{key.removeprefix('layers.2.')}": noise(f"mtp {key}", it.dtype, it.shape)
        for key, it in tensors.items()
        if key.startswith("layers.2.") and "compressor" not in key
    }
    for key in HYPER:
        made[f"mtp.0.{key}"] = noise(f"mtp {key}", "Float32", tensors[key].shape)
    for key in ("enorm", "hnorm", "norm"):
        made[f"mtp.0.{key}.weight"] = noise(f"mtp {key}", hidden.dtype, hidden.shape)
    for key in ("e_proj", "h_proj"):
        made[f"mtp.0.{key}.weight"] = noise(f"mtp {key}", tensor_type, (size, size))
    return made


def option(recipe: str, choices: dict[str, str]) -> str:
    """Return the value of --recipe."""
    pairs = ",".join(f"{name}={value}" for name, value in choices.items())
    return f"{recipe}:{pairs}" if pairs else recipe


def to_mindformers(config: dict, tensors: dict[str, Entry], recipe: str, choices: dict[str, str]):
    """Return the tensors as MindFormers has them."""
    left = {name: entry.array() for name, entry in tensors.items()}
    made: dict[str, np.ndarray] = {}

    def move(old: str, new: str) -> None:
        for end in ("", ".weight", ".bias"):
            if old + end in left:
                made[new + end] = left.pop(old + end)

    last = config["num_hidden_layers"]
    has_more = f"model.layers.{last}.enorm.weight" in left
    if has_more:  # copies, which are not read
        for name in ("embed_tokens", "shared_head.head"):
            del left[f"model.layers.{last}.{name}.weight"]
    if recipe == "deepseek-v4":
        _take_streams(left, made, move, last, choices)
    elif recipe in LEGACY:
        move("model.embed_tokens.weight", "model.tok_embeddings.embedding_weight")
        move("model.norm", "model.norm_out")
        move("lm_head", "lm_head")
        for name, other in MTP.items():
            move(f"model.layers.{last}.{name}", f"model.{other}")
        for i in range(last + has_more):
            layer = f"model.layers.{i}."
            if recipe == "llama-concat":
                _concat(left, made, layer, config, choices["concat"])
            for old, new in LLAMA.items():
                move(layer + old, layer + new)
            if recipe == "deepseek-v3-legacy":
                _split_latent(left, made, layer, config)
                _stack_experts(left, made, layer, choices["experts"])
    elif recipe == "glm4-legacy":
        move("model.embed_tokens.weight", "transformer.embedding.embedding_weight")
        move("model.norm", "transformer.encoder.final_layernorm")
        move("lm_head", "transformer.output_layer")
        for i in range(last):
            old, new = f"model.layers.{i}.", f"transformer.encoder.layers.{i}."
            fused: dict[str, np.ndarray] = {}
            _attend(left, fused, old, "", config, "contiguous")
            for name, array in fused.items():
                made[new + name.replace("linear_qkv", "query_key_value")] = array
            for name, other in GLM.items():
                move(old + name, new + other)
    else:
        move("model.embed_tokens", "embedding.word_embeddings")
        move("model.norm", "decoder.final_layernorm")
        move("lm_head", "output_layer")
        if has_more:
            old, new = f"model.layers.{last}.", "mtp.layers.0."
            for name in ("enorm", "hnorm", "eh_proj"):
                move(old + name, new + name)
            move(f"{old}shared_head.norm", f"{new}final_layernorm")
        for i in range(last + has_more):
            old, new = f"model.layers.{i}.", f"decoder.layers.{i}."
            new = "mtp.layers.0.transformer_layer." if i == last else new
            for name, other in PLAIN.items():
                move(old + name, new + other)
            if "mla" in choices:
                _attend_latent(left, made, old, new, move, choices["mla"])
            else:
                _attend(left, made, old, new, config, choices["attention"])
            _feed(left, made, old, new, move, choices)
    assert not left, [*left]
    types = {"uint16": "BFloat16", "float32": "Float32", "int64": "Int64"}
    return {
        name: entry_of(np.ascontiguousarray(array), types[array.dtype.name])
        for name, array in made.items()
    }


def _take_streams(left, made, move, last, choices) -> None:
    move("embed", "embedding.word_embeddings")
    move("head", "output_layer")
    move("norm", "decoder.final_layernorm")
    for name, other in HYPER.items():
        move(name, f"decoder.hc_head.{other}")
        move(f"mtp.0.{name}", f"mtp.layers.0.hc_head.{other}")
    for name in ("enorm", "hnorm"):
        move(f"mtp.0.{name}", f"mtp.layers.0.{name}")
    move("mtp.0.norm", "mtp.layers.0.final_layernorm")
    layers = {f"layers.{i}.": f"decoder.layers.{i}." for i in range(last)}
    if "mtp.0.e_proj.weight" in left:
        parts = [left.pop(f"mtp.0.{name}_proj.weight") for name in "eh"]
        made["mtp.layers.0.eh_proj.weight"] = np.concatenate(parts, 1)
        layers["mtp.0."] = "mtp.layers.0.transformer_layer."
    for old, new in layers.items():
        for name, other in WINDOWED.items():
            move(old + name, new + other)
        for part in ("attn", "ffn"):
            scale = left.pop(f"{old}hc_{part}_scale")
            for at, name in enumerate(("pre", "post", "res")):
                made[f"{new}{part}_hc.alpha_{name}"] = scale[at : at + 1]
        gate, up = (left.pop(f"{old}ffn.shared_experts.{name}.weight") for name in ("w1", "w3"))
        fused = _fuse(gate, up, choices["fc1"])
        made[f"{new}mlp.shared_experts.linear_fc1.weight"] = fused
        _stack_routed(left, made, f"{old}ffn.experts", new, ("w1", "w3", "w2"), is_native=True)


def _concat(left, made, layer, config, how) -> None:
    fused: dict[str, np.ndarray] = {}
    _attend(left, fused, layer, "", config, how)
    for name, array in fused.items():
        made[f"{layer}attention.w_qkv.{name.split('.')[-1]}"] = array
    parts = [left.pop(f"{layer}mlp.{name}_proj.weight") for name in ("gate", "up")]
    rows = np.stack(parts, how == "grouped").reshape(-1, parts[0].shape[1])
    made[f"{layer}feed_forward.w_gate_hidden.weight"] = rows


def _attend(left, made, old, new, config, how) -> None:
    heads = config["num_attention_heads"]
    groups = config["num_key_value_heads"]
    for end in ("weight", "bias"):
        if f"{old}self_attn.q_proj.{end}" not in left:
            continue
        q, k, v = (left.pop(f"{old}self_attn.{part}_proj.{end}") for part in "qkv")
        if how == "grouped":
            size, rest = len(q) // heads, q.shape[1:]
            parts = [part.reshape(groups, -1, size, *rest) for part in (q, k, v)]
            fused = np.concatenate(parts, 1).reshape(-1, *rest)
        else:
            fused = np.concatenate([q, k, v])
        made[f"{new}self_attention.linear_qkv.{end}"] = fused


def _attend_latent(left, made, old, new, move, how) -> None:
    inside = f"{old}self_attn."
    if how == "fused":
        first = "q_a_proj" if f"{inside}q_a_proj.weight" in left else "q_proj"
        parts = [left.pop(f"{inside}{name}.weight") for name in (first, "kv_a_proj_with_mqa")]
        made[f"{new}self_attention.linear_qkv.weight"] = np.concatenate(parts)
    for name, other in (FUSED_MLA if how == "fused" else MLA).items():
        move(inside + name, f"{new}self_attention.{other}")


def _split_latent(left, made, layer, config) -> None:
    """Part the weights of MLA; rows of rope with even numbers come before the others."""
    nope, rank = config["qk_nope_head_dim"], config["kv_lora_rank"]

    def take(name, heads, at):
        whole = left.pop(f"{layer}self_attn.{name}.weight")
        each = whole.reshape(heads, -1, whole.shape[1])
        return each[:, :at], each[:, at:]

    def turn(rows):
        return np.concatenate([rows[:, 0::2], rows[:, 1::2]], 1)

    def put(name, rows):
        made[f"{layer}attention.{name}.weight"] = rows.reshape(-1, rows.shape[2])

    heads = config["num_attention_heads"]
    query, query_rope = take("q_b_proj", heads, nope)
    latent, key_rope = take("kv_a_proj_with_mqa", 1, rank)
    key, value = take("kv_b_proj", heads, nope)
    put("l2q_nope_proj", query)
    put("l2q_pe_proj", turn(query_rope))
    put("kv2l_latent_kv", latent)
    put("kv2l_k_pe", turn(key_rope))
    put("lkv2kv_k_nope", key)
    put("lkv2kv_v", value)


def _stack_experts(left, made, layer, how) -> None:
    if f"{layer}mlp.gate.weight" not in left:
        return
    new = f"{layer}feed_forward.routed_experts."
    experts = range(len(left[f"{layer}mlp.gate.weight"]))
    gate, up, down = (
        np.stack([left.pop(f"{layer}mlp.experts.{e}.{name}_proj.weight") for e in experts])
        for name in ("gate", "up", "down")
    )
    router = left.pop(f"{layer}mlp.gate.weight")
    bias = left.pop(f"{layer}mlp.gate.e_score_correction_bias")
    if how == "grouped":
        made[f"{new}router_dense.weight"], made[f"{new}topk_bias"] = router, bias
        made[f"{new}ffn.w1"] = np.concatenate([gate, up], 1).swapaxes(1, 2)
        made[f"{new}ffn.w2"] = down.swapaxes(1, 2)
    else:
        made[f"{new}router.dense.weight"], made[f"{new}router.router.topk_bias"] = router, bias
        for name, weight in {"w1": gate, "w3": up, "w2": down}.items():
            made[f"{new}ffn.{name}.weight"] = weight


def _fuse(gate, up, how):
    if how == "contiguous":
        return np.concatenate([gate, up])
    return np.stack([gate, up], 1).reshape(-1, gate.shape[1])


def _stack_routed(left, made, old, new, names, *, is_native) -> None:
    first, second = [], []
    for e in count():
        if f"{old}.{e}.{names[0]}.weight" not in left:
            break
        gate, up, down = (left.pop(f"{old}.{e}.{name}.weight") for name in names)
        first.append(np.concatenate([gate, up]).T)
        second.append(down.T)
    join = np.stack if is_native else np.concatenate
    made[f"{new}mlp.experts.weight1"], made[f"{new}mlp.experts.weight2"] = join(first), join(second)


def _feed(left, made, old, new, move, choices) -> None:
    if f"{old}mlp.gate_up_proj.weight" in left:
        both = left.pop(f"{old}mlp.gate_up_proj.weight")
        made[f"{new}mlp.linear_fc1.weight"] = _fuse(*np.split(both, 2), choices["fc1"])
        move(f"{old}mlp.down_proj", f"{new}mlp.linear_fc2")
    for part in ("mlp.", "mlp.shared_experts."):
        if f"{old}{part}gate_proj.weight" in left:
            gate, up = (left.pop(f"{old}{part}{name}_proj.weight") for name in ("gate", "up"))
            made[f"{new}{part}linear_fc1.weight"] = _fuse(gate, up, choices["fc1"])
            move(f"{old}{part}down_proj", f"{new}{part}linear_fc2")
    if f"{old}mlp.gate.weight" not in left:
        return
    is_native = choices["mode"] == "pynative"
    move(f"{old}mlp.gate", f"{new}mlp.router")
    bias = "expert_bias" if is_native else "router.expert_bias"
    move(f"{old}mlp.gate.e_score_correction_bias", f"{new}mlp.{bias}")
    names = ("gate_proj", "up_proj", "down_proj")
    _stack_routed(left, made, f"{old}mlp.experts", new, names, is_native=is_native)


def shard(tensors: dict[str, Entry], ranks: int) -> dict:
    """Return a strategy in JSON's words, which cuts every axis of some tensor."""
    items = {}
    for number, (name, entry) in enumerate(tensors.items()):
        tensor_map = [-1] * len(entry.shape)
        axes = [axis for axis, size in enumerate(entry.shape) if size % ranks == 0]
        if axes and len(entry.shape) > 1:
            tensor_map[axes[number % len(axes)]] = 0
        items[name] = {"dev_matrix": [ranks], "tensor_map": tensor_map}
    return {"parallel_layout_item": items}


def write_model(folder: Path, model: str) -> tuple[dict, dict[str, Entry]]:
    """Write a folder as Hugging Face has it."""
    config, tensors = load_model(model)
    write_file(folder / "model.safetensors", tensors, "safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return config, tensors


def write_strategy(path: Path, tensors: dict[str, Entry], ranks: int) -> Path:
    path.write_text(json.dumps(shard(tensors, ranks)))
    return path
