"""The log of a writer: which outputs and units it wrote, in lines that are only appended.

A line is JSON, a space, the CRC-32 of the JSON in hexadecimal digits, and a newline::

    {"process": 12, "host": "node7", ... "record": 2, "plan": "4b1c...", "command": ...} 5c5f1d2e
    {"units": "rank_0/checkpoint_0.ckpt", "is_first": true, "hashes": [[0, 0, "ab..."], ...]} 7d11
    {"rank": 0, "path": "rank_0/checkpoint_0.ckpt", ... "tensors": [...]} 0a6a0c1b
    {"path": "rank_0/checkpoint_0.ckpt", "stamp": [50321, ...]} 91b0e0f3
    {"done": ["rank_0/checkpoint_0.ckpt", ...]} 3d2f2d6a

``process``
    A run begins to write the log.  All lines up to the next one of this kind are of its plan:
    `Provenance.digest`.  The command line is for users.  ``record`` is the version of the record.
``units``
    Units of an output are on disk in its file, whose name is temporary: the place of the tensor,
    the number of the unit and its SHA-256, and what casts did to them.  The file was synced before
    this line.  A group with ``is_first`` makes those of its file before it void.
``rank``
    An output is on disk under its temporary name; the line is that of the manifest.  It is synced
    before the output is renamed.  It stays true of the file until another line replaces it.
``path``
    The output of the line before has its final name.  A rename changes the time of change, so the
    stamp is taken after the rename.  It is not synced: without it, hashes decide.
``done``
    The writer has written these outputs, or kept them, and its sources were unchanged.

A power loss may cut the last line short; it is then ignored, and the next writer cuts it off.  Any
other damaged line is an error.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from zlib import crc32

from msgspec import Struct, to_builtins
from msgspec.structs import replace

from ckpttool.formats.local import open_file
from ckpttool.model.manifest import CastStats, OutputEntry, require_below
from ckpttool.model.tensors import FileStamp
from ckpttool.problems import FormatError
from ckpttool.transaction.sealed_files import (
    PIECE_BYTES,
    PlannedOutput,
    items_text,
    opened,
    parse_entries,
    parse_head,
    read_pieces,
)

SEAL = " 01234567\n"  # behind the text of a line: its CRC-32
# The beginnings of lines.
BEGIN, UNITS, ENTRY, STAMP, DONE = (
    f'{{"{key}": '.encode() for key in ("process", "units", "rank", "path", "done")
)
RECORD_SCHEMA = 2  # of logs and plans; before 2 a log did not list units, and parts were numbered
NOT_AS_WRITTEN = "a line has changed since it was written"


class Writer(Struct, frozen=True):
    """A process that writes a set of outputs, and the time (UTC) since which it does."""

    process: int
    host: str
    time: str

    @classmethod
    def this(cls) -> Writer:
        """Return this process, from now on."""
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        return cls(os.getpid(), os.uname().nodename, now)

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}"


class _Begin(Writer, frozen=True):
    """The line of a process that begins, with the plan and the command line of its run."""

    plan: str
    command: str
    record: int = 1


def require_schema(path: Path, schema: int) -> None:
    """Raise `FormatError` if the record of a run is of another version of ckpttool."""
    if schema != RECORD_SCHEMA:
        reason = "written by another version of ckpttool"
        facts = f"record: expected {RECORD_SCHEMA}, got {schema}"
        raise FormatError(str(path), None, f"{reason}; {facts}")


class _Units(Struct, frozen=True):
    """The path of an output with units on disk, and whether they are the first there."""

    units: str
    is_first: bool

    def __post_init__(self) -> None:
        require_below(self.units)


class UnitGroup(_Units, frozen=True):
    """Units of an output that are on disk, in a file with its temporary name.

    ``units`` is the path of the output, ``hashes`` has the place of the tensor, the number and the
    SHA-256 of each unit.  If it ``is_first``, groups before this one are of another file.
    """

    hashes: tuple[tuple[int, int, str], ...]
    casts: Mapping[str, CastStats] = {}


class _Done(Struct, frozen=True):
    """The outputs that a writer has written."""

    done: tuple[str, ...]


class StampedOutput(Struct, frozen=True):
    """The path of an output relative to the manifest, and its stamp under its final name."""

    path: str
    stamp: FileStamp

    def __post_init__(self) -> None:
        require_below(self.path)


class LoggedOutput(Struct, frozen=True):
    """A line of a log about an output, or about units of it; it is read when it is needed."""

    log: Path
    start: int
    stop: int
    plan: str
    stamp: FileStamp | None = None

    def read_line(self) -> Iterator[bytes]:
        """Yield the text of the output's line in pieces.

        Raises
        ------
        FormatError
            The line has changed, which shows behind the last piece.
        """
        left, crc = self.stop - self.start - len(SEAL), 0
        with open_file(self.log) as file:
            file.seek(self.start)
            while (piece := file.read(min(left, PIECE_BYTES))) and piece.isascii():
                crc = crc32(piece, crc)
                left -= len(piece)
                yield piece
            if left or file.read(len(SEAL)) != _seal(crc):
                raise FormatError(str(self.log), self.start, NOT_AS_WRITTEN)

    def read_entry(self) -> OutputEntry:
        """Return the output's entry in the manifest."""
        return parse_entries(self.log, OutputEntry, b"".join(self.read_line()))

    def read_units(self) -> UnitGroup:
        """Return the units of the output that the line lists."""
        return parse_entries(self.log, UnitGroup, b"".join(self.read_line()))


