"""Fixtures of tests that run many small conversions."""

import pytest

from ckpttool.formats import sandbox


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(sandbox, "set_cpu_limit", lambda *seconds: None)
    monkeypatch.setattr(
        sandbox.Sandbox, "run", lambda self, function, file, *rest, **limits: function(file)
    )
