"""Standard streams that cannot be written to: which one it is, and what becomes of the run."""

from __future__ import annotations

import io
import sys


def name_streams() -> None:
    """Let standard output and standard error tell that it is they who fail, as on a full disk."""
    sys.stdout = _again(sys.stdout, "standard output cannot be written to")
    sys.stderr = _again(sys.stderr, None)


class _Outlet(io.FileIO):
    """The bytes of a standard stream.

    What standard output does not take is an error that names it, once: the answer is lost, and what
    is left of it when Python ends, too.  What standard error does not take cannot be told to
    anybody, and the exit code says how the run ended.
    """

    def __init__(self, number: int, called: str | None) -> None:
        super().__init__(number, "w", closefd=False)
        self._called = called

    def write(self, data: object) -> int:
        """Write as any file; a reader that has gone is an error of every stream."""
        assert isinstance(data, bytes | bytearray | memoryview), "what a buffer writes"
        try:
            return super().write(data)
        except BrokenPipeError:
            raise
        except OSError as error:
            called, self._called = self._called, None
            if called is None:
                return memoryview(data).nbytes
            raise OSError(error.errno, error.strerror, called) from error


def _again(stream: io.TextIOBase | object, called: str | None) -> io.TextIOWrapper:
    """The same stream, on such an outlet."""
    assert isinstance(stream, io.TextIOWrapper), "Python's own, as of the start"
    return io.TextIOWrapper(
        io.BufferedWriter(_Outlet(stream.fileno(), called)),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
