"""HDF5 headers read in another process: the same headers, and crashes and hangs that do no harm."""

import os
import shutil
import signal
import sys
from concurrent.futures import CancelledError
from pathlib import Path
from threading import Thread

import h5py
import numpy as np
import pytest

from ckpttool.errors import FormatError, UnsupportedError
from ckpttool.formats import contained, get_format, read_index, read_indexes
from ckpttool.formats.contained import ContainedReader
from ckpttool.model.catalog import TensorMeta
from tests.support.executors import finish, start, wait_until

METAS = [
    TensorMeta("a/w", "Float32", (2, 3)),
    TensorMeta("a/é\n", "BFloat16", ()),
    TensorMeta("empty", "Int8", (0, 3)),
    TensorMeta("text", "str", (), "höhe\x1b[31m"),
    TensorMeta("q", "Int4", (3,)),
]


@pytest.fixture
def path(tmp_path):
    return get_format("hdf5").create(str(tmp_path / "net.h5"), METAS, {}).path


def test_a_header_is_the_same_as_read_in_this_process(path):
    assert read_index(path) == get_format("hdf5").read_index(path)


def test_a_name_that_is_no_text_is_passed_on(tmp_path, path):
    odd = os.fsdecode(os.fsencode(tmp_path) + b"/\xff\n.h5")
    Path(path).rename(odd)
    assert read_index(odd) == get_format("hdf5").read_index(odd)


def test_one_process_reads_all_files_and_ends(path):
    with ContainedReader() as reader:
        reader.read_index(path)
        process = reader._process
        reader.read_index(path)
        assert reader._process is process
    assert process.returncode == 0


def test_no_process_is_started_for_other_formats(tmp_path, monkeypatch):
    monkeypatch.setattr(contained, "_start", lambda: pytest.fail("started"))
    made = get_format("ckpt").create(str(tmp_path / "net.ckpt"), METAS, {})
    assert list(read_indexes([made.path])) == [made]


def test_errors_come_across_as_what_they_are(tmp_path, path):
    chunked, cut = str(tmp_path / "chunked.h5"), str(tmp_path / "cut.h5")
    with h5py.File(chunked, "w") as file:
        file.create_dataset("w", data=np.zeros((4, 4)), chunks=(2, 2))
    Path(cut).write_bytes(Path(path).read_bytes()[:600])
    with ContainedReader() as reader:
        for bad, kind, words in [
            (chunked, UnsupportedError, "chunked"),
            (cut, FormatError, "HDF5"),
        ]:
            with pytest.raises(FormatError, match=words) as here:
                get_format("hdf5").read_index(bad)
            with pytest.raises(FormatError) as there:
                reader.read_index(bad)
            assert type(there.value) is kind
            assert there.value.args == here.value.args
        with pytest.raises(FileNotFoundError) as absent:
            reader.read_index(str(tmp_path / "none.h5"))
        assert absent.value.filename == str(tmp_path / "none.h5")
        assert len(reader.read_index(path).tensors) == len(METAS)


@pytest.mark.parametrize(
    ("number", "words"),
    [(signal.SIGSEGV, "crashed on it (SIGSEGV"), (signal.SIGPROF, "does not come to an end")],
)
def test_a_crash_is_an_error_of_that_file_and_the_next_is_read(path, number, words):
    with ContainedReader() as reader:
        reader.read_index(path)
        os.kill(reader._process.pid, number)
        reader._process.wait()
        with pytest.raises(FormatError) as error:
            reader.read_index(path)
        assert words in str(error.value)
        assert len(reader.read_index(path).tensors) == len(METAS)


def test_a_hang_ends_by_itself(path, monkeypatch):
    """The process spins as libhdf5 would; the limit is made short for it."""
    spin = "import sys; sys.path[:] = {path!r}\n"
    spin += "from ckpttool.formats import contained as c, hdf5_datasets; c.CPU_SECONDS = 0.2;"
    spin += "hdf5_datasets._read_dataset = lambda *_: [None for _ in iter(int, 1)];"
    monkeypatch.setattr(contained, "_START", spin + "c.serve()")
    with pytest.raises(FormatError, match="does not come to an end"):
        read_index(path)


SPIN = """import sys; sys.path[:] = {path!r}
from ckpttool.formats import contained as c, hdf5_datasets
c.CPU_SECONDS = 600
hdf5_datasets._read_dataset = lambda *_: [None for _ in iter(int, 1)]
c.serve()"""


def test_a_process_that_hangs_is_not_waited_for_by_who_is_interrupted(path, monkeypatch):
    def interrupt():
        with ContainedReader() as reader:
            threads.append(Thread(target=read, args=[reader]))
            threads[0].start()
            wait_until(lambda: reader._process, "the process")
            raise KeyboardInterrupt

    def read(reader):
        for _ in range(2):  # nor is another started for what comes next
            with pytest.raises((FormatError, CancelledError)) as error:
                reader.read_index(path)
            errors.append(error.type)

    threads, errors = [], []
    monkeypatch.setattr(contained, "_START", SPIN)
    with pytest.raises(KeyboardInterrupt):
        interrupt()
    threads[0].join()
    assert errors[-1] is CancelledError


def test_ctrl_c_ends_a_command_whose_headers_hang(tmp_path, path, monkeypatch):
    for rank in range(3):
        shutil.copy(path, tmp_path / f"rank_{rank}.h5")
    code = f"from ckpttool.formats import contained; contained._START = {SPIN!r}\n"
    code += "from ckpttool.cli.main import main; main()"
    for src in (path, tmp_path):
        process = start(sys.executable, "-c", code, "inspect", src)
        wait_until(lambda pid=process.pid: children_of(pid), "the process")
        process.send_signal(signal.SIGINT)
        returned, errors = finish(process)
        assert (returned, "ended by SIGINT" in errors) == (130, True), errors


def children_of(pid):
    return [path for path in Path(f"/proc/{pid}/task").glob("*/children") if path.read_text()]


def test_memory_without_bounds_is_refused(path, monkeypatch):
    """The process asks for as much as a damaged size may make libhdf5 ask for."""
    ask = "import sys; sys.path[:] = {path!r}\n"
    ask += "from ckpttool.formats import contained as c, hdf5_datasets;"
    ask += "hdf5_datasets._read_dataset = lambda *_: bytearray(1 << 40);"
    monkeypatch.setattr(contained, "_START", ask + "c.serve()")
    with pytest.raises(FormatError, match="not readable as HDF5"):
        read_index(path)


def test_nothing_is_imported_from_the_folder_that_one_is_in(tmp_path, path, monkeypatch):
    trap = tmp_path / "trap"
    trap.mkdir()
    for name in ("h5py", "json", "ckpttool", "signal"):
        (trap / f"{name}.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(trap)
    assert len(read_index(path).tensors) == len(METAS)
