"""Verify a checkpoint: from headers, and with ``deep`` from every byte."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace

from ckpttool.concurrency import InlineExecutor
from ckpttool.discovery.scan import SourceOptions, scan_all
from ckpttool.errors import FormatError, PlanError, StepError, raise_all
from ckpttool.model.catalog import Catalog, MergedCatalog, RankCatalog, SelfDescribedCatalog
from ckpttool.model.diagnostics import Diagnostics, Finding, Note, Report
from ckpttool.model.optimizer_names import parameter_of
from ckpttool.model.slicing import Source
from ckpttool.model.strategy import Strategy
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
    name_commands,
    resolve,
    resolve_merged,
    source_strategy,
)
from ckpttool.planning.sources import content_decided_names, undivided_sources
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
    find_gaps,
    find_partial,
    is_told,
)
from ckpttool.verification.manifest_check import check_manifest, find_manifests, fingerprint

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
        See `compare_tensors`.
    seen
        Gets a `fingerprint` of every stored tensor that is read, if hashes are wanted.
    running
        Parameters that are running statistics: ranks that differ in them are one warning.
    """
    apart: list[Finding] = []
    findings: list[Finding] = []
    tallies: dict[tuple[str, int], _Tally] = {}
    metas: dict[str, TensorMeta] = {}
    options = CompareOptions(wants_counts=True, wants_hashes=seen is not None)
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
    one: Slice, facts: TensorStats, catalog: Catalog, strategy: Strategy | None
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


OpenProgress = Callable[[int], AbstractContextManager[Callable[[int], None]]]


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
        return RankCatalog(src, {}, problems=error.problems)
    except FormatError as error:
        return MergedCatalog(src, {}, damaged={0: error})


