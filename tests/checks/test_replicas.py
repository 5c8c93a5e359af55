"""``--check-replicas``: every byte of every replica is compared before anything is written."""

from ckpttool.checks.replicas import replica_problems
from tests.support.checkpoints import noise, write_file, write_ranks
from tests.support.commands import message, run


def test_a_file_that_shrinks_while_it_is_compared_is_an_error(tmp_path, monkeypatch):
    write_ranks(tmp_path / "src", {r: {"w": noise("w", "Int8", (64,))} for r in (0, 1)}, "ckpt")
    (tmp_path / "s.json").write_text(
        '{"parallel_layout_item": {"w": {"dev_matrix": [2], "tensor_map": [-1]}}}'
    )

    def shrink(*arguments):
        write_file(tmp_path / "src" / "rank_1" / "net.ckpt", {}, "ckpt")
        return replica_problems(*arguments)

    monkeypatch.setattr("ckpttool.checks.replicas.replica_problems", shrink)
    merge = ["merge", tmp_path / "src", "-s", tmp_path / "s.json", "-o", tmp_path / "m.h5"]
    result = run(*merge, "--check-replicas")
    assert result.exit_code == 5
    assert "rank_1/net.ckpt: changed since its header was read" in message(result)
