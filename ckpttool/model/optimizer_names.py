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

from dataclasses import replace

from ckpttool.model.layout import Layout

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


def without_axis(layout: Layout, axis: int) -> Layout | None:
    """Return the layout of a statistic over tensor axis ``axis``; None if it is impossible.

    It is impossible for a tensor of fewer than two axes and for a field-sliced one.  It is also
    impossible if no device axes form the optimizer shard.

    Examples
    --------
    >>> without_axis(Layout((4, 2), ((), (0,)), optimizer_shard=4), -1).tensor_map
    ((1,),)
    """
    plain = shard_as_axes(layout)
    if plain is None or len(layout.tensor_map) < 2 or not layout.has_boxes:
        return None
    lost = range(len(layout.tensor_map))[axis]
    return replace(
        plain,
        tensor_map=tuple(axes for i, axes in enumerate(plain.tensor_map) if i != lost),
        full_shape=None,
        rows=() if lost == 0 else layout.rows,
    )


def shard_as_axes(layout: Layout) -> Layout | None:
    """Return a layout of the same slices by device axes alone; None if it is impossible.

    A shard of ``s`` cuts by the position in the replica group modulo ``s``.  This is the position
    along the innermost free device axes if the product of their sizes is ``s``.  One of them may
    have to be split for that.

    Examples
    --------
    >>> shard_as_axes(Layout((2, 4), ((),), optimizer_shard=2))
    Layout(device_matrix=(2, 2, 2), tensor_map=((0,),), optimizer_shard=1, first_rank=0, \
full_shape=None, rows=(), fields=1)
    """
    if layout.optimizer_shard == 1:
        return layout
    if not layout.has_equal_slices:
        return None  # the shard cuts each part of a manual split, not the whole axis
    matrix = list(layout.device_matrix)  # from here on, axes are counted from the left
    tensor_map = [[len(matrix) - 1 - axis for axis in axes] for axes in layout.tensor_map]
    used = {axis for axes in tensor_map for axis in axes}
    chosen: list[int] = []
    left = layout.optimizer_shard
    for axis in reversed(range(len(matrix))):
        if axis in used or left == 1:
            continue
        size = matrix[axis]
        if left % size == 0:
            left //= size
            chosen.insert(0, axis)
        elif size % left == 0:
            matrix[axis : axis + 1] = [size // left, left]
            tensor_map = [[a + (a > axis) for a in axes] for axes in tensor_map]
            chosen = [axis + 1, *(a + 1 for a in chosen)]
            left = 1
        else:
            return None
    tensor_map[0] += chosen
    return replace(
        layout,
        device_matrix=tuple(matrix),
        tensor_map=tuple(tuple(len(matrix) - 1 - a for a in axes) for axes in tensor_map),
        optimizer_shard=1,
    )
