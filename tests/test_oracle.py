"""The judges judged: readers and oracle against the corpus, without the package."""

import numpy as np
import pytest

from tests.oracle import OracleLayout, full_shape, join, take
from tests.support import corpus
from tests.support.readers import Entry, read_ckpt, read_hdf5, write_ckpt

pytestmark = pytest.mark.source
MERGES = corpus.conversions("merge")
RESHARDS = corpus.conversions("reshard", "split")


@pytest.mark.parametrize("conversion", MERGES, ids=lambda c: c.case)
def test_oracle_merges_every_case_as_mindspore_does(conversion):
    merged = {0: corpus.merged_by_oracle(conversion.case)}
    found = corpus.differences(conversion.ranks, corpus.digests(merged), conversion.undefined)
    assert not found


@pytest.mark.parametrize("conversion", RESHARDS, ids=lambda c: f"{c.case}-{c.kind}")
def test_oracle_reshards_every_case_as_mindspore_does(conversion):
    merged = corpus.merged_by_oracle(conversion.case)
    split = corpus.digests(corpus.split_by_oracle(conversion.case, merged))
    assert not corpus.differences(conversion.ranks, split, conversion.undefined)


@pytest.mark.parametrize(
    "folder",
    sorted((*corpus.GOLDEN.glob("*/golden/merge"), *corpus.GOLDEN.glob("*/full"))),
    ids=lambda path: path.relative_to(corpus.GOLDEN).parts[0],
)
def test_readers_find_in_mindspores_own_full_file_what_merging_must_give(folder):
    case = folder.relative_to(corpus.GOLDEN).parts[0]
    got = corpus.source_ranks(case, str(folder.relative_to(corpus.GOLDEN / case)))
    conversion = corpus.conversion(case, "merge")
    assert not corpus.differences(conversion.ranks, corpus.digests(got), conversion.undefined)


def test_oracle_cuts_as_the_compiler_was_seen_to_cut():
    rows = np.arange(64)
    for layout, rank, start, stop in [
        (OracleLayout((2, 2, 2), ((1,),)), 2, 32, 64),
        (OracleLayout((2, 2, 2), ((0, 1),)), 1, 32, 48),
        (OracleLayout((2, 2, 2), ((1,),), -1), 4, 16, 24),
        (OracleLayout((2, 2, 2), ((1,),), 2), 6, 32, 48),
        (OracleLayout((2, 4), ((),), -1), 3, 24, 32),
        (OracleLayout((2,), ((0,),), first_rank=6), 7, 32, 64),
    ]:
        np.testing.assert_array_equal(take(rows, layout, rank), np.arange(start, stop))


@pytest.mark.parametrize("opt_size", [0, 2, -1])
def test_oracle_joins_what_it_cut(opt_size):
    layout = OracleLayout((2, 2, 2), ((0,), (2,)), opt_size, first_rank=8)
    full = np.arange(16 * 6).reshape(16, 6)
    slices = {rank: take(full, layout, rank) for rank in layout.ranks}
    assert full_shape(slices[8].shape, layout) == full.shape
    np.testing.assert_array_equal(join(slices, layout), full)


def test_oracle_cuts_by_hand_where_the_strategy_says():
    layout = OracleLayout((2, 2), ((1,), ()), 2, rows=(6, 4))
    rows = np.arange(10)
    taken = [take(rows, layout._replace(tensor_map=((1,),)), rank).tolist() for rank in range(4)]
    assert taken == [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]
    full = np.arange(20).reshape(10, 2)
    np.testing.assert_array_equal(join({r: take(full, layout, r) for r in range(4)}, layout), full)


def test_oracle_gives_every_rank_its_part_of_every_field():
    layout = OracleLayout((3, 2), ((1,), (0,)), fields=2)
    assert take(np.arange(12).reshape(12, 1).repeat(2, 1), layout, 2).tolist() == [
        [2],
        [3],
        [8],
        [9],
    ]
    full = np.arange(12 * 4).reshape(12, 4)
    slices = {rank: take(full, layout, rank) for rank in range(6)}
    np.testing.assert_array_equal(join(slices, layout), full)
    columns = [slices[rank].reshape(2, 2, 2) for rank in (0, 2, 4)]
    np.testing.assert_array_equal(np.concatenate(columns, 1).reshape(12, 2), full[:, :2])


def test_oracle_refuses_to_join_when_a_slice_is_nowhere():
    layout = OracleLayout((2,), ((0,),))
    with pytest.raises(ValueError, match="no rank holds element 2"):
        join({0: np.zeros(2)}, layout)


def test_ckpt_reader_reads_what_the_ckpt_writer_wrote(tmp_path):
    tensors = {
        "scalar": Entry("Int64", (), bytes(range(8))),
        "long": Entry("BFloat16", (300,), bytes(600)),
        "empty": Entry("Float32", (0, 3), b""),
    }
    write_ckpt(tmp_path / "a.ckpt", tensors)
    assert read_ckpt(tmp_path / "a.ckpt") == tensors


def test_hdf5_reader_names_the_types_h5py_writes(tmp_path):
    import h5py

    values = {
        "a/Bool": np.array([True, False]),
        "a/Int8": np.int8([-1, 2]),
        "a/UInt8": np.uint8([1, 2]),
        "a/UInt64": np.uint64(5),
        "a/Float16": np.float16([[1.5, 2]]),
        "a/Float64": np.zeros((0, 3)),
        "a/Complex64": np.complex64([1 + 2j]),
        "a/Complex128": np.complex128(1 - 2j),
    }
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for name, value in values.items():
            file[name] = value
        kind = h5py.string_dtype("utf-8", 8)
        file.create_dataset("text", data=np.array("grün".encode(), kind), dtype=kind)
        file["odd"] = np.uint8([7])
        file["odd"].attrs["dtype"] = "HiFloat8"
    got = read_hdf5(tmp_path / "a.h5")
    for name, value in values.items():
        assert got[name] == Entry(name[2:], value.shape, value.tobytes())
    assert got["odd"] == Entry("HiFloat8", (1,), b"\x07")
    assert got["text"] == Entry("str", (0,), "grün".encode("utf-32-le"))


def test_hdf5_reader_tells_the_narrow_float_types_apart(tmp_path):
    import h5py
    from h5py import h5d, h5s, h5t

    def narrow(size, exponent, mantissa):
        kind = h5t.IEEE_F32LE.copy()
        kind.set_fields(8 * size - 1, mantissa, exponent, 0, mantissa)
        kind.set_precision(8 * size)
        kind.set_size(size)
        kind.set_ebias(2 ** (exponent - 1) - 1)
        return kind

    types = {b"BFloat16": (2, 8, 7), b"Float8E4M3FN": (1, 4, 3), b"Float8E5M2": (1, 5, 2)}
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for name, sizes in types.items():
            kind = narrow(*sizes)
            stored = h5d.create(file.id, name, kind, h5s.create_simple((2,)))
            stored.write(h5s.ALL, h5s.ALL, np.float32([1, 2]), h5t.IEEE_F32LE)
    got = read_hdf5(tmp_path / "a.h5")
    assert got["BFloat16"] == Entry("BFloat16", (2,), b"\x80\x3f\x00\x40")
    assert got["Float8E4M3FN"] == Entry("Float8E4M3FN", (2,), b"\x38\x40")
    assert got["Float8E5M2"] == Entry("Float8E5M2", (2,), b"\x3c\x40")
