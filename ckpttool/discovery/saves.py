"""The files of ranks by their saves: names, records of the last save, traces of unfinished ones.

A folder may hold files of several steps and of several training runs.  MindSpore adds ``_1``,
``_2`` to a prefix that a folder has already.  This counter belongs to the folder of a rank, not to
the run: after a node was replaced, or with more ranks than before, the ranks of one run have
different counters.

MindFormers records the last save of a rank in ``meta.json`` in the rank's folder: an object with
``last_epoch`` and ``last_step`` (numbers) and ``last_ckpt_file`` (a name that ends in the same
step).  It is replaced when a save is complete.

Source
------
MindSpore 2.10 ``train/callback/_checkpoint.py`` (``_chg_ckpt_file_name_if_same_exist``);
MindFormers ``core/callback/callback.py`` (``record_last_ckpt_to_json``), ``tools/resume_ckpt.py``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from ckpttool.discovery.file_names import (
    RANK_IN_NAME,
    RankFile,
    SaveName,
    read_names,
    step_of,
)
from ckpttool.formats.local import list_folder
from ckpttool.formats.strict_json import read_json_object
from ckpttool.model.strategy import Strategy
from ckpttool.problems import Diagnostic, Diagnostics, FormatError, PlanError, join_clauses
from ckpttool.wording import format_ranks

_RECORD = "meta.json"
_BEGUN = ".tmp"  # MindSpore renames a file when all of it is written
MAX_BYTES = 1 << 16  # of meta.json: three short entries; what is larger is something else


class Run(NamedTuple):
    """A run in the folder of a rank, as far as names show: rank, series and counter."""

    rank: int
    prefix: str
    suffix: str
    counter: int


class SavedFile(Struct, frozen=True):
    """A file of a rank, and what its name says."""

    rank: int
    path: Path
    name: SaveName

    @property
    def save(self) -> SaveName:
        """The save that it is of: what the names of all its files have in common."""
        return self.name._replace(counter=None)

    @property
    def series(self) -> tuple[str, str]:
        """Prefix and suffix, which runs may have in common."""
        return self.name.prefix, self.name.suffix

    @property
    def counter(self) -> int:
        """The counter in its name; 0 for none, as in the first run of a folder."""
        return self.name.counter or 0

    @property
    def run(self) -> Run:
        """The part that all files of a run share in the folder of a rank."""
        return Run(self.rank, *self.series, self.counter)

    def is_called(self, name: str) -> bool:
        """Return whether ``name`` is that of the file, perhaps without its suffix.

        ``{rank}`` may stand for the number of the rank.
        """
        key = self.name.key
        return name in (self.path.name, self.path.stem, key, key.removesuffix(self.name.suffix))


class FoundStep(Struct, frozen=True):
    """A step of a folder, as far as names, headers and traces of saves show.

    ``name`` is what ``--step`` takes; None if the folder has one save and no steps, or if no rank
    has finished the file.  It is ``complete`` if each rank has its file, or others hold its slices;
    None if that is not known.  ``reason`` says why, or which replicas it needs.  ``ranks`` have a
    file; none if the metadata that says so cannot be read.
    """

    name: str | None
    step: str | None
    complete: bool | None
    reason: str
    ranks: tuple[int, ...]
    missing_ranks: tuple[int, ...]
    files: int
    nbytes: int
    is_chosen: bool
    damaged_ranks: tuple[int, ...] = ()

    @property
    def is_by_replicas(self) -> bool:
        """Whether it is complete only because replicas replace files."""
        return self.complete is True and bool(self.missing_ranks or self.damaged_ranks)

    def doubted(self, complete: bool | None, reason: str) -> FoundStep:
        """Return the step, at best so complete, for one more reason."""
        reasons = join_clauses(self.reason, reason)
        return replace(self, complete=self.complete and complete, reason=reasons)


class SavedFiles(Struct, frozen=True, dict=True):
    """The files of some ranks, of all saves.

    ``records`` has the file that the ``meta.json`` of a rank names, which may be lost.  ``begun``
    are files of saves that did not finish, under the names that they would have.
    """

    src: str
    files: tuple[SavedFile, ...]
    records: Mapping[int, SavedFile]
    begun: tuple[SavedFile, ...] = ()
    strategy: Strategy | None = None

    def covers(self, ranks: Collection[int]) -> bool:
        """Return whether some ranks hold all slices; False if no strategy says so."""
        return self.strategy is not None and self.strategy.is_covered_by(ranks)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that have a file, ascending."""
        return tuple(sorted({file.rank for file in self.files}))

    @cached_property
    def saves(self) -> Mapping[SaveName, Mapping[int, Sequence[SavedFile]]]:
        """Save to rank to files, the highest counter first."""
        saves: dict[SaveName, dict[int, list[SavedFile]]] = {}
        for file in sorted(self.files, key=lambda file: (file.rank, -file.counter)):
            saves.setdefault(file.save, {}).setdefault(file.rank, []).append(file)
        return saves

    @cached_property
    def last_counters(self) -> Mapping[tuple[int, tuple[str, str]], int]:
        """Rank and series to the highest counter."""
        ascending = sorted(self.files, key=lambda file: file.counter)
        return {(file.rank, file.series): file.counter for file in ascending}

    def is_recorded(self, file: SavedFile) -> bool:
        """Return whether the record of its rank names just this file."""
        record = self.records.get(file.rank)
        return record is not None and record.path == file.path

    def only(self, counts: Callable[[SavedFile], bool]) -> SavedFiles:
        """Return the files that count."""
        return replace(
            self,
            files=tuple(filter(counts, self.files)),
            records={rank: file for rank, file in self.records.items() if counts(file)},
            begun=tuple(filter(counts, self.begun)),
        )


