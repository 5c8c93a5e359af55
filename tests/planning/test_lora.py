"""Adapters that are added to weights: values, layouts, recipes, names, and what is refused."""

from __future__ import annotations

import hashlib
import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest

import ckpttool
from tests.support.checkpoints import cut, write_file, write_ranks
from tests.support.commands import message, run, run_well
from tests.support.families import (
    VARIANTS,
    load_model,
    option,
    to_mindformers,
    write_strategy,
)
from tests.support.readers import Entry, entry_of, read, read_ranks

TYPES = {"Float64": "<f8", "Float32": "<f4", "Float16": "<f2"}
SCALE = 0.75


def rounded(numbers: np.ndarray, dtype: str) -> Entry:
    """Return Float64 as a type, rounded once; BFloat16 has the first 8 bits of a number."""
    if dtype != "BFloat16":
        return entry_of(numbers.astype(TYPES[dtype]), dtype)
    bits = np.ascontiguousarray(numbers).view("<u8")
    bits = bits + ((1 << 44) - 1) + (bits >> 45 & 1)  # ties go to the even one
    shorter = (bits >> 45 << 45).view("<f8").astype("<f4")
    return entry_of((shorter.view("<u4") >> 16).astype("<u2"), dtype)


def numbers_of(entry: Entry) -> np.ndarray:
    if entry.dtype != "BFloat16":
        return entry.array().astype("<f8")
    return (entry.array().astype("<u4") << 16).view("<f4").astype("<f8")


def some(name: str, shape: tuple[int, ...], dtype: str = "Float32") -> Entry:
    """Return numbers near 1, the same in every run."""
    return rounded(np.random.default_rng([*name.encode()]).standard_normal(shape), dtype)


def added(weight: Entry, a: Entry, b: Entry, scale: float = SCALE) -> Entry:
    """Return W + scale * B A in Float64, rounded once."""
    numbers = numbers_of(weight) + scale * (numbers_of(b) @ numbers_of(a))
    return rounded(numbers, weight.dtype)


def write_adapter(path: Path, tensors: dict[str, Entry], **config: object) -> Path:
    path.mkdir()
    write_file(path / "adapter_model.safetensors", tensors, "safetensors")
    if config:
        (path / "adapter_config.json").write_text(json.dumps(config))
    return path


def pair(module: str, shape: tuple[int, int], rank: int, dtype: str = "Float32"):
    """Return A and B for a weight of a shape."""
    rows, columns = shape
    a, b = ((rank, columns), (rows, rank))
    return some(f"{module} A", a, dtype), some(f"{module} B", b, dtype)


def named(module: str, a: Entry, b: Entry) -> dict[str, Entry]:
    start = f"base_model.model.{module}.lora_"
    return {f"{start}A.weight": a, f"{start}B.weight": b}


LAYOUTS = {  # of a weight with two axes, in JSON's words
    "rows": {"dev_matrix": [4], "tensor_map": [0, -1]},
    "columns": {"dev_matrix": [4], "tensor_map": [-1, 0]},
    "both": {"dev_matrix": [2, 2], "tensor_map": [0, 1]},
    "optimizer": {"dev_matrix": [2, 2], "tensor_map": [-1, 0], "opt_weight_shard_size": 2},
    "replicas": {"dev_matrix": [4], "tensor_map": [-1, -1]},
}


def strategy(path: Path, name: str, layout: str) -> Path:
    path.write_text(json.dumps({"parallel_layout_item": {name: LAYOUTS[layout]}}))
    return path


