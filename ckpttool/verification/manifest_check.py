"""Holds a set of outputs against its manifest: files and headers, with ``deep`` contents."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Executor, Future
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from ckpttool.concurrency import OnProgress, wait_result
from ckpttool.discovery.rank_folders import RANK_FOLDER
from ckpttool.errors import FormatError
from ckpttool.formats import read_index
from ckpttool.formats.local import is_file, is_folder
from ckpttool.model.catalog import Catalog, MergedCatalog
from ckpttool.model.diagnostics import Diagnostic
from ckpttool.model.manifest import MANIFEST, OutputEntry, TensorEntry
from ckpttool.model.tensors import FileIndex, StoredTensor
from ckpttool.storage.sampling import hash_units
from ckpttool.transaction.manifest import ManifestFile, remedy_for

MAX_IN_FLIGHT = 32


class _Look(NamedTuple):
    """A tensor that is being hashed."""

    output: str
    rank: int
    wanted: TensorEntry
    nbytes: int
    hashes: Future[tuple[str, ...]]


def find_manifests(catalog: Catalog) -> list[Path]:
    """The manifests that may speak of what was scanned: of folders, and of single files."""
    paths = [Path(path) for path in _paths(catalog)]
    places = [*_folders(catalog), *(path.with_name(f"{path.name}.{MANIFEST}") for path in paths)]
    return [path for path in dict.fromkeys(places) if is_file(path)]


def _folders(catalog: Catalog) -> Iterator[Path]:
    """Manifests of the folder that was scanned, or of those that a single file may be listed in."""
    root = Path(catalog.root)
    if is_folder(root):
        yield root / MANIFEST
        return
    folder = root.absolute().parent
    yield root.parent / MANIFEST
    if _is_single(catalog) and RANK_FOLDER.fullmatch(folder.name):
        yield folder.parent / MANIFEST


def _is_single(catalog: Catalog) -> bool:
    is_merged = isinstance(catalog, MergedCatalog) and not catalog.indexes
    return is_merged and not is_folder(catalog.root)


def _paths(catalog: Catalog) -> list[str]:
    """The files that were scanned, those that are damaged, too."""
    paths = [path for file in catalog.files.values() for path in file.paths]
    return paths + [error.path for error in catalog.damaged.values()]


def _subject(catalog: Catalog, path: Path) -> set[str] | None:
    """The files that a manifest is asked about, by absolute paths; None if about all in it."""
    if path.name != MANIFEST:
        return {_absolute(str(path).removesuffix(f".{MANIFEST}"))}
    return {_absolute(name) for name in _paths(catalog)} if _is_single(catalog) else None


def _absolute(name: str | Path) -> str:
    return os.path.abspath(name)  # noqa: PTH100 - a link keeps its name


def fingerprint(tensor: StoredTensor, hashes: Sequence[str]) -> bytes:
    """What tells that a stored tensor has been read, and has these hashes."""
    return sha256(repr((tensor.file.path, tensor.meta.name, *hashes)).encode()).digest()[:16]


def check_manifest(
    catalog: Catalog,
    path: Path,
    executor: Executor,
    deep: bool,
    on_progress: OnProgress = lambda nbytes: None,
    seen: AbstractSet[bytes] = frozenset(),
) -> Iterator[Diagnostic]:
    """What is in a folder, or in a file, and is not what its manifest says.

    Parameters
    ----------
    catalog
        What was scanned.
    path
        One of `find_manifests`.
    executor
        Does the reading.
    deep
        Hash the contents, too.
    on_progress
        Called with bytes that were read.
    seen
        The `fingerprint` of tensors that were read already; the others are read here.
    """
    files = {_absolute(name): file for file in catalog.files.values() for name in file.paths}
    subject: AbstractSet[str] | None = _subject(catalog, path)
    listed = set()
    rest: deque[_Look] = deque()
    try:
        manifest = ManifestFile.read(path)
        for output in manifest.outputs():
            name = _absolute(path.parent / output.path)
            listed.add(name)
            if subject is not None and name not in subject:
                continue
            problems = list(manifest.output_problems(output, files.get(name)))
            yield from (_finding(path, problem, output.rank) for problem in problems)
            if problems or not deep:
                continue
            index = files.get(name) or read_index(name)
            for look in _looks(output, index, executor, seen):
                rest.append(look)
                while len(rest) > MAX_IN_FLIGHT:
                    yield from _collect(path, rest.popleft(), on_progress)
        while rest:
            yield from _collect(path, rest.popleft(), on_progress)
        for problem in manifest.strategy_problems() if subject is None else ():
            yield _finding(path, problem)
    except FormatError as error:
        yield Diagnostic(
            "manifest", f"{path}: cannot be held against it: {error}; {remedy_for(error)}"
        )
        return
    if subject is None:
        subject = files.keys()
    elif path.name == MANIFEST:  # of a folder, which may hold other files beside the set
        return
    for name in sorted(subject - listed):
        text = (
            "is not in it, so it is of another run; if it was renamed, give it its old name again"
        )
        yield _finding(path, f"{_shown(name, path)}: {text}")
    for name in sorted(listed - subject) if path.name != MANIFEST else ():
        yield _finding(path, f"it speaks of {_shown(name, path)}, which is another file")


def _looks(
    output: OutputEntry, index: FileIndex, executor: Executor, seen: AbstractSet[bytes]
) -> Iterator[_Look]:
    """Has the tensors of an output hashed, but for those that were read already."""
    for wanted in output.tensors:
        tensor = index.tensors[wanted.name]
        if fingerprint(tensor, wanted.sha256) not in seen:
            hashes = executor.submit(hash_units, tensor)
            yield _Look(output.path, output.rank, wanted, tensor.meta.nbytes, hashes)


def _shown(name: str, path: Path) -> str:
    return os.path.relpath(name, path.parent)


def _finding(path: Path, problem: str, rank: int | None = None) -> Diagnostic:
    ranks = () if rank is None else (rank,)
    return Diagnostic("manifest", f"{path}: {problem}", ranks=ranks)


def _collect(path: Path, look: _Look, on_progress: OnProgress) -> Iterator[Diagnostic]:
    """A finding if a tensor's hashes are not those that are listed."""
    found, wanted = wait_result(look.hashes), look.wanted.sha256
    on_progress(look.nbytes)
    if found == wanted:
        return
    at = next((i for i, pair in enumerate(zip(wanted, found)) if pair[0] != pair[1]), None)  # noqa: B905
    text = f"{look.output}: {look.wanted.name}: its content is not what was written"
    if at is None or len(wanted) != len(found):
        text += f": expected {len(wanted)} hashes, found {len(found)}"
    else:
        where = f" (of stretch {at + 1} of {len(wanted)})" if len(wanted) > 1 else ""
        text += f": expected SHA-256 {wanted[at]}, found {found[at]}{where}"
    yield Diagnostic("manifest", f"{path}: {text}", tensor=look.wanted.name, ranks=(look.rank,))
