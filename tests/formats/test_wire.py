"""The protobuf wire format, against bytes spelled by hand."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.formats import wire
from ckpttool.formats.wire import (
    MAX_CALL_BYTES,
    NEAR_BYTES,
    Parts,
    WireReader,
    encode_bytes,
    encode_key,
    encode_number,
    encode_varint,
)
from ckpttool.model.tensors import StoredFile
from ckpttool.problems import FormatError
from tests.support.file_bytes import message, number, packed, varint


@pytest.fixture
def open_bytes(tmp_path):
    """A function that gives a reader of some bytes; all readers are closed at the end."""
    readers = []

    def opened(data):
        path = tmp_path / f"{len(readers)}.bin"
        path.write_bytes(data)
        readers.append(WireReader(StoredFile(str(path))).__enter__())
        return readers[-1]

    yield opened
    for reader in readers:
        reader.__exit__(None, None, None)


def fields(reader):
    return list(reader.fields(0, reader.size))


@given(st.integers(0, 2**64 - 1))
def test_encoded_varints_are_as_spelled_by_hand(value):
    assert encode_varint(value) == varint(value)


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b"\x00", 0),
        (b"\x7f", 127),
        (b"\x80\x01", 128),
        (b"\xac\x02", 300),
        (b"\x80\x80\x00", 0),  # longer than needed, which is allowed
        (b"\xff" * 9 + b"\x01", 2**64 - 1),
    ],
)
def test_varints_are_read(open_bytes, data, value):
    reader = open_bytes(data + b"\x55")
    assert reader.varint(0, len(data) + 1) == (value, len(data))


def test_a_varint_of_eleven_bytes_is_an_error(open_bytes):
    with pytest.raises(FormatError, match=r"byte 0: .*more than 10 bytes"):
        open_bytes(b"\x80" * 10 + b"\x01").varint(0, 11)


def test_a_varint_that_its_message_cuts_short_is_an_error(open_bytes):
    reader = open_bytes(b"\x55\x80\x01")
    with pytest.raises(FormatError, match=r"byte 1: .*; its end is missing"):
        reader.varint(1, 2)
    with pytest.raises(FormatError, match=r"byte 3: .*; its end is missing"):
        reader.varint(3, 3)


def test_negative_numbers_come_back_from_ten_bytes(open_bytes):
    assert encode_number(1, -1) == b"\x08" + b"\xff" * 9 + b"\x01"
    (field,) = fields(reader := open_bytes(encode_number(1, -1)))
    assert reader.number(field) == -1
    assert reader.numbers(field) == [-1]


def test_all_wire_types_are_walked(open_bytes):
    data = number(1, 300) + b"\x11" + bytes(8) + message(3, b"abc") + b"\x25" + bytes(4)
    found = fields(open_bytes(data))
    assert [(f.number, f.wire_type, f.value) for f in found] == [
        (1, wire.VARINT, 300),
        (2, wire.FIXED64, 0),
        (3, wire.LENGTH, 0),
        (4, wire.FIXED32, 0),
    ]
    assert [f.stop for f in found] == [3, 12, 17, 22]
    assert (found[2].start, found[1].start) == (14, 4)


def test_large_field_numbers_are_walked(open_bytes):
    largest = (1 << 29) - 1
    (field,) = fields(open_bytes(encode_bytes(largest, b"ab")))
    assert (field.number, field.stop - field.start) == (largest, 2)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\x00\x01", "byte 0: damaged, or of another format$"),
        (encode_key(1 << 29, 0) + b"\x01", "byte 0: damaged, or of another format$"),
        (b"\x0b\x0c", "byte 0: damaged, or of another format$"),
        (b"\x0e\x00", "byte 0: damaged, or of another format$"),
        (b"\x0f\x00", "byte 0: damaged, or of another format$"),
        (
            b"\x0a\x05ab",
            "byte 0: the file is cut short or damaged; expected 5 bytes from there, found 2$",
        ),
        (b"\x09abc", "expected 8 bytes from there, found 3$"),
        (b"\x0dabc", "expected 4 bytes from there, found 3$"),
        (
            b"\x0a" + varint(2**63) + b"ab",
            "expected 9223372036854775808 bytes from there, found 2$",
        ),
        (
            b"\x0a" + varint(2**64 - 1) + b"ab",
            "expected 18446744073709551615 bytes from there, found 2$",
        ),
        (b"\x08", "a number is not valid"),
        (b"\x80", "a number is not valid"),
    ],
)
def test_what_is_no_message_is_an_error(open_bytes, data, reason):
    with pytest.raises(FormatError, match=reason):
        fields(open_bytes(data))


def test_a_field_may_not_reach_out_of_its_message_into_the_next(open_bytes):
    reader = open_bytes(b"\x0a\x04abcd" + b"\x0a\x01e")
    with pytest.raises(
        FormatError, match=r"the record is cut short .*; expected 4 bytes from there, found 3$"
    ):
        list(reader.fields(0, 5))


@given(st.lists(st.integers(-(2**63), 2**63 - 1)))
def test_repeated_numbers_are_the_same_packed_or_not(tmp_path_factory, values):
    path = tmp_path_factory.getbasetemp() / "numbers.bin"
    for data in (number(1, *values), packed(1, *values)):
        path.write_bytes(data)
        with WireReader(StoredFile(str(path))) as reader:
            found = [n for field in fields(reader) for n in reader.numbers(field)]
        assert found == values


def test_packed_numbers_that_end_inside_one_are_an_error(open_bytes):
    (field,) = fields(reader := open_bytes(message(1, b"\x01\x80")))
    with pytest.raises(FormatError, match="byte 3: a number is not valid"):
        reader.numbers(field)


@pytest.mark.parametrize("data", [b"\x09" + bytes(8), b"\x0d" + bytes(4)])
def test_fixed_width_fields_are_neither_numbers_nor_names(open_bytes, data):
    (field,) = fields(reader := open_bytes(data))
    for read in (reader.numbers, reader.number, reader.text):
        with pytest.raises(FormatError, match=r"damaged, or of another format$"):
            read(field)


def test_a_single_number_is_not_packed(open_bytes):
    (field,) = fields(reader := open_bytes(packed(1, 5)))
    with pytest.raises(FormatError, match=r"byte 2: damaged, or of another format$"):
        reader.number(field)


def test_names_have_a_limit_and_are_utf8(open_bytes, monkeypatch):
    (field,) = fields(reader := open_bytes(message(1, "重み".encode())))
    monkeypatch.setattr(wire, "MAX_NAME_BYTES", 6)
    assert reader.text(field) == "重み"
    monkeypatch.setattr(wire, "MAX_NAME_BYTES", 5)
    with pytest.raises(FormatError, match="a name is too long; 6 bytes; expected at most 5"):
        reader.text(field)
    for data, said in ((b"\xff", "byte 2: a name is not UTF-8$"), (b"w\xff", "UTF-8; after 'w'$")):
        (field,) = fields(reader := open_bytes(message(1, data)))
        with pytest.raises(FormatError, match=said):
            reader.text(field)


def test_reads_go_through_a_window_in_any_order(open_bytes, monkeypatch):
    monkeypatch.setattr(wire, "WINDOW_BYTES", 16)
    data = bytes(range(256)) * 4
    reader = open_bytes(data)
    for start, stop in [(0, 8), (4, 12), (10, 30), (2, 3), (500, 900), (1000, 1024), (0, 1024)]:
        assert reader.read(start, stop) == data[start:stop]
    with pytest.raises(FormatError, match="the file is cut short; expected 10 bytes, found 4"):
        reader.read(1020, 1030)


@pytest.mark.parametrize("window", [1, 2, 5, 11, 4096])
def test_fields_are_the_same_through_any_window(open_bytes, monkeypatch, window):
    data = number(1, 1, 2**40, -1) + message(200, b"x" * 300) + number(3, 0)
    expected = fields(open_bytes(data))
    monkeypatch.setattr(wire, "WINDOW_BYTES", window)
    assert fields(open_bytes(data)) == expected


def test_a_file_that_shrinks_while_it_is_read_is_an_error(open_bytes):
    reader = open_bytes(message(1, bytes(10_000)) + number(1, 5))
    os.truncate(reader.path, 100)
    with pytest.raises(FormatError, match="expected"):
        fields(reader)


def test_near_parts_are_read_together_and_every_byte_of_all_is_compared(open_bytes):
    gaps = [0, 3, NEAR_BYTES, NEAR_BYTES + 1, 1, 0, 3 * NEAR_BYTES, *[NEAR_BYTES] * 100]
    starts, at = [], 0
    for gap in gaps:
        at += gap
        starts.append(at)
        at += 4
    data = bytes(i % 251 for i in range(at))
    parts = Parts(starts, [data[start : start + 4] for start in starts])
    reader = open_bytes(data)
    assert reader.has(parts)
    spans = [*zip(*parts.spans, strict=True)]
    assert spans[:2] == [(0, 15 + NEAR_BYTES), (starts[3], 13)]
    assert len(spans) == 4
    assert max(nbytes for _, nbytes in spans) < MAX_CALL_BYTES + NEAR_BYTES + 8
    held = {start + i for start in starts for i in range(4)}
    for changed in (
        *(start + i for start in starts for i in range(4)),
        4,
        9,
        starts[3] - 1,
        at - 5,
    ):
        other = bytearray(data)
        other[changed] ^= 1
        assert open_bytes(bytes(other)).has(parts) is (changed not in held)
    assert not open_bytes(data[:-1]).has(parts)
