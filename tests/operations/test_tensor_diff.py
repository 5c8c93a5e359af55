"""``diff``: what two checkpoints hold is compared, not how it is cut or stored."""

import json
import re
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ckpttool
from ckpttool.model.dtypes import DTYPES
from ckpttool.model.layout import Layout
from ckpttool.operations.tensor_diff import diff
from ckpttool.problems import PlanError
from ckpttool.storage.compare import CompareOptions, Tolerance
from tests.strategies import as_stored, examples, moves
from tests.support.checkpoints import (
    ROWS,
    catalog_on_disk,
    create_file,
    cut,
    noise,
    strategy_of,
    write_file,
)
from tests.support.commands import run, stay_small
from tests.support.readers import Entry, entry_of

COLUMNS = strategy_of({"w": Layout((3,), ((), (0,))), "b": Layout((3,), ((0,), ()))})
ROW_CUT = strategy_of({"w": ROWS, "b": ROWS})
W = np.arange(1, 25, dtype="<f4").reshape(8, 3)


def entries(**changes):
    found = {"w": entry_of(W), "b": Entry("BFloat16", (12, 1), bytes(range(24)))}
    found |= changes
    return {name: entry for name, entry in found.items() if entry is not None}


def written(folder, full, strategy=None, format="ckpt"):
    if strategy is None:
        write_file(folder / "m.ckpt", full, "ckpt")
        return ckpttool.scan(str(folder / "m.ckpt"))
    return catalog_on_disk(folder, cut(full, strategy), format)


def compare(tmp_path, one, other, **options):
    a = written(tmp_path / "a", one, ROW_CUT)
    return diff(a, written(tmp_path / "b", other), ROW_CUT, **options)


def within(*bounds, **more):
    return CompareOptions(Tolerance(*bounds, **more))


def the_difference(found):
    (difference,) = found.differences
    return difference


# -------------------------------------------------------------------------------------- equal


@pytest.mark.parametrize("format", ["ckpt", "safetensors", "hdf5"])
@pytest.mark.parametrize("sides", ["files", "ranks and file", "file and ranks", "ranks"])
def test_the_same_tensors_are_equal_however_they_are_stored(tmp_path, format, sides):
    full = entries()
    stored = {
        "files": (None, None),
        "ranks and file": (ROW_CUT, None),
        "file and ranks": (None, COLUMNS),
        "ranks": (ROW_CUT, COLUMNS),
    }[sides]
    a = written(tmp_path / "a", full, stored[0], format)
    b = written(tmp_path / "b", full, stored[1], format)
    found = diff(a, b, *stored)
    assert (found.tensors, found.nbytes, found.differences) == (2, 24 * 4 + 24, ())


@examples(25)
@given(moves(has_state=True), st.data())
def test_a_checkpoint_is_equal_to_itself_under_any_other_layout(tmp_path_factory, move, data):
    folder = tmp_path_factory.mktemp("example")
    formats = [data.draw(st.sampled_from(["ckpt", "hdf5"])) for _ in range(2)]
    a = written(folder / "a", move.entries, move.src, formats[0])
    b = written(folder / "b", move.entries, move.dst, formats[1])
    found = diff(a, b, as_stored(move.src), as_stored(move.dst))
    assert (found.tensors, found.differences) == (len(move.entries), ())


def test_a_field_sliced_table_is_compared_as_what_it_is(tmp_path):
    layout = Layout((2,), ((0,), ()), fields=3)
    strategy = strategy_of({"t": layout})
    full = {"t": noise("t", "Float32", (12, 2))}
    a = written(tmp_path / "a", full, strategy)
    assert not diff(a, written(tmp_path / "b", full), strategy).differences
    changed = bytearray(full["t"].data)
    changed[4 * (2 * 3 + 1)] ^= 1
    other = {"t": full["t"]._replace(data=bytes(changed))}
    found = diff(a, written(tmp_path / "c", other), strategy)
    assert the_difference(found).values.first == (3, 1)


