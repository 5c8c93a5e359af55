"""Locks of the record of a run: who writes, and who may.

A run holds the lock of its log as long as it writes.  It holds that of the record while it begins
and ends, and so does `ckpttool.finalize`: one goes after the other.  The locks are those of
flock(2), which end with the process.  A file may be removed and made again while another run waits
for its lock; so a lock counts only if its path still leads to the locked file.

Some network file systems have no locks.  `FileLock.works` is then False.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from pathlib import Path

from ckpttool.storage.files import (
    LOOK_TRIES,
    PAUSE_SECONDS,
    is_open_as,
    make_folder,
    try_lock,
)

OPEN = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
LOOK_SECONDS = PAUSE_SECONDS * LOOK_TRIES
CLAIM_SECONDS = 60  # parts of an array job begin one after the other, perhaps on a slow disk


class HeldError(OSError):
    """Another run holds a lock."""


def is_held(path: Path) -> bool | None:
    """Return whether a run holds the lock of a file exclusively; None if that cannot be known.

    File systems without locks do not show it.  A file that is not there, or that this user may not
    read, counts as not held.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        fd = os.open(path, flags)
    except OSError as error:
        if error.errno in {errno.ENOENT, errno.EACCES, errno.ELOOP, errno.ENOTDIR}:
            return False
        raise
    try:
        is_free = try_lock(fd, fcntl.LOCK_SH)
    finally:
        os.close(fd)
    return None if is_free is None else not is_free


class FileLock:
    """The lock of one file, which is made if it is not there; ends with `release`, or its context.

    Its folder is made, too.  ``works`` says whether the file system has locks.

    Raises
    ------
    HeldError
        Another run holds the lock.
    OSError
        The file cannot be made or locked.
    """

    def __init__(self, path: Path, seconds: float = LOOK_SECONDS) -> None:
        self.path = path
        self.fd = -1
        self.works = True
        end = time.monotonic() + seconds
        while not self._try():
            if time.monotonic() > end:
                raise HeldError(errno.EWOULDBLOCK, "another run holds it", str(path))
            time.sleep(PAUSE_SECONDS)

    def __enter__(self) -> FileLock:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def _try(self) -> bool:
        """Open and lock the file; return False if it is held, or was removed meanwhile."""
        try:
            make_folder(self.path.parent)
            fd = os.open(self.path, OPEN, 0o666)
        except FileNotFoundError:
            return False  # a run that leaves nothing has just removed the folder
        try:
            is_locked = try_lock(fd)
            if is_locked is not False and is_open_as(self.path, fd):
                self.fd, self.works = fd, is_locked is not None
                return True
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
        return False

    def release(self) -> None:
        """Release the lock."""
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            os.close(fd)
