"""Execute one plan in several independent runs, such as an array job of a batch system.

Every run makes the full plan and writes its part of the output files.  The files are distributed by
size, in the same way in every run.  A run that has completed its part leaves a record in the output
folder, ``.ckpttool-part-K-of-N.json``, which names its plan and the files that it wrote.
`finalize` checks that all parts are complete, writes ``ckpttool.json`` and removes the records.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path

from ckpttool.errors import CkptToolError, FormatError, PlanError, VerifyError, raise_all
from ckpttool.formats import FORMAT_NAMES, suffix_of
from ckpttool.model.diagnostics import Diagnostic
from ckpttool.model.manifest import JOURNAL, MANIFEST, Provenance, differences
from ckpttool.model.plan import Document, Plan
from ckpttool.model.wording import format_ranks, shorten
from ckpttool.storage.files import is_there, is_within, remove_document, write_document
from ckpttool.transaction.journal import (
    Part,
    active_writer,
    find_other_set,
    find_part_records,
    find_unfinished_run,
    has_text,
    journal_path,
    lock_set,
    part_record_path,
    remove_stale_part_records,
)
from ckpttool.transaction.manifest import (
    Manifest,
    ManifestFile,
    Written,
    entry_text,
    manifest_text,
    remedy_for,
    size_problems,
)


def files_of_others(rank: int, sample: str, ranks: Container[int]) -> list[str]:
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
        for ending in map(suffix_of, FORMAT_NAMES)
        if match is not None and (int(match[1]) not in ranks or ending != suffix)
    )
    return sorted(str(path) for path in paths if path.exists())


@dataclass(frozen=True, slots=True)
class PartRecord:
    """The record that the run of one part has left.

    Attributes
    ----------
    part, parts
        Number of the part, from 1 on, and number of all parts.
    files
        Number of outputs of all parts.
    file
        The file of the record; it has the outputs of the part with their tensors.
    provenance
        The plan, with its inputs and options.
    outputs
        The outputs of the part, without their tensors.
    documents
        Documents of the whole set, with paths relative to its folder.
    """

    part: int
    parts: int
    files: int
    file: ManifestFile
    provenance: Provenance
    outputs: tuple[Written, ...]
    documents: tuple[Document, ...]

    @classmethod
    def read(cls, path: Path, manifest: Path) -> PartRecord:
        """Return the record in a file; raise `FormatError` if it is not one."""
        file = ManifestFile.read(path)
        head = file.head
        part, parts, files = (head.number(name) for name in ("part", "parts", "files"))
        if path != part_record_path(manifest, part, parts):
            raise FormatError(str(path), None, f"is the record of part {part}/{parts}; renamed?")
        documents = head.objects("documents")
        return cls(
            part,
            parts,
            files,
            file,
            head.provenance(),
            file.manifest().outputs,
            tuple(Document(item.file("path"), item.data("data")) for item in documents),
        )


def ranks_of_part(plan: Plan, part: Part) -> tuple[int, ...]:
    """Return the ranks whose outputs belong to a part; there may be none.

    All parts have about the same number of bytes, and the result depends on nothing else.
    """
    ranks, sizes = list(plan.target.paths), plan.sizes
    numbers = balance([sizes[rank] for rank in ranks], part.count)
    return tuple(r for r, number in zip(ranks, numbers, strict=True) if number == part.number - 1)


def balance(sizes: Sequence[int], count: int) -> list[int]:
    """Assign each size to one of ``count`` parts, numbered from 0, with nearly equal sums.

    Each size, from the largest on, goes to the part with the smallest sum.  Ties go to the lowest
    number, so equal input has equal output.

    Examples
    --------
    >>> balance([5, 1, 4, 2], 2)
    [0, 0, 1, 1]
    """
    parts = [0] * len(sizes)
    sums = [(0, part) for part in range(count)]
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        nbytes, parts[i] = sums[0]
        heapq.heapreplace(sums, (nbytes + sizes[i], parts[i]))
    return parts


def finalize(folder: str) -> Manifest:
    """Mark an output folder, or a single file, complete, if all parts are complete.

    A set that is already marked is only checked.

    Raises
    ------
    FormatError
        A record or the manifest is damaged, or is another kind of file.
    PlanError
        Parts are missing, or do not have the same plan.
    VerifyError
        Outputs are missing, or their size has changed.
    """
    manifest = Path(f"{folder}.{MANIFEST}") if Path(folder).is_file() else Path(folder, MANIFEST)
    if by := active_writer(manifest):
        raise PlanError(
            [
                Diagnostic(
                    "busy", f"{folder}: a run is still writing to it ({by})", "wait until it ends"
                )
            ]
        )
    journal = journal_path(manifest)
    was_killed = manifest.exists() and journal.exists() and not has_text(journal)
    if not find_part_records(manifest) and not was_killed:
        unfinished = find_unfinished_run(Path(folder))
        if unfinished is not None:
            raise PlanError([unfinished])
        return _check_complete(folder, manifest)
    with lock_set(manifest):
        if find_part_records(manifest) and not _is_marked(manifest):
            _mark(folder, manifest)
        for path in (*find_part_records(manifest), *find_part_records(manifest, JOURNAL)):
            remove_document(str(path))
        remove_stale_part_records(manifest)
    return _check_complete(folder, manifest)


def _is_marked(manifest: Path) -> bool:
    """Return whether an interrupted `finalize` has already written the manifest of these records.

    Every run removes the manifest before it replaces an output, so a manifest that exists proves
    that the set is complete.  Some of the records may already be removed.
    """
    try:
        written = ManifestFile.read(manifest).head.entries
        heads = [
            PartRecord.read(path, manifest).provenance.head()
            for path in find_part_records(manifest)
        ]
    except (FileNotFoundError, CkptToolError):
        return False
    return all(written == head for head in heads)


def _mark(folder: str, manifest: Path) -> None:
    """Write the documents of a set and its manifest, from the records of all its parts."""
    records = _read_records(folder, manifest)
    outputs = heapq.merge(*(r.file.outputs() for r in records), key=attrgetter("rank"))
    for document in records[0].documents:
        write_document(str(manifest.parent / document.path), document.data)
    lines = (entry_text(output) for output in outputs)
    text = manifest_text(records[0].provenance.head(), lines)
    write_document(str(manifest), text, is_dated=True)


def _read_records(folder: str, manifest: Path) -> list[PartRecord]:
    """Return the records of all parts, after checking that they are complete and of one plan."""
    errors: list[CkptToolError] = []
    records = []
    for path in find_part_records(manifest):
        try:
            records.append(PartRecord.read(path, manifest))
        except FormatError as error:
            errors.append(_with_remedy(error, "run that part again, with --overwrite"))
    raise_all(errors)
    records.sort(key=lambda record: (record.parts, record.part))
    problems = list(_disagreements(folder, manifest, records))
    problems += Diagnostic.each(
        "parts",
        (
            f"{record.file.path}: {document.path!r} is not below its folder: a link leads out of it"
            for record in records
            for document in record.documents
            if not is_within(manifest.parent, document.path)
        ),
    )
    if problems:
        errors.append(PlanError(problems))
    wrong = [problem for record in records for problem in _part_problems(manifest.parent, record)]
    if wrong:
        errors.append(VerifyError(folder, wrong))
    raise_all(errors)
    return records


def _part_problems(folder: Path, record: PartRecord) -> Iterator[str]:
    """Yield the problems of a part's outputs, each with the remedy."""
    existing = [out for out in record.outputs if is_there(folder / out.path)]
    is_changed = any(size_problems(folder, existing))
    remedy = f"run part {record.part}/{record.parts} again, with "
    remedy += "--overwrite" if is_changed else "--resume"  # which refuses changed outputs
    yield from (f"{problem}; {remedy}" for problem in size_problems(folder, record.outputs))


