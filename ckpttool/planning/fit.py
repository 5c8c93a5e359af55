"""Fit a strategy to names and shapes: what only they decide, and what does not fit them.

A strategy file holds no shapes.  ``param_split_shape`` may be the rows of a manual split, or the
shape of the parameter; the slices of a source decide, and the full tensor in a target.  The rules
of a hand-written strategy become layouts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from ckpttool.model.catalog import Catalog
from ckpttool.model.diagnostics import Diagnostic
from ckpttool.model.layout import Layout
from ckpttool.model.strategy import Strategy
from ckpttool.model.tensors import TensorMeta
from ckpttool.model.wording import shorten


def fit_to_slices(catalog: Catalog, strategy: Strategy) -> tuple[Strategy, list[Diagnostic]]:
    """Return the strategy of a checkpoint with all that its slices decide, and the problems."""

    def shapes(name: str, layout: Layout) -> set[tuple[int, ...]]:
        metas = catalog.metas_of(name) if name in catalog.holders else {}
        return {meta.shape for rank, meta in metas.items() if rank in layout.ranks}

    strategy, unfit = strategy.settle_splits(
        lambda name, layout: layout.settled_by_slices(shapes(name, layout))
    )
    problems = [_split_problem(name, one, shapes(name, one)) for name, one in unfit.items()]
    strategy, reasons = strategy.resolve(catalog.metas)
    return strategy, [*problems, *reasons]


def fit_to_full_tensors(
    strategy: Strategy,
    full: Mapping[str, TensorMeta],
    names: Mapping[str, TensorMeta],
    is_rest_decided: bool,
) -> tuple[Strategy, list[Diagnostic]]:
    """Return the strategy of a target with all that its full tensors decide, and the problems.

    Parameters
    ----------
    strategy
        The strategy of the target.
    full
        The full tensors by name.
    names
        The same, and the tensors without a full shape.
    is_rest_decided
        Whether an option decides how names without a rule are written.
    """

    def settle(name: str, layout: Layout) -> Layout | None:
        if name not in full:
            return replace(layout, split_shape=())
        return layout.settled_by_full_shape(full[name].shape)

    strategy, unfit = strategy.settle_splits(settle)
    problems = [_split_problem(name, one, [full[name].shape]) for name, one in unfit.items()]
    strategy, reasons = strategy.resolve(names, is_rest_decided)
    return strategy, [*problems, *reasons]


def _split_problem(name: str, layout: Layout, shapes: Iterable[tuple[int, ...]]) -> Diagnostic:
    """Return the problem of a ``param_split_shape`` that is neither rows nor a shape."""
    facts = f"it is {list(layout.split_shape)}, and the shape {shorten(map(str, shapes), 3)}; "
    facts += f"axis 0 has {layout.slice_counts[0] if layout.tensor_map else 1} slices"
    text = "param_split_shape is neither its shape nor the rows of its slices"
    hint = "the strategy of this run; `ckpttool help shape` explains"
    return Diagnostic("shape", text, hint, facts=facts, tensor=name)
