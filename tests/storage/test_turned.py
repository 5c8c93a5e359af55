"""Tensors whose rows are columns in the files: how often these are read."""

from types import SimpleNamespace

import numpy as np
import pytest

from ckpttool.execution.copy import CopyOptions, cut_into_tasks, read_bands
from ckpttool.formats.local import counting_reads
from ckpttool.model.plan import OutputFile, OutputTensor
from ckpttool.model.region import Arrangement, Region
from ckpttool.model.slicing import FullTensor, Part, RearrangedSlicing
from ckpttool.model.tensors import Extent, StoredFile, StoredTensor, TensorMeta
from ckpttool.storage.region_io import FlatFiles

ROWS, COLUMNS = 1024, 4096
STORED = ROWS * COLUMNS * 4  # 16 MiB of Float32


@pytest.fixture
def turned(tmp_path):
    """A matrix, and the tensor that a file with its transpose makes of it."""
    matrix = np.random.default_rng(0).integers(0, 1 << 11, (ROWS, COLUMNS)).astype(np.float32)
    path = tmp_path / "w"
    path.write_bytes(matrix.tobytes())
    meta = TensorMeta("w", "Float32", (ROWS, COLUMNS))
    stored = StoredTensor(meta, StoredFile(str(path)), (Extent(0, STORED),))
    source, space = OutputTensor.copy_of(stored).source, Region.whole((ROWS, COLUMNS))
    part = Part("w", source.slicing, Arrangement(((0,), (1,)), space))
    slicing = RearrangedSlicing(Arrangement(((1,), (0,)), space), (part,))
    made = FullTensor(meta.of_shape((COLUMNS, ROWS)), slicing, source.known_by)
    return np.ascontiguousarray(matrix.T), made


@pytest.mark.parametrize(("dtype", "times"), [("Float32", 2), ("Float16", 2), ("Float64", 4)])
def test_all_rows_are_read_once_for_8_mib(turned, dtype, times):
    matrix, tensor = turned
    output = OutputFile(0, "out", "ckpt", (OutputTensor.full(tensor, dtype),))
    header = SimpleNamespace(tensors={}, attrs={})
    data = b""
    with counting_reads() as count, FlatFiles(CopyOptions().band_bytes) as files:
        for task in cut_into_tasks([(output, header)], CopyOptions()):
            data += b"".join(bytes(band.data) for _, band in read_bands(task, files))
        assert count().nbytes == times * STORED
    assert data == matrix.astype(dtype.lower()).tobytes()
    assert tensor.is_turned
