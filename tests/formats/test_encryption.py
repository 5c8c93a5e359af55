"""Encrypted files: MindSpore's own, others by an independent writer, and all that can be wrong."""

from __future__ import annotations

import os
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from ckpttool.formats import ckpt, encryption, read_index
from ckpttool.formats.encryption import find_forged, read_plain
from ckpttool.model.names import map_component_names
from ckpttool.model.tensors import StoredFile
from ckpttool.problems import AuthenticityError, FormatError, PlanError, UnsupportedError
from ckpttool.storage.region_io import FlatFiles
from tests.support.corpus import SAMPLES
from tests.support.damage import flipped
from tests.support.encryption import KEY, KEYS, MODES, PLAIN, encrypt, frame, u32
from tests.support.file_bytes import map_record, record
from tests.support.readers import read

FILES = SAMPLES / "files"


def plaintext(path, key=KEY):
    cipher = read_index(str(path), key).cipher
    out = bytearray(cipher.nbytes)
    with path.open("rb") as file:
        read_plain(file.fileno(), str(path), cipher, 0, memoryview(out))
    return bytes(out)


def contents(index):
    found = {}
    with FlatFiles(1 << 20) as files:
        for name, tensor in index.tensors.items():
            out = np.empty(tensor.meta.nbytes, np.uint8)
            files.read_bytes(tensor, 0, out.data)
            found[name] = out.tobytes()
    return found


@pytest.fixture
def write(tmp_path):
    def written(data, name="net.ckpt"):
        path = tmp_path / name
        path.write_bytes(data)
        return path

    return written


def refusal(path, key=KEY):
    with pytest.raises(FormatError) as caught:
        read_index(str(path), key)
    return caught.value


# ------------------------------------------------------------------------ what MindSpore wrote


@pytest.mark.parametrize(
    ("name", "mode", "key"),
    [
        ("aes_gcm128", "AES-GCM", KEY),
        ("aes_gcm256", "AES-GCM", KEY * 2),
        ("aes_cbc128", "AES-CBC", KEY),
        ("sm4_cbc", "SM4-CBC", KEY),
        ("enc_and_crc_unreadable", "AES-GCM", KEY),
    ],
)
def test_a_file_by_mindspore_decrypts_to_the_plain_one(name, mode, key):
    path = FILES / f"{name}.ckpt"
    index = read_index(str(path), key)
    assert index.cipher.mode == mode
    assert index.nbytes == path.stat().st_size
    assert plaintext(path, key) == (FILES / "plain.ckpt").read_bytes()
    assert contents(index) == {n: e.data for n, e in read(FILES / "plain.ckpt").items()}


def test_a_file_by_mindspore_2_0_is_read():
    index = read_index(str(FILES / "legacy_2.0.0_gcm.ckpt"), b"A" * 16)
    assert index.tensors["w"].meta.shape == (1,)
    assert contents(index) == {"w": np.float32(1).tobytes()}
    assert not find_forged(index.file, index.cipher, 0, 1)


# ------------------------------------------------------------------------ an independent writer


