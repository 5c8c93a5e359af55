"""Tensors read side by side: what is found is what NumPy finds, whatever the layouts are."""

import hashlib
import math
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

import ckpttool
from ckpttool.checks.replicas import compare_replicas, find_difference, slices_of
from ckpttool.model.plan import OutputTensor
from ckpttool.problems import Diagnostic
from ckpttool.storage.compare import (
    CompareOptions,
    TensorDelta,
    TensorStats,
    Tolerance,
    compare_tensors,
)
from ckpttool.wording import format_difference
from tests.oracle import take
from tests.strategies import as_stored, examples, moves, table_moves
from tests.support.checkpoints import cut, oracle, write_ranks
from tests.support.in_memory import checkpoint_in_memory, find
from tests.support.readers import NUMPY_TYPES, Entry, entry_of

FORMATS = ["ckpt", "hdf5"]
KINDS = ["Bool", "Int8", "Int64", "UInt64", "BFloat16", "Float16", "Float32", "Float64",
         "Float8E5M2", "Complex64", "Complex128", "Int4"]  # fmt: skip


@st.composite
def options(draw, tolerance=None):
    """Bands from one element on, and tasks that end within tensors."""
    sizes = st.sampled_from([1, 7, 24, 100, 1 << 20])
    return CompareOptions(
        tolerance,
        wants_counts=True,
        wants_hashes=draw(st.booleans()),
        band_bytes=draw(sizes),
        task_bytes=draw(sizes),
        max_in_flight=draw(st.integers(1, 3)),
    )


def retyped(draw, entries):
    """The same shapes in other types, with contents that are likely to be alike and odd."""
    found = {}
    for name, entry in entries.items():
        dtype = draw(st.sampled_from(KINDS))
        itemsize = np.dtype(NUMPY_TYPES[dtype]).itemsize
        pool = [draw(st.binary(min_size=itemsize, max_size=itemsize)) for _ in range(3)]
        pool += [bytes(itemsize), bytes(itemsize - 1) + b"\x80", odd(dtype, itemsize)]
        seed = np.random.default_rng(draw(st.integers(0, 9)))
        picked = seed.integers(0, len(pool), math.prod(entry.shape))
        found[name] = Entry(dtype, entry.shape, b"".join(pool[i] for i in picked))
    return found


def odd(dtype, itemsize):
    """An element that is Inf or NaN, if there is one."""
    numbers = {
        "BFloat16": b"\x80\x7f",
        "Float8E5M2": b"\x7c",
        "Float16": struct.pack("<e", math.inf),
        "Float32": struct.pack("<f", math.nan),
        "Float64": struct.pack("<d", math.inf),
        "Complex64": struct.pack("<ff", 1, math.nan),
    }
    return numbers.get(dtype, b"\xff" * itemsize)


def altered(draw, entry):
    """The same tensor with some elements replaced by others of it, or a bit turned."""
    data, itemsize = bytearray(entry.data), np.dtype(NUMPY_TYPES[entry.dtype]).itemsize
    count = len(data) // itemsize
    for _ in range(draw(st.integers(0, 4)) if count else 0):
        at = draw(st.integers(0, count - 1)) * itemsize
        if draw(st.booleans()):
            source = draw(st.integers(0, count - 1)) * itemsize
            data[at : at + itemsize] = data[source : source + itemsize]
        else:
            data[at + draw(st.integers(0, itemsize - 1))] ^= 1 << draw(st.integers(0, 7))
    return entry._replace(data=bytes(data))


# ------------------------------------------------------------- the same, slowly, number by number


def numbers(entry):
    """Every element as a Python number, exactly; None if the type has none."""
    if entry.dtype == "Int4":
        return None
    if entry.dtype == "BFloat16":
        return [struct.unpack("<f", b"\0\0" + entry.data[i : i + 2])[0]
                for i in range(0, len(entry.data), 2)]  # fmt: skip
    if entry.dtype == "Float8E5M2":
        return [struct.unpack("<e", b"\0" + bytes([byte]))[0] for byte in entry.data]
    if entry.dtype == "Bool":
        return list(entry.data)
    return [x.item() for x in np.frombuffer(entry.data, NUMPY_TYPES[entry.dtype])]