@pytest.mark.parametrize("dtype", ["BFloat16", "Float16", "Float32"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_sum_is_that_of_numpy_in_float64_rounded_once(tmp_path, layout, dtype):
    weight = some("weight", (412, 388), dtype)
    a, b = pair("layer", (412, 388), 5, dtype)
    expected = {"layer.weight": added(weight, a, b), "other.weight": weight}
    src = strategy(tmp_path / "s.json", "layer.weight", layout)
    source = {"layer.weight": weight, "other.weight": weight}
    of_src = ckpttool.read_strategy(src)
    write_ranks(tmp_path / "src", cut(source, of_src), "ckpt")
    lora = f"{write_adapter(tmp_path / 'ad', named('layer', a, b))}:{SCALE}"
    ckpttool.merge(tmp_path / "src", src, tmp_path / "m.safetensors", lora=lora)
    assert read(tmp_path / "m.safetensors") == expected
    for other in LAYOUTS:
        dst = strategy(tmp_path / f"{other}.json", "layer.weight", other)
        out = tmp_path / f"to {other}"
        ckpttool.reshard(tmp_path / "src", src, dst, out, lora=lora, format="ckpt")
        assert read_ranks(out) == cut(expected, ckpttool.read_strategy(dst))
    write_file(tmp_path / "full.ckpt", source, "ckpt")
    ckpttool.convert(tmp_path / "full.ckpt", tmp_path / "c.h5", lora=lora)
    assert read(tmp_path / "c.h5") == expected


@pytest.mark.parametrize("source", ["ranks", "their merge"])
def test_an_adapter_of_what_each_rank_fused_has_the_rows_of_the_joined_slices(tmp_path, source):
    weight, (a, b) = some("weight", (16, 6)), pair("fc1", (16, 6), 2)

    def fused(entry: Entry) -> Entry:  # [gate_0; up_0; gate_1; up_1] of [gate; up], and back
        return entry_of(entry.array().reshape(2, 2, 4, -1).swapaxes(0, 1).reshape(entry.shape))

    layouts = {"fc1.weight": {"dev_matrix": [2], "tensor_map": [0, -1]}}
    src = tmp_path / "s.json"
    src.write_text(json.dumps({"parallel_layout_item": layouts}))
    ranks = cut({"fc1.weight": fused(weight)}, ckpttool.read_strategy(src))
    write_ranks(tmp_path / "src", ranks, "ckpt")
    of_ranks, out = source == "ranks", tmp_path / "m.safetensors"
    sides = named("fc1", a, fused(b) if of_ranks else b)
    lora = f"{write_adapter(tmp_path / 'ad', sides)}:{SCALE}"
    options = {"lora": lora} if of_ranks else {}
    ckpttool.merge(tmp_path / "src", src, out, fused="fc1=2", trust_strategy=True, **options)
    if not of_ranks:
        ckpttool.convert(out, out := tmp_path / "c.safetensors", lora=lora)
    assert read(out) == {"fc1.weight": added(weight, a, b)}


def finite_model(name: str) -> tuple[dict, dict[str, Entry]]:
    """Return a model of Hugging Face with numbers in place of random bytes; integers are kept."""
    config, tensors = load_model(name)
    made = {
        key: it if it.dtype.startswith("Int") else some(key, it.shape, it.dtype)
        for key, it in tensors.items()
    }
    copies = {  # of MTP
        "embed_tokens": "model.embed_tokens",
        "shared_head.head": "lm_head",
        "mtp.0.emb.tok_emb": "embed",
        "mtp.0.head": "head",
    }
    for key in made:
        for end, of in copies.items():
            if key.endswith(f"{end}.weight"):
                made[key] = made[f"{of}.weight"]
    return config, made


def adapted(tensors: dict[str, Entry], wanted) -> tuple[dict[str, Entry], dict[str, Entry]]:
    """Return tensors with an adapter for each matrix that is wanted, and this adapter."""
    made, adapter = dict(tensors), {}
    for number, (name, entry) in enumerate(tensors.items()):
        if len(entry.shape) == 2 and name.endswith(".weight") and wanted(name):
            module = name.removesuffix(".weight")
            a, b = pair(module, entry.shape, 1 + number % 3)
            made[name], adapter = added(entry, a, b), adapter | named(module, a, b)
    return made, adapter


MODELS_AND_RECIPES = [
    pytest.param(*it, id=" ".join([it[0], it[1], *it[2].values()])) for it in VARIANTS
]


def is_adapted(name: str) -> bool:
    """Return whether a test adapts a weight: not those of which there are copies."""
    return "emb" not in name and "head" not in name


def write_adapted(tmp_path, model):
    """Write a model and an adapter; return its folder, what is in it, the sum, and --lora."""
    config, tensors = finite_model(model)
    result, adapter = adapted(tensors, is_adapted)
    folder = tmp_path / "hf"
    folder.mkdir()
    write_file(folder / "model.safetensors", tensors, "safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    lora = f"{write_adapter(tmp_path / 'ad', adapter)}:{SCALE}"
    return folder, config, tensors, result, lora


@pytest.mark.parametrize(("model", "recipe", "choices"), MODELS_AND_RECIPES)
def test_an_adapter_of_hugging_face_goes_through_a_recipe_both_ways(
    tmp_path, model, recipe, choices
):
    folder, config, tensors, result, lora = write_adapted(tmp_path, model)
    words = option(recipe, choices)
    before, after = (to_mindformers(config, it, recipe, choices) for it in (tensors, result))
    path = write_strategy(tmp_path / "s.json", before, 2)
    shards = ckpttool.read_strategy(path)
    options = {"recipe": words, "hf_config": folder, "lora": lora}
    ckpttool.split(folder, path, tmp_path / "to", format="ckpt", **options)
    assert read_ranks(tmp_path / "to") == cut(after, shards)
    write_ranks(tmp_path / "ms", cut(before, shards), "ckpt")
    ckpttool.merge(tmp_path / "ms", path, tmp_path / "back", **options)
    assert read(tmp_path / "back" / "model.safetensors") == result


SPELLINGS = {
    "graph": ("lora_A.weight", "lora_B.weight"),
    "pynative": ("lora_a", "lora_b"),
    "legacy": ("mindpet_delta_lora_a", "mindpet_delta_lora_b"),
    "mindspeed": ("lora_A.default.weight", "lora_B.default.weight"),
}


FUSED = ("gate_up_proj", "down_proj")


def added_to_experts(weight: Entry, a: Entry, b: Entry) -> Entry:
    numbers = numbers_of(weight) + SCALE * (numbers_of(a) @ numbers_of(b))
    return rounded(numbers, weight.dtype)


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("model", ["qwen3", "qwen3-moe", "deepseek-v3", "glm4", "llama"])
def test_an_adapter_with_names_of_mindformers_is_added_before_a_recipe(tmp_path, model, spelling):
    variants = [it[1:] for it in VARIANTS if it[0] == model and "graph" not in it[2].values()]
    recipe, choices = variants[0]
    config, tensors = finite_model(model)
    before = to_mindformers(config, tensors, recipe, choices)
    result, adapter = dict(before), {}
    for number, (name, entry) in enumerate(before.items()):
        rank = 1 + number % 3
        if name.endswith(("weight1", "weight2")):
            experts, rows, columns = entry.shape
            a = some(f"{name} a", (experts, rows, rank))
            b = some(f"{name} b", (experts, rank, columns))
            adapter |= {f"{name}_lora_a": a, f"{name}_lora_b": b}
            result[name] = added_to_experts(entry, a, b)
        elif len(entry.shape) == 2:
            module = name.removesuffix(".weight")
            if module == name:  # the embedding of old names
                continue
            a, b = pair(module, entry.shape, rank)
            adapter |= dict(
                zip((f"{module}.{it}" for it in SPELLINGS[spelling]), (a, b), strict=True)
            )
            result[name] = added(entry, a, b)
    write_file(tmp_path / "adapter.ckpt", adapter, "ckpt")
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    path = write_strategy(tmp_path / "s.json", before, 2)
    shards = ckpttool.read_strategy(path)
    write_ranks(tmp_path / "before", cut(before, shards), "ckpt")
    write_ranks(tmp_path / "after", cut(result, shards), "ckpt")
    lora = f"{tmp_path / 'adapter.ckpt'}:{SCALE}"
    ckpttool.merge(tmp_path / "before", path, tmp_path / "m.ckpt", lora=lora)
    assert read(tmp_path / "m.ckpt") == result
    options = {"recipe": option(recipe, choices), "hf_config": folder}
    ckpttool.merge(tmp_path / "after", path, tmp_path / "e.safetensors", **options)
    ckpttool.merge(tmp_path / "before", path, tmp_path / "g.safetensors", lora=lora, **options)
    assert read(tmp_path / "g.safetensors") == read(tmp_path / "e.safetensors")


def fused_of_peft(tensors: dict[str, Entry], parameters: tuple[str, ...]):
    """Return the model with adapters on fused experts added, and these as PEFT 0.21 has them."""
    made, adapter, rank = {**tensors}, {}, 2
    experts = {name.rpartition(".experts.")[0] for name in tensors if ".mlp.experts." in name}
    for module in experts:
        stack = [name for name in tensors if name.startswith(f"{module}.experts.")]
        number = 1 + max(int(name.split(".")[-3]) for name in stack)
        for wrappers, parameter in enumerate(reversed(parameters)):  # the last is outermost
            halves = ["gate_proj", "up_proj"] if parameter == "gate_up_proj" else ["down_proj"]
            rows, columns = tensors[f"{module}.experts.0.{halves[0]}.weight"].shape
            inside = f"{module}.experts{'.base_layer' * wrappers}"
            a = some(f"{inside} A", (number * rank, columns))
            b = some(f"{inside} B", (len(halves) * rows, rank * number))
            adapter |= named(inside, a, b)
            of_a = numbers_of(a).reshape(number, rank, columns)
            of_b = numbers_of(b).reshape(len(halves), rows, rank, number)
            for expert, (part, half) in product(range(number), enumerate(halves)):
                name = f"{module}.experts.{expert}.{half}.weight"
                sides = of_a[expert], of_b[part, :, :, expert]
                made[name] = added(tensors[name], *(rounded(it, "Float32") for it in sides))
    return made, adapter


@pytest.mark.parametrize("parameters", [FUSED, FUSED[:1], FUSED[1:]])
@pytest.mark.parametrize("model", ["qwen3-moe", "glm4-moe"])
def test_an_adapter_of_fused_experts_goes_to_the_weights_in_files(tmp_path, model, parameters):
    config, tensors = finite_model(model)
    made, adapter = fused_of_peft(tensors, parameters)
    write_file(tmp_path / "base.safetensors", tensors, "safetensors")
    targets = [f"mlp.experts.{it}" for it in parameters[::-1]]
    said = {"r": 2, "lora_alpha": 2 * SCALE, "peft_version": "0.21.2", "target_parameters": targets}
    lora = write_adapter(tmp_path / "ad", adapter, **said)
    ckpttool.merge(tmp_path / "base.safetensors", None, tmp_path / "out.safetensors", lora=lora)
    assert read(tmp_path / "out.safetensors") == made
    recipe, choices = next(it[1:] for it in VARIANTS if it[0] == model)
    ranks = to_mindformers(config, tensors, recipe, choices)
    path = write_strategy(tmp_path / "s.json", ranks, 4)
    write_ranks(tmp_path / "ms", cut(ranks, ckpttool.read_strategy(path)), "ckpt")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    options = {"recipe": option(recipe, choices), "hf_config": tmp_path / "hf", "lora": lora}
    ckpttool.merge(tmp_path / "ms", path, tmp_path / "back.safetensors", **options)
    assert read(tmp_path / "back.safetensors") == made
    (lora / "adapter_config.json").write_text(json.dumps({**said, "r": 4, "lora_alpha": 4 * SCALE}))
    with pytest.raises(ckpttool.PlanError, match="a shape is not that of the weight"):
        ckpttool.merge(tmp_path / "base.safetensors", None, tmp_path / "x.ckpt", lora=lora)
    for key in ("target_parameters", "r"):  # which weights it is for is not told
        (lora / "adapter_config.json").write_text(json.dumps({**said, key: None}))
        with pytest.raises(ckpttool.PlanError, match="would not be used"):
            ckpttool.merge(tmp_path / "base.safetensors", None, tmp_path / "x.ckpt", lora=lora)


def test_a_model_is_no_adapter(tmp_path):
    for name in ("base", "model"):
        write_file(tmp_path / f"{name}.ckpt", {"w": some("w", (2, 2))}, "ckpt")
    words = ["merge", tmp_path / "base.ckpt", "-o", tmp_path / "out.ckpt"]
    result = run(*words, "--lora", f"{tmp_path / 'model.ckpt'}:1")
    assert result.exit_code == 5
    assert "no tensor is called as those of an adapter w Try: an adapter" in message(result)


@pytest.mark.parametrize(
    ("version", "is_older"),
    [("", True), ("0.18.1", True), ("0.19.0", True), ("0.19.1.dev0@main", True)]
    + [(version, False) for version in ("0.19.1", "0.19.2.dev0", "0.20.0", "1.0")],
)
def test_fused_experts_of_an_older_peft_are_refused_by_its_version(tmp_path, version, is_older):
    tensors = finite_model("qwen3-moe")[1]
    adapter = fused_of_peft(tensors, FUSED)[1]
    targets = [f"mlp.experts.{it}" for it in FUSED]
    said = {"r": 2, "lora_alpha": 2, "peft_version": version, "target_parameters": targets}
    lora = write_adapter(tmp_path / "ad", adapter, **said)
    write_file(tmp_path / "base.safetensors", tensors, "safetensors")
    words = ["merge", tmp_path / "base.safetensors", "-o", tmp_path / "out.ckpt", "--lora", lora]
    result = run(*words)
    assert result.exit_code == (5 if is_older else 0)
    if is_older:
        text = message(result)
        assert f"peft_version is {version or 'missing'}; before 0.19.1 A and B of fused" in text
        assert "Try: `merge_and_unload` of the PEFT that saved it" in text
        assert text.count("error[lora]") == 1


def test_a_copy_gets_what_is_added_to_the_tensor_that_it_copies(tmp_path):
    config, tensors = finite_model("deepseek-v3-mtp")
    name = "model.embed_tokens.weight"
    a, b = pair("embedding", tensors[name].shape, 2)
    expected = added(tensors[name], a, b)
    recipe, choices = next(it[1:] for it in VARIANTS if it[0] == "deepseek-v3-mtp")
    write_file(tmp_path / "ms.ckpt", to_mindformers(config, tensors, recipe, choices), "ckpt")
    lora = f"{write_adapter(tmp_path / 'ad', named('model.embed_tokens', a, b))}:{SCALE}"
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    options = {"recipe": option(recipe, choices), "hf_config": folder, "lora": lora}
    ckpttool.merge(tmp_path / "ms.ckpt", None, tmp_path / "back.safetensors", **options)
    copy = "model.layers.3.embed_tokens.weight"
    assert read(tmp_path / "back.safetensors") == tensors | {name: expected, copy: expected}


def merge(folder: Path, base: dict[str, Entry], *words: str) -> dict[str, Entry]:
    write_file(folder / "base.ckpt", base, "ckpt")
    out = folder / "out.safetensors"
    run_well("merge", folder / "base.ckpt", "-o", out, "--overwrite", *words)
    return read(out)


BASE = {"a.weight": some("a", (6, 4)), "b.weight": some("b", (5, 6)), "bias": some("bias", (6,))}
CONFIGS = [  # what a configuration says, and the scales of a (rank 2) and b (rank 3)
    ({"r": 2, "lora_alpha": 5, "rank_pattern": {"b": 3}}, (5 / 2, 5 / 3)),
    (
        {"r": 3, "lora_alpha": 5, "use_rslora": True, "rank_pattern": {"a": 2}},
        (5 / 2**0.5, 5 / 3**0.5),
    ),
    (
        {"r": 2, "lora_alpha": 5, "rank_pattern": {"^b": 3}, "alpha_pattern": {"a|c": 7}},
        (7 / 2, 5 / 3),
    ),
    ({"lora_alpha": 8, "alpha_pattern": {"x.b": 1}, "rank_pattern": None}, (4.0, 8 / 3)),
]


@pytest.mark.parametrize(("config", "scales"), CONFIGS)
def test_the_scale_is_that_of_peft(tmp_path, config, scales):
    pairs = {"a": pair("a", (6, 4), 2), "b": pair("b", (5, 6), 3)}
    tensors = {name: it for module, of in pairs.items() for name, it in named(module, *of).items()}
    adapter = write_adapter(tmp_path / "ad", tensors, **config)
    expected = {
        f"{module}.weight": added(BASE[f"{module}.weight"], *of, scale)
        for (module, of), scale in zip(pairs.items(), scales, strict=True)
    }
    assert merge(tmp_path, BASE, "--lora", adapter) == BASE | expected
    given = {f"{it}.weight": added(BASE[f"{it}.weight"], *of, -2.5) for it, of in pairs.items()}
    assert merge(tmp_path, BASE, "--lora", f"{adapter}:-2.5") == BASE | given


def test_copies_of_a_weight_get_what_the_weight_gets(tmp_path):
    """Training that resumes from a master copy would undo the sum."""
    first, second = pair("first", (6, 4), 2), pair("second", (6, 4), 3)
    base = {
        "a.weight": some("a", (6, 4), "BFloat16"),
        "main_param.a.weight": some("m", (6, 4)),
        "ema.a.weight": some("e", (6, 4), "BFloat16"),
        "adam_m.a.weight": some("s", (6, 4)),
        "main_param.other.weight": some("o", (6, 4)),
        "other.weight": some("p", (6, 4)),
    }
    lora = f"{write_adapter(tmp_path / 'x', named('a', *first))}:{SCALE}"
    names = ("a.weight", "main_param.a.weight", "ema.a.weight")
    expected = base | {name: added(base[name], *first) for name in names}
    assert merge(tmp_path, base, "--lora", lora) == expected
    other = f"{write_adapter(tmp_path / 'y', named('c', *second))}:{SCALE}"
    got = merge(tmp_path, base, "--lora", other, "--rename", "a.weight=c.weight")
    assert got["main_param.c.weight"] == added(base["main_param.a.weight"], *second)
    done = ckpttool.merge(tmp_path / "base.ckpt", None, tmp_path / "n.ckpt", lora=lora)
    (note,) = [note for note in done.notes if note.code == "lora_used"]
    assert note.lines[-2:] == (
        f"{tmp_path / 'x' / 'adapter_model.safetensors'}: added to 1 weight, times {SCALE}",
        "and to copies: main_param.a.weight, ema.a.weight",
    )
    base["main_param.a.weight"] = some("m", (24,))  # nothing says how its elements lie
    write_file(tmp_path / "base.ckpt", base, "ckpt")
    words = ["merge", tmp_path / "base.ckpt", "-o", tmp_path / "f.ckpt", "--lora", lora]
    assert "Try: --exclude main_param.a.weight" in message(run(*words))
    run_well(*words, "--exclude", "main_param.a.weight")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_master_copies_on_ranks_get_what_their_weights_get(tmp_path, layout):
    weight = some("w", (40, 24), "BFloat16")
    master = some("m", (40, 24))
    state = some("s", (40, 24))
    a, b = pair("layer", (40, 24), 3)
    names = ("layer.weight", "main_param.layer.weight", "adam_m.layer.weight")
    source = dict(zip(names, (weight, master, state), strict=True))
    sums = dict(zip(names, (added(weight, a, b), added(master, a, b), state), strict=True))
    path = tmp_path / "s.json"
    path.write_text(json.dumps({"parallel_layout_item": dict.fromkeys(names, LAYOUTS[layout])}))
    of_ranks = ckpttool.read_strategy(path)
    write_ranks(tmp_path / "src", cut(source, of_ranks), "ckpt")
    lora = f"{write_adapter(tmp_path / 'ad', named('layer', a, b))}:{SCALE}"
    ckpttool.reshard(tmp_path / "src", path, path, tmp_path / "out", lora=lora, format="ckpt")
    assert read_ranks(tmp_path / "out") == cut(sums, of_ranks)
    listed = strategy(tmp_path / "one.json", "layer.weight", layout)
    ckpttool.merge(tmp_path / "src", listed, tmp_path / "m.h5", lora=lora)
    assert read(tmp_path / "m.h5") == sums


def test_weights_that_are_stored_transposed_get_what_is_added_transposed(tmp_path):
    a, b = some("A", (2, 6)), some("B", (4, 2))
    turned = numbers_of(BASE["a.weight"]) + 2 * (numbers_of(b) @ numbers_of(a)).T
    expected = BASE | {"a.weight": rounded(turned, "Float32")}
    config = {"r": 2, "lora_alpha": 4}
    tensors = named("a", a, b)
    adapter = write_adapter(tmp_path / "ad", tensors, **config, fan_in_fan_out=True)
    assert merge(tmp_path, BASE, "--lora", adapter) == expected
    start = "base_model.model.a.lora_embedding_"
    adapter = write_adapter(tmp_path / "of", {f"{start}A": a, f"{start}B": b}, **config)
    assert merge(tmp_path, BASE, "--lora", adapter) == expected


def test_several_adapters_are_added_one_after_another(tmp_path):
    first, second = pair("first", (6, 4), 2), pair("second", (6, 4), 3)
    adapters = [
        f"{write_adapter(tmp_path / name, named('a', *of))}:{scale}"
        for name, of, scale in (("x", first, 0.5), ("y", second, 3.0))
    ]
    numbers = numbers_of(BASE["a.weight"])
    for (a, b), scale in ((first, 0.5), (second, 3.0)):
        numbers = numbers + scale * (numbers_of(b) @ numbers_of(a))
    words = [word for adapter in adapters for word in ("--lora", adapter)]
    assert merge(tmp_path, BASE, *words) == BASE | {"a.weight": rounded(numbers, "Float32")}


def test_the_result_has_the_type_of_the_base_or_that_of_dtype(tmp_path):
    a, b = pair("a", (6, 4), 2, "BFloat16")
    lora = f"{write_adapter(tmp_path / 'ad', named('a', a, b))}:2"
    numbers = numbers_of(BASE["a.weight"]) + 2 * (numbers_of(b) @ numbers_of(a))
    got = merge(tmp_path, BASE, "--lora", lora, "--dtype", "bf16")
    assert got["a.weight"] == rounded(numbers, "BFloat16")
    new = merge(tmp_path, BASE, "--lora", lora, "--rename", "a.weight=c.weight")
    assert new["c.weight"] == rounded(numbers, "Float32")


def test_zeros_keep_their_sign_where_nothing_is_added(tmp_path):
    """Rows of q lie between those of k and v: what is added to k begins and ends among them."""
    config, tensors = finite_model("qwen3")
    name = "model.layers.0.self_attn.q_proj.weight"
    shape = tensors[name].shape
    tensors[name] = entry_of(np.full(shape, 0x8000, "<u2"), "BFloat16")
    module = "model.layers.0.self_attn.k_proj"
    adapter = named(module, *pair(module, tensors[f"{module}.weight"].shape, 2))
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    write_file(folder / "model.safetensors", tensors, "safetensors")
    lora = f"{write_adapter(tmp_path / 'ad', adapter)}:1"
    ckpttool.merge(
        folder,
        None,
        tmp_path / "m.ckpt",
        recipe="qwen3:fc1=contiguous,attention=grouped",
        lora=lora,
    )
    a, b = adapter.values()
    result = tensors | {f"{module}.weight": added(tensors[f"{module}.weight"], a, b, 1)}
    choices = {"fc1": "contiguous", "attention": "grouped"}
    assert read(tmp_path / "m.ckpt") == to_mindformers(config, result, "qwen3", choices)


def test_all_that_is_wrong_with_an_adapter_is_said_before_the_first_byte(tmp_path):
    base = BASE | {
        "i.weight": entry_of(np.zeros((4, 4), "<i1"), "Int8"),
        "c.weight": some("c", (3, 3)),
    }
    tensors = {
        **named("a", some("A", (2, 5)), some("B", (6, 2))),
        **named("i", some("A", (2, 4)), some("B", (4, 2))),
        **named("gone", some("A", (2, 4)), some("B", (4, 2))),
        **named("bias", some("A", (2, 6)), some("B", (6, 2))),
        "base_model.model.b.lora_A.weight": some("A", (2, 6)),
        "base_model.model.c.lora_A.weight": some("A", (2, 3)),
        "base_model.model.c.lora_B.weight": some("B", (3, 2)),
        "base_model.model.lm_head.weight": some("head", (2, 2)),
        "base_model.model.a.lora_magnitude_vector": some("m", (6,)),
    }
    adapter = write_adapter(tmp_path / "ad", tensors)
    write_file(tmp_path / "base.ckpt", base, "ckpt")
    before = sorted(tmp_path.rglob("*"))
    result = run("merge", tmp_path / "base.ckpt", "-o", tmp_path / "out.ckpt", "--lora", adapter)
    text = message(result)
    assert result.exit_code == 5
    for part in (
        "a shape is not that of the weight",
        "base_model.model.a.lora_A.weight (2, 5), expected (2, 4)",
        "nothing can be added to Int8",
        "a tensor of the adapter is there without its B",
        "nothing says the scale",
        "4 tensors of the adapter would not be used",
        "the source has a.weight and 4 more, the adapter bias.weight and 1 more",
        "Try: the complete file",
        "no adapter_config.json beside it",
        "2 tensors of the adapter would not be used",
        "Try: `merge_and_unload` of the PEFT that saved it",
        "base_model.model.lm_head.weight",
    ):
        assert part in text, part
    assert sorted(tmp_path.rglob("*")) == before


def test_names_of_the_source_are_those_of_its_tensors_whatever_they_become(tmp_path):
    base = {f"layers.{n}.weight": some(f"w{n}", (6, 4)) for n in range(3)}
    write_file(tmp_path / "base.safetensors", base, "safetensors")
    of_layers = [pair(f"p{n}", (6, 4), 2) for n in range(3)]
    one, three = tmp_path / "one", tmp_path / "three"
    write_adapter(one, named("layers.1", *of_layers[1]), lora_alpha=4)
    every = [named(f"layers.{n}", *of) for n, of in enumerate(of_layers)]
    write_adapter(three, {name: it for of in every for name, it in of.items()}, lora_alpha=4)
    out = tmp_path / "out.safetensors"
    swap = ["--rename", "layers.0.*=layers.1.*", "--rename", "layers.1.*=layers.0.*"]
    run_well("merge", tmp_path / "base.safetensors", "-o", out, "--lora", one, *swap)
    assert read(out) == {
        "layers.0.weight": added(base["layers.1.weight"], *of_layers[1], 2),
        "layers.1.weight": base["layers.0.weight"],
        "layers.2.weight": base["layers.2.weight"],
    }
    pruned = ["--exclude", "layers.1.*", "--rename", "layers.2.*=layers.1.*"]
    words = ["-o", tmp_path / "never.safetensors", "--lora", three, *pruned]
    result = run("merge", tmp_path / "base.safetensors", *words)
    assert result.exit_code == 5
    assert "2 tensors of the adapter would not be used" in message(result)


RESIZED = ["--pad-vocab", "8", "--vocab", "head.weight"]


@pytest.mark.parametrize(
    ("axes", "words", "says"),
    [
        ({"head.weight": "(o i)"}, [], "rows and columns become one axis"),
        ({"head.weight": "i o"}, RESIZED, "its rows move after a recipe"),
        (
            {"head.weight": "i[:2] o", "rest.weight": "i[2:] o"},
            RESIZED,
            "its rows move after a recipe",
        ),
    ],
)
def test_what_cannot_be_added_behind_a_recipe_is_refused(tmp_path, axes, words, says):
    write_file(tmp_path / "base.safetensors", {"w.weight": some("w", (6, 4))}, "safetensors")
    rules = [{"mindspore": axes, "huggingface": {"w.weight": "o i"}, "sizes": {"i": "4"}}]
    recipe = {"recipe": "own", "version": 1, "source": "test", "rules": rules}
    (tmp_path / "own.yaml").write_text(json.dumps(recipe))
    lora = write_adapter(tmp_path / "ad", named("w", *pair("p", (6, 4), 2)), lora_alpha=4)
    options = ["--recipe", tmp_path / "own.yaml", "--lora", lora, *words]
    result = run("merge", tmp_path / "base.safetensors", "-o", tmp_path / "never.ckpt", *options)
    assert result.exit_code == 5
    assert says in message(result)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"peft_type": "LOHA", "lora_alpha": 2}, "peft_type is LOHA"),
        ({"use_dora": True, "lora_alpha": 2}, "use_dora"),
        ({"init_lora_weights": "pissa_niter_4", "lora_alpha": 2}, "which changes the base"),
        ({"modules_to_save": ["lm_head"], "lora_alpha": 2}, "it has modules_to_save"),
        ({"init_lora_weights": "olora", "lora_alpha": 2}, "init_lora_weights is olora"),
        ({"init_lora_weights": "OLoRA", "lora_alpha": 2}, "init_lora_weights is OLoRA"),
        ({"init_lora_weights": "lora_ga", "lora_alpha": 2}, "init_lora_weights is lora_ga"),
        ({"layer_replication": [[0, 1]], "lora_alpha": 2}, "layer_replication"),
        ({"lora_alpha": 2, "r": 3}, "rank 2, and the configuration says 3"),
        ({"r": 2}, "nothing says the scale"),
        ({"r": "two"}, "Expected `int | null`"),
    ],
)
def test_a_configuration_that_is_not_of_this_adapter_is_refused(tmp_path, config, says):
    adapter = write_adapter(tmp_path / "ad", named("a", *pair("a", (6, 4), 2)), **config)
    write_file(tmp_path / "base.ckpt", BASE, "ckpt")
    result = run("merge", tmp_path / "base.ckpt", "-o", tmp_path / "out.ckpt", "--lora", adapter)
    assert result.exit_code in (3, 5)
    assert says in message(result)
    assert not (tmp_path / "out.ckpt").exists()


