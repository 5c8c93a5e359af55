"""Output files: staged under a temporary name, locked, synced, and renamed when complete.

An output gets its name when all of it is on disk.  Only the run that has locked the temporary file
writes it.  `ckpttool.storage.region_io` writes the contents, and `ckpttool.transaction` keeps the
record of many outputs.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import os
import re
import stat
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ckpttool.formats import get_format, header_of, read_as
from ckpttool.formats.base import Header, HeaderDigest
from ckpttool.formats.local import (
    ABSENT,
    as_stamp,
    claimed_file,
    describe_os_error,
    open_source,
)
from ckpttool.model.manifest import MANIFEST
from ckpttool.model.plan import OutputFile
from ckpttool.model.tensors import FileIndex, FileStamp, StoredFile, TensorMeta
from ckpttool.problems import Diagnostic, VerifyError, add_note, notes_of
from ckpttool.system import reserve, sync_contents

if TYPE_CHECKING:
    from ckpttool.formats.header_cache import HeaderCache

# Errors of file systems that cannot reserve space or sync a folder, as some network file systems.
UNSUPPORTED = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK, errno.EINVAL, errno.EPERM})


def is_there(path: str | Path) -> bool:
    """Return whether anything has this name, even a broken link.

    A name that this user may not see counts as absent; the user cannot write to it either.

    Raises
    ------
    OSError
        The system cannot tell, as with a disk that has failed.
    """
    if os.access(path, os.F_OK):  # half the time of the next call
        return True
    try:
        os.lstat(path)
    except OSError as error:
        if error.errno in ABSENT or isinstance(error, PermissionError):
            return False
        raise
    return True


class TakenError(OSError):
    """Another run has locked a file, or has replaced it with its own."""


def try_lock(fd: int, kind: int = fcntl.LOCK_EX) -> bool | None:
    """Try to lock an open file; return whether that worked, None on a file system without locks.

    Such systems fail with many errors: ENOLCK, EOPNOTSUPP, EIO, 524 of the kernel's own.
    """
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # EINTR is retried by Python
        return None
    return True


def lock(path: Path, fd: int, tries: int = 1) -> int:
    """Lock an open file and return its descriptor; close it on failure.

    On a file system without locks, only the name of the file protects it.

    Raises
    ------
    TakenError
        Another run has locked or replaced the file.
    """
    try:
        while try_lock(fd) is False:
            tries -= 1
            if not tries:
                raise TakenError(errno.EWOULDBLOCK, "another run is writing it", str(path))
            time.sleep(PAUSE_SECONDS)
        require_name(path, fd)
    except BaseException:
        os.close(fd)
        raise
    return fd


def require_name(path: Path, fd: int) -> None:
    """Raise `TakenError` unless the file at ``path`` is the one that is open as ``fd``."""
    if not is_open_as(path, fd):
        raise TakenError(errno.EEXIST, "another file has its name", str(path))


def is_open_as(path: Path, fd: int) -> bool:
    """Return whether the file at ``path`` is the one that is open as ``fd``."""
    try:
        status = path.stat(follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(status, os.fstat(fd))


ELSEWHERE = "-o with another path"  # hint
NEAR_BYTES = 16 << 10  # zeros between parts of a header; a call takes longer than to write them
HEADER_BUFFER_BYTES = 1 << 20  # of a header that are written at a time
PARTIAL = ".partial"  # suffix of temporary files
ATTEMPT = r"\.[0-9a-f]{16}"  # suffix of an attempt at a file, which `name_attempt` adds
PAUSE_SECONDS, LOOK_TRIES = 0.05, 6  # a check of who writes holds a lock for a moment
OPEN_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW  # of a file that is locked


STUCK = "half-written files could not be removed, which the next run does"


class TemporaryFile:
    """The temporary file of one output, locked; it ends with `discard`.

    With ``left_bytes`` a file of that size that a killed run has left is taken over (``is_left``).
    """

    def __init__(self, output: OutputFile, left_bytes: int | None = None) -> None:
        self._output = output
        self._path = Path(output.path + PARTIAL)
        make_folder(self._path.parent)
        fd = None if left_bytes is None else take_over(self._path, left_bytes)
        self.is_left = fd is not None
        self._fd = claim(self._path) if fd is None else fd

    def remove(self) -> None:
        """Remove the file and all attempts at it, so that no task continues to write them."""
        if self._fd >= 0 and is_open_as(self._path, self._fd):
            self._path.unlink()
            remove_attempts(self._path)

    def discard(self) -> None:
        """Remove the file and release the lock."""
        try:
            self.remove()
        finally:
            self.close()

    def close(self) -> None:
        """Release the lock; the file stays."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)


