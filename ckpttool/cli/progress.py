"""Progress on stderr: a bar on a terminal, in a log a line every 30 seconds, or lines of JSON."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

import click

from ckpttool.cli.tables import terminal_columns
from ckpttool.wording import format_bytes

if TYPE_CHECKING:
    from rich.progress import Progress

    from ckpttool.concurrency import OpenProgress

STARTED = "ckpttool.started"  # key of click's ``Context.meta``: when the run showed its first phase
LOG_SECONDS = 30  # between two lines; a shorter run has none
JSON_SECONDS = 1  # between two lines for programs; the last of a phase is always written
BAR_SECONDS = 1  # a shorter run shows no bar; rich, which draws it, takes 0.1 s to load
RATE_SECONDS = 1  # of a phase, before it shows a speed and the time left
BAR_COLUMNS = 4, 40  # the narrowest and the widest bar
FACTS_COLUMNS = 55  # beside the bar and the name of the phase


def open_progress(default: str, how: str) -> OpenProgress:
    """Return the `OpenProgress` of a command; ``default`` names its phases that have no name."""
    from ckpttool.concurrency import add_up

    return add_up(partial(show_count, how=how, unit=format_bytes), default)


@contextmanager
def show_count(
    phase: str, how: str, unit: Callable[[int], str] = str
) -> Iterator[Callable[[int, int], None]]:
    """Show a phase; yield a function that takes what is done so far and the total, 0 if unknown.

    ``how`` is ``auto``, ``json`` or ``none``.  ``FORCE_COLOR`` does not bring the bar into a log.
    """
    columns = terminal_columns(sys.stderr)
    if how == "none":
        yield lambda done, total: None
    elif how == "json":
        log = _Log(phase, unit, JSON_SECONDS)
        yield log.update
        log.write()
    elif columns is None or os.environ.get("TERM") in ("dumb", "unknown"):
        yield _Log(phase, unit, LOG_SECONDS).update
    else:
        with closing(_Bar(phase, unit, columns)) as bar:
            yield bar.update


class _Log:
    """The lines of a phase in a log, at equal times of the run: for people, or for programs."""

    def __init__(self, phase: str, unit: Callable[[int], str], every: int) -> None:
        self.phase = phase
        self.unit = unit
        self.every = every
        self.started = now = time.monotonic()
        of_run = click.get_current_context().meta.setdefault(STARTED, now)
        self.due = now + every - (now - of_run) % every
        self.reached = 0, 0

    def update(self, done: int, total: int) -> None:
        """Print a line if it is due."""
        self.reached = done, total
        if (now := time.monotonic()) >= self.due:
            self.write()
            self.due += self.every * (1 + (now - self.due) // self.every)

    def write(self) -> None:
        """Print what was reached."""
        (done, total), seconds = self.reached, time.monotonic() - self.started
        if self.every == LOG_SECONDS:
            facts = _describe(done, total, seconds, self.unit)
            line = ": ".join(filter(None, (self.phase, facts)))
        else:
            unit = "bytes" if self.unit is format_bytes else "items"
            reached = {"phase": self.phase, "done": done, "total": total or None, "unit": unit}
            line = json.dumps({**reached, "seconds": round(seconds, 3)})
        click.echo(line, err=True)


class _Bar:
    """The bar of a phase on a terminal, if the run lasts."""

    def __init__(self, phase: str, unit: Callable[[int], str], columns: int) -> None:
        self.phase = phase
        self.unit = unit
        self.columns = columns
        context = click.get_current_context()
        self.is_plain = context.color is False
        self.started = time.monotonic()
        self.due = context.meta.setdefault(STARTED, self.started) + BAR_SECONDS
        self.done = self.total = 0
        self.progress: Progress | None = None

    def close(self) -> None:
        """Remove the bar."""
        if self.progress is not None:
            self.progress.stop()

    def update(self, done: int, total: int) -> None:
        """Move the bar; draw it if it is due."""
        self.done, self.total = done, total
        if self.progress is None and time.monotonic() >= self.due:
            self.progress = self._open()
        if self.progress is not None:
            self.progress.update(self.progress.task_ids[0], completed=done, total=total or None)

    def _open(self) -> Progress:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
        from rich.text import Text

        bar = self

        class Facts(ProgressColumn):
            def render(self, task: Task) -> Text:
                seconds = time.monotonic() - bar.started
                facts = _describe(bar.done, bar.total, seconds, bar.unit)
                return Text(facts, no_wrap=True, overflow="ellipsis")

        least, most = BAR_COLUMNS
        width = min(most, self.columns - FACTS_COLUMNS - len(self.phase))
        bars = [BarColumn(bar_width=width)] if width >= least else []
        console = Console(stderr=True, no_color=self.is_plain or None, width=self.columns)
        progress = Progress(TextColumn(self.phase), *bars, Facts(), console=console, transient=True)
        progress.add_task(self.phase, total=None)
        progress.start()
        return progress


def _describe(done: int, total: int, seconds: float, unit: Callable[[int], str]) -> str:
    """Return per cent, amount, speed and remaining time; of an unknown total the seconds so far.

    The first second, or per cent, may be the start of workers, so it shows no speed.

    Examples
    --------
    >>> _describe(3 * 2**20, 4 * 2**20, 60, format_bytes)
    '75%, 3.0 of 4.0 MiB, 51.2 KiB/s, ETA 0:00:20'
    """
    if not total:
        return str(timedelta(seconds=int(seconds))) if seconds >= 1 else ""
    whole = unit(total)
    amount = unit(done).removesuffix(f" {whole.rpartition(' ')[2]}")
    facts = [f"{100 * done // total}%", f"{amount} of {whole}"]
    if done and seconds >= RATE_SECONDS and 100 * done >= total:
        left = timedelta(seconds=round((total - done) * seconds / done))
        facts += [f"{unit(int(done / seconds))}/s", f"ETA {left}"]
    return ", ".join(facts)
