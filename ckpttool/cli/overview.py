"""The screen of ``inspect``: some lines that answer first, and a table of folded tensors."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from ckpttool.cli.tables import (
    INDENT,
    LAYOUT,
    MARGIN,
    SPACE,
    echo,
    layout_row,
    print_table,
    print_text,
    terminal_columns,
)
from ckpttool.formats.base import PROVENANCE
from ckpttool.model.catalog import MergedCatalog, SelfDescribedCatalog
from ckpttool.model.diagnostics import CODES
from ckpttool.model.wording import (
    count,
    format_bytes,
    format_number,
    format_ranks,
    format_shape,
    format_shapes,
    printable,
    shorten,
)
from ckpttool.verification.summary import format_numbers, group_ranks

if TYPE_CHECKING:
    from ckpttool.model.catalog import Catalog
    from ckpttool.verification.describe import Inspection, Json
    from ckpttool.verification.summary import (
        Amount,
        Completeness,
        EqualRanks,
        Parallelism,
        Placement,
        Row,
        Stage,
        Summary,
    )

MAX_ROWS = 40  # of the folded table; more are no overview
MAX_SLICES = 8  # of a tensor, in the table of all tensors
_LONGEST_RANKS = 30  # columns for the ranks of each slice; more become numbers
_LONGEST_LABEL = 20  # columns; a longer path gets a line of its own
_MAX_GROUPS = 3  # of ranks that differ, in one line
RANKS_OF_SLICES = "ranks of each slice"  # a column
_NO_STRATEGY = "not known without a strategy (-s STRATEGY)"

Facts = Sequence[tuple[str, str]]  # label and text of each line


def print_facts(title: str, facts: Facts) -> None:
    """Print a line for each fact, its label in a column; the title labels the first.

    On a terminal the lines are wrapped between words.
    """
    (_, first), *rest = facts
    label = title if len(title) <= _LONGEST_LABEL else "contents"
    if label != title:
        echo(printable(title))
    rows = [(label, first), *rest]
    indent = max(len(label) for label, _ in rows) + SPACE
    for label, text in rows:
        print_text(f"{label:<{indent}}{text}", indent=indent)


def _under(label: str, texts: Iterable[str]) -> Facts:
    """Return the lines of texts under one label."""
    return [("" if number else label, text) for number, text in enumerate(texts)]


# ------------------------------------------------------------------------------------- checkpoints


def print_checkpoint(
    catalog: Catalog, found: Inspection, *, show_all: bool, show_ranks: bool
) -> None:
    """Print what a checkpoint is, and its tensors: folded, or with ``show_all`` each."""
    summary, document = found.summary, found.document
    is_merged = isinstance(catalog, MergedCatalog) and summary.parallelism is None
    facts = list(_under("", _size_texts(catalog, summary)))
    facts += _differing_ranks(catalog)
    facts += _under("parallelism", _parallelism_texts(catalog, summary))
    assert summary.completeness is not None
    facts.append(("complete", _completeness_text(catalog, summary.completeness)))
    if isinstance(catalog, SelfDescribedCatalog) and catalog.description.values:
        values = (f"{name} {value}" for name, value in catalog.description.values.items())
        facts.append(("recorded", ", ".join(values)))
    for file in [*catalog.files.values()][: int(is_merged)]:  # the others say the same
        facts += _provenance(file.attrs)
    print_facts(catalog.root, facts)
    echo("")
    if show_ranks:
        _print_files(catalog, document)
    if show_all:
        _print_all(catalog, found)
    else:
        _print_rows(catalog, summary)
    options = [] if show_all else ["--all lists every tensor"]
    options += (
        [] if show_ranks else ["--ranks every file" if options else "--ranks lists every file"]
    )
    if is_merged and len(catalog.files) == 1:
        options = options[:1] if not show_all else []
    if options and catalog.metas:
        print_text(f"{', '.join(options)}, --json everything", indent=0)


def _provenance(attrs: Mapping[str, str]) -> Facts:
    """Return how ckpttool made a file, if the file says so."""
    version, source, step = (attrs.get(PROVENANCE + key) for key in ("version", "source", "step"))
    if version is None:
        return []
    of_step = "" if step is None else f", step {step}"
    return [("made by", f"ckpttool {version} from {source}{of_step}")]


def _size_texts(catalog: Catalog, summary: Summary) -> Iterator[str]:
    """Yield the ranks, step and size of a checkpoint; weights and optimizer state apart."""
    nbytes = format_bytes(sum(file.nbytes for file in catalog.files.values()))
    formats = ", ".join(sorted({file.format for file in catalog.files.values()}))
    step = f"step {catalog.step}" if catalog.step else ""
    weights, states = summary.weights, summary.optimizer_state
    is_merged = isinstance(catalog, MergedCatalog) and summary.parallelism is None
    is_stored = summary.parallelism is None and not is_merged
    total = len(catalog.files) + len(catalog.damaged)
    what = count(total, "file" if is_merged else "rank")
    what = f"{len(catalog.files)} of {what}" if catalog.damaged else what
    number = f"{format_number(weights.elements)} parameters"
    number += f" ({shorten(weights.dtypes, 3)})" if weights.tensors else ""
    number = count(len(catalog.metas), "tensor") if is_stored else number
    yield ", ".join(filter(None, (what, step, formats, nbytes, number)))
    sizes = []
    if weights.tensors:
        sizes.append(f"weights {format_bytes(weights.nbytes)}")
    if states.tensors:
        dtypes = _other_dtypes(weights, states)
        sizes.append(f"optimizer state {format_bytes(states.nbytes)}{dtypes}")
    sizes += ["replicas included"] if is_stored and sizes else []
    missing = () if summary.completeness is None else summary.completeness.missing_tensors
    sizes += [f"without {count(len(missing), 'incomplete tensor')}"] if missing else []
    if sizes:
        yield ", ".join(sizes)


def _other_dtypes(weights: Amount, states: Amount) -> str:
    """Return the element types of optimizer state if they are not those of the weights."""
    same = states.dtypes.keys() <= weights.dtypes.keys() and len(weights.dtypes) == 1
    return "" if same else f" ({shorten(states.dtypes, 3)})"


def _differing_ranks(catalog: Catalog) -> Facts:
    """Return the line on ranks whose files hold different tensors, if there are any."""
    groups = group_ranks(catalog.files)
    if isinstance(catalog, MergedCatalog) or len(groups) < 2:
        return []
    has_formats = len({group.format for group in groups}) > 1
    texts = []
    for group in groups[:_MAX_GROUPS]:
        low, high = map(format_bytes, group.nbytes)
        size = low if low == high else f"{low} to {high}"
        parts = (count(group.tensors, "tensor"), group.format if has_formats else "", size)
        each = " each" if len(group.ranks) > 1 else ""
        ranks = _ranks(group.ranks).partition(" ")[2]
        texts.append(f"{ranks}: {', '.join(filter(None, parts))}{each}")
    more = sum(len(group.ranks) for group in groups[_MAX_GROUPS:])
    return [("ranks", "; ".join(texts) + (f"; {count(more, 'more rank')}" if more else ""))]


def _parallelism_texts(catalog: Catalog, summary: Summary) -> Iterator[str]:
    """Yield the lines on how the tensors are distributed."""
    if summary.parallelism is not None:
        yield from parallelism_texts(summary.parallelism)
    elif isinstance(catalog, MergedCatalog):
        yield "none: full tensors"
    elif summary.completeness is not None and "strategy" in summary.completeness.codes:
        yield f"not known: {CODES['strategy'].meaning}"
    else:
        yield _NO_STRATEGY
        if len(catalog.files) > 1:
            yield _samples_text(summary)


def parallelism_texts(parallelism: Parallelism) -> Iterator[str]:
    """Yield how tensors are distributed in words, and the stages with their device matrices."""
    one = parallelism.tensor_parallel
    sharded = sorted(
        (split for split in parallelism.splits if split.slices > 1), key=lambda s: s.slices
    )
    if one is not None:
        ways = f"{one.slices}-way tensor parallel x {count(one.replicas, 'replica')}"
    elif sharded:
        shown = [f"{s.slices} slices x {count(s.replicas, 'replica')}" for s in sharded[:4]]
        shown += [f"{len(sharded) - 4} more"] if len(sharded) > 4 else []
        ways = f"parameters in {' or '.join(shown)}"
    else:
        whole = max((split.replicas for split in parallelism.splits), default=1)
        full = "" if parallelism.optimizer_shards else "full "
        ways = count(whole, f"{full}replica")
    if not parallelism.stages:
        yield ways
        return
    stages = len(parallelism.stages)
    of_ranks = f" of {count(len(parallelism.stages[0].ranks), 'rank')}" if stages > 1 else ""
    shards = parallelism.optimizer_shards
    tensors = sum(shards.values())
    shard = "no optimizer shard"
    if shards:
        sizes = " or ".join(map(str, shards))
        of_all = "all" if tensors == parallelism.tensors else f"{tensors} of"
        shard = f"optimizer shard of {sizes} on {of_all} {count(parallelism.tensors, 'tensor')}"
    yield f"{ways}, {count(stages, 'stage')}{of_ranks}, {shard}"
    yield _stages_text(parallelism.stages)


def _stages_text(stages: Sequence[Stage]) -> str:
    """Return the device matrices of the stages; equal stages together."""
    alike: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    for number, stage in enumerate(stages):
        alike.setdefault(stage.device_matrices, []).append(number)
    texts = []
    for matrices, numbers in alike.items():
        matrix = "device matrix" if len(matrices) == 1 else "device matrices"
        which = f"{format_ranks(numbers, 'stage')}: " if len(alike) > 1 else ""
        texts.append(f"{which}{matrix} {shorten(map(format_shape, matrices), 3)}")
    return "; ".join(texts[:4]) + (f"; and {len(texts) - 4} more" if len(texts) > 4 else "")


def _samples_text(summary: Summary) -> str:
    """Return what samples tell of tensors on ranks without a strategy."""
    if not summary.equal_ranks:
        return "--all samples pages of every tensor, which tell what ranks hold the same"
    numbers = {"equal on all ranks": 0, "different between ranks": 0, "of one value": 0}
    for equal in summary.equal_ranks.values():
        kind = "of one value" if equal.is_constant else "equal on all ranks"
        numbers["different between ranks" if len(equal.groups) > 1 else kind] += 1
    found = [f"{number} {kind}" for kind, number in numbers.items() if number]
    return f"sampled pages of {count(len(summary.equal_ranks), 'tensor')}: {', '.join(found)}"


def _completeness_text(catalog: Catalog, done: Completeness) -> str:
    """Return whether a checkpoint is complete, and what is missing."""
    gone = []
    if done.missing_ranks:
        verb = "has" if len(done.missing_ranks) == 1 else "have"
        gone.append(f"{_ranks(done.missing_ranks)} {verb} no file")
    if done.unreadable_ranks and not isinstance(catalog, MergedCatalog):
        gone.append(f"{_ranks(done.unreadable_ranks)} cannot be read")
    if done.is_complete:
        whole = "every tensor is there"
        if done.replicas is not None:
            least, most = done.replicas
            each = f"{least} to {most} replicas" if least < most else count(most, "replica")
            whole = f"every slice is there, {'once' if most == 1 else f'{each} each'}"
        others = f"; {', '.join(gone)}: replicas hold the slices" if gone else ""
        return f"yes: {whole} (headers; verify --deep reads the data){others}"
    if done.missing_tensors:
        number = count(len(done.missing_tensors), "tensor")
        names = shorten(done.missing_tensors, 3)
        gone.append(f"{number} cannot be joined from slices: {names}")
    # What has a line of its own needs no meaning.
    codes = [code for code in done.codes if not gone or code not in ("missing", "damaged")]
    reasons = "; ".join([*gone, *(CODES[code].meaning for code in codes[:2])])
    if done.is_complete is None:
        return f"not known: {reasons}" if codes else "; ".join([_NO_STRATEGY, *gone])
    return f"no: {reasons}"


def _ranks(ranks: Sequence[int]) -> str:
    """Return ranges of ranks for a line: the first ones, if there are many."""
    text = format_ranks(ranks)
    ranges = text.split(", ")
    return text if len(ranges) <= 6 else f"{', '.join(ranges[:6])} and more ({len(ranks)})"


# ---------------------------------------------------------------------------------- folded tensors


def _print_rows(catalog: Catalog, summary: Summary) -> None:
    """Print the folded tensors: those with layouts in a table, the others in lines."""
    in_lines = _rows_in_lines(summary)
    listed = [row for row in summary.rows if row not in in_lines]
    shown = _join_unsharded(listed)
    common = _common_prefixes(listed)
    is_merged = isinstance(catalog, MergedCatalog) and summary.parallelism is None
    is_stored = summary.parallelism is None and not is_merged
    has_dtypes = len({row.first.dtype for row in shown}) > 1
    columns = [
        ("tensors", [_name(row, common) for row in shown]),
        ("dtype", [row.first.dtype for row in shown] if has_dtypes else []),
        ("shape" if is_stored else "full shape", [_shape(row.first.shape) for row in shown]),
    ]
    if is_merged:
        columns.append(("size>", [format_bytes(row.nbytes) for row in shown]))
    elif is_stored:
        equal = [_equal_text(row, summary) for row in shown]
        title = "ranks with equal samples" if summary.equal_ranks else "ranks"
        columns.append((title, equal))
    else:
        columns.append(("sharded", [sharded_text(row.first.placement) for row in shown]))
        columns.append((RANKS_OF_SLICES, [owners_text(row) for row in shown]))
    _print_columns(_title(listed, common), columns, shown)
    _print_lines(catalog, summary, in_lines)


def _common_prefixes(rows: Iterable[Row]) -> tuple[str, ...] | None:
    """Return the prefixes of the states of every parameter; None if they differ."""
    prefixes = {row.prefixes for row in rows if "" in row.prefixes}
    return prefixes.pop() if len(prefixes) == 1 else None


def _print_columns(
    title: str, columns: Iterable[tuple[str, Sequence[str]]], rows: Sequence[Row]
) -> None:
    """Print a table of the columns that have cells; of many rows the first.

    A column of ranks that makes the table too wide for the terminal becomes lines below it.
    """
    kept = [(name, cells[:MAX_ROWS]) for name, cells in columns if any(cells)]
    if not kept:
        return
    lines: list[str] = []
    width = MARGIN + sum(max(map(len, (name, *cells))) + SPACE for name, cells in kept)
    columns_there = terminal_columns(sys.stdout)
    is_too_wide = columns_there is not None and width - SPACE >= columns_there
    if is_too_wide and kept[-1][0] == RANKS_OF_SLICES:
        kept.pop()
        lines = list(_ranks_lines(rows))
    cells = zip(*(cells for _, cells in kept), strict=True)
    print_table(title, [name for name, _ in kept], cells)
    for line in lines:
        print_text(line, indent=MARGIN + INDENT)
    if lines:
        echo("")
    if len(rows) > MAX_ROWS:
        echo(f"and {len(rows) - MAX_ROWS} more rows")


def _ranks_lines(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the ranks of each slice, by how tensors are sharded, over all stages."""
    texts: dict[str, dict[str, None]] = {}
    for row in rows:
        found = texts.setdefault(sharded_text(row.first.placement), {})
        found.update(dict.fromkeys(map(_placement_text, row.placements)))
    kinds: dict[tuple[str, ...], list[str]] = {}
    for kind, found in texts.items():
        kinds.setdefault(tuple(found), []).append("not sharded" if kind == "no" else kind)
    for ranks, alike in kinds.items():
        more = f" or {len(ranks) - 4} more" if len(ranks) > 4 else ""
        yield f"  {'; '.join(alike)}: on {' or '.join(ranks[:4])}{more}"


