"""Where the encrypted bytes of a file are, and the key that nobody gets to see."""

from __future__ import annotations

import resource
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache

PR_SET_DUMPABLE = 4  # of Linux, <sys/prctl.h>


@cache  # once for a process; what is forked from it inherits both
def forbid_core_dumps() -> None:
    """Have this process write no core dump, whatever ends it.

    A limit of 0 bytes counts for dumps into files, and on Linux a process that is not "dumpable"
    is not handed to a program that collects dumps either.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(ImportError, OSError, AttributeError):  # a Python without ctypes; no Linux
        from ctypes import CDLL

        CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)


class Secret:
    """Bytes that are shown nowhere: not by ``repr``, ``str``, a traceback or a dataclass.

    A pickle of it holds them, for a worker in another process needs them: such pickles go to
    workers and nowhere else.  A process that makes one, or unpickles one, writes no core dump from
    then on: the dump would hold the bytes.

    Examples
    --------
    >>> key = Secret(b"0123456789abcdef")
    >>> print(key, [key], len(key))
    Secret(...) [Secret(...)] 16
    """

    __slots__ = ("_value",)

    def __init__(self, value: bytes) -> None:
        forbid_core_dumps()
        self._value = value

    def __reduce__(self) -> tuple[type[Secret], tuple[bytes]]:
        return Secret, (self._value,)  # so that a worker's is made by __init__, too

    def reveal(self) -> bytes:
        """The bytes."""
        return self._value

    def __len__(self) -> int:
        return len(self._value)

    def __repr__(self) -> str:
        return "Secret(...)"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and self._value == other._value

    def __hash__(self) -> int:
        return hash(self._value)


@dataclass(frozen=True, slots=True)
class Block:
    """One block of ciphertext; every block is encrypted by itself.

    Attributes
    ----------
    offset, nbytes
        Where the ciphertext lies in the file, padding included.
    start, stop
        The bytes of the whole plaintext that it holds.
    iv
        Its initialization vector, 16 bytes.
    tag
        What proves that it is genuine, 16 bytes; empty where the mode has no such proof.
    """

    offset: int
    nbytes: int
    start: int
    stop: int
    iv: bytes
    tag: bytes


@dataclass(frozen=True, slots=True)
class Ciphertext:
    """How a file is encrypted.

    Attributes
    ----------
    mode
        ``"AES-GCM"``, ``"AES-CBC"`` or ``"SM4-CBC"``.
    key
        As MindSpore took it.
    blocks
        In the order of the file, which is that of the plaintext, without gaps.
    """

    mode: str
    key: Secret
    blocks: tuple[Block, ...] = field(repr=False)  # of a large file some thousand

    @property
    def nbytes(self) -> int:
        """Bytes of the plaintext."""
        return self.blocks[-1].stop if self.blocks else 0

    @property
    def has_tags(self) -> bool:
        """Whether something proves the blocks."""
        return bool(self.blocks and self.blocks[0].tag)

    def split(self, start: int, view: memoryview) -> Iterator[tuple[Block, int, memoryview]]:
        """Block, first byte counted in it, and part of ``view``, for plaintext from ``start`` on.

        ``view`` must not reach beyond the plaintext.
        """
        number = bisect_right(self.blocks, start, key=lambda block: block.start) - 1
        while view:
            block = self.blocks[number]
            part = view[: block.stop - start]
            if part:
                yield block, start - block.start, part
            view, start = view[len(part) :], block.stop
            number += 1
