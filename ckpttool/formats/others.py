"""Files that lie beside checkpoints, or are taken for one, recognised by what is in them.

The keys of a JSON document show its kind; archives, gzip and PyTorch's pickles before 1.6 are
recognised by their first bytes.  A later file of PyTorch is an archive whose first file is
``NAME/data.pkl``.  The others are protobuf messages without a mark of their own, which their fields
tell apart::

    graph       1 a number, then 4 a message     ``{prefix}-graph.meta``, anf_ir ``ModelProto``
    strategy    1 a number, then 2 and 3         ``ParallelStrategyMap``
    mindir      1 a version like "1.1", 2 text   mind_ir ``ModelProto``, an exported model
    group_info  1 groups and 2 ranks             see `ckpttool.formats.group_info`

A file of any other kind is only said to be no checkpoint.

Source
------
MindSpore 2.10 ``train/anf_ir.proto``, ``train/mind_ir.proto``, ``utils/node_strategy.proto``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice

from ckpttool.errors import FormatError
from ckpttool.formats.group_info import read_group_info
from ckpttool.formats.reading import open_file
from ckpttool.formats.strict_json import parse_json
from ckpttool.formats.wire import LENGTH, VARINT, WireReader

HEAD_BYTES = 64 << 10  # a hand-written strategy whose key stands behind more comments is not found
JSON_BYTES = 16 << 20  # a larger document is not recognised
VERSION = re.compile(rb"\d+(\.\d+)+")
VERSION_BYTES = 40
BY_HAND = re.compile(rb"^[\"']?ckpttool_strategy[\"']?\s*:", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Other:
    """A kind of file that is not read as a checkpoint.

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

    @property
    def refusal(self) -> str:
        """Why it is not read, and what to do."""
        return f"{self.noun}, {self.remedy}"


_CHECKPOINT = "not a checkpoint; name the checkpoint"
_CONVERT = "not a checkpoint; of another program, save it there as safetensors"
_PYTORCH = (
    "not read; load it with PyTorch and save it as safetensors (safetensors.torch.save_file, or "
    "save_pretrained of Transformers)"
)
OTHERS = {
    other.kind: other
    for other in (
        Other("graph", "a graph that MindSpore dumped beside a checkpoint", _CHECKPOINT),
        Other("mindir", "an exported model (MindIR)", f"{_CHECKPOINT} that it was made from"),
        Other("strategy", "a strategy file", f"{_CHECKPOINT}, and give this with -s or -d"),
        Other("group_info", "group information", f"{_CHECKPOINT}; inspect shows this"),
        Other("rank_table", "a rank table", f"{_CHECKPOINT}; inspect shows this"),
        Other("index", "an index of checkpoint files", "not a checkpoint; name its folder"),
        Other("pytorch", "a checkpoint of PyTorch", _PYTORCH),
        Other("archive", "a ZIP archive, as NumPy writes them", _CONVERT),
        Other("gzip", "compressed with gzip", "not a checkpoint; unpack it with gunzip"),
    )
}

KEYS: Mapping[str, frozenset[str]] = {  # of JSON documents, each of which has one of these
    "rank_table": frozenset(("server_list", "group_list", "server_group_list")),
    "strategy": frozenset(("parallel_layout_item", "parallel_strategy_item", "ckpttool_strategy")),
    "index": frozenset(("weight_map",)),
}
ARCHIVE = b"PK\3\4"  # the header of its first file: length of the name at 26, the name at 30
GZIP = b"\x1f\x8b"
OLD_PYTORCH = bytes.fromhex("80 02 8a 0a 6c fc 9c 46 f9 20 6a a8 50 19 2e")  # a pickled number


def recognise(path: str) -> Other | None:
    """Return the kind of a file that is not a checkpoint; None if it is not recognised.

    Meant for a file that could not be read as a checkpoint; of one that can be it tells nothing.
    """
    with open_file(path) as file:
        head = file.read(HEAD_BYTES)
        if head.lstrip()[:1] == b"{":
            return OTHERS.get(_json_kind(head + file.read(JSON_BYTES)))
    if head.startswith(ARCHIVE):
        name = head[30 : 30 + int.from_bytes(head[26:28], "little")]
        return OTHERS["pytorch" if name.endswith(b"/data.pkl") else "archive"]
    if head.startswith(GZIP):
        return OTHERS["gzip"]
    if head.startswith(OLD_PYTORCH):
        return OTHERS["pytorch"]
    if BY_HAND.search(head):
        return OTHERS["strategy"]
    try:
        return OTHERS.get(_message_kind(path))
    except FormatError:
        return None


def _json_kind(data: bytes) -> str:
    """Return the kind of a JSON document, from its keys; an empty string if none is known."""
    try:
        document = parse_json(data)
    except ValueError:
        return ""
    keys = set(document) if isinstance(document, dict) else set()
    return next((kind for kind, marks in KEYS.items() if keys & marks), "")


def _message_kind(path: str) -> str:
    """Return the kind of a protobuf message, from its first fields; empty if none is known."""
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