def parts(number):
    return (number.real, number.imag) if isinstance(number, complex) else (number,)


def is_same(x, y):
    pairs = zip(parts(x), parts(y), strict=True)
    return all(a == b or (a != a and b != b) for a, b in pairs)


def gap(x, y):
    pairs = zip(parts(x), parts(y), strict=True)
    return math.hypot(*(0.0 if is_same(a, b) else abs(a - b) for a, b in pairs))


def shrunk(x, y):
    if math.isfinite(gap(x, y)) and math.isfinite(math.hypot(*parts(y))):
        return x, y, 1
    a, b = ([part / 16 for part in parts(one)] for one in (x, y))
    return (complex(*a), complex(*b), 1 / 16) if len(a) > 1 else (a[0], b[0], 1 / 16)


def expected_difference(a, b, tolerance):
    itemsize = np.dtype(NUMPY_TYPES[a.dtype]).itemsize
    bits = [[e.data[i : i + itemsize] for i in range(0, len(e.data), itemsize)] for e in (a, b)]
    differing = [i for i, (x, y) in enumerate(zip(*bits, strict=True)) if x != y]
    values, counted, same = (numbers(a), numbers(b)), differing, 0
    distances, ratios = [], []
    nans = 0
    if values[0] is not None:
        pairs = {i: (values[0][i], values[1][i]) for i in differing}
        gaps = {i: gap(x, y) for i, (x, y) in pairs.items()}
        nans = sum(one != one for one in gaps.values())
        distances = [one for one in gaps.values() if one == one]
        small = {i: shrunk(x, y) for i, (x, y) in pairs.items()}
        measured = {i: (gap(x, y), math.hypot(*parts(y))) for i, (x, y, _) in small.items()}
        ratios = [distance / size for distance, size in measured.values() if size > 0]
        ratios = [ratio for ratio in ratios if ratio == ratio]
        if tolerance is None:
            same = sum(is_same(x, y) for x, y in pairs.values())
        else:
            near = {
                i: math.isfinite(distance)
                and distance <= tolerance.atol * small[i][2] + tolerance.rtol * size
                for i, (distance, size) in measured.items()
            }
            counted = [i for i, pair in pairs.items() if not is_same(*pair) and not near[i]]
    first = np.unravel_index(counted[0], a.shape) if counted else None
    return TensorDelta(
        len(counted),
        same,
        max(distances, default=None),
        max(ratios, default=None),
        None if first is None else tuple(map(int, first)),
        bool(differing),
        nans=nans,
    )


def expected_facts(entry, differences):
    values = numbers(entry)
    count = math.prod(entry.shape)
    if values is None:
        return TensorStats(count, is_zero=not any(entry.data), differences=differences)
    nans = [i for i, x in enumerate(values) if any(part != part for part in parts(x))]
    infs = [i for i, x in enumerate(values) if any(abs(part) == math.inf for part in parts(x))]
    first = [tuple(map(int, np.unravel_index(f[0], entry.shape))) if f else None
             for f in (nans, infs)]  # fmt: skip
    zero = all(x == 0 for x in values)
    return TensorStats(count, len(nans), len(infs), *first, zero, differences)


def expected_hashes(*entries):
    return tuple(
        (hashlib.sha256(entry.data).hexdigest(),) if entry.data else () for entry in entries
    )


def rounded(facts):
    """Without the last bits, in which moduli of complex numbers may differ."""
    differences = tuple(
        replace(
            difference,
            max_abs=None
            if difference.max_abs is None
            else pytest.approx(difference.max_abs, rel=1e-12),
            max_rel=None
            if difference.max_rel is None
            else pytest.approx(difference.max_rel, rel=1e-12),
        )
        for difference in facts.differences
    )
    return replace(facts, differences=differences)


