"""Regions read from files, against NumPy's own indexing."""

import errno
import mmap
import os
import platform
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckpttool import system
from ckpttool.model.plan import OutputTensor
from ckpttool.model.region import Region
from ckpttool.model.tensors import Extent, StoredFile, StoredTensor, TensorMeta
from ckpttool.problems import FormatError
from ckpttool.storage import region_io
from ckpttool.storage.region_io import FlatFiles, read_band


def lay_out(path, array, cuts=(), gap=3, start=5):
    """Write a tensor in extents that are cut at these bytes, with gaps between."""
    data = array.tobytes()
    edges = [0, *sorted({cut for cut in cuts if 0 < cut < len(data)}), len(data)]
    extents, at = [], start
    with path.open("wb") as file:
        for first, last in pairwise(edges):
            file.seek(at)
            file.write(data[first:last])
            extents.append(Extent(at, last - first))
            at += last - first + gap
    dtype = {1: "Int8", 2: "Int16", 4: "Int32", 8: "Int64"}[array.itemsize]
    held = tuple(extent for extent in extents if extent.nbytes)
    return StoredTensor(TensorMeta("w", dtype, array.shape), StoredFile(str(path)), held)


def numbered(shape, dtype=np.int32):
    return np.arange(int(np.prod(shape, dtype=np.int64)), dtype=dtype).reshape(shape)


def read(tensor, region, scratch_bytes=1 << 20, out=None):
    itemsize = tensor.meta.itemsize
    if out is None:
        out = np.full((*region.shape, itemsize), 0xAA, np.uint8)
    with FlatFiles(scratch_bytes) as files:
        read_band(files, OutputTensor.copy_of(tensor), region, out)
    return np.ascontiguousarray(out).view(f"<i{itemsize}").reshape(region.shape)


def cut(array, region):
    return array[tuple(slice(a, b) for a, b in zip(region.start, region.stop, strict=True))]


# ------------------------------------------------------------------------ bytes


def test_bytes_are_written_and_read_across_extents(tmp_path):
    tensor = lay_out(tmp_path / "a", numbered((30,), np.int8), cuts=(7, 8, 20))
    data = np.random.default_rng(1).integers(0, 255, 30, np.uint8)
    with FlatFiles(1 << 20) as files:
        for first, last in [(0, 5), (5, 9), (9, 30)]:
            files.write_bytes(tensor, first, data[first:last].data)
        out = np.empty(30, np.uint8)
        for first, last in [(0, 1), (1, 8), (8, 21), (21, 30)]:
            files.read_bytes(tensor, first, out[first:last].data)
    assert np.array_equal(out, data)
    whole = (tmp_path / "a").read_bytes()
    assert b"".join(whole[e.offset : e.offset + e.nbytes] for e in tensor.extents) == data.tobytes()
    gaps = [whole[e.offset - 3 : e.offset] for e in tensor.extents[1:]]
    assert gaps == [bytes(3)] * 3


def test_a_file_may_be_read_first_and_written_then(tmp_path):
    tensor = lay_out(tmp_path / "a", numbered((4,), np.int8))
    out = np.empty(4, np.uint8)
    with FlatFiles(16) as files:
        files.read_bytes(tensor, 0, out.data)
        files.write_bytes(tensor, 0, (out + 1).data)
        files.read_bytes(tensor, 0, out.data)
    assert out.tolist() == [1, 2, 3, 4]


def test_bytes_beyond_the_tensor_are_a_mistake_of_the_caller(tmp_path):
    tensor = lay_out(tmp_path / "a", numbered((4,), np.int8))
    with FlatFiles(16) as files, pytest.raises(ValueError, match="2 bytes beyond its last extent"):
        files.read_bytes(tensor, 2, np.empty(4, np.uint8).data)


def test_a_file_that_has_become_shorter_is_an_error(tmp_path):
    tensor = lay_out(tmp_path / "a", numbered((1000,), np.int8))
    os.truncate(tmp_path / "a", 500)
    with FlatFiles(16) as files, pytest.raises(FormatError, match="byte 500: w: the file ends"):
        files.read_bytes(tensor, 0, np.empty(1000, np.uint8).data)