def _title(rows: Sequence[Row], common: tuple[str, ...] | None) -> str:
    """Return the number of parameters, and the states that each has."""
    parameters = sum(row.count for row in rows if "" in row.prefixes)
    tensors = sum(len(row.names) for row in rows)
    states = ", ".join(prefix for prefix in common or () if prefix)
    text = count(tensors, "tensor")
    each = "each with" if parameters > 1 else "with"
    return f"{text}: {count(parameters, 'parameter')}, {each} {states}" if states else text


def _join_unsharded(rows: Sequence[Row]) -> list[Row]:
    """Join the unsharded rows with equal placements, if others are sharded."""
    if not any(row.first.placement.is_sharded for row in rows):
        return list(rows)
    shown = [row for row in rows if row.first.placement.is_sharded]
    unsharded: dict[object, list[Row]] = {}
    for row in rows:
        placement = row.first.placement
        if not placement.is_sharded:
            unsharded.setdefault((row.prefixes, placement.replicas), []).append(row)
    return [*shown, *(_join(alike) for alike in unsharded.values())]


def _join(rows: Sequence[Row]) -> Row:
    """Return one row for several, without a shape; the same row if there is but one."""
    from dataclasses import replace

    if len(rows) == 1:
        return rows[0]
    number = sum(row.count for row in rows)
    first = replace(rows[0].first, shape=None)
    states = "" if "" in rows[0].prefixes else f" {', '.join(rows[0].prefixes)}"
    owners = {(*one.owners, one.others): one for row in rows for one in row.placements}
    return replace(
        rows[0],
        pattern=f"{number} more{states}",
        prefixes=("",) if states else rows[0].prefixes,
        count=number,
        first=first,
        placements=tuple(owners.values()),
        names=tuple(name for row in rows for name in row.names),
        nbytes=sum(row.nbytes for row in rows),
    )


