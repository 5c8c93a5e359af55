"""Outputs that are best written at the same time, since they want parts of the same source rows.

Where the source is cut along its rows and the target along its columns, an output wants a few bytes
of every row, and the next output those beside them.  A disk and a page cache deliver both at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ckpttool.model.plan import OutputFile
from ckpttool.model.region import Region
from ckpttool.run.fill import read_amplification

MOST = 64  # outputs at a time; each is an open file
WORTH_BYTES = 1 << 20  # of the largest tensor; below it nothing is gained


def group_outputs(outputs: Iterable[OutputFile]) -> Iterator[tuple[OutputFile, ...]]:
    """Outputs in their order, neighbours that want the same rows of the source together."""
    group: list[OutputFile] = []
    shared: tuple[str, str] | None = None
    for output in outputs:
        rows = _shared_rows(output)
        if group and (rows is None or rows != shared or len(group) == MOST):
            yield tuple(group)
            group = []
        group.append(output)
        shared = rows
    if group:
        yield tuple(group)


def _shared_rows(output: OutputFile) -> tuple[str, str] | None:
    """The tensor and the file whose rows an output wants parts of; None if it wants whole rows.

    The largest tensor stands for all.
    """
    tensor = max(output.tensors, key=lambda tensor: tensor.meta.nbytes, default=None)
    if tensor is None or tensor.meta.nbytes < WORTH_BYTES:
        return None
    piece = next(tensor.pieces(Region.whole(tensor.meta.shape)))
    if read_amplification(piece) < 2:
        return None
    return tensor.meta.name, piece.tensor.path