def test_calls_that_move_fewer_bytes_than_asked_are_repeated(tmp_path, monkeypatch):
    array = numbered((1000,), np.int16)
    tensor = lay_out(tmp_path / "a", array, cuts=(333,))
    preadv, pwritev = os.preadv, os.pwritev
    monkeypatch.setattr(os, "preadv", lambda fd, parts, at: preadv(fd, [parts[0][:70]], at))
    monkeypatch.setattr(
        os, "pwritev", lambda fd, parts, at, *flags: pwritev(fd, [parts[0][:70]], at, *flags)
    )
    out = np.empty(2000, np.uint8)
    with FlatFiles(16) as files:
        files.write_bytes(tensor, 0, array[::-1].copy().view(np.uint8).data)
        files.read_bytes(tensor, 0, out.data)
    assert np.array_equal(out.view("<i2"), array[::-1])


@pytest.fixture
def traffic(monkeypatch):
    """The calls that write, and the hints, as (offset, bytes, flags or None)."""
    calls = []
    pwritev = os.pwritev

    def write(fd, parts, at, flags=0):
        calls.append((at, len(parts[0]), flags))
        return pwritev(fd, parts, at)

    monkeypatch.setattr(os, "pwritev", write)
    monkeypatch.setattr(
        os, "posix_fadvise", lambda fd, at, nbytes, what: calls.append((at, nbytes, None))
    )
    return calls


def use_kernel(monkeypatch, release):
    monkeypatch.setattr(platform, "release", lambda: release)
    monkeypatch.setattr(region_io, "has_dontcache", system.has_dontcache.__wrapped__)


@pytest.mark.parametrize("release", ["5.15.0-91-generic", "6.14.2", "6.15.0", "unknown"])
def test_data_are_written_in_calls_of_a_mebibyte_and_sent_to_the_disk_at_once(
    tmp_path, monkeypatch, traffic, release
):
    use_kernel(monkeypatch, release)
    array = numbered((5 << 18,))
    tensor = lay_out(tmp_path / "a", np.zeros_like(array), cuts=(2 << 20,))
    with FlatFiles(16) as files:
        files.write_bytes(tensor, 0, array.view(np.uint8).data)
    assert [nbytes for _, nbytes, flags in traffic if flags == 0] == [1 << 20] * 5
    hints = [(at, nbytes) for at, nbytes, flags in traffic if flags is None]
    assert hints == [(extent.offset, extent.nbytes) for extent in tensor.extents]
    assert np.array_equal(read(tensor, Region((0,), array.shape)), array)


@pytest.mark.parametrize("release", ["6.16.0", "6.18.44-fc", "7.0"])
def test_whole_pages_leave_the_cache_and_those_written_in_part_stay(
    tmp_path, monkeypatch, traffic, release
):
    use_kernel(monkeypatch, release)
    array = numbered((3 << 18,))
    tensor = lay_out(tmp_path / "a", np.zeros_like(array), cuts=(100,))
    page = mmap.PAGESIZE
    with FlatFiles(16) as files:
        files.write_bytes(tensor, 0, array.view(np.uint8).data)
    assert {flags for at, nbytes, flags in traffic if at % page or nbytes % page} == {0}
    whole = [(at, nbytes) for at, nbytes, flags in traffic if flags == system.RWF_DONTCACHE]
    assert all(at % page == 0 and 0 < nbytes <= 1 << 20 for at, nbytes in whole)
    assert sum(nbytes for _, nbytes in whole) > array.nbytes - 3 * page
    assert all(flags is not None for *_, flags in traffic)  # the kernel needs no hint
    assert sum(nbytes for _, nbytes, _ in traffic) == array.nbytes
    assert np.array_equal(read(tensor, Region((0,), array.shape)), array)


