"""``diff``: what two checkpoints hold is compared, not how it is cut or stored."""

import json
import os
import re
import shutil
import struct
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ckpttool
from ckpttool.model.layout import Layout
from ckpttool.operations.diff import BORROWED
from ckpttool.problems import CkptToolError, Diagnostic, PlanError
from ckpttool.storage.compare import Tolerance
from tests.strategies import as_stored, examples, moves
from tests.support.checkpoints import (
    ROWS,
    catalog_on_disk,
    create_file,
    cut,
    noise,
    strategy_of,
    write_file,
    write_ranks,
)
from tests.support.commands import mentions, message, run, run_well, stay_small
from tests.support.corpus import GOLDEN, SAMPLES
from tests.support.damage import flip_byte, flip_byte_of
from tests.support.errors import texts_of
from tests.support.readers import Entry, entry_of, read

CASE = GOLDEN / "tutorial_8_to_8_retrain"
COLUMNS = strategy_of({"w": Layout((3,), ((), (0,))), "b": Layout((3,), ((0,), ()))})
ROW_CUT = strategy_of({"w": ROWS, "b": ROWS})
W = np.arange(1, 25, dtype="<f4").reshape(8, 3)


def entries(**changes):
    """Full tensors; a change replaces one, or leaves it out if it is None."""
    found = {"w": entry_of(W), "b": Entry("BFloat16", (12, 1), bytes(range(24)))}
    found |= changes
    return {name: entry for name, entry in found.items() if entry is not None}


def written(folder, full, strategy=None, format="ckpt"):
    """A catalog of a file, or of rank folders."""
    if strategy is None:
        write_file(folder / "m.ckpt", full, "ckpt")
        return ckpttool.scan(str(folder / "m.ckpt"))
    return catalog_on_disk(folder, cut(full, strategy), format)


def compare(tmp_path, one, other, **options):
    """A is cut in rows, B a file."""
    a = written(tmp_path / "a", one, ROW_CUT)
    return ckpttool.diff(a, written(tmp_path / "b", other), ROW_CUT, **options)


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
    found = ckpttool.diff(a, b, *stored)
    assert (found.tensors, found.nbytes, found.differences) == (2, 24 * 4 + 24, ())


@examples(25)
@given(moves(has_state=True), st.data())
def test_a_checkpoint_is_equal_to_itself_under_any_other_layout(tmp_path_factory, move, data):
    folder = tmp_path_factory.mktemp("example")
    formats = [data.draw(st.sampled_from(["ckpt", "hdf5"])) for _ in range(2)]
    a = written(folder / "a", move.entries, move.src, formats[0])
    b = written(folder / "b", move.entries, move.dst, formats[1])
    found = ckpttool.diff(a, b, as_stored(move.src), as_stored(move.dst))
    assert (found.tensors, found.differences) == (len(move.entries), ())


@pytest.mark.parametrize("name", ["bfloat16_model", "pipeline_2x4_to_8", "uneven_manual_split",
                                  "optshard_transposed_cut", "unicode_and_long_names",
                                  "append_dict_string", "dtypes_all"])  # fmt: skip
def test_what_was_merged_is_equal_to_what_it_was_merged_from(tmp_path, name):
    strategy, out = GOLDEN / name / "src_strategy.ckpt", tmp_path / "m.h5"
    run_well("merge", GOLDEN / name / "src", "-s", strategy, "-o", out)
    run_well("diff", GOLDEN / name / "src", out, "-s", strategy)
    run_well("diff", out, GOLDEN / name / "src", "-s", strategy)


def test_a_field_sliced_table_is_compared_as_what_it_is(tmp_path):
    layout = Layout((2,), ((0,), ()), fields=3)
    strategy = strategy_of({"t": layout})
    full = {"t": noise("t", "Float32", (12, 2))}
    a = written(tmp_path / "a", full, strategy)
    assert not ckpttool.diff(a, written(tmp_path / "b", full), strategy).differences
    changed = bytearray(full["t"].data)
    changed[4 * (2 * 3 + 1)] ^= 1
    other = {"t": full["t"]._replace(data=bytes(changed))}
    found = ckpttool.diff(a, written(tmp_path / "c", other), strategy)
    assert the_difference(found).values.first == (3, 1)


