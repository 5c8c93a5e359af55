"""What a person does wrong in the first week, as command lines.

``C`` is a checkpoint of 8 ranks with tensor parallelism, ``S.ckpt`` its strategy, ``D.ckpt`` the
strategy of a target, ``m.ckpt`` the merged checkpoint.
"""

from __future__ import annotations

import gzip
import io
import shutil
import sys
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from ckpttool.planning import preflight
from tests.support.corpus import GOLDEN, SAMPLES
from tests.support.damage import flip_byte
from tests.support.snapshots import Transcript

Mistake = Callable[[Transcript, pytest.MonkeyPatch], None]
TUTORIAL = GOLDEN / "tutorial_8_to_8_retrain"
FILE = "checkpoint-2_10.ckpt"


def prepare(shell: Transcript) -> None:
    """Write ``C``, ``S.ckpt`` and ``D.ckpt`` anew."""
    shell.clear("C")
    shutil.copytree(TUTORIAL / "src", "C")
    shutil.copy(TUTORIAL / "src_strategy.ckpt", "S.ckpt")
    shutil.copy(TUTORIAL / "dst_strategy.ckpt", "D.ckpt")


def prepare_merged(shell: Transcript) -> None:
    """Write them and ``m.ckpt``."""
    prepare(shell)
    shell.quietly("merge C -s S.ckpt -o m.ckpt --overwrite")


# ------------------------------------------------------------------------------- strategies


def forget_the_strategy(shell: Transcript, patch: pytest.MonkeyPatch) -> None:
    prepare_merged(shell)
    shell.remark("1 no strategy")
    for command in ("merge C -o x.h5", "reshard C -d D.ckpt -o x", "verify C --deep", "diff C C"):
        shell.run(command)
    shell.run("merge C --replicated -o x.h5")
    shell.remark("2 the strategy of the target")
    for command in ("merge C -s D.ckpt -o x.ckpt", "inspect C -s D.ckpt", "verify C -s D.ckpt"):
        shell.run(command)
    shell.run("verify C -s D.ckpt --deep")
    shell.remark("3 the strategy of another model")
    other = "golden/moe_ep4_mp2/src_strategy.ckpt"
    for command in (f"merge C -s {other} -o x.ckpt", f"inspect C -s {other}"):
        shell.run(command)
    shell.run(f"reshard C -s S.ckpt -d {other} -o x --format ckpt")
    shell.remark("4 the strategy of another job with the same model")
    for case in ("tutorial_8_to_4_infer", "tutorial_pipeline_2x4_to_8"):
        for side in ("src", "dst"):
            shell.run(f"merge C -s golden/{case}/{side}_strategy.ckpt -o x.ckpt")
            shell.clear("x.ckpt")


def mix_up_files(shell: Transcript, patch: pytest.MonkeyPatch) -> None:
    prepare_merged(shell)
    shell.remark("5 a checkpoint as the strategy")
    shell.run(f"merge C -s C/rank_0/{FILE} -o x.ckpt")
    shell.run("merge C -s m.ckpt -o x.ckpt")
    shell.run("split m.ckpt -d m.ckpt -o x")
    shell.remark("6 SRC and -s exchanged")
    shell.run("merge S.ckpt -s C -o x.ckpt")
    shell.run("inspect S.ckpt")
    shell.remark("7 merge with a target")
    shell.run("merge C -s S.ckpt -d D.ckpt -o x.ckpt")
    shell.remark("8 split with -s")
    shell.run("split m.ckpt -s S.ckpt -o x")
    shell.remark("13 merge of what is merged")
    for command in ("merge", "verify", "inspect"):
        shell.run(f"{command} m.ckpt -s S.ckpt" + " -o x.ckpt" * (command == "merge"))
    shell.remark("14 reshard of what is merged")
    shell.run("reshard m.ckpt -d D.ckpt -o x")
    shell.remark("29 one of two stage strategies")
    case = "golden/pipeline_2x4_to_8"
    shell.run(f"merge {case}/src -s {case}/src_stage_strategies/src_strategy_0.ckpt -o x.ckpt")
    shell.remark("31 a target that does not divide")
    case = "golden/broken_inputs/not_divisible"
    words = f"-s {case}/src_strategy.ckpt -d {case}/dst_strategy.ckpt -o x"
    shell.run(f"reshard {case}/src {words}")
    three = '{"ckpttool_strategy": 1, "ranks": 3, "otherwise": {"axis": 0}, "parameters": {}}'
    Path("three.json").write_text(three, encoding="utf-8")
    shell.run("split m.ckpt -d three.json -o x")
    cuts = '"parameters": {"*": {"axis": 0}}'
    three = three.replace('"otherwise": {"axis": 0}, "parameters": {}', cuts)
    Path("three.json").write_text(three, encoding="utf-8")
    shell.run("split m.ckpt -d three.json -o x")
    shell.remark("32 a number as the target")
    shell.run("reshard C -s S.ckpt -d 4 -o x")


