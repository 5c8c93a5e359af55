"""Hashes of stored tensors, against hashlib on the same bytes."""

import hashlib
import math

import numpy as np
import pytest

from ckpttool.formats import FORMATS, ckpt, get_format, read_index
from ckpttool.formats.ckpt import Ckpt
from ckpttool.model.tensors import TensorMeta
from ckpttool.storage import sampling
from ckpttool.storage.sampling import digest, sample, take_samples
from tests.support.checkpoints import create_file
from tests.support.file_bytes import content, write_contents


@pytest.mark.parametrize("buffer_bytes", [1, 7, 100, 1 << 20])
@pytest.mark.parametrize("shape", [(), (0, 3), (3,), (40, 5)])
def test_a_digest_is_the_sha256_of_the_bytes(tmp_path, monkeypatch, shape, buffer_bytes):
    monkeypatch.setattr(ckpt, "MAX_RECORD_BYTES", 64)  # several extents
    path = str(tmp_path / "net.ckpt")
    index = create_file(
        Ckpt(), path, [TensorMeta("v", "Int8", (9,)), TensorMeta("w", "Float32", shape)], {}
    )
    expected = {name: content(tensor) for name, tensor in index.tensors.items()}
    write_contents(index, expected)
    tensor = read_index(path).tensors["w"]
    monkeypatch.setattr(sampling, "BUFFER_BYTES", buffer_bytes)
    assert digest(tensor).digest == hashlib.sha256(expected["w"]).digest()


@pytest.mark.parametrize("format", FORMATS)
def test_samples_of_neighbours_are_those_of_each_tensor_alone(tmp_path, monkeypatch, format):
    monkeypatch.setattr(sampling, "_CALL_BYTES", 50_000)  # several calls
    dtypes = ("Float32", "BFloat16", "Int64", "Bool", "Complex64", "Int8")
    sizes = (0, 1, 3, 100, 511, 2000, 3000, 11_000, 40_000)
    metas = [
        TensorMeta(f"{size}.{dtype}", dtype, () if size == 1 else (size,))
        for size in sizes
        for dtype in dtypes
    ]
    path = str(tmp_path / f"net.{format}")
    texts = [] if format == "safetensors" else [TensorMeta("s", "str", (), "text")]
    index = create_file(get_format(format), path, [*metas, *texts], {})
    rng = np.random.default_rng(3)
    values = {"few": 2, "many": 256}
    contents = {
        meta.name: rng.integers(0, values[kind], meta.nbytes, np.uint8).tobytes()
        for meta, kind in zip(metas, ["many", "few", "many"] * len(metas), strict=False)
    }
    write_contents(index, contents)
    stored = list(read_index(path).tensors.values())
    found = take_samples(stored[::-1])[::-1]
    assert found == [sample(tensor) for tensor in stored]
    for tensor, one in zip(stored, found, strict=True):
        data = np.frombuffer(contents.get(tensor.meta.name, b""), np.uint8)
        if tensor.meta.text is None and len(data) <= sampling.SAMPLE_BYTES:
            assert one.digest == hashlib.sha256(data).digest()
            elements = data.reshape(-1, tensor.meta.itemsize)
            different = len(np.unique(elements, axis=0)) if len(data) else 1
            is_half = different <= 3 and 2 * different <= len(elements)
            is_few = different == 1 or different**2 <= len(elements) or is_half
            most = 1.0 if tensor.meta.dtype == "Bool" else 8.0 * tensor.meta.itemsize
            assert one.element_bits == (min(most, math.log2(different)) if is_few else most)
