"""An output file that a worker on another host writes, from its header to its last byte.

No two processes ever write the same file.  A worker writes under a name of its own, an attempt; the
run, which holds a claim on the output (the ``.partial`` file, locked), checks one complete attempt
and gives it the final name.  So nothing has to be known of a worker that was given up, for one
because its host lost the network, and that still writes: its task is done again elsewhere, into
another file, and its own is never renamed.  (To let both write the same bytes to the same places
would not do: the cache of a network file system writes whole pages, and what surrounds those bytes
in its page may be older than what the other has written.)

An attempt lasts no longer than the claim.  A worker makes its file first and looks for the claim
then, and again before every stretch that it fills; the run gives up the claim first and removes
the attempts then.  Whoever comes second sees what the first one did.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from ckpttool.errors import CkptToolError, reason_of
from ckpttool.formats import get_format
from ckpttool.formats.reading import is_there
from ckpttool.model.plan import OutputFile
from ckpttool.model.region import Region
from ckpttool.run.fill import TASK_PIECES, Filled, UnitHash, cut_into_tasks, fill
from ckpttool.run.partial import (
    PARTIAL,
    claim,
    clean_up,
    make_folder,
    name_attempt,
    publish,
    remove_attempts,
    reserve,
)
from ckpttool.storage.checksum import Summed, compute_checksum
from ckpttool.storage.locks import TakenError, is_open_as


@dataclass(frozen=True, slots=True)
class FileTask:
    """One output file, to be written by one worker.

    Attributes
    ----------
    claim
        The run's own file; the output is wanted as long as it is there.
    output
        What to write; it has no more slices than it wants, and no pieces, which the worker reckons.
    band_bytes, task_bytes, task_pieces
        See `CopyOptions`.
    """

    claim: str
    output: OutputFile
    band_bytes: int
    task_bytes: int
    task_pieces: int


@dataclass(frozen=True, slots=True)
class Attempt:
    """A file that a worker has written: complete, and on disk.

    Attributes
    ----------
    path
        Its temporary name.
    filled
        What is in it.
    """

    path: str
    filled: Filled

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return self.filled.nbytes


class RemoteFile:
    """The claim on one output; ends with `commit` or `discard`, as a `PartialFile` does.

    Attributes
    ----------
    attempt
        The complete file that a worker has written; None as long as there is none.
    """

    def __init__(self, output: OutputFile) -> None:
        self._output = output
        self._path = Path(output.path + PARTIAL)
        make_folder(self._path.parent)
        self._fd = claim(self._path)
        self.attempt: Attempt | None = None

    def task(self, band_bytes: int, task_bytes: int, task_pieces: int = TASK_PIECES) -> FileTask:
        """What a worker has to do; see `CopyOptions`."""
        tensors = (
            tensor.excerpt(Region.whole(tensor.meta.shape)) for tensor in self._output.tensors
        )
        output = replace(self._output, tensors=tuple(tensors))
        return FileTask(str(self._path), output, band_bytes, task_bytes, task_pieces)

    def commit(self, before: Callable[[int], None], crc: int | None = None) -> int:
        """Give the attempt the output's name; returns its size in bytes.

        Raises
        ------
        VerifyError
            The header does not say what it should.
        OSError
            It is not there or cannot be renamed, or another run has taken over the claim.
        """
        assert self.attempt is not None, "a worker has made it"
        assert crc is None, "and has put the checksum in"
        try:
            if not is_open_as(self._path, self._fd):
                raise TakenError(errno.EEXIST, "another run has taken it", str(self._path))
            nbytes = publish(Path(self.attempt.path), self._output, before)
        except BaseException as error:
            clean_up(error, self.discard)
            raise
        self.discard()
        return nbytes

    def withdraw(self) -> None:
        """Nothing: what workers write has names of its own, and is removed with the claim."""

    def discard(self) -> None:
        """Give up the claim, and remove all attempts that are still there."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            try:
                if is_open_as(self._path, fd):
                    self._path.unlink()
                    remove_attempts(self._path)
            finally:
                os.close(fd)


def write_file(task: FileTask) -> Attempt:
    """Write a whole output file, under a new name; the worker's part.

    Raises
    ------
    CkptToolError
        It cannot be written, or is no longer wanted: names the host.
    """
    path = name_attempt(task.claim)
    try:
        return _write(task, path)
    except BaseException as error:
        Path(path).unlink(missing_ok=True)
        if not isinstance(error, CkptToolError | OSError):
            raise
        what = f"{error.filename}: {reason_of(error)}" if isinstance(error, OSError) else str(error)
        raise CkptToolError(f"on {socket.gethostname()}: {what}") from error


def _write(task: FileTask, path: str) -> Attempt:
    output = task.output
    format = get_format(output.format)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        _demand(task.claim)
        index = format.create(path, output.metas, output.attrs)
        reserve(fd, index.nbytes)
        nbytes = 0
        hashes: list[UnitHash] = []
        sums: list[Summed] = []
        sizes = task.band_bytes, task.task_bytes, task.task_pieces
        for stretch in cut_into_tasks([(output, index)], *sizes):
            _demand(task.claim)
            filled = fill(stretch)
            nbytes += filled.nbytes
            hashes += filled.hashes
            sums += filled.sums
        crc = compute_checksum(index, known=sums) if "crc_num" in index.attrs else None
        format.seal(path, crc)
        os.fsync(fd)  # here, since no other host can: the run only renames it
        return Attempt(path, Filled(nbytes, tuple(hashes)))
    finally:
        os.close(fd)


def _demand(claim: str) -> None:
    if not is_there(claim):
        raise CkptToolError(f"{claim}: is not there (the run has ended, or does not share files)")
