"""Sealed documents on disk: the manifest, and the plan and stamps of the record of a run.

`ckpttool.model.manifest` describes the manifest.  The others have the same form: entries in the
first line, one line for each output, and a last line with the SHA-256 of all lines before it.  A
document is written in pieces and read line by line.  If its last line does not match, it is damaged
and its contents are not used.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import chain, groupby, islice, pairwise
from pathlib import Path
from typing import BinaryIO, TypeVar

from msgspec import Struct, to_builtins

from ckpttool.formats.local import open_file, unreadable
from ckpttool.formats.strict_json import convert_as, parse_as, to_json
from ckpttool.model.manifest import (
    MANIFEST_SCHEMA,
    CastStats,
    LeftOut,
    OutputEntry,
    Provenance,
    TensorEntry,
    require_below,
)
from ckpttool.problems import (
    Diagnostic,
    FormatError,
    UnreadableError,
)

S = TypeVar("S", bound="SealedFile")
T = TypeVar("T")

MAX_LINE_BYTES = 1_000_000_000  # ten times the largest header; stops files of other kinds
PIECE_ITEMS = 1000  # of a line that are encoded at a time; a tensor takes about 200 bytes
PIECE_BYTES = 1 << 20  # of a line that are read at a time
OPEN, CLOSE, END = ', "outputs": [', '], "sha256": "', '"}\n'


class Written(Struct, frozen=True):
    """An output that is complete under its final name."""

    rank: int
    path: str
    format: str
    nbytes: int
    tensors: int
    is_kept: bool = False
    cast: CastStats | None = None


class PlannedOutput(Struct, frozen=True):
    """The rank of an output, and its path relative to the manifest."""

    rank: int
    path: str

    def __post_init__(self) -> None:
        require_below(self.path)


class Manifest(Struct, frozen=True):
    """A complete set of outputs, with paths relative to its folder, and notes about the set.

    ``renamed`` is the number of tensors with other names than in the source.
    """

    plan: str
    step: str | None
    outputs: tuple[Written, ...]
    notes: tuple[Diagnostic, ...] = ()
    left_out: LeftOut | None = None
    renamed: int = 0

    @property
    def cast(self) -> CastStats | None:
        """What casts did to the numbers of the full tensors; None without casts."""
        return CastStats.sum(output.cast for output in self.outputs)


def sealed_text(head: Mapping[str, object], outputs: Iterable[Iterable[bytes]]) -> Iterator[bytes]:
    """Yield the text of a sealed document; the lines of a manifest are those of `entry_text`."""
    state = hashlib.sha256()
    lines = (chain((b",\n" if number else b"\n",), line) for number, line in enumerate(outputs))
    first = (piece.encode("ascii") for piece in chain("{", _entries_text(head), (OPEN,)))
    for piece in chain(first, chain.from_iterable(lines), (b"\n",)):
        state.update(piece)
        yield piece
    yield _seal(state.hexdigest())


def _entries_text(entries: Mapping[str, object]) -> Iterator[str]:
    """Yield the entries of a JSON object in pieces, as objects in it may name all tensors."""
    separator = ""
    for is_object, some in groupby(entries.items(), lambda it: isinstance(it[1], Mapping)):
        for key, inner in some if is_object else ():
            assert isinstance(inner, Mapping), "groupby says so"
            yield f"{separator}{json.dumps(key)}: {{"
            yield from _entries_text(inner)
            yield "}"
            separator = ", "
        while piece := dict(islice(some, PIECE_ITEMS)):
            yield separator + json.dumps(piece)[1:-1]
            separator = ", "


def digest_in(last_line: bytes) -> str:
    """Return the SHA-256 in the last line of a sealed document."""
    return last_line.decode().removeprefix(CLOSE).removesuffix(END)


def _seal(digest: str) -> bytes:
    return f"{CLOSE}{digest}{END}".encode()


def entry_text(output: OutputEntry, tensors: Iterable[TensorEntry]) -> Iterator[bytes]:
    """Yield the line of an output with these tensors in pieces, without a newline."""
    head = {"rank": output.rank, "path": output.path, "format": output.format}
    cast = {} if output.cast is None else {"cast": to_builtins(output.cast)}
    line = json.dumps({**head, "nbytes": output.nbytes, **cast, "tensors": []})
    yield line.removesuffix("]}").encode("ascii")
    yield from items_text(tensors)
    yield b"]}"


def items_text(items: Iterable[object]) -> Iterator[bytes]:
    """Yield the items of a JSON array in pieces, without its brackets; see `to_json`."""
    left, separator = iter(items), b""
    while some := [*islice(left, PIECE_ITEMS)]:
        yield separator + to_json(some)[1:-1]
        separator = b", "


def written_strategies(manifest: Path) -> frozenset[str]:
    """Return the strategy files that were written with a set; none without a valid manifest."""
    with suppress(FormatError, FileNotFoundError), opened(manifest) as file:
        head = _entries_of_head(manifest, file.readline(MAX_LINE_BYTES))
        provenance = parse_entries(manifest, Provenance, head)
        return frozenset(strategy.path for strategy in provenance.dst_strategies)
    return frozenset()


def _entries_of_head(path: Path, line: bytes) -> bytes:
    if not line.endswith(f"{OPEN}\n".encode()):
        raise FormatError(str(path), None, "its first line is not one that ckpttool writes")
    return line[: -len(OPEN) - 1] + b"}"


def read_pieces(path: Path, file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a file in pieces; raise `FormatError` if one exceeds `MAX_LINE_BYTES`."""
    nbytes = 0
    while piece := file.readline(PIECE_BYTES):
        nbytes += len(piece)
        if nbytes > MAX_LINE_BYTES:
            reason = f"a line of more than {MAX_LINE_BYTES} bytes, which ckpttool does not write"
            raise FormatError(str(path), None, reason)
        nbytes = 0 if piece.endswith(b"\n") else nbytes
        yield piece


