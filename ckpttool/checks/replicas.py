"""Compare the replicas of every slice byte for byte."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from itertools import chain
from shlex import quote

from msgspec import Struct
from msgspec.structs import replace

from ckpttool.checkpoint.samples import stage_pairs
from ckpttool.checks.layout_samples import odd_ranks, own_values_note
from ckpttool.concurrency import OnProgress
from ckpttool.model.plan import OutputTensor, Term
from ckpttool.model.region import Region
from ckpttool.model.slicing import FullTensor, LayoutSlicing, Unlisted, Whole, find_pieces
from ckpttool.model.tensors import StoredTensor
from ckpttool.problems import Diagnostic
from ckpttool.storage.compare import CompareOptions, Index, TensorStats, compare_tensors
from ckpttool.wording import count, format_difference

REMEDY = "move the file of the damaged rank away; `ckpttool help replica` explains"
_ONE_RUN = "files of one step, and the strategy of their run; `ckpttool help replica` explains"


class Slice(Struct, frozen=True):
    """A slice of a full tensor, with the stored tensor of each rank that has it."""

    tensor: FullTensor
    ranks: tuple[int, ...]
    tensors: tuple[StoredTensor, ...]
    reference: tuple[OutputTensor, ...] = ()  # its elements in another checkpoint, if any

    @property
    def readings(self) -> tuple[OutputTensor, ...]:
        """The replica of each rank, and the reference, as `compare_tensors` reads them."""
        return (*map(OutputTensor.copy_of, self.tensors), *self.reference)

    def index_in_full(self, element: Index | None) -> Index | None:
        """Return the index of an element of the slice in the full tensor; None for None."""
        if element is None:
            return None
        slicing, origin = self.tensor.slicing, (0,) * len(self.tensor.meta.shape)
        bounds = slicing.bounds(self.ranks[0])  # a tensor may have thousands of other slices
        for _, tensor, in_slice, in_full in find_pieces(slicing, bounds, origin):
            assert isinstance(in_slice, Region), "stored slices are boxes"
            assert isinstance(in_full, Region), "stored slices are boxes"
            if tensor == self.tensors[0] and in_slice.contains(element):
                shift = zip(in_full.start, element, in_slice.start, strict=True)
                return tuple(start + i - a for start, i, a in shift)
        return None


def slices_of(tensor: FullTensor) -> Iterator[Slice]:
    """Yield all slices of a tensor; none of a text.

    A tensor without a layout is one slice.  Its replicas are those of equal type and shape.
    """
    if tensor.meta.text is not None:
        return
    slices = tensor.slicing.replicas()
    if isinstance(tensor.known_by, Whole | Unlisted):
        assert isinstance(tensor.slicing, LayoutSlicing), "it is not described"
        files, ranks = tensor.slicing.files, sorted(chain(*tensor.known_by.groups))
        stored = {rank: files[rank][tensor.slicing.name] for rank in ranks}
        slices = iter(
            [
                {
                    rank: tensor_of_rank
                    for rank, tensor_of_rank in stored.items()
                    if tensor_of_rank.meta == tensor.meta
                }
            ]
        )
    for replicas in slices:
        yield Slice(tensor, tuple(replicas), tuple(replicas.values()))


def slices_beside(tensor: FullTensor, reference: FullTensor) -> Iterator[Slice]:
    """Yield all slices of a tensor, those of one region beside its elements in a reference."""
    for part, holding in zip(slices_of(tensor), tensor.slicing.holdings(), strict=True):
        meta, regions = part.tensors[0].meta, holding.regions
        same = (OutputTensor(meta, region, (Term(reference),)) for region in regions)
        yield replace(part, reference=tuple(same) if len(regions) == 1 else ())


def compare_replicas(
    slices: Iterable[Slice],
    executor: Executor,
    options: CompareOptions | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> Iterator[tuple[Slice, TensorStats]]:
    """Read every replica of every slice once, and compare them; see `compare_tensors`."""
    subjects = ((part, part.readings) for part in slices)
    yield from compare_tensors(subjects, executor, options, on_progress)


def replica_problems(
    tensors: Iterable[FullTensor], executor: Executor, on_progress: OnProgress = lambda nbytes: None
) -> list[Diagnostic]:
    """Return a problem for each slice whose replicas differ, and for each stage that differs."""
    tensors = [tensor for tensor in tensors if tensor.has_layout]
    of_stages = chain(tensors, (other for _, other in stage_pairs(tensors)))
    replicated = (part for tensor in of_stages for part in slices_of(tensor) if len(part.ranks) > 1)
    problems = [
        problem
        for part, stats in compare_replicas(replicated, executor, None, on_progress)
        if (problem := find_difference(part, stats)) is not None
    ]
    return [*problems, *compare_stages(tensors, executor, on_progress)]


def compare_stages(
    tensors: Iterable[FullTensor],
    executor: Executor,
    on_progress: Callable[[int], None] | None = None,
) -> Iterator[Diagnostic]:
    """Yield a problem for each tensor that differs between stages."""
    pairs = (
        (pair, (OutputTensor.full(pair[0]), OutputTensor.full(pair[1])))
        for pair in stage_pairs(tensors)
    )
    for (tensor, other), stats in compare_tensors(pairs, executor, None, on_progress):
        (difference,) = stats.differences
        if difference.count:
            ranks = tensor.layout.ranks, other.layout.ranks
            elements = count(math.prod(tensor.meta.shape), "element")
            facts = f"{difference.count} of {elements}; {format_difference(ranks)}; "
            yield Diagnostic(
                "replica",
                "stages differ",
                hint=REMEDY,
                facts=f"{facts}first at {difference.first}",
                tensor=tensor.name,
                ranks=(*ranks[0], *ranks[1]),
                count=difference.count,
                first=difference.first,
            )


def find_differing_copies(
    copies: Iterable[tuple[FullTensor, FullTensor]], executor: Executor
) -> Iterator[Diagnostic]:
    """Yield a problem for each tensor that should be the copy of another, and is not."""
    pairs = ((pair, tuple(map(OutputTensor.full, pair))) for pair in copies)
    for (copy, tensor), stats in compare_tensors(pairs, executor):
        (difference,) = stats.differences
        if difference.count:
            elements = count(math.prod(tensor.meta.shape), "element")
            facts = f"{difference.count} of {elements} differ from {tensor.name}"
            hint = f"--exclude {quote(copy.name)} to leave it out"
            message = "a recipe takes it for a copy"
            yield Diagnostic("recipe", message, hint=hint, facts=facts, tensor=copy.name)


def find_difference(
    part: Slice, stats: TensorStats, code: str = "replica", claim: str = "replicas differ"
) -> Diagnostic | None:
    """Return a problem with the groups of ranks that hold equal bytes; None for a single group.

    The facts name all groups, since contents do not show which is right; for `Diagnostic.ranks`
    see `odd_ranks`.  Where no group is the largest and most elements differ, no rank is damaged:
    the groups hold different slices, or replicas of different steps.  Values that each rank
    computes for itself are a note with another code.
    """
    groups: dict[bytes, list[int]] = {b"": [part.ranks[0]]}
    differences = list(zip(part.ranks[1:], stats.differences, strict=True))
    for rank, difference in differences:
        groups.setdefault(difference.content or bytes(difference.differs), []).append(rank)
    if len(groups) == 1:
        return None
    number = max(difference.count for _, difference in differences)
    first = part.index_in_full(min(d.first for _, d in differences if d.first is not None))
    name, full, shape = part.tensor.meta.name, part.tensor.meta.shape, part.tensors[0].meta.shape
    in_full = f" of {full}" if shape != full else ""
    elements = f"{'up to ' if len(groups) > 2 else ''}{number} of "
    elements += count(math.prod(shape), "element") + (" of the slice" if shape != full else "")
    facts = f"{elements}; {format_difference(tuple(groups.values()))}; first at {first}{in_full}"
    ranks = odd_ranks(tuple(groups.values()))
    if (by_design := own_values_note(part.tensor, facts, ranks)) is not None:
        return replace(by_design, count=number, first=first)
    hint = REMEDY if code == "replica" else f"`ckpttool help {code}`"
    if code == "replica" and ranks == part.ranks and 2 * number > math.prod(shape):
        hint = _ONE_RUN
    return Diagnostic(
        code, claim, hint=hint, facts=facts, tensor=name, ranks=ranks, count=number, first=first
    )
