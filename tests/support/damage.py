"""Files with a byte changed or the end cut off."""

from __future__ import annotations

import os
from pathlib import Path


def flipped(data: bytes, at: int, mask: int = 1) -> bytes:
    """Return the data with the bits of a mask turned in one byte."""
    changed = bytearray(data)
    changed[at] ^= mask
    return bytes(changed)


def flip_byte(path: Path, at: int = -1, mask: int = 1) -> None:
    """Turn bits in one byte of a file."""
    path.write_bytes(flipped(path.read_bytes(), at, mask))


def flip_unnoticed(path: Path) -> None:
    """Turn a bit in the last byte of a file, and give the file its times back."""
    before = path.stat()
    flip_byte(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def cut_short(path: Path, nbytes: int = 5) -> Path:
    """Remove the last bytes of a file."""
    path.write_bytes(path.read_bytes()[:-nbytes])
    return path
