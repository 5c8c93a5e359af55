"""Workers on other hosts: checked before the first byte, then given whole output files.

They share the files with this process, and nothing else.  Every worker first reports whether it
sees the inputs and the output folder, and which version it runs.

No two processes ever write the same file.  A worker writes under a name of its own, an attempt; the
run, which holds a claim on the output (the ``.partial`` file, locked), checks one complete attempt
and gives it the final name.  A worker that was given up, because its host lost the network, may
still write: its task is done again elsewhere, into another file, and its own file is never renamed.
(Two writers of the same bytes to the same places would not do: the cache of a network file system
writes whole pages, and the bytes around those in its page may be older than what the other has
written.)

An attempt lasts no longer than the claim.  A worker makes its file first and checks the claim then,
and again before every task that it fills; the run gives up the claim first and removes the
attempts then.  Whoever comes second sees what the first one did.
"""

from __future__ import annotations

import errno
import os
import platform
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Executor, Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from ckpttool._version import __version__
from ckpttool.concurrency import Threads
from ckpttool.errors import CkptToolError, EngineError, PlanError, describe_os_error
from ckpttool.execution.copy import TASK_PIECES, Filled, UnitHash, cut_into_tasks, fill
from ckpttool.formats import get_format
from ckpttool.formats.local import identify_file
from ckpttool.model.diagnostics import Diagnostic
from ckpttool.model.plan import OutputFile, Plan
from ckpttool.model.region import Region
from ckpttool.model.tensors import StoredFile
from ckpttool.storage.checksums import CrcExtent, compute_checksum
from ckpttool.storage.files import (
    PARTIAL,
    TakenError,
    claim,
    clean_up,
    is_open_as,
    is_there,
    make_folder,
    name_attempt,
    publish,
    remove_attempts,
    reserve,
)

A = TypeVar("A")
T = TypeVar("T")

PAUSES = (0.0, 0.5, 1.5, 3.0)  # seconds; a network file system may show a new file late
CHECK_SECONDS = 0.2  # how long a request to end the run may go unnoticed
ANSWER_SECONDS = 60  # for all workers to answer; they look at files that may be slow to appear


class Cluster(Executor):
    """An executor whose workers may be on other hosts.

    Attributes
    ----------
    name
        The word that it was opened with.
    """

    name: str

    @property
    def width(self) -> int:
        """Number of calls that all workers run at a time."""
        raise NotImplementedError

    @property
    def threads(self) -> int:
        """Most calls that one worker runs at a time."""
        return 1

    def ask(self, function: Callable[[A], T], argument: A) -> Mapping[str, T | BaseException]:
        """Return the answer of each worker to one call or its exception, by host and address."""
        raise NotImplementedError

    def watch(self) -> None:
        """Raise `EngineError` if the cluster is lost; called several times a second."""
        raise NotImplementedError

    def _explain(self, error: BaseException) -> BaseException:
        """Translate an error of the cluster's own; return any other as it is."""
        raise NotImplementedError

    def _pass_on(self, remote: Future[T]) -> Future[T]:
        """Return a future with the outcome of ``remote`` and explained errors."""
        local: Future[T] = Future()

        def settle(done: Future[T]) -> None:
            if not local.set_running_or_notify_cancel():
                return
            error = CancelledError() if done.cancelled() else done.exception()
            if error is not None:
                local.set_exception(self._explain(error))
            else:
                local.set_result(done.result())

        remote.add_done_callback(settle)
        local.add_done_callback(lambda _: remote.cancel() if local.cancelled() else None)
        return local


@dataclass(frozen=True, slots=True)
class WorkerRequirements:
    """What a worker must have: this version, the same files, and a folder to write to.

    Attributes
    ----------
    version, python
        From `software`, of the run.
    files
        Every file, with its stamp as the run sees it.
    folder
        The folder of the outputs.
    """

    version: str
    python: str
    files: tuple[StoredFile, ...]
    folder: str


def software() -> tuple[str, str]:
    """Return the version of this package, and that of Python without its last number."""
    return __version__, ".".join(platform.python_version_tuple()[:2])


def check_worker(required: WorkerRequirements) -> tuple[str, ...]:
    """Return the problems of the worker that this runs on; empty if it may work."""
    version, python = software()
    if (version, python) != (required.version, required.python):
        here = f"this run is ckpttool {required.version} on Python {required.python}"
        there = f"ckpttool {version} on Python {python}"
        return (f"has {there}, and {here}; install the same on all hosts",)
    unseen = list(required.files)
    for pause in PAUSES:
        time.sleep(pause)
        unseen, reasons = _unseen(unseen)
        if not unseen:
            break
    problems = []
    if unseen:
        more, total = len(unseen) - 1, len(required.files)
        others = f", nor {more} more of {total} files" if more else ""
        problems.append(
            f"does not see {unseen[0].path} as this host does ({reasons[0]}){others}; "
            "inputs and outputs must be on a file system that all hosts share"
        )
    elif not os.access(required.folder, os.W_OK | os.X_OK):
        problems.append(f"has no permission to write to {required.folder}")
    return tuple(problems)


