r"""Which tensors of a checkpoint are wanted, and in what form.

A pattern is a glob such as ``*.weight``, in which ``*`` also stands for dots, or ``re:`` and a
regular expression such as ``re:layers\.[0-3]\.``, which may begin and end anywhere in a name.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from fnmatch import translate
from shlex import quote

from ckpttool.problems import Diagnostic
from ckpttool.wording import count, nearest, shorten


@dataclass(frozen=True, slots=True)
class Pattern:
    """A pattern of names; a name without special characters matches itself.

    Raises
    ------
    ValueError
        The regular expression is malformed.

    Examples
    --------
    >>> Pattern("layers.*.weight").matches("layers.0.mlp.weight")
    True
    >>> Pattern("re:^adam_[mv]").matches("adam_m.layers.0.weight")
    True
    >>> Pattern("layers.0.weight").matches("adam_m.layers.0.weight")
    False
    """

    text: str
    regex: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        is_regex = self.text.startswith("re:")
        try:
            regex = re.compile(self.text[3:] if is_regex else rf"\A{translate(self.text)}")
        except re.error as error:
            raise ValueError(f"{self.text!r} is no regular expression: {error}") from error
        object.__setattr__(self, "regex", regex)

    def matches(self, name: str) -> bool:
        """Return whether a name matches."""
        return name == self.text or self.regex.search(name) is not None


def unmatched(
    option: str, patterns: Iterable[Pattern], names: Collection[str], where: str
) -> Iterator[Diagnostic]:
    """Yield the problem of each pattern that matches no name, with what was perhaps meant.

    ``option`` takes the patterns, and ``where`` is what has the names.
    """
    for pattern in patterns:
        if not any(map(pattern.matches, names)):
            text = f"no tensor matches {pattern.text!r}"
            near = _nearest(pattern, names)
            facts = f"{count(len(names), 'tensor')}: {shorten(names, 3)}"
            hint = f"{option} {quote(near)}" if near else "`ckpttool inspect --all` lists the names"
            yield Diagnostic("options", text, hint=hint, facts=facts, where=where)


def _nearest(pattern: Pattern, names: Collection[str]) -> str:
    """Return the pattern with its unknown words replaced by near ones, or a near name, or ""."""
    if pattern.text.startswith("re:"):
        return nearest(pattern.text[3:], names)
    words = dict.fromkeys(word for name in names for word in name.split("."))
    parts = re.split(r"([.*?])", pattern.text)
    near = Pattern("".join(one if one in words else nearest(one, words) or one for one in parts))
    if any(map(near.matches, names)):
        return near.text
    return nearest(pattern.text, names)


@dataclass(frozen=True, slots=True)
class TensorOptions:
    """Which tensors are wanted.

    Attributes
    ----------
    include, exclude
        Patterns of names: wanted is what matches any of ``include`` (everything, without any) and
        none of ``exclude``, in whatever order they are given.
    weights_only
        Leave out optimizer state, accumulated gradients, master copies and counters.
    shown_by
        The option that takes ``include``, of a command that only looks at these tensors; "" for
        a command that leaves out the others.

    Raises
    ------
    ValueError
        A regular expression is malformed.

    Examples
    --------
    >>> TensorOptions(exclude=["adam_*"]).excluded
    (Pattern(text='adam_*'),)
    """

    include: Collection[str] = ()
    exclude: Collection[str] = ()
    weights_only: bool = False
    shown_by: str = ""
    included: tuple[Pattern, ...] = field(init=False, repr=False, compare=False)
    excluded: tuple[Pattern, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, compiled in (("include", "included"), ("exclude", "excluded")):
            given: Collection[str] = getattr(self, name)
            patterns = (given,) if isinstance(given, str) else tuple(given)
            object.__setattr__(self, name, patterns)
            object.__setattr__(self, compiled, tuple(map(Pattern, patterns)))

    @property
    def are_all_wanted(self) -> bool:
        """Whether no tensor is left out."""
        return not (self.include or self.exclude or self.weights_only)

    def choose(self, names: Iterable[str], training: Collection[str]) -> frozenset[str]:
        """Return the wanted names; ``training`` are those that are no weights."""
        return frozenset(
            name
            for name in names
            if not self.included or any(one.matches(name) for one in self.included)
            if not any(one.matches(name) for one in self.excluded)
            if not (self.weights_only and name in training)
        )

    def unmatched(self, names: Collection[str], where: str) -> Iterator[Diagnostic]:
        """Yield the problems of patterns that match nothing."""
        yield from unmatched(self.shown_by or "--include", self.included, names, where)
        yield from unmatched("--exclude", self.excluded, names, where)
