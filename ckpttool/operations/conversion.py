"""The answers of merge, split, reshard, convert and average, also with --dry-run.

`ckpttool.operations.run` and `ckpttool.operations.estimate` do the work; here stands only what they
say.  The plan and the assignment lie beside the document, for the screen and for Python.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated

import msgspec

from ckpttool.model.belonging import Role
from ckpttool.model.manifest import AveragedInput, CastStats, LeftOut
from ckpttool.model.names import parse_name
from ckpttool.model.plan import Document as PlannedDocument
from ckpttool.model.plan import Plan
from ckpttool.model.slicing import FullTensor
from ckpttool.model.tensors import Reads
from ckpttool.operations.answer import (
    Answer,
    Cast,
    Count,
    Digest,
    Document,
    FileOfSet,
    Magnitude,
    Reported,
    SizedTensor,
    Some,
    count_casts,
    layout_keys,
    sized_keys,
)
from ckpttool.planning.preflight import Space
from ckpttool.problems import Diagnostic, severities
from ckpttool.transaction.resume import Assignment
from ckpttool.transaction.sealed_files import Written
from ckpttool.typed import NotInTarget
from ckpttool.wording import count, format_bytes, format_numbers, format_sizes, shorten

MAX_SHARDED = 3  # tensors that a document names
MAX_SHAPES = 16  # that a person has to check; models have about ten

Part = Annotated[str, msgspec.Meta(pattern="^[0-9]+/[0-9]+$")]


class Output(FileOfSet, frozen=True):
    """A file that was written, or kept.

    Attributes
    ----------
    kept
        Whether an earlier run completed it, so that this run did not write it.
    """

    kept: bool


class ShardedTensor(SizedTensor, frozen=True, kw_only=True):
    """A sharded tensor, and the layout with which it was read.

    Attributes
    ----------
    device_matrix
        Sizes of the device grid.
    tensor_map
        For each tensor axis the device axes that shard it, counted from the right.
    optimizer_shard
        Number of parts of the optimizer shard; 1 for none.
    rows
        Rows of each slice, if a manual split makes them unequal.
    fields
        Number of fields, if slices hold their share of each field.
    """

    device_matrix: tuple[Some, ...]
    tensor_map: tuple[tuple[Count, ...], ...]
    optimizer_shard: Some
    rows: tuple[Count, ...] | None = None
    fields: Some | None = None


class Averaged(Answer, frozen=True):
    """A weighted mean.

    Attributes
    ----------
    inputs
        The checkpoints, in the order in which they are added.
    tensors
        Number of tensors that are means.
    of_last
        Number of the others, which are those of the last input.
    """

    inputs: tuple[AveragedInput, ...]
    tensors: Count
    of_last: Count


class Casting(Answer, frozen=True):
    """The casts of --dtype.

    Attributes
    ----------
    tensors
        The tensors that were cast, by their types.
    kept
        Number of tensors that keep their type.
    saved_bytes
        By how much the tensors of the outputs are smaller; negative if larger.
    elements
        Elements of their full tensors.
    zeros
        Numbers that became 0 and were not.
    infinities
        Finite numbers that became Inf (--on-overflow inf).
    max_abs
        Largest |x - y| of x that is cast to y, of finite numbers.
    max_rel
        Largest |x - y| / |x|; 1 if a number became 0.
    """

    tensors: tuple[Cast, ...]
    kept: Count
    saved_bytes: int
    elements: Count | None = None
    zeros: Count | None = None
    infinities: Count | None = None
    max_abs: Magnitude | None = None
    max_rel: Magnitude | None = None

    def __str__(self) -> str:
        if not self.tensors:
            return f"no tensor, {self.kept} as stored"
        more = "less" if self.saved_bytes >= 0 else "more"
        saved = f"{format_bytes(abs(self.saved_bytes))} {more}"
        stats = CastStats(
            zeros=self.zeros or 0,
            infinities=self.infinities or 0,
            max_abs=self.max_abs or 0,
            max_rel=self.max_rel or 0,
        )
        lost = "" if self.elements is None else f"; {stats}"
        return f"{', '.join(map(str, self.tensors))}, {self.kept} as stored; {saved}{lost}"


class NumberOfTensors(Answer, frozen=True):
    """Some tensors.

    Attributes
    ----------
    tensors
        Number of tensors.
    nbytes
        Bytes of the full tensors.
    """

    tensors: Count
    nbytes: Count


class NotListed(Answer, frozen=True):
    """Tensors that are not in the target strategy.

    Attributes
    ----------
    choice
        Value of --not-in-target.
    followed
        Optimizer state that is sharded like its parameter.
    full
        Tensors that every rank has in full.
    dropped
        Tensors that are left out.
    """

    choice: NotInTarget
    followed: NumberOfTensors
    full: NumberOfTensors
    dropped: NumberOfTensors


class Need(Answer, frozen=True, kw_only=True):
    """Ranks of a source.

    Attributes
    ----------
    ranks
        Ranks of the source; of a merged checkpoint numbers of files, from 0.
    input
        Of average: number of the input in `averaged`, from 0.
    nbytes
        Bytes of each of these ranks.
    """

    ranks: tuple[Count, ...]
    input: Count | None = None
    nbytes: Count


class Supply(Answer, frozen=True):
    """The source ranks that some outputs need.

    Attributes
    ----------
    ranks
        Ranks of outputs that need the same.
    needs
        What each of them needs.
    """

    ranks: tuple[Count, ...]
    needs: tuple[Need, ...]


class ReadsOfRun(Answer, frozen=True):
    """The reads of a run.

    Attributes
    ----------
    headers
        To find the files and know their tensors; the dry run has read them, too.
    samples
        Contents that decide or are checked, with --check-replicas and --crc all of them; the dry
        run has read them, too.
    data
        By the tasks, to copy it.
    over_read
        Bytes of the data that no output has: gaps between what it needs.
    """

    headers: Reads
    samples: Reads
    data: Reads
    over_read: Count

    @property
    def nbytes(self) -> int:
        """All bytes."""
        return (self.headers + self.samples + self.data).nbytes


class WritesOfRun(Answer, frozen=True):
    """The bytes that a run writes.

    Attributes
    ----------
    headers
        Of the outputs, but for contents of tensors.
    data
        Contents of tensors.
    documents
        Indexes of numbered files, or a strategy file.
    """

    headers: Count
    data: Count
    documents: Count

    @property
    def nbytes(self) -> int:
        """All bytes."""
        return self.headers + self.data + self.documents


class Memory(Answer, frozen=True):
    """The most resident memory, about.

    Attributes
    ----------
    nbytes
        Of all processes on this host; on a cluster, of each worker.
    engine
        Engine, with the number of workers on this host.
    """

    nbytes: Count
    engine: str


class DryRun(Answer, frozen=True):
    """The cost of a run.

    Attributes
    ----------
    reads
        What it reads of the source.
    writes
        Bytes that it writes, without the manifest and its own record.
    tasks
        Number of its tasks.
    sources
        Which ranks of the source the outputs need; those of outputs that are kept are left out.
    memory
        The most resident memory, about.
    disks
        Disks that outputs are written to.
    """

    reads: ReadsOfRun
    writes: WritesOfRun
    tasks: Count
    sources: tuple[Supply, ...]
    memory: Memory
    disks: tuple[Space, ...]


class Conversion(Document, frozen=True, kw_only=True):
    """The JSON document of merge, split, reshard, convert and average.

    Attributes
    ----------
    ckpttool
        Version of ckpttool.
    command
        The command line.
    plan
        Digest of the plan; equal plans write equal bytes.
    outputs
        The files that this run wrote or kept, by rank.
    step
        Step, as in the file names: epoch_step; null if no name has one.
    src_bytes
        Size of all source files.
    dst_bytes
        Size of all outputs.
    seconds
        How long the run took; with --dry-run, how long the dry run took.
    largest_sharded
        The largest sharded tensors of the source, at most three. A person sees a wrong strategy in
        their shapes.
    left_out
        Tensors that --include, --exclude or --weights-only leave out, if any.
    renamed
        Number of tensors with other names than in the source, if any.
    averaged
        The weighted mean that average wrote.
    roles
        How many tensors are weights, states of optimizers, scales, copies and counters.
    cast
        What --dtype did, if it is given; with --dry-run only what it would cast.
    not_in_target
        Of split and reshard: tensors that are not in the target strategy.
    notes
        Facts that do not stop the command: notes and warnings.
    indexes
        Index files of numbered files.
    strategy
        Strategy file that --write-strategy wrote.
    meta
        The meta.json of the ranks, which --mindformers wrote.
    model_files
        Configuration and tokenizer that --hf-config put beside the weights, if any.
    part
        With --part: which part of the set was written, K/N.
    manifest
        Manifest of the set; a part has none.
    dry_run
        With --dry-run: what the run would take. The other keys say what it would answer.
    planned
        The plan.
    assignment
        What this run had to write of it.
    """

    aside = frozenset({"planned", "assignment"})

    ckpttool: str
    command: str
    plan: Digest
    outputs: tuple[Output, ...]
    step: str | None
    src_bytes: Count
    dst_bytes: Count
    seconds: Magnitude
    largest_sharded: tuple[ShardedTensor, ...] | None = None
    left_out: LeftOut | None = None
    renamed: Some | None = None
    averaged: Averaged | None = None
    roles: dict[Role, Some] | None = None
    cast: Casting | None = None
    not_in_target: NotListed | None = None
    notes: Reported
    indexes: tuple[str, ...] | None = None
    strategy: str | None = None
    meta: tuple[str, ...] | None = None
    model_files: tuple[str, ...] | None = None
    part: Part | None = None
    manifest: str | None = None
    dry_run: DryRun | None = None
    planned: Plan
    assignment: Assignment

    def _texts(self) -> Iterator[str]:
        target = self.planned.target
        where = next(iter(target.paths.values())) if self.is_one_file else target.output_folder
        yield f"{where}: {count(len(self.outputs), 'file')}"
        if self.dry_run is None:
            yield format_bytes(self.dst_bytes)
            yield f"{self.seconds:.2f} s"
            yield self.shapes_to_check and f"check the full shapes: {self.shapes_to_check}"
            return
        yield f"reads {format_bytes(self.dry_run.reads.nbytes)}"
        yield f"writes {format_bytes(self.dry_run.writes.nbytes)}"
        yield f"memory {format_bytes(self.dry_run.memory.nbytes)}"

    def _rows(self) -> Iterator[Sequence[str]]:
        if self.dry_run is None:
            yield ("output", "format", "tensors", "size")
            for output in self.outputs:
                yield (output.path, output.format, str(output.tensors), format_bytes(output.nbytes))
            return
        number = ["input"] if len(self.planned.inputs) > 1 else []
        yield ("output ranks", "source ranks", *number, "bytes of each")
        yield from self.rows_of_needs()

    def rows_of_needs(self) -> Iterator[Sequence[str]]:
        """Yield which source ranks the outputs of a dry run need, and how many bytes of each."""
        supplies = () if self.dry_run is None else self.dry_run.sources
        for supply in supplies:
            for need in supply.needs:
                ranks = (format_numbers(side.ranks) for side in (supply, need))
                number = [] if need.input is None else [str(need.input + 1)]
                yield (*ranks, *number, format_bytes(need.nbytes))

    @property
    def is_one_file(self) -> bool:
        """Whether one file is written, and not a folder of several."""
        return self.planned.target.is_merged and not self.planned.target.is_numbered

    @property
    def documents(self) -> tuple[PlannedDocument, ...]:
        """The documents that were written; for a set in parts, `ckpttool.finalize` writes them."""
        return self.planned.documents if self.assignment.part is None else ()

    @property
    def beside(self) -> Iterator[str]:
        """The kind and the path of each document; of more than three of a kind the first."""
        for kind, paths in _paths_of(self.documents).items():
            shown = [shorten(paths, 1)] if paths[3:] else paths
            yield from (f"{kind} {path}" for path in shown)

    @property
    def shapes_to_check(self) -> str:
        """The full shapes that only a strategy shows, and how many tensors have each.

        There are none if an earlier run wrote all outputs.
        """
        plan = self.planned
        sources = (it.source for it in plan.transfers if it.source.name not in plan.confirmed)
        is_new = not all(output.kept for output in self.outputs)
        shapes = Counter(it.meta.shape for it in sources if is_new and it.is_sharded_by_layout)
        ordered = sorted(shapes, key=math.prod, reverse=True)
        texts = [f"{format_sizes(shape)} ({shapes[shape]})" for shape in ordered]
        for shape in ordered[:1]:
            texts[0] = f"{format_sizes(shape)} ({count(shapes[shape], 'tensor')})"
        return shorten(texts, MAX_SHAPES)


class Estimate(Conversion, frozen=True, kw_only=True):
    """The answer and the work of a run; ``seconds`` are those of the dry run."""


def describe_run(
    plan: Plan,
    assignment: Assignment,
    outputs: Sequence[Written],
    seconds: float,
    late: Sequence[Diagnostic] = (),
    dry_run: DryRun | None = None,
) -> Conversion:
    """Return the answer of a run.

    Parameters
    ----------
    plan, assignment
        What was to be made, and what this run had to write of it.
    outputs
        The complete outputs of this run.
    seconds
        How long it took.
    late
        What only showed when the run began.
    dry_run
        What the run would take, of one that writes nothing.
    """
    target, part, provenance = plan.target, assignment.part, assignment.provenance
    documents = _paths_of(plan.documents if part is None else ())
    sharded = tuple(
        ShardedTensor(**sized_keys(source), **layout_keys(source.layout))
        for source in islice(_sharded(plan), MAX_SHARDED)
    )
    return (Conversion if dry_run is None else Estimate)(
        ckpttool=provenance.ckpttool,
        command=provenance.command,
        plan=provenance.plan,
        outputs=tuple(
            Output(file.rank, file.path, file.format, file.nbytes, file.tensors, file.is_kept)
            for file in outputs
        ),
        step=plan.checkpoints[-1].step,
        src_bytes=sum(file.nbytes for source in plan.inputs for file in source.files.values()),
        dst_bytes=sum(output.nbytes for output in outputs),
        seconds=round(seconds, 6),
        largest_sharded=sharded or None,
        left_out=LeftOut.of(plan.left_out),
        renamed=len(plan.renamed) or None,
        averaged=_averaged(plan),
        roles=dict(plan.roles) or None,
        cast=_casting(plan, assignment, outputs),
        not_in_target=None
        if target.is_merged or plan.is_own
        else NotListed(
            assignment.options.not_in_target or "follow",
            *(NumberOfTensors(*size) for size in plan.not_listed.sizes.values()),
        ),
        notes=Reported((*plan.notes, *assignment.notes, *late), severities("convert")),
        indexes=documents.get("index"),
        strategy=next(iter(documents.get("strategy", ())), None),
        meta=documents.get("meta.json"),
        model_files=documents.get("model file"),
        part=part and str(part),
        manifest=None if part or target.is_virtual else str(Path(target.manifest_path)),
        dry_run=dry_run,
        planned=plan,
        assignment=assignment,
    )


def _paths_of(documents: Sequence[PlannedDocument]) -> Mapping[str, tuple[str, ...]]:
    kinds = dict.fromkeys(document.kind for document in documents)
    return {
        kind: tuple(document.path for document in documents if document.kind == kind)
        for kind in kinds
    }


def _averaged(plan: Plan) -> Averaged | None:
    if not plan.weights:
        return None
    means = sum(transfer.is_mean for transfer in plan.transfers)
    inputs = tuple(
        AveragedInput(source.root, source.step, weight)
        for source, weight in zip(plan.inputs, plan.weights, strict=True)
    )
    return Averaged(inputs, means, len(plan.transfers) - means)


def _casting(plan: Plan, assignment: Assignment, outputs: Sequence[Written]) -> Casting | None:
    if not plan.tensors.casts:
        return None
    stored = {transfer.name: transfer.source.meta for transfer in plan.transfers}
    types = {
        transfer.name: (stored[transfer.name].dtype, transfer.dtype) for transfer in plan.transfers
    }
    tensors = count_casts(types.values())
    saved = sum(
        len(ranks) * (meta.nbytes // meta.itemsize) * (stored[meta.name].itemsize - meta.itemsize)
        for ranks, metas in plan.limited_to(assignment.ranks).headers.items()
        for meta in metas
        if types[meta.name][0] != types[meta.name][1]
    )
    kept = len(types) - sum(cast.tensors for cast in tensors)
    stats = CastStats.sum(output.cast for output in outputs)
    if stats is None:
        return Casting(tensors, kept, saved)
    counts = (stats.elements, stats.zeros, stats.infinities)
    return Casting(tensors, kept, saved, *counts, stats.max_abs, stats.max_rel)


def _sharded(plan: Plan) -> Iterator[FullTensor]:
    """Yield the sharded tensors, the largest first, with the layouts with which they were read.

    A strategy file contains no shapes, and a file from a different run may fit.  A person can see
    that in the shapes.  Parameters come before their states; equal shapes and layouts come once.
    """
    sources = (transfer.source for transfer in plan.transfers)
    sharded = sorted((it for it in sources if it.is_sharded_by_layout), key=_size)
    return reversed({source.slicing.key: source for source in sharded}.values())


def _size(source: FullTensor) -> tuple[bool, int]:
    is_parameter = parse_name(source.meta.name).same_shape_parameter is None
    return is_parameter, source.meta.nbytes
