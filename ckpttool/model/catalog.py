"""The catalog of a checkpoint: the headers of its files, and what was found beside them.

Discovery fills it from any kind of folder, and what is foreign in that folder ends there.
Thousands of ranks have few different headers.  So what follows from headers alone is computed here,
once for the ranks that share a header.  `ckpttool.checkpoint` decides what the tensors are.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from operator import itemgetter
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from ckpttool.model.names import ParameterOfState, match_states
from ckpttool.model.slicing import Description
from ckpttool.model.tensors import (
    CutShortError,
    FileIndex,
    FileStamp,
    Reads,
    SharedHeader,
    StoredFile,
    StoredTensor,
    TensorMeta,
)
from ckpttool.problems import Command, Diagnostic, FormatError, severities
from ckpttool.wording import Brief, count, format_bytes

_T = TypeVar("_T")


class Catalog(Brief, Struct, frozen=True, dict=True):
    """The headers of the files of a checkpoint.

    Attributes
    ----------
    files
        Rank to header, ascending; of a merged checkpoint, file number to header.
    step
        Label of the selected step, as in the file names (``"10_1"``); None if the names have none.
    damaged
        Rank to the error of its file, for files that could not be read.  Numbers that are not ranks
        if the checkpoint describes itself.  ``files`` may have what is left of them.
    diagnostics
        Files that were skipped or selected, problems that prevent a conversion, and files that
        contradict each other.  `scan` raises what is an error even for ``inspect``.
    documents
        The files that list where slices or tensors are stored: index files, or metadata.
    strategy_files
        The default strategy files: those that lie with the rank folders.
    one_of_several
        Evidence that the only file is one rank's of several, so that tensors may be slices.
    is_merged
        Whether the files hold full tensors: one file, or several with an index.  A single file may
        still be the file of one rank, if the user gives its strategy.
    common_tensors
        The tensors of the common file of a merged checkpoint, which loaders give to every rank.
        True if an index lists the tensor; other tensors may be slices of one rank.
    copies
        The stored copies of a tensor in other files than the index names.  They are not read, and
        ``files`` does not have them.
    description
        The boxes of each rank, if the checkpoint lists them and needs no strategy.
    missing_ranks
        Ranks without a file: gaps in the numbers, and rank folders without a checkpoint.
    expected_ranks
        The ranks that the manifest of a verified set lists; None for all.
    other_steps, steps_of_other_runs
        Other steps of the same run, with rank to path, and of other runs, as ``--step`` takes them,
        the newest first; None if all files are of one run.
    names_of
        Ranks to the names of their files, if no step was chosen; ``{rank}`` in them is the rank.
    reads
        What was read to find the files; their headers are in `FileIndex.reads`.
    """

    root: str
    files: Mapping[int, FileIndex]
    step: str | None = None
    damaged: Mapping[int, FormatError] = {}
    diagnostics: tuple[Diagnostic, ...] = ()
    documents: tuple[StoredFile, ...] = ()
    strategy_files: tuple[str, ...] = ()
    one_of_several: str = ""
    is_merged: bool = False
    common_tensors: Mapping[str, bool] = {}
    copies: Mapping[str, tuple[StoredTensor, ...]] = {}
    description: Description | None = None
    missing_ranks: tuple[int, ...] = ()
    expected_ranks: frozenset[int] | None = None
    other_steps: Mapping[str, Mapping[int, str]] = {}
    steps_of_other_runs: tuple[str, ...] | None = None
    names_of: Mapping[tuple[int, ...], tuple[str, ...]] = {}
    reads: Reads = Reads()

    def __post_init__(self) -> None:
        if self.needs_strategy:
            for rank, error in self.damaged.items():
                error.rank = rank

    @cached_property
    def headers(self) -> Mapping[tuple[int, ...], Mapping[str, StoredTensor]]:
        """The distinct headers by the ranks that share each, lowest rank first."""
        groups: dict[int, tuple[list[int], Mapping[str, StoredTensor]]] = {}
        for rank, file in self.files.items():
            groups.setdefault(id(file.header), ([], file.header))[0].append(rank)
        return {tuple(ranks): header for ranks, header in groups.values()}

    def _texts(self) -> Iterator[str]:
        yield f"{self.root}: {count(len(self.files), 'file' if self.is_merged else 'rank')}"
        yield f"step {self.step}" if self.step else ""
        yield format_bytes(sum(file.nbytes for file in self.files.values()))
        yield f"{len(self.damaged)} damaged" if self.damaged else ""

    def _rows(self) -> Iterator[Sequence[str]]:
        yield ("file" if self.is_merged else "rank", "path", "tensors", "size")
        for rank, file in self.files.items():
            path, tensors = file.paths[0], str(len(file.header))
            yield (str(rank), path, tensors, format_bytes(file.nbytes))

    def errors(self, command: Command = "convert") -> tuple[Diagnostic, ...]:
        """Return the diagnostics that are errors for a command."""
        column = severities(command)
        return tuple(problem for problem in self.diagnostics if column[problem.code] == "error")

    @property
    def common_attrs(self) -> dict[str, str]:
        """The attributes that the headers of all files have in common."""
        attrs = [{*file.attrs.items()} for file in self.with_remains().files.values()]
        return dict(sorted(set.intersection(*attrs))) if attrs else {}

    @property
    def indexes(self) -> tuple[str, ...]:
        """The index files of a merged checkpoint that were read."""
        return tuple(file.path for file in self.documents if self.is_merged)

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of all files of the checkpoint, indexes first."""
        return (*self.indexes, *chain(*(file.paths for file in self.files.values())))

    @property
    def stamps(self) -> dict[str, FileStamp | None]:
        """Path to stamp of every file that was read, documents included."""
        files = chain(self.documents, *(file.files for file in self.files.values()))
        return {file.path: file.stamp for file in files}

    @cached_property
    def metas(self) -> Mapping[str, TensorMeta]:
        """Name to tensor, full or a slice, as the lowest rank that has it stores it."""
        metas: dict[str, TensorMeta] = {}
        for header in self.headers.values():
            for name, tensor in header.items():
                metas.setdefault(name, tensor.meta)
        return metas

    @cached_property
    def _states(self) -> dict[tuple[str, ...], ParameterOfState]:
        return {}

    def match_states(self, strategy_names: Collection[str] = ()) -> ParameterOfState:
        """Return its `ckpttool.model.names.match_states`, computed once for equal names."""
        key = tuple(strategy_names)
        if key not in self._states:
            self._states[key] = match_states(strategy_names, self.metas)
        return self._states[key]

    @cached_property
    def holders(self) -> Mapping[str, tuple[int, ...]]:
        """Name to the ranks that have the parameter, ascending; names in the order of the files."""
        groups_of: dict[str, list[tuple[int, ...]]] = {}
        for ranks, header in self.headers.items():
            for name in header:
                groups_of.setdefault(name, []).append(ranks)
        joined = {
            groups: tuple(sorted(chain(*groups))) for groups in map(tuple, groups_of.values())
        }
        return {name: joined[tuple(groups)] for name, groups in groups_of.items()}

    def find_kinds(self) -> Mapping[str, Hashable]:
        """Return name to kind: tensors of a kind have equal types and shapes, in equal files."""
        kinds: dict[str, int] = {}
        numbers: dict[Hashable, int] = {}
        for place, header in enumerate(self.headers.values()):
            for name, tensor in header.items():
                meta = tensor.meta
                key = kinds.get(name), place, meta.dtype, meta.shape, meta.whole_shape
                kinds[name] = numbers.setdefault(key, len(numbers))
        return kinds

    @cached_property
    def _files_with(self) -> dict[int, Mapping[int, Mapping[str, StoredTensor]]]:
        return {}

    def files_with(self, name: str) -> Mapping[int, Mapping[str, StoredTensor]]:
        """Return rank to the tensors of its file, for the ranks that have the parameter ``name``.

        It is one object for all parameters that the same ranks have.
        """
        ranks = self.holders.get(name, ())
        if id(ranks) not in self._files_with:
            self._files_with[id(ranks)] = {rank: self.files[rank].tensors for rank in ranks}
        return self._files_with[id(ranks)]

    def metas_of(self, name: str) -> dict[int, TensorMeta]:
        """Return rank to header entry of the parameter ``name``; ranks ascending."""
        groups = [
            dict.fromkeys(ranks, header[name].meta)
            for ranks, header in self.headers.items()
            if name in header
        ]
        if len(groups) == 1:
            return groups[0]
        return dict(sorted(chain(*(group.items() for group in groups)), key=itemgetter(0)))

    def with_only(self, names: Collection[str]) -> Catalog:
        """Return the catalog as it would be if the files held only the tensors of these names."""

        def chosen(tensors: Mapping[str, _T]) -> dict[str, _T]:
            return {name: tensor for name, tensor in tensors.items() if name in names}

        headers = {id(header): chosen(header) for header in self.headers.values()}
        files = {}
        for rank, file in self.files.items():
            tensors: Mapping[str, StoredTensor] = headers[id(file.header)]
            if isinstance(file.tensors, SharedHeader):
                tensors = SharedHeader(tensors, file.tensors.file)
            files[rank] = replace(file, tensors=tensors)
        description = self.description
        if description is not None:
            description = replace(
                description,
                tensors=chosen(description.tensors),
                broken=description.broken & {*names},
                problems=tuple(
                    problem
                    for problem in description.problems
                    if problem.tensor is None or problem.tensor in names
                ),
            )
        return replace(
            self,
            files=files,
            description=description,
            common_tensors=chosen(self.common_tensors),
            copies=chosen(self.copies),
        )

    def with_remains(self) -> Catalog:
        """Return the catalog with what is left of files that are cut short among ``files``.

        They stay among the damaged files, too.  A description has theirs already.
        """
        if self.description is not None:
            return self
        left = {
            number: error.remains.index
            for number, error in self.cut_short.items()
            if error.remains.index.tensors or error.remains.are_all_known
        }
        return replace(self, files=dict(sorted({**left, **self.files}.items()))) if left else self

    @property
    def cut_short(self) -> Mapping[int, CutShortError]:
        """The errors of the damaged files that are cut short."""
        return {n: error for n, error in self.damaged.items() if isinstance(error, CutShortError)}

    @cached_property
    def whole_files(self) -> Mapping[int, FileIndex]:
        """The files that are not cut short."""
        if self.files.keys().isdisjoint(self.damaged) or self.description is not None:
            return self.files
        return {rank: file for rank, file in self.files.items() if rank not in self.damaged}

    @property
    def needs_strategy(self) -> bool:
        """Whether only a strategy, or the user, can say how the files of ranks fit together."""
        return not self.is_merged and self.description is None

    def is_expected(self, rank: int) -> bool:
        """Return whether the checkpoint should have a file for ``rank``."""
        return self.expected_ranks is None or rank in self.expected_ranks
