"""Values that are wrong in themselves: NaN, infinities, weights of zeros; and replicas that differ.

Every byte is read once, in a stream; see `ckpttool.checks.replicas`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import Executor

from msgspec import Struct, field
from msgspec.structs import replace

from ckpttool.checkpoint.checkpoint import RANK_SPECIFIC_NAMES
from ckpttool.checks.manifest_hashes import fingerprint
from ckpttool.checks.replicas import Slice, compare_replicas, find_difference
from ckpttool.checks.unlisted import running_statistics_problem
from ckpttool.concurrency import OnProgress
from ckpttool.model.belonging import WEIGHT, find_belongings
from ckpttool.model.slicing import Unlisted, Whole
from ckpttool.model.tensors import TensorMeta
from ckpttool.problems import Diagnostic
from ckpttool.storage.compare import CompareOptions, Index, TensorDelta, TensorStats
from ckpttool.wording import count, format_ranks, shorten

# Counters of steps or epochs; they are equal on all ranks of one step.
STEP_NAMES = frozenset({"global_step", "step_num", "epoch_num", "current_step"})


class _Tally(Struct):
    """Special values of one tensor, over its slices, by the code of their finding."""

    elements: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    ranks: defaultdict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    first: dict[str, Index] = {}

    def add(self, part: Slice, stats: TensorStats) -> None:
        """Add the counts of a slice, and the ranks that hold what was counted."""
        replicas = zip(part.ranks[1:], stats.differences, strict=True)
        ranks = (part.ranks[0], *(rank for rank, other in replicas if not other.differs))
        self.elements += stats.elements
        for code, number, index in (
            ("nan", stats.nans, stats.first_nan),
            ("infinite", stats.infinities, stats.first_infinity),
            ("zero", stats.elements if stats.is_zero else 0, None),
        ):
            if number:
                self.counts[code] += number
                self.ranks[code] += ranks
                if (first := part.index_in_full(index)) is not None:
                    self.first[code] = min(first, self.first.get(code, first))


def check_contents(
    slices: Iterable[Slice],
    executor: Executor,
    on_progress: OnProgress,
    fingerprints: set[bytes] | None = None,
    running: Collection[str] = (),
    deltas: dict[str, TensorDelta] | None = None,
) -> list[Diagnostic]:
    """Read every byte of some slices and return the findings.

    ``fingerprints`` collects the `fingerprint` of every stored tensor that is read, ``deltas`` how
    the slices that have a reference differ from it.  All differences in ``running`` statistics are
    one warning.
    """
    in_statistics: list[Diagnostic] = []
    findings: list[Diagnostic] = []
    tallies: dict[tuple[str, int], _Tally] = {}
    metas: dict[str, TensorMeta] = {}
    options = CompareOptions(wants_counts=True, wants_hashes=fingerprints is not None)
    for part, stats in compare_replicas(slices, executor, options, on_progress):
        if fingerprints is not None:
            fingerprints.update(map(fingerprint, part.tensors, stats.hashes))
        tensor, name = part.tensor, part.tensor.name
        if deltas is not None and part.reference:
            *others, delta = stats.differences
            delta = replace(delta, first=part.index_in_full(delta.first))
            deltas[name] = deltas.get(name, TensorDelta()).merged(delta)
            stats = replace(stats, differences=tuple(others))
        (in_statistics if name in running else findings).extend(find_differences(part, stats))
        stage = 0 if isinstance(tensor.known_by, Whole) else next(tensor.slicing.owners())[0]
        tallies.setdefault((name, stage), _Tally()).add(part, stats)
        metas[name] = tensor.meta
    belongings = find_belongings((), metas)
    zeros: list[str] = []
    for (name, _), tally in tallies.items():
        findings += _find_nonfinite(name, tally)
        is_weight = belongings.get(name, WEIGHT).role == "weight"
        if tally.counts["zero"] and len(metas[name].shape) > 1 and is_weight:
            findings.append(_zero_weight(name, tally))
        elif tally.counts["zero"] == tally.elements > 0:
            zeros.append(name)
    if in_statistics:
        names = [finding.tensor for finding in in_statistics if finding.tensor is not None]
        ranks = tuple(sorted({rank for finding in in_statistics for rank in finding.ranks}))
        findings.append(running_statistics_problem(names, ranks))
    if zeros:
        message = f"all elements are zero, as when training begins: {shorten(zeros, 3)}"
        findings.append(Diagnostic("zero_state", message))
    return findings


DIFFERENT_UNLISTED = "not in the strategy, and different between ranks"


def find_differences(part: Slice, stats: TensorStats) -> Iterator[Diagnostic]:
    """Yield a finding if the replicas of a slice differ and should not."""
    name = part.tensor.name
    if name in RANK_SPECIFIC_NAMES:
        return
    code, claim = "replica", "replicas differ"
    if isinstance(part.tensor.known_by, Unlisted):
        code, claim = "unlisted", DIFFERENT_UNLISTED
        if name in STEP_NAMES:
            code, claim = "mixed_steps", "ranks are not of one step: different"
    if (finding := find_difference(part, stats, code, claim)) is not None:
        yield finding


def _find_nonfinite(name: str, tally: _Tally) -> Iterator[Diagnostic]:
    for code, word in (("nan", "NaN"), ("infinite", "infinite")):
        if number := tally.counts[code]:
            ranks, first = tuple(sorted(tally.ranks[code])), tally.first.get(code)
            facts = f"{number} of {count(tally.elements, 'element')}; {format_ranks(ranks)}; "
            finding = Diagnostic(code, f"elements are {word}", tensor=name, ranks=ranks)
            yield replace(finding, facts=f"{facts}first at {first}", count=number, first=first)


def _zero_weight(name: str, tally: _Tally) -> Diagnostic:
    ranks, zeros = tuple(sorted(tally.ranks["zero"])), tally.counts["zero"]
    message, facts = "all elements are zero", ""
    if zeros < tally.elements:
        message, facts = "all elements of some ranks are zero", format_ranks(ranks)
    return Diagnostic("zero", message, facts=facts, tensor=name, ranks=ranks, count=zeros)
