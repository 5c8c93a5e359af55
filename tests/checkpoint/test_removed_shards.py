"""Optimizer shards that the strategy lists and the files no longer have."""

import pytest
from msgspec.structs import replace

import ckpttool
from ckpttool.model.layout import Layout
from ckpttool.model.strategy import join_stages
from tests.support.checkpoints import catalog_on_disk, cut, noise
from tests.support.plans import plan_merge
from tests.support.readers import Entry, read

LISTED = Layout((2, 2), ((0,), ()), 2)
WHOLE = replace(LISTED, optimizer_shard=1)


def files(folder, layouts, ranks=range(4), entries=None):
    """Write slices of ``layouts``; return the catalog, a strategy that lists 2, full tensors."""
    entries = entries or {name: noise(name, "Float32", (16, 3)) for name in layouts}
    held = cut(entries, join_stages({0: layouts}))
    catalog = catalog_on_disk(folder / "src", {rank: held[rank] for rank in ranks})
    return catalog, join_stages({0: dict.fromkeys(layouts, LISTED)}), entries


def merge_joined(folder, catalog, strategy):
    options = ckpttool.ResolveOptions(optimizer_shard=1)
    plan, destination = plan_merge(catalog, strategy, str(folder / "m.ckpt"), options)
    ckpttool.execute(plan, destination)
    return read(folder / "m.ckpt"), {note.code: note for note in plan.notes}


@pytest.mark.parametrize("sharded", [["adam_m.w", "adam_m.v"], ["v", "adam_m.v"], ["adam_m.w"]])
def test_each_tensor_is_joined_or_not_as_its_slices_show(tmp_path, sharded):
    names = ["w", "v", "adam_m.w", "adam_m.v"]
    layouts = {name: LISTED if name in sharded else WHOLE for name in names}
    catalog, strategy, entries = files(tmp_path, layouts)
    with pytest.raises(ckpttool.PlanError) as caught:
        plan_merge(catalog, strategy, str(tmp_path / "m.ckpt"))
    for one in caught.value.diagnostics:
        assert one.code == "contradicted"
        state = f"adam_m.{one.tensor.removeprefix('adam_m.')}"
        differ = layouts[state] != layouts[state.removeprefix("adam_m.")]
        assert ("--trust-strategy" in one.hint) != differ
    merged, notes = merge_joined(tmp_path, catalog, strategy)
    assert merged == entries
    assert "inferred" not in notes


def test_states_of_all_equal_elements_have_the_rows_of_their_parameter(tmp_path):
    names = {"w": WHOLE, "adam_m.w": LISTED, "v": WHOLE, "adam_m.v": WHOLE}
    zeros = Entry("Float32", (16, 3), bytes(192))
    entries = {name: zeros if "adam" in name else noise(name, "Float32", (16, 3)) for name in names}
    catalog, strategy, entries = files(tmp_path, names, entries=entries)
    merged, notes = merge_joined(tmp_path, catalog, strategy)
    assert merged == entries
    assert "inferred" not in notes


def test_slices_that_are_lost_are_missed_where_shapes_show_that_they_were_not_joined(tmp_path):
    catalog, strategy, _ = files(tmp_path, {"w": WHOLE, "adam_m.w": LISTED}, ranks=[0, 1])
    with pytest.raises(ckpttool.PlanError) as caught:
        merge_joined(tmp_path, catalog, strategy)
    (problem,) = caught.value.diagnostics
    assert problem.message.startswith("the strategy is for 4 ranks, and ")
    assert "--optimizer-shard" not in problem.hint


def test_replicas_of_a_joined_tensor_that_diverged_are_no_slices(tmp_path):
    """Its state, which was joined, has as many rows as one of them."""
    catalog, strategy, entries = files(tmp_path, {"w": WHOLE, "adam_m.w": WHOLE})
    held = cut(entries, join_stages({0: dict.fromkeys(entries, WHOLE)}))
    for rank in (2, 3):
        held[rank]["w"] = noise(f"stale{rank}", "Float32", (8, 3))
    catalog = catalog_on_disk(tmp_path / "src2", held)
    with pytest.raises(ckpttool.PlanError) as caught:
        merge_joined(tmp_path, catalog, strategy)
    (problem,) = caught.value.diagnostics
    assert (problem.code, problem.tensor) == ("replica", "w")
