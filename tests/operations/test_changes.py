"""``diff --stats``: how much each tensor changed, against NumPy."""

import json
import math
import re

import numpy as np
import pytest
from msgspec.structs import replace

import ckpttool
from ckpttool.model.layout import Layout
from ckpttool.operations.tensor_diff import diff
from ckpttool.storage.compare import CompareOptions
from tests.operations.test_tensor_diff import written
from tests.support.checkpoints import noise, strategy_of
from tests.support.commands import run
from tests.support.readers import Entry, entry_of


def changes_of(a, b, **options):
    options = CompareOptions(wants_statistics=True, **options)
    found = diff(a, b, a_strategy=None, compare=options)
    return {one.name: one for one in found.changes}


def test_the_change_of_a_tensor_is_that_of_numpy_and_the_largest_is_first(tmp_path):
    rng = np.random.default_rng(5)
    a, b = {}, {}
    for name, dtype in (("f2", "<f2"), ("f4", "<f4"), ("f8", "<f8"), ("c8", "<c8"), ("i4", "<i4")):
        a[name] = (rng.normal(0, 100, (700, 400)) + (1j if dtype == "<c8" else 0)).astype(dtype)
        b[name] = (a[name] * (1 + rng.random() * (rng.random(a[name].shape) > 0.5))).astype(dtype)
    a["same"] = b["same"] = np.ones(4, "<f4")
    a["empty"] = b["empty"] = np.ones((0, 4), "<f4")
    a["none"], b["none"] = np.zeros(2, "<f4"), np.full(2, 2, "<f4")
    catalogs = [
        written(tmp_path / side, {name: entry_of(array) for name, array in of.items()})
        for side, of in (("a", a), ("b", b))
    ]
    found = changes_of(*catalogs)
    wide = {name: "c16" if name == "c8" else "f8" for name in a}
    for name, one in found.items():
        x, y = (of[name].astype(wide[name]).reshape(-1) for of in (a, b))
        assert one.norm == pytest.approx(np.linalg.norm(x), rel=1e-12)
        assert one.distance == pytest.approx(np.linalg.norm(y - x), rel=1e-12)
        assert one.max_abs == pytest.approx(np.abs(y - x).max(initial=0), rel=1e-12)
    order = [one.relative for one in found.values()]
    assert order == sorted(order, reverse=True)
    assert next(iter(found)) == "none"
    assert [*found][-2:] == ["empty", "same"]
    assert order[0] == math.inf
    assert order[-2:] == [0, 0]


def test_a_change_depends_neither_on_workers_nor_on_layouts(tmp_path):
    shape = (256, 3 * 700)
    one, two = ({"w": noise(seed, "BFloat16", shape)} for seed in ("one", "two"))
    columns = strategy_of({"w": Layout((3,), ((), (0,)))})
    b = written(tmp_path / "b", two)
    merged = changes_of(written(tmp_path / "a", one), b)
    cut_a = written(tmp_path / "c", one, columns)
    with ckpttool.open_engine("threads:4") as executor:
        compare = CompareOptions(wants_statistics=True)
        found = diff(cut_a, b, columns, compare=compare, executor=executor)
    assert (found.changes[0].norm, found.changes[0].distance) == (
        merged["w"].norm,
        merged["w"].distance,
    )
    opened = ckpttool.open(cut_a, replace(columns, files=()))["w"][...]
    finite = opened[np.isfinite(opened)].astype("f8")
    assert found.changes[0].norm == pytest.approx(np.linalg.norm(finite), rel=1e-12)


def test_nan_and_infinity_on_one_side_are_the_largest_changes(tmp_path):
    columns = {
        "nan": ([1, np.nan], [1, 2]),
        "both": ([1, np.nan, np.inf], [2, np.nan, np.inf]),
        "inf": ([1, np.inf], [1, 2]),
    }
    a, b = (
        {name: entry_of(np.array(pair[i], "<f4")) for name, pair in columns.items()} for i in (0, 1)
    )
    a["bytes"], b["bytes"] = (Entry("Int4", (2,), text) for text in (b"12", b"34"))
    found = changes_of(written(tmp_path / "a", a), written(tmp_path / "b", b))
    assert [*found] == ["nan", "inf", "both", "bytes"]
    assert [one.relative for one in found.values()][1:] == [np.inf, 1.0, None]
    assert np.isnan(found["nan"].relative)
    words = ["diff", tmp_path / "a" / "m.ckpt", tmp_path / "b" / "m.ckpt", "--stats"]
    listed = json.loads(run(*words, "--json").stdout)["changes"]
    assert [one["relative"] for one in listed] == ["NaN", "Infinity", 1.0, None]
    counts = [(one["max_abs"], one["nan_on_one_side"]) for one in listed]
    assert counts == [(None, 1), ("Infinity", 0), (1.0, 0), (None, 0)]
    shown = run(*words).stdout
    assert re.search(r"(?m)^  nan +2 +nan \(1 NaN on one side\) +1$", shown)
    assert re.search(r"differences\n\n.*\n.*\n  bytes ", shown)


def test_zeros_of_two_signs_are_a_difference_and_no_change(tmp_path):
    a, b = ({"x": entry_of(np.array([one, 1], "<f4"))} for one in (0.0, -0.0))
    a, b = written(tmp_path / "a", a), written(tmp_path / "b", b)
    shown = run("diff", a.root, b.root, "--stats")
    assert (shown.exit_code, "changes" in shown.stdout) == (1, False)
    assert "1 of 2 (1 the same number)" in shown.stdout


def test_python_has_the_changes_of_the_command(tmp_path):
    a, b = ({"x": entry_of(np.array(pair, "<f4"))} for pair in ([3, 4], [3, 9]))
    catalogs = written(tmp_path / "a", a), written(tmp_path / "b", b)
    (one,) = ckpttool.diff(*catalogs, stats=True).changes
    assert (one.relative, one.distance, one.norm, one.max_abs) == (1, 5, 5, 5)
    assert ckpttool.diff(*catalogs).changes is None
