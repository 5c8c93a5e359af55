"""Checksums of source files: MindSpore's CRC-32, and the tags of encrypted blocks.

It computes them while bytes are copied, or reads files for them, and says which do not match.  The
format of a file says which bytes count, and the caller what follows from an error.
"""

from __future__ import annotations

import os
import re
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from functools import lru_cache
from hashlib import sha256
from io import FileIO
from itertools import chain
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from ckpttool.concurrency import check_cancelled, wait_result
from ckpttool.formats import get_format
from ckpttool.formats.encryption import find_forged, forged_blocks_error
from ckpttool.formats.local import open_source
from ckpttool.model.catalog import Catalog
from ckpttool.model.manifest import unit_starts
from ckpttool.model.names import map_of_component
from ckpttool.model.tensors import (
    Extent,
    FileIndex,
    StoredTensor,
    TensorMeta,
)
from ckpttool.problems import ChecksumError, Diagnostic, FormatError
from ckpttool.wording import format_ranks, shorten

if TYPE_CHECKING:
    from hashlib import _Hash as HASH

BUFFER_BYTES = 1 << 20  # read at a time
POLYNOMIAL = 0xEDB88320  # of CRC-32, lowest power in the highest bit


class CrcExtent(NamedTuple):
    """The CRC-32 of an extent of the file at ``path``, inside one tensor."""

    path: str
    extent: Extent
    crc: int


