"""The facts of a checkpoint as figures, for the answers of inspect.

Nothing here reads a checkpoint; `ckpttool.operations.inspection` does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

from msgspec import Struct

from ckpttool.checkpoint.checkpoint import RANK_SPECIFIC_NAMES, Checkpoint, Contents
from ckpttool.checkpoint.presence import ranks_without_file
from ckpttool.formats.foreign import Device
from ckpttool.model.catalog import Catalog
from ckpttool.model.plan import OutputTensor
from ckpttool.operations.summary import (
    Ranks,
    Summary,
    entries_of_files,
    entries_of_layouts,
    entries_of_tensors,
    find_parallelism,
)
from ckpttool.problems import Diagnostics, FormatError, StrategyError


class Completeness(Struct, frozen=True):
    """Whether every slice is there; None if it is not known."""

    complete: bool | None
    complete_codes: tuple[str, ...] = ()  # of diagnostics that say what is wrong or in doubt
    missing_ranks: Ranks = ()  # without a file
    unreadable_ranks: Ranks = ()
    missing_tensors: tuple[str, ...] = ()  # whose slices are not all there, or do not fit together
    replicas: tuple[int, int] | None = None  # fewest and most ranks that hold a slice


class Inspected(Struct, frozen=True):
    """The parts of an answer about a checkpoint.

    Attributes
    ----------
    catalog
        The files, as the scan found them.
    checkpoint
        The full tensors, if something says how the files of ranks are joined.
    contents
        What was read of them.
    summary
        The tensors: the full ones, or those that the files store.
    completeness
        Whether all of them are there.
    found
        What is wrong or noted.
    devices
        Rank to device, from a rank table.
    made
        The full tensors that a recipe makes.
    """

    catalog: Catalog
    checkpoint: Checkpoint
    contents: Contents
    summary: Summary
    completeness: Completeness
    found: Diagnostics
    devices: Mapping[int, Device] = {}
    made: Sequence[OutputTensor] = ()

    @property
    def is_merged(self) -> bool:
        """Whether the files hold full tensors, and no strategy says otherwise."""
        return self.catalog.is_merged and not self.checkpoint.are_joined

    @property
    def has_full_tensors(self) -> bool:
        """Whether the full tensors are known: they are stored, or joined."""
        return self.catalog.is_merged or self.checkpoint.are_joined

    @property
    def expected_ranks(self) -> frozenset[int]:
        """The ranks that have a file, or should have one; of full tensors the files."""
        done = self.completeness
        return frozenset((*self.catalog.files, *done.unreadable_ranks, *done.missing_ranks))

    @property
    def looks_replicated(self) -> bool:
        """Whether all samples are equal on all ranks, and some are more than one value."""
        summary, everywhere = self.summary, (tuple(self.catalog.files),)
        tensors = {entry.name for entry in summary.entries if not entry.is_single_value}
        return (
            summary.has_all_samples
            and {entry.placement.owners for entry in summary.entries} == {everywhere}
            and {equal.ranks for equal in summary.equal_ranks.values()} == {everywhere}
            and any(summary.equal_ranks[name].kind == "equal" for name in tensors)
        )


def summarize(checkpoint: Checkpoint) -> Summary:
    """Return the tensors: the full ones, or those that the files store."""
    catalog, layouts = checkpoint.catalog, checkpoint.strategy.layouts
    if not checkpoint.are_joined:
        return Summary(tuple(entries_of_files(catalog)), checkpoint.belongings)
    entries = tuple(entries_of_tensors(checkpoint))
    metas = {tensor.name: tensor.meta for tensor in checkpoint.tensors}
    expected = catalog.holders or layouts  # of files that cannot be read
    incomplete = {name: layouts[name] for name in layouts if name in expected and name not in metas}
    with_layouts = (*entries, *entries_of_layouts(incomplete))
    parallelism = find_parallelism(with_layouts, checkpoint.belongings, checkpoint.strategy)
    return Summary(entries, checkpoint.belongings, parallelism)


# Codes that refuse the layouts themselves: what they say is not true of the files.
LAYOUT_CODES = ("strategy", "invalid_strategy", "contradicted", "undecided_shard")
_DOUBTS = (
    *LAYOUT_CODES,
    *("replica", "one_of_several", "empty", "nothing", "no_elements"),
)
_INCOMPLETE = ("missing", "shape", "dtype")  # of a tensor whose slices cannot be joined
_REFUSED = ("unfinished", "nothing_complete", "mixed_steps", "unsaved", "renamed")  # by merge


def refuses_layouts(diagnostics: Diagnostics) -> bool:
    """Return whether merge would refuse the layouts, so that they are not true of the files."""
    failed = chain(*(error.diagnostics for error in diagnostics.failures))
    return any(diagnostic.code in LAYOUT_CODES for diagnostic in chain(diagnostics, failed))


def assess(checkpoint: Checkpoint, summary: Summary, diagnostics: Diagnostics) -> Completeness:
    """Return whether all slices of a checkpoint are there, from what was found.

    It is not known if tensors that a strategy omits differ between ranks.
    """
    catalog = checkpoint.catalog
    is_known = checkpoint.are_joined or (catalog.is_merged and not checkpoint.strategy.layouts)
    unread = [error.code for error in diagnostics.failures if isinstance(error, StrategyError)]
    codes = dict.fromkeys([*(diagnostic.code for diagnostic in diagnostics), *unread])
    doubts = [code for code in codes if code in _DOUBTS]
    wrong = [diagnostic.code for diagnostic in diagnostics.errors if diagnostic.code not in _DOUBTS]
    wrong += [code for code in codes if code in _REFUSED]
    replaced = {
        rank
        for diagnostic in diagnostics
        if diagnostic.code == "damaged_replica"
        for rank in diagnostic.ranks
    }
    damaged = {error.path for error in catalog.damaged.values()}
    failures = [
        error
        for error in diagnostics.failures
        if not (isinstance(error, FormatError) and error.path in damaged)
    ]
    if catalog.damaged.keys() - replaced or (failures and is_known):
        wrong.append("damaged")
    # A strategy that does not fit says nothing of ranks.
    is_misfit = "strategy" in codes
    missing_ranks = () if is_misfit else tuple(ranks_without_file(catalog, checkpoint.strategy))
    unreadable = tuple(catalog.damaged)
    if not is_known:
        reasons = tuple(dict.fromkeys((*doubts, *wrong)))
        return Completeness(None, reasons, missing_ranks, unreadable)
    different = {equal.name for equal in summary.equal_ranks.values() if equal.kind == "different"}
    if different - RANK_SPECIFIC_NAMES:
        doubts.append("unlisted")
    problems = chain(diagnostics.errors, *(error.diagnostics for error in diagnostics.failures))
    lost = (
        problem.tensor
        for problem in problems
        if problem.code in _INCOMPLETE and problem.tensor is not None
    )
    expected = dict.fromkeys(chain(catalog.holders, lost))  # perhaps no file holds any slice
    named = {entry.name for entry in summary.entries}
    missing = tuple(name for name in expected if name not in named)
    placements = {entry.placement for entry in summary.entries if entry.placement.is_listed}
    counts = {len(ranks) for placement in placements for ranks in placement.owners}
    if counts and checkpoint.is_deduplicated:
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
    alike = (tuple(sorted(ranks)) for ranks in groups.values())
    return sorted(alike, key=lambda ranks: (-len(ranks), ranks))
