"""Recipes: the same bytes under the names and axes of another framework, and none lost."""

from __future__ import annotations

import json
import math
import random
import re
import time
from shlex import split

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

import ckpttool
from ckpttool.checkpoint.rearrange import rearrange
from ckpttool.formats import get_format
from ckpttool.model.recipes import Relation, arrange
from ckpttool.model.tensors import TensorMeta
from ckpttool.problems import PlanError
from ckpttool.strategy_files.recipe_files import SHIPPED, read_recipe
from tests.strategies import examples
from tests.support.checkpoints import catalog_of, create_file, cut, noise, write_file, write_ranks
from tests.support.commands import message, run, run_well
from tests.support.families import (
    RECIPES,
    VARIANTS,
    load_model,
    option,
    shard,
    to_mindformers,
    write_model,
    write_strategy,
)
from tests.support.in_memory import checkpoint_in_memory
from tests.support.readers import Entry, entry_of, read, read_ranks

IDS = [" ".join([model, recipe, *choices.values()]) for model, recipe, choices in VARIANTS]


@pytest.mark.parametrize("ranks", [1, 3, 4])
@pytest.mark.parametrize(("model", "recipe", "choices"), VARIANTS, ids=IDS)
def test_a_model_goes_there_and_back(tmp_path, model, recipe, choices, ranks):
    config, tensors = write_model(tmp_path / "hf", model)
    expected = to_mindformers(config, tensors, recipe, choices)
    strategy = write_strategy(tmp_path / "s.json", expected, ranks)
    words = option(recipe, choices)
    formats = "ckpt" if ranks == 3 else "safetensors"
    ckpttool.split(tmp_path / "hf", strategy, tmp_path / "ms", recipe=words, format=formats)
    layouts = ckpttool.read_strategy(strategy)
    assert read_ranks(tmp_path / "ms") == cut(expected, layouts)
    back = tmp_path / "back"
    ckpttool.merge(tmp_path / "ms", strategy, back, recipe=words, hf_config=tmp_path / "hf")
    assert read(back / "model.safetensors") == tensors
    sizes = {key: int(value) for key, value in choices.items() if key in config}
    assert json.loads((back / "config.json").read_text()) == {**config, **sizes}
    (made,) = ckpttool.scan(back).files.values()
    asked = sorted(f"{key}={value}" for key, value in choices.items())
    assert made.attrs["ckpttool.recipe"].split() == [recipe, "1", *asked]


LOOKED_AT = [  # a family with its copies, experts, prediction of tokens, types that stay
    ("qwen2-tied", "qwen2", {"fc1": "contiguous", "attention": "grouped"}),
    ("qwen3-moe", "qwen3-moe", {"fc1": "interleaved", "attention": "contiguous", "mode": "graph"}),
    ("deepseek-v3-mtp", "deepseek-v3", {"fc1": "interleaved", "mla": "fused", "mode": "graph"}),
]


@pytest.mark.parametrize(("model", "recipe", "choices"), LOOKED_AT, ids=[it[0] for it in LOOKED_AT])
def test_who_looks_sees_what_merge_would_write(tmp_path, model, recipe, choices):
    config, tensors = write_model(tmp_path / "hf", model)
    made = to_mindformers(config, tensors, recipe, choices)
    strategy = write_strategy(tmp_path / "s.json", made, 3)
    write_ranks(tmp_path / "ms", cut(made, ckpttool.read_strategy(strategy)), "ckpt")
    given = {"recipe": option(recipe, choices), "hf_config": tmp_path / "hf"}
    ranks, export = (tmp_path / "ms", strategy), tmp_path / "export"
    ckpttool.merge(*ranks, export, **given)
    ckpttool.verify(export, card=tmp_path / "export.json")
    deep = {"deep": True, "ignore": ("nan", "infinite")}  # random bytes are such numbers, too
    found = ckpttool.verify(*ranks, like=export, card=tmp_path / "ms.json", **deep, **given)
    assert (found.clean, found.differences) == (True, ())
    cards = [json.loads((tmp_path / f"{name}.json").read_text()) for name in ("ms", "export")]
    assert cards[0]["contents"] == cards[1]["contents"]
    assert cards[0]["digest"] == cards[1]["digest"]
    assert f"--recipe {given['recipe']} --hf-config {tmp_path / 'hf'}" in cards[0]["command"]
    # The sizes are those of the configuration beside the other side.
    sizes = {"recipe": given["recipe"], "card": tmp_path / "sizes.json"}
    assert ckpttool.verify(*ranks, like=export, **sizes).clean
    assert_runs_again(sizes["card"])
    named = tmp_path / "named" / "model.json"
    named.parent.mkdir()
    named.write_bytes((export / "config.json").read_bytes())
    (named.parent / "config.json").write_text('{"num_hidden_layers": 1}')  # of another model
    assert ckpttool.verify(*ranks, config=named, **sizes).clean
    assert_runs_again(sizes["card"])
    assert ckpttool.diff(ranks[0], export, strategy, recipe=given["recipe"]).equal
    seen = ckpttool.inspect(*ranks, **given)
    shown = {it.name: (it.dtype, it.shape) for it in seen.tensors}
    assert shown == {name: (it.dtype, it.shape) for name, it in tensors.items()}
    assert {old for it in seen.tensors for old in it.made_of} == made.keys()
    other_way = {"recipe": option(recipe, choices)}
    assert ckpttool.verify(export, strategy, like=ranks[0], **deep, **other_way).clean
    shown = {it.name: (it.dtype, it.shape) for it in ckpttool.inspect(export, **other_way).tensors}
    assert shown == {name: (it.dtype, it.shape) for name, it in made.items()}


def assert_runs_again(card):
    """Type the command of a card where neither it nor its page is; remove both."""
    written, both = card.read_text(), (card, card.with_suffix(".html"))
    for path in both:
        path.unlink()
    run_well(*split(json.loads(written)["command"])[1:])
    assert card.read_text() == written
    for path in both:
        path.unlink()


def ranks_of_qwen3(folder, ranks=3):
    """Write a model, and ranks of it; return the words that name both."""
    choices = {"fc1": "interleaved", "attention": "grouped"}
    config, tensors = write_model(folder / "hf", "qwen3")
    made = to_mindformers(config, tensors, "qwen3", choices)
    strategy = write_strategy(folder / "s.json", made, ranks)
    write_ranks(folder / "ms", cut(made, ckpttool.read_strategy(strategy)), "ckpt")
    words = ["--recipe", option("qwen3", choices), "--hf-config", folder / "hf"]
    return [folder / "ms", "-s", strategy], words


def test_verify_names_what_an_export_would_lose(tmp_path):
    source, words = ranks_of_qwen3(tmp_path)
    file, config = tmp_path / "hf" / "model.safetensors", tmp_path / "hf" / "config.json"
    tensors = read(file)
    name, norm = "model.layers.1.mlp.up_proj.weight", "model.norm.weight"
    changed = tensors[name]._replace(data=bytes(2) + tensors[name].data[2:])
    more = {"model.extra.weight": tensors[norm]}
    write_file(file, {**tensors, **more, name: changed}, "safetensors")
    like = ["verify", *source, *words, "--like", tmp_path / "hf"]
    document = json.loads(run(*like, "--deep", "--json").stdout)
    kinds = {it["name"]: it["kind"] for it in document["differences"]}
    assert kinds == {"model.extra.weight": "only in B", name: "values"}
    assert document["differences"][1]["values"]["differing"] == 1
    assert run(*like).exit_code == 1  # by names alone
    layers = json.loads(config.read_text())["num_hidden_layers"]
    other = tmp_path / "other.json"
    other.write_text(json.dumps(json.loads(config.read_text()) | {"num_hidden_layers": layers + 1}))
    said = message(run("verify", *source, *words, "--config", other))
    assert f"model.layers.{layers}.*: 1 layer is missing" in said
    run_well("verify", *source, *words, "--config", config)


