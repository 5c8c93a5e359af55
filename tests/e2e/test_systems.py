"""macOS, containers without /proc, and Windows: what is not there is deleted or hidden."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from ckpttool import system
from tests.support.commands import run_well
from tests.support.corpus import GOLDEN

CASE = GOLDEN / "reshard_8_to_4"
ROOT = Path(__file__).parents[2]

# Deletes what Python on macOS does not have, and more that an old build of it lacks.  libhdf5 and
# `os.stat` open and see no file in /proc where the test cannot cover the folder.
MACOS = '''
import os, resource, sys
from functools import partial
for name in (*"""copy_file_range eventfd getrandom getresuid memfd_create pidfd_open posix_fadvise
posix_fallocate preadv pwritev sched_getaffinity sched_setaffinity sendfile setns splice unshare
""".split(), *[one for one in dir(os) if one.startswith(("POSIX_FADV_", "RWF_", "MFD_", "EFD_"))]):
    if hasattr(os, name):
        delattr(os, name)
for name in ("O_DIRECT", "O_TMPFILE", "O_PATH", "O_NOATIME", "O_LARGEFILE"):
    if hasattr(os, name):
        delattr(os, name)
for name in ("prlimit", "RLIMIT_MSGQUEUE", "RLIMIT_SIGPENDING", "RLIMIT_NICE", "RLIMIT_RTPRIO"):
    if hasattr(resource, name):
        delattr(resource, name)

def hidden(function, path, *more, **named):
    if str(path).startswith(("/proc", "/sys")):
        raise FileNotFoundError(2, "No such file or directory", str(path))
    return function(path, *more, **named)

def refuse(event, arguments):
    if event == "open" and str(arguments[0]).startswith(("/proc", "/sys")):
        raise FileNotFoundError(2, "No such file or directory", arguments[0])

sys.addaudithook(refuse)
for name in ("stat", "lstat", "readlink", "listdir"):  # a function would become a method of pathlib
    setattr(os, name, partial(hidden, getattr(os, name)))
'''
RUN = """
import contextlib, io, json, sys
from ckpttool.cli.main import main
said = []
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            main(words)
        except SystemExit as end:
            assert not end.code, (words, out.getvalue())
    said.append(out.getvalue())
print(json.dumps(said))
"""
WINDOWS = """
import signal, sys
sys.modules["{module}"] = None
for name in ("SIGHUP", "SIGALRM", "SIGPIPE", "SIGPROF", "setitimer", "pthread_sigmask"):
    delattr(signal, name)
