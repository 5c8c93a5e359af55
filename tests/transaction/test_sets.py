"""What commands do with a folder of outputs, one after the other, as ``sets.txt`` says.

A case begins with an empty folder, which a split of a small checkpoint for four ranks writes:

- ``run --part 1/2``: the command with more options; ``other`` is that of another checkpoint;
- ``stop 2 --part 1/2``: the command, which is killed while it fills output 2; ``fail`` is one that
  fails there;
- ``finalize``, ``inspect``, ``verify``, ``merge``: these commands, with the folder;
- ``gone 0,2``, ``flip 0``, ``unnoticed 0``, ``short 0``, ``touch 0``: what is done to outputs;
- ``copy``, ``move``: the folder is copied or moved, and the next commands have the new place;
- ``as numbered``: the same by another command; see `SmallSet`;
- ``whole``: the outputs are those of one run, no other file is left, and a deep look finds nothing.

Below a command stand its exit code, the outputs that it fills, and its screen.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

from tests.support.commands import everything, files_below, run, run_well
from tests.support.damage import cut_short, flip_byte, flip_unnoticed
from tests.support.described import ranks_of
from tests.support.small_sets import SmallSet, filled_outputs
from tests.support.snapshots import Transcript
from tests.support.transcripts import check_case, read_cases

TEXT = Path(__file__).with_name("sets.txt")
DAMAGES = {"gone": Path.unlink, "flip": flip_byte, "unnoticed": flip_unnoticed,
           "short": cut_short, "touch": os.utime}  # fmt: skip
WRITER = re.compile(r"process \d+ on \S+( since [^,;\n]*)?")

pytestmark = pytest.mark.usefixtures("quick")


class Case:
    """The folder of a case."""

    def __init__(self, folder):
        self.small, self.screen = SmallSet(folder), Transcript(folder)

    def read(self, line):
        """Do what a line says; yield what is printed."""
        small, (verb, *more) = self.small, line.split()
        if verb in DAMAGES:
            for number in ranks_of(more[0]):
                DAMAGES[verb](small.outputs[number])
        elif verb == "copy":
            place = small.folder / "copy"
            small.out = Path(shutil.copytree(small.out, place, copy_function=shutil.copyfile))
        elif verb == "move":
            small.out = small.out.rename(small.folder / "moved")
        elif verb == "as":
            small.command, *form = more
            small.output_format = form[0] if form else "ckpt"
        elif verb in ("stop", "fail"):
            small.stop(*more[1:], output=int(more[0]))
            if verb == "fail":
                Path(f"{small.outputs[int(more[0])]}.partial").unlink()
        elif verb == "whole":
            self.check()
        else:
            yield from self.run(verb, more)

    def run(self, verb, more):
        """Run a command; yield what it does and prints."""
        small = self.small
        other = SmallSet(small.folder, "other", small.command, small.output_format)
        other.out = small.out
        words = {
            "run": small.words(*more),
            "other": other.words(*more),
            "finalize": ["finalize", small.target],
            "inspect": ["inspect", small.target],
            "verify": ["verify", small.target, "-s", small.strategy],
            "merge": ["merge", small.target, "-s", small.strategy, "-o", small.folder / "m.h5"],
        }[verb]
        with filled_outputs() as filled:
            result = run(*words)
        numbers = [str(n) for n, path in enumerate(small.outputs) if path.name in filled]
        yield f"exit {result.exit_code}" + f"; filled {' '.join(numbers)}" * bool(numbers)
        text = WRITER.sub("process N on HOST", self.screen.normalise(everything(result)))
        yield from text.splitlines()

    def check(self):
        """Check that the set is what one whole run writes, and nothing else is left there."""
        small = self.small
        assert small.read() == small.wanted()
        names = [*(str(path.relative_to(small.out)) for path in small.outputs), small.manifest.name]
        assert files_below(small.out, manifests=True) == sorted(names)
        assert sorted(path.name for path in small.record.iterdir()) == ["lock", "stamps.json"]
        run_well("verify", small.out, "-s", small.strategy, "--deep")


@pytest.mark.parametrize("title", read_cases(TEXT))
def test_what_commands_do_with_a_folder_of_outputs(title, tmp_path):
    check_case(TEXT, title, Case(tmp_path).read)
