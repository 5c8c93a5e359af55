"""Checkpoints that describe themselves, of whichever kind."""

from __future__ import annotations

from ckpttool.model.catalog import Catalog
from ckpttool.storage.checkpoint2 import scan_checkpoint2
from ckpttool.storage.hyper_parallel import scan_hyper_parallel


def scan_described(src: str, step: str | None) -> Catalog | None:
    """The catalog of a folder that says itself what is in it; None of any other.

    See `scan_checkpoint2` and `scan_hyper_parallel`.
    """
    found = scan_checkpoint2(src, step)
    return scan_hyper_parallel(src, step) if found is None else found
