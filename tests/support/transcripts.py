"""Texts of cases that a test reads: what is done, and indented below it what comes of it.

A case begins with ``# TITLE``.  ``SNAPSHOT_UPDATE=1`` writes what comes of it now.
"""

from __future__ import annotations

import fcntl
import os
import textwrap
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from tests.support.snapshots import UPDATE

COLUMNS = 98


def read_cases(path: Path) -> dict[str, str]:
    parts = [one.split("\n", 1) for one in path.read_text(encoding="utf-8").split("\n# ")[1:]]
    cases = {title: case.rstrip("\n") for title, case in parts}
    assert len(cases) == len(parts), "two cases of one title"
    return cases


def check_case(path: Path, title: str, act: Callable[[str], Iterable[str]]) -> None:
    compare_case(path, title, "\n".join(_transcribe(read_cases(path)[title], act)))


def compare_case(path: Path, title: str, text: str) -> None:
    """Compare a case with what it is now, or write that if it is asked for."""
    expected = read_cases(path)[title]
    if os.environ.get(UPDATE):
        folder = os.open(path.parent, os.O_RDONLY)
        fcntl.flock(folder, fcntl.LOCK_EX)  # tests of other cases run beside this one
        old = path.read_text(encoding="utf-8")
        new = old.replace(f"# {title}\n{expected}\n", f"# {title}\n{text}\n")
        path.with_suffix(".new").write_text(new, encoding="utf-8")
        path.with_suffix(".new").replace(path)
        os.close(folder)
    else:
        assert text.splitlines() == expected.splitlines()


def _transcribe(case: str, act: Callable[[str], Iterable[str]]) -> Iterator[str]:
    for line in case.splitlines():
        if line.startswith(" ") or not line:
            continue
        yield line
        for outcome in act(line):
            yield from textwrap.wrap(
                outcome,
                COLUMNS,
                initial_indent="  ",
                subsequent_indent="    ",
                break_long_words=False,
                break_on_hyphens=False,
            )
