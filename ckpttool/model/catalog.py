"""Nouns of storage: what a tensor is, where its bytes lie, and which rank's file holds it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from ckpttool.errors import FormatError
from ckpttool.model.ciphertext import Ciphertext
from ckpttool.model.dtypes import DTYPES, TEXT
from ckpttool.model.findings import Finding
from ckpttool.model.notes import Note

if TYPE_CHECKING:
    from ckpttool.model.described import Description

# Of a tensor.  Arrays here have one axis more, the bytes of an element, and NumPy 2 has 64 at most.
MAX_AXES = 63


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """Name, element type and shape of a tensor, or a string entry.

    Attributes
    ----------
    name
        Parameter name, exact.
    dtype
        MindSpore's name of the element type (a key of `DTYPES`), or ``"str"``.
    shape
        Elements along each axis; ``()`` for a scalar and for a string.
    text
        The value, if and only if ``dtype`` is ``"str"``.  Strings are header material: they are
        read with the index, compared as values and written by `Format.create`.
    nbytes
        Bytes of all elements; of a string, bytes in UTF-8.

    Raises
    ------
    ValueError
        There is no such tensor; it has too many axes, for one.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    text: str | None = None
    nbytes: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if len(self.shape) > MAX_AXES:
            raise ValueError(f"{self.name}: {len(self.shape)} axes; {MAX_AXES} are the most")
        if (self.dtype == TEXT) != (self.text is not None) or (
            self.text is not None and self.shape
        ):
            raise ValueError(f"{self.name}: a string entry has a text, and no shape")
        if self.text is not None:
            nbytes = len(self.text.encode())
        elif self.dtype in DTYPES:
            nbytes = math.prod(self.shape) * DTYPES[self.dtype].itemsize
        else:
            raise ValueError(f"{self.name}: no element type {self.dtype}")
        object.__setattr__(self, "nbytes", nbytes)  # many are asked for it, many times

    def of_shape(self, shape: tuple[int, ...]) -> TensorMeta:
        """The same of another shape; it is itself, which takes no memory, if that is its own."""
        return self if shape == self.shape else replace(self, shape=shape)

    @property
    def is_single(self) -> bool:
        """Whether it is a single value: one element, or a text."""
        return self.text is not None or math.prod(self.shape) == 1

    @property
    def itemsize(self) -> int:
        """Bytes per element; 1 for a string."""
        return 1 if self.text is not None else DTYPES[self.dtype].itemsize


@dataclass(frozen=True, slots=True)
class Extent:
    """``nbytes`` contiguous bytes of a file, or of what it decrypts to, from ``offset`` on."""

    offset: int
    nbytes: int


class Stamp(NamedTuple):
    """By what a file is known again: one that was written to or saved anew has another.

    The time of change (ctime) tells even if the time of modification was set back.
    """

    nbytes: int
    mtime_ns: int
    ctime_ns: int


class SourceStamp(NamedTuple):
    """The same of a source file, and which file of its file system it is.

    No device: network file systems have another number for it on each host.
    """

    nbytes: int
    mtime_ns: int
    ctime_ns: int
    inode: int


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file that holds tensors; one object for all of its tensors.

    A file of which only a part is encrypted is two of them, with and without ``cipher``.

    Attributes
    ----------
    path
        Carried as a value, never opened here.
    stamp
        The file as it was when its header was read.  Whoever opens it for the contents compares
        what was opened with that.  None for a file that is being written.
    cipher
        How the tensors are encrypted; None if they are not.
    """

    path: str
    stamp: SourceStamp | None = field(default=None, compare=False, repr=False)
    cipher: Ciphertext | None = None


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor and the bytes that hold it: C order, little endian, extents in order.

    A string entry has no extents: its value is in ``meta.text``.

    Attributes
    ----------
    meta
        What the tensor is.
    file
        The file that holds it.
    extents
        Where in the file, or in the plaintext of an encrypted one.
    """

    meta: TensorMeta
    file: StoredFile
    extents: tuple[Extent, ...]

    def __post_init__(self) -> None:
        held = 0
        for extent in self.extents:  # a catalog makes millions of stored tensors
            held += extent.nbytes
        if self.meta.text is None and held != self.meta.nbytes:
            raise ValueError(f"{self.meta.name}: extents of {held} bytes for {self.meta.nbytes}")


@dataclass(frozen=True, slots=True, eq=False)
class SharedHeader(Mapping[str, StoredTensor]):
    """The tensors of a file whose header is equal to that of another file.

    Of a thousand ranks nearly all have the header of another, with a thousand tensors each.  A
    tensor is made when it is looked up.

    Attributes
    ----------
    header
        The tensors of the other file.
    file
        The file that holds these.
    """

    header: Mapping[str, StoredTensor]
    file: StoredFile

    def __getitem__(self, name: str) -> StoredTensor:
        tensor = self.header[name]
        return StoredTensor(tensor.meta, self.file, tensor.extents)

    def __contains__(self, name: object) -> bool:
        return name in self.header

    def __iter__(self) -> Iterator[str]:
        return iter(self.header)

    def __len__(self) -> int:
        return len(self.header)


