"""The storage of the sources: local files.  Only this module lists, stats and opens them.

Discovery, formats, strategy files and the copy use these functions.  So an object store needs a
second module with these functions, and a choice by the form of a path.  The module lies among the
formats, below `ckpttool.storage`, because codecs open the files whose headers they read, and
imports go down only.  Outputs, locks and the record of a run are on local disks; other modules open
them.  libhdf5 opens HDF5 files itself.

The system names the file in errors of opening but not in errors of reading; `ReadFile` adds the
name.  Python's readers return None for a read that would have to wait (EAGAIN); here it is an
error.

A path may lead to another file in the middle of a run: somebody changes a link, renames a folder or
saves a file again.  So `identify_file` takes the stamp of a file before its header is read, and
each later opening compares the file with it.  The stamp omits the device number, because network
file systems have a different one on each host.  Inode numbers are the same on all hosts, and nobody
can set the time of change (ctime).  So two files never have equal stamps.

An output lacks a stamp while it is written.  Its claim is the device and inode of the file that
this run created.  Each later opening, for reading or writing, compares the file with its claim.
"""

from __future__ import annotations

import errno
import io
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import compress, repeat
from pathlib import Path
from typing import TypeAlias, TypeVar

from msgspec import Struct

from ckpttool.model.tensors import FileId, FileStamp, Reads, StoredFile
from ckpttool.problems import Diagnostic, PlanError, UnreadableError
from ckpttool.system import open_files_limits

# Error numbers of stat if nothing has the name.
ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG})

T = TypeVar("T")
AnyPath: TypeAlias = "str | os.PathLike[str]"


class _Listings(Struct, frozen=True):
    """The folders that were listed, and which paths in them are files and no links."""

    folders: dict[str, list[Path]]
    files: set[Path]


_LISTINGS: ContextVar[_Listings | None] = ContextVar("listings", default=None)


@contextmanager
def listing_once() -> Iterator[None]:
    """List each folder once inside: many kinds of checkpoints are looked for in the same one."""
    token = _LISTINGS.set(_LISTINGS.get() or _Listings({}, set()))
    try:
        yield
    finally:
        _LISTINGS.reset(token)


def list_folder(folder: AnyPath) -> list[Path]:
    """Return the sorted paths of all entries of a folder."""
    known, key = _LISTINGS.get(), os.fspath(folder)
    if known is not None and key in known.folders:
        return [*known.folders[key]]
    parent = Path(folder)
    with os.scandir(parent) as entries:  # names are compared faster than paths
        kinds = sorted((entry.name, entry.is_file(follow_symlinks=False)) for entry in entries)
    paths = [parent / name for name, _ in kinds]
    if known is not None and os.access(parent, os.X_OK):  # else its entries cannot be opened
        known.folders[key] = paths
        known.files.update(compress(paths, (is_plain for _, is_plain in kinds)))
    return [*paths]


def list_readable(folder: AnyPath) -> list[Path]:
    """Return the same; none if the folder, which is not needed, cannot be read."""
    try:
        return list_folder(folder)
    except OSError:
        return []


def find_paths(folder: AnyPath, pattern: str) -> Iterator[Path]:
    """Yield the paths below a folder that match a pattern of ``Path.glob``, in any order."""
    return Path(folder).glob(pattern)


def _as_path(path: AnyPath) -> Path:
    return path if isinstance(path, Path) else Path(path)  # a copy takes as long as `stat`


def _is_listed_file(path: AnyPath) -> bool:
    known = _LISTINGS.get()
    return known is not None and path in known.files


def exists(path: AnyPath) -> bool:
    """Return whether a path leads to a file or a folder; a broken link does not."""
    return _is_listed_file(path) or _as_path(path).exists()


def is_link(path: AnyPath) -> bool:
    """Return whether a path is a symbolic link, which may be broken."""
    return not _is_listed_file(path) and _as_path(path).is_symlink()


def is_file(path: AnyPath) -> bool:
    """Return whether a path leads to a regular file."""
    return _is_listed_file(path) or _as_path(path).is_file()


def is_folder(path: AnyPath) -> bool:
    """Return whether a path leads to a folder."""
    return not _is_listed_file(path) and _as_path(path).is_dir()


def stat_file(path: AnyPath) -> FileStamp:
    """Return the stamp of a file without opening it."""
    return as_stamp(os.stat(path))  # noqa: PTH116 - Path would drop the slash in "file/"


def is_visible(path: AnyPath) -> bool:
    """Return whether a path leads to anything; not below a folder that is closed to this user."""
    return os.access(path, os.F_OK)


