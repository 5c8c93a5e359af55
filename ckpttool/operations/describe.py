"""What inspect answers: the facts of a checkpoint as figures, or what another file is.

Nothing here reads a checkpoint; `ckpttool.operations.inspect` does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from ckpttool.checkpoint.checkpoint import RANK_SPECIFIC_NAMES, Checkpoint
from ckpttool.checkpoint.presence import ranks_without_file
from ckpttool.formats.foreign import Device, ForeignFile
from ckpttool.model.catalog import Catalog
from ckpttool.model.names import drop_unlike_shapes, match_states
from ckpttool.model.strategy import Strategy
from ckpttool.operations.summary import (
    Entry,
    EqualRanks,
    Ranks,
    Summary,
    entries_of_files,
    entries_of_layouts,
    entries_of_tensors,
    find_parallelism,
    layouts_of_rules,
)
from ckpttool.problems import Diagnostics, StrategyError


@dataclass(frozen=True, slots=True)
class Facts:
    """What inspect found of a checkpoint: all that its description is made of.

    Attributes
    ----------
    catalog
        The files, as the scan found them.
    readable
        The same without the files that turned out to be damaged.
    found
        Everything that is wrong or noted.
    sharding
        How the tensors are spread over the files; None if nothing says it.
    resolved
        The full tensors; None if the tensors are those of the files.
    devices
        Rank to device, from a rank table.
    """

    catalog: Catalog
    readable: Catalog
    found: Diagnostics
    sharding: Strategy | None
    resolved: Checkpoint | None = None
    devices: Mapping[int, Device] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Completeness:
    """Whether every slice is there; None if it is not known."""

    complete: bool | None
    complete_codes: tuple[str, ...] = ()  # of diagnostics that say what is wrong or in doubt
    missing_ranks: Ranks = ()  # without a file
    unreadable_ranks: Ranks = ()
    missing_tensors: tuple[str, ...] = ()  # whose slices are not all there, or do not fit together
    replicas: tuple[int, int] | None = None  # fewest and most ranks that hold a slice


@dataclass(frozen=True, slots=True)
class Inspection:
    """What a checkpoint holds, and what was found wrong or noted.

    Attributes
    ----------
    catalog
        The files.
    summary
        The tensors.
    completeness
        Whether all of them are there.
    found
        What is wrong or noted.
    sharding
        How full tensors are spread over the files of ranks, as contents correct it; None if nothing
        says it, or if each file holds full tensors.
    devices
        Rank to device, from a rank table.
    """

    catalog: Catalog
    summary: Summary
    completeness: Completeness
    found: Diagnostics
    sharding: Strategy | None
    devices: Mapping[int, Device]

    def with_samples(self, equal_ranks: Mapping[str, EqualRanks]) -> Inspection:
        """Return the answer with the ranks that hold equal samples of tensors without a layout."""
        different = {name for name, one in equal_ranks.items() if one.kind == "different"}
        done = self.completeness
        if self.sharding is not None and different - RANK_SPECIFIC_NAMES:
            codes = (*done.complete_codes, "unlisted")
            done = replace(done, complete=done.complete and None, complete_codes=codes)
        summary = replace(self.summary, equal_ranks=equal_ranks)
        return replace(self, summary=summary, completeness=done)

    @property
    def is_merged(self) -> bool:
        """Whether the files hold full tensors, and no strategy says otherwise."""
        return self.catalog.is_merged and self.sharding is None

    @property
    def expected_ranks(self) -> frozenset[int]:
        """The ranks that have a file, or should have one; of full tensors the files."""
        done = self.completeness
        return frozenset((*self.catalog.files, *done.unreadable_ranks, *done.missing_ranks))

    @property
    def looks_replicated(self) -> bool:
        """Whether all samples are equal on all ranks, and some are more than one value."""
        summary, everywhere = self.summary, (tuple(self.catalog.files),)
        tensors = {one.name for one in summary.entries if not one.is_single_value}
        return (
            summary.has_all_samples
            and {one.placement.owners for one in summary.entries} == {everywhere}
            and {one.ranks for one in summary.equal_ranks.values()} == {everywhere}
            and any(summary.equal_ranks[name].kind == "equal" for name in tensors)
        )


@dataclass(frozen=True, slots=True)
class SavesInspection:
    """The files of ranks of which no step was chosen: ranks to the names of their files."""

    path: str
    saves: Mapping[Ranks, tuple[str, ...]]
    found: Diagnostics


@dataclass(frozen=True, slots=True)
class StrategyInspection:
    """What a strategy lists: its layouts at a glance, and the notes of reading it."""

    strategy: Strategy
    summary: Summary
    found: Diagnostics


Inspected = Inspection | SavesInspection | StrategyInspection | ForeignFile


def describe_strategy(strategy: Strategy, found: Diagnostics) -> StrategyInspection:
    """Return the answer of inspect for the files of a strategy."""
    rules = layouts_of_rules(strategy)
    entries = (*entries_of_layouts(strategy.layouts), *entries_of_layouts(rules))
    states = strategy.listed_states
    found.add(*strategy.notes)
    parallelism = find_parallelism(entries, states, strategy)
    return StrategyInspection(strategy, Summary(entries, states, parallelism), found)


def describe_checkpoint(facts: Facts) -> Inspection:
    """Return the answer of inspect for a checkpoint, as its headers tell it."""
    summary, resolved = _summarize(facts), facts.resolved
    return Inspection(
        facts.catalog,
        summary,
        assess(facts, summary.entries),
        facts.found,
        None if resolved is None else resolved.strategy,
        facts.devices,
    )


def _summarize(facts: Facts) -> Summary:
    """Return the tensors: the full ones, or those that the files store."""
    catalog, resolved = facts.readable, facts.resolved
    if resolved is None:
        states = drop_unlike_shapes(catalog.match_states(), catalog.metas)
        return Summary(tuple(entries_of_files(catalog)), states)
    entries, layouts = tuple(entries_of_tensors(resolved)), resolved.strategy.layouts
    metas = {one.name: one.meta for one in resolved.tensors}
    states = drop_unlike_shapes(match_states(resolved.listed, metas), metas)
    expected = catalog.holders or layouts  # of files that cannot be read
    incomplete = {name: layouts[name] for name in layouts if name in expected and name not in metas}
    with_layouts = (*entries, *entries_of_layouts(incomplete))
    return Summary(entries, states, find_parallelism(with_layouts, states, resolved.strategy))


_DOUBTS = (
    *("strategy", "invalid_strategy", "contradicted", "replica"),
    *("undecided_shard", "one_of_several", "empty", "unsaved", "nothing", "no_elements"),
)
_INCOMPLETE = ("missing", "shape", "dtype")  # of a tensor whose slices cannot be joined
_UNFINISHED = ("unfinished", "nothing_complete", "mixed_steps")


def assess(facts: Facts, entries: Sequence[Entry]) -> Completeness:
    """Return whether all slices of a checkpoint are there, from what was found.

    ``entries`` are the tensors whose slices are all there.  Empty files that should hold some are
    damaged.
    """
    catalog, found, sharding = facts.readable, facts.found, facts.sharding
    unread = [error.code for error in found.failures if isinstance(error, StrategyError)]
    codes = dict.fromkeys([*(one.code for one in found), *unread])
    doubts = [code for code in codes if code in _DOUBTS]
    wrong = [one.code for one in found.errors if one.code not in _DOUBTS]
    wrong += [code for code in codes if code in _UNFINISHED]
    replaced = {rank for one in found if one.code == "damaged_replica" for rank in one.ranks}
    failures = [one for one in found.failures if one not in catalog.damaged.values()]
    if catalog.damaged.keys() - replaced or (failures and sharding is not None):
        wrong.append("damaged")
    of_ranks = sharding or Strategy.without_layouts()
    # A strategy that does not fit tells nothing of ranks.
    missing_ranks = () if "strategy" in codes else tuple(ranks_without_file(catalog, of_ranks))
    unreadable = tuple(catalog.damaged)
    if sharding is None:
        reasons = tuple(dict.fromkeys((*doubts, *wrong)))
        return Completeness(None, reasons, missing_ranks, unreadable)
    problems = chain(found.errors, *(error.diagnostics for error in found.failures))
    lost = (one.tensor for one in problems if one.code in _INCOMPLETE and one.tensor is not None)
    expected = dict.fromkeys(chain(catalog.holders, lost))  # perhaps no file holds any slice
    named = {entry.name for entry in entries}
    missing = tuple(name for name in expected if name not in named)
    placements = {entry.placement for entry in entries if entry.placement.is_listed}
    counts = {len(ranks) for placement in placements for ranks in placement.local_owners}
    if counts and "deduplicated" in codes:
        counts = {1}
    return Completeness(
        False if wrong or missing else None if doubts else True,
        tuple(dict.fromkeys((*wrong, *doubts))),
        missing_ranks,
        unreadable,
        missing,
        (min(counts), max(counts)) if counts else None,
    )


def group_ranks(catalog: Catalog) -> list[Ranks]:
    """Group the ranks whose files have tensors of the same names, the largest group first."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for ranks, header in catalog.headers.items():
        groups.setdefault(tuple(header), []).extend(ranks)
    found = (tuple(sorted(ranks)) for ranks in groups.values())
    return sorted(found, key=lambda ranks: (-len(ranks), ranks))
