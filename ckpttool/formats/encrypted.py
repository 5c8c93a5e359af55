"""Encrypted ``.ckpt`` files: what ``save_checkpoint(..., enc_key=..., enc_mode=...)`` writes.

Bytes
-----
The records of a ``.ckpt`` (the plaintext) are cut into blocks, of 64 MiB but for the last; any
other size is read.  Each is encrypted by itself, and the blocks follow each other, with nothing
between them, and before them only map parameters, in clear (MindSpore cannot read that back)::

    4 bytes      magic: d8 5e 3a 7f AES-GCM, d9 5e 3a 7f AES-CBC, da 5e 3a 7f SM4-CBC
    16 bytes     tag, with AES-GCM only
    4 bytes      length of the rest of the block, 24 + N
    4 bytes      length of the IV, MUST be 16
    16 bytes     IV
    4 bytes      N
    N bytes      ciphertext

Numbers are unsigned, little endian.

* AES-GCM: the nonce is the first 12 bytes of the IV, there is no associated data, and the
  ciphertext is as long as the plaintext.
* AES-CBC, SM4-CBC: the IV is all 16 bytes, the plaintext is padded to a multiple of 16 (PKCS #7).
  Nothing proves that the bytes are genuine: of damage only the padding and the records can tell.
* Keys have 16, 24 or 32 bytes, those of SM4 16.
* All blocks of a file MUST have the same magic.
* The first versions (MindSpore 1.3 and some after it) wrote ``d8 5e 3a 7f`` for AES-CBC as well,
  and no tag.  That there is none the three lengths tell; which of the two it is, the plaintext.
  (Known from MindSpore's source alone.)
* With ``crc_check=True`` the trailer of a ``.ckpt`` lies behind the last block, with the number 0,
  and MindSpore cannot read the file.  It is read here.

A key fits if the plaintext begins as a record does, or if the first block matches its tag.

Limits: `MAX_BLOCKS` blocks; every length is checked against the file.

Source
------
MindSpore 2.10 ``train/serialization.py`` (``_exec_save``) and ``core/utils/crypto.cc``, its
``ccsrc/crypto/crypto.cc`` of 2021; files of 2.0 and 2.10.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from typing import NamedTuple

from ckpttool.errors import AuthenticityError, FormatError, UnsupportedError, WrongKeyError
from ckpttool.formats.decryption import UNIT, find_forged, read_plain
from ckpttool.formats.reading import ReadFile, open_source, stamp_of
from ckpttool.model.catalog import SourceStamp
from ckpttool.model.ciphertext import Block, Ciphertext, Secret
from ckpttool.model.strategy import count

MODES = {
    b"\xd8\x5e\x3a\x7f": "AES-GCM",
    b"\xd9\x5e\x3a\x7f": "AES-CBC",
    b"\xda\x5e\x3a\x7f": "SM4-CBC",
}
KEY_BYTES = {"AES-GCM": (16, 24, 32), "AES-CBC": (16, 24, 32), "SM4-CBC": (16,)}
PROOF_BYTES = 4  # of paddings that are right, to show that the key is
MAX_BLOCKS = 1 << 16  # 4 TiB, as MindSpore cuts; stops files of nothing but headers

_TAGGED = struct.Struct("<4s16sII16sI")
_UNTAGGED = struct.Struct("<4sII16sI")


def mode_of(head: bytes) -> str | None:
    """The mode that the first four bytes of a file stand for; None if it is not encrypted."""
    return MODES.get(head[:4])


def read_ciphertext(
    path: str, start: int, end: int, key: Secret | None, stamp: SourceStamp
) -> Ciphertext:
    """Where the blocks of an encrypted file are, and that the key fits.

    The headers of the blocks are read, a few bytes of the first, and with CBC the last of each.
    AES-GCM's tags are not checked here but by `ckpttool.formats.decryption.find_forged`.

    Parameters
    ----------
    path
        The file.
    start, end
        Where its blocks are, between records in clear and a checksum.
    key
        As MindSpore took it; None if there is none.
    stamp
        The file that was opened before; see `open_source`.

    Raises
    ------
    FormatError
        A block is cut short or damaged.
    AuthenticityError
        The key does not fit; a `WrongKeyError` if nothing shows that it is right.
    UnsupportedError
        There is no key, or nothing to decrypt with.
    """
    with open_source(path, stamp) as file:
        fd = file.fileno()
        frames = _walk(fd, path, start, end)
        mode = MODES[frames[0].magic]
        if key is None:
            reason = f"encrypted with {mode}, and no key is given: --dec-key-file FILE"
            raise UnsupportedError(path, start, reason)
        if len(key) not in KEY_BYTES[mode]:
            sizes = ", ".join(map(str, KEY_BYTES[mode]))
            reason = f"encrypted with {mode}, whose keys have {sizes} bytes; the one given has"
            raise AuthenticityError(path, start, f"{reason} {len(key)}")
        is_early = mode == "AES-GCM" and not frames[0].tag
        for candidate in ("AES-CBC", "AES-GCM") if is_early else (mode,):
            cipher = _fit(fd, path, frames, candidate, key)
            if cipher is not None:
                return cipher
    reason = f"encrypted with {mode}, and this is the wrong key, or the file is damaged at its "
    reason += f"beginning: encrypted block 1 of {len(frames)} decrypts to no record"
    raise WrongKeyError(path, start, reason)


class _Frame(NamedTuple):
    """The header of a block, and where its ciphertext is."""

    start: int
    magic: bytes
    tag: bytes
    iv: bytes
    offset: int
    nbytes: int


def _walk(fd: int, path: str, start: int, end: int) -> list[_Frame]:
    """The blocks from byte ``start``, where there is a magic number, to byte ``end``."""
    frames: list[_Frame] = []
    at = start
    while at < end:
        frame = _read_frame(path, at, end, os.pread(fd, _TAGGED.size, at))
        first = frames[0] if frames else frame
        if (frame.magic, bool(frame.tag)) != (first.magic, bool(first.tag)):
            reason = f"a block of {MODES[frame.magic]} behind blocks of {MODES[first.magic]}"
            raise FormatError(path, at, reason)
        if len(frames) == MAX_BLOCKS:
            reason = f"more than {MAX_BLOCKS} encrypted blocks; MindSpore's have 64 MiB each"
            raise UnsupportedError(path, at, reason)
        frames.append(frame)
        at = frame.offset + frame.nbytes
    return frames


def _read_frame(path: str, at: int, end: int, head: bytes) -> _Frame:
    mode = mode_of(head)
    if mode is None:
        reason = f"expected an encrypted block, found the bytes {head[:4].hex(' ')} (damaged?)"
        raise FormatError(path, at, reason)
    form, tag = _UNTAGGED, b""
    if mode == "AES-GCM" and not _is_untagged(head):
        form = _TAGGED
    left = end - at - form.size
    if left < 0:
        reason = f"the header of an encrypted block has {form.size} bytes, {end - at} are left"
        raise FormatError(path, at, f"{reason} (file cut short?)")
    if form is _TAGGED:
        magic, tag, rest, iv_bytes, iv, nbytes = form.unpack(head[: form.size])
    else:
        magic, rest, iv_bytes, iv, nbytes = form.unpack(head[: form.size])
    if iv_bytes != UNIT:
        raise FormatError(
            path, at, f"an encrypted block with an IV of {iv_bytes} bytes, not {UNIT}"
        )
    if rest != nbytes + 24:
        reason = f"an encrypted block of {rest} bytes with {nbytes} bytes of ciphertext, not"
        raise FormatError(path, at, f"{reason} {rest - 24}")
    if nbytes > left:
        reason = f"an encrypted block needs {nbytes} bytes, {left} are left (file cut short?)"
        raise FormatError(path, at, reason)
    if not nbytes or (mode != "AES-GCM" and nbytes % UNIT):
        reason = f"{nbytes} bytes of ciphertext, which {mode} never makes"
        raise FormatError(path, at, reason)
    return _Frame(at, magic, tag, iv, at + form.size, nbytes)


def _is_untagged(head: bytes) -> bool:
    """Whether the three lengths are where they are without a tag; by chance one in 2**64 is."""
    if len(head) < _UNTAGGED.size:
        return False
    _, rest, iv_bytes, _, nbytes = _UNTAGGED.unpack(head[: _UNTAGGED.size])
    return bool(iv_bytes == UNIT and rest == nbytes + 24)


def _fit(fd: int, path: str, frames: Sequence[_Frame], mode: str, key: Secret) -> Ciphertext | None:
    """How the file is encrypted, if the key fits; raises `FormatError` if it is damaged."""
    if mode != "AES-GCM" and any(frame.nbytes % UNIT for frame in frames):
        return None  # one of the two modes that a block without a tag may have
    blocks: list[Block] = []
    paddings = [_padding(fd, path, mode, key, frame) for frame in frames]
    for frame, padding in zip(frames, paddings, strict=True):
        start = blocks[-1].stop if blocks else 0
        stop = start + frame.nbytes - (padding or 0)
        blocks.append(Block(frame.offset, frame.nbytes, start, stop, frame.iv, frame.tag))
    cipher = Ciphertext(mode, key, tuple(blocks))
    head = bytearray(min(UNIT, cipher.nbytes))
    read_plain(fd, path, cipher, 0, memoryview(head))
    if not _begins_a_record(head, cipher.nbytes):
        if cipher.has_tags and not find_forged(path, cipher, 0, 1, stamp_of(fd)):
            return cipher
        _refuse_damage(path, frames, cipher, paddings, stamp_of(fd))
        return None
    if None in paddings:
        number = paddings.index(None)
        reason = f"encrypted block {number + 1} of {len(frames)} does not end in a padding: damaged"
        raise FormatError(path, frames[number].start, reason)
    return cipher


def _refuse_damage(
    path: str,
    frames: Sequence[_Frame],
    cipher: Ciphertext,
    paddings: Sequence[int | None],
    stamp: SourceStamp,
) -> None:
    """Raise what is wrong with the first block, which begins no record, if the key is right.

    That it is another block tells by its tag, and with CBC paddings do, the first block's own, too:
    of n bytes they are right by chance in one of 256**n.
    """
    last = len(frames) - 1
    if cipher.has_tags:
        if last and not find_forged(path, cipher, last, last + 1, stamp):
            error = forgery(path, cipher, (0,))
            reason = f"{error.reason}; the key is right, as it is that of block {last + 1}"
            raise AuthenticityError(path, error.offset, reason)
        return
    right = [padding for padding in paddings if padding]
    if sum(right) >= PROOF_BYTES and 2 * len(right) >= len(paddings):
        reason = f"encrypted block 1 of {len(frames)} decrypts to no record: damaged at its "
        reason += "beginning; the key is right, as the paddings at the end of "
        reason += f"{len(right)} of {len(frames)} blocks show"
        raise FormatError(path, frames[0].start, reason)


def _padding(fd: int, path: str, mode: str, key: Secret, frame: _Frame) -> int | None:
    """Bytes of padding behind a block's plaintext; None if there is none where there must be."""
    if mode == "AES-GCM":
        return 0
    block = Block(frame.offset, frame.nbytes, 0, frame.nbytes, frame.iv, frame.tag)
    end = bytearray(UNIT)
    cipher = Ciphertext(mode, key, (block,))
    read_plain(fd, path, cipher, frame.nbytes - UNIT, memoryview(end))
    padding = end[-1]
    is_right = 0 < padding <= UNIT and end.endswith(bytes([padding]) * padding)
    return padding if is_right else None


