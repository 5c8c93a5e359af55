"""What is said of a failure: the cause, in words that people know."""

from __future__ import annotations

import os
from collections.abc import Collection
from concurrent.futures import BrokenExecutor

from ckpttool.errors import CkptToolError, reason_of
from ckpttool.run.partial import PARTIAL
from ckpttool.storage.locks import TakenError

WORKER_DIED = "a worker died (was it killed, or out of memory? --max-memory or fewer workers help)"


def cause_of(error: CkptToolError | OSError | BrokenExecutor) -> str:
    """What happened, in the system's words if it was the system; libhdf5 buries them."""
    if isinstance(error, TakenError):
        return f"another run is writing this output ({error.filename} is in use): wait for its end"
    if isinstance(error, OSError) and error.errno:
        what = reason_of(OSError(error.errno, os.strerror(error.errno)))
        has_name = isinstance(error.filename, str) and not error.filename.endswith(PARTIAL)
        return f"{error.filename}: {what}" if has_name else what
    if isinstance(error, BrokenExecutor):
        return WORKER_DIED
    return str(error)


def next_step(done: Collection[object]) -> str:
    """What to do after a failure when nothing but the failure is in the way."""
    return "" if done else "; nothing is complete yet: run it again when that is mended"
