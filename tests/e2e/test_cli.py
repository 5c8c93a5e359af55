"""The command line: what goes to stdout, what to stderr, and the exit codes."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys

import pytest

from ckpttool.typed import parse_size
from tests.support.commands import message, run, run_well
from tests.support.corpus import GOLDEN
from tests.support.readers import read, write_ckpt

CASE = GOLDEN / "tutorial_8_to_8_retrain"
SMALL = GOLDEN / "empty_tensors"


def src(case):
    return [case / "src", "-s", case / "src_strategy.ckpt"]


@pytest.mark.interpreter
@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("start", ["module", "script"])
def test_a_closed_stream_is_nowhere_and_no_file_gets_its_number(tmp_path, closed, start):
    script = tmp_path / "ckpttool-script"
    script.write_text("from ckpttool.__main__ import run\nrun()\n")
    how = "-m ckpttool" if start == "module" else shlex.quote(str(script))
    begin = f"exec {shlex.quote(sys.executable)} {how}"
    source = shlex.quote(str(SMALL / "src"))
    strategy = shlex.quote(str(SMALL / "src_strategy.ckpt"))
    words = (
        f"{begin} merge {source} -s {strategy} -o {shlex.quote(str(tmp_path / 'a.h5'))} {closed}"
    )
    done = subprocess.run(["sh", "-c", words], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert ("a.h5" in done.stdout) == (closed in ("<&-", "2>&-"))
    merge = ["merge", SMALL / "src", "-s", SMALL / "src_strategy.ckpt", "-o"]
    run_well(*merge, tmp_path / "b.h5")
    assert (tmp_path / "a.h5").read_bytes() == (tmp_path / "b.h5").read_bytes()
    words = f"{begin} verify {source} -s {strategy} --step 9_9 {closed}"
    done = subprocess.run(["sh", "-c", words], capture_output=True, text=True, check=False)
    assert done.returncode == 5
    assert ("9_9" in done.stderr) == ("2>&-" not in closed)
    assert "internal error" not in done.stderr


@pytest.mark.parametrize("words", [["--version"], ["verify", str(SMALL / "src" / "nothing")]])
def test_what_was_loaded_is_not_searched_for_garbage_at_the_end(words):
    code = "import atexit, gc; from ckpttool.__main__ import run\n"
    code += "atexit.register(lambda: print(gc.get_freeze_count()))\nrun()"
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, check=False)
    assert int(done.stdout.split()[-1]) > 1000


def test_escape_sequences_in_names_are_never_printed(tmp_path):
    from tests.support.readers import Entry

    path = tmp_path / "m.ckpt"
    write_ckpt(path, {"evil\x1b[2J\nname": Entry("Float32", (1,), bytes(4))})
    result = run_well("inspect", path)
    assert "\x1b" not in result.output
    assert r"evil\x1b[2J\nname" in result.output
    assert json.loads(run_well("inspect", path, "--json").stdout)["tensors"][0]["name"]
    result = run("merge", path, "-o", tmp_path / "no" / "m.h5")
    assert "\x1b" not in result.output


def test_a_name_of_64_kib_leaves_room_for_what_is_said_of_it(tmp_path):
    from tests.support.readers import Entry

    path, name = tmp_path / "m.ckpt", "x" * 65533 + "end"
    write_ckpt(path, {name: Entry("Float32", (1,), bytes(4))})
    result = run("merge", path, "-o", tmp_path / "m.h5")
    assert result.exit_code == 5
    said = "xend: HDF5 cannot keep this name exactly Try: -o {0}.ckpt, or -o {0}.safetensors"
    assert said.format(tmp_path / "m") in message(result)
    shown = run_well("inspect", path)
    assert "xend" in shown.output
    assert max(len(result.output), len(shown.output)) < 5000
    run_well("merge", path, "-o", tmp_path / "m.safetensors")
    assert set(read(tmp_path / "m.safetensors")) == {name}


def test_debug_alone_prints_a_traceback():
    command = [sys.executable, "-m", "ckpttool", "inspect", str(GOLDEN / "PROVENANCE.md")]
    plain = subprocess.run(command, capture_output=True, text=True, check=False)
    assert plain.returncode == 3
    assert "Traceback" not in plain.stderr
    assert plain.stderr.count("\n") == 2  # what is wrong, and the hint
    loud = subprocess.run([*command, "--debug"], capture_output=True, text=True, check=False)
    assert loud.returncode == 3
    assert "Traceback" in loud.stderr


def test_no_progress_bar_without_a_terminal_even_if_colour_is_forced(tmp_path):
    command = [sys.executable, "-m", "ckpttool", "merge", str(SMALL / "src")]
    command += ["-s", str(SMALL / "src_strategy.ckpt"), "-o", str(tmp_path / "m.h5")]
    environment = {**os.environ, "FORCE_COLOR": "1", "TTY_INTERACTIVE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert done.stderr == ""
    assert "m.h5" in done.stdout


def test_names_that_the_terminal_cannot_show_are_spelled_out():
    case = GOLDEN / "unicode_and_long_names"
    path = next((case / "src" / "rank_0").iterdir())
    command = [sys.executable, "-m", "ckpttool", "inspect", str(path)]
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    for words in ([], ["--json"]):
        done = subprocess.run([*command, *words], capture_output=True, check=True, env=environment)
        assert b"\\u" in done.stdout


@pytest.mark.parametrize(
    ("word", "nbytes"),
    [
        *(("7B", 7), ("1kB", 1000), ("2kiB", 2048), ("1.5GiB", 3 << 29), (" 5 TB", 5 * 10**12)),
        *(("3K", 3072), ("1.5M", 3 << 19), ("2G", 2 << 30), ("1T", 1 << 40), ("4Mi", 4 << 20)),
    ],
)
def test_a_size_is_a_number_and_a_unit(word, nbytes):
    assert parse_size(word) == nbytes
