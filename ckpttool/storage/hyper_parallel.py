"""Reads a hyper-parallel checkpoint: which file holds which box of which tensor.

A folder has ``_rank3_.safetensors`` for every rank that saved tensors and one ``.metadata`` that
names the file of every box.  If the ranks saved without speaking to one another, each has a
metadata file of its own, ``.rank3_metadata`` or, later, ``3.metadata``.  What is no tensor lies in
``*.bytes``, layouts perhaps in ``*.layout``; neither is read.

Source
------
hyper-parallel ``hyper_parallel/core/checkpoint/``, revision fdd0a80 of 2026-03 (run with MindSpore
2.10 and torch 2.13), and ``core/distributed_checkpoint/`` of later in 2026 (read, not run).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ckpttool.errors import CkptToolError, FormatError, PlanError, raise_all
from ckpttool.formats.hyper_metadata import HyperTensor, StoredBox, read_hyper_metadata
from ckpttool.formats.reading import open_file
from ckpttool.model.catalog import FileIndex, SelfDescribedCatalog, StoredTensor
from ckpttool.model.described import Box, BoxSlicing, Description, fill_with_boxes, misfits
from ckpttool.model.notes import Note
from ckpttool.model.source import Listed, Source
from ckpttool.model.strategy import count, shorten
from ckpttool.storage.named import Faults, Files, read_named

TENSORS = re.compile(r"_rank(\d{1,9})_\.safetensors")
OF_A_RANK = re.compile(r"\.rank(\d{1,9})_metadata|(\d{1,9})\.metadata")
PICKLE = b"\x80"  # first byte of every pickle of protocol 2 and later


def scan_hyper_parallel(src: str, step: str | None) -> SelfDescribedCatalog | None:
    """The catalog of a hyper-parallel checkpoint; None if ``src`` is none.

    Parameters
    ----------
    src
        A folder.
    step
        A step that was asked for; these folders have but one save.

    Raises
    ------
    PlanError, FormatError, CombinedError
        A metadata file is damaged, not one of hyper-parallel's, or contradicts another.
    OSError
        A file cannot be read.
    """
    notes: list[Note] = []
    paths = _metadata_files(Path(src), notes)
    if not paths:
        return None
    if step is not None:
        raise PlanError([f"{src}: has one save, so --step {step} has nothing to choose from"])
    tensors, objects = _read_all(paths)
    if objects:
        text = f"passed over, being no tensors: {count(len(objects), 'object')}: "
        notes.append(Note("passed over", text + shorten(objects)))
    named = {box.file for tensor in tensors.values() for box in tensor.stored}
    _note_others(Path(src), named, notes)
    errors: list[FormatError] = []
    folder = _Folder(Path(src), read_named(Path(src), sorted(named), errors))
    description = replace(_place(tensors, folder, notes), files=tuple(map(str, paths)))
    return SelfDescribedCatalog(
        src,
        folder.by_rank(tensors),
        damaged=dict(enumerate(errors)),
        notes=tuple(notes),
        description=description,
    )


def _metadata_files(folder: Path, notes: list[Note]) -> list[Path]:
    """The metadata file, or those of the ranks, lowest first."""
    whole = folder / ".metadata"
    matches = {path: OF_A_RANK.fullmatch(path.name) for path in folder.iterdir()}
    of_ranks = {
        path: int(match[1] or match[2])
        for path, match in matches.items()
        if match is not None and _is_pickle(path)
    }
    if not _is_pickle(whole):
        return sorted(of_ranks, key=lambda path: (of_ranks[path], path.name))
    if of_ranks:
        names = shorten(sorted(path.name for path in of_ranks))
        notes.append(Note("passed over", f"{folder}: passed over beside .metadata: {names}"))
    return [whole]


def _is_pickle(path: Path) -> bool:
    if not path.is_file():
        return False
    with open_file(path) as file:
        return file.read(1) == PICKLE


def _read_all(paths: Sequence[Path]) -> tuple[dict[str, HyperTensor], tuple[str, ...]]:
    """What all metadata files say together; they have to agree on types and shapes."""
    tensors: dict[str, HyperTensor] = {}
    objects: dict[str, None] = {}
    problems: list[str] = []
    errors: list[CkptToolError] = []
    for path in paths:
        try:
            found, others = read_hyper_metadata(str(path))
        except CkptToolError as error:
            errors.append(error)
            continue
        objects |= dict.fromkeys(others)
        for name, tensor in found.items():
            known = tensors.setdefault(name, tensor)
            if known.meta != tensor.meta:
                problems.append(
                    f"{name}: {path} has {tensor.meta.dtype} {tensor.meta.shape}, others have "
                    f"{known.meta.dtype} {known.meta.shape}"
                )
            elif known is not tensor:
                stored = dict.fromkeys((*known.stored, *tensor.stored))
                tensors[name] = replace(known, stored=tuple(stored))
    if problems:
        errors.append(PlanError(problems))
    raise_all(errors)
    return tensors, tuple(objects)


def _note_others(folder: Path, named: set[str], notes: list[Note]) -> None:
    """Say which files of tensors and layouts there are that nothing names."""
    others = sorted(
        path.name
        for path in folder.iterdir()
        if path.name not in named and (path.suffix == ".layout" or TENSORS.fullmatch(path.name))
    )
    if others:
        text = f"{folder}: passed over, .metadata does not name them: {shorten(others)}"
        notes.append(Note("passed over", text))


class _Folder(NamedTuple):
    """The files that are named and there."""

    path: Path
    files: Files

    def find(self, name: str, box: StoredBox) -> Box | str:
        """Return a stored box of tensor ``name``, or why it is missing; "" if already reported."""
        file = self.files.get(box.file)
        if box.file not in self.files:
            return f"{self.path / box.file} is not there"
        if file is None:
            return ""
        if box.key not in file.tensors:
            return f"{file.path} does not hold what .metadata says"
        return Box(box.region, _rank_of(box.file), _named(name, file.tensors[box.key]))

    def by_rank(self, tensors: Mapping[str, HyperTensor]) -> dict[int, FileIndex]:
        """Return the headers by rank, with the tensors' names in place of the keys in the file.

        Of several boxes of one tensor the header has the first; `Description` has all of them.
        """
        own: dict[str, dict[str, str]] = defaultdict(dict)
        for name, tensor in tensors.items():
            for box in tensor.stored:
                own[box.file][box.key] = name
        found = {}
        for file, index in sorted(self.files.items(), key=lambda item: _rank_of(item[0])):
            if index is not None:
                renamed: dict[str, StoredTensor] = {}
                for key, held in index.tensors.items():
                    name = own[file].get(key, key)
                    renamed.setdefault(name, _named(name, held))
                found[_rank_of(file)] = replace(index, tensors=renamed)
        return found


def _named(name: str, held: StoredTensor) -> StoredTensor:
    """Return a stored tensor under the name that it has in the checkpoint, whatever its key is."""
    return replace(held, meta=replace(held.meta, name=name))


def _rank_of(file: str) -> int:
    match = TENSORS.fullmatch(file)
    if match is None:
        reason = "named by .metadata and not _rankN_.safetensors: which rank wrote it is not known"
        raise PlanError([f"{file}: {reason}"])
    return int(match[1])


def _place(tensors: Mapping[str, HyperTensor], folder: _Folder, notes: list[Note]) -> Description:
    """The boxes of all tensors, where ``.metadata`` says they are."""
    placed: dict[str, Source] = {}
    problems: list[str] = []
    faults = Faults()
    for name, tensor in tensors.items():
        found = [folder.find(name, box) for box in tensor.stored]
        boxes = [box for box in found if isinstance(box, Box)]
        said = [fault for fault in found if isinstance(fault, str)]
        wrong = misfits(tensor.meta, boxes)
        filled = wrong or fill_with_boxes(tensor.meta, boxes)
        if isinstance(filled, BoxSlicing):
            placed[name] = Source(tensor.meta, filled, Listed())
            faults.excuse(said)
        else:
            problems += wrong or ([] if said else filled)
            faults.blame(said, name)
    problems += faults.problems()
    notes += faults.notes()
    return Description((), placed, frozenset(tensors) - placed.keys(), tuple(problems))
