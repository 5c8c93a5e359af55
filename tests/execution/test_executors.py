"""Engines: who does the work makes no difference to what is written."""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from concurrent.futures import BrokenExecutor, CancelledError
from pathlib import Path
from threading import Barrier, Event

import pytest

import ckpttool
from ckpttool import system
from ckpttool.concurrency import InlineExecutor, bind_cancel_event
from ckpttool.execution import execute as execute_module
from ckpttool.execution.copy import fill
from ckpttool.execution.executors import default_jobs, open_engine, split_engine_name
from ckpttool.formats import get_format
from ckpttool.formats.encryption import read_plain
from ckpttool.model import manifest
from ckpttool.model.plan import OutputTensor
from ckpttool.model.region import Region
from ckpttool.model.tensors import Block, Ciphertext, TensorMeta
from ckpttool.secret import Secret
from ckpttool.storage.checksums import verify_checksum
from ckpttool.storage.compare import CompareOptions, CompareUnit, compare_units
from ckpttool.storage.sampling import digest
from ckpttool.wording import printable
from tests.support.checkpoints import create_file
from tests.support.commands import files_below, message, run, run_well
from tests.support.errors import EXAMPLES
from tests.support.executors import (
    COMMAND,
    FORMATS,
    PATIENCE_SECONDS,
    complete_outputs,
    contents,
    finish,
    reshard_words,
    split_words,
    start,
    wait_until,
    write_source,
)
from tests.support.manifests import UNFINISHED
from tests.support.plans import plan_merge


@pytest.mark.parametrize("output_format", FORMATS)
def test_every_engine_of_this_host_writes_the_same_bytes(tmp_path, output_format):
    outcomes = []
    for words in (["-j", "1"], ["-j", "3"], ["--engine", "processes:2"], ["--engine", "inline"]):
        folder = tmp_path / "-".join(words).replace(":", "")
        run_well(*reshard_words(folder, output_format), *words)
        outcomes.append(contents(folder))
    assert len(outcomes[0]) == 4
    assert all(outcome == outcomes[0] for outcome in outcomes)


def test_one_file_is_filled_by_all_threads_at_once(tmp_path, monkeypatch):
    workers = 3
    source = write_source(tmp_path / "src", ranks=2 * workers, rank_bytes=1 << 10)
    together = Barrier(workers, timeout=PATIENCE_SECONDS)

    def fill_together(task):
        together.wait()  # broken if fewer tasks of the file are done at a time
        return fill(task)

    monkeypatch.setattr(execute_module, "fill", fill_together)
    monkeypatch.setattr(manifest, "UNIT_BYTES", 1 << 10)  # of which a task writes all or nothing
    catalog = ckpttool.scan(str(source / "m.ckpt"))
    plan, destination = plan_merge(
        catalog, None, str(tmp_path / "m.ckpt"), output_options=ckpttool.OutputOptions("ckpt")
    )
    options = ckpttool.CopyOptions(band_bytes=1 << 10, task_bytes=1 << 10)
    with open_engine(f"threads:{workers}") as executor:
        ckpttool.execute(plan, destination, executor, options=options)
    assert (tmp_path / "m.ckpt").read_bytes() == (source / "m.ckpt").read_bytes()


