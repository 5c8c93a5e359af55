"""A budget of memory is kept, as the kernel counts it, or refused with the least that works."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

import ckpttool
from ckpttool.execution import memory
from ckpttool.execution.copy import CopyOptions
from ckpttool.execution.executors import RunOptions
from ckpttool.execution.memory import MIB, fit_memory
from ckpttool.formats import get_format
from ckpttool.model.layout import Layout
from ckpttool.model.tensors import TensorMeta
from ckpttool.problems import PlanError
from ckpttool.system import peak_bytes
from tests.support.checkpoints import create_file, strategy_of, write_holes
from tests.support.commands import files_below, message, run, run_well

LAYOUT = '{"parallel_layout_item": {"w": {"dev_matrix": [%d], "tensor_map": [%s]}}}'
SHAPE = (1 << 14, 2048)  # 128 MiB

# Runs the command line and prints the peak, which the kernel resets when a program starts.
MEASURE = """
import sys
from ckpttool.cli.main import main
from ckpttool.system import peak_bytes
try:
    main(sys.argv[1:])
finally:
    print("PEAK", peak_bytes())
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source")
    for rank in range(4):
        write_holes(folder / "src" / f"rank_{rank}" / "net.ckpt", (SHAPE[0], SHAPE[1] // 4))
    (folder / "columns.json").write_text(LAYOUT % (4, "-1, 0"))
    return folder


def peak_of(*words):
    command = [sys.executable, "-c", MEASURE, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(re.search(r"PEAK (\d+)", done.stdout)[1])


def least_for(*words):
    result = run(*words, "--max-memory", "1MB")
    assert result.exit_code == 5
    return int(re.search(r"Try: --max-memory (\d+)MiB", message(result))[1])


def least_of_process(*words):
    command = [sys.executable, "-c", MEASURE, *map(str, words), "--max-memory", "1MB"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 5
    return int(re.search(r"Try: --max-memory (\d+)MiB", " ".join(done.stderr.split()))[1])


@pytest.mark.big
@pytest.mark.parametrize("engine", ["threads:1", "threads:6"])
@pytest.mark.parametrize("suffix", ["ckpt", "h5"])
def test_a_tensor_larger_than_the_budget_is_merged_within_it(source, tmp_path, engine, suffix):
    words = ["merge", source / "src", "-s", source / "columns.json", "-q", "--engine", engine]
    words += ["-o", tmp_path / f"m.{suffix}"]
    budget = least_of_process(*words) + 2  # the peak before the plan varies a little
    assert budget < 128  # the tensor has 128 MiB
    assert peak_of(*words, "--max-memory", f"{budget}MiB") <= budget * MIB
    assert (tmp_path / f"m.{suffix}").stat().st_size > 128 * MIB


RECIPE = """
recipe: fused
version: 1
source: a weight of 2 GiB
sizes: {f: rows, p: "2"}
rules:
- mindspore: {w: (f p) H}
  huggingface: {gate.weight: "(f p[0]) H", up.weight: "(f p[1]) H"}
"""


@pytest.mark.big
def test_a_fused_tensor_of_two_gibibytes_is_parted_in_67_megabytes(tmp_path):
    for rank in range(4):
        write_holes(tmp_path / "src" / f"rank_{rank}" / "net.ckpt", (1 << 14, 8192))
    (tmp_path / "rows.json").write_text(LAYOUT % (4, "0, -1"))
    (tmp_path / "fused.yaml").write_text(RECIPE)
    out, recipe = tmp_path / "m.safetensors", f"{tmp_path / 'fused.yaml'}:rows={1 << 15}"
    words = ["merge", tmp_path / "src", "-s", tmp_path / "rows.json", "-o", out, "-q"]
    assert peak_of(*words, "--recipe", recipe, "--max-memory", "67MB") <= 67_000_000
    assert ckpttool.scan(out).files[0].tensors["up.weight"].meta.shape == (1 << 15, 8192)


@pytest.mark.big
@pytest.mark.parametrize("jobs", ["1", "8"])
@pytest.mark.parametrize("columns", [True, False])
@pytest.mark.parametrize("suffix", ["ckpt", "h5"])
def test_a_run_of_a_gibibyte_takes_about_what_a_dry_run_says(tmp_path, suffix, columns, jobs):
    shape = (1 << 17, 512) if columns else (1 << 15, 2048)  # 256 MiB, of one of four ranks
    for rank in range(4):
        write_holes(tmp_path / "src" / f"rank_{rank}" / "net.ckpt", shape)
    (tmp_path / "s.json").write_text(LAYOUT % (4, "-1, 0" if columns else "0, -1"))
    words = ["merge", tmp_path / "src", "-s", tmp_path / "s.json", "-j", jobs]
    words += ["-o", tmp_path / f"m.{suffix}"]
    command = [sys.executable, "-m", "ckpttool", *map(str, words), "-n", "--json"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    expected = json.loads(said)["dry_run"]["memory"]["nbytes"]
    assert abs(peak_of(*words, "-q") - expected) < expected / 4
    assert (tmp_path / f"m.{suffix}").stat().st_size > 1 << 30


@pytest.mark.big
@pytest.mark.parametrize(("jobs", "sizes"), [("1", (512, 6144)), ("2", (6144, 12288))])
def test_outputs_that_are_written_together_keep_the_least_whatever_the_tensor(
    tmp_path, jobs, sizes
):
    (tmp_path / "rows.json").write_text(LAYOUT % (2, "0, -1"))
    (tmp_path / "columns.json").write_text(LAYOUT % (64, "-1, 0"))
    strategies = ["-s", tmp_path / "rows.json", "-d", tmp_path / "columns.json"]
    peaks = []
    for rows in sizes:  # 8 MiB are one task, 96 and 192 MiB some for each worker
        folder = tmp_path / str(rows)
        for rank in range(2):
            write_holes(folder / f"rank_{rank}" / "net.ckpt", (rows // 2, 4096))
        words = ["reshard", folder, *strategies, "-o", tmp_path / f"out{rows}", "-q", "-j", jobs]
        # Above the least, bands and groups take what is left; below, within the tolerance, nothing.
        budget = least_of_process(*words) - 1
        peaks.append(peak_of(*words, "--max-memory", f"{budget}MiB"))
        assert peaks[-1] <= budget * MIB
    assert abs(peaks[1] - peaks[0]) < 4 * MIB


@pytest.mark.big
@pytest.mark.parametrize("format", ["safetensors", "hdf5"])
def test_outputs_of_thousands_of_tensors_are_written_within_the_least(tmp_path, format):
    metas = [TensorMeta(f"w{i}", "Float32", (16, 16)) for i in range(4000)]
    create_file(get_format("safetensors"), str(tmp_path / "all.safetensors"), metas, {})
    layouts = {meta.name: Layout((16,), ((), (0,))) for meta in metas}
    ckpttool.write_strategy(strategy_of(layouts), str(tmp_path / "columns.ckpt"))
    words = [
        "split",
        tmp_path / "all.safetensors",
        "-d",
        tmp_path / "columns.ckpt",
        "-q",
        "-j",
        "2",
    ]
    words += ["-o", tmp_path / "out", "--format", format, "--rank", "0-7"]
    budget = least_of_process(*words)
    assert peak_of(*words, "--max-memory", f"{budget}MiB") <= budget * MIB


@pytest.mark.big
def test_the_budget_decides_how_much_is_taken(source, tmp_path):
    words = ["merge", source / "src", "-s", source / "columns.json", "-q", "-j", "8"]
    small, large = (
        peak_of(*words, "-o", tmp_path / f"{size}.ckpt", "--max-memory", size)
        for size in ("72MiB", "1GiB")  # the modules of the program take about 40 MiB
    )
    assert small <= 72 * MIB
    assert large > small + 4 * MIB  # of two tasks, with buffers of 4 MiB


def test_too_small_a_budget_is_refused_with_the_least_that_works(source, tmp_path):
    words = ["merge", source / "src", "-s", source / "columns.json", "-o", tmp_path / "m.ckpt"]
    result = run(*words, "--max-memory", "20MiB", "-j", "3")
    assert result.exit_code == 5
    assert "20.0 MiB of memory is too little for threads:3" in message(result)
    assert ", or" not in message(result)  # one worker would not do with it either
    assert files_below(tmp_path) == []
    least = least_for(*words, "-j", "1")
    result = run_well(*words, "--max-memory", f"{least + 1}MiB", "-j", "1", "-q")
    assert (tmp_path / "m.ckpt").exists()


@pytest.mark.parametrize(("engine", "budget"), [("threads:6", 44), ("processes:3", 140)])
def test_fewer_workers_are_proposed_where_the_memory_is_enough_for_them(
    monkeypatch, engine, budget
):
    monkeypatch.setattr(memory, "peak_bytes", lambda: 30 * MIB)
    with pytest.raises(PlanError) as caught:
        fit_memory(RunOptions(engine, budget * MIB))
    (problem,) = caught.value.diagnostics
    said = re.search(r", or (?:-j |--engine processes:)(\d+)$", problem.hint)[1]
    fit_memory(RunOptions(f"{engine.partition(':')[0]}:{said}", budget * MIB))


@pytest.mark.parametrize("words", ["0B", "5", "-1MB", "much"])
def test_a_budget_is_a_size(tmp_path, words):
    source = tmp_path / "m.ckpt"
    create_file(get_format("ckpt"), str(source), [TensorMeta("w", "Int8", (4,))], {})
    result = run("merge", source, "-o", tmp_path / "n.ckpt", "--max-memory", words)
    assert result.exit_code == 2


def test_workers_share_the_budget_and_processes_have_memory_of_their_own():
    usual = CopyOptions().band_bytes
    spare = peak_bytes() + memory.RESERVE_BYTES
    assert fit_memory(RunOptions("threads:8", spare + 1024 * MIB)).band_bytes == usual
    assert fit_memory(RunOptions("threads:8", spare + 16 * MIB)).band_bytes <= MIB
    assert fit_memory(RunOptions("inline", spare + 16 * MIB)).band_bytes == usual
    assert fit_memory(RunOptions("threads:8", spare + 16 * MIB)).max_in_flight == 32
    with pytest.raises(ckpttool.PlanError, match="processes:8"):
        fit_memory(RunOptions("processes:8", spare + 8 * memory.PROCESS_BYTES))
    assert fit_memory(RunOptions("processes:8", spare + 8 * (memory.PROCESS_BYTES + 4 * MIB)))
    assert fit_memory(
        RunOptions("mpi", memory.RESERVE_BYTES + memory.PROCESS_BYTES + 4 * MIB)
    ).band_bytes
    assert fit_memory(
        RunOptions("dask:x", memory.RESERVE_BYTES + memory.DASK_BYTES + 4 * MIB)
    ).band_bytes
