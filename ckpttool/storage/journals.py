"""What journals of runs tell whoever reads what these have left; see `ckpttool.run.journal`.

They are not proven here line by line, as they are where a run is gone on from: what is told is a
hint, and what cannot be read is left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from ckpttool.model.manifest import MANIFEST
from ckpttool.model.notes import Note
from ckpttool.model.strategy import count, shorten
from ckpttool.storage.leftovers import (
    HEAD_BYTES,
    PARTIAL,
    PATH_ENTRY,
    journals_of,
    was_copied,
    writer_of,
)
from ckpttool.storage.locks import name_of_holder

BEGUN_LINE = re.compile(rb'\{"begun": ("[^"\\]*(?:\\.[^"\\]*)*")')  # of a journal
MOST = 3  # journals that are told of; a batch system's array job may leave thousands


@dataclass(slots=True)
class _Told:
    """What a journal tells: what the run is to write, which outputs are complete, which begun."""

    aim: str = ""
    complete: set[str] = field(default_factory=set)
    begun: set[str] = field(default_factory=set)


def notes_of_runs(folder: Path) -> Iterator[Note]:
    """Notes on the runs that have not ended in a folder: whose, of what, and how far they came."""
    manifest = folder / MANIFEST
    journals = [] if manifest.exists() else list(journals_of(manifest))
    for journal in islice(journals, MOST):
        told = _read(journal)
        text = f"{journal}: of {name_of_holder(journal)}{told.aim}; complete: "
        text += shorten(sorted(told.complete), 3) or "nothing"
        text += f"; begun: {shorten(sorted(told.begun), 3)}" if told.begun else ""
        yield Note("unfinished", text)
    if len(journals) > MOST:
        text = (
            f"{folder}: {count(len(journals) - MOST, 'more journal')} of runs that have not ended"
        )
        yield Note("unfinished", text)


def on_half_written(path: Path) -> Iterator[str]:
    """Why a file, or files in a folder, may be temporary files of a run that somebody renamed.

    These are of full size, headers and all.  A file may be one of a set that lies in its folder or
    in the one above.
    """
    for manifest in [path / MANIFEST] if path.is_dir() else _sets_of(path):
        for journal in journals_of(manifest):
            for output in _half_written(journal, manifest):
                if path.is_dir() or path.samefile(output):
                    by = writer_of(manifest)
                    end = f"is writing it ({by}); wait until it ends"
                    text = (
                        "began it and has not ended, so it may hold zeros; move it away, and finish"
                    )
                    end = end if by else f"{text} that run with its own command and --resume"
                    name = output if path.is_dir() else path
                    yield f"{name}: {journal} says that a run of ckpttool {end}"


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
    for output in sorted(journal.parent / name for name in _read(journal).begun):
        if _changed_ns(output) > written_ns and not _changed_ns(Path(f"{output}{PARTIAL}")):
            yield output


def _changed_ns(path: Path) -> int:
    """When a file was changed, or given its name; 0 if there is none of that name."""
    with suppress(OSError, ValueError):
        return path.stat().st_ctime_ns
    return 0


def _read(journal: Path) -> _Told:
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
