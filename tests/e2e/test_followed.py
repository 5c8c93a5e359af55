"""What the sessions are told to try is typed, in a copy of the folder where they are told."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.advice import ROWS, complaints, follow, parts_of, row_of
from tests.support.commands import everything, run
from tests.support.corpus import a_third
from tests.support.sessions import PYTHON, Session, play
from tests.support.transcripts import read_cases

SESSIONS = Path(__file__).with_name("sessions")
TEXTS = sorted(SESSIONS.glob("*.txt"))
CASES = [
    (path, title)
    for path in TEXTS
    for title, case in read_cases(path).items()
    if re.search(r"^(?:2> )?  Try: ", case, re.MULTILINE)
]
SHELL = {**os.environ, "PATH": f"{PYTHON}{os.pathsep}{os.environ['PATH']}"}


# What cannot be typed as it stands: the beginning of the line and of the advice, and why.
OPEN = (("diff .*", "--exclude a$", "nothing of a file that is cut short is left to compare"),)


class Following(Session):
    """A session that follows each advice, in a copy."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.wrong: list[str] = []

    def run(self, line: str):
        result = super().run(line)
        for complaint, hint in complaints(everything(result)):
            for part in parts_of(hint):
                is_open = (re.match(of, line) and re.match(form, part) for of, form, _ in OPEN)
                if not any(is_open):
                    self._follow(line, complaint, part)
        return result

    def _follow(self, line: str, complaint: str, part: str) -> None:
        typed = follow(part, shlex.split(line), complaint)
        if typed is None:
            return
        here, copy = str(self.folder), str(self.folder.with_name("copy"))
        shutil.copytree(here, copy, symlinks=True)
        os.chdir(copy)
        try:
            if typed.shell:
                shell = typed.shell.replace(here, copy)
                subprocess.run(shell, shell=True, env=SHELL, capture_output=True, check=True)
            result = run(*(word.replace(here, copy) for word in typed.words))
        finally:
            os.chdir(here)
            shutil.rmtree(copy)
        printed = everything(result).replace(copy, here)
        row = row_of(part)
        is_well = not result.exit_code if row.then == "well" else self._goes_on(complaint, printed)
        if not is_well or result.exit_code == 70:
            new = f"{typed.shell}; ckpttool {shlex.join(typed.words)}".removeprefix("; ")
            self.wrong.append(f"$ {line}\n{complaint}\n  Try: {part}\n$ {new}\n{printed}")

    @staticmethod
    def _goes_on(complaint: str, printed: str) -> bool:
        return complaint not in printed.splitlines() and " has no -" not in printed


@pytest.mark.parametrize("case", a_third(f"{path.stem}: {title}" for path, title in CASES))
def test_what_a_message_says_to_try_helps(case, shell):
    stem, _, title = case.partition(": ")
    session = Following(shell.folder)
    play(SESSIONS / f"{stem}.txt", title, session)
    assert not session.wrong, "\n\n".join(session.wrong)


@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_each_form_of_advice_is_followed_in_a_session(row):
    """By this module, or in ``followed.txt`` by the reader, whose last command is well."""
    by_reader = {path.stem == "followed": path for path in TEXTS}[True]
    paths = TEXTS if row.then else [by_reader]
    cases = [case for path in paths for case in read_cases(path).values()]
    found = [
        case
        for case in cases
        for hint in re.findall(r"^(?:2> )?  Try: (.*)", case, re.MULTILINE)
        if any(row_of(part) == row for part in parts_of(hint))
    ]
    assert found
    assert row.then or not [case for case in found if "=> exit" in case.rpartition("$ ckpttool")[2]]
