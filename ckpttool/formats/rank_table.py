"""Rank tables (``rank_table_8pcs.json``): which device of which server each rank ran on.

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

* ``server_list`` and ``device``, or ``group_list``, ``instance_list`` and ``devices``, with the
  ``server_id``, ``device_id`` and ``rank_id`` in them, MUST be there.  ``device_ip`` MAY be missing
  or empty.  An instance is one rank and has one device; in place of ``rank_id`` its ``pod_name``
  may be the number.
* ``version`` is ``"1.0"``, or ``"1.2"`` with pods of servers, which change nothing here; the second
  form has none.
* ``status``, if given, MUST be ``"completed"``: before that ranks are not assigned.
* Counts, if given, MUST be right.  ``device_num`` may be spelled ``device_count``.
* Ranks MUST be 0, 1, 2, ... without gaps, and no device of a server comes twice.
* Other keys are skipped.

Not read: tables of several groups, and MindCluster's ``server_group_list`` of several jobs.

Source
------
Ascend CANN documentation, "Rank Table Configuration", templates 1 and 2; the
``rank_table_8pcs.json`` of MindSpore's tutorials for 0.x and 1.x.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from ckpttool.errors import FormatError, UnsupportedError, raise_all
from ckpttool.formats.reading import open_file
from ckpttool.formats.strict_json import parse_json

MAX_BYTES = 16 << 20  # a hundred bytes a device: more than any cluster
VERSIONS = ("1.0", "1.2")


@dataclass(frozen=True, slots=True)
class Device:
    """The device that a rank ran on; ``ip`` is None if the table does not tell it."""

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


class _Entry:
    """An object in the table, with its place; what is wrong with it is reported and gives None."""

    def __init__(self, where: str, value: object, report: Callable[[str], None]) -> None:
        self.where = where
        self._report = report
        self._keys: Mapping[str, object] = value if isinstance(value, dict) else {}
        if not isinstance(value, dict):
            self.complain(None, f"expected an object, found {_spell(value)}")

    def complain(self, key: str | None, what: str) -> None:
        """Report a problem of this entry, or of one of its keys."""
        place = ".".join(part for part in (self.where, key) if part)
        self._report(f"{place}: {what}" if place else what)

    def __contains__(self, key: str) -> bool:
        return key in self._keys

    def get(self, key: str) -> object:
        """The value as it stands, None if there is none."""
        return self._keys.get(key)

    def number(self, key: str) -> int | None:
        """A number, spelled as one or as a decimal string."""
        value = self._keys.get(key)
        if type(value) is int and value >= 0:
            return value
        if isinstance(value, str) and value.isdecimal() and len(value) < 10:
            return int(value)
        self.complain(key, f"expected a number, found {self._found(key)}")
        return None

    def text(self, key: str) -> str | None:
        """A string that is not empty."""
        value = self._keys.get(key)
        if isinstance(value, str) and value:
            return value
        self.complain(key, f"expected a name, found {self._found(key)}")
        return None

    def entries(self, key: str) -> list[_Entry]:
        """The objects of a list that is not empty."""
        value = self._keys.get(key)
        if not isinstance(value, list) or not value:
            self.complain(key, f"expected a list with entries, found {self._found(key)}")
            return []
        at = f"{self.where}.{key}" if self.where else key
        return [_Entry(f"{at}[{i}]", item, self._report) for i, item in enumerate(value)]

    def check_count(self, key: str, count: int) -> None:
        """Complain if a count is given and is another."""
        if key in self._keys and self.number(key) not in (None, count):
            self.complain(key, f"says {self._keys[key]}, found {count}")

    def _found(self, key: str) -> str:
        return _spell(self._keys[key]) if key in self._keys else "nothing"


def read_rank_table(path: str) -> RankTable:
    """The table in a file.

    Raises
    ------
    FormatError
        It is not what the format says; all problems, each with the entry that has it.
    UnsupportedError
        It is a table of a kind that is not read.
    OSError
        It cannot be opened or read.
    """
    with open_file(path) as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise FormatError(path, None, f"more than {MAX_BYTES} bytes, no rank table")
    try:
        document = parse_json(data)
    except ValueError as error:
        raise FormatError(path, None, str(error)) from error
    problems: list[str] = []
    table = _Entry("", document, problems.append)
    if "server_group_list" in table:
        raise UnsupportedError(path, None, "a rank table of several jobs; give that of one job")
    if ("server_list" in table) == ("group_list" in table):
        raise FormatError(path, None, "a rank table has a server_list, or else a group_list")
    if table.get("status") not in (None, "completed"):
        table.complain("status", f"expected completed, found {_spell(table.get('status'))}")
    version = None
    if "server_list" in table:
        version = table.text("version")
        if version is not None and version not in VERSIONS:
            reason = f"a rank table of version {version}; {' and '.join(VERSIONS)} are read"
            raise UnsupportedError(path, None, reason)
        devices = list(_of_servers(table))
    else:
        groups = table.entries("group_list")
        if len(groups) > 1:
            raise UnsupportedError(path, None, "a rank table of several groups; give that of one")
        table.check_count("group_count", len(groups))
        devices = [device for group in groups for device in _of_group(group)]
    if not problems:
        problems += _contradictions(devices)
    raise_all(FormatError(path, None, problem) for problem in problems)
    return RankTable(version, tuple(sorted(devices, key=lambda device: device.rank)))


def _of_servers(table: _Entry) -> Iterator[Device]:
    servers = table.entries("server_list")
    table.check_count("server_count", len(servers))
    seen: set[str] = set()
    for server in servers:
        name = server.text("server_id")
        if name is not None and name in seen:
            server.complain("server_id", f"{name} has another entry")
        seen.add(name or "")
        for device in server.entries("device"):
            yield from _device(device.number("rank_id"), name, device)


def _of_group(group: _Entry) -> Iterator[Device]:
    instances = group.entries("instance_list")
    for key in ("instance_count", "device_num", "device_count"):
        group.check_count(key, len(instances))
    group.check_count("server_num", len({str(entry.get("server_id")) for entry in instances}))
    for instance in instances:
        rank = instance.number("rank_id" if "rank_id" in instance else "pod_name")
        server = instance.text("server_id")
        devices = instance.entries("devices")
        if len(devices) > 1:
            instance.complain("devices", f"one rank has one device, found {len(devices)}")
        for device in devices[:1]:
            yield from _device(rank, server, device)


def _device(rank: int | None, server: str | None, entry: _Entry) -> Iterator[Device]:
    number = entry.number("device_id")
    ip = entry.get("device_ip") or None
    try:
        address = None if ip is None else str(ipaddress.ip_address(str(ip)))
    except ValueError:
        entry.complain("device_ip", f"expected an IP address, found {_spell(ip)}")
        return
    if rank is not None and server is not None and number is not None:
        yield Device(rank, server, number, address)


def _contradictions(devices: list[Device]) -> Iterator[str]:
    ranks: dict[int, Device] = {}
    places: dict[tuple[str, int], Device] = {}
    for device in devices:
        place = f"device {device.device} of server {device.server}"
        if device.rank in ranks:
            other = ranks[device.rank]
            yield f"rank {device.rank}: {place} and device {other.device} of server {other.server}"
        if (device.server, device.device) in places:
            twin = places[device.server, device.device]
            yield f"{place}: rank {twin.rank} and rank {device.rank}"
        ranks.setdefault(device.rank, device)
        places.setdefault((device.server, device.device), device)
    gaps = [rank for rank in range(len(ranks)) if rank not in ranks]
    if gaps:
        yield f"rank {gaps[0]} is missing; ranks are 0 to {len(ranks) - 1} in {len(ranks)} entries"


def _spell(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
