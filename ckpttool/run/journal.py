"""The journal of a run, and the listing that it becomes: the manifest, or the record of a part.

A journal lies beside what it becomes, under its name and ``.journal``.  Its first line says what
the run is; then comes a line for every output that is begun, one with the hashes of an output that
is about to get its final name, which is on disk before that, and one that says by what the output
is known again, once it has its name.  A run that is killed leaves it behind, and the same command
with ``--resume`` takes from it which outputs need not be written again: those that are as they were
then (size, times of change), and those that hold what the hashes say.  A line that a power loss cut
short does not count.

It is locked while the run lasts, so that two runs do not write one set at a time; the runs of
parts hold the journal of the set together, and each its own alone.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ckpttool.errors import FormatError, PlanError
from ckpttool.model.catalog import Stamp
from ckpttool.model.manifest import Listed, Origin, differences
from ckpttool.run.manifest import Entries, lines_of, listing_text, output_text
from ckpttool.run.partial import (
    PARTIAL,
    is_open_as,
    lock,
    make_folder,
    remove_document,
    remove_stale,
    stamp_of,
    sync_folder,
    write_document,
)
from ckpttool.run.sets import Place, journal_of, remove_stale_records, take_lock

COMPLETE, END = '{"complete": [', "]}\n"  # around an output in its line


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
    end
        Byte behind the last whole line.
    """

    origin: Origin
    complete: dict[str, int] = field(default_factory=dict)
    placed: dict[str, Stamp] = field(default_factory=dict)
    left: dict[str, Stamp] = field(default_factory=dict)
    begun: set[str] = field(default_factory=set)
    lines: dict[int, tuple[int, int]] = field(default_factory=dict)
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
                found = Unfinished(head.origin())
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


def listed_in(journal: Path, lines: Iterable[tuple[int, int]]) -> Iterator[Listed]:
    """The outputs that these lines of a journal (first byte, and the byte behind) tell of."""
    with journal.open("rb") as file:
        for start, stop in lines:
            file.seek(start)
            (output,) = Entries.parse(journal, file.read(stop - start)).objects("complete")
            yield output.output()


def _whole_lines(path: Path) -> Iterator[tuple[int, Entries]]:
    """The byte behind every line that is complete, and what it says."""
    stop = 0
    with path.open("rb") as file:
        for line in lines_of(path, file):
            if not line.endswith(b"\n"):
                return
            stop += len(line)
            yield stop, Entries.parse(path, line)


