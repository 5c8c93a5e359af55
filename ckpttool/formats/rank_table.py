"""Rank tables (``rank_table_8pcs.json``): which device of which server each rank ran on.

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

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ckpttool.errors import FormatError
from ckpttool.formats.strict_json import read_json_object

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
