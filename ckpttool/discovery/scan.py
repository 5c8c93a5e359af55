"""The catalog of a checkpoint: one file for each rank, all of one step, and their headers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

from ckpttool.discovery.checkpoint2 import MINDFORMERS_FILE, scan_checkpoint2
from ckpttool.discovery.file_names import RANK_IN_NAME, label_of, matches_step
from ckpttool.discovery.hyper_parallel import scan_hyper_parallel
from ckpttool.discovery.leftovers import (
    describe_unfinished_save,
    drop_backups,
    find_unfinished_save,
    is_unfinished_name,
    note_special_save,
)
from ckpttool.discovery.mindformers_output import find_checkpoint, find_strategies
from ckpttool.discovery.rank_folders import (
    EmptyRanks,
    explain_missing_files,
    list_by_pattern,
    list_rank_files,
    note_rank_folders,
    sibling_rank_folders,
)
from ckpttool.discovery.sharded_files import note_index, scan_indexed
from ckpttool.discovery.steps import choose_step
from ckpttool.errors import (
    ForeignError,
    FormatError,
    PlanError,
    StepError,
    UnfinishedError,
    UnsupportedError,
    raise_all,
)
from ckpttool.formats import read_index, read_indexes
from ckpttool.formats.foreign import identify_foreign
from ckpttool.formats.local import exists, is_file, is_folder, url_problem
from ckpttool.model.catalog import Catalog, MergedCatalog, RankCatalog
from ckpttool.model.diagnostics import Command, Diagnostic, Diagnostics, diagnose
from ckpttool.model.dtypes import SAFETENSORS_DTYPES
from ckpttool.model.tensors import FileIndex
from ckpttool.model.wording import count, format_ranks, shorten
from ckpttool.secret import Secret
from ckpttool.storage.files import PARTIAL
from ckpttool.transaction.states import (
    describe_record,
    find_unfinished_run,
)

OnScan = Callable[[int, int], None]  # headers read, and files in all


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """Which files of a folder are a checkpoint, and how they are read.

    Attributes
    ----------
    pattern
        Path of a rank's file below the folder, with ``{rank}`` for its number and ``*`` for
        anything; a file name with a ``*`` matches only files with a checkpoint's suffix.
    step
        The step to read, as in the names (``10_1``), or a file name without its suffix.  The
        default is the newest that every rank has; steps are compared as numbers.
    key
        The key of encrypted files, as given to MindSpore (``enc_key``).

    Examples
    --------
    >>> SourceOptions(step="10_1", key=b"0123456789abcdef")
    SourceOptions(pattern=None, step='10_1')
    """

    pattern: str | None = None
    step: str | None = None
    key: bytes | Secret | None = field(default=None, repr=False)


def scan(
    src: str,
    options: SourceOptions = SourceOptions(),
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
    command
        What the catalog is for.  ``"inspect"`` and ``"verify"`` get one whose files contradict each
        other, with the errors in ``Catalog.diagnostics``.  ``"verify"`` also gets one of a single
        damaged file, or of ranks without a common step.
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
    try:
        catalog = _scan(src, options, on_progress)
    except (StepError, FormatError) as error:
        if command != "verify":
            raise
        if isinstance(error, FormatError):
            return MergedCatalog(src, {}, damaged={0: error})
        return RankCatalog(src, {}, diagnostics=diagnose(error))
    if command not in ("inspect", "verify") and catalog.errors("inspect"):
        raise_all([*catalog.damaged.values(), PlanError(catalog.errors())])
    return replace(catalog, diagnostics=(*catalog.diagnostics, *_foreign_types(catalog)))


def _scan(src: str, options: SourceOptions, on_progress: OnScan) -> Catalog:
    """Return the catalog, with what is wrong with its files in ``Catalog.diagnostics``."""
    if (problem := url_problem(src)) is not None:
        raise PlanError([Diagnostic("source", *problem, where=src)])
    root, pattern, step = Path(src), options.pattern, options.step
    key = Secret(options.key) if isinstance(options.key, bytes) else options.key
    merged = _scan_merged(root, src, key) if pattern is None else None
    if merged is not None:
        return merged
    if not is_folder(root):
        return _scan_file(root, key, step)
    diagnostics = Diagnostics()
    empty_ranks: EmptyRanks = {}
    if pattern is None:
        root = find_checkpoint(root, diagnostics)
        described = _scan_self_described(root, step, key, diagnostics)
        if described is not None:
            return described
    try:
        chosen, label = _choose_files(root, pattern, step, diagnostics, empty_ranks)
    except UnfinishedError as error:
        diagnostics.add(*diagnose(error), *describe_record(root))
        return RankCatalog(str(root), {}, diagnostics=tuple(diagnostics))
    indexes = read_indexes((str(chosen[rank]) for rank in sorted(chosen)), key, on_progress)
    found_in = dict(zip(sorted(chosen), indexes, strict=True))
    files = {n: index for n, index in found_in.items() if isinstance(index, FileIndex)}
    damaged = {n: error for n, error in found_in.items() if isinstance(error, FormatError)}
    unreadable = {rank: error for rank, error in empty_ranks.items() if error is not None}
    missing = tuple(
        sorted({*_gaps({*chosen, *unreadable}), *(empty_ranks.keys() - unreadable.keys())})
    )
    if missing:
        text = f"{format_ranks(missing)}: no checkpoint file found in {root}"
        diagnostics.add(Diagnostic("missing_rank", text, ranks=missing))
    diagnostics.add(*_encryption_notes(files, key))
    strategy_files = find_strategies(root, chosen, diagnostics)
    problems = tuple(_problems(root, chosen.values()))
    reported = {one.path for one in problems}
    return RankCatalog(
        str(root),
        files,
        step=label,
        damaged=dict(sorted({**damaged, **unreadable}.items())),
        strategy_files=strategy_files,
        diagnostics=(
            *problems,
            *(one for one in diagnostics if one.path is None or one.path not in reported),
        ),
        missing_ranks=missing,
        one_of_several=_single_rank_evidence(chosen, missing),
    )


def _single_rank_evidence(chosen: Mapping[int, Path], missing: Sequence[int]) -> str:
    """Return the evidence that a folder's only file is of one rank of several, or ""."""
    if len(chosen) != 1:
        return ""
    ((rank, path),) = chosen.items()
    if missing:
        return f"it is of rank {rank}; {format_ranks(missing)} are expected, too"
    return _rank_evidence(path)


