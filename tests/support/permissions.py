"""Files of another user, and a process to which the rights of files matter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SOMEBODY, SOMEBODY_ELSE = 65534, 12345


ROOT_ONLY = pytest.mark.skipif(
    not sys.platform.startswith("linux") or os.geteuid() != 0,
    reason="only root makes files of others, and Linux takes its rights away",
)


DROP_RIGHTS = """
import ctypes, os, sys
for right in (1, 2, 3):  # to read, write and remove what others own: CAP_DAC_*, CAP_FOWNER
    assert ctypes.CDLL(None).prctl(24, right, 0, 0, 0) == 0, "PR_CAPBSET_DROP"
os.execv(sys.executable, [sys.executable, "-m", "ckpttool", *sys.argv[1:]])
"""


def run_without_rights(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command in a process to which the rights of files matter."""
    return subprocess.run(
        [sys.executable, "-c", DROP_RIGHTS, *command.split()],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=False,
    )


def give_away(path: Path, mode: int, text: str | None = None) -> None:
    """Give a file or folder to another user, with a mode."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if text is not None:
        path.write_text(text)
    os.chown(path, SOMEBODY, SOMEBODY)
    path.chmod(mode)