def whole(catalog, strategy, name):
    found, problems, _ = find(catalog, strategy, unlisted="first")
    assert not problems
    (tensor,) = found[name]
    return OutputTensor.full(tensor)


def check_comparison(folder, move, data, tolerance):
    """A and B, cut in different ways into files of different formats, are compared."""
    mine = retyped(data.draw, move.entries)
    other = {name: altered(data.draw, entry) for name, entry in mine.items()}
    src, dst = as_stored(move.src), as_stored(move.dst)
    formats = [data.draw(st.sampled_from(FORMATS)) for _ in range(2)]
    write_ranks(folder / "a", cut(mine, move.src), formats[0])
    write_ranks(folder / "b", cut(other, move.dst), formats[1])
    a, b = (ckpttool.scan(str(folder / side)) for side in ("a", "b"))
    names = [name for name in mine if name in src.layouts and name in dst.layouts]
    tensors = [(name, (whole(a, src, name), whole(b, dst, name))) for name in names]
    engine = data.draw(st.sampled_from(["inline", "threads:2"]))
    look = data.draw(options(tolerance))
    with ckpttool.open_engine(engine) as executor:
        found = list(compare_tensors(tensors, executor, look))
    assert [name for name, _ in found] == names
    for name, facts in found:
        difference = expected_difference(mine[name], other[name], tolerance)
        hashes = expected_hashes(mine[name], other[name]) if look.wants_hashes else ()
        expected = replace(expected_facts(mine[name], (difference,)), hashes=hashes)
        assert facts == rounded(expected)


@examples(30)
@given(st.one_of(moves(), table_moves()), st.data())
def test_bytes_are_compared_across_layouts_and_formats_as_numpy_would(new_folder, move, data):
    check_comparison(new_folder(), move, data, None)


@examples(20)
@given(st.one_of(moves(), table_moves()), st.data())
def test_numbers_are_compared_within_a_tolerance_as_numpy_would(new_folder, move, data):
    sizes = st.sampled_from([0.0, 1e-3, 0.5, 1.0, 100.0])
    check_comparison(new_folder(), move, data, Tolerance(data.draw(sizes), data.draw(sizes)))


# ---------------------------------------------------------------------------------- replicas


def owners_of(layout, shape):
    full = np.arange(math.prod(shape), dtype=np.int64).reshape(shape)
    groups = {}
    for rank in layout.ranks:
        groups.setdefault(take(full, oracle(layout), rank).tobytes(), []).append(rank)
    return groups


def expected_replicas(ranks, strategy, name, shape):
    """Findings of one parameter, from each rank's bytes and the oracle's element numbers."""
    layout = strategy.layouts[name][0]
    for places, owners in owners_of(layout, shape).items():
        contents = {}
        for rank in owners:
            contents.setdefault(ranks[rank][name].data, []).append(rank)
        if len(contents) == 1:
            continue
        held = [np.frombuffer(ranks[rank][name].data, np.uint8) for rank in owners]
        where = np.frombuffer(places, np.int64)
        rows = [one.reshape(len(where), -1) for one in held]
        differing = [np.flatnonzero((row != rows[0]).any(axis=1)) for row in rows[1:]]
        first = min(where[at[0]] for at in differing if len(at))
        most = max(map(len, contents.values()))
        few = sorted(rank for held in contents.values() if len(held) < most for rank in held)
        is_clear = sum(len(held) == most for held in contents.values()) == 1
        index = tuple(map(int, np.unravel_index(first, shape)))
        yield (tuple(few if is_clear else owners), max(map(len, differing)), index,
               {tuple(held) for held in contents.values()})  # fmt: skip


