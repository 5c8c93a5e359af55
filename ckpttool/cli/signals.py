"""Signals that end the program, turned into an exception where that leaves nothing behind."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

from ckpttool.errors import remarks_on

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
Handler = Callable[[int, FrameType | None], Any] | int | None
IMPORTLIB = "<frozen importlib._bootstrap>"
WORKERS = "concurrent.futures.process"  # loaded when a run has workers that it must end itself
WAIT_SECONDS = 0.01  # until it is seen again whether an import is done


class Stopped(BaseException):
    """A signal asks the program to end; not an `Exception`, so that nobody swallows it."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.exit_code = 128 + number  # as shells count it: 130 for Ctrl-C
        self.remedy = ""

    def __str__(self) -> str:
        name = signal.Signals(self.exit_code - 128).name
        left = "; ".join(remarks_on(self)) or "nothing was left half-written"
        return f"ended by {name}; {left}{self.remedy}"


class Stopper:
    """Raises `Stopped` when a signal comes; while it defers, in `check` or at the second signal.

    An exception between the creation of a file and its record would leave the file behind.  An
    exception during an import may be lost or replaced (Python 3.11 does so in ``__set_name__``).
    Such a signal goes to the previous handler, which ends the program; while files are written it
    waits for `check`.  If there may be workers it waits for the end of the import, or for a second
    signal: a program that does not end its workers gets warnings of the resource tracker.

    Attributes
    ----------
    number
        The signal for which `Stopped` was, or is to be, raised; 0 for none.  Any other exception
        of the command was then made from it.
    """

    def __init__(self) -> None:
        self.number = 0
        self._is_deferring = False
        self._number = 0
        self._previous: dict[int, Handler] = {}

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Take over the signals; one that is ignored stays so (nohup ignores SIGHUP)."""
        previous = self._previous
        if threading.current_thread() is threading.main_thread():
            for number in ENDING:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    previous[number] = signal.signal(number, self._handle)
            previous[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._look_again)
        try:
            yield
            if self.number:
                raise Stopped(self.number)
        finally:
            if previous:
                signal.setitimer(signal.ITIMER_REAL, 0)
            for ended, handler in previous.items():
                signal.signal(ended, handler)

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
            self._raise(self._number)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._is_deferring and (not self._number or _is_importing(frame)):
            self._number = number
        elif not _is_importing(frame):
            self._raise(number)
        elif WORKERS in sys.modules and not self.number:
            self.number = number
            signal.setitimer(signal.ITIMER_REAL, WAIT_SECONDS)
        elif callable(before := self._previous.get(number)):
            before(number, frame)
        else:
            self._raise(number)

    def _look_again(self, alarm: int, frame: FrameType | None) -> None:
        if self._is_deferring:
            self._number = self.number
        elif _is_importing(frame):
            signal.setitimer(signal.ITIMER_REAL, WAIT_SECONDS)
        else:
            self._raise(self.number)

    def _raise(self, number: int) -> NoReturn:
        self.number = number
        raise Stopped(number)


def _is_importing(frame: FrameType | None) -> bool:
    """Return whether a module is being imported."""
    while frame is not None and frame.f_code.co_filename != IMPORTLIB:
        frame = frame.f_back
    return frame is not None
