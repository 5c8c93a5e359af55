"""What `scan` finds out about a path: its files and notes, or the problems that it raises."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpttool.discovery.scan import SourceOptions, scan
from ckpttool.model.strategy import Strategy
from ckpttool.problems import CombinedError, PlanError
from tests.support.errors import texts_of


def found(
    src: Path | str, *, strategy: Strategy | None = None, **options: object
) -> dict[int, str]:
    """Return the path of each rank's file below the root, as `make_run` writes it into the file."""
    catalog = scan(str(src), SourceOptions(**options), strategy)
    assert not catalog.damaged
    return {rank: next(iter(file.tensors)) for rank, file in catalog.files.items()}


def notes_of(
    src: Path | str, *kinds: str, strategy: Strategy | None = None, **options: object
) -> list[str]:
    """Return the texts of the notes of some kinds, or of all."""
    found = scan(str(src), SourceOptions(**options), strategy).diagnostics
    return [note.text for note in found if not kinds or note.code in kinds]


def problems_of(
    src: Path | str, *, strategy: Strategy | None = None, **options: object
) -> tuple[str, ...]:
    """Return the problems of a path that cannot be scanned."""
    with pytest.raises((PlanError, CombinedError)) as caught:
        scan(str(src), SourceOptions(**options), strategy)
    return texts_of(caught.value)


def fails(src: Path | str, *reasons: str, **options: object) -> tuple[str, ...]:
    """Return the problems of a path after checking that they give these reasons."""
    problems = problems_of(src, **options)
    text = "\n".join(problems)
    for reason in reasons:
        assert reason in text, text
    return problems
