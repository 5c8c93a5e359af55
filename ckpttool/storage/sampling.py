"""Hashes of stored contents, to compare replicas without holding them in memory.

It reads all of a tensor, or pages of it, and returns hashes and figures.  `ckpttool.checkpoint`
chooses the tensors, and decides what their hashes mean.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import islice, pairwise
from operator import itemgetter

import numpy as np
from msgspec import Struct

from ckpttool.concurrency import take_turns
from ckpttool.model.manifest import hash_text, unit_starts
from ckpttool.model.plan import OutputTensor
from ckpttool.model.region import Region
from ckpttool.model.slicing import FullTensor
from ckpttool.model.tensors import Extent, StoredTensor, TensorMeta
from ckpttool.storage.numbers import Bytes, decode, find_distances, find_magnitudes
from ckpttool.storage.region_io import FlatFiles, read_band

SAMPLE_BYTES = 4096  # a page; a disk reads it as fast as one byte
_NEAR_BYTES = SAMPLE_BYTES  # between two pages; a call takes longer than to read as many
_SMALL_BYTES = 3 * SAMPLE_BYTES + 2 * _NEAR_BYTES  # of a tensor with its pages that near
# Types for elements of so many bytes that are only compared with each other.
_ELEMENTS = {size: np.dtype(f"{'u' if size <= 8 else 'V'}{size}") for size in (1, 2, 4, 8, 16)}
_CALL_BYTES = 1 << 20  # of small tensors that are read together
NEAR = 1e-2  # of the larger magnitude; by chance, 1 of 100 elements of two weights is near

BUFFER_BYTES = 4 << 20  # read at a time while contents are compared
UNIT_BUFFER_BYTES = 8 << 20  # read at a time by `hash_units`


class Sample(Struct, frozen=True):
    """A hash of some elements of a tensor, and whether all of them are the same.

    ``element_bits`` is the information that an element may have: the logarithm of its different
    values.  It is 0 where it was not measured.
    """

    digest: bytes
    is_constant: bool
    element_bits: float = 0.0


def digest(tensor: StoredTensor) -> Sample:
    """Return a hash of all bytes of a tensor, with `BUFFER_BYTES` in memory at a time."""
    state = hashlib.sha256()
    first: Bytes | None = None
    is_constant = True
    for data in _read_buffers(tensor):
        state.update(data.data)
        elements = data.reshape(-1, tensor.meta.itemsize)
        first = elements[0].copy() if first is None else first
        is_constant = is_constant and bool((elements == first).all())
    return Sample(state.digest(), is_constant)


def _read_buffers(tensor: StoredTensor) -> Iterator[Bytes]:
    nbytes, itemsize = tensor.meta.nbytes, tensor.meta.itemsize
    buffer = np.empty(max(itemsize, min(BUFFER_BYTES // itemsize * itemsize, nbytes)), np.uint8)
    with FlatFiles(BUFFER_BYTES) as files:
        for offset in range(0, nbytes, len(buffer)):
            data = buffer[: min(len(buffer), nbytes - offset)]
            files.read_bytes(tensor, offset, data.data)
            yield data


def _hash_spans(
    tensor: StoredTensor, spans: Iterable[tuple[int, int]], buffer_bytes: int
) -> Iterator[str]:
    """Yield the SHA-256 of the bytes of a tensor from each start to its stop."""
    buffer = np.empty(min(buffer_bytes, tensor.meta.nbytes), np.uint8)
    with FlatFiles(buffer_bytes) as files:
        for start, stop in spans:
            state = hashlib.sha256()
            for offset in range(start, stop, len(buffer)):
                data = buffer[: stop - offset]
                files.read_bytes(tensor, offset, data.data)
                state.update(data.data)
            yield state.hexdigest()


def hash_unit(tensor: StoredTensor, number: int) -> str:
    """Return the SHA-256 of one unit of a stored tensor, as in a manifest; "" without the unit.

    It runs on a worker.
    """
    if tensor.meta.text is not None:
        return hash_units(tensor)[0] if number == 0 else ""
    spans = islice(pairwise(unit_starts(tensor.meta)), number, number + 1)
    return next(_hash_spans(tensor, spans, BUFFER_BYTES), "")


def hash_units(tensor: StoredTensor) -> tuple[str, ...]:
    """Return the SHA-256 of each unit of a stored tensor, as in a manifest; runs on a worker."""
    if tensor.meta.text is not None:
        return (hash_text(tensor.meta.text),)
    return tuple(_hash_spans(tensor, pairwise(unit_starts(tensor.meta)), UNIT_BUFFER_BYTES))


def find_least(tensor: StoredTensor) -> float:
    """Return the least number of a tensor, with `BUFFER_BYTES` in memory at a time.

    The result is NaN if a number is NaN or infinite, or if the tensor is empty.
    """
    least = math.inf
    for data in _read_buffers(tensor):
        numbers = decode(data, tensor.meta.dtype)
        if numbers is None or not np.isfinite(numbers).all():
            return math.nan
        least = min(least, float(numbers.min()))
    return least if tensor.meta.nbytes else math.nan


def take_samples(tensors: Sequence[StoredTensor]) -> list[Sample]:
    """Return a sample of each tensor: its first, middle and last elements, or its text.

    All tensors are in one file.
    """
    samples = [Sample(b"", False)] * len(tensors)
    for number, tensor in enumerate(tensors):
        if tensor.meta.text is not None:
            samples[number] = Sample(tensor.meta.text.encode(), False)
    nbytes = sum(tensor.meta.nbytes for tensor in tensors)
    with take_turns(nbytes, len(tensors)), FlatFiles(SAMPLE_BYTES) as files:
        for numbers in _neighbours(tensors):
            near = [tensors[number] for number in numbers]
            for number, data in zip(numbers, _read_pages(files, near), strict=True):
                element_bits = _find_bits(data, tensors[number].meta)
                digest = hashlib.sha256(data.data).digest()
                samples[number] = Sample(digest, element_bits == 0, element_bits)
    return samples


def _neighbours(tensors: Sequence[StoredTensor]) -> Iterator[list[int]]:
    """Yield the numbers of small tensors that lie near each other, in one run, and of others alone.

    Texts have no bytes in a file.
    """
    small = []
    for number, tensor in enumerate(tensors):
        if len(tensor.extents) == 1 and tensor.meta.nbytes <= _SMALL_BYTES:
            small.append((tensor.extents[0].offset, number))
        elif tensor.meta.text is None:
            yield [number]
    near: list[int] = []
    first = last = 0
    for start, number in sorted(small, key=itemgetter(0)):
        tensor = tensors[number]
        stop = start + tensor.meta.nbytes
        is_near = first <= start <= last + _NEAR_BYTES and stop - first <= _CALL_BYTES
        if near and not (is_near and tensor.file is tensors[near[0]].file):
            yield near
            near = []
        first, last = (first if near else start), stop
        near.append(number)
    if near:
        yield near


def _find_bits(data: Bytes, meta: TensorMeta) -> float:
    """Return the logarithm of the different values of an element, 0 if all elements are the same.

    Few values of many elements are taken for all that there are, as in a mask or a table of signs:
    the square root of their number, and three of six.
    """
    elements = data.reshape(-1).view(_ELEMENTS[meta.itemsize])
    bits = 1.0 if meta.dtype == "Bool" else 8.0 * meta.itemsize
    few = max(math.isqrt(len(elements)), min(3, len(elements) // 2))
    for count in (few + 1, 2 * few + 2):  # the first elements show it, mostly
        if len({*elements[:count].tolist()}) > few:
            return bits
    ordered = np.sort(elements)
    values = min(len(elements), 1) + int(np.count_nonzero(ordered[1:] != ordered[:-1]))
    if values <= max(1, few):
        bits = min(bits, math.log2(max(values, 1)))
    return bits


def sample(tensor: StoredTensor) -> Sample:
    """Return the sample of one tensor; see `take_samples`."""
    return take_samples([tensor])[0]


def sample_box(source: FullTensor) -> bytes:
    """Return a hash of three boxes of a full tensor: its first, middle and last elements.

    A box has at most one page.  It is read from the lowest owner of each slice that it overlaps.
    """
    meta, state = source.meta, hashlib.sha256()
    sizes = [1] * len(meta.shape)
    budget = SAMPLE_BYTES // meta.itemsize
    for axis in reversed(range(len(sizes))):  # square, to overlap slices along both last axes
        side = math.isqrt(budget) if axis else budget
        sizes[axis] = max(1, min(meta.shape[axis], side))
        budget //= sizes[axis]
    box, tensor = Region.whole(tuple(sizes)), OutputTensor.full(source)
    with FlatFiles(SAMPLE_BYTES) as files:
        for at in (0, 1, 2):
            start = tuple((n - k) * at // 2 for n, k in zip(meta.shape, sizes, strict=True))
            data = np.empty((*sizes, meta.itemsize), np.uint8)
            read_band(files, tensor, box.moved_by(start), data)
            state.update(data.tobytes())
    return state.digest()


def nearness(pair: tuple[StoredTensor, StoredTensor]) -> float | None:
    """Return the share of sampled elements that are nearly the same number in two tensors.

    Elements that are zero in both tensors do not count; return None if all are.
    """
    with FlatFiles(SAMPLE_BYTES) as files:
        pages = (next(_read_pages(files, [tensor])).reshape(-1) for tensor in pair)
        x, y = (decode(data, tensor.meta.dtype) for data, tensor in zip(pages, pair, strict=True))
    if x is None or y is None or pair[0].meta.dtype == "Bool":
        return None
    magnitudes = np.maximum(find_magnitudes(x), find_magnitudes(y))
    is_compared = np.isfinite(magnitudes) & (magnitudes > 0)
    if not is_compared.any():
        return None
    is_near = find_distances(x, y)[is_compared] < NEAR * magnitudes[is_compared]
    return float(np.count_nonzero(is_near)) / int(np.count_nonzero(is_compared))


def _read_pages(files: FlatFiles, near: Sequence[StoredTensor]) -> Iterator[Bytes]:
    """Yield the first, middle and last page of each tensor; fewer of a small one.

    `_neighbours` are read in one call.
    """
    run = _join(near) if len(near) > 1 else None
    joined = np.empty(0 if run is None else run.meta.nbytes, np.uint8)
    if run is not None:
        files.read_bytes(run, 0, joined.data)
    for tensor in near:
        starts, count = _find_pages(tensor.meta.nbytes, tensor.meta.itemsize)
        if run is not None:
            at = tensor.extents[0].offset - run.extents[0].offset
            pages = [joined[at + start : at + start + count] for start in starts]
            yield np.concatenate(pages) if len(pages) > 1 else pages[0]
            continue
        data = np.empty((len(starts), count), np.uint8)
        for page, start in zip(data, starts, strict=True):
            files.read_bytes(tensor, start, page.data)
        yield data


@lru_cache(maxsize=1 << 12)  # most tensors have the same few shapes
def _find_pages(nbytes: int, itemsize: int) -> tuple[Sequence[int], int]:
    count = min(SAMPLE_BYTES, nbytes) // itemsize * itemsize
    middle = (nbytes - count) // 2 // itemsize * itemsize
    return sorted({0, middle, nbytes - count}), count


def _join(near: Sequence[StoredTensor]) -> StoredTensor:
    first, last = near[0], near[-1]
    start = first.extents[0].offset
    nbytes = last.extents[0].offset + last.meta.nbytes - start
    meta = TensorMeta(f"{first.meta.name} to {last.meta.name}", "UInt8", (nbytes,))
    return StoredTensor(meta, first.file, (Extent(start, nbytes),))
