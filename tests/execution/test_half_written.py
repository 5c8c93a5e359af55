"""A killed run goes on inside a file: what its log lists is on disk, and is not written again."""

from __future__ import annotations

import os
import shutil
import signal
import warnings
from pathlib import Path

import pytest

from ckpttool.execution import execute as execute_module
from ckpttool.execution import grouping
from ckpttool.execution.copy import CopyOptions, fill
from ckpttool.formats import local
from ckpttool.model import manifest as model_manifest
from ckpttool.model.layout import Layout
from ckpttool.model.tensors import FileStamp
from ckpttool.storage.files import PARTIAL
from ckpttool.storage.region_io import FlatFiles
from ckpttool.strategy_files.writer import write_strategy
from ckpttool.transaction.log import Log
from tests.support.checkpoints import noise, strategy_of, write_file
from tests.support.commands import message, run, run_well
from tests.support.executors import FORMATS, everything_in
from tests.support.manifests import LOG, MANIFEST, RECORD

RANKS, ROWS, COLUMNS = 4, 16, 64
KILLED, STOPPED = 77, 128 + signal.SIGTERM
NAMES = ("a", "b", "c")
CAST = ("--dtype", "bf16", "--on-overflow", "inf")
TOTAL = len(NAMES) * ROWS * COLUMNS * 4


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Units of four rows, tasks of a few units, and a line of the log after each task."""
    monkeypatch.setattr(model_manifest, "UNIT_BYTES", 256)
    monkeypatch.setattr(execute_module, "MIN_GROUP_BYTES", 1)
    monkeypatch.setattr(grouping, "MIN_GAP_BYTES", 1)  # all outputs are written at the same time
    real = execute_module.schedule
    sizes = {"task_bytes": 1 << 10, "band_bytes": 256}

    def schedule(plan, ranks, options, **how):
        return real(plan, ranks, CopyOptions(**sizes), **how)

    monkeypatch.setattr(execute_module, "schedule", schedule)


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """Files of four ranks that shard rows, and strategies of rows and of columns."""
    folder = tmp_path_factory.mktemp("case")
    entries = {name: noise(name, "Float32", (ROWS, COLUMNS)) for name in NAMES}
    write_file(folder / "m.ckpt", entries, "ckpt")
    for name, axes in (("rows", ((0,), ())), ("columns", ((), (0,)))):
        layouts = dict.fromkeys(NAMES, Layout((RANKS,), axes))
        write_strategy(strategy_of(layouts), str(folder / f"{name}.ckpt"))
    run_well(
        "split",
        folder / "m.ckpt",
        "-d",
        folder / "rows.ckpt",
        "-o",
        folder / "src",
        "--format",
        "ckpt",
    )
    (folder / "src" / MANIFEST).unlink()  # its units are larger than those of the tests
    shutil.rmtree(folder / "src" / RECORD)
    return folder


def words_of(case, out, *more):
    words = ["reshard", case / "src", "-s", case / "rows.ckpt", "-d", case / "columns.ckpt"]
    return [*words, "-o", out, "--engine", "inline", *more]


def kill(words, calls, end=lambda: os._exit(KILLED), said=None):
    """Run a command in a process that ends before this call of `fill`; return whether it did.

    What it says is written to the file ``said``.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of fork beside a thread of pytest
        child = os.fork()
    if not child:
        seen = []

        def count(task):
            seen.append(task)
            if len(seen) == calls:
                end()
            return fill(task)

        execute_module.fill = count
        result = run(*words)
        if said is not None:
            said.write_text(message(result))
        os._exit(result.exit_code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, KILLED, STOPPED)
    return code != 0


@pytest.fixture
def written(monkeypatch):
    sizes, real = [], FlatFiles.write_bytes

    def write(files, tensor, offset, data):
        sizes.append(len(data))
        real(files, tensor, offset, data)

    monkeypatch.setattr(FlatFiles, "write_bytes", write)
    return sizes


def logged_bytes(out):
    (of_plan,) = Log.read(out / LOG).units.values()
    groups = [group for groups in of_plan.values() for group in groups]
    return sum(256 * len(group.read_units().hashes) for group in groups)


@pytest.mark.parametrize("output_format", FORMATS)
@pytest.mark.parametrize(
    "more", [(), ("--dtype", "bf16", "--on-overflow", "inf"), ("--crc",)], ids=["", "cast", "crc"]
)
def test_what_is_logged_is_not_written_again_wherever_the_run_was_killed(
    case, tmp_path, written, output_format, more
):
    if "--crc" in more and output_format == "hdf5":
        pytest.skip("it has no checksum")
    out, wanted = tmp_path / "out", tmp_path / "wanted"
    total = TOTAL // 2 if more == CAST else TOTAL
    run_well(*words_of(case, wanted, "--format", output_format, *more))
    assert sum(written) == total
    expected, calls = everything_in(wanted), 0
    while kill(words := words_of(case, out, "--format", output_format, *more), calls := calls + 1):
        logged = logged_bytes(out)
        assert (logged > 0) == (calls > 1)
        written.clear()
        run_well(*words, "--resume")
        assert sum(written) == total - logged
        assert everything_in(out) == expected
        shutil.rmtree(out)
    assert calls > 3


