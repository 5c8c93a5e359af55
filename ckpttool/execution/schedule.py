"""The tasks of a run, in their order: a run fills them, an estimate counts what they read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import chain

from msgspec import Struct
from msgspec.structs import replace

from ckpttool.execution.copy import CopyOptions, FillTask, Place, cut_into_tasks
from ckpttool.execution.grouping import group_ranks
from ckpttool.model.plan import OutputFile, Plan
from ckpttool.model.region import Region
from ckpttool.model.tensors import FileIndex


class Batch(Struct, frozen=True):
    """Outputs that are written together.

    Attributes
    ----------
    outputs
        The outputs.
    options
        How much is done at a time.
    wants_read
        See `FillTask`.
    """

    outputs: tuple[OutputFile, ...]
    options: CopyOptions
    wants_read: bool = False

    def tasks(
        self, indexes: Sequence[FileIndex], written: Sequence[Collection[Place]] = ()
    ) -> Iterator[FillTask]:
        """Yield the tasks that fill the outputs; ``indexes`` are the headers of their files.

        ``written`` has the units of each output that an earlier run wrote.
        """
        places = [*zip(self.outputs, indexes, strict=True)]
        selects = [_all_but(units) if units else None for units in written]
        return cut_into_tasks(places, self.options, self.wants_read, selects)

    def excerpt(self) -> Batch:
        """Return the batch for another process, with only the slices that it needs."""

        def trim(output: OutputFile) -> OutputFile:
            tensors = (tensor.excerpt(Region.whole(tensor.meta.shape)) for tensor in output.tensors)
            return replace(output, tensors=tuple(tensors))

        return replace(self, outputs=tuple(map(trim, self.outputs)))


def _all_but(units: Collection[Place]) -> Callable[[Place], bool]:
    return lambda unit: unit not in units


def schedule(
    plan: Plan, ranks: Collection[int], options: CopyOptions, *, by_file: bool
) -> Iterator[Batch]:
    """Yield all that a run writes: the outputs of ``ranks``, in the order in which they are begun.

    With ``by_file`` each output is a batch by itself, which one worker of a cluster writes.
    """
    batches = ranks_of_batches(plan, ranks, options, by_file=by_file)
    outputs = plan.limited_to(ranks).outputs(chain.from_iterable(batches))
    for batch in batches:
        yield Batch(tuple(next(outputs) for _ in batch), options, bool(plan.listed))


def ranks_of_batches(
    plan: Plan, ranks: Collection[int], options: CopyOptions, *, by_file: bool
) -> list[tuple[int, ...]]:
    """Return the ranks of the outputs of each batch of `schedule`."""
    groups = group_ranks(plan.limited_to(ranks), options.group_tensors)
    return [(rank,) for group in groups for rank in group] if by_file else groups
