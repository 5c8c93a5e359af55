"""Runs a command and tells what it took: ``python -I -S launch.py COMMAND...``, JSON on stdout.

A process of its own, and a small one: Linux counts the memory of the process that forks as memory
of the one that is forked, so what is below this one's own 10 MiB cannot be seen.

Memory is resident memory as the kernel accounts it: pages of the processes, libraries included,
and not the page cache.  For one process it is exact (``ru_maxrss``).  For a tree it is the sum of
the peaks of all processes that are alive at one time, seen 10 times a second; pages that they
share count for each.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

POLL_SECONDS = 0.1


def main() -> None:
    """Run the command that the arguments are."""
    started = time.perf_counter()
    process = subprocess.Popen(sys.argv[1:], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    peaks: list[int] = []
    ended = threading.Event()
    watcher = threading.Thread(target=_watch, args=(process.pid, ended, peaks))
    output: dict[str, bytes] = {}
    readers = [
        threading.Thread(target=lambda n=name, s=stream: output.update({n: s.read()}))
        for name, stream in (("stdout", process.stdout), ("stderr", process.stderr))
    ]
    for thread in (watcher, *readers):
        thread.start()
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - started
    ended.set()
    for thread in (watcher, *readers):
        thread.join()
    result = {
        "seconds": seconds,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "peak_bytes": max(usage.ru_maxrss * 1024, *peaks, 0),
        "exit_code": os.waitstatus_to_exitcode(status),
        **{name: text.decode(errors="replace") for name, text in output.items()},
    }
    json.dump(result, sys.stdout)


def _watch(pid: int, ended: threading.Event, peaks: list[int]) -> None:
    before: set[int] = set()
    while not ended.wait(POLL_SECONDS):
        members = _tree(pid)
        # A process that has just been forked still shares all memory with its parent.
        peaks.append(sum(_peak(member) for member in members & before))
        before = members


def _tree(pid: int) -> set[int]:
    """A process and all below it, as far as they are alive."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = path.read_text().rpartition(")")[2].split()[1]
        except OSError:
            continue  # it has ended
        children.setdefault(int(parent), []).append(int(path.parent.name))
    found = [pid]
    for member in found:  # grows while it is walked
        found += children.get(member, [])
    return set(found)


def _peak(pid: int) -> int:
    """The most memory that a process has had so far, in bytes."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    lines = [line for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(lines[0].split()[1]) * 1024 if lines else 0


if __name__ == "__main__":
    main()
