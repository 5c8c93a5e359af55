"""HDF5 headers read in another process: the same headers, and crashes and hangs that do no harm."""

import os
import resource
import shutil
import signal
import sys
from concurrent.futures import CancelledError
from pathlib import Path
from threading import Thread

import h5py
import numpy as np
import pytest

from ckpttool.formats import get_format, read_index, read_indexes, sandbox
from ckpttool.formats.sandbox import Sandbox
from ckpttool.model.tensors import PartlyReadError, StoredFile, TensorMeta
from ckpttool.problems import FormatError
from tests.support.checkpoints import create_file
from tests.support.executors import finish, start, wait_until
from tests.support.spin import spin

METAS = [
    TensorMeta("a/w", "Float32", (2, 3)),
    TensorMeta("a/é\n", "BFloat16", ()),
    TensorMeta("empty", "Int8", (0, 3)),
    TensorMeta("text", "str", (), "höhe\x1b[31m"),
    TensorMeta("q", "Int4", (3,)),
]


@pytest.fixture(autouse=True)
def warm_sandbox():
    """Start a process for every run, as users do."""


@pytest.fixture
def path(tmp_path):
    return create_file(get_format("hdf5"), str(tmp_path / "net.h5"), METAS, {}).path


def test_a_header_is_the_same_as_read_in_this_process(path):
    assert read_index(path) == get_format("hdf5").read_index(StoredFile(path))


def test_a_name_that_is_no_text_is_passed_on(tmp_path, path):
    odd = os.fsdecode(os.fsencode(tmp_path) + b"/\xff\n.h5")
    Path(path).rename(odd)
    assert read_index(odd) == get_format("hdf5").read_index(StoredFile(odd))


def test_one_process_reads_all_files_and_ends(path):
    with Sandbox() as reader:
        reader.read_index(StoredFile(path))
        process = reader._child.process
        reader.read_index(StoredFile(path))
        assert reader._child.process is process
    assert process.returncode == 0


def test_no_process_is_started_for_other_formats(tmp_path, monkeypatch):
    monkeypatch.setattr(sandbox, "_start", lambda: pytest.fail("started"))
    made = create_file(get_format("ckpt"), str(tmp_path / "net.ckpt"), METAS, {})
    assert list(read_indexes([made.path])) == [made]


def test_errors_come_across_as_what_they_are(tmp_path, path):
    chunked, cut = str(tmp_path / "chunked.h5"), str(tmp_path / "cut.h5")
    with h5py.File(chunked, "w") as file:
        file.create_dataset("w", data=np.zeros((4, 4)), chunks=(2, 2))
    Path(cut).write_bytes(Path(path).read_bytes()[:600])
    with Sandbox() as reader:
        for bad, kind, words in [
            (chunked, PartlyReadError, "chunked"),
            (cut, FormatError, "HDF5"),
        ]:
            with pytest.raises(FormatError, match=words) as here:
                get_format("hdf5").read_index(StoredFile(bad))
            with pytest.raises(FormatError) as there:
                reader.read_index(StoredFile(bad))
            assert type(there.value) is kind
            assert there.value.args == here.value.args
        with pytest.raises(FileNotFoundError) as absent:
            reader.read_index(StoredFile(str(tmp_path / "none.h5")))
        assert absent.value.filename == str(tmp_path / "none.h5")
        assert len(reader.read_index(StoredFile(path)).tensors) == len(METAS)


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (signal.SIGSEGV, "crashed while reading it (SIGSEGV"),
        (signal.SIGPROF, "does not finish reading it"),
    ],
)
def test_a_crash_is_an_error_of_that_file_and_the_next_is_read(path, number, words):
    with Sandbox() as reader:
        reader.read_index(StoredFile(path))
        os.kill(reader._child.process.pid, number)
        reader._child.process.wait()
        with pytest.raises(FormatError) as error:
            reader.read_index(StoredFile(path))
        assert words in str(error.value)
        assert len(reader.read_index(StoredFile(path)).tensors) == len(METAS)


def spin_briefly(path):
    sandbox.set_cpu_limit(0.2)
    spin(path)


def test_a_hang_ends_by_itself(path, monkeypatch):
    monkeypatch.setattr(sandbox, "read_hdf5", spin_briefly)
    with pytest.raises(FormatError, match="libhdf5 does not finish reading it"):
        read_index(path)


def count_objects(file):
    seconds = []
    sandbox.set_cpu_limit = lambda: seconds.append(sandbox.CPU_SECONDS)
    sandbox.read_hdf5(file)
    return seconds


def test_every_object_of_a_file_has_the_whole_time(path):
    with Sandbox() as reader:
        assert len(reader.run(count_objects, StoredFile(path), "")) >= len(METAS)


def test_a_process_that_hangs_is_not_waited_for_by_who_is_interrupted(path, monkeypatch):
    def interrupt():
        with Sandbox() as reader:
            threads.append(Thread(target=read, args=[reader]))
            threads[0].start()
            wait_until(lambda: reader._child, "the process")
            raise KeyboardInterrupt

    def read(reader):
        for _ in range(2):  # nor is another started for what comes next
            with pytest.raises((FormatError, CancelledError)) as error:
                reader.read_index(StoredFile(path))
            errors.append(error.type)

    threads, errors = [], []
    monkeypatch.setattr(sandbox, "read_hdf5", spin)
    with pytest.raises(KeyboardInterrupt):
        interrupt()
    threads[0].join()
    assert errors[-1] is CancelledError


def test_ctrl_c_ends_a_command_whose_headers_hang(tmp_path, path, monkeypatch):
    for rank in range(3):
        shutil.copy(path, tmp_path / f"rank_{rank}.h5")
    code = "from ckpttool.formats import sandbox; from tests.support.spin import spin\n"
    code += "sandbox.read_hdf5 = spin; from ckpttool.cli.main import main; main()"
    for src in (path, tmp_path):
        process = start(sys.executable, "-c", code, "inspect", src)
        wait_until(lambda pid=process.pid: children_of(pid), "the process")
        process.send_signal(signal.SIGINT)
        returned, errors = finish(process)
        assert (returned, "ended by SIGINT" in errors) == (130, True), errors


def children_of(pid):
    return [path for path in Path(f"/proc/{pid}/task").glob("*/children") if path.read_text()]


def fill_memory(path):
    return bytearray(1 << 40)


def test_memory_without_bounds_is_refused(path, monkeypatch):
    monkeypatch.setattr(sandbox, "read_hdf5", fill_memory)
    with pytest.raises(FormatError, match="the process that read it ended"):
        read_index(path)


def limits(file):
    return resource.getrlimit(resource.RLIMIT_DATA), resource.getrlimit(resource.RLIMIT_CORE)


def test_the_process_is_limited_and_its_parent_is_not(path):
    with Sandbox() as reader:
        assert reader.run(limits, StoredFile(path), "") == ((sandbox.MEMORY_BYTES,) * 2, (0, 0))
    assert resource.getrlimit(resource.RLIMIT_DATA)[0] != sandbox.MEMORY_BYTES


def test_nothing_is_imported_from_the_folder_that_one_is_in(tmp_path, path, monkeypatch):
    trap = tmp_path / "trap"
    trap.mkdir()
    for name in ("h5py", "multiprocessing", "pickle", "ckpttool", "signal"):
        (trap / f"{name}.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(trap)
    assert len(read_index(path).tensors) == len(METAS)
