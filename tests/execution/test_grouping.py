"""Outputs that want parts of the same rows: read once, written as if each were alone."""

from __future__ import annotations

import gc
import os
import pickle
import tracemalloc
from math import prod
from pathlib import Path

import pytest
from msgspec.structs import replace

import ckpttool
from ckpttool.execution import grouping
from ckpttool.execution.copy import CopyOptions, cut_into_tasks, read_amplification
from ckpttool.execution.execute import execute
from ckpttool.execution.grouping import group_ranks
from ckpttool.formats import header_of
from ckpttool.model import manifest, region
from ckpttool.model.layout import Layout
from ckpttool.model.region import Region
from ckpttool.model.tensors import StoredFile
from tests.support.checkpoints import cut, noise, slice_catalog, strategy_of, write_ranks
from tests.support.commands import files_below
from tests.support.in_memory import make
from tests.support.plans import plan_reshard

RANKS = 8


def strategy(matrix, tensor_map):
    cut_alike = strategy_of({name: Layout(matrix, tensor_map) for name in ("w", "v")})
    return replace(cut_alike, files=())


ROWS, COLUMNS = strategy((RANKS,), ((0,), ())), strategy((RANKS,), ((), (0,)))
SHAPES = {"w": (1024, 4096), "v": (40, 24)}
OPTIONS = CopyOptions(band_bytes=1 << 18, task_bytes=1 << 20)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    entries = {name: noise(name, "Float32", shape) for name, shape in SHAPES.items()}
    return write_ranks(tmp_path_factory.mktemp("source"), cut(entries, ROWS), "ckpt")


@pytest.fixture(autouse=True)
def small_units(monkeypatch):
    monkeypatch.setattr(manifest, "UNIT_BYTES", 1 << 17)


def transpose(source, folder):
    catalog = ckpttool.scan(str(source))
    return plan_reshard(
        catalog, ROWS, COLUMNS, str(folder), output_options=ckpttool.OutputOptions("ckpt")
    )


def contents(folder):
    return {name: (folder / name).read_bytes() for name in files_below(folder, manifests=True)}


@pytest.fixture
def bytes_read(monkeypatch):
    """The size of every read, in order."""
    sizes = []
    preadv = os.preadv

    def noted(fd, parts, at):
        sizes.append(sum(map(len, parts)))
        return preadv(fd, parts, at)

    monkeypatch.setattr(os, "preadv", noted)
    return sizes


@pytest.mark.parametrize("engine", ["inline", "threads:3"])
def test_rows_of_which_every_output_wants_a_part_are_read_once(
    source, tmp_path, monkeypatch, bytes_read, engine
):
    plans = [transpose(source, tmp_path / name) for name in ("together", "alone")]
    bytes_read.clear()
    with ckpttool.open_engine(engine) as executor:
        execute(*plans[0], executor, options=OPTIONS)
        once = sum(bytes_read)
        bytes_read.clear()
        monkeypatch.setattr(grouping, "MAX_OUTPUTS", 1)
        execute(*plans[1], executor, options=OPTIONS)
    nbytes = 4 * sum(rows * columns for rows, columns in SHAPES.values())
    assert nbytes <= once < 1.3 * nbytes
    assert sum(bytes_read) > 7 * nbytes
    assert contents(tmp_path / "together") == contents(tmp_path / "alone")


def test_all_that_is_read_for_a_band_fits_into_the_scratch_buffer(source, tmp_path, bytes_read):
    plan, destination = transpose(source, tmp_path / "out")
    bytes_read.clear()
    execute(plan, destination, options=OPTIONS)
    assert max(bytes_read) <= OPTIONS.band_bytes
    assert len(bytes_read) < 3 * 4 * 1024 * 4096 // OPTIONS.band_bytes


def groups(src, dst, shape, ranks=RANKS):
    catalog = slice_catalog(src, dict.fromkeys(src.layouts, shape))
    plan = make(catalog, src, dst)
    return [[*group] for group in group_ranks(plan, 1 << 16)]


