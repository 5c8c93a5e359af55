"""The runs whose files fit a strategy; files of other runs are no candidates.

A folder has files of several runs after a training was started again.  A run on another number of
ranks, or with other layouts, left slices of other shapes, or parameters of another stage.  A rank's
slice and its layout imply the full shape.  All ranks of a stage must imply the same one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from ckpttool.discovery.saves import SavedFile, SavedFiles
from ckpttool.formats import read_indexes
from ckpttool.model.strategy import Strategy
from ckpttool.model.tensors import FileIndex
from ckpttool.secret import Secret

_Runs: TypeAlias = "dict[tuple[int, tuple[str, str, int]], list[SavedFile]]"
# Parameter to the full shape that a slice implies; None for one of another stage.
_Implied: TypeAlias = "frozenset[tuple[str, tuple[int, ...] | None]]"


def drop_unfit_runs(found: SavedFiles, strategy: Strategy, key: Secret | None) -> SavedFiles:
    """Return the files without those of runs that do not fit the strategy.

    One header of each run is read, and only if ranks have files of several runs.  A run is dropped
    if another one fits all ranks of the stage, or as many as hold all slices.
    """
    runs: _Runs = defaultdict(list)
    for file in found.files:
        if file.rank in strategy.ranks:
            runs[file.rank, file.run].append(file)
    if len({run for _, run in runs}) < 2:
        return found
    headers = _read_newest(runs, key)
    implied = {one: _implied_shapes(strategy, one[0], file) for one, file in headers.items()}
    dropped = []
    for stage in range(strategy.stages):
        ranks = strategy.ranks_of(stage)
        holding: dict[_Implied, set[int]] = defaultdict(set)
        for (rank, _), shapes in implied.items():
            if rank in ranks and all(shape is not None for _, shape in shapes):
                holding[shapes].add(rank)
        fits = [shapes for shapes, of in holding.items() if strategy.is_covered_by(of, stage)]
        if fits:
            unfit = (one for one in implied if one[0] in ranks and implied[one] not in fits)
            dropped += [file for one in unfit for file in runs[one]]
    return found.without(dropped)


def parameters_of(files: Iterable[SavedFile], key: Secret | None) -> set[str]:
    """Return the parameters in the newest readable file of each run of each rank."""
    runs: _Runs = defaultdict(list)
    for file in files:
        runs[file.rank, file.run].append(file)
    return {name for header in _read_newest(runs, key).values() for name in header.header}


def _read_newest(
    runs: Mapping[tuple[int, tuple[str, str, int]], Sequence[SavedFile]], key: Secret | None
) -> dict[tuple[int, tuple[str, str, int]], FileIndex]:
    """Return the header of the newest readable file of each run of each rank."""
    left = {one: sorted(files, key=lambda file: file.save.order) for one, files in runs.items()}
    headers = {}
    while left:
        paths = [str(files[-1].path) for files in left.values()]
        for one, read in zip([*left], read_indexes(paths, key), strict=True):
            left[one].pop()
            if isinstance(read, FileIndex) and read.nbytes:
                headers[one] = read
            if one in headers or not left[one]:
                del left[one]
    return headers


def _implied_shapes(strategy: Strategy, rank: int, file: FileIndex) -> _Implied:
    """Return the full shapes that the slices of a rank imply under a strategy."""
    implied: list[tuple[str, tuple[int, ...] | None]] = []
    for name, tensor in file.header.items():
        layouts = strategy.layouts.get(name, ())
        shape = tensor.meta.shape
        layout = next((one for one in layouts if rank in one.ranks), None)
        if layout is not None and len(shape) == len(layout.slice_counts) and layout.is_even:
            implied.append((name, layout.implied_shape(shape)))
        elif layouts and layout is None:
            implied.append((name, None))
    return frozenset(implied)
