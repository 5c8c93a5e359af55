"""The runs whose files fit a strategy; files of other runs are ignored.

A folder has files of several runs after a training was started again.  A run on another number of
ranks, or with other layouts, left slices of other shapes, or parameters of another stage.  A rank's
slice and its layout imply the full shape.  All ranks of a stage must imply the same one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from ckpttool.discovery.file_names import find_numbered
from ckpttool.discovery.saves import Run, SavedFile, SavedFiles
from ckpttool.formats import read_indexes
from ckpttool.model.strategy import Strategy
from ckpttool.model.tensors import FileIndex
from ckpttool.problems import Diagnostic, Diagnostics, PlanError
from ckpttool.secret import Secret
from ckpttool.wording import shorten

# Parameter to the full shape that a slice implies; None for one of another stage.
_Implied: TypeAlias = "frozenset[tuple[str, tuple[int, ...] | None]]"


def drop_unfit_runs(
    saved: SavedFiles,
    strategy: Strategy,
    wanted: str | None,
    key: Secret | None,
    diagnostics: Diagnostics,
) -> SavedFiles:
    """Return the files without those of runs that do not fit the strategy.

    One header of each run is read, and only if ranks have files of several runs.  A run is dropped
    if another one fits on all ranks of the stage, or on enough ranks to hold all slices.  It is
    kept if it holds a parameter that the other lacks.  A ``wanted`` file is read all the same, and
    the error about its slices says what is wrong.
    """
    runs: dict[Run, list[SavedFile]] = defaultdict(list)
    for file in saved.files:
        if file.rank in strategy.ranks:
            runs[file.run].append(file)
    if len({run[1:] for run in runs}) < 2:
        return saved
    headers = _read_newest(runs, key)
    metas = {name: tensor.meta for file in headers.values() for name, tensor in file.header.items()}
    strategy, _ = strategy.resolve(metas, is_rest_decided=True)
    implied = {run: _implied_shapes(strategy, run.rank, file) for run, file in headers.items()}
    dropped: list[Run] = []
    for stage in range(strategy.stages):
        ranks = strategy.ranks_of(stage)
        holding: dict[_Implied, set[int]] = defaultdict(set)
        for run, shapes in implied.items():
            if run.rank in ranks and all(shape is not None for _, shape in shapes):
                holding[shapes].add(run.rank)
        fits = {shapes for shapes, of in holding.items() if strategy.is_covered_by(of, stage)}
        names = {
            name for run, file in headers.items() if implied[run] in fits for name in file.header
        }
        if fits:
            dropped += [
                run
                for run, file in headers.items()
                if run.rank in ranks and implied[run] not in fits
                if names.issuperset(file.header) or None in dict(implied[run]).values()
            ]
    is_wanted = wanted is not None and any(
        file.run in dropped and file.is_called(wanted) for file in saved.files
    )
    if not dropped or is_wanted:
        return saved
    names_of = dict.fromkeys(runs[run][0].path.name for run in dropped)
    message = f"{shorten(names_of, 3)}: files of a run that does not fit the strategy: ignored"
    ranks_of = tuple(sorted({run.rank for run in dropped}))
    diagnostics.add(Diagnostic("skipped", message, ranks=ranks_of))
    unfit = {*dropped}  # of thousands of ranks
    return saved.only(lambda file: file.run not in unfit)


def require_steps(saved: SavedFiles, key: Secret | None, *, are_steps: bool) -> None:
    """Require that files whose names differ in the step are the steps of one card.

    Files that are not readable show nothing.  ``are_steps`` says that the user named a step.  Else
    PlanError: the files of a run hold tensors of other names or shapes, or the steps may be ranks.
    """
    names = [file.path.name for file in saved.files]
    may_be_ranks = not are_steps and any(find_numbered(names, are_files=False))
    message = "names that differ in one number: that of a step, or of a rank"
    hint = "--pattern with {rank} for the number of a rank, or --step with one of these steps"
    runs: dict[Run, list[str]] = defaultdict(list)
    for file in saved.files:
        runs[file.run].append(str(file.path))
    for paths in runs.values():
        headers = [header for header in read_indexes(paths, key) if isinstance(header, FileIndex)]
        if len({_shapes_in(header) for header in headers if header.nbytes}) > 1:
            message = "names differ in the step, but the files hold other tensors"
            hint, may_be_ranks = "--pattern with {rank} for the number, if they are of ranks", True
    if may_be_ranks:
        problem = Diagnostic("source", message, hint=hint, facts=shorten(names, 3), where=saved.src)
        raise PlanError([problem])


def slices_of(
    files: Iterable[SavedFile], key: Secret | None
) -> set[frozenset[tuple[str, tuple[int, ...]]]]:
    """Return names and shapes in the newest readable file of each run of each rank."""
    runs: dict[Run, list[SavedFile]] = defaultdict(list)
    for file in files:
        runs[file.run].append(file)
    return {_shapes_in(header) for header in _read_newest(runs, key).values()}


def _shapes_in(file: FileIndex) -> frozenset[tuple[str, tuple[int, ...]]]:
    return frozenset((name, tensor.meta.shape) for name, tensor in file.header.items())


def _read_newest(
    runs: Mapping[Run, Sequence[SavedFile]], key: Secret | None
) -> dict[Run, FileIndex]:
    left = {run: sorted(files, key=lambda file: file.save.order) for run, files in runs.items()}
    headers = {}
    while left:
        paths = [str(files[-1].path) for files in left.values()]
        for run, read in zip([*left], read_indexes(paths, key), strict=True):
            left[run].pop()
            if isinstance(read, FileIndex) and read.nbytes:
                headers[run] = read
            if run in headers or not left[run]:
                del left[run]
    return headers


def _implied_shapes(strategy: Strategy, rank: int, file: FileIndex) -> _Implied:
    """Return the full shapes that the slices of a rank imply under a strategy."""
    implied: list[tuple[str, tuple[int, ...] | None]] = []
    for name, tensor in file.header.items():
        layouts = strategy.layouts.get(name, ())
        shape = tensor.meta.shape
        layout = next((candidate for candidate in layouts if rank in candidate.ranks), None)
        if layout is not None and len(shape) == len(layout.slice_counts) and layout.is_even:
            implied.append((name, layout.implied_shape(shape)))
        elif layouts and layout is None:
            implied.append((name, None))
    return frozenset(implied)
