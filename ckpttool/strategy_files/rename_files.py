"""Files with rules for the names of tensors (``--rename-file``).

It turns text into rules and finds their inverse.  `ckpttool.model.renames` applies rules to names.

A YAML mapping of OLD to NEW, in order; see `ckpttool.model.renames`.  In place of NEW there may be
a mapping, or a sequence of mappings; the first that counts is taken.  The keys are

- ``to``: the new name; if it is absent the name stays, and no further rule changes it;
- ``beside``: a name, or a mapping of names to what is wanted of each (`Rename.beside`); the rule
  counts only where all are so;
- ``note``: what a note says of the tensors that match.

Two files come with the package: ``to-pytorch`` and ``to-mindspore``.  A file can be used the other
way (``--reverse``) if each rule has an inverse: a glob whose wildcards all stand in the new name,
which no other rule gives as well.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path

from ckpttool.formats.local import is_file
from ckpttool.model.patterns import Pattern
from ckpttool.model.renames import WANTED, WILDCARD, Names, Rename
from ckpttool.problems import RulesError, raise_all
from ckpttool.strategy_files.handwritten import Node, read_rules

_FOLDER = Path(__file__).with_name("renames")
_EXAMPLE = 'lines such as "*.gamma": "*.weight"'
SHIPPED = ("to-mindspore", "to-pytorch")


def read_renames(path: str | os.PathLike[str], reverse: bool = False) -> tuple[Rename, ...]:
    """Return the rules of a file, or of one that comes with the package, by its name.

    With ``reverse`` these are the inverse rules.

    Raises
    ------
    RulesError
        The file is malformed, or has a rule without an inverse.  Several mistakes are a
        `CombinedError`.
    OSError
        The file cannot be read.
    """
    path = os.fspath(path)
    top = read_rules(path, SHIPPED, _FOLDER, "rules", _EXAMPLE).value
    if not isinstance(top, dict) or not top:
        raise RulesError(path, "no mapping of old names to new ones", _EXAMPLE)
    if reverse and path in SHIPPED and not is_file(path):
        other = SHIPPED[path == SHIPPED[0]]
        raise RulesError(path, "the rules have no inverse", f"--rename-file {other}")
    rules: list[Rename] = []
    mistakes: list[RulesError] = []
    for old, node in top.items():
        items = node.value if isinstance(node.value, tuple) else ()
        is_list = items and all(isinstance(item.value, dict) for item in items)
        for item in items if is_list else (node,):
            try:
                rules.append(_rule(old, item, path))
            except RulesError as error:
                mistakes.append(error)
    raise_all(mistakes)
    rules, reasons = _invert(rules) if reverse else (rules, {})
    raise_all(RulesError(top[old].place, f"{old}: {reasons[old]}") for old in top if old in reasons)
    return tuple(rules)


def _invert(rules: Sequence[Rename]) -> tuple[list[Rename], Mapping[str, str]]:
    """Return the inverse rules, and why old names have none."""
    inverse, reasons, first = list[Rename](), dict[str, str](), dict[str, Rename]()
    for rule in rules:
        wildcards, parts = WILDCARD.findall(rule.old), re.split(r"[*?]", rule.new)
        if rule.old.startswith("re:") or rule.beside or rule.note:
            reasons[rule.old] = "re:, beside: and note: have no inverse"
        elif len(parts) != len(wildcards) + 1 or not {*wildcards} <= {*"*?"}:
            reasons[rule.old] = f"several names become {rule.new}"
        else:
            literals = (part.replace("[", "[[]") for part in parts)
            new = "".join(chain(*zip(literals, (*wildcards, ""), strict=True)))
            inverse.append(Rename(new, rule.old, file=rule.file))
    globs = [rule for rule in inverse if Pattern(rule.new).is_pattern]
    for rule in inverse:
        for other in (first.setdefault(rule.old, rule), *globs):
            if other.apply(rule.old, Names()) not in (None, rule.new):
                why = f"{other.new} and {rule.new} give the same name"
                reasons |= dict.fromkeys((other.new, rule.new), why)
    return inverse, reasons


def _rule(old: str, node: Node, path: str) -> Rename:
    parts = {"to": node} if isinstance(node.value, str) else node.value
    texts = {key: part.value for key, part in parts.items()} if isinstance(parts, dict) else {}
    beside = texts.pop("beside", {})
    nodes = beside if isinstance(beside, dict) else {}
    pairs = [(name, str(part.value)) for name, part in nodes.items()]
    if isinstance(beside, str):
        pairs = [(beside, "any")]
    are_texts = all(isinstance(text_value, str) for text_value in texts.values())
    are_pairs = (pairs or beside == {}) and all(WANTED.fullmatch(wanted) for _, wanted in pairs)
    if not texts or texts.keys() - {"to", "note"} or not are_texts or not are_pairs:
        hint = f'"{old}": NEW, or {{to: NEW, beside: NAME}}'
        raise RulesError(node.place, f"{old}: neither a name nor to: and beside:", hint)
    new = texts.get("to", r"\g<0>" if old.startswith("re:") else old)
    try:
        return Rename(old, str(new), tuple(pairs), path, str(texts.get("note", "")))
    except ValueError as error:
        hint = "as many wildcards or groups as the old name has, at most"
        raise RulesError(node.place, str(error), hint) from error