def test_an_adapter_of_other_names_asks_for_the_recipe(tmp_path):
    adapter = write_adapter(tmp_path / "ad", named("layers.0.q", *pair("a", (6, 4), 2)))
    write_file(tmp_path / "base.ckpt", {"decoder.0.q.weight": BASE["a.weight"]}, "ckpt")
    result = run("merge", tmp_path / "base.ckpt", "-o", tmp_path / "o", "--lora", f"{adapter}:1")
    assert "the source has decoder.0.q.weight, the adapter layers.0.q.weight" in message(result)
    assert "Try: --recipe of the family, or an adapter of this model" in message(result)


def test_an_adapter_of_other_names_is_added_before_the_target_that_lists_the_names(tmp_path):
    adapter = write_adapter(tmp_path / "ad", named("layers.0.q", *pair("a", (6, 4), 2)))
    write_file(tmp_path / "base.ckpt", {"decoder.0.q.weight": BASE["a.weight"]}, "ckpt")
    target = tmp_path / "two.yaml"
    target.write_text("ckpttool_strategy: 1\nranks: 2\nparameters: {'*': replicated}\n")
    words = ["split", tmp_path / "base.ckpt", "-d", target, "-o", tmp_path / "out"]
    result = run(*words, "--format", "ckpt", "--lora", f"{adapter}:1")
    by_merge = "`merge` with --recipe and --lora, then `split` of its folder with --recipe"
    assert f"Try: {by_merge}, or an adapter of this model" in message(result)


