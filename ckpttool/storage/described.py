"""Checkpoints that describe themselves, of whichever kind."""

from __future__ import annotations

from ckpttool.model.catalog import SelfDescribedCatalog
from ckpttool.storage.hyper_parallel import scan_hyper_parallel
from ckpttool.storage.mindformers import scan_mindformers


def scan_described(src: str, step: str | None) -> SelfDescribedCatalog | None:
    """The catalog of a folder that says itself what is in it; None of any other.

    See `scan_mindformers` and `scan_hyper_parallel`.
    """
    found = scan_mindformers(src, step)
    return scan_hyper_parallel(src, step) if found is None else found
