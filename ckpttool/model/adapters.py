"""Low-rank adapters (LoRA): what their tensors are called, and what they add to a weight.

An adapter has two tensors for a weight, A and B.  ``scale`` times their product is added.  Names
say which axes the two have, never their shapes.  The scale is what a person gives, or follows from
the configuration of the adapter as PEFT computes it.

Source
------
PEFT 0.21 ``tuners/lora`` (names, ``scaling``, ``fan_in_fan_out``) and ``get_pattern_key``, which
MindSpeed uses as well; MindFormers 2.1.0 ``parallel_core`` and PyNative, and its legacy names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import NamedTuple

from msgspec import Struct

from ckpttool.model.catalog import Catalog

RANK = -1  # in the axes of a tensor of an adapter: the one that the product sums over
MAX_RANK = 1 << 15  # so that a row and a column of it fit into the buffers of a worker

_PREFIX = "base_model.model."  # of PEFT


class _Spelling(NamedTuple):
    """How names end, and that of the weight; the axes of A, of B and of the weight."""

    pattern: re.Pattern[str]
    end: str
    a: str
    b: str
    weight: str


_SPELLINGS = tuple(
    _Spelling(re.compile(pattern, re.ASCII), *rest)
    for pattern, *rest in (
        (r"(.+)\.lora_([AB])(?:\.\w+)?\.weight", ".weight", "r i", "o r", "o i"),
        (r"(.+)\.(?:mindpet_delta_)?lora_([ab])", ".weight", "r i", "o r", "o i"),
        (r"(.+\.weight[12])_lora_([ab])", "", "e i r", "e r o", "e i o"),  # experts
        (r"(.+)\.lora_embedding_([AB])(?:\.\w+)?", ".weight", "r v", "d r", "v d"),
    )
)

# Beginnings of ``init_lora_weights`` with which PEFT takes the first product out of the base.
_TAKEN_FROM_BASE = ("pissa", "olora", "corda", "loftq")


class _More(Struct, frozen=True):
    """What a configuration says of adapters that are no mere product."""

    use_dora: bool = False
    use_qalora: bool = False
    use_bdlora: object = None
    alora_invocation_tokens: object = None
    layer_replication: object = None
    arrow_config: object = None
    kasa_config: object = None
    monteclora_config: object = None


class AdapterConfig(_More, frozen=True):
    """What ``adapter_config.json`` says of the scale; the fields have their names there."""

    r: int | None = None
    lora_alpha: float | None = None
    use_rslora: bool = False
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None
    fan_in_fan_out: bool = False  # whether weights are stored transposed
    peft_type: str = "LORA"
    init_lora_weights: bool | str | None = None

    @property
    def refused(self) -> str:
        """What the adapter has beside the product of two tensors; "" for nothing."""
        if self.peft_type != "LORA":
            return f"peft_type is {self.peft_type}"
        if str(self.init_lora_weights).startswith(_TAKEN_FROM_BASE):
            return f"init_lora_weights is {self.init_lora_weights}, which changes the base"
        return next(
            (f"it has {name}" for name in _More.__struct_fields__ if getattr(self, name)), ""
        )


class AdapterTensor(NamedTuple):
    """A tensor of an adapter: its name, and which axis of the weight each of its axes is."""

    name: str
    axes: tuple[int, ...]


class LowRank(NamedTuple):
    """The two tensors for a weight: that with its last axis but one, and that with its last."""

    module: str
    rows: AdapterTensor
    columns: AdapterTensor
    ndim: int  # axes of the weight


class Adapter(Struct, frozen=True, dict=True):
    """An adapter that a person names.

    Attributes
    ----------
    catalog
        Its file.
    config
        What lies beside it; None for nothing.
    scale
        What is given; None for that of the configuration.
    """

    catalog: Catalog
    config: AdapterConfig | None = None
    scale: float | None = None

    @cached_property
    def named(self) -> tuple[Mapping[str, LowRank], Mapping[str, str], tuple[str, ...]]:
        """The tensors by the weight, those without their counterpart, and all others."""
        halves: dict[tuple[str, str, int], dict[str, AdapterTensor]] = {}
        others = []
        for name in self.catalog.metas:
            for spelling in _SPELLINGS:
                if match := spelling.pattern.fullmatch(name.removeprefix(_PREFIX)):
                    break
            else:
                others.append(name)
                continue
            axes_of_weight = spelling.weight.split()
            if spelling.weight == "o i" and self.config and self.config.fan_in_fan_out:
                axes_of_weight.reverse()
            places = {axis: number for number, axis in enumerate(axes_of_weight)}
            side = match[2].upper()
            axes = (spelling.a if side == "A" else spelling.b).split()
            pair = halves.setdefault((match[1], match[1] + spelling.end, len(places)), {})
            if side in pair:
                others.append(name)
            pair.setdefault(side, AdapterTensor(name, tuple(places.get(it, RANK) for it in axes)))
        pairs, lonely = {}, {}
        for (module, weight, ndim), sides in halves.items():
            if len(sides) < 2:
                ((side, tensor),) = sides.items()
                lonely[tensor.name] = "B" if side == "A" else "A"
                continue
            rows, columns = sorted(sides.values(), key=lambda it: ndim - 2 not in it.axes)
            pairs[weight] = LowRank(module, rows, columns, ndim)
        return pairs, lonely, tuple(others)

    def scale_of(self, module: str, rank: int) -> float:
        """Return the factor of the product for a module.

        Raises
        ------
        LookupError
            Nothing says it.
        ValueError
            The configuration has another rank.
        """
        if self.scale is not None:
            return self.scale
        config = self.config
        if config is None or config.lora_alpha is None:
            raise LookupError(module)
        ranks, alphas = config.rank_pattern or {}, config.alpha_pattern or {}
        said = ranks.get(_find(ranks, module), config.r)
        if said is not None and said != rank:
            raise ValueError(f"rank {rank}, and the configuration says {said}")
        alpha = alphas.get(_find(alphas, module), config.lora_alpha)
        return alpha / math.sqrt(rank) if config.use_rslora else alpha / rank


def _find(patterns: Iterable[str], module: str) -> str:
    """Return the pattern of PEFT for a module: the first that its name ends with, dot by dot."""
    found = (pattern for pattern in patterns if re.match(rf"(.*\.)?({pattern})$", module))
    return next(found, "")
