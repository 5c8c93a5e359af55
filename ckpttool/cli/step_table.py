"""The screen of ``inspect --steps``: a row for each step, the newest last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ckpttool.cli.tables import MAX_RANGES, print_table, print_text
from ckpttool.problems import join_clauses
from ckpttool.wording import count, format_bytes, format_numbers

if TYPE_CHECKING:
    from ckpttool.discovery.saves import FoundStep
    from ckpttool.discovery.scan import Steps

_MAX_STEPS = 40  # the newest; a longer table gives no overview
_WORDS = {True: "yes", False: "no", None: "not known"}


def print_steps(steps: Steps, *, show_all: bool) -> None:
    """Print the steps, with ``show_all`` every one."""
    shown = steps.steps if show_all else steps.steps[-_MAX_STEPS:]
    complete = sum(step.complete is True for step in steps.steps)
    title = f"{steps.path}: {count(len(steps.steps), 'step')}, {complete} complete"
    if replaced := sum(step.is_by_replicas for step in steps.steps):
        title += f" ({replaced} by replicas)"
    if not shown:
        print_text(title)
        return
    columns = ("step", "complete", "ranks", "files>", "size>", "what")
    print_table(title, columns, map(_cells, shown))
    if earlier := len(steps.steps) - len(shown):
        print_text(f"and {count(earlier, 'earlier step')} (--all lists every step)")


def _cells(step: FoundStep) -> Sequence[str]:
    default = "read without --step" if step.is_chosen and step.name is not None else ""
    return (
        step.name or step.step or "",
        "by replicas" if step.is_by_replicas else _WORDS[step.complete],
        format_numbers(step.ranks, MAX_RANGES) or "none",
        str(step.files),
        format_bytes(step.nbytes),
        join_clauses(default, step.reason),
    )