def test_a_type_is_that_of_the_export(tmp_path):
    source, words = ranks_of_qwen3(tmp_path)
    names = ["model.norm.weight", "lm_head.weight"]
    wide = [*words, "--dtype", "fp32"]
    run_well("merge", *source, *wide, "-o", tmp_path / "fp32")
    like = ["--like", tmp_path / "fp32", "--deep", "--ignore", "nan", "--ignore", "infinite"]
    found = run_well("verify", *source, *wide, *like)
    assert "the names, shapes, types and values are those of" in message(found)
    _, *rows = run_well("inspect", *source, *wide, "--tsv").stdout.splitlines()
    assert {row.split("\t")[1] for row in rows} == {"Float32"}
    values = [word for name in names for word in ("--values", name)]
    shown = run_well("inspect", *source, *wide, *values, "--json").stdout
    assert [it["name"] for it in json.loads(shown)["values"]] == names
    assert {it["dtype"] for it in json.loads(shown)["values"]} == {"Float32"}
    run_well("inspect", tmp_path / "fp32", "--values", names[0])
    for command in ("verify", "inspect"):
        said = run(command, *source, "--dtype", "fp32")
        assert (said.exit_code, "only with --recipe" in message(said)) == (2, True)
    with pytest.raises(ValueError, match="dtype= is the type of what recipe= makes"):
        ckpttool.inspect(source[0], source[2], dtype="fp32")


@pytest.mark.parametrize("dtype", ["fp16", "fp32:*layernorm.weight"])
def test_a_type_that_a_rule_gives_is_that_of_both_sides(tmp_path, dtype):
    choices = {"fc1": "interleaved", "attention": "grouped", "mode": "pynative"}
    config, tensors = load_model("glm4-moe")
    tensors = {name: entry_of(np.ones(it.shape), it.dtype) for name, it in tensors.items()}
    write_file(tmp_path / "m.ckpt", to_mindformers(config, tensors, "glm4-moe", choices), "ckpt")
    (tmp_path / "config.json").write_text(json.dumps(config))
    given = {"recipe": option("glm4-moe", choices), "dtype": dtype, "hf_config": tmp_path}
    ckpttool.merge(tmp_path / "m.ckpt", None, tmp_path / "export", **given)
    made = read(tmp_path / "export" / "model.safetensors")
    assert {it.dtype for name, it in made.items() if name.endswith("bias")} == {"Float32"}
    assert ckpttool.diff(tmp_path / "m.ckpt", tmp_path / "export", **given).equal
    assert ckpttool.verify(tmp_path / "m.ckpt", like=tmp_path / "export", deep=True, **given).clean
    back = tmp_path / "back.ckpt"
    ckpttool.merge(tmp_path / "export", None, back, **given | {"dtype": "fp16"})
    assert ckpttool.diff(tmp_path / "export", back, **given | {"dtype": "fp16"}).equal


def test_what_is_no_recipe_and_no_configuration_is_told_with_a_remedy(tmp_path):
    write_model(tmp_path / "hf", "qwen3")
    config, file = tmp_path / "hf" / "config.json", tmp_path / "hf" / "model.safetensors"
    said = message(run("inspect", tmp_path / "hf", "--recipe", config))
    assert said.endswith(f"Try: --recipe with a name, and --hf-config {config}")
    said = message(run("inspect", tmp_path / "hf", "--recipe", file))
    assert said.endswith("Try: `ckpttool help writing-recipes`")
    said = message(run("verify", tmp_path / "hf", "--config", file))
    assert said.endswith("Try: the config.json of the model")


def test_no_card_is_written_of_an_export_that_merge_refuses(tmp_path):
    source, words = ranks_of_qwen3(tmp_path)
    card = tmp_path / "card.json"
    given = [*words, "--dtype", "fp16"]
    refused = run("merge", *source, *given, "-o", tmp_path / "out")
    said = run("verify", *source, *given, "--card", card)
    assert (refused.exit_code, said.exit_code, card.exists()) == (6, 5, False)
    (number,) = re.findall(r"\d+ numbers too large for the new type", message(refused))
    assert number in message(said)


def test_of_ranks_with_errors_nothing_is_made(tmp_path):
    source, words = ranks_of_qwen3(tmp_path)
    lost = next((tmp_path / "ms" / "rank_1").iterdir())
    lost.rename(tmp_path / "lost.ckpt")
    for command, code in (("verify", 1), ("inspect", 5), ("recipe check", 5)):
        said = run(*command.split(), *source, *words)
        assert said.exit_code == code
        assert "some slices are in none" in message(said)
        is_said = "what would be written is not examined" in message(said)
        assert is_said == (command != "recipe check")
    for command in ("verify", "inspect"):
        said = run(command, source[0], *words)
        assert (said.exit_code, "a recipe takes full tensors" in message(said)) == (5, True)


def test_a_target_with_the_names_before_a_recipe_is_told_as_one(tmp_path):
    source, words = ranks_of_qwen3(tmp_path)
    words += ["-d", source[2], "-o", tmp_path / "out", "--not-in-target", "follow"]
    said = message(run("reshard", *source, *words))
    assert "not in the source: 6 weights decoder.layers.{0-2}.self_attention.linear_qkv" in said
    assert "Try: a target strategy with the names that the recipe makes, or no --recipe" in said


def test_inspect_refuses_what_has_nothing_to_do_with_a_recipe(tmp_path):
    source, words = ranks_of_qwen3(tmp_path)
    given = ["inspect", *source, *words]
    said = run(*given, "--values", "decoder.final_layernorm.weight")
    assert "no tensor matches 'decoder.final_layernorm.weight'" in message(said)
    listed = message(said).split("`")[1]
    assert "model.norm.weight" in run_well(*split(listed)[1:]).stdout
    said = run(*given, "--plot", tmp_path / "page.html")
    assert (said.exit_code, "--recipe does not go with --plot" in message(said)) == (2, True)
    folded, each = (run_well(*given, *more).stdout for more in ((), ("--all",)))
    assert "model.layers.{0-2}.mlp.up_proj.weight" in folded
    assert "model.layers.1.mlp.up_proj.weight" in each
    assert "decoder.layers.1.mlp.linear_fc1.weight" in each
    answer = ckpttool.inspect(source[0], source[2], recipe=words[1], hf_config=words[3])
    head, *table = str(answer).splitlines()
    assert "36 tensors" in head
    cells = ["model.layers.{0-2}.mlp.up_proj.weight", "3", "BFloat16", "(9,", "24)"]
    cells.append("decoder.layers.{0-2}.mlp.linear_fc1.weight")
    assert cells in [line.split() for line in table]


def test_patterns_of_a_hand_written_strategy_are_about_what_a_recipe_makes(tmp_path):
    _, tensors = write_model(tmp_path / "hf", "qwen3")
    choices = {"fc1": "interleaved", "attention": "grouped"}
    words = ["--recipe", option("qwen3", choices)]
    strategy, back = tmp_path / "two.yaml", tmp_path / "back"
    lines = ["ckpttool_strategy: 1", "ranks: 2", "parameters:", '  "*norm.weight": replicated']
    lines += ['  "*linear_proj.weight": [1, 2]', '  "*linear_fc*.weight": replicated']
    lines += [f'  "*{end}.weight": [2, 1]' for end in ("linear_qkv", "embeddings", "output_layer")]
    strategy.write_text("\n".join(lines))
    run_well("split", tmp_path / "hf", "-d", strategy, "-o", tmp_path / "ms", *words)
    words += ["--hf-config", tmp_path / "hf"]
    run_well("merge", tmp_path / "ms", "-s", strategy, "-o", back, *words)
    assert read(back / "model.safetensors") == tensors


def problems_of(shapes, used):
    """Return what is wrong if a file has tensors of these types and shapes."""
    checkpoint = checkpoint_in_memory(catalog_of({0: shapes}), None)
    try:
        _, notes, _ = rearrange(checkpoint, used)
    except PlanError as error:
        return [*error.diagnostics]
    return [*notes]


