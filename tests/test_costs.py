"""What a run costs, in counts: system calls and bytes for each byte written; never in seconds."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace

import pytest

import ckpttool
from ckpttool.formats import get_format
from ckpttool.model.catalog import Catalog, TensorMeta
from ckpttool.model.layout import Layout
from ckpttool.model.remarks import find_contradictions
from ckpttool.model.sources import find_sources
from tests.checkpoints import catalog_of, strategy_of

MIB = 1 << 20
RANKS = 4
SHAPE = (8192, 1024)  # of float32: 32 MiB, and rows of 1 KiB in slices of columns
NBYTES = SHAPE[0] * SHAPE[1] * 4
WAYS = {
    name: replace(strategy_of({"w": Layout((RANKS,), tensor_map)}), files=())
    for name, tensor_map in (("rows", ((0,), ())), ("columns", ((), (0,))))
}


@pytest.fixture
def calls(monkeypatch):
    """How often each of the calls that move data was made, and bytes by them."""
    counts = Counter()

    def count(name, size):
        call = getattr(os, name)

        def counted(*given):
            counts[name] += 1
            counts[f"{name} bytes"] += size(given[1])
            return call(*given)

        monkeypatch.setattr(os, name, counted)

    count("preadv", lambda parts: sum(map(len, parts)))
    count("pwritev", lambda parts: sum(map(len, parts)))
    return counts


@pytest.fixture(params=WAYS)
def source(request, tmp_path):
    """A catalog and its strategy: one tensor over four ranks, all holes."""
    strategy = WAYS[request.param]
    for rank in range(RANKS):
        path = tmp_path / "src" / f"rank_{rank}" / "net.ckpt"
        path.parent.mkdir(parents=True)
        shape = strategy.layouts["w"][0].slice_shape(rank, SHAPE)
        get_format("ckpt").create(str(path), [TensorMeta("w", "Float32", shape)], {})
    return ckpttool.scan(str(tmp_path / "src")), strategy


def assert_frugal(calls, files=1):
    assert calls["preadv bytes"] == calls["pwritev bytes"] == NBYTES
    # Calls for more than 1 MiB would be slower; at both ends of a band a page is written in part.
    assert calls["pwritev"] <= NBYTES / MIB * 4 + files
    assert calls["preadv"] <= NBYTES / MIB * 2 + files


@pytest.mark.parametrize("format", ["ckpt", "hdf5", "safetensors"])
def test_a_merge_reads_each_byte_once_and_takes_six_calls_for_a_mebibyte(
    source, tmp_path, calls, format
):
    catalog, strategy = source
    plan = ckpttool.plan_merge(catalog, strategy, f"{tmp_path}/m.x", format)
    calls.clear()
    ckpttool.execute(plan)
    assert_frugal(calls)


@pytest.mark.parametrize("target", WAYS)
def test_so_does_a_reshard(source, tmp_path, calls, target):
    catalog, strategy = source
    plan = ckpttool.plan_reshard(catalog, strategy, WAYS[target], f"{tmp_path}/out", "ckpt")
    calls.clear()
    ckpttool.execute(plan)
    assert_frugal(calls, files=RANKS)


@pytest.mark.parametrize("names", [20, 60])
def test_names_of_all_ranks_are_gone_through_a_few_times_whatever_is_found(monkeypatch, names):
    """Each time costs as much as there are ranks and names; once for each name would be too much.

    One weight was renamed, the second stage holds what is listed for the first, and no state is
    listed.
    """
    counts = Counter()

    def counted(name):
        find = getattr(Catalog, name).fget

        def count(self):
            counts[name] += 1
            return find(self)

        monkeypatch.setattr(Catalog, name, property(count))

    counted("metas")
    counted("holders")
    rows = Layout((2,), ((0,), ()))
    listed = {f"w{i}": rows for i in range(names)}
    held = {f"{prefix}w{i}": (4, 4) for prefix in ("", "adam_m.") for i in range(1, names)}
    strategy = strategy_of(listed, {"last": rows})
    catalog = catalog_of({rank: {**held, "renamed": (4, 4)} for rank in range(4)})
    found = [*find_contradictions(catalog, strategy)]
    assert "lists for other stages only" in found[0].text
    find_sources(catalog, strategy, {}, "first")
    assert max(counts.values()) < 20
