"""Verify a checkpoint: its headers, and with ``deep`` every byte."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from functools import partial
from itertools import chain

from msgspec.structs import replace

from ckpttool.checkpoint.checkpoint import (
    RANK_SPECIFIC_NAMES,
    Checkpoint,
    Contents,
    Reading,
    ResolveOptions,
)
from ckpttool.checkpoint.contents import find_differing_ends, find_running_statistics
from ckpttool.checkpoint.evidence import Evidence, answer
from ckpttool.checkpoint.interpret import decided_by_contents, full_tensor
from ckpttool.checkpoint.presence import ranks_without_file
from ckpttool.checkpoint.samples import stage_pairs
from ckpttool.checks.bad_values import DIFFERENT_UNLISTED, check_contents, find_differences
from ckpttool.checks.manifest_hashes import check_set
from ckpttool.checks.missing import check_casts, check_choice, find_nothing
from ckpttool.checks.replicas import (
    Slice,
    compare_replicas,
    compare_stages,
    slices_beside,
    slices_of,
)
from ckpttool.checks.unlisted import running_statistics_problem
from ckpttool.concurrency import InlineExecutor, OnProgress, OpenProgress, no_progress
from ckpttool.discovery.rank_folders import find_manifests
from ckpttool.model.catalog import Catalog
from ckpttool.model.joining import join_alike
from ckpttool.model.manifest import LeftOut
from ckpttool.model.slicing import FullTensor, Unlisted
from ckpttool.model.tensors import FileIndex
from ckpttool.operations.answer import Count, Digest, Document, Reported
from ckpttool.operations.audit import Audit, audit_checkpoint, read_values
from ckpttool.operations.look import Subject, look, with_config
from ckpttool.operations.tensor_diff import TensorDifference
from ckpttool.problems import (
    Diagnostic,
    Diagnostics,
    PlanError,
    Severity,
    raise_all,
)
from ckpttool.storage.checksums import check_files
from ckpttool.storage.compare import TensorDelta
from ckpttool.transaction.sources import require_unmodified_sources
from ckpttool.wording import count, format_bytes, format_difference


class Verification(Document, frozen=True, kw_only=True):
    """The JSON document of verify.

    Attributes
    ----------
    path
        The checkpoint.
    step
        Step, as in the file names: epoch_step; null if no name has one.
    files
        Number of files that were read.
    ranks
        Ranks whose file was read; empty for a merged checkpoint.
    tensors
        Number of parameters.
    nbytes
        Size of all files.
    deep
        Whether all data was read (--deep), or headers alone.
    left_out
        Tensors that --include, --exclude or --weights-only leave out, if any.
    clean
        Whether nothing is wrong; the exit code is then 0, else 1.
    errors
        Number of errors found.
    warnings
        Number of warnings found.
    findings
        What is wrong, errors first; at most --limit.
    notes
        Facts that do not stop the command: notes and warnings.
    like
        With --like: the reference.
    differences
        With --like: the tensors that differ between the checkpoint (A) and the reference (B), as
        in diff; values with --deep.  At most --limit.
    card
        With --card: the card that was written.
    digest
        The digest of all lines of the card.
    is_merged
        Whether the files are those of a merged checkpoint.
    compared
        What is right where nothing is wrong, and what nothing proves.
    audited
        What is right by --config and --like where there are no errors.
    unread
        Number of files that cannot be read.
    """

    aside = frozenset({"is_merged", "compared", "audited", "unread"})

    path: str
    step: str | None
    files: Count
    ranks: tuple[Count, ...]
    tensors: Count
    nbytes: Count
    deep: bool
    left_out: LeftOut | None = None
    clean: bool
    errors: Count
    warnings: Count
    findings: Reported
    notes: Reported
    like: str | None = None
    differences: tuple[TensorDifference, ...] | None = None
    card: str | None = None
    digest: Digest | None = None
    is_merged: bool
    compared: str
    audited: tuple[str, ...] = ()
    unread: Count = 0

    def _texts(self) -> Iterator[str]:
        yield f"{self.path}: {self.verdict}"
        yield count(self.tensors, "tensor")
        yield format_bytes(self.nbytes)

    def _rows(self) -> Iterator[Sequence[str]]:
        yield ("severity", "finding")
        for finding in self.messages:
            yield (str(self.findings.severity_of[finding.code]), str(finding))

    @property
    def verdict(self) -> str:
        """The number of messages, errors first, and what is right all the same."""
        if self.clean:
            return self.compared
        numbers = Counter(self.findings.severity_of[it.code] for it in self.messages)
        kinds: tuple[Severity, ...] = ("error", "warning")
        found = ", ".join(count(numbers[it], it) for it in kinds if numbers[it])
        return "; ".join((found, *(() if self.errors else self.audited)))

    @property
    def messages(self) -> Sequence[Diagnostic]:
        """The findings as they are listed: the same problem of several files is one."""
        return join_alike(self.findings)

    @property
    def depth(self) -> str:
        """How much was read, for people."""
        files = f" but that of {count(self.unread, 'file')}" if self.unread else ""
        return f"all data read{files}" if self.deep else "--deep reads all data"


def verify(
    source: Subject,
    *,
    deep: bool = False,
    crc: bool = False,
    ignore: Collection[str] = (),
    audit: Audit = Audit(),
    executor: Executor | None = None,
    open_progress: OpenProgress = no_progress,
) -> Verification:
    """Find what is wrong with a checkpoint.

    Parameters
    ----------
    source
        The checkpoint, from `scan`; with ``command="verify"`` its files may be damaged.  Without a
        strategy each file is verified separately, unless the checkpoint describes itself.  The
        option ``unlisted`` is always ``"first"``.  ``check_replicas`` and ``strict`` are ignored:
        ``deep`` compares all replicas, and warnings are findings.  ``manifest="all"`` needs a
        manifest.
    deep
        Read the data, and verify checksums and manifest hashes where these exist.
    crc
        Verify checksums, and report files without one.
    ignore
        Codes of warnings that are treated as notes.
    audit
        What the checkpoint is compared with, from `load_audited`.
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
    catalog, options = source.catalog, source.options
    executor = executor or InlineExecutor()
    diagnostics = Diagnostics("verify", ignore=ignore)
    reads_all = deep or options.manifest == "all"
    if not catalog.files and not catalog.damaged:
        diagnostics.add(*catalog.diagnostics)
        for path in find_manifests(catalog):
            diagnostics.add(*check_set(catalog, path, executor, reads_all))
        diagnostics.add(*find_nothing(catalog))
        return _report(catalog, diagnostics, deep, _compared(deep, crc, options))
    options = replace(options, unlisted="first", check_replicas=False)
    paths = (catalog.root, *((audit.like.path,) if audit.like else ()))
    options = with_config(options, *paths, config=audit.config.values if audit.config else {})
    others = [] if audit.like is None or audit.like.catalog is None else [audit.like.catalog]
    with require_unmodified_sources(catalog.with_remains(), *others):
        reference = read_values(audit, executor) if deep else {}
        deltas: dict[str, TensorDelta] = {}
        beside = {} if options.tensors.are_changed else reference
        sight = look(
            *(replace(source, options=options), diagnostics, executor),
            contents="slices" if deep else "samples",
            crc=crc,
            read_more=partial(_read, deep=deep, crc=crc, reference=beside, deltas=deltas),
            open_progress=open_progress,
        )
        if sight.checkpoint is not None and sight.checkpoint.misfits:
            raise PlanError(sight.checkpoint.misfits)
        raise_all(diagnostics.failures)
        differences, card = audit_checkpoint(
            *(audit, sight, reference, deltas, deep, executor, open_progress)
        )
    assert sight.checkpoint is not None, "else there is an error"
    checkpoint = sight.checkpoint.stored
    catalog, are_joined = checkpoint.catalog, checkpoint.are_joined
    is_whole = are_joined or (catalog.is_merged and not catalog.one_of_several)
    is_sampled = are_joined and any(tensor.has_layout for tensor in checkpoint.tensors)
    compared = _compared(deep, crc, options, is_sampled, are_joined)
    compared += "" if is_whole else " in each rank by itself"
    audited = []
    if audit.config is not None and audit.config.is_typed:
        audited.append(f"the tensors are as {audit.config.path} says")
    if audit.like is not None:
        audited.append(f"the {audit.like.proves(deep)} are those of {audit.like.path}")
    compared = "; ".join((compared, *audited))
    is_open = sight.checkpoint.whole.find_unconfirmed(sight.contents.readable_indexes)
    if audit.like is None and any(True for _ in is_open):
        compared += "; full shapes come from the strategy alone"
    report = _report(catalog, diagnostics, deep, compared, LeftOut.of(checkpoint.left_out))
    report = replace(report, audited=tuple(audited))
    if card is not None and audit.card is not None:
        from ckpttool.operations.card import write  # late, as most write none

        write(card, audit.card)
        report = replace(report, card=audit.card, digest=card.digest)
    like = None if audit.like is None else audit.like.path
    return replace(report, like=like, differences=differences)


