r"""New names for tensors: rules that replace names, or parts of them.

A rule is a glob and a name, in which each ``*`` or ``?`` stands for what that of the glob matched:
``model.*.gamma`` and ``*.weight``.  Brackets such as ``[0-3]`` count, too, if the name has more of
these than the glob.  Or it is ``re:``, a regular expression and a text with groups, which replaces
its matches: ``re:^(.*)\.gamma$`` and ``\1.weight``.  The first rule that matches a name counts.

The result is names to new names, and what is wrong with the rules.  That the state and the scale of
a parameter follow it is taken from `ckpttool.model.belonging`; reading files with rules is left to
`ckpttool.strategy_files.rename_files`.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import translate
from functools import cached_property
from itertools import chain

from msgspec import Struct

from ckpttool.lazy import compile_late
from ckpttool.model.belonging import WEIGHT, Belongings
from ckpttool.model.names import map_of_component
from ckpttool.model.patterns import Pattern, unmatched_problem
from ckpttool.problems import Diagnostic
from ckpttool.wording import count, shorten

WANTED = compile_late(r"any|none|same|\d+ names|(n|m|\d+)( x (n|m|\d+))*")  # see `Rename.beside`
_PLACE = compile_late(r"[*?]")
WILDCARD = compile_late(r"\*|\?|\[!?\]?[^\]]*\]")  # of a glob, as `fnmatch` reads it


class Names(dict[str, "tuple[int, ...] | None"]):
    """The names of a checkpoint with the shapes that are known."""

    @cached_property
    def _sorted(self) -> list[str]:
        return sorted(self)

    def has(self, name: str, wanted: str, shape: tuple[int, ...] | None) -> bool:
        """Return whether a name is as a rule for a tensor of a shape wants it."""
        if wanted in ("any", "none"):
            return (name in self) == (wanted == "any")
        if wanted.endswith("names"):
            start, stop = (bisect_left(self._sorted, end) for end in (name, name + "\U0010ffff"))
            return wanted == f"{stop - start} names"
        shape_there = self.get(name)
        if wanted == "same" or shape_there is None:
            return shape_there is not None and shape_there == shape
        sizes = wanted.replace("n", r"\d+").replace("m", r"(?!1\b)\d+")
        return re.fullmatch(sizes, " x ".join(map(str, shape_there))) is not None


class Rename(Struct, frozen=True, dict=True):
    r"""A rule: the names that match ``old``, a glob or a regular expression, become ``new``.

    ``beside`` has names with what is wanted of each; the rule counts only where all are so.
    Wildcards stand for what those of ``old`` matched.  Wanted is ``"any"`` tensor of the name,
    ``"none"``, one of the ``"same"`` shape as the tensor, or of a shape such as ``"n x 1 x m"``: n
    is any size, m more than 1.  ``"4 names"`` wants that so many names begin with it.

    Raises
    ------
    ValueError
        ``old`` is malformed, or ``new`` or ``beside`` has what ``old`` does not match.

    Examples
    --------
    >>> Rename("bn.*.gamma", "norm.*.weight").apply("bn.1.gamma", Names())
    'norm.1.weight'
    >>> Rename(r"re:^layer(\d)", r"blocks.\1").apply("layer3.bias", Names())
    'blocks.3.bias'
    """

    old: str
    new: str
    beside: tuple[tuple[str, str], ...] = ()
    file: str = ""  # the file that has the rule; "" if it is given by itself
    note: str = ""  # what a note says of the tensors that match

    def __post_init__(self) -> None:
        _ = Pattern(self.old)  # which refuses what is malformed
        wildcards = [] if self.regex else WILDCARD.findall(self.old)
        for name in self._new_names:
            try:
                if self.regex:
                    re.compile(f"{self.regex.pattern}|").sub(name, "")
                elif len(_PLACE.findall(name)) > len(wildcards):
                    raise IndexError(name)
            except (re.error, IndexError) as error:
                what = "group" if self.regex else "wildcard"
                raise ValueError(f"{name!r} has a {what} that {self.old!r} lacks") from error

    @cached_property
    def regex(self) -> re.Pattern[str] | None:
        """The regular expression that ``old`` is; None for a glob."""
        return Pattern(self.old).regex if self.old.startswith("re:") else None

    @cached_property
    def pieces(self) -> tuple[str | re.Pattern[str], ...]:
        """The glob in pieces, as `_match_glob` takes them; none for a regular expression."""
        if self.regex:
            return ()
        places = sum(wildcard in "*?" for wildcard in WILDCARD.findall(self.old))
        numbers = (len(_PLACE.findall(name)) for name in self._new_names)
        return tuple(_pieces(self.old, max(numbers) > places))

    @property
    def _new_names(self) -> list[str]:
        return [self.new, *(name for name, _ in self.beside)]

    def apply(self, name: str, names: Names) -> str | None:
        """Return the new name; None if the rule does not match it, or ``beside`` is not there."""
        matched: Sequence[str] | None = ()
        if self.regex is None:
            matched = _match_glob(self.pieces, name)
        elif self.regex.search(name) is None:
            matched = None
        if matched is None or not all(
            names.has(self._of(name, matched, template), wanted, names.get(name))
            for template, wanted in self.beside
        ):
            return None
        return self._of(name, matched, self.new)

    def _of(self, name: str, matched: Sequence[str], template: str) -> str:
        if self.regex is not None:
            return self.regex.sub(template, name)
        first, *rest = _PLACE.split(template)
        return first + "".join(chain(*zip(matched, rest, strict=False)))


def _pieces(glob: str, has_more: bool) -> Iterator[str | re.Pattern[str]]:
    """Yield what stands between the stars of a glob, as a text or a regular expression."""
    literals, wildcards = WILDCARD.split(glob), WILDCARD.findall(glob)
    pattern, is_literal, literal = "", True, ""
    for before, wildcard in zip(literals, [*wildcards, "*"], strict=True):
        pattern, literal = pattern + re.escape(before), literal + before
        if wildcard == "*":
            yield literal if is_literal else re.compile(f"(?s){pattern}")
            pattern, is_literal, literal = "", True, ""
        else:
            pattern, is_literal = pattern + _group(wildcard, has_more or wildcard == "?"), False


def _match_glob(pieces: Sequence[str | re.Pattern[str]], name: str) -> list[str] | None:
    """Return what the wildcards of a glob match, each star as much as it can; None for no match.

    So each piece but the first lies as far to the right as it can, and the time is linear.
    """
    matched: list[str] = []
    stop, last = len(name), len(pieces) - 1
    for number in range(last, -1, -1):
        match = _find_last(pieces[number], name, stop, is_first=not number, is_last=number == last)
        if match is None:
            return None
        start, end, groups = match
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
    last = next(filter(None, (match(name, start, stop) for start in starts)), None)
    return None if last is None else (last.start(), last.end(), last.groups())


def _group(wildcard: str, is_place: bool) -> str:
    # The wildcard may also match itself: names may have brackets.
    return f"({'' if is_place else '?:'}{translate(wildcard)[4:-3]}|{re.escape(wildcard)})"


def rename(rules: Iterable[Rename], names: Names, belongings: Belongings) -> Mapping[str, str]:
    """Return the names that change, with their new names.

    What belongs to a parameter keeps its prefix or suffix and follows the new name of the
    parameter.  So do the components of a map parameter.

    >>> from ckpttool.model.belonging import find_belongings
    >>> names = Names({"w": (2,), "adam_m.w": (2,)})
    >>> rename([Rename("*", "model.*")], names, find_belongings(names, {}))
    {'w': 'model.w', 'adam_m.w': 'adam_m.model.w'}
    """
    rules = tuple(rules)

    def follow(name: str) -> str:
        tag, parameter = map_of_component(name), belongings.get(name, WEIGHT).of
        if parameter is not None and (followed := follow(parameter)) != parameter:
            if name.endswith(parameter):
                return name.removesuffix(parameter) + followed
            return followed + name.removeprefix(parameter)
        if tag is not None and (followed := follow(tag)) != tag:
            return followed + name.removeprefix(tag)
        return next((new for _, new in _matching(rules, name, names)), name)

    return {name: new for name in names if (new := follow(name)) != name}


def _matching(rules: Iterable[Rename], name: str, names: Names) -> Iterator[tuple[Rename, str]]:
    return ((rule, new) for rule in rules if (new := rule.apply(name, names)) is not None)


def rename_notes(
    rules: Iterable[Rename], names: Iterable[str], all_names: Names, belongings: Belongings
) -> Iterator[Diagnostic]:
    """Yield what rules say of the tensors that they match; the parameters are as below."""
    rules, names_of = tuple(rules), dict[str, list[str]]()
    for name in names if any(rule.note for rule in rules) else ():
        rule, new = next(_matching(rules, name, all_names), (None, name))
        if rule and rule.note and belongings.get(name, WEIGHT).of is None:
            names_of.setdefault(rule.note, []).append(name if new == name else f"{name} to {new}")
    for note, of in names_of.items():
        yield Diagnostic("new_names", note, facts=shorten(of, 3))


def rename_problems(
    rules: Iterable[Rename],
    names: Collection[str],
    changed: Mapping[str, str],
    where: str,
    all_names: Names,
    belongings: Belongings,
) -> Iterator[Diagnostic]:
    """Yield the problems of rules that match nothing, and of names that become one or nothing.

    Some rules of a file may match nothing, since a file serves many models.

    Parameters
    ----------
    rules
        The rules.
    names
        The names that the outputs may have.
    changed
        Those that change, with their new names.
    where
        The path of what has the names, for messages.
    all_names, belongings
        The names of the checkpoint, and to what they belong; as for `rename`.
    """
    owners = (belongings.get(name, WEIGHT).of for name in names)
    tags = (map_of_component(name) for name in names)
    ruled = dict.fromkeys(name for name in (*names, *owners, *tags) if name is not None)
    groups: dict[object, list[Rename]] = {}
    for rule in rules:
        groups.setdefault(rule.file or rule, []).append(rule)
    for together in groups.values():
        if any(rule.apply(name, all_names) is not None for rule in together for name in ruled):
            continue
        first = together[0]
        what = f"a rule of {first.file}" if first.file else repr(first.old)
        yield unmatched_problem(what, names, where)
    olds: dict[str, list[str]] = {}
    for name in names:
        olds.setdefault(changed.get(name, name), []).append(name)
    hint = "rules that give each tensor a name of its own"
    if nameless := [name for name in olds.pop("", ()) if name]:  # "" may be its name already
        message = f"{count(len(nameless), 'tensor')} would have no name"
        yield Diagnostic("options", message, hint=hint, facts=shorten(nameless, 3), where=where)
    if several := {new: of for new, of in olds.items() if len(of) > 1}:
        number = len(several)
        message = "several tensors would get one name"
        message += f", for each of {number} names" if number > 1 else ""
        facts = "; ".join(f"{new}: {shorten(of, 3)}" for new, of in [*several.items()][:2])
        yield Diagnostic("options", message, hint=hint, facts=facts, where=where)


def parse_renames(given: object) -> Iterator[Rename]:
    """Yield rules from a mapping or pairs of OLD and NEW, or from texts ``OLD=NEW``.

    The last ``=`` separates the two, since a regular expression may have some.

    Raises
    ------
    ValueError
        The argument is none of these, a text lacks ``=``, or a rule is malformed.
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
                message = f'rename={rule!r}, expected rules such as "OLD=NEW" or {{"OLD": "NEW"}}'
                raise ValueError(message)
