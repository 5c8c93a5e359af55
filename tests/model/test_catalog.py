"""Nouns of storage."""

import pickle

import pytest

from ckpttool.model.catalog import Catalog
from ckpttool.model.tensors import (
    Extent,
    FileIndex,
    SharedHeader,
    StoredFile,
    StoredTensor,
    TensorMeta,
)
from ckpttool.problems import Diagnostic
from ckpttool.wording import format_ranks


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([5], "rank 5"),
        ([0, 1], "ranks 0, 1"),
        ([0, 1, 2], "ranks 0-2"),
        ([7, 3, 4, 5, 0], "ranks 0, 3-5, 7"),
        (range(128), "ranks 0-127"),
        ([1, 2, 4, 5], "ranks 1, 2, 4, 5"),
    ],
)
def test_ranks_are_written_as_people_write_them(ranks, text):
    assert format_ranks(ranks) == text


@pytest.mark.parametrize(
    ("dtype", "shape", "nbytes"),
    [
        ("Float32", (), 4),
        ("BFloat16", (3, 5), 30),
        ("Complex128", (2,), 32),
        ("Int4", (7,), 7),
        ("Bool", (0, 9), 0),
    ],
)
def test_a_tensor_knows_its_bytes(dtype, shape, nbytes):
    assert TensorMeta("w", dtype, shape).nbytes == nbytes


@pytest.mark.parametrize(
    ("meta", "extents"),
    [
        (TensorMeta("w", "Float32", (2, 3)), (Extent(8, 16), Extent(100, 8))),
        (TensorMeta("note", "str", (), text="a text"), ()),
        (TensorMeta("q", "F4", (3,), whole_shape=(2, 3)), (Extent(0, 3),)),
    ],
)
def test_a_stored_tensor_that_was_pickled_is_equal(meta, extents):
    tensor = StoredTensor(meta, StoredFile("net.ckpt"), extents)
    again = pickle.loads(pickle.dumps(tensor))
    assert again == tensor
    assert again.meta.nbytes == meta.nbytes


def test_a_string_has_the_bytes_of_its_text():
    assert TensorMeta("s", "str", (), "grün").nbytes == 5
    assert TensorMeta("s", "str", (), "").nbytes == 0


@pytest.mark.parametrize(
    ("dtype", "shape", "text"),
    [
        ("str", (), None),
        ("Float32", (), "x"),
        ("str", (1,), "x"),
        ("Float7", (1,), None),
        ("Uint8", (1,), None),
    ],
)
def test_a_tensor_that_cannot_be_is_refused_by_name(dtype, shape, text):
    with pytest.raises(ValueError, match="odd: "):
        TensorMeta("odd", dtype, shape, text)


def test_extents_have_the_bytes_of_their_tensor():
    meta = TensorMeta("w", "Float32", (3,))
    assert StoredTensor(meta, StoredFile("net.ckpt"), (Extent(0, 8), Extent(100, 4))).meta is meta
    with pytest.raises(ValueError, match="w: extents of 8 bytes for 12"):
        StoredTensor(meta, StoredFile("net.ckpt"), (Extent(0, 8),))


def header(path, **rows):
    metas = [TensorMeta(name, "Int8", (n, 4)) for name, n in rows.items()]
    return {
        meta.name: StoredTensor(meta, StoredFile(path), (Extent(9, meta.nbytes),)) for meta in metas
    }


def test_tensors_of_a_file_that_is_like_another_are_its_own():
    first = header("a.ckpt", w=2, b=1)
    alike = SharedHeader(first, StoredFile("b.ckpt"))
    assert dict(alike) == header("b.ckpt", w=2, b=1)
    assert [*alike] == ["w", "b"]
    assert len(alike) == 2
    assert alike["w"].meta is first["w"].meta
    assert "w" in alike
    assert "c" not in alike
    assert alike.get("c") is None


def test_what_ranks_hold_is_told_by_their_headers():
    first, other = header("0", w=2, b=1), header("1", w=3, c=1)
    held = {
        0: first,
        1: other,
        2: SharedHeader(first, StoredFile("2")),
        3: SharedHeader(other, StoredFile("3")),
        4: header("4", w=2),
    }
    catalog = Catalog(
        "run", {r: FileIndex((StoredFile(f"{r}"),), "ckpt", 9, held[r]) for r in held}
    )
    assert [*catalog.headers] == [(0, 2), (1, 3), (4,)]
    assert catalog.holders == {"w": (0, 1, 2, 3, 4), "b": (0, 2), "c": (1, 3)}
    assert [*catalog.holders] == ["w", "b", "c"]
    shapes = {rank: meta.shape for rank, meta in catalog.metas_of("w").items()}
    assert [*shapes.items()] == [(0, (2, 4)), (1, (3, 4)), (2, (2, 4)), (3, (3, 4)), (4, (2, 4))]
    assert catalog.metas_of("d") == {}
    assert catalog.metas == {"w": first["w"].meta, "b": first["b"].meta, "c": other["c"].meta}


def test_the_table_of_codes_says_what_of_a_catalog_is_an_error() -> None:
    codes = ("unfinished", "missing", "leftover")
    found = {code: Diagnostic(code, "text") for code in codes}
    catalog = Catalog("run", {}, diagnostics=tuple(found.values()))
    assert catalog.errors() == (found["unfinished"], found["missing"])
    assert catalog.errors("inspect") == (found["missing"],)


def test_what_ranks_hold_by_one_name_differs_in_its_hash() -> None:
    # Thousands of ranks are grouped by these; equal hashes would compare each with all others.
    texts = [TensorMeta("s", "str", (), f"of rank {rank}") for rank in range(100)]
    rows = [TensorMeta("w", "Float32", (rank, 4)) for rank in range(100)]
    assert len({*map(hash, texts)}) == len({*map(hash, rows)}) == 100
