"""A full tensor, and which stored slices hold which of its elements."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, replace

from ckpttool.model.catalog import Catalog, StoredTensor, TensorMeta
from ckpttool.model.described import Described
from ckpttool.model.layout import Layout
from ckpttool.model.region import Region


@dataclass(frozen=True, slots=True)
class Source:
    """A full tensor, spread over files.

    Attributes
    ----------
    meta
        Name, element type and full shape.
    layout
        How it is cut over the ranks of one stage; of each slice at least one owner is present.
        Undivided if ``described`` says how.
    catalog
        The files.
    is_listed
        True if the source strategy lists it, or the checkpoint describes it.
    follows
        The parameter whose layout it shares, where the strategy forgot to list optimizer state.
    turn
        ``(r, n)`` for a tensor that goes only to the target ranks ``t`` with ``t % n == r``; None
        for one that is the same for all.
    described
        The slices, where the checkpoint describes them itself.
    """

    meta: TensorMeta
    layout: Layout
    catalog: Catalog
    is_listed: bool = False
    follows: str | None = None
    turn: tuple[int, int] | None = None
    described: Described | None = None

    @property
    def sharing(self) -> Hashable:
        """How ranks share it: equal for sources of which equal ranks hold equal slices."""
        return self.layout if self.described is None else self.described.sharing

    def overlaps(
        self, within: Region, origin: tuple[int, ...]
    ) -> Iterator[tuple[StoredTensor, Region, Region]]:
        """The stored slices that hold ``within``, in C order.

        Parameters
        ----------
        within
            Elements of the full tensor, counted from the one at ``origin``.

        Yields
        ------
        tensor, in_slice, shared
            A stored slice; what it shares with ``within``, counted in it and from ``origin``.
        """
        if self.described is not None:
            yield from self.described.overlaps(within, origin)
            return
        for index, in_slice, shared in self.layout.overlaps(within, origin, self.meta.shape):
            yield self.find_slice(index), in_slice, shared

    def count_overlaps(self, wanted: Region) -> int:
        """How many `overlaps` there are."""
        if self.described is not None:
            return self.described.count_overlaps(wanted)
        return self.layout.count_overlaps(wanted, self.meta.shape)

    def excerpt(self, wanted: Region) -> Excerpt | Described:
        """What answers `overlaps` of ``wanted`` and holds no other slices: for other processes."""
        if self.described is not None:
            return self.described.excerpt(wanted)
        indices = self.layout.touched(wanted, self.meta.shape)
        slices = {index: self.find_slice(index) for index in indices}
        return Excerpt(self.meta.shape, self.layout, slices)

    def replicas(self) -> Iterator[dict[int, StoredTensor]]:
        """For each slice, in C order, the ranks that have it, ascending, and what they have."""
        if self.described is not None:
            for boxes in self.described.slices:
                yield {box.rank: box.tensor for box in boxes}
            return
        name, files = self.meta.name, self.catalog.files
        for index in self.layout.slice_indices():
            yield {
                rank: files[rank].tensors[name]
                for rank in self.layout.owners(index)
                if rank in files and name in files[rank].header
            }

    def find_slice(self, index: tuple[int, ...]) -> StoredTensor:
        """The stored slice at ``index`` of the layout, from the lowest owner that has it.

        The lowest, not the least busy: should replicas differ, all outputs see the same one.
        """
        for rank in self.layout.owners(index):
            file = self.catalog.files.get(rank)
            tensor = None if file is None else file.tensors.get(self.meta.name)
            if tensor is not None:
                return tensor
        raise LookupError(f"{self.meta.name}: no owner of slice {index}")


@dataclass(frozen=True, slots=True)
class Excerpt:
    """Some slices of a full tensor, apart from the catalog.

    Attributes
    ----------
    shape, layout
        Of the full tensor.
    slices
        By their index in the layout, as `Source.find_slice` has them.
    """

    shape: tuple[int, ...]
    layout: Layout
    slices: Mapping[tuple[int, ...], StoredTensor]

    def overlaps(
        self, within: Region, origin: tuple[int, ...]
    ) -> Iterator[tuple[StoredTensor, Region, Region]]:
        """As of `Source`."""
        for index, in_slice, shared in self.layout.overlaps(within, origin, self.shape):
            yield self.slices[index], in_slice, shared

    def count_overlaps(self, wanted: Region) -> int:
        """As of `Source`."""
        return self.layout.count_overlaps(wanted, self.shape)

    def excerpt(self, wanted: Region) -> Excerpt:
        """Fewer of them."""
        indices = self.layout.touched(wanted, self.shape)
        return replace(self, slices={index: self.slices[index] for index in indices})