def test_a_wrong_path_of_an_adapter_is_told_as_one(tmp_path):
    folder = write_adapter(tmp_path / "ad", named("a", *pair("a", (6, 4), 2)), lora_alpha=2)
    write_file(tmp_path / "base.ckpt", BASE, "ckpt")
    one, none = tmp_path / "one", tmp_path / "none"
    one.mkdir()
    none.mkdir()
    (one / "a.safetensors").write_bytes((folder / "adapter_model.safetensors").read_bytes())
    (none / "adapter_model.bin").write_bytes(b"PK")
    of_adapter = "Try: --lora with a .safetensors, .ckpt or .h5 file of the adapter"
    for path, says in (
        (none, of_adapter),
        (none / "adapter_model.bin", of_adapter),
        (f"{one}:2", f"it holds a.safetensors {of_adapter}"),
        (f"{folder}:two", "the scale 'two' is not a number"),
    ):
        result = run("merge", tmp_path / "base.ckpt", "-o", tmp_path / "o.ckpt", "--lora", path)
        assert says in message(result)
        assert "SRC" not in message(result)


def test_each_file_of_ranks_by_itself_takes_no_adapter(tmp_path):
    write_ranks(tmp_path / "src", {0: BASE, 1: BASE}, "ckpt")
    lora = f"{write_adapter(tmp_path / 'ad', named('a', *pair('a', (6, 4), 2)))}:1"
    result = run("convert", tmp_path / "src", "-o", tmp_path / "out", "--lora", lora)
    assert "each file is read by itself" in message(result)


