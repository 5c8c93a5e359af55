"""The names of checkpoint files: rank, step and training run in them.

The end of a name says its step: ``{prefix}-{epoch}_{step}``, and ``_breakpoint`` behind it if
training stopped there.  MindFormers puts the rank into the prefix, ``llama_rank_3-10_2.ckpt``.

Source
------
MindSpore 2.10 ``train/callback/_checkpoint.py``; MindFormers ``tools/utils.py`` (ranks in names).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

RANK_IN_NAME = re.compile(r"(?<![A-Za-z])rank_?(\d+)(?!\d)")
STEP_IN_NAME = re.compile(r"-(\d{1,255})_(\d{1,255})(_breakpoint)?$")  # no file name is longer
NUMBER = re.compile(r"\d{1,255}")
HYPER_METADATA = re.compile(r"\.rank(\d{1,9})_metadata|(\d{1,9})\.metadata")  # of one rank


class Step(NamedTuple):
    """When a file was saved; later steps compare greater."""

    epoch: int
    step: int
    is_breakpoint: bool

    @property
    def label(self) -> str:
        """The step as spelled in names."""
        return f"{self.epoch}_{self.step}" + ("_breakpoint" if self.is_breakpoint else "")


@dataclass(frozen=True, slots=True)
class RankFile:
    """A file that may belong to the checkpoint.

    Attributes
    ----------
    rank, path
        The rank that wrote it, and its path.
    name
        Its name, with ``{rank}`` in place of the number if a pattern has it there.
    """

    rank: int
    path: Path
    name: str

    @property
    def key(self) -> str:
        """The common name of the files of all ranks that were saved together."""
        if "{rank}" in self.name:
            return self.name
        name = RANK_IN_NAME.sub(
            lambda match: "rank_{rank}" if int(match[1]) == self.rank else match[0], self.name
        )
        stem, suffix = Path(name).stem, self.path.suffix
        step = STEP_IN_NAME.search(stem)
        head, tail = (stem, "") if step is None else (stem[: step.start()], step[0])
        number = re.search(r"\d+(?=(_part\d+)?$)", head)  # MindSpore writes net3_part0
        if number is not None and int(number[0]) == self.rank and "{rank}" not in name:
            head = f"{head[: number.start()]}{{rank}}{head[number.end() :]}"
        return head + tail + suffix


def step_of(name: str) -> Step | None:
    """Return the step at the end of a file's name, or None."""
    match = STEP_IN_NAME.search(Path(name).stem)
    return Step(int(match[1]), int(match[2]), bool(match[3])) if match else None


def run_of(name: str) -> str:
    """Return the part of a name before the step, which differs between training runs."""
    return STEP_IN_NAME.sub("", Path(name).stem)


def label_of(name: str) -> str | None:
    """Return the step in a name as people write it, or None."""
    step = step_of(name)
    return None if step is None else step.label


def matches_step(key: str, files: Mapping[int, Path], wanted: str) -> bool:
    """Return whether ``--step wanted`` means these files, whose common name is ``key``."""
    step = step_of(key)
    requested = step_of("-" + wanted)
    if requested is not None and STEP_IN_NAME.fullmatch("-" + wanted):
        return step == requested
    if NUMBER.fullmatch(wanted) and step is not None:
        return int(wanted) in (step.epoch, step.step)
    return any(wanted in (path.name, path.stem) for path in files.values())