def mutate(shapes, chance):
    """Change one tensor; return the shapes, and the names that a message may have."""
    name = chance.choice([*shapes])
    dtype, shape = shapes[name]
    what = chance.choice(["removed", "doubled", "transposed", "renamed", "grown"])
    changed = dict(shapes)
    if what == "removed":
        del changed[name]
        return changed, {name}
    if what == "doubled":
        changed[f"{name}.copy"] = shapes[name]
        return changed, {f"{name}.copy"}
    if what == "renamed":
        other = f"{name[:-1]}x"
        changed = {other if key == name else key: value for key, value in shapes.items()}
        return changed, {name, other}
    if what == "transposed" and len(shape) > 1 and len({*shape}) == len(shape):
        changed[name] = (dtype, shape[::-1])
        return changed, {name}
    axis = chance.randrange(len(shape))
    grown = (*shape[:axis], shape[axis] + 1, *shape[axis + 1 :])
    changed[name] = (dtype, grown)
    # A vocabulary or a hidden size of another number may be right, if all agree on it.
    return (changed, {name}) if not is_free(name, axis) else mutate(shapes, chance)


def is_free(name, axis):
    return axis == 0 and any(it in name for it in ("embed", "lm_head", "output_layer", "tid2eid"))


@pytest.mark.parametrize("number", [40, pytest.param(1000, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("model", RECIPES)
def test_whatever_changes_in_one_tensor_is_named(model, number):
    chance = random.Random(f"{model} 47")
    for model_, recipe, choices in VARIANTS:
        if model_ != model:
            continue
        config, tensors = load_model(model)
        made = to_mindformers(config, tensors, recipe, choices)
        used = replace(read_recipe(option(recipe, choices)), config=config)
        sides = [
            {name: (entry.dtype, entry.shape) for name, entry in side.items()}
            for side in (tensors, made)
        ]
        for shapes in sides:
            found = problems_of(shapes, used)
            assert [problem.code for problem in found] == ["recipe_used"]
            for _ in range(number // 8):
                changed, names = mutate(shapes, chance)
                found = problems_of(changed, used)
                told = " ".join(f"{problem.message} {problem.facts}" for problem in found)
                assert {problem.code for problem in found} == {"recipe"}, (names, told)
                names |= set(map(used.recipe.spelled, names))
                assert any(name in told for name in names), (names, told)


@pytest.mark.parametrize("model", RECIPES)
def test_a_rule_that_is_deleted_is_missed(model):
    _, recipe, choices = next(variant for variant in VARIANTS if variant[0] == model)
    config, tensors = load_model(model)
    used = replace(read_recipe(option(recipe, choices)), config=config)
    rules = used.recipe.rules
    for side in (tensors, to_mindformers(config, tensors, recipe, choices)):
        shapes = {name: (entry.dtype, entry.shape) for name, entry in side.items()}
        for number, rule in enumerate(rules):
            is_used = any(replace(used.recipe, rules=(rule,)).relations(used.values))
            less = replace(used.recipe, rules=(*rules[:number], *rules[number + 1 :]))
            codes = {problem.code for problem in problems_of(shapes, replace(used, recipe=less))}
            assert codes == {"recipe" if is_used else "recipe_used"}


def test_a_tied_head_that_is_there_is_not_written(tmp_path):
    config, tensors = write_model(tmp_path / "hf", "qwen2-tied")
    doubled = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}
    write_file(tmp_path / "hf" / "model.safetensors", doubled, "safetensors")
    made = to_mindformers(config, tensors, "qwen2", {"fc1": "interleaved", "attention": "grouped"})
    words = "qwen2:fc1=interleaved,attention=grouped"
    for source in (tmp_path / "hf", tmp_path / "hf" / "model.safetensors"):
        run_well("merge", source, "-o", tmp_path / "m.ckpt", "--recipe", words, "--overwrite")
        assert read(tmp_path / "m.ckpt") == made


def test_states_are_left_out_by_an_option_alone(tmp_path):
    config, tensors = write_model(tmp_path / "hf", "qwen3")
    choices = {"fc1": "interleaved", "attention": "grouped"}
    made = to_mindformers(config, tensors, "qwen3", choices)
    trained = {**made, **{f"adam_m.{name}": entry for name, entry in made.items()}}
    strategy = tmp_path / "s.json"
    strategy.write_text(json.dumps(shard(trained, 4)))
    write_ranks(tmp_path / "ms", cut(trained, ckpttool.read_strategy(strategy)), "ckpt")
    words = ["merge", tmp_path / "ms", "-s", strategy, "-o", tmp_path / "out"]
    words += ["--recipe", option("qwen3", choices), "--hf-config", tmp_path / "hf"]
    result = run(*words)
    assert result.exit_code == 5
    assert f"{len(made)} states that no rule of qwen3 knows" in message(result)
    assert message(result).endswith("Try: --weights-only")
    said = run_well(*words, "--weights-only")
    assert f"left out by options: {len(made)} tensors" in message(said)
    assert read(tmp_path / "out" / "model.safetensors") == tensors


def test_what_follows_from_an_answer_that_nobody_gave_is_not_said(tmp_path):
    model, choices = "deepseek-v3-no-q", {"fc1": "interleaved", "mla": "separate", "mode": "graph"}
    config, tensors = write_model(tmp_path / "hf", model)
    made = to_mindformers(config, tensors, "deepseek-v3", choices)
    made["adam_m.output_layer.weight"] = made["output_layer.weight"]
    write_file(tmp_path / "m.ckpt", made, "ckpt")
    words = ["merge", tmp_path / "m.ckpt", "-o", tmp_path / "out", "--hf-config", tmp_path / "hf"]
    result = run(*words, "--recipe", "deepseek-v3:fc1=interleaved")
    assert result.exit_code == 5
    assert "mla is fused or separate" in message(result)
    assert "1 state that no rule of deepseek-v3 knows" in message(result)
    assert "asks for" not in message(result)


@pytest.mark.parametrize("lost", ["model.layers.3.", "model.layers.3.embed_tokens"])
def test_a_model_that_lost_the_layers_of_mtp_gets_the_size_that_says_so(tmp_path, lost):
    _, tensors = write_model(tmp_path / "hf", "deepseek-v3-mtp")
    kept = {name: entry for name, entry in tensors.items() if not name.startswith(lost)}
    write_file(tmp_path / "hf" / "model.safetensors", kept, "safetensors")
    recipe = "deepseek-v3:fc1=interleaved,mla=fused,mode=graph"
    words = ["merge", tmp_path / "hf", "-o", tmp_path / "m.ckpt", "--recipe"]
    answered = f"{recipe},num_nextn_predict_layers=0"
    said = message(run(*words, recipe))
    assert "that deepseek-v3 asks for" in said
    assert (f"Try: --recipe '{answered}'" in said) == (lost == "model.layers.3.")
    assert ("Try: a source that has them" in said) == (lost != "model.layers.3.")
    if answered in said:
        run_well(*words, answered)


def test_a_tensor_that_is_copied_is_counted_once(tmp_path):
    config, tensors = write_model(tmp_path / "hf", "deepseek-v3-mtp")
    choices = {"fc1": "interleaved", "mla": "separate", "mode": "graph"}
    made = to_mindformers(config, tensors, "deepseek-v3", choices)
    write_file(tmp_path / "m.ckpt", made, "ckpt")
    words = ["merge", tmp_path / "m.ckpt", "-o", tmp_path / "out", "--hf-config", tmp_path / "hf"]
    said = message(run_well(*words, "--recipe", option("deepseek-v3", choices)))
    used, names, axes = re.findall(r"(\d+) (?:of|by name|by axes)", said)[:3]
    assert int(used) == int(names) + int(axes) == len(made)


def test_what_deepseek_v4_has_twice_or_as_a_constant_is_accounted_for(tmp_path):
    config, tensors = write_model(tmp_path / "hf", "deepseek-v4-mtp")
    doubled = {**tensors, "mtp.0.head.weight": tensors["head.weight"]}
    write_file(tmp_path / "hf" / "model.safetensors", doubled, "safetensors")
    choices, words = {"fc1": "contiguous"}, ["--recipe", "deepseek-v4:fc1=contiguous"]
    said = run_well("merge", tmp_path / "hf", "-o", tmp_path / "m.ckpt", *words)
    assert "copies: 1 tensor" in message(said)
    made = to_mindformers(config, tensors, "deepseek-v4", choices)
    assert read(tmp_path / "m.ckpt") == made
    layer = "mtp.layers.0.transformer_layer."
    for name in ("self_attention.q_rms_gamma", "attn_hc.rms_weight", "ffn_hc.rms_weight"):
        made[layer + name] = noise(name, "Float32", (8,))
    write_file(tmp_path / "n.ckpt", made, "ckpt")
    words += ["--hf-config", tmp_path / "hf"]
    said = run_well("merge", tmp_path / "n.ckpt", "-o", tmp_path / "out", *words)
    assert "left out by rules: 3 tensors" in message(said)
    assert read(tmp_path / "out" / "model.safetensors") == tensors


def test_scales_as_deepseek_v4_calls_them_are_refused(tmp_path):
    _, tensors = write_model(tmp_path / "hf", "deepseek-v4-mtp")
    weight, scale = "layers.0.attn.wkv.weight", "layers.0.attn.wkv.scale"
    tensors[weight] = noise(weight, "Float8E4M3FN", tensors[weight].shape)
    tensors[scale] = noise(scale, "Float32", (1, 1))
    write_file(tmp_path / "hf" / "model.safetensors", tensors, "safetensors")
    words = ["merge", tmp_path / "hf", "-o", tmp_path / "m.ckpt", "--recipe"]
    said = message(run(*words, "deepseek-v4:fc1=interleaved"))
    assert f"1 tensor that no rule of deepseek-v4 knows {scale}" in said
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    config["quantization_config"] = {"weight_block_size": [128, 128]}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    said = message(run(*words, "deepseek-v4:fc1=interleaved"))
    assert f"{weight}: the Float8 weight has no scale expected {weight}_scale_inv" in said


def test_counters_that_differ_between_ranks_are_left_out_by_a_rule(tmp_path):
    config, tensors = write_model(tmp_path / "hf", "qwen3")
    choices = {"fc1": "interleaved", "attention": "grouped"}
    made = to_mindformers(config, tensors, "qwen3", choices)
    counter, like = "decoder.layers.0.mlp.tokens_per_expert", made["decoder.final_layernorm.weight"]
    layouts = shard({**made, counter: like}, 4)
    strategy = tmp_path / "s.json"
    strategy.write_text(json.dumps(layouts))
    ranks = cut(made, ckpttool.read_strategy(strategy))
    for rank, entries in ranks.items():
        entries[counter] = noise(f"counter {rank}", "Float32", like.shape)
    write_ranks(tmp_path / "ms", ranks, "ckpt")
    words = ["merge", tmp_path / "ms", "-s", strategy, "-o", tmp_path / "out", "--recipe"]
    said = run_well(*words, option("qwen3", choices), "--hf-config", tmp_path / "hf")
    assert "left out by rules: 1 tensor" in message(said)
    assert read(tmp_path / "out" / "model.safetensors") == tensors


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({}, ""),
        (
            {"vocab_size": 65},
            "Check the full shapes, which only the strategy shows: 64 x 24 (2 ten",
        ),
    ],
)
def test_shapes_that_the_configuration_gives_need_no_check(tmp_path, words, said):
    config, tensors = write_model(tmp_path / "hf", "qwen3")
    choices = {"fc1": "interleaved", "attention": "grouped"}
    made = to_mindformers(config, tensors, "qwen3", choices)
    (tmp_path / "s.json").write_text(json.dumps(shard(made, 4)))
    strategy = ckpttool.read_strategy(tmp_path / "s.json")
    write_ranks(tmp_path / "ms", cut(made, strategy), "ckpt")
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config | words))
    source = [tmp_path / "ms", "-s", tmp_path / "s.json"]
    plain = run_well("merge", *source, "-o", tmp_path / "plain.ckpt").stdout
    assert plain.count(" x ") == 5
    recipe = ["--recipe", option("qwen3", choices), "--hf-config", tmp_path / "hf"]
    shapes = run_well("merge", *source, "-o", tmp_path / "out", *recipe).stdout
    assert shapes.replace("\n  ", " ").startswith(said or "Wrote")
    assert shapes.count(" x ") == bool(said)
    open_shapes = "full shapes come from the strategy alone"
    assert open_shapes in message(run("verify", *source))
    assert (open_shapes in message(run("verify", *source, *recipe))) == bool(said)


