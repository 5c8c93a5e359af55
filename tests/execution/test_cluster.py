"""Workers on other hosts: what they are asked, and that no two of them write the same file.

The cluster here is threads of this process; `test_dask` and `test_mpi` have real ones.
"""

from __future__ import annotations

import os
import pickle
import platform
import socket
from concurrent.futures import Future
from pathlib import Path

import pytest
from msgspec.structs import replace

import ckpttool
from ckpttool.execution import cluster
from ckpttool.execution import execute as execute_module
from ckpttool.execution.cluster import WorkerRequirements, check_worker, software, write_file
from ckpttool.execution.copy import CopyOptions, Filled, fill
from ckpttool.execution.execute import execute
from ckpttool.execution.schedule import Batch
from ckpttool.formats import read_index
from ckpttool.formats.local import identify_file
from ckpttool.model.layout import Layout
from ckpttool.problems import CkptToolError, EngineError
from ckpttool.storage.checksums import verify_checksum
from tests.support.checkpoints import slice_catalog, strategy_of
from tests.support.commands import files_below
from tests.support.errors import texts_of
from tests.support.executors import CASE, FORMATS, contents, make_plan
from tests.support.in_memory import make
from tests.support.manifests import UNFINISHED

SMALL = CopyOptions(band_bytes=64, task_bytes=100)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(cluster, "PAUSES", (0.0,))


@pytest.mark.parametrize("output_format", FORMATS)
def test_a_cluster_writes_the_same_bytes_a_file_for_each_call(tmp_path, threads, output_format):
    execute(*make_plan(tmp_path / "here", output_format))
    steps = []
    plan, destination = make_plan(tmp_path / "there", output_format)
    written = execute(plan, destination, threads, options=SMALL, on_progress=steps.append)
    assert contents(tmp_path / "there") == contents(tmp_path / "here")
    assert [output.rank for output in written] == [0, 1, 2, 3]
    assert len(threads.calls) == 4
    assert sum(steps) == sum(meta.nbytes for output in plan for meta in output.metas)


@pytest.mark.parametrize("output_format", ["ckpt", "safetensors"])
def test_a_cluster_seals_with_the_same_checksum(tmp_path, threads, output_format):
    execute(*make_plan(tmp_path / "here", output_format, crc=True))
    execute(*make_plan(tmp_path / "there", output_format, crc=True), threads, options=SMALL)
    assert contents(tmp_path / "there") == contents(tmp_path / "here")
    paths = [*(tmp_path / "there").rglob("*_*.*")]
    assert [verify_checksum(read_index(str(path))) for path in paths if path.is_file()] == [
        None
    ] * 4


# ------------------------------------------------------------------------------- what is asked


def requirements(folder: Path, *paths: Path) -> WorkerRequirements:
    files = tuple(map(identify_file, map(str, paths)))
    return WorkerRequirements(software(), files, str(folder))


def test_a_worker_that_sees_everything_has_no_problems(tmp_path):
    (tmp_path / "a").write_bytes(b"1234")
    assert check_worker(requirements(tmp_path, tmp_path / "a")) is None
    python = ".".join(platform.python_version().split(".")[:2])
    assert software() == f"ckpttool {ckpttool.__version__} on Python {python}"


@pytest.mark.parametrize("change", ["remove", "grow", "touch"])
def test_a_worker_says_which_file_it_does_not_see(tmp_path, change):
    paths = [tmp_path / name for name in "abc"]
    for path in paths:
        path.write_bytes(b"1234")
    required = requirements(tmp_path, *paths)
    for path in paths[1:]:
        if change == "remove":
            path.unlink()
        elif change == "grow":
            path.write_bytes(b"12345")
            os.utime(path, ns=(0, required.files[1].stamp.mtime_ns))
        else:
            os.utime(path, ns=(0, 1))
    said, _, facts = check_worker(required)
    reason = "No such file" if change == "remove" else "another size, time of change or inode"
    assert said == f"workers do not see 2 of {len(paths)} files"
    assert facts.startswith(f"{paths[1]}: {reason}")


def test_a_file_that_shows_late_is_seen(tmp_path, monkeypatch):
    folder = tmp_path / "late"
    folder.mkdir()
    (folder / "file").write_bytes(b"1")
    required = requirements(tmp_path, folder / "file")
    folder.rename(tmp_path / "elsewhere")
    monkeypatch.setattr(cluster, "PAUSES", (0.0, 0.1))
    monkeypatch.setattr(
        cluster.time, "sleep", lambda s: s and (tmp_path / "elsewhere").rename(folder)
    )
    assert check_worker(required) is None


