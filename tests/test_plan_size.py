"""Large plans: what is held does not grow with the number of pieces."""

from __future__ import annotations

import tracemalloc

from ckpttool.model import layout
from ckpttool.model.layout import Layout
from ckpttool.model.region import Region
from tests.checkpoints import slice_catalog, strategy_of
from tests.in_memory import make

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
    assert len({id(layout) for layouts in rows.layouts.values() for layout in layouts}) == 1


def test_tensors_that_are_cut_alike_are_reckoned_once(monkeypatch):
    rows = strategy(((0,), ()))
    catalog = slice_catalog(rows, dict.fromkeys(rows.layouts, (3 * RANKS, 5)))
    plan = make(catalog, rows, strategy_of({f"w{i}": Layout((96,), ((0,), ())) for i in range(3)}))
    asked = []
    reckon = layout.grid_overlaps
    monkeypatch.setattr(layout, "grid_overlaps", lambda *of: asked.append(of) or reckon(*of))
    assert walk(plan)[0] == 3 * 2 * 96
    assert len(asked) == 96