def _unseen(files: Sequence[StoredFile]) -> tuple[list[StoredFile], list[str]]:
    """Return the files that this host sees otherwise than the run, and the reason for each."""
    unseen, reasons = [], []
    for file in files:
        try:
            is_same = identify_file(file.path).stamp == file.stamp
            reason = "" if is_same else "another size, time of change or inode"
        except OSError as error:
            reason = describe_os_error(error)
        if reason:
            unseen.append(file)
            reasons.append(reason)
    return unseen, reasons


def check_workers(cluster: Cluster, plan: Plan, check: Callable[[], None]) -> None:
    """Ask every worker whether it can do its part of a plan.

    For the time of asking there is a file with a random name in the output folder, which is made
    if it is not there.

    Parameters
    ----------
    cluster
        Whose workers are asked.
    plan
        What is to be done.
    check
        Called several times a second, to end the run.

    Raises
    ------
    PlanError
        Each worker that cannot, by the name of its host.
    EngineError
        Workers do not answer.
    """
    inputs = [path for file in plan.catalog.files.values() for path in file.paths]
    folder = plan.target.output_folder
    relative = [path for path in (*inputs, folder) if not Path(path).is_absolute()]
    if relative:
        reason = "on a cluster every path has to be absolute, workers being in other folders"
        raise PlanError([Diagnostic("engine", f"{relative[0]}: {reason}")])
    with _marker(folder) as marker:
        files = tuple(map(identify_file, (*inputs, marker)))
        answers = _ask(cluster, WorkerRequirements(*software(), files, folder), check)
        hosts: dict[str, list[str]] = {}  # by what is wrong there
        for host, answer in answers.items():
            if isinstance(answer, BaseException):
                answer = (f"cannot run ckpttool {__version__}: {answer}",)
            for problem in answer:
                hosts.setdefault(problem, []).append(host)
        if hosts:
            raise PlanError(
                [Diagnostic("engine", f"{', '.join(on)}: {why}") for why, on in hosts.items()]
            )


def _ask(
    cluster: Cluster, required: WorkerRequirements, check: Callable[[], None]
) -> Mapping[str, tuple[str, ...] | BaseException]:
    beside = Threads(1)  # so that a worker that hangs does not make this process hang
    answers = beside.submit(cluster.ask, check_worker, required)
    beside.shutdown(wait=False)
    until = time.monotonic() + ANSWER_SECONDS
    while not wait([answers], CHECK_SECONDS).done:
        check()
        if time.monotonic() > until:
            reason = f"not all workers answered within {ANSWER_SECONDS} s"
            raise EngineError(cluster.name, reason)
    return answers.result()


@contextmanager
def _marker(folder: str) -> Iterator[str]:
    """Create a file in a folder for a while; after an error, remove the folders made for it."""
    made = [path for path in (Path(folder), *Path(folder).parents) if not path.exists()]
    Path(folder).mkdir(parents=True, exist_ok=True)
    path = Path(folder, f".ckpttool-{secrets.token_hex(8)}")
    try:
        path.touch(exist_ok=False)
        yield str(path)
    except BaseException:
        path.unlink(missing_ok=True)
        for path in made:
            with suppress(OSError):
                path.rmdir()
        raise
    path.unlink(missing_ok=True)


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
        """Return the task of a worker; see `CopyOptions`."""
        tensors = (
            tensor.excerpt(Region.whole(tensor.meta.shape)) for tensor in self._output.tensors
        )
        output = replace(self._output, tensors=tuple(tensors))
        return FileTask(str(self._path), output, band_bytes, task_bytes, task_pieces)

    def commit(self, before: Callable[[int], None], crc: int | None = None) -> int:
        """Give the attempt the name of the output, and return its size in bytes.

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
    """Write a whole output file under a new name; runs on a worker.

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
        what = str(error)
        if isinstance(error, OSError):
            what = f"{error.filename}: {describe_os_error(error)}"
        raise CkptToolError(f"on {socket.gethostname()}: {what}") from error


def _write(task: FileTask, path: str) -> Attempt:
    output = task.output
    format = get_format(output.format)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        _require_claim(task.claim)
        index = format.create(path, output.metas, output.attrs)
        reserve(fd, index.nbytes)
        nbytes = 0
        hashes: list[UnitHash] = []
        crcs: list[CrcExtent] = []
        sizes = task.band_bytes, task.task_bytes, task.task_pieces
        for stretch in cut_into_tasks([(output, index)], *sizes):
            _require_claim(task.claim)
            filled = fill(stretch)
            nbytes += filled.nbytes
            hashes += filled.hashes
            crcs += filled.crcs
        crc = compute_checksum(index, known=crcs) if "crc_num" in index.attrs else None
        format.seal(path, crc)
        os.fsync(fd)  # here, since no other host can: the run only renames it
        return Attempt(path, Filled(nbytes, tuple(hashes)))
    finally:
        os.close(fd)


def _require_claim(claim: str) -> None:
    """Raise `CkptToolError` unless the run still has the claim on the output."""
    if not is_there(claim):
        raise CkptToolError(f"{claim}: is not there (the run has ended, or does not share files)")