MISTAKES = {  # what is typed, the exit code, what is said
    "qwen3:fc1=interleaved": (5, "attention is grouped or contiguous"),
    "qwen3:fc1=true,attention=grouped": (
        *(4, "fc1 has no value true Try: --recipe 'qwen3:fc1=interleaved,attention=grouped' or"),
    ),
    "qwen3:attention=grouped,fc1=interleaved,fc1=contiguous": (4, "fc1 is given twice"),
    "llama-concat:=3": (4, "'=3' is not KEY=VALUE Try: --recipe 'llama-concat'"),
    "qwen3:atention=grouped,fc1=x,typo=4": (
        *(
            4,
            "knows no atention; fc1 has no value x; qwen3 knows no typo Try: --recipe 'qwen3:att",
        ),
    ),
    "qwen4": (4, "no such recipe Try: qwen"),
    "Qwen3_MoE": (4, "no such recipe Try: qwen3-moe"),
    "mixtral": (4, "no such recipe Try: deepseek-v3, deepseek-v3-legacy"),
    "qwen3:fc1": (4, "Try: --recipe 'qwen3:fc1=interleaved' or --recipe 'qwen3:fc1=c"),
    "llama:fc1": (4, "'fc1' is not KEY=VALUE Try: --recipe 'llama'"),
    "qwen3:typo=3,attention=grouped": (4, "knows no typo Try: --recipe 'qwen3:attention=grouped"),
    "qwen3:num_hidden_layer=3": (4, "Try: --recipe 'qwen3:num_hidden_layers=3"),
    "qwen3:use_interleaved_weight_layout_mlp=true": (5, "attention is grouped or contiguous"),
    "qwen3:use_interleaved_weight_layout_mlpp=false": (4, "Try: --recipe 'qwen3:fc1=contiguous"),
    "qwen3-moe": (5, "config.json says qwen3 Try: --recipe qwen3"),
    "qwen3:num_hidden_layers=99999999": (5, "at most 65536"),
    "llama": (5, "and 25 more; config.json says qwen3 Try: --recipe qwen3"),
    "qwen3:num_hidden_layers=x": (5, "L is 'x', and no number"),
    "qwen3:tie_word_embeddings=x": (5, "'x' is a text, and neither true nor false"),
    "qwen3:fc1=interleaved,attention=grouped,num_key_value_heads=4": (
        5,
        "layers.{0-2}.self_attention.linear_qkv.weight: an axis of 80, expected g=4",
    ),
}


@pytest.mark.parametrize("typed", MISTAKES)
def test_what_does_not_fit_is_said_before_the_first_byte(tmp_path, typed):
    config, tensors = write_model(tmp_path / "hf", "qwen3")
    choices = {"fc1": "interleaved", "attention": "grouped"}
    write_file(tmp_path / "m.ckpt", to_mindformers(config, tensors, "qwen3", choices), "ckpt")
    out = tmp_path / "out"
    words = ["merge", tmp_path / "m.ckpt", "-o", out, "--recipe", typed]
    result = run(*words, "--hf-config", tmp_path / "hf")
    code, said = MISTAKES[typed]
    assert (result.exit_code, out.exists()) == (code, False), message(result)
    assert said in message(result)


def test_parts_of_one_tensor_get_one_type(tmp_path):
    write_model(tmp_path / "hf", "qwen3")
    words = ["merge", tmp_path / "hf", "-o", tmp_path / "m.ckpt", "--dtype", "fp16:*q_proj*"]
    result = run(*words, "--recipe", "qwen3:fc1=interleaved,attention=grouped")
    assert result.exit_code == 5
    assert "parts of one tensor get several types" in message(result)


def test_no_element_goes_to_two_tensors():
    both = {"b": "g[0:1] d", "c": "g[0:1] d"}
    relation = Relation(({"a": "g d"}, both), {"g": 2, "d": 3})
    with pytest.raises(ValueError, match="b and c have the same elements"):
        arrange(relation, 0, {"a": (2, 3)})


