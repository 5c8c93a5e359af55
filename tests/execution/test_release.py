"""Files that are removed while they are large are freed by another process."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

import pytest

from ckpttool.run.release import released_by_another


def holders(path: Path) -> set[int]:
    """The processes that have a removed file open."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            for link in sorted((process / "fd").iterdir()):
                with suppress(FileNotFoundError):  # it has closed that meanwhile
                    if str(link.readlink()) == f"{path} (deleted)":
                        found.add(int(process.name))
    return found


def removed(path: Path) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    path.unlink()
    return fd


def test_another_process_closes_last_what_was_removed(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    fds = [removed(first), removed(second)]
    with released_by_another(fds):
        for fd in fds:
            os.close(fd)
        (pid,) = holders(first)
        assert pid != os.getpid()
        assert holders(second) == {pid}
        names = {fd: str(Path(f"/proc/{pid}/fd/{fd}").readlink()) for fd in (1, 2)}
        assert set(names.values()) == {os.devnull}, "a shell waits for who may print"
    deadline = time.monotonic() + 60
    while holders(first) | holders(second):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("call", ["posix_spawn", "pipe"])
def test_without_another_process_the_files_are_removed_all_the_same(tmp_path, monkeypatch, call):
    def refuse(*args, **kwargs):
        raise BlockingIOError

    monkeypatch.setattr(os, call, refuse)
    path = tmp_path / "file"
    fd = removed(path)
    with released_by_another([fd]):
        os.close(fd)
    assert not holders(path)
