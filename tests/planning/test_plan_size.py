"""Large plans: what is held does not grow with the number of pieces."""

from __future__ import annotations

import sys
import tracemalloc

import pytest

from ckpttool.model import layout as layout_module
from ckpttool.model.layout import Layout
from ckpttool.model.region import Region
from tests.support.checkpoints import slice_catalog, strategy_of
from tests.support.in_memory import make

RANKS = 128


def strategy(tensor_map):
    return strategy_of({f"w{i}": Layout((RANKS,), tensor_map) for i in range(3)})


def walk(plan):
    """Number of pieces, and bytes that were held at most while they were drawn."""
    tracemalloc.start()
    count = 0
    for output in plan:
        for tensor in output.tensors:
            for _ in tensor.pieces(Region.whole(tensor.meta.shape)):
                count += 1
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return count, peak


@pytest.mark.big
def test_memory_does_not_grow_with_the_number_of_pieces():
    rows, columns = strategy(((0,), ())), strategy(((), (0,)))
    catalog = slice_catalog(rows, dict.fromkeys(rows.layouts, (RANKS, RANKS)))
    walk(make(catalog, rows, columns))  # once before, for what is kept of layouts
    few, few_bytes = walk(make(catalog, rows, rows))
    many, many_bytes = walk(make(catalog, rows, columns))
    assert (few, many) == (3 * RANKS, 3 * RANKS**2)
    assert many_bytes < few_bytes + (32 << 10)  # a byte for each piece would be 48 KiB


def test_slices_of_one_shape_share_what_describes_them():
    rows = strategy(((0,), ()))
    catalog = slice_catalog(rows, dict.fromkeys(rows.layouts, (RANKS, 2)))
    plan = make(catalog, rows, rows)
    metas = {id(meta) for output in list(plan) for meta in output.metas}
    assert len(metas) == 3
    assert (
        len({id(layout_module) for layouts in rows.layouts.values() for layout_module in layouts})
        == 1
    )


def test_tensors_that_are_cut_alike_are_reckoned_once(monkeypatch):
    rows = strategy(((0,), ()))
    catalog = slice_catalog(rows, dict.fromkeys(rows.layouts, (3 * RANKS, 5)))
    plan = make(catalog, rows, strategy_of({f"w{i}": Layout((96,), ((0,), ())) for i in range(3)}))
    asked = []
    reckon = layout_module.grid_overlaps
    monkeypatch.setattr(layout_module, "grid_overlaps", lambda *of: asked.append(of) or reckon(*of))
    assert walk(plan)[0] == 3 * 2 * 96
    assert len(asked) == 96


def calls_of(function):
    """How many calls, of Python and of C, a function makes."""
    count = 0

    def note(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def test_the_work_of_planning_grows_with_the_parameters_and_no_faster():
    def plan_of(number):
        layouts = {f"w{i}": Layout((4,), ((0,), ())) for i in range(number)}
        catalog = slice_catalog(strategy_of(layouts), dict.fromkeys(layouts, (8, 8)))
        return lambda: list(make(catalog, strategy_of(layouts), strategy_of(layouts)))

    plan_of(50)()  # once before, for what is kept of layouts
    few, many = calls_of(plan_of(50)), calls_of(plan_of(400))
    assert many < 9 * few, f"{few} calls for 50 parameters, {many} for 400"
