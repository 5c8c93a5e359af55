"""A hash of a stored tensor's content, to tell replicas that differ without holding them."""

from __future__ import annotations

import hashlib

import numpy as np

from ckpttool.model.catalog import StoredTensor
from ckpttool.storage.flatfile import FlatFiles


def digest(path: str, tensor: StoredTensor, buffer_bytes: int) -> bytes:
    """SHA-256 of a tensor's bytes, ``buffer_bytes`` of which are in memory at a time."""
    state = hashlib.sha256()
    buffer = np.empty(min(buffer_bytes, max(1, tensor.meta.nbytes)), np.uint8)
    with FlatFiles(buffer_bytes) as files:
        for offset in range(0, tensor.meta.nbytes, len(buffer)):
            part = buffer[: min(len(buffer), tensor.meta.nbytes - offset)]
            files.read_bytes(path, tensor, offset, part)
            state.update(part.data)
    return state.digest()
