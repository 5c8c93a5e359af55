"""Outputs compared with what a manifest or a log says of them, and files that none tells of."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from concurrent.futures import Executor
from pathlib import Path
from typing import TypeAlias

from ckpttool.concurrency import InlineExecutor, OnProgress, OpenProgress, no_progress, wait_result
from ckpttool.formats import FORMATS, read_index, suffix_of
from ckpttool.model.manifest import OutputEntry, Provenance, TensorEntry, hashed
from ckpttool.model.tensors import FileIndex, FileStamp
from ckpttool.problems import Diagnostic, FormatError
from ckpttool.storage.checksums import verify_checksum
from ckpttool.storage.files import stamp_at
from ckpttool.storage.sampling import hash_units
from ckpttool.transaction.manifest import Written
from ckpttool.wording import count, shorten

ReadEntries: TypeAlias = Callable[[Collection[str]], Iterable[OutputEntry]]
KnownStamps: TypeAlias = Mapping[str, "FileStamp | None"]
MISSING = "missing"
FindUnchanged: TypeAlias = Callable[[KnownStamps, ReadEntries], dict[str, FileStamp]]


def size_problem(folder: Path, output: Written | OutputEntry) -> str | None:
    """Return the problem of an output that is missing or has another size, else None."""
    try:
        nbytes = (folder / output.path).stat().st_size
    except FileNotFoundError:
        return MISSING
    if nbytes != output.nbytes:
        return f"expected {output.nbytes} bytes, found {nbytes}"
    return None


def output_problems(
    folder: Path, output: OutputEntry, index: FileIndex | None = None
) -> Iterator[str]:
    """Yield the problems of an output's size and header; read ``index`` if it is None."""
    if problem := size_problem(folder, output):
        yield problem
        return
    try:
        index = index or read_index(str(folder / output.path))
    except FormatError as error:
        yield error.reason
        return
    found = {tensor.meta.name: hashed(tensor.meta, {}) for tensor in index.tensors.values()}
    expected = {tensor.name: tensor for tensor in output.tensors}
    for name in sorted({*found, *expected}):
        want, got = _describe(expected.get(name)), _describe(found.get(name))
        if want != got:
            yield f"{name}: expected {want}, found {got}"


def _describe(tensor: TensorEntry | None) -> str:
    return "nothing" if tensor is None else f"{tensor.dtype} {tensor.shape}"


def find_unchanged(
    folder: Path,
    provenance: Provenance,
    stamps: KnownStamps,
    read_entries: ReadEntries,
    executor: Executor = InlineExecutor(),  # noqa: B008 - it has no state
    open_progress: OpenProgress = no_progress,
) -> dict[str, FileStamp]:
    """Return the outputs that are as they were written, with their stamps.

    Parameters
    ----------
    folder, provenance
        The folder of a set, and its provenance.
    stamps
        The stamp that each output had; None if it is not known.
    read_entries
        Returns the entries of outputs in the manifest.  It is called with those whose stamps have
        changed; every byte of these is read and compared with the hashes in the entry.
    executor, open_progress
        Reads them, and shows how far that is.
    """
    now = {name: stamp for name in stamps if (stamp := stamp_at(folder / name)) is not None}
    found = {name: stamp for name, stamp in now.items() if stamp == stamps[name]}
    unclear = [name for name in now if name not in found]
    if not unclear:
        return found
    with open_progress(sum(now[name].nbytes for name in unclear)) as on_progress:
        for output in read_entries(unclear):
            is_equal = _has_contents(folder, output, provenance, executor, on_progress)
            if is_equal and stamp_at(folder / output.path) == now[output.path]:
                found[output.path] = now[output.path]
    return found


def _has_contents(
    folder: Path,
    output: OutputEntry,
    provenance: Provenance,
    executor: Executor,
    on_progress: OnProgress,
) -> bool:
    """Return whether an output has the contents of its entry; reads every byte.

    An entry does not list the checksum of a file, so that is verified.
    """
    if size_problem(folder, output):
        return False
    try:
        index = read_index(str(folder / output.path))
    except FormatError:
        return False
    if any(output_problems(folder, output, index)):
        return False
    if provenance.crc not in (None, "crc_num" in index.attrs):
        return False
    tensors = index.tensors
    looks = [(one, executor.submit(hash_units, tensors[one.name])) for one in output.tensors]
    is_equal = True
    for one, hashes in looks:
        is_equal &= wait_result(hashes) == one.sha256
        on_progress(tensors[one.name].meta.nbytes)
    if is_equal and "crc_num" in index.attrs:
        is_equal = wait_result(executor.submit(verify_checksum, index)) is None
    return is_equal


def _files_of_others(rank: int, sample: str, ranks: Container[int]) -> list[str]:
    """Return existing files that are named like outputs, but are not outputs of ``ranks``.

    They are files of other ranks, or of these ranks in another format.  ``sample`` is the output of
    ``rank``, whose name the others resemble.
    """
    folder, suffix = Path(sample).parent.parent, Path(sample).suffix
    prefix = Path(sample).name.removesuffix(f"{rank}{suffix}")
    matches = (re.fullmatch(r"rank_(\d+)", path.name) for path in sorted(folder.glob("rank_*")))
    paths = (
        folder / match[0] / f"{prefix}{match[1]}{ending}"
        for match in matches
        for ending in map(suffix_of, FORMATS)
        if match is not None and (int(match[1]) not in ranks or ending != suffix)
    )
    return sorted(str(path) for path in paths if path.exists())


def stale_files(rank: int, sample: str, ranks: Container[int]) -> Diagnostic | None:
    """Return the warning about files that a loader would take for outputs of ``ranks``, or None.

    ``sample`` is the output of ``rank``, whose name such files resemble.
    """
    paths = _files_of_others(rank, sample, ranks)
    if not paths:
        return None
    message, them = f"{count(len(paths), 'file')} of another run", "them" if paths[1:] else "it"
    facts = f"{shorten(paths, 3)}; loaders would take {them} for this set"
    where = str(Path(sample).parent.parent)
    return Diagnostic("stale", message, hint=f"move {them} away", facts=facts, where=where)
