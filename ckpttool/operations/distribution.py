"""The distribution of tensors over ranks, for screens, documents and pictures.

`ckpttool.model.slicing.holdings` says who should hold a slice and who does; the ranks of a target
hold nothing yet, and read.  Equal distributions are one object: thousands of tensors have few.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Literal

from msgspec import Struct
from msgspec.structs import replace

from ckpttool.model.layout import Layout
from ckpttool.model.region import Region
from ckpttool.model.slicing import (
    BrokenTensor,
    Follows,
    Holding,
    LayoutSlicing,
    Listed,
    Own,
    RankGroups,
    Tensor,
    Unlisted,
    Whole,
    holdings,
)

if TYPE_CHECKING:
    from ckpttool.checkpoint.checkpoint import Checkpoint
    from ckpttool.model.plan import Plan, Transfer
    from ckpttool.model.strategy import Strategy
    from ckpttool.model.tensors import TensorMeta

Ranks = tuple[int, ...]
Known = Literal["listed", "follows", "whole", "unlisted", "stored", "broken"]


class Taken(Struct, frozen=True):
    """Elements of a target slice, and the source rank that they are read from.

    Attributes
    ----------
    rank
        The source rank; of a merged checkpoint, the number of the file.
    region
        The elements, counted in the full tensor.
    src
        The same elements, counted in the slice of the source rank.
    """

    rank: int
    region: Region
    src: Region


class Distribution(Struct, frozen=True, eq=False):
    """The distribution of a full tensor over ranks.  Tensors that have it share one object.

    Attributes
    ----------
    shape
        The full shape; of tensors that are only copied whole, the shape of a vector.
    known_by
        How it is known: a strategy lists it, or the checkpoint describes it; it ``"follows"`` a
        parameter; files hold it ``"whole"``; or nothing says how, and ranks should hold the same,
        or hold what is ``"stored"``.  It is ``"broken"`` if slices do not fit together.
    slices
        The slices of all stages, in C order stage by stage.  For a tensor that nothing lists: its
        different contents, each with the ranks that hold them.
    taken
        In a target: what is read from whom for each slice.
    listed_shard
        The optimizer shard that the strategy lists, if contents show another.
    is_corrected
        Whether slices or contents correct what the strategy lists.
    """

    shape: tuple[int, ...]
    known_by: Known
    slices: tuple[Holding, ...]
    taken: Mapping[Holding, tuple[Taken, ...]] = {}
    listed_shard: int | None = None
    is_corrected: bool = False

    @property
    def is_of_values(self) -> bool:
        """Whether each rank holds the tensor by itself, and not a slice of it."""
        return self.known_by in ("whole", "unlisted", "stored")

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """The layout of each stage."""
        layouts = (part.layout for part in self.slices if part.layout is not None)
        return tuple(dict.fromkeys(layouts))

    def of_rank(self, rank: int) -> Distribution:
        """Return the distribution with only the slices of a rank."""
        return replace(self, slices=tuple(part for part in self.slices if rank in part.owners))


def distribute(
    checkpoint: Checkpoint,
    written: Strategy | None = None,
    equal_ranks: Mapping[str, RankGroups] = {},
) -> dict[str, Distribution]:
    """Return how the tensors of a checkpoint are distributed, also those that are incomplete.

    If the slices of a tensor do not fit together, none are returned.

    Parameters
    ----------
    checkpoint
        The checkpoint.
    written
        The strategy as it was read, before contents corrected it.
    equal_ranks
        Name to the groups of ranks with equal contents, of tensors without a layout.
    """
    catalog, known = checkpoint.catalog, dict[Hashable, Distribution]()
    distributions: dict[str, Distribution] = {}
    for tensor in checkpoint.records:
        known_by = tensor.known_by
        groups: RankGroups = ()
        if isinstance(known_by, Whole | Unlisted):
            groups = max(known_by.groups, equal_ranks.get(tensor.name, ()), key=len)
            tensor = replace(tensor, known_by=replace(known_by, groups=groups))
        shape, shard = full_meta(tensor).shape, _listed_shard(tensor, written)
        what = shape, _KNOWN[type(known_by)], shard, tensor.is_corrected
        holders = catalog.holders.get(tensor.name, ())
        key = (*what, id(holders), groups, *(stage.key for stage in tensor.stages))
        if key not in known:
            slices = tuple(holdings(tensor))
            known[key] = Distribution(*what[:2], slices, {}, *what[2:])
        distributions.setdefault(tensor.name, known[key])
    return distributions


_KNOWN: Mapping[type, Known] = {
    Listed: "listed",
    Follows: "follows",
    Whole: "whole",
    Own: "whole",
    Unlisted: "unlisted",
}


def _listed_shard(tensor: Tensor, written: Strategy | None) -> int | None:
    base = tensor.known_by.parameter if isinstance(tensor.known_by, Follows) else tensor.name
    layouts = () if written is None else written.layouts.get(base, ())
    slicings = [each.layout for each in tensor.stages if isinstance(each, LayoutSlicing)]
    if not layouts or not slicings or layouts[0].optimizer_shard == slicings[0].optimizer_shard:
        return None
    return layouts[0].optimizer_shard


def full_meta(tensor: Tensor) -> TensorMeta:
    """Return a full tensor, also of one that lacks slices; else a slice."""
    if isinstance(tensor, BrokenTensor) and tensor.stages:
        return tensor.meta.of_shape(tensor.stages[0].shape)
    return tensor.meta


def distribute_target(
    plan: Plan, transfers: Mapping[str, Sequence[Transfer]]
) -> dict[str, Distribution]:
    """Return what the ranks of a target would hold, and read.

    Outputs are computed only for the first of the tensors that are distributed alike in the source
    and in the target.  If the plan has outputs of one rank only, the result has only its slices,
    each with all ranks that hold it.
    """
    (catalog,) = plan.inputs
    alike: dict[Hashable, list[str]] = {}
    for name, of_name in transfers.items():
        key = tuple(
            (
                transfer.layouts,
                transfer.source.slicing.key,
                tuple(id(catalog.holders[name]) for name in transfer.source.stored_names),
            )
            for transfer in of_name
        )
        alike.setdefault(key, []).append(name)
    distributions: dict[str, Distribution] = {}
    firsts = tuple(chain(*(transfers[names[0]] for names in alike.values())))
    slices: dict[str, dict[tuple[Layout, Region], tuple[Taken, ...]]] = {}
    layouts_of = {id(transfer.terms): transfer.layouts for transfer in firsts}
    for output in replace(plan, transfers=firsts):
        for tensor in output.tensors:
            region = tensor.region
            layout = next(
                each for each in layouts_of[id(tensor.terms)] if output.rank in each.ranks
            )
            equal = slices.setdefault(tensor.meta.name, {})
            if (layout, region) not in equal:
                equal[layout, region] = tuple(
                    Taken(piece.rank, piece.dst.moved_by(region.start), piece.src)
                    for piece in tensor.pieces(Region.whole(region.shape))
                    if isinstance(piece.src, Region) and isinstance(piece.dst, Region)
                )
    holders: dict[tuple[Layout, tuple[int, ...]], dict[Region, Ranks]] = {}
    for names in alike.values():
        shape, taken_by = transfers[names[0]][0].meta.shape, dict[Holding, tuple[Taken, ...]]()
        for (layout, region), taken in slices.get(names[0], {}).items():
            if (layout, shape) not in holders:
                holders[layout, shape] = _ranks_of_regions(layout, shape)
            taken_by[Holding(holders[layout, shape][region], (), layout, shape)] = taken
        how = Distribution(shape, "listed", tuple(taken_by), taken_by)
        distributions.update(dict.fromkeys(names, how))
    return {name: distributions[name] for name in transfers}


def _ranks_of_regions(layout: Layout, shape: tuple[int, ...]) -> dict[Region, Ranks]:
    holders: dict[Region, list[int]] = {}
    for rank in layout.ranks:
        holders.setdefault(layout.region(rank, shape), []).append(rank)
    return {region: tuple(ranks) for region, ranks in holders.items()}
