"""File formats: one module for each, and the registry that finds the right one.

A format is a codec of headers only.  It gives the bytes of a tensor as extents, and
`ckpttool.storage.region_io` moves the bytes for all formats.  This module decides which format a
file is in, and reads the headers of many files: in threads, with a cache of equal headers, and HDF5
in a process of its own.  Discovery decides what the files of a folder are to each other.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from functools import lru_cache
from importlib import import_module
from itertools import chain, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, cast

from msgspec.structs import replace

from ckpttool.concurrency import Threads, wait_result
from ckpttool.formats.base import HDF5_SIGNATURE, Format, Header
from ckpttool.formats.encryption import mode_of
from ckpttool.formats.foreign import NAME_CHECKPOINT, identify_foreign
from ckpttool.formats.local import ReadFile, counting_reads, identify_file, unreadable
from ckpttool.formats.sandbox import Sandbox
from ckpttool.model.tensors import FileIndex, StoredFile, TensorMeta
from ckpttool.problems import FormatError, UnsupportedError
from ckpttool.secret import Secret

if TYPE_CHECKING:
    from ckpttool.formats.header_cache import HeaderCache
    from ckpttool.model.plan import OutputFile

# Module, class and suffixes.  Modules are imported when they are needed, as h5py takes longer to
# load than all the rest.  Files are written with the first suffix.
FORMATS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "hdf5": ("ckpttool.formats.hdf5", "Hdf5", (".h5", ".hdf5")),
    "ckpt": ("ckpttool.formats.ckpt", "Ckpt", (".ckpt",)),
    "safetensors": ("ckpttool.formats.safetensors", "Safetensors", (".safetensors",)),
}

# Threads that read headers.  More wait for each other: for 1,024 cached files of 600 tensors, eight
# took 8.0 s and three 5.5 s (measured).
READERS = 3
# Threads that ask the disk for files ahead of the readers, and how many of them; they mostly wait.
PREFETCHERS = 4
FILES_AHEAD = 16


def get_format(name: str) -> Format:
    """Return the format of that name, one of `FORMATS`."""
    module, cls, _ = FORMATS[name]
    return cast(Format, getattr(import_module(module), cls)())


def header_of(output: OutputFile) -> Header:
    """Return the header of an output file, which is not written yet."""
    return _header(output.format, output.metas, tuple(output.attrs.items()))


@lru_cache(maxsize=1)  # the outputs of a stage follow each other, and have equal headers
def _header(
    format: str, metas: tuple[TensorMeta, ...], attrs: tuple[tuple[str, str], ...]
) -> Header:
    return get_format(format).index(metas, dict(attrs))


def forget_header() -> None:
    """Forget the header that `header_of` returned last."""
    _header.cache_clear()


def suffix_of(name: str) -> str:
    """Return the suffix of files that are written in a format, with its dot."""
    return FORMATS[name][2][0]


def format_of_suffix(path: str) -> str | None:
    """Return the format that the suffix of a file name stands for, or None.

    Examples
    --------
    >>> format_of_suffix("rank_0/CKP-1_10.ckpt"), format_of_suffix("notes.txt")
    ('ckpt', None)
    """
    suffixes = tuple(chain(*(known for _, _, known in FORMATS.values())))
    if not path.rstrip("/.").lower().endswith(suffixes):
        return None  # most of many files; a path takes long
    suffix = Path(path).suffix.lower()
    return next((name for name, (_, _, known) in FORMATS.items() if suffix in known), None)


def format_of_content(path: str) -> str | None:
    """Return the format from a file's first bytes, or None; only an encrypted ckpt shows itself."""
    with ReadFile(path) as file:  # without a buffer: a few bytes at each of many places
        head, size = file.pread(16, 0), file.size
        at = 0  # HDF5 allows a user block: its signature is at byte 0, 512, 1024, 2048, ...
        while at < size and file.pread(8, at) != HDF5_SIGNATURE:
            at = max(512, 2 * at)
    if at < size:
        return "hdf5"
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= size - 8:
        return "safetensors"
    return "ckpt" if mode_of(head) is not None else None