@pytest.mark.parametrize("block_bytes", [1, 16, 33, 1000])
@pytest.mark.parametrize(("mode", "size"), KEYS)
def test_every_mode_key_and_cut_into_blocks_is_read(mode, size, block_bytes, write):
    path = write(encrypt(PLAIN, mode, bytes(range(size)), block_bytes))
    index = read_index(str(path), bytes(range(size)))
    assert len(index.cipher.blocks) == -(-len(PLAIN) // block_bytes)
    assert plaintext(path, bytes(range(size))) == PLAIN
    assert contents(index) == {"w": bytes(range(24)), "b": b"seven.."}
    assert not find_forged(index.file, index.cipher, 0, len(index.cipher.blocks))


NOISE = np.random.default_rng(5).bytes(1000)


@pytest.fixture(scope="module")
def noisy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("noisy")
    plain = record("w", "Int8", (1000,), NOISE)
    found = {}
    for mode in MODES:
        path = folder / f"{mode}.ckpt"
        path.write_bytes(encrypt(plain, mode, KEY, 300))
        found[mode] = read_index(str(path), KEY).tensors["w"]
    return found


@settings(max_examples=200)
@given(data=st.data(), piece_units=st.sampled_from([1, 2, 5, 1000]))
@pytest.mark.parametrize("mode", MODES)
def test_any_bytes_are_read_by_themselves(noisy, mode, data, piece_units):
    start = data.draw(st.integers(0, 999))
    stop = data.draw(st.integers(start + 1, 1000))
    out = np.full(stop - start, 0xAA, np.uint8)
    with pytest.MonkeyPatch.context() as patch, FlatFiles(1 << 20) as files:
        patch.setattr(encryption, "PIECE_BYTES", 16 * piece_units)
        files.read_bytes(noisy[mode], start, out.data)
    assert out.tobytes() == NOISE[start:stop]


@pytest.mark.parametrize("mode", MODES)
def test_a_large_block_is_never_held_in_memory(mode, tmp_path, monkeypatch):
    nbytes = 24 << 20 if mode != "SM4-CBC" else 8 << 20
    path = tmp_path / "net.ckpt"
    path.write_bytes(encrypt(record("w", "Int8", (nbytes,), bytes(nbytes)), mode))
    largest = 0
    pread = os.pread

    def counted(fd, n, offset):
        nonlocal largest
        largest = max(largest, n)
        return pread(fd, n, offset)

    monkeypatch.setattr(os, "pread", counted)
    out = np.empty(1 << 20, np.uint8)
    tracemalloc.start()
    try:
        tensor = read_index(str(path), KEY).tensors["w"]
        assert not find_forged(tensor.file, tensor.file.cipher, 0, 1)
        with FlatFiles(1 << 20) as files:
            for start in range(0, nbytes - len(out), 5 << 20):
                files.read_bytes(tensor, start + 3, out.data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert 0 < largest <= encryption.PIECE_BYTES + encryption.UNIT
    assert peak < 5 * encryption.PIECE_BYTES  # the smallest block has 8


def test_calls_that_read_fewer_bytes_than_asked_are_repeated(write, monkeypatch):
    path = write(encrypt(PLAIN, "AES-CBC"))
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, n, offset: pread(fd, min(n, 48), offset))
    assert plaintext(path) == PLAIN


def test_a_file_that_has_become_shorter_is_an_error(write):
    path = write(encrypt(PLAIN))
    index = read_index(str(path), KEY)
    os.truncate(path, 70)
    with pytest.raises(PlanError, match="was written to, or the path leads to another file"):
        contents(index)
    bare = {
        name: replace(tensor, file=replace(tensor.file, stamp=None))
        for name, tensor in index.tensors.items()
    }
    with pytest.raises(FormatError, match="byte 70: the file became shorter while it was read"):
        contents(replace(index, tensors=bare))


# ------------------------------------------------------------------------ no key, the wrong key


@pytest.mark.parametrize("mode", MODES)
def test_a_missing_key_is_asked_for(mode, write):
    error = refusal(write(encrypt(PLAIN, mode)), None)
    assert isinstance(error, UnsupportedError)
    assert error.reason == f"encrypted with {mode}, and there is no key"
    assert error.hint == "--dec-key-file FILE"


@pytest.mark.parametrize("block_bytes", [40, 1000])
@pytest.mark.parametrize("mode", MODES)
def test_no_wrong_key_is_taken_for_the_right_one(mode, block_bytes, write):
    path = write(encrypt(PLAIN, mode, KEY, block_bytes))
    for i in range(300):  # one of 256 finds a padding that looks right
        error = refusal(path, i.to_bytes(16, "big"))
        assert error.reason == f"the wrong key ({mode}), or the file is damaged"


@pytest.mark.parametrize(
    ("mode", "size", "sizes"),
    [("AES-GCM", 17, "16, 24, 32"), ("AES-CBC", 0, "16, 24, 32"), ("SM4-CBC", 32, "16")],
)
def test_a_key_of_a_size_that_the_mode_does_not_take_is_told(mode, size, sizes, write):
    error = refusal(write(encrypt(PLAIN, mode)), bytes(size))
    assert error.reason == f"not a key of {mode}"
    assert error.facts == f"expected {sizes} bytes, found {size}"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("block_bytes", [40, 1000])
def test_damage_at_the_beginning_has_the_message_of_a_wrong_key(mode, block_bytes, write):
    at = 48 if mode == "AES-GCM" else 32  # the first byte of ciphertext
    error = refusal(write(flipped(encrypt(PLAIN, mode, KEY, block_bytes), at, 0xFF)))
    assert type(error) is AuthenticityError
    assert error.offset == 0
    assert error.reason == f"the wrong key ({mode}), or the file is damaged"
    assert error.facts == ""


def test_what_is_not_read_is_told_apart_from_damage_there_too(write, monkeypatch):
    monkeypatch.setattr(ckpt, "MAX_TEXT_BYTES", 4)
    error = refusal(write(encrypt(record("s", "str", (0,), bytes(8)))))
    assert isinstance(error, UnsupportedError)
    assert error.reason == "s: the string is too long"
    assert error.facts == "8 bytes; at most 4 are read; bytes are counted in the plaintext"


@pytest.mark.parametrize("mode", MODES)
def test_map_parameters_are_in_clear_before_the_blocks(mode, write):
    clear = map_record("table")
    trailer = b"crc_num" + bytes(10)
    for behind in (b"", trailer):
        path = write(clear + encrypt(PLAIN, mode, KEY, 40) + behind)
        index = read_index(str(path), KEY)
        assert list(index.tensors) == [*map_component_names("table"), "w", "b"]
        found = contents(index)
        assert found == contents(read_index(str(write(clear + PLAIN, "clear.ckpt"))))
        assert index.cipher is index.tensors["w"].file.cipher
        assert index.tensors[map_component_names("table")[0]].file.cipher is None
        assert not find_forged(index.file, index.cipher, 0, 2)
    assert refusal(path, None).offset == len(clear)


@pytest.mark.parametrize("mode", MODES)
def test_blocks_behind_records_in_clear_are_never_skipped_as_unknown_fields(mode, write):
    clear = record("table", "Int8", (3,), b"abc")
    for size in range(40, len(PLAIN)):
        path = write(clear + encrypt(PLAIN[:size], mode))
        if size == PLAIN.index(b"\x0a", 40):  # where the second record begins
            assert list(read_index(str(path), KEY).tensors) == ["table", "w"]
        else:
            assert refusal(path).offset is not None
    error = refusal(write(clear + encrypt(clear, mode)))
    assert error.reason == "table: stored twice, plain and encrypted"


# ------------------------------------------------------------------------ damage


@pytest.mark.parametrize("mode", MODES)
def test_a_file_cut_at_any_byte_is_refused_or_ends_with_a_block(mode, tmp_path):
    first, second = record("v", "Int8", (30,), bytes(30)), record("w", "Int8", (30,), bytes(30))
    assert len(first) == len(second)
    data = encrypt(first + second, mode, KEY, len(first))
    path = tmp_path / "net.ckpt"
    for size in range(4, len(data)):
        path.write_bytes(data[:size])
        if size == len(data) // 2:
            assert list(read_index(str(path), KEY).tensors) == ["v"]
        else:
            error = refusal(path)
            whole = size > len(data) // 2
            at_magic = size < len(data) // 2 + 4 and whole
            assert error.offset == (len(data) // 2 if whole else 0)
            expected = "not an" if at_magic else "the file ends inside an"
            assert error.reason == f"{expected} encrypted block"


@pytest.mark.parametrize("block_bytes", [40, 1000])
def test_every_flipped_bit_of_gcm_is_noticed(block_bytes, tmp_path):
    data = encrypt(PLAIN, "AES-GCM", KEY, block_bytes)
    path = tmp_path / "net.ckpt"
    for at in range(len(data)):
        path.write_bytes(flipped(data, at, 1 << at % 8))
        try:
            cipher = read_index(str(path), KEY).cipher
        except FormatError:
            continue
        unused = 40 <= at % (48 + block_bytes) < 44  # the end of the IV, behind the nonce
        assert bool(find_forged(StoredFile(str(path)), cipher, 0, len(cipher.blocks))) != unused


@pytest.mark.parametrize("block_bytes", [40, 1000])
def test_a_flipped_bit_of_cbc_is_an_error_or_leaves_tensors_that_can_be_read(block_bytes, tmp_path):
    data = encrypt(PLAIN, "AES-CBC", KEY, block_bytes)
    path = tmp_path / "net.ckpt"
    refused = 0
    for at in range(len(data)):
        path.write_bytes(flipped(data, at, 1 << at % 8))
        try:
            index = read_index(str(path), KEY)
        except FormatError:
            refused += 1
            continue
        assert [len(found) for found in contents(index).values()] == [
            tensor.meta.nbytes for tensor in index.tensors.values()
        ]
    assert refused > len(data) // 2


def test_forged_blocks_are_named(write):
    data = encrypt(PLAIN + PLAIN.replace(b"w", b"v").replace(b"b", b"c"), block_bytes=40)
    data = flipped(data, 88 - 1)  # contents of the first
    path = write(flipped(data, 2 * 88 + 4))  # tag of the third
    index = read_index(str(path), KEY)
    assert len(index.cipher.blocks) == 4
    assert find_forged(index.file, index.cipher, 0, 9) == (0, 2)
    assert find_forged(index.file, index.cipher, 1, 2) == ()
    assert find_forged(index.file, index.cipher, 2, 3) == (2,)


def test_damage_that_breaks_a_record_is_told_by_its_block(write):
    at = PLAIN.index(b"Float32")
    error = refusal(write(flipped(encrypt(PLAIN), 48 + at, 0x80)))
    assert error.reason == "the file is damaged, or was changed after it was encrypted"
    assert error.facts == "encrypted block 1 of 1 does not match its tag"
    error = refusal(write(flipped(encrypt(PLAIN, "AES-CBC"), 32 + 16 + at, 0x80)))
    assert error.facts.endswith("bytes are counted in the plaintext")
    assert error.hint.endswith("or --dec-key-file with the key of the training run")


@pytest.mark.parametrize("mode", ["AES-CBC", "SM4-CBC"])
def test_a_block_of_cbc_without_its_padding_is_damaged(mode, write):
    data = encrypt(PLAIN, mode, KEY, 40)
    error = refusal(write(flipped(data, len(data) - 1)))
    assert error.offset == 80
    assert error.reason == "an encrypted block is damaged"
    assert error.facts == "encrypted block 2 of 2 does not end in a padding"


IV = bytes(16)
MAGIC = b"\xd9\x5e\x3a\x7f"
REFUSED = {
    "another magic behind": (encrypt(PLAIN, "AES-CBC") + encrypt(PLAIN, "SM4-CBC"), "a block of"),
    "no tag, as of MindSpore 1.3": (
        b"\xd8" + encrypt(PLAIN, "AES-CBC")[1:],
        "an encrypted block has a wrong IV",
    ),
    "no magic behind": (
        encrypt(PLAIN) + b"\x0a" * 40,
        "not an encrypted block; it begins with 0a 0a 0a 0a",
    ),
    "IV of 12 bytes": (
        frame("AES-CBC", IV[:12], bytes(36), b""),
        "a wrong IV; 12 bytes, expected 16",
    ),
    "length that is not the sum": (
        MAGIC + u32(25 + 16) + u32(16) + IV + u32(16) + bytes(17),
        "wrong length; 16 bytes of ciphertext, expected 17",
    ),
    "length of 4 GiB": (
        MAGIC + u32(2**32 - 1) + u32(16) + IV + u32(2**32 - 25) + bytes(17),
        "ends inside an encrypted block; .* needs 4294967271 bytes, 17 are left",
    ),
    "no ciphertext": (frame("AES-GCM", IV, b"", IV), "wrong length; 0 bytes, which AES-GCM never"),
    "no multiple of 16": (frame("AES-CBC", IV, bytes(17), b""), "which AES-CBC never makes"),
    "only a padding": (
        encrypt(b"\n", "AES-CBC"),
        r"byte 0: the wrong key \(AES-CBC\), or the file is ",
    ),
}


@pytest.mark.parametrize(("data", "reason"), REFUSED.values(), ids=REFUSED)
def test_blocks_that_make_no_sense_are_errors(data, reason, write):
    with pytest.raises(FormatError, match=reason):
        read_index(str(write(data)), KEY)


def test_the_number_of_blocks_has_a_limit(write, monkeypatch):
    monkeypatch.setattr(encryption, "MAX_BLOCKS", 3)
    assert read_index(str(write(encrypt(PLAIN, block_bytes=30))), KEY).tensors.keys() == {"w", "b"}
    with pytest.raises(UnsupportedError, match="too many encrypted blocks; at most 3 are read"):
        read_index(str(write(encrypt(PLAIN, block_bytes=20))), KEY)
