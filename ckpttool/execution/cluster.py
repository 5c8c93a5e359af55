"""Workers on other hosts: checked before the first byte, then given whole output files.

They share files with this process, and nothing else.  Every worker first reports its version, and
whether it sees the inputs and the output folder.

No two processes ever write the same file.  A worker writes its *attempt* under a random name.  The
run holds a *claim* on the output: the ``.partial`` file, locked.  It checks one complete attempt
and gives it the final name.  A worker whose host lost the network may still write.  Another worker
then repeats its task in another file, and the first file is never renamed.  (Two workers must not
write the same bytes to one file.  A network file system writes whole pages from its cache, and may
overwrite bytes of the other worker with older ones.)

An attempt exists no longer than the claim.  A worker first creates its file, then checks the claim,
and checks it again before every task that it fills.  The run first gives up the claim, then removes
the attempts.  In either order, the later process sees what the earlier one did.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError, Executor, Future, wait
from contextlib import contextmanager
from pathlib import Path
from typing import ParamSpec, TypeAlias, TypeVar

from msgspec import Struct

from ckpttool._version import __version__
from ckpttool.concurrency import Threads
from ckpttool.execution.copy import Filled, fill
from ckpttool.execution.schedule import Batch
from ckpttool.formats import get_format, header_of
from ckpttool.formats.header_cache import HeaderCache
from ckpttool.formats.local import describe_os_error, identify_file
from ckpttool.model.plan import Plan
from ckpttool.model.tensors import StoredFile
from ckpttool.problems import (
    CkptToolError,
    Diagnostic,
    EngineError,
    PlanError,
    SourceValueError,
)
from ckpttool.storage.checksums import compute_checksum
from ckpttool.storage.files import (
    TemporaryFile,
    create,
    is_there,
    name_attempt,
    new_folders,
    remove_empty,
    rename_durably,
    require_name,
    verify_header,
)
from ckpttool.wording import count, shorten

A = TypeVar("A")
P = ParamSpec("P")
T = TypeVar("T")

# Message, hint and facts.  The `Diagnostic` of a worker of another version may have other fields.
WorkerProblem: TypeAlias = tuple[str, str, str]

PAUSES = (0.0, 0.5, 1.5, 3.0)  # seconds; a network file system may show a new file late
CHECK_SECONDS = 0.2  # between two checks for a request to end the run
ANSWER_SECONDS = 60  # for all workers to answer; the marker may appear late on their hosts
# Hints.
RESTART = "start the workers again"
SAME_SOFTWARE = "install the same version on all hosts"
SHARED = "inputs and -o on a file system that all hosts share"


class Cluster(Executor):
    """An executor whose workers may be on other hosts.

    Attributes
    ----------
    name
        The name of the engine, as passed to `open_engine`.
    """

    def __init__(self, name: str, pool: Executor) -> None:
        self.name = name
        self._pool = pool

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Submit a call to any worker."""
        return self._wrap(self._pool.submit(fn, *args, **kwargs))

    @property
    def width(self) -> int:
        """Number of calls that all workers run at a time."""
        raise NotImplementedError

    @property
    def threads(self) -> int:
        """Most calls that one worker runs at a time."""
        return 1

    def run_on_each(
        self, function: Callable[[A], T], argument: A
    ) -> Mapping[str, T | BaseException]:
        """Run one call on each worker; return each result or exception, by host and address."""
        raise NotImplementedError

    def watch(self) -> None:
        """Raise `EngineError` if the workers are lost; called several times a second."""

    def _explain(self, error: BaseException) -> BaseException:
        raise NotImplementedError

    def _wrap(self, remote: Future[T]) -> Future[T]:
        """Return a future with the result of ``remote``, or with its error explained."""
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


class WorkerRequirements(Struct, frozen=True):
    """The requirements of a worker: this version, the same files, and a folder to write to.

    Attributes
    ----------
    software
        From `software`, in the run's process.
    files
        Every file, with its stamp on the run's host.
    folder
        The folder of the outputs.
    """

    software: str
    files: tuple[StoredFile, ...]
    folder: str


def software() -> str:
    """Return the version of this package, and the major and minor version of Python."""
    python = ".".join(platform.python_version_tuple()[:2])
    return f"ckpttool {__version__} on Python {python}"


def check_worker(required: WorkerRequirements) -> WorkerProblem | None:
    """Return the problem of the worker that runs this call, or None."""
    if software() != required.software:
        return f"workers have {software()}", SAME_SOFTWARE, f"this run is {required.software}"
    unseen = dict.fromkeys(required.files, "")  # file to reason
    for pause in PAUSES:
        time.sleep(pause)
        unseen = {file: reason for file in unseen if (reason := _why_unseen(file))}
        if not unseen:
            break
    if unseen:
        (file, reason), *_ = unseen.items()
        message = f"workers do not see {len(unseen)} of {count(len(required.files), 'file')}"
        return message, SHARED, f"{file.path}: {reason}"
    if not os.access(required.folder, os.W_OK | os.X_OK):
        return f"workers may not write to {required.folder}", SHARED, ""
    return None


def _why_unseen(file: StoredFile) -> str:
    try:
        is_same = identify_file(file.path).stamp == file.stamp
    except OSError as error:
        return describe_os_error(error)
    return "" if is_same else "another size, time of change or inode"


