"""Where the ranks of a checkpoint ran: the rank table in its folder, or beside it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from ckpttool.errors import CkptToolError
from ckpttool.formats.rank_table import Device, RankTable, read_rank_table
from ckpttool.model.notes import Note
from ckpttool.model.strategy import shorten
from ckpttool.storage.trees import CHECKPOINTS

# rank_table_8pcs.json, hccl_8p_01234567_10.0.0.1.json, ranktable.json
TABLE_NAME = re.compile(r"(?:.*[_-])?(?:rank_?table|hccl)(?:[_.-].*)?\.json", re.IGNORECASE)


def find_devices(root: str, notes: list[Note]) -> Mapping[int, Device]:
    """Rank to device; empty if there is no rank table, or if several say different things.

    Parameters
    ----------
    root
        The folder of the rank folders; it and the one around it are looked at, and in the output
        of a MindFormers run the one around that.
    notes
        Gets one on tables that are broken or contradict each other.
    """
    tables: dict[Path, RankTable] = {}
    folder = Path(root)
    places = [folder, folder.absolute().parent]
    places += [places[-1].parent] if folder.absolute().name in CHECKPOINTS else []
    for place in places:
        for path in _table_files(place):
            try:
                tables[path] = read_rank_table(str(path))
            except (CkptToolError, OSError) as error:
                notes.append(Note("doubt", f"no servers shown: {error}"))
    if len({table.devices for table in tables.values()}) > 1:
        text = f"no servers shown: rank tables that differ: {shorten(map(str, tables))}"
        notes.append(Note("doubt", text))
        return {}
    devices = next((table.devices for table in tables.values()), ())
    return {device.rank: device for device in devices}


def _table_files(folder: Path) -> list[Path]:
    try:
        return sorted(p for p in folder.iterdir() if TABLE_NAME.fullmatch(p.name) and p.is_file())
    except OSError:
        return []  # the folder above need not be readable
