"""Optimizer shards that the strategy hides: found by proof, never by guess."""

import numpy as np
import pytest

import ckpttool
from ckpttool.model.layout import Layout
from ckpttool.model.strategy import join_stages
from ckpttool.run.shards import smallest_shard
from ckpttool.storage.digest import Sample
from tests.checkpoints import noise, write_ranks
from tests.readers import Entry, read

SIX = Layout((2, 3), ((), ()))  # six replicas
TWO_BY_TWO = Layout((2, 2), ((1,), ()))  # two slices, two replicas of each


def contents(text):
    """A content for each rank; capitals are constant."""
    return {rank: Sample(c.encode(), c.isupper()) for rank, c in enumerate(text)}


@pytest.mark.parametrize(
    ("layout", "held", "shard"),
    [
        (SIX, "aaaaaa", 1),
        (SIX, "ababab", 2),
        (SIX, "abcabc", 3),
        (SIX, "abcdef", 6),
        (SIX, "AAAAAA", None),  # all elements equal: whole, or any shard
        (SIX, "AbAbAb", 2),
        (SIX, "AAbAAb", 3),  # two constant slices may be equal
        (SIX, "aaaaab", 0),  # one stale replica is no slice
        (SIX, "abaabb", 0),
        (TWO_BY_TWO, "abcd", 2),
        (TWO_BY_TWO, "aabb", 1),
        (TWO_BY_TWO, "aabc", 0),  # of the first slice both parts are equal, and not constant
        (TWO_BY_TWO, "AAAA", None),
    ],
)
def test_the_shard_is_the_smallest_that_explains_all_ranks(layout, held, shard):
    assert smallest_shard(layout, contents(held)) == shard


def test_ranks_that_are_missing_do_not_hide_the_shard():
    held = contents("abcabc")
    del held[0], held[4]
    assert smallest_shard(SIX, held) == 3


def checkpoint(folder, ranks, tensors):
    """Rank folders in which tensors are cut by rows over all ranks; a full tensor is cut evenly."""
    held = {rank: {} for rank in range(ranks)}
    for name, (full, shard) in tensors.items():
        rows = np.split(full.array(), shard)
        for rank in range(ranks):
            part = rows[rank % shard]
            held[rank][name] = Entry(full.dtype, part.shape, part.tobytes())
    return ckpttool.scan(str(write_ranks(folder / "src", held, "ckpt")))


def merge(folder, catalog, names, **more):
    count = len(catalog.files)
    strategy = join_stages({0: {name: Layout((count,), ((), ())) for name in names}})
    plan = ckpttool.plan_merge(catalog, strategy, str(folder / "m.ckpt"), "ckpt", **more)
    ckpttool.execute(plan)
    return read(folder / "m.ckpt"), [note.kind for note in plan.notes]


def zeros(shape):
    return Entry("Float32", shape, bytes(4 * int(np.prod(shape))))


def test_a_hidden_shard_is_found_and_told(tmp_path):
    w, m = noise("w", "Float32", (8, 3)), noise("m", "Float32", (8, 3))
    tensors = {"w": (w, 4), "moments.w": (m, 4)}
    merged, kinds = merge(tmp_path, checkpoint(tmp_path, 4, tensors), tensors)
    assert (merged["w"], merged["moments.w"]) == (w, m)
    assert "corrected" in kinds


def test_a_state_of_zeros_has_the_shard_of_its_parameter(tmp_path):
    w = noise("w", "Float32", (8, 3))
    tensors = {"w": (w, 4), "moments.w": (zeros((8, 3)), 4)}
    merged, _ = merge(tmp_path, checkpoint(tmp_path, 4, tensors), tensors)
    assert merged["moments.w"].shape == (8, 3)


def test_what_nothing_tells_is_a_question_that_lists_the_ways(tmp_path):
    w = noise("w", "Float32", (8, 3))
    tensors = {"w": (w, 4), "bias": (zeros((8, 1)), 4)}
    catalog = checkpoint(tmp_path, 4, tensors)
    with pytest.raises(ckpttool.PlanError) as caught:
        merge(tmp_path, catalog, tensors)
    (problem,) = caught.value.problems
    assert "bias: full shape (2, 1) or (4, 1) or (8, 1)" in problem
    assert "--optimizer-shard" in problem
    merged, _ = merge(tmp_path, catalog, tensors, optimizer_shard=4)
    assert merged["bias"].shape == (8, 1)


def test_two_ranks_that_differ_are_no_proof(tmp_path):
    """One may be stale; only the user knows."""
    w = noise("w", "Float32", (8, 3))
    catalog = checkpoint(tmp_path, 2, {"w": (w, 2)})
    with pytest.raises(ckpttool.PlanError, match="hold the same, and they differ"):
        merge(tmp_path, catalog, ["w"])
    merged, _ = merge(tmp_path, catalog, ["w"], optimizer_shard=2)
    assert merged["w"] == w
    merged, _ = merge(tmp_path, catalog, ["w"], trust_strategy=True, overwrite=True)
    assert merged["w"].shape == (4, 3)


def test_a_stale_rank_is_not_taken_for_a_slice(tmp_path):
    w, m = noise("w", "Float32", (8, 3)), noise("m", "Float32", (8, 3))
    held = {rank: {"w": w, "moments.w": m} for rank in range(4)}
    held[2] = {"w": noise("v", "Float32", (8, 3)), "moments.w": m}
    catalog = ckpttool.scan(str(write_ranks(tmp_path / "src", held, "ckpt")))
    with pytest.raises(ckpttool.PlanError, match="w: the strategy says that ranks 0-3 hold"):
        merge(tmp_path, catalog, ["w", "moments.w"])


def test_a_parameter_and_its_state_of_different_rows_explain_nothing(tmp_path):
    w, m = noise("w", "Float32", (8, 3)), noise("m", "Float32", (2, 3))
    tensors = {"w": (w, 4), "moments.w": (m, 1)}
    with pytest.raises(ckpttool.PlanError, match="hold the same, and they differ"):
        merge(tmp_path, checkpoint(tmp_path, 4, tensors), tensors)
