"""Recipes: the same bytes under the names and axes of another framework, and none lost."""

from __future__ import annotations

import json
import random

import pytest
from msgspec.structs import replace

import ckpttool
from ckpttool.checkpoint.rearrange import rearrange
from ckpttool.problems import PlanError
from ckpttool.strategy_files.recipe_files import SHIPPED, read_recipe
from tests.support.checkpoints import catalog_of, cut, write_file, write_ranks
from tests.support.commands import message, run, run_well
from tests.support.families import (
    RECIPES,
    VARIANTS,
    load_model,
    option,
    shard,
    to_mindformers,
    write_strategy,
)
from tests.support.in_memory import checkpoint_in_memory
from tests.support.readers import read, read_ranks

IDS = [" ".join([model, recipe, *choices.values()]) for model, recipe, choices in VARIANTS]


def write_model(folder, model):
    """Write a folder as Hugging Face has it."""
    config, tensors = load_model(model)
    write_file(folder / "model.safetensors", tensors, "safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return config, tensors


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
    assert json.loads((back / "config.json").read_text()) == config


def problems_of(shapes, recipe, config):
    """Return what is wrong if a file has tensors of these types and shapes."""
    checkpoint = checkpoint_in_memory(catalog_of({0: shapes}), None)
    try:
        _, note = rearrange(checkpoint, replace(read_recipe(recipe), config=config))
    except PlanError as error:
        return [*error.diagnostics]
    return [note]


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
    return axis == 0 and ("embed" in name or "lm_head" in name or "output_layer" in name)


@pytest.mark.parametrize("number", [40, pytest.param(1000, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("model", RECIPES)
def test_whatever_changes_in_one_tensor_is_named(model, number):
    chance = random.Random(f"{model} 47")
    for model_, recipe, choices in VARIANTS:
        if model_ != model:
            continue
        config, tensors = load_model(model)
        made = to_mindformers(config, tensors, recipe, choices)
        words = option(recipe, choices)
        sides = [
            {name: (entry.dtype, entry.shape) for name, entry in side.items()}
            for side in (tensors, made)
        ]
        for shapes in sides:
            found = problems_of(shapes, words, config)
            assert [problem.code for problem in found] == ["recipe_used"]
            for _ in range(number // 8):
                changed, names = mutate(shapes, chance)
                found = problems_of(changed, words, config)
                told = " ".join(f"{problem.message} {problem.facts}" for problem in found)
                assert {problem.code for problem in found} == {"recipe"}, (names, told)
                assert any(name in told for name in names), (names, told)


def test_a_tied_head_that_is_there_is_not_written(tmp_path):
    config, tensors = write_model(tmp_path / "hf", "qwen2-tied")
    doubled = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}
    write_file(tmp_path / "hf" / "model.safetensors", doubled, "safetensors")
    made = to_mindformers(config, tensors, "qwen2", {"fc1": "interleaved", "attention": "grouped"})
    words = "qwen2:fc1=interleaved,attention=grouped"
    run_well("merge", tmp_path / "hf", "-o", tmp_path / "m.ckpt", "--recipe", words)
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
    assert f"{len(made)} tensors that no rule of qwen3 knows" in message(result)
    assert message(result).endswith("Try: --weights-only")
    said = run_well(*words, "--weights-only")
    assert f"left out by options: {len(made)} tensors" in message(said)
    assert read(tmp_path / "out" / "model.safetensors") == tensors


MISTAKES = {  # what is typed, the exit code, what is said
    "qwen3": (5, "fc1 is interleaved or contiguous"),
    "qwen3:fc1=interleaved": (5, "attention is contiguous or grouped"),
    "qwen3:fc1=inter,attention=grouped": (4, "fc1 is not inter"),
    "qwen4": (4, "no such recipe"),
    "qwen3:fc1": (4, "'fc1' is not KEY=VALUE"),
    "llama": (5, "no tensor has a name of the recipe llama"),
    "qwen3:fc1=interleaved,attention=grouped,num_key_value_heads=4": (5, "linear_qkv.weight"),
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