def _scan_merged(root: Path, src: str, key: Secret | None) -> Catalog | None:
    """Return a merged checkpoint in several files; None if ``src`` is neither folder nor index."""
    found = scan_indexed(src, key)
    if found is None:
        return None
    of_one = [_rank_evidence(Path(file.path)) for file in found.files.values()]
    return replace(
        found,
        one_of_several=next(filter(None, of_one), ""),
        diagnostics=(
            *_problems(root if is_folder(root) else root.parent),
            *found.diagnostics,
            *_encryption_notes(found.files, key),
        ),
    )


def _scan_self_described(
    root: Path, step: str | None, key: Secret | None, diagnostics: Diagnostics
) -> Catalog | None:
    """Return a self-described checkpoint; None if ``root`` is another one."""
    described = scan_checkpoint2(str(root), step)
    if described is None:
        described = scan_hyper_parallel(str(root), step)
    if described is None:
        return None
    diagnostics.add(*described.diagnostics, *_encryption_notes(described.files, key))
    note_rank_folders(root, diagnostics)
    return replace(described, diagnostics=tuple(diagnostics))


def _choose_files(
    root: Path,
    pattern: str | None,
    step: str | None,
    diagnostics: Diagnostics,
    empty_ranks: EmptyRanks,
) -> tuple[Mapping[int, Path], str | None]:
    """Return the file of each rank, and the step; ``empty_ranks`` gets the ranks without a file."""
    if pattern is None:
        found = list_rank_files(root, diagnostics, empty_ranks)
    else:
        found = list_by_pattern(root, pattern, empty_ranks)
        raise_all(error for item in found for error in _refusals(item.path))
    if step is None:
        found = drop_backups(found, diagnostics)
    try:
        return choose_step(str(root), found, step, diagnostics)
    except PlanError as error:
        raise type(error)([*error.diagnostics, *explain_missing_files(diagnostics)]) from error


def _gaps(ranks: Collection[int]) -> Iterator[int]:
    """Yield the missing numbers, at most 1000 in a row: a name may have a huge one."""
    for low, high in pairwise((-1, *sorted(ranks))):
        yield from range(low + 1, min(high, low + 1000))


