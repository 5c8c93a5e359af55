"""Writer of MindSpore's strategy files, of one stage or merged over pipeline stages.

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

Refused
-------
An empty name; a name with a ``-``, where MindSpore cuts names in two; a stage without parameters; a
manual split without rows.

Source
------
MindSpore 2.10 ``parallel/_parallel_serialization.py`` (``_convert_to_list``,
``_merge_protobuf_strategy``, ``_extract_pipeline_stage_num``) and ``parallel/_tensor.py``
(``_construct_tensor_layout_for_opt_shard``).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path

from ckpttool.formats.local import url_problem
from ckpttool.formats.wire import encode_bytes, encode_number
from ckpttool.model.layout import Layout
from ckpttool.model.strategy import Strategy
from ckpttool.problems import Diagnostic, PlanError, StrategyError, raise_all
from ckpttool.storage.files import is_there, write_document
from ckpttool.wording import count, format_ranks, shorten

_OTHER_FORMS = {
    ".json": "the suffix is for JSON, and the strategy is written as protobuf",
    ".yaml": "the suffix is for hand-written strategies, and this one is written as protobuf",
    ".yml": "the suffix is for hand-written strategies, and this one is written as protobuf",
}


def name_problem(path: str) -> tuple[str, str] | None:
    """Return why a strategy file must not have this name and what to use instead, else None.

    Examples
    --------
    >>> name_problem("new.json")
    ('the suffix is for JSON, and the strategy is written as protobuf', 'new.ckpt')
    """
    if (problem := url_problem(path)) is not None:
        return problem
    other = _OTHER_FORMS.get(Path(path).suffix)
    return None if other is None else (other, str(Path(path).with_suffix(".ckpt")))


def write_strategy(
    strategy: Strategy, path: str | os.PathLike[str], *, overwrite: bool = False
) -> None:
    """Write a strategy as one of MindSpore's files (protobuf), completely or not at all.

    Layouts are written as they are, also those that a JSON file gives of an expanded tensor.

    Parameters
    ----------
    strategy
        The strategy; of a hand-written one the result of `Strategy.resolve`.
    path
        The file; its folder is made if necessary.
    overwrite
        Whether an existing file may be replaced.

    Raises
    ------
    StrategyError
        The file must not have this name, or MindSpore's form cannot express the strategy.
    PlanError
        The file exists.
    OSError
        It cannot be written.
    """
    path = os.fspath(path)
    if (problem := name_problem(path)) is not None:
        raise StrategyError(path, *problem)
    data = encode_strategy(strategy)
    if is_there(path) and not overwrite:
        text = "the strategy file exists already"
        raise PlanError(
            [Diagnostic("destination", text, hint="overwrite=True", path=path, where=path)]
        )
    write_document(path, data)


def encode_strategy(strategy: Strategy) -> bytes:
    """Return the bytes of a strategy file, without full shapes.

    Raises
    ------
    StrategyError
        MindSpore's form cannot express the strategy, or a hand-written strategy is not resolved
        yet.  The error has all reasons, with the parameters.
    """
    items = [
        (layout.first_rank // strategy.stage_ranks, name, layout)
        for name, layouts in strategy.layouts.items()
        for layout in layouts
    ]
    items.sort(key=lambda item: item[:2])
    raise_all(_refusals(strategy, items))
    out = [encode_number(1, 1)]
    for stage in range(strategy.stages):
        operators = encode_bytes(1, f"ckpttool_stage_{stage}".encode())
        out.append(encode_bytes(2, operators + encode_bytes(2, encode_number(1, stage))))
    encoded: dict[Layout, bytes] = {}  # a model has few layouts
    for stage, name, layout in items:
        if layout not in encoded:
            encoded[layout] = encode_bytes(2, _encode_layout(layout))
        full_name = name if strategy.stages == 1 else f"{stage}-{name}"
        out.append(encode_bytes(3, encode_bytes(1, full_name.encode()) + encoded[layout]))
    return b"".join(out)


def _refusals(
    strategy: Strategy, items: Iterable[tuple[int, str, Layout]]
) -> Iterator[StrategyError]:
    """Yield the errors of what MindSpore's form cannot express."""
    if strategy.rules is not None:
        text = "lists patterns of names, and MindSpore's files list parameters"
        hint = "split or reshard with --write-strategy"
        yield StrategyError(strategy.rules.path, text, hint)
        return
    if strategy.is_of_group:
        text = "lists the sharded axes only, and MindSpore's files list all axes"
        yield StrategyError(strategy.origin, text, "split or reshard with --write-strategy")
        return
    missing = sorted({*range(strategy.stages)} - {stage for stage, _, _ in items})
    if missing:
        text = f"no parameter of {format_ranks(missing, 'stage')}"
        facts = "MindSpore reads a strategy only if it has parameters of every stage"
        yield StrategyError(strategy.origin, text, facts=facts)
    refused: dict[tuple[str, ...], dict[str, None]] = {}
    for _, name, layout in items:
        reasons = _unsupported_reason(name, layout, strategy.stage_ranks)
        if reasons is not None:
            refused.setdefault(reasons, {})[name] = None
    for reasons, names in refused.items():
        text, *rest = reasons
        parameters = count(len(names), "parameter")
        yield StrategyError(shorten(map(repr, names), 3), f"{parameters} {text}", *rest)


