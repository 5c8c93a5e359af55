"""Group outputs that read the same source rows, so that they are written at the same time.

If the source is sharded along rows and the target along columns, an output reads a few bytes of
every row.  Another output reads the next bytes.  One read of the disk or the page cache serves
both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from msgspec import Struct

from ckpttool.execution.copy import read_amplification
from ckpttool.model.plan import OutputFile, OutputTensor, Plan
from ckpttool.model.region import Region

MAX_OUTPUTS = 64  # in a group; each is an open file
MIN_GAP_BYTES = 1 << 20  # that an output reads without use; for fewer, grouping gains nothing


def group_ranks(plan: Plan, max_tensors: int) -> list[tuple[int, ...]]:
    """Return the ranks of all outputs in groups that read the same rows of the source.

    All groups are formed before the first is written, because the ranks of adjacent columns need
    not be adjacent.  A group has at most ``max_tensors``, or one output.
    """
    tensors = 1
    kinds = {name: len(transfers) for name, transfers in plan.kinds.items()}
    alike = plan.alike
    outputs = plan.of_kinds.outputs(equal[0] for equal in alike)
    gaps: list[Mapping[_Rows, int]] = []
    total = Counter[_Rows | str]()  # of all outputs, by rows and by file
    for equal, output in zip(alike, outputs, strict=True):
        gaps.append(_find_gaps(output, kinds))
        for rows, nbytes in gaps[-1].items():
            total[rows] += nbytes * len(equal)
            total[rows.file] += nbytes * len(equal)
        tensors = max(tensors, sum(kinds[tensor.meta.name] for tensor in output.tensors))
    # The rows with the most gaps in all outputs: the most of its own may be those of no other.
    shared = {
        rank: max(gap, key=lambda rows: (total[rows.file], total[rows]), default=None)
        for equal, gap in zip(alike, gaps, strict=True)
        for rank in equal
    }
    groups: dict[_Rows | int, list[int]] = {}
    for rank in plan.target.paths:
        groups.setdefault(shared[rank] or rank, []).append(rank)
    size = max(1, min(MAX_OUTPUTS, max_tensors // tensors))
    return [
        tuple(ranks[i : i + size]) for ranks in groups.values() for i in range(0, len(ranks), size)
    ]


class _Rows(Struct, frozen=True):
    """Rows of the source, as far as outputs are concerned: those of a tensor in a file."""

    file: str
    tensor: str


def _find_gaps(output: OutputFile, kinds: Mapping[str, int]) -> Mapping[_Rows, int]:
    """Return the rows that an output reads only in part, and the bytes that it does not use.

    The output has the first tensor of each kind; ``kinds`` has the number of tensors by its name.
    The first of several tensors with equal slicing represents them.  Files from which the output
    reads few such bytes are left out.
    """
    by_slicing: dict[object, list[OutputTensor]] = {}
    for tensor in output.tensors:
        slicings = tuple(term.source.slicing.key for term in tensor.terms)
        key = slicings, tensor.region, tensor.stored_itemsize
        by_slicing.setdefault(key, []).append(tensor)
    gaps: dict[str, dict[_Rows, int]] = {}  # by file
    for alike in by_slicing.values():
        first = alike[0]
        if not first.meta.nbytes:
            continue
        piece = next(first.pieces(Region.whole(first.meta.shape)), None)
        if piece is None:  # all of it is zero
            continue
        gap_ratio = read_amplification(piece) - 1
        number = sum(kinds[tensor.meta.name] for tensor in alike)
        used_bytes = first.region.size * first.stored_itemsize * number
        if gap_ratio >= 1:
            rows = _Rows(piece.tensor.file.path, first.meta.name)
            gaps.setdefault(rows.file, {})[rows] = int(gap_ratio * used_bytes)
    enough = (rows for rows in gaps.values() if sum(rows.values()) >= MIN_GAP_BYTES)
    return {rows: nbytes for by_rows in enough for rows, nbytes in by_rows.items()}
