"""Files beside checkpoints that are not checkpoints: their kinds, and readers of two kinds.

Kinds
-----
The keys of a JSON document show its kind.  Archives, gzip and pickles of PyTorch before 1.6 begin
with fixed bytes.  A later file of PyTorch is an archive whose first file is ``NAME/data.pkl``.  The
other kinds are protobuf messages without a magic number; their first fields differ::

    graph       1 a number, then 4 a message     ``{prefix}-graph.meta``, anf_ir ``ModelProto``
    strategy    1 a number, then 2 and 3         ``ParallelStrategyMap``
    mindir      1 a version like "1.1", 2 text   mind_ir ``ModelProto``, an exported model
    group_info  1 groups and 2 ranks             see below

A file of any other kind is not identified.

Group information
-----------------
The communication groups of one rank, and the ranks whose checkpoint can replace its own.  It is the
protobuf message ``mindspore.straspb.ParallelGroupMap``; repeated numbers come packed or not::

    1 parallel_group_item            one for each group
        1 group_name                 "{size}-{hash}", perhaps with a word behind it
        2 parallel_group_ranks       1 dim: the ranks in it
    2 ckpt_restore_rank_list         MUST be there
        1 dim                        ranks whose checkpoint holds the same as this rank's

The file does not name the rank that wrote it.  Fields of other numbers are errors, because
checkpoints, strategies and graphs are protobuf messages, too.

Rank tables
-----------
``rank_table_8pcs.json`` maps each rank to a server and a device.  It only labels the ranks that
``inspect`` shows, so it is read and not checked.  It is a JSON object in one of two forms; numbers
are JSON numbers or, mostly, decimal strings::

    {"version": "1.0", "status": "completed", "server_count": "1",
     "server_list": [{"server_id": "10.155.111.140",
                      "device": [{"device_id": "0", "device_ip": "192.1.27.6", "rank_id": "0"}]}]}

    {"status": "completed", "group_count": "1",
     "group_list": [{"group_name": "", "device_num": "1", "server_num": "1", "instance_count": "1",
                     "instance_list": [{"rank_id": "0", "server_id": "10.155.111.140",
                                        "devices": [{"device_id": "0", "device_ip": "192.1.27.6"}]}]
                    }]}

``device_ip`` MAY be missing or empty.  ``pod_name`` may hold the number in place of ``rank_id``.
Other keys are skipped.  A rank comes once.

Source
------
MindSpore 2.10 ``train/anf_ir.proto``, ``train/mind_ir.proto``, ``utils/node_strategy.proto`` and
``parallel/_parallel_serialization.py`` (``_restore_group_info_list``; MindSpore writes the file to
``GROUP_INFO_FILE``).  Ascend CANN documentation, "Rank Table Configuration", templates 1 and 2; the
``rank_table_8pcs.json`` of MindSpore's tutorials for 0.x and 1.x.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

from ckpttool.errors import FormatError
from ckpttool.formats.local import open_file
from ckpttool.formats.strict_json import parse_json, read_json_object
from ckpttool.formats.wire import LENGTH, VARINT, Field, WireReader
from ckpttool.model.tensors import StoredFile

_HEAD_BYTES = 64 << 10  # the key of a hand-written strategy is found in these
_MAX_JSON_BYTES = 16 << 20  # a larger document is not identified
_MAX_VERSION_BYTES = 40
_MAX_TABLE_BYTES = 16 << 20  # of a rank table; a device takes a hundred bytes

_ARCHIVE = b"PK\3\4"  # header of the first file: at byte 26 the length of its name, at 30 the name
_GZIP = b"\x1f\x8b"
_OLD_PYTORCH = bytes.fromhex("80 02 8a 0a 6c fc 9c 46 f9 20 6a a8 50 19 2e")  # a pickled number
_VERSION = re.compile(rb"\d+(\.\d+)+")
_HANDWRITTEN = re.compile(rb"^[\"']?ckpttool_strategy[\"']?\s*:", re.MULTILINE)
_JSON_KEYS: Mapping[str, frozenset[str]] = {  # kind of a JSON document -> it has one of these keys
    "rank_table": frozenset(("server_list", "group_list", "server_group_list")),
    "strategy": frozenset(("parallel_layout_item", "parallel_strategy_item", "ckpttool_strategy")),
    "index": frozenset(("weight_map",)),
}


# -------------------------------------------------------------------------------------------- kinds


@dataclass(frozen=True, slots=True)
class ForeignKind:
    """A kind of file that is not read as a checkpoint.

    Attributes
    ----------
    kind
        A word for programs.
    noun
        Name of the kind in messages.
    remedy
        The thing to do for a user who named the file as a checkpoint.
    """

    kind: str
    noun: str
    remedy: str

    @property
    def refusal(self) -> str:
        """The reason why the file is not read, and the remedy."""
        return f"{self.noun}, {self.remedy}"


_NOT_CHECKPOINT = "not a checkpoint; name the checkpoint"
_CONVERT = "not a checkpoint; of another program, save it there as safetensors"
_PYTORCH = (
    "not read; load it with PyTorch and save it as safetensors (safetensors.torch.save_file, or "
    "save_pretrained of Transformers)"
)
FOREIGN_KINDS = {
    kind.kind: kind
    for kind in (
        ForeignKind("graph", "a graph that MindSpore dumped beside a checkpoint", _NOT_CHECKPOINT),
        ForeignKind(
            "mindir", "an exported model (MindIR)", f"{_NOT_CHECKPOINT} that it was made from"
        ),
        ForeignKind(
            "strategy", "a strategy file", f"{_NOT_CHECKPOINT}, and give this with -s or -d"
        ),
        ForeignKind("group_info", "group information", f"{_NOT_CHECKPOINT}; inspect shows this"),
        ForeignKind("rank_table", "a rank table", f"{_NOT_CHECKPOINT}; inspect shows this"),
        ForeignKind("index", "an index of checkpoint files", "not a checkpoint; name its folder"),
        ForeignKind("pytorch", "a checkpoint of PyTorch", _PYTORCH),
        ForeignKind("archive", "a ZIP archive, as NumPy writes them", _CONVERT),
        ForeignKind("gzip", "compressed with gzip", "not a checkpoint; unpack it with gunzip"),
    )
}


def identify_foreign(path: str) -> ForeignKind | None:
    """Return the kind of a file that is not a readable checkpoint; None if not identified."""
    with open_file(path) as file:
        head = file.read(_HEAD_BYTES)
        if head.lstrip()[:1] == b"{":
            return FOREIGN_KINDS.get(_json_kind(head + file.read(_MAX_JSON_BYTES)))
    if head.startswith(_ARCHIVE):
        name = head[30 : 30 + int.from_bytes(head[26:28], "little")]
        return FOREIGN_KINDS["pytorch" if name.endswith(b"/data.pkl") else "archive"]
    if head.startswith(_GZIP):
        return FOREIGN_KINDS["gzip"]
    if head.startswith(_OLD_PYTORCH):
        return FOREIGN_KINDS["pytorch"]
    if _HANDWRITTEN.search(head):
        return FOREIGN_KINDS["strategy"]
    try:
        return FOREIGN_KINDS.get(_message_kind(path))
    except FormatError:
        return None


def _json_kind(data: bytes) -> str:
    """Return the kind of a JSON document, from its keys; "" for other keys."""
    try:
        document = parse_json(data)
    except ValueError:
        return ""
    keys = set(document) if isinstance(document, dict) else set()
    return next((kind for kind, marks in _JSON_KEYS.items() if keys & marks), "")


def _message_kind(path: str) -> str:
    """Return the kind of a protobuf message, from its first fields; "" for other fields.

    Raises
    ------
    FormatError
        The message is damaged, or of none of the kinds.
    """
    with WireReader(StoredFile(path)) as reader:
        fields = list(islice(reader.fields(0, reader.size), 5))
        if fields and (fields[0].number, fields[0].wire_type) == (1, VARINT):
            numbers = {field.number for field in fields[1:] if field.wire_type == LENGTH}
            return "graph" if 4 in numbers else "strategy" if numbers & {2, 3} else ""
        for number, _, _, start, stop in fields[:1]:
            is_short = number == 1 and stop - start < _MAX_VERSION_BYTES
            if is_short and _VERSION.fullmatch(reader.read(start, stop)):
                return "mindir"
    read_group_info(path)
    return "group_info"


# -------------------------------------------------------------------------------- group information


@dataclass(frozen=True, slots=True)
class GroupInfo:
    """The communication groups of one rank.

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
    """Return the group information in a file.

    Raises
    ------
    FormatError
        The file is not group information.
    OSError
        The file cannot be opened or read.
    """
    groups: list[tuple[str, tuple[int, ...]]] = []
    restore: tuple[int, ...] | None = None
    with WireReader(StoredFile(path)) as reader:
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
    """Return the name and the ranks of a group."""
    name: str | None = None
    ranks: tuple[int, ...] | None = None
    for field in reader.fields(group.start, group.stop):
        if field.number == 1:
            name = reader.text(field)
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


