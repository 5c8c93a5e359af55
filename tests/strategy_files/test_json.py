"""The JSON form of a strategy, spelled by hand."""

import json

import pytest

from ckpttool.model.layout import Layout
from ckpttool.problems import StrategyError
from ckpttool.strategy_files.reader import read_strategy
from tests.support.file_bytes import layout, operator, strategy

W = {"dev_matrix": [2, 2], "tensor_map": [-1, 0], "tensor_shape": [16, 8]}


def document(stage=0, **layouts):
    """A document with one operator and these layouts."""
    operators = {"MatMul_w": {"stage": stage, "parallel_strategy": [[2, 1]]}}
    return {
        "current_stage": 50,
        "parallel_strategy_item": operators,
        "parallel_layout_item": layouts,
    }


@pytest.fixture
def read(tmp_path):
    """A function that reads the strategy in an object, or in the bytes of one."""

    def reader(content, *others):
        path = tmp_path / "s.json"
        path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
        return read_strategy([str(path), *others])

    return reader


def test_a_layout_is_read_with_its_full_shape(read):
    found = read(document(w=W | {"field": 0, "opt_weight_shard_step": 0}))
    assert found.layouts == {"w": (Layout((2, 2), ((), (0,))),)}
    assert found.layouts["w"][0].full_shape == (16, 8)


def test_what_mindspore_insists_on_may_be_absent(read):
    (found,) = read(
        {"parallel_layout_item": {"w": {"dev_matrix": [2], "tensor_map": [0]}}}
    ).layouts["w"]
    assert (found, found.full_shape) == (Layout((2,), ((0,),)), None)


@pytest.mark.parametrize(("size", "shard"), [(0, 1), (-1, 2), (1, 1), (2, 2)])
def test_optimizer_shards_are_read(read, size, shard):
    (found,) = read(document(w=W | {"opt_weight_shard_size": size})).layouts["w"]
    assert found.optimizer_shard == shard


@pytest.mark.parametrize(
    ("spelled", "tensor_map"),
    [([[1, 0], [-1]], ((1, 0), ())), ([[1, 0]], ((1, 0),)), ([1, [0]], ((1,), (0,))), ([], ())],
)
def test_nested_tensor_maps_are_read_though_mindspore_writes_none(read, spelled, tensor_map):
    (found,) = read(document(w={"dev_matrix": [2, 2], "tensor_map": spelled})).layouts["w"]
    assert found.tensor_map == tensor_map


def test_merged_documents_have_stages_in_their_names(read):
    found = read(document(**{"0-w": W, "1-w": W, "1-v": W}))
    assert [one.first_rank for one in found.layouts["w"]] == [0, 4]
    assert found.stages_of("v") == (1,)


def test_the_stage_of_a_document_is_that_of_its_operators(read, tmp_path):
    other = tmp_path / "0.ckpt"
    other.write_bytes(strategy(operator(0), layout("v", (4,), (0,))))
    found = read(document(1, w=W), str(other))
    assert found.layouts["w"][0].first_rank == 4


def test_json_and_protobuf_of_a_stage_must_agree(read, tmp_path):
    other = tmp_path / "0.ckpt"
    other.write_bytes(strategy(operator(0), layout("w", (2, 2), (0, -1))))
    with pytest.raises(StrategyError, match=r"stage 0 has other layouts .*; 1 parameter: w; -s "):
        read(document(w=W), str(other))


def test_protobuf_counts_where_json_cannot_say_it(read, tmp_path):
    """JSON has the map of an expanded tensor if two device axes cut one tensor axis."""
    other = tmp_path / "0.ckpt"
    other.write_bytes(strategy(operator(0), layout("w", (2, 2), (1, 0), (-1,))))
    expanded = {"dev_matrix": [2, 2], "tensor_map": [1, 0, -1], "tensor_shape": [2, 8, 8]}
    (found,) = read(document(w=expanded), str(other)).layouts["w"]
    assert (found.tensor_map, found.full_shape) == (((1, 0), ()), None)