class PartialFile(TemporaryFile):
    """A temporary file that becomes the output; ends with `rename` or `discard`.

    ``goes_on`` takes over the file that a killed run has left, if it has the right size.  ``index``
    says where the output's tensors are stored in the file.

    Raises
    ------
    TakenError
        Another run is writing the same output.
    OSError
        The file cannot be created, for example because the disk is too small for it.
    """

    def __init__(self, output: OutputFile, *, goes_on: bool = False) -> None:
        super().__init__(output, header_of(output).index.nbytes if goes_on else None)
        try:
            header = header_of(output)
            self.index = create(str(self._path), self._fd, header, is_left=self.is_left)
            self._header = HeaderDigest.of(header)
        except BaseException as error:
            clean_up(error, self.discard)
            raise

    def sync(self) -> None:
        """Let what was written come to the disk."""
        sync_contents(self._fd)

    def seal(self, cache: HeaderCache, crc: int | None = None) -> int:
        """Sync the complete file, verify its header, and return its size in bytes.

        ``crc`` is the checksum to store in the file, if any; for ``cache`` see `verify_header`.

        Raises
        ------
        VerifyError
            The header does not describe the tensors of the output.
        OSError
            The file cannot be synced, or another file has its name.
        """
        get_format(self._output.format).seal(self._fd, crc)
        os.fsync(self._fd)
        require_name(self._path, self._fd)
        self.index = replace(self.index, tensors={})  # they take memory, and are written
        return verify_header(self.index.file, self._output, cache, self._header)

    def rename(self) -> None:
        """Give the sealed file the name of the output, and release the lock."""
        require_name(self._path, self._fd)
        rename_durably(self._path, self._output.path)
        self.close()


def clean_up(error: BaseException, *steps: Callable[[], None]) -> None:
    """Run all steps after a failure, and add a note to the failure if a step fails.

    A failing step does not replace the first failure: both often have the same cause.
    """
    for step in steps:
        try:
            step()
        except OSError:
            if STUCK not in notes_of(error):
                add_note(error, STUCK)


def write_document(path: str, data: bytes | Iterable[bytes]) -> None:
    """Write a small file, or a text in pieces, completely or not at all; create its folder.

    Raises
    ------
    TakenError
        Another run is writing it.
    OSError
        It cannot be written; the error names it.
    """
    partial = Path(path + PARTIAL)
    make_folder(partial.parent)
    with os.fdopen(claim(partial), "wb") as file:
        try:
            file.writelines((data,) if isinstance(data, bytes) else data)
            file.flush()
            os.fsync(file.fileno())
            require_name(partial, file.fileno())
            partial.replace(path)
        except BaseException as error:
            clean_up(error, lambda: partial.unlink(missing_ok=True))
            if isinstance(error, OSError):
                error.filename = path
            raise
    sync_folder(partial.parent)


def remove_document(path: str) -> None:
    """Remove a file if it exists, and sync its folder."""
    try:
        Path(path).unlink()
    except FileNotFoundError:
        return
    sync_folder(Path(path).parent)


def rename_durably(path: Path, target: str) -> None:
    """Rename a synced file within its folder, and sync the folder."""
    path.replace(target)
    sync_folder(path.parent)


