"""The screen of ``inspect``: some lines that answer first, and a table of folded tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import chain
from pathlib import PurePath
from shlex import quote
from typing import TYPE_CHECKING

from ckpttool.cli.tables import (
    INDENT,
    MARGIN,
    MAX_RANGES,
    MAX_ROWS,
    echo,
    print_facts,
    print_more,
    print_table,
    print_text,
)
from ckpttool.formats.base import PROVENANCE
from ckpttool.formats.foreign import FOREIGN_KINDS
from ckpttool.model.plan import OutputTensor
from ckpttool.operations.describe import Inspected, group_ranks
from ckpttool.operations.inspected import (
    InspectedCheckpoint,
    InspectedForeign,
    InspectedSaves,
    InspectedStrategy,
    fold_made,
)
from ckpttool.operations.summary import Row, sharded_text
from ckpttool.problems import CODES
from ckpttool.wording import (
    count,
    format_bytes,
    format_number,
    format_numbers,
    format_ranks,
    format_shape,
    format_sizes,
    shorten,
)

if TYPE_CHECKING:
    from ckpttool.operations.inspected import Answered
    from ckpttool.operations.summary import Amount, Entry, Parallelism, Placement, Stage, Summary

_MAX_TEXT = 40  # columns for the ranks of more than four slices
_MAX_RANKS = 12  # rows of the table of ranks
_MAX_GROUPS = 3  # of ranks that differ, in one line
_NO_STRATEGY = "not known without a strategy (-s STRATEGY)"
_KIND_TEXTS = {
    "equal": "equal on their ranks",
    "different": "different between ranks",
    "one value": "of one value",
}


def print_inspected(answer: Answered, *, show_all: bool, show_ranks: bool) -> None:
    """Print what was inspected."""
    match answer:
        case InspectedCheckpoint():
            print_checkpoint(answer.parts, show_all=show_all, show_ranks=show_ranks)
        case InspectedSaves():
            _print_saves(answer)
        case InspectedStrategy():
            print_strategy(answer, show_all)
        case InspectedForeign():
            _print_foreign(answer)


# ---------------------------------------------------------------------------------- the first lines


def print_checkpoint(answer: Inspected, *, show_all: bool, show_ranks: bool) -> None:
    """Print what a checkpoint is, and its tensors: folded, or with ``show_all`` each."""
    files, summary = answer.catalog.files, answer.summary
    if not files and answer.catalog.errors("inspect"):
        return  # it is not known what it is
    color = {True: "green", False: "red", None: "yellow"}[answer.completeness.complete]
    print_facts(answer.catalog.root, facts_of(answer), {"complete": color})
    if show_ranks:
        _print_files(answer)
    if answer.made:
        print_made(answer.made, show_all=show_all)
    elif show_all:
        tensors = count(len({entry.name for entry in summary.entries}), "tensor")
        _print_each(tensors, summary, _columns(summary, answer))
        _print_ranks(summary.rows, summary, answer.checkpoint.is_deduplicated)
        if missing := answer.completeness.missing_tensors:
            print_text(f"  incomplete: {', '.join(missing)}", indent=MARGIN + INDENT)
            echo("")
    else:
        _print_folded(answer)
    hints = [] if show_all else ["--all lists every tensor"]
    if not show_ranks and not (answer.is_merged and len(files) == 1):
        hints.append("--ranks every file" if hints else "--ranks lists every file")
    if hints and any(file.header for file in files.values()):
        print_text(f"{', '.join(hints)}, --json everything", indent=0)


def facts_of(answer: Inspected) -> Mapping[str, Iterable[str]]:
    """Return label to lines of what a checkpoint is, which stand before its tensors."""
    return {
        "contents": _contents(answer),
        "ranks": _differing_ranks(answer),
        "parallelism": _parallelism(answer),
        "complete": _completeness(answer),
        "recorded": _recorded(answer),
        "metadata": _metadata(answer),
        "made by": _provenance(answer),
    }


def _contents(answer: Inspected) -> Iterator[str]:
    """Yield the ranks, step and size of a checkpoint; weights and optimizer state apart."""
    catalog, done, files = answer.catalog, answer.completeness, answer.catalog.files.values()
    ranks = len(answer.expected_ranks)
    readable = ranks - len(done.missing_ranks) - len(done.unreadable_ranks)
    of_all = f"{readable} of " if 0 < readable < ranks else ""
    formats = ", ".join(sorted({file.format for file in files}))
    replicas = " with replicas" if (has_replicas := _has_replicas(answer)) else ""
    stored = (formats, f"{format_bytes(sum(file.nbytes for file in files))}{replicas}")
    damage = dict.fromkeys(error.reason for error in catalog.damaged.values())
    facts = (
        of_all + count(ranks, "file" if answer.is_merged else "rank"),
        f"step {catalog.step}" if catalog.step else "",
        *(stored if files else [shorten(damage, 1)]),
        "" if answer.has_full_tensors else count(len(catalog.metas), "tensor"),
    )
    yield ", ".join(filter(None, facts))
    if answer.has_full_tensors and files:
        yield _number(answer)
    amounts, missing = answer.summary.amounts, len(done.missing_tensors)
    weights, states, copies = amounts.weights, amounts.optimizer_state, amounts.copies
    is_stored = not answer.has_full_tensors and (weights.tensors or states.tensors)
    number = f" ({_parameters(weights)}, {shorten(weights.dtypes, 3)})" if is_stored else ""
    is_same = states.dtypes.keys() <= weights.dtypes.keys() and len(weights.dtypes) == 1
    dtypes = "" if is_same else f" ({shorten(states.dtypes, 3)})"
    sizes = {
        f"weights {format_bytes(weights.nbytes)}{number}": weights.tensors,
        f"optimizer state {format_bytes(states.nbytes)}{dtypes}": states.tensors,
        f"copies {format_bytes(copies.nbytes)}": copies.tensors,
        f"without {count(missing, 'incomplete tensor')}": missing,
        "each tensor once": has_replicas,
    }
    yield from filter(None, [", ".join(amount for amount, is_there in sizes.items() if is_there)])
    if is_stored:
        yield f"as stored{' on all ranks, with replicas' if len(files) > 1 else ''}"


def _has_replicas(answer: Inspected) -> bool:
    placements = {entry.placement for entry in answer.summary.entries if entry.placement.is_listed}
    return any(len(ranks) > 1 for placement in placements for ranks in placement.owners)


def _number(answer: Inspected) -> str:
    """Return the number of parameters of full tensors, and their element types."""
    weights, done = answer.summary.amounts.weights, answer.completeness
    if not (weights.dtypes or done.complete):
        return "parameters not known"
    at_least = "at least " if done.missing_tensors else ""
    dtypes = f" ({shorten(weights.dtypes, 3)})" if weights.dtypes else ""
    return f"{at_least}{_parameters(weights)}{dtypes}"


def _parameters(weights: Amount) -> str:
    return f"{format_number(weights.parameters)} parameters"


def _differing_ranks(answer: Inspected) -> Iterator[str]:
    """Yield a line on ranks whose files hold different tensors, if there are any."""
    files, groups = answer.catalog.files, group_ranks(answer.catalog)
    stages = answer.summary.parallelism.stages if answer.summary.parallelism is not None else ()
    if answer.catalog.is_merged or len(groups) < 2:
        return
    most = _MAX_GROUPS + (len(groups) == _MAX_GROUPS + 1)  # "1 more group" is as long as it
    for ranks in groups[:most]:
        sizes = [files[rank].nbytes for rank in ranks]
        limits = dict.fromkeys(map(format_bytes, (min(sizes), max(sizes))))
        tensors = count(len(files[ranks[0]].header), "tensor")
        each = " each" if len(ranks) > 1 else ""
        which = format_numbers(ranks, MAX_RANGES)
        stage = [n for n, it in enumerate(stages) if stages[1:] and [*it.ranks] == [*ranks]]
        which = f"{format_ranks(stage, 'stage')} ({which})" if stage else which
        yield f"{which}: {tensors}, {' to '.join(limits)}{each}"
    if more := groups[most:]:
        yield f"{count(len(more), 'more group')} of {count(sum(map(len, more)), 'rank')}"


def _recorded(answer: Inspected) -> Iterator[str]:
    description = answer.catalog.description
    if description is not None and description.values:
        yield ", ".join(f"{name} {value}" for name, value in description.values.items())


def _metadata(answer: Inspected) -> Iterator[str]:
    is_safetensors = {file.format for file in answer.catalog.files.values()} == {"safetensors"}
    attrs = answer.catalog.common_attrs if is_safetensors else {}
    shown = [key for key in attrs if key != "format" and not key.startswith(PROVENANCE)]
    texts = (attrs[key] if len(attrs[key]) <= 60 else f"{attrs[key]:.57}..." for key in shown)
    if shown:
        yield shorten(map(" ".join, zip(shown, texts, strict=True)), 3)


def _provenance(answer: Inspected) -> Iterator[str]:
    """Yield how ckpttool made the first file, if that says so; the other files say the same."""
    for file in [*answer.catalog.files.values()][: answer.is_merged]:
        said = {key: file.attrs.get(PROVENANCE + key) for key in ("version", "source", "step")}
        if said["version"] is not None:
            of_step = "" if said["step"] is None else f", step {said['step']}"
            yield f"ckpttool {said['version']} from {said['source']}{of_step}"


def _parallelism(answer: Inspected) -> Iterator[str]:
    """Yield the lines on how the tensors are distributed."""
    summary, files = answer.summary, answer.catalog.files
    codes = answer.completeness.complete_codes
    doubts = [code for code in codes if code in ("strategy", "invalid_strategy", "one_of_several")]
    if summary.parallelism is not None:
        strategy = answer.checkpoint.strategy
        if strategy.layouts and {"replica", "contradicted"} & {*codes}:
            yield f"by {strategy.origin}, with which some contents disagree:"
        yield from _parallelism_texts(summary.parallelism)
    elif not files:
        yield "not known: no file can be read"
    elif doubts:
        yield f"not known: {CODES[doubts[0]].meaning}"
    elif answer.is_merged:
        yield "none: full tensors"
    else:
        replicas = f"perhaps {count(len(files), 'full replica')}"
        yield replicas if answer.looks_replicated else _NO_STRATEGY
        yield from _samples_text(summary)


def _parallelism_texts(parallelism: Parallelism) -> Iterator[str]:
    """Yield how tensors are distributed: in the words of others, then in those of MindSpore."""
    splits = sorted(parallelism.splits, key=lambda split: split.slices)
    shards, stages = parallelism.optimizer_shards, parallelism.stages
    sharded = [split for split in splits if split.slices > 1]
    ways = {"pp": len(stages), "tp": parallelism.tensor_parallel or 1, "dp": 1}
    if parallelism.tensor_parallel is not None or not sharded:
        ways["dp"] = max((split.replicas for split in sharded or splits), default=1)
    sizes = [" x ".join(f"{word} {size}" for word, size in ways.items() if size > 1)]
    if stages:
        of_ranks = f" of {count(len(stages[0].ranks), 'rank')}" if len(stages) > 1 else ""
        sizes.append(f"{count(len(stages), 'stage')}{of_ranks}")
        sizes += [] if shards else ["no optimizer shard"]
    if any(sizes) or not sharded:
        yield ", ".join(filter(None, sizes)) or count(ways["dp"], "full replica")
    if sharded and parallelism.tensor_parallel is None:
        yield f"slices x replicas: {shorten((f'{it.slices} x {it.replicas}' for it in sharded), 4)}"
    yield from _stages_text(stages)
    if shards:
        slices = " or ".join(str(shard.slices) for shard in shards)
        tensors = sum(shard.tensors for shard in shards)
        of_all = "all" if tensors == parallelism.tensors else f"{tensors} of"
        yield f"optimizer shard of {slices} on {of_all} {count(parallelism.tensors, 'tensor')}"


def _stages_text(stages: Sequence[Stage]) -> Iterator[str]:
    """Yield the device matrices of the stages; equal stages together."""
    alike: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    for number, stage in enumerate(stages):
        alike.setdefault(stage.device_matrices, []).append(number)
    for matrices, numbers in [*alike.items()][:_MAX_GROUPS]:
        matrix = "device matrix" if len(matrices) == 1 else "device matrices"
        which = f"{format_ranks(numbers, 'stage')}: " if len(alike) > 1 else ""
        yield f"{which}{matrix} {shorten(map(format_shape, matrices), 3)}"
    if len(alike) > _MAX_GROUPS:
        yield f"and {count(len(alike) - _MAX_GROUPS, 'more group')} of stages"


def _samples_text(summary: Summary) -> Iterator[str]:
    kinds: Counter[str] = Counter(equality.kind for equality in summary.equal_ranks.values())
    if kinds:
        samples = [f"{kinds[kind]} {ends}" for kind, ends in _KIND_TEXTS.items() if kinds[kind]]
        first = ", the first of each row (--all samples every one)"
        which = "" if summary.has_all_samples else first
        yield f"sampled pages of {count(kinds.total(), 'tensor')}{which}: {', '.join(samples)}"
    elif not summary.has_all_samples:
        yield "--all samples every tensor and shows which ranks hold the same"


def _completeness(answer: Inspected) -> Iterator[str]:
    """Yield whether a checkpoint is complete, and what is missing."""
    done, catalog = answer.completeness, answer.catalog
    gone = []
    if missing := done.missing_ranks:
        has = "has" if len(missing) == 1 else "have"
        gone.append(f"{format_ranks(missing, most=MAX_RANGES)}{_in_stages(answer)} {has} no file")
    if done.unreadable_ranks and not catalog.is_merged:
        gone.append(f"{format_ranks(done.unreadable_ranks, most=MAX_RANGES)} cannot be read")
    if done.complete:
        yield f"yes: {_whole(done.replicas)}"
        yield from [f"{', '.join(gone)}: replicas hold the slices"] if gone else ()
        yield "by headers; verify --deep reads the data"
        return
    if done.missing_tensors:
        number = count(len(done.missing_tensors), "tensor")
        gone.append(f"{number} cannot be joined from slices: {shorten(done.missing_tensors, 3)}")
    # What has a line of its own needs no meaning.
    codes = [code for code in done.complete_codes if not gone or code not in ("missing", "damaged")]
    reasons = [*gone, *(CODES[code].meaning for code in codes[:2])]
    if done.complete is not None:
        reasons[0] = f"no: {reasons[0]}"
    elif codes or not catalog.files:
        reasons = [*(["merge needs --unlisted"] if "unlisted" in codes else []), *reasons]
        reasons[0] = f"not known: {reasons[0]}"
    elif answer.looks_replicated:
        merge = f"`ckpttool merge {quote(catalog.root)} --replicated -o FILE`"
        reasons = [f"not known: {merge} compares the replicas", *gone]
    else:
        reasons = [_NO_STRATEGY, *gone]
    yield from reasons


def _in_stages(answer: Inspected) -> str:
    """Return the stages whose ranks have no file; "" if there is only one stage."""
    parallelism, missing = answer.summary.parallelism, {*answer.completeness.missing_ranks}
    if parallelism is None or len(parallelism.stages) < 2:
        return ""
    of = [n for n, stage in enumerate(parallelism.stages) if not missing.isdisjoint(stage.ranks)]
    return f" ({format_ranks(of, 'stage')})"


def _whole(replicas: tuple[int, int] | None) -> str:
    if replicas is None:
        return "every tensor is there"
    least, most = replicas
    each = f"{least} to {most} replicas" if least < most else count(most, "replica")
    return f"every slice is there, {'once' if most == 1 else f'{each} each'}"


# -------------------------------------------------------------------------------------- the tensors


def _print_folded(answer: Inspected) -> None:
    """Print the folded tensors: those with a known sharding in a table, the others in lines."""
    summary, is_known = answer.summary, answer.summary.parallelism is not None
    in_table: list[Row] = []
    in_lines: list[Row] = []
    for row in summary.rows:
        is_single = row.prefixes == ("",) and row.first.is_single_value
        is_in_line = row.first.placement.known == "unlisted" if is_known else is_single
        (in_lines if is_in_line else in_table).append(row)
    number = len(_names_in(in_lines))
    if is_known:
        what = "not in the strategy" if answer.catalog.description is None else "not described"
    else:
        what = "single value" if number == 1 else "single values"
        if not in_table:
            in_lines, in_table = [], in_lines
    title = title_of(in_table, in_lines) + (f"; {number} {what}" if in_lines else "")
    _print_rows(title, in_table, _columns(summary, answer))
    _print_ranks(in_table, summary, answer.checkpoint.is_deduplicated)
    names: dict[str, list[str]] = {}
    for row in in_lines:
        names.setdefault(_equality(row, answer), []).append(row.name())
    for folded, alike in names.items():
        print_text(f"  {what}{folded}: {shorten(alike, 8)}", indent=MARGIN + INDENT)
    if names:
        echo("")


def print_made(made: Sequence[OutputTensor], *, show_all: bool = False) -> None:
    """Print tensors that would be written, those of equal layers together unless ``show_all``."""
    rows = [
        (name, format_sizes(meta.header_shape), meta.dtype, made_of)
        for name, _, meta, made_of in fold_made(made, show_all=show_all)
    ]
    columns = ("tensor", "shape", "type", "made of")
    print_table(count(len(made), "tensor"), columns, rows, has_names=True)


def _equality(row: Row, answer: Inspected) -> str:
    """Return which ranks hold equal tensors, in words; nothing for a merged checkpoint."""
    summary, ranks = answer.summary, row.first.placement.owners[0]
    if answer.is_merged:
        return ""
    is_on_all = len(ranks) == len(answer.expected_ranks)
    on = "" if is_on_all else f" on {format_ranks(ranks, most=MAX_RANGES)}"
    if not summary.has_all_samples or len(ranks) == 1:
        return on and f",{on}"
    if len(groups := _equal_groups(row.first, summary)) > 1:
        return f", different between ranks ({groups_text(groups)})"
    is_sampled = any(summary.equal_ranks[entry.name].sampled for entry in row.entries)
    return f", {'equal samples' if is_sampled else 'equal'}{on or ' on all ranks'}"


def _equal_groups(entry: Entry, summary: Summary) -> list[Sequence[int]]:
    owners = entry.placement.owners[0]
    return [group for group in summary.equal_ranks[entry.name].ranks if group[0] in owners]


# ---------------------------------------------------------------------------------------- the table

Columns = Mapping[str, Callable[[Row], str]]  # title to the cell of a row
_DETAILS = ("device matrix", "tensor map", "file")  # columns that a folded table lacks


def _columns(summary: Summary, answer: Inspected | None = None) -> Columns:
    """Return the columns of a checkpoint or of a strategy."""
    if (parallelism := summary.parallelism) is not None:
        return {
            "tensors": Row.name,
            "listed shape" if answer is None else "full shape": _shape,
            "dtype": _dtype,
            "sharded": lambda row: sharded_text(row.first.placement),
            "device matrix": _device_matrix,
            "tensor map": _tensor_map,
            "stages": partial(_stages_of, parallelism),
        }
    if answer is not None and all(entry.placement.known == "full" for entry in summary.entries):
        files = [*answer.catalog.files.values()]
        several = files[::-1] if len(files) > 1 else ()  # the first of those with a name counts
        paths = {name: file.path for file in several for name in file.header}
        return {
            "tensors": Row.name,
            "shape" if answer.catalog.one_of_several else "full shape": _shape,
            "dtype": _dtype,
            "size>": lambda row: format_bytes(sum(entry.total_nbytes for entry in row.entries)),
            "file": lambda row: PurePath(paths.get(row.first.name, "")).name,
        }

    def ranks(row: Row) -> str:
        equal = summary.equal_ranks.get(row.first.name)
        ways: list[Sequence[Sequence[int]]] = [placement.owners for placement in row.placements]
        if equal is not None:
            alike = (it for it in row.parameters if it.name in summary.equal_ranks)
            ways = [_equal_groups(it, summary) for it in alike]
        first, *more = dict.fromkeys(map(groups_text, ways))
        if more:
            first = "; ".join((first, *more[:1], *(["..."] if more[1:] else ())))
        return f"{first} (one value)" if equal is not None and equal.kind == "one value" else first

    title = "equal ranks" if summary.has_all_samples else "equal ranks, first"
    title = title if summary.equal_ranks else "ranks"
    return {"tensors": Row.name, "shape": _shape, "dtype": _dtype, title: ranks}


def _print_each(title: str, summary: Summary, columns: Columns) -> None:
    _print_cells(title, [Row(entry.name, ("",), (entry,)) for entry in summary.entries], columns)


def _print_cells(title: str, rows: Sequence[Row], columns: Columns) -> None:
    cells = ([cell(row) for cell in columns.values()] for row in rows)
    print_table(title, list(columns), cells, has_names=True)


def _print_rows(title: str, rows: Sequence[Row], columns: Columns) -> None:
    """Print a table of the first rows, the unsharded ones joined."""
    if not rows:
        return
    common = common_prefixes(rows)
    rows = _join_unsharded(rows)
    shown = rows[:MAX_ROWS]
    titles = {"size>": "size with states>"} if any(row.prefixes[1:] for row in shown) else {}
    columns = {titles.get(key, key): columns[key] for key in columns if key not in _DETAILS}
    if len({*map(_dtype, shown)}) == 1:
        del columns["dtype"]  # a line above the table says it
    _print_cells(title, shown, {**columns, "tensors": lambda row: row.name(common)})
    print_more(len(rows) - MAX_ROWS, "row")


def title_of(rows: Sequence[Row], more_rows: Sequence[Row] = ()) -> str:
    """Return how many tensors rows have, and the states that every parameter has."""
    parameters = len({it.name for row in rows if "" in row.prefixes for it in row.parameters})
    states = ", ".join(filter(None, common_prefixes(rows)))
    title = count(len(_names_in((*rows, *more_rows))), "tensor")
    each = "each with" if parameters > 1 else "with"
    return f"{title}: {count(parameters, 'parameter')}, {each} {states}" if states else title


def _names_in(rows: Iterable[Row]) -> set[str]:
    return {entry.name for row in rows for entry in row.entries}


def common_prefixes(rows: Iterable[Row]) -> tuple[str, ...]:
    """Return the prefixes of the states of every parameter; none if they differ."""
    prefixes = {row.prefixes for row in rows if "" in row.prefixes}
    return prefixes.pop() if len(prefixes) == 1 else ()


def _join_unsharded(rows: Sequence[Row]) -> list[Row]:
    """Join the unsharded parameters on as many ranks, if others are sharded."""
    sharded = [row for row in rows if row.first.placement.is_sharded]
    if not sharded:
        return list(rows)
    unsharded: dict[object, list[Row]] = {}
    for row in rows:
        if not row.first.placement.is_sharded:
            alone = None if "" in row.prefixes else row.pattern
            alike = row.prefixes, row.first.placement.replicas, alone
            unsharded.setdefault(alike, []).append(row)
    return [*sharded, *map(_join, unsharded.values())]


def _join(rows: Sequence[Row]) -> Row:
    if len(rows) == 1:
        return rows[0]
    number = sum(len(row.parameters) for row in rows)
    entries = tuple(entry for row in rows for entry in row.entries)
    return Row(f"{count(number, 'more parameter')}", rows[0].prefixes, entries)


def _dtype(row: Row) -> str:
    return _only(entry.dtype for entry in row.parameters)


def _shape(row: Row) -> str:
    return _only("" if it.shape is None else format_sizes(it.shape) for it in row.parameters)


def _only(texts: Iterable[str]) -> str:
    first, *rest = dict.fromkeys(texts)
    return "" if rest else first


def _device_matrix(row: Row) -> str:
    layout = row.first.placement.layout
    return "" if layout is None else format_shape(layout.device_matrix)


def _tensor_map(row: Row) -> str:
    layout = row.first.placement.layout
    axes = () if layout is None else layout.tensor_map
    return " ".join(format_shape(axis) if axis else "-" for axis in axes)


def _stages_of(parallelism: Parallelism, row: Row) -> str:
    """Return the stages that hold a row; "" if there is only one."""
    ranks = {*chain(*((it.first_rank, *it.others) for it in row.placements))}
    stages = enumerate(parallelism.stages if parallelism.stages[1:] else ())
    return format_numbers(number for number, it in stages if not ranks.isdisjoint(it.ranks))


def _print_ranks(rows: Sequence[Row], summary: Summary, is_deduplicated: bool = False) -> None:
    """Print the ranks of each slice: once for all tensors of a stage that are sharded alike.

    Where the ranks of tensors that are sharded alike differ, their names stand there, too.
    """
    if summary.parallelism is None:
        return
    stages = summary.parallelism.stages if summary.parallelism.stages[1:] else ()
    groups: dict[tuple[str, str], dict[str, list[str]]] = {}
    for row in rows:
        sharded = sharded_text(row.first.placement)
        for placement in sorted(row.placements, key=lambda placement: placement.first_rank):
            first = placement.first_rank
            stage = next((str(n) for n, it in enumerate(stages) if first in it.ranks), "")
            ranks = _placement_text(placement, first)
            groups.setdefault((stage, sharded), {}).setdefault(ranks, []).append(row.name())
    alike: dict[tuple[str, str], list[str]] = {}
    for (stage, sharded), by_ranks in groups.items():
        for ranks, names in by_ranks.items():
            which = f": {shorten(names, 2)}" if len(by_ranks) > 1 else ""
            alike.setdefault((stage, ranks), []).append(f"{sharded}{which}")
    ways = sorted(alike.items(), key=lambda way: int(way[0][0] or 0))
    cells = [
        (stage if not n or ways[n - 1][0][0] != stage else "", "; ".join(how), ranks)
        for n, ((stage, ranks), how) in enumerate(ways)
    ]
    what = "ranks of the layout" if is_deduplicated else "ranks of each slice"
    title = f"{what}, | between slices; 0-6/2 is 0, 2, 4, 6"
    print_table(title, ("stage>", "sharded", "ranks"), cells[:_MAX_RANKS])
    print_more(len(cells) - _MAX_RANKS, "row")


@lru_cache(maxsize=64)  # thousands of tensors have few placements, each of thousands of ranks
def _placement_text(placement: Placement, first_rank: int) -> str:
    """Return the ranks of each slice; placements on other ``first_rank`` are equal."""
    also = f"; also {format_numbers(placement.others)}" if placement.others else ""
    return groups_text(placement.owners) + also


def groups_text(groups: Sequence[Sequence[int]]) -> str:
    """Return the ranks of each group; the first and the last, if they are long together.

    Examples
    --------
    >>> groups_text([[0, 2], [1, 3]]), groups_text([[rank] for rank in range(64)])
    ('0, 2 | 1, 3', '0 | 1 | ... | 63')
    """
    texts = [format_numbers(group, MAX_RANGES) for group in groups]
    is_short = len(texts) <= 4 or len(" | ".join(texts)) <= _MAX_TEXT
    return " | ".join(texts if is_short else (*texts[:2], "...", texts[-1]))


def _print_files(answer: Inspected) -> None:
    """Print a table of all files."""
    root, rows = answer.catalog.root, []
    for rank, file in answer.catalog.files.items():
        device = answer.devices.get(rank)
        names = (path.removeprefix(root).lstrip("/") or path for path in file.paths)
        where = f"{device.server}:{device.device}" if device else ""
        sizes = str(len(file.tensors)), format_bytes(file.nbytes)
        number = "" if answer.is_merged else str(rank)
        rows.append((number, where, ", ".join(names), file.format, *sizes))
    columns = ("rank>", "device", "path", "format", "tensors>", "size>")
    print_table(count(len(rows), "file"), columns, rows)


# ------------------------------------------------------------------------------------- other files


def _print_saves(answer: InspectedSaves) -> None:
    ranks = count(sum(len(save.ranks) for save in answer.saves), "rank")
    print_facts(answer.path, {"contents": [f"{ranks}, no step was chosen"]})
    rows = ((format_numbers(save.ranks), ", ".join(save.files)) for save in answer.saves)
    print_table("files of every step", ("ranks", "names"), rows)


def print_strategy(answer: InspectedStrategy, show_all: bool) -> None:
    """Print the stages of a strategy, and its parameters: folded, or with ``show_all`` each."""
    strategy, summary, rules = answer.strategy, answer.listed, answer.strategy.rules
    listed_rows = [row for row in summary.rows if row.first.name in strategy.layouts]
    parts = [f"a strategy for {count(len(strategy.ranks), 'rank')}"]
    titles = []
    if listed_rows:
        titles.append(title_of(listed_rows))
        parameters = (row for row in listed_rows if "" in row.prefixes)
        sharded = sum(len(row.parameters) for row in parameters if row.first.placement.is_sharded)
        tensors = count(len(strategy.layouts), "tensor")
        parts.append(f"{tensors}, {count(sharded, 'sharded parameter')}")
    if rules is not None:
        titles.append(count(len(rules.rules), "pattern"))
        rest = "replicated" if rules.replicates_rest else "not decided"
        parts.append(f"{titles[-1]}, all other parameters {rest}")
    assert summary.parallelism is not None, "a strategy has layouts"
    texts = _parallelism_texts(summary.parallelism)
    print_facts(shorten(strategy.files, 3), {"contents": parts, "parallelism": texts})
    title, columns = ", ".join(titles), _columns(summary)
    if show_all:
        _print_each(title, summary, columns)
    else:
        _print_rows(title, summary.rows, columns)
    _print_ranks(summary.rows, summary)
    if not show_all:
        print_text("--all lists every layout, --json everything", indent=0)


def _print_foreign(file: InspectedForeign) -> None:
    """Print what a file is that is not a checkpoint."""
    noun = FOREIGN_KINDS[file.kind].noun
    print_text(f"{file.path}: {noun}, {format_bytes(file.nbytes)}")
    if (devices := file.ranks) is not None:
        servers = count(len({device.server for device in devices}), "server")
        print_table(
            f"{len(devices)} ranks on {servers}",
            ("rank>", "server", "device>", "device ip"),
            ((str(it.rank), it.server, str(it.device), it.device_ip or "") for it in devices),
        )
