"""How grave diagnostics are."""

from __future__ import annotations

from ckpttool.problems import Diagnostic, severities


def is_warning(one: Diagnostic) -> bool:
    """Return whether a conversion warns of it."""
    return severities("convert")[one.code] == "warning"


def graded(found: Diagnostic, command: str = "verify") -> tuple[str | None, str]:
    """Return severity and code."""
    return severities(command)[found.code], found.code
