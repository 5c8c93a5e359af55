"""Each advice is followed: what stands behind ``Try:`` is a command or an option that helps."""

from __future__ import annotations

import errno
import gzip
import json
import os
import resource
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

from ckpttool.formats.local import more_files_hint
from tests.support.checkpoints import noise, write_file, write_indexed
from tests.support.commands import message, run, run_well
from tests.support.corpus import GOLDEN
from tests.support.readers import read

TENSORS = {"w": noise("w", "Float32", (4, 2)), "b": noise("b", "BFloat16", (3,))}
REVISIONS = ("0123456789abcdef0123456789abcdef01234567", "fe" * 20)


def advice(result) -> str:
    return message(result).rpartition("Try: ")[2]


def cache(root: Path, files: dict[str, dict], revisions=REVISIONS[:1], main: int = 0) -> Path:
    """Write the cache of a model as huggingface_hub does: blobs, links to them, and refs/main."""
    (root / "blobs").mkdir(parents=True)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text(revisions[main], encoding="utf-8")
    for revision in revisions:
        folder = root / "snapshots" / revision
        write_indexed(folder, files, index="model.safetensors.index.json")
        if len(files) == 1:
            (folder / "model.safetensors.index.json").unlink()
        for path in sorted(folder.iterdir()):
            blob = root / "blobs" / f"{revision[:4]}{path.name.encode().hex()}"
            path.rename(blob)
            path.symlink_to(os.path.relpath(blob, folder))
    return root


@pytest.mark.parametrize(
    "files",
    [
        {"model.safetensors": TENSORS},
        {"weights_7.safetensors": TENSORS},
        {f"model-0000{i}-of-00002.safetensors": {n: TENSORS[n]} for i, n in ((1, "w"), (2, "b"))},
    ],
)
def test_the_root_of_a_hugging_face_cache_names_its_revision(files):
    cache(Path("models--org--m"), files)
    for command in ("inspect", "verify"):
        source, _, rest = advice(run(command, "models--org--m")).partition(" as SRC")
        assert (source, rest) == (f"models--org--m/snapshots/{REVISIONS[0]}", "")
    result = run("merge", source, "-o", "out.safetensors")
    if result.exit_code:  # a file of another name than Hugging Face's is named in turn
        source = advice(result).removesuffix(" as SRC")
        run_well("merge", source, "-o", "out.safetensors")
    assert read(Path("out.safetensors")) == TENSORS


@pytest.mark.parametrize("main", [0, 1])
def test_the_main_revision_of_a_cache_comes_first(tmp_path, main):
    cache(tmp_path / "hub" / "models--a--b", {"model.safetensors": TENSORS}, REVISIONS, main)
    result = run("inspect", tmp_path / "hub")
    assert "a folder of 2 merged checkpoints" in message(result)
    assert advice(result).removesuffix(" as SRC").endswith(f"snapshots/{REVISIONS[main]}")
    run_well("inspect", advice(result).removesuffix(" as SRC"))


def test_rank_files_beside_a_merged_checkpoint_keep_their_pattern(tmp_path):
    for rank in range(2):
        write_file(tmp_path / f"worker{rank}" / "net.ckpt", TENSORS, "ckpt")
    write_file(tmp_path / "hf" / "model.safetensors", TENSORS, "safetensors")
    said = message(run("inspect", tmp_path))
    assert "2 ranks" in said
    assert "hf" in said


@pytest.mark.parametrize("follows", [False, True])
def test_an_hdf5_file_that_a_writer_left_open_is_cleared_in_a_copy(follows):
    """By a writer that was killed, and by one that others may follow (SWMR)."""
    script = """
import h5py, os, sys
file = h5py.File("left open.h5", "w", libver="latest")
file["w"] = [1.0, 2.0]
file.flush()
if int(sys.argv[1]):
    file.swmr_mode = True
file.flush()
os._exit(0)
"""
    subprocess.run([sys.executable, "-c", script, str(int(follows))], check=True)
    result = run("inspect", "left open.h5")
    assert result.exit_code == 3
    assert "error[unsupported]: left open.h5: a program writes this HDF5 file" in message(result)
    assert advice(result) == "cp 'left open.h5' COPY.h5 && h5clear -s COPY.h5"
    if shutil.which("h5clear") is None:
        pytest.skip("h5clear is not installed")
    subprocess.run(advice(result), shell=True, check=True)
    run_well("verify", "COPY.h5", "--deep")
    with h5py.File("COPY.h5") as file:
        assert np.array_equal(file["w"], [1.0, 2.0])


def test_too_many_open_files_name_a_limit_that_helps(tmp_path):
    files = {f"part{i}.safetensors": {f"w{i}": noise("w", "Int8", (2,))} for i in range(100)}
    src = write_indexed(tmp_path / "src", files)
    words = [sys.executable, "-m", "ckpttool", "merge", str(src), "-o", str(tmp_path / "out.ckpt")]

    def limited(number: int) -> subprocess.CompletedProcess[str]:
        line = 'ulimit -S -n "$0"; exec "$@"'
        return subprocess.run(
            ["sh", "-c", line, str(number), *words], capture_output=True, text=True
        )

    few = next(done for n in range(4, 64) if (done := limited(n)).returncode in (3, 6))
    assert "Too many open files" in few.stderr
    said = few.stderr.rpartition("Try: ")[2].split(",")[0].strip()
    assert said.startswith("ulimit -n ")
    assert limited(int(said.split()[-1])).returncode == 0