@pytest.mark.parametrize(
    ("groups", "limits", "wanted"),
    [
        ("0::/", {"cpu.max": "150000 100000"}, 1.5),
        ("0::/", {"cpu.max": "max 100000"}, math.inf),
        ("0::/a/b", {"a/b/cpu.max": "400000 100000", "a/cpu.max": "300000 100000"}, 3),
        ("0::/a/b", {"a/b/cpu.max": "max 100000", "cpu.max": "70000 100000"}, 0.7),
        ("0::/elsewhere/pod", {"cpu.max": "200000 100000"}, 2),
        (
            "4:cpu,cpuacct:/kube/pod\n1:cpuset:/\n0::/",
            {
                "cpu/kube/pod/cpu.cfs_quota_us": "250000",
                "cpu/kube/pod/cpu.cfs_period_us": "50000",
                "cpu/kube/cpu.cfs_quota_us": "-1",
                "cpu/kube/cpu.cfs_period_us": "100000",
            },
            5,
        ),
        ("3:cpuset:/x", {"cpu.max": "100000 100000"}, math.inf),
        ("", {}, math.inf),
    ],
)
def test_limits_of_containers_count_as_processors(tmp_path, groups, limits, wanted):
    for name, text in limits.items():
        (tmp_path / "fs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "fs" / name).write_text(text + "\n")
    assert system.find_quota(groups, str(tmp_path / "fs")) == wanted


@pytest.mark.parametrize(("quota", "workers"), [(0.2, 1), (1.5, 2), (4, 4), (100, 8)])
def test_there_is_a_worker_for_each_processor_at_hand(monkeypatch, quota, workers):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    monkeypatch.setattr(system, "find_quota", lambda groups: quota)
    assert default_jobs() == workers


def test_engines_are_named():
    assert 1 <= default_jobs() <= 8
    with open_engine("inline") as executor:
        assert isinstance(executor, InlineExecutor)
    for name in ("inline", "threads", "threads:3", "processes:1"):
        with open_engine(name) as executor:
            assert executor.submit(max, 1, 2).result() == 2
    assert split_engine_name("dask:/shared/s:1.json") == ("dask", "/shared/s:1.json")


@pytest.mark.parametrize(
    "name",
    [
        "inline:2",
        "threads:0",
        "threads:x",
        "threads:",
        "threads:1000000",
        f"processes:{'9' * 5000}",
        "magic:1",
        "dask",
        "dask:",
        "mpi:4",
        "",
    ],
)
def test_a_word_that_names_no_engine_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match=r"no engine|from 1 to"), open_engine(name):
        pass
    if name:
        result = run(*reshard_words(tmp_path / "out", "ckpt"), "--engine", name)
        assert result.exit_code == 2
        assert message(result) == printable(
            f"error[usage]: --engine: '{name}' is not an engine Engines: threads[:N], "
            "processes[:N], dask:ADDRESS, dask:SCHEDULER_FILE, mpi, with N from 1 to 999999."
        )


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["-j", "2", "--engine", "threads:3"], 2),
        (["--engine", "mpi", "-j", "2"], 2),
        (["-j", "2", "--engine", "threads"], 0),
        (["-j", "2", "--engine", "threads:2"], 0),
    ],
)
def test_j_is_short_for_threads_and_may_not_say_something_else(tmp_path, words, code):
    result = run(*reshard_words(tmp_path / "out", "ckpt"), *words)
    assert result.exit_code == code
    if code:
        engine = next(word for word in words if word.startswith(("threads", "mpi")))
        assert message(result) == (
            "error[usage]: -j does not go with --engine "
            f"-j 2 is short for --engine threads:2; found --engine {engine}. "
            "Try: the same command without --engine, or without -j"
        )


def fail_with(error):
    raise error


@pytest.fixture(scope="module")
def processes():
    with open_engine("processes:1") as executor:
        yield executor


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: type(example[0]).__name__)
def test_every_error_comes_out_of_a_worker_process_as_it_was(processes, example):
    error, attributes, text, code = example
    with pytest.raises(type(error)) as caught:
        processes.submit(fail_with, error).result()
    assert str(caught.value) == text
    assert caught.value.exit_code == code
    assert {name: getattr(caught.value, name) for name in attributes} == attributes


def test_a_worker_leaves_the_signals_of_a_terminal_to_the_run(processes):
    pid = processes.submit(os.getpid).result()
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        os.kill(pid, number)
    assert processes.submit(os.getpid).result() == pid


def test_a_worker_that_dies_is_told_of(tmp_path):
    with (
        pytest.raises(ckpttool.EngineError, match="a worker died") as caught,
        open_engine("processes:1") as executor,
    ):
        executor.submit(os._exit, 1).result()
    assert caught.value.exit_code == 8
    assert isinstance(caught.value.__cause__, BrokenExecutor)