def _with_remedy(error: FormatError, remedy: str) -> FormatError:
    return type(error)(error.path, error.offset, f"{error.reason}; {remedy}")


def _check_complete(folder: str, path: Path) -> Manifest:
    """Check the outputs of a set that is already marked complete, and return its manifest."""
    if not path.exists():
        reason = "no records of parts in it; a run with --part K/N leaves one when it is done"
        other = find_other_set(path.parent)
        if other is not None:
            reason = f"only records of parts of single files: name one of them, such as {other}"
        raise PlanError([Diagnostic("parts", f"{folder}: {reason}")])
    try:
        manifest = ManifestFile.read(path).manifest()
    except FormatError as error:
        raise _with_remedy(error, remedy_for(error)) from error
    wrong = list(_set_problems(path, manifest.outputs))
    if path.name != MANIFEST and path.name not in {
        f"{o.path}.{MANIFEST}" for o in manifest.outputs
    }:
        names = shorten((output.path for output in manifest.outputs), 3)
        text = f"{path.name} speaks of {names} and not of it; if it was renamed, give it and"
        wrong = [f"{text} {path.name} their old names again"]
    if wrong:
        raise VerifyError(folder, wrong)
    return replace(manifest, notes=tuple(_warn_of_others(path.parent, manifest.outputs)))


