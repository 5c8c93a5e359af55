"""The plaintext of encrypted files, read from any byte on in a fixed amount of memory.

GCM is counter mode, whose counter at byte ``16 * i`` of a block is ``2 + i``, 4 bytes big endian
behind the nonce.  CBC goes on from any 16 bytes with the 16 bytes of ciphertext before them as the
IV.  So no block has to be decrypted from its beginning, and no more than `PIECE_BYTES` of one are
in memory.

The package cryptography is imported when the first byte is decrypted, for few users need it.

Source
------
NIST SP 800-38A and 800-38D.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ckpttool.errors import FormatError, UnsupportedError
from ckpttool.formats.reading import open_source
from ckpttool.formats.stopping import go_on
from ckpttool.model.catalog import SourceStamp
from ckpttool.model.ciphertext import Ciphertext

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers import CipherContext

UNIT = 16  # bytes that AES and SM4 work on at a time
NONCE_BYTES = 12
FIRST_COUNTER = 2  # GCM keeps 1 for the tag
PIECE_BYTES = 1 << 20  # decrypted at a time; with less or more it is slower (measured)


class DecryptedFile:
    """The plaintext of a file, addressed by byte offset, for `ckpttool.formats.wire`.

    Attributes
    ----------
    size
        Bytes of the plaintext.
    stamp
        The stamp of the file.
    """

    def __init__(self, path: str, cipher: Ciphertext, stamp: SourceStamp) -> None:
        self.size = cipher.nbytes
        self.stamp = stamp
        self._path = path
        self._cipher = cipher
        self._file = open_source(path, stamp)

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
        There is nothing to decrypt with.
    """
    for block, at, view in cipher.split(start, out):
        part = view
        while part:
            skip = at % UNIT
            first = at - skip
            nbytes = min(PIECE_BYTES, -(-(skip + len(part)) // UNIT) * UNIT, block.nbytes - first)
            if cipher.mode == "AES-GCM":
                counter = (FIRST_COUNTER + first // UNIT).to_bytes(UNIT - NONCE_BYTES, "big")
                iv = block.iv[:NONCE_BYTES] + counter
                data = _read(fd, path, block.offset + first, nbytes)
            elif first == 0:
                iv, data = block.iv, _read(fd, path, block.offset, nbytes)
            else:
                data = _read(fd, path, block.offset + first - UNIT, UNIT + nbytes)
                iv, data = data[:UNIT], data[UNIT:]
            plain = memoryview(_decryptor(path, cipher, iv).update(data))[skip : skip + len(part)]
            part[: len(plain)] = plain
            at, part = at + len(plain), part[len(plain) :]


def find_forged(
    path: str, cipher: Ciphertext, first: int, stop: int, stamp: SourceStamp | None = None
) -> tuple[int, ...]:
    """Return the numbers of the blocks in ``first`` to ``stop`` that do not match their tags.

    Read them whole, a piece at a time.  A block without a tag is not among them.  For ``stamp``
    see `open_source`.
    """
    from cryptography.exceptions import InvalidTag

    found = []
    with open_source(path, stamp) as file:
        for number in range(first, min(stop, len(cipher.blocks))):
            block = cipher.blocks[number]
            if not block.tag:
                continue
            decryptor = _decryptor(path, cipher, block.iv[:NONCE_BYTES], block.tag)
            for at in range(0, block.nbytes, PIECE_BYTES):
                nbytes = min(PIECE_BYTES, block.nbytes - at)
                decryptor.update(_read(file.fileno(), path, block.offset + at, nbytes))
            try:
                decryptor.finalize()
            except InvalidTag:
                found.append(number)
    return tuple(found)


def _decryptor(path: str, cipher: Ciphertext, iv: bytes, tag: bytes = b"") -> CipherContext:
    """Return what decrypts from ``iv`` on; with a tag it also proves the block."""
    try:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
    except ImportError as error:
        reason = f"encrypted with {cipher.mode}, for which the package cryptography is needed: "
        raise UnsupportedError(path, 0, f"{reason}pip install 'ckpttool[crypto]'") from error
    key = cipher.key.reveal()
    try:
        if cipher.mode == "SM4-CBC":
            return Cipher(algorithms.SM4(key), modes.CBC(iv)).decryptor()
        if cipher.mode == "AES-CBC":
            return Cipher(algorithms.AES(key), modes.CBC(iv)).decryptor()
        mode = modes.GCM(iv, tag) if tag else modes.CTR(iv)
        return Cipher(algorithms.AES(key), mode).decryptor()
    except (AttributeError, UnsupportedAlgorithm) as error:
        reason = f"encrypted with {cipher.mode}, which the installed cryptography or its OpenSSL "
        reason += "does not have; pip install -U 'ckpttool[crypto]' brings one that does"
        raise UnsupportedError(path, 0, reason) from error


def _read(fd: int, path: str, offset: int, nbytes: int) -> bytes:
    go_on()
    data = os.pread(fd, nbytes, offset)
    while len(data) < nbytes:
        more = os.pread(fd, nbytes - len(data), offset + len(data))
        if not more:
            reason = "the file ends here; it has changed while read"
            raise FormatError(path, offset + len(data), reason)
        data += more
    return data
