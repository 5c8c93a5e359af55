"""Encrypts checkpoints as MindSpore does, block by block, each by one call of cryptography.

The package decrypts in pieces, and GCM as the counter mode that it is; nothing of that is here.
"""

from __future__ import annotations

import hashlib

from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.padding import PKCS7

from tests.support.file_bytes import record

MAGIC = {"AES-GCM": b"\xd8", "AES-CBC": b"\xd9", "SM4-CBC": b"\xda"}
MODES = tuple(MAGIC)
KEY = b"0123456789abcdef"
PLAIN = record("w", "Float32", (2, 3), bytes(range(24))) + record("b", "Int8", (7,), b"seven..")
KEYS = [(mode, size) for mode in MODES for size in (16, 24, 32) if mode != "SM4-CBC" or size == 16]


def u32(number: int) -> bytes:
    """Return four bytes, little endian."""
    return number.to_bytes(4, "little")


def frame(mode: str, iv: bytes, data: bytes, tag: bytes) -> bytes:
    """Return a block of ciphertext behind its header."""
    head = MAGIC[mode] + b"\x5e\x3a\x7f" + tag
    return head + u32(24 + len(data)) + u32(len(iv)) + iv + u32(len(data)) + data


def encrypt_block(mode: str, key: bytes, iv: bytes, plain: bytes) -> tuple[bytes, bytes]:
    """Return ciphertext and tag."""
    if mode == "AES-GCM":
        sealed = AESGCM(key).encrypt(iv[:12], plain, None)
        return sealed[:-16], sealed[-16:]
    padder = PKCS7(128).padder()
    padded = padder.update(plain) + padder.finalize()
    algorithm = algorithms.AES(key) if mode == "AES-CBC" else algorithms.SM4(key)
    encryptor = Cipher(algorithm, modes.CBC(iv)).encryptor()
    return encryptor.update(padded) + encryptor.finalize(), b""


def encrypt(
    plain: bytes, mode: str = "AES-GCM", key: bytes = KEY, block_bytes: int = 64 << 20
) -> bytes:
    """Return a file that decrypts to ``plain``."""
    out = b""
    for start in range(0, len(plain), block_bytes):
        iv = hashlib.md5(b"%d" % start).digest()
        data, tag = encrypt_block(mode, key, iv, plain[start : start + block_bytes])
        out += frame(mode, iv, data, tag)
    return out
