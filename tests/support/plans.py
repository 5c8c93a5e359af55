"""Plans of each command, for tests that look at one or execute it otherwise than a run does.

``rest`` are the options of resolving and of the outputs, and the keywords of `make_plan`.
"""

from __future__ import annotations

import os

from ckpttool.checkpoint.checkpoint import ResolveOptions
from ckpttool.operations.jobs import Order
from ckpttool.operations.load import Mean, Source
from ckpttool.operations.run import make_plan
from ckpttool.transaction.resume import OutputOptions


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