@dataclass(frozen=True, slots=True)
class FileIndex:
    """The header of one checkpoint file.

    Attributes
    ----------
    path
        As given; carried as a value, never opened here.
    format
        Name of the format: ``"ckpt"``, ``"safetensors"`` or ``"hdf5"``.
    nbytes
        Size of the file.
    tensors
        Name to tensor, in the order of the file.
    attrs
        What else the header says: the metadata of a safetensors file, the checksum of a ``.ckpt``.
        ``"crc_num"`` is MindSpore's checksum wherever there is one.
    cipher
        How the file is encrypted; None if it is not.
    other_paths
        Further files of the same rank, whose tensors are among ``tensors``.
    stamps
        Of each file as it was when it was opened for its header; none of one that was just written.
    """

    path: str
    format: str
    nbytes: int
    tensors: Mapping[str, StoredTensor]
    attrs: Mapping[str, str] = field(default_factory=dict)
    cipher: Ciphertext | None = None
    other_paths: tuple[str, ...] = ()
    stamps: Mapping[str, SourceStamp] = field(default_factory=dict, compare=False)

    @property
    def paths(self) -> tuple[str, ...]:
        """All files."""
        return (self.path, *self.other_paths)

    @property
    def header(self) -> Mapping[str, StoredTensor]:
        """The tensors, one object for all files with an equal header; their files may differ."""
        return self.tensors.header if isinstance(self.tensors, SharedHeader) else self.tensors


def refuse_shared_bytes(path: str, places: Iterable[tuple[int, int, str]]) -> None:
    """Raise `FormatError` if two things lie upon each other in a file.

    Parameters
    ----------
    path
        The file.
    places
        Where each begins, where it ends, and what it is, in any order.
    """
    end, last = 0, ""
    for start, stop, what in sorted(places):
        if start < end:
            raise FormatError(path, start, f"{last} and {what} have bytes in common (damaged?)")
        end, last = stop, what


def refuse_shared_extents(index: FileIndex) -> None:
    """The same of the tensors of a file, whatever its format.

    The same bytes may have two names, where a format has links; its reader knows whether they are.
    """
    known: dict[tuple[str, bool], dict[tuple[int, int], str]] = {}
    for name, tensor in index.tensors.items():
        # What is encrypted is counted in what it decrypts to.
        places = known.setdefault((tensor.file.path, tensor.file.cipher is not None), {})
        for extent in tensor.extents:
            if extent.nbytes:
                places.setdefault((extent.offset, extent.offset + extent.nbytes), name)
    for (path, _), places in known.items():
        refuse_shared_bytes(path, ((*place, name) for place, name in places.items()))


@dataclass(frozen=True, slots=True, eq=False)
class _TensorsOfRanks(Mapping[int, StoredTensor]):
    """Rank to stored tensor of one name; a tensor is made when it is looked up."""

    name: str
    files: Mapping[int, FileIndex]

    def __getitem__(self, rank: int) -> StoredTensor:
        return self.files[rank].tensors[self.name]

    def __contains__(self, rank: object) -> bool:
        return isinstance(rank, int) and rank in self.files and self.name in self.files[rank].header

    def __iter__(self) -> Iterator[int]:
        return (rank for rank, file in self.files.items() if self.name in file.header)

    def __len__(self) -> int:
        return sum(self.name in file.header for file in self.files.values())


