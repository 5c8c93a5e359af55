"""Sessions in a shell that texts hold: command lines, and below each what it prints.

A case begins with ``# TITLE`` and an empty folder in which ``golden`` is the corpus; the lines
above the first case are done before each.  ``## REMARK`` says what comes next.  ``$ ckpttool ...``
runs in this process, and other lines in ``sh``, but for these:

- ``$ write run 0-3 w(4,3)=aabb v:Float16(2)``: files of ranks, in the words of
  `tests.support.described`; ``run.safetensors`` is of this format;
- ``$ model DIR 2 layers.{0-3}.w(4,3) v(2)``: a folder of Hugging Face, of so many files and an
  index; ``layers.{0-3}`` are four names;
- ``$ strategy s.ckpt w=2x2:1,- / v=4:-``: a strategy of these layouts, stage by stage;
- ``$ flip FILE AT``: another bit in a byte; ``$ shorten FILE N``: a file without its last bytes;
- ``$ encrypt AES-GCM FILE ...``: the files encrypted, with a key that lies in ``key``.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import pytest

import ckpttool
from ckpttool.wording import parse_numbers
from tests.support.checkpoints import strategy_of, write_indexed, write_ranks
from tests.support.damage import cut_short, flip_byte
from tests.support.described import entries_of, layout_of, ranks_of
from tests.support.encryption import KEY, encrypt
from tests.support.snapshots import Transcript
from tests.support.transcripts import compare_case, read_cases

PROGRAM = "ckpttool"
PYTHON = Path(sys.executable).parent


def write_tensors(folder: str, ranks: str, *tensors: str) -> None:
    root, _, format = folder.partition(".")
    held = {rank: entries_of(" ".join(tensors), rank) for rank in ranks_of(ranks)}
    write_ranks(Path(root), held, format or "ckpt")


def write_model(folder: str, number: str, *tensors: str) -> None:
    entries = entries_of(" ".join(chain(*map(expanded, tensors))), 0)
    names, files = [*entries], int(number)
    each = -(-len(names) // files)
    parts = [names[n * each : (n + 1) * each] for n in range(files)]
    held = {
        f"model-{n + 1:05d}-of-{files:05d}.safetensors": {name: entries[name] for name in part}
        for n, part in enumerate(parts)
    }
    write_indexed(Path(folder), held, "model.safetensors.index.json")


def expanded(words: str) -> list[str]:
    """Return a text with each of the numbers in its braces."""
    before, brace, rest = words.partition("{")
    if not brace:
        return [words]
    numbers, _, after = rest.partition("}")
    return [f"{before}{n}{end}" for n in parse_numbers(numbers) for end in expanded(after)]


def write_layouts(path: str, *words: str) -> None:
    stages = [stage.split() for stage in " ".join(words).split(" / ")]
    layouts = [dict(word.split("=", 1) for word in stage) for stage in stages]
    parsed = [{name: layout_of(text) for name, text in stage.items()} for stage in layouts]
    ckpttool.write_strategy(strategy_of(*parsed), path, overwrite=True)


def encrypt_files(mode: str, *paths: str) -> None:
    for path in map(Path, paths):
        path.write_bytes(encrypt(path.read_bytes(), mode, KEY, 200))
    Path("key").write_bytes(KEY)


VERBS: dict[str, Callable[..., object]] = {
    "write": write_tensors,
    "model": write_model,
    "strategy": write_layouts,
    "encrypt": encrypt_files,
    "flip": lambda path, at="-1", mask="1": flip_byte(Path(path), int(at), int(mask)),
    "shorten": lambda path, nbytes="5": cut_short(Path(path), int(nbytes)),
}


class Session(Transcript):
    """Command lines that run in one folder, the current one, and what they print."""

    def text(self) -> str:
        return re.sub(r"(?m)(^\$ .*\n)\n(?=\$ )", r"\1", super().text())

    def do(self, line: str) -> None:
        if line.startswith("$ "):
            self.command(line[2:])
        elif line.startswith("## "):
            self.lines += ["", line]

    def command(self, line: str) -> None:
        """Run a command line."""
        verb, *words = line.split()
        if verb == PROGRAM:
            self.run(line.removeprefix(PROGRAM).strip())
        elif verb in VERBS:
            VERBS[verb](*shlex.split(" ".join(words)))
            self.lines += ["", f"$ {line}"]
        else:
            env = {**os.environ, "PATH": f"{PYTHON}{os.pathsep}{os.environ['PATH']}"}
            done = subprocess.run(
                line, shell=True, env=env, text=True, capture_output=True, check=False
            )
            self.add(line, done.stdout, done.stderr, done.returncode, program="")


def play(path: Path, title: str, session: Session) -> str:
    case = read_cases(path)[title]
    for line in path.read_text(encoding="utf-8").partition("\n# ")[0].splitlines():
        session.do(line)
    assert not [line for line in session.lines if line.startswith(("2> ", "=> "))], session.text()
    session.lines.clear()
    for line in case.splitlines():
        session.do(line)
    return session.text().strip("\n")


def check_session(path: Path, title: str, session: Session) -> None:
    text = play(path, title, session)
    if "=> exit 70" in text:
        pytest.fail(f"an internal error: {text}", pytrace=False)
    compare_case(path, title, text)