def write_yaml_wrong(shell: Transcript, patch: pytest.MonkeyPatch) -> None:
    prepare(shell)
    shell.remark("28 a wrong key, a wrong indent, a duplicate key, a typo in a cut, not YAML")
    for parameters in (
        "parameter:\n  w: {axis: 0}\n",
        "parameters:\n  w: {axis: 0}\n   x: {axis: 0}\n",
        "parameters:\n  a: {axis: 0}\n  a: {axis: 1}\n",
        "parameters:\n  w: {axes: 0}\n",
        "parameters: [\n",
        "",
    ):
        text = f"ckpttool_strategy: 1\nranks: 8\n{parameters}"
        Path("hand.yaml").write_text(text, encoding="utf-8")
        shell.remark(repr(text))
        shell.run("merge C -s hand.yaml -o x.ckpt")
    Path("hand.yaml").write_text("ranks: 8\nparameters:\n  w: {axis: 0}\n", encoding="utf-8")
    shell.remark("without the first line")
    shell.run("merge C -s hand.yaml -o x.ckpt")
    text = "ckpttool_strategy: 1\nranks: 8\nparameters:\n  layer1.bias: {axis: 5}\n"
    Path("hand.yaml").write_text(f"{text}  '*.x': replicated\n", encoding="utf-8")
    shell.remark("an axis that is not there, a pattern that matches nothing; a strategy as SRC")
    shell.run("merge C -s hand.yaml -o x.ckpt")
    shell.run("merge hand.yaml -o x.ckpt")
    Path("hand.json").write_text('{"ckpttool_strategy": 1, "ranks": 2}', encoding="utf-8")
    shell.run("merge hand.json -o x.ckpt")


# ------------------------------------------------------------------------------- words


def forget_or_mistype(shell: Transcript, patch: pytest.MonkeyPatch) -> None:
    prepare_merged(shell)
    shell.remark("9 -o, SRC, -d forgotten")
    for command in ("merge C -s S.ckpt", "merge -s S.ckpt -o x.h5", "split m.ckpt -o x"):
        shell.run(command)
    shell.remark("10 a typo in a path, in an option, in a command, in a choice")
    for command in (
        "merge CC -s S.ckpt -o x.h5",
        "merge C -s SS.ckpt -o x.h5",
        "merge C -s s.ckpt -o x.h5",
        "merge C -s n.ckpt -o x.h5",  # near m.ckpt, which is no strategy
        "merge C --src-stratgy S.ckpt -o x.h5",
        "marge C -s S.ckpt -o x.h5",
        "merge C --bogus",
        "-v",
        "help damagd",
        "help nonsense",
        "merge C -s S.ckpt -o x --format safetensor",
    ):
        shell.run(command)
    shell.remark("15 the shell expands C/*/*.ckpt")
    shell.run(" ".join(["merge", *sorted(map(str, Path("C").glob("*/*"))), "-s S.ckpt -o x.h5"]))
    shell.remark("22 ranks that are none, or not there")
    for ranks in ("0-", "a", "9", "3-1", ""):
        shell.run(f"reshard C -s S.ckpt -d D.ckpt -o x --rank '{ranks}'")
    shell.remark("35 sizes and numbers")
    for words in (
        "--max-memory 1M",
        "--max-memory x",
        "--part 3/2",
        "--part 1",
        "-j 0",
        "-j x",
        "--max-shard-size x",
        "--max-shard-size 0",
        "--engine thread",
        "--optimizer-shard 0",
    ):
        shell.run(f"merge C -s S.ckpt -o x.ckpt {words}")
    shell.remark("37 remote paths")
    shell.run("merge s3://bucket/C -s S.ckpt -o x.h5")
    shell.run("inspect obs://bucket/C")
    shell.run("merge C -s S.ckpt -o s3://bucket/x.ckpt")
    shell.clear("s3:")
    shell.remark("41 the other side needs a strategy")
    shell.run("diff m.ckpt C")
    shell.run("diff C m.ckpt -s S.ckpt --json")
    shell.remark("42 -o m.hdf5, -o m, -o -")
    for out in ("x.hdf5", "x", "-"):
        shell.run(f"merge C -s S.ckpt -o {out}")
        shell.clear(out)


