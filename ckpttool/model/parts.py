"""Outputs in parts: an undivided checkpoint in several files, and files among several runs.

Of numbered files each has at most so many bytes.  Parameters are put into them one after the other,
in the order of the plan; where the next one does not fit, the next file begins, so one that is
larger than the limit has a file of its own.  Tensors that belong to no rank's layout go to a file
apart, which loaders give to every rank as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from heapq import heapreplace

from ckpttool.model.catalog import MergedCatalog
from ckpttool.model.layout import Layout
from ckpttool.model.maps import map_of
from ckpttool.model.plan import Plan, Transfer


def cut_into_parts(plan: Plan, limit: int, path: Callable[[int | None, int], str]) -> Plan:
    """The plan of a merge, its one output spread over files.

    Parameters
    ----------
    plan
        Of one output that holds everything.
    limit
        Bytes of tensors in a numbered file, at most.
    path
        Gives the file of a number, from 0, of so many; the number is None for the file apart.
    """
    apart = _kept_apart(plan)
    numbers: list[int] = []
    number = filled = 0
    for transfer, is_apart in zip(plan.transfers, apart, strict=True):
        if not is_apart:
            nbytes = transfer.source.meta.nbytes
            if filled and filled + nbytes > limit:
                number, filled = number + 1, 0
            filled += nbytes
        numbers.append(number)
    count = 0 if all(apart) else number + 1
    transfers = tuple(
        replace(transfer, layouts=(_placed(transfer, count if is_apart else number),))
        for transfer, is_apart, number in zip(plan.transfers, apart, numbers, strict=True)
    )
    paths = {number: path(number, count) for number in range(count)}
    if any(apart):
        paths[count] = path(None, count)
    target = replace(plan.target, paths=paths, ranks=len(paths))
    return replace(plan, target=target, transfers=transfers)


def balance(sizes: Sequence[int], count: int) -> list[int]:
    """For every size one of ``count`` parts, from 0 on, so that the parts are about equal.

    The largest are dealt first, each to the part that has the least; always in the same way.

    Examples
    --------
    >>> balance([5, 1, 4, 2], 2)
    [0, 0, 1, 1]
    """
    parts = [0] * len(sizes)
    held = [(0, part) for part in range(count)]
    for item in sorted(range(len(sizes)), key=lambda item: (-sizes[item], item)):
        nbytes, parts[item] = held[0]
        heapreplace(held, (nbytes + sizes[item], parts[item]))
    return parts


def _placed(transfer: Transfer, number: int) -> Layout:
    """The layout of a tensor that is whole in one file."""
    return Layout.undivided(len(transfer.source.meta.shape), 1, number)


def _kept_apart(plan: Plan) -> Sequence[bool]:
    """Of every transfer whether it goes to the file apart.

    That is what the source keeps apart or its strategy does not list.  Without a strategy it is
    what cannot be cut: a single element, and map parameters, of which a file needs all parts.
    """
    sources = [transfer.source for transfer in plan.transfers]
    if any(source.is_listed for source in sources):
        return [not source.has_layout for source in sources]
    catalog = plan.catalog
    common = catalog.common_tensors if isinstance(catalog, MergedCatalog) else {}
    return [
        source.meta.name in common
        or math.prod(source.meta.shape) == 1
        or map_of(source.meta.name) is not None
        for source in sources
    ]
