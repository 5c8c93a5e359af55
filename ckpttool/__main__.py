"""``python -m ckpttool``, and what the console script calls."""

from __future__ import annotations

import gc
import signal
from types import FrameType


def run() -> None:
    """Run the command line; signals count from here on, before packages are loaded.

    What writes has handlers of its own: see `ckpttool.cli.signals`.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, _end)
    from ckpttool.cli.main import main

    try:
        main()
    finally:  # else Python would look for cycles to free in all that was loaded, for nobody
        gc.freeze()


def _end(number: int, frame: FrameType | None) -> None:
    """End without a traceback, with the exit code that shells give to a signal."""
    raise SystemExit(128 + number)


if __name__ == "__main__":
    run()
