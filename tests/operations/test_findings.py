"""What ``verify`` finds in real files, as ``findings.txt`` says.

A case describes a checkpoint in the words of `tests/checkpoint/test_records.py`, and then:

- ``full w(8,3)``: full tensors of numbers that all differ, which are cut by the strategy; ``=0`` or
  ``=1`` are of this number alone;
- ``0-3 w(4,3)=abcd``: noise by letter; ``Z`` is zero, other capitals are one;
- ``set 2 w 3,1 nan``, ``set 2 step - 7``: an element of what a rank holds, or all;
- ``flip 3 w -1``: a bit of this byte;
- ``gone 2,3``, ``gone 1 bias``: no file, or a file that lacks a tensor;
- ``short 1``: the file is cut short;
- ``> deep=True``: what is found with these options: severity, code, tensor, ranks, number of
  elements and the first of them, text.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import ckpttool
from ckpttool.operations.look import Subject
from ckpttool.operations.verification import verify as find_problems
from ckpttool.wording import format_ranks
from tests.support.checkpoints import cut, write_ranks
from tests.support.damage import cut_short, flipped
from tests.support.described import TENSOR, Described, entries_of, filled, joined, numbers, ranks_of
from tests.support.readers import entry_of, rank_file
from tests.support.transcripts import check_case, read_cases

TEXT = Path(__file__).with_name("findings.txt")


class Case(Described):
    """A case whose checkpoint is written to a folder."""

    def __init__(self, folder):
        super().__init__()
        self.folder, self.number, self.short = folder, 0, []

    def hold(self, ranks, text):
        for rank in ranks:
            self.tensors.setdefault(rank, {}).update(entries_of(text, rank))

    def act(self, kind, words, options):
        """Do what a line says."""
        if kind == ">":
            return self.verify(**options)
        if kind == "full":
            found = TENSOR.findall(" ".join(words))
            full = {
                name: filled(dtype or "Float32", numbers(shape, ","), number or None)
                for name, dtype, shape, number, _ in found
            }
            self.tensors = cut(full, joined(self.stages, "src.ckpt"))
        elif kind == "short":
            self.short = ranks_of(words[0])
        elif kind == "empty":
            self.tensors |= {rank: {} for rank in ranks_of(words[0])}
        elif kind == "gone":
            for rank in ranks_of(words[0]):
                for name in words[1:]:
                    del self.tensors[rank][name]
                if not words[1:]:
                    del self.tensors[rank]
        elif kind == "flip":
            for rank in ranks_of(words[0]):
                entry = self.tensors[rank][words[1]]
                data = flipped(entry.data, int(words[2]))
                self.tensors[rank][words[1]] = entry._replace(data=data)
        else:
            assert kind == "set"
            for rank in ranks_of(words[0]):
                entry = self.tensors[rank][words[1]]
                array = entry.array().copy()
                array[numbers(words[2].strip("-"), ",")] = float(words[3])
                self.tensors[rank][words[1]] = entry_of(array, entry.dtype)
        return None

    def verify(self, deep=False, ignore=(), format="ckpt", engine="inline", **options):
        """Write the checkpoint; yield what is found in it."""
        self.number += 1
        folder = write_ranks(self.folder / str(self.number) / "run", self.tensors, format)
        for rank in self.short:
            cut_short(rank_file(folder, rank))
        with ckpttool.open_engine(engine) as executor:
            report = find_problems(
                Subject(
                    ckpttool.scan(str(folder), command="verify"),
                    joined(self.stages, "src.ckpt"),
                    ckpttool.ResolveOptions(**options),
                ),
                deep=deep,
                ignore=[ignore] if ignore else (),
                executor=executor,
            )
        for one in (*report.findings, *report.notes):
            where = one.tensor, one.ranks and format_ranks(one.ranks), one.count, one.first
            where = "; ".join(str(word) for word in where if word)
            text = one.text.replace(str(folder), "run")
            where = f" ({where})" if where else ""
            severity = report.findings.severity_of[one.code]
            yield from f"{severity} {one.code}{where}: {text}".splitlines()


@pytest.mark.parametrize("title", read_cases(TEXT))
def test_what_verify_finds(title, tmp_path):
    check_case(TEXT, title, Case(tmp_path).read)
