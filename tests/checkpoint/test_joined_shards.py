"""Optimizer shards that the strategy lists and the files no longer have."""

from dataclasses import replace

import pytest

import ckpttool
from ckpttool.model.layout import Layout
from ckpttool.model.strategy import join_stages
from tests.support.checkpoints import catalog_on_disk, cut, noise
from tests.support.readers import Entry, read


def joined(folder, shard, ranks=range(8)):
    """Files with an optimizer shard of 1 or 2, and the strategy, which lists 2."""
    names, full = ("w", "adam_m.w"), Layout((2, 4), ((0,), ()))
    entries = {name: noise(name, "Float32", (16, 3)) for name in names}
    held = cut(
        entries, join_stages({0: dict.fromkeys(names, replace(full, optimizer_shard=shard))})
    )
    catalog = catalog_on_disk(folder / "src", {rank: held[rank] for rank in ranks})
    return (
        catalog,
        join_stages({0: dict.fromkeys(names, replace(full, optimizer_shard=2))}),
        entries,
    )


@pytest.mark.parametrize(
    ("ranks", "code"),
    [(range(8), "contradicted"), (range(4), "missing"), ((4, 1, 6, 3), "missing")],
)
def test_optimizer_shards_that_were_joined_before_are_read_without_them(tmp_path, ranks, code):
    catalog, strategy, entries = joined(tmp_path, 1, ranks)
    place = str(tmp_path / "m.ckpt")
    with pytest.raises(ckpttool.PlanError) as caught:
        ckpttool.plan_merge(catalog, strategy, place)
    for problem in caught.value.diagnostics:
        assert problem.code == code
        assert "--optimizer-shard 1 if the optimizer shards were joined before" in problem.hint
    options = ckpttool.ResolveOptions(optimizer_shard=1)
    plan, destination = ckpttool.plan_merge(catalog, strategy, place, options)
    ckpttool.execute(plan, destination)
    assert read(tmp_path / "m.ckpt") == entries
    notes = {note.code: note for note in plan.notes}
    if code == "contradicted":
        said = "2 parameters are read without the optimizer shard in the strategy"
        assert notes["corrected"].message == f"--optimizer-shard 1: {said}"
        assert "inferred" not in notes
        return
    said = "--optimizer-shard 1 alone decides that 2 parameters were joined"
    assert notes["inferred"].message == said
    assert "w (16, 3) or (32, 3), adam_m.w (16, 3) or (32, 3)" in notes["inferred"].facts
    assert "w is (16, 3) then, and not (32, 3)" in caught.value.diagnostics[0].hint
    assert notes["missing_replica"].facts.endswith(
        "ranks 0-3, if optimizer shards were joined"
    ) or (notes["missing_replica"].facts.endswith("1, 3, 4, 6, if optimizer shards were joined"))


@pytest.mark.parametrize("ranks", [range(8), [0, 1, 2, 3, 4, 5, 6]])
def test_optimizer_shards_that_were_not_joined_are_not_read_without_them(tmp_path, ranks):
    catalog, strategy, _ = joined(tmp_path, 2, ranks)
    options = ckpttool.ResolveOptions(optimizer_shard=1)
    with pytest.raises(ckpttool.PlanError) as caught:
        ckpttool.plan_merge(catalog, strategy, str(tmp_path / "m.ckpt"), options)
    (problem,) = caught.value.diagnostics
    assert problem.message.startswith("--optimizer-shard 1, but files hold slices of the optimizer")
    assert problem.facts == "w, adam_m.w"
    if len(ranks) < 8:
        with pytest.raises(ckpttool.PlanError) as caught:
            ckpttool.plan_merge(catalog, strategy, str(tmp_path / "m.ckpt"))
        assert all("--optimizer-shard" not in one.hint for one in caught.value.diagnostics)


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
    plan, destination = ckpttool.plan_merge(catalog, strategy, str(folder / "m.ckpt"), options)
    ckpttool.execute(plan, destination)
    return read(folder / "m.ckpt"), {note.code: note for note in plan.notes}


@pytest.mark.parametrize("sharded", [["adam_m.w", "adam_m.v"], ["v", "adam_m.v"], ["adam_m.w"]])
def test_each_tensor_is_joined_or_not_as_its_slices_show(tmp_path, sharded):
    names = ["w", "v", "adam_m.w", "adam_m.v"]
    layouts = {name: LISTED if name in sharded else WHOLE for name in names}
    catalog, strategy, entries = files(tmp_path, layouts)
    with pytest.raises(ckpttool.PlanError) as caught:
        ckpttool.plan_merge(catalog, strategy, str(tmp_path / "m.ckpt"))
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
    assert (problem.code, problem.tensor) == ("missing", "adam_m.w")
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
