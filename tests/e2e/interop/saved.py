"""What MindSpore saved of a cut, and what another cut of the same family must become."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import ckpttool
from tests.oracle import take
from tests.support.checkpoints import oracle
from tests.support.corpus import Ranks as Digests
from tests.support.corpus import differences, digests
from tests.support.readers import Entry, read_ckpt, read_ranks

Ranks = dict[int, dict[str, Entry]]

GRADIENTS = "accu_grads."  # summed up over the micro batches of a pipeline
STATISTICS = "exp_avg_sq_"  # AdaFactor's


@dataclass(frozen=True, repr=False)
class Saved:
    """A cut of a family, compiled and saved by MindSpore for every rank.

    Attributes
    ----------
    recipe
        See ``recipes.py``.
    folder
        ``ckpt/`` and ``safetensors/`` with a folder for each rank, ``strategies/`` with the file of
        each rank, ``stages/`` with those of the first rank of each stage, ``strategy.ckpt`` (merged
        by MindSpore if there are stages), and ``full.ckpt``: all parameters before they were cut.
    """

    recipe: dict
    folder: Path

    @property
    def strategy(self) -> Path:
        return self.folder / "strategy.ckpt"

    @cached_property
    def ranks(self) -> Ranks:
        return read_ranks(self.folder / "ckpt")

    @cached_property
    def full(self) -> dict[str, Entry]:
        saved = {name for tensors in self.ranks.values() for name in tensors}
        everything = read_ckpt(self.folder / "full.ckpt")
        return {name: everything[name] for name in everything if name in saved}

    @property
    def misdescribed(self) -> Ranks:
        """Gradients in the making: the strategy claims an optimizer shard that they do not have.

        MindSpore copies the entry of the parameter, but leaves these whole.
        """
        if not self.recipe["optimizer_shard"]:
            return {}
        return {
            rank: {name: entry for name, entry in tensors.items() if name.startswith(GRADIENTS)}
            for rank, tensors in self.ranks.items()
        }


def resharded(src: Saved, dst: Saved) -> Ranks:
    """What every rank of ``dst`` must hold, if the values come from ``src``.

    Slices are those that MindSpore itself cut for ``dst``.  What only ``src`` has is cut like its
    parameter if it is optimizer state of a listed one, else undivided on every rank; what only
    ``dst`` has is not there.
    """
    in_dst = {name for tensors in dst.ranks.values() for name in tensors}
    found = {
        rank: {name: entry for name, entry in tensors.items() if name in src.full}
        for rank, tensors in dst.ranks.items()
    }
    listed = ckpttool.read_strategy([str(dst.strategy)]).layouts
    for name, entry in src.full.items():
        if name in in_dst:
            continue
        base = name.partition(".")[2]
        is_state = base in listed and entry.shape == src.full[base].shape
        for layout in map(oracle, listed[base]) if is_state else ():
            for rank in layout.ranks:
                part = take(entry.array(), layout, rank)
                found[rank][name] = Entry(entry.dtype, part.shape, part.tobytes())
        for tensors in found.values() if not is_state else ():
            tensors[name] = entry
    return found


def wrong(src: Saved, dst: Saved, got: Digests, is_told: bool = False) -> list[str]:
    """The first differences between what came out and what must.

    ``is_told`` says that the claims of the source's strategy, and what became of them, were seen.
    """
    told = {name for tensors in src.misdescribed.values() for name in tensors if is_told}
    free = {
        rank: {name: entry for name, entry in tensors.items() if name not in told}
        for rank, tensors in dst.misdescribed.items()
    }
    return differences(digests(resharded(src, dst)), got, free)[:3]


def as_digests(contents: dict[str, list]) -> dict[str, tuple]:
    return {name: (dtype, tuple(shape), sha) for name, (dtype, shape, sha) in contents.items()}
