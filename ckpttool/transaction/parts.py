"""The outputs of a part: one of several runs of one plan, such as those of an array job.

Every run makes the full plan and writes its part of the output files.  The files are distributed by
size, in the same way in every run.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from msgspec import Struct

from ckpttool.model.plan import Plan


class Part(Struct, frozen=True):
    """One of ``count`` runs that write one set, from 1 on: ``--part number/count``."""

    number: int
    count: int

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"


def ranks_of_part(plan: Plan, part: Part) -> tuple[int, ...]:
    """Return the ranks whose outputs belong to a part; there may be none.

    All parts have about the same number of bytes, and the result depends on nothing else.
    """
    ranks, sizes = list(plan.target.paths), plan.sizes
    numbers = balance([sizes[rank] for rank in ranks], part.count)
    return tuple(r for r, number in zip(ranks, numbers, strict=True) if number == part.number - 1)


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
