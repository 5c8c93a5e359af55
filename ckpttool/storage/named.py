"""Files that a description names: their headers, and whom it harms if they are not as described."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ckpttool.errors import FormatError
from ckpttool.formats import read_indexes
from ckpttool.model.catalog import FileIndex
from ckpttool.model.notes import Note
from ckpttool.model.strategy import count, shorten

Files = dict[str, FileIndex | None]  # by name; None for a damaged one


def read_named(folder: Path, names: Iterable[str], errors: list[FormatError]) -> Files:
    """The headers of the files of these names that are there.

    What is wrong with those that are damaged is added to ``errors``.
    """
    there = [name for name in names if (folder / name).is_file()]
    files: Files = {}
    for name, index in zip(there, read_indexes(str(folder / n) for n in there), strict=True):
        if isinstance(index, FormatError):
            errors.append(index)
        files[name] = None if isinstance(index, FormatError) else index
    return files


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
                yield f"{fault}, and no other file has these slices of {lost}"

    def notes(self) -> Iterator[Note]:
        """A note if there are others."""
        harmless = [fault for fault in self.harmless if fault and fault not in self.lacking]
        if harmless:
            text = f"{shorten(harmless, 3)}; other files have all of these slices"
            yield Note("replica", text, is_warning=True)
