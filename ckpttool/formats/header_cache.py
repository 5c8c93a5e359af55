"""A cache of headers: a file whose header equals a cached one is compared with it, not parsed.

Two things determine the header of a file: the byte where it ends, and all bytes that are not
contents of tensors.  If both equal those of an earlier file, the headers are equal.  Comparing
takes a third of the time of parsing for a ``.ckpt``, a tenth for a safetensors file, a fiftieth for
HDF5.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress

from ckpttool.formats.base import Header, read_header
from ckpttool.formats.local import open_descriptor
from ckpttool.formats.wire import Parts, WireReader
from ckpttool.model.tensors import FileIndex, StoredFile, TensorMeta
from ckpttool.system import prefetch

MAX_HEADERS = 64  # a large model has a different header for each stage
MAX_BYTES = 8 << 20  # of all headers; a usual header has 100 to 400 bytes for each tensor


class HeaderCache:
    """A cache of the headers of files, at most ``most`` of them.  Threads may share it.

    Tensors that are equal in parsed headers are one object in ``metas``.
    """

    def __init__(self, most: int = MAX_HEADERS) -> None:
        self.metas: dict[str, TensorMeta] = {}
        self._most = most
        self._by_end: dict[tuple[str, int], tuple[Header, Parts]] = {}  # by format and its end
        self._by_size: dict[int, Parts] = {}  # by size of the file
        self._free_bytes = MAX_BYTES
        self._prefetched: set[str] = set()

    def read_index(
        self, file: StoredFile, format: str, read: Callable[[StoredFile], FileIndex]
    ) -> FileIndex:
        """Return the header of a file; call ``read`` unless it equals a cached one.

        This method serves formats whose header accounts for every byte of a file.
        """
        with WireReader(file) as reader:
            index = self.lookup(format, reader, reader.size)
            if index is None:
                index = read(file)
                self.store(index, reader)
        return index

    def lookup(self, format: str, reader: WireReader, end: int) -> FileIndex | None:
        """Return the header of a file, up to byte ``end``, if it equals a cached one, else None."""
        known = self._by_end.get((format, end))
        if known is None:
            return None
        if reader.path not in self._prefetched:
            self.prefetch(reader.path)
        header, parts = known
        return header.of_file(reader.file) if reader.has(parts) else None

    def store(self, index: FileIndex, reader: WireReader) -> None:
        """Cache the header of a file, if there is room for it."""
        if len(self._by_end) >= min(self._most, MAX_HEADERS):
            return
        header, key = read_header(index, reader.read), (index.format, index.nbytes)
        replaced = self._by_end.get(key)
        free = self._free_bytes + (0 if replaced is None else sum(map(len, replaced[0].gaps)))
        nbytes = sum(map(len, header.gaps))
        if nbytes <= free:
            self._free_bytes = free - nbytes
            parts = self._by_size[reader.size] = Parts(header.starts, header.gaps)
            self._by_end[key] = header, parts

    def prefetch(self, path: str) -> None:
        """Ask the disk for the bytes of a file that will be compared.

        Call it some files ahead of the reader, so that the disk has many requests at a time.
        """
        with suppress(OSError):  # reading the file raises it again
            fd = open_descriptor(StoredFile(path))
            try:
                parts = self._by_size.get(os.fstat(fd).st_size)
                if parts is not None:
                    self._prefetched.add(path)
                    prefetch(fd, *parts.spans)
            finally:
                os.close(fd)