def find_file_id(path: AnyPath) -> FileId:
    """Return which file of this host a path leads to, to distinguish inputs from outputs."""
    return _id_of(Path(path).stat())


def _id_of(status: os.stat_result) -> FileId:
    return status.st_dev, status.st_ino


@contextmanager
def named(path: AnyPath) -> Iterator[None]:
    """Add the file's name to system errors without one."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = os.fspath(path)
        raise


_READS: ContextVar[list[int] | None] = ContextVar("reads", default=None)  # bytes of each


@contextmanager
def counting_reads() -> Iterator[Callable[[], Reads]]:
    """Count what this thread reads inside; the context is a function that returns it."""
    sizes: list[int] = []
    token = _READS.set(sizes)
    try:
        yield lambda: Reads(len(sizes), sum(sizes))
    finally:
        _READS.reset(token)


def note_read(*nbytes: int) -> None:
    """Count reads of so many bytes, if this thread counts its reads."""
    sizes = _READS.get()
    if sizes is not None:
        sizes += nbytes


class ReadFile(io.FileIO):
    """A file open for reading, without a buffer; its errors name it."""

    def __init__(self, path: AnyPath, opener: Callable[[str, int], int] | None = None) -> None:
        super().__init__(path, "rb", opener=opener)
        self._path = path

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        """Read into a buffer and return the number of bytes; it may be less than the buffer."""
        with named(self._path):
            nbytes: int | None = super().readinto(buffer)
        got = _require_read(nbytes, self._path)
        note_read(got)
        return got

    def read(self, size: int | None = -1) -> bytes:
        """Return the next bytes, at most ``size``; all of them without it."""
        with named(self._path):
            result: bytes | None = super().read(size)
        data = _require_read(result, self._path)
        note_read(len(data))
        return data

    def pread(self, nbytes: int, offset: int) -> bytes:
        """Return up to ``nbytes`` bytes from ``offset`` on; fewer at the end."""
        try:  # not `named`, which takes longer than the call; a header takes many calls
            data = os.pread(self.fileno(), nbytes, offset)
        except OSError as error:
            error.filename = os.fspath(self._path)
            raise
        note_read(len(data))
        return data

    def preads(self, sizes: Sequence[int], offsets: Sequence[int]) -> list[bytes]:
        """Return what several calls of `pread` return; a header takes many."""
        with named(self._path):
            parts = [*map(os.pread, repeat(self.fileno()), sizes, offsets)]
        note_read(*map(len, parts))
        return parts

    @property
    def size(self) -> int:
        """Number of bytes of the file."""
        return os.fstat(self.fileno()).st_size

    def readall(self) -> bytes:
        """Return the rest of the file."""
        with named(self._path):
            data = _require_read(super().readall(), self._path)
        note_read(len(data))
        return data


def _require_read(result: T | None, path: AnyPath) -> T:
    if result is None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN), os.fspath(path))
    return result


def open_file(path: AnyPath) -> io.BufferedReader:
    """Open a file for reading, with a buffer."""
    return io.BufferedReader(ReadFile(path))


def read_file(path: AnyPath) -> bytes:
    """Return all bytes of a file."""
    with ReadFile(path) as file:
        return file.readall()


# Scheme of an object store -> the command that copies from and to it.
_COPIERS = {
    "s3": "aws s3 cp --recursive",
    "obs": "obsutil cp -r -f",
    "gs": "gsutil cp -r",
    "hdfs": "hdfs dfs -get or -put",
    "oss": "ossutil cp -r",
}


def url_problem(url: str) -> tuple[str, str] | None:
    """Return what a URL is and what to use instead; None for a path.

    Examples
    --------
    >>> url_problem("file:///data/net.ckpt")
    ('a URL (file://), not a path', 'name the file itself, /data/net.ckpt')
    >>> url_problem("runs/net.ckpt")
    """
    match = re.match(r"([A-Za-z][A-Za-z0-9+.-]*)://", url)
    if match is None:
        return None
    scheme = match[1].lower()
    what = f"a URL ({match[0]}), not a path"
    if scheme == "file":
        return what, f"name the file itself, {url[match.end() :]}"
    tool = f" ({_COPIERS[scheme]})" if scheme in _COPIERS else ""
    return what, f"name a path here and copy the files{tool}, or mount the store"


def identify_file(path: str) -> StoredFile:
    """Return a file with its stamp; each later opening compares the file with it.

    The file is opened, because a network file system then asks its server for the stamp.
    """
    with ReadFile(path) as file:
        return StoredFile(path, as_stamp(os.fstat(file.fileno())))


def claimed_file(path: str, fd: int) -> StoredFile:
    """Return the output that is open as ``fd``; each later opening compares the file with it."""
    return StoredFile(path, claimed=_id_of(os.fstat(fd)))


def as_stamp(status: os.stat_result) -> FileStamp:
    """Return the stamp in what the system says of a file."""
    return FileStamp(status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)


def open_descriptor(file: StoredFile, flags: int = os.O_RDONLY) -> int:
    """Open a file, and return its descriptor; see `open_source`."""
    if file.claimed is not None:
        flags |= os.O_NOFOLLOW
    try:
        fd = os.open(file.path, flags | os.O_CLOEXEC)
    except OSError as error:
        if file.claimed is not None and error.errno == errno.ELOOP:
            raise _replaced(file) from error
        raise
    try:
        demand_same(file, fd)
    except BaseException:
        os.close(fd)
        raise
    return fd


def open_source(file: StoredFile) -> ReadFile:
    """Open a file for reading, without a buffer.

    Raises
    ------
    PlanError
        The opened file does not have the stamp, or is not the claimed one.
    OSError
        The file cannot be opened.
    """
    return ReadFile(file.path, lambda path, flags: open_descriptor(file, flags))


def demand_same(file: StoredFile, fd: int) -> FileStamp:
    """Return the stamp of the file that is open as ``fd``; raise `PlanError` if it is another."""
    status = os.fstat(fd)
    if file.claimed not in (None, _id_of(status)):
        raise _replaced(file)
    stamp = as_stamp(status)
    if file.stamp not in (None, stamp):
        facts = "it was written to, or the path leads to another file than when its header was read"
        raise _changed(file, "the file changed during this run", facts)
    return stamp


def _replaced(file: StoredFile) -> PlanError:
    facts = "a link or another file has taken the place of what this run writes"
    return _changed(file, "not the file that this run created", facts)


def _changed(file: StoredFile, message: str, facts: str) -> PlanError:
    hint = "the same command again, when nothing else writes there"
    return PlanError(
        [Diagnostic("changed", message, hint=hint, facts=facts, path=file.path, where=file.path)]
    )


MEANINGS = {  # of system errors whose message says too little
    errno.ENOSPC: "the disk is full",
    errno.EIO: "the disk or its connection fails",
}


def unreadable(path: str, error: OSError) -> UnreadableError:
    """Return the error of a file or a folder that the system cannot open or read."""
    hint = "chmod +rX as the owner, or run as the owner"
    hint = hint if isinstance(error, PermissionError) else more_files_hint(error)
    unreadable_error = UnreadableError(path, None, describe_os_error(error), hint)
    unreadable_error.__cause__ = error
    return unreadable_error


def more_files_hint(error: OSError) -> str:
    """Return the command that lets a process open more files; "" for other errors."""
    if error.errno != errno.EMFILE:
        return ""
    soft, hard = open_files_limits()
    more = max(1024, 4 * soft)
    return f"ulimit -n {min(more, hard) if hard > soft else more}"


def describe_os_error(error: OSError) -> str:
    """Return the system's message of an error, with its meaning, or with owner and mode.

    Examples
    --------
    >>> describe_os_error(OSError(errno.ENOSPC, "No space left on device"))
    'No space left on device (the disk is full)'
    """
    meaning = MEANINGS.get(error.errno or 0, "")
    if isinstance(error, PermissionError) and error.filename is not None:
        meaning = _describe_owner(os.fsdecode(error.filename))  # it may be a Path, or bytes
    return (error.strerror or str(error)) + (f" ({meaning})" if meaning else "")


def _describe_owner(path: str) -> str:
    import pwd

    def name_of(number: int) -> str:
        try:
            return pwd.getpwuid(number).pw_name
        except KeyError:
            return str(number)

    place, where = os.path.abspath(path), ""  # noqa: PTH100
    while True:
        try:
            status = os.stat(place)  # noqa: PTH116
            break
        except OSError:
            if place == "/":
                return ""
            if os.path.islink(place):  # noqa: PTH114 - what it leads to is closed, not its folder
                path = place = os.path.realpath(place)
                continue
            place = os.path.dirname(place)  # noqa: PTH120
            where = f"{os.path.relpath(place)}: " if path[:1] != "/" else f"{place}: "
    mode = f"{status.st_mode & 0o7777:03o}"
    user = name_of(os.geteuid())
    return f"{where}owner {name_of(status.st_uid)}, mode {mode}; this user is {user}"