# ---------------------------------------------------------------------------------- different


def test_names_types_shapes_and_texts_are_compared_before_values(tmp_path):
    a = {"w": entry_of(W), "gone": entry_of(W), "type": entry_of(W), "shape": entry_of(W)}
    b = {"w": entry_of(W), "type": entry_of(W.astype("<f2")), "shape": entry_of(W.reshape(3, 8)),
         "new": entry_of(W)}  # fmt: skip
    found = diff(written(tmp_path / "a", a), written(tmp_path / "b", b))
    assert [(one.name, one.kind) for one in found.differences] == [
        ("gone", "only in A"),
        ("type", "dtype"),
        ("shape", "shape"),
        ("new", "only in B"),
    ]
    assert (found.tensors, found.nbytes) == (5, W.nbytes)
    assert found.differences[0].b is None
    assert found.differences[3].a is None
    assert found.differences[1].b.dtype == "Float16"


@pytest.mark.parametrize(
    ("types", "hint"),
    [
        (("Float32", "Float16"), "--dtype fp16"),
        (("BFloat16", "Float32"), "--dtype bf16"),
        (("BFloat16", "Float16"), "--dtype fp16"),
        (("Float64", "Float32"), "--dtype fp32"),
        (("Float32", "Int32"), None),
        (("Float32", "Float32"), None),
    ],
)
def test_values_of_another_type_are_compared_by_the_option_that_a_note_names(tmp_path, types, hint):
    sides = []
    for side, dtype in zip("ab", types, strict=True):
        zeros = Entry(dtype, (4,), bytes(4 * DTYPES[dtype].itemsize))
        wide = Entry("Float32", (2,), bytes(8)) if side == "a" else Entry("Float16", (2,), bytes(4))
        sides.append(written(tmp_path / side, {"w": zeros, "adam_m.w": wide}))
    notes = [(it.message, it.hint) for it in diff(*sides).notes]
    message = "values of 1 weight of another type are not compared"
    assert notes == ([(message, hint)] if hint else [])


def test_values_that_differ_are_counted_measured_and_located(tmp_path):
    changed = W.copy()
    changed[2, 1] += 0.5  # 8 -> 8.5
    changed[7, 2] = 30.0  # 24 -> 30
    difference = the_difference(compare(tmp_path, entries(), entries(w=entry_of(changed))))
    assert (difference.name, difference.kind) == ("w", "values")
    values = difference.values
    assert (values.differing, values.same_number, values.first) == (2, 0, (2, 1))
    assert values.max_abs == 6.0
    assert values.max_rel == 6.0 / 30.0


def test_bytes_that_mean_the_same_number_differ_and_are_counted_apart(tmp_path):
    bits = np.array([0x0, 0x80000000, 0x7FC00000, 0x7FC00001, 0x3F800000], "<u4")
    other = np.array([0x80000000, 0x0, 0x7FC00001, 0xFFC00000, 0x3F800001], "<u4")
    one, two = ({"x": Entry("Float32", (5,), words.tobytes())} for words in (bits, other))
    a, b = written(tmp_path / "a", one), written(tmp_path / "b", two)
    values = the_difference(diff(a, b)).values
    assert (values.differing, values.same_number, values.first) == (5, 4, (0,))
    assert values.max_abs == 2.0**-23
    values = the_difference(diff(a, b, compare=within())).values
    assert (values.differing, values.same_number, values.first) == (1, 0, (4,))
    assert not diff(a, b, compare=within(rtol=1e-6)).differences


def test_infinity_is_near_nothing_but_itself(tmp_path):
    a = entry_of(np.array([np.inf, np.inf, 1, -np.inf], "<f4"))
    b = entry_of(np.array([np.inf, -np.inf, np.inf, 1], "<f4"))
    found = diff(written(tmp_path / "a", {"x": a}), written(tmp_path / "b", {"x": b}),
                          compare=within(1e30, 1e30))  # fmt: skip
    values = the_difference(found).values
    found = values.differing, values.first, values.max_abs, values.max_rel, values.nan_on_one_side
    assert found == (3, (1,), np.inf, np.inf, 0)


