"""Asks a real MindSpore, which lives in another Python: see ``mindspore_side/server.py``."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


class MindSporeError(Exception):
    """What MindSpore said when it failed."""


class MindSpore:
    """A running server.

    Parameters
    ----------
    python
        The Python that has MindSpore.
    log
        File for MindSpore's own output.
    """

    def __init__(self, python: str, log: Path) -> None:
        self._log = log
        command = [python, "-m", "tests.e2e.interop.mindspore_side.server"]
        settings = {"GLOG_v": "3", "MS_DEV_PRECOMPILE_ONLY": "1", "PYTHONWARNINGS": "ignore"}
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=os.environ | settings,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
            )
        self.version = self._answer()["result"]

    def ask(self, do: str, **words: object) -> object:
        return self.ask_all([{"do": do, **words}])[0]

    def ask_all(self, requests: list[dict]) -> list:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(requests, default=str) + "\n")
        self._process.stdin.flush()
        answers = self._answer()
        errors = [answer["error"] for answer in answers if "error" in answer]
        if errors:
            raise MindSporeError("\n".join(errors))
        return [answer["result"] for answer in answers]

    def _answer(self):
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            said = self._log.read_text(encoding="utf-8", errors="replace")[-2000:]
            raise MindSporeError(f"the server ended with {self._process.wait()}: {said}")
        return json.loads(line)

    def close(self) -> None:
        self._process.communicate()
