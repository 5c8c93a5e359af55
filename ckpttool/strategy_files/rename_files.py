"""Files with rules for the names of tensors (``--rename-file``).

A YAML mapping of OLD to NEW, in order; see `ckpttool.model.renames`.  In place of NEW there may be
``{to: NEW, beside: NAME}``: the rule then counts only where a tensor has this name, too.  Two files
come with the package: ``to-pytorch`` and ``to-mindspore``.
"""

from __future__ import annotations

import os
from pathlib import Path

from ckpttool.formats.local import is_file, read_file, stat_file
from ckpttool.model.renames import Rename
from ckpttool.problems import RulesError, StrategyError, raise_all
from ckpttool.strategy_files.handwritten import MAX_BYTES, Node, parse_yaml

_FOLDER = Path(__file__).with_name("renames")
_EXAMPLE = 'lines such as "*.gamma": "*.weight"'
SHIPPED = ("to-mindspore", "to-pytorch")


def read_renames(path: str | os.PathLike[str]) -> tuple[Rename, ...]:
    """Return the rules of a file, or of one that comes with the package, by its name.

    Raises
    ------
    RulesError
        The file is malformed.  Several mistakes are a `CombinedError`.
    OSError
        The file cannot be read.
    """
    path = os.fspath(path)
    is_shipped = path in SHIPPED and not is_file(path)
    file = os.fspath(_FOLDER / f"{path}.yaml") if is_shipped else path
    if (size := stat_file(file).nbytes) > MAX_BYTES:
        raise RulesError(path, f"{size} bytes are too many for rules", facts=f"at most {MAX_BYTES}")
    if not is_file(file):
        raise RulesError(path, "not a file", "the rules saved as a file")
    data = read_file(file)
    try:
        top = parse_yaml(data, path).value
    except StrategyError as error:
        _, reason, hint, facts = error.args
        raise RulesError(error.args[0], reason, hint or _EXAMPLE, facts) from error
    if not isinstance(top, dict) or not top:
        raise RulesError(path, "no mapping of old names to new ones", _EXAMPLE)
    rules: list[Rename] = []
    mistakes: list[RulesError] = []
    for old, node in top.items():
        try:
            rules.append(_rule(old, node, path))
        except RulesError as error:
            mistakes.append(error)
    raise_all(mistakes)
    return tuple(rules)


def _rule(old: str, node: Node, path: str) -> Rename:
    value = node.value
    parts = {"to": node} if isinstance(value, str) else value
    if not isinstance(parts, dict) or not {"to"} <= parts.keys() <= {"to", "beside"}:
        hint = f'"{old}": NEW, or {{to: NEW, beside: NAME}}'
        raise RulesError(node.place, f"{old}: neither a name nor to: and beside:", hint)
    texts = {key: one.value for key, one in parts.items()}
    if wrong := [key for key, text in texts.items() if not isinstance(text, str)]:
        raise RulesError(node.place, f"{old}: {wrong[0]}: is not a name", 'a name in quotes: "1"')
    try:
        return Rename(old, str(texts["to"]), str(texts.get("beside", "")), path)
    except ValueError as error:
        hint = "as many wildcards or groups as the old name has, at most"
        raise RulesError(node.place, str(error), hint) from error
