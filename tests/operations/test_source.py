"""The one way from files to full tensors, and the one error of all that is wrong on it."""

from pathlib import Path

import pytest
from msgspec.structs import replace

import ckpttool
from ckpttool.operations.tensor_diff import diff
from ckpttool.problems import CombinedError, Diagnostics
from tests.support.checkpoints import ONE_STAGE, ROWS, catalog_on_disk, noise, strategy_of
from tests.support.errors import texts_of
from tests.support.plans import plan_merge, plan_reshard

RANKS = range(4)


@pytest.fixture
def catalog(tmp_path):
    ranks = {
        rank: {
            "w": noise(f"w{rank // 2}", "Float32", (4, 3)),
            "b": noise(f"b{rank}", "Float32", (5,)),
        }
        for rank in RANKS
    }
    return catalog_on_disk(tmp_path / "src", ranks)


def test_a_checkpoint_is_resolved_to_full_tensors(catalog):
    resolved = ckpttool.resolve(catalog, ONE_STAGE, ckpttool.ResolveOptions(unlisted="first"))
    assert [(one.meta.name, one.meta.shape) for one in resolved.tensors] == [
        ("w", (8, 3)),
        ("b", (5,)),
    ]
    assert resolved.strategy.layouts == ONE_STAGE.layouts


def test_what_is_wrong_is_raised_or_goes_to_the_diagnostics(catalog):
    with pytest.raises(ckpttool.PlanError, match="different between ranks") as raised:
        ckpttool.resolve(catalog, ONE_STAGE)
    found = Diagnostics()
    resolved = ckpttool.resolve(catalog, ONE_STAGE, diagnostics=found)
    assert [source.meta.name for source in resolved.tensors] == ["w"]
    with pytest.raises(ckpttool.PlanError) as collected:
        found.raise_if_errors()
    assert texts_of(collected.value) == texts_of(raised.value)


def test_without_a_strategy_ranks_are_not_resolved(catalog):
    with pytest.raises(
        ckpttool.PlanError, match=r": no strategy for 4 ranks\n.*\n  Try: `ckpttool strategy draft "
    ):
        ckpttool.resolve(catalog)


def test_the_destination_is_checked_though_the_source_has_no_strategy(catalog, tmp_path):
    (tmp_path / "merged.h5").write_bytes(b"mine")
    with pytest.raises(ckpttool.CkptToolError) as raised:
        plan_merge(catalog, None, str(tmp_path / "merged.h5"))
    assert isinstance(raised.value, CombinedError)
    first, second = texts_of(raised.value)
    assert "no strategy" in first
    assert "exists already" in second


def test_so_it_is_though_the_target_does_not_fit(catalog, tmp_path):
    source, target = (
        replace(strategy_of(layouts), files=()) for layouts in ({"w": ROWS}, {"w": ROWS, "b": ROWS})
    )
    (tmp_path / "out").write_bytes(b"a file")
    options = ckpttool.ResolveOptions(unlisted="first")
    with pytest.raises(ckpttool.PlanError) as raised:
        plan_reshard(catalog, source, target, str(tmp_path / "out"), options)
    assert "target" in texts_of(raised.value)[0]
    assert "is a file" in texts_of(raised.value)[-1]


def test_strict_makes_warnings_errors_of_resolve_and_diff(catalog):
    files = {rank: file for rank, file in catalog.files.items() if rank != 1}
    some = replace(catalog, files=files)
    options = ckpttool.ResolveOptions(unlisted="drop")
    assert ckpttool.resolve(some, ONE_STAGE, options).tensors
    strict = replace(options, strict=True)
    with pytest.raises(ckpttool.PlanError, match="rank 1"):
        ckpttool.resolve(some, ONE_STAGE, strict)
    with pytest.raises(ckpttool.PlanError, match="rank 1"):
        diff(some, catalog, ONE_STAGE, ONE_STAGE, strict)


def test_resolve_compares_replicas_if_wanted(tmp_path):
    ranks = {rank: {"w": noise(f"w{rank // 2}", "Float32", (4000, 3))} for rank in RANKS}
    catalog = catalog_on_disk(tmp_path / "src", ranks)
    path = Path(catalog.files[3].path)
    data = bytearray(path.read_bytes())
    extent = catalog.files[3].tensors["w"].extents[0]
    data[extent.offset + extent.nbytes // 3] ^= 1  # between the samples
    path.write_bytes(data)
    catalog = ckpttool.scan(str(tmp_path / "src"))
    assert ckpttool.resolve(catalog, ONE_STAGE).tensors
    with pytest.raises(ckpttool.PlanError, match="replicas differ"):
        ckpttool.resolve(catalog, ONE_STAGE, ckpttool.ResolveOptions(check_replicas=True))


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        (ckpttool.ResolveOptions, {"unlisted": "some"}),
        (ckpttool.ResolveOptions, {"optimizer_shard": 0}),
        (ckpttool.OutputOptions, {"format": "zip"}),
        (ckpttool.OutputOptions, {"not_in_target": "some"}),
        (ckpttool.OutputOptions, {"prefix": "a/b"}),
        (ckpttool.OutputOptions, {"part": (3, 2)}),
        (Diagnostics, {"command": "merge"}),
    ],
)
def test_options_that_mean_nothing_are_refused(kind, wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}="):
        kind(**wrong)
