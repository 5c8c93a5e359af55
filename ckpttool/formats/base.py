"""The protocol of file formats, which are codecs of headers.

A format says what it cannot hold, reads a header, and makes one without a file.  A header is a
`FileIndex` and the bytes between the contents, in all formats.  So any two headers can be compared,
cached and written alike.  Contents are left to `ckpttool.storage`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Protocol, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from ckpttool.formats.local import ReadFile
from ckpttool.model.dtypes import SAFETENSORS_DTYPES
from ckpttool.model.tensors import (
    MAX_AXES,
    Extent,
    FileIndex,
    Reads,
    SharedHeader,
    StoredFile,
    StoredTensor,
    TensorMeta,
)
from ckpttool.problems import Diagnostic

# A reader holds a string in memory and refuses a longer one by name: the length is a number in the
# file, which damage can make huge.
MAX_TEXT_BYTES = 64 << 20

DIGEST_PARTS = 1000  # of a header that are hashed at a time

HDF5_SIGNATURE = b"\x89HDF\r\n\x1a\n"  # shows the format of a file without loading libhdf5

PROVENANCE = "ckpttool."  # begins the name of each attribute that says how a file was made

UNNAMED = StoredFile("")  # of tensors in the header of a new file

# Bytes, an extent of the file, or a number of zero bytes.
ChecksumInput: TypeAlias = bytes | Extent | int

# Bytes of a header, and what is behind them: the name of a tensor, and bytes of its content.
HeaderPart: TypeAlias = tuple[bytes, str, int]


class Header(Struct, frozen=True):
    """All of a file but the contents of its tensors; several files may have equal headers.

    ``index`` says where the contents lie; the files that it and its tensors name do not count.
    ``gaps`` are the bytes that are not contents of tensors, in parts, and ``starts`` their offsets.
    """

    index: FileIndex
    starts: array[int]
    gaps: tuple[bytes, ...]

    def of_file(self, file: StoredFile) -> FileIndex:
        """Return the index of a file that has this header."""
        tensors = SharedHeader(self.index.tensors, file)
        return replace(self.index, files=(file,), tensors=tensors, reads=Reads())


class HeaderDigest(Struct, frozen=True):
    """Where the bytes of a `Header` lie in a file of a size, and their SHA-256."""

    starts: array[int]
    sizes: array[int]
    nbytes: int
    sha256: bytes

    @classmethod
    def of(cls, header: Header) -> HeaderDigest:
        """Return the digest of a header, which takes a tenth of its memory."""
        state = sha256()
        for gap in header.gaps:
            state.update(gap)
        sizes = array("q", map(len, header.gaps))
        return cls(header.starts, sizes, header.index.nbytes, state.digest())

    def is_in(self, file: ReadFile) -> bool:
        """Return whether a file has the header, byte by byte."""
        state = sha256()
        for first in range(0, len(self.starts), DIGEST_PARTS):
            some = slice(first, first + DIGEST_PARTS)
            state.update(b"".join(file.preads(self.sizes[some], self.starts[some])))
        return file.size == self.nbytes and state.digest() == self.sha256


def read_header(index: FileIndex, read: Callable[[int, int], bytes]) -> Header:
    """Return the header of a file; ``read`` returns its bytes from a start to a stop."""
    starts, gaps, at = array("q"), [], 0
    extents = [extent for tensor in index.tensors.values() for extent in tensor.extents]
    for extent in (*sorted(extents, key=lambda extent: extent.offset), Extent(index.nbytes, 0)):
        if at < extent.offset:
            starts.append(at)
            gaps.append(read(at, extent.offset))
        at = max(at, extent.offset + extent.nbytes)
    return Header(index, starts, tuple(gaps))


class NewTensors(Mapping[str, StoredTensor]):
    """The tensors of a new file, which has many; looking one up makes it.

    Nearly all have one extent, so an offset for each says where they lie.
    """

    def __init__(self, tensors: Sequence[TensorMeta]) -> None:
        self._tensors = tensors
        self._numbers = {meta.name: number for number, meta in enumerate(tensors)}
        self._offsets = array("q", [-1]) * len(tensors)
        self._split: dict[str, tuple[Extent, ...]] = {}  # those with several extents

    def add(self, name: str, offset: int, nbytes: int) -> None:
        """Add an extent of a tensor."""
        number = self._numbers[name]
        if nbytes == self._tensors[number].nbytes:
            self._offsets[number] = offset
        else:
            self._split[name] = (*self._split.get(name, ()), Extent(offset, nbytes))

    def __getitem__(self, name: str) -> StoredTensor:
        number = self._numbers[name]
        meta, offset = self._tensors[number], self._offsets[number]
        extents = self._split.get(name, ()) if offset < 0 else (Extent(offset, meta.nbytes),)
        return StoredTensor(meta, UNNAMED, extents)

    def __contains__(self, name: object) -> bool:
        return name in self._numbers

    def __iter__(self) -> Iterator[str]:
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._tensors)


def lay_out(
    format: str,
    tensors: Sequence[TensorMeta],
    attrs: Mapping[str, str],
    parts: Iterable[HeaderPart],
) -> Header:
    """Return the header of a new file."""
    stored = NewTensors(tensors)
    starts, gaps, at = array("q"), [], 0
    for gap, name, nbytes in parts:
        if gap:
            starts.append(at)
            gaps.append(gap)
            at += len(gap)
        if nbytes:
            stored.add(name, at, nbytes)
            at += nbytes
    return Header(FileIndex((UNNAMED,), format, at, stored, attrs), starts, tuple(gaps))


def refusal(meta: TensorMeta, reason: str) -> Diagnostic:
    """Return the reason why a tensor cannot be written."""
    return Diagnostic("destination", reason, tensor=meta.name)


class Format(Protocol):
    """A file format."""

    name: str  # the name in ``--format``, in reports and in ``FileIndex.format``
    word: str  # the name in sentences
    has_checksum: bool = False  # whether files have a place for MindSpore's checksum ``crc_num``
    max_header_bytes: int | None = None  # the largest header that is read and written
    is_loaded_by_mindspore: bool = True
    is_loaded_in_order: bool = False  # whether loaders take tensors in this order, not by name

    def refusals(
        self, tensors: Sequence[TensorMeta], attrs: Mapping[str, str] = {}
    ) -> Iterator[Diagnostic]:
        """Yield a diagnostic for each reason why tensors and attributes cannot be written.

        Most formats hold what MindSpore has.  The caller adds the hint: it knows which other format
        holds the tensors, and where it is named.
        """
        if "crc_num" in attrs and not self.has_checksum:
            reason = f"{self.word} has no place for MindSpore's checksum"
            yield Diagnostic("destination", reason)
        for meta in tensors:
            if meta.dtype in SAFETENSORS_DTYPES:
                yield refusal(meta, f"safetensors' {meta.dtype} has no counterpart in {self.word}")
            elif meta.whole_shape is not None:
                axes = f"{len(meta.whole_shape)} axes"
                yield refusal(meta, f"{axes}; only safetensors keeps more than {MAX_AXES}")

    def notes(self, dtypes: Collection[str], attrs: Mapping[str, str]) -> Iterator[Diagnostic]:
        """Yield a diagnostic for what MindSpore cannot do with files of these element types."""
        return iter(())

    def read_index(self, file: StoredFile) -> FileIndex:
        """Return the header of a file; contents of tensors are not read.

        Raises
        ------
        FormatError
            The file does not follow the format, or tensors share bytes.
        UnsupportedError
            The file uses a feature that is not read.
        PlanError
            The opened file does not have the stamp.
        OSError
            The file cannot be opened or read.
        """
        ...

    def file_bytes(self, tensors: Sequence[TensorMeta], attrs: Mapping[str, str] = {}) -> int:
        """Return the size in bytes of the file with the `index`, or somewhat less."""
        return self.index(tensors, attrs).index.nbytes

    def header_bytes(self, tensors: Sequence[TensorMeta], attrs: Mapping[str, str] = {}) -> int:
        """Return the most bytes of a header: a sum over the tensors, and what every file has."""
        ...

    def memory_bytes(self, tensors: int) -> int:
        """Return the bytes that a library takes to make a header of so many tensors."""
        return 0

    def index(self, tensors: Sequence[TensorMeta], attrs: Mapping[str, str] = {}) -> Header:
        """Return the complete header of a new file, strings included; needs no file.

        `refusals` must have yielded nothing.  A ``"crc_num"`` in ``attrs``, of any value, reserves
        space for a checksum; `seal` fills it.  The header then has the attribute, too.  A format
        omits other attributes that it cannot store.
        """
        ...

    def checksum_inputs(self, index: FileIndex, as_saved: bool = False) -> Iterator[ChecksumInput]:
        """Yield the bytes that the checksum of a file covers, in order.

        MindSpore's loader counts these bytes, or with ``as_saved`` its saver.  The two differ in
        some cases.
        """
        return iter(())

    def seal(self, fd: int, crc: int | None = None) -> None:
        """Write the checksum into an open file, if its `index` reserved a place for it."""
        return
