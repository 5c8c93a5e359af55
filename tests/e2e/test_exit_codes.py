"""Exit codes: the table of the documentation, row by row, and those who repeat it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import click
import pytest

import ckpttool.problems
from ckpttool.cli.main import PIPE_CLOSED, main
from ckpttool.operations import load
from ckpttool.problems import CkptToolError
from ckpttool.transaction.locks import FileLock
from tests.support.commands import message, run, run_well
from tests.support.corpus import GOLDEN
from tests.support.executors import COMMAND, PATIENCE_SECONDS, environment

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reference" / "exit-codes.md").read_text(encoding="utf-8")
ROWS = {int(code): text for code, text in re.findall(r"^\| (\d+) \| ([^|]+) \|", PAGE, re.M)}
CASE = GOLDEN / "tutorial_8_to_8_retrain"
SOURCE = [str(CASE / "src"), "-s", str(CASE / "src_strategy.ckpt")]
FILE = f"{SOURCE[0]}/rank_{{}}/checkpoint-2_10.ckpt"
TARGET = [*SOURCE, "-d", str(CASE / "dst_strategy.ckpt"), "-o", "out", "--format", "ckpt"]


def found() -> list[str]:
    Path("text.ckpt").write_text("no checkpoint")
    return ["verify", "text.ckpt"]


def not_readable() -> list[str]:
    Path("text.ckpt").write_text("no checkpoint")
    return ["inspect", "text.ckpt"]


def invalid_strategy() -> list[str]:
    Path("s.ckpt").write_text("no strategy")
    return ["merge", SOURCE[0], "-s", "s.ckpt", "-o", "m.ckpt"]


def output_exists() -> list[str]:
    Path("m.ckpt").touch()
    return ["merge", *SOURCE, "-o", "m.ckpt"]


def changed_output() -> list[str]:
    for part in ("1/2", "2/2"):
        run_well("reshard", *TARGET, "--part", part)
    path = next(Path("out").rglob("*.ckpt"))
    path.write_bytes(path.read_bytes()[:-1])
    return ["finalize", "out"]


def another_run_writes() -> list[str]:
    FileLock(Path("out/.ckpttool/whole.log"))  # until this process ends
    return ["reshard", *TARGET]


# The words of a command for each row, or what makes them; some rows have several commands.
IN_PROCESS = [
    (0, lambda: ["inspect", *SOURCE]),
    (1, found),
    (1, lambda: ["diff", FILE.format(0), FILE.format(2)]),
    (2, lambda: ["merge", *SOURCE]),
    (2, lambda: ["inspect", "nothing"]),
    (2, lambda: ["merge", SOURCE[0], "-o", "m.ckpt"]),
    (3, not_readable),
    (4, invalid_strategy),
    (5, output_exists),
    (7, changed_output),
    (8, lambda: ["merge", *SOURCE, "-o", "m.ckpt", "--engine", "dask:none.json"]),
    (9, another_run_writes),
]


@pytest.mark.parametrize(("code", "make"), IN_PROCESS)
def test_a_command_ends_with_the_code_of_its_row(code, make):
    words = make()
    assert run(*words).exit_code == code
    result = run(*words, "--json")
    assert result.exit_code == code
    document = json.loads(result.stdout)
    assert ("error" in document) == (code > 1)
    assert document.get("error", {}).get("retry", False) == (code == 9)


def test_a_mistake_of_ours_has_a_code_of_its_own(monkeypatch):
    def divide(*_, **__):
        return 1 // 0

    monkeypatch.setattr(load, "find", divide)
    result = run("inspect", *SOURCE, "--json")
    assert result.exit_code == 70
    (one,) = json.loads(result.stdout)["error"]["diagnostics"]
    assert (one["code"], "ZeroDivisionError" in one["text"]) == ("internal", True)
    assert "Try: the same command with --debug, and report what it prints" in message(result)


def start(*words: str, stdout: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, *words], env=environment(), stdout=stdout, stderr=subprocess.PIPE, text=True
    )


def test_a_reader_that_has_gone_ends_the_command():
    reader, writer = os.pipe()
    os.close(reader)
    process = start("inspect", *SOURCE, stdout=writer)
    os.close(writer)
    assert process.communicate()[1] == ""
    assert process.returncode == PIPE_CLOSED == 141


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143), ("SIGHUP", 129)])
def test_a_signal_ends_the_command_with_a_document(name, code):
    os.mkfifo("key")
    words = ["inspect", *SOURCE, "--dec-key-file", "key", "--json"]
    process = start(*words, stdout=subprocess.PIPE)
    writer = os.open("key", os.O_WRONLY)  # returns when the command reads the key
    process.send_signal(signal.Signals[name])
    printed, errors = process.communicate(timeout=PATIENCE_SECONDS)
    os.close(writer)
    assert process.returncode == code, errors
    error = json.loads(printed)["error"]
    assert (error["exit_code"], error["diagnostics"][0]["code"]) == (code, "stopped")
    assert f"ended by {name}" in errors


def test_the_table_has_a_row_for_every_code_and_every_row_is_tested():
    of_errors = {
        error.exit_code
        for error in vars(ckpttool.problems).values()
        if isinstance(error, type) and issubclass(error, CkptToolError)
    }
    assert of_errors <= {*ROWS}
    assert {*ROWS} == {code for code, _ in IN_PROCESS} | {6, 70, 130, PIPE_CLOSED}
    assert "143 for SIGTERM, 129 for SIGHUP" in PAGE


def test_the_help_names_the_page_of_the_table():
    assert "ckpttool help exit-codes" in main.get_help(click.Context(main))
    assert run_well("help", "exit-codes").stdout == PAGE