def unmarked_block(path: str) -> str | None:
    """What is wrong with a file that begins as an encrypted block but for its magic; else None.

    Where the lengths in a block are right by chance in one of 2**64.
    """
    with ReadFile(path) as file:
        head = os.pread(file.fileno(), _TAGGED.size, 0)
    if mode_of(head) is not None or not (_is_untagged(head) or _is_untagged(head[16:])):
        return None
    marks = ", ".join(f"{mark.hex(' ')} for {mode}" for mark, mode in MODES.items())
    reason = f"an encrypted block that begins with {head[:4].hex(' ')}, expected {marks}"
    return f"{reason} (damaged, or of a mode that is not known)"


def _begins_a_record(head: bytes | bytearray, nbytes: int) -> bool:
    """Whether a plaintext of ``nbytes`` bytes may be records; of random ones 1 in 30,000 may."""
    length = 0
    for at, byte in enumerate(head[1:11]):
        length |= (byte & 0x7F) << 7 * at
        if byte < 0x80:
            behind = at + 2
            inner = head[behind : behind + 1]
            return head[0] == 0x0A and length <= nbytes - behind and inner in (b"\x0a", b"\x12")
    return False


def forgery(path: str, cipher: Ciphertext, numbers: Sequence[int]) -> AuthenticityError:
    """What is to be said of blocks that do not match their tags."""
    named = ", ".join(str(number + 1) for number in numbers[:10])
    more = ", ..." if len(numbers) > 10 else ""
    reason = f"encrypted block {named}{more} of {len(cipher.blocks)} does not match its tag"
    reason += ": the file is damaged, or somebody has changed it"
    return AuthenticityError(path, cipher.blocks[numbers[0]].offset, reason)


def fitting_others(error: WrongKeyError, others: int) -> AuthenticityError:
    """The same of a file of several, of which the key fits ``others``."""
    reason = "encrypted block 1 decrypts to no record, though the key fits "
    reason += (
        f"{count(others, 'other file')}: damaged at its beginning, or encrypted with another key"
    )
    return AuthenticityError(error.path, error.offset, reason)


def explain(error: FormatError, cipher: Ciphertext, stamp: SourceStamp) -> FormatError:
    """An error in the records of an encrypted file, with what lies behind it."""
    forged = find_forged(error.path, cipher, 0, len(cipher.blocks), stamp)
    if forged:
        return forgery(error.path, cipher, forged)
    doubt = "" if cipher.has_tags else "; damaged, or by chance the wrong key looks right"
    reason = f"{error.reason} (bytes are counted in what the file decrypts to{doubt})"
    return type(error)(error.path, error.offset, reason)
