"""What a person says of parameters by their names: patterns, and how what they match is cut."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fnmatch import translate

from ckpttool.model.catalog import TensorMeta
from ckpttool.model.layout import Layout
from ckpttool.model.notes import Note


@dataclass(frozen=True, slots=True)
class Rule:
    """A pattern of names and one way to cut.

    Attributes
    ----------
    pattern
        A name, or one with ``*`` (any characters), ``?`` (any one) or ``[abc]`` in it.
    layout
        Of the first stage.
    is_open
        True if the tensor may have more axes than the layout, which are undivided.
    stages
        The stages that hold it.
    place
        File and line, for messages.
    """

    pattern: str
    layout: Layout
    is_open: bool
    stages: tuple[int, ...]
    place: str
    _regex: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_regex", re.compile(translate(self.pattern)))

    def matches(self, name: str) -> bool:
        """Whether the rule is for the parameter ``name``.

        Examples
        --------
        >>> rule = Rule("*.weight", Layout((4,), ((0,),)), True, (0,), "")
        >>> rule.matches("moments.weight"), rule.matches("weight")
        (True, False)
        """
        return name == self.pattern or self._regex.match(name) is not None

    def why_not(self, meta: TensorMeta) -> str | None:
        """Why the rule cannot be for a tensor, of which ``meta`` is a slice, or None if it can."""
        axis = len(self.layout.tensor_map) - 1
        if not self.is_open or axis < len(meta.shape) or meta.text is not None:
            return None
        counted = "axes count from 0"
        return f"{meta.name}: {self.place} cuts axis {axis} ({counted}), its shape is {meta.shape}"

    def layouts(self, ndim: int) -> tuple[Layout, ...]:
        """The layouts of a tensor of ``ndim`` axes, one for each stage that holds it."""
        size = len(self.layout.ranks)
        more = ndim - len(self.layout.tensor_map) if self.is_open else 0
        tensor_map = (*self.layout.tensor_map, *((),) * more)
        return tuple(
            replace(self.layout, tensor_map=tensor_map, first_rank=stage * size)
            for stage in self.stages
        )


@dataclass(frozen=True, slots=True)
class Rules:
    """A strategy by hand: the first rule that matches a name decides.

    Attributes
    ----------
    path
        The file it was read from.
    rules
        In the order of the file.
    replicates_rest
        True if all ranks hold the same of what no rule matches; else such names are an error,
        unless another strategy lists parameters, too.
    """

    path: str
    rules: tuple[Rule, ...]
    replicates_rest: bool = False

    def find(self, name: str) -> Rule | None:
        """The rule that decides on ``name``."""
        return next((rule for rule in self.rules if rule.matches(name)), None)

    def notes(self, found: Mapping[str, Rule]) -> tuple[Note, ...]:
        """What to say of rules that decided on none of the names ``found``."""
        used = {rule.pattern for rule in found.values()}
        idle = [f"{rule.pattern} ({rule.place})" for rule in self.rules if rule.pattern not in used]
        if not idle:
            return ()
        text = "patterns that match no parameter, or none that an earlier one leaves"
        return (Note("absent", f"{text}: {', '.join(idle)}"),)
