"""Check which of some strategies fits a checkpoint.

The files are scanned once, and resolved with each strategy.  Samples are shared: a second strategy
reads only what the first one left open.

The verdict is *no* if names, shapes or contents contradict a strategy, or if it cannot be read.  It
is *proven* if nothing is found and nothing is left open: for every tensor, something could have
contradicted the strategy (`_unproven`), or the manifest of the set names it.  Else it is
*possible*.  The findings are those of verify: a strategy may be right, and its files not.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from itertools import chain
from typing import Literal

from msgspec.structs import replace

from ckpttool.checkpoint.checkpoint import Checkpoint, Contents, Reading
from ckpttool.checkpoint.evidence import Evidence
from ckpttool.checkpoint.from_manifest import noted_other_strategy
from ckpttool.checkpoint.samples import SampledTensor
from ckpttool.concurrency import InlineExecutor, OpenProgress
from ckpttool.discovery.scan import CheckpointFiles, scan
from ckpttool.model.catalog import Catalog
from ckpttool.model.joining import format_names, join_alike
from ckpttool.model.layout import divisors
from ckpttool.model.slicing import FullTensor, LayoutSlicing
from ckpttool.model.strategy import Strategy
from ckpttool.operations.answer import Answer, Count, Document, Reported, Some
from ckpttool.operations.look import Subject, look
from ckpttool.operations.verification import sample_unlisted
from ckpttool.problems import CkptToolError, Diagnostic, Diagnostics, raise_all, severities
from ckpttool.strategy_files.reader import Layouts, read_strategy
from ckpttool.wording import Brief, count

Verdict = Literal["proven", "possible", "no"]
VERDICTS: tuple[Verdict, ...] = ("proven", "possible", "no")  # the best first

_GRAVE = ("error", "warning")
AGAINST = frozenset({"strategy", "invalid_strategy", "contradicted", "replica", "shape", "options"})

Aspect = Literal["axis", "order", "owners"]
_UNPROVEN: Mapping[Aspect, str] = {
    "axis": "nothing shows which axis of {} is sharded",
    "order": "nothing shows in which order ranks hold the slices of {}",
    "owners": "nothing shows which ranks hold the same of {}",
}


class Candidate(Brief, Answer, frozen=True):
    """A strategy, and what the checkpoint shows of it.

    Attributes
    ----------
    path
        The file or folder.
    verdict
        Whether it fits; possible if nothing contradicts it, and it may be wrong.
    ranks, stages
        Its number of ranks, or of pipeline stages; null if it cannot be read.
    files
        Number of its ranks that have a file.
    listed
        Number of tensors of the checkpoint that it lists.
    tensors
        Number of tensors of the checkpoint.
    sampled
        Number of sampled tensors.
    agreeing
        Number of those whose replicas were compared and are equal.
    shaped
        Number of sharded tensors whose full shape is the one that it lists.
    recorded
        Whether the manifest of the checkpoint names it or its equal.
    unproven
        What nothing could have contradicted, to the names of the tensors: on which axis they are
        sharded, in which order ranks hold their slices, or which ranks hold equal slices.
    findings
        Errors and warnings; those that contradict it come first.
    """

    path: str
    verdict: Verdict
    ranks: Some | None
    stages: Some | None
    files: Count
    listed: Count
    tensors: Count
    sampled: Count
    agreeing: Count
    shaped: Count
    recorded: bool
    unproven: dict[Aspect, tuple[str, ...]]
    findings: Reported

    @property
    def is_open(self) -> bool:
        """Whether it may be right: nothing contradicts it."""
        return self.verdict != "no"

    @property
    def reasons(self) -> tuple[Diagnostic, ...]:
        """The findings of many files and tensors as one each; if it does not fit, why not first."""
        return tuple(join_alike(self.findings))

    @property
    def evidence(self) -> str:
        """The comparisons if the strategy may be right, else what contradicts it."""
        if not self.is_open:
            return self.reasons[0].message
        compared = (
            f"{self.files} of {count(self.ranks or 0, 'rank')}",
            f"{self.listed} of {count(self.tensors, 'tensor')}",
            "replicas equal" if self.agreeing else "",
            f"full shapes of {count(self.shaped, 'sharded tensor')} as listed" * bool(self.shaped),
            "the manifest names it or its equal" if self.recorded else "",
        )
        return ", ".join(filter(None, compared))

    @property
    def doubts(self) -> tuple[str, ...]:
        """What nothing could have contradicted, in words."""
        return tuple(
            f"{_UNPROVEN[aspect].format(count(len(names), 'tensor'))}: {format_names(names)}"
            for aspect, names in self.unproven.items()
        )

    def _texts(self) -> Iterator[str]:
        yield f"{self.path}: {self.verdict}: {self.evidence}"

    def _remarks(self) -> Iterator[str]:
        yield from map(str, self.reasons[not self.is_open :])
        yield from self.doubts


class Candidates(Brief, tuple[Candidate, ...]):
    """The strategies with what the checkpoint shows of each, the best first."""

    __slots__ = ()

    def _texts(self) -> Iterator[str]:
        yield count(len(self), "candidate")

    def _rows(self) -> Iterator[tuple[str, str, str]]:
        yield "strategy", "verdict", "evidence"
        for it in self:
            yield it.path, it.verdict, "\n".join((it.evidence, *it._remarks()))


class StrategyCheck(Document, frozen=True):
    """The JSON document of strategy check.

    Attributes
    ----------
    path
        The checkpoint.
    step
        Its step, as in the file names; null if no name has one.
    strategies
        The strategies, the best first.
    """

    schema = 2

    path: str
    step: str | None
    strategies: tuple[Candidate, ...]


def check_strategies(
    catalog: CheckpointFiles,
    strategies: Sequence[Layouts],
    executor: Executor | None = None,
) -> Candidates:
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
    catalog = scan(catalog)
    if not catalog.holders:
        raise_all(catalog.damaged.values())
    evidence = Evidence()
    executor = executor or InlineExecutor()
    tried = (_try(catalog, it, executor, evidence) for it in strategies)
    return Candidates(sorted(tried, key=_order))


def _order(it: Candidate) -> tuple[int, int, int, int, int]:
    evidence, unproven = it.agreeing + it.shaped, sum(map(len, it.unproven.values()))
    return VERDICTS.index(it.verdict), len(it.findings), -evidence, unproven, -it.listed


def _try(catalog: Catalog, given: Layouts, executor: Executor, evidence: Evidence) -> Candidate:
    """Return what the checkpoint shows of one strategy, by itself."""
    path, column = "the strategy", severities("verify")
    if isinstance(given, str | os.PathLike):
        path = os.fspath(given)
    elif isinstance(given, Strategy):
        path = given.origin
    tensors, found = catalog.holders.keys(), Diagnostics("verify", strategy_option="a strategy")
    candidate = Candidate(
        *(path, "no", None, None, 0, 0, len(tensors), 0, 0, 0, False, {}),
        Reported((), column),
    )
    try:
        strategy = read_strategy(given)
    except CkptToolError as error:
        return replace(candidate, findings=Reported(error.diagnostics, column))
    subject = Subject(catalog, strategy, evidence=evidence)
    sight = look(subject, found, executor, contents="samples", read_more=_sample)
    checkpoint, contents = sight.checkpoint, sight.contents
    strategy = strategy if checkpoint is None else checkpoint.strategy
    problems = [*found, *chain(*(error.diagnostics for error in found.failures))]
    other = noted_other_strategy(strategy)
    if other is not None and strategy.is_as_written:  # read by the layouts of the set
        problems.append(replace(other, code="strategy"))
    grave = [problem for problem in problems if _is_grave(problem)]
    grave.sort(key=lambda problem: not _is_against(problem))
    candidate = replace(
        candidate,
        verdict="no" if any(map(_is_against, grave)) else "possible",
        ranks=len(strategy.ranks),
        stages=strategy.stages,
        files=len(catalog.files.keys() & {*strategy.ranks}),
        listed=len(strategy.layouts.keys() & tensors),
        findings=Reported(grave, column),
    )
    if checkpoint is None or not candidate.is_open:
        return candidate
    unproven = {} if checkpoint.is_recorded else dict(_unproven(checkpoint, contents))
    return replace(
        candidate,
        verdict="possible" if grave or unproven else "proven",
        sampled=len(contents.sampled),
        agreeing=sum(map(_agrees, contents.sampled)),
        shaped=sum(map(_has_listed_shape, checkpoint.tensors)),
        recorded=checkpoint.is_recorded,
        unproven=unproven,
    )


def _sample(
    checkpoint: Checkpoint, contents: Contents, executor: Executor, _: OpenProgress
) -> Mapping[Reading, Sequence[Diagnostic]]:
    """Read samples of the tensors that the strategy omits, as verify does."""
    if contents.is_incomplete:
        return {}
    return {"unlisted": [*sample_unlisted(checkpoint, contents.evidence, executor)]}


def _is_against(problem: Diagnostic) -> bool:
    return problem.code in AGAINST


def _is_grave(problem: Diagnostic) -> bool:
    code = problem.code
    return severities("verify")[code] in _GRAVE or severities("convert")[code] == "error"


def _unproven(
    checkpoint: Checkpoint, contents: Contents
) -> Iterator[tuple[Aspect, tuple[str, ...]]]:
    """Yield what nothing could have contradicted, and the tensors.

    Slices alone do not show their axis: a full shape does, or a single axis.  Nor do they show
    their order if device axes can arrange them in several ways, as they can unless their number is
    prime.  Contents show which ranks hold equal slices.
    """
    sampled_of = {sampled.tensor.name: sampled for sampled in contents.sampled}
    names_of: dict[Aspect, list[str]] = {"axis": [], "order": [], "owners": []}
    for tensor in checkpoint.tensors:
        if not isinstance(tensor.slicing, LayoutSlicing) or not tensor.has_layout:
            continue
        layout, slices = tensor.layout, math.prod(tensor.layout.slice_counts)
        in_index = any(tensor.name in index for index in contents.readable_indexes)
        has_shape = in_index or layout.full_shape == tensor.meta.shape
        is_one_way = has_shape and slices in (1, len(layout.ranks))
        if slices > 1 and not has_shape and len(tensor.meta.shape) > 1:
            names_of["axis"].append(tensor.name)
        if len(divisors(slices)) > 2 or layout.fields > 1:
            names_of["order"].append(tensor.name)
        if not (len(layout.ranks) == 1 or is_one_way or _shows_owners(sampled_of.get(tensor.name))):
            names_of["owners"].append(tensor.name)
    yield from ((aspect, tuple(names)) for aspect, names in names_of.items() if names)


def _shows_owners(sampled: SampledTensor | None) -> bool:
    if sampled is None or sampled.is_constant:
        return False
    if sampled.tensor.layout.replicas == 1:
        return not sampled.is_spot_check
    return _agrees(sampled)


def _agrees(sampled: SampledTensor) -> bool:
    has_compared = any(len(ranks) > 1 for ranks in sampled.sampled)
    return has_compared and not sampled.differing_groups and not sampled.is_constant


def _has_listed_shape(tensor: FullTensor) -> bool:
    if not isinstance(tensor.slicing, LayoutSlicing):
        return False
    layout = tensor.slicing.layout
    return max(layout.slice_counts, default=1) > 1 and layout.full_shape == tensor.meta.shape
