"""Optimizer state: whose layout it has, where the strategy is silent about it or wrong.

A state has the full shape of its parameter, and slices never lie: where they have the shape of
the parameter's slices they are cut like them, whatever the strategy says.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from ckpttool.model.catalog import Catalog, TensorMeta
from ckpttool.model.layout import Layout
from ckpttool.model.strategy import Strategy, parameter_of


def followed_parameter(
    catalog: Catalog, strategy: Strategy, name: str, ranks: Sequence[int]
) -> str | None:
    """The parameter whose layouts an unlisted ``name`` has, since it is state of it.

    That is so if every slice, on each of ``ranks``, has the shape of the parameter's slices in the
    same stage.  Which rank holds the parameter does not matter: without redundancy it may be
    another.
    """
    base = parameter_of(name)
    if not base or base not in strategy.layouts or name in strategy.layouts:
        return None
    shapes: dict[int, tuple[int, ...]] = {}
    for layout in strategy.layouts[base]:
        shapes |= _slice_shapes(catalog, base, layout)
    if all(shapes.get(rank) == catalog.files[rank].tensors[name].meta.shape for rank in ranks):
        return base
    return None


def borrow_rows(layouts: tuple[Layout, ...], twins: tuple[Layout, ...]) -> tuple[Layout, ...]:
    """The layouts of a state, with the manual split of its parameter's layouts ``twins``.

    MindSpore writes the split with the parameter's entry alone.
    """
    rows = {(twin.ranks, twin.device_matrix, twin.tensor_map): twin.rows for twin in twins}
    return tuple(
        layout
        if layout.rows or layout.fields > 1
        else replace(
            layout, rows=rows.get((layout.ranks, layout.device_matrix, layout.tensor_map), ())
        )
        for layout in layouts
    )


def true_layouts(catalog: Catalog, strategy: Strategy, name: str) -> tuple[Layout, ...]:
    """The layouts of a listed parameter, corrected by what its slices and its parameter tell.

    If the strategy gives the full shape and the slices are too small for it by a number of
    replicas, they are cut by an optimizer shard that the strategy hides.

    A state of a manually split embedding has its parameter's split if its slices do.  And it has
    no optimizer shard if its slices do not: MindSpore copies the parameter's entry to its
    ``accu_grads``, but cuts these only under ``gradient_accumulation_shard``.  A state has its
    parameter's full shape, so the slices tell.
    """
    layouts = strategy.layouts[name]
    shaped = tuple(_shard_by_full_shape(catalog, name, layout) for layout in layouts)
    if shaped != layouts:
        return shaped
    twins = strategy.layouts.get(parameter_of(name) or name, ())
    if twins is layouts:
        return layouts
    split = borrow_rows(layouts, twins)
    for tried in (split, _without_shard(split)):
        if any(layout.rows for layout in split) and _have_rows(catalog, name, tried):
            return tried
    if all(layout.optimizer_shard == 1 for layout in layouts):
        return layouts
    shapes = (_full_shape(catalog, parameter_of(name) or name, twin) for twin in twins)
    truth = next((shape for shape in shapes if shape is not None), None)
    bare = _without_shard(layouts)
    return tuple(
        two if _full_shape(catalog, name, one) != truth == _full_shape(catalog, name, two) else one
        for one, two in zip(layouts, bare, strict=True)
    )


def _shard_by_full_shape(catalog: Catalog, name: str, layout: Layout) -> Layout:
    """The layout with the optimizer shard that makes its slices fill the full shape, if one does.

    The strategy says 0 and the slices are cut with ``optimizer_weight_shard_aggregated_save``.
    """
    full, implied = layout.full_shape, _full_shape(catalog, name, layout)
    if not full or not implied or not implied[0] or layout.rows or layout.optimizer_shard > 1:
        return layout
    shard, rest = divmod(full[0], implied[0])
    if rest or shard < 2 or full[1:] != implied[1:] or layout.replicas % shard:
        return layout
    return replace(layout, optimizer_shard=shard)


def odd_shape(catalog: Catalog, strategy: Strategy, meta: TensorMeta) -> str | None:
    """Why an unlisted state is not taken as it is: it is no slice of its parameter, nor whole."""
    base = parameter_of(meta.name)
    if not base or base not in strategy.layouts or math.prod(meta.shape) == 1:
        return None
    for layout in strategy.layouts[base]:
        full = _full_shape(catalog, base, layout)
        if full is not None and len(full) == len(meta.shape) and full != meta.shape:
            return (
                f"{meta.name}: not in the strategy, and its shape {meta.shape} is neither that of "
                f"a slice of {base} {_slice_shape(catalog, base, layout)} nor of all of it {full}; "
                "take it as it is with --unlisted first, or leave it out with --unlisted drop"
            )
    return None


def _without_shard(layouts: tuple[Layout, ...]) -> tuple[Layout, ...]:
    return tuple(replace(layout, optimizer_shard=1) for layout in layouts)


def _have_rows(catalog: Catalog, name: str, layouts: tuple[Layout, ...]) -> bool:
    """Whether all slices of ``name`` have the shapes of a manual split."""
    for layout in layouts:
        expected = _slice_shapes(catalog, name, layout)
        for rank, file in catalog.files.items():
            if rank in layout.ranks and name in file.tensors:
                shape = file.tensors[name].meta.shape
                if shape != expected.get(rank):
                    return False
    return True


def _slice_shapes(catalog: Catalog, name: str, layout: Layout) -> dict[int, tuple[int, ...]]:
    """The shape of each rank's slice in the stage of ``layout``, as the lowest rank's implies."""
    shape = _slice_shape(catalog, name, layout)
    if shape is None:
        return {}
    if not layout.rows:
        return dict.fromkeys(layout.ranks, shape)
    full = _full_shape(catalog, name, layout)
    if full is None or layout.why_not(full) is not None:
        return {}
    return {rank: layout.slice_shape(rank, full) for rank in layout.ranks}


def _slice_shape(catalog: Catalog, name: str, layout: Layout) -> tuple[int, ...] | None:
    """The shape of the lowest rank's slice in the stage of ``layout``; None if no rank has one."""
    for rank in layout.ranks:
        file = catalog.files.get(rank)
        if file is not None and name in file.tensors:
            return file.tensors[name].meta.shape
    return None


def _full_shape(catalog: Catalog, name: str, layout: Layout) -> tuple[int, ...] | None:
    shape = _slice_shape(catalog, name, layout)
    if shape is None or len(shape) != len(layout.tensor_map):
        return None
    return layout.implied_shape(shape)
