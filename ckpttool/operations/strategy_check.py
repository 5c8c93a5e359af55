"""Check which of some strategies fits a checkpoint, and which numbers of devices its axes allow.

The files are scanned once, and resolved with each strategy.  Samples are shared: a second strategy
reads only what the first one left open.

A strategy *does not fit* if names, shapes or contents contradict it.  It *fits* if nothing does,
nothing is found, and for every tensor something could have contradicted it (`_unproven`), or if the
manifest of the set names it.  Else *it cannot be known*.  What verify warns of is found, too: a
strategy may be right, and its files not.
"""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor
from functools import partial
from pathlib import Path
from typing import Literal

from ckpttool.checkpoint.checkpoint import RANK_SPECIFIC_NAMES, Checkpoint, ResolveOptions
from ckpttool.checkpoint.contents import sample_ranks
from ckpttool.checkpoint.evidence import Evidence, answer
from ckpttool.checkpoint.recorded import limit_to_written_ranks, noted_other_strategy
from ckpttool.checkpoint.resolve import resolving
from ckpttool.checkpoint.samples import SampledTensor
from ckpttool.checks import is_refused, run_checks
from ckpttool.concurrency import InlineExecutor
from ckpttool.discovery.scan import scan
from ckpttool.formats.local import is_file, list_readable
from ckpttool.model.catalog import Catalog
from ckpttool.model.layout import Layout, divisors
from ckpttool.model.slicing import FullTensor, LayoutSlicing
from ckpttool.model.strategy import Strategy, shard_equally
from ckpttool.operations.describe import summarize
from ckpttool.operations.look import with_complete_step
from ckpttool.operations.summary import names_to_sample
from ckpttool.problems import CkptToolError, Diagnostic, raise_all, severities
from ckpttool.records import record, replace
from ckpttool.strategy_files.folders import SUFFIXES, are_strategies, is_strategy
from ckpttool.strategy_files.reader import read_strategy
from ckpttool.wording import format_difference

Verdict = Literal["fits", "unknown", "misfit"]
VERDICTS: tuple[Verdict, ...] = ("fits", "unknown", "misfit")  # the best first

_GRAVE = ("error", "warning")
AGAINST = frozenset({"strategy", "invalid_strategy", "contradicted", "replica", "shape", "options"})

Aspect = Literal["axis", "order", "owners"]


@record
class Candidate:
    """A strategy, and what the checkpoint shows of it.

    Attributes
    ----------
    path
        The file or folder.
    verdict
        Whether it fits.
    strategy
        What it says, as contents correct it; None if it cannot be read.
    listed, tensors
        Number of tensors of the checkpoint that it lists, and of all.
    sampled, agreeing
        Number of tensors of which samples were read, and of those whose replicas were compared and
        are equal.
    shaped
        Number of sharded tensors of which it lists the full shape that the slices form.
    unproven
        What nothing could have contradicted, to the names of these tensors: on which axis they are
        sharded, in which order ranks hold their slices, or which ranks hold equal slices.
    rivals
        Paths of other strategies that shard tensors differently, and that nothing contradicts
        either, to the names of these tensors.
    findings
        Errors and warnings; those that contradict it come first.
    checkpoint
        The full tensors; None if it cannot be read.
    """

    path: str
    verdict: Verdict
    strategy: Strategy | None
    listed: int
    tensors: int
    sampled: int
    agreeing: int
    shaped: int
    unproven: tuple[tuple[Aspect, tuple[str, ...]], ...]
    rivals: tuple[tuple[str, tuple[str, ...]], ...]
    findings: tuple[Diagnostic, ...]
    checkpoint: Checkpoint | None

    @property
    def is_open(self) -> bool:
        """Whether nothing was found against it."""
        return self.checkpoint is not None and not self.findings

    @property
    def is_recorded(self) -> bool:
        """Whether the manifest of the checkpoint names it or its equal."""
        return self.checkpoint is not None and self.checkpoint.is_recorded


def check_strategies(
    catalog: Catalog | str | os.PathLike[str],
    strategies: Sequence[str | os.PathLike[str] | Strategy],
    executor: Executor | None = None,
) -> tuple[Candidate, ...]:
    """Return what a checkpoint shows of each strategy, the best first.

    Parameters
    ----------
    catalog
        The checkpoint: a path, or what `scan` returns without a strategy.
    strategies
        Each is a strategy, its file, or the folder with the files of its stages.
    executor
        Reads samples; by default the caller's own thread.

    Raises
    ------
    CkptToolError
        No file of the checkpoint can be read.
    """
    if not isinstance(catalog, Catalog):
        catalog = scan(catalog)
    if not catalog.holders:
        raise_all(catalog.damaged.values())
    evidence = Evidence()
    executor = executor or InlineExecutor()
    named = [one if isinstance(one, Strategy) else os.fspath(one) for one in strategies]
    found = [_try(catalog, one, executor, evidence) for one in named]
    return tuple(sorted(_compare(found), key=_order))


MAX_CANDIDATES = 20  # strategies of a folder that are tried to propose one


