"""Files that are opened for reading: an error names the file, whichever call it comes from.

The system names a file when it is opened, and not when it is read.  Python's readers return None
where a read would have to wait (EAGAIN); here that is an error like any other.
"""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

# What stat says where there is nothing of a name.
ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG})

T = TypeVar("T")


@contextmanager
def named(path: str | os.PathLike[str]) -> Iterator[None]:
    """Add the file's name to an error of the system that has none."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = os.fspath(path)
        raise


class ReadFile(io.FileIO):
    """A file open for reading, without a buffer; its errors name it."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path, "rb")
        self._path = path

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        """Read into a buffer, as much as the system gives."""
        with named(self._path):
            got: int | None = super().readinto(buffer)
            return _given(got, self._path)

    def read(self, size: int | None = -1) -> bytes:
        """Return the next bytes, at most ``size``; all of them without it."""
        with named(self._path):
            data: bytes | None = super().read(size)
            return _given(data, self._path)

    def readall(self) -> bytes:
        """Return the rest of the file."""
        with named(self._path):
            return _given(super().readall(), self._path)

    def pread(self, nbytes: int, offset: int) -> bytes:
        """Return up to ``nbytes`` bytes from ``offset`` on; fewer at the end."""
        try:
            return os.pread(self.fileno(), nbytes, offset)
        except OSError as error:
            error.filename = os.fspath(self._path)
            raise


def _given(found: T | None, path: str | os.PathLike[str]) -> T:
    """What was read; None is a read that would have to wait."""
    if found is None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN), os.fspath(path))
    return found


def open_file(path: str | os.PathLike[str]) -> io.BufferedReader:
    """Open a file for reading, with a buffer."""
    return io.BufferedReader(ReadFile(path))


def read_file(path: str | os.PathLike[str]) -> bytes:
    """Return all bytes of a file."""
    with ReadFile(path) as file:
        return file.readall()


def is_there(path: str | os.PathLike[str]) -> bool:
    """Whether there is something of this name, if only a link that leads nowhere.

    What this user may not look at counts as absent; it cannot be written to either.

    Raises
    ------
    OSError
        The system cannot tell, as with a disk that has failed.
    """
    try:
        os.lstat(path)
    except OSError as error:
        if error.errno in ABSENT or isinstance(error, PermissionError):
            return False
        raise
    return True
