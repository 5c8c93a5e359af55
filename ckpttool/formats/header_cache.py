"""A cache of headers: a file whose header equals a cached one is compared with it, not parsed.

Two things determine the header of a file: the byte where it ends, and all bytes that are not
contents of tensors.  If both equal those of an earlier file, the headers are equal.  Comparing
takes a third of the time of parsing for a ``.ckpt``, a tenth for a safetensors file, a fiftieth for
HDF5.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

from ckpttool.formats.local import open_descriptor
from ckpttool.formats.wire import WireReader
from ckpttool.model.tensors import FileIndex, SharedHeader, StoredFile, StoredTensor

MAX_HEADERS = 64  # a large model has a different header for each stage
MAX_BYTES = 8 << 20  # of all headers; a usual header has 100 to 400 bytes for each tensor


@dataclass(frozen=True, slots=True)
class _Header:
    """The tensors of a file, and the starts and bytes of the gaps between their contents."""

    tensors: Mapping[str, StoredTensor]
    starts: array[int]
    gaps: tuple[bytes, ...]
    attrs: Mapping[str, str]


class HeaderCache:
    """A cache of the headers of files.  Threads may share it."""

    def __init__(self) -> None:
        self._by_end: dict[tuple[str, int], _Header] = {}  # by format and end of the header
        self._by_size: dict[int, _Header] = {}  # by size of the file
        self._free_bytes = MAX_BYTES
        self._prefetched: set[str] = set()

    def read_index(
        self, file: StoredFile, format: str, read: Callable[[StoredFile], FileIndex]
    ) -> FileIndex:
        """Return the header of a file; call ``read`` unless it equals a cached one.

        This method serves formats whose header accounts for every byte of a file.
        """
        with WireReader(file) as reader:
            header = self._find(format, reader, reader.size)
            if header is not None:
                tensors = SharedHeader(header.tensors, file)
                return FileIndex((file,), format, reader.size, tensors, header.attrs)
            index = read(file)
            self.store(format, reader, reader.size, index.tensors, index.attrs)
        return index

    def lookup(self, format: str, reader: WireReader, end: int) -> SharedHeader | None:
        """Return the tensors of a file whose header, up to byte ``end``, equals a cached one."""
        header = self._find(format, reader, end)
        return None if header is None else SharedHeader(header.tensors, reader.file)

    def store(
        self,
        format: str,
        reader: WireReader,
        end: int,
        tensors: Mapping[str, StoredTensor],
        attrs: Mapping[str, str],
    ) -> None:
        """Cache the header of a file up to byte ``end``, if there is room for it."""
        gaps = list(_gaps(tensors, end))
        nbytes = sum(stop - start for start, stop in gaps)
        replaced = self._by_end.get((format, end))
        free = self._free_bytes + (0 if replaced is None else sum(map(len, replaced.gaps)))
        if len(self._by_end) < MAX_HEADERS and nbytes <= free:
            self._free_bytes = free - nbytes
            starts = array("q", (start for start, _ in gaps))
            parts = tuple(reader.read(start, stop) for start, stop in gaps)
            header = _Header(tensors, starts, parts, attrs)
            self._by_end[format, end] = self._by_size[reader.size] = header

    def prefetch(self, path: str) -> None:
        """Ask the disk for the bytes of a file that will be compared.

        Call it some files ahead of the reader, so that the disk has many requests at a time.
        """
        with suppress(OSError):  # reading the file raises it again
            fd = open_descriptor(StoredFile(path))
            try:
                header = self._by_size.get(os.fstat(fd).st_size)
                if header is not None:
                    self._prefetched.add(path)
                    for start, gap in zip(header.starts, header.gaps, strict=True):
                        os.posix_fadvise(fd, start, len(gap), os.POSIX_FADV_WILLNEED)
            finally:
                os.close(fd)

    def _find(self, format: str, reader: WireReader, end: int) -> _Header | None:
        """Return the cached header that the header of a file equals, or None."""
        header = self._by_end.get((format, end))
        if header is None:
            return None
        if reader.path not in self._prefetched:
            self.prefetch(reader.path)
        return header if reader.has(header.starts, header.gaps) else None


def _gaps(tensors: Mapping[str, StoredTensor], end: int) -> Iterator[tuple[int, int]]:
    """Yield start and stop of all bytes up to ``end`` that are not contents of tensors."""
    at = 0
    extents = (extent for tensor in tensors.values() for extent in tensor.extents)
    for extent in sorted(extents, key=lambda extent: extent.offset):
        if at < extent.offset:
            yield at, extent.offset
        at = max(at, extent.offset + extent.nbytes)
    if at < end:
        yield at, end
