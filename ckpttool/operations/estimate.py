"""Say what a merge, split or reshard would do: its decisions, its tasks and what they take.

Everything up to the first write is that of the run, see `ckpttool.operations.run.convert`.  Then
the tasks of the run are counted, not filled.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from typing import TYPE_CHECKING

from ckpttool.concurrency import OpenProgress
from ckpttool.execution.copy import CopyOptions
from ckpttool.execution.executors import RunOptions, is_cluster
from ckpttool.execution.memory import Peak, estimate_peak
from ckpttool.execution.task_costs import Supply, Work, survey
from ckpttool.model.tensors import Reads
from ckpttool.operations.conversion import Conversion
from ckpttool.planning.preflight import Space, find_space
from ckpttool.storage.counting import CountingExecutor
from ckpttool.system import peak_bytes
from ckpttool.transaction.sealed_files import Written
from ckpttool.wording import count, format_bytes, format_numbers

if TYPE_CHECKING:
    from ckpttool.model.catalog import Catalog
    from ckpttool.model.plan import Plan
    from ckpttool.transaction.resume import Assignment


class Estimate(Conversion, frozen=True):
    """What a run would answer, and what it would do; ``seconds`` are those of the dry run.

    Attributes
    ----------
    headers, samples
        What was read to know all this, as the run reads it, too: what finds the files and their
        headers, and contents where they decide or are checked.
    work
        What the tasks of the run would do.
    peak
        The memory that they would take.
    space
        The bytes that the outputs need on each disk.
    """

    headers: Reads
    samples: Reads
    work: Work
    peak: Peak
    space: Sequence[Space]

    def _texts(self) -> Iterator[str]:
        target = self.plan.target
        (where, *_) = target.paths.values() if self.is_one_file else [target.output_folder]
        yield f"{where}: {count(len(self.outputs), 'file')}"
        yield f"reads {format_bytes(self.read_bytes)}"
        yield f"writes {format_bytes(self.written_bytes)}"
        yield f"memory {format_bytes(self.peak.nbytes)}"

    def _rows(self) -> Iterator[Sequence[str]]:
        several = len(self.plan.inputs) > 1
        yield ("output ranks", "source ranks", *(["input"] if several else []), "bytes of each")
        for supply in self.supplies:
            for need in supply.needs:
                ranks = (format_numbers(part.ranks, ", ") for part in (supply, need))
                number = [str(need.input + 1)] if several else []
                yield (*ranks, *number, format_bytes(need.nbytes))

    @property
    def read_bytes(self) -> int:
        """All bytes that the run would read of its source."""
        return (self.headers + self.samples + self.work.reads).nbytes

    @property
    def written_bytes(self) -> int:
        """All bytes that the run would write, without the manifest and the record of the run."""
        return self.header_bytes + self.work.written + self.document_bytes

    @property
    def header_bytes(self) -> int:
        """Bytes of the outputs that are not contents of tensors."""
        return sum(self.work.sizes.values()) - self.work.written

    @property
    def document_bytes(self) -> int:
        """Bytes of the small files beside the outputs."""
        return (
            0
            if self.assignment.is_finished
            else sum(len(document.data) for document in self.documents)
        )

    @property
    def supplies(self) -> Sequence[Supply]:
        """Which source ranks the target ranks need, and how many bytes of each."""
        return self.work.supplies


def count_work(
    plan: Plan,
    assignment: Assignment,
    run: RunOptions,
    limits: CopyOptions,
    executor: Executor,
    open_progress: OpenProgress,
    started: float,
) -> Estimate:
    """Count what a run would do, without writing.

    No cluster is needed: the memory is that of a worker.

    Parameters
    ----------
    limits
        How much is done at a time, from `fit_memory`.
    executor
        A `CountingExecutor` that has read contents for the plan.
    started
        When the plan was begun, by `time.perf_counter`.
    """
    assert isinstance(executor, CountingExecutor), "it counts what is read"
    mine, before = plan.limited_to(assignment.ranks), peak_bytes()
    ranks = [rank for rank in assignment.ranks if rank not in assignment.kept_ranks]
    with open_progress(0, "counting"):
        work = survey(plan, ranks, limits, by_file=is_cluster(run.engine))
    outputs = _outputs(mine, assignment, work.sizes)
    sizes = {plan.target.paths[rank]: nbytes for rank, nbytes in work.sizes.items()}
    return Estimate(
        *(plan, assignment, outputs, time.perf_counter() - started),
        sum(map(_header_reads, plan.inputs), Reads()),
        executor.reads,
        work,
        estimate_peak(run, mine, before, work),
        find_space(sizes),
    )


def _header_reads(catalog: Catalog) -> Reads:
    return sum((file.reads for file in catalog.files.values()), catalog.reads)


def _outputs(plan: Plan, assignment: Assignment, sizes: Mapping[int, int]) -> Sequence[Written]:
    format = plan.target.format
    tensors = {rank: len(metas) for ranks, metas in plan.headers.items() for rank in ranks}
    kept = {assignment.outputs[name]: stamp.nbytes for name, stamp in assignment.kept.items()}
    nbytes = {**kept, **sizes}
    return [
        Written(rank, path, format, nbytes[rank], tensors[rank], rank in kept)
        for rank, path in sorted(plan.target.paths.items())
    ]
