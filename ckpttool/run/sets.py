"""The files that say what a set of outputs is: manifest, records of parts, journals; who holds it.

The journal of a set is also its lock: a run holds it alone, the runs of parts hold it together.
"""

from __future__ import annotations

import glob
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ckpttool.errors import CkptToolError, FormatError, PlanError
from ckpttool.model.manifest import JOURNAL, Origin
from ckpttool.run.manifest import Listing, opened
from ckpttool.run.partial import remove_stale
from ckpttool.storage.leftovers import PARTIAL
from ckpttool.storage.locks import TakenError, lock, name_of_holder

TRIES, PAUSE_SECONDS = 6, 0.05  # for a lock that somebody has for a moment, to look or to leave


@dataclass(frozen=True, slots=True)
class Place:
    """What a run writes in the end, and what it must not leave beside it.

    Attributes
    ----------
    manifest
        That of the set.
    listing
        The manifest, or the record of a part.
    origin
        The run.
    head
        What the listing says beside its outputs.
    outdated
        Documents of the set, which speak of it as complete.
    outputs
        Paths of what it writes, counted from the manifest's folder.
    """

    manifest: Path
    listing: Path
    origin: Origin
    head: Mapping[str, object]
    outdated: tuple[str, ...] = ()
    outputs: frozenset[str] = frozenset()

    @property
    def is_part(self) -> bool:
        """Whether other runs write to the same set."""
        return self.manifest != self.listing

    def records_of_parts(self) -> list[Path]:
        """Those that this makes outdated: all, or if it is a part those that cannot be beside it.

        These are records of other numbers of parts, and those of another plan that tell of an
        output which this one replaces.
        """
        records = find_records(self.manifest)
        if not self.is_part:
            return records
        ending = self.listing.name[self.listing.name.rindex("-of-") :]
        return [path for path in records if not path.name.endswith(ending) or self._replaces(path)]

    def _replaces(self, record: Path) -> bool:
        """Whether a record is of another plan, and of an output that is this one's, too."""
        mine = json.dumps(self.origin.head_with_times()).removesuffix("}").encode("ascii")
        try:
            with opened(record) as file:
                if file.read(len(mine)) == mine:
                    return False  # without reading all of it: there may be thousands
            return any(one.path in self.outputs for one in Listing.read(record).outputs())
        except FileNotFoundError:
            return False
        except FormatError:
            return True  # it proves nothing

    def journals_of_parts(self) -> list[Path]:
        """Those of parts, if this is none."""
        return [] if self.is_part else find_records(self.manifest, JOURNAL)

    def find_listing(self, path: Path) -> Listing | None:
        """The listing at a path, this run's own or that of its set, if it is of this very run."""
        try:
            listing = Listing.read(path)
        except (FileNotFoundError, CkptToolError):
            return None  # it says nothing, and is replaced only if that is asked for
        head = self.head if path == self.listing else self.origin.head()
        said = {**listing.head.entries, "options": None}
        is_old = any(file.mtime_ns > listing.mtime_ns for file in self.origin.inputs)
        return listing if said == {**head, "options": None} and not is_old else None

    def set_aside(self, journal: Path) -> None:
        """Empty the journal of the set; what a whole run left in it goes where every part looks."""
        aside = journal_of(record_of(self.manifest, 0, 0))
        if journal.stat().st_size and not aside.exists():
            aside.write_bytes(journal.read_bytes())
        os.truncate(journal, 0)


def record_of(manifest: Path, part: object, parts: object) -> Path:
    """The record of a part of a set."""
    return manifest.with_name(f".{manifest.name.removesuffix('.json')}-part-{part}-of-{parts}.json")


def find_records(manifest: Path, suffix: str = "") -> list[Path]:
    """The records of parts that lie beside a manifest, or what has their names and a suffix."""
    pattern = glob.escape(record_of(manifest, "*", "*").name).replace("[*]", "*")
    return sorted(manifest.parent.glob(pattern + suffix))


def remove_stale_records(manifest: Path) -> None:
    """Remove what runs of parts left that were killed while they wrote their records."""
    for path in find_records(manifest, PARTIAL):
        remove_stale(path.parent, path.name)


def find_other_set(folder: Path) -> Path | None:
    """A single file in a folder of which there are records of parts."""
    for path in sorted(folder.glob(".*.ckpttool-part-*.json")):
        return folder / path.name[1 : path.name.rindex(".ckpttool-part-")]
    return None


def journal_of(listing: Path) -> Path:
    """The journal that becomes a listing."""
    return listing.with_name(listing.name + JOURNAL)


def take_lock(path: Path, is_shared: bool = False) -> int:
    """A journal, made if it is not there, and locked.

    Raises
    ------
    PlanError
        Another run has it.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    for left in reversed(range(TRIES)):
        try:
            return lock(path, os.open(path, flags, 0o666), is_shared)
        except TakenError as error:
            if not left:
                raise PlanError([busy_problem(path, name_of_holder(path))]) from error
            time.sleep(PAUSE_SECONDS)
    raise AssertionError("the last try returns or raises")


@contextmanager
def set_locked(manifest: Path) -> Iterator[None]:
    """Hold a set alone for a while; raises `PlanError` if a run is writing it."""
    path = journal_of(manifest)
    fd = take_lock(path)
    try:
        yield
    finally:
        try:
            path.unlink(missing_ok=True)
        finally:
            os.close(fd)


def busy_problem(journal: Path, by: str) -> str:
    """The message that another run writes what a journal belongs to."""
    listing = str(journal).removesuffix(JOURNAL)
    return f"{listing}: another run is writing it ({by}); wait until it ends, or write elsewhere"
