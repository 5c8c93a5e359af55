r"""Patterns of names.

A pattern is a glob such as ``*.weight``, in which ``*`` also stands for dots, or ``re:`` and a
regular expression such as ``re:layers\.[0-3]\.``, which may begin and end anywhere in a name.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from fnmatch import translate
from shlex import quote

from ckpttool.model.names import parse_name
from ckpttool.problems import Diagnostic
from ckpttool.wording import count, nearest, shorten


@dataclass(frozen=True, slots=True)
class Pattern:
    """A pattern of names; a name without special characters matches itself.

    A pattern that matches the name of a map parameter matches its keys, values and statuses, too.

    Raises
    ------
    ValueError
        The text is empty, or the regular expression is malformed.

    Examples
    --------
    >>> Pattern("layers.*.weight").matches("layers.0.mlp.weight")
    True
    >>> Pattern("re:^adam_[mv]").matches("adam_m.layers.0.weight")
    True
    >>> Pattern("layers.0.weight").matches("adam_m.layers.0.weight")
    False
    >>> Pattern("emb").matches("emb.__map_keys__")
    True
    """

    text: str
    regex: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        is_regex = self.text.startswith("re:")
        if not self.text.removeprefix("re:"):
            raise ValueError(f"{self.text!r} is not a pattern; * matches all names")
        try:
            regex = re.compile(self.text[3:] if is_regex else rf"\A{translate(self.text)}")
        except re.error as error:
            raise ValueError(f"{self.text!r} is not a regular expression: {error}") from error
        object.__setattr__(self, "regex", regex)

    @property
    def is_pattern(self) -> bool:
        """Whether it may match several names."""
        return self.text.startswith("re:") or not {*"*?["}.isdisjoint(self.text)

    def matches(self, name: str) -> bool:
        """Return whether a name matches."""
        tag = parse_name(name).map
        if tag is not None and self.matches(tag):
            return True
        return name == self.text or self.regex.search(name) is not None


def unmatched_problems(
    option: str, patterns: Iterable[Pattern], names: Collection[str], where: str, before: str = ""
) -> Iterator[Diagnostic]:
    """Yield the problem of each pattern that matches no name, with what was perhaps meant.

    ``option`` takes the patterns, with ``before`` in front; ``where`` is what has the names.
    """
    for pattern in patterns:
        if not any(map(pattern.matches, names)):
            text = f"no tensor matches {pattern.text!r}"
            near = nearest_pattern(pattern, names)
            facts = f"{count(len(names), 'tensor')}: {shorten(names, 3)}"
            hint = f"`ckpttool inspect --all {quote(where)}` lists the names"
            hint = f"{option} {quote(before + near)}" if near else hint
            yield Diagnostic("options", text, hint=hint, facts=facts, where=where)


def nearest_pattern(pattern: Pattern, names: Collection[str]) -> str:
    """Return a near pattern that matches, or a near name, or "".

    It is the pattern with its unknown words replaced by near ones, one that matches inside of
    names, or the same text as a regular expression.
    """
    if pattern.text.startswith("re:"):
        return nearest(pattern.text[3:], names)
    try:
        regex = [Pattern(f"re:{pattern.text}")]
    except ValueError:
        regex = []
    words = dict.fromkeys(word for name in names for word in name.split("."))
    parts = re.split(r"([.*?])", pattern.text)
    near = Pattern("".join(one if one in words else nearest(one, words) or one for one in parts))
    inside = Pattern(f"*{pattern.text}*")
    found = (one.text for one in (near, inside, *regex) if any(map(one.matches, names)))
    return next(found, nearest(pattern.text, names))
