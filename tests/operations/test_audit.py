"""What verify finds of a model that lacks any one of its tensors, or has it otherwise."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from hashlib import sha256
from pathlib import Path

import pytest

from ckpttool.model.tensors import TensorMeta
from ckpttool.operations.audit import _unlike
from ckpttool.operations.model_config import Config, compare_config, load_config
from ckpttool.operations.tensor_diff import compare_headers
from ckpttool.problems import PlanError
from ckpttool.storage.region_io import FlatFiles
from tests.support.checkpoints import noise, write_file, write_ranks
from tests.support.commands import merged, message, run, run_well
from tests.support.corpus import GOLDEN
from tests.support.families import RECIPES, VARIANTS, load_model, to_mindformers
from tests.support.file_bytes import layout, strategy
from tests.support.readers import Entry

HIDDEN, HEADS, GROUPS, SIZE, WORDS, EXPERTS, LAYERS = 8, 4, 2, 3, 16, 4, 6
ATTENTION = {
    "input_layernorm.weight": (HIDDEN,),
    "post_attention_layernorm.weight": (HIDDEN,),
    "self_attn.q_proj.weight": (HEADS * SIZE, HIDDEN),
    "self_attn.k_proj.weight": (GROUPS * SIZE, HIDDEN),
    "self_attn.v_proj.weight": (GROUPS * SIZE, HIDDEN),
    "self_attn.o_proj.weight": (HIDDEN, HEADS * SIZE),
}
PARTS = {"up_proj.weight": (5, HIDDEN), "down_proj.weight": (HIDDEN, 5)}
DENSE = {f"mlp.{name}": shape for name, shape in PARTS.items()}
MOE = {f"mlp.experts.{n}.{name}": shape for n in range(EXPERTS) for name, shape in PARTS.items()}
MOE |= {"mlp.gate.weight": (EXPERTS, HIDDEN), "mlp.gate.e_score_correction_bias": (EXPERTS,)}
MTP = {"enorm.weight": (HIDDEN,), "hnorm.weight": (HIDDEN,), "eh_proj.weight": (HIDDEN, 2 * HIDDEN)}
BASE = {
    "model_type": "deepseek",
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "head_dim": SIZE,
    "vocab_size": WORDS,
    "tie_word_embeddings": False,
}
OF_KINDS = {  # what tells the dense layers, the first two, from the others
    "first_k_dense_replace": {"n_routed_experts": EXPERTS, "first_k_dense_replace": 2},
    "mlp_only_layers": {"num_experts": EXPERTS, "mlp_only_layers": [0, 1]},
    "moe_layer_freq": {"n_routed_experts": EXPERTS, "moe_layer_freq": [0, 0, 1, 1, 1, 1]},
    "layer_types": {"num_local_experts": EXPERTS, "layer_types": [*("abcccc")]},
    "hybrid_override_pattern": {"num_experts": EXPERTS, "hybrid_override_pattern": "--EEEE"},
    "moe_layer_start_index": {"moe_num_experts": EXPERTS, "moe_layer_start_index": 2},
    "moe_layers": {
        "n_routed_experts": EXPERTS,
        "moe_layers": [*range(LAYERS)],  # a list of layers, not an item for each
        "first_k_dense_replace": 2,
    },
    "part": {"n_routed_experts": EXPERTS, "part": {"moe_layers": [3, 4, 5, LAYERS]}},  # from 1
}


def model_of(layers: int = LAYERS, dense: int = 2, mtp: int = 1) -> dict[str, TensorMeta]:
    shapes = {"model.embed_tokens.weight": (WORDS, HIDDEN), "lm_head.weight": (WORDS, HIDDEN)}
    shapes["model.norm.weight"] = (HIDDEN,)
    for n in range(layers + mtp):
        of_layer = {**ATTENTION, **(DENSE if n < dense else MOE), **(MTP if n >= layers else {})}
        shapes |= {f"model.layers.{n}.{name}": shape for name, shape in of_layer.items()}
    return {name: TensorMeta(name, "BFloat16", shape) for name, shape in shapes.items()}


def without(ending):
    return {name: meta for name, meta in GATED.items() if not name.endswith(ending)}


def transposed(metas, ending):
    return {
        name: TensorMeta(name, meta.dtype, meta.shape[:: -1 if name.endswith(ending) else 1])
        for name, meta in metas.items()
    }


FULL = model_of()
GATED = {**FULL}  # with all three weights of an MLP
for up in [name for name in FULL if name.endswith("up_proj.weight")]:
    gate = up.replace("up_proj", "gate_proj")
    GATED[gate] = TensorMeta(gate, "BFloat16", FULL[up].shape)
WIDTHS = {"intermediate_size": 5, "moe_intermediate_size": 5}
FUSED_DOWN = {name: meta for name, meta in FULL.items() if ".experts." not in name}
for name in [f"model.layers.{n}.mlp.experts.down_proj" for n in range(2, LAYERS + 1)]:
    FUSED_DOWN[name] = TensorMeta(name, "BFloat16", (EXPERTS, HIDDEN, 5))
CONFIG = {**BASE, "num_nextn_predict_layers": 1, **OF_KINDS["first_k_dense_replace"]}


def found(metas, config=CONFIG):
    """The errors that a configuration shows."""
    problems = [*compare_config(Config("config.json", config), metas)]
    return [it.message for it in problems if it.code == "unlike_config"]


def test_a_single_layer_may_be_of_another_kind():
    config = {**BASE, "n_routed_experts": EXPERTS, "num_dense_layers": 1}
    assert found(model_of(dense=1, mtp=0), config) == []


@pytest.mark.parametrize("name", FULL)
def test_a_tensor_that_is_missing_is_named_by_the_configuration(name):
    roles = {"embed_tokens": "embedding", "lm_head": "output head", "model.norm": "norm behind"}
    word = next((role for part, role in roles.items() if part in name), name)
    (message,) = found({n: meta for n, meta in FULL.items() if n != name})
    assert word in message


@pytest.mark.parametrize("name", FULL)
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("gone", "1 tensor is missing"),
        ("renamed", "1 tensor is missing"),
        ("twice", "1 tensor is not in the reference"),
        ("shape", "1 tensor has another shape"),
        ("dtype", "1 tensor has another type"),
    ],
)
def test_a_tensor_that_is_not_as_in_the_reference_is_named(name, change, said):
    meta, changed = FULL[name], {**FULL}
    if change in ("gone", "renamed"):
        del changed[name]
    if change in ("twice", "renamed"):
        changed[f"{name}.copy"] = TensorMeta(f"{name}.copy", meta.dtype, meta.shape)
    if change == "shape":
        changed[name] = TensorMeta(name, meta.dtype, (*meta.shape[::-1], 1))
    if change == "dtype":
        changed[name] = TensorMeta(name, "Float32", meta.shape)
    differences = [*compare_headers(changed, FULL)]
    messages = [it.message for it in _unlike(differences, [*FULL, *changed], "base")]
    where = f"{name}.copy" if change == "twice" else name
    assert f"{where}: {said}" in messages
    assert len(messages) == 1 + (change == "renamed")


def test_another_shape_is_told_beside_another_type():
    here, there = {"w": TensorMeta("w", "Float32", (4,))}, {"w": TensorMeta("w", "BFloat16", (3,))}
    (told,) = _unlike(compare_headers(here, there), ["w"], "base", deep=True)
    assert told.facts == "Float32 (4), expected BFloat16 (3); values are not compared"
    assert told.hint == ""  # a cast would not make them comparable


@pytest.mark.parametrize("key", OF_KINDS)
def test_a_complete_model_is_as_its_configuration_says(key):
    assert found(GATED, {**BASE, **WIDTHS, "num_nextn_predict_layers": 1, **OF_KINDS[key]}) == []
    assert found(model_of(mtp=0), {**BASE, **OF_KINDS[key]}) == []


@pytest.mark.parametrize("key", ["moe_layer_frequency", "cla_share_factor", "layer_group_size"])
def test_each_second_layer_may_be_of_another_kind(key):
    metas = model_of(dense=LAYERS, mtp=0)
    for n in (1, 3, 5):
        del metas[f"model.layers.{n}.self_attn.o_proj.weight"]
    assert found(metas, {**BASE, key: 2}) == []
    (said,) = found(metas, BASE)
    assert "{1,3,5}.self_attn.o_proj.weight: 3 tensors are missing" in said


def test_a_switch_tells_no_layers_apart():
    metas = model_of(dense=LAYERS, mtp=0)
    del metas["model.layers.0.input_layernorm.weight"]
    (said,) = found(metas, {**BASE, "share_layers": True})
    assert "layers.0.input_layernorm.weight: 1 tensor is missing" in said


def test_numbers_of_layers_may_begin_with_zeros():
    metas = {name.replace("layers.", "layers.0"): meta for name, meta in FULL.items()}
    assert found(metas) == []
    del metas["model.layers.03.mlp.experts.1.up_proj.weight"]
    (said,) = found(metas)
    assert "layers.3.mlp.experts.1.up_proj.weight: 1 tensor is missing" in said


def test_experts_that_are_all_gone_are_missed_beside_vectors_as_long_as_their_number():
    metas = {name: meta for name, meta in FULL.items() if ".experts." not in name}
    assert metas["model.layers.2.mlp.gate.e_score_correction_bias"].shape == (EXPERTS,)
    assert "no expert is there" in found(metas)


def test_w1_and_w2_without_w3_are_no_mlp_of_three():
    shapes = {"w1": (5, HIDDEN), "w2": (5, HIDDEN), "c_proj": (HIDDEN, 5)}  # Qwen's first one
    metas = {name: meta for name, meta in model_of(mtp=0).items() if ".mlp." not in name}
    for n in range(LAYERS):
        for part, shape in shapes.items():
            name = f"model.layers.{n}.mlp.{part}.weight"
            metas[name] = TensorMeta(name, "BFloat16", shape)
    assert found(metas, {**BASE, "intermediate_size": 10}) == []


def test_numbers_that_no_model_has_are_refused_or_ignored(tmp_path):
    path = tmp_path / "config.json"
    assert found(model_of(mtp=0), {**CONFIG, "num_nextn_predict_layers": -1}) == []
    path.write_text(json.dumps({**CONFIG, "num_nextn_predict_layers": 10**30}))
    with pytest.raises(PlanError, match="no number of layers"):
        load_config(str(path))
    path.write_text(json.dumps({**CONFIG, "num_hidden_layers": 10_000, "moe_layer_freq": 5_000}))
    many = {**load_config(str(path)).values, **{f"{n}_step": 2 for n in range(10_000)}}
    (lost, *_) = found(FULL, many)  # takes minutes if it is done for each layer and key
    assert lost == "model.layers.{7-9999}.*: 9993 layers are missing"


def test_a_list_of_kinds_begins_again_behind_its_end():
    metas = model_of(dense=LAYERS, mtp=0)
    for n in (2, 5):
        del metas[f"model.layers.{n}.self_attn.o_proj.weight"]
    config = {**BASE, "block_types": ["recurrent", "recurrent", "attention"]}
    assert found(metas, config) == []
    assert len(found(metas, BASE)) == 1


def with_images(layers, gone=()):
    """A model with a stack of layers for images; ``gone`` are tensors that it lacks."""
    names = [f"vision_tower.blocks.{n}.{name}" for n in range(layers) for name in ("a", "b")]
    return FULL | {name: TensorMeta(name, "Float32", (3, 4)) for name in names if name not in gone}


OF_IMAGES = {**CONFIG, "vision_config": {"depth": 4}}


def test_layers_of_images_are_as_their_configuration_says():
    assert found(with_images(4), OF_IMAGES) == []
    assert found(with_images(3), OF_IMAGES) == ["vision_tower.blocks.3.*: 1 layer is missing"]
    (message,) = found(with_images(4, ["vision_tower.blocks.2.b"]), OF_IMAGES)
    assert message == "vision_tower.blocks.2.b: 1 tensor is missing"


def as_falcon():
    """Falcon: one weight has the queries, one key and one value; norms are called ``ln``."""
    shapes = {
        "transformer.word_embeddings.weight": (WORDS, HIDDEN),
        "lm_head.weight": (WORDS, HIDDEN),
    }
    shapes |= {"transformer.ln_f.weight": (HIDDEN,), "transformer.ln_f.bias": (HIDDEN,)}
    for n in range(LAYERS):
        qkv = ((HEADS + 2) * 2, HIDDEN)
        shapes[f"transformer.h.{n}.self_attention.query_key_value.weight"] = qkv
        shapes[f"transformer.h.{n}.input_layernorm.weight"] = (HIDDEN,)
    return {name: TensorMeta(name, "BFloat16", shape) for name, shape in shapes.items()}


OF_FALCON = {**BASE, "head_dim": None, "multi_query": True, "num_key_value_heads": HEADS}


def test_one_key_serves_all_heads_with_multi_query():
    assert found(as_falcon(), OF_FALCON) == []
    (message,) = found(as_falcon(), {**OF_FALCON, "multi_query": False})
    assert "query_key_value.weight: 6 tensors have another shape" in message


def test_a_norm_that_lost_its_weight_or_all_of_it_is_missing():
    metas = as_falcon()
    del metas["transformer.ln_f.weight"]
    assert found(metas, OF_FALCON) == ["transformer.ln_f.weight: 1 tensor is missing"]
    del metas["transformer.ln_f.bias"]
    assert found(metas, OF_FALCON) == ["the norm behind the last layer is missing"]


def without_experts(shape):
    """A model whose experts are one tensor of a layer, under a name without that word."""
    metas = model_of(dense=LAYERS, mtp=0)
    name = "model.layers.3.block.input_linear.weight"
    return metas | {name: TensorMeta(name, "BFloat16", shape)}


def test_experts_are_known_by_their_number():
    config = {**BASE, "num_local_experts": EXPERTS, "layer_types": [*"aaabaa"]}
    assert found(without_experts((EXPERTS, 3, 5)), config) == []
    assert found(without_experts((EXPERTS + 1, 3, 5)), config) == ["no expert is there"]


def test_experts_of_each_modality_count():
    config = {**CONFIG, "n_routed_experts": EXPERTS // 2, "moe_intermediate_size": [5, 5]}
    assert found(FULL, config) == []


def test_the_outer_configuration_ties_the_head(tmp_path):
    metas = {name: meta for name, meta in FULL.items() if name != "lm_head.weight"}
    for tied, expected in ((True, []), (False, ["the output head is missing"])):
        nested = {"tie_word_embeddings": tied, "text_config": CONFIG}
        (tmp_path / "config.json").write_text(json.dumps(nested))
        assert found(metas, load_config(str(tmp_path)).values) == expected


def test_layers_are_counted_by_other_keys():
    given = {key: value for key, value in CONFIG.items() if key != "num_hidden_layers"}
    decoder = {name.replace("layers", "decoder.layers"): meta for name, meta in FULL.items()}
    encoder = {name.replace("layers", "encoder.layers"): meta for name, meta in FULL.items()}
    longer = {name.replace(".6.", ".7."): meta for name, meta in encoder.items()}
    assert found(decoder | longer, {**given, "encoder_layers": 8, "decoder_layers": LAYERS}) == []
    assert found(FULL, {**given, "layer_types": [*"aabbbb"]}) == []


@pytest.mark.parametrize("name", RECIPES)
def test_a_model_of_each_family_is_as_its_configuration_says(name):
    recipe, choices = next(variant[1:] for variant in VARIANTS if variant[0] == name)
    config, tensors = load_model(name)
    config["num_nextn_predict_layers"] = int(name.endswith("mtp"))  # transformers keeps none
    for entries in (tensors, to_mindformers(config, tensors, recipe, choices)):
        metas = {key: TensorMeta(key, it.dtype, it.shape) for key, it in entries.items()}
        assert found(metas, config) == []


@pytest.mark.parametrize("name", ["e_proj", "h_proj", "enorm", "hnorm"])
def test_a_lost_part_of_a_stack_of_its_own_that_predicts_tokens_is_named(name):
    config, tensors = load_model("deepseek-v4-mtp")
    metas = {key: TensorMeta(key, it.dtype, it.shape) for key, it in tensors.items()}
    del metas[f"mtp.0.{name}.weight"]
    (said,) = found(metas, {**config, "num_nextn_predict_layers": 1})
    assert f"mtp.0.{name}.weight: 1 tensor is missing" in said


@pytest.mark.parametrize(
    ("metas", "config", "expected"),
    [
        (model_of(4, mtp=0), {}, ["model.layers.{4,5}.*: 2 layers are missing"]),
        (FULL, {"num_hidden_layers": 9, "n_loops": 0}, ["{7,8}.*: 2 layers are missing"]),
        (model_of(mtp=0), {}, ["1 MTP layer is missing"]),
        (FULL, {"num_nextn_predict_layers": 2}, ["1 MTP layer is missing"]),
        (FULL, {"num_hidden_layers": 4}, ["model.layers.{5,6}.*: 2 layers too many"]),
        (FULL, {"n_routed_experts": 6}, ["experts.{4,5}.*: 16 tensors are missing"]),
        (FULL, {"n_routed_experts": 3}, ["experts 3: more than there should be"]),
        (FULL, {"vocab_size": 17}, ["embed_tokens", "lm_head.weight: 1 tensor has another shape"]),
        (FULL, {"hidden_size": 7}, ["embed_tokens", "lm_head.weight: 1 tensor has another shape"]),
        (FULL, {"head_dim": 2}, ["q_proj", "k_proj", "v_proj", "o_proj"]),
        (FULL, {"quantization_config": {"quant_method": "fp8"}}, ["no weight is Float8"]),
        (
            *(without("down_proj.weight"), {}),
            ["{2-6}.mlp.experts.{0-3}.down_proj.weight: 20 tensors are", "{0,1}.mlp.down_proj"],
        ),
        (
            without(".up_proj.weight"),
            {},
            ["{2-6}.mlp.experts.{0-3}.up_proj.weight: 20 tensors are"],
        ),
        (without(".q_proj.weight"), {}, ["{0-6}.self_attn.q_proj.weight: 7 tensors are missing"]),
        (FUSED_DOWN, {}, ["{2-6}.mlp.experts.gate_up_proj: 5 tensors are missing"]),
        (FUSED_DOWN, {"n_routed_experts": 3}, ["do not hold the experts in axis 0"]),
        (model_of(dense=9), {}, ["no expert is there"]),
        (without("mlp.gate.weight"), {}, ["no router of the experts"]),
        (transposed(FULL, "4.mlp.experts.2.down_proj.weight"), {}, ["1 tensor has another shape"]),
        (transposed(FULL, "down_proj.weight"), WIDTHS, ["20 tensors have", "2 tensors have"]),
        (GATED, {**WIDTHS, "intermediate_size": 6}, ["mlp.down_proj.weight: 2 tensors have"]),
        (GATED, {**WIDTHS, "moe_intermediate_size": 6}, ["gate_proj.weight: 20 tensors have"]),
    ],
)
def test_what_is_not_as_the_configuration_says_is_an_error(metas, config, expected):
    text = "\n".join(found(metas, {**CONFIG, **config}))
    assert [words for words in expected if words not in text] == []


@pytest.mark.parametrize(
    ("metas", "config", "doubt"),
    [
        (FULL, {"first_k_dense_replace": 0}, "in some layers only"),
        (FULL, {"vocab_size": 13}, "perhaps padded"),
        (FULL, {"qk_head_dim": 3}, "heads are not compared"),
        (FULL, {"hidden_size": 7, "embed_dim": 8}, "lm_head.weight: 1 tensor has another shape"),
        (FULL, {"tie_word_embeddings": True}, "loaders may take the embedding"),
        (transposed(FULL, "s.1.mlp.down_proj.weight"), {}, "1 tensor has another shape"),
        (model_of(dense=1), {"first_k_dense_replace": 1}, "no other layer is of its kind"),
        (FULL, {"quantization_config": {"quant_method": "gptq"}}, "shapes are not compared"),
        (FULL, {"num_hidden_layers": 12, "n_loops": 2}, "{7-11}.*: 5 layers are missing"),
        (FULL, {"vision_config": {"depth": 4}}, "no layers are those of vision_config"),
        (without("embed_tokens.weight"), {"architectures": ["Encoder"]}, "the embedding of"),
    ],
)
def test_what_the_configuration_does_not_explain_is_a_doubt(metas, config, doubt):
    problems = [*compare_config(Config("config.json", {**CONFIG, **config}), metas)]
    assert doubt in "\n".join(it.message for it in problems if it.code == "doubt")


@pytest.mark.parametrize(
    "case", ["tutorial_8_to_8_retrain", "optshard_transposed_cut", "moe_ep8_to_4_optshard"]
)
def test_a_card_has_the_hash_of_the_bytes_of_each_full_tensor(case, tmp_path):
    source = shutil.copytree(GOLDEN / case / "src", tmp_path / "src")
    strategy = GOLDEN / case / "src_strategy.ckpt"
    entries, _ = merged(source, "-s", strategy)
    of_ranks, of_file = (tmp_path / "a.json", tmp_path / "b.json")
    run_well("verify", source, "-s", strategy, "--card", of_ranks)
    run_well("verify", tmp_path / "merged.safetensors", "--card", of_file)
    lines = {it["name"]: it["sha256"] for it in json.loads(of_ranks.read_text())["contents"]}
    assert lines == {n: sha256(entry.data).hexdigest() for n, entry in sorted(entries.items())}
    cards = [path.read_text().partition('"digest"')[2] for path in (of_ranks, of_file)]
    assert cards[0] == cards[1]
    run_well("verify", source, "-s", strategy, "--card", of_ranks, "--overwrite")
    assert of_ranks.read_text().partition('"digest"')[2] == cards[0]


def test_the_strategy_is_that_of_the_reference_if_only_that_has_ranks(tmp_path):
    case, out = GOLDEN / "optshard_transposed_cut", tmp_path / "full.safetensors"
    words = ["-s", case / "src_strategy.ckpt"]
    run_well("merge", case / "src", *words, "-o", out)
    assert "equal" in message(run_well("diff", case / "src", out, *words))
    run_well("verify", out, "--like", case / "src", *words, "--deep")
    lacking = run("verify", out, "--like", case / "src")
    assert "Try: -s STRATEGY, or `ckpttool verify" in message(lacking)


@pytest.mark.parametrize(
    ("case", "again"),  # bytes of slices of several regions
    [("optshard_transposed_cut", 0), ("moe_ep8_to_4_optshard", 0), ("fields", 96)],
)
@pytest.mark.parametrize("is_changed", [False, True])
def test_values_are_compared_where_bytes_are_checked(
    case, again, is_changed, tmp_path, monkeypatch
):
    source = [shutil.copytree(GOLDEN / case / "src", tmp_path / "src")] if not again else []
    words = ["-s", GOLDEN / case / "src_strategy.ckpt"]
    if not source:
        source, words = [tmp_path / "src"], ["-s", tmp_path / "fields.ckpt"]
        write_ranks(source[0], {r: {"w": noise(f"{r}", "Int32", (4, 3))} for r in (0, 1)}, "ckpt")
        words[1].write_bytes(strategy(layout("w", (2,), (0, -1), field=2)))
    full, _ = merged(*source, *words)
    largest = max(full, key=lambda name: len(full[name].data))
    dtype, shape, data = full[largest].dtype, full[largest].shape, full[largest].data
    like = tmp_path / "like.safetensors"
    changed = Entry(dtype, shape, bytes([*data[:-1], data[-1] ^ is_changed]))
    write_file(like, full | {largest: changed}, "safetensors")
    nbytes, read_bytes = Counter(), FlatFiles.read_bytes

    def counted(files, tensor, offset, out):
        nbytes[Path(tensor.file.path).name == like.name] += len(out)
        read_bytes(files, tensor, offset, out)

    monkeypatch.setattr(FlatFiles, "read_bytes", counted)
    run_well("verify", *source, *words, "--deep")
    alone = nbytes.pop(False)
    result = run("verify", *source, *words, "--deep", "--like", like, "--json")
    assert nbytes == {False: alone + again, True: sum(len(it.data) for it in full.values())}
    expected = json.loads(run("diff", *source, like, *words, "--json").stdout)["differences"]
    assert json.loads(result.stdout)["differences"] == expected
    assert len(expected) == is_changed


def test_what_verify_takes_for_no_reference_is_named_with_a_way_on(tmp_path):
    config, index = tmp_path / "config.json", tmp_path / "only" / "model.safetensors.index.json"
    config.write_text(json.dumps(BASE))
    zeros = {"w": Entry("Float32", (2,), bytes(8))}
    write_file(tmp_path / "a.safetensors", zeros, "safetensors")
    index.parent.mkdir()
    index.write_text(json.dumps({"weight_map": {"w": "model-00001-of-00001.safetensors"}}))
    words = ["verify", tmp_path / "a.safetensors"]
    assert f"Try: --config {config}" in message(run(*words, "--like", config))
    assert f"Try: --like {index}, which" in message(run(*words, "--like", index.parent))
    run_well(*words, "--like", index)


def test_values_that_are_not_compared_are_named_with_the_option_that_does(tmp_path):
    for file, name, dtype in (("a", "w", "Float32"), ("b", "w", "Float16"), ("c", "v", "Float32")):
        entry = Entry(dtype, (2,), bytes(8 if dtype == "Float32" else 4))
        write_file(tmp_path / f"{file}.ckpt", {name: entry}, "ckpt")
    a, b, c = (tmp_path / f"{file}.ckpt" for file in "abc")
    said = message(run("verify", a, "--like", b, "--deep"))
    assert "values are not compared Try: --dtype fp16" in said
    run_well("verify", a, "--like", b, "--deep", "--dtype", "fp16")
    assert "values are not" not in message(run("verify", a, "--like", b))
    assert "Try: --recipe NAME" in message(run("verify", a, "--like", c))
    assert "Try: --recipe NAME" in message(run("diff", a, c))


@pytest.mark.parametrize("option", ["--like", "--config"])
def test_a_file_that_cannot_be_read_is_not_compared(tmp_path, option):
    zeros = {"w": Entry("Float32", (2,), bytes(8))}
    write_file(tmp_path / "ref" / "model.safetensors", zeros, "safetensors")
    (tmp_path / "ref" / "config.json").write_text(json.dumps(BASE))
    (tmp_path / "card.json").write_text('{"digest": "sha256:00"}')
    (tmp_path / "short.safetensors").write_bytes(bytes([99, *bytes(7)]))
    for name, code in (("card.json", "unsupported"), ("short.safetensors", "damaged")):
        result = run("verify", tmp_path / name, option, tmp_path / "ref", "--json")
        assert [it["code"] for it in json.loads(result.stdout)["findings"]] == [code]


def test_what_the_reference_proves_is_said_beside_a_warning(tmp_path):
    tensors = {"w": Entry("Float32", (2, 2), bytes(16))}
    for name in ("a.ckpt", "b.ckpt"):
        write_file(tmp_path / name, tensors, "ckpt")
    words = ["verify", tmp_path / "a.ckpt", "--like", tmp_path / "b.ckpt", "--deep"]
    said = run(*words)
    assert said.exit_code == 1
    proven = f"the names, shapes, types and values are those of {tmp_path / 'b.ckpt'}"
    assert f"a.ckpt: 1 warning; {proven} (1 file" in message(said)
