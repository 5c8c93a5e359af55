"""Evidence that a single file is of one of several ranks, so that its tensors may be slices.

The evidence is in the names around the file, or in a file beside it: equal names and shapes of
tensors, and other contents.  It is only a warning, since a user may name one file on purpose.
Functions return "" if nothing shows ranks.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from ckpttool.discovery.checkpoint2 import MINDFORMERS_FILE
from ckpttool.discovery.file_names import (
    NUMBER,
    RANK_IN_NAME,
    base_of,
    find_numbered,
    run_of,
    step_of,
)
from ckpttool.discovery.rank_folders import named_folders
from ckpttool.formats import read_indexes
from ckpttool.formats.local import exists, find_paths, list_readable
from ckpttool.lazy import compile_late
from ckpttool.model.manifest import MANIFEST
from ckpttool.model.tensors import FileIndex
from ckpttool.problems import CkptToolError
from ckpttool.secret import Secret
from ckpttool.wording import shorten

# Folders of ranks, devices and hosts, in the words of MindSpore and of its launch scripts.
_NUMBERED_PLACE = compile_late(
    r"(?i)(rank|node|ckpt|device|card|[gn]pu|host|server|worker|process|parallel|log)s?[._-]?\d"
)


def find_evidence(path: Path, files: Iterable[FileIndex], key: Secret | None) -> str:
    """Return the evidence that a file holds the tensors of one of several ranks, or ""."""
    return evidence_of_name(path) or "".join(_evidence_of_twin(file, key) for file in files)


def evidence_of_name(path: Path) -> str:
    """Return the evidence in the path of a file, and for a link in that of its target, or ""."""
    for candidate in dict.fromkeys((path.absolute(), path.resolve())):
        folder, siblings = _sibling_rank_folders(candidate)
        if siblings:
            return f"{folder} lies beside {shorten(siblings, 3)}"
        match = RANK_IN_NAME.search(candidate.name) or RANK_IN_NAME.fullmatch(candidate.parent.name)
        if match is not None and (match.string == candidate.name or int(match[1])):
            return f"{match.string} is a name of rank {int(match[1])}"
        numbered = MINDFORMERS_FILE.fullmatch(candidate.name)
        if numbered is not None and int(numbered["total"]) > 1:
            return f"{candidate.name} is a name of one of {int(numbered['total'])} files"
    return ""


def _sibling_rank_folders(file: Path) -> tuple[str, list[str]]:
    """Return the name of the rank folder that contains a file, and those of its siblings.

    Siblings are of the same kind: ``node1`` is not a sibling of ``ckpt_1``.  Siblings of the file's
    own folder always count.  Those of folders further up, and rank folders of other hosts
    (``10.0.0.1/rank_0``, ``10.0.0.2/rank_1``), must hold a file whose path differs only in numbers.
    """
    for depth in (1, 2):  # of the rank folders below the folder above: 2 in those of hosts
        for word, own, folder in named_folders(file.parents[:3]):
            if depth > len(folder.parents):
                continue  # it lies at the top of the file system
            above, place = folder.parents[depth - 1], _any_save(file.relative_to(folder))
            hosts = f"{_any_number(folder.parent.name)}/" if depth == 2 else ""
            siblings = [
                str(path.relative_to(above))
                for other, rank, path in named_folders(sorted(find_paths(above, f"{hosts}{word}*")))
                if other == word and path != folder and (depth == 1 or rank != own)
                if (depth == 1 and folder == file.parent) or any(find_paths(path, place))
            ]
            if siblings:
                return str(folder.relative_to(above)), siblings
    return "", []


def _evidence_of_twin(file: FileIndex, key: Secret | None) -> str:
    """Return the evidence that a file beside others holds the tensors of one rank, or "".

    The ranks of a stage are consecutive, and have tensors of the same names and shapes.  Files of
    equal contents are copies, and a file with a manifest of its own is a merged one.
    """
    path = Path(file.path)
    if not file.tensors or exists(path.with_name(f"{path.name}.{MANIFEST}")):
        return ""
    for candidate in dict.fromkeys((path.absolute(), path.resolve())):
        for name, siblings, twin in _find_twins(candidate):
            index = next(read_indexes([str(twin)], key))
            if isinstance(index, FileIndex) and _holds_other_slices(index, file):
                return f"{name} lies beside {shorten(siblings, 3)}, with the same names and shapes"
    return ""


def _find_twins(file: Path) -> Iterator[tuple[str, list[str], Path]]:
    """Yield the files of other ranks, as far as names show, that are like a file.

    Their names differ in one number that may be a rank.  So may the names of folders around them,
    after a word such as ``device``.  Where the rest of the path repeats the number, that of the
    other rank may be there.  Each file comes with the name that differs, and the names beside it.
    Only ranks at distances of powers of two are taken: along each axis of a device matrix, some of
    them hold another slice.
    """
    for depth, path in enumerate((file, *file.parents[:3])):
        if not (_NUMBERED_PLACE if depth else NUMBER).search(path.name):
            continue
        beside = [p.name for p in list_readable(path.parent)]
        for names in find_numbered([*beside, path.name], are_files=not depth):
            own = next((number for number, name in names.items() if name == path.name), None)
            if own is None:
                continue
            siblings = [name for _, name in sorted(names.items()) if name != path.name]
            steps = [1 << i for i in range(len(names).bit_length())]
            for other in (own + sign * step for step in steps for sign in (-1, 1)):
                if other in names:
                    folder, inside = path.with_name(names[other]), file.relative_to(path)
                    twins = _find_like(folder, inside, own, other) if depth else [folder]
                    yield from ((path.name, siblings, twin) for twin in twins)


def _find_like(folder: Path, inside: Path, own: int, other: int) -> Iterator[Path]:
    """Yield the files at the same place in a folder; ``own`` may be replaced by ``other`` in it.

    A file of the same step may have another counter.
    """

    def with_either(name: str) -> str:
        return "".join(
            f"0*(?:{own}|{other})" if part.isdecimal() and int(part) == own else re.escape(part)
            for part in re.split(r"(\d+)", name)
        )

    run, base = run_of(inside.name), base_of(inside.name)
    counter = r"(?:_[1-9]\d*)?" if step_of(inside.name) is not None else ""
    above = str(inside).removesuffix(inside.name)
    heads = "|".join(with_either(above + head) for head in sorted({run, base}))
    expression = re.compile(f"(?:{heads}){counter}{re.escape(inside.name[len(run) :])}")
    for path in sorted(find_paths(folder, _any_save(inside))):
        if expression.fullmatch(str(path.relative_to(folder))):
            yield path


def _any_number(path: Path | str) -> str:
    return re.sub(r"\d+", "*", glob.escape(str(path)))


def _any_save(file: Path) -> str:
    name = _any_number(file.name[len(run_of(file.name)) :])
    head = base_of(file.name) if step_of(file.name) is None else f"{base_of(file.name)}0"
    return f"{_any_number(file.parent)}/{_any_number(head)}{name}"


def _holds_other_slices(twin: FileIndex, file: FileIndex) -> bool:
    """Return whether a twin has tensors of the names and shapes of a file, and other contents.

    A twin that cannot be read, or that a training writes at this moment, shows nothing.
    """
    of_twin, of_file = (
        {tensor.meta.name: tensor.meta.shape for tensor in index.tensors.values()}
        for index in (twin, file)
    )
    if of_twin != of_file:
        return False
    from ckpttool.storage.sampling import sample  # loads NumPy, which few single files need

    for name, tensor in file.tensors.items():
        contents = sample(tensor)
        try:
            if sample(twin.tensors[name]) != contents:
                return True
        except (CkptToolError, OSError):
            return False
    return False
