"""Slices that were written from the wrong place of memory.

MindSpore 2.10 cuts a tensor in memory, and hands the views of its slices to ``save_file``.  From
0.8 on safetensors takes the address of a view and the number of its bytes, whatever its strides
are.  A slice that is cut on another axis than the first then holds the elements that follow its
first one in memory.  Shape and type are right, and the other elements are in no file.

Let a row be the elements of a slice that lie together in both tensors: those of the last axis that
is cut, and of all axes after it.  In memory the rows of slices that were cut from the same tensor
follow each other.  So a scrambled slice holds what another holds, one row further.  The other one
is its neighbour, unless MindSpore cut tensors that it had joined of some slices.

Slices of a legal tensor may look like this if its rows or slices are equal, or if it has few
values: these show nothing.  One sample of three pages raises the suspicion; all bytes prove it.

Source
------
MindSpore 2.10 ``parallel/_tensor.py`` (``_apply_slice_operator``) and
``parallel/transform_safetensors.py`` (``_save_file_atomically``); safetensors 0.8
``numpy.py`` (``_flatten``).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING

from msgspec import Struct

from ckpttool.checkpoint.evidence import Asking, ask
from ckpttool.checkpoint.samples import TENSORS_PER_LAYOUT, sampling_order
from ckpttool.model.catalog import Catalog
from ckpttool.model.slicing import FullTensor, LayoutSlicing
from ckpttool.model.tensors import Extent, StoredTensor

if TYPE_CHECKING:
    from ckpttool.storage.sampling import Sample

MIN_ELEMENTS = 6  # that two slices have in common; fewer may be equal by chance
MIN_BITS = 2.0  # of an element: four values


class ScrambledTensor(Struct, frozen=True):
    """A tensor with scrambled slices: one rank holds what another does, one row further."""

    tensor: FullTensor
    ranks: tuple[int, int]  # what the second holds is what the first holds, one row further


class _Line(Struct, frozen=True):
    """Slices of a tensor beside each other, along the last axis that is cut."""

    tensor: FullTensor
    ranks: tuple[int, ...]
    heads: tuple[StoredTensor, ...]  # each slice without its last row
    tails: tuple[StoredTensor, ...]  # each slice without its first row

    def find_shifted(self, samples: Mapping[StoredTensor, Sample]) -> tuple[int, int] | None:
        """Return the numbers of two slices that look scrambled; None if none do.

        Rows that are equal, and slices that another one equals, show nothing.
        """
        heads = [samples[part] for part in self.heads]
        tails = [samples[part] for part in self.tails]
        if len({*tails}) < len(tails):
            return None
        number_of = {head: number for number, head in enumerate(heads)}
        for number, (head, tail) in enumerate(zip(heads, tails, strict=True)):
            is_later = number_of.get(tail, 0) > number
            if is_later and head != tail and tail.element_bits >= MIN_BITS:
                return number, number_of[tail]
        return None


def find_scrambled(
    catalog: Catalog, tensors: Iterable[FullTensor]
) -> Asking[tuple[ScrambledTensor, ...]]:
    """Return the tensors with scrambled slices, of the first of each layout and shape.

    Only ``.safetensors`` files have them.
    """
    from ckpttool.storage.sampling import digest, sample

    lines = [*_lines(catalog, tensors)]
    parts = (part for line in lines for part in (*line.heads, *line.tails))
    samples = yield from ask(sample, parts)
    suspects = [(line, pair) for line in lines if (pair := line.find_shifted(samples)) is not None]
    pairs = [(line.tails[a], line.heads[b]) for line, (a, b) in suspects]
    digests = yield from ask(digest, (part for pair in pairs for part in pair))
    return tuple(
        ScrambledTensor(line.tensor, (line.ranks[a], line.ranks[b]))
        for (line, (a, b)), (tail, head) in zip(suspects, pairs, strict=True)
        if digests[tail] == digests[head]
    )


def _lines(catalog: Catalog, tensors: Iterable[FullTensor]) -> Iterator[_Line]:
    """Yield a line of some tensors of each layout and shape.

    Other shapes belong to other weights, which may have been cut from other slices.
    """
    by_key: dict[Hashable, list[FullTensor]] = defaultdict(list)
    for tensor in tensors:
        has_layout = tensor.has_layout and isinstance(tensor.slicing, LayoutSlicing)
        if has_layout and max(tensor.layout.slice_counts[1:], default=1) > 1:
            by_key[tensor.slicing.key].append(tensor)
    for group in by_key.values():
        for tensor in sorted(group, key=sampling_order)[:TENSORS_PER_LAYOUT]:
            line = _line(catalog, tensor)
            if line is not None:
                yield line


def _line(catalog: Catalog, tensor: FullTensor) -> _Line | None:
    """Return the first line of a tensor; None if it has too few rows, or is in other files."""
    slicing, layout = tensor.slicing, tensor.layout
    assert isinstance(slicing, LayoutSlicing), "it has a layout"
    axis = max(axis for axis, number in enumerate(layout.slice_counts) if number > 1)
    stored: dict[int, StoredTensor] = {}
    for index in layout.slice_indices():
        if not any(index[:axis]):
            owners = (rank for rank in layout.owners(index) if rank in slicing.files)
            stored |= {rank: slicing.files[rank][slicing.name] for rank in islice(owners, 1)}
    if any(catalog.files[rank].format != "safetensors" for rank in stored):
        return None
    shape = layout.slice_shape(layout.first_rank, slicing.shape)
    row = math.prod(shape[axis:])
    size = math.prod(shape) - row
    if size < MIN_ELEMENTS:
        return None
    return _Line(
        tensor,
        tuple(stored),
        tuple(_part(tensor_of_rank, 0, size) for tensor_of_rank in stored.values()),
        tuple(_part(tensor_of_rank, row, size) for tensor_of_rank in stored.values()),
    )


def _part(tensor: StoredTensor, start: int, size: int) -> StoredTensor:
    (extent,), itemsize = tensor.extents, tensor.meta.itemsize
    part = Extent(extent.offset + start * itemsize, size * itemsize)
    return StoredTensor(tensor.meta.of_shape((size,)), tensor.file, (part,))
