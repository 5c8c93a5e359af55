"""The catalog of a checkpoint: one file for each rank, all of one step, and their headers."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from shlex import quote
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import force_setattr, replace

from ckpttool.discovery.checkpoint2 import list_iterations, scan_checkpoint2
from ckpttool.discovery.file_names import is_step, label_of, step_of
from ckpttool.discovery.hyper_parallel import (
    choose_step_folder,
    find_unfinished,
    list_step_folders,
    scan_hyper_parallel,
)
from ckpttool.discovery.ignored import (
    describe_unfinished,
    drop_backups,
    note_special_save,
    refusals,
)
from ckpttool.discovery.mindformers_output import find_checkpoint, find_strategies
from ckpttool.discovery.rank_folders import (
    explain_missing_files,
    list_by_pattern,
    list_rank_files,
    note_rank_folders,
)
from ckpttool.discovery.runs import drop_unfit_runs, require_steps, slices_of
from ckpttool.discovery.saves import FoundStep, SavedFile, SavedFiles, read_saved_files
from ckpttool.discovery.self_described import read_files, read_single
from ckpttool.discovery.sharded_files import note_index, scan_indexed
from ckpttool.discovery.siblings import evidence_of_name, find_evidence
from ckpttool.discovery.steps import Chosen, choose_save, list_steps
from ckpttool.formats import read_indexes
from ckpttool.formats.foreign import identify_foreign
from ckpttool.formats.local import (
    counting_reads,
    exists,
    is_file,
    is_folder,
    listing_once,
    url_problem,
)
from ckpttool.model.catalog import Catalog
from ckpttool.model.dtypes import SAFETENSORS_DTYPES
from ckpttool.model.strategy import Strategy
from ckpttool.model.tensors import FileIndex, Reads
from ckpttool.problems import (
    Command,
    Diagnostic,
    Diagnostics,
    ForeignError,
    FormatError,
    PlanError,
    StepError,
    UnfinishedError,
    raise_all,
)
from ckpttool.secret import Secret
from ckpttool.transaction.states import (
    describe_record,
)
from ckpttool.wording import Brief, count, format_bytes, format_ranks, shorten


class SelfDescribed(NamedTuple):
    """A kind of folder: what returns its catalog, and what lists its steps; None for others."""

    scan: Callable[[str, str | None], Catalog | None]
    list_steps: Callable[[Path, Diagnostics], Sequence[FoundStep] | None]


# Folders that need no strategy, in the order in which they are tried.
SELF_DESCRIBED = (
    SelfDescribed(scan_checkpoint2, list_iterations),
    SelfDescribed(scan_hyper_parallel, list_step_folders),
)

OnScan = Callable[[int, int], None]  # headers read, and files in all


class SourceOptions(Struct, frozen=True):
    """Which files of a folder are a checkpoint, and how they are read.

    Attributes
    ----------
    pattern
        Path of a rank's file below the folder, with ``{rank}`` for its number and ``*`` for
        anything; a file name with a ``*`` matches only files with a checkpoint's suffix.
    step
        The step to read, as in the names (``10_1``), or a file name without its suffix.  The
        default is the newest that every rank has; steps are compared as numbers.
        ``RANKS:NAME/RANKS:NAME`` gives ranks files of several names.
    key
        The key of encrypted files, as given to MindSpore (``enc_key``).

    Examples
    --------
    >>> SourceOptions(step="10_1", key=b"0123456789abcdef")
    SourceOptions(pattern=None, step='10_1', key=Secret(...))
    """

    pattern: str | None = None
    step: str | None = None
    key: bytes | Secret | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.key, bytes | Secret | None):
            raise TypeError(f"key= is a {type(self.key).__name__}, expected the bytes of the key")
        if not isinstance(self.step, str | None):
            raise TypeError(f"step={self.step!r}, expected a text, such as '10_1'")
        if isinstance(self.key, bytes):
            force_setattr(self, "key", Secret(self.key))  # which no message or core dump shows


def scan(
    src: str | os.PathLike[str],
    options: SourceOptions = SourceOptions(),
    strategy: Strategy | None = None,
    *,
    command: Command = "convert",
    on_progress: OnScan = lambda done, total: None,
) -> Catalog:
    """Return the catalog of a checkpoint: the header of every rank's file.

    Parameters
    ----------
    src
        A folder of rank folders, or the output folder of a MindFormers run that contains them; or
        one file, which is rank 0; or the folder or the index of a merged checkpoint in several
        files.
    options
        Which files of the folder are read, and the key of encrypted ones.
    strategy
        The strategy of the checkpoint, if it is known.  Then only its ranks count when a step is
        chosen, and files that do not fit it are of other runs.
    command
        What the catalog is for.  ``"inspect"`` and ``"verify"`` get one whose files contradict each
        other, with the errors in ``Catalog.diagnostics``, or one of ranks without a common step.
        ``"verify"`` also gets one of a single damaged file.
    on_progress
        Called with the number of rank files whose headers were read, and with their total.

    Raises
    ------
    PlanError
        There are no files, two files for a rank, no step that every rank has, or an index that
        does not fit the files.
    FormatError
        ``src`` is one file and is damaged.  Damaged and unreadable files among several are in
        ``Catalog.damaged``.
    OSError
        A folder cannot be read, or ``src`` if it is one file.
    """
    found = find(os.fspath(src), options, command=command)
    if isinstance(found, Catalog):
        if command != "verify" and found.is_merged and not (found.files or found.documents):
            raise_all(found.damaged.values())
        return found
    return read_ranks(found, strategy, command=command, on_progress=on_progress)


class RankFiles(Struct, frozen=True):
    """The files of ranks, by their names; which of them are read depends on the strategy.

    Attributes
    ----------
    root
        The folder of the ranks.
    step, key
        The requested step, and the key of encrypted files.
    saved
        The files of every step.
    empty_ranks
        Ranks whose folder has no file, with the error if it cannot be read.
    strategy_files
        The default strategy files: those in the output folder of the same MindFormers run.
    diagnostics
        What was found beside the files.
    are_whole
        Whether each file holds the whole model: the steps of one card.
    reads
        What was read to find them.
    """

    root: str
    step: str | None
    key: Secret | None
    saved: SavedFiles
    empty_ranks: Mapping[int, FormatError | None]
    strategy_files: tuple[str, ...]
    diagnostics: tuple[Diagnostic, ...]
    are_whole: bool = False
    reads: Reads = Reads()


def find(
    src: str, options: SourceOptions = SourceOptions(), *, command: Command = "convert"
) -> Catalog | RankFiles:
    """Return the files of ranks, or the catalog of any other checkpoint.

    The parameters and errors are those of `scan`.
    """
    try:
        with counting_reads() as count, listing_once():
            found = _find(src, options)
        found = replace(found, reads=count())
    except FormatError as error:
        if command != "verify":
            raise
        return Catalog(src, {}, damaged={0: error}, is_merged=True)
    return _checked(found, options.key, command) if isinstance(found, Catalog) else found


def read_ranks(
    found: RankFiles,
    strategy: Strategy | None = None,
    *,
    command: Command = "convert",
    on_progress: OnScan = lambda done, total: None,
) -> Catalog:
    """Choose one save of the ranks, and return the catalog of its files.

    The parameters and errors are those of `scan`.
    """
    diagnostics = Diagnostics()
    diagnostics.add(*found.diagnostics)
    strategy = strategy and strategy.for_ranks(found.saved.ranks)
    try:
        chosen, counted = _choose(found, strategy, diagnostics)
    except StepError as error:
        explained = [*error.diagnostics, *explain_missing_files(diagnostics)]
        if command not in ("inspect", "verify"):
            raise StepError(explained) from error
        return Catalog(
            found.root,
            {},
            diagnostics=tuple(explained),
            strategy_files=found.strategy_files,
            names_of=_names_of(found.saved),
        )
    root, paths = Path(found.root), chosen.files
    in_order = {rank: str(path) for rank, path in sorted(paths.items())}
    files, damaged = read_files(in_order, found.key, on_progress)
    empty_ranks = found.empty_ranks
    if counted is not None:  # only these are missed
        empty_ranks = {rank: error for rank, error in empty_ranks.items() if rank in counted}
    unreadable = {rank: error for rank, error in empty_ranks.items() if error is not None}
    empty = empty_ranks.keys() - unreadable.keys()
    missing = tuple(sorted({*_gaps({*paths, *unreadable}), *empty, *chosen.absent}))
    if missing:
        text = f"{format_ranks(missing)}: no checkpoint file found in {root}"
        if chosen.absent:
            text = f"{format_ranks(missing)}: no file of step {chosen.label} found in {root}"
        diagnostics.add(Diagnostic("missing_rank", text, ranks=missing))
    (rank, path), *others = paths.items()
    evidence = ""
    if missing and not others:
        evidence = f"it is of rank {rank}; {format_ranks(missing)} are expected, too"
    elif not others:
        evidence = find_evidence(path, files.values(), found.key)
    problems = tuple(describe_unfinished(root, paths.values()))
    reported = {one.path for one in problems} - {None}
    catalog = Catalog(
        str(root),
        files,
        step=chosen.label,
        damaged=dict(sorted({**damaged, **unreadable}.items())),
        strategy_files=found.strategy_files,
        diagnostics=(*problems, *(one for one in diagnostics if one.path not in reported)),
        missing_ranks=missing,
        one_of_several=evidence,
        other_steps=chosen.of_run,
        steps_of_other_runs=chosen.of_other_runs,
        is_merged=found.are_whole,
        reads=found.reads,
    )
    return _checked(catalog, found.key, command)


class Steps(Brief, Struct, frozen=True):
    """Every step of a folder, the oldest first, and what was noted or is wrong."""

    path: str
    steps: tuple[FoundStep, ...]
    diagnostics: tuple[Diagnostic, ...]

    def _texts(self) -> Iterator[str]:
        yield f"{self.path}: {count(len(self.steps), 'step')}"
        yield f"{sum(one.complete is True for one in self.steps)} complete"

    def _rows(self) -> Iterator[Sequence[str]]:
        yield ("step", "complete", "files", "size", "what")
        for one in self.steps:
            name = one.name or one.step or ""
            yield (name, str(one.complete), str(one.files), format_bytes(one.nbytes), one.reason)


def find_steps(src: str, options: SourceOptions = SourceOptions()) -> Steps | RankFiles:
    """Return the steps of a folder that needs no strategy, or the files of ranks.

    The parameters and errors are those of `scan`; a file, and a merged checkpoint, has no steps.
    """
    root, diagnostics = Path(src), Diagnostics()
    if options.pattern is None and is_folder(root):
        root = find_checkpoint(root, diagnostics)
        for kind in SELF_DESCRIBED:
            if (steps := kind.list_steps(root, diagnostics)) is not None:
                return Steps(str(root), tuple(steps), tuple(diagnostics))
    found = _find(src, options)
    if isinstance(found, RankFiles):
        return found
    if found.files or found.is_merged:
        text = "one checkpoint, and no folder of several steps"
        hint = f"ckpttool inspect {quote(src)}"
        raise PlanError([Diagnostic("source", text, hint=hint, where=src)])
    return Steps(found.root, (), found.diagnostics)


def list_rank_steps(
    found: RankFiles,
    strategy: Strategy | None = None,
    *,
    on_progress: OnScan = lambda done, total: None,
) -> Steps:
    """Return the steps of the files of ranks; with a strategy only its ranks count."""
    diagnostics = Diagnostics()
    diagnostics.add(*found.diagnostics)
    strategy = strategy and strategy.for_ranks(found.saved.ranks)
    counted, _ = _count_files(found, strategy, Diagnostics())
    chosen: Mapping[int, Path] = {}
    try:
        chosen = _choose(found, strategy, diagnostics)[0].files
    except StepError as error:
        diagnostics.add(*error.diagnostics)
    paths = [file.path for file in counted.files]
    broken: dict[Path, FormatError | None] = {}
    headers = read_indexes(map(str, paths), found.key, on_progress)
    for path, header in zip(paths, headers, strict=True):
        if isinstance(header, FormatError):
            broken[path] = header
        elif not header.header:
            broken[path] = None
    unreadable = {rank for rank, error in found.empty_ranks.items() if error is not None}
    missing = {*_gaps({*counted.ranks, *unreadable}), *found.empty_ranks}
    if strategy is not None and not {*strategy.ranks}.isdisjoint(counted.ranks):
        missing = {*strategy.ranks} - {*counted.ranks}
    steps = list_steps(counted, missing, chosen, broken)
    return Steps(found.root, tuple(steps), tuple(diagnostics))


def _checked(catalog: Catalog, key: bytes | Secret | None, command: Command) -> Catalog:
    """Return a catalog with notes on encryption and on types.

    What is an error even for ``inspect`` is raised, unless the command shows it itself.
    """
    if command not in ("inspect", "verify") and catalog.errors("inspect"):
        raise_all([*catalog.damaged.values(), PlanError(catalog.errors())])
    notes = *_encryption_notes(catalog.files, has_key=key is not None), *_foreign_types(catalog)
    return replace(catalog, diagnostics=(*catalog.diagnostics, *notes))


def _find(src: str, options: SourceOptions) -> Catalog | RankFiles:
    """Return what a path is, with what is wrong with it in its diagnostics."""
    if (problem := url_problem(src)) is not None:
        what, hint = problem
        raise PlanError([Diagnostic("source", what, hint=hint, where=src)])
    root, pattern, step = Path(src), options.pattern, options.step
    key = Secret(options.key) if isinstance(options.key, bytes) else options.key
    merged = _scan_merged(root, src, key) if pattern is None else None
    if merged is not None:
        return merged
    if not is_folder(root):
        return _scan_file(root, key, step)
    diagnostics = Diagnostics()
    try:
        if pattern is None:
            root = find_checkpoint(root, diagnostics)
            root, step = choose_step_folder(root, step, diagnostics)
            for kind in SELF_DESCRIBED:
                if (described := kind.scan(str(root), step)) is not None:
                    diagnostics.add(*described.diagnostics)
                    note_rank_folders(root, diagnostics)
                    return replace(described, diagnostics=tuple(diagnostics))
            if (unfinished := find_unfinished(root)) is not None:
                diagnostics.add(unfinished)
            files, empty_ranks, are_whole = list_rank_files(root, diagnostics)
        else:
            files, empty_ranks, are_whole = list_by_pattern(root, pattern)
            raise_all(error for item in files for error in refusals(item.path))
    except UnfinishedError as error:
        diagnostics.add(*error.diagnostics, *describe_record(root))
        return Catalog(str(root), {}, diagnostics=tuple(diagnostics))
    if step is None:
        files = drop_backups(files, diagnostics)
    saved = read_saved_files(str(root), files, diagnostics)
    strategy_files = find_strategies(root, diagnostics)
    are_whole = are_whole and not strategy_files
    if are_whole:
        require_steps(saved, key, are_steps=step is not None)
    notes = tuple(diagnostics)
    return RankFiles(str(root), step, key, saved, empty_ranks, strategy_files, notes, are_whole)


def _names_of(saved: SavedFiles) -> dict[tuple[int, ...], tuple[str, ...]]:
    names: dict[int, list[str]] = defaultdict(list)
    for file in saved.files:
        names[file.rank].append(file.name.key)
    ranks_with: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for rank in sorted(names):
        ranks_with[tuple(names[rank])].append(rank)
    return {tuple(ranks): of_ranks for of_ranks, ranks in ranks_with.items()}


def _choose(
    found: RankFiles, strategy: Strategy | None, diagnostics: Diagnostics
) -> tuple[Chosen, Collection[int] | None]:
    """Return the files of one save, and the ranks that count; None for all.

    With a strategy for fewer ranks, the others are left out if they are of another run.  Then they
    hold no parameter of their own, and no equal slices of the chosen step.  If they have a later
    step, it is an error unless the step was requested.
    """
    wanted, (counted, of_others) = found.step, _count_files(found, strategy, diagnostics)
    chosen = choose_save(counted, wanted, diagnostics)
    if strategy is None or not of_others:
        return chosen, None
    others = sorted({file.rank for file in of_others})
    of_chosen = [file for file in counted.files if file.path == chosen.files.get(file.rank)]
    if _may_be_of_one_run(counted.files, of_chosen, of_others, found.key):
        newest = {file.rank: file.path for file in of_others}  # the strategy lacks these ranks
        return replace(chosen, files={**chosen.files, **newest}), None
    first = of_chosen[0]
    steps = shorten(dict.fromkeys(file.save.text for file in of_others), 3)
    facts = f"{strategy.origin_is} for {format_ranks(strategy.ranks)}; the others have {steps}"
    alike = (file.save.order for file in of_others if file.series == first.series)
    if wanted is None and any(order > first.save.order for order in alike):
        text = f"{format_ranks(others)}: not in the strategy, and with later steps"
        hint = f"--step {chosen.label}, if the run of the strategy is meant"
        raise StepError([Diagnostic("strategy", text, hint=hint, facts=facts, where=found.root)])
    text = f"{format_ranks(others)}: of another run, on more ranks: ignored"
    one = Diagnostic("older_ranks", text, facts=facts, ranks=tuple(others), where=found.root)
    diagnostics.add(one)
    return chosen, strategy.ranks


def _count_files(
    found: RankFiles, strategy: Strategy | None, diagnostics: Diagnostics
) -> tuple[SavedFiles, tuple[SavedFile, ...]]:
    """Return the files that count, and those of ranks that the strategy lacks.

    These count as well if the strategy lacks every rank.
    """
    if strategy is None:
        return found.saved, ()
    saved = replace(
        _without_unfit_runs(found, strategy, diagnostics), covers=strategy.is_covered_by
    )
    others = [rank for rank in saved.ranks if rank not in strategy.ranks]
    if len(others) == len(saved.ranks):
        return saved, ()
    return saved.limited_to(strategy.ranks), saved.limited_to(others).files


def _without_unfit_runs(
    found: RankFiles, strategy: Strategy, diagnostics: Diagnostics
) -> SavedFiles:
    """Return the files of runs that fit the strategy; all of them if an unfit one is requested.

    A file that is named is read, and the error about its slices says what is wrong.
    """
    of_fitting = Diagnostics()
    fitting = drop_unfit_runs(found.saved, strategy, found.key, of_fitting)
    unfit = {*found.saved.files} - {*fitting.files}
    if found.step is not None and any(file.is_called(found.step) for file in unfit):
        return found.saved
    diagnostics.add(*of_fitting)
    return fitting


def _may_be_of_one_run(
    counted: Iterable[SavedFile],
    chosen: Sequence[SavedFile],
    others: Sequence[SavedFile],
    key: Secret | None,
) -> bool:
    """Return whether files of ranks beyond a strategy may be of the run of the chosen ones.

    They are of another run if they hold no parameter that the chosen ones lack, and if those of
    the same step have other slices.
    """
    runs = {file.run for file in chosen}
    slices = slices_of(chosen, key) or slices_of(
        (file for file in counted if file.run in runs), key
    )
    of_step = [file for file in others if file.save == chosen[0].save]
    if of_step and (chosen[0].save.step is None or slices & slices_of(of_step, key)):
        return True
    names = {name for one in slices for name, _ in one}
    return any(name not in names for one in slices_of(others, key) for name, _ in one)


def _scan_merged(root: Path, src: str, key: Secret | None) -> Catalog | None:
    """Return a merged checkpoint in several files; None if ``src`` is neither folder nor index."""
    found = scan_indexed(src, key)
    if found is None:
        return None
    evidence = (evidence_of_name(Path(file.path)) for file in found.files.values())
    return replace(
        found,
        one_of_several=next(filter(None, evidence), ""),
        diagnostics=(
            *describe_unfinished(root if is_folder(root) else root.parent),
            *found.diagnostics,
        ),
    )


def _gaps(ranks: Collection[int]) -> Iterator[int]:
    for low, high in pairwise((-1, *sorted(ranks))):
        yield from range(low + 1, min(high, low + 1000))  # a name may have a huge number


def _scan_file(path: Path, key: Secret | None, step: str | None) -> Catalog:
    """Return the catalog of one file."""
    if exists(path) and not is_file(path):
        raise PlanError([Diagnostic("source", "neither a file nor a folder", where=str(path))])
    label = label_of(path.name)
    is_other = step is not None and not is_step(step_of(path.name), step)
    if label is not None and is_other and step not in (path.name, path.stem):
        text = f"a file of step {label} by its name, not of step {step}"
        raise PlanError([Diagnostic("source", text, hint="omit --step", where=str(path))])
    raise_all(refusals(path))
    diagnostics = Diagnostics()
    diagnostics.add(*describe_unfinished(path))
    note_index(path, diagnostics)
    note_special_save(path.name, diagnostics)
    try:
        files, damaged = read_single(str(path), key)
    except ForeignError as error:
        kind = identify_foreign(str(path))
        raise error if kind is None else kind.error(str(path), is_src=True) from error
    return Catalog(
        str(path),
        files,
        damaged=damaged,
        diagnostics=tuple(diagnostics),
        one_of_several=find_evidence(path, files.values(), key),
        is_merged=True,
    )


def _foreign_types(catalog: Catalog) -> Iterator[Diagnostic]:
    """Yield a note for each element type that MindSpore lacks."""
    names_of: dict[str, list[str]] = {}
    for meta in catalog.metas.values():
        if meta.dtype in SAFETENSORS_DTYPES:
            names_of.setdefault(meta.dtype, []).append(meta.name)
    for dtype, names in names_of.items():
        text = f"safetensors' {dtype} has no counterpart in MindSpore"
        facts = (
            f"{count(len(names), 'tensor')} ({shorten(names, 3)}); unsupported in .ckpt and HDF5"
        )
        yield Diagnostic("unsupported_type", text, facts=facts, where=catalog.root)


def _encryption_notes(files: Mapping[int, FileIndex], *, has_key: bool) -> Iterator[Diagnostic]:
    """Yield notes on an unused key, on plain files, and on checksums of encrypted files."""
    encrypted = {rank: file for rank, file in files.items() if file.cipher is not None}
    if has_key and files and not encrypted:
        yield Diagnostic("encryption", "no file is encrypted: the key is not needed")
    plain = [rank for rank, file in files.items() if file.cipher is None and file.nbytes]
    if encrypted and plain:
        text = f"{format_ranks(plain)}: not encrypted, unlike {format_ranks(tuple(encrypted))}"
        facts = "one run encrypts all files or none"
        hint = "compare their dates; `ckpttool help mixed_encryption` explains"
        yield Diagnostic("mixed_encryption", text, hint=hint, facts=facts, ranks=tuple(plain))
    zero_checksum = [rank for rank, file in encrypted.items() if file.attrs.get("crc_num") == "0"]
    if zero_checksum:
        text = f"{format_ranks(zero_checksum)}: encrypted with a checksum of 0, which is ignored"
        facts = "MindSpore writes this with crc_check and cannot read it"
        yield Diagnostic("encryption", text, facts=facts, ranks=tuple(zero_checksum))
