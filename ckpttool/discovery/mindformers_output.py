"""The output folder of a MindFormers run: its rank folders, strategies and rank table.

::

    output/
      checkpoint/rank_{r}/                    everything; meta.json has the step saved last
        {prefix}_rank_{r}-{epoch}_{step}.ckpt                  (or .safetensors)
      checkpoint_network/rank_{r}/            weights alone, in names ending -network-{e}_{s}
      checkpoint_trainable/rank_{r}/          what is trained alone, -trainable_params-{e}_{s}
      strategy/
        ckpt_strategy_rank_{r}.ckpt           one for each rank (or .json)
        merged_ckpt_strategy.ckpt             of all stages; merged_ckpt_strategy_by_rank_{r}.ckpt
      merged_strategy/{src,dst}_strategy.ckpt what a conversion on loading was given

The three folders of checkpoints hold different things and are never mixed: ``checkpoint`` is read
if it exists, another if it is the only one.  The strategies of single ranks are read if every rank
has one; a merged file only stands in for missing ones.  Strategies of other names, and those of a
conversion, may be of any checkpoint and are read only on request.

Source
------
MindFormers ``core/callback/callback.py`` (``CheckpointMonitor``),
``tools/ckpt_transform/transform_checkpoint.py``, ``utils/load_checkpoint_utils.py``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from ckpttool.discovery.ignored import note_foreign
from ckpttool.discovery.rank_folders import find_nested_checkpoints, has_rank_files
from ckpttool.formats.foreign import Device, RankTable, list_rank_tables, read_rank_table
from ckpttool.formats.local import find_paths, is_folder, list_folder
from ckpttool.problems import Diagnostic, Diagnostics, FormatError, PlanError
from ckpttool.strategy_files.folders import (
    STRATEGY_FOLDER,
    find_strategy_files,
    is_merged_name,
)
from ckpttool.wording import shorten

CHECKPOINT_FOLDERS: Mapping[str, str] = {
    "checkpoint": "all that was saved",
    "checkpoint_network": "weights alone",
    "checkpoint_trainable": "what is trained alone",
}
_NO_SERVERS = "servers and devices are not shown"


def find_checkpoint(root: Path, diagnostics: Diagnostics) -> Path:
    """Return the folder of rank folders in the output of a MindFormers run; else ``root`` itself.

    ``checkpoint`` takes priority over ``checkpoint_network`` and ``checkpoint_trainable``;
    PlanError for these two without it.  Other checkpoints beside these are ignored in the output of
    a run, else refused.
    """
    if has_rank_files(root):
        return root
    present = [
        name
        for name in CHECKPOINT_FOLDERS
        if is_folder(root / name) and any(list_folder(root / name))
    ]
    if not present:
        return root
    note_foreign(root, (), diagnostics)
    if len(present) > 1 and present[0] != "checkpoint":
        facts = "; ".join(f"{name}: {CHECKPOINT_FOLDERS[name]}" for name in present)
        hint = " as SRC, or ".join(str(root / name) for name in present)
        message = "two checkpoints of different content"
        raise PlanError([Diagnostic("source", message, hint=hint, facts=facts, where=str(root))])
    if len(present) > 1:
        facts = "; ".join(f"{name}: {CHECKPOINT_FOLDERS[name]}" for name in present[1:])
        message = f"the folder {present[0]} is read, not {' and '.join(present[1:])}"
        hint = f"{root / present[1]} as SRC, to read that one"
        diagnostics.add(Diagnostic("skipped", message, hint=hint, facts=facts, where=str(root)))
    nested = [path for path in find_nested_checkpoints(root) if path.name not in CHECKPOINT_FOLDERS]
    if nested and not is_run_output(root):
        names = (path.name for path in (root / present[0], *nested))
        message = f"not a checkpoint, but a folder of {len(nested) + 1} checkpoints"
        hint = f"{root / present[0]} as SRC, or another of them"
        facts = shorten(names, 3)
        raise PlanError([Diagnostic("source", message, hint=hint, facts=facts, where=str(root))])
    if nested:
        message = f"the folder {present[0]} is read, not {shorten((p.name for p in nested), 3)}"
        hint = f"{nested[0]} as SRC, to read that one"
        diagnostics.add(Diagnostic("skipped", message, hint=hint, where=str(root)))
    return root / present[0]


def is_run_output(root: Path) -> bool:
    """Return whether a folder has the strategies or the records of a MindFormers run."""
    return is_folder(root / "strategy") or any(find_paths(root, "checkpoint*/rank_*/meta.json"))


def find_strategies(folder: Path) -> tuple[str, ...]:
    """Return the strategy files that lie with the rank folders in ``folder``.

    They are in the rank folders, or in ``strategy`` beside these or beside the folder of a
    MindFormers run that contains these.  Only files are returned whose names or folders say that
    they are of ranks, and merged ones.
    """
    real_path = Path(os.path.abspath(folder))  # noqa: PTH100 (resolve() would follow links)
    places = [folder / STRATEGY_FOLDER, folder]
    if real_path.name in CHECKPOINT_FOLDERS:
        output = folder.parent if folder.name == real_path.name else real_path.parent
        places.append(output / STRATEGY_FOLDER)
    for place in filter(is_folder, places):
        strategies = find_strategy_files(place)
        taken = [p for p in strategies.files if p in strategies.of_ranks or is_merged_name(p.name)]
        if place == folder and any(path.parent == folder for path in taken):
            continue  # these are given as a checkpoint
        if taken:
            return tuple(map(str, taken))
    return ()


def find_devices(root: str, diagnostics: Diagnostics) -> Mapping[int, Device]:
    """Return rank to device from the rank table; empty if there is none, or if several differ.

    It lies in the folder of the rank folders or above; in the output of a MindFormers run also in
    the one above that.  ``diagnostics`` gets a note on tables that are damaged or contradict each
    other.
    """
    tables: dict[Path, RankTable] = {}
    folder = Path(root)
    folders = [folder, folder.absolute().parent]
    folders += [folders[-1].parent] if folder.absolute().name in CHECKPOINT_FOLDERS else []
    for searched in folders:
        for path in list_rank_tables(searched):
            try:
                tables[path] = read_rank_table(str(path))
            except (FormatError, OSError) as error:
                facts = str(error.strerror if isinstance(error, OSError) else error.reason)
                message = f"the rank table cannot be read: {_NO_SERVERS}"
                diagnostics.add(Diagnostic("doubt", message, facts=facts, where=str(path)))
    if len({table.devices for table in tables.values()}) > 1:
        message = f"rank tables contradict each other: {_NO_SERVERS}"
        diagnostics.add(Diagnostic("doubt", message, facts=shorten(map(str, tables), 3)))
        return {}
    devices = next((table.devices for table in tables.values()), ())
    return {device.rank: device for device in devices}