def read_saved_files(
    src: str, files_of_ranks: Sequence[RankFile], diagnostics: Diagnostics
) -> SavedFiles:
    """Read what the names of files say, and the traces of saves beside them.

    A rank with two files of one name is refused.  ``diagnostics`` gets a note on broken records.
    """
    recorded, begun = _list_traces(files_of_ranks, diagnostics)
    by_path = _by_path(files_of_ranks)
    files = [by_path[file.path] for file in files_of_ranks]
    _refuse_equal_names(files)
    lost = [file for file in (*recorded, *begun) if file.path not in by_path]
    if lost:  # what their names say follows from those of the others, too
        by_path = {**_by_path([*files_of_ranks, *lost]), **by_path}
    records = {file.rank: by_path[file.path] for file in recorded}
    files.sort(key=lambda file: (file.rank, file.save.order, file.counter))
    return SavedFiles(src, tuple(files), records, tuple(by_path[file.path] for file in begun))


def _by_path(files: Sequence[RankFile]) -> dict[Path, SavedFile]:
    names = zip(files, read_names(files), strict=True)
    return {file.path: SavedFile(file.rank, file.path, name) for file, name in names}


def _refuse_equal_names(files: Iterable[SavedFile]) -> None:
    """Raise PlanError if a rank has two files of one name, in two folders."""
    paths: dict[tuple[int, SaveName], Path] = {}
    twice: dict[int, str] = {}
    for file in files:
        other = paths.setdefault((file.rank, file.name), file.path)
        if other != file.path:
            twice.setdefault(file.rank, f"{other} and {file.path}")
    if twice:
        ranks, facts = tuple(sorted(twice)), twice[min(twice)]
        message = f"two files of one step for {format_ranks(ranks)}"
        hint = "a --pattern that matches one file of each rank"
        raise PlanError([Diagnostic("source", message, hint=hint, facts=facts, ranks=ranks)])


def _list_traces(
    files: Iterable[RankFile], diagnostics: Diagnostics
) -> tuple[list[RankFile], list[RankFile]]:
    """Return the files that records name, and the files of saves that did not finish."""
    ranks_in: dict[Path, set[int]] = defaultdict(set)
    for file in files:
        ranks_in[file.path.parent].add(file.rank)
    recorded, begun = [], []
    broken: dict[int, FormatError] = {}
    for folder, ranks in sorted(ranks_in.items(), key=lambda item: min(item[1])):
        for path in list_folder(folder):
            rank = min(ranks)
            if path.name == _RECORD and len(ranks) == 1:
                try:
                    name = _read_record(path)
                    recorded.append(RankFile(rank, folder / name, name))
                except FormatError as error:
                    broken[rank] = error
            elif path.suffix == _BEGUN:
                match = RANK_IN_NAME.search(path.name) if len(ranks) > 1 else None
                rank = int(match[1]) if match else rank
                begun += [RankFile(rank, path, path.name)] if rank in ranks else []
    if broken:
        ranks_of, (first, *_) = tuple(broken), broken.values()
        message = f"{format_ranks(ranks_of)}: meta.json does not say which step was saved last"
        facts = f"{first.path}: {first.reason}"
        diagnostics.add(Diagnostic("doubt", message, facts=facts, ranks=ranks_of, path=first.path))
    return recorded, begun


def _read_record(path: Path) -> str:
    """Return the name of a file in a ``meta.json``; raise FormatError if it is broken."""
    entries = read_json_object(str(path), MAX_BYTES)
    epoch, step = (entries.get(key) for key in ("last_epoch", "last_step"))
    name = entries.get("last_ckpt_file")
    if not isinstance(name, str) or type(epoch) is not int or type(step) is not int:
        reason = "expected the numbers last_epoch, last_step and the name last_ckpt_file"
        raise FormatError(str(path), None, reason)
    recorded = step_of(name)
    if recorded is None or recorded[:2] != (epoch, step):
        raise FormatError(str(path), None, f"lists step {epoch}_{step} and the file {name}")
    return name
