"""What a person does with the command line and gets for it, as the texts in ``sessions/`` say.

`tests.support.sessions` says what their lines mean.  A change of wording is a change of them::

    SNAPSHOT_UPDATE=1 pytest tests/e2e/test_sessions.py
    git diff tests/e2e/sessions
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.sessions import Session, check_session
from tests.support.transcripts import read_cases

TEXTS = sorted(Path(__file__).with_name("sessions").glob("*.txt"))
CASES = [(path, title) for path in TEXTS for title in read_cases(path)]


@pytest.mark.parametrize(
    ("path", "title"), CASES, ids=[f"{path.stem}: {title}" for path, title in CASES]
)
def test_a_session_goes_as_was_agreed(path, title, shell):
    check_session(path, title, Session(shell.folder))
