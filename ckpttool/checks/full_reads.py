"""Findings of what was read as a whole: damaged files, checksums, every byte, manifests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ckpttool.checkpoint.checkpoint import Checkpoint, Contents
from ckpttool.problems import Diagnostic


def check_files(checkpoint: Checkpoint) -> Iterable[Diagnostic]:
    """Yield problems that the scan of the files reports."""
    return checkpoint.catalog.errors()


def check_damage(checkpoint: Checkpoint, contents: Contents) -> Iterator[Diagnostic]:
    """Yield files that cannot be read, unless replicas replace them."""
    catalog = checkpoint.catalog
    is_listed = checkpoint.are_joined and catalog.description is None
    replaced = checkpoint.presence.replaced if is_listed else {}
    for rank, error in catalog.damaged.items():
        if not replaced.get(rank):
            yield from checkpoint.with_remedy(error, contents.complete_step).diagnostics


def check_checksums(_: Checkpoint, contents: Contents) -> Iterable[Diagnostic]:
    """Yield files with another checksum or tag than they record, or without one."""
    return contents.read.get("checksums", ())


def check_contents(_: Checkpoint, contents: Contents) -> Iterable[Diagnostic]:
    """Yield what reading every byte found; samples find the same replicas with less detail."""
    return contents.read.get("contents", ())


def check_unlisted_samples(_: Checkpoint, contents: Contents) -> Iterable[Diagnostic]:
    """Yield tensors without a layout whose samples differ between two ranks."""
    return contents.read.get("unlisted", ())


def check_manifest(_: Checkpoint, contents: Contents) -> Iterable[Diagnostic]:
    """Yield what differs from the manifest of the set."""
    return contents.read.get("manifest", ())
