"""Files that are not what a description says, and whom it harms."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from ckpttool.model.notes import Note
from ckpttool.model.strategy import count, shorten


@dataclass(slots=True)
class Faults:
    """What is wrong with files, in words, and the tensors that lack slices for it.

    A fault is harmless if other files have all that should be there.  An empty fault is one that
    has a message of its own.
    """

    lacking: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    harmless: dict[str, None] = field(default_factory=dict)

    def blame(self, faults: Iterable[str], name: str) -> None:
        """These are why slices of a tensor are missing."""
        for fault in dict.fromkeys(faults):
            self.lacking[fault].append(name)

    def excuse(self, faults: Iterable[str]) -> None:
        """These took nothing away."""
        self.harmless |= dict.fromkeys(faults)

    def problems(self) -> Iterator[str]:
        """A message for every fault that takes something away."""
        for fault, names in self.lacking.items():
            if fault:
                lost = f"{count(len(names), 'parameter')}: {shorten(names)}"
                yield f"{fault}, and no other file has it: {lost}"

    def notes(self) -> Iterator[Note]:
        """A note if there are others."""
        harmless = [fault for fault in self.harmless if fault and fault not in self.lacking]
        if harmless:
            text = f"{shorten(harmless, 3)}; other files have all of these slices"
            yield Note("replica", text)
