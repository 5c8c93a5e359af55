"""The storage of the sources: local files.  Only this module lists, stats and opens them.

Discovery, the formats, strategy files and the copy all come through these functions, so that a
store of objects can be added here: a second module with the same functions, and a choice by the
form of a path.  The storage lies among the formats, below `ckpttool.storage`, because codecs open
the files whose headers they read, and imports go down only.  Outputs, locks and the record of a run
are on local disks and do not come here.  libhdf5 opens HDF5 files itself.

The system names a file in errors of opening and not in errors of reading; `ReadFile` adds the name.
Python's readers return None where a read would have to wait (EAGAIN); here that is an error.

A path may lead elsewhere in the middle of a run: a link is changed, a folder renamed, a file saved
again.  So a file that is opened again is compared with the stamp that it had when its header was
read.  The stamp has no device number: with network file systems that differs between hosts.  Inode
numbers are the same on all hosts, and nobody can set the time of change (ctime).  So two files
never have equal stamps.
"""

from __future__ import annotations

import errno
import io
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias, TypeVar

from ckpttool.errors import PlanError
from ckpttool.model.diagnostics import Diagnostic
from ckpttool.model.tensors import FileStamp

# Error numbers of stat for a name that does not exist.
ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG})

T = TypeVar("T")
AnyPath: TypeAlias = "str | os.PathLike[str]"


def list_folder(folder: AnyPath) -> list[Path]:
    """Return the paths of everything in a folder, sorted."""
    return sorted(Path(folder).iterdir())


def find_paths(folder: AnyPath, pattern: str) -> Iterator[Path]:
    """Yield the paths below a folder that match a pattern of ``Path.glob``, in any order."""
    return Path(folder).glob(pattern)


def exists(path: AnyPath) -> bool:
    """Return whether a path leads to anything; a broken link does not."""
    return Path(path).exists()


def is_link(path: AnyPath) -> bool:
    """Return whether a path is a symbolic link, which may be broken."""
    return Path(path).is_symlink()


def is_file(path: AnyPath) -> bool:
    """Return whether a path leads to a regular file."""
    return Path(path).is_file()


def is_folder(path: AnyPath) -> bool:
    """Return whether a path leads to a folder."""
    return Path(path).is_dir()


def stat_file(path: AnyPath) -> FileStamp:
    """Return the stamp of a file without opening it."""
    return _as_stamp(Path(path).stat())


@contextmanager
def named(path: AnyPath) -> Iterator[None]:
    """Add the file's name to an error of the system that has none."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = os.fspath(path)
        raise


class ReadFile(io.FileIO):
    """A file open for reading, without a buffer; its errors name it."""

    def __init__(self, path: AnyPath) -> None:
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


def _given(found: T | None, path: AnyPath) -> T:
    """Return what was read; raise if it is None, as of a read that would have to wait."""
    if found is None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN), os.fspath(path))
    return found


def open_file(path: AnyPath) -> io.BufferedReader:
    """Open a file for reading, with a buffer."""
    return io.BufferedReader(ReadFile(path))


def read_file(path: AnyPath) -> bytes:
    """Return all bytes of a file."""
    with ReadFile(path) as file:
        return file.readall()


# Scheme of a store that has checkpoints -> the command that copies from and to it.
_COPIERS = {
    "s3": "aws s3 cp --recursive",
    "obs": "obsutil cp -r -f",
    "gs": "gsutil cp -r",
    "hdfs": "hdfs dfs -get or -put",
    "oss": "ossutil cp -r",
}


def why_not_a_path(text: str) -> str | None:
    """Return why a URL in the place of a path is refused, and what to do; None for a path.

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
    tool = f" ({_COPIERS[scheme]})" if scheme in _COPIERS else ""
    return f"{what}: name a path here and copy the files{tool}, or mount the store"


def stamp_of(fd: int) -> FileStamp:
    """Return the stamp of an open file."""
    return _as_stamp(os.fstat(fd))


def _as_stamp(found: os.stat_result) -> FileStamp:
    return FileStamp(found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino)


def open_descriptor(path: str, stamp: FileStamp | None) -> int:
    """Open a file for reading, and return its descriptor; see `open_source`."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        demand_same(path, stamp_of(fd), stamp)
    except BaseException:
        os.close(fd)
        raise
    return fd


def open_source(path: str, stamp: FileStamp | None) -> ReadFile:
    """Open a file for reading, without a buffer.

    Parameters
    ----------
    path, stamp
        The file, and its stamp when its header was read; None to compare with nothing.

    Raises
    ------
    PlanError
        It is another file now.
    OSError
        It cannot be opened.
    """
    file = ReadFile(path)
    try:
        demand_same(path, stamp_of(file.fileno()), stamp)
    except BaseException:
        file.close()
        raise
    return file


def demand_same(path: str, found: FileStamp, stamp: FileStamp | None) -> None:
    """Raise `PlanError` if the stamp of an opened file is not the expected one."""
    if stamp not in (None, found):
        reason = "was written to, or the path leads to another file than when its header was read"
        raise PlanError([Diagnostic("changed", f"{path}: {reason}; run again")])
