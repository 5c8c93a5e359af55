"""Source files as they are opened: what they are, and that they are still those of the plan.

A path may lead elsewhere in the middle of a run: a link is changed, a folder renamed, a file saved
anew.  So a file is known by what the system says of the one that is open, and each that is opened
later is held against that.  The number of the device is left out: network file systems give every
host another.  Inode numbers they give all hosts alike, and the time of change (ctime) nobody can
set, so two files never agree in all of it.
"""

from __future__ import annotations

import os
from io import FileIO

from ckpttool.errors import PlanError
from ckpttool.model.catalog import SourceStamp


def stamp_of(fd: int) -> SourceStamp:
    """By what an open file is known again."""
    return as_stamp(os.fstat(fd))


def as_stamp(found: os.stat_result) -> SourceStamp:
    """The same of what the system says of a file."""
    return SourceStamp(found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino)


def open_source(path: str, stamp: SourceStamp | None) -> FileIO:
    """A file, open for reading without a buffer.

    Parameters
    ----------
    path, stamp
        The file, and what it was when its header was read; None for one that has none.

    Raises
    ------
    PlanError
        It is another now.
    OSError
        It cannot be opened.
    """
    file = FileIO(path)
    try:
        demand_same(path, stamp_of(file.fileno()), stamp)
    except BaseException:
        file.close()
        raise
    return file


def demand_same(path: str, found: SourceStamp, stamp: SourceStamp | None) -> None:
    """Raise `PlanError` if a file that was opened is not the one that is meant."""
    if stamp not in (None, found):
        reason = "was written to, or the path leads to another file than when its header was read"
        raise PlanError([f"{path}: {reason}; run again"])