def test_a_number_of_an_adapter_that_is_not_finite_is_named(tmp_path):
    a, b = pair("a", (6, 4), 2)
    broken = a.array().copy()
    broken[1, 2] = np.nan
    lora = f"{write_adapter(tmp_path / 'ad', named('a', entry_of(broken), b))}:1"
    write_file(tmp_path / "base.ckpt", BASE, "ckpt")
    result = run("merge", tmp_path / "base.ckpt", "-o", tmp_path / "out.ckpt", "--lora", lora)
    assert "lora_A.weight: NaN at [0, 2] Try: an adapter without it" in message(result)
    assert not (tmp_path / "out.ckpt").exists()


@pytest.mark.parametrize("engine", ["inline", "processes:1"])
def test_every_engine_refuses_nan_beside_a_product(tmp_path, monkeypatch, engine):
    monkeypatch.setattr("ckpttool.model.manifest.UNIT_BYTES", 96)  # q and k are units of qk
    base = {name: some(name, (6, 4)) for name in ("q.weight", "k.weight")}
    broken = base["k.weight"].array().copy()
    broken[5, 2] = np.nan
    base["k.weight"] = entry_of(broken)
    write_file(tmp_path / "base.safetensors", base, "safetensors")
    sides = {"q.weight": "p[0] o i", "k.weight": "p[1] o i"}
    rules = [{"mindspore": {"qk": "(p o) i"}, "huggingface": sides, "sizes": {"p": "2"}}]
    recipe = {"recipe": "own", "version": 1, "source": "test", "rules": rules}
    (tmp_path / "own.yaml").write_text(json.dumps(recipe))
    lora = f"{write_adapter(tmp_path / 'ad', named('q', *pair('p', (6, 4), 2)))}:1"
    options = {"recipe": str(tmp_path / "own.yaml"), "lora": lora, "engine": engine}
    with pytest.raises(ckpttool.CkptToolError, match=r"k\.weight: NaN at"):
        ckpttool.merge(tmp_path / "base.safetensors", None, tmp_path / "never.ckpt", **options)


