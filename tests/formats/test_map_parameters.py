"""Map parameters (hash tables): three tensors on the way, one map parameter in every .ckpt."""

from __future__ import annotations

import pytest

from ckpttool.formats import read_index
from ckpttool.formats.ckpt import Ckpt, map_problems
from ckpttool.model.names import map_component_names, map_of_component
from ckpttool.model.tensors import StoredFile, TensorMeta
from ckpttool.problems import FormatError
from tests.support.checkpoints import create_file
from tests.support.commands import mentions, run, run_well
from tests.support.commands import message as said
from tests.support.corpus import SAMPLES
from tests.support.file_bytes import (
    map_block,
    map_record,
    message,
    number,
    read_contents,
    record,
    write_contents,
)

SAMPLE = SAMPLES / "files" / "map_parameter.ckpt"
KEYS, VALUES, STATUSES = map_component_names("emb")


def read(path):
    index = read_index(str(path))
    contents = read_contents(index)
    return {
        name: (tensor.meta.dtype, tensor.meta.shape, contents[name])
        for name, tensor in index.tensors.items()
    }


def refused(tmp_path, *records):
    path = tmp_path / "net.ckpt"
    path.write_bytes(b"".join(records))
    with pytest.raises(FormatError) as caught:
        read_index(str(path))
    return str(caught.value)


# --------------------------------------------------------------------------------- reading


def test_the_blocks_of_a_real_file_are_joined():
    found = read(SAMPLE)
    ints = [n.to_bytes(4, "little") for n in (10, 11, 20, 21)]
    assert found["m.__map_keys__"] == ("Int32", (4,), b"".join(ints))
    dtype, shape, data = found["m.__map_values__"]
    assert (dtype, shape) == ("Float32", (4, 3))
    assert data == bytes.fromhex("0000803f") * 6 + bytes.fromhex("00000040") * 6
    assert found["m.__map_statuses__"][1] == (4,)


def test_map_parameters_lie_among_others_in_the_order_of_the_file(tmp_path):
    path = tmp_path / "net.ckpt"
    name = "emb.__param_key__7"
    path.write_bytes(
        record("a") + map_block([1, 2], name=name) + map_block([3], 9, name) + record("b")
    )
    found = read(path)
    assert list(found) == ["a", *map_component_names(name), "b"]
    assert [map_of_component(part) for part in found] == [None, name, name, name, None]
    assert found[map_component_names(name)[1]][1] == (3, 3)


def test_an_empty_map_parameter_has_no_entries(tmp_path):
    path = tmp_path / "net.ckpt"
    path.write_bytes(map_block([]))
    assert [shape for _, shape, _ in read(path).values()] == [(0,), (0, 3), (0,)]
    assert Ckpt().read_index(StoredFile(str(path))).tensors[KEYS].extents == ()


@pytest.mark.parametrize("word", ["int32", "Int32"])
def test_types_have_numpys_names_or_mindspores(word, tmp_path):
    path = tmp_path / "net.ckpt"
    path.write_bytes(map_record(keys=(word, (2,), bytes(8))))
    assert read(path)[KEYS][0] == "Int32"


FOUR = ("int32", (1,), bytes(4))


@pytest.mark.parametrize(
    ("records", "reason"),
    [
        ([map_record(keys=FOUR)], "emb: keys, values and statuses differ in number; 1, 2, 2"),
        ([map_record(values=("float32", (2, 3), bytes(20)))], "need 24 bytes, found 20"),
        ([map_record(statuses=("int32", (), bytes(4)))], r"dims \[\] need 4 bytes"),
        (
            [map_record(keys=("int7", (2,), bytes(8)))],
            "emb.__map_keys__: unknown tensor_type 'int7'",
        ),
        ([map_record(keys=("int32", (-2,), b""))], "a size in dims .* is negative"),
        (
            [message(1, message(1, b"emb"), message(3, message(1, number(1, 2))))],
            "expected keys, values and statuses, found 1",
        ),
        ([message(1, message(1, b"emb"), number(3, 1))], "a record has no tensor"),
        ([message(1, message(3))], "a record has no tag"),
        ([map_block([1]), record("b"), map_block([2])], "emb: stored twice; first at byte 0"),
        ([record("emb"), map_block([1])], "emb: stored twice; first at byte 0"),
        ([map_block([1]), record("emb")], "emb: stored twice; first at byte 0"),
        (
            [map_block([1]), map_block([2], width=4)],
            "emb.__map_values__: consecutive records differ",
        ),
        ([map_block([1]), record(KEYS)], "emb.__map_keys__: stored twice"),
        ([record(VALUES), map_block([1])], "emb.__map_values__: stored twice"),
    ],
)
def test_what_is_no_map_parameter_is_refused(records, reason, tmp_path):
    assert not mentions(refused(tmp_path, *records), reason)


