"""How a thread that reads learns that nobody waits for it any more: Ctrl-C, or another's error.

A thread cannot be ended from outside.  The pool that it belongs to tells it by an event whether its
work is still wanted, and every loop over bytes asks before it goes on.  What belongs to no pool is
never told to stop.
"""

from __future__ import annotations

from concurrent.futures import CancelledError
from contextvars import ContextVar
from threading import Event

_ENDED: ContextVar[Event | None] = ContextVar("ended", default=None)


def heed(ended: Event) -> None:
    """Have this thread stop, at its next `go_on`, once ``ended`` is set."""
    _ENDED.set(ended)


def go_on() -> None:
    """Return at once; raises `CancelledError` if the work of this thread is not wanted any more."""
    ended = _ENDED.get()
    if ended is not None and ended.is_set():
        raise CancelledError
