"""What the data of a checkpoint shows: replicas that differ, NaN, Inf, tensors of zeros."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace

from ckpttool.model.catalog import Catalog, SelfDescribedCatalog, TensorMeta, format_ranks
from ckpttool.model.findings import Finding
from ckpttool.model.notes import Note
from ckpttool.model.states import owners_of_full
from ckpttool.model.strategy import Strategy, count, parameter_of, shorten
from ckpttool.model.unlisted import OF_ONE_RANK, say_running
from ckpttool.run.compare import LookOptions
from ckpttool.run.facts import Facts, Index
from ckpttool.run.listed import fingerprint
from ckpttool.run.replicas import Slice, examine_slices, find_difference

# Numbers that count steps or epochs; ranks that differ in them are not of one step.
STEP_NAMES = frozenset({"global_step", "step_num", "epoch_num", "current_step"})

Progress = Callable[[int], None]


@dataclass(slots=True)
class _Tally:
    """What was counted in one tensor, over its slices."""

    elements: int = 0
    nans: int = 0
    infinities: int = 0
    first_nan: Index | None = None
    first_infinity: Index | None = None
    nan_ranks: list[int] = field(default_factory=list)
    infinity_ranks: list[int] = field(default_factory=list)
    zero_ranks: list[int] = field(default_factory=list)
    zeros: int = 0

    def add(self, one: Slice, facts: Facts) -> None:
        """Count a slice."""
        self.elements += facts.elements
        self.nans += facts.nans
        self.infinities += facts.infinities
        if facts.nans:
            self.first_nan = _first(self.first_nan, one.place(facts.first_nan))
            self.nan_ranks += one.ranks
        if facts.infinities:
            self.first_infinity = _first(self.first_infinity, one.place(facts.first_infinity))
            self.infinity_ranks += one.ranks
        if facts.elements and facts.is_zero:
            self.zeros += facts.elements
            self.zero_ranks += one.ranks


def check_contents(
    slices: Iterable[Slice],
    catalog: Catalog,
    strategy: Strategy | None,
    executor: Executor,
    on_progress: Progress,
    seen: set[bytes] | None = None,
    running: Collection[str] = (),
) -> tuple[list[Finding], list[Note]]:
    """What reading every byte of these slices shows.

    Parameters
    ----------
    slices
        Each slice with all of its replicas.
    catalog
        What is on disk.
    strategy
        None if there is none; one without layouts says that every rank holds everything.
    executor, on_progress
        See `examine`.
    seen
        Gets a `fingerprint` of every stored tensor that is read, if hashes are wanted.
    running
        Parameters that are running statistics: ranks that differ in them are one warning.
    """
    apart: list[Finding] = []
    findings: list[Finding] = []
    tallies: dict[tuple[str, int], _Tally] = {}
    metas: dict[str, TensorMeta] = {}
    options = LookOptions(wants_census=True, wants_hashes=seen is not None)
    for one, facts in examine_slices(slices, executor, options, on_progress):
        if seen is not None:
            seen.update(map(fingerprint, one.tensors, facts.hashes))
        source = one.source
        told = apart if source.meta.name in running else findings
        told += differences(one, facts, catalog, strategy)
        key = source.meta.name, 0 if strategy is None else next(source.slicing.owners())[0]
        tallies.setdefault(key, _Tally()).add(one, facts)
        metas[source.meta.name] = source.meta
    states = owners_of_full((), metas)
    zeros: list[str] = []
    for (name, _), tally in tallies.items():
        findings += _no_numbers(name, tally)
        is_weight = len(metas[name].shape) > 1 and parameter_of(name) is None and name not in states
        if tally.zeros and is_weight:
            findings.append(_zeros(name, tally))
        elif tally.zeros == tally.elements > 0:
            zeros.append(name)
    if apart:
        names = [finding.tensor for finding in apart if finding.tensor is not None]
        ranks = tuple(sorted({rank for finding in apart for rank in finding.ranks}))
        text = f"{say_running(names, ranks)}; merge --unlisted first takes the lowest rank's"
        findings.append(Finding("unlisted", text, "warning", ranks=ranks))
    notes = []
    if zeros:
        text = f"all elements are zero, as they are when training begins: {shorten(zeros)}"
        notes.append(Note("zero", text))
    return findings, notes


def differences(
    one: Slice, facts: Facts, catalog: Catalog, strategy: Strategy | None
) -> Iterator[Finding]:
    """Yield the finding of ranks that do not agree, if they do not."""
    source, name = one.source, one.source.meta.name
    is_replica = source.has_layout
    is_replicated = strategy is not None and not strategy.layouts
    is_replicated = is_replicated and not isinstance(catalog, SelfDescribedCatalog)
    if name in OF_ONE_RANK:
        return
    if is_replica or strategy is None or is_replicated:
        finding = find_difference(one, facts)
        if finding is not None:
            yield finding
        return
    finding = find_difference(one, facts, "not in the strategy, and different between ranks")
    if finding is not None and name in STEP_NAMES:
        text = finding.text + "; these ranks are not of one step"
        yield replace(finding, kind="step", text=text)
    elif finding is not None:
        yield replace(finding, kind="unlisted", severity="warning")


def _no_numbers(name: str, tally: _Tally) -> Iterator[Finding]:
    for kind, word, number, first, ranks in (
        ("nan", "NaN", tally.nans, tally.first_nan, tally.nan_ranks),
        ("infinite", "infinite", tally.infinities, tally.first_infinity, tally.infinity_ranks),
    ):
        if number:
            on = tuple(sorted(ranks))
            text = f"{name}: {number} of {count(tally.elements, 'element')} {_are(number)} {word}"
            text += f" ({format_ranks(on)}), first at {first}"
            yield Finding(kind, text, "warning", name, on, number, first)


def _zeros(name: str, tally: _Tally) -> Finding:
    ranks = tuple(sorted(tally.zero_ranks))
    text = f"{name}: all {count(tally.elements, 'element')} are zero"
    if tally.zeros < tally.elements:
        text = f"{name}: all elements that {format_ranks(ranks)} hold are zero, and others are not"
    return Finding("zero", text, "warning", name, ranks, tally.zeros)


def _are(number: int) -> str:
    return "is" if number == 1 else "are"


def _first(a: Index | None, b: Index | None) -> Index | None:
    return min((i for i in (a, b) if i is not None), default=None)