def test_runs_that_are_killed_one_after_the_other_write_each_unit_once(case, tmp_path, written):
    out, words = tmp_path / "out", words_of(case, tmp_path / "out")
    assert kill(words, 2)
    first = logged_bytes(out)
    assert kill([*words, "--resume"], 2)
    second = logged_bytes(out)
    assert second > first > 0
    written.clear()
    run_well(*words, "--resume")
    assert sum(written) == TOTAL - second
    run_well(*words_of(case, tmp_path / "wanted"))
    assert everything_in(out) == everything_in(tmp_path / "wanted")


@pytest.mark.parametrize(("calls", "signals"), [(1, 1), (2, 1), (5, 1), (1, 3), (5, 3)])
def test_a_stop_leaves_the_files_that_a_resumed_run_goes_on_in(
    case, tmp_path, written, calls, signals
):
    def stop():
        for _ in range(signals):
            signal.raise_signal(signal.SIGTERM)

    out, words = tmp_path / "out", words_of(case, tmp_path / "out")
    assert kill(words, calls, stop, said=tmp_path / "said")
    hint = "the same command with --resume" if calls > 1 else "the same command"
    assert (tmp_path / "said").read_text().endswith(f"Try: {hint}")
    left = [*out.rglob(f"*{PARTIAL}")] if out.exists() else []
    logged = logged_bytes(out) if left else 0
    assert bool(left) == (calls > 1)
    run_well(*words, "--resume")
    assert sum(written) == TOTAL - logged
    run_well(*words_of(case, tmp_path / "wanted"))
    assert everything_in(out) == everything_in(tmp_path / "wanted")


def spoil_contents(path, out):
    data = bytearray(path.read_bytes())
    data[::128] = bytes(byte ^ 1 for byte in data[::128])
    path.write_bytes(data)


def spoil_size(path, out):
    with path.open("ab") as file:
        file.write(b"x")


def give_another_name(path, out):
    (out / "linked").hardlink_to(path)


def remove(path, out):
    path.unlink()


@pytest.mark.parametrize("spoil", [spoil_contents, spoil_size, give_another_name, remove])
def test_a_file_that_is_not_as_the_log_says_is_begun_anew(case, tmp_path, written, spoil):
    out, words = tmp_path / "out", words_of(case, tmp_path / "out")
    assert kill(words, 3)
    path, logged = next(out.glob("rank_1/*.partial")), logged_bytes(out)
    spoil(path, out)
    linked = out / "linked"
    left = linked.read_bytes() if linked.exists() else b""
    run_well(*words, "--resume")
    assert TOTAL - logged < sum(written) < TOTAL
    if left:
        assert linked.read_bytes() == left
        linked.unlink()
    run_well(*words_of(case, tmp_path / "wanted"))
    assert everything_in(out) == everything_in(tmp_path / "wanted")


def test_a_run_anew_that_is_killed_does_not_leave_the_units_of_the_run_before(case, tmp_path):
    out, words = tmp_path / "out", words_of(case, tmp_path / "out")
    assert kill(words, 4)
    before = logged_bytes(out)
    assert kill(words, 2)
    assert 0 < logged_bytes(out) < before
    run_well(*words, "--resume")
    run_well(*words_of(case, tmp_path / "wanted"))
    assert everything_in(out) == everything_in(tmp_path / "wanted")


def test_a_source_with_other_contents_under_the_same_stamp_is_refused(case, tmp_path, monkeypatch):
    source = tmp_path / "case"
    shutil.copytree(case, source)
    monkeypatch.setattr(local, "as_stamp", lambda left: FileStamp(left.st_size, 1, 1, left.st_ino))
    words = words_of(source, tmp_path / "out")
    assert kill(words, 3)
    for path in (source / "src").rglob("*.ckpt"):
        data = bytearray(path.read_bytes())
        data[200:900:16] = bytes(byte ^ 1 for byte in data[200:900:16])
        path.write_bytes(data)
    result = run(*words, "--resume")
    assert result.exit_code == 7, message(result)
    assert "differs from what the same command wrote before" in message(result)
    assert not Path(tmp_path / "out" / MANIFEST).exists()


def test_parts_go_on_in_what_a_whole_run_has_left(case, tmp_path, written):
    out, words = tmp_path / "out", words_of(case, tmp_path / "out")
    assert kill(words, 4)
    logged = logged_bytes(out)
    for part in ("1/2", "2/2"):
        run_well(*words, "--part", part, "--resume")
    assert sum(written) == TOTAL - logged
    run_well("finalize", out)
    run_well(*words_of(case, tmp_path / "wanted"))
    assert everything_in(out) == everything_in(tmp_path / "wanted")
