"""A full tensor, and which stored slices hold which of its elements."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from ckpttool.model.catalog import StoredTensor, TensorMeta
from ckpttool.model.layout import Layout
from ckpttool.model.region import Region


class Slicing(Protocol):
    """How the elements of a full tensor are distributed over stored slices.

    The slices fill the full tensor.  Each is held by at least one rank; ranks that hold equal
    slices are replicas.
    """

    @property
    def key(self) -> Hashable:
        """A value that is equal for tensors of equal shape whose equal ranks hold equal slices."""

    @property
    def distribution_key(self) -> Hashable:
        """The same without the shape: equal for tensors that are distributed alike."""

    def overlaps(
        self, within: Region, origin: tuple[int, ...]
    ) -> Iterator[tuple[StoredTensor, Region, Region]]:
        """Yield the stored slices that hold ``within``, in C order.

        Of replicas, the slice of the lowest rank is taken: should replicas differ, all outputs see
        the same one.

        Parameters
        ----------
        within
            Elements of the full tensor, counted from the one at ``origin``.
        origin
            Index in the full tensor.

        Yields
        ------
        tensor, in_slice, shared
            A stored slice, and its overlap with ``within``: counted in the slice, and from
            ``origin``.
        """

    def count_overlaps(self, region: Region) -> int:
        """Return how many `overlaps` a region of the full tensor has."""

    def excerpt(self, region: Region) -> Slicing:
        """Return a slicing with the same `overlaps` of ``region`` and no other slices.

        It has no replicas and no catalog, so that little is sent to another process.
        """

    def replicas(self) -> Iterator[Mapping[int, StoredTensor]]:
        """Yield what each rank holds of each slice, slices in C order, ranks ascending."""

    def owners(self) -> Iterator[tuple[int, ...]]:
        """Yield the ranks that should hold each slice, in the order of `replicas`."""

    def bounds(self, rank: int) -> Region:
        """Return a region of the full tensor that contains the slices of ``rank``."""


@dataclass(frozen=True, slots=True)
class LayoutSlicing:
    """Slices that follow from a layout.

    Attributes
    ----------
    layout
        How the tensor is sharded over the ranks of one stage.
    shape
        The full shape.
    tensors
        Rank to stored tensor; at least one owner of each slice.  Ranks outside the stage are
        ignored.
    """

    layout: Layout
    shape: tuple[int, ...]
    tensors: Mapping[int, StoredTensor]

    @property
    def key(self) -> Hashable:
        """See `Slicing`."""
        return self.layout, self.shape

    @property
    def distribution_key(self) -> Hashable:
        """See `Slicing`."""
        return self.layout

    def overlaps(
        self, within: Region, origin: tuple[int, ...]
    ) -> Iterator[tuple[StoredTensor, Region, Region]]:
        """See `Slicing`."""
        for index, in_slice, shared in self.layout.overlaps(within, origin, self.shape):
            yield self.find_slice(index), in_slice, shared

    def count_overlaps(self, region: Region) -> int:
        """See `Slicing`."""
        return self.layout.count_overlaps(region, self.shape)

    def excerpt(self, region: Region) -> LayoutSlicing:
        """See `Slicing`."""
        indices = self.layout.touched(region, self.shape)
        return replace(self, tensors=dict(self._find_owner(index) for index in indices))

    def replicas(self) -> Iterator[dict[int, StoredTensor]]:
        """See `Slicing`."""
        for ranks in self.owners():
            yield {rank: self.tensors[rank] for rank in ranks if rank in self.tensors}

    def owners(self) -> Iterator[tuple[int, ...]]:
        """See `Slicing`."""
        return self.layout.slice_owners()

    def bounds(self, rank: int) -> Region:
        """See `Slicing`."""
        if rank in self.layout.ranks and self.layout.has_boxes:
            return self.layout.region(rank, self.shape)
        return Region.whole(self.shape)

    def find_slice(self, index: tuple[int, ...]) -> StoredTensor:
        """Return the stored slice at ``index`` of the layout, from the lowest owner that has it."""
        return self._find_owner(index)[1]

    def _find_owner(self, index: tuple[int, ...]) -> tuple[int, StoredTensor]:
        for rank in self.layout.owners(index):
            tensor = self.tensors.get(rank)
            if tensor is not None:
                return rank, tensor
        raise LookupError(f"no owner of slice {index}")


@dataclass(frozen=True, slots=True)
class Listed:
    """The strategy lists the tensor, or the checkpoint describes it."""


@dataclass(frozen=True, slots=True)
class FollowsParameter:
    """Optimizer state that the strategy does not list; it is sharded like its ``parameter``."""

    parameter: str


@dataclass(frozen=True, slots=True)
class NotInStrategy:
    """A tensor without a layout, which one file holds in full.

    ``rank_cycle`` is ``(r, n)`` for a tensor that goes only to the target ranks ``t`` with
    ``t % n == r``; None for one that is the same for all ranks.
    """

    rank_cycle: tuple[int, int] | None = None


Origin = Listed | FollowsParameter | NotInStrategy


@dataclass(frozen=True, slots=True)
class Source:
    """A full tensor, distributed over files.

    Attributes
    ----------
    meta
        Name, element type and full shape.
    slicing
        Which stored slice holds which elements.
    origin
        Where the slicing comes from.
    """

    meta: TensorMeta
    slicing: Slicing
    origin: Origin

    @property
    def layout(self) -> Layout:
        """The layout of a tensor that a strategy shards, or that one file holds in full."""
        assert isinstance(self.slicing, LayoutSlicing), f"{self.meta.name}: described, no layout"
        return self.slicing.layout

    @property
    def is_listed(self) -> bool:
        """Whether the strategy lists the tensor, or the checkpoint describes it."""
        return isinstance(self.origin, Listed)

    @property
    def has_layout(self) -> bool:
        """Whether its own slicing or that of its parameter is given."""
        return not isinstance(self.origin, NotInStrategy)

    @property
    def parameter(self) -> str | None:
        """The parameter that unlisted optimizer state follows; None for any other tensor."""
        return self.origin.parameter if isinstance(self.origin, FollowsParameter) else None

    @property
    def rank_cycle(self) -> tuple[int, int] | None:
        """See `NotInStrategy`; None for a tensor that has a layout."""
        return self.origin.rank_cycle if isinstance(self.origin, NotInStrategy) else None