@examples(30)
@given(st.one_of(moves(most_stages=1), table_moves()), st.data())
def test_replicas_that_differ_are_found_with_ranks_count_and_first_index(new_folder, move, data):
    folder = new_folder()
    entries = retyped(data.draw, move.entries)
    ranks = cut(entries, move.src)
    names = sorted(move.src.layouts)
    replicated = [
        (name, owners)
        for name in names
        for owners in owners_of(move.src.layouts[name][0], entries[name].shape).values()
        if len(owners) > 1
    ]
    for _ in range(data.draw(st.integers(0, 4)) if replicated else 0):
        name, owners = data.draw(st.sampled_from(replicated))
        rank = data.draw(st.sampled_from(owners))
        ranks[rank][name] = altered(data.draw, ranks[rank][name])
    write_ranks(folder / "a", ranks, data.draw(st.sampled_from(FORMATS)))
    strategy = as_stored(move.src)
    catalog = ckpttool.scan(str(folder / "a"))
    tensors = checkpoint_in_memory(catalog, strategy, unlisted="first").tensors
    listed = [tensor for tensor in tensors if tensor.is_listed]
    with ckpttool.open_engine("threads:2") as executor:
        pairs = compare_replicas(
            (one for tensor in listed for one in slices_of(tensor)), executor, data.draw(options())
        )
        found = [finding for pair in pairs if (finding := find_difference(*pair)) is not None]
    for name in names:
        got = [(f.ranks, f.count, f.first) for f in found if f.tensor == name]
        want = list(expected_replicas(ranks, move.src, name, entries[name].shape))
        assert sorted(got) == sorted(one[:3] for one in want)
        assert all(isinstance(finding, Diagnostic) for finding in found)
        for finding in (f for f in found if f.tensor == name):
            facts = finding.ranks, finding.count, finding.first
            (groups,) = (one[3] for one in want if one[:3] == facts)
            said = f"{format_difference(sorted(groups))}; first at {finding.first}"
            assert finding.facts.partition("; ")[2].startswith(said)


def test_elements_far_into_a_band_are_located(tmp_path):
    array = np.ones((3, 90_000), "<f4")
    other = array.copy()
    array[0, 70_000], array[2, 80_000] = np.nan, np.inf
    other[0, 70_001] = 2
    for side, full in (("a", array), ("b", other)):
        write_ranks(tmp_path / side, {0: {"w": entry_of(full)}}, "ckpt")
    a, b = (whole(ckpttool.scan(str(tmp_path / side)), None, "w") for side in ("a", "b"))
    with ckpttool.open_engine("inline") as executor:
        tensors = [("w", (a, b))]
        ((_, facts),) = compare_tensors(tensors, executor, CompareOptions(wants_counts=True))
    assert (facts.nans, facts.first_nan) == (1, (0, 70_000))
    assert (facts.infinities, facts.first_infinity) == (1, (2, 80_000))
    (difference,) = facts.differences
    assert (difference.count, difference.first) == (3, (0, 70_000))


def test_facts_of_stretches_add_up():
    one = TensorDelta(1, 1, 2.0, None, (0, 3), True, b"x")
    two = TensorDelta(2, 0, 1.0, 0.5, (1, 0), True, b"y")
    assert one.merged(two).first == (0, 3)
    assert (one.merged(two).max_abs, one.merged(two).max_rel) == (2.0, 0.5)
    assert one.merged(TensorDelta()) == one
    assert TensorDelta().merged(two) == two
    assert one.merged(two).content != two.merged(one).content
    assert one.merged(two).content not in (b"", b"x", b"y")


def test_a_caller_that_stops_early_cancels_what_has_not_begun(tmp_path):
    entries = {f"w{i}": Entry("Int8", (64,), bytes(64)) for i in range(50)}
    write_ranks(tmp_path, {0: entries, 1: entries}, "ckpt")
    catalog = ckpttool.scan(str(tmp_path))
    tensors = checkpoint_in_memory(catalog, None).tensors
    with ckpttool.open_engine("threads:1") as executor:
        slices = (one for tensor in tensors for one in slices_of(tensor))
        found = compare_replicas(slices, executor, CompareOptions(task_bytes=1, max_in_flight=8))
        next(found)
        found.close()
