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
STACK_RANK, RANK_STACK = -2, -3  # the same of a stack of experts, these outermost or innermost
MAX_RANK = 1 << 15  # so that a row and a column of it fit into the buffers of a worker

_PREFIX = "base_model.model."  # of PEFT


class _Spelling(NamedTuple):
    """The end of names, and of that of the weight; the axes of the weight that A and B have."""

    pattern: re.Pattern[str]
    end: str
    a: tuple[int, ...]
    b: tuple[int, ...]


_LINEAR = (RANK, 1), (0, RANK)
_SPELLINGS = tuple(
    _Spelling(re.compile(pattern, re.ASCII), end, *axes)
    for pattern, end, axes in (
        (r"(.+)\.lora_([AB])(?:\.\w+)?\.weight", ".weight", _LINEAR),
        (r"(.+)\.(?:mindpet_delta_)?lora_([ab])", ".weight", _LINEAR),
        (r"(.+\.weight[12])_lora_([ab])", "", ((0, 1, RANK), (0, RANK, 2))),  # experts
        (r"(.+)\.lora_embedding_([AB])(?:\.\w+)?", ".weight", ((RANK, 0), (1, RANK))),
    )
)

# Parameters of experts that transformers 5 fuses, in its order, and the weights in files that are
# their rows.  PEFT wraps each of ``target_parameters``, the last one outermost, and its names have
# only the wrappers: ``experts.base_layer.lora_A`` is of the first of two.  Rows of A are (e r), but
# columns of B are (r e).  Up to 0.19.0 A had the rows of the weight.  Source: PEFT 0.21.2
# ``ParamWrapper.get_delta_weight``, ``_inject_parameters``; findings/peft_turns_experts.sh.
_FUSED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_FUSED_SINCE = (0, 19, 1), True  # True: released; snapshots before it have either

# Beginnings of ``init_lora_weights`` with which PEFT takes the first product out of the base; it
# takes "OLoRA" for "olora".  Source: PEFT 0.21.2 ``LoraLayer.update_layer``.
_TAKEN_FROM_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


# Keys with which an adapter is more than the product of two tensors.
_MORE = (
    *("use_dora", "use_qalora", "use_bdlora", "alora_invocation_tokens", "layer_replication"),
    *("arrow_config", "kasa_config", "monteclora_config", "modules_to_save"),
)


class AdapterConfig(Struct, frozen=True):
    """The scale in ``adapter_config.json``; the fields have their names there.

    ``more`` is what the adapter has beside the product of two tensors; "" for nothing.
    """

    r: int | None = None
    lora_alpha: float | None = None
    use_rslora: bool = False
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None
    fan_in_fan_out: bool = False  # whether weights are stored transposed
    target_parameters: list[str] | None = None
    peft_version: str = ""
    more: str = ""

    @property
    def refused(self) -> str:
        """Why the product of A and B is not what is to be added; "" if it is."""
        targets = {target.rpartition(".")[2] for target in self.target_parameters or ()}
        numbers = tuple(map(int, re.findall(r"\d+", self.peft_version)[:3]))
        is_older = (numbers, "dev" not in self.peft_version) < _FUSED_SINCE
        if self.more or not is_older or targets.isdisjoint(_FUSED):
            return self.more
        version = self.peft_version or "missing"
        return f"peft_version is {version}; before 0.19.1 A and B of fused experts are exchanged"

    def rank_of(self, module: str) -> int | None:
        """Return the rank for a module; None if nothing says it."""
        ranks = self.rank_pattern or {}
        return ranks.get(_find(ranks, module), self.r)

    def find_fused(self, experts: str, wrappers: int) -> str | None:
        """Return the parameter that PEFT adapts within so many other wrappers of experts."""
        is_known = experts.endswith(".experts")
        targets = tuple(f".{target}" for target in self.target_parameters or () if is_known)
        fused = [name for name in _FUSED if f".{experts}.{name}".endswith(targets)]
        return fused[-1 - wrappers] if wrappers < len(fused) else None


def more_of(document: Mapping[str, object]) -> str:
    """Return what a configuration says of more than the product of two tensors."""
    kind, start = document.get("peft_type", "LORA"), document.get("init_lora_weights")
    if kind != "LORA":
        return f"peft_type is {kind}"
    if str(start).lower().startswith(_TAKEN_FROM_BASE):
        return f"init_lora_weights is {start}, which changes the base"
    return next((f"it has {key}" for key in _MORE if document.get(key)), "")


