"""The entry point of ``python -m ckpttool`` and of the console script."""

from __future__ import annotations

import gc
import os
import signal
import sys
from contextlib import suppress
from types import FrameType

from ckpttool import missing_module


def run() -> None:
    """Run the command line; handle signals even while packages are imported.

    Commands install handlers of their own; see `ckpttool.cli.signals`.
    """
    _open_closed_streams()
    if missing := missing_module():
        from ckpttool.problems import SystemUnfitError

        error = SystemUnfitError(missing)
        sys.stderr.write(f"error[{error.code}]: {error}\n")
        raise SystemExit(error.exit_code)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, _exit_at_once)
    # A large checkpoint is a million objects that stay and form no cycles.  Python would search
    # them for garbage again and again: a fifth of the time of a plan of 20,000 tensors (measured).
    gc.set_threshold(100_000, 50, 100)
    from ckpttool.cli.main import main

    try:
        main()
    finally:  # without it, Python searches all modules for garbage at exit
        gc.freeze()


def _open_closed_streams() -> None:
    """Open /dev/null for the standard streams that are closed (``>&-``).

    Otherwise the next file gets descriptor 1, and receives the printed text.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115, PTH123


def _exit_at_once(number: int, frame: FrameType | None) -> None:
    """Exit with one line, and with the exit code that shells use for a signal.

    There is nothing to clean up yet.  An exception would not be safe: Python 3.11 may replace it
    during an import.
    """
    with suppress(OSError):
        os.write(2, f"error[stopped]: ended by {signal.Signals(number).name}\n".encode())
    os._exit(128 + number)


if __name__ == "__main__":
    run()
