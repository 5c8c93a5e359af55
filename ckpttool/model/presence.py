"""Which ranks and parameters of a strategy are there at all, and what it means that others are not.

Whether what is there fits together is `ckpttool.model.sources`'s question.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from ckpttool.model.catalog import Catalog, format_ranks
from ckpttool.model.findings import Finding
from ckpttool.model.layout import Layout
from ckpttool.model.losses import hold_alike
from ckpttool.model.notes import Note
from ckpttool.model.redundancy import absent_ranks, is_deduplicated
from ckpttool.model.states import find_owners
from ckpttool.model.strategy import Strategy, count, shorten


@dataclass(slots=True)
class Presence:
    """What `check_presence` found.

    Attributes
    ----------
    is_deduplicated
        Of ranks with equal slices one alone has each.
    problems, notes
        What is wrong, and what else is to be known.
    lacking
        Parameters that are lost, by the ranks that should have a slice.
    """

    is_deduplicated: bool
    problems: list[Finding] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    lacking: dict[tuple[int, ...], list[str]] = field(default_factory=lambda: defaultdict(list))


def check_presence(catalog: Catalog, strategy: Strategy) -> Presence:
    """Hold the ranks and names that are on disk against those of the strategy, or description."""
    presence = Presence(is_deduplicated(catalog, strategy))
    if catalog.description is not None:
        presence.problems += [Finding("missing", text) for text in catalog.description.problems]
    elif strategy.layouts:
        _check_strategy(catalog, strategy, presence)
    elif presence.is_deduplicated:
        presence.problems += [Finding("missing", text) for text in absent_ranks(catalog)]
    else:
        presence.problems += _incomplete_replicas(catalog)
    return presence


def _check_strategy(catalog: Catalog, strategy: Strategy, presence: Presence) -> None:
    """Whether it is of this checkpoint, and which of its parameters are not there."""
    holders = catalog.holders
    found = sorted({*catalog.files, *catalog.damaged})
    extra = tuple(rank for rank in found if rank not in strategy.ranks)
    if extra:
        text = (
            f"{catalog.root}: {format_ranks(extra)} found, but {strategy.origin} is for "
            f"{len(strategy.ranks)} ranks (0-{strategy.ranks[-1]}); give the strategy of this "
            "checkpoint (of all pipeline stages), or move a leftover folder away"
        )
        presence.problems.append(Finding("strategy", text, ranks=extra))
    if holders and not any(name in strategy.layouts for name in holders):
        text = (
            f"{strategy.origin}: no parameter in common with {catalog.root}: the strategy lists "
            f"{shorten(strategy.layouts, 3)}, the files hold {shorten(holders, 3)}; "
            "is it the strategy of this checkpoint?"
        )
        presence.problems.append(Finding("strategy", text))
    elif holders:
        _check_absent(catalog, strategy, presence)


def _incomplete_replicas(catalog: Catalog) -> Iterator[Finding]:
    """Ranks that do not hold everything, where every rank should."""
    holders = catalog.holders
    for rank, file in catalog.files.items():
        lacks = [name for name in holders if name not in file.tensors]
        if lacks:
            state = "is empty (0 bytes)" if file.nbytes == 0 else "was perhaps cut short"
            text = (
                f"rank {rank}: {file.path} lacks {count(len(lacks), 'parameter')} that other ranks "
                f"have ({shorten(lacks)}), so it {state}, or the ranks do not all hold everything"
            )
            yield Finding("missing", text, ranks=(rank,))


def _check_absent(catalog: Catalog, strategy: Strategy, presence: Presence) -> None:
    """Listed parameters that no rank holds: never saved, or lost with the files of some ranks.

    With files missing, or without redundancy, a parameter counts as lost, unless other ranks that
    should hold its slices are there and do not.  And optimizer state of a kind that no rank holds
    anything of was not saved: many keep the weights alone.
    """
    holders = catalog.holders
    owners = find_owners(strategy.layouts, catalog.metas)
    saved = {name.removesuffix(owners.get(name, "")) for name in holders}
    absent = [name for name in strategy.layouts if name not in holders]
    unsaved = []
    for name in absent:
        base = owners.get(name, "")
        is_weight = base not in strategy.layouts
        ranks = tuple(rank for layout in strategy.layouts[name] for rank in layout.ranks)
        is_complete = all(_is_answered(catalog, layout) for layout in strategy.layouts[name])
        if (is_complete and not presence.is_deduplicated) or not (
            is_weight or name.removesuffix(base) in saved
        ):
            unsaved.append(name)
        else:
            presence.lacking[ranks].append(name)
    if unsaved:
        text = f"in the strategy but on no rank: {count(len(unsaved), 'parameter')}"
        text += f": {shorten(unsaved)}"
        presence.notes.append(Note("absent", text))


def _is_answered(catalog: Catalog, layout: Layout) -> bool:
    """Whether the files that are there tell for every slice if it was saved."""
    if all(rank in catalog.files for rank in layout.ranks):
        return True
    groups = (layout.owners(index) for index in layout.slice_indices())
    return hold_alike(catalog, layout.ranks) and all(
        any(rank in catalog.files for rank in owners) for owners in groups
    )
