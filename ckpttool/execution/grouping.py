"""Group outputs that read the same source rows, so that they are written at the same time.

If the source is sharded along rows and the target along columns, an output reads a few bytes of
every row.  Another output reads the next bytes.  One read of the disk or the page cache serves
both.
"""

from __future__ import annotations

from collections.abc import Mapping

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
    groups: dict[tuple[str, str] | int, list[int]] = {}
    tensors = 1
    shared: dict[int, tuple[str, str] | None] = {}
    kinds = {name: len(transfers) for name, transfers in plan.kinds.items()}
    alike = plan.alike
    outputs = plan.of_kinds.outputs(equal[0] for equal in alike)
    for equal, output in zip(alike, outputs, strict=True):
        shared |= dict.fromkeys(equal, _shared_rows(output, kinds))
        tensors = max(tensors, sum(kinds[one.meta.name] for one in output.tensors))
    for rank in plan.target.paths:
        groups.setdefault(shared[rank] or rank, []).append(rank)
    size = max(1, min(MAX_OUTPUTS, max_tensors // tensors))
    return [
        tuple(ranks[i : i + size]) for ranks in groups.values() for i in range(0, len(ranks), size)
    ]


def _shared_rows(output: OutputFile, kinds: Mapping[str, int]) -> tuple[str, str] | None:
    """Return the tensor and file whose rows an output reads only parts of; None if it has none.

    The output has the first tensor of each kind, and ``kinds`` the number of all by its name.  The
    first of several tensors with equal slicing represents them.  The result is the tensor for which
    the output reads the most gap bytes.
    """
    by_slicing: dict[object, list[OutputTensor]] = {}
    for tensor in output.tensors:
        slicings = tuple(term.source.slicing.key for term in tensor.terms)
        key = slicings, tensor.region, tensor.stored_itemsize
        by_slicing.setdefault(key, []).append(tensor)
    most_bytes, shared = MIN_GAP_BYTES, None
    for alike in by_slicing.values():
        first = alike[0]
        if not first.meta.nbytes:
            continue
        piece = next(first.pieces(Region.whole(first.meta.shape)))
        gap_ratio = read_amplification(piece) - 1
        number = sum(kinds[one.meta.name] for one in alike)
        used_bytes = first.region.size * first.stored_itemsize * number
        gap_bytes = int(gap_ratio * used_bytes)
        if gap_ratio >= 1 and gap_bytes >= most_bytes:
            most_bytes, shared = gap_bytes, (first.meta.name, piece.tensor.file.path)
    return shared
