"""Differences of systems: macOS lacks functions of Linux, and Windows those of both.

Only this module uses a function that some system lacks, and reads what only Linux shows in /proc
and /sys.  It asks whether the function is there, not for the name of the system: a container may
hide /proc, too.  Without advice, reserved space and counters a run is slower or says less.  Its
files are the same.
"""

from __future__ import annotations

import math
import os
import re
import resource
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from io import FileIO
from itertools import repeat
from pathlib import Path

READ_BYTES = 1 << 30  # of one call; macOS refuses calls for 2 GiB and more
PR_SET_DUMPABLE = 4  # of Linux, <sys/prctl.h>
# With this flag of pwritev2, written pages leave the page cache once they are on disk.  The next
# writes reuse them, and the cached files of other programs stay cached.  Measured on a virtual
# machine that returns free memory to its host: 4 GiB written and synced in 3.9 s, without the flag
# in 9.4 s.  Reads do not use it: Linux would drop a half-read page of 2 MiB and read it again (1.4
# times as many bytes).
RWF_DONTCACHE = 0x80
# What macOS lacks.
_WILLNEED: int = getattr(os, "POSIX_FADV_WILLNEED", 0)
_NOWAIT: int = getattr(os, "RWF_NOWAIT", 0)
_peek = getattr(os, "preadv", None) if _NOWAIT else None  # no read, which tests count and break


# ------------------------------------------------------------------------------------- open files


def read_at(fd: int, buffer: memoryview, offset: int) -> int:
    """Read bytes from ``offset`` on into a buffer; return how many, which may be fewer."""
    part = buffer[:READ_BYTES]
    if hasattr(os, "preadv"):
        return os.preadv(fd, [part], offset)
    data = os.pread(fd, len(part), offset)
    part[: len(data)] = data
    return len(data)


def write_at(fd: int, data: memoryview, offset: int, flags: int = 0) -> int:
    """Write bytes at ``offset``; return how many, which may be fewer.

    Raises
    ------
    NotImplementedError
        There are flags, and this Python was built for a Linux without pwritev2.
    """
    if hasattr(os, "pwritev"):
        return os.pwritev(fd, [data], offset, flags)
    return os.pwrite(fd, data, offset)


@cache
def has_dontcache() -> bool:
    """Return whether the kernel has a working `RWF_DONTCACHE`: Linux 6.16; 6.14 has defects."""
    import platform

    version = re.match(r"(\d+)\.(\d+)", platform.release())
    is_recent = (int(version[1]), int(version[2])) >= (6, 16) if version else False
    return hasattr(os, "RWF_DSYNC") and is_recent  # a flag that only Linux has


def prefetch(fd: int, offsets: Sequence[int], sizes: Sequence[int]) -> None:
    """Ask the disk for bytes of a file that will be read, unless memory has the middle ones."""
    middle = offsets[len(offsets) // 2 :][:1]
    if hasattr(os, "posix_fadvise") and not all(_is_in_memory(fd, offset) for offset in middle):
        advice = repeat(_WILLNEED)
        with suppress(OSError):  # a thousand ranks have millions of parts, so the loop runs in C
            deque(map(os.posix_fadvise, repeat(fd), offsets, sizes, advice), maxlen=0)


def _is_in_memory(fd: int, offset: int) -> bool:
    try:
        return _peek is not None and _peek(fd, [bytearray(1)], offset, _NOWAIT) == 1
    except OSError:  # it is not there, or the file system does not know
        return False


def start_writing(fd: int, offset: int, nbytes: int) -> None:
    """Let the system write bytes of a file to disk now, and forget them."""
    _advise(fd, offset, nbytes, "POSIX_FADV_DONTNEED")


def sync_contents(fd: int) -> None:
    """Let the contents of a file, and its size, come to the disk; the times may come later."""
    getattr(os, "fdatasync", os.fsync)(fd)


def _advise(fd: int, offset: int, nbytes: int, advice: str) -> None:
    """Advise the system, if it takes advice; the file system may refuse it."""
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):
            os.posix_fadvise(fd, offset, nbytes, getattr(os, advice))


