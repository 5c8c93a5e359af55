"""Run merge, split and reshard: plan, execute, answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from ckpttool.concurrency import OpenProgress, no_progress
from ckpttool.execution.execute import execute
from ckpttool.execution.executors import RunOptions, is_cluster, open_engine
from ckpttool.execution.memory import fit_memory
from ckpttool.model.manifest import CastStats
from ckpttool.model.names import parse_name
from ckpttool.model.slicing import FullTensor, LayoutSlicing
from ckpttool.operations.answer import Cast, count_casts
from ckpttool.transaction.waiting import wait_while_busy
from ckpttool.wording import Brief, count, format_bytes, format_sizes

if TYPE_CHECKING:
    from ckpttool.model.catalog import Catalog
    from ckpttool.model.plan import Document, Plan
    from ckpttool.problems import Diagnostic
    from ckpttool.transaction.resume import Assignment
    from ckpttool.transaction.sealed_files import Written

MAX_SHARDED = 3  # tensors whose full shapes a person is asked to check


class Casting(Struct, frozen=True):
    """What --dtype did.

    Attributes
    ----------
    tensors
        The number of tensors that were cast, by their old and new types.
    kept
        The number of other tensors.
    saved_bytes
        By how many bytes the tensors of the outputs are smaller.
    stats
        What the casts did to the numbers of the full tensors; None if that is not known.
    """

    tensors: tuple[Cast, ...]
    kept: int
    saved_bytes: int
    stats: CastStats | None

    def __str__(self) -> str:
        if not self.tensors:
            return f"no tensor, {self.kept} as stored"
        more = "less" if self.saved_bytes >= 0 else "more"
        saved = f"{format_bytes(abs(self.saved_bytes))} {more}"
        lost = "" if self.stats is None else f"; {self.stats}"
        return f"{', '.join(map(str, self.tensors))}, {self.kept} as stored; {saved}{lost}"


class Conversion(Brief, Struct, frozen=True):
    """What a run has made: its outputs, and the files beside them.

    Attributes
    ----------
    plan, assignment
        What was to be made, and what this run had to write of it.
    outputs
        The complete outputs of this run.
    seconds
        How long it took.
    """

    plan: Plan
    assignment: Assignment
    outputs: Sequence[Written]
    seconds: float

    def _texts(self) -> Iterator[str]:
        target = self.plan.target
        where = target.paths[0] if self.is_one_file else target.output_folder
        yield f"{where}: {count(len(self.outputs), 'file')}"
        yield format_bytes(self.dst_bytes)
        yield f"{self.seconds:.2f} s"
        yield self.shapes_to_check and f"check the full shapes: {self.shapes_to_check}"

    def _rows(self) -> Iterator[Sequence[str]]:
        yield ("output", "format", "tensors", "size")
        for one in self.outputs:
            yield (one.path, one.format, str(one.tensors), format_bytes(one.nbytes))

    @property
    def source(self) -> Catalog:
        """The checkpoint that was read, of a mean the last one."""
        return self.plan.inputs[-1]

    @property
    def casting(self) -> Casting | None:
        """What --dtype did; None without it."""
        if not self.plan.tensors.casts:
            return None
        stored = {one.name: one.source.meta for one in self.plan.transfers}
        types = {one.name: (stored[one.name].dtype, one.dtype) for one in self.plan.transfers}
        tensors = count_casts(types.values())
        mine = self.plan.limited_to(self.assignment.ranks)
        saved = sum(
            len(ranks)
            * (meta.nbytes // meta.itemsize)
            * (stored[meta.name].itemsize - meta.itemsize)
            for ranks, metas in mine.headers.items()
            for meta in metas
            if types[meta.name][0] != types[meta.name][1]
        )
        stats = CastStats.sum(one.cast for one in self.outputs)
        kept = len(types) - sum(cast.tensors for cast in tensors)
        return Casting(tensors, kept, saved, stats)

    @property
    def src_bytes(self) -> int:
        """The size of the files that were read."""
        return sum(file.nbytes for one in self.plan.inputs for file in one.files.values())

    @property
    def averaged(self) -> Sequence[tuple[Catalog, float]]:
        """The inputs of a mean, and their weights; none for one source."""
        return [*zip(self.plan.inputs, self.plan.weights, strict=True)] if self.plan.weights else []

    @property
    def dst_bytes(self) -> int:
        """The size of the outputs."""
        return sum(output.nbytes for output in self.outputs)

    @property
    def notes(self) -> tuple[Diagnostic, ...]:
        """All notes of the run."""
        return (*self.plan.notes, *self.assignment.notes)

    @property
    def is_one_file(self) -> bool:
        """Whether one file is written, and not a folder of several."""
        return self.plan.target.is_merged and not self.plan.target.is_numbered

    @property
    def manifest(self) -> str | None:
        """The path of the manifest; None for a set in parts."""
        return None if self.assignment.part else str(Path(self.plan.target.manifest_path))

    @property
    def documents(self) -> tuple[Document, ...]:
        """The documents that were written; for a set in parts, `ckpttool.finalize` writes them."""
        return self.plan.documents if self.assignment.part is None else ()

    @property
    def beside(self) -> Iterator[str]:
        """The kind and the path of each document; of more than three of a kind their number."""
        for kind in dict.fromkeys(one.kind for one in self.documents):
            paths = [one.path for one in self.documents if one.kind == kind]
            yield from [f"{len(paths)} {kind}"] if paths[3:] else (f"{kind} {one}" for one in paths)

    @property
    def shapes_to_check(self) -> str:
        """Names and full shapes that only a strategy shows, of the largest tensors."""
        unsure = (one for one in self._sharded if one.name not in self.plan.confirmed)
        metas = (source.meta for source in islice(unsure, MAX_SHARDED))
        return ", ".join(f"{meta.name} {format_sizes(meta.shape)}" for meta in metas)

    @property
    def largest_sharded(self) -> Sequence[FullTensor]:
        """The largest sharded tensors, with the layouts with which they were read.

        A strategy file contains no shapes, and a file from a different run may fit.  A person can
        see that in the shapes.  Parameters come before their states; equal shapes and layouts are
        shown once.
        """
        return [*islice(self._sharded, MAX_SHARDED)]

    @property
    def _sharded(self) -> Iterator[FullTensor]:
        sources = (transfer.source for transfer in self.plan.transfers)
        sharded = {
            source.slicing.key: source
            for source in sorted(sources, key=_size)
            if isinstance(source.slicing, LayoutSlicing) and source.is_sharded
        }
        return reversed(sharded.values())


def _size(source: FullTensor) -> tuple[bool, int]:
    is_parameter = parse_name(source.meta.name).same_shape_parameter is None
    return is_parameter, source.meta.nbytes


def convert(
    make_plan: Callable[..., tuple[Plan, Assignment]],
    run: RunOptions,
    *,
    open_progress: OpenProgress = no_progress,
    on_notes: Callable[[Sequence[Diagnostic]], None] = lambda notes: None,
    executing: Callable[[Assignment], AbstractContextManager[object]] = nullcontext,
    check: Callable[[], None] = lambda: None,
    wait_seconds: float | None = None,
) -> Conversion:
    """Make a plan and execute it.

    Parameters
    ----------
    make_plan
        A function like `ckpttool.plan_merge`, which lacks ``executor`` and ``open_progress`` only.
        The executor is on this host, and compares contents.
    run
        The engine and its limit of memory.
    open_progress
        Shows the phases.
    on_notes
        Called with the notes of the plan before anything is written, and with what only shows when
        the run begins.
    executing
        Returns a context in which the plan is executed.
    check
        See `ckpttool.execute`.
    wait_seconds
        How long to wait for a run that is writing there; see `OutputOptions`.
    """
    late: list[Diagnostic] = []

    def note_late(note: Diagnostic) -> None:
        late.append(note)
        on_notes([note])

    def attempt() -> Conversion:
        started = time.perf_counter()
        is_here = not is_cluster(run.engine)
        with nullcontext(executor) if is_here else open_engine("threads") as local:
            plan, assignment = make_plan(executor=local, open_progress=open_progress)
        mine = plan.limited_to(assignment.ranks)
        sizes = fit_memory(run, executor, mine)
        on_notes((*plan.notes, *assignment.notes))
        total = sum(mine.sizes.values())
        with open_progress(total, "writing") as on_progress, executing(assignment):
            written = execute(
                plan,
                assignment,
                executor,
                options=sizes,
                on_progress=on_progress,
                on_note=note_late,
                check=check,
            )
        return Conversion(plan, assignment, written, time.perf_counter() - started)

    with open_engine(run.engine) as executor:
        done = wait_while_busy(
            attempt, wait_seconds, open_progress=open_progress, on_note=note_late
        )
    assignment = replace(done.assignment, notes=(*done.assignment.notes, *late))
    return replace(done, assignment=assignment)
