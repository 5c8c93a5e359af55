"""Engines: a word on the command line -> a context manager that gives an executor."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class InlineExecutor(Executor):
    """Runs every call at once, in the caller's thread."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """A future that is done already."""
        future: Future[T] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


def default_jobs() -> int:
    """Workers that are used if nobody says how many: the processors at hand, at most 8."""
    return min(8, len(os.sched_getaffinity(0)))


@contextmanager
def open_engine(name: str) -> Iterator[Executor]:
    """The executor of an engine, shut down at the end.

    Parameters
    ----------
    name
        ``"inline"`` or ``"threads:N"``.

    Raises
    ------
    ValueError
        There is no such engine.
    """
    kind, _, count = name.partition(":")
    if kind == "inline" and not count:
        yield InlineExecutor()
        return
    if kind != "threads" or not count.isdecimal() or int(count) < 1:
        raise ValueError(f"no engine {name!r}; there are inline and threads:N")
    executor = ThreadPoolExecutor(int(count), thread_name_prefix="ckpttool")
    try:
        yield executor
    finally:
        executor.shutdown(wait=True, cancel_futures=True)
