"""Verify a checkpoint: from headers, and with ``deep`` from every byte."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from ckpttool.concurrency import InlineExecutor, OnProgress, OpenProgress, no_progress
from ckpttool.discovery.scan import SourceOptions, scan_all
from ckpttool.errors import FormatError, PlanError, StepError, raise_all
from ckpttool.model.catalog import Catalog, MergedCatalog, RankCatalog
from ckpttool.model.diagnostics import Diagnostic, Diagnostics, Report
from ckpttool.model.optimizer_names import parameter_of
from ckpttool.model.slicing import Source
from ckpttool.model.strategy import Merged, Replicated, Sharding, Strategy
from ckpttool.model.tensors import FileIndex, TensorMeta
from ckpttool.model.wording import count, format_ranks, shorten
from ckpttool.planning.missing import find_lacking
from ckpttool.planning.optimizer_state import find_owners, owners_of_full
from ckpttool.planning.replicas import (
    REMEDY,
    Slice,
    compare_stages,
    examine_slices,
    find_difference,
    other_stages,
    slices_of,
)
from ckpttool.planning.resolve import (
    Contents,
    ResolvedSources,
    ResolveOptions,
    find_running,
    resolve,
)
from ckpttool.planning.sources import content_decided_names, find_sources
from ckpttool.planning.strategy_check import limit_to_written_ranks
from ckpttool.planning.unlisted import OF_ONE_RANK, say_running
from ckpttool.storage.checksums import check_files
from ckpttool.storage.compare import CompareOptions, Index, TensorStats
from ckpttool.transaction.manifest import require_unmodified_sources
from ckpttool.verification.headers import (
    check_types,
    check_unlisted,
    find_beginnings,
    find_damage,
    find_partial,
)
from ckpttool.verification.manifest_check import check_manifest, find_manifests, fingerprint

# Numbers that count steps or epochs; ranks that differ in them are not of one step.
STEP_NAMES = frozenset({"global_step", "step_num", "epoch_num", "current_step"})


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

    def add(self, one: Slice, facts: TensorStats) -> None:
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
    sharding: Sharding,
    executor: Executor,
    on_progress: OnProgress,
    seen: set[bytes] | None = None,
    running: Collection[str] = (),
) -> list[Diagnostic]:
    """What reading every byte of these slices shows.

    Parameters
    ----------
    slices
        Each slice with all of its replicas.
    sharding
        How the checkpoint is sharded; of a merged one each file is taken by itself.
    executor, on_progress
        See `compare_tensors`.
    seen
        Gets a `fingerprint` of every stored tensor that is read, if hashes are wanted.
    running
        Parameters that are running statistics: ranks that differ in them are one warning.
    """
    apart: list[Diagnostic] = []
    findings: list[Diagnostic] = []
    tallies: dict[tuple[str, int], _Tally] = {}
    metas: dict[str, TensorMeta] = {}
    options = CompareOptions(wants_counts=True, wants_hashes=seen is not None)
    for one, facts in examine_slices(slices, executor, options, on_progress):
        if seen is not None:
            seen.update(map(fingerprint, one.tensors, facts.hashes))
        source = one.source
        told = apart if source.meta.name in running else findings
        told += differences(one, facts, sharding)
        stage = 0 if isinstance(sharding, Merged) else next(source.slicing.owners())[0]
        key = source.meta.name, stage
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
        findings.append(Diagnostic("unlisted", text, ranks=ranks))
    if zeros:
        text = f"all elements are zero, as they are when training begins: {shorten(zeros)}"
        findings.append(Diagnostic("zero_state", text))
    return findings


def differences(one: Slice, facts: TensorStats, sharding: Sharding) -> Iterator[Diagnostic]:
    """Yield the finding of ranks that do not agree, if they do not."""
    source, name = one.source, one.source.meta.name
    if name in OF_ONE_RANK:
        return
    if source.has_layout or isinstance(sharding, Merged | Replicated):
        finding = find_difference(one, facts)
        if finding is not None:
            yield finding
        return
    finding = find_difference(one, facts, "not in the strategy, and different between ranks")
    if finding is not None and name in STEP_NAMES:
        text = finding.message + "; these ranks are not of one step"
        yield replace(finding, code="mixed_steps", message=text)
    elif finding is not None:
        yield replace(finding, code="unlisted")


def _no_numbers(name: str, tally: _Tally) -> Iterator[Diagnostic]:
    for kind, word, number, first, ranks in (
        ("nan", "NaN", tally.nans, tally.first_nan, tally.nan_ranks),
        ("infinite", "infinite", tally.infinities, tally.first_infinity, tally.infinity_ranks),
    ):
        if number:
            on = tuple(sorted(ranks))
            text = f"{name}: {number} of {count(tally.elements, 'element')} {_are(number)} {word}"
            text += f" ({format_ranks(on)}), first at {first}"
            yield Diagnostic(kind, text, tensor=name, ranks=on, count=number, first=first)


def _zeros(name: str, tally: _Tally) -> Diagnostic:
    ranks = tuple(sorted(tally.zero_ranks))
    text = f"{name}: all {count(tally.elements, 'element')} are zero"
    if tally.zeros < tally.elements:
        text = f"{name}: all elements that {format_ranks(ranks)} hold are zero, and others are not"
    return Diagnostic("zero", text, tensor=name, ranks=ranks, count=tally.zeros)


def _are(number: int) -> str:
    return "is" if number == 1 else "are"


def _first(a: Index | None, b: Index | None) -> Index | None:
    return min((i for i in (a, b) if i is not None), default=None)


def scan_to_verify(
    src: str,
    options: SourceOptions = SourceOptions(),
    *,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Catalog:
    """Return the catalog as `scan` does, with everything that is wrong with the files in it.

    A single file may be damaged, ranks may have no step in common, files may differ from their
    index, and a run may have ended before it completed a file.
    """
    try:
        return scan_all(src, options, on_progress=on_progress)
    except StepError as error:
        mixed = Diagnostic.each("mixed_steps", error.problems)
        return RankCatalog(src, {}, diagnostics=mixed)
    except FormatError as error:
        return MergedCatalog(src, {}, damaged={0: error})


def verify(
    catalog: Catalog,
    strategy: Strategy | None = None,
    options: ResolveOptions = ResolveOptions(),
    *,
    deep: bool = False,
    crc: bool = False,
    ignore: Collection[str] = (),
    executor: Executor | None = None,
    open_progress: OpenProgress = no_progress,
) -> Report:
    """Find what is wrong with a checkpoint.

    Parameters
    ----------
    catalog
        From `scan`, or from `scan_to_verify`.
    strategy
        Its layouts.  Without them each file is verified by itself, unless the checkpoint describes
        itself.
    options
        How the checkpoint is resolved; ``unlisted`` is always ``"first"``.
    deep
        Read the data, and verify the checksums and the hashes of a manifest that are there.
    crc
        Verify checksums, and say where there are none.
    ignore
        Codes of warnings that are notes.
    executor
        Does the reading; by default the caller's own thread.
    open_progress
        Called with the number of bytes to be read; gives a context manager that gives the function
        to call with the number of bytes that were read since the last call.

    Raises
    ------
    PlanError
        The strategy is not for one file, or not for a checkpoint that describes itself, or a file
        was written to meanwhile.
    OSError
        A file cannot be read any more.  One that could not be read before is a finding.
    """
    executor = executor or InlineExecutor()
    found = Diagnostics("verify", ignore=ignore)
    if not catalog.files and not catalog.damaged:
        found.add(*catalog.diagnostics)
        for path in find_manifests(catalog):
            found.add(*check_manifest(catalog, path, executor, deep))
        return Report(catalog.root, findings=found.findings, notes=found.of("note"))
    if strategy is not None and isinstance(catalog, RankCatalog):
        reasons = strategy.resolve(catalog.metas)[1]
        if reasons:
            raise PlanError(Diagnostic.each("strategy", reasons))
    catalog, notes = limit_to_written_ranks(catalog, strategy)
    with require_unmodified_sources(catalog):
        seen = Diagnostics("verify")
        resolved = _resolve(catalog, strategy, options, deep, executor, seen)
        damaged = resolved.catalog.damaged.values()
        raise_all(error for error in seen.failures if error not in damaged)
        found.add(*catalog.errors(), *find_damage(resolved.catalog, seen), *seen)
        verification = _Verification(resolved, executor, found)
        verification.run(deep, crc, open_progress)
    found.add(*notes)
    return Report(
        catalog.root,
        catalog.step,
        tuple(resolved.catalog.files),
        len(resolved.catalog.metas),
        sum(file.nbytes for file in resolved.catalog.files.values()),
        found.findings,
        found.of("note"),
        verification.is_whole,
    )


def _resolve(
    catalog: Catalog,
    strategy: Strategy | None,
    options: ResolveOptions,
    deep: bool,
    executor: Executor,
    diagnostics: Diagnostics,
) -> ResolvedSources:
    """Resolve a checkpoint; without a strategy each rank's tensors are taken by themselves.

    The strategy is corrected only if the data are read.
    """
    contents: Contents = "slices" if deep else "headers"
    options = replace(options, unlisted="first", contents=contents, keep_going=True)
    is_unknown = strategy is None and isinstance(catalog, RankCatalog) and not options.replicated
    given = Merged() if is_unknown else strategy
    return resolve(catalog, given, options, executor, diagnostics)


@contextmanager
def _counted(open_progress: OpenProgress, total: int) -> Iterator[OnProgress]:
    """A progress that ends at its total, whatever was read; none if nothing is to be read."""
    done = 0

    def count(nbytes: int) -> None:
        nonlocal done
        step = min(nbytes, total - done)
        done += step
        on_progress(step)

    with open_progress(total) if total else no_progress(0) as on_progress:
        yield count
        count(total)


@dataclass(slots=True)
class _Verification:
    resolved: ResolvedSources
    executor: Executor
    found: Diagnostics

    @property
    def catalog(self) -> Catalog:
        return self.resolved.catalog

    @property
    def sharding(self) -> Sharding:
        return self.resolved.sharding

    @property
    def is_whole(self) -> bool:
        """Return `Report.is_whole`."""
        is_merged = isinstance(self.catalog, MergedCatalog) and not self.catalog.one_of_several
        return not isinstance(self.sharding, Merged) or is_merged

    def run(self, deep: bool, crc: bool, open_progress: OpenProgress) -> None:
        """Make all checks, one after the other."""
        found, sources = self.found, self.resolved.sources
        # Replicas that differ are found once more when all are read, element by element.
        found.add(*(one for one in self.resolved.doubts if one.code != "replica"))
        with _counted(open_progress, self._bytes_to_read(sources, deep, crc)) as on_progress:
            self._check_integrity(deep, crc, on_progress)
            self._check_names(sources)
            self._check_data(sources, deep, on_progress)
        if any(one.code == "replica" for one in found):
            text = f"replicas differ: {REMEDY} by merge, reshard and diff"
            found.add(Diagnostic("replica_advice", text))

    def _told(self, deep: bool, crc: bool) -> dict[int, FileIndex]:
        """Files of which something in them tells; of the others --crc says that nothing does."""
        return {
            rank: file
            for rank, file in self.catalog.files.items()
            if crc or "crc_num" in file.attrs or (deep and file.cipher is not None)
        }

    def _bytes_to_read(self, sources: Sequence[Source], deep: bool, crc: bool) -> int:
        """About; the headers are not read again, and texts not at all."""
        total = sum(file.nbytes for file in self._told(deep, crc).values()) if deep or crc else 0
        if not deep:
            return total
        total += sum(file.nbytes for file in self.catalog.files.values())
        pairs = other_stages(self.catalog, self.sharding, sources)
        return total + sum(one.meta.nbytes for pair in pairs for one in pair)

    def _check_integrity(self, deep: bool, crc: bool, on_progress: Callable[[int], None]) -> None:
        """Verify the checksums and tags of files."""
        told = self._told(deep, crc)
        ranks = {file.path: rank for rank, file in told.items()}
        only = replace(self.catalog, files=told)
        errors, more = check_files(only, self.executor, deep or crc, on_progress)
        self.found.add(*more)
        for error in errors:
            rank = ranks[error.path]
            text = (
                str(error) if isinstance(self.catalog, MergedCatalog) else f"rank {rank}: {error}"
            )
            self.found.add(Diagnostic("checksum", text, ranks=(rank,)))

    def _check_data(
        self, sources: Sequence[Source], deep: bool, on_progress: Callable[[int], None]
    ) -> None:
        """Check the data, as far as they are read, and what manifests list."""
        manifests = find_manifests(self.catalog)
        seen: set[bytes] = set()
        if deep:
            wanted = seen if manifests else None
            self._check_contents(sources, on_progress, wanted)
        elif not isinstance(self.sharding, Merged):
            numbers = (one for one in self._slices(sources) if _is_unlisted_number(one))
            for one, facts in examine_slices(numbers, self.executor):
                self.found.add(*differences(one, facts, self.sharding))
        for path in manifests:
            self.found.add(
                *check_manifest(self.catalog, path, self.executor, deep, on_progress, seen)
            )

    def _check_contents(
        self,
        sources: Sequence[Source],
        on_progress: Callable[[int], None],
        seen: set[bytes] | None,
    ) -> None:
        """Check all data; add to ``seen`` as `check_contents` does."""
        catalog, sharding, slices = self.catalog, self.sharding, self._slices(sources)
        names = content_decided_names(catalog, sharding)
        running = find_running(catalog, sharding, names, self.executor)
        self.found.add(
            *check_contents(slices, sharding, self.executor, on_progress, seen, running),
            *compare_stages(catalog, sharding, sources, self.executor, on_progress),
        )

    def _slices(self, sources: Sequence[Source]) -> Iterator[Slice]:
        is_apart = isinstance(self.sharding, Merged)
        for source in sources:
            yield from slices_of(source, is_apart=is_apart)
        if is_apart:
            return
        joined = {source.meta.name for source in sources}
        for source in find_sources(self.catalog, Merged(), {}, "first").found:
            if source.meta.name not in joined:  # what there is of it, each rank's by itself
                yield from slices_of(source, is_apart=True)
        for _, other in other_stages(self.catalog, self.sharding, sources):
            yield from slices_of(other)

    def _check_names(self, sources: Sequence[Source]) -> None:
        """Check which ranks hold which names, types and shapes."""
        if isinstance(self.sharding, Merged):
            if not isinstance(self.catalog, MergedCatalog):
                text = "no strategy (-s) and no --replicated: whether the ranks' slices fit "
                text += "together, and replicas agree, is not known"
                self.found.add(Diagnostic("doubt", text))
            for name in self.catalog.metas:
                self.found.add(*check_types(self.catalog, self.catalog.metas_of(name)))
            self.found.add(*find_beginnings(self.catalog))
            return
        owners = find_owners(self.sharding.layouts, self.catalog.metas)
        for source in sources:
            held = self.catalog.metas_of(source.meta.name)
            if not source.has_layout:
                self.found.add(*check_unlisted(self.catalog, self.sharding, held, owners))
        self.found.add(*find_lacking(self.catalog, sources))
        self.found.add(*find_partial(self.catalog, self.sharding, self.resolved.is_deduplicated))


def _is_unlisted_number(one: Slice) -> bool:
    """Whether a slice is a single number of each rank's, such as a step, that should agree."""
    source = one.source
    return (
        len(one.ranks) > 1 and not source.has_layout and source.meta.nbytes == source.meta.itemsize
    )
