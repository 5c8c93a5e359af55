"""Output folders as MindFormers leaves them, built around real checkpoints of the corpus.

The names and the contents of ``meta.json`` are those of MindFormers' ``CheckpointMonitor``.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

from tests.support.corpus import SAMPLES
from tests.support.readers import Entry, read_ckpt, write_ckpt

RANKS = range(8)
PREFIX = "llama_7b_rank_{rank}"


def file_name(rank: int, step: str, prefix: str = PREFIX, suffix: str = ".ckpt") -> str:
    """Return the name of the file of a rank."""
    return f"{prefix.format(rank=rank)}-{step}{suffix}"


def save(
    output: Path,
    run: str,
    step: str,
    *,
    folder: str = "checkpoint",
    prefix: str = PREFIX,
    ranks: Iterable[int] = RANKS,
    suffix: str = ".ckpt",
    is_other: bool = False,
) -> None:
    """Write the files of a step: those of a sample run, or zeros of the same shapes.

    Outside ``checkpoint`` only the weights, as in MindFormers' ``checkpoint_network``.
    """
    for rank in ranks:
        source = SAMPLES / run / suffix[1:] / f"rank_{rank}" / f"net-1_1{suffix}"
        path = output / folder / f"rank_{rank}" / file_name(rank, step, prefix, suffix)
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, path)
        entries = read_ckpt(source) if suffix == ".ckpt" else {}
        if folder != "checkpoint":
            weights = {name: entry for name, entry in entries.items() if is_weight(name)}
            write_ckpt(path, weights)
        elif is_other:
            zeros = {n: Entry(e.dtype, e.shape, bytes(len(e.data))) for n, e in entries.items()}
            write_ckpt(path, zeros)


def is_weight(name: str) -> bool:
    """Return whether a parameter of the samples is a weight."""
    return name.startswith(("blocks.", "a.", "b.")) or name in ("w", "b")


def record(
    output: Path,
    step: str,
    *,
    prefix: str = PREFIX,
    ranks: Iterable[int] = RANKS,
    **entries: object,
) -> None:
    """Write ``meta.json`` of some ranks, after the step was saved."""
    epoch, number = step.split("_")
    for rank in ranks:
        document = {
            "last_epoch": int(epoch),
            "last_step": int(number),
            "last_ckpt_file": file_name(rank, step, prefix),
            **entries,
        }
        path = output / "checkpoint" / f"rank_{rank}" / "meta.json"
        path.write_text(json.dumps(document), encoding="utf-8")


def keep_strategies(
    output: Path, run: str, *, suffix: str = ".ckpt", ranks: Iterable[int] = RANKS
) -> None:
    """Write ``strategy/`` with a file for each rank; JSON samples have one for each stage."""
    folder = output / "strategy"
    folder.mkdir(parents=True, exist_ok=True)
    for rank in ranks:
        source = SAMPLES / run / "strategy" / f"strategy_{rank}{suffix}"
        if not source.exists():
            source = source.with_name(f"strategy_{4 * (rank // 4 * run.startswith('pp'))}{suffix}")
        shutil.copyfile(source, folder / f"ckpt_strategy_rank_{rank}{suffix}")


def keep_merged(output: Path, run: str, name: str = "merged_ckpt_strategy.ckpt") -> None:
    """Write the merged strategy beside those of the ranks, and its marker."""
    (output / "strategy").mkdir(parents=True, exist_ok=True)
    source = SAMPLES / run / "strategy" / f"merged{Path(name).suffix}"
    shutil.copyfile(source, output / "strategy" / name)
    (output / "strategy" / "merge_succeed.txt").touch()
