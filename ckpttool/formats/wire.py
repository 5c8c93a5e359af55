"""Protocol buffers wire format, read with seeks: only requested values are fetched.

It knows fields and no message, so ``.ckpt`` files, strategy files and foreign messages are read
with the same limits.  The reader of a message knows what its fields mean.

A message is a sequence of fields.  A field is a key, the varint ``number << 3 | wire type``, and a
value: wire type 0 a varint, 1 eight bytes, 2 a varint length and that many bytes, 5 four bytes.
MindSpore's files never have groups (3, 4), a construct of the first protobuf version.  A varint has
7 bits a byte, least significant first, with the high bit set on all but the last; at most 10 bytes.

Limits: each length is checked against the end of the enclosing message before it is used, so a
hostile length allocates nothing.  Field number 0 and groups are errors.

Source
------
The protocol buffers documentation, "Encoding".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import NamedTuple, Protocol

from ckpttool.formats.local import ReadFile, open_source
from ckpttool.model.tensors import StoredFile
from ckpttool.problems import FormatError
from ckpttool.wording import count

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5

MAX_NAME_BYTES = 1 << 20  # a name is read into memory; real names are far shorter
_DAMAGED = "damaged, or of another format"
NEAR_BYTES = 4096  # between two parts; a call takes longer than to read as many
MAX_CALL_BYTES = 256 << 10  # of parts that are read together, and of the bytes between them
WINDOW_BYTES = 4096  # one read fetches the headers of a record and of the small tensors behind it
NEXT_BYTES = 16 << 10  # of small tensors one after the other, with their contents


class Field(NamedTuple):
    """One field of a message.

    ``value`` is the number of a varint.  For all other wire types it is 0, and the payload lies in
    the file from byte ``start`` to byte ``stop``.
    """

    number: int
    wire_type: int
    value: int
    start: int
    stop: int


class ByteSource(Protocol):
    """Bytes that are addressed by offset: of a file, or of its plaintext."""

    @property
    def size(self) -> int:
        """Number of the bytes."""
        ...

    def pread(self, nbytes: int, offset: int) -> bytes:
        """Return up to ``nbytes`` bytes from ``offset`` on; fewer at the end."""
        ...

    def close(self) -> None:
        """Close the file."""
        ...


class Memory:
    """Bytes in memory as a `ByteSource`, so that a document is read before it is on disk."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.size = len(data)

    def pread(self, nbytes: int, offset: int) -> bytes:
        """Return up to ``nbytes`` bytes from ``offset`` on; fewer at the end."""
        return self._data[offset : offset + nbytes]

    def close(self) -> None:
        """Do nothing: the bytes are in memory."""


class Parts:
    """Bytes at offsets of a file, to compare with many files.

    ``near`` parts lie close together, and one call reads them with the bytes between them.  Each
    entry has the first byte of the call, the number of bytes, the function that picks the parts,
    and the parts.  All other parts are ``far``.
    """

    def __init__(self, starts: Iterable[int], parts: Iterable[bytes]) -> None:
        groups: list[list[tuple[int, bytes]]] = []
        last = -1
        for start, part in zip(starts, parts, strict=True):
            if groups and start - last <= NEAR_BYTES and last - groups[-1][0][0] < MAX_CALL_BYTES:
                groups[-1].append((start, part))
            else:
                groups.append([(start, part)])
            last = start + len(part)
        self.near: list[tuple[int, int, Callable[[bytes], object], tuple[bytes, ...]]] = []
        for group in groups:
            if len(group) > 1:
                first, (final, end) = group[0][0], group[-1]
                places = (slice(at - first, at - first + len(part)) for at, part in group)
                wanted = tuple(part for _, part in group)
                self.near.append((first, final + len(end) - first, itemgetter(*places), wanted))
        alone = [group[0] for group in groups if len(group) == 1]
        self.starts = [start for start, _ in alone]
        self.far = [part for _, part in alone]
        self.sizes = [len(part) for part in self.far]

    @property
    def spans(self) -> tuple[Sequence[int], Sequence[int]]:
        """The first bytes of all calls, and their numbers of bytes."""
        starts, sizes, *_ = zip(*self.near, strict=True) if self.near else ((), ())
        return (*starts, *self.starts), (*sizes, *self.sizes)


