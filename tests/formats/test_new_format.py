"""A format is a module, which this file is, and a line in the table of formats."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from ckpttool.formats.base import Format, Header, lay_out
from ckpttool.formats.local import open_file
from ckpttool.model.tensors import FileIndex, StoredFile, TensorMeta
from tests.support.corpus import GOLDEN

ROOT = Path(__file__).parent.parent.parent
CASE = GOLDEN / "reshard_8_to_4"
RUN = f"""
from ckpttool.formats import FORMATS
FORMATS["lines"] = ({__name__!r}, "Lines", (".lines",))
from ckpttool.cli.main import main
main()
"""


class Lines(Format):
    """A line of JSON with name, type and shape of each tensor, and behind it the contents."""

    name, word = "lines", "Lines"

    def read_index(self, file: StoredFile) -> FileIndex:
        with open_file(file.path) as opened:
            entries = json.loads(opened.readline())
        metas = [TensorMeta(name, dtype, tuple(shape)) for name, dtype, shape in entries]
        return self.index(metas).of_file(file)

    def header_bytes(self, tensors: Sequence[TensorMeta], attrs: Mapping[str, str] = {}) -> int:
        return len(self._line(tensors))

    def index(self, tensors: Sequence[TensorMeta], attrs: Mapping[str, str] = {}) -> Header:
        contents = [(b"", meta.name, meta.nbytes) for meta in tensors]
        return lay_out(self.name, tensors, {}, [(self._line(tensors), "", 0), *contents])

    def _line(self, tensors: Sequence[TensorMeta]) -> bytes:
        return (
            json.dumps([(meta.name, meta.dtype, meta.shape) for meta in tensors]).encode() + b"\n"
        )


def run(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", RUN, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)


def test_a_new_format_is_written_read_and_shown(tmp_path):
    source = CASE / "src", "-s", CASE / "src_strategy.ckpt"
    new, again, direct = (tmp_path / name for name in ("m.lines", "again.ckpt", "direct.ckpt"))
    merged = run("merge", *source, "-o", new)
    assert (merged.returncode, "as weights" in merged.stderr) == (0, True)
    assert f"Wrote {new} (Lines, " in merged.stdout
    assert '"format": "lines"' in run("inspect", new, "--json").stdout
    assert "lines" in run("inspect", new).stdout
    for path, words in ((again, (new,)), (direct, source)):
        assert run("merge", *words, "-o", path).returncode == 0
    assert again.read_bytes() == direct.read_bytes()


def test_a_new_format_is_a_choice_of_commands_and_options(tmp_path):
    target = "-d", CASE / "dst_strategy.ckpt", "-o", tmp_path / "out"
    source = CASE / "src", "-s", CASE / "src_strategy.ckpt"
    assert run("reshard", *source, *target, "--format", "lines").returncode == 0
    assert (tmp_path / "out" / "rank_0" / "checkpoint_0.lines").is_file()
    for command in ("merge", "split", "reshard"):
        assert "hdf5, ckpt, safetensors or lines." in run(command, "--help").stdout


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("--format", "line"), 2, "'line' is not one of hdf5, ckpt, safetensors, lines"),
        (("-o", "m.line"), 5, "a name that ends in .h5, .ckpt, .safetensors or .lines"),
        (
            ("-o", "m.lines", "--crc"),
            5,
            "no place for MindSpore's checksum Try: -o m.ckpt, or -o m.",
        ),
    ],
)
def test_messages_name_a_new_format(words, code, message):
    done = run("merge", CASE / "src", *words)
    assert done.returncode == code
    assert message in " ".join(done.stderr.split())