@pytest.mark.parametrize("dtype", ["<f4", "<f8", "<c8", "<c16"])
def test_what_is_nan_on_one_side_has_no_distance_and_is_counted(tmp_path, dtype):
    a = entry_of(np.array([np.nan, 1, 2, np.nan, 5], dtype))
    b = entry_of(np.array([1, np.nan, 2.5, -np.nan, 5], dtype))
    a, b = written(tmp_path / "a", {"x": a}), written(tmp_path / "b", {"x": b})
    values = the_difference(diff(a, b)).values
    assert (values.nan_on_one_side, values.max_abs, values.max_rel) == (2, 0.5, 0.2)
    values = the_difference(diff(a, b, compare=within(1, 1))).values
    assert (values.differing, values.nan_on_one_side, values.first) == (2, 2, (0,))


@pytest.mark.parametrize("sign", [1, -1])
def test_differences_that_no_float64_holds_are_not_understated(tmp_path, sign):
    large = sign * np.finfo("<f8").max
    a, b = (entry_of(np.array([one, 1.0])) for one in (large, -large / 2))
    a, b = written(tmp_path / "a", {"x": a}), written(tmp_path / "b", {"x": b})
    values = the_difference(diff(a, b)).values
    assert (values.differing, values.max_abs, values.max_rel) == (1, np.inf, 3.0)
    assert not diff(a, b, compare=within(rtol=3)).differences
    assert diff(a, b, compare=within(rtol=2.9)).differences
    assert diff(a, b, compare=within(atol=1.7e308, rtol=1)).differences
    words = [a.root, b.root, "--json"]
    (one,) = json.loads(run("diff", *words).stdout)["differences"]
    found = [one["values"][key] for key in ("max_abs", "max_rel", "nan_on_one_side")]
    assert found == ["Infinity", 3.0, 0]
    assert re.search(r"1 of 2 .*inf +\(0\)", run("diff", *words[:2]).stdout)


def test_differences_of_float32_that_it_does_not_hold_are_measured(tmp_path):
    large = np.finfo("<f4").max
    a, b = (entry_of(np.array([one], "<f4")) for one in (large, -large))
    a, b = written(tmp_path / "a", {"x": a}), written(tmp_path / "b", {"x": b})
    assert the_difference(diff(a, b)).values.max_abs == 2 * float(large)


def test_complex_numbers_whose_modulus_no_float64_holds_are_compared(tmp_path):
    large = 1.5e308
    a = entry_of(np.array([complex(large, large), complex(np.inf, 1)]))
    b = entry_of(np.array([complex(large, -large), complex(np.inf, 4)]))
    a, b = written(tmp_path / "a", {"x": a}), written(tmp_path / "b", {"x": b})
    values = the_difference(diff(a, b)).values
    assert (values.differing, values.max_abs, values.nan_on_one_side) == (2, np.inf, 0)
    assert values.max_rel == pytest.approx(2**0.5)


def test_large_integers_that_differ_by_one_differ(tmp_path):
    a, b = (entry_of(np.array([2**60 + i, 5], "<i8")) for i in (0, 1))
    a, b = written(tmp_path / "a", {"n": a}), written(tmp_path / "b", {"n": b})
    assert the_difference(diff(a, b)).values.max_abs == 1.0
    found = diff(a, b, compare=within(atol=0.5))
    assert the_difference(found).values.differing == 1
    assert not diff(a, b, compare=within(atol=1)).differences


