"""Reads that are counted are those that are made."""

from __future__ import annotations

import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from ckpttool.formats import read_index
from ckpttool.formats.local import counting_reads, note_read
from ckpttool.model.plan import OutputTensor
from ckpttool.model.region import Region
from ckpttool.model.tensors import Reads
from ckpttool.storage import region_io
from ckpttool.storage.counting import CountingExecutor, CountingFiles, Origin
from ckpttool.storage.region_io import FlatFiles, read_band
from tests.storage.test_region_io import lay_out, numbered
from tests.support.checkpoints import noise, write_file
from tests.support.encryption import KEY, encrypt

SHAPE = (12, 10, 20)
REGIONS = [
    Region((0, 0, 0), SHAPE),
    Region((3, 0, 0), (9, 10, 20)),
    Region((0, 2, 0), (12, 7, 20)),
    Region((1, 2, 3), (11, 9, 17)),
    Region((4, 4, 4), (5, 5, 5)),
    Region((2, 2, 2), (2, 9, 9)),
]


def assert_counted(tensor, scratch_bytes):
    """Read regions one after the other, and count the same."""
    counted, output = CountingFiles(scratch_bytes), OutputTensor.copy_of(tensor)
    with FlatFiles(scratch_bytes) as files, counting_reads() as count:
        for region in REGIONS:
            out = np.empty((*region.shape, tensor.meta.itemsize), np.uint8)
            read_band(files, output, region, out)
            read_band(counted, output, region, np.empty_like(out))
        assert counted.take_reads() == count()
    assert counted.scratch_used == files.scratch_used
    used = sum(region.size for region in REGIONS) * tensor.meta.itemsize
    assert counted.take_used() == {Origin(0, 0): used}
    assert counted.take_reads() == Reads()
    assert counted.take_used() == Counter()


@pytest.mark.parametrize("gap_bytes", [0, 16, 1 << 17])
@pytest.mark.parametrize("scratch_bytes", [64, 4096, 1 << 20])
@pytest.mark.parametrize("cuts", [(), (100, 101, 5000)])
def test_what_would_be_read_is_what_is_read(tmp_path, monkeypatch, cuts, scratch_bytes, gap_bytes):
    monkeypatch.setattr(region_io, "GAP_BYTES", gap_bytes)
    assert_counted(lay_out(tmp_path / "a", numbered(SHAPE), cuts), scratch_bytes)


@pytest.mark.parametrize("mode", ["AES-GCM", "AES-CBC"])
@pytest.mark.parametrize("gap_bytes", [0, 1 << 17])
def test_of_an_encrypted_file_too(tmp_path, monkeypatch, mode, gap_bytes):
    monkeypatch.setattr(region_io, "GAP_BYTES", gap_bytes)
    path = tmp_path / "net.ckpt"
    write_file(path, {"w": noise("w", "Float32", SHAPE)}, "ckpt")
    path.write_bytes(encrypt(path.read_bytes(), mode, KEY, 1000))
    assert_counted(read_index(str(path), KEY).tensors["w"], 4096)


def test_nothing_is_opened_to_count(tmp_path):
    tensor = lay_out(tmp_path / "a", numbered(SHAPE))
    os.unlink(tensor.file.path)  # noqa: PTH108
    files = CountingFiles(1 << 20)
    out = np.empty((*SHAPE, 4), np.uint8)
    read_band(files, OutputTensor.copy_of(tensor), REGIONS[0], out)
    assert files.take_reads() == Reads(1, tensor.meta.nbytes)


def test_reads_of_calls_are_counted_on_whatever_thread():
    def read(nbytes):
        if nbytes > 100:
            raise ValueError(nbytes)
        note_read(nbytes)
        return -nbytes

    with ThreadPoolExecutor(2) as pool:
        executor = CountingExecutor(pool)
        futures = [executor.submit(read, nbytes) for nbytes in (1, 20, 101)]
        assert [future.result() for future in futures[:2]] == [-1, -20]
        with pytest.raises(ValueError, match="101"):
            futures[2].result()
        assert executor.reads == Reads(2, 21)