def verify(
    catalog: Catalog,
    strategy: Strategy | None = None,
    options: ResolveOptions = ResolveOptions(),
    *,
    deep: bool = False,
    crc: bool = False,
    executor: Executor | None = None,
    open_progress: OpenProgress = lambda total: nullcontext(lambda nbytes: None),
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
    if not catalog.files and not catalog.damaged:
        findings = [*catalog.findings]
        findings += (Finding("step", problem) for problem in catalog.problems)
        for path in find_manifests(catalog):
            findings += check_manifest(catalog, path, executor, deep)
        return Report(catalog.root, findings=tuple(findings), notes=catalog.notes)
    if strategy is not None and isinstance(catalog, RankCatalog):
        reasons = strategy.resolve(catalog.metas)[1]
        if reasons:
            raise PlanError(reasons)
    catalog, notes = limit_to_written_ranks(catalog, strategy)
    with require_unmodified_sources(catalog):
        diagnostics = Diagnostics()
        resolved = _resolve(catalog, strategy, options, deep, executor, diagnostics)
        report = _Verification(resolved, executor).run(deep, crc, diagnostics, open_progress)
    return replace(report, notes=(*report.notes, *notes))


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
    is_described = isinstance(catalog, SelfDescribedCatalog)
    if strategy is not None or options.replicated or is_described:
        if not isinstance(catalog, MergedCatalog):
            return resolve(catalog, strategy, options, executor, diagnostics)
        source_strategy(catalog, strategy, options.replicated)  # which refuses what does not fit
        catalog = replace(catalog, one_of_several="") if options.replicated else catalog
    return resolve_merged(catalog, options, diagnostics)


@contextmanager
def _counted(open_progress: OpenProgress, total: int) -> Iterator[Callable[[int], None]]:
    """A progress that ends at its total, whatever was read; none if nothing is to be read."""
    done = 0

    def count(nbytes: int) -> None:
        nonlocal done
        step = min(nbytes, total - done)
        done += step
        on_progress(step)

    with open_progress(total) if total else nullcontext(lambda nbytes: None) as on_progress:
        yield count
        count(total)


@dataclass(slots=True)
class _Verification:
    resolved: ResolvedSources
    executor: Executor

    @property
    def catalog(self) -> Catalog:
        return self.resolved.catalog

    @property
    def strategy(self) -> Strategy | None:
        return self.resolved.strategy

    def run(
        self, deep: bool, crc: bool, diagnostics: Diagnostics, open_progress: OpenProgress
    ) -> Report:
        """Make all checks, one after the other."""
        catalog = self.catalog
        damaged = catalog.damaged.values()
        raise_all(error for error in diagnostics.errors if error not in damaged)
        sources = self.resolved.sources
        doubts = name_commands(self.resolved.doubts)
        notes = [*diagnostics.notes, *(one for one in doubts.notes if one.kind != "doubt")]
        findings = [Finding("unfinished", problem) for problem in catalog.problems]
        findings += catalog.findings
        findings += [*find_damage(catalog, notes), *find_gaps(catalog, notes)]
        findings += diagnostics.findings
        # Replicas that differ are found once more when all are read, element by element.
        findings += (one for one in doubts.findings if one.kind != "replica")
        findings += (  # there is no result that a doubt would do no harm to
            Finding("strategy", note.text, "warning")
            for note in doubts.notes
            if note.kind == "doubt"
        )
        notes = [note for note in notes if not is_told(note)]
        with _counted(open_progress, self._bytes_to_read(sources, deep, crc)) as on_progress:
            findings += self._integrity(deep, crc, notes, on_progress)
            findings += self._names(sources, notes)
            findings += self._data(sources, deep, notes, on_progress)
        if any(finding.kind == "replica" for finding in findings):
            notes.append(Note("replica", f"replicas differ: {REMEDY} by merge, reshard and diff"))
        return Report(
            catalog.root,
            catalog.step,
            tuple(catalog.files),
            len(catalog.metas),
            sum(file.nbytes for file in catalog.files.values()),
            tuple(sorted(findings, key=lambda finding: finding.severity)),
            tuple(notes),
            self.strategy is not None
            or (isinstance(catalog, MergedCatalog) and not catalog.one_of_several),
        )

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
        if self.strategy is None:
            return total
        pairs = other_stages(self.catalog, self.strategy, sources)
        return total + sum(one.meta.nbytes for pair in pairs for one in pair)

    def _integrity(
        self, deep: bool, crc: bool, notes: list[Note], on_progress: Callable[[int], None]
    ) -> Iterator[Finding]:
        """Checksums and tags that are wrong; what else there is to say goes to ``notes``."""
        told = self._told(deep, crc)
        ranks = {file.path: rank for rank, file in told.items()}
        only = replace(self.catalog, files=told)
        errors, more = check_files(only, self.executor, deep or crc, on_progress)
        notes += more
        for error in errors:
            rank = ranks[error.path]
            text = (
                str(error) if isinstance(self.catalog, MergedCatalog) else f"rank {rank}: {error}"
            )
            yield Finding("checksum", text, ranks=(rank,))

    def _data(
        self,
        sources: Sequence[Source],
        deep: bool,
        notes: list[Note],
        on_progress: Callable[[int], None],
    ) -> Iterator[Finding]:
        """What is wrong with the data, as far as they are read, and with what manifests list."""
        manifests = find_manifests(self.catalog)
        seen: set[bytes] = set()
        if deep:
            wanted = seen if manifests else None
            yield from self._contents(sources, notes, on_progress, wanted)
        elif self.strategy is not None:
            numbers = (one for one in self._slices(sources) if _is_unlisted_number(one))
            for one, facts in examine_slices(numbers, self.executor):
                yield from differences(one, facts, self.catalog, self.strategy)
        for path in manifests:
            yield from check_manifest(self.catalog, path, self.executor, deep, on_progress, seen)

    def _contents(
        self,
        sources: Sequence[Source],
        notes: list[Note],
        on_progress: Callable[[int], None],
        seen: set[bytes] | None,
    ) -> Iterator[Finding]:
        """What is wrong with the data; what else there is to say of them goes to ``notes``."""
        slices = self._slices(sources)
        running: frozenset[str] = frozenset()
        if self.strategy is not None:
            names = content_decided_names(self.catalog, self.strategy)
            running = find_running(self.catalog, self.strategy, names, self.executor)
        found, more = check_contents(
            slices, self.catalog, self.strategy, self.executor, on_progress, seen, running
        )
        notes += more
        yield from found
        if self.strategy is not None:
            yield from compare_stages(
                self.catalog, self.strategy, sources, self.executor, on_progress
            )

    def _slices(self, sources: Sequence[Source]) -> Iterator[Slice]:
        is_joined = self.strategy is not None
        for source in sources:
            yield from slices_of(source, is_apart=not is_joined)
        if self.strategy is None:
            return
        joined = {source.meta.name for source in sources}
        for source in undivided_sources(self.catalog, "first").found:
            if source.meta.name not in joined:  # what there is of it, each rank's by itself
                yield from slices_of(source, is_apart=True)
        for _, other in other_stages(self.catalog, self.strategy, sources):
            yield from slices_of(other)

    def _names(self, sources: Sequence[Source], notes: list[Note]) -> Iterator[Finding]:
        """What is wrong with who holds which names, types and shapes."""
        if self.strategy is None:
            if not isinstance(self.catalog, MergedCatalog):
                text = "no strategy (-s) and no --replicated: whether the ranks' slices fit "
                notes.append(Note("doubt", text + "together, and replicas agree, is not known"))
            for name in self.catalog.metas:
                yield from check_types(self.catalog, self.catalog.metas_of(name))
            yield from find_beginnings(self.catalog)
            return
        owners = find_owners(self.strategy.layouts, self.catalog.metas)
        for source in sources:
            held = self.catalog.metas_of(source.meta.name)
            if not source.has_layout:
                yield from check_unlisted(self.catalog, self.strategy, held, owners)
        yield from find_lacking(self.catalog, sources, notes)
        yield from find_partial(self.catalog, self.strategy, self.resolved.is_deduplicated)


def _is_unlisted_number(one: Slice) -> bool:
    """Whether a slice is a single number of each rank's, such as a step, that should agree."""
    source = one.source
    return (
        len(one.ranks) > 1 and not source.has_layout and source.meta.nbytes == source.meta.itemsize
    )