def _compared(
    deep: bool,
    crc: bool,
    options: ResolveOptions,
    is_sampled: bool = False,
    are_joined: bool = False,
) -> str:
    what = {"samples": is_sampled, "checksums": crc, "hashes": options.manifest == "all"}
    parts = ["headers", *(name for name, is_compared in what.items() if is_compared)]
    words = " and ".join(", ".join(parts).rsplit(", ", 1))
    of_data = "files are whole, replicas are equal" if are_joined else "files are whole"
    return of_data if deep else f"the {words} are right"


def _report(
    catalog: Catalog,
    diagnostics: Diagnostics,
    deep: bool,
    compared: str,
    left_out: LeftOut | None = None,
) -> Verification:
    severities = Counter(diagnostics.severity_of[finding.code] for finding in diagnostics.findings)
    return Verification(
        path=catalog.root,
        step=catalog.step,
        files=len(catalog.files),
        ranks=() if catalog.is_merged else tuple(catalog.files),
        tensors=len(catalog.metas),
        nbytes=sum(file.nbytes for file in catalog.files.values()),
        deep=deep,
        left_out=left_out,
        clean=not diagnostics.findings,
        errors=severities["error"],
        warnings=severities["warning"],
        findings=Reported(diagnostics.findings, diagnostics.severity_of),
        notes=Reported(diagnostics.of("note"), diagnostics.severity_of),
        is_merged=catalog.is_merged,
        compared=compared,
        unread=len(catalog.damaged),
    )


