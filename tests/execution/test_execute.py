"""Create, fill, commit: nothing half-written under a final name, whatever happens on the way."""

from __future__ import annotations

import errno
import os
import pickle
import resource
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

import ckpttool
from ckpttool.execution import execute as execute_module
from ckpttool.execution.copy import CopyOptions, cut_into_tasks, fill
from ckpttool.execution.execute import _failure, execute
from ckpttool.execution.executors import open_engine
from ckpttool.formats import get_format, header_of, read_index, suffix_of
from ckpttool.model.tensors import StoredFile, TensorMeta
from ckpttool.operations.look import Subject
from ckpttool.operations.verification import verify
from ckpttool.problems import CombinedError, FormatError
from ckpttool.storage import region_io
from ckpttool.storage.checksums import verify_checksum
from ckpttool.storage.files import PARTIAL, PartialFile, write_header
from tests.support.checkpoints import create_file, write_file, write_holes
from tests.support.commands import files_below
from tests.support.corpus import GOLDEN
from tests.support.executors import make_plan, wait_until
from tests.support.manifests import UNFINISHED
from tests.support.plans import plan_merge
from tests.support.readers import Entry, read

CASE = GOLDEN / "reshard_8_to_4"


def sparse_checkpoint(path, nbytes, count=1):
    write_holes(path, *[(nbytes // count // 4 // 1024, 1024)] * count)


ENGINES = [
    ("inline", 64, 100),
    ("threads:1", 1, 1),
    ("threads:5", 8 << 20, 1),
    ("processes:2", 64, 1),
]


@pytest.mark.parametrize(
    ("output_format", "crc"),
    [
        ("ckpt", False),
        ("safetensors", False),
        ("hdf5", False),
        ("ckpt", True),
        ("safetensors", True),
    ],
)
def test_every_engine_and_any_cut_writes_the_same_bytes(tmp_path, output_format, crc):
    contents = []
    for engine, band, task in ENGINES:
        folder, steps = tmp_path / engine.replace(":", ""), []
        plan, destination = make_plan(folder, output_format, crc=bool(crc))
        options = CopyOptions(band_bytes=band, task_bytes=task, max_in_flight=3)
        with open_engine(engine) as executor:
            written = execute(
                plan, destination, executor, options=options, on_progress=steps.append
            )
        assert sum(steps) == sum(meta.nbytes for output in plan for meta in output.metas)
        assert len(steps) > 8
        paths = files_below(folder, manifests=True)
        contents.append({path: (folder / path).read_bytes() for path in paths})
        assert [output.rank for output in written] == [0, 1, 2, 3]
        for output in written:
            assert output.nbytes == Path(output.path).stat().st_size
            index = read_index(output.path)
            assert ("crc_num" in index.attrs) == bool(crc)
            assert not crc or verify_checksum(index) is None
    assert len(contents[0]) == 5
    assert all(files == contents[0] for files in contents)
    assert not [data for data in contents[0].values() if str(tmp_path).encode() in data]


def test_a_task_survives_pickling_and_can_be_done_twice(tmp_path):
    plan, _ = make_plan(tmp_path)
    output = next(iter(plan))
    path = tmp_path / "file.ckpt"
    index = create_file(get_format(output.format), str(path), output.metas, {})
    for task in cut_into_tasks([(output, index)], CopyOptions(100, 300)):
        again = pickle.loads(pickle.dumps(task))
        for one, unit in zip(again.units, task.units, strict=True):
            assert (one.tensor, one.cut) == (unit.tensor, unit.cut)
            assert [*one.output.pieces(one.region)] == [*unit.output.pieces(unit.region)]
            assert pickle.dumps(one) == pickle.dumps(unit)  # another may be sent on
        assert fill(task) == fill(again)
        assert fill(task).nbytes == task.nbytes
    assert {name: entry.shape for name, entry in read(path).items()} == {
        meta.name: meta.shape for meta in output.metas
    }


@pytest.mark.parametrize("output_format", ["ckpt", "safetensors", "hdf5"])
def test_tasks_and_places_are_known_before_there_is_a_file(tmp_path, output_format):
    options = CopyOptions(band_bytes=100, task_bytes=300)
    plan, _ = make_plan(tmp_path, output_format)
    for output in plan:
        planned = header_of(output).of_file(StoredFile(output.path + PARTIAL))
        tasks = [*cut_into_tasks([(output, planned)], options)]
        assert files_below(tmp_path) == []
        partial = PartialFile(output)
        assert tasks == [*cut_into_tasks([(output, partial.index)], options)]
        assert planned.nbytes == Path(planned.path).stat().st_size
        partial.discard()


def test_a_failed_copy_leaves_what_was_complete_and_nothing_else(tmp_path, monkeypatch):
    def fail_on_rank_2(task):
        if "rank_2" in task.units[0].tensor.file.path:
            raise OSError(errno.EIO, os.strerror(errno.EIO), task.units[0].tensor.file.path)
        return fill(task)

    monkeypatch.setattr(execute_module, "fill", fail_on_rank_2)
    with pytest.raises(ckpttool.ExecutionError) as caught:
        execute(*make_plan(tmp_path))
    assert caught.value.output == str(tmp_path / "rank_2" / "checkpoint_2.ckpt")
    assert "Input/output error" in str(caught.value)
    assert caught.value.exit_code == 6
    assert list(caught.value.committed) == [
        str(tmp_path / f"rank_{rank}" / f"checkpoint_{rank}.ckpt") for rank in (0, 1)
    ]
    names = ["rank_0/checkpoint_0.ckpt", "rank_1/checkpoint_1.ckpt"]
    assert files_below(tmp_path) == [*UNFINISHED, *names]


def test_a_removed_output_stays_open_until_no_task_can_write_to_it(tmp_path, monkeypatch):
    partial = tmp_path / "rank_1" / "checkpoint_1.ckpt.partial"
    has_begun, seen = threading.Event(), []

    def fail_beside_a_slow_task(task):
        path = task.units[0].tensor.file.path
        if path == str(partial):
            inode = partial.stat().st_ino
            has_begun.set()
            wait_until(lambda: not partial.exists(), "the end of the run")
            time.sleep(0.1)
            seen.append(inode in open_inodes())
        elif "rank_0" in path:
            assert has_begun.wait(60)
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return fill(task)

    monkeypatch.setattr(execute_module, "fill", fail_beside_a_slow_task)
    with open_engine("threads:2") as executor, pytest.raises(ckpttool.ExecutionError):
        execute(*make_plan(tmp_path), executor)
    assert seen == [True]
    assert files_below(tmp_path) == []


def open_inodes():
    inodes = set()
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # it is closed meanwhile
            inodes.add(link.stat().st_ino)
    return inodes


@pytest.mark.parametrize("folders", [[], ["out"], ["out", "out/deep"]])
def test_a_source_that_shrinks_before_a_worker_opens_it_is_noticed(tmp_path, monkeypatch, folders):
    source = tmp_path / "m.ckpt"
    for folder in folders:
        (tmp_path / folder).mkdir()
    sparse_checkpoint(source, 1 << 20)
    out = str(tmp_path / "out/deep/m.h5")
    plan, destination = plan_merge(ckpttool.scan(str(source)), None, out)

    def shrink(task):
        os.truncate(source, 1 << 19)
        return fill(task)

    monkeypatch.setattr("ckpttool.execution.execute.fill", shrink)
    with pytest.raises(ckpttool.ExecutionError, match="not written: a source file has") as told:
        execute(plan, destination)
    assert told.value.facts == (
        f"{source}: changed since its header was read; outputs may mix old and new data"
    )
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")} == {"m.ckpt", *folders}


@pytest.mark.parametrize("output_format", ["ckpt", "hdf5", "safetensors"])
def test_a_file_that_was_saved_anew_with_the_old_times_is_noticed(tmp_path, output_format):
    source = tmp_path / f"m{suffix_of(output_format)}"
    write_file(source, {"w": Entry("Float32", (2,), bytes(8))}, output_format)
    plan, destination = plan_merge(ckpttool.scan(str(source)), None, str(tmp_path / "out" / "m.h5"))
    before = source.stat()
    write_file(source, {"w": Entry("Float32", (2,), bytes(7) + b"x")}, output_format)
    os.utime(source, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert source.stat().st_size == before.st_size
    with pytest.raises(ckpttool.PlanError, match=r"changed since its header was read"):
        execute(plan, destination)
    assert files_below(tmp_path) == [source.name]


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda metas: metas[1:], r"expected Float32 .*, found nothing"),
        (lambda metas: [*metas, TensorMeta("more", "Int8", ())], r"more: expected nothing, found"),
        (
            lambda metas: [TensorMeta("more", "Int8", ()), *metas[1:]],
            r"(?s), found nothing.*more: expected nothing, found",
        ),
    ],
)
def test_an_output_whose_header_is_not_as_planned_gets_no_name(
    tmp_path, monkeypatch, made, message
):
    from ckpttool.formats.ckpt import Ckpt

    def seal(self, fd, crc=None):
        path = f"/proc/self/fd/{fd}"
        metas = [tensor.meta for tensor in self.read_index(StoredFile(path)).tensors.values()]
        write_header(fd, self.index(made(metas)))

    monkeypatch.setattr(Ckpt, "seal", seal)
    with pytest.raises(ckpttool.VerifyError, match=message):
        execute(*make_plan(tmp_path))
    assert files_below(tmp_path) == []


def test_an_interrupt_leaves_no_partial_file(tmp_path):
    def interrupt(nbytes):
        raise KeyboardInterrupt

    with open_engine("threads:2") as executor, pytest.raises(KeyboardInterrupt):
        execute(*make_plan(tmp_path), executor, on_progress=interrupt)
    assert [name for name in files_below(tmp_path) if name.endswith(".partial")] == []


def test_a_file_that_grows_too_large_fails_when_it_is_created(tmp_path):
    source = tmp_path / "m.ckpt"
    sparse_checkpoint(source, 64 << 20)
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20)); "
        "from ckpttool.cli.main import main; main(sys.argv[1:])"
    )
    command = [sys.executable, "-c", code, "merge", str(source), "-o", str(tmp_path / "o" / "m.h5")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 6
    assert "File too large" in done.stderr
    assert files_below(tmp_path) == ["m.ckpt"]


@pytest.mark.big
def test_many_files_stay_within_the_limit_of_open_files(tmp_path):
    ranks = 300
    for rank in range(ranks):
        folder = tmp_path / "src" / f"rank_{rank}"
        folder.mkdir(parents=True)
        path = str(folder / "net-1_1.ckpt")
        create_file(get_format("ckpt"), path, [TensorMeta("w", "Int8", (1, 4))], {})
    layout = '{"dev_matrix": [300], "tensor_map": [0, -1]}'
    (tmp_path / "s.json").write_text('{"parallel_layout_item": {"w": ' + layout + "}}")
    old = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, old[1]))
    try:
        catalog = ckpttool.scan(str(tmp_path / "src"))
        strategy = ckpttool.read_strategy([str(tmp_path / "s.json")])
        execute(
            *plan_merge(
                catalog,
                strategy,
                str(tmp_path / "m.ckpt"),
                output_options=ckpttool.OutputOptions("ckpt"),
            )
        )
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, old)
    assert read(tmp_path / "m.ckpt")["w"].shape == (300, 4)


