r"""New names for tensors: rules that replace names, or parts of them.

A rule is a glob and a name, in which each ``*`` or ``?`` stands for what that of the glob matched:
``model.*.gamma`` and ``*.weight``.  Brackets such as ``[0-3]`` count, too, if the name has more of
these than the glob.  Or it is ``re:``, a regular expression and a text with groups, which replaces
its matches: ``re:^(.*)\.gamma$`` and ``\1.weight``.  The first rule that matches a name counts.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from fnmatch import translate
from itertools import chain

from ckpttool.model.names import ParameterOfState, map_of_component, parameter_of_value
from ckpttool.model.patterns import Pattern, unmatched_problem
from ckpttool.problems import Diagnostic
from ckpttool.records import field, record, set_field
from ckpttool.wording import count, shorten

_PLACE = re.compile(r"[*?]")
_WILDCARD = re.compile(r"\*|\?|\[!?\]?[^\]]*\]")  # of a glob, as `fnmatch` reads it


@record
class Rename:
    r"""A rule: the names that match ``old`` become ``new``.

    Attributes
    ----------
    old, new
        A glob and a name, or a regular expression and a text; see the module.
    beside
        The rule counts only where this name is there, too; "" for everywhere.  Its wildcards
        stand for what those of ``old`` matched.
    file
        The file that has the rule; "" if it is given by itself.

    Raises
    ------
    ValueError
        ``old`` is malformed, or ``new`` or ``beside`` has what ``old`` does not match.

    Examples
    --------
    >>> Rename("bn.*.gamma", "norm.*.weight").apply("bn.1.gamma", ["bn.1.gamma"])
    'norm.1.weight'
    >>> Rename(r"re:^layer(\d)", r"blocks.\1").apply("layer3.bias", ["layer3.bias"])
    'blocks.3.bias'
    """

    old: str
    new: str
    beside: str = ""
    file: str = ""
    regex: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        pattern = Pattern(self.old)
        if not self.old.startswith("re:"):
            literals = map(re.escape, _WILDCARD.split(self.old))
            wildcards = _WILDCARD.findall(self.old)
            places = sum(one in "*?" for one in wildcards)
            has_more = any(len(_PLACE.findall(one)) > places for one in (self.new, self.beside))
            groups = (_group(one, has_more or one in "*?") for one in wildcards)
            text = "".join(chain(*zip(literals, (*groups, ""), strict=True)))
            set_field(self, "regex", re.compile(rf"(?s)\A{text}\Z"))
        else:
            set_field(self, "regex", pattern.regex)
        for text in (self.new, self.beside):
            try:
                re.compile(f"{self.regex.pattern}|").sub(self._template(text), "")
            except (re.error, IndexError) as error:
                what = "group" if self.old.startswith("re:") else "wildcard"
                raise ValueError(f"{text!r} has a {what} that {self.old!r} lacks") from error

    def _template(self, text: str) -> str:
        """Return a text as a template of `re`, in which wildcards are groups."""
        if self.old.startswith("re:"):
            return text
        first, *rest = re.split(r"[*?]", text.replace("\\", r"\\"))
        return first + "".join(f"\\g<{number}>{part}" for number, part in enumerate(rest, 1))

    def apply(self, name: str, names: Collection[str]) -> str | None:
        """Return the new name; None if the rule does not match it, or ``beside`` is not there."""
        found = self.regex.search(name)
        if found is None or (self.beside and self._of(found, self.beside) not in names):
            return None
        return self._of(found, self.new)

    def _of(self, found: re.Match[str], text: str) -> str:
        return self.regex.sub(self._template(text), found.string)


def _group(wildcard: str, is_place: bool) -> str:
    """Return a group that matches what a wildcard matches, or itself: names may have brackets."""
    return f"({'' if is_place else '?:'}{translate(wildcard)[4:-3]}|{re.escape(wildcard)})"


def rename(
    rules: Iterable[Rename], names: Collection[str], states: ParameterOfState
) -> Mapping[str, str]:
    """Return the names that change, with their new names.

    Optimizer state has its prefix and the new name of its parameter, and the components of a map
    parameter have its new name.

    Parameters
    ----------
    rules
        The rules, the first ones first.
    names
        All names of the checkpoint.
    states
        Name of a state to name of its parameter.

    Examples
    --------
    >>> rename([Rename("*", "model.*")], ["w", "adam_m.w"], {"adam_m.w": "w"})
    {'w': 'model.w', 'adam_m.w': 'adam_m.model.w'}
    """
    rules = tuple(rules)

    def follow(name: str) -> str:
        tag, parameter = map_of_component(name), _parameter(name, names, states)
        if parameter is not None and (followed := follow(parameter)) != parameter:
            return name.removesuffix(parameter) + followed
        if tag is not None and (followed := follow(tag)) != tag:
            return followed + name.removeprefix(tag)
        return next((new for one in rules if (new := one.apply(name, names)) is not None), name)

    return {name: new for name in names if (new := follow(name)) != name}


def _parameter(name: str, names: Collection[str], states: ParameterOfState) -> str | None:
    """Return the parameter whose state a tensor is; None if it is not state."""
    return states.get(name, parameter_of_value(name, names))


def rename_problems(
    rules: Iterable[Rename],
    names: Collection[str],
    changed: Mapping[str, str],
    where: str,
    all_names: Collection[str],
    states: ParameterOfState,
) -> Iterator[Diagnostic]:
    """Yield the problems of rules that match nothing, and of names that become one or nothing.

    Of the rules of a file some may match nothing, since a file serves many models.

    Parameters
    ----------
    rules
        The rules.
    names
        The names that the outputs may have.
    changed
        Those that change, with their new names.
    where
        What has the names.
    all_names, states
        The names of the checkpoint, and its states; as for `rename`.
    """
    owners = (_parameter(name, all_names, states) for name in names)
    tags = (map_of_component(name) for name in names)
    ruled = dict.fromkeys(one for one in (*names, *owners, *tags) if one is not None)
    groups: dict[object, list[Rename]] = {}
    for rule in rules:
        groups.setdefault(rule.file or rule, []).append(rule)
    for together in groups.values():
        if any(one.apply(name, all_names) is not None for one in together for name in ruled):
            continue
        first = together[0]
        what = f"a rule of {first.file}" if first.file else repr(first.old)
        yield unmatched_problem(what, names, where)
    olds: dict[str, list[str]] = {}
    for name in names:
        olds.setdefault(changed.get(name, name), []).append(name)
    hint = "rules that give each tensor a name of its own"
    if nameless := olds.pop("", None):
        text, facts = f"{count(len(nameless), 'tensor')} would have no name", shorten(nameless, 3)
        yield Diagnostic("options", text, hint=hint, facts=facts, where=where)
    if several := {new: of for new, of in olds.items() if len(of) > 1}:
        number = len(several)
        text = "several tensors would get one name"
        text += f", for each of {number} names" if number > 1 else ""
        facts = "; ".join(f"{new}: {shorten(of, 3)}" for new, of in [*several.items()][:2])
        yield Diagnostic("options", text, hint=hint, facts=facts, where=where)


def parse_renames(given: object) -> Iterator[Rename]:
    """Yield rules from a mapping or pairs of OLD and NEW, or from texts ``OLD=NEW``.

    The last ``=`` separates the two, since a regular expression may have some.

    Raises
    ------
    ValueError
        It is none of these, a text has no ``=``, or a rule is malformed.
    """
    rules = given.items() if isinstance(given, Mapping) else given
    for rule in rules if isinstance(rules, Iterable) and not isinstance(rules, str) else (rules,):
        if isinstance(rule, Rename):
            yield rule
            continue
        pair = rule
        if isinstance(rule, str):
            old, sign, new = rule.rpartition("=")
            if not sign or not old:
                raise ValueError(f"{rule!r} is not OLD=NEW")
            pair = old, new
        match pair:
            case (str(old), str(new)):
                yield Rename(old, new)
            case _:
                text = f'rename={rule!r}, expected rules such as "OLD=NEW" or {{"OLD": "NEW"}}'
                raise ValueError(text)