@pytest.mark.parametrize(
    "refusal",
    [OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP)), NotImplementedError("pwritev2")],
    ids=["file system", "Python"],
)
def test_what_cannot_keep_the_cache_free_is_asked_once(tmp_path, monkeypatch, traffic, refusal):
    use_kernel(monkeypatch, "6.18.0")
    write = os.pwritev

    def refuse(fd, parts, at, flags=0):
        if flags:
            traffic.append((at, 0, flags))
            raise refusal
        return write(fd, parts, at)

    monkeypatch.setattr(os, "pwritev", refuse)
    array = numbered((1 << 19,))
    tensor = lay_out(tmp_path / "a", np.zeros_like(array))
    with FlatFiles(16) as files:
        files.write_bytes(tensor, 0, array.view(np.uint8).data)
        files.write_bytes(tensor, 0, array.view(np.uint8).data)
    assert len([flags for *_, flags in traffic if flags]) == 1
    assert len([flags for *_, flags in traffic if flags is None]) == 2
    assert np.array_equal(read(tensor, Region((0,), array.shape)), array)


def test_another_failure_of_such_a_call_is_no_reason_to_try_otherwise(tmp_path, monkeypatch):
    use_kernel(monkeypatch, "6.18.0")

    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pwritev", fail)
    array = numbered((1 << 19,))
    tensor = lay_out(tmp_path / "a", array)
    with FlatFiles(16) as files, pytest.raises(OSError, match=r"Input/output error.*/a'"):
        files.write_bytes(tensor, 0, array.view(np.uint8).data)