def test_a_stale_partial_file_is_replaced_and_one_in_use_is_refused(tmp_path):
    import fcntl

    source = tmp_path / "m.ckpt"
    sparse_checkpoint(source, 1 << 20)
    plan, destination = plan_merge(ckpttool.scan(str(source)), None, str(tmp_path / "out" / "m.h5"))
    partial = tmp_path / "out" / "m.h5.partial"
    partial.parent.mkdir()
    partial.write_bytes(b"left by a killed run")
    with partial.open("r+b") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ckpttool.ExecutionError, match="another run is writing this output"):
            execute(plan, destination)
    assert partial.read_bytes() == b"left by a killed run"
    execute(plan, destination)
    assert files_below(tmp_path) == ["m.ckpt", "out/m.h5"]


def test_an_input_with_the_temporary_name_is_never_overwritten(tmp_path):
    source = tmp_path / "m.ckpt.partial"
    sparse_checkpoint(source, 1 << 20)
    with pytest.raises(
        ckpttool.UnsupportedError, match="a temporary file of a run of ckpttool that did not end"
    ):
        ckpttool.scan(str(source))
    other = tmp_path / "other.ckpt"  # by another name it is an input all the same
    other.symlink_to(source)
    catalog = ckpttool.scan(str(other))
    with pytest.raises(ckpttool.PlanError, match="has the name of the temporary file"):
        plan_merge(
            catalog, None, str(tmp_path / "m.ckpt"), output_options=ckpttool.OutputOptions("ckpt")
        )
    link = tmp_path / "z.ckpt.partial"
    link.symlink_to(source)
    with pytest.raises(ckpttool.PlanError, match="is in the way of the temporary file"):
        plan_merge(
            catalog, None, str(tmp_path / "z.ckpt"), output_options=ckpttool.OutputOptions("ckpt")
        )


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOSYS, errno.EPERM])
def test_a_file_system_without_locks_and_reservations_will_do(tmp_path, monkeypatch, number):
    import fcntl

    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    assert len(execute(*make_plan(tmp_path))) == 4


