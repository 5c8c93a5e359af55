"""Transcripts of the command line, and the files that they are compared with.

A snapshot is a text that a reviewer can read: for each command the line as a user types it, stdout
as it is, stderr behind ``2>``, and the exit code if it is not 0.  A JSON document is laid out with
one element of its lists on a line, so that a change shows as a short diff.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import shlex
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import ckpttool
from tests.support.commands import run
from tests.support.corpus import GOLDEN

if TYPE_CHECKING:
    from click.testing import Result

SNAPSHOTS = Path(__file__).parents[1] / "e2e" / "snapshots"
UPDATE = "SNAPSHOT_UPDATE"  # this variable makes the tests write the files anew
MAX_DIFF_LINES = 200  # of a failure

# What is replaced, in this order; nothing else of an output is changed.
SUBSTITUTIONS = (
    (re.escape(f"version {ckpttool.__version__}"), "version VERSION"),
    (r"\b\d+\.\d\d s\b", "0.00 s"),  # seconds
    # What a dry run says of this machine, and of Python's buffers.
    (r"(?m)^(memory +about) [\d.]+ [KMG]iB for threads:\d+", r"\1 SIZE for threads:N"),
    (r"\b[\d.]+ [KMG]?i?B free in \S+", "SIZE free in FOLDER"),
    (r"; headers [\d.]+ [KMG]?i?B,", "; headers SIZE,"),
    # words of click, which differ between its versions
    (r"(?m)^(Try 'ckpttool.*) (?:-h|--help)' for help\.$", r"\1 --help' for help."),
    (r"No such option:? '?(-[\w-]+)'?[.:]?.*", r"No such option '\1'."),
    (r"libhdf5: .*", "libhdf5: REASON"),  # words of the HDF5 library
    (r"made by( +)ckpttool \S+ from", r"made by\1ckpttool VERSION from"),
    (r'"ckpttool\.version": "[^"]*"', '"ckpttool.version": "VERSION"'),  # in headers
    (r'"ckpttool": "[^"]*"', '"ckpttool": "VERSION"'),  # in manifests, and
    (r'(?m)^"sha256": "\w+"\}$', '"sha256": "OF THE LINES ABOVE"}'),
)
SIZE = re.compile(r" *\b[\d,.]+ (?:[KMG]i)?B\b")  # of HDF5 files it differs between versions


class Transcript:
    """Commands that run in one folder, and what they print."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lines: list[str] = []

    def remark(self, text: str) -> None:
        self.lines += ["", f"# {text}"]

    def run(self, line: str) -> Result:
        """Run a command line in this process, and add what it prints."""
        result = run(*shlex.split(line))
        stdout = result.stdout
        is_of_hdf5 = ".h5" in line or "hdf5" in stdout.lower()
        if "--json" in line and stdout.startswith("{"):
            stdout = lay_out(stdout, is_of_hdf5)
        elif is_of_hdf5:
            stdout = SIZE.sub(" SIZE", stdout)
        self.add(line, stdout, result.stderr, result.exit_code)
        return result

    def add(
        self, line: str, stdout: str, stderr: str, exit_code: int, program: str = "ckpttool "
    ) -> None:
        self.lines += ["", f"$ {program}{line}"]
        self.lines += self.normalise(stdout).rstrip("\n").split("\n") if stdout else []
        told = self.normalise(stderr).rstrip("\n").split("\n") if stderr else []
        self.lines += [f"2> {text}".rstrip() for text in told]
        self.lines += [f"=> exit {exit_code}"] if exit_code else []

    def quietly(self, line: str) -> None:
        result = run(*shlex.split(line))
        assert result.exit_code == 0, result.stderr

    def clear(self, *names: str) -> None:
        for name in names:
            path = self.folder / name
            if path.is_dir():
                shutil.rmtree(path)
            for one in path.parent.glob(f"{path.name}*"):
                one.unlink()

    def normalise(self, text: str) -> str:
        text = text.replace(str(self.folder), "HERE").replace(str(GOLDEN), "golden")
        for pattern, replacement in SUBSTITUTIONS:
            text = re.sub(pattern, replacement, text)
        return text

    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.lines[1:]) + "\n"


def lay_out(document: str, is_of_hdf5: bool) -> str:
    """Return a JSON document with one line for each element of its lists, without its seconds.

    The bytes of HDF5 files, which differ between versions of the library, are 0.
    """
    parsed = json.loads(document)
    for key in ("seconds", *(("nbytes", "src_bytes", "dst_bytes") if is_of_hdf5 else ())):
        parsed |= {key: 0} if key in parsed else {}
    for one in parsed.get("outputs", ()):
        one |= {"nbytes": 0} if one["format"] == "hdf5" else {}
    if (takes := parsed.get("dry_run")) is not None:  # what differs between machines
        takes["reads"]["headers"] = {"requests": 0, "nbytes": 0}
        takes["memory"] = {"nbytes": 0, "engine": "threads:N"}
        for disk in takes["disks"]:
            disk |= {"folder": "FOLDER", "free": 0}
    return _lay_out(parsed, is_open=True) + "\n"


def _lay_out(value: object, is_open: bool = False) -> str:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n  " + ",\n  ".join(map(_lay_out, value)) + "\n ]"
    if isinstance(value, dict) and (is_open or "diagnostics" in value):
        lines = (f"{json.dumps(key)}: {_lay_out(one)}" for key, one in value.items())
        return "{" + ",\n ".join(lines) + "}"
    return json.dumps(value, ensure_ascii=False)


def check_snapshot(name: str, text: str) -> None:
    """Compare a transcript with its file, or write the file if that is asked for.

    A mistake in ckpttool is never the right answer, whatever the file says.
    """
    if "=> exit 70" in text:
        pytest.fail(f"an internal error in {name}", pytrace=False)
    path = SNAPSHOTS / f"{name}.txt"
    if os.environ.get(UPDATE):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return
    expected = path.read_text(encoding="utf-8") if path.exists() else ""
    if text == expected:
        return
    diff = difflib.unified_diff(
        expected.splitlines(), text.splitlines(), f"snapshots/{name}.txt", "now", lineterm=""
    )
    lines = list(diff)
    shown = "\n".join(lines[:MAX_DIFF_LINES])
    more = len(lines) - MAX_DIFF_LINES
    shown += f"\n... {more} more lines" if more > 0 else ""
    pytest.fail(
        f"{shown}\n\nif it is meant: {UPDATE}=1 pytest tests/e2e, and git diff", pytrace=False
    )