def _read(
    checkpoint: Checkpoint,
    shown: Contents,
    executor: Executor,
    open_progress: OpenProgress,
    *,
    deep: bool,
    crc: bool,
    reference: Mapping[str, FullTensor],
    deltas: dict[str, TensorDelta],
) -> dict[Reading, list[Diagnostic]]:
    """Read what was requested, and return what it shows; see `Contents`.

    ``deltas`` collects how tensors differ from those of a ``reference`` with the same header.
    """
    catalog, is_listed = checkpoint.catalog, checkpoint.options.manifest == "all"
    mistakes = [*check_choice(checkpoint), *check_casts(checkpoint)]
    are_all_there = not (ranks_without_file(catalog, checkpoint.strategy) or catalog.damaged)
    if mistakes and are_all_there:  # else the others may have the names
        raise PlanError(mistakes)
    manifests = find_manifests(catalog)
    partial = () if checkpoint.unfiltered is None else catalog.paths
    checked = _files_to_check(catalog, deep, crc)
    nbytes = _bytes_to_read(checkpoint, checked if deep or crc else {}, deep, deep or is_listed)
    nbytes += sum(tensor.meta.nbytes for tensor in reference.values())
    read: dict[Reading, list[Diagnostic]] = {}
    with _counted(open_progress, nbytes) as on_progress:
        errors, notes = check_files(
            replace(catalog, files=checked), executor, deep or crc, on_progress
        )
        read["checksums"] = [*notes, *chain.from_iterable(error.diagnostics for error in errors)]
        hashed = set[bytes]()  # what need not be read again for the manifest
        if deep:
            fingerprints = hashed if manifests else None
            of_bytes = _check_contents(
                *(checkpoint, shown.evidence, executor, on_progress, fingerprints),
                *(reference, deltas),
            )
            read["contents"] = [*of_bytes]
        elif checkpoint.are_joined:
            read["unlisted"] = [*sample_unlisted(checkpoint, shown.evidence, executor)]
        read["manifest"] = [
            problem
            for path in manifests
            for problem in check_set(
                *(catalog, path, executor, deep or is_listed, on_progress, hashed, partial)
            )
        ]
    if is_listed and not manifests:
        message, hint = "no manifest lists these files", "the same command without --check-manifest"
        read["manifest"] = [Diagnostic("manifest", message, hint=hint, where=catalog.root)]
    return read


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


