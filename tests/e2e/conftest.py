"""Fixtures of the tests of the command line."""

from __future__ import annotations

import pytest

from tests.support.corpus import GOLDEN
from tests.support.snapshots import Transcript


@pytest.fixture
def shell(tmp_path, monkeypatch):
    """A transcript in an empty folder, in which ``golden`` is the corpus, and beside it nothing."""
    folder = tmp_path / "far" / "in" / "here"  # tmp_path is numbered, as ranks are
    folder.mkdir(parents=True)
    (folder / "golden").symlink_to(GOLDEN)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    return Transcript(folder)
