"""``--dec-key-file``: the key of encrypted files, which comes from a file or standard input only.

Others on the machine can read arguments and environment variables, which also end up in shell
histories and logs.
"""

from __future__ import annotations

import errno
import os

import click

from ckpttool.formats.reading import why_not_a_path
from ckpttool.model.ciphertext import Secret, forbid_core_dumps

SIZES = (16, 24, 32)  # of every key that MindSpore takes
HEX = b"hex:"  # no key of that many digits behind it has one of these sizes
MAX_FILE_BYTES = 1024  # a larger file does not hold a key


def parse_key(data: bytes) -> Secret | None:
    r"""Return the key that a file holds, or None.

    The file holds the bytes that MindSpore took, or ``hex:`` and their digits.  One line end after
    it is ignored.

    Examples
    --------
    >>> parse_key(b"0123456789abcdef\n").reveal()
    b'0123456789abcdef'
    >>> len(parse_key(b"hex:" + b"5A" * 32))
    32
    >>> parse_key(b"too short")
    """
    for end in (b"", b"\n", b"\r\n"):
        key = data.removesuffix(end)
        if not data.endswith(end):
            continue
        if len(key) not in SIZES and key.startswith(HEX):
            try:
                key = bytes.fromhex(key.removeprefix(HEX).decode("ascii"))
            except ValueError:
                continue
        if len(key) in SIZES:
            return Secret(key)
    return None


def read_key(ctx: click.Context, param: click.Parameter, value: str | None) -> Secret | None:
    """Read the key; messages never repeat the argument, which may be the key itself."""
    if value is None:
        return None
    if why_not_a_path(value) is not None:
        raise click.BadParameter("a URL, not a path: copy the file to this host", ctx, param)
    forbid_core_dumps()
    try:
        with click.open_file(value, "rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
            if data is None:  # a read that would block
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    except OSError as error:
        reason = f"it cannot be read ({error.strerror}); it names a file that holds the key"
        raise click.BadParameter(reason, ctx, param) from None
    key = parse_key(data) if len(data) <= MAX_FILE_BYTES else None
    if key is None:
        sizes = f"{len(data)} bytes" if len(data) <= MAX_FILE_BYTES else "too many bytes"
        reason = f"the file holds {sizes}; keys have 16, 24 or 32, or are spelled hex:00ff..."
        raise click.BadParameter(reason, ctx, param)
    return key