def _set_problems(path: Path, outputs: Sequence[Written]) -> Iterator[str]:
    """Yield the problems of the outputs of a complete set, each with the remedy."""
    for output in outputs:
        remedy = "the command that wrote the set, without --part, writes it again with --resume"
        if is_there(path.parent / output.path):
            remedy = "put a copy of it back, or write the set anew (--overwrite)"
        yield from (f"{problem}; {remedy}" for problem in size_problems(path.parent, [output]))


def _warn_of_others(folder: Path, outputs: Sequence[Written]) -> Iterator[Diagnostic]:
    """Yield a warning about files that readers would mistake for outputs of the set."""
    first = outputs[0] if outputs else None
    if first is None or Path(first.path).parent != Path(f"rank_{first.rank}"):
        return
    ranks = {output.rank for output in outputs}
    others = files_of_others(first.rank, str(folder / first.path), ranks)
    if others:
        text = f"{shorten(others, 3)}: not of this set, so left from another run"
        yield Diagnostic("stale", text, "it stays, and is taken for a part of it: move it away")


def _disagreements(
    folder: str, manifest: Path, records: Sequence[PartRecord]
) -> Iterator[Diagnostic]:
    """Yield the reasons why the records are not those of all parts of one plan."""
    counts = sorted({record.parts for record in records})
    if len(counts) > 1:
        paths = {record.parts: record.file.path for record in reversed(records)}
        ways = " and ".join(f"of {parts} parts (such as {paths[parts]})" for parts in counts)
        hint = "remove those that are not wanted"
        yield Diagnostic("parts", f"{folder}: records {ways}", hint)
        return
    numbers = {record.part for record in records}
    missing = [number for number in range(1, counts[0] + 1) if number not in numbers]
    if missing:
        named = f"{format_ranks(missing, 'part')} of {counts[0]}"
        named += f" {'is' if len(missing) == 1 else 'are'}"
        runs = shorten((f"--part {number}/{counts[0]}" for number in missing), 3)
        hint = f"run what is missing ({runs})"
        killed = [
            n for n in missing if has_text(journal_path(part_record_path(manifest, n, counts[0])))
        ]
        if killed:
            hint += (
                f"; {format_ranks(killed, 'part')} had begun, and --resume keeps what is complete"
            )
        yield Diagnostic("parts", f"{folder}: {named} not there", hint)
    plans: dict[Provenance, list[int]] = {}
    for record in records:
        plans.setdefault(record.provenance, []).append(record.part)
    if len(plans) > 1:
        groups = "; of another ".join(format_ranks(parts, "part") for parts in plans.values())
        text = f"{folder}: parts of different plans: of one {groups}"
        hint = "source, step and options have to be the same for all: run those again, with "
        hint += "--overwrite, that are not of the plan that is wanted"
        yield Diagnostic("parts", text, hint)
        (first, first_parts), *others = plans.items()
        for other, parts in others:
            for change in differences(other, first):
                text = f"{folder}: part {parts[0]} against part {first_parts[0]}: {change}"
                yield Diagnostic("parts", text)
    elif not missing and sum(len(record.outputs) for record in records) != records[0].files:
        text = f"{folder}: the records do not tell of all {records[0].files} outputs"
        yield Diagnostic("parts", text, "run all again")
