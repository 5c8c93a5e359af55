"""Progress bars on stderr with amount, speed and remaining time; only on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn, Task, TaskID


@contextmanager
def show_progress(what: str, total_bytes: int, quiet: bool) -> Iterator[Callable[[int], None]]:
    """Yield a function that takes the number of bytes done since the last call.

    Without a terminal it shows nothing, even with ``FORCE_COLOR``: a bar does not belong in a log.
    """
    if quiet or not sys.stderr.isatty():
        yield lambda nbytes: None
        return
    from rich.progress import DownloadColumn, TransferSpeedColumn
    from rich.text import Text

    class Speed(TransferSpeedColumn):
        """The speed, or an empty text before it is measured."""

        def render(self, task: Task) -> Text:
            return super().render(task) if task.finished_speed or task.speed else Text("")

    columns = DownloadColumn(binary_units=True), Speed()
    with _bar(what, total_bytes, *columns) as (progress, task):
        yield lambda nbytes: progress.update(task, advance=nbytes)


@contextmanager
def show_count(what: str, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """Yield a function that takes the number of items done so far, and the total."""
    if quiet or not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.progress import MofNCompleteColumn

    with _bar(what, None, MofNCompleteColumn()) as (progress, task):
        yield lambda done, total: progress.update(task, completed=done, total=total)


@contextmanager
def _bar(
    what: str, total: int | None, *columns: ProgressColumn
) -> Iterator[tuple[Progress, TaskID]]:
    """Show a bar with these columns and the remaining time; ``total`` may be set later."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    shown = (TextColumn("{task.description}"), BarColumn(), *columns, TimeRemainingColumn())
    with Progress(*shown, console=Console(stderr=True), transient=True) as progress:
        yield progress, progress.add_task(what, total=total)
