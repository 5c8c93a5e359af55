"""Outputs compared with what a manifest or a log says of them, and files that neither lists."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from concurrent.futures import Executor
from pathlib import Path
from typing import TypeAlias

from msgspec.structs import replace

from ckpttool.concurrency import InlineExecutor, OnProgress, OpenProgress, no_progress, wait_result
from ckpttool.formats import FORMATS, read_index, suffix_of
from ckpttool.model.manifest import OutputEntry, Provenance
from ckpttool.model.tensors import FileIndex, FileStamp
from ckpttool.problems import Diagnostic, FormatError
from ckpttool.storage.checksums import verify_checksum
from ckpttool.storage.files import stamp_at
from ckpttool.storage.sampling import hash_units
from ckpttool.transaction.log import LoggedOutput
from ckpttool.transaction.sealed_files import Written
from ckpttool.wording import count, shorten

ReadEntries: TypeAlias = Callable[[Collection[str]], Iterable[OutputEntry]]
KnownStamps: TypeAlias = Mapping[str, "FileStamp | None"]
FindUnchanged: TypeAlias = Callable[[KnownStamps, ReadEntries], dict[str, FileStamp]]


def size_problem(folder: Path, output: Written | OutputEntry) -> str | None:
    """Return the problem of an output that is missing or has another size, else None."""
    try:
        nbytes = (folder / output.path).stat().st_size
    except FileNotFoundError:
        return "missing"
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
    metas = (tensor.meta for tensor in index.tensors.values())
    metas_there = {meta.name: f"{meta.dtype} {meta.shape}" for meta in metas}
    expected = {tensor.name: f"{tensor.dtype} {tensor.shape}" for tensor in output.tensors}
    for name in sorted({*metas_there, *expected}):
        want, got = (metas_of.get(name, "nothing") for metas_of in (expected, metas_there))
        if want != got:
            yield f"{name}: expected {want}, found {got}"


def find_unchanged(
    folder: Path,
    provenance: Provenance,
    stamps: KnownStamps,
    read_entries: ReadEntries,
    executor: Executor = InlineExecutor(),  # noqa: B008 - it is stateless
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
    unchanged = {name: stamp for name, stamp in now.items() if stamp == stamps[name]}
    unclear = [name for name in now if name not in unchanged]
    if not unclear:
        return unchanged
    with open_progress(sum(now[name].nbytes for name in unclear)) as on_progress:
        for output in read_entries(unclear):
            is_equal = _has_contents(folder, output, provenance, executor, on_progress)
            if is_equal and stamp_at(folder / output.path) == now[output.path]:
                unchanged[output.path] = now[output.path]
    return unchanged


def find_intact(
    folder: Path, provenance: Provenance, logged: Mapping[str, LoggedOutput]
) -> dict[str, LoggedOutput]:
    """Return the outputs that are as logs list them, in the same order, with their stamps now."""
    stamps = find_unchanged(
        folder,
        provenance,
        {name: output.stamp for name, output in logged.items()},
        lambda names: (logged[name].read_entry() for name in names),
    )
    return {n: replace(logged[n], stamp=stamps[n]) for n in logged if n in stamps}


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
    try:
        index = None if size_problem(folder, output) else read_index(str(folder / output.path))
    except FormatError:
        index = None
    if index is None or any(output_problems(folder, output, index)):
        return False
    if provenance.crc not in (None, "crc_num" in index.attrs):
        return False
    tensors = index.tensors
    looks = [(it, executor.submit(hash_units, tensors[it.name])) for it in output.tensors]
    is_equal = True
    for tensor, hashes in looks:
        is_equal &= wait_result(hashes) == tensor.sha256
        on_progress(tensors[tensor.name].meta.nbytes)
    if is_equal and "crc_num" in index.attrs:
        is_equal = wait_result(executor.submit(verify_checksum, index)) is None
    return is_equal


def _around_rank(names: Mapping[int, str]) -> tuple[str, str | None]:
    """Return what stands before and behind the number of the rank in names; None for equal names.

    In a single name it is the number behind ``rank_``, else the last one.

    Examples
    --------
    >>> _around_rank({0: "net_rank_0-1_10", 1: "net_rank_1-1_10"}), _around_rank({10: "net_10"})
    (('net_rank_', '-1_10'), ('net_', ''))
    """
    name = next(iter(names.values()))
    places = [(name[: match.start()], name[match.end() :]) for match in re.finditer(r"\d+", name)]
    places.sort(key=lambda place: (not place[0].endswith("rank_"), len(place[1])))
    for head, tail in places:
        if all(file_name == f"{head}{number}{tail}" for number, file_name in names.items()):
            return head, tail
    return name, None


def stale_files(
    outputs: Mapping[int, str],
    ranks: Container[int],
    removed: Container[str] = (),
    older: Collection[str] = (),
) -> Iterator[Diagnostic]:
    """Yield a warning about files that a loader would take for outputs of ``ranks``.

    They are files of other ranks, or of these ranks in another format.  ``outputs`` has the paths
    of some of these ranks: all have equal names, or names with the number of the rank in one place.
    Files that are ``removed`` with an older set do not count, ``older`` outputs that stay do.
    """
    (rank, sample), *_ = outputs.items()
    folder, suffix = Path(sample).parent.parent, Path(sample).suffix
    stems = {rank: Path(path.removesuffix(suffix)) for rank, path in outputs.items()}
    head, tail = _around_rank({rank: stem.name for rank, stem in stems.items()})
    for match in (re.fullmatch(r"rank_(\d+)", path.name) for path in folder.glob("rank_*")):
        if match is not None:
            name = stems[rank].name if tail is None else f"{head}{int(match[1])}{tail}"
            stems.setdefault(int(match[1]), folder / match[0] / name)
    candidates = (
        f"{stem}{ending}"
        for number, stem in stems.items()
        for ending in map(suffix_of, FORMATS)
        if number not in ranks or ending != suffix
    )
    there = (path for path in candidates if path not in removed and Path(path).exists())
    paths = sorted({*there, *older})
    if not paths:
        return
    message, them = f"{count(len(paths), 'file')} of another run", "them" if paths[1:] else "it"
    facts = f"{shorten(paths, 3)}; loaders would take {them} for this set"
    hint, where = f"move {them} away", str(folder)
    yield Diagnostic("stale", message, hint=hint, facts=facts, where=where)
