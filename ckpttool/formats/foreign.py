"""Files that lie beside checkpoints, or are taken for one, recognised by what is in them.

The keys of a JSON document show its kind; archives, gzip and PyTorch's pickles before 1.6 are
recognised by their first bytes.  A later file of PyTorch is an archive whose first file is
``NAME/data.pkl``.  The others are protobuf messages without a mark of their own, which their fields
tell apart::

    graph       1 a number, then 4 a message     ``{prefix}-graph.meta``, anf_ir ``ModelProto``
    strategy    1 a number, then 2 and 3         ``ParallelStrategyMap``
    mindir      1 a version like "1.1", 2 text   mind_ir ``ModelProto``, an exported model
    group_info  1 groups and 2 ranks             see `ckpttool.formats.foreign`

A file of any other kind is only said to be no checkpoint.

Source
------
MindSpore 2.10 ``train/anf_ir.proto``, ``train/mind_ir.proto``, ``utils/node_strategy.proto``.

Group information: the communication groups of one rank, and whose checkpoint can replace its.

Bytes
-----
The protobuf message ``mindspore.straspb.ParallelGroupMap``; repeated numbers come packed or not::

    1 parallel_group_item            one for each group
        1 group_name                 "{size}-{hash}", perhaps with a word behind it
        2 parallel_group_ranks       1 dim: the ranks in it
    2 ckpt_restore_rank_list         MUST be there
        1 dim                        ranks whose checkpoint holds the same as this rank's

Nothing in the file says which rank wrote it.  Fields of other numbers are errors: a checkpoint, a
strategy and a graph are protobuf messages, too, and this one has no mark of its own.

Source
------
MindSpore 2.10 ``utils/node_strategy.proto``, ``parallel/_parallel_serialization.py``
(``_restore_group_info_list``); written to ``GROUP_INFO_FILE``.

Rank tables (``rank_table_8pcs.json``): which device of which server each rank ran on.

A table only labels the ranks that ``inspect`` shows, so it is read and not checked.

Form
----
A JSON object in one of two forms; numbers come as numbers or, mostly, as decimal strings::

    {"version": "1.0", "status": "completed", "server_count": "1",
     "server_list": [{"server_id": "10.155.111.140",
                      "device": [{"device_id": "0", "device_ip": "192.1.27.6", "rank_id": "0"}]}]}

    {"status": "completed", "group_count": "1",
     "group_list": [{"group_name": "", "device_num": "1", "server_num": "1", "instance_count": "1",
                     "instance_list": [{"rank_id": "0", "server_id": "10.155.111.140",
                                        "devices": [{"device_id": "0", "device_ip": "192.1.27.6"}]}]
                    }]}

``device_ip`` MAY be missing or empty.  In place of ``rank_id`` its ``pod_name`` may be the number.
Other keys are skipped.  No rank comes twice.

Source
------
Ascend CANN documentation, "Rank Table Configuration", templates 1 and 2; the
``rank_table_8pcs.json`` of MindSpore's tutorials for 0.x and 1.x.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

from ckpttool.errors import FormatError
from ckpttool.formats.reading import open_file
from ckpttool.formats.strict_json import parse_json, read_json_object
from ckpttool.formats.wire import LENGTH, VARINT, Field, WireReader

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


MAX_NAME_BYTES = 1 << 20  # a name is read into memory; none in the field comes near


@dataclass(frozen=True, slots=True)
class GroupInfo:
    """What the file says.

    Attributes
    ----------
    groups
        Names and ranks of the groups, in the order of the file.
    restore_ranks
        Ranks whose checkpoint can stand in for that of the rank that wrote the file.
    """

    groups: tuple[tuple[str, tuple[int, ...]], ...]
    restore_ranks: tuple[int, ...]


def read_group_info(path: str) -> GroupInfo:
    """Return the groups in a file.

    Raises
    ------
    FormatError
        It is not what the format says.
    OSError
        It cannot be opened or read.
    """
    groups: list[tuple[str, tuple[int, ...]]] = []
    restore: tuple[int, ...] | None = None
    with WireReader(path) as reader:
        for field in reader.fields(0, reader.size):
            if field.number == 1 and field.wire_type == LENGTH:
                groups.append(_read_group(reader, field))
            elif field.number == 2 and field.wire_type == LENGTH:
                restore = _read_ranks(reader, field)
            else:
                raise FormatError(path, field.start, f"field {field.number}: no group information")
    if restore is None:
        raise FormatError(path, None, "group information without ckpt_restore_rank_list")
    return GroupInfo(tuple(groups), restore)


def _read_group(reader: WireReader, group: Field) -> tuple[str, tuple[int, ...]]:
    name: str | None = None
    ranks: tuple[int, ...] | None = None
    for field in reader.fields(group.start, group.stop):
        if field.number == 1:
            name = reader.text(field, MAX_NAME_BYTES)
        elif field.number == 2 and field.wire_type == LENGTH:
            ranks = _read_ranks(reader, field)
        else:
            raise FormatError(reader.path, field.start, f"field {field.number} of a group")
    if name is None or ranks is None:
        raise FormatError(reader.path, group.start, "a group without name or ranks")
    return name, ranks


def _read_ranks(reader: WireReader, message: Field) -> tuple[int, ...]:
    ranks: list[int] = []
    for field in reader.fields(message.start, message.stop):
        if field.number != 1:
            raise FormatError(reader.path, field.start, f"field {field.number} among ranks")
        ranks += reader.numbers(field)
    return tuple(ranks)


MAX_BYTES = 16 << 20  # a hundred bytes a device: more than any cluster


@dataclass(frozen=True, slots=True)
class Device:
    """The device that a rank ran on; ``ip`` is None if the table does not have it."""

    rank: int
    server: str
    device: int
    ip: str | None = None


@dataclass(frozen=True, slots=True)
class RankTable:
    """What a rank table says: its version, None in the second form, and devices by rank."""

    version: str | None
    devices: tuple[Device, ...]

    @property
    def servers(self) -> tuple[str, ...]:
        """The servers, in the order of their lowest rank."""
        return tuple(dict.fromkeys(device.server for device in self.devices))


def read_rank_table(path: str) -> RankTable:
    """Return the table in a file.

    Raises
    ------
    FormatError
        It is not what the format says.
    OSError
        It cannot be opened or read.
    """
    table = read_json_object(path, MAX_BYTES)
    try:
        devices = sorted(_devices(table), key=lambda device: device.rank)
    except ValueError as error:
        raise FormatError(path, None, f"a rank table: {error}") from error
    if len({device.rank for device in devices}) < len(devices):
        raise FormatError(path, None, "a rank table in which a rank comes twice")
    version = table.get("version")
    return RankTable(version if isinstance(version, str) else None, tuple(devices))


def _devices(table: Mapping[str, object]) -> Iterator[Device]:
    if "server_list" in table:
        for server in _entries(table, "server_list"):
            for device in _entries(server, "device"):
                yield _device(device, server, device)
        return
    for group in _entries(table, "group_list"):
        for instance in _entries(group, "instance_list"):
            for device in _entries(instance, "devices"):
                yield _device(instance, instance, device)


def _device(
    rank: Mapping[str, object], server: Mapping[str, object], device: Mapping[str, object]
) -> Device:
    """Return the device of a rank; the arguments are the entries that have the key."""
    return Device(
        _number(rank, "rank_id" if "rank_id" in rank else "pod_name"),
        str(server.get("server_id", "")),
        _number(device, "device_id"),
        str(device.get("device_ip") or "") or None,
    )


def _entries(entry: Mapping[str, object], key: str) -> list[dict[str, object]]:
    """Return the objects of a list."""
    value = entry.get(key)
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ValueError(f"{key}: expected a list of objects, found {value!r:.40}")
    return value


def _number(entry: Mapping[str, object], key: str) -> int:
    """Return a number, spelled as one or as a decimal string."""
    value = entry.get(key)
    if not str(value).isdecimal() or not isinstance(value, int | str):
        raise ValueError(f"{key}: expected a number, found {value!r:.40}")
    return int(value)
