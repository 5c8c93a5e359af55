"""Facts found on the way that a person should know; no errors."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Note:
    """One fact, with a kind that programs can rely on.

    Attributes
    ----------
    kind
        One of ``"absent"``, ``"checksum"``, ``"corrected"``, ``"doubt"``, ``"dropped"``,
        ``"encryption"``, ``"follows"``, ``"format"``, ``"ignored"``, ``"older step"``,
        ``"part"``, ``"passed over"``, ``"replica"``, ``"step"``, ``"strategy"``,
        ``"undivided"``, ``"unfinished"``, ``"unlisted"``, ``"zero"``.
    text
        A sentence for people.
    ranks
        Ranks that have no file, or a damaged one, if that is what it says.
    is_warning
        Whether something is not as it should be, or was decided that a person should look at.
    """

    kind: str
    text: str
    ranks: tuple[int, ...] = ()
    is_warning: bool = False
