"""Writer of strategy files: MindSpore's, protobuf or JSON, and hand-written ones in YAML.

It decides what each form can express, and encodes it.  The caller chooses the strategy, and
`ckpttool.storage.files` writes the file.

The suffix gives the form, as for the reader: the table `FORMS`.  The result is read again before it
is returned, and says the same.

Bytes
-----
The protobuf message that `ckpttool.strategy_files.reader` describes, its fields in this order::

    08 01                       current_stage 1, as in a file that MindSpore has merged
    12 ..                       parallel_strategy_item, one for each stage, ascending
        0a .. "ckpttool_stage_0"
        12 02 08 SS             its stage, and no strategies of operators
    1a ..                       parallel_layout_item, for each stage its parameters, sorted by name
        0a .. NAME              with several stages "<stage>-<name>"
        12 ..
            0a .. 08 NN ...     dev_matrix
            12 .. 08 NN ...     tensor_map, one or several
            1a .. 08 NN ...     param_split_shape; 1a 00 if axis 0 is cut evenly
            22 .. 08 NN ...     indices_offset, the first row of each slice; 22 00 likewise
            28 NN               field; 0 for all but field-sliced embeddings
            30 NN               opt_weight_shard_step
            38 NN               opt_weight_shard_size, the number of slices; both 0 for none

Each stage has an item of operators: MindSpore takes the stage of a file from it, and calls a file
without such items empty.  Numbers are not packed; -1 takes ten bytes.

A single ``tensor_map`` message holds an entry for each tensor axis.  If several device axes shard
one tensor axis, each tensor axis has its own message instead.  ``-1`` in it stands for no device
axis, because MindSpore drops empty messages.  The message of a tensor of one axis has an empty one
behind it.

The form with several messages is also written in one more case: the optimizer shard uses the
outermost device axis, and all other device axes shard tensor axes.  MindSpore's
``transform_checkpoints`` then assigns those in the order of the device matrix.  If that order is
wrong, it swaps slices silently; with several messages it does not.  Versions up to 2.4 refuse
several messages.

``opt_weight_shard_step`` is the mean distance between neighbours in the replica group of rank 0,
rounded down, as MindSpore computes it.  Its documents call the number informative.  But with 0 its
transform takes the slices for unsharded, and with a wrong number it refuses them.  The size is
always written as a number.  MindSpore writes -1 for the whole group, but loads the number correctly
in more cases.

The JSON form has the same items in one object, keys sorted and no blanks, as MindSpore writes it:
``parallel_strategy_item`` and ``parallel_layout_item`` with ``tensor_map`` as one list, and
``tensor_shape`` if the full shape is known.  ``param_split_shape`` and ``indices_offset`` are
absent if they are empty.  `ckpttool.strategy_files.handwritten` describes the hand-written form.

Refused
-------
In MindSpore's forms an empty name; a name with a ``-``, where MindSpore cuts names in two; a stage
without parameters; a manual split without rows; a rule that needs a checkpoint.  In JSON a tensor
map with several messages, which MindSpore does not read there.  In the hand-written form what
`why_no_line` finds.

Source
------
MindSpore 2.10 ``parallel/_parallel_serialization.py`` (``_convert_to_list``,
``_merge_protobuf_strategy``, ``_extract_pipeline_stage_num``) and ``parallel/_tensor.py``
(``_construct_tensor_layout_for_opt_shard``).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Literal, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from ckpttool.formats.local import url_problem
from ckpttool.formats.wire import encode_bytes, encode_number
from ckpttool.model.layout import Layout
from ckpttool.model.strategy import Rules, Strategy
from ckpttool.problems import Diagnostic, PlanError, StrategyError, raise_all
from ckpttool.storage.files import is_there, write_document
from ckpttool.strategy_files.folders import YAML_SUFFIXES
from ckpttool.strategy_files.handwritten import encode_handwritten, why_no_line
from ckpttool.strategy_files.reader import Layouts, parse_strategy, read_strategy
from ckpttool.wording import count, format_ranks, shorten

_OPERATORS = "ckpttool_stage_"  # begins the name of the item of a stage
_NEEDS_NAMES = "split or reshard with --write-strategy"  # these have the names of a checkpoint


def write_strategy(
    strategy: Layouts, path: str | os.PathLike[str], *, overwrite: bool = False
) -> None:
    """Write a strategy file, completely or not at all, and make its folder if necessary.

    ``.json`` is JSON, ``.yaml`` and ``.yml`` are hand-written, and every other name is protobuf.
    Layouts are written as they are, also those that a JSON file gives of an expanded tensor.  JSON
    alone has a place for full shapes.  A hand-written strategy whose patterns match several names
    is written only as YAML.

    Raises
    ------
    StrategyError
        The form cannot express the strategy.
    PlanError
        The file exists.
    OSError
        It cannot be written.
    """
    path = os.fspath(path)
    if (problem := url_problem(path)) is not None:
        raise StrategyError(path, *problem)
    data = encode_strategy(read_strategy(strategy), path)
    if is_there(path) and not overwrite:
        message = "the strategy file exists already"
        refusal = Diagnostic("destination", message, hint="overwrite=True", path=path, where=path)
        raise PlanError([refusal])
    write_document(path, data)


def encode_strategy(strategy: Strategy, path: str) -> bytes:
    """Return the bytes of a strategy file with the name ``path``; nothing is written.

    Raises
    ------
    StrategyError
        The form of the file cannot express the strategy.  The error has all reasons, with the
        parameters.
    """
    form = form_of(path)
    spelled, problems = strategy.expand_rules()
    raise_all(StrategyError(p.where, p.message, p.hint, p.facts) for p in problems)
    raise_all(form.refusals(spelled))
    data = form.encode(spelled, path)
    again = parse_strategy(data, path)
    has_rest = again.rules is not None  # MindSpore's forms have no place for it
    is_same = _said(spelled, has_rest) == _said(again, has_rest)
    assert is_same, f"{path} would be read as another strategy"
    return data


def _said(strategy: Strategy, has_rest: bool) -> tuple[object, ...]:
    rules, of_rest = strategy.rules, strategy.covers_rest
    if rules is not None:
        strategy, _ = replace(strategy, rules=replace(rules, replicates_rest=False)).expand_rules()
    left = [replace(rule, place="") for rule in (strategy.rules.rules if strategy.rules else ())]
    return strategy.layouts, left, of_rest and has_rest, strategy.stages, strategy.stage_ranks


Word = Literal["protobuf", "JSON", "hand-written"]


class Form(Struct, frozen=True):
    """A form of strategy files.

    ``encode`` takes the name of the file for messages.  ``refusals`` yields an error for each thing
    that the form cannot express.
    """

    word: Word  # what it is, in a message
    has_shapes: bool  # whether it has a place for full shapes
    encode: Callable[[Strategy, str], bytes]
    refusals: Callable[[Strategy], Iterator[StrategyError]]


def form_of(path: str) -> Form:
    """Return the form of a file, by its suffix."""
    return next((form for suffix, form in FORMS.items() if path.endswith(suffix)), _PROTOBUF)


# ---------------------------------------------------------------------------------- what is refused


def _refuse_in_protobuf(strategy: Strategy) -> Iterator[StrategyError]:
    """Yield the errors of what MindSpore's protobuf files cannot express."""
    if strategy.rules is not None:
        yield from _refuse_rules(strategy.rules)
        return
    if strategy.is_of_group:
        message = "lists the sharded axes only, and MindSpore's files list all axes"
        yield StrategyError(strategy.origin, message, _NEEDS_NAMES)
        return
    items = _items(strategy)
    missing = sorted({*range(strategy.stages)} - {stage for stage, _, _ in items})
    if missing:
        message = f"no parameter of {format_ranks(missing, 'stage')}"
        facts = "MindSpore reads a strategy only if it has parameters of every stage"
        yield StrategyError(strategy.origin, message, facts=facts)
    of_stage = strategy.stage_ranks
    yield from _join((name, _why_not_mindspore(name, way, of_stage)) for _, name, way in items)


