"""Hashes of stored contents, to tell replicas that differ without holding them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ckpttool.model.catalog import StoredTensor
from ckpttool.model.manifest import units
from ckpttool.storage.flatfile import FlatFiles

SAMPLE_BYTES = 4096  # a page; it costs a disk no more than a byte does


class Sample(NamedTuple):
    """A hash of some bytes of a tensor, and whether all elements among them are the same."""

    digest: bytes
    is_constant: bool


def digest(tensor: StoredTensor, buffer_bytes: int) -> Sample:
    """SHA-256 of all of a tensor's bytes, of which ``buffer_bytes`` are in memory at a time."""
    state = hashlib.sha256()
    nbytes, itemsize = tensor.meta.nbytes, tensor.meta.itemsize
    buffer = np.empty(max(itemsize, min(buffer_bytes // itemsize * itemsize, nbytes)), np.uint8)
    first = np.empty(0, np.uint8)
    is_constant = True
    with FlatFiles(buffer_bytes) as files:
        for offset in range(0, nbytes, len(buffer)):
            part = buffer[: min(len(buffer), nbytes - offset)]
            files.read_bytes(tensor, offset, part)
            state.update(part.data)
            first = part[:itemsize].copy() if offset == 0 else first
            is_constant = is_constant and bool((part.reshape(-1, itemsize) == first).all())
    return Sample(state.digest(), is_constant)


def unit_digests(tensor: StoredTensor, buffer_bytes: int) -> list[str]:
    """SHA-256 of each of a tensor's units, in hexadecimal digits, as a manifest lists them."""
    digests = []
    offset, itemsize = 0, tensor.meta.itemsize
    buffer = np.empty(max(itemsize, min(buffer_bytes, tensor.meta.nbytes)), np.uint8)
    with FlatFiles(buffer_bytes) as files:
        for unit in units(tensor.meta):
            state = hashlib.sha256()
            stop = offset + unit.size * itemsize
            while offset < stop:
                part = buffer[: stop - offset]
                files.read_bytes(tensor, offset, part)
                state.update(part.data)
                offset += len(part)
            digests.append(state.hexdigest())
    return digests


def take_samples(tensors: Sequence[StoredTensor]) -> list[Sample]:
    """Samples of tensors in one file, each of its first, middle and last elements."""
    samples = []
    with FlatFiles(SAMPLE_BYTES) as files:
        for tensor in tensors:
            nbytes, itemsize = tensor.meta.nbytes, tensor.meta.itemsize
            count = min(SAMPLE_BYTES, nbytes) // itemsize * itemsize
            middle = (nbytes - count) // 2 // itemsize * itemsize
            starts = sorted({0, middle, nbytes - count})
            data = np.empty((len(starts), count), np.uint8)
            for part, start in zip(data, starts, strict=True):
                files.read_bytes(tensor, start, part)
            elements = data.reshape(-1, itemsize)
            is_constant = bool((elements == elements[:1]).all())
            samples.append(Sample(hashlib.sha256(data.data).digest(), is_constant))
    return samples
