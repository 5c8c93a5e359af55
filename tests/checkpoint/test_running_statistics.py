"""Running statistics of BatchNorm, which each device keeps for itself in data parallel."""

import json
import shutil

import numpy as np
import pytest

from ckpttool.checkpoint.contents import find_statistic_candidates
from ckpttool.model.layout import Layout
from ckpttool.model.strategy import Strategy
from ckpttool.model.tensors import TensorMeta
from tests.support.commands import mentions, message, run
from tests.support.corpus import GOLDEN
from tests.support.readers import entry_of, read_ckpt, write_ckpt

REAL = GOLDEN / "batchnorm"


@pytest.fixture
def folder(tmp_path):
    """A copy of what MindSpore saved, to be changed."""
    return shutil.copytree(REAL, tmp_path / "src")


def change(folder, rank, entries):
    """Change parameters of one rank."""
    path = folder / f"rank_{rank}" / "resnet-1_3.ckpt"
    write_ckpt(path, {**read_ckpt(path), **entries})


def floats(*values):
    return entry_of(np.array(values, "<f4"))


@pytest.mark.parametrize("values", [(-1, 1, 1), (1, float("nan"), 1), (1, 1, float("inf"))])
def test_values_that_no_variance_has_are_a_replica_that_differs(folder, tmp_path, values):
    change(folder, 1, {"1.moving_variance": floats(*values)})
    document = json.loads(run("verify", folder, "--replicated", "--deep", "--json").stdout)
    assert ("replica", "1.moving_variance") in [
        (one["code"], one["tensor"]) for one in document["findings"]
    ]
    result = run("merge", folder, "--replicated", "-o", tmp_path / "m.h5")
    assert not mentions(message(result), "not every rank holds the full model: 1 parameter")


def metas(**shapes):
    return {
        name.replace("__", "."): TensorMeta(name.replace("__", "."), "Float32", shape)
        for name, shape in shapes.items()
    }


def test_names_and_shapes_tell_which_they_are():
    none = Strategy.without_layouts(4)
    pair = metas(bn__moving_mean=(8,), bn__moving_variance=(8,), bn__gamma=(8,))
    assert set(find_statistic_candidates(pair, none)) == {"bn.moving_mean", "bn.moving_variance"}
    mint = metas(running_mean=(8,), running_var=(8,), num_batches_tracked=())
    assert set(find_statistic_candidates(mint, none)) == {"running_mean", "running_var"}
    instance = metas(norm__mean=(8,), norm__variance=(8,))
    assert set(find_statistic_candidates(instance, none)) == {"norm.mean", "norm.variance"}
    for others in (
        metas(bn__moving_mean=(8,)),
        metas(bn__moving_mean=(8,), bn__moving_variance=(4,)),
        metas(bn__moving_mean=(8,), other__moving_variance=(8,)),
        metas(bn__moving_mean=(8, 2), bn__moving_variance=(8, 2)),
        metas(bn__moving_mean=(), bn__moving_variance=()),
    ):
        assert not find_statistic_candidates(others, none)


def test_what_a_strategy_lists_or_may_have_sharded_is_none():
    pair = metas(bn__moving_mean=(8,), bn__moving_variance=(8,), bn__gamma=(8,))
    sharded, whole = Layout((4,), ((0,),)), Layout((4,), ((),))
    for name, layout, count in (
        ("bn.gamma", sharded, 0),
        ("bn.gamma", whole, 2),
        ("bn.moving_mean", whole, 0),
        ("other.gamma", sharded, 2),
    ):
        found = find_statistic_candidates(pair, Strategy({name: (layout,)}, 1, 4))
        assert len(found) == count, name
