"""What the bytes mean: one module per file format, and the registry that finds the right one.

A format is a codec of headers only.  Where a tensor's bytes lie it says as extents, and
`ckpttool.storage.flatfile` moves the bytes for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

from ckpttool.errors import FormatError, UnsupportedError
from ckpttool.formats.others import recognise
from ckpttool.model.catalog import FileIndex, TensorMeta


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

    def refusals(self, tensors: Sequence[TensorMeta]) -> Iterator[str]:
        """Why these tensors cannot be written in this format: a message for each problem."""
        ...

    def read_index(self, path: str) -> FileIndex:
        """The header of a file.  Contents of tensors are not read.

        Raises
        ------
        FormatError
            The file is not what the format says.
        UnsupportedError
            It is, but uses something that is not read.
        OSError
            It cannot be opened or read.
        """
        ...

    def create(
        self, path: str, tensors: Sequence[TensorMeta], attrs: Mapping[str, str]
    ) -> FileIndex:
        """A new file with a complete header (strings included) and no contents yet.

        An existing file is overwritten in place.  ``refusals`` must have had nothing to say.
        """
        ...

    def seal(self, path: str) -> None:
        """Add what must come after the contents, such as a checksum."""
        ...


# Modules are imported when they are needed: h5py takes longer to load than all the rest.
# Of the suffixes the first is the one that is written.
_FORMATS = {
    "hdf5": ("ckpttool.formats.hdf5", "Hdf5", (".h5", ".hdf5")),
    "ckpt": ("ckpttool.formats.ckpt", "Ckpt", (".ckpt",)),
    "safetensors": ("ckpttool.formats.safetensors", "Safetensors", (".safetensors",)),
}

HDF5_SIGNATURE = b"\x89HDF\r\n\x1a\n"
FORMAT_NAMES = tuple(_FORMATS)


def get_format(name: str) -> Format:
    """The format of that name, one of `FORMAT_NAMES`."""
    module, cls, _ = _FORMATS[name]
    return cast(Format, getattr(import_module(module), cls)())


def suffix_of(name: str) -> str:
    """The ending of file names that are written in a format, with its dot."""
    return _FORMATS[name][2][0]


def format_of_suffix(path: str) -> str | None:
    """Name of the format that a file name ends in, or None.

    Examples
    --------
    >>> format_of_suffix("rank_0/CKP-1_10.ckpt"), format_of_suffix("notes.txt")
    ('ckpt', None)
    """
    suffix = Path(path).suffix.lower()
    return next((name for name, (_, _, known) in _FORMATS.items() if suffix in known), None)


def format_of_content(path: str) -> str | None:
    """``"hdf5"`` or ``"safetensors"`` if the file's first bytes say so, else None."""
    with Path(path).open("rb") as file:
        head = file.read(16)
        size = file.seek(0, 2)
        at = 0  # HDF5 allows a user block: its signature is at byte 0, 512, 1024, 2048, ...
        while at < size and file.seek(at) == at and file.read(8) != HDF5_SIGNATURE:
            at = max(512, 2 * at)
    if at < size:
        return "hdf5"
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= size - 8:
        return "safetensors"
    return None


def read_index(path: str) -> FileIndex:
    """The header of a file of any format; the content decides which, then the suffix.

    A ``.ckpt`` has no mark of its own, so its suffix stands before a first byte that would do.

    Raises
    ------
    FormatError
        It is none of the formats, or not what its format says.
    UnsupportedError
        It is a file of another kind that is known, or uses something that is not read.
    OSError
        It cannot be opened or read.
    """
    try:
        return get_format(_format_of(path)).read_index(path)
    except UnsupportedError:
        raise
    except FormatError as error:
        other = recognise(path)
        if other is None:
            raise
        reason = f"{other.noun}, no checkpoint; {other.remedy}"
        raise UnsupportedError(path, None, reason) from error


def _format_of(path: str) -> str:
    name = format_of_content(path) or format_of_suffix(path)
    if name is None:
        with Path(path).open("rb") as file:
            if file.read(1) != b"\n":
                reason = "no .ckpt, .safetensors or HDF5 file, by content or by name"
                raise FormatError(path, 0, reason)
    return name or "ckpt"