def test_another_version_of_the_package_or_of_python_is_a_problem(tmp_path):
    mine = f"workers have {software()}"
    for other in (
        "ckpttool 0.0.9 on Python 3.12",
        f"ckpttool {ckpttool.__version__} on Python 3.9",
    ):
        answer = check_worker(WorkerRequirements(other, (), str(tmp_path)))
        assert answer == (mine, cluster.SAME_SOFTWARE, f"this run is {other}")


def test_a_folder_that_a_worker_may_not_write_to_is_a_problem(tmp_path, monkeypatch):
    monkeypatch.setattr(cluster.os, "access", lambda path, mode: False)
    assert check_worker(requirements(tmp_path))[0] == f"workers may not write to {tmp_path}"


def test_every_worker_that_cannot_is_named_and_nothing_is_left(tmp_path, threads):
    seen = []

    def answers(function, argument):
        seen.extend(files_below(tmp_path))
        assert function(argument) is None
        blind = ("is blind", "", "")
        lost = ImportError("No module named 'ckpttool'")
        return {"worker on a": blind, "b": blind, "c": None, "worker on d": lost}

    threads.answers = answers
    with pytest.raises(ckpttool.PlanError) as caught:
        execute(*make_plan(tmp_path / "deep" / "out"), threads)
    blind = "No module named 'ckpttool'\n  Try: install the same version on all hosts"
    assert texts_of(caught.value) == (
        "worker on a, b: is blind",
        f"worker on d: workers cannot run ckpttool {ckpttool.__version__}\n  {blind}",
    )
    assert len(seen) == 1
    assert seen[0].startswith("deep/out/.ckpttool-")
    assert list(tmp_path.iterdir()) == []
    assert threads.calls == []


def test_all_inputs_and_the_output_folder_are_looked_at(tmp_path, threads):
    asked = []
    threads.answers = lambda function, required: asked.append(required) or {}
    execute(*make_plan(tmp_path / "out"), threads)
    (required,) = asked
    inputs = {str(path) for path in (CASE / "src").rglob("*.ckpt")}
    assert inputs == {file.path for file in required.files[:-1]}
    assert Path(required.files[-1].path).parent == Path(required.folder) == tmp_path / "out"


def test_relative_paths_are_refused_since_workers_are_elsewhere(tmp_path, threads, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ckpttool.PlanError, match="on a cluster every path has to be absolute\n  out"
    ):
        execute(*make_plan("out"), threads)


def test_workers_that_do_not_answer_are_not_waited_for_for_ever(tmp_path, threads, monkeypatch):
    monkeypatch.setattr(cluster, "ANSWER_SECONDS", 0)
    go_on = Future()
    threads.answers = lambda function, required: go_on.result()
    with pytest.raises(EngineError, match="not all workers answered within 0 s"):
        execute(*make_plan(tmp_path / "out"), threads)
    go_on.set_result({})
    assert list(tmp_path.iterdir()) == []


def test_a_run_can_be_ended_while_workers_are_asked(tmp_path, threads):
    class EndedError(Exception):
        pass

    def end():
        raise EndedError

    go_on = Future()
    threads.answers = lambda function, required: go_on.result()
    with pytest.raises(EndedError):
        execute(*make_plan(tmp_path / "out"), threads, check=end)
    go_on.set_result({})
    assert list(tmp_path.iterdir()) == []


# --------------------------------------------------------------------------- attempts at a file


def test_a_task_that_is_done_twice_is_written_to_two_files_and_one_gets_the_name(
    tmp_path, threads, monkeypatch
):
    paths = []

    def twice(task):
        first, second = write_file(task), write_file(task)
        paths.append((first.attempt, second.attempt))
        assert Path(first.attempt).read_bytes() == Path(second.attempt).read_bytes()
        return second

    monkeypatch.setattr(execute_module, "write_file", twice)
    monkeypatch.setattr(threads, "submit", threads._pool.submit)
    execute(*make_plan(tmp_path / "out"), threads)
    execute(*make_plan(tmp_path / "here"))
    assert len({path for pair in paths for path in pair}) == 8
    assert contents(tmp_path / "out") == contents(tmp_path / "here")


def test_a_worker_that_was_given_up_stops_at_its_next_stretch_and_leaves_nothing(
    tmp_path, monkeypatch
):
    output, *_ = make_plan(tmp_path)[0]
    job, fills = cluster.RemoteFile(output), []

    def fill_and_give_up(task):
        fills.append(task)
        if len(fills) == 2:
            job.discard()
        return Filled(task.nbytes, ())

    monkeypatch.setattr(cluster, "fill", fill_and_give_up)
    task = job.task(Batch((output,), SMALL))
    assert sum(meta.nbytes for meta in output.metas) > 4 * SMALL.task_bytes
    with pytest.raises(CkptToolError, match=r"is missing: the run has ended"):
        write_file(task)
    assert len(fills) == 2
    assert files_below(tmp_path / "rank_0") == []


