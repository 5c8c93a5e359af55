"""The journal of a run, and the listing that it becomes: the manifest, or the record of a part.

A journal lies beside what it becomes, under its name and ``.journal``.  Its first line says what
the run is; then comes a line for every output that is begun, one with the hashes of an output that
is about to get its final name, which is on disk before that, and one that says by what the output
is known again, once it has its name.  A run that is killed leaves it behind, and the same command
with ``--resume`` takes from it which outputs need not be written again: those that are as they were
then (size, times of change), and those that hold what the hashes say.  Every line has a checksum:
a last one that a power loss cut short does not count, another that was changed is an error.

A listing of the same run, of which outputs are gone, is made a journal again.  An output that was
complete before is written again only as it was: a source that was changed meanwhile shows there.

It is locked while the run lasts, so that two runs do not write one set at a time; the runs of
parts hold the journal of the set together, and each its own alone.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from ckpttool.errors import FormatError, PlanError, VerifyError
from ckpttool.formats.reading import is_there, open_file
from ckpttool.model.catalog import Stamp
from ckpttool.model.manifest import JOURNAL, Listed, Origin, differences
from ckpttool.run.manifest import Listing, listing_text, output_text
from ckpttool.run.partial import (
    make_folder,
    remove_document,
    remove_stale,
    stamp_of,
    sync_folder,
    write_document,
)
from ckpttool.run.sets import (
    PAUSE_SECONDS,
    TRIES,
    Place,
    find_records,
    journal_of,
    remove_stale_records,
    take_lock,
)
from ckpttool.run.unfinished import Unfinished, origin_in, read_journal, sealed, unsealed
from ckpttool.storage.leftovers import PARTIAL
from ckpttool.storage.locks import TakenError, holder_of, is_open_as, lock

COMPLETE, END = '{"complete": [', "]}"  # around an output in its line
UNKNOWN = Stamp(0, 0, 0)  # of an output that is not as a run left it; no file has this


class Journal:
    """The journal of a run that is under way; ends with `finish` or `leave`.

    Parameters
    ----------
    place
        Where it is.
    is_resumed
        True to go on with what is there, a journal or a listing; else it is begun anew, and
        temporary files that a killed run left are removed.
    proven
        Outputs that hold what they should, relative to the journal, and by what they were known.

    Attributes
    ----------
    kept
        Outputs that need not be written, by their paths relative to the journal.

    Raises
    ------
    PlanError
        Another run is writing the same set, or a part of another plan to it, or what was left is
        not of the same run.
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
        self._has_replaced = self._has_left = self._is_listed = False
        self._begun: list[str] = []
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
            self._refuse_other_plans()
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

    def begin(self, *paths: str) -> None:
        """Say that outputs are begun, on disk before they are, so that what is left can be told."""
        names = (os.path.relpath(path, self.folder) for path in paths)
        self._append("".join(sealed(json.dumps({"begun": name})) for name in names))
        self._begun += paths

    def add(self, output: Listed) -> None:
        """Say that an output is complete, and about to get its final name.

        Raises
        ------
        VerifyError
            It was complete before, and was not the same.
        """
        before = self._lines.get(output.rank)
        if before is not None and self._output_at(*before) != output_text(output):
            text = "is not what the same run wrote there before; has a source file been changed? "
            text += "Without --resume (--overwrite) all is written anew"
            raise VerifyError(str(self.folder / output.path), [text])
        if not self._has_replaced:
            self._remove_outdated()
            self._has_replaced = True
        self._append_output(output, is_durable=True)

    def place(self, path: str) -> None:
        """Say that an output has its final name; without this its contents would have to tell."""
        name, stamp = os.path.relpath(path, self.folder), stamp_of(Path(path))
        if stamp is not None:
            self._append(_line_of("placed", name, stamp), is_durable=False)

    def finish(self) -> None:
        """Write the listing, which says that all of it is complete, and remove the journal."""
        lines = (self._output_at(*self._lines[rank]) for rank in sorted(self._lines))
        text = listing_text(self._place.head, lines)
        write_document(str(self._place.listing), text, is_dated=True)
        self._close(remove=True)

    def leave(self) -> None:
        """End before all is done; the journal stays if there is something to go on from."""
        needs_none = self._is_listed and not self._has_replaced  # the listing is still there
        is_stuck = any(is_there(path + PARTIAL) for path in self._begun)  # on a failed disk
        is_of_use = self._lines or self._has_left
        self._close(remove=not is_stuck and (needs_none or not is_of_use))

    def _begin(self, is_resumed: bool) -> None:
        """Take over what is to be kept, and remove the rest."""
        before = read_journal(self._path)
        if before is not None and is_resumed:
            changes = list(differences(self._place.origin, before.origin))
            if changes:
                raise PlanError(resume_problems(self._path, changes))
        # It goes before the first output is replaced: while it is there a journal knows no more.
        listing = self._place.find_listing(self.listing) if is_resumed else None
        goes_on = before if is_resumed and listing is None else None
        if goes_on is not None:
            self.kept = goes_on.kept(self.folder, self._proven)
            self._lines = goes_on.lines
        left = self._clean(self._path, {})
        if self._place.is_part:  # others hold it, too, so it stays
            of_set = journal_of(self._place.manifest)
            self._clean(of_set, {})
            self._place.set_aside(of_set)
        else:
            remove_stale_records(self._place.manifest)
        of_parts = self._place.journals_of_parts()
        for path in of_parts:
            left = self._clean(path, left)
        self._start(goes_on, before)
        if listing is not None:
            self._take_over(listing)
        stays = sorted(left.keys() - self.kept.keys())
        text = "".join(_line_of("left", name, left[name]) for name in stays)
        text += "".join(_line_of("placed", name, self.kept[name]) for name in sorted(self.kept))
        self._append(text)
        self._has_left = bool(stays)
        for path in of_parts:
            path.unlink()

    def _refuse_other_plans(self) -> None:
        """Parts of two plans side by side would replace what each other's records tell of.

        Each says first of what plan it is and looks then, so that of two one at least sees it.
        """
        others = find_records(self._place.manifest, JOURNAL) if self._place.is_part else []
        for path in others:
            for left in reversed(range(TRIES)):
                by = None if path == self._path else holder_of(path)
                other = None if by is None else origin_in(path)
                changes = [] if other is None else list(differences(self.origin, other))
                if not changes:
                    break
                if not left:
                    self.leave()
                    text = f"{path}: a part of another plan is being written there ({by})"
                    remedy = "wait until it ends, or write elsewhere"
                    raise PlanError([f"{text}: {change}; {remedy}" for change in changes])
                time.sleep(PAUSE_SECONDS)  # that of an earlier run, it has just begun

    def _start(self, goes_on: Unfinished | None, before: Unfinished | None) -> None:
        """Say in the first line what the run is, unless what goes on says so already.

        At no moment is the journal of a run that did not end empty: that would say that it had.
        """
        fd = self._fds[self._path]
        if goes_on is not None and goes_on.end:
            os.ftruncate(fd, goes_on.end)
        else:
            by = f"process {os.getpid()} on {socket.gethostname()}"
            head = {"by": by, "run": [self._place.origin.head_with_times()]}
            line = sealed(json.dumps(head)).encode("ascii")
            if before is not None:
                os.ftruncate(fd, before.head_end)
            os.pwrite(fd, line, 0)
            os.ftruncate(fd, len(line))
        os.lseek(fd, 0, os.SEEK_END)

    def _take_over(self, listing: Listing) -> None:
        """Go on from a listing: what is as it says is kept.  If nothing is, begin anew."""
        fd, start = self._fds[self._path], os.fstat(self._fds[self._path]).st_size
        kept = {}
        for output in listing.outputs():
            self._append_output(output, is_durable=False)
            stamp = stamp_of(self.folder / output.path)
            is_proven = stamp is not None and self._proven.get(output.path) == stamp
            if stamp is not None and (is_proven or listing.knows(output, stamp)):
                kept[output.path] = stamp
        self.kept, self._is_listed = kept, bool(kept)
        if not kept:
            self._lines = {}
            os.ftruncate(fd, start)
            os.lseek(fd, start, os.SEEK_SET)

    def _clean(self, journal: Path, left: Mapping[str, Stamp]) -> dict[str, Stamp]:
        """Remove what a killed run left half-written; what else is there is added to ``left``."""
        try:
            before = read_journal(journal)
        except FormatError:
            return dict(left)  # not ours to judge, and nothing of it is used
        if before is None:
            return dict(left)
        for name in sorted({*before.begun, *before.complete}):
            remove_stale(self.folder, name + PARTIAL)
        # What was touched since is not ours to replace, but its set stays one that is not whole.
        there = {name: stamp for name, stamp in before.left.items() if self._has(name)}
        there |= {name: UNKNOWN for name in sorted(before.complete) if self._has(name)}
        return {**left, **there, **before.untouched(self.folder, self._proven)}

    def _has(self, name: str) -> bool:
        return is_there(self.folder / name)

    def _remove_outdated(self) -> None:
        """Before the first output is replaced: what says that the set is complete."""
        place = self._place
        said = (place.manifest, place.listing, *place.outdated, *place.records_of_parts())
        for path in dict.fromkeys(map(str, said)):
            remove_document(path)

    def _output_at(self, start: int, stop: int) -> str:
        with open_file(self._path) as file:
            file.seek(start)
            text = unsealed(file.read(stop - start)).decode("ascii")
        return text.removeprefix(COMPLETE).removesuffix(END)

    def _append_output(self, output: Listed, *, is_durable: bool) -> None:
        start = os.lseek(self._fds[self._path], 0, os.SEEK_CUR)
        line = sealed(f"{COMPLETE}{output_text(output)}{END}")
        self._append(line, is_durable=is_durable)
        self._lines[output.rank] = start, start + len(line)

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
            except TakenError:
                pass  # somebody else holds it
            finally:
                os.close(fd)
        sync_folder(self._path.parent)


def _line_of(kind: str, name: str, stamp: Stamp) -> str:
    return sealed(json.dumps({kind: name, **stamp._asdict()}))


def resume_problems(journal: Path, changes: list[str]) -> list[str]:
    """Messages that what a run left is not of this command."""
    first = f"{journal}: --resume: what was left there is of another run"
    return [f"{first}: {change}; without --resume all is written anew" for change in changes]