def test_a_file_system_that_takes_no_hints_will_do(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    use_kernel(monkeypatch, "5.15.0")
    monkeypatch.setattr(os, "posix_fadvise", refuse)
    nbytes = region_io.SMALL_BYTES
    tensor = lay_out(tmp_path / "a", np.zeros(nbytes, np.int8))
    with FlatFiles(16) as files:
        files.write_bytes(tensor, 0, np.full(nbytes, 7, np.uint8).data)
    assert set(read(tensor, Region((0,), (nbytes,))).tolist()) == {7}


@pytest.mark.parametrize("release", ["5.15.0", "6.18.0"])
def test_a_small_extent_is_one_write_without_a_hint(tmp_path, monkeypatch, traffic, release):
    use_kernel(monkeypatch, release)
    tensor = lay_out(tmp_path / "a", np.zeros(30_000, np.int8), cuts=(10_000,))
    with FlatFiles(16) as files:
        files.write_bytes(tensor, 0, np.full(30_000, 7, np.uint8).data)
    assert traffic == [(extent.offset, extent.nbytes, 0) for extent in tensor.extents]


# ------------------------------------------------------------------------ regions


@st.composite
def regions(draw):
    shape = draw(st.lists(st.integers(1, 6), max_size=4))
    array = numbered(shape, draw(st.sampled_from([np.int8, np.int16, np.int32, np.int64])))
    pairs = [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    region = Region(tuple(a for a, _ in pairs), tuple(b for _, b in pairs))
    cuts = draw(st.lists(st.integers(0, array.nbytes), max_size=4))
    return array, region, cuts, draw(st.integers(0, 64)), draw(st.integers(1, 256))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(regions(), st.booleans())
def test_any_region_is_numpys_region(tmp_path, monkeypatch, drawn, spread):
    array, region, cuts, gap_bytes, scratch_bytes = drawn
    monkeypatch.setattr(region_io, "GAP_BYTES", gap_bytes)
    tensor = lay_out(tmp_path / "a", array, cuts)
    expected = cut(array, region)
    if not spread:
        found = read(tensor, region, scratch_bytes)
    else:
        larger = np.full([*(n + 2 for n in region.shape), array.itemsize], 0xAA, np.uint8)
        inside = tuple(slice(1, n + 1) for n in region.shape)
        found = read(tensor, region, scratch_bytes, larger[inside]).copy()
        larger[inside] = 0xAA
        assert (larger == 0xAA).all()
    assert np.array_equal(found, expected)


@pytest.fixture
def reads(monkeypatch):
    """The size of each read."""
    sizes, preadv = [], os.preadv
    monkeypatch.setattr(
        os, "preadv", lambda fd, parts, at: sizes.append(len(parts[0])) or preadv(fd, parts, at)
    )
    return sizes


def test_the_scratch_buffer_bounds_what_is_read_at_once(tmp_path, reads):
    array = numbered((1000, 100))
    tensor = lay_out(tmp_path / "a", array)
    region = Region((0, 10), (1000, 60))
    assert np.array_equal(read(tensor, region, 5000), cut(array, region))
    assert max(reads) <= 5000
    assert len(reads) < 200  # runs are read together, about ten at once


def test_close_runs_are_read_at_once_and_far_runs_one_by_one(tmp_path, monkeypatch, reads):
    array = numbered((10, 100), np.int8)
    tensor = lay_out(tmp_path / "a", array)
    for gap_bytes, expected in [(90, [1000]), (89, [10] * 10)]:
        monkeypatch.setattr(region_io, "GAP_BYTES", gap_bytes)
        reads.clear()
        read(tensor, Region((0, 0), (10, 10)))
        assert reads == expected


def test_what_lies_between_runs_is_kept_for_who_wants_it_next(tmp_path, reads):
    array = numbered((10, 100), np.uint8)
    tensor, other = lay_out(tmp_path / "a", array), lay_out(tmp_path / "b", array + 1)
    with FlatFiles(1000) as files:
        for first in range(0, 100, 20):
            region, out = Region((2, first), (8, first + 20)), np.empty((6, 20, 1), np.uint8)
            read_band(files, OutputTensor.copy_of(tensor), region, out)
            assert np.array_equal(out[..., 0], cut(array, region))
        assert reads == [600]  # the whole rows, once
        read_band(files, OutputTensor.copy_of(other), Region((2, 0), (8, 20)), out)
        assert np.array_equal(out[..., 0], array[2:8, :20] + 1)
        read_band(files, OutputTensor.copy_of(tensor), Region((2, 0), (8, 20)), out)
        assert np.array_equal(out[..., 0], array[2:8, :20])
    assert reads == [600] * 3


# ------------------------------------------------------------------------ open files


def count_open():
    return len(list(Path("/dev/fd").iterdir()))


def test_few_files_are_open_at_a_time_and_none_in_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(region_io, "MAX_OPEN_FILES", 4)
    before = count_open()
    tensors = [lay_out(tmp_path / f"{i}", numbered((i + 1,))) for i in range(9)]
    with FlatFiles(1 << 20) as files:
        for _ in range(3):
            for i, tensor in enumerate(tensors):
                out = np.empty(4 * (i + 1), np.uint8)
                files.read_bytes(tensor, 0, out.data)
                assert out.view("<i4")[-1] == i
                assert count_open() <= before + 4
    assert count_open() == before


@pytest.mark.parametrize("most", [1, 3])
def test_a_lower_limit_of_the_system_leaves_fewer_files_open(tmp_path, monkeypatch, most):
    before, real = count_open(), region_io.open_descriptor

    def limited(file, flags):
        if count_open() >= before + most:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), file.path)
        return real(file, flags)

    monkeypatch.setattr(region_io, "open_descriptor", limited)
    tensors = [lay_out(tmp_path / f"{i}", numbered((i + 1,))) for i in range(9)]
    with FlatFiles(1 << 20) as files:
        for _ in range(2):
            for i, tensor in enumerate(tensors):
                out = np.empty(4 * (i + 1), np.uint8)
                files.read_bytes(tensor, 0, out.data)
                assert out.view("<i4")[-1] == i
    monkeypatch.setattr(region_io, "open_descriptor", lambda file, flags: limited(file, -1))
    before -= most  # a worker that has no file open cannot close one
    with FlatFiles(16) as files, pytest.raises(OSError, match=r"Too many open files.*/0'"):
        files.read_bytes(tensors[0], 0, out.data)
