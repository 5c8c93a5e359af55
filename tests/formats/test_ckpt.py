"""MindSpore's own format, against files that MindSpore wrote and records spelled by hand."""

from pathlib import Path

import pytest

from ckpttool.formats import ckpt
from ckpttool.formats.ckpt import Ckpt
from ckpttool.model.tensors import StoredFile, TensorMeta
from ckpttool.problems import FormatError, UnsupportedError
from ckpttool.storage.checksums import compute_checksum
from tests.support.checkpoints import create_file, seal_file
from tests.support.corpus import GOLDEN, SAMPLES
from tests.support.file_bytes import (
    message,
    number,
    packed,
    read_contents,
    record,
    varint,
    write_contents,
)
from tests.support.readers import ckpt_records

FILES = SAMPLES / "files"
CHUNKED = sorted((GOLDEN / "chunked_values" / "src").rglob("*.ckpt"))

# Golden files that are damaged, encrypted, or strategies.
REFUSED_FILES = {"broken_inputs", "encrypted_cbc", "encrypted_gcm", "merged_again", "layout_dicts"}
REFUSED_FILES |= {f"{name}.ckpt" for name in ("aes_cbc128", "aes_gcm128", "aes_gcm256", "sm4_cbc")}
REFUSED_FILES |= {"enc_and_crc_unreadable.ckpt", "legacy_2.0.0_gcm.ckpt", "truncated.ckpt"}

# Golden files that are read and that save_checkpoint of MindSpore 2.10 did not write like this.
OTHERWISE = {
    "chunked_by_rows": "its asynchronous path, which cuts between rows",
    "chunked_values": "1 KiB instead of 512 MiB; see the test for it",
    "crc_damaged": "with a checksum that is not right",
    "legacy_scalar_dims": "scalars as MindSpore 2.0 wrote them",
    "legacy_1.0.0.ckpt": "scalars as MindSpore 1.0 wrote them",
    "legacy_2.0.0.ckpt": "scalars as MindSpore 2.0 wrote them",
    "map_parameter.ckpt": "in blocks of two entries instead of 512 MiB",
    "unknown_fields": "fields put in between",
}


@pytest.fixture
def write(tmp_path):
    def written(*parts):
        path = tmp_path / "net.ckpt"
        path.write_bytes(b"".join(parts))
        return str(path)

    return written


def read(path):
    return Ckpt().read_index(StoredFile(str(path)))


def made_again(path, folder, with_checksum=True):
    index = read(path)
    metas = [tensor.meta for tensor in index.tensors.values()]
    attrs = index.attrs if with_checksum else {}
    again = create_file(Ckpt(), str(folder / "again.ckpt"), metas, attrs)
    write_contents(again, read_contents(index))
    seal_file(Ckpt(), again.path, compute_checksum(again) if again.attrs else None)
    return Path(again.path).read_bytes()


# -------------------------------------------------------------- byte for byte as MindSpore


def golden_files():
    for path in sorted(GOLDEN.rglob("*.ckpt")):
        if "strateg" not in str(path.relative_to(GOLDEN)):
            yield path


def test_every_golden_file_is_written_again_byte_for_byte(tmp_path):
    same, different = 0, set()
    for path in golden_files():
        try:
            again = made_again(path, tmp_path)
        except FormatError:
            assert REFUSED_FILES & set(path.parts), path
            continue
        if again == path.read_bytes():
            same += 1
        else:
            reasons = OTHERWISE.keys() & set(path.parts)
            assert reasons, path
            different |= reasons
    assert different == set(OTHERWISE)
    assert same > 600


@pytest.mark.parametrize("path", CHUNKED, ids=lambda path: path.parent.name)
def test_chunked_tensors_are_written_as_mindspore_chunks_them(path, tmp_path, monkeypatch):
    monkeypatch.setattr(ckpt, "MAX_RECORD_BYTES", 1024)
    assert len(ckpt_records(path)) > len(read(path).tensors)
    assert made_again(path, tmp_path) == path.read_bytes()


