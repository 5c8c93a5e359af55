"""``meta.json``: the save that MindFormers recorded last in the folder of a rank.

An object with ``last_epoch`` and ``last_step`` (numbers) and ``last_ckpt_file`` (a name that ends
in the same step).  It is replaced when a save is complete, so training has recorded a step if no
rank's record is older.

Source
------
MindFormers ``core/callback/callback.py`` (``record_last_ckpt_to_json``), ``tools/resume_ckpt.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ckpttool.errors import FormatError
from ckpttool.formats.strict_json import read_json_object
from ckpttool.model.catalog import format_ranks
from ckpttool.model.notes import Note
from ckpttool.storage.names import Found, Step, run_of, step_of

MAX_BYTES = 1 << 16  # three short entries; what is larger is something else


@dataclass(frozen=True, slots=True)
class Record:
    """What one rank recorded: the step and the name of the file."""

    step: Step
    name: str

    def is_of_run(self, path: Path) -> bool:
        """Whether a file of the same rank was saved by the same training run, in one format."""
        return (run_of(path.name), path.suffix) == (run_of(self.name), Path(self.name).suffix)


def read_records(found: Iterable[Found], notes: list[Note]) -> Mapping[int, Record]:
    """Rank to record; of broken ones there is a note, and nothing else is known of their ranks."""
    records = {}
    broken: dict[int, FormatError] = {}
    for rank, folder in sorted({(item.rank, item.path.parent) for item in found}):
        path = folder / "meta.json"
        if not path.is_file():
            continue
        try:
            records[rank] = _read(path)
        except FormatError as error:
            broken[rank] = error
    if broken:
        text = f"{format_ranks(tuple(broken))}: no record of the step saved last"
        notes.append(Note("doubt", f"{text}: {next(iter(broken.values()))}"))
    return records


def _read(path: Path) -> Record:
    entries = read_json_object(str(path), MAX_BYTES)
    epoch, step = (entries.get(key) for key in ("last_epoch", "last_step"))
    name = entries.get("last_ckpt_file")
    if not isinstance(name, str) or type(epoch) is not int or type(step) is not int:
        reason = "expected the numbers last_epoch and last_step and the name last_ckpt_file"
        raise FormatError(str(path), None, reason)
    recorded = step_of(name)
    if recorded is None or recorded[:2] != (epoch, step):
        raise FormatError(str(path), None, f"says step {epoch}_{step} and names the file {name}")
    return Record(recorded, name)
