"""Runs as processes, on every engine: command lines, Dask schedulers and workers."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import pickle
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from pathlib import Path

import ckpttool
from ckpttool.execution.cluster import Cluster
from tests.support.checkpoints import noise, write_file
from tests.support.commands import files_below
from tests.support.corpus import GOLDEN
from tests.support.manifests import MANIFEST
from tests.support.plans import plan_reshard

ROOT = Path(ckpttool.__file__).parent.parent
CASE = GOLDEN / "reshard_8_to_4"
FORMATS = ("ckpt", "safetensors", "hdf5")
COMMAND = [sys.executable, "-m", "ckpttool"]
PATIENCE_SECONDS = 120  # for what takes a second on a machine that is not busy


def environment(**more: str) -> dict[str, str]:
    """Return the environment in which a process finds the package that is tested."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, **more}


def reshard_words(folder: Path, output_format: str) -> list[str]:
    """Return a command line that reshards a golden checkpoint from 8 ranks to 4."""
    words = ["reshard", CASE / "src", "-s", CASE / "src_strategy.ckpt"]
    words += ["-d", CASE / "dst_strategy.ckpt", "-o", folder, "--format", output_format]
    return [str(word) for word in words]


def ordered_words(
    folder: Path, output_format: str = "ckpt", source: Path = CASE / "src"
) -> list[str]:
    """Return the same, one output after the other, perhaps from another source."""
    command, _, *more = reshard_words(folder, output_format)
    return [command, str(source), *more, "-j", "1"]


def with_options(words: Sequence[str | Path], *more: str | Path) -> list[str]:
    """Return a command line with more options; one that it has gets another value."""
    found = [str(word) for word in words]
    for flag in (str(word) for word in more):
        if flag[:1] == "-" and flag in found:
            del found[(at := found.index(flag)) : at + 2]
    return [*found, *map(str, more)]


def merge_words(folder: Path, output_format: str) -> list[str]:
    """Return a command line that merges the same checkpoint into numbered files."""
    words = ["merge", CASE / "src", "-s", CASE / "src_strategy.ckpt", "-o", folder]
    words += ["--format", output_format, "--max-shard-size", "1KB"]
    return [str(word) for word in words]


def write_rounded(folder: Path) -> Path:
    """Write the same checkpoint with its numbers rounded to bfloat16."""
    ckpttool.convert(CASE / "src", folder / "bf16", dtype="bf16:*")
    ckpttool.convert(folder / "bf16", folder / "rounded", dtype="fp32:*")
    return folder / "rounded"


def average_words(other: Path, folder: Path, output_format: str) -> list[str]:
    """Return a command line that averages the same checkpoint and another into rank files."""
    words = ["average", f"{CASE / 'src'}:0.3", f"{other}:0.7", "-s", CASE / "src_strategy.ckpt"]
    words += ["-d", CASE / "dst_strategy.ckpt", "-o", folder, "--format", output_format]
    return [str(word) for word in words]


def split_words(source: Path, folder: Path) -> list[str]:
    """Return a command line that splits what `write_source` wrote."""
    words = ["split", source / "m.ckpt", "-d", source / "s.json", "-o", folder, "--format", "ckpt"]
    return [str(word) for word in words]


