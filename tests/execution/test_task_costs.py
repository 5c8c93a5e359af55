"""What the tasks of a run read is said before, on this host and by workers of a cluster."""

from __future__ import annotations

import os

import pytest
from msgspec.structs import replace

import ckpttool
from ckpttool.execution import cluster
from ckpttool.execution import execute as execute_module
from ckpttool.execution.copy import CopyOptions, read_bands
from ckpttool.execution.execute import execute
from ckpttool.execution.schedule import schedule
from ckpttool.execution.task_costs import survey
from ckpttool.formats import header_of
from ckpttool.model.layout import Layout
from ckpttool.model.tensors import Reads, StoredFile
from ckpttool.storage.counting import CountingFiles
from tests.support.checkpoints import catalog_on_disk, cut, noise, strategy_of, write_holes
from tests.support.plans import plan_reshard

RANKS, SHAPE, NBYTES = 4, (2048, 2048), 16 << 20
ROWS, COLUMNS = (
    replace(strategy_of({"w": Layout((RANKS,), tensor_map)}), files=())
    for tensor_map in (((0,), ()), ((), (0,)))
)


@pytest.fixture
def plan_of_columns(tmp_path):
    for rank in range(RANKS):
        write_holes(tmp_path / f"src/rank_{rank}/net.ckpt", (SHAPE[0] // RANKS, SHAPE[1]))
    catalog = ckpttool.scan(str(tmp_path / "src"))
    return plan_reshard(catalog, ROWS, COLUMNS, str(tmp_path / "out"))


@pytest.fixture
def done(monkeypatch):
    """The bytes of each read, and the tasks."""
    reads, tasks, preadv = [], [], os.preadv

    def counted(fd, parts, at):
        reads.append(len(parts[0]))
        return preadv(fd, parts, at)

    monkeypatch.setattr(os, "preadv", counted)
    for module in (cluster, execute_module):

        def filled(task, fill=module.fill):
            tasks.append(task)
            return fill(task)

        monkeypatch.setattr(module, "fill", filled)
    return reads, tasks


def test_outputs_that_share_rows_read_them_once_on_this_host(plan_of_columns, done):
    plan, assignment = plan_of_columns
    work = survey(plan, assignment.ranks, CopyOptions(), by_file=False)
    execute(plan, assignment)
    reads, tasks = done
    assert (work.reads.requests, work.reads.nbytes) == (len(reads), sum(reads))
    assert (work.tasks, work.reads.nbytes, work.over_read) == (len(tasks), NBYTES, 0)


def test_each_worker_of_a_cluster_reads_them_for_itself(plan_of_columns, done, threads):
    plan, assignment = plan_of_columns
    work = survey(plan, assignment.ranks, CopyOptions(), by_file=True)
    execute(plan, assignment, threads)
    reads, tasks = done
    assert (work.reads.requests, work.reads.nbytes) == (len(reads), sum(reads))
    assert (work.tasks, work.reads.nbytes) == (len(tasks), RANKS * NBYTES)
    assert work.over_read == (RANKS - 1) * NBYTES


def test_every_target_rank_has_its_sources_in_full(plan_of_columns):
    plan, assignment = plan_of_columns
    work = survey(plan, assignment.ranks, CopyOptions(), by_file=False)
    (supply,) = work.supplies
    assert supply.ranks == tuple(range(RANKS))
    assert supply.nbytes == dict.fromkeys(((0, one) for one in range(RANKS)), NBYTES // RANKS**2)


def one_by_one(plan, options):
    """Return the reads of all tasks, none of which is taken for alike, and what they write."""
    reads, written = Reads(), 0
    for batch in schedule(plan, plan.target.paths, options, by_file=False):
        indexes = [
            header_of(output).of_file(StoredFile(f"{output.path}.partial"))
            for output in batch.outputs
        ]
        for task in batch.tasks(indexes):
            with CountingFiles(task.band_bytes) as files:
                written += sum(band.data.nbytes for _, band in read_bands(task, files))
                reads += files.take_reads()
    return reads.requests, reads.nbytes, written


def test_ranks_with_means_alone_read_the_rows_of_all(tmp_path):
    for rank in range(2):
        write_holes(tmp_path / f"src/rank_{rank}/net.ckpt", (2, 4))
    source, target = (
        replace(strategy_of({"w": Layout((ranks,), ((0,), ()))}), files=()) for ranks in (2, 4)
    )
    options = {"pad_vocab": 8, "pad_with": "mean", "vocab": "w", "dry_run": True}
    src, out = tmp_path / "src", tmp_path / "out"
    done = ckpttool.reshard(src, source, target, out, format="ckpt", **options)
    sources = done.dry_run.sources
    needs = {rank: [need.ranks for need in it.needs] for it in sources for rank in it.ranks}
    assert needs == {0: [(0,)], 1: [(1,)], 2: [(0, 1)], 3: [(0, 1)]}


@pytest.mark.parametrize("known", [1, 10_000])
def test_alike_tensors_are_counted_as_each_by_itself(tmp_path, monkeypatch, known):
    monkeypatch.setattr("ckpttool.execution.task_costs.MAX_KNOWN", known)
    names = [f"layers.{i}.w" for i in range(6)]
    rows, columns = (
        replace(strategy_of(dict.fromkeys(names, one.layouts["w"][0])), files=())
        for one in (ROWS, COLUMNS)
    )
    entries = {name: noise(name, "Float32", (64, 32)) for name in names}
    catalog = catalog_on_disk(tmp_path / "src", cut(entries, rows))
    plan, assignment = plan_reshard(catalog, rows, columns, str(tmp_path / "out"))
    options = CopyOptions(band_bytes=1 << 12, task_bytes=1 << 14)
    work = survey(plan, assignment.ranks, options, by_file=False)
    assert (work.reads.requests, work.reads.nbytes, work.written) == one_by_one(plan, options)
