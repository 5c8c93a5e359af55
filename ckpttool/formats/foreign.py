"""Files beside checkpoints that are not checkpoints: their kinds, and the reader of rank tables.

It identifies a file by its first bytes, so that a user reads what it is and what to name instead.
Nothing is read of it but the devices of a rank table.  The readers of checkpoints and strategies
decide whether a file is one of theirs.

Kinds
-----
The keys of a JSON document show its kind.  Compressed files, archives, NumPy arrays, web pages, Git
LFS pointers and pickles of PyTorch before 1.6 begin with fixed bytes; a tar archive has them at
byte 257.  The name of the first file of a ZIP archive shows the program: ``NAME/data.pkl`` PyTorch,
``*.npy`` NumPy, ``metadata.json`` Keras.  Other files of printable UTF-8 are text; a line that
begins with ``import``, ``from``, ``def`` or ``class`` makes it Python.  The other kinds are
protobuf messages without a magic number; their first fields differ::

    graph       1 a number, then 4 a message     ``{prefix}-graph.meta``, anf_ir ``ModelProto``
    strategy    1 a number, then 2 and 3         ``ParallelStrategyMap``
    mindir      1 a version like "1.1", 2 text   mind_ir ``ModelProto``, an exported model
    group_info  1 groups and 2 ranks             see below

A file of any other kind is not identified.

Group information
-----------------
The communication groups of one rank, and the ranks whose checkpoint can replace its own.  It is
recognised and not read: a strategy says the same.  It is the protobuf message
``mindspore.straspb.ParallelGroupMap``; repeated numbers come packed or not::

    1 parallel_group_item            one for each group
        1 group_name                 "{size}-{hash}", perhaps with a word behind it
        2 parallel_group_ranks       1 dim: the ranks in it
    2 ckpt_restore_rank_list         MUST be there
        1 dim                        ranks whose checkpoint holds the same as this rank's

A message with fields of other numbers is another, because checkpoints, strategies and graphs are
protobuf messages, too.

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
import shlex
from codecs import getincrementaldecoder
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path

from msgspec import Struct

from ckpttool.formats.local import is_file, list_readable, open_file
from ckpttool.formats.strict_json import parse_json, read_json_object
from ckpttool.formats.wire import LENGTH, VARINT, WireReader
from ckpttool.lazy import compile_late
from ckpttool.model.tensors import StoredFile
from ckpttool.problems import COPY_AGAIN, ForeignError, FormatError

_HEAD_BYTES = 64 << 10  # the key of a hand-written strategy is found in these
_MAGIC_BYTES = 4096  # enough for all kinds but text
_MIN_TEXT_BYTES = 8
_MAX_JSON_BYTES = 16 << 20  # a larger document is not identified; a device takes a hundred bytes
_MAX_GROUPS = 1000  # of one rank; a checkpoint has more tensors, whose fields look alike
_MAX_VERSION_BYTES = 40

_ZIP = b"PK\3\4"  # header of the first file: at byte 26 the length of its name, at 30 the name
_IN_ZIP = (("/data.pkl", "pytorch"), (".npy", "numpy"), ("metadata.json", "keras"))
_MAGIC: tuple[tuple[int, bytes, str], ...] = (  # offset, bytes, kind
    (0, b"\x1f\x8b", "gzip"),
    (0, b"BZh", "bzip2"),
    (0, b"\xfd7zXZ\0", "xz"),
    (0, b"\x28\xb5\x2f\xfd", "zstd"),
    (257, b"ustar", "tar"),
    (0, b"\x93NUMPY", "numpy"),
    (0, bytes.fromhex("80 02 8a 0a 6c fc 9c 46 f9 20 6a a8 50 19 2e"), "pytorch"),
    (0, b"version https://git-lfs", "lfs"),
)
_ARCHIVE = compile_late(r"\.(tar\.\w+|tgz)$")  # the end of a name
_PAGE = compile_late(rb"\s*<(!doctype html|html|\?xml)\b", re.IGNORECASE)
_OWN_PAGE = compile_late(rb'<meta name="generator" content="ckpttool (card|plot)">')
_PYTHON = compile_late(r"^(import|from|def|class) [A-Za-z_]", re.MULTILINE)
_VERSION = compile_late(rb"\d+(\.\d+)+")
_HANDWRITTEN = compile_late(rb"^[\"']?ckpttool_strategy[\"']?\s*:", re.MULTILINE)
_JSON_KEYS: Mapping[str, frozenset[str]] = {  # kind of a JSON document -> it has one of these keys
    "rank_table": frozenset(("server_list", "group_list", "server_group_list")),
    "strategy": frozenset(("parallel_layout_item", "parallel_strategy_item", "ckpttool_strategy")),
    "index": frozenset(("weight_map",)),
    "card": frozenset(("digest",)),
}
_SPLIT_KEYS = {"split", "group_size", "rank_id"}  # of every parameter
_LAYOUT_ITEMS = 6  # of every parameter, at least; see ckpttool.strategy_files.layout_dicts


# -------------------------------------------------------------------------------------------- kinds


class ForeignKind(Struct, frozen=True):
    """A kind of file that is not read as a checkpoint; the noun is for messages."""

    kind: str
    noun: str
    src: str = ""  # what to name as SRC instead of FILE; "" if ``hint`` helps
    hint: str = COPY_AGAIN  # what makes a checkpoint of FILE; by default it has to be copied again

    def error(self, path: str, facts: str = "", *, is_src: bool = False) -> ForeignError:
        """Return the error of a file or a folder of this kind; ``is_src`` if a user named it."""
        named = {"FILE": path, "CARD": f"{path.rpartition('.')[0]}.json"}
        hint = self.src or self.hint if is_src else self.hint
        if is_src:
            hint = re.sub("FILE|CARD", lambda word: shlex.quote(named[word[0]]), hint)
        return ForeignError(path, None, f"{self.noun}, not a MindSpore checkpoint", hint, facts)


NAME_CHECKPOINT = "the checkpoint as SRC: a folder, or a .ckpt, .safetensors or .h5 file"
_INSPECT = "the checkpoint as SRC; `ckpttool inspect FILE` shows this file"
_MODEL = "the checkpoint that it was made from as SRC"
_STRATEGY = "the checkpoint as SRC, and -s FILE"
_SAVE_TENSORS = "load it with PyTorch and save it with safetensors.torch.save_file"
_ZERO_TO_FP32 = "python FILE/zero_to_fp32.py FILE OUT --safe_serialization, then OUT as SRC"
# save_file of safetensors 0.8 writes the memory of an array, whatever its order.
_SAVE_ARRAYS = "save np.ascontiguousarray of its arrays with safetensors.numpy.save_file"
_DOWNLOAD = "download the file again; the server sent this page instead"
FOREIGN_KINDS = {
    kind.kind: kind
    for kind in (
        ForeignKind("graph", "a graph that MindSpore dumped", NAME_CHECKPOINT),
        ForeignKind("mindir", "an exported model (MindIR)", _MODEL),
        ForeignKind("strategy", "a strategy file", _STRATEGY),
        ForeignKind("group_info", "group information", _INSPECT),
        ForeignKind("rank_table", "a rank table", _INSPECT),
        ForeignKind("index", "an index of checkpoint files", "the folder of the index as SRC"),
        ForeignKind("card", "a card", "`ckpttool verify SRC --like FILE`"),
        ForeignKind("pytorch", "a PyTorch checkpoint", hint=_SAVE_TENSORS),
        ForeignKind("deepspeed", "a DeepSpeed checkpoint", hint=_ZERO_TO_FP32),
        ForeignKind("numpy", "a file of NumPy arrays", hint=_SAVE_ARRAYS),
        ForeignKind("keras", "a Keras model", hint=_SAVE_ARRAYS),
        ForeignKind("zip", "a ZIP archive", "unzip FILE, then the checkpoint in it as SRC"),
        ForeignKind("tar", "a tar archive", "tar -xf FILE, then the checkpoint in it as SRC"),
        *(
            ForeignKind(
                tool,
                f"a file compressed with {tool}",
                f"{tool} -dc FILE > NEW.ckpt",
                f"{tool} -dc FILE > NEW && mv NEW FILE, for each FILE",
            )
            for tool in ("gzip", "bzip2", "xz", "zstd")
        ),
        *(
            ForeignKind(
                f"{tool}-tar",
                f"a tar archive compressed with {tool}",
                f"tar {letter} FILE, then the checkpoint in it as SRC",
            )
            for tool, letter in (("gzip", "xzf"), ("bzip2", "xjf"), ("xz", "xJf"))
        ),
        ForeignKind("lfs", "a Git LFS pointer", hint="git lfs pull, which downloads the file"),
        ForeignKind("page", "an HTML or XML page", hint=_DOWNLOAD),
        ForeignKind("page of card", "the page of a card", "`ckpttool verify SRC --like CARD`"),
        ForeignKind("page of plot", "a picture of a checkpoint", _MODEL),
        ForeignKind("json", "a JSON document", NAME_CHECKPOINT),
        ForeignKind("python", "Python source", NAME_CHECKPOINT),
        ForeignKind("text", "a text file", NAME_CHECKPOINT),
    )
}


def identify_foreign(path: str) -> ForeignKind | None:
    """Return the kind of a file that is not a readable checkpoint; None if not identified."""
    with open_file(path) as file:
        head = file.read(_MAGIC_BYTES)
        if b"\0" not in head:  # perhaps text
            head += file.read(_HEAD_BYTES - len(head))
        is_json = head.lstrip()[:1] == b"{"
        rest = file.read(_MAX_JSON_BYTES) if is_json else b""
    kind = _kind_of_bytes(head)
    if _ARCHIVE.search(path) and f"{kind}-tar" in FOREIGN_KINDS:
        kind += "-tar"
    kind = kind or (_json_kind(head + rest) if is_json else "")
    with suppress(FormatError):
        kind = kind or _message_kind(path)
    return FOREIGN_KINDS.get(kind or _text_kind(head))


def _kind_of_bytes(head: bytes) -> str:
    if head.startswith(_ZIP):
        name = head[30 : 30 + int.from_bytes(head[26:28], "little")].decode(errors="replace")
        return next((kind for end, kind in _IN_ZIP if name.endswith(end)), "zip")
    if _PAGE.match(head):
        own = _OWN_PAGE.search(head)
        return "page" if own is None else f"page of {own[1].decode()}"
    if _HANDWRITTEN.search(head):
        return "strategy"
    return next((kind for at, magic, kind in _MAGIC if head[at:].startswith(magic)), "")


def _text_kind(head: bytes) -> str:
    """Return the kind of a file that begins with printable text; "" for other bytes.

    A cut .ckpt may be printable; so may a few bytes of any format.  A .ckpt begins with a line feed
    and the size of a message.  That begins with a line feed and the smaller size of a name.
    """
    is_ckpt = head[:1] == head[2:3] == b"\n" and head[3:4] < head[1:2]
    if is_ckpt or len(head) < _MIN_TEXT_BYTES:
        return ""
    try:
        decoded = getincrementaldecoder("utf-8")().decode(head)  # the last character may be cut
    except UnicodeDecodeError:
        return ""
    if not decoded.strip() or not "".join(decoded.split()).isprintable():
        return ""
    return "python" if _PYTHON.search(decoded) else "text"


def is_split_info(document: object) -> bool:
    """Return whether a JSON document is split information of mindone, which is a strategy."""
    entries = document.values() if isinstance(document, dict) else ()
    return bool(entries) and all(
        isinstance(entry, dict) and entry.keys() >= _SPLIT_KEYS for entry in entries
    )


def is_layout_dict(document: object) -> bool:
    """Return whether a document is a dict of layouts as MindSpore has it, which is a strategy."""
    entries = document.values() if isinstance(document, Mapping) else ()
    return bool(entries) and all(
        isinstance(entry, list | tuple) and len(entry) >= _LAYOUT_ITEMS for entry in entries
    )


def _json_kind(data: bytes) -> str:
    try:
        document = parse_json(data)
    except ValueError:
        return ""
    if is_split_info(document) or is_layout_dict(document):
        return "strategy"
    keys = set(document) if isinstance(document, dict) else set()
    return next((kind for kind, marks in _JSON_KEYS.items() if keys & marks), "json")


def _message_kind(path: str) -> str:
    """Return the kind of a protobuf message, from its first fields; "" for other fields.

    Raise FormatError if the message is damaged.
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
        return "group_info" if _is_group_info(reader) else ""


