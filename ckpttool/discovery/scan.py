"""The catalog of a checkpoint: one file for each rank, all of one step, and their headers."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, TypeAlias

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
    rank_in_path,
)
from ckpttool.discovery.runs import drop_unfit_runs, require_steps, slices_of
from ckpttool.discovery.saves import FoundStep, SavedFile, SavedFiles, read_saved_files
from ckpttool.discovery.self_described import read_files, read_single
from ckpttool.discovery.sharded_files import note_index, scan_indexed
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
from ckpttool.model.tensors import FileIndex, Reads, VirtualFileError
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
from ckpttool.wording import count, format_ranks, shorten

if TYPE_CHECKING:
    from ckpttool.strategy_files.reader import Layouts


class SelfDescribed(Struct, frozen=True):
    """A kind of folder: what returns its catalog, and what lists its steps; None for others."""

    scan: Callable[[str, str | None], Catalog | None]
    list_steps: Callable[[Path, Diagnostics], Sequence[FoundStep] | None]


# Folders that need no strategy, in the order in which they are tried.
SELF_DESCRIBED = (
    SelfDescribed(scan_checkpoint2, list_iterations),
    SelfDescribed(scan_hyper_parallel, list_step_folders),
)

# What each function takes for a checkpoint: what `scan` returns, a path, or the files of its ranks.
CheckpointFiles: TypeAlias = Catalog | str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
OnScan = Callable[[int, int], None]  # headers read, and files in all


class SourceOptions(Struct, frozen=True):
    """Options of the source: which files of a folder are the checkpoint, and how they are read.

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
    files
        The files of ranks in the order of these, below the folder; no other is looked for.

    Examples
    --------
    >>> SourceOptions(step="10_1", key=b"0123456789abcdef")
    SourceOptions(pattern=None, step='10_1', key=Secret(...), files=None)
    """

    pattern: str | None = None
    step: str | None = None
    key: bytes | Secret | None = None
    files: Sequence[str | os.PathLike[str]] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.key, bytes | Secret | None):
            raise TypeError(f"key= is a {type(self.key).__name__}, expected the bytes of the key")
        if not isinstance(self.step, str | None):
            raise TypeError(f"step={self.step!r}, expected a text, such as '10_1'")
        if isinstance(self.key, bytes):
            force_setattr(self, "key", Secret(self.key))  # which no message or core dump shows


def scan(
    src: CheckpointFiles,
    options: SourceOptions = SourceOptions(),
    strategy: Layouts | None = None,
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
        files.  A sequence of paths has the files of the ranks in their order.  A catalog is
        returned as it is, so each function that needs one takes what this one takes.
    options
        Which files of the folder are read, and the key of encrypted ones.
    strategy
        The strategy of the checkpoint, if it is known.  Then only its ranks count when a step is
        chosen, and files that do not fit it are of other runs.
    command
        ``"inspect"`` and ``"verify"`` also get a catalog of files that contradict each other, with
        the errors in ``Catalog.diagnostics``, and one of ranks without a common step.  ``"verify"``
        also gets one of a single damaged file.
    on_progress
        Called with the number of rank files whose headers were read, and with their total.

    Raises
    ------
    PlanError
        Files are missing, a rank has two files, ranks lack a common step, or an index does not fit
        the files.
    FormatError
        ``src`` is one file and is damaged.  Damaged and unreadable files among several are in
        ``Catalog.damaged``.
    """
    src, options = locate(src, options)
    if isinstance(src, Catalog):
        return src
    source = find(src, options, command=command)
    if isinstance(source, Catalog):
        if command != "verify" and source.is_merged and not (source.files or source.documents):
            raise_all(source.damaged.values())
        return source
    of_src = None
    if strategy is not None:
        from ckpttool.strategy_files.reader import read_strategy  # late: most have none here

        of_src = read_strategy(strategy)
    return read_ranks(source, of_src, command=command, on_progress=on_progress)


def locate(src: CheckpointFiles, options: SourceOptions) -> tuple[str | Catalog, SourceOptions]:
    """Return a catalog, or a path and how it is scanned; files are listed below their folder.

    Raises
    ------
    TypeError
        A catalog would ignore the options.
    """
    if isinstance(src, Catalog):
        if options != SourceOptions():
            message = "step=, pattern=, files= and key= are for a path, and a catalog was given"
            raise TypeError(f"{message}; give them to scan")
        return src, options
    if isinstance(src, str | os.PathLike):
        return os.fspath(src), options
    paths = [os.fspath(path) for path in src]
    folder = os.path.commonpath([str(Path(path).parent) for path in paths])
    return folder, replace(options, files=[os.path.relpath(path, folder) for path in paths])