def _refuse_in_json(strategy: Strategy) -> Iterator[StrategyError]:
    yield from _refuse_in_protobuf(strategy)
    message = "with a list for each axis in tensor_map, which MindSpore does not read in JSON"
    reason = (message, "a name that ends in .ckpt or .yaml")
    named = ((name, layout) for name, of_name in strategy.layouts.items() for layout in of_name)
    yield from _join((name, reason) for name, way in named if len(_encoded_tensor_maps(way)) > 1)


def _refuse_in_yaml(strategy: Strategy) -> Iterator[StrategyError]:
    if strategy.rules is not None and strategy.layouts:
        what = "patterns that add to the parameters of other files, and a file has one of the two"
        yield StrategyError(strategy.rules.path, what, "one conversion for each")
    if strategy.is_of_group:
        message = "lists the sharded axes only, and a hand-written strategy lists all axes"
        yield StrategyError(strategy.origin, message, _NEEDS_NAMES)
        return
    hint = "a name that ends in .ckpt"
    reasons = ((name, why_no_line(layouts)) for name, layouts in strategy.layouts.items())
    yield from _join((name, None if why is None else (why, hint)) for name, why in reasons)


def _join(reasons: Iterable[tuple[str, tuple[str, ...] | None]]) -> Iterator[StrategyError]:
    refused: dict[tuple[str, ...], dict[str, None]] = {}
    for name, reason in reasons:
        if reason is not None:
            refused.setdefault(reason, {})[name] = None
    for (message, *rest), names in refused.items():
        parameters = count(len(names), "parameter")
        yield StrategyError(shorten(map(repr, names), 3), f"{parameters} {message}", *rest)