def worker_pids(run_pid):
    """The workers of a run with processes: children of its one child that has any."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except FileNotFoundError:
            continue
        if fields[0] != "Z":
            children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    return [pid for child in children.get(run_pid, []) for pid in children.get(child, [])]


@pytest.fixture
def busy_run(tmp_path):
    source = write_source(tmp_path / "src", ranks=16, rank_bytes=8 << 20)
    out = tmp_path / "out"
    process = start(*COMMAND, *split_words(source, out), "--engine", "processes:2")
    wait_until(lambda: complete_outputs(out), "an output")
    yield process, out
    process.kill()
    process.communicate()


@pytest.mark.crash
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_ends_a_run_with_processes_and_leaves_whole_files_only(busy_run, number, code):
    process, out = busy_run
    process.send_signal(number)
    returned, errors = finish(process)
    assert returned == code
    complete = len([name for name in files_below(out) if name.endswith(".ckpt")])
    assert errors == (
        f"error[stopped]: ended by {number.name}\n"
        f"  nothing was left half-written; {complete} of 16 outputs complete\n"
        f"  Try: the same command{' with --resume' if complete else ''}\n"
    )
    assert {*complete_outputs(out), *UNFINISHED} == {*files_below(out)}


@pytest.mark.crash
def test_a_worker_process_that_is_killed_ends_the_run_with_a_clear_error(busy_run):
    process, out = busy_run
    os.kill(worker_pids(process.pid)[0], signal.SIGKILL)
    returned, errors = finish(process)
    assert returned == 6
    assert "not written: a worker died\n  it was killed, or memory ran out; complete: " in errors
    assert "Try: fewer workers (-j 2), or less memory (--max-memory 1GiB)" in errors
    assert "Traceback" not in errors
    assert {*complete_outputs(out), *UNFINISHED} == {*files_below(out)}


@pytest.mark.crash
def test_workers_end_with_a_run_that_is_killed(busy_run):
    process, _ = busy_run
    workers = worker_pids(process.pid)
    assert len(workers) == 2
    process.kill()
    process.wait()
    wait_until(lambda: not any(is_alive(pid) for pid in workers), "the end of the workers")


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_workers_can_be_stopped_in_the_middle_of_a_call():
    with open_engine("processes:2") as executor:
        futures = [executor.submit(time.sleep, 600) for _ in range(5)]
        wait_until(lambda: futures[0].running(), "a worker")
        executor.stop()
        for future in futures:
            assert isinstance(future.exception(timeout=60), BrokenExecutor)


@pytest.mark.crash
def test_what_ends_all_processes_of_a_group_at_any_moment_is_told_as_what_it_is(tmp_path):
    source = write_source(tmp_path / "src", ranks=16, rank_bytes=16 << 20)
    words = [*COMMAND, *split_words(source, tmp_path / "out"), "--engine", "processes:2"]
    for _ in range(3):
        process = start(*words, "--overwrite", start_new_session=True)
        wait_until(lambda pid=process.pid: worker_pids(pid), "a worker")  # that just begins
        os.killpg(process.pid, signal.SIGTERM)
        returned, errors = finish(process)
        assert (returned, "ended by SIGTERM" in errors) == (143, True), errors


@pytest.fixture
def endless(tmp_path):
    metas = [TensorMeta("w", "Float32", (1 << 12, 1 << 24))]
    path = tmp_path / "m.safetensors"
    index = create_file(get_format("safetensors"), str(path), metas, {"crc_num": "0"})
    yield index
    path.unlink()


def look_at(index):
    tensor = index.tensors["w"]
    region = Region.whole(tensor.meta.shape)
    unit = CompareUnit(region, (OutputTensor.copy_of(tensor),))
    return compare_units(CompareOptions(wants_counts=True), [unit])


def hash_all(index):
    return digest(index.tensors["w"])


@pytest.mark.parametrize("read", [verify_checksum, look_at, hash_all])
def test_threads_that_read_end_when_nobody_waits_for_them(endless, read):
    def leave():
        with open_engine("threads:1") as executor:
            futures.append(executor.submit(read, endless))
            wait_until(futures[0].running, "the thread")
            raise KeyboardInterrupt

    futures = []
    with pytest.raises(KeyboardInterrupt):
        leave()
    assert isinstance(futures[0].exception(timeout=0), CancelledError)


def test_decryption_ends_when_nobody_waits_for_it(tmp_path):
    ended = Event()
    path = tmp_path / "file"
    path.write_bytes(bytes(64))
    fd = os.open(path, os.O_RDONLY)
    out = memoryview(bytearray(32))
    key = Secret(bytes(16))
    cipher = Ciphertext("AES-CBC", key, (Block(0, 32, 0, 32, bytes(16), b""),))
    with open_engine("threads:1") as executor:
        executor.submit(bind_cancel_event, ended).result()
        executor.submit(read_plain, fd, str(path), cipher, 0, out).result()
        ended.set()
        assert isinstance(
            executor.submit(read_plain, fd, str(path), cipher, 0, out).exception(), CancelledError
        )
    os.close(fd)


@pytest.mark.parametrize("kind", ["RuntimeError", "ImportError"])
def test_mpi_without_its_library_is_told_what_to_install(tmp_path, monkeypatch, kind):
    package = tmp_path / "mpi4py"
    (package / "futures").mkdir(parents=True)
    (package / "__init__.py").touch()
    text = r"cannot load MPI library\nlibmpi.so: cannot open shared object file"
    (package / "futures" / "__init__.py").write_text(f'raise {kind}("{text}")\n')
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "mpi4py"]:
        monkeypatch.delitem(sys.modules, name)
    result = run(*reshard_words(tmp_path / "out", "ckpt"), "--engine", "mpi")
    assert result.exit_code == 8
    told = "engine mpi: no MPI library"
    assert told in message(result)
    assert "libmpi.so: cannot open shared object file" in message(result)