def attrs_of(path: Path) -> dict[str, str]:
    data = path.read_bytes()
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]


def test_header_manifest_and_note_say_what_was_added(tmp_path):
    adapter = write_adapter(tmp_path / "ad", named("a", *pair("a", (6, 4), 2)), r=2, lora_alpha=3)
    write_file(tmp_path / "base.ckpt", BASE, "ckpt")
    out = tmp_path / "out.safetensors"
    done = ckpttool.merge(tmp_path / "base.ckpt", None, out, lora=adapter / "adapter_config.json")
    (note,) = [note for note in done.notes if note.code == "lora_used"]
    assert note.message == "added to 1 weight, times 1.5"
    file = adapter / "adapter_model.safetensors"
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    attrs = attrs_of(out)
    assert attrs["ckpttool.lora"] == f"adapter_model.safetensors sha256:{digest} times 1.5"
    again, kept = tmp_path / "again.safetensors", tmp_path / "kept.safetensors"
    before = "this adapter was added before, and is added again"
    assert before not in [note.message for note in done.notes]
    done = ckpttool.merge(out, None, again, lora=f"{adapter}:2")
    assert before in [note.message for note in done.notes]
    ckpttool.merge(again, None, kept)
    lists = attrs["ckpttool.lora"] + f"; adapter_model.safetensors sha256:{digest} times 2.0"
    assert [attrs_of(it)["ckpttool.lora"] for it in (again, kept)] == [lists, lists]
    manifest = json.loads(Path(f"{out}.ckpttool.json").read_text())
    assert "ad/adapter_model.safetensors" in json.dumps(manifest)
    assert manifest["outputs"][0]["cast"]["elements"] == 24  # of a, and of no other
    run_well("verify", out, "--deep", "--card", tmp_path / "card.json")
    assert digest in (tmp_path / "card.json").read_text()


