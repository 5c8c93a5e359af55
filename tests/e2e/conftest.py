"""Fixtures of the tests of the command line."""

from __future__ import annotations

from hashlib import sha256

import pytest

from tests.support.corpus import GOLDEN
from tests.support.snapshots import Transcript


@pytest.fixture
def shell(request, tmp_path_factory, monkeypatch):
    """A transcript in an empty folder, in which ``golden`` is the corpus.

    Its name has no number: files in folders that differ in a number alone might be those of ranks.
    """
    digest = sha256(request.node.nodeid.encode()).digest()[:12]
    name = "".join(chr(ord("a") + byte % 26) for byte in digest)
    folder = tmp_path_factory.mktemp(name, numbered=False)
    (folder / "golden").symlink_to(GOLDEN)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    return Transcript(folder)