def mean_another_path(shell: Transcript, patch: pytest.MonkeyPatch) -> None:
    prepare_merged(shell)
    Path("link").symlink_to("gone")
    Path("folder").mkdir()
    for line in (
        *("merg C", "convert C", "inspect Cs", "inspect C/rank0", "inspect other"),
        *("inspect C/rank_9/x", f"inspect C/{250 * 'x'}", "inspect link", "inspect link/"),
        *("split m.ckpt -d D.ckpt -o -", "merge m.ckpt -o new/", "merge m.ckpt -o folder/"),
        "merge m.ckpt -o x.ckpt --format hdf5",
        "merge m.ckpt -o x.h5 --max-shard-size 5GB",
        "inspect C --pattern 'rank{rank}/*'",
        f"merge C/rank_0/{FILE} --step 3_8 -o x.h5",
        "merge C -s S.ckpt -o x.pt",
    ):
        shell.run(line)


def mean_another_option(shell: Transcript, patch: pytest.MonkeyPatch) -> None:
    prepare(shell)
    for line in (
        *("split C --strategy S.ckpt -o x", "merge C --srcstrategy S.ckpt", "inspect C --deep"),
        *(
            "merge C --rank=0",
            "verify C C C C",
            "verify C/rank_0 C/rank_1",
            "diff C C c",
            "help a b",
        ),
        *("completion tcsh", "verify C --ignore n", "merge C -o", "merge C --resume=1 -o x.h5"),
        *("diff C C --rtol x", "verify C --limit -1"),
    ):
        shell.run(line)
    for words in ("-j 2 --engine processes:2", "-j 2 --engine x", "-j 1234567"):
        shell.run(f"merge C -s S.ckpt -o x.ckpt {words}")


# ------------------------------------------------------------------------------- folders


def name_one_rank(shell: Transcript, patch: pytest.MonkeyPatch) -> None:
    prepare(shell)
    shell.remark("11 the folder of one rank")
    for command in ("merge C/rank_0 -s S.ckpt -o x.h5", "inspect C/rank_0", "verify C/rank_0"):
        shell.run(command)
    shell.remark("12 the file of one rank")
    shell.run(f"merge C/rank_0/{FILE} -s S.ckpt -o x.ckpt")
    shell.run(f"merge C/rank_0/{FILE} -o x.ckpt")
    shell.quietly("merge C -s S.ckpt -o x.ckpt")
    Path("x.ckpt").unlink()  # its manifest is left
    shell.run(f"merge C/rank_0/{FILE} -s S.ckpt -o x.ckpt")
    shell.clear("x.ckpt")
    shell.run(f"split C/rank_0/{FILE} -d D.ckpt -o x --format ckpt")
    shell.clear("x")
    shell.run(f"inspect C/rank_0/{FILE}")
    shell.run(f"verify C/rank_0/{FILE} --deep")
    for source in ("C/rank_0", "C"):
        shell.run(f"split {source} -d D.ckpt -o x")


def lose_ranks(shell: Transcript, patch: pytest.MonkeyPatch) -> None:
    prepare(shell)
    shell.remark("16 a rank is missing, and replicas are there")
    shutil.rmtree("C/rank_5")
    for command in ("merge C -s S.ckpt -o x.ckpt", "inspect C -s S.ckpt", "verify C -s S.ckpt"):
        shell.run(command)
    shell.clear("x.ckpt")
    shell.run("merge C -s S.ckpt -o x.ckpt --strict")
    shell.run("inspect C")
    shell.remark("17 a rank is missing, and no replica is there")
    for rank in (0, 1, 4):
        shutil.rmtree(f"C/rank_{rank}")
    for command in ("merge C -s S.ckpt -o x.ckpt", "inspect C -s S.ckpt", "verify C -s S.ckpt"):
        shell.run(command)
    shell.remark("30 ranks are numbered from 1")
    prepare(shell)
    for rank in range(7, -1, -1):
        Path(f"C/rank_{rank}").rename(f"C/rank_{rank + 1}")
    for command in ("merge C -s S.ckpt -o x.ckpt", "inspect C -s S.ckpt", "verify C -s S.ckpt"):
        shell.run(command)


