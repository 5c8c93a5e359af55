"""The journal of a run: lock, log of outputs, and what it becomes: the manifest or a part's record.

A journal lies beside the document that it becomes, under the same name and ``.journal``.  Each line
ends with a checksum: a last line that a power loss cut short is dropped, any other damaged line is
an error.

======================  =======================================================================
first line              the run: its provenance, process and host
``{"begun": ...}``      an output is about to be written to ``NAME.partial``
``{"complete": ...}``   the output is on disk, with its hashes, and is about to be renamed
``{"placed": ...}``     the output has its name; size, times and inode identify the file
``{"left": ...}``       an output of an earlier run that did not end and was not resumed
======================  =======================================================================

A run that is killed leaves its journal.  The same command with ``--resume`` keeps the outputs whose
size, times and inode still match, and those whose contents match their hashes.  A finished set
whose outputs are gone becomes a journal again.

The journal of a set is also its lock: a whole run holds it exclusively, the runs of parts share it
and each holds its own journal exclusively.
"""

from __future__ import annotations

import glob
import json
import os
import re
import socket
import time
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from zlib import crc32

from ckpttool.errors import CkptToolError, FormatError, PlanError, VerifyError
from ckpttool.formats.local import open_file
from ckpttool.model.diagnostics import Diagnostic
from ckpttool.model.manifest import (
    JOURNAL,
    MANIFEST,
    PART_RECORD,
    OutputEntry,
    Provenance,
    differences,
)
from ckpttool.model.plan import Document, Plan
from ckpttool.model.tensors import FileStamp
from ckpttool.model.wording import count, shorten
from ckpttool.storage.files import (
    PARTIAL,
    TakenError,
    is_open_as,
    is_there,
    lock,
    lock_holder,
    make_folder,
    name_lock_holder,
    remove_document,
    remove_stale,
    stamp_at,
    sync_folder,
    was_copied,
    write_document,
)
from ckpttool.transaction.manifest import (
    JsonObject,
    ManifestFile,
    entry_text,
    manifest_text,
    opened,
    provenance_of,
    read_lines,
)

PATH_ENTRY = re.compile(rb'"path": ("[^"\\]*(?:\\.[^"\\]*)*")')
HEAD_BYTES = 100_000_000  # of a line of a manifest or journal


def find_unfinished_run(path: Path) -> Diagnostic | None:
    """Return why a folder, or a single file, is not a complete output; None if nothing says so.

    The manifest is removed before the first output is replaced, and written last.
    """
    manifest = path / MANIFEST if path.is_dir() else path.with_name(f"{path.name}.{MANIFEST}")
    if manifest.exists():
        return None
    if by := active_writer(manifest):
        text = f"a run of ckpttool is writing here ({by}), so files are missing, or of another run"
        return Diagnostic("unfinished", f"{path}: {text}", "wait until it ends")
    if any(find_journals(manifest)):
        text = "a run of ckpttool has not ended here, so files may be missing or of another run"
        hint = "finish it with the same command and --resume"
        return Diagnostic("unfinished", f"{path}: {text}", hint)
    if find_part_records(manifest):
        text = "written in parts (--part) that are not finalized, so files may be missing"
        return Diagnostic("unfinished", f"{path}: {text}", f"run ckpttool finalize {path}")
    return None


def active_writer(manifest: Path) -> str | None:
    """Return who is writing a set, or a part of it, at this moment; None if nobody is."""
    for journal in find_journals(manifest):
        with suppress(PermissionError):  # it is not ours to know
            if by := lock_holder(journal):
                return by
    return None


def find_journals(manifest: Path) -> Iterator[Path]:
    """Yield the journals of a set that are not empty: its own, and those of parts."""
    journal = Path(f"{manifest}{JOURNAL}")
    if has_text(journal):
        yield journal
    yield from find_part_records(manifest, JOURNAL)


def has_text(journal: Path) -> bool:
    """Return whether a journal has lines; `finalize` only locks it and writes none."""
    try:
        return journal.stat().st_size > 0
    except FileNotFoundError:
        return False