def find_fitting(src: str, folders: Iterable[Path], *, is_target: bool) -> str:
    """Return a strategy in some folders, a file or one of stages, that fits a checkpoint best.

    It is "" if none does.

    That of a target lists tensors of the checkpoint, and shards those that are full evenly.
    """
    inside = (path for one in dict.fromkeys(folders) for path in list_readable(one))
    files = [p for p in inside if _is_candidate(p)]
    try:
        catalog = scan(src)
        if is_target:
            fitting = (
                str(path) for path in files[:MAX_CANDIDATES] if _may_be_target(catalog, path)
            )
            return next(fitting, "")
        found = check_strategies(catalog, files[:MAX_CANDIDATES])
    except (CkptToolError, OSError):
        return ""  # the error that is explained says what is wrong with the command line
    return next((one.path for one in found if one.is_open and one.listed), "")


def _is_candidate(path: Path) -> bool:
    """Return whether a path is a strategy file, or a folder of nothing but these."""
    if is_file(path):
        return path.suffix in SUFFIXES and is_strategy(path)
    return are_strategies([str(path)])


def _may_be_target(catalog: Catalog, path: Path) -> bool:
    """Return whether a strategy lists tensors of a checkpoint, and divides full ones."""
    try:
        layouts = read_strategy(path).layouts
    except CkptToolError:
        return False
    common = [(meta, layout) for n, meta in catalog.metas.items() for layout in layouts.get(n, ())]
    return bool(common) and (
        not catalog.is_merged or all(_divides(layout, meta.shape) for meta, layout in common)
    )


def _divides(layout: Layout, shape: tuple[int, ...]) -> bool:
    counts = layout.slice_counts
    return len(counts) == len(shape) and not any(map(operator.mod, shape, counts))


def _order(one: Candidate) -> tuple[int, int, int, int, int]:
    evidence, unproven = one.agreeing + one.shaped, sum(len(names) for _, names in one.unproven)
    return VERDICTS.index(one.verdict), len(one.findings), -evidence, unproven, -one.listed


def _try(
    catalog: Catalog, given: str | Strategy, executor: Executor, evidence: Evidence
) -> Candidate:
    """Return what the checkpoint shows of one strategy, by itself."""
    path, tensors = given if isinstance(given, str) else given.origin, len(catalog.holders)
    nothing = Candidate(path, "unknown", None, 0, tensors, 0, 0, 0, (), (), (), None)
    try:
        strategy = read_strategy([given]) if isinstance(given, str) else given
    except CkptToolError as error:
        return replace(nothing, findings=error.diagnostics)
    listed = len(strategy.layouts.keys() & catalog.holders.keys())
    try:
        steps = resolving(
            limit_to_written_ranks(catalog, strategy),
            strategy,
            ResolveOptions(),
            contents="samples",
            is_refused=partial(is_refused, command="verify"),
            option="a strategy",
        )
        checkpoint = with_complete_step(answer(steps, executor, evidence))
    except CkptToolError as error:
        findings, codes = error.diagnostics, {one.code for one in error.diagnostics}
        verdict: Verdict = "misfit" if codes & AGAINST else "unknown"
        return replace(
            nothing, verdict=verdict, strategy=strategy, listed=listed, findings=findings
        )
    problems = [*run_checks(checkpoint, "verify")]
    other = noted_other_strategy(checkpoint.strategy)
    if other is not None and checkpoint.strategy.is_as_written:  # read by the layouts of the set
        problems.append(replace(other, code="strategy"))
    try:
        problems += _differing_unlisted(checkpoint, executor, evidence)
    except CkptToolError as error:
        problems += error.diagnostics
    problems += () if checkpoint.unread is None else checkpoint.unread.diagnostics
    found = [one for one in problems if _is_grave(one)]
    found.sort(key=lambda one: one.code not in AGAINST)
    is_wrong = any(one.code in AGAINST for one in found)
    unproven = () if is_wrong or checkpoint.is_recorded else tuple(_unproven(checkpoint))
    verdict = "misfit" if is_wrong else "unknown" if found or unproven else "fits"
    return Candidate(
        path,
        verdict,
        checkpoint.strategy,
        len(checkpoint.strategy.layouts.keys() & catalog.holders.keys()),
        tensors,
        len(checkpoint.sampled),
        sum(map(_agrees, checkpoint.sampled)),
        sum(map(_has_listed_shape, checkpoint.tensors)),
        unproven,
        (),
        tuple(found),
        checkpoint,
    )


def _is_grave(one: Diagnostic) -> bool:
    """Return whether verify would warn of a problem, or a conversion would refuse it."""
    return severities("verify")[one.code] in _GRAVE or severities("convert")[one.code] == "error"


