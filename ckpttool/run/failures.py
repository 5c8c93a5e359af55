"""What is said of a failure: the cause, in words that people know."""

from __future__ import annotations

import errno
import os
from concurrent.futures import BrokenExecutor

from ckpttool.errors import CkptToolError
from ckpttool.run.partial import PARTIAL

MEANINGS = {
    errno.ENOSPC: " (the disk is full)",
    errno.EDQUOT: " (what this user may store there is used up)",
    errno.EROFS: " (nothing can be written there)",
    errno.EIO: " (the disk, or the way to it, has failed)",
}


def cause_of(error: CkptToolError | OSError | BrokenExecutor) -> str:
    """What happened, in the system's words if it was the system; libhdf5 buries them."""
    if isinstance(error, BlockingIOError | FileExistsError):
        return f"another run is writing this output ({error.filename} is in use)"
    if isinstance(error, OSError) and error.errno:
        what = os.strerror(error.errno) + MEANINGS.get(error.errno, "")
        has_name = isinstance(error.filename, str) and not error.filename.endswith(PARTIAL)
        return f"{error.filename}: {what}" if has_name else what
    if isinstance(error, BrokenExecutor):
        return "a worker died (was it killed, or out of memory?)"
    return str(error)