def test_texts_are_compared_as_texts(tmp_path):
    from ckpttool.formats import get_format
    from ckpttool.model.tensors import TensorMeta

    for side, text in (("a", "größe 1"), ("b", "größe 2"), ("c", "größe 1")):
        path = str(tmp_path / f"{side}.{'h5' if side == 'c' else 'ckpt'}")
        metas = [TensorMeta("note", "str", (), text)]
        create_file(get_format("hdf5" if side == "c" else "ckpt"), path, metas, {})
    a, b, c = (ckpttool.scan(str(tmp_path / name)) for name in ("a.ckpt", "b.ckpt", "c.h5"))
    assert the_difference(diff(a, b)).kind == "text"
    assert not diff(a, c).differences


# ------------------------------------------------------------- parameters that are each rank's own


def own(values):
    ranks = cut(entries(), ROW_CUT)
    for rank, value in enumerate(values):
        ranks[rank]["rng"] = Entry("Int32", (1,), struct.pack("<i", value))
    return ranks


def test_each_ranks_own_is_compared_rank_by_rank(tmp_path):
    a = catalog_on_disk(tmp_path / "a", own([1, 2, 3, 4]))
    b = catalog_on_disk(tmp_path / "b", own([1, 2, 5, 4]), "hdf5")
    found = diff(a, b, ROW_CUT, ROW_CUT)
    assert found.tensors == 2 + 4
    difference = the_difference(found)
    assert (difference.name, difference.rank, difference.kind) == ("rng", 2, "values")
    assert not diff(a, b, ROW_CUT, ROW_CUT, ckpttool.ResolveOptions(unlisted="first")).differences
    found = diff(a, b, ROW_CUT, ROW_CUT, ckpttool.ResolveOptions(unlisted="drop"))
    assert (found.tensors, found.differences) == (2, ())


def test_one_for_all_is_compared_with_that_of_every_rank(tmp_path):
    a = catalog_on_disk(tmp_path / "a", own([1, 2, 1, 1]))
    one = Entry("Int32", (1,), struct.pack("<i", 1))
    b = written(tmp_path / "b", entries(rng=one))
    difference = the_difference(diff(a, b, ROW_CUT))
    assert (difference.name, difference.rank) == ("rng", 1)
    difference = the_difference(diff(b, a, None, ROW_CUT))
    assert (difference.name, difference.rank) == ("rng", 1)


def test_ranks_that_only_one_side_has_are_differences(tmp_path):
    a = catalog_on_disk(tmp_path / "a", own([1, 2, 3, 4]))
    wide = cut(entries(), COLUMNS)
    for rank in range(3):
        wide[rank]["rng"] = Entry("Int32", (1,), struct.pack("<i", rank + 1))
    b = catalog_on_disk(tmp_path / "b", wide)
    difference = the_difference(diff(a, b, ROW_CUT, COLUMNS))
    assert (difference.name, difference.rank, difference.kind) == ("rng", 3, "only in A")


# -------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("bound", ["nan", "inf", "-inf", "-1", "1e999"])
@pytest.mark.parametrize("name", ["atol", "rtol"])
def test_a_tolerance_is_a_finite_number(name, bound):
    with pytest.raises(PlanError, match=f"{name}: expected a finite number from 0 on"):
        ckpttool.Tolerance(**{name: float(bound)})


def test_a_note_of_both_sides_is_said_once_and_one_of_a_side_says_whose_it_is(tmp_path):
    ranks = cut(entries(), ROW_CUT)
    ranks = {rank: {**held, "adam_m.w": held["w"]} for rank, held in ranks.items()}
    a = catalog_on_disk(tmp_path / "a", ranks)
    both = diff(a, a, ROW_CUT, ROW_CUT).notes
    assert [note.code for note in both] == ["follows"]
    b = written(tmp_path / "b", entries(**{"adam_m.w": entries()["w"]}))
    alone = diff(a, b, ROW_CUT).notes
    assert [note.text for note in alone] == [f"A: {note.text}" for note in both]


@pytest.mark.big
def test_memory_of_a_comparison_does_not_grow_with_the_tensor(tmp_path):
    stay_small(tmp_path, "diff", str(tmp_path / "src"), str(tmp_path / "src"))
