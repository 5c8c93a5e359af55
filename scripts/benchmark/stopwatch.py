"""Runs cases and notes what they took."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from benchmark import launch
from benchmark.cases import Case
from ckpttool.model.manifest import MANIFEST

ROOT = Path(__file__).parents[2]
LAUNCHER = (sys.executable, "-I", "-S", str(Path(launch.__file__)))
DROP_CACHES = Path("/proc/sys/vm/drop_caches")
COMPILE = "import compileall, ckpttool; compileall.compile_dir(ckpttool.__path__[0], quiet=1)"


@dataclass(frozen=True, slots=True)
class Run:
    """What one run of a case took.

    Attributes
    ----------
    size, case, round
        Which it was; ``size`` is a label.
    seconds
        Wall time of the command.
    sync_seconds
        Time that it took after that until all that was written was on disk.
    cpu_seconds
        Processor time of the command, in the kernel and outside, all processes.
    peak_bytes
        Memory of the process tree, see `benchmark.launch`.
    nbytes
        Bytes of the files that were written.
    read_bytes
        Bytes of the sources that were needed, if the case says so.
    stdout
        What the command printed.
    error
        The end of what it said if it failed.
    """

    size: str
    case: str
    round: int
    seconds: float
    sync_seconds: float
    cpu_seconds: float
    peak_bytes: int
    nbytes: int
    read_bytes: int = 0
    stdout: str = ""
    error: str = ""


def measure(case: Case, size: str, round: int, *, cold: bool) -> Run:
    """Run a case once: fresh outputs, nothing left to be written from before."""
    remove(case.output)
    os.sync()
    if cold:
        DROP_CACHES.write_text("1")
    done = subprocess.run(
        [*LAUNCHER, *case.command],
        stdout=subprocess.PIPE,
        check=True,
        cwd="/",  # a Python imports what lies in its folder first
        env=_environment(case.python),
    )
    took = json.loads(done.stdout)
    failed = took["exit_code"] != 0
    error = (took["stderr"].strip().splitlines() or ["no message"])[-1] if failed else ""
    files = [] if case.output is None else _files(case.output)
    started = time.perf_counter()
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
    sync_seconds = time.perf_counter() - started
    nbytes = sum(path.stat().st_size for path in files)
    remove(case.output)
    return Run(
        size,
        case.name,
        round,
        took["seconds"],
        sync_seconds,
        took["cpu_seconds"],
        took["peak_bytes"],
        nbytes,
        case.read_bytes,
        took["stdout"][:1000],
        error,
    )


@cache
def _environment(python: str) -> dict[str, str]:
    """What commands run in: ckpttool compiled, as pip leaves it.

    This Python has the package beside this script, and another one that which it has installed.
    """
    folder = tempfile.TemporaryDirectory(prefix="ckpttool-bench-compiled-")
    atexit.register(folder.cleanup)
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": folder.name}
    for name in ("PYTHONDONTWRITEBYTECODE", "PYTHONPATH"):
        environment.pop(name, None)
    if python == sys.executable:
        environment["PYTHONPATH"] = str(ROOT)
    subprocess.run([python, "-c", COMPILE], check=True, cwd="/", env=environment)
    return environment


def can_drop_caches() -> bool:
    """Whether this process may empty the page cache."""
    return os.access(DROP_CACHES, os.W_OK)


def remove(path: Path | None) -> None:
    """Remove a file with its manifest, or a folder, if it is there."""
    if path is not None and path.is_dir():
        shutil.rmtree(path)
    elif path is not None:
        path.unlink(missing_ok=True)
        path.with_name(f"{path.name}.{MANIFEST}").unlink(missing_ok=True)


def _files(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
