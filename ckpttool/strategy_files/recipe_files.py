"""Files with recipes (``--recipe``).

A file is YAML with the fields of `ckpttool.model.recipes.Recipe`; some come with the package.  One
may extend another that does, whose rules are then its first.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from shlex import quote

import msgspec

from ckpttool.formats.local import is_file
from ckpttool.model.recipes import Recipe, UsedRecipe, Value
from ckpttool.problems import RulesError
from ckpttool.strategy_files.config_files import CONFIG, read_config
from ckpttool.strategy_files.handwritten import Node, read_rules
from ckpttool.wording import any_of, nearest

_WORDS: dict[str, Value] = {"true": True, "yes": True, "false": False, "no": False, "none": None}
_WRITING = "`ckpttool help writing-recipes`"
_REASONS = {  # of msgspec
    r"Object contains unknown field `(\w+)`": r"unknown key \1",
    r"Object missing required field `(\w+)`": r"the key \1 is missing",
    r"Expected (.+), got (.+)": r"\2, expected \1",
}
_KINDS = {"str": "a text", "int": "a number", "bool": "true or false", "array": "a list"}
_KINDS |= {"object": "a mapping", "null": "nothing"}
_FOLDER = Path(__file__).with_name("recipes")
_BASES = ("mcore-moe",)  # what others extend, of no model by itself
SHIPPED = (
    *("deepseek-v3", "deepseek-v3-legacy", "deepseek-v4", "glm4", "glm4-legacy", "glm4-moe"),
    *("llama", "llama-concat", "mcore", "qwen2", "qwen3", "qwen3-moe"),
)


def read_recipe(text: str, folder: str | os.PathLike[str] | None = None) -> UsedRecipe:
    """Return a recipe from ``NAME`` or ``FILE``, with ``:KEY=VALUE,...`` or without.

    ``folder`` has the ``config.json`` of the model, or is that file.

    Raises
    ------
    RulesError
        The recipe does not exist, or the file is malformed.
    FormatError
        The configuration is not a JSON object.
    OSError
        A file cannot be read.
    """
    path, _, given = text.partition(":") if not is_file(text) else (text, "", "")
    recipe = _read(path)
    values = _read_values(text, path, recipe, [*filter(None, given.split(","))])
    if folder is not None and Path(folder).name == CONFIG and is_file(folder):
        folder = Path(folder).parent
    if folder is not None and not is_file(Path(folder, CONFIG)):
        hint = "--hf-config with the folder of a model"
        raise RulesError(os.fspath(folder), f"no {CONFIG}", hint)
    config = {} if folder is None else read_config(Path(folder, CONFIG))
    home = "" if folder is None else os.fspath(folder)
    return UsedRecipe(recipe, path, values, config, home)


def _read_values(text: str, path: str, recipe: Recipe, pairs: Sequence[str]) -> Mapping[str, Value]:
    """Return the values of ``KEY=VALUE`` pairs; the key of a choice gives its answer.

    Raises
    ------
    RulesError
        Some do not fit.  The hint has the whole text, or several if only the user can choose.
    """
    choices = recipe.choices
    of_keys = {choice.config: name for name, choice in choices.items() if choice.config}
    values: dict[str, Value] = {}
    wrong, meant = list[str](), dict[str, Sequence[Value]]()
    for pair in pairs:
        key, sign, word = (it.strip() for it in pair.partition("="))
        near = key if key in recipe.keys else nearest(key, recipe.keys)
        name = of_keys.get(near, near)
        is_number = re.fullmatch(r"\d{1,9}", word, re.ASCII)
        value = int(word) if is_number else _WORDS.get(word.lower(), word)
        choice = choices.get(name)
        answers: Mapping[Value, Value] = {value: value if sign else "NUMBER"}
        if choice is not None and near == name:
            answers = {answer: answer for answer in choice.values}
        elif choice is not None:
            answers = {of_key: answer for answer, of_key in choice.values.items()}
        if not (key and sign):
            wrong.append(f"{pair!r} is not KEY=VALUE")
        elif key not in recipe.keys:
            wrong.append(f"{path} knows no {key}")
        elif name in values:
            wrong.append(f"{name} is given twice")
        elif value not in answers:
            wrong.append(f"{name} has no value {word}")
        values[name] = answers.get(value)
        if name:
            fitting = [answers[value]] if value in answers else [*answers.values()]
            meant[name] = [*dict.fromkeys((*meant.get(name, ()), *fitting))]
    if wrong:
        typed = (dict(zip(meant, it, strict=True)) for it in product(*meant.values()))
        hint = any_of(UsedRecipe(recipe, path, it).option for it in typed)
        raise RulesError(text, "; ".join(wrong), hint)
    return values


def _read(path: str) -> Recipe:
    shipped = (*SHIPPED, *_BASES)
    if path not in shipped and not is_file(path):
        hint = nearest(path, SHIPPED) or f"{any_of(SHIPPED)}, or a YAML file"
        raise RulesError(path, "no such recipe", hint)
    if Path(path).name == CONFIG:
        hint = f"--recipe with a name, and --hf-config {quote(path)}"
        raise RulesError(path, "a configuration is no recipe", hint)
    document = read_rules(path, shipped, _FOLDER, "a recipe", _WRITING)
    try:
        recipe = msgspec.convert(_plain(document), Recipe, strict=False)
    except msgspec.ValidationError as error:
        reason, _, at = str(error).partition(" - at `$")
        raise RulesError(_place(document, at), _in_words(reason), _WRITING) from error
    try:
        recipe.check()
    except ValueError as error:
        raise RulesError(path, str(error), _WRITING) from error
    if not recipe.extends:
        return recipe
    if recipe.extends not in shipped:
        reason = f"extends {recipe.extends}, which does not come with ckpttool"
        raise RulesError(path, reason, f"extends: {any_of(SHIPPED)}")
    return recipe.over(_read(recipe.extends))


def _place(node: Node, at: str) -> str:
    """Return the place of a value in a document, by the path that msgspec gives: ``.rules[0]``."""
    for key, index in re.findall(r"\.(\w+)|\[(\d+)\]", at):
        if isinstance(node.value, dict) and key in node.value:
            node = node.value[key]
        elif isinstance(node.value, tuple) and index:
            node = node.value[int(index)]
    return node.place


def _in_words(reason: str) -> str:
    """Return a reason of msgspec in the words of YAML."""
    for pattern, words in _REASONS.items():
        reason = re.sub(pattern, words, reason)
    for kind, words in _KINDS.items():
        reason = reason.replace(f"`{kind}`", words)
    return reason


def _plain(node: Node) -> object:
    """Return the value of a document without places; a number or a list of such is a text.

    So it is an expression, which stands where YAML has such values.
    """
    value = node.value
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if not isinstance(value, tuple):
        return str(value) if isinstance(value, int) else value
    items = [item.value for item in value]
    if items and all(isinstance(item, str | int) for item in items):
        return str(items)
    return [*map(_plain, value)]
