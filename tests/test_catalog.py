"""Nouns of storage."""

import pytest

from ckpttool.model.catalog import Extent, StoredTensor, TensorMeta, format_ranks


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
    assert StoredTensor(meta, "net.ckpt", (Extent(0, 8), Extent(100, 4))).meta is meta
    with pytest.raises(ValueError, match="w: extents of 8 bytes for 12"):
        StoredTensor(meta, "net.ckpt", (Extent(0, 8),))
