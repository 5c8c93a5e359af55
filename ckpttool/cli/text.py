"""Text from files, made fit for a terminal."""

from __future__ import annotations

import re

LONGEST_WORD = 1024


def printable(text: str) -> str:
    r"""Text for a terminal: what is not printable, such as an escape sequence, is spelled out.

    Of a word that no screen has room for, as names in a file may be, both ends are shown.

    Examples
    --------
    >>> printable("a\x1b[31mb")
    'a\\x1b[31mb'
    >>> len(printable(65536 * "x" + ": no such tensor"))
    633
    """
    if len(text) > LONGEST_WORD:
        text = re.sub(rf"\S{{{LONGEST_WORD},}}", _shorten_word, text)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _shorten_word(found: re.Match[str]) -> str:
    word = found[0]
    return f"{word[:400]}...({len(word) - 600} more)...{word[-200:]}"
