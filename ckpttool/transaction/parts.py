"""The outputs of one of several runs of a plan, such as those of an array job: ``--part K/N``.

Every run makes the full plan and writes its part of the output files.  The files are distributed by
size, in the same way in every run.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from ckpttool.model.plan import Plan


def ranks_of_part(plan: Plan, part: tuple[int, int]) -> tuple[int, ...]:
    """Return the ranks whose outputs run k of n writes, from 1 on; there may be none.

    All runs have about the same number of bytes, and the result depends on nothing else.
    """
    number, count = part
    ranks, sizes = list(plan.target.paths), plan.sizes
    parts = balance([sizes[rank] for rank in ranks], count)
    return tuple(rank for rank, at in zip(ranks, parts, strict=True) if at == number - 1)


def balance(sizes: Sequence[int], count: int) -> list[int]:
    """Assign each size to one of ``count`` parts, numbered from 0, with nearly equal sums.

    Each size, from the largest on, goes to the part with the smallest sum.  Ties go to the lowest
    number, so equal input has equal output.

    Examples
    --------
    >>> balance([5, 1, 4, 2], 2)
    [0, 0, 1, 1]
    """
    parts = [0] * len(sizes)
    sums = [(0, part) for part in range(count)]
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        nbytes, parts[i] = sums[0]
        heapq.heapreplace(sums, (nbytes + sizes[i], parts[i]))
    return parts