def _name(row: Row, common: tuple[str, ...] | None) -> str:
    """Return the name of a row; states that all parameters have are in the title."""
    if "" in row.prefixes:
        states = [] if row.prefixes == common else [prefix for prefix in row.prefixes if prefix]
        return f"{row.pattern} + {', '.join(states)}" if states else row.pattern
    if len(row.prefixes) == 1:
        return f"{row.prefixes[0]}{row.pattern}"
    return f"{', '.join(row.prefixes)} of {row.pattern}"


def _shape(shape: Sequence[int] | None) -> str:
    if shape is None:
        return ""
    return " x ".join(map(str, shape)) or "scalar"


def sharded_text(placement: Placement) -> str:
    """Return along which axes a tensor is sharded, and into how many slices."""
    if not placement.is_sharded:
        return "no"
    if placement.slice_counts is None:
        return f"{len(placement.owners)} boxes"
    shard = placement.optimizer_shard
    names = ("rows", "columns") if len(placement.slice_counts) == 2 else None
    parts = []
    for axis, slices in enumerate(placement.slice_counts):
        own = slices // shard if axis == 0 else slices
        if own > 1:
            parts.append(f"{names[axis] if names else f'axis {axis}'} / {own}")
    return ", ".join([*parts, f"shard / {shard}"] if shard > 1 else parts)


