"""What a run costs, in counts: system calls and bytes for each byte written; never in seconds."""

from __future__ import annotations

import os
from collections import Counter

import pytest
from msgspec.structs import replace

import ckpttool
from ckpttool.model.catalog import Catalog
from ckpttool.model.layout import Layout
from tests.support.checkpoints import catalog_on_disk, noise, strategy_of, write_holes
from tests.support.plans import plan_merge, plan_reshard

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
    strategy = WAYS[request.param]
    for rank in range(RANKS):
        shape = strategy.layouts["w"][0].slice_shape(rank, SHAPE)
        write_holes(tmp_path / "src" / f"rank_{rank}" / "net.ckpt", shape)
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
    plan, destination = plan_merge(
        catalog, strategy, f"{tmp_path}/m.x", output_options=ckpttool.OutputOptions(format)
    )
    calls.clear()
    ckpttool.execute(plan, destination)
    assert_frugal(calls)


@pytest.mark.parametrize("target", WAYS)
def test_so_does_a_reshard(source, tmp_path, calls, target):
    catalog, strategy = source
    plan, destination = plan_reshard(
        catalog,
        strategy,
        WAYS[target],
        f"{tmp_path}/out",
        output_options=ckpttool.OutputOptions("ckpt"),
    )
    calls.clear()
    ckpttool.execute(plan, destination)
    assert_frugal(calls, files=RANKS)


def tables(tmp_path, monkeypatch, tensors):
    """How often a plan has catalogs make their tables, which hold all names of all ranks.

    The strategy lists other stages and other names than the ranks have, so that all of it is said.
    """
    rows = Layout((2,), ((0,), ()))
    listed = [f"w{i}" for i in range(tensors)]
    stages = [dict.fromkeys(["gone", "w", *listed], rows), {"v": replace(rows, first_rank=2)}]
    held = dict.fromkeys(("w", "v", *listed, *(f"adam_m.{name}" for name in listed)), (4, 2))
    held |= {f"unlisted{i}": (4, 2) for i in range(tensors)}
    ranks = {
        rank: {name: noise(f"{rank}{name}", "Float32", shape) for name, shape in held.items()}
        for rank in range(4)
    }
    catalog = catalog_on_disk(tmp_path / str(tensors), ranks, "safetensors")
    counts = Counter()
    for name in ("metas", "holders"):
        table = vars(Catalog)[name]

        def counted(made, name=name, make=table.func):
            counts[name] += made.files is catalog.files
            return make(made)

        monkeypatch.setattr(table, "func", counted)
    strategy = replace(strategy_of(*stages), files=())
    with pytest.raises(ckpttool.PlanError, match="21 parameters that the strategy lists for other"):
        plan_merge(
            catalog,
            strategy,
            f"{tmp_path}/m.h5",
            resolve_options=ckpttool.ResolveOptions(unlisted="first"),
        )
    monkeypatch.undo()
    return counts


def test_a_plan_makes_tables_of_all_names_once(tmp_path, monkeypatch):
    assert tables(tmp_path, monkeypatch, 20) == {"metas": 1, "holders": 1}
