"""A progress bar on stderr: bytes, rate and time left.  Nothing if stderr is no terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def show_progress(what: str, total_bytes: int, quiet: bool) -> Iterator[Callable[[int], None]]:
    """A function to call with the number of bytes that were done since the last call.

    ``FORCE_COLOR`` and the like change nothing here: a bar in a log is noise.
    """
    if quiet or not sys.stderr.isatty():
        yield lambda nbytes: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=total_bytes)
        yield lambda nbytes: progress.update(task, advance=nbytes)
