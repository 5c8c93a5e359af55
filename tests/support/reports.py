"""A small checkpoint with optimizer state, and what ``verify`` reports on it."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np

import ckpttool
from ckpttool.model.layout import Layout
from ckpttool.model.strategy import Strategy
from ckpttool.operations.look import Subject
from ckpttool.operations.verification import Verification
from ckpttool.operations.verification import verify as find_problems
from ckpttool.problems import Diagnostic
from tests.support.checkpoints import ROWS, cut, strategy_of, write_ranks
from tests.support.diagnostics import graded
from tests.support.readers import Entry

STATES = strategy_of({"w": ROWS, "adam_m.w": ROWS, "bias": Layout((2, 2), ((1,),))})


def plain(name: str, *shape: int) -> Entry:
    """Return a Float32 tensor of ordinary numbers that are all different."""
    values = np.arange(1, int(np.prod(shape, dtype=int)) + 1, dtype="<f4") + len(name)
    return Entry("Float32", shape, values.astype("<f4").tobytes())


def whole() -> dict[str, Entry]:
    """Return the full tensors of a small checkpoint."""
    step = Entry("Int32", (), struct.pack("<i", 7))
    return {"w": plain("w", 8, 3), "adam_m.w": plain("m", 8, 3), "bias": plain("b", 8),
            "global_step": step}  # fmt: skip


def ranks_of(entries: Mapping[str, Entry]) -> dict[int, dict[str, Entry]]:
    """Return what each rank holds of full tensors."""
    return cut(entries, STATES)


def verify(path: Path | str, strategy: Strategy | None = None, **options: object) -> Verification:
    """Return the report on what is there."""
    source = Subject(ckpttool.scan(str(path), command="verify"), strategy)
    return find_problems(source, **options)


def check(
    folder: Path,
    ranks: Mapping[int, Mapping[str, Entry]],
    strategy: Strategy | None = STATES,
    format: str = "ckpt",
    **options: object,
) -> Verification:
    """Return the report on a checkpoint that is written first."""
    write_ranks(folder, ranks, format)
    return verify(folder, strategy, **options)


def kinds(report: Verification) -> list[tuple[str | None, str]]:
    """Return severity and code of each finding."""
    return [graded(finding) for finding in report.findings]


def the_finding(report: Verification, kind: str, severity: str = "error") -> Diagnostic:
    """Return the only finding after checking its severity and code."""
    (finding,) = report.findings
    assert graded(finding) == (severity, kind), finding
    return finding
