"""``ckpttool explain``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import PurePath
from typing import TYPE_CHECKING

import click
from msgspec.structs import replace

import ckpttool
from ckpttool.cli import options, tables
from ckpttool.cli.device_matrix import draw_matrix
from ckpttool.cli.params import NAME_PATTERN, whole_number
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
    from ckpttool.operations.explanation import Explanation, RankGroup
    from ckpttool.operations.summary import Row, Stage

MAX_ROWS = 40  # of a table on the screen; --json has all
MAX_STAGES = 4  # whose grids are drawn
MAX_MATRICES = 3  # device matrices of a stage that are shown
MAX_GROUPS = 16  # of ranks that hold the same
MAX_PIECES = 4  # of a target slice, in one cell of a table
MAX_FILES = 2  # of a merged checkpoint, in one line
MAX_RANGES = 6  # of ranks, in one line


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
@options.option(
    "Explain only tensors whose names match PATTERN, such as '*.wq.weight'.",
    type=NAME_PATTERN,
    multiple=True,
    metavar="PATTERN",
)("tensor", options.SOURCE)
@options.strategy("a target, whose ranks are explained", "-d", "--dst-strategy")(
    "dst_strategy", options.OUTPUT
)
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
    from ckpttool.cli import workflow
    from ckpttool.execution.executors import default_jobs
    from ckpttool.model.choices import TensorOptions
    from ckpttool.operations.explanation import explain as answer

    options.refuse_two_strategies(source, resolve)
    catalog, strategy, target = workflow.load(
        *(source, report, dst_strategy),
        find_strategy=not resolve.replicated,
    )
    with ckpttool.open_engine(f"threads:{default_jobs()}") as executor:
        found = answer(
            *(catalog, strategy, target),
            rank=rank,
            options=replace(resolve, tensors=TensorOptions(tensor, shown_by="--tensor")),
            executor=executor,
        )
    if report.as_json:
        from ckpttool.operations import documents

        tables.print_json(documents.explain(found))
    else:
        if not report.quiet:
            _print(found)
        notes = found.found.of("note", "warning")
        tables.print_notes(notes, found.found.severity_of, report.quiet)
    found.found.raise_if_errors()


def _print(found: Explanation) -> None:
    """Print the facts, the device grid, and tables of ranks and tensors."""
    if found.rank is None:
        tables.print_facts(_title(found), dict(_facts(found)))
    else:
        tables.print_facts(f"rank {found.rank}", dict(_facts_of_rank(found, found.rank)))
    if found.patterns and found.rank is None:
        for row in found.rows:
            _print_slices(row, found)
        return
    _print_grids(found)
    if found.rank is not None:
        _print_rank(found)
        return
    _print_groups(found)
    _print_tensors(found)
    of_rank = "" if found.is_of_files else "--rank R explains one rank, "
    of_tensor = "--tensor NAME the slices of a tensor, --json everything"
    tables.print_text(f"{of_rank}{of_tensor}")


# -------------------------------------------------------------------------------------------- facts


def _title(found: Explanation) -> str:
    return found.catalog.root if found.target is None else found.target.origin


def _facts(found: Explanation) -> Iterator[tuple[str, Iterable[str]]]:
    """Yield the facts of all ranks."""
    noun = "file" if found.is_of_files else "rank"
    what = f"{count(len(found.ranks), noun)}, {count(len(found.tensors), 'tensor')}"
    yield "contents", [f"{what}, {format_bytes(found.nbytes)}"]
    yield "roles", [format_roles(found.roles)] if {*found.roles} - {"weight"} else []
    if found.stages:
        yield "device matrix", _stages_text(found)
    elif found.catalog.description is not None and found.target is None:
        yield "device matrix", ["none: the checkpoint describes the slices"]
    yield "incomplete", _incomplete(found)
    yield "in no file", _absent(found)


def _stages_text(found: Explanation) -> Iterator[str]:
    """Yield the device matrices of the chosen tensors, those of equal stages together."""
    alike: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    for stage in found.stages:
        alike.setdefault(stage.device_matrices, []).append(stage.ranks[0] // len(stage.ranks))
    for matrices, numbers in alike.items():
        of_stages = f"{format_ranks(numbers, 'stage')}: " if len(found.stages) > 1 else ""
        most = len(matrices) if len(matrices) <= MAX_MATRICES + 1 else MAX_MATRICES
        for place, one in enumerate(matrices[:most]):
            names = dict.fromkeys(chain(*(found.names_of.get((at, one), ()) for at in numbers)))
            is_drawn = None if found.patterns else place == 0  # without a grid
            which = _which_text([*names], is_drawn) if matrices[1:] else ""
            yield f"{of_stages}{_axes_text(one)}{which}"
        if matrices[most:]:
            yield f"{of_stages}and {len(matrices) - most} more, not drawn"


def _which_text(names: Sequence[str], is_drawn: bool | None) -> str:
    which = f", of {count(len(names), 'tensor')} such as {names[0]}" if names[1:] else ""
    which = f", of {names[0]}" if len(names) == 1 else which
    return which if is_drawn is None else f"{which}, {'' if is_drawn else 'not '}drawn"


def _matrices_of_rank(found: Explanation, rank: int) -> Iterator[str]:
    """Yield the coordinates of a rank in the device matrices of the chosen tensors."""
    drawn = {
        matrix for one in found.stages if rank in one.ranks for matrix in one.device_matrices[:1]
    }
    for matrix, at in found.matrices.items():
        text = f"{_axes_text(matrix)}: at {_at_text(at)}"
        if matrix not in drawn or len(found.matrices) > 1:
            having = (names for (_, one), names in found.names_of.items() if one == matrix)
            text += _which_text([*dict.fromkeys(chain(*having))], matrix in drawn)
        yield text


def _axes_text(matrix: Sequence[int]) -> str:
    if len(matrix) == 1:
        return f"axis 0 of size {matrix[0]}"
    return (
        f"axes {', '.join(map(str, reversed(range(len(matrix)))))} of sizes {format_shape(matrix)}"
    )


def _incomplete(found: Explanation) -> Iterator[str]:
    """Yield which ranks have no file, and which tensors lack slices."""
    gone = sorted(found.lost) if found.rank is None else ()
    if gone:
        has = "has" if len(gone) == 1 else "have"
        yield f"{format_ranks(gone, most=MAX_RANGES)} {has} no file that can be read"
    lacking = [name for name, one in found.tensors.items() if not _is_complete(one)]
    if lacking and found.target is None:
        what = "these" if found.rank is not None else "all"
        number = count(len(lacking), "tensor")
        yield f"no file has {what} slices of {number}: {shorten(lacking, 3)}"


def _absent(found: Explanation) -> Iterator[str]:
    if found.absent:
        yield f"{count(len(found.absent), 'listed tensor')} ({shorten(found.absent, 3)})"


def _is_complete(one: Distribution) -> bool:
    return bool(one.slices) and all(part.holders for part in one.slices)


def _facts_of_rank(found: Explanation, rank: int) -> Iterator[tuple[str, Iterable[str]]]:
    """Yield the facts of one rank."""
    (group,) = found.groups
    of_all = f"of {count(len(found.ranks), 'rank')}"
    stages = len({one.ranks[0] for one in found.stages})
    yield "rank", [f"{of_all}, in stage {group.stage} of {stages}" if stages > 1 else of_all]
    if found.target is None:
        file = found.catalog.files.get(rank)
        texts = ["no file that can be read: this is what it should hold"]
        if file is not None:
            texts = [one.path for one in file.files]
            texts[-1] += f", {format_bytes(file.nbytes)}{' together' if texts[1:] else ''}"
        yield "file" if len(texts) == 1 else "files", texts
    yield "device matrix", _matrices_of_rank(found, rank)
    named = f" named like {' or '.join(found.patterns)}" if found.patterns else ""
    verb = "should hold" if rank in group.lost else "holds"
    what = f"{count(len(found.tensors), 'tensor')}{named}, {format_bytes(found.nbytes)}"
    if found.is_deduplicated and rank not in group.lost:
        stored = [rank in part.holders for one in found.tensors.values() for part in one.slices]
        what += f", of which its file has {count(sum(stored), 'slice')}"
    yield verb, [what]
    shards = {
        one.layouts[0].optimizer_shard: _listed_text(one)
        for one in found.tensors.values()
        if one.layouts and (one.layouts[0].optimizer_shard > 1 or one.listed_shard is not None)
    }
    texts = [f"{shard}{text}" for shard, text in sorted(shards.items())]
    yield "optimizer shard", [" or ".join(texts)] if texts else []
    if found.tensors:
        yield "same slices", [_same_ranks_text(found, group, rank)]
    if found.target is not None:
        noun = "" if found.catalog.is_merged else f"source rank{'s' if group.sources[1:] else ''} "
        yield "reads from", [f"{noun}{_sources_text(group.sources, found, ', ')}"]
    yield "incomplete", _incomplete(found)
    yield "in no file", _absent(found)


def _same_ranks_text(found: Explanation, group: RankGroup, rank: int) -> str:
    """Return the other ranks that hold the same, and those that should but have no file."""
    lost = [one for one in group.lost if one != rank]
    others = [one for one in group.ranks if one != rank and one not in group.lost]
    same = f"the same of {'these' if found.patterns else 'all'} tensors"
    texts = []
    if others or not lost:
        who = format_ranks(others, most=MAX_RANGES) if others else "no other rank"
        texts.append(f"{who} {'hold' if others[1:] else 'holds'} {same}")
    if lost:
        should = "should" if others else f"should hold {same}"
        has = "have" if lost[1:] else "has"
        who = format_ranks(lost, most=MAX_RANGES)
        texts.append(f"{who} {should}, but {has} no file that can be read")
    return "; ".join(texts)


def _at_text(at: Sequence[int]) -> str:
    return str(at[0]) if len(at) == 1 else format_shape(at)


def _listed_text(one: Distribution) -> str:
    if one.listed_shard is None:
        return ""
    listed = "none" if one.listed_shard == 1 else str(one.listed_shard)
    return f" (the strategy lists {listed})"


# ------------------------------------------------------------------------------------------- tables


_SAME = "ranks that hold the same"


def _print_groups(found: Explanation) -> None:
    """Print which ranks hold the same, and how much."""
    has_sources = found.target is not None
    if found.is_of_files and not found.groups[1:]:
        return
    rows = (
        (
            _ranks_text(one.ranks, found),
            "" if one.stage is None or len(found.stages) == 1 else str(one.stage),
            _coordinate_text(one),
            str(one.tensors),
            format_bytes(one.nbytes),
            _sources_text(one.sources, found) if has_sources else "",
            format_numbers(one.lost, most=MAX_RANGES),
        )
        for one in found.groups[:MAX_GROUPS]
    )
    title, first = ("files", "file") if found.is_of_files else (_SAME, "ranks")
    columns = (first, "stage>", "coordinate", "tensors>", "size>", "reads from", "no file")
    tables.print_table(title, columns, rows)
    _print_more(len(found.groups) - MAX_GROUPS, "group")


def _coordinate_text(one: RankGroup) -> str:
    return ", ".join("*" if at is None else str(at) for at in one.coordinate).join(
        "()" if one.coordinate else ("", "")
    )


def _print_more(number: int, noun: str) -> None:
    if number > 0:
        tables.print_text(f"and {count(number, f'more {noun}')} (--json lists all)")
        tables.echo("")


def _print_tensors(found: Explanation) -> None:
    """Print which device axes shard which tensor axes."""
    rows = []
    for row in found.rows[:MAX_ROWS]:
        one = found.tensors[row.first.name]
        slices = {_stored_shape(part): None for part in one.slices if part.regions}
        each = f"{len(one.slices)} of {format_sizes(*slices)}" if slices else "not known"
        rows.append(
            (
                _name(row),
                format_sizes(row.first.shape or ()),
                _sharded_text(one, found.stages),
                each,
            )
        )
    columns = ("tensors", "full shape", "sharded", "slices")
    tables.print_table(count(len(found.tensors), "tensor"), columns, rows, is_grouped=True)
    _print_more(len(found.rows) - MAX_ROWS, "row")


def _stored_shape(part: Holding) -> tuple[int, ...]:
    """Return the shape of a slice as it is stored; several boxes of it are behind one another."""
    rows = sum(region.shape[0] for region in part.regions if region.shape)
    return (rows, *part.regions[0].shape[1:]) if part.regions[0].shape else ()


def _print_rank(found: Explanation) -> None:
    """Print the slices of a rank."""
    if not found.rows:
        tables.print_text("it holds none of these tensors; without --rank all slices are listed")
        return
    rows = []
    for row in found.rows[:MAX_ROWS]:
        one = found.tensors[row.first.name]
        for part in one.slices:
            last = (
                _same_text(part, found) if found.target is None else _taken_text(one, part, found)
            )
            rows.append(
                (_name(row), _slice_text(part, one.shape), _sharded_text(one, found.stages), last)
            )
    last = "ranks of the layout" if found.is_deduplicated else "same on"
    last = last if found.target is None else "taken from"
    columns = ("tensors", "slice", "sharded", last)
    tables.print_table(count(len(found.tensors), "tensor"), columns, rows, is_grouped=True)
    _print_more(len(found.rows) - MAX_ROWS, "row")


def _print_slices(row: Row, found: Explanation) -> None:
    """Print all slices of a tensor by rank."""
    one = found.tensors[row.first.name]
    rows = []
    for part in one.slices[:MAX_ROWS]:
        last = _stored_text(part, found) if found.target is None else _taken_text(one, part, found)
        rows.append((_regions_text(part.regions), _ranks_text(part.owners, found), last))
    sharded = _sharded_text(one, found.stages)
    what = "not sharded" if sharded == "no" else sharded
    title = f"{_name(row)}: {row.first.dtype} {_brackets(one.shape)}, {what}"
    last = "saved by" if found.is_deduplicated else "missing"
    last = last if found.target is None else "taken from"
    columns = ("slice", "file" if found.is_of_files else "ranks", last)
    tables.print_table(title, columns, rows)
    _print_more(len(one.slices) - MAX_ROWS, "slice")


def _name(row: Row) -> str:
    if len(row.prefixes) == 1:
        return f"{row.prefixes[0]}{row.pattern}"
    states = ", ".join(filter(None, row.prefixes))
    return f"{row.pattern} + {states}" if "" in row.prefixes else f"{states} of {row.pattern}"


def _brackets(shape: Sequence[int]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _regions_text(regions: Sequence[Region]) -> str:
    if len(regions) > MAX_PIECES:
        return f"{len(regions)} boxes from {regions[0]} to {regions[-1]}"
    return " ".join(map(str, regions))


def _slice_text(part: Holding, shape: Sequence[int]) -> str:
    return f"{_regions_text(part.regions)} of {_brackets(shape)}" if shape else "scalar"


def _same_text(part: Holding, found: Explanation) -> str:
    """Return the other ranks that hold a slice; of a deduplicated checkpoint those that should."""
    if not part.holders:
        return "no file has it"
    ranks = part.owners if found.is_deduplicated else part.holders
    others = [one for one in ranks if one != found.rank]
    return format_numbers(others, most=MAX_RANGES) if others else "no other rank"


def _stored_text(part: Holding, found: Explanation) -> str:
    if not part.holders:
        return "no file has it"
    if found.is_deduplicated:
        return format_numbers(part.holders, most=MAX_RANGES)
    lost = {*part.owners}.difference(part.holders)
    return f"on {format_ranks(sorted(lost), most=MAX_RANGES)}" if lost else ""


def _ranks_text(ranks: Ranks, found: Explanation) -> str:
    if found.is_of_files:
        return _sources_text(ranks, found, ", ")
    return format_numbers(ranks, most=MAX_RANGES)


def _sources_text(numbers: Sequence[int], found: Explanation, separator: str = ",") -> str:
    if not found.catalog.is_merged:
        return format_numbers(numbers, separator, most=MAX_RANGES)
    names = [PurePath(found.catalog.files[one].path).name for one in numbers]
    return shorten(names, len(names) if len(names) <= MAX_FILES + 1 else MAX_FILES)


def _taken_text(one: Distribution, part: Holding, found: Explanation) -> str:
    taken = one.taken[part]
    ranks = list(dict.fromkeys(piece.rank for piece in taken))
    if len(ranks) == 1 or len(taken) > MAX_PIECES:
        return _sources_text(ranks, found)
    return "; ".join(f"{_sources_text([piece.rank], found)} {piece.region}" for piece in taken)


def _sharded_text(one: Distribution, stages: Sequence[Stage]) -> str:
    """Return which device axes shard which axes of a tensor, and the optimizer shard.

    The device matrix is named if it is not the one that is drawn.
    """
    if one.known_by == "unlisted":
        return "not listed"
    names = ("rows", "columns") if len(one.shape) == 2 else None
    if not one.layouts:
        regions = [region for part in one.slices for region in part.regions]
        cut = [
            names[axis] if names else f"axis {axis}"
            for axis, size in enumerate(one.shape)
            if any(region.shape[axis] < size for region in regions)
        ]
        return ", ".join(cut) or "no"
    layout, drawn = one.layouts[0], {matrix for one in stages for matrix in one.device_matrices[:1]}
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
    if layout.optimizer_shard > 1 or one.listed_shard is not None:
        parts.append(f"opt / {layout.optimizer_shard}{_listed_text(one)}")
    return ", ".join(parts) or "no"


# -------------------------------------------------------------------------------- the device matrix


def _print_grids(found: Explanation) -> None:
    drawn = (one for one in found.stages if one.device_matrices)
    stages = [one for one in drawn if found.rank is None or found.rank in one.ranks]
    for stage in stages[:MAX_STAGES]:
        number = f"stage {stage.ranks[0] // len(stage.ranks)}: " if len(found.stages) > 1 else ""
        matrix = stage.device_matrices[0]
        title = f"{number}device matrix {format_shape(matrix)}, {format_ranks(stage.ranks)}"
        draw_matrix(title, matrix, stage.ranks, _marks(found), _groups_of(found))
    _print_more(len(stages) - MAX_STAGES, "stage")


def _marks(found: Explanation) -> Mapping[int, str]:
    """Return the marks of ranks: ``(`` has no file, ``[`` is explained, ``([`` is both."""
    marks = dict.fromkeys(found.lost, "(")
    if found.rank is not None:
        marks[found.rank] = f"{marks.get(found.rank, '')}["
    return marks


def _groups_of(found: Explanation) -> Mapping[int, int]:
    return {rank: number for number, one in enumerate(found.groups) for rank in one.ranks}
