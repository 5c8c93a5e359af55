"""What keeps this user from writing to a folder, or from replacing a file that is there."""

from __future__ import annotations

import os
import pwd
import stat
from pathlib import Path

REMEDY = "write to another place, or have its owner allow it"
CAP_FOWNER = 1 << 3  # Linux: may do with any file what its owner may


def closed_folder(folder: Path) -> str | None:
    """The message that nothing can be written to a folder that is there; None if it can."""
    if os.statvfs(folder).f_flag & os.ST_RDONLY:
        return f"{folder}: is on a file system that is read-only; write to another place"
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"{folder}: no permission to write there ({_owner(folder)}); {REMEDY}"
    return None


def kept_file(path: Path, is_locked: bool = False) -> str | None:
    """The message that a file cannot be replaced; None if it can, or if there is none.

    Parameters
    ----------
    path
        The file, in a folder that can be written to.
    is_locked
        Whether it is opened before that, to see that no other run has it.
    """
    try:
        found, folder = path.lstat(), path.parent.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    is_ordinary = stat.S_ISREG(found.st_mode)
    if is_locked and is_ordinary and not os.access(path, os.R_OK | os.W_OK):
        return f"{path}: no permission to read and to write it ({_owner(path)}); {REMEDY}"
    owners = (found.st_uid, folder.st_uid)
    if folder.st_mode & stat.S_ISVTX and os.geteuid() not in owners and not _is_above_owners():
        whose = f"only its owner may replace it in a sticky folder ({_owner(path)})"
        return f"{path}: {whose}; {REMEDY}"
    return None


def _owner(path: Path) -> str:
    found = path.lstat()
    try:
        name = pwd.getpwuid(found.st_uid).pw_name
    except KeyError:
        name = str(found.st_uid)
    return f"{stat.filemode(found.st_mode)}, owner {name}"


def _is_above_owners() -> bool:
    """Whether this process may do what owners may; where the kernel does not say, as root."""
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
    except OSError:
        return os.geteuid() == 0
    return bool(int(status.partition("CapEff:")[2].split()[0], 16) & CAP_FOWNER)