@dataclass(frozen=True, kw_only=True)  # no slots: tables of names are made once and kept
class Catalog:
    """What is on disk: the headers of the files of a checkpoint.

    It is a `RankCatalog`, a `MergedCatalog` or a `SelfDescribedCatalog`.

    Attributes
    ----------
    root
        The folder or file that was scanned.
    files
        Rank to header, ascending; in a `MergedCatalog` number of file to header.
    step
        Label of the step that was taken, as in the file names (``"10_1"``); None if the names
        have none.
    damaged
        Ranks whose file could not be read, with the reason.
    notes
        What was skipped or chosen while looking for the files.
    strategy_files
        The strategy files that certainly belong to it, if it lies in the output folder of a
        MindFormers run; for those who name none.
    problems
        What prevents a conversion, but not an inspection.
    findings
        What does not fit together: an index and its files, an unfinished run.  Only `verify` and
        `inspect` get a catalog that has some; `scan` raises them.
    one_of_several
        What shows that its only file is one rank's of several, so that tensors may be slices;
        empty if nothing does.
    headers
        The different headers by the ranks that have them, ascending, from that of the lowest rank
        on.  Questions about all tensors of all ranks are asked of these few.
    """

    root: str = field(kw_only=False)
    files: Mapping[int, FileIndex] = field(kw_only=False)
    step: str | None = None
    damaged: Mapping[int, FormatError] = field(default_factory=dict)
    notes: tuple[Note, ...] = ()
    strategy_files: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    one_of_several: str = ""
    headers: Mapping[tuple[int, ...], Mapping[str, StoredTensor]] = field(
        init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        found: dict[int, tuple[list[int], Mapping[str, StoredTensor]]] = {}
        for rank, file in self.files.items():
            found.setdefault(id(file.header), ([], file.header))[0].append(rank)
        headers = {tuple(ranks): header for ranks, header in found.values()}
        object.__setattr__(self, "headers", headers)

    @property
    def paths(self) -> tuple[str, ...]:
        """All files that were read as parts of the checkpoint."""
        return tuple(path for file in self.files.values() for path in file.paths)

    @cached_property
    def metas(self) -> Mapping[str, TensorMeta]:
        """Name to tensor, as the lowest rank that has one holds it."""
        found: dict[str, TensorMeta] = {}
        for header in self.headers.values():
            for name, tensor in header.items():
                found.setdefault(name, tensor.meta)
        return found

    @cached_property
    def holders(self) -> Mapping[str, tuple[int, ...]]:
        """The ranks that have each parameter, ascending; names in the order of the files."""
        found: dict[str, list[tuple[int, ...]]] = {}
        for ranks, header in self.headers.items():
            for name in header:
                found.setdefault(name, []).append(ranks)
        joined = {groups: tuple(sorted(chain(*groups))) for groups in map(tuple, found.values())}
        return {name: joined[tuple(groups)] for name, groups in found.items()}

    def tensors_of(self, name: str) -> Mapping[int, StoredTensor]:
        """Return rank to stored tensor of a name; ranks ascending."""
        return _TensorsOfRanks(name, self.files)

    def metas_of(self, name: str) -> dict[int, TensorMeta]:
        """Return rank to tensor of a name, without its bytes; ranks ascending."""
        groups = [
            dict.fromkeys(ranks, header[name].meta)
            for ranks, header in self.headers.items()
            if name in header
        ]
        if len(groups) == 1:
            return groups[0]
        return dict(sorted(chain(*(group.items() for group in groups)), key=itemgetter(0)))

    def is_expected(self, rank: int) -> bool:
        """Whether it should have a file of a rank."""
        return True


@dataclass(frozen=True, kw_only=True)
class RankCatalog(Catalog):
    """A checkpoint whose ranks hold slices, one file or more for each rank.

    Attributes
    ----------
    missing_ranks
        Ranks that seem to belong to it and have no file: gaps, and rank folders without one.
    expected_ranks
        Ranks that it was written for, where its manifest names them and it is verified; None for
        all.
    """

    missing_ranks: tuple[int, ...] = ()
    expected_ranks: frozenset[int] | None = None

    def is_expected(self, rank: int) -> bool:
        """Whether it should have a file of a rank."""
        return self.expected_ranks is None or rank in self.expected_ranks


@dataclass(frozen=True, kw_only=True)
class MergedCatalog(Catalog):
    """A checkpoint of full tensors: one file, or several with an index.

    A single file may be one rank's all the same, if the user gives its strategy.

    Attributes
    ----------
    indexes
        The index files that were read.
    common_tensors
        The tensors in the file for what no strategy lists, which goes to every rank as it is.
        True for one that an index names; any other may be one rank's slice.
    """

    indexes: tuple[str, ...] = ()
    common_tensors: Mapping[str, bool] = field(default_factory=dict)

    @property
    def paths(self) -> tuple[str, ...]:
        """All files that were read as parts of the checkpoint, the indexes first."""
        return (*self.indexes, *super().paths)


@dataclass(frozen=True, kw_only=True)
class SelfDescribedCatalog(Catalog):
    """A checkpoint that needs no strategy: ``description`` tells which box each rank holds."""

    description: Description


def format_ranks(ranks: Sequence[int], word: str = "rank") -> str:
    """Ranks as people write them, or what else is counted.

    Examples
    --------
    >>> format_ranks([0])
    'rank 0'
    >>> format_ranks([0, 3, 4, 5, 7])
    'ranks 0, 3-5, 7'
    """
    parts: list[str] = []
    ordered = sorted(ranks)
    first = 0
    for i, rank in enumerate(ordered):
        if i + 1 == len(ordered) or ordered[i + 1] != rank + 1:
            start = ordered[first]
            joint = "-" if rank > start + 1 else ", "
            parts.append(str(rank) if start == rank else f"{start}{joint}{rank}")
            first = i + 1
    return f"{word}{'s' if len(ordered) > 1 else ''} {', '.join(parts)}"
