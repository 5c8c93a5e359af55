"""Signals that end the program, turned into an exception where that leaves nothing behind."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from ckpttool.errors import remarks_on

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(BaseException):
    """A signal asks the program to end; nothing on the way may swallow it."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.exit_code = 128 + number  # as shells count it: 130 for Ctrl-C
        self.remedy = ""

    def __str__(self) -> str:
        name = signal.Signals(self.exit_code - 128).name
        left = "; ".join(remarks_on(self)) or "nothing was left half-written"
        return f"ended by {name}; {left}{self.remedy}"


class Stopper:
    """Raises `Stopped` when a signal comes; while it defers, only when asked, or at the second.

    An exception that comes between the making of a file and the note that it was made would leave
    the file behind.
    """

    def __init__(self) -> None:
        self._is_deferring = False
        self._number = 0

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Take over the signals; one that is ignored stays so (nohup ignores SIGHUP)."""
        previous = {}
        if threading.current_thread() is threading.main_thread():
            for number in ENDING:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    previous[number] = signal.signal(number, self._handle)
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    @contextmanager
    def deferring(self) -> Iterator[None]:
        """Keep the first signal for `check`, which is called once more at the end."""
        self._is_deferring = True
        try:
            yield
        finally:
            self._is_deferring = False
        self.check()

    def check(self) -> None:
        """Raise `Stopped` if a signal has come."""
        if self._number:
            raise Stopped(self._number)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._is_deferring or self._number:
            raise Stopped(number)
        self._number = number
