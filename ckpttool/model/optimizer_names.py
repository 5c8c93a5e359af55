"""Names of optimizer state: prefixes of parameters, and statistics with one axis less.

AdaFactor and CAME store means of a parameter's second moments: over its last axis (rows) and over
the axis before it (columns).  A rank computes them from its own slice.  So the remaining axes give
the position of its slice of a statistic.  Ranks that differ only along the reduced axis hold equal
slices.  The optimizer shard of the parameter also shards the statistics that have axis 0, and
MindSpore's strategy files do not record that.

Source
------
MindSpore 2.10 ``nn/optim/adafactor.py`` (names and shapes), and strategies and slices of compiled
networks; MindFormers ``core/optim/came.py``.
"""

from __future__ import annotations

GRADIENTS = "accu_grads."  # sums over micro batches, which each rank or stage computes for itself

# Prefixes of optimizer state in MindSpore 2.10 (nn, mint and experimental.optim) and MindFormers.
# Names and shapes identify most state (`ckpttool.planning.optimizer_state.match_states_by_name`).
# The list serves other cases: a tensor whose shape is not that of its parameter's slices is
# suspicious, a statistic has one axis less, and gradients have rules of their own.  Prefixes that
# are also names of modules are left out (``linear.`` of FTRL, ``prev.`` of Rprop).
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
    "exp_avg_sq_",  # AdaFactor; for its statistics of rows and columns see `reduced_from`
    "muon_m.",  # Muon of MindFormers
    GRADIENTS,
)
_DOTTED_PREFIXES = frozenset(prefix for prefix in STATE_PREFIXES if prefix.endswith("."))
_OTHER_PREFIXES = tuple(prefix for prefix in STATE_PREFIXES if not prefix.endswith("."))


def parameter_of(name: str) -> str | None:
    """Return the parameter whose optimizer state ``name`` would be; None without such a prefix.

    Examples
    --------
    >>> parameter_of("adam_m.layer.weight")
    'layer.weight'
    """
    if reduced_from(name) is not None:
        return None  # its shape is not the parameter's
    end = name.find(".") + 1
    if name[:end] in _DOTTED_PREFIXES:
        return name[end:] or None
    prefix = next((prefix for prefix in _OTHER_PREFIXES if name.startswith(prefix)), name)
    return name[len(prefix) :] or None


# Prefix of the name -> the axis that is reduced.
LOST_AXIS = {
    "exp_avg_sq_row_": -1,
    "exp_avg_sq_col_": -2,
    "exp_avg_insta_row_": -1,
    "exp_avg_insta_col_": -2,
}
STATISTICS = ("exp_avg_sq_", "exp_avg_insta_")  # prefixes of everything from second moments


def reduced_from(name: str) -> tuple[str, int] | None:
    """Return the parameter whose statistic ``name`` would be, and the axis that is reduced.

    Examples
    --------
    >>> reduced_from("exp_avg_sq_col_dense.weight")
    ('dense.weight', -2)
    """
    if not name.startswith(STATISTICS):
        return None  # a quick answer for nearly all names
    for prefix, axis in LOST_AXIS.items():
        if name.startswith(prefix) and name != prefix:
            return name[len(prefix) :], axis
    return None
