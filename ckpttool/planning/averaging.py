"""Plan a weighted mean: the transfers of several plans become the terms of one."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

from msgspec.structs import replace

from ckpttool.checkpoint.checkpoint import Checkpoint
from ckpttool.checks.missing import find_shared_problems
from ckpttool.formats.base import PROVENANCE
from ckpttool.model.belonging import WEIGHT
from ckpttool.model.catalog import Catalog
from ckpttool.model.dtypes import CASTABLE, INEXACT
from ckpttool.model.plan import Plan, Term, Transfer
from ckpttool.model.strategy import Strategy
from ckpttool.problems import Diagnostic, Diagnostics, PlanError
from ckpttool.wording import count, format_shape, shorten

TOLERANCE = 1e-9  # by which the sum of weights may differ from 1
_CHOOSE = "--include and --exclude with patterns of what all inputs have"


class AverageInput(NamedTuple):
    """A checkpoint to average, its layouts as for `ckpttool.plan_merge`, and its weight."""

    catalog: Catalog
    strategy: Strategy | None
    weight: float


Planned: TypeAlias = tuple[Checkpoint | None, Plan | None]


def find_weights(
    given: Sequence[float | None], names: Sequence[str], *, normalize: bool
) -> tuple[float, ...]:
    """Return the weights of inputs: equal ones if none is given, with a sum of 1.

    Parameters
    ----------
    given
        The weight of each input, None without one.
    names
        The inputs, for messages.
    normalize
        Whether to divide weights by their sum.

    Raises
    ------
    PlanError
        There are fewer than two inputs, only some have a weight, a weight is not a positive number,
        or the sum is not 1.

    Examples
    --------
    >>> find_weights([None, None], ["a", "b"], normalize=False)
    (0.5, 0.5)
    >>> find_weights([1.0, 3.0], ["a", "b"], normalize=True)
    (0.25, 0.75)
    """

    def problems() -> Iterator[Diagnostic]:
        if len(given) < 2:
            text = f"an average needs two inputs or more, and {len(given)} was given"
            yield Diagnostic("options", text, hint="A:0.25 B:0.75")
        without = [name for name, one in zip(names, given, strict=True) if one is None]
        if 0 < len(without) < len(given):
            text = f"only some inputs have a weight, {shorten(without, 3)} has none"
            yield Diagnostic("options", text, hint="a weight for each input, or for none")
        for name, one in zip(names, given, strict=True):
            if one is not None and not (math.isfinite(one) and one > 0):
                text, hint = f"the weight {one:g} is not positive", "a number greater than 0"
                yield Diagnostic("options", text, hint=hint, where=name)
        known = [one for one in given if one is not None and math.isfinite(one)]
        total = sum(known)  # Inf if it overflows, where math.fsum raises an error
        if len(known) == len(given) and math.isinf(total):
            text = "the sum of the weights is too large for Float64"
            yield Diagnostic("options", text, hint="other weights")
        elif len(known) == len(given) and not normalize and abs(total - 1) > TOLERANCE:
            text = f"the sum of the weights is {math.fsum(known):.12g}, expected 1"
            yield Diagnostic("options", text, hint="--normalize, or other weights")

    if found := [*problems()]:
        raise PlanError(found)
    known = [1.0 / len(given) if one is None else one for one in given]
    total = math.fsum(known) if normalize else 1.0
    return tuple(one / total for one in known)


def average(
    planned: Sequence[Planned], weights: Sequence[float], diagnostics: Diagnostics
) -> Plan | None:
    """Return the plan of a weighted mean.

    Parameters
    ----------
    planned
        Each input, and its plan for the same target; None for what is incomplete.
    weights
        Their weights.
    diagnostics
        Collects what differs between the inputs, and tensors that have no mean.

    Returns
    -------
    Plan or None
        The plan of the last input, with means of its weights; None if something is wrong.
    """
    checkpoints = [checkpoint for checkpoint, _ in planned if checkpoint is not None]
    if len(checkpoints) < len(planned):
        return None
    last = checkpoints[-1]
    wrong = [*find_shared_problems(checkpoints), *_differences(checkpoints), *_without_mean(last)]
    diagnostics.add(*wrong)
    plans = [plan for _, plan in planned if plan is not None]
    if wrong or len(plans) < len(planned):
        return None
    of_inputs = [{(one.name, one.source.only_for): one for one in plan.transfers} for plan in plans]
    roles = [
        {one.renamed.get(name, name): what for name, what in one.belongings.items()}
        for one in checkpoints
    ]
    transfers, counters = [], list[str]()
    for key, transfer in of_inputs[-1].items():
        whats = [one.get(transfer.name, WEIGHT) for one in roles]
        if any(what.role == "counter" for what in whats):
            counters.append(transfer.name)
        is_trained = all(what.is_trained for what in whats)
        if not (is_trained and transfer.source.meta.dtype in CASTABLE):
            term = replace(transfer.terms[0], input=len(plans) - 1)
            transfers.append(replace(transfer, terms=(term,)))
        elif all(key in one for one in of_inputs):
            transfers.append(_mean(transfer, [one[key] for one in of_inputs], weights))
        else:
            text = "it differs between the ranks of some inputs only"
            hint = "--unlisted first or drop"
            diagnostics.add(Diagnostic("unlike_inputs", text, hint=hint, tensor=transfer.name))
    if diagnostics.has_errors:
        return None
    if counters:
        text = f"counters, as in the last input: {shorten(counters, 3)}"
        diagnostics.add(Diagnostic("counter", text))
    return replace(
        plans[-1],
        inputs=tuple(one.catalog for one in checkpoints),
        weights=tuple(weights),
        transfers=tuple(transfers),
        confirmed=frozenset.intersection(*(plan.confirmed for plan in plans)),
        strategies=tuple(dict.fromkeys(name for plan in plans for name in plan.strategies)),
        listed={path: one for plan in plans for path, one in plan.listed.items()},
        provenance=_provenance(plans, weights),
    )


def _mean(last: Transfer, others: Sequence[Transfer], weights: Sequence[float]) -> Transfer:
    terms = (
        Term(one.source, weight, number)
        for number, (one, weight) in enumerate(zip(others, weights, strict=True))
    )
    return replace(last, terms=tuple(terms))


def _without_mean(last: Checkpoint) -> Iterator[Diagnostic]:
    for one in last.tensors:
        meta, what = one.meta, last.belonging(one.name)
        if what.is_trained and meta.dtype in INEXACT and meta.dtype not in CASTABLE:
            text, hint = f"{meta.dtype} cannot be averaged", "--exclude with these tensors"
            yield Diagnostic("unlike_inputs", text, hint=hint, tensor=meta.name)


def label(catalog: Catalog) -> str:
    """Return the name of an input, with its step if it has one."""
    return f"{catalog.root} at step {catalog.step}" if catalog.step else catalog.root


def _differences(checkpoints: Sequence[Checkpoint]) -> Iterator[Diagnostic]:
    """Yield how names, element types and full shapes differ from those of the last input."""
    labels = [label(one.catalog) for one in checkpoints]
    names = [{one.renamed.get(name, name) for name in one.metas} for one in checkpoints]
    full = [
        {one.renamed.get(it.name, it.name): it.meta for it in one.tensors} for one in checkpoints
    ]
    of_weights = "" if checkpoints[-1].options.tensors.weights_only else "--weights-only, or "
    for number in range(len(checkpoints) - 1):
        sides = ((number, -1), (-1, number))
        hint = f"{of_weights}{_CHOOSE}"
        if len(names[number] - names[-1]) == len(names[-1] - names[number]):
            hint += "; `ckpttool help unlike_inputs` explains"  # perhaps only names differ
        for having, lacking in sides:
            if only := sorted(names[having] - names[lacking]):
                text = f"{count(len(only), 'tensor')} only in {labels[having]}"
                facts = f"{shorten(only, 3)}; not in {labels[lacking]}"
                yield Diagnostic("unlike_inputs", text, hint=hint, facts=facts)
        for name, meta in full[-1].items():
            found = full[number].get(name)
            if found is None:
                continue
            shapes = [format_shape(of.header_shape) for of in (found, meta)]
            hint = "inputs of one model, or --exclude with these tensors"
            if found.dtype != meta.dtype:
                facts = f"{found.dtype} in {labels[number]}, {meta.dtype} in {labels[-1]}"
                text = "inputs of different types"
                yield Diagnostic("unlike_inputs", text, hint=hint, facts=facts, tensor=name)
            if shapes[0] != shapes[1]:
                facts = f"{shapes[0]} in {labels[number]}, {shapes[1]} in {labels[-1]}"
                text = "inputs of different shapes"
                yield Diagnostic("unlike_inputs", text, hint=hint, facts=facts, tensor=name)


def _provenance(plans: Sequence[Plan], weights: Sequence[float]) -> dict[str, str]:
    """Return the attributes that say how the outputs are made; see `Plan.provenance`.

    They are those of the last input, and the name, the step and the weight of each.
    """
    found, key = dict(plans[-1].provenance), f"{PROVENANCE}src_strategy"
    if len({plan.provenance.get(key) for plan in plans}) > 1:
        found.pop(key, None)
    texts = []
    for plan, weight in zip(plans, weights, strict=True):
        (catalog,) = plan.inputs
        name = Path(os.path.abspath(catalog.root)).name  # noqa: PTH100, it resolves ".."
        texts.append(f"{name}{f' at {catalog.step}' if catalog.step else ''}: {weight!r}")
    found[f"{PROVENANCE}average"] = ", ".join(texts)
    return found
