"""The ranks of devices, by the rank tables beside the folders of hosts.

Where each of several hosts has ``device0`` to ``device7``, only a rank table says which ranks these
are.  A host is the only server of the table in its folder, or the server whose id is the name of
that folder.  Else numbered hosts are the servers in the order of their ranks, if the ids of the
servers have the same order: no file says which host a server is.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeAlias

from ckpttool.formats.foreign import list_rank_tables, read_rank_table
from ckpttool.lazy import compile_late
from ckpttool.problems import FormatError

_Servers: TypeAlias = Mapping[str, Mapping[int, int]]  # server to device to rank, by lowest rank

_LAST_NUMBER = compile_late(r"(.*?)(\d{1,9})(\D*)")


def ranks_of_devices(hosts: Mapping[Path, Collection[int]]) -> Mapping[Path, Mapping[int, int]]:
    """Return the rank of each device of several hosts, by rank tables; empty if none shows it."""
    ranks: dict[Path, Mapping[int, int]] = {}
    in_order = _numbered(hosts)
    for host, devices in hosts.items():
        for servers in (*_read_tables(host), *_read_tables(host.parent)):
            server = servers.get(host.name)
            if server is None and len(servers) == 1:
                (server,) = servers.values()
            elif server is None and len(servers) == len(in_order) and _are_in_order(servers):
                server = [*servers.values()][in_order.index(host)]
            if server is not None and server.keys() >= {*devices}:
                ranks.setdefault(host, {device: server[device] for device in devices})
    taken = [rank for rank_of in ranks.values() for rank in rank_of.values()]
    return ranks if ranks.keys() == hosts.keys() and len(taken) == len({*taken}) else {}


def _are_in_order(servers: Iterable[str]) -> bool:
    numbers = [[int(number) for number in re.findall(r"\d{1,9}", server)] for server in servers]
    return numbers == sorted(numbers)


def _numbered(hosts: Collection[Path]) -> list[Path]:
    matches = {host: match for host in hosts if (match := _LAST_NUMBER.fullmatch(host.name))}
    in_order = sorted(matches, key=lambda host: int(matches[host][2]))
    numbers = [int(matches[host][2]) for host in in_order]
    forms = {(match[1], match[3]) for match in matches.values()}
    is_counted = [*range(numbers[0], numbers[0] + len(hosts))] == numbers if numbers else False
    return in_order if is_counted and len(forms) == 1 else []


def _read_tables(folder: Path) -> Iterator[_Servers]:
    for path in list_rank_tables(folder):
        try:
            table = read_rank_table(str(path))
        except (FormatError, OSError):
            continue  # it shows nothing; inspect says why
        servers: dict[str, dict[int, int]] = defaultdict(dict)
        for device in table.devices:
            servers[device.server][device.device] = device.rank
        yield servers
