"""Tensors whose rows are columns in the files: how often these are read."""

from types import SimpleNamespace

import numpy as np
import pytest
from msgspec.structs import replace

from ckpttool.execution.copy import CopyOptions, cut_into_tasks, read_bands
from ckpttool.formats.local import counting_reads
from ckpttool.model.plan import OutputFile, OutputTensor
from ckpttool.model.region import Arrangement, Region
from ckpttool.model.slicing import FullTensor, Part, RearrangedSlicing
from ckpttool.model.tensors import Extent, StoredFile, StoredTensor, TensorMeta
from ckpttool.storage.region_io import FlatFiles

ROWS, COLUMNS = 1024, 4096
STORED = ROWS * COLUMNS * 4  # 16 MiB of Float32


def turn(folder, matrix, space, axes):
    """Return the tensor that a file with a matrix makes; rows are of all factors but the last."""
    path, (*rows, columns) = folder / "w", range(space.ndim)
    path.write_bytes(matrix.tobytes())
    meta = TensorMeta("w", f"Float{8 * matrix.itemsize}", matrix.shape)
    stored = StoredTensor(meta, StoredFile(str(path)), (Extent(0, matrix.nbytes),))
    source = OutputTensor.copy_of(stored).source
    part = Part("w", source.slicing, Arrangement((tuple(rows), (columns,)), space))
    slicing = RearrangedSlicing(Arrangement(axes, space), (part,))
    return FullTensor(meta.of_shape(slicing.shape), slicing, source.known_by)


def read_all(tensor, options):
    """Return the bytes that tasks of an output read."""
    output, header = OutputFile(0, "out", "ckpt", (tensor,)), SimpleNamespace(tensors={}, attrs={})
    with FlatFiles(options.band_bytes) as files:
        tasks = cut_into_tasks([(output, header)], options)
        return b"".join(bytes(band.data) for it in tasks for _, band in read_bands(it, files))


@pytest.mark.parametrize(("dtype", "times"), [("Float32", 2), ("Float16", 2), ("Float64", 4)])
def test_all_rows_are_read_once_for_8_mib(tmp_path, dtype, times):
    matrix = np.random.default_rng(0).integers(0, 1 << 11, (ROWS, COLUMNS)).astype(np.float32)
    tensor = turn(tmp_path, matrix, Region.whole((ROWS, COLUMNS)), ((1,), (0,)))
    assert tensor.is_turned
    with counting_reads() as count:
        data = read_all(OutputTensor.full(tensor, dtype), CopyOptions())
        assert count().nbytes == times * STORED
    assert data == matrix.T.astype(dtype.lower()).tobytes()


def test_rows_of_each_matrix_of_a_stack_are_read_once_for_8_mib(tmp_path):
    stack = np.random.default_rng(0).random((2, ROWS, COLUMNS), np.float32)
    matrices = stack.reshape(2 * ROWS, COLUMNS)
    tensor = turn(tmp_path, matrices, Region.whole(stack.shape), ((0,), (2,), (1,)))
    with counting_reads() as count:
        data = read_all(OutputTensor.full(tensor), CopyOptions())
        assert count().nbytes == 2 * stack.nbytes
    assert data == stack.transpose(0, 2, 1).tobytes()


@pytest.mark.parametrize("band_bytes", [32, 64])
def test_what_is_planned_once_for_a_kind_is_read_in_the_order_of_the_plan(tmp_path, band_bytes):
    matrix = np.arange(24, dtype=np.float32).reshape(6, 4)
    tensor = turn(tmp_path, matrix, Region.whole((3, 2, 4)), ((2, 0, 1),))
    output = replace(OutputTensor.full(tensor), kind=0)
    assert read_all(output, CopyOptions(band_bytes=band_bytes)) == matrix.T.tobytes()
