"""Values of full tensors: what NumPy prints of them, and statistics that nothing else changes."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

import ckpttool
from ckpttool.cli.value_screen import print_values
from ckpttool.concurrency import InlineExecutor
from ckpttool.formats import get_format
from ckpttool.model.dtypes import DTYPES
from ckpttool.model.layout import Layout
from ckpttool.model.tensors import TensorMeta
from ckpttool.operations.values import read_values
from ckpttool.storage.numbers import decode
from ckpttool.storage.statistics import measure
from tests.strategies import examples
from tests.support.checkpoints import create_file, cut, noise, strategy_of, write_file, write_ranks
from tests.support.commands import run_well
from tests.support.corpus import GOLDEN
from tests.support.readers import Entry, read

NUMBERLESS = ("Int4", "random_op")
SHAPES = [(), (0, 3), (7,), (1001,), (64, 32), (5, 0, 2), (9, 2, 8, 8), (5, 5, 5, 3, 3), (1001, 1)]
COLUMNS = Layout((4,), ((), (0,)))


def values_of(path, patterns=("*",), rows=None, strategy=None, executor=None):
    executor = executor or InlineExecutor()
    return read_values(ckpttool.scan(str(path)), strategy, patterns, rows, executor=executor)


@cache
def of_shape(folder, shape):
    array = np.random.default_rng(3).normal(0, 1, shape).astype("f4")
    path = folder / f"values-{'x'.join(map(str, shape)) or 'scalar'}.safetensors"
    write_file(path, {"w": Entry("Float32", shape, array.tobytes())}, "safetensors")
    return path, array


@examples(200)
@given(st.sampled_from(SHAPES), st.none() | st.slices(8) | st.slices(1001))
def test_it_is_printed_as_numpy_prints_it(tmp_path_factory, shape, rows):
    path, array = of_shape(tmp_path_factory.getbasetemp(), shape)
    meant = array[rows] if rows and shape else array
    found = values_of(path, rows=rows)
    (one,) = found.tensors
    assert one.elements == meant.size
    assert (one.statistics.elements, one.statistics.finite) == (meant.size, meant.size)
    assert one.statistics.minimum == (float(meant.min()) if meant.size else None)
    if rows and shape and not meant.shape[0]:  # it has no rows to print
        assert printed(found).splitlines()[1].startswith("--rows selects none: the tensor has ")
        return
    with np.printoptions(linewidth=75):
        assert printed(found).splitlines()[1:-1] == str(meant).splitlines()
        assert one.printed() == str(meant)


@pytest.mark.parametrize("shape", SHAPES)
def test_no_number_is_shown_that_is_not_in_the_tensor(tmp_path, shape):
    path, array = of_shape(tmp_path, shape)
    found = values_of(path)
    assert np.isin(found.tensors[0].shown, array).all()
    texts = (str(found), found._repr_html_())
    numbers = [float(n) for text in texts for n in re.findall(r"-?\d+[.]\d+(?:e-?\d+)?", text)]
    assert bool(numbers) == bool(array.size)
    for number in numbers:
        assert np.isclose(array, number, rtol=0, atol=1e-6).any()


def printed(found):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        print_values(found)
    return out.getvalue()


def test_every_type_has_the_statistics_of_its_numbers(tmp_path):
    entries = {
        dtype: Entry(dtype, (48,), b"8" * 48) if dtype in NUMBERLESS else noise("w", dtype, (6, 8))
        for dtype in DTYPES
    }
    write_file(tmp_path / "a.ckpt", entries, "ckpt")
    for one in values_of(tmp_path / "a.ckpt").tensors:
        entry = entries[one.name]
        assert (one.dtype, one.shape, one.nbytes) == (one.name, entry.shape, len(entry.data))
        numbers = decode(np.frombuffer(entry.data, "u1"), one.dtype)
        if numbers is None:
            assert one.statistics is None
            assert one.shown.tobytes() == entry.data
        else:
            numbers = (numbers != 0).astype("u1") if one.dtype == "Bool" else numbers
            assert one.statistics == measure(numbers)


@pytest.mark.parametrize(
    "case",
    [
        "bfloat16_model/src",
        "pipeline_8_to_2x4/src",
        "optshard_size2_adam_8_to_4/src",
        "moe_ep4_mp2/src",
        "mindformers/2.1.0_stages",
        "hyper_parallel/ms_dtypes/ckpt",
    ],
)
def test_they_are_those_of_the_merged_file(case, tmp_path):
    source = GOLDEN / case
    strategy = source.with_name("src_strategy.ckpt") if source.name == "src" else None
    words = [source, *(["-s", strategy] if strategy is not None else [])]
    run_well("merge", *words, "-o", tmp_path / "m.ckpt")
    merged = read(tmp_path / "m.ckpt")
    parsed = strategy and ckpttool.read_strategy([str(strategy)])
    found = values_of(source, strategy=parsed).tensors
    assert sorted(one.name for one in found) == sorted(merged)
    for one in found:
        numbers = decode(np.frombuffer(merged[one.name].data, "u1"), one.dtype)
        assert one.statistics == measure(numbers)


def test_a_text_is_printed_and_has_no_statistics(tmp_path):
    metas = [TensorMeta("note", "str", (), "one\x1b[31m")]
    create_file(get_format("ckpt"), tmp_path / "a.ckpt", metas, {})
    found = values_of(tmp_path / "a.ckpt", rows=slice(0, 1))
    assert printed(found) == "note: str\none\\x1b[31m\n"
    (document,) = found.to_dict()["values"]
    assert (document["elements"], document["statistics"]) == ("one\x1b[31m", None)


def test_json_has_no_number_that_it_cannot_write(tmp_path):
    array = np.array([np.nan, np.inf, -np.inf, complex(1, np.nan)], "c8")
    write_file(tmp_path / "a.ckpt", {"w": Entry("Complex64", (4,), array.tobytes())}, "ckpt")
    (document,) = values_of(tmp_path / "a.ckpt").to_dict()["values"]
    json.dumps(document, allow_nan=False)
    assert document["elements"][1:] == [["Infinity", 0.0], ["-Infinity", 0.0], [1.0, "NaN"]]
    assert document["statistics"]["mean"] is None


def test_workers_and_sharding_change_no_digit(tmp_path):
    shape = (600, 2000)
    entries = {"w": noise("w", "BFloat16", shape)}
    strategy = replace(strategy_of({"w": COLUMNS}), files=())
    write_ranks(tmp_path / "src", cut(entries, strategy), "ckpt")
    write_file(tmp_path / "m.h5", entries, "hdf5")
    (merged,) = values_of(tmp_path / "m.h5").tensors
    with ThreadPoolExecutor(8) as pool:
        (sharded,) = values_of(tmp_path / "src", strategy=strategy, executor=pool).tensors
    assert sharded.statistics == merged.statistics
    np.testing.assert_array_equal(sharded.shown, merged.shown)


def test_memory_does_not_grow_with_the_tensor(tmp_path):
    shape = (1 << 14, 1 << 10)  # 64 MiB
    strategy = replace(strategy_of({"w": COLUMNS}), files=())
    (tmp_path / "src").mkdir()
    write_ranks(tmp_path / "src", cut({"w": noise("w", "Float32", shape)}, strategy), "ckpt")
    catalog = ckpttool.scan(str(tmp_path / "src"))
    read_values(catalog, strategy, ["w"], executor=InlineExecutor())
    tracemalloc.start()
    (one,) = read_values(catalog, strategy, ["w"], executor=InlineExecutor()).tensors
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert one.statistics.elements == 1 << 24
    assert peak < 12 << 20


def test_of_rows_only_these_are_read(tmp_path, monkeypatch):
    shape = (4096, 1024)
    write_file(tmp_path / "m.safetensors", {"w": noise("w", "Float32", shape)}, "safetensors")
    catalog = ckpttool.scan(str(tmp_path / "m.safetensors"))
    sizes, preadv = [], os.preadv

    def counted(fd, parts, at):
        sizes.append(preadv(fd, parts, at))
        return sizes[-1]

    monkeypatch.setattr(os, "preadv", counted)
    read_values(catalog, None, ["w"], slice(0, 4), executor=InlineExecutor())
    few = sum(sizes)
    sizes.clear()
    read_values(catalog, None, ["w"], "::1000", executor=InlineExecutor())
    monkeypatch.undo()
    assert 4 * 4096 < few < 16 * 4096
    assert 5 * 4096 < sum(sizes) < 20 * 4096