def test_those_that_want_parts_of_the_same_rows_are_written_together(monkeypatch):
    everyone = list(range(RANKS))
    alone = [[rank] for rank in everyone]
    assert groups(ROWS, COLUMNS, SHAPES["w"]) == [everyone]
    assert groups(ROWS, ROWS, SHAPES["w"]) == alone
    assert groups(COLUMNS, ROWS, SHAPES["w"]) == alone
    assert groups(ROWS, COLUMNS, (64, 64)) == alone  # so little that it does not matter
    assert groups(ROWS, COLUMNS, (128, 4096)) == [everyone]  # little of each, but much in between
    halves = strategy((2, 4), ((1,), (0,)))
    assert groups(ROWS, halves, SHAPES["w"]) == [everyone[:4], everyone[4:]]
    turned = strategy((2, 4), ((0,), (1,)))  # ranks with the same rows are four apart
    assert groups(ROWS, turned, SHAPES["w"]) == [[rank, rank + 4] for rank in range(4)]
    monkeypatch.setattr(grouping, "MAX_OUTPUTS", 3)
    assert groups(ROWS, COLUMNS, SHAPES["w"]) == [[0, 1, 2], [3, 4, 5], [6, 7]]


def test_a_tensor_of_which_rows_are_shared_counts_though_a_larger_one_comes_whole():
    cuts = {"large": ((0,), ()), "small": ((), (0,))}
    target = strategy_of({name: Layout((RANKS,), cut) for name, cut in cuts.items()})
    source = strategy_of({name: Layout((RANKS,), ((0,), ())) for name in cuts})
    catalog = slice_catalog(source, {"large": (2048, 4096), "small": (1024, 4096)})
    plan = make(catalog, source, replace(target, files=()))
    assert [len(group) for group in group_ranks(plan, 1 << 16)] == [RANKS]


def test_outputs_of_many_tensors_are_fewer_at_a_time():
    catalog = slice_catalog(ROWS, SHAPES)
    plan = make(catalog, ROWS, COLUMNS)  # two tensors each
    sizes = [[len(group) for group in group_ranks(plan, most)] for most in (1, 4, 7, 16)]
    assert sizes == [[1] * 8, [2] * 4, [3, 3, 2], [8]]


def test_many_small_tensors_count_as_much_as_one_large():
    names = [f"w{i}" for i in range(64)]
    rows, columns = (
        strategy_of({name: Layout((RANKS,), cut) for name in names})
        for cut in (((0,), ()), ((), (0,)))
    )
    for few, expected in (([names[0]], 8 * [1]), (names, [RANKS])):
        src, dst = (
            replace(way, layouts={name: way.layouts[name] for name in few}, files=())
            for way in (rows, columns)
        )
        plan = make(slice_catalog(src, dict.fromkeys(few, (64, 512))), src, dst)
        assert [len(group) for group in group_ranks(plan, 1 << 16)] == expected


def test_small_tensors_of_many_kinds_count_together_for_the_files_that_they_share():
    names = [f"w{i}" for i in range(64)]
    rows, columns = (
        replace(strategy_of({name: Layout((RANKS,), cut) for name in names}), files=())
        for cut in (((0,), ()), ((), (0,)))
    )
    shapes = {name: (64, 512 + 8 * i) for i, name in enumerate(names)}
    plan = make(slice_catalog(rows, shapes), rows, columns)
    assert len(plan.kinds) == len(names)
    assert group_ranks(plan, 1 << 16) == [tuple(range(RANKS))]