# ---------------------------------------------------------------------------------- different


def test_names_types_shapes_and_texts_are_compared_before_values(tmp_path):
    a = {"w": entry_of(W), "gone": entry_of(W), "type": entry_of(W), "shape": entry_of(W)}
    b = {"w": entry_of(W), "type": entry_of(W.astype("<f2")), "shape": entry_of(W.reshape(3, 8)),
         "new": entry_of(W)}  # fmt: skip
    found = ckpttool.diff(written(tmp_path / "a", a), written(tmp_path / "b", b))
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


def test_values_that_differ_are_counted_measured_and_located(tmp_path):
    changed = W.copy()
    changed[2, 1] += 0.5  # 8 -> 8.5
    changed[7, 2] = 30.0  # 24 -> 30
    difference = the_difference(compare(tmp_path, entries(), entries(w=entry_of(changed))))
    assert (difference.name, difference.kind) == ("w", "values")
    values = difference.values
    assert (values.count, values.same_number, values.first) == (2, 0, (2, 1))
    assert values.max_abs == 6.0
    assert values.max_rel == 6.0 / 30.0


def test_bytes_that_mean_the_same_number_differ_and_are_counted_apart(tmp_path):
    bits = np.array([0x0, 0x80000000, 0x7FC00000, 0x7FC00001, 0x3F800000], "<u4")
    other = np.array([0x80000000, 0x0, 0x7FC00001, 0xFFC00000, 0x3F800001], "<u4")
    one, two = ({"x": Entry("Float32", (5,), words.tobytes())} for words in (bits, other))
    a, b = written(tmp_path / "a", one), written(tmp_path / "b", two)
    values = the_difference(ckpttool.diff(a, b)).values
    assert (values.count, values.same_number, values.first) == (5, 4, (0,))
    assert values.max_abs == 2.0**-23
    values = the_difference(ckpttool.diff(a, b, tolerance=Tolerance())).values
    assert (values.count, values.same_number, values.first) == (1, 0, (4,))
    assert not ckpttool.diff(a, b, tolerance=Tolerance(rtol=1e-6)).differences


def test_infinity_is_near_nothing_but_itself(tmp_path):
    a = entry_of(np.array([np.inf, np.inf, 1, -np.inf], "<f4"))
    b = entry_of(np.array([np.inf, -np.inf, np.inf, 1], "<f4"))
    found = ckpttool.diff(written(tmp_path / "a", {"x": a}), written(tmp_path / "b", {"x": b}),
                          tolerance=Tolerance(1e30, 1e30))  # fmt: skip
    values = the_difference(found).values
    found = values.count, values.first, values.max_abs, values.max_rel, values.nans
    assert found == (3, (1,), np.inf, np.inf, 0)


@pytest.mark.parametrize("dtype", ["<f4", "<f8", "<c8", "<c16"])
def test_what_is_nan_on_one_side_has_no_distance_and_is_counted(tmp_path, dtype):
    a = entry_of(np.array([np.nan, 1, 2, np.nan, 5], dtype))
    b = entry_of(np.array([1, np.nan, 2.5, -np.nan, 5], dtype))
    a, b = written(tmp_path / "a", {"x": a}), written(tmp_path / "b", {"x": b})
    values = the_difference(ckpttool.diff(a, b)).values
    assert (values.nans, values.max_abs, values.max_rel) == (2, 0.5, 0.2)
    values = the_difference(ckpttool.diff(a, b, tolerance=Tolerance(1, 1))).values
    assert (values.count, values.nans, values.first) == (2, 2, (0,))


