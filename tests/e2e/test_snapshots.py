"""Everything that the commands print, compared with files that a reviewer can read.

The files are in ``snapshots/``: one for each group of commands, and one for each case of
`tests.e2e.test_golden` and `tests.e2e.test_broken_inputs`.  Commands that need no Python are in
``sessions/``.  A change of wording is a change of these files, in the same commit::

    SNAPSHOT_UPDATE=1 pytest tests/e2e
    git diff tests/e2e/snapshots

`tests.support.snapshots` says what is replaced in them (seconds, versions, words and sizes of the
HDF5 library).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from ckpttool.planning import preflight
from tests.e2e import test_broken_inputs, test_golden
from tests.support.corpus import GOLDEN, SAMPLES
from tests.support.permissions import ROOT_ONLY, give_away, run_without_rights
from tests.support.snapshots import SNAPSHOTS, Transcript, check_snapshot

MAX_LINES = 9_650  # of all snapshots
FILES_IN_JSON = ("append", "enc_and_crc_unreadable", "map_parameter", "net-graph")


def show_files(shell: Transcript, option: str) -> None:
    for path in sorted((SAMPLES / "files").iterdir()):
        if option and path.stem not in FILES_IN_JSON:
            continue
        shell.run(f"inspect golden/samples/files/{path.name}{option}")
        if path.suffix in (".ckpt", ".safetensors"):
            shell.run(f"verify golden/samples/files/{path.name} --deep --crc{option}")
    shell.run(f"inspect golden/optshard_size2_adam_8_to_4/group_info/rank_0.pb{option}")


def show_described(shell: Transcript, option: str) -> None:
    """Checkpoints that describe themselves, and data parallel."""
    found = [*GOLDEN.glob("mindformers/*"), *GOLDEN.glob("hyper_parallel/*/ckpt")]
    folders = sorted(f"golden/{path.relative_to(GOLDEN)}" for path in found)
    folders = folders[4::5] if option else folders
    target = {"ckpttool_strategy": 1, "ranks": 2, "otherwise": "replicated", "parameters": {}}
    Path("two.json").write_text(json.dumps(target), encoding="utf-8")
    for folder in folders:
        shell.run(f"inspect {folder}{option}")
        shell.run(f"verify {folder} --deep{option}")
        shell.run(f"merge {folder} -o m.safetensors{option}")
        shell.run(f"diff {folder} m.safetensors{option}")
        shell.run(f"reshard {folder} -d two.json -o out --format ckpt{option}")
        shell.clear("m.safetensors", "out")
    shell.run(f"verify golden/batchnorm --replicated --deep{option}")
    shell.run(f"merge golden/batchnorm --replicated -o m.ckpt{option}")
    shell.run(f"merge golden/batchnorm --replicated --unlisted first -o m.ckpt{option}")


def show_samples(shell: Transcript, option: str) -> None:
    folders = [path for path in sorted(SAMPLES.iterdir()) if (path / "strategy").is_dir()]
    for path in [SAMPLES / "opt_aggregated"] if option else folders:
        words = f"golden/samples/{path.name}/ckpt -s golden/samples/{path.name}/strategy"
        words += "/strategy_0.ckpt" if option else ""
        shell.run(f"inspect {words}{option}")
        shell.run(f"merge {words} -o m.ckpt{option}")
        shell.run(f"verify {words} --deep{option}")
        shell.clear("m.ckpt")


SHOWN: dict[str, Callable[[Transcript, str], None]] = {
    "files": show_files,
    "described": show_described,
    "samples": show_samples,
}
GROUPS = {
    **{name: (group, "") for name, group in SHOWN.items()},
    **{f"{name}_json": (group, " --json") for name, group in SHOWN.items()},
}


@pytest.mark.parametrize("name", GROUPS)
def test_what_is_printed_is_what_was_agreed(name, shell):
    group, option = GROUPS[name]
    group(shell, option)
    check_snapshot(name, shell.text())


TUTORIAL = GOLDEN / "tutorial_8_to_8_retrain"


@pytest.fixture
def mistaken(shell):
    shutil.copytree(TUTORIAL / "src", "C")
    shutil.copy(TUTORIAL / "src_strategy.ckpt", "S.ckpt")
    shutil.copy(TUTORIAL / "dst_strategy.ckpt", "D.ckpt")
    return shell


def test_a_full_disk_is_answered_as_was_agreed(mistaken, monkeypatch):
    mistaken.remark("34 a disk that is too small, and one that is full while it is written")
    disk = SimpleNamespace(f_bavail=40, f_frsize=512, f_flag=0)
    with monkeypatch.context() as patch:
        patch.setattr(preflight.os, "statvfs", lambda folder: disk)
        mistaken.run("merge C -s S.ckpt -o x.ckpt")
        mistaken.run("reshard C -s S.ckpt -d D.ckpt -o x --format ckpt")

    def full(*words: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.pwritev", full)
    mistaken.run("merge C -s S.ckpt -o x.ckpt --engine inline")
    check_snapshot("mistakes_disk", mistaken.text())


class WithoutLibrary(ModuleType):
    """What mpi4py is where there is no MPI library."""

    def __getattr__(self, name: str) -> object:
        raise RuntimeError("cannot load MPI library\nlibmpi.so: cannot open shared object file")


def test_an_engine_that_is_not_there_is_answered_as_was_agreed(mistaken, monkeypatch):
    pytest.importorskip("distributed")
    mistaken.remark(
        "36 --engine dask without a scheduler, without dask; mpi without mpi4py, libmpi"
    )
    words = "merge C -s S.ckpt -o x.ckpt --engine"
    for engine in ("dask", "dask:none.json", "processes:0", "threads:x"):
        mistaken.run(f"{words} {engine}")
    monkeypatch.setitem(sys.modules, "distributed", None)
    monkeypatch.setitem(sys.modules, "mpi4py.futures", None)
    for engine in ("dask:localhost:1", "mpi"):
        mistaken.run(f"{words} {engine}")
    monkeypatch.setitem(sys.modules, "mpi4py.futures", WithoutLibrary("mpi4py.futures"))
    mistaken.run(f"{words} mpi")
    check_snapshot("mistakes_engines", mistaken.text())


@pytest.mark.interpreter
@ROOT_ONLY
def test_what_may_not_be_read_or_written_is_answered_as_was_agreed(mistaken):
    for closed, mode, line in (
        ("C/rank_3", 0o700, "merge C -s S.ckpt -o x.ckpt"),
        ("C/rank_3", 0o700, "verify C -s S.ckpt"),
        ("S.ckpt", 0o600, "merge C -s S.ckpt -o x.ckpt"),
        ("out", 0o755, "merge C -s S.ckpt -o out/x.ckpt"),
        ("out", 0o755, "reshard C -s S.ckpt -d D.ckpt -o out --format ckpt"),
    ):
        path = mistaken.folder / closed
        if closed == "out":
            path.mkdir(exist_ok=True)
        give_away(path, mode)
        done = run_without_rights(line, mistaken.folder)
        mistaken.remark(f"{closed} belongs to another, mode {mode:o}")
        mistaken.add(line, done.stdout, done.stderr, done.returncode)
        mistaken.clear("x.ckpt")
        os.chown(path, 0, 0)
    check_snapshot("mistakes_rights", mistaken.text())


def test_a_difference_fails_with_a_diff(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.support.snapshots.SNAPSHOTS", tmp_path)
    monkeypatch.setenv("SNAPSHOT_UPDATE", "1")
    check_snapshot("a", "one\ntwo\n")
    monkeypatch.delenv("SNAPSHOT_UPDATE")
    check_snapshot("a", "one\ntwo\n")
    for name, text in (("a", "one\n2\n"), ("b", "one\n")):
        with pytest.raises(pytest.fail.Exception, match=r"(?s)\+(2|one)\n.*SNAPSHOT_UPDATE=1"):
            check_snapshot(name, text)


def test_an_internal_error_is_never_written(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.support.snapshots.SNAPSHOTS", tmp_path)
    monkeypatch.setenv("SNAPSHOT_UPDATE", "1")
    with pytest.raises(pytest.fail.Exception, match="internal error in a"):
        check_snapshot("a", "$ ckpttool inspect C\n=> exit 70\n")
    assert not (tmp_path / "a.txt").exists()


def test_every_snapshot_belongs_to_a_test_and_together_they_stay_small():
    files = [path for path in SNAPSHOTS.rglob("*") if path.is_file()]
    names = [*GROUPS, "mistakes_disk", "mistakes_engines", "mistakes_rights"]
    names += [f"golden/{case}" for case in test_golden.CASES]
    names += [f"broken/{variant}" for variant in test_broken_inputs.FACTS]
    found = [path.relative_to(SNAPSHOTS).with_suffix("") for path in files]
    assert sorted(map(str, found)) == sorted(names)
    assert sum(path.read_bytes().count(b"\n") for path in files) < MAX_LINES


@pytest.mark.interpreter
@pytest.mark.slow
@pytest.mark.parametrize("seed", ["1", "2", "3"])
def test_nothing_depends_on_the_order_of_a_set(seed):
    """Else a script that compares what two runs print finds differences that mean nothing."""
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    environment.pop("SNAPSHOT_UPDATE", None)
    words = ["-n0", "-q", "-p", "no:cacheprovider", "-m", "not exhaustive and not slow"]
    others = [str(module.__file__) for module in (test_broken_inputs, test_golden)]
    command = [sys.executable, "-m", "pytest", *words, __file__, *others]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