# -------------------------------------------------------------------------------------- rank tables


@dataclass(frozen=True, slots=True)
class Device:
    """The device that a rank ran on; ``ip`` is None if the table lacks it."""

    rank: int
    server: str
    device: int
    ip: str | None = None


@dataclass(frozen=True, slots=True)
class RankTable:
    """A rank table: its version (None in the second form) and its devices, ordered by rank."""

    version: str | None
    devices: tuple[Device, ...]


def read_rank_table(path: str) -> RankTable:
    """Return the rank table in a file.

    Raises
    ------
    FormatError
        The file is not a rank table.
    OSError
        The file cannot be opened or read.
    """
    table = read_json_object(path, _MAX_TABLE_BYTES)
    try:
        devices = sorted(_table_devices(table), key=lambda device: device.rank)
    except ValueError as error:
        raise FormatError(path, None, f"a rank table: {error}") from error
    if len({device.rank for device in devices}) < len(devices):
        raise FormatError(path, None, "a rank table in which a rank comes twice")
    version = table.get("version")
    return RankTable(version if isinstance(version, str) else None, tuple(devices))


def _table_devices(table: Mapping[str, object]) -> Iterator[Device]:
    """Yield the devices of a rank table in either form."""
    if "server_list" in table:
        for server in _entries(table, "server_list"):
            for device in _entries(server, "device"):
                yield _table_device(device, server, device)
        return
    for group in _entries(table, "group_list"):
        for instance in _entries(group, "instance_list"):
            for device in _entries(instance, "devices"):
                yield _table_device(instance, instance, device)


def _table_device(
    rank: Mapping[str, object], server: Mapping[str, object], device: Mapping[str, object]
) -> Device:
    """Return the device of a rank from the entries that hold its rank, its server and itself."""
    return Device(
        _number(rank, "rank_id" if "rank_id" in rank else "pod_name"),
        str(server.get("server_id", "")),
        _number(device, "device_id"),
        str(device.get("device_ip") or "") or None,
    )


def _entries(entry: Mapping[str, object], key: str) -> list[dict[str, object]]:
    """Return the value of a key: a list of objects."""
    value = entry.get(key)
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ValueError(f"{key}: expected a list of objects, found {value!r:.40}")
    return value


def _number(entry: Mapping[str, object], key: str) -> int:
    """Return the value of a key: a number or a decimal string."""
    value = entry.get(key)
    if not str(value).isdecimal() or not isinstance(value, int | str):
        raise ValueError(f"{key}: expected a number, found {value!r:.40}")
    return int(value)
