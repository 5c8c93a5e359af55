"""Files with recipes (``--recipe``).

A file is YAML with the fields of `ckpttool.model.recipes.Recipe`; some come with the package.  One
may extend another that does, whose rules are then its first.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

from ckpttool.formats.local import is_file, read_file, stat_file
from ckpttool.model.recipes import Recipe, UsedRecipe, Value
from ckpttool.problems import RulesError, StrategyError
from ckpttool.strategy_files.config_files import CONFIG, read_config
from ckpttool.strategy_files.handwritten import MAX_BYTES, Node, parse_yaml
from ckpttool.wording import any_of, nearest, shorten

_WORDS: dict[str, Value] = {"true": True, "yes": True, "false": False, "no": False, "none": None}
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
    values: dict[str, Value] = {}
    recipe = _read(path)
    usual: dict[str, Value] = {name: next(iter(it.values)) for name, it in recipe.choices.items()}

    def typed(given: Mapping[str, Value]) -> str:
        return UsedRecipe(recipe, path, given).option

    for pair in filter(None, given.split(",")):
        key, sign, value = (word.strip() for word in pair.partition("="))
        if not sign:
            raise RulesError(text, f"{pair!r} is not KEY=VALUE", typed(usual | values))
        is_number = re.fullmatch(r"\d{1,9}", value, re.ASCII)
        values[key] = int(value) if is_number else _WORDS.get(value.lower(), value)
    if unknown := [key for key in values if key not in recipe.keys]:
        known = {key: value for key, value in values.items() if key in recipe.keys}
        near = nearest(unknown[0], recipe.keys)
        hint = typed(known | {near: values[unknown[0]]} if near else usual | known)
        raise RulesError(text, f"{path} knows no {shorten(unknown)}", hint)
    for name, choice in recipe.choices.items():
        if name in values and values[name] not in choice.values:
            hint = any_of(typed(values | {name: value}) for value in choice.values)
            raise RulesError(text, f"{name} has no such value", hint)
    if folder is not None and Path(folder).name == CONFIG and is_file(folder):
        folder = Path(folder).parent
    if folder is not None and not is_file(Path(folder, CONFIG)):
        raise RulesError(
            os.fspath(folder), f"no {CONFIG}", "--hf-config with the folder of a model"
        )
    config = {} if folder is None else read_config(Path(folder, CONFIG))
    home = "" if folder is None else os.fspath(folder)
    return UsedRecipe(recipe, path, values, config, home)


def _read(path: str) -> Recipe:
    is_shipped = path in (*SHIPPED, *_BASES) and not is_file(path)
    file = os.fspath(_FOLDER / f"{path}.yaml") if is_shipped else path
    if not is_file(file):
        raise RulesError(path, "no such recipe", f"{any_of(SHIPPED)}, or a YAML file")
    if (size := stat_file(file).nbytes) > MAX_BYTES:
        raise RulesError(
            path, f"{size} bytes are too many for a recipe", facts=f"most: {MAX_BYTES}"
        )
    try:
        document = parse_yaml(read_file(file), path)
    except StrategyError as error:
        raise RulesError(*error.args) from error
    try:
        recipe = msgspec.convert(_plain(document), Recipe, strict=False)
    except msgspec.ValidationError as error:
        reason, _, at = str(error).partition(" - at `$")
        raise RulesError(_place(document, at), reason, "`ckpttool help writing-recipes`") from error
    try:
        recipe.check()
    except ValueError as error:
        raise RulesError(path, str(error), "`ckpttool help writing-recipes`") from error
    return recipe.over(_read(recipe.extends)) if recipe.extends else recipe


def _place(node: Node, at: str) -> str:
    """Return the place of a value in a document, by the path that msgspec gives: ``.rules[0]``."""
    for key, index in re.findall(r"\.(\w+)|\[(\d+)\]", at):
        if isinstance(node.value, dict) and key in node.value:
            node = node.value[key]
        elif isinstance(node.value, tuple) and index:
            node = node.value[int(index)]
    return node.place


def _plain(node: Node) -> object:
    """Return the value of a document without places."""
    value = node.value
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    return [*map(_plain, value)] if isinstance(value, tuple) else value
