"""Which tensors of a checkpoint are wanted, and in what form."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from ckpttool.model.patterns import Pattern, unmatched_problems
from ckpttool.model.renames import Rename, parse_renames
from ckpttool.problems import Diagnostic


@dataclass(frozen=True, slots=True)
class TensorOptions:
    """Which tensors are wanted, and under which names.

    Attributes
    ----------
    include, exclude
        Patterns of names: wanted is what matches any of ``include`` (everything, without any) and
        none of ``exclude``, in whatever order they are given.
    weights_only
        Leave out optimizer state, accumulated gradients, master copies and counters.
    rename
        Rules for new names, the first that matches counts: a mapping of patterns to names, or texts
        such as ``"OLD=NEW"``; see `ckpttool.model.renames`.
    shown_by
        The option that takes ``include``, of a command that only looks at these tensors; "" for
        a command that leaves out the others.

    Raises
    ------
    ValueError
        A regular expression or a rule is malformed.

    Examples
    --------
    >>> TensorOptions(exclude=["adam_*"]).excluded
    (Pattern(text='adam_*'),)
    """

    include: Collection[str] = ()
    exclude: Collection[str] = ()
    weights_only: bool = False
    rename: Mapping[str, str] | Collection[str | Rename] = ()
    shown_by: str = ""
    included: tuple[Pattern, ...] = field(init=False, repr=False, compare=False)
    excluded: tuple[Pattern, ...] = field(init=False, repr=False, compare=False)
    renames: tuple[Rename, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, compiled in (("include", "included"), ("exclude", "excluded")):
            given: Collection[str] = getattr(self, name)
            patterns = (given,) if isinstance(given, str) else tuple(given)
            object.__setattr__(self, name, patterns)
            object.__setattr__(self, compiled, tuple(map(Pattern, patterns)))
        object.__setattr__(self, "renames", tuple(parse_renames(self.rename)))

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
        yield from unmatched_problems(self.shown_by or "--include", self.included, names, where)
        yield from unmatched_problems("--exclude", self.excluded, names, where)
