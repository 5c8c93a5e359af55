"""``ckpttool.json``: says that an output folder holds a complete set of files, and which.

One JSON object::

    {"schema": 1, "ckpttool": "0.1.0", "plan": "sha256:...", "step": "2_10", "outputs": [
        {"rank": 0, "path": "rank_0/checkpoint_0.ckpt", "format": "ckpt", "nbytes": 100,
         "tensors": 3}, ...]}

``plan`` is the same for runs of the same plan, ``step`` that of the source or null, ``path`` is
counted from the folder.  It is the last to be written, and removed before an output is replaced.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath

from ckpttool import __version__
from ckpttool.errors import FormatError
from ckpttool.formats.strict_json import parse_json

NAME = "ckpttool.json"


@dataclass(frozen=True, slots=True)
class Written:
    """An output that is complete under its final name."""

    rank: int
    path: str
    format: str
    nbytes: int
    tensors: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """A complete set of outputs; their paths are counted from the folder."""

    plan: str
    step: str | None
    outputs: tuple[Written, ...]

    def text(self) -> str:
        """The file's content."""
        return document_text(asdict(self))


def document_text(entries: Mapping[str, object]) -> str:
    """A JSON object on a line, which says what wrote it."""
    return json.dumps({"schema": 1, "ckpttool": __version__, **entries}) + "\n"


def read_manifest(path: Path) -> Manifest:
    """The manifest in a file.

    Raises
    ------
    FormatError
        It is none.
    OSError
        It cannot be read.
    """
    entries = Entries.read(path)
    return Manifest(entries.text("plan"), entries.step(), entries.outputs())


def output_problems(folder: Path, outputs: Sequence[Written]) -> Iterator[str]:
    """A message for each output that is not in a folder as it was written."""
    for output in outputs:
        try:
            nbytes = os.stat(folder / output.path).st_size  # noqa: PTH116 - one look, one answer
        except FileNotFoundError:
            yield f"{output.path}: is not there"
            continue
        if nbytes != output.nbytes:
            yield f"{output.path}: expected {output.nbytes} bytes, found {nbytes}"


@dataclass(frozen=True, slots=True)
class Entries:
    """The entries of a JSON object in a file, each taken as what it has to be."""

    path: Path
    entries: Mapping[str, object]

    @classmethod
    def read(cls, path: Path) -> Entries:
        """The object in a file of the schema that is known here."""
        try:
            document = parse_json(path.read_bytes())
        except ValueError as error:
            raise FormatError(str(path), None, str(error)) from error
        entries = cls(path, document if isinstance(document, dict) else {})
        if entries.entries.get("schema") != 1:
            raise entries.wrong("schema", "1 (is it of a newer ckpttool?)")
        return entries

    def wrong(self, name: str, expected: str) -> FormatError:
        """The error that says so of an entry."""
        found = json.dumps(self.entries.get(name))
        found = found if len(found) < 80 else f"{found[:80]} ..."
        return FormatError(str(self.path), None, f"{name}: expected {expected}, found {found}")

    def text(self, name: str) -> str:
        """An entry that is a string."""
        value = self.entries.get(name)
        if not isinstance(value, str):
            raise self.wrong(name, "a string")
        return value

    def number(self, name: str) -> int:
        """An entry that is a count."""
        value = self.entries.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self.wrong(name, "a count")
        return value

    def file(self, name: str) -> str:
        """An entry that is the path of a file in the folder or below."""
        value = self.text(name)
        parts = PurePosixPath(value).parts
        if not parts or parts[0] == "/" or ".." in parts or "\0" in value:
            raise self.wrong(name, "a path below the folder")
        return value

    def objects(self, name: str) -> tuple[Entries, ...]:
        """An entry that is a list of objects."""
        value = self.entries.get(name)
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise self.wrong(name, "a list of objects")
        return tuple(Entries(self.path, item) for item in value)

    def step(self) -> str | None:
        """The step of the source, if it has one."""
        return None if self.entries.get("step") is None else self.text("step")

    def outputs(self) -> tuple[Written, ...]:
        """What was written."""
        return tuple(
            Written(
                item.number("rank"),
                item.file("path"),
                item.text("format"),
                item.number("nbytes"),
                item.number("tensors"),
            )
            for item in self.objects("outputs")
        )