class RankFiles(Struct, frozen=True):
    """The files of ranks, by their names; which of them are read depends on the strategy.

    ``step`` and ``key`` are as requested.  ``empty_ranks`` have a folder without a file, with the
    error if it cannot be read.  ``are_whole`` says that each file holds the whole model: the steps
    of one card.
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
    """Return the files of ranks, or the catalog of any other checkpoint; see `scan`."""
    try:
        with counting_reads() as count, listing_once():
            source = _find(src, options)
        source = replace(source, reads=count())
    except FormatError as error:
        if command != "verify":
            raise
        return Catalog(src, {}, damaged={0: error}, is_merged=True)
    return _checked(source, options.key, command) if isinstance(source, Catalog) else source


def read_ranks(
    ranks: RankFiles,
    strategy: Strategy | None = None,
    *,
    command: Command = "convert",
    on_progress: OnScan = lambda done, total: None,
) -> Catalog:
    """Choose one save of the ranks, and return the catalog of its files; see `scan`."""
    diagnostics = Diagnostics()
    diagnostics.add(*ranks.diagnostics)
    strategy = strategy and strategy.for_ranks(ranks.saved.ranks)
    try:
        chosen, counted = _choose(ranks, strategy, diagnostics)
    except StepError as error:
        explained = [*error.diagnostics, *explain_missing_files(diagnostics)]
        if command not in ("inspect", "verify"):
            raise StepError(explained) from error
        return Catalog(
            ranks.root,
            {},
            diagnostics=tuple(explained),
            strategy_files=ranks.strategy_files,
            names_of=_names_of(ranks.saved),
        )
    root, paths = Path(ranks.root), chosen.files
    in_order = {rank: str(path) for rank, path in sorted(paths.items())}
    files, damaged = read_files(in_order, ranks.key, on_progress)
    empty_ranks = ranks.empty_ranks
    if counted is not None:  # only these are missed
        empty_ranks = {rank: error for rank, error in empty_ranks.items() if rank in counted}
    unreadable = {rank: error for rank, error in empty_ranks.items() if error is not None}
    empty = empty_ranks.keys() - unreadable.keys()
    missing = tuple(sorted({*_gaps({*paths, *unreadable}), *empty, *chosen.absent}))
    if missing:
        message = f"{format_ranks(missing)}: no checkpoint file found in {root}"
        if chosen.absent:
            message = f"{format_ranks(missing)}: no file of step {chosen.label} found in {root}"
        diagnostics.add(Diagnostic("missing_rank", message, ranks=missing))
    (rank, path), *further = paths.items()
    evidence = ""
    if missing and not further:
        evidence = f"it is of rank {rank}; {format_ranks(missing)} are expected, too"
    elif not further:
        from ckpttool.discovery.siblings import find_evidence  # few checkpoints need it

        evidence = find_evidence(path, files.values(), ranks.key)
    problems = tuple(describe_unfinished(root, paths.values()))
    reported = {problem.path for problem in problems} - {None}
    catalog = Catalog(
        str(root),
        files,
        step=chosen.label,
        damaged=dict(sorted({**damaged, **unreadable}.items())),
        strategy_files=ranks.strategy_files,
        diagnostics=(*problems, *(note for note in diagnostics if note.path not in reported)),
        missing_ranks=missing,
        one_of_several=evidence,
        other_steps=chosen.of_run,
        steps_of_other_runs=chosen.of_other_runs,
        is_merged=ranks.are_whole,
        reads=ranks.reads,
    )
    return _checked(catalog, ranks.key, command)


class Steps(Struct, frozen=True):
    """Every step of a folder, the oldest first, and what was noted or is wrong."""

    path: str
    steps: tuple[FoundStep, ...]
    diagnostics: tuple[Diagnostic, ...]


def find_steps(src: str, options: SourceOptions = SourceOptions()) -> Steps | RankFiles:
    """Return the steps of a folder that needs no strategy, or the files of ranks.

    PlanError for a file and for a merged checkpoint, which have one step; other errors as in
    `scan`.
    """
    root, diagnostics = Path(src), Diagnostics()
    if options.pattern is None and is_folder(root):
        root = find_checkpoint(root, diagnostics)
        for kind in SELF_DESCRIBED:
            if (steps := kind.list_steps(root, diagnostics)) is not None:
                return Steps(str(root), tuple(steps), tuple(diagnostics))
    source = _find(src, options)
    if isinstance(source, RankFiles):
        return source
    if source.files or source.is_merged:
        message = "one checkpoint, and no folder of several steps"
        hint = f"ckpttool inspect {quote(src)}"
        raise PlanError([Diagnostic("source", message, hint=hint, where=src)])
    return Steps(source.root, (), source.diagnostics)


def list_rank_steps(
    ranks: RankFiles,
    strategy: Strategy | None = None,
    *,
    on_progress: OnScan = lambda done, total: None,
) -> Steps:
    """Return the steps of the files of ranks; with a strategy only its ranks count."""
    diagnostics = Diagnostics()
    diagnostics.add(*ranks.diagnostics)
    strategy = strategy and strategy.for_ranks(ranks.saved.ranks)
    counted, _ = _count_files(ranks, strategy, Diagnostics())
    chosen: Mapping[int, Path] = {}
    try:
        chosen = _choose(ranks, strategy, diagnostics)[0].files
    except StepError as error:
        diagnostics.add(*error.diagnostics)
    paths = [file.path for file in counted.files]
    broken: dict[Path, FormatError | None] = {}
    headers = read_indexes(map(str, paths), ranks.key, on_progress)
    for path, header in zip(paths, headers, strict=True):
        if isinstance(header, FormatError):
            broken[path] = header
        elif not header.header:
            broken[path] = None
    unreadable = {rank for rank, error in ranks.empty_ranks.items() if error is not None}
    missing = {*_gaps({*counted.ranks, *unreadable}), *ranks.empty_ranks}
    if strategy is not None and not {*strategy.ranks}.isdisjoint(counted.ranks):
        missing = {*strategy.ranks} - {*counted.ranks}
    steps = list_steps(counted, missing, chosen, broken)
    return Steps(ranks.root, tuple(steps), tuple(diagnostics))


def _checked(catalog: Catalog, key: bytes | Secret | None, command: Command) -> Catalog:
    """Return a catalog with notes on encryption and types; raise what inspect has as errors."""
    if command not in ("inspect", "verify") and catalog.errors("inspect"):
        raise_all([*catalog.damaged.values(), PlanError(catalog.errors())])
    notes = *_encryption_notes(catalog.files, has_key=key is not None), *_foreign_types(catalog)
    return replace(catalog, diagnostics=(*catalog.diagnostics, *notes))


def _find(src: str, options: SourceOptions) -> Catalog | RankFiles:
    if (problem := url_problem(src)) is not None:
        what, hint = problem
        raise PlanError([Diagnostic("source", what, hint=hint, where=src)])
    root, pattern, step = Path(src), options.pattern, options.step
    key = Secret(options.key) if isinstance(options.key, bytes) else options.key
    if options.files:
        return _scan_listed(root, options.files, key)
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
                if (catalog := kind.scan(str(root), step)) is not None:
                    diagnostics.add(*catalog.diagnostics)
                    note_rank_folders(root, diagnostics)
                    return replace(catalog, diagnostics=tuple(diagnostics))
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
    strategy_files = find_strategies(root)
    are_whole = are_whole and not strategy_files
    if are_whole:
        require_steps(saved, key, are_steps=step is not None)
    notes = tuple(diagnostics)
    return RankFiles(str(root), step, key, saved, empty_ranks, strategy_files, notes, are_whole)


def _scan_listed(
    root: Path, names: Sequence[str | os.PathLike[str]], key: Secret | None
) -> Catalog:
    """Return the catalog of listed files, one for each rank and in the order of ranks."""
    paths = [root / name for name in names]
    problems = [
        Diagnostic("source", "listed twice", where=str(path))
        for path, n in Counter(paths).items()
        if n > 1
    ]
    said = (rank_in_path(Path(name)) for name in names)
    ranks = [rank for rank in said if rank is not None]
    if at := next((i for i in range(1, len(ranks)) if ranks[i] < ranks[i - 1]), 0):
        message = f"rank {ranks[at]} is listed after rank {ranks[at - 1]}, by the names"
        hint = "the files in the order of their ranks, as `sort -V` puts them"
        problems.append(Diagnostic("source", message, hint=hint, where=str(root)))
    labels = dict.fromkeys(label_of(path.name) for path in paths)
    if len(labels) > 1:
        facts = shorten([label or "no step" for label in labels], 3)
        message = "the listed files are of several steps by their names"
        problems.append(Diagnostic("mixed_steps", message, facts=facts, where=str(root)))
    if problems:
        raise PlanError(problems)
    raise_all(error for path in paths for error in refusals(path))
    files, damaged = read_files(dict(enumerate(map(str, paths))), key)
    return Catalog(str(root), files, step=next(iter(labels)), damaged=damaged)


def _names_of(saved: SavedFiles) -> dict[tuple[int, ...], tuple[str, ...]]:
    names: dict[int, list[str]] = defaultdict(list)
    for file in saved.files:
        names[file.rank].append(file.name.key)
    ranks_with: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for rank in sorted(names):
        ranks_with[tuple(names[rank])].append(rank)
    return {tuple(ranks): of_ranks for of_ranks, ranks in ranks_with.items()}


def _choose(
    ranks: RankFiles, strategy: Strategy | None, diagnostics: Diagnostics
) -> tuple[Chosen, Collection[int] | None]:
    """Return the files of one save, and the ranks that count; None for all.

    With a strategy for fewer ranks, the others are left out if they are of another run.  Then they
    hold no parameter of their own, and no equal slices of the chosen step.  If they have a later
    step, it is an error unless the step was requested.
    """
    wanted, (counted, of_others) = ranks.step, _count_files(ranks, strategy, diagnostics)
    chosen = choose_save(counted, wanted, diagnostics)
    if strategy is None or not of_others:
        return chosen, None
    beyond = sorted({file.rank for file in of_others})
    of_chosen = [file for file in counted.files if file.path == chosen.files.get(file.rank)]
    if _may_be_of_one_run(counted.files, of_chosen, of_others, ranks.key):
        newest = {file.rank: file.path for file in of_others}  # the strategy lacks these ranks
        return replace(chosen, files={**chosen.files, **newest}), None
    first = of_chosen[0]
    steps = shorten(dict.fromkeys(file.save.text for file in of_others), 3)
    facts = f"{strategy.origin_is} for {format_ranks(strategy.ranks)}; the others have {steps}"
    alike = (file.save.order for file in of_others if file.series == first.series)
    if wanted is None and any(order > first.save.order for order in alike):
        message = f"{format_ranks(beyond)}: not in the strategy, and with later steps"
        hint = f"--step {chosen.label}, if the run of the strategy is meant"
        raise StepError([Diagnostic("strategy", message, hint=hint, facts=facts, where=ranks.root)])
    message = f"{format_ranks(beyond)}: of another run, on more ranks: ignored"
    warning = Diagnostic("older_ranks", message, facts=facts, ranks=tuple(beyond), where=ranks.root)
    diagnostics.add(warning)
    return chosen, strategy.ranks


def _count_files(
    ranks: RankFiles, strategy: Strategy | None, diagnostics: Diagnostics
) -> tuple[SavedFiles, tuple[SavedFile, ...]]:
    """Return the files that count, and those of ranks that the strategy lacks.

    These count as well if the strategy lacks every rank.
    """
    if strategy is None:
        return ranks.saved, ()
    saved = drop_unfit_runs(ranks.saved, strategy, ranks.step, ranks.key, diagnostics)
    saved = replace(saved, strategy=strategy)
    counted = strategy.ranks
    beyond = tuple(file for file in saved.files if file.rank not in counted)
    if len(beyond) == len(saved.files):
        return saved, ()
    return saved.only(lambda file: file.rank in counted), beyond


def _may_be_of_one_run(
    counted: Iterable[SavedFile],
    chosen: Sequence[SavedFile],
    beyond: Sequence[SavedFile],
    key: Secret | None,
) -> bool:
    """Return whether files of ranks beyond a strategy may be of the run of the chosen ones.

    They are of another run if every parameter in them is in the chosen files, and if those of the
    same step have other slices.
    """
    runs = {file.run for file in chosen}
    of_runs = (file for file in counted if file.run in runs)
    slices = slices_of(chosen, key) or slices_of(of_runs, key)
    of_step = [file for file in beyond if file.save == chosen[0].save]
    if of_step and (chosen[0].save.step is None or slices & slices_of(of_step, key)):
        return True
    names = {name for of_file in slices for name, _ in of_file}
    return any(name not in names for of_file in slices_of(beyond, key) for name, _ in of_file)


def _scan_merged(root: Path, src: str, key: Secret | None) -> Catalog | None:
    """Return a merged checkpoint in several files; None if ``src`` is neither folder nor index."""
    catalog = scan_indexed(src, key)
    if catalog is None:
        return None
    from ckpttool.discovery.siblings import evidence_of_name  # few checkpoints need it

    evidence = (evidence_of_name(Path(file.path)) for file in catalog.files.values())
    unfinished = describe_unfinished(root if is_folder(root) else root.parent)
    diagnostics = (*unfinished, *catalog.diagnostics)
    return replace(
        catalog, one_of_several=next(filter(None, evidence), ""), diagnostics=diagnostics
    )


def _gaps(ranks: Collection[int]) -> Iterator[int]:
    for low, high in pairwise((-1, *sorted(ranks))):
        yield from range(low + 1, min(high, low + 1000))  # a name may have a huge number


def _scan_file(path: Path, key: Secret | None, step: str | None) -> Catalog:
    from ckpttool.discovery.siblings import find_evidence  # few checkpoints need it

    if exists(path) and not is_file(path):
        raise PlanError([Diagnostic("source", "neither a file nor a folder", where=str(path))])
    label = label_of(path.name)
    is_other = step is not None and not is_step(step_of(path.name), step)
    if label is not None and is_other and step not in (path.name, path.stem):
        message = f"a file of step {label} by its name, not of step {step}"
        raise PlanError([Diagnostic("source", message, hint="omit --step", where=str(path))])
    raise_all(refusals(path))
    diagnostics = Diagnostics()
    diagnostics.add(*describe_unfinished(path))
    note_index(path, diagnostics)
    note_special_save(path.name, diagnostics)
    try:
        files, damaged = read_single(str(path), key)
    except VirtualFileError:
        from ckpttool.discovery.shown_files import scan_virtual

        return scan_virtual(str(path))
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
    names_of: dict[str, list[str]] = {}
    for meta in catalog.metas.values():
        if meta.dtype in SAFETENSORS_DTYPES:
            names_of.setdefault(meta.dtype, []).append(meta.name)
    for dtype, names in names_of.items():
        message = f"safetensors' {dtype} has no counterpart in MindSpore"
        facts = (
            f"{count(len(names), 'tensor')} ({shorten(names, 3)}); unsupported in .ckpt and HDF5"
        )
        yield Diagnostic("unsupported_type", message, facts=facts, where=catalog.root)
    if axes := sorted({name for file in catalog.files.values() for name in file.skipped}):
        message = f"{count(len(axes), 'netCDF dimension')} without values: ignored"
        yield Diagnostic("skipped", message, facts=shorten(axes, 3), where=catalog.root)


def _encryption_notes(files: Mapping[int, FileIndex], *, has_key: bool) -> Iterator[Diagnostic]:
    encrypted = {rank: file for rank, file in files.items() if file.cipher is not None}
    if has_key and files and not encrypted:
        yield Diagnostic("encryption", "no file is encrypted: the key is not needed")
    plain = [rank for rank, file in files.items() if file.cipher is None and file.nbytes]
    if encrypted and plain:
        message = f"{format_ranks(plain)}: not encrypted, unlike {format_ranks(tuple(encrypted))}"
        facts = "one run encrypts all files or none"
        hint = "compare their dates; `ckpttool help mixed_encryption` explains"
        yield Diagnostic("mixed_encryption", message, hint=hint, facts=facts, ranks=tuple(plain))
    zero_checksum = [rank for rank, file in encrypted.items() if file.attrs.get("crc_num") == "0"]
    if zero_checksum:
        message = f"{format_ranks(zero_checksum)}: encrypted with a checksum of 0, which is ignored"
        facts = "MindSpore writes this with crc_check and cannot read it"
        yield Diagnostic("encryption", message, facts=facts, ranks=tuple(zero_checksum))
