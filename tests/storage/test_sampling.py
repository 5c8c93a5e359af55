"""Hashes of stored tensors, against hashlib on the same bytes."""

import hashlib

import pytest

from ckpttool.formats import ckpt, read_index
from ckpttool.formats.ckpt import Ckpt
from ckpttool.model.tensors import TensorMeta
from ckpttool.storage.sampling import digest
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
    assert digest(tensor, buffer_bytes).digest == hashlib.sha256(expected["w"]).digest()