@pytest.mark.parametrize("sign", [1, -1])
def test_differences_that_no_float64_holds_are_not_understated(tmp_path, sign):
    large = sign * np.finfo("<f8").max
    a, b = (entry_of(np.array([one, 1.0])) for one in (large, -large / 2))
    a, b = written(tmp_path / "a", {"x": a}), written(tmp_path / "b", {"x": b})
    values = the_difference(ckpttool.diff(a, b)).values
    assert (values.count, values.max_abs, values.max_rel) == (1, np.inf, 3.0)
    assert not ckpttool.diff(a, b, tolerance=Tolerance(rtol=3)).differences
    assert ckpttool.diff(a, b, tolerance=Tolerance(rtol=2.9)).differences
    assert ckpttool.diff(a, b, tolerance=Tolerance(atol=1.7e308, rtol=1)).differences
    words = [a.root, b.root, "--json"]
    (one,) = json.loads(run("diff", *words).stdout)["differences"]
    found = [one["values"][key] for key in ("max_abs", "max_rel", "nan_on_one_side")]
    assert found == ["Infinity", 3.0, 0]
    assert re.search(r"1 of 2 .*inf +\(0\)", run("diff", *words[:2]).stdout)


def test_differences_of_float32_that_it_does_not_hold_are_measured(tmp_path):
    large = np.finfo("<f4").max
    a, b = (entry_of(np.array([one], "<f4")) for one in (large, -large))
    a, b = written(tmp_path / "a", {"x": a}), written(tmp_path / "b", {"x": b})
    assert the_difference(ckpttool.diff(a, b)).values.max_abs == 2 * float(large)


def test_complex_numbers_whose_modulus_no_float64_holds_are_compared(tmp_path):
    large = 1.5e308
    a = entry_of(np.array([complex(large, large), complex(np.inf, 1)]))
    b = entry_of(np.array([complex(large, -large), complex(np.inf, 4)]))
    a, b = written(tmp_path / "a", {"x": a}), written(tmp_path / "b", {"x": b})
    values = the_difference(ckpttool.diff(a, b)).values
    assert (values.count, values.max_abs, values.nans) == (2, np.inf, 0)
    assert values.max_rel == pytest.approx(2**0.5)


def test_large_integers_that_differ_by_one_differ(tmp_path):
    a, b = (entry_of(np.array([2**60 + i, 5], "<i8")) for i in (0, 1))
    a, b = written(tmp_path / "a", {"n": a}), written(tmp_path / "b", {"n": b})
    assert the_difference(ckpttool.diff(a, b)).values.max_abs == 1.0
    found = ckpttool.diff(a, b, tolerance=Tolerance(atol=0.5))
    assert the_difference(found).values.count == 1
    assert not ckpttool.diff(a, b, tolerance=Tolerance(atol=1)).differences


def test_texts_are_compared_as_texts(tmp_path):
    from ckpttool.formats import get_format
    from ckpttool.model.tensors import TensorMeta

    for side, text in (("a", "größe 1"), ("b", "größe 2"), ("c", "größe 1")):
        path = str(tmp_path / f"{side}.{'h5' if side == 'c' else 'ckpt'}")
        metas = [TensorMeta("note", "str", (), text)]
        create_file(get_format("hdf5" if side == "c" else "ckpt"), path, metas, {})
    a, b, c = (ckpttool.scan(str(tmp_path / name)) for name in ("a.ckpt", "b.ckpt", "c.h5"))
    assert the_difference(ckpttool.diff(a, b)).kind == "text"
    assert not ckpttool.diff(a, c).differences


# ------------------------------------------------------------- parameters that are each rank's own


def own(values):
    """Four ranks with a random state each."""
    ranks = cut(entries(), ROW_CUT)
    for rank, value in enumerate(values):
        ranks[rank]["rng"] = Entry("Int32", (1,), struct.pack("<i", value))
    return ranks


def test_each_ranks_own_is_compared_rank_by_rank(tmp_path):
    a = catalog_on_disk(tmp_path / "a", own([1, 2, 3, 4]))
    b = catalog_on_disk(tmp_path / "b", own([1, 2, 5, 4]), "hdf5")
    found = ckpttool.diff(a, b, ROW_CUT, ROW_CUT)
    assert found.tensors == 2 + 4
    difference = the_difference(found)
    assert (difference.name, difference.rank, difference.kind) == ("rng", 2, "values")
    assert not ckpttool.diff(
        a, b, ROW_CUT, ROW_CUT, ckpttool.ResolveOptions(unlisted="first")
    ).differences
    found = ckpttool.diff(a, b, ROW_CUT, ROW_CUT, ckpttool.ResolveOptions(unlisted="drop"))
    assert (found.tensors, found.differences) == (2, ())


