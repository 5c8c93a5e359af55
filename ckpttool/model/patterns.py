r"""Patterns of names, for options and rules.

A pattern is a glob such as ``*.weight``, in which ``*`` also matches dots, or ``re:`` and a regular
expression.  An expression such as ``re:layers\.[0-3]\.`` matches anywhere in a name.  This module
says what a pattern matches, and words the problem of one that matches nothing.  The caller decides
what a match means.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from fnmatch import translate
from functools import cached_property
from itertools import chain
from shlex import quote

from msgspec import Struct

from ckpttool.model.names import map_of_component
from ckpttool.problems import Diagnostic
from ckpttool.wording import count, shorten


class Pattern(Struct, frozen=True, dict=True):
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

    def __post_init__(self) -> None:
        if not self.text.removeprefix("re:"):
            raise ValueError(f"{self.text!r} is not a pattern; * matches all names")
        try:
            _ = self.regex
        except re.error as error:
            raise ValueError(f"{self.text!r} is not a regular expression: {error}") from error

    @cached_property
    def regex(self) -> re.Pattern[str]:
        """The regular expression, to be searched for in a name."""
        is_regex = self.text.startswith("re:")
        return re.compile(self.text[3:] if is_regex else rf"\A{translate(self.text)}")

    @property
    def is_pattern(self) -> bool:
        """Whether it may match several names."""
        return self.text.startswith("re:") or not {*"*?["}.isdisjoint(self.text)

    def matches(self, name: str) -> bool:
        """Return whether a name matches."""
        tag = map_of_component(name)
        if tag is not None and self.matches(tag):
            return True
        return name == self.text or self.regex.search(name) is not None


def unmatched_problems(
    patterns: Iterable[Pattern],
    names: Collection[str],
    where: str,
    absent: Collection[str] = (),
) -> Iterator[Diagnostic]:
    """Yield the problem of each pattern that matches no name.

    ``where`` is what has the names.  A pattern may also match names that should be there and are
    ``absent``.
    """
    for pattern in patterns:
        if not any(map(pattern.matches, chain(names, absent))):
            yield unmatched_problem(repr(pattern.text), names, where)


def unmatched_problem(what: str, names: Collection[str], where: str) -> Diagnostic:
    """Return the problem of a pattern or rule that matches no name, with the first names there.

    No name is proposed in its place: the nearest one may be another tensor, such as ``qkv_proj``
    for ``q_proj``.
    """
    facts = f"{count(len(names), 'tensor')}: {shorten(names, 3)}"
    hint = f"`ckpttool inspect --all {quote(where)}` lists the names"
    message = f"no tensor matches {what}"
    return Diagnostic("options", message, hint=hint, facts=facts, where=where)


def covering_patterns(
    names: Iterable[str], excluded: Collection[str], most: int
) -> tuple[str, ...]:
    """Return patterns that match all ``names`` and none of ``excluded``, if few are enough.

    A pattern is what several names begin with, perhaps with any numbers, or one name.

    >>> covering_patterns(["layers.0.w", "layers.1.w", "head.w"], ["layers.0.b"], most=2)
    ('layers.*.w', 'head.w')
    """
    folded: list[str] = []
    rest = list(names)
    while rest and len(folded) < most:
        name = rest[0]
        near = (pattern for pattern in _wider(name) if not any(map(pattern.matches, excluded)))
        pattern = next(near, None)
        left = [
            other for other in rest if other != name and not (pattern and pattern.matches(other))
        ]
        folded.append(pattern.text if pattern and len(rest) - len(left) > 1 else name)
        rest = left
    return () if rest else tuple(folded)


def _wider(name: str) -> Iterator[Pattern]:
    heads = [f"{name[: dot.start()]}.*" for dot in re.finditer(r"\.", name)]
    for glob in (*heads, name) if {*"*?[:"}.isdisjoint(name) else ():
        yield Pattern(re.sub(r"(?<![A-Za-z\d])\d+(?=\.)", "*", glob))
        yield Pattern(glob)
