"""How a thread that reads learns that nobody waits for it any more: Ctrl-C, or another's error.

A thread cannot be ended from outside.  The pool that it belongs to tells it by an event whether its
work is still wanted, and every loop over bytes asks before it goes on.  What belongs to no pool is
never told to stop.

Python handles a signal in its main thread, when that runs.  If another thread takes it, or it comes
in the moment before the main thread begins to wait, it is not heard as long as that waits.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import BrokenExecutor, CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from threading import Event
from typing import ParamSpec, TypeVar

from ckpttool.errors import EngineError

OnProgress = Callable[[int], None]
OpenProgress = Callable[[int], AbstractContextManager[OnProgress]]  # is told the number of bytes


def no_progress(nbytes: int) -> AbstractContextManager[OnProgress]:
    """An `OpenProgress` that shows nothing."""
    return nullcontext(lambda nbytes: None)


P = ParamSpec("P")
T = TypeVar("T")

WAKE_SECONDS = 0.2
NO_ROOM = "the system has no room for more (ulimit -u, or the limit of the container)"
_ENDED: ContextVar[Event | None] = ContextVar("ended", default=None)


def heed(ended: Event) -> None:
    """Have this thread stop, at its next `go_on`, once ``ended`` is set."""
    _ENDED.set(ended)


def go_on() -> None:
    """Return at once; raises `CancelledError` if the work of this thread is not wanted any more."""
    ended = _ENDED.get()
    if ended is not None and ended.is_set():
        raise CancelledError


def result_of(future: Future[T]) -> T:
    """What a call gives, once it is done; wakes now and then, so that a signal is heard."""
    while not wait([future], WAKE_SECONDS).done:
        pass
    return future.result()


class Threads(ThreadPoolExecutor):
    """Threads, of which the system may have no more."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Hand a call to a thread, which may be started for it.

        Raises
        ------
        EngineError
            No thread can be started.
        """
        try:
            return super().submit(fn, *args, **kwargs)
        except RuntimeError as error:
            if self._shutdown or isinstance(error, BrokenExecutor):
                raise
            raise EngineError("threads", f"{error}; {NO_ROOM}") from error
