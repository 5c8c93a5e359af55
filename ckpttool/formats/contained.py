"""Headers of HDF5 files, read where a crash or a hang of libhdf5 does no harm: in another process.

libhdf5 parses the headers, and on damaged files some of its versions crash, some never come to an
end, and some ask for all the memory there is.  So a file from outside is opened by a process of its
own, which can do no more than end.  It is started with the first file and reads as many as there
are; each line on its standard input is a path, as JSON, each on its output a header or an error.

A hang is told from a slow disk by processor time: the process ends itself if one object of a file
takes more than `CPU_SECONDS` of it.
"""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError
from threading import Event, Lock
from types import TracebackType
from typing import cast

from ckpttool.errors import FormatError, UnsupportedError
from ckpttool.model.catalog import Extent, FileIndex, SourceStamp, StoredTensor, TensorMeta

CPU_SECONDS = 10.0  # for one object; a thousand times what the slowest ordinary one takes
MEMORY_BYTES = 4 << 30  # of the process; an index of a million datasets takes a quarter of it

# The first thing that runs: nothing is imported from the folder that the program was started in.
_START = (
    "import sys; sys.path[:] = {path!r}; from ckpttool.formats import contained as c; c.serve()"
)


class ContainedReader:
    """Reads headers of HDF5 files in a process of its own; use as a context manager.

    Threads may share it; it reads one file at a time.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._lock = Lock()
        self._stopped = Event()

    def __enter__(self) -> ContainedReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self.stop()
        self._end()

    def stop(self) -> None:
        """End the process at once, whatever it reads; nobody waits for an answer any more."""
        self._stopped.set()
        if self._process is not None:
            self._process.kill()

    def read_index(self, path: str) -> FileIndex:
        """The header of one file.

        Raises
        ------
        FormatError
            It is damaged; what libhdf5 did if it did not survive that.
        UnsupportedError
            It uses something that is not read.
        OSError
            It cannot be opened or read.
        """
        with self._lock:
            answer = self._ask(path)
        return _parse_answer(path, json.loads(answer))

    def _ask(self, path: str) -> str:
        """What the process answers, a line of JSON."""
        if self._stopped.is_set():
            raise CancelledError
        process = self._process = self._process or _start()
        if self._stopped.is_set():  # by another thread, which has not seen this process
            self.stop()
            self._end()
            raise CancelledError
        try:
            assert process.stdin is not None, "it was started with a pipe"
            assert process.stdout is not None, "it was started with a pipe"
            process.stdin.write(json.dumps(path) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer.endswith("\n"):
            raise FormatError(path, None, f"not readable as HDF5: {self._end()}")
        return answer

    def _end(self) -> str:
        """End the process, and say how it ended."""
        process, self._process = self._process, None
        if process is None:
            return ""
        process.communicate()
        if process.returncode == -signal.SIGPROF:
            return "libhdf5 does not come to an end on it (damaged?)"
        if process.returncode < 0:
            name = signal.Signals(-process.returncode).name
            return f"libhdf5 crashed on it ({name}; damaged?)"
        return f"the process that reads it ended ({process.returncode})"


def _start() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _START.format(path=sys.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # last words of a crash; the signal says what is to be said
        encoding="ascii",
    )


def _parse_answer(path: str, answer: Mapping[str, object]) -> FileIndex:
    error = cast("list[object] | None", answer.get("error"))
    if error is not None:
        kind, *rest = error
        if kind == "OSError":
            number, text = cast("tuple[int, str]", rest)
            raise OSError(number, text, path)
        offset, reason = cast("tuple[int | None, str]", rest)
        raise (UnsupportedError if kind == "UnsupportedError" else FormatError)(
            path, offset, reason
        )
    rows = cast(
        "list[tuple[str, str, list[int], str | None, list[tuple[int, int]]]]", answer["tensors"]
    )
    tensors = {
        name: StoredTensor(
            TensorMeta(name, sys.intern(dtype), tuple(shape), text),
            path,
            tuple(Extent(offset, nbytes) for offset, nbytes in extents),
        )
        for name, dtype, shape, text, extents in rows
    }
    stamp = SourceStamp(*cast("list[int]", answer["stamp"]))
    return FileIndex(path, "hdf5", stamp.nbytes, tensors, stamps={path: stamp})


def serve() -> None:
    """The other process: answer every line until there are no more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends, and with it our input
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    from ckpttool.formats.hdf5 import Hdf5

    format = Hdf5(on_object=lambda: _wind_up(CPU_SECONDS))
    answers = sys.stdout
    for line in sys.stdin:
        _wind_up(CPU_SECONDS)
        answers.write(json.dumps(_answer(format.read_index, json.loads(line))) + "\n")
        answers.flush()
        _wind_up(0)


def _wind_up(seconds: float) -> None:
    """Have the kernel end this process after so much processor time; 0 for never."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


def _answer(read_index: Callable[[str], FileIndex], path: str) -> Mapping[str, object]:
    try:
        index = read_index(path)
    except FormatError as error:
        return {"error": [type(error).__name__, error.offset, error.reason]}
    except OSError as error:
        return {"error": ["OSError", error.errno, error.strerror]}
    rows = [
        (
            tensor.meta.name,
            tensor.meta.dtype,
            tensor.meta.shape,
            tensor.meta.text,
            [(extent.offset, extent.nbytes) for extent in tensor.extents],
        )
        for tensor in index.tensors.values()
    ]
    return {"stamp": index.stamps[path], "tensors": rows}
