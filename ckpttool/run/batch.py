"""One plan carried out by several runs, each on its own: a batch system's array job.

Every run makes the whole plan and takes its part of the output files, which are dealt by size and
always in the same way.  When all of its part is there it leaves a record in the output folder,
``.ckpttool-part-K-of-N.json``, which tells the files that it wrote and of which plan they are.
`commit` looks whether everything is there and says so in ``ckpttool.json``; the records go.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ckpttool import __version__
from ckpttool.errors import CkptToolError, FormatError, PlanError, VerifyError, raise_all
from ckpttool.model.catalog import format_ranks
from ckpttool.model.notes import Note
from ckpttool.model.parts import balance
from ckpttool.model.plan import Document, Plan, PlanPart
from ckpttool.model.strategy import count
from ckpttool.run.manifest import (
    NAME,
    Entries,
    Manifest,
    Written,
    document_text,
    output_problems,
    read_manifest,
)
from ckpttool.run.partial import remove_document, write_document
from ckpttool.run.places import output_folder


@dataclass(frozen=True, slots=True)
class Record:
    """What one run has left; all paths are counted from the folder."""

    part: int
    parts: int
    files: int
    plan: str
    step: str | None
    outputs: tuple[Written, ...]
    documents: tuple[Document, ...]

    @classmethod
    def read(cls, path: Path) -> Record:
        """The record in a file; raises `FormatError` if it is none."""
        entries = Entries.read(path)
        part, parts, files = (entries.number(name) for name in ("part", "parts", "files"))
        if path.name != _record_name(part, parts):
            raise FormatError(str(path), None, f"is the record of part {part}/{parts}; renamed?")
        documents = entries.objects("documents")
        return cls(
            part,
            parts,
            files,
            entries.text("plan"),
            entries.step(),
            entries.outputs(),
            tuple(Document(item.file("path"), item.text("text")) for item in documents),
        )


def _record_name(part: int, parts: int) -> str:
    return f".ckpttool-part-{part}-of-{parts}.json"


def take_part(plan: Plan, number: int, parts: int) -> Plan:
    """A plan of the outputs that fall to run ``number``, from 1 on, of ``parts`` runs.

    It has as many bytes as the others, as far as whole files allow; it may have none.
    """
    paths = plan.target.paths
    sizes = [sum(meta.nbytes for meta in output.metas) for output in plan]
    dealt = balance(sizes, parts)
    mine = {
        rank: path
        for (rank, path), part in zip(paths.items(), dealt, strict=True)
        if part == number - 1
    }
    notes = plan.notes
    if not mine:
        text = f"part {number}/{parts} has nothing to write: {count(len(paths), 'output file')}"
        notes = (*notes, Note("part", f"{text} among {parts} parts"))
    folder = output_folder(plan.target)
    part = PlanPart(number, parts, len(paths), _digest(plan), folder, plan.documents)
    target = replace(plan.target, paths=mine)
    return replace(plan, target=target, notes=notes, documents=(), part=part)


def _digest(plan: Plan) -> str:
    """Equal for plans that read the same files, and write the same to the same names.

    Where source and output folder are is left out: hosts may have mounted them elsewhere.
    """
    catalog, target = plan.catalog, plan.target
    folder = output_folder(target)
    state = hashlib.sha256()
    for line in (
        (__version__, catalog.step, target.format, target.ranks, sorted(target.attrs.items())),
        *((rank, os.path.relpath(path, folder)) for rank, path in target.paths.items()),
        *(_look_at(path, catalog.root) for file in catalog.files.values() for path in file.paths),
        *(
            (source.meta, source.sharing, source.follows, source.turn, transfer.layouts)
            for transfer in plan.transfers
            for source in [transfer.source]
        ),
    ):
        state.update(f"{line!r}\n".encode())
    return f"sha256:{state.hexdigest()}"


def _look_at(path: str, root: str) -> tuple[str, int, int]:
    """A source file's name, size and time of change: one that was saved anew is another."""
    found = os.stat(path)  # noqa: PTH116
    return os.path.relpath(path, root), found.st_size, found.st_mtime_ns


