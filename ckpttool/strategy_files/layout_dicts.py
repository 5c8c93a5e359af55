"""The layouts that MindSpore returns in Python: ``net.parameter_layout_dict``.

``Model.infer_train_layout`` and ``Model.infer_predict_layout`` return the same.  It is a dict of
names to layouts of one stage, also as JSON.  A layout is a sequence::

    0 device matrix          outermost axis first, as in a strategy file
    1 tensor map             device axes counted from the right, -1 for none; MAY be expanded
    2 slice shape            before the optimizer shard
    3 field size             > 0 for a field-sliced embedding
    4 uniform split          False for a manual split, whose rows are not there
    5 optimizer shard group  "" for none; "{size}-{hash}", or the group of all ranks
    6 full shape             from here on MAY be absent
    7 expanded slice shape   that of the tensor map, which has more axes if it is expanded
    8 ...                    of pipelines; not used

A tensor axis that several device axes shard is expanded to an axis for each: ``[32, 64]`` with axis
1 cut by two axes has the map ``[-1, 1, 0]`` and the slice ``[32, 1, 16]``.  Full shape and slice
say how these axes are joined.  The slice shape must follow from the matrix, the map and the full
shape.  So a layout that counts axes in another order is refused.  Arguments of the network
(``inputs0``, ``ids``) are listed like parameters.

Source
------
MindSpore 2.10 ``nn/cell.py`` (``parameter_layout_dict``), ``parallel/_tensor.py``
(``_load_tensor_by_layout``), ``train/serialization.py``; dicts of its compiler in
``tests/golden/layout_dicts``.
"""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from ckpttool.lazy import compile_late
from ckpttool.model.layout import Layout, fold_layout

_GROUP = compile_late(r"(\d+)-\d+")
_WORLD_GROUPS = ("hccl_world_group", "nccl_world_group")


class LayoutItem(Struct, frozen=True, array_like=True):
    """A layout as MindSpore has it in Python."""

    device_matrix: tuple[int, ...]
    tensor_map: tuple[int, ...]
    slice_shape: tuple[int, ...]
    field: int
    is_uniform: bool
    group: str
    full_shape: tuple[int, ...] | None = None
    expanded_slice: tuple[int, ...] = ()


def layout_of(item: LayoutItem) -> Layout:
    """Return the layout that an item encodes; raise ValueError if it is impossible."""
    if not item.is_uniform:
        raise ValueError("a manual split, whose rows only a strategy file has")
    tensor_map = tuple(() if axis == -1 else (axis,) for axis in item.tensor_map)
    layout = Layout(item.device_matrix, tensor_map, fields=max(1, item.field))
    if len(tensor_map) != len(item.slice_shape):
        layout = _folded(layout, item)
    full_shape = item.full_shape or layout.implied_shape(item.slice_shape)
    if layout.why_not(full_shape) or layout.slice_shape(0, full_shape) != item.slice_shape:
        expected = f"expected that of {full_shape} with {layout.slice_counts} slices"
        raise ValueError(f"slice shape {item.slice_shape}, {expected}")
    match = _GROUP.match(item.group)
    if item.group and match is None and item.group not in _WORLD_GROUPS:
        raise ValueError(f"optimizer shard group {item.group!r}, expected SIZE-HASH")
    shard = 1 if not item.group else int(match[1]) if match else layout.replicas
    return replace(layout, optimizer_shard=shard, full_shape=full_shape)


def _folded(layout: Layout, item: LayoutItem) -> Layout:
    """Return an expanded layout with the axes of the tensor."""
    counts = zip(item.expanded_slice, layout.slice_counts, strict=True)
    expanded = Layout(
        layout.device_matrix, layout.tensor_map, full_shape=tuple(size * n for size, n in counts)
    )
    ways = fold_layout(expanded, len(item.slice_shape), lambda it: it.full_shape == item.full_shape)
    if len(ways) != 1:
        raise ValueError(f"{len(ways)} ways to join the axes of {[*item.tensor_map]}, expected one")
    return ways[0]