@pytest.mark.parametrize("after", range(6))
def test_a_run_that_is_ended_between_tasks_leaves_whole_files_only(tmp_path, after):
    class EndedError(Exception):
        pass

    calls = []

    def check():
        calls.append(1)
        if len(calls) > after:
            raise EndedError

    with open_engine("threads:2") as executor, pytest.raises(EndedError):
        execute(*make_plan(tmp_path), executor, check=check, options=CopyOptions(max_in_flight=1))
    for name in files_below(tmp_path):
        if name in UNFINISHED:
            continue
        assert name.endswith(".ckpt")
        assert read(tmp_path / name)


@pytest.mark.parametrize("is_resumed", [False, True])
def test_a_set_that_another_run_completed_meanwhile_is_not_replaced(tmp_path, is_resumed):
    late = make_plan(tmp_path, resume=is_resumed)
    anyway = make_plan(tmp_path, overwrite=True)
    execute(*make_plan(tmp_path, prefix="net_"))
    before = {name: (tmp_path / name).read_bytes() for name in files_below(tmp_path, True)}
    with pytest.raises(
        ckpttool.PlanError, match=r"ckpttool\.json: another run has written it since this one"
    ):
        execute(*late)
    after = {name: (tmp_path / name).read_bytes() for name in files_below(tmp_path, True)}
    assert after == before
    execute(*anyway)


