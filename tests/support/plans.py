"""Plans of each command, for tests that look at one or execute it otherwise than a run does.

``rest`` are the options of resolving and of the outputs, and the keywords of `make_plan`.
"""

from __future__ import annotations

import os

import ckpttool
from ckpttool.checkpoint.checkpoint import ResolveOptions
from ckpttool.execution.copy import CopyOptions
from ckpttool.execution.execute import execute
from ckpttool.operations.jobs import Order
from ckpttool.operations.load import Mean, Source
from ckpttool.operations.run import make_plan
from ckpttool.transaction.resume import OutputOptions
from tests.support.checkpoints import cut
from tests.support.readers import read, read_ranks

SMALL = CopyOptions(band_bytes=24, task_bytes=100, max_in_flight=3)


def plan_merge(src, strategy, path, *rest, **options):
    return _plan("merge", [Source.of(src, strategy)], path, (), *rest, **options)


def plan_split(src, target, folder, *rest, **options):
    return _plan("split", [Source.of(src)], folder, target, *rest, **options)


def plan_reshard(src, strategy, target, folder, *rest, **options):
    return _plan("reshard", [Source.of(src, strategy)], folder, target, *rest, **options)


def plan_convert(src, path, *rest, **options):
    return _plan("convert", [Source.of(src)], path, (), *rest, **options)


def plan_average(inputs, path, target=None, *rest, **options):
    sources = [Source.of(src, strategy) for src, strategy, _ in inputs]
    mean = Mean([weight for *_, weight in inputs])
    return _plan("average", sources, path, target, *rest, mean=mean, **options)


def check_conversions(folder, entries, dst, format="ckpt"):
    """Merge and reshard the checkpoint in ``folder/src``, little at a time, and compare tensors."""
    catalog = ckpttool.scan(str(folder / "src"))
    merging = plan_merge(
        catalog, None, str(folder / "m.ckpt"), output_options=OutputOptions("ckpt")
    )
    execute(*merging, options=SMALL)
    assert read(folder / "m.ckpt") == entries
    options = OutputOptions(format)
    resharding = plan_reshard(catalog, None, dst, str(folder / "dst"), output_options=options)
    execute(*resharding, options=SMALL)
    assert read_ranks(folder / "dst") == cut(entries, dst)


def _plan(
    command,
    sources,
    path,
    target,
    resolve_options=ResolveOptions(),
    output_options=OutputOptions(),
    mean=None,
    **options,
):
    path = os.fspath(path)
    order = Order(command, sources, path, target, resolve_options, output_options, mean)
    return make_plan(order, **options)
