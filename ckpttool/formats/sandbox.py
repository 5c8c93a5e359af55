"""A limited process that reads files which may crash or hang their reader.

libhdf5 parses the headers of HDF5 files.  On damaged files some of its versions crash, some never
return, and some allocate all memory.  So another process reads them, with limits on its memory and
its processor time.  It starts with the first file and reads one file after another.

Processor time distinguishes a hang from a slow disk.  The kernel ends the process if one object of
a file takes more than `CPU_SECONDS`.
"""

from __future__ import annotations

import gc
import re
import signal
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError
from threading import Event, Lock
from typing import TYPE_CHECKING, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from ckpttool.model.tensors import FileIndex, Reads, StoredFile, TensorMeta
from ckpttool.problems import CkptToolError, FormatError
from ckpttool.system import lower_limit, read_process

if TYPE_CHECKING:
    import subprocess
    from multiprocessing.connection import Connection

    from ckpttool.model.slicing import Box

T = TypeVar("T")

CPU_SECONDS = 10.0  # for one object; a thousand times the slowest ordinary one
MEMORY_BYTES = 4 << 30  # of the process; an index of a million datasets takes a quarter of it

# `multiprocessing` does not start the process: "fork" may deadlock in a program with threads, and
# "spawn" and "forkserver" run the program's main module again.  The first statement sets the path,
# so that nothing is imported from the current folder.
_START = (
    "import sys; sys.path[:] = {path!r}; from ckpttool.formats.sandbox import serve; serve({fd})"
)


class _Child(Struct, frozen=True):
    """The limited process, and the pipe to it."""

    process: subprocess.Popen[bytes]
    connection: Connection


class Sandbox:
    """A limited process that reads files; use as a context manager.

    Threads may share it; it reads one file at a time.
    """

    def __init__(self) -> None:
        self._child: _Child | None = None
        self._lock = Lock()
        self._stopped = Event()

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is not None:
            self.stop()
        self._end()

    def stop(self) -> None:
        """End the process at once, even while it reads a file."""
        self._stopped.set()
        if self._child is not None:
            self._child.process.kill()

    def read_index(self, file: StoredFile) -> FileIndex:
        """Return the header of an HDF5 file.

        Raises
        ------
        FormatError
            The file is damaged, or libhdf5 crashed or hung on it.
        UnsupportedError
            The file uses a feature that is not read.
        OSError
            The file cannot be opened or read.
        """
        return self.run(read_hdf5, file, "libhdf5")

    def run(
        self,
        function: Callable[[StoredFile], T],
        file: StoredFile,
        library: str,
        cpu_seconds: float = CPU_SECONDS,
    ) -> T:
        """Return ``function(file)`` as computed by the process.

        Parameters
        ----------
        function
            A function of a module; its result has to be picklable.
        file
            The file.
        library
            Name of the reader, for the error after the process has died.
        cpu_seconds
            Processor time until the first `set_cpu_limit` of ``function``.

        Raises
        ------
        FormatError
            The process died while it read the file.
        CkptToolError, OSError
            As raised by ``function``.
        """
        from multiprocessing.reduction import ForkingPickler

        with self._lock:
            child = self._start()
            try:
                # Not ``send``: Python 3.13 warns of its buffer if the process has died.
                call = bytes(ForkingPickler.dumps((function, file, cpu_seconds)))
                child.connection.send_bytes(call)
                answer: T | CkptToolError | OSError = child.connection.recv()
            except (EOFError, ConnectionError) as error:
                raise FormatError(file.path, None, self._end(library)) from error
        if isinstance(answer, CkptToolError | OSError):
            raise answer
        return answer

    def _start(self) -> _Child:
        """Return the process; start it if there is none."""
        if self._stopped.is_set():
            raise CancelledError
        child = self._child = self._child or _start()
        if self._stopped.is_set():  # by another thread, which did not see this process
            self.stop()
            self._end()
            raise CancelledError
        return child

    def _end(self, library: str = "") -> str:
        """End the process, and return the reason for a message."""
        child, self._child = self._child, None
        if child is None:
            return ""
        child.connection.close()
        code = child.process.wait()
        if code == -signal.SIGPROF:
            return f"{library} does not finish reading it"
        if code < 0:
            return f"{library} crashed while reading it ({signal.Signals(-code).name})"
        return f"the process that read it ended with code {code}"


def _start() -> _Child:
    import subprocess  # few files need it
    from multiprocessing import Pipe

    ours, theirs = Pipe()
    with theirs:
        code = _START.format(path=sys.path, fd=theirs.fileno())
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # the exit code says how the process ended
        )
    return _Child(process, ours)


def serve(fd: int) -> None:
    """Answer the calls from a pipe until it is closed; the limited process runs this."""
    from multiprocessing.connection import Connection

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends, and closes the pipe
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    lower_limit("RLIMIT_DATA", MEMORY_BYTES)
    lower_limit("RLIMIT_CORE", 0)
    gc.disable()  # it takes three quarters of the time of a large pickle; headers have no cycles
    with Connection(fd) as connection:
        while True:
            try:
                function, file, cpu_seconds = connection.recv()
            except EOFError:
                return
            set_cpu_limit(cpu_seconds)
            try:
                answer = function(file)
            except (CkptToolError, OSError) as error:
                answer = error
            connection.send(answer)
            set_cpu_limit(0)


def set_cpu_limit(seconds: float = CPU_SECONDS) -> None:
    """Let the kernel end this process after ``seconds`` of processor time from now; 0: never."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


def read_hdf5(file: StoredFile) -> FileIndex:
    """Return the header of an HDF5 file; each object may take `CPU_SECONDS`."""
    from ckpttool.formats.hdf5 import Hdf5

    _, start = _count_reads()
    index = Hdf5(on_object=set_cpu_limit).read_index(file)
    stop, _ = _count_reads()
    reads = Reads(stop.requests - start.requests, stop.nbytes - start.nbytes)
    return replace(index, reads=reads)


def read_virtual_hdf5(
    file: StoredFile,
) -> tuple[Mapping[str, str], list[tuple[TensorMeta, list[Box]]]]:
    """Return what a virtual HDF5 file shows; each object may take `CPU_SECONDS`."""
    from ckpttool.formats.hdf5 import read_virtual

    return read_virtual(file, set_cpu_limit)


def _count_reads() -> tuple[Reads, Reads]:
    """Return what this process has read before this call, and after it; libhdf5 does not count.

    It is nothing on a system that does not count either.
    """
    status = read_process("io")
    if not status:
        return Reads(), Reads()
    counts = {name: int(number) for name, number in re.findall(r"(\w+): (\d+)", status)}
    before = Reads(counts["syscr"], counts["rchar"])
    return before, before + Reads(1, len(status))
