"""Runs the command line on a pseudo-terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


# Runs the command line with bars, and their speeds, after so many seconds.
PROGRAM = """
from ckpttool.cli import progress
progress.BAR_SECONDS = progress.RATE_SECONDS = {}
from ckpttool.__main__ import run
run()
"""
NEVER = 1000


def on_terminal(
    *arguments: str | Path,
    columns: int = 80,
    raw: bool = False,
    bar_seconds: int = NEVER,
    **variables: str,
) -> tuple[str, int]:
    """Return what a command shows on a terminal of so many columns, and its exit code.

    Escape sequences are left out unless ``raw``.  A bar is shown after ``bar_seconds``.
    ``variables`` are added to an environment of a terminal with colours.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    unset = ("NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE", "COLUMNS", "LC_ALL", "LANG")
    env = {name: value for name, value in os.environ.items() if name not in unset}
    env |= {"TERM": "xterm-256color", "LC_ALL": "C.UTF-8", "PAGER": "cat", **variables}
    command = [sys.executable, "-c", PROGRAM.format(bar_seconds), *map(str, arguments)]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env) as process:
        os.close(theirs)
        shown = bytearray()
        while True:
            try:
                data = os.read(ours, 65536)
            except OSError:  # EIO: the command has ended
                break
            if not data:
                break
            shown += data
    os.close(ours)
    text = shown.decode().replace("\r\n", "\n")
    return text if raw else ESCAPE.sub("", text), process.returncode