def test_what_a_worker_is_sent_does_not_grow_with_the_output(tmp_path):
    sizes = []
    for rows in (1 << 10, 1 << 20):
        layouts = {"w": Layout((4,), ((0,), ()))}
        catalog = slice_catalog(strategy_of(layouts), {"w": (rows, 4096)})
        (output,) = make(catalog, strategy_of(layouts), None)
        output = replace(output, path=str(tmp_path / f"{rows}.ckpt"))
        job = cluster.RemoteFile(output)
        sizes.append(len(pickle.dumps(job.task(Batch((output,), SMALL)))))
        job.discard()
    assert sizes[1] < sizes[0] + 100


def test_a_worker_that_comes_too_late_makes_no_file(tmp_path):
    output, *_ = make_plan(tmp_path)[0]
    job = cluster.RemoteFile(output)
    task = job.task(Batch((output,), SMALL))
    job.discard()
    with pytest.raises(CkptToolError, match=f"on {socket.gethostname()}: .*is missing"):
        write_file(task)
    assert files_below(tmp_path / "rank_0") == []


def test_an_error_of_a_worker_names_its_host_and_leaves_what_was_complete(
    tmp_path, threads, monkeypatch
):
    def fail_on_rank_2(task):
        if "rank_2" in task.units[0].tensor.file.path:
            raise OSError(28, "No space left on device", task.units[0].tensor.file.path)
        return fill(task)

    monkeypatch.setattr(cluster, "fill", fail_on_rank_2)
    with pytest.raises(ckpttool.ExecutionError) as caught:
        execute(*make_plan(tmp_path), threads)
    threads.end()
    assert caught.value.output == str(tmp_path / "rank_2" / "checkpoint_2.ckpt")
    assert f"on {socket.gethostname()}: {tmp_path}/rank_2/" in caught.value.cause
    assert "No space left on device" in caught.value.cause
    left = [str(tmp_path / name) for name in files_below(tmp_path) if name not in UNFINISHED]
    assert left == list(caught.value.committed)


def test_a_cluster_that_is_lost_ends_the_run_and_names_an_output_that_is_not_done(
    tmp_path, threads, monkeypatch
):
    def lost():
        raise EngineError("threads", "all gone")

    monkeypatch.setattr(threads, "watch", lost)
    monkeypatch.setattr(threads, "submit", lambda call: Future())
    with pytest.raises(ckpttool.ExecutionError, match="engine threads: all gone") as caught:
        execute(*make_plan(tmp_path), threads)
    assert caught.value.output == str(tmp_path / "rank_0" / "checkpoint_0.ckpt")
    assert files_below(tmp_path) == []


def test_what_a_killed_run_left_of_its_attempts_is_removed_by_the_next(tmp_path, threads):
    folder = tmp_path / "rank_1"
    folder.mkdir()
    plan, destination = make_plan(tmp_path)
    for name in (".partial", ".partial.0123456789abcdef", ".partial.mine"):
        (folder / f"checkpoint_1.ckpt{name}").write_bytes(b"left")
    execute(plan, destination, threads)
    assert files_below(folder) == ["checkpoint_1.ckpt", "checkpoint_1.ckpt.partial.mine"]


def test_an_output_that_another_run_claims_meanwhile_is_not_given_its_name(
    tmp_path, threads, monkeypatch
):
    def write_and_lose(task):
        attempt = write_file(task)
        Path(task.claim).unlink()
        Path(task.claim).touch()
        return attempt

    monkeypatch.setattr(execute_module, "write_file", write_and_lose)
    monkeypatch.setattr(threads, "submit", threads._pool.submit)
    with pytest.raises(ckpttool.ExecutionError, match="another run is writing this output"):
        execute(*make_plan(tmp_path), threads)
    assert not [name for name in files_below(tmp_path) if name.endswith(".ckpt")]


def test_errors_of_calls_are_explained_and_cancelled_calls_are_errors(threads, monkeypatch):
    explained = []
    monkeypatch.setattr(
        threads, "_explain", lambda error: explained.append(error) or EngineError("x", "explained")
    )
    with pytest.raises(EngineError, match="explained"):
        threads.submit(int, "no number").result()
    assert isinstance(explained[0], ValueError)
    remote: Future[int] = Future()
    local = threads._wrap(remote)
    remote.cancel()
    remote.set_running_or_notify_cancel()
    with pytest.raises(EngineError, match="explained"):
        local.result()
    remote = Future()
    assert threads._wrap(remote).cancel()
    assert remote.cancelled()