class WireReader:
    """A file of protobuf messages, addressed by byte offset; one window of it is in memory.

    Use as a context manager, in one thread.  ``source`` has the bytes if they are not in a file, or
    differ from those on disk; the reader closes it.

    Raises
    ------
    FormatError
        Every method raises it when the bytes do not follow the wire format.
    """

    def __init__(self, file: StoredFile, source: ByteSource | None = None) -> None:
        self.file, self.path = file, file.path
        self._source = source or open_source(file)
        self.size = self._source.size
        self._window = b""
        self._window_start = 0

    def __enter__(self) -> WireReader:
        return self

    def __exit__(self, *error: object) -> None:
        self._source.close()

    def read(self, start: int, stop: int) -> bytes:
        """Return the bytes from ``start`` to ``stop``."""
        at = start - self._window_start
        if at < 0 or at + stop - start > len(self._window):
            self._read_window(start, stop - start)
            at = 0
        data = self._window[at : at + stop - start]
        if len(data) < stop - start:
            facts = f"expected {stop - start} bytes, found {len(data)}"
            raise FormatError(self.path, start, "the file is cut short", facts=facts)
        return data

    def has(self, parts: Parts) -> bool:
        """Return whether the file, which is plain, has all these bytes at these offsets."""
        # A thousand ranks have millions of parts, so the loops run in C.
        file = self._source
        assert isinstance(file, ReadFile), "only headers of plain files are cached"
        pread = file.pread
        near = (pick(pread(nbytes, start)) == wanted for start, nbytes, pick, wanted in parts.near)
        # If headers differ, the first bytes do, mostly.
        return all(near) and all(
            file.preads(parts.sizes[some], parts.starts[some]) == parts.far[some]
            for some in (slice(1), slice(1, None))
        )

    def window(self, start: int, nbytes: int) -> tuple[bytes, int]:
        """Return bytes of the file, and the index of byte ``start`` in them.

        At least ``nbytes`` bytes follow from there, or the rest of the file.
        """
        at = start - self._window_start
        if at < 0 or at + nbytes > len(self._window):
            self._read_window(start, nbytes)
            at = 0
        return self._window, at

    def _read_window(self, start: int, nbytes: int) -> None:
        """Read the window from ``start`` on; a larger one if it continues the one before."""
        behind = self._window_start + len(self._window)
        is_next = self._window_start < start <= behind + NEAR_BYTES and self._window
        nbytes = max(NEXT_BYTES if is_next else WINDOW_BYTES, nbytes)
        self._window = self._source.pread(nbytes, start)
        self._window_start = start

    def varint(self, start: int, stop: int) -> tuple[int, int]:
        """Return the unsigned number at ``start`` and the offset behind it, at most ``stop``."""
        at = start - self._window_start
        if start < stop and 0 <= at < len(self._window) and self._window[at] < 0x80:
            return self._window[at], start + 1  # the usual case; saves a fifth of the time
        data = self.read(start, min(start + 10, stop))
        value = shift = 0
        for at, byte in enumerate(data):
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value, start + at + 1
            shift += 7
        facts = "its end is missing" if len(data) < 10 else "more than 10 bytes"
        raise FormatError(self.path, start, "a number is not valid", facts=facts)

    def fields(self, start: int, stop: int) -> Iterator[Field]:
        """Yield the fields of the message from byte ``start`` to byte ``stop``, in file order."""
        at = start
        while at < stop:
            key, behind = self.varint(at, stop)
            number, wire_type = key >> 3, key & 7
            if not 0 < number < 1 << 29:
                raise FormatError(self.path, at, _DAMAGED)
            value = 0
            first = behind
            if wire_type == LENGTH:
                nbytes, first = self.varint(behind, stop)
                last = first + nbytes
            elif wire_type == VARINT:
                value, last = self.varint(behind, stop)
            elif wire_type in (FIXED64, FIXED32):
                last = first + (8 if wire_type == FIXED64 else 4)
            else:
                raise FormatError(self.path, at, _DAMAGED)
            if last > stop:
                what = "file" if stop == self.size else "record"
                reason = f"the {what} is cut short or damaged"
                facts = f"expected {count(last - first, 'byte')} from there, found {stop - first}"
                raise FormatError(self.path, at, reason, facts=facts)
            yield Field(number, wire_type, value, first, last)
            at = last

    def number(self, field: Field) -> int:
        """Return the signed 64-bit value of an integer field that is not repeated."""
        if field.wire_type != VARINT:
            raise FormatError(self.path, field.start, _DAMAGED)
        return _signed(field.value)

    def numbers(self, field: Field) -> list[int]:
        """Return the signed 64-bit values of a repeated integer field, packed or not."""
        if field.wire_type == VARINT:
            return [_signed(field.value)]
        values = []
        at = self._payload(field)
        while at < field.stop:
            value, at = self.varint(at, field.stop)
            values.append(_signed(value))
        return values

    def text(self, field: Field) -> str:
        """Return the UTF-8 string of a field of at most `MAX_NAME_BYTES` bytes."""
        start = self._payload(field)
        if field.stop - start > MAX_NAME_BYTES:
            facts = f"{field.stop - start} bytes; expected at most {MAX_NAME_BYTES}"
            raise FormatError(self.path, start, "a name is too long", facts=facts)
        data = self.read(start, field.stop)
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            facts = f"after {data[: error.start].decode()!r}" if error.start else ""
            at = start + error.start
            raise FormatError(self.path, at, "a name is not UTF-8", facts=facts) from error

    def _payload(self, field: Field) -> int:
        if field.wire_type != LENGTH:
            raise FormatError(self.path, field.start, _DAMAGED)
        return field.start


def _signed(value: int) -> int:
    value &= (1 << 64) - 1  # ten bytes of seven bits could hold more; protobuf drops the excess
    return value - (1 << 64) if value >> 63 else value


@lru_cache(maxsize=1 << 12)  # few numbers occur, and most of them often
def encode_varint(value: int) -> bytes:
    """Return a varint; of a negative number as 64-bit two's complement, ten bytes long.

    >>> encode_varint(300).hex(), len(encode_varint(-1))
    ('ac02', 10)
    """
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def decode_varint(data: bytes) -> int:
    """Return the unsigned number that a complete varint stands for.

    >>> decode_varint(bytes.fromhex("ac02"))
    300
    """
    return sum((byte & 0x7F) << 7 * i for i, byte in enumerate(data))


def copy_field(reader: WireReader, field: Field) -> bytes:
    """Return a whole field as it is in a file."""
    if field.wire_type == VARINT:
        return encode_number(field.number, field.value)
    payload = reader.read(field.start, field.stop)
    if field.wire_type == LENGTH:
        return encode_bytes(field.number, payload)
    return encode_key(field.number, field.wire_type) + payload


def encode_key(number: int, wire_type: int) -> bytes:
    """Return the key of a field."""
    return encode_varint(number << 3 | wire_type)


def encode_bytes(number: int, payload: bytes) -> bytes:
    """Return a whole length-delimited field."""
    return encode_key(number, LENGTH) + encode_varint(len(payload)) + payload


def encode_number(number: int, value: int) -> bytes:
    """Return a whole varint field."""
    return encode_key(number, VARINT) + encode_varint(value)
