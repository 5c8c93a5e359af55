"""What commands do with a folder of outputs, one after the other, as ``sets.txt`` says.

A case begins with an empty folder, which a split of a small checkpoint for four ranks writes:

- ``run --part 1/2``: the command with more options; ``other`` is that of another checkpoint;
- ``stop 2 --part 1/2``: the command, which is killed while it fills output 2; ``fail`` is one that
  fails there;
- ``finalize``, ``inspect``, ``verify``, ``merge``: these commands, with the folder;
- ``gone 0,2``, ``flip 0``, ``unnoticed 0``, ``short 0``, ``swap 0``, ``dangle 0``, ``touch 0``,
  ``old 0``: what is done to outputs, to something else in the folder, or to the ``source``;
- ``save``: the source is saved again, with its time put back; ``strategy other``, ``same`` and
  ``copied``: the strategy is changed, put back, and copied;
- ``copy``, ``move``: the folder is copied or moved, and the next commands have the new place;
- ``host other``: the next commands run on another host;
- ``as numbered``: the same by another command; see `SmallSet`;
- ``whole``: the outputs are those of one run, no other file is left, and a deep look finds nothing;
  ``whole other`` says it of the other checkpoint.

Below a command stand its exit code, the outputs that it fills, the number of those that it keeps,
and what else is on its screen.  A command that is refused (5) changes nothing.
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
from tests.support.small_sets import SmallSet, filled_outputs, machine
from tests.support.snapshots import Transcript
from tests.support.transcripts import check_case, read_cases

TEXT = Path(__file__).with_name("sets.txt")
WRITER = re.compile(r"process \d+ on \S+( since [^,;\n]*)?")
WROTE = re.compile(r"(?:Wrote|Kept) .*\(\d+ files?,(?: (\d+) kept,)?.* in 0\.00 s.*\n")

pytestmark = pytest.mark.usefixtures("quick")


def remove(path):
    path.unlink() if path.is_file() else shutil.rmtree(path)


def swap(path):
    other = path.with_name("other")
    other.write_bytes(path.read_bytes()[::-1])
    other.replace(path)


def dangle(path):
    path.unlink()
    path.symlink_to("nowhere")


def make_old(path):
    os.utime(path, ns=(1, 1))
    path.chmod(0o600)


DAMAGES = {"gone": remove, "flip": flip_byte, "unnoticed": flip_unnoticed, "short": cut_short,
           "swap": swap, "dangle": dangle, "touch": os.utime, "old": make_old}  # fmt: skip


class Case:
    """The folder of a case."""

    def __init__(self, folder, patch):
        self.small, self.screen, self.patch = SmallSet(folder), Transcript(folder), patch

    def read(self, line):
        """Do what a line says; yield what is printed."""
        small, (verb, *more) = self.small, line.split()
        if verb in DAMAGES:
            numbers = ranks_of(more[0]) if more[0][0].isdigit() else ()
            named = small.source if more[0] == "source" else small.out / more[0]
            for path in [small.outputs[n] for n in numbers] or [named]:
                DAMAGES[verb](path)
        elif verb == "save":
            before = small.source.stat()
            small.source.write_bytes(small.source.read_bytes())
            os.utime(small.source, ns=(before.st_atime_ns, before.st_mtime_ns))
        elif verb == "strategy" and more == ["copied"]:
            small.strategy = Path(shutil.copy(small.strategy, small.folder / "copy.json"))
        elif verb == "strategy":
            content = small.strategy.read_text().strip()
            small.strategy.write_text(content + " " * (more == ["other"]))
        elif verb == "copy":
            place = small.folder / "copy"
            small.out = Path(shutil.copytree(small.out, place, copy_function=shutil.copyfile))
        elif verb == "move":
            small.out = small.out.rename(small.folder / "moved")
        elif verb == "host":
            other = machine(more[0])
            self.patch.setattr(os, "uname", lambda: other)
        elif verb == "as":
            small.command, *form = more
            small.output_format = form[0] if form else "ckpt"
        elif verb == "stop":
            small.stop(*more[1:], output=int(more[0]))
        elif verb == "fail":
            yield from self.run("run", more[1:], small.outputs[int(more[0])])
        elif verb == "whole":
            self.check(*more)
        else:
            yield from self.run(verb, more)

    def run(self, verb, more, broken=None):
        """Run a command; yield what it does and prints."""
        small = self.small
        other = SmallSet(small.folder, "other", small.command, small.output_format)
        other.out = small.out
        words = {
            "run": small.words(*(word.replace("OUT", str(small.out)) for word in more)),
            "other": other.words(*more),
            "finalize": ["finalize", small.target],
            "inspect": ["inspect", small.target],
            "verify": ["verify", small.target, *self.strategy()],
            "merge": ["merge", small.target, *self.strategy(), "-o", small.folder / "m.h5"],
        }[verb]
        before = self.contents()
        with filled_outputs(broken) as filled:
            result = run(*words)
        if result.exit_code == 5:
            assert self.contents() == before
        numbers = [str(n) for n, path in enumerate(small.outputs) if path.name in filled]
        head = f"exit {result.exit_code}"
        head += f", fills {' '.join(numbers)}" if numbers and broken is None else ""
        printed = self.screen.normalise(everything(result))
        if done := WROTE.search(printed):  # the outputs that it names are those of the plan
            printed = printed.replace(done[0], "")
            head += f", keeps {done[1]}" if done[1] else ""
        yield head
        yield from WRITER.sub("process N on HOST", printed).splitlines()

    def strategy(self):
        return ["-s", self.small.strategy] * (self.small.command in ("split", "reshard"))

    def contents(self):
        paths = (path for path in self.small.out.rglob("*") if path.is_file())
        return {path: path.read_bytes() for path in paths if path.name != "lock"}

    def check(self, name="a"):
        """Check that the set is what one whole run writes, and nothing else is left there."""
        small = self.small
        whole = SmallSet(small.folder / "whole", name, small.command, small.output_format)
        whole.run_well()
        sets = [files_below(made.out, manifests=True) for made in (small, whole)]
        assert sets[0] == sets[1]
        for name in sets[0]:
            assert (small.out / name).read_bytes() == (whole.out / name).read_bytes(), name
        assert sorted(path.name for path in small.record.iterdir()) == ["lock", "stamps.json"]
        run_well("verify", small.target, *self.strategy(), "--deep")
        shutil.rmtree(whole.folder)


@pytest.mark.parametrize("title", read_cases(TEXT))
def test_what_commands_do_with_a_folder_of_outputs(title, tmp_path, monkeypatch):
    check_case(TEXT, title, Case(tmp_path, monkeypatch).read)