def use_other_folders(shell: Transcript, patch: pytest.MonkeyPatch) -> None:
    prepare(shell)
    shell.remark("23 a pattern that matches nothing, ranks in other folders: what is below")
    shell.run("inspect C --pattern 'node{rank}/*.ckpt'")
    shell.run("inspect C --pattern 'rank_0/*.ckpt'")
    for rank in range(8):
        Path(f"C/rank_{rank}").rename(f"C/card{rank}")
    shell.run("merge C -s S.ckpt -o x.ckpt -q")  # numbers from 0 are those of ranks
    shell.clear("x.ckpt")
    for rank in range(8):
        Path(f"C/card{rank}").rename(f"C/run{rank}")
    shell.run("merge C -s S.ckpt -o x.ckpt")
    shell.run("inspect C --pattern 'run{rank}/*.ckpt'")
    shell.remark("the folder above, an empty folder, a file that is not there")
    Path("above/run").mkdir(parents=True)
    Path("C").rename("above/run/C")
    for folder in ("above/run", "above"):
        shell.run(f"inspect {folder}")
    Path("empty").mkdir()
    shell.run("inspect empty")
    shell.run("merge empty -s S.ckpt -o x.ckpt")
    shell.run("inspect above/run/x.ckpt")


def have_several_steps(shell: Transcript, patch: pytest.MonkeyPatch) -> None:
    prepare(shell)
    shell.remark("24 --step 2 with the epochs 1 and 2")
    for rank in range(8):
        folder = Path(f"C/rank_{rank}")
        (folder / FILE).rename(folder / "net-1_2.ckpt")
        shutil.copy(folder / "net-1_2.ckpt", folder / "net-2_2.ckpt")
    for step in ("2", "3", "2_2"):
        shell.run(f"inspect C --step {step}")
    shell.remark("25 the newest step is not complete")
    for rank in (3, 4):
        Path(f"C/rank_{rank}/net-2_2.ckpt").unlink()
    for command in ("merge C -s S.ckpt -o x.ckpt", "inspect C", "verify C -s S.ckpt"):
        shell.run(command)
    for options in ("-q --strict", "-q --step 1_2", "--step 2_2"):
        shell.clear("x.ckpt")
        shell.run(f"merge C -s S.ckpt -o x.ckpt {options}")
    shell.clear("x.ckpt")
    shell.remark("26 two checkpoints in one rank folder")
    for rank in range(8):
        Path(f"C/rank_{rank}/net-1_2.ckpt").rename(f"C/rank_{rank}/a.ckpt")
        shutil.copy(f"C/rank_{rank}/a.ckpt", f"C/rank_{rank}/b.ckpt")
    for command in ("merge C -s S.ckpt -o x.ckpt", "inspect C"):
        shell.run(command)


def leave_parameters_out(shell: Transcript, patch: pytest.MonkeyPatch) -> None:
    shell.remark("27 a parameter that no strategy lists and that differs")
    case = "golden/params_outside_strategy"
    words = f"{case}/src -s {case}/src_strategy.ckpt"
    shell.run(f"merge {words} -o x.ckpt")
    shell.run(f"verify {words} --deep")
    for choice in ("rank", "first", "drop"):
        shell.run(f"merge {words} -o x.ckpt --unlisted {choice}")
        shell.clear("x.ckpt")
    case = "golden/frozen_only_trainable"
    shell.run(f"merge {case}/src -s {case}/src_strategy.ckpt -o x.ckpt")
    shell.clear("x.ckpt")
    shell.run("merge golden/batchnorm --replicated -o x.ckpt")


# ------------------------------------------------------------------------------- files