def test_one_for_all_is_compared_with_that_of_every_rank(tmp_path):
    a = catalog_on_disk(tmp_path / "a", own([1, 2, 1, 1]))
    one = Entry("Int32", (1,), struct.pack("<i", 1))
    b = written(tmp_path / "b", entries(rng=one))
    difference = the_difference(ckpttool.diff(a, b, ROW_CUT))
    assert (difference.name, difference.rank) == ("rng", 1)
    difference = the_difference(ckpttool.diff(b, a, None, ROW_CUT))
    assert (difference.name, difference.rank) == ("rng", 1)


def test_ranks_that_only_one_side_has_are_differences(tmp_path):
    a = catalog_on_disk(tmp_path / "a", own([1, 2, 3, 4]))
    wide = cut(entries(), COLUMNS)
    for rank in range(3):
        wide[rank]["rng"] = Entry("Int32", (1,), struct.pack("<i", rank + 1))
    b = catalog_on_disk(tmp_path / "b", wide)
    difference = the_difference(ckpttool.diff(a, b, ROW_CUT, COLUMNS))
    assert (difference.name, difference.rank, difference.kind) == ("rng", 3, "only in A")


# -------------------------------------------------------------------------------------- errors


def test_a_folder_without_a_strategy_is_refused_for_both_sides_at_once(tmp_path):
    a, b = (written(tmp_path / side, entries(), ROW_CUT) for side in "ab")
    with pytest.raises(ckpttool.CombinedError) as caught:
        ckpttool.diff(a, b)
    assert len(texts_of(caught.value)) == 2
    assert "no strategy" in texts_of(caught.value)[1]
    assert caught.value.exit_code == 2


def test_an_error_says_of_which_side_it_is(tmp_path):
    a, b = written(tmp_path / "a", entries()), written(tmp_path / "b", entries(), ROW_CUT)
    for sides, side in (((a, b), "B"), ((b, a), "A")):
        with pytest.raises(
            PlanError, match=rf"\A{side} \({sides[side == 'B'].root}\): no strategy"
        ):
            ckpttool.diff(*sides)
    with pytest.raises(PlanError, match=r"\AB: .*did not end"):
        ckpttool.diff(a, replace(a, diagnostics=(Diagnostic("unfinished", "a run did not end"),)))
    words = ["diff", CASE / "src", CASE / "src", "-s", CASE / "src_strategy.ckpt"]
    result = run(*words, "--b-step", "7_7")
    assert result.exit_code == 5
    assert message(result).startswith(f"error[source]: B ({CASE / 'src'}): ")
    result = run(*words, "--b-strategy", GOLDEN / "PROVENANCE.md", "--step", "7_7")
    assert result.exit_code == 4
    assert not mentions(message(result), r"A \(.*7_7", r"B \(.*PROVENANCE")


@pytest.mark.parametrize("bound", ["nan", "inf", "-inf", "-1", "-0.5", "1e999", "x"])
@pytest.mark.parametrize("name", ["atol", "rtol"])
def test_a_tolerance_that_is_no_finite_number_is_a_usage_error(merged, name, bound):
    result = run("diff", merged, merged, f"--{name}={bound}")
    assert result.exit_code == 2
    assert f": --{name}: {bound!r} is not a" in message(result)
    if bound != "x":
        with pytest.raises(PlanError, match=f"{name}: expected a finite number from 0 on"):
            ckpttool.Tolerance(**{name: float(bound)})


def test_folders_whose_ranks_hold_everything_need_no_strategy(tmp_path):
    folder = write_ranks(tmp_path / "a", {rank: entries() for rank in range(3)}, "ckpt")
    a, b = ckpttool.scan(str(folder)), written(tmp_path / "b", entries())
    assert not ckpttool.diff(a, b, options=ckpttool.ResolveOptions(replicated=True)).differences
    with pytest.raises(PlanError, match="no strategy"):
        ckpttool.diff(a, b)