def parse_entries(path: Path, kind: type[T], line: bytes) -> T:
    """Return the JSON object in a text from a file; paths in it may not be UTF-8."""
    with _of_file(path):
        return parse_as(kind, line, halves="surrogateescape")


@contextmanager
def _of_file(path: Path) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise FormatError(str(path), None, str(error)) from error


def parse_head(path: Path, kind: type[T], line: bytes, entry: str = "tensors") -> T:
    """Return what a line, or its first piece, says before an entry that may be long."""
    at = line.find(f', "{entry}": '.encode())
    return parse_entries(path, kind, line if at < 0 else line[:at] + b"}")


class _Schema(Struct, frozen=True):
    """The version of a sealed document."""

    schema: int


class SealedFile(Struct, frozen=True):
    """A sealed document in a file."""

    path: Path
    head: bytes
    digest: str

    @classmethod
    def read(cls: type[S], path: Path) -> S:
        """Verify the checksum of a document and return it; its outputs are read later.

        Raises
        ------
        FormatError
            The file is damaged or of another kind, has an unknown schema, or cannot be read.
        FileNotFoundError
            The file does not exist.
        """
        with opened(path) as file:
            lines = _verified_lines(path, file, are_cut=True)
            first, rest = next(lines), deque(lines, maxlen=1)
        file_read = cls(path, _entries_of_head(path, first), digest_in(rest[0]))
        schema = parse_head(path, _Schema, file_read.head, "ckpttool").schema  # it is the first
        if schema != MANIFEST_SCHEMA:
            reason = f"schema: expected {MANIFEST_SCHEMA}, got {schema}"
            raise FormatError(str(path), None, reason)
        return file_read

    def entries(self, kind: type[T]) -> T:
        """Return those entries of the head that a record has."""
        return parse_entries(self.path, kind, self.head)

    def parts(self) -> Callable[[type[T]], T]:
        """Return `entries` for several kinds; the head, which may be long, is parsed once."""
        head = self.entries(dict[str, object])

        def entries(kind: type[T]) -> T:
            with _of_file(self.path):
                return convert_as(kind, head)

        return entries

    def provenance(self) -> Provenance:
        """Return the provenance; a manifest has neither stamps of inputs nor a command."""
        return self.entries(Provenance)

    def planned(self) -> Iterator[PlannedOutput]:
        """Yield rank and path of the outputs; see `lines`."""
        return self._parse_lines(lambda line: parse_head(self.path, PlannedOutput, line), True)

    def texts(self) -> Iterator[tuple[PlannedOutput, bytes]]:
        """Yield rank and path of the outputs, and their lines as they stand; see `lines`."""
        return self._parse_lines(lambda it: (parse_head(self.path, PlannedOutput, it), it))

    def lines(self, kind: type[T]) -> Iterator[T]:
        """Yield the entries of the outputs.

        Raises
        ------
        FormatError
            A line is not such a JSON object, or the file has changed since it was verified.
        """
        return self._parse_lines(lambda line: parse_entries(self.path, kind, line))

    def _parse_lines(self, parse: Callable[[bytes], T], are_cut: bool = False) -> Iterator[T]:
        with opened(self.path) as file:
            for line, _ in pairwise(islice(_verified_lines(self.path, file, are_cut), 1, None)):
                yield parse(line.rstrip(b",\n"))