def check_workers(cluster: Cluster, plan: Plan, check: Callable[[], None]) -> None:
    """Check whether every worker can do its part of a plan.

    Create the output folder if necessary.  During the check it contains a marker: an empty file
    with a random name.

    Raises
    ------
    PlanError
        A worker cannot do its part; the error names its host.
    EngineError
        Workers do not answer.
    """
    inputs = [path for of in plan.inputs for file in of.files.values() for path in file.paths]
    folder = plan.target.output_folder
    relative = [path for path in (*inputs, folder) if not Path(path).is_absolute()]
    if relative:
        message, facts = "on a cluster every path has to be absolute", shorten(relative, 3)
        raise PlanError([Diagnostic("engine", message, hint="absolute paths", facts=facts)])
    with _temporary_marker(folder) as marker:
        files = tuple(map(identify_file, (*inputs, marker)))
        answers = _check_each(cluster, WorkerRequirements(software(), files, folder), check)
        hosts: dict[WorkerProblem, list[str]] = {}
        for host, answer in answers.items():
            if isinstance(answer, BaseException):
                message = f"workers cannot run ckpttool {__version__}"
                answer = message, SAME_SOFTWARE, str(answer)
            if answer is not None:
                hosts.setdefault(answer, []).append(host)
        if hosts:
            raise PlanError(
                [
                    Diagnostic("engine", message, hint=hint, facts=facts, where=shorten(on, 3))
                    for (message, hint, facts), on in hosts.items()
                ]
            )


def _check_each(
    cluster: Cluster, required: WorkerRequirements, check: Callable[[], None]
) -> Mapping[str, WorkerProblem | BaseException | None]:
    """Return the problem of each worker or its exception; do not hang if a worker hangs."""
    thread = Threads(1)
    answers = thread.submit(cluster.run_on_each, check_worker, required)
    thread.shutdown(wait=False)
    deadline = time.monotonic() + ANSWER_SECONDS
    while not wait([answers], CHECK_SECONDS).done:
        check()
        if time.monotonic() > deadline:
            reason = f"not all workers answered within {ANSWER_SECONDS} s"
            raise EngineError(cluster.name, reason, RESTART)
    return answers.result()


@contextmanager
def _temporary_marker(folder: str) -> Iterator[str]:
    """Create a file in a folder, and remove it; after an error, also remove new folders."""
    made = new_folders([Path(folder)])
    Path(folder).mkdir(parents=True, exist_ok=True)
    path = Path(folder, f".ckpttool-{os.urandom(8).hex()}")
    try:
        path.touch(exist_ok=False)
        yield str(path)
    except BaseException:
        path.unlink(missing_ok=True)
        remove_empty(made)
        raise
    path.unlink(missing_ok=True)


class FileTask(Struct, frozen=True):
    """One output file, to be written by one worker.

    Attributes
    ----------
    claim
        Path of the claim; the worker stops when this file is gone.
    batch
        What to write: one output, with only the slices that it needs.  The worker computes the
        pieces.
    """

    claim: str
    batch: Batch


class RemoteFile(TemporaryFile):
    """A temporary file that a worker writes; ends with `rename` or `TemporaryFile.discard`.

    Attributes
    ----------
    attempt
        The complete file that a worker has written; "" until then.
    """

    attempt: str = ""

    def task(self, batch: Batch) -> FileTask:
        """Return the task of a worker, which writes the only output of a batch."""
        return FileTask(str(self._path), batch.excerpt())

    def seal(self, cache: HeaderCache, crc: int | None = None) -> int:
        """Read the header of the attempt back, and return its size in bytes.

        Raises
        ------
        VerifyError
            The header does not describe the tensors of the output.
        OSError
            The attempt is missing, or another run has taken the claim.
        """
        assert self.attempt, "a worker has written it"
        assert crc is None, "the worker has stored the checksum"
        require_name(self._path, self._fd)
        return verify_header(identify_file(self.attempt), self._output, cache)

    def rename(self) -> None:
        """Give the attempt the name of the output, and give up the claim."""
        rename_durably(Path(self.attempt), self._output.path)
        self.discard()


def write_file(task: FileTask) -> Filled:
    """Write a whole output file under a new name; runs on a worker.

    Raises
    ------
    SourceValueError
        A number of a sum is NaN or infinite, on whatever host.
    CkptToolError
        The file cannot be written, or the claim is gone; the error names the host.
    """
    path = name_attempt(task.claim)
    try:
        return _write(task, path)
    except BaseException as error:
        Path(path).unlink(missing_ok=True)
        is_of_host = isinstance(error, CkptToolError | OSError)
        if not is_of_host or isinstance(error, SourceValueError):
            raise
        reason = str(error)
        if isinstance(error, OSError):
            reason = f"{error.filename}: {describe_os_error(error)}"
        raise CkptToolError(f"on {os.uname().nodename}: {reason}") from error


def _write(task: FileTask, path: str) -> Filled:
    (output,) = task.batch.outputs
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        _require_claim(task.claim)
        index = create(path, fd, header_of(output))
        filled: list[Filled] = []
        for fill_task in task.batch.tasks([index]):
            _require_claim(task.claim)
            filled.append(fill(fill_task))
        crcs = (crc for result in filled for crc in result.crcs)
        crc = compute_checksum(index, known=crcs) if "crc_num" in index.attrs else None
        get_format(output.format).seal(fd, crc)
        os.fsync(fd)  # no other host can sync the pages that this host has in its cache
        return Filled(
            sum(result.nbytes for result in filled),
            tuple(unit for result in filled for unit in result.hashes),
            casts=tuple(cast for result in filled for cast in result.casts),
            read=tuple(unit for result in filled for unit in result.read),
            attempt=path,
        )
    finally:
        os.close(fd)


def _require_claim(claim: str) -> None:
    if not is_there(claim):
        raise CkptToolError(f"{claim} is missing: the run has ended, or hosts share no files")
