"""The contents of a file: tensors, the extents of their bytes, and the index of the file.

These records are all that formats say of a file, so what follows does not know formats.  They are
made by the million, so hashes and sizes are computed once.  Reading the bytes is left to
`ckpttool.storage`, the meaning of names and slices to the other modules here.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import NamedTuple, TypeAlias

from msgspec import Struct
from msgspec.structs import force_setattr

from ckpttool.model.dtypes import ALL_DTYPES, TEXT
from ckpttool.problems import FormatError, UnsupportedError
from ckpttool.secret import Secret

# Axes of a tensor.  Arrays of it have one more, the bytes of an element; NumPy 2 allows 64.
MAX_AXES = 63


@lru_cache(maxsize=1 << 12)  # most tensors have the same few shapes
def _count_bytes(shape: tuple[int, ...], itemsize: int) -> int:
    return math.prod(shape) * itemsize


class TensorMeta(Struct, frozen=True, gc=False):
    """Name, element type and shape of a tensor, or a string entry.

    Attributes
    ----------
    text
        The value, if and only if ``dtype`` is ``"str"``.  Strings are header material: they are
        read with the index, compared as values and written with its header.
    whole_shape
        The shape in the header of a tensor that is only copied whole; None for all others.  Several
        of its elements share a byte, or it has more than `MAX_AXES` axes.  Its ``shape`` has one
        axis.
    itemsize, nbytes
        Bytes per element, and of all elements; 1, and the bytes in UTF-8, of a string.

    Raises
    ------
    ValueError
        The tensor is impossible, such as one with too many axes.
    """

    name: str  # parameter name, exact
    dtype: str  # name of the element type (a key of `ALL_DTYPES`), or ``"str"``
    shape: tuple[int, ...]  # elements along each axis; ``()`` for a scalar and for a string
    text: str | None = None
    whole_shape: tuple[int, ...] | None = None
    itemsize: int = 0  # this and nbytes follow from the others, once, as they are needed often
    nbytes: int = 0

    def __post_init__(self) -> None:
        if len(self.shape) > MAX_AXES:
            raise ValueError(f"{self.name}: {len(self.shape)} axes; {MAX_AXES} are the most")
        if (self.dtype == TEXT) != (self.text is not None) or (
            self.text is not None and self.shape
        ):
            raise ValueError(f"{self.name}: a string entry has a text, and no shape")
        if self.text is not None:
            itemsize, nbytes = 1, len(self.text.encode())
        elif self.dtype in ALL_DTYPES:
            itemsize = ALL_DTYPES[self.dtype].itemsize
            nbytes = _count_bytes(self.shape, itemsize)
        else:
            raise ValueError(f"{self.name}: no element type {self.dtype}")
        force_setattr(self, "itemsize", itemsize)
        force_setattr(self, "nbytes", nbytes)

    def __hash__(self) -> int:
        # A hash of all fields takes five times as long.  Thousands of ranks may have tensors of one
        # name that differ in size, or in the text of a string.
        return hash(self.text or self.name) ^ self.nbytes

    def of_shape(self, shape: tuple[int, ...]) -> TensorMeta:
        """Return a copy with another shape; the same object if the shape is equal."""
        if shape == self.shape:
            return self
        return TensorMeta(self.name, self.dtype, shape, self.text, self.whole_shape)

    @property
    def header_shape(self) -> tuple[int, ...]:
        """Elements along each axis, as a header lists them."""
        return self.shape if self.whole_shape is None else self.whole_shape

    @property
    def is_single(self) -> bool:
        """Whether it is a single value: one element, or a text."""
        return self.text is not None or math.prod(self.shape) == 1


class Extent(Struct, frozen=True, gc=False):
    """``nbytes`` contiguous bytes of a file, or of what it decrypts to, from ``offset`` on."""

    offset: int
    nbytes: int


FileId: TypeAlias = tuple[int, int]  # device and inode


class Reads(Struct, frozen=True):
    """The reads of a run or a part of it, past or planned.

    Attributes
    ----------
    requests
        Number of reads: system calls.
    nbytes
        Their bytes.
    """

    requests: int = 0
    nbytes: int = 0

    def __add__(self, other: Reads) -> Reads:
        return Reads(self.requests + other.requests, self.nbytes + other.nbytes)


class FileStamp(NamedTuple):
    """The identity of a file's content; writing to a file or saving it again changes it.

    The time of change (ctime) differs even if somebody sets back the time of modification.  The
    stamp omits the device number, because network file systems have a different one on each host.
    """

    nbytes: int
    mtime_ns: int
    ctime_ns: int
    inode: int


class StoredFile(Struct, frozen=True):
    """A file that holds tensors; one object for all of its tensors.

    A file with an encrypted and a plain part is two of them, with and without ``cipher``.  Each
    later opening compares the file with its ``stamp``, from before its header was read.  A file
    that is being written has none; it is compared with which file it is (``claimed``).
    """

    path: str
    stamp: FileStamp | None = None
    cipher: Ciphertext | None = None  # how the tensors are encrypted; None if they are not
    claimed: FileId | None = None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, StoredFile):
            return NotImplemented
        return (self.path, self.cipher) == (other.path, other.cipher)

    def __hash__(self) -> int:
        return hash(self.path)  # a cipher may have thousands of blocks


class StoredTensor(Struct, frozen=True, gc=False):
    """A tensor and the bytes that hold it: C order, little endian, extents in order.

    A string entry lacks extents: its value is in ``meta.text``.  Extents of an encrypted file are
    in its plaintext.
    """

    meta: TensorMeta
    file: StoredFile
    extents: tuple[Extent, ...]

    def __post_init__(self) -> None:
        nbytes = 0
        for extent in self.extents:  # a catalog makes millions of stored tensors
            nbytes += extent.nbytes
        if self.meta.text is None and nbytes != self.meta.nbytes:
            raise ValueError(f"{self.meta.name}: extents of {nbytes} bytes for {self.meta.nbytes}")

    def __hash__(self) -> int:
        return hash((self.meta.name, self.file.path))


class SharedHeader(Mapping[str, StoredTensor]):
    """The tensors of ``file``, whose header equals that of another file.

    Nearly all of a thousand ranks share their header with another rank, and each has a thousand
    tensors.  Looking a tensor up makes it.
    """

    __slots__ = "file", "header"

    def __init__(self, header: Mapping[str, StoredTensor], file: StoredFile) -> None:
        self.header, self.file = header, file

    def __getitem__(self, name: str) -> StoredTensor:
        tensor = self.header[name]
        return StoredTensor(tensor.meta, self.file, tensor.extents)

    def __contains__(self, name: object) -> bool:
        return name in self.header

    def __iter__(self) -> Iterator[str]:
        return iter(self.header)

    def __len__(self) -> int:
        return len(self.header)


class FileIndex(Struct, frozen=True):
    """The header of one checkpoint file, or of all files of one rank, if ``tensors`` has theirs.

    ``attrs`` is what else the header says: the metadata of a safetensors file, the checksum of a
    ``.ckpt``, how ckpttool made an HDF5 file.  ``"crc_num"`` is MindSpore's checksum wherever there
    is one.
    """

    files: tuple[StoredFile, ...]
    format: str
    nbytes: int  # size of all files
    tensors: Mapping[str, StoredTensor]  # name to tensor, in the order of the file
    attrs: Mapping[str, str] = {}
    reads: Reads = Reads()  # what was read of the files to know all this
    skipped: tuple[str, ...] = ()  # names of the entries that are not tensors

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, FileIndex):
            return NotImplemented
        own = self.files, self.format, self.nbytes, self.tensors, self.attrs
        return own == (other.files, other.format, other.nbytes, other.tensors, other.attrs)

    @property
    def header(self) -> Mapping[str, StoredTensor]:
        """The tensors, one object for all files with an equal header; their files may differ."""
        tensors = self.tensors
        return tensors.header if isinstance(tensors, SharedHeader) else tensors

    @property
    def file(self) -> StoredFile:
        """The first file, mostly the only one."""
        return self.files[0]

    @property
    def path(self) -> str:
        """Path of the first file."""
        return self.file.path

    @property
    def paths(self) -> tuple[str, ...]:
        """Paths of all files."""
        return tuple(file.path for file in self.files)

    @property
    def cipher(self) -> Ciphertext | None:
        """How the first file is encrypted; None if it is not."""
        return self.file.cipher


class Remains(Struct, frozen=True):
    """The usable rest of a file that is cut short.

    ``lost`` has the lost tensors whose names are known, with None for an unknown shape.  The header
    of a ``.ckpt`` does not list what follows, so ``are_all_known`` is False.
    """

    index: FileIndex  # the header of the tensors that end before the file does
    lost: Mapping[str, TensorMeta | None]
    are_all_known: bool


class CutShortError(FormatError):
    """A file that provably ends too early; what ends before that, ``remains``, is whole."""

    def __init__(
        self, path: str, offset: int | None, reason: str, hint: str, facts: str, remains: Remains
    ) -> None:
        super().__init__(path, offset, reason, hint, facts)
        self.args = path, offset, reason, hint, facts, remains
        self.remains = remains

    def knowing(self, remains: Remains) -> CutShortError:
        """Return the error with more that is known of the lost tensors."""
        copied = self._copy()
        copied.remains, copied.args = remains, (*self.args[:5], remains)
        return copied


class VirtualFileError(UnsupportedError):
    """A file that shows the bytes of others; only `ckpttool.discovery.shown_files` reads it."""


class PartlyReadError(CutShortError, UnsupportedError):
    """A file with tensors that cannot be read; the others, ``remains``, can."""


class Block(Struct, frozen=True):
    """One block of ciphertext; each block is encrypted separately.

    Attributes
    ----------
    offset, nbytes
        Position of the ciphertext in the file, padding included.
    start, stop
        Its bytes in the plaintext of the file.
    iv, tag
        Initialization vector and authentication tag, 16 bytes each; no tag in modes without tags.
    """

    offset: int
    nbytes: int
    start: int
    stop: int
    iv: bytes
    tag: bytes


class Ciphertext(Struct, frozen=True):
    """The encryption of a file; its blocks are in the order of the plaintext, without gaps."""

    mode: str  # ``"AES-GCM"``, ``"AES-CBC"`` or ``"SM4-CBC"``
    key: Secret  # as given to MindSpore
    blocks: tuple[Block, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the plaintext."""
        return self.blocks[-1].stop if self.blocks else 0

    @property
    def has_tags(self) -> bool:
        """Whether the blocks have authentication tags."""
        return bool(self.blocks and self.blocks[0].tag)

    def split(self, start: int, view: memoryview) -> Iterator[tuple[Block, int, memoryview]]:
        """Split a view of the plaintext from byte ``start`` on at the ends of blocks.

        ``view`` is a buffer for plaintext that must not reach beyond the end.

        Yields
        ------
        block, first, part
            A block, the first byte in its plaintext, and the part of ``view`` for it.
        """
        number = bisect_right(self.blocks, start, key=lambda block: block.start) - 1
        while view:
            block = self.blocks[number]
            part = view[: block.stop - start]
            if part:
                yield block, start - block.start, part
            view, start = view[len(part) :], block.stop
            number += 1