class RunningCrc:
    """The CRC-32 of written bytes, computed while they are in memory; for one thread."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, str, int], tuple[int, int]] = {}  # by file, tensor and end

    def add(self, path: str, name: str, offset: int, data: memoryview) -> None:
        """Add bytes that are written at an offset; they may continue an extent of the tensor."""
        start, crc = self._open.pop((path, name, offset), (offset, 0))
        self._open[path, name, offset + len(data)] = start, zlib.crc32(data, crc)

    def extents(self) -> Iterator[CrcExtent]:
        """Yield the extents that the added bytes form."""
        for (path, _, stop), (start, crc) in self._open.items():
            yield CrcExtent(path, Extent(start, stop - start), crc)


class ReadUnit(NamedTuple):
    """The SHA-256 of a unit of a tensor in the file at ``path``, which was read as a whole."""

    path: str
    name: str
    unit: int
    sha256: bytes


class RunningHashes:
    """The SHA-256 of units of tensors, computed while their bytes are read; for one thread.

    A unit counts if its bytes are read in order, from first to last; reads of other bytes may come
    between.
    """

    def __init__(self) -> None:
        self._open: dict[tuple[str, str, int], HASH] = {}  # by file, tensor and end
        self._starts: dict[TensorMeta, list[int]] = {}  # bytes before each unit, and in all
        self._done: dict[tuple[str, str, int], bytes] = {}  # by file, tensor and unit

    def add(self, tensor: StoredTensor, offset: int, data: memoryview) -> None:
        """Add bytes of a tensor that were read from ``offset`` on."""
        path, meta = tensor.file.path, tensor.meta
        starts = self._starts.get(meta)
        if starts is None:
            starts = self._starts[meta] = [*unit_starts(meta)]
        while data:
            number = bisect_right(starts, offset) - 1
            part = data[: starts[number + 1] - offset]
            state = self._open.pop((path, meta.name, offset), None)
            if offset == starts[number] and (path, meta.name, number) not in self._done:
                state = sha256()
            data, offset = data[len(part) :], offset + len(part)
            if state is None:
                continue
            state.update(part)
            if offset == starts[number + 1]:
                self._done[path, meta.name, number] = state.digest()
            else:
                self._open[path, meta.name, offset] = state

    def found(self) -> Iterator[ReadUnit]:
        """Yield the hashes of the units that were read as a whole."""
        for (path, name, number), digest in self._done.items():
            yield ReadUnit(path, name, number, digest)


def compute_checksum(
    index: FileIndex, as_saved: bool = False, known: Iterable[CrcExtent] = ()
) -> int:
    """Read a file, a buffer at a time, and return its checksum.

    ``as_saved`` computes it as MindSpore's saver does where its loader differs.  Extents with a
    ``known`` CRC-32 are not read.

    Raises
    ------
    FormatError
        The file has become shorter since its header was read.
    """
    crc = 0
    in_order = sorted(known, key=_start_of)
    buffer = memoryview(bytearray(BUFFER_BYTES))
    with open_source(index.file) as file:
        for given in get_format(index.format).checksum_inputs(index, as_saved):
            for piece in _split_at_known(given, in_order) if isinstance(given, Extent) else [given]:
                if isinstance(piece, bytes):
                    crc = zlib.crc32(piece, crc)
                elif isinstance(piece, Extent):
                    crc = _add_extent(crc, file, index.path, piece, buffer)
                elif isinstance(piece, CrcExtent):
                    crc = join(crc, piece.crc, piece.extent.nbytes)
                else:
                    crc = add_zeros(crc, piece)
    return crc


def _start_of(known: CrcExtent) -> int:
    return known.extent.offset


def _split_at_known(extent: Extent, in_order: Sequence[CrcExtent]) -> Iterator[Extent | CrcExtent]:
    """Yield the known extents inside an extent, and the unknown extents between them."""
    at, stop = extent.offset, extent.offset + extent.nbytes
    for number in range(bisect_left(in_order, at, key=_start_of), len(in_order)):
        known = in_order[number]
        end = known.extent.offset + known.extent.nbytes
        if end > stop:
            break
        yield Extent(at, known.extent.offset - at)
        yield known
        at = end
    yield Extent(at, stop - at)


def _add_extent(crc: int, file: FileIO, path: str, extent: Extent, buffer: memoryview) -> int:
    file.seek(extent.offset)
    left = extent.nbytes
    while left:
        check_cancelled()
        got = file.readinto(buffer[:left])
        if not got or not os.fstat(file.fileno()).st_nlink:  # truncated, or removed
            at = extent.offset + extent.nbytes - left
            raise FormatError(path, at, "the file ends here", facts="it changed while it was read")
        crc = zlib.crc32(buffer[:got], crc)
        left -= got
    return crc


def join(crc: int, following: int, nbytes: int) -> int:
    """Return the CRC-32 of data followed by ``nbytes`` bytes with the CRC-32 ``following``.

    >>> join(zlib.crc32(b"some"), zlib.crc32(b"thing"), 5) == zlib.crc32(b"something")
    True
    """
    return _multiply(crc, _shift(nbytes)) ^ following


def add_zeros(crc: int, count: int) -> int:
    """Return the CRC-32 of data followed by ``count`` zero bytes, in a few hundred steps.

    >>> add_zeros(zlib.crc32(b"data"), 1000) == zlib.crc32(b"data" + bytes(1000))
    True
    """
    return _multiply(crc ^ 0xFFFFFFFF, _shift(count)) ^ 0xFFFFFFFF


@lru_cache(1024)  # few lengths occur, and most of them often
def _shift(count: int) -> int:
    """Return the factor that ``count`` following bytes apply to a remainder: x**8 for each."""
    power, factor = 1 << 31, 1 << 31 - 8  # 1, x**8
    while count:
        if count & 1:
            power = _multiply(power, factor)
        factor = _multiply(factor, factor)
        count >>= 1
    return power


def _multiply(a: int, b: int) -> int:
    """Multiply two polynomials over GF(2), modulo the polynomial of CRC-32."""
    product = 0
    for power in range(31, -1, -1):
        if a >> power & 1:
            product ^= b
        b = b >> 1 ^ (POLYNOMIAL if b & 1 else 0)
    return product


def verify_checksum(index: FileIndex) -> ChecksumError | None:
    """Return the error if a file's contents do not match its checksum, else None."""
    stored = index.attrs["crc_num"]
    number = int(stored) if re.fullmatch(r"[0-9]{1,18}", stored) else None
    computed = compute_checksum(index)
    has_maps = any(map_of_component(name) is not None for name in index.tensors)
    if number == computed or (has_maps and number == compute_checksum(index, as_saved=True)):
        return None
    reason = f"the checksum (crc_num) is {stored}, that of the contents {computed}"
    hint = "copy the file again; `ckpttool help checksum` explains"
    if re.fullmatch(r"part\d+\.safetensors", Path(index.path).name):
        hint = "`ckpttool help checksum`: unified_safetensors copies the checksum of a rank's file"
    return ChecksumError(index.path, None, reason, hint)