class AdapterTensor(NamedTuple):
    """A tensor of an adapter: its name, and which axis of the weight each of its axes is.

    It may hold the low ranks of several ``experts`` or the rows of several ``weights``.  ``expert``
    and ``weight`` are the position of this weight among them.
    """

    name: str
    axes: tuple[int, ...]
    experts: int = 1
    expert: int = 0
    weights: int = 1
    weight: int = 0

    def rank_in(self, shape: tuple[int, ...]) -> int:
        """Return the rank that it has if this is its shape."""
        return shape[self.axes.index(min(self.axes))] // self.experts

    def shape(self, weight: tuple[int, ...], rank: int) -> tuple[int, ...]:
        """Return the shape that it has for a weight of this shape."""
        sizes = (weight[0] * self.weights, *weight[1:])
        ranks = rank * max(self.experts, self.expert + 1)
        return tuple(ranks if axis < 0 else sizes[axis] for axis in self.axes)


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
        The configuration beside it; None without one.
    scale
        The given scale; None for that of the configuration.
    """

    catalog: Catalog
    config: AdapterConfig | None = None
    scale: float | None = None

    @cached_property
    def named(self) -> tuple[Mapping[str, LowRank], Mapping[str, str], tuple[str, ...]]:
        """The tensors by the weight, those without their counterpart, and all others."""
        halves: dict[tuple[str, str], dict[str, AdapterTensor]] = {}
        others = []
        is_turned = self.config is not None and self.config.fan_in_fan_out
        for name in self.catalog.metas:
            spelled = ((it, it.pattern.fullmatch(name.removeprefix(_PREFIX))) for it in _SPELLINGS)
            spelling, match = next((it for it in spelled if it[1]), (_SPELLINGS[0], None))
            sides = {} if match is None else halves.setdefault((match[1], spelling.end), {})
            if match is None or (side := match[2].upper()) in sides:
                others.append(name)
                continue
            axes = spelling.a if side == "A" else spelling.b
            if is_turned and (spelling.a, spelling.b) == _LINEAR:
                axes = tuple(axis if axis == RANK else 1 - axis for axis in axes)
            sides[side] = AdapterTensor(name, axes)
        pairs, lonely = dict[str, LowRank](), dict[str, str]()
        for (module, end), sides in halves.items():
            if len(sides) == 1:
                ((side, tensor),) = sides.items()
                lonely[tensor.name] = "B" if side == "A" else "A"
            else:
                rows, columns = sorted(sides.values(), key=lambda it: max(it.axes))
                pair = LowRank(module, rows, columns, max(columns.axes) + 1)
                pairs |= self._of_experts(pair) or {module + end: pair}
        return pairs, lonely, tuple(others)

    def _of_experts(self, pair: LowRank) -> Mapping[str, LowRank]:
        """Return the pairs of the weights in files, for a pair that PEFT has for fused experts.

        The last expert is one too many: a weight of its name shows that the rank is another one.
        """
        experts, *wrappers = pair.module.split(".base_layer")
        fused = self.config and self.config.find_fused(experts, len(wrappers))
        rank = self.config and self.config.rank_of(module := f"{experts}.{fused}")
        if not (fused and rank):
            return {}
        number = (*self.catalog.metas[pair.columns.name].shape, 0)[0] // rank
        a = pair.columns._replace(axes=(STACK_RANK, 1), experts=number)
        b = pair.rows._replace(axes=(0, RANK_STACK), experts=number, weights=len(_FUSED[fused]))
        return {
            f"{experts}.{expert}.{name}.weight": LowRank(
                module, b._replace(expert=expert, weight=k), a._replace(expert=expert), pair.ndim
            )
            for expert in range(number + 1)
            for k, name in enumerate(_FUSED[fused])
        }

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
        said, alphas = config.rank_of(module), config.alpha_pattern or {}
        if said is not None and said != rank:
            raise ValueError(f"rank {rank}, and the configuration says {said}")
        alpha = alphas.get(_find(alphas, module), config.lora_alpha)
        return alpha / math.sqrt(rank) if config.use_rslora else alpha / rank


def _find(patterns: Iterable[str], module: str) -> str:
    """Return the pattern of PEFT for a module: the first that its name ends with, dot by dot."""
    found = (pattern for pattern in patterns if re.match(rf"(.*\.)?({pattern})$", module))
    return next(found, "")
