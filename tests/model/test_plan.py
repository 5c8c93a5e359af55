"""Which tensor of an undivided checkpoint goes into which of several files."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ckpttool.model.catalog import MergedCatalog
from ckpttool.model.plan import Target, Term, number_files
from ckpttool.model.region import Region
from ckpttool.model.tensors import StoredFile
from ckpttool.storage.region_io import FlatFiles, read_band
from ckpttool.transaction.manifest import plan_digest
from tests.support.checkpoints import ONE_STAGE, catalog_of, slice_catalog, with_names
from tests.support.in_memory import plan_in_memory


def merged(catalog, strategy=None, content_groups=None):
    return plan_in_memory(catalog, strategy, Target("ckpt", {0: "out"}), content_groups or {})


def names_in_parts(plan, limit):
    """Names by file, as tuples, in the order of the files."""
    parts = number_files(plan, limit, lambda number, count: f"{number}/{count}")
    assert parts.target.ranks == len(parts.target.paths)
    return {output.path: tuple(meta.name for meta in output.metas) for output in parts}


def whole(**shapes):
    return MergedCatalog("m", catalog_of({0: shapes}).files)


@pytest.mark.parametrize(
    ("limit", "parts"),
    [
        (10_000, ["abcd"]),
        (96, ["abcd"]),
        (95, ["abc", "d"]),
        (48, ["a", "bc", "d"]),  # b and c are as large as the limit
        (47, ["a", "b", "cd"]),
        (1, ["a", "b", "c", "d"]),
    ],
)
def test_tensors_go_into_files_in_order_and_none_is_too_large(limit, parts):
    plan = merged(whole(a=(7,), b=(10,), c=(2,), d=(5,)))  # of 28, 40, 8 and 20 bytes
    want = {f"{i}/{len(parts)}": tuple(names) for i, names in enumerate(parts)}
    assert names_in_parts(plan, limit) == want


def test_a_tensor_larger_than_the_limit_has_a_file_of_its_own():
    plan = merged(whole(a=(2,), b=(100,), c=(2,)))
    assert list(names_in_parts(plan, 20).values()) == [("a",), ("b",), ("c",)]


def test_tensors_without_elements_take_no_room():
    plan = merged(whole(a=(0, 3), b=(5,), c=(0,)))
    assert list(names_in_parts(plan, 20).values()) == [("a", "b", "c")]


def test_what_the_strategy_does_not_list_goes_apart():
    catalog = with_names({"w": (2, 4), "step": (), "table": (3, 3), "adam_m.w": (2, 4)})
    content_groups = dict.fromkeys(("step", "table"), ((0, 1, 2, 3),))
    plan = merged(catalog, ONE_STAGE, content_groups)
    assert names_in_parts(plan, 1000) == {
        "0/1": ("w", "adam_m.w"),
        "None/1": ("step", "table"),
    }


def test_without_a_strategy_single_elements_go_apart_and_text():
    plan = merged(whole(w=(2, 4), step=(), rate=(1,), note="text", none=(0,)))
    assert names_in_parts(plan, 1000) == {
        "0/1": ("w", "none"),
        "None/1": ("step", "rate", "note"),
    }


def test_parts_of_a_map_parameter_stay_together():
    names = [f"e.__map_{part}__" for part in ("keys", "values", "statuses")]
    plan = merged(whole(w=(8,), **dict(zip(names, [(2,), (2, 9), (2,)], strict=True)), v=(8,)))
    assert names_in_parts(plan, 20) == {"0/2": ("w",), "1/2": ("v",), "None/2": tuple(names)}


def test_what_the_source_keeps_apart_stays_apart():
    catalog = replace(whole(w=(2, 4), table=(3, 3)), common_tensors={"table": True})
    assert names_in_parts(merged(catalog), 1000) == {"0/1": ("w",), "None/1": ("table",)}


def test_nothing_but_what_goes_apart_is_one_file():
    assert names_in_parts(merged(whole(step=())), 1000) == {"None/0": ("step",)}


def test_a_source_of_several_files_is_read_from_each():
    files = catalog_of({0: {"a": (4,)}, 1: {"b": (4,)}}).files
    plan = merged(MergedCatalog("m", files, documents=(StoredFile("i"),)))
    parts = number_files(plan, 1000, lambda number, count: f"{number}")
    (output,) = parts
    pieces = [piece for tensor in output.tensors for piece in tensor.pieces(tensor.region)]
    assert [piece.tensor.file.path for piece in pieces] == [
        "run/rank_0/net.ckpt",
        "run/rank_1/net.ckpt",
    ]


def test_slices_are_joined_in_their_part():
    catalog = slice_catalog(ONE_STAGE, {"w": (4, 2)})
    (output,) = number_files(merged(catalog, ONE_STAGE), 8, lambda number, count: "p")
    assert [meta.shape for meta in output.metas] == [(4, 2)]


def with_transfer(plan, **changes):
    """A plan of one tensor, something of which is another."""
    return replace(plan, transfers=(replace(plan.transfers[0], **changes),))


def test_outputs_have_the_name_and_type_of_the_target_and_terms_those_of_the_files():
    plan = with_transfer(merged(whole(w=(2, 4))), name="v", dtype="Float16")
    ((tensor,),) = (output.tensors for output in plan)
    assert (tensor.meta.name, tensor.meta.dtype, tensor.meta.itemsize) == ("v", "Float16", 2)
    assert (tensor.source.meta.name, tensor.stored_itemsize) == ("w", 4)
    assert plan.sizes == {0: 16}


@pytest.mark.parametrize(("count", "weight", "reason"), [(2, 1, "2 terms"), (1, 0.5, "weight 0.5")])
def test_a_tensor_is_copied_from_one_term(count, weight, reason):
    plan = merged(whole(w=(2, 4)))
    term = Term(plan.transfers[0].source, weight)
    with pytest.raises(AssertionError, match=reason):
        list(with_transfer(plan, terms=(term,) * count))


def test_bytes_of_another_type_are_not_copied():
    ((tensor,),) = (o.tensors for o in with_transfer(merged(whole(w=(2,))), dtype="Int32"))
    with pytest.raises(AssertionError, match="needs a cast"), FlatFiles(64) as files:
        read_band(files, tensor, Region((0,), (2,)), np.empty((2, 4), np.uint8))


def test_the_digest_tells_names_types_and_terms():
    plan = merged(whole(w=(2, 4)))
    (transfer,) = plan.transfers
    others = [
        {"name": "v"},
        {"dtype": "Float16"},
        {"terms": (Term(transfer.source, 0.5),)},
        {"terms": transfer.terms * 2},
    ]
    plans = [plan, *(with_transfer(plan, **change) for change in others)]
    assert len({plan_digest(one) for one in plans}) == len(plans)
    assert plan_digest(with_transfer(plan)) == plan_digest(plan)
