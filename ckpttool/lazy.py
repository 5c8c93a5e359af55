"""Regular expressions that are compiled when they are first used.

A command uses a dozen of the hundred that its modules have, and compiling one takes longer than to
make a class.
"""

from __future__ import annotations

import re
from typing import AnyStr, cast


class _Pattern:
    def __init__(self, *words: object) -> None:
        self._words = words

    def __getattr__(self, name: str) -> object:
        value: object = getattr(re.compile(*self._words), name)  # type: ignore[call-overload]
        setattr(self, name, value)
        return value


def compile_late(text: AnyStr, flags: int = 0) -> re.Pattern[AnyStr]:
    """Return the pattern that `re.compile` makes.

    >>> compile_late("[a-z]+").findall("ab 1 c")
    ['ab', 'c']
    """
    return cast("re.Pattern[AnyStr]", _Pattern(text, flags))