@pytest.mark.parametrize("engine", ["inline", "processes:2", "threads:2"])
def test_every_engine_writes_the_same(tmp_path, engine):
    weight = some("weight", (1500, 1100), "BFloat16")
    a, b = pair("layer", weight.shape, 40, "Float16")
    write_file(tmp_path / "base.ckpt", {"layer.weight": weight}, "ckpt")
    lora = f"{write_adapter(tmp_path / 'ad', named('layer', a, b))}:{SCALE}"
    out = tmp_path / "out.ckpt"
    ckpttool.merge(tmp_path / "base.ckpt", None, out, lora=lora, engine=engine)
    assert read(out) == {"layer.weight": added(weight, a, b)}


def test_a_resumed_run_knows_the_adapter(tmp_path):
    base, out = tmp_path / "base.ckpt", tmp_path / "out.ckpt"
    write_file(base, BASE, "ckpt")
    first, second = (
        write_adapter(tmp_path / name, named("a", some(name, (2, 4)), some("B", (6, 2))))
        for name in ("x", "y")
    )
    run_well("merge", base, "-o", out, "--lora", f"{first}:1")
    result = run_well("merge", base, "-o", out, "--lora", f"{first}:1", "--resume")
    assert "Kept" in result.output
    for other in (f"{first}:2", f"{second}:1"):
        result = run("merge", base, "-o", out, "--lora", other, "--resume")
        assert result.exit_code == 5, other
    (first / "adapter_model.safetensors").write_bytes(
        (second / "adapter_model.safetensors").read_bytes()
    )
    result = run("merge", base, "-o", out, "--lora", f"{first}:1", "--resume")
    assert result.exit_code == 5
    result = run("merge", base, "-o", first / "adapter_model.safetensors", "--lora", f"{first}:1")
    assert result.exit_code != 0  # no output replaces what is read
    result = run(
        "merge", base, "-o", first / "adapter_model.safetensors", "--lora", f"{first}:1",
        "--overwrite",
    )  # fmt: skip
    assert result.exit_code != 0


