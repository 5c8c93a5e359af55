"""Files that lie beside checkpoints and are none, recognised by what is in them.

All but the rank tables are protobuf messages without a mark of their own, so the fields tell::

    graph       1 a number, then 4 a message     ``{prefix}-graph.meta``, anf_ir ``ModelProto``
    strategy    1 a number, then 2 and 3         ``ParallelStrategyMap``
    mindir      1 a version like "1.1", 2 text   mind_ir ``ModelProto``, an exported model
    group_info  1 groups and 2 ranks             see `ckpttool.formats.group_info`

Source
------
MindSpore 2.10 ``train/anf_ir.proto``, ``train/mind_ir.proto``, ``utils/node_strategy.proto``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from ckpttool.errors import FormatError
from ckpttool.formats.group_info import read_group_info
from ckpttool.formats.strict_json import parse_json
from ckpttool.formats.wire import LENGTH, VARINT, WireReader

JSON_BYTES = 16 << 20  # of a larger document not even the kind is told
VERSION = re.compile(rb"\d+(\.\d+)+")
VERSION_BYTES = 40
BY_HAND = re.compile(rb"^[\"']?ckpttool_strategy[\"']?\s*:", re.MULTILINE)
BY_HAND_BYTES = 64 << 10  # a mark that stands behind more comments than that is not found


@dataclass(frozen=True, slots=True)
class Other:
    """A kind of file that is no checkpoint.

    Attributes
    ----------
    kind
        A word for programs.
    noun
        What it is, for messages.
    remedy
        What to do who gave it for a checkpoint.
    """

    kind: str
    noun: str
    remedy: str


_CHECKPOINT = "name the checkpoint"
OTHERS = {
    other.kind: other
    for other in (
        Other("graph", "a graph that MindSpore dumped beside a checkpoint", _CHECKPOINT),
        Other("mindir", "an exported model (MindIR)", f"{_CHECKPOINT} that it was made from"),
        Other("strategy", "a strategy file", f"{_CHECKPOINT}, and give this with -s or -d"),
        Other("group_info", "group information", f"{_CHECKPOINT}; inspect shows this"),
        Other("rank_table", "a rank table", f"{_CHECKPOINT}; inspect shows this"),
        Other("meta", "a record of the last save (meta.json)", "name the folder of rank folders"),
    )
}


def recognise(path: str) -> Other | None:
    """What a file is that is no checkpoint of any format; None if that cannot be told.

    Meant for a file that could not be read as a checkpoint; of one that can be it tells nothing.
    """
    with Path(path).open("rb") as file:
        head = file.read(64)
        if head.lstrip()[:1] == b"{":
            return OTHERS.get(_json_kind(head + file.read(JSON_BYTES)))
        if BY_HAND.search(head + file.read(BY_HAND_BYTES)):
            return OTHERS["strategy"]
    try:
        return OTHERS.get(_message_kind(path))
    except FormatError:
        return None


def _json_kind(data: bytes) -> str:
    """The kind of a JSON document, from its keys; an empty string if none is known."""
    try:
        document = parse_json(data)
    except ValueError:
        return ""
    keys = set(document) if isinstance(document, dict) else set()
    if keys & {"server_list", "group_list", "server_group_list"}:
        return "rank_table"
    if keys & {"parallel_layout_item", "parallel_strategy_item", "ckpttool_strategy"}:
        return "strategy"
    return "meta" if "last_ckpt_file" in keys else ""


def _message_kind(path: str) -> str:
    """The kind of a protobuf message, from its first fields; an empty string if none is known."""
    with WireReader(path) as reader:
        fields = list(islice(reader.fields(0, reader.size), 5))
        if fields and (fields[0].number, fields[0].wire_type) == (1, VARINT):
            numbers = {field.number for field in fields[1:] if field.wire_type == LENGTH}
            return "graph" if 4 in numbers else "strategy" if numbers & {2, 3} else ""
        for number, _, _, start, stop in fields[:1]:
            is_short = number == 1 and stop - start < VERSION_BYTES
            if is_short and VERSION.fullmatch(reader.read(start, stop)):
                return "mindir"
    read_group_info(path)
    return "group_info"