"""

# As if every test started the program by itself.
pytestmark = pytest.mark.interpreter


def has_mount_namespaces() -> bool:
    words = ["unshare", "-rm", "mount", "-t", "tmpfs", "none", "/proc"]
    return bool(shutil.which("unshare")) and not subprocess.run(words, check=False).returncode


COVER = ["unshare", "-rm", "sh", "-c", 'mount -t tmpfs none /proc && exec "$@"', "sh"]


@pytest.fixture(
    params=[
        "patched",
        pytest.param(
            "covered",
            marks=pytest.mark.skipif(
                not has_mount_namespaces(), reason="this system makes no mount namespaces"
            ),
        ),
    ],
)
def macos(request, tmp_path):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(MACOS)
    (tmp_path / "macos").mkdir()
    return Child(tmp_path / "macos", COVER if request.param == "covered" else [])


class Child:
    """Starts Python in a folder, with the ``sitecustomize`` of a folder beside it."""

    def __init__(self, folder: Path, before: Sequence[str] = ()) -> None:
        self.folder, self.before = folder, before

    def python(self, *words: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self.before, sys.executable, *map(str, words)],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": f"{self.folder.parent / 'site'}:{ROOT}"},
            capture_output=True,
            text=True,
            check=False,
        )

    def well(self, *commands: Sequence[str | Path]) -> list[str]:
        words = [[str(word) for word in command] for command in commands]
        done = self.python("-c", RUN, json.dumps(words))
        assert (done.returncode, done.stderr.count("internal")) == (0, 0), done.stderr
        return json.loads(done.stdout.splitlines()[-1])


def bytes_of(path: Path) -> dict[str, bytes]:
    files = [one for one in path.rglob("*") if one.is_file()] or [path]
    return {
        str(one.relative_to(path)): one.read_bytes()
        for one in files
        if ".ckpttool" not in one.parts
    }


def test_the_child_lacks_what_macos_lacks(macos):
    code = (
        "import os; from ckpttool import system\n"
        "assert not hasattr(os, 'preadv') and not hasattr(os, 'memfd_create')\n"
        "assert system.read_process('status') == '' and not os.path.exists('/proc/self')\n"
        "assert 1 <= system.count_processors() <= os.cpu_count()\n"
        "assert 10 << 20 < system.peak_bytes() < 1 << 40"
    )
    done = macos.python("-c", code)
    assert done.returncode == 0, done.stderr


CASES = [
    ("reshard_8_to_4", "merged.h5", "hdf5"),
    ("reshard_8_to_4", "merged.safetensors", "ckpt"),
    ("moe_ep4_mp2", "merged.h5", "safetensors"),
]


@pytest.mark.parametrize(("case", "merged", "format"), CASES)
def test_every_command_writes_the_same_files(macos, tmp_path, monkeypatch, case, merged, format):
    source, strategy = GOLDEN / case / "src", GOLDEN / case / "src_strategy.ckpt"
    target = GOLDEN / case / "dst_strategy.ckpt"
    work = [
        ("merge", source, "-s", strategy, "-o", merged),
        ("reshard", source, "-s", strategy, "-d", target, "-o", "new", "--format", format),
        ("split", merged, "-d", target, "-o", "split", "--format", format),
        ("convert", "new", "-o", "converted", "--format", "hdf5"),
    ]
    questions = [
        ("verify", merged, "--deep"),
        ("verify", "new", "-s", target, "--deep"),
        ("diff", merged, "new", "--b-strategy", target),
        ("inspect", source, "-s", strategy, "--json"),
    ]
    *_, is_whole, is_sound, are_equal, found = macos.well(*work, *questions)
    said = [text.partition(":")[0] for text in (is_whole, is_sound, are_equal)]
    assert said == ["OK", "OK", "equal"]
    assert len(json.loads(found)["ranks"]) == len([*source.iterdir()])
    (tmp_path / "linux").mkdir()
    monkeypatch.chdir(tmp_path / "linux")
    for words in work:
        run_well(*words)
    for name in (merged, "new", "split", "converted"):
        assert bytes_of(tmp_path / "macos" / name) == bytes_of(tmp_path / "linux" / name)


def test_a_notebook_opens_and_converts(macos):
    code = (
        "import ckpttool, sys\n"
        "source, strategy = sys.argv[1:]\n"
        "opened = ckpttool.open(source, strategy)\n"
        "ckpttool.merge(source, strategy, 'merged.h5', engine='processes:2')\n"
        "merged = ckpttool.open('merged.h5')\n"
        "assert len(merged) > 9 and set(merged) <= set(opened)\n"
        "for name in merged:\n"
        "    assert (opened[name][()] == merged[name][()]).all()\n"
    )
    done = macos.python("-c", code, CASE / "src", CASE / "src_strategy.ckpt")
    assert done.returncode == 0, done.stderr


def test_a_run_that_is_writing_is_found_and_one_that_has_ended_is_not(macos, tmp_path):
    words = ("merge", CASE / "src", "-s", CASE / "src_strategy.ckpt", "-o", "out/merged.h5")
    partial = tmp_path / "macos" / "out" / "merged.h5.partial"
    partial.parent.mkdir()
    with partial.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        said = macos.python("-m", "ckpttool", *words, "--overwrite").stderr
        assert said.startswith("error[busy]")
    macos.well((*words, "--overwrite"))
    assert not partial.exists()


def test_a_lower_limit_of_memory_is_kept(tmp_path):
    code = (
        "import resource, sys, ckpttool\n"
        "from ckpttool import system\n"
        "resource.setrlimit(resource.RLIMIT_DATA, (3 << 30, 3 << 30))\n"
        "system.lower_limit('RLIMIT_DATA', 4 << 30)\n"
        "assert resource.getrlimit(resource.RLIMIT_DATA) == (3 << 30, 3 << 30)\n"
        "system.lower_limit('RLIMIT_DATA', 2 << 30)\n"
        "assert resource.getrlimit(resource.RLIMIT_DATA) == (2 << 30, 2 << 30)\n"
    )
    done = Child(tmp_path).python("-c", code)
    assert done.returncode == 0, done.stderr


def test_the_peak_of_macos_is_in_bytes(monkeypatch):
    monkeypatch.setattr(system, "read_process", lambda name: "")
    linux = system.peak_bytes()
    monkeypatch.setattr(sys, "platform", "darwin")
    assert linux / 2 < 1024 * system.peak_bytes() < 2 * linux


def test_no_call_reads_more_than_macos_allows(tmp_path, monkeypatch):
    (tmp_path / "a").write_bytes(bytes(range(100)))
    monkeypatch.setattr(system, "READ_BYTES", 64)
    out = bytearray(100)
    with (tmp_path / "a").open("rb") as file:
        assert system.read_at(file.fileno(), memoryview(out), 0) == 64
        monkeypatch.delattr(os, "preadv")
        assert system.read_at(file.fileno(), memoryview(out)[64:], 64) == 36
    assert out == bytes(range(100))


@pytest.mark.parametrize("module", ["fcntl", "resource"])
@pytest.mark.parametrize("words", [["merge", "src", "-o", "m.h5"], ["--version"], []])
def test_windows_is_told_of_wsl_in_one_line(tmp_path, module, words):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(WINDOWS.format(module=module))
    done = Child(tmp_path / "site").python("-m", "ckpttool", *words)
    line = f"error[no_system]: this Python has no module {module}; on Windows run ckpttool in WSL\n"
    assert (done.returncode, done.stdout, done.stderr) == (8, "", line)


@pytest.mark.parametrize("name", ["open", "merge", "RunOptions", "scan"])
def test_windows_is_told_of_wsl_at_the_first_use_in_python(tmp_path, name):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(WINDOWS.format(module="fcntl"))
    code = (
        "import ckpttool\n"
        f"try: ckpttool.{name}\n"
        "except ckpttool.CkptToolError as error: print(error.exit_code, error)\n"
    )
    done = Child(tmp_path / "site").python("-c", code)
    said = "8 this Python has no module fcntl; on Windows run ckpttool in WSL\n"
    assert (done.stdout, done.stderr) == (said, "")
