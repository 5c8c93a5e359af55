"""Wait for the run that is in the way of another one, and try again when it has ended."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

from msgspec.structs import replace

from ckpttool.concurrency import OpenProgress, no_progress
from ckpttool.problems import BusyError, Diagnostic, FormatError, add_note, join_clauses
from ckpttool.storage.files import is_there
from ckpttool.transaction.locks import is_held
from ckpttool.transaction.log import Log
from ckpttool.transaction.states import LOG

T = TypeVar("T")

POLL_SECONDS = 0.5  # between two checks of a lock


def wait_while_busy(
    attempt: Callable[[], T],
    seconds: float | None,
    *,
    open_progress: OpenProgress = no_progress,
    on_note: Callable[[Diagnostic], None] = lambda note: None,
) -> T:
    """Return what ``attempt`` returns; while another run is in its way, wait and try again.

    A run that died has released its locks, so it is like one that ended.  Without ``seconds`` it
    does not wait.

    Raises
    ------
    BusyError
        The time is over.
    """
    if seconds is None:
        return attempt()
    end, limit = time.monotonic() + seconds, timedelta(seconds=int(seconds))
    while True:
        try:
            return attempt()
        except BusyError as error:
            named = {_name_writer(problem): problem for problem in reversed(error.diagnostics)}
            by, problem = max(named.items(), key=lambda item: bool(item[0]))
            facts = join_clauses(by, f"{limit} at most")
            note = Diagnostic("waited", "waiting until another run ends", facts=facts)
            on_note(replace(note, where=problem.where, path=problem.path))
            with open_progress(0, f"waiting for {by or problem.where}") as on_progress:
                is_free = False
                while not is_free:
                    if time.monotonic() >= end:
                        add_note(error, f"waited for {limit}")
                        raise
                    time.sleep(min(POLL_SECONDS, seconds))
                    on_progress(0)
                    is_free = all(_is_free(problem.path) for problem in error.diagnostics)


def _is_free(path: str | None) -> bool:
    return path is None or not is_there(Path(path)) or is_held(Path(path)) is False


def _name_writer(busy: Diagnostic) -> str:
    log = Path(busy.path or "")
    if LOG.fullmatch(log.name):
        with suppress(FormatError, FileNotFoundError):
            if (writer := Log.read(log).writer) is not None:
                return str(writer)
    return busy.facts
