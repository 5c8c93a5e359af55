"""Which ranks and parameters of a strategy are there at all, and what it means that others are not.

Whether what is there fits together is `ckpttool.model.sources`'s question.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from ckpttool.model.catalog import Catalog, SelfDescribedCatalog, format_ranks
from ckpttool.model.findings import Finding
from ckpttool.model.layout import Layout
from ckpttool.model.losses import hold_alike
from ckpttool.model.maps import map_of
from ckpttool.model.notes import Note
from ckpttool.model.redundancy import absent_ranks, is_deduplicated
from ckpttool.model.states import Owners, find_owners, followed_parameter
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
    if isinstance(catalog, SelfDescribedCatalog):
        presence.problems += [Finding("missing", text) for text in catalog.description.problems]
    elif strategy.layouts:
        _check_strategy(catalog, strategy, presence)
    elif presence.is_deduplicated:
        presence.problems += [Finding("missing", text) for text in absent_ranks(catalog)]
    else:
        presence.problems += _incomplete_replicas(catalog)
    return presence


@dataclass(frozen=True, slots=True)
class PartlyHeld:
    """Parameters without a layout that only some ranks of a stage have, all the same ranks.

    Attributes
    ----------
    names
        The parameters.
    ranks
        All ranks that have them, of whichever stage.
    missing
        The ranks with a file that lack them, in stages of which others have them.
    text
        What is said of them.
    """

    names: tuple[str, ...]
    ranks: tuple[int, ...]
    missing: tuple[int, ...]
    text: str

    @property
    def is_alone(self) -> bool:
        """Whether one rank alone has them."""
        return len(self.ranks) == 1


def find_partly_held(
    catalog: Catalog, strategy: Strategy, is_deduplicated: bool
) -> tuple[PartlyHeld, ...]:
    """Parameters that no strategy lists, and that only some ranks of their stage have.

    The ranks of a stage run the same program and save the same names: one that is not everywhere
    was renamed, or lost, by damage.  Without redundancy each may be handed out to one rank; so it
    is if all that are not on every rank are on one.  Ranks that hold nothing, and map parameters,
    are judged elsewhere.
    """
    if isinstance(catalog, SelfDescribedCatalog) or not strategy.layouts:
        return ()
    names: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for name, ranks in catalog.holders.items():
        names[ranks].append(name)
    stages: dict[int, set[int]] = defaultdict(set)
    for rank in (rank for rank, file in catalog.files.items() if file.tensors):
        stages[rank // strategy.stage_ranks].add(rank)
    missing: dict[tuple[int, ...], tuple[int, ...]] = {}
    for ranks in names:
        of_stages = {rank // strategy.stage_ranks for rank in ranks}
        there = {rank for stage in of_stages for rank in stages[stage]}
        missing[ranks] = tuple(sorted(there.difference(ranks)))
    if not any(missing.values()):
        return ()
    owners = find_owners(strategy.layouts, catalog.metas)
    found = []
    for ranks, lacking in missing.items():
        unlisted = tuple(
            name
            for name in (names[ranks] if lacking else ())
            if name not in strategy.layouts
            and map_of(name) is None
            and followed_parameter(catalog, strategy, name, ranks, owners) is None
        )
        if unlisted:
            text = _on_others(catalog, unlisted, lacking)
            if len(ranks) == 1:
                instead = chain(*(names[of] for of, gone in missing.items() if gone == ranks))
                text = _on_one(catalog, unlisted, ranks[0], list(instead))
            found.append(PartlyHeld(unlisted, ranks, lacking, text))
    if is_deduplicated and all(
        len(one.ranks) == len({rank // strategy.stage_ranks for rank in one.ranks}) for one in found
    ):
        return ()
    return tuple(found)


def _on_one(catalog: Catalog, names: Sequence[str], rank: int, instead: Sequence[str]) -> str:
    """What is said of names that one rank alone has, ``instead`` of those that all others have."""
    text = f"{shorten(names)}: not in the strategy, and on rank {rank} alone "
    text += f"({catalog.files[rank].path})"
    if instead:
        text += f", which lacks {shorten(instead)} that all others of its stage have"
    return text


def _on_others(catalog: Catalog, names: Sequence[str], missing: Sequence[int]) -> str:
    """What is said of names that some ranks lack, and others of their stage have."""
    text = f"{shorten(names)}: not in the strategy, and not on {format_ranks(missing)} "
    paths = shorten((catalog.files[rank].path for rank in missing), 1)
    return f"{text}({paths}), though others of the same stage have it; cut short, or renamed?"


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
    elif holders and (absent := [name for name in strategy.layouts if name not in holders]):
        _check_absent(catalog, strategy, absent, holders, presence)


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


def _check_absent(
    catalog: Catalog,
    strategy: Strategy,
    absent: Sequence[str],
    holders: Mapping[str, Sequence[int]],
    presence: Presence,
) -> None:
    """Listed parameters that no rank holds: never saved, or lost with the files of some ranks.

    With files missing, or without redundancy, a parameter counts as lost, unless other ranks that
    should hold its slices are there and do not.  And optimizer state of a kind that no rank holds
    anything of was not saved: many keep the weights alone.
    """
    owners = find_owners(strategy.layouts, catalog.metas)
    saved = {name.removesuffix(owners.get(name, "")) for name in holders}
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
        weights = {name for name in unsaved if owners.get(name) not in strategy.layouts}
        others = _unlisted_weights(catalog, strategy, owners) if weights else []
        if others:
            text += f"; on ranks but not in the strategy: {shorten(others)}; was one renamed?"
        presence.notes.append(Note("absent", text, is_warning=bool(others)))


def _unlisted_weights(catalog: Catalog, strategy: Strategy, owners: Owners) -> list[str]:
    """Names that the strategy does not list and that are no single values and no states."""
    metas = catalog.metas
    return [
        name
        for name, meta in metas.items()
        if name not in strategy.layouts
        and meta.nbytes > meta.itemsize
        and owners.get(name) not in metas
    ]


def _is_answered(catalog: Catalog, layout: Layout) -> bool:
    """Whether the files that are there tell for every slice if it was saved."""
    if all(rank in catalog.files for rank in layout.ranks):
        return True
    groups = (layout.owners(index) for index in layout.slice_indices())
    return hold_alike(catalog, layout.ranks) and all(
        any(rank in catalog.files for rank in owners) for owners in groups
    )
