"""The slices of one stage -> the full tensor they make up, or what is wrong with them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

from ckpttool.model.catalog import Catalog, TensorMeta, format_ranks
from ckpttool.model.layout import Layout, ambiguity, fold_layout
from ckpttool.model.strategy import shorten

_T = TypeVar("_T", bound=Hashable)


def join_slices(
    catalog: Catalog, layout: Layout, metas: Mapping[int, TensorMeta]
) -> tuple[Layout, TensorMeta] | str:
    """The layout, folded if it was expanded, and the full tensor; or what is wrong, in words.

    Parameters
    ----------
    catalog
        The files, for messages.
    layout
        As the strategy has it.
    metas
        Rank to slice, of the ranks of the stage that have one; ascending, at least one.
    """
    ranks = list(metas)
    shapes = group_metas(metas, lambda meta: meta.shape)
    name = metas[ranks[0]].name
    if len(shapes) > 1 and layout.has_equal_slices:
        return disagreement(catalog, name, "slice shape", shapes)
    piece = metas[ranks[0]].shape
    ways = fold_layout(layout, len(piece), lambda way: way.fills(piece))
    if len(ways) > 1:
        return f"{name}: {ambiguity(layout, ways)}"
    layout = ways[0] if ways else layout
    # Of a manual split one slice may have other axes than the rest; that one is to be named.
    axes = len(layout.tensor_map)
    meta = next((metas[rank] for rank in ranks if len(metas[rank].shape) == axes), metas[ranks[0]])
    full = meta
    if len(meta.shape) == axes:
        full = meta.of_shape(layout.implied_shape(meta.shape))
    reason = layout.why_not(full.shape)
    if reason is not None:
        return f"{name}: {format_ranks(ranks)}, slice shape {meta.shape}: {reason}"
    wrong = [
        f"rank {rank} ({catalog.files[rank].path}) has {metas[rank].shape}, expected {shape}"
        for rank in (() if layout.has_equal_slices else ranks)
        if metas[rank].shape != (shape := layout.slice_shape(rank, full.shape))
    ]
    if wrong:
        split = f"the manual split of {list(layout.rows)} rows"
        return f"{name}: slice shapes are not those of {split}: {shorten(wrong)}"
    return layout, full


def disagreement(
    catalog: Catalog, name: str, what: str, groups: Mapping[_T, tuple[int, ...]]
) -> str:
    """Who holds what, the few before the many, with a file of each of the few; for a message."""
    ordered = sorted(groups.items(), key=lambda item: (len(item[1]), -item[1][0]))
    parts = []
    for value, ranks in ordered[:-1]:
        parts.append(f"{format_ranks(ranks)} ({catalog.files[ranks[0]].path}) has {value}")
    value, ranks = ordered[-1]
    parts.append(f"{format_ranks(ranks)} {'has' if len(ranks) == 1 else 'have'} {value}")
    return f"{name}: the {what} differs between ranks: {', '.join(parts)}"


def group_metas(
    metas: Mapping[int, TensorMeta], key: Callable[[TensorMeta], _T]
) -> dict[_T, tuple[int, ...]]:
    """The ranks with equal ``key`` of what they hold, as of `group_ranks`.

    Ranks whose headers are alike share what these say, so the few different objects are looked at,
    not the many ranks.
    """
    different = dict(zip(map(id, metas.values()), metas.values(), strict=True))
    keys = {at: key(meta) for at, meta in different.items()}
    if len(set(keys.values())) == 1:
        return {next(iter(keys.values())): tuple(metas)}
    return group_ranks(tuple(metas), lambda rank: keys[id(metas[rank])])


def group_ranks(ranks: Sequence[int], key: Callable[[int], _T]) -> dict[_T, tuple[int, ...]]:
    """The ranks with equal ``key``, by key, in the order of the first of each."""
    groups: dict[_T, list[int]] = {}
    for rank in ranks:
        groups.setdefault(key(rank), []).append(rank)
    return {value: tuple(members) for value, members in groups.items()}