@pytest.mark.parametrize("axes", [((0, 1), (-1,)), ((0,), (-1,)), ((1,), (0,))])
def test_protobuf_of_several_device_axes_is_compared_with_json_too(read, tmp_path, axes):
    other = tmp_path / "0.ckpt"
    other.write_bytes(strategy(operator(0), layout("w", (2, 2), *axes)))
    expanded = {"dev_matrix": [2, 2], "tensor_map": [1, 0, -1], "tensor_shape": [2, 8, 8]}
    if axes == ((1,), (0,)):  # the same if "None" stands beside the second
        assert read(document(w=expanded), str(other)).layouts["w"][0].tensor_map == axes
        return
    with pytest.raises(StrategyError, match=r"stage 0 has other layouts .*; 1 parameter: w; -s "):
        read(document(w=expanded), str(other))


OPERATORS = {"parallel_strategy_item": {"a": {"alias_name": "a"}}, "parallel_out_strategy_item": {}}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", r"empty \(0 bytes\)"),
        (b"{", r"s\.json: not valid JSON from line 1, column 2 on; the strategy file of"),
        (b"\xff{}", "not valid JSON"),
        (b"[]", "not a JSON object"),
        (b"{}", ": a JSON document, not a strategy file; "),
        (b"[" * 100_000, "nested too deep"),
        (b'{"a": ' + b"1" * 5000 + b"}", "digits"),
        (b'{"parallel_layout_item": {"w": {}, "w": {}}}', "w: stored twice"),
        (rb'{"parallel_layout_item": {"\ud800": {}}}', "not valid JSON"),
        (OPERATORS, r"s\.json: strategies of operators .*; the strategy file of the training run"),
        ({"parallel_layout_item": []}, "parallel_layout_item: expected object, got array"),
        ({"parallel_strategy_item": 5}, "parallel_strategy_item: expected object, got int"),
        ({"parallel_strategy_item": {"a": 5}}, "a: expected object, got int"),
        (document(w=[]), "w: expected object, got array"),
        (document("0", w=W), "MatMul_w: stage: expected int, got str"),
        (document(-1, w=W), "operators of stage -1"),
        (document(10**30, w=W), "operators of stage 1000000"),
        (document(w=W | {"tensor_map": None}), "w: tensor_map: expected array, got null"),
        (
            document(w=W | {"tensor_map": [[0.5]]}),
            r"w: tensor_map\[0\]\[0\]: expected int, got float",
        ),
        (
            document(w=W | {"tensor_map": [True]}),
            r"w: tensor_map\[0\]: expected int . array, got bool",
        ),
        (document(w={"dev_matrix": [2]}), "w: .* missing required field tensor_map"),
        (document(w=W | {"dev_matrix": "22"}), "w: dev_matrix: expected array, got str"),
        (document(w=W | {"dev_matrix": [10**30]}), "expected at most 64 and 1048576"),
        (
            document(w=W | {"tensor_shape": [16, None]}),
            r"w: tensor_shape\[1\]: expected int, got null",
        ),
        (
            document(w=W | {"opt_weight_shard_size": None}),
            "opt_weight_shard_size: expected int, got null",
        ),
        (document(w=W | {"opt_weight_shard_size": 3}), "optimizer shard of 3"),
        (document(w=W | {"field": "1"}), "field: expected int, got str"),
        (document(w=W | {"field": -2}), "field -2, expected 0 or more"),
        (
            document(w=W | {"param_split_shape": [6, 4], "indices_offset": [0, 5]}),
            r"indices_offset \[0, 5\], expected \[0, 6\]",
        ),
        (document(w=W | {"tensor_map": [0, 2]}), "names device axis 2"),
        (document(w=W | {"tensor_map": [0, 0]}), "uses device axis 0 twice"),
    ],
)
def test_documents_that_make_no_sense_are_errors(read, content, reason):
    with pytest.raises(StrategyError, match=reason):
        read(content)