@pytest.mark.parametrize("rank", [0, 1])
def test_replicas_that_differ_are_a_finding_and_the_lowest_rank_is_compared(tmp_path, rank):
    ranks = cut(entries(), ROW_CUT)
    data = bytearray(ranks[rank]["w"].data)
    data[0] ^= 1
    ranks[rank]["w"] = ranks[rank]["w"]._replace(data=bytes(data))
    a = catalog_on_disk(tmp_path / "a", ranks)
    b = written(tmp_path / "b", entries())
    for side, sides in (("A", (a, b, ROW_CUT)), ("B", (b, a, None, ROW_CUT))):
        found = ckpttool.diff(*sides)
        assert [one.name for one in found.differences] == ["w"][: 1 - rank]
        assert not found.is_equal
        (finding,) = found.findings
        assert (finding.code, finding.ranks) == ("replica", (0, 1))
        assert (finding.side, finding.where) == (side, sides[side == "B"].root)
        assert finding.message == "different between ranks that should hold the same"
        assert (finding.tensor, finding.facts) == ("w", "rank 0 differs from rank 1")
        assert not ckpttool.diff(
            *sides, options=ckpttool.ResolveOptions(trust_strategy=True)
        ).findings


def test_the_command_says_that_replicas_differ_and_never_that_sides_are_equal(tmp_path):
    good = SAMPLES / "mp2_dp4"
    a = shutil.copytree(good / "ckpt", tmp_path / "a")
    words = [good / "ckpt", a, "-s", good / "strategy", "--b-strategy", good / "strategy"]
    run_well("diff", *words)
    path = max(a.rglob("*.ckpt"))
    name, entry = max(read(path).items(), key=lambda item: len(item[1].data))
    flip_byte(path, path.read_bytes().index(entry.data))
    result = run("diff", *words)
    assert result.exit_code == 1
    assert "replicas differ (the lowest rank's are compared), nothing else does" in message(result)
    text = f"B ({a}): {name}: different between ranks that should hold the same rank "
    assert text in message(result)
    document = json.loads(run("diff", *words, "--json").stdout)
    assert (document["equal"], document["differences"]) == (False, [])
    assert [one["code"] for one in document["findings"]] == ["replica"]


def test_with_replicated_a_side_without_a_strategy_of_its_own_is_whole_on_every_rank(tmp_path):
    strategy = CASE / "src_strategy.ckpt"
    run_well("merge", CASE / "src", "-s", strategy, "-o", tmp_path / "m.ckpt")
    for rank in range(3):
        (tmp_path / "whole" / f"rank_{rank}").mkdir(parents=True)
        shutil.copy(tmp_path / "m.ckpt", tmp_path / "whole" / f"rank_{rank}" / "m.ckpt")
    sides = [CASE / "src", tmp_path / "whole"]
    run_well("diff", *sides, "-s", strategy, "--replicated")
    run_well("diff", *sides[::-1], "--b-strategy", strategy, "--replicated")
    result = run("diff", *sides, "-s", strategy)
    assert result.exit_code == 5
    assert "--b-strategy STRATEGY, or --replicated if every rank of B holds the" in message(result)


def test_a_note_of_both_sides_is_said_once_and_one_of_a_side_says_whose_it_is(tmp_path):
    ranks = cut(entries(), ROW_CUT)
    ranks = {rank: {**held, "adam_m.w": held["w"]} for rank, held in ranks.items()}
    a = catalog_on_disk(tmp_path / "a", ranks)
    both = ckpttool.diff(a, a, ROW_CUT, ROW_CUT).notes
    assert [note.code for note in both] == ["follows"]
    b = written(tmp_path / "b", entries(**{"adam_m.w": entries()["w"]}))
    alone = ckpttool.diff(a, b, ROW_CUT).notes
    assert [note.text for note in alone] == [f"A: {note.text}" for note in both]


def test_a_damaged_rank_is_replaced_and_told(tmp_path):
    a = write_ranks(tmp_path / "a", cut(entries(), ROW_CUT), "ckpt")
    path = a / "rank_2" / "net.ckpt"
    path.write_bytes(path.read_bytes()[:-3])
    found = ckpttool.diff(ckpttool.scan(str(a)), written(tmp_path / "b", entries()), ROW_CUT)
    assert not found.differences
    assert [note.code for note in found.notes] == ["damaged_replica"]


