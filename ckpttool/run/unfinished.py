"""What the journal of a run that did not end well says; see `ckpttool.run.journal`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from zlib import crc32

from ckpttool.errors import FormatError
from ckpttool.formats.reading import open_file
from ckpttool.model.catalog import Stamp
from ckpttool.model.manifest import JOURNAL, MANIFEST, Listed, Origin
from ckpttool.run.manifest import Entries, lines_of, opened
from ckpttool.run.partial import stamp_of
from ckpttool.run.sets import find_records, journal_of
from ckpttool.storage.leftovers import PARTIAL

SEAL = " 01234567\n"  # what is behind the text of a line: its CRC-32 in hexadecimal digits


@dataclass(slots=True)
class Unfinished:
    """What the journal of a run that did not end well says.

    Attributes
    ----------
    origin
        The run.
    complete
        Path of each output that was complete, relative to the journal, and whose it is.
    placed
        By what those that got their final names are known again.
    left
        The same of outputs of runs before it, which did not end either and were not gone on from.
    begun
        Paths of the outputs that were begun.
    lines
        First byte of the line of each rank's output, and the byte behind.
    head_end, end
        Byte behind the first line, and behind the last whole one.
    """

    origin: Origin
    complete: dict[str, int] = field(default_factory=dict)
    placed: dict[str, Stamp] = field(default_factory=dict)
    left: dict[str, Stamp] = field(default_factory=dict)
    begun: set[str] = field(default_factory=set)
    lines: dict[int, tuple[int, int]] = field(default_factory=dict)
    head_end: int = 0
    end: int = 0

    def kept(self, folder: Path, proven: Mapping[str, Stamp]) -> dict[str, Stamp]:
        """Outputs of this run that are as it left them, or as they were when they were proven."""
        mine = {name: stamp for name, stamp in proven.items() if name in self.complete}
        return _unchanged(folder, self.placed, mine)

    def untouched(self, folder: Path, proven: Mapping[str, Stamp]) -> dict[str, Stamp]:
        """These, and what earlier runs left, too."""
        return {**_unchanged(folder, self.left), **self.kept(folder, proven)}


def _unchanged(folder: Path, *known: Mapping[str, Stamp]) -> dict[str, Stamp]:
    """The files that are as they are known from one or the other, as they are now."""
    found = {name: stamp_of(folder / name) for of in known for name in of}
    return {
        name: stamp
        for name, stamp in found.items()
        if stamp is not None and any(of.get(name) == stamp for of in known)
    }


def sealed(text: str) -> str:
    """A line of a journal: the text with its CRC-32, which every change of a byte shows in."""
    return f"{text} {crc32(text.encode('ascii')):08x}\n"


def unsealed(line: bytes) -> bytes:
    """The text of a line; raises `ValueError` if it is not as it was written."""
    text = line[: -len(SEAL)]
    if sealed(text.decode("ascii")).encode() != line:
        raise ValueError("a line is not as it was written")
    return text


def read_journal(path: Path) -> Unfinished | None:
    """What a run left behind that did not end well; None if there is nothing.

    Raises
    ------
    FormatError
        The file is no journal of ckpttool.
    OSError
        It cannot be read.
    """
    found: Unfinished | None = None
    try:
        for stop, line in _whole_lines(path):
            if found is None:
                (head,) = line.objects("run")
                found = Unfinished(head.origin(), head_end=stop)
            elif "begun" in line.entries:
                found.begun.add(line.file("begun"))
            elif "left" in line.entries:
                found.left[line.file("left")] = line.stamp()
            elif "placed" in line.entries:
                found.placed[line.file("placed")] = line.stamp()
            else:
                (output,) = line.objects("complete")
                name, rank = output.file("path"), output.number("rank")
                found.placed.pop(name, None)
                found.complete[name] = rank
                found.lines[rank] = found.end, stop
            found.end = stop
    except FileNotFoundError:
        return None
    except (FormatError, ValueError) as error:
        reason = error.reason if isinstance(error, FormatError) else "its first line"
        text = f"not a journal of ckpttool ({reason}); move it away"
        raise FormatError(str(path), None, text) from error
    return found


def origin_in(journal: Path) -> Origin | None:
    """The run whose journal this is, from its first line; None if it cannot be told."""
    try:
        for _, line in _whole_lines(journal):
            (head,) = line.objects("run")
            return head.origin()
    except (FileNotFoundError, FormatError, ValueError):
        pass  # gone, or just being begun
    return None


def journal_that_tells_of(partial: Path) -> Path | None:
    """The journal of a set, one file or a folder, that tells of a temporary file; None if none."""
    output = Path(str(partial).removesuffix(PARTIAL))
    sets = [output.with_name(f"{output.name}.{MANIFEST}")]
    sets += [folder / MANIFEST for folder in output.parents[:2]]
    for manifest in sets:
        for journal in (journal_of(manifest), *find_records(manifest, JOURNAL)):
            try:
                before = read_journal(journal)
            except (FormatError, OSError):
                continue  # nothing is known from it
            if before is not None and os.path.relpath(output, journal.parent) in before.begun:
                return journal
    return None


def listed_in(journal: Path, lines: Iterable[tuple[int, int]]) -> Iterator[Listed]:
    """The outputs that these lines of a journal (first byte, and the byte behind) tell of."""
    with open_file(journal) as file:
        for start, stop in lines:
            file.seek(start)
            text = unsealed(file.read(stop - start))
            (output,) = Entries.parse(journal, text).objects("complete")
            yield output.output()


def _whole_lines(path: Path) -> Iterator[tuple[int, Entries]]:
    """The byte behind every line that is complete, and what it says.

    The last does not count if it is not; of others a power loss leaves none behind that.
    """
    start = 0
    with opened(path) as file:
        for line in lines_of(path, file):
            if not line.endswith(b"\n"):
                return
            try:
                text = unsealed(line)
            except ValueError as error:
                if start and not file.read(1):
                    return
                reason = f"byte {start}: the line is not as it was written"
                raise FormatError(str(path), None, reason) from error
            start += len(line)
            yield start, Entries.parse(path, text)
