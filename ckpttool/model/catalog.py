"""Catalogs: what a checkpoint has on disk, as slices of ranks, merged, or described by itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from operator import itemgetter

from ckpttool.errors import FormatError
from ckpttool.model.diagnostics import Command, Diagnostic, severities
from ckpttool.model.slicing import Description
from ckpttool.model.tensors import FileIndex, StoredTensor, TensorMeta


@dataclass(frozen=True, slots=True, eq=False)
class _TensorsOfRanks(Mapping[int, StoredTensor]):
    """Rank to stored tensor of one name; a tensor is made when it is looked up."""

    name: str
    files: Mapping[int, FileIndex]

    def __getitem__(self, rank: int) -> StoredTensor:
        return self.files[rank].tensors[self.name]

    def __contains__(self, rank: object) -> bool:
        return isinstance(rank, int) and rank in self.files and self.name in self.files[rank].header

    def __iter__(self) -> Iterator[int]:
        return (rank for rank, file in self.files.items() if self.name in file.header)

    def __len__(self) -> int:
        return sum(self.name in file.header for file in self.files.values())


@dataclass(frozen=True, kw_only=True)  # no slots: tables of names are made once and kept
class Catalog:
    """The headers of the files of a checkpoint.

    It is a `RankCatalog`, a `MergedCatalog` or a `SelfDescribedCatalog`.

    Attributes
    ----------
    root
        The folder or file that was scanned.
    files
        Rank to header, ascending; in a `MergedCatalog` number of file to header.
    step
        Label of the step that was taken, as in the file names (``"10_1"``); None if the names
        have none.
    damaged
        Ranks whose file could not be read, with the reason.
    diagnostics
        What was found while looking for the files: what was skipped or chosen, what prevents a
        conversion, and what does not fit together.  `scan` raises what is an error even for
        ``inspect``.
    strategy_files
        The strategy files that certainly belong to it, if it lies in the output folder of a
        MindFormers run; for those who name none.
    one_of_several
        What shows that its only file is one rank's of several, so that tensors may be slices;
        empty if nothing does.
    headers
        The different headers by the ranks that have them, ascending, from that of the lowest rank
        on.  What concerns all tensors of all ranks is computed from these few.
    """

    root: str = field(kw_only=False)
    files: Mapping[int, FileIndex] = field(kw_only=False)
    step: str | None = None
    damaged: Mapping[int, FormatError] = field(default_factory=dict)
    diagnostics: tuple[Diagnostic, ...] = ()
    strategy_files: tuple[str, ...] = ()
    one_of_several: str = ""
    headers: Mapping[tuple[int, ...], Mapping[str, StoredTensor]] = field(
        init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        found: dict[int, tuple[list[int], Mapping[str, StoredTensor]]] = {}
        for rank, file in self.files.items():
            found.setdefault(id(file.header), ([], file.header))[0].append(rank)
        headers = {tuple(ranks): header for ranks, header in found.values()}
        object.__setattr__(self, "headers", headers)

    def errors(self, command: Command = "convert") -> tuple[Diagnostic, ...]:
        """Return what is an error for a command."""
        column = severities(command)
        return tuple(one for one in self.diagnostics if column[one.code] == "error")

    @property
    def paths(self) -> tuple[str, ...]:
        """All files that were read as parts of the checkpoint."""
        return tuple(path for file in self.files.values() for path in file.paths)

    @cached_property
    def metas(self) -> Mapping[str, TensorMeta]:
        """Name to tensor, as the lowest rank that has one holds it."""
        found: dict[str, TensorMeta] = {}
        for header in self.headers.values():
            for name, tensor in header.items():
                found.setdefault(name, tensor.meta)
        return found

    @cached_property
    def holders(self) -> Mapping[str, tuple[int, ...]]:
        """The ranks that have each parameter, ascending; names in the order of the files."""
        found: dict[str, list[tuple[int, ...]]] = {}
        for ranks, header in self.headers.items():
            for name in header:
                found.setdefault(name, []).append(ranks)
        joined = {groups: tuple(sorted(chain(*groups))) for groups in map(tuple, found.values())}
        return {name: joined[tuple(groups)] for name, groups in found.items()}

    def tensors_of(self, name: str) -> Mapping[int, StoredTensor]:
        """Return rank to stored tensor of a name; ranks ascending."""
        return _TensorsOfRanks(name, self.files)

    def metas_of(self, name: str) -> dict[int, TensorMeta]:
        """Return rank to tensor of a name, without its bytes; ranks ascending."""
        groups = [
            dict.fromkeys(ranks, header[name].meta)
            for ranks, header in self.headers.items()
            if name in header
        ]
        if len(groups) == 1:
            return groups[0]
        return dict(sorted(chain(*(group.items() for group in groups)), key=itemgetter(0)))

    def is_expected(self, rank: int) -> bool:
        """Return whether it should have a file of a rank."""
        return True


@dataclass(frozen=True, kw_only=True)
class RankCatalog(Catalog):
    """A checkpoint whose ranks hold slices, one file or more for each rank.

    Attributes
    ----------
    missing_ranks
        Ranks that seem to belong to it and have no file: gaps, and rank folders without one.
    expected_ranks
        Ranks that it was written for, where its manifest names them and it is verified; None for
        all.
    """

    missing_ranks: tuple[int, ...] = ()
    expected_ranks: frozenset[int] | None = None

    def is_expected(self, rank: int) -> bool:
        """Return whether it should have a file of a rank."""
        return self.expected_ranks is None or rank in self.expected_ranks


@dataclass(frozen=True, kw_only=True)
class MergedCatalog(Catalog):
    """A checkpoint of full tensors: one file, or several with an index.

    A single file may be one rank's all the same, if the user gives its strategy.

    Attributes
    ----------
    indexes
        The index files that were read.
    common_tensors
        The tensors in the file for what no strategy lists, which goes to every rank as it is.
        True for one that an index names; any other may be one rank's slice.
    """

    indexes: tuple[str, ...] = ()
    common_tensors: Mapping[str, bool] = field(default_factory=dict)

    @property
    def paths(self) -> tuple[str, ...]:
        """All files that were read as parts of the checkpoint, the indexes first."""
        return (*self.indexes, *super().paths)


@dataclass(frozen=True, kw_only=True)
class SelfDescribedCatalog(Catalog):
    """A checkpoint without need of a strategy: ``description`` has the boxes of each rank."""

    description: Description