def test_the_limit_of_open_files_grows_where_it_is_high_already(monkeypatch):
    error = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    for limits, wanted in (((4096, 1 << 20), 16384), ((64, 512), 512), ((256, 256), 1024)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limits=limits: limits)
        assert more_files_hint(error) == f"ulimit -n {wanted}"
    assert more_files_hint(OSError(errno.EIO, os.strerror(errno.EIO))) == ""


@pytest.mark.parametrize("size", ["3M", "1500K"])
def test_the_first_answer_to_too_little_memory_works(tmp_path, size):
    write_file(tmp_path / "in.ckpt", TENSORS, "ckpt")
    words = [sys.executable, "-m", "ckpttool", "merge", str(tmp_path / "in.ckpt")]
    words += ["-o", str(tmp_path / "out.ckpt"), "--max-memory"]
    done = subprocess.run([*words, size], capture_output=True, text=True)
    assert done.returncode == 5
    said = done.stderr.rpartition("Try: --max-memory ")[2].split(",")[0].strip()
    subprocess.run([*words, said], check=True)


@pytest.mark.parametrize("name", [b"caf\xe9", b"\xb2\xe2\xca\xd4 \xf0\x9f\x98\x80"])
def test_documents_of_paths_that_are_not_utf8_are_strict_json(tmp_path, name):
    """As Latin-1 and GBK have them, the latter beside a character of four bytes in UTF-8."""
    folder = tmp_path / os.fsdecode(name)
    write_file(folder / "in.ckpt", TENSORS, "ckpt")
    spelled = name.decode(errors="backslashreplace")
    for words in (
        ["inspect", folder / "in.ckpt"],
        ["verify", folder / "in.ckpt"],
        ["merge", folder / "in.ckpt", "-o", folder / "out.ckpt"],
        ["inspect", folder / "absent.ckpt"],
    ):
        done = subprocess.run(
            [sys.executable, "-m", "ckpttool", *words, "--json"], capture_output=True
        )
        text = json.dumps(json.loads(done.stdout), ensure_ascii=False)
        assert json.dumps(spelled, ensure_ascii=False)[1:-1] in text.encode().decode()


def test_packed_files_of_others_are_not_named(tmp_path):
    for path in ("docs/page.7.gz", "log.txt.xz", "src-1.2.tar.gz", "model.zip", "rank.txt.bz2"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(gzip.compress(b"text"))
    said = message(run("inspect", tmp_path))
    assert "the folder of the rank folders as SRC" in said
    assert "unpack" not in said


@pytest.mark.parametrize(("name", "letters"), [("net.tar.gz", "xzf"), ("all.tgz", "xzf")])
def test_a_compressed_archive_as_src_is_unpacked_by_tar(name, letters):
    write_file(Path("net.ckpt"), TENSORS, "ckpt")
    subprocess.run(["tar", "czf", name, "net.ckpt"], check=True)
    Path("net.ckpt").unlink()
    command, _, rest = advice(run("inspect", name)).partition(", then ")
    assert (command, rest) == (f"tar {letters} {name}", "the checkpoint in it as SRC")
    subprocess.run(command, shell=True, check=True)
    run_well("inspect", "net.ckpt")


@pytest.fixture
def sources(tmp_path) -> Path:
    stages, case = GOLDEN / "safetensors_pipeline", GOLDEN / "reshard_8_to_4"
    for name, path in {
        "run": stages / "src",
        "stages": stages / "src_stage_strategies",
        "ckpt": case / "src",
        "s.ckpt": case / "src_strategy.ckpt",
        "d.ckpt": case / "dst_strategy.ckpt",
        "-run/ckpt": case / "src",
    }.items():
        Path(name).parent.mkdir(exist_ok=True)
        (shutil.copytree if path.is_dir() else shutil.copy)(path, name)
    return tmp_path


@pytest.mark.parametrize("name", [b"caf\xe9 f", b"\xb2\xe2\\it's"])
def test_a_path_that_is_not_utf8_is_proposed_as_a_shell_reads_it(tmp_path, name):
    folder = tmp_path / os.fsdecode(name)
    for run_of in ("a", "b"):
        write_file(folder / run_of / "rank_0" / "net-1_1.ckpt", TENSORS, "ckpt")
    words = [sys.executable, "-m", "ckpttool", "inspect"]
    done = subprocess.run([*words, folder], capture_output=True)
    path = done.stderr.decode().rpartition("Try: ")[2].partition(" as SRC")[0]
    assert "$'" in path
    subprocess.run(["bash", "-c", f"{shlex.join(words)} {path}"], check=True)
