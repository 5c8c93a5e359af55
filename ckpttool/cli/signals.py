"""Signals as exceptions, raised at moments when that leaves no half-written file."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

from ckpttool.errors import notes_of

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
Handler = Callable[[int, FrameType | None], Any] | int | None
IMPORTLIB = "<frozen importlib._bootstrap>"
WORKERS = "concurrent.futures.process"  # imported when a run may have worker processes
WAIT_SECONDS = 0.01  # between two checks whether an import is complete


class Terminated(BaseException):
    """A signal to end the program; not an `Exception`, which a library might catch."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.exit_code = 128 + number  # as in shells: 130 for Ctrl-C
        self.remedy = ""

    def __str__(self) -> str:
        name = signal.Signals(self.exit_code - 128).name
        left = "; ".join(notes_of(self)) or "nothing was left half-written"
        return f"ended by {name}; {left}{self.remedy}"


class SignalGuard:
    """Raise `Terminated` at a signal; while deferring, in `check` or at the second signal.

    While files are written, a signal waits for `check`: an exception between the creation of a file
    and its record would leave the file behind.

    An exception during an import may be lost or replaced (Python 3.11 does so in ``__set_name__``).
    The previous handler then ends the program.  If there may be worker processes, the signal waits
    for the end of the import, or for a second signal.  A program that does not end its workers gets
    warnings of the resource tracker.

    Attributes
    ----------
    number
        The signal for which `Terminated` was or will be raised; 0 for none.  It is then the cause
        of any other exception.
    """

    def __init__(self) -> None:
        self.number = 0
        self._is_deferring = False
        self._deferred = 0  # the signal that waits for `check`
        self._previous: dict[int, Handler] = {}

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Handle the signals in this context, except ignored ones (nohup ignores SIGHUP)."""
        previous = self._previous
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    previous[number] = signal.signal(number, self._handle)
            previous[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._retry)
        try:
            yield
            if self.number:
                raise Terminated(self.number)
        finally:
            if previous:
                signal.setitimer(signal.ITIMER_REAL, 0)
            for handled, handler in previous.items():
                signal.signal(handled, handler)

    @contextmanager
    def deferring(self) -> Iterator[None]:
        """Keep the first signal for `check`; call it at the end, too."""
        self._is_deferring = True
        try:
            yield
        finally:
            self._is_deferring = False
        self.check()

    def check(self) -> None:
        """Raise `Terminated` if a signal was deferred."""
        if self._deferred:
            self._raise(self._deferred)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._is_deferring and (not self._deferred or _is_importing(frame)):
            self._deferred = number
        elif not _is_importing(frame):
            self._raise(number)
        elif WORKERS in sys.modules and not self.number:
            self.number = number
            signal.setitimer(signal.ITIMER_REAL, WAIT_SECONDS)
        elif callable(before := self._previous.get(number)):
            before(number, frame)
        else:
            self._raise(number)

    def _retry(self, alarm: int, frame: FrameType | None) -> None:
        """Raise `Terminated` for the signal that came during an import, if that is complete."""
        if self._is_deferring:
            self._deferred = self.number
        elif _is_importing(frame):
            signal.setitimer(signal.ITIMER_REAL, WAIT_SECONDS)
        else:
            self._raise(self.number)

    def _raise(self, number: int) -> NoReturn:
        self.number = number
        raise Terminated(number)


def _is_importing(frame: FrameType | None) -> bool:
    """Return whether a module is being imported."""
    while frame is not None and frame.f_code.co_filename != IMPORTLIB:
        frame = frame.f_back
    return frame is not None
