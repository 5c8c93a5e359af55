"""reshard and merge against MindSpore's own ``transform_checkpoints``, wherever that is right.

It is wrong about gradients in the making (``accu_grads.*``): it believes the optimizer shard that
their strategy claims, and writes one rank's raw slice where the target does not list them.  It can
be wrong about optimizer shards (docs/concepts/mindspore.md); with these models it never was.
"""

from __future__ import annotations

import pytest

from tests.e2e.interop.cases import every_cut, every_pair
from tests.e2e.interop.saved import GRADIENTS, resharded
from tests.support.commands import run_well
from tests.support.corpus import digests
from tests.support.readers import read_ranks


def names_that_differ(ours, theirs):
    """The parameters that two results do not agree about."""
    assert ours.keys() == theirs.keys()
    return {
        name
        for rank in ours
        for name in ours[rank].keys() | theirs[rank].keys()
        if ours[rank].get(name) != theirs[rank].get(name)
    }


def excused(names, ours, theirs, truth, shard):
    """Whether MindSpore is the one that is wrong, for a reason that is known."""
    return {
        name
        for name in names
        if name.startswith(GRADIENTS)
        or (shard and all(ours[rank].get(name) == truth[rank].get(name) for rank in truth))
    }


@every_pair
def test_reshard_gives_what_transform_checkpoints_gives(src, dst, mindspore, tmp_path):
    form = ("ckpt", "safetensors")[len(src.ranks) < len(dst.ranks)]
    source = src.folder / form
    words = ["-s", src.strategy, "-d", dst.strategy, "-o", tmp_path / "ours", "--format", form]
    run_well("reshard", source, *words)
    compare(src, dst, form, resharded(src, dst), mindspore, tmp_path)


@every_cut
@pytest.mark.parametrize("form", ["ckpt", "safetensors"])
def test_merge_gives_what_transform_checkpoints_gives(cut, form, mindspore, tmp_path):
    out = tmp_path / "ours" / "rank_0" / f"checkpoint_0.{form}"
    run_well("merge", cut.folder / form, "-s", cut.strategy, "-o", out)
    compare(cut, None, form, {0: cut.full}, mindspore, tmp_path)


def compare(src, dst, form, truth, mindspore, folder):
    """Ours and theirs are equal, or theirs is wrong."""
    mindspore.ask(
        "transform",
        source=src.folder / form,
        out=folder / "theirs",
        src_strategy=src.strategy,
        dst_strategy=dst and dst.strategy,
        form=form,
    )
    ours, theirs = (digests(read_ranks(folder / name)) for name in ("ours", "theirs"))
    names = names_that_differ(ours, theirs)
    shard = any(side.recipe["optimizer_shard"] for side in (src, dst) if side)
    assert not names - excused(names, ours, theirs, digests(truth), shard)
    assert len(names) < len(ours[0])