def owners_text(row: Row) -> str:
    """Return the ranks that hold each slice; numbers of them, if there are many."""
    more = len(row.placements) - 1
    if more:
        is_stage = row.first.placement.known == "layout"
        what = count(more, "more stage" if is_stage else "more rank group")
        return f"{groups_text(row.first.placement.owners)}; {what}"
    return _placement_text(row.placements[0])


def _placement_text(placement: Placement) -> str:
    also = f", also {format_numbers(placement.others)}" if placement.others else ""
    return groups_text(placement.owners) + also


def groups_text(groups: Sequence[Sequence[int]]) -> str:
    """Return the ranks of each group; how many there are, if the list is long."""
    ranks = [rank for group in groups for rank in group]
    if len(groups) > 2 and len(ranks) == len(groups) and ranks == sorted(ranks):
        text = f"{format_numbers(ranks)}, one each"
        return text if len(text) <= _LONGEST_RANKS else f"{len(groups)} slices, a rank each"
    if len(ranks) <= 256:
        text = " | ".join(map(format_numbers, groups))
        if len(text) <= _LONGEST_RANKS:
            return text
    sizes = sorted({len(group) for group in groups})
    each = "-".join(map(str, {sizes[0]: 0, sizes[-1]: 0}))
    if len(groups) == 1:
        return f"{each} ranks"
    return f"{len(groups)} slices x {each} rank{'' if each == '1' else 's'}"


