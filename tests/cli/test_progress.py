"""Progress: a bar on a real pseudo-terminal, and lines in a log."""

from __future__ import annotations

import json
import os
import re
import time
from unittest.mock import MagicMock

import click
import pytest

from ckpttool.cli import progress
from tests.support.commands import run_well
from tests.support.corpus import GOLDEN
from tests.support.terminals import NEVER, on_terminal

CASE = GOLDEN / "reshard_8_to_4"
SRC = (CASE / "src", "-s", CASE / "src_strategy.ckpt")


@pytest.mark.parametrize("columns", [20, 60, 140])
def test_a_terminal_gets_per_cent_bytes_speed_and_time_left(tmp_path, columns):
    words = ["merge", *SRC, "-o", tmp_path / "m.h5"]
    shown, code = on_terminal(*words, columns=columns, bar_seconds=0)
    assert code == 0
    facts = r"writing .*100%, 42\.6 of 42\.6 KiB, \d+\.\d [KM]iB/s, ETA 0:00:00"
    assert re.search(facts, shown) or columns == 20
    for phase in ("reading headers", "sampling", "planning", "writing"):
        assert phase in shown
    assert "checksums" not in shown


def test_a_short_run_shows_no_bar():
    shown, code = on_terminal("inspect", *SRC, bar_seconds=NEVER)
    assert code == 0
    assert shown.startswith(str(SRC[0]))


def test_quiet_hides_everything(tmp_path):
    assert on_terminal("merge", *SRC, "-o", tmp_path / "q.h5", "-q", bar_seconds=0) == ("", 0)


def test_a_dumb_terminal_gets_no_bar(tmp_path):
    shown, code = on_terminal("merge", *SRC, "-o", tmp_path / "m.h5", TERM="dumb", bar_seconds=0)
    assert code == 0
    assert "writing" not in shown


def test_a_terminal_shows_how_much_of_what_is_kept_was_read(tmp_path):
    words = [*SRC, "-o", tmp_path / "m.h5"]
    run_well("merge", *words)
    time.sleep(0.01)
    os.utime(tmp_path / "m.h5")  # so that only its contents tell that it is what was written
    shown, code = on_terminal("merge", *words, "--resume", bar_seconds=0)
    assert code == 0
    assert re.search(r"reading what is kept .*\d of \d+\.\d KiB", shown)


def test_phases_of_checks_have_names(tmp_path):
    words = [*SRC, "-o", tmp_path / "m.ckpt", "--check-replicas", "--crc"]
    shown, code = on_terminal("merge", *words, bar_seconds=0)
    assert code == 0
    assert "verifying checksums" in shown
    assert re.search(r"comparing replicas .*\d%", shown)


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 1e6

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    with click.Context(click.Command("merge")):
        yield clock


def test_programs_get_an_object_every_second_and_the_last_of_each_phase(clock, capsys):
    with progress.open_progress("reading", how="json")(100 << 20, "first") as on_progress:
        for _ in range(5):
            clock.now += 0.5
            on_progress(10 << 20)
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    common = {"phase": "first", "total": 100 << 20, "unit": "bytes"}
    reached = ((20, 1.0), (40, 2.0), (50, 2.5))
    assert lines == [{**common, "done": n << 20, "seconds": seconds} for n, seconds in reached]


def test_a_log_gets_a_line_every_30_seconds_of_the_run(clock, capsys):
    show = progress.open_progress("reading", how="auto")
    for phase in ("first", "second"):
        with show(100 << 20, phase) as on_progress:
            for _ in range(50):
                clock.now += 1
                on_progress(2 << 20)
    assert capsys.readouterr().err == (
        "first: 60%, 60.0 of 100.0 MiB, 2.0 MiB/s, ETA 0:00:20\n"
        "second: 20%, 20.0 of 100.0 MiB, 2.0 MiB/s, ETA 0:00:40\n"
        "second: 80%, 80.0 of 100.0 MiB, 2.0 MiB/s, ETA 0:00:10\n"
    )


def test_a_log_has_one_line_for_a_time_without_news(clock, capsys):
    with progress.open_progress("reading", how="auto")(100) as on_progress:
        clock.now += 100
        on_progress(50)
        on_progress(1)
        clock.now += 20
        on_progress(1)
    assert capsys.readouterr().err == (
        "reading: 50%, 50 of 100 B, 0 B/s, ETA 0:01:40\n"
        "reading: 52%, 52 of 100 B, 0 B/s, ETA 0:01:51\n"
    )


@pytest.mark.parametrize(("seconds", "done"), [(0.9, 500), (60, 9)])
def test_the_first_second_and_the_first_per_cent_of_a_phase_tell_no_speed(seconds, done):
    assert progress._describe(done, 1000, seconds, str) == f"{done // 10}%, {done} of 1000"


def test_a_bar_is_drawn_once_the_run_has_lasted_a_second(clock, monkeypatch):
    opened = []
    monkeypatch.setattr(progress._Bar, "_open", lambda bar: opened.append(bar.phase) or MagicMock())
    monkeypatch.setattr(progress, "terminal_columns", lambda stream: 80)
    monkeypatch.setenv("TERM", "xterm")
    show = progress.open_progress("reading", how="auto")
    for phase in ("first", "second", "third"):
        with show(100, phase) as on_progress:
            clock.now += 0.6
            on_progress(1)
    assert opened == ["second", "third"]


def test_a_log_of_a_short_run_has_no_line(clock, capsys):
    with progress.open_progress("reading", how="auto")(100) as on_progress:
        clock.now += 29
        on_progress(100)
    assert capsys.readouterr() == ("", "")


def test_more_bytes_than_estimated_are_100_per_cent(clock, capsys):
    with progress.open_progress("reading", how="auto")(100) as on_progress:
        clock.now += 30
        on_progress(150)
    assert capsys.readouterr().err == "reading: 100%, 100 of 100 B, 3 B/s, ETA 0:00:00\n"