def _is_group_info(reader: WireReader) -> bool:
    is_listed = False
    for field in islice(reader.fields(0, reader.size), _MAX_GROUPS):
        if field.wire_type != LENGTH:
            return False
        numbers = {inner.number for inner in reader.fields(field.start, field.stop)}
        if not (numbers == {1, 2} if field.number == 1 else field.number == 2 and numbers <= {1}):
            return False
        is_listed = is_listed or field.number == 2
    return is_listed


# -------------------------------------------------------------------------------------- rank tables


class Device(Struct, frozen=True):
    """The device that a rank ran on; ``ip`` is None if the table lacks it."""

    rank: int
    server: str
    device: int
    ip: str | None = None


class RankTable(Struct, frozen=True):
    """A rank table: its version (None in the second form) and its devices, ordered by rank."""

    version: str | None
    devices: tuple[Device, ...]


# rank_table_8pcs.json, hccl_8p_01234567_10.0.0.1.json, ranktable.json
_TABLE_NAME = compile_late(r"(?:.*[_-])?(?:rank_?table|hccl)(?:[_.-].*)?\.json", re.IGNORECASE)


def list_rank_tables(folder: Path) -> list[Path]:
    """Return the rank tables in a folder, by name; none if it cannot be read."""
    return [p for p in list_readable(folder) if _TABLE_NAME.fullmatch(p.name) and is_file(p)]


