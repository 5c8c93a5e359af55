"""Encrypted ``.ckpt`` files: what ``save_checkpoint(..., enc_key=..., enc_mode=...)`` writes.

It finds the blocks of ciphertext, checks the key, and decrypts from any byte on.  So encrypted
tensors are read like others, in fixed memory.  `ckpttool.formats.ckpt` reads the records in the
plaintext.  Nothing is encrypted.

Bytes
-----
The records of a ``.ckpt`` (the plaintext) are cut into blocks.  MindSpore makes them 64 MiB large,
the last one smaller; any size is read.  Each block is encrypted separately.  The blocks lie back to
back.  Only plain map parameters may stand before them (MindSpore cannot read such a file)::

    4 bytes      magic: d8 5e 3a 7f AES-GCM, d9 5e 3a 7f AES-CBC, da 5e 3a 7f SM4-CBC
    16 bytes     tag, with AES-GCM only
    4 bytes      length of the rest of the block, 24 + N
    4 bytes      length of the IV, MUST be 16
    16 bytes     IV
    4 bytes      N
    N bytes      ciphertext

Numbers are unsigned, little endian.

* AES-GCM: the nonce is the first 12 bytes of the IV, associated data is empty, and the ciphertext
  is as long as the plaintext.
* AES-CBC, SM4-CBC: the IV is all 16 bytes, the plaintext is padded to a multiple of 16 (PKCS #7).
  These modes lack an authentication tag: only the padding and the records can show damage.
* Keys have 16, 24 or 32 bytes, those of SM4 16.
* All blocks of a file MUST have the same magic.
* With ``crc_check=True`` the trailer of a ``.ckpt`` lies behind the last block, with the number 0,
  and MindSpore cannot read the file.  It is read here.

A key fits if the plaintext begins as a record does.

Files of MindSpore 1.3 are not read: they have ``d8 5e 3a 7f`` for AES-CBC as well, and no tag.

Limits: `MAX_BLOCKS` blocks; every length is checked against the file.

Reading from any byte on
------------------------
GCM is counter mode: the counter at byte ``16 * i`` of a block is ``2 + i``, in 4 bytes, big endian,
behind the nonce.  CBC can begin at any 16 bytes, with the 16 bytes of ciphertext before them as the
IV.  So decrypting can begin anywhere in a block, and at most `PIECE_BYTES` of it are in memory.

The package cryptography is imported when the first byte is decrypted, because few users need it.

Source
------
MindSpore 2.10 ``train/serialization.py`` (``_exec_save``) and ``core/utils/crypto.cc``; files of
2.0 and 2.10; NIST SP 800-38A and 800-38D.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ckpttool.concurrency import check_cancelled
from ckpttool.formats.local import note_read, open_source
from ckpttool.formats.wire import decode_varint
from ckpttool.lazy import compile_late
from ckpttool.model.tensors import Block, Ciphertext, StoredFile
from ckpttool.problems import (
    COPY_AGAIN,
    AuthenticityError,
    FormatError,
    LibraryError,
    UnsupportedError,
)
from ckpttool.secret import Secret
from ckpttool.wording import shorten

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers import CipherContext

MODES = {
    b"\xd8\x5e\x3a\x7f": "AES-GCM",
    b"\xd9\x5e\x3a\x7f": "AES-CBC",
    b"\xda\x5e\x3a\x7f": "SM4-CBC",
}
_RIGHT_KEY = "--dec-key-file with the key of the training run"
_CUT_SHORT = "the file ends inside an encrypted block"
_KEY_BYTES = {"AES-GCM": (16, 24, 32), "AES-CBC": (16, 24, 32), "SM4-CBC": (16,)}
MAX_BLOCKS = 1 << 16  # 4 TiB in MindSpore's blocks; stops files that are only block headers
PIECE_BYTES = 1 << 20  # decrypted at a time; less or more is slower (measured)
UNIT = 16  # block size of AES and SM4, in bytes
_RECORD = compile_late(rb"\x0a([\x80-\xff]{0,9}[\x00-\x7f])[\x0a\x12]")  # its length, then a field
_NONCE_BYTES = 12
_FIRST_COUNTER = 2  # GCM uses 1 for the tag
_WITH_TAG = struct.Struct("<4s16sII16sI")  # the header of a block
_WITHOUT_TAG = struct.Struct("<4s0sII16sI")


def mode_of(head: bytes) -> str | None:
    """Return the mode that the first four bytes of a file name; None if it is not encrypted."""
    return MODES.get(head[:4])


# ------------------------------------------------------------------------------ locating the blocks


def read_ciphertext(file: StoredFile, start: int, end: int, key: Secret | None) -> Ciphertext:
    """Locate the blocks of an encrypted file between two bytes, and check that the key fits.

    Read the headers of the blocks, the first bytes of the plaintext, and with CBC the end of each
    block.  `find_forged` checks the tags of AES-GCM later.

    Raises
    ------
    FormatError
        A block is truncated or damaged.
    AuthenticityError
        The key does not fit.
    UnsupportedError
        The key or the library for decrypting is missing.
    """
    path = file.path
    with open_source(file) as opened:
        fd = opened.fileno()
        mode, blocks = _find_blocks(fd, path, start, end)
        if key is None:
            reason = f"encrypted with {mode}, and there is no key"
            raise UnsupportedError(path, start, reason, "--dec-key-file FILE")
        if len(key) not in _KEY_BYTES[mode]:
            sizes = ", ".join(map(str, _KEY_BYTES[mode]))
            facts = f"expected {sizes} bytes, found {len(key)}"
            raise AuthenticityError(path, start, f"not a key of {mode}", _RIGHT_KEY, facts)
        return _decipher(fd, path, start, mode, key, blocks)


def _find_blocks(fd: int, path: str, start: int, end: int) -> tuple[str, list[Block]]:
    """Return the mode, and each block from byte ``start``, where a magic number is, to ``end``.

    The plaintext of each begins at 0 and includes the padding.
    """
    first_mode, blocks = "", list[Block]()
    at = start
    while at < end:
        mode, block = _parse_block(path, at, end, os.pread(fd, _WITH_TAG.size, at))
        first_mode = first_mode or mode
        if mode != first_mode:
            raise FormatError(path, at, f"a block of {mode} follows blocks of {first_mode}")
        if len(blocks) == MAX_BLOCKS:
            facts = f"at most {MAX_BLOCKS} are read; MindSpore's have 64 MiB each"
            raise UnsupportedError(path, at, "too many encrypted blocks", facts=facts)
        blocks.append(block)
        at = block.offset + block.nbytes
    return first_mode, blocks


def _parse_block(path: str, at: int, end: int, head: bytes) -> tuple[str, Block]:
    def wrong(reason: str, facts: str) -> FormatError:
        return FormatError(path, at, reason, facts=facts)

    mode = mode_of(head)
    if mode is None:
        raise wrong("not an encrypted block", f"it begins with {head[:4].hex(' ')}")
    form = _WITH_TAG if mode == "AES-GCM" else _WITHOUT_TAG
    rest_bytes = end - at - form.size
    if rest_bytes < 0:
        raise wrong(_CUT_SHORT, f"its header needs {form.size} bytes, {end - at} are left")
    _, tag, rest, iv_bytes, iv, nbytes = form.unpack(head[: form.size])
    if iv_bytes != UNIT:
        raise wrong("an encrypted block has a wrong IV", f"{iv_bytes} bytes, expected {UNIT}")
    if rest != nbytes + 24:
        facts = f"{nbytes} bytes of ciphertext, expected {rest - 24}"
        raise wrong("an encrypted block has a wrong length", facts)
    if nbytes > rest_bytes:
        raise wrong(_CUT_SHORT, f"its ciphertext needs {nbytes} bytes, {rest_bytes} are left")
    if not nbytes or (mode != "AES-GCM" and nbytes % UNIT):
        facts = f"{nbytes} bytes, which {mode} never makes"
        raise wrong("an encrypted block has a wrong length", facts)
    return mode, Block(at + form.size, nbytes, 0, nbytes, iv, tag)


def _decipher(
    fd: int, path: str, start: int, mode: str, key: Secret, located: Sequence[Block]
) -> Ciphertext:
    """Return how a file is encrypted, from its blocks; check the key and the paddings."""
    paddings = [_padding_nbytes(fd, path, Ciphertext(mode, key, (block,))) for block in located]
    sizes = (block.nbytes - (n or 0) for block, n in zip(located, paddings, strict=True))
    ends = pairwise(accumulate(sizes, initial=0))
    blocks = (replace(block, start=a, stop=b) for block, (a, b) in zip(located, ends, strict=True))
    cipher = Ciphertext(mode, key, tuple(blocks))
    head = bytearray(min(UNIT, cipher.nbytes))
    read_plain(fd, path, cipher, 0, memoryview(head))
    match = _RECORD.match(head)  # 1 of 30,000 random strings begins as a record does
    if match is None or decode_varint(match[1]) > cipher.nbytes - match.end(1):
        reason = f"the wrong key ({mode}), or the file is damaged"
        raise AuthenticityError(path, start, reason, _RIGHT_KEY)
    if None in paddings:
        number = paddings.index(None)
        at = located[number].offset - _WITHOUT_TAG.size
        facts = f"encrypted block {number + 1} of {len(located)} does not end in a padding"
        raise FormatError(path, at, "an encrypted block is damaged", facts=facts)
    return cipher


def _padding_nbytes(fd: int, path: str, cipher: Ciphertext) -> int | None:
    # None stands for a padding that is wrong.
    if cipher.has_tags:
        return 0
    end = bytearray(UNIT)
    read_plain(fd, path, cipher, cipher.nbytes - UNIT, memoryview(end))
    padding = end[-1]
    is_right = 0 < padding <= UNIT and end.endswith(bytes([padding]) * padding)
    return padding if is_right else None


# --------------------------------------------------------------------------------------- decrypting


class DecryptedFile:
    """The plaintext of a file, addressed by byte offset, for `ckpttool.formats.wire`."""

    def __init__(self, file: StoredFile, cipher: Ciphertext) -> None:
        self.size = cipher.nbytes
        self._path = file.path
        self._cipher = cipher
        self._file = open_source(file)

    def pread(self, nbytes: int, offset: int) -> bytes:
        """Return up to ``nbytes`` bytes from ``offset`` on; fewer at the end."""
        data = bytearray(max(0, min(nbytes, self.size - offset)))
        read_plain(self._file.fileno(), self._path, self._cipher, offset, memoryview(data))
        return bytes(data)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_plain(fd: int, path: str, cipher: Ciphertext, start: int, out: memoryview) -> None:
    """Fill ``out`` with the plaintext from byte ``start`` on, from the open file ``fd``.

    Raises
    ------
    FormatError
        The file has become shorter since its index was read.
    UnsupportedError
        The library for decrypting is missing.
    """
    for block, first, skip, before, nbytes, part in _split_into_reads(cipher, start, out):
        data = _read(fd, path, block.offset + first - before, before + nbytes)
        if cipher.mode == "AES-GCM":
            counter = (_FIRST_COUNTER + first // UNIT).to_bytes(UNIT - _NONCE_BYTES, "big")
            iv = block.iv[:_NONCE_BYTES] + counter
        else:
            iv, data = (data[:before], data[before:]) if before else (block.iv, data)
        plain = memoryview(_decryptor(path, cipher, iv).update(data))
        part[:] = plain[skip : skip + len(part)]


def _split_into_reads(
    cipher: Ciphertext, start: int, out: memoryview
) -> Iterator[tuple[Block, int, int, int, int, memoryview]]:
    """Yield what is read for ``out``, the plaintext from byte ``start`` on.

    Yields
    ------
    block, first, skip, before, nbytes, part
        ``nbytes`` of ciphertext from byte ``first`` of a block on, and ``before`` bytes in front of
        them that CBC needs.  Their plaintext behind ``skip`` bytes fills ``part``.
    """
    for block, at, view in cipher.split(start, out):
        rest = view
        while rest:
            skip = at % UNIT
            first = at - skip
            nbytes = min(PIECE_BYTES, -(-(skip + len(rest)) // UNIT) * UNIT, block.nbytes - first)
            before = UNIT if first and cipher.mode != "AES-GCM" else 0
            part = rest[: nbytes - skip]
            yield block, first, skip, before, nbytes, part
            at, rest = at + len(part), rest[len(part) :]


def plan_reads(cipher: Ciphertext, start: int, out: memoryview) -> Iterator[int]:
    """Yield the bytes of each read of `read_plain`."""
    for _, _, _, before, nbytes, _ in _split_into_reads(cipher, start, out):
        yield before + nbytes


def _decryptor(path: str, cipher: Ciphertext, iv: bytes, tag: bytes = b"") -> CipherContext:
    """Return a context that decrypts from ``iv`` on; with a tag it also verifies the block."""
    try:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
    except ImportError as error:
        reason = f"encrypted with {cipher.mode}, and the package cryptography is missing"
        raise LibraryError(path, None, reason, "pip install 'ckpttool[crypto]'") from error
    key = cipher.key.reveal()
    try:
        algorithm = algorithms.SM4(key) if cipher.mode == "SM4-CBC" else algorithms.AES(key)
        if cipher.mode != "AES-GCM":
            return Cipher(algorithm, modes.CBC(iv)).decryptor()
        return Cipher(algorithm, modes.GCM(iv, tag) if tag else modes.CTR(iv)).decryptor()
    except (AttributeError, UnsupportedAlgorithm) as error:
        reason = f"encrypted with {cipher.mode}, which the installed cryptography lacks"
        raise UnsupportedError(path, None, reason, "pip install -U 'ckpttool[crypto]'") from error


def _read(fd: int, path: str, offset: int, nbytes: int) -> bytes:
    """Return ``nbytes`` bytes of an open file; raise FormatError if it has fewer."""
    check_cancelled()
    data = os.pread(fd, nbytes, offset)
    while len(data) < nbytes:
        more = os.pread(fd, nbytes - len(data), offset + len(data))
        if not more:
            raise FormatError(path, offset + len(data), "the file became shorter while it was read")
        data += more
    note_read(nbytes)
    return data


# ------------------------------------------------------------------------------------ forged blocks


def find_forged(file: StoredFile, cipher: Ciphertext, first: int, stop: int) -> tuple[int, ...]:
    """Return the numbers of the blocks from ``first`` to ``stop`` that do not match their tags.

    Read each block completely, a piece at a time.  Skip blocks without a tag.
    """
    from cryptography.exceptions import InvalidTag

    path, forged = file.path, []
    with open_source(file) as opened:
        for number in range(first, min(stop, len(cipher.blocks))):
            block = cipher.blocks[number]
            if not block.tag:
                continue
            decryptor = _decryptor(path, cipher, block.iv[:_NONCE_BYTES], block.tag)
            for at in range(0, block.nbytes, PIECE_BYTES):
                nbytes = min(PIECE_BYTES, block.nbytes - at)
                decryptor.update(_read(opened.fileno(), path, block.offset + at, nbytes))
            try:
                decryptor.finalize()
            except InvalidTag:
                forged.append(number)
    return tuple(forged)


def forged_blocks_error(path: str, cipher: Ciphertext, numbers: Sequence[int]) -> AuthenticityError:
    """Return the error for blocks that do not match their tags."""
    named = shorten((str(number + 1) for number in numbers), 3)
    facts = f"encrypted block {named} of {len(cipher.blocks)} does not match its tag"
    reason = "the file is damaged, or was changed after it was encrypted"
    return AuthenticityError(path, cipher.blocks[numbers[0]].offset, reason, COPY_AGAIN, facts)


def explain_error(error: FormatError, file: StoredFile, cipher: Ciphertext) -> FormatError:
    """Return an error in the records of an encrypted file, with its likely cause added."""
    forged = find_forged(file, cipher, 0, len(cipher.blocks))
    if forged:
        return forged_blocks_error(error.path, cipher, forged)
    hint = error.hint if cipher.has_tags else f"{COPY_AGAIN}, or {_RIGHT_KEY}"
    return error.with_hint(hint, "bytes are counted in the plaintext")
