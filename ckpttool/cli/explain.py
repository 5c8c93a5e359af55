"""``ckpttool explain``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import PurePath
from typing import TYPE_CHECKING

import click
from msgspec.structs import replace

import ckpttool
from ckpttool.cli import options, tables
from ckpttool.cli.device_matrix import draw_matrix
from ckpttool.cli.overview import common_prefixes, title_of
from ckpttool.cli.params import whole_number
from ckpttool.cli.tables import MAX_RANGES, MAX_ROWS
from ckpttool.model.belonging import format_roles
from ckpttool.wording import (
    count,
    format_bytes,
    format_numbers,
    format_ranks,
    format_shape,
    format_sizes,
    shorten,
)

if TYPE_CHECKING:
    from ckpttool.checkpoint.checkpoint import ResolveOptions
    from ckpttool.cli.options import ReportOptions, Side
    from ckpttool.model.region import Region
    from ckpttool.model.slicing import Holding
    from ckpttool.operations.distribution import Distribution, Ranks
    from ckpttool.operations.explanation import Explained, RankGroup
    from ckpttool.operations.summary import Row, Stage

MAX_STAGES = 4  # whose grids are drawn
MAX_MATRICES = 3  # device matrices of a stage that are shown
MAX_GROUPS = 16  # of ranks that hold the same
MAX_PIECES = 4  # of a target slice, in one cell of a table
MAX_FILES = 2  # of a merged checkpoint, in one line


@click.command(
    cls=options.GroupedCommand,
    help="""\b
    ckpttool explain checkpoint/ -s strategy.ckpt --rank 5

    Say what a rank holds: its place in the device matrix, the rows and columns of its slices, and
    who holds the same.  Without --rank of all ranks; with --tensor of some tensors.  With -d of the
    ranks of a target: what each takes from whom.  Nothing is written.
    """,
)
@options.source_options()
@options.option("Explain only this rank; with -d a rank of the target.", type=whole_number(0))(
    "rank", options.SOURCE
)
@options.variant(
    "include",
    flag="--tensor",
    help="Explain only tensors whose names match PATTERN, such as '*.wq.weight'.",
)("tensor", options.SOURCE)
@options.strategy("a target, whose ranks are explained", "-d")("dst_strategy", options.OUTPUT)
@options.resolve_options("replicated", "unlisted", "trust_strategy", "optimizer_shard", "manifest")
@options.report_options()
def explain(
    source: Side,
    rank: int | None,
    tensor: tuple[str, ...],
    dst_strategy: tuple[str, ...],
    resolve: ResolveOptions,
    report: ReportOptions,
) -> None:
    """Say what each rank of a checkpoint or of a target holds."""
    from ckpttool.execution.executors import default_jobs
    from ckpttool.model.choices import TensorOptions
    from ckpttool.operations.explanation import explain as answer
    from ckpttool.operations.load import load

    is_found = not resolve.replicated
    inputs = load(source.source, dst_strategy, find_strategy=is_found, open_count=report.open_count)
    with ckpttool.open_engine(f"threads:{default_jobs()}") as executor:
        explained = answer(
            *inputs,
            rank=rank,
            options=replace(resolve, tensors=TensorOptions(tensor, shown_by="--tensor")),
            executor=executor,
        )
    tables.print_answer(explained, partial(_print, explained.parts), explained.notes, report)
    explained.parts.found.raise_if_errors()


def _print(answer: Explained) -> None:
    """Print the facts, the device grid, and tables of ranks and tensors."""
    if answer.rank is None:
        tables.print_facts(answer.origin, dict(_facts(answer)))
    else:
        stages = len({stage.ranks[0] for stage in answer.stages})
        of_stages = f", in stage {answer.groups[0].stage} of {stages}" if stages > 1 else ""
        title = f"rank {answer.rank} of {len(answer.ranks)}{of_stages}"
        tables.print_facts(title, dict(_facts_of_rank(answer, answer.rank)))
    if answer.patterns and answer.rank is None:
        for row in answer.rows:
            _print_slices(row, answer)
        return
    _print_grids(answer)
    if answer.rank is not None:
        _print_rank(answer)
        return
    _print_groups(answer)
    _print_tensors(answer)
    of_rank = "" if answer.is_of_files else "--rank R explains one rank, "
    of_tensor = "--tensor NAME the slices of a tensor, --json everything"
    tables.print_text(f"{of_rank}{of_tensor}")


# -------------------------------------------------------------------------------------------- facts


def _facts(answer: Explained) -> Iterator[tuple[str, Iterable[str]]]:
    """Yield the facts of all ranks."""
    noun = "file" if answer.is_of_files else "rank"
    what = f"{count(len(answer.ranks), noun)}, {count(len(answer.tensors), 'tensor')}"
    yield "contents", [f"{what}, {format_bytes(answer.nbytes)}"]
    yield "roles", [format_roles(answer.roles)] if {*answer.roles} - {"weight"} else []
    if answer.stages:
        yield "device matrix", _stages_text(answer)
    elif answer.catalog.description is not None and answer.target is None:
        yield "device matrix", ["none: the checkpoint describes the slices"]
    yield "incomplete", _incomplete(answer)
    yield "in no file", _absent(answer)


def _stages_text(answer: Explained) -> Iterator[str]:
    """Yield the device matrices of the chosen tensors, those of equal stages together."""
    alike: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    for stage in answer.stages:
        alike.setdefault(stage.device_matrices, []).append(stage.ranks[0] // len(stage.ranks))
    for matrices, numbers in alike.items():
        of_stages = f"{format_ranks(numbers, 'stage')}: " if len(answer.stages) > 1 else ""
        most = len(matrices) if len(matrices) <= MAX_MATRICES + 1 else MAX_MATRICES
        for place, drawn in enumerate(matrices[:most]):
            names = dict.fromkeys(chain(*(answer.names_of.get((at, drawn), ()) for at in numbers)))
            is_drawn = None if answer.patterns else place == 0  # without a grid
            which = _which_text([*names], is_drawn) if matrices[1:] else ""
            yield f"{of_stages}{_axes_text(drawn)}{which}"
        if matrices[most:]:
            yield f"{of_stages}and {len(matrices) - most} more, not drawn"


def _which_text(names: Sequence[str], is_drawn: bool | None) -> str:
    which = f", of {count(len(names), 'tensor')} such as {names[0]}" if names[1:] else ""
    which = f", of {names[0]}" if len(names) == 1 else which
    return which if is_drawn is None else f"{which}, {'' if is_drawn else 'not '}drawn"


def _matrices_of_rank(answer: Explained, rank: int) -> Iterator[str]:
    """Yield the coordinates of a rank in the device matrices of the chosen tensors."""
    drawn = {
        matrix
        for stage in answer.stages
        if rank in stage.ranks
        for matrix in stage.device_matrices[:1]
    }
    for matrix, at in answer.matrices.items():
        described = f"{_axes_text(matrix)}: at {_at_text(at)}"
        if matrix not in drawn or len(answer.matrices) > 1:
            having = (names for (_, its), names in answer.names_of.items() if its == matrix)
            described += _which_text([*dict.fromkeys(chain(*having))], matrix in drawn)
        yield described


def _axes_text(matrix: Sequence[int]) -> str:
    if len(matrix) == 1:
        return f"axis 0 of size {matrix[0]}"
    return (
        f"axes {', '.join(map(str, reversed(range(len(matrix)))))} of sizes {format_shape(matrix)}"
    )


def _incomplete(answer: Explained) -> Iterator[str]:
    """Yield which ranks have no file, and which tensors lack slices."""
    gone = sorted(answer.lost) if answer.rank is None else ()
    if gone:
        has = "has" if len(gone) == 1 else "have"
        yield f"{format_ranks(gone, most=MAX_RANGES)} {has} no file that can be read"
    lacking = [name for name, tensor in answer.tensors.items() if not _is_complete(tensor)]
    if lacking and answer.target is None:
        what = "these" if answer.rank is not None else "all"
        number = count(len(lacking), "tensor")
        yield f"no file has {what} slices of {number}: {shorten(lacking, 3)}"


def _absent(answer: Explained) -> Iterator[str]:
    if answer.absent:
        yield f"{count(len(answer.absent), 'listed tensor')} ({shorten(answer.absent, 3)})"


def _is_complete(tensor: Distribution) -> bool:
    return bool(tensor.slices) and all(part.holders for part in tensor.slices)


def _facts_of_rank(answer: Explained, rank: int) -> Iterator[tuple[str, Iterable[str]]]:
    """Yield the facts of one rank."""
    (group,) = answer.groups
    if answer.target is None:
        file = answer.catalog.files.get(rank)
        texts = ["no file that can be read: this is what it should hold"]
        if file is not None:
            texts = [part.path for part in file.files]
            texts[-1] += f", {format_bytes(file.nbytes)}{' together' if texts[1:] else ''}"
        yield "file" if len(texts) == 1 else "files", texts
    yield "device matrix", _matrices_of_rank(answer, rank)
    named = f" named like {' or '.join(answer.patterns)}" if answer.patterns else ""
    verb = "should hold" if rank in group.lost else "holds"
    what = f"{count(len(answer.tensors), 'tensor')}{named}, {format_bytes(answer.nbytes)}"
    if answer.is_deduplicated and rank not in group.lost:
        slices = (part for tensor in answer.tensors.values() for part in tensor.slices)
        stored = [rank in part.holders for part in slices]
        what += f", of which its file has {count(sum(stored), 'slice')}"
    yield verb, [what]
    shards = {
        tensor.layouts[0].optimizer_shard: _listed_text(tensor)
        for tensor in answer.tensors.values()
        if tensor.layouts
        and (tensor.layouts[0].optimizer_shard > 1 or tensor.listed_shard is not None)
    }
    texts = [f"{shard}{listed_text}" for shard, listed_text in sorted(shards.items())]
    yield "optimizer shard", [" or ".join(texts)] if texts else []
    if answer.tensors:
        yield "same slices", [_same_ranks_text(answer, group, rank)]
    if answer.target is not None:
        noun = "" if answer.catalog.is_merged else f"source rank{'s' if group.sources[1:] else ''} "
        yield "reads from", [f"{noun}{_sources_text(group.sources, answer)}"]
    yield "incomplete", _incomplete(answer)
    yield "in no file", _absent(answer)


def _same_ranks_text(answer: Explained, group: RankGroup, rank: int) -> str:
    """Return the other ranks that hold the same, and those that should but have no file."""
    lost = [other for other in group.lost if other != rank]
    equal = [it for it in group.ranks if it != rank and it not in group.lost]
    same = f"the same of {'these' if answer.patterns else 'all'} tensors"
    texts = []
    if equal or not lost:
        who = format_ranks(equal, most=MAX_RANGES) if equal else "no other rank"
        texts.append(f"{who} {'hold' if equal[1:] else 'holds'} {same}")
    if lost:
        should = "should" if equal else f"should hold {same}"
        has = "have" if lost[1:] else "has"
        who = format_ranks(lost, most=MAX_RANGES)
        texts.append(f"{who} {should}, but {has} no file that can be read")
    return "; ".join(texts)


def _at_text(at: Sequence[int]) -> str:
    return str(at[0]) if len(at) == 1 else format_shape(at)


def _listed_text(tensor: Distribution) -> str:
    if tensor.listed_shard is None:
        return ""
    shard = "none" if tensor.listed_shard == 1 else str(tensor.listed_shard)
    return f" (the strategy lists {shard})"


# ------------------------------------------------------------------------------------------- tables


_SAME = "ranks that hold the same"


def _print_groups(answer: Explained) -> None:
    """Print which ranks hold the same, and how much."""
    has_sources = answer.target is not None
    if answer.is_of_files and not answer.groups[1:]:
        return
    rows = (
        (
            _ranks_text(group.ranks, answer),
            "" if group.stage is None or len(answer.stages) == 1 else str(group.stage),
            _coordinate_text(group),
            str(group.tensors),
            format_bytes(group.nbytes),
            _sources_text(group.sources, answer) if has_sources else "",
            format_numbers(group.lost, most=MAX_RANGES),
        )
        for group in answer.groups[:MAX_GROUPS]
    )
    title, first = ("files", "file") if answer.is_of_files else (_SAME, "ranks")
    columns = (first, "stage>", "coordinate", "tensors>", "size>", "reads from", "no file")
    tables.print_table(title, columns, rows)
    tables.print_more(len(answer.groups) - MAX_GROUPS, "group")


def _coordinate_text(group: RankGroup) -> str:
    return ", ".join("*" if at is None else str(at) for at in group.coordinate).join(
        "()" if group.coordinate else ("", "")
    )


def _print_tensors(answer: Explained) -> None:
    """Print which device axes shard which tensor axes."""
    known: dict[bool, list[Row]] = {True: [], False: []}
    for row in answer.rows:
        known[answer.tensors[row.first.name].known_by != "unlisted"].append(row)
    rows, common = [], common_prefixes(known[True])
    for row in answer.rows[:MAX_ROWS]:
        tensor = answer.tensors[row.first.name]
        slices = {_stored_shape(part): None for part in tensor.slices if part.regions}
        each = f"{len(tensor.slices)} of {format_sizes(*slices)}" if slices else "not known"
        shape, sharded = format_sizes(row.first.shape or ()), _sharded_text(tensor, answer.stages)
        rows.append((row.name(common), shape, sharded, each))
    columns = ("tensors", "full shape", "sharded", "slices")
    tables.print_table(title_of(known[True], known[False]), columns, rows, has_names=True)
    tables.print_more(len(answer.rows) - MAX_ROWS, "row")


def _stored_shape(part: Holding) -> tuple[int, ...]:
    """Return the shape of a slice as it is stored; several boxes of it are behind one another."""
    rows = sum(region.shape[0] for region in part.regions if region.shape)
    return (rows, *part.regions[0].shape[1:]) if part.regions[0].shape else ()


def _print_rank(answer: Explained) -> None:
    """Print the slices of a rank."""
    if not answer.rows:
        tables.print_text("it holds none of these tensors; without --rank all slices are listed")
        return
    tensors = [(row.name(), answer.tensors[row.first.name]) for row in answer.rows[:MAX_ROWS]]
    rows = (
        (name, _slice_text(part, tensor.shape), _sharded_text(tensor, answer.stages), last)
        for name, tensor in tensors
        for part, last in _with_ranks(tensor, answer, _same_text)
    )
    last = "ranks of the layout" if answer.is_deduplicated else "same on"
    last = last if answer.target is None else "taken from"
    columns = ("tensors", "slice", "sharded", last)
    tables.print_table(count(len(answer.tensors), "tensor"), columns, rows, has_names=True)
    tables.print_more(len(answer.rows) - MAX_ROWS, "row")


def _print_slices(row: Row, answer: Explained) -> None:
    """Print all slices of a tensor by rank."""
    tensor = answer.tensors[row.first.name]
    rows = [
        (_regions_text(part.regions), _ranks_text(part.owners, answer), last)
        for part, last in _with_ranks(tensor, answer, _stored_text)
    ]
    sharded = _sharded_text(tensor, answer.stages)
    what = "not sharded" if sharded == "no" else sharded
    title = f"{row.name()}: {row.first.dtype} {_brackets(tensor.shape)}, {what}"
    last = "saved by" if answer.is_deduplicated else "missing"
    last = last if answer.target is None else "taken from"
    columns = ("slice", "file" if answer.is_of_files else "ranks", last)
    tables.print_table(title, columns, rows[:MAX_ROWS])
    tables.print_more(len(rows) - MAX_ROWS, "slice")


def _with_ranks(
    tensor: Distribution, answer: Explained, text: Callable[[Holding, Explained], str]
) -> Iterator[tuple[Holding, str]]:
    """Yield the slices of a tensor with ``text``; of a target with what is taken from whom."""
    for part in tensor.slices:
        is_target = answer.target is not None
        yield part, _taken_text(tensor, part, answer) if is_target else text(part, answer)


def _brackets(shape: Sequence[int]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _regions_text(regions: Sequence[Region]) -> str:
    if len(regions) > MAX_PIECES:
        return f"{len(regions)} boxes from {regions[0]} to {regions[-1]}"
    return " ".join(map(str, regions))


def _slice_text(part: Holding, shape: Sequence[int]) -> str:
    return f"{_regions_text(part.regions)} of {_brackets(shape)}" if shape else "scalar"


def _same_text(part: Holding, answer: Explained) -> str:
    """Return the other ranks that hold a slice; of a deduplicated checkpoint those that should."""
    if not part.holders:
        return "no file has it"
    ranks = part.owners if answer.is_deduplicated else part.holders
    equal = [it for it in ranks if it != answer.rank]
    return format_numbers(equal, most=MAX_RANGES) if equal else "no other rank"


def _stored_text(part: Holding, answer: Explained) -> str:
    if not part.holders:
        return "no file has it"
    if answer.is_deduplicated:
        return format_numbers(part.holders, most=MAX_RANGES)
    lost = {*part.owners}.difference(part.holders)
    return f"on {format_ranks(sorted(lost), most=MAX_RANGES)}" if lost else ""


def _ranks_text(ranks: Ranks, answer: Explained) -> str:
    if answer.is_of_files:
        return _sources_text(ranks, answer)
    return format_numbers(ranks, most=MAX_RANGES)


def _sources_text(numbers: Sequence[int], answer: Explained) -> str:
    if not answer.catalog.is_merged:
        return format_numbers(numbers, MAX_RANGES)
    names = [PurePath(answer.catalog.files[number].path).name for number in numbers]
    return shorten(names, len(names) if len(names) <= MAX_FILES + 1 else MAX_FILES)


def _taken_text(tensor: Distribution, part: Holding, answer: Explained) -> str:
    taken = tensor.taken[part]
    ranks = list(dict.fromkeys(piece.rank for piece in taken))
    if len(ranks) == 1 or len(taken) > MAX_PIECES:
        return _sources_text(ranks, answer)
    return "; ".join(f"{_sources_text([piece.rank], answer)} {piece.region}" for piece in taken)


def _sharded_text(tensor: Distribution, stages: Sequence[Stage]) -> str:
    """Return which device axes shard which axes of a tensor, and the optimizer shard.

    The device matrix is named if it is not the one that is drawn.
    """
    if tensor.known_by == "unlisted":
        return "not listed"
    names = ("rows", "columns") if len(tensor.shape) == 2 else None
    if not tensor.layouts:
        regions = [region for part in tensor.slices for region in part.regions]
        cut = [
            names[axis] if names else f"axis {axis}"
            for axis, size in enumerate(tensor.shape)
            if any(region.shape[axis] < size for region in regions)
        ]
        return ", ".join(cut) or "no"
    layout = tensor.layouts[0]
    drawn = {matrix for stage in stages for matrix in stage.device_matrices[:1]}
    parts = []
    for axis, used in enumerate(layout.tensor_map):
        sizes = {
            at: layout.device_matrix[-1 - at] for at in used if layout.device_matrix[-1 - at] > 1
        }
        if not sizes:
            continue
        what = names[axis] if names else f"axis {axis}"
        by = f"{'axis' if len(sizes) == 1 else 'axes'} {', '.join(map(str, sizes))}"
        slices = str(math.prod(sizes.values()))
        if axis == 0 and 0 < len(layout.rows) <= MAX_PIECES:
            slices = " + ".join(map(str, layout.rows))
        is_drawn = layout.device_matrix in drawn
        of_matrix = "" if is_drawn else f" of {format_shape(layout.device_matrix)}"
        parts.append(f"{what} / {slices} by {by}{of_matrix}")
    if layout.optimizer_shard > 1 or tensor.listed_shard is not None:
        parts.append(f"opt / {layout.optimizer_shard}{_listed_text(tensor)}")
    return ", ".join(parts) or "no"


# -------------------------------------------------------------------------------- the device matrix


def _print_grids(answer: Explained) -> None:
    drawn = (stage for stage in answer.stages if stage.device_matrices)
    stages = [stage for stage in drawn if answer.rank is None or answer.rank in stage.ranks]
    for stage in stages[:MAX_STAGES]:
        number = f"stage {stage.ranks[0] // len(stage.ranks)}: " if len(answer.stages) > 1 else ""
        matrix = stage.device_matrices[0]
        title = f"{number}device matrix {format_shape(matrix)}, {format_ranks(stage.ranks)}"
        draw_matrix(title, matrix, stage.ranks, _marks(answer), _groups_of(answer))
    tables.print_more(len(stages) - MAX_STAGES, "stage")


def _marks(answer: Explained) -> Mapping[int, str]:
    """Return the marks of ranks: ``(`` without a file, ``[`` explained, ``([`` both."""
    marks = dict.fromkeys(answer.lost, "(")
    if answer.rank is not None:
        marks[answer.rank] = f"{marks.get(answer.rank, '')}["
    return marks


def _groups_of(answer: Explained) -> Mapping[int, int]:
    return {rank: number for number, group in enumerate(answer.groups) for rank in group.ranks}