def name_no_checkpoint(shell: Transcript, patch: pytest.MonkeyPatch) -> None:
    prepare_merged(shell)
    shell.remark("20 files that are no checkpoint")
    data = Path("m.ckpt").read_bytes()
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr(zipfile.ZipInfo("model/data.pkl"), b"\x80\x02}.")
    other = io.BytesIO()
    with zipfile.ZipFile(other, "w") as file:
        file.writestr(zipfile.ZipInfo("a.txt"), b"text")
    arrays = io.BytesIO()
    np.savez(arrays, w=np.zeros(3))
    keras = io.BytesIO()
    with zipfile.ZipFile(keras, "w") as file:
        file.writestr(zipfile.ZipInfo("metadata.json"), b"{}")
    files = {
        "model.pt": archive.getvalue(),
        "arrays.npz": arrays.getvalue(),
        "m.ckpt.gz": gzip.compress(data, mtime=0),
        "model.zip": other.getvalue(),
        "model.tar": b"model.ckpt".ljust(257, b"\0") + b"ustar\x0000".ljust(255, b"\0"),
        "notes.txt": b"loss 0.1\nloss 0.2\n",
        "train.py": b"import mindspore as ms\n\nms.set_seed(1)\n",
        "page.ckpt": b"<!DOCTYPE html>\n<html><body>404 Not Found</body></html>\n",
        "lfs.ckpt": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12345\n",
        "nothing.ckpt": b"",
        "nothing.safetensors": b"",
        "nothing.h5": b"",
        "model.keras": keras.getvalue(),
        "graph.ckpt": (SAMPLES / "files" / "net-graph.meta").read_bytes(),
    }
    for name, content in files.items():
        Path(name).write_bytes(content)
    for name in files:
        shell.run(f"inspect {name}")
        shell.run(f"split {name} -d D.ckpt -o x --format ckpt")
        shell.clear("x")
    shell.run("split golden/samples/files/group_info.pb -d D.ckpt -o x")
    shell.remark("21 a gzip named .ckpt, text and Python as -s")
    Path("zipped.ckpt").write_bytes(files["m.ckpt.gz"])
    Path("text.ckpt").write_bytes(files["notes.txt"])
    Path("python.ckpt").write_bytes(files["train.py"])
    shell.run("inspect zipped.ckpt")
    for name in ("zipped.ckpt", "text.ckpt", "python.ckpt", "train.py", "nothing.ckpt"):
        shell.run(f"merge C -s {name} -o x.ckpt")
    shell.remark("every rank is compressed, cut short, a Git LFS pointer")
    contents: tuple[Callable[[bytes, int], bytes], ...] = (
        lambda data, rank: gzip.compress(data, mtime=0),
        lambda data, rank: data[: -100 * (rank + 1)],
        lambda data, rank: files["lfs.ckpt"],
    )
    for content in contents:
        prepare(shell)
        for rank in range(8):
            path = Path(f"C/rank_{rank}/{FILE}")
            path.write_bytes(content(path.read_bytes(), rank))
        for command in ("merge C -s S.ckpt -o x.ckpt", "inspect C -s S.ckpt", "verify C -s S.ckpt"):
            shell.run(command)


def encrypt(shell: Transcript, patch: pytest.MonkeyPatch) -> None:
    shell.remark("38 encrypted, without a key, with a wrong key, with a key of a wrong length")
    prepare(shell)
    Path("wrong.bin").write_bytes(b"0" * 16)
    Path("short.bin").write_bytes(b"0" * 5)
    for case in ("encrypted_gcm", "encrypted_cbc"):
        words = f"golden/{case}/src -s golden/{case}/src_strategy.ckpt"
        for key in ("", " --dec-key-file wrong.bin", " --dec-key-file short.bin"):
            shell.run(f"merge {words} -o x.ckpt{key}")
            shell.run(f"inspect {words}{key}")
            shell.run(f"verify {words} --deep{key}")
    shell.run("inspect C -s S.ckpt --dec-key-file none.bin")
    shell.run("inspect C --dec-key-file wrong.bin")


def damage_files(shell: Transcript, patch: pytest.MonkeyPatch) -> None:
    prepare(shell)
    path = f"C/rank_2/{FILE}"
    commands = ("merge C -s S.ckpt -o x.ckpt", "verify C -s S.ckpt --deep", "inspect C -s S.ckpt")
    shell.remark("40 a rank is cut short")
    Path(path).write_bytes(Path(path).read_bytes()[:20_000])
    for command in (*commands, f"inspect {path}", f"verify {path}"):
        shell.run(command)
        shell.clear("x.ckpt")
    shell.remark("one bit in a header")
    prepare(shell)
    flip_byte(Path(path), 4, 16)
    for command in commands:
        shell.run(command)
        shell.clear("x.ckpt")
    shell.remark("one bit in the data of a tensor that others hold, too")
    prepare(shell)
    flip_byte(Path(path), 3000, 16)
    for command in (*commands, "merge C -s S.ckpt -o x.ckpt --check-replicas"):
        shell.run(command)
        shell.clear("x.ckpt")


