"""The progress bar, on a real pseudo-terminal."""

from __future__ import annotations

import os
import pty
import re
import sys
import time

from tests.support.commands import run_well
from tests.support.corpus import GOLDEN


def on_terminal(*arguments):
    """What a command shows on a terminal, escape sequences and all, and its exit status."""
    shown = bytearray()

    def read(fd):
        data = os.read(fd, 65536)
        shown.extend(data)
        return data

    status = pty.spawn([sys.executable, "-m", "ckpttool", *map(str, arguments)], read)
    return shown.decode(), os.waitstatus_to_exitcode(status)


def test_a_terminal_gets_bytes_rate_and_time_left(tmp_path, capfdbinary):
    case = GOLDEN / "reshard_8_to_4"
    words = [case / "src", "-s", case / "src_strategy.ckpt", "-o"]
    shown, code = on_terminal("merge", *words, tmp_path / "m.h5")
    assert code == 0
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    assert re.search(r"writing .*\d/\d+\.\d KiB .*-:--:--", plain)
    assert "KiB ?" not in plain
    shown, code = on_terminal("merge", *words, tmp_path / "q.h5", "-q")
    assert code == 0
    assert "writing" not in shown


def test_no_color_is_honoured(tmp_path, capfdbinary, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    case = GOLDEN / "reshard_8_to_4"
    shown, _ = on_terminal("inspect", case / "src", "--ranks")
    assert "rank_7/checkpoint-2_10.ckpt" in shown
    assert not re.search(r"\x1b\[3[0-7]m", shown)


def test_a_terminal_shows_how_much_of_what_is_kept_was_read(tmp_path, capfdbinary):
    case = GOLDEN / "reshard_8_to_4"
    words = [case / "src", "-s", case / "src_strategy.ckpt", "-o", tmp_path / "m.h5"]
    run_well("merge", *words)
    time.sleep(0.01)
    os.utime(tmp_path / "m.h5")  # so that only its contents tell that it is what was written
    shown, code = on_terminal("merge", *words, "--resume")
    assert code == 0
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    assert re.search(r"reading what is kept .*\d/\d+\.\d KiB ", plain)