class Journal:
    """The journal of a run that is under way; ends with `finish` or `leave`.

    Parameters
    ----------
    place
        Where it is.
    is_resumed
        True to go on with what is there; else it is begun anew, and temporary files that a killed
        run left are removed.
    proven
        Outputs that hold what they should, relative to the journal, and by what they were known.

    Attributes
    ----------
    kept
        Outputs that need not be written, by their paths relative to the journal.

    Raises
    ------
    PlanError
        Another run is writing the same set, or what was left is not of the same run.
    FormatError
        What lies there is no journal.
    OSError
        The file cannot be made.
    """

    def __init__(
        self, place: Place, is_resumed: bool, proven: Mapping[str, Stamp] | None = None
    ) -> None:
        self._place = place
        self._path = journal_of(place.listing)
        self._fds: dict[Path, int] = {}
        self._has_replaced = self._has_left = False
        self._lines: dict[int, tuple[int, int]] = {}  # in the journal, of each rank's output
        self._proven = proven or {}
        self.kept: Mapping[str, Stamp] = {}
        make_folder(self._path.parent)
        try:
            of_set = journal_of(place.manifest)
            self._fds[of_set] = take_lock(of_set, is_shared=place.is_part)
            if place.is_part:
                self._fds[self._path] = take_lock(self._path)
            self._begin(is_resumed)
            sync_folder(self._path.parent)
        except BaseException:
            self._close(remove=False)
            raise

    @property
    def origin(self) -> Origin:
        """The run, as it was when it began."""
        return self._place.origin

    @property
    def listing(self) -> Path:
        """What it becomes."""
        return self._place.listing

    @property
    def folder(self) -> Path:
        """What the paths of outputs are counted from."""
        return self._path.parent

    def begin(self, path: str) -> None:
        """Say that an output is begun, so that what is left of it can be found."""
        begun = json.dumps({"begun": os.path.relpath(path, self.folder)})
        self._append(f"{begun}\n", is_durable=False)

    def add(self, output: Listed) -> None:
        """Say that an output is complete, and about to get its final name."""
        if not self._has_replaced:
            self._remove_outdated()
            self._has_replaced = True
        start = os.lseek(self._fds[self._path], 0, os.SEEK_CUR)
        line = f"{COMPLETE}{output_text(output)}{END}"
        self._append(line)
        self._lines[output.rank] = start, start + len(line)

    def place(self, path: str) -> None:
        """Say that an output has its final name; without this its contents would have to tell."""
        name, stamp = os.path.relpath(path, self.folder), stamp_of(Path(path))
        if stamp is not None:
            self._append(_line_of("placed", name, stamp), is_durable=False)

    def finish(self) -> None:
        """Write the listing, which says that all of it is complete, and remove the journal."""
        lines = (self._output_at(*self._lines[rank]) for rank in sorted(self._lines))
        write_document(str(self._place.listing), listing_text(self._place.head, lines))
        self._close(remove=True)

    def leave(self) -> None:
        """End before all is done; the journal stays if there is something to go on from."""
        self._close(remove=not self._lines and not self._has_left)

    def _begin(self, is_resumed: bool) -> None:
        """Take over what is to be kept, and remove the rest."""
        fd = self._fds[self._path]
        before = read_journal(self._path)
        if before is not None and is_resumed:
            changes = list(differences(self._place.origin, before.origin))
            if changes:
                raise PlanError(resume_problems(self._path, changes))
            self.kept = before.kept(self.folder, self._proven)
            self._lines = before.lines
        left = self._clean(self._path, {})
        if self._place.is_part:  # others hold it, too, so it stays
            of_set = journal_of(self._place.manifest)
            self._clean(of_set, {})
            self._place.set_aside(of_set)
        else:
            remove_stale_records(self._place.manifest)
        for path in self._place.journals_of_parts():
            left = self._clean(path, left)
            path.unlink()
        os.ftruncate(fd, before.end if before is not None and is_resumed else 0)
        os.lseek(fd, 0, os.SEEK_END)
        by = f"process {os.getpid()} on {socket.gethostname()}"
        head = {"by": by, "run": [self._place.origin.head_with_times()]}
        lines = [] if os.fstat(fd).st_size else [head]
        stays = sorted(left.keys() - self.kept.keys())
        text = "".join(f"{json.dumps(line)}\n" for line in lines)
        text += "".join(_line_of("left", name, left[name]) for name in stays)
        text += "".join(_line_of("placed", name, self.kept[name]) for name in sorted(self.kept))
        self._append(text)
        self._has_left = bool(stays)

    def _clean(self, journal: Path, left: Mapping[str, Stamp]) -> dict[str, Stamp]:
        """Remove what a killed run left half-written; what it left whole is added to ``left``."""
        try:
            before = read_journal(journal)
        except FormatError:
            return dict(left)  # not ours to judge, and nothing of it is used
        if before is None:
            return dict(left)
        for name in sorted({*before.begun, *before.complete}):
            remove_stale(self.folder, name + PARTIAL)
        return {**left, **before.untouched(self.folder, self._proven)}

    def _remove_outdated(self) -> None:
        """Before the first output is replaced: what says that the set is complete."""
        place = self._place
        said = (place.manifest, place.listing, *place.outdated, *place.records_of_parts())
        for path in dict.fromkeys(map(str, said)):
            remove_document(path)

    def _output_at(self, start: int, stop: int) -> str:
        with self._path.open("rb") as file:
            file.seek(start)
            line = file.read(stop - start).decode("ascii")
        return line.partition(COMPLETE)[2].removesuffix(END)

    def _append(self, line: str, *, is_durable: bool = True) -> None:
        data = line.encode("ascii")
        fd = self._fds[self._path]
        while data:
            data = data[os.write(fd, data) :]
        if is_durable:
            os.fsync(fd)

    def _close(self, remove: bool) -> None:
        """Give up the locks; the journal of the set, held with others, goes with the last."""
        while self._fds:
            path, fd = self._fds.popitem()
            is_shared = path != self._path
            try:
                if is_shared:
                    remove = True
                    os.close(lock(path, os.dup(fd)))
                if remove and is_open_as(path, fd):
                    path.unlink()
            except BlockingIOError:
                pass  # somebody else holds it
            finally:
                os.close(fd)
        sync_folder(self._path.parent)


def _line_of(kind: str, name: str, stamp: Stamp) -> str:
    return f"{json.dumps({kind: name, **stamp._asdict()})}\n"


def resume_problems(journal: Path, changes: list[str]) -> list[str]:
    """Messages that what a run left is not of this command."""
    first = f"{journal}: --resume: what was left there is of another run"
    return [f"{first}: {change}; without --resume all is written anew" for change in changes]
