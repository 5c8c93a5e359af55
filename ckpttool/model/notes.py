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
        ``"encryption"``, ``"follows"``, ``"format"``, ``"part"``, ``"passed over"``,
        ``"replica"``, ``"step"``, ``"strategy"``, ``"undivided"``, ``"unfinished"``,
        ``"unlisted"``.
    text
        A sentence for people.
    """

    kind: str
    text: str