def _equal_text(row: Row, summary: Summary) -> str:
    """Return which ranks have equal samples of a tensor without a layout."""
    equal = summary.equal_ranks.get(row.names[0])
    return owners_text(row) if equal is None else _equal_ranks_text(equal)


def _equal_ranks_text(equal: EqualRanks) -> str:
    return groups_text(equal.groups) + (" (one value)" if equal.is_constant else "")


def _rows_in_lines(summary: Summary) -> Sequence[Row]:
    """Return the rows without a line of the table: what no strategy lists, and single values."""
    unlisted = [row for row in summary.rows if row.first.placement.known == "unlisted"]
    if unlisted or summary.parallelism is not None:
        return unlisted
    single = [row for row in summary.rows if row.is_single_value]
    return single if len(single) < len(summary.rows) else []


def _print_lines(catalog: Catalog, summary: Summary, rows: Sequence[Row]) -> None:
    """Print the names of some rows, one line for each way of being equal on the ranks."""
    what = "single values"
    if summary.parallelism is not None:
        is_described = isinstance(catalog, SelfDescribedCatalog)
        what = "not described" if is_described else "not in the strategy"
    found: dict[str, list[str]] = {}
    for row in rows:
        texts = {name: _equality_text(catalog, row, summary, name) for name in row.names}
        if len({*texts.values()}) == 1:
            texts = {_name(row, None): texts[row.names[0]]}
        for name, text in texts.items():
            found.setdefault(text, []).append(name)
    for text, names in found.items():
        print_text(f"  {what}{text}: {shorten(names, 8)}", indent=MARGIN + INDENT)
    if found:
        echo("")