T = TypeVar("T")

BLOCKS_PER_TASK = 4  # of 64 MiB each


def check_files(
    catalog: Catalog,
    executor: Executor,
    crc: bool,
    on_progress: Callable[[int], None] = lambda nbytes: None,
) -> tuple[list[ChecksumError], list[Diagnostic]]:
    """Check the tags and checksums of the files of a catalog; return errors and notes.

    Parameters
    ----------
    catalog
        From `scan`; ``catalog.damaged`` is ignored.
    executor
        Reads every block that has a tag and, with ``crc``, every file that has a checksum.
    crc
        Whether to verify checksums.
    on_progress
        Called with the size of each file that was read.
    """
    files, has_index = catalog.files, bool(catalog.indexes)
    sealed = {rank: file for rank, file in files.items() if _has_checksum(file, has_index)}
    ciphers = {
        rank: file.cipher
        for rank, file in files.items()
        if file.cipher is not None and file.cipher.has_tags
    }
    checksums = {
        rank: [executor.submit(verify_checksum, file)] for rank, file in sealed.items() if crc
    }
    tags = {
        rank: [
            executor.submit(find_forged, files[rank].file, cipher, first, first + BLOCKS_PER_TASK)
            for first in range(0, len(cipher.blocks), BLOCKS_PER_TASK)
        ]
        for rank, cipher in ciphers.items()
    }

    def await_all(submitted: Mapping[int, list[Future[T]]]) -> Iterator[tuple[int, list[T]]]:
        for rank, futures in submitted.items():
            yield rank, [wait_result(future) for future in futures]
            on_progress(files[rank].nbytes)

    forged = {
        rank: forged_blocks_error(files[rank].path, ciphers[rank], numbers)
        for rank, numbers_of in await_all(tags)
        if (numbers := [*chain(*numbers_of)])
    }
    wrong = {rank: error for rank, (error,) in await_all(checksums) if error is not None}
    errors: list[ChecksumError] = []
    for rank, error in (*forged.items(), *wrong.items()):
        error.rank = None if catalog.is_merged else rank
        errors.append(error)

    def note(code: str, message: str, ranks: Collection[int], hint: str = "") -> list[Diagnostic]:
        named = format_ranks(sorted(ranks))
        if catalog.is_merged:  # its files are numbered and have no ranks
            named = shorten(files[number].path for number in sorted(ranks))
        return [Diagnostic(code, message, hint=hint, where=named)] if ranks else []

    if not crc:
        hint = f"ckpttool verify {quote(catalog.root)} --crc"
        return errors, note("unverified", "the checksum (crc_check) is not verified", sealed, hint)
    tagged = tags.keys() - forged.keys()
    return errors, [
        *note("verified", "the checksum is right", checksums.keys() - wrong.keys()),
        *note("verified", "the tags of all encrypted blocks are right", tagged),
        *note("no_checksum", "saved without a checksum", files.keys() - {*checksums, *tags}),
    ]


def _has_checksum(file: FileIndex, has_index: bool) -> bool:
    """Return whether a file has a checksum of the contents that its header describes.

    MindSpore writes 0 after encrypted blocks, which is not a checksum.  Its ``unified_safetensors``
    copies the checksum of a rank's file into its own.  If a rank has several files, the checksum of
    one does not cover the others.
    """
    is_placeholder = file.cipher is not None and file.attrs.get("crc_num") == "0"
    is_copied = has_index and file.attrs.get("format") == "ms"
    return "crc_num" in file.attrs and not (is_placeholder or is_copied or len(file.files) > 1)
