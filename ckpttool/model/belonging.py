"""The belonging of a tensor: it is a weight, or the state, scale, copy or counter of something.

A parameter is more than a tensor.  All code that chooses, casts, averages, renames or shows tensors
uses this answer, so parameters are never split.  Names, element types and full shapes decide.  Only
a single number that may count something needs its value (`may_count`).
`ckpttool.model.names.match_states` finds the parameter whose layout a state has.

Source
------
MindSpore 2.10 ``Parameter(..., name)`` in ``nn/optim``, ``nn/wrap/loss_scale.py``, ``amp.py``,
``mint/optim``, ``experimental/optim`` and ``train/callback/_train_fault_tolerance.py``; mindone
``trainers/ema.py`` (``ema``, ``swap``, ``updates``); DeepSeek-V3 ``inference/convert.py`` and
compressed-tensors (``weight_scale_inv``, ``weight_scale``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Literal, TypeAlias, get_args

from msgspec import Struct
from msgspec.structs import replace

from ckpttool.lazy import compile_late
from ckpttool.model.dtypes import CASTABLE, FLOAT8, FLOATS
from ckpttool.model.names import ParameterOfState, drop_unlike_shapes, match_states, parse_name
from ckpttool.model.tensors import TensorMeta
from ckpttool.wording import count

Role = Literal["weight", "state", "scale", "copy", "counter"]

LEAST_COUNT = 256  # BFloat16 has all whole numbers up to here, so no cast would harm a lower count


class Belonging(Struct, frozen=True):
    """The role of a tensor, and the parameter that it belongs to.

    A ``"state"`` is of an optimizer, accumulated gradients or a master copy; a ``"scale"`` of a
    Float8 weight; a ``"copy"`` is an average of weights, a ``"counter"`` a single value of
    training.  The parameter ``of`` may be absent; it is None for what belongs to no single one.
    """

    role: Role = "weight"
    of: str | None = None
    scale: str | None = None  # the tensor that has the scale of a Float8 weight
    is_guessed: bool = False  # whether only the value of a counter shows that it counts something

    @property
    def is_model(self) -> bool:
        """Whether the model may need it, so that ``--weights-only`` keeps it."""
        return self.role in ("weight", "scale") or self.is_guessed

    @property
    def is_trained(self) -> bool:
        """Whether its numbers are those of weights, which are cast and averaged."""
        return self.role in ("weight", "copy")


Belongings: TypeAlias = Mapping[str, Belonging]  # by name, without weights that stand alone

WEIGHT = Belonging()

_COUNTER = compile_late(
    r"global_step|learning_rate(_group_\d+)?|momentum|beta[12]_power|state_step|step_t|afactor_step"
    r"|current_iterator_step|last_overflow_iterator_step|scale_sense|loss_scale|scale_value"
    r"|epoch_num|step_num|batch_num|cur_rank|last_epoch|cov_step|accumulation_step"
    r"|fake_lr|fake_param"
)
_EMA_COUNTER = "updates"
_STATE = compile_late(r"matrix_(a_inv_|g_inv_|max)\d+")  # what THOR computes
_OTHER_STATES = ("linear", "prev", "main_param")  # FTRL, Rprop, master copies of MindFormers
_MASTER = "main_param."
_COPIES = ("ema", "swap")
_VALUE_PREFIXES = ("mu_product_", "mu_", "eta_")  # a single value for each parameter
_SCALES = ("_scale_inv", "_scale")


def find_belongings(
    strategy_names: Collection[str],
    metas: Mapping[str, TensorMeta],
    counting: Collection[str] = (),
    states: ParameterOfState | None = None,
) -> Belongings:
    """Return what the tensors are that are not weights, or that belong to a weight.

    A tensor with an unknown prefix belongs to the parameter of that name and counts as a weight: it
    may be an average of weights, or an adapter.  A known prefix is that of a module if none of its
    names has its parameter, although there are weights.

    Parameters
    ----------
    strategy_names
        Names that the strategy lists.
    metas
        Full tensors of the checkpoint by name, or slices of them.
    counting
        Single numbers whose values show that they count something; see `may_count`.
    states
        The result of `match_states` for these names, if it is known.

    Examples
    --------
    >>> w, step = TensorMeta("w", "Float32", (4, 3)), TensorMeta("global_step", "Int32", (1,))
    >>> metas = {"w": w, "adam_m.w": w, "ema.w": w, "global_step": step}
    >>> {name: what.role for name, what in find_belongings([], metas).items()}
    {'adam_m.w': 'state', 'ema.w': 'copy', 'global_step': 'counter'}
    """
    names = dict.fromkeys((*metas, *strategy_names))
    states = match_states(strategy_names, metas) if states is None else states
    parameters = drop_unlike_shapes(states, metas)
    proven = {parse_name(name).prefix for name in parameters}
    has_weights = any(
        parse_name(name).parameter is None
        and name not in parameters
        and not (name in metas and metas[name].is_single)
        for name in names
    )
    belongings: dict[str, Belonging] = {}
    for name in names:
        meta, parsed, parameter = metas.get(name), parse_name(name), parameters.get(name)
        prefix, _, rest = name.partition(".")
        if parsed.parameter is not None:
            if parameter or parsed.prefix in proven or parsed.is_gradient or not has_weights:
                belongings[name] = Belonging("state", parsed.parameter)
        elif prefix in _COPIES and rest in names and _are_alike(name, rest, metas):
            belongings[name] = Belonging("copy", rest)
        elif parameter is not None:
            role: Role = "state" if prefix in _OTHER_STATES else "weight"
            belongings[name] = Belonging(role, parameter)
        elif _STATE.fullmatch(name):
            belongings[name] = Belonging("state")
        elif _COUNTER.fullmatch(name) and (meta is None or len(meta.shape) < 2):
            belongings[name] = Belonging("counter")  # a rate that is planned has all steps
        elif meta is None or meta.is_single:
            owner = _owner_of_value(name, names)
            is_whole = meta is not None and "." not in name and meta.dtype not in FLOATS
            if owner is not None or is_whole or name == _EMA_COUNTER:
                belongings[name] = Belonging("counter", owner)
            elif name in counting:
                belongings[name] = Belonging("counter", is_guessed=True)
    for name in (name for name, meta in metas.items() if meta.dtype in FLOAT8):
        scale = next((name + suffix for suffix in _SCALES if name + suffix in names), None)
        if scale is not None:
            belongings[name] = replace(belongings.get(name, WEIGHT), scale=scale)
            belongings[scale] = Belonging("scale", name)
    return belongings


def owners_of(name: str, belongings: Belongings) -> Iterator[str]:
    """Yield the parameter that a tensor goes with, the one that this goes with, and so on.

    A weight goes with none, even if it has the name of another behind a prefix.

    Examples
    --------
    >>> known = {"adam_m.ema.w": Belonging("state", "ema.w"), "ema.w": Belonging("copy", "w")}
    >>> list(owners_of("adam_m.ema.w", known))
    ['ema.w', 'w']
    """
    what = belongings.get(name, WEIGHT)
    while what.of is not None and what.role != "weight":
        yield what.of
        what = belongings.get(what.of, WEIGHT)


def weight_of(name: str, belongings: Belongings) -> str | None:
    """Return the weight whose numbers a tensor has: a weight itself, or that of a copy, else None.

    Copies are averages, and the master copies of an optimizer.

    Examples
    --------
    >>> known = {"ema.w": Belonging("copy", "w"), "adam_m.w": Belonging("state", "w")}
    >>> [weight_of(name, known) for name in ("w", "ema.w", "main_param.w", "adam_m.w")]
    ['w', 'w', 'w', None]
    """
    if name.startswith(_MASTER):
        return name.removeprefix(_MASTER)
    what = belongings.get(name, WEIGHT)
    return {"weight": name, "copy": what.of}.get(what.role)


def count_roles(names: Iterable[str], belongings: Belongings) -> dict[Role, int]:
    """Return how many tensors have each role, without roles that no tensor has."""
    counts = Counter(belongings.get(name, WEIGHT).role for name in names)
    return {role: counts[role] for role in get_args(Role) if counts[role]}


def format_roles(roles: Mapping[Role, int]) -> str:
    """Return the numbers of tensors of each role as text.

    Examples
    --------
    >>> format_roles({"weight": 1, "state": 2, "copy": 3})
    '1 weight, 2 states, 3 copies'
    """
    texts = (count(number, role) for role, number in roles.items())
    return ", ".join(texts).replace("copys", "copies")


def _are_alike(name: str, other: str, metas: Mapping[str, TensorMeta]) -> bool:
    kinds = {(metas[each].dtype, metas[each].shape) for each in (name, other) if each in metas}
    return len(kinds) < 2


def _owner_of_value(name: str, names: Collection[str]) -> str | None:
    rests = (name.removeprefix(prefix) for prefix in _VALUE_PREFIXES if name.startswith(prefix))
    return next((rest for rest in rests if rest in names), None)


def may_count(strategy_names: Collection[str], metas: Mapping[str, TensorMeta]) -> frozenset[str]:
    """Return the single numbers that count something if they are whole and above `LEAST_COUNT`.

    They are floating-point numbers that no strategy lists and no optimizer has state of, and whose
    names say nothing.
    """
    trained = {parse_name(name).parameter for name in metas}
    return frozenset(
        name
        for name, meta in metas.items()
        if meta.dtype in CASTABLE
        and meta.is_single
        and name not in strategy_names
        and name not in trained
        and parse_name(name).parameter is None
        and _owner_of_value(name, metas) is None
        and not (_COUNTER.fullmatch(name) or name == _EMA_COUNTER)
    )
