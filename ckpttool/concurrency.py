"""How a thread that reads learns that nobody waits for it any more: Ctrl-C, or another's error.

A thread cannot be ended from outside.  Its pool sets an event when the work is not wanted any more,
and every loop over bytes checks that event.  A thread of no pool is never cancelled.

Python handles a signal in its main thread, when that runs.  A signal that another thread takes, or
that comes just before the main thread begins to wait, is not handled as long as that waits.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import (
    BrokenExecutor,
    CancelledError,
    Executor,
    Future,
    ThreadPoolExecutor,
    wait,
)
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from threading import Event
from typing import ParamSpec, TypeVar

from ckpttool.errors import EngineError


class InlineExecutor(Executor):
    """Runs every call at once, in the caller's thread."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run the call, and return a future that is done."""
        future: Future[T] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


OnProgress = Callable[[int], None]
OpenProgress = Callable[[int], AbstractContextManager[OnProgress]]  # takes the number of bytes


def no_progress(nbytes: int) -> AbstractContextManager[OnProgress]:
    """Return a context that shows nothing, as an `OpenProgress`."""
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
    """Raise `CancelledError` if the work of this thread is not wanted any more."""
    ended = _ENDED.get()
    if ended is not None and ended.is_set():
        raise CancelledError


def result_of(future: Future[T]) -> T:
    """Return the result of a call, once it is done; wake now and then to let signals be handled."""
    while not wait([future], WAKE_SECONDS).done:
        pass
    return future.result()


class Threads(ThreadPoolExecutor):
    """Threads; a system that has no room for one more is an `EngineError`."""

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