def test_a_hidden_optimizer_shard_is_seen_through(tmp_path):
    sample = SAMPLES / "opt_aggregated"
    words = ["-s", sample / "strategy"]
    run_well("merge", sample / "ckpt", *words, "-o", tmp_path / "m.ckpt")
    run_well("diff", sample / "ckpt", sample / "safetensors", *words)
    run_well("diff", sample / "ckpt", tmp_path / "m.ckpt", *words)


# ------------------------------------------------------------------------------ the command line


@pytest.fixture
def merged(tmp_path):
    """A merged checkpoint, and the words that compare its source with it."""
    out = tmp_path / "m.ckpt"
    run_well("merge", CASE / "src", "-s", CASE / "src_strategy.ckpt", "-o", out)
    return out


def words(b, *more):
    return ["diff", CASE / "src", b, "-s", CASE / "src_strategy.ckpt", *more]


def test_equal_is_one_line_and_exit_code_0(merged):
    result = run(*words(merged))
    assert result.exit_code == 0
    assert result.stdout == (
        f"equal: A {CASE}/src and B {merged} (21 tensors, 40.6 KiB compared, bytes)\n"
    )
    assert result.stderr == ""
    quiet = run(*words(merged, "-q"))
    assert (quiet.stdout, quiet.stderr, quiet.exit_code) == ("", "", 0)


def test_differences_are_a_summary_and_a_table_and_exit_code_1(merged):
    flip_byte_of(merged, "layer1.weight", 4 * 33)
    result = run(*words(merged))
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert lines[0] == (
        f"different: A {CASE}/src and B {merged}: 1 with other values "
        "(21 tensors, 40.6 KiB compared, bytes)"
    )
    (row,) = (line for line in lines if "layer1.weight" in line)
    assert "1 of 2048" in row
    assert row.rstrip().endswith("(1, 1)")
    within = run(*words(merged, "--rtol", "1e-3"))
    assert within.exit_code == 0
    assert within.stdout.endswith("compared, atol 0, rtol 0.001)\n")


def test_the_document_of_diff(merged):
    flip_byte_of(merged, "layer1.weight", 4 * 33)
    result = run(*words(merged, "--json"))
    assert result.exit_code == 1
    document = json.loads(result.stdout)
    assert document["schema"] == 1
    assert (document["equal"], document["tensors"], document["tolerance"]) == (False, 21, None)
    assert document["counts"] == {"values": 1}
    (difference,) = document["differences"]
    assert difference["name"] == "layer1.weight"
    assert difference["kind"] == "values"
    assert difference["a"] == difference["b"] == {"dtype": "Float32", "shape": [64, 32]}
    assert difference["values"]["differing"] == 1
    assert difference["values"]["first"] == [1, 1]
    equal = json.loads(run(*words(CASE / "src", "--json", "--atol", "1e-9")).stdout)
    assert (equal["equal"], equal["differences"]) == (True, [])
    assert equal["tolerance"] == {"atol": 1e-9, "rtol": 0.0}


def test_limit_cuts_the_list_and_not_the_summary(tmp_path):
    a = written(tmp_path / "a", {f"w{i}": entry_of(W) for i in range(60)}).root
    b = written(tmp_path / "b", {"x": entry_of(W)}).root
    text = run("diff", a, b).stdout
    assert ": 60 only in A, 1 only in B (61 tensors, " in text
    assert "and 11 more (--limit N shows N, --json all)" in text
    assert len(json.loads(run("diff", a, b, "--json", "--limit", "3").stdout)["differences"]) == 3


def test_the_strategy_of_a_is_that_of_b_if_b_needs_one_and_has_none(tmp_path, merged):
    copy = shutil.copytree(CASE / "src", tmp_path / "copy")
    assert run(*words(copy)).exit_code == 0
    result = run("diff", merged, CASE / "src", "-s", CASE / "src_strategy.ckpt")
    assert result.exit_code == 0
    out = tmp_path / "new"
    target = CASE / "dst_strategy.ckpt"
    run_well("reshard", CASE / "src", "-s", CASE / "src_strategy.ckpt", "-d", target, "-o", out)
    assert run(*words(out, "--b-strategy", target)).exit_code == 0
    result = run(*words(out))
    said = "warning[borrowed_strategy]: B: the strategy of A is used, which may not be that of B "
    assert f"{said}Try: --b-strategy STRATEGY" in message(result)


