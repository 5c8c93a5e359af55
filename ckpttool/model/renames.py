r"""New names for tensors: rules that replace names, or parts of them.

A rule is a glob and a name, in which each ``*`` or ``?`` stands for what that of the glob matched:
``model.*.gamma`` and ``*.weight``.  Brackets such as ``[0-3]`` count, too, if the name has more of
these than the glob.  Or it is ``re:``, a regular expression and a text with groups, which replaces
its matches: ``re:^(.*)\.gamma$`` and ``\1.weight``.  The first rule that matches a name counts.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import translate
from itertools import chain
from shlex import quote

from ckpttool.model.names import ParameterOfState, map_of_component, parameter_of_value
from ckpttool.model.patterns import Pattern, nearest_pattern
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
    regex: re.Pattern[str] | None = field(init=False, repr=False, compare=False)  # None: a glob
    pieces: tuple[str | re.Pattern[str], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        pattern = Pattern(self.old)
        is_regex = self.old.startswith("re:")
        set_field(self, "regex", pattern.regex if is_regex else None)
        wildcards = [] if is_regex else _WILDCARD.findall(self.old)
        places = sum(one in "*?" for one in wildcards)
        numbers = [len(_PLACE.findall(text)) for text in (self.new, self.beside)]
        has_more = max(numbers) > places
        set_field(self, "pieces", () if is_regex else tuple(_pieces(self.old, has_more)))
        for text, number in zip((self.new, self.beside), numbers, strict=True):
            try:
                if is_regex:
                    re.compile(f"{pattern.regex.pattern}|").sub(text, "")
                elif number > len(wildcards):
                    raise IndexError(number)
            except (re.error, IndexError) as error:
                what = "group" if is_regex else "wildcard"
                raise ValueError(f"{text!r} has a {what} that {self.old!r} lacks") from error

    def apply(self, name: str, names: Collection[str]) -> str | None:
        """Return the new name; None if the rule does not match it, or ``beside`` is not there."""
        matched: Sequence[str] | None = ()
        if self.regex is None:
            matched = _match_glob(self.pieces, name)
        elif self.regex.search(name) is None:
            matched = None
        if matched is None or (self.beside and self._of(name, matched, self.beside) not in names):
            return None
        return self._of(name, matched, self.new)

    def _of(self, name: str, matched: Sequence[str], text: str) -> str:
        if self.regex is not None:
            return self.regex.sub(text, name)
        first, *rest = _PLACE.split(text)
        return first + "".join(chain(*zip(matched, rest, strict=False)))


def _pieces(glob: str, has_more: bool) -> Iterator[str | re.Pattern[str]]:
    """Yield what stands between the stars of a glob, as a text or a regular expression."""
    literals, wildcards = _WILDCARD.split(glob), _WILDCARD.findall(glob)
    text, is_literal, literal = "", True, ""
    for before, wildcard in zip(literals, [*wildcards, "*"], strict=True):
        text, literal = text + re.escape(before), literal + before
        if wildcard == "*":
            yield literal if is_literal else re.compile(f"(?s){text}")
            text, is_literal, literal = "", True, ""
        else:
            text, is_literal = text + _group(wildcard, has_more or wildcard == "?"), False


def _match_glob(pieces: Sequence[str | re.Pattern[str]], name: str) -> list[str] | None:
    """Return what the wildcards of a glob match, each star as much as it can; None for no match.

    So each piece but the first lies as far to the right as it can, and the time is linear.
    """
    matched: list[str] = []
    stop, last = len(name), len(pieces) - 1
    for number in range(last, -1, -1):
        found = _find_last(pieces[number], name, stop, is_first=not number, is_last=number == last)
        if found is None:
            return None
        start, end, groups = found
        matched[:0] = (*groups, name[end:stop]) if number < last else groups
        stop = start
    return matched


def _find_last(
    piece: str | re.Pattern[str], name: str, stop: int, *, is_first: bool, is_last: bool
) -> tuple[int, int, Sequence[str]] | None:
    """Return the last match of a piece that ends at ``stop`` at most: start, end and its groups."""
    if isinstance(piece, str):
        start = stop - len(piece) if is_last else name.rfind(piece, 0, stop)
        start = 0 if is_first else start
        end = start + len(piece)
        is_found = start >= 0 and name.startswith(piece, start) and end <= stop
        return (start, end, ()) if is_found and (end == stop or not is_last) else None
    match = piece.fullmatch if is_last else piece.match
    starts = (0,) if is_first else range(stop, -1, -1)
    found = next(filter(None, (match(name, start, stop) for start in starts)), None)
    return None if found is None else (found.start(), found.end(), found.groups())


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
        text = f"no tensor matches {first.old!r}"
        hint = f"`ckpttool inspect --all {quote(where)}` lists the names"
        if first.file:
            text = f"no tensor matches a rule of {first.file}"
        elif near := _nearest_rule(first, names):
            hint = f"--rename {quote(near)}"
        facts = f"{count(len(names), 'tensor')}: {shorten(names, 3)}"
        yield Diagnostic("options", text, hint=hint, facts=facts, where=where)
    olds: dict[str, list[str]] = {}
    for name in names:
        olds.setdefault(changed.get(name, name), []).append(name)
    hint = "rules that give each tensor a name of its own"
    if nameless := [name for name in olds.pop("", ()) if name]:  # "" may be its name already
        text, facts = f"{count(len(nameless), 'tensor')} would have no name", shorten(nameless, 3)
        yield Diagnostic("options", text, hint=hint, facts=facts, where=where)
    if several := {new: of for new, of in olds.items() if len(of) > 1}:
        number = len(several)
        text = "several tensors would get one name"
        text += f", for each of {number} names" if number > 1 else ""
        facts = "; ".join(f"{new}: {shorten(of, 3)}" for new, of in [*several.items()][:2])
        yield Diagnostic("options", text, hint=hint, facts=facts, where=where)


def _nearest_rule(rule: Rename, names: Collection[str]) -> str:
    """Return a rule that matches and was perhaps meant, or ""."""
    near = nearest_pattern(Pattern(rule.old), names)
    is_inside = near.startswith("*") and not rule.old.startswith("*")
    new = f"*{rule.new}*" if is_inside else rule.new  # keeps the rest
    is_other_kind = near.startswith("re:") != rule.old.startswith("re:")
    if is_other_kind and re.search(r"[*?\\]", new):
        return ""  # the places of the one are texts in the other
    try:
        Rename(near, new)
    except ValueError:
        return ""
    return f"{near}={new}"


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
