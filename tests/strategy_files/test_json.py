"""The JSON form of a strategy, spelled by hand."""

import json

import pytest

from ckpttool.problems import StrategyError
from ckpttool.strategy_files.reader import read_strategy
from tests.support.file_bytes import layout, operator, strategy

W = {"dev_matrix": [2, 2], "tensor_map": [-1, 0], "tensor_shape": [16, 8]}


def document(stage=0, **layouts):
    operators = {"MatMul_w": {"stage": stage, "parallel_strategy": [[2, 1]]}}
    return {
        "current_stage": 50,
        "parallel_strategy_item": operators,
        "parallel_layout_item": layouts,
    }


@pytest.fixture
def read(tmp_path):
    def reader(content, *others):
        path = tmp_path / "s.json"
        path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
        return read_strategy([str(path), *others])

    return reader


def test_the_stage_of_a_document_is_that_of_its_operators(read, tmp_path):
    other = tmp_path / "0.ckpt"
    other.write_bytes(strategy(operator(0), layout("v", (4,), (0,))))
    found = read(document(1, w=W), str(other))
    assert found.layouts["w"][0].first_rank == 4


def test_json_and_protobuf_of_a_stage_must_agree(read, tmp_path):
    other = tmp_path / "0.ckpt"
    other.write_bytes(strategy(operator(0), layout("w", (2, 2), (0, -1))))
    with pytest.raises(StrategyError, match=r"stage 0 has other layouts .*; 1 parameter: w; "):
        read(document(w=W), str(other))


def test_protobuf_counts_where_json_cannot_say_it(read, tmp_path):
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
    with pytest.raises(StrategyError, match=r"stage 0 has other layouts .*; 1 parameter: w; "):
        read(document(w=expanded), str(other))


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"[" * 100_000, "nested too deep"), (b'{"a": ' + b"1" * 5000 + b"}", "digits")],
)
def test_documents_without_end_are_errors(read, content, reason):
    with pytest.raises(StrategyError, match=reason):
        read(content)