def test_where_the_strategy_of_a_is_wrong_for_b_the_finding_says_how_to_give_another(tmp_path):
    ranks = cut(entries(), ROW_CUT)
    a = catalog_on_disk(tmp_path / "a", ranks)
    ranks[1]["w"] = noise("other", "Float32", ranks[1]["w"].shape)
    b = catalog_on_disk(tmp_path / "b", ranks)
    found = ckpttool.diff(a, b, ROW_CUT, ROW_CUT)
    assert found.findings[0].text.startswith(f"B ({b.root}): ")
    (note,) = found.notes
    assert note.code == "borrowed_strategy"
    assert note.hint.startswith("--b-strategy STRATEGY, or --replicated if ")
    for rank in (2, 3):
        shutil.rmtree(tmp_path / "a" / f"rank_{rank}")
    with pytest.raises(CkptToolError) as caught:
        ckpttool.diff(b, ckpttool.scan(str(tmp_path / "a")), ROW_CUT, ROW_CUT)
    assert not mentions(
        str(caught.value),
        r"B: w: .*\n  ranks 2, 3: no checkpoint.*; read with the strategy of A \(--b-strategy\)",
        "  Try: restore the files",
        r"A \(.*\): w: different between ranks that should",
    )
    assert "borrowed_strategy" not in {one.code for one in caught.value.diagnostics}


def test_where_every_rank_of_b_has_a_file_the_hint_is_to_give_its_strategy(tmp_path):
    ranks = cut(entries(), ROW_CUT)
    a = catalog_on_disk(tmp_path / "a", ranks)
    del ranks[2]["w"], ranks[3]["w"]
    b = catalog_on_disk(tmp_path / "b", ranks)
    with pytest.raises(PlanError) as caught:
        ckpttool.diff(a, b, ROW_CUT, ROW_CUT)
    (problem,) = caught.value.diagnostics
    assert (problem.code, problem.hint) == ("missing", BORROWED.hint)
    with pytest.raises(PlanError) as caught:
        ckpttool.diff(b, a, ROW_CUT, ROW_CUT)
    (problem,) = caught.value.diagnostics
    assert problem.hint.startswith("copy the files again")


def test_two_steps_of_one_folder_are_compared(tmp_path):
    case = GOLDEN / "several_files_per_rank"
    strategy = case / "src_strategy.ckpt"
    result = run("diff", case / "src", case / "src", "-s", strategy, "--step", "10_10",
                 "--b-step", "2_10")  # fmt: skip
    assert result.exit_code == 1, result.output
    same = run("diff", case / "src", case / "src", "-s", strategy, "--step", "10_10")
    assert same.exit_code == 0


def test_what_stops_diff_has_another_exit_code_than_1(merged, tmp_path, monkeypatch):
    assert run("diff", merged, tmp_path / "nothing").exit_code == 2
    assert run("diff", merged).exit_code == 2
    assert run("diff", merged, merged, "--atol", "-1").exit_code == 2
    assert run("diff", merged, GOLDEN / "PROVENANCE.md").exit_code == 3
    assert run("diff", merged, CASE / "src", "-s", GOLDEN / "PROVENANCE.md").exit_code == 4
    assert run("diff", merged, CASE / "src").exit_code == 2

    import ckpttool.discovery.scan as module

    def fail(path, key):
        raise PermissionError(13, os.strerror(13), path)

    monkeypatch.setattr(module, "read_index", fail)
    result = run("diff", merged, merged)
    assert result.exit_code == 3
    assert message(result).startswith(f"error[unreadable]: {merged}: Permission denied (")


@pytest.mark.big
def test_memory_of_a_comparison_does_not_grow_with_the_tensor(tmp_path):
    stay_small(tmp_path, "diff", str(tmp_path / "src"), str(tmp_path / "src"))