def test_the_configuration_says_why_no_rule_knows_a_tensor(tmp_path):
    config, tensors = write_model(tmp_path / "hf", "qwen3")
    file = tmp_path / "hf" / "config.json"
    answers = ":fc1=interleaved,attention=grouped"
    words = ["recipe", "check", tmp_path / "hf", "--hf-config", file, "--recipe"]
    listed = json.loads(run_well(*words, f"qwen3{answers}", "--json").stdout)["tensors"]
    assert {name for tensor in listed for name in tensor["made_of"]} == {*tensors}
    said = message(run(*words, f"mcore{answers}"))
    assert "config.json says qwen3 Try: --recipe qwen3" in said
    said = message(run(*words, f"qwen3-moe{answers}"))
    assert "needs E (num_experts or " in said
    assert "config.json says qwen3 Try: --recipe qwen3, or --hf-config of this model" in said
    said = message(run(*words, f"qwen3{answers}", "--exclude", "*.0.mlp.up_proj.weight"))
    assert "no file has 1 tensor that qwen3 asks for" in said
    assert "no rule of qwen3" not in said
    file.write_text(json.dumps({**config, "tie_word_embeddings": True}))
    choices = {"fc1": "interleaved", "attention": "grouped"}
    write_file(tmp_path / "m.ckpt", to_mindformers(config, tensors, "qwen3", choices), "ckpt")
    said = message(run(*words[:2], tmp_path / "m.ckpt", *words[3:], f"qwen3{answers}"))
    assert (
        "output_layer.weight; a rule has them, depending on tie_word_embeddings Try: --hf" in said
    )
    layers = config["num_hidden_layers"] - 1
    file.write_text(json.dumps({**config, "num_hidden_layers": layers}))
    said = message(run(*words, f"qwen3{answers}"))
    assert f"num_hidden_layers is {layers}, and these are of layer {layers}" in said


def test_sizes_and_choices_that_nothing_gives_are_asked_for_at_once(tmp_path):
    config, tensors = write_model(tmp_path / "hf", "qwen3")
    choices = {"fc1": "interleaved", "attention": "grouped"}
    write_file(tmp_path / "m.ckpt", to_mindformers(config, tensors, "qwen3", choices), "ckpt")
    lost = ("num_attention_heads", "num_hidden_layers", "num_key_value_heads")
    less = {key: value for key, value in config.items() if key not in lost}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(less))
    words = ["recipe", "check", tmp_path / "m.ckpt", "--hf-config", tmp_path / "hf", "--recipe"]
    said = message(run(*words, "qwen3"))
    assert "the configuration lacks 2 sizes qwen3 needs num_attention_heads, num_hid" in said
    assert "attention is grouped or contiguous" in said
    assert "fc1 is interleaved or contiguous" in said
    *_, recipe, _ = said.split("'")
    answered = recipe.replace("heads=NUMBER", "heads=6").replace("layers=NUMBER", "layers=3")
    run_well(*words, f"{answered},num_key_value_heads=2")


def test_a_factor_that_nothing_gives_is_asked_for(tmp_path):
    names = "{mindspore: {a: (p q) H}, huggingface: {b: (q p) H}}"
    path, file = tmp_path / "mine.yaml", tmp_path / "m.ckpt"
    path.write_text(f"recipe: mine\nversion: 1\nsource: x\nrules:\n- {names}\n")
    write_file(file, {"a": noise("a", "Float32", (6, 4))}, "ckpt")
    (tmp_path / "config.json").write_text('{"model_type": "mine"}')
    words = ["recipe", "check", file, "--hf-config", tmp_path, "--recipe"]
    assert message(run(*words, path)).endswith(f"Try: --recipe '{path}:p=NUMBER'")
    run_well(*words, f"{path}:p=2")


def test_a_choice_may_be_typed_by_the_key_of_the_training(tmp_path):
    config, tensors = write_model(tmp_path / "hf", "qwen3")
    keys = "use_interleaved_weight_layout_mlp=false,use_contiguous_weight_layout_attention=true"
    words = ["merge", tmp_path / "hf", "-o", tmp_path / "m.ckpt", "--recipe", f"qwen3:{keys}"]
    run_well(*words)
    choices = {"fc1": "contiguous", "attention": "contiguous"}
    assert read(tmp_path / "m.ckpt") == to_mindformers(config, tensors, "qwen3", choices)


def test_without_a_configuration_its_option_is_named(tmp_path):
    _, tensors = load_model("qwen3")
    write_file(tmp_path / "model.safetensors", tensors, "safetensors")
    file = tmp_path / "model.safetensors"
    result = run("merge", file, "-o", tmp_path / "m.ckpt", "--recipe", "qwen3")
    assert result.exit_code == 5
    assert "--hf-config" in message(result)


@pytest.mark.parametrize("name", SHIPPED)
def test_what_comes_with_the_package_says_what_it_was_read_from(name):
    recipe = read_recipe(name).recipe
    assert recipe.recipe == name
    assert recipe.version >= 1
    assert "MindFormers" in recipe.source


# ------------------------------------------------------------------------- rules of one's own


RULE = """recipe: mine
version: 1
source: nobody
sizes: {SIZES}
rules:
- mindspore:
    fused.weight: "OURS"
  huggingface:
PARTS
"""


@st.composite
def relations(draw):
    """Sizes of factors, the axes of one tensor and of the parts of another, in any order."""
    names = "abcd"[: draw(st.integers(2, 4))]
    sizes = {name: draw(st.integers(1, 4)) for name in names}

    def axes(factors):
        order = draw(st.permutations(factors))
        cuts = draw(st.lists(st.booleans(), min_size=len(order), max_size=len(order)))
        groups: list[list[str]] = []
        for factor, begins in zip(order, cuts, strict=True):
            if begins or not groups:
                groups.append([])
            groups[-1].append(factor)
        return groups

    parted = draw(st.sampled_from(names))
    middle = draw(st.integers(0, sizes[parted]))
    pieces = [piece for piece in ((0, middle), (middle, sizes[parted])) if piece[0] < piece[1]]
    return sizes, axes([*names]), parted, [(piece, axes([*names])) for piece in pieces]


def notation(groups, parted="", piece=(0, 0)):
    def of(factor):
        return f"{factor}[{piece[0]}:{piece[1]}]" if factor == parted else factor

    return " ".join(f"({' '.join(map(of, group))})" for group in groups)


def reordered(space, names, groups):
    """Return a space with its axes as groups of factors have them."""
    order = [names.index(factor) for group in groups for factor in group]
    moved = space.transpose(order)
    return moved.reshape(
        [math.prod(space.shape[names.index(f)] for f in group) for group in groups]
    )


@examples(150)
@given(relations(), st.data())
def test_axes_of_any_rule_are_those_of_numpy(tmp_path_factory, relation, data):
    sizes, ours, parted, theirs = relation
    names, folder = [*sizes], tmp_path_factory.mktemp("axes")
    dtype = data.draw(st.sampled_from(["Int8", "Float16", "Float32", "Float64"]))
    space = noise("space", dtype, tuple(sizes.values())).array()
    at = names.index(parted)
    fused = {"fused.weight": entry_of(np.ascontiguousarray(reordered(space, names, ours)), dtype)}
    parts = {}
    for number, ((start, stop), groups) in enumerate(theirs):
        piece = space[(slice(None),) * at + (slice(start, stop),)]
        array = np.ascontiguousarray(reordered(piece, names, groups))
        parts[f"part.{number}.weight"] = entry_of(array, dtype)
    lines = [
        f'    part.{number}.weight: "{notation(groups, parted, piece)}"'
        for number, (piece, groups) in enumerate(theirs)
    ]
    text = RULE.replace("SIZES", ", ".join(f'{name}: "{size}"' for name, size in sizes.items()))
    text = text.replace("OURS", notation(ours)).replace("PARTS", "\n".join(lines))
    (folder / "mine.yaml").write_text(text)
    for side, (here, there) in enumerate(((fused, parts), (parts, fused))):
        layouts = {}
        for name, entry in here.items():
            axes = [n for n, size in enumerate(entry.shape) if size % 2 == 0]
            cut_axes = data.draw(st.permutations(axes))[:2]
            tensor_map = [-1] * len(entry.shape)
            for axis, device in zip(cut_axes, (0, 1), strict=False):
                tensor_map[axis] = device
            layouts[name] = {"dev_matrix": [2, 2], "tensor_map": tensor_map}
        strategy = folder / f"{side}.json"
        strategy.write_text(json.dumps({"parallel_layout_item": layouts}))
        ranks = cut(here, ckpttool.read_strategy(strategy))
        write_ranks(folder / f"{side}", ranks, "ckpt")
        out = folder / f"{side}.ckpt"
        recipe = folder / "mine.yaml"
        ckpttool.merge(folder / f"{side}", strategy, out, recipe=recipe, trust_strategy=True)
        assert read(out) == there
        with ckpttool.open(
            folder / f"{side}", strategy, recipe=recipe, trust_strategy=True
        ) as model:
            for name, entry in there.items():
                rows = data.draw(st.slices(entry.shape[0]))
                if dtype != "Int8":
                    assert np.array_equal(model[name][rows], entry.array()[rows], equal_nan=True)


