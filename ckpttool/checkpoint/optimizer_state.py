"""Layouts of optimizer state that the strategy omits or lists wrongly.

A state is called ``<prefix>.<parameter>`` and has the full shape of its parameter.  Names and
shapes identify it, whatever the prefix is.  An unlisted name is a state if its slices have the
shape of the parameter's slices on every rank.  Slices are stronger evidence than the strategy.
State with slices of that shape is sharded like its parameter.

Accumulated gradients (``accu_grads.*``) differ.  MindSpore copies the strategy entry of the
parameter, with its optimizer shard.  It shards the gradients by it only under
``gradient_accumulation_shard``.  The strategy of the source may list a shard that its slices do not
have.  Then the target does not use it either; otherwise the strategy of the target decides.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

from msgspec import Struct
from msgspec.structs import replace

from ckpttool.model.catalog import Catalog
from ckpttool.model.layout import Layout, divisors, fold_layout, without_axis
from ckpttool.model.names import ParameterOfState, drop_unlike_shapes, parse_name
from ckpttool.model.slicing import FullTensor
from ckpttool.model.strategy import Strategy
from ckpttool.model.tensors import TensorMeta
from ckpttool.problems import Diagnostic
from ckpttool.wording import count, shorten


def has_expected_full_shape(
    name: str, parameter_of_state: ParameterOfState, metas: Mapping[str, TensorMeta]
) -> bool:
    """Return whether a state has the full shape that follows from its parameter."""
    parameter = parameter_of_state.get(name, "")
    return parameter in metas and metas[name].shape == _state_shape(name, metas[parameter].shape)


def state_layouts(
    strategy: Strategy, name: str, parameter_of_state: ParameterOfState
) -> tuple[Layout, ...]:
    """Return the layouts of a state of a listed parameter; none for any other tensor.

    A state has its parameter's layouts.  Statistics of rows and columns have one axis less.
    """
    parameter, axis = parameter_of_state.get(name), parse_name(name).reduced_axis
    layouts = () if parameter is None else strategy.layouts.get(parameter, ())
    if axis is None:
        return layouts
    reduced = [without_axis(layout, axis) for layout in layouts]
    return () if None in reduced else tuple(layout for layout in reduced if layout is not None)


def followed_layouts(
    catalog: Catalog,
    strategy: Strategy,
    name: str,
    ranks: Sequence[int],
    parameter_of_state: ParameterOfState,
) -> tuple[Layout, ...]:
    """Return the layouts of an unlisted state; none for any other tensor.

    A state has slices of the expected shape on all of ``ranks``.  It follows from the parameter's
    slices in the same stage.  Other ranks may hold these if they were saved without redundancy.
    """
    layouts = state_layouts(strategy, name, parameter_of_state)
    if not layouts or name in strategy.layouts:
        return ()
    parameter = parameter_of_state[name]
    shapes = {
        rank: _state_shape(name, shape)
        for layout in strategy.layouts[parameter]
        for rank, shape in _slice_shapes(catalog, parameter, layout).items()
    }
    files = catalog.files
    is_state = all(shapes.get(rank) == files[rank].header[name].meta.shape for rank in ranks)
    return layouts if is_state else ()


def copy_manual_split(
    layouts: tuple[Layout, ...], parameter_layouts: tuple[Layout, ...]
) -> tuple[Layout, ...]:
    """Copy the manual split of a parameter's layouts to those of its state.

    MindSpore writes the split only in the entry of the parameter.
    """
    rows = {
        (layout.ranks, layout.device_matrix, layout.tensor_map): layout.rows
        for layout in parameter_layouts
        if layout.rows
    }
    keys = ((layout.ranks, layout.device_matrix, layout.tensor_map) for layout in layouts)
    return tuple(
        replace(layout, rows=rows.get(key, ())) if rows and layout.is_even else layout
        for layout, key in zip(layouts, keys, strict=True)
    )


def target_layouts(
    strategy: Strategy, name: str, parameter_of_state: ParameterOfState
) -> tuple[Layout, ...]:
    """Return the layouts of a listed parameter in a target.

    The layouts of a state are corrected by those of its parameter, see `correct_layouts`.
    """
    layouts, followed = strategy.layouts[name], state_layouts(strategy, name, parameter_of_state)
    is_statistic = parse_name(name).is_second_moment and name not in strategy.handwritten
    parameter = parameter_of_state.get(name, name)
    has_shard = any(layout.optimizer_shard > 1 for layout in strategy.layouts.get(parameter, ()))
    if followed and is_statistic and has_shard:
        return followed  # the entries of statistics omit the optimizer shard
    return copy_manual_split(layouts, followed)


def correct_layouts(
    catalog: Catalog, strategy: Strategy, name: str, parameter_of_state: ParameterOfState
) -> tuple[Layout, ...]:
    """Correct the layouts of a listed parameter by its slices and by its parameter.

    The strategy may give the full shape.  If the slices are too small for it by a divisor of the
    replicas, the strategy hides an optimizer shard.

    A state has its parameter's full shape, so its slices show how it is sharded.  MindSpore's
    entries of states are wrong in three ways:

    - The entries for states of a manually split embedding omit the split.
    - The entries of ``accu_grads`` have the parameter's optimizer shard.  It shards gradients only
      under ``gradient_accumulation_shard``.
    - The entries of AdaFactor's statistics omit the optimizer shard, which does shard them.

    Only the split is corrected for a state without a prefix of MindSpore's optimizers.
    Tensor maps are not corrected, see `find_mismatched_states`, and neither are hand-written
    layouts and those of a manifest.
    """
    layouts = strategy.layouts[name]
    if name in strategy.handwritten or strategy.is_as_written:
        return layouts
    with_shard = tuple(_infer_shard(catalog, name, layout) for layout in layouts)
    parameter_layouts = state_layouts(strategy, name, parameter_of_state)
    if with_shard != layouts or not parameter_layouts:
        return with_shard
    with_split = copy_manual_split(layouts, parameter_layouts)
    if any(layout.rows for layout in (*with_split, *parameter_layouts)):
        bare = tuple(replace(layout, optimizer_shard=1) for layout in with_split)
        for candidate in (with_split, bare, parameter_layouts):
            if any(layout.rows for layout in candidate) and _has_split_shapes(
                catalog, name, candidate
            ):
                return candidate
    if parse_name(name).parameter is None:
        return with_shard
    expected = _expected_shapes(catalog, strategy, name, parameter_of_state[name])
    full_shape = next((shape for _, shape in expected), None)
    of_parameter = {layout.ranks: layout for layout in parameter_layouts if not layout.rows}
    is_reduced = parse_name(name).reduced_axis is not None
    corrected = []
    for layout in layouts:
        candidates = [layout, replace(layout, optimizer_shard=1)]
        followed = of_parameter.get(layout.ranks)
        if followed is not None and (is_reduced or _are_equal_without_shard(followed, layout)):
            candidates.append(followed)
        shapes = (_full_shape(catalog, name, candidate) for candidate in candidates)
        pairs = zip(candidates, shapes, strict=False)
        fitting = (fit for fit, shape in pairs if shape is not None and shape == full_shape)
        corrected.append(next(fitting, layout))
    return tuple(corrected)


def _infer_shard(catalog: Catalog, name: str, layout: Layout) -> Layout:
    """Return the layout with the optimizer shard that makes its slices fill the full shape.

    Return it unchanged if no shard does.  The shard in the strategy is 0, although the slices have
    one, with ``optimizer_weight_shard_aggregated_save``.
    """
    full_shape, slice_shape = layout.full_shape, None
    if full_shape:
        slice_shape = _slice_shape(catalog, name, layout)
    if not full_shape or slice_shape is None:
        return layout
    if len(slice_shape) < len(full_shape):
        return _infer_expanded_shard(layout, slice_shape)
    implied = _full_shape(catalog, name, layout)
    if not implied or not implied[0] or layout.rows or layout.optimizer_shard > 1:
        return layout
    shard, remainder = divmod(full_shape[0], implied[0])
    if remainder or shard < 2 or full_shape[1:] != implied[1:] or layout.replicas % shard:
        return layout
    return replace(layout, optimizer_shard=shard)


def _infer_expanded_shard(layout: Layout, slice_shape: tuple[int, ...]) -> Layout:
    """Return an expanded layout with its optimizer shard; unchanged unless exactly one fits."""
    if layout.optimizer_shard > 1 or not layout.is_even:
        return layout
    axes, ways = len(slice_shape), divisors(layout.replicas)
    candidates = (replace(layout, optimizer_shard=shard) for shard in ways)
    fitting = [c for c in candidates if fold_layout(c, axes, lambda way: way.fills(slice_shape))]
    return fitting[0] if len(fitting) == 1 else layout


def odd_state_shapes(
    catalog: Catalog, strategy: Strategy, meta: TensorMeta, parameter_of_state: ParameterOfState
) -> str | None:
    """Return the shapes of an unlisted state with neither the slice nor the full shape.

    Return None if nothing is wrong, or if its name lacks a prefix of MindSpore's optimizers.  Such
    a tensor with a different shape is not a state.
    """
    if math.prod(meta.shape) == 1 or parse_name(meta.name).parameter is None:
        return None
    if not state_layouts(strategy, meta.name, parameter_of_state):
        return None
    parameter = parameter_of_state[meta.name]
    for slice_shape, full_shape in _expected_shapes(catalog, strategy, meta.name, parameter):
        if len(full_shape) == len(meta.shape) and full_shape != meta.shape:
            return f"{meta.name} {meta.shape}, {parameter} {full_shape} in slices {slice_shape}"
    return None


def find_mismatched_states(catalog: Catalog, strategy: Strategy) -> Iterator[Diagnostic]:
    """Yield the differences between the layouts of parameters and of their optimizer states.

    A state has the full shape of its parameter, so one of the two layouts is wrong.  Some
    differences are expected, see `correct_layouts`: the manual split, and the optimizer shard of
    gradients and of AdaFactor's statistics.

    It is an error if the slices have equal shapes, so that the full shapes differ.  Otherwise it is
    a warning, since headers do not show which rank holds which slice.  States without a prefix of
    MindSpore's optimizers only get a warning, since their names may be a coincidence.  The layouts
    of a manifest are right.
    """
    contradictions, suspicious = [], []
    metas = catalog.metas
    judged = () if strategy.is_as_written else strategy.layouts
    names = dict.fromkeys(name for name in judged if name in metas)
    for name, parameter in drop_unlike_shapes(catalog.match_states(names), metas).items():
        if name not in names or parameter not in names or parse_name(name).reduced_axis is not None:
            continue
        by_stage = {layout.ranks: layout for layout in strategy.layouts[parameter]}
        for state_layout in strategy.layouts[name]:
            layout = by_stage.get(state_layout.ranks, state_layout)
            if layout == state_layout:
                continue
            shapes = _mismatched_full_shapes(catalog, parameter, layout, name, state_layout)
            if shapes is None:
                continue
            if shapes[0] != shapes[1] and parse_name(name).parameter is not None:
                contradictions.append(f"{parameter} {shapes[0]} and {name} {shapes[1]}")
            else:
                suspicious.append(f"{parameter} and {name}")
            break
    if contradictions:
        message = "the strategy gives parameters and their optimizer state different full shapes"
        yield contradiction(strategy, message, shorten(contradictions, 3))
    if suspicious:
        message = "the strategy shards parameters and their optimizer state differently"
        hint = "the strategy of this run; `ckpttool help unlike_states` explains"
        yield Diagnostic("unlike_states", message, hint=hint, facts=shorten(suspicious, 3))


FIND_FITTING = "`ckpttool strategy check SRC STRATEGY...` says which fits"
OF_THE_RUN = f"the strategy of the run ({FIND_FITTING})"


def contradiction(
    strategy: Strategy, message: str, facts: str = "", ranks: Sequence[int] = ()
) -> Diagnostic:
    """Return the problem that the strategy contradicts the files."""
    hint = f"{OF_THE_RUN}; `ckpttool help contradicted` explains"
    where = shorten(strategy.files, 2)
    return Diagnostic(
        "contradicted", message, hint=hint, facts=facts, ranks=tuple(ranks), where=where
    )


def _mismatched_full_shapes(
    catalog: Catalog, parameter: str, layout: Layout, name: str, state_layout: Layout
) -> tuple[tuple[int, ...], ...] | None:
    """Return the full shapes of a parameter and its state if their layouts differ; None if not.

    Slices of different shapes do not show the full shapes.  Then both shapes returned are equal.
    """
    slice_shape = _slice_shape(catalog, parameter, layout)
    state_slice_shape = _slice_shape(catalog, name, state_layout)
    folded = _fold_for_slice(layout, slice_shape)
    folded_state = _fold_for_slice(state_layout, state_slice_shape)
    if slice_shape is None or folded is None or folded_state is None or not layout.has_boxes:
        return None  # `checks.layouts.check_fit` reports what is wrong
    shards = (layout.optimizer_shard, state_layout.optimizer_shard)
    are_equal = _are_equal_without_shard(folded, folded_state)
    is_expected = parse_name(name).is_gradient or parse_name(name).is_second_moment
    if are_equal and (slice_shape != state_slice_shape or shards[0] == shards[1] or is_expected):
        return None
    if slice_shape != state_slice_shape:
        return slice_shape, slice_shape
    return tuple(
        replace(layout, optimizer_shard=shard if are_equal else 1, rows=()).implied_shape(
            slice_shape
        )
        for layout, shard in zip((folded, folded_state), shards, strict=True)
    )


@lru_cache(maxsize=4096)  # a thousand parameters have few layouts
def _are_equal_without_shard(a: Layout, b: Layout) -> bool:
    return replace(a, optimizer_shard=1, rows=()).has_same_slices(
        replace(b, optimizer_shard=1, rows=())
    )


def _fold_for_slice(layout: Layout, slice_shape: tuple[int, ...] | None) -> Layout | None:
    if slice_shape is None:
        return None
    if len(slice_shape) < len(layout.tensor_map):
        ways = fold_layout(layout, len(slice_shape), lambda way: way.fills(slice_shape))
        return ways[0] if len(ways) == 1 else None
    return layout if len(slice_shape) == len(layout.tensor_map) else None


def shape_difference(meta: TensorMeta, shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    """Return the full shape of a state and the expected one, for messages; None if they are equal.

    Only names with a prefix of MindSpore's optimizers count.  Any other tensor with a different
    shape is not a state.
    """
    parameter = parse_name(meta.name).parameter
    if parameter is None or parameter not in shapes or math.prod(meta.shape) == 1:
        return None
    expected = _state_shape(meta.name, shapes[parameter])
    return None if meta.shape == expected else f"{meta.name} {meta.shape}, expected {expected}"


def _state_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    axis = parse_name(name).reduced_axis
    if axis is None or len(shape) < 2:
        return shape
    reduced = range(len(shape))[axis]
    return tuple(size for i, size in enumerate(shape) if i != reduced)


def _expected_shapes(
    catalog: Catalog, strategy: Strategy, name: str, parameter: str
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    for layout in strategy.layouts[parameter]:
        slice_shape = _slice_shape(catalog, parameter, layout)
        full_shape = _full_shape(catalog, parameter, layout)
        if slice_shape is not None and full_shape is not None:
            yield _state_shape(name, slice_shape), _state_shape(name, full_shape)


def _has_split_shapes(catalog: Catalog, name: str, layouts: tuple[Layout, ...]) -> bool:
    return all(
        file.header[name].meta.shape == shapes.get(rank)
        for layout in layouts
        for shapes in (_slice_shapes(catalog, name, layout),)
        for rank, file in catalog.files.items()
        if rank in layout.ranks and name in file.header
    )


def _slice_shapes(catalog: Catalog, name: str, layout: Layout) -> dict[int, tuple[int, ...]]:
    """Return the slice shapes of a stage by rank, as the slice of its lowest rank implies them."""
    shape = _slice_shape(catalog, name, layout)
    if shape is None:
        return {}
    if layout.has_equal_slices:
        return dict.fromkeys(layout.ranks, shape)
    full_shape = _full_shape(catalog, name, layout)
    if full_shape is None or layout.why_not(full_shape) is not None:
        return {}
    return {rank: layout.slice_shape(rank, full_shape) for rank in layout.ranks}


def _slice_shape(catalog: Catalog, name: str, layout: Layout) -> tuple[int, ...] | None:
    for rank in layout.ranks:
        file = catalog.files.get(rank)
        if file is not None and name in file.header:
            return file.header[name].meta.shape
    return None


def _full_shape(catalog: Catalog, name: str, layout: Layout) -> tuple[int, ...] | None:
    shape = _slice_shape(catalog, name, layout)
    if shape is None or len(shape) != len(layout.tensor_map):
        return None
    return layout.implied_shape(shape)


class GradientShards(Struct):
    """Gradients whose target strategy lists an optimizer shard, and whether it was used."""

    unsharded: list[str] = []
    sharded: list[str] = []

    def drop_unproven_shard(
        self, source: FullTensor, strategy: Strategy, layouts: tuple[Layout, ...]
    ) -> tuple[Layout, ...]:
        """Return the target layouts without an optimizer shard that the source does not have.

        ``strategy`` is that of the source.
        """
        name = source.meta.name
        is_claimed = any(layout.optimizer_shard > 1 for layout in layouts)
        if not parse_name(name).is_gradient or not is_claimed:
            return layouts
        of_name = strategy.layouts.get(name, ())
        of_stage = [layout for layout in of_name if layout.first_rank == source.layout.first_rank]
        if not any(layout.optimizer_shard > 1 for layout in of_stage):
            self.sharded.append(name)
            return layouts
        if source.layout.optimizer_shard > 1:
            return layouts
        self.unsharded.append(name)
        return tuple(replace(layout, optimizer_shard=1) for layout in layouts)

    def notes(self) -> Iterator[Diagnostic]:
        """Yield the notes on gradients with and without their shards."""
        if self.unsharded:
            gradients = count(len(self.unsharded), "gradient")
            message = f"{gradients} without the optimizer shard of the target strategy, as in SRC"
            yield Diagnostic("corrected", message, facts=shorten(self.unsharded, 3))
        if self.sharded:
            gradients = count(len(self.sharded), "gradient")
            message = f"{gradients} with the optimizer shard of the target strategy"
            facts = "MindSpore shards them only under gradient_accumulation_shard: "
            facts += shorten(self.sharded, 3)
            yield Diagnostic("doubt", message, facts=facts)