SEAL = " 01234567\n"  # what is behind the text of a line: its CRC-32 in hexadecimal digits


@dataclass(slots=True)
class JournalState:
    """What the journal of a run says that ended early.

    Attributes
    ----------
    provenance
        The run.
    complete
        Path of each output that was complete, relative to the journal, and its rank.
    placed
        Stamps of those that have their final names.
    left
        Stamps of outputs of earlier runs, which ended early and were not resumed.
    begun
        Paths of the outputs that were begun.
    lines
        First byte of the line of each rank's output, and the byte behind.
    head_end, end
        Byte behind the first line, and behind the last whole one.
    """

    provenance: Provenance
    complete: dict[str, int] = field(default_factory=dict)
    placed: dict[str, FileStamp] = field(default_factory=dict)
    left: dict[str, FileStamp] = field(default_factory=dict)
    begun: set[str] = field(default_factory=set)
    lines: dict[int, tuple[int, int]] = field(default_factory=dict)
    head_end: int = 0
    end: int = 0

    def kept(self, folder: Path, proven: Mapping[str, FileStamp]) -> dict[str, FileStamp]:
        """Return the outputs of this run that nobody has changed since it wrote or proved them."""
        mine = {name: stamp for name, stamp in proven.items() if name in self.complete}
        return _unchanged(folder, self.placed, mine)

    def untouched(self, folder: Path, proven: Mapping[str, FileStamp]) -> dict[str, FileStamp]:
        """Return the outputs of this run and of earlier ones that nobody has changed."""
        return {**_unchanged(folder, self.left), **self.kept(folder, proven)}


def _unchanged(folder: Path, *known: Mapping[str, FileStamp]) -> dict[str, FileStamp]:
    """Return the stamps of files that still have one of the stamps in ``known``."""
    found = {name: stamp_at(folder / name) for of in known for name in of}
    return {
        name: stamp
        for name, stamp in found.items()
        if stamp is not None and any(of.get(name) == stamp for of in known)
    }


def seal_line(text: str) -> str:
    """Return a line of a journal: the text with its CRC-32."""
    return f"{text} {crc32(text.encode('ascii')):08x}\n"


def unseal_line(line: bytes) -> bytes:
    """Return the text of a line; raises `ValueError` if its checksum does not match."""
    text = line[: -len(SEAL)]
    if seal_line(text.decode("ascii")).encode() != line:
        raise ValueError("a line is not as it was written")
    return text


def read_journal(path: Path) -> JournalState | None:
    """Read the journal that a run left; None if there is none.

    Raises
    ------
    FormatError
        The file is no journal of ckpttool.
    OSError
        It cannot be read.
    """
    found: JournalState | None = None
    try:
        for stop, line in _whole_lines(path):
            if found is None:
                (head,) = line.objects("run")
                found = JournalState(head.provenance(), head_end=stop)
            elif "begun" in line.entries:
                found.begun.add(line.file("begun"))
            elif "left" in line.entries:
                found.left[line.file("left")] = line.stamp()
            elif "placed" in line.entries:
                found.placed[line.file("placed")] = line.stamp()
            else:
                (output,) = line.objects("complete")
                name, rank = output.file("path"), output.number("rank")
                found.placed.pop(name, None)
                found.complete[name] = rank
                found.lines[rank] = found.end, stop
            found.end = stop
    except FileNotFoundError:
        return None
    except (FormatError, ValueError) as error:
        reason = error.reason if isinstance(error, FormatError) else "its first line"
        text = f"not a journal of ckpttool ({reason}); move it away"
        raise FormatError(str(path), None, text) from error
    return found


def read_provenance(journal: Path) -> Provenance | None:
    """Return the provenance in the first line of a journal; None if it cannot be read."""
    try:
        for _, line in _whole_lines(journal):
            (head,) = line.objects("run")
            return head.provenance()
    except (FileNotFoundError, FormatError, ValueError):
        pass  # gone, or just being begun
    return None