@pytest.mark.parametrize("nbytes", [1, 1023, 1024, 1025, 2048, 3000])
def test_chunked_tensors_are_read_back_as_created(nbytes, tmp_path, monkeypatch):
    monkeypatch.setattr(ckpt, "MAX_RECORD_BYTES", 1024)
    metas = [TensorMeta("a", "Int8", (nbytes,)), TensorMeta("b", "Float32", (3,))]
    created = create_file(Ckpt(), str(tmp_path / "net.ckpt"), metas, {})
    assert len(created.tensors["a"].extents) == -(-nbytes // 1024)
    assert dict(read(created.path).tensors) == dict(created.tensors)


def test_a_checksum_is_left_out_and_nothing_else_changes(tmp_path):
    for path in (FILES / "crc.ckpt", *(GOLDEN / "crc_check" / "src").rglob("*.ckpt")):
        assert made_again(path, tmp_path, with_checksum=False) == path.read_bytes()[:-17]


# ------------------------------------------------------------------------ what is read


def test_dims_zero_mean_a_scalar_only_if_there_is_one_element(write):
    index = read(
        write(
            record("scalar", "Float32", (0,), bytes(4)),
            record("empty", "Float32", (0,), b""),
            record("rows", "Float32", (0, 3), b""),
        )
    )
    assert [tensor.meta.shape for tensor in index.tensors.values()] == [(), (0,), (0, 3)]
    assert index.tensors["empty"].extents == ()
    with pytest.raises(FormatError, match=r"dims \[0\] of Float32 need 0 bytes, found 8"):
        read(write(record("w", "Float32", (0,), bytes(8))))


def test_unknown_fields_are_skipped_at_every_level(write):
    junk = number(15, 7) + message(16, b"junk") + b"\x89\x01" + bytes(8) + b"\x8d\x01" + bytes(4)
    tensor = junk + number(1, 2) + junk + message(2, b"Int16") + message(3, b"abcd") + junk
    value = junk + message(1, b"w") + junk + message(2, tensor) + junk
    index = read(write(junk, message(1, value), junk, record("v"), junk))
    assert list(index.tensors) == ["w", "v"]
    assert read_contents(index)["w"] == b"abcd"


def one_record(*parts):
    return message(1, message(1, b"w"), message(2, *parts))


SPELLINGS = {
    "no content": (one_record(number(1, 0, 3), message(2, b"Int8")), "Int8", (0, 3)),
    "packed dims": (
        one_record(packed(1, 2, 300), message(2, b"Int8"), message(3, bytes(600))), "Int8", (2, 300)
    ),
    "fields in another order": (
        message(1, message(2, message(3, bytes(8)), message(2, b"Float32"), number(1, 2)),
                message(1, b"w")), "Float32", (2,)
    ),
    "Uint8": (record("w", "Uint8", (8,)), "UInt8", (8,)),
    "random state": (record("w", "random_op", (), bytes(16)), "random_op", (16,)),
    "random state of dims 0": (record("w", "random_op", (0,), bytes(16)), "random_op", (16,)),
}  # fmt: skip


@pytest.mark.parametrize(("data", "dtype", "shape"), SPELLINGS.values(), ids=SPELLINGS)
def test_a_record_may_be_spelled_otherwise(write, data, dtype, shape):
    assert read(write(data)).tensors["w"].meta == TensorMeta("w", dtype, shape)


@pytest.mark.parametrize("text", ["", "a", "Größe", "𝄞", "\0b", "x" * 5000])
def test_strings_are_as_numpy_keeps_them(write, text):
    content = text.encode("utf-32-le") or bytes(4)
    data = record("s", "str", (0,), content)
    assert read(write(data)).tensors["s"].meta.text == text
    created = create_file(Ckpt(), write(), [TensorMeta("s", "str", (), text)], {})
    assert Path(created.path).read_bytes() == data


@pytest.mark.parametrize("dims", [(2,), (0, 0), (1,)])
def test_strings_have_no_shape(write, dims):
    with pytest.raises(FormatError, match="s: not a valid string; expected dims"):
        read(write(record("s", "str", dims, bytes(8))))


@pytest.mark.parametrize("content", [b"", b"abc", b"abcde", b"\0\0\x11\0", b"\0\xd8\0\0"])
def test_strings_are_utf_32(write, content):
    with pytest.raises(FormatError, match="string"):
        read(write(record("s", "str", (0,), content)))


def test_strings_have_a_limit(write, monkeypatch):
    monkeypatch.setattr(ckpt, "MAX_TEXT_BYTES", 100)
    with pytest.raises(UnsupportedError, match="the string is too long; 104 bytes; at most 100"):
        read(write(record("s", "str", (0,), bytes(104))))


def test_a_checksum_is_recognised_with_and_without_records(write):
    trailer = b"crc_num" + (1234567890).to_bytes(10, "big")
    index = read(write(record(), trailer))
    assert (list(index.tensors), index.attrs) == (["w"], {"crc_num": "1234567890"})
    assert not read(write(trailer)).tensors
    with pytest.raises(FormatError):
        read(write(record(), trailer[:-1]))


# ------------------------------------------------------------------------ what is refused


TENSOR = number(1, 2) + message(2, b"Float32") + message(3, bytes(8))
REFUSED = {
    "negative size": (record(dims=(-2,)), r"w: a size in dims \[-2\] is negative"),
    "too short": (
        record(dims=(3,)),
        "w: its shape does not fit its bytes; .* need 12 bytes, found 8",
    ),
    "too long": (record(dims=(1,)), "need 4 bytes, found 8"),
    "huge dims": (record(dims=(2**62, 2**62)), "bytes, found 8"),
    "unknown type": (record(dtype="Float7"), "unknown tensor_type 'Float7'"),
    "stored again later": (
        record("w") + record("v") + record("w"),
        "w: stored twice; first at byte",
    ),
    "stored again at once": (record("w") + record("w"), "w: stored more than once; 2 times"),
    "another shape at once": (
        record("w") + record("w", dims=(2, 1)),
        "consecutive records differ in type",
    ),
    "another type at once": (
        record("w") + record("w", "Int32"),
        "consecutive records differ in type",
    ),
    "no name": (message(1, message(2, TENSOR)), "a record has no tag"),
    "no tensor": (message(1, message(1, b"w")), "a record has no tensor"),
    "no type": (
        message(1, message(1, b"w"), message(2, number(1, 2))),
        "the record has no tensor_type",
    ),
    "no fields": (message(1), "a record has no tag"),
    "tensor a number": (message(1, message(1, b"w"), number(2, 5)), "a record has no tensor"),
    "content a number": (
        message(1, message(1, b"w"), message(2, number(1, 2), message(2, b"Int8"), number(3, 5))),
        "tensor_content is not bytes",
    ),
    "name a number": (
        message(1, number(1, 5), message(2, TENSOR)),
        "byte 36: damaged, or of another format$",
    ),
    "name not UTF-8": (message(1, message(1, b"\xff"), message(2, TENSOR)), "not UTF-8"),
    "length 2**63": (
        b"\x0a" + varint(2**63) + bytes(50),
        "expected 9223372036854775808 bytes from there, found 50$",
    ),
    "endless varint": (b"\x0a" + b"\xff" * 50, "more than 10 bytes"),
    "group": (b"\x0b\x0c", "byte 33: damaged, or of another format$"),
    "random state of two axes": (record("r", "random_op", (2, 3)), "need 6 bytes"),
}


@pytest.mark.parametrize(("data", "reason"), REFUSED.values(), ids=REFUSED)
def test_records_that_make_no_sense_are_errors(write, data, reason):
    with pytest.raises(FormatError, match=reason):
        read(write(record("before"), data))


def test_an_error_says_at_which_byte_its_record_begins(write):
    with pytest.raises(FormatError) as caught:
        read(write(record("v"), record("w", "Float7")))
    assert caught.value.offset == len(record("v"))
    assert str(caught.value).startswith(f"{caught.value.path}: byte {len(record('v'))}: w: ")
