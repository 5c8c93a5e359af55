"""``python -m ckpttool``, and what the console script calls."""

from __future__ import annotations

import gc
import os
import signal
import sys
from contextlib import suppress
from types import FrameType


def run() -> None:
    """Run the command line; signals count from here on, before packages are loaded.

    What writes has handlers of its own: see `ckpttool.cli.signals`.
    """
    _open_what_is_closed()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, _end)
    from ckpttool.cli.main import main
    from ckpttool.cli.streams import name_streams

    name_streams()
    try:
        main()
    finally:  # else Python would look for cycles to free in all that was loaded, for nobody
        gc.freeze()


def _open_what_is_closed() -> None:
    """Give standard streams that are closed (``>&-``) to nobody, for us and for our processes.

    Else the next file that is opened gets the number of one, and what is printed goes into it.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:  # the lowest number that is free is what is opened next
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        if getattr(sys, name) is None:
            stream = open(os.devnull, "r+" if number == 0 else "w")  # noqa: SIM115, PTH123
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


def _end(number: int, frame: FrameType | None) -> None:
    """End at once, with one line and the exit code that shells give to a signal.

    There is nothing to be cleaned up yet.  An exception could be lost: in the middle of an import
    Python 3.11 may make another one of it.
    """
    with suppress(OSError):
        os.write(2, f"ckpttool: ended by {signal.Signals(number).name}\n".encode())
    os._exit(128 + number)


if __name__ == "__main__":
    run()