BROKEN = {  # what another recipe says beside that of qwen3, the exit code, and what is told
    "rules: [{axes: H, names: {decoder.final_layernorm.weight: model.norm2.weight}}]": (
        *(5, "two rules take one tensor"),
    ),
    "rules: [{mindspore: {decoder.final_layernorm.weight: H}, huggingface: {b: H}},"
    " {mindspore: {decoder.layers.0.input_layernorm.weight: H}, huggingface: {b: H}}]": (
        *(5, "two rules make one tensor of Hugging Face"),
    ),
    "rules: [{axes: H, names: {'decoder.{nope}.weight': b}}]": (
        *(5, "'decoder.{nope}.weight': no for:, size or key gives nope"),
    ),
    "rules: [{axes: H, names: {'decoder.{nope+1}.weight': b}}]": (5, "or key gives nope"),
    "rules: [{axes: H, names: {'decoder.{.weight': b}}]": (4, "a hole that is not closed"),
    "rules: [{huggingface: {a: H}}]": (4, "a rule has neither names"),
    "rules: [{axes: H, names: {a: b}, dtype: Floof}]": (4, "no element type Floof"),
    "copies: [{names: {model.copy: model.nothing}}]": (5, "a copy is of no tensor"),
    "sizes: {h: head_dim // 0}": (5, "by zero"),
    "sizes: {h: 'layer_types[3]'}": (5, "layer_types has 3 values, and none at 3"),
    "sizes: {h: 'kinds[0]'}": (5, "mine.yaml needs kinds Try: --hf-config of this model"),
    "sizes: {L: '3 * 10 ** 3'}": (4, "'10 ** 3' is not of an expression: it has names, numbers"),
    "sizes: {h: hidden_size / 3}": (4, "'hidden_size / 3' is not of an expression"),
    "rules: [{for: {i: '3'}, axes: H, names: {'a.{i}': 'b.{i}'}}]": (
        5,
        "no list or range Try: another rule in",
    ),
}


@pytest.mark.parametrize("more", BROKEN)
def test_a_recipe_that_would_lose_a_tensor_is_refused(tmp_path, more):
    config, tensors = write_model(tmp_path / "hf", "qwen3")
    choices = {"fc1": "interleaved", "attention": "grouped"}
    write_file(tmp_path / "m.ckpt", to_mindformers(config, tensors, "qwen3", choices), "ckpt")
    (tmp_path / "mine.yaml").write_text(
        f"recipe: mine\nversion: 1\nsource: x\nextends: qwen3\n{more}\n"
    )
    words = ["merge", tmp_path / "m.ckpt", "-o", tmp_path / "out", "--hf-config", tmp_path / "hf"]
    path = tmp_path / "mine.yaml"
    asked = {"use_interleaved_weight_layout_mlp": True}
    asked["use_contiguous_weight_layout_attention"] = False
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config | asked))
    result = run(*words, "--recipe", path)
    code, told = BROKEN[more]
    assert (result.exit_code, (tmp_path / "out").exists()) == (code, False), message(result)
    assert told in message(result)


@pytest.mark.parametrize(
    ("parts", "told"),
    [
        ("(p[:2] h)|(p[1] h)", "a.{0,1} and 1 more: not all elements of the other side Try"),
        ("(p[0] h)|(p[3] h)", "b.{0,1}: p[3:4], and p is 2 Try"),
        ("(p[0] h)|h", "b.{0,1}: 'h' does not say which part of p it has Try"),
    ],
)
def test_what_is_wrong_with_a_rule_is_told_once_for_all_layers(tmp_path, parts, told):
    a, b = parts.split("|")
    theirs = f"{{'a.{{i}}': '{a}', 'b.{{i}}': '{b}'}}"
    rule = "{for: {i: range(2)}, sizes: {p: '2'}, mindspore: {'w.{i}': (p h)}, "
    path = tmp_path / "mine.yaml"
    path.write_text(
        f"recipe: mine\nversion: 1\nsource: x\nrules:\n- {rule}huggingface: {theirs}}}\n"
    )
    write_file(tmp_path / "m.ckpt", {f"w.{i}": noise("w", "Int8", (6,)) for i in (0, 1)}, "ckpt")
    said = message(run("recipe", "check", tmp_path / "m.ckpt", "--recipe", path))
    assert f"a shape is not that of the rule {told}" in said


