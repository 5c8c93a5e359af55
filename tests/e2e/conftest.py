"""Fixtures of the tests of the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.corpus import GOLDEN
from tests.support.snapshots import Transcript


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Be in an empty folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def golden(here):
    """Have a link to the corpus in this folder."""
    Path("golden").symlink_to(GOLDEN)


@pytest.fixture
def shell(tmp_path, monkeypatch):
    folder = tmp_path / "far" / "in" / "here"  # tmp_path is numbered, as ranks are
    folder.mkdir(parents=True)
    (folder / "golden").symlink_to(GOLDEN)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    return Transcript(folder)
