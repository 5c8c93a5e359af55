"""Fit a strategy to names and shapes: what only they decide, and what does not fit them.

A network inside another cell has a prefix before all of its names (``network.``).  So the names in
files and strategy may differ by a prefix.  The strategy is read with the names of the files.

A strategy file holds no shapes.  ``param_split_shape`` may be the rows of a manual split, or the
shape of the parameter; the slices of a source decide, and the full tensor in a target.  The rules
of a hand-written strategy become layouts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping

from msgspec.structs import replace

from ckpttool.model.belonging import find_belongings
from ckpttool.model.catalog import Catalog
from ckpttool.model.choices import TensorOptions
from ckpttool.model.layout import Layout
from ckpttool.model.names import STATE_PREFIXES, match_states, parse_name
from ckpttool.model.strategy import Rules, Strategy
from ckpttool.model.tensors import TensorMeta
from ckpttool.problems import Diagnostic
from ckpttool.wording import shorten


def fit_to_slices(
    catalog: Catalog, strategy: Strategy, tensors: TensorOptions = TensorOptions()
) -> tuple[Strategy, list[Diagnostic]]:
    """Return the strategy of a checkpoint with all that its slices decide, and the problems.

    A pattern need not be there for names that ``tensors`` leaves out.
    """
    strategy = align_names(strategy, catalog.metas, "the files")
    strategy = strategy.for_ranks([*catalog.files, *catalog.damaged])
    strategy = _with_all_axes(strategy, catalog.metas)

    def shapes(name: str, layout: Layout) -> set[tuple[int, ...]]:
        metas = catalog.metas_of(name) if name in catalog.holders else {}
        return {meta.shape for rank, meta in metas.items() if rank in layout.ranks}

    strategy, unfit = strategy.decide_split_shapes(
        lambda name, layout: layout.decided_by_slices(shapes(name, layout))
    )
    problems = list(_patterns_without_prefix(strategy.rules, catalog.metas))
    problems += [
        _split_problem(name, layout, shapes(name, layout)) for name, layout in unfit.items()
    ]
    resolved, reasons = strategy.resolve(catalog.metas)
    if reasons and not tensors.are_all_wanted:
        belongings = find_belongings(resolved.layouts, catalog.metas)
        wanted = tensors.choose(catalog.metas, belongings)
        named = {name: meta for name, meta in catalog.metas.items() if name in wanted}
        _, reasons = strategy.resolve(named)
    return resolved, [*problems, *reasons]


def fit_to_full_tensors(
    strategy: Strategy,
    full: Mapping[str, TensorMeta],
    names: Mapping[str, TensorMeta],
    is_rest_decided: bool,
    src: str,
    judged: Collection[str],
) -> tuple[Strategy, list[Diagnostic]]:
    """Return the strategy of a target with all that its full tensors decide, and the problems.

    ``names`` has the tensors without a full shape too.  ``is_rest_decided`` says whether an option
    decides how names without a rule are written.  Only names that are ``judged`` have to fit.
    """

    def settle(name: str, layout: Layout) -> Layout | None:
        if name not in full:
            return replace(layout, split_shape=())
        return layout.decided_by_full_shape(full[name].shape)

    strategy = align_names(strategy, full, src)
    strategy = _with_all_axes(strategy, full)
    strategy, unfit = strategy.decide_split_shapes(settle)
    problems = [
        _split_problem(name, layout, [full[name].shape])
        for name, layout in unfit.items()
        if name in judged
    ]
    _, reasons = strategy.resolve({name: names[name] for name in judged}, is_rest_decided)
    strategy, _ = strategy.resolve(names, is_rest_decided)
    return strategy, [*problems, *reasons]


def align_names(strategy: Strategy, metas: Mapping[str, TensorMeta], holder: str) -> Strategy:
    """Return the strategy with the names of the tensors, if all differ by one prefix; with a note.

    The strategy stays as it is if any parameter's name already matches, or if several prefixes are
    possible.  It also does if the prefix explains only a minority of the names.
    """
    parameter_of_state = strategy.listed_states
    parameters = {name for name in strategy.layouts if name not in parameter_of_state}
    if parameters & metas.keys():
        return strategy
    weights = _weights(metas)
    added, removed = _find_prefix(weights, parameters), _find_prefix(parameters, weights)
    if not (added or removed) or (added and removed):
        return strategy

    def rename(name: str) -> str:
        parameter = parameter_of_state.get(name, name)
        return f"{name.removesuffix(parameter)}{added}{parameter.removeprefix(removed)}"

    example = min(parameters)
    message = f"names in the strategy {'lack' if added else 'begin with'} {added or removed}"
    facts = f"{example} in {strategy.origin} is {rename(example)} in {holder}"
    note = Diagnostic("corrected", f"{message}; read as those of {holder}", facts=facts)
    return replace(
        strategy,
        layouts={rename(name): layouts for name, layouts in strategy.layouts.items()},
        notes=(note, *strategy.notes),
    )


def _with_all_axes(strategy: Strategy, metas: Mapping[str, TensorMeta]) -> Strategy:
    """Return the strategy of a group with the axes that it omits, which are not sharded.

    If states have as many rows as a slice of their parameter would have, they alone are sharded
    (ZeRO 1 and 2).  Then the parameter is whole on all ranks.
    """
    if not strategy.is_of_group:
        return strategy
    layouts = dict(strategy.layouts)
    for state, parameter in match_states(layouts, metas).items():
        if state in layouts or parameter not in strategy.layouts or parameter not in metas:
            continue
        (layout,) = strategy.layouts[parameter]
        shard = math.prod(layout.slice_counts)
        sliced = metas[state].shape
        if shard > 1 and sliced[:1] and metas[parameter].shape == (sliced[0] * shard, *sliced[1:]):
            layouts[parameter] = (replace(layout, tensor_map=()),)
            layouts[state] = (replace(layout, tensor_map=((),), optimizer_shard=shard),)
    for name in layouts.keys() & metas.keys():
        ndim = len(metas[name].shape)
        layouts[name] = tuple(
            replace(
                layout, tensor_map=(*layout.tensor_map, *((),) * (ndim - len(layout.tensor_map)))
            )
            for layout in layouts[name]
        )
    return replace(strategy, layouts=layouts, is_of_group=False)


def _weights(metas: Mapping[str, TensorMeta]) -> set[str]:
    states = match_states((), metas)
    return {name for name, meta in metas.items() if not meta.is_single and name not in states}


def _patterns_without_prefix(
    rules: Rules | None, metas: Mapping[str, TensorMeta]
) -> Iterator[Diagnostic]:
    """Yield the problem of patterns that match no name, but all names without their prefix."""
    if rules is None or not rules.rules or any(map(rules.find, metas)):
        return
    weights = _weights(metas)
    for prefix, _ in parse_name(min(weights, default="")).splits():
        inside = [name.removeprefix(prefix) for name in weights if name.startswith(prefix)]
        if len(inside) == len(weights) and any(map(rules.find, inside)):
            message = f"the names in the files begin with {prefix}, which the patterns lack"
            hint = f'"{prefix}{rules.rules[0].pattern}" and so on'
            facts = f"such as {min(weights)}"
            yield Diagnostic("strategy", message, hint=hint, facts=facts, where=rules.path)
            return


def _find_prefix(longer: Collection[str], shorter: Collection[str]) -> str:
    """Return the prefix before names of ``shorter`` in ``longer``; "" if none is the only one.

    The prefix of a state does not count: ``adam_m.w`` is not ``w`` inside another cell.

    Examples
    --------
    >>> _find_prefix({"net.a.w", "net.b.a.w", "net.c"}, {"a.w", "b.a.w", "c"})
    'net.'
    >>> _find_prefix({"encoder.0.w", "decoder.0.w"}, {"0.w"})
    ''
    """
    splits = (split for name in longer for split in parse_name(name).splits())
    prefixes = Counter(s for s, rest in splits if rest in shorter and s not in STATE_PREFIXES)
    prefix = max(sorted(prefixes), key=prefixes.__getitem__, default="")
    explained = {name for name in longer if prefix and name.removeprefix(prefix) in shorter}
    rest_of_names = (name for name in longer if name not in explained)
    if any(rest in shorter for name in rest_of_names for _, rest in parse_name(name).splits()):
        return ""
    return prefix if 2 * len(explained) > min(len(longer), len(shorter)) else ""


def _split_problem(name: str, layout: Layout, shapes: Iterable[tuple[int, ...]]) -> Diagnostic:
    facts = f"it is {list(layout.split_shape)}, and the shape {shorten(map(str, shapes), 3)}; "
    facts += f"axis 0 has {layout.slice_counts[0] if layout.tensor_map else 1} slices"
    message = "param_split_shape is neither its shape nor the rows of its slices"
    hint = "the strategy of this run; `ckpttool help shape` explains"
    return Diagnostic("shape", message, hint=hint, facts=facts, tensor=name)
