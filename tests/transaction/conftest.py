"""Fixtures of tests that run many small conversions."""

import os

import pytest

from ckpttool.formats import sandbox


@pytest.fixture
def quick(monkeypatch):
    """Sync nothing to disk, and read HDF5 files in this process: both take most of the time."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    monkeypatch.setattr(sandbox, "set_cpu_limit", lambda *seconds: None)
    monkeypatch.setattr(
        sandbox.Sandbox, "run", lambda self, function, file, *rest, **limits: function(file)
    )
