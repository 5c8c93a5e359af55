"""Threads that can be cancelled, and other small parts that all executors share.

A thread cannot be stopped from outside.  Its pool sets an event on Ctrl-C or after an error, and
every loop over bytes checks that event.  A thread that belongs to no pool is never cancelled.

Python handles signals in the main thread, and only while that thread runs.  The main thread
therefore waits for results in short intervals; see `wait_result`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import (
    BrokenExecutor,
    CancelledError,
    Executor,
    Future,
    ThreadPoolExecutor,
    wait,
)
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from threading import Event, Lock
from typing import ParamSpec, Protocol, TypeVar

from ckpttool.problems import EngineError


class InlineExecutor(Executor):
    """An executor that runs every call immediately, in the caller's thread."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run the call and return a finished future."""
        future: Future[T] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


OnProgress = Callable[[int], None]  # takes the bytes done since the last call


class OpenProgress(Protocol):
    """A function that shows a phase of a run; phases do not overlap."""

    def __call__(self, nbytes: int, phase: str = ...) -> AbstractContextManager[OnProgress]:
        """Show a phase of so many bytes, 0 if nobody counts them."""
        ...


def no_progress(nbytes: int, phase: str = "") -> AbstractContextManager[OnProgress]:
    """Return a context that shows no progress; an `OpenProgress`."""
    return nullcontext(lambda nbytes: None)


OnCount = Callable[[int, int], None]  # takes what is done and the total, 0 if nobody knows it


class OpenCount(Protocol):
    """A function that shows a phase whose total is not known before."""

    def __call__(self, phase: str) -> AbstractContextManager[OnCount]:
        """Show a phase."""
        ...


def no_count(phase: str) -> AbstractContextManager[OnCount]:
    """Return a context that shows no progress; an `OpenCount`."""
    return nullcontext(lambda done, total: None)


def add_up(open_count: OpenCount, default: str) -> OpenProgress:
    """Return what shows phases of bytes with ``open_count``; ``default`` names those without."""

    @contextmanager
    def open_progress(nbytes: int, phase: str = default) -> Iterator[OnProgress]:
        done = 0
        with open_count(phase) as on_count:
            on_count(0, nbytes)

            def advance(more: int) -> None:
                nonlocal done
                done = min(done + more, nbytes) if nbytes else done + more  # totals are estimates
                on_count(done, nbytes)

            yield advance

    return open_progress


P = ParamSpec("P")
A = TypeVar("A")
K = TypeVar("K")
T = TypeVar("T")

WAKE_SECONDS = 0.2
NO_ROOM = "raise the limit of `ulimit -u` or of the container"  # hint
_CANCEL: ContextVar[Event | None] = ContextVar("cancel", default=None)


def bind_cancel_event(event: Event) -> None:
    """Make `check_cancelled` raise in this thread as soon as ``event`` is set."""
    _CANCEL.set(event)


def check_cancelled() -> None:
    """Raise `CancelledError` if the work of this thread was cancelled."""
    event = _CANCEL.get()
    if event is not None and event.is_set():
        raise CancelledError


SMALL_BYTES = 1 << 14  # of a tensor, on average
_TURN = Lock()


def take_turns(nbytes: int, tensors: int) -> AbstractContextManager[object]:
    """Return what a thread holds while it reads so many tensors of so many bytes together.

    Threads take turns with small ones.  What these cost is Python, which runs on one processor: two
    threads that pass the interpreter's lock to each other at each call take a sixth longer than
    one (measured).
    """
    return _TURN if nbytes < SMALL_BYTES * tensors else nullcontext()


def wait_result(future: Future[T]) -> T:
    """Wait for the result of a call and return it; Python handles signals meanwhile."""
    while not wait([future], WAKE_SECONDS).done:
        pass
    return future.result()


def map_in_order(
    executor: Executor, function: Callable[[A], T], given: Iterable[tuple[K, A]], most: int
) -> Iterator[tuple[K, T]]:
    """Yield the key of each argument and the result of its call, in order.

    At most ``most`` calls wait or run at a time; the arguments advance as they complete.
    """
    pending = deque[tuple[K, Future[T]]]()

    def collect() -> tuple[K, T]:
        key, future = pending.popleft()
        return key, wait_result(future)

    try:
        for key, argument in given:
            pending.append((key, executor.submit(function, argument)))
            if len(pending) >= most:
                yield collect()
        while pending:
            yield collect()
    finally:
        for _, future in pending:
            future.cancel()


class Threads(ThreadPoolExecutor):
    """A thread pool that raises `EngineError` when the system cannot start another thread."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Schedule a call; this may start a thread.

        Raises
        ------
        EngineError
            The system cannot start another thread.
        """
        try:
            return super().submit(fn, *args, **kwargs)
        except RuntimeError as error:
            if self._shutdown or isinstance(error, BrokenExecutor):
                raise
            raise EngineError("threads", "no thread starts", NO_ROOM, str(error)) from error