class Log(Struct):
    """The log of a writer, as far as it goes.

    Attributes
    ----------
    path
        The file.
    writer, plan, command
        Who wrote it last, and the plan and the command line of that run.
    plans
        The outputs by plan, and then by path, relative to the manifest.
    units
        The groups of units by plan, and then by the path of an output that is half-written.
    done
        The outputs that the last writer has written; None if it has not ended.
    nbytes
        Size of the log without a line that was cut short.

    Raises
    ------
    FormatError
        The file is damaged or no log, or cannot be read.
    FileNotFoundError
        It does not exist.
    """

    path: Path
    writer: Writer | None = None
    plan: str = ""
    command: str = ""
    plans: dict[str, dict[str, LoggedOutput]] = {}
    units: dict[str, dict[str, list[LoggedOutput]]] = {}
    done: tuple[str, ...] | None = None
    nbytes: int = 0

    @property
    def is_done(self) -> bool:
        """Whether the last run has ended well."""
        return self.done is not None

    @property
    def outputs(self) -> Mapping[str, LoggedOutput]:
        """The outputs of the plan of the last run."""
        return self.plans.get(self.plan, {})

    @classmethod
    def read(cls, path: Path) -> Log:
        """Read a log; ``writer`` is None if a run has just made it."""
        log = cls(path)
        outputs: dict[str, LoggedOutput] = {}  # of the plan of the lines
        units: dict[str, list[LoggedOutput]] = {}
        last: str | None = None  # the output in the line before
        for start, stop, line in _whole_lines(path):
            log.nbytes = stop
            if log.writer is None and not line.startswith(BEGIN):
                reason = "not a log of ckpttool: it does not begin with a run"
                raise FormatError(str(path), 0, reason)
            if line.startswith(ENTRY):
                last = parse_head(path, PlannedOutput, line).path
                outputs[last] = LoggedOutput(path, start, stop, log.plan)
                units.pop(last, None)
                continue
            if line.startswith(BEGIN):
                log.writer = begin = parse_entries(path, _Begin, line)
                require_schema(path, begin.record)
                units = log.units.setdefault(begin.plan, {})
                log.plan, log.command = begin.plan, begin.command
                outputs = log.plans.setdefault(log.plan, {})
            elif line.startswith(STAMP):
                stamped = parse_entries(path, StampedOutput, line)
                if stamped.path != last:
                    reason = "path: expected the output in the line before"
                    raise FormatError(str(path), start, reason)
                outputs[last] = replace(outputs[last], stamp=stamped.stamp)
            elif line.startswith(UNITS):
                group = parse_head(path, _Units, line, "hashes")
                if group.is_first:
                    units[group.units] = []
                logged = LoggedOutput(path, start, stop, log.plan)
                units.setdefault(group.units, []).append(logged)
            log.done = parse_entries(path, _Done, line).done if line.startswith(DONE) else None
            last = None
        return log