def test_the_rows_that_all_outputs_read_count_more_than_larger_ones_that_only_some_read():
    shapes = {"all": (64, 1 << 14), "some": (256, 1 << 14)}
    source = replace(strategy_of({name: Layout((2,), ((0,), ())) for name in shapes}), files=())
    layouts = {"all": Layout((4,), ((), (0,))), "some": Layout((2, 2), ((1,), (0,)))}
    for names, expected in ((["some"], [(0, 1), (2, 3)]), (["all", "some"], [(0, 1, 2, 3)])):
        target = replace(strategy_of({name: layouts[name] for name in names}), files=())
        mine = replace(source, layouts={name: source.layouts[name] for name in names})
        plan = make(slice_catalog(mine, {name: shapes[name] for name in names}), mine, target)
        assert group_ranks(plan, 1 << 16) == expected


def test_what_lies_beside_a_middle_axis_is_read_once_for_all(tmp_path, bytes_read):
    shape = (64, 16, 8, 64)
    rows, inner = (
        replace(strategy_of({"w": Layout(matrix, tensor_map)}), files=())
        for matrix, tensor_map in (((2,), ((0,), (), (), ())), ((2, 4), ((), (0,), (), (1,))))
    )
    entries = {"w": noise("w", "Float32", shape)}
    source = write_ranks(tmp_path / "source", cut(entries, rows), "ckpt")
    catalog = ckpttool.scan(str(source))
    plan, destination = plan_reshard(
        catalog, rows, inner, str(tmp_path / "out"), output_options=ckpttool.OutputOptions("ckpt")
    )
    bytes_read.clear()
    execute(plan, destination, options=OPTIONS)
    assert sum(bytes_read) < 1.3 * 4 * prod(shape)
    for rank, tensors in cut(entries, inner).items():
        (output,) = (output for output in plan if output.rank == rank)
        index = ckpttool.formats.get_format("ckpt").read_index(StoredFile(output.path))
        (extent,) = index.tensors["w"].extents
        data = Path(output.path).read_bytes()[extent.offset : extent.offset + extent.nbytes]
        assert data == tensors["w"].data


def test_what_is_read_for_a_piece_counts_the_bytes_between_its_runs():
    plan = make(slice_catalog(ROWS, SHAPES), ROWS, COLUMNS)
    tensor = next(t for t in next(iter(plan)).tensors if t.meta.name == "w")
    pieces = list(tensor.pieces(Region.whole(tensor.meta.shape)))
    assert [read_amplification(piece) for piece in pieces] == [8.0] * 8
    whole = make(slice_catalog(ROWS, SHAPES), ROWS, None)
    tensor = next(iter(whole)).tensors[0]
    pieces = list(tensor.pieces(Region.whole(tensor.meta.shape)))
    assert [read_amplification(piece) for piece in pieces] == [1.0] * 8


def cut_up(outputs, **sizes):
    nowhere = [(output, header_of(output).of_file(StoredFile(output.path))) for output in outputs]
    return cut_into_tasks(nowhere, replace(OPTIONS, **sizes))


def outputs_of(rows, columns=4096, target=COLUMNS):
    catalog = slice_catalog(ROWS, dict.fromkeys(ROWS.layouts, (rows, columns)))
    return list(make(catalog, ROWS, target))


def without_v(outputs):
    return [replace(output, tensors=output.tensors[-1:]) for output in outputs]


def test_a_task_holds_a_unit_of_each_output_however_large_the_tensor_and_small_the_bands():
    for rows in (1024, 1 << 13):
        tasks = cut_up(without_v(outputs_of(rows)))
        assert {len(task.units) for task in tasks} == {RANKS}


@pytest.mark.big
def test_the_memory_of_planning_does_not_grow_with_the_tensor():
    peaks = []
    for rows in (1 << 13, 1 << 14):  # more units than are remembered, of either
        outputs = outputs_of(rows)
        tracemalloc.start()
        count = sum(1 for _ in cut_up(outputs))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert count == 2 * rows // 64  # units of 64 rows, of either tensor
    assert peaks[1] < 1.2 * peaks[0]


