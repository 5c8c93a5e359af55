"""Plans of files that are written again, each by itself."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from ckpttool.checkpoint.checkpoint import Checkpoint, Contents
from ckpttool.checkpoint.interpret import records_of_files
from ckpttool.model.plan import Target
from ckpttool.model.region import Region
from ckpttool.model.slicing import Whole
from ckpttool.model.strategy import Strategy
from ckpttool.planning import targets
from ckpttool.problems import Diagnostics
from ckpttool.transaction.resume import OutputOptions
from ckpttool.transaction.sources import plan_digest
from tests.support.checkpoints import catalog_of, with_names

SHAPES = {"w": (4, 2), "b": (), "empty": (0, 3), "half": ("Float16", (2, 3, 4, 5)), "t": "text"}


def plan_of(catalog, ranks=None):
    """The plan that writes the files of a catalog again."""
    number = max(catalog.files) + 1
    strategy = Strategy.without_layouts(number)
    records = records_of_files(catalog, "kept")
    checkpoint = Checkpoint(catalog=catalog, strategy=strategy, records=records, files="kept")
    paths = {rank: f"out/rank_{rank}/net.h5" for rank in ranks or catalog.files}
    target, found = Target("hdf5", paths, number, strategy, folder="out"), Diagnostics()
    plan = targets.plan(checkpoint, Contents(), target, OutputOptions(), found)
    found.raise_if_errors()
    assert [one.code for one in found] == []
    return plan


CATALOGS = {
    "one rank": catalog_of({0: SHAPES}),
    "equal headers": with_names(SHAPES, range(5)),
    "one missing": with_names(SHAPES, (0, 1, 3)),
    "every other rank": catalog_of({r: SHAPES | {"w": (4 + r % 2, 2)} for r in range(6)}),
    "stages": catalog_of({r: {f"w{r // 2}": (4,), "shared": (2,)} for r in range(4)}),
    "another order": catalog_of({0: {"a": (1,), "b": (2,)}, 1: {"b": (2,), "a": (1,)}}),
    "another text": catalog_of({0: {"t": "a"}, 1: {"t": "b"}}),
    "nothing": catalog_of({0: {"a": (3,)}, 1: {}}),
}


@pytest.mark.parametrize("catalog", CATALOGS.values(), ids=CATALOGS)
def test_each_file_has_its_own_tensors_in_its_order(catalog):
    plan = plan_of(catalog)
    outputs = {output.rank: output for output in plan}
    assert outputs.keys() == catalog.files.keys()
    for rank, output in outputs.items():
        stored = [*catalog.files[rank].tensors.values()]
        assert [*output.metas] == [one.meta for one in stored]
        for tensor, one in zip(output.tensors, stored, strict=True):
            whole = Region.whole(one.meta.shape)
            for made in (tensor, tensor.excerpt(whole)):
                for piece in made.pieces(whole):
                    assert (piece.rank, piece.tensor) == (rank, one)
                    assert piece.src == piece.dst == whole


def test_the_plan_of_many_ranks_has_a_transfer_for_each_tensor_of_each_header():
    shapes = {f"layers.{i}.w": (8, 4) for i in range(50)}
    few, many = (plan_of(with_names(shapes, range(ranks))) for ranks in (2, 2000))
    assert len(many.transfers) == len(few.transfers) == 50
    assert [len(transfer.layouts) for transfer in many.transfers] == [1] * 50
    assert len(many.headers) == 1


def test_equal_tensors_of_other_ranks_are_another_plan():
    held = [{0: "a", 1: "a", 2: "b"}, {0: "a", 1: "b", 2: "b"}]
    plans = [
        plan_of(catalog_of({rank: {"t": text} for rank, text in texts.items()})) for texts in held
    ]
    assert len({plan_digest(plan) for plan in plans}) == 2


def test_one_tensor_for_all_ranks_is_another_plan_than_one_for_each():
    own = plan_of(with_names(SHAPES))
    terms = [
        replace(
            transfer.terms[0], source=replace(transfer.source, known_by=Whole((tuple(range(4)),)))
        )
        for transfer in own.transfers
    ]
    transfers = (
        replace(transfer, terms=(term,))
        for transfer, term in zip(own.transfers, terms, strict=True)
    )
    assert plan_digest(own) == plan_digest(plan_of(with_names(SHAPES)))
    assert plan_digest(own) != plan_digest(replace(own, transfers=tuple(transfers)))


def test_some_ranks_are_some_of_the_outputs():
    plan = plan_of(with_names(SHAPES, range(4)), ranks=(1, 3))
    assert [output.rank for output in plan] == [1, 3]
    assert [output.tensors[0].terms[0].source.layout.first_rank for output in plan] == [1, 3]