def read_rank_table(path: str) -> RankTable:
    """Return the rank table in a file.

    Raises
    ------
    FormatError
        The file is not a rank table.
    OSError
        The file cannot be opened or read.
    """
    table = read_json_object(path, _MAX_JSON_BYTES)
    try:
        devices = sorted(_table_devices(table), key=lambda device: device.rank)
    except ValueError as error:
        raise FormatError(path, None, f"not a rank table: {error}") from error
    if len({device.rank for device in devices}) < len(devices):
        raise FormatError(path, None, "a rank table that lists a rank twice")
    version = table.get("version")
    return RankTable(version if isinstance(version, str) else None, tuple(devices))


def _table_devices(table: Mapping[str, object]) -> Iterator[Device]:
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
    return Device(
        _number(rank, "rank_id" if "rank_id" in rank else "pod_name"),
        str(server.get("server_id", "")),
        _number(device, "device_id"),
        str(device.get("device_ip") or "") or None,
    )


def _entries(entry: Mapping[str, object], key: str) -> list[dict[str, object]]:
    value = entry.get(key)
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ValueError(f"{key}: expected a list of objects, found {value!r:.40}")
    return value


def _number(entry: Mapping[str, object], key: str) -> int:
    value = entry.get(key)
    if not str(value).isdecimal() or not isinstance(value, int | str):
        raise ValueError(f"{key}: expected a number, found {value!r:.40}")
    return int(value)
