"""Files that are removed while they are large: the system frees them, and nobody waits for it.

To remove a name is quick.  To free gigabytes that are still on their way to the disk takes seconds,
and is done when the last process that has the file open closes it.  So a process that does nothing
else gets the open files, and ends, which closes them, once the run has let go of its own.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Thread

_WAIT = "import sys; sys.stdin.buffer.read()"


@contextmanager
def released_by_another(fds: Sequence[int]) -> Iterator[None]:
    """What is removed and closed inside is freed by another process, after this has been left.

    If the system has no room for another process, or for a pipe to it, this one does it, and takes
    the time.

    Parameters
    ----------
    fds
        The open files.
    """
    writing = None
    try:
        with suppress(OSError):
            writing = _hand_over(fds)
        yield
    finally:
        if writing is not None:
            os.close(writing)  # which the other process is waiting for


def _hand_over(fds: Sequence[int]) -> int:
    """Start the other process; it ends when the descriptor that is returned is closed."""
    reading, writing = os.pipe()
    try:
        pid = _start(reading, fds)
    except OSError:
        os.close(writing)
        raise
    finally:
        os.close(reading)
    Thread(target=os.waitpid, args=(pid, 0), daemon=True).start()
    return writing


def _start(reading: int, fds: Sequence[int]) -> int:
    """A process that has files open until nothing more can come from a pipe.

    It has no other part in this one's life: a shell that waits for what is printed does not wait
    for it, nor does Ctrl-C reach it.
    """
    nowhere = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_WRONLY, 0) for fd in (1, 2)]
    passed = [(os.POSIX_SPAWN_DUP2, fd, fd) for fd in fds]  # so it is open in the other process
    return os.posix_spawn(
        sys.executable,
        [sys.executable, "-I", "-S", "-c", _WAIT],
        os.environ,
        file_actions=[(os.POSIX_SPAWN_DUP2, reading, 0), *nowhere, *passed],
        setpgroup=0,
    )