# --------------------------------------------------------------------------------- writing


def test_a_map_parameter_is_written_byte_for_byte_as_one_record(tmp_path):
    data = record("a") + map_block([5, 7, 8]) + record("b") + map_block([], name="empty")
    (tmp_path / "a.ckpt").write_bytes(data)
    run_well("merge", tmp_path / "a.ckpt", "-o", tmp_path / "b.ckpt")
    assert (tmp_path / "b.ckpt").read_bytes() == data


def test_large_map_parameters_are_cut_into_records(tmp_path, monkeypatch):
    data = b"".join(map_block([i], seed=12 * i) for i in range(5))
    (tmp_path / "a.ckpt").write_bytes(data)
    index = read_index(str(tmp_path / "a.ckpt"))
    metas = [tensor.meta for tensor in index.tensors.values()]
    monkeypatch.setattr("ckpttool.formats.ckpt.MAX_RECORD_BYTES", 24)  # one entry has 24
    again = create_file(Ckpt(), str(tmp_path / "b.ckpt"), metas, {})
    write_contents(again, read_contents(index))
    assert (tmp_path / "b.ckpt").read_bytes() == data
    monkeypatch.setattr("ckpttool.formats.ckpt.MAX_RECORD_BYTES", 71)  # two records of two, one
    again = create_file(Ckpt(), str(tmp_path / "b.ckpt"), metas, {})
    write_contents(again, read_contents(index))
    assert len(again.tensors[KEYS].extents) == 3
    assert read(tmp_path / "b.ckpt") == read(tmp_path / "a.ckpt")


@pytest.mark.parametrize("between", ["full.h5", "full.safetensors", "full.ckpt"])
def test_a_map_parameter_survives_the_way_through_every_format(between, tmp_path):
    run_well("merge", SAMPLE, "-o", tmp_path / between)
    assert read(tmp_path / between).keys() == read(SAMPLE).keys()
    run_well("merge", tmp_path / between, "-o", tmp_path / "again.ckpt")
    assert read(tmp_path / "again.ckpt") == read(SAMPLE)
    assert (tmp_path / "again.ckpt").read_bytes().count(b"int32") == 2  # a map parameter again


def test_parts_that_do_not_belong_together_are_no_map_parameter(tmp_path):
    keys, values = TensorMeta(KEYS, "Int64", (2,)), TensorMeta(VALUES, "Float32", (2, 3))
    statuses = TensorMeta(STATUSES, "Int32", (2,))
    assert list(map_problems([keys, values, statuses])) == []
    (problem,) = map_problems([values])
    assert problem.text == f"emb: the map parameter lacks {KEYS} and {STATUSES}"
    for wrong in (TensorMeta(STATUSES, "Int32", (3,)), TensorMeta(STATUSES, "str", (), "x")):
        (problem,) = map_problems([keys, values, wrong])
        assert problem.fact.startswith("emb: keys, values and statuses differ in number")


def test_a_part_alone_is_not_written_as_ckpt(tmp_path):
    path = tmp_path / "part.ckpt"
    path.write_bytes(record(KEYS))
    result = run("merge", path, "-o", tmp_path / "out.ckpt")
    assert result.exit_code == 5
    assert "the map parameter lacks emb.__map_values__ and emb.__map_statuses__" in said(result)
    words = ["--max-shard-size", "1B", "--format", "ckpt"]
    result = run("merge", path, "-o", tmp_path / "out", *words)
    assert result.exit_code == 5
    assert said(result).endswith("Try: --format hdf5, or --format safetensors")
    run_well("merge", path, "-o", tmp_path / "out.h5")