def make_folder(folder: Path) -> None:
    """Create a folder and its parents, and sync their names."""
    made = new_folders([folder])
    folder.mkdir(parents=True, exist_ok=True)
    for path in reversed(made):
        sync_folder(path.parent)


def new_folders(folders: Iterable[Path]) -> list[Path]:
    """Return which of the folders and their parents are not there, the deepest first."""
    paths = {path for folder in folders for path in (folder, *folder.parents)}
    return sorted((path for path in paths if not path.exists()), reverse=True)


def remove_empty(folders: Iterable[Path]) -> None:
    """Remove the folders that are empty; if one cannot be removed, it stays."""
    for path in folders:
        with suppress(OSError):
            path.rmdir()


def is_within(folder: Path, name: str) -> bool:
    """Return whether a file of this name is in a folder or below, after links are resolved."""
    parent = os.path.realpath((folder / name).parent)  # Path.resolve fails on links in a circle
    return Path(parent).is_relative_to(os.path.realpath(folder))


def remove_stale(folder: Path, name: str) -> None:
    """Remove the temporary file of a killed run, unless another run is writing it.

    The name comes from a plan, which anybody may have written.  A file outside the folder is
    therefore not removed; a run that writes there replaces it.  Neither is a complete output of
    this name.
    """
    path = folder / name
    if is_within(folder, name) and not is_finished(path):
        with suppress(FileNotFoundError, TakenError):
            _remove_left(path)


def _remove_left(path: Path) -> None:
    """Remove the temporary file of a killed run, and all attempts at it.

    Raises FileNotFoundError if it is not there, and TakenError if another run is writing it.
    """
    fd = lock(path, os.open(path, OPEN_FLAGS))
    try:
        path.unlink()
        remove_attempts(path)
    finally:
        os.close(fd)


def take_over(path: Path, nbytes: int) -> int | None:
    """Lock the file of a killed run and return its descriptor, open for writing.

    Return None if it is not there, has another size, or has another name, too.

    Raises
    ------
    TakenError
        Another run is writing the file.
    """
    try:
        fd = lock(path, os.open(path, OPEN_FLAGS))
    except FileNotFoundError:
        return None
    left = os.fstat(fd)
    if stat.S_ISREG(left.st_mode) and (left.st_size, left.st_nlink) == (nbytes, 1):
        return fd
    os.close(fd)
    return None


def claim(path: Path) -> int:
    """Create an empty, locked file, in place of that of a killed run; return its descriptor.

    Raises
    ------
    TakenError
        Another run is writing the file.
    """
    try:
        return _create(path)
    except FileExistsError:
        try:
            _remove_left(path)
        except FileNotFoundError as error:
            raise TakenError(errno.EWOULDBLOCK, "another run wrote it", str(path)) from error
    try:
        return _create(path)
    except FileExistsError as error:
        raise TakenError(errno.EEXIST, "another run was faster", str(path)) from error


