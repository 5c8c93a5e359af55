"""Manifests and records of runs, written anew by code that is not the package's."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import Any
from zlib import crc32

MANIFEST = "ckpttool.json"
RECORD = ".ckpttool"  # the folder of the record of a run
LOG = f"{RECORD}/whole.log"
PLAN = f"{RECORD}/plan.json"
UNFINISHED = (PLAN, LOG)  # files of a whole run that has not ended
STAMPS = f"{RECORD}/stamps.json"  # of a finished set


def proven(text: str) -> bytes:
    """Return the lines of a manifest with the last one, which proves them."""
    return f'{text}], "sha256": "{sha256(text.encode()).hexdigest()}"}}\n'.encode()


def listing_of(document: dict[str, Any]) -> bytes:
    """Return a manifest or a record that says this, with its checksum."""
    head = {key: value for key, value in document.items() if key not in ("outputs", "sha256")}
    outputs = ",\n".join(json.dumps(output) for output in document["outputs"])
    return proven(f'{json.dumps(head)[:-1]}, "outputs": [\n{outputs}\n')


def log_line(text: str) -> bytes:
    """Return the line of a log with this JSON and its checksum."""
    return b"%b %08x\n" % (text.encode(), crc32(text.encode()))


def reseal(path: Path, *changes: tuple[str, str]) -> None:
    """Replace texts in a manifest or a record by others, as if it had been written so."""
    text = path.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path.write_bytes(proven(text[: text.rindex("]")]))
