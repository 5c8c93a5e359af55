"""What ``inspect`` shows of files that are no checkpoints but lie beside them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ckpttool.cli.report import format_bytes, print_json
from ckpttool.cli.tables import print_table
from ckpttool.cli.text import echo, printable

if TYPE_CHECKING:
    from ckpttool.formats.group_info import GroupInfo
    from ckpttool.formats.rank_table import RankTable


def show_other(path: str, as_json: bool) -> bool:
    """Print a file that is a graph, an exported model, group information or a rank table.

    Return False, and print nothing, for every other file.
    """
    from ckpttool.formats import format_of_content
    from ckpttool.formats.group_info import read_group_info
    from ckpttool.formats.others import recognise
    from ckpttool.formats.rank_table import read_rank_table

    try:
        if not Path(path).is_file() or format_of_content(path) is not None:
            return False
        other = recognise(path)
    except OSError:
        return False  # the command reports that of its source
    if other is None or other.kind not in ("graph", "mindir", "group_info", "rank_table"):
        return False
    info = read_group_info(path) if other.kind == "group_info" else None
    table = read_rank_table(path) if other.kind == "rank_table" else None
    nbytes = Path(path).stat().st_size
    if as_json:
        document: dict[str, object] = {"path": path, "kind": other.kind, "nbytes": nbytes}
        document |= _describe_groups(info) if info is not None else {}
        document |= _describe_table(table) if table is not None else {}
        print_json(document)
        return True
    echo(printable(f"{path}: {other.noun}, {format_bytes(nbytes)}"))
    if info is not None:
        _print_groups(info)
    if table is not None:
        _print_table(table)
    return True


def _describe_groups(info: GroupInfo) -> dict[str, object]:
    return {
        "groups": [{"name": name, "ranks": list(ranks)} for name, ranks in info.groups],
        "ckpt_restore_rank_list": list(info.restore_ranks),
    }


def _print_groups(info: GroupInfo) -> None:
    rows = [(name, ", ".join(map(str, ranks))) for name, ranks in info.groups]
    print_table(f"{len(rows)} groups", ("group", "ranks"), rows)
    ranks = ", ".join(map(str, info.restore_ranks))
    echo(f"checkpoints that can stand in for this rank's: of ranks {ranks}")


def _describe_table(table: RankTable) -> dict[str, object]:
    return {
        "version": table.version,
        "ranks": [
            {"rank": d.rank, "server": d.server, "device": d.device, "device_ip": d.ip}
            for d in table.devices
        ],
    }


def _print_table(table: RankTable) -> None:
    servers = len(table.servers)
    print_table(
        f"{len(table.devices)} ranks on {servers} server{'s' * (servers != 1)}",
        ("rank>", "server", "device>", "device ip"),
        ((str(d.rank), d.server, str(d.device), d.ip or "") for d in table.devices),
    )
