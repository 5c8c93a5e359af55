"""The documents of inspect: one for each kind of thing that it finds.

`ckpttool.operations.describe` has the facts and their figures; here stand the keys.  A tensor is
described when the document is written: a screen folds 100,000 of them into few rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, UnsetType

from ckpttool.discovery.scan import Steps
from ckpttool.formats.foreign import Device, RankTable
from ckpttool.model.belonging import find_belongings
from ckpttool.model.catalog import Catalog
from ckpttool.model.manifest import LeftOut
from ckpttool.model.names import map_of_component
from ckpttool.model.plan import OutputTensor
from ckpttool.model.slicing import BoxSlicing, FullTensor, LayoutSlicing, holdings
from ckpttool.model.strategy import Strategy
from ckpttool.model.tensors import FileIndex, StoredTensor, TensorMeta
from ckpttool.operations.answer import (
    Answer,
    Code,
    Count,
    Document,
    Each,
    FileOfSet,
    Reported,
    Shape,
    SizedTensor,
    Some,
    StageLayout,
    describe_layouts,
    layout_keys,
    notes_and_problems,
    sized_keys,
)
from ckpttool.operations.describe import Inspected
from ckpttool.operations.summary import (
    Amount,
    Entry,
    EqualRanks,
    Parallelism,
    Summary,
    entries_of_layouts,
    find_parallelism,
    layouts_of_rules,
)
from ckpttool.problems import Diagnostics
from ckpttool.wording import (
    NUMBER,
    count,
    fold_members,
    format_bytes,
    format_shape,
    shorten_folded,
)

Ranks = tuple[Count, ...]


class TensorOfFile(Answer, frozen=True):
    """A tensor as a file holds it, or with --recipe one that merge would write.

    Attributes
    ----------
    name
        Name of the tensor.
    dtype
        Element type, by MindSpore's name.
    shape
        Shape in the file.
    nbytes
        Its bytes.
    text
        The text, if the tensor is a string.
    map
        The map parameter that the tensor is a part of.
    file
        The file that holds it, of several.
    made_of
        With --recipe: the tensors in the files that have its elements.
    """

    name: str
    dtype: str
    shape: Shape
    nbytes: Count
    text: str | None = None
    map: str | None = None
    file: str | None = None
    made_of: tuple[str, ...] | None = None


class TensorOfRanks(Answer, frozen=True):
    """A tensor, and the ranks that store it with this dtype and shape.

    Attributes
    ----------
    name
        Name of the tensor.
    dtype
        Element type, by MindSpore's name.
    shape
        Shape in the files.
    nbytes
        Its bytes on one rank.
    ranks
        These ranks.
    """

    name: str
    dtype: str
    shape: Shape | None
    nbytes: Count
    ranks: Ranks


class TensorOfLayout(SizedTensor, frozen=True, kw_only=True):
    """A full tensor and its layout.

    Attributes
    ----------
    device_matrix
        Sizes of the device grid. Null: nothing lists the tensor.
    tensor_map
        For each tensor axis the device axes that shard it, counted from the right. Null: nothing
        lists the tensor.
    optimizer_shard
        Number of parts of the optimizer shard; 1 for none. Null: nothing lists the tensor.
    rows
        Rows of each slice, if a manual split makes them unequal.
    fields
        Number of fields, if slices hold their share of each field.
    nbytes
        Bytes of the full tensor.
    handwritten
        Line of the hand-written strategy that describes the tensor.
    stages
        Pipeline stages that hold the tensor.
    ranks
        Ranks that hold a slice.
    """

    device_matrix: tuple[Some, ...] | None
    tensor_map: tuple[tuple[Count, ...], ...] | None
    optimizer_shard: Some | None
    rows: tuple[Count, ...] | None = None
    fields: Some | None = None
    nbytes: Count
    handwritten: str | None = None
    stages: tuple[Count, ...]
    ranks: Ranks


class SliceOfBoxes(Answer, frozen=True):
    """A slice of a checkpoint that describes itself.

    Attributes
    ----------
    start
        Index of its first element in the full tensor.
    shape
        Its shape.
    ranks
        Ranks that hold it.
    """

    start: tuple[Count, ...]
    shape: Shape
    ranks: Ranks


class TensorOfBoxes(SizedTensor, frozen=True, kw_only=True):
    """A full tensor of a checkpoint that describes itself, without a layout and stages.

    Attributes
    ----------
    nbytes
        Bytes of the full tensor.
    device_matrix, tensor_map, optimizer_shard
        Null.
    stages
        Empty.
    ranks
        Ranks that hold a slice.
    parts
        Slices along each axis; null if they do not form a grid.
    slices
        The slices.
    """

    nbytes: Count
    device_matrix: None
    tensor_map: None
    optimizer_shard: None
    stages: tuple[Count, ...]
    ranks: Ranks
    parts: tuple[Count, ...] | None
    slices: tuple[SliceOfBoxes, ...]


class FileOfCheckpoint(Answer, frozen=True):
    """A file of a merged checkpoint.

    Attributes
    ----------
    path
        The file.
    format
        Its format.
    nbytes
        Its size.
    attrs
        What the file says beside its tensors: crc_num, the metadata of a .safetensors.
    tensors
        Number of tensors in it.
    """

    path: str
    format: str
    nbytes: Count
    attrs: dict[str, str]
    tensors: Count


class FileOfRank(FileOfSet, frozen=True):
    """The files of a rank.

    Attributes
    ----------
    other_paths
        Further files of this rank.
    server
        Server of the rank, if there is a rank table.
    device
        Device of the rank, if there is a rank table.
    """

    other_paths: tuple[str, ...] | None = None
    server: str | UnsetType | None = UNSET
    device: Count | UnsetType | None = UNSET


class CheckpointSummary(Answer, frozen=True, kw_only=True):
    """The size and the parallelism of a checkpoint, and whether it is complete.

    Attributes
    ----------
    weights, optimizer_state, other, copies
        Tensors of one kind: full tensors, or without layouts all that is stored.
    left_out
        Tensors that --include, --exclude or --weights-only leave out, if any.
    parallelism
        How the parameters are sharded; null if nothing says so.
    complete
        Whether every slice is there; null if that is not known.
    complete_codes
        Codes of the diagnostics that say why it is not complete, or not known.
    missing_ranks
        Ranks without a file.
    unreadable_ranks
        Ranks whose file cannot be read.
    missing_tensors
        Tensors with missing slices.
    replicas
        The fewest and the most ranks that hold a slice; null without layouts.
    equal_ranks
        Tensors without a layout; some pages of them were compared.
    """

    weights: Amount
    optimizer_state: Amount
    other: Amount
    copies: Amount | None = None
    left_out: LeftOut | None = None
    parallelism: Parallelism | None
    complete: bool | None
    complete_codes: tuple[Code, ...]
    missing_ranks: Ranks
    unreadable_ranks: Ranks
    missing_tensors: tuple[str, ...]
    replicas: tuple[int, int] | None
    equal_ranks: tuple[EqualRanks, ...]


class InspectedCheckpoint(Document, frozen=True, kw_only=True):
    """The answer of inspect about a checkpoint of any kind.

    Attributes
    ----------
    parts
        What it is made of.
    """

    aside = frozenset({"parts"})

    parts: Inspected

    def _texts(self) -> Iterator[str]:
        parts, catalog = self.parts, self.parts.catalog
        entries, found, made = parts.summary.entries, parts.found, parts.made
        yield f"{catalog.root}: {count(len(catalog.files), 'file' if parts.is_merged else 'rank')}"
        yield f"step {catalog.step}" if catalog.step else ""
        yield count(len(made or {entry.name for entry in entries}), "tensor")
        sizes = (it.meta.nbytes for it in made) if made else (it.total_nbytes for it in entries)
        yield format_bytes(sum(sizes))
        yield {True: "complete", False: "incomplete", None: ""}[parts.completeness.complete]
        errors = len(found.errors) + len(found.failures)
        yield count(errors, "error") if errors else ""

    def _rows(self) -> Iterator[Sequence[str]]:
        if made := self.parts.made:
            yield ("tensor", "number", "dtype", "shape", "made of")
            for name, number, meta, made_of in fold_made(made):
                yield (name, str(number), meta.dtype, format_shape(meta.header_shape), made_of)
            return
        yield ("tensor", "number", "dtype", "shape", "slices")
        for row in self.parts.summary.rows:
            first = row.first
            shape = "" if first.shape is None else format_shape(first.shape)
            slices = " x ".join(map(str, first.placement.slice_counts or ()))
            yield (row.pattern, str(len(row.entries)), first.dtype, shape, slices)


class InspectedFile(InspectedCheckpoint, frozen=True, kw_only=True):
    """A single file.

    Attributes
    ----------
    path
        The file.
    format
        Its format.
    nbytes
        Its size.
    attrs
        What the file says beside its tensors: crc_num, the metadata of a .safetensors.
    tensors
        Its tensors.
    notes
        Facts that do not stop the command: notes and warnings.
    problems
        What is wrong; the exit code is then not 0.
    summary
        What the checkpoint is, and whether it is complete.
    """

    path: str
    format: str
    nbytes: Count
    attrs: dict[str, str]
    tensors: Sequence[TensorOfFile]
    notes: Reported
    problems: Reported
    summary: CheckpointSummary


class InspectedFiles(InspectedCheckpoint, frozen=True, kw_only=True):
    """Full tensors in several files, with an index.

    Attributes
    ----------
    path
        The folder, or the file of its index.
    format
        Formats of the files, separated by commas.
    nbytes
        Size of all files.
    indexes
        The index files.
    files
        The files.
    tensors
        The tensors of all files.
    notes
        Facts that do not stop the command: notes and warnings.
    problems
        What is wrong; the exit code is then not 0.
    summary
        What the checkpoint is, and whether it is complete.
    """

    path: str
    format: str
    nbytes: Count
    indexes: tuple[str, ...]
    files: tuple[FileOfCheckpoint, ...]
    tensors: Sequence[TensorOfFile]
    notes: Reported
    problems: Reported
    summary: CheckpointSummary


class InspectedRanks(InspectedCheckpoint, frozen=True, kw_only=True):
    """A checkpoint of ranks.

    Attributes
    ----------
    path
        The folder.
    step
        Step, as in the file names: epoch_step; null if no name has one.
    ranks
        The files of the ranks.
    values
        Of a checkpoint that describes itself: what else it says.
    tensors
        The full tensors, if a strategy or the checkpoint says how they are sharded; else the
        tensors as ranks store them, one for each dtype and shape.
    notes
        Facts that do not stop the command: notes and warnings.
    problems
        What is wrong; the exit code is then not 0.
    summary
        What the checkpoint is, and whether it is complete.
    """

    path: str
    step: str | None
    ranks: tuple[FileOfRank, ...]
    values: dict[str, str] | None = None
    tensors: Annotated[
        Sequence[Answer],
        msgspec.Meta(extra={"items": (TensorOfLayout, TensorOfBoxes, TensorOfRanks, TensorOfFile)}),
    ]
    notes: Reported
    problems: Reported
    summary: CheckpointSummary


class Save(Answer, frozen=True):
    """Ranks that have files of the same names.

    Attributes
    ----------
    ranks
        The ranks that have files of these names.
    files
        The names, the oldest step first; {rank} is the number of the rank.
    """

    ranks: Ranks
    files: tuple[str, ...]


class InspectedSaves(Document, frozen=True):
    """Ranks of several steps or runs; none of these was chosen.

    Attributes
    ----------
    path
        The folder of the ranks.
    saves
        Which ranks have which files, of all steps.
    notes
        Facts that do not stop the command: notes and warnings.
    problems
        What is wrong; the exit code is then not 0.
    """

    path: str
    saves: tuple[Save, ...]
    notes: Reported
    problems: Reported


class DeviceOfTable(Answer, frozen=True):
    """A device of a rank table.

    Attributes
    ----------
    rank
        The rank.
    server
        Its server.
    device
        Its device.
    device_ip
        Address of the device.
    """

    rank: Count
    server: str
    device: Count
    device_ip: str | None


class InspectedForeign(Document, frozen=True):
    """A file of MindSpore that is not a checkpoint.

    Attributes
    ----------
    path
        The file.
    kind
        What the file is.
    nbytes
        Its size.
    version
        Of a rank table: its version.
    ranks
        Of a rank table: the devices.
    """

    schema = 2

    path: str
    kind: str
    nbytes: Count
    version: str | UnsetType | None = UNSET
    ranks: tuple[DeviceOfTable, ...] | None = None


class LayoutsOfTensor(Answer, frozen=True):
    """A parameter.

    Attributes
    ----------
    name
        Its name.
    layouts
        Its layout in each stage that has it.
    """

    name: str
    layouts: tuple[StageLayout, ...]


class LayoutsOfRule(Answer, frozen=True):
    """A rule of a hand-written strategy.

    Attributes
    ----------
    pattern
        Names that it is for.
    place
        File and line.
    layouts
        Its layout in each stage.
    """

    pattern: str
    place: str
    layouts: tuple[StageLayout, ...]


class StrategySummary(Answer, frozen=True):
    """A strategy as a whole.

    Attributes
    ----------
    parallelism
        How the parameters are sharded.
    """

    parallelism: Parallelism | None


class InspectedStrategy(Document, frozen=True):
    """Strategy files.

    Attributes
    ----------
    kind
        What it is.
    files
        The files.
    ranks
        Number of ranks.
    stages
        Number of pipeline stages.
    tensors
        Parameters and their layouts.
    rules
        Rules of a hand-written strategy.
    replicates_rest
        Whether all other parameters are whole on every rank.
    notes
        Facts that do not stop the command: notes and warnings.
    summary
        What it says as a whole.
    strategy, listed
        The strategy, and what it lists.
    """

    aside = frozenset({"strategy", "listed"})

    kind: Literal["strategy"]
    files: tuple[str, ...]
    ranks: Count
    stages: Count
    tensors: Sequence[LayoutsOfTensor]
    rules: tuple[LayoutsOfRule, ...]
    replicates_rest: bool
    notes: Reported
    summary: StrategySummary
    strategy: Strategy
    listed: Summary


class InspectedStep(Answer, frozen=True):
    """A step of a folder.

    Attributes
    ----------
    name
        What --step takes; null if it takes nothing: the folder has one save and no steps, or no
        rank has finished the file.
    step
        The step in the names; null if they have none.
    complete
        Whether every slice is there: each rank has its file, or others hold its slices; null if it
        is not known. Names, headers and traces show it; no data is read.
    reason
        Why it is not complete or not known, or which replicas it needs; empty if all files are
        there.
    ranks
        The ranks that have a file; none if the metadata that says so cannot be read.
    missing_ranks
        Ranks that should have a file.
    damaged_ranks
        Ranks whose file has a header that cannot be read.
    files
        Number of files.
    nbytes
        Size of the files.
    default
        Whether this step is read without --step.
    """

    name: str | None
    step: str | None
    complete: bool | None
    reason: str
    ranks: Ranks
    missing_ranks: Ranks
    damaged_ranks: Ranks
    files: Count
    nbytes: Count
    default: bool


class InspectedSteps(Document, frozen=True):
    """With --steps: every step of a folder.

    Attributes
    ----------
    path
        The folder of the ranks, or of the steps.
    steps
        The steps, the oldest first; of several runs of a step each.
    notes
        Facts that do not stop the command: notes and warnings.
    problems
        What is wrong; the exit code is then not 0.
    """

    path: str
    steps: tuple[InspectedStep, ...]
    notes: Reported
    problems: Reported

    def _texts(self) -> Iterator[str]:
        yield f"{self.path}: {count(len(self.steps), 'step')}"
        yield f"{sum(step.complete is True for step in self.steps)} complete"

    def _rows(self) -> Iterator[Sequence[str]]:
        yield ("step", "complete", "files", "size", "what")
        for step in self.steps:
            name = step.name or step.step or ""
            numbers = map(str, (step.complete, step.files))
            yield (name, *numbers, format_bytes(step.nbytes), step.reason)


Answered = InspectedCheckpoint | InspectedSaves | InspectedStrategy | InspectedForeign


def describe_checkpoint(inspected: Inspected) -> InspectedCheckpoint:
    """Return the answer about a checkpoint."""
    return _of_files(inspected) if inspected.is_merged else _of_ranks(inspected)


def describe_saves(catalog: Catalog, diagnostics: Diagnostics) -> InspectedSaves:
    """Return the answer about ranks with several steps, if none was chosen."""
    saves = tuple(Save(*save) for save in catalog.names_of.items())
    return InspectedSaves(catalog.root, saves, **notes_and_problems(diagnostics))


def document_of_steps(steps: Steps, diagnostics: Diagnostics) -> InspectedSteps:
    """Return the document of inspect --steps."""
    described = tuple(
        InspectedStep(
            *(step.name, step.step, step.complete, step.reason),
            *(step.ranks, step.missing_ranks, step.damaged_ranks),
            *(step.files, step.nbytes, step.is_chosen),
        )
        for step in steps.steps
    )
    return InspectedSteps(steps.path, described, **notes_and_problems(diagnostics))


def _of_files(inspected: Inspected) -> InspectedCheckpoint:
    """Describe a merged checkpoint: one file, or several with an index."""
    catalog, files = inspected.catalog, tuple(inspected.catalog.files.values())
    summary, reported = _summary(inspected), notes_and_problems(inspected.found)
    if len(files) == 1 and not (catalog.indexes or catalog.errors("inspect")):
        (file,) = files
        tensors = _made(inspected) or Each(_tensor_of_file, tuple(file.tensors.values()))
        return InspectedFile(
            path=file.path,
            format=file.format,
            nbytes=file.nbytes,
            attrs=dict(file.attrs),
            tensors=tensors,
            **reported,
            summary=summary,
            parts=inspected,
        )
    stored = tuple((tensor, file.path) for file in files for tensor in file.tensors.values())
    return InspectedFiles(
        path=catalog.root,
        format=", ".join(sorted({file.format for file in files})),
        nbytes=sum(file.nbytes for file in files),
        indexes=catalog.indexes,
        files=tuple(
            FileOfCheckpoint(
                *(file.path, file.format, file.nbytes, dict(file.attrs), len(file.tensors))
            )
            for file in files
        ),
        tensors=_made(inspected) or Each(lambda pair: _tensor_of_file(*pair), stored),
        **reported,
        summary=summary,
        parts=inspected,
    )


def fold_made(
    made: Sequence[OutputTensor], *, show_all: bool = False
) -> Iterator[tuple[str, int, TensorMeta, str]]:
    """Yield tensors that would be written, those of equal layers as one unless ``show_all``.

    Each has its name, how many there are, the first of them, and what they are made of.
    """
    stored = {output.meta.name: output.source.stored_names for output in made}
    metas = {output.meta.name: output.meta for output in made}
    kinds = {
        name: (meta.header_shape, meta.dtype, *(NUMBER.sub("#", old) for old in stored[name]))
        for name, meta in metas.items()
    }
    for folded, names in ((name, [name]) for name in kinds) if show_all else fold_members(kinds):
        sources = dict.fromkeys(chain.from_iterable(stored[name] for name in names))
        yield folded, len(names), metas[names[0]], shorten_folded(sources, 2)


def _made(inspected: Inspected) -> Sequence[TensorOfFile]:
    return Each(_tensor_of_file, inspected.made)


def _tensor_of_file(tensor: StoredTensor | OutputTensor, file: str | None = None) -> TensorOfFile:
    meta = tensor.meta
    name = map_of_component(meta.name)
    made_of = None if isinstance(tensor, StoredTensor) else tensor.source.stored_names
    shown = meta.name, meta.dtype, meta.header_shape, meta.nbytes, meta.text
    return TensorOfFile(*shown, name, file, made_of)


def _of_ranks(inspected: Inspected) -> InspectedRanks:
    """Describe the files of ranks, and the full tensors, or those that ranks store."""
    catalog, strategy = inspected.catalog, inspected.checkpoint.strategy

    def describe(entry: Entry) -> Answer:
        if entry.source is not None:
            return _full_tensor(entry.source, strategy)
        ranks = entry.placement.owners[0]
        return TensorOfRanks(entry.name, entry.dtype, entry.shape, entry.nbytes, ranks)

    description = catalog.description
    return InspectedRanks(
        path=catalog.root,
        step=catalog.step,
        ranks=tuple(_rank(*item, inspected.devices) for item in catalog.files.items()),
        values=None if description is None else dict(description.values),
        tensors=_made(inspected) or Each(describe, inspected.summary.entries),
        **notes_and_problems(inspected.found),
        summary=_summary(inspected),
        parts=inspected,
    )


def _rank(rank: int, file: FileIndex, devices: Mapping[int, Device]) -> FileOfRank:
    paths = file.paths[1:] or None
    described = FileOfRank(rank, file.path, file.format, file.nbytes, len(file.tensors), paths)
    if not devices:
        return described
    device = devices.get(rank)
    place = (None, None) if device is None else (device.server, device.device)
    return msgspec.structs.replace(described, server=place[0], device=place[1])


def _full_tensor(source: FullTensor, strategy: Strategy) -> TensorOfLayout | TensorOfBoxes:
    nbytes, slicing = source.meta.nbytes, source.slicing
    if isinstance(slicing, BoxSlicing):
        slices = [*holdings(source)]
        return TensorOfBoxes(
            **sized_keys(source),
            nbytes=nbytes,
            **layout_keys(None),
            stages=(),
            ranks=tuple(sorted({*chain(*(part.holders for part in slices))})),
            parts=slicing.slice_counts if slicing.is_grid else None,
            slices=tuple(
                SliceOfBoxes(box.start, box.shape, part.holders)
                for part in slices
                for box in part.regions
            ),
        )
    assert isinstance(slicing, LayoutSlicing)
    base = source.name if source.is_listed else source.parameter
    return TensorOfLayout(
        **sized_keys(source),
        **layout_keys(source.layout if base else None),
        nbytes=nbytes,
        handwritten=strategy.handwritten.get(source.name),
        stages=tuple(each.stage for each in (strategy.layouts.get(base, ()) if base else ())),
        ranks=tuple(slicing.files),
    )


def _summary(inspected: Inspected) -> CheckpointSummary:
    summary, amounts = inspected.summary, inspected.summary.amounts
    is_shown = inspected.checkpoint.options.tensors.shown_by  # else the user does not want them
    return CheckpointSummary(
        weights=amounts.weights,
        optimizer_state=amounts.optimizer_state,
        other=amounts.other,
        copies=amounts.copies if amounts.copies.tensors else None,
        left_out=LeftOut.of({} if is_shown else inspected.checkpoint.left_out),
        parallelism=summary.parallelism,
        **msgspec.structs.asdict(inspected.completeness),
        equal_ranks=tuple(summary.equal_ranks.values()),
    )


def describe_strategy(strategy: Strategy, diagnostics: Diagnostics) -> InspectedStrategy:
    """Return the answer about the files of a strategy; ``diagnostics`` gets its notes."""
    of_rules, belongings = layouts_of_rules(strategy), find_belongings(strategy.layouts, {})
    entries = (*entries_of_layouts(strategy.layouts), *entries_of_layouts(of_rules))
    rules = strategy.rules.rules if strategy.rules else ()
    parallelism = find_parallelism(entries, belongings, strategy)
    diagnostics.add(*strategy.notes)

    def describe(name: str) -> LayoutsOfTensor:
        return LayoutsOfTensor(name, describe_layouts(strategy.layouts[name]))

    return InspectedStrategy(
        "strategy",
        strategy.files,
        len(strategy.ranks),
        strategy.stages,
        Each(describe, tuple(strategy.layouts)),
        tuple(
            LayoutsOfRule(rule.pattern, rule.place, describe_layouts(of_rules[rule.pattern]))
            for rule in rules
        ),
        strategy.rules is not None and strategy.rules.replicates_rest,
        notes_and_problems(diagnostics)["notes"],
        StrategySummary(parallelism),
        strategy,
        Summary(entries, belongings, parallelism),
    )


def describe_table(table: RankTable) -> tuple[str | None, tuple[DeviceOfTable, ...]]:
    """Return the version and the devices of a rank table."""
    devices = (
        DeviceOfTable(device.rank, device.server, device.device, device.ip)
        for device in table.devices
    )
    return table.version, tuple(devices)