def _why_not_mindspore(name: str, layout: Layout, stage_ranks: int) -> tuple[str, ...] | None:
    """Return what MindSpore's forms cannot express, with hint and facts; None if they can."""
    if not name or "-" in name:
        return (
            "with a name that MindSpore cannot read in a strategy",
            "a hand-written strategy, whose name ends in .yaml",
            "MindSpore splits names at every -, and reads no empty name",
        )
    if len(layout.ranks) != stage_ranks:
        return (f"with a layout of {len(layout.ranks)} ranks, and a stage has {stage_ranks}",)
    if layout.rows and not any(layout.rows):
        return ("with a manual split without rows, which MindSpore ignores",)
    return None


def _refuse_rules(rules: Rules) -> Iterator[StrategyError]:
    several = [repr(rule.pattern) for rule in rules.rules if rule.only_name is None]
    any_axes = [repr(rule.pattern) for rule in rules.rules if rule.allows_more_axes]
    kinds = {
        "for patterns of names, and MindSpore's files list each name": several,
        "for any number of axes, and MindSpore's files list each axis": any_axes,
        "for all other parameters, and MindSpore's files list each": rules.replicates_rest
        * ["otherwise"],
    }
    for reason, patterns in kinds.items():
        if patterns:
            where = f"{rules.path}: {shorten(patterns, 3)}"
            yield StrategyError(where, f"{count(len(patterns), 'line')} {reason}", _NEEDS_NAMES)


# -------------------------------------------------------------------------------- MindSpore's forms


