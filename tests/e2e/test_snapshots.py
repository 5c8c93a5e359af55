"""Everything that the commands print, compared with files that a reviewer can read.

The files are in ``snapshots/``: one for each group of commands and of mistakes, and those of
`tests.e2e.test_golden` and `tests.e2e.test_broken_inputs`, one for each case.  A change of wording
is a change of these files, in the same commit::

    SNAPSHOT_UPDATE=1 pytest tests/e2e
    git diff tests/e2e/snapshots

`tests.support.snapshots` says what is replaced in them (seconds, versions, words and sizes of the
HDF5 library).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e import test_broken_inputs, test_golden
from tests.e2e.mistakes import MISTAKES, prepare
from tests.support.corpus import GOLDEN, SAMPLES
from tests.support.damage import flip_byte, flipped
from tests.support.permissions import ROOT_ONLY, give_away, run_without_rights
from tests.support.snapshots import SNAPSHOTS, Transcript, check_snapshot

MAX_LINES = 12_000  # of all snapshots
COMMANDS = ("inspect", "merge", "split", "reshard", "verify", "diff", "finalize")
COMMANDS += ("help", "completion")
FILES_IN_JSON = ("append", "enc_and_crc_unreadable", "map_parameter", "net-graph")


def show_files(shell: Transcript, option: str) -> None:
    """Single files of every kind."""
    for path in sorted((SAMPLES / "files").iterdir()):
        if option and path.stem not in FILES_IN_JSON:
            continue
        shell.run(f"inspect golden/samples/files/{path.name}{option}")
        if path.suffix in (".ckpt", ".safetensors"):
            shell.run(f"verify golden/samples/files/{path.name} --deep --crc{option}")
    shell.run(f"inspect golden/optshard_size2_adam_8_to_4/group_info/rank_0.pb{option}")


def show_screens(shell: Transcript, option: str) -> None:
    """What inspect lists on request, and strategies."""
    case = "golden/tutorial_8_to_8_retrain"
    source = f"{case}/src -s {case}/src_strategy.ckpt"
    shell.run(f"inspect {source} --all --ranks")
    shell.quietly(f"merge {source} -o model --max-shard-size 10KB")
    shell.run("inspect model --all")
    shell.run("inspect golden/encrypted_gcm/src")
    shell.run("inspect golden/optshard_full_adamw/src_strategy.ckpt")
    for words in ("", " --all", " --json"):
        shell.run(f"inspect golden/uneven_manual_split/src_strategy.ckpt{words}")
    stages = "golden/samples/pp2/strategy"
    for words in (f"{stages}/strategy_0.ckpt {stages}/strategy_4.ckpt", f"{stages}/merged.json"):
        shell.run(f"inspect {words}")
    shell.run(f"inspect {stages} --json")
    shell.run(f"inspect {stages}/strategy_4.ckpt")
    hand = "ckpttool_strategy: 1\nranks: 8\notherwise: replicated\nparameters:\n"
    Path("hand.yaml").write_text(hand + "  layers.*.weight: {axis: 0, parts: 4}\n")
    for words in ("", " --json"):
        shell.run(f"inspect hand.yaml{words}")
    case = "golden/dst_without_optimizer"
    strategies = f"-s {case}/src_strategy.ckpt -d {case}/dst_strategy.ckpt"
    shell.run(f"reshard {case}/src {strategies} -o out -q")
    case = "golden/several_files_per_rank"
    shell.run(f"merge {case}/src -s {case}/src_strategy.ckpt -o m.ckpt --crc")
    shell.run("inspect m.ckpt --crc")


def show_diff(shell: Transcript, option: str) -> None:
    """Two cases that differ, and single bits."""
    pairs = (("tutorial_8_to_8_retrain", "tutorial_8_to_4_infer"), ("dtypes_all", "bfloat16_model"))
    for a, b in pairs[bool(option) :]:
        strategy = f"-s golden/{a}/src_strategy.ckpt --b-strategy golden/{b}/src_strategy.ckpt"
        shell.run(f"diff golden/{a}/src golden/{b}/src {strategy}{option}")
    case = "golden/tutorial_8_to_8_retrain"
    shell.quietly(f"merge {case}/src -s {case}/src_strategy.ckpt -o m.ckpt")
    Path("changed.ckpt").write_bytes(flipped(Path("m.ckpt").read_bytes(), -5, 16))
    shell.remark("one bit of the last tensor is another")
    for words in ("", " --rtol 1e-3", " --atol 1e9"):
        shell.run(f"diff m.ckpt changed.ckpt{words}{option}")


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
    """What eight ranks of a training job saved, and its strategies."""
    folders = [path for path in sorted(SAMPLES.iterdir()) if (path / "strategy").is_dir()]
    for path in [SAMPLES / "opt_aggregated"] if option else folders:
        words = f"golden/samples/{path.name}/ckpt -s golden/samples/{path.name}/strategy"
        words += "/strategy_0.ckpt" if option else ""
        shell.run(f"inspect {words}{option}")
        shell.run(f"merge {words} -o m.ckpt{option}")
        shell.run(f"verify {words} --deep{option}")
        shell.clear("m.ckpt")


def show_sets(shell: Transcript, option: str) -> None:
    """Sets of outputs: manifests, --resume, --part and finalize, numbered files, HDF5."""
    case = "golden/tutorial_8_to_8_retrain"
    source = f"{case}/src -s {case}/src_strategy.ckpt"
    target = f"-d {case}/dst_strategy.ckpt"
    reshard = f"reshard {source} {target} -o out --format ckpt"
    shell.run(f"{reshard} --rank 0,3-4{option}")
    shell.show("out/ckpttool.json")
    shell.run(f"inspect out{option}")
    shell.run(f"verify out --deep{option}")
    shell.remark("again, then with --resume, with one output gone, with one output changed")
    shell.run(f"{reshard} --rank 0,3-4{option}")
    shell.run(f"{reshard} --rank 0,3-4 --resume{option}")
    Path("out/rank_3/checkpoint_3.ckpt").unlink()
    shell.run(f"verify out{option}")
    shell.run(f"{reshard} --rank 0,3-4 --resume{option}")
    path = Path("out/rank_4/checkpoint_4.ckpt")
    flip_byte(path, -5, 16)
    shell.run(f"verify out --deep{option}")
    shell.run(f"{reshard} --rank 0,3-4 --resume{option}")
    shell.clear("out")
    shell.remark("in parts")
    for part in ("1/2", "2/2"):
        shell.run(f"{reshard} --part {part}{option}")
        shell.run(f"finalize out{option}")
    shell.run(f"finalize out{option}")
    shell.clear("out")
    shell.remark("a strategy, numbered files, checksums, HDF5")
    shell.run(f"{reshard} --write-strategy out/strategy.ckpt --prefix net_ --crc{option}")
    shell.clear("out")
    shell.run(f"merge {source} -o model --max-shard-size 20KB{option}")
    shell.show("model/ckpttool.json")
    shell.run(f"inspect model{option}")
    shell.run(f"verify model --deep{option}")
    shell.run(f"split model {target} -o out{option}")
    shell.run(f"merge {source} -o m.h5{option}")
    shell.run(f"inspect m.h5{option}")
    shell.run(f"verify m.h5 --deep{option}")
    shell.run(f"diff m.h5 model{option}")
    shell.run(f"merge m.h5 -o m.ckpt -q{option}")


def show_help(shell: Transcript, option: str) -> None:
    shell.run("")
    shell.run("--help")
    for command in COMMANDS:
        shell.run(f"{command} --help")
    shell.run("help")
    shell.run("--version")


SHOWN: dict[str, Callable[[Transcript, str], None]] = {
    "files": show_files,
    "diff": show_diff,
    "described": show_described,
    "samples": show_samples,
    "sets": show_sets,
}
GROUPS = {
    "help": (show_help, ""),
    "screens": (show_screens, ""),
    **{name: (group, "") for name, group in SHOWN.items()},
    **{f"{name}_json": (group, " --json") for name, group in SHOWN.items()},
}


@pytest.mark.parametrize("name", GROUPS)
def test_what_is_printed_is_what_was_agreed(name, shell):
    group, option = GROUPS[name]
    group(shell, option)
    check_snapshot(name, shell.text())


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_answered_as_was_agreed(name, shell, monkeypatch):
    with monkeypatch.context() as patch:
        MISTAKES[name](shell, patch)
    check_snapshot(f"mistakes_{name}", shell.text())


@pytest.mark.interpreter
@ROOT_ONLY
def test_what_may_not_be_read_or_written_is_answered_as_was_agreed(shell):
    """A process of its own, to which the rights of files matter; row 33 of the mistakes."""
    prepare(shell)
    for closed, mode, line in (
        ("C/rank_3", 0o700, "merge C -s S.ckpt -o x.ckpt"),
        ("C/rank_3", 0o700, "verify C -s S.ckpt"),
        ("S.ckpt", 0o600, "merge C -s S.ckpt -o x.ckpt"),
        ("out", 0o755, "merge C -s S.ckpt -o out/x.ckpt"),
        ("out", 0o755, "reshard C -s S.ckpt -d D.ckpt -o out --format ckpt"),
    ):
        path = shell.folder / closed
        if closed == "out":
            path.mkdir(exist_ok=True)
        give_away(path, mode)
        done = run_without_rights(line, shell.folder)
        shell.remark(f"{closed} belongs to another, mode {mode:o}")
        shell.add(line, done.stdout, done.stderr, done.returncode)
        shell.clear("x.ckpt")
        os.chown(path, 0, 0)
    check_snapshot("mistakes_rights", shell.text())


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
    names = [*GROUPS, *(f"mistakes_{name}" for name in MISTAKES), "mistakes_rights"]
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
