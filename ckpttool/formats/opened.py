"""Source files as they are opened: what they are, and that they are still those of the plan.

Paths are those of this system; what has a scheme (``s3://``) names a place that is not read.

A path may lead elsewhere in the middle of a run: a link is changed, a folder renamed, a file saved
anew.  So a file is known by what the system says of the one that is open, and each that is opened
later is held against that.  The number of the device is left out: network file systems give every
host another.  Inode numbers they give all hosts alike, and the time of change (ctime) nobody can
set, so two files never agree in all of it.
"""

from __future__ import annotations

import os
import re
from io import FileIO

from ckpttool.errors import PlanError
from ckpttool.model.catalog import SourceStamp

# What copies from and to the stores that checkpoints lie in.
COPIERS = {
    "s3": "aws s3 cp --recursive",
    "obs": "obsutil cp -r -f",
    "gs": "gsutil cp -r",
    "hdfs": "hdfs dfs -get or -put",
    "oss": "ossutil cp -r",
}


def why_not_a_path(text: str) -> str | None:
    """Why a URL in the place of a path is refused, and what to do; None for all else.

    Examples
    --------
    >>> why_not_a_path("file:///data/net.ckpt")
    'a URL (file://), not a path: name the file itself, /data/net.ckpt'
    >>> why_not_a_path("runs/net.ckpt")
    """
    match = re.match(r"([A-Za-z][A-Za-z0-9+.-]*)://", text)
    if match is None:
        return None
    scheme = match[1].lower()
    what = f"a URL ({match[0]}), not a path"
    if scheme == "file":
        return f"{what}: name the file itself, {text[match.end() :]}"
    tool = f" ({COPIERS[scheme]})" if scheme in COPIERS else ""
    return f"{what}: only mounted file systems are read and written; copy it{tool}, or mount it"


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
