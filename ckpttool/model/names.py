"""Names of tensors: optimizer state, statistics with one axis less, and map parameters.

A name alone is parsed here, once, with the tables of MindSpore's prefixes.
`ckpttool.model.belonging` decides to what a tensor of the name belongs, and `ckpttool.checkpoint`
how it is sharded: these know shapes and strategies.

AdaFactor and CAME store means of a parameter's second moments: over its last axis (rows) and over
the axis before it (columns).  A rank computes them from its own slice.  So the remaining axes give
the position of its slice of a statistic.  Ranks that differ only along the reduced axis hold equal
slices.  The optimizer shard of the parameter also shards the statistics that have axis 0, and
MindSpore's strategy files do not record that.

A map parameter (a hash table) ``emb`` is three tensors of equal size along axis 0:
``emb.__map_keys__``, ``emb.__map_values__`` and ``emb.__map_statuses__``.  So every format can hold
one.

Source
------
MindSpore 2.10 ``nn/optim/adafactor.py`` (names and shapes), and strategies and slices of compiled
networks; MindFormers ``core/optim/came.py``.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping

from msgspec import Struct

from ckpttool.model.tensors import TensorMeta

ParameterOfState = Mapping[str, str]  # name of a state to name of its parameter

GRADIENTS = "accu_grads."  # sums over micro batches, which each rank or stage computes for itself

# Prefixes of optimizer state in MindSpore 2.10 (nn, mint and experimental.optim) and MindFormers.
# Names and shapes identify most state (`match_states`).
# The list serves the other cases: suspicious tensors, whose shape is not that of their parameter's
# slices; statistics with one axis less; gradients, with rules of their own.  Prefixes that are also
# names of modules are left out (``linear.`` of FTRL, ``prev.`` of Rprop).
STATE_PREFIXES = (
    "moments.",  # Momentum, FTRL, THOR
    "moment1.",  # Adam, LazyAdam, AdaMax
    "moment2.",
    "vhat.",  # Adam with use_amsgrad
    "adam_m.",  # AdamWeightDecay
    "adam_v.",
    "lamb_m.",  # Lamb
    "lamb_v.",
    "accum.",  # SGD, Adagrad, ProximalAdagrad, Adadelta
    "stat.",  # SGD
    "momentum_buf.",  # SGD of mint
    "accum_update.",  # Adadelta
    "mean_square.",  # RMSProp
    "mean_grad.",
    "moment.",
    "step_size.",  # Rprop
    "ax_.",  # ASGD
    "ax.",  # ASGD of experimental
    "exp_avg.",  # Adam, AdamW of mint and experimental; AdaMax, NAdam, RAdam there; AdaFactor
    "exp_avg_sq.",  # Adam, AdamW of mint and experimental; NAdam, RAdam there
    "max_exp_avg_sq.",  # AdamW, Adam with amsgrad
    "exp_inf.",  # AdaMax of experimental
    "exp_avg_sq_",  # AdaFactor; for its statistics of rows and columns see `_REDUCED_AXES`
    "muon_m.",  # Muon of MindFormers
    GRADIENTS,
)
# Prefix -> the axis of the parameter that is reduced.
_REDUCED_AXES = {
    "exp_avg_sq_row_": -1,
    "exp_avg_sq_col_": -2,
    "exp_avg_insta_row_": -1,
    "exp_avg_insta_col_": -2,
}
_SECOND_MOMENTS = (*_REDUCED_AXES, "exp_avg_sq_")  # all prefixes without a dot; longer ones first
_DOTTED_PREFIXES = {prefix: prefix for prefix in STATE_PREFIXES if prefix not in _SECOND_MOMENTS}

_MAP_SUFFIXES = (".__map_keys__", ".__map_values__", ".__map_statuses__")


class Name(Struct, frozen=True):
    """The parts that the name of a tensor alone shows.

    The rest behind the prefix, ``parameter``, is the parameter whose state or statistic it would
    be.  A statistic lacks the ``reduced_axis`` of the parameter; all other names have None.
    """

    text: str
    prefix: str = ""  # the prefix of MindSpore's optimizers that it begins with; "" if it has none
    parameter: str | None = None
    reduced_axis: int | None = None

    @property
    def same_shape_parameter(self) -> str | None:
        """The parameter whose state it would be; None for a statistic, which has another shape."""
        return self.parameter if self.reduced_axis is None else None

    @property
    def is_gradient(self) -> bool:
        """Whether it is an accumulated gradient."""
        return self.prefix == GRADIENTS

    @property
    def is_second_moment(self) -> bool:
        """Whether it is state of AdaFactor or CAME that is computed from second moments."""
        return self.prefix in _SECOND_MOMENTS

    @property
    def layer(self) -> str:
        """All components but the last one."""
        return self.text.rpartition(".")[0]

    @property
    def last(self) -> str:
        """The last component."""
        return self.text.rpartition(".")[2]

    def splits(self) -> Iterator[tuple[str, str]]:
        """Yield the ways to split it behind a dot, the shortest start first.

        >>> list(parse_name("net.dense.weight").splits())
        [('net.', 'dense.weight'), ('net.dense.', 'weight')]
        """
        parts = self.text.split(".")
        for number in range(1, len(parts)):
            yield ".".join(parts[:number]) + ".", ".".join(parts[number:])


def parse_name(name: str) -> Name:
    """Parse the name of a tensor.

    >>> name = parse_name("exp_avg_sq_col_dense.weight")
    >>> parse_name("adam_m.layer.weight").parameter, name.parameter, name.reduced_axis
    ('layer.weight', 'dense.weight', -2)
    """
    return _KNOWN[name]


class _Known(dict[str, Name]):
    """The parsed names.

    Many ranks and many checks share the names, and large models have 100,000.  A cache that knows
    the order of its use takes twice the memory.
    """

    MOST = 1 << 17

    def __missing__(self, key: str) -> Name:
        if len(self) >= self.MOST:
            self.clear()
        prefix = _DOTTED_PREFIXES.get(key[: key.find(".") + 1], "")
        prefix = prefix or next(filter(key.startswith, _SECOND_MOMENTS), "")
        if prefix in ("", key):
            self[key] = name = Name(key)
            return name
        parameter = key.removeprefix(prefix)
        if parameter in self:
            parameter = self[parameter].text  # the same string, which large models have 50,000 of
        self[key] = name = Name(key, prefix, parameter, _REDUCED_AXES.get(prefix))
        return name


_KNOWN = _Known()


def forget_names() -> None:
    """Forget the parsed names, which a complete plan does not need."""
    _KNOWN.clear()


def map_of_component(name: str) -> str | None:
    """Return the map parameter that a tensor is a component of, or None.

    >>> map_of_component("emb.__map_keys__")
    'emb'
    """
    return name.rpartition(".")[0] if name.endswith(_MAP_SUFFIXES) else None


def map_component_names(tag: str) -> tuple[str, ...]:
    """Return the names of the keys, values and statuses of a map parameter."""
    return tuple(tag + suffix for suffix in _MAP_SUFFIXES)


def match_states(
    strategy_names: Collection[str], metas: Mapping[str, TensorMeta]
) -> ParameterOfState:
    """Match optimizer states with their parameters by their names.

    A state's name is a prefix of one word, a dot, and the name of another parameter.  The prefix
    must belong to an optimizer, not to a module.  It belongs to a module if it also begins a name
    that is not a state's.  With ``decoder.norm``, for example, ``decoder.embedding`` is not a state
    of ``embedding``, unless ``decoder.decoder.norm`` exists.  Tensors with one element do not
    count, since an optimizer may store some.

    Only the strategy can show that a prefix of MindSpore's optimizers belongs to a module.  Any
    other name with such a prefix may be a state whose parameter is missing.

    >>> w = TensorMeta("w", "Float32", (4, 3))
    >>> match_states(["w", "b"], {"w": w, "b": w, "mine.w": w, "mine.b": w})
    {'mine.w': 'w', 'mine.b': 'b'}
    """
    names = dict.fromkeys((*strategy_names, *metas))
    candidates: dict[str, str] = {}
    modules: set[str] = set()
    listed_modules: set[str] = set()
    for name in names:
        prefix, _, parameter = name.partition(".")
        by_prefix = parse_name(name).parameter
        if by_prefix in names:
            candidates[name] = by_prefix
        elif parameter in names and parameter and prefix.isidentifier():
            candidates[name] = parameter
        elif f"{prefix}.{name}" in names:
            continue  # a parameter of a module whose name is also the prefix of its state
        elif name in strategy_names:
            listed_modules.add(prefix)
        elif math.prod(metas[name].shape) != 1:
            modules.add(prefix)
    modules |= listed_modules
    parameter_of_state = {}
    for name, parameter in candidates.items():
        prefix = name.removesuffix(parameter).removesuffix(".")
        if prefix not in (modules if parse_name(name).parameter is None else listed_modules):
            parameter_of_state[name] = parameter
    for name, parameter in parameter_of_state.items():
        # The parameter of an unlisted state may be an unlisted state itself.
        while parameter not in strategy_names and parameter in parameter_of_state:
            parameter = parameter_of_state[parameter]
        parameter_of_state[name] = parameter
    return parameter_of_state


def drop_unlike_shapes(
    parameter_of_state: ParameterOfState, metas: Mapping[str, TensorMeta]
) -> ParameterOfState:
    """Drop the states that have another full shape than their parameter, if both are known.

    States with a prefix of MindSpore's optimizers stay.
    """
    return {
        name: parameter
        for name, parameter in parameter_of_state.items()
        if parse_name(name).parameter is not None
        or name not in metas
        or parameter not in metas
        or metas[name].shape == metas[parameter].shape
    }
