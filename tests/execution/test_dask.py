"""A real Dask scheduler and its workers, each a process, some of which do not fare well."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import sys
from pathlib import Path

import numpy as np
import pytest

import ckpttool
from ckpttool.formats import get_format
from ckpttool.model.tensors import TensorMeta
from ckpttool.secret import Secret
from tests.support.checkpoints import create_file, write_file
from tests.support.commands import files_below, message, run, run_well
from tests.support.executors import (
    COMMAND,
    NO_DUMP,
    ROOT,
    average_words,
    complete_outputs,
    contents,
    dask_cluster,
    dump_state,
    finish,
    reshard_words,
    split_words,
    start,
    wait_until,
    write_rounded,
    write_source,
)
from tests.support.manifests import UNFINISHED
from tests.support.readers import entry_of, read

pytest.importorskip("distributed", reason="the extra ckpttool[dask] is not installed")
pytestmark = [pytest.mark.dask, pytest.mark.xdist_group("dask")]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with dask_cluster(tmp_path_factory.mktemp("dask")) as cluster:
        yield cluster


@pytest.fixture
def two_workers(cluster):
    cluster.replace_workers()
    return cluster


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_source(tmp_path_factory.mktemp("src"), ranks=16, rank_bytes=8 << 20)


@pytest.fixture(scope="module")
def expected(source, tmp_path_factory):
    folder = tmp_path_factory.mktemp("expected")
    run_well(*split_words(source, folder))
    return contents(folder)


def attempts(folder):
    return {name for name in files_below(folder) if ".partial." in name}


def patched(*lines):
    code = ["import sys", *lines, "from ckpttool.cli.main import main", "main(sys.argv[1:])"]
    return [sys.executable, "-c", "\n".join(code)]


def address_of(cluster, form):
    return {
        "address": cluster.address,
        "host and port": cluster.address.removeprefix("tcp://"),
        "file": str(cluster.file),
    }[form]


def test_an_average_is_that_of_this_host_and_a_nan_leaves_nothing(two_workers, tmp_path):
    other = write_rounded(tmp_path)
    run_well(*average_words(other, tmp_path / "here", "safetensors"), "-j", "1")
    engine = ("--engine", f"dask:{two_workers.address}")
    run_well(*average_words(other, tmp_path / "there", "safetensors"), *engine)
    assert contents(tmp_path / "there") == contents(tmp_path / "here")
    path = other / "rank_0" / "checkpoint-2_10.ckpt"
    entries = read(path)
    nan = entries["lm_head.weight"].array().copy()
    nan[0, 0] = np.nan
    write_file(path, {**entries, "lm_head.weight": entry_of(nan)}, "ckpt")
    words = (*average_words(other, tmp_path / "none", "safetensors"), *engine)
    refused = run(*words, "--ignore-manifest", "--trust-strategy")
    assert refused.exit_code == 7, message(refused)
    assert f"{path}: lm_head.weight: NaN at [" in message(refused)
    assert "in the file of rank 0" in message(refused)
    assert not [name for name in files_below(tmp_path / "none") if "rank_" in name]


@pytest.mark.parametrize(
    ("output_format", "form"),
    [("ckpt", "address"), ("safetensors", "host and port"), ("hdf5", "file")],
)
def test_dask_writes_the_same_bytes(tmp_path, two_workers, output_format, form):
    run_well(*reshard_words(tmp_path / "here", output_format))
    words = [*COMMAND, *reshard_words(tmp_path / "there", output_format), "-q", "--engine"]
    code, errors = finish(start(*words, f"dask:{address_of(two_workers, form)}"))
    assert (code, errors) == (0, "")
    assert contents(tmp_path / "there") == contents(tmp_path / "here")


def test_relative_paths_are_those_of_the_run_not_of_the_workers(tmp_path, two_workers):
    write_source(tmp_path / "src", ranks=2, rank_bytes=64)
    words = [*COMMAND, *split_words(Path("src"), Path("out")), "--engine"]
    code, errors = finish(start(*words, f"dask:{two_workers.address}", cwd=tmp_path))
    assert code == 0, errors
    merged = [*COMMAND, "merge", "out", "-s", "src/s.json", "-o", "m.ckpt", "--engine"]
    code, errors = finish(start(*merged, f"dask:{two_workers.address}", cwd=tmp_path))
    assert code == 0, errors
    assert (tmp_path / "m.ckpt").read_bytes() == (tmp_path / "src" / "m.ckpt").read_bytes()


def test_what_has_the_key_on_dask_writes_no_core_dump(two_workers):
    with ckpttool.open_engine(f"dask:{two_workers.address}") as executor:
        answers = executor.run_on_each(dump_state, Secret(bytes(16)))
    assert len(answers) == 2
    assert {*answers.values()} == {NO_DUMP}


def test_a_worker_that_is_killed_while_it_works_is_replaced(
    tmp_path, two_workers, source, expected
):
    out = tmp_path / "out"
    words = [*COMMAND, *split_words(source, out), "--engine", f"dask:{two_workers.address}"]
    process, victim = start(*words), two_workers.workers[-1]
    for _ in range(100):  # stop it within a file, which it does not go on to write then
        wait_until(lambda: attempts(out), "a file on its way")
        victim.send_signal(signal.SIGSTOP)
        before, done = attempts(out), len(complete_outputs(out))
        # The last two may be of the stopped worker: one in hand, one in its queue.
        enough = min(done + 2, len(expected) - 2)
        wait_until(lambda: len(complete_outputs(out)) >= enough, "work of the other")  # noqa: B023
        if before & attempts(out):
            break
        victim.send_signal(signal.SIGCONT)
    assert process.poll() is None
    assert before & attempts(out)
    two_workers.remove_worker(victim)
    code, errors = finish(process)
    assert (code, errors) == (0, "")
    assert contents(out) == expected


@pytest.fixture(scope="module")
def hasty_cluster(tmp_path_factory):
    settings = {"DASK_DISTRIBUTED__SCHEDULER__WORKER_TTL": "5s"}
    with dask_cluster(tmp_path_factory.mktemp("hasty"), **settings) as cluster:
        yield cluster


def test_a_worker_that_was_taken_for_dead_and_lives_does_no_harm(
    tmp_path, hasty_cluster, source, expected
):
    out = tmp_path / "out"
    words = [*COMMAND, *split_words(source, out), "--engine", f"dask:{hasty_cluster.address}"]
    process, victim = start(*words), hasty_cluster.workers[0]
    wait_until(lambda: attempts(out), "a file on its way")
    victim.send_signal(signal.SIGSTOP)
    code, errors = finish(process)
    assert (code, errors) == (0, "")
    assert contents(out) == expected
    victim.send_signal(signal.SIGCONT)  # it goes on to write where it was
    victim.wait(timeout=60)  # until it learns that nobody knows it
    assert contents(out) == expected


def test_without_workers_left_the_run_ends_with_a_clear_error(tmp_path, two_workers, source):
    out = tmp_path / "out"
    command = patched("from ckpttool.execution import dask", "dask.SILENT_SECONDS = 3.0")
    words = [*split_words(source, out), "--engine", f"dask:{two_workers.address}"]
    process = start(*command, *words)
    wait_until(lambda: complete_outputs(out), "an output")
    for worker in two_workers.workers:
        two_workers.remove_worker(worker)
    code, errors = finish(process)
    assert code == 6
    assert "not written: engine dask:tcp://" in errors
    assert "no worker has answered for 3 s\n  complete: " in errors
    assert {*complete_outputs(out), *UNFINISHED} == {*files_below(out)}


def test_a_scheduler_that_dies_ends_the_run_with_a_clear_error(tmp_path, hasty_cluster, source):
    out = tmp_path / "out"
    hasty_cluster.replace_workers()
    words = [*split_words(source, out), "--engine", f"dask:{hasty_cluster.address}"]
    process = start(*COMMAND, *words)
    wait_until(lambda: complete_outputs(out), "an output")
    hasty_cluster.scheduler.kill()
    code, errors = finish(process)
    assert code == 6
    assert "the connection to the scheduler was lost\n  complete: " in errors
    assert "Traceback" not in errors
    left = {*complete_outputs(out), *UNFINISHED}
    wait_until(lambda: left == {*files_below(out)}, "the workers to notice")


def test_a_signal_ends_a_run_on_dask_and_leaves_whole_files_only(tmp_path, two_workers, source):
    out = tmp_path / "out"
    words = [*split_words(source, out), "--engine", f"dask:{two_workers.address}"]
    process = start(*COMMAND, *words)
    wait_until(lambda: complete_outputs(out), "an output")
    process.send_signal(signal.SIGINT)
    code, errors = finish(process)
    assert code == 130
    assert errors.startswith("error[stopped]: ended by SIGINT\n  nothing was left half-written; ")
    assert errors.endswith(" complete\n  Try: the same command with --resume\n")
    left = {*complete_outputs(out), *UNFINISHED}
    wait_until(lambda: left == {*files_below(out)}, "the workers to notice")


def test_a_signal_cancels_all_tasks_in_one_message(tmp_path, two_workers):
    source, out = write_source(tmp_path / "src", ranks=128, rank_bytes=1 << 20), tmp_path / "out"
    command = patched(
        "import atexit, distributed",
        "calls, real = [], distributed.Client.cancel",
        "distributed.Client.cancel = lambda *a, **k: calls.append(a) or real(*a, **k)",
        "atexit.register(lambda: print(len(calls), len(calls[0][1]), file=sys.stderr))",
    )
    words = [*split_words(source, out), "--engine", f"dask:{two_workers.address}"]
    process = start(*command, *words)
    wait_until(lambda: complete_outputs(out), "an output")
    process.send_signal(signal.SIGINT)
    code, errors = finish(process)
    assert code == 130
    cancels, tasks = errors.splitlines()[-1].split()
    assert int(cancels) == 1
    assert int(tasks) > 1


@pytest.mark.parametrize("threads", [1, 8])
def test_a_worker_keeps_within_the_budget_whatever_its_threads(tmp_path, threads):
    meta = TensorMeta("w", "Float32", (1 << 14, 2048))
    create_file(get_format("ckpt"), str(tmp_path / "m.ckpt"), [meta], {})
    item = {"w": {"dev_matrix": [8], "tensor_map": [-1, 0]}}
    (tmp_path / "s.json").write_text(json.dumps({"parallel_layout_item": item}))
    with dask_cluster(tmp_path / "dask", 0) as cluster:
        worker = cluster.add_worker(threads=threads)
        words = [*COMMAND, *split_words(tmp_path, tmp_path / "out"), "--max-memory", "90MiB"]
        code, errors = finish(start(*words, "--engine", f"dask:{cluster.address}"))
        status = Path(f"/proc/{worker.pid}/status").read_text()
    assert (code, errors) == (0, "")
    assert int(re.search(r"VmHWM:\s+(\d+)", status)[1]) <= 90 << 10


# ------------------------------------------------------------------- clusters that will not do


def test_workers_that_cannot_do_their_part_are_named_by_host(tmp_path, two_workers, source):
    out, cluster = tmp_path / "out", two_workers
    words = [*COMMAND, *split_words(source, out), "--engine", f"dask:{cluster.address}"]
    shutil.copytree(ROOT / "ckpttool", tmp_path / "old" / "ckpttool")
    version = tmp_path / "old" / "ckpttool" / "_version.py"
    version.write_text(version.read_text().replace(ckpttool.__version__, "0.0.1"))
    broken = tmp_path / "broken" / "ckpttool"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('half installed')")
    this = rf"ckpttool {re.escape(ckpttool.__version__)}"
    for folder, problem in (
        (
            "old",
            rf"workers have ckpttool 0\.0\.1 on Python .*\n  this run is {this} on Python .*\n",
        ),
        ("broken", rf"workers cannot run {this}\n  ImportError\('half installed'\)\n"),
    ):
        worker = cluster.add_worker(PYTHONPATH=str(tmp_path / folder))
        code, errors = finish(start(*words))
        cluster.remove_worker(worker)
        assert code == 5
        assert f"worker on {socket.gethostname()} (tcp://127.0.0.1:" in errors
        assert errors.count("worker on ") == 1
        assert re.search(rf"{problem}  Try: install the same version on all hosts\n", errors), (
            errors
        )
        assert not out.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
@pytest.mark.parametrize("hidden", ["src", "out"])
def test_a_worker_that_does_not_see_the_files_is_named_by_host(tmp_path, two_workers, hidden):
    source = write_source(tmp_path / "src", ranks=2, rank_bytes=64)
    out = tmp_path / "out"
    out.mkdir()
    mount = f'mount -t tmpfs none {tmp_path / hidden} && exec "$@"'
    try:
        two_workers.add_worker(before=("unshare", "-m", "sh", "-c", mount, "sh"))
    except AssertionError:
        pytest.skip("this machine does not let one mount")
    words = [*COMMAND, *split_words(source, out), "--engine", f"dask:{two_workers.address}"]
    code, errors = finish(start(*words))
    assert code == 5
    assert f"worker on {socket.gethostname()} (tcp://127.0.0.1:" in errors
    assert errors.count("worker on ") == 1
    assert f"{tmp_path / hidden}/" in errors
    assert "on a file system that all hosts share" in errors
    assert files_below(out) == []


def test_a_scheduler_without_workers_or_without_the_package_is_told_of(tmp_path):
    source = write_source(tmp_path / "src", ranks=2, rank_bytes=64)
    broken = tmp_path / "broken" / "ckpttool"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('half installed')")
    with dask_cluster(tmp_path / "dask", 0, PYTHONPATH=str(broken.parent)) as cluster:
        words = [*COMMAND, *split_words(source, tmp_path / "out"), "--engine"]
        code, errors = finish(start(*words, f"dask:{cluster.address}"))
        assert code == 8
        assert errors == (
            f"error[no_engine]: engine dask:{cluster.address}: the scheduler has no workers\n"
            "  Try: dask worker ADDRESS\n"
        )
        cluster.add_worker()
        code, errors = finish(start(*words, f"dask:{cluster.address}"))
    assert code == 5
    assert errors.startswith(
        f"error[engine]: scheduler: workers cannot run ckpttool {ckpttool.__version__}\n  "
    )
    assert "half installed" in errors
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["nobody", "somebody else", "no such scheme"])
def test_a_scheduler_that_cannot_be_reached_is_told_of_soon(tmp_path, source, kind):
    with socket.create_server(("127.0.0.1", 0)) as other:  # takes calls, and says nothing
        address = f"127.0.0.1:{other.getsockname()[1]}"
        if kind == "nobody":
            other.close()
        elif kind == "no such scheme":
            address = f"carrier-pigeon://{address}"
        command = patched("from ckpttool.execution import dask", "dask.CONNECT_SECONDS = 2")
        words = [*split_words(source, tmp_path / "out"), "--engine", f"dask:{address}"]
        code, errors = finish(start(*command, *words))
    assert code == 8
    assert f"engine dask:{address}: no scheduler answers at {address}" in errors
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("content", [None, b"", b"{}", b"[]", b"\xff"])
def test_a_scheduler_file_that_is_none_is_told_of(tmp_path, source, content):
    path = tmp_path / "scheduler.json"
    if content is not None:
        path.write_bytes(content)
    result = run(*split_words(source, tmp_path / "out"), "--engine", f"dask:{path}")
    assert result.exit_code == 8
    assert f"engine dask:{path}: no scheduler file " in message(result)


def test_without_the_extra_the_command_that_installs_it_is_told(tmp_path, source, monkeypatch):
    for name, module in (("dask:x:1", "distributed"), ("mpi", "mpi4py.futures")):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, module, None)
            result = run(*split_words(source, tmp_path / "out"), "--engine", name)
        assert result.exit_code == 8
        assert f"pip install 'ckpttool[{name[:4].strip(':')}]'" in message(result)
