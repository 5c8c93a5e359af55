"""The index files of checkpoints in several files: what they say, and what is no index."""

from __future__ import annotations

import json

import pytest

from ckpttool.formats.weight_index import (
    index_names,
    index_text,
    is_index_name,
    is_inside,
    read_index_file,
    shard_file_name,
)
from ckpttool.problems import FormatError
from tests.support.corpus import GOLDEN


@pytest.fixture
def write(tmp_path):
    def written(document, name="param_name_map.json"):
        path = tmp_path / name
        data = document if isinstance(document, bytes) else json.dumps(document).encode()
        path.write_bytes(data)
        return str(path)

    return written


def test_mindspores_own_map_is_read():
    index = read_index_file(
        str(GOLDEN / "safetensors_crc" / "golden" / "unified" / "param_name_map.json")
    )
    assert index.files == {"moments.weight": "part0.safetensors", "weight": "part0.safetensors"}
    assert index.total_size == 512


def test_what_is_written_is_read_again(write):
    files = {"b": "model-00002-of-00002.h5", "ä/\N{ROCKET}": "model-00001-of-00002.h5"}
    index = read_index_file(write(index_text(files, 12).encode()))
    assert (index.files, index.total_size) == (files, 12)


def test_what_is_written_is_the_same_whatever_the_order():
    assert index_text({"b": "x", "a": "y"}, 1) == index_text({"a": "y", "b": "x"}, 1)


def test_a_map_without_weight_map_is_the_map_itself(write):
    assert read_index_file(write({"w": "part0.safetensors"})).files == {"w": "part0.safetensors"}
    with pytest.raises(FormatError, match="weight_map does not map names to files"):
        read_index_file(write({"w": "part0.safetensors"}, "model.safetensors.index.json"))


@pytest.mark.parametrize(
    "metadata",
    [
        {},
        {"metadata": {}},
        {"metadata": {"total_size": "5"}},
        {"metadata": {"total_size": float("inf")}},
        {"metadata": {"total_size": float("nan")}},
    ],
)
def test_a_total_size_may_be_left_out(write, metadata):
    assert read_index_file(write(metadata | {"weight_map": {"w": "a.h5"}})).total_size is None


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        (b"", "not valid JSON"),
        (b"\xff", "not valid JSON"),
        (b"[]", "not a JSON object"),
        ({"weight_map": ["w"]}, "does not map names to files"),
        ({"weight_map": {"w": 3}}, "does not map names to files"),
        (b'{"weight_map": {"w": "a.h5", "w": "b.h5"}}', "w: stored twice"),
    ],
)
def test_what_is_no_index_says_why(write, document, reason):
    path = write(document)
    with pytest.raises(FormatError, match=reason) as caught:
        read_index_file(path)
    assert str(caught.value).startswith(path)


def test_an_endless_index_is_not_read(write, monkeypatch):
    monkeypatch.setattr("ckpttool.formats.weight_index.MAX_INDEX_BYTES", 10)
    with pytest.raises(FormatError, match="at most 10 bytes are read"):
        read_index_file(write({"weight_map": {}}))


@pytest.mark.parametrize("name", ["..", "../a", "a/../../b", "/a", "", ".", "a\0b"])
def test_a_path_that_leads_outside_is_not_inside(name):
    assert not is_inside(name)
    assert is_inside("sub/..a.h5")


MODELS = ("model.safetensors", "ms-model.safetensors", "model.ckpt")
OTHERS = ["config.json", "pytorch_model.bin.index.json", "model.safetensors", "index.json"]


def test_indexes_are_known_by_their_names():
    assert all(
        map(is_index_name, ["param_name_map.json", *(f"{name}.index.json" for name in MODELS)])
    )
    assert not any(map(is_index_name, OTHERS))


@pytest.mark.parametrize("format", ["safetensors", "ckpt", "hdf5"])
def test_names_of_what_is_written_are_known_again(format):
    assert all(is_index_name(name) for name in index_names(format))
    names = [shard_file_name(number, 12, format) for number in range(12)]
    assert sorted(names) == names