def reserve(fd: int, nbytes: int) -> None:
    """Reserve the space of a file, so that a full disk is reported before the copy."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, nbytes)


@contextmanager
def open_scratch() -> Iterator[tuple[int, str]]:
    """Open an empty file that no name outlives; yield its descriptor and a path that leads to it.

    It is in memory where the system has such files and shows them in /proc, else in the folder for
    temporary files.
    """
    if hasattr(os, "memfd_create"):
        with FileIO(os.memfd_create("ckpttool"), "r+") as file:
            path = f"/proc/self/fd/{file.fileno()}"
            if Path(path).exists():
                yield file.fileno(), path
                return
    from tempfile import TemporaryDirectory

    with TemporaryDirectory(prefix="ckpttool-") as folder:
        path = str(Path(folder, "scratch"))
        with FileIO(path, "x+") as file:
            yield file.fileno(), path


# ------------------------------------------------------------------------------------ this process


def read_process(name: str) -> str:
    """Return what Linux shows in ``/proc/self/NAME``, in one read; "" elsewhere."""
    with suppress(OSError), FileIO(f"/proc/self/{name}") as file:
        return os.fsdecode(file.read(1 << 16))
    return ""


def peak_bytes() -> int:
    """Return the peak memory of this process so far, in bytes."""
    peak = re.search(r"^VmHWM:\s*(\d+) kB", read_process("status"), re.MULTILINE)
    if peak:
        return 1024 * int(peak[1])
    # The last resort: on Linux it includes the memory of the parent when it forked.  Only the name
    # of the system shows the unit: bytes on macOS, KiB elsewhere (getrusage(2)).
    peak_size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak_size if sys.platform == "darwin" else 1024 * peak_size


@cache  # once for a process; forked processes inherit both settings
def forbid_core_dumps() -> None:
    """Forbid this process to write core dumps.

    A limit of 0 bytes stops dumps into files.  On Linux, a process that is not "dumpable" also
    sends no dump to a program that collects them.
    """
    lower_limit("RLIMIT_CORE", 0)
    with suppress(ImportError, OSError, AttributeError):  # a Python without ctypes; no Linux
        from ctypes import CDLL

        CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)


def lower_limit(name: str, most: int) -> None:
    """Lower a limit of this process for good, such as ``RLIMIT_DATA``; a lower one stays.

    macOS sets a limit of memory but does not enforce it.
    """
    kind = getattr(resource, name)
    limits = (most, *(n for n in resource.getrlimit(kind) if n != resource.RLIM_INFINITY))
    resource.setrlimit(kind, (min(limits), min(limits)))


def open_files_limits() -> tuple[int, int]:
    """Return how many files this process may open, and how many it may be allowed to open."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)


def count_processors() -> float:
    """Return how many processors this process may use; not a whole number in some containers."""
    if hasattr(os, "sched_getaffinity"):
        number = len(os.sched_getaffinity(0))
    else:
        number = os.cpu_count() or 1
    return min(number, find_quota(read_process("cgroup")))


@cache  # a run calls it several times
def find_quota(groups: str, mount: str = "/sys/fs/cgroup") -> float:
    """Return how many processors the control groups of this process may use; inf without a limit.

    Containers limit processor time, not the processors that a thread may run on.  A limit holds
    for all groups below, so those above the process count as well.

    Parameters
    ----------
    groups
        The text of ``/proc/self/cgroup``.
    mount
        Where the control groups are mounted.

    References
    ----------
    https://docs.kernel.org/admin-guide/cgroup-v2.html (``cpu.max``) and
    https://docs.kernel.org/scheduler/sched-bwc.html (``cpu.cfs_quota_us``, of version 1).
    """
    quotas = [math.inf]
    for line in groups.splitlines():
        number, controllers, group = line.split(":", 2)
        is_first = "cpu" in controllers.split(",")
        if number != "0" and not is_first:
            continue
        top = Path(mount) / ("cpu" if is_first else "")
        inner = top / group.lstrip("/")
        for folder in (inner, *inner.parents):
            if not folder.is_relative_to(top):
                break
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if is_first else ("cpu.max",)
            words = " ".join(_read(folder / name) for name in names).split()
            if len(words) == 2 and words[0].isdecimal():  # else "max" or -1
                quotas.append(int(words[0]) / int(words[1]))
    return min(quotas)


def _read(path: Path) -> str:
    """Return the text of a file of the system; "" if the system does not show it."""
    try:
        return path.read_text()
    except OSError:
        return ""
