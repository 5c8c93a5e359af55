"""What the disk does to a run: every failure has a name, and nothing half-written stays."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import threading
from pathlib import Path

import pytest

import ckpttool
from ckpttool.cli.signals import Terminated
from ckpttool.execution.copy import CopyOptions
from ckpttool.execution.execute import execute
from ckpttool.formats import hdf5
from ckpttool.formats.hdf5 import Hdf5
from ckpttool.formats.local import ReadFile, open_file
from ckpttool.model.tensors import StoredFile
from ckpttool.operations.look import Subject
from ckpttool.operations.tensor_diff import diff
from ckpttool.operations.verification import verify
from ckpttool.problems import VerifyError
from ckpttool.storage import region_io
from ckpttool.transaction.sealed_files import ManifestFile
from tests.support.commands import files_below, message, run, run_well
from tests.support.errors import texts_of
from tests.support.executors import (
    CASE,
    COMMAND,
    contents,
    finish,
    make_plan,
    ordered_words,
    reshard_words,
    split_words,
    start,
    write_source,
)
from tests.support.manifests import MANIFEST, PLAN, STAMPS
from tests.support.plans import plan_merge, plan_split

SAID = {
    errno.ENOSPC: "No space left on device (the disk is full)",
    errno.EDQUOT: "Disk quota exceeded",
    errno.EIO: "Input/output error (the disk or its connection fails)",
    errno.EROFS: "Read-only file system",
    errno.EAGAIN: "Resource temporarily unavailable",  # which is not what a lock says
}

MIXTURE = "outputs may mix old and new data"
AFRESH = "the same command with --overwrite, when the source is complete"
AGAIN = "Try: the same command, when the source is complete"
STUCK = "half-written files could not be removed, which the next run does"


@pytest.fixture
def break_call(monkeypatch):
    """Makes a call of the system fail from the n-th time on, for files with a name."""

    def breaking(call, number, name="", after=0):
        owner = Path if call == "replace" else os
        real = getattr(owner, call)
        calls = []

        def fake(fd, *arguments):
            path = str(Path(f"/proc/self/fd/{fd}").readlink()) if isinstance(fd, int) else str(fd)
            if name in path:
                calls.append(path)
                if len(calls) > after:
                    named = () if isinstance(fd, int) else (fd,)
                    raise OSError(number, os.strerror(number), *named)
            return real(fd, *arguments)

        monkeypatch.setattr(owner, call, fake)

    yield breaking
    monkeypatch.undo()


OUTPUT, SECOND = "rank_1/checkpoint_1.ckpt", "rank_2/checkpoint_2.ckpt"
FAULTS = [  # call, error, file, calls before that succeed, what is named, outputs that may stay
    *(("pwritev", number, SECOND, 0, SECOND, 2) for number in SAID),
    ("pwritev", errno.ENOSPC, "checkpoint_2.safetensors", 0, "/checkpoint_2.safetensors", 2),
    ("pwritev", errno.EIO, "checkpoint_2.h5", 0, "rank_2/checkpoint_2.h5", 2),
    *(
        (call, number, OUTPUT, 0, OUTPUT, 1)
        for call in ("fsync", "posix_fallocate")
        for number in (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EAGAIN)
    ),
    *(("replace", number, OUTPUT, 0, OUTPUT, 1) for number in (errno.EAGAIN, errno.EEXIST)),
    ("write", errno.ENOSPC, ".log", 3, ".ckpt", 2),  # a run, an output and its stamp
    ("fsync", errno.ENOSPC, f"{STAMPS}.partial", 0, STAMPS, 4),
    ("fsync", errno.ENOSPC, f"{MANIFEST}.partial", 0, MANIFEST, 4),
    ("open", errno.ENOSPC, f"{MANIFEST}.partial", 0, MANIFEST, 4),
]
FORMAT_OF = {".safetensors": "safetensors", ".h5": "hdf5"}


@pytest.mark.parametrize(
    ("call", "number", "name", "after", "shown", "most"),
    FAULTS,
    ids=[
        f"{call} {errno.errorcode[number]} {Path(shown).name}"
        for call, number, _, _, shown, _ in FAULTS
    ],
)
def test_a_call_that_fails_is_named_with_its_file_and_the_run_goes_on_later(
    tmp_path, monkeypatch, break_call, call, number, name, after, shown, most
):
    out, words = tmp_path / "out", [FORMAT_OF.get(Path(shown).suffix, "ckpt")]
    break_call(call, number, name, after)
    result = run(*ordered_words(out, *words))
    assert result.exit_code == 6
    reason = SAID[number] if call != "replace" else os.strerror(number)
    assert f"{shown}: not written: {reason}" in message(result)
    left = files_below(out)
    assert [file for file in left if file.endswith(".partial")] == []
    complete = len([file for file in left if file.startswith("rank_")])
    assert complete <= most
    is_document = shown in (MANIFEST, STAMPS)
    assert message(result).count(f"{out}/rank_") == min(complete, 3) + (not is_document)
    assert not (out / MANIFEST).exists()
    first = "free some space" if number in (errno.ENOSPC, errno.EDQUOT) else ""
    hint = f"Try: {first}, then the same command" if first else "Try: the same command"
    assert message(result).endswith(f"{hint} with --resume" if complete else hint)
    monkeypatch.undo()
    run_well(*ordered_words(out, *words), "--resume")
    run_well(*ordered_words(tmp_path / "whole", *words))
    assert contents(out) == contents(tmp_path / "whole")
    assert (out / MANIFEST).read_bytes() == (tmp_path / "whole" / MANIFEST).read_bytes()


STUCK_AT = {  # what fails first, the exit code, what is said of it
    "pwritev": (6, f"{SECOND}: not written: {SAID[errno.EIO]}"),
    "fsync": (6, f"{SECOND}: not written: "),
    "verify": (7, "w: lost"),
    "signal": (130, "ended by SIGINT"),
    "document": (6, f"{MANIFEST}: not written: {SAID[errno.EIO]}"),
}


@pytest.mark.parametrize("kind", STUCK_AT)
def test_that_nothing_can_be_removed_is_told_whatever_failed_before(
    tmp_path, monkeypatch, break_call, kind
):
    """As on ext4 that makes itself read-only when the disk fails."""
    real = Path.unlink

    def fail(*given):
        raise VerifyError("m.ckpt", ["w: lost"]) if kind == "verify" else Terminated(signal.SIGINT)

    def refuse(self, **more):
        if self.name.endswith(".partial"):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(self))
        real(self, **more)

    if kind in ("verify", "signal"):
        monkeypatch.setattr("ckpttool.storage.files.verify_header", fail)
    else:
        name = MANIFEST if kind == "document" else SECOND
        break_call("fsync" if kind == "document" else kind, errno.EIO, f"{name}.partial")
    monkeypatch.setattr(Path, "unlink", refuse)
    out = tmp_path / "out"
    result = run(*ordered_words(out))
    code, said = STUCK_AT[kind]
    assert result.exit_code == code
    assert said in message(result)
    assert f" {STUCK}" in message(result)
    assert "nothing was left half-written" not in message(result)
    assert ".partial" in "".join(files_below(out))
    monkeypatch.undo()
    run_well(*ordered_words(out), "--resume")
    run_well(*ordered_words(tmp_path / "whole"))
    assert contents(out) == contents(tmp_path / "whole")


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES])
@pytest.mark.parametrize("command", ["inspect", "verify", "merge"])
@pytest.mark.parametrize("name", ["src", "src_strategy.ckpt"])
def test_an_input_that_cannot_be_looked_at_does_exist(tmp_path, monkeypatch, command, number, name):
    real = os.stat

    def refuse(path, **more):
        if str(path) == str(CASE / name):
            raise OSError(number, os.strerror(number), str(path))
        return real(path, **more)

    monkeypatch.setattr(os, "stat", refuse)
    words = [command, CASE / "src", "-s", CASE / "src_strategy.ckpt"]
    result = run(*words, *(["-o", tmp_path / "m.h5"] if command == "merge" else []))
    assert result.exit_code == 3
    assert f"]: {CASE / name}: {os.strerror(number)}" in message(result)
    assert "does not exist" not in message(result)


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_an_output_that_cannot_be_looked_at_is_not_taken_for_absent(tmp_path, monkeypatch, number):
    run_well(*ordered_words(tmp_path / "out"))
    before = contents(tmp_path / "out")
    lstat, access = os.lstat, os.access

    def refuse(path, **more):
        if str(path).endswith("checkpoint_2.ckpt"):
            raise OSError(number, os.strerror(number), str(path))
        return lstat(path, **more)

    monkeypatch.setattr(os, "lstat", refuse)
    monkeypatch.setattr(
        os, "access", lambda path, mode: not str(path).endswith("_2.ckpt") and access(path, mode)
    )
    result = run(*ordered_words(tmp_path / "out"))
    monkeypatch.undo()
    assert result.exit_code == 3
    assert f"rank_2/checkpoint_2.ckpt: {os.strerror(number)}" in message(result)
    assert contents(tmp_path / "out") == before


def test_a_file_that_cannot_be_read_is_named_whatever_reads_it():
    for read in (
        lambda file: file.read(1),
        lambda file: file.readinto(bytearray(1)),
        lambda file: file.pread(1, 0),
    ):
        with ReadFile("/proc/self/mem") as file, pytest.raises(OSError, match=r"/self/mem") as said:
            read(file)  # page 0 of a process cannot be read
        assert said.value.errno == errno.EIO


def test_a_file_of_which_a_read_would_have_to_wait_is_an_error(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    writer = os.open(tmp_path / "pipe", os.O_RDWR)
    try:
        with open_file(tmp_path / "pipe") as file:
            os.set_blocking(file.fileno(), False)
            with pytest.raises(BlockingIOError) as caught:
                file.read(8)
        assert caught.value.filename == str(tmp_path / "pipe")
    finally:
        os.close(writer)


def test_a_key_of_which_a_read_would_have_to_wait_is_told(tmp_path):
    os.mkfifo(tmp_path / "key")
    keeper = os.open(tmp_path / "key", os.O_RDWR | os.O_NONBLOCK)
    try:
        words = [*COMMAND, "inspect", CASE / "src", "--dec-key-file", "-"]
        code, errors = finish(start(*words, stdin=keeper))
    finally:
        os.close(keeper)
    assert code == 2
    assert errors == (
        "error[usage]: --dec-key-file: cannot be read (Resource temporarily unavailable)\n"
        "  The option names a file that holds the key.\n"
        "  Try: ckpttool help --dec-key-file\n"
    )


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("Can't read data (file read failed: errno = 5, error message = 'x')", errno.EIO),
        ("Unable to open object (file read failed: errno = 0, bytes read = 0)", None),
        ("bad object header version number", None),
    ],
)
def test_an_error_of_the_system_that_libhdf5_tells_is_one(tmp_path, monkeypatch, text, number):
    run_well("merge", CASE / "src", "-s", CASE / "src_strategy.ckpt", "-o", tmp_path / "m.h5")

    def fail(*arguments):
        raise RuntimeError(text)

    monkeypatch.setattr(hdf5, "_read_dataset", fail)
    with pytest.raises(OSError if number else ckpttool.FormatError) as caught:
        Hdf5().read_index(StoredFile(str(tmp_path / "m.h5")))
    if number:
        assert (caught.value.errno, caught.value.filename) == (number, str(tmp_path / "m.h5"))


@pytest.mark.parametrize("engine", ["inline", "threads:2"])
@pytest.mark.parametrize("number", range(4))
def test_a_thread_that_cannot_be_started_is_told(tmp_path, monkeypatch, engine, number):
    real, started = threading.Thread.start, []

    def refuse(self):
        started.append(self)
        if len(started) == number + 1:
            raise RuntimeError("can't start new thread")
        real(self)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    result = run(*reshard_words(tmp_path / "out", "ckpt"), "--engine", engine)
    monkeypatch.undo()
    if len(started) <= number:
        assert result.exit_code == 0
        return
    assert result.exit_code in (6, 8)
    assert message(result).endswith(
        "error[no_engine]: engine threads: no thread starts can't start new thread "
        "Try: raise the limit of `ulimit -u` or of the container"
    )
    assert not [name for name in files_below(tmp_path) if name.endswith(".partial")]


@pytest.mark.parametrize("after", range(4))
def test_a_log_that_is_cut_short_is_gone_on_from(tmp_path, monkeypatch, after):
    real, lines = os.write, []

    def fake(fd, data):
        if Path(f"/proc/self/fd/{fd}").readlink().suffix != ".log":
            return real(fd, data)
        lines.append(data)
        if len(lines) > after + 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data[: len(data) // 2] if len(lines) == after + 2 else data)

    monkeypatch.setattr(os, "write", fake)
    out = tmp_path / "out"
    assert run(*ordered_words(out)).exit_code == 6
    monkeypatch.undo()
    run_well(*ordered_words(out), "--resume")
    assert len(files_below(out, manifests=True)) == 5


def test_a_plan_that_cannot_be_written_ends_the_run(tmp_path, break_call):
    break_call("fsync", errno.ENOSPC, f"{PLAN}.partial")
    result = run(*ordered_words(tmp_path / "out"))
    assert result.exit_code == 6
    said = f"{MANIFEST}: not written: {SAID[errno.ENOSPC]} the file is {tmp_path}/out/{PLAN} "
    assert said in message(result)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_source_that_cannot_be_read_is_named_with_its_file(tmp_path, monkeypatch, break_call):
    plan, destination = make_plan(tmp_path / "out")
    source = str(CASE / "src" / "rank_0")
    break_call("preadv", errno.EIO, source)
    with pytest.raises(ckpttool.ExecutionError) as caught:
        execute(plan, destination)
    assert f"not written: {SAID[errno.EIO]}; the file is {source}/" in str(caught.value)


def test_no_resume_is_offered_of_a_source_that_was_cut_short_between_two_outputs(
    tmp_path, monkeypatch
):
    source = write_source(tmp_path / "source", 4, 1 << 20)
    size, out = (source / "m.ckpt").stat().st_size, tmp_path / "out"
    strategy = ckpttool.read_strategy([str(source / "s.json")])
    catalog = ckpttool.scan(str(source / "m.ckpt"))
    plan, destination = plan_split(
        catalog, strategy, str(out), output_options=ckpttool.OutputOptions("ckpt")
    )
    real = os.preadv

    def fake(fd, buffers, at):
        if any(out.glob("*/*.ckpt")):
            os.truncate(source / "m.ckpt", size // 2)
        return real(fd, buffers, at)

    monkeypatch.setattr(os, "preadv", fake)
    with pytest.raises(ckpttool.ExecutionError, match=f"; {AFRESH}$") as caught:
        execute(plan, destination, options=CopyOptions(task_bytes=1 << 20, max_in_flight=1))
    assert files_below(out) != []
    assert f"{source / 'm.ckpt'}: w: the file ends here; byte {size // 2}; " in str(caught.value)
    assert "--resume" not in str(caught.value)


def test_a_source_that_grows_while_it_is_read_is_named(tmp_path, monkeypatch):
    shutil.copytree(CASE / "src", tmp_path / "src")
    words = [*ordered_words(tmp_path / "out")]
    words[1] = str(tmp_path / "src")
    real, grown = region_io.FlatFiles.read_bytes, []

    def fake(self, tensor, offset, out):
        if not grown:
            grown.append(tensor.file.path)
            with Path(tensor.file.path).open("ab") as file:
                file.write(b"more")
        return real(self, tensor, offset, out)

    def begin(*arguments):
        monkeypatch.setattr(region_io.FlatFiles, "read_bytes", fake)
        return real_start(*arguments)

    from ckpttool.execution.execute import _Run

    real_start = _Run.start
    monkeypatch.setattr(_Run, "start", begin)
    result = run(*words)
    assert result.exit_code == 6
    what = f"{grown[0]}: changed since its header was read; {MIXTURE}"
    assert what in message(result)
    assert not (tmp_path / "out" / MANIFEST).exists()


# ------------------------------------------------------------------------ real file systems


@pytest.fixture
def small_disk(tmp_path):
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(place)]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        pytest.skip("no rights to mount a file system")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_disk_that_fills_up_meanwhile_is_named_and_gone_on_from(
    tmp_path, small_disk, monkeypatch
):
    source = write_source(tmp_path / "source", 4, 1 << 20)
    words = [*split_words(source, small_disk / "out"), "-j", "1"]
    other = small_disk / "other"

    def fill_disk(self, batch):
        if batch.outputs[0].rank == 2:
            while self.pending:
                self.collect()
            with other.open("wb") as file:
                free = os.statvfs(small_disk)
                file.write(bytes(free.f_bavail * free.f_frsize - (1 << 19)))
        return real_start(self, batch)

    from ckpttool.execution.execute import _Run

    real_start = _Run.start
    monkeypatch.setattr(_Run, "start", fill_disk)
    result = run(*words)
    assert result.exit_code == 6
    assert "checkpoint_2.ckpt: not written: No space left on device (the disk is full)" in message(
        result
    )
    done = ", ".join(str(small_disk / "out" / f"rank_{n}/checkpoint_{n}.ckpt") for n in (0, 1))
    again = "Try: free some space, then the same command with --resume"
    assert f"complete: {done} {again}" in message(result)
    assert len(files_below(small_disk / "out")) == 4  # with the plan and the log
    result = run(*words, "--resume")
    assert result.exit_code == 5
    assert ": too little space: 2.0 MiB needed, 512.0 KiB free Try: free" in message(result)
    monkeypatch.undo()
    other.unlink()
    run_well(*words, "--resume")
    run_well(*split_words(source, tmp_path / "whole"))
    assert contents(small_disk / "out") == contents(tmp_path / "whole")


def test_a_read_only_file_system_is_named_before_the_first_byte(tmp_path, small_disk):
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    result = run(*ordered_words(small_disk / "out"))
    assert result.exit_code == 5
    assert f"{small_disk}: Read-only file system" in message(result)


# ---------------------------------------------------------- files that change while they are judged


@pytest.mark.parametrize("change", ["touched", "gone"])
def test_no_verdict_is_given_on_files_that_are_not_the_same_at_the_end(tmp_path, change):
    shutil.copytree(CASE / "src", tmp_path / "src")
    catalog = ckpttool.scan(str(tmp_path / "src"))
    strategy = ckpttool.read_strategy([str(CASE / "src_strategy.ckpt")])
    path = Path(catalog.files[1].path)
    os.utime(path) if change == "touched" else path.unlink()
    said = f"{'removed' if change == 'gone' else 'changed'} since its header was read"
    for judge in (
        lambda: verify(Subject(catalog), deep=True),
        lambda: diff(catalog, catalog, strategy, strategy),
    ):
        with pytest.raises(
            ckpttool.PlanError, match=rf"rank_1/[^/]*: {said}\n  Try: the same command"
        ):
            judge()


def test_a_manifest_that_goes_while_it_is_held_against_files_is_no_finding(tmp_path, monkeypatch):
    out = tmp_path / "out"
    run_well(*ordered_words(out))
    real = ManifestFile.outputs

    def outputs(self):
        self.path.unlink(missing_ok=True)
        return real(self)

    monkeypatch.setattr(ManifestFile, "outputs", outputs)
    result = run("verify", out, "-s", CASE / "dst_strategy.ckpt", "--deep")
    assert result.exit_code == 5
    assert (
        message(result)
        == f"error[changed]: {out / MANIFEST}: removed since this command began {AGAIN}"
    )


def test_what_fails_because_a_file_was_changed_is_told_so_before_the_first_byte(
    tmp_path, monkeypatch
):
    shutil.copytree(CASE / "src", tmp_path / "src")
    catalog = ckpttool.scan(str(tmp_path / "src"))
    strategy = ckpttool.read_strategy([str(CASE / "src_strategy.ckpt")])
    (tmp_path / "there.ckpt").touch()
    os.utime(catalog.files[1].path)
    with pytest.raises(ckpttool.PlanError) as caught:
        plan_merge(catalog, strategy, str(tmp_path / "there.ckpt"))
    said = f"{catalog.files[1].path}: changed since its header was read\n  {AGAIN}"
    there = f"{tmp_path / 'there.ckpt'} exists already\n  Try: --overwrite, or -o with another path"
    assert texts_of(caught.value) == (said, there)
