"""Files that are whole by their format, and damaged all the same, as the others show.

A file may have lost all its bytes, or hold a parameter under a name that one damaged byte made:
its format has no objection, and the tensor would go its way beside the one that it is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace

from ckpttool.errors import FormatError
from ckpttool.model.catalog import Catalog, format_ranks
from ckpttool.model.redundancy import is_deduplicated
from ckpttool.model.states import find_owners, followed_parameter
from ckpttool.model.strategy import Strategy

SHORTEST_NAME = 4  # shorter ones, as "w1" and "w2", are near to each other by right


def set_aside(catalog: Catalog, strategy: Strategy | None) -> Catalog:
    """The catalog with such files among the damaged ones, so that replicas may replace them.

    ``strategy`` is None for a source that holds everything undivided, or of which nothing is known.
    """
    if catalog.description is not None:
        return catalog
    catalog = _with_damaged(catalog, _find_empty(catalog, strategy))
    return catalog if strategy is None else _with_damaged(catalog, _misnamed(catalog, strategy))


def _with_damaged(catalog: Catalog, reasons: Mapping[int, str]) -> Catalog:
    """The catalog with files that are damaged for some reason; itself if there are none."""
    if not reasons:
        return catalog
    files = catalog.files
    damaged = {rank: FormatError(files[rank].path, None, why) for rank, why in reasons.items()}
    return replace(
        catalog,
        files={rank: file for rank, file in files.items() if rank not in damaged},
        damaged=dict(sorted({**catalog.damaged, **damaged}.items())),
    )


def _find_empty(catalog: Catalog, strategy: Strategy | None) -> dict[int, str]:
    """Files of 0 bytes, where each should hold something.

    Only without redundancy may a rank hold nothing, or if its stage has no layouts at all.  Without
    a strategy that is not known, unless no file holds anything.
    """
    empty = {rank for rank, file in catalog.files.items() if not file.nbytes}
    if not empty or (strategy is not None and is_deduplicated(catalog, strategy)):
        return {}
    if strategy is None:
        empty &= set(catalog.files if catalog.is_undivided or not catalog.metas else ())
    elif strategy.layouts:
        layouts = {layout for named in strategy.layouts.values() for layout in named}
        empty &= {rank for layout in layouts for rank in layout.ranks}
    return dict.fromkeys(empty, "empty (0 bytes), as a full disk or a crash leaves it")


def _misnamed(catalog: Catalog, strategy: Strategy) -> dict[int, str]:
    """Files with a name that no other rank has, one character beside that which they lack.

    The ranks of a stage run the same program.  So a name that the strategy does not list, on one
    rank alone, is a damaged one if all others of the stage hold a parameter of the same type, under
    a name that differs by one character, and this rank does not.
    """
    lacked: dict[int, list[str]] | None = None
    found: dict[int, str] = {}
    holders = catalog.holders
    for name, (rank, *more) in holders.items():
        layouts = strategy.layouts.get(name, ())
        if more or any(rank in layout.ranks for layout in layouts):
            continue
        if lacked is None:
            lacked = defaultdict(list)
            for lacking, other in _lacked_by_one(catalog, strategy, holders):
                lacked[lacking].append(other)
        for other in lacked.get(rank, ()):
            if _is_near(name, other) and _is_of_one_kind(catalog, strategy, name, other):
                others = [r for r in holders.get(other, ()) if r in _stage(catalog, strategy, rank)]
                who = f"{format_ranks(others)} {'has' if len(others) == 1 else 'have'}"
                found[rank] = (
                    f"damaged: a parameter {name!r}, which no other rank has, in the place of "
                    f"{other!r}, which {who if others else 'the strategy lists'}; put an intact "
                    "copy there, or, if the name is right, list it in a strategy by hand (-s "
                    "MORE.yaml)"
                )
    return found


def _stage(catalog: Catalog, strategy: Strategy, rank: int) -> frozenset[int]:
    """The ranks with a file that should hold the same names as ``rank``."""
    if not strategy.layouts:
        return frozenset(catalog.files)
    first = rank - rank % strategy.stage_ranks
    return frozenset(range(first, first + strategy.stage_ranks)) & catalog.files.keys()


def _lacked_by_one(
    catalog: Catalog, strategy: Strategy, holders: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[int, str]]:
    """Ranks, and the names that they alone of their stage lack."""
    size = strategy.stage_ranks if strategy.layouts else max(catalog.files) + 1
    firsts = {rank // size * size for rank in catalog.files}
    stages = [frozenset(range(first, first + size)) & catalog.files.keys() for first in firsts]
    known: dict[tuple[int, ...], list[int]] = {}  # many names have the same holders
    for name, ranks in holders.items():
        if ranks not in known:
            gaps = [stage.difference(ranks) for stage in stages if not stage.isdisjoint(ranks)]
            known[ranks] = [rank for gap in gaps if len(gap) == 1 for rank in gap]
        yield from ((rank, name) for rank in known[ranks])
    alone = {rank for stage in stages if len(stage) == 1 for rank in stage}
    for name, layouts in strategy.layouts.items():
        if name not in holders:
            yield from ((rank, name) for rank in alone if any(rank in one.ranks for one in layouts))


def _is_near(name: str, other: str) -> bool:
    """Whether two names differ by one character."""
    return len(name) == len(other) and sum(map(str.__ne__, name, other)) == 1


def _is_of_one_kind(catalog: Catalog, strategy: Strategy, name: str, other: str) -> bool:
    """Whether ``name``, on one rank, may be what all others of its stage hold as ``other``.

    Where there is but one other, or none, the strategy must tell which name is right.
    """
    ((rank, meta),) = catalog.held(name).items()
    held = [
        tensor.meta
        for fellow in _stage(catalog, strategy, rank) - {rank}
        if (tensor := catalog.files[fellow].header.get(other)) is not None
    ]
    if len(held) < 2 and (
        len(name) < SHORTEST_NAME
        or not any(rank in layout.ranks for layout in strategy.layouts.get(other, ()))
        or (not held and _is_state(catalog, strategy, name, rank))
        or is_deduplicated(catalog, strategy)
    ):
        return False
    return all((one.dtype, len(one.shape)) == (meta.dtype, len(meta.shape)) for one in held)


def _is_state(catalog: Catalog, strategy: Strategy, name: str, rank: int) -> bool:
    """Whether ``name``, on one rank, is optimizer state by its name and shape."""
    owners = find_owners(strategy.layouts, catalog.metas)
    return followed_parameter(catalog, strategy, name, (rank,), owners) is not None
