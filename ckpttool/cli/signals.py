"""Signals as exceptions, raised at moments when that leaves no half-written file."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

from ckpttool.problems import BusyError, add_note, join_clauses, notes_of

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
Handler = Callable[[int, FrameType | None], Any] | int | None
IMPORTLIB = "<frozen importlib._bootstrap>"
WORKERS = "concurrent.futures.process"  # imported when a run may have worker processes
WAIT_SECONDS = 0.01  # between two checks whether an import is complete
AT_ONCE = 3  # signals of a user who does not want to wait; timeout(1) sends two in a row
MAY_BE_LEFT = "half-written files may be left, which the next run removes or completes"


class Terminated(BaseException):
    """A signal to end the program; not an `Exception`, which a library might catch."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.exit_code = 128 + number  # as in shells: 130 for Ctrl-C
        self.complete = ""  # how many outputs are complete
        self.hint = ""

    @property
    def facts(self) -> str:
        """The files that were left, and the number of complete outputs."""
        left = "; ".join(notes_of(self)) or "nothing was left half-written"
        return join_clauses(left, self.complete)

    def __str__(self) -> str:
        return f"ended by {signal.Signals(self.exit_code - 128).name}"


class SignalGuard:
    """Raise `Terminated` at the first signal; while deferring, in `check`.

    While files are written, a signal waits for `check`: an exception between the creation of a file
    and its record would leave the file behind.  After an exception, files are cleaned up, so the
    second signal raises nothing.  The third raises again, because the run may hang.

    An exception during an import may be lost or replaced (Python 3.11 does so in ``__set_name__``).
    The previous handler then ends the program.  If there may be worker processes, the signal waits
    for the end of the import, or for a second signal.  A program that does not end its workers gets
    warnings of the resource tracker.

    Attributes
    ----------
    ended
        The exception that was or will be raised for a signal; None for none.  It is then the cause
        of any other exception.
    """

    def __init__(self) -> None:
        self.ended: Terminated | None = None
        self._is_deferring = False
        self._is_ending = False  # the exception was raised
        self._deferred = 0  # the signal that waits for `check`
        self._count = 0
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
            if self.ended is not None:
                raise self.ended
        finally:
            if previous:
                signal.setitimer(signal.ITIMER_REAL, 0)
            for handled, handler in previous.items():
                signal.signal(handled, handler)

    @contextmanager
    def deferring(self) -> Iterator[None]:
        """Keep signals for `check`, and call it at the end; after an exception, go on deferring.

        A run that another one keeps from writing has nothing to clean up, and may wait for long.
        """
        self._is_deferring = True
        try:
            yield
        except BusyError:
            self._is_deferring = False
            self.check()
            raise
        self._is_deferring = False
        self.check()

    def check(self) -> None:
        """Raise `Terminated` if a signal was deferred."""
        if self._deferred:
            self._raise(self._deferred)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._count += 1
        is_importing = _is_importing(frame)
        is_waiting = self._is_deferring or self._is_ending
        if is_waiting and (is_importing or self._count < AT_ONCE):
            self._deferred = self._deferred or number
        elif not is_importing:
            self._raise(self._deferred or number, MAY_BE_LEFT if self._is_deferring else "")
        elif WORKERS in sys.modules and self.ended is None:
            self.ended = Terminated(number)
            signal.setitimer(signal.ITIMER_REAL, WAIT_SECONDS)
        elif callable(before := self._previous.get(number)):
            before(number, frame)
        else:
            self._raise(number)

    def _retry(self, alarm: int, frame: FrameType | None) -> None:
        if self._is_deferring:
            self._deferred = alarm
        elif _is_importing(frame):
            signal.setitimer(signal.ITIMER_REAL, WAIT_SECONDS)
        else:
            self._raise(alarm)

    def _raise(self, number: int, note: str = "") -> NoReturn:
        self.ended = self.ended or Terminated(number)
        if note and note not in notes_of(self.ended):
            add_note(self.ended, note)
        self._is_ending = True
        raise self.ended


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_filename != IMPORTLIB:
        frame = frame.f_back
    return frame is not None
