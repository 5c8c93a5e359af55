"""``--check-replicas``: every byte of every replica is compared before anything is written."""

import shutil

import pytest

from ckpttool.checks.replicas import replica_problems
from tests.support.checkpoints import noise, write_file, write_ranks
from tests.support.commands import files_below, message, run, run_well
from tests.support.corpus import GOLDEN
from tests.support.damage import flip_byte_of
from tests.support.readers import Entry

CASE = GOLDEN / "reshard_8_to_4"
NAME = "model.tok_embeddings.embedding_weight"  # its slices are on ranks 0, 2, 4, 6 and the others


@pytest.fixture
def source(tmp_path):
    return shutil.copytree(CASE / "src", tmp_path / "src")


def words(command, source, out):
    found = [command, source, "-s", CASE / "src_strategy.ckpt", "-o", out, "--check-replicas"]
    return found + (["-d", CASE / "dst_strategy.ckpt"] if command == "reshard" else [])


@pytest.mark.parametrize("command", ["merge", "reshard"])
def test_replicas_that_agree_are_no_hindrance(source, tmp_path, command):
    run_well(*words(command, source, tmp_path / "out.h5"))


@pytest.mark.parametrize("command", ["merge", "reshard"])
@pytest.mark.parametrize("trust", [[], ["--trust-strategy"]])
def test_one_byte_stops_the_run_and_is_located(source, tmp_path, command, trust):
    (path,) = (source / "rank_6").iterdir()
    flip_byte_of(path, NAME, 4 * 37)
    result = run(*words(command, source, tmp_path / "out" / "m.h5"), *trust)
    assert result.exit_code == 5
    assert f"{NAME}: replicas differ 1 of " in message(result)
    assert "rank 6 differs from ranks 0, 2, 4; first at (" in message(result)
    assert message(result).count("error[") == 1  # what samples show of it is not told once more
    assert not files_below(tmp_path / "out")


def test_a_difference_that_samples_miss_is_found(tmp_path):
    """In the middle between two pages of a tensor of 64 KiB."""
    whole = noise("w", "Float32", (128, 128))
    data = bytearray(whole.data)
    data[16 << 10] ^= 1
    ranks = {0: {"w": whole}, 1: {"w": Entry("Float32", (128, 128), bytes(data))}}
    write_ranks(tmp_path / "src", ranks, "ckpt")
    (tmp_path / "s.json").write_text(
        '{"parallel_layout_item": {"w": {"dev_matrix": [2], "tensor_map": [-1, -1]}}}'
    )
    merge = ["merge", tmp_path / "src", "-s", tmp_path / "s.json", "-o", tmp_path / "m.h5"]
    result = run(*merge, "--check-replicas")
    assert result.exit_code == 5
    assert message(result) == (
        "error[replica]: w: replicas differ 1 of 16384 elements; "
        "rank 0 differs from rank 1; first at (32, 0) "
        "Try: move the file of the damaged rank away; `ckpttool help replica` explains"
    )
    run_well(*merge)


def test_what_several_stages_hold_is_compared_too(tmp_path):
    ranks = {rank: {"e": noise("e", "Int8", (4,))} for rank in (0, 1)}
    ranks[1]["e"] = noise("other", "Int8", (4,))
    write_ranks(tmp_path / "src", ranks, "ckpt")
    layout = '{"dev_matrix": [1], "tensor_map": [-1]}'
    items = f'{{"0-e": {layout}, "1-e": {layout}}}'
    (tmp_path / "s.json").write_text(f'{{"parallel_layout_item": {items}}}')
    merge = ["merge", tmp_path / "src", "-s", tmp_path / "s.json", "-o", tmp_path / "m.h5"]
    result = run(*merge, "--check-replicas")
    assert result.exit_code == 5
    assert "e: stages differ 4 of 4 elements; rank 0 differs from rank 1" in message(result)
    result = run(*merge)  # samples tell, too
    assert result.exit_code == 5
    text = "e: different between stages that share it rank 0 differs from rank 1"
    assert text in message(result)
    run_well(*merge, "--trust-strategy")


def test_very_many_differences_are_one_message(tmp_path):
    names = [f"w{i}" for i in range(30)]
    ranks = {
        rank: {name: noise(f"{name}{rank}", "Int8", (4,)) for name in names} for rank in (0, 1)
    }
    write_ranks(tmp_path / "src", ranks, "ckpt")
    layout = '{"dev_matrix": [2], "tensor_map": [-1]}'
    items = ", ".join(f'"{name}": {layout}' for name in names)
    (tmp_path / "s.json").write_text(f'{{"parallel_layout_item": {{{items}}}}}')
    merge = ["merge", tmp_path / "src", "-s", tmp_path / "s.json", "-o", tmp_path / "m.h5"]
    text = message(run(*merge, "--check-replicas", "--trust-strategy"))
    assert "w0, w1, w2 and 27 more: replicas differ 4 of 4 elements; rank 0 " in text


def test_a_file_that_shrinks_while_it_is_compared_is_an_error(tmp_path, monkeypatch):
    write_ranks(tmp_path / "src", {r: {"w": noise("w", "Int8", (64,))} for r in (0, 1)}, "ckpt")
    (tmp_path / "s.json").write_text(
        '{"parallel_layout_item": {"w": {"dev_matrix": [2], "tensor_map": [-1]}}}'
    )

    def shrink(*arguments):
        write_file(tmp_path / "src" / "rank_1" / "net.ckpt", {}, "ckpt")
        return replica_problems(*arguments)

    monkeypatch.setattr("ckpttool.operations.source.replica_problems", shrink)
    merge = ["merge", tmp_path / "src", "-s", tmp_path / "s.json", "-o", tmp_path / "m.h5"]
    result = run(*merge, "--check-replicas")
    assert result.exit_code == 5
    assert "rank_1/net.ckpt: changed since its header was read" in message(result)