# ------------------------------------------------------------------------------- outputs


def write_over(shell: Transcript, patch: pytest.MonkeyPatch) -> None:
    prepare_merged(shell)
    shell.remark("18 the output exists")
    shell.run("merge C -s S.ckpt -o m.ckpt")
    shell.run("merge C -s S.ckpt -o m.ckpt --crc")
    shell.run("merge C -s S.ckpt -o m.ckpt --resume")
    Path("old.ckpt").write_bytes(b"older")
    shell.run("merge C -s S.ckpt -o old.ckpt")
    shell.remark("19 the output in the source, the output is the source")
    shell.run("merge C -s S.ckpt -o C/rank_0/x.ckpt")
    shell.run("reshard C -s S.ckpt -d D.ckpt -o C --format ckpt")
    shell.run("reshard C -s S.ckpt -d D.ckpt -o C/rank_0 --format ckpt")
    shell.run("merge m.ckpt -o m.ckpt --overwrite")
    shell.run("merge C -s S.ckpt -o C")
    shell.remark("39 another target, other options into the same folder")
    shell.quietly("reshard C -s S.ckpt -d D.ckpt -o x --format ckpt")
    four = "golden/tutorial_8_to_4_infer/dst_strategy.ckpt"
    shell.run(f"reshard C -s S.ckpt -d {four} -o x --format ckpt")
    shell.run(f"reshard C -s S.ckpt -d {four} -o x --format ckpt --overwrite")
    shell.run("reshard C -s S.ckpt -d D.ckpt -o x --format ckpt --prefix net_")
    shell.run("reshard C -s S.ckpt -d D.ckpt -o x --format safetensors")
    shell.run("inspect x")
    shell.run("reshard C -s S.ckpt -d D.ckpt -o x --format ckpt --rank 0 --resume")


def fill_the_disk(shell: Transcript, patch: pytest.MonkeyPatch) -> None:
    prepare(shell)
    shell.remark("34 a disk that is too small, and one that is full while it is written")
    disk = SimpleNamespace(f_bavail=40, f_frsize=512, f_flag=0)
    patch.setattr(preflight.os, "statvfs", lambda folder: disk)
    shell.run("merge C -s S.ckpt -o x.ckpt")
    shell.run("reshard C -s S.ckpt -d D.ckpt -o x --format ckpt")
    patch.undo()

    def full(*words: object) -> int:
        raise OSError(28, "No space left on device")

    patch.setattr("os.pwritev", full)
    shell.run("merge C -s S.ckpt -o x.ckpt --engine inline")


def choose_an_engine(shell: Transcript, patch: pytest.MonkeyPatch) -> None:
    prepare(shell)
    pytest.importorskip("distributed")
    shell.remark("36 --engine dask without a scheduler, without dask; mpi without mpi4py, libmpi")
    words = "merge C -s S.ckpt -o x.ckpt --engine"
    for engine in ("dask", "dask:none.json", "processes:0", "threads:x"):
        shell.run(f"{words} {engine}")
    patch.setitem(sys.modules, "distributed", None)
    patch.setitem(sys.modules, "mpi4py.futures", None)
    for engine in ("dask:localhost:1", "mpi"):
        shell.run(f"{words} {engine}")
    patch.setitem(sys.modules, "mpi4py.futures", _WithoutLibrary("mpi4py.futures"))
    shell.run(f"{words} mpi")


class _WithoutLibrary(ModuleType):
    """What mpi4py is where there is no MPI library."""

    def __getattr__(self, name: str) -> object:
        raise RuntimeError("cannot load MPI library\nlibmpi.so: cannot open shared object file")


MISTAKES: Mapping[str, Mistake] = {
    "strategy": forget_the_strategy,
    "mixed_up": mix_up_files,
    "yaml": write_yaml_wrong,
    "words": forget_or_mistype,
    "paths": mean_another_path,
    "options": mean_another_option,
    "one_rank": name_one_rank,
    "lost_ranks": lose_ranks,
    "folders": use_other_folders,
    "steps": have_several_steps,
    "not_listed": leave_parameters_out,
    "no_checkpoint": name_no_checkpoint,
    "encrypted": encrypt,
    "damage": damage_files,
    "outputs": write_over,
    "disk": fill_the_disk,
    "engines": choose_an_engine,
}