def journal_that_began(partial: Path) -> Path | None:
    """Return the journal of a set that names a temporary file as begun; None if none does."""
    output = Path(str(partial).removesuffix(PARTIAL))
    sets = [output.with_name(f"{output.name}.{MANIFEST}")]
    sets += [folder / MANIFEST for folder in output.parents[:2]]
    for manifest in sets:
        for journal in (journal_path(manifest), *find_part_records(manifest, JOURNAL)):
            try:
                before = read_journal(journal)
            except (FormatError, OSError):
                continue  # nothing is known from it
            if before is not None and os.path.relpath(output, journal.parent) in before.begun:
                return journal
    return None


def read_entries(journal: Path, lines: Iterable[tuple[int, int]]) -> Iterator[OutputEntry]:
    """Yield the outputs in lines of a journal, each given by its first byte and its end."""
    with open_file(journal) as file:
        for start, stop in lines:
            file.seek(start)
            text = unseal_line(file.read(stop - start))
            (output,) = JsonObject.parse(journal, text).objects("complete")
            yield output.output()


def _whole_lines(path: Path) -> Iterator[tuple[int, JsonObject]]:
    """Yield the end of every complete line, in bytes, and its entries.

    An incomplete last line, as a power loss leaves it, is dropped.
    """
    start = 0
    with opened(path) as file:
        for line in read_lines(path, file):
            if not line.endswith(b"\n"):
                return
            try:
                text = unseal_line(line)
            except ValueError as error:
                if start and not file.read(1):
                    return
                reason = f"byte {start}: the line is not as it was written"
                raise FormatError(str(path), None, reason) from error
            start += len(line)
            yield start, JsonObject.parse(path, text)


TRIES, PAUSE_SECONDS = 6, 0.05  # for a lock that somebody has for a moment, to look or to leave


@dataclass(frozen=True, slots=True)
class Part:
    """One of ``count`` runs that write one set, from 1 on: ``--part number/count``."""

    number: int
    count: int


