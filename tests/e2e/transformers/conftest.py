"""Tests against transformers: run by ``scripts/transformers`` only, which installs it."""

from __future__ import annotations

import os

IS_WANTED = bool(os.environ.get("CKPTTOOL_TRANSFORMERS"))
collect_ignore_glob = [] if IS_WANTED else ["*"]


def pytest_report_header() -> str:
    how = "collected" if IS_WANTED else "not collected, see scripts/transformers"
    return f"models of transformers: {how}"
