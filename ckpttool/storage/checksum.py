"""MindSpore's checksums (``crc_check=True``): CRC-32 of what a format says it is taken over."""

from __future__ import annotations

import os
import re
import zlib
from io import FileIO
from pathlib import Path

from ckpttool.errors import FormatError
from ckpttool.formats import checksum_parts
from ckpttool.formats.stopping import go_on
from ckpttool.model.catalog import Extent, FileIndex
from ckpttool.model.maps import map_of

BUFFER_BYTES = 1 << 20  # read at a time
POLYNOMIAL = 0xEDB88320  # of CRC-32, lowest power in the highest bit


def compute_checksum(index: FileIndex, as_saved: bool = False) -> int:
    """The checksum of a file with these contents, which are read whole, a buffer at a time.

    Parameters
    ----------
    index
        The header of the file.
    as_saved
        As MindSpore's saver counts, where its loader counts otherwise.

    Raises
    ------
    FormatError
        The file has become shorter since its header was read.
    """
    crc = 0
    buffer = memoryview(bytearray(BUFFER_BYTES))
    with Path(index.path).open("rb", buffering=0) as file:
        for part in checksum_parts(index, as_saved):
            if isinstance(part, bytes):
                crc = zlib.crc32(part, crc)
            elif isinstance(part, Extent):
                crc = _add_extent(crc, file, index.path, part, buffer)
            else:
                crc = add_zeros(crc, part)
    return crc


def _add_extent(crc: int, file: FileIO, path: str, extent: Extent, buffer: memoryview) -> int:
    file.seek(extent.offset)
    left = extent.nbytes
    while left:
        go_on()
        got = file.readinto(buffer[:left])
        if not got or not os.fstat(file.fileno()).st_nlink:  # cut short, or taken away
            reason = "the file ends here; it has changed while read"
            raise FormatError(path, extent.offset + extent.nbytes - left, reason)
        crc = zlib.crc32(buffer[:got], crc)
        left -= got
    return crc


def add_zeros(crc: int, count: int) -> int:
    """The CRC-32 of data with this CRC-32 and ``count`` zero bytes behind it.

    Each byte multiplies the remainder by x**8, so ``count`` of them take a power of it, in some
    hundred steps however many they are.

    Examples
    --------
    >>> add_zeros(zlib.crc32(b"data"), 1000) == zlib.crc32(b"data" + bytes(1000))
    True
    """
    factor = 1 << 31 - 8  # x**8
    remainder = crc ^ 0xFFFFFFFF
    while count:
        if count & 1:
            remainder = _multiply(remainder, factor)
        factor = _multiply(factor, factor)
        count >>= 1
    return remainder ^ 0xFFFFFFFF


def _multiply(a: int, b: int) -> int:
    """The product of two polynomials over GF(2), modulo the polynomial of CRC-32."""
    product = 0
    for power in range(31, -1, -1):
        if a >> power & 1:
            product ^= b
        b = b >> 1 ^ (POLYNOMIAL if b & 1 else 0)
    return product


def verify_checksum(index: FileIndex) -> FormatError | None:
    """What is wrong with the contents of a file that has a checksum, None if nothing is."""
    stored = index.attrs["crc_num"]
    number = int(stored) if stored.isascii() and stored.isdecimal() else None
    found = compute_checksum(index)
    has_maps = any(map_of(name) is not None for name in index.tensors)
    if number == found or (has_maps and number == compute_checksum(index, as_saved=True)):
        return None
    reason = f"the checksum (crc_num) stored with it is {stored}, that of its contents {found}: it"
    reason += " is damaged"
    if re.fullmatch(r"part\d+\.safetensors", Path(index.path).name):
        reason += ", or made by unified_safetensors, which copies the checksum of a rank's file"
    return FormatError(index.path, None, reason)