class ManifestFile(SealedFile, frozen=True):
    """A manifest in a file."""

    def outputs(self) -> Iterator[OutputEntry]:
        """Yield the outputs; raise `FormatError` if a line does not describe one."""
        return self.lines(OutputEntry)

    def strategy_problems(self) -> Iterator[str]:
        """Yield the problems of strategy files that were written with the set, in its folder.

        A strategy file in another folder is not checked: it may stay there when the set is moved.
        """
        for strategy in self.provenance().dst_strategies:
            path, nbytes = strategy.path, strategy.nbytes
            if ".." in Path(path).parts:
                continue
            try:
                with opened(self.path.parent / path) as file:
                    size = os.fstat(file.fileno()).st_size
                    digest = hashlib.sha256(file.read() if size == nbytes else b"").hexdigest()
            except FileNotFoundError:
                yield f"{path}: the strategy that was written with it is missing"
                continue
            except FormatError as error:
                yield f"{path}: {error.reason}"
                continue
            message = f"{path}: is not the strategy that was written: expected"
            if size != nbytes:
                yield f"{message} {nbytes} bytes, found {size}"
            elif digest != strategy.sha256:
                yield f"{message} SHA-256 {strategy.sha256}, found {digest}"

    def manifest(self) -> Manifest:
        """Return the manifest without the tensors of its outputs."""
        outputs = tuple(
            Written(
                *(out.rank, out.path, out.format, out.nbytes, len(out.tensors)),
                cast=out.cast,
            )
            for out in self.outputs()
        )
        provenance = self.provenance()
        return Manifest(
            provenance.plan,
            provenance.step,
            outputs,
            left_out=provenance.left_out,
            renamed=len(provenance.renamed),
        )


WRITE_AGAIN = "put a copy of it back, or write the set again with --overwrite"


def remedy_for(error: FormatError) -> str:
    """Return the remedy for a manifest that is damaged or cannot be read."""
    if isinstance(error, UnreadableError):
        return "run it as the owner"
    return WRITE_AGAIN


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Open a file of ours; raise `FormatError` for system errors, and for a pipe."""
    try:
        if not (path.is_file() or path.is_dir()) and path.exists():
            raise FormatError(str(path), None, "a pipe or a device, not a file")
        with open_file(path) as file:
            yield file
    except FileNotFoundError:
        raise
    except OSError as error:
        raise unreadable(str(path), error) from error


def _verified_lines(path: Path, file: BinaryIO, are_cut: bool = False) -> Iterator[bytes]:
    """Yield the lines; raise `FormatError` unless the last one has the SHA-256 of the others.

    If they ``are_cut``, only the first piece of each is yielded, but all of the first line.
    """
    state = hashlib.sha256()
    is_first, pieces, last = True, list[bytes](), b""
    for piece in read_pieces(path, file):
        state.update(last)
        if last.endswith(b"\n"):
            yield b"".join(pieces)
            is_first, pieces = False, []
        if is_first or not (are_cut and pieces):
            pieces.append(piece)
        last = piece
    line = b"".join(pieces)
    if line == _seal(state.hexdigest()):
        yield line
        return
    reason = "changed since it was written: its checksum does not match"
    if not line.startswith(CLOSE.encode()):
        reason = "no checksum at its end: cut short or changed"
    raise FormatError(str(path), None, reason)