@pytest.mark.parametrize(
    ("name", "more", "hint"),
    [
        ("theirs", ["--recipe", "mine.yaml"], "this model, or another answer behind --recipe"),
        ("ours", [], "this model"),
    ],
)
def test_a_target_for_more_axes_is_of_another_model_or_answer(
    tmp_path, monkeypatch, name, more, hint
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(
        "recipe: mine\nversion: 1\nsource: x\nrules: [{axes: a b, names: {ours: theirs}}]\n"
    )
    layout = {"dev_matrix": [2], "tensor_map": [0, -1, -1]}
    (tmp_path / "target.json").write_text(json.dumps({"parallel_layout_item": {"ours": layout}}))
    write_file(tmp_path / "m.safetensors", {name: noise("w", "Int8", (4, 2))}, "safetensors")
    words = ["split", "m.safetensors", "-d", "target.json", "-o", "out", "--format", "ckpt"]
    said = message(run(*words, *more))
    assert (
        f"tensor map [[0], [], []] is for 3 axes, not shape (4, 2) Try: a target of {hint}" in said
    )
    assert said.endswith(hint)


def test_a_recipe_extends_one_that_comes_with_ckpttool(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(f"recipe: mine\nversion: 1\nsource: x\nextends: {path}\n")
    result = run("recipe", "show", path)
    assert result.exit_code == 4
    assert f"{path}: extends {path}, which does not come with ckpttool" in message(result)


def test_what_a_recipe_of_ones_own_does_not_know_wants_a_rule_in_it(tmp_path):
    write_model(tmp_path / "hf", "qwen3")
    rule = "{names: {a: model.norm.weight}, axes: H}"
    path = tmp_path / "mine.yaml"
    path.write_text(f"recipe: mine\nversion: 1\nsource: x\nrules:\n- {rule}\n")
    result = run("merge", tmp_path / "hf", "-o", tmp_path / "m.ckpt", "--recipe", path)
    assert result.exit_code == 5
    assert message(result).endswith(f"Try: a rule in {path}, or --exclude")


def test_a_copy_with_other_values_is_no_copy(tmp_path):
    _, tensors = write_model(tmp_path / "hf", "qwen2-tied")
    other = {**tensors, "lm_head.weight": noise("head", "BFloat16", (64, 24))}
    write_file(tmp_path / "hf" / "model.safetensors", other, "safetensors")
    words = ["merge", tmp_path / "hf", "-o", tmp_path / "m.ckpt"]
    words += ["--recipe", "qwen2:fc1=interleaved,attention=grouped"]
    result = run(*words)
    assert result.exit_code == 5
    assert "lm_head.weight: a recipe takes it for a copy" in message(result)
    assert message(result).endswith("Try: --exclude lm_head.weight to leave it out")
    run_well(*words, "--exclude", "lm_head.weight")


def test_a_number_and_a_list_of_yaml_are_expressions(tmp_path):
    head = "recipe: mine\nversion: 1\nsource: x\nrules:\n"
    rule = "- for: {{i: {numbers}, x: {words}}}\n  sizes: {{p: {two}}}\n"
    rule += "  mindspore: {{'{{x}}.{{i}}': (p h)}}\n"
    rule += "  huggingface: {{'{{x}}.{{i}}.a': '(p[0] h)', '{{x}}.{{i}}.b': '(p[1] h)'}}\n"
    (tmp_path / "plain.yaml").write_text(
        head + rule.format(numbers="[0, 2]", words="[q, k]", two=2)
    )
    (tmp_path / "quoted.yaml").write_text(
        head + rule.format(numbers='"[0, 2]"', words="\"['q', 'k']\"", two='"2"')
    )
    tensors = {f"{x}.{i}": noise(f"{x}{i}", "Int8", (6,)) for i in (0, 2) for x in "qk"}
    write_file(tmp_path / "m.ckpt", tensors, "ckpt")
    made = []
    for name in ("plain", "quoted"):
        out = tmp_path / f"{name}.safetensors"
        run_well("merge", tmp_path / "m.ckpt", "-o", out, "--recipe", tmp_path / f"{name}.yaml")
        made.append(read(out))
    assert made[0] == made[1]
    assert {*made[0]} == {f"{x}.{i}.{half}" for i in (0, 2) for x in "qk" for half in "ab"}


MALFORMED = {  # a line of a rule, what is said
    "if: L +": "'L +' is not an expression",
    "if: open('x')": "not of an expression: it has names, numbers, lists, range, + - * // %, com",
    "axes: (g": "'(g' is not a list of axes: a bracket is not closed",
    "axes: (g 3 h)": "'(g 3 h)' is not a list of axes: 3 has no name; sizes: gives it one, {p: 3}",
    "axes: f, H": "'f, H' is not a list of axes: ', H' is not a factor",
    "names: {a: b}": "mine.yaml: the rule of a has names: without axes:",
    "names: {a: b f H}": "mine.yaml: 'b f H' is not a name: it has a blank",
    "mindspore: {'a{i + 1} H': H}": "mine.yaml: 'a{i + 1} H' is not a name: it has a blank",
    "axes: g g": "a factor twice",
    "for: {i: range(L}": "mine.yaml",
    "names: {a: b, a: c}": "twice",
    "wrong: 1": "mine.yaml, line 5, column 3: unknown key wrong",
    "names: 1": "mine.yaml, line 5, column 3: a text, expected a mapping",
    "sizes: {p: {q: 3}}": "mine.yaml, line 5, column 3: a mapping, expected a text",
}


@pytest.mark.parametrize("line", MALFORMED)
def test_a_malformed_recipe_is_an_error_of_its_file(tmp_path, line):
    said = MALFORMED[line]
    text = f"recipe: mine\nversion: 1\nsource: x\nrules:\n- {line}\n"
    (tmp_path / "mine.yaml").write_text(text)
    write_model(tmp_path / "hf", "qwen3")
    words = ["merge", tmp_path / "hf", "-o", tmp_path / "m.ckpt"]
    result = run(*words, "--recipe", tmp_path / "mine.yaml")
    assert result.exit_code == 4, message(result)
    assert said in message(result)


def test_what_a_recipe_keeps_wide_is_not_told_to_be_narrowed(tmp_path):
    choices = {"fc1": "contiguous", "mla": "separate", "mode": "pynative"}
    _, tensors = write_model(tmp_path / "hf", "deepseek-v3-mtp")
    assert {it.dtype for name, it in tensors.items() if "mlp.gate." in name} == {"Float32"}
    words = ["--recipe", option("deepseek-v3", choices), "--dtype", "bf16"]
    done = run_well("merge", tmp_path / "hf", "-o", tmp_path / "m.ckpt", *words)
    told = message(done)
    routers = ", ".join(f"model.layers.{layer}.mlp.gate.weight" for layer in (1, 2, 3))
    assert f"cast from Float32, while most weights are BFloat16: {routers} Try" in told
    made = read(tmp_path / "m.ckpt")
    for part, dtype in (("mlp.router.weight", "BFloat16"), ("mlp.expert_bias", "Float32")):
        assert {it.dtype for name, it in made.items() if name.endswith(part)} == {dtype}


FUSED = """recipe: inference
version: 1
source: nobody
extends: RECIPE
fused: {FC1: "2", QKV: "q:{heads},k:{g},v:{g}"}
"""
BY_RANKS = {  # recipe: a model, choices, names of fused weights
    "qwen3": ("qwen3", ("fc1", "attention"), ("linear_fc1", "linear_qkv")),
    "llama-concat": ("qwen2", ("concat",), ("w_gate_hidden", "w_qkv")),
}


def fused_by(slices, sizes, entry):
    """Return a weight as so many ranks fuse their own parts of it, one after another."""
    whole, ends = entry.array(), np.cumsum(sizes)[:-1]
    blocks = [np.split(block, slices) for block in np.split(whole, ends)]
    rows = [block[rank] for rank in range(slices) for block in blocks]
    return entry._replace(data=np.concatenate(rows).tobytes())


@pytest.mark.parametrize("name", BY_RANKS)
@pytest.mark.parametrize("by", ["recipe", "option"])
def test_what_each_rank_fused_is_regrouped_with_a_recipe(tmp_path, by, name):
    model, asked, (fc1, qkv) = BY_RANKS[name]
    config, tensors = write_model(tmp_path / "hf", model)
    choices = dict.fromkeys(asked, "contiguous")
    full = to_mindformers(config, tensors, name, choices)
    stored, items = {}, {}
    for key, entry in full.items():
        of = {fc1: (3, (9, 9), 0), qkv: (2, (48, 16, 16), 1)}
        slices, sizes, device = of.get(key.split(".")[-2], (1, entry.shape[:1], -1))
        stored[key] = fused_by(slices, sizes, entry)
        axes = [device, *[-1] * (len(entry.shape) - 1)]
        items[key] = {"dev_matrix": [2, 3], "tensor_map": axes}
    strategy = tmp_path / "s.json"
    strategy.write_text(json.dumps({"parallel_layout_item": items}))
    ranks = cut(stored, ckpttool.read_strategy(strategy))
    text = FUSED.replace("RECIPE", name).replace("FC1", fc1).replace("QKV", qkv)
    (tmp_path / "mine.yaml").write_text(text)
    base = tmp_path / "mine.yaml" if by == "recipe" else name
    words = ["--recipe", option(base, choices), "--hf-config", tmp_path / "hf"]
    if by == "option":
        words += ["--fused", f"{fc1}=2", "--fused", f"{qkv}=q:6,k:2,v:2"]
    to_ranks = ["-d", strategy, "-o", tmp_path / "ms", "--format", "ckpt"]
    run_well("split", tmp_path / "hf", *to_ranks, *words, "--engine", "processes:2")
    assert read_ranks(tmp_path / "ms") == ranks
    run_well("merge", tmp_path / "ms", "-s", strategy, "-o", tmp_path / "back", *words)
    assert read(tmp_path / "back" / "model.safetensors") == tensors
    said = run(
        "merge", tmp_path / "ms", "-s", strategy, "-o", tmp_path / "b", *words, "--fused", "x=2"
    )
    assert (said.exit_code, "no tensor matches 'x'" in message(said)) == (5, True)


def quantize(tensors, block):
    """Return the tensors with the projections in Float8, and those that they stand for."""
    stored, meant, rows, columns = {}, {}, *block
    for name, entry in tensors.items():
        stored[name] = meant[name] = entry
        if "_proj" not in name or not name.endswith(".weight"):
            continue
        chance = np.random.default_rng(list(name.encode()))
        weight = (chance.standard_normal(entry.shape) * 8).astype(ml_dtypes.float8_e4m3fn)
        counts = [-(-size // of) for size, of in zip(entry.shape, block, strict=True)]
        scale = chance.random(counts, np.float32) * np.float32(0.01)
        every = scale.repeat(rows, 0).repeat(columns, 1)[: entry.shape[0], : entry.shape[1]]
        stored[name] = Entry("Float8E4M3FN", entry.shape, weight.tobytes())
        stored[f"{name}_scale_inv"] = entry_of(scale)
        meant[name] = weight.astype(np.float32) * every  # as transformers computes it
    return stored, meant


def as_type(tensors, dtype):
    numpy = {"BFloat16": ml_dtypes.bfloat16, "Float32": np.float32}[dtype]
    cast = {name: it for name, it in tensors.items() if isinstance(it, np.ndarray)}
    return tensors | {
        name: Entry(dtype, it.shape, it.astype(numpy).tobytes()) for name, it in cast.items()
    }


@pytest.mark.parametrize("model", ["deepseek-v3-mtp", "deepseek-v3-no-q", "qwen3", "llama"])
@pytest.mark.parametrize("block", [(8, 8), (5, 7), (128, 128)])
def test_float8_with_scales_is_read(tmp_path, model, block):
    config, tensors = load_model(model)
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": block}
    stored, meant = quantize(tensors, block)
    write_file(tmp_path / "hf" / "model.safetensors", stored, "safetensors")
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    recipe = model.removesuffix("-mtp").removesuffix("-no-q")
    choices = {"fc1": "interleaved", "mla": "fused", "mode": "graph", "attention": "grouped"}
    known = read_recipe(recipe).recipe.choices
    choices = {name: value for name, value in choices.items() if name in known}
    choices |= {"num_nextn_predict_layers": "0"} if model.endswith("no-q") else {}
    expected = to_mindformers(config, as_type(meant, "BFloat16"), recipe, choices)
    words = ["--recipe", option(recipe, choices)]
    done = run_well("merge", tmp_path / "hf", "-o", tmp_path / "m.ckpt", *words)
    assert read(tmp_path / "m.ckpt") == expected
    scales = len(stored) - len(tensors)
    assert f"multiplied: {scales} scales" in message(done)
    strategy = write_strategy(tmp_path / "s.json", expected, 4)
    to_ranks = ["-d", strategy, "-o", tmp_path / "ms", "--format", "ckpt"]
    run_well("split", tmp_path / "hf", *to_ranks, *words, "--engine", "processes:2")
    deep = ["--deep", "--ignore", "nan", "--ignore", "infinite"]  # of random bytes
    run_well("verify", tmp_path / "hf", *words, "--like", tmp_path / "m.ckpt", *deep)
    assert read_ranks(tmp_path / "ms") == cut(expected, ckpttool.read_strategy(strategy))
    back = ["-s", strategy, "-o", tmp_path / "back", "--hf-config", tmp_path / "hf"]
    run_well("merge", tmp_path / "ms", *back, *words)
    assert read(tmp_path / "back" / "model.safetensors") == as_type(meant, "BFloat16")
    written = json.loads((tmp_path / "back" / "config.json").read_text())
    config.update({key: int(value) for key, value in choices.items() if key in config})
    assert written == {key: it for key, it in config.items() if key != "quantization_config"}
    with ckpttool.open(tmp_path / "hf", recipe=option(recipe, choices), dtype="fp32") as opened:
        for name, entry in as_type(meant, "Float32").items():
            if recipe == "llama" and name.endswith("q_proj.weight"):
                new = name.replace("self_attn.q_proj", "attention.wq")
                assert np.array_equal(opened[new][:], entry.array())


@pytest.mark.parametrize("lost", ["scale", "scales", "dtype", "one of two"])
def test_float8_that_means_nothing_is_refused(tmp_path, lost):
    config, tensors = load_model("llama")
    stored, _ = quantize(tensors, (128, 128))
    name = "model.layers.1.self_attn.k_proj.weight"
    said = f"{name}: the Float8 weight has no scale"
    if lost == "dtype":
        del config["dtype"]
        said = "nothing says the type of the Float8 weight: 21 tensors"
    elif lost == "scale":
        del stored[f"{name}_scale_inv"]
    elif lost == "scales":
        config["quantization_config"] = {"quant_method": "fp8"}
        stored = {name: it for name, it in stored.items() if not name.endswith("_scale_inv")}
        said = "the Float8 weight has no scale: 21 tensors"
    else:  # of the parts of one tensor
        stored[name] = tensors[name]
        del stored[f"{name}_scale_inv"]
        said = "parts of one tensor have several types"
    write_file(tmp_path / "hf" / "model.safetensors", stored, "safetensors")
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    words = ["merge", tmp_path / "hf", "-o", tmp_path / "m.ckpt"]
    recipe = ["--recipe", "mcore:fc1=interleaved,attention=grouped"]
    result = run(*words, *recipe)
    assert (result.exit_code, said in message(result)) == (5, True), message(result)
    assert not (tmp_path / "m.ckpt").exists()
    result = run("verify", tmp_path / "hf", *recipe)  # a scale is found, books are refused
    code = 5 if lost == "one of two" else 1
    assert (result.exit_code, said in message(result)) == (code, True), message(result)
    if lost == "dtype":
        run_well(*words, "--recipe", "llama", "--dtype", "fp32")


def published(model):
    """Return the configuration and the shapes of a published model."""
    if model == "qwen3-moe":  # Qwen3-30B-A3B
        width, layers, experts, wide, words = 2048, 48, 128, 768, 151936
        config = {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}
        attention = {"q_proj": (4096, width), "k_proj": (512, width), "v_proj": (512, width)}
        attention |= {"o_proj": (width, 4096), "q_norm": (128,), "k_norm": (128,)}
        dense = 0
    else:  # DeepSeek-V3, without the layer that transformers does not keep
        width, layers, experts, wide, words = 7168, 61, 256, 2048, 129280
        config = {"num_attention_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512}
        config |= {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
        config |= {"first_k_dense_replace": 3, "n_shared_experts": 1, "intermediate_size": 18432}
        attention = {"q_a_proj": (1536, width), "q_a_layernorm": (1536,), "q_b_proj": (24576, 1536)}
        attention |= {"kv_a_proj_with_mqa": (576, width), "kv_a_layernorm": (512,)}
        attention |= {"kv_b_proj": (32768, 512), "o_proj": (width, 16384)}
        dense = 3
    config |= {"hidden_size": width, "num_hidden_layers": layers, "moe_intermediate_size": wide}
    config |= {"num_experts": experts, "vocab_size": words}
    shapes = {"model.embed_tokens.weight": (words, width), "model.norm.weight": (width,)}
    shapes["lm_head.weight"] = (words, width)
    for layer in range(layers):
        of_layer = {"input_layernorm": (width,), "post_attention_layernorm": (width,)}
        of_layer |= {f"self_attn.{name}": shape for name, shape in attention.items()}
        modules = {"": 18432} if layer < dense else {f"experts.{e}.": wide for e in range(experts)}
        if layer >= dense:
            of_layer["mlp.gate"] = (experts, width)
            modules |= {"shared_experts.": wide} if dense else {}
        for module, size in modules.items():
            of_layer |= {f"mlp.{module}{name}_proj": (size, width) for name in ("gate", "up")}
            of_layer[f"mlp.{module}down_proj"] = (width, size)
        names = {f"model.layers.{layer}.{name}.weight": it for name, it in of_layer.items()}
        if "shared_experts." in modules:
            names[f"model.layers.{layer}.mlp.gate.e_score_correction_bias"] = (experts,)
        shapes |= names
    return config, shapes


def write_sparse(path, metas):
    path.parent.mkdir(exist_ok=True)
    file = create_file(get_format("safetensors"), path, metas, {})
    with path.open("r+b") as stored:
        stored.truncate(file.nbytes)


@pytest.mark.big
@pytest.mark.parametrize("model", ["qwen3-moe", "deepseek-v3"])
def test_the_books_of_a_published_model_balance_both_ways(tmp_path, model):
    config, shapes = published(model)
    assert len(shapes) == {"qwen3-moe": 18_867, "deepseek-v3": 45_395}[model]
    metas = [
        TensorMeta(name, "Float32" if "e_score" in name else "BFloat16", shape)
        for name, shape in shapes.items()
    ]
    write_sparse(tmp_path / "hf" / "model.safetensors", metas)
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    choices = {"fc1": "interleaved", "mode": "graph"}
    choices |= {"attention": "grouped"} if model == "qwen3-moe" else {"mla": "fused"}
    words = {"recipe": option(model, choices), "hf_config": tmp_path / "hf"}
    for source in ("hf", "ms"):
        began = time.process_time()
        with ckpttool.open(tmp_path / source / "model.safetensors", **words) as opened:
            made = [TensorMeta(it.name, it.stored_dtype, it.shape) for it in opened.values()]
        seconds = time.process_time() - began
        print(f"{model} from {source}: {len(made)} tensors made in {seconds:.1f} s")  # noqa: T201
        write_sparse(tmp_path / "ms" / "model.safetensors", made)
    assert {*made} == {*metas}
