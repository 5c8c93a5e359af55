"""Merged checkpoints in several files, compared with their index.

Its folder has an index file (`ckpttool.formats.weight_index`), or just one ``model.safetensors``.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from shlex import quote

from msgspec.structs import replace

from ckpttool.discovery.file_names import NUMBER
from ckpttool.discovery.ignored import describe_ignored
from ckpttool.discovery.rank_folders import is_checkpoint_file, named_folders
from ckpttool.discovery.self_described import left_of, read_files, read_single
from ckpttool.formats import format_of_suffix
from ckpttool.formats.local import is_file, is_folder, list_folder, list_readable
from ckpttool.formats.weight_index import (
    COMMON_STEM,
    MAP_NAME,
    SINGLE_FILE,
    WeightIndex,
    is_index_name,
    is_inside,
    read_index_file,
)
from ckpttool.lazy import compile_late
from ckpttool.model.catalog import Catalog
from ckpttool.model.tensors import CutShortError, FileIndex, Remains, StoredTensor
from ckpttool.problems import Diagnostic, Diagnostics, FormatError, PlanError
from ckpttool.secret import Secret
from ckpttool.wording import count, shorten

_SHARD_FILE = compile_late(r"(part\d+|[\w.-]*model-\d{5}-of-\d{5}|hyper_param)\.\w+")


def scan_indexed(src: str, key: Secret | None = None) -> Catalog | None:
    """Return the catalog of a merged checkpoint in a folder; None if ``src`` is something else.

    ``src`` is the folder, or an index file in it.  Files are numbered from 0 in the order of their
    names; numbers in names compare as numbers.  The file that goes to every rank is the last.
    Contradictions between an index and the files are in ``Catalog.diagnostics``.
    """
    root = Path(src)
    if is_file(root) and is_index_name(root.name):
        return _read_catalog(src, root.parent, [read_index_file(src)], key)
    if not is_folder(root):
        return None
    inside = list_folder(root)
    indexes = [read_index_file(str(p)) for p in inside if is_index_name(p.name) and is_file(p)]
    files = [*filter(is_checkpoint_file, inside)]
    ranks = [folder.path.name for folder in named_folders(inside)]
    if not indexes:
        if [path.name for path in files] == [SINGLE_FILE] and not ranks:
            read, damaged = read_single(str(files[0]), key)
            return Catalog(src, read, damaged=damaged, is_merged=True)
        if files and not ranks and all(_SHARD_FILE.fullmatch(path.name) for path in files):
            names = shorten((path.name for path in files), 3)
            message = "parts of a checkpoint without their index, so some may be missing"
            facts = f"{names}; expected {MAP_NAME} or model.safetensors.index.json"
            hint = "copy the index again, or write the parts again"
            lost = Diagnostic("missing", message, hint=hint, facts=facts, where=src)
            read, damaged = read_files({n: str(path) for n, path in enumerate(files)}, key)
            of_index = (lost,) if read else ()  # files that cannot be read may not need one
            return Catalog(src, read, damaged=damaged, diagnostics=of_index, is_merged=True)
        return None
    named, first = shorten(Path(index.path).name for index in indexes), quote(indexes[0].path)
    if ranks:
        hint = f"{first} as SRC, or --pattern {quote(NUMBER.sub('{rank}', ranks[0]) + '/*')}"
        message = "two checkpoints: an index and rank folders"
        facts = f"{named}; {shorten(ranks, 3)}"
        raise PlanError([Diagnostic("source", message, hint=hint, facts=facts, where=src)])
    if any(index.files != indexes[0].files for index in indexes):
        message = "index files that contradict each other"
        hint = f"{first} as SRC, or another of them"
        raise PlanError([Diagnostic("source", message, hint=hint, facts=named, where=src)])
    return _read_catalog(src, root, indexes, key)


def note_index(path: Path, diagnostics: Diagnostics) -> None:
    """Note if the folder of a single file has an index, which names further files."""
    beside = list_readable(path.absolute().parent)
    indexes = [other.name for other in beside if is_index_name(other.name)]
    if indexes:
        message = "read as a checkpoint of one file"
        facts = f"{indexes[0]} beside it lists other files, too"
        hint = f"{path.parent / indexes[0]} as SRC, to read them all"
        diagnostics.add(Diagnostic("skipped", message, hint=hint, facts=facts, where=str(path)))


def _read_catalog(src: str, root: Path, indexes: list[WeightIndex], key: Secret | None) -> Catalog:
    """Return the catalog of the files that indexes name; all indexes name the same."""
    index = indexes[0]
    named: dict[str, list[str]] = defaultdict(list)
    for name, file in index.files.items():
        named[file].append(name)
    findings = []
    for file in named:
        if not is_inside(file):
            message = f"{file!r} is not below the folder of the index"
            findings.append(Diagnostic("damaged", message, path=index.path, where=index.path))
    for suffix in sorted({Path(file).suffix for file in named}):
        if is_file(root / (COMMON_STEM + suffix)):
            named.setdefault(COMMON_STEM + suffix, [])
    inside = sorted(filter(is_inside, named), key=_sort_key)
    there = [file for file in inside if is_file(root / file)]
    for file in (file for file in inside if file not in there):
        facts = f"{index.path} lists {_format_tensors(named[file])} in it"
        findings.append(_of_file(root / file, "missing", "the file is missing", facts))
    files, damaged = read_files({n: str(root / at) for n, at in enumerate(there)}, key)
    damaged = {n: _know_listed(e, there[n], named[there[n]]) for n, e in damaged.items()}
    by_name = {there[n]: file for n, file in files.items()}
    copies = _copies(index, by_name)
    findings += _contradictions(index, named, by_name, copies)
    files = {
        number: replace(
            file, tensors={n: t for n, t in file.tensors.items() if t not in copies.get(n, ())}
        )
        for number, file in files.items()
    }
    left = {n: rest for n, error in damaged.items() if (rest := left_of(error)) is not None}
    is_partial = bool(damaged or findings)
    findings += _index_notes(root, indexes, named, files.values(), is_partial)
    return Catalog(
        src,
        files,
        is_merged=True,
        damaged=damaged,
        documents=tuple(index.file for index in indexes),
        common_tensors={
            name: name in index.files
            for number, file in (*files.items(), *left.items())
            if Path(there[number]).stem == COMMON_STEM
            for name in file.tensors
        },
        copies=copies,
        diagnostics=tuple(findings),
    )


def _know_listed(error: FormatError, file: str, listed: Collection[str]) -> FormatError:
    """Return the error of a file; if it is cut short, with all tensors that an index lists in it.

    The tensors of the file that goes to every rank are listed only in its own header.
    """
    if not isinstance(error, CutShortError):
        return error
    if Path(file).stem == COMMON_STEM:
        return error if error.remains.are_all_known else FormatError(*error.args[:5])
    left, lost = error.remains.index, error.remains.lost
    tensors = {name: left.tensors[name] for name in listed if name in left.tensors}
    known = {name: lost.get(name) for name in listed if name not in tensors}
    remains = Remains(replace(left, tensors=tensors), known, are_all_known=True)
    return error.knowing(remains)


def _sort_key(file: str) -> tuple[bool, list[tuple[int, str]]]:
    words = re.split(r"(\d+)", file)
    for i in range(1, len(words), 2):
        words[i] = words[i].lstrip("0")
    return Path(file).stem == COMMON_STEM, [(len(w) * (i % 2), w) for i, w in enumerate(words)]


def _contradictions(
    index: WeightIndex,
    named: Mapping[str, list[str]],
    by_name: Mapping[str, FileIndex],
    copies: Collection[str],
) -> Iterator[Diagnostic]:
    for at, file in by_name.items():
        lost = [name for name in named[at] if name not in file.tensors]
        if lost:
            facts = f"{_format_tensors(lost)}; listed in {index.path}"
            yield _of_file(file.path, "missing", "the file lacks tensors", facts)
        moved = [name for name in file.tensors if index.files.get(name, at) != at]
        moved = [name for name in moved if name not in copies]
        if moved:
            there = shorten(sorted({index.files[name] for name in moved}), 3)
            message = "the file holds tensors that the index lists in other files"
            facts = f"{_format_tensors(moved)}; by {index.path} in {there}"
            yield _of_file(file.path, "damaged", message, facts)
        unknown = [name for name in file.tensors if name not in index.files]
        if unknown and Path(at).stem != COMMON_STEM:
            message = "the file holds tensors that are not in the index"
            facts = f"{_format_tensors(unknown)}; the index is {index.path}"
            yield _of_file(file.path, "damaged", message, facts)


def _copies(
    index: WeightIndex, by_name: Mapping[str, FileIndex]
) -> dict[str, tuple[StoredTensor, ...]]:
    copies: dict[str, tuple[StoredTensor, ...]] = {}
    for at, file in by_name.items():
        for name, tensor in file.tensors.items():
            named = index.files.get(name, at)
            if named != at and named in by_name and name in by_name[named].header:
                copies[name] = (*copies.get(name, ()), tensor)
    return copies


def _of_file(path: str | Path, code: str, message: str, facts: str) -> Diagnostic:
    hint = "copy the file again, or write the checkpoint again"
    return Diagnostic(code, message, hint=hint, facts=facts, path=str(path), where=str(path))


def _format_tensors(names: list[str]) -> str:
    return f"{count(len(names), 'tensor')} ({shorten(names, 3)})"


def _index_notes(
    root: Path,
    indexes: Iterable[WeightIndex],
    named: Mapping[str, list[str]],
    files: Iterable[FileIndex],
    is_partial: bool,
) -> Iterator[Diagnostic]:
    unnamed = [
        path.name
        for path in list_folder(root)
        if format_of_suffix(path.name) is not None and path.name not in named
    ]
    yield from describe_ignored(root, unnamed, "not in the index")
    tensors = {name: tensor.meta for file in files for name, tensor in file.tensors.items()}
    for index in indexes:
        total = sum(meta.nbytes for name, meta in tensors.items() if name in index.files)
        if index.total_size not in (None, total) and not is_partial:
            facts = f"expected {total} bytes, found {index.total_size}; every tensor is complete"
            yield Diagnostic("doubt", "total_size is wrong", facts=facts, where=index.path)
