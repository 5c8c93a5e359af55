"""The protocol of file formats, which are codecs of headers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol, TypeAlias

from ckpttool.model.tensors import Extent, FileIndex, StoredFile, TensorMeta
from ckpttool.problems import Diagnostic

# A reader holds a string in memory and refuses a longer one by name: the length is a number in the
# file, which damage can make huge.
MAX_TEXT_BYTES = 64 << 20

PROVENANCE = "ckpttool."  # begins the name of each attribute that says how a file was made

# Bytes, an extent of the file, or a number of zero bytes.
ChecksumInput: TypeAlias = bytes | Extent | int


class Format(Protocol):
    """A file format.

    Attributes
    ----------
    name
        The name in ``--format``, in reports and in ``FileIndex.format``.
    max_header_bytes
        The largest header that is read and written; None without a limit.
    """

    @property
    def name(self) -> str:
        """Name of the format."""
        ...

    @property
    def max_header_bytes(self) -> int | None:
        """Largest header."""
        ...

    def refusals(
        self, tensors: Sequence[TensorMeta], attrs: Mapping[str, str] = {}
    ) -> Iterator[Diagnostic]:
        """Yield a diagnostic for each reason why tensors and attributes cannot be written.

        The caller adds the hint: it knows which other format holds them, and where it is named.
        """
        ...

    def read_index(self, file: StoredFile) -> FileIndex:
        """Return the header of a file; contents of tensors are not read.

        Raises
        ------
        FormatError
            The file does not follow the format.
        UnsupportedError
            The file uses a feature that is not read.
        PlanError
            The opened file does not have the stamp.
        OSError
            The file cannot be opened or read.
        """
        ...

    def file_bytes(self, tensors: Sequence[TensorMeta], attrs: Mapping[str, str] = {}) -> int:
        """Return the size in bytes of the file that `create` makes, or somewhat less."""
        ...

    def header_bytes(self, tensors: Sequence[TensorMeta], attrs: Mapping[str, str] = {}) -> int:
        """Return the most bytes of a header: a sum over the tensors, and what every file has."""
        ...

    def create(
        self, fd: int, file: StoredFile, tensors: Sequence[TensorMeta], attrs: Mapping[str, str]
    ) -> FileIndex:
        """Write a new file with a complete header, strings included, and no contents yet.

        `refusals` must have yielded nothing.  A ``"crc_num"`` in ``attrs``, of any value, reserves
        space for a checksum; `seal` fills it.  The index then has the attribute, too.  A format
        omits the other attributes that it has no room for.

        Parameters
        ----------
        fd, file
            An empty file that is open for reading and writing; the index names it.
        tensors, attrs
            What it is to hold.
        """
        ...

    def seal(self, fd: int, crc: int | None = None) -> None:
        """Write the checksum into an open file, if `create` reserved a place for it."""
        ...


class FormatWithChecksum(Format, Protocol):
    """A format with a place for MindSpore's checksum ``crc_num``."""

    def checksum_inputs(self, index: FileIndex, as_saved: bool = False) -> Iterator[ChecksumInput]:
        """Yield the bytes that the checksum of a file covers, in order.

        MindSpore's loader counts these bytes, or with ``as_saved`` its saver.  The two differ in
        some cases.
        """
        ...