def test_a_task_ends_also_where_the_units_of_its_outputs_never_do_together():
    many, few = (strategy((8 * n,), ((), (0,))) for n in (3, 1))
    both = [without_v(outputs_of(600 * 8, 3072, target))[0] for target in (many, few)]
    both = [replace(output, path=str(number)) for number, output in enumerate(both)]
    tasks = list(cut_up(both))
    nbytes = sum(task.nbytes for task in tasks)
    assert nbytes == sum(meta.nbytes for output in both for meta in output.metas)
    most = OPTIONS.task_bytes + (len(both) + 1) * manifest.UNIT_BYTES
    assert nbytes > most >= max(task.nbytes for task in tasks)
    units = {(unit.tensor.file.path, unit.cut.number) for task in tasks for unit in task.units}
    assert len(units) == sum(len(task.units) for task in tasks)


def test_a_task_with_many_pieces_ends_with_the_unit():
    outputs = without_v(outputs_of(64))  # one unit each, of eight pieces
    assert [len(task.units) for task in cut_up(outputs)] == [RANKS]
    assert [len(task.units) for task in cut_up(outputs, task_pieces=20)] == [3, 3, 2]


def test_pieces_are_counted_without_reckoning_them():
    for output in outputs_of(64, target=strategy((4, 2), ((0,), (1,)))):
        for tensor in output.tensors:
            for band in Region.whole(tensor.meta.shape).bands(1000):
                assert tensor.count_pieces(band) == len([*tensor.pieces(band)]) > 0


@pytest.mark.big
def test_a_task_holds_no_pieces_however_many_slices_fill_a_unit():
    sizes = []
    for ranks in (64, 1024):
        columns, rows = (strategy((ranks,), cut) for cut in (((), (0,)), ((0,), ())))
        catalog = slice_catalog(columns, dict.fromkeys(columns.layouts, (ranks, ranks)))
        outputs = list(make(catalog, columns, rows))[:8]
        for task in cut_up(outputs):
            list(task.units)  # once before, for what is kept of layouts
        gc.collect()
        tracemalloc.start()
        tasks = list(cut_up(outputs))
        gc.collect()
        sizes.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
        assert sum(len(task.units) for task in tasks) == 2 * 8
    assert sizes[1] < sizes[0] + 8192  # a byte for each piece would be 15 KiB more


def test_another_process_is_sent_the_slices_of_a_unit_and_not_the_catalog():
    sizes = []
    for ranks in (64, 1024):
        rows = strategy((ranks,), ((0,), ()))
        catalog = slice_catalog(rows, dict.fromkeys(rows.layouts, (ranks, 16)))
        (task,) = cut_up(list(make(catalog, rows, rows))[:1])
        sizes.append(len(pickle.dumps(task)))
    assert sizes[1] < sizes[0] + 100


def test_any_budget_writes_the_same_bytes(source, tmp_path):
    execute(*transpose(source, tmp_path / "alone"))
    for band_bytes, pieces in ((1 << 14, 3), (1 << 22, 20)):
        tight = CopyOptions(band_bytes, OPTIONS.task_bytes, task_pieces=pieces)
        execute(*transpose(source, tmp_path / str(pieces)), options=tight)
        assert contents(tmp_path / str(pieces)) == contents(tmp_path / "alone")


def test_a_band_looks_only_at_the_pieces_that_are_near_it(source, tmp_path, monkeypatch):
    plan, destination = transpose(source, tmp_path)
    monkeypatch.setattr(manifest, "UNIT_BYTES", 1 << 23)  # all eight pieces of an output
    looked = []
    touched = region._touched
    monkeypatch.setattr(
        region, "_touched", lambda *axis: looked.append(len(touched(*axis))) or touched(*axis)
    )
    execute(plan, destination, options=CopyOptions(band_bytes=1 << 16))  # a band has four rows
    bands = RANKS * SHAPES["w"][0] / 4
    assert 2 * bands <= sum(looked) < 2.5 * bands  # one slice on each of two axes