def write_source(folder: Path, ranks: int, rank_bytes: int) -> Path:
    """Write one tensor that is not the same anywhere, and a strategy to split it."""
    entry = noise("w", "Float32", (ranks, rank_bytes // 4))
    write_file(folder / "m.ckpt", {"w": entry}, "ckpt")
    item = {"w": {"dev_matrix": [ranks], "tensor_map": [0, -1]}}
    (folder / "s.json").write_text(json.dumps({"parallel_layout_item": item}))
    return folder


def contents(folder: Path) -> dict[str, str]:
    """Return the hashes of all files below a folder."""
    return {
        path: hashlib.sha256((folder / path).read_bytes()).hexdigest()
        for path in files_below(folder)
    }


def complete_outputs(folder: Path) -> list[str]:
    """Return the ``.ckpt`` files that have their final names."""
    return [name for name in files_below(folder) if name.endswith(".ckpt")]


def start(*words: str | Path, **more: object) -> subprocess.Popen[str]:
    """Start a process whose messages can be read."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([str(w) for w in words], **{"env": environment(), **streams, **more})


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Wait for a process; return its exit code and messages."""
    try:
        _, errors = process.communicate(timeout=PATIENCE_SECONDS)
    finally:
        process.kill()
    return process.returncode, errors


def wait_until(is_so: Callable[[], object], what: str) -> None:
    """Wait until a condition holds."""
    until = time.monotonic() + PATIENCE_SECONDS
    while not is_so():
        assert time.monotonic() < until, f"in vain: {what}"
        time.sleep(0.002)


def dump_state(*given: object) -> tuple[tuple[int, int], int]:
    """Return the limit on the size of a core dump, and PR_GET_DUMPABLE.

    It is called in other processes, whatever is ``given`` to them.
    """
    return resource.getrlimit(resource.RLIMIT_CORE), ctypes.CDLL(None).prctl(3, 0, 0, 0, 0)


NO_DUMP = ((0, 0), 0)


class DaskCluster:
    """A Dask scheduler, and workers with one thread each, as processes."""

    def __init__(self, folder: Path, **more: str) -> None:
        self._folder = folder
        self.file = folder / "scheduler.json"
        self.workers: list[subprocess.Popen[str]] = []
        words = ["--port", "0", "--host", "127.0.0.1", "--scheduler-file", self.file]
        self.scheduler = self._start("scheduler", *words, **more)
        wait_until(lambda: self.file.exists() and self.file.read_text().endswith("}"), "scheduler")
        self.address = str(json.loads(self.file.read_text())["address"])

    def _start(
        self, kind: str, *words: str | Path, before: tuple[str, ...] = (), **more: str
    ) -> subprocess.Popen[str]:
        ports = ["--dashboard-address", "127.0.0.1:0"]
        command = [*before, sys.executable, "-m", "dask", kind, *ports, *map(str, words)]
        env = {**environment(), **more}
        with (self._folder / f"{kind}-{len(self.workers)}.log").open("w") as log:
            streams = {"stderr": log, "stdout": log, "text": True}
            return subprocess.Popen(command, env=env, cwd=self._folder, **streams)

    def add_worker(
        self, before: tuple[str, ...] = (), threads: int = 1, **more: str
    ) -> subprocess.Popen[str]:
        """Start a worker; ``more`` is its environment, ``before`` what starts it."""
        log = self._folder / f"worker-{len(self.workers)}.log"
        words = [self.address, "--nthreads", str(threads), "--no-nanny"]
        worker = self._start("worker", *words, before=before, **more)
        self.workers.append(worker)
        wait_until(lambda: "Registered to" in log.read_text(), "a worker")
        return worker

    def replace_workers(self) -> None:
        """Start workers until there are two again."""
        alive = sum(worker.poll() is None for worker in self.workers)
        for _ in range(alive, 2):
            self.add_worker()

    def remove_worker(self, worker: subprocess.Popen[str]) -> None:
        """Kill a worker."""
        worker.kill()
        worker.wait()

    def end(self) -> None:
        """Kill scheduler and workers."""
        for process in (*self.workers, self.scheduler):
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()


@contextmanager
def dask_cluster(folder: Path, workers: int = 2, **more: str) -> Iterator[DaskCluster]:
    """Run a Dask cluster; ``more`` is the environment of its scheduler."""
    folder.mkdir(exist_ok=True)
    cluster = DaskCluster(folder, **more)
    try:
        for _ in range(workers):
            cluster.add_worker()
        yield cluster
    finally:
        cluster.end()


class Threads(Cluster):
    """A cluster of threads: calls cross the same borders as they do on the way to a host."""

    def __init__(self, pool: Executor) -> None:
        self.name = "threads"
        self.calls: list[object] = []
        self.answers = lambda function, argument: {"worker on a": function(argument)}
        self._pool = pool

    @property
    def width(self) -> int:
        return 2

    def submit(self, fn, /, *args, **kwargs) -> Future:
        self.calls.append(fn)
        again, words = pickle.loads(pickle.dumps((fn, args)))
        return self._wrap(self._pool.submit(again, *words, **kwargs))

    def run_on_each(self, function, argument):
        return self.answers(*pickle.loads(pickle.dumps((function, argument))))

    def watch(self) -> None:
        pass

    def end(self) -> None:
        """Wait until the threads have noticed that nobody wants their results."""
        self._pool.shutdown(wait=True)

    def _explain(self, error: BaseException) -> BaseException:
        return error


def make_plan(folder, output_format="ckpt", **options):
    """Plan the conversion of `reshard_words`."""
    return plan_reshard(
        ckpttool.scan(str(CASE / "src")),
        ckpttool.read_strategy([str(CASE / "src_strategy.ckpt")]),
        ckpttool.read_strategy([str(CASE / "dst_strategy.ckpt")]),
        str(folder),
        output_options=ckpttool.OutputOptions(output_format, **options),
    )


def run_with_signal(number, *words):
    """Run a process that gets a signal when it begins to fill its first output."""
    code = (
        "import os, sys\n"
        "from ckpttool.cli.main import main\n"
        "from ckpttool.execution import execute\n"
        f"fill = execute.fill; end = lambda: os.kill(os.getpid(), {int(number)})\n"
        "execute.fill = lambda task: (end(), fill(task))[1]\n"
        "main(sys.argv[1:])"
    )
    return finish(start(sys.executable, "-c", code, *words))


def everything_in(folder):
    """Return the hashes of all files and the manifest, byte for byte."""
    return {**contents(folder), MANIFEST: (folder / MANIFEST).read_bytes()}
