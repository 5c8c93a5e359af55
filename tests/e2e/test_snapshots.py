"""Everything that the commands print, compared with files that a reviewer can read.

The files are in ``snapshots/``, one for each command and group of cases.  A change of wording is a
change of these files, in the same commit::

    SNAPSHOT_UPDATE=1 pytest tests/e2e/test_snapshots.py
    git diff tests/e2e/snapshots

`tests.support.snapshots` says what is replaced in them (seconds, versions, words and sizes of the
HDF5 library).  Outputs are ``.ckpt`` and ``.safetensors`` as a rule, whose sizes are ours.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.mistakes import MISTAKES, prepare
from tests.support import corpus
from tests.support.corpus import BROKEN, GOLDEN, SAMPLES, WORDS
from tests.support.damage import flip_byte, flipped
from tests.support.permissions import ROOT_ONLY, give_away, run_without_rights
from tests.support.readers import write_ckpt
from tests.support.snapshots import SNAPSHOTS, Transcript, check_snapshot

MAX_BYTES = 2 * 2**20  # of all snapshots
COMMANDS = ("inspect", "merge", "split", "reshard", "verify", "diff", "finalize")
COMMANDS += ("help", "completion")
ENCRYPTED = {"encrypted_cbc", "encrypted_gcm"}


@pytest.fixture
def shell(tmp_path, monkeypatch):
    """A transcript in an empty folder, in which ``golden`` is the corpus."""
    (tmp_path / "golden").symlink_to(GOLDEN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    return Transcript(tmp_path)


def prepare_key(shell: Transcript, case: str) -> str:
    """Write the key of an encrypted case; the words that give it to a command."""
    key = corpus.case_facts(case).get("enc_key")
    if key is None:
        return ""
    Path("key.bin").write_text(key, encoding="ascii")
    return " --dec-key-file key.bin"


def source_of(shell: Transcript, case: str, has_step: bool = True) -> str:
    """The words that name the source of a case, its strategy, its step and its key."""
    (strategy,) = (GOLDEN / case).glob("src_strategy.*")
    step = " --step 2_10" if has_step and "--step" in WORDS.get(case, []) else ""
    key = prepare_key(shell, case)
    return f"golden/{case}/src -s golden/{case}/{strategy.name}{step}{key}"


def conversion_of(shell: Transcript, conversion: corpus.Conversion, out: str) -> str:
    """The command of a golden conversion."""
    case, words = conversion.case, [conversion.kind.removesuffix("_unified")]
    if (conversion.folder / conversion.source).is_dir():
        words.append(f"golden/{case}/{conversion.source}")
    else:  # not in the corpus, since the oracle joins it
        write_ckpt(Path("full.ckpt"), corpus.merged_by_oracle(case))
        words.append("full.ckpt")
    for option, strategy in (("-s", conversion.src_strategy), ("-d", conversion.dst_strategy)):
        words += [option, f"golden/{case}/{strategy}"] if strategy else []
    words += WORDS.get(case, []) if conversion.source == "src" else []
    return " ".join([*words, "-o", out])


# ------------------------------------------------------------------------------ golden cases


def show_inspect(shell: Transcript, option: str) -> None:
    """Every case; of the documents, which say the same in more words, every other."""
    for case in corpus.case_names()[:: 2 if option else 1]:
        shell.run(f"inspect {source_of(shell, case)}{option}")


def show_inspect_alone(shell: Transcript, option: str) -> None:
    """Without a strategy, and of single files."""
    for case in corpus.case_names()[::4]:
        shell.run(f"inspect golden/{case}/src{prepare_key(shell, case)}{option}")
    for path in sorted((SAMPLES / "files").iterdir()):
        shell.run(f"inspect golden/samples/files/{path.name}{option}")
    for path in sorted(GOLDEN.glob("*/golden/unified")):
        shell.run(f"inspect golden/{path.relative_to(GOLDEN)}{option}")
    for path in sorted(GOLDEN.glob("*/group_info/*"))[:2]:
        shell.run(f"inspect golden/{path.relative_to(GOLDEN)}{option}")


def show_verify(shell: Transcript, option: str) -> None:
    for case in corpus.case_names():
        shell.run(f"verify {source_of(shell, case)} --deep{option}")


def show_verify_headers(shell: Transcript, option: str) -> None:
    """Headers alone, and files without a strategy."""
    for case in corpus.case_names()[::4]:
        shell.run(f"verify {source_of(shell, case)}{option}")
        shell.run(f"verify golden/{case}/src --crc{prepare_key(shell, case)}{option}")
    for path in sorted((SAMPLES / "files").glob("*.[cs]*")):
        shell.run(f"verify golden/samples/files/{path.name} --deep --crc{option}")


def show_merge(shell: Transcript, option: str) -> None:
    for conversion in corpus.conversions("merge"):
        shell.run(conversion_of(shell, conversion, "m.ckpt") + option)
        shell.clear("m.ckpt")


def show_split(shell: Transcript, option: str) -> None:
    for conversion in corpus.conversions("split", "split_unified"):
        shell.run(conversion_of(shell, conversion, "out --format ckpt") + option)
        shell.clear("out")


def show_reshard(shell: Transcript, option: str) -> None:
    for conversion in corpus.conversions("reshard"):
        shell.run(conversion_of(shell, conversion, "out --format ckpt") + option)
        shell.clear("out")


def show_diff(shell: Transcript, option: str) -> None:
    """Every fourth source with its merged file, two that differ, and single bits."""
    cases = [one for one in corpus.conversions("merge") if one.case not in ENCRYPTED][::4]
    for conversion in cases:
        source = source_of(shell, conversion.case)
        shell.quietly(conversion_of(shell, conversion, "m.ckpt"))
        if "--step" not in source:  # which diff does not have
            first, _, rest = source.partition(" ")
            shell.run(f"diff {first} m.ckpt {rest}{option}")
        shell.clear("m.ckpt")
    pairs = (("tutorial_8_to_8_retrain", "tutorial_8_to_4_infer"), ("dtypes_all", "bfloat16_model"))
    for a, b in pairs:
        strategy = f"-s golden/{a}/src_strategy.ckpt --b-strategy golden/{b}/src_strategy.ckpt"
        shell.run(f"diff golden/{a}/src golden/{b}/src {strategy}{option}")
    source = source_of(shell, "tutorial_8_to_8_retrain")
    shell.quietly(f"merge {source} -o m.ckpt")
    Path("changed.ckpt").write_bytes(flipped(Path("m.ckpt").read_bytes(), -5, 16))
    shell.remark("one bit of the last tensor is another")
    for words in ("", " --rtol 1e-3", " --atol 1e9"):
        shell.run(f"diff m.ckpt changed.ckpt{words}{option}")


def show_described(shell: Transcript, option: str) -> None:
    """Checkpoints that describe themselves, and data parallel."""
    found = [*GOLDEN.glob("mindformers/*"), *GOLDEN.glob("hyper_parallel/*/ckpt")]
    folders = sorted(f"golden/{path.relative_to(GOLDEN)}" for path in found)
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
    for path in sorted(SAMPLES.iterdir()):
        if not (path / "strategy").is_dir():
            continue
        words = f"golden/samples/{path.name}/ckpt -s golden/samples/{path.name}/strategy"
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


# ------------------------------------------------------------------------------ what is wrong


def show_broken(shell: Transcript, option: str) -> None:
    """The broken inputs, for every command."""
    for folder in sorted(path for path in BROKEN.iterdir() if path.is_dir()):
        words = f"golden/broken_inputs/{folder.name}/src"
        strategy = f"golden/broken_inputs/{folder.name}/src_strategy.ckpt"
        target = (
            strategy.replace("src_s", "dst_s")
            if (folder / "dst_strategy.ckpt").exists()
            else strategy
        )
        shell.run(f"inspect {words} -s {strategy}{option}")
        shell.run(f"verify {words} -s {strategy} --deep{option}")
        shell.run(f"merge {words} -s {strategy} -o m.ckpt{option}")
        shell.run(f"reshard {words} -s {strategy} -d {target} -o out --format ckpt{option}")
        shell.run(f"diff {words} {words} -s {strategy}{option}")
        shell.clear("m.ckpt", "out")
        file = min((folder / "src").glob("rank_*/*"))
        shell.run(f"split {words}/{file.parent.name}/{file.name} -d {target} -o out{option}")
        shell.clear("out")


def show_help(shell: Transcript, option: str) -> None:
    shell.run("")
    shell.run("--help")
    for command in COMMANDS:
        shell.run(f"{command} --help")
    shell.run("help")
    shell.run("--version")


GOLDEN_GROUPS: dict[str, Callable[[Transcript, str], None]] = {
    "inspect": show_inspect,
    "inspect_alone": show_inspect_alone,
    "verify": show_verify,
    "verify_headers": show_verify_headers,
    "merge": show_merge,
    "split": show_split,
    "reshard": show_reshard,
    "diff": show_diff,
    "described": show_described,
    "samples": show_samples,
    "sets": show_sets,
    "broken_inputs": show_broken,
}
GROUPS = {
    "help": (show_help, ""),
    **{name: (group, "") for name, group in GOLDEN_GROUPS.items()},
    **{f"{name}_json": (group, " --json") for name, group in GOLDEN_GROUPS.items()},
}


# These print what merge and reshard print in other groups, and take the longest.
LONGEST = {"split", "split_json", "reshard_json", "described_json"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.exhaustive if name in LONGEST else ())
        for name in GROUPS
    ],
)
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
    files = sorted(SNAPSHOTS.iterdir())
    names = [*GROUPS, *(f"mistakes_{name}" for name in MISTAKES), "mistakes_rights"]
    assert [path.stem for path in files] == sorted(names)
    assert sum(path.stat().st_size for path in files) < MAX_BYTES


@pytest.mark.interpreter
@pytest.mark.slow
@pytest.mark.parametrize("seed", ["1", "2", "3"])
def test_nothing_depends_on_the_order_of_a_set(seed):
    """Else a script that compares what two runs print finds differences that mean nothing."""
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    environment.pop("SNAPSHOT_UPDATE", None)
    words = ["-n0", "-q", "-p", "no:cacheprovider", "-k", "not order_of_a_set", __file__]
    command = [sys.executable, "-m", "pytest", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