@dataclass(frozen=True, slots=True)
class OutputSet:
    """The set of outputs that a run writes, or writes a part of.

    Attributes
    ----------
    manifest
        Path of the set's manifest.
    record
        What the run writes when all its outputs are complete: the manifest, or the record of a
        part.
    provenance
        The run.
    head
        What the record says besides its outputs.
    documents
        Those of the set; removed before the first output is replaced.
    outputs
        Paths of the outputs that this run writes, relative to the manifest's folder.
    """

    manifest: Path
    record: Path
    provenance: Provenance
    head: Mapping[str, object]
    documents: tuple[Document, ...] = ()
    outputs: tuple[str, ...] = ()

    @classmethod
    def of(cls, plan: Plan, ranks: Iterable[int], part: Part | None) -> OutputSet:
        """Return the set of a plan, for a run that writes the outputs of some ranks.

        Raises
        ------
        OSError
            A source or strategy file is gone.
        """
        manifest, provenance = Path(plan.target.manifest_path), provenance_of(plan)
        outputs = tuple(os.path.relpath(plan.target.paths[r], manifest.parent) for r in ranks)
        if part is None:
            return cls(manifest, manifest, provenance, provenance.head(), plan.documents, outputs)
        documents = [
            {
                "path": os.path.relpath(document.path, manifest.parent),
                "data": b64encode(document.data).decode(),
            }
            for document in plan.documents
        ]
        head = {
            **provenance.head_with_times(),
            "part": part.number,
            "parts": part.count,
            "files": len(plan.target.paths),
            "documents": documents,
        }
        record = part_record_path(manifest, part.number, part.count)
        return cls(manifest, record, provenance, head, plan.documents, outputs)

    @property
    def is_part(self) -> bool:
        """Whether other runs write to the same set."""
        return self.manifest != self.record

    @property
    def folder(self) -> Path:
        """The folder that paths of outputs are relative to."""
        return self.manifest.parent

    @property
    def own_documents(self) -> tuple[Document, ...]:
        """The documents that this run writes; those of a set in parts are left to `finalize`."""
        return () if self.is_part else self.documents

    def records_of_parts(self) -> list[Path]:
        """Return the records of parts that this run makes outdated.

        A whole run makes all of them outdated.  A part makes those outdated that are of another
        number of parts, and those of another plan that list an output which this part replaces.
        """
        records = find_part_records(self.manifest)
        if not self.is_part:
            return records
        ending = self.record.name[self.record.name.rindex("-of-") :]
        return [path for path in records if not path.name.endswith(ending) or self._replaces(path)]

    def _replaces(self, record: Path) -> bool:
        """Return whether a record is of another plan and lists an output of this run."""
        mine = json.dumps(self.provenance.head_with_times()).removesuffix("}").encode("ascii")
        try:
            with opened(record) as file:
                if file.read(len(mine)) == mine:
                    return False  # without reading all of it: there may be thousands
            names = set(self.outputs)
            return any(one.path in names for one in ManifestFile.read(record).outputs())
        except FileNotFoundError:
            return False
        except FormatError:
            return True  # it proves nothing

    def part_journals(self) -> list[Path]:
        """Return the journals of parts, if this run is not one."""
        return [] if self.is_part else find_part_records(self.manifest, JOURNAL)

    def find_finished(self, path: Path) -> ManifestFile | None:
        """Return the manifest or record at a path, if it is of this very run; else None."""
        try:
            finished = ManifestFile.read(path)
        except (FileNotFoundError, CkptToolError):
            return None  # it says nothing, and is replaced only if that is asked for
        head = self.head if path == self.record else self.provenance.head()
        said = {**finished.head.entries, "options": None}
        is_old = any(file.mtime_ns > finished.mtime_ns for file in self.provenance.inputs)
        return finished if said == {**head, "options": None} and not is_old else None

    def set_aside(self, journal: Path) -> None:
        """Empty the journal of the set; copy it first to where every part looks."""
        aside = journal_path(part_record_path(self.manifest, 0, 0))
        if journal.stat().st_size and not aside.exists():
            aside.write_bytes(journal.read_bytes())
        os.truncate(journal, 0)


def part_record_path(manifest: Path, part: object, parts: object) -> Path:
    """Return the path of the record of a part."""
    name = f".{manifest.name.removesuffix(MANIFEST)}{PART_RECORD}{part}-of-{parts}.json"
    return manifest.with_name(name)


def find_part_records(manifest: Path, suffix: str = "") -> list[Path]:
    """Return the records of parts beside a manifest, or the files of their names and a suffix."""
    pattern = glob.escape(part_record_path(manifest, "*", "*").name).replace("[*]", "*")
    return sorted(manifest.parent.glob(pattern + suffix))


def remove_stale_part_records(manifest: Path) -> None:
    """Remove records of parts that were left half-written."""
    for path in find_part_records(manifest, PARTIAL):
        remove_stale(path.parent, path.name)


def find_other_set(folder: Path) -> Path | None:
    """Return a single file in a folder that has records of parts; None if there is none."""
    for path in sorted(folder.glob(f".*.{PART_RECORD}*.json")):
        return folder / path.name[1 : path.name.rindex(f".{PART_RECORD}")]
    return None


def journal_path(finished: Path) -> Path:
    """Return the path of the journal of a manifest or record."""
    return finished.with_name(finished.name + JOURNAL)


