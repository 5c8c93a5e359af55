"""The screen of ``inspect --steps``: a row for each step, the newest last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ckpttool.cli.tables import print_table, print_text
from ckpttool.problems import join_clauses
from ckpttool.wording import count, format_bytes, format_numbers

if TYPE_CHECKING:
    from ckpttool.discovery.saves import FoundStep
    from ckpttool.discovery.scan import Steps

_MAX_STEPS = 40  # the newest; more are no overview
_MAX_RANGES = 6  # of ranks, in one cell
_WORDS = {True: "yes", False: "no", None: "not known"}


def print_steps(found: Steps, *, show_all: bool) -> None:
    """Print the steps, with ``show_all`` every one."""
    shown = found.steps if show_all else found.steps[-_MAX_STEPS:]
    complete = sum(one.complete is True for one in found.steps)
    title = f"{found.path}: {count(len(found.steps), 'step')}, {complete} complete"
    if replaced := sum(one.is_by_replicas for one in found.steps):
        title += f" ({replaced} by replicas)"
    if not shown:
        print_text(title)
        return
    columns = ("step", "complete", "ranks", "files>", "size>", "what")
    print_table(title, columns, map(_cells, shown))
    if earlier := len(found.steps) - len(shown):
        print_text(f"and {count(earlier, 'earlier step')} (--all lists every step)")


def _cells(one: FoundStep) -> Sequence[str]:
    default = "read without --step" if one.is_chosen and one.name is not None else ""
    return (
        one.name or one.step or "",
        "by replicas" if one.is_by_replicas else _WORDS[one.complete],
        format_numbers(one.ranks, ", ", _MAX_RANGES) or "none",
        str(one.files),
        format_bytes(one.nbytes),
        join_clauses(default, one.reason),
    )