def _whole_lines(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """Yield the first byte of every whole line, the byte behind it, and its text.

    The text of lines about outputs and units, which may be long, is only their first piece.
    """
    start = stop = crc = 0
    text, held = bytearray(), b""  # held is what may be the seal
    with opened(path) as file:
        for piece in read_pieces(path, file):
            held += piece
            more, held = held[: -len(SEAL)], held[-len(SEAL) :]
            crc, stop = crc32(more, crc), stop + len(piece)
            if not text.startswith((ENTRY, UNITS)):
                text += more
            if not piece.endswith(b"\n"):
                continue
            if held != _seal(crc) or not text:
                if start and not file.read(1):
                    return  # the last line: a power loss has cut it short
                raise FormatError(str(path), start, NOT_AS_WRITTEN)
            yield start, stop, bytes(text)
            start, crc, text, held = stop, 0, bytearray(), b""


def _seal(crc: int) -> bytes:
    return b" %08x\n" % crc


class LogWriter:
    """Appends to a log behind its whole lines, the first ``kept`` bytes.

    Raises
    ------
    OSError
        The log cannot be written.
    """

    def __init__(self, path: Path, fd: int, kept: int, plan: str, command: str) -> None:
        self.path = path
        self._fd = fd
        self._plan = plan
        os.ftruncate(fd, kept)
        self._end = os.lseek(fd, 0, os.SEEK_END)
        begin = to_builtins(Writer.this())
        begin |= {"record": RECORD_SCHEMA, "plan": plan, "command": command}
        self._append([json.dumps(begin).encode()])

    def add(self, line: Iterable[bytes], *, is_durable: bool = True) -> LoggedOutput:
        """Append the line of an output, and sync it if it is to be durable; return where it is.

        ``line`` is the text of `ckpttool.transaction.sealed_files.entry_text`.
        """
        start = self._end
        self._append(line, is_durable=is_durable)
        return LoggedOutput(self.path, start, self._end, self._plan)

    def add_stamp(self, name: str, stamp: FileStamp) -> None:
        """Append the stamp of the output that was added last."""
        line = json.dumps({"path": name, "stamp": stamp})
        self._append([line.encode()], is_durable=False)

    def add_units(
        self,
        units: str,
        is_first: bool,
        hashes: Iterable[tuple[int, int, str]],
        casts: Mapping[str, CastStats],
    ) -> None:
        """Append a `UnitGroup` whose file was synced; `sync` makes it durable."""
        head = json.dumps({"units": units, "is_first": is_first, "hashes": []})
        tail = json.dumps({"casts": to_builtins(casts)})
        ends = [head.removesuffix("]}").encode()], [f"], {tail[1:]}".encode()]
        self._append(chain(ends[0], items_text(hashes), ends[1]), is_durable=False)

    def end(self, outputs: Iterable[str]) -> None:
        """Append that these outputs are written."""
        self._append([json.dumps({"done": [*outputs]}).encode()])

    def sync(self) -> None:
        """Make all lines durable."""
        os.fsync(self._fd)

    def _append(self, pieces: Iterable[bytes], *, is_durable: bool = True) -> None:
        crc = 0
        for piece in pieces:
            crc = crc32(piece, crc)
            self._write(piece)
        self._write(_seal(crc))
        if is_durable:
            self.sync()

    def _write(self, data: bytes) -> None:
        self._end += len(data)
        while data:
            data = data[os.write(self._fd, data) :]