@pytest.mark.parametrize("engine", ["processes:2", "threads:2"])
def test_workers_take_what_they_need_of_a_recipe(tmp_path, engine):
    folder, config, _, result, lora = write_adapted(tmp_path, "qwen3-moe")
    recipe, choices = next(it[1:] for it in VARIANTS if it[0] == "qwen3-moe")
    after = to_mindformers(config, result, recipe, choices)
    path = write_strategy(tmp_path / "s.json", after, 2)
    options = {"recipe": option(recipe, choices), "lora": lora, "engine": engine}
    ckpttool.split(folder, path, tmp_path / "to", format="ckpt", **options)
    assert read_ranks(tmp_path / "to") == cut(after, ckpttool.read_strategy(path))
    dry = ckpttool.split(folder, path, tmp_path / "dry", format="ckpt", dry_run=True, **options)
    assert {need.input for it in dry.dry_run.sources for need in it.needs} == {0, 1}


def test_columns_and_rows_that_are_cut_several_times_have_the_same_sums(tmp_path):
    """A rank of 900 leaves few rows and columns at a time, and a row is longer than a band."""
    weight, (a, b) = some("w", (5, 40_000)), pair("w", (5, 40_000), 900)
    write_file(tmp_path / "base.ckpt", {"w.weight": weight}, "ckpt")
    lora = f"{write_adapter(tmp_path / 'ad', named('w', a, b))}:{SCALE}"
    out = tmp_path / "out.ckpt"
    ckpttool.merge(tmp_path / "base.ckpt", None, out, lora=lora, engine="inline")
    assert read(out) == {"w.weight": added(weight, a, b)}


def test_an_average_takes_no_adapter(tmp_path):
    with pytest.raises(TypeError, match="lora"):
        ckpttool.average([tmp_path, tmp_path], tmp_path / "out", lora=tmp_path)


def test_a_sum_that_is_too_large_for_the_type_of_the_base_is_an_error(tmp_path):
    weight = entry_of(np.full((6, 4), 60_000, "<f2"), "Float16")
    a, b = pair("a", (6, 4), 2)
    lora = f"{write_adapter(tmp_path / 'ad', named('a', a, b))}:9000"
    write_file(tmp_path / "base.ckpt", {"a.weight": weight}, "ckpt")
    words = ["merge", tmp_path / "base.ckpt", "-o", tmp_path / "out.ckpt", "--lora", lora]
    result = run(*words)
    assert "a.weight" in message(result)
    assert "--on-overflow inf" in message(result)
    assert not (tmp_path / "out.ckpt").exists()
    run_well(*words, "--on-overflow", "inf")
    with np.errstate(over="ignore"):
        assert read(tmp_path / "out.ckpt") == {"a.weight": added(weight, a, b, 9000)}