def acquire_lock(path: Path, is_shared: bool = False) -> int:
    """Open a journal, make it if it is not there, and lock it.

    Raises
    ------
    PlanError
        Another run has it.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    for left in reversed(range(TRIES)):
        try:
            return lock(path, os.open(path, flags, 0o666), is_shared)
        except TakenError as error:
            if not left:
                raise PlanError([busy_problem(path, name_lock_holder(path))]) from error
            time.sleep(PAUSE_SECONDS)
    raise AssertionError("the last try returns or raises")


@contextmanager
def lock_set(manifest: Path) -> Iterator[None]:
    """Lock a set exclusively for a while; raises `PlanError` if a run is writing it."""
    path = journal_path(manifest)
    fd = acquire_lock(path)
    try:
        yield
    finally:
        try:
            path.unlink(missing_ok=True)
        finally:
            os.close(fd)


def busy_problem(journal: Path, by: str) -> Diagnostic:
    """Return the problem that another run is writing the set of a journal."""
    text = f"{str(journal).removesuffix(JOURNAL)}: another run is writing it ({by})"
    return Diagnostic("busy", text, "wait until it ends, or write elsewhere")


COMPLETE, END = '{"complete": [', "]}"  # around an output in its line
UNKNOWN = FileStamp(0, 0, 0, 0)  # of an output that is not as a run left it; no file has this


class Journal:
    """The journal of a run under way; ends with `finish` or `leave`.

    Parameters
    ----------
    place
        Where it is.
    is_resumed
        Whether to continue the journal or finished set that is there.  Otherwise the journal
        begins anew, and temporary files that a killed run left are removed.
    proven
        Stamps of outputs that were found intact, by path relative to the journal.

    Attributes
    ----------
    kept
        Outputs that need not be written, by their paths relative to the journal.

    Raises
    ------
    PlanError
        Another run is writing the same set, or a part of another plan to it, or what was left is
        not of the same run.
    FormatError
        What lies there is no journal.
    OSError
        The file cannot be made.
    """

    def __init__(
        self, output_set: OutputSet, is_resumed: bool, proven: Mapping[str, FileStamp] | None = None
    ) -> None:
        self._set = output_set
        self._path = journal_path(output_set.record)
        self._fds: dict[Path, int] = {}
        self._has_replaced = self._has_left = self._was_finished = False
        self._begun: list[str] = []
        self._lines: dict[int, tuple[int, int]] = {}  # in the journal, of each rank's output
        self._proven = proven or {}
        self.kept: Mapping[str, FileStamp] = {}
        make_folder(self._path.parent)
        try:
            of_set = journal_path(output_set.manifest)
            self._fds[of_set] = acquire_lock(of_set, is_shared=output_set.is_part)
            if output_set.is_part:
                self._fds[self._path] = acquire_lock(self._path)
            self._begin(is_resumed)
            self._refuse_other_plans()
            sync_folder(self._path.parent)
        except BaseException:
            self._close(remove=False)
            raise

    @property
    def provenance(self) -> Provenance:
        """The run."""
        return self._set.provenance

    @property
    def record(self) -> Path:
        """The manifest or record that the journal becomes."""
        return self._set.record

    @property
    def folder(self) -> Path:
        """The folder that paths of outputs are relative to."""
        return self._path.parent

    def begin(self, *paths: str) -> None:
        """Record, durably, that outputs are about to be begun."""
        names = (os.path.relpath(path, self.folder) for path in paths)
        self._append("".join(seal_line(json.dumps({"begun": name})) for name in names))
        self._begun += paths

    def add(self, output: OutputEntry) -> None:
        """Record, durably, that an output is complete and about to be renamed.

        Raises
        ------
        VerifyError
            It was complete before, and was not the same.
        """
        before = self._lines.get(output.rank)
        if before is not None and self._output_at(*before) != entry_text(output):
            text = "is not what the same run wrote there before; has a source file been changed? "
            text += "Without --resume (--overwrite) all is written anew"
            raise VerifyError(str(self.folder / output.path), [text])
        if not self._has_replaced:
            self._remove_outdated()
            self._has_replaced = True
        self._append_output(output, is_durable=True)

    def place(self, path: str) -> None:
        """Record the stamp of a renamed output; without it a resumed run reads the contents."""
        name, stamp = os.path.relpath(path, self.folder), stamp_at(Path(path))
        if stamp is not None:
            self._append(_line_of("placed", name, stamp), is_durable=False)

    def finish(self) -> None:
        """Write the manifest or record, and remove the journal."""
        lines = (self._output_at(*self._lines[rank]) for rank in sorted(self._lines))
        text = manifest_text(self._set.head, lines)
        write_document(str(self._set.record), text, is_dated=True)
        self._close(remove=True)

    def leave(self) -> None:
        """End early; the journal stays if there is something to resume."""
        needs_none = self._was_finished and not self._has_replaced  # the manifest is still there
        is_stuck = any(is_there(path + PARTIAL) for path in self._begun)  # on a failed disk
        is_of_use = self._lines or self._has_left
        self._close(remove=not is_stuck and (needs_none or not is_of_use))

    def _begin(self, is_resumed: bool) -> None:
        """Take over what is kept, remove what is half-written, and write the first lines."""
        before = read_journal(self._path)
        if before is not None and is_resumed:
            changes = list(differences(self._set.provenance, before.provenance))
            if changes:
                raise PlanError(resume_problems(self._path, changes))
        # It goes before the first output is replaced: while it is there a journal knows no more.
        finished = self._set.find_finished(self.record) if is_resumed else None
        goes_on = before if is_resumed and finished is None else None
        if goes_on is not None:
            self.kept = goes_on.kept(self.folder, self._proven)
            self._lines = goes_on.lines
        left = self._clean(self._path, {})
        if self._set.is_part:  # others hold it, too, so it stays
            of_set = journal_path(self._set.manifest)
            self._clean(of_set, {})
            self._set.set_aside(of_set)
        else:
            remove_stale_part_records(self._set.manifest)
        of_parts = self._set.part_journals()
        for path in of_parts:
            left = self._clean(path, left)
        self._start(goes_on, before)
        if finished is not None:
            self._take_over(finished)
        stays = sorted(left.keys() - self.kept.keys())
        text = "".join(_line_of("left", name, left[name]) for name in stays)
        text += "".join(_line_of("placed", name, self.kept[name]) for name in sorted(self.kept))
        self._append(text)
        self._has_left = bool(stays)
        for path in of_parts:
            path.unlink()

    def _refuse_other_plans(self) -> None:
        """Refuse to write beside a part of another plan: each would replace the other's outputs.

        Each run records its plan first and looks then, so at least one of two sees the other.
        """
        others = find_part_records(self._set.manifest, JOURNAL) if self._set.is_part else []
        for path in others:
            for left in reversed(range(TRIES)):
                by = None if path == self._path else lock_holder(path)
                other = None if by is None else read_provenance(path)
                changes = [] if other is None else list(differences(self.provenance, other))
                if not changes:
                    break
                if not left:
                    self.leave()
                    text = f"{path}: a part of another plan is being written there ({by})"
                    remedy = "wait until it ends, or write elsewhere"
                    raise PlanError(
                        [Diagnostic("resume", f"{text}: {change}", remedy) for change in changes]
                    )
                time.sleep(PAUSE_SECONDS)  # that of an earlier run, it has just begun

    def _start(self, goes_on: JournalState | None, before: JournalState | None) -> None:
        """Write the first line, unless a journal is continued that has it.

        The journal of a run that ended early is never empty in between: that would mean no run.
        """
        fd = self._fds[self._path]
        if goes_on is not None and goes_on.end:
            os.ftruncate(fd, goes_on.end)
        else:
            by = f"process {os.getpid()} on {socket.gethostname()}"
            head = {"by": by, "run": [self._set.provenance.head_with_times()]}
            line = seal_line(json.dumps(head)).encode("ascii")
            if before is not None:
                os.ftruncate(fd, before.head_end)
            os.pwrite(fd, line, 0)
            os.ftruncate(fd, len(line))
        os.lseek(fd, 0, os.SEEK_END)

    def _take_over(self, finished: ManifestFile) -> None:
        """Continue a finished set: keep the outputs that match it; if none does, begin anew."""
        fd, start = self._fds[self._path], os.fstat(self._fds[self._path]).st_size
        kept = {}
        for output in finished.outputs():
            self._append_output(output, is_durable=False)
            stamp = stamp_at(self.folder / output.path)
            is_proven = stamp is not None and self._proven.get(output.path) == stamp
            if stamp is not None and (is_proven or finished.is_unmodified(output, stamp)):
                kept[output.path] = stamp
        self.kept, self._was_finished = kept, bool(kept)
        if not kept:
            self._lines = {}
            os.ftruncate(fd, start)
            os.lseek(fd, start, os.SEEK_SET)

    def _clean(self, journal: Path, left: Mapping[str, FileStamp]) -> dict[str, FileStamp]:
        """Remove what a killed run left half-written; return ``left`` with its complete outputs."""
        try:
            before = read_journal(journal)
        except FormatError:
            return dict(left)  # not ours to judge, and nothing of it is used
        if before is None:
            return dict(left)
        for name in sorted({*before.begun, *before.complete}):
            remove_stale(self.folder, name + PARTIAL)
        # What was touched since is not ours to replace, but its set stays one that is not whole.
        there = {name: stamp for name, stamp in before.left.items() if self._has(name)}
        there |= {name: UNKNOWN for name in sorted(before.complete) if self._has(name)}
        return {**left, **there, **before.untouched(self.folder, self._proven)}

    def _has(self, name: str) -> bool:
        return is_there(self.folder / name)

    def _remove_outdated(self) -> None:
        """Remove, before the first output is replaced, what says that the set is complete."""
        output_set = self._set
        documents = (document.path for document in output_set.documents)
        said = (output_set.manifest, output_set.record, *documents, *output_set.records_of_parts())
        for path in dict.fromkeys(map(str, said)):
            remove_document(path)

    def _output_at(self, start: int, stop: int) -> str:
        with open_file(self._path) as file:
            file.seek(start)
            text = unseal_line(file.read(stop - start)).decode("ascii")
        return text.removeprefix(COMPLETE).removesuffix(END)

    def _append_output(self, output: OutputEntry, *, is_durable: bool) -> None:
        start = os.lseek(self._fds[self._path], 0, os.SEEK_CUR)
        line = seal_line(f"{COMPLETE}{entry_text(output)}{END}")
        self._append(line, is_durable=is_durable)
        self._lines[output.rank] = start, start + len(line)

    def _append(self, line: str, *, is_durable: bool = True) -> None:
        data = line.encode("ascii")
        fd = self._fds[self._path]
        while data:
            data = data[os.write(fd, data) :]
        if is_durable:
            os.fsync(fd)

    def _close(self, remove: bool) -> None:
        """Release the locks; the last part to leave removes the journal of the set."""
        while self._fds:
            path, fd = self._fds.popitem()
            is_shared = path != self._path
            try:
                if is_shared:
                    remove = True
                    os.close(lock(path, os.dup(fd)))
                if remove and is_open_as(path, fd):
                    path.unlink()
            except TakenError:
                pass  # somebody else holds it
            finally:
                os.close(fd)
        sync_folder(self._path.parent)


def _line_of(kind: str, name: str, stamp: FileStamp) -> str:
    return seal_line(json.dumps({kind: name, **stamp._asdict()}))


def resume_problems(journal: Path, changes: Iterable[str]) -> tuple[Diagnostic, ...]:
    """Return the problems that what a run left is not of this command."""
    first = f"{journal}: --resume: what was left there is of another run"
    hint = "without --resume all is written anew"
    return tuple(Diagnostic("resume", f"{first}: {change}", hint) for change in changes)


BEGUN_LINE = re.compile(rb'\{"begun": ("[^"\\]*(?:\\.[^"\\]*)*")')  # of a journal
MOST = 3  # journals that are told of; a batch system's array job may leave thousands


@dataclass(slots=True)
class _Told:
    """What a journal tells: what the run is to write, which outputs are complete, which begun."""

    aim: str = ""
    complete: set[str] = field(default_factory=set)
    begun: set[str] = field(default_factory=set)


def describe_unfinished_runs(folder: Path) -> Iterator[Diagnostic]:
    """Notes on the runs that have not ended in a folder: whose, of what, and how far they came."""
    manifest = folder / MANIFEST
    journals = [] if manifest.exists() else list(find_journals(manifest))
    for journal in islice(journals, MOST):
        told = _read_leniently(journal)
        text = f"{journal}: of {name_lock_holder(journal)}{told.aim}; complete: "
        text += shorten(sorted(told.complete), 3) or "nothing"
        text += f"; begun: {shorten(sorted(told.begun), 3)}" if told.begun else ""
        yield Diagnostic("leftover", text)
    if len(journals) > MOST:
        text = f"{count(len(journals) - MOST, 'more journal')} of runs that have not ended"
        yield Diagnostic("leftover", text, where=str(folder))


def on_half_written(path: Path) -> Iterator[Diagnostic]:
    """Yield files, of a folder or the one named, that may be renamed temporary files of a run.

    These are of full size, headers and all.  A file may be one of a set that lies in its folder or
    in the one above.
    """
    for manifest in [path / MANIFEST] if path.is_dir() else _sets_of(path):
        for journal in find_journals(manifest):
            for output in _half_written(journal, manifest):
                if path.is_dir() or path.samefile(output):
                    by = active_writer(manifest)
                    end = "began it and has not ended, so it may hold zeros"
                    hint = "move it away, and finish that run with its own command and --resume"
                    if by:
                        end, hint = f"is writing it ({by})", "wait until it ends"
                    name = output if path.is_dir() else path
                    text = f"{name}: {journal} says that a run of ckpttool {end}"
                    yield Diagnostic("unfinished", text, hint)


def _sets_of(path: Path) -> list[Path]:
    """The manifests of sets that a file may be one of, there or not."""
    above = [folder / MANIFEST for folder in path.absolute().parents[:2]]
    return [path.absolute().with_name(f"{path.name}.{MANIFEST}"), *above]


def _half_written(journal: Path, manifest: Path) -> Iterator[Path]:
    """Outputs that are begun and not complete, and have their names without their temporary files.

    Those that lay there before are older than the manifest, if that is still there, and no copy.
    """
    found = manifest.stat() if manifest.exists() else None
    written_ns = 0 if found is None or was_copied(found) else found.st_mtime_ns
    for output in sorted(journal.parent / name for name in _read_leniently(journal).begun):
        if _changed_ns(output) > written_ns and not _changed_ns(Path(f"{output}{PARTIAL}")):
            yield output


def _changed_ns(path: Path) -> int:
    """When a file was changed, or given its name; 0 if there is none of that name."""
    with suppress(OSError, ValueError):
        return path.stat().st_ctime_ns
    return 0


def _read_leniently(journal: Path) -> _Told:
    """What a journal tells, as far as it can be read."""
    told = _Told()
    with suppress(OSError, ValueError), journal.open("rb") as file:
        told.aim = _aim(file.readline(HEAD_BYTES))
        while line := file.readline(HEAD_BYTES):
            if match := BEGUN_LINE.match(line):
                told.begun.add(json.loads(match[1]))
            elif line.startswith(b'{"complete": ') and (match := PATH_ENTRY.search(line)):
                told.complete.add(json.loads(match[1]))
                told.begun.discard(json.loads(match[1]))
    return told


def _aim(line: bytes) -> str:
    """What a run is to write, as the first line of its journal says."""
    with suppress(ValueError, LookupError, TypeError, AttributeError, RecursionError):
        head = json.loads(line.rpartition(b" ")[0])["run"][0]
        words = [str(one) for one in head.get("options", {}).values() if not one.startswith("no ")]
        step = f"step {head['step']}, " if head["step"] else ""
        files = count(len(head["inputs"]), "input file")
        return (
            f" ({step}{files}; to be written: {', '.join(words)})" if words else f" ({step}{files})"
        )
    return ""
