"""Verify a checkpoint: its headers, and with ``deep`` every byte."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from ckpttool.checkpoint.evidence import Asking, T, answer
from ckpttool.concurrency import InlineExecutor, OnProgress, OpenProgress, no_progress
from ckpttool.discovery.rank_folders import find_manifests
from ckpttool.model.catalog import Catalog
from ckpttool.model.names import drop_unlike_shapes, match_states, parse_name
from ckpttool.model.slicing import Source
from ckpttool.model.strategy import Merged, Replicated, Sharding, Strategy
from ckpttool.model.tensors import FileIndex, TensorMeta
from ckpttool.operations.headers import (
    check_partly_held,
    check_types,
    check_unlisted,
    find_damage,
    find_truncated_files,
)
from ckpttool.planning.fit import fit_to_slices
from ckpttool.planning.manifest_check import check_set, fingerprint
from ckpttool.planning.missing import (
    find_incomplete_files,
    find_nothing,
    limit_to_written_ranks,
)
from ckpttool.planning.replicas import (
    REPLICA_CODES,
    Slice,
    compare_replicas,
    compare_stages,
    find_difference,
    slices_of,
    stage_pairs,
)
from ckpttool.planning.resolve import (
    ResolvedSources,
    ResolveOptions,
    find_differing_ends,
    find_running_statistics,
    resolve,
)
from ckpttool.planning.sources import content_decided_names, find_sources
from ckpttool.planning.unlisted import RANK_SPECIFIC_NAMES, running_statistics_problem
from ckpttool.problems import (
    Diagnostic,
    Diagnostics,
    PlanError,
    SeverityOf,
    raise_all,
    severities,
)
from ckpttool.storage.checksums import check_files
from ckpttool.storage.compare import CompareOptions, Index, TensorStats
from ckpttool.transaction.sources import require_unmodified_sources
from ckpttool.wording import count, format_difference, format_ranks, shorten

# Counters of steps or epochs; they are equal on all ranks of one step.
STEP_NAMES = frozenset({"global_step", "step_num", "epoch_num", "current_step"})


@dataclass(frozen=True, slots=True)
class Verification:
    """What `ckpttool.verify` found.

    Attributes
    ----------
    path, step
        ``root`` and ``step`` of the `Catalog`.
    severity_of
        The severity of each code, edited by ``ignore``.
    files
        Number of files that were read.
    ranks
        Ranks whose file was read; None for a merged checkpoint, whose files have none.
    tensors
        Number of parameters.
    nbytes
        Bytes of all files.
    findings
        Errors, then warnings; empty if nothing is wrong.
    notes
        Further facts for people.
    is_whole
        Whether it is known how the slices of the ranks fit together, or there is only one rank.
    is_sampled
        Whether samples of the contents were compared with the layouts.
    deep
        Whether all data was read.
    compared
        What was compared beside headers and samples: ``"checksums"``, ``"hashes"``.
    """

    path: str
    severity_of: SeverityOf
    step: str | None = None
    files: int = 0
    ranks: tuple[int, ...] | None = None
    tensors: int = 0
    nbytes: int = 0
    findings: tuple[Diagnostic, ...] = ()
    notes: tuple[Diagnostic, ...] = ()
    is_whole: bool = True
    is_sampled: bool = False
    deep: bool = False
    compared: tuple[str, ...] = ()

    def count_severities(self) -> Counter[str]:
        """Return how many findings there are of each severity."""
        return Counter(str(self.severity_of[one.code]) for one in self.findings)


@dataclass(slots=True)
class _Tally:
    """Counts of special values in one tensor, over its slices."""

    elements: int = 0
    nans: int = 0
    infinities: int = 0
    first_nan: Index | None = None
    first_infinity: Index | None = None
    nan_ranks: list[int] = field(default_factory=list)
    infinity_ranks: list[int] = field(default_factory=list)
    zero_ranks: list[int] = field(default_factory=list)
    zeros: int = 0

    def add(self, one: Slice, stats: TensorStats) -> None:
        """Add the counts of a slice, and the ranks that hold what was counted."""
        others = zip(one.ranks[1:], stats.differences, strict=True)
        ranks = (one.ranks[0], *(rank for rank, other in others if not other.differs))
        self.elements += stats.elements
        self.nans += stats.nans
        self.infinities += stats.infinities
        if stats.nans:
            first = one.index_in_full(stats.first_nan)
            self.first_nan = _lower_index(self.first_nan, first)
            self.nan_ranks += ranks
        if stats.infinities:
            first = one.index_in_full(stats.first_infinity)
            self.first_infinity = _lower_index(self.first_infinity, first)
            self.infinity_ranks += ranks
        if stats.elements and stats.is_zero:
            self.zeros += stats.elements
            self.zero_ranks += ranks


def check_contents(
    slices: Iterable[Slice],
    sharding: Sharding,
    executor: Executor,
    on_progress: OnProgress,
    fingerprints: set[bytes] | None = None,
    running: Collection[str] = (),
) -> list[Diagnostic]:
    """Read every byte of some slices and return the findings.

    Parameters
    ----------
    slices
        Each slice with all of its replicas.
    sharding
        The sharding of the checkpoint.
    executor, on_progress
        See `compare_tensors`.
    fingerprints
        Collects the `fingerprint` of every stored tensor that is read; None if hashes are not
        needed.
    running
        Running statistics.  All differences in them are one warning.
    """
    in_statistics: list[Diagnostic] = []
    findings: list[Diagnostic] = []
    tallies: dict[tuple[str, int], _Tally] = {}
    metas: dict[str, TensorMeta] = {}
    options = CompareOptions(wants_counts=True, wants_hashes=fingerprints is not None)
    for one, stats in compare_replicas(slices, executor, options, on_progress):
        if fingerprints is not None:
            fingerprints.update(map(fingerprint, one.tensors, stats.hashes))
        source = one.source
        different = list(find_differences(one, stats, sharding))
        if source.meta.name in running:
            in_statistics += different
        else:
            findings += different
        stage = 0 if isinstance(sharding, Merged) else next(source.slicing.owners())[0]
        key = source.meta.name, stage
        tallies.setdefault(key, _Tally()).add(one, stats)
        metas[source.meta.name] = source.meta
    states = drop_unlike_shapes(match_states((), metas), metas)
    zeros: list[str] = []
    for (name, _), tally in tallies.items():
        findings += _find_nonfinite(name, tally)
        is_state = name in states or parse_name(name).same_shape_parameter is not None
        if tally.zeros and len(metas[name].shape) > 1 and not is_state:
            findings.append(_zero_weight(name, tally))
        elif tally.zeros == tally.elements > 0:
            zeros.append(name)
    if in_statistics:
        names = [finding.tensor for finding in in_statistics if finding.tensor is not None]
        ranks = tuple(sorted({rank for finding in in_statistics for rank in finding.ranks}))
        findings.append(running_statistics_problem(names, ranks))
    if zeros:
        text = f"all elements are zero, as when training begins: {shorten(zeros, 3)}"
        findings.append(Diagnostic("zero_state", text))
    return findings


_DIFFERENT_UNLISTED = "not in the strategy, and different between ranks"


def find_differences(one: Slice, stats: TensorStats, sharding: Sharding) -> Iterator[Diagnostic]:
    """Yield a finding if the replicas of a slice differ and should not."""
    source, name = one.source, one.source.meta.name
    if name in RANK_SPECIFIC_NAMES:
        return
    if source.has_layout or isinstance(sharding, Merged | Replicated):
        finding = find_difference(one, stats)
        if finding is not None:
            yield finding
        return
    code, claim = "unlisted", _DIFFERENT_UNLISTED
    if name in STEP_NAMES:
        code, claim = "mixed_steps", "ranks are not of one step: different"
    finding = find_difference(one, stats, code, claim)
    if finding is not None:
        yield finding


def _find_nonfinite(name: str, tally: _Tally) -> Iterator[Diagnostic]:
    """Yield the findings of NaN and infinite values in a tensor."""
    for kind, word, number, first, ranks in (
        ("nan", "NaN", tally.nans, tally.first_nan, tally.nan_ranks),
        ("infinite", "infinite", tally.infinities, tally.first_infinity, tally.infinity_ranks),
    ):
        if number:
            with_some = tuple(sorted(ranks))
            facts = f"{number} of {count(tally.elements, 'element')}; {format_ranks(with_some)}; "
            facts += f"first at {first}"
            text = f"elements are {word}"
            found = Diagnostic(kind, text, facts=facts, tensor=name, ranks=with_some)
            yield replace(found, count=number, first=first)


def _zero_weight(name: str, tally: _Tally) -> Diagnostic:
    """Return the finding of a weight with slices that are all zero."""
    ranks = tuple(sorted(tally.zero_ranks))
    text, facts = "all elements are zero", ""
    if tally.zeros < tally.elements:
        text, facts = "all elements of some ranks are zero", format_ranks(ranks)
    return Diagnostic("zero", text, facts=facts, tensor=name, ranks=ranks, count=tally.zeros)


def _lower_index(a: Index | None, b: Index | None) -> Index | None:
    return min((i for i in (a, b) if i is not None), default=None)


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
) -> Verification:
    """Find what is wrong with a checkpoint.

    Parameters
    ----------
    catalog
        The checkpoint, from `scan`; with ``command="verify"`` its files may be damaged.
    strategy
        The layouts.  Without them each file is verified separately, unless the checkpoint describes
        itself.
    options
        How the checkpoint is resolved; ``unlisted`` is always ``"first"``.  ``check_replicas`` and
        ``strict`` have no effect: ``deep`` compares all replicas, and warnings are findings.
        There must be a manifest for ``manifest="all"``.
    deep
        Read the data, and verify checksums and manifest hashes where these exist.
    crc
        Verify checksums, and report files without one.
    ignore
        Codes of warnings that are treated as notes.
    executor
        Reads the data; by default the caller's own thread.
    open_progress
        Called with the number of bytes to read.  It returns a context manager, which returns a
        function to call with the bytes read since the last call.

    Raises
    ------
    PlanError
        The checkpoint takes no strategy, or a file changed during the run.
    OSError
        A file that `scan` could read cannot be read any more.
    """
    executor = executor or InlineExecutor()
    found = Diagnostics("verify", ignore=ignore)
    more = {"checksums": crc, "hashes": options.manifest == "all"}
    depth = deep, tuple(what for what, is_compared in more.items() if is_compared)
    if not catalog.files and not catalog.damaged:
        found.add(*catalog.diagnostics)
        for path in find_manifests(catalog):
            found.add(*check_set(catalog, path, executor, deep or options.manifest == "all"))
        return _report(catalog, found, *depth)
    if strategy is not None and catalog.needs_strategy:
        strategy, reasons = fit_to_slices(catalog, strategy)
        if reasons:
            raise PlanError(reasons)
    catalog, notes = limit_to_written_ranks(catalog, strategy)
    with require_unmodified_sources(catalog):
        of_headers = Diagnostics("verify")
        has_none = strategy is None and catalog.needs_strategy and not options.replicated
        resolved = resolve(
            catalog,
            Merged() if has_none else strategy,  # without a strategy each file by itself
            replace(options, unlisted="first", check_replicas=False),  # ``deep`` compares all
            executor,
            of_headers,
            contents="slices" if deep else "samples",
            keep_going=True,
            open_progress=open_progress,
        )
        damaged = resolved.catalog.damaged.values()
        raise_all(error for error in of_headers.failures if error not in damaged)
        of_files = find_damage(resolved.catalog, of_headers)
        found.add(*catalog.errors(), *of_files, *of_headers)
        verification = _Verification(resolved, executor, found)
        verification.run(deep, crc, options.manifest == "all", open_progress)
    found.add(*notes)
    is_sampled = any(source.has_layout for source in resolved.sources)
    return _report(resolved.catalog, found, *depth, verification.is_whole, is_sampled)


def _report(
    catalog: Catalog,
    found: Diagnostics,
    deep: bool,
    compared: tuple[str, ...],
    is_whole: bool = True,
    is_sampled: bool = False,
) -> Verification:
    """Sum up what was found."""
    found.add(*find_nothing(catalog))
    return Verification(
        catalog.root,
        found.severity_of,
        catalog.step,
        len(catalog.files),
        None if catalog.is_merged else tuple(catalog.files),
        len(catalog.metas),
        sum(file.nbytes for file in catalog.files.values()),
        found.findings,
        found.of("note"),
        is_whole,
        is_sampled,
        deep,
        compared,
    )


@contextmanager
def _counted(open_progress: OpenProgress, total: int) -> Iterator[OnProgress]:
    """Open a progress that ends at ``total`` even if fewer or more bytes are read."""
    done = 0

    def advance(nbytes: int) -> None:
        nonlocal done
        step = min(nbytes, total - done)
        done += step
        on_progress(step)

    with open_progress(total) if total else no_progress(0) as on_progress:
        yield advance
        advance(total)


@dataclass(slots=True)
class _Verification:
    """The checks of one run, which add to ``found``."""

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
        """The value of `Verification.is_whole`."""
        is_merged = self.catalog.is_merged and not self.catalog.one_of_several
        return not isinstance(self.sharding, Merged) or is_merged

    def run(self, deep: bool, crc: bool, check_manifest: bool, open_progress: OpenProgress) -> None:
        """Run all checks."""
        found, sources = self.found, self.resolved.sources
        # Reading every byte finds differing replicas again, with more detail.  Without it samples
        # find what a conversion refuses, and what it reads otherwise than the strategy says.
        of_convert = severities("convert")
        others = {code for code in of_convert if of_convert[code] != "error"} - {"inferred"}
        others = {*REPLICA_CODES} if deep else others
        found.add(*(one for one in self.resolved.content_diagnostics if one.code not in others))
        nbytes = self._bytes_to_read(sources, deep, crc, check_manifest)
        with _counted(open_progress, nbytes) as on_progress:
            self._check_integrity(deep, crc, on_progress)
            self._check_names(sources)
            self._check_data(sources, deep, check_manifest, on_progress)

    def _files_to_check(self, deep: bool, crc: bool) -> dict[int, FileIndex]:
        """Return the files with checksums or tags; all files with ``crc``."""
        return {
            rank: file
            for rank, file in self.catalog.files.items()
            if crc or "crc_num" in file.attrs or (deep and file.cipher is not None)
        }

    def _bytes_to_read(
        self, sources: Sequence[Source], deep: bool, crc: bool, check_manifest: bool
    ) -> int:
        """Estimate the bytes to read, as if headers and texts were read again."""
        files = self._files_to_check(deep, crc).values() if deep or crc else ()
        total = sum(file.nbytes for file in files)
        if not deep and not check_manifest:
            return total
        total += sum(file.nbytes for file in self.catalog.files.values())
        if not deep:
            return total
        pairs = stage_pairs(self.catalog, self.sharding, sources)
        return total + sum(one.meta.nbytes for pair in pairs for one in pair)

    def _check_integrity(self, deep: bool, crc: bool, on_progress: Callable[[int], None]) -> None:
        """Verify the checksums and authentication tags of files."""
        files = self._files_to_check(deep, crc)
        ranks = {file.path: rank for rank, file in files.items()}
        checked = replace(self.catalog, files=files)
        errors, notes = check_files(checked, self.executor, deep or crc, on_progress)
        self.found.add(*notes)
        for error in errors:
            (one,) = error.diagnostics
            self.found.add(replace(one, code="checksum", ranks=(ranks[error.path],)))

    def _check_data(
        self,
        sources: Sequence[Source],
        deep: bool,
        check_manifest: bool,
        on_progress: Callable[[int], None],
    ) -> None:
        """Check the data with ``deep``, else only what is unlisted, and check the manifests."""
        manifests = find_manifests(self.catalog)
        fingerprints: set[bytes] = set()
        if deep:
            self._check_contents(sources, on_progress, fingerprints if manifests else None)
        elif not isinstance(self.sharding, Merged):
            numbers = (one for one in self._slices(sources) if _is_unlisted_number(one))
            for one, stats in compare_replicas(numbers, self.executor):
                self.found.add(*find_differences(one, stats, self.sharding))
            self._sample_unlisted()
        reads_all = deep or check_manifest
        for path in manifests:
            self.found.add(
                *check_set(self.catalog, path, self.executor, reads_all, on_progress, fingerprints)
            )
        if check_manifest and not manifests:
            text, hint = (
                "no manifest lists these files",
                "the same command without --check-manifest",
            )
            self.found.add(Diagnostic("manifest", text, hint=hint, where=self.catalog.root))

    def _sample_unlisted(self) -> None:
        """Add the tensors without a layout that differ between two ranks, as a conversion does."""
        if isinstance(self.sharding, Replicated):
            return
        catalog = self.catalog
        names = [
            name
            for name, parameter in content_decided_names(catalog, self.sharding).items()
            if parameter is None and name not in RANK_SPECIFIC_NAMES
            if catalog.metas[name].nbytes > catalog.metas[name].itemsize
        ]
        differing = self._answer(find_differing_ends(catalog, names))
        running = self._answer(find_running_statistics(catalog, self.sharding, differing))
        if running:
            of_statistics = sorted({rank for name in running for rank in differing[name]})
            self.found.add(running_statistics_problem(sorted(running), of_statistics))
        one = Diagnostic("unlisted", _DIFFERENT_UNLISTED, hint="`ckpttool help unlisted`")
        for name, ranks in differing.items():
            if name not in running:
                facts = format_difference([[rank] for rank in ranks])
                self.found.add(replace(one, facts=facts, tensor=name, ranks=ranks))

    def _check_contents(
        self,
        sources: Sequence[Source],
        on_progress: Callable[[int], None],
        fingerprints: set[bytes] | None,
    ) -> None:
        """Check all data; see `check_contents`."""
        catalog, sharding, slices = self.catalog, self.sharding, self._slices(sources)
        names = content_decided_names(catalog, sharding)
        running = self._answer(find_running_statistics(catalog, sharding, names))
        found = check_contents(slices, sharding, self.executor, on_progress, fingerprints, running)
        found += compare_stages(catalog, sharding, sources, self.executor, on_progress)
        self.found.add(*found)

    def _answer(self, steps: Asking[T]) -> T:
        return answer(steps, self.executor, self.resolved.evidence)

    def _slices(self, sources: Sequence[Source]) -> Iterator[Slice]:
        """Yield all slices on disk, those of stages after the first last."""
        is_merged = isinstance(self.sharding, Merged)
        for source in sources:
            yield from slices_of(source, is_of_one_rank=is_merged)
        if is_merged:
            return
        resolved = {source.meta.name for source in sources}
        for source in find_sources(self.catalog, Merged(), {}, "first").found:
            if source.meta.name not in resolved:
                yield from slices_of(source, is_of_one_rank=True)
        for _, other in stage_pairs(self.catalog, self.sharding, sources):
            yield from slices_of(other)

    def _check_names(self, sources: Sequence[Source]) -> None:
        """Check the names, types and shapes that ranks hold."""
        if isinstance(self.sharding, Merged):
            if not self.catalog.is_merged:
                text = "without a strategy every rank is verified by itself"
                facts = "not known: whether slices fit together and replicas are equal"
                hint = "-s STRATEGY, or --replicated if every rank holds the whole model"
                self.found.add(Diagnostic("doubt", text, hint=hint, facts=facts))
            for name in self.catalog.metas:
                self.found.add(*check_types(self.catalog, self.catalog.metas_of(name)))
            self.found.add(*find_truncated_files(self.catalog))
            return
        owners = self.catalog.match_states(self.sharding.layouts)
        for source in sources:
            held = self.catalog.metas_of(source.meta.name)
            if not source.has_layout:
                self.found.add(*check_unlisted(self.catalog, self.sharding, held, owners))
        self.found.add(*find_incomplete_files(self.catalog, sources))
        self.found.add(
            *check_partly_held(self.catalog, self.sharding, self.resolved.is_deduplicated)
        )


def _is_unlisted_number(one: Slice) -> bool:
    """Return whether a slice is an unlisted number, such as a step, that several ranks hold."""
    source = one.source
    return (
        len(one.ranks) > 1 and not source.has_layout and source.meta.nbytes == source.meta.itemsize
    )
