"""The headers of the files that a checkpoint lists, and what is wrong with these files."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from ckpttool.formats import read_indexes
from ckpttool.formats.local import is_file
from ckpttool.model.tensors import FileIndex, StoredTensor
from ckpttool.problems import COPY_AGAIN, Diagnostic, FormatError
from ckpttool.secret import Secret
from ckpttool.wording import count, shorten

BARE_NAME = re.compile(r"(?!\.\.?$)[^/\0]+")  # in the same folder

FilesByName = Mapping[str, FileIndex | FormatError]


def read_files(
    paths: Mapping[int, str],
    key: Secret | None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[dict[int, FileIndex], dict[int, FormatError]]:
    """Return the headers of files by their number, and the errors of the others."""
    found = dict(zip(paths, read_indexes(paths.values(), key, on_progress), strict=True))
    files = {n: file for n, file in found.items() if isinstance(file, FileIndex)}
    return files, {n: error for n, error in found.items() if isinstance(error, FormatError)}


def read_existing_files(folder: Path, names: Iterable[str]) -> FilesByName:
    """Return the headers of those files that exist, or their errors."""
    there = [name for name in names if is_file(folder / name)]
    return dict(zip(there, read_indexes(str(folder / name) for name in there), strict=True))


def errors_of(files: FilesByName) -> dict[int, FormatError]:
    """Return the errors of damaged files for a catalog: a rank may have two, so not by rank."""
    return dict(enumerate(one for one in files.values() if isinstance(one, FormatError)))


class Fault(NamedTuple):
    """What is wrong with a file; ``reason`` is "" if the file has an error of its own."""

    path: str
    reason: str = ""


def find_tensor(
    folder: Path, files: FilesByName, file: str, name: str, document: str
) -> StoredTensor | Fault:
    """Return the tensor ``name`` in a file that ``document`` lists, or why it is not there."""
    index, path = files.get(file), str(folder / file)
    if index is None:
        return Fault(path, "file not found")
    if isinstance(index, FormatError):
        return Fault(path)
    return index.tensors.get(name) or Fault(path, f"lacks tensors that {document} lists")


def describe_faults(
    faults: Iterable[tuple[Fault, str]], *, are_harmless: bool
) -> Iterator[Diagnostic]:
    """Yield a problem for every fault because of which slices are missing, or notes on the others.

    Each fault has the tensor that lacks slices because of it, or "" if other files have these.
    """
    lacking: dict[Fault, dict[str, None]] = {}
    for fault, name in sorted(faults, key=lambda one: not one[1]):  # harm first, else in order
        lacking.setdefault(fault, {}).update({name: None} if name else {})
    for (path, reason), names in lacking.items():
        if not reason or bool(names) is are_harmless:
            continue
        if names:
            facts = f"{count(len(names), 'parameter')} ({shorten(names, 3)})"
            code, hint, facts = "missing", COPY_AGAIN, f"no other file has these slices of {facts}"
        else:
            code, hint, facts = "faulty_replica", "", "other files have the slices"
        yield Diagnostic(code, reason, hint=hint, facts=facts, path=path, where=path)