def _items(strategy: Strategy) -> list[tuple[int, str, Layout]]:
    items = [
        (layout.first_rank // strategy.stage_ranks, name, layout)
        for name, layouts in strategy.layouts.items()
        for layout in layouts
    ]
    return sorted(items, key=lambda item: item[:2])


def _name_in(strategy: Strategy, stage: int, name: str) -> str:
    return name if strategy.stages == 1 else f"{stage}-{name}"


def _encode_protobuf(strategy: Strategy, path: str) -> bytes:
    out = [encode_number(1, 1)]
    for stage in range(strategy.stages):
        operators = encode_bytes(1, f"{_OPERATORS}{stage}".encode())
        out.append(encode_bytes(2, operators + encode_bytes(2, encode_number(1, stage))))
    encoded: dict[Layout, bytes] = {}  # a model has few layouts
    for stage, name, layout in _items(strategy):
        if layout not in encoded:
            encoded[layout] = encode_bytes(2, _encode_layout(layout))
        named = encode_bytes(1, _name_in(strategy, stage, name).encode())
        out.append(encode_bytes(3, named + encoded[layout]))
    return b"".join(out)


def _encode_json(strategy: Strategy, path: str) -> bytes:
    operators = {
        f"{_OPERATORS}{stage}": {"parallel_strategy": [], "stage": stage}
        for stage in range(strategy.stages)
    }
    layouts = {
        _name_in(strategy, stage, name): _describe_layout(layout)
        for stage, name, layout in _items(strategy)
    }
    document = {
        "current_stage": 1,
        "parallel_layout_item": layouts,
        "parallel_strategy_item": operators,
    }
    return json.dumps(document, ensure_ascii=False, separators=(",", ":"), sort_keys=True).encode()


class _Item(NamedTuple):
    """The numbers of a layout in both of MindSpore's forms, in the order of their fields."""

    dev_matrix: Sequence[int]
    tensor_map: Sequence[Sequence[int]]
    param_split_shape: Sequence[int]
    indices_offset: Sequence[int]
    field: int
    opt_weight_shard_step: int
    opt_weight_shard_size: int


def _item_of(layout: Layout) -> _Item:
    return _Item(
        layout.device_matrix,
        _encoded_tensor_maps(layout),
        layout.rows or layout.split_shape,
        [*accumulate(layout.rows, initial=0)][:-1],
        layout.fields if layout.fields > 1 else 0,
        _shard_step(layout) if layout.optimizer_shard > 1 else 0,
        layout.optimizer_shard if layout.optimizer_shard > 1 else 0,
    )


def _describe_layout(layout: Layout) -> dict[str, object]:
    item = _item_of(layout)
    tensor_map = [axis for axes in item.tensor_map for axis in axes]
    described: dict[str, object] = {**item._asdict(), "tensor_map": tensor_map}
    for key in ("param_split_shape", "indices_offset"):
        if not described[key]:
            del described[key]
    if layout.full_shape is not None:
        described["tensor_shape"] = layout.full_shape
    return described


def _encode_layout(layout: Layout) -> bytes:
    dev_matrix, maps, split, offsets, *numbers = _item_of(layout)
    lists = (1, dev_matrix), *((2, axes) for axes in maps), (3, split), (4, offsets)
    return b"".join(
        (*(_encode_dims(*each) for each in lists), *map(encode_number, (5, 6, 7), numbers))
    )


def _encode_dims(number: int, dims: Iterable[int]) -> bytes:
    return encode_bytes(number, b"".join(encode_number(1, dim) for dim in dims))


def _encoded_tensor_maps(layout: Layout) -> list[Sequence[int]]:
    spelled: list[Sequence[int]] = [axes or (-1,) for axes in layout.tensor_map]
    if all(len(axes) == 1 for axes in spelled) and not _is_misread(layout):
        return [[axis for (axis,) in spelled]]
    return spelled if len(spelled) > 1 else [*spelled, ()]


def _is_misread(layout: Layout) -> bool:
    sizes = layout.device_matrix[::-1]
    used = [axis for axes in layout.tensor_map for axis in axes if sizes[axis] > 1]
    free = [axis for axis, size in enumerate(sizes) if size > 1 and axis not in used]
    is_outermost = free == [len(sizes) - 1]
    return layout.optimizer_shard > 1 and is_outermost and used != sorted(used, reverse=True)


def _shard_step(layout: Layout) -> int:
    sizes = layout.device_matrix[::-1]
    used = {axis for axes in layout.tensor_map for axis in axes}
    last = sum(
        (size - 1) * math.prod(sizes[:axis]) for axis, size in enumerate(sizes) if axis not in used
    )
    return last // (layout.replicas - 1)


_PROTOBUF = Form("protobuf", False, _encode_protobuf, _refuse_in_protobuf)
_YAML = Form("hand-written", False, encode_handwritten, _refuse_in_yaml)
FORMS = {  # by suffix, as for the reader; every other file is protobuf
    ".json": Form("JSON", True, _encode_json, _refuse_in_json),
    **dict.fromkeys(YAML_SUFFIXES, _YAML),
}
