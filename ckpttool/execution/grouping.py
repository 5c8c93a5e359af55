"""Group outputs that read the same source rows, so that they are written at the same time.

If the source is sharded along rows and the target along columns, an output reads a few bytes of
every row, and another output the bytes beside them.  A disk and a page cache deliver both at once.
"""

from __future__ import annotations

from collections.abc import Iterator

from ckpttool.execution.copy import read_amplification
from ckpttool.model.plan import OutputFile, OutputTensor, Plan
from ckpttool.model.region import Region

MOST = 64  # outputs at a time; each is an open file
WORTH_BYTES = 1 << 20  # read for an output in vain; below it nothing is gained


def group_outputs(plan: Plan, most_tensors: int) -> Iterator[tuple[OutputFile, ...]]:
    """Yield all outputs in groups that read the same rows of the source.

    They are found before the first is written: ranks whose columns are neighbours need not be
    neighbours themselves.  No group has more than ``most_tensors``, unless one output has.
    """
    groups: dict[tuple[str, str] | int, list[int]] = {}
    tensors = 1
    for output in plan:
        groups.setdefault(_shared_rows(output) or output.rank, []).append(output.rank)
        tensors = max(tensors, len(output.tensors))
    most = max(1, min(MOST, most_tensors // tensors))
    cut = [ranks[i : i + most] for ranks in groups.values() for i in range(0, len(ranks), most)]
    outputs = plan.outputs(rank for ranks in cut for rank in ranks)
    for ranks in cut:
        yield tuple(next(outputs) for _ in ranks)


def _shared_rows(output: OutputFile) -> tuple[str, str] | None:
    """A tensor and the file whose rows an output wants parts of; None if it wants whole rows.

    Of those tensors that are cut alike, one stands for all; of these the one counts for which, all
    together, most is read in vain.
    """
    alike: dict[object, list[OutputTensor]] = {}
    for tensor in output.tensors:
        how = tensor.source.slicing.key, tensor.region, tensor.stored_itemsize
        alike.setdefault(how, []).append(tensor)
    most, shared = WORTH_BYTES, None
    for first, *others in alike.values():
        if not first.meta.nbytes:
            continue
        piece = next(first.pieces(Region.whole(first.meta.shape)))
        extra = read_amplification(piece) - 1
        read_bytes = first.region.size * first.stored_itemsize * (1 + len(others))
        in_vain = int(extra * read_bytes)
        if extra >= 1 and in_vain >= most:
            most, shared = in_vain, (first.meta.name, piece.tensor.file.path)
    return shared