def _files_to_check(catalog: Catalog, deep: bool, crc: bool) -> dict[int, FileIndex]:
    return {
        rank: file
        for rank, file in catalog.files.items()
        if crc or "crc_num" in file.attrs or (deep and file.cipher is not None)
    }


def _bytes_to_read(
    checkpoint: Checkpoint, checked: Mapping[int, FileIndex], deep: bool, reads_all: bool
) -> int:
    total = sum(file.nbytes for file in checked.values())
    if reads_all:
        total += sum(file.nbytes for file in checkpoint.catalog.files.values())
    if deep:
        pairs = stage_pairs(checkpoint.tensors)
        total += sum(tensor.meta.nbytes + other.meta.nbytes for tensor, other in pairs)
    return total


def sample_unlisted(
    checkpoint: Checkpoint, evidence: Evidence, executor: Executor
) -> Iterator[Diagnostic]:
    """Yield the tensors without a layout that differ between two ranks, as a conversion does."""
    catalog = checkpoint.catalog
    in_full = (tensor for tensor in checkpoint.tensors if not tensor.has_layout)
    single = (tensor for tensor in in_full if tensor.meta.nbytes == tensor.meta.itemsize)
    numbers = (part for tensor in single for part in slices_of(tensor) if len(part.ranks) > 1)
    for number, stats in compare_replicas(numbers, executor):
        yield from find_differences(number, stats)
    unlisted = [tensor for tensor in checkpoint.records if isinstance(tensor.known_by, Unlisted)]
    names = [
        name
        for name in decided_by_contents(catalog, unlisted)
        if name not in RANK_SPECIFIC_NAMES
        if catalog.metas[name].nbytes > catalog.metas[name].itemsize
    ]
    differing = answer(find_differing_ends(catalog, names), executor, evidence)
    statistics = find_running_statistics(catalog, checkpoint.strategy, differing)
    running = answer(statistics, executor, evidence)
    if running:
        of_statistics = sorted({rank for name in running for rank in differing[name]})
        yield running_statistics_problem(sorted(running), of_statistics)
    problem = Diagnostic("unlisted", DIFFERENT_UNLISTED, hint="`ckpttool help unlisted`")
    for name, ranks in differing.items():
        if name not in running:
            facts = format_difference([[rank] for rank in ranks])
            yield replace(problem, facts=facts, tensor=name, ranks=ranks)


def _check_contents(
    checkpoint: Checkpoint,
    evidence: Evidence,
    executor: Executor,
    on_progress: OnProgress,
    fingerprints: set[bytes] | None,
    reference: Mapping[str, FullTensor],
    deltas: dict[str, TensorDelta],
) -> Iterator[Diagnostic]:
    """Check all data; see `ckpttool.checks.bad_values.check_contents`."""
    catalog = checkpoint.catalog
    names = decided_by_contents(catalog, checkpoint.records if checkpoint.are_joined else ())
    statistics = find_running_statistics(catalog, checkpoint.strategy, names)
    running = answer(statistics, executor, evidence)
    metas = {it.name: it.meta for it in checkpoint.tensors}
    like = {name: it for name, it in reference.items() if metas.get(name) == it.meta}
    slices = _slices(checkpoint, like)
    yield from check_contents(slices, executor, on_progress, fingerprints, running, deltas)
    yield from compare_stages(checkpoint.tensors, executor, on_progress)


def _slices(checkpoint: Checkpoint, like: Mapping[str, FullTensor]) -> Iterator[Slice]:
    """Yield all slices on disk; those that make no tensor, and those of other stages, last."""
    catalog, tensors = checkpoint.catalog, checkpoint.tensors
    for tensor in tensors:
        beside = like.get(tensor.name)
        yield from slices_beside(tensor, beside) if beside else slices_of(tensor)
    full = {tensor.name for tensor in tensors}
    for one in checkpoint.records if checkpoint.are_joined else ():
        for rank in catalog.holders[one.name] if one.name not in full else ():
            yield from slices_of(full_tensor(catalog, one.name, Unlisted(((rank,),)), rank))
    for _, other in stage_pairs(tensors):
        yield from slices_of(other)