def _equality_text(catalog: Catalog, row: Row, summary: Summary, name: str) -> str:
    """Return which ranks hold equal tensors of a name in a row."""
    ranks = row.first.placement.owners[0]
    on = "" if len(ranks) == len(catalog.files) else f" on {_ranks(ranks)}"
    equal = summary.equal_ranks.get(name)
    if isinstance(catalog, MergedCatalog):
        return ""
    if equal is None or len(ranks) == 1:
        return f",{on}" if on else ""
    if len(equal.groups) > 1:
        return f", different between ranks ({groups_text(equal.groups)})"
    what = "equal samples" if equal.is_part else "equal"
    return f", {what}{on or ' on all ranks'}"


# ---------------------------------------------------------------------------- every file and tensor


def _print_files(catalog: Catalog, document: Json) -> None:
    """Print a table of all files."""
    entries: Any = document.get("ranks") or document.get("files") or [document]
    has_ranks = "ranks" in document
    places = [key for entry in entries[:1] for key in ("server", "device") if key in entry]
    columns = [*(["rank>"] if has_ranks else []), *places, "path", "format", "tensors>", "size>"]
    rows = []
    for entry in entries:
        paths = (entry["path"], *entry.get("beside", ()))
        names = (path.removeprefix(catalog.root).lstrip("/") or path for path in paths)
        tensors = entry["tensors"]
        rows.append(
            (
                *([str(entry["rank"])] if has_ranks else []),
                *("" if entry[key] is None else str(entry[key]) for key in places),
                ", ".join(names),
                entry["format"],
                str(tensors if isinstance(tensors, int) else len(tensors)),
                format_bytes(entry["nbytes"]),
            )
        )
    print_table(count(len(rows), "file"), columns, rows)


def _print_all(catalog: Catalog, found: Inspection) -> None:
    """Print a table of all tensors."""
    tensors: Any = found.document.get("tensors")
    if tensors is None or "ranks" not in found.document:
        _print_stored(catalog, found.summary)
        return
    if isinstance(catalog, SelfDescribedCatalog):
        columns: Sequence[str] = ("name", "dtype", "shape", "slice", "parts", "ranks of each slice")
        rows = [_described_row(tensor) for tensor in tensors]
    else:
        columns = ("name", "dtype", "shape", *LAYOUT, "stages")
        stages = [", ".join(map(str, tensor["stages"])) for tensor in tensors]
        rows = [(*layout_row(tensor), text) for tensor, text in zip(tensors, stages, strict=True)]
    total = len(catalog.metas)
    rest = f" of {total} tensors; slices of the others are missing, or do not fit: see below"
    print_table(f"{len(rows)}{' tensors' if len(rows) == total else rest}", columns, rows)


def _print_stored(catalog: Catalog, summary: Summary) -> None:
    """Print a table of the tensors as files store them, of ranks those of the lowest one."""
    is_merged = isinstance(catalog, MergedCatalog)
    columns = ["name", "dtype", "shape", "size>"]
    if not is_merged:
        columns.append("ranks with equal samples" if summary.equal_ranks else "ranks")
    elif len(catalog.files) > 1:
        columns.append("file")
    rows = []
    for name, meta in catalog.metas.items():
        held = catalog.holders[name]
        where = PurePath(catalog.files[held[0]].path).name if is_merged else groups_text([held])
        if (equal := summary.equal_ranks.get(name)) is not None:
            where = _equal_ranks_text(equal)
        cells = (name, meta.dtype, format_shape(meta.shape), format_bytes(meta.nbytes), where)
        rows.append(cells[: len(columns)])
    print_table(count(len(rows), "tensor"), columns, rows)


