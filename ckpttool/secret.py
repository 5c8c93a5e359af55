"""Keys: bytes that are not shown, in processes that write no core dumps."""

from __future__ import annotations

from ckpttool.system import forbid_core_dumps


class Secret:
    """Bytes that ``repr``, ``str``, a traceback or a record never shows.

    A pickle of it holds the bytes, because workers in other processes need them.  Such pickles go
    to workers and nowhere else.  A process that makes or unpickles a secret writes no core dump
    from then on, because the dump would hold the bytes.

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
        return Secret, (self._value,)  # a worker calls __init__, too

    def reveal(self) -> bytes:
        """Return the bytes."""
        return self._value

    def __len__(self) -> int:
        return len(self._value)

    def __repr__(self) -> str:
        return "Secret(...)"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and self._value == other._value

    def __hash__(self) -> int:
        return hash(self._value)
