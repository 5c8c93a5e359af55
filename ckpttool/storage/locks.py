"""Who is writing a file at this moment: whoever has it locked.

A run of ckpttool locks what it writes and the journal of its set; a run that was killed holds no
lock any more.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
from pathlib import Path

# What a file system says that cannot lock a file or reserve space, as some network ones.
UNSUPPORTED = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK, errno.EINVAL})


class TakenError(OSError):
    """Another run has a file, or has put its own in the place of ours."""


def lock(path: Path, fd: int, is_shared: bool = False) -> int:
    """Lock an open file; where the file system knows no locks its name alone has to do.

    It is closed if that fails: a `TakenError` if another run has it.
    """
    try:
        try:
            fcntl.flock(fd, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise TakenError(error.errno, "another run is writing it", str(path)) from error
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
        if not is_open_as(path, fd):
            raise TakenError(errno.EWOULDBLOCK, "another run has taken it", str(path))
    except BaseException:
        os.close(fd)
        raise
    return fd


def lock_holder(path: Path) -> str | None:
    """Who is writing what a journal becomes; None if nobody is."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    try:
        os.close(lock(path, fd, is_shared=True))
    except TakenError:
        return name_lock_holder(path)
    return None


def name_lock_holder(path: Path) -> str:
    """Who writes, or wrote, a journal, as its first line says."""
    try:
        with path.open("rb") as file:
            return str(json.loads(file.readline(1 << 16).rpartition(b" ")[0])["by"])
    except (OSError, ValueError, TypeError, LookupError, RecursionError):
        return "with --part, or it has just begun"


def is_open_as(path: Path, fd: int) -> bool:
    """Whether the file at ``path`` is the one that is open as ``fd``."""
    try:
        there = path.stat(follow_symlinks=False)
    except FileNotFoundError:
        return False
    here = os.fstat(fd)
    return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)
