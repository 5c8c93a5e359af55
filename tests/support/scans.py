"""What `scan` finds out about a path: its notes, or the problems that it raises."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpttool.discovery.scan import SourceOptions, scan
from ckpttool.errors import CombinedError, PlanError


def notes_of(src: Path | str, *kinds: str, **options: object) -> list[str]:
    """Return the texts of the notes of some kinds, or of all."""
    found = scan(str(src), SourceOptions(**options)).diagnostics
    return [note.text for note in found if not kinds or note.code in kinds]


def problems_of(src: Path | str, **options: object) -> tuple[str, ...]:
    """Return the problems of a path that cannot be scanned."""
    with pytest.raises((PlanError, CombinedError)) as caught:
        scan(str(src), SourceOptions(**options))
    return caught.value.problems