def _unproven(checkpoint: Checkpoint) -> Iterator[tuple[Aspect, tuple[str, ...]]]:
    """Yield what nothing could have contradicted, and the tensors.

    Slices alone do not show their axis: a full shape does, or that there is only one axis.  Nor do
    they show their order if there are several ways to arrange them by device axes, which there are
    unless their number is prime.  Contents show which ranks hold equal slices.
    """
    sampled = {one.tensor.name: one for one in checkpoint.sampled}
    indexes = [one for one in checkpoint.indexes.values() if not isinstance(one, Exception)]
    found: dict[Aspect, list[str]] = {"axis": [], "order": [], "owners": []}
    for one in checkpoint.tensors:
        if not isinstance(one.slicing, LayoutSlicing) or not one.has_layout:
            continue
        layout, slices = one.layout, math.prod(one.layout.slice_counts)
        in_index = any(one.name in index for index in indexes)
        has_shape = in_index or layout.full_shape == one.meta.shape
        is_one_way = has_shape and slices in (1, len(layout.ranks))
        if slices > 1 and not has_shape and len(one.meta.shape) > 1:
            found["axis"].append(one.name)
        if len(divisors(slices)) > 2 or layout.fields > 1:
            found["order"].append(one.name)
        if not (len(layout.ranks) == 1 or is_one_way or _shows_owners(sampled.get(one.name))):
            found["owners"].append(one.name)
    yield from ((aspect, tuple(names)) for aspect, names in found.items() if names)


def _shows_owners(one: SampledTensor | None) -> bool:
    """Return whether samples show which ranks hold equal slices of a tensor."""
    if one is None or one.is_constant:
        return False
    if one.tensor.layout.replicas == 1:
        return not one.is_spot_check
    return _agrees(one)


def _differing_unlisted(
    checkpoint: Checkpoint, executor: Executor, evidence: Evidence
) -> Iterator[Diagnostic]:
    """Yield the tensors that the strategy omits, and of which ranks hold different samples."""
    if checkpoint.is_incomplete:
        return
    names = names_to_sample(summarize(checkpoint).entries)
    for name, groups, _ in answer(sample_ranks(checkpoint.catalog, names), executor, evidence):
        if len(groups) > 1 and name not in RANK_SPECIFIC_NAMES:
            text, facts = (
                "not in the strategy, and different between ranks",
                format_difference(groups),
            )
            yield Diagnostic("unlisted", text, facts=facts, tensor=name)


def _agrees(one: SampledTensor) -> bool:
    """Return whether replicas of a tensor were compared, and are equal without being constant."""
    has_compared = any(len(ranks) > 1 for ranks in one.sampled)
    return has_compared and not one.differing_groups and not one.is_constant


def _has_listed_shape(one: FullTensor) -> bool:
    """Return whether the strategy lists the full shape that the slices of a tensor form."""
    if not isinstance(one.slicing, LayoutSlicing):
        return False
    layout = one.slicing.layout
    return max(layout.slice_counts, default=1) > 1 and layout.full_shape == one.meta.shape


def _compare(found: Sequence[Candidate]) -> Iterator[Candidate]:
    """Yield the candidates with their rivals, which leave them in doubt."""
    open_ones = [one for one in found if one.is_open]
    for one in found:
        rivals = tuple(
            (other.path, names)
            for other in open_ones
            if one.is_open and other is not one and (names := _differing(one, other))
        )
        yield replace(one, verdict="unknown", rivals=rivals) if rivals else one


def _differing(one: Candidate, other: Candidate) -> tuple[str, ...]:
    """Return the tensors of the checkpoint that two strategies shard differently."""
    assert one.strategy is not None, "it was resolved"
    assert other.strategy is not None, "it was resolved"
    ours, theirs = one.strategy.layouts, other.strategy.layouts
    assert one.checkpoint is not None, "it was resolved"
    held = one.checkpoint.catalog.holders
    return tuple(
        name
        for name in held
        if name in ours and name in theirs and not shard_equally(ours[name], theirs[name])
    )


# ------------------------------------------------------------------------------- numbers of devices


@record
class Axis:
    """An axis of tensors: their names, folded as in inspect, its number and its elements."""

    tensor: str
    axis: int
    size: int


@record
class DeviceFit:
    """A device matrix of a stage, replicas and slices, and the axes that do not divide by it."""

    device_matrix: tuple[int, int]
    in_the_way: tuple[Axis, ...]


def fit_devices(checkpoint: Checkpoint, devices: int) -> tuple[DeviceFit, ...]:
    """Return which device matrices of a stage fit the axes of the parameters.

    Where a strategy or the checkpoint says which axes are sharded, these count.  Else all axes of
    parameters with two axes or more do.

    Parameters
    ----------
    checkpoint
        The full tensors.
    devices
        The ranks of a stage.
    """
    axes = tuple(_axes(checkpoint))
    divisors = [n for n in range(1, devices + 1) if devices % n == 0]
    return tuple(
        DeviceFit((devices // n, n), tuple(one for one in axes if one.size % n)) for n in divisors
    )


def _axes(checkpoint: Checkpoint) -> Iterator[Axis]:
    """Yield the axes of parameters that are, or may be, sharded."""
    for row in summarize(checkpoint).rows:
        shape, placement = row.first.shape, row.first.placement
        if shape is None or "" not in row.prefixes:
            continue
        is_known = placement.is_listed and placement.slice_counts is not None
        for axis, size in enumerate(shape):
            is_sharded = placement.cuts[axis : axis + 1] > (1,) if is_known else len(shape) > 1
            if is_sharded and size > 1:
                yield Axis(row.pattern, axis, size)
