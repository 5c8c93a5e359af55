"""Each advice is followed: what stands behind ``Try:`` is a command or an option that helps."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import h5py
import numpy as np
import pytest

from ckpttool.formats.local import more_files_hint
from tests.support.checkpoints import noise, write_file, write_indexed
from tests.support.commands import message, run, run_well

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


def messages() -> Iterator[str]:
    """Yield the messages in the texts of golden, damaged and other cases."""
    for path in sorted(Path(__file__).parent.glob("s*/**/*.txt")):
        text = re.sub(r"^2> ", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
        head = r"^( *)(?:error|warning|note)(?:\[\w+\])?: .*(?:\n\1  +\S.*)*"
        yield from (re.sub(r"\s+", " ", found[0]) for found in re.finditer(head, text, re.M))


@pytest.mark.source
def test_messages_are_short_and_name_parameters_first():
    # Two runs that do not go together are named as they were typed.
    without_runs = (re.sub(r"(before|now): `.*?`", "", message) for message in messages())
    long = [message for message in without_runs if len(message) > 400]
    states = [m for m in messages() if re.search(r"tensors adam_m\.(?!.*without)", m)]
    assert (long, states) == ([], [])


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
def test_the_first_answer_to_too_little_memory_works_and_little_less_does_not(tmp_path, size):
    write_file(tmp_path / "in.ckpt", TENSORS, "ckpt")
    words = [sys.executable, "-m", "ckpttool", "merge", str(tmp_path / "in.ckpt")]
    words += ["-o", str(tmp_path / "out.ckpt"), "--overwrite", "--max-memory"]
    done = subprocess.run([*words, size], capture_output=True, text=True)
    assert done.returncode == 5
    said = done.stderr.rpartition("Try: --max-memory ")[2].split(",")[0].strip()
    less = f"{int(said.removesuffix('MiB')) - 8}MiB"  # the memory of a process varies
    assert subprocess.run([*words, less], capture_output=True).returncode == 5
    subprocess.run([*words, said], check=True)
    planned = subprocess.run([*words[:-1], "-n", "--json"], capture_output=True, check=True).stdout
    need = json.loads(planned)["dry_run"]["memory"]["nbytes"]
    assert need > (int(said.removesuffix("MiB")) - 8) << 20
    subprocess.run([*words, f"{need}B"], check=True)


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
        document = json.dumps(json.loads(done.stdout), ensure_ascii=False)
        assert json.dumps(spelled, ensure_ascii=False)[1:-1] in document.encode().decode()


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
