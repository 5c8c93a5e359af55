"""Programs that tests run and that may be missing, but not where `.ci/run` has installed them."""

from __future__ import annotations

import os
import shutil

import pytest


def need(program: str) -> None:
    if shutil.which(program) is None:
        assert not os.environ.get("CI"), f"{program} is not installed"
        pytest.skip(f"{program} is not installed")