def read_index(path: str | os.PathLike[str], key: bytes | Secret | None = None) -> FileIndex:
    """Return the header of a file of any format; its content decides, then its suffix.

    A ``.ckpt`` lacks a magic number: its suffix decides, or else its first byte.  An encrypted one
    needs its ``key``, as given to MindSpore (``enc_key``).

    Raises
    ------
    FormatError
        The file is in none of the formats, or damaged, or the key does not fit.
    ForeignError
        The file is of an identified foreign kind.
    UnsupportedError
        The file is encrypted and ``key`` is None, or it uses a feature that is not read.
    OSError
        The file cannot be opened or read.
    """
    index = next(read_indexes([os.fspath(path)], key))
    if isinstance(index, FormatError):
        raise index.__cause__ if isinstance(index.__cause__, OSError) else index
    return index


def read_indexes(
    paths: Iterable[str],
    key: bytes | Secret | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Iterator[FileIndex | FormatError]:
    """Yield the headers of files, as `read_index` returns them, or their errors, in order.

    The first file is read alone, because the headers of the others may equal it; then several files
    are read at a time.  One limited process reads all HDF5 files.  ``on_progress`` is called with
    the number of files that were read, and with their total.
    """
    from ckpttool.formats.header_cache import HeaderCache

    secret = Secret(key) if isinstance(key, bytes) else key
    waiting = list(paths)
    cache = HeaderCache(len(waiting) - 1)  # none equals that of the last file
    with Sandbox() as sandbox:

        def read(path: str) -> FileIndex | FormatError:
            return _read_index(path, cache, secret, sandbox)

        for path in waiting[:1]:
            index = read(path)
            on_progress(1, len(waiting))
            yield index
        executor = Threads(READERS, thread_name_prefix="ckpttool-headers")
        prefetching = Threads(PREFETCHERS, thread_name_prefix="ckpttool-prefetch")
        try:
            futures = deque[Future[FileIndex | FormatError]]()
            for path, ahead in zip_longest(waiting[1:], waiting[1 + FILES_AHEAD :]):
                futures.append(executor.submit(read, path))
                if ahead is not None:
                    prefetching.submit(cache.prefetch, ahead)
            while futures:
                index = wait_result(futures.popleft())
                on_progress(len(waiting) - len(futures), len(waiting))
                yield index
        except BaseException:
            sandbox.stop()
            raise
        finally:
            executor.shutdown(cancel_futures=True)
            prefetching.shutdown(cancel_futures=True)


def _read_index(
    path: str, cache: HeaderCache, key: Secret | None, sandbox: Sandbox
) -> FileIndex | FormatError:
    """Return the header of a file, or its error, which names a foreign kind."""
    try:
        try:
            with counting_reads() as count:
                index = read_as(_find_format(path), identify_file(path), cache, key, sandbox)
            return replace(index, reads=index.reads + count())
        except FormatError as error:
            kind = None if isinstance(error, UnsupportedError) else identify_foreign(path)
            return error if kind is None else kind.error(path)
    except OSError as error:
        error.filename = error.filename or path  # errors of reading lack it
        return unreadable(path, error)


def read_as(
    name: str,
    file: StoredFile,
    cache: HeaderCache,
    key: Secret | None = None,
    sandbox: Sandbox | None = None,
) -> FileIndex:
    """Return the header of a file in the format ``name``, from the cache if it equals another.

    Damaged HDF5 files are read in the sandbox; see `read_index` for the other errors.
    """
    if name == "ckpt":
        from ckpttool.formats.ckpt import Ckpt

        return Ckpt(cache).read_index(file, key)
    reader = sandbox if name == "hdf5" and sandbox is not None else get_format(name)
    return cache.read_index(file, name, reader.read_index)


def _find_format(path: str) -> str:
    """Return the format of a file, by content, suffix or first byte; raise FormatError if none."""
    name = format_of_content(path) or format_of_suffix(path)
    if name == "ckpt":
        return name
    with ReadFile(path) as file:
        first = file.read(1)
    if not first:
        raise FormatError(path, None, "empty (0 bytes)")
    if name is None and first != b"\n":
        reason = "not a .ckpt, .safetensors or HDF5 file, by content and by name"
        raise FormatError(path, None, reason, NAME_CHECKPOINT)
    return name or "ckpt"