def _create(path: Path) -> int:
    # A file that the system cannot lock is removed again.
    fd = os.open(path, OPEN_FLAGS | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        return lock(path, fd, LOOK_TRIES)
    except TakenError:
        raise
    except BaseException as error:
        clean_up(error, path.unlink)
        raise


def name_attempt(path: str) -> str:
    """Return a new random name for an attempt at the file at ``path``."""
    return f"{path}.{os.urandom(8).hex()}"


def remove_attempts(path: Path) -> None:
    """Remove all attempts at a file, named by `name_attempt`; the file was removed before."""
    for attempt in path.parent.glob(f"{glob.escape(path.name)}.*"):
        if re.fullmatch(ATTEMPT, attempt.name[len(path.name) :]):
            attempt.unlink(missing_ok=True)


def final_name(name: str) -> str | None:
    """Return the name of the output that a file with a temporary name is of; None for others.

    >>> final_name("m.h5.partial"), final_name("m.h5")
    ('m.h5', None)
    """
    match = re.fullmatch(rf"(.+){re.escape(PARTIAL)}({ATTEMPT})?", name, re.DOTALL)
    return None if match is None else match[1]


def is_finished(path: Path) -> bool:
    """Return whether a file is a complete output, with a manifest of its own."""
    return is_there(path.with_name(f"{path.name}.{MANIFEST}"))


def create(path: str, fd: int, header: Header, *, is_left: bool = False) -> FileIndex:
    """Write the header of an output into a file, and reserve the space of the whole.

    A full disk is thus reported before the copy starts.  A file that a killed run has left keeps
    the contents of its tensors.
    """
    if is_left:
        for start, gap in zip(header.starts, header.gaps, strict=True):
            _write_at(fd, start, gap)
    else:
        write_header(fd, header)
    if header.index.nbytes:
        try:
            reserve(fd, header.index.nbytes)
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
    return header.of_file(claimed_file(path, fd))


def write_header(fd: int, header: Header) -> None:
    """Write the header of a new file, with zeros or holes in the place of contents."""
    at, end, near = 0, 0, list[bytes | memoryview]()
    zeros = memoryview(bytes(NEAR_BYTES))
    for start, gap in zip(header.starts, header.gaps, strict=True):
        if start - end > NEAR_BYTES or end - at > HEADER_BUFFER_BYTES:
            _write_at(fd, at, b"".join(near))
            at, near = start, []
        else:
            near.append(zeros[: start - end])
        near.append(gap)
        end = start + len(gap)
    _write_at(fd, at, b"".join(near))
    os.ftruncate(fd, header.index.nbytes)


def _write_at(fd: int, at: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        done = os.pwrite(fd, view, at)
        at, view = at + done, view[done:]


def stamp_at(path: Path) -> FileStamp | None:
    """Return the stamp of the file at ``path``, after links are resolved; None if there is none."""
    try:
        return as_stamp(path.stat())
    except OSError as error:
        if error.errno in ABSENT:
            return None
        raise


def verify_header(
    file: StoredFile, output: OutputFile, cache: HeaderCache, planned: HeaderDigest | None = None
) -> int:
    """Return the size of a file in bytes, after a check of its header.

    A file with the header that was ``planned``, byte by byte, is not parsed.  Neither is one whose
    header equals that of another output, which are in ``cache``.

    Raises
    ------
    VerifyError
        The header does not describe the tensors of the output.
    """
    if planned is not None:
        with open_source(file) as opened:
            if planned.is_in(opened):
                return planned.nbytes
    metas = output.metas
    cache.metas.update((meta.name, meta) for meta in metas)
    index = read_as(output.format, file, cache)
    there = index.header
    if len(there) != len(metas) or not all(
        meta.name in there and there[meta.name].meta == meta for meta in metas
    ):
        expected = {meta.name: meta for meta in metas}
        written = {name: tensor.meta for name, tensor in there.items()}
        problems = [
            f"{name}: expected {_describe(meta)}, found {_describe(written.get(name))}"
            for name in sorted({*expected, *written})
            if (meta := expected.get(name)) != written.get(name)
        ]
        raise VerifyError(output.path, problems)
    return index.nbytes


def _describe(meta: TensorMeta | None) -> str:
    return "nothing" if meta is None else f"{meta.dtype} {meta.header_shape}"


def access_problem(path: Path, mode: int, hint: str = ELSEWHERE) -> Diagnostic | None:
    """Return the problem if this user does not have ``mode`` access to a path, else None.

    A path that does not exist is not a problem.
    """
    if os.access(path, mode) or not os.access(path, os.F_OK):
        return None
    is_read_only = os.statvfs(path).f_flag & os.ST_RDONLY
    number = errno.EROFS if is_read_only else errno.EACCES
    reason = describe_os_error(OSError(number, os.strerror(number), str(path)))
    return Diagnostic("destination", reason, hint=hint, where=str(path))


def sync_folder(folder: Path) -> None:
    """Sync the names in a folder, where the file system supports that."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    except PermissionError:
        return  # a folder may be writable but not readable
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
    finally:
        os.close(fd)