def begin_part(part: PlanPart) -> None:
    """Remove what says that this part, or all of them, are there."""
    folder = Path(part.folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name in (NAME, _record_name(part.number, part.count)):
        remove_document(str(folder / name))
    for document in part.documents:
        remove_document(document.path)


def end_part(part: PlanPart, step: str | None, written: Iterable[Written]) -> None:
    """Write the record of a part of which all outputs are there."""
    folder = Path(part.folder)
    record = Record(
        part.number,
        part.count,
        part.files,
        part.digest,
        step,
        tuple(replace(out, path=os.path.relpath(out.path, folder)) for out in written),
        tuple(replace(doc, path=os.path.relpath(doc.path, folder)) for doc in part.documents),
    )
    path = folder / _record_name(part.number, part.count)
    write_document(str(path), document_text(asdict(record)))


def commit(folder: str) -> Manifest:
    """Mark an output folder complete, if the parts of all runs are there.

    A folder that is marked already is looked at again.

    Raises
    ------
    FormatError
        A record is none.
    PlanError
        Parts are missing, or not of one plan.
    VerifyError
        Outputs are missing, or have another size than when they were written.
    """
    place = Path(folder)
    paths = [p for p in place.iterdir() if re.fullmatch(r"\.ckpttool-part-.*\.json", p.name)]
    if not paths:
        return _look_again(place)
    errors: list[CkptToolError] = []
    records = []
    for path in sorted(paths):
        try:
            records.append(Record.read(path))
        except CkptToolError as error:
            errors.append(error)
    raise_all(errors)
    records.sort(key=lambda record: (record.parts, record.part))
    problems = list(_disagreements(folder, records))
    if problems:
        errors.append(PlanError(problems))
    wrong = [
        f"{problem}; run part {record.part}/{record.parts} again"
        for record in records
        for problem in output_problems(place, record.outputs)
    ]
    if wrong:
        errors.append(VerifyError(folder, wrong))
    raise_all(errors)
    outputs = sorted((out for r in records for out in r.outputs), key=lambda out: out.rank)
    manifest = Manifest(records[0].plan, records[0].step, tuple(outputs))
    for document in records[0].documents:
        write_document(str(place / document.path), document.text)
    write_document(str(place / NAME), manifest.text())
    for path in paths:
        remove_document(str(path))
    return manifest


def _look_again(place: Path) -> Manifest:
    path = place / NAME
    if not path.exists():
        reason = "no records of parts in it; a run with --part K/N leaves one when it is done"
        raise PlanError([f"{place}: {reason}"])
    manifest = read_manifest(path)
    wrong = list(output_problems(place, manifest.outputs))
    if wrong:
        raise VerifyError(str(place), wrong)
    return manifest


def _disagreements(folder: str, records: Sequence[Record]) -> Iterator[str]:
    """What keeps records from being those of one plan, all of it."""
    counts = sorted({record.parts for record in records})
    if len(counts) > 1:
        ways = " and ".join(f"of {parts} parts" for parts in counts)
        example = _record_name(1, counts[0])
        yield f"{folder}: records {ways}; remove those that are not wanted (such as {example})"
        return
    numbers = {record.part for record in records}
    missing = [number for number in range(1, counts[0] + 1) if number not in numbers]
    if missing:
        named = f"{format_ranks(missing, 'part')} of {counts[0]}"
        yield f"{folder}: {named} not there; run what is missing (--part {missing[0]}/{counts[0]})"
    plans: dict[str, list[int]] = {}
    for record in records:
        plans.setdefault(record.plan, []).append(record.part)
    if len(plans) > 1:
        groups = "; of another ".join(format_ranks(parts, "part") for parts in plans.values())
        text = f"{folder}: parts of different plans: of one {groups}"
        yield f"{text}; source, step and options have to be the same for all"
    elif not missing and sum(len(record.outputs) for record in records) != records[0].files:
        yield f"{folder}: the records do not tell of all {records[0].files} outputs; run all again"