def _scan_file(path: Path, key: Secret | None, step: str | None) -> Catalog:
    """Return the catalog of one file."""
    if exists(path) and not is_file(path):
        raise PlanError([Diagnostic("source", "neither a file nor a folder", where=str(path))])
    label = label_of(path.name)
    if step is not None and label is not None and not matches_step(path.name, {0: path}, step):
        text = f"a file of step {label} by its name, not of step {step}"
        raise PlanError([Diagnostic("source", text, "omit --step", where=str(path))])
    raise_all(_refusals(path))
    diagnostics = Diagnostics()
    diagnostics.add(*_problems(path))
    note_index(path, diagnostics)
    note_special_save(path.name, diagnostics)
    try:
        files = {0: read_index(str(path), key)}
    except ForeignError as error:
        kind = identify_foreign(str(path))
        raise error if kind is None else kind.error(str(path), is_src=True) from error
    diagnostics.add(*_encryption_notes(files, key))
    return MergedCatalog(
        str(path), files, diagnostics=tuple(diagnostics), one_of_several=_rank_evidence(path)
    )


def _rank_evidence(path: Path) -> str:
    """Return the evidence that a file holds the tensors of one of several ranks, or "".

    The evidence of a link is in its own path and in that of its target.
    """
    for candidate in dict.fromkeys((path.absolute(), path.resolve())):
        folder, others = sibling_rank_folders(candidate)
        if others:
            return f"{folder} lies beside {shorten(others, 3)}"
        match = RANK_IN_NAME.search(candidate.name) or RANK_IN_NAME.fullmatch(candidate.parent.name)
        if match is not None and (match.string == candidate.name or int(match[1])):
            return f"{match.string} is a name of rank {int(match[1])}"
        numbered = MINDFORMERS_FILE.fullmatch(candidate.name)
        if numbered is not None and int(numbered["total"]) > 1:
            return f"{candidate.name} is a name of one of {int(numbered['total'])} files"
    return ""


def _refusals(path: Path) -> Iterator[FormatError]:
    """Yield the error of a file whose name marks it as incomplete."""
    if is_unfinished_name(path):
        reason, facts = "a file of a save that did not finish", ""
        hint = "rename it to .ckpt, if the file is complete"
        if path.suffix == PARTIAL:
            reason = "a temporary file of a run of ckpttool that did not end"
            facts = "zeros stand where nothing was written"
            hint = "the same command with --resume"
        yield UnsupportedError(str(path), None, reason, hint, facts)


def _problems(whole: Path, files: Iterable[Path] = ()) -> Iterator[Diagnostic]:
    """Yield the problems of a folder or file, or of the chosen files, that are incomplete."""
    saves = [find_unfinished_save(path) for path in (whole, *files)]
    for save in dict.fromkeys(filter(None, saves)):
        yield describe_unfinished_save("unfinished", save)
    if unfinished := find_unfinished_run(whole):
        yield unfinished
    yield from describe_record(whole)


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


def _encryption_notes(files: Mapping[int, FileIndex], key: Secret | None) -> Iterator[Diagnostic]:
    """Yield notes on an unused key, on plain files, and on checksums of encrypted files."""
    encrypted = {rank: file for rank, file in files.items() if file.cipher is not None}
    if key is not None and files and not encrypted:
        yield Diagnostic("encryption", "no file is encrypted: the key is not needed")
    plain = [rank for rank, file in files.items() if file.cipher is None and file.nbytes]
    if encrypted and plain:
        text = f"{format_ranks(plain)}: not encrypted, unlike {format_ranks(tuple(encrypted))}"
        facts = "one run encrypts all files or none"
        hint = "compare their dates; `ckpttool help mixed_encryption` explains"
        yield Diagnostic("mixed_encryption", text, hint, facts=facts, ranks=tuple(plain))
    zero_checksum = [rank for rank, file in encrypted.items() if file.attrs.get("crc_num") == "0"]
    if zero_checksum:
        text = f"{format_ranks(zero_checksum)}: encrypted with a checksum of 0, which is ignored"
        facts = "MindSpore writes this with crc_check and cannot read it"
        yield Diagnostic("encryption", text, facts=facts, ranks=tuple(zero_checksum))
