"""Check a set of outputs against its manifest: files, headers, and contents with ``deep``."""

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
from ckpttool.transaction.outputs import output_problems

MAX_IN_FLIGHT = 32
_WRITE_AGAIN = "the command that wrote the set, with --resume --overwrite"


class _PendingHash(NamedTuple):
    """A tensor that a worker is hashing, with its entry in the manifest."""

    path: str
    rank: int
    entry: TensorEntry
    nbytes: int
    hashes: Future[tuple[str, ...]]


def find_manifests(catalog: Catalog) -> list[Path]:
    """Return the manifests of folders and of single files that may list the scanned files."""
    paths = [Path(path) for path in _paths(catalog)]
    of_files = (path.with_name(f"{path.name}.{MANIFEST}") for path in paths)
    candidates = dict.fromkeys((*_folder_manifests(catalog), *of_files))
    return [path for path in candidates if is_file(path)]


def _folder_manifests(catalog: Catalog) -> Iterator[Path]:
    """Yield the manifest paths of the scanned folder, or of the folders above a single file."""
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
    """Return the paths of all scanned files, also of damaged ones."""
    paths = [path for file in catalog.files.values() for path in file.paths]
    return paths + [error.path for error in catalog.damaged.values()]


def _files_to_check(catalog: Catalog, path: Path) -> set[str] | None:
    """Return the absolute paths to check against a manifest; None for all that it lists."""
    if path.name != MANIFEST:
        return {_absolute(str(path).removesuffix(f".{MANIFEST}"))}
    return {_absolute(name) for name in _paths(catalog)} if _is_single(catalog) else None


def _absolute(name: str | Path) -> str:
    return os.path.abspath(name)  # noqa: PTH100 - a link keeps its name


def fingerprint(tensor: StoredTensor, hashes: Sequence[str]) -> bytes:
    """Return a digest that identifies a stored tensor together with its hashes."""
    return sha256(repr((tensor.file.path, tensor.meta.name, *hashes)).encode()).digest()[:16]


def check_manifest(
    catalog: Catalog,
    path: Path,
    executor: Executor,
    deep: bool,
    on_progress: OnProgress = lambda nbytes: None,
    verified: AbstractSet[bytes] = frozenset(),
) -> Iterator[Diagnostic]:
    """Yield the differences between a folder or a file and its manifest.

    Parameters
    ----------
    catalog
        The scanned files.
    path
        The manifest, from `find_manifests`.
    executor
        Reads the contents.
    deep
        Also compare hashes of the contents.
    on_progress
        Called with the number of bytes read.
    verified
        The `fingerprint` of tensors that were read before; these are not read again.
    """
    files = {_absolute(name): file for file in catalog.files.values() for name in file.paths}
    to_check: AbstractSet[str] | None = _files_to_check(catalog, path)
    as_given = {_absolute(name): name for name in _paths(catalog)}
    listed = set()
    pending: deque[_PendingHash] = deque()
    try:
        manifest = ManifestFile.read(path)
        for output in manifest.outputs():
            name = _absolute(path.parent / output.path)
            shown = as_given.get(name) or str(path.parent / output.path)
            listed.add(name)
            if to_check is not None and name not in to_check:
                continue
            if not is_file(name):
                hint = "the command that wrote the set, with --resume"
                yield _finding(shown, "listed in the manifest, and missing", hint, (output.rank,))
                continue
            problems = list(output_problems(path.parent, output, files.get(name)))
            for problem in problems:
                text = "not what its manifest lists"
                yield _finding(shown, text, _WRITE_AGAIN, (output.rank,), problem)
            if problems or not deep:
                continue
            index = files.get(name) or read_index(shown)
            for one in _submit_hashes(output, index, executor, verified):
                pending.append(one)
                while len(pending) > MAX_IN_FLIGHT:
                    yield from _check_hashes(pending.popleft(), on_progress)
        while pending:
            yield from _check_hashes(pending.popleft(), on_progress)
        for problem in manifest.strategy_problems() if to_check is None else ():
            yield _finding(path, problem)
    except FormatError as error:
        if error.path != str(path):  # of an output
            raise
        text = "the manifest cannot be read"
        yield _finding(path, text, remedy_for(error), facts=error.reason)
        return
    if to_check is None:
        to_check = files.keys()
    elif path.name == MANIFEST:  # its folder may hold other files
        return
    for name in sorted(to_check - listed):
        hint = "its old name, if it was renamed"
        yield _finding(as_given[name], "not listed in the manifest", hint)
    for name in sorted(listed - to_check) if path.name != MANIFEST else ():
        yield _finding(path, f"lists {os.path.relpath(name, path.parent)}, which is another file")


def _submit_hashes(
    output: OutputEntry, index: FileIndex, executor: Executor, verified: AbstractSet[bytes]
) -> Iterator[_PendingHash]:
    """Submit the hashing of an output's tensors that are not ``verified``."""
    for entry in output.tensors:
        tensor = index.tensors[entry.name]
        if fingerprint(tensor, entry.sha256) not in verified:
            hashes = executor.submit(hash_units, tensor)
            yield _PendingHash(tensor.file.path, output.rank, entry, tensor.meta.nbytes, hashes)


def _finding(
    path: str | Path,
    problem: str,
    hint: str = "",
    ranks: tuple[int, ...] = (),
    facts: str = "",
    tensor: str | None = None,
) -> Diagnostic:
    """Return the finding that an output, or a set, is not what its manifest lists."""
    path = str(path)
    return Diagnostic("manifest", problem, hint, (), facts, tensor, ranks, path, where=path)


def _check_hashes(pending: _PendingHash, on_progress: OnProgress) -> Iterator[Diagnostic]:
    """Wait for the hashes of a tensor, and yield a finding if the manifest lists others."""
    found, listed = wait_result(pending.hashes), pending.entry.sha256
    on_progress(pending.nbytes)
    if found == listed:
        return
    facts = f"expected {len(listed)} hashes, found {len(found)}"
    if len(listed) == len(found):
        pairs = enumerate(zip(listed, found, strict=True))
        first = next(i for i, (expected, hashed) in pairs if expected != hashed)
        where = f" (of stretch {first + 1} of {len(listed)})" if len(listed) > 1 else ""
        facts = f"expected SHA-256 {listed[first]}, found {found[first]}{where}"
    text = "changed since it was written"
    tensor = pending.entry.name
    yield _finding(pending.path, text, _WRITE_AGAIN, (pending.rank,), facts, tensor)
