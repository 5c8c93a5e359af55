"""What is said when a standard stream cannot be written to, which is no disk of the outputs."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.corpus import GOLDEN

CASE = GOLDEN / "tutorial_8_to_8_retrain"
TOLD = "standard output: not written: No space left on device (the disk is full)"

pytestmark = pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is full")


def run_to(where, *words, source=CASE / "src"):
    of_source = {"SRC": (source, "-s", CASE / "src_strategy.ckpt")}
    line = [str(word) for group in words for word in of_source.get(group, (group,))]
    command = f"exec {shlex.join([sys.executable, '-m', 'ckpttool', *line])} {where}"
    return subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "words",
    [["inspect", "SRC", "--json"], ["verify", "SRC"], ["--help"]],
    ids=["inspect", "verify", "help"],
)
def test_standard_output_that_is_full_is_named_and_told_once(words):
    done = run_to(">/dev/full", *words)
    assert (done.returncode, done.stderr) == (6, f"error[not_written]: {TOLD}\n")


PROGRAM = """
import io, sys
from ckpttool.cli.main import main

class Kept(io.StringIO):
    encoding = ENCODING

screen, sys.stdout = sys.stdout, Kept()
code = main(sys.argv[1:], standalone_mode=False)
screen.write(sys.stdout.getvalue())
sys.exit(code)
"""


@pytest.mark.parametrize("encoding", ["None", "'utf-8'"])
@pytest.mark.parametrize("words", [["inspect"], ["verify", "--deep"], ["inspect", "--all"]])
def test_a_program_that_keeps_what_is_printed_gets_what_a_pipe_gets(words, encoding):
    """Else a notebook gets an internal error: a text in memory has no encoding."""
    words = [*words, str(CASE / "src"), "-s", str(CASE / "src_strategy.ckpt")]
    environment = {**os.environ, "LC_ALL": "C.UTF-8"}
    kept, piped = (
        subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        for command in (
            [sys.executable, "-c", PROGRAM.replace("ENCODING", encoding), *words],
            [sys.executable, "-m", "ckpttool", *words],
        )
    )
    assert kept.stdout == piped.stdout
    assert kept.stderr == piped.stderr
