"""What a file format is to the rest of the program: a codec of headers."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Protocol, TypeAlias

from ckpttool.model.tensors import Extent, FileIndex, TensorMeta

# Bytes themselves, bytes of the file, or a number of zero bytes.
ChecksumPart: TypeAlias = bytes | Extent | int


class Format(Protocol):
    """A file format.

    Attributes
    ----------
    name
        As in ``--format``, in reports and in ``FileIndex.format``.
    """

    @property
    def name(self) -> str:
        """Name of the format."""
        ...

    def refusals(self, tensors: Sequence[TensorMeta], attrs: Collection[str] = ()) -> Iterator[str]:
        """Yield a message for each reason why these tensors and attributes cannot be written."""
        ...

    def read_index(self, path: str) -> FileIndex:
        """Return the header of a file.  Contents of tensors are not read.

        Raises
        ------
        FormatError
            The file is not what the format says.
        UnsupportedError
            The file uses something that is not read.
        OSError
            It cannot be opened or read.
        """
        ...

    def file_bytes(self, tensors: Sequence[TensorMeta], attrs: Collection[str] = ()) -> int:
        """Return the size of the file that `create` makes, or somewhat less."""
        ...

    def create(
        self, path: str, tensors: Sequence[TensorMeta], attrs: Mapping[str, str]
    ) -> FileIndex:
        """Write a new file with a complete header, strings included, and no contents yet.

        Overwrite an existing file in place.  `refusals` must have yielded nothing.  A
        ``"crc_num"`` in ``attrs``, of any value, asks for a place for a checksum, which `seal`
        fills; the index then has one as well.  No other attribute is written.
        """
        ...

    def seal(self, path: str, crc: int | None = None) -> None:
        """Write what must come after the contents: the checksum, if there is a place for one."""
        ...


class FormatWithChecksum(Format, Protocol):
    """A format that has a place for MindSpore's checksum: ``crc_num``."""

    def checksum_parts(self, index: FileIndex, as_saved: bool = False) -> Iterator[ChecksumPart]:
        """Yield what the checksum of a file is taken over, in order.

        It is what MindSpore's loader counts, or ``as_saved`` what its saver counts.  The two are
        not always the same.
        """
        ...