def _unsupported_reason(name: str, layout: Layout, stage_ranks: int) -> tuple[str, ...] | None:
    """Return what MindSpore's form cannot express, with hint and facts; None if it can."""
    if not name or "-" in name:
        return (
            "with a name that MindSpore cannot read in a strategy",
            "the same command without --write-strategy",
            "MindSpore splits names at every -, and reads no empty name",
        )
    if len(layout.ranks) != stage_ranks:
        return (f"with a layout of {len(layout.ranks)} ranks, and a stage has {stage_ranks}",)
    if layout.rows and not any(layout.rows):
        return ("with a manual split without rows, which MindSpore ignores",)
    return None


def _encode_layout(layout: Layout) -> bytes:
    """Return the message ``parallel_layouts``."""
    is_sharded = layout.optimizer_shard > 1
    starts = list(accumulate((0, *layout.rows[:-1]))) if layout.rows else []
    return b"".join(
        (
            _encode_dims(1, layout.device_matrix),
            *(_encode_dims(2, axes) for axes in _encoded_tensor_maps(layout)),
            _encode_dims(3, layout.rows or layout.split_shape),
            _encode_dims(4, starts),
            encode_number(5, layout.fields if layout.fields > 1 else 0),
            encode_number(6, _shard_step(layout) if is_sharded else 0),
            encode_number(7, layout.optimizer_shard if is_sharded else 0),
        )
    )


def _encode_dims(number: int, dims: Iterable[int]) -> bytes:
    """Return a field that is a message of repeated numbers."""
    return encode_bytes(number, b"".join(encode_number(1, dim) for dim in dims))


def _encoded_tensor_maps(layout: Layout) -> list[Sequence[int]]:
    """Return the one tensor map, or one for each tensor axis."""
    spelled: list[Sequence[int]] = [axes or (-1,) for axes in layout.tensor_map]
    if all(len(axes) == 1 for axes in spelled) and not _is_misread(layout):
        return [[axis for (axis,) in spelled]]
    return spelled if len(spelled) > 1 else [*spelled, ()]


def _is_misread(layout: Layout) -> bool:
    """Return whether MindSpore would swap slices with a single ``tensor_map`` message."""
    sizes = layout.device_matrix[::-1]
    used = [axis for axes in layout.tensor_map for axis in axes if sizes[axis] > 1]
    free = [axis for axis, size in enumerate(sizes) if size > 1 and axis not in used]
    is_outermost = free == [len(sizes) - 1]
    return layout.optimizer_shard > 1 and is_outermost and used != sorted(used, reverse=True)


def _shard_step(layout: Layout) -> int:
    """Return the mean distance between neighbours in the replica group of the lowest rank."""
    sizes = layout.device_matrix[::-1]
    used = {axis for axes in layout.tensor_map for axis in axes}
    last = sum(
        (size - 1) * math.prod(sizes[:axis]) for axis, size in enumerate(sizes) if axis not in used
    )
    return last // (layout.replicas - 1)
