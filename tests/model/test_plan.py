"""Plans: terms, names and types of outputs, and the digest."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from ckpttool.model.catalog import Catalog
from ckpttool.model.layout import Layout
from ckpttool.model.plan import Term
from ckpttool.model.region import Arrangement, Region
from ckpttool.model.slicing import Part
from ckpttool.transaction.sources import plan_digest
from tests.support.checkpoints import slice_catalog, strategy_of
from tests.support.in_memory import checkpoint_in_memory, full_tensors, merge_in_memory


def with_transfer(plan, **changes):
    return replace(plan, transfers=(replace(plan.transfers[0], **changes),))


def test_outputs_have_the_name_and_type_of_the_target_and_terms_those_of_the_files():
    plan = with_transfer(merge_in_memory(full_tensors(w=(2, 4))), name="v", dtype="Float16")
    ((tensor,),) = (output.tensors for output in plan)
    assert (tensor.meta.name, tensor.meta.dtype, tensor.meta.itemsize) == ("v", "Float16", 2)
    (term,) = tensor.terms
    assert (term.source.meta.name, tensor.stored_itemsize) == ("w", 4)
    assert plan.sizes == {0: 16}


@pytest.mark.parametrize(("count", "weight"), [(2, 1), (1, 0.5)])
def test_other_tensors_than_copies_are_means_which_are_rounded(count, weight):
    plan = merge_in_memory(full_tensors(w=(2, 4)))
    ((copied,),) = (output.tensors for output in plan)
    assert (copied.is_cast, copied.source.name) == (False, "w")
    terms = (Term(plan.transfers[0].source, weight),) * count
    plan = with_transfer(plan, terms=terms)
    ((tensor,),) = (output.tensors for output in plan)
    assert tensor.is_cast
    assert plan.holders() == {0: {"w"}}
    assert (tensor.is_scaled, tensor.source.name) == (False, "w")


def test_a_scale_is_no_mean():
    plan = merge_in_memory(full_tensors(w=(2, 4)))
    source = plan.transfers[0].source
    plan = with_transfer(plan, terms=(Term(source), Term(source, role="scale")), dtype="Float16")
    (transfer,), ((tensor,),) = plan.transfers, (output.tensors for output in plan)
    assert (transfer.is_mean, transfer.is_cast, tensor.is_scaled) == (False, True, True)
    assert transfer.source is source


@pytest.mark.parametrize(
    ("block", "stop"), [((2, 3), (1, 2)), ((2,), (1,)), ((), ()), (None, (2, 4))]
)
def test_a_part_has_one_element_for_each_block(block, stop):
    scale = merge_in_memory(full_tensors(w=stop)).transfers[0].source
    whole = Arrangement.whole((2, 4))
    part = Part("w", scale.slicing, whole, block=block)
    assert part.stored(Region((0, 0), (2, 4))).stop == stop
    covered = [region for _, _, region in part.stretches(Region((0, 0), (2, 4)))]
    assert sum(region.size for region in covered) == 8


def test_an_excerpt_has_none_of_the_slices_of_other_stages():
    layouts = [{"w": Layout((2,), ((0,),))} for _ in range(3)]
    catalog = slice_catalog(strategy_of(*layouts), {"w": (4,)})
    files = {rank: file for rank, file in catalog.files.items() if rank != 5}
    (tensor,) = checkpoint_in_memory(Catalog("run", files), strategy_of(*layouts)).tensors
    assert [one.layout.first_rank for one in (*tensor.copies, *tensor.incomplete)] == [2, 4]
    source = Term(tensor).excerpt(Region((0,), (1,))).source
    assert (source.copies, source.incomplete) == ((), ())
    assert [rank for replica in source.slicing.replicas() for rank in replica] == [0]


def test_the_digest_tells_names_types_and_terms():
    plan = merge_in_memory(full_tensors(w=(2, 4)))
    (transfer,) = plan.transfers
    others = [
        {"name": "v"},
        {"dtype": "Float16"},
        {"terms": (Term(transfer.source, 0.5),)},
        {"terms": (Term(transfer.source, 1, 1),)},
        {"terms": transfer.terms * 2},
    ]
    plans = [plan, *(with_transfer(plan, **change) for change in others)]
    assert len({plan_digest(plan) for plan in plans}) == len(plans)
    assert plan_digest(with_transfer(plan)) == plan_digest(plan)


def test_the_digest_of_a_plan_is_that_of_earlier_versions():
    strategy = strategy_of(*({"w": Layout((2,), ((0,),)), "v": Layout((2,), ((0,),))},) * 2)
    plan = merge_in_memory(slice_catalog(strategy, {"w": (4,), "v": (2,)}), strategy)
    shown = Layout((2,), ((0,),), full_shape=(8,))
    more = (
        replace(transfer, name=f"{transfer.name}2", layouts=(*transfer.layouts, shown))
        for transfer in plan.transfers
    )
    plan = replace(plan, transfers=(*plan.transfers, *more))
    expected = "dff705fbbdd1456c7fe0b9e57802402b71990c66a07d66f466ecc08b897091a7"
    assert plan_digest(plan) == f"sha256:{expected}"


def test_hosts_may_mount_the_source_under_other_names():
    plan = merge_in_memory(full_tensors(w=(2, 4)))
    named = replace(plan, provenance={"ckpttool.source": "elsewhere"})
    assert plan_digest(named) == plan_digest(plan)
    (output,) = named
    assert output.attrs == {**plan.target.attrs, "ckpttool.source": "elsewhere"}
