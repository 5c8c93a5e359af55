"""Are the source files what was saved?  Encrypted blocks have tags that tell, others checksums."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Executor, Future
from typing import TypeVar

from ckpttool.errors import FormatError
from ckpttool.formats.decryption import find_forged
from ckpttool.formats.encrypted import forgery
from ckpttool.formats.stopping import result_of
from ckpttool.model.catalog import Catalog, FileIndex, MergedCatalog, format_ranks
from ckpttool.model.ciphertext import Ciphertext
from ckpttool.model.notes import Note
from ckpttool.model.strategy import shorten
from ckpttool.storage.checksum import verify_checksum

T = TypeVar("T")

BLOCKS_PER_TASK = 4  # of 64 MiB each


def check_files(
    catalog: Catalog,
    executor: Executor,
    crc: bool,
    on_progress: Callable[[int], None] = lambda nbytes: None,
) -> tuple[list[FormatError], list[Note]]:
    """What is wrong with the files of a catalog, and what should be known of the others.

    Parameters
    ----------
    catalog
        From `scan`; what is in ``catalog.damaged`` is not looked at.
    executor
        Reads: every block that has a tag, and with ``crc`` every file that has a checksum, whole.
    crc
        Whether checksums are verified.
    on_progress
        Called with the bytes of each file that was read.
    """
    files = catalog.files

    def await_all(rank: int, futures: Iterable[Future[T]]) -> list[T]:
        results = [result_of(future) for future in futures]
        on_progress(files[rank].nbytes)
        return results

    def note(text: str, ranks: Collection[int], is_warning: bool = False) -> list[Note]:
        named = format_ranks(sorted(ranks))
        if isinstance(catalog, MergedCatalog):  # then these are no ranks
            named = shorten(files[number].path for number in sorted(ranks))
        told = Note("checksum", f"{named}: {text}", is_warning=is_warning)
        return [told] if ranks else []

    has_index = isinstance(catalog, MergedCatalog) and bool(catalog.indexes)
    with_sum = [rank for rank, file in files.items() if _has_checksum(file, has_index)]
    with_tags = {
        rank: file.cipher
        for rank, file in files.items()
        if file.cipher is not None and file.cipher.has_tags
    }
    sums = {rank: executor.submit(verify_checksum, files[rank]) for rank in with_sum if crc}
    tags = {rank: _check_tags(files[rank], cipher, executor) for rank, cipher in with_tags.items()}
    forged = {
        rank: forgery(files[rank].path, with_tags[rank], numbers)
        for rank, futures in tags.items()
        if (numbers := [number for found in await_all(rank, futures) for number in found])
    }
    wrong = {rank: error for rank, of in sums.items() if (error := await_all(rank, [of])[0])}
    errors = [*forged.values(), *wrong.values()]
    if not crc:
        text = "saved with a checksum (crc_check), which is not verified; verify --crc does that"
        return errors, note(text, with_sum, is_warning=True)
    notes = note("the checksum is right", sums.keys() - wrong.keys())
    notes += note("the tags of all encrypted blocks are right", tags.keys() - forged.keys())
    others = files.keys() - sums.keys() - tags.keys()
    return errors, notes + note("saved without a checksum, so nothing tells of damage", others)


def _has_checksum(file: FileIndex, has_index: bool) -> bool:
    """Whether there is a checksum of what a header speaks of.

    The 0 that MindSpore puts behind encrypted blocks is none, nor is what its
    ``unified_safetensors`` writes into a part: that of a rank's file, carried over.  And that of
    one file is not that of several that a rank has.
    """
    is_void = file.cipher is not None and file.attrs.get("crc_num") == "0"
    is_void = is_void or (has_index and file.attrs.get("format") == "ms")
    return "crc_num" in file.attrs and not is_void and not file.other_paths


def _check_tags(
    file: FileIndex, cipher: Ciphertext, executor: Executor
) -> list[Future[tuple[int, ...]]]:
    """The numbers of forged blocks, on their way."""
    stamp = file.stamps[file.path]
    return [
        executor.submit(find_forged, file.path, cipher, first, first + BLOCKS_PER_TASK, stamp)
        for first in range(0, len(cipher.blocks), BLOCKS_PER_TASK)
    ]