def _described_row(tensor: Mapping[str, Any]) -> Sequence[str]:
    name, dtype, shape = tensor["name"], tensor["dtype"], format_shape(tensor["shape"])
    slices = tensor.get("slices")
    if slices is None:
        return (name, dtype, shape, "", "not described", "")
    ranks = [format_numbers(held["ranks"]) for held in slices[:MAX_SLICES]]
    more = len(slices) - MAX_SLICES
    return (
        name,
        dtype,
        shape,
        format_shapes(tensor.get("slice_shapes", [tensor["slice_shape"]])),
        f"{len(slices)} boxes" if tensor["parts"] is None else format_shape(tensor["parts"]),
        " | ".join([*ranks, f"and {more} more"] if more > 0 else ranks),
    )


# ------------------------------------------------------------------------------------- other files


def print_strategy(found: Inspection, *, show_all: bool) -> None:
    """Print the stages of a strategy, and its parameters: folded, or with ``show_all`` each."""
    summary, document = found.summary, found.document
    assert summary.parallelism is not None
    files: Any = document["files"]
    listed: Any = document["tensors"]
    rules: Any = document["rules"]
    ranks = sum(len(stage.ranks) for stage in summary.parallelism.stages)
    sharded = sum(
        row.count for row in summary.rows if "" in row.prefixes and row.first.placement.is_sharded
    )
    parts = [f"a strategy for {count(ranks, 'rank')}"]
    if listed:
        parts.append(f"{count(len(listed), 'tensor')}, {sharded} sharded parameters")
    if rules:
        rest = "replicated" if document["replicates_rest"] else "not decided"
        parts.append(f"{count(len(rules), 'pattern')}, all other parameters {rest}")
    facts = [("", "; ".join(parts))]
    facts += _under("parallelism", parallelism_texts(summary.parallelism))
    print_facts(shorten(files, 3), facts)
    echo("")
    if show_all:
        _print_layouts(document)
        return
    shown = _join_unsharded(summary.rows)
    common = _common_prefixes(summary.rows)
    patterns = [count(len(rules), "pattern")] if rules else []
    own = summary.rows[: len(summary.rows) - len(rules)]
    title = ", ".join([_title(own, common), *patterns] if listed else patterns)
    _print_columns(
        title,
        (
            ("patterns" if rules and not listed else "tensors", [_name(r, common) for r in shown]),
            ("listed shape", [_shape(row.first.shape) for row in shown]),
            ("sharded", [sharded_text(row.first.placement) for row in shown]),
            (RANKS_OF_SLICES, [owners_text(row) for row in shown]),
        ),
        shown,
    )
    print_text("--all lists every layout, --json everything", indent=0)


def _print_layouts(document: Json) -> None:
    """Print a table of all layouts of a strategy, and one of its patterns."""
    listed: Any = document["tensors"]
    rules: Any = document["rules"]
    named = [(one["name"], layout) for one in listed for layout in one["layouts"]]
    named += [(one["pattern"], layout) for one in rules for layout in one["layouts"]]
    rows = [
        (
            name,
            "" if layout["shape"] is None else format_shape(layout["shape"]),
            format_shape(layout["device_matrix"]),
            " ".join(format_shape(axes) if axes else "-" for axes in layout["tensor_map"]),
            str(layout["optimizer_shard"]) if layout["optimizer_shard"] > 1 else "",
            str(layout["stage"]),
        )
        for name, layout in named
    ]
    columns = ("name", "listed shape", "device matrix", "tensor map", "shard>", "stage>")
    print_table(count(len(rows), "layout"), columns, rows)


def print_foreign(document: Json) -> None:
    """Print what `describe_foreign` says of a file that is not a checkpoint."""
    from ckpttool.formats.foreign import FOREIGN_KINDS

    shown: Mapping[str, Any] = document
    noun = FOREIGN_KINDS[shown["kind"]].noun
    echo(printable(f"{shown['path']}: {noun}, {format_bytes(shown['nbytes'])}"))
    if shown["kind"] == "group_info":
        rows = [(one["name"], ", ".join(map(str, one["ranks"]))) for one in shown["groups"]]
        print_table(f"{len(rows)} groups", ("group", "ranks"), rows)
        ranks = ", ".join(map(str, shown["ckpt_restore_rank_list"]))
        echo(f"checkpoints that can stand in for this rank's: of ranks {ranks}")
    if shown["kind"] == "rank_table":
        places = shown["ranks"]
        print_table(
            f"{len(places)} ranks on {count(len({one['server'] for one in places}), 'server')}",
            ("rank>", "server", "device>", "device ip"),
            (
                (str(one["rank"]), one["server"], str(one["device"]), one["device_ip"] or "")
                for one in places
            ),
        )