def test_a_file_that_somebody_put_there_meanwhile_is_not_replaced(tmp_path):
    plan, destination = make_plan(tmp_path)
    (tmp_path / "rank_2").mkdir()
    path = tmp_path / "rank_2" / "checkpoint_2.ckpt"
    path.write_text("mine")
    with pytest.raises(
        ckpttool.PlanError, match=r"rank_2/checkpoint_2\.ckpt: another run has written it"
    ):
        execute(plan, destination)
    assert files_below(tmp_path, True) == ["rank_2/checkpoint_2.ckpt"]
    assert path.read_text() == "mine"


def test_a_failure_names_every_problem_of_its_cause():
    errors = [FormatError("a.ckpt", 1, "cut short"), FormatError("b.ckpt", 2, "encrypted")]
    failure = _failure("out.h5", CombinedError(errors))
    assert failure.cause == "a.ckpt: cut short"
    assert failure.facts == "byte 1; b.ckpt: encrypted; byte 2"
    errors += [FormatError(f"{name}.ckpt", None, "cut short") for name in "cde"]
    facts = _failure("out.h5", CombinedError(errors)).facts
    assert facts == "byte 1; b.ckpt: encrypted; byte 2; c.ckpt: cut short; 2 more"


@pytest.mark.parametrize("output_format", ["ckpt", "safetensors", "hdf5"])
def test_a_cast_is_the_type_of_a_transfer_and_one_function(tmp_path, monkeypatch, output_format):
    def cast(self, data, src, out, dst):
        assert (src, dst) == ("Float32", "Float16")
        out[...] = data.view(np.float32).astype(np.float16).view(np.uint8).reshape(out.shape)

    monkeypatch.setattr(region_io.FlatFiles, "cast", cast)
    plan, assignment = make_plan(tmp_path / "out", output_format, crc=output_format != "hdf5")
    transfers = [
        replace(transfer, dtype="Float16") if transfer.dtype == "Float32" else transfer
        for transfer in plan.transfers
    ]
    execute(replace(plan, transfers=tuple(transfers)), assignment)
    execute(*make_plan(tmp_path / "stored", output_format))
    for rank in range(4):
        name = f"rank_{rank}/checkpoint_{rank}{suffix_of(output_format)}"
        cast, stored = (read(tmp_path / folder / name) for folder in ("out", "stored"))
        for tensor, entry in stored.items():
            expected = entry.array()
            if entry.dtype == "Float32":
                expected = expected.astype(np.float16)
            assert cast[tensor].array().tobytes() == expected.tobytes()
    strategy = ckpttool.read_strategy([str(CASE / "dst_strategy.ckpt")])
    source = Subject(ckpttool.scan(str(tmp_path / "out")), strategy)
    done = verify(source, deep=True, crc=True)
    assert [finding.code for finding in done.findings] == []
